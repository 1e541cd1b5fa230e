"""Calls into foreign code that may never return.

In: a call, and how long it may stand still. Out: its result, or StuckError. Knows nothing of: the called code.

A call runs on a thread of its own, so that its caller can go on without it. Unlike all other threads of the library,
these are daemons: a stuck one must not keep the process from its end. Nothing is lost by that, since the caller of a
call that may end waits for it on a thread that the interpreter joins.
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
# Starting a thread costs ten times as much as handing a call to one that waits for it.
_IDLE_SECONDS: Final = 10.0

_inboxes: deque[queue.SimpleQueue[threads.Task]] = deque()  # of threads that wait for a call


class StuckError(Exception):
    """A call has made no progress for too long and was abandoned. It may still be under way."""


class AbandonedError(Exception):
    """Raised inside a call that its caller has abandoned, before it touches memory that the caller has lent to it."""


class WatchedCall:
    """One call. Its caller creates it and waits in `run`; the called code uses the other methods, on any thread."""

    def __init__(self, stuck_seconds: float) -> None:
        self.stuck_seconds = stuck_seconds
        self._num_moves = 0  # only compared, so that a lost update does no harm
        self._is_ours = False
        self._lock = threading.Lock()
        self._is_abandoned = False  # under _lock

    def run(self, fn: Callable[[], T]) -> T:
        """Return the result of `fn`, or raise its error, or StuckError once it has not moved for `stuck_seconds`.

        If no thread can be started, `fn` runs on the caller's, unwatched.
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
            del outcome  # its error holds this frame

    def _wait_for(self, outcome: Future[Any]) -> None:
        """Wait for the outcome. Wake-ups are counted, not seconds: a process that was stopped has not waited."""
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
        """Hold this while the call uses memory of its caller. Raises AbandonedError once the caller has gone."""
        with self._lock:
            if self._is_abandoned:
                raise AbandonedError("the call was abandoned")
            self._num_moves += 1
            yield

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Hold this while the foreign code calls the caller back, which may take any time; on one thread at a time."""
        self._is_ours = True
        try:
            yield
        finally:
            self._is_ours = False
            self._num_moves += 1


def _hand_over(task: threads.Task) -> None:
    """Run `task` on a thread that is idle, or a new one. Raises RuntimeError if none can be started."""
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
        del task  # what the task holds must not live until the next one comes
        _inboxes.append(inbox)


@process.in_forked_child
def _forget() -> None:
    """Forget the threads, which only the parent has."""
    global _inboxes
    _inboxes = deque()
