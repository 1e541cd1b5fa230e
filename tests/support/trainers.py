"""Tiny trainings by the Trainer of Transformers, of equal losses wherever they run."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerated import stay_on_processors
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, TrainerCallback, TrainingArguments, set_seed

from async_ckpt import files
from async_ckpt.integrations.transformers import AsyncCheckpointing

STEPS = 8


class Files(AsyncCheckpointing):
    """Writes the files that the plain Trainer writes."""


class Archives(AsyncCheckpointing):
    """Writes an archive beside the model."""

    layout = "archive"


OURS = [Files, Archives]


class At(TrainerCallback):
    """Calls a function at the end of a step."""

    def __init__(self, step: int, do: Callable[[], Any]) -> None:
        self._step, self._do = step, do

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            self._do()


class Kept:
    """A processor of which a folder has one file. `before` is called ahead of its writing, wherever that happens."""

    def __init__(self, before: Callable[[], Any]) -> None:
        self._before = before

    def save_pretrained(self, folder: str) -> None:
        self._before()
        Path(folder, "processor.json").write_text("{}")


def tiny_model(**config: Any) -> GPT2LMHeadModel:
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 64, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**{**shape, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **config}))


def sequences(number: int = 64) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, 64, (16,), generator=draw) for _ in range(number)]
    return [{"input_ids": one, "labels": one} for one in tokens]


def arguments(folder: object, **given: Any) -> TrainingArguments:
    options = {
        "max_steps": STEPS,
        "save_steps": 2,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 1,
    }
    return TrainingArguments(str(folder), **{**options, **given})


def trainer_of(
    kind: type[Any], folder: object, *, model: Any = None, callbacks: Any = (), processor: Any = None, **given: Any
) -> Any:
    """A training that begins, and goes on, with the same losses, dropout and order of data included."""
    set_seed(1)
    model = tiny_model() if model is None else model()
    with warnings.catch_warnings():  # of the framework about its own arguments
        warnings.simplefilter("ignore", FutureWarning)
        args = arguments(folder, **given)
    trainer = kind(
        model=model,
        args=args,
        train_dataset=sequences(),
        eval_dataset=sequences(4),
        callbacks=list(callbacks),
        processing_class=processor,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def losses(trainer: Any) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}


def names_in(folder: Path) -> set[str]:
    """The files of the framework in a checkpoint, without ours beside them."""
    return {path.name for path in folder.iterdir()} - {"_async_ckpt.digests.json", "_async_ckpt.loaders.json"}


def folders(folder: object) -> list[str]:
    """The checkpoints in a folder, and what is hidden there."""
    names = (path.name for path in Path(str(folder)).iterdir())
    return sorted(name for name in names if name.startswith(("checkpoint", ".")))


def whole_in(place: str) -> dict[str, list[str]]:
    """The files of each checkpoint that counts at a path or URL. On a disk, each that has its name does."""
    found = {}
    for path in files.list_dir(place) if files.isdir(place) else []:
        name = path.rpartition("/")[2]
        if name.startswith("checkpoint"):
            names = [file.rpartition("/")[2] for file in files.list_dir(path)]
            if "://" not in place or "trainer_state.json" in names:
                found[name] = names
    return found


def sharded(kind: type[Any], state_dict_type: str = "SHARDED_STATE_DICT", version: int = 2) -> type[Any]:
    """The trainer under FSDP2, or FSDP1, on processors. accelerate sets that type on accelerators only: it is set by hand."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    if version == 1:
        stay_on_processors()

    class Sharded(kind):  # type: ignore[misc]
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            # Each AcceleratorState() takes it from there anew.
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.accelerator.state.distributed_type = DistributedType.FSDP
            self.accelerator.state.device = torch.device("cpu")  # FSDP1 takes none with a number
            self.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
                fsdp_version=version,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["GPT2Block"],
                state_dict_type=state_dict_type,
                cpu_ram_efficient_loading=False,
                reshard_after_forward=True if version == 2 else "FULL_SHARD",
            )
            self.is_fsdp_enabled = True

    return Sharded


def untied() -> GPT2LMHeadModel:
    """A model without dropout, whose losses do not depend on the number of ranks, but for the order of sums."""
    return tiny_model(tie_word_embeddings=False, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)


def with_adapter(model: GPT2LMHeadModel) -> Any:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1)
    with warnings.catch_warnings():  # it asks the model by a name that is going
        warnings.simplefilter("ignore", FutureWarning)
        return peft.get_peft_model(model, config)


def untied_with_adapter() -> Any:
    return with_adapter(untied())
