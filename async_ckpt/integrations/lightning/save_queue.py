"""The queue of saves, and of what follows them.

In: handles, and functions to call when their saves are durable. Out: reports and errors. Knows nothing of: Lightning.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ... import SaveHandle, SaveReport
from ...plumbing import ledger, threads, timing, waits
from ..common.checkpoint_history import note_failed, note_saved
from .checkpoint_paths import path_key

_log = logging.getLogger("async_ckpt")

Action = Callable[[], object]


@dataclass(frozen=True, slots=True)
class _Queued:
    """A save, or what follows saves at one path. `ended` is its outcome. Only a save has handles.

    `twin` is the second name of what is saved, if it gets one.
    """

    path: str
    ended: Future[None]
    handles: tuple[SaveHandle, ...] = ()
    step: int | None = None
    waited_seconds: float = 0.0
    twin: str | None = None

    def report(self) -> SaveReport:
        """The report of the first part; the stall is that of all parts, and of the wait before them."""
        reports = [handle.result() for handle in self.handles]
        stall_seconds = self.waited_seconds + sum(report.stall_seconds for report in reports)
        return replace(reports[0], path=self.path, step=self.step, stall_seconds=stall_seconds)


class SaveQueue:
    """The saves under way, and what follows them, in their order. Used by the training thread alone.

    One more thread waits for each save, and then does what follows. It owns nothing: each task is all that it needs.
    """

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self._queued: deque[_Queued] = deque()
        self._thread: threads.Crew | None = None  # made on use: before that, Lightning may pickle the plugin, or fork
        self._errors: list[BaseException] = []
        self._reports: list[SaveReport] = []

    def __reduce__(self) -> Any:
        """A copy is a queue of its own, with nothing under way, and nothing that is still to be told."""
        return type(self), (self._max_in_flight,)

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
        *,
        step: int | None,
        waited_seconds: float,
        then: Action,
        twin: Any = None,
        record: Mapping[str, Any] | None = None,
    ) -> None:
        """Add a save that has begun. It has ended when all of its handles are done, and then `then` is.

        Without a `record`, the history of the folder is not told of it, such as by ranks other than 0.
        """
        for handle in handles:
            ledger.leave_warning(
                handle
            )  # one that fails just before the next save begins is raised by the one after that
        ended: Future[None] = threads.running_future()
        second = None if twin is None else path_key(twin)
        queued = _Queued(path_key(path), ended, tuple(handles), step, waited_seconds, second)
        self._submit(partial(self._finish, queued, then, record), ended)
        self._queued.append(queued)

    def follow(self, path: Any, action: Action) -> None:
        """Add an action behind the saves in the queue, which is left undone if one of them fails."""
        saves = [one.ended for one in self._queued if one.handles]
        ended: Future[None] = threads.running_future()
        self._submit(partial(_act, path_key(path), saves, action), ended)
        self._queued.append(_Queued(path_key(path), ended))

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

    def stop(self) -> None:
        """Wait for everything, and end the thread. The next save starts another one."""
        self.wait()
        if self._thread is not None:
            told: Future[None] = threads.running_future()
            self._thread.submit(partial(told.set_result, None), told.set_exception)
            waits.wait_for(told)
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

    def _finish(self, save: _Queued, then: Action, record: Mapping[str, Any] | None) -> None:
        """Wait for the parts of a save, and do the rest of it. Raises its error, without looking at it for the user."""
        try:
            ledger.wait_for_ends(save.handles)
            then()
        except BaseException as error:
            self._tell(save, record, error)
            raise
        self._tell(save, record)

    def _tell(self, save: _Queued, record: Mapping[str, Any] | None, error: BaseException | None = None) -> None:
        """Have the history of the folder told what a save has come to, behind the link that may wait for the save."""
        if self._thread is None or record is None:
            return
        folder, _, name = save.path.rpartition("/")
        if error is None:
            note = partial(note_saved, folder, name, save.step, save.report(), record)
        else:
            note = partial(note_failed, folder, save.step, error)
        self._thread.submit(note, lambda _: None)  # refused at the exit of the interpreter

    def _submit(self, task: threads.Task, ended: Future[None]) -> None:
        if self._thread is None:
            self._thread = threads.Crew("lightning", 1)
        self._thread.submit(partial(threads.resolve, ended, task), ended.set_exception)

    def __repr__(self) -> str:
        return f"<SaveQueue, {sum(not one.ended.done() for one in self._queued)} under way>"


def _wait_for(one: _Queued) -> None:
    wait = waits.Wait("in the Trainer", waits.ENDS_THE_WAIT)
    waits.wait_for(one.ended, None, lambda: wait.goes_on(lambda: ledger.progress_of(one.handles)))


def _act(path: str, saves: list[Future[None]], action: Action) -> None:
    """Do what follows saves, which have all ended, since one thread does everything in order."""
    if any(ended.exception() is not None for ended in saves):
        _log.warning("%s is left as it is, since a save before it has failed", path)
    else:
        action()
