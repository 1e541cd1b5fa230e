"""Optimizers with state dicts of their own: containers of several, flat and nested by names, and some that override one method alone."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.95), foreach=False)


def biases_apart(named: Iterable[tuple[str, nn.Parameter]]) -> list[list[tuple[str, nn.Parameter]]]:
    """For two groups of an optimizer, or two optimizers: an order that is not the model's."""
    all_of_them = list(named)
    return [
        [pair for pair in all_of_them if pair[1].dim() == 1],
        [pair for pair in all_of_them if pair[1].dim() > 1],
    ]


def group_of(named: list[tuple[str, nn.Parameter]]) -> dict[str, Any]:
    return {"params": [one for _, one in named], "param_names": [name for name, _ in named]}


def flat_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """By the names in its groups."""
    made: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            for key, value in optimizer.state.get(parameter, {}).items():
                made[f"state.{name}.{key}"] = value
            for key, value in group.items():
                if key not in ("params", "param_names"):
                    made[f"param_groups.{name}.{key}"] = value
    return made


def load_flat_state(optimizer: torch.optim.Optimizer, flat: dict[str, Any]) -> None:
    """What it does not own is of no concern to it. Its state goes the way of torch's own loading."""
    state, groups, number = {}, [], 0
    for group in optimizer.param_groups:
        numbers = []
        for name in group["param_names"]:
            own = {k.rpartition(".")[2]: v for k, v in flat.items() if k.rpartition(".")[0] == f"state.{name}"}
            state.update({number: own} if own else {})
            numbers.append(number)
            number += 1
        first = group["param_names"][0]
        keys = [key for key in group if key not in ("params", "param_names")]
        groups.append(
            {**{key: flat[f"param_groups.{first}.{key}"] for key in keys}, "params": numbers}
        )  # a KeyError where the names are others
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def begin(optimizer: torch.optim.Optimizer) -> None:
    """Have it make its state, without a change of any parameter, if it has none yet, and no gradient."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    if optimizer.state or any(one.grad is not None for one in parameters):
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for one in parameters:
        one.grad = torch.zeros_like(one)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad()


class Container(torch.optim.Optimizer):
    """The optimizers of several parts of a model, in one. Of the shape that torchtitan's has."""

    begins = True  # whether its state is made ahead of the first step, as soon as somebody asks for it

    def __init__(self, *parts: nn.Module, make: Make = adamw, several: bool = False, groups: bool = False):
        self.optimizers: list[torch.optim.Optimizer] = []
        for part in parts:
            named = list(part.named_parameters())
            split = biases_apart(named) if several or groups else [named]
            for made in [[one] for one in split] if several else [split]:
                self.optimizers.append(make([group_of(one) for one in made]))
        torch.optim.Optimizer.__init__(self, [p for part in parts for p in part.parameters()], {})

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self.optimizers)

    def __len__(self) -> int:
        return len(self.optimizers)

    def step(self, closure: Any = None) -> None:
        for one in self.optimizers:
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.optimizers:
            one.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for one in self.optimizers:
            if self.begins:
                begin(one)
            made |= flat_state(one)
        return made

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for one in self.optimizers:
            if self.begins:
                begin(one)
            load_flat_state(one, state_dict)


class Lazy(Container):
    """Has no state before the first step."""

    begins = False


class Schedulers:
    """Those of a container, which all have the same to say."""

    def __init__(self, optimizers: Container) -> None:
        self.schedulers = [torch.optim.lr_scheduler.LambdaLR(one, lambda epoch: 0.9**epoch) for one in optimizers]

    def step(self) -> None:
        for one in self.schedulers:
            one.step()

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.schedulers[0].last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for one in self.schedulers:
            one.last_epoch = state_dict["last_epoch"]
            one._step_count = one.last_epoch + 1
            one._last_lr = [rate * 0.9**one.last_epoch for rate in one.base_lrs]


class Parts:
    """The modules of several parts, with one state dict; no module itself."""

    def __init__(self, *parts: nn.Module) -> None:
        self.parts = parts

    def state_dict(self) -> dict[str, Any]:
        return {name: value for part in self.parts for name, value in part.state_dict().items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part in self.parts:
            part.load_state_dict(state_dict, strict=False)
