"""Scratch folders for code that writes its own files, and the atomic publication of each of these files.

In: a destination. Out: a folder beside it; later its files under their final names. Knows nothing of: their content.

A scratch folder has a locked file beside it: the next writer sweeps folders whose owner is dead.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from ...core.storage.disk import call_libc, close_quietly, identity, make_folder, sync_file, sync_folder, translated
from ...core.storage.locks import FOLDER_SUFFIX, TEMP_SUFFIX, create_locked, forget, is_dead, temp_stem, temps_of
from ...errors import IsAFolderError, OccupiedError, StorageUnavailableError

_INNER: Final = "files"
_EXCHANGE: Final = 2


class Scratch:
    """A new folder in `parent` for files that become `name`; other users of the machine cannot read it.

    The end of its `with` block removes it. It belongs to the process that created it; a forked child ignores it.
    """

    def __init__(self, parent: Path, name: str) -> None:
        with translated(parent):
            make_folder(parent)
            sweep(parent, name)
            self._lock, self._fd = create_locked(parent / name)
            self._outer, self._pid = _folder_of(self._lock), os.getpid()
            self.folder = self._outer / _INNER
            try:
                self._outer.mkdir(0o700)
                self.folder.mkdir()  # with the mode that the user's umask gives every folder
                self._identity = identity(os.stat(self.folder))
            except BaseException:
                self._delete()
                raise

    @property
    def belongs_here(self) -> bool:
        """False in a child process that was forked after the folder was created."""
        return os.getpid() == self._pid

    @property
    def is_there(self) -> bool:
        """False once another process has removed the folder, even if it was created again since."""
        try:
            return identity(os.stat(self.folder)) == self._identity
        except FileNotFoundError:
            return False

    def make_links_relative(self) -> None:
        """Make absolute links from the folder into it relative, so that they are valid after it has moved."""
        inside = os.path.realpath(self.folder)
        with translated(self.folder):
            for link in filter(Path.is_symlink, [*self.folder.rglob("*")]):
                parent, name = os.path.split(os.readlink(link))
                target = os.path.join(os.path.realpath(parent), name)
                if os.path.isabs(parent) and Path(target).is_relative_to(inside):
                    link.unlink()
                    link.symlink_to(os.path.relpath(target, os.path.realpath(link.parent)))

    def remove(self) -> None:
        """Remove the folder with its content. Idempotent. Raises StorageUnavailableError."""
        if self._fd >= 0 and self.belongs_here:
            with translated(self.folder):
                self._delete()

    def keep(self) -> None:
        """Keep the folder, which may be the only copy of its files, under a name that is never swept."""
        if self._fd >= 0 and self.belongs_here:
            kept = self._lock.with_name(self._lock.name.removesuffix(TEMP_SUFFIX) + ".kept")
            with translated(self.folder):
                os.rename(self._outer, kept)
                self.folder = kept / _INNER
                self._unlock()

    def _delete(self) -> None:
        if self._outer.exists():
            shutil.rmtree(self._outer)
        self._unlock()

    def _unlock(self) -> None:
        """Release the lock, as the last step: a folder without a lock is swept."""
        fd, self._fd = self._fd, -1
        forget(fd)
        with suppress(FileNotFoundError):  # another process has just swept it
            os.unlink(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        try:
            self.remove()
        except StorageUnavailableError as failure:
            if error is None:
                raise
            error.add_note(f"async_ckpt: {failure}")

    def __repr__(self) -> str:
        return f"<Scratch {self.folder}{'' if self._fd >= 0 else ' (removed)'}>"


def sync_all(path: Path) -> int:
    """Make a file, or a folder with its content, durable. Returns the bytes of its files."""
    num_bytes = 0
    files = [path] if path.is_file() else [one for one in sorted(path.rglob("*")) if stat.S_ISREG(one.lstat().st_mode)]
    for file in files:
        fd = os.open(file, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
        try:
            sync_file(fd)
            num_bytes += os.fstat(fd).st_size
        finally:
            close_quietly(fd)
    if path.is_dir():
        for folder in [path, *(inner for inner in path.rglob("*") if inner.is_dir() and not inner.is_symlink())]:
            sync_folder(folder)
    return num_bytes


def publish(written: Path, target: Path, *, replaced: Callable[[str], bool] = lambda _: False) -> None:
    """Rename a durable file or folder to its final path, atomically and durably.

    A file replaces a file. A folder replaces a folder and takes over its permissions and the old files that were not
    written again, except paths for which `replaced` returns True. Raises the errors of `refuse_misfit`.
    """
    refuse_misfit(written, target)
    if _is_folder(target):
        written.chmod(stat.S_IMODE(target.stat().st_mode))
    if _is_folder(target) and any(target.iterdir()):
        _publish_over(written, target, replaced)
    else:
        os.replace(written, target)
    sync_folder(target.parent)


def refuse_misfit(written: Path, target: Path) -> None:
    """Raise IsADirectoryError or FileExistsError if one is a file and the other a folder."""
    if _is_folder(target) and not written.is_dir():
        raise IsAFolderError(f"{target} is a folder, but a file was written; give another name")
    if written.is_dir() and os.path.lexists(target) and not _is_folder(target):
        raise OccupiedError(f"{target} is a file, but a folder was written; give another name")


def refuse_current(folder: str | Path, would_be: str = "replaced") -> None:
    """Raise ValueError if a folder to be replaced, or deleted, is the current one of this process, or contains it."""
    with suppress(FileNotFoundError):  # the current folder was deleted
        if Path.cwd().is_relative_to(os.path.realpath(folder)):
            raise ValueError(
                f"{folder} is the current folder, or a parent of it, and would be {would_be}; give a folder inside it"
            )


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _publish_over(written: Path, target: Path, replaced: Callable[[str], bool]) -> None:
    """Replace a folder by a new one, which takes over the files that were not written again."""
    _link_missing(target, written, replaced)
    _exchange(written, target)
    # Another process may have written a file to the old folder between the two calls above.
    _link_missing(written, target, replaced)
    sync_folder(target)


def _link_missing(source: Path, target: Path, replaced: Callable[[str], bool]) -> None:
    for path in sorted(source.rglob("*")):
        inner = path.relative_to(source)
        to = target / inner
        if os.path.lexists(to) or replaced(inner.as_posix()):
            continue
        if path.is_dir() and not path.is_symlink():
            to.mkdir(stat.S_IMODE(path.stat().st_mode))
        else:
            with suppress(FileExistsError):
                os.link(path, to, follow_symlinks=False)


def _exchange(a: Path, b: Path) -> None:
    """Swap two folders by renameat2(2) with RENAME_EXCHANGE, or else by several renames, which are not atomic."""
    if sys.platform == "linux":
        at_fdcwd = -100
        if call_libc("renameat2", at_fdcwd, os.fsencode(a), at_fdcwd, os.fsencode(b), _EXCHANGE) == 0:
            return
    aside = a.with_name(f"{a.name}.old")
    os.rename(b, aside)
    os.rename(a, b)
    os.rename(aside, a)


def take_away(parent: Path, name: str) -> None:
    """Remove the scratch folders of this name, even those of live writers, which then cannot publish any more.

    Each folder is renamed first, so that its writer has either published it or finds it missing.
    """
    names = os.listdir(parent)
    for folder in names:
        lock = folder.removesuffix(FOLDER_SUFFIX)
        if folder != lock and temps_of(name, [lock]):
            gone = parent / f"{temp_stem(name)}{os.urandom(4).hex()}{TEMP_SUFFIX}{FOLDER_SUFFIX}"
            with suppress(FileNotFoundError):
                os.rename(parent / folder, gone)
                shutil.rmtree(gone, ignore_errors=True)  # remaining files have no lock, and are swept later


def _folder_of(lock: Path) -> Path:
    return lock.with_name(lock.name + FOLDER_SUFFIX)


def sweep(parent: Path, name: str | None = None) -> None:
    """Remove the leftovers of dead writers of this name, or of any name."""
    names = os.listdir(parent)
    for temp in _temps_of(name, names):
        # The writer may have died before it created its folder, or after it removed it.
        if is_dead(parent / temp, delete=True):
            shutil.rmtree(_folder_of(parent / temp), ignore_errors=True)
    locks = set(os.listdir(parent))
    for folder in names:
        lock = folder.removesuffix(FOLDER_SUFFIX)
        if folder != lock and _temps_of(name, [lock]) and lock not in locks:
            shutil.rmtree(parent / folder, ignore_errors=True)


def _temps_of(name: str | None, names: list[str]) -> list[str]:
    if name is not None:
        return temps_of(name, names)
    return [temp for temp in names if temp.startswith(".") and temp.endswith(TEMP_SUFFIX)]
