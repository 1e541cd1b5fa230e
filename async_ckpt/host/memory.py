"""Host memory: page-aligned maps of exact size, which a driver may page-lock, and the segments they are cut into.

In: sizes, devices. Out: memory. Knows nothing of: budgets, saves.

Maps are private and anonymous with huge pages: first touch costs a tenth of Python's shared default, a forked child does
not inherit them (so its copy-on-write never slows a page that a device is writing to), and they have their exact size,
where PyTorch's own pinned allocator rounds up to a power of two.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, Final

import torch

from ..backends import backend_of
from ..spec import MIB, PAGE_BYTES, align_up
from .numa import node_of, prefer_node
from .threads import Crew

_HUGE_PAGE_BYTES: Final = 2 * MIB
_TOUCHED_AT_ONCE: Final = 64 * MIB


def _mapped(num_bytes: int) -> mmap.mmap:
    """A new map. Part of it is slack, so that the memory can begin on a huge page; what is never touched takes none."""
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


class HostBuffer:
    """One piece of host memory, page-locked as a whole: a copy that crosses two registrations is an error to CUDA."""

    def __init__(self, num_bytes: int, device: torch.device | None = None) -> None:
        """`device` is one that it is to be pinned for: its pages lie near it, and may be page-locked from the beginning."""
        self.num_bytes = num_bytes
        self.pinned_for: torch.device | None = None
        self.is_leaked = False
        self._pinning = threading.Lock()
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
    def near(cls, device: torch.device | None, num_bytes: int) -> HostBuffer:
        """A new one, whose pages lie near the device that it is to be pinned for."""
        made = cls(num_bytes, device)
        node = node_of(device) if device and not made.pinned else None
        if node is not None:
            prefer_node(made.address, num_bytes, node)
        return made

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
        with self._pinning:
            if self.pinned:
                return 0
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


class Segment:
    """A part of some memory, as those want it who fill segments or read from them."""

    __slots__ = ("_tensor", "begin", "end", "memory", "view")

    def __init__(self, memory: HostBuffer, begin: int, end: int) -> None:
        self.memory, self.begin, self.end = memory, begin, end
        self.view = memory.view[begin:end]
        self._tensor: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin

    @property
    def address(self) -> int:
        return self.memory.address + self.begin

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes as a 1-D uint8 tensor."""
        if self._tensor is None:
            self._tensor = self.memory.tensor[self.begin : self.end]
        return self._tensor

    @property
    def pinned(self) -> bool:
        return self.memory.pinned

    def joined_to(self, last: Segment) -> Segment:
        """This one, all up to another of the same memory, and that."""
        return self if last is self else Segment(self.memory, self.begin, last.end)

    def part(self, begin: int, end: int) -> Segment:
        return Segment(self.memory, self.begin + begin, self.begin + end)

    def let_go(self) -> None:
        """Look at the memory no more, which is not unmapped before."""
        self._tensor = None
        with suppress(BufferError):  # somebody else still does
            self.view.release()


_leaked: list[HostBuffer] = []


def advise_huge_pages(address: int, num_bytes: int) -> None:
    """Ask for huge pages under memory that is not ours; where that is refused, nothing is lost but time."""
    begin = align_up(address, _HUGE_PAGE_BYTES)
    length = (address + num_bytes - begin) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    if hasattr(mmap, "MADV_HUGEPAGE") and length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
