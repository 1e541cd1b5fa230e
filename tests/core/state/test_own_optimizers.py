"""Optimizers whose state_dict and load_state_dict are their own get back what they gave, or what is the same in their own form."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from containers import Container, Lazy, Parts, Schedulers, adamw, flat_state, load_flat_state
from dcp_states import dcp, save
from states import difference, open_run
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import async_ckpt
from async_ckpt import StateMismatchError
from async_ckpt.core.state.optimizers import parts_of
from async_ckpt.integrations.dcp import restore


class Trainee:
    """Parts of a model, what optimizes them, and steps."""

    def __init__(self, seed: int, *, parts: int = 1, kind: Any = Container, steps: int = 2, **how: Any) -> None:
        torch.manual_seed(seed)
        self.parts = [
            nn.ModuleDict({f"layer{n}": nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))}) for n in range(parts)
        ]
        self.optimizer = kind(*self.parts, **how)
        self.train(steps)

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            sum(p.square().sum() for part in self.parts for p in part.parameters()).backward()
            self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def inner(self) -> list[Any]:
        """What each parameter has of state, and its settings, by its name."""
        told = []
        for one in parts_of(self.optimizer):
            for group in one.param_groups:
                rest = {k: v for k, v in group.items() if k not in ("params", "param_names")}
                told += [(dict(sorted(one.state.get(p, {}).items())), rest) for p in group["params"]]
        return copy.deepcopy(told)

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for part in self.parts for p in part.parameters()]


BESIDE: dict[str, Callable[[Trainee], dict[str, Any]]] = {
    "a stateful that is no module": lambda one: {"model": Parts(*one.parts)},
    "the modules": lambda one: {"model": nn.ModuleList(one.parts)},
    "nothing": lambda one: {},
}
KINDS: dict[str, dict[str, Any]] = {
    "one optimizer": {},
    "several groups": {"groups": True},
    "several optimizers": {"several": True},
    "two parts": {"parts": 2},
    "two parts, several optimizers": {"parts": 2, "several": True},
    "without state before the first step": {"kind": Lazy},
}


def assert_goes_on_alike(one: Trainee, other: Trainee) -> None:
    for a, b in zip(one.weights(), other.weights(), strict=True):
        assert torch.equal(a, b)
    for _ in range(2):
        assert difference(one.inner, other.inner) is None
        one.train()
        other.train()
    for a, b in zip(one.weights(), other.weights(), strict=True):
        assert torch.equal(a, b)


def copy_weights(one: Trainee, other: Trainee) -> None:
    with torch.no_grad():
        for a, b in zip(one.parts, other.parts, strict=True):
            b.load_state_dict(a.state_dict())


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [0, 3], ids=["fresh", "trained"])
def test_a_container_gets_back_what_it_gave(tmp_path, kind, beside, steps):
    before, live = Trainee(0, **KINDS[kind]), Trainee(1, steps=steps, **KINDS[kind])
    with open_run(tmp_path) as ckpt:
        ckpt.save({**BESIDE[beside](before), "optimizer": before.optimizer}, 1).result()
        assert ckpt.restore({**BESIDE[beside](live), "optimizer": live.optimizer}) == 1
    if beside == "nothing":
        copy_weights(before, live)
    assert_goes_on_alike(before, live)


def test_what_a_container_gave_is_handed_to_it_as_it_was_saved(tmp_path):
    told = []

    class Telling(Container):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            told.append(state_dict)
            super().load_state_dict(state_dict)

    before, live = Trainee(0, kind=Telling, parts=2), Trainee(1, kind=Telling, parts=2)
    with open_run(tmp_path) as ckpt:
        ckpt.save({"optimizer": before.optimizer}, 1).result()
        ckpt.restore({"optimizer": live.optimizer})
    assert len(told) == 1
    assert difference(told[0], before.optimizer.state_dict()) is None


def test_schedulers_with_a_state_of_their_own_come_back_with_their_container(tmp_path):
    before, live = Trainee(0, several=True), Trainee(1, several=True)
    schedules = [Schedulers(one.optimizer) for one in (before, live)]
    for _ in range(3):
        before.train()
        schedules[0].step()
    states = [
        {"parts": Parts(*one.parts), "optimizer": one.optimizer, "schedule": schedule}
        for one, schedule in zip((before, live), schedules, strict=True)
    ]
    for order in (["schedule", "optimizer", "parts"], ["parts", "optimizer", "schedule"]):
        with open_run(tmp_path / order[0]) as ckpt:
            ckpt.save(states[0], 1).result()
            ckpt.restore({name: states[1][name] for name in order})
        assert schedules[1].schedulers[0].last_epoch == 3
        assert difference(before.inner, live.inner) is None
    for schedule in schedules:
        schedule.step()
    assert_goes_on_alike(before, live)


# --- in another form --------------------------------------------------------------------------------------------


class Nested(Container):
    """By names, too, but nested as torch's own states."""

    def state_dict(self) -> dict[str, Any]:
        super().state_dict()
        state = {
            name: one.state[p]
            for one in self.optimizers
            for group in one.param_groups
            for name, p in zip(group["param_names"], group["params"], strict=True)
        }
        groups = [
            {k: v for k, v in group.items() if k not in ("params", "param_names")} | {"params": group["param_names"]}
            for one in self.optimizers
            for group in one.param_groups
        ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        flat = {f"state.{name}.{k}": v for name, one in state_dict["state"].items() for k, v in one.items()}
        for group in state_dict["param_groups"]:
            for name in group["params"]:
                flat |= {f"param_groups.{name}.{key}": value for key, value in group.items() if key != "params"}
        super().load_state_dict(flat)


def plain(*parts: nn.Module, make: Any = adamw, groups: bool = False, named: bool = False) -> Any:
    container = Container(*parts, make=make, groups=groups)
    (optimizer,) = container.optimizers
    for group in optimizer.param_groups if not named else ():
        del group["param_names"]
    return optimizer


def of_dcp(flat: bool) -> Callable[[Trainee], Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return lambda one: get_optimizer_state_dict(one.parts[0], one.optimizer, options=options)


# What was saved: of which optimizer, and how its state is taken.
SAVED: dict[str, tuple[Any, Callable[[Trainee], Any]]] = {
    "flat": (Container, lambda one: one.optimizer.state_dict()),
    "nested": (Nested, lambda one: one.optimizer.state_dict()),
    "numbered": (plain, lambda one: one.optimizer),
    "flat, by torch": (plain, of_dcp(True)),
    "nested, by torch": (plain, of_dcp(False)),
}
LIVE: dict[str, Any] = {
    "flat": Container,
    "nested": Nested,
    "plain": plain,
    "flat, without state": Lazy,
}


@pytest.mark.parametrize("groups", [False, True], ids=["one group", "two groups"])
@pytest.mark.parametrize("into", LIVE)
@pytest.mark.parametrize("saved", SAVED)
def test_a_state_of_another_form_is_taken_where_names_or_numbers_say_what_is_meant(tmp_path, saved, into, groups):
    kind, state_of = SAVED[saved]
    before, live = Trainee(0, kind=kind, groups=groups), Trainee(1, kind=LIVE[into], groups=groups)
    with open_run(tmp_path) as ckpt:
        ckpt.save({"model": before.parts[0], "optimizer": state_of(before)}, 1).result()
        ckpt.restore({"model": live.parts[0], "optimizer": live.optimizer})
    assert_goes_on_alike(before, live)


class Silent(Lazy):
    """Its optimizers know no names: they are those of the parts that it holds."""

    def __init__(self, *parts: nn.Module, **how: Any) -> None:
        super().__init__(*parts, **how)
        self.parts = list(parts)
        for group in [group for one in self.optimizers for group in one.param_groups]:
            del group["param_names"]

    def named(self, call: Callable[[Any], Any]) -> Any:
        names = {p: name for part in self.parts for name, p in part.named_parameters()}
        groups = [group for one in self.optimizers for group in one.param_groups]
        for group in groups:
            group["param_names"] = [names[p] for p in group["params"]]
        try:
            return call(super())
        finally:
            for group in [group for one in self.optimizers for group in one.param_groups]:
                del group["param_names"]

    def state_dict(self) -> dict[str, Any]:
        return self.named(lambda above: above.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.named(lambda above: above.load_state_dict(state_dict))


@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("into", [plain, Silent], ids=["plain", "a container"])
def test_names_are_found_in_modules_that_something_beside_it_holds(tmp_path, saved, into):
    kind, state_of = SAVED[saved]
    before, live = Trainee(0, kind=kind), Trainee(1, kind=into)
    async_ckpt.save({"model": Parts(*before.parts), "optimizer": state_of(before)}, tmp_path / "x.tar").result()
    restore({"model": Parts(*live.parts), "optimizer": live.optimizer}, tmp_path / "x.tar")
    assert_goes_on_alike(before, live)


def test_one_name_for_several_parameters_is_refused(tmp_path):
    before = nn.Linear(3, 3)
    actor, critic = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer = torch.optim.AdamW([actor.weight, critic.weight])
    saved = {"state": {}, "param_groups": [{"params": ["weight"], "lr": 0.5}]}
    async_ckpt.save({"actor": before, "critic": before, "optimizer": saved}, tmp_path / "x.tar").result()
    with pytest.raises(StateMismatchError, match="has parameters with the same name"):
        restore({"actor": actor, "critic": critic, "optimizer": optimizer}, tmp_path / "x.tar")


@pytest.mark.parametrize("saved", [name for name in SAVED if name != "numbered"])
def test_an_optimizer_with_named_parameters_needs_no_module_beside_it(tmp_path, saved):
    kind, state_of = SAVED[saved]
    before, live = Trainee(0, kind=kind), Trainee(1, kind=plain, named=True)
    async_ckpt.save({"optimizer": state_of(before)}, tmp_path / "x.tar").result()
    restore({"optimizer": live.optimizer}, tmp_path / "x.tar")
    copy_weights(before, live)
    assert_goes_on_alike(before, live)


@pytest.mark.parametrize("into", ["flat", "nested"])
def test_numbers_are_not_taken_by_the_order_of_other_groups(tmp_path, into):
    """A bias and another bias are alike in shape: what is not certain is refused."""
    before, live = Trainee(0, kind=plain), Trainee(1, kind=LIVE[into], groups=True)
    async_ckpt.save({"optimizer": before.optimizer}, tmp_path / "x.tar").result()
    was = live.inner
    with pytest.raises(StateMismatchError, match=r"parameter groups of \[2, 2\] here and of \[4\] in the checkpoint"):
        restore({"optimizer": live.optimizer}, tmp_path / "x.tar")
    assert difference(live.inner, was) is None


def test_numbers_with_names_are_taken_by_the_names(tmp_path):
    before, live = Trainee(0, kind=plain, named=True), Trainee(1, groups=True)
    with open_run(tmp_path) as ckpt:
        ckpt.save({"model": before.parts[0], "optimizer": before.optimizer}, 1).result()
        ckpt.restore({"model": live.parts[0], "optimizer": live.optimizer})
    want = dict(zip(before.optimizer.param_groups[0]["param_names"], before.inner, strict=True))
    names = [name for one in live.optimizer for group in one.param_groups for name in group["param_names"]]
    assert names != list(want)
    assert difference(dict(zip(names, live.inner, strict=True)), {name: want[name] for name in names}) is None


def test_a_state_of_numbers_of_another_kind_of_optimizer_is_refused(tmp_path):
    before = Trainee(0, kind=plain, make=lambda groups: torch.optim.SGD(groups, momentum=0.9))
    live = Trainee(1)
    async_ckpt.save({"optimizer": before.optimizer}, tmp_path / "x.tar").result()
    with pytest.raises(StateMismatchError, match="another kind of optimizer"):
        restore({"optimizer": live.optimizer}, tmp_path / "x.tar")


def test_numbers_where_nobody_knows_a_name_are_refused_with_what_to_do(tmp_path):
    class Nameless(Lazy):
        """Knows names, and does not tell."""

        def __init__(self, *parts: nn.Module) -> None:
            super().__init__(*parts)
            self.optimizers = [Hidden(self.optimizers[0])]  # type: ignore[list-item]

    class Hidden:
        def __init__(self, inner: Any) -> None:
            self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state
            self.step, self.zero_grad, self.load_state_dict = (
                inner.step,
                inner.zero_grad,
                inner.load_state_dict,
            )

    before, live = Trainee(0, kind=plain), Trainee(1, kind=Nameless)
    async_ckpt.save({"optimizer": before.optimizer}, tmp_path / "x.tar").result()
    with pytest.raises(StateMismatchError, match="restore it together with its model"):
        restore({"optimizer": live.optimizer}, tmp_path / "x.tar")


# --- one method of the two, and wrappers ------------------------------------------------------------------------


class OnlyLoads(torch.optim.AdamW):
    """Is handed what it gives: numbers."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert all(isinstance(number, int) for number in state_dict["state"])
        super().load_state_dict(state_dict)


class OnlyGives(torch.optim.AdamW):
    """Gives names, and takes what torch takes."""

    def state_dict(self) -> dict[str, Any]:
        return flat_state(self)


class OnlyGivesMore(torch.optim.AdamW):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "more": 1}


def of_class(cls: Any) -> Any:
    return lambda *parts, **how: plain(
        *parts, make=lambda groups: cls(groups, lr=0.1, foreach=False), named=True, **how
    )


@pytest.mark.parametrize("cls", [OnlyLoads, OnlyGives, OnlyGivesMore])
@pytest.mark.parametrize("of", ["its own", "torch's", "torch's, flat"])
def test_an_optimizer_that_overrides_one_method_gets_what_it_takes(tmp_path, cls, of):
    kind = of_class(cls)
    before = Trainee(0, kind=kind if of == "its own" else of_class(torch.optim.AdamW))
    live = Trainee(1, kind=kind)
    state = before.optimizer if of == "its own" else of_dcp(of == "torch's, flat")(before)
    with open_run(tmp_path) as ckpt:
        ckpt.save({"model": before.parts[0], "optimizer": state}, 1).result()
        ckpt.restore({"model": live.parts[0], "optimizer": live.optimizer})
    assert_goes_on_alike(before, live)


def test_methods_that_an_optimizer_has_of_its_own_are_called_as_those_of_a_class_are(tmp_path):
    def make(seed: int) -> Trainee:
        one = Trainee(seed, kind=plain, named=True)
        optimizer = one.optimizer
        load = optimizer.load_state_dict
        inner = copy.copy(optimizer)
        inner.__dict__.pop("load_state_dict", None)
        optimizer.state_dict = lambda: flat_state(optimizer)
        optimizer.load_state_dict = lambda flat: load_flat_state(Loads(optimizer, load), flat)
        return one

    class Loads:
        def __init__(self, optimizer: Any, load: Any) -> None:
            self.param_groups, self.load_state_dict = optimizer.param_groups, load

    before, live = make(0), make(1)
    with open_run(tmp_path) as ckpt:
        ckpt.save({"parts": Parts(*before.parts), "optimizer": before.optimizer}, 1).result()
        ckpt.restore({"parts": Parts(*live.parts), "optimizer": live.optimizer})
    assert_goes_on_alike(before, live)


def test_hooks_that_make_names_of_numbers_and_numbers_of_names_get_what_they_gave(tmp_path):
    def make(seed: int) -> Trainee:
        one = Trainee(seed, kind=plain, named=True)
        optimizer = one.optimizer
        optimizer.register_state_dict_post_hook(lambda live, state: flat_state(live))

        def numbers(live: Any, flat: dict[str, Any]) -> Any:
            found: list[Any] = []

            class Catching:
                param_groups = live.param_groups
                load_state_dict = found.append

            load_flat_state(Catching, flat)
            return found[0]

        optimizer.register_load_state_dict_pre_hook(numbers)
        return one

    before, live = make(0), make(1)
    with open_run(tmp_path) as ckpt:
        ckpt.save({"parts": Parts(*before.parts), "optimizer": before.optimizer}, 1).result()
        ckpt.restore({"parts": Parts(*live.parts), "optimizer": live.optimizer})
    assert_goes_on_alike(before, live)


def test_the_named_optimizer_of_torch_gets_back_what_it_gave(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what else lies beside it
        from torch.distributed.optim.named_optimizer import _NamedOptimizer

    class NamedArchives(_NamedOptimizer):
        def zero_grad(self, set_to_none: bool = True) -> None:  # which torch's lacks what it needs for
            self._optimizer.zero_grad(set_to_none)

    def named(part: nn.Module) -> Any:
        return NamedArchives(part.named_parameters(), torch.optim.AdamW, None, part, lr=0.1)

    before, live = Trainee(0, kind=named), Trainee(1, kind=named)
    with open_run(tmp_path) as ckpt:
        ckpt.save({"parts": Parts(*before.parts), "optimizer": before.optimizer}, 1).result()
        ckpt.restore({"parts": Parts(*live.parts), "optimizer": live.optimizer})
    assert_goes_on_alike(before, live)


@pytest.fixture
def accelerator() -> Any:
    import accelerate

    yield accelerate.Accelerator(cpu=True)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("into", ["flat", "plain"])
def test_what_accelerate_has_wrapped_takes_what_is_inside_of_it_takes(tmp_path, accelerator, saved, into):
    def prepared(*parts: nn.Module) -> Any:
        return accelerator.prepare(LIVE[into](*parts))

    kind, state_of = SAVED[saved]
    before, live = Trainee(0, kind=kind), Trainee(1, kind=prepared)
    with open_run(tmp_path) as ckpt:
        ckpt.save({"model": before.parts[0], "optimizer": state_of(before)}, 1).result()
        ckpt.restore({"model": live.parts[0], "optimizer": live.optimizer})
    assert_goes_on_alike(before, live)


class OfNobody(torch.optim.AdamW):
    """With a state that nobody else can read."""

    def state_dict(self) -> dict[str, Any]:
        return {"mine": super().state_dict(), "version": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["version"] == 3
        super().load_state_dict(state_dict["mine"])


class Refusing(OfNobody):
    """As ZeroRedundancyOptimizer before its state is consolidated."""

    refuses = False

    def state_dict(self) -> dict[str, Any]:
        if self.refuses:
            raise RuntimeError("consolidate it first")
        return torch.optim.AdamW.state_dict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        torch.optim.AdamW.load_state_dict(self, state_dict)


@pytest.mark.parametrize("cls", [OfNobody, Refusing])
def test_a_state_that_nobody_else_understands_is_handed_back(tmp_path, cls):
    before, live = Trainee(0, kind=of_class(cls)), Trainee(1, kind=of_class(cls))
    with open_run(tmp_path) as ckpt:
        ckpt.save({"model": before.parts[0], "optimizer": before.optimizer}, 1).result()
        live.optimizer.refuses = True
        ckpt.restore({"model": live.parts[0], "optimizer": live.optimizer})
    assert_goes_on_alike(before, live)


def test_groups_that_a_container_puts_together_are_all_saved(tmp_path):
    class Together(Container):
        def state_dict(self) -> dict[str, Any]:
            super().state_dict()
            return {
                "state": {},
                "param_groups": [group for one in self.optimizers for group in one.state_dict()["param_groups"]],
            }

    one = Trainee(0, kind=Together, parts=2, several=True)
    async_ckpt.save({"optimizer": one.optimizer}, tmp_path / "x.tar").result()
    loaded = async_ckpt.load(tmp_path / "x.tar")["optimizer"]
    assert difference(loaded, one.optimizer.state_dict()) is None


# --- torch.distributed.checkpoint -------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["folder of torch", "writer"])
@pytest.mark.parametrize("kind", ["one optimizer", "two parts, several optimizers"])
def test_what_torch_has_written_of_a_container_goes_back_into_it(tmp_path, kind, by):
    before, live = Trainee(0, **KINDS[kind]), Trainee(1, **KINDS[kind])
    state = {"model": Parts(*before.parts), "optimizer": before.optimizer}
    there = tmp_path / "step_00000001"
    if by == "writer":
        save(state, there)
    else:
        dcp.save(state, checkpoint_id=there)
    restore({"model": Parts(*live.parts), "optimizer": live.optimizer}, there)
    assert_goes_on_alike(before, live)


def test_a_parameter_whose_state_is_nested_comes_back_from_flat_names(tmp_path):
    """As a container flattens it: `state.<name>.<key>.<key>`."""
    before = Trainee(0, kind=plain, named=True)
    flat = flat_state(before.optimizer)
    for name in before.optimizer.param_groups[0]["param_names"]:
        flat[f"state.{name}.factors.left"] = torch.arange(3.0)
        flat[f"state.{name}.factors.right"] = torch.arange(4.0)
    live = Trainee(1, kind=plain)
    async_ckpt.save({"optimizer": flat}, tmp_path / "x.tar").result()
    restore({"model": live.parts[0], "optimizer": live.optimizer}, tmp_path / "x.tar", strict=False)
    for state in live.optimizer.state.values():
        assert torch.equal(state["factors"]["left"], torch.arange(3.0))
        assert torch.equal(state["factors"]["right"], torch.arange(4.0))
        assert "exp_avg" in state
