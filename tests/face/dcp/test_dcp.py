"""torch.distributed.checkpoint with our writer and reader, in one process; after PyTorch's own tests of its own."""

import copy
import dataclasses
import gc
import io
import os
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from dcp_states import (
    CheckpointException,
    TarStorageReader,
    TarStorageWriter,
    cause,
    dcp,
    emptied,
    load,
    plain,
    save,
    training,
)
from states import difference, open_run
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict, _load_state_dict_from_keys

import async_ckpt
from async_ckpt import CorruptCheckpointError, NotCommittedError, StepExistsError, UnsupportedStateError


@pytest.fixture
def step(tmp_path: Path) -> Path:
    return tmp_path / "run" / "step_00000007"


def names_in(folder: Path) -> set[str]:
    return {name.partition(".")[0] if name.endswith(".tar") else name for name in os.listdir(folder)}


# --- the examples of torch's docstrings -----------------------------------------------------------------------------


class MyModule(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 4)


def example_of(function: Any, folder: Path) -> dict[str, Any]:
    """Run the example in a docstring of torch as it is printed, with our classes in place of torch's, in a folder."""
    lines = [line.strip() for line in function.__doc__.splitlines()]
    code = "\n".join(line[4:] for line in lines if line.startswith((">>>", "...")))
    for kind, ours in (("Writer", TarStorageWriter), ("Reader", TarStorageReader)):
        code = code.replace(f"torch.distributed.checkpoint.FileSystem{kind}", ours.__name__)
    assert "/checkpoint/1" in code
    names = {"torch": torch, "MyModule": MyModule, "Adagrad": torch.optim.Adagrad}
    names |= {"TarStorageWriter": TarStorageWriter, "TarStorageReader": TarStorageReader}
    exec(code.replace("/checkpoint/1", str(folder)), names)
    return names


@pytest.mark.parametrize("function", [dcp.save, dcp.async_save], ids=lambda function: function.__name__)
def test_the_example_of_torch_saves_by_our_writer(step, function):
    model = example_of(function, step)["my_model"]

    assert torch.equal(async_ckpt.load(step)["model"]["weight"], model.weight)
    assert torch.equal(async_ckpt.load(step)["model"]["bias"], model.bias)


@pytest.mark.filterwarnings("ignore:`load_state_dict` is deprecated:FutureWarning")
def test_the_example_of_torch_loads_by_our_reader(step):
    saved = MyModule()
    dcp.save(saved.state_dict(), storage_writer=TarStorageWriter(step))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = example_of(dcp.load, step)["my_model"]
    finally:
        torch.distributed.destroy_process_group()

    assert torch.equal(model.weight, saved.weight)


# --- what is written ----------------------------------------------------------------------------------------------


def test_what_torch_saves_is_a_step_like_any_other(step):
    state = training()
    save(state, step)

    assert names_in(step) == {"manifest.json", "rank_00000"}
    assert difference(plain(async_ckpt.load(step)), plain(state)) is None
    assert async_ckpt.verify(step).steps == (7,)
    with open_run(step.parent) as ckpt:
        assert ckpt.steps() == [7]
        assert torch.equal(ckpt.load(select="model")["model"]["0.weight"], state["model"]["0.weight"])


def test_it_restores_live_objects_with_the_optimizer(step):
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    save({"model": model, "optim": optimizer}, step)
    other = torch.nn.Linear(5, 3)
    live = torch.optim.AdamW(other.parameters())

    with open_run(step.parent) as ckpt:
        assert ckpt.restore({"model": other, "optim": live}) == 7
    assert difference(other.state_dict(), model.state_dict()) is None
    assert difference(live.state_dict(), optimizer.state_dict()) is None


def test_torch_loads_in_place_what_torch_has_saved(step):
    state = training()
    save(state, step)
    target = emptied(state)
    weight = target["model"]["0.weight"]

    load(target, step)

    assert difference(plain(target), plain(state)) is None
    assert target["model"]["0.weight"] is weight


def test_a_checkpoint_is_replaced_only_where_that_was_asked_for(step):
    save({"w": torch.ones(2)}, step)
    with pytest.raises(CheckpointException) as raised:
        save({"w": torch.zeros(2)}, step)
    assert isinstance(cause(raised), StepExistsError)
    assert async_ckpt.load(step)["w"].tolist() == [1, 1]

    save({"w": torch.zeros(2)}, step, overwrite=True)
    assert async_ckpt.load(step)["w"].tolist() == [0, 0]
    assert len(os.listdir(step)) == 2


@pytest.mark.parametrize("number", [0, 1, 12345678])
def test_what_later_steps_have_borrowed_outlasts_an_overwriting(tmp_path, number):
    state = {"model": {"w": torch.ones(1000)}, "n": 1}
    with open_run(tmp_path / "run") as ckpt:
        ckpt.save(state, number).result()
        ckpt.save(state, number + 1, unchanged=["model"]).result()
    step = tmp_path / "run" / f"step_{number:08d}"
    save({"model": {"w": torch.zeros(3)}}, step, overwrite=True)

    save({"model": {"w": torch.zeros(3)}}, step, overwrite=True)

    assert async_ckpt.load(step)["model"]["w"].tolist() == [0, 0, 0]
    assert async_ckpt.load(tmp_path / "run")["model"]["w"].sum() == 1000
    assert len(os.listdir(step)) == 3  # what is lent, what is there now, and its manifest


def test_one_writer_saves_several_steps_of_a_run(tmp_path):
    writer = TarStorageWriter(tmp_path / "run")
    for number in (3, 12):
        dcp.save({"n": number}, checkpoint_id=tmp_path / "run" / f"step_{number:08d}", storage_writer=writer)
    with open_run(tmp_path / "run") as ckpt:
        assert ckpt.steps() == [3, 12]
    assert load({"n": 0}, tmp_path / "run") == {"n": 12}
    reader = TarStorageReader(tmp_path / "run")
    state = {"n": 0}
    dcp.load(state, checkpoint_id=str(tmp_path / "run" / "step_00000003"), storage_reader=reader)
    assert state == {"n": 3}
    assert reader.checkpoint_id == str(tmp_path / "run" / "step_00000003")


def test_a_folder_that_torch_has_written_is_left_alone(step):
    dcp.save({"w": torch.ones(2)}, checkpoint_id=step)
    with pytest.raises(CheckpointException, match="has written a checkpoint there"):
        save({"w": torch.zeros(2)}, step, overwrite=True)
    assert names_in(step) == {".metadata", "__0_0.distcp"}


@pytest.mark.parametrize("state", [{}, {"none": torch.empty(0, 3)}, {"a": {}, "b": []}, {"scalar": torch.tensor(2.5)}])
def test_states_of_next_to_nothing_come_back(step, state):
    save(state, step)
    assert difference(plain(async_ckpt.load(step)), plain(state)) is None
    assert difference(plain(load(emptied(state), step)), plain(state)) is None


def test_what_torch_cannot_hand_on_is_refused_at_once(step):
    with pytest.raises(TypeError, match=r"_extensions.*transform"):
        TarStorageWriter(step, _extensions=[object()])
    with pytest.raises(TypeError, match="has no thread_count"):
        TarStorageWriter(step, thread_count=2)
    with pytest.raises(TypeError, match="guard"):
        TarStorageWriter(step, guard=3)
    assert TarStorageWriter.validate_checkpoint_id("s3://bucket/x")
    assert not TarStorageReader.validate_checkpoint_id("s3://")
    assert not TarStorageReader.validate_checkpoint_id(7)  # type: ignore[arg-type]


def test_tied_tensors_are_stored_once(step):
    weight = torch.randn(512, 512)
    save({"a": weight, "b": {"tied": weight}}, step)
    assert async_ckpt.verify(step).num_bytes < 1.5 * weight.nbytes
    found = async_ckpt.load(step)
    assert found["a"].data_ptr() == found["b"]["tied"].data_ptr()


# --- planners -----------------------------------------------------------------------------------------------------


class Flat(DefaultSavePlanner):
    """Keys with dots in them, none of which is a path."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)


class Half(DefaultSavePlanner):
    """From the examples of torch's documentation."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        return data if write_item.type == WriteItemType.BYTE_IO else data.to(torch.float16)


class Raw(DefaultSavePlanner):
    """Blobs of its own making."""

    def transform_object(self, write_item: Any, value: Any) -> Any:
        return io.BytesIO(repr(value).encode()) if write_item.type == WriteItemType.BYTE_IO else value


class ReadRaw(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = value.getvalue()


class Says(DefaultSavePlanner):
    """What it tells of its own."""

    said: Any = (3, ("a", "b"))

    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, dataclasses.replace(metadata, planner_data=self.said)


class Fails(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        raise ArithmeticError(write_item.index.fqn)


class Lies(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        return super().resolve_data(write_item)[:1]


def saved_by(planner: Any, state: Any, path: Path) -> None:
    dcp.save(state, storage_writer=TarStorageWriter(path), planner=planner)


def test_a_planner_that_does_not_flatten_keeps_its_names(step):
    saved_by(Flat(), {"a.b": torch.ones(2), "a": 3}, step)
    found = async_ckpt.load(step)
    assert {*found} == {"a.b", "a"}
    target, planner = {"a.b": torch.zeros(2), "a": 0}, DefaultLoadPlanner(flatten_state_dict=False)
    dcp.load(target, storage_reader=TarStorageReader(step), planner=planner)
    assert target["a.b"].tolist() == [1, 1]
    assert planner.state_dict["a"] == 3  # torch hands it on no further


def test_a_planner_may_save_other_dtypes_and_the_reader_casts_as_torch_does(step):
    saved_by(Half(), {"w": torch.full((3,), 1.5)}, step)
    assert async_ckpt.load(step)["w"].dtype == torch.float16
    assert load({"w": torch.zeros(3)}, step)["w"].tolist() == [1.5] * 3


def test_blobs_that_are_no_values_come_back_byte_for_byte(step):
    saved_by(Raw(), {"x": [1, 2], "w": torch.ones(1)}, step)
    assert async_ckpt.load(step)["x"] == b"[1, 2]"
    target = {"x": None, "w": torch.zeros(1)}
    dcp.load(target, storage_reader=TarStorageReader(step), planner=ReadRaw())
    assert target["x"] == b"[1, 2]"


def test_what_a_planner_says_is_kept(step):
    saved_by(Says(), {"w": {"x": torch.ones(1)}}, step)
    assert TarStorageReader(step).read_metadata().planner_data == Says.said
    assert torch.equal(async_ckpt.load(step)["w"]["x"], torch.ones(1))


def test_the_id_of_a_save_is_that_of_what_is_read(step, tmp_path):
    """As torch's own reader tells it; what a checkpointer has saved has none."""
    writer = TarStorageWriter(step)
    dcp.save({"a": torch.ones(2)}, storage_writer=writer)
    told = [TarStorageReader(step).read_metadata().storage_meta for _ in range(2)]
    assert told[0].save_id == told[1].save_id == writer.storage_meta().save_id
    assert told[0].load_id != told[1].load_id
    async_ckpt.save({"a": torch.ones(2)}, tmp_path / "x.tar").result()
    assert TarStorageReader(tmp_path / "x.tar").read_metadata().storage_meta.save_id is None


def test_what_a_planner_says_that_is_not_plain_is_refused(step):
    planner = Says()
    planner.said = object()
    with pytest.raises(CheckpointException, match="planner_data has object in it"):
        saved_by(planner, {"w": torch.ones(1)}, step)
    with pytest.raises(NotCommittedError):
        async_ckpt.load(step)


def test_errors_of_a_planner_surface_and_leave_nothing(step):
    with pytest.raises(CheckpointException) as raised:
        saved_by(Fails(), {"w": torch.ones(1)}, step)
    assert isinstance(cause(raised), ArithmeticError)
    with pytest.raises(CheckpointException) as raised:
        saved_by(Lies(), {"w": torch.ones(4)}, step)
    assert isinstance(cause(raised), UnsupportedStateError)
    assert cause(raised).path == "w"
    assert not step.exists() or not os.listdir(step)


def test_an_archive_that_nobody_has_committed_is_deleted_by_the_next_save(step):
    planner, writer = Says(), TarStorageWriter(step)
    planner.said = object()
    with pytest.raises(CheckpointException):
        dcp.save({"w": torch.ones(1)}, storage_writer=writer, planner=planner)
    assert names_in(step) == {"rank_00000"}
    gc.collect()  # torch keeps what it has raised in a circle

    dcp.save({"w": torch.ones(1)}, storage_writer=writer)
    assert names_in(step) == {"rank_00000", "manifest.json"}
    assert len(os.listdir(step)) == 2


def test_a_plan_that_torch_has_cached_is_written_anew(tmp_path):
    class Cached(DefaultSavePlanner):
        pass

    for number in range(3):
        planner = Cached(enable_plan_caching=True)
        state = {"w": torch.full((3,), float(number)), "n": number}
        dcp.save(state, storage_writer=TarStorageWriter(tmp_path / f"{number}"), planner=planner)
    for number in range(3):
        found = async_ckpt.load(tmp_path / f"{number}")
        assert (found["w"].tolist(), found["n"]) == ([number] * 3, number)


def test_the_calls_of_older_versions_of_torch_do(step):
    writer, planner = TarStorageWriter(step), DefaultSavePlanner()
    state = training()
    writer.reset()
    planner.set_up_planner(state, writer.storage_meta(), True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    done = writer.write_data(planner.finish_plan(plan), planner)
    writer.finish(metadata, [done.wait()])

    assert difference(plain(async_ckpt.load(step)), plain(state)) is None


# --- what is read -------------------------------------------------------------------------------------------------


def test_torchs_own_converters_get_the_nested_state(step):
    state = training()
    save(state, step)
    found: dict[str, Any] = {}
    _load_state_dict(found, storage_reader=TarStorageReader(step), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert difference(plain(found), plain(state)) is None
    part = _load_state_dict_from_keys({"model"}, storage_reader=TarStorageReader(step))
    assert difference(plain(part), plain({"model": state["model"]})) is None


def test_torch_loads_what_a_checkpointer_has_saved(tmp_path):
    frozen, state = {"ref": torch.randn(300, 40)}, training()
    array = torch.arange(3).numpy()
    rng = async_ckpt.RngState()
    with open_run(tmp_path / "run") as ckpt:
        ckpt.save({**state, "frozen": frozen, "rng": rng}, 1).result()
        ckpt.save({**state, "frozen": frozen, "array": array, "raw": b"abc"}, 2, unchanged={"frozen"}).result()

    target = {**emptied(state), "frozen": emptied(frozen), "array": None, "raw": None}
    load(target, tmp_path / "run")
    assert difference(plain(target["frozen"]), plain(frozen)) is None
    assert difference(plain({key: target[key] for key in state}), plain(state)) is None
    assert (target["array"] == array).all()
    assert target["raw"] == b"abc"
    first = load({"rng": {"torch": torch.empty_like(torch.get_rng_state())}}, tmp_path / "run" / "step_00000001")
    assert first["rng"]["torch"].numel()


def test_one_archive_is_read_and_what_is_no_dict_is_named(tmp_path):
    async_ckpt.save({"w": torch.arange(5)}, tmp_path / "x.tar").result()
    assert load({"w": torch.zeros(5, dtype=torch.int64)}, tmp_path / "x.tar")["w"].tolist() == [0, 1, 2, 3, 4]
    for state, kind in (([torch.arange(5)], "a list"), (torch.arange(5), "a tensor")):
        async_ckpt.save(state, tmp_path / "y.tar").result()
        with pytest.raises(CheckpointException) as raised:
            load({"w": torch.zeros(5)}, tmp_path / "y.tar")
        assert f"loads dicts, but this is {kind}" in str(cause(raised)) + str(raised.value)


def test_two_entries_that_torch_gives_one_name_are_refused(tmp_path):
    async_ckpt.save({"a": {"b.c": 1}, "a.b": {"c": 2}}, tmp_path / "x.tar").result()
    with pytest.raises(ValueError, match=r"names both .* 'a\.b\.c'"):
        TarStorageReader(tmp_path / "x.tar").read_metadata()


def test_what_does_not_fit_is_named(step):
    save({"w": torch.ones(4), "n": 1}, step)
    for target, words in (
        ({"w": torch.ones(5)}, "Size mismatch"),
        ({"other": torch.ones(4)}, "Missing key.*other"),
    ):
        with pytest.raises(CheckpointException, match=words):
            load(target, step)
    wide = torch.ones(1).expand(4)
    with pytest.raises(CheckpointException):
        load({"w": wide}, step)


def test_only_what_is_wanted_is_read(tmp_path, num_read):
    save({"large": torch.ones(16 << 20), "small": torch.ones(1 << 20)}, tmp_path / "x")
    num_read.clear()
    load({"small": torch.zeros(1 << 20)}, tmp_path / "x")
    # The first block is read for the index, once; the small tensor, with what else is in its blocks.
    assert 4 << 20 <= sum(num_read.values()) < 14 << 20


class Meanwhile(DefaultLoadPlanner):
    """Calls a function when the metadata is read, and the bytes are not."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self.call = call

    def create_local_plan(self) -> Any:
        self.call()
        return super().create_local_plan()


def open_archives(step: Path) -> list[str]:
    """Those of this step alone: readers of other tests may wait for the garbage collector."""
    return [path for path in map(os.path.realpath, Path("/proc/self/fd").iterdir()) if path.startswith(f"{step}/")]


def fail() -> None:
    raise RuntimeError("it fails")


def test_a_step_that_is_replaced_between_its_names_and_its_bytes_is_read_as_it_was(step):
    save({"w": torch.ones(2)}, step)
    replacing = Meanwhile(lambda: save({"w": torch.zeros(3)}, step, overwrite=True))
    state = {"w": torch.zeros(2)}
    dcp.load(state, storage_reader=TarStorageReader(step), planner=replacing)
    assert state["w"].tolist() == [1, 1]
    assert load({"w": torch.ones(3)}, step)["w"].tolist() == [0, 0, 0]


@pytest.mark.skipif(sys.platform != "linux", reason="lists open files in /proc")
def test_a_reader_plans_each_load_anew_also_after_one_that_failed(step):
    reader = TarStorageReader(step)
    states = {"w": torch.ones(2)}, {"v": torch.ones(5), "w": torch.ones(3, 1)}, {"w": torch.full((3, 1), 2.0)}
    for before, after in pairwise(states):
        save(before, step, overwrite=True)
        with pytest.raises(CheckpointException):
            dcp.load(dict(before), storage_reader=reader, planner=Meanwhile(fail))
        save(after, step, overwrite=True)
        live = {name: torch.zeros_like(tensor) for name, tensor in after.items()}
        dcp.load(live, storage_reader=reader)
        assert difference(live, after) is None
        assert open_archives(step) == []
    with pytest.raises(CheckpointException):
        dcp.load(live, storage_reader=reader, planner=Meanwhile(fail))
    assert open_archives(step)
    del reader
    gc.collect()
    assert open_archives(step) == []


def test_damage_is_found_unless_nobody_looks(step):
    save({"w": torch.ones(2 << 20)}, step)
    (archive,) = step.glob("*.tar")
    data = bytearray(archive.read_bytes())
    data[6 << 20] ^= 1
    archive.write_bytes(data)
    with pytest.raises(CheckpointException) as raised:
        load({"w": torch.zeros(2 << 20)}, step)
    assert isinstance(cause(raised), CorruptCheckpointError)
    load({"w": torch.zeros(2 << 20)}, step, verify=False)


def test_objects_take_trust(step):
    save({"x": Fails(), "w": torch.ones(1)}, step)
    assert load({"w": torch.zeros(1)}, step)["w"].tolist() == [1]
    with pytest.raises(CheckpointException) as raised:
        load({"x": None}, step)
    assert "trust=True" in str(cause(raised))
    assert load({"x": None}, step, trust=True)["x"].__class__ is Fails


def test_a_store_is_as_good_as_a_disk(bucket):
    state = training()
    place = bucket.place("run/step_00000001")
    save(state, place)
    save(copy.deepcopy(state) | {"step": 4}, place, overwrite=True)
    target = load(emptied(state), place)
    assert difference(plain(target), plain(state | {"step": 4})) is None
    assert len(bucket.keys()) == 2
    with pytest.raises(CheckpointException, match="is committed there"):
        save(state, place)
