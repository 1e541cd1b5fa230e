"""The saves that are under way, and statistics of those that have ended.

In: saves, as they begin. Out: resolved handles, the order of commits, numbers for a logger. Knows nothing of: how a
save is carried out.

The process has one list of saves, since its exit waits for all of them; each saver sees its own part as a `Ledger`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import warnings
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from math import nan
from typing import Any, Final

from ...errors import ClosedError, SaveAbandonedError, UsageError
from ..host import waits
from ..host.loop import awaitable, get_loop
from ..host.operations import Operation
from ..host.process import in_forked_child
from ..host.threads import is_library_thread
from ..host.waits import ENDS_THE_WAIT, Wait, wait_for, wait_for_all
from ..report import SaveReport
from ..spec import flag, seconds_or_none
from ..timing import Spans
from .handle import Bars, SaveHandle, name_of
from .handle import progress_of as progress_of
from .save import Save, wait_for_decisions

_LAST: Final = tuple(SaveReport("committed", None, "").as_dict("last_"))
# A stopped terminal accepts no output, and no save waits for it longer than this.
_LAST_DRAWING_SECONDS: Final = 1.0

_log = logging.getLogger("async_ckpt")

# Saves that have not finished, or whose failure nobody has seen, oldest first. Replaced as a whole on the loop's
# thread, which no signal interrupts; any thread reads it.
_saves: list[tuple[Ledger, Save]] = []


def all_saves() -> list[Save]:
    """The saves of this process that have not finished, or whose failure nobody has seen."""
    return [save for _, save in _saves]


def wait_for_ends(handles: Sequence[SaveHandle]) -> None:
    """Wait until these saves have ended. Raises the error of one of them.

    For callers that pass the error on: raising it here does not count as the user's look at it.
    """
    wait_for_all(handles)
    for handle in handles:
        if (error := Future.exception(handle)) is not None:
            raise error


def wait_in_training(ended: Future[None], handles: Sequence[SaveHandle] = ()) -> None:
    """Wait for a save that consists of these parts, and log now and then. The caller raises the parts' errors."""
    wait = Wait("in the training", ENDS_THE_WAIT)
    wait_for(ended, None, lambda: wait.goes_on(lambda: progress_of(handles)))
    for handle in handles:
        wait_for(handle)
        handle.exception()


@in_forked_child
def _forget_saves() -> None:
    global _saves
    _saves = []


class Ledger:
    """The saves of one saver. Only the loop's thread changes it, so it needs no lock; any thread reads it."""

    def __init__(
        self,
        exit_timeout: float | None = None,
        *,
        strict: bool = False,
        progress: bool = False,
        roots: tuple[str, ...] = (),
    ) -> None:
        """Raises TypeError, ValueError, and ImportError as `Bars` does, for arguments of the checkpointer."""
        self.exit_timeout = seconds_or_none("exit_timeout", exit_timeout)
        self._strict = flag("strict", strict)
        self._bars = Bars() if flag("progress", progress) else None
        self.roots = roots
        self._last: Future[None] | None = None  # resolved when the newest save is settled
        self._last_report: SaveReport | None = None
        self._stall_seconds = 0.0
        self._num_committed = self._num_failed = self._num_cleanup_failures = 0
        self._skips = itertools.count(1)
        self._num_skipped = 0

    def begin(self, save: Save) -> None:
        """Run a save once those before it have begun, and commit it after them. Called on the loop's thread."""
        global _saves
        turn, self._last = self._last, save.settled
        save.exit_timeout = self.exit_timeout
        # A failed save stays until somebody has looked at its error.
        others = [(ledger, s) for ledger, s in _saves if not s.has_ended or s.is_unseen]
        _saves = [*others, (self, save)]
        operation = Operation(*save.reported_as(self.roots), save.spans, save.context)
        get_loop().begin(self._run(save, turn, operation))

    async def _run(self, save: Save, turn: Future[None] | None, operation: Operation) -> None:
        """Run a save, and resolve its handle with the outcome once its temporary files are gone. Then apply retention.
        A failure of clean-up or retention after the commit is logged.
        """
        global _saves
        handle = save.handle
        drawing = asyncio.create_task(self._bars.follow(handle)) if self._bars else None
        try:
            report = await save.run_to_end(turn)
        except BaseException as error:
            self._num_failed += 1
            operation.end(handle.step, error=error)
            save.settled.set_result(None)
            handle.committed.set_exception(error)
            handle.set_exception(error)
            with suppress(Exception):  # a convenience, which must not cause another error
                await save.after_failure(error)
        else:
            self._count(report)
            operation.end(report.step, report, written_bytes=save.written_bytes)
            failed = await self._clean(handle, save.tidy())
            save.settled.set_result(None)
            handle.committed.set_result(report)
            promise = save.promise()
            if promise is None:
                handle.set_result(report)
            failed = await self._clean(handle, save.afterwards()) or failed
            if failed is not None:
                save.finished.set_exception(failed)
            elif promise is not None:
                # `close` then copies the step, and gives up a place that does not answer
                save.finished.set_result(None)
            if promise is not None:
                await self._keep(promise, handle, report)
        finally:
            if drawing is not None:  # so that the output of a caller that waits for the save comes below the bar
                await asyncio.wait([drawing], timeout=_LAST_DRAWING_SECONDS)
            if not save.finished.done():
                save.finished.set_result(None)
            _saves = [(ledger, s) for ledger, s in _saves if s is not save or s.is_unseen]

    async def _clean(self, handle: SaveHandle, cleaning: Coroutine[Any, Any, None]) -> BaseException | None:
        """Clean up after a committed save. Returns the error, which it also logs and counts."""
        try:
            await cleaning
        except BaseException as error:
            _log.warning("%s is committed, but cleaning up after it failed: %s", name_of(handle), error)
            self._num_cleanup_failures += 1
            return error
        return None

    async def _keep(self, promise: Future[int], handle: SaveHandle, report: SaveReport) -> None:
        """Resolve the handle of a save that is committed at a volatile place, once a lasting place has the step."""
        try:
            await awaitable(promise)
        except Exception as error:
            self._num_failed += 1
            error.add_note(f"async_ckpt: {name_of(handle)} is committed only at {report.path}, which a reboot erases")
            handle.set_exception(error)
        else:
            handle.set_result(report)

    def _count(self, report: SaveReport) -> None:
        self._last_report = report
        _log.info("%s", report)
        self._num_committed += 1
        self._stall_seconds += report.stall_seconds

    def skipped(self, handle: SaveHandle, spans: Spans) -> None:
        """Count a save that was skipped because others are under way. Called from any thread."""
        self._num_skipped = next(self._skips)
        Operation("save", self.roots, spans).end(handle.step, Future.result(handle))

    def saves(self) -> list[Save]:
        """The saves that have not finished, or whose failure nobody has seen, oldest first."""
        with suppress(ClosedError):  # the interpreter is exiting, so no save begins any more
            get_loop().sync()
        return [save for ledger, save in _saves if ledger is self]

    def progress(self) -> str:
        """The progress of the saves for which the next one waits, in words."""
        return progress_of([save.handle for save in self.saves() if not save.settled.done()])

    def see_decided(self, reader: str, meanwhile: Callable[[], None], *, overwrites: bool = False) -> None:
        """Return when all saves begun so far are decided, so that `reader` sees their commits. Warn of failed saves.

        It does not wait for saves that were given up. If the reader `overwrites` the state, it also waits until every
        save has copied it. `meanwhile` is called now and then. Raises RuntimeError on a thread of this library, if a
        save is under way.
        """
        begun = self.saves()
        undecided = [save for save in begun if not (save.settled.done() or save.given_up)]
        if undecided and is_library_thread():
            raise UsageError(
                f"{reader} would have to wait for {name_of(undecided[0].handle)}, and a thread of "
                "async_ckpt must not: it would wait for itself. Call it on another thread, or when no save is under way"
            )
        for save in begun if overwrites else ():
            save.staged.exception()
        wait_for_decisions(undecided, Wait(f"in {reader}", ENDS_THE_WAIT), meanwhile)
        unseen = [handle for handle in self.unseen() if not handle.is_reported]
        waited_for = [save.handle for save in undecided if save.has_failed and save.handle not in unseen]
        for handle in (*waited_for, *unseen):
            self._warn(handle, f"{reader} continues without {name_of(handle)}, which was", _user_stacklevel())

    def report_unseen(self, stacklevel: int) -> None:
        """Warn of each failed save once; under `strict`, raise the first unseen error."""
        if self._strict:
            raise_error_of(self.unseen())
        for handle in self.unseen():
            if not handle.is_reported:
                self._warn(handle, f"{handle.path} was", stacklevel + 1)

    def _warn(self, handle: SaveHandle, subject: str, stacklevel: int) -> None:
        handle.is_reported = True
        error = Future.exception(handle)
        warnings.warn(f"{subject} not saved: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=stacklevel)

    @property
    def stall_seconds(self) -> float:
        """The seconds for which all saves so far have stalled the training."""
        return self._stall_seconds

    def metrics(self, prefix: str, *, num_in_flight: int, pool_bytes: int, num_behind: int) -> dict[str, float]:
        """Counters and the last report, as numbers under constant keys; NaN before the first report."""
        last = self._last_report.as_dict("last_") if self._last_report else dict.fromkeys(_LAST, nan)
        numbers = {
            "saves_committed": self._num_committed,
            "saves_failed": self._num_failed,
            "saves_skipped": self._num_skipped,
            "saves_in_flight": num_in_flight,
            "cleanup_failures": self._num_cleanup_failures,
            "places_behind": num_behind,
            "stall_seconds_total": self._stall_seconds,
            "pool_bytes": pool_bytes,
        }
        del last["last_committed"]  # always 1
        return {prefix + key: float(value) for key, value in {**numbers, **last}.items()}

    def unseen(self) -> list[SaveHandle]:
        """The failed saves whose errors nobody has looked at."""
        return [save.handle for ledger, save in _saves if ledger is self and save.is_unseen]


def raise_error_of(failed: Iterable[SaveHandle]) -> None:
    """Raise the error of the first failed save; the errors of the others become its notes."""
    errors = [error for handle in failed if (error := handle.exception()) is not None]
    if errors:
        for other in errors[1:]:
            errors[0].add_note(f"another save failed too: {type(other).__name__}: {other}")
        raise errors[0]


def abandon(saves: list[Save], why: str) -> None:
    """Give saves up: they will not be committed. Returns when they have ended, or after a short timeout."""
    for save in saves:
        save.give_up(SaveAbandonedError(f"abandoned before it was committed: {why}; earlier checkpoints are intact"))
    wait_for_all([save.finished for save in saves], min(map(_abandon_seconds, saves), default=0.0))


def _abandon_seconds(save: Save) -> float:
    """The seconds to wait for an abandoned save to end."""
    if save.exit_timeout is None:
        return waits.ABANDON_SECONDS
    return min(waits.ABANDON_SECONDS, max(waits.LEAST_ABANDON_SECONDS, save.exit_timeout / 10))


def _user_stacklevel() -> int:
    """The `stacklevel` for a warning of the caller: the first frame whose code is not this library's."""
    level, frame = 2, sys._getframe(1)
    package = __name__.partition(".")[0]
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        level, frame = level + 1, frame.f_back
    return level
