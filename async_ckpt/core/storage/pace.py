"""A limit on the bandwidth of writes to one place, so that others can use the rest of its disk or network.

In: sizes of writes. Out: waits. Knows nothing of: the bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from ..report import sized
from ..timing import Clock, monotonic

_LOOK_SECONDS: Final = 0.2


class Pace:
    """A limit of `max_bandwidth` bytes per second on all writes to one place. Thread-safe."""

    def __init__(self, max_bandwidth: float, clock: Clock = monotonic) -> None:
        self._max_bandwidth, self._clock = max_bandwidth, clock
        self._lock = threading.Lock()
        self._free_at = clock()  # the end of the last write at that bandwidth; under _lock

    def wait(self, num_bytes: int, check: Callable[[], None]) -> None:
        """Wait until `num_bytes` may be written. `check` is called meanwhile, and ends the wait by raising."""
        never = threading.Event()
        while (seconds_left := self._begin(num_bytes)) > 0:
            check()
            never.wait(min(seconds_left, _LOOK_SECONDS))

    def _begin(self, num_bytes: int) -> float:
        """Begin a write and return 0 if its time has come. Otherwise reserve nothing, and return the seconds left."""
        with self._lock:
            now = self._clock()
            if now >= self._free_at:
                self._free_at = now + num_bytes / self._max_bandwidth
                return 0.0
            return self._free_at - now

    def __repr__(self) -> str:
        return f"<Pace {sized(self._max_bandwidth)}/s>"
