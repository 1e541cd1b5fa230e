"""When a save is due: after so many steps, after so much time, before the machine goes away.

In: steps, clocks, whether the process was asked to leave, and the saves that were begun. Out: yes or no.
Knows nothing of: how a save is made, signals, other ranks.

The rule of a deadline: save at the last step after which one more step, a save and the margin would no longer fit. A
step is expected to take as long as the longest of those lately, a save likewise. When that was too cautious there is
room for another save once the first has ended, and so it is due; an estimate that is too high costs a save, not progress.
"""

from __future__ import annotations

import logging
import math
import operator
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from numbers import Real
from typing import Any, Final

import torch

from ..report import SaveReport
from ..spans import Clock, Moment, epoch_seconds, monotonic, wall_time
from ..spec import with_article
from .signals import Signals, signals_of

Deadline = Moment | Callable[[], float | None]

# What a save is expected to take while none has been measured.
FIRST_SAVE_SECONDS: Final = 60.0
MARGIN_SECONDS: Final = 30.0
# The longest of these is expected next: enough steps to hold an evaluation, few enough to forget the compilation.
_NUM_STEPS: Final = 100
_NUM_SAVES: Final = 5

_log = logging.getLogger("async_ckpt")


@dataclass(frozen=True, slots=True)
class Due:
    """When a save is due. `should_save` returns True if any of these rules says so.

        AsyncCheckpointer("runs/a", due=Due(every=50, seconds=600))

    Args:
        every: a save is due at every step that is a multiple of this, except step 0.
        seconds: a save is due this many seconds after the last one began, or after the checkpointer was constructed.
        deadline: when the machine is taken away. One last save is due in time for it. A datetime with a time zone,
            seconds since the epoch, or a function that is called at every step and returns the number of seconds left,
            or None if that is not known.
        margin_seconds: how many seconds to leave between the commit of that last save and the deadline.
        signals: one save is due at the next step after a signal that announces the end of the job. True means SIGTERM and
            SIGUSR1; otherwise give several names or numbers, such as ("SIGTERM", "SIGUSR2"). If the signal would end the
            process, the first one no longer does, but a second one of the same kind does. Handlers that were installed from Python are
            called as well, and an ignored signal stays ignored. SIGINT is handled only if it is named, and still raises
            KeyboardInterrupt.

    Raises ValueError if a rule is not valid, and TypeError if the deadline is not a time or a signal is not a signal.
    """

    every: int | None = None
    seconds: float | None = None
    deadline: Deadline | None = None
    margin_seconds: float = MARGIN_SECONDS
    signals: Signals = False

    def __post_init__(self) -> None:
        if self.every is not None and (type(self.every) is not int or self.every < 1):
            raise ValueError(f"Due(every=…) must be a whole number from 1 on, got {self.every!r:.100}")
        if self.seconds is not None and not (_is_number(self.seconds) and self.seconds > 0):
            raise ValueError(f"Due(seconds=…) must be a number above 0, got {self.seconds!r:.100}")
        if not (_is_number(self.margin_seconds) and self.margin_seconds >= 0):
            raise ValueError(
                f"Due(margin_seconds=…) must be a number, 0 or more, got {self.margin_seconds!r:.100}"
            )
        _countdown(self.deadline, wall_time)
        if not isinstance(
            self.signals, bool
        ):  # an iterator would be empty when it is asked for the second time
            object.__setattr__(self, "signals", signals_of(self.signals))


@dataclass(frozen=True, slots=True)
class SaveStart:
    """A save that was begun."""

    step: int
    at: float
    save: Future[SaveReport]
    was_preempted: bool  # the process had been asked to leave by then


class SavePolicy:
    """Says at each step whether a save is due. Safe to call from any thread.

    `preempted` tells whether the process was asked to leave. `clock` is for durations, `wall_clock` for a deadline that is
    a time.
    """

    def __init__(
        self,
        due: Due,
        *,
        preempted: Callable[[], bool] = lambda: False,
        clock: Clock = monotonic,
        wall_clock: Clock = wall_time,
    ) -> None:
        self._due = due
        self._preempted = preempted
        self._ask_seconds_left = _countdown(due.deadline, wall_clock)
        self._clock = clock
        self._lock = threading.Lock()
        self._saved_step: int | None = (
            None  # of the newest save, or restored from; under _lock, like all below
        )
        self._saved_at = clock()
        self._asked_step: int | None = None
        self._asked_at = 0.0
        self._answer = False
        self._under_way: list[Future[SaveReport]] = []
        self._begun: deque[SaveStart] = deque()  # and not looked at yet
        self._last_saves: list[Future[SaveReport]] = []  # begun since the process was asked to leave
        self._save_seconds: deque[float] = deque(maxlen=_NUM_SAVES)
        self._step_seconds: deque[float] = deque(maxlen=_NUM_STEPS)
        self._is_near = False  # the deadline: one more step, and a save no longer fits
        self._has_tried = False  # a save began while it was near
        self._is_deaf = False  # the deadline's function has failed, and that was logged

    @property
    def is_arithmetic(self) -> bool:
        """Whether the answers depend on nothing but steps, so that they are the same in every process."""
        due = self._due
        return (due.seconds, due.deadline) == (None, None) and not due.signals

    def should_save(self, step: int) -> bool:
        """Whether a save of `step` is due. To be asked once at every step; asked again, the answer is the same.

        False for the step of the last save, whatever became of it, and for the one restored. Raises ValueError when there
        is no rule, and nothing else.
        """
        if _is_never(self._due):
            raise ValueError(
                "should_save has no rule to go by: give due=Due(every=…, seconds=…, deadline=… or signals=True)"
            )
        seconds_left = self._seconds_left()  # the user's function: not under the lock
        with self._lock:
            self._take_note()
            if step == self._saved_step:
                return False
            if step != self._asked_step:
                self._answer = self._decide(step, seconds_left)
            return self._answer

    def follow(self, step: int, save: Future[SaveReport]) -> None:
        """Note that a save has begun, and for later how long it takes. A skipped one leaves due what was due."""
        # Looked at by `should_save`: a caller of `save` that is interrupted must not be while it holds a lock.
        self._begun.append(SaveStart(step, self._clock(), save, self._preempted()))

    def restored(self, step: int) -> None:
        """Begin to count anew, from the step that training goes on from."""
        with self._lock:
            self._take_note()
            self._saved_step, self._saved_at = step, self._clock()
            self._asked_step = None

    # --- parts ------------------------------------------------------------------------------------------------

    def _take_note(self) -> None:
        """Take note of the saves that were begun since the last time."""
        while self._begun:
            begun = self._begun.popleft()
            self._measure_saves()
            if not _was_skipped(begun.save):
                self._saved_step, self._saved_at = begun.step, begun.at
                self._under_way.append(begun.save)
                self._has_tried = self._is_near
                if begun.was_preempted:
                    self._last_saves.append(begun.save)

    def _decide(self, step: int, seconds_left: float | None) -> bool:
        now = self._clock()
        if self._asked_step is not None:
            self._step_seconds.append(now - self._asked_at)
        self._asked_step, self._asked_at = step, now
        every, seconds = self._due.every, self._due.seconds
        by_steps = every is not None and step > 0 and step % every == 0
        by_time = seconds is not None and now - self._saved_at >= seconds
        by_deadline = self._is_last_chance(seconds_left)
        by_signal = self._preempted() and all(map(_has_failed, self._last_saves))
        return by_steps or by_time or by_deadline or by_signal

    def _is_last_chance(self, seconds_left: float | None) -> bool:
        self._measure_saves()
        needed = max(self._save_seconds, default=FIRST_SAVE_SECONDS) + self._due.margin_seconds
        if seconds_left is None or seconds_left >= needed + max(self._step_seconds, default=0.0):
            self._is_near = self._has_tried = False
            return False
        self._is_near = True
        # What does not fit by this reckoning is tried once all the same: it may fit, and what is committed stays.
        return not self._under_way and (seconds_left >= needed or not self._has_tried)

    def _measure_saves(self) -> None:
        for save in [save for save in self._under_way if save.done()]:
            self._under_way.remove(save)
            if Future.exception(save) is None:  # not the handle's own: nobody has looked at it by this
                self._save_seconds.append(Future.result(save).total_seconds)

    def _seconds_left(self) -> float | None:
        try:
            left = self._ask_seconds_left() if self._ask_seconds_left else None
            known = None if left is None or math.isnan(left) else left
        except Exception:
            if not self._is_deaf:
                _log.exception("the deadline function raised; there is no deadline until it returns one")
            self._is_deaf = True
            return None
        self._is_deaf = False
        return known


def _is_never(due: Due) -> bool:
    """Whether there is no rule at all."""
    return (due.every, due.seconds, due.deadline) == (None, None, None) and not due.signals


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _countdown(deadline: Deadline | None, wall_clock: Clock) -> Callable[[], float | None] | None:
    """What tells the seconds left. Raises TypeError and ValueError for a deadline that is not a time."""
    if deadline is None or callable(deadline):
        return deadline
    at = epoch_seconds(deadline)
    return lambda: at - wall_clock()


def _was_skipped(save: Future[SaveReport]) -> bool:
    return save.done() and Future.exception(save) is None and Future.result(save).status == "skipped"


def _has_failed(save: Future[SaveReport]) -> bool:
    return save.done() and Future.exception(save) is not None


def whole_step(step: Any, advice: str = "", *, what: str = "step") -> int:
    """A step that the user gives; numbers of numpy count, too. Raises ValueError if it is not one."""
    try:
        number = -1 if isinstance(step, bool | torch.Tensor) else operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        shown = repr(step) if isinstance(step, int | float | str) else with_article(type(step).__qualname__)
        raise ValueError(f"{what} must be a whole number from 0 on, got {shown}{advice}")
    return number
