"""Trainings of which a part is frozen."""

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


class Adapted(torch.nn.Module):
    """A frozen base of two tensors that are large enough to be taken over, and an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Sequential(torch.nn.Linear(512, 520, bias=False), torch.nn.Linear(520, 530, bias=False))
        self.base.requires_grad_(False)
        self.down, self.up = torch.nn.Linear(512, 4, bias=False), torch.nn.Linear(4, 530, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    model(torch.randn(2, 512)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def save(ckpt: AsyncCheckpointer, training: Training, step: int, **options: Any) -> int:
    """The bytes that a step took."""
    training.step()
    return ckpt.save(training.state, step=step, **{"unchanged": {"ref"}, **options}).result().num_bytes
