"""The threads that write to each place, and how fast they may.

In: places. Out: threads, and paces. Knows nothing of: what is written.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import inf

from ..errors import ClosedError
from ..host.loop import get_loop
from ..host.threads import Task
from ..storage.base import Storage
from ..storage.pace import Pace


class Writers:
    """The threads that write to each place, and how fast they may: one pace for each, whatever saves are under way."""

    def __init__(self, max_bandwidth: float | None) -> None:
        is_number = isinstance(max_bandwidth, int | float)
        if max_bandwidth is not None and not (is_number and 0 < max_bandwidth < inf):
            raise ValueError(
                f"max_bandwidth must be a number of bytes per second, such as 500e6, got {max_bandwidth!r}"
            )
        self._max_bandwidth = max_bandwidth
        self._places: set[str] = set()  # places with threads of their own
        self._paces: dict[str, Pace] = {}  # by place

    def of(self, storage: Storage, *, alone: bool) -> Callable[[Task], None]:
        """The threads that write to a place, by their `submit`. `alone`: the save goes to no other place."""
        if alone and self._max_bandwidth is None:
            return get_loop().writers().submit
        place = storage.locate("")
        self._places.add(place)
        return get_loop().writers(place).submit

    def pace(self, storage: Storage) -> Pace | None:
        if self._max_bandwidth is None:
            return None
        return self._paces.setdefault(storage.locate(""), Pace(self._max_bandwidth))

    def stop(self) -> None:
        """Let the threads end."""
        with suppress(ClosedError):  # the interpreter is exiting, and ends all threads
            for place in list(self._places):
                get_loop().stop_writers(place)
