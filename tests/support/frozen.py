"""A training of which a part is frozen, which its saves say is unchanged."""

from __future__ import annotations

from typing import Any

import torch

from async_ckpt import AsyncCheckpointer

BIG = 300_000  # bytes that a frozen group has at least, and a step without it has not


class Training:
    """A policy that is trained, and a frozen reference."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(50, 50)
        self.reference = torch.nn.Linear(300, 300)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self) -> None:
        self.model(torch.randn(2, 50)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "ref": self.reference, "optimizer": self.optimizer, "epoch": 3}


def save(ckpt: AsyncCheckpointer, training: Training, step: int, **options: Any) -> int:
    """The bytes that a step took."""
    training.step()
    return ckpt.save(training.state, step=step, **{"unchanged": {"ref"}, **options}).result().num_bytes
