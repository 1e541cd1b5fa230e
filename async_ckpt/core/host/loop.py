"""The one background thread with its asyncio loop, and the crews of threads that make blocking calls for it.

In: coroutines and blocking calls. Out: their results, or nothing. Knows nothing of: saves.

One loop serves the process. `copiers` fill segments from tensors and `readers` from files, and `writers` drain them;
readers and writers give way to training. `callers` make blocking calls for the loop, and `callbacks` run the users'
callbacks.

A signal may interrupt the training thread between any two bytecodes, but never the loop's thread. So the training
thread hands over whatever must not be left half done, by `soon`: one call of C, which keeps the GIL. Another thread
wakes the loop, since that is a system call: the loop would take the GIL there, and the training thread wait for it.
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

# Enough that a local disk has writes in flight while other segments are digested: with four it ran dry at times,
# and with eight where the training left them little processor time.
_NUM_WRITERS: Final = 16


class Loop:
    """The loop of this process and its crews. `get_loop` creates it; any thread may use it."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.is_stopped = False
        self.copiers = Crew("copy", 32)
        self.readers = Crew("read", 8, background=True)
        self.background = Crew("background", 4, background=True)
        self.callers = Crew("call", 64)
        self.callbacks = Crew("callback", 64)
        self._lock = threading.Lock()
        self._writers: dict[str, Crew] = {}  # under _lock
        self._hurries = False  # under _lock
        self._calls: set[Future[Any]] = set()  # that have not returned; under _lock
        prepare_for_exit()
        self._loop = asyncio.new_event_loop()
        self._soon: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None: there will be no more
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
            # asyncio warns of tasks that are left pending, such as one whose call has returned just now.
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.close()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def copy(self, task: Task, refused: Callable[[RuntimeError], None]) -> None:
        """Have a copier run a task, for a thread that a signal may interrupt: the loop's thread submits it."""
        self.soon(lambda: self.copiers.submit(task, refused))

    def writers(self, root: str = "") -> Crew:
        """The threads that write to one of several roots, or to a root with a limit of bandwidth.

        A root that hangs or waits then holds up no other. All other saves share one crew.
        """
        with self._lock:
            if root not in self._writers:
                background = not self._hurries
                self._writers[root] = Crew(f"write-{len(self._writers)}", _NUM_WRITERS, background=background)
            return self._writers[root]

    def stop_writers(self, root: str) -> None:
        """Let the threads of a root end after their last task; the next writer to that root gets new ones."""
        with self._lock:
            crew = self._writers.pop(root, None)
        if crew is not None:
            crew.stop()

    def note_call(self, outcome: Future[Any]) -> None:
        """Note a blocking call, or several, that may not return; `outcome` resolves when they have returned."""
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
        with suppress(RuntimeError):  # the interpreter exits: the loop is closed
            while (fn := self._soon.get()) is not None:
                self._loop.call_soon_threadsafe(fn)
                del fn  # it may hold a state

    def sync(self) -> None:
        """Return when the loop's thread has run all functions that were given to `soon` before."""
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
        """Make a blocking call on a helper thread and wait for it. `what` names it in signs of life.

        An interrupt ends the wait, and not the call.
        """
        wait = Wait("", ENDS_THE_CALL)
        outcome: Future[T] = Future()
        ended: queue.SimpleQueue[Future[T]] = queue.SimpleQueue()  # which an interrupt leaves as it is
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
        """Run a coroutine on the loop. It is broken off when the loop stops."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def hurry(self) -> None:
        """Let the background threads no longer give way to training, because the user waits for them."""
        with self._lock:
            self._hurries = True  # also those that are made for the last saves
            crews = [self.readers, self.background, *self._writers.values()]
        for crew in crews:
            crew.hurry()

    def is_quiet(self, seconds: float) -> bool:
        """True if all calls and writes that no save waits for return within these seconds."""
        with self._lock:
            left = list(self._calls)
        return wait_for_all(left, seconds)

    def stop(self) -> None:
        self.is_stopped = True
        self._soon.put(self._loop.stop)
        self._soon.put(None)


async def off_loop(fn: Callable[[], T], /) -> T:
    """Make a blocking call on a helper thread, from the loop; its result, or the exception that it raised."""
    loop, running = existing_loop(), asyncio.get_running_loop()
    assert loop is not None  # it runs this coroutine
    outcome: Future[T] = Future()
    ended = running.create_future()

    def wake(_: Future[T]) -> None:
        with suppress(RuntimeError):  # the interpreter exits: the loop is closed, and nobody waits
            running.call_soon_threadsafe(ended.set_result, None)

    loop.note_call(outcome)
    outcome.add_done_callback(wake)
    loop.callers.submit(partial(resolve, outcome, fn), outcome.set_exception)
    await ended
    return outcome.result()


def ask_for_exception(future: asyncio.Future[Any]) -> None:
    """Retrieve the exception, or asyncio logs it as never retrieved."""
    if not future.cancelled():
        future.exception()


def _exiting() -> ClosedError:
    return ClosedError("the interpreter is exiting; a save must begin before that")


_loop: Loop | None = None
_loop_lock = threading.Lock()


def get_loop() -> Loop:
    """The loop of this process, made on first use; a forked child makes its own.

    Raises ClosedError once the interpreter has begun to exit.
    """
    global _loop
    # The caller may be interrupted by a signal, and must not hold the lock then, so the usual case takes none.
    loop = _loop
    if loop is not None and not loop.is_stopped and loop.pid == os.getpid():
        return loop
    with _loop_lock:
        if _loop is not None and _loop.is_stopped:
            raise _exiting()
        if _loop is None or _loop.pid != os.getpid():
            _loop = Loop()
        return _loop


def existing_loop() -> Loop | None:
    """The loop of this process, if there is one."""
    return _loop if _loop is not None and _loop.pid == os.getpid() else None


@in_forked_child
def _forget_loop() -> None:
    """In a forked child: the thread that held the lock, if any, is not here to release it."""
    global _loop, _loop_lock
    if _loop is not None:
        never_end(_loop)  # its end would close the descriptors that wake the parent's
    _loop, _loop_lock = None, threading.Lock()
