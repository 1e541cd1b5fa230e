"""Temp files: their names beside the target, and the record locks that show whether their writer lives.

In: the path of a file to be written. Out: a temp file that no process sweeps. Knows nothing of: what is written.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from ...errors import StorageUnavailableError
from ..host.process import in_forked_child
from ..host.threads import is_library_thread
from ..host.waits import REQUEST_SECONDS, growing_pauses
from ..timing import TIMEKEEPER
from .disk import (
    O_BINARY,
    O_CLOEXEC,
    close_quietly,
    identity,
    make_folder,
    open_regular,
    open_to_change,
    remove_if_empty,
    sync_folder,
)

try:
    import fcntl
except ImportError:  # Windows: no record locks, so nothing is ever swept
    fcntl = None  # type: ignore[assignment]


TEMP_SUFFIX: Final = ".async_ckpt-tmp"
# The suffix of the folder beside a temp file in which a function of the user writes files directly.
FOLDER_SUFFIX: Final = ".d"
# How often a file is created again because other processes have swept it, or its folder, before it was locked.
_NUM_TRIES: Final = 100

# Files that this process is writing. A record lock does not stop its own process, and is lost when any descriptor of
# the file is closed, so the sweep of this process must not even open them.
_ours: dict[int, tuple[int, int]] = {}  # by descriptor; under _ours_lock
_ours_lock = threading.RLock()  # reentrant: any allocation may run a finalizer that calls `forget`
# Temp files that this process could not delete; under _ours_lock.
_undeleted: set[Path] = set()
_replacing = threading.Lock()  # held during a replacement that depends on the version


def temps_of(name: str, names: list[str]) -> list[str]:
    """The temp files, among these names, of writers of `name`."""
    return [n for n in names if n.startswith(temp_stem(name)) and n.endswith(TEMP_SUFFIX)]


def temp_stem(name: str) -> str:
    """The beginning of the temp names of `name`. It is cut off, since file names have at most 255 bytes."""
    return f".{os.fsencode(name)[:150].decode(errors='ignore')}."


def refuse_in_running(folder: Path) -> None:
    """Raise ValueError for a background save by a wrapped function into its own scratch folder.

    The function cannot wait for the save, and the folder is deleted when the function returns.
    """
    inside = any(part.endswith(TEMP_SUFFIX + FOLDER_SUFFIX) for part in folder.parts)
    if inside and is_library_thread():
        raise ValueError(
            f"{folder} is deleted when the wrapped function that writes there returns, so nothing can be saved there "
            "in the background; call a plain function instead, such as the .__wrapped__ of a wrapped one"
        )


def create_locked(target: Path) -> tuple[Path, int]:
    """Create a temp file beside the target, and lock it before any process can take it for a leftover."""
    was_swept = False
    for _ in range(_NUM_TRIES):
        temp = target.with_name(f"{temp_stem(target.name)}{os.urandom(4).hex()}{TEMP_SUFFIX}")
        try:
            with _ours_lock:  # so that the sweep of this process does not come between
                fd = os.open(temp, os.O_CREAT | os.O_EXCL | os.O_RDWR | O_CLOEXEC | O_BINARY, 0o666)
                key = _ours[fd] = identity(os.fstat(fd))
        except FileNotFoundError:  # another process has removed the empty folder
            was_swept = True
            _make_again(target.parent)
            continue
        if fcntl is not None:
            with suppress(OSError):  # a file system without locks, where no process can sweep
                fcntl.lockf(fd, fcntl.LOCK_EX)
        try:
            if identity(os.stat(temp)) == key:
                if was_swept:
                    sync_folder(target.parent.parent)
                return temp, fd
        except FileNotFoundError:
            pass  # swept between open and lock
        except BaseException:
            delete_temp(temp)
            forget(fd)
            raise
        forget(fd)
    # As in /proc: the folder exists, but no file can be created in it.
    raise FileNotFoundError(errno.ENOENT, "no file can be made there", str(target.parent))


def _make_again(folder: Path) -> None:
    """Make a folder without syncing it, so that its first file follows at once. The caller syncs it afterwards."""
    try:
        os.mkdir(folder)
    except FileExistsError:
        pass
    except FileNotFoundError:  # the parent is gone, too
        make_folder(folder)


def _try_lock(fd: int) -> bool | None:
    """Lock an open file without waiting. False if another process has locked it, None where locks do not work."""
    if fcntl is None:
        return None
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EACCES, errno.EAGAIN) else None
    return True


def forget(fd: int) -> None:
    """Close a file of this process, which releases its lock."""
    with _ours_lock:  # before the close, after which its descriptor and inode may belong to a new file
        _ours.pop(fd, None)
    close_quietly(fd)


def delete_temp(temp: Path) -> None:
    """Delete a temp file of this process. If that fails, `delete_left` tries again."""
    try:
        os.unlink(temp)
    except FileNotFoundError:
        pass
    except OSError:
        with _ours_lock:
            _undeleted.add(temp)


def delete_left(root: Path) -> None:
    """Delete temp files below a folder that this process could not delete before, and their folders if then empty.

    The names of these files are random, so no other writer has made them.
    """
    with _ours_lock:
        temps = [temp for temp in _undeleted if temp.is_relative_to(root)]
        _undeleted.difference_update(temps)
    for temp in temps:
        delete_temp(temp)
        if temp.parent != root:
            remove_if_empty(temp.parent)


def hold(path: Path) -> int | None:
    """Lock an existing file. Returns a descriptor, which `forget` closes to unlock the file; None without locks."""
    if fcntl is None:
        return None
    with _ours_lock:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | O_CLOEXEC)
        _ours[fd] = identity(os.fstat(fd))
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX)
    except OSError:
        forget(fd)
        return None
    return fd


def hold_if_free(path: Path) -> int | None:
    """Lock a file, and create it if it does not exist. To unlock it, delete it and `forget` the returned descriptor.

    Returns None if a living process, even this one, has locked it. If locks do not work, only this process counts.
    """
    for _ in range(_NUM_TRIES):
        with _ours_lock:
            with suppress(FileNotFoundError):
                if identity(os.stat(path)) in _ours.values():
                    return None
            fd = open_to_change(path, os.O_RDWR)
            key = _ours[fd] = identity(os.fstat(fd))
        if _try_lock(fd) is False:
            forget(fd)
            return None
        with suppress(FileNotFoundError):
            if identity(os.stat(path)) == key:
                return fd
        forget(fd)  # its holder has deleted it between open and lock
    return None


@contextmanager
def replacing(path: Path) -> Iterator[bool]:
    """Keep other writers from replacing a file within the block. Yields whether the file exists.

    Raises StorageUnavailableError if another process holds the lock too long, such as one that is stopped.
    """
    with _replacing:  # record locks do not keep threads of one process apart
        try:
            fd = open_regular(path, os.O_RDWR)
        except FileNotFoundError:
            yield False
            return
        try:
            deadline, pauses = TIMEKEEPER.now() + REQUEST_SECONDS, growing_pauses(0.001, 0.05)
            while _try_lock(fd) is False:
                if TIMEKEEPER.now() > deadline:
                    raise StorageUnavailableError(
                        f"{path}: for {REQUEST_SECONDS:.0f} s another process has been replacing it; "
                        "see whether one is stopped",
                        path=str(path),
                    )
                TIMEKEEPER.sleep(next(pauses))
            yield True
        finally:
            close_quietly(fd)


def read_held(path: Path) -> bytes:
    """Read a small file that a process has locked.

    If this process has locked it, the locked descriptor is read, since closing another one would release the lock.
    """
    with _ours_lock:
        key = identity(os.stat(path))
        for fd, held in _ours.copy().items():  # a finalizer may forget one meanwhile
            if held == key:
                return os.pread(fd, os.fstat(fd).st_size, 0)
    return path.read_bytes()


def _opened(path: Path, flags: int) -> int | None:
    """Open a file; None if that fails, or if this process is writing the file: a close would release its lock."""
    try:
        with _ours_lock:
            if identity(os.stat(path)) in _ours.values():
                return None
        return open_regular(path, flags | os.O_NOFOLLOW)
    except (OSError, StorageUnavailableError):
        return None


def is_held(path: Path) -> bool:
    """Whether another living process has locked a file, as far as that can be proved."""
    if (fd := _opened(path, os.O_RDWR)) is None:
        return False
    try:
        return _try_lock(fd) is False
    finally:
        close_quietly(fd)


def written_so_far(temp: Path) -> tuple[int, int]:
    """The bytes written so far to a temp file of another process, and its final size, which is allocated at once.

    Zeros for a file of this process, and for a file that is missing or not readable.
    """
    fd = _opened(temp, os.O_RDONLY)
    if fd is None:
        return 0, 0
    try:
        size, at, written = os.fstat(fd).st_size, 0, 0
        if not hasattr(os, "SEEK_DATA"):  # Windows
            return 0, size
        with suppress(OSError):  # there is no data from here on
            while at < size:
                begin = os.lseek(fd, at, os.SEEK_DATA)
                at = os.lseek(fd, begin, os.SEEK_HOLE)
                written += at - begin
        return written, size
    finally:
        close_quietly(fd)


def is_dead(path: Path, *, delete: bool) -> bool:
    """Whether the writer of this file has ended, since its record lock is free.

    With `delete`, the file is deleted under the lock, so that a writer that is about to lock the file finds it missing.
    """
    if (fd := _opened(path, os.O_RDWR)) is None:
        return False
    try:
        if not _try_lock(fd):
            return False  # its writer is alive, or the file system has no locks
        if delete:
            os.unlink(path)
    except OSError:
        return False
    finally:
        close_quietly(fd)
    return True


@in_forked_child
def _forget_parent() -> None:
    """In a forked child, the files belong to the parent, and a thread that held a lock does not exist."""
    global _ours_lock, _replacing
    _ours.clear()
    _undeleted.clear()
    _ours_lock, _replacing = threading.RLock(), threading.Lock()
