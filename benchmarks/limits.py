"""The limits of the machine itself: the same bytes moved with the same threads, and nothing else.

In: tensors, sizes, paths. Out: seconds. Knows nothing of: async_ckpt, whose constants are repeated here on purpose, so
that a slower choice there does not lower the limit with it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Final

import torch
import xxhash

MIB: Final = 1024 * 1024
SEGMENT_BYTES: Final = 32 * MIB
READ_BYTES: Final = 16 * MIB
NUM_CPUS: Final = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
NUM_COPIERS: Final = min(8, NUM_CPUS)
NUM_WRITERS: Final = 8
NUM_READERS: Final = min(8, max(4, NUM_CPUS))
# Systems without it have the page cache in the limit.
_O_DIRECT: Final = getattr(os, "O_DIRECT", 0)
_PAGE_BYTES: Final = 4096
_DIGESTED_BYTES: Final = 4 * MIB


class WarmMemory:
    """Private memory on huge pages, in pieces, with all pages touched."""

    def __init__(self, num_bytes: int, piece_bytes: int) -> None:
        self.piece_bytes = piece_bytes
        self.pieces: list[mmap.mmap] = []
        for _ in range(-(-num_bytes // piece_bytes)):
            piece = mmap.mmap(-1, piece_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                piece.madvise(mmap.MADV_HUGEPAGE)
            ctypes.memset(_address(piece), 1, piece_bytes)
            self.pieces.append(piece)

    def copy_seconds(
        self, tensors: Sequence[torch.Tensor], *, back: bool = False, num_threads: int = NUM_COPIERS
    ) -> float:
        """Seconds to copy the bytes of all tensors, one after the other, into the pieces, or `back` from them."""

        def copy(moves: list[tuple[int, int, int]]) -> None:
            for piece, tensor, length in moves:
                ctypes.memmove(*((tensor, piece) if back else (piece, tensor)), length)

        return seconds_of([partial(copy, moves) for moves in self._moves(tensors)], num_threads)

    def _moves(self, tensors: Sequence[torch.Tensor]) -> list[list[tuple[int, int, int]]]:
        """For each piece: (address in the piece, address in the tensor, bytes) of the copies."""
        cuts = _cuts(tensors, self.piece_bytes, len(self.pieces))
        return [
            [(_address(piece) + at, source, length) for at, source, length in cut]
            for piece, cut in zip(self.pieces, cuts, strict=True)
        ]

    def write_seconds(self, path: Path, num_bytes: int, tensors: Sequence[torch.Tensor] = ()) -> float:
        """The seconds of `write`. The file is deleted afterwards, which is not timed."""
        begin = perf_counter()
        try:
            self.write(path, num_bytes, tensors)
            return perf_counter() - begin
        finally:
            path.unlink()

    def write(self, path: Path, num_bytes: int, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Write a new file of this size, in whole pages, past the page cache, until it is durable.

        Before a piece is written, the bytes of `tensors` in it are copied to it, and its digests are made.
        """
        moves = self._moves(tensors)
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | _O_DIRECT, 0o644)
        try:
            os.posix_fallocate(fd, 0, num_bytes)

            def write(number: int) -> None:
                at = number * self.piece_bytes
                piece = memoryview(self.pieces[number])[: min(self.piece_bytes, num_bytes - at)]
                for target, source, length in moves[number]:
                    ctypes.memmove(target, source, length)
                if moves[number]:
                    digest(piece)
                os.pwrite(fd, piece, at)

            count = -(-num_bytes // self.piece_bytes)
            seconds_of([partial(write, number) for number in range(count)], NUM_WRITERS)
            os.fsync(fd)
        finally:
            os.close(fd)

    def forget(self) -> None:
        """Overwrite all pieces, so that their old content is not mistaken for a read."""
        for piece in self.pieces:
            ctypes.memset(_address(piece), 0, self.piece_bytes)

    def read(self, path: Path) -> None:
        """Read the whole file, past the page cache, into the pieces that it was written from."""
        fd = os.open(path, os.O_RDONLY | _O_DIRECT)
        try:
            whole = [partial(os.preadv, fd, [p], i * self.piece_bytes) for i, p in enumerate(self.pieces)]
            seconds_of(whole, NUM_READERS)
        finally:
            os.close(fd)

    def reads_until(self, ended: threading.Event, path: Path) -> int:
        """Read random pieces of the file past the page cache, one by one, until `ended`. Returns their number."""
        count, num_pieces = 0, path.stat().st_size // self.piece_bytes
        fd = os.open(path, os.O_RDONLY | _O_DIRECT)
        try:
            while not ended.is_set():
                os.preadv(fd, [self.pieces[0]], random.randrange(num_pieces) * self.piece_bytes)
                count += 1
        finally:
            os.close(fd)
        return count

    def read_seconds(
        self, path: Path, into: Sequence[torch.Tensor] | None = None, *, through_cache: bool = False
    ) -> float:
        """Seconds to read the whole file, past the page cache, with the pieces of memory reused.

        With `into`, digests are made of each piece, and its bytes are copied to these tensors, as far as both reach.
        With `through_cache`, the disk reads a file once for several processes that read it at the same time.
        """
        num_bytes = path.stat().st_size
        free = deque(self.pieces)
        targets = _cuts(into or (), self.piece_bytes, num_bytes // self.piece_bytes + 1)
        fd = os.open(path, os.O_RDONLY | (0 if through_cache else _O_DIRECT))

        def read(at: int) -> None:
            piece = free.popleft()
            length = whole_pages(min(self.piece_bytes, num_bytes - at))
            if through_cache:
                os.posix_fadvise(fd, at, length, os.POSIX_FADV_WILLNEED)
            os.preadv(fd, [memoryview(piece)[:length]], at)
            if into is not None:
                digest(memoryview(piece)[:length])
                for offset, target, wanted in targets[at // self.piece_bytes]:
                    ctypes.memmove(target, _address(piece) + offset, wanted)
            free.append(piece)

        try:
            offsets = range(0, num_bytes, self.piece_bytes)
            return seconds_of([partial(read, at) for at in offsets], NUM_READERS)
        finally:
            os.close(fd)

    def transfer_seconds(self, source: Path, target: Path) -> float:
        """Seconds to copy the whole file, past the page cache on both sides, until it is durable under its name."""
        target.parent.mkdir(parents=True)
        num_bytes, part = source.stat().st_size, target.with_suffix(".part")
        free = deque(self.pieces)
        begin = perf_counter()
        with ExitStack() as stack:
            opened = ((source, os.O_RDONLY), (part, os.O_CREAT | os.O_EXCL | os.O_WRONLY), (target.parent, os.O_RDONLY))
            fds = [os.open(path, flags | (0 if path.is_dir() else _O_DIRECT), 0o644) for path, flags in opened]
            for fd in fds:
                stack.callback(os.close, fd)
            from_fd, to_fd, folder_fd = fds
            os.posix_fallocate(to_fd, 0, whole_pages(num_bytes))

            def move(at: int) -> None:
                piece = free.popleft()
                data = memoryview(piece)[: whole_pages(min(self.piece_bytes, num_bytes - at))]
                os.preadv(from_fd, [data], at)
                os.pwrite(to_fd, data, at)
                free.append(piece)

            seconds_of([partial(move, at) for at in range(0, num_bytes, self.piece_bytes)], NUM_READERS)
            os.ftruncate(to_fd, num_bytes)
            os.fsync(to_fd)
            part.rename(target)
            os.fsync(folder_fd)
        return perf_counter() - begin


def _cuts(tensors: Sequence[torch.Tensor], piece_bytes: int, num_pieces: int) -> list[list[tuple[int, int, int]]]:
    """For each piece: (offset in the piece, address in the tensor, bytes), as far as there are pieces.

    The tensors are placed one after the other.
    """
    cuts: list[list[tuple[int, int, int]]] = [[] for _ in range(num_pieces)]
    position = 0
    for tensor in tensors:
        source, end = tensor.data_ptr(), min(position + tensor.nbytes, num_pieces * piece_bytes)
        while position < end:
            number, at = divmod(position, piece_bytes)
            length = min(end - position, piece_bytes - at)
            cuts[number].append((at, source, length))
            source, position = source + length, position + length
    return cuts


def digest(piece: memoryview) -> None:
    """Make the digests of blocks of 4 MiB."""
    for begin in range(0, len(piece), _DIGESTED_BYTES):
        xxhash.xxh3_128_digest(piece[begin : begin + _DIGESTED_BYTES])


def whole_pages(num_bytes: int) -> int:
    """A number of bytes, rounded up to whole pages."""
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


def drop_cache(path: Path) -> None:
    """Remove a file from the page cache, so that the next read comes from the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def fill_cache(path: Path) -> None:
    """Read a file into the page cache."""
    with open(path, "rb", buffering=0) as file:
        piece = bytearray(READ_BYTES)
        while file.readinto(piece):
            pass


def files_of(path: Path) -> list[Path]:
    """The file itself, or all files below a folder."""
    return [one for one in (path, *path.rglob("*")) if one.is_file()]


def sync(path: Path) -> None:
    """Make a file, or all files below a folder, durable under their names."""
    for file in (*files_of(path), path.parent):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def torch_save_seconds(state: object, path: Path) -> float:
    """The seconds of `torch_save`. The file is deleted afterwards, which is not timed."""
    begin = perf_counter()
    torch_save(state, path)
    seconds = perf_counter() - begin
    path.unlink()
    return seconds


def torch_save(state: object, path: Path) -> None:
    """`torch.save` in its fastest configuration (a path, no checksums), until the file is durable."""
    torch.serialization.set_crc32_options(False)
    torch.save(state, path)
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def seconds_of(tasks: Iterable[Callable[[], object]], num_threads: int) -> float:
    """Run all tasks on this many threads, each taking the next one. Raises the first error."""
    todo = deque(tasks)
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            try:
                task = todo.popleft()
            except IndexError:
                return
            try:
                task()
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    begin = perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return perf_counter() - begin


def _address(piece: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(piece))
