"""The future of a save: for threads, for event loops, for callbacks."""

import asyncio
import concurrent.futures
import gc
import json
import threading

import pytest
import torch
from racing import Thrown, until
from scripted_disk import scripted
from states import MIB, open_run, save_into, state_at

import async_ckpt
from async_ckpt import SaveHandle, SaveReport, StorageUnavailableError, UsageError
from async_ckpt.core.host.threads import LibraryThread
from async_ckpt.core.saving.drain import Drain

GONE = StorageUnavailableError("the disk is gone", path="/ckpt")


@pytest.fixture
def ckpt(tmp_path):
    with open_run(tmp_path) as opened:
        yield opened


@pytest.fixture
def held(ckpt):
    """A handle whose save stands still, and the stop that holds it."""
    with scripted(ckpt) as disk:
        stop = disk.stop("write")
        yield ckpt.save(state_at(1), step=1), stop


def test_a_handle_is_a_future_that_is_born_running_and_cannot_be_cancelled(held):
    handle, stop = held

    assert isinstance(handle, concurrent.futures.Future)
    assert handle.running()
    assert handle.cancel() is False
    assert not handle.cancelled()
    assert not handle.staging_completion.cancel()
    stop.release()
    assert isinstance(handle.result(), SaveReport)
    assert handle.cancel() is False
    assert handle.exception() is None


def test_the_tools_for_futures_take_a_handle(ckpt):
    handles = [ckpt.save(state_at(step), step=step) for step in (1, 2)]

    done, pending = concurrent.futures.wait(handles, timeout=60)
    assert done == set(handles)
    assert pending == set()
    assert {handle.result().step for handle in concurrent.futures.as_completed(handles)} == {1, 2}


def test_the_result_of_a_failed_save_is_its_error_with_its_cause(ckpt):
    with scripted(ckpt) as disk:
        disk.fail("write", error=GONE)
        handle = ckpt.save(state_at(1), step=1)
        with pytest.raises(StorageUnavailableError) as caught:
            handle.result()

    assert caught.value is GONE
    assert handle.exception() is GONE
    assert repr(handle) == "<SaveHandle step=1 failed: StorageUnavailableError>"


def test_a_handle_knows_its_step_and_path(ckpt, tmp_path):
    handle = ckpt.save(state_at(3), step=3)
    one_off = async_ckpt.save(state_at(3), tmp_path / "x.tar")

    assert (handle.step, one_off.step) == (3, None)
    assert handle.path.startswith(str(tmp_path / "step_00000003" / "rank_00000."))
    assert one_off.path == str(tmp_path / "x.tar")
    one_off.result()
    assert repr(one_off) == f"<SaveHandle {tmp_path / 'x.tar'} done>"


# --- callbacks -------------------------------------------------------------------------------------------------


def test_callbacks_run_on_a_thread_of_their_own_in_the_order_in_which_they_were_added(held):
    handle, stop = held
    seen = []
    ended = threading.Event()
    for number in range(20):
        handle.add_done_callback(lambda h, n=number: seen.append((n, h, threading.current_thread())))
    handle.add_done_callback(lambda _: ended.set())
    stop.release()
    assert ended.wait(60)

    assert [number for number, _, _ in seen] == list(range(20))
    assert all(h is handle for _, h, _ in seen)
    assert all(thread is not threading.main_thread() for _, _, thread in seen)


def test_a_callback_added_after_the_end_runs_too_and_on_another_thread(ckpt):
    handle = ckpt.save(state_at(1), step=1)
    handle.result()
    threads = []
    ended = threading.Event()
    handle.add_done_callback(lambda _: (threads.append(threading.current_thread()), ended.set()))

    assert ended.wait(60)
    assert threads[0] is not threading.current_thread()


def test_every_callback_runs_exactly_once_however_it_races_with_the_end(ckpt):
    for step in range(10):
        handle = ckpt.save(state_at(step), step=step)
        counts = [0] * 50
        ended = threading.Semaphore(0)

        def count(_, number, counts=counts, ended=ended):
            counts[number] += 1
            ended.release()

        for number in range(50):
            handle.add_done_callback(lambda h, n=number, count=count: count(h, n))
        for _ in range(50):
            assert ended.acquire(timeout=60)
        assert counts == [1] * 50


def test_what_a_callback_raises_is_logged_and_harms_nobody(ckpt, caplog):
    handle = ckpt.save(state_at(1), step=1)
    ended = threading.Event()

    def throw(_):
        raise Thrown("in the callback")

    handle.add_done_callback(throw)
    handle.add_done_callback(lambda _: ended.set())
    assert ended.wait(60)

    assert handle.result().status == "committed"
    assert [(r.name, r.levelname) for r in caplog.records] == [("async_ckpt", "ERROR")]
    assert "Thrown: in the callback" in caplog.text
    assert ckpt.save(state_at(2), step=2).result().status == "committed"


def test_a_callback_gets_the_handle_of_a_failed_save_and_has_then_looked_at_its_error(ckpt):
    with scripted(ckpt) as disk:
        disk.fail("write", error=GONE)
        handle = ckpt.save(state_at(1), step=1)
        seen = []
        ended = threading.Event()
        handle.add_done_callback(lambda h: (seen.append(h.exception()), ended.set()))
        assert ended.wait(60)
        ckpt.wait()

    assert seen == [GONE]


def test_a_callback_may_take_as_long_as_it_likes_without_holding_up_a_save(ckpt):
    go, ended = threading.Event(), threading.Event()
    handle = ckpt.save(state_at(1), step=1)
    handle.add_done_callback(lambda _: (go.wait(60), ended.set()))
    handle.result()

    assert ckpt.save(state_at(2), step=2).result(60).status == "committed"
    ckpt.wait(timeout=60)
    assert not ended.is_set()
    go.set()
    assert ended.wait(60)


def test_waiting_in_a_callback_for_another_unfinished_save_is_refused_at_once(ckpt):
    with scripted(ckpt) as disk:
        first = ckpt.save(state_at(1), step=1)
        first.result()
        disk.stop("write")
        second = ckpt.save(state_at(2), step=2)
        errors = []
        ended = threading.Event()

        def wait(_):
            for call in (second.result, second.exception):
                try:
                    call(timeout=60)
                except RuntimeError as error:
                    errors.append(error)
            errors.append(first.result().status)
            ended.set()

        first.add_done_callback(wait)
        assert ended.wait(60)
        disk.release_all()

    assert [type(error) for error in errors[:2]] == [UsageError, UsageError]
    assert "would wait for itself" in str(errors[0])
    assert errors[2] == "committed"


def test_waiting_for_the_staging_in_a_library_thread_is_refused_at_once():
    staging = concurrent.futures.Future()
    handle = SaveHandle(1, "x", staging, lambda: None)
    errors = []

    def wait():
        try:
            handle.wait_staged()
        except RuntimeError as error:
            errors.append(error)

    thread = LibraryThread(target=wait)
    thread.start()
    thread.join(60)
    assert len(errors) == 1


# --- staging ---------------------------------------------------------------------------------------------------


def test_wait_staged_returns_when_the_snapshot_is_complete_though_the_disk_stands_still(held):
    handle, _ = held
    handle.wait_staged(timeout=60)

    assert not handle.done()


def test_wait_staged_times_out_while_the_copy_waits_for_the_disk(tmp_path):
    p = torch.nn.Parameter(torch.ones(10 * MIB))
    optimizer = torch.optim.SGD([p])
    with open_run(tmp_path, host_bytes=16 * MIB) as ckpt, scripted(ckpt) as disk:
        disk.stop("write")
        handle = ckpt.save({"p": p}, step=1, guard=optimizer)
        with pytest.raises(TimeoutError):
            handle.wait_staged(timeout=0)
        disk.release_all()
        handle.wait_staged(timeout=60)


# --- event loops -----------------------------------------------------------------------------------------------


async def test_a_handle_that_has_ended_can_be_awaited_again_and_again(ckpt):
    handle = ckpt.save(state_at(1), step=1)
    assert await handle is await handle is handle.result()


async def test_several_handles_can_be_gathered(ckpt):
    handles = [ckpt.save(state_at(step), step=step) for step in range(3)]
    assert [report.step for report in await asyncio.gather(*handles)] == [0, 1, 2]


async def test_awaiting_a_failed_save_raises_its_error(ckpt):
    with scripted(ckpt) as disk:
        disk.fail("write", error=GONE)
        with pytest.raises(StorageUnavailableError):
            await ckpt.save(state_at(1), step=1)
    ckpt.wait()


async def test_an_await_that_is_cancelled_leaves_the_save_alone(held):
    handle, stop = held

    async def wait():
        return await handle

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    stop.release()

    assert (await handle).status == "committed"
    assert not handle.cancelled()


async def test_a_wrapped_handle_is_a_future_of_the_loop(ckpt):
    assert (await asyncio.wrap_future(ckpt.save(state_at(1), step=1))).status == "committed"


async def test_the_loop_runs_on_while_a_save_is_awaited(held):
    handle, stop = held
    ticks = 0

    async def tick():
        nonlocal ticks
        while not handle.done():
            ticks += 1
            if ticks == 3:
                stop.release()
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    await handle
    await ticking
    assert ticks >= 3


def test_a_loop_that_is_closed_before_the_save_ends_harms_nobody(held):
    handle, stop = held

    async def begin():
        task = asyncio.ensure_future(asyncio.wait_for(handle, 60))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(begin())
    stop.release()
    assert handle.result().status == "committed"


def test_handles_end_on_loops_in_several_threads(ckpt):
    handle = ckpt.save(state_at(1), step=1)
    reports = []

    async def wait():
        return await handle

    threads = [threading.Thread(target=lambda: reports.append(asyncio.run(wait()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert reports == [handle.result()] * 4


def test_a_handle_that_is_thrown_away_does_not_stop_its_save(ckpt):
    ckpt.save(state_at(1), step=1)
    until(lambda: ckpt.steps() == [1])


def living(kind: type) -> int:
    gc.collect()
    return sum(type(one) is kind for one in gc.get_objects())


def test_whoever_keeps_a_handle_keeps_no_plan_of_its_save(tmp_path):
    before = living(Drain)
    with open_run(tmp_path) as ckpt:
        handles = [ckpt.save(state_at(step), step=step) for step in range(1, 6)]
        ckpt.wait()
        assert living(Drain) <= before
        assert all(handle.progress.fraction == 1.0 for handle in handles)


def test_a_run_that_never_asks_should_save_keeps_no_handle_of_each_save(tmp_path):
    before = living(SaveHandle)
    with open_run(tmp_path, keep=1) as ckpt:
        for step in range(1, 101):
            ckpt.save({"n": step}, step=step).result()
        ckpt.wait()
        assert living(SaveHandle) - before < 80


def test_the_folder_of_a_trace_is_made_and_may_be_there_already(tmp_path):
    trace = tmp_path / "traces" / "today" / "run.json"
    for step in (1, 2):
        save_into(tmp_path / "run", step, trace=trace)
        assert json.loads(trace.read_text())
