"""Records the calls by which this process, and others that write to the same log, change what is below a folder.

In: a folder, a log. Out: `trace`, the records in their order. Knows nothing of: the library, but that it makes two calls by ctypes.

The functions of `os` and `open` are replaced, as all of this library's writing goes through them: no file is written by native code. Each
call is made and noted under a lock between processes, so the order in the log is the order in which the calls were made.
"""

import builtins
import contextlib
import fcntl
import io
import os
import pickle
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from async_ckpt.core.storage import disk
from async_ckpt.face.around import scratch

from .disk_records import TOP, Acknowledged, Begun, Create, Exchange, Link, Record, Remove, Rename, Resize, Sync, Write

_real_open, _real_fstat, _real_write = os.open, os.fstat, os.write


class Recorder:
    """Notes what this process does below a folder, in a log that others may write to as well."""

    def __init__(self, folder: Path, log: Path) -> None:
        self._folder = os.path.realpath(folder)
        self._path, self._log, self._pid = log, -1, -1
        self._lock = threading.RLock()
        self._depth = 0

    def begins(self, label: str, *, instead_of: tuple[str, ...] = ()) -> None:
        with self._alone():
            self._note("mark", Begun(label, instead_of))

    def acknowledged(self, label: str) -> None:
        with self._alone():
            self._note("mark", Acknowledged(label))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with self._lock:
            if self._pid != os.getpid():  # a lock belongs to an open file, which forked processes share
                self._log, self._pid = (
                    _real_open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666),
                    os.getpid(),
                )
            if not self._depth:
                fcntl.flock(self._log, fcntl.LOCK_EX)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if not self._depth:
                    fcntl.flock(self._log, fcntl.LOCK_UN)

    def _note(self, *what: Any) -> None:
        _real_write(self._log, pickle.dumps(what))

    def _entry(self, path: Any, dir_fd: int | None = None) -> tuple[int, str] | None:
        """The inode of the folder and the name in it; None if it is elsewhere."""
        path = os.fsdecode(path)
        if dir_fd is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path)
        above, name = os.path.split(os.path.abspath(path))
        above = os.path.realpath(above)
        if above != self._folder and not above.startswith(self._folder + "/"):
            return None
        try:
            return os.stat(above).st_ino, name
        except OSError:
            return None

    def _number(self, fd: int) -> int | None:
        """The inode of an open file or folder; None if it is elsewhere, or lost its last name."""
        path = os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")
        inside = path == self._folder or path.startswith(self._folder + "/")
        return _real_fstat(fd).st_ino if inside else None

    # --- calls

    def _open(self, real: Any, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if not flags & (os.O_CREAT | os.O_TRUNC) or flags & os.O_TMPFILE == os.O_TMPFILE:
            return real(path, flags, mode, dir_fd=dir_fd)
        with self._alone():
            was_there = _exists(path, dir_fd)
            fd = real(path, flags, mode, dir_fd=dir_fd)
            entry = self._entry(path, dir_fd)
            if entry is not None and not was_there:
                self._note("create", entry, _real_fstat(fd).st_ino, False)
            elif entry is not None and flags & os.O_TRUNC:
                self._note("resize", _real_fstat(fd).st_ino, 0)
            return fd

    def _pwrite(self, real: Any, fd: int, data: Any, offset: int) -> int:
        with self._alone():
            count = real(fd, data, offset)
            if (number := self._number(fd)) is not None:
                self._note("write", number, offset, bytes(memoryview(data).cast("B")[:count]))
            return count

    def _write(self, real: Any, fd: int, data: Any) -> int:
        with self._alone():
            count = real(fd, data)
            if stat.S_ISREG(_real_fstat(fd).st_mode) and (number := self._number(fd)) is not None:
                end = os.lseek(fd, 0, os.SEEK_CUR)
                self._note("write", number, end - count, bytes(memoryview(data).cast("B")[:count]))
            return count

    def _resize(self, real: Any, fd: int, num_bytes: int) -> None:
        with self._alone():
            real(fd, num_bytes)
            if (number := self._number(fd)) is not None:
                self._note("resize", number, num_bytes)

    def _fsync(self, real: Any, fd: int) -> None:
        with self._alone():
            real(fd)
            if (number := self._number(fd)) is not None:
                self._note("sync", number)

    def _rename(
        self, real: Any, path: Any, to: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        with self._alone():
            one = os.stat(path, dir_fd=src_dir_fd, follow_symlinks=False) if _exists(path, src_dir_fd) else None
            other = os.stat(to, dir_fd=dst_dir_fd, follow_symlinks=False) if _exists(to, dst_dir_fd) else None
            real(path, to, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            if one is not None and other is not None and one.st_ino == other.st_ino:
                return  # two names of one file: rename(2) does nothing
            self._moved(self._entry(path, src_dir_fd), self._entry(to, dst_dir_fd), one)

    def _moved(self, entry: Any, to: Any, status: os.stat_result | None) -> None:
        if entry is not None and to is not None:
            self._note("rename", entry, to)
        elif (entry is None) != (to is None):
            raise NotImplementedError(f"renamed over the border of the folder: {entry}, {to}, {status}")

    def _link(self, real: Any, path: Any, to: Any, **options: Any) -> None:
        with self._alone():
            real(path, to, **options)
            entry, target = self._entry(path, options.get("src_dir_fd")), self._entry(to, options.get("dst_dir_fd"))
            if entry is not None and target is not None:
                self._note("link", entry, target)

    def _remove(self, real: Any, path: Any, *, dir_fd: int | None = None) -> None:
        with self._alone():
            real(path, dir_fd=dir_fd)
            if (entry := self._entry(path, dir_fd)) is not None:
                self._note("remove", entry)

    def _mkdir(self, real: Any, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        with self._alone():
            real(path, mode, dir_fd=dir_fd)
            if (entry := self._entry(path, dir_fd)) is not None:
                self._note("create", entry, os.stat(path, dir_fd=dir_fd).st_ino, True)

    def _call_libc(self, real: Any, name: str, *arguments: Any) -> int:
        with self._alone():
            code = real(name, *arguments)
            if code:
                return code
            if name == "fallocate" and (number := self._number(arguments[0])) is not None:
                self._note("resize", number, max(arguments[3].value, _real_fstat(arguments[0]).st_size))
            elif name == "renameat2":
                exchanges = arguments[4] == 2
                entry, to = self._entry(arguments[1]), self._entry(arguments[3])
                if entry is not None and to is not None:
                    self._note("exchange" if exchanges else "rename", entry, to)
            return code

    def install(self) -> None:
        """From now on, in this process."""

        def watched(owner: Any, name: str, call: Callable[..., Any]) -> None:
            real = getattr(owner, name)
            setattr(owner, name, lambda *given, **options: call(real, *given, **options))

        for name, call in (
            ("open", self._open),
            ("pwrite", self._pwrite),
            ("write", self._write),
            ("ftruncate", self._resize),
            ("fsync", self._fsync),
            ("fdatasync", self._fsync),
            ("rename", self._rename),
            ("replace", self._rename),
            ("link", self._link),
            ("unlink", self._remove),
            ("remove", self._remove),
            ("rmdir", self._remove),
            ("mkdir", self._mkdir),
        ):
            watched(os, name, call)
        for name in ("truncate", "pwritev", "writev", "sendfile", "copy_file_range", "posix_fallocate", "symlink"):
            watched(os, name, self._refuse)
        for owner in (disk, scratch):
            watched(owner, "call_libc", self._call_libc)
        builtins.open = io.open = _open_file

    def _refuse(self, real: Any, *given: Any, **options: Any) -> Any:
        if given and isinstance(given[0], int) and self._number(given[0]) is None:
            return real(*given, **options)
        raise NotImplementedError(f"{real} is not recorded")


def _exists(path: Any, dir_fd: int | None) -> bool:
    try:
        os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


class _File(io.FileIO):
    """A file whose bytes are written by the functions of `os`."""

    def write(self, data: Any) -> int:
        return os.write(self.fileno(), data)

    def truncate(self, size: int | None = None) -> int:
        size = self.tell() if size is None else size
        os.ftruncate(self.fileno(), size)
        return size


_file_open = io.open


def _open_file(
    file: Any,
    mode: str = "r",
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    opener: Any = None,
) -> Any:
    if not set(mode) & set("wxa+"):
        return _file_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
    raw = _File(
        file,
        mode.replace("b", "").replace("t", ""),
        closefd,
        opener or (lambda path, flags: os.open(path, flags, 0o666)),
    )
    if buffering == 0:
        return raw
    buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
    return (
        buffered
        if "b" in mode
        else io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)
    )


def trace(folder: Path, log: Path) -> list[Record]:
    """The records of a log, of which all files were made after the log had begun."""
    numbers = {os.stat(folder).st_ino: TOP}
    found: list[Record] = []
    num_made = TOP
    for what, *given in _read(log):
        if what == "create":
            num_made += 1
            (above, name), inode, is_folder = given
            found.append(Create((numbers[above], name), num_made, is_folder))
            numbers[inode] = num_made
        elif what == "mark":
            found.append(given[0])
        elif what in ("write", "resize", "sync"):
            kind = {"write": Write, "resize": Resize, "sync": Sync}[what]
            found.append(kind(numbers[given[0]], *given[1:]))
        else:
            kind = {"rename": Rename, "exchange": Exchange, "link": Link, "remove": Remove}[what]
            found.append(kind(*((numbers[above], name) for above, name in given)))
    return found


def _read(log: Path) -> Iterator[Any]:
    with log.open("rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except EOFError:
                return
