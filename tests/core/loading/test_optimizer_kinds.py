"""An optimizer takes the state of its own kind, after which training goes on as if nothing had been, and refuses others."""

import contextlib
import copy
import inspect
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import schedulefree
import torch
from matrix_restores import saved
from states import difference, open_run
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import async_ckpt
from async_ckpt import StateMismatchError
from async_ckpt.core.loading.live import optimizer_kinds
from async_ckpt.integrations.dcp import restore

with contextlib.redirect_stderr(io.StringIO()):  # it says at once what it lacks
    import bitsandbytes

ANOTHER = "another kind of optimizer"
OF_TORCH = {
    name: cls
    for name, cls in vars(torch.optim).items()
    if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
}


class LikeApex(torch.optim.Optimizer):
    """Counts its steps in the groups."""

    def __init__(self, parameters: Any, lr: float = 0.1, **more: Any) -> None:
        super().__init__(parameters, {"lr": lr, "bias_correction": True, "betas": (0.9, 0.99), "eps": 1e-8, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
                state["exp_avg"].lerp_(parameter.grad, 0.1)
                state["exp_avg_sq"].mul_(0.9).addcmul_(parameter.grad, parameter.grad, value=0.1)
                parameter.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt() + 1e-8, value=-1 / group["step"])


class FusedAdam(LikeApex):
    pass


class FusedLAMB(LikeApex):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, grad_averaging=True, max_grad_norm=1.0)


class Lion(torch.optim.Optimizer):
    """With settings and states that are some of those of Adam."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg"].lerp_(parameter.grad, 0.1)
                parameter.add_(state["exp_avg"].sign(), alpha=-group["lr"])


FOREIGN: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "FusedAdam": FusedAdam,
    "FusedLAMB": FusedLAMB,
    "Lion": Lion,
    "AdamWScheduleFree": schedulefree.AdamWScheduleFree,
    "SGDScheduleFree": schedulefree.SGDScheduleFree,
    "RAdamScheduleFree": schedulefree.RAdamScheduleFree,
    "Adam8bit": bitsandbytes.optim.Adam8bit,
    "Lion8bit": bitsandbytes.optim.Lion8bit,
    "RMSprop8bit": lambda parameters: bitsandbytes.optim.RMSprop8bit(parameters, lr=0.01),
    "AdEMAMix": bitsandbytes.optim.AdEMAMix,
}


def kind_of(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    return FOREIGN.get(name) or OF_TORCH[name]


class Training:
    """One matrix of 5,120 weights: bitsandbytes keeps 32 bits of smaller ones."""

    def __init__(self, make: Any, steps: int = 0) -> None:
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(128, 40))
        self.optimizer = make([self.weight])
        self.num_steps = 0
        self.go_on(steps)

    def go_on(self, steps: int) -> None:
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()
        for _ in range(steps):
            self.num_steps += 1
            generator = torch.Generator().manual_seed(self.num_steps)
            self.weight.grad = torch.randn(self.weight.shape, generator=generator)
            if isinstance(self.optimizer, torch.optim.SparseAdam):
                self.weight.grad = self.weight.grad.to_sparse()
            self.optimizer.step(*[lambda: self.weight.square().sum()] * isinstance(self.optimizer, torch.optim.LBFGS))

    def state(self, form: str = "object") -> dict[str, Any]:
        return {"weight": self.weight, "optimizer": self.optimizer if form == "object" else self.optimizer.state_dict()}

    def take(self, path: Path) -> None:
        restore(self.state(), path)

    def values(self) -> Any:
        return copy.deepcopy([self.weight.detach(), self.optimizer.state_dict()])


def written(tmp_path: Path, training: Training, form: str = "object") -> Path:
    async_ckpt.save(training.state(form), tmp_path / "x.tar").result()
    return tmp_path / "x.tar"


def assert_refused(live: Training, path: Path, match: str = ANOTHER) -> str:
    before = live.values()
    with pytest.raises(StateMismatchError, match=match) as caught:
        live.take(path)
    assert difference(live.values(), before) is None
    return str(caught.value)


def assert_goes_on(live: Training, of: Training) -> None:
    live.num_steps = of.num_steps
    for one in (live, of):
        one.go_on(3)
    assert torch.equal(live.weight, of.weight)
    assert difference(live.optimizer.state_dict()["state"], of.optimizer.state_dict()["state"]) is None


def test_the_table_knows_the_optimizers_of_torch_and_the_keys_of_their_states():
    assert {*optimizer_kinds._STATES} == {*OF_TORCH}
    settings = {
        "Adam": [{"amsgrad": True}], "AdamW": [{"amsgrad": True}], "RMSprop": [{"momentum": 0.9}, {"centered": True}],
        "SGD": [{"momentum": 0.9}],
    }  # fmt: skip
    for name, cls in OF_TORCH.items():
        keys, seen = optimizer_kinds._STATES[name], set[Any]()
        for more in [{}, *settings.get(name, [])]:
            training = Training(lambda parameters, cls=cls, more=more: cls(parameters, **more), steps=3)
            state = training.optimizer.state[training.weight]
            assert keys.fit([state]), name
            assert all(keys.others[key] in more for key in state.keys() - keys.always if keys.others[key])
            seen |= {*state}
            shaped = {
                key for key, value in state.items() if isinstance(value, torch.Tensor) and value.shape == (128, 40)
            }
            assert shaped == {key for key in state if optimizer_kinds.has_shape_of_parameter(training.optimizer, key)}
        assert keys.always <= seen
        assert seen == {*keys.always, *keys.others} - ({"variance"} if name == "Adafactor" else set()), name


# Their states are alike, and so are their settings: AdamW is Adam with another kind of weight decay.
ALIKE = {"Adam", "AdamW"}


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("form", ["object", "state dict"])
@pytest.mark.parametrize("of", OF_TORCH)
def test_each_optimizer_of_torch_takes_its_own_state_alone(tmp_path, of, form, steps):
    def make(kind: str) -> Any:
        more = {"momentum": 0.9} if kind == "SGD" else {}
        return lambda parameters: OF_TORCH[kind](parameters, **more)

    before = Training(make(of), steps)
    path = written(tmp_path, before, form)
    for kind in OF_TORCH:
        live = Training(make(kind), 1 if steps else 0)
        if kind == of:
            live.take(path)
            assert_goes_on(live, Training(make(of), steps))
        elif {kind, of} != ALIKE:
            message = assert_refused(live, path)
            assert {of, kind} <= {
                *message.replace("(", " ").replace(")", " ").replace(",", " ").replace(";", " ").split()
            }
            assert "select=" in message


@pytest.mark.parametrize("of", [*FOREIGN, "Adam", "RAdam", "Adamax", "SGD", "SparseAdam"])
def test_optimizers_of_others_take_their_own_state_alone(tmp_path, of):
    before = Training(kind_of(of), 3)
    path = written(tmp_path, before)
    for kind in (*FOREIGN, "Adam", "RAdam", "SGD"):
        live = Training(kind_of(kind))
        if kind == of:
            live.take(path)
            assert_goes_on(live, before)
        else:
            assert_refused(live, path)


@pytest.mark.parametrize(("of", "into"), [("FusedAdam", "Adam"), ("FusedAdam", "RAdam"), ("FusedLAMB", "AdamW"), ("AdamW", "FusedAdam"),
    ("RAdam", "Lion8bit"), ("Adam8bit", "Adam"), ("SGDScheduleFree", "SGD"), ("AdamWScheduleFree", "AdamW"), ("AdamW", "AdamWScheduleFree"),
    ("AdamWScheduleFree", "RAdamScheduleFree"), ("SGD", "SGDScheduleFree"), ("Lion", "Adam"), ("Lion", "RAdam"), ("RAdam", "Lion")])  # fmt: skip
def test_without_the_names_of_classes_settings_and_states_tell_kinds_apart(tmp_path, of, into):
    """As in an archive of an older version, or of a state dict."""
    path = written(tmp_path, Training(kind_of(of), 3), "state dict")
    assert_refused(Training(kind_of(into)), path)


# --- the same kind ----------------------------------------------------------------------------------------------


class Derived(torch.optim.AdamW):
    """With a setting of its own."""

    def __init__(self, parameters: Any, **more: Any) -> None:
        super().__init__(parameters, **more)
        for group in (self.defaults, *self.param_groups):
            group["fused_kernel"] = "auto"


class Opaque(torch.optim.Optimizer):
    """Wraps an optimizer where nobody looks for it."""

    def __init__(self, parameters: Any, kind: Any = torch.optim.AdamW) -> None:
        self.hidden = lambda: inner
        inner = kind(parameters)
        super().__init__(parameters, {})
        self.param_groups, self.state = inner.param_groups, inner.state
        self.step = inner.step  # type: ignore[method-assign]

    def state_dict(self) -> Any:
        return self.hidden().state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.hidden().load_state_dict(state_dict)
        self.param_groups, self.state = self.hidden().param_groups, self.hidden().state


def schedule_free(inner: Any) -> Any:
    return lambda parameters: schedulefree.ScheduleFreeWrapper(inner(parameters))


def prepared(parameters: Any) -> Any:
    import accelerate

    return accelerate.optimizer.AcceleratedOptimizer(torch.optim.AdamW(parameters), device_placement=False)


@pytest.fixture
def accelerator() -> Any:
    import accelerate

    yield accelerate.Accelerator(cpu=True)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


SAME = {
    "wrapped by accelerate": (prepared, torch.optim.AdamW),
    "to be wrapped by accelerate": (torch.optim.AdamW, prepared),
    "hidden in a wrapper": (Opaque, torch.optim.AdamW),
    "to be hidden in a wrapper": (torch.optim.AdamW, Opaque),
    "made schedule-free": (schedule_free(torch.optim.SGD), schedule_free(torch.optim.SGD)),
    "in another implementation": (torch.optim.AdamW, lambda p: torch.optim.AdamW(p, fused=True)),
    "of a class derived from it": (torch.optim.AdamW, Derived),
    "Adam that subtracts its weight decay": (
        lambda p: torch.optim.Adam(p, weight_decay=0.1, decoupled_weight_decay=True), torch.optim.AdamW
    ),
    "Adam without weight decay": (torch.optim.Adam, torch.optim.AdamW),
    "AdamW": (torch.optim.AdamW, torch.optim.Adam),
    "with other settings": (
        lambda p: torch.optim.AdamW(p, lr=0.5, betas=(0.5, 0.6), weight_decay=0.3, amsgrad=True), torch.optim.AdamW
    ),
    "without a setting of the live one": (torch.optim.AdamW, lambda p: torch.optim.AdamW(p, amsgrad=True)),
    "SGD with momentum": (lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True), torch.optim.SGD),
    "RMSprop with everything": (lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True), torch.optim.RMSprop),
    "8 bits in the class of 32": (bitsandbytes.optim.AdamW8bit, bitsandbytes.optim.AdamW),
}  # fmt: skip


@pytest.mark.parametrize("form", ["object", "state dict"])
@pytest.mark.parametrize("case", SAME)
def test_a_state_of_the_same_kind_is_taken_with_its_settings(tmp_path, accelerator, case, form):
    of, into = SAME[case]
    before = Training(of, 3)
    path = written(tmp_path, before, form)
    for steps in (0, 2):
        live = Training(into, steps)
        live.take(path)
        twin = Training(of, 3)
        twin.go_on(3)
        live.num_steps = 3
        live.go_on(3)
        assert torch.equal(live.weight, twin.weight)


UNLIKE = {
    "weight decay that is added to gradients": (
        lambda p: torch.optim.Adam(p, weight_decay=0.1), torch.optim.AdamW, "Adam, which adds its weight decay",
    ),
    "another kind, wrapped by accelerate": (torch.optim.SGD, prepared, ANOTHER),
    "of what accelerate has wrapped": (prepared, torch.optim.SGD, ANOTHER),
    "another kind, made schedule-free": (torch.optim.AdamW, schedule_free(torch.optim.SGD), ANOTHER),
    "another kind, hidden in a wrapper": (torch.optim.RAdam, Opaque, ANOTHER),
    "a class derived from it, with a setting of its own": (Derived, torch.optim.AdamW, "with fused_kernel"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNLIKE)
def test_what_would_go_on_in_another_way_is_refused(tmp_path, accelerator, case):
    of, into, match = UNLIKE[case]
    assert_refused(Training(into), written(tmp_path, Training(of, 3)), match)


class Both(torch.optim.Optimizer):
    """Steps one optimizer for each parameter, and counts these through."""

    def __init__(self, kinds: list[Any], weights: list[Any]) -> None:
        self.parts = [kind([weight]) for kind, weight in zip(kinds, weights, strict=True)]
        super().__init__(weights, {})
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Any = None) -> None:
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        given = [part.state_dict() for part in self.parts]
        groups = [{**one["param_groups"][0], "params": [number]} for number, one in enumerate(given)]
        return {"state": {number: one["state"][0] for number, one in enumerate(given)}, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for number, part in enumerate(self.parts):
            group = {**state_dict["param_groups"][number], "params": [0]}
            part.load_state_dict({"state": {0: state_dict["state"][number]}, "param_groups": [group]})


@pytest.mark.parametrize("form", ["object", "state dict"])
def test_each_part_of_a_container_takes_the_state_of_its_own_kind(tmp_path, form):
    kinds = [torch.optim.Adagrad, torch.optim.AdamW]

    def made(kinds: list[Any], seed: int) -> tuple[list[Any], Both]:
        torch.manual_seed(seed)
        weights = [nn.Parameter(torch.randn(3, 2)) for _ in kinds]
        optimizer = Both([lambda p, kind=kind: kind(p, lr=0.1) for kind in kinds], weights)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        return weights, optimizer

    weights, before = made(kinds, 0)
    state = {"optimizer": before if form == "object" else before.state_dict(), "weights": weights}
    async_ckpt.save(state, tmp_path / "x.tar").result()
    for others in (kinds[::-1], [torch.optim.Adagrad, torch.optim.RAdam]):
        with pytest.raises(StateMismatchError, match=ANOTHER):
            restore({"optimizer": made(others, 1)[1]}, tmp_path / "x.tar")
    live_weights, live = made(kinds, 1)
    restore({"optimizer": live, "weights": live_weights}, tmp_path / "x.tar")
    before.step()
    live.step()
    assert difference(live_weights, weights) is None


def test_a_state_that_lacks_what_the_next_step_needs_is_refused(tmp_path):
    """As of a version that did not save the setting."""
    state = Training(torch.optim.AdamW, 3).state("state dict")
    del state["optimizer"]["param_groups"][0]["amsgrad"]
    async_ckpt.save(state, tmp_path / "x.tar").result()
    live = Training(lambda parameters: torch.optim.AdamW(parameters, amsgrad=True))
    assert "AdamW needs max_exp_avg_sq" in assert_refused(live, tmp_path / "x.tar")


def test_a_state_of_parameters_of_other_shapes_is_refused(tmp_path):
    """In another order, say, and without names."""
    weights = [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2, 3))]
    before, live = torch.optim.AdamW(weights), torch.optim.AdamW(weights[::-1])
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    before.step()
    async_ckpt.save({"optimizer": before}, tmp_path / "x.tar").result()
    with pytest.raises(StateMismatchError, match=r"exp_avg is \[3, 2\] in the checkpoint, and its parameter \[2, 3\]"):
        restore({"optimizer": live}, tmp_path / "x.tar")


def test_a_state_of_an_older_torch_is_brought_up_to_date(tmp_path):
    """As load_state_dict does: steps were numbers once."""
    before = Training(torch.optim.AdamW, 3)
    state = copy.deepcopy(before.state("state dict"))
    state["optimizer"]["state"][0]["step"] = 3
    async_ckpt.save(state, tmp_path / "x.tar").result()
    live = Training(torch.optim.AdamW)
    live.take(tmp_path / "x.tar")
    assert_goes_on(live, before)


def test_the_classes_of_optimizers_are_known_of_snapshots_and_their_parts(tmp_path):
    training = Training(bitsandbytes.optim.Lion8bit, 3)
    with async_ckpt.snapshot({"all": [training.state()]}) as snap:
        async_ckpt.save({"of": snap["all"][0], "beside": 1}, tmp_path / "x.tar").result()
    live = Training(bitsandbytes.optim.RMSprop8bit)
    with pytest.raises(StateMismatchError, match=r"another kind of optimizer \(Lion8bit\); it is RMSprop8bit here"):
        restore({"of": live.state()}, tmp_path / "x.tar")
    assert type(async_ckpt.load(tmp_path / "x.tar")["of"]["optimizer"]) is dict


def test_the_classes_of_optimizers_are_known_of_several_ranks(tmp_path):
    """Here of stages of a pipeline, of which one trains in another way."""
    kinds = [bitsandbytes.optim.Lion8bit, bitsandbytes.optim.AdamW8bit]
    folder = saved(tmp_path, 2, lambda rank: {f"stage {rank}": Training(kinds[rank], 2).state(), "rank": rank})
    for number, kind in enumerate(kinds):
        live = Training(kind)
        restore({f"stage {number}": live.state()}, folder)
        assert_goes_on(live, Training(kind, 2))
        with pytest.raises(StateMismatchError, match=f"another kind of optimizer.*{kind.__name__}"):
            restore({f"stage {number}": Training(kinds[1 - number]).state()}, folder)


# --- names of parameters ----------------------------------------------------------------------------------------


def named(groups: Any, model: nn.Module, kind: Any = torch.optim.AdamW) -> torch.optim.Optimizer:
    """An optimizer over groups of named parameters: names, with settings."""
    parameters = dict(model.named_parameters())
    return kind([{"params": [(name, parameters[name]) for name in names], **more} for names, more in groups], lr=0.1)


def layers(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))


def go_on(model: nn.Module, optimizer: Any, steps: int = 3) -> None:
    for step in range(steps):
        model.zero_grad()
        model(torch.full((2, 3), 1.0 + step)).square().sum().backward()
        optimizer.step(*[lambda: model(torch.ones(2, 3)).square().sum()] * isinstance(optimizer, torch.optim.LBFGS))


NAMES = ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]
WEIGHTS, BIASES = NAMES[::2], NAMES[1::2]
TWO = [(WEIGHTS, {"weight_decay": 0.3}), (BIASES, {"weight_decay": 0.0})]
REGROUPED = {
    "a permuted order": ([(NAMES, {})], [(NAMES[::-1], {})]),
    "reordered groups": (TWO, TWO[::-1]),
    "reordered groups and parameters": (TWO, [(BIASES[::-1], {}), (WEIGHTS[::-1], {})]),
    "a split group": ([(NAMES, {})], [(NAMES[:1], {}), (NAMES[3:], {}), (NAMES[1:3], {})]),
    "a group split in two": (TWO, [(WEIGHTS[1:], {}), (BIASES, {}), (WEIGHTS[:1], {})]),
    "joined groups of the same settings": ([(NAMES[4:], {}), (NAMES[:4], {})], [(NAMES, {})]),
}


@pytest.mark.parametrize("way", ["in place", "by its own load_state_dict"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Rprop])
@pytest.mark.parametrize("case", REGROUPED)
def test_states_go_to_the_parameters_of_their_names(tmp_path, case, kind, way):
    of, into = REGROUPED[case]
    if kind is torch.optim.Rprop:
        of, into = ([(names, {}) for names, _ in groups] for groups in (of, into))
    model, live = layers(), layers(1)
    optimizer, other = named(of, model, kind), named(into, live, kind)
    if way != "in place":
        other.register_load_state_dict_post_hook(lambda _: None)
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[-1]["lr"] = 0.05  # as a scheduler does
    go_on(model, optimizer)
    names = [group["param_names"] for group in other.param_groups]
    with open_run(tmp_path) as ckpt:
        ckpt.save({"model": model, "optimizer": optimizer}, 1).result()
        ckpt.restore({"model": live, "optimizer": other})
    assert names == [group["param_names"] for group in other.param_groups]
    for one in ((model, optimizer), (live, other)):
        go_on(*one)
    assert difference(live.state_dict(), model.state_dict()) is None


@pytest.mark.parametrize("way", ["in place", "by its own load_state_dict"])
def test_a_group_of_parameters_from_several_keeps_what_these_do_not_agree_about(tmp_path, way):
    model, live = layers(), layers(1)
    optimizer = named(TWO, model)
    moved = named([(WEIGHTS[1:], {"weight_decay": 0.7}), ([*BIASES, WEIGHTS[0]], {"weight_decay": 0.1})], live)
    if way != "in place":
        moved.register_load_state_dict_post_hook(lambda _: None)
    for group in optimizer.param_groups:
        group["lr"] = 0.025
    go_on(model, optimizer)
    async_ckpt.save({"model": model, "optimizer": optimizer}, tmp_path / "x.tar").result()
    restore({"model": live, "optimizer": moved}, tmp_path / "x.tar")
    assert [(group["lr"], group["weight_decay"]) for group in moved.param_groups] == [(0.025, 0.3), (0.025, 0.1)]
    states = [
        {name: one.state[p] for name, p in m.named_parameters()} for m, one in ((model, optimizer), (live, moved))
    ]
    assert difference(*states) is None


def test_names_of_a_wrapped_model_are_those_of_the_plain_one(tmp_path):
    model, live = layers(), nn.DataParallel(layers(1))
    optimizer = named([(NAMES, {})], model)
    other = named([([f"module.{name}" for name in NAMES[::-1]], {})], live)
    go_on(model, optimizer)
    async_ckpt.save({"optimizer": optimizer, "model": model}, tmp_path / "x.tar").result()
    restore({"optimizer": other, "model": live}, tmp_path / "x.tar")
    for one in ((model, optimizer), (live, other)):
        go_on(*one)
    assert difference(live.module.state_dict(), model.state_dict()) is None


LACKING = {
    "fewer": ([(NAMES[:4], {})], r"in the checkpoint that it lacks here: 2\.bias, 2\.weight"),
    "fewer and others": ([(["0.weight"], {})], r"lacks here: 0\.bias, 1\.bias"),
}


@pytest.mark.parametrize("case", LACKING)
def test_parameters_of_one_side_alone_are_named(tmp_path, case):
    model, live = layers(), layers(1)
    whole, part = named([(NAMES, {})], model), named(LACKING[case][0], live)
    go_on(model, whole)
    go_on(live, part)
    for number, (one, into, on) in enumerate([(whole, part, live), (part, whole, model)]):
        async_ckpt.save({"optimizer": one}, tmp_path / f"{number}.tar").result()
        before = copy.deepcopy([on.state_dict(), into.state_dict()])
        match = LACKING[case][1] if number == 0 else "parameters that the checkpoint lacks: "
        with pytest.raises(StateMismatchError, match=match):
            restore({"model": on, "optimizer": into}, tmp_path / f"{number}.tar", select="optimizer")
        assert difference([on.state_dict(), into.state_dict()], before) is None


@pytest.mark.parametrize("way", ["in place", "by its own load_state_dict"])
@pytest.mark.parametrize("is_flat", [False, True], ids=["nested", "flat"])
def test_a_state_by_names_goes_to_them_in_other_groups_too(tmp_path, is_flat, way):
    model, live = layers(), layers(1)
    before = named(TWO, model)
    other = named([(NAMES[:3], {"weight_decay": 0.7}), (NAMES[3:], {"weight_decay": 0.2})], live)
    if way != "in place":
        other.register_load_state_dict_post_hook(lambda _: None)
    before.param_groups[0]["lr"] = before.param_groups[1]["lr"] = 0.05
    go_on(model, before)
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    state = {"model": model, "optimizer": get_optimizer_state_dict(model, before, options=options)}
    async_ckpt.save(state, tmp_path / "x.tar").result()
    restore({"model": live, "optimizer": other}, tmp_path / "x.tar")
    assert [(group["lr"], group["weight_decay"]) for group in other.param_groups] == [(0.05, 0.7), (0.05, 0.2)]
    states = [{name: one.state[p] for name, p in m.named_parameters()} for m, one in ((model, before), (live, other))]
    assert difference(*states) is None
    go_on(live, other)


def test_a_hook_of_the_user_gets_the_state_as_it_was_saved(tmp_path):
    """Also of another kind and order: it makes of it what the optimizer loads."""
    model, live = layers(), layers(1)
    before, other = named([(NAMES, {})], model, torch.optim.RAdam), named([(NAMES[::-1], {})], live)
    go_on(model, before)
    seen = []

    def adapt(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        seen.append([group["param_names"] for group in state["param_groups"]])
        return {**state, "state": {len(NAMES) - 1 - number: one for number, one in state["state"].items()}}

    other.register_load_state_dict_pre_hook(adapt)
    async_ckpt.save({"optimizer": before}, tmp_path / "x.tar").result()
    restore({"optimizer": other}, tmp_path / "x.tar")
    assert seen == [[NAMES]]
    exp_avg = [optimizer.state[m[0].weight]["exp_avg"] for m, optimizer in ((model, before), (live, other))]
    assert torch.equal(*exp_avg)


@pytest.mark.parametrize("is_flat", [False, True], ids=["nested", "flat"])
def test_a_state_by_names_of_another_kind_is_refused(tmp_path, is_flat):
    model, live = layers(), layers(1)
    before = torch.optim.RAdam(model.parameters())
    go_on(model, before)
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    saved_by_name = get_optimizer_state_dict(model, before, options=options)
    async_ckpt.save({"optimizer": saved_by_name}, tmp_path / "x.tar").result()
    with pytest.raises(StateMismatchError, match=ANOTHER):
        restore(
            {"optimizer": torch.optim.Adam(live.parameters()), "model": live}, tmp_path / "x.tar", select="optimizer"
        )


def test_one_state_for_all_parameters_needs_their_order(tmp_path):
    model, live = layers(), layers(1)
    optimizer, other = (
        named([(names, {})], m, torch.optim.LBFGS) for m, names in ((model, NAMES), (live, NAMES[::-1]))
    )
    go_on(model, optimizer)
    async_ckpt.save({"optimizer": optimizer}, tmp_path / "x.tar").result()
    with pytest.raises(StateMismatchError, match=r"in the order 0\.weight, 0\.bias, 1\.weight"):
        restore({"optimizer": other}, tmp_path / "x.tar")


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_where_torch_has_no_setting_by_which_adam_and_adamw_differ_either_state_is_taken(monkeypatch, kind):
    """As in torch 2.6, from a checkpoint that names no class."""
    settings_of = optimizer_kinds._settings_of
    unsaid = {"decoupled_weight_decay"}
    monkeypatch.setattr(
        optimizer_kinds, "_settings_of", lambda one: settings_of(one) - (unsaid if one == "Adam" else set())
    )
    weight = nn.Parameter(torch.ones(2))
    live = OF_TORCH[kind]([weight])
    weight.sum().backward()
    live.step()
    for settings in (live.defaults, *live.param_groups):
        settings.pop("decoupled_weight_decay")
    group = {name: value for name, value in live.param_groups[0].items() if name != "params"}
    saved_group = optimizer_kinds.SavedParameters(group, list(live.state.values()))

    assert optimizer_kinds.kind_difference(live, [saved_group]) is None
