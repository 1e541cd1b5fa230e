"""The members of a tar of any program, read forward, in which damage is an error.

In: the bytes of a file, plain or compressed by gzip or zstd. Out: its members, as `tarfile` reads them. Knows nothing
of: the use of the members.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import re
import tarfile
import zlib
from collections.abc import Iterator
from typing import Any, Final, cast

from ...core.format import zstd
from ...core.spec import MIB
from ...errors import CorruptCheckpointError

_GZIP_MAGIC: Final = b"\x1f\x8b"
# Headers and maps of holes are read as a whole. Names and lists of attributes are shorter than this.
MAX_HEADER_BYTES: Final = MIB
# `tarfile` parses a number in time quadratic in its length (CVE-2024-6232); no valid header has one this long.
_LONG_NUMBER: Final = re.compile(rb"[0-9]{256}")
BUFFER_BYTES: Final = MIB


def members_of(file: io.BufferedReader, path: str) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """The members of an archive, each with the `TarFile` to read it from. The data of a member may be read until the
    next one is requested. Raises DamagedTarError, also for an archive without members, and CorruptCheckpointError if
    the end is followed by other bytes than zeros.
    """
    content, num_members = ForwardFile(file), 0
    with tarfile.open(fileobj=cast(Any, content), mode="r:", tarinfo=StrictTarInfo) as tar:
        tar.copybufsize = BUFFER_BYTES  # type: ignore[attr-defined]  # by default it copies 16 KiB at a time
        while (member := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # tarfile would keep all of them
            if member.size < 0:
                raise DamagedTarError("a member has a negative size")
            content.header_bytes = None
            yield tar, member
            content.header_bytes = MAX_HEADER_BYTES
            if len(str(tar.pax_headers)) > MAX_HEADER_BYTES:  # global headers accumulate
                raise DamagedTarError("its global headers are too long")
            num_members += 1
    if not num_members:
        raise DamagedTarError("it is empty")
    content.header_bytes = None
    while rest := content.read(BUFFER_BYTES):
        if rest.strip(b"\0"):
            raise CorruptCheckpointError(
                f"{path}: more data follows the end of the archive, such as a second archive; extract them one by one",
                path=path,
            )


class StrictTarInfo(tarfile.TarInfo):
    """Headers of tar members, in which any damage is an error.

    `tarfile` takes some damaged headers for the end of the archive, depending on the version of Python.
    """

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> StrictTarInfo:
        # If a link cannot be created, `tarfile` searches all following members for a file to extract instead.
        if cast(ForwardFile, tar.fileobj).header_bytes is None:
            raise DamagedTarError("it has a link that cannot be created")
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except (tarfile.EmptyHeaderError, tarfile.TruncatedHeaderError) as error:  # type: ignore[attr-defined]
            raise DamagedTarError("it is cut off") from error
        except tarfile.HeaderError as error:
            raise DamagedTarError(str(error)) from error

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> StrictTarInfo:
        info = super().frombuf(buf, encoding, errors)
        if info.size < 0:
            raise DamagedTarError("a header gives a negative size")
        return info


class DamagedTarError(Exception):
    """Damage in an archive. `tarfile` does not catch it, unlike its own errors."""


# The errors that a hostile or broken archive makes `tarfile`, `gzip` and `zlib` raise.
_DAMAGE: Final = (
    DamagedTarError,
    tarfile.TarError,
    gzip.BadGzipFile,
    zlib.error,
    EOFError,
    ValueError,
    ArithmeticError,
    LookupError,
    RecursionError,
    MemoryError,
)


@contextlib.contextmanager
def damage_translated(path: str, what: str) -> Iterator[None]:
    """Translate errors about a hostile or broken archive into CorruptCheckpointError, whose text begins with `what`."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, _DAMAGE) and type(error).__name__ != "ZstdError":
            raise
        raise CorruptCheckpointError(
            f"{path}: {what} ({error}); fetch it again, or use an earlier one", path=path
        ) from error


def decompressed(raw: io.RawIOBase, path: str) -> io.BufferedReader:
    """The decompressed content of a file, whose first bytes determine the format."""
    buffered: io.BufferedReader = io.BufferedReader(raw, BUFFER_BYTES)
    magic = buffered.peek(4)[:4]
    if magic.startswith(_GZIP_MAGIC):
        return io.BufferedReader(cast(Any, gzip.GzipFile(fileobj=buffered)), BUFFER_BYTES)
    if zstd.begins(magic):
        try:
            import zstandard
        except ImportError:
            raise ImportError(f'{path} is compressed; pip install "async_ckpt[zstd]"') from None
        stream = zstandard.ZstdDecompressor().stream_reader(
            cast(Any, _TruncationGuard(buffered)), read_across_frames=True
        )
        return io.BufferedReader(stream, BUFFER_BYTES)
    return buffered


class _TruncationGuard:
    """Compressed data on its way to zstd's decompressor, which does not report a truncated last frame."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._frames = zstd.Follower()

    def read(self, num_bytes: int) -> bytes:
        data: bytes = self._file.read(num_bytes)
        self._frames.feed(data)
        if not data and not self._frames.is_whole:
            raise EOFError("it is cut off")
        return data


class ForwardFile:
    """A forward-only file, with the `seek` that `tarfile` needs: back by at most one byte.

    `tarfile`'s own streams copy their buffer at every read, which is slow for many small members.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._at = 0  # offset of the next byte of `file`
        self._last = b""  # the byte before it
        self._wanted = 0
        self.header_bytes: int | None = MAX_HEADER_BYTES  # that may still be read; None while reading data

    def tell(self) -> int:
        return self._wanted

    def seek(self, position: int) -> int:
        if position < self._at - 1:
            raise DamagedTarError("its members are not in order")
        self._wanted = position
        return position

    def read(self, num_bytes: int) -> bytes:
        if self.header_bytes is None:
            return self._read(num_bytes)
        self.header_bytes -= num_bytes
        if self.header_bytes < 0:
            raise DamagedTarError("it has a header that is too long")
        data = self._read(num_bytes)
        if _LONG_NUMBER.search(data):
            raise DamagedTarError("it has an invalid header")
        return data

    def _read(self, num_bytes: int) -> bytes:
        while self._at < self._wanted:
            if not self._take(min(BUFFER_BYTES, self._wanted - self._at)):
                return b""
        if self._wanted < self._at and num_bytes:
            self._wanted += 1
            return self._last + self._read(num_bytes - 1)
        data = self._take(num_bytes)
        self._wanted = self._at
        return data

    def _take(self, num_bytes: int) -> bytes:
        """The next `num_bytes` bytes, or fewer at the end of the file."""
        parts: list[bytes] = []
        while num_bytes and (part := self._file.read(num_bytes)):
            parts.append(part)
            num_bytes -= len(part)
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        self._at += len(data)
        self._last = data[-1:] or self._last
        return data
