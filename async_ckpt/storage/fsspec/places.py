"""The two kinds of place that fsspec leads to.

In: paths below a root, bytes. Out: what is there, and how it is put there. Knows nothing of: segments.

A bucket of s3fs takes multipart parts and puts with a condition. Any other filesystem takes a file written from front
to back; what else it can do is looked up on its class.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Final, NamedTuple, Protocol

from ...spec import KIB

# A body goes to the socket in copies of this size: one join below 1 MiB keeps the GIL, so no slice is torn.
SLICE_BYTES: Final = 256 * KIB


class Moment(Protocol):
    """A `datetime`; its module is a clock, and clocks are not imported here."""

    def timestamp(self) -> float: ...


class Body:
    """A part as a file for botocore, which hashes it, and as slices for aiohttp, which sends them: never one copy.

    Requests that are given up may still ask for it after the memory was given back; `close` leaves them nothing.
    """

    def __init__(self, views: list[memoryview]) -> None:
        self._views = views
        self._num_bytes = sum(len(view) for view in views)
        self._at = 0

    def __len__(self) -> int:
        return self._num_bytes

    def _copy(self, begin: int, end: int) -> bytes:
        slices = []
        for view in self._views:
            slices.append(view[max(begin, 0) : max(end, 0)])
            begin, end = begin - len(view), end - len(view)
        return b"".join(slices)

    def read(self, size: int | None = -1) -> bytes:
        begin = self._at
        whole = size is None or size < 0
        self._at = self._num_bytes if whole else min(begin + (size or 0), self._num_bytes)
        return self._copy(begin, self._at)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._num_bytes}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for begin in range(0, self._num_bytes, SLICE_BYTES):
            yield self._copy(begin, min(begin + SLICE_BYTES, self._num_bytes))

    def close(self) -> None:
        self._views = []


class Info(NamedTuple):
    """A store's description of an object."""

    num_bytes: int
    version: str


class ReplacedError(Exception):
    pass


def probe_name() -> str:
    return f".async_ckpt-probe-{os.urandom(4).hex()}"
