"""`save` and `load` for one archive at any path, without a managed run.

In: a state and a path, or a path. Out: a handle, or the state. Knows nothing of: training, retention.
"""

from __future__ import annotations

import contextlib
import mmap as mmap_module
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import torch

from .commit.manifest import NAME as MANIFEST
from .commit.manifest import Archive, parse
from .commit.run import Run
from .errors import CorruptCheckpointError, NotCommittedError, StorageUnavailableError
from .handle import SaveHandle
from .load import OpenArchive, Select, load_state
from .saver import Saver
from .spans import wall_time
from .storage.base import Reader, Sink, Storage
from .storage.local import LocalStorage, temps_of

_saver: Saver | None = None
_saver_lock = threading.Lock()


def save(obj: Any, path: str | os.PathLike[str], *, guard: Any = None) -> SaveHandle:
    """Save `obj` as one tar at `path`, in the order of arguments of `torch.save`; returns a handle at once.

    The file appears whole, or replaces what was there, when it is durable; until then nothing is visible. One such
    save is under way at a time: the next call waits for it, and the wait is in its report. Host memory is kept for
    the next save; `release()` gives it back.
    Raises UnsupportedStateError for a state that cannot be stored, and what `path` itself gives reason for (a folder,
    a URL, a name that is too long); all else ends in the handle.
    """
    target = _FileTarget(local_path(path))
    return _default_saver().save(obj, lambda: target, step=None, guard=guard)


def release() -> None:
    """Give back the host memory that one-off saves keep for the next one."""
    if _saver is not None:
        _saver.pool.release()


def load(
    path: str | os.PathLike[str],
    map_location: str | torch.device | None = None,
    select: Select = None,
    trust: bool = False,
    verify: bool = True,
    mmap: bool = False,
    types: Iterable[type] = (),
) -> Any:
    """The state saved at `path`: an archive, the folder of a committed step, or the root of a run (its newest step).

    Args:
        path: where it is.
        map_location: device of the tensors; None is the CPU, wherever they were saved from.
        select: read only this part: a name ("model"), a glob over dotted paths ("model.*.bias"), or several.
        trust: unpickle leaves that are not plain data. Only for files whose writer you trust: a pickle can run code.
        verify: compare the digest of every block that is touched.
        mmap: tensors are views of the mapped file, private to this process; with `verify=False` only what is used is read.
        types: namedtuple classes to rebuild; others come back as plain tuples.

    Raises NotCommittedError, CorruptCheckpointError, FormatVersionError, UntrustedObjectError, StorageUnavailableError,
    and KeyError when `select` matches nothing.
    """
    with _open_any(local_path(path), verify) as archive:
        return state_of(
            archive, map_location=map_location, select=select, trust=trust, mmap=mmap, types=types
        )


def state_of(
    archive: OpenArchive,
    *,
    map_location: str | torch.device | None,
    select: Select,
    trust: bool,
    mmap: bool,
    types: Iterable[type],
) -> Any:
    """Build the state, from the file itself or from a map of it."""
    if not mmap:
        return load_state(archive, map_location=map_location, select=select, trust=trust, types=types)
    if map_location is not None and torch.device(map_location).type != "cpu":
        raise ValueError("mmap=True makes views of the file, which lie on the CPU; leave map_location out")
    with open(archive.path, "rb") as file:
        mapped = mmap_module.mmap(file.fileno(), 0, access=mmap_module.ACCESS_COPY)
    return load_state(archive, select=select, trust=trust, types=types, mmap=mapped)


@contextlib.contextmanager
def open_run_archive(run: Run, step: int, *, verify: bool) -> Iterator[OpenArchive]:
    """The archive of a committed step, compared with its manifest. Raises NotCommittedError."""
    told = run.manifest(step).archives[0]
    try:
        reader = run.storage.open(run.archive_path(step, told))
    except FileNotFoundError:  # replaced or deleted between the two reads: what the manifest says now counts
        told = run.manifest(step).archives[0]
        reader = _open_named(run.storage, run.archive_path(step, told))
    with _checked(reader, told, run.storage.locate(run.archive_path(step, told)), verify) as archive:
        yield archive


@contextlib.contextmanager
def _open_any(path: Path, verify: bool) -> Iterator[OpenArchive]:
    """A file, the folder of a step, or the root of a run."""
    storage = LocalStorage(path if path.is_dir() else path.parent)
    if not path.is_dir():
        try:
            reader = storage.open(path.name)
        except FileNotFoundError as error:
            raise NotCommittedError(
                f"{path}: there is no such checkpoint", path=str(path), step=None
            ) from error
        with reader:
            yield OpenArchive(reader, path=str(path), verify=verify)
    elif storage.exists(MANIFEST):
        told = parse(storage.read(MANIFEST)[0], path=storage.locate(MANIFEST)).archives[0]
        with _checked(_open_named(storage, told.name), told, storage.locate(told.name), verify) as archive:
            yield archive
    else:
        run = Run(storage, clock=wall_time)
        step = run.latest()
        if step is None:
            raise NotCommittedError(
                f"{path}: no committed checkpoint in this folder", path=str(path), step=None
            )
        with open_run_archive(run, step, verify=verify) as archive:
            yield archive


def _open_named(storage: Storage, path: str) -> Reader:
    try:
        return storage.open(path)
    except FileNotFoundError as error:
        shown = storage.locate(path)
        raise CorruptCheckpointError(
            f"{shown} is missing, though its manifest is there", path=shown
        ) from error


@contextlib.contextmanager
def _checked(reader: Reader, told: Archive, shown: str, verify: bool) -> Iterator[OpenArchive]:
    """The archive behind a reader, which is closed afterwards; it must be the one that its manifest names."""
    with reader:
        if reader.num_bytes != told.num_bytes:
            raise CorruptCheckpointError(
                f"{shown}: {reader.num_bytes:,} bytes, its manifest says {told.num_bytes:,}; load an earlier checkpoint",
                path=shown,
            )
        archive = OpenArchive(reader, path=shown, verify=verify)
        if verify and archive.digest != told.digest:
            raise archive.corrupt("it is not the archive that its manifest names")
        yield archive


def local_path(path: str | os.PathLike[str]) -> Path:
    """Where a path or a `file://` URL lies on this machine. Raises TypeError and ValueError for anything else."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"a checkpoint goes to a path, not to a {type(path).__qualname__}; pass a string or a Path"
        )
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError("a checkpoint goes to a path of text, not of bytes")
    if "://" in text:
        url = urlsplit(text)
        if url.scheme != "file":
            raise ValueError(
                f"{url.scheme}:// is not supported by this version, which writes to local disk only"
            )
        text = unquote(url.path)
    if not text:
        raise ValueError("the path of a checkpoint is empty")
    where = Path(text).expanduser().absolute()
    try:
        where.is_dir()
    except OSError as error:  # a name that is too long, or a file system that does not answer
        raise StorageUnavailableError(f"{text:.300}: {error.strerror}", path=text) from error
    return where


def _forget_saver() -> None:
    """In a forked child: a saver of its own, and who held the lock is not here to release it."""
    global _saver, _saver_lock
    _saver, _saver_lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_saver)


def _default_saver() -> Saver:
    global _saver
    with _saver_lock:
        if _saver is None:
            _saver = Saver()
        return _saver


class _FileTarget:
    """One file at a path of the user's choice: durable is committed."""

    def __init__(self, path: Path) -> None:
        if path.is_dir():
            raise IsADirectoryError(
                f"{path} is a folder; give the path of a file, such as {path / 'checkpoint.tar'}"
            )
        self.path = str(path)
        self._storage = LocalStorage(path.parent)
        self._name = path.name

    def open(self, num_bytes: int) -> Sink:
        self._storage.sweep("", temps_of(self._name, self._storage.names("")), delete=True)
        return self._storage.create(self._name, num_bytes=num_bytes)

    def commit(self, archive: Archive) -> None:
        """Nothing to agree on."""

    def discard(self) -> None:
        """It may have replaced an older file: this one is whole, so it stays."""

    def afterwards(self) -> None:
        """Nothing to delete."""
