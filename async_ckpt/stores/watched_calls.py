"""Calls into foreign code that may never return.

In: a call, and a limit on the time without progress. Out: its result, or StuckError. Knows nothing of: the called code.

A call runs on a thread of its own, so that its caller can go on without it. Unlike all other threads of the library,
these are daemons, since a stuck thread must not keep the process from exiting. No work is lost: while a call may still
end, its caller waits for it on a thread that the interpreter joins.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar

from ..plumbing import process, threads

T = TypeVar("T")

_LOOK_SECONDS: Final = 1.0
# Starting a thread costs ten times as much as handing a call to an idle thread.
_IDLE_SECONDS: Final = 10.0

_inboxes: deque[queue.SimpleQueue[threads.Task]] = deque()  # of threads that wait for a call


class StuckError(Exception):
    """A call has made no progress for too long and was abandoned. It may still be running."""


class AbandonedError(Exception):
    """Raised inside an abandoned call, before it touches memory that its caller has lent to it."""


class WatchedCall:
    """One call. Its caller creates it and waits in `run`; the called code uses the other methods, on any thread."""

    def __init__(self, stuck_seconds: float) -> None:
        self.stuck_seconds = stuck_seconds
        self._num_moves = 0  # only compared, so a lost update is harmless
        self._is_ours = False
        self._lock = threading.Lock()
        self._is_abandoned = False  # under _lock

    def run(self, fn: Callable[[], T]) -> T:
        """Return the result of `fn`, or raise its error. Raises StuckError after `stuck_seconds` without progress.

        If no thread can be started, `fn` runs unwatched on the thread of the caller.
        """
        outcome: Future[T] = Future()
        try:
            _hand_over(partial(threads.resolve, outcome, fn))
        except RuntimeError:
            return fn()
        try:
            self._wait_for(outcome)
            return outcome.result()
        finally:
            if not outcome.done():
                with self._lock:
                    self._is_abandoned = True
            del outcome  # its error refers to this frame

    def _wait_for(self, outcome: Future[Any]) -> None:
        """Wait for the outcome. Counts wake-ups instead of seconds, since a process that was stopped has not waited."""
        look_seconds = min(_LOOK_SECONDS, self.stuck_seconds / 4)
        still_seconds, num_moves = 0.0, self._num_moves
        while still_seconds < self.stuck_seconds:
            try:
                outcome.exception(look_seconds)
            except TimeoutError:
                moved = self._is_ours or self._num_moves != num_moves
                still_seconds = 0.0 if moved else still_seconds + look_seconds
                num_moves = self._num_moves
            else:
                return
        raise StuckError(f"nothing has happened for {self.stuck_seconds:.0f} s")

    def moved(self) -> None:
        """Note that the call has made progress."""
        self._num_moves += 1

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Hold this while the call uses memory of its caller. Raises AbandonedError if the call was abandoned."""
        with self._lock:
            if self._is_abandoned:
                raise AbandonedError("the call was abandoned")
            self._num_moves += 1
            yield

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Hold this during a callback from the foreign code, which may take any time. On one thread at a time."""
        self._is_ours = True
        try:
            yield
        finally:
            self._is_ours = False
            self._num_moves += 1


def _hand_over(task: threads.Task) -> None:
    """Run `task` on an idle thread, or on a new one. Raises RuntimeError if no thread can be started."""
    try:
        inbox = _inboxes.pop()
    except IndexError:
        inbox = queue.SimpleQueue()
        threads.start_thread("request", partial(_serve, inbox), daemon=True)
    inbox.put(task)


def _serve(inbox: queue.SimpleQueue[threads.Task]) -> None:
    while True:
        try:
            task = inbox.get(timeout=_IDLE_SECONDS)
        except queue.Empty:
            try:
                _inboxes.remove(inbox)
            except ValueError:  # a task for this thread is on its way
                continue
            return
        task()
        del task  # the objects that it refers to must not live until the next task
        _inboxes.append(inbox)


@process.in_forked_child
def _forget() -> None:
    """Forget the threads, which exist only in the parent."""
    global _inboxes
    _inboxes = deque()
