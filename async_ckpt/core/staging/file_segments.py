"""Segments from files: what `filler` does by copies of tensors, this module does by reading.

In: a folder, and the plan of its image. Out: segments, handed on one by one as they are filled.
Knows nothing of: the archive's destination.
"""

from __future__ import annotations

import errno
import os
import stat
import tarfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final, NamedTuple

from ...errors import StorageUnavailableError, TornSnapshotError, UnsupportedStateError
from ..format.layout import SegmentPlan
from ..format.tarball import Tarball, TarEntry, stays_inside
from ..host.limits import num_cpus
from ..host.pool import Lease, SegmentPool, SegmentReceiver
from ..host.threads import Crew, running_future
from ..spec import BLOCK_BYTES, GIB
from ..timing import Clock

_MAX_READERS: Final = 8
# The map of a sparse member is read as a whole, like a header. One with 8 GiB of data or more would need two sizes
# in its header, which Python's `tarfile` confuses.
_MAX_RUNS: Final = 16_384
_MAX_SPARSE_BYTES: Final = 8 * GIB - BLOCK_BYTES
_O_BINARY: Final = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


class FileSource(NamedTuple):
    """A file, folder or link as it was when the plan was made."""

    path: str
    num_bytes: int
    mtime_ns: int


def scan(folder: Path) -> tuple[list[TarEntry], list[FileSource]]:
    """All members of a folder, itself first, in the order of names; and the file behind each.

    Raises UnsupportedStateError for devices, pipes and links out of the folder: no archive can give them back.
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
    """The parts of a file that have data: all of it, or the parts between holes if these save at least a block.

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
    """Files, and the image of the archive that is made of them: its pieces are parts of runs, and these of files."""

    image: Tarball
    sources: Sequence[FileSource]


class FileFill:
    """Fills segments from files, by several threads, in file order. All in the background: no thread of the user waits.

    An errand creates it, begins it and waits for its `completion`.
    """

    stall_seconds = 0.0

    def __init__(
        self, files: FilesImage, receiver: SegmentReceiver, *, order: int, pool: SegmentPool, crew: Crew, clock: Clock
    ) -> None:
        self._files, self._receiver, self._order = files, receiver, order
        self._pool, self._crew, self._clock = pool, crew, clock
        self.completion: Future[None] = running_future()
        self.stage_seconds = 0.0
        self._start = clock()
        self._todo = deque(files.image.segments(pool.segment_bytes))
        # A segment and its lease are taken in one step, in file order: the lock is held while the pool is waited for.
        self._taking = threading.Lock()
        self._lock = threading.Lock()  # guards all below; nothing is called out under it
        self._num_unfilled = len(self._todo)
        self._num_readers = 0
        self._error: BaseException | None = None

    def begin(self) -> None:
        num_readers = min(_MAX_READERS, 2 * num_cpus(), max(1, len(self._todo)))
        self._num_readers = num_readers
        for _ in range(num_readers):
            self._crew.submit(self._read)

    def _read(self) -> None:
        error: BaseException | None = None
        try:
            while (job := self._take()) is not None:
                self._fill(*job)
        except BaseException as raised:
            error = raised
        with self._lock:
            self._error = self._error or error
            self._num_readers -= 1
            last = self._num_readers == 0
        if last:
            self.stage_seconds = self._clock() - self._start
            if self._error is None:
                self.completion.set_result(None)
            else:
                self.completion.set_exception(self._error)

    def _check_alive(self) -> None:
        """Raises if this fill or its save has failed: a reader must not wait for memory of a failed one."""
        if self._error is not None:
            raise self._error
        self._receiver.check()

    def _take(self) -> tuple[SegmentPlan, Lease] | None:
        with self._taking:
            if not self._todo:
                return None
            self._check_alive()
            plan = self._todo.popleft()
            return plan, self._pool.lease((self._order, plan.number), pin=None, check=self._check_alive)

    def _fill(self, plan: SegmentPlan, lease: Lease) -> None:
        try:
            view, runs, sources = lease.segment.view, self._files.image.runs, self._files.sources
            for at, data in plan.literals:
                view[at : at + len(data)] = data
            for target, run, begin, length in plan.pieces:
                number, offset = runs[run]
                _read_into(view[target : target + length], sources[number], offset + begin)
            with self._lock:
                self._num_unfilled -= 1
                last = self._num_unfilled == 0
            if last:  # before the segment is handed on: the archive is not visible without it
                self._compare_all()
        except BaseException:
            lease.release()
            raise
        self._receiver.put(plan.number, lease)

    def _compare_all(self) -> None:
        """Raises TornSnapshotError if a file or folder changed.

        A folder may have new files, and empty files are not read.
        """
        for source in self._files.sources:
            try:
                status = os.lstat(source.path)
            except OSError:
                raise _changed(source) from None
            _expect_same(source, status)

    def __repr__(self) -> str:
        return f"<FileFill {len(self._files.sources)} files, {len(self._todo)} segments left>"


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
            _expect_same(source, os.fstat(file.fileno()))  # last, so that no change before it is missed
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
