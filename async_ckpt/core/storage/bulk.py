"""Copies, deletions and existence checks of many objects.

In: readers of objects, and a storage. Out: the same objects there, each whole or not at all.
Knows nothing of: what is in them.

All segments of all objects form one queue, which a few threads serve; each segment gets its memory before the next one
is taken. So a large object is read in several ranges at once, many small objects need no more memory than a large
object, and no segment waits for memory that later segments hold.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from ...errors import StorageUnavailableError
from ..host.threads import Crew, Task, run_together
from ..spec import MIB
from .interface import Reader, Sink, Storage
from .pace import Pace

if TYPE_CHECKING:
    from ..host.pool import Lease, SegmentPool

# The size of a ranged read and of a part of an upload: so large that the latency of a request does not matter.
_SEGMENT_BYTES: Final = 8 * MIB
_NUM_THREADS: Final = 8
# Fewer beside a training, which needs the processors.
_NUM_BACKGROUND_THREADS: Final = 2
# For each thread, one segment that is being filled and one that is being sent.
_NUM_SEGMENTS: Final = 2 * _NUM_THREADS
_NUM_DELETIONS: Final = 16
_NUM_LOOKERS: Final = 16


@dataclass(frozen=True, slots=True)
class Parcel:
    """One object to be copied."""

    open: Callable[[], Reader]  # called on any thread, when the copy of this object begins
    path: str  # in the target storage
    num_bytes: int
    verify: Callable[[int, memoryview], None] | None = None  # raises for wrong bytes


def copy(
    parcels: Sequence[Parcel],
    to: Storage,
    *,
    background: bool = False,
    num_threads: int | None = None,
    segment_bytes: int = _SEGMENT_BYTES,
    check: Callable[[], None] = lambda: None,
    finished: Callable[[Sink], object] = lambda sink: sink.close(),
    pace: Pace | None = None,
    pool: SegmentPool | None = None,
    compresses: bool = False,
) -> None:
    """Copy objects. Each appears whole, as soon as it is durable. After an error, no more objects appear.

    `check` is called between segments, and ends the copy by raising. `finished` is called on any thread with the sink
    of each finished object, and closes the sink. With `background`, few threads are used, which leaves the processors
    to the training. `pace` limits the bandwidth of the writes. `pool` is memory from `new_pool` for a series of copies;
    no other copy may use it at the same time. With `compresses`, the objects are archives, and are written as tars of
    compressed blocks. Raises FileNotFoundError, StorageUnavailableError, StorageFullError, and what `verify` raises.
    """
    if parcels:
        to.prove()
    # Larger segments only for objects of too many parts (in S3, above 78 GiB), so that each segment is one part.
    segment_bytes *= max(
        (to.part_segments(parcel.num_bytes, segment_bytes) for parcel in parcels if parcel.num_bytes),
        default=1,
    )
    lasts = pool is not None and pool.segment_bytes == segment_bytes
    job = _Copy(to, pool if pool is not None and lasts else new_pool(segment_bytes), check, finished, pace)
    usual = _NUM_BACKGROUND_THREADS if background else _NUM_THREADS
    num_threads = num_threads or usual
    crew = Crew("copy", num_threads, background=background)
    create = partial(_compressed, to, num_threads) if compresses else to.create
    transfers = [_Transfer(parcel, job, create) for parcel in parcels]
    try:
        crew.run_all(task for transfer in transfers for task in transfer.tasks())
    except BaseException:
        for transfer in transfers:
            transfer.abort()
        raise
    finally:
        crew.stop()
        job.pool.remove_reliever(job.relieve)
        if not lasts:
            job.pool.close()


def _compressed(to: Storage, num_threads: int, path: str, *, num_bytes: int, segment_bytes: int, **_: object) -> Sink:
    from .compressed import BlocksInTar, CompressingSink  # most runs do not need it

    packing = BlocksInTar(num_bytes)
    return CompressingSink(
        to, path, num_bytes=num_bytes, segment_bytes=segment_bytes, packing=packing, num_threads=num_threads
    )


def new_pool(segment_bytes: int = _SEGMENT_BYTES) -> SegmentPool:
    """Memory for one copy, or for a series of copies: at most 16 segments, allocated as needed."""
    from ..host.pool import SegmentPool  # it imports torch, which deletions do not need

    return SegmentPool(segment_bytes, max_bytes=_NUM_SEGMENTS * segment_bytes)


def delete(storage: Storage, paths: Sequence[str]) -> None:
    """Delete objects, several at once. Missing objects are no error. Raises StorageUnavailableError."""
    run_together("delete", [partial(storage.delete, path) for path in paths], max_threads=_NUM_DELETIONS)


def existing(storage: Storage, paths: Sequence[str]) -> list[str]:
    """The subset of `paths` that exists, in the given order. Several requests are made at once."""
    present: set[str] = set()

    def look(path: str) -> None:
        if storage.exists(path):
            present.add(path)

    run_together("look", [partial(look, path) for path in paths], max_threads=_NUM_LOOKERS)
    return [path for path in paths if path in present]


class _Copy:
    """The state of one call of `copy`: the target, the memory, and the first error, which ends all transfers."""

    def __init__(
        self,
        to: Storage,
        pool: SegmentPool,
        check: Callable[[], None],
        finished: Callable[[Sink], object],
        pace: Pace | None,
    ) -> None:
        self.to = to
        self.pool, self.segment_bytes = pool, pool.segment_bytes
        self.finished = finished
        self.sinks: list[Sink] = []  # of the objects in transfer
        pool.add_reliever(self.relieve)
        self._check, self._pace = check, pace
        self._error: BaseException | None = None

    def relieve(self, starving: bool) -> bool:  # noqa: ARG002
        """Ask the sinks to release memory; see `SegmentPool.add_reliever`."""
        return any(sink.relieve() for sink in tuple(self.sinks))

    def lease(self, offset: int) -> Lease:
        """Wait for memory. Raises the first error of the copy."""
        return self.pool.lease((0, offset), pin=None, check=self.check)

    def check(self) -> None:
        if self._error is not None:
            raise self._error
        self._check()

    def wait_to_write(self, num_bytes: int) -> None:
        """Wait until `num_bytes` may be written. Raises the first error of the copy."""
        if self._pace is not None:
            self._pace.wait(num_bytes, self.check)

    @contextmanager
    def end_on_error(self) -> Iterator[None]:
        """Let an error in this block end every wait for memory."""
        try:
            yield
        except BaseException as error:
            self._error = self._error or error
            raise


class _Transfer:
    """The transfer of one object. The first segment opens the reader and the sink; the last one finishes the sink."""

    def __init__(self, parcel: Parcel, job: _Copy, create: Callable[..., Sink]) -> None:
        """`create` is `Storage.create`, or a function with the same parameters."""
        self._parcel, self._create = parcel, create
        self._copy = job
        self._num_left = -(-parcel.num_bytes // job.segment_bytes)  # under _lock
        self._ends: tuple[Reader, Sink] | None = None  # under _lock, which is held while they are opened
        self._lock = threading.Lock()

    def tasks(self) -> Iterator[Task]:
        """A task for each segment, which has leased its memory."""
        self._copy.check()
        if not self._parcel.num_bytes:
            yield self._put_empty
        for offset in range(0, self._parcel.num_bytes, self._copy.segment_bytes):
            self._copy.check()
            yield partial(self._move, offset, self._copy.lease(offset))

    def _move(self, offset: int, lease: Lease) -> None:
        with self._copy.end_on_error():
            try:
                reader, sink = self._open_ends()
                data = lease.segment.view[: self._parcel.num_bytes - offset]
                self._read(reader, offset, data)
                self._copy.wait_to_write(len(data))
                sink.write(offset, data, lease)
            finally:
                lease.release()
            with self._lock:
                self._num_left -= 1
                is_last = not self._num_left
            if is_last:
                self._finish(reader, sink)

    def _read(self, reader: Reader, offset: int, data: memoryview) -> None:
        try:
            reader.read_into(offset, data)
        except EOFError as error:
            raise self._changed_error() from error
        if self._parcel.verify is not None:
            self._parcel.verify(offset, data)

    def _put_empty(self) -> None:
        with self._copy.end_on_error():
            self._copy.to.replace(self._parcel.path, b"")

    def _open_ends(self) -> tuple[Reader, Sink]:
        with self._lock:
            if self._ends is None:
                reader = self._parcel.open()
                try:
                    self._ends = reader, self._create_sink(reader)
                except BaseException:
                    reader.close()
                    raise
            return self._ends

    def _create_sink(self, reader: Reader) -> Sink:
        if reader.num_bytes != self._parcel.num_bytes:
            raise self._changed_error()
        sink = self._create(
            self._parcel.path,
            num_bytes=self._parcel.num_bytes,
            segment_bytes=self._copy.segment_bytes,
            max_segments=_NUM_SEGMENTS,
        )
        self._copy.sinks.append(sink)
        return sink

    def _changed_error(self) -> StorageUnavailableError:
        shown = self._copy.to.locate(self._parcel.path)
        return StorageUnavailableError(
            f"{shown}: the source changed during the copy, and no longer has {self._parcel.num_bytes:,} bytes; "
            "copy it again when nothing writes to it",
            path=shown,
        )

    def _finish(self, reader: Reader, sink: Sink) -> None:
        sink.finish()
        self._ends = None
        self._copy.sinks.remove(sink)
        reader.close()
        self._copy.finished(sink)

    def abort(self) -> None:
        """Leave no trace of the object, unless it is finished. No thread may still be working on it."""
        if self._ends is not None:
            reader, sink = self._ends
            reader.close()
            sink.abort()
            sink.close()
