"""`extract` and `unpack`: any tar, ours or another's, back into a folder; safely, or not at all.

In: a path or URL, and a folder. Out: files. Knows nothing of: what they hold.

`tarfile`'s own `data` filter does the work; but versions of it have let links of links escape (CVE-2025-4517), and it
mends what should be refused. So what a member may be is decided here, first: every name stays in the folder by its
text alone, no member lies behind a link, and no link leads through another one's parent.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

from .errors import CorruptCheckpointError, NotCommittedError, UnsafeArchiveError
from .format import zstd
from .format.tarball import stays_inside
from .functional import opened_as_file
from .spec import MIB
from .storage.local import free_bytes_at, full, translated
from .storage.read_ahead import ReadAhead
from .storage.scratch import Scratch
from .storage.url import Engine, Where, shown

# What a checkpoint may be made of; the one of 100,000 files is a tenth of it.
MAX_MEMBERS: Final = 1_000_000
_GZIP_MAGIC: Final = b"\x1f\x8b"
# Headers are read as a whole: one that says that it is longer than any name or list of attributes is a bomb.
_MAX_HEADER_BYTES: Final = MIB
_HEADERS: Final = frozenset(
    {
        tarfile.XHDTYPE,
        tarfile.XGLTYPE,
        tarfile.SOLARIS_XHDTYPE,
        tarfile.GNUTYPE_LONGNAME,
        tarfile.GNUTYPE_LONGLINK,
    }
)
# SkyRL writes such an archive where weights were not to be kept.
_MARKER: Final = "MARKER"
_BUFFER_BYTES: Final = MIB


def extract(
    source: Where,
    folder: str | os.PathLike[str],
    *,
    max_bytes: int | None = None,
    max_file_bytes: int | None = None,
    max_members: int = MAX_MEMBERS,
    storage_options: Mapping[str, Any] | None = None,
    engine: Engine | None = None,
    fs: Any = None,
) -> Path:
    """Extract a tar (plain, gzip or zstd, whatever its name says) into `folder`, new or empty; the folder.

    It appears whole or not at all. `max_bytes` is of all files together, `max_file_bytes` of each; without them what
    the disk has free is the limit. Raises UnsafeArchiveError for members that would do harm and for too many bytes or
    members, CorruptCheckpointError for what is cut off, damaged, or several archives in one, NotCommittedError for an
    archive that is a mere marker, StorageFullError, FileExistsError for a folder that holds something, and
    FileNotFoundError when there is nothing at `source`.
    """
    target = Path(folder).absolute()
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise FileExistsError(f"{target} is there already, and not an empty folder; give a new one")
    place = {"storage_options": storage_options, "engine": engine, "fs": fs}
    scratch = Scratch(target.parent, target.name)
    try:
        limits = _Limits(max_bytes, max_file_bytes, max_members)
        _extract(source, scratch.folder, limits, place)
        with translated(target):
            os.replace(scratch.folder, target)
            scratch.folder.mkdir()
    finally:
        scratch.remove()
    return target


@contextlib.contextmanager
def unpack(
    source: Where,
    *,
    scratch: str | os.PathLike[str] | None = None,
    max_bytes: int | None = None,
    max_file_bytes: int | None = None,
    max_members: int = MAX_MEMBERS,
    storage_options: Mapping[str, Any] | None = None,
    engine: Engine | None = None,
    fs: Any = None,
) -> Iterator[Path]:
    """What is in a tar, in a folder that is removed at the end of the `with` block, however it ends.

    It lies in the system's temp folder or in `scratch`. Everything else is as for `extract`.
    """
    parent = Path(tempfile.gettempdir() if scratch is None else scratch).absolute()
    owner = Scratch(parent, "unpacked")
    try:
        yield extract(
            source,
            owner.folder / "unpacked",
            max_bytes=max_bytes,
            max_file_bytes=max_file_bytes,
            max_members=max_members,
            storage_options=storage_options,
            engine=engine,
            fs=fs,
        )
    finally:
        owner.remove()


@dataclass(slots=True)
class _Limits:
    """What may still come."""

    max_bytes: int | None
    max_file_bytes: int | None
    max_members: int
    num_bytes: int = 0
    num_members: int = 0


@dataclass(slots=True)
class _Seen:
    """Members so far, by their path in parts: what a later one may lie in, or link to."""

    folders: set[tuple[str, ...]] = field(default_factory=lambda: {()})
    files: set[tuple[str, ...]] = field(default_factory=set)
    links: set[tuple[str, ...]] = field(default_factory=set)


def _extract(source: Where, folder: Path, limits: _Limits, place: dict[str, Any]) -> None:
    opened = opened_as_file(source, place)
    if opened is None:
        raise FileNotFoundError(f"{shown(os.fspath(source))}: there is no such archive")
    reader, path = opened
    with ReadAhead(reader) as raw, _damage_told(path):
        content: Any = _Forward(_decompressed(raw, path))
        with tarfile.open(fileobj=content, mode="r:", tarinfo=_Info) as tar:
            tar.copybufsize = _BUFFER_BYTES  # type: ignore[attr-defined]  # it copies by 16 KiB otherwise
            _extract_members(tar, folder, limits, path)
        _expect_end(content, path)


def _extract_members(tar: tarfile.TarFile, folder: Path, limits: _Limits, path: str) -> None:
    seen = _Seen()
    while (member := tar.next()) is not None:
        tar.members.clear()  # type: ignore[attr-defined]  # or it would keep all of them
        parts = _checked(member, seen, path)
        _count(member, limits, folder, path)
        if not parts:
            continue  # the folder itself
        with translated(folder.joinpath(*parts)):
            tar.extract(member, folder, filter="data")
    if seen.files == {(_MARKER,)} and len(seen.folders) == 1 and not seen.links:
        text = (folder / _MARKER).read_bytes()[:300].decode(errors="replace").strip()
        raise NotCommittedError(
            f"{path} is a mere marker, without weights: it was saved with persist=False ({text}); save it with persist=True",
            path=path,
            step=None,
        )


def _checked(member: tarfile.TarInfo, seen: _Seen, path: str) -> tuple[str, ...]:
    """The member's path in parts, when nothing speaks against it. Raises UnsafeArchiveError."""

    def refuse(why: str) -> NoReturn:
        name = member.name[:200]
        raise UnsafeArchiveError(
            f"{path}: the member {name!r} {why}; extract only what comes from people that you trust",
            path=path,
            member=name,
        )

    parts = tuple(part for part in member.name.split("/") if part not in ("", "."))
    if member.name.startswith("/") or os.path.isabs(member.name):
        refuse("has an absolute name")
    if ".." in parts or (os.sep != "/" and any(os.sep in part for part in parts)):
        refuse("leads out of the folder")
    for depth in range(1, len(parts)):
        if parts[:depth] in seen.links or parts[:depth] in seen.files:
            refuse("lies behind a link, or in a file")
        seen.folders.add(parts[:depth])
    if member.isdir():
        if parts in seen.links or parts in seen.files:
            refuse("is there already")
        seen.folders.add(parts)
        return parts
    if not parts or parts in seen.links or parts in seen.files or parts in seen.folders:
        refuse("is there already")
    if member.issym():
        if not stays_inside("/".join(parts), member.linkname):
            refuse(f"links to {member.linkname[:200]!r}, out of the folder")
        seen.links.add(parts)
    elif member.islnk():
        target = tuple(part for part in member.linkname.split("/") if part not in ("", "."))
        if member.linkname.startswith("/") or target not in seen.files:
            refuse(f"links to {member.linkname[:200]!r}, which is no file before it")
        seen.files.add(parts)
    elif member.isreg():
        seen.files.add(parts)
    else:
        refuse("is a device, a pipe, or something else that is no file")
    return parts


def _count(member: tarfile.TarInfo, limits: _Limits, folder: Path, path: str) -> None:
    limits.num_members += 1
    limits.num_bytes += max(0, member.size)
    told: tuple[str, int | None] | None = None
    if limits.num_members > limits.max_members:
        told = "max_members", limits.max_members
    elif limits.max_file_bytes is not None and member.size > limits.max_file_bytes:
        told = "max_file_bytes", limits.max_file_bytes
    elif limits.max_bytes is not None and limits.num_bytes > limits.max_bytes:
        told = "max_bytes", limits.max_bytes
    if told:
        raise UnsafeArchiveError(
            f"{path}: the member {member.name[:200]!r} goes beyond {told[0]}={told[1]:,}; raise it if that is right",
            path=path,
            member=member.name[:200],
        )
    sparse = getattr(member, "sparse", None)
    needed = member.size if sparse is None else sum(length for _, length in sparse)
    free = free_bytes_at(folder) if needed > _BUFFER_BYTES else None
    if free is not None and needed > free:
        raise full(folder, needed, free)


class _Info(tarfile.TarInfo):
    """A header that is not what it should be is an error; `tarfile` takes it for the end."""

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> _Info:
        try:
            info = super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise _DamagedError("it is cut off" if len(buf) < tarfile.BLOCKSIZE else str(error)) from error
        if info.type in _HEADERS and not 0 <= info.size <= _MAX_HEADER_BYTES:
            raise _DamagedError(f"it has a header of {info.size:,} bytes")
        if info.size < 0:
            raise _DamagedError("it has a member of less than no bytes")
        return info


class _DamagedError(Exception):
    """What `tarfile` must not swallow, as it does its own errors."""


# What a hostile or broken archive makes `tarfile`, `gzip` and `zlib` raise.
_DAMAGE: Final = (
    _DamagedError,
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
def _damage_told(path: str) -> Iterator[None]:
    """Whatever a hostile or broken archive makes these packages raise is one error."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, _DAMAGE) and type(error).__name__ != "ZstdError":
            raise
        raise CorruptCheckpointError(
            f"{path}: it cannot be extracted ({error}); fetch it again, or use an earlier one", path=path
        ) from error


def _decompressed(raw: io.RawIOBase, path: str) -> Any:
    """What is in the file, by what its first bytes say."""
    buffered = io.BufferedReader(raw, _BUFFER_BYTES)
    magic = buffered.peek(4)[:4]
    if magic.startswith(_GZIP_MAGIC):
        return gzip.GzipFile(fileobj=buffered)
    if magic == zstd.MAGIC:
        try:
            import zstandard
        except ImportError:
            raise ImportError(f'{path} is compressed; pip install "async_ckpt[zstd]"') from None
        return zstandard.ZstdDecompressor().stream_reader(buffered, read_across_frames=True)
    return buffered


class _Forward:
    """A file that goes forward only, as `tarfile` needs one that seeks: back by no more than a byte.

    Its own streams copy what they hold with every read, which is slow where there are many small members.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._at = 0  # of the next byte of `file`
        self._last = b""  # the byte before it
        self._wanted = 0

    def tell(self) -> int:
        return self._wanted

    def seek(self, position: int) -> int:
        if position < self._at - 1:
            raise _DamagedError("its members are not in order")
        self._wanted = position
        return position

    def read(self, num_bytes: int) -> bytes:
        while self._at < self._wanted:
            if not self._take(min(_BUFFER_BYTES, self._wanted - self._at)):
                return b""
        if self._wanted < self._at and num_bytes:
            self._wanted += 1
            return self._last + self.read(num_bytes - 1)
        data = self._take(num_bytes)
        self._wanted = self._at
        return data

    def _take(self, num_bytes: int) -> bytes:
        """As many bytes as there are, up to this."""
        parts: list[bytes] = []
        while num_bytes and (part := self._file.read(num_bytes)):
            parts.append(part)
            num_bytes -= len(part)
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        self._at += len(data)
        self._last = data[-1:] or self._last
        return data


def _expect_end(content: _Forward, path: str) -> None:
    """Nothing but zeros may follow the end of the archive."""
    while rest := content.read(_BUFFER_BYTES):
        if rest.strip(b"\0"):
            raise CorruptCheckpointError(
                f"{path}: something follows the end of the archive, such as a second one; extract them one by one",
                path=path,
            )
