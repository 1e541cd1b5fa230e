"""The local disk, or anything mounted like one.

In: segments at offsets. Out: files that survive a power cut: temp name, fsync, rename, fsync of the folder.
Knows nothing of: what is in the files.

Archives are written with O_DIRECT if the file system supports it. Only a write shows whether it does: on some file
systems `open` succeeds and `write` fails. The first refused write switches its file, and no other, to buffered writes.

A file that is being written is locked until `close` by a `fcntl` record lock, under its temp name and under its final
name. If the lock of a leftover is free, its writer has ended, on this host or another that shares the file system.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

from ...errors import StorageUnavailableError
from ..spec import PAGE_BYTES, SEGMENT_BYTES
from . import locks
from .disk import (
    address,
    close_quietly,
    full,
    identity,
    make_folder,
    open_regular,
    open_to_change,
    pread_into,
    preallocate,
    pwrite,
    read_regular,
    refuse_dangling,
    refuse_special,
    remove_if_empty,
    rename_new,
    sync_file,
    sync_folder,
    translated,
)
from .interface import MemoryLoan, Reader, Sink, Storage
from .store_facts import ORPHAN_SECONDS
from .volatile import free_bytes_in, is_in_memory

try:
    import fcntl
except ImportError:  # Windows: no record locks, so nothing is ever swept
    fcntl = None  # type: ignore[assignment]


_O_DIRECT: Final = getattr(os, "O_DIRECT", 0)
_RWF_NOWAIT: Final = getattr(os, "RWF_NOWAIT", 0)  # Linux
_REFUSES_DIRECT: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})
_NO_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})


class LocalStorage(Storage):
    """One folder and everything below it. The folder need not exist until something is written. Thread-safe."""

    remote = False
    in_order = False

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()

    def __repr__(self) -> str:
        return f"<LocalStorage {self.root}>"

    @property
    def locks_tell(self) -> bool:
        return is_in_memory(self.root)

    def locate(self, path: str) -> str:
        return str(self.root / path)

    def part_segments(self, num_bytes: int, segment_bytes: int) -> int:  # noqa: ARG002
        return 1

    def create(
        self,
        path: str,
        *,
        num_bytes: int,
        segment_bytes: int = SEGMENT_BYTES,  # noqa: ARG002
        max_segments: int | None = None,  # noqa: ARG002
        exact: bool = True,
    ) -> LocalSink:
        target = self.root / path
        with translated(target):
            locks.delete_left(self.root)  # first, since it frees space
            refuse_special(target)
            free = free_bytes_in(target.parent)
            if exact and free is not None and free < num_bytes:
                raise full(target, num_bytes, free)
            was_there = target.parent.is_dir()
            make_folder(target.parent)
            try:
                return LocalSink(target, num_bytes, exact=exact, remove_folder=not was_there)
            except BaseException:
                if not was_there:
                    remove_if_empty(target.parent)
                raise

    def open(self, path: str) -> LocalReader:
        with translated(self.root / path, passing=(FileNotFoundError, IsADirectoryError)), self._root_translated():
            return LocalReader(self.root / path)

    def read(self, path: str) -> tuple[bytes, str]:
        target = self.root / path
        with translated(target, passing=(FileNotFoundError,)), self._root_translated():
            data, status = read_regular(target)
        return data, _version(status)

    @contextmanager
    def _root_translated(self) -> Iterator[None]:
        """Raise an error about the root if it is a broken link, since every file below it then seems to be missing."""
        try:
            yield
        except FileNotFoundError:
            refuse_dangling(self.root)
            raise

    def put_new(self, path: str, data: bytes) -> None:
        target = self.root / path
        with translated(target, passing=(FileExistsError,)), _temp_file(target, data) as temp:
            try:
                os.link(temp, target)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                rename_new(temp, target)
            sync_folder(target.parent)

    def replace(self, path: str, data: bytes, *, version: str | None = None) -> str | None:
        target = self.root / path
        with translated(target, passing=(FileExistsError,)):
            refuse_special(target)
            with _temp_file(target, data) as temp:
                new_version = _version(os.stat(temp))
                if version is None:
                    os.replace(temp, target)
                else:
                    with locks.replacing(target) as is_there:
                        if version != (_version(os.stat(target)) if is_there else None):
                            raise FileExistsError(f"{target} was replaced by another writer")
                        os.replace(temp, target)
                sync_folder(target.parent)
        return new_version

    def append_lines(self, path: str, lines: bytes) -> int:
        target = self.root / path
        with translated(target):
            fd = open_to_change(target, os.O_RDWR | os.O_APPEND)
            try:
                size, last = os.fstat(fd).st_size, bytearray(b"\n")
                if size:
                    pread_into(fd, memoryview(last), size - 1)
                # A killed writer may have left an unfinished line.
                rest = memoryview(lines if last == b"\n" else b"\n" + lines)
                while rest:
                    rest = rest[os.write(fd, rest) :]
                return os.fstat(fd).st_size
            finally:
                os.close(fd)

    def under_way(self, folder: str) -> tuple[int, int]:
        temps = [self.root / folder / name for name in self.names(folder) if name.endswith(locks.TEMP_SUFFIX)]
        found = [locks.written_so_far(temp) for temp in temps if not locks.is_dead(temp, delete=False)]
        return sum(written for written, _ in found), sum(total for _, total in found)

    def free_bytes(self) -> int | None:
        try:
            return free_bytes_in(self.root)
        except OSError:  # this user may not enter a folder above it
            return None

    def settle(self, path: str) -> None:
        target = self.root / path
        with translated(target, passing=(FileNotFoundError,)):
            fd = os.open(target, os.O_RDONLY)
            try:
                sync_file(fd)
            finally:
                os.close(fd)
            sync_folder(target.parent)
            sync_folder(self.root)

    def move(self, path: str, to: str) -> None:
        with translated(self.root / path, passing=(FileNotFoundError,)):
            os.replace(self.root / path, self.root / to)
            sync_folder((self.root / to).parent)

    def delete(self, path: str) -> None:
        self.delete_many([path])

    def delete_many(self, paths: Sequence[str]) -> None:
        folders: dict[Path, list[Path]] = {}
        for path in paths:
            folders.setdefault((self.root / path).parent, []).append(self.root / path)
        for folder, targets in folders.items():
            try:
                if sum(map(_unlink, targets)):
                    with translated(targets[0]), suppress(FileNotFoundError):
                        sync_folder(folder)  # another process may have removed it
            finally:  # even if the deletion could not be made durable
                if folder != self.root:
                    remove_if_empty(folder)

    def delete_all(self, path: str) -> None:
        target = self.root / path
        with translated(target), suppress(FileNotFoundError):
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
        self.delete(path)

    def remove_if_empty(self, folder: str) -> bool:
        return bool(folder) and remove_if_empty(self.root / folder)

    def names(self, folder: str) -> list[str]:
        with translated(self.root / folder):
            try:
                return sorted(os.listdir(self.root / folder))
            except (FileNotFoundError, NotADirectoryError):
                refuse_dangling(self.root)
                return []

    def sizes(self, folder: str) -> dict[str, int]:
        top = self.root / folder
        return dict(sorted(_sizes(top))) if top.is_dir() else {}

    def exists(self, path: str) -> bool:
        return bool(self.existing([path]))

    def existing(self, paths: Sequence[str]) -> list[str]:
        root = os.path.join(self.root, "")  # making thousands of Paths would take most of the time

        def is_there(path: str) -> bool:
            try:
                os.stat(root + path)
            except (FileNotFoundError, NotADirectoryError):
                return False
            except OSError:
                with translated(self.root / path):
                    raise
            return True

        return [*filter(is_there, paths)]

    def sweep(
        self,
        folder: str,
        names: list[str],
        *,
        delete: bool = False,
        decided: bool = False,
        of_ranks: bool = False,
    ) -> list[str]:
        if of_ranks:
            names = self._old(folder, names) if decided and names else []
        return [name for name in names if locks.is_dead(self.root / folder / name, delete=delete)]

    def _old(self, folder: str, names: list[str]) -> list[str]:
        """The files that were last modified more than a day ago, by the clock of the file system."""
        with translated(self.root / folder):
            temp, fd = locks.create_locked(self.root / folder / "clock")
        try:
            limit = os.fstat(fd).st_mtime - ORPHAN_SECONDS
        finally:
            locks.delete_temp(temp)
            locks.forget(fd)
        old = []
        for name in names:
            with suppress(OSError):
                if os.stat(self.root / folder / name, follow_symlinks=False).st_mtime < limit:
                    old.append(name)
        return old

    def hold(self, path: str) -> Callable[[], None]:
        with translated(self.root / path):
            fd = locks.hold(self.root / path)
        return (lambda: None) if fd is None else partial(locks.forget, fd)

    def is_held(self, path: str) -> bool:
        return locks.is_held(self.root / path)

    def sweep_uploads(self) -> list[str]:
        return []  # unfinished writes are files, which `sweep` finds


class LocalSink(Sink):
    """One file under a temp name. LocalStorage creates it. Many threads write; one finishes or aborts it."""

    num_bytes = 0

    def __init__(self, target: Path, num_bytes: int, *, exact: bool, remove_folder: bool) -> None:
        self._target = target
        self.num_bytes = num_bytes
        self._exact = exact
        self._remove_folder = remove_folder
        self._temp, self._fd = locks.create_locked(target)
        self._direct = self._began_direct = False
        self._finished = False
        try:
            if exact:
                preallocate(self._fd, num_bytes, target)
            if _O_DIRECT and fcntl is not None:
                with suppress(OSError):  # some file systems (tmpfs) refuse the flag itself
                    fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) | _O_DIRECT)
                    self._direct = self._began_direct = True
        except BaseException:
            self.abort()
            raise

    def write(self, offset: int, data: memoryview, lease: MemoryLoan | None = None) -> None:  # noqa: ARG002
        with translated(self._target, needed_bytes=self.num_bytes if self._exact else offset + len(data)):
            refused = not self._began_direct
            while data:
                try:
                    num_written = pwrite(self._fd, data, offset)
                except OSError as error:
                    # Tried again once: another thread may be switching the file to buffered writes at this moment.
                    if refused or error.errno not in _REFUSES_DIRECT:
                        raise
                    refused = True
                    self._go_buffered()
                    continue
                offset += num_written
                data = data[num_written:]

    def _go_buffered(self) -> None:
        self._direct = False
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~_O_DIRECT)

    def finish(self, num_bytes: int | None = None) -> None:
        self.num_bytes = self.num_bytes if num_bytes is None else num_bytes
        with translated(self._target, needed_bytes=self.num_bytes):
            sync_file(self._fd)
            size = os.fstat(self._fd).st_size
            if size != self.num_bytes:
                raise OSError(errno.EIO, f"{size} bytes were written instead of {self.num_bytes}")
            if fcntl is None:  # Windows cannot rename an open file, and has no lock to keep
                self.close()
            os.replace(self._temp, self._target)
            self._finished = True
            sync_folder(self._target.parent)

    def abort(self) -> None:
        if self._fd >= 0 and not self._finished:
            locks.delete_temp(self._temp)
            if self._remove_folder:
                remove_if_empty(self._target.parent)
        self.close()

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):
                locks.forget(fd)

    def __repr__(self) -> str:
        mode = "direct" if self._direct else "buffered"
        return f"<LocalSink {self._target} {mode}{', finished' if self._finished else ''}>"


class LocalReader(Reader):
    """One file. Reads bypass the page cache if alignment and file system allow it, except for pages that are cached.

    After `share`, all reads go through the page cache, so that the disk is read once for all processes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        if os.path.isdir(path):  # some systems can open a folder, and others raise a different error
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        self._fd = open_regular(path, os.O_RDONLY)
        self._direct_fd = -1
        if _O_DIRECT:
            with suppress(OSError, StorageUnavailableError):
                self._direct_fd = self._open_direct()
                # Reads through the cache are of single pieces, so reading ahead would be useless.
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
        self._asks_cache = bool(_RWF_NOWAIT)
        self.is_shared = False
        self.num_bytes = os.fstat(self._fd).st_size

    def _open_direct(self) -> int:
        """Open the same file again, with O_DIRECT; -1 if another file has taken its place."""
        fd = open_regular(self._path, os.O_RDONLY | _O_DIRECT)
        if identity(os.fstat(fd)) == identity(os.fstat(self._fd)):
            return fd
        close_quietly(fd)
        return -1

    def read_into(self, offset: int, target: memoryview) -> None:
        aligned = not (offset % PAGE_BYTES or len(target) % PAGE_BYTES or address(target) % PAGE_BYTES)
        direct = aligned and self._direct_fd >= 0 and not self.is_shared
        with translated(self._path):
            if self.is_shared and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._fd, offset, len(target), os.POSIX_FADV_WILLNEED)  # all of it at once
            num_read = self._read_cached(offset, target) if direct else 0
            offset, target = offset + num_read, target[num_read:]
            while target:
                try:
                    num_read = pread_into(self._direct_fd if direct else self._fd, target, offset)
                except OSError as error:
                    if not (direct and error.errno in _REFUSES_DIRECT):
                        raise
                    direct = False
                    continue
                if not num_read:
                    raise EOFError(f"{self._path} ends at byte {offset}")
                offset += num_read
                target = target[num_read:]

    def share(self) -> None:
        """From now on, read through the page cache, so that other processes find the bytes there."""
        self.is_shared = True

    def _read_cached(self, offset: int, target: memoryview) -> int:
        """Read whole pages from the page cache, up to the first that is not cached. Returns the number of bytes."""
        if not self._asks_cache:
            return 0
        num_read = 0
        with suppress(OSError):  # the read would wait for the disk, or the flag is not supported
            # One page first: if more were requested and not cached, the kernel would begin to fetch it.
            if os.preadv(self._fd, [target[:PAGE_BYTES]], offset, _RWF_NOWAIT) == PAGE_BYTES:
                num_read = os.preadv(self._fd, [target], offset, _RWF_NOWAIT) // PAGE_BYTES * PAGE_BYTES
        # Most files are cached wholly or not at all, and each miss makes the disk read a page.
        if num_read < len(target):
            self._asks_cache = False
        return num_read

    def close(self) -> None:
        for fd in (self._fd, self._direct_fd):
            if fd >= 0:
                close_quietly(fd)
        self._fd = self._direct_fd = -1


def _sizes(folder: Path, prefix: str = "", above: tuple[tuple[int, int], ...] = ()) -> Iterator[tuple[str, int]]:
    """The paths and sizes of all files below a folder. Follows links, and raises for any other kind of entry."""
    with translated(folder):
        here = identity(os.stat(folder))
        if here in above:
            raise OSError(errno.ELOOP, "the link leads back to a folder above it")
        names = os.listdir(folder)
    for name in names:
        if name.endswith(locks.TEMP_SUFFIX):
            continue
        with translated(folder / name):
            status = os.stat(folder / name)
            if not stat.S_ISDIR(status.st_mode) and not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "neither a file nor a folder")
        if stat.S_ISDIR(status.st_mode):
            yield from _sizes(folder / name, f"{prefix}{name}/", (*above, here))
        else:
            yield prefix + name, status.st_size


@contextmanager
def _temp_file(target: Path, data: bytes) -> Iterator[Path]:
    """A durable temp file beside the target, with this content. It is deleted at the end of the block."""
    make_folder(target.parent)
    temp, fd = locks.create_locked(target)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
        sync_file(fd)
        if fcntl is None:
            locks.forget(fd)
        yield temp
    finally:
        locks.delete_temp(temp)
        if fcntl is not None:
            locks.forget(fd)


def _unlink(target: Path) -> bool:
    """Delete a file. Returns False if it did not exist."""
    with translated(target), suppress(FileNotFoundError):
        os.unlink(target)
        return True
    return False


def _version(stat: os.stat_result) -> str:
    return f"{stat.st_ino}-{stat.st_mtime_ns}-{stat.st_size}"
