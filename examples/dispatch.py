"""Workers as SkyRL's trainer has them, all in this process: models cut into ranks, and the files that FSDP ranks write.

In: models with their optimizers, by the ids of their owners. Out: folders in SkyRL's layout, and models filled from them.
Knows nothing of: archives, `async_ckpt`'s saving.

    model_world_size_{W}_rank_{R}.pt, optim_…, extra_state_…     every rank's part
    fsdp_config.json, huggingface/                               by rank 0
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from async_ckpt import RngState

_STRATEGY: Final = "fsdp2"


@dataclass(frozen=True, slots=True)
class Trainee:
    """What is trained for one owner."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    config: Mapping[str, Any]


class LocalDispatch:
    """The checkpoint methods of SkyRL's `WorkerDispatch`, for models that live here. Each rank has a slice of every tensor."""

    def __init__(self, trainees: Mapping[str, Trainee], *, world_size: int = 1) -> None:
        self._trainees = trainees
        self._world_size = world_size

    def save_checkpoint(self, model: str, ckpt_dir: str, tokenizer: Any = None, model_id: str | None = None) -> None:
        trainee = self._trainee(model, model_id)
        os.makedirs(ckpt_dir, exist_ok=True)
        for rank in range(self._world_size):
            extra = {
                "lr_scheduler": trainee.scheduler.state_dict(),
                "client_state": {},
                "tag": None,
                "fsdp_strategy": _STRATEGY,
                "world_size": self._world_size,
                "rank": rank,
                "rng": RngState("skyrl").state_dict(),
            }
            torch.save(self._cut(trainee.model.state_dict(), rank), self._file(ckpt_dir, "model", rank))
            torch.save(self._cut(trainee.optimizer.state_dict(), rank), self._file(ckpt_dir, "optim", rank))
            torch.save(extra, self._file(ckpt_dir, "extra_state", rank))
        _write_configs(Path(ckpt_dir, "huggingface"), trainee, tokenizer)
        told = {"fsdp_strategy": _STRATEGY, "world_size": self._world_size}
        Path(ckpt_dir, "fsdp_config.json").write_text(json.dumps(told, indent=4))

    def load_checkpoint(
        self,
        model: str,
        ckpt_dir: str,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        model_id: str | None = None,
    ) -> None:
        trainee = self._trainee(model, model_id)
        trainee.model.load_state_dict(self._joined(ckpt_dir, "model"))
        if load_optimizer_states:
            trainee.optimizer.load_state_dict(self._joined(ckpt_dir, "optim"))
        extra = _read(self._file(ckpt_dir, "extra_state", 0))
        if load_lr_scheduler_states:
            trainee.scheduler.load_state_dict(extra["lr_scheduler"])
        RngState().load_state_dict(extra["rng"])

    def save_hf_model(self, model: str, export_dir: str, tokenizer: Any) -> None:
        """Written aside and renamed, so that whoever watches the folder sees all of it or nothing."""
        from safetensors.torch import save_file

        trainee = self._trainee(model, None)
        parent = Path(export_dir).absolute().parent
        aside = Path(tempfile.mkdtemp(prefix=".tmp-hf-export-", dir=parent))
        save_file(trainee.model.state_dict(), aside / "model.safetensors", metadata={"format": "pt"})
        _write_configs(aside, trainee, tokenizer)
        if os.path.isdir(export_dir):
            os.rmdir(export_dir)
        os.replace(aside, export_dir)

    def _trainee(self, model: str, model_id: str | None) -> Trainee:
        if model != "policy":
            raise ValueError(f"no workers have a {model!r} here")
        return self._trainees[next(iter(self._trainees)) if model_id is None else model_id]

    def _file(self, folder: str, what: str, rank: int) -> Path:
        return Path(folder, f"{what}_world_size_{self._world_size}_rank_{rank}.pt")

    def _cut(self, state: Any, rank: int) -> Any:
        """The same structure with the rank's rows of every tensor; what has no rows is every rank's."""
        if isinstance(state, Tensor):
            return (state.tensor_split(self._world_size)[rank] if state.ndim else state).clone()
        if isinstance(state, Mapping):
            return {key: self._cut(value, rank) for key, value in state.items()}
        return state

    def _joined(self, folder: str, what: str) -> Any:
        return _join([_read(self._file(folder, what, rank)) for rank in range(self._world_size)])


def _join(parts: Sequence[Any]) -> Any:
    """What was cut."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(list(parts)) if first.ndim else first
    if isinstance(first, Mapping):
        return {key: _join([part[key] for part in parts]) for key in first}
    return first


def _read(path: Path) -> Any:
    return torch.load(path, weights_only=False)  # numpy's random state, as SkyRL writes it, is no plain data


def _write_configs(folder: Path, trainee: Trainee, tokenizer: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(trainee.config), indent=2))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
