"""Many objects at once: copied into a storage, or deleted from one.

In: readers of objects, and a storage. Out: the same objects there, each whole or not at all.
Knows nothing of: what is in them.

All segments of all objects are one line, which a few threads take from; each is lent its memory before the next one
is taken. So a large object comes in several ranges at once, many small ones take no more memory than a large one,
and no segment ever waits for memory that is held by those behind it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from ..errors import StorageUnavailableError
from ..host.pool import Lease, SegmentPool
from ..host.threads import Crew, Task, run_together
from ..spec import MIB
from .interface import Reader, Sink, Storage

# One ranged read, and one part of an upload: enough that the way there and back does not count.
_SEGMENT_BYTES: Final = 8 * MIB
_NUM_THREADS: Final = 8
# Beside a training, which has the better claim on the processors.
_NUM_BACKGROUND_THREADS: Final = 2
# For each thread, one that it fills and one that is on its way.
_NUM_SEGMENTS: Final = 2 * _NUM_THREADS
_NUM_DELETIONS: Final = 16


@dataclass(frozen=True, slots=True)
class Parcel:
    """One object to be copied."""

    open: Callable[[], Reader]  # called on any thread, when it is this object's turn
    path: str  # in the storage that it goes to
    num_bytes: int
    verify: Callable[[int, memoryview], None] | None = None  # raises for bytes that are not right


def copy(
    parcels: Sequence[Parcel],
    to: Storage,
    *,
    background: bool = False,
    num_threads: int | None = None,
    segment_bytes: int = _SEGMENT_BYTES,
    check: Callable[[], None] = lambda: None,
    finished: Callable[[Sink], object] = lambda sink: sink.close(),
) -> None:
    """Copy objects; each appears whole, as soon as it is there. After an error the others do not appear any more.

    `check` is called between segments, and ends it by raising. `finished` is handed the sink of each object that is
    there, on any thread, and closes it. In `background`, processors are left to the training.
    Raises FileNotFoundError, StorageUnavailableError, StorageFullError, and what `verify` raises.
    """
    # Larger only for what would have too many parts (of S3, above 78 GiB): so that each segment can go by itself.
    segment_bytes *= max(
        (to.part_segments(parcel.num_bytes, segment_bytes) for parcel in parcels if parcel.num_bytes),
        default=1,
    )
    copying = _Copying(to, segment_bytes, check, finished)
    usual = _NUM_BACKGROUND_THREADS if background else _NUM_THREADS
    crew = Crew("copy", num_threads or usual, background=background)
    passages = [_Passage(parcel, copying) for parcel in parcels]
    try:
        crew.run_all(task for passage in passages for task in passage.tasks())
    except BaseException:
        for passage in passages:
            passage.abort()
        raise
    finally:
        crew.stop()
        copying.pool.close()


def delete(storage: Storage, paths: Sequence[str]) -> None:
    """Delete objects, several at once; no error for those that are gone. Raises StorageUnavailableError."""
    run_together("delete", [partial(storage.delete, path) for path in paths], max_threads=_NUM_DELETIONS)


class _Copying:
    """Things that the passages of one copy share: where to, the memory, and the first error, which ends all of them."""

    def __init__(
        self, to: Storage, segment_bytes: int, check: Callable[[], None], finished: Callable[[Sink], object]
    ) -> None:
        self.to = to
        self.segment_bytes = segment_bytes
        self.finished = finished
        self.sinks: list[Sink] = []  # of the objects that are on their way
        self.pool = SegmentPool(segment_bytes, max_bytes=_NUM_SEGMENTS * segment_bytes)
        self.pool.add_reliever(lambda _: any(sink.relieve() for sink in tuple(self.sinks)))
        self._check = check
        self._error: BaseException | None = None

    def lease(self, offset: int) -> Lease:
        """Wait for memory, as long as there is reason to go on."""
        return self.pool.lease((0, offset), pin=None, check=self.check)

    def check(self) -> None:
        if self._error is not None:
            raise self._error
        self._check()

    @contextmanager
    def ending_on_error(self) -> Iterator[None]:
        """End every wait for memory that will not come back."""
        try:
            yield
        except BaseException as error:
            self._error = self._error or error
            raise


class _Passage:
    """One object on its way. The first of its segments opens both ends, the last one finishes it."""

    def __init__(self, parcel: Parcel, copying: _Copying) -> None:
        self._parcel = parcel
        self._copying = copying
        self._num_left = -(-parcel.num_bytes // copying.segment_bytes)  # under _lock
        self._ends: tuple[Reader, Sink] | None = None  # under _lock, which is held while they are opened
        self._lock = threading.Lock()

    def tasks(self) -> Iterator[Task]:
        """A task for each segment, which holds its memory already."""
        self._copying.check()
        if not self._parcel.num_bytes:
            yield self._put_empty
        for offset in range(0, self._parcel.num_bytes, self._copying.segment_bytes):
            self._copying.check()
            yield partial(self._move, offset, self._copying.lease(offset))

    def _move(self, offset: int, lease: Lease) -> None:
        with self._copying.ending_on_error():
            try:
                reader, sink = self._opened()
                data = lease.segment.view[: self._parcel.num_bytes - offset]
                self._read(reader, offset, data)
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
            raise self._changed() from error
        if self._parcel.verify is not None:
            self._parcel.verify(offset, data)

    def _put_empty(self) -> None:
        with self._copying.ending_on_error():
            self._copying.to.replace(self._parcel.path, b"")

    def _opened(self) -> tuple[Reader, Sink]:
        with self._lock:
            if self._ends is None:
                reader = self._parcel.open()
                try:
                    self._ends = reader, self._created(reader)
                except BaseException:
                    reader.close()
                    raise
            return self._ends

    def _created(self, reader: Reader) -> Sink:
        if reader.num_bytes != self._parcel.num_bytes:
            raise self._changed()
        sink = self._copying.to.create(
            self._parcel.path,
            num_bytes=self._parcel.num_bytes,
            segment_bytes=self._copying.segment_bytes,
            max_segments=_NUM_SEGMENTS,
        )
        self._copying.sinks.append(sink)
        return sink

    def _changed(self) -> StorageUnavailableError:
        shown = self._copying.to.locate(self._parcel.path)
        return StorageUnavailableError(
            f"{shown}: what it is copied from changed meanwhile, and has no longer {self._parcel.num_bytes:,} bytes; "
            "copy it again when nobody writes to it",
            path=shown,
        )

    def _finish(self, reader: Reader, sink: Sink) -> None:
        sink.finish()
        self._ends = None
        self._copying.sinks.remove(sink)
        reader.close()
        self._copying.finished(sink)

    def abort(self) -> None:
        """Leave no trace of it, unless it is there already. No thread works at it any more."""
        if self._ends is not None:
            reader, sink = self._ends
            reader.close()
            sink.abort()
            sink.close()
