"""The time of this process by its use, as a policy sees it: at each step, save and restore.

In: seconds by a clock, steps. Out: a `Goodput`. Knows nothing of: when a save is due, other processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from ..events.goodput import Goodput

# Saves that a rollback within the process may go back over.
_NUM_MARKS: Final = 1000


class ProcessGoodput:
    """The time since `opened`. A policy creates it, and guards it by its own lock.

    `stall_seconds` returns the seconds for which saves have held the training so far.
    """

    def __init__(self, opened: float, stall_seconds: Callable[[], float]) -> None:
        self.slower_seconds = 0.0
        self._opened, self._stall_seconds = opened, stall_seconds
        self._restore_seconds = self._redone_seconds = 0.0
        # Steps that were saved or restored, with the seconds trained until then, ascending in both.
        self._marks: deque[tuple[int, float]] = deque(maxlen=_NUM_MARKS)

    def saved(self, step: int, at: float) -> None:
        self._marks.append((step, self.spent(at).trained_seconds))

    def restored(self, step: int, at: float, seconds: float) -> None:
        """The training goes back to a step, by a restore that took `seconds`."""
        self._restore_seconds += seconds
        trained = self.spent(at).trained_seconds
        kept = [mark for mark in self._marks if mark[0] <= step]
        if self._marks:  # before the first restore there was nothing to lose
            self._redone_seconds += trained - (kept[-1][1] if kept else self._marks[0][1])
        self._marks = deque([*kept, (step, self.spent(at).trained_seconds)], maxlen=_NUM_MARKS)

    def spent(self, now: float) -> Goodput:
        stall = self._stall_seconds()
        lost = stall + self.slower_seconds + self._restore_seconds + self._redone_seconds
        trained = max(0.0, now - self._opened - lost)
        return Goodput(trained, stall, self.slower_seconds, self._restore_seconds, self._redone_seconds)
