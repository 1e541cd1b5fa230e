"""A training for the referee: a few steps, some saves, a resume from the newest checkpoint, and a digest of the weights at the end.

In: the name of a training, a folder, whether the eye is wide. Out: checkpoints in the folder, "resumed from step N" on stdout, and
the digest beside the folder. Knows nothing of: kills.
"""

import hashlib
import os
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch

import async_ckpt
from tests.matrices.referee.referee_eye import open_eye

STEPS, EVERY = 6, 2
Resumed = tuple[int, Any]
"""The step that a training went on from, and its model at the end."""


def _built() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _trained(model: Any, optimizer: Any, step: int) -> None:
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()


def _newest(folder: Path, name: str = "ck-*") -> Path | None:
    found = [(int(match[0]), path) for path in folder.glob(name) if (match := re.search(r"\d+", path.name))]
    return max(found)[1] if found else None


def _acknowledge(folder: Path, step: int) -> None:
    """Leave a mark, by which the referee knows that the training was told of a save."""
    (folder / f"told-{step}").touch()


# --- loops ------------------------------------------------------------------------------------------------------------


def _loop(folder: Path) -> Resumed:
    return _run_of(folder, *_built())


def _run_of(folder: Path, model: Any, optimizer: Any) -> Resumed:
    state = {"model": model, "optimizer": optimizer, "step": 0}
    with async_ckpt.AsyncCheckpointer(str(folder / "run"), guard=optimizer) as checkpoints:
        begun = checkpoints.restore(state)
        first = int(state["step"]) if begun else 0
        for step in range(first + 1, STEPS + 1):
            _trained(model, optimizer, step)
            state["step"] = step
            if step % EVERY == 0:
                checkpoints.save(state, step=step).result()
                _acknowledge_on_first_rank(folder, step)
    return first, model


def _acknowledge_on_first_rank(folder: Path, step: int) -> None:
    if os.environ.get("RANK", "0") == "0":
        _acknowledge(folder, step)


def _files_of(save: Callable[[Any, Path], Any]) -> Callable[[Path], Resumed]:
    def train(folder: Path) -> Resumed:
        model, optimizer = _built()
        first, newest = 0, _newest(folder)
        if newest is not None:
            kept = torch.load(newest)
            model.load_state_dict(kept["model"])
            optimizer.load_state_dict(kept["optimizer"])
            first = kept["step"]
        for step in range(first + 1, STEPS + 1):
            _trained(model, optimizer, step)
            if step % EVERY == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                save(state, folder / f"ck-{step}.pt")
                _acknowledge(folder, step)
        return first, model

    return train


def _sharded() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    model, _ = _built()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _fsdp2(folder: Path) -> Resumed:
    return _run_of(folder, *_sharded())


def _plain_fsdp2(folder: Path) -> Resumed:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = _sharded()
    first, newest = 0, _newest(folder)
    if newest is not None:
        weights, moments = get_state_dict(model, optimizer)
        kept = {"model": weights, "optimizer": moments}
        dcp.load(kept, checkpoint_id=newest)
        set_state_dict(model, optimizer, model_state_dict=kept["model"], optim_state_dict=kept["optimizer"])
        first = int(newest.name.rpartition("-")[2])
    for step in range(first + 1, STEPS + 1):
        _trained(model, optimizer, step)
        if step % EVERY == 0:
            weights, moments = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / f"ck-{step}")
            _acknowledge_on_first_rank(folder, step)
    return first, model


# --- frameworks -------------------------------------------------------------------------------------------------------


def _trainer(plain: bool) -> Callable[[Path], Resumed]:
    def train(folder: Path) -> Resumed:
        from trainers import Files, trainer_of
        from transformers import Trainer, TrainerCallback

        begun = SimpleNamespace(step=0)

        class Begins(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                begun.step = state.global_step

        kind = Trainer if plain else Files
        trainer = trainer_of(kind, folder, callbacks=[Begins()], max_steps=STEPS, save_steps=EVERY)
        trainer.train(resume_from_checkpoint=_newest(folder, "checkpoint-*") is not None)
        return begun.step, trainer.model

    return train


def _lightning(plain: bool) -> Callable[[Path], Resumed]:
    def train(folder: Path) -> Resumed:
        from lightning_runs import batches, kit_of

        from async_ckpt.integrations.lightning import AsyncTarCheckpointIO

        kit = kit_of("pytorch_lightning")
        begun = SimpleNamespace(step=0)

        class Begins(kit.pytorch.Callback):  # type: ignore[misc, name-defined]
            def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Mapping[str, Any]) -> None:
                begun.step = checkpoint["global_step"]  # no step may be left, by which training would start

        saves = kit.ModelCheckpoint(folder, "ck-{step}", every_n_train_steps=EVERY, save_top_k=-1, save_last=True)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
        callbacks, plugins = [Begins(), saves], []
        if not plain:
            checkpoints = AsyncTarCheckpointIO()
            callbacks, plugins = [checkpoints.callback(), *callbacks], [checkpoints]
        trainer = kit.Trainer(max_steps=STEPS, callbacks=callbacks, plugins=plugins, default_root_dir=folder, **quiet)
        model = kit.Model()
        trainer.fit(model, batches(STEPS), ckpt_path="last")
        return begun.step, model

    return train


def _accelerate(plain: bool) -> Callable[[Path], Resumed]:
    def train(folder: Path) -> Resumed:
        from accelerate import Accelerator

        from async_ckpt.integrations.accelerate import AsyncState

        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(*_built())
        checkpoints = accelerator if plain else AsyncState(accelerator)
        first, newest = 0, _newest(folder)
        if newest is not None:
            checkpoints.load_state(str(newest))
            first = int(newest.name.rpartition("-")[2])
        for step in range(first + 1, STEPS + 1):
            _trained(model, optimizer, step)
            if step % EVERY == 0:
                checkpoints.save_state(str(folder / f"ck-{step}"))
        if not plain:
            checkpoints.wait()
        return first, model

    return train


def _saved(state: Any, path: Path) -> None:
    torch.save(state, path)  # by its name, which the referee takes


def _wrapped(state: Any, path: Path) -> None:
    async_ckpt.wrap(torch.save)(state, path).result()


TRAININGS: Final[Mapping[str, Callable[[Path], Resumed]]] = {
    "loop": _loop,
    "FSDP2": _fsdp2,
    "wrap": _files_of(_wrapped),
    "Trainer": _trainer(plain=False),
    "Lightning": _lightning(plain=False),
    "accelerate": _accelerate(plain=False),
    "plain loop": _files_of(_saved),
    "plain FSDP2": _plain_fsdp2,
    "plain Trainer": _trainer(plain=True),
    "plain Lightning": _lightning(plain=True),
    "plain accelerate": _accelerate(plain=True),
}


def _digest(model: Any) -> str:
    found = hashlib.sha256()
    for weights in model.state_dict().values():
        local = weights.full_tensor() if hasattr(weights, "full_tensor") else weights
        found.update(local.detach().cpu().numpy().tobytes())
    return found.hexdigest()


def main(name: str, place: str, eye: str) -> None:
    warnings.simplefilter("ignore")
    folder = Path(place)
    folder.mkdir(parents=True, exist_ok=True)
    open_eye(wide=eye == "wide")
    first, model = TRAININGS[name](folder)
    digest = _digest(model)
    if os.environ.get("RANK", "0") == "0":
        Path(f"{place}.digest").write_text(digest)
    print(f"resumed from step {first}", flush=True)
