"""System calls on files, and the meaning of their errors.

In: paths, descriptors. Out: open files, durable folders, errors that say what to do. Knows nothing of: storages.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from ...errors import (
    CheckpointError,
    IsAFolderError,
    NotAFolderError,
    NotFoundError,
    OccupiedError,
    StorageFullError,
    StorageUnavailableError,
)

try:
    import fcntl
except ImportError:  # Windows: no record locks, so nothing is ever swept
    fcntl = None  # type: ignore[assignment]


O_CLOEXEC: Final = getattr(os, "O_CLOEXEC", 0)
O_BINARY: Final = getattr(os, "O_BINARY", 0)
O_NONBLOCK: Final = getattr(os, "O_NONBLOCK", 0)
O_DIRECTORY: Final = getattr(os, "O_DIRECTORY", 0)
O_NOFOLLOW: Final = getattr(os, "O_NOFOLLOW", 0)
_PIECE_BYTES: Final = 64 * 1024
NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_RIGHTS: Final = "make sure that this user may read and write it, and enter the folders above it"
_ADVICE: Final = {
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EROFS: "mount the file system for writing, or choose another folder",
    errno.EIO: "the disk may be failing: look at the kernel's log, and choose another disk",
    errno.ESTALE: "the network file system is no longer available: mount it again",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.EFBIG: "the file system, or the limit of this process (ulimit -f), allows no file of that size: raise the "
    "limit, or choose a file system that holds larger files",
    errno.ELOOP: "a link leads back to itself: correct it, or delete it",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "this host has too many open files",
}


def close_quietly(fd: int) -> None:
    """Close a file without unsynced writes. Ignores errors but EBADF: the file is closed in any case (close(2))."""
    try:
        os.close(fd)
    except OSError as error:
        if error.errno == errno.EBADF:
            raise


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable. A folder that cannot be opened or synced (Windows, some FUSE) is skipped."""
    try:
        fd = os.open(folder, os.O_RDONLY | O_CLOEXEC | O_DIRECTORY)
    except PermissionError:
        return
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP):
            raise
    finally:
        close_quietly(fd)


def full(path: Path, needed_bytes: int, free_bytes: int | None) -> StorageFullError:
    """The error for a disk without enough free space. `needed_bytes` is 0, and `free_bytes` None, if unknown."""
    free = "fewer are" if free_bytes is None else f"{free_bytes:,}"
    needed = f"{needed_bytes:,} bytes needed, {free} free" if needed_bytes else "there is no room left"
    return StorageFullError(
        f"{path}: {needed}; delete old steps or keep fewer (keep=), then save again",
        path=str(path),
        needed_bytes=needed_bytes,
        free_bytes=free_bytes,
    )


@contextmanager
def translated(path: Path, *, needed_bytes: int = 0, passing: tuple[type[OSError], ...] = ()) -> Iterator[None]:
    """Translate OSErrors of the block into errors of this library. Errors in `passing` pass unchanged."""
    kept: tuple[type[Exception], ...] = (CheckpointError, *passing)
    try:
        yield
    except kept:
        raise
    except OSError as error:
        if error.errno in NO_ROOM:
            raise full(path, needed_bytes, free_bytes_at(path.parent)) from error
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ELOOP):
            refuse_dangling(path)
        reason = error.strerror or str(error)
        advice = _ADVICE.get(error.errno or 0, "make sure that the folder exists and its disk is healthy")
        raise StorageUnavailableError(f"{path}: {reason}; {advice}", path=str(path)) from error


@contextmanager
def user_path_translated(path: str) -> Iterator[None]:
    """Translate OSErrors of the block, about a path from a user, into errors of this library and of the same kind."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        refuse_dangling(Path(path))
        kind = next((own for theirs, own in _OWN.items() if isinstance(error, theirs)), StorageUnavailableError)
        raise kind(f"{path}: {error.strerror or error}", path=path) from error


_OWN: Final = {
    FileNotFoundError: NotFoundError,
    IsADirectoryError: IsAFolderError,
    NotADirectoryError: NotAFolderError,
    FileExistsError: OccupiedError,
}


def open_regular(path: Path, flags: int) -> int:
    """Open an existing regular file. Anything else is refused: opening a pipe or device could block, or have effects.

    Raises FileNotFoundError only if the name does not exist: a broken link raises StorageUnavailableError.
    """
    flags |= O_CLOEXEC | O_BINARY
    try:
        _refuse_kind(path, os.stat(path).st_mode)
        try:
            # O_NONBLOCK, since a pipe may have replaced the file just now.
            fd = os.open(path, flags | O_NONBLOCK)
        except BlockingIOError:  # another process has a file lease, which a blocking open breaks
            fd = os.open(path, flags)
    except FileNotFoundError:
        if os.path.islink(path):
            refuse_dangling(path)
        raise
    except NotADirectoryError as error:  # a parent is a file, so the name does not exist
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
    try:
        _refuse_kind(path, os.fstat(fd).st_mode)
        if O_NONBLOCK:
            os.set_blocking(fd, True)
    except BaseException:
        close_quietly(fd)
        raise
    return fd


def open_to_change(path: Path, flags: int) -> int:
    """Open a regular file to change its content, and create it if it does not exist.

    A link is refused: otherwise, anyone who may write to the folder could make this process change a file elsewhere.
    Raises StorageUnavailableError.
    """
    try:
        return open_regular(path, flags | O_NOFOLLOW)
    except FileNotFoundError:
        return os.open(path, flags | os.O_CREAT | O_NOFOLLOW | O_CLOEXEC | O_BINARY, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise StorageUnavailableError(
                f"{path} is a link, and files are never written through links; replace it with a copy, or delete it",
                path=str(path),
            ) from error
        raise


def read_regular(path: Path) -> tuple[bytes, os.stat_result]:
    """The bytes of an existing regular file, and its status after the read. Raises what `open_regular` raises.

    Makes no file object, which would take longer than the read itself: a listing reads thousands of manifests.
    """
    fd = open_regular(path, os.O_RDONLY)
    try:
        data = b"".join(iter(partial(os.read, fd, _PIECE_BYTES), b""))
        return data, os.fstat(fd)
    finally:
        close_quietly(fd)


def refuse_dangling(path: Path) -> None:
    """Raise StorageUnavailableError if a path, or a folder above it, is a link to something that does not exist."""
    for entry in (path, *path.parents):
        if os.path.exists(entry):
            return
        if os.path.islink(entry):
            target = os.path.join(entry.parent, os.readlink(entry))
            why = "which does not exist; restore or mount it, or delete the link"
            try:
                os.stat(entry)
            except OSError as error:
                if error.errno == errno.ELOOP:
                    why = f"which leads back to it ({error.strerror}); correct the link, or delete it"
            raise StorageUnavailableError(f"{entry} is a link to {target}, {why}", path=str(path))


def refuse_special(path: Path) -> None:
    """Raise StorageUnavailableError if the path exists, and is neither a regular file nor a link."""
    with suppress(FileNotFoundError, NotADirectoryError):
        mode = os.lstat(path).st_mode
        if not stat.S_ISLNK(mode):
            _refuse_kind(path, mode)


def _refuse_kind(path: Path, mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a named pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    kind = kinds.get(stat.S_IFMT(mode), "something else")
    raise StorageUnavailableError(
        f"{path} is {kind}, but should be a file; move it away, or use another place", path=str(path)
    )


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, each durable in its own parent."""
    if folder.is_dir():
        return
    try:
        make_folder(folder.parent)
        os.mkdir(folder)
    except FileExistsError:
        refuse_dangling(folder)
        with suppress(FileNotFoundError):  # it was removed meanwhile: `create_locked` makes it again
            if not stat.S_ISDIR(os.lstat(folder).st_mode) and not folder.is_dir():
                raise NotADirectoryError(
                    errno.ENOTDIR, f"{folder} is a file, but should be a folder", str(folder)
                ) from None
    try:
        sync_folder(folder.parent)
    except BaseException:
        remove_if_empty(folder)
        raise


def remove_if_empty(folder: Path) -> bool:
    """Remove a folder if it is empty. Returns whether it was removed.

    If a writer has just made the folder, it will make it again (see `create_locked`).
    """
    try:
        os.rmdir(folder)
    except OSError:  # usually since it is not empty
        return False
    return True


def rename_new(temp: Path, target: Path) -> None:
    """Rename without replacing, for file systems without hard links: renameat2(2) with RENAME_NOREPLACE."""
    if sys.platform != "linux":
        raise OSError(errno.ENOTSUP, "neither link nor exclusive rename")
    at_fdcwd, noreplace = -100, 1
    code = call_libc("renameat2", at_fdcwd, os.fsencode(temp), at_fdcwd, os.fsencode(target), noreplace)
    if code:
        raise OSError(code, os.strerror(code), str(target))


def preallocate(fd: int, num_bytes: int, target: Path) -> None:
    """Allocate space by fallocate(2). Raises StorageFullError.

    posix_fallocate would write zeros if the file system does not support the call.
    """
    if sys.platform != "linux" or not num_bytes:
        return
    code = call_libc("fallocate", fd, 0, ctypes.c_int64(0), ctypes.c_int64(num_bytes))
    if code in NO_ROOM:
        raise full(target, num_bytes, free_bytes_at(target.parent))
    if code not in (0, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
        raise OSError(code, os.strerror(code), str(target))


def call_libc(name: str, *arguments: Any) -> int:
    """Make a system call that `os` lacks, and repeat it after signals, as `os` does. Returns errno, or 0."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is None:  # an older C library
        return errno.ENOSYS
    while function(*arguments):
        if (code := ctypes.get_errno()) != errno.EINTR:
            return code
    return 0


def free_bytes_at(folder: Path) -> int | None:
    """The bytes that this user can still write to a folder, which need not exist; None if unknown."""
    if not hasattr(os, "statvfs"):
        return None
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        stat = os.statvfs(folder)
    except OSError:
        return None
    return stat.f_bavail * stat.f_frsize if stat.f_blocks else None


def identity(stat: os.stat_result) -> tuple[int, int]:
    """The device and inode, which are unique among existing files."""
    return stat.st_dev, stat.st_ino


def address(view: memoryview) -> int:
    """The address of a view's memory; 1, which is not aligned, if the view is empty or read-only."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if len(view) and not view.readonly else 1


def sync_file(fd: int) -> None:
    """Make a file durable. On macOS, fsync(2) leaves data in the drive's cache, and F_FULLFSYNC does not."""
    full_sync = getattr(fcntl, "F_FULLFSYNC", None)
    if full_sync is None:
        os.fsync(fd)
    else:
        fcntl.fcntl(fd, full_sync)


_seeking: Final = threading.Lock()  # for systems without pwrite and preadv (Windows)


def pwrite(fd: int, data: memoryview, offset: int) -> int:
    if hasattr(os, "pwrite"):
        return os.pwrite(fd, data, offset)
    with _seeking:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.write(fd, data)


def pread_into(fd: int, target: memoryview, offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(fd, [target], offset)
    with _seeking:
        os.lseek(fd, offset, os.SEEK_SET)
        data = os.read(fd, len(target))
    target[: len(data)] = data
    return len(data)
