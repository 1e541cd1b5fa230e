"""The guard of optimizers that consist of others: whichever of them is stepped, it waits for the copy."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from contained_ranks import Wrapper
from containers import Container, adamw
from racing import Call, Gate
from states import open_run
from torch import nn

from async_ckpt import AsyncCheckpointer
from async_ckpt.core.staging import snapshot as stager
from async_ckpt.core.staging.guard import deferrable, unwrapped
from async_ckpt.core.state.optimizers import parts_of


class Held:
    """A run whose copies behind `save` wait for the test."""

    def __init__(self, ckpt: AsyncCheckpointer, gate: Gate) -> None:
        self.ckpt, self.gate = ckpt, gate

    def stepping(self, optimizer: Any) -> Call:
        """A step on another thread, once it is held, or through."""
        call = Call(optimizer.step)
        call.wait_until_inside("hold")
        return call


@pytest.fixture
def held(tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    fill = stager.Snapshot._fill_later
    monkeypatch.setattr(stager.Snapshot, "_fill_later", lambda *a: (gate.passed(), fill(*a)))
    with open_run(tmp_path) as ckpt:
        yield Held(ckpt, gate)
        gate.open()


def part(width: int = 600) -> nn.Module:
    """Weights that are large enough to be copied later."""
    return nn.ModuleDict({"layer": nn.Linear(width, width)})


def with_gradients(*parts: nn.Module) -> list[nn.Parameter]:
    found = [p for one in parts for p in one.parameters()]
    for p in found:
        p.grad = torch.ones_like(p)
    return found


def made(*, several: bool = False) -> tuple[list[nn.Module], Container]:
    """A container that has taken a step, with the gradients of the next."""
    parts = [nn.ModuleDict({f"layer{n}": nn.Linear(600, 600)}) for n in range(2)]
    with_gradients(*parts)
    container = Container(*parts, several=several)
    container.step()
    return parts, container


STEPPED = {
    "the container": lambda container: container,
    "the first inside": lambda container: container.optimizers[0],
    "the last inside": lambda container: container.optimizers[-1],
}


@pytest.mark.parametrize("several", [False, True], ids=["one for each part", "several"])
@pytest.mark.parametrize("who", STEPPED)
def test_whichever_is_stepped_waits_and_the_old_values_are_saved(held, who, several):
    parts, container = made(several=several)
    state = {"model": nn.ModuleList(parts), "optimizer": container}
    want = {name: value.clone() for name, value in container.state_dict().items() if torch.is_tensor(value)}
    weights = [p.detach().clone() for p in state["model"].parameters()]
    handle = held.ckpt.save(state, 1, guard=container)
    held.gate.wait_reached()
    stepping = held.stepping(STEPPED[who](container))
    assert stepping.is_alive()
    assert all(torch.equal(a, b) for a, b in zip(weights, state["model"].parameters(), strict=True))
    held.gate.open()
    stepping.outcome()
    handle.result()

    saved = held.ckpt.load(1)
    assert all(torch.equal(saved["optimizer"][name], value) for name, value in want.items())
    found = [saved["model"][name] for name, _ in state["model"].named_parameters()]
    assert all(torch.equal(a, b) for a, b in zip(found, weights, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(weights, state["model"].parameters(), strict=True))


def test_moments_that_the_optimizers_inside_have_are_copied_later_too():
    _, container = made()
    tensors = [value for value in container.state_dict().values() if torch.is_tensor(value)]
    large = [i for i, tensor in enumerate(tensors) if tensor.nbytes >= 2**20]
    assert len(large) == 4
    assert sorted(deferrable(unwrapped(container), tensors)) == large


def test_nothing_of_a_capturable_optimizer_inside_is_copied_later():
    """Replaying a graph runs no hooks, and the container's own groups say nothing of it."""
    parts, container = made()
    for group in container.optimizers[1].param_groups:
        group["capturable"] = True
    tensors = [p for one in parts for p in one.parameters()]
    assert sorted(deferrable(unwrapped(container), tensors)) == [0]


def test_the_hooks_of_a_container_are_called_and_that_of_the_guard_once_for_each(tmp_path):
    _, container = made()
    called: list[str] = []
    container.register_step_pre_hook(lambda *_: called.append("container"))
    for one in container.optimizers:
        one.register_step_pre_hook(lambda *_: called.append("inside"))
    before = [len(one._optimizer_step_pre_hooks) for one in (container, *container.optimizers)]
    with open_run(tmp_path, guard=container) as ckpt:
        for step in range(3):
            ckpt.save({"optimizer": container}, step)
            container.step()
    assert called == ["container", "inside", "inside"] * 3
    after = [len(one._optimizer_step_pre_hooks) for one in (container, *container.optimizers)]
    assert after == [number + 1 for number in before]


@pytest.mark.parametrize("wrap", [Wrapper, lambda one: Wrapper(Wrapper(one)), lambda one: [one]])
def test_the_optimizers_inside_of_a_wrapped_container_are_found(held, wrap):
    parts, container = made()
    held.ckpt.save({"model": nn.ModuleList(parts)}, 1, guard=wrap(container))
    held.gate.wait_reached()
    stepping = held.stepping(container.optimizers[1])
    assert stepping.is_alive()
    held.gate.open()
    stepping.outcome()


def test_the_optimizer_inside_of_the_named_one_of_torch_is_guarded(held):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what else lies beside it
        from torch.distributed.optim.named_optimizer import _NamedOptimizer

    model = part()
    with_gradients(model)
    optimizer = _NamedOptimizer(model.named_parameters(), torch.optim.AdamW, None, model)
    assert unwrapped(optimizer) == (optimizer._optimizer,)
    held.ckpt.save({"model": model}, 1, guard=optimizer)
    held.gate.wait_reached()
    stepping = held.stepping(optimizer)
    assert stepping.is_alive()
    held.gate.open()
    stepping.outcome()


class Around(torch.optim.Optimizer):
    """Changes parameters itself, before the one inside does, as those do that look ahead."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.base = inner
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(1)
        self.base.step()


def test_an_optimizer_that_changes_parameters_itself_around_another_is_held_before_it_does(held):
    model = part()
    optimizer = Around(torch.optim.SGD(with_gradients(model), lr=1.0))
    want = model["layer"].weight.detach().clone()
    held.ckpt.save({"model": model}, 1, guard=optimizer)
    held.gate.wait_reached()
    stepping = held.stepping(optimizer)
    assert torch.equal(model["layer"].weight, want)
    held.gate.open()
    stepping.outcome()
    assert torch.equal(held.ckpt.load(1)["model"]["layer.weight"], want)


class Uninitialised(torch.optim.Optimizer):
    def __init__(self) -> None:
        self.param_groups: list[Any] = []

    def step(self, closure: Any = None) -> None: ...


def test_what_has_no_hooks_and_holds_no_optimizer_is_refused(tmp_path):
    with pytest.raises(TypeError, match="guard must be a torch optimizer"):
        AsyncCheckpointer(tmp_path, guard=Uninitialised())


def test_an_optimizer_that_is_held_for_another_reason_is_no_part():
    model, other = part(), part()
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.of_the_critic = torch.optim.SGD(other.parameters())  # type: ignore[attr-defined]
    assert parts_of(optimizer) == [optimizer]
    assert unwrapped(optimizer) == (optimizer,)


def test_a_container_may_hold_them_in_any_way():
    parts, container = made()
    inner = container.optimizers
    for kept in (tuple(inner), {"a": inner[0], "b": inner[1]}, [*inner, inner[0]]):
        container.optimizers = kept  # type: ignore[assignment]
        assert parts_of(container) == inner
    outer = Container(*parts, make=adamw)
    outer.optimizers = [container]
    assert parts_of(outer) == inner
    assert unwrapped(outer) == (outer, container, *inner)
