"""The saves of an integration that are under way, and what follows them, in their order.

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
from .checkpoint_history import HistoryEntry
from .joint_errors import meet

_log = logging.getLogger("async_ckpt")

T = TypeVar("T")
Action = Callable[[], object]


def path_key(path: Any) -> str:
    """One key for every spelling of a local path, and a URL as it is."""
    text = str(path)
    return text if "://" in text else os.path.abspath(text)


@dataclass(frozen=True, slots=True)
class _Queued:
    """A save, or what follows saves at one path. `ended` is its outcome. Only a save has handles.

    A save has held the training for `waited_seconds` before its handles measured that, or for `held_seconds` in all.
    `twin` is the second name of what is saved, if it gets one.
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
        """The report of the first part; the stall is that of all parts, and of the wait before them."""
        if self.own_report is not None:
            return self.own_report()
        reports = [handle.result() for handle in self.handles]
        measured = self.waited_seconds + sum(report.stall_seconds for report in reports)
        return replace(reports[0], path=self.path, step=self.step, stall_seconds=max(measured, self.held_seconds))


class SaveQueue:
    """The saves under way, and what follows them, in their order. Used by the training thread alone.

    One more thread waits for each save, and then does what follows. It owns nothing: each task is all that it needs.
    """

    def __init__(self, name: str, max_in_flight: int = 1) -> None:
        self._name, self._max_in_flight = name, max_in_flight
        self._queued: deque[_Queued] = deque()
        self._thread: threads.Crew | None = None  # made on use: before that, a trainer may pickle its owner, or fork
        self._errors: list[BaseException] = []
        self._reports: list[SaveReport] = []

    def __reduce__(self) -> Any:
        """A copy is a queue of its own, with nothing under way, and nothing that is still to be told."""
        return type(self), (self._name, self._max_in_flight)

    def admit(self, path: Any) -> float:
        """Wait until nothing concerns this path, and few enough saves are under way. Returns for how many seconds."""
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
        """Add a save that has begun. It has ended when all of its handles are done, and then `then` is; or when one of
        them has failed, and then `failed` is done. Returns what is done at its end.

        Without an `entry`, no history is told of it, such as by ranks other than 0.
        """
        for handle in handles:
            ledger.leave_warning(handle)  # one that fails just before the next save begins is raised by the one after
        ended: Future[None] = threads.running_future()
        second = None if twin is None else path_key(twin)
        save = _Queued(path_key(path), ended, tuple(handles), step, waited_seconds, held_seconds, second, report)
        self._submit(save, partial(_finish, save, then, failed, entry, timing.monotonic()))
        return ended

    def follow(self, path: Any, action: Action) -> Future[None]:
        """Add an action behind the saves in the queue, which is left undone if one of them fails."""
        saves = [one.ended for one in self._queued if one.handles]
        following = _Queued(path_key(path), threads.running_future())
        self._submit(following, partial(_act, following.path, saves, action))
        return following.ended

    def wait(self, path: Any = None) -> None:
        """Wait for everything, or for all that concerns one path. Raises no error of a save."""
        for one in [*self._queued]:
            if path is None or path_key(path) in (one.path, one.twin):
                _wait_for(one)

    def take_reports(self) -> list[SaveReport]:
        """The reports of the saves that have ended well since the last call."""
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
        """`finish` on all ranks, and then do something. Returns what each rank has done. All raise the error of any."""

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
                handle.exception()  # is passed on from here; the exit of the interpreter need not tell of it
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
    """Wait for the parts of a save, and do the rest of it. Raises its error, without looking at it for the user."""
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
    """Do what follows saves, which have all ended, since one thread does everything in order."""
    if any(ended.exception() is not None for ended in saves):
        _log.warning("%s is left as it is, since a save before it has failed", path)
    else:
        action()
