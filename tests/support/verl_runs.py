"""Tiny trainings with verl's checkpoint manager, or ours, on processors, and with the saves and loads of verl's own trainer.

verl's engine wants a GPU. Here are models as it makes them, under FSDP2 or FSDP, and rank 0 runs what verl's driver runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import random
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

warnings.simplefilter("ignore")
os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard  # noqa: E402
from torch.distributed.fsdp.wrap import ModuleWrapPolicy  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM  # noqa: E402
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer  # noqa: E402
from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.trainer.ppo.ray_trainer import RayPPOTrainer  # noqa: E402
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path  # noqa: E402
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager  # noqa: E402

from async_ckpt.integrations.verl import VerlCheckpointManager  # noqa: E402

torch.set_num_threads(1)
VOCABULARY = 4096


# A weight is larger than what is copied at once.
SIZES: Mapping[str, int] = MappingProxyType({"vocab_size": VOCABULARY, "hidden_size": 160, "intermediate_size": 64})


def model_of(*, tied: bool = False, lora: bool = False, sizes: Mapping[str, int] = SIZES) -> torch.nn.Module:
    torch.manual_seed(0)
    config = Qwen2Config(
        **sizes, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
        tie_word_embeddings=tied, architectures=["Qwen2ForCausalLM"],
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    if lora:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"]))
    return model


def tokenizer_of() -> PreTrainedTokenizerFast:
    words = models.WordLevel({f"w{n}": n for n in range(10)} | {"[UNK]": 10}, unk_token="[UNK]")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="[UNK]")


def spread(model: torch.nn.Module, version: int) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if version == 1:
        return FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({Qwen2DecoderLayer}), device_id=torch.device("cpu"),
            device_mesh=mesh, use_orig_params=any(not p.requires_grad for p in model.parameters()),
        )  # fmt: skip
    for module in model.modules():
        if isinstance(module, Qwen2DecoderLayer):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Loader:
    """What the trainer keeps of its data loader."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]

    def __len__(self) -> int:
        return 1_000_000


class Training:
    """Trains one model. This rank's part of the losses is `losses`, by step.

    `kind` is "ours" or "theirs". With `role`, the folder of the model has this name.
    """

    def __init__(
        self, root: Any, kind: str = "ours", *, version: int = 2, batch: int = 4, tied: bool = False, lora: bool = False,
        keep: int | None = None, role: str = "actor", moves_state: bool = False, sizes: Mapping[str, int] = SIZES,
        **config: Any,
    ) -> None:  # fmt: skip
        self.root, self.role, self.batch, self.global_steps = str(root), role, batch, 0
        self.model = spread(model_of(tied=tied, lora=lora, sizes=sizes), version)
        self.vocabulary = sizes["vocab_size"]
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.9)
        config = {"async_save": kind == "ours", **config}
        self.manager = (VerlCheckpointManager if kind == "ours" else FSDPCheckpointManager)(
            model=self.model, optimizer=self.optimizer, lr_scheduler=self.scheduler,
            processing_class=tokenizer_of(), checkpoint_config=CheckpointConfig(**config),
            **({"moves_state": moves_state} if kind == "ours" else {}),
        )  # fmt: skip
        self.losses: dict[int, float] = {}
        self.train_dataloader = Loader()
        self.trainer = SimpleNamespace(
            config=OmegaConf.create(
                {
                    "trainer": {
                        "default_local_dir": self.root, "default_hdfs_dir": None, "resume_mode": "auto",
                        "max_actor_ckpt_to_keep": keep, "del_local_ckpt_after_load": False,
                    },
                    "actor_rollout_ref": {"actor": {"checkpoint": config}},
                }
            ),
            actor_rollout_wg=self.manager, use_critic=False, train_dataloader=self.train_dataloader,
        )  # fmt: skip
        self.keep = keep
        seeds = 100 + dist.get_rank()
        torch.manual_seed(seeds)
        np.random.seed(seeds)
        random.seed(seeds)

    # --- what verl's driver does, on rank 0

    def save(self) -> None:
        self.trainer.global_steps = self.global_steps
        if dist.get_rank() == 0:
            with contextlib.redirect_stdout(io.StringIO()):
                RayPPOTrainer._save_checkpoint(self.trainer)
        else:
            folder = f"{self.root}/global_step_{self.global_steps}/{self.role}"
            self.manager.save_checkpoint(folder, None, self.global_steps, max_ckpt_to_keep=self.keep)

    def resume(self) -> int:
        """Load what the tracker names, if anything. Returns the step."""
        if dist.get_rank() == 0:
            with contextlib.redirect_stdout(io.StringIO()):
                RayPPOTrainer._load_checkpoint(self.trainer)
            self.global_steps = getattr(self.trainer, "global_steps", 0)
            return self.global_steps
        with contextlib.redirect_stdout(io.StringIO()):
            folder = find_latest_ckpt_path(self.root)
            if folder is not None:
                self.manager.load_checkpoint(f"{folder}/{self.role}", del_local_after_load=False)
        self.global_steps = 0 if folder is None else int(folder.rpartition("_")[2])
        return self.global_steps

    # --- training

    def train(self, last: int, every: int | None = 2) -> dict[int, float]:
        """Train until a step, and save at some of them."""
        while self.global_steps < last:
            draw = torch.Generator().manual_seed(self.global_steps)
            rows = torch.randint(0, self.vocabulary, (self.batch * dist.get_world_size(), 8), generator=draw)
            noise = torch.rand(()) + np.random.rand() + random.random()  # of this rank alone
            mine = rows[dist.get_rank() :: dist.get_world_size()]
            loss = self.model(input_ids=mine, labels=mine).loss
            (loss * (1.0 + 0.01 * noise.item())).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.global_steps += 1
            self.train_dataloader.at = self.global_steps
            self.losses[self.global_steps] = loss.item()
            if every and self.global_steps % every == 0:
                self.save()
        return self.losses

    def digest(self, *, only_adapters: bool = False) -> dict[str, str]:
        """A digest of each whole weight, by name."""
        version_1 = isinstance(self.model, FullyShardedDataParallel)
        context = FullyShardedDataParallel.summon_full_params(self.model) if version_1 else contextlib.nullcontext()
        with context, torch.no_grad():
            whole = {
                name.replace("_fsdp_wrapped_module.", ""): value.full_tensor() if isinstance(value, DTensor) else value
                for name, value in self.model.named_parameters()
            }
            return {
                name: hashlib.sha256(value.detach().float().clone().numpy().tobytes()).hexdigest()
                for name, value in whole.items()
                if not only_adapters or "lora_" in name
            }


def tracked(root: Any) -> int | None:
    """The step that the tracker names."""
    path = Path(root, "latest_checkpointed_iteration.txt")
    return int(path.read_text()) if path.exists() else None


def files_in(folder: Any) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file())


__all__ = [name for name in dir() if not name.startswith("_") and name not in ("tempfile", "annotations")]
