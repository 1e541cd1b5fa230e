"""The clock, and spans around the parts of a story.

In: a clock. Out: seconds by name. Knows nothing of: what is being timed.
`time` is imported here and nowhere else but in `storage/retry.py`, so that every other module can be handed a fake.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Clock = Callable[[], float]

monotonic: Clock = time.perf_counter
wall_time: Clock = time.time


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
