"""The limit of bandwidth: when writes may begin, and that nobody waits for one that nobody needs."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from racing import Call
from scripted_disk import scripted
from states import assert_is_state, everywhere, leftovers, open_run, state_at

import async_ckpt
from async_ckpt import AsyncCheckpointer, StorageFullError
from async_ckpt.core.storage.pace import Pace

MIB = 1 << 20


@given(
    sizes=st.lists(st.integers(1, 10**9), min_size=1, max_size=50),
    pauses=st.lists(st.floats(0, 10), min_size=50, max_size=50),
)
def test_no_write_begins_before_the_one_before_is_over_at_that_bandwidth(sizes, pauses):
    now = [100.0]
    pace = Pace(1e6, lambda: now[0])
    over = 100.0
    for num_bytes, pause in zip(sizes, pauses, strict=False):
        now[0] += pause
        left = pace._begin(num_bytes)
        if left:
            assert left == pytest.approx(over - now[0])
            now[0] = max(over, now[0] + left)
            assert pace._begin(num_bytes) == 0
        assert now[0] >= over
        over = now[0] + num_bytes / 1e6


def test_what_has_time_does_not_wait():
    def never() -> None:
        raise AssertionError("it waited")

    Pace(1.0).wait(10**9, never)


def test_who_waits_learns_that_nobody_needs_it_any_more():
    pace, error = Pace(1.0), RuntimeError("given up")
    errors: list[RuntimeError] = []

    def check() -> None:
        if errors:
            raise errors[0]

    pace.wait(10**9, check)
    waiting = Call(lambda: pace.wait(1, check))
    waiting.wait_until_inside("wait")
    errors.append(error)
    with pytest.raises(RuntimeError, match="given up"):
        waiting.outcome()


def test_a_save_takes_at_least_as_long_as_its_bytes_at_that_bandwidth(tmp_path):
    with open_run(tmp_path, max_bandwidth=100 * MIB, segment_bytes=4 * MIB) as ckpt:
        begin = time.perf_counter()
        report = ckpt.save(state_at(1, 40), step=1).result()
        # What has begun last need not be over.
        assert time.perf_counter() - begin >= (report.num_bytes - 4 * MIB) / (100 * MIB)
        assert_is_state(ckpt.load(1), 1, 40)


def test_the_caller_is_not_held_up_by_it(tmp_path):
    with open_run(tmp_path, max_bandwidth=1.0, segment_bytes=4 * MIB) as ckpt, scripted(ckpt) as disk:
        first = disk.stop("write")
        handle = ckpt.save(state_at(1, 9), step=1)
        handle.wait_staged()
        first.wait_reached()  # one write is under way, and the next may begin in weeks
        assert not handle.done()
        first.release(StorageFullError("full", path="x", needed_bytes=2, free_bytes=1))
        with pytest.raises(StorageFullError):
            handle.result()


def test_a_save_that_waits_holds_up_no_other(tmp_path):
    """Nor does one that was given up leave a wait behind."""
    slow = open_run(tmp_path / "slow", max_bandwidth=1.0, segment_bytes=4 * MIB)
    with scripted(slow) as disk:
        first = disk.stop("write", times=1)
        waiting = slow.save(state_at(1, 80), step=1)
        first.wait_reached()
        async_ckpt.save(state_at(2, 9), tmp_path / "x.tar").result()
        assert not waiting.done()
        first.release(StorageFullError("full", path="x", needed_bytes=2, free_bytes=1))
        with pytest.raises(StorageFullError):
            waiting.result()
    slow.close()


def test_each_of_several_places_has_the_bandwidth_for_itself(tmp_path):
    roots = [tmp_path / "near", tmp_path / "far"]
    with open_run(roots, max_bandwidth=1e12) as ckpt:
        everywhere(ckpt, ckpt.save(state_at(1, 9), step=1))
        assert sorted(ckpt._saver._writers._paces) == sorted(str(root) for root in roots)


def test_a_save_that_fails_does_not_go_on_waiting(tmp_path):
    full = StorageFullError("full", path="x", needed_bytes=2, free_bytes=1)
    with open_run(tmp_path, max_bandwidth=1.0, segment_bytes=4 * MIB) as ckpt, scripted(ckpt) as disk:
        disk.fail("write", error=full)
        with pytest.raises(StorageFullError):
            ckpt.save(state_at(1, 9), step=1).result()
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("wrong", [0, -1.0, float("inf"), float("nan")])
def test_what_is_no_bandwidth_is_refused(tmp_path, wrong):
    with pytest.raises(ValueError, match="max_bandwidth must be a number of bytes per second"):
        AsyncCheckpointer(tmp_path, max_bandwidth=wrong)


def test_the_limit_applies_to_copies_that_catch_a_root_up(tmp_path, monkeypatch):
    roots = [tmp_path / "a", tmp_path / "b"]
    with open_run(roots[0]) as ckpt:
        report = ckpt.save(state_at(1, mib=9), step=1).result()
    paced: list[int] = []
    monkeypatch.setattr(Pace, "wait", lambda _, num_bytes, check: paced.append(num_bytes))

    with open_run(roots, max_bandwidth=1e12) as ckpt:
        assert ckpt.catch_up() == {str(roots[0]): [], str(roots[1]): [1]}

    assert sum(paced) == report.num_bytes
