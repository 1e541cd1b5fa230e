"""Objects that are written from front to back, through a sink for segments.

In: bytes of any length, in order. Out: an object whose size was not known before. Knows nothing of: what is in it.
"""

from __future__ import annotations

import ctypes
import threading
from functools import partial
from typing import Final

from ..host.pool import Lease, SegmentPool
from ..host.threads import Crew
from ..host.waits import LIVENESS_SECONDS
from ..spec import MIB
from ..staging.device import memmove
from .interface import Sink, Storage
from .locks import temps_of

_SEGMENT_BYTES: Final = 8 * MIB
# One segment is being filled, some are being written, and some are held until a store has sent them.
_NUM_SEGMENTS: Final = 8
_NUM_WRITERS: Final = 4


class Appender:
    """An object that is written from front to back. One thread at a time appends; the threads of its crew write.

    `limit_bytes` is an upper limit of its size, from which a store chooses the size of parts. The memory is 64 MiB, or
    more if the store needs more for the parts of such an object.
    """

    def __init__(self, storage: Storage, path: str, *, limit_bytes: int) -> None:
        if not storage.remote:  # delete what a killed writer of the same object has left
            folder, _, name = path.rpartition("/")
            storage.sweep(folder, temps_of(name, storage.names(folder)), delete=True)
        self._storage = storage
        num_segments = max(_NUM_SEGMENTS, 2 * storage.part_segments(limit_bytes, _SEGMENT_BYTES) + 2)
        self.sink: Sink = storage.create(
            path, num_bytes=limit_bytes, segment_bytes=_SEGMENT_BYTES, max_segments=num_segments, exact=False
        )
        self._pool = SegmentPool(_SEGMENT_BYTES, max_bytes=num_segments * _SEGMENT_BYTES)
        self._pool.add_reliever(lambda _: self.sink.relieve())
        self._crew = Crew("append", _NUM_WRITERS, background=True)
        self._lease: Lease | None = None  # of the segment that is being filled
        self.num_bytes = 0
        self._changed = threading.Condition()
        self._num_writing = 0  # under _changed, like all below
        self._error: BaseException | None = None

    def append(self, data: memoryview) -> None:
        """Append bytes. `data` may change once the call has returned. Raises the error of an earlier write."""
        while data:
            if self._lease is None:
                number = self.num_bytes // _SEGMENT_BYTES
                self._lease = self._pool.lease((0, number), pin=None, check=self.check)
            begin = self.num_bytes % _SEGMENT_BYTES
            part = data[: _SEGMENT_BYTES - begin]
            if part.readonly:
                self._lease.segment.view[begin : begin + len(part)] = part
            else:  # the same without the GIL
                source = ctypes.addressof(ctypes.c_char.from_buffer(part))
                memmove(self._lease.segment.address + begin, source, len(part))
            self.num_bytes += len(part)
            data = data[len(part) :]
            if self.num_bytes % _SEGMENT_BYTES == 0:
                self._send()
        self.check()

    def finish(self) -> int:
        """Write the rest, and make the object durable. Returns its size in bytes."""
        if self._lease is not None:
            self._send()
        self._wait()
        self.check()
        self._storage.prove()
        self.sink.finish(self.num_bytes)
        self._close()
        return self.num_bytes

    def abort(self) -> None:
        """Leave no trace of the object. Idempotent."""
        self.fail(RuntimeError("the upload was abandoned"))
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        self._wait()
        self.sink.abort()
        self._close()

    def fail(self, error: BaseException) -> None:
        """Make `append` and `finish` raise this error, unless an earlier one has occurred. Thread-safe."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        self.sink.give_up()

    def check(self) -> None:
        """Raise the first error, if there is one."""
        if self._error is not None:
            raise self._error

    def _send(self) -> None:
        lease, self._lease = self._lease, None
        assert lease is not None
        begin = (self.num_bytes - 1) // _SEGMENT_BYTES * _SEGMENT_BYTES
        length = self.num_bytes - begin
        with self._changed:
            self._num_writing += 1
        self._crew.submit(lambda: self._write(begin, length, lease), partial(self._written, lease))

    def _write(self, offset: int, length: int, lease: Lease) -> None:
        error: BaseException | None = None
        try:
            self.check()
            self.sink.write(offset, lease.segment.view[:length], lease)
        except BaseException as caught:
            error = caught
        self._written(lease, error)

    def _written(self, lease: Lease, error: BaseException | None) -> None:
        lease.release()
        with self._changed:
            self._error = self._error or error
            self._num_writing -= 1
            self._changed.notify_all()

    def _wait(self) -> None:
        """Wait until no write is under way. The deadlines of the sink end each write."""
        with self._changed:
            while self._num_writing:
                self._changed.wait(LIVENESS_SECONDS)

    def _close(self) -> None:
        self._crew.stop()
        self._pool.close()

    def __repr__(self) -> str:
        return f"<Appender {self.num_bytes:,} bytes to {self.sink!r}>"
