"""The clock, times of day, and spans around the parts of a story.

In: a clock, a time. Out: seconds, by name. Knows nothing of: what is being timed.
`time` is imported here and nowhere else but in `storage/retry.py`, so that every other module can be handed a fake.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime

Clock = Callable[[], float]
When = datetime | float

monotonic: Clock = time.perf_counter
wall_time: Clock = time.time

# September 2001: what lies before it is no time that anything still happens at, but a number of seconds from now.
_EARLIEST = 1e9


def epoch_seconds(when: When) -> float:
    """A time as seconds since the epoch. Raises TypeError, or ValueError for one that could mean another time."""
    if isinstance(when, datetime):
        if when.tzinfo is None:
            raise ValueError(f"{when!r} has no time zone; give it one, as in datetime.now(timezone.utc)")
        return when.timestamp()
    if not isinstance(when, int | float):
        raise TypeError(f"a time is a datetime or seconds since the epoch, not a {type(when).__qualname__}")
    if not when >= _EARLIEST:
        raise ValueError(f"{when!r} is no time in seconds since the epoch; add it to time.time()")
    return float(when)


class Spans:
    """Seconds spent inside named spans; a name entered twice adds up.

    One owner at a time writes: the training thread until `save` returns, then the worker's loop.
    """

    def __init__(self, clock: Clock = monotonic) -> None:
        self.clock = clock
        self.begin = clock()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        begin = self.clock()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self.clock() - begin

    def total(self) -> float:
        """Seconds since these spans were made."""
        return self.clock() - self.begin
