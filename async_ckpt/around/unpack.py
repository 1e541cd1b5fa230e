"""`extract` and `unpack`: any tar, ours or another program's, back into a folder; safely, or not at all.

In: a path or URL, and a folder. Out: files. Knows nothing of: their content.

`tarfile`'s `data` filter extracts; but some versions of it have let links of links escape (CVE-2025-4517), and it
repairs members that should be refused. So each member is checked here first: its name alone keeps it in the folder,
it does not lie behind a link, and no link leads through another one's parent.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import re
import stat
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, cast

from ..errors import CorruptCheckpointError, NotCommittedError, NotFoundError, OccupiedError, UnsafeArchiveError
from ..format import zstd
from ..format.tarball import stays_inside
from ..loading.archives.find import opened_as_file
from ..spec import MIB
from ..storage.disk import free_bytes_at, full, translated
from ..storage.place import Anywhere, local_place, place_of, written_at
from ..storage.scratch import Scratch
from ..storage.sequential import ReadAhead

# Ten times the files of the largest checkpoint in the tests, which has 100,000.
MAX_MEMBERS: Final = 1_000_000
_GZIP_MAGIC: Final = b"\x1f\x8b"
# Headers and maps of holes are read as a whole: no name and no list of attributes is as long as this.
_MAX_HEADER_BYTES: Final = MIB
_MAX_NAME_BYTES: Final = 4096
# `tarfile` parses a number in a time that grows with its square (CVE-2024-6232); no header has one this long.
_LONG_NUMBER: Final = re.compile(rb"[0-9]{256}")
# The only member of an archive that SkyRL writes with persist=False.
_MARKER: Final = "MARKER"
_BUFFER_BYTES: Final = MIB


def extract(
    source: Anywhere,
    folder: Anywhere,
    *,
    max_bytes: int | None = None,
    max_file_bytes: int | None = None,
    max_members: int = MAX_MEMBERS,
) -> Path:
    """Extract a tar (plain, gzip or zstd, whatever its name) into `folder`, which must be new or empty. Returns the
    folder.

        async_ckpt.files.extract("s3://bucket/x.tar.gz", "out/x", max_bytes=10**10)

    The folder appears as a whole or not at all. `max_bytes` limits all files together, and `max_file_bytes` each of
    them. Without these, the limit is the free space on the disk.

    Raises UnsafeArchiveError if a member could do harm or a limit is exceeded, CorruptCheckpointError if the archive is
    truncated, damaged, or followed by another one, NotCommittedError if it is only a marker, StorageFullError,
    FileExistsError if the folder is not empty, FileNotFoundError if `source` does not exist, and ValueError if `folder`
    is not local.
    """
    target = local_place(written_at(folder), "extract to a local folder, and copy it with files.upload_directory")
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise OccupiedError(f"{target} already exists and is not an empty folder; give a new one")
    place = target.resolve()
    with Scratch(place.parent, place.name) as scratch:
        limits = _Limits(max_bytes, max_file_bytes, max_members)
        _extract(source, scratch.folder, limits)
        with translated(target):
            if place.is_dir():  # its owner has chosen the permissions
                scratch.folder.chmod(stat.S_IMODE(place.stat().st_mode))
            os.replace(scratch.folder, place)
    return target


@contextlib.contextmanager
def unpack(
    source: Anywhere,
    *,
    scratch: str | os.PathLike[str] | None = None,
    max_bytes: int | None = None,
    max_file_bytes: int | None = None,
    max_members: int = MAX_MEMBERS,
) -> Iterator[Path]:
    """Extract a tar into a folder that is removed at the end of the `with` block, however it ends.

        with async_ckpt.unpack("s3://bucket/x.tar") as folder:
            state = torch.load(folder / "model.pt")

    The folder is created in `scratch`, by default the system's temp folder. Everything else is as for
    `async_ckpt.files.extract`.
    """
    parent = local_place(tempfile.gettempdir() if scratch is None else scratch)
    with Scratch(parent, "unpacked") as own:
        limits = _Limits(max_bytes, max_file_bytes, max_members)
        _extract(source, own.folder, limits)
        yield own.folder


@dataclass(slots=True)
class _Limits:
    """The limits of one extraction, and the amounts so far."""

    max_bytes: int | None
    max_file_bytes: int | None
    max_members: int
    num_bytes: int = 0
    num_members: int = 0

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_file_bytes", "max_members"):
            limit = getattr(self, name)
            if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 0):
                raise ValueError(f"{name} must be a number, at least 0, such as 10**9, or None; got {limit!r:.100}")

    def take(self, member: tarfile.TarInfo, num_members: int, path: str) -> None:
        """Count a member, and the folders that it needs. Raises UnsafeArchiveError if a limit is exceeded."""
        self.num_members += num_members
        self.num_bytes += member.size
        for name, limit, amount in (
            ("max_members", self.max_members, self.num_members),
            ("max_file_bytes", self.max_file_bytes, member.size),
            ("max_bytes", self.max_bytes, self.num_bytes),
        ):
            if limit is not None and amount > limit:
                raise UnsafeArchiveError(
                    f"{path}: the member {member.name[:200]!r} exceeds {name}={limit:,}; raise the limit if the "
                    "archive is right",
                    path=path,
                    member=member.name[:200],
                )


def _extract(source: Anywhere, folder: Path, limits: _Limits) -> None:
    opened = opened_as_file(source)
    if opened is None:
        raise NotFoundError(f"{place_of(source).shown}: there is no such archive")
    reader, path = opened
    with ReadAhead(reader) as raw, _damage_translated(path):
        content = _ForwardFile(_decompressed(raw, path))
        with tarfile.open(fileobj=cast(Any, content), mode="r:", tarinfo=_StrictTarInfo) as tar:
            _extract_members(tar, content, folder, limits, path)
        _expect_end(content, path)
    if os.listdir(folder) == [_MARKER] and not (folder / _MARKER).is_dir():
        with open(folder / _MARKER, "rb") as file:
            text = file.read(300).decode(errors="replace").strip()
        raise NotCommittedError(
            f"{path} is only a marker, without weights: it was saved with persist=False ({text}); save it "
            "with persist=True",
            path=path,
            step=None,
        )


def _extract_members(tar: tarfile.TarFile, content: _ForwardFile, folder: Path, limits: _Limits, path: str) -> None:
    tar.copybufsize = _BUFFER_BYTES  # type: ignore[attr-defined]  # by default it copies 16 KiB at a time
    while (member := tar.next()) is not None:
        tar.members.clear()  # type: ignore[attr-defined]  # it would keep all of them
        if member.size < 0:
            raise _DamagedError("a member has a negative size")
        with translated(folder / member.name, needed_bytes=member.size, passing=(gzip.BadGzipFile,)):
            num_folders = _check_member(member, folder, path)
            limits.take(member, 1 + num_folders, path)
            _expect_room(member, folder)
            content.header_bytes = None
            tar.extract(member, folder, filter="data")
        content.header_bytes = _MAX_HEADER_BYTES
        if len(str(tar.pax_headers)) > _MAX_HEADER_BYTES:  # global headers accumulate
            raise _DamagedError("its global headers are too long")
    if not limits.num_members:
        raise _DamagedError("it is empty")


def _check_member(member: tarfile.TarInfo, folder: Path, path: str) -> int:
    """The number of missing folders on the way to a member. Raises UnsafeArchiveError if the member could do harm."""

    def refuse(why: str) -> NoReturn:
        name = member.name[:200]
        raise UnsafeArchiveError(
            f"{path}: the member {name!r} {why}; extract only archives from people you trust", path=path, member=name
        )

    parts = _parts(member.name)
    if len(os.fsencode(member.name)) > _MAX_NAME_BYTES:
        refuse("has a name that is too long")
    if member.name.startswith("/") or os.path.isabs(member.name):
        refuse("has an absolute name")
    if ".." in parts or (os.sep != "/" and any(os.sep in part for part in parts)):
        refuse("leads out of the folder")
    types = _existing_types(folder, parts)
    if any(kind != stat.S_IFDIR for kind in types[: len(parts) - 1]):
        refuse("is behind a link, or inside a file")
    if len(types) == len(parts) and not (member.isdir() and set(types) <= {stat.S_IFDIR}):
        refuse("would overwrite what is already there")
    if member.issym():
        if not stays_inside("/".join(parts), member.linkname):
            refuse(f"links to {member.linkname[:200]!r}, out of the folder")
    elif member.islnk():
        target = _parts(member.linkname)
        target_types = _existing_types(folder, target)
        if (
            member.linkname.startswith("/")
            or ".." in target
            or len(target_types) < len(target)
            or target_types[-1:] != [stat.S_IFREG]
        ):
            refuse(f"links to {member.linkname[:200]!r}, which is not an earlier file")
    elif not (member.isreg() or member.isdir()):
        refuse("is a device, a pipe, or something else that is not a file")
    return max(0, len(parts) - 1 - len(types))


def _parts(name: str) -> list[str]:
    return [part for part in name.split("/") if part not in ("", ".")]


def _existing_types(folder: Path, parts: Sequence[str]) -> list[int]:
    """The file types along a path, up to the first part that is missing or not a folder; no link is followed."""
    types: list[int] = []
    path = str(folder)
    for part in parts:
        path = os.path.join(path, part)
        try:
            types.append(stat.S_IFMT(os.lstat(path).st_mode))
        except FileNotFoundError:
            break
        if types[-1] != stat.S_IFDIR:
            break
    return types


def _expect_room(member: tarfile.TarInfo, folder: Path) -> None:
    """Raises StorageFullError if the disk has no room for a member, whose map of holes must be consistent."""
    runs: Any = member.sparse
    needed, end = member.size, 0
    if runs is not None:
        needed = 0
        for offset, length in runs:
            if length and (length < 0 or not end <= offset <= member.size - length):
                raise _DamagedError("its map of holes is not valid")
            needed, end = needed + length, max(end, offset + length)
    free = free_bytes_at(folder) if needed > _BUFFER_BYTES else None
    if free is not None and needed > free:
        raise full(folder, needed, free)


class _StrictTarInfo(tarfile.TarInfo):
    """Headers of tar members, in which any damage is an error.

    `tarfile` takes some damaged headers for the end of the archive; which ones depends on the version of Python.
    """

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> _StrictTarInfo:
        # Where no link can be made, `tarfile` looks through all members that follow for one to put in its place.
        if cast(_ForwardFile, tar.fileobj).header_bytes is None:
            raise _DamagedError("it has a link that cannot be made")
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except (tarfile.EmptyHeaderError, tarfile.TruncatedHeaderError) as error:  # type: ignore[attr-defined]
            raise _DamagedError("it is cut off") from error
        except tarfile.HeaderError as error:
            raise _DamagedError(str(error)) from error

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> _StrictTarInfo:
        info = super().frombuf(buf, encoding, errors)
        if info.size < 0:
            raise _DamagedError("a header gives a negative size")
        return info


class _DamagedError(Exception):
    """Damage in an archive; unlike its own errors, `tarfile` does not catch this one."""


# The errors that a hostile or broken archive makes `tarfile`, `gzip` and `zlib` raise.
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
def _damage_translated(path: str) -> Iterator[None]:
    """Translate errors about a hostile or broken archive into CorruptCheckpointError."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, _DAMAGE) and type(error).__name__ != "ZstdError":
            raise
        raise CorruptCheckpointError(
            f"{path}: it cannot be extracted ({error}); fetch it again, or use an earlier one", path=path
        ) from error


def _decompressed(raw: io.RawIOBase, path: str) -> Any:
    """The decompressed content of a file; its first bytes determine the format."""
    buffered = io.BufferedReader(raw, _BUFFER_BYTES)
    magic = buffered.peek(4)[:4]
    if magic.startswith(_GZIP_MAGIC):
        return gzip.GzipFile(fileobj=buffered)
    if zstd.begins(magic):
        try:
            import zstandard
        except ImportError:
            raise ImportError(f'{path} is compressed; pip install "async_ckpt[zstd]"') from None
        return zstandard.ZstdDecompressor().stream_reader(
            cast(Any, _TruncationGuard(buffered)), read_across_frames=True
        )
    return buffered


class _TruncationGuard:
    """Compressed data on its way to zstd's decompressor, which does not report a last frame that is cut off."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._frames = zstd.Follower()

    def read(self, num_bytes: int) -> bytes:
        data: bytes = self._file.read(num_bytes)
        self._frames.feed(data)
        if not data and not self._frames.is_whole:
            raise EOFError("it is cut off")
        return data


class _ForwardFile:
    """A file that is read forward only, with the `seek` that `tarfile` needs: back by at most a byte.

    `tarfile`'s own streams copy their buffer at every read, which is slow for many small members.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._at = 0  # offset of the next byte of `file`
        self._last = b""  # the byte before it
        self._wanted = 0
        self.header_bytes: int | None = _MAX_HEADER_BYTES  # that may still be read; None for data

    def tell(self) -> int:
        return self._wanted

    def seek(self, position: int) -> int:
        if position < self._at - 1:
            raise _DamagedError("its members are not in order")
        self._wanted = position
        return position

    def read(self, num_bytes: int) -> bytes:
        if self.header_bytes is None:
            return self._read(num_bytes)
        self.header_bytes -= num_bytes
        if self.header_bytes < 0:
            raise _DamagedError("it has a header that is too long")
        data = self._read(num_bytes)
        if _LONG_NUMBER.search(data):
            raise _DamagedError("it has a header that makes no sense")
        return data

    def _read(self, num_bytes: int) -> bytes:
        while self._at < self._wanted:
            if not self._take(min(_BUFFER_BYTES, self._wanted - self._at)):
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


def _expect_end(content: _ForwardFile, path: str) -> None:
    """Raises CorruptCheckpointError if anything but zeros follows the end of the archive."""
    content.header_bytes = None
    while rest := content.read(_BUFFER_BYTES):
        if rest.strip(b"\0"):
            raise CorruptCheckpointError(
                f"{path}: something follows the end of the archive, such as a second one; extract them one by one",
                path=path,
            )
