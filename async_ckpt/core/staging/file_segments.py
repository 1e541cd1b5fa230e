"""Files instead of tensors: their metadata when a save of them begins, and their bytes in segments.

In: a folder, and the plan of its image. Out: a source for a snapshot. Knows nothing of: the archive's destination.
"""

from __future__ import annotations

import errno
import os
import stat
import tarfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...errors import StorageUnavailableError, TornSnapshotError, UnsupportedStateError
from ..format.layout import Piece
from ..format.tar_of_files import Tarball, TarEntry, stays_inside
from ..host.limits import num_cpus
from ..host.memory import Segment
from ..spec import BLOCK_BYTES, GIB
from .tensors import SourceTensors

_MAX_READERS: Final = 8
# The map of a sparse member is read as a whole, like a header. A member with 8 GiB of data or more would need two sizes
# in its header, which Python's `tarfile` confuses.
_MAX_RUNS: Final = 16_384
_MAX_SPARSE_BYTES: Final = 8 * GIB - BLOCK_BYTES
_O_BINARY: Final = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


class FileSource(NamedTuple):
    """A file, folder or link, with its metadata when the plan was made."""

    path: str
    num_bytes: int
    mtime_ns: int


def scan(folder: Path) -> tuple[list[TarEntry], list[FileSource]]:
    """All members of a folder, the folder itself first, in the order of names; and the file behind each.

    Raises UnsupportedStateError for devices, pipes and links out of the folder: no archive can restore them.
    """
    entries: list[TarEntry] = []
    sources: list[FileSource] = []
    first_names: dict[tuple[int, int], str] = {}
    for path, name, status in _walk(str(folder)):
        entries.append(_entry(path, name, status, first_names))
        sources.append(FileSource(path, status.st_size, status.st_mtime_ns))
    return entries, sources


def _walk(folder: str) -> Iterator[tuple[str, str, os.stat_result]]:
    todo = [(folder, ".", os.lstat(folder))]
    while todo:
        path, name, status = todo.pop()
        yield path, name, status
        if stat.S_ISDIR(status.st_mode):
            with os.scandir(path) as entries:
                inside = sorted(entries, key=lambda entry: entry.name, reverse=True)
            todo += [(e.path, f"{name}/{e.name}", e.stat(follow_symlinks=False)) for e in inside]


def _entry(path: str, name: str, status: os.stat_result, first_names: dict[tuple[int, int], str]) -> TarEntry:
    mode, mtime = stat.S_IMODE(status.st_mode), int(status.st_mtime)
    if stat.S_ISDIR(status.st_mode):
        return TarEntry(name, tarfile.DIRTYPE, mode, mtime)
    if stat.S_ISLNK(status.st_mode):
        target = os.readlink(path)
        if not stays_inside(name, target):
            raise UnsupportedStateError(
                f"{path} is a link to {target}, which may lead out of the folder; copy the file in instead", path=path
            )
        return TarEntry(name, tarfile.SYMTYPE, mode, mtime, link=target)
    if not stat.S_ISREG(status.st_mode):
        raise UnsupportedStateError(
            f"{path} is neither a file, a folder nor a link; remove it, then pack again", path=path
        )
    if status.st_nlink > 1:
        first = first_names.setdefault((status.st_dev, status.st_ino), name)
        if first != name:
            return TarEntry(name, tarfile.LNKTYPE, mode, mtime, link=first)
    return TarEntry(name, tarfile.REGTYPE, mode, mtime, status.st_size, runs=_runs(path, status))


def _runs(path: str, status: os.stat_result) -> tuple[tuple[int, int], ...]:
    """The parts of a file that have data: the whole file, or the parts between holes if these save at least a block.

    Holes are ignored if there are very many, or if the file has more data than readers of tar agree on.
    """
    size = status.st_size
    whole = ((0, size),) if size else ()
    blocks = getattr(status, "st_blocks", size)
    if not hasattr(os, "SEEK_DATA") or size - blocks * 512 < BLOCK_BYTES:
        return whole
    runs: list[tuple[int, int]] = []
    fd = os.open(path, os.O_RDONLY | _O_BINARY)
    try:
        end = 0
        while end < size:
            try:
                begin = os.lseek(fd, end, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # only a hole follows
                    break
                return whole
            end = os.lseek(fd, begin, os.SEEK_HOLE)
            runs.append((begin, end - begin))
    finally:
        os.close(fd)
    if len(runs) > _MAX_RUNS or sum(length for _, length in runs) > _MAX_SPARSE_BYTES:
        return whole
    return tuple(runs)


class FilesImage(NamedTuple):
    """Files, and the image of their archive: its pieces are parts of runs, and runs are parts of files."""

    image: Tarball
    sources: Sequence[FileSource]


class SourceFiles(SourceTensors):
    """Files instead of tensors: all of them are read after the call, and must not change until they have been read.

    The saver creates it, and the snapshot owns it. Segments are filled in file order.
    """

    def __init__(self, files: FilesImage, num_segments: int, check: Callable[[], None]) -> None:
        """`check` raises if the save has failed elsewhere: then no more is read."""
        super().__init__([], [], deferred={})
        self._files, self._check = files, check
        self._counting = threading.Lock()
        self._num_unfilled = num_segments  # under _counting

    @property
    def may_be_late(self) -> frozenset[int]:
        """The numbers of all runs, since nothing is read at once; never empty, even if there are no runs."""
        return frozenset(range(max(1, len(self._files.image.runs))))

    def num_threads(self, *, late: bool) -> int:  # noqa: ARG002
        return min(_MAX_READERS, 2 * num_cpus())

    def copy_from_host(self, pieces: Iterable[Piece], segment: Segment, *_: Any, **__: Any) -> None:
        """Read the pieces of files into a segment. Raises TornSnapshotError."""
        self._check()
        runs, sources = self._files.image.runs, self._files.sources
        for target, run, begin, length in pieces:
            number, offset = runs[run]
            _read_into(segment.view[target : target + length], sources[number], offset + begin)
        with self._counting:
            self._num_unfilled -= 1
            last = self._num_unfilled == 0
        if last:  # before the segment is handed on, since the archive cannot become visible without it
            self._compare_all()

    def _compare_all(self) -> None:
        """Raises TornSnapshotError if a file or folder changed.

        A folder may have new files, and empty files are not read, so this checks all of them.
        """
        for source in self._files.sources:
            try:
                status = os.lstat(source.path)
            except OSError:
                raise _changed(source) from None
            _expect_same(source, status)


def _read_into(target: memoryview, source: FileSource, offset: int) -> None:
    """Raises TornSnapshotError if the file has changed, and StorageUnavailableError if it cannot be read."""
    try:
        with open(source.path, "rb", buffering=0) as file:
            file.seek(offset)
            while target:
                num_read = file.readinto(target)
                if not num_read:
                    raise _changed(source)
                target = target[num_read:]
            _expect_same(source, os.fstat(file.fileno()))  # last, so that no earlier change is missed
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise _changed(source) from None
    except OSError as error:
        raise StorageUnavailableError(
            f"{source.path}: {error.strerror}; make sure that it can be read", path=source.path
        ) from error


def _expect_same(source: FileSource, status: os.stat_result) -> None:
    if (status.st_size, status.st_mtime_ns) != (source.num_bytes, source.mtime_ns):
        raise _changed(source)


def _changed(source: FileSource) -> TornSnapshotError:
    return TornSnapshotError(
        f"{source.path} changed while it was being packed; write it first, then pack", names=(source.path,)
    )
