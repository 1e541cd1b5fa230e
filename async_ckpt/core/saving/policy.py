"""The rules of when a save is due: after so many steps, after so much time, before the machine goes away.

In: steps, clocks, whether the process was asked to leave, and the saves that were begun. Out: yes or no.
Knows nothing of: how a save is made, signals, other ranks.

The rule of a deadline: save at the last step after which one more step, a save and the margin would no longer fit. A
step is expected to take as long as the longest recent one, a save likewise. If that was too cautious, there is room
for another save once the first has ended, and so it is due; an estimate that is too high costs a save, not progress.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from numbers import Real
from typing import Final

from ..report import SaveReport
from ..spans import Clock, Moment, epoch_seconds, monotonic, wall_time
from .signals import Signals, signals_of

Deadline = Moment | Callable[[], float | None]

# What a save is expected to take while none has been measured.
FIRST_SAVE_SECONDS: Final = 60.0
MARGIN_SECONDS: Final = 30.0
# The longest of these is expected next: enough steps to hold an evaluation, few enough to forget the compilation.
_NUM_STEPS: Final = 100
# Of saves that begin between two calls of `should_save`: more than any training makes.
_NUM_STARTS: Final = 64
_NUM_SAVES: Final = 5

_log = logging.getLogger("async_ckpt")


@dataclass(frozen=True, slots=True)
class Due:
    """The rules of when a save is due. `should_save` returns True if any of them says so.

        AsyncCheckpointer("runs/a", due=Due(every=50, seconds=600))

    Args:
        every: a save is due at every step that is a multiple of this, except step 0.
        seconds: a save is due this many seconds after the last one began, or after the checkpointer was constructed.
        deadline: when the machine is taken away. One last save is due in time for it. A datetime with a time zone,
            seconds since the epoch, or a function that is called at every step and returns the number of seconds left,
            or None if that is not known.
        margin_seconds: how many seconds to leave between the commit of that last save and the deadline.
        signals: one save is due at the next step after a signal that announces the end of the job. True means SIGTERM
            and SIGUSR1; otherwise give several names or numbers, such as ("SIGTERM", "SIGUSR2"). If the signal would
            end the process, the first one no longer does, but a second one of the same kind does. Handlers that were
            installed from Python are called as well, and an ignored signal stays ignored. SIGINT is handled only if
            it is named, and still raises KeyboardInterrupt.

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
            raise ValueError(f"Due(margin_seconds=…) must be a number, 0 or more, got {self.margin_seconds!r:.100}")
        _countdown(self.deadline, wall_time)
        if not isinstance(self.signals, bool):  # an iterator would be empty the second time
            object.__setattr__(self, "signals", signals_of(self.signals))


@dataclass(frozen=True, slots=True)
class SaveStart:
    """The start of a save, as `follow` notes it."""

    step: int
    at: float
    save: Future[SaveReport]
    was_preempted: bool  # the process had been asked to leave by then

    @property
    def was_skipped(self) -> bool:
        save = self.save
        return save.done() and Future.exception(save) is None and Future.result(save).status == "skipped"


class _Durations:
    """The seconds that recent steps and saves have taken. A policy owns it, and guards it by its own lock."""

    def __init__(self) -> None:
        self.under_way: list[Future[SaveReport]] = []
        self._saves: deque[float] = deque(maxlen=_NUM_SAVES)
        self._steps: deque[float] = deque(maxlen=_NUM_STEPS)

    def measure_saves(self) -> None:
        for save in [save for save in self.under_way if save.done()]:
            self.under_way.remove(save)
            if Future.exception(save) is None:  # not the handle's own method, which would count as a look
                self._saves.append(Future.result(save).total_seconds)

    def add_step(self, seconds: float) -> None:
        self._steps.append(seconds)

    @property
    def save_seconds(self) -> float:
        return max(self._saves, default=FIRST_SAVE_SECONDS)

    @property
    def step_seconds(self) -> float:
        return max(self._steps, default=0.0)


class _DeadlineRule:
    """The rule of a deadline. A policy owns it, and guards it by its own lock, except for `seconds_left`."""

    def __init__(self, due: Due, wall_clock: Clock) -> None:
        self._ask, self._margin_seconds = _countdown(due.deadline, wall_clock), due.margin_seconds
        self._has_failed = False  # the deadline's function raised, and that was logged
        self._is_near = False  # after one more step, a save no longer fits
        self._has_tried = False  # a save began while the deadline was near

    def seconds_left(self) -> float | None:
        """Call the user's function, so not under a lock. None if there is no deadline, or it is not known."""
        try:
            left = self._ask() if self._ask else None
            known = None if left is None or math.isnan(left) else left
        except Exception:
            if not self._has_failed:
                _log.exception("the deadline function raised; there is no deadline until it returns one")
            self._has_failed = True
            return None
        self._has_failed = False
        return known

    def save_began(self) -> None:
        self._has_tried = self._is_near

    def is_last_chance(self, seconds_left: float | None, durations: _Durations) -> bool:
        durations.measure_saves()
        needed = durations.save_seconds + self._margin_seconds
        if seconds_left is None or seconds_left >= needed + durations.step_seconds:
            self._is_near = self._has_tried = False
            return False
        self._is_near = True
        # A save that does not fit by this reckoning is tried once all the same: it may fit, and a commit stays.
        return not durations.under_way and (seconds_left >= needed or not self._has_tried)


class SavePolicy:
    """The answers of `should_save` for one checkpointer, which creates it. Safe to call from any thread.

    `preempted` tells whether the process was asked to leave. `clock` measures durations, `wall_clock` is for a deadline
    that is a time.
    """

    def __init__(
        self,
        due: Due,
        *,
        preempted: Callable[[], bool] = lambda: False,
        clock: Clock = monotonic,
        wall_clock: Clock = wall_time,
    ) -> None:
        self._due, self._preempted, self._clock = due, preempted, clock
        # Of saves that `should_save` has not looked at yet; it may never be called, so only the newest are kept.
        self._starts: deque[SaveStart] = deque(maxlen=_NUM_STARTS)
        self._lock = threading.Lock()
        self._saved_step: int | None = None  # of the newest save, or restored; under _lock, like all below
        self._saved_at = clock()
        self._asked_step: int | None = None
        self._asked_at = 0.0
        self._answer = False
        self._last_saves: list[Future[SaveReport]] = []  # begun since the process was asked to leave
        self._durations, self._deadline = _Durations(), _DeadlineRule(due, wall_clock)

    @property
    def is_arithmetic(self) -> bool:
        """True if the answers depend on nothing but steps, so that they are the same in every process."""
        due = self._due
        return (due.seconds, due.deadline) == (None, None) and not due.signals

    def should_save(self, step: int) -> bool:
        """True if a save of `step` is due. To be called once at every step; called again, the answer is the same.

        False for the step of the last save, however that ended, and for the one restored. Raises ValueError when there
        is no rule, and nothing else.
        """
        if self.is_arithmetic and self._due.every is None:
            raise ValueError("should_save needs a rule: pass due=Due(every=…, seconds=…, deadline=… or signals=True)")
        seconds_left = self._deadline.seconds_left()
        with self._lock:
            self._take_starts()
            if step == self._saved_step:
                return False
            if step != self._asked_step:
                self._answer = self._decide(step, seconds_left)
            return self._answer

    def follow(self, step: int, save: Future[SaveReport]) -> None:
        """Note that a save has begun, and for later how long it takes. After a skipped one, a save remains due."""
        # `should_save` looks at it: a caller of `save` that is interrupted must not be while it holds a lock.
        self._starts.append(SaveStart(step, self._clock(), save, self._preempted()))

    @property
    def has_step(self) -> bool:
        """True once a save has begun, or a step was restored."""
        with self._lock:
            return bool(self._starts) or self._saved_step is not None

    def restored(self, step: int) -> None:
        """Begin to count anew, from the step that training goes on from."""
        with self._lock:
            self._take_starts()
            self._saved_step, self._saved_at = step, self._clock()
            self._asked_step = None

    # --- parts ------------------------------------------------------------------------------------------------

    def _take_starts(self) -> None:
        while self._starts:
            start = self._starts.popleft()
            self._durations.measure_saves()
            if not start.was_skipped:
                self._saved_step, self._saved_at = start.step, start.at
                self._durations.under_way.append(start.save)
                self._deadline.save_began()
                if start.was_preempted:
                    self._last_saves.append(start.save)

    def _decide(self, step: int, seconds_left: float | None) -> bool:
        now = self._clock()
        if self._asked_step is not None:
            self._durations.add_step(now - self._asked_at)
        self._asked_step, self._asked_at = step, now
        every, seconds = self._due.every, self._due.seconds
        by_steps = every is not None and step > 0 and step % every == 0
        by_time = seconds is not None and now - self._saved_at >= seconds
        by_deadline = self._deadline.is_last_chance(seconds_left, self._durations)
        by_signal = self._preempted() and all(map(_has_failed, self._last_saves))
        return by_steps or by_time or by_deadline or by_signal


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _has_failed(save: Future[SaveReport]) -> bool:
    return save.done() and Future.exception(save) is not None


def _countdown(deadline: Deadline | None, wall_clock: Clock) -> Callable[[], float | None] | None:
    """A function that returns the seconds left. Raises TypeError and ValueError for a deadline that is not a time."""
    if deadline is None or callable(deadline):
        return deadline
    at = epoch_seconds(deadline)
    return lambda: at - wall_clock()
