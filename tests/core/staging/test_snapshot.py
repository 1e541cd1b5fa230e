"""The held snapshot: one copy of one instant for a checkpoint, an export and whatever else reads it."""

import collections
import dataclasses
import enum
import gc
import json
import os
import threading
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from exported import assert_same, gpt2, spoil, state_of, weights_in
from racing import Call, Gate, until
from states import MIB, difference, open_run

import async_ckpt
from async_ckpt import AsyncCheckpointer, ClosedError, NotUnchangedError, RngState, TornSnapshotError
from async_ckpt.core.saving import kept_memory
from async_ckpt.core.staging import held_snapshot, host_copy, tensors
from async_ckpt.core.staging.snapshot import Snapshot
from async_ckpt.core.state.captured import module_of

Pair = namedtuple("Pair", "left right")


@pytest.fixture
def no_copying(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """What a guard defers is not copied before the event is set."""
    go, copy_later = threading.Event(), Snapshot._fill_later

    def held(snapshot: Snapshot) -> None:
        if snapshot._source.deferred:
            go.wait(60)
        copy_later(snapshot)

    monkeypatch.setattr(Snapshot, "_fill_later", held)
    yield go
    go.set()


@pytest.fixture
def copies_from(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.Tensor], int]:
    """How often a tensor's first byte was copied from where it lies."""
    real_move, real_alias = tensors.memmove, tensors.Alias.copy_to
    sources: list[range] = []

    def move(target: int, source: int, length: int) -> None:
        sources.append(range(source, source + length))
        real_move(target, source, length)

    def copy_to(alias: Any, target: int, offset: int, length: int) -> bool:
        sources.append(range(alias.address + offset, alias.address + offset + length))
        return bool(real_alias(alias, target, offset, length))

    monkeypatch.setattr(tensors, "memmove", move)
    monkeypatch.setattr(tensors.Alias, "copy_to", copy_to)
    return lambda tensor: sum(tensor.data_ptr() in source for source in list(sources))


def trained(mib: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer with a state; with parameters of `mib` MiB, what a guard may defer."""
    model: torch.nn.Module = gpt2()
    if mib:
        model = torch.nn.ModuleDict({"w": torch.nn.Linear(512, mib * 512, bias=False), "v": torch.nn.Linear(3, 3)})
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def lent_bytes() -> str:
    return repr(kept_memory.host_memory()).split(",")[0]


# --- one instant for all ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "not guarded"])
def test_three_readers_get_the_very_instant_while_training_goes_on_and_it_is_copied_once(
    guarded, tmp_path, copies_from
):
    model, optimizer = trained(8)
    state = {"model": model, "optimizer": optimizer, "rng": RngState()}
    wanted = async_ckpt.load(async_ckpt.save(state, tmp_path / "alone.tar").result().path)
    before = copies_from(model["w"].weight)

    with open_run(tmp_path / "run", guard=optimizer) as ckpt:
        with async_ckpt.snapshot(state, guard=optimizer if guarded else None) as snap:
            saved = ckpt.save(snap, step=1)
            exported = async_ckpt.export_hf(snap["model"], tmp_path / "hf")
            pickled = async_ckpt.wrap(torch.save)(snap, tmp_path / "x.pt")
            for _ in range(3):
                step(model, optimizer)
            torch.rand(3)
        for handle in (saved, exported, pickled):
            handle.result()
        committed = ckpt.load(1)

    assert copies_from(model["w"].weight) - before == 1
    assert difference(committed, wanted) is None
    assert difference(torch.load(tmp_path / "x.pt", weights_only=False), wanted) is None
    assert_same(weights_in(tmp_path / "hf"), wanted["model"])
    assert difference(state_of(model), wanted["model"]) is not None


def test_what_a_guard_does_not_defer_is_there_when_the_call_returns(no_copying, tmp_path):
    model, optimizer = trained(8)
    array, rng = numpy.arange(1, 701, dtype=numpy.uint32), RngState()
    with open_run(tmp_path) as ckpt:
        with async_ckpt.snapshot(
            {"model": model, "optimizer": optimizer, "array": array, "rng": rng}, guard=optimizer
        ) as snap:
            drawn, wanted = numpy.random.get_state()[1].copy(), array.copy()
            array[:] = 0
            numpy.random.rand(1000)
            saved = ckpt.save(snap, step=1)  # takes arrays as they are now
            no_copying.set()
        saved.result()
        found = ckpt.load(1)

    assert numpy.array_equal(found["array"], wanted)
    assert numpy.array_equal(found["rng"]["numpy"]["state"]["key"], drawn)


def test_an_export_knows_the_config_and_the_ties_of_the_model_that_the_snapshot_is_of(tmp_path):
    model, _ = trained()
    wanted = state_of(model)
    del wanted["lm_head.weight"]
    with async_ckpt.snapshot({"model": model}) as whole, async_ckpt.snapshot(model) as alone:
        spoil(model)
        for snap, name in ((whole["model"], "of a part"), (alone, "of all")):
            async_ckpt.export_hf(snap, tmp_path / name).result()
            assert_same(weights_in(tmp_path / name), wanted)
            assert json.loads((tmp_path / name / "config.json").read_text())["model_type"] == "gpt2"


def test_an_export_of_a_part_that_is_found_from_the_end_of_a_list_knows_its_model(tmp_path):
    with async_ckpt.snapshot({"models": [torch.nn.Linear(2, 2), gpt2()]}) as snap:
        with pytest.raises(ReferenceError, match=r"models\.1 is a snapshot of was deleted; keep it"):
            async_ckpt.export_hf(snap["models"][-1], tmp_path / "hf")
        assert not (tmp_path / "hf").exists()
    model = gpt2()
    with async_ckpt.snapshot({"models": [torch.nn.Linear(2, 2), model]}) as snap:
        async_ckpt.export_hf(snap["models"][-1], tmp_path / "hf").result()
    assert json.loads((tmp_path / "hf/config.json").read_text())["model_type"] == "gpt2"


def test_an_export_of_a_snapshot_of_a_state_dict_has_its_names(tmp_path):
    weights = {"a": torch.ones(3), "b": torch.zeros(2)}
    with async_ckpt.snapshot({"weights": weights, "step": 1}) as snap:
        async_ckpt.export_hf(snap["weights"], tmp_path / "hf").result()
        with pytest.raises(async_ckpt.UnsupportedStateError, match="flat mapping of names to tensors"):
            async_ckpt.export_hf(snap, tmp_path / "other")
    assert_same(weights_in(tmp_path / "hf"), weights)


def test_what_is_read_first_does_not_wait_for_what_is_still_copied(tmp_path, no_copying):
    """Each reader returns at once: the copy is waited for in the background."""
    model, optimizer = trained(8)
    wanted = state_of(model)
    snap = async_ckpt.snapshot({"model": model}, guard=optimizer)
    handles = [
        async_ckpt.save(snap, tmp_path / "x.tar"),
        async_ckpt.export_hf(snap["model"], tmp_path / "hf"),
        async_ckpt.wrap(torch.save)(snap["model"], tmp_path / "x.pt"),
    ]
    assert not any(handle.done() for handle in handles)
    assert not snap.completion.done()
    stepping = Call(optimizer.step)
    stepping.wait_until_inside("hold")
    no_copying.set()
    stepping.outcome()
    for handle in handles:
        handle.result()
    snap.close()

    assert_same(async_ckpt.load(tmp_path / "x.tar")["model"], wanted)
    assert_same(weights_in(tmp_path / "hf"), wanted)
    assert_same(torch.load(tmp_path / "x.pt"), wanted)


def test_a_snapshot_that_is_torn_fails_all_who_read_it(tmp_path, no_copying):
    gc.collect()
    before = lent_bytes()
    model, optimizer = trained(8)
    with open_run(tmp_path / "run") as ckpt, async_ckpt.snapshot({"model": model}, guard=optimizer) as snap:
        handles = [
            async_ckpt.save(snap, tmp_path / "x.tar"),
            ckpt.save(snap, step=1),
            async_ckpt.export_hf(snap["model"], tmp_path / "outer" / "hf"),
            async_ckpt.wrap(torch.save)(snap["model"], tmp_path / "x.pt"),
        ]
        with torch.no_grad():
            model["w"].weight.add_(1)
        no_copying.set()
        for failed in handles:
            error = failed.exception()
            assert isinstance(error, TornSnapshotError)
            assert error.names == ("model.w.weight",)
            assert "leave guard= out, or wait until all is copied: snap.completion.result()" in str(error)
        with pytest.raises(TornSnapshotError):
            snap["model"]["w.weight"]
        assert ckpt.steps() == []
        with pytest.raises(TornSnapshotError):  # also who comes later
            async_ckpt.save(snap, tmp_path / "x.tar").result()

    gc.collect()
    assert lent_bytes() == before  # though the handles are here, and the error that all of them have
    assert not (tmp_path / "x.tar").exists()
    assert not (tmp_path / "x.pt").exists()
    assert not (tmp_path / "outer").exists() or os.listdir(tmp_path / "outer") == []


def test_a_snapshot_that_is_closed_while_it_is_read_is_read_to_its_end(tmp_path, no_copying):
    model, optimizer = trained(8)
    wanted = state_of(model)
    snap = async_ckpt.snapshot({"model": model}, guard=optimizer)
    handle = async_ckpt.save(snap, tmp_path / "x.tar")
    exported = async_ckpt.export_hf(snap["model"], tmp_path / "hf")
    snap.close()
    snap.close()
    # Its memory must not go to the next one, which would be copied over it.
    other = async_ckpt.snapshot({"model": {"w": torch.full((8 * 512, 512), 3.0)}})
    no_copying.set()
    handle.result()
    exported.result()
    other.close()

    assert_same(async_ckpt.load(tmp_path / "x.tar")["model"], wanted)
    assert_same(weights_in(tmp_path / "hf"), wanted)


def test_a_snapshot_that_is_dropped_before_it_is_complete_harms_no_other(tmp_path, no_copying):
    model, optimizer = trained(8)
    async_ckpt.snapshot({"model": model}, guard=optimizer)
    gc.collect()
    ones = torch.ones(8 * 512, 512)
    with async_ckpt.snapshot({"w": ones, "v": torch.ones(12)}) as snap:
        no_copying.set()
        optimizer.step()  # after the last byte of the one that was dropped
        assert torch.equal(snap["w"], ones)


def test_a_closed_snapshot_is_refused_by_every_reader(tmp_path):
    with async_ckpt.snapshot({"w": torch.ones(3), "inner": {"x": 1}}) as snap:
        part = snap["inner"]
    for use in (
        lambda: async_ckpt.save(snap, tmp_path / "x.tar"),
        lambda: async_ckpt.export_hf(snap, tmp_path / "hf"),
        lambda: async_ckpt.wrap(torch.save)(snap, tmp_path / "x.pt"),
        lambda: snap["w"],
        lambda: part["x"],
        snap.state_dict,
    ):
        with pytest.raises(ClosedError, match="this snapshot is closed"):
            use()
    assert os.listdir(tmp_path) == []


# --- what it holds ------------------------------------------------------------------------------------------------


def test_every_kind_of_leaf_is_as_it_was(tmp_path):
    whole = torch.arange(24.0)
    state = {
        "tensor": whole, "turned": whole.view(4, 6).T, "tail": whole[20:], "tied": whole, "empty": torch.empty(0, 3),
        "bool": torch.tensor(True), "bf16": torch.ones(3, dtype=torch.bfloat16), "conj": torch.tensor([1 + 2j]).conj(),
        "array": numpy.arange(6, dtype=numpy.int32).reshape(2, 3), "words": numpy.array(["a", "bc"]),
        "bytes": b"x" * 5000, "pair": Pair(torch.ones(2), [1, None]), "list": [torch.ones(1), {"deep": (2.5,)}],
        "rng": RngState(), "set": {1, 2}, "text": "ü",
    }  # fmt: skip
    async_ckpt.save(state, tmp_path / "alone.tar").result()
    wanted = async_ckpt.load(tmp_path / "alone.tar", trust=True, types=[Pair])
    with async_ckpt.snapshot(state) as snap:
        whole.fill_(7)
        state["array"][:] = 7
        torch.rand(1)
        assert difference({**snap.state_dict(), "rng": 0}, {**wanted, "rng": 0}) is None
        async_ckpt.save(snap, tmp_path / "x.tar").result()

    assert difference(async_ckpt.load(tmp_path / "x.tar", trust=True, types=[Pair]), wanted) is None
    sizes = [(tmp_path / name).stat().st_size for name in ("alone.tar", "x.tar")]
    assert sizes[0] == sizes[1]  # what is tied is stored once


def test_it_is_indexed_by_name():
    state = {"model": torch.nn.Linear(2, 3), "list": [torch.ones(1), {"x": 5}], "step": 3, 7: "seven"}
    with async_ckpt.snapshot(state) as snap:
        assert list(snap) == list(snap.keys()) == ["model", "list", "step", 7]
        assert ("model" in snap, "other" in snap, len(snap)) == (True, False, 4)
        assert (snap["step"], snap[7], snap["list"][1]["x"]) == (3, "seven", 5)
        assert [type(entry).__name__ for entry in snap["list"]] == ["Tensor", "SnapshotView"]
        assert torch.equal(snap["model"]["weight"], state["model"].weight)
        assert {**snap["model"]}.keys() == {"weight", "bias"}
        assert "complete" in repr(snap)
        assert dict(snap.items())["step"] == snap.get("step") == 3
        assert (snap.get("other"), snap.get("other", 5)) == (None, 5)
        for part, key in ((snap, "other"), (snap["list"], "x"), (snap["model"], 0)):
            with pytest.raises(KeyError, match="is not in"):
                part[key]
        with pytest.raises(TypeError, match="have no names"):
            snap["list"].keys()
    assert "closed" in repr(snap)


def test_the_entries_of_a_list_are_found_from_its_end_and_what_has_none_says_so(tmp_path):
    state = {"list": [torch.nn.Linear(2, 3), torch.ones(2)], "w": torch.ones(3)}
    with async_ckpt.snapshot(state) as snap, async_ckpt.snapshot(torch.ones(3)) as alone:
        layers = snap["list"]
        assert torch.equal(layers[-1], torch.ones(2))
        assert module_of(layers[-2]) is module_of(layers[numpy.int64(0)]) is state["list"][0]
        for key in (-3, 2):
            with pytest.raises(IndexError, match="is not in list; there are 2 entries"):
                layers[key]
        for key in (slice(0, 1), "x", 0.0):
            with pytest.raises(KeyError, match="is not in list; there are 2 entries"):
                layers[key]
        for ask in (
            lambda: alone[0],
            alone.keys,
            lambda: len(alone),
            lambda: list(alone),
            lambda: 0 in alone,
        ):
            with pytest.raises(TypeError, match="the state is one value, without parts"):
                ask()
        for ask in (lambda: torch.ones(2) in layers, layers.keys):
            with pytest.raises(TypeError, match="list is a list, whose entries have no names"):
                ask()
        assert torch.ones(3) not in snap
        assert torch.equal(alone.state_dict(), torch.ones(3))


def test_what_one_reader_does_to_what_it_is_given_no_other_sees(tmp_path):
    """Containers, sets, objects that were pickled, the metadata of modules: all but the tensors."""
    state = {"object": Thing([1]), "set": {1}, "list": [1], "model": torch.nn.Linear(2, 2)}

    def spoil_and_save(given: Any, path: str) -> None:
        given["object"].inner.append(2)
        given["set"].add(2)
        given["list"].append(2)
        torch.nn.Linear(2, 2).load_state_dict(given["model"], assign=True)
        Path(path).write_text("done")

    with async_ckpt.snapshot(state) as snap:
        before = snap.state_dict()
        async_ckpt.wrap(spoil_and_save)(snap, str(tmp_path / "x")).result()
        snap["object"].inner.append(3)
        after = snap.state_dict()
        async_ckpt.save(snap, tmp_path / "x.tar").result()
    loaded = async_ckpt.load(tmp_path / "x.tar", trust=True)

    for seen in (before, after, loaded):
        assert (seen["object"].inner, seen["set"], seen["list"]) == ([1], {1}, [1])
        assert seen["model"]._metadata == state["model"].state_dict()._metadata
    assert before["object"] is not after["object"]


def test_two_classes_of_one_name_are_refused_before_anything_is_copied(tmp_path):
    def of_a_name() -> type:
        @dataclasses.dataclass
        class Local:
            x: int

        return Local

    one, other = of_a_name(), of_a_name()
    before = lent_bytes()
    with pytest.raises(TypeError, match=r"two classes are called .*Local, and only the name is saved"):
        async_ckpt.snapshot({"a": one(1), "b": other(2), "w": torch.ones(1000)})
    assert lent_bytes() == before
    async_ckpt.save({"a": one(1)}, tmp_path / "x.tar").result()
    with pytest.raises(TypeError, match="two classes are called"):
        async_ckpt.load(tmp_path / "x.tar", types=[one, other])
    assert async_ckpt.load(tmp_path / "x.tar", types=[one, one])["a"] == one(1)


def test_a_bare_tensor_and_a_list_are_states_too(tmp_path):
    for number, state in enumerate([torch.ones(3), [torch.zeros(2), 5], torch.nn.Linear(2, 2)]):
        with async_ckpt.snapshot(state) as snap:
            async_ckpt.save(snap, tmp_path / f"{number}.tar").result()
        assert difference(async_ckpt.load(tmp_path / f"{number}.tar"),
                          state.state_dict() if number == 2 else state) is None  # fmt: skip


def test_a_part_may_stand_in_a_state_beside_what_is_live(tmp_path):
    model, _ = trained(8)
    wanted, live = state_of(model), torch.ones(5)
    with async_ckpt.snapshot({"model": model, "other": 1}) as snap:
        spoil(model)
        handle = async_ckpt.save({"model": snap["model"], "live": live, "epoch": 2}, tmp_path / "x.tar")
    live.fill_(7)
    handle.result()
    loaded = async_ckpt.load(tmp_path / "x.tar")

    assert_same(loaded["model"], wanted)
    assert (loaded["live"].tolist(), loaded["epoch"], sorted(loaded)) == (
        [1.0] * 5,
        2,
        ["epoch", "live", "model"],
    )


def test_a_selection_of_a_snapshot_is_saved_by_its_names(tmp_path):
    with async_ckpt.snapshot({"model": torch.nn.Linear(2, 3), "step": 1}) as snap:
        async_ckpt.save(snap, tmp_path / "x.tar", select="model.w*").result()
        with pytest.raises(KeyError, match="matches nothing"):
            async_ckpt.save(snap, tmp_path / "y.tar", select="modle")
    loaded = async_ckpt.load(tmp_path / "x.tar")
    assert (list(loaded), list(loaded["model"])) == (["model"], ["weight"])


def test_a_tight_pool_and_a_place_in_order_take_it_as_well(tmp_path):
    model, optimizer = trained(40)
    wanted = state_of(model)
    root = "memory://" + os.urandom(4).hex()
    with AsyncCheckpointer([tmp_path / "run", root], host_bytes=16 * MIB) as ckpt:
        with async_ckpt.snapshot({"model": model}, guard=optimizer) as snap:
            handle = ckpt.save(snap, step=1)
            step(model, optimizer)
        handle.result()
        handle.at(root).result(60)
        assert_same(ckpt.load(1)["model"], wanted)
        assert_same(async_ckpt.load(root)["model"], wanted)


# --- with unchanged= ----------------------------------------------------------------------------------------------


def test_unchanged_goes_by_what_the_snapshot_saw(tmp_path):
    policy, reference = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    state = {"policy": policy, "ref": reference, "step": torch.tensor(1)}
    with open_run(tmp_path) as ckpt:
        ckpt.save(state, step=1).result()
        with async_ckpt.snapshot(state) as snap:
            with torch.no_grad():
                reference.weight.add_(1)  # after the snapshot, which is what counts
            ckpt.save(snap, step=2, unchanged={"ref"}).result()
        with async_ckpt.snapshot(state) as snap, pytest.raises(NotUnchangedError, match=r"ref\.weight"):
            ckpt.save(snap, step=3, unchanged={"ref"})
        with async_ckpt.snapshot(state) as snap:
            for wrong, message in (
                ("nothing", "no group of that name"),
                ("step", "is a tensor or value.*put it in a dict"),
            ):
                with pytest.raises(ValueError, match=message):
                    ckpt.save(snap, step=3, unchanged={wrong})
            ckpt.save(snap, step=3).result()  # from here on it may be borrowed again
            ckpt.save(state, step=4, unchanged={"ref"}).result()

    own = [sorted(async_ckpt.load(path, select=None)) for path in sorted(tmp_path.glob("step_*/rank_*.tar"))]
    assert own == [
        ["policy", "ref", "step"],
        ["policy", "step"],
        ["policy", "ref", "step"],
        ["policy", "step"],
    ]
    assert_same(async_ckpt.load(tmp_path)["ref"], dict(reference.state_dict()))


# --- what it refuses ----------------------------------------------------------------------------------------------


def test_a_guard_beside_a_snapshot_is_refused_and_that_of_the_run_is_left_aside(tmp_path):
    model, optimizer = trained()
    with open_run(tmp_path / "run", guard=optimizer) as ckpt, async_ckpt.snapshot({"model": model}) as snap:
        part = {"model": snap["model"], "live": torch.ones(3)}
        save = async_ckpt.wrap(torch.save, guard=optimizer)
        for use in (
            lambda: async_ckpt.save(snap, tmp_path / "x.tar", guard=optimizer),
            lambda: async_ckpt.save(part, tmp_path / "x.tar", guard=optimizer),
            lambda: ckpt.save(snap, step=1, guard=optimizer),
            lambda: ckpt.save(part, step=1, guard=[optimizer]),
            lambda: async_ckpt.export_hf(snap["model"], tmp_path / "hf", guard=optimizer),
            lambda: save(snap, tmp_path / "x.pt"),
            lambda: save(part, tmp_path / "x.pt"),
        ):
            with pytest.raises(ValueError, match="guard= belongs in the call of snapshot"):
                use()
        ckpt.save(snap, step=1).result()
        ckpt.save(part, step=2).result()
        assert ckpt.steps() == [1, 2]
    assert os.listdir(tmp_path) == ["run"]


def test_a_snapshot_of_a_snapshot_is_refused():
    with async_ckpt.snapshot({"a": torch.ones(3)}) as snap:
        for state in (snap, {"again": snap}):
            with pytest.raises(TypeError, match="is, or contains, a snapshot already; use it directly"):
                async_ckpt.snapshot(state)


def test_it_is_not_pickled_or_copied_by_accident(tmp_path):
    with async_ckpt.snapshot({"a": torch.ones(3)}) as snap, pytest.raises(TypeError, match="state_dict"):
        torch.save(snap, tmp_path / "x.pt")


@pytest.mark.parametrize("wrong", ["4 GiB", "3", True, object(), -1, 0, float("nan"), float("inf")])
def test_a_budget_that_is_no_number_is_refused(wrong):
    with pytest.raises(ValueError, match="host_bytes must be a number of bytes"):
        async_ckpt.snapshot({"a": torch.ones(3)}, host_bytes=wrong)


def test_a_snapshot_that_is_too_large_for_its_budget_is_an_error_at_the_call():
    state = {"a": torch.ones(3 * MIB // 4)}
    with pytest.raises(MemoryError, match=r"needs 3,145,728 bytes, and host_bytes allows 3,145,727;"):
        async_ckpt.snapshot(state, host_bytes=3 * MIB - 1)
    with async_ckpt.snapshot(state, host_bytes=3 * MIB):
        with pytest.raises(MemoryError, match=r"beside 3,145,728 of others, open or still read"):
            async_ckpt.snapshot(state, host_bytes=5 * MIB)
        async_ckpt.snapshot(state, host_bytes=6 * MIB).close()
    async_ckpt.snapshot(state, host_bytes=3 * MIB).close()


def test_what_a_reader_still_holds_of_a_closed_one_is_counted(tmp_path):
    state = {"a": torch.ones(3 * MIB // 4)}
    gate = Gate()

    def write(state: Any, path: str) -> None:
        gate.passed()
        Path(path).write_text("done")

    snap = async_ckpt.snapshot(state, host_bytes=3 * MIB)
    handle = async_ckpt.wrap(write)(snap, str(tmp_path / "x"))
    kept = snap["a"]
    gate.wait_reached()
    snap.close()
    for told in ("a reader", "a tensor"):
        with pytest.raises(MemoryError, match=r"beside 3,145,728 of others"):
            async_ckpt.snapshot(state, host_bytes=5 * MIB)
        if told == "a reader":
            gate.open()
            handle.result()
    del kept
    async_ckpt.snapshot(state, host_bytes=3 * MIB).close()


def test_its_stall_is_the_call_and_the_guard(no_copying, monkeypatch):
    model, optimizer = trained(8)
    now = [0.0]
    for module in (held_snapshot, host_copy):
        monkeypatch.setattr(module, "monotonic", lambda: now[0])
    look = tensors.SourceTensors.locate

    def slowly(source: tensors.SourceTensors) -> None:
        now[0] += 3
        look(source)

    monkeypatch.setattr(tensors.SourceTensors, "locate", slowly)
    with async_ckpt.snapshot({"model": model}, guard=optimizer) as snap:
        assert snap.stall_seconds == 3
        stepping = Call(optimizer.step)
        stepping.wait_until_inside("hold")
        until(lambda: snap._copy.snapshot._barrier.holds_steps)
        now[0] += 4
        no_copying.set()
        stepping.outcome()
        assert snap.stall_seconds == 7


def test_without_a_budget_it_is_what_is_free_of_the_memory(monkeypatch):
    monkeypatch.setattr(async_ckpt.core.host.limits, "free_memory_bytes", lambda: 2 * MIB)
    kept_memory.release()
    with pytest.raises(MemoryError, match="half of the free host memory is"):
        async_ckpt.snapshot({"a": torch.ones(3 * MIB // 4)})


def test_what_cannot_be_stored_is_refused_by_name_and_holds_nothing():
    before = lent_bytes()
    with pytest.raises(async_ckpt.UnsupportedStateError, match=r"a\.b: a meta tensor"):
        async_ckpt.snapshot({"a": {"b": torch.ones(3, device="meta")}})
    assert lent_bytes() == before


# --- ends ---------------------------------------------------------------------------------------------------------


def test_many_snapshots_in_a_loop_leak_nothing(tmp_path):
    gc.collect()
    kept_memory.release()  # what other tests have left
    weights = torch.ones(4 * MIB // 4)
    alive: list[weakref.ref[Any]] = []
    with open_run(tmp_path, keep=1) as ckpt:
        for number in range(30):
            snap = async_ckpt.snapshot({"w": weights, "n": number})
            handle = ckpt.save(snap, step=number)
            alive.append(weakref.ref(snap["w"]))
            if number % 3:
                snap.close()
            del snap  # every third is dropped as it is
            handle.result()
    gc.collect()
    assert [ref() for ref in alive] == [None] * 30
    async_ckpt.snapshot({"w": weights}).close()
    assert lent_bytes().startswith("<BufferPool 0 bytes lent")
    assert len(kept_memory.host_memory()._idle) <= 2


def test_handles_that_are_kept_keep_no_memory(tmp_path):
    with async_ckpt.snapshot({"w": torch.ones(MIB)}) as snap:
        copy = weakref.ref(snap["w"])
        handles = [
            async_ckpt.save(snap, tmp_path / "x.tar"),
            async_ckpt.export_hf(snap, tmp_path / "hf"),
            async_ckpt.wrap(torch.save)(snap, tmp_path / "x.pt"),
        ]
        for handle in handles:
            handle.result()
    completion = snap.completion
    del snap
    gc.collect()
    assert completion.done()
    assert copy() is None


@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "not guarded"])
def test_a_process_that_exits_with_one_open_saves_what_it_was_told_to(guarded, tmp_path, nursery):
    script = """
    import sys, torch, async_ckpt
    w = torch.nn.Parameter(torch.ones(8 << 20))
    optimizer = torch.optim.SGD([w])
    snap = async_ckpt.snapshot({"w": w}, guard=optimizer if sys.argv[2] == "True" else None)
    part = snap["w"] if sys.argv[2] != "True" else None
    async_ckpt.save(snap, sys.argv[1] + "/x.tar")
    """
    nursery.out_of(script, tmp_path, guarded)
    assert bool((async_ckpt.load(tmp_path / "x.tar")["w"] == 1).all())


def test_in_a_forked_child_it_is_not_there(tmp_path, nursery):
    """Reading it would end the child."""
    script = """
    import os, sys, children, torch, async_ckpt
    children.forks_on_purpose()
    snap = async_ckpt.snapshot({"w": torch.ones(1000)})
    child = os.fork()
    if child == 0:
        for use in (lambda: snap["w"], lambda: async_ckpt.save(snap, sys.argv[1] + "/x.tar")):
            try:
                use()
            except async_ckpt.ClosedError as error:
                print(error, flush=True)
        snap.close()
        async_ckpt.snapshot({"w": torch.ones(1000)}).close()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), float(snap["w"].sum()))
    """
    ended = nursery.run(script, tmp_path)

    told = "this snapshot belongs to the parent process; use it there\n"
    assert (ended.status, ended.out, ended.err) == (0, f"{told * 2}0 1000.0\n", "")


def test_an_interrupted_snapshot_holds_nothing(monkeypatch):
    before = lent_bytes()

    def interrupted(_: tensors.SourceTensors) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tensors.SourceTensors, "locate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        async_ckpt.snapshot({"w": torch.ones(1000)})
    assert lent_bytes() == before


def test_the_report_counts_the_tensors_and_the_bytes_of_what_was_held(tmp_path):
    with async_ckpt.snapshot({"a": torch.ones(1000), "b": torch.ones(10), "n": 1}) as snap:
        reports = [
            async_ckpt.save(snap, tmp_path / "x.tar").result(),
            async_ckpt.wrap(torch.save)(snap, tmp_path / "x.pt").result(),
        ]
    assert [report.num_tensors for report in reports] == [2, 2]
    assert all(report.num_bytes > 4040 for report in reports)


def test_a_wrapped_function_waits_for_the_copy_and_sees_plain_containers(tmp_path, no_copying):
    model, optimizer = trained(8)
    gate, seen = Gate(), []

    def write(state: Any, other: Any, path: Path) -> None:
        inner = other["deep"][0]
        seen.append((type(state), type(inner), float(state["model"]["w.weight"].sum()), list(inner)))
        gate.passed()
        Path(path).write_text("done")

    wanted = float(model["w"].weight.detach().sum())
    with async_ckpt.snapshot({"model": model}, guard=optimizer) as snap:
        handle = async_ckpt.wrap(write, destination="path")(snap, {"deep": [snap["model"]]}, tmp_path / "x")
        assert not seen
        no_copying.set()
    gate.wait_reached()
    gate.open()
    handle.result()

    assert seen == [(dict, type(model.state_dict()), wanted, ["w.weight", "v.weight", "v.bias"])]


class Thing:
    """What only a pickle takes."""

    def __init__(self, inner: list[int]) -> None:
        self.inner = inner


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Progress:
    epoch: int
    best: torch.Tensor


def test_dataclasses_enums_and_wrapped_models_are_held_as_what_they_are(tmp_path):
    model = torch.nn.Linear(2, 3)
    state = {
        "at": Progress(3, torch.ones(2)),
        "colour": Colour.RED,
        "queue": collections.deque([torch.zeros(1), 2], maxlen=3),
        "model": torch.nn.DataParallel(model),
    }
    with async_ckpt.snapshot(state) as snap:
        assert (snap["at"]["epoch"], snap["colour"], snap["queue"][1]) == (3, Colour.RED, 2)
        assert list(snap["model"]) == ["weight", "bias"]
        assert isinstance(snap["at"].state_dict(), Progress)
        async_ckpt.save(snap, tmp_path / "x.tar").result()
    loaded = async_ckpt.load(tmp_path / "x.tar", types=[Colour, Progress])

    assert (loaded["at"].epoch, loaded["colour"], loaded["queue"].maxlen) == (3, Colour.RED, 3)
    assert_same(loaded["model"], dict(model.state_dict()))
