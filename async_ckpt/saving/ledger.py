"""The account of a saver: which saves were begun, how they ended, and which failures nobody has looked at.

In: saves, as they begin and end. Out: whom the next one follows, numbers for a logger. Knows nothing of: what a save is
made of.
"""

from __future__ import annotations

import itertools
import logging
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from math import nan
from typing import Final

from ..errors import ClosedError
from ..host.threads import is_library_thread
from ..host.waiting import ENDS_THE_WAIT, Wait
from ..report import SaveReport
from .handle import SaveHandle
from .waiting import name_of, told, wait_for_decisions
from .worker import Pending, get_worker

_LAST: Final = tuple(SaveReport("committed", None, "").as_dict("last_"))

_log = logging.getLogger("async_ckpt")


class Ledger:
    """Changed on the loop's thread alone, which no signal interrupts; read by all."""

    def __init__(self) -> None:
        self._last: Future[None] | None = None  # resolved when the newest save is decided
        self._pending: list[Pending] = []  # replaced as a whole
        self._last_report: SaveReport | None = None
        self._stall_seconds = 0.0
        self._num_committed = self._num_failed = self._num_cleanup_failures = self._num_missed = 0
        self._warned: list[SaveHandle] = []  # replaced as a whole, by callers of `save`
        self._skips = itertools.count(1)
        self._num_skipped = 0

    def follow(self, pending: Pending, decided: Callable[[], None]) -> Future[None] | None:
        """Keep account of a save, and call `decided` when it is. Returns the end of the save before it."""
        self._pending = [*self._pending, pending]
        turn, self._last = self._last, pending.settled

        def ended(_: Future[SaveReport]) -> None:
            if Future.exception(pending.handle) is None:
                report = self._last_report = Future.result(pending.handle)
                _log.info("%s", report)
                self._num_committed += 1
                self._stall_seconds += report.stall_seconds
            else:
                self._num_failed += 1

        def finished(future: Future[None]) -> None:
            self._num_cleanup_failures += future.exception() is not None
            # A failed save stays until somebody has looked at it.
            self._pending = [p for p in self._pending if not p.finished.done() or _is_unseen(p.handle)]

        pending.settled.add_done_callback(lambda _: decided())
        Future.add_done_callback(pending.handle, ended)
        pending.finished.add_done_callback(finished)
        return turn

    def skipped(self) -> None:
        """A save was not begun, since others are under way. From any thread."""
        self._num_skipped = next(self._skips)

    def missed(self, num_targets: int) -> None:
        """A save is committed without so many of its targets."""
        self._num_missed += num_targets

    def pending(self) -> list[Pending]:
        """The saves that were begun, and have not ended, or have failed without anybody having looked."""
        with suppress(ClosedError):  # the interpreter is exiting: none begins any more
            get_worker().sync()
        return self._pending

    def told_of_undecided(self) -> str:
        """What the next save waits for, in words."""
        return told([pending.handle for pending in self.pending() if not pending.settled.done()])

    def see_decided(self, reader: str, meanwhile: Callable[[], None], *, overwrites: bool = False) -> None:
        """Return when all saves begun so far are decided, so that `reader` sees what they have committed. It goes on without
        those that have failed, and warns of each of them. Those that were given up are not waited for, but their copies are if
        the reader `overwrites` what may still be copied.

        `meanwhile` is called now and then. Raises RuntimeError at once on a thread of this library, if a save is under way.
        """
        begun = self.pending()
        undecided = [p for p in begun if not (p.handle.done() or p.is_given_up)]
        if undecided and is_library_thread():
            raise RuntimeError(
                f"{reader} would have to wait for {name_of(undecided[0].handle)}, and a thread of async_ckpt must not: it would wait "
                "for itself. Call it on another thread, or when no save is under way"
            )
        for pending in begun if overwrites else ():
            pending.handle.staging_completion.exception()
        wait_for_decisions(undecided, Wait(f"in {reader}", ENDS_THE_WAIT), meanwhile)
        unseen = [handle for handle in self._unseen() if handle not in self._warned]
        waited_for = [p.handle for p in undecided if has_failed(p.handle) and p.handle not in unseen]
        for handle in (*waited_for, *unseen):
            self._warn(handle, f"{reader} goes on without {name_of(handle)}, which was", _user_stacklevel())

    def warn_of_unseen(self, stacklevel: int) -> None:
        """Of each once."""
        for handle in self._unseen():
            if handle not in self._warned:
                self._warn(handle, f"{handle.path} was", stacklevel + 1)

    def _warn(self, handle: SaveHandle, who: str, stacklevel: int) -> None:
        if handle not in self._warned:
            self._warned = [*self._warned[-8:], handle]
        error = Future.exception(handle)
        warnings.warn(
            f"{who} not saved: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=stacklevel
        )

    def raise_unseen(self) -> None:
        """The first error that nobody has looked at; the others are noted in it."""
        errors = [error for handle in self._unseen() if (error := handle.exception()) is not None]
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"another save failed too: {type(other).__name__}: {other}")
            raise errors[0]

    def metrics(self, prefix: str, *, num_in_flight: int, pool_bytes: int) -> dict[str, float]:
        """Counters and the last report, as numbers under constant keys; NaN before the first report."""
        last = self._last_report.as_dict("last_") if self._last_report else dict.fromkeys(_LAST, nan)
        numbers = {
            "saves_committed": self._num_committed,
            "saves_failed": self._num_failed,
            "saves_skipped": self._num_skipped,
            "saves_in_flight": num_in_flight,
            "cleanup_failures": self._num_cleanup_failures,
            "destinations_missed": self._num_missed,
            "stall_seconds_total": self._stall_seconds,
            "pool_bytes": pool_bytes,
        }
        del last["last_committed"]  # it always is
        return {prefix + key: float(value) for key, value in {**numbers, **last}.items()}

    def _unseen(self) -> list[SaveHandle]:
        return [pending.handle for pending in self._pending if _is_unseen(pending.handle)]

    def __repr__(self) -> str:
        return f"<Ledger {self._num_committed} committed, {self._num_failed} failed>"


def has_failed(handle: SaveHandle) -> bool:
    """Whether it has ended in an error. This is no look at the error."""
    return handle.done() and Future.exception(handle) is not None


def _is_unseen(handle: SaveHandle) -> bool:
    """Whether it has failed, and nobody has looked."""
    return has_failed(handle) and not handle.looked_at


def _user_stacklevel() -> int:
    """The `stacklevel` for a warning of whoever calls the caller of this: the first line of code that is not this library's."""
    level, frame = 2, sys._getframe(1)
    package = __name__.partition(".")[0]
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        level, frame = level + 1, frame.f_back
    return level
