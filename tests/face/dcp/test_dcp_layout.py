"""The layout that `TarStorageWriter` writes: readers open only the archives that have what they read."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from dcp_states import CheckpointException, cause, dcp, load, training
from states import difference, leftovers
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import async_ckpt
from async_ckpt import CorruptCheckpointError, StorageUnavailableError
from async_ckpt.integrations.dcp import TarStorageReader

SAVE = """
from dcp_states import *
state = fsdp(width=14)
taken, states = get_state_dict(state["model"], state["optimizer"])
notes = {str(n): torch.full((1000 + n,), float(n)) for n in range(9)}
state = {"model": taken, "optim": states, "notes": notes, "lists": [notes["1"] + k for k in range(6)], "text": "a"}
for _ in range(int(here.env["SAVES"])):
    save(state, here.root + "/step_00000001", overwrite=True)
"""


def saved(worlds, saves=1) -> Path:
    """The folder of a step that three ranks have saved."""
    worlds.run(3, SAVE.replace('here.env["SAVES"]', str(saves)))
    return Path(worlds.root, "step_00000001")


def layout_in(folder: Path) -> Path:
    (path,) = folder.glob("layout.*.json")
    return path


def ranks_with(folder: Path, name: str) -> set[int]:
    layout = json.loads(layout_in(folder).read_text())
    return {
        first + step * n
        for digest, runs in layout["classes"].items()
        if any(json.loads(line)[0] == name for line in layout["structures"][digest].splitlines())
        for first, num, step in runs
        for n in range(num)
    }


def keep_only(folder: Path, ranks: set[int]) -> None:
    for path in folder.glob("rank_*.tar"):
        if int(path.name[5:10]) not in ranks:
            path.unlink()


def test_a_reader_of_a_part_opens_only_archives_that_have_it(worlds):
    folder = saved(worlds)
    note = ranks_with(folder, "notes\x1f3")
    assert len(note) == 1
    assert ranks_with(folder, "model\x1f0.weight") == {0, 1, 2}  # a shard each
    of_torch = shutil.copytree(folder, Path(worlds.root, "copy"))
    keep_only(folder, note)
    keep_only(of_torch, note | {0})  # one archive is opened for the metadata

    found = async_ckpt.load(folder, select="notes.3")
    assert difference(found, {"notes": {"3": torch.full((1003,), 3.0)}}) is None
    live = load({"notes": {"3": torch.zeros(1003)}}, of_torch)
    assert difference(live, {"notes": {"3": torch.full((1003,), 3.0)}}) is None
    for select in (None, "model", "notes"):
        with pytest.raises(CorruptCheckpointError, match="missing"):
            async_ckpt.load(folder, select=select)
    with pytest.raises(CorruptCheckpointError, match="missing"):  # it opens all, to tell what there is
        async_ckpt.load(folder, select="nothing")


def test_a_step_that_is_replaced_between_the_archive_of_its_names_and_another_is_noticed(worlds):
    """One archive is opened for the metadata. The others are gone when the bytes are read, and those there are others."""
    old = shutil.copytree(saved(worlds), Path(worlds.root, "old"))
    new = saved(worlds)

    class Replacing(DefaultLoadPlanner):
        def create_local_plan(self):
            shutil.rmtree(old)
            shutil.copytree(new, old)
            return super().create_local_plan()

    reader, state = TarStorageReader(old), {"notes": {str(n): torch.zeros(1000 + n) for n in range(9)}}
    with pytest.raises(CheckpointException) as raised:
        dcp.load(state, storage_reader=reader, planner=Replacing())
    assert isinstance(cause(raised), StorageUnavailableError)
    dcp.load(state, storage_reader=reader)
    assert difference(state["notes"], {str(n): torch.full((1000 + n,), float(n)) for n in range(9)}) is None


def test_a_list_of_which_each_rank_has_a_part_is_read_as_a_whole(worlds):
    folder = saved(worlds)
    want = [torch.full((1001,), 1.0 + k) for k in range(6)]
    whole = async_ckpt.load(folder)

    keep_only(folder, set().union(*(ranks_with(folder, f"lists\x1f{k}") for k in range(6))))
    assert difference(async_ckpt.load(folder, select="lists")["lists"], want) is None
    assert difference(async_ckpt.load(folder, select="lists.2"), {"lists": [want[2]]}) is None
    assert difference(whole["lists"], want) is None


def test_the_layout_is_advice_without_which_everything_is_opened(worlds):
    folder = saved(worlds)
    with_layout, loaded = TarStorageReader(folder).read_metadata(), async_ckpt.load(folder)
    path = layout_in(folder)
    path.write_bytes(path.read_bytes().replace(b"notes", b"nodes"))

    for _ in ("damaged", "missing"):
        without = TarStorageReader(folder).read_metadata()
        assert without.planner_data == with_layout.planner_data
        assert without.state_dict_metadata == with_layout.state_dict_metadata
        assert difference(async_ckpt.load(folder), loaded) is None
        assert difference(async_ckpt.load(folder, select="notes.3")["notes"]["3"], loaded["notes"]["3"]) is None
        path.unlink(missing_ok=True)


def test_names_with_numbers_are_told_from_texts_in_the_layout(worlds):
    saved_by_torch = """
        from dcp_states import *
        save({"a": [numbered(3), {"b": 1}], "c": {"0": numbered(2)}, "e": {}}, here.root + "/step_00000001")
    """
    worlds.run(2, saved_by_torch)
    folder = Path(worlds.root, "step_00000001")
    assert layout_in(folder).exists()
    told = TarStorageReader(folder).read_metadata().planner_data
    layout_in(folder).unlink()
    assert TarStorageReader(folder).read_metadata().planner_data == told
    assert ("a", 0) in told.values()
    assert ("c", "0") in told.values()


def test_an_overwritten_step_keeps_no_old_layout_and_a_copied_one_has_its_own(worlds, tmp_path):
    folder = saved(worlds, saves=2)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert [path.name for path in folder.glob("layout.*")] == [f"layout.{manifest['attempt']}.json"]

    state = training()
    with async_ckpt.AsyncCheckpointer(worlds.root) as ckpt:
        ckpt.save(state, step=2).result()  # its sweep leaves the layout alone
    assert layout_in(folder).exists()
    with async_ckpt.AsyncCheckpointer([worlds.root, tmp_path / "copy"]) as ckpt:
        ckpt.save(state, step=3).result()
        ckpt.wait()
        ckpt.catch_up()
    assert layout_in(tmp_path / "copy" / "step_00000001").read_bytes() == layout_in(folder).read_bytes()
    shutil.rmtree(folder)
    assert leftovers(worlds.root) == []
