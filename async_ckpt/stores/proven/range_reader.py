"""Readers of objects: by ranges, or by a copy of the whole object if the client or the server cannot read ranges.

In: functions that fetch a range, and the whole object. Out: ranges of the object. Knows nothing of: clients.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable
from typing import IO, Final, NamedTuple

from ...errors import StorageFullError, StorageUnavailableError
from ...plumbing import Reader
from .client_facts import ClientFacts

# Logged once about a place where ranges cannot be read.
_NO_RANGES: Final = (
    "the server, or the client, sends whole objects when a part of one is requested; so each object that is read is "
    "first copied to a scratch file (TMPDIR)"
)


class Info(NamedTuple):
    """A store's description of an object."""

    num_bytes: int
    version: str


class NoRangesError(Exception):
    """A part of an object was requested, and the whole object or another part was returned."""


class ReplacedError(Exception):
    """The object is no longer the one that was opened."""


class RangeReader(Reader):
    """A reader of one object as it was when it was opened. If ranges cannot be read, it first makes a scratch copy.

    `fetch` fills memory with the bytes from an offset on, and raises NoRangesError if only whole objects can be read.
    `fetch_whole` writes the object to a file. Both raise ReplacedError. `known` has the facts about the client of the
    place, which the log calls `root`. `read_into` raises StorageFullError if the copy does not fit into the folder of
    `tempfile`.
    """

    def __init__(
        self,
        num_bytes: int,
        shown: str,
        known: ClientFacts,
        root: str,
        fetch: Callable[[int, memoryview], None],
        fetch_whole: Callable[[IO[bytes]], None],
    ) -> None:
        self.num_bytes, self._shown, self._known, self._root = num_bytes, shown, known, root
        self._fetch, self._fetch_whole = fetch, fetch_whole
        self._file: IO[bytes] | None = None
        # Held while the whole object is fetched, since all other reads have to wait for that anyway.
        self._using = threading.Lock()

    def read_into(self, offset: int, target: memoryview) -> None:
        if offset + len(target) > self.num_bytes:
            raise EOFError(f"{self._shown} ends at byte {self.num_bytes:,}")
        if not target:
            return
        try:
            if not self._known.ignores_ranges:
                try:
                    self._fetch(offset, target)
                    return
                except NoRangesError:
                    self._known.log_once(self._root, _NO_RANGES)
                    self._known.ignores_ranges = True
            self._read_copy(offset, target)
        except ReplacedError as error:
            raise StorageUnavailableError(
                f"{self._shown} was replaced while it was being read; load it again", path=self._shown
            ) from error

    def _read_copy(self, offset: int, target: memoryview) -> None:
        with self._using:
            if self._file is None:
                self._file = self._fetched()
            self._file.seek(offset)
            at = 0
            while num_read := self._file.readinto(target[at:]):  # type: ignore[attr-defined]
                at += num_read

    def _fetched(self) -> IO[bytes]:
        folder = tempfile.gettempdir()
        free_bytes = shutil.disk_usage(folder).free
        if self.num_bytes > free_bytes:
            raise StorageFullError(
                f"{self._shown}: ranges of it cannot be read, and the whole object ({self.num_bytes:,} bytes) does not "
                f"fit into {folder} ({free_bytes:,} bytes free); set TMPDIR to a folder on a larger disk",
                path=self._shown,
                needed_bytes=self.num_bytes,
                free_bytes=free_bytes,
            )
        file = tempfile.TemporaryFile(prefix="async_ckpt-")  # noqa: SIM115 - closed by `close`
        try:
            self._fetch_whole(file)
            if file.tell() != self.num_bytes:
                raise ReplacedError
        except BaseException:
            file.close()
            raise
        return file

    def close(self) -> None:
        with self._using:
            if self._file is not None:
                self._file.close()
                self._file = None
