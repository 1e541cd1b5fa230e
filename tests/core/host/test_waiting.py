"""Signs of life: whoever waits is told for what. Time is a number that the tests move; a wait wakes five times a second."""

import asyncio
import logging
import re
import signal
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from budgets import with_budget
from racing import PATIENCE, Call, Skipping, until
from scripted_disk import ScriptedStorage, scripted
from states import MIB, SEGMENT, open_run, state_at, weight

import async_ckpt
from async_ckpt.core.host import waits
from async_ckpt.core.host.loop import awaitable, get_loop
from async_ckpt.core.host.threads import start_thread
from async_ckpt.core.report import Progress
from async_ckpt.core.saving import kept_memory
from async_ckpt.core.staging import snapshot


class Watched(Skipping):
    """Its time goes on only when it is told to, and it counts who looks at it."""

    looks = 0

    def now(self) -> float:
        self.looks += 1
        return self.skipped


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """What every wait looks at."""
    made = Watched()
    monkeypatch.setattr(waits, "TIMEKEEPER", made)
    monkeypatch.setattr(waits, "_FIRST_SECONDS", 2.0)
    return made


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was said as a warning."""
    return lambda: [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


class Held:
    """A run with a save of step 1, a part of which the disk holds."""

    def __init__(self, ckpt: async_ckpt.AsyncCheckpointer, disk: ScriptedStorage) -> None:
        self.ckpt, self.disk = ckpt, disk
        stop = disk.stop("write", times=1)
        self.handle = ckpt.save(state_at(1, 11), step=1)
        stop.wait_reached()
        # Of three segments one is held; it is digested all the same, so that the last one is written, too.
        until(lambda: self.handle.progress.written_bytes == self.handle.progress.total_bytes - SEGMENT)


@pytest.fixture
def held(tmp_path, timer) -> Iterator[Held]:
    ckpt = open_run(tmp_path)
    with scripted(ckpt) as disk:
        yield Held(ckpt, disk)
    ckpt.wait()


def call_that_waits(timer: Skipping, fn: Callable[[], Any], inside: str) -> Call:
    """Another thread's call, once it waits."""
    call = Call(fn)
    call.wait_until_inside(inside)
    return call


def wakes_up(timer: Watched) -> None:
    """Return when a wait has looked at the clock twice more: it knows by then when it is to end."""
    looks = timer.looks
    until(lambda: timer.looks > looks + 2)


HOW_FAR = r"step 1 \(.*/step_00000001/rank_00000\.\w{8}\.tar\): 64% written, 7\.4 MB of 11\.5 MB"


@pytest.mark.parametrize(
    ("call", "where"),
    [
        (lambda held: held.ckpt.close(), r"in close\(\)"),
        (lambda held: held.ckpt.wait(), r"in wait\(\)"),
        (lambda held: held.handle.result(), r"in result\(\)"),
        (lambda held: held.handle.exception(), r"in exception\(\)"),
        (lambda held: held.ckpt.latest(), r"in latest\(\)"),
        (lambda held: held.ckpt.restore(state_at(9, 11)), r"in restore\(\)"),
        (lambda held: held.ckpt.save(state_at(2), step=2), r"in save\(\) of step 2"),
    ],
)
def test_who_waits_is_told_for_what_and_how_far_it_is_after_two_seconds_and_then_every_thirty(
    held, timer, lines, call, where
):
    waiter = call_that_waits(timer, lambda: call(held), "wait_for" if "save" not in where else "enter")
    assert lines() == []

    timer.sleep(2.0)
    until(lambda: len(lines()) == 1)
    assert re.fullmatch(rf"async_ckpt has waited 2 s {where} for {HOW_FAR}", lines()[0])

    timer.sleep(30.0)
    until(lambda: len(lines()) == 2)
    assert f"waited 32 s {where}".replace("\\", "") in lines()[1]

    held.disk.release_all()
    waiter.outcome()
    assert len(lines()) == 2


def test_a_short_wait_is_not_told_of(held, timer, lines):
    waiter = call_that_waits(timer, held.handle.result, "wait_for")
    timer.sleep(1.5)
    looks = timer.looks
    until(lambda: timer.looks > looks + 1)
    held.disk.release_all()
    waiter.outcome()

    assert lines() == []


def test_of_several_saves_the_oldest_is_told(tmp_path, timer, lines):
    ckpt = open_run(tmp_path, max_in_flight=3)
    with scripted(ckpt) as disk:
        disk.stop("write")
        for step in range(3):
            ckpt.save(state_at(step), step=step)
        waiter = call_that_waits(timer, ckpt.close, "wait_for")
        timer.sleep(2.0)
        until(lambda: len(lines()) == 1)
        assert re.search(r"for step 0 \(.*\) and 2 more: 0% written, 0 bytes of 1\.\d MB", lines()[0])
        disk.release_all()
        waiter.outcome()


def test_a_save_that_is_committed_and_cleans_up_says_so(tmp_path, timer, lines):
    ckpt = open_run(tmp_path, keep=1)
    ckpt.save(state_at(1), step=1).result()
    ckpt.wait()
    with scripted(ckpt) as disk:
        stop = disk.stop("delete")
        ckpt.save(state_at(2), step=2).result()
        stop.wait_reached()
        waiter = call_that_waits(timer, ckpt.wait, "wait_for")
        timer.sleep(2.0)
        until(lambda: len(lines()) == 1)
        assert re.search(r"for step 2 \(.*\): committed, and cleaning up", lines()[0])
        disk.release_all()
        waiter.outcome()


def test_a_save_behind_one_that_another_thread_still_plans_says_so(tmp_path, timer, lines, gate):
    class Slow:
        def state_dict(self) -> dict[str, Any]:
            gate.passed()
            return {}

    with open_run(tmp_path) as ckpt:
        first = Call(lambda: ckpt.save({"slow": Slow()}, step=1))
        gate.wait_reached()
        second = call_that_waits(timer, lambda: ckpt.save(state_at(2), step=2), "enter")
        timer.sleep(2.0)
        until(lambda: len(lines()) == 1)
        assert lines()[0].endswith("in save() of step 2 for another save")
        gate.open()
        first.outcome()
        second.outcome()


def test_a_one_off_save_is_told_of_by_its_path(archive, timer, lines, gate, monkeypatch):
    from async_ckpt.core.storage.local import LocalSink

    write = LocalSink.write
    monkeypatch.setattr(LocalSink, "write", lambda *a: (gate.passed(), write(*a)))
    handle = async_ckpt.save(state_at(1), archive)
    waiter = call_that_waits(timer, handle.result, "wait_for")
    timer.sleep(2.0)
    until(lambda: len(lines()) == 1)
    assert f"in result() for {archive}: 0% written" in lines()[0]
    gate.open()
    waiter.outcome()


# --- behind a copy, or for memory ----------------------------------------------------------------------------------

BUDGET = 4 * SEGMENT  # of which the archive of `large` needs twice as much
COPY_OF_STEP_1 = r"the copy of step 1 \(.*\.tar\): \d+\.\d MB of 33\.\d MB copied"


class Copying:
    """A guarded save of step 1 that is not staged yet: a disk that writes nothing holds all memory."""

    def __init__(self, ckpt: async_ckpt.AsyncCheckpointer, disk: ScriptedStorage) -> None:
        self.ckpt, self.disk = ckpt, disk
        self.p = torch.nn.Parameter(weight(1, 32).float(), requires_grad=False)
        self.optimizer = torch.optim.SGD([self.p], lr=1.0)
        disk.stop("write")

    def save(self, *, guard: torch.optim.Optimizer | None) -> async_ckpt.SaveHandle:
        return self.ckpt.save({"p": self.p}, step=1, guard=guard)


@pytest.fixture
def copying(tmp_path, timer) -> Iterator[Copying]:
    with open_run(tmp_path, host_bytes=BUDGET) as ckpt, scripted(ckpt) as disk:
        yield Copying(ckpt, disk)


def test_a_save_that_waits_for_host_memory_is_told_of_it(copying, timer, lines):
    waiter = call_that_waits(timer, lambda: copying.save(guard=None), "_fill_now")
    wakes_up(timer)
    timer.sleep(2.0)
    until(lambda: len(lines()) == 1)
    assert re.fullmatch(rf"async_ckpt has waited 2 s for {COPY_OF_STEP_1}", lines()[0])
    copying.disk.release_all()
    waiter.outcome().result()


@pytest.mark.parametrize(
    ("call", "inside", "where"),
    [
        (lambda copying, handle: copying.optimizer.step(), "hold", " in optimizer.step()"),
        (lambda copying, handle: handle.wait_staged(), "wait_for", ""),
        (lambda copying, handle: handle.staging_completion.exception(), "wait_for", ""),
        (lambda copying, handle: copying.ckpt.restore({"p": copying.p}), "wait_for", ""),
    ],
)
def test_who_waits_for_a_copy_is_told_how_far_it_is(copying, timer, lines, call, inside, where):
    handle = copying.save(guard=copying.optimizer)
    waiter = call_that_waits(timer, lambda: call(copying, handle), inside)
    wakes_up(timer)
    timer.sleep(2.0)
    until(lambda: len(lines()) == 1)
    assert re.fullmatch(rf"async_ckpt has waited 2 s{re.escape(where)} for {COPY_OF_STEP_1}", lines()[0])
    copying.disk.release_all()
    waiter.outcome()


def test_who_reads_a_snapshot_that_is_not_complete_is_told_how_far_it_is(timer, lines, gate, monkeypatch):
    fill = snapshot.Snapshot._fill_later
    monkeypatch.setattr(snapshot.Snapshot, "_fill_later", lambda *a: (gate.passed(), fill(*a)))
    p = torch.nn.Parameter(weight(1).float(), requires_grad=False)
    with async_ckpt.snapshot({"p": p}, guard=torch.optim.SGD([p])) as snap:
        waiter = call_that_waits(timer, lambda: snap["p"], "wait_for")
        wakes_up(timer)
        timer.sleep(2.0)
        until(lambda: len(lines()) == 1)
        assert lines()[0] == "async_ckpt has waited 2 s for the copy of a snapshot: 0 bytes of 1.0 MB copied"
        gate.open()
        waiter.outcome()


def test_a_wrapped_call_that_waits_for_the_memory_of_earlier_ones_is_told_of_it(
    tmp_path, timer, lines, gate, monkeypatch
):
    monkeypatch.setattr(kept_memory._shared, "host_memory", with_budget(monkeypatch, MIB))
    save = async_ckpt.wrap(lambda path, value: (gate.passed(), torch.save(value, path)))
    first = save(tmp_path / "1.pt", weight(1))
    waiter = call_that_waits(timer, lambda: save(tmp_path / "2.pt", weight(2)), "take")
    wakes_up(timer)
    timer.sleep(2.0)
    until(lambda: len(lines()) == 1)
    assert lines()[0] == ("async_ckpt has waited 2 s for 1.0 MB of host memory, while earlier copies hold 1.0 MB")
    gate.open()
    waiter.outcome().result()
    first.result()


def test_who_waits_for_a_call_is_woken_when_it_ends(monkeypatch):
    """And not at the next look at whether it still goes on."""
    monkeypatch.setattr("async_ckpt.core.host.loop.LIVENESS_SECONDS", 1e6)
    assert Call(lambda: get_loop().call(lambda: "ended", "a call")).outcome() == "ended"


def test_threads_of_the_library_say_nothing(timer, lines):
    wait = waits.Wait("in a test", waits.ENDS_THE_WAIT)
    timer.sleep(3.0)
    thread = start_thread("test", lambda: wait.goes_on(lambda: "a future"))
    thread.join(PATIENCE)
    assert lines() == []
    wait.goes_on(lambda: "a future")
    assert len(lines()) == 1


def test_waiting_still_ends_with_its_timeout(held, timer):
    waiter = call_that_waits(timer, lambda: held.ckpt.wait(timeout=100.0), "wait_for")
    wakes_up(timer)
    timer.sleep(100.0)
    with pytest.raises(TimeoutError, match=r"under way after 100\.0 s"):
        waiter.outcome()

    waiter = call_that_waits(timer, lambda: held.handle.result(100.0), "wait_for")
    wakes_up(timer)
    timer.sleep(100.0)
    with pytest.raises(TimeoutError):
        waiter.outcome()
    assert not held.handle.looked_at


def test_waiting_for_nothing_takes_no_time(timer):
    done: Future[None] = Future()
    done.set_exception(OSError("of the save"))

    assert waits.wait_for(done, 0.0)
    assert not waits.wait_for(Future(), 0.0)
    assert not waits.wait_for(Future(), -1.0)


@pytest.mark.parametrize(
    ("progress", "shown"),
    [
        (Progress(0, 0, 0), "0 bytes written"),
        (Progress(0, 0, 1), "1 byte written"),
        (Progress(0, 0, 5_000_000), "5.0 MB written"),
        (Progress(10_000_000, 0, 5_000_000), "50% written, 5.0 MB of 10.0 MB"),
        (Progress(4096, 0, 1024), "25% written, 1.0 kB of 4.1 kB"),
        (Progress(140 * 10**9, 0, 35 * 10**9), "25% written, 35.00 GB of 140.00 GB"),
    ],
)
def test_progress_is_shown_in_percent_and_bytes(progress, shown):
    assert str(progress) == shown


# --- in processes of their own -------------------------------------------------------------------------------------

# When the first wait has begun, an hour passes. SIGUSR1 lets the disk go on.
HEAD = """
import signal, sys
import async_ckpt
from async_ckpt.core.host import waits
from async_ckpt.core.saving.exit import log_to_stderr
from async_ckpt.core.timing import Timekeeper
from children import hold_writes
from states import open_run, state_at

class Jumping(Timekeeper):
    looks = 0
    def now(self):
        self.looks += 1
        return super().now() + (3600.0 if self.looks > 1 else 0.0)

go = hold_writes()
signal.signal(signal.SIGUSR1, lambda *_: go.set())
ckpt = open_run(sys.argv[1])
handle = ckpt.save(state_at(1, 5), step=1)
waits.TIMEKEEPER = Jumping()
"""


def script(body: str) -> str:
    return HEAD + textwrap.dedent(body)


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (
            "pass",
            "at exit for step 1 (…): 0% written, 0 bytes of 5.3 MB; Ctrl-C gives up what is not committed",
        ),
        (
            "ckpt.close()",
            "in close() for step 1 (…): 0% written, 0 bytes of 5.3 MB; Ctrl-C gives up what is not committed",
        ),
        (
            "ckpt.wait()",
            "in wait() for step 1 (…): 0% written, 0 bytes of 5.3 MB; Ctrl-C ends the wait, not the save",
        ),
        (
            "handle.result()",
            "in result() for step 1 (…): 0% written, 0 bytes of 5.3 MB; Ctrl-C ends the wait, not the save",
        ),
        (
            "ckpt.save({}, step=2)",
            "in save() of step 2 for step 1 (…): 0% written, 0 bytes of 5.3 MB; Ctrl-C ends the call, without saving",
        ),
    ],
)
def test_the_line_is_seen_on_stderr_without_any_configuration_and_says_what_ctrl_c_does(tmp_path, nursery, end, told):
    child = nursery.start(script(end), tmp_path / "run")
    child.wait_for_line("async_ckpt has waited", "err")
    child.send(signal.SIGUSR1)
    ended = child.ended()

    assert ended.status == 0, ended.err
    line = re.sub(r"\([^()]+\)(?=:)", "(…)", ended.err.splitlines()[0])
    assert line == f"async_ckpt has waited 3600 s {told}"
    assert 1 in open_run(tmp_path / "run").steps()


@pytest.mark.parametrize(("end", "status"), [("pass", 130), ("try: ckpt.close()\nfinally: go.set()", -signal.SIGINT)])
def test_ctrl_c_then_does_what_was_said(tmp_path, nursery, end, status):
    child = nursery.start(script("async_ckpt.core.host.waits.ABANDON_SECONDS = 0.0\n" + end), tmp_path / "run")
    child.wait_for_line("Ctrl-C gives up", "err")
    child.send(signal.SIGINT)

    assert child.ended().status == status
    assert open_run(tmp_path / "run").steps() == []


@pytest.mark.parametrize(
    "how",
    [
        "signal.signal(signal.SIGINT, signal.SIG_IGN); ckpt.close()",
        "import threading; t = threading.Thread(target=ckpt.close); t.start(); t.join()",
    ],
)
def test_where_ctrl_c_does_not_reach_the_wait_nothing_is_said_of_it(tmp_path, nursery, how):
    child = nursery.start(script(how), tmp_path / "run")
    child.wait_for_line("in close() for step 1", "err")
    child.send(signal.SIGUSR1)
    ended = child.ended()

    assert ended.status == 0
    assert not [line for line in ended.err.splitlines() if "in close()" in line and "Ctrl-C" in line]


@pytest.mark.parametrize("error", ["OSError('nobody reads it')", "ValueError('it is closed')"])
def test_an_exit_that_can_say_nothing_still_drains(tmp_path, nursery, error):
    body = f"""
    class Broken:
        def write(self, text):
            print("tried", flush=True)
            raise {error}

        def flush(self): ...

    sys.stderr = Broken()
    """
    child = nursery.start(script(body), tmp_path / "run")
    child.wait_for_line("tried")
    child.send(signal.SIGUSR1)

    assert child.ended().status == 0
    assert open_run(tmp_path / "run").steps() == [1]


def test_without_a_stderr_nothing_is_said_on_stdout(tmp_path, nursery):
    body = "signal.raise_signal(signal.SIGUSR1); sys.stderr = None; handle.result(); log_to_stderr('told')"
    assert nursery.out_of(script(body), tmp_path / "run") == ""


@pytest.mark.parametrize("error", [None, ValueError("wrong")])
def test_a_coroutine_waits_for_a_future_of_any_thread(error):
    future: Future[int] = Future()

    async def waited() -> int:
        waiting = awaitable(future)
        start_thread("resolves", lambda: future.set_result(7) if error is None else future.set_exception(error))
        return await waiting

    if error is None:
        assert asyncio.run(waited()) == 7
    else:
        with pytest.raises(ValueError, match="wrong"):
            asyncio.run(waited())


def test_a_future_that_nobody_waits_for_any_more_is_left_alone(caplog):
    """As one that is resolved while the interpreter exits, when the loop is closed."""
    future, cancelled = Future[int](), Future[int]()

    async def given_up() -> None:
        await asyncio.wait([awaitable(future)], timeout=0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await awaitable(cancelled)

    asyncio.run(given_up())
    assert not future.cancelled()
    future.set_result(1)
    assert caplog.records == []
