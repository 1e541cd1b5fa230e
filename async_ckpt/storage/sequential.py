"""Objects from front to back: written through a sink that takes segments, and read through a reader of ranges.

In: bytes of any length, in order; a reader. Out: an object whose size was not known before; a binary file object.
Knows nothing of: what is in the objects.
"""

from __future__ import annotations

import ctypes
import io
import threading
from collections import deque
from concurrent.futures import Future
from typing import Any, Final

from ..host.pool import Lease, SegmentPool
from ..host.threads import Crew, running_future
from ..host.waits import LIVENESS_SECONDS
from ..spec import MIB
from ..staging.device import memmove
from .interface import Reader, Sink, Storage

_SEGMENT_BYTES: Final = 8 * MIB
# One is being filled, some are being written, and what a store still sends is held until then.
_NUM_SEGMENTS: Final = 8
_NUM_WRITERS: Final = 4
# Chunks that are read at the same time, ahead of the one in use.
_NUM_AHEAD: Final = 4


class Appender:
    """Fills segments of its own memory, and has them written by other threads meanwhile. One thread appends at a time.

    `limit_bytes` is more than will come: a store chooses the size of its parts by it. The memory is a fixed 64 MiB,
    or what a store needs for parts of such an object.
    """

    def __init__(self, storage: Storage, path: str, *, limit_bytes: int) -> None:
        num_segments = max(_NUM_SEGMENTS, 2 * storage.part_segments(limit_bytes, _SEGMENT_BYTES) + 2)
        self.sink: Sink = storage.create(
            path, num_bytes=limit_bytes, segment_bytes=_SEGMENT_BYTES, max_segments=num_segments, exact=False
        )
        self._pool = SegmentPool(_SEGMENT_BYTES, max_bytes=num_segments * _SEGMENT_BYTES)
        self._pool.add_reliever(lambda _: self.sink.relieve())
        self._crew = Crew("append", _NUM_WRITERS, background=True)
        self._lease: Lease | None = None  # being filled, up to `num_bytes`
        self.num_bytes = 0
        self._changed = threading.Condition()
        self._num_writing = 0  # under _changed, like all below
        self._error: BaseException | None = None

    def append(self, data: memoryview) -> None:
        """Take bytes; they may change once this returns. Raises what an earlier write has met."""
        while data:
            if self._lease is None:
                number = self.num_bytes // _SEGMENT_BYTES
                self._lease = self._pool.lease((0, number), pin=None, check=self.check)
            begin = self.num_bytes % _SEGMENT_BYTES
            part = data[: _SEGMENT_BYTES - begin]
            if part.readonly:
                self._lease.segment.view[begin : begin + len(part)] = part
            else:  # the same, off the GIL
                source = ctypes.addressof(ctypes.c_char.from_buffer(part))
                memmove(self._lease.segment.address + begin, source, len(part))
            self.num_bytes += len(part)
            data = data[len(part) :]
            if self.num_bytes % _SEGMENT_BYTES == 0:
                self._send()
        self.check()

    def finish(self) -> int:
        """Write what is left, and make the object durable; its size in bytes."""
        if self._lease is not None:
            self._send()
        self._wait()
        self.check()
        self.sink.finish(self.num_bytes)
        self._close()
        return self.num_bytes

    def abort(self) -> None:
        """Leave no trace. Idempotent."""
        self.fail(RuntimeError("the object was given up"))
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        self._wait()
        self.sink.abort()
        self._close()

    def fail(self, error: BaseException) -> None:
        """End it from any thread: whoever appends gets this error. The first one counts."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        self.sink.give_up()

    def check(self) -> None:
        """Raise what has gone wrong, if anything has."""
        if self._error is not None:
            raise self._error

    def _send(self) -> None:
        lease, self._lease = self._lease, None
        assert lease is not None
        begin = (self.num_bytes - 1) // _SEGMENT_BYTES * _SEGMENT_BYTES
        length = self.num_bytes - begin
        with self._changed:
            self._num_writing += 1
        self._crew.submit(lambda: self._write(begin, length, lease))

    def _write(self, offset: int, length: int, lease: Lease) -> None:
        error: BaseException | None = None
        try:
            self.check()
            self.sink.write(offset, lease.segment.view[:length], lease)
        except BaseException as caught:
            error = caught
        lease.release()
        with self._changed:
            self._error = self._error or error
            self._num_writing -= 1
            self._changed.notify_all()

    def _wait(self) -> None:
        """Until no write is under way: each ends by the deadlines of its sink."""
        with self._changed:
            while self._num_writing:
                self._changed.wait(LIVENESS_SECONDS)

    def _close(self) -> None:
        self._crew.stop()
        self._pool.close()

    def __repr__(self) -> str:
        return f"<Appender {self.num_bytes:,} bytes to {self.sink!r}>"


class ReadAhead(io.RawIOBase):
    """Sequential; holds at most 40 MiB. Closing it closes the reader. Raises what the reader raises."""

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self._reader = reader
        self._crew = Crew("fetch", _NUM_AHEAD)
        self._ahead: deque[Future[memoryview]] = deque()
        self._asked = 0  # bytes asked for so far
        self._chunk = memoryview(b"")
        self._at = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def readinto(self, target: Any) -> int:
        self._ask()
        if not self._chunk and self._ahead:
            self._chunk = self._ahead[0].result()  # only then let go of it: `close` waits for what is here
            del self._ahead[0]
            self._ask()
        view = memoryview(target).cast("B")
        part = self._chunk[: len(view)]
        view[: len(part)] = part
        self._chunk = self._chunk[len(part) :]
        self._at += len(part)
        return len(part)

    def _ask(self) -> None:
        while len(self._ahead) < _NUM_AHEAD and self._asked < self._reader.num_bytes:
            begin, length = self._asked, min(_SEGMENT_BYTES, self._reader.num_bytes - self._asked)
            answer: Future[memoryview] = running_future()
            self._crew.submit(lambda begin=begin, length=length, to=answer: self._fetch(begin, length, to))  # type: ignore[misc]
            self._ahead.append(answer)
            self._asked += length

    def _fetch(self, begin: int, length: int, to: Future[memoryview]) -> None:
        try:
            chunk = memoryview(bytearray(length))
            self._reader.read_into(begin, chunk)
        except BaseException as error:
            to.set_exception(error)
        else:
            to.set_result(chunk)

    def close(self) -> None:
        if not self.closed:
            for answer in self._ahead:
                answer.exception()  # it reads from the reader until then
            self._crew.stop()
            self._reader.close()
        super().close()
