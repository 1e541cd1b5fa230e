"""One run at several roots: one pass to all of them, and what becomes of one that is away, full, slow or behind."""

from __future__ import annotations

import contextlib
import gc
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from racing import PATIENCE, until
from scripted_disk import ScriptedStorage
from states import assert_is_state, leftovers, names_below, open_run, state_at

import async_ckpt
from async_ckpt import AsyncCheckpointer, StepBehindError, StepExistsError, StorageUnavailableError
from async_ckpt.core.saving import delivery
from async_ckpt.core.saving import story as save_story
from async_ckpt.core.storage.local import LocalStorage


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    return [tmp_path / "near", tmp_path / "far"]


@contextlib.contextmanager
def scripted(ckpt: AsyncCheckpointer, number: int) -> Iterator[ScriptedStorage]:
    """Meanwhile, one root is on a scripted disk."""
    run = ckpt._roots.runs[number]
    before = run.storage
    with ScriptedStorage(ckpt.roots[number]) as disk:
        run.root.storage = disk
        try:
            yield disk
        finally:
            run.root.storage = before


class Away(LocalStorage):
    def names(self, folder: str) -> list[str]:
        raise away(folder)


def away(path: object = "far") -> StorageUnavailableError:
    return StorageUnavailableError(f"{path} is away", path=str(path))


def assert_holds(root: Path, *steps: int, mib: int = 1) -> None:
    with open_run(root) as alone:
        assert alone.steps() == list(steps)
        for step in steps:
            assert_is_state(alone.load(step), step, mib)


def test_a_save_goes_to_every_root_and_each_alone_is_a_whole_run(roots):
    with open_run(roots, keep=2) as ckpt:
        for step in (1, 2, 3):
            report = ckpt.save(state_at(step, 9), step=step).result()
            assert [d.path for d in report.destinations] == [
                str(next((root / f"step_{step:08d}").glob("*.tar"))) for root in roots
            ]
            assert all(d.error is None and d.bandwidth > 0 for d in report.destinations)
        ckpt.wait()
        assert ckpt.steps() == [2, 3]
        assert ckpt.latest() == 3
    for root in roots:
        assert_holds(root, 2, 3, mib=9)
        assert (root / "latest").read_text() == "step_00000003\n"
    both = [next((root / "step_00000003").glob("*.tar")).read_bytes() for root in roots]
    assert both[0] == both[1]


def test_the_threads_that_wrote_to_each_root_end_with_the_run(roots):
    def writers() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if "-write-" in thread.name}

    before = writers()
    with open_run(roots) as ckpt:
        ckpt.save(state_at(1, 9), step=1).result()
        own = writers() - before
        assert own
    until(lambda: not any(thread.is_alive() for thread in own))
    with open_run(roots) as again:  # it has new ones
        again.save(state_at(2), step=2).result()


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("call", ["create", "write", "finish"])
def test_all_means_all_and_nothing_is_left_where_one_fails(roots, place, call):
    with open_run(roots) as ckpt:
        ckpt.save(state_at(1), step=1).result()
        before = [names_below(root) for root in roots]
        with scripted(ckpt, place) as disk:
            disk.fail(call, error=away())
            with pytest.raises(StorageUnavailableError, match="away"):
                ckpt.save(state_at(2, 9), step=2).result()
        assert [names_below(root) for root in roots] == before
        assert ckpt.save(state_at(3), step=3).result().status == "committed"
    for root in roots:
        assert_holds(root, 1, 3)
        assert leftovers(root) == []


def test_all_tells_where_a_step_is_committed_when_the_last_manifest_fails_and_catch_up_completes_it(roots):
    with open_run(roots) as ckpt:
        with scripted(ckpt, 1) as disk:
            disk.fail("put_new", "manifest.json", error=away())
            with pytest.raises(StorageUnavailableError, match="away") as failed:
                ckpt.save(state_at(1), step=1).result()
        assert any("committed at" in note for note in failed.value.__notes__)
        assert ckpt.steps() == [1]
        ckpt.wait()  # the failed save ends a moment after its handle
        assert ckpt.catch_up() == {str(roots[0]): [], str(roots[1]): [1]}
    for root in roots:
        assert_holds(root, 1)
        assert leftovers(root) == []


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("call", ["create", "write", "finish", "put_new"])
def test_any_commits_where_it_can_and_catches_the_other_up_at_the_next_save(roots, place, call):
    other = roots[1 - place]
    with open_run(roots, commit="any") as ckpt:
        with scripted(ckpt, place) as disk:
            disk.fail(call, error=away(), times=None)
            report = ckpt.save(state_at(1, 9), step=1).result()
            ckpt.wait()
        assert report.path.startswith(str(other))
        assert report.destinations[1 - place].error is None
        assert "StorageUnavailableError" in (report.destinations[place].error or "")
        assert ckpt.metrics()["destinations_missed"] == 1
        assert ckpt.steps() == [1]
        assert_holds(other, 1, mib=9)
        assert_holds(roots[place])
        assert leftovers(roots[place]) == []

        ckpt.save(state_at(2, 9), step=2).result()
        ckpt.wait()
    for root in roots:
        assert_holds(root, 1, 2, mib=9)


def test_any_fails_when_every_root_does(roots):
    with open_run(roots, commit="any") as ckpt:
        with scripted(ckpt, 0) as near, scripted(ckpt, 1) as far:
            near.fail("write", error=away("near"))
            far.fail("finish", error=away())
            with pytest.raises(StorageUnavailableError, match="away"):
                ckpt.save(state_at(1, 9), step=1).result()
        assert ckpt.steps() == []
        assert ckpt.save(state_at(2), step=2).result().status == "committed"


def test_any_does_not_wait_for_a_slow_root_which_arrives_later_by_itself(roots):
    with open_run(roots, commit="any") as ckpt, scripted(ckpt, 1) as disk:
        stop = disk.stop("finish")
        report = ckpt.save(state_at(1, 9), step=1).result(60)
        stop.wait_reached()
        assert report.destinations[0].error is None
        assert "not durable yet" in (report.destinations[1].error or "")
        assert_holds(roots[0], 1, mib=9)
        stop.release()
        ckpt.wait()
        assert ckpt.metrics()["destinations_missed"] == 0
    assert_holds(roots[1], 1, mib=9)


def test_a_root_whose_writes_hang_is_dropped_when_its_memory_is_needed(roots):
    with open_run(roots, commit="any", host_bytes=24 << 20, segment_bytes=4 << 20) as ckpt:
        with scripted(ckpt, 1) as disk:
            stop = disk.stop("write")
            # More than the budget holds: the hanging root would hold all of it.
            report = ckpt.save(state_at(1, 64), step=1).result(60)
            assert "memory was needed" in (report.destinations[1].error or "")
            stop.release(away())
            ckpt.wait()
        ckpt.save(state_at(2, 64), step=2).result()
        ckpt.wait()
        ckpt.catch_up()  # on a busy disk either root may have been the slow one now
    for root in roots:
        assert_holds(root, 1, 2, mib=64)


def test_all_waits_for_a_slow_root_rather_than_drop_it(roots):
    with open_run(roots, host_bytes=24 << 20, segment_bytes=4 << 20) as ckpt, scripted(ckpt, 1) as disk:
        stop = disk.stop("write", times=1)
        handle = ckpt.save
        started: list[Any] = []
        thread = threading.Thread(target=lambda: started.append(handle(state_at(1, 64), step=1)))
        thread.start()  # the copy itself has to wait for memory
        stop.wait_reached()
        stop.release()
        thread.join(60)
        assert all(d.error is None for d in started[0].result(60).destinations)
    for root in roots:
        assert_holds(root, 1, mib=64)


def test_a_step_that_exists_at_one_root_is_refused_whatever_the_rule(roots):
    with open_run(roots[1]) as alone:
        alone.save(state_at(1), step=1).result()
    for rule in ("all", "any"):
        with open_run(roots, commit=rule) as ckpt:
            with pytest.raises(StepExistsError):
                ckpt.save(state_at(1), step=1)
            with pytest.raises(StepBehindError):
                ckpt.save(state_at(0), step=0)
            assert ckpt.steps() == [1]


def test_overwriting_replaces_the_step_at_every_root(roots):
    with open_run(roots) as ckpt:
        ckpt.save(state_at(1), step=1).result()
        ckpt.save(state_at(7), step=1, overwrite=True).result()
        ckpt.wait()
    for root in roots:
        assert_is_state(async_ckpt.load(root), 7)
        assert len(list(root.glob("step_*/*.tar"))) == 1


def test_steps_are_the_union_and_latest_the_maximum(roots):
    for root, step in zip(roots, (3, 5), strict=True):
        with open_run(root) as alone:
            alone.save(state_at(step), step=step).result()
    with open_run(roots) as ckpt:
        assert ckpt.steps() == [3, 5]
        assert ckpt.latest() == 5
        assert_is_state(ckpt.load(), 5)
        state = state_at(0)
        assert ckpt.restore(state) == 5
        assert_is_state(state, 5)
        assert ckpt.catch_up() == {str(roots[0]): [5], str(roots[1]): [3]}
        assert ckpt.catch_up() == {str(roots[0]): [], str(roots[1]): []}
    for root in roots:
        assert_holds(root, 3, 5)


def test_order_decides_between_roots_that_hold_the_step(roots):
    with open_run(roots[0]) as near:
        near.save(state_at(10), step=1).result()
    with open_run(roots[1]) as far:
        far.save(state_at(20), step=1).result()
    with open_run(roots) as ckpt:
        assert_is_state(ckpt.load(1), 10)
    with open_run(roots[::-1]) as ckpt:
        assert_is_state(ckpt.load(1), 20)


def test_a_damaged_archive_is_read_from_the_next_root(roots):
    with open_run(roots) as ckpt:
        ckpt.save(state_at(1), step=1).result()
        archive = next((roots[0] / "step_00000001").glob("*.tar"))
        data = bytearray(archive.read_bytes())
        data[len(data) // 2] ^= 1
        archive.write_bytes(data)
        with pytest.warns(RuntimeWarning, match="read from another root"):
            assert_is_state(ckpt.load(1), 1)
        state = state_at(0)
        with pytest.warns(RuntimeWarning, match="read from another root"):
            assert ckpt.restore(state) == 1
        assert_is_state(state, 1)


def test_a_root_that_does_not_answer_is_left_out_of_reading(roots):
    with open_run(roots) as ckpt:
        ckpt.save(state_at(1), step=1).result()
        ckpt._roots.runs[0].root.storage = Away(roots[0])
        with pytest.warns(RuntimeWarning, match="does not answer"):
            assert ckpt.steps() == [1]
        with pytest.warns(RuntimeWarning, match="does not answer"):
            assert_is_state(ckpt.load(), 1)


def test_a_step_that_a_rollback_retired_does_not_come_back_from_a_root_that_was_away(roots):
    with open_run(roots) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(state_at(step), step=step).result()
    hidden = roots[1].with_name("hidden")
    roots[1].rename(hidden)
    with open_run(roots[0], on_rollback="retire") as alone:
        state = state_at(0)
        assert alone.restore(state, step=1) == 1
        alone.save(state_at(22), step=2, overwrite=True).result()
    hidden.rename(roots[1])
    with open_run(roots) as ckpt:
        assert ckpt.steps() == [1, 2]
        assert ckpt.latest() == 2
        assert_is_state(ckpt.load(), 22)


def test_retention_of_a_step_is_not_undone_by_a_root_that_was_away(roots):
    with open_run(roots, keep=2) as ckpt:
        ckpt.save(state_at(1), step=1).result()
        ckpt.wait()
    shutil.copytree(roots[1], roots[1].with_name("old"))
    with open_run(roots, keep=2) as ckpt:
        for step in (2, 3):
            ckpt.save(state_at(step), step=step).result()
        ckpt.wait()
    shutil.rmtree(roots[1])
    roots[1].with_name("old").rename(roots[1])
    with open_run(roots, keep=2) as ckpt:
        assert ckpt.catch_up()[str(roots[1])] == [3, 2]
        assert ckpt.catch_up()[str(roots[0])] == []


def test_catching_up_says_which_root_is_still_away_after_the_others_were_served(roots):
    with open_run(roots) as ckpt:
        ckpt.save(state_at(1), step=1).result()
        ckpt._roots.runs[1].root.storage = Away(roots[1])
        with (
            pytest.warns(RuntimeWarning, match="is ignored"),
            pytest.raises(StorageUnavailableError, match="away"),
        ):
            ckpt.catch_up()


def test_catching_up_copies_nothing_that_is_damaged(roots):
    with open_run(roots[0]) as near:
        near.save(state_at(1), step=1).result()
    archive = next(roots[0].glob("step_*/*.tar"))
    data = bytearray(archive.read_bytes())
    data[len(data) // 2] ^= 1
    archive.write_bytes(data)
    with open_run(roots) as ckpt, pytest.raises(async_ckpt.CorruptCheckpointError):
        ckpt.catch_up()
    assert not list(roots[1].rglob("*.tar*"))


def test_a_full_disk_under_any_is_a_place_that_is_missed(roots):
    with open_run(roots, commit="any") as ckpt, scripted(ckpt, 0) as disk:
        disk.fail(
            "create",
            error=async_ckpt.StorageFullError("full", path="near", needed_bytes=1, free_bytes=0),
        )
        report = ckpt.save(state_at(1), step=1).result()
        assert "StorageFullError" in (report.destinations[0].error or "")
        assert report.path.startswith(str(roots[1]))


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ([], {}, "at least one root"),
        (["a", "a"], {}, "the same"),
        (["a"], {"commit": "most"}, "commit"),
    ],
)
def test_roots_that_make_no_sense_are_refused(given, options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        AsyncCheckpointer(given, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_late_arrival_takes_no_newer_step_out_of_the_run(roots):
    with open_run(roots, commit="any", on_rollback="retire", max_in_flight=2) as ckpt:
        with scripted(ckpt, 1) as disk:
            stop = disk.stop("finish", times=1)
            ckpt.save(state_at(1), step=1).result(60)
            stop.wait_reached()
            ckpt.save(state_at(2), step=2).result(60)
            stop.release()
            ckpt.wait()
        assert ckpt.steps() == [1, 2]
        assert ckpt.latest() == 2
    for root in roots:
        assert_holds(root, 1, 2)


@pytest.mark.parametrize("place", [0, 1])
def test_a_root_that_missed_an_overwriting_is_not_read_and_is_caught_up(roots, place):
    with open_run(roots, commit="any") as ckpt:
        ckpt.save(state_at(1), step=1).result()
        ckpt.wait()
        with scripted(ckpt, place) as disk:
            disk.fail("create", error=away(), times=None)
            ckpt.save(state_at(7), step=1, overwrite=True).result()
            ckpt.wait()
        assert_is_state(ckpt.load(1), 7)
        assert ckpt.catch_up()[str(roots[place])] == [1]
        assert ckpt.catch_up()[str(roots[place])] == []
    for root in roots:
        assert_is_state(async_ckpt.load(root), 7)
        assert len(list(root.glob("step_*/*.tar"))) == 1


def test_a_damaged_step_does_not_keep_others_from_being_caught_up(tmp_path):
    roots = [tmp_path / name for name in ("a", "b", "c")]
    with open_run(roots[0]) as first:
        for step in (1, 2, 3):
            first.save(state_at(step), step=step).result()
    shutil.copytree(roots[0], roots[1])
    shutil.rmtree(roots[1] / "step_00000001")
    for step in (1, 2):
        archive = next((roots[0] / f"step_{step:08d}").glob("*.tar"))
        data = bytearray(archive.read_bytes())
        data[len(data) // 2] ^= 1
        archive.write_bytes(data)
    with open_run(roots) as ckpt, pytest.raises(async_ckpt.CorruptCheckpointError):
        ckpt.catch_up()
    assert_holds(roots[2], 2, 3)


def test_a_root_that_hangs_when_it_is_opened_is_not_asked_again_until_it_has_answered(roots, monkeypatch):
    with open_run(roots, commit="any") as ckpt:
        with scripted(ckpt, 1) as disk:
            stop = disk.stop("create")
            for step, seconds in ((1, 0.0), (2, PATIENCE)):
                monkeypatch.setattr(save_story, "OPEN_SECONDS", seconds)
                report = ckpt.save(state_at(step), step=step).result()
                stop.wait_reached()
                assert report.destinations[0].error is None
                error = report.destinations[1].error or ""
                assert ("does not answer" if step == 1 else "have not returned") in error
            ckpt.wait()
            assert [call for call, _ in disk.calls].count("create") == 1
            stop.release()
            quiet = ckpt._lineage._hanging[ckpt._roots.runs[1]]
            assert all(future.exception(PATIENCE) is None for future in quiet)
            assert leftovers(roots[1]) == []
        monkeypatch.undo()
        ckpt.save(state_at(3), step=3).result()
        ckpt.wait()
        assert all(run.steps() == [1, 2, 3] for run in ckpt._roots.runs)


def test_an_archive_that_is_finished_when_nobody_waits_for_it_any_more_is_taken_back(roots, monkeypatch):
    monkeypatch.setattr(delivery, "LAG_SECONDS", 0.0)
    with open_run(roots, commit="any") as ckpt:
        with scripted(ckpt, 0) as near, scripted(ckpt, 1) as disk:
            commit, stop = near.stop("put_new", "manifest.json"), disk.stop("finish")
            handle = ckpt.save(state_at(1), step=1)
            stop.wait_reached()  # or the lane would be dropped while it still writes
            commit.release()
            handle.result()
            ckpt.wait()
            stop.release()
            quiet = ckpt._lineage._hanging[ckpt._roots.runs[1]]
            assert all(future.exception(PATIENCE) is None for future in quiet)
        assert leftovers(roots[1]) == []
        monkeypatch.setattr(delivery, "LAG_SECONDS", PATIENCE)  # on a busy machine the other root is not that quick
        ckpt.save(state_at(2), step=2).result()
        ckpt.wait()
    for root in roots:
        assert_holds(root, 1, 2)


@pytest.mark.parametrize("place", [0, 1])
def test_all_does_not_wait_for_a_root_that_hangs_when_another_has_refused_the_save(roots, place, monkeypatch):
    monkeypatch.setattr(save_story, "OPEN_SECONDS", 0.0)
    with open_run(roots) as ckpt, scripted(ckpt, place) as full, scripted(ckpt, 1 - place) as hanging:
        full.fail("create", error=async_ckpt.StorageFullError("full", path="", needed_bytes=1, free_bytes=0))
        stop = hanging.stop("create")
        error = ckpt.save(state_at(1), step=1).exception(PATIENCE)
        assert isinstance(error, async_ckpt.StorageFullError)
        assert ckpt.metrics()["saves_failed"] == 1
        stop.release()
        quiet = ckpt._lineage._hanging[ckpt._roots.runs[1 - place]]
        assert all(future.exception(PATIENCE) is None for future in quiet)
        assert [leftovers(root) for root in roots] == [[], []]


def test_a_failed_save_leaves_no_complaint_of_asyncio(roots, caplog):
    with open_run(roots) as ckpt, scripted(ckpt, 1) as disk:
        disk.fail("finish", error=away())
        assert isinstance(ckpt.save(state_at(1), step=1).exception(), StorageUnavailableError)
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]
