"""Trainings whose optimizer has a state dict of its own, for tests on real ranks."""

from typing import Any

import torch
import torch.distributed as dist
from containers import Container, Lazy, Parts, adamw
from rank_states import fsdp, fsdp_tp, keep_full, network, trained
from torch import nn

from async_ckpt.core.state.optimizers import parts_of

__all__ = [
    "Lazy",
    "Wrapper",
    "contained",
    "fsdp",
    "fsdp_tp",
    "keep",
    "model_of",
    "network",
    "sgd",
    "stages",
    "told",
    "trained",
]


class Wrapper(torch.optim.Optimizer):
    """As accelerate's: it is no optimizer by itself."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def fused(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01, fused=True)


def contained(made: dict[str, Any], kind: Any = Container, steps: int = 1, **how: Any) -> dict[str, Any]:
    """With the optimizer replaced, that has taken steps or not; each rank on other data."""
    model = made["model"]
    if kind is Wrapper:
        optimizer: Any = Wrapper(fused([{"params": list(model.parameters())}]))
    else:
        optimizer = kind(model, make=fused, **how)
    model.zero_grad()
    for step in range(steps):
        data = torch.Generator().manual_seed(dist.get_rank() + step)
        model(torch.randn(4, 13, generator=data)).square().sum().backward()
        optimizer.step()
    model.zero_grad()
    return {"model": Parts(model) if kind is Container else model, "optimizer": optimizer}


def model_of(state: dict[str, Any]) -> nn.Module:
    model = state["model"]
    return model.parts[0] if isinstance(model, Parts) else model


def keep(state: dict[str, Any], path: str) -> None:
    """Leave there all weights, and what the optimizer has of each, as full tensors by name."""
    names = {id(one): name for name, one in model_of(state).named_parameters()}
    moments = {
        f"{names[id(one)]}.{key}": value
        for part in parts_of(state["optimizer"])
        for one, values in part.state.items()
        for key, value in values.items()
    }
    keep_full({"model": state["model"], "optimizer": moments}, path)


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1 + torch.initial_seed())


def stages(own: tuple[int, ...], seed: int, kind: Any = None) -> dict[str, Any]:
    """These stages of a model of four, with one container for them."""
    torch.manual_seed(seed)
    parts = [nn.ModuleDict({f"layer{n}": nn.Linear(30, 1000)}) for n in range(4)]
    parts = [part for n, part in enumerate(parts) if n in own]
    container = Container(*parts, make=kind or adamw)
    sum(one.square().sum() for part in parts for one in part.parameters()).backward()
    container.step()
    container.zero_grad()
    return {"model": Parts(*parts), "optimizer": container}


def told(state: dict[str, Any]) -> dict[str, Any]:
    flat = {**state["optimizer"].state_dict(), **state["model"].state_dict()}
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in flat.items()}
