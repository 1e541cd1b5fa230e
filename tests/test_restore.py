"""Restoring in place: the same memory, the same numbers, all or nothing; and training goes on as if nothing had been."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from states import difference
from torch import nn

from async_ckpt import AsyncCheckpointer, NotCommittedError, RngState, StateMismatchError
from async_ckpt.storage.local import LocalReader


@pytest.fixture
def ckpt(tmp_path: Path) -> Any:
    with AsyncCheckpointer(tmp_path / "run") as opened:
        yield opened


def restored(ckpt: AsyncCheckpointer, saved: Any, live: Any, **how: Any) -> Any:
    """Save one state, restore it into another; returns that one."""
    ckpt.save(saved, step=1).result()
    assert ckpt.restore(live, **how) == 1
    return live


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        sum(p.square().sum() * (1 + torch.rand(())) for p in model.parameters()).backward()
        optimizer.step()


def pointers(optimizer: torch.optim.Optimizer) -> list[int]:
    return [v.data_ptr() for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]


# --- modules and optimizers --------------------------------------------------------------------------------------

OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2, bias=False))


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "used"])
def test_a_model_and_its_optimizer_come_back_in_place(
    make: Any, fresh: bool, ckpt: AsyncCheckpointer
) -> None:
    model = network()
    optimizer = make(model.parameters())
    trained(model, optimizer)
    other = network()
    other_optimizer = make(other.parameters())
    if not fresh:
        trained(other, other_optimizer, 5)
    weights, state = [p.data_ptr() for p in other.parameters()], pointers(other_optimizer)
    restored(ckpt, {"model": model, "optimizer": optimizer}, {"model": other, "optimizer": other_optimizer})
    assert difference(other.state_dict(), model.state_dict()) is None
    assert difference(other_optimizer.state_dict(), optimizer.state_dict()) is None
    assert [p.data_ptr() for p in other.parameters()] == weights
    assert fresh or pointers(other_optimizer) == state
    for p, q in ((model, optimizer), (other, other_optimizer)):
        torch.manual_seed(1)
        trained(p, q)
    assert difference(other.state_dict(), model.state_dict()) is None


def test_a_used_optimizer_takes_back_that_it_had_no_state(ckpt: AsyncCheckpointer) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt.save({"optimizer": optimizer}, step=1).result()
    trained(model, optimizer)
    assert ckpt.restore({"optimizer": optimizer}) == 1
    assert not any(optimizer.state.values())
    trained(model, optimizer)


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "used"])
def test_moments_keep_the_dtype_that_they_were_saved_in(fresh: bool, ckpt: AsyncCheckpointer) -> None:
    """torch's own load_state_dict would cast them to the parameter's."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(4, 3).to(torch.bfloat16)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = make()
    for p in model.parameters():
        optimizer.state[p] = {
            "step": torch.tensor(3.0), "exp_avg": torch.randn_like(p, dtype=torch.float32),
            "exp_avg_sq": torch.rand_like(p, dtype=torch.float64),
        }  # fmt: skip
    other, other_optimizer = make()
    if not fresh:
        trained(other, other_optimizer)
    restored(ckpt, {"model": model, "o": optimizer}, {"model": other, "o": other_optimizer})
    assert difference(other_optimizer.state_dict(), optimizer.state_dict()) is None
    assert other.weight.dtype == torch.bfloat16
    assert {s["exp_avg"].dtype for s in other_optimizer.state.values()} == {torch.float32}


def test_hyperparameters_and_groups_come_back(ckpt: AsyncCheckpointer) -> None:
    def make(lr: float) -> torch.optim.Optimizer:
        torch.manual_seed(0)
        a, b = nn.Linear(2, 2), nn.Linear(3, 3)
        groups = [{"params": a.parameters(), "name": "a"}, {"params": b.parameters(), "lr": lr / 10}]
        return torch.optim.AdamW(groups, lr=lr, betas=(lr, 0.5))

    optimizer, other = make(0.5), make(0.1)
    optimizer.param_groups[0]["initial_lr"] = 1.0
    restored(ckpt, {"o": optimizer}, {"o": other})
    assert difference(other.state_dict(), optimizer.state_dict()) is None
    assert other.param_groups[1]["lr"] == 0.05
    assert other.param_groups[0]["initial_lr"] == 1.0


def test_a_learning_rate_that_is_a_tensor_is_filled_in_place(ckpt: AsyncCheckpointer) -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer, other = (torch.optim.SGD([weight], lr=torch.tensor(lr)) for lr in (0.5, 0.1))
    rate = other.param_groups[0]["lr"]
    restored(ckpt, {"o": optimizer}, {"o": other})
    assert other.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5


def test_tied_weights_stay_tied(ckpt: AsyncCheckpointer) -> None:
    def make() -> nn.Module:
        model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
        model["head"].weight = model["embed"].weight
        return model

    model, other = make(), make()
    restored(ckpt, {"model": model}, {"model": other})
    assert other["head"].weight is other["embed"].weight
    assert difference(other.state_dict(), model.state_dict()) is None


@pytest.mark.parametrize("num_items", [4, 5_000_000], ids=["in one read", "in several"])
def test_weights_tied_when_saved_fill_weights_that_are_not(num_items: int, ckpt: AsyncCheckpointer) -> None:
    weight = torch.randn(num_items)
    live = {"a": torch.zeros(num_items), "b": torch.zeros(num_items)}
    restored(ckpt, {"a": weight, "b": weight}, live)
    assert difference(live, {"a": weight, "b": weight}) is None
    assert live["a"].data_ptr() != live["b"].data_ptr()


def test_parameters_that_are_not_contiguous_are_filled_in_place(ckpt: AsyncCheckpointer) -> None:
    saved = {
        "conv": nn.Conv2d(3, 5, 3),
        "t": torch.randn(4, 6),
        "z": torch.randn(3, dtype=torch.complex64),
        "h": torch.ones(8).bfloat16(),
    }
    base, z = torch.zeros(10, 10), torch.zeros(3, dtype=torch.complex64)
    live = {
        "conv": nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last), "t": base[1:9:2, 2:8],
        "z": z.conj(), "h": torch.zeros(2, 8).bfloat16().t()[:, 1],
    }  # fmt: skip
    pointer = live["conv"].weight.data_ptr()
    restored(ckpt, saved, live)
    assert live["conv"].weight.data_ptr() == pointer
    assert live["conv"].weight.is_contiguous(memory_format=torch.channels_last)
    assert difference(live["conv"].state_dict(), saved["conv"].state_dict()) is None
    assert torch.equal(base[1:9:2, 2:8], saved["t"])
    assert base.count_nonzero() <= 24
    assert torch.equal(z.conj(), saved["z"])
    assert difference(live["h"], saved["h"]) is None


def test_parameters_of_every_common_dtype_are_filled_in_place(ckpt: AsyncCheckpointer) -> None:
    kinds = [
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.int64,
        torch.bool,
        torch.complex64,
        torch.uint16,
    ]
    saved = {str(k): torch.randint(0, 2, (5, 3)).to(k) for k in kinds}
    live = {str(k): torch.zeros(5, 3).to(k) for k in kinds}
    strided = {str(k): torch.zeros(3, 5).to(k).t() for k in kinds}
    restored(ckpt, {"a": saved, "b": saved}, {"a": live, "b": strided})
    assert difference(live, saved) is None
    assert difference(strided, saved) is None


class WithExtra(nn.Module):
    """A module with something beside its tensors."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize(
    "extra",
    [{"scale": 2.0, "amax": [1, 2]}, torch.arange(3.0), "text", {"history": torch.ones(2)}],
    ids=["dict", "tensor", "text", "tensors"],
)
def test_extra_state_comes_back(extra: Any, ckpt: AsyncCheckpointer) -> None:
    model = nn.Sequential(WithExtra(extra), nn.Linear(2, 2))
    other = nn.Sequential(
        WithExtra(type(extra)() if not isinstance(extra, torch.Tensor) else torch.zeros(3)), nn.Linear(2, 2)
    )
    restored(ckpt, {"model": model}, {"model": other})
    assert difference(other.state_dict(), model.state_dict()) is None
    assert difference(other[0].extra, extra) is None


def test_hooks_of_a_module_run_when_it_is_restored(ckpt: AsyncCheckpointer) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    seen: list[str] = []
    other.register_load_state_dict_pre_hook(lambda module, state, *_: seen.append(f"pre {sorted(state)}"))
    other.register_load_state_dict_post_hook(lambda module, keys: seen.append("post"))
    pointer = other.weight.data_ptr()
    restored(ckpt, {"model": model}, {"model": other})
    assert seen == ["pre ['bias', 'weight']", "post"]
    assert difference(other.state_dict(), model.state_dict()) is None
    assert other.weight.data_ptr() == pointer


class Doubling(nn.Linear):
    """Keeps something that follows from its weight, and makes it anew whenever it is loaded."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.doubled = self.weight.detach() * 2

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.doubled = self.weight.detach() * 2


def test_an_inner_module_with_its_own_way_of_loading_is_asked(ckpt: AsyncCheckpointer) -> None:
    model, other = nn.Sequential(Doubling()), nn.Sequential(Doubling())
    restored(ckpt, {"model": model}, {"model": other})
    assert difference(other[0].doubled, model[0].doubled) is None


class Renaming(nn.Module):
    """Shows its parameter under another name, and takes it back from there."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(2))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return OrderedDict(renamed=self.w.detach())

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        self.w.data.copy_(state_dict["renamed"])


def test_a_module_with_its_own_state_dict_is_loaded_by_it(ckpt: AsyncCheckpointer) -> None:
    model, other = Renaming(), Renaming()
    restored(ckpt, {"model": model}, {"model": other})
    assert torch.equal(other.w, model.w)


class Scaler:
    """Like a gradient scaler: some numbers, and a load_state_dict."""

    def __init__(self, scale: float) -> None:
        self.state: dict[str, Any] = {"scale": scale, "growth": [scale, scale], "t": torch.tensor(scale)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


def test_an_object_with_load_state_dict_gets_its_state_through_that(ckpt: AsyncCheckpointer) -> None:
    scaler, live = Scaler(8.0), Scaler(1.0)
    restored(ckpt, {"scaler": scaler, "list": [scaler]}, {"scaler": live, "list": [Scaler(0.0)]})
    assert difference(live.state, scaler.state) is None


@pytest.mark.parametrize("make", [
    lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 20),
    lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
    lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
], ids=["cosine", "one cycle", "plateau", "sequential"])  # fmt: skip
def test_a_scheduler_goes_on_where_it_was(make: Any, ckpt: AsyncCheckpointer) -> None:
    def build() -> tuple[Any, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.5)
        return optimizer, make(optimizer)

    def go(optimizer: Any, scheduler: Any) -> list[float]:
        rates = []
        for _ in range(5):
            optimizer.step()
            scheduler.step(*[1.0] * isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    first, second = build(), build()
    go(*first)
    names = ("optimizer", "scheduler")
    restored(ckpt, dict(zip(names, first, strict=True)), dict(zip(names, second, strict=True)), trust=True)
    assert go(*second) == go(*first)


# --- plain structures --------------------------------------------------------------------------------------------


class Point(NamedTuple):
    x: Any
    y: Any


def test_plain_values_are_replaced_in_the_containers_that_are_live(ckpt: AsyncCheckpointer) -> None:
    saved = {
        "cfg": {"lr": 0.1, "deep": {"n": 3, "name": "a"}, "none": None},
        "list": [1, [2, 3], "x"],
        "tuple": (1, (2,)),
        "n": 1,
    }
    live = {
        "cfg": {"lr": 0, "deep": {"n": 0, "name": ""}, "none": 5},
        "list": [0, [0, 0], ""],
        "tuple": (0, (0,)),
        "n": 0,
    }
    deep, inner = live["cfg"]["deep"], live["list"][1]
    whole = live["list"]
    restored(ckpt, saved, live)
    assert live == saved
    assert live["cfg"]["deep"] is deep
    assert live["list"] is whole
    assert live["list"][1] is inner


def test_tensors_inside_of_lists_and_tuples_are_filled_in_place(ckpt: AsyncCheckpointer) -> None:
    saved = {
        "l": [torch.ones(2), {"t": torch.ones(3)}],
        "t": (torch.ones(1), 5),
        "p": Point(torch.ones(2), 1),
    }
    live = {
        "l": [torch.zeros(2), {"t": torch.zeros(3)}],
        "t": (torch.zeros(1), 0),
        "p": Point(torch.zeros(2), 0),
    }
    kept = [live["l"][0], live["l"][1]["t"], live["t"][0], live["p"].x]
    restored(ckpt, saved, live)
    assert difference(live, saved) is None
    assert all(t.all() for t in kept)
    assert live["t"][0] is kept[2]
    assert live["p"].x is kept[3]


def test_an_array_is_filled_in_place(ckpt: AsyncCheckpointer) -> None:
    big = np.zeros((4, 6), ">f4")
    live = {"a": np.zeros(3), "b": big[::2, 1:4], "u": np.array(["xx", "yy"])}
    saved = {"a": np.arange(3.0), "b": np.arange(6, dtype=">f4").reshape(2, 3), "u": np.array(["a", "bc"])}
    array = live["a"]
    restored(ckpt, saved, live)
    assert live["a"] is array
    assert difference(live, saved) is None
    assert big[0, 1:4].tolist() == [0, 1, 2]


def test_an_empty_container_takes_all_that_was_saved(ckpt: AsyncCheckpointer) -> None:
    saved = {
        "d": {"a": torch.ones(2), "b": {"c": 1}},
        "l": [torch.ones(1), 2],
        "n": {"x": 1},
        "o": np.arange(3),
        "b": bytes(5000),
    }
    live: dict[str, Any] = {"d": {}, "l": [], "n": None, "o": None, "b": None}
    restored(ckpt, saved, live)
    assert difference(live, saved) is None


def test_tied_tensors_that_are_new_come_back_tied(ckpt: AsyncCheckpointer) -> None:
    weight = torch.randn(3)
    live: dict[str, Any] = {"d": {}}
    restored(ckpt, {"d": {"a": weight, "b": weight}}, live)
    assert live["d"]["a"].data_ptr() == live["d"]["b"].data_ptr()


def test_a_bare_tensor_and_a_bare_module_are_filled(tmp_path: Path) -> None:
    for saved, live in (
        (torch.ones(3), torch.zeros(3)),
        (nn.Linear(2, 2), nn.Linear(2, 2)),
        ([torch.ones(1), 2], [torch.zeros(1), 0]),
    ):
        with AsyncCheckpointer(tmp_path / type(saved).__name__) as ckpt:
            restored(ckpt, saved, live)
        if isinstance(live, nn.Module):
            assert difference(live.state_dict(), saved.state_dict()) is None
        else:
            assert difference(live, saved) is None


def test_a_parameter_that_needs_a_gradient_is_filled_and_stays_a_leaf(ckpt: AsyncCheckpointer) -> None:
    live = {"w": nn.Parameter(torch.zeros(3))}
    weight = live["w"]
    restored(ckpt, {"w": torch.ones(3)}, live)
    assert live["w"] is weight
    assert weight.is_leaf
    assert weight.requires_grad
    assert weight.detach().all()


@pytest.mark.parametrize("live", [(torch.zeros(1),), 5, "x", None], ids=repr)
def test_what_cannot_be_filled_in_place_is_a_type_error(live: Any, ckpt: AsyncCheckpointer) -> None:
    ckpt.save([torch.ones(1)], step=1).result()
    with pytest.raises(TypeError, match="in place"):
        ckpt.restore(live)


names = st.text(max_size=4)
leaves = st.one_of(
    st.integers(), st.floats(allow_nan=False), st.none(), st.booleans(), st.text(max_size=4), st.binary(max_size=4),
    st.builds(torch.full, st.lists(st.integers(0, 3), max_size=3), st.integers(1, 9)),
    st.builds(np.full, st.lists(st.integers(0, 3), max_size=2), st.integers(1, 9)),
)  # fmt: skip
trees = st.dictionaries(
    names,
    st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.dictionaries(names, inner, max_size=3),
        ),
        max_leaves=12,
    ),
    max_size=4,
)  # fmt: skip


def emptied(value: Any, kept: list[Any]) -> Any:
    """The same structure with zeros; its tensors are noted in `kept`."""
    if isinstance(value, dict):
        return {k: emptied(v, kept) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(emptied(v, kept) for v in value)
    if isinstance(value, torch.Tensor):
        kept.append(torch.zeros_like(value))
        return kept[-1]
    return np.zeros_like(value) if isinstance(value, np.ndarray) else 0


def flat(value: Any) -> Iterator[Any]:
    """The tensors of a structure, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from flat(item)


@settings(max_examples=80, deadline=None)
@given(saved=trees)
def test_any_tree_is_restored_into_one_like_it(saved: Any, one_root: Path) -> None:
    kept: list[Any] = []
    live = emptied(saved, kept)
    with AsyncCheckpointer(one_root) as ckpt:
        ckpt.save(saved, step=1, overwrite=True).result()
        assert ckpt.restore(live) == 1
    assert difference(live, saved) is None
    assert all(a is b for a, b in zip(flat(live), kept, strict=True))


@pytest.fixture(scope="module")
def one_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("restore")


# --- part of it --------------------------------------------------------------------------------------------------


def test_top_level_entries_that_are_not_asked_for_are_left_alone(ckpt: AsyncCheckpointer) -> None:
    live = {"model": {"w": torch.zeros(2)}}
    restored(ckpt, {"model": {"w": torch.ones(2)}, "optimizer": {"m": torch.ones(5)}, "n": 3}, live)
    assert difference(live, {"model": {"w": torch.ones(2)}}) is None


@pytest.mark.parametrize("select", ["model", ["model"], "model.*", "mod*"], ids=repr)
def test_only_what_is_selected_is_restored(select: Any, ckpt: AsyncCheckpointer) -> None:
    saved = {
        "model": {"w": torch.ones(2), "b": torch.ones(1)},
        "optimizer": {"m": torch.ones(2), "state": {}},
        "n": 1,
    }
    live = {
        "model": {"w": torch.zeros(2), "b": torch.zeros(1)},
        "optimizer": {"m": torch.zeros(2), "state": {1: 2}},
        "n": 0,
        "x": 5,
    }
    restored(ckpt, saved, live, select=select)
    assert difference(live["model"], saved["model"]) is None
    assert not live["optimizer"]["m"].any()
    assert live["optimizer"]["state"] == {1: 2}
    assert live["n"] == 0


def test_a_part_of_a_module_is_restored(ckpt: AsyncCheckpointer) -> None:
    model, other = network(), network()
    before = other[2].weight.detach().clone()
    restored(ckpt, {"model": model}, {"model": other}, select="model.0")
    assert difference(other[0].state_dict(), model[0].state_dict()) is None
    assert torch.equal(other[2].weight, before)


def test_a_selection_that_matches_nothing_is_a_key_error(ckpt: AsyncCheckpointer) -> None:
    ckpt.save({"model": {"w": torch.ones(1)}}, step=1).result()
    with pytest.raises(KeyError, match="model"):
        ckpt.restore({"model": {"w": torch.zeros(1)}}, select="modle")


# --- what does not fit -------------------------------------------------------------------------------------------


def assert_untouched(live: Any) -> None:
    assert not any(t.any() for t in live.values() if isinstance(t, torch.Tensor))


def test_everything_that_does_not_fit_is_listed_together_and_nothing_is_overwritten(
    ckpt: AsyncCheckpointer,
) -> None:
    saved = {
        "m": {
            "good": torch.ones(2),
            "gone": torch.ones(1),
            "shape": torch.ones(3),
            "dtype": torch.ones(2),
            "kind": 5,
        },
        "n": 7,
    }
    live = {
        "m": {"good": torch.zeros(2), "new": torch.zeros(1), "shape": torch.zeros(2), "dtype": torch.zeros(2).half(), "kind": torch.zeros(1)},
        "n": 0,
    }  # fmt: skip
    ckpt.save(saved, step=1).result()
    with pytest.raises(StateMismatchError) as caught:
        ckpt.restore(live)
    assert caught.value.missing == ("m.new",)
    assert caught.value.unexpected == ("m.gone",)
    assert len(caught.value.mismatched) == 3
    for part in (
        "m.new",
        "m.gone",
        "m.shape is float32[2] here and float32[3]",
        "m.dtype is float16[2] here and float32[2]",
        "m.kind",
    ):
        assert part in str(caught.value)
    assert_untouched(live["m"])
    assert live["n"] == 0


def test_a_module_that_does_not_fit_is_not_touched_nor_is_what_stands_beside_it(
    ckpt: AsyncCheckpointer,
) -> None:
    ckpt.save({"first": torch.ones(2), "model": nn.Linear(3, 2), "optimizer": {"n": 1}}, step=1).result()
    model = nn.Linear(3, 4)
    model.register_parameter("more", nn.Parameter(torch.zeros(1)))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    live = {"first": torch.zeros(2), "model": model, "optimizer": {"n": 0}}
    with pytest.raises(StateMismatchError) as caught:
        ckpt.restore(live)
    assert caught.value.missing == ("model.more",)
    assert [m.split()[0] for m in caught.value.mismatched] == ["model.weight", "model.bias"]
    assert not live["first"].any()
    assert live["optimizer"] == {"n": 0}
    assert difference(dict(model.state_dict()), before) is None


def test_an_optimizer_with_other_groups_does_not_fit(ckpt: AsyncCheckpointer) -> None:
    def make(*sizes: int) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [{"params": [nn.Parameter(torch.ones(1)) for _ in range(n)]} for n in sizes], lr=sum(sizes)
        )

    ckpt.save({"o": make(2, 1)}, step=1).result()
    for other in (make(2), make(2, 2), make(1, 2)):
        with pytest.raises(StateMismatchError, match="parameter groups"):
            ckpt.restore({"o": other})
        assert other.param_groups[0]["lr"] != 3 or other.param_groups[0]["params"][1:] == []


def test_lists_of_tensors_of_other_lengths_and_containers_of_other_kinds_do_not_fit(
    ckpt: AsyncCheckpointer,
) -> None:
    ckpt.save(
        {"l": [torch.ones(1)], "d": {"a": 1}, "m": [1], "o": 5, "t": torch.ones(1), "u": (1, 2)}, step=1
    ).result()
    live = {
        "l": [torch.zeros(1), torch.zeros(1)], "d": [1], "m": nn.Linear(1, 1), "o": torch.optim.SGD([torch.ones(1)]),
        "t": np.zeros(1), "u": (0,),
    }  # fmt: skip
    with pytest.raises(StateMismatchError) as caught:
        ckpt.restore(live)
    assert sorted(m.split()[0] for m in caught.value.mismatched) == ["d", "l", "m", "o", "t", "u"]
    assert not live["l"][0].any()


def test_a_list_of_plain_values_takes_the_length_that_it_was_saved_with(ckpt: AsyncCheckpointer) -> None:
    live = {"longer": [0], "shorter": [0, 0, 0, 0], "none": [0]}
    kept = dict(live)
    restored(ckpt, {"longer": [1, [2], {"t": torch.ones(1)}], "shorter": [1, 2], "none": []}, live)
    assert difference(live, {"longer": [1, [2], {"t": torch.ones(1)}], "shorter": [1, 2], "none": []}) is None
    assert all(live[name] is kept[name] for name in live)


def freed() -> torch.Tensor:
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(0)
    return tensor


UNFILLABLE = {
    "meta": lambda: torch.zeros(4, device="meta"),
    "freed": freed,
    "sparse": lambda: torch.zeros(4).to_sparse(),
    "expanded": lambda: torch.zeros(1).expand(4),
}


@pytest.mark.parametrize("make", UNFILLABLE.values(), ids=UNFILLABLE.keys())
def test_a_live_tensor_that_cannot_be_filled_is_named_before_anything_is_overwritten(
    make: Any, ckpt: AsyncCheckpointer
) -> None:
    ckpt.save({"first": torch.ones(2), "bad": torch.ones(4), "z": {"n": 1}}, step=1).result()
    live = {"first": torch.zeros(2), "bad": make(), "z": {"n": 0}}
    with pytest.raises(StateMismatchError, match="bad"):
        ckpt.restore(live)
    assert not live["first"].any()
    assert live["z"] == {"n": 0}


@pytest.mark.parametrize("strict", [True, False])
def test_where_no_name_fits_it_is_said_what_there_is(strict: bool, ckpt: AsyncCheckpointer) -> None:
    ckpt.save({"model": nn.Linear(2, 2), "epoch": 1}, step=1).result()
    with pytest.raises(StateMismatchError, match="it holds epoch, model"):
        ckpt.restore(nn.Linear(2, 2), strict=strict)


def test_without_strict_names_are_passed_over_and_shapes_are_not(ckpt: AsyncCheckpointer) -> None:
    saved = {"m": {"good": torch.ones(2), "gone": torch.ones(1)}, "l": nn.Linear(2, 2)}
    live = {
        "m": {"good": torch.zeros(2), "new": torch.zeros(1)},
        "other": {"x": 1},
        "l": nn.Linear(2, 2, bias=False),
    }
    restored(ckpt, saved, live, strict=False)
    assert live["m"]["good"].all()
    assert not live["m"]["new"].any()
    assert "gone" not in live["m"]
    assert live["other"] == {"x": 1}
    assert torch.equal(live["l"].weight, saved["l"].weight)
    live["m"]["good"] = torch.zeros(3)
    with pytest.raises(StateMismatchError) as caught:
        ckpt.restore(live, strict=False)
    assert caught.value.missing == caught.value.unexpected == ()
    assert_untouched(live["m"])


def test_a_missing_top_level_entry_is_missing(ckpt: AsyncCheckpointer) -> None:
    ckpt.save({"a": 1}, step=1).result()
    live = {"a": 0, "b": 0}
    with pytest.raises(StateMismatchError) as caught:
        ckpt.restore(live)
    assert caught.value.missing == ("b",)
    assert live["a"] == 0


def test_a_mismatch_is_not_passed_over_for_an_older_step(ckpt: AsyncCheckpointer) -> None:
    ckpt.save({"w": torch.ones(2)}, step=1).result()
    ckpt.save({"w": torch.ones(3)}, step=2).result()
    live = {"w": torch.zeros(2)}
    with pytest.raises(StateMismatchError):
        ckpt.restore(live)
    assert not live["w"].any()
    assert ckpt.restore(live, step=1) == 1


# --- steps -------------------------------------------------------------------------------------------------------


def test_an_empty_run_restores_nothing_and_says_so(ckpt: AsyncCheckpointer, tmp_path: Path) -> None:
    live = {"w": torch.zeros(2)}
    assert ckpt.restore(live) is None
    assert not live["w"].any()
    assert not (tmp_path / "run").exists()


def test_a_step_that_is_not_there_is_not_committed(ckpt: AsyncCheckpointer) -> None:
    with pytest.raises(NotCommittedError) as caught:
        ckpt.restore({"w": torch.zeros(1)}, step=3)
    assert caught.value.step == 3
    ckpt.save({"w": torch.ones(1)}, step=1).result()
    live = {"w": torch.zeros(1)}
    with pytest.raises(NotCommittedError, match="committed: 1"):
        ckpt.restore(live, step=3)
    assert not live["w"].any()


def test_the_newest_step_is_restored_unless_one_is_named(ckpt: AsyncCheckpointer) -> None:
    for step in (5, 10, 100):
        ckpt.save({"n": step}, step=step).result()
    live = {"n": 0}
    assert (ckpt.restore(live), live["n"]) == (100, 100)
    assert (ckpt.restore(live, step=10), live["n"]) == (10, 10)


def test_restoring_right_after_a_save_began_waits_until_its_copy_is_taken(ckpt: AsyncCheckpointer) -> None:
    """What is being copied must not be overwritten while it is."""
    weight = torch.ones(3_000_000)
    ckpt.save({"w": weight}, step=1).result()
    weight.fill_(2)
    handle = ckpt.save({"w": weight}, step=2)
    ckpt.restore({"w": weight}, step=1)
    handle.result()
    assert weight.eq(1).all()
    assert ckpt.load(2)["w"].eq(2).all()


# --- training goes on --------------------------------------------------------------------------------------------


class Training:
    """A small but real loop: dropout, batch norm, momentum, a schedule, shuffled data."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 30)
        self.progress = {"step": 0, "losses": []}

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "rng": RngState(), "progress": self.progress,
        }  # fmt: skip

    def step(self) -> None:
        inputs = torch.randn(8, 6) + float(np.random.rand())
        self.optimizer.zero_grad()
        loss = (self.model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.progress["step"] += 1
        self.progress["losses"].append(loss.item())


def test_training_goes_on_bit_for_bit_after_a_restore(tmp_path: Path) -> None:
    first = Training(1)
    with AsyncCheckpointer(tmp_path, guard=first.optimizer) as ckpt:
        for step in range(1, 16):
            first.step()
            if step % 5 == 0:
                ckpt.save(first.state, step=step)
    second = Training(2)
    second.step()
    with AsyncCheckpointer(tmp_path) as ckpt:
        assert ckpt.restore(second.state, step=10) == 10
    assert second.progress["step"] == 10
    for _ in range(5):
        second.step()
    assert second.progress == first.progress
    assert difference(second.model.state_dict(), first.model.state_dict()) is None
    assert difference(second.optimizer.state_dict(), first.optimizer.state_dict()) is None
    assert second.scheduler.get_last_lr() == first.scheduler.get_last_lr()


def test_bytes_are_read_once_for_all_that_lie_together(
    ckpt: AsyncCheckpointer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = {"w": torch.ones(5), "loader": {str(n): bytes([n % 256]) * 5000 for n in range(200)}}
    ckpt.save(saved, step=1).result()
    lengths: list[int] = []
    read_into = LocalReader.read_into

    def counted(reader: LocalReader, offset: int, target: memoryview) -> None:
        lengths.append(len(target))
        read_into(reader, offset, target)

    monkeypatch.setattr(LocalReader, "read_into", counted)
    live = {"w": torch.zeros(5), "loader": {str(n): b"" for n in range(200)}}
    ckpt.restore(live)
    assert difference(live, saved) is None
    assert sum(lengths) < 10 * os.path.getsize(next(tmp_path.rglob("*.tar")))


def test_shapes_that_differ_everywhere_are_told_without_saying_that_names_do(ckpt: AsyncCheckpointer) -> None:
    ckpt.save({"m": nn.Linear(4, 4)}, step=1).result()
    with pytest.raises(StateMismatchError) as caught:
        ckpt.restore({"m": nn.Linear(8, 8)})
    assert "none of its names" not in str(caught.value)
    assert len(caught.value.mismatched) == 2


def test_what_is_filled_counts_as_written_to(ckpt: AsyncCheckpointer) -> None:
    """Autograd and `unchanged=` know by its version that a tensor has other values."""
    ckpt.save({"w": torch.ones(5), "t": torch.ones(4, 6)}, step=1).result()
    live = {"w": torch.zeros(5), "t": torch.zeros(6, 4).t()}
    before = [tensor._version for tensor in live.values()]
    ckpt.restore(live)
    assert all(tensor._version > version for tensor, version in zip(live.values(), before, strict=True))
    with torch.inference_mode():
        live = {"w": torch.zeros(5), "t": torch.zeros(6, 4).t()}
        ckpt.restore(live)
    assert bool((live["t"] == 1).all())
    ckpt.restore(live)  # made in inference mode, restored outside of it


@pytest.mark.parametrize("verify", ["frist", None, "", 2])
def test_a_slip_in_verify_is_no_check_and_no_lack_of_one(verify: Any, ckpt: AsyncCheckpointer) -> None:
    ckpt.save({"w": torch.ones(5)}, step=1).result()
    live = {"w": torch.zeros(5)}
    for read in (lambda: ckpt.restore(live, verify=verify), lambda: ckpt.load(verify=verify)):
        with pytest.raises(ValueError, match="first"):
            read()
    assert not live["w"].any()


def test_names_that_are_shared_at_the_top_are_not_said_to_be_missing(ckpt: AsyncCheckpointer) -> None:
    ckpt.save({"m": nn.Linear(4, 4)}, step=1).result()
    with pytest.raises(StateMismatchError) as caught:
        ckpt.restore({"m": nn.Sequential(nn.Linear(4, 4))})
    assert "none of its names" not in str(caught.value)
    assert caught.value.missing == ("m.0.weight", "m.0.bias")
    with pytest.raises(StateMismatchError, match="none of its names is one of the live state; it holds m"):
        ckpt.restore(nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (
            {
                "latest_ckpt_global_step.txt": "20",
                "global_step_20/policy/model.pt": "x",
                "global_step_20/data.pt": "x",
            },
            r"global_step_20 and latest_ckpt_global_step\.txt, which says '20'",
        ),
        ({"global_step_10/model.pt": "x", "global_step_20/model.pt": "x"}, "global_step_20, global_step_10"),
    ],
    ids=["skyrl", "folders"],
)
def test_a_run_that_a_trainer_has_written_without_us_is_told_of(tmp_path, files, told):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    options = {"step_format": "global_step_{}", "tracker": "latest_ckpt_global_step.txt"}
    with AsyncCheckpointer(tmp_path, **options) as ckpt:
        with pytest.warns(RuntimeWarning, match=told):
            assert ckpt.restore({"w": torch.zeros(2)}) is None
        assert {
            p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()
        } == files.keys()


def test_what_a_killed_process_of_ours_left_is_not_taken_for_somebody_elses(tmp_path):
    (tmp_path / "step_00000001").mkdir()
    (tmp_path / "step_00000001/rank_00000.0123abcd.tar").write_bytes(b"x")
    (tmp_path / "step_00000002").mkdir()
    with AsyncCheckpointer(tmp_path) as ckpt:
        assert ckpt.restore({"w": torch.zeros(2)}) is None
