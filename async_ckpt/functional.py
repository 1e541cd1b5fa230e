"""`save` and `load` for one archive at any path, without a managed run.

In: a state and a path, or a path. Out: a handle, or the state. Knows nothing of: training, retention.
"""

from __future__ import annotations

import contextlib
import mmap as mmap_module
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import torch

from .commit.manifest import NAME as MANIFEST
from .commit.manifest import Archive, parse
from .commit.roots import Roots
from .commit.run import Run
from .errors import CorruptCheckpointError, NotCommittedError, StorageUnavailableError
from .handle import SaveHandle
from .load import OpenArchive, Select, load_state
from .saver import Saver
from .snapshot.host_copy import HostCopy, HostMemory
from .spans import wall_time
from .storage.base import Reader, Sink, Storage
from .storage.compressed import Zstd, compressing, decompressing
from .storage.local import temps_of
from .storage.url import Engine, Where, parent_and_name, scheme_of, storage_at

T = TypeVar("T")
Compression = Zstd | Literal["zstd"] | None

_saver: Saver | None = None
host_memory = HostMemory()  # of whole tensors, for foreign writers
_saver_lock = threading.Lock()


def save(
    obj: Any,
    path: Where,
    *,
    guard: Any = None,
    also: SaveHandle | None = None,
    compression: Compression = None,
    storage_options: Mapping[str, Any] | None = None,
    engine: Engine | None = None,
    fs: Any = None,
) -> SaveHandle:
    """Save `obj` as one tar at `path`, in the order of arguments of `torch.save`; returns a handle at once.

    The file appears whole, or replaces what was there, when it is durable; until then nothing is visible. One such
    save is under way at a time: the next call waits for it, and the wait is in its report. Host memory is kept for
    the next save; `release()` gives it back.
    `compression`: "zstd", or `Zstd(level=…, threads=…)`; a path that ends in ".zst" is compressed without it, too. The
    report's `num_bytes` are those of the archive, its destination's those that were written.
    `also`: the handle of an `export_hf` of the same moment, nothing having changed in between; what it copies to the
    host is not copied again. Each has its own handle.
    `path` may be a URL ("s3://bucket/x.tar"); `storage_options`, `engine` and `fs` are as for AsyncCheckpointer.
    Raises UnsupportedStateError for a state that cannot be stored, and what `path` itself gives reason for (a folder,
    an unknown scheme, a name that is too long); all else ends in the handle.
    """
    place = {"storage_options": storage_options, "engine": engine, "fs": fs}
    target = FileTarget.at(path, place, compression)
    return _default_saver().save(obj, lambda: [target], step=None, guard=guard, also=host_copy_of(also))


def host_copy_of(handle: SaveHandle | None) -> HostCopy | None:
    """Raises TypeError for a handle of another kind of save."""
    if handle is not None and (not isinstance(handle, SaveHandle) or handle.host_copy is None):
        raise TypeError("also= takes the handle that export_hf has just returned")
    return None if handle is None else handle.host_copy


def release() -> None:
    """Give back the host memory that one-off saves and wrapped functions keep for the next one."""
    if _saver is not None:
        _saver.pool.release()
    host_memory.release()


def load(
    path: Where,
    map_location: str | torch.device | None = None,
    select: Select = None,
    trust: bool = False,
    verify: bool = True,
    mmap: bool = False,
    types: Iterable[type] = (),
    *,
    storage_options: Mapping[str, Any] | None = None,
    engine: Engine | None = None,
    fs: Any = None,
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
        storage_options: what the client of a URL needs; see AsyncCheckpointer, for the next two as well.
        engine: which client that is.
        fs: an fsspec filesystem to use instead.

    Raises NotCommittedError, CorruptCheckpointError, FormatVersionError, UntrustedObjectError, StorageUnavailableError,
    and KeyError when `select` matches nothing.
    """
    place = {"storage_options": storage_options, "engine": engine, "fs": fs}
    with _open_any(path, verify, place) as archive:
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
    if scheme_of(archive.path) is not None:
        raise ValueError(f"mmap=True maps a local file, and {archive.path} is none; leave it out")
    with open(archive.path, "rb") as file:
        mapped = mmap_module.mmap(file.fileno(), 0, access=mmap_module.ACCESS_COPY)
    return load_state(archive, select=select, trust=trust, types=types, mmap=mapped)


def from_step(roots: Roots, step: int, use: Callable[[OpenArchive], T], *, verify: bool) -> T:
    """What `use` makes of the archive of a committed step. Where several roots hold it, the first that is sound counts.

    Raises NotCommittedError, CorruptCheckpointError, StorageUnavailableError.
    """
    holders = roots.holding(step)
    for run in holders[:-1]:
        try:
            with _open_committed(run, step, verify=verify) as archive:
                return use(archive)
        except (NotCommittedError, CorruptCheckpointError, StorageUnavailableError) as error:
            warnings.warn(f"step {step} is read from another root: {error}", RuntimeWarning, stacklevel=4)
    with _open_committed(holders[-1], step, verify=verify) as archive:
        return use(archive)


@contextlib.contextmanager
def _open_committed(run: Run, step: int, *, verify: bool) -> Iterator[OpenArchive]:
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
def _open_any(path: Where, verify: bool, place: dict[str, Any]) -> Iterator[OpenArchive]:
    """A file, the folder of a step, or the root of a run."""
    file = opened_as_file(path, place)
    if file is not None:
        reader, shown = file
        with reader:
            yield OpenArchive(decompressing(reader, shown), path=shown, verify=verify)
        return
    storage = storage_at(path, **place)
    if storage.exists(MANIFEST):
        told = parse(storage.read(MANIFEST)[0], path=storage.locate(MANIFEST)).archives[0]
        with _checked(_open_named(storage, told.name), told, storage.locate(told.name), verify) as archive:
            yield archive
        return
    run = Run(storage, clock=wall_time)
    step = run.latest()
    if step is None:
        where = storage.locate("")
        raise NotCommittedError(f"{where}: no committed checkpoint there", path=where, step=None)
    with _open_committed(run, step, verify=verify) as archive:
        yield archive


def opened_as_file(path: Where, place: dict[str, Any]) -> tuple[Reader, str] | None:
    """The object at a path, if it is one and no folder."""
    try:
        parent, name = parent_and_name(path, fs=place["fs"])
    except ValueError:  # the root of a bucket
        return None
    storage = storage_at(parent, **place)
    try:
        return storage.open(name), storage.locate(name)
    except (FileNotFoundError, IsADirectoryError):
        return None


def _how(compression: Compression, name: str) -> Zstd | None:
    """What the user said, or what the name says."""
    if compression is None:
        return Zstd() if name.endswith(".zst") else None
    if compression == "zstd":
        return Zstd()
    if not isinstance(compression, Zstd):
        raise ValueError(f'compression must be "zstd", a Zstd(…) or None, got {compression!r}')
    return compression


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


class FileTarget:
    """One object at a path of the user's choice: durable is committed."""

    @classmethod
    def at(cls, path: Where, place: dict[str, Any], compression: Compression = None) -> Self:
        """What the user said, checked. `place` are the options of its URL."""
        parent, name = parent_and_name(path, fs=place["fs"])
        storage, how = storage_at(parent, **place), _how(compression, name)
        return cls(storage if how is None else compressing(storage, how), name)

    def __init__(self, storage: Storage, name: str) -> None:
        self.storage, self._name = storage, name
        self.path = self.storage.locate(self._name)
        if not self.storage.remote and Path(self.path).is_dir():
            example = os.path.join(self.path, "checkpoint.tar")
            raise IsADirectoryError(f"{self.path} is a folder; give the path of a file, such as {example}")

    def open(self, num_bytes: int, segment_bytes: int, max_segments: int) -> Sink:
        if not self.storage.remote:
            self.storage.sweep("", temps_of(self._name, self.storage.names("")), delete=True)
        return self.storage.create(
            self._name, num_bytes=num_bytes, segment_bytes=segment_bytes, max_segments=max_segments
        )

    def check(self) -> None:
        """Nothing to ask."""

    def commit(self, archive: Archive, *, late: bool = False) -> None:
        """Nothing to agree on."""

    def hangs(self, quiet: Future[None]) -> None:
        """There is no other place to go on with."""

    def discard(self) -> None:
        """It may have replaced an older file: this one is whole, so it stays."""

    def afterwards(self) -> None:
        """Nothing to delete."""
