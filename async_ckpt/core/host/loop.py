"""The background thread with its asyncio loop, and the crews of threads that make blocking calls for it.

In: coroutines and blocking calls. Out: their results, or nothing. Knows nothing of: saves.

There is one loop per process. `copiers` fill segments from tensors, `readers` fill them from files, and `writers` drain
them; readers and writers run at low priority. `callers` make blocking calls for the loop, and `callbacks` run the
users' callbacks.

A signal may interrupt the training thread between any two bytecodes, but never the loop's thread. So the training
thread hands over work that must not be left half done, by `soon`: a single call of a C function, which keeps the GIL.
Waking the loop is a system call, which releases the GIL: the loop would take it, and the training thread would have to
wait for it. So another thread wakes the loop.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from ...errors import ClosedError
from .process import in_forked_child, never_end
from .threads import Crew, Task, prepare_for_exit, resolve, start_thread
from .waits import ENDS_THE_CALL, LIVENESS_SECONDS, Wait, wait_for_all

T = TypeVar("T")

# Enough that a local disk always has writes in flight while other segments are digested. With four threads the disk was
# idle at times, and with eight if the training left them little processor time.
_NUM_WRITERS: Final = 16


class Loop:
    """The loop of this process and its crews. `get_loop` creates it. Any thread may use it."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.is_stopped = False
        self.copiers = Crew("copy", 32)
        self.readers = Crew("read", 8, background=True)
        self.background = Crew("background", 4, background=True)
        self.callers = Crew("call", 64)
        self.callbacks = Crew("callback", 64)
        self._lock = threading.Lock()
        self._writers: dict[str, Crew] = {}  # guarded by _lock
        self._hurries = False  # guarded by _lock
        self._calls: set[Future[Any]] = set()  # calls that have not returned; guarded by _lock
        prepare_for_exit()
        self._loop = asyncio.new_event_loop()
        self._soon: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None is the last item
        start_thread("hand-over", self._hand_over)
        try:
            self._thread = start_thread("loop", self._run)
        except RuntimeError:
            self._soon.put(None)
            raise

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            # asyncio would warn about pending tasks, such as a task whose call has just returned.
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.close()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def copy(self, task: Task, refused: Callable[[RuntimeError], None]) -> None:
        """Run a task on a copier. Safe in a thread that a signal may interrupt, since the loop's thread submits it."""
        self.soon(lambda: self.copiers.submit(task, refused))

    def writers(self, root: str = "") -> Crew:
        """The threads that write to `root`: one of several, or one with a bandwidth limit. Other saves use that of "".

        With separate crews, a root that hangs or waits does not block the others.
        """
        with self._lock:
            if root not in self._writers:
                background = not self._hurries
                self._writers[root] = Crew(f"write-{len(self._writers)}", _NUM_WRITERS, background=background)
            return self._writers[root]

    def stop_writers(self, root: str) -> None:
        """Let the threads of a root end after their last task. `writers` makes new threads for it, if called again."""
        with self._lock:
            crew = self._writers.pop(root, None)
        if crew is not None:
            crew.stop()

    def note_call(self, outcome: Future[Any]) -> None:
        """Note one or more blocking calls that may hang. `outcome` resolves when they have returned."""
        with self._lock:
            self._calls.add(outcome)
        outcome.add_done_callback(self._returned)

    def _returned(self, outcome: Future[Any]) -> None:
        with self._lock:
            self._calls.discard(outcome)

    def soon(self, fn: Callable[[], None]) -> None:
        """Run `fn` on the loop's thread, in the order of the calls. Raises ClosedError once the interpreter exits."""
        if self.is_stopped:
            raise _exiting()
        self._soon.put(fn)

    def _hand_over(self) -> None:
        with suppress(RuntimeError):  # the loop is closed, since the interpreter exits
            while (fn := self._soon.get()) is not None:
                self._loop.call_soon_threadsafe(fn)
                del fn  # it may keep a state alive

    def sync(self) -> None:
        """Block until the loop's thread has run all functions passed to `soon` before. No-op on that thread."""
        if threading.current_thread() is self._thread:  # it would wait for itself
            return
        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        with suppress(ClosedError):
            self.soon(lambda: done.put(None))
            while self.is_alive:
                with suppress(queue.Empty):
                    done.get(timeout=LIVENESS_SECONDS)
                    break

    def call(self, fn: Callable[[], T], what: str) -> T:
        """Make a blocking call on a helper thread and wait for it. `what` names the call in the lines of a long wait.

        Ctrl-C ends the wait, but not the call.
        """
        wait = Wait("", ENDS_THE_CALL)
        outcome: Future[T] = Future()
        ended: queue.SimpleQueue[Future[T]] = queue.SimpleQueue()  # stays consistent if a signal interrupts the wait
        outcome.add_done_callback(ended.put)
        self.soon(lambda: self.callers.submit(partial(resolve, outcome, fn), outcome.set_exception))
        while self.is_alive:
            try:
                ended.get(timeout=LIVENESS_SECONDS)
            except queue.Empty:
                wait.goes_on(lambda: what)
            else:
                return outcome.result()
        raise _exiting()

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop. It is cancelled when the loop stops."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def hurry(self) -> None:
        """Give the background threads normal disk priority from now on, because the user waits for them."""
        with self._lock:
            self._hurries = True  # applies also to crews that are made later, for the last saves
            crews = [self.readers, self.background, *self._writers.values()]
        for crew in crews:
            crew.hurry()

    def is_quiet(self, seconds: float) -> bool:
        """True if all calls passed to `note_call` return within these seconds. Blocks until then."""
        with self._lock:
            left = list(self._calls)
        return wait_for_all(left, seconds)

    def stop(self) -> None:
        self.is_stopped = True
        self._soon.put(self._loop.stop)
        self._soon.put(None)


async def off_loop(fn: Callable[[], T], /) -> T:
    """Make a blocking call on a helper thread, from the loop. Returns its result, or raises its exception."""
    loop = existing_loop()
    assert loop is not None  # this coroutine runs on it
    outcome: Future[T] = Future()
    loop.note_call(outcome)
    ended = _until_done(outcome)
    loop.callers.submit(partial(resolve, outcome, fn), outcome.set_exception)
    await ended
    return outcome.result()


def awaitable(future: Future[T]) -> asyncio.Future[T]:
    """The outcome of a future of any thread, for coroutines of the running loop.

    As `asyncio.wrap_future`, but whoever stops waiting does not cancel the future, and a future that is resolved while
    the interpreter exits, when the loop is closed, logs no error.
    """
    outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def hand_over(_: asyncio.Future[None]) -> None:
        if future.cancelled() or outcome.done():
            outcome.cancel()  # without effect if it is done
        elif (error := future.exception()) is None:
            outcome.set_result(future.result())
        else:
            outcome.set_exception(error)

    _until_done(future).add_done_callback(hand_over)
    return outcome


def _until_done(future: Future[Any]) -> asyncio.Future[None]:
    """A future of the running loop that resolves once a future of any thread is done."""
    running = asyncio.get_running_loop()
    ended: asyncio.Future[None] = running.create_future()

    def end() -> None:
        if not ended.done():
            ended.set_result(None)

    def wake(_: Future[Any]) -> None:
        with suppress(RuntimeError):  # the loop is closed, since the interpreter exits, and nobody waits
            running.call_soon_threadsafe(end)

    future.add_done_callback(wake)
    return ended


def ask_for_exception(future: asyncio.Future[Any]) -> None:
    """Retrieve the exception, or asyncio logs it as never retrieved."""
    if not future.cancelled():
        future.exception()


def _exiting() -> ClosedError:
    return ClosedError("the interpreter is exiting; a save must begin before that")


_loop: Loop | None = None
_is_exiting = False  # no further loop is made; written under _loop_lock
_loop_lock = threading.Lock()


def get_loop() -> Loop:
    """The loop of this process, created on first use. A forked child gets its own.

    Raises ClosedError once the interpreter has begun to exit.
    """
    global _loop
    # A signal may interrupt the caller, which must not hold the lock then, so the usual case takes no lock.
    loop = _loop
    if loop is not None and not loop.is_stopped and loop.pid == os.getpid():
        return loop
    with _loop_lock:
        if _loop is None or _loop.is_stopped or _loop.pid != os.getpid():
            if _is_exiting:
                raise _exiting()
            _loop = Loop()
        return _loop


def existing_loop() -> Loop | None:
    """The loop of this process, if there is one."""
    return _loop if _loop is not None and _loop.pid == os.getpid() else None


def last_loop() -> Loop | None:
    """The loop of this process, if there is one. From now on, no other is made, since nothing would stop it."""
    global _is_exiting
    with _loop_lock:
        _is_exiting = True
        return existing_loop()


@in_forked_child
def _forget_loop() -> None:
    """In a forked child: make a new lock, since the thread that may have held the old one does not exist here."""
    global _loop, _is_exiting, _loop_lock
    if _loop is not None:
        never_end(_loop)  # its finalizer would close the descriptors that wake the parent's loop
    _loop, _is_exiting, _loop_lock = None, False, threading.Lock()
