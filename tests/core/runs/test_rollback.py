"""A rollback is one commit: the steps that leave the run are out with the manifest, whatever becomes of the cleaning up."""

import os
from pathlib import Path
from typing import Any

import pytest
from archives import flip
from scripted_disk import ScriptedStorage, scripted
from states import assert_is_state, open_run, state_at

import async_ckpt
from async_ckpt import (
    AsyncCheckpointer,
    CorruptCheckpointError,
    NotCommittedError,
    StepBehindError,
    StepExistsError,
    StorageFullError,
    StorageUnavailableError,
)

GONE = StorageUnavailableError("the disk is gone", path="/ckpt")


def save(ckpt: AsyncCheckpointer, step: int, note: str = "", **options: Any) -> None:
    ckpt.save(state_at(step) | ({"note": note} if note else {}), step=step, **options).result()
    ckpt.wait()


def line(root: Path) -> list[tuple[int, str]]:
    """The run as every reader sees it: each step with its note."""
    with open_run(root) as ckpt:
        steps = ckpt.steps()
        assert ckpt.latest() == (steps[-1] if steps else None)
        live = state_at(0)
        assert ckpt.restore(live) == ckpt.latest()
        if steps:
            assert async_ckpt.load(root)["step"] == steps[-1]
        return [(step, ckpt.load(step)["note"]) for step in steps]


def intents(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("rollback-*"))


@pytest.fixture
def unclean(tmp_path: Path) -> Path:
    """Steps 1 to 5; then 3 was saved anew as a rollback, and the process died before it could clean up after that."""
    with open_run(tmp_path) as ckpt:
        for step in range(1, 6):
            save(ckpt, step)
    with open_run(tmp_path, on_rollback="retire") as ckpt, scripted(ckpt) as disk:
        ckpt.restore(state_at(0), step=2)
        disk.fail("move", error=GONE, times=None)
        ckpt.save(state_at(3) | {"note": "new"}, step=3, overwrite=True).result()
        ckpt.wait()
    assert len(intents(tmp_path)) == 1
    assert (tmp_path / "step_00000005/manifest.json").exists()
    return tmp_path


NEW_LINE = [(1, "step 1"), (2, "step 2"), (3, "new")]


def test_before_anything_is_cleaned_up_every_reader_sees_the_new_line(unclean):
    assert line(unclean) == NEW_LINE
    with open_run(unclean) as ckpt:
        with pytest.raises(NotCommittedError, match="no step 5"):
            ckpt.load(5)
        with pytest.raises(NotCommittedError):
            ckpt.restore(state_at(0), step=4)
    assert len(intents(unclean)) == 1  # reading has changed nothing


def test_the_next_save_cleans_up_whatever_its_options_are(unclean):
    with open_run(unclean) as ckpt:
        save(ckpt, 4, "again")
    assert line(unclean) == [*NEW_LINE, (4, "again")]
    assert intents(unclean) == []
    assert not (unclean / "step_00000005/manifest.json").exists()
    assert (unclean / "latest").read_text() == "step_00000004\n"


def test_a_step_that_left_the_run_is_neither_in_the_way_nor_refused(unclean):
    with open_run(unclean) as ckpt:
        save(ckpt, 5, "again")  # no overwrite=True: there is no step 5
        with pytest.raises(StepBehindError):
            ckpt.save(state_at(4), step=4)
    assert line(unclean) == [*NEW_LINE, (5, "again")]


def test_overwriting_the_step_of_a_rollback_does_not_bring_back_what_left_the_run(unclean):
    with open_run(unclean) as ckpt:
        save(ckpt, 3, "newer", overwrite=True)
    assert line(unclean) == [*NEW_LINE[:2], (3, "newer")]
    assert intents(unclean) == []


def test_a_second_rollback_that_retires_the_first_does_not_bring_back_what_left_the_run(unclean):
    with open_run(unclean, on_rollback="retire") as ckpt:
        save(ckpt, 2, "newer", overwrite=True)
    assert line(unclean) == [(1, "step 1"), (2, "newer")]
    assert intents(unclean) == []


def test_deleting_the_step_of_a_rollback_does_not_bring_back_what_left_the_run(unclean):
    with open_run(unclean, keep=1) as ckpt:
        save(ckpt, 4, "again")
    assert line(unclean) == [(4, "again")]
    assert intents(unclean) == []


@pytest.mark.parametrize("call", ["move", "delete"])
def test_while_cleaning_up_fails_the_manifest_of_a_rollback_is_not_touched(unclean, call):
    """It alone makes the steps that left the run stay out of it."""
    for options, act in (
        ({}, lambda ckpt: ckpt.save(state_at(3), step=3, overwrite=True)),
        ({"on_rollback": "retire"}, lambda ckpt: ckpt.save(state_at(2), step=2, overwrite=True)),
        ({"keep": 1}, lambda ckpt: ckpt.save(state_at(6), step=6)),
    ):
        with open_run(unclean, **options) as ckpt, scripted(ckpt) as disk:
            disk.fail(call, "manifest" if call == "move" else "rollback-", error=GONE, times=None)
            assert isinstance(act(ckpt).exception(), StorageUnavailableError)
            ckpt.wait()
        assert line(unclean) == NEW_LINE


@pytest.mark.parametrize(
    "error",
    [GONE, StorageFullError("full", path="/ckpt", needed_bytes=9, free_bytes=1)],
    ids=["gone", "full"],
)
@pytest.mark.parametrize("at", ["rollback-", "manifest.json"])
def test_a_rollback_whose_commit_fails_leaves_the_line_as_it_was(tmp_path, at, error):
    with open_run(tmp_path) as ckpt:
        for step in (10, 20, 30):
            save(ckpt, step)
    before = line(tmp_path)
    with open_run(tmp_path, on_rollback="retire") as ckpt, scripted(ckpt) as disk:
        ckpt.restore(state_at(0), step=10)
        disk.fail("put_new", at, error=error)
        assert ckpt.save(state_at(15), step=15).exception() is error
        assert line(tmp_path) == before
        assert intents(tmp_path) == []
        save(ckpt, 15)
    assert [step for step, _ in line(tmp_path)] == [10, 15]
    assert (tmp_path / "latest").read_text() == "step_00000015\n"


def test_what_is_announced_and_not_committed_counts_for_nothing_and_goes_when_its_writer_is_dead(tmp_path):
    with open_run(tmp_path) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step)
    made = ckpt._roots.runs[0].manifest(2)
    for step, attempt in ((1, "00000000"), (2, "ffffffff"), (7, "12345678")):
        (tmp_path / f"rollback-{step}.{attempt}.json").write_bytes(made.dump())
    assert [step for step, _ in line(tmp_path)] == [1, 2, 3]
    assert len(intents(tmp_path)) == 3
    with open_run(tmp_path) as ckpt:
        save(ckpt, 4)
    assert intents(tmp_path) == []
    assert [step for step, _ in line(tmp_path)] == [1, 2, 3, 4]


def test_the_intent_of_a_living_writer_is_not_swept(tmp_path):
    with open_run(tmp_path) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step)
    with open_run(tmp_path, on_rollback="retire") as ours, scripted(ours) as disk:
        committing = disk.stop("replace", "step_00000002/manifest.json")
        handle = ours.save(state_at(2) | {"note": "new"}, step=2, overwrite=True)
        committing.wait_reached()
        assert [step for step, _ in line(tmp_path)] == [1, 2, 3]
        with open_run(tmp_path) as theirs:
            theirs._roots.runs[0].sweeper.sweep()
        assert len(intents(tmp_path)) == 1
        committing.release()
        handle.result()
        ours.wait()
    assert line(tmp_path) == [(1, "step 1"), (2, "new")]
    assert intents(tmp_path) == []


def test_a_damaged_step_leaves_the_run_with_the_others(tmp_path):
    with open_run(tmp_path) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step)
    (tmp_path / "step_00000002/manifest.json").write_text("{")
    with open_run(tmp_path, on_rollback="retire") as ckpt, scripted(ckpt) as disk:
        disk.fail("move", error=GONE, times=None)
        ckpt.save(state_at(1) | {"note": "new"}, step=1, overwrite=True).result()
        assert ckpt.steps() == [1]
        with pytest.raises((NotCommittedError, CorruptCheckpointError)):
            ckpt.load(2)
    with open_run(tmp_path) as ckpt:
        save(ckpt, 2)
    assert line(tmp_path) == [(1, "new"), (2, "step 2")]


def flipped(step: Path) -> None:
    (archive,) = step.glob("*.tar")
    flip(archive, archive.stat().st_size // 2)


def without_archive(step: Path) -> None:
    (archive,) = step.glob("*.tar")
    archive.unlink()


def without_manifest(step: Path) -> None:
    os.truncate(step / "manifest.json", 30)


@pytest.mark.parametrize(
    ("damage", "further"),
    [(flipped, False), (without_archive, False), (without_manifest, False), (flipped, True), (without_archive, True)],
)
@pytest.mark.parametrize(
    ("saved", "then"), [([2], [1, 2]), ([3], [1, 3]), ([4], [1, 3, 4]), ([2, 3], [1, 2, 3]), ([3, 4, 5], [1, 3, 4, 5])]
)
def test_a_training_whose_newest_steps_are_damaged_goes_on_from_an_older_one_as_it_was_written(
    tmp_path, damage, further, saved, then
):
    roots = [tmp_path / "near", tmp_path / "far"] if further else tmp_path / "near"
    with open_run(roots) as ckpt:
        for step in (1, 3, 4):
            save(ckpt, step)
        ckpt.catch_up()
    for root in [tmp_path / "near", *([tmp_path / "far"] if further else [])]:
        for step in (3, 4):
            damage(root / f"step_{step:08d}")
    with open_run(roots) as ckpt:
        with pytest.warns(RuntimeWarning, match=r"step [34] is skipped, and a save at or below it will take its place"):
            assert ckpt.restore(state_at(0)) == 1
        for step in saved:
            save(ckpt, step)
        with pytest.raises(StepExistsError):
            ckpt.save(state_at(0), step=saved[-1])
    with open_run(roots) as ckpt:
        live = state_at(0)
        assert ckpt.restore(live) == saved[-1]
        assert_is_state(live, saved[-1])
        assert ckpt.steps() == then
    assert async_ckpt.verify(tmp_path / "near" / f"step_{saved[-1]:08d}").num_bytes > 0


def test_only_a_step_that_restore_has_skipped_is_replaced_without_a_word(tmp_path):
    with open_run(tmp_path) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step)
    flipped(tmp_path / "step_00000003")
    with open_run(tmp_path) as ckpt:
        ckpt.restore(state_at(0), step=1)  # the user's choice, which says nothing about step 3
        with pytest.raises(StepExistsError):
            ckpt.save(state_at(3), step=3)
        with pytest.raises(StepBehindError):
            ckpt.save(state_at(2), step=2, overwrite=True)
        with pytest.warns(RuntimeWarning, match="step 3 is skipped"):
            assert ckpt.restore(state_at(0)) == 2
        ckpt.restore(state_at(0), step=1)
        with pytest.raises(StepExistsError):
            ckpt.save(state_at(3), step=3)


def test_a_root_that_was_away_is_not_believed_about_steps_that_left_the_run_elsewhere(tmp_path):
    """Also while the other root has not been cleaned up."""
    roots = [tmp_path / "near", tmp_path / "far"]
    with open_run(roots) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step)
    with open_run(roots[0], on_rollback="retire") as ckpt, scripted(ckpt) as disk:
        disk.fail("move", error=GONE, times=None)
        ckpt.save(state_at(2) | {"note": "new"}, step=2, overwrite=True).result()
    with open_run(roots) as ckpt:
        assert ckpt.steps() == [1, 2]
        assert ckpt.load()["note"] == "new"
        assert ckpt.restore(state_at(0)) == 2


def test_a_rollback_costs_readers_nothing_once_it_is_cleaned_up(tmp_path):
    with open_run(tmp_path, on_rollback="retire") as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step)
        save(ckpt, 1, "new", overwrite=True)
        assert_is_state(ckpt.load(1) | {"note": "step 1"}, 1)
    disk = ScriptedStorage(tmp_path)
    with open_run(tmp_path) as ckpt:
        ckpt._roots.runs[0].root.storage = disk
        assert ckpt.steps() == [1]
        assert [call for call, _ in disk.calls] == []
