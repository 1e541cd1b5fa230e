"""An object as a file that is read from front to back, fetched ahead by several threads.

In: a reader of ranges. Out: a binary file object. Knows nothing of: what is in it.
"""

from __future__ import annotations

import io
from collections import deque
from concurrent.futures import Future
from typing import Any, Final

from ..host.threads import Crew, running_future
from ..spec import MIB
from .interface import Reader

_CHUNK_BYTES: Final = 8 * MIB
_NUM_AHEAD: Final = 4


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
            begin, length = self._asked, min(_CHUNK_BYTES, self._reader.num_bytes - self._asked)
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
