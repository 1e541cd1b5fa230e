"""An object that is read as a whole, where the client or the server cannot read a part of one.

In: a function that fetches the object. Out: its ranges, from a scratch file. Knows nothing of: clients.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable
from typing import IO, Final

from ...errors import StorageFullError, StorageUnavailableError

# What the log says once about such a place.
NO_RANGES: Final = (
    "the server, or the client, sends whole objects when a part of one is requested; so each object that is read is "
    "first copied to a scratch file (TMPDIR)"
)


class NoRangesError(Exception):
    """A part of an object was asked for, and the whole came, or another part."""


class WholeCopy:
    """The bytes of one object, fetched at the first read. A reader creates and owns it. From any thread.

    `fetch` writes them to a file. Raises StorageFullError if they do not fit where `tempfile` makes files.
    """

    def __init__(self, num_bytes: int, shown: str, fetch: Callable[[IO[bytes]], None]) -> None:
        self._num_bytes, self._shown, self._fetch = num_bytes, shown, fetch
        self._file: IO[bytes] | None = None
        self._using = threading.Lock()  # held over the fetch, for which all other reads have to wait anyway

    def read_into(self, offset: int, target: memoryview) -> None:
        with self._using:
            if self._file is None:
                self._file = self._fetched()
            self._file.seek(offset)
            at = 0
            while num_read := self._file.readinto(target[at:]):  # type: ignore[attr-defined]
                at += num_read
        if at < len(target):
            raise EOFError(f"{self._shown} ends at byte {self._num_bytes:,}")

    def _fetched(self) -> IO[bytes]:
        folder = tempfile.gettempdir()
        free_bytes = shutil.disk_usage(folder).free
        if self._num_bytes > free_bytes:
            raise StorageFullError(
                f"{self._shown}: a part of it cannot be read, and all {self._num_bytes:,} bytes do not fit into "
                f"{folder}, where {free_bytes:,} are free; set TMPDIR to a folder on a larger disk",
                path=self._shown,
                needed_bytes=self._num_bytes,
                free_bytes=free_bytes,
            )
        file = tempfile.TemporaryFile(prefix="async_ckpt-")  # noqa: SIM115 - closed by `close`
        try:
            self._fetch(file)
            if file.tell() != self._num_bytes:
                raise StorageUnavailableError(
                    f"{self._shown} was replaced while it was being read; load it again", path=self._shown
                )
        except BaseException:
            file.close()
            raise
        return file

    def close(self) -> None:
        with self._using:
            if self._file is not None:
                self._file.close()
                self._file = None
