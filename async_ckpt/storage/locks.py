"""Files that are being written: temp names beside the target, and the record locks that tell whether their writer lives.

In: the name of a file to be. Out: a temp file that nobody sweeps. Knows nothing of: what is written.
"""

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

from ..errors import StorageUnavailableError
from ..host.process import in_forked_child
from .disk import O_BINARY, O_CLOEXEC, identity, make_folder, open_regular, remove_if_empty, sync_folder

try:
    import fcntl
except ImportError:  # Windows: no record locks, so nothing is ever swept
    fcntl = None  # type: ignore[assignment]


TEMP_SUFFIX: Final = ".async_ckpt-tmp"
# How often a new file may be swept away, or its folder, before it is in use: more than others will ever do.
_NUM_TRIES: Final = 100

# Files that this process is writing. A record lock does not stop the process that holds it, and is lost when any
# descriptor of the file is closed, so our own sweep must not even open them.
_ours: dict[int, tuple[int, int]] = {}  # by descriptor; under _ours_lock
_ours_lock = threading.Lock()
# Temp files that this process could not delete when it was done with them; under _ours_lock.
_undeleted: set[Path] = set()


def temps_of(name: str, names: list[str]) -> list[str]:
    """The temp files, among these names, of writers of `name`."""
    return [n for n in names if n.startswith(temp_stem(name)) and n.endswith(TEMP_SUFFIX)]


def temp_stem(name: str) -> str:
    """The beginning of the temp names of `name`; cut short, since file systems take 255 bytes."""
    return f".{os.fsencode(name)[:150].decode(errors='ignore')}."


def create_locked(target: Path) -> tuple[Path, int]:
    """A new temp file beside the target, locked before anybody could take it for a leftover."""
    was_swept = False
    for _ in range(_NUM_TRIES):
        temp = target.with_name(f"{temp_stem(target.name)}{os.urandom(4).hex()}{TEMP_SUFFIX}")
        try:
            with _ours_lock:  # in one go, or our own sweep could come between
                fd = os.open(temp, os.O_CREAT | os.O_EXCL | os.O_RDWR | O_CLOEXEC | O_BINARY, 0o666)
                key = _ours[fd] = identity(os.fstat(fd))
        except FileNotFoundError:  # somebody swept the empty folder away
            was_swept = True
            _make_again(target.parent)
            continue
        if fcntl is not None:
            with suppress(OSError):  # a file system without locks: then nobody can sweep there either
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


def delete_temp(temp: Path) -> None:
    """Delete a temp file of ours. If that fails, `delete_left` tries again."""
    try:
        os.unlink(temp)
    except FileNotFoundError:
        pass
    except OSError:
        with _ours_lock:
            _undeleted.add(temp)


def delete_left(root: Path) -> None:
    """Delete the temp files below a folder that this process could not delete before, and folders that held only them.

    Nobody else has their names: these are random, and taken as long as the files are there.
    """
    with _ours_lock:
        temps = [temp for temp in _undeleted if temp.is_relative_to(root)]
        _undeleted.difference_update(temps)
    for temp in temps:
        delete_temp(temp)
        if temp.parent != root:
            remove_if_empty(temp.parent)


def hold(path: Path) -> int | None:
    """Lock a file that is there until its descriptor is given to `forget`; None where locks do not work."""
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


def is_held(path: Path) -> bool:
    """Whether another living process has locked a file, as far as that can be proved."""
    if fcntl is None:
        return False
    fd: int | None = None
    try:
        with _ours_lock:
            if identity(os.stat(path)) in _ours.values():
                return False
        fd = open_regular(path, os.O_RDWR | os.O_NOFOLLOW)
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return fd is not None and error.errno in (errno.EACCES, errno.EAGAIN)
    except StorageUnavailableError:
        return False
    finally:
        if fd is not None:
            os.close(fd)
    return False


def is_dead(path: Path, *, delete: bool) -> bool:
    """True when no living process is writing this file: its record lock can be had.

    It is deleted with the lock in hand, so that a writer that is just about to take it finds the file gone.
    """
    if fcntl is None:
        return False
    try:
        with _ours_lock:
            if identity(os.stat(path)) in _ours.values():
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


@in_forked_child
def _forget_parent() -> None:
    """In a forked child: its parent's files are not its own, and who held the lock is not here to release it."""
    global _ours_lock
    _ours.clear()
    _undeleted.clear()
    _ours_lock = threading.Lock()
