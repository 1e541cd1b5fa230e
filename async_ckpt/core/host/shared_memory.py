"""Memory that other processes of this host can map: sealed memfds, which have no name in any file system.

In: sizes, descriptors. Out: maps. Knows nothing of: who gets a descriptor, the meaning of the bytes.

The creator's map stays writable, and is filled again and again. Seals keep every process, including the creator, from
changing the size, which would kill readers with SIGBUS, and from making another writable map. The kernel frees the
memory when its last map and its last descriptor are gone, however their processes have ended.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import torch

from ..spec import align_up
from .process import in_forked_child

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

CAN_SHARE: Final = sys.platform == "linux" and hasattr(os, "memfd_create")
# From fcntl(2) and madvise(2): Python has no names for the newest seal and the newest advice.
_ADD_SEALS: Final = 1033
_GET_SEALS: Final = 1034
_SEAL_SEAL: Final = 1
_SEAL_SHRINK: Final = 2
_SEAL_GROW: Final = 4
_SEAL_FUTURE_WRITE: Final = 16
_POPULATE_WRITE: Final = 23
_PROT_NONE: Final = 0
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_HUGE_PAGE_BYTES: Final = 2 << 20
# A publisher uses two or three buffers in turn.
_NUM_KEPT_MAPS: Final = 2
_FAILED: Final = ctypes.c_void_p(-1).value

_fds: set[int] = set()  # descriptors of memory that this process has created
_ends: set[weakref.finalize[..., Any]] = set()  # finalizers of its maps


@in_forked_child
def _let_go() -> None:
    """In a forked child, which does not inherit the maps, close the descriptors: the memory ends with the parent."""
    for fd in _fds:
        with suppress(OSError):
            os.close(fd)
    for end in _ends:
        end.detach()  # other memory may be mapped at the address
    _fds.clear()
    _ends.clear()


def _library() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


def _checked(address: int) -> int:
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address


def _mapped(fd: int, num_bytes: int, protection: int) -> Any:
    """Map a memfd as a shared array of bytes, which is unmapped once nothing refers to it."""
    library = _library()
    # Huge pages need an aligned address, which the kernel does not choose by itself: cut it out of a larger
    # reservation.
    slack = _HUGE_PAGE_BYTES if num_bytes >= _HUGE_PAGE_BYTES else 0
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    begin = _checked(library.mmap(None, num_bytes + slack, _PROT_NONE, flags, -1, 0))
    address = align_up(begin, _HUGE_PAGE_BYTES) if slack else begin
    try:
        _checked(library.mmap(address, num_bytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0))
    except OSError:
        library.munmap(begin, num_bytes + slack)
        raise
    if address > begin:
        library.munmap(begin, address - begin)
    if begin + slack > address:
        library.munmap(address + num_bytes, begin + slack - address)
    # A forked child does not need the memory, and copy-on-write would slow down pages that a device writes to.
    library.madvise(address, num_bytes, mmap.MADV_DONTFORK)
    library.madvise(address, num_bytes, mmap.MADV_HUGEPAGE)
    array = (ctypes.c_ubyte * num_bytes).from_address(address)

    def unmap() -> None:
        library.munmap(address, num_bytes)
        _ends.discard(end)

    end = weakref.finalize(array, unmap)
    end.atexit = False
    _ends.add(end)
    return array


def _close(fd: int) -> None:
    if fd in _fds:
        _fds.discard(fd)
        os.close(fd)


def make_shared(num_bytes: int) -> tuple[Any, int]:
    """New shared memory and its descriptor, which is closed with it. Raises OSError if the system has none."""
    if not CAN_SHARE or fcntl is None:
        raise OSError(errno.ENOSYS, "this system cannot share memory between processes by a descriptor")
    num_bytes = align_up(max(1, num_bytes), _HUGE_PAGE_BYTES if num_bytes >= _HUGE_PAGE_BYTES else mmap.PAGESIZE)
    fd = os.memfd_create("async_ckpt", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    _fds.add(fd)
    try:
        os.ftruncate(fd, num_bytes)
        array = _mapped(fd, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
        for seals in (_SEAL_SHRINK | _SEAL_GROW, _SEAL_FUTURE_WRITE, _SEAL_SEAL):
            with suppress(OSError):  # Linux before 5.1 lacks _SEAL_FUTURE_WRITE
                fcntl.fcntl(fd, _ADD_SEALS, seals)
    except BaseException:
        _close(fd)
        raise
    weakref.finalize(array, _close, fd).atexit = False
    return array, fd


def provide(fd: int, address: int, num_bytes: int) -> None:
    """Have the kernel provide all pages now: if memory is short, touching them later would kill the process.

    Raises OSError.
    """
    library = _library()
    if library.madvise(address, num_bytes, _POPULATE_WRITE) == 0:  # uses huge pages, if shared memory may have them
        return
    number = ctypes.get_errno()
    if number == errno.EINVAL:  # Linux before 5.14
        os.posix_fallocate(fd, 0, num_bytes)
    else:
        number = errno.ENOMEM if number == errno.EFAULT else number
        raise OSError(number, os.strerror(number))


class ReadOnlyMaps:
    """Maps of another process's memory, kept for the next time that it lends the same. For one thread at a time.

    Without huge pages, which few systems allow for such memory, mapping and unmapping take as long as copying. The
    owner may overwrite mapped memory that is not lent, so only lent memory is read.
    """

    def __init__(self) -> None:
        self._maps: dict[int, torch.Tensor] = {}  # by inode number, which is unique while the memory is mapped

    def of(self, fds: Sequence[int]) -> list[torch.Tensor]:
        """The memory behind these descriptors, as tensors that must not be written to. Keeps only two other maps.

        Raises OSError, and ValueError for memory whose size could change.
        """
        inodes = [os.fstat(fd).st_ino for fd in fds]
        kept = {inode: self._maps[inode] for inode in [*self._maps][-_NUM_KEPT_MAPS:] if inode not in inodes}
        for inode, fd in zip(inodes, fds, strict=True):
            kept[inode] = self._maps[inode] if inode in self._maps else map_shared(fd)
        self._maps = kept
        return [kept[inode] for inode in inodes]

    def drop(self) -> None:
        """Drop all maps; they are unmapped once no tensor refers to them."""
        self._maps = {}


def map_shared(fd: int) -> torch.Tensor:
    """The bytes of another process's memory, as a tensor that must not be written to. `fd` may be closed afterwards.

    Raises OSError, and ValueError for memory whose size could change.
    """
    if fcntl is None or not fcntl.fcntl(fd, _GET_SEALS) & _SEAL_SHRINK:
        raise ValueError("it is not sealed")
    num_bytes = os.fstat(fd).st_size
    with torch.inference_mode(False):
        return torch.frombuffer(_mapped(fd, num_bytes, mmap.PROT_READ), dtype=torch.uint8)
