"""The one background thread with its asyncio loop, its helpers, and the end of the process.

In: stories (coroutines) that belong to handles. Out: resolved handles. Knows nothing of: what a save is made of.

One worker serves the process. Its helpers: `copiers` fill segments, `readers` do so from files, `writers` drain them;
these two give way to training. `callers` run blocking calls for the loop, `callbacks` run the users' callbacks. At
interpreter exit pending saves are drained by a hook that runs before the interpreter joins its threads.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import queue
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from math import inf
from typing import Any, Final, NoReturn, TypeVar

from ..errors import ClosedError, SaveAbandonedError
from ..host.pool import LIVENESS_SECONDS
from ..host.process import in_forked_child, never_end
from ..host.threads import Crew, Submits, Task, prepare_for_exit, running_future, start_thread
from ..host.waiting import ENDS_THE_CALL, GIVES_UP, Wait, wait_for, wait_for_all
from ..report import SaveReport
from ..spans import monotonic
from ..storage.base import Storage
from ..storage.pace import Pace
from .bar import Bars
from .handle import SaveHandle
from .waiting import name_of, say_on_stderr, told

T = TypeVar("T")
_log = logging.getLogger("async_ckpt")

# sysexits.h EX_TEMPFAIL: what could not be done now may succeed when the job is started again.
EXIT_STATUS_SAVE_FAILED: Final = 75
EXIT_STATUS_INTERRUPTED: Final = 130
# Enough that a local disk has writes in flight while other segments are digested: with four it ran dry at times,
# and with eight where the training left them little processor time.
_NUM_WRITERS: Final = 16
# How long abandoned saves may take to end their last writes. An exit with a timeout waits only for a tenth of that
# timeout more, but at least as long as a healthy disk may need.
_ABANDON_SECONDS: Final = 10.0
_LEAST_ABANDON_SECONDS: Final = 1.0
# A terminal that somebody has stopped takes nothing; no save waits for that.
_LAST_DRAWING_SECONDS: Final = 1.0


class Pending:
    """A save that is under way: its handle, and how to give it up. `finished` follows its retention and its bar, too."""

    def __init__(
        self,
        handle: SaveHandle,
        give_up: Callable[[BaseException], None],
        exit_timeout: float | None,
        bars: Bars | None = None,
    ) -> None:
        self.handle = handle
        self.give_up = give_up
        self.exit_timeout = exit_timeout
        self.bars = bars
        self.settled = running_future()  # decided, so that the next save may commit
        self.finished = running_future()

    @property
    def abandon_seconds(self) -> float:
        """How long it is waited for once it was given up."""
        if self.exit_timeout is None:
            return _ABANDON_SECONDS
        return min(_ABANDON_SECONDS, max(_LEAST_ABANDON_SECONDS, self.exit_timeout / 10))


class _ByLoop:
    """A crew whose tasks may come from a thread that is interrupted."""

    def __init__(self, worker: Worker, crew: Crew) -> None:
        self._worker, self._crew = worker, crew

    def submit(self, task: Task, refused: Callable[[RuntimeError], None] | None = None) -> None:
        self._worker.soon(lambda: self._crew.submit(task, refused))


class Worker:
    """One per process; see `get_worker`."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.stopped = False
        self.copiers = Crew("copy", 32)
        self.copying: Submits = _ByLoop(self, self.copiers)
        self.readers = Crew("read", 8, background=True)
        self.background = Crew("background", 4, background=True)
        self._writers: dict[str, Crew] = {}  # under _lock
        self._hanging: list[Future[None]] = []  # under _lock
        self._calls: set[Future[Any]] = set()  # made by `off_loop`, and not returned yet; under _lock
        self.callers = Crew("call", 64)
        self.callbacks = Crew("callback", 64)
        self._lock = threading.Lock()
        self._pending: list[Pending] = []  # under _lock
        self._unseen: list[SaveHandle] = []  # ended in an error that nobody has looked at; under _lock
        prepare_for_exit()
        self._loop = asyncio.new_event_loop()
        self._thread = start_thread("loop", self._run_loop)

    def writers(self, root: str = "") -> Crew:
        """The threads that write to one of several roots, or to one that is held to a bandwidth: one that hangs, or
        waits, holds up no other. All else shares a crew.
        """
        with self._lock:
            if root not in self._writers:
                self._writers[root] = Crew(f"write-{len(self._writers)}", _NUM_WRITERS, background=True)
            return self._writers[root]

    def stop_writers(self, root: str) -> None:
        """Let its threads end when they have done what there is; who writes there next has new ones."""
        with self._lock:
            crew = self._writers.pop(root, None)
        if crew is not None:
            crew.stop()

    def note_hanging(self, quiet: Future[None]) -> None:
        """Writes or calls that the save went on without; `quiet` resolves when they have returned."""
        with self._lock:
            self._hanging = [future for future in self._hanging if not future.done()] + [quiet]

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            # What waits for a call that has returned just now; asyncio complains of tasks that are left pending.
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.close()

    async def off_loop(self, fn: Callable[[], T], /) -> T:
        """Run a blocking call on a helper thread; its result, or what it raised."""
        outcome: Future[T] = Future()
        ended = self._loop.create_future()
        with self._lock:
            self._calls.add(outcome)

        def call() -> None:
            try:
                outcome.set_result(fn())
            except BaseException as error:  # of any kind: asyncio's futures do not take a StopIteration
                outcome.set_exception(error)
            with self._lock:
                self._calls.discard(outcome)
            with suppress(RuntimeError):  # the interpreter exits: the loop is closed, and nobody waits
                self._loop.call_soon_threadsafe(ended.set_result, None)

        try:
            self.callers.submit(call)
        except RuntimeError:  # there is no thread to be had
            with self._lock:
                self._calls.discard(outcome)
            raise
        await ended
        return outcome.result()

    def soon(self, fn: Callable[[], None]) -> None:
        """Run `fn` on the loop's thread, in the order of the calls.

        For what must not be left half done: a caller's thread may be interrupted between any two steps, this one is not.
        """
        try:
            self._loop.call_soon_threadsafe(fn)
        except RuntimeError:  # the loop is closed
            raise ClosedError("the interpreter is exiting; a save must begin before that") from None

    def sync(self) -> None:
        """Return when the loop's thread has run all that was given to `soon` before."""
        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        with suppress(ClosedError):
            self.soon(lambda: done.put(None))
            while self._thread.is_alive():
                with suppress(queue.Empty):
                    done.get(timeout=LIVENESS_SECONDS)
                    break

    def call(self, fn: Callable[[], T], what: str) -> T:
        """Run a blocking call on a helper thread and wait for it, for `what` as people read it. An interrupt ends the
        wait, and not the call.
        """
        wait = Wait("", ENDS_THE_CALL)
        outcome: Future[T] = Future()
        ended: queue.SimpleQueue[None] = queue.SimpleQueue()

        def run() -> None:
            try:
                outcome.set_result(fn())
            except BaseException as error:
                outcome.set_exception(error)
            ended.put(None)

        def refused(error: RuntimeError) -> None:
            outcome.set_exception(error)
            ended.put(None)

        self.soon(lambda: self.callers.submit(run, refused))
        while self._thread.is_alive():
            with suppress(queue.Empty):
                ended.get(timeout=LIVENESS_SECONDS)
                return outcome.result()
            wait.goes_on(lambda: what)
        raise ClosedError("the interpreter is exiting; a save must begin before that")

    def begin(self, told: Coroutine[Any, Any, None]) -> None:
        """Run what nobody waits for on the loop; when the interpreter exits, it is broken off."""
        asyncio.run_coroutine_threadsafe(told, self._loop)

    def start(
        self,
        pending: Pending,
        story: Coroutine[Any, Any, SaveReport],
        afterwards: Callable[[], Awaitable[None]],
    ) -> None:
        """Run the story on the loop; resolve the handle with how it ends; then `afterwards`, whose failure is logged."""
        with self._lock:
            self._pending.append(pending)
            self._unseen = [handle for handle in self._unseen if not handle.looked_at]
        asyncio.run_coroutine_threadsafe(self._tell(pending, story, afterwards), self._loop)

    async def _tell(
        self,
        pending: Pending,
        story: Coroutine[Any, Any, SaveReport],
        afterwards: Callable[[], Awaitable[None]],
    ) -> None:
        handle, bars = pending.handle, pending.bars
        drawing = asyncio.create_task(bars.follow(handle, self.off_loop)) if bars is not None else None
        try:
            report = await story
        except BaseException as error:
            with self._lock:
                self._unseen.append(handle)
            pending.settled.set_result(None)
            handle.set_exception(error)
        else:
            pending.settled.set_result(None)
            handle.set_result(report)
            try:
                await afterwards()
            except BaseException as error:
                _log.warning("%r is committed, but cleaning up after it failed: %s", handle, error)
                pending.finished.set_exception(error)
        finally:
            if drawing is not None:  # so that who waits for the save prints below it
                await asyncio.wait([drawing], timeout=_LAST_DRAWING_SECONDS)
            with self._lock:
                self._pending.remove(pending)
            if not pending.finished.done():
                pending.finished.set_result(None)

    def drain_at_exit(self) -> None:
        """Wait for every pending save, give up those that may not take longer, and say what was lost."""
        with self._lock:
            crews = [self.readers, self.background, *self._writers.values()]
        for crew in crews:
            crew.hurry()
        status = self._wait_for_all()
        with self._lock:
            stuck = [pending.handle for pending in self._pending]
            lost = [handle for handle in self._unseen if not handle.looked_at]
        for handle in lost:
            error = handle.exception()
            notes = getattr(error, "__notes__", [])
            _tell_loss(handle, "; ".join([f"{type(error).__name__}: {error}", *notes]))
        for handle in stuck:
            if not handle.done():
                _tell_loss(handle, "it was given up, but a call to its storage has not returned")
                status = status or EXIT_STATUS_SAVE_FAILED
        hanging = bool(stuck) or not self._have_returned()
        if status or lost or hanging:
            _exit_with(status or (EXIT_STATUS_SAVE_FAILED if lost else 0), at_once=hanging)
        self.stop()

    def _wait_for_all(self) -> int:
        """The exit status that the wait itself gives reason for; 0 for none."""
        begin = monotonic()
        wait = Wait("at exit", GIVES_UP, say=say_on_stderr)
        given_up: list[Pending] = []
        try:
            self.sync()
            while (waiting := self._pending_but(given_up)) and self._thread.is_alive():
                seconds = monotonic() - begin
                limit = min((p.exit_timeout for p in waiting if p.exit_timeout is not None), default=inf)
                if seconds > limit:
                    overdue = [pending for pending in waiting if pending.exit_timeout == limit]
                    abandon(overdue, f"the interpreter exits, and exit_timeout={limit} s have passed")
                    given_up.extend(overdue)
                elif not wait_for(waiting[0].finished, min(LIVENESS_SECONDS, limit - seconds)):
                    wait.goes_on(lambda: told([pending.handle for pending in self._pending_but(given_up)]))
        except KeyboardInterrupt:
            abandon(self._pending_but(given_up), "interrupted while the interpreter waited for it")
            return EXIT_STATUS_INTERRUPTED
        return 0

    def _pending_but(self, given_up: list[Pending]) -> list[Pending]:
        """The saves that are waited for, the oldest first."""
        with self._lock:
            return [pending for pending in self._pending if pending not in given_up]

    def _have_returned(self) -> bool:
        """Whether all calls and writes that saves went on without have returned, or do so in a moment."""
        with self._lock:
            left = [future for future in (*self._hanging, *self._calls) if not future.done()]
        try:
            return wait_for_all(left, _LEAST_ABANDON_SECONDS)
        except KeyboardInterrupt:
            return False

    def stop(self) -> None:
        self.stopped = True
        self._loop.call_soon_threadsafe(self._loop.stop)

    def __repr__(self) -> str:
        return f"<Worker {len(self._pending)} saves pending>"


def _tell_loss(handle: SaveHandle, why: str) -> None:
    say_on_stderr(f"async_ckpt: {name_of(handle)} was not saved: {why}")


def abandon(pending: list[Pending], why: str) -> None:
    """Give saves up: nothing of them becomes visible. Returns when they have ended, or soon."""
    for save in pending:
        save.give_up(
            SaveAbandonedError(f"given up before it was committed: {why}; earlier checkpoints are intact")
        )
    wait_for_all(
        [save.finished for save in pending], min((save.abandon_seconds for save in pending), default=0.0)
    )


class Carriers:
    """The threads that write to each place, and how fast they may: one pace for each, whatever saves are under way."""

    def __init__(self, max_bandwidth: float | None) -> None:
        is_number = isinstance(max_bandwidth, int | float)
        if max_bandwidth is not None and not (is_number and 0 < max_bandwidth < inf):
            raise ValueError(
                f"max_bandwidth must be a number of bytes per second, such as 500e6, got {max_bandwidth!r}"
            )
        self._max_bandwidth = max_bandwidth
        self._places: set[str] = set()  # that have threads of their own
        self._paces: dict[str, Pace] = {}  # by place

    def writers(self, storage: Storage, *, alone: bool) -> Callable[[Task], None]:
        """What runs the writes to a place. `alone`: the save goes to no other."""
        if alone and self._max_bandwidth is None:
            return get_worker().writers().submit
        place = storage.locate("")
        self._places.add(place)
        return get_worker().writers(place).submit

    def pace(self, storage: Storage) -> Pace | None:
        if self._max_bandwidth is None:
            return None
        return self._paces.setdefault(storage.locate(""), Pace(self._max_bandwidth))

    def stop(self) -> None:
        """Let the threads end."""
        with suppress(ClosedError):  # the interpreter is exiting, and ends all threads
            for place in list(self._places):
                get_worker().stop_writers(place)


_worker: Worker | None = None
_worker_lock = threading.Lock()


def get_worker() -> Worker:
    """The worker of this process, made on first use; a forked child gets one of its own.

    Raises ClosedError once the interpreter has begun to exit.
    """
    global _worker
    # Without the lock: a caller that is interrupted must not be while it holds one.
    worker = _worker
    if worker is not None and not worker.stopped and worker.pid == os.getpid():
        return worker
    with _worker_lock:
        if _worker is not None and _worker.stopped:
            raise ClosedError("the interpreter is exiting; a save must begin before that")
        if _worker is None or _worker.pid != os.getpid():
            _note_exit_status()
            _worker = Worker()
        return _worker


@in_forked_child
def _forget_worker() -> None:
    """In a forked child: the thread that held the lock, if any, is not here to release it."""
    global _worker, _worker_lock
    if _worker is not None:
        never_end(_worker)  # its loop would close what wakes the parent's
    _worker, _worker_lock = None, threading.Lock()


def _drain_at_exit() -> None:
    if _worker is not None and _worker.pid == os.getpid():
        _worker.drain_at_exit()


_exit_code: Any = None


def _note_exit_status() -> None:
    """Remember what `sys.exit` was called with: Python tells no exit hook, and a status of the user's must stand."""
    if getattr(sys.exit, "_notes_status", False):
        return
    really_exit = sys.exit

    def noting_exit(status: Any = None, /) -> NoReturn:
        global _exit_code
        if threading.current_thread() is threading.main_thread():  # elsewhere it ends no process
            _exit_code = status
        really_exit(status)

    noting_exit._notes_status = True  # type: ignore[attr-defined]
    sys.exit = noting_exit


def _exit_with(status: int, *, at_once: bool) -> None:
    """Make the process end with this status, unless it ends with another non-zero one by itself."""
    failed = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None) or _exit_code not in (None, 0)
    if failed and not at_once:
        return
    if failed:
        status = _exit_code & 0xFF if isinstance(_exit_code, int) and _exit_code else 1

    def last() -> None:
        # Registered last, so called first: run all the others, then leave with our status.
        atexit.unregister(last)
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):
                pass  # closed, broken or none: nothing more to say on it
        os._exit(status)

    if at_once:  # a thread is stuck in a call that does not return: joining it would hang
        last()
    atexit.register(last)


# Before the interpreter joins its threads, and before the crews are stopped (their hook was registered earlier).
threading._register_atexit(_drain_at_exit)  # type: ignore[attr-defined]
