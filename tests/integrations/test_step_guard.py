"""The guard that trainers find by themselves: what changes a weight waits until the copies are made, whichever method it is."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from states import MIB

import async_ckpt
from async_ckpt.core.staging.guard import deferrable, gate_of, unwrapped
from async_ckpt.integrations.common.step_guard import StepGuard


def weights() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(MIB // 2))]


class ScheduleFree(torch.optim.SGD):
    """Changes the weights in `train` and `eval` as well, and has hooks in `step`."""

    def _add(self, number: int, mode: bool) -> None:
        for group in self.param_groups:
            if group.get("train_mode", True) != mode:
                for parameter in group["params"]:
                    parameter.data.add_(number)
            group["train_mode"] = mode

    def train(self) -> None:
        self._add(1, True)

    def eval(self) -> None:
        self._add(-1, False)


class Homemade:
    """An optimizer that is not one of torch, and has no hooks."""

    def __init__(self, parameters: list[torch.nn.Parameter], lr: float) -> None:
        self.param_groups, self.state, self.lr = [{"params": parameters}], {}, lr

    def state_dict(self) -> dict[str, Any]:
        return {}

    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(self.lr)


class Wrapper:
    """As accelerate's with a scaler: it keeps the step that the optimizer had."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self._step = optimizer, optimizer.step

    def step(self) -> None:
        self._step()


class Holder:
    """A snapshot that notes what the weights are while a method waits for it."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter, self.seen = parameter, []

    def hold(self) -> None:
        self.seen.append(self._parameter[0].item())


def held_by(optimizer: Any) -> tuple[torch.nn.Parameter, Holder]:
    """A snapshot under way, guarded by the choice for this optimizer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        (guard,) = StepGuard()([optimizer])
    inner = getattr(optimizer, "optimizer", optimizer)
    parameter = inner.param_groups[0]["params"][0]
    parameter.grad = torch.ones_like(parameter)
    holder = Holder(parameter)
    for one in unwrapped(guard):
        gate_of(one).close(holder.hold)
    return parameter, holder


MADE: dict[str, Callable[[], Any]] = {
    "torch's": lambda: torch.optim.SGD(weights(), lr=0.5),
    "schedule-free": lambda: ScheduleFree(weights(), lr=0.5),
    "homemade": lambda: Homemade(weights(), lr=0.5),
    "wrapped": lambda: Wrapper(Homemade(weights(), lr=0.5)),
}


@pytest.mark.parametrize("made", MADE.values(), ids=[*MADE])
def test_a_step_waits_before_it_changes_anything(made):
    optimizer = made()
    parameter, holder = held_by(optimizer)
    optimizer.step()
    assert holder.seen[0] == 1.0
    assert parameter[0] == 0.5


def test_a_change_of_the_mode_waits_and_a_call_that_changes_none_does_not():
    optimizer = ScheduleFree(weights(), lr=0.5)
    optimizer.eval()
    parameter, holder = held_by(optimizer)
    optimizer.eval()
    assert holder.seen == []
    optimizer.train()
    assert holder.seen == [0.0]
    assert parameter[0] == 1.0


@pytest.mark.parametrize("made", [MADE["schedule-free"], MADE["homemade"]])
def test_its_copies_are_deferred_and_are_of_the_instant(made):
    optimizer, state = made(), StepGuard()
    parameter = optimizer.param_groups[0]["params"][0]
    for _ in range(3):
        parameter.grad, before = torch.ones_like(parameter), parameter[0].item()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            guard = state([optimizer])
        with async_ckpt.snapshot({"weight": parameter}, guard=guard) as snap:
            optimizer.step()
            assert snap["weight"][0] == before
        assert deferrable(unwrapped(guard), [parameter])


def test_it_is_said_once_what_is_held_and_what_is_not():
    in_backward = torch.optim.SGD(weights(), lr=0.5)
    in_backward.param_groups[0]["params"][0].register_post_accumulate_grad_hook(lambda _: None)
    choose = StepGuard()
    optimizers = [MADE["schedule-free"](), MADE["homemade"](), MADE["torch's"](), in_backward]
    with pytest.warns(UserWarning, match="cannot be guarded by a hook alone") as told:
        guards = choose(optimizers)
    assert len(guards) == 3
    assert choose(optimizers) == guards
    assert [str(one.message).partition(": ")[2] for one in told] == [
        "these methods, and step(), wait instead until all is copied",
        "its step() waits instead until all is copied",
        "training waits at each save until all is copied",
    ]


@pytest.mark.parametrize("name", ["AdamWScheduleFree", "ScheduleFreeWrapper"])
def test_schedulefree_itself_is_held_by_all_its_methods(name):
    made = getattr(pytest.importorskip("schedulefree", reason="schedulefree is not installed"), name)
    optimizer = made(weights(), lr=0.5) if name == "AdamWScheduleFree" else made(torch.optim.SGD(weights(), lr=0.5))
    optimizer.train()
    parameter, holder = held_by(optimizer)
    for method in (optimizer.step, optimizer.eval, optimizer.train):
        before, count = parameter[0].item(), len(holder.seen)
        method()
        assert holder.seen[count] == before
        assert len(holder.seen) == count + 1


def test_the_8_bit_optimizer_of_bitsandbytes_is_guarded_as_one_of_torch():
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    optimizer = bitsandbytes.optim.AdamW8bit(weights(), lr=0.5)
    parameter, holder = held_by(optimizer)
    optimizer.step()
    assert holder.seen == [1.0]
    assert parameter[0] != 1.0
