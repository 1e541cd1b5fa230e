"""One run at several places: which of them takes a save, how the others follow, and what is read from where."""

import contextlib
import gc
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from racing import PATIENCE, Call, until
from scripted_disk import ScriptedStorage
from states import assert_is_state, leftovers, names_below, open_run, save, save_into, state_at

import async_ckpt
from async_ckpt import AsyncCheckpointer, Keep, Place, StepBehindError, StepExistsError, StorageUnavailableError
from async_ckpt.core.host import waits
from async_ckpt.core.host.pool import SegmentPool
from async_ckpt.core.runs.tenure import Tenure
from async_ckpt.core.saving import attempt as attempts
from async_ckpt.core.saving import mover as movers
from async_ckpt.core.storage import bulk
from async_ckpt.core.storage.bulk import new_pool
from async_ckpt.core.storage.local import LocalStorage
from async_ckpt.core.timing import monotonic
from async_ckpt.errors import ConflictError, StorageFullError


@pytest.fixture(autouse=True)
def _tries_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(movers, "_FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(movers, "_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(waits, "FINISH_SECONDS", 5.0)


@contextlib.contextmanager
def scripted(ckpt: AsyncCheckpointer, number: int) -> Iterator[ScriptedStorage]:
    """Meanwhile, one place is on a scripted disk."""
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


def full() -> StorageFullError:
    return StorageFullError("full", path="near", needed_bytes=1, free_bytes=0)


def assert_holds(root: Path, *steps: int, mib: int = 1) -> None:
    with open_run(root) as alone:
        assert alone.steps() == list(steps)
        for step in steps:
            assert_is_state(alone.load(step), step, mib)


def damage(root: Path, step: int) -> None:
    archive = next((root / f"step_{step:08d}").glob("*.tar"))
    data = bytearray(archive.read_bytes())
    data[len(data) // 2] ^= 1
    archive.write_bytes(data)


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[SegmentPool]:
    """The memory of copies that movers make."""
    made: list[SegmentPool] = []

    def make() -> SegmentPool:
        made.append(new_pool())
        return made[-1]

    monkeypatch.setattr(bulk, "new_pool", make)
    monkeypatch.setattr(movers.Mover, "may_follow", lambda *_: False)
    return made


# --- the way of a save ----------------------------------------------------------------------------------------


def test_a_save_is_committed_at_the_first_place_and_every_place_alone_becomes_a_whole_run(tmp_path):
    roots = [tmp_path / name for name in ("near", "middle", "far")]
    with open_run(roots, keep=2) as ckpt:
        for step in (1, 2, 3):
            handle = ckpt.save(state_at(step, 9), step=step)
            report = handle.result()
            assert report.path == str(next((roots[0] / f"step_{step:08d}").glob("*.tar")))
            assert [one.path for one in report.destinations] == [report.path]
            assert [handle.at(root).result(PATIENCE) for root in roots] == [step] * 3
        until(lambda: ckpt.steps() == [2, 3])  # also where step 1 was held until it was copied
    for root in roots:
        assert_holds(root, 2, 3, mib=9)
        assert (root / "latest").read_text() == "step_00000003\n"
        assert leftovers(root) == []
    archives = {next((root / "step_00000003").glob("*.tar")).read_bytes() for root in roots}
    assert len(archives) == 1


@pytest.mark.parametrize("call", ["create", "write", "finish", "put_new"])
def test_no_save_waits_for_a_further_place_that_hangs_and_none_holds_its_memory(roots, call):
    with open_run(roots, host_bytes=24 << 20, segment_bytes=4 << 20) as ckpt, scripted(ckpt, 1) as far:
        stop = far.stop(call)
        handles = [ckpt.save(state_at(step, 33), step=step) for step in (1, 2, 3)]
        assert [handle.result(PATIENCE).status for handle in handles] == ["committed"] * 3
        stop.wait_reached()
        assert not handles[-1].at(roots[1]).done()
        assert ckpt.metrics()["places_behind"] == 1
        stop.release()
        assert handles[-1].at(roots[1]).result(PATIENCE) == 3
        assert handles[0].at(roots[1]).result(PATIENCE) == 3  # passed over, or there before
        assert ckpt.metrics()["places_behind"] == 0
    assert_holds(roots[0], 1, 2, 3, mib=33)
    assert 3 in open_run(roots[1]).steps()


def test_a_place_that_is_slower_than_the_training_is_fed_the_newest_step(roots):
    with open_run(roots) as ckpt, scripted(ckpt, 1) as far:
        stop = far.stop("create", "rank_00000", times=1)
        ckpt.save(state_at(1), step=1).result()
        stop.wait_reached()
        later = [ckpt.save(state_at(step), step=step) for step in (2, 3, 4)]
        assert later[-1].result().step == 4
        stop.release()
        assert [handle.at(roots[1]).result(PATIENCE) for handle in later] == [4, 4, 4]
    assert_holds(roots[1], 1, 4)
    with open_run(roots) as ckpt:
        assert ckpt.catch_up()[str(roots[1])] == [3, 2]  # gaps are filled when that is asked
    assert_holds(roots[1], 1, 2, 3, 4)


@pytest.mark.parametrize("call", ["create", "write", "finish", "put_new", "replace"])
def test_a_copy_that_fails_is_tried_again_until_the_place_answers(roots, call):
    with open_run(roots) as ckpt, scripted(ckpt, 1) as far:
        far.fail(call, error=away(), times=3)
        assert ckpt.save(state_at(1, 9), step=1).at(roots[1]).result(PATIENCE) == 1
        ckpt.wait()
    assert_holds(roots[1], 1, mib=9)
    assert leftovers(roots[1]) == []


@pytest.mark.parametrize("error", [RuntimeError("a client's own"), ValueError("odd"), PermissionError("denied")])
def test_an_error_that_nobody_foresaw_ends_one_copy_and_no_wait(roots, error):
    with open_run(roots) as ckpt:
        mover = ckpt._lineage.tiers.movers[0]
        copy, failed = mover.copier._copy_step, []

        def copy_later(*arguments: Any, **options: Any) -> Any:
            if not failed:
                failed.append(error)
                raise error
            return copy(*arguments, **options)

        mover.copier._copy_step, mover.may_follow = copy_later, lambda _: False  # type: ignore[method-assign]
        assert ckpt.save(state_at(1, 9), step=1).at(roots[1]).result(PATIENCE) == 1
        assert failed
    assert_holds(roots[1], 1, mib=9)


def test_copies_that_follow_one_another_use_the_same_memory_which_closing_frees(roots, pools, monkeypatch):
    monkeypatch.setattr(movers, "_KEEP_MEMORY_SECONDS", PATIENCE)
    with open_run(roots) as ckpt:
        save(ckpt, 1, 2, 3)
        assert [pool.num_bytes for pool in pools] == [8 << 20]
        assert pools[0].max_segments * pools[0].segment_bytes == 128 << 20
    until(lambda: not pools[0].num_bytes)
    assert_holds(roots[1], 1, 2, 3)


def test_the_memory_of_copies_is_freed_when_none_follows(roots, pools, monkeypatch):
    monkeypatch.setattr(movers, "_KEEP_MEMORY_SECONDS", PATIENCE)
    with open_run(roots) as ckpt:
        save(ckpt, 1)
        with monkeypatch.context() as later:
            later.setattr(movers, "monotonic", lambda: monotonic() + PATIENCE)
            ckpt._lineage.tiers.wake()  # there is nothing to copy
            until(lambda: not pools[0].num_bytes)
        save(ckpt, 2)
        assert len(pools) == 2
        monkeypatch.setattr(movers, "_KEEP_MEMORY_SECONDS", 0.0)
        save(ckpt, 3)
        until(lambda: not pools[-1].num_bytes)
    assert_holds(roots[1], 1, 2, 3)


def test_a_copy_after_one_that_failed_has_memory_of_its_own(roots, pools, monkeypatch):
    """A request of the one that failed may still hold some."""
    monkeypatch.setattr(movers, "_KEEP_MEMORY_SECONDS", PATIENCE)
    with open_run(roots) as ckpt, scripted(ckpt, 1) as far:
        far.fail("write", error=away())
        save(ckpt, 1)
        assert [pool.num_bytes for pool in pools] == [0, 8 << 20]


def test_close_sends_the_newest_step_to_every_place_without_a_limit_of_bandwidth(roots):
    with open_run(roots, max_bandwidth=50e6) as ckpt, scripted(ckpt, 1) as far:
        stop = far.stop("create", "rank_00000", times=1)
        ckpt.save(state_at(1), step=1).result()
        stop.wait_reached()
        ckpt.save(state_at(2), step=2).result()
        stop.release()
    assert 2 in open_run(roots[1]).steps()


def test_close_names_what_a_place_that_does_not_answer_lacks(roots):
    ckpt = open_run(roots)
    ckpt._roots.runs[1].root.storage = Away(roots[1])
    handle = ckpt.save(state_at(1), step=1)
    arrival = handle.at(roots[1])
    with pytest.warns(RuntimeWarning, match=r"step 1 is not at .*far, which has no step yet: .*is away"):
        ckpt.close()
    with pytest.raises(StorageUnavailableError, match="step 1 is not at"):
        arrival.result(PATIENCE)


def test_close_does_not_wait_for_ever_for_a_place_that_hangs(roots, monkeypatch):
    monkeypatch.setattr(waits, "FINISH_SECONDS", 0.3)
    ckpt = open_run(roots)
    with scripted(ckpt, 1) as far:
        stop = far.stop("finish")
        ckpt.save(state_at(1), step=1).result()
        stop.wait_reached()
        with pytest.warns(RuntimeWarning, match="step 1 is not at"):
            ckpt.close()
        stop.release()


def test_a_restart_begins_to_copy_what_only_nearer_places_hold(roots):
    save_into(roots[0], 5)
    with open_run(roots) as ckpt:
        state = state_at(0)
        assert ckpt.restore(state) == 5
        until(lambda: (roots[1] / "step_00000005" / "manifest.json").exists())
    assert_holds(roots[1], 5)


def test_a_step_that_does_not_fit_the_cadence_of_a_place_is_not_copied_there(roots):
    with open_run([roots[0], Place(roots[1], every=2)]) as ckpt:
        handle = ckpt.save(state_at(2), step=2)
        assert handle.at(roots[1]).result(PATIENCE) == 2
        ckpt.save(state_at(3), step=3).result()
        assert ckpt.save(state_at(4), step=4).at(roots[1]).result(PATIENCE) == 4
        ckpt.save(state_at(5), step=5).result()
        assert ckpt.catch_up()[str(roots[1])] == []
    assert_holds(roots[1], 2, 4, 5)  # the last one, whatever the cadence


def test_steps_that_a_further_place_keeps_for_good_are_held_and_not_passed_over(roots):
    places = [roots[0], Place(roots[1], keep=Keep(last=1, every=10))]
    with open_run(places, keep=1) as ckpt, scripted(ckpt, 1) as far:
        stop = far.stop("create", "rank_00000", times=1)
        ckpt.save(state_at(9), step=9).result()
        stop.wait_reached()
        for step in (10, 11, 12):
            handle = ckpt.save(state_at(step), step=step)
            handle.result()
        ckpt.wait()
        assert (roots[0] / "step_00000010" / "manifest.json").exists()
        stop.release()
        assert handle.at(roots[1]).result(PATIENCE) == 12
    assert_holds(roots[1], 10, 12)
    assert open_run(roots[0]).steps()[-1] == 12


def test_steps_for_good_that_the_end_passes_over_stay_at_the_nearer_place_until_they_are_caught_up(roots):
    places = [roots[0], Place(roots[1], keep=Keep(last=1, every=10))]
    ckpt = open_run(places, keep=1)
    with scripted(ckpt, 1) as far:
        far.stop("create", "rank_00000")
        for step in (9, 10, 20, 21):
            ckpt.save(state_at(step), step=step).result()
        closing = Call(ckpt.close)
        until(lambda: ckpt._lineage.tiers.movers[0].worker.is_ending)
        far.release_all()
        closing.outcome()
    assert_holds(roots[1], 21)
    with open_run(places, keep=1) as again:
        assert again.restore(state_at(0)) == 21
        save(again, 22)
        assert again.steps() == [10, 20, 22]
        assert again.catch_up() == {str(roots[0]): [], str(roots[1]): [20, 10]}
        save(again, 23)
    assert_holds(roots[0], 23)
    assert_holds(roots[1], 10, 20, 23)


# --- a place that takes no saves ------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["create", "write", "finish", "put_new"])
def test_a_place_that_fails_costs_one_save_and_is_passed_over_until_it_answers(roots, call):
    with open_run(roots) as ckpt:
        with scripted(ckpt, 0) as near:
            near.fail(call, error=away("near"), times=None)
            with pytest.raises(StorageUnavailableError, match="near is away"):
                ckpt.save(state_at(1, 9), step=1).result()
            ckpt._roots.runs[0].root.storage = Silent(roots[0])
            handle = ckpt.save(state_at(2, 9), step=2)
            assert handle.result().path.startswith(str(roots[1]))
            assert handle.at(roots[1]).result(PATIENCE) == 2
            with pytest.raises(StorageUnavailableError, match="was committed behind this place"):
                handle.at(roots[0]).result(PATIENCE)
        assert ckpt.save(state_at(3, 9), step=3).result().path.startswith(str(roots[0]))
    assert_holds(roots[0], 3, mib=9)
    assert_holds(roots[1], 2, 3, mib=9)
    assert leftovers(roots[0]) == []


def test_a_handle_says_which_places_a_step_has_passed_over_even_if_their_names_begin_alike(tmp_path):
    roots = [tmp_path / name for name in ("run", "run2", "run22", "run222")]
    with open_run(roots) as ckpt, scripted(ckpt, 0) as first, scripted(ckpt, 1) as second:
        for disk in (first, second):
            disk.fail("create", error=away(), times=None)
            disk.fail("put_new", error=away(), times=None)
            assert ckpt.save(state_at(1), 1).exception() is not None
        handle = ckpt.save(state_at(2), 2)
        for root in roots[:2]:
            with pytest.raises(StorageUnavailableError, match="committed behind this place"):
                handle.at(root).result(PATIENCE)
        for root in roots[2:]:
            assert handle.at(root).result(PATIENCE) == 2


class Silent(LocalStorage):
    """A disk that lists what it has, and takes nothing."""

    def put_new(self, path: str, data: bytes) -> None:
        raise away(path)


def test_a_place_without_room_for_the_next_save_is_passed_over(roots, monkeypatch):
    with open_run(roots) as ckpt:
        save(ckpt, 1)
        monkeypatch.setattr(ckpt._roots.runs[0].storage, "free_bytes", lambda: 1000)
        assert ckpt.save(state_at(2), step=2).result().path.startswith(str(roots[1]))
        monkeypatch.undo()
        assert ckpt.save(state_at(3), step=3).result().path.startswith(str(roots[0]))


def test_a_disk_that_is_full_in_the_middle_of_a_save_is_passed_over_by_the_next(roots, monkeypatch):
    with open_run(roots) as ckpt, scripted(ckpt, 0) as near:
        near.fail("write", error=full())
        monkeypatch.setattr(near, "free_bytes", lambda: 1000)
        with pytest.raises(StorageFullError):
            ckpt.save(state_at(1), step=1).result()
        assert ckpt.save(state_at(2), step=2).result().path.startswith(str(roots[1]))


def test_a_place_where_no_write_returns_fails_the_save_and_the_next_goes_on(roots, monkeypatch):
    monkeypatch.setattr(attempts, "PROGRESS_SECONDS", 0.3)
    monkeypatch.setattr(attempts, "END_SECONDS", 0.3)
    with open_run(roots) as ckpt:
        with scripted(ckpt, 0) as near:
            stop = near.stop("write")
            with pytest.raises(StorageUnavailableError, match="nothing could be written there"):
                ckpt.save(state_at(1, 9), step=1).result(PATIENCE)
            assert ckpt.save(state_at(2, 9), step=2).result(PATIENCE).path.startswith(str(roots[1]))
            stop.release()
            until(lambda: ckpt._lineage.tiers.choose() == 0)
            assert leftovers(roots[0]) == []
        assert ckpt.save(state_at(3, 9), step=3).result(PATIENCE).path.startswith(str(roots[0]))


def test_a_place_that_hangs_when_it_is_opened_fails_the_save_that_is_given_up(roots, monkeypatch):
    monkeypatch.setattr(attempts, "OPEN_SECONDS", 0.1)
    with open_run(roots) as ckpt, scripted(ckpt, 0) as near:
        stop = near.stop("create")
        handle = ckpt.save(state_at(1), step=1)
        stop.wait_reached()
        ckpt._saver.ledger.saves()[0].give_up(away("near"))
        assert isinstance(handle.exception(PATIENCE), StorageUnavailableError)
        assert ckpt.save(state_at(2), step=2).result(PATIENCE).path.startswith(str(roots[1]))
        stop.release()
        until(lambda: leftovers(roots[0]) == [])


# --- a place in memory ----------------------------------------------------------------------------------------


def test_a_save_to_a_volatile_place_is_done_once_it_is_at_one_that_is_not(roots):
    with open_run([Place(roots[0], volatile=True), roots[1]]) as ckpt, scripted(ckpt, 1) as disk:
        stop = disk.stop("finish")
        handle = ckpt.save(state_at(1), step=1)
        stop.wait_reached()
        until(lambda: ckpt._saver.ledger.saves()[0].settled.done())
        assert not handle.done()
        assert ckpt.latest() == 1  # it is committed, though
        stop.release()
        assert handle.result(PATIENCE).path.startswith(str(roots[0]))
        assert_holds(roots[1], 1)
        shutil.rmtree(roots[0])  # a reboot
    state = state_at(0)
    with open_run(roots) as again:
        assert again.restore(state) == 1


def test_the_next_save_does_not_wait_until_the_one_before_has_left_the_memory(roots):
    with open_run([Place(roots[0], volatile=True), roots[1]]) as ckpt, scripted(ckpt, 1) as disk:
        stop = disk.stop("finish", times=1)
        first = ckpt.save(state_at(1), step=1)
        stop.wait_reached()
        second = ckpt.save(state_at(2), step=2)
        until(lambda: ckpt.latest() == 2)
        assert [first.done(), second.done()] == [False, False]
        stop.release()
        assert (first.result(PATIENCE).step, second.result(PATIENCE).step) == (1, 2)


def test_a_save_that_stays_in_memory_is_an_error_that_says_so(roots):
    ckpt = open_run([Place(roots[0], volatile=True), roots[1]])
    ckpt._roots.runs[1].root.storage = Away(roots[1])
    handle = ckpt.save(state_at(1), step=1)
    with pytest.warns(RuntimeWarning, match="step 1 is not at"), pytest.raises(StorageUnavailableError) as raised:
        Call(ckpt.close).outcome()
    assert handle.exception(PATIENCE) is raised.value
    assert any("which a reboot erases" in note for note in raised.value.__notes__)
    assert_holds(roots[0], 1)


def in_memory(roots: list[Path]) -> list[Place | Path]:
    return [Place(roots[0], volatile=True), *roots[1:]]


@pytest.mark.parametrize("call", ["create", "write", "finish", "put_new"])
@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), full()], ids=["broken", "full"])
def test_a_handle_fails_with_the_copy_that_makes_its_step_durable_and_the_step_follows(roots, call, error, caplog):
    with open_run(in_memory(roots)) as ckpt, scripted(ckpt, 1) as disk:
        down = disk.fail(call, error=error, times=None)
        handle, unseen = (ckpt.save(state_at(step, 9), step=step) for step in (1, 2))
        with pytest.raises(StorageUnavailableError, match=r"step 1 is not at .*far.*once the place answers") as raised:
            handle.result(PATIENCE)
        assert isinstance(raised.value, StorageFullError) == isinstance(error, StorageFullError)
        near = handle.committed.result().path
        assert raised.value.__notes__[0].endswith(f"is committed only at {near}, which a reboot erases")
        until(unseen.done)
        with pytest.warns(RuntimeWarning, match="step 2 is not at"):
            third = ckpt.save(state_at(3, 9), step=3)
        down.end()
        assert third.at(roots[1]).result(PATIENCE) == 3
        until(third.done)
        ckpt.wait()  # of those that nobody has looked at, none is left behind
    assert open_run(roots[1]).latest() == 3


def test_a_handle_does_not_wait_for_ever_for_a_disk_where_a_call_does_not_return(roots, monkeypatch):
    monkeypatch.setattr(movers, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(waits, "FINISH_SECONDS", 0.3)
    with open_run(in_memory(roots)) as ckpt, scripted(ckpt, 1) as disk:
        hung = disk.stop("finish", times=1)
        handle = ckpt.save(state_at(1), step=1)
        with pytest.raises(StorageUnavailableError, match=r"a copy there has made no progress for 0 s"):
            handle.result(PATIENCE)
        hung.release()
        assert handle.at(roots[1]).result(PATIENCE) == 1
    assert_holds(roots[1], 1)


def test_a_wait_for_a_step_to_leave_the_memory_names_the_place(roots, caplog, monkeypatch):
    monkeypatch.setattr(waits, "_FIRST_SECONDS", 0.0)
    with open_run(in_memory(roots)) as ckpt, scripted(ckpt, 1) as disk:
        hung = disk.stop("finish", times=1)
        handle = ckpt.save(state_at(1), step=1)
        until(handle.committed.done)
        with pytest.raises(TimeoutError):
            handle.result(timeout=0.5)
        assert f"for step 1 ({handle.path}): step 1 is not at {roots[1]}, which has no step yet" in caplog.text
        hung.release()


def test_a_step_that_stays_in_memory_is_told_at_the_end_though_its_handle_was_looked_at(roots):
    ckpt = open_run(in_memory(roots))
    ckpt._roots.runs[1].root.storage = Away(roots[1])
    assert ckpt.save(state_at(1), step=1).exception(PATIENCE)
    with (
        pytest.warns(RuntimeWarning, match=r"`async-ckpt move .*near.* --once`"),
        pytest.raises(StorageUnavailableError, match="step 1 is not at"),
    ):
        ckpt.close()


def test_the_exit_says_which_step_stays_in_memory_and_ends_with_the_status_of_a_lost_save(roots, nursery):
    ended = nursery.run(
        """
        import sys
        from async_ckpt import Place, StorageUnavailableError
        from async_ckpt.core.storage.local import LocalStorage
        from states import open_run, state_at
        class Away(LocalStorage):
            def names(self, folder):
                raise StorageUnavailableError("it is away", path=folder)
        ckpt = open_run([Place(sys.argv[1], volatile=True), sys.argv[2]])
        ckpt._roots.runs[1].root.storage = Away(sys.argv[2])
        ckpt.save(state_at(1), step=1)
        """,
        *roots,
        whole_exit=True,
    )
    assert ended.status == 75, ended.err
    assert "step 1" in ended.err
    assert "which a reboot erases" in ended.err
    assert_holds(roots[0], 1)


def test_closing_has_the_last_step_copied_that_a_place_behind_memory_would_not_take_by_its_number(roots):
    ckpt = open_run([Place(roots[0], volatile=True), Place(roots[1], every=10)])
    handles = [ckpt.save(state_at(step), step) for step in (10, 11, 12)]
    Call(ckpt.close).outcome()
    assert [handle.result(PATIENCE).step for handle in handles] == [10, 11, 12]
    assert_holds(roots[1], 10, 12)


def test_memory_and_what_lies_between_it_and_the_disk_have_a_step_before_the_disk_does(tmp_path):
    memory, peer, disk = (tmp_path / name for name in ("memory", "peer", "disk"))
    places = [Place(memory, volatile=True), Place(peer, volatile=True), disk]
    with open_run(places) as ckpt, scripted(ckpt, 2) as far:
        stop = far.stop("finish")
        handle = ckpt.save(state_at(1), step=1)
        assert [handle.at(place).result(PATIENCE) for place in (memory, peer)] == [1, 1]
        stop.wait_reached()
        assert not handle.done()
        stop.release()
        assert handle.at(disk).result(PATIENCE) == handle.result(PATIENCE).step == 1


def test_memory_is_known_by_the_mount_table(tmp_path):
    assert Place("/dev/shm/nowhere/run").is_volatile
    assert not Place("/dev/shm/run", volatile=False).is_volatile
    assert not Place("/proc/self").is_volatile
    assert not Place("s3://bucket/run").is_volatile
    assert Place(tmp_path, volatile=True).is_volatile


# --- lines ----------------------------------------------------------------------------------------------------


def test_two_machines_that_go_on_from_one_step_do_not_mix_their_steps_at_a_common_place(tmp_path):
    far, near = tmp_path / "far", [tmp_path / "near a", tmp_path / "near b"]
    save_into([near[0], far], 1)
    others = [open_run([root, far]) for root in near]
    for ckpt in others:
        for run in ckpt._roots.runs:
            run._tenure = Tenure()  # as another process has it, of which no lock tells that it lives
        assert ckpt.restore(state_at(0)) == 1
    save(others[1], 2)  # the second machine is the first to reach the common place
    handle = others[0].save(state_at(30), step=3)
    assert handle.result().path.startswith(str(near[0]))
    with pytest.raises(ConflictError, match=r"step 2 there was saved by process .* which went on from another step"):
        handle.at(far).result(PATIENCE)
    with pytest.warns(RuntimeWarning, match="step 3 is not at"):
        others[0].close()
    others[1].close()
    assert_holds(far, 1, 2)


def test_a_run_whose_near_place_was_lost_goes_on_from_the_far_one(roots):
    save_into(roots, 1, 2)
    shutil.rmtree(roots[0])
    for step in (3, 4):
        with open_run(roots) as again:
            assert again.restore(state_at(0)) == step - 1
            save(again, step)
    assert_holds(roots[1], 1, 2, 3, 4)


def test_a_near_place_that_is_new_and_was_not_restored_is_a_conflict_at_the_far_one(roots):
    save_into(roots[1], 7)
    with open_run(roots) as ckpt:
        handle = ckpt.save(state_at(1), step=1)
        with pytest.raises(ConflictError, match="step 7 there was saved"):
            handle.at(roots[1]).result(PATIENCE)
        with pytest.warns(RuntimeWarning, match="step 1 is not at|step 7 is not"):
            ckpt.close()
    assert_holds(roots[1], 7)


def test_a_rollback_reaches_further_places(roots):
    with open_run(roots, on_rollback="retire") as ckpt:
        save(ckpt, 1, 2, 3, 4)
        assert ckpt.restore(state_at(0), step=2) == 2
        with scripted(ckpt, 1) as far:
            stop = far.stop("create", times=1)
            ckpt.save(state_at(3), step=3, overwrite=True).result()
            stop.wait_reached()
            last = ckpt.save(state_at(5), step=5)
            last.result()
            stop.release()
            assert last.at(roots[1]).result(PATIENCE) == 5
    assert open_run(roots[0]).steps() == [1, 2, 3, 5]
    assert 4 not in open_run(roots[1]).steps()


@pytest.fixture
def apart(roots):
    """Two places of a run: steps 1 and 2 are at the first, which a reboot loses, and 1 and 9 at the second."""
    places = [Place(roots[0], volatile=True), Place(roots[1], keep=Keep(every=1), compression="zstd")]
    with open_run(places) as ckpt:
        save(ckpt, 1)
    with open_run(places, exit_timeout=0.0) as ckpt, scripted(ckpt, 0) as near, scripted(ckpt, 1) as far:
        far.fail("create", "step_00000002", error=away(), times=None)
        assert ckpt.save(state_at(2), 2).exception() is not None
        near.fail("create", error=full())
        assert ckpt.save(state_at(8), 8).exception() is not None
        near.fail("put_new", error=full(), times=None)
        assert ckpt.save(state_at(9), 9).exception() is None
        with contextlib.suppress(StorageUnavailableError, StorageFullError):
            ckpt.close()
    assert [open_run(root).steps() for root in roots] == [[1, 2], [1, 9]]
    return places


def test_a_place_keeps_what_a_rollback_in_memory_retires_until_the_new_step_arrives(apart, roots):
    with open_run(apart, on_rollback="retire") as ckpt, scripted(ckpt, 1) as far:
        stop = far.stop("create", "step_00000003")
        handle = ckpt.save(state_at(3), 3)
        stop.wait_reached()  # step 2, which the place keeps for good, has been copied
        assert ckpt.steps() == [1, 2, 3]
        assert open_run(roots[1]).steps() == [1, 2, 9]
        stop.release()
        handle.result()
        ckpt.wait()
    assert_holds(roots[1], 1, 2, 3)


def test_a_save_replaces_a_step_that_a_rollback_at_a_nearer_place_has_retired(apart, roots):
    with open_run(apart, on_rollback="retire", exit_timeout=0.0) as ckpt:
        with scripted(ckpt, 0) as near, scripted(ckpt, 1) as far:
            far.fail("create", "step_00000003", error=away(), times=None)
            assert ckpt.save(state_at(3), 3).exception() is not None
            near.fail("create", error=full())
            assert ckpt.save(state_at(8), 8).exception() is not None
            near.fail("put_new", error=full(), times=None)
            ckpt.save(state_at(9) | {"note": "new"}, 9).result()
            assert ckpt.steps() == [1, 2, 3, 9]
            assert ckpt.load()["note"] == "new"
        with contextlib.suppress(StorageUnavailableError, StorageFullError):
            ckpt.close()
    assert open_run(roots[1]).load()["note"] == "new"


def test_a_rollback_retires_what_an_overwritten_step_was_at_a_place_that_has_not_got_the_new_one(roots):
    with open_run(roots, on_rollback="retire", exit_timeout=0.0) as ckpt, scripted(ckpt, 1) as far:
        save(ckpt, 1, 2, 3)
        far.fail("create", error=away(), times=None)
        ckpt.save(state_at(30), step=3, overwrite=True).result()
        ckpt.save(state_at(20), step=2, overwrite=True).result()
        assert ckpt.latest() == 2
    with open_run(roots) as ckpt:
        assert ckpt.latest() == 2
        until(lambda: open_run(roots[1]).steps() == [1, 2])
        assert_is_state(open_run(roots[1]).load(2), 20)


@pytest.mark.parametrize("back", [1, 3], ids=["a rollback", "an overwriting"])
def test_what_an_overwritten_step_was_does_not_return_when_the_new_one_is_passed_over_and_deleted(roots, back):
    with open_run(roots, on_rollback="retire", keep=3) as ckpt, scripted(ckpt, 1) as far:
        save(ckpt, 1, 2, 3)
        stop = far.stop("create", times=1)
        ckpt.save(state_at(4), step=4).result()
        stop.wait_reached()
        assert ckpt.restore(state_at(0), step=back) == back
        ckpt.save(state_at(back * 10), step=back, overwrite=True).result()
        for step in (5, 6, 7, 8):
            last = ckpt.save(state_at(step), step=step)
            last.result()
        stop.release()
        last.at(roots[1]).result(PATIENCE)
        ckpt.wait()
        for step in ckpt.steps():
            assert_is_state(ckpt.load(step), back * 10 if step == back else step)


@pytest.mark.filterwarnings("ignore:.* away")
@pytest.mark.parametrize("back", [1, 3], ids=["a rollback", "an overwriting"])
def test_what_was_rolled_back_or_overwritten_does_not_return_with_a_place_that_was_away_all_the_time(roots, back):
    with open_run(roots) as ckpt:
        save(ckpt, 1, 2, 3)
    with open_run(roots, on_rollback="retire", keep=2) as ckpt:
        ckpt._roots.runs[1].root.storage = Away(roots[1])
        assert ckpt.restore(state_at(0), step=back) == back
        ckpt.save(state_at(back * 10), step=back, overwrite=True).result()
        for step in (5, 6, 7):
            ckpt.save(state_at(step), step=step).result()
        ckpt.wait()
    kept = [1, 2] if back == 3 else []
    with open_run(roots, keep=9) as ckpt:
        assert ckpt.steps() == [*kept, 6, 7]
        assert ckpt.save(state_at(8), step=8).at(roots[1]).result(PATIENCE) == 8
        ckpt.wait()
        assert ckpt.steps() == [*kept, 6, 7, 8]
    assert_holds(roots[1], *kept, 8)


@pytest.mark.filterwarnings("ignore:.* away")
def test_newer_steps_stay_when_one_is_overwritten_after_a_rollback_that_a_place_has_not_seen(roots):
    with open_run(roots) as ckpt:
        save(ckpt, 1, 2, 3)
    with open_run(roots, on_rollback="retire") as ckpt:
        ckpt._roots.runs[1].root.storage = Away(roots[1])
        assert ckpt.restore(state_at(0), step=1) == 1
        for step in (2, 5, 6):
            ckpt.save(state_at(step), step=step, overwrite=step == 2).result()
    with open_run(roots) as ckpt:
        ckpt._roots.runs[1].root.storage = Away(roots[1])
        ckpt.save(state_at(7), step=7).result()
        ckpt.save(state_at(50), step=5, overwrite=True).result()
        assert ckpt.steps() == [1, 2, 5, 6, 7]
    assert open_run(roots[0]).steps() == [1, 2, 5, 6, 7]


def test_a_rollback_whose_own_step_was_passed_over_reaches_further_places(roots):
    with open_run(roots, on_rollback="retire") as ckpt:
        save(ckpt, 1, 2, 9)
        assert ckpt.restore(state_at(0), step=1) == 1
        assert ckpt.save(state_at(2), step=2, overwrite=True).at(roots[1]).result(PATIENCE) == 2
        ckpt._roots.runs[1].root.storage = Away(roots[1])
        ckpt.save(state_at(3), step=3).result()
        ckpt.save(state_at(4), step=4).result()
        ckpt._roots.runs[1].root.storage = LocalStorage(roots[1])
        assert ckpt.save(state_at(5), step=5).at(roots[1]).result(PATIENCE) == 5
    steps = open_run(roots[1]).steps()
    assert 9 not in steps
    assert 5 in steps


def test_an_overwritten_step_replaces_its_copy(roots):
    with open_run(roots) as ckpt:
        save(ckpt, 1)
        assert ckpt.save(state_at(7), step=1, overwrite=True).at(roots[1]).result(PATIENCE) == 1
        assert_is_state(async_ckpt.load(roots[1]), 7)
    for root in roots:
        assert_is_state(async_ckpt.load(root), 7)
        assert len(list(root.glob("step_*/*.tar"))) == 1


# --- reading --------------------------------------------------------------------------------------------------


def test_steps_are_the_union_and_latest_the_maximum(roots):
    for root, step in zip(roots, (3, 5), strict=True):
        save_into(root, step)
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


def test_order_decides_between_places_that_hold_the_step(roots):
    with open_run(roots[0]) as near:
        near.save(state_at(10), step=1).result()
    with open_run(roots[1]) as far:
        far.save(state_at(20), step=1).result()
    with open_run(roots) as ckpt:
        assert_is_state(ckpt.load(1), 10)
    with open_run(roots[::-1]) as ckpt:
        assert_is_state(ckpt.load(1), 20)


def test_a_place_that_does_not_answer_is_left_out_of_reading(roots):
    with open_run(roots) as ckpt:
        save(ckpt, 1)
        ckpt._roots.runs[0].root.storage = Away(roots[0])
        with pytest.warns(RuntimeWarning, match="does not answer"):
            assert ckpt.steps() == [1]
        with pytest.warns(RuntimeWarning, match="does not answer"):
            assert_is_state(ckpt.load(), 1)


@pytest.mark.parametrize("first", [2, 3], ids=["rollback", "overwrite"])
def test_a_start_that_saved_while_a_place_was_away_replaces_what_that_place_holds(roots, monkeypatch, first):
    with open_run(roots) as ckpt:
        save(ckpt, 1)
        for step in (2, 3):
            ckpt.save(state_at(step), step).result()
        ckpt.wait()
    put_new = LocalStorage.put_new

    def refuse(storage: LocalStorage, path: str, data: bytes) -> None:
        if storage.locate(path).startswith(str(roots[0])):
            raise away("near")
        put_new(storage, path, data)

    with monkeypatch.context() as patch, open_run(roots, on_rollback="retire") as ckpt:
        patch.setattr(LocalStorage, "put_new", refuse)
        with contextlib.suppress(StorageUnavailableError):
            ckpt.save(state_at(10), 10).result()
        ckpt.save(state_at(20), first, overwrite=True).result()
        assert_is_state(ckpt.load(first), 20)

    with open_run(roots, on_rollback="retire") as ckpt:
        assert ckpt.steps() == [*range(1, first + 1)]
        assert_is_state(ckpt.load(first), 20)
        save(ckpt, first + 1)  # which the place that was away holds too, as an earlier start has saved it
    for root in roots:
        with open_run(root) as alone:
            assert max(alone.steps()) == first + 1
            for step in alone.steps():
                assert_is_state(alone.load(step), 20 if step == first else step)


def test_a_step_that_a_rollback_retired_does_not_come_back_from_a_place_that_was_away(roots):
    save_into(roots, 1, 2, 3)
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


def test_catching_up_says_which_place_is_still_away_after_the_others_were_served(roots):
    with open_run(roots) as ckpt:
        save(ckpt, 1)
        ckpt._roots.runs[1].root.storage = Away(roots[1])
        with (
            pytest.warns(RuntimeWarning, match="is ignored"),
            pytest.raises(StorageUnavailableError, match="away"),
        ):
            ckpt.catch_up()


def test_catching_up_copies_nothing_that_is_damaged(roots):
    save_into(roots[0], 1)
    damage(roots[0], 1)
    with open_run(roots) as ckpt, pytest.raises(async_ckpt.CorruptCheckpointError):
        ckpt.catch_up()
    assert not list(roots[1].rglob("*.tar*"))


def test_a_damaged_step_does_not_keep_others_from_being_caught_up(tmp_path):
    roots = [tmp_path / name for name in ("a", "b", "c")]
    save_into(roots[0], 1, 2, 3)
    shutil.copytree(roots[0], roots[1])
    shutil.rmtree(roots[1] / "step_00000001")
    for step in (1, 2):
        damage(roots[0], step)
    with open_run(roots) as ckpt, pytest.raises(async_ckpt.CorruptCheckpointError):
        ckpt.catch_up()
    assert_holds(roots[2], 2, 3)


# --- wrong calls ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "commit", "message"),
    [
        (["a", "b"], "all", r"handle\.at\(place\)"),
        (["a"], "most", "commit"),
    ],
)
def test_rules_of_commits_that_make_no_sense_are_refused(given, commit, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        AsyncCheckpointer(given, commit=commit)
    assert list(tmp_path.iterdir()) == []


def test_the_rule_any_is_what_several_places_do_and_warns(roots):
    with pytest.warns(DeprecationWarning, match="leave it out"):
        open_run(roots, commit="any").close()


def test_a_handle_knows_only_the_places_of_its_run(roots, tmp_path):
    with open_run(roots) as ckpt:
        handle = ckpt.save(state_at(1), step=1)
        with pytest.raises(ValueError, match=r"is not a place of this run, whose places are .*near.*far"):
            handle.at(tmp_path / "elsewhere")
    with open_run(tmp_path / "alone") as alone:
        handle = alone.save(state_at(1), step=1)
        with pytest.raises(ValueError, match="has only one place"):
            handle.at(tmp_path / "alone")


def test_a_failed_save_arrives_nowhere_and_leaves_no_complaint_of_asyncio(roots, caplog):
    with open_run(roots) as ckpt, scripted(ckpt, 0) as near:
        near.fail("finish", error=away("near"))
        handle = ckpt.save(state_at(1), step=1)
        assert isinstance(handle.at(roots[1]).exception(PATIENCE), StorageUnavailableError)
        assert isinstance(handle.exception(), StorageUnavailableError)
        assert names_below(roots[0]) == []
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]


@pytest.mark.parametrize("moves", [False, True])
def test_a_rollback_counts_though_the_near_place_had_lost_what_it_retires(roots, moves):
    save_into(roots, 1, 2, 3)
    shutil.rmtree(roots[0])
    ckpt = open_run(roots, on_rollback="retire", keep=1)
    assert ckpt.restore(state_at(0), step=1) == 1
    if not moves:
        ckpt._roots.runs[1].root.storage = Away(roots[1])
    for step in (2, 3):  # the second does not retire anything by itself
        ckpt.save(state_at(10 * step), step, overwrite=True).result()
    if not moves:
        with pytest.warns(RuntimeWarning, match="step 3 is not at"):
            ckpt.close()
    ckpt.close()
    state = state_at(0)
    with open_run(roots) as again:
        assert again.restore(state) == 3
        assert_is_state(state, 30)
    assert_is_state(async_ckpt.load(roots[1]), 30)


def test_a_step_that_only_the_far_place_has_is_refused(roots):
    save_into(roots, 1, 2, 3)
    shutil.rmtree(roots[0])
    with open_run(roots) as ckpt:
        assert ckpt.restore(state_at(0), step=1) == 1
        with pytest.raises(StepExistsError):
            ckpt.save(state_at(2), step=2)
        with pytest.raises(StepBehindError, match="below the committed step 3"):
            ckpt.save(state_at(2), step=2, overwrite=True)
        assert ckpt.restore(state_at(0)) == 3
        save(ckpt, 4)
    assert_holds(roots[1], 1, 2, 3, 4)


@pytest.mark.parametrize("look", [AsyncCheckpointer.steps, AsyncCheckpointer.latest, AsyncCheckpointer.load])
def test_a_step_below_those_that_the_run_has_listed_at_the_far_place_is_refused(roots, look):
    save_into(roots[1], 1, 3)
    with open_run(roots) as ckpt:
        look(ckpt)
        with pytest.raises(StepExistsError):
            ckpt.save(state_at(3), step=3)
        with pytest.raises(StepBehindError, match="below the committed step 3"):
            ckpt.save(state_at(2), step=2)
        save(ckpt, 4)
    with open_run(roots, on_rollback="retire") as ckpt:
        look(ckpt)
        shutil.rmtree(roots[0])
        save(ckpt, 2)
        assert ckpt.steps() == [1, 2]
    assert_holds(roots[1], 1, 2)


def test_the_call_of_save_asks_no_further_place(roots, monkeypatch):
    with open_run(roots) as ckpt:
        asked: list[int] = []  # the threads
        caller, far = threading.get_ident(), ckpt._roots.runs[1].storage
        for name in ("names", "free_bytes", "read", "put_new"):
            real = getattr(far, name)
            monkeypatch.setattr(
                far, name, lambda *given, real=real: (asked.append(threading.get_ident()), real(*given))[1]
            )
        save(ckpt, 1, 2)
        assert asked
        assert caller not in asked


def test_the_exit_copies_for_a_checkpointer_that_nobody_has_closed(roots, nursery):
    ended = nursery.run(
        """
        import sys
        from states import open_run, state_at
        def train():
            ckpt = open_run(sys.argv[1:])
            ckpt.save(state_at(1), step=1).result()
        train()
        import gc; gc.collect()
        """,
        *roots,
        whole_exit=True,
    )
    assert ended.status == 0, ended.err
    assert_holds(roots[1], 1)
