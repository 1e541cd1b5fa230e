"""Host memory: buffers of exact size, which a driver may page-lock, and the segments that they are divided into.

In: sizes, devices. Out: buffers and segments. Knows nothing of: budgets, saves.

A buffer is a private anonymous map with huge pages; touching it for the first time costs a tenth of what it costs with
a shared map, Python's default. A forked child does not inherit it, so copy-on-write never slows down a page that a
device is writing to. A buffer has its exact size, except on devices that need PyTorch's allocator of pinned memory,
which rounds up to a power of two. Other processes can map a `shared` buffer. The memory lies on the NUMA node that its
device is attached to, so that copies cross no link between processors.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
import threading
import weakref
from contextlib import suppress
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Final

import torch

from ..backends import backend_of
from ..spec import MIB, PAGE_BYTES, align_up
from .process import in_forked_child, never_end
from .shared_memory import make_shared, provide
from .threads import Crew

_HUGE_PAGE_BYTES: Final = 2 * MIB
_TOUCHED_AT_ONCE: Final = 64 * MIB
# The number of the system call mbind(2), for which only libnuma has a C function.
_MBIND: Final = {"x86_64": 237, "aarch64": 235}.get(platform.machine())
_MPOL_PREFERRED: Final = 1
_NODES_PER_WORD: Final = 8 * ctypes.sizeof(ctypes.c_ulong)

_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()  # all maps of this process


def _new_map(num_bytes: int) -> mmap.mmap:
    """A new anonymous map. Pages take no memory until they are touched. Raises MemoryError."""
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    try:
        pages = mmap.mmap(-1, num_bytes, **private)
    except (OSError, OverflowError) as error:
        raise MemoryError(
            f"the system refuses {num_bytes:,} bytes of host memory ({error}); lower host_bytes=, or raise ulimit -v"
        ) from error
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            with suppress(OSError):  # it works without the advice, only slower
                pages.madvise(getattr(mmap, advice))
    _maps.add(pages)
    return pages


@in_forked_child
def _keep_maps() -> None:
    """In a forked child, never close the maps: other memory may be mapped at their addresses."""
    for pages in list(_maps):
        never_end(pages)
    _maps.clear()


def _array_over(tensor: torch.Tensor) -> Any:
    """The memory of a tensor as an array of bytes that keeps the tensor alive."""
    kind: Any = type("TensorBytes", (ctypes.c_ubyte * tensor.numel(),), {})
    array = kind.from_address(tensor.data_ptr())
    array.tensor = tensor
    return array


class HostBuffer:
    """One piece of host memory, page-locked as a whole: CUDA rejects a copy across two registrations.

    A pool creates and owns the buffer. Any thread may use it.
    """

    def __init__(self, num_bytes: int, device: torch.device | None = None, *, shared: bool = False) -> None:
        """The pages lie near `device`, for which the buffer is to be page-locked. If the device's driver has no call to
        page-lock memory, the buffer is allocated page-locked.

        Raises MemoryError, or OSError if it is `shared`, and there is too little memory that can be shared.
        """
        self.num_bytes = num_bytes
        self.fd: int | None = None  # the descriptor by which other processes map it
        self.pinned_for: torch.device | None = None
        self.is_leaked = False
        # Held during the driver's call: registering the same pages twice is an error.
        self._pinning = threading.Lock()
        self._pid = os.getpid()
        pinned = backend_of(device).host_memory(num_bytes) if device and not shared else None
        self._is_registered = pinned is None
        if shared:
            self._map, self.fd = make_shared(num_bytes)
        else:
            self._map = _new_map(num_bytes + _HUGE_PAGE_BYTES) if pinned is None else _array_over(pinned)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.address = align_up(begin, _HUGE_PAGE_BYTES) if pinned is None and not shared else begin
        self._begin = self.address - begin
        self.view = memoryview(self._map).cast("B")[self._begin :][:num_bytes]
        if pinned is not None:
            self.pinned_for = device
        elif device is not None and (node := node_of(device)) is not None:
            prefer_node(self.address, num_bytes, node)
        if self.fd is not None:
            provide(self.fd, self.address, num_bytes)
            _shared[self.address] = self

    @property
    def pinned(self) -> bool:
        return self.pinned_for is not None

    @cached_property
    def tensor(self) -> torch.Tensor:
        """The memory as a 1-D uint8 tensor."""
        # The tensor refers to the map, so the map cannot be unmapped while the tensor exists. It must not be an
        # inference tensor, even if the first save is made in inference mode.
        with torch.inference_mode(False):
            return torch.frombuffer(self.array(), dtype=torch.uint8)

    def array(self) -> Any:
        """A new array over the memory. It keeps the map alive, and so does a tensor made from it."""
        return (ctypes.c_ubyte * self.num_bytes).from_buffer(self._map, self._begin)

    def pin(self, device: torch.device) -> int:
        """Page-lock the buffer for a device that this process uses.

        Returns the driver's error code, 0 on success or if the buffer is already locked.
        """
        with self._pinning:
            if self.pinned:
                return 0
            # Up to the end of the last page, which only this buffer uses: some drivers accept only whole pages.
            code = backend_of(device).register(self.address, align_up(self.num_bytes, PAGE_BYTES), device)
            if code == 0:
                self.pinned_for = device
            return code

    def touch(self, begin: int = 0, end: int | None = None) -> None:
        """Have the kernel provide the pages now, not later while the training waits. Releases the GIL."""
        ctypes.memset(self.address + begin, 0, (self.num_bytes if end is None else end) - begin)

    def lock_by(self, crew: Crew, device: torch.device) -> None:
        """Touch a new buffer on several threads of the crew, then page-lock it on one. Blocks until both are done.

        The caller's thread must not page-lock memory: the call would break the capture of a CUDA graph on another
        thread. The threads of the library have opted out of that.
        """
        begins = range(0, self.num_bytes, _TOUCHED_AT_ONCE)
        ends = [min(begin + _TOUCHED_AT_ONCE, self.num_bytes) for begin in begins]
        crew.run_all(partial(self.touch, begin, end) for begin, end in zip(begins, ends, strict=True))

        def pin() -> None:
            self.pin(device)  # if the driver refuses, copies are only slower

        crew.run_all([pin])

    def unpin(self) -> bool:
        """Undo `pin`. Returns False if the driver does not confirm it: then the memory must stay mapped."""
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
        # If a map were closed while the driver has it registered, the driver would use other memory at its address.
        # When the interpreter exits, the driver and every name in this module may already be gone.
        if self.pinned_for is not None:
            try:
                if not self.unpin():
                    self.leak()
            except Exception:  # see above: even the logging module may be gone  # nosec B110
                pass

    def free(self) -> None:
        if not self.unpin():
            self.leak()
            return
        if self.fd is not None:  # this object may live on, while other memory is mapped at its address
            _shared.pop(self.address, None)
        self.__dict__.pop("tensor", None)
        with suppress(BufferError):  # something still refers to the map; it is closed with the last reference
            self.view.release()
            if isinstance(self._map, mmap.mmap):
                self._map.close()


class Segment:
    """A part of a buffer: the unit that is filled, digested and written."""

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
        """The segment from the start of this one to the end of `last`, which is in the same buffer."""
        return self if last is self else Segment(self.memory, self.begin, last.end)

    def part(self, begin: int, end: int) -> Segment:
        return Segment(self.memory, self.begin + begin, self.begin + end)

    def let_go(self) -> None:
        """Stop referring to the buffer, so that it can be unmapped."""
        self._tensor = None
        with suppress(BufferError):  # something else still refers to the view
            self.view.release()


_leaked: list[HostBuffer] = []
_shared: weakref.WeakValueDictionary[int, HostBuffer] = weakref.WeakValueDictionary()  # by address


def shared_buffer_of(address: int, num_bytes: int) -> HostBuffer | None:
    """The shared buffer of this process that contains these bytes; None if they lie in other memory."""
    for begin, buffer in list(_shared.items()):
        if begin <= address and address + num_bytes <= begin + buffer.num_bytes:
            return buffer
    return None


def advise_huge_pages(address: int, num_bytes: int) -> None:
    """Ask for huge pages in memory that something else has allocated. If the kernel refuses, access is only slower."""
    begin = align_up(address, _HUGE_PAGE_BYTES)
    length = (address + num_bytes - begin) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    if hasattr(mmap, "MADV_HUGEPAGE") and length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)


# --- near a device --------------------------------------------------------------------------------------------------
# Only on Linux. If the node is unknown or the kernel refuses, the kernel chooses the node as usual.


@cache
def node_of(device: torch.device) -> int | None:
    """The NUMA node next to a device; None if the machine does not report it."""
    address = backend_of(device).bus_address(device)
    return None if address is None else _node_at(Path(f"/sys/bus/pci/devices/{address}/numa_node"))


def _node_at(path: Path) -> int | None:
    try:
        node = int(path.read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None  # -1: the firmware does not report it


def prefer_node(address: int, num_bytes: int, node: int) -> bool:
    """Take the pages of an untouched range from this node while it has free pages. Returns False if refused."""
    if _MBIND is None or sys.platform != "linux":
        return False
    words = (ctypes.c_ulong * (node // _NODES_PER_WORD + 1))()
    words[node // _NODES_PER_WORD] = 1 << node % _NODES_PER_WORD
    page = os.sysconf("SC_PAGE_SIZE")
    begin = address // page * page
    length = align_up(address + num_bytes - begin, page)
    code = ctypes.CDLL(None).syscall(
        ctypes.c_long(_MBIND),
        ctypes.c_void_p(begin),
        ctypes.c_ulong(length),
        ctypes.c_int(_MPOL_PREFERRED),
        words,
        ctypes.c_ulong(len(words) * _NODES_PER_WORD + 1),
        ctypes.c_uint(0),
    )
    return int(code) == 0
