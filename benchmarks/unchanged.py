"""What `unchanged="auto"` saves of a LoRA training, and what it costs one in which every tensor changes.

In: a setting. Out: figures by name. Knows nothing of: how a tensor is seen to be unchanged.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Final, TypeAlias

import torch
from torch import nn

from async_ckpt import SaveHandle

from .figures import Saves, one_thread, slowed
from .setting import Setting, side_by_side
from .table import NOISE_SECONDS, Figure, Target
from .workloads import Training

_WIDTH: Final = 2048
_RANK: Final = 16
_NUM_SAVES: Final = 10
# In each round, of calls that take milliseconds.
_CALLS: Final = 5

_Pairs: TypeAlias = list[tuple[float, float]]


class Adapted(nn.Module):
    """A frozen layer, and an adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(_WIDTH, _WIDTH, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(_WIDTH, _RANK, bias=False), nn.Linear(_RANK, _WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x))
        return out


class Lora:
    """A training of adapters over a frozen base of about `num_bytes`."""

    def __init__(self, num_bytes: int) -> None:
        self.model = nn.Sequential(*(Adapted() for _ in range(max(1, num_bytes // (4 * _WIDTH * _WIDTH)))))
        self.parameters = {name: one for name, one in self.model.named_parameters() if one.requires_grad}
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=1e-5, fused=True)
        self._inputs = torch.randn(32, _WIDTH)
        self.step()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    @property
    def adapter(self) -> dict[str, Any]:
        return {"model": self.parameters, "optimizer": self.optimizer}

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.model(self._inputs).square().mean().backward()
        self.optimizer.step()


class Whole(Saves):
    """Each save writes everything."""

    def begin(self) -> SaveHandle:
        return self.checkpointer.save(self._state, next(self._steps), unchanged=())


def unchanged(setting: Setting) -> dict[str, Figure]:
    with one_thread():
        return {**_lora(setting), **_every_tensor_changes(setting)}


def _lora(setting: Setting) -> dict[str, Figure]:
    subject = Lora(setting.training_bytes)
    ours = Saves(setting.folder / "auto", subject.state, guard=subject.optimizer)
    alone = Saves(setting.folder / "adapter", subject.adapter, guard=subject.optimizer)
    pairs, calls = _beside(setting, subject, ours, alone)
    base = 4 * _WIDTH * _WIDTH * len(subject.model)
    what = f"of LoRA over a base of {base / 1e9:.2g} GB"
    return {
        "unchanged_bytes": _bytes(setting.folder / "ten", subject, base + _NUM_SAVES * alone.first_bytes, what),
        "unchanged_lost": Figure(
            f"training seconds lost to one guarded save {what}", "s", "the adapter alone", Target("≤", 1.3), pairs
        ),
        "unchanged_call": Figure(f"the call of such a save {what}", "ms", "the adapter alone", None, calls),
    }


def _bytes(folder: Path, subject: Lora, limit: int, what: str) -> Figure:
    saves = Saves(folder, subject.state)
    with saves.checkpointer:
        written = saves.first_bytes + sum(saves.run().num_bytes for _ in range(_NUM_SAVES - 1))
    title = f"bytes of {_NUM_SAVES} saves {what}"
    return Figure(title, "MB", "the base and ten adapters", Target("≤", 1.1), [(written / 1e6, limit / 1e6)])


def _every_tensor_changes(setting: Setting) -> dict[str, Figure]:
    subject = Training(setting.training_bytes, batch=4)
    looks = Saves(setting.folder / "looks", subject.state, guard=subject.optimizer)
    whole = Whole(setting.folder / "whole", subject.state, guard=subject.optimizer)
    pairs, calls = _beside(setting, subject, looks, whole)
    what = "of a training in which every tensor changes"
    return {
        "unchanged_no_use": Figure(
            f"training seconds lost to one guarded save {what}", "s", "unchanged=()", None, pairs
        ),
        "unchanged_no_use_call": Figure(f"the call of a guarded save {what}", "ms", "unchanged=()", None, calls),
    }


def _beside(setting: Setting, subject: Lora | Training, one: Saves, other: Saves) -> tuple[_Pairs, _Pairs]:
    """The training seconds lost to a save of each, and the milliseconds of its call, in turns."""
    with one.checkpointer, other.checkpointer:
        windows = side_by_side(setting.rounds, partial(slowed, subject, one), partial(slowed, subject, other))
        calls = side_by_side(setting.kept_rounds, partial(_call, one, subject), partial(_call, other, subject))
    return [(max(NOISE_SECONDS, ours.lost), max(NOISE_SECONDS, limit.lost)) for ours, limit in windows], calls


def _call(saves: Saves, subject: Lora | Training) -> float:
    """The shortest of a few calls, in ms."""
    shortest = float("inf")
    for _ in range(_CALLS):
        subject.step()
        begin = perf_counter()
        handle = saves.begin()
        shortest = min(shortest, perf_counter() - begin)
        saves.end(handle)
    return 1e3 * shortest
