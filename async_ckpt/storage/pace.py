"""A limit on what one place is written with, so that a save leaves room for others on its disk or network.

In: sizes of writes. Out: waits. Knows nothing of: what is written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from ..report import sized
from ..spans import Clock, monotonic

_LOOK_SECONDS: Final = 0.2


class Pace:
    """Lets writes begin at such times that no more than `max_bandwidth` bytes per second come of them. From any thread."""

    def __init__(self, max_bandwidth: float, clock: Clock = monotonic) -> None:
        self._max_bandwidth, self._clock = max_bandwidth, clock
        self._lock = threading.Lock()
        self._free_at = clock()  # when what has begun is over, at that bandwidth; under _lock

    def wait(self, num_bytes: int, check: Callable[[], None]) -> None:
        """Return when so many bytes may be written. `check` is called meanwhile, and raises when they need not be."""
        never = threading.Event()
        while (seconds_left := self._begin(num_bytes)) > 0:
            check()
            never.wait(min(seconds_left, _LOOK_SECONDS))

    def _begin(self, num_bytes: int) -> float:
        """Begin a write, if it is time; else how many seconds are left. Who gives up has taken nothing from others."""
        with self._lock:
            now = self._clock()
            if now >= self._free_at:
                self._free_at = now + num_bytes / self._max_bandwidth
                return 0.0
            return self._free_at - now

    def __repr__(self) -> str:
        return f"<Pace {sized(self._max_bandwidth)}/s>"
