"""The saves of an integration that are under way, and the actions after them, in order.

In: handles, and functions to call when their saves are durable. Out: reports, errors, and the history of a folder.
Knows nothing of: frameworks.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from ... import SaveHandle, SaveReport
from ...plumbing import ledger, threads, timing, waits
from .event_history import HistoryEntry
from .joint_errors import meet

_log = logging.getLogger("async_ckpt")

T = TypeVar("T")
Action = Callable[[], object]


def path_key(path: Any) -> str:
    """A key that is the same for every spelling of a local path; a URL is returned unchanged."""
    text = str(path)
    return text if "://" in text else os.path.abspath(text)


@dataclass(frozen=True, slots=True)
class _Queued:
    """A save at a path, or an action after saves. `ended` is its outcome. Only a save has handles.

    The training has waited `waited_seconds` before the handles began to measure, or `held_seconds` in total. `twin` is
    a second path of the saved checkpoint, if it gets one.
    """

    path: str
    ended: Future[None]
    handles: tuple[SaveHandle, ...] = ()
    step: int | None = None
    waited_seconds: float = 0.0
    held_seconds: float = 0.0
    twin: str | None = None
    own_report: Callable[[], SaveReport] | None = None

    def report(self) -> SaveReport:
        """The report of the first handle, with the stall of all handles and of the wait before them."""
        if self.own_report is not None:
            return self.own_report()
        reports = [handle.result() for handle in self.handles]
        measured = self.waited_seconds + sum(report.stall_seconds for report in reports)
        return replace(reports[0], path=self.path, step=self.step, stall_seconds=max(measured, self.held_seconds))


class SaveQueue:
    """The saves under way, and the actions after them, in order. Used only by the training thread.

    A second thread waits for each save, and then runs the actions. It shares no state with this object: each task
    contains all that it needs.
    """

    def __init__(self, name: str, max_in_flight: int = 1) -> None:
        self._name, self._max_in_flight = name, max_in_flight
        self._queued: deque[_Queued] = deque()
        self._thread: threads.Crew | None = None  # created on use: a trainer may pickle its owner, or fork, before that
        self._errors: list[BaseException] = []
        self._reports: list[SaveReport] = []

    def __reduce__(self) -> Any:
        """A copy is a new queue, with no saves under way, and no errors or reports."""
        return type(self), (self._name, self._max_in_flight)

    def admit(self, path: Any) -> float:
        """Wait until no save uses this path, and fewer than `max_in_flight` are under way. Returns the seconds."""
        begin = timing.monotonic()
        self.wait(path)
        while len(saves := self._saves_under_way()) >= self._max_in_flight:
            _wait_for(saves[0])
        return timing.monotonic() - begin

    def add(
        self,
        path: Any,
        handles: Sequence[SaveHandle],
        then: Action | None = None,
        *,
        step: int | None,
        waited_seconds: float = 0.0,
        held_seconds: float = 0.0,
        twin: Any = None,
        failed: Callable[[BaseException], object] = lambda _: None,
        report: Callable[[], SaveReport] | None = None,
        entry: HistoryEntry | None = None,
    ) -> Future[None]:
        """Add a save that has begun. When all of its handles are done, `then` is called; if one of them has failed,
        `failed` is called instead. Returns a future that is done after that.

        Without an `entry`, as on ranks other than 0, the save is not in the history.
        """
        for handle in handles:
            handle.is_reported = True  # an error just before the next save is raised by the one after that
        ended: Future[None] = threads.running_future()
        second = None if twin is None else path_key(twin)
        save = _Queued(path_key(path), ended, tuple(handles), step, waited_seconds, held_seconds, second, report)
        self._submit(save, partial(_finish, save, then, failed, entry, timing.monotonic()))
        return ended

    def follow(self, path: Any, action: Action) -> Future[None]:
        """Add an action after the saves in the queue. It is skipped if one of them fails."""
        saves = [one.ended for one in self._queued if one.handles]
        following = _Queued(path_key(path), threads.running_future())
        self._submit(following, partial(_act, following.path, saves, action))
        return following.ended

    def wait(self, path: Any = None) -> None:
        """Wait for everything, or only for saves and actions at one path. Does not raise the errors of saves."""
        for one in [*self._queued]:
            if path is None or path_key(path) in (one.path, one.twin):
                _wait_for(one)

    def take_reports(self) -> list[SaveReport]:
        """The reports of the saves that have succeeded since the last call."""
        self._collect()
        reports, self._reports = self._reports, []
        return reports

    def take_errors(self) -> list[BaseException]:
        """The errors since the last call."""
        self._collect()
        errors, self._errors = self._errors, []
        return errors

    def finish(self) -> None:
        """Wait for everything. Raises the first error since the last call."""
        self.wait()
        if errors := self.take_errors():
            raise errors[0]

    def meet(self, then: Callable[[], T]) -> list[T]:
        """Call `finish`, then `then`, on all ranks. Returns all results. An error of any rank is raised on all."""

        def after_last() -> T:
            self.finish()
            return then()

        return meet(after_last)

    def stop(self) -> None:
        """Wait for everything, and end the thread. The next save starts another one."""
        self.wait()
        if self._thread is not None:
            self._thread.stop()
            self._thread = None

    def _saves_under_way(self) -> list[_Queued]:
        return [one for one in self._queued if one.handles and not one.ended.done()]

    def _collect(self) -> None:
        while self._queued and self._queued[0].ended.done():
            one = self._queued.popleft()
            for handle in one.handles:
                handle.exception()  # reported from here; the interpreter's exit need not log it
            error = one.ended.exception()
            if error is not None:
                self._errors.append(error)
            elif one.handles:
                self._reports.append(one.report())

    def _submit(self, one: _Queued, task: threads.Task) -> None:
        if self._thread is None:
            self._thread = threads.Crew(self._name, 1)
        self._thread.submit(partial(threads.resolve, one.ended, task), one.ended.set_exception)
        self._queued.append(one)

    def __repr__(self) -> str:
        return f"<SaveQueue, {sum(not one.ended.done() for one in self._queued)} under way>"


def _wait_for(one: _Queued) -> None:
    wait = waits.Wait("in the training", waits.ENDS_THE_WAIT)
    waits.wait_for(one.ended, None, lambda: wait.goes_on(lambda: ledger.progress_of(one.handles)))


# --- on the other thread ------------------------------------------------------------------------------------------


def _finish(
    save: _Queued,
    then: Action | None,
    failed: Callable[[BaseException], object],
    entry: HistoryEntry | None,
    began: float,
) -> None:
    """Wait for a save's handles, and call what follows. Raises its error, without marking it as retrieved."""
    try:
        ledger.wait_for_ends(save.handles)
        if then is not None:
            then()
    except BaseException as error:
        _log.error("%s was not saved: %s: %s", save.path, type(error).__name__, error)
        failed(error)
        if entry is not None:
            entry.note_failed(error)
        raise
    if entry is None:
        return
    if save.handles:
        entry.note_saved(save.report())
    else:
        total_seconds = save.held_seconds + timing.monotonic() - began
        entry.note_saved({"stall_seconds": save.held_seconds, "total_seconds": total_seconds})


def _act(path: str, saves: list[Future[None]], action: Action) -> None:
    """Run an action after saves. They have all ended, since one thread runs all tasks in order."""
    if any(ended.exception() is not None for ended in saves):
        _log.warning("%s is left as it is, since a save before it has failed", path)
    else:
        action()
