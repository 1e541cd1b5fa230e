"""`extract` and `unpack`: any tar, ours or another program's, extracted to a folder, or refused if it is unsafe.

In: a path or URL, and a folder. Out: files. Knows nothing of: their content.

Extraction uses `tarfile`'s `data` filter. But some versions of it let chains of links escape (CVE-2025-4517), and it
repairs members that should be refused. So each member is checked here first: its name must stay in the folder by
itself, its path must not go through a link, and the target of a link must not go through another link's parent.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import stat
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from ...core.format.tar import BLOCK
from ...core.format.tar_of_files import stays_inside
from ...core.loading.archives.find import opened_as_file
from ...core.spec import is_number
from ...core.storage.disk import free_bytes_at, full, translated
from ...core.storage.place import Anywhere, local_place, place_of, written_at
from ...errors import CorruptCheckpointError, NotCommittedError, NotFoundError, OccupiedError, UnsafeArchiveError
from ..foreign.foreign_files import NEEDED_BYTES, foreign_file, is_tar_header
from ..foreign.read_ahead import ReadAhead
from ..foreign.tar_stream import BUFFER_BYTES, DamagedTarError, damage_translated, decompressed, members_of
from .scratch import Scratch, refuse_current

# Ten times the files of the largest checkpoint in the tests, which has 100,000.
MAX_MEMBERS: Final = 1_000_000
_MAX_NAME_BYTES: Final = 4096
# The only member of an archive that SkyRL writes with persist=False.
_MARKER: Final = "MARKER"


def extract(
    source: Anywhere,
    folder: Anywhere,
    *,
    max_bytes: int | None = None,
    max_file_bytes: int | None = None,
    max_members: int = MAX_MEMBERS,
) -> Path:
    """Extract a tar (plain, gzip or zstd, regardless of its name) to `folder`, which must be new or empty. Returns the
    folder.

        async_ckpt.files.extract("s3://bucket/x.tar.gz", "out/x", max_bytes=10**10)

    The folder appears as a whole or not at all. `max_bytes` limits the size of all files together, and `max_file_bytes`
    the size of each file. Without them, the limit is the free space on the disk.

    Raises UnsafeArchiveError if a member could do harm or a limit is exceeded, CorruptCheckpointError if it is no tar,
    truncated, damaged, or followed by another one, NotCommittedError if it is only a marker, StorageFullError,
    FileExistsError if the folder is not empty, FileNotFoundError if `source` is not a file, and ValueError if `folder`
    is not local or contains the current folder.
    """
    target = local_place(written_at(folder), "extract to a local folder, and copy it with files.upload_directory")
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise OccupiedError(f"{target} already exists and is not an empty folder; give a new one")
    refuse_current(target)
    place = target.resolve()
    with Scratch(place.parent, place.name) as scratch:
        limits = _Limits(max_bytes, max_file_bytes, max_members)
        _extract(source, scratch.folder, limits)
        with translated(target):
            if place.is_dir():  # keep the permissions of the existing folder
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
    """Extract a tar to a folder that exists until the end of the `with` block.

        with async_ckpt.unpack("s3://bucket/x.tar") as folder:
            state = torch.load(folder / "model.pt")

    The folder is created in `scratch`, by default the system's temp folder. The other arguments and the errors are
    those of `async_ckpt.files.extract`.
    """
    parent = local_place(tempfile.gettempdir() if scratch is None else scratch)
    with Scratch(parent, "unpacked") as own:
        limits = _Limits(max_bytes, max_file_bytes, max_members)
        _extract(source, own.folder, limits)
        yield own.folder


@dataclass(slots=True)
class _Limits:
    """The limits of one extraction, and the amounts extracted so far."""

    max_bytes: int | None
    max_file_bytes: int | None
    max_members: int
    num_bytes: int = 0
    num_members: int = 0

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_file_bytes", "max_members"):
            limit = getattr(self, name)
            if limit is not None and (not is_number(limit) or not limit >= 0):
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
        raise NotFoundError(f"{place_of(source).shown}: there is no such archive; give a file, not a folder")
    reader, path = opened
    with ReadAhead(reader) as raw, damage_translated(path, "it cannot be extracted"):
        content = decompressed(raw, path)
        head = content.peek(NEEDED_BYTES)[:NEEDED_BYTES]
        if not is_tar_header(head[:BLOCK]) and (kind := foreign_file(head, path=path)) is not None:
            raise CorruptCheckpointError(f"{path}: it cannot be extracted, since this is {kind}", path=path)
        for tar, member in members_of(content, path):
            with translated(folder / member.name, needed_bytes=member.size, passing=(gzip.BadGzipFile,)):
                num_folders = _check_member(member, folder, path)
                limits.take(member, 1 + num_folders, path)
                _expect_room(member, folder)
                tar.extract(member, folder, filter="data")
    if os.listdir(folder) == [_MARKER] and not (folder / _MARKER).is_dir():
        with open(folder / _MARKER, "rb") as file:
            text = file.read(300).decode(errors="replace").strip()
        raise NotCommittedError(
            f"{path} is only a marker, without weights: it was saved with persist=False ({text}); save it "
            "with persist=True",
            path=path,
            step=None,
        )


def _check_member(member: tarfile.TarInfo, folder: Path, path: str) -> int:
    """The number of parent folders that a member lacks. Raises UnsafeArchiveError if the member could do harm."""

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
    """The file types along a path, up to the first part that is missing or not a folder. Follows no links."""
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
    """Raise StorageFullError if the disk has no room for a member, or DamagedTarError if its map of holes is bad."""
    runs: Any = member.sparse
    needed, end = member.size, 0
    if runs is not None:
        needed = 0
        for offset, length in runs:
            if length and (length < 0 or not end <= offset <= member.size - length):
                raise DamagedTarError("its sparse map is not valid")
            needed, end = needed + length, max(end, offset + length)
    free = free_bytes_at(folder) if needed > BUFFER_BYTES else None
    if free is not None and needed > free:
        raise full(folder, needed, free)
