"""Files on their way into segments: the other fill, which reads where staging copies.

In: a folder or a file, and the plan of its image. Out: segments, handed on one by one as they are filled.
Knows nothing of: where they go.
"""

from __future__ import annotations

import errno
import os
import stat
import tarfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from ..errors import StorageUnavailableError, TornSnapshotError, UnsupportedStateError
from ..format.layout import Image, SegmentPlan
from ..format.tarball import TarEntry, stays_inside
from ..host.limits import num_cpus
from ..host.pool import Lease, SegmentPool
from ..host.threads import Crew, running_future
from ..spans import Clock
from ..spec import BLOCK_BYTES, GIB

_MAX_READERS: Final = 8
# The map of a sparse member is read as a whole, like a header. One with 8 GiB of data or more would need two sizes
# in its header, which Python's `tarfile` confuses.
_MAX_RUNS: Final = 16_384
_MAX_SPARSE_BYTES: Final = 8 * GIB - BLOCK_BYTES
_O_BINARY: Final = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


class Source(NamedTuple):
    """A file, folder or link as it was when the plan was made."""

    path: str
    num_bytes: int
    mtime_ns: int


def scan(folder: Path) -> tuple[list[TarEntry], list[Source]]:
    """Every member of a folder, itself first, in the order of names; and the file behind each.

    Raises UnsupportedStateError for what no archive can give back: devices, pipes, links that lead out of the folder.
    """
    entries: list[TarEntry] = []
    sources: list[Source] = []
    first_names: dict[tuple[int, int], str] = {}
    for path, name, found in _walk(str(folder), ".", os.lstat(folder)):
        entry = _entry(path, name, found, first_names)
        entries.append(entry)
        sources.append(Source(path, found.st_size, found.st_mtime_ns))
    return entries, sources


def source_of(file: Path) -> Source:
    found = os.stat(file)
    return Source(os.path.realpath(file), found.st_size, found.st_mtime_ns)


def _walk(path: str, name: str, found: os.stat_result) -> Iterator[tuple[str, str, os.stat_result]]:
    todo = [(path, name, found)]
    while todo:
        path, name, found = todo.pop()
        yield path, name, found
        if stat.S_ISDIR(found.st_mode):
            with os.scandir(path) as entries:
                inside = sorted(entries, key=lambda entry: entry.name, reverse=True)
            todo += [(e.path, f"{name}/{e.name}", e.stat(follow_symlinks=False)) for e in inside]


def _entry(path: str, name: str, found: os.stat_result, first_names: dict[tuple[int, int], str]) -> TarEntry:
    mode, mtime = stat.S_IMODE(found.st_mode), int(found.st_mtime)
    if stat.S_ISDIR(found.st_mode):
        return TarEntry(name, tarfile.DIRTYPE, mode, mtime)
    if stat.S_ISLNK(found.st_mode):
        target = os.readlink(path)
        if not stays_inside(name, target):
            raise UnsupportedStateError(
                f"{path} is a link to {target}, which may lead out of the folder; copy the file in instead",
                path=path,
            )
        return TarEntry(name, tarfile.SYMTYPE, mode, mtime, link=target)
    if not stat.S_ISREG(found.st_mode):
        raise UnsupportedStateError(
            f"{path} is neither a file, a folder nor a link; remove it, then pack again", path=path
        )
    if found.st_nlink > 1:
        first = first_names.setdefault((found.st_dev, found.st_ino), name)
        if first != name:
            return TarEntry(name, tarfile.LNKTYPE, mode, mtime, link=first)
    return TarEntry(name, tarfile.REGTYPE, mode, mtime, found.st_size, runs=_runs(path, found))


def _runs(path: str, found: os.stat_result) -> tuple[tuple[int, int], ...]:
    """Where a file has data: all of it, or what is between holes if these save at least a block.

    A file with very many holes, or with more data than readers agree about, is taken as one without.
    """
    size = found.st_size
    whole = ((0, size),) if size else ()
    blocks = getattr(found, "st_blocks", size)
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
                if error.errno == errno.ENXIO:  # nothing but a hole follows
                    break
                return whole
            end = os.lseek(fd, begin, os.SEEK_HOLE)
            runs.append((begin, end - begin))
    finally:
        os.close(fd)
    if len(runs) > _MAX_RUNS or sum(length for _, length in runs) > _MAX_SPARSE_BYTES:
        return whole
    return tuple(runs)


class FileFill:
    """Reads segments from files, by several threads, in file order. All in the background: nobody is held.

    `put` gets (segment number, lease) as each segment is filled. `check` raises when the save has failed elsewhere.
    """

    stall_seconds = 0.0

    def __init__(
        self,
        sources: Sequence[Source],
        runs: Sequence[tuple[int, int]],
        segments: Sequence[SegmentPlan],
        *,
        order: int,
        pool: SegmentPool,
        crew: Crew,
        clock: Clock,
        put: Callable[[int, Lease], None],
        check: Callable[[], None],
    ) -> None:
        self._sources, self._runs, self._order = sources, runs, order
        self._pool, self._crew, self._clock = pool, crew, clock
        self._put, self._check = put, check
        self.completion: Future[None] = running_future()
        self.stage_seconds = 0.0
        self._begun = clock()
        self._todo = deque(segments)
        self._taking = threading.Lock()  # a segment and its lease are taken in one step, in file order
        self._lock = threading.Lock()
        self._num_unfilled = len(self._todo)  # under _lock, like all below
        self._num_readers = 0
        self._error: BaseException | None = None

    def begin(self) -> None:
        num_readers = min(_MAX_READERS, 2 * num_cpus(), max(1, len(self._todo)))
        self._num_readers = num_readers
        for _ in range(num_readers):
            self._crew.submit(self._read)

    def _read(self) -> None:
        try:
            while (taken := self._take()) is not None:
                self._fill(*taken)
        except BaseException as error:
            self._fail(error)
        with self._lock:
            self._num_readers -= 1
            last = self._num_readers == 0
        if last:
            self._complete()

    def _complete(self) -> None:
        self.stage_seconds = self._clock() - self._begun
        if self._error is None:
            self.completion.set_result(None)
        else:
            self.completion.set_exception(self._error)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error

    def _check_alive(self) -> None:
        """Raise what ended it: here, so that no reader waits for memory that another's segment would free; or elsewhere."""
        if self._error is not None:
            raise self._error
        self._check()

    def _take(self) -> tuple[SegmentPlan, Lease] | None:
        with self._taking:
            if not self._todo:
                return None
            self._check_alive()
            plan = self._todo.popleft()
            return plan, self._pool.lease((self._order, plan.number), pin=None, check=self._check_alive)

    def _fill(self, plan: SegmentPlan, lease: Lease) -> None:
        try:
            view = lease.segment.view
            for at, data in plan.literals:
                view[at : at + len(data)] = data
            for target, run, begin, length in plan.pieces:
                number, offset = self._runs[run]
                _read_into(view[target : target + length], self._sources[number], offset + begin)
            if self._is_last():  # before it is handed on: nothing incomplete has become visible
                self._compare_all()
        except BaseException:
            lease.release()
            raise
        self._put(plan.number, lease)

    def _is_last(self) -> bool:
        with self._lock:
            self._num_unfilled -= 1
            return self._num_unfilled == 0

    def _compare_all(self) -> None:
        """Folders too, which may hold new files by now; and files that were read before, or that were empty."""
        for source in self._sources:
            try:
                found = os.lstat(source.path)
            except OSError:
                raise _changed(source) from None
            _expect_same(source, found)

    def __repr__(self) -> str:
        return f"<FileFill {len(self._sources)} files, {len(self._todo)} segments left>"


def _read_into(target: memoryview, source: Source, offset: int) -> None:
    """Raises TornSnapshotError when the file is not what it was, and StorageUnavailableError."""
    try:
        with open(source.path, "rb", buffering=0) as file:
            file.seek(offset)
            while target:
                num_read = file.readinto(target)
                if not num_read:
                    raise _changed(source)
                target = target[num_read:]
            _expect_same(source, os.fstat(file.fileno()))  # afterwards, so that no change goes unseen
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise _changed(source) from None
    except OSError as error:
        raise StorageUnavailableError(
            f"{source.path}: {error.strerror}; make sure that it can be read", path=source.path
        ) from error


def _expect_same(source: Source, found: os.stat_result) -> None:
    if (found.st_size, found.st_mtime_ns) != (source.num_bytes, source.mtime_ns):
        raise _changed(source)


def _changed(source: Source) -> TornSnapshotError:
    return TornSnapshotError(
        f"{source.path} changed while it was being packed; write it first, then pack", names=(source.path,)
    )


class FileImage(Image, Protocol):
    """An image whose pieces are of runs of files."""

    @property
    def runs(self) -> Sequence[tuple[int, int]]:
        """(file, offset in it) of each run."""


class FilesImage(NamedTuple):
    """Files, and the image of what is made of them."""

    image: FileImage
    sources: Sequence[Source]
