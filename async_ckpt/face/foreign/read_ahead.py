"""Objects that are read from front to back, as binary files.

In: a reader of ranges. Out: a binary file object. Knows nothing of: the content of the object.
"""

from __future__ import annotations

import io
from collections import deque
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

from ...core.host.threads import Crew, running_future
from ...core.spec import MIB
from ...core.storage.interface import Reader

_CHUNK_BYTES: Final = 8 * MIB
# Chunks that are read at the same time, ahead of the one in use.
_NUM_AHEAD: Final = 4


class ReadAhead(io.RawIOBase):
    """An object as a binary file, read ahead by threads of its own. Used by one thread.

    Takes at most 40 MiB of memory. Closing it closes the reader. Raises the errors of the reader.
    """

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self._reader = reader
        self._crew = Crew("fetch", _NUM_AHEAD)
        self._ahead: deque[Future[memoryview]] = deque()
        self._num_requested = 0  # bytes requested so far
        self._chunk = memoryview(b"")
        self._at = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def readinto(self, target: Any) -> int:
        self._request()
        if not self._chunk and self._ahead:
            # Removed only once it is done, since `close` waits for the chunks in the deque.
            self._chunk = self._ahead[0].result()
            del self._ahead[0]
            self._request()
        view = memoryview(target).cast("B")
        part = self._chunk[: len(view)]
        view[: len(part)] = part
        self._chunk = self._chunk[len(part) :]
        self._at += len(part)
        return len(part)

    def _request(self) -> None:
        while len(self._ahead) < _NUM_AHEAD and self._num_requested < self._reader.num_bytes:
            begin, length = self._num_requested, min(_CHUNK_BYTES, self._reader.num_bytes - self._num_requested)
            chunk: Future[memoryview] = running_future()
            self._crew.submit(partial(self._fetch, begin, length, chunk))
            self._ahead.append(chunk)
            self._num_requested += length

    def _fetch(self, begin: int, length: int, chunk: Future[memoryview]) -> None:
        try:
            data = memoryview(bytearray(length))
            self._reader.read_into(begin, data)
        except BaseException as error:
            chunk.set_exception(error)
        else:
            chunk.set_result(data)

    def close(self) -> None:
        if not self.closed:
            for chunk in self._ahead:
                chunk.exception()  # the thread uses the reader until then
            self._crew.stop()
            self._reader.close()
        super().close()
