"""The segment pool: the host memory that snapshots are copied into, and that files are written from.

In: a budget. Out: leases of page-aligned memory. Knows nothing of: the values of tensors, files.

A thread that needs a segment queues its order, (save, segment). The lowest order is served first: it gets a free
segment, else new memory within the budget, else it waits for a lease to end. So the oldest save always makes progress,
ends, and frees its memory for the next. While the first in line waits, it asks the relievers, drains that keep segments
only as a convenience, to release some. New memory is allocated, touched and page-locked on the thread that needs it.

Page-locked segments are allocated in runs, adjacent in one buffer, and lent as runs for adjacent parts of a file. A
tensor is then one copy from its device, however many segments it spans.
"""

from __future__ import annotations

import heapq
import os
import queue
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Protocol

import torch

from ..backends import UNSUPPORTED, backend_of
from ..spec import MIB, SEGMENT_BYTES, align_up
from .limits import spare_memory_bytes
from .memory import HostBuffer, Segment
from .threads import Crew
from .waits import LIVENESS_SECONDS

# With fewer segments a save could not copy and write at the same time: one segment is being filled, one is being
# written, and up to two wait for the end of the file.
MIN_SEGMENTS: Final = 4
# The size of the largest buffer. While a buffer is being page-locked, other calls of the driver wait: on an H200 up to
# 5 ms for this size, and 24 ms for 1 GiB. Copies into the first buffers begin while others are being made.
MAX_RUN_BYTES: Final = 128 * MIB
# The most threads that allocate new memory. More would only wait for the kernel's lock on the memory of the process.
_MAX_MAKERS: Final = 16

Reliever = Callable[[bool], bool]


class SegmentLender(Protocol):
    """A lender of segments for snapshots: a pool, or one buffer of exact size for a `HostCopy`.

    Foreign writers need whole tensors, which cannot be views of a pool's segments, for two reasons. A storage is
    contiguous, and may be longer than any run of segments: each run is page-locked separately, and a copy across two
    registrations fails. And a storage lives as long as anything refers to it, while a save that waits for a segment
    relies on all of them coming back. That is also why those buffers have a budget of their own.
    """

    @property
    def max_segments(self) -> int: ...

    @property
    def max_run(self) -> int:
        """The largest number of adjacent segments."""

    def lease_run(
        self, order: tuple[int, int], num_segments: int, *, pin: torch.device | None, check: Callable[[], None]
    ) -> list[Lease]:
        """Wait for up to `num_segments` adjacent segments in one buffer, and at least one.

        The lowest `order` (save, segment) is served first. With `pin` they are page-locked for this device, by a thread
        that works for it. `check` is called repeatedly while waiting, and raises if waiting has become pointless.
        """

    def take_back(self, segments: Sequence[Segment]) -> None:
        """Make these segments available again; their leases have ended."""

    def write_off(self, segment: Segment) -> None:
        """Never lend this segment again, since a device may still write to it."""


class SegmentReceiver(Protocol):
    """Receives the segments of one save as they are filled, from several threads."""

    @property
    def num_tail(self) -> int:
        """The number of segments at the end of the file that the receiver keeps until it has all others."""

    def put(self, number: int, lease: Lease) -> None:
        """Accept segment `number`, which is filled. The receiver releases the lease."""

    def check(self) -> None:
        """Raise if the save has failed elsewhere."""


class Lease:
    """A segment on loan, with a count of its users. The lease ends when the last user releases it."""

    __slots__ = ("_count", "_lender", "_lock", "segment")

    def __init__(self, lender: SegmentLender, segment: Segment) -> None:
        self.segment = segment
        self._lender = lender
        self._count = 1
        self._lock = threading.Lock()

    def retain(self) -> None:
        """Add a user, who must also call `release`: a sink that reads the memory after its `write` has returned."""
        with self._lock:
            self._count += 1

    def release(self) -> None:
        with self._lock:
            self._count -= 1
            last = self._count == 0
        if last:
            self._lender.take_back([self.segment])

    def leak(self) -> None:
        """Never lend the memory again, since a device may still write to it. Call this instead of `release`."""
        self._lender.write_off(self.segment)


class _FreeSegments:
    """The free segments of a pool, grouped by buffer. Guarded by the pool's lock."""

    def __init__(self) -> None:
        self._parts: dict[HostBuffer, dict[int, Segment]] = {}  # segments by offset
        # Buffers by the length of their longest run. The buffer that was returned last is lent first, while it is in
        # the caches.
        self._by_run: dict[int, dict[HostBuffer, None]] = {}
        self._run_of: dict[HostBuffer, int] = {}
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[Segment]:
        return (segment for parts in self._parts.values() for segment in parts.values())

    def add(self, segment: Segment) -> None:
        parts = self._parts.setdefault(segment.memory, {})
        self._forget(segment.memory)
        parts[segment.begin] = segment
        self._num += 1
        self._note(segment.memory)

    def take(self, num_segments: int) -> list[Segment]:
        """Take up to `num_segments` adjacent segments, from the shortest run that is long enough, else the longest."""
        if not self._num:
            return []
        enough = [length for length in self._by_run if length >= num_segments]
        length = min(enough) if enough else max(self._by_run)
        memory = next(reversed(self._by_run[length]))
        segments = _longest_run(self._parts[memory])[:num_segments]
        self._remove(memory, segments)
        return segments

    def take_whole(self) -> list[Segment]:
        """Take all segments of the buffers that are entirely free."""
        whole = [
            (memory, list(parts.values()))
            for memory, parts in self._parts.items()
            if sum(segment.num_bytes for segment in parts.values()) == memory.num_bytes
        ]
        for memory, segments in whole:
            self._remove(memory, segments)
        return [segment for _, segments in whole for segment in segments]

    def _remove(self, memory: HostBuffer, segments: Sequence[Segment]) -> None:
        self._forget(memory)
        parts = self._parts[memory]
        for segment in segments:
            del parts[segment.begin]
        self._num -= len(segments)
        if parts:
            self._note(memory)
        else:
            del self._parts[memory]

    def _note(self, memory: HostBuffer) -> None:
        length = self._run_of[memory] = len(_longest_run(self._parts[memory]))
        self._by_run.setdefault(length, {})[memory] = None

    def _forget(self, memory: HostBuffer) -> None:
        length = self._run_of.pop(memory, None)
        if length is not None:
            buffers = self._by_run[length]
            del buffers[memory]
            if not buffers:
                del self._by_run[length]


def _longest_run(parts: Mapping[int, Segment]) -> list[Segment]:
    longest: list[Segment] = []
    run: list[Segment] = []
    for _, segment in sorted(parts.items()):
        if run and run[-1].end != segment.begin:
            run = []
        run.append(segment)
        if len(run) > len(longest):
            longest = run
    return longest


def _thrifty_run(num_segments: int, segment_bytes: int, taken_bytes: Callable[[int], int]) -> int:
    """The length, up to `num_segments`, of the run for which the allocator wastes the smallest share of memory."""
    return max(range(num_segments, 0, -1), key=lambda n: (n * segment_bytes / taken_bytes(n * segment_bytes), n))


class SegmentPool:
    """Lends segments within a budget: to the oldest save first, in file order within a save.

    A saver owns the pool. Any thread may use it. Returned segments are lent again before new memory is allocated.
    """

    def __init__(self, segment_bytes: int = SEGMENT_BYTES, *, max_bytes: int | None = None) -> None:
        self.segment_bytes = segment_bytes
        self._hard = max_bytes is not None
        self._max_segments = MIN_SEGMENTS if max_bytes is None else max_bytes // segment_bytes
        # Guards all fields below. New memory is counted under this lock, so that the budget holds, but allocated,
        # touched and page-locked without it, since that takes up to seconds. Relievers and `check` are also called
        # without it: they take the locks of drains, whose threads return segments.
        self._changed = threading.Condition()
        self._free = _FreeSegments()
        self._num_segments = 0
        self._num_making = 0  # segments that are counted but still being made, and will be free soon
        self._num_leaked = 0
        self._waiting: list[tuple[int, int]] = []
        self._relievers: list[Reliever] = []
        self._closed = False
        self._pin_refused = False
        self._pid = os.getpid()

    @property
    def num_bytes(self) -> int:
        """The host memory of the pool: lent, free, or written off since a device never reported the end of a copy."""
        return (self._num_segments + self._num_leaked) * self.segment_bytes

    @property
    def max_segments(self) -> int:
        return self._max_segments

    @property
    def max_run(self) -> int:
        """The largest number of adjacent segments."""
        return max(1, MAX_RUN_BYTES // self.segment_bytes)

    def admit(self, file_bytes: int, num_saves: int = 1, *, least: int = MIN_SEGMENTS) -> None:
        """Let a pool without a budget from the user grow to `num_saves` archives of `file_bytes`, memory permitting.

        It may have `least` segments in any case.
        """
        if self._hard:
            return
        self._max_segments = max(self._max_segments, least)
        needed = align_up(file_bytes, self.segment_bytes) // self.segment_bytes * num_saves
        if needed > self._max_segments:
            spare = spare_memory_bytes() + self.num_bytes
            self._max_segments = max(self._max_segments, min(needed, spare // self.segment_bytes))

    def lease(self, order: tuple[int, int], *, pin: torch.device | None, check: Callable[[], None]) -> Lease:
        """Wait for one segment; see `SegmentLender.lease_run`."""
        return self.lease_run(order, 1, pin=pin, check=check)[0]

    def lease_run(
        self, order: tuple[int, int], num_segments: int, *, pin: torch.device | None, check: Callable[[], None]
    ) -> list[Lease]:
        """Wait for up to `num_segments` adjacent segments; see `SegmentLender`."""
        with self._changed:
            heapq.heappush(self._waiting, order)
            starving = False
            try:
                while self._waiting[0] != order or not (self._free or self._num_segments < self._max_segments):
                    # Segments that are being made become free sooner than a reliever could release others.
                    needs_relief = self._waiting[0] == order and not self._num_making
                    relievers = self._relievers if needs_relief else []
                    self._changed.release()
                    try:
                        check()
                        relieved = any(relieve(starving) for relieve in relievers)
                    finally:
                        self._changed.acquire()
                    if not relieved and not self._free:
                        starving = not self._changed.wait(LIVENESS_SECONDS) and not self._num_making
            finally:
                self._waiting.remove(order)
                heapq.heapify(self._waiting)
                self._changed.notify_all()
            segments = self._free.take(num_segments)
            num_new = 0 if segments else self._claim_now(num_segments, pin)
        return self._lent(segments or self._new(num_new, pin), pin)

    def _lent(self, segments: list[Segment], pin: torch.device | None) -> list[Lease]:
        """The leases of a run, page-locked for the device `pin`."""
        try:
            if pin:
                self._pin(segments[0].memory, pin)  # all of them are in this buffer
        except BaseException:
            self.take_back(segments)
            raise
        return [Lease(self, segment) for segment in segments]

    def _claim_now(self, num_segments: int, pin: torch.device | None) -> int:
        """Count up to `num_segments` new segments, within the budget. Returns their number. Requires the lock."""
        at_once = self.max_run if pin else 1
        num_new = max(0, min(num_segments, at_once, self._max_segments - self._num_segments))
        if pin and num_new:
            num_new = _thrifty_run(num_new, self.segment_bytes, backend_of(pin).taken_bytes)
        self._num_segments += num_new
        return num_new

    def _new(self, num_segments: int, pin: torch.device | None, *, touched: bool = False) -> list[Segment]:
        """Allocate claimed segments in a new buffer, page-locked for the device `pin`."""
        try:
            memory = HostBuffer(num_segments * self.segment_bytes, pin)
            # Touch the pages before they are page-locked: otherwise the driver would do so under its lock.
            if touched or (pin and not memory.pinned):
                memory.touch()
            if pin:
                self._pin(memory, pin)
        except BaseException:
            with self._changed:
                self._num_segments -= num_segments
                self._changed.notify_all()
            raise
        size = self.segment_bytes
        return [Segment(memory, begin, begin + size) for begin in range(0, memory.num_bytes, size)]

    def add_reliever(self, relieve: Reliever) -> None:
        """Call `relieve` when a lease has to wait, the oldest reliever first, until one returns True: it has released
        segments. The argument of `relieve` is True if the last wait has timed out.
        """
        with self._changed:
            self._relievers = [*self._relievers, relieve]

    def remove_reliever(self, relieve: Reliever) -> None:
        with self._changed:
            self._relievers = [other for other in self._relievers if other != relieve]

    def borrow(self, num_segments: int, *, pin: torch.device | None) -> list[Lease]:
        """Lease up to `num_segments` segments without waiting: free ones, then new ones within the budget.

        Returns none while other threads wait for segments, and none in a forked child.
        """
        if os.getpid() != self._pid:
            return []
        leases: list[Lease] = []
        try:
            while len(leases) < num_segments:
                with self._changed:
                    if self._closed or self._waiting:
                        break
                    segments = self._free.take(num_segments - len(leases))
                    num_new = 0 if segments else self._claim_now(num_segments - len(leases), pin)
                if not (segments or num_new):
                    break
                leases += self._lent(segments or self._new(num_new, pin), pin)
        except BaseException:
            for lease in leases:
                lease.release()
            raise
        return leases

    def reserve(
        self,
        num_segments: int,
        crew: Crew | None,
        *,
        pin: torch.device | None,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> None:
        """Fill the pool up to `num_segments` segments, touched (and page-locked) by `crew`, or by this thread.

        Blocks until that is done. Each run is claimed just before it is made, so a lease that is requested meanwhile
        does not wait for all runs. `goes_on` is called before each run; no more are made once it returns False.
        """
        outcomes: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        num_runs = -(-(min(num_segments, self._max_segments) - self._num_segments) // (self.max_run if pin else 1))
        num_threads = 1 if crew is None else max(0, min(num_runs, crew.max_threads, _MAX_MAKERS))

        def make() -> None:
            error: BaseException | None = None
            try:
                while goes_on() and (num_claimed := self._claim(num_segments, pin)):
                    segments: list[Segment] = []
                    try:
                        segments = self._new(num_claimed, pin, touched=True)
                    finally:
                        self.take_back(segments, num_made=num_claimed)
            except BaseException as failure:
                error = failure
            outcomes.put(error)

        for _ in range(num_threads):
            if crew is None:
                make()
            else:
                crew.submit(make)
        if pin:
            with self._changed:
                pageable = {segment.memory for segment in self._free if not segment.pinned}
            for memory in pageable:
                self._pin(memory, pin)
        errors = [error for _ in range(num_threads) if (error := outcomes.get()) is not None]
        if errors:
            raise errors[0]

    def _claim(self, num_segments: int, pin: torch.device | None) -> int:
        """Claim the next run of segments, while the pool holds fewer than `num_segments`."""
        with self._changed:
            num_claimed = self._claim_now(0 if self._closed else num_segments - self._num_segments, pin)
            self._num_making += num_claimed
            return num_claimed

    def _pin(self, memory: HostBuffer, device: torch.device) -> None:
        if self._pin_refused or memory.pinned:
            return
        code = memory.pin(device)
        if code and backend_of(device).is_broken(device):
            return  # the copies will report it
        if code:
            self._pin_refused = True
        if code not in (0, UNSUPPORTED):
            warnings.warn(
                f"the driver of {device} refused to page-lock host memory (error {code}); copies will be slower. "
                "Memory may be short, or the container at its limit of locked memory: lower host_bytes, or raise the "
                "limit.",
                RuntimeWarning,
                stacklevel=2,
            )

    def take_back(self, segments: Sequence[Segment], *, num_made: int = 0) -> None:
        """Make these segments free. `num_made` segments are no longer being made."""
        with self._changed:
            self._num_making -= num_made
            for segment in segments:
                self._free.add(segment)
            self._changed.notify_all()
        if self._closed:
            self.release()

    def write_off(self, segment: Segment) -> None:
        """Never lend this segment again: a device may still write to it."""
        segment.memory.leak()
        with self._changed:
            self._num_segments -= 1
            self._num_leaked += 1
            self._changed.notify_all()

    def release(self) -> None:
        """Return the buffers that are entirely free to the system."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            free = self._free.take_whole()
            self._num_segments -= len(free)
        for segment in free:
            segment.let_go()
        for memory in {segment.memory for segment in free}:
            memory.free()

    def close(self) -> None:
        """Return all memory to the system: free buffers now, others as soon as their segments come back."""
        with self._changed:
            self._closed = True
        self.release()

    def __repr__(self) -> str:
        num_lent = self._num_segments - len(self._free)
        memory = f"{self.num_bytes / MIB:.0f}/{self._max_segments * self.segment_bytes / MIB:.0f} MiB"
        leaked = f", {self._num_leaked} leaked" if self._num_leaked else ""
        lent = f"{num_lent} of {self._num_segments} segments lent"
        return f"<SegmentPool {memory}, {lent}{leaked}, {len(self._waiting)} waiting>"
