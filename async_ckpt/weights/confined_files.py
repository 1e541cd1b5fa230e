"""The files below one folder of this machine, accessed without following links.

In: a folder, and paths below it that use `/`. Out: files opened, locked, written, moved and deleted below that folder
only.
Knows nothing of: the content of files.

The folder itself may be a link, or be reached through one. Below it, each folder on the path to a file is opened
separately, and a link in its place is an error, because the target of the link must not change. Windows cannot open
folders, so every folder is checked there before each call.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from ..errors import StorageUnavailableError
from ..plumbing import disk, spec

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_O_NOFOLLOW: Final = getattr(os, "O_NOFOLLOW", 0)
_OPENS_FOLDERS: Final = os.open in os.supports_dir_fd and bool(_O_NOFOLLOW)
# The errors of opening a link, or a path through one.
_OF_LINKS: Final = frozenset({errno.ELOOP, errno.ENOTDIR, errno.EMLINK})
_PIECE_BYTES: Final = 4 * spec.MIB
_TEMP: Final = ".tmp"


class _Location(NamedTuple):
    """A name in an open folder, or a whole path if folders cannot be opened."""

    name: str
    folder: int | None


class ConfinedFolder:
    """The files below one folder. Methods raise this library's errors, and FileNotFoundError where documented."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __repr__(self) -> str:
        return f"<ConfinedFolder {self.folder}>"

    @contextmanager
    def _locate(self, name: str, *, make: bool = False) -> Iterator[_Location]:
        """The location of a file, valid within the block. With `make`, missing parent folders are created."""
        *folders, last = name.split("/")
        if not _OPENS_FOLDERS:
            yield _Location(str(self._path_without_links(folders, make=make) / last), None)
            return
        at = self.folder
        fd = os.open(at, os.O_RDONLY | disk.O_DIRECTORY | disk.O_CLOEXEC)
        try:
            for part in folders:
                at /= part
                outer, fd = fd, self._open_folder(fd, part, at, make=make)
                disk.close_quietly(outer)
            yield _Location(last, fd)
        finally:
            disk.close_quietly(fd)

    def _open_folder(self, folder: int, name: str, path: Path, *, make: bool) -> int:
        """Open a folder in an open folder."""
        flags = os.O_RDONLY | disk.O_DIRECTORY | disk.O_CLOEXEC | _O_NOFOLLOW
        try:
            return os.open(name, flags, dir_fd=folder)
        except FileNotFoundError:
            if not make:
                raise
        except OSError as error:
            if error.errno in _OF_LINKS:
                raise self._refusal(path) from error
            raise
        with suppress(FileExistsError):
            os.mkdir(name, dir_fd=folder)
        return self._open_folder(folder, name, path, make=False)

    def _path_without_links(self, folders: list[str], *, make: bool) -> Path:
        at = self.folder
        for part in folders:
            at /= part
            if make:
                with suppress(FileExistsError):
                    at.mkdir()
            if not stat.S_ISDIR(os.lstat(at).st_mode):
                raise self._refusal(at)
        return at

    def _refusal(self, path: Path) -> StorageUnavailableError:
        kind = "a link" if path.is_symlink() else "not a regular file"
        return StorageUnavailableError(
            f"{path} is {kind}, but only files in {self.folder} may change; move it away, or use another folder",
            path=str(path),
        )

    def stat(self, name: str) -> os.stat_result | None:
        """The status of a file, or of a link itself; None if it does not exist, or its path leads through a link."""
        with disk.translated(self.folder / name):
            try:
                with self._locate(name) as location:
                    return os.stat(location.name, dir_fd=location.folder, follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError, StorageUnavailableError):
                return None

    def size(self, name: str) -> int | None:
        """The size of a regular file; None if no regular file has this name."""
        status = self.stat(name)
        return status.st_size if status is not None and stat.S_ISREG(status.st_mode) else None

    def sizes(self, folder: str) -> dict[str, int]:
        """The sizes of the files below a folder, by their paths relative to it."""
        with disk.translated(self.folder / folder):
            top = self.folder / folder
            paths = [Path(at) / name for at, _, names in os.walk(top) for name in names]
            return {path.relative_to(top).as_posix(): path.lstat().st_size for path in sorted(paths)}

    def open(self, name: str, flags: int, *, make: bool = False) -> int:
        """Open a file like `os.open`. With `make`, missing parent folders are created. Raises FileNotFoundError."""
        flags |= disk.O_CLOEXEC | disk.O_BINARY | disk.O_NONBLOCK | _O_NOFOLLOW
        with disk.translated(self.folder / name, passing=(FileNotFoundError,)):
            try:
                with self._locate(name, make=make) as location:
                    if not _OPENS_FOLDERS and os.path.islink(location.name):
                        raise self._refusal(self.folder / name)
                    fd = os.open(location.name, flags, 0o666, dir_fd=location.folder)
            except OSError as error:
                if error.errno in {*_OF_LINKS, errno.EISDIR, errno.ENXIO}:
                    raise self._refusal(self.folder / name) from error
                raise
            if stat.S_ISREG(os.fstat(fd).st_mode):
                return fd
            disk.close_quietly(fd)
            raise self._refusal(self.folder / name)

    @contextmanager
    def lock_file(self, name: str) -> Iterator[int]:
        """Open a file for locking. The lock ends with the block, or with this process. Creates the folder."""
        with disk.translated(self.folder):
            os.makedirs(self.folder, exist_ok=True)
        fd = self.open(name, os.O_CREAT | os.O_RDWR, make=True)
        try:
            yield fd
        finally:
            disk.close_quietly(fd)

    def try_lock(self, fd: int, *, alone: bool) -> bool:
        """Lock a file, exclusively (`alone`) or shared, without waiting. Returns True on systems without file locks."""
        try:
            with disk.translated(self.folder, passing=(BlockingIOError,)):
                if fcntl is not None:
                    fcntl.flock(fd, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    @staticmethod
    def unlock(fd: int) -> None:
        if fcntl is not None:
            fcntl.flock(fd, fcntl.LOCK_UN)

    def read(self, name: str) -> bytes:
        """The content of a file. Raises FileNotFoundError."""
        with (
            disk.translated(self.folder / name, passing=(FileNotFoundError,)),
            os.fdopen(self.open(name, os.O_RDONLY), "rb") as file,
        ):
            return file.read()

    def put(
        self, name: str, pieces: Iterable[bytes | memoryview], *, num_bytes: int = 0, mode: int | None = None
    ) -> None:
        """Write a new file, and create missing parent folders. Disk space for `num_bytes` is allocated first."""
        with disk.translated(self.folder / name):
            fd = self.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, make=True)
            with os.fdopen(fd, "wb") as file:
                disk.preallocate(fd, num_bytes, self.folder / name)
                if mode is not None and hasattr(os, "fchmod"):
                    os.fchmod(fd, mode)
                file.writelines(pieces)
                if num_bytes and file.tell() != num_bytes:
                    raise OSError(errno.EIO, f"{file.tell():,} bytes came of {num_bytes:,}")

    def replace(self, name: str, data: bytes) -> None:
        """Write a small file atomically. No other process may write it at the same time."""
        self.delete(name + _TEMP)
        self.put(name + _TEMP, [data])
        self.move(name + _TEMP, name)

    def move(self, name: str, to: str) -> None:
        """Rename a file or link, replacing an existing one. Missing parent folders are created."""
        with disk.translated(self.folder / to), self._locate(name) as source, self._locate(to, make=True) as target:
            os.replace(source.name, target.name, src_dir_fd=source.folder, dst_dir_fd=target.folder)

    def link(self, name: str, to: str) -> bool:
        """Create a hard link to a file or link. Returns False if the file system has no hard links."""
        with disk.translated(self.folder / to), self._locate(name) as source, self._locate(to, make=True) as target:
            try:
                os.link(
                    source.name,
                    target.name,
                    src_dir_fd=source.folder,
                    dst_dir_fd=target.folder,
                    follow_symlinks=False,
                )
            except (OSError, NotImplementedError):
                return False
        return True

    def delete(self, name: str) -> None:
        """Delete a file or link if it exists, and the folders that this leaves empty."""
        with (
            disk.translated(self.folder / name),
            suppress(FileNotFoundError, NotADirectoryError, StorageUnavailableError),
            self._locate(name) as location,
        ):
            os.unlink(location.name, dir_fd=location.folder)
        with suppress(OSError, StorageUnavailableError):
            while "/" in name:
                name = name.rpartition("/")[0]
                with self._locate(name) as location:
                    os.rmdir(location.name, dir_fd=location.folder)

    def delete_all(self, name: str) -> None:
        """Delete a file, a link itself, or a folder with its content."""
        status = self.stat(name)
        with disk.translated(self.folder / name):
            if status is None:
                return
            if not stat.S_ISDIR(status.st_mode):
                self.delete(name)
                return
            with self._locate(name) as location:
                shutil.rmtree(location.name, dir_fd=location.folder)

    def part(self, name: str, by: str) -> None:
        """Replace a file that has several hard links by a copy, so that the other names keep the old file.

        The copy is written under the name `by`, and then renamed.
        """
        self.delete_all(by)
        try:
            with disk.translated(self.folder / name), os.fdopen(self.open(name, os.O_RDONLY), "rb") as source:
                status, pieces = os.fstat(source.fileno()), iter(partial(source.read, _PIECE_BYTES), b"")
                self.put(by, pieces, num_bytes=status.st_size, mode=stat.S_IMODE(status.st_mode))
            self.move(by, name)
        finally:
            self.delete(by)


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data`."""
    while data:
        num_written = disk.pwrite(fd, data, offset)
        data, offset = data[num_written:], offset + num_written
