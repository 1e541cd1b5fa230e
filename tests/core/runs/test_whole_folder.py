"""Keep(whole_folder=True): what a trainer has written beside our archives goes with the step, and nothing else does."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from buckets import ENGINES, Bucket, InMemory, OnServer, RunAt
from folders import read, write
from fsspec.implementations.local import LocalFileSystem
from scripted_disk import scripted
from states import assert_is_state, is_incidental, open_run, save, state_at

from async_ckpt import Keep, Place

WHOLE = Keep(last=1, whole_folder=True)
TREE = {
    "trainer_state.json": b"{}",
    "hf/config.json": b"{}",
    "hf/deep/er/x y%ü": b"1",
    "manifest.json.bak": b"2",
}


@pytest.fixture(params=["local", "filesystem"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A folder of this disk, as this library sees it, and as fsspec does."""
    return Place(tmp_path / "run", fs=LocalFileSystem() if request.param == "filesystem" else None)


@pytest.fixture(params=[*ENGINES, "memory"])
def store(request: pytest.FixtureRequest) -> OnServer | InMemory:
    if request.param == "memory":
        return InMemory()
    server = request.getfixturevalue("s3")
    bucket = Bucket(server)
    server.make_bucket(bucket)
    return OnServer(bucket, request.param)


def folder_of(root: Place, step: int) -> Path:
    return Path(root.text) / f"step_{step:08d}"


def write_below(run: RunAt, step: int) -> None:
    """What a trainer writes into the folder of a step in a store."""
    storage = run.place.storage()
    for name, data in TREE.items():
        storage.replace(f"step_{step:08d}/{name}", data)


def test_what_a_trainer_has_written_goes_with_the_step(disk):
    with open_run(disk, keep=WHOLE) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step)
            write(folder_of(disk, step), TREE)
            (folder_of(disk, step) / "empty/folder").mkdir(parents=True)
        assert ckpt.steps() == [3]
        assert ckpt.metrics()["cleanup_failures"] == 0
    root = Path(disk.text)
    left = sorted(name for name in os.listdir(root) if not is_incidental(name))
    assert left == ["checkpoints.jsonl", "latest", "step_00000003"]
    assert TREE.items() <= read(folder_of(disk, 3)).items()


def test_at_a_store_it_goes_too(store):
    with store.run(keep=WHOLE) as ckpt:
        for step in (1, 2):
            save(ckpt, step)
            write_below(store, step)
        # A folder whose name begins alike is another one.
        store.place.storage().replace("step_000000010/x", b"")
        save(ckpt, 3)
        assert ckpt.steps() == [3]
    others = {name for name in store.names() if not name.startswith("step_00000003/")}
    assert others == {"checkpoints.jsonl", "latest", "step_000000010/x"}


def test_without_it_files_stay_and_the_warning_says_how_they_go(store, caplog):
    with store.run(keep=1) as ckpt:
        for step in (1, 2):
            save(ckpt, step)
            write_below(store, step)
        save(ckpt, 3)
    left = {name for name in store.names() if name.startswith(("step_00000001/", "step_00000002/"))}
    assert left == {f"step_{step:08d}/{name}" for step in (1, 2) for name in TREE}
    (said,) = [record.message for record in caplog.records if "did not write" in record.message]
    assert "Keep(whole_folder=True)" in said


def test_nothing_is_said_of_files_that_are_deleted(disk, caplog):
    with open_run(disk, keep=WHOLE) as ckpt:
        save(ckpt, 1)
        write(folder_of(disk, 1), TREE)
        save(ckpt, 2)
    assert not [record for record in caplog.records if "did not write" in record.message]


def test_one_of_several_roots_may_keep_them(tmp_path):
    roots = [Place(tmp_path / "near", keep=WHOLE), Place(tmp_path / "far")]
    with open_run(roots, keep=1) as ckpt:
        save(ckpt, 1)
        for root in roots:
            write(folder_of(root, 1), TREE)
        save(ckpt, 2)
    assert not folder_of(roots[0], 1).exists()
    assert read(folder_of(roots[1], 1)) == TREE


def test_of_a_link_goes_the_link_and_never_what_it_leads_to(disk, tmp_path):
    elsewhere = write(tmp_path / "elsewhere", {"data/train.bin": b"1", "x": b"2"})
    with open_run(disk, keep=WHOLE) as ckpt:
        save(ckpt, 1)
        folder = folder_of(disk, 1)
        (folder / "nested").mkdir()
        for parent in (folder, folder / "nested"):
            (parent / "folder").symlink_to(elsewhere)
            (parent / "file").symlink_to(elsewhere / "x")
            (parent / "nothing").symlink_to(tmp_path / "nowhere")
        save(ckpt, 2)
        assert ckpt.metrics()["cleanup_failures"] == 0
    assert not folder.exists()
    assert read(elsewhere) == {"data/train.bin": b"1", "x": b"2"}


def test_what_may_be_the_attempt_of_another_writer_stays(disk):
    attempts = {
        "rank_00000.0123abcd.tar": b"1",
        "driver.0123abcd.tar": b"2",
        ".x.0123abcd.async_ckpt-tmp": b"3",
    }
    with open_run(disk, keep=WHOLE) as ckpt:
        save(ckpt, 1)  # which sweeps what dead writers have left
        write(folder_of(disk, 1), attempts | TREE)
        save(ckpt, 2)
    assert read(folder_of(disk, 1)) == attempts


def test_the_manifest_goes_first_and_the_archive_next(tmp_path):
    with open_run(tmp_path, keep=WHOLE) as ckpt, scripted(ckpt) as disk:
        save(ckpt, 1)
        folder = write(tmp_path / "step_00000001", TREE)
        held = disk.stop("delete_all", "step_00000001", times=1)
        ckpt.save(state_at(2), step=2).result()
        held.wait_reached()
        assert read(folder) == TREE
        assert ckpt.steps() == [2]
        held.release()
        ckpt.wait()
    assert not folder.exists()


def test_what_cannot_be_deleted_is_counted_and_the_step_is_gone_all_the_same(tmp_path, caplog):
    with open_run(tmp_path, keep=WHOLE) as ckpt, scripted(ckpt) as disk:
        save(ckpt, 1)
        write(tmp_path / "step_00000001", TREE)
        disk.fail("delete_all", error=OSError(errno.EACCES, "no"))
        save(ckpt, 2)
        assert ckpt.metrics()["cleanup_failures"] == 1
        save(ckpt, 3)
        assert ckpt.steps() == [3]
        assert_is_state(ckpt.load(), 3)
    assert any("cleaning up" in record.getMessage() for record in caplog.records)


def test_the_folder_of_a_step_that_is_kept_is_left_alone(disk):
    keep: Any = Keep(last=1, every=2, whole_folder=True)
    with open_run(disk, keep=keep) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step)
            write(folder_of(disk, step), TREE)
        save(ckpt, 4)
    assert sorted(path.name for path in Path(disk.text).glob("step_*")) == ["step_00000002", "step_00000004"]
    assert TREE.items() <= read(folder_of(disk, 2)).items()
