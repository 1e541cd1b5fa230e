"""The local disk, or anything mounted like one.

In: segments at offsets. Out: files that survive a power cut: temp name, fsync, rename, fsync of the folder.
Knows nothing of: what is in the files.

Archives are written with O_DIRECT where the file system takes it. Whether it does is found out by writing: `open`
succeeds on file systems where `write` then fails. The first refused write turns its file, and only it, to buffered.

A file being written carries a `fcntl` record lock until its fate is decided, under its temp name and under its final
one. A leftover whose lock is free has no living writer, on this host or another that shares the file system.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .base import Held

from ..errors import StorageFullError, StorageUnavailableError
from ..host.process import in_forked_child
from ..spec import PAGE_BYTES, SEGMENT_BYTES

try:
    import fcntl
except ImportError:  # Windows: no record locks, so nothing is ever swept
    fcntl = None  # type: ignore[assignment]

TEMP_SUFFIX: Final = ".async_ckpt-tmp"
_O_DIRECT: Final = getattr(os, "O_DIRECT", 0)
_RWF_NOWAIT: Final = getattr(os, "RWF_NOWAIT", 0)  # Linux
_O_CLOEXEC: Final = getattr(os, "O_CLOEXEC", 0)
_O_BINARY: Final = getattr(os, "O_BINARY", 0)
_O_NONBLOCK: Final = getattr(os, "O_NONBLOCK", 0)
_O_DIRECTORY: Final = getattr(os, "O_DIRECTORY", 0)
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_REFUSES_DIRECT: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})
_NO_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})

# How often a new file may be swept away, or its folder, before it is in use: more than others will ever do.
_NUM_TRIES: Final = 100

# Files that this process is writing. A record lock does not stop the process that holds it, and is lost when any
# descriptor of the file is closed, so our own sweep must not even open them.
_ours: dict[int, tuple[int, int]] = {}  # by descriptor; under _ours_lock
_ours_lock = threading.Lock()
# Temp files that this process could not delete when it was done with them; under _ours_lock.
_left: set[Path] = set()


class LocalStorage:
    """One folder and all below it. The folder need not exist until something is written."""

    remote = False
    in_order = False

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()

    def __repr__(self) -> str:
        return f"<LocalStorage {self.root}>"

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
            delete_left(self.root)  # first, for it makes room
            refuse_special(target)
            free = free_bytes_at(target.parent)
            if exact and free is not None and free < num_bytes:
                raise full(target, num_bytes, free)
            was_there = target.parent.is_dir()
            make_folder(target.parent)
            try:
                return LocalSink(target, num_bytes, exact=exact, remove_folder=not was_there)
            except BaseException:
                if not was_there:
                    _remove_if_empty(target.parent)
                raise

    def open(self, path: str) -> LocalReader:
        with translated(self.root / path, passing=(FileNotFoundError, IsADirectoryError)):
            return LocalReader(self.root / path)

    def read(self, path: str) -> tuple[bytes, str]:
        with (
            translated(self.root / path, passing=(FileNotFoundError,)),
            os.fdopen(open_regular(self.root / path, os.O_RDONLY), "rb") as file,
        ):
            return file.read(), _version(os.fstat(file.fileno()))

    def put_new(self, path: str, data: bytes) -> None:
        target = self.root / path
        with translated(target, passing=(FileExistsError,)), _written(target, data) as temp:
            try:
                os.link(temp, target)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                _rename_new(temp, target)
            sync_folder(target.parent)

    def replace(self, path: str, data: bytes, *, version: str | None = None) -> str | None:
        target = self.root / path
        with translated(target, passing=(FileExistsError,)):
            refuse_special(target)
            with _written(target, data) as temp:
                made = _version(os.stat(temp))
                if version is None:
                    os.replace(temp, target)
                else:
                    with _locked(target) as found:
                        if found != version:
                            raise FileExistsError(f"{target} was replaced by another writer")
                        os.replace(temp, target)
                sync_folder(target.parent)
        return made

    def move(self, path: str, to: str) -> None:
        with translated(self.root / path, passing=(FileNotFoundError,)):
            os.replace(self.root / path, self.root / to)
            sync_folder((self.root / to).parent)

    def delete(self, path: str) -> None:
        target = self.root / path
        with translated(target):
            try:
                os.unlink(target)
                sync_folder(target.parent)
            except FileNotFoundError:
                pass  # somebody else has deleted it, or the folder that it left empty
            finally:  # also where the deletion may not last
                if target.parent != self.root:
                    _remove_if_empty(target.parent)

    def remove_if_empty(self, folder: str) -> bool:
        return bool(folder) and _remove_if_empty(self.root / folder)

    def names(self, folder: str) -> list[str]:
        with translated(self.root / folder):
            try:
                return sorted(os.listdir(self.root / folder))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def sizes(self, folder: str) -> dict[str, int]:
        top = self.root / folder
        return dict(sorted(_sizes(top))) if top.is_dir() else {}

    def exists(self, path: str) -> bool:
        with translated(self.root / path):
            try:
                os.stat(self.root / path)
            except (FileNotFoundError, NotADirectoryError):
                return False
            return True

    def existing(self, paths: Sequence[str]) -> list[str]:
        return [path for path in paths if self.exists(path)]

    def sweep(
        self,
        folder: str,
        names: list[str],
        *,
        delete: bool = False,
        decided: bool = False,  # noqa: ARG002
    ) -> list[str]:
        return [name for name in names if is_dead(self.root / folder / name, delete=delete)]

    def sweep_uploads(self) -> list[str]:
        return []  # what is unfinished here is a file, and `sweep` sees it


class LocalSink:
    """One file under a temp name. Written by several threads at once; finished or aborted by one."""

    num_retries = 0
    retryable = False

    def __init__(self, target: Path, num_bytes: int, *, exact: bool, remove_folder: bool) -> None:
        self._target = target
        self.num_bytes = num_bytes
        self._exact = exact
        self._remove_folder = remove_folder
        self._temp, self._fd = create_locked(target)
        self._direct = self._began_direct = False
        self._finished = False
        try:
            if exact:
                _preallocate(self._fd, num_bytes, target)
            if _O_DIRECT and fcntl is not None:
                with suppress(OSError):  # tmpfs and others refuse the flag itself
                    fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) | _O_DIRECT)
                    self._direct = self._began_direct = True
        except BaseException:
            self.abort()
            raise

    def write(self, offset: int, data: memoryview, lease: Held | None = None) -> None:  # noqa: ARG002
        with translated(self._target, needed_bytes=self.num_bytes if self._exact else offset + len(data)):
            refused = not self._began_direct
            while data:
                try:
                    num_written = _pwrite(self._fd, data, offset)
                except OSError as error:
                    # Once for each write: another thread may be turning the file to buffered at this very moment.
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
                raise OSError(errno.EIO, f"{size} bytes arrived of {self.num_bytes}")
            if fcntl is None:  # Windows renames no open file, and there is no lock to keep
                self.close()
            os.replace(self._temp, self._target)
            self._finished = True
            sync_folder(self._target.parent)

    def abort(self) -> None:
        if self._fd >= 0 and not self._finished:
            _delete_temp(self._temp)
            if self._remove_folder:
                _remove_if_empty(self._target.parent)
        self.close()

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):
                forget(fd)

    def give_up(self) -> None:
        """Nothing is held."""

    def relieve(self) -> bool:
        return False  # memory is done with when `write` returns

    def __repr__(self) -> str:
        how = "direct" if self._direct else "buffered"
        return f"<LocalSink {self._target} {how}{', finished' if self._finished else ''}>"


class LocalReader:
    """One file, read past the page cache, except what is in there, where alignment and file system allow it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if os.path.isdir(path):  # which some systems open, and others refuse for another reason
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        self._fd = open_regular(path, os.O_RDONLY)
        self._direct_fd = -1
        if _O_DIRECT:
            with suppress(OSError, StorageUnavailableError):
                self._direct_fd = self._open_direct()
                # What comes through the cache are single pieces: what lies behind them is not read ahead.
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
        self._asks_cache = bool(_RWF_NOWAIT)
        self.num_bytes = os.fstat(self._fd).st_size

    def _open_direct(self) -> int:
        """The same file once more; -1 if another one has taken its place."""
        fd = open_regular(self._path, os.O_RDONLY | _O_DIRECT)
        if _identity(os.fstat(fd)) == _identity(os.fstat(self._fd)):
            return fd
        os.close(fd)
        return -1

    def read_into(self, offset: int, target: memoryview) -> None:
        aligned = not (offset % PAGE_BYTES or len(target) % PAGE_BYTES or _address(target) % PAGE_BYTES)
        direct = aligned and self._direct_fd >= 0
        with translated(self._path):
            num_read = self._read_cached(offset, target) if direct else 0
            offset, target = offset + num_read, target[num_read:]
            while target:
                try:
                    num_read = _pread_into(self._direct_fd if direct else self._fd, target, offset)
                except OSError as error:
                    if not (direct and error.errno in _REFUSES_DIRECT):
                        raise
                    direct = False
                    continue
                if not num_read:
                    raise EOFError(f"{self._path} ends at byte {offset}")
                offset += num_read
                target = target[num_read:]

    def _read_cached(self, offset: int, target: memoryview) -> int:
        """Whole pages from the page cache, up to the first that is not there: memory is faster than any disk."""
        if not self._asks_cache:
            return 0
        num_read = 0
        with suppress(OSError):  # it would have to wait for the disk, or this file system cannot tell
            # One page first: asked for more in vain, the kernel would begin to fetch it.
            if os.preadv(self._fd, [target[:PAGE_BYTES]], offset, _RWF_NOWAIT) == PAGE_BYTES:
                num_read = os.preadv(self._fd, [target], offset, _RWF_NOWAIT) // PAGE_BYTES * PAGE_BYTES
        # A file is in there or it is not: each question in vain costs the disk a page.
        if num_read < len(target):
            self._asks_cache = False
        return num_read

    def close(self) -> None:
        for fd in (self._fd, self._direct_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct_fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def temps_of(name: str, names: list[str]) -> list[str]:
    """Of these names, the temp files of writers of `name`."""
    return [n for n in names if n.startswith(temp_stem(name)) and n.endswith(TEMP_SUFFIX)]


def temp_stem(name: str) -> str:
    """What the temp names of `name` begin with; cut short, since file systems take 255 bytes."""
    return f".{os.fsencode(name)[:150].decode(errors='ignore')}."


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable. What cannot be opened or synced (Windows, some FUSE) is left to the system."""
    try:
        fd = os.open(folder, os.O_RDONLY | _O_CLOEXEC | _O_DIRECTORY)
    except PermissionError:
        return
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def full(path: Path, needed_bytes: int, free_bytes: int | None) -> StorageFullError:
    free = "less" if free_bytes is None else f"{free_bytes:,}"
    needed = f"{needed_bytes:,} bytes needed, {free} free" if needed_bytes else "there is no room left"
    return StorageFullError(
        f"{path}: {needed}; delete old steps or lower keep_last, then save again",
        path=str(path),
        needed_bytes=needed_bytes,
        free_bytes=free_bytes,
    )


@contextmanager
def translated(
    path: Path, *, needed_bytes: int = 0, passing: tuple[type[OSError], ...] = ()
) -> Iterator[None]:
    """Foreign errors become ours once, here; only what the caller handles itself passes."""
    try:
        yield
    except passing:
        raise
    except OSError as error:
        if error.errno in _FULL:
            raise full(path, needed_bytes, free_bytes_at(path.parent)) from error
        reason = error.strerror or str(error)
        raise StorageUnavailableError(
            f"{path}: {reason}; make sure that the folder exists, is writable and its disk is healthy",
            path=str(path),
        ) from error


def open_regular(path: Path, flags: int) -> int:
    """Open a file that is there. What is no regular file is refused: opening it could block for ever, or do something.

    Raises FileNotFoundError only where there is no such name: a link that leads nowhere is a StorageUnavailableError.
    """
    flags |= _O_CLOEXEC | _O_BINARY
    try:
        _refuse_kind(path, os.stat(path).st_mode)
        try:
            # A pipe may have taken its place this moment.
            fd = os.open(path, flags | _O_NONBLOCK)
        except BlockingIOError:  # somebody has a lease on it, and gives it up when another opens it and waits
            fd = os.open(path, flags)
    except FileNotFoundError:
        if os.path.islink(path):
            raise StorageUnavailableError(
                f"{path} is a link to {os.path.realpath(path)}, which is not there; bring that back, or delete the link",
                path=str(path),
            ) from None
        raise
    try:
        _refuse_kind(path, os.fstat(fd).st_mode)
        if _O_NONBLOCK:
            os.set_blocking(fd, True)
    except BaseException:
        os.close(fd)
        raise
    return fd


def refuse_special(path: Path) -> None:
    """Raise StorageUnavailableError if there is something that is no file and must not be replaced by one."""
    with suppress(FileNotFoundError, NotADirectoryError):
        found = os.lstat(path).st_mode
        if not stat.S_ISLNK(found):
            _refuse_kind(path, found)


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
        f"{path} is {kind} where a file should be; move it away, or use another place", path=str(path)
    )


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, each durable in its own parent."""
    if folder.is_dir():
        return
    try:
        make_folder(folder.parent)
        os.mkdir(folder)
    except FileExistsError:
        if not folder.is_dir():
            raise NotADirectoryError(
                errno.ENOTDIR, f"{folder} is a file where a folder should be", str(folder)
            ) from None
    try:
        sync_folder(folder.parent)
    except BaseException:
        _remove_if_empty(folder)
        raise


def _remove_if_empty(folder: Path) -> bool:
    """Never the folder of a writer who has just made it: that one makes it again (see `create_locked`)."""
    try:
        os.rmdir(folder)
    except OSError:  # not empty, which is the usual case, no folder, already gone, or not to be removed
        return False
    return True


def create_locked(target: Path) -> tuple[Path, int]:
    """A new temp file beside the target, locked before anybody could take it for a leftover."""
    was_swept = False
    for _ in range(_NUM_TRIES):
        temp = target.with_name(f"{temp_stem(target.name)}{os.urandom(4).hex()}{TEMP_SUFFIX}")
        try:
            with _ours_lock:  # in one go, or our own sweep could come between
                fd = os.open(temp, os.O_CREAT | os.O_EXCL | os.O_RDWR | _O_CLOEXEC | _O_BINARY, 0o666)
                key = _ours[fd] = _identity(os.fstat(fd))
        except FileNotFoundError:  # somebody swept the empty folder away
            was_swept = True
            _make_again(target.parent)
            continue
        if fcntl is not None:
            with suppress(OSError):  # a file system without locks: then nobody can sweep there either
                fcntl.lockf(fd, fcntl.LOCK_EX)
        try:
            if _identity(os.stat(temp)) == key:
                if was_swept:
                    sync_folder(target.parent.parent)
                return temp, fd
        except FileNotFoundError:
            pass  # swept between open and lock
        except BaseException:
            _delete_temp(temp)
            forget(fd)
            raise
        forget(fd)
    # As in /proc, where there is a folder, and no file can be made.
    raise FileNotFoundError(errno.ENOENT, "no file can be made there", str(target.parent))


def _make_again(folder: Path) -> None:
    """Only made, so that its first file is there as soon as it is; its name is made durable after that."""
    try:
        os.mkdir(folder)
    except FileExistsError:
        pass
    except FileNotFoundError:  # nor is its parent there any more
        make_folder(folder)


def forget(fd: int) -> None:
    """Close a file of ours, and with it its lock."""
    with _ours_lock:  # first: once it is closed, its number and its identity may belong to a new file
        _ours.pop(fd, None)
    os.close(fd)


def _delete_temp(temp: Path) -> None:
    """Delete a temp file of ours. If that fails, `delete_left` tries again."""
    try:
        os.unlink(temp)
    except FileNotFoundError:
        pass
    except OSError:
        with _ours_lock:
            _left.add(temp)


def delete_left(root: Path) -> None:
    """Delete the temp files below a folder that this process could not delete before, and folders that held only them.

    Nobody else has their names: these are random, and taken as long as the files are there.
    """
    with _ours_lock:
        left = [temp for temp in _left if temp.is_relative_to(root)]
        _left.difference_update(left)
    for temp in left:
        _delete_temp(temp)
        if temp.parent != root:
            _remove_if_empty(temp.parent)


def is_dead(path: Path, *, delete: bool) -> bool:
    """True when no living process is writing this file: its record lock can be had.

    It is deleted with the lock in hand, so that a writer that is just about to take it finds the file gone.
    """
    if fcntl is None:
        return False
    try:
        with _ours_lock:
            if _identity(os.stat(path)) in _ours.values():
                return False
        fd = open_regular(path, os.O_RDWR | os.O_NOFOLLOW)
    except (OSError, StorageUnavailableError):
        return False
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if delete:
            os.unlink(path)
    except OSError:
        return False  # alive, or the file system has no locks and nothing can be proved
    finally:
        os.close(fd)
    return True


def _sizes(
    folder: Path, prefix: str = "", above: tuple[tuple[int, int], ...] = ()
) -> Iterator[tuple[str, int]]:
    """The files below a folder, links followed. What is no file, or cannot be read, is an error and not left out."""
    with translated(folder):
        here = _identity(os.stat(folder))
        if here in above:
            raise OSError(errno.ELOOP, "the link leads back to a folder above it")
        names = os.listdir(folder)
    for name in names:
        if name.endswith(TEMP_SUFFIX):
            continue
        with translated(folder / name):
            found = os.stat(folder / name)
            if not stat.S_ISDIR(found.st_mode) and not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "neither a file nor a folder")
        if stat.S_ISDIR(found.st_mode):
            yield from _sizes(folder / name, f"{prefix}{name}/", (*above, here))
        else:
            yield prefix + name, found.st_size


@contextmanager
def _written(target: Path, data: bytes) -> Iterator[Path]:
    """The data, durable in a temp file beside the target, which is gone afterwards however that went."""
    make_folder(target.parent)
    temp, fd = create_locked(target)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
        sync_file(fd)
        if fcntl is None:
            forget(fd)
        yield temp
    finally:
        _delete_temp(temp)
        if fcntl is not None:
            forget(fd)


_replacing = threading.Lock()


@contextmanager
def _locked(path: Path) -> Iterator[str | None]:
    """Keep other writers from replacing a file meanwhile; yields the version of the file that is there."""
    with _replacing:  # record locks do not keep threads of one process apart
        try:
            fd = open_regular(path, os.O_RDWR)
        except FileNotFoundError:
            yield None
            return
        try:
            if fcntl is not None:
                with suppress(OSError):
                    fcntl.lockf(fd, fcntl.LOCK_EX)
            yield _version(os.stat(path))
        finally:
            os.close(fd)


def _rename_new(temp: Path, target: Path) -> None:
    """Rename without replacing, for file systems without hard links: renameat2(2), RENAME_NOREPLACE."""
    if sys.platform != "linux":
        raise OSError(errno.ENOTSUP, "neither link nor exclusive rename")
    at_fdcwd, noreplace = -100, 1
    code = call_libc("renameat2", at_fdcwd, os.fsencode(temp), at_fdcwd, os.fsencode(target), noreplace)
    if code:
        raise OSError(code, os.strerror(code), str(target))


def _preallocate(fd: int, num_bytes: int, target: Path) -> None:
    """fallocate(2) itself: the C library's posix_fallocate would write zeros where the file system cannot do it."""
    if sys.platform != "linux" or not num_bytes:
        return
    code = call_libc("fallocate", fd, 0, ctypes.c_int64(0), ctypes.c_int64(num_bytes))
    if code in _FULL:
        raise full(target, num_bytes, free_bytes_at(target.parent))
    if code not in (0, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
        raise OSError(code, os.strerror(code), str(target))


def call_libc(name: str, *arguments: Any) -> int:
    """Make a call that `os` lacks; its errno, or 0. Repeated when a signal interrupts it, as those of `os` are."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is None:  # an older C library
        return errno.ENOSYS
    while function(*arguments):
        if (code := ctypes.get_errno()) != errno.EINTR:
            return code
    return 0


def free_bytes_at(folder: Path) -> int | None:
    """Bytes that this user may still write there; None where the file system does not say. It need not exist yet."""
    if not hasattr(os, "statvfs"):
        return None
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        stat = os.statvfs(folder)
    except OSError:
        return None
    return stat.f_bavail * stat.f_frsize if stat.f_blocks else None


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def _version(stat: os.stat_result) -> str:
    return f"{stat.st_ino}-{stat.st_mtime_ns}-{stat.st_size}"


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if len(view) and not view.readonly else 1


def sync_file(fd: int) -> None:
    """Durable means durable: on macOS, fsync(2) leaves data in the drive's cache."""
    full_sync = getattr(fcntl, "F_FULLFSYNC", None)
    if full_sync is None:
        os.fsync(fd)
    else:
        fcntl.fcntl(fd, full_sync)


_seeking: Final = threading.Lock()  # where a descriptor's position is all there is (Windows)


@in_forked_child
def _forget_parent() -> None:
    """In a forked child: its parent's files are not its own, and who held a lock is not here to release it."""
    global _ours_lock, _replacing
    _ours.clear()
    _left.clear()
    _ours_lock, _replacing = threading.Lock(), threading.Lock()


def _pwrite(fd: int, data: memoryview, offset: int) -> int:
    if hasattr(os, "pwrite"):
        return os.pwrite(fd, data, offset)
    with _seeking:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.write(fd, data)


def _pread_into(fd: int, target: memoryview, offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(fd, [target], offset)
    with _seeking:
        os.lseek(fd, offset, os.SEEK_SET)
        data = os.read(fd, len(target))
    target[: len(data)] = data
    return len(data)
