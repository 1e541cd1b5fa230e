"""The segment pool: the host memory that a snapshot is copied into, and that is written from without another copy.

In: a budget. Out: leases of page-aligned memory. Knows nothing of: tensors' values, files.

Segments that are page-locked are made as runs, one behind the other in the same memory, and lent so where the file has them
one behind the other: then a tensor is one copy from its device, however many segments it is in.
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

from ..backends import UNSUPPORTED
from ..spec import GIB, MIB, SEGMENT_BYTES, align_up
from .limits import free_memory_bytes, local_world_size
from .memory import HostBuffer, Segment
from .threads import Crew
from .waits import LIVENESS_SECONDS

# Without at least this many a save cannot overlap copying with writing: one being filled, one being written,
# and up to two that wait for the end of the file.
MIN_SEGMENTS: Final = 4
# What is page-locked at once: as long as this takes, other calls of the driver may wait.
MAX_RUN_BYTES: Final = GIB
# Where several threads make memory, none makes less than this at once.
_MIN_RUN_BYTES: Final = 256 * MIB
# Threads that make new memory: more wait for the kernel's lock on the process's memory.
_MAX_MAKERS: Final = 8
# Of the memory that is free, the share that the pool may take when the user sets no budget.
_SHARE_OF_FREE: Final = 0.5


Reliever = Callable[[bool], bool]


class SegmentLender(Protocol):
    """Whatever lends segments: a pool, or one buffer of exact size."""

    @property
    def max_segments(self) -> int: ...

    @property
    def max_run(self) -> int:
        """The largest number of segments that lie one behind the other."""

    def lease_run(
        self,
        order: tuple[int, int],
        num_segments: int,
        *,
        pin: torch.device | None,
        check: Callable[[], None],
    ) -> list[Lease]:
        """Wait for up to `num_segments` segments, at least one, that lie one behind the other in the same memory.

        The lowest `order` (save, segment) is served first. With `pin` they are page-locked, by a thread that works for
        this device. `check` is called again and again while waiting, and raises when waiting has become pointless.
        """

    def take_back(self, segments: Sequence[Segment]) -> None:
        """The leases of these segments have ended."""

    def write_off(self, segment: Segment) -> None:
        """A device may still write to this segment, so it must never be lent again."""


class SegmentReceiver(Protocol):
    """Takes the segments of one save as they are filled, from several threads."""

    @property
    def num_tail(self) -> int:
        """How many segments it keeps until it has all others."""

    def put(self, number: int, lease: Lease) -> None:
        """Segment `number` is filled; the receiver releases the lease."""

    def check(self) -> None:
        """Raises if the save has failed elsewhere."""


class Lease:
    """A segment on loan. It goes back to its lender when everyone who retained it has released it."""

    __slots__ = ("_count", "_lender", "_lock", "segment")

    def __init__(self, lender: SegmentLender, segment: Segment) -> None:
        self.segment = segment
        self._lender = lender
        self._count = 1
        self._lock = threading.Lock()

    def retain(self) -> None:
        """One more release is needed: for a sink that reads the memory after its `write` has returned."""
        with self._lock:
            self._count += 1

    def release(self) -> None:
        with self._lock:
            self._count -= 1
            last = self._count == 0
        if last:
            self._lender.take_back([self.segment])

    def leak(self) -> None:
        """Instead of `release`, where a device may still write to the memory: nobody ever gets it again."""
        self._lender.write_off(self.segment)


class _FreeSegments:
    """The segments that nobody has, by the memory that they are parts of. Whoever takes from it holds the pool's lock."""

    def __init__(self) -> None:
        self._parts: dict[HostBuffer, dict[int, Segment]] = {}  # by where each begins
        # Memory by its longest run of free segments; the latest that came back is the first to go, and still warm.
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
        """Up to so many, one behind the other: of the shortest run that is long enough, else of the longest one."""
        if not self._num:
            return []
        enough = [length for length in self._by_run if length >= num_segments]
        length = min(enough) if enough else max(self._by_run)
        memory = next(reversed(self._by_run[length]))
        taken = _longest_run(self._parts[memory])[:num_segments]
        self._remove(memory, taken)
        return taken

    def take_whole(self) -> list[Segment]:
        """All segments of all memory that is free as a whole."""
        whole = [
            (memory, list(parts.values()))
            for memory, parts in self._parts.items()
            if sum(segment.num_bytes for segment in parts.values()) == memory.num_bytes
        ]
        for memory, segments in whole:
            self._remove(memory, segments)
        return [segment for _, segments in whole for segment in segments]

    def _remove(self, memory: HostBuffer, taken: Sequence[Segment]) -> None:
        self._forget(memory)
        parts = self._parts[memory]
        for segment in taken:
            del parts[segment.begin]
        self._num -= len(taken)
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
            others = self._by_run[length]
            del others[memory]
            if not others:
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


class SegmentPool:
    """Grants leases, never more than the budget holds: the oldest save first, in file order within a save.

    A drained segment is lent again before new memory is touched. The budget is hard: `lease` waits.
    """

    def __init__(self, segment_bytes: int = SEGMENT_BYTES, *, max_bytes: int | None = None) -> None:
        self.segment_bytes = segment_bytes
        self._hard = max_bytes is not None
        self._max_segments = MIN_SEGMENTS if max_bytes is None else max_bytes // segment_bytes
        self._changed = threading.Condition()
        self._free = _FreeSegments()  # under _changed, like all below
        self._num_segments = 0
        self._num_making = 0  # of these: not there yet, and soon free
        self._num_leaked = 0
        self._waiting: list[tuple[int, int]] = []
        self._relievers: list[Reliever] = []
        self._closed = False
        self._pin_refused = False
        self._pid = os.getpid()

    @property
    def num_bytes(self) -> int:
        """Host memory held: lent, free, or lost to copies that no device has told the end of."""
        return (self._num_segments + self._num_leaked) * self.segment_bytes

    @property
    def max_segments(self) -> int:
        return self._max_segments

    @property
    def max_run(self) -> int:
        """How many segments lie one behind the other at most."""
        return max(1, MAX_RUN_BYTES // self.segment_bytes)

    def admit(self, file_bytes: int, num_saves: int = 1, *, least: int = MIN_SEGMENTS) -> None:
        """Without a budget from the user, let the pool grow to what `num_saves` such archives need, memory permitting.

        It may have `least` segments in any case.
        """
        if self._hard:
            return
        self._max_segments = max(self._max_segments, least)
        needed = align_up(file_bytes, self.segment_bytes) // self.segment_bytes * num_saves
        if needed > self._max_segments:
            spare = int(free_memory_bytes() * _SHARE_OF_FREE / local_world_size()) + self.num_bytes
            self._max_segments = max(self._max_segments, min(needed, spare // self.segment_bytes))

    def lease(self, order: tuple[int, int], *, pin: torch.device | None, check: Callable[[], None]) -> Lease:
        """Wait for a segment. The lowest `order` (save, segment) is served first.

        With `pin` the segment is page-locked, by a thread that works for this device.
        `check` raises when waiting has become pointless; it is called again and again while waiting.
        """
        return self.lease_run(order, 1, pin=pin, check=check)[0]

    def lease_run(
        self,
        order: tuple[int, int],
        num_segments: int,
        *,
        pin: torch.device | None,
        check: Callable[[], None],
    ) -> list[Lease]:
        """Like `lease`: up to so many segments, at least one, that lie one behind the other in the same memory."""
        with self._changed:
            heapq.heappush(self._waiting, order)
            starving = False
            try:
                while self._waiting[0] != order or not (
                    self._free or self._num_segments < self._max_segments
                ):
                    # What is being made comes sooner than what somebody would have to let go of.
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
        """Leases of a run, page-locked if it is wanted so."""
        try:
            if pin:
                self._pin(segments[0].memory, pin)  # which all of them are in
        except BaseException:
            self.take_back(segments)
            raise
        return [Lease(self, segment) for segment in segments]

    def _claim_now(self, num_segments: int, pin: torch.device | None) -> int:
        """How many segments to make at once, of so many that are wanted; counted as made. Under the lock."""
        at_once = self.max_run if pin else 1
        num_new = max(0, min(num_segments, at_once, self._max_segments - self._num_segments))
        self._num_segments += num_new
        return num_new

    def _new(self, num_segments: int, pin: torch.device | None, *, touched: bool = False) -> list[Segment]:
        """So many new ones, which have been claimed, in memory of their own; page-locked if they are wanted so."""
        try:
            memory = HostBuffer.near(pin, num_segments * self.segment_bytes)
            # What is page-locked is touched before, and not under the driver's lock.
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
        """Ask `relieve` for memory, the oldest first, when a lease has to wait: it says whether it has let go of some.

        Its argument says whether the wait has already been in vain for a while.
        """
        with self._changed:
            self._relievers = [*self._relievers, relieve]

    def remove_reliever(self, relieve: Reliever) -> None:
        with self._changed:
            self._relievers = [other for other in self._relievers if other != relieve]

    def borrow(self, num_segments: int, *, pin: torch.device | None) -> list[Lease]:
        """Up to so many segments: free ones, then new ones as far as the budget goes. None while others wait for some.

        It waits for nothing; in a forked child there are none.
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
        """Hold this many segments, touched (and page-locked) by several threads at once, or by this one. Returns when done.

        A run is made when it is its turn, so whoever wants a segment meanwhile makes its own. `goes_on` is asked before each.
        """
        done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        num_new = min(num_segments, self._max_segments) - self._num_segments
        num_threads = 1 if crew is None else max(0, min(num_new, crew.max_threads, _MAX_MAKERS))
        # In the background little at once: whoever needs memory at once waits for what is being made.
        share = 0 if crew is None else num_new // max(1, num_threads)
        at_once = max(1, _MIN_RUN_BYTES // self.segment_bytes, share)

        def make() -> None:
            error: BaseException | None = None
            try:
                while goes_on() and (claimed := self._claim(num_segments, at_once, pin)):
                    try:
                        made = self._new(claimed, pin, touched=True)
                    except BaseException:
                        self.take_back([], num_made=claimed)
                        raise
                    self.take_back(made, num_made=claimed)
            except BaseException as failure:
                error = failure
            done.put(error)

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
        errors = [error for _ in range(num_threads) if (error := done.get()) is not None]
        if errors:
            raise errors[0]

    def _claim(self, num_segments: int, at_once: int, pin: torch.device | None) -> int:
        """How many more are to be made now, of so many in all."""
        with self._changed:
            wanted = 0 if self._closed else num_segments - self._num_segments
            claimed = self._claim_now(min(wanted, at_once), pin)
            self._num_making += claimed
            return claimed

    def _pin(self, memory: HostBuffer, device: torch.device) -> None:
        if self._pin_refused or memory.pinned:
            return
        code = memory.pin(device)
        if code:
            self._pin_refused = True
        if code not in (0, UNSUPPORTED):
            warnings.warn(
                f"the driver of {device} refused to page-lock host memory (error {code}); copies will be slower. "
                "It does where memory is short, or a container may lock no more: lower host_bytes, or allow it more.",
                RuntimeWarning,
                stacklevel=2,
            )

    def take_back(self, segments: Sequence[Segment], *, num_made: int = 0) -> None:
        """Serve others with these segments; `num_made` of those that were being made are no longer."""
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
        """Give the memory that is not on loan, nor a part of what is page-locked as one with some that is, to the system."""
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
        """Like `release`; segments on loan follow as they come back."""
        with self._changed:
            self._closed = True
        self.release()

    def __repr__(self) -> str:
        lent = self._num_segments - len(self._free)
        held = f"{self.num_bytes / MIB:.0f}/{self._max_segments * self.segment_bytes / MIB:.0f} MiB"
        leaked = f", {self._num_leaked} leaked" if self._num_leaked else ""
        return f"<SegmentPool {held}, {lent} of {self._num_segments} segments lent{leaked}, {len(self._waiting)} waiting>"
