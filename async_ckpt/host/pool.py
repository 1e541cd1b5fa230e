"""The segment pool: the host memory that a snapshot is copied into, and that is written from without another copy.

In: a budget. Out: leases of page-aligned memory. Knows nothing of: tensors' values, files.

Segments are private anonymous maps with huge pages: first touch costs a tenth of Python's shared default, a forked
child does not inherit them (so its copy-on-write never slows a page that a device is writing to), and they have their
exact size, where PyTorch's own pinned allocator rounds up to a power of two.
"""

from __future__ import annotations

import ctypes
import heapq
import mmap
import os
import queue
import threading
import warnings
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, Final

import torch

from ..backends import UNSUPPORTED, backend_of
from ..spec import MIB, PAGE_BYTES, SEGMENT_BYTES, align_up
from .limits import free_memory_bytes, local_world_size
from .numa import node_of, prefer_node
from .threads import Crew

# Without at least this many a save cannot overlap copying with writing: one being filled, one being written,
# and up to two that wait for the end of the file.
MIN_SEGMENTS: Final = 4
_HUGE_PAGE_BYTES: Final = 2 * MIB
_TOUCHED_AT_ONCE: Final = 64 * MIB
# How long a waiting thread sleeps before it looks whether what it waits for can still come.
LIVENESS_SECONDS: Final = 0.2
# Threads that make new memory: more wait for the kernel's lock on the process's memory.
_MAX_MAKERS: Final = 8
# Of the memory that is free, the share that the pool may take when the user sets no budget.
_SHARE_OF_FREE: Final = 0.5


Reliever = Callable[[bool], bool]


def _mapped(num_bytes: int) -> mmap.mmap:
    """New memory, with slack that is never touched, so it takes none; it lets a segment begin on a huge page."""
    if hasattr(mmap, "MAP_ANONYMOUS"):
        made = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:
        made = mmap.mmap(-1, num_bytes)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            try:
                made.madvise(getattr(mmap, advice))
            except OSError:
                pass  # a kernel without it works, only slower
    return made


def _seen(given: torch.Tensor) -> Any:
    """The memory of a tensor as a buffer that keeps it."""
    kind: Any = type("Given", (ctypes.c_ubyte * given.numel(),), {})
    seen = kind.from_address(given.data_ptr())
    seen.tensor = given
    return seen


class Segment:
    """One piece of host memory. Owned by the pool, lent by a lease."""

    def __init__(self, num_bytes: int, device: torch.device | None = None) -> None:
        """`device` is one that it is to be pinned for: its pages lie near it, and may be page-locked from the beginning."""
        self.num_bytes = num_bytes
        self.pinned_for: torch.device | None = None
        self.is_leaked = False
        self._pid = os.getpid()
        given = backend_of(device).host_memory(num_bytes + _HUGE_PAGE_BYTES) if device else None
        self._is_registered = given is None
        self._map: Any = _mapped(num_bytes + _HUGE_PAGE_BYTES) if given is None else _seen(given)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.address = align_up(begin, _HUGE_PAGE_BYTES)
        self._begin = self.address - begin
        self.view = memoryview(self._map).cast("B")[self._begin :][:num_bytes]
        if given is not None:
            self.pinned_for = device

    @classmethod
    def near(cls, device: torch.device | None, num_bytes: int) -> Segment:
        """A new one, whose pages lie near the device that it is to be pinned for."""
        segment = cls(num_bytes, device)
        node = node_of(device) if device and not segment.pinned else None
        if node is not None:
            prefer_node(segment.address, num_bytes, node)
        return segment

    @property
    def pinned(self) -> bool:
        return self.pinned_for is not None

    @cached_property
    def tensor(self) -> torch.Tensor:
        """The memory as a 1-D uint8 tensor."""
        # From the map itself, which then cannot be unmapped under the tensor; and an ordinary tensor, even when the
        # first save is made inside of inference mode.
        items = (ctypes.c_ubyte * self.num_bytes).from_buffer(self._map, self._begin)
        with torch.inference_mode(False):
            return torch.frombuffer(items, dtype=torch.uint8)

    def pin(self, device: torch.device) -> int:
        """Page-lock the memory; the driver's error code, 0 when it is locked. `device` is one that this process uses."""
        # To the end of its last page, which is no other's: some drivers take nothing else.
        code = backend_of(device).register(self.address, align_up(self.num_bytes, PAGE_BYTES), device)
        if code == 0:
            self.pinned_for = device
        return code

    def touch(self, begin: int = 0, end: int | None = None) -> None:
        """Make the kernel give the pages now rather than while training waits. Releases the GIL."""
        ctypes.memset(self.address + begin, 0, (self.num_bytes if end is None else end) - begin)

    def lock_by(self, crew: Crew, device: torch.device) -> None:
        """`pin` what is new, touched before by several threads, and on none of the caller's: a driver that is asked for
        page-locked memory breaks the capture of a graph elsewhere, but on a thread that has said that it does not.
        """
        parts = range(0, self.num_bytes, _TOUCHED_AT_ONCE)
        ends = [min(at + _TOUCHED_AT_ONCE, self.num_bytes) for at in parts]
        crew.run_all(partial(self.touch, begin, end) for begin, end in zip(parts, ends, strict=True))

        def pin() -> None:
            self.pin(device)  # refused: the copy is slower, and right

        crew.run_all([pin])

    def unpin(self) -> bool:
        """Undo `pin`. False where the driver does not say that it has: then the memory must stay mapped."""
        device, self.pinned_for = self.pinned_for, None
        if device is None or os.getpid() != self._pid or not self._is_registered:
            return True
        try:
            return backend_of(device).unregister(self.address, device) == 0
        except RuntimeError:  # the device is broken
            return False

    def leak(self) -> None:
        """Keep the memory for the rest of the process: a device may still write to it, or may have it registered."""
        self.is_leaked = True
        _leaked.append(self)

    def __del__(self) -> None:
        # A map that goes while a driver still has it registered would leave its address pointing at other memory.
        # At the interpreter's end the driver may be gone before us, and so may every name of this module.
        if self.pinned_for is not None:
            try:
                if not self.unpin():
                    self.leak()
            except Exception:
                pass

    def free(self) -> None:
        if not self.unpin():
            self.leak()
            return
        self.__dict__.pop("tensor", None)
        try:
            self.view.release()
            if self._is_registered:
                self._map.close()
        except BufferError:
            pass  # someone still looks at it; the map goes when they do


class SegmentSlice:
    """A part of a segment, or of other memory, as those want it who fill segments or read from them."""

    def __init__(self, whole: Segment, begin: int, end: int) -> None:
        self.view = whole.view[begin:end]
        self.address = whole.address + begin
        self.tensor = whole.tensor[begin:end]


_leaked: list[Segment] = []


class Lease:
    """A segment on loan. It goes back to the pool when everyone who retained it has released it."""

    __slots__ = ("_count", "_lock", "_pool", "segment")

    def __init__(self, pool: SegmentPool, segment: Segment) -> None:
        self.segment = segment
        self._pool = pool
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
            self._pool._take_back(self.segment)

    def leak(self) -> None:
        """Instead of `release`, where a device may still write to the memory: nobody ever gets it again."""
        self._pool._write_off(self.segment)


class SegmentPool:
    """Grants leases, never more than the budget holds: the oldest save first, in file order within a save.

    A drained segment is lent again before new memory is touched. The budget is hard: `lease` waits.
    """

    def __init__(self, segment_bytes: int = SEGMENT_BYTES, *, max_bytes: int | None = None) -> None:
        self.segment_bytes = segment_bytes
        self._hard = max_bytes is not None
        self._max_segments = MIN_SEGMENTS if max_bytes is None else max_bytes // segment_bytes
        self._changed = threading.Condition()
        self._free: list[Segment] = []  # under _changed, like all below
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
            segment = self._free.pop() if self._free else None
            if segment is None:
                self._num_segments += 1
        try:
            segment = segment or Segment.near(pin, self.segment_bytes)
        except BaseException:
            with self._changed:
                self._num_segments -= 1
            raise
        if pin:
            try:
                self._pin(segment, pin)
            except BaseException:
                self._take_back(segment)
                raise
        return Lease(self, segment)

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
        with self._changed:
            if self._closed or self._waiting:
                return []
            free = [self._free.pop() for _ in range(min(num_segments, len(self._free)))]
            num_new = min(num_segments - len(free), self._max_segments - self._num_segments)
            self._num_segments += num_new
        leases = [Lease(self, segment) for segment in free]
        try:
            while num_new:
                leases.append(Lease(self, Segment.near(pin, self.segment_bytes)))
                num_new -= 1
            for lease in leases if pin else ():
                self._pin(lease.segment, pin)  # type: ignore[arg-type]
        except BaseException:
            with self._changed:
                self._num_segments -= num_new
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

        Each is made when it is its turn, so whoever wants one meanwhile makes its own. `goes_on` is asked before each.
        """
        done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def make() -> None:
            error: BaseException | None = None
            try:
                while goes_on() and self._claim(num_segments):
                    self._make(pin)
            except BaseException as failure:
                error = failure
            done.put(error)

        num_new = min(num_segments, self._max_segments) - self._num_segments
        num_threads = 1 if crew is None else max(0, min(num_new, crew.max_threads, _MAX_MAKERS))
        for _ in range(num_threads):
            if crew is None:
                make()
            else:
                crew.submit(make)
        if pin:
            with self._changed:
                pageable = [segment for segment in self._free if not segment.pinned]
                self._free = [segment for segment in self._free if segment.pinned]
            try:
                for segment in pageable:
                    self._pin(segment, pin)
            finally:
                for segment in pageable:
                    self._take_back(segment)
        errors = [error for _ in range(num_threads) if (error := done.get()) is not None]
        if errors:
            raise errors[0]

    def _claim(self, num_segments: int) -> bool:
        """Whether one more is to be made, of so many in all."""
        with self._changed:
            wanted = not self._closed and self._num_segments < min(num_segments, self._max_segments)
            self._num_segments += wanted
            self._num_making += wanted
            return wanted

    def _make(self, pin: torch.device | None) -> None:
        try:
            segment = Segment.near(pin, self.segment_bytes)
            segment.touch()
            if pin:
                self._pin(segment, pin)
        except BaseException:
            with self._changed:
                self._num_segments -= 1
                self._num_making -= 1
                self._changed.notify_all()
            raise
        self._take_back(segment, made=True)

    def _pin(self, segment: Segment, device: torch.device) -> None:
        if self._pin_refused or segment.pinned:
            return
        code = segment.pin(device)
        if code:
            self._pin_refused = True
        if code not in (0, UNSUPPORTED):
            warnings.warn(
                f"the driver of {device} refused to page-lock host memory (error {code}); copies will be slower. "
                "It does where memory is short, or a container may lock no more: lower host_bytes, or allow it more.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _take_back(self, segment: Segment, *, made: bool = False) -> None:
        with self._changed:
            self._num_making -= made
            if self._closed:
                self._num_segments -= 1
            else:
                self._free.append(segment)
            self._changed.notify_all()
        if self._closed:
            segment.free()

    def _write_off(self, segment: Segment) -> None:
        segment.leak()
        with self._changed:
            self._num_segments -= 1
            self._num_leaked += 1
            self._changed.notify_all()

    def release(self) -> None:
        """Give the memory of every segment that is not on loan back to the system."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            free, self._free = self._free, []
            self._num_segments -= len(free)
        for segment in free:
            segment.free()

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


def advise_huge_pages(address: int, num_bytes: int) -> None:
    """Ask for huge pages under memory that is not ours; where that is refused, nothing is lost but time."""
    begin = align_up(address, _HUGE_PAGE_BYTES)
    length = (address + num_bytes - begin) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    if hasattr(mmap, "MADV_HUGEPAGE") and length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
