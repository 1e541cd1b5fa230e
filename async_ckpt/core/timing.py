"""The clock, times of day, and named spans of time.

In: a clock, a time. Out: seconds by name; a trace of each thread's work. Knows nothing of: the work that is timed.
Only this module imports `time`, so that every other module can be given a fake clock.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from numbers import Real
from typing import Any, Final, NamedTuple, TypeVar

T = TypeVar("T")

Clock = Callable[[], float]
Moment = datetime | float

monotonic: Clock = time.perf_counter
wall_time: Clock = time.time

# September 2001. A smaller number was probably meant as seconds from now.
_EARLIEST = 1e9


def epoch_seconds(when: Moment) -> float:
    """A time as seconds since the epoch. Raises TypeError, or ValueError for an ambiguous time."""
    if isinstance(when, datetime):
        if when.tzinfo is None:
            raise ValueError(f"{when!r} has no time zone; give it one, as in datetime.now(timezone.utc)")
        return when.timestamp()
    if not isinstance(when, Real):
        raise TypeError(f"a time must be a datetime or seconds since the epoch, not {type(when).__qualname__}")
    if not when >= _EARLIEST:
        raise ValueError(
            f"{when!r} is not a time in seconds since the epoch; for one from now on, add it to time.time()"
        )
    return float(when)


def from_now(seconds: float) -> datetime:
    """Now plus `seconds`, in the type that clients of stores take."""
    return datetime.now(UTC) + timedelta(seconds=seconds)


def shown_time(seconds: float) -> str:
    """Seconds since the epoch as text for people; "an unknown time" for a number that is not a valid time."""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return "an unknown time"


def duration(seconds: float) -> timedelta:
    """Seconds, in the type that clients of stores take."""
    return timedelta(seconds=seconds)


class Timekeeper:
    """The clock of deadlines, and waits by that clock. Tests replace it with a fake that does not wait."""

    def now(self) -> float:
        """Seconds since an arbitrary moment."""
        return monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait_for(self, changed: threading.Condition, happened: Callable[[], bool], seconds: float) -> bool:
        """Wait on `changed` until `happened()` is true. Returns False if `seconds` pass before that."""
        return changed.wait_for(happened, seconds)


TIMEKEEPER: Final = Timekeeper()


class Trace:
    """Each thread's work as events of Chrome's trace format, which Perfetto shows. Thread-safe."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._epoch = wall_time() - clock()  # so that traces of several processes have a common time axis
        self._events: deque[dict[str, Any]] = deque()
        self._named: set[int] = set()  # threads whose names are in the trace

    def span(self, name: str, **facts: Any) -> AbstractContextManager[None]:
        """Add an event with this name, on the calling thread, for the duration of the `with` block."""
        return self._span(name, facts)

    @contextmanager
    def _span(self, name: str, facts: dict[str, Any]) -> Iterator[None]:
        begin = self._clock()
        try:
            yield
        finally:
            self._add(name, begin, self._clock(), facts)

    def whole(self, name: str, begin: float) -> None:
        """Add an event that belongs to no thread, from `begin` until now."""
        event = {"cat": "async_ckpt", "name": name, "pid": os.getpid(), "tid": 0, "id": f"{begin:.6f}"}
        for phase, at in (("b", begin), ("e", self._clock())):
            self._events.append({"ph": phase, "ts": (self._epoch + at) * 1e6, **event})

    def take(self) -> list[dict[str, Any]]:
        """Remove and return the events since the last call."""
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def _add(self, name: str, begin: float, end: float, facts: dict[str, Any]) -> None:
        thread = {"pid": os.getpid(), "tid": threading.get_native_id()}
        if thread["tid"] not in self._named:
            self._named.add(thread["tid"])
            named = {"name": threading.current_thread().name}
            self._events.append({"ph": "M", "name": "thread_name", **thread, "args": named})
        at = {"ts": (self._epoch + begin) * 1e6, "dur": (end - begin) * 1e6}
        self._events.append({"ph": "X", "cat": "async_ckpt", "name": name, **at, **thread, "args": facts})


class _NoTrace(Trace):
    """A trace that records nothing."""

    def span(self, name: str, **facts: Any) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def whole(self, name: str, begin: float) -> None:
        """No-op."""


NO_TRACE: Final[Trace] = _NoTrace()


class Interval(NamedTuple):
    """A named period, from `begin` to `end` in seconds."""

    name: str
    begin: float
    end: float


class Spans:
    """The seconds spent in named spans of one operation. A name entered twice adds up; its phase includes the gap.

    Needs no lock, since only one thread at a time uses a name.
    """

    def __init__(self, clock: Clock = monotonic, trace: Trace = NO_TRACE) -> None:
        self.clock = clock
        self.trace = trace
        self.begin = clock()
        self.seconds: dict[str, float] = {}
        self.phases: dict[str, Interval] = {}
        self.call: Future[float] = Future()  # the seconds of the call, once the caller has its handle
        self.call.set_running_or_notify_cancel()  # makes the future impossible to cancel

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        begin = self.clock()
        try:
            yield
        finally:
            self.add(name, begin)

    def add(self, name: str, begin: float) -> float:
        """Add a span from `begin` until now. Returns its seconds."""
        end = self.clock()
        first = self.phases.get(name)
        self.phases[name] = Interval(name, begin if first is None else first.begin, end)
        self.seconds[name] = self.seconds.get(name, 0.0) + end - begin
        return end - begin

    def called(self) -> None:
        """Add the span of the call, which began with the creation of this object and ends now."""
        self.call.set_result(self.add("call", self.begin))

    def traced(self, name: str, fn: Callable[[], T], **facts: Any) -> Callable[[], T]:
        """A function that calls `fn` inside a span of the trace."""

        def call() -> T:
            with self.trace.span(name, **facts):
                return fn()

        return call

    def total(self) -> float:
        """Seconds since the creation of this object."""
        return self.clock() - self.begin
