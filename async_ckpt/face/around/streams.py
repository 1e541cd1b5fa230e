"""File objects over objects in a store.

In: a reader, an appender, or a name to write to. Out: a file object like those of `open`. Knows nothing of: folders.
"""

from __future__ import annotations

import io
import os
import tempfile
from functools import partial
from typing import IO, Any, Final, Self

from ...core.spec import MIB
from ...core.storage.bulk import Parcel, copy
from ...core.storage.interface import Reader, Storage
from ...core.storage.local import LocalStorage
from ...core.storage.sequential import Appender
from ..foreign.virtual_files import RangeFile

# The bytes that a file keeps in memory, and the largest request to the store.
BUFFER_BYTES: Final = 4 * MIB
_REQUEST_BYTES: Final = 16 * MIB


def open_local(path: str, mode: str, encoding: str | None) -> IO[Any]:
    try:
        return open(path, mode, encoding=encoding)
    except FileNotFoundError:
        folder = os.path.dirname(path)
        if "r" in mode or not folder:
            raise
    os.makedirs(folder, exist_ok=True)
    return open(path, mode, encoding=encoding)


class ReaderFile(RangeFile):
    """A `Reader` as a raw file of Python's `io`. Closing the file closes the reader."""

    def __init__(self, reader: Reader) -> None:
        super().__init__(reader.read_into, reader.num_bytes)
        self._reader = reader

    def readinto(self, target: Any) -> int:
        return super().readinto(memoryview(target).cast("B")[:_REQUEST_BYTES])

    def readall(self) -> bytes:
        """The rest of the file, in large requests: the inherited method would read a few KiB at a time."""
        data = bytearray(max(0, self._reader.num_bytes - self.tell()))
        at = 0
        while at < len(data):
            at += self.readinto(memoryview(data)[at:])
        return bytes(data)

    def close(self) -> None:
        self._reader.close()
        super().close()


class AppenderFile(io.RawIOBase):
    """A file object that appends to an Appender, for functions that write to a file."""

    def __init__(self, out: Appender) -> None:
        super().__init__()
        self._out = out

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self.closed:
            raise ValueError("the function has returned, and its file is complete")
        view = memoryview(data).cast("B")
        self._out.append(view)
        return len(view)

    def tell(self) -> int:
        return self._out.num_bytes


class UploadFile:
    """A scratch file that becomes an object when it is closed."""

    def __init__(self, storage: Storage, name: str, mode: str, encoding: str | None) -> None:
        self._storage = storage
        self._name = name
        self._scratch = tempfile.TemporaryDirectory(prefix="async_ckpt-")
        newline = None if encoding is None else "\n"
        self._file = open(  # noqa: SIM115
            os.path.join(self._scratch.name, "file"), mode, encoding=encoding, newline=newline
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def close(self) -> None:
        """Upload the file. Does nothing if it is already closed, as after an error."""
        if self._file.closed:
            return
        with self._scratch as folder:
            self._file.close()
            local = LocalStorage(folder)
            copy([Parcel(partial(local.open, "file"), self._name, local.sizes("")["file"])], self._storage)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            with self._scratch:
                self._file.close()
