"""Restoring in place: the same memory, the same values, all or nothing, from the step that is meant."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slices import examples
from states import difference, network, restored
from torch import nn

import async_ckpt
from async_ckpt import AsyncCheckpointer, NotCommittedError, StateMismatchError

# --- plain structures --------------------------------------------------------------------------------------------


class Point(NamedTuple):
    x: Any
    y: Any


def test_plain_values_are_replaced_in_the_containers_that_are_live(ckpt):
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


def test_tensors_inside_of_lists_and_tuples_are_filled_in_place(ckpt):
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


def test_an_array_is_filled_in_place(ckpt):
    big = np.zeros((4, 6), ">f4")
    live = {"a": np.zeros(3), "b": big[::2, 1:4], "u": np.array(["xx", "yy"])}
    saved = {"a": np.arange(3.0), "b": np.arange(6, dtype=">f4").reshape(2, 3), "u": np.array(["a", "bc"])}
    array = live["a"]
    restored(ckpt, saved, live)
    assert live["a"] is array
    assert difference(live, saved) is None
    assert big[0, 1:4].tolist() == [0, 1, 2]


def test_an_empty_container_takes_all_that_was_saved(ckpt):
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


def test_tied_tensors_that_are_new_come_back_tied(ckpt):
    weight = torch.randn(3)
    live: dict[str, Any] = {"d": {}}
    restored(ckpt, {"d": {"a": weight, "b": weight}}, live)
    assert live["d"]["a"].data_ptr() == live["d"]["b"].data_ptr()


def test_a_bare_tensor_and_a_bare_module_are_filled(tmp_path):
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


def test_a_parameter_that_needs_a_gradient_is_filled_and_stays_a_leaf(ckpt):
    live = {"w": nn.Parameter(torch.zeros(3))}
    weight = live["w"]
    restored(ckpt, {"w": torch.ones(3)}, live)
    assert live["w"] is weight
    assert weight.is_leaf
    assert weight.requires_grad
    assert weight.detach().all()


@pytest.mark.parametrize("live", [(torch.zeros(1),), 5, "x", None], ids=repr)
def test_what_cannot_be_filled_in_place_is_a_type_error(live, ckpt):
    ckpt.save([torch.ones(1)], step=1).result()
    with pytest.raises(TypeError, match="in place"):
        ckpt.restore(live)


def test_a_part_of_a_snapshot_cannot_be_filled(ckpt):
    state = {"model": {"w": torch.ones(1)}, "parts": [{"w": torch.ones(1)}]}
    ckpt.save(state, step=1).result()
    with async_ckpt.snapshot(state) as snap:
        for live in ({"model": snap["model"]}, {"model": state["model"], "parts": [snap["parts"][0]]}):
            with pytest.raises(TypeError, match=r"cannot fill a snapshot, as (model|parts\.0) is; give it the live"):
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


@settings(max_examples=examples(80), deadline=None)
@given(saved=trees)
def test_any_tree_is_restored_into_one_like_it(saved, one_root):
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


def test_top_level_entries_that_are_not_asked_for_are_left_alone(ckpt):
    live = {"model": {"w": torch.zeros(2)}}
    restored(ckpt, {"model": {"w": torch.ones(2)}, "optimizer": {"m": torch.ones(5)}, "n": 3}, live)
    assert difference(live, {"model": {"w": torch.ones(2)}}) is None


@pytest.mark.parametrize("select", ["model", ["model"], "model.*", "mod*"], ids=repr)
def test_only_what_is_selected_is_restored(select, ckpt):
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


def test_a_part_of_a_module_is_restored(ckpt):
    model, other = network(), network()
    before = other[2].weight.detach().clone()
    restored(ckpt, {"model": model}, {"model": other}, select="model.0")
    assert difference(other[0].state_dict(), model[0].state_dict()) is None
    assert torch.equal(other[2].weight, before)


def test_a_selection_that_matches_nothing_is_a_key_error(ckpt):
    ckpt.save({"model": {"w": torch.ones(1)}}, step=1).result()
    with pytest.raises(KeyError, match="model"):
        ckpt.restore({"model": {"w": torch.zeros(1)}}, select="modle")


# --- what does not fit -------------------------------------------------------------------------------------------


def assert_untouched(live: Any) -> None:
    assert not any(t.any() for t in live.values() if isinstance(t, torch.Tensor))


def test_everything_that_does_not_fit_is_listed_together_and_nothing_is_overwritten(ckpt):
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


def test_a_module_that_does_not_fit_is_not_touched_nor_is_what_stands_beside_it(ckpt):
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


def test_the_state_of_another_kind_of_optimizer_does_not_fit(ckpt):
    weights = [torch.nn.Parameter(torch.ones(3))]
    ckpt.save({"o": torch.optim.AdamW(weights)}, step=1).result()
    live = torch.optim.SGD(weights, lr=0.5, momentum=0.9)

    with pytest.raises(
        StateMismatchError, match=r"o was saved from another kind of optimizer, with .*betas.*; SGD has"
    ):
        ckpt.restore({"o": live})
    assert live.param_groups[0]["lr"] == 0.5


def test_an_optimizer_of_an_older_version_under_a_scheduler_fits(ckpt):
    """Its groups lack what the version after it has, and have what the scheduler of the live one will add."""
    weights = [torch.nn.Parameter(torch.ones(3))]
    state = torch.optim.AdamW(weights, lr=0.5).state_dict()
    (group,) = state["param_groups"]
    del group["amsgrad"]
    ckpt.save({"o": {**state, "param_groups": [{**group, "initial_lr": 0.25}]}}, step=1).result()
    live = torch.optim.AdamW(weights)

    assert ckpt.restore({"o": live}) == 1
    assert (live.param_groups[0]["lr"], live.param_groups[0]["initial_lr"]) == (0.5, 0.25)


def test_an_optimizer_with_other_groups_does_not_fit(ckpt):
    def make(*sizes: int) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [{"params": [nn.Parameter(torch.ones(1)) for _ in range(n)]} for n in sizes], lr=sum(sizes)
        )

    ckpt.save({"o": make(2, 1)}, step=1).result()
    for other in (make(2), make(2, 2), make(1, 2)):
        with pytest.raises(StateMismatchError, match="parameter groups"):
            ckpt.restore({"o": other})
        assert other.param_groups[0]["lr"] != 3 or other.param_groups[0]["params"][1:] == []


def test_lists_of_tensors_of_other_lengths_and_containers_of_other_kinds_do_not_fit(ckpt):
    ckpt.save({"l": [torch.ones(1)], "d": {"a": 1}, "m": [1], "o": 5, "t": torch.ones(1), "u": (1, 2)}, step=1).result()
    live = {
        "l": [torch.zeros(1), torch.zeros(1)], "d": [1], "m": nn.Linear(1, 1), "o": torch.optim.SGD([torch.ones(1)]),
        "t": np.zeros(1), "u": (0,),
    }  # fmt: skip
    with pytest.raises(StateMismatchError) as caught:
        ckpt.restore(live)
    assert sorted(m.split()[0] for m in caught.value.mismatched) == ["d", "l", "m", "o", "t", "u"]
    assert not live["l"][0].any()


def test_a_list_of_plain_values_takes_the_length_that_it_was_saved_with(ckpt):
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
def test_a_live_tensor_that_cannot_be_filled_is_named_before_anything_is_overwritten(make, ckpt):
    ckpt.save({"first": torch.ones(2), "bad": torch.ones(4), "z": {"n": 1}}, step=1).result()
    live = {"first": torch.zeros(2), "bad": make(), "z": {"n": 0}}
    with pytest.raises(StateMismatchError, match="bad"):
        ckpt.restore(live)
    assert not live["first"].any()
    assert live["z"] == {"n": 0}


@pytest.mark.parametrize("strict", [True, False])
def test_where_no_name_fits_it_is_said_what_there_is(strict, ckpt):
    ckpt.save({"model": nn.Linear(2, 2), "epoch": 1}, step=1).result()
    with pytest.raises(StateMismatchError, match="the checkpoint holds epoch, model"):
        ckpt.restore(nn.Linear(2, 2), strict=strict)


def test_without_strict_names_are_passed_over_and_shapes_are_not(ckpt):
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


def test_a_missing_top_level_entry_is_missing(ckpt):
    ckpt.save({"a": 1}, step=1).result()
    live = {"a": 0, "b": 0}
    with pytest.raises(StateMismatchError) as caught:
        ckpt.restore(live)
    assert caught.value.missing == ("b",)
    assert live["a"] == 0


def test_a_mismatch_is_not_passed_over_for_an_older_step(ckpt):
    ckpt.save({"w": torch.ones(2)}, step=1).result()
    ckpt.save({"w": torch.ones(3)}, step=2).result()
    live = {"w": torch.zeros(2)}
    with pytest.raises(StateMismatchError):
        ckpt.restore(live)
    assert not live["w"].any()
    assert ckpt.restore(live, step=1) == 1


# --- steps -------------------------------------------------------------------------------------------------------


def test_an_object_that_refuses_its_saved_values_raises_its_own_error_with_the_state_of_things(ckpt):
    class Counts:
        refuses = False

        def state_dict(self):
            return {"seen": 3}

        def load_state_dict(self, saved):
            if self.refuses:
                raise RuntimeError("a newer program wrote this")

    live = {"weight": torch.ones(3), "counts": Counts()}
    ckpt.save(live, step=1).result()
    live["weight"].zero_()
    live["counts"].refuses = True
    with pytest.raises(RuntimeError, match="a newer program wrote this") as caught:
        ckpt.restore(live)
    assert "The state is partly overwritten by now" in "".join(caught.value.__notes__)
    assert live["weight"].tolist() == [1, 1, 1]  # as the note says


def test_an_empty_run_restores_nothing_and_says_so(ckpt, tmp_path):
    live = {"w": torch.zeros(2)}
    assert ckpt.restore(live) is None
    assert not live["w"].any()
    assert not (tmp_path / "run").exists()


def test_a_step_that_is_not_there_is_not_committed(ckpt):
    with pytest.raises(NotCommittedError) as caught:
        ckpt.restore({"w": torch.zeros(1)}, step=3)
    assert caught.value.step == 3
    ckpt.save({"w": torch.ones(1)}, step=1).result()
    live = {"w": torch.zeros(1)}
    with pytest.raises(NotCommittedError, match="committed: 1"):
        ckpt.restore(live, step=3)
    assert not live["w"].any()


def test_the_newest_step_is_restored_unless_one_is_named(ckpt):
    for step in (5, 10, 100):
        ckpt.save({"n": step}, step=step).result()
    live = {"n": 0}
    assert (ckpt.restore(live), live["n"]) == (100, 100)
    assert (ckpt.restore(live, step=10), live["n"]) == (10, 10)


def test_restoring_right_after_a_save_began_waits_until_its_copy_is_taken(ckpt):
    """What is being copied must not be overwritten while it is."""
    weight = torch.ones(3_000_000)
    ckpt.save({"w": weight}, step=1).result()
    weight.fill_(2)
    handle = ckpt.save({"w": weight}, step=2)
    ckpt.restore({"w": weight}, step=1)
    handle.result()
    assert weight.eq(1).all()
    assert ckpt.load(2)["w"].eq(2).all()
