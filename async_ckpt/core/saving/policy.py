"""The rules of when a save is due: by steps, by time, or before the machine goes away.

In: steps, clocks, whether the process was asked to leave, and the saves that have begun. Out: yes or no, the interval
that follows from the cost of saves, and the goodput of this process. Knows nothing of: how a save is made, signals,
other ranks.

The rule of a deadline: save at the last step after which one more step, a save and the margin would no longer fit. The
next step is expected to take as long as the longest recent one, and so is the next save. If these estimates were too
high, there is time for another save after the first has ended, and so it is due; an estimate that is too high costs a
save, not progress.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from ..events.goodput import Goodput
from ..report import SaveReport
from ..spec import is_number, whole_count
from ..timing import Clock, Moment, epoch_seconds, monotonic, wall_time
from .interval import (
    FIRST_SAVE_SECONDS,
    NUM_SAVES,
    AdaptiveInterval,
    Past,
    SaveCost,
    SaveInterval,
    median,
    slower_seconds,
)  # fmt: skip
from .signals import Signals, signals_of

Deadline = Moment | Callable[[], float | None]

MARGIN_SECONDS: Final = 30.0
# The longest of this many steps is expected next: enough to include an evaluation, few enough to forget compilation.
_NUM_STEPS: Final = 100
# Saves that begin between two calls of `should_save`: more than any training makes.
_NUM_STARTS: Final = 64
# How many earlier saves a rollback within the process may go back over.
_NUM_MARKS: Final = 1000
# How often the step reached is written to the history. If the training is killed, the history misses up to this much.
PROGRESS_SECONDS: Final = 60.0

_log = logging.getLogger("async_ckpt")


@dataclass(frozen=True, slots=True)
class Due:
    """The rules of when a save is due. `should_save` returns True if any of them applies.

        AsyncCheckpointer("runs/a", due=Due(every=50, seconds=600))

    Args:
        every: a save is due at every step that is a multiple of this, except step 0.
        seconds: a save is due this many seconds after the last one began, or after the checkpointer was constructed.
        deadline: when the machine is taken away. One last save is due in time before it. A datetime with a time zone,
            seconds since the epoch, or a function that is called at every step and returns the number of seconds left,
            or None if that is not known.
        margin_seconds: how many seconds to leave between the commit of that last save and the deadline.
        signals: one save is due at the next step after a signal that announces the end of the job. True stands for
            SIGTERM and SIGUSR1; otherwise, give several names or numbers, such as ("SIGTERM", "SIGUSR2"). If the signal
            would end the process, the first one no longer does, but a second one of the same kind does. Handlers that
            were installed from Python are called as well, and an ignored signal stays ignored. SIGINT is handled only
            if it is named, and still raises KeyboardInterrupt.
        overhead: the largest share of training time that saves may cost, such as 0.01. The interval follows from the
            cost of the last five saves: their stalls, and the slowdown of steps while they were under way.
        mtbf: the mean time between failures in seconds, or "measured": then it comes from the history of the run, and
            is a day at the start; below three failures, one more failure within a day is assumed. The interval is the
            one at which saves and redone work together cost the least, about `sqrt(2 * cost * mtbf)` (Young,
            Communications of the ACM 17(9), 1974), with the higher-order terms of Daly (Future Generation Computer
            Systems 22(3), 2006). With `overhead` as well, the longer interval counts.
        at_least, at_most: the bounds of that interval, in seconds. Regardless of them, a save is due only once the
            previous one is durable. The first save is due after a minute.

    Raises ValueError if a rule is not valid, and TypeError if the deadline is not a time or a signal is not a signal.
    """

    every: int | None = None
    seconds: float | None = None
    deadline: Deadline | None = None
    margin_seconds: float = MARGIN_SECONDS
    signals: Signals = False
    overhead: float | None = None
    mtbf: float | Literal["measured"] | None = None
    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        if self.every is not None:
            object.__setattr__(self, "every", whole_count("Due(every=…)", self.every))
        for name in ("seconds", "at_least", "at_most"):
            _refuse_unless_above_0(name, getattr(self, name))
        if not (is_number(self.margin_seconds) and self.margin_seconds >= 0):
            raise ValueError(f"Due(margin_seconds=…) must be a number, 0 or more, got {self.margin_seconds!r:.100}")
        if self.overhead is not None and not (is_number(self.overhead) and 0 < self.overhead <= 1):
            raise ValueError(f"Due(overhead=…) must be a share above 0 and up to 1, got {self.overhead!r:.100}")
        if self.mtbf != "measured":
            _refuse_unless_above_0("mtbf", self.mtbf, ' of seconds, or "measured"')
        has_bounds = (self.at_least, self.at_most) != (None, None)
        if has_bounds and (self.overhead, self.mtbf) == (None, None):
            raise ValueError("Due(at_least=…, at_most=…) bound the interval of overhead= or mtbf=; give one of these")
        if self.at_least is not None and self.at_most is not None and self.at_least > self.at_most:
            raise ValueError(f"Due(at_least={self.at_least!r}) is above at_most={self.at_most!r}")
        _countdown(self.deadline, wall_time)
        if not isinstance(self.signals, bool):  # an iterator would be empty the second time
            object.__setattr__(self, "signals", signals_of(self.signals))


class SaveStart(NamedTuple):
    """The start of a save, as recorded by `follow`."""

    step: int
    at: float
    save: Future[SaveReport]
    was_preempted: bool  # the process had been asked to leave by then

    @property
    def was_skipped(self) -> bool:
        save = self.save
        return save.done() and Future.exception(save) is None and Future.result(save).status == "skipped"


class ProcessGoodput:
    """The goodput of this process since `opened`. A policy creates it, reports each save and restore to it, and guards
    it by the policy's lock.

    `stall_seconds` returns the seconds for which saves have stalled the training so far.
    """

    def __init__(self, opened: float, stall_seconds: Callable[[], float]) -> None:
        self.slower_seconds = 0.0
        self._opened, self._stall_seconds = opened, stall_seconds
        self._restore_seconds = self._redone_seconds = 0.0
        # (step, seconds trained until then) of saved or restored steps, ascending in both.
        self._marks: deque[tuple[int, float]] = deque(maxlen=_NUM_MARKS)

    def saved(self, step: int, at: float) -> None:
        self._marks.append((step, self.spent(at).trained_seconds))

    def restored(self, step: int, at: float, seconds: float) -> None:
        """Note that the training returns to a step, by a restore that took `seconds`."""
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


class _Durations:
    """The seconds that recent steps and saves have taken. A policy owns it, and guards it by the policy's lock."""

    def __init__(self, interval: AdaptiveInterval | None, time: ProcessGoodput) -> None:
        self.interval = interval  # receives the cost of each save; None if no rule needs it
        self._time = time
        self._under_way: list[Future[SaveReport]] = []
        self._saves: deque[float] = deque(maxlen=NUM_SAVES)
        self._steps: deque[float] = deque(maxlen=_NUM_STEPS)
        self._plain_steps: deque[float] = deque(maxlen=_NUM_STEPS)  # while no save was under way
        self._beside: list[float] = []  # steps while the oldest save was under way

    @property
    def is_saving(self) -> bool:
        """True if a save was under way at the last measurement, or has begun since."""
        return bool(self._under_way)

    def begin(self, save: Future[SaveReport]) -> None:
        self._under_way.append(save)

    def measure_saves(self) -> None:
        for save in [save for save in self._under_way if save.done()]:
            self._under_way.remove(save)
            beside, self._beside = self._beside, []
            if Future.exception(save) is None:  # not the handle's own method, which would count as a look at the error
                report = Future.result(save)
                self._saves.append(report.total_seconds)
                plain = median(self._plain_steps) if self._plain_steps else math.inf
                slower = slower_seconds(beside, plain, report.stall_seconds)
                self._time.slower_seconds += slower
                if self.interval is not None:
                    self.interval.add(SaveCost(report.stall_seconds, slower, report.total_seconds))

    def add_step(self, seconds: float) -> None:
        self._steps.append(seconds)
        (self._beside if self.is_saving else self._plain_steps).append(seconds)

    @property
    def save_seconds(self) -> float:
        return max(self._saves, default=FIRST_SAVE_SECONDS)

    @property
    def step_seconds(self) -> float:
        return max(self._steps, default=0.0)


class _DeadlineRule:
    """The rule of a deadline. A policy owns it, and guards it by the policy's lock, except for `seconds_left`."""

    def __init__(self, due: Due, wall_clock: Clock) -> None:
        self._ask, self._margin_seconds = _countdown(due.deadline, wall_clock), due.margin_seconds
        self._has_failed = False  # the deadline function raised, and that was logged
        self._is_near = False  # after one more step, a save no longer fits
        self._has_tried = False  # a save began while the deadline was near

    def seconds_left(self) -> float | None:
        """The user's countdown. Must not be called under a lock. None if there is no deadline, or it is not known."""
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
        needed = durations.save_seconds + self._margin_seconds
        if seconds_left is None or seconds_left >= needed + durations.step_seconds:
            self._is_near = self._has_tried = False
            return False
        self._is_near = True
        # A save that does not fit by this estimate is tried once anyway: it may fit, and a commit stays.
        return not durations.is_saving and (seconds_left >= needed or not self._has_tried)


class SavePolicy:
    """The answers of `should_save` for one checkpointer, which creates it. Safe to call from any thread.

    `preempted` returns True once the process was asked to leave, `stall_seconds` returns the seconds for which saves
    have stalled the training. `clock` measures durations, `wall_clock` is for a deadline that is a point in time.
    """

    def __init__(
        self,
        due: Due,
        *,
        preempted: Callable[[], bool] = lambda: False,
        stall_seconds: Callable[[], float] = lambda: 0.0,
        clock: Clock = monotonic,
        wall_clock: Clock = wall_time,
    ) -> None:
        self._due, self._preempted, self._clock = due, preempted, clock
        # Saves that `should_save` has not looked at yet. It may never be called, so only the newest are kept.
        self._starts: deque[SaveStart] = deque(maxlen=_NUM_STARTS)
        self._lock = threading.Lock()
        self._saved_step: int | None = None  # the newest step saved or restored; under _lock, like all fields below
        self._saved_at = clock()
        self._asked_step: int | None = None
        self._asked_at = 0.0
        self._answer = False
        self._last_saves: list[Future[SaveReport]] = []  # begun since the process was asked to leave
        self._opened_at = self._noted_at = clock()
        self._noted_step: int | None = None  # the step of the newest event in the history, or the restored step
        self._noted_slower = 0.0
        self._time = ProcessGoodput(self._opened_at, stall_seconds)
        self._durations, self._deadline = _Durations(interval_of(due), self._time), _DeadlineRule(due, wall_clock)

    @property
    def is_arithmetic(self) -> bool:
        """True if the answers depend only on steps, and so are the same in every process."""
        due = self._due
        return (due.seconds, due.deadline) == (None, None) and not (due.signals or self.has_interval)

    def should_save(self, step: int) -> bool:
        """True if a save of `step` is due. Call it once at every step; repeated calls return the same answer.

        False for the step of the last save, however it ended, and for the restored step. Raises ValueError if there is
        no rule, or once the first save has shown that its cost is at least `Due(mtbf=…)`.
        """
        if self.is_arithmetic and self._due.every is None:
            raise ValueError(
                "should_save needs a rule: pass due=Due(every=…, seconds=…, overhead=…, mtbf=…, deadline=… or "
                "signals=True)"
            )
        seconds_left = self._deadline.seconds_left()
        with self._lock:
            self._take_starts()
            if step == self._saved_step:
                return False
            if step != self._asked_step:
                self._answer = self._decide(step, seconds_left)
            return self._answer

    def follow(self, step: int, save: Future[SaveReport]) -> None:
        """Note that a save has begun, and measure later how long it takes. After a skipped save, a save remains due."""
        # `should_save` looks at it later: a caller of `save` may be interrupted, which must not happen under a lock.
        self._starts.append(SaveStart(step, self._clock(), save, self._preempted()))

    @property
    def has_step(self) -> bool:
        """True once a save has begun, or a step was restored."""
        with self._lock:
            return bool(self._starts) or self._saved_step is not None

    def interval(self) -> SaveInterval:
        """The interval that follows from the costs so far. Raises ValueError if there is no rule that needs one."""
        with self._lock:
            if self._durations.interval is None:
                raise ValueError("there is no interval: give due=Due(overhead=…) or Due(mtbf=…)")
            return self._durations.interval.after(self._clock() - self._opened_at)

    @property
    def has_interval(self) -> bool:
        """True if a rule derives an interval from the cost of saves."""
        return self._durations.interval is not None

    def spent(self) -> Goodput:
        """The goodput of this process."""
        with self._lock:
            self._take_starts()
            return self._time.spent(self._clock())

    def reached(self, *, is_last: bool = False) -> int | None:
        """The step reached, if the history should record it now, at most once in a minute; otherwise None."""
        with self._lock:
            self._take_starts()
            step, now = self._asked_step, self._clock()
            if step in (None, self._noted_step, self._saved_step) or not (
                is_last or now - self._noted_at >= PROGRESS_SECONDS
            ):
                return None
            self._noted_step, self._noted_at = step, now
            return step

    def facts(self) -> dict[str, Any]:
        """The facts for the next event in the history: seconds lost by slower steps since the last one, interval."""
        with self._lock:
            slower, self._noted_slower = self._time.slower_seconds - self._noted_slower, self._time.slower_seconds
            interval = self._durations.interval
            shown = "" if interval is None else str(interval.after(self._clock() - self._opened_at))
            return {"slower_seconds": slower or None, "interval": shown}

    def restored(self, step: int, past: Past | None = None, *, seconds: float = 0.0) -> None:
        """Count anew from a restored step, with the history of the run as `past`. The restore took `seconds`."""
        with self._lock:
            self._take_starts()
            self._time.restored(step, self._clock(), seconds)
            if self._durations.interval is not None and past is not None:
                self._durations.interval.resume(past)
            self._saved_step, self._saved_at = step, self._clock()
            self._asked_step = None

    # --- parts ------------------------------------------------------------------------------------------------

    def _take_starts(self) -> None:
        while self._starts:
            start = self._starts.popleft()
            self._durations.measure_saves()
            if not start.was_skipped:
                self._saved_step, self._saved_at = start.step, start.at
                self._noted_at = start.at
                self._time.saved(start.step, start.at)
                self._durations.begin(start.save)
                self._deadline.save_began()
                if start.was_preempted:
                    self._last_saves.append(start.save)

    def _decide(self, step: int, seconds_left: float | None) -> bool:
        now, durations = self._clock(), self._durations
        if self._asked_step is not None:
            durations.add_step(now - self._asked_at)
        self._asked_step, self._asked_at = step, now
        durations.measure_saves()
        every, seconds = self._due.every, self._due.seconds
        by_steps = every is not None and step > 0 and step % every == 0
        by_time = seconds is not None and now - self._saved_at >= seconds
        by_interval = durations.interval is not None and self._is_over(durations.interval, now)
        by_deadline = self._deadline.is_last_chance(seconds_left, durations)
        by_signal = self._preempted() and all(map(_has_failed, self._last_saves))
        return by_steps or by_time or by_interval or by_deadline or by_signal

    def _is_over(self, interval: AdaptiveInterval, now: float) -> bool:
        """True if the interval that follows from the costs has passed."""
        seconds = interval.after(now - self._opened_at).seconds
        return not self._durations.is_saving and now - self._saved_at >= seconds


def interval_of(due: Due) -> AdaptiveInterval | None:
    """The interval derived from measured costs; None if no rule needs one."""
    if (due.overhead, due.mtbf) == (None, None):
        return None
    return AdaptiveInterval(overhead=due.overhead, mtbf=due.mtbf, at_least=due.at_least, at_most=due.at_most)


def _refuse_unless_above_0(name: str, value: Any, of: str = "") -> None:
    if value is not None and not (is_number(value) and value > 0):
        raise ValueError(f"Due({name}=…) must be a number above 0{of}, got {value!r:.100}")


def _has_failed(save: Future[SaveReport]) -> bool:
    return save.done() and Future.exception(save) is not None


def _countdown(deadline: Deadline | None, wall_clock: Clock) -> Callable[[], float | None] | None:
    """A function that returns the seconds left. Raises TypeError and ValueError for a deadline that is not a time."""
    if deadline is None or callable(deadline):
        return deadline
    at = epoch_seconds(deadline)
    return lambda: at - wall_clock()
