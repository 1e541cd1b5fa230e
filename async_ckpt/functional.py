"""`save` and `load` for one archive at any path, without a managed run.

In: a state and a path, or a path. Out: a handle, or the state. Knows nothing of: training, retention.
"""

from __future__ import annotations

import contextlib
import mmap as mmap_module
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, Literal, Self, TypeVar

import torch

from .commit.manifest import NAME as MANIFEST
from .commit.manifest import Archive, Manifest, parse
from .commit.roots import Roots
from .commit.run import Run
from .errors import CorruptCheckpointError, NotCommittedError, StorageUnavailableError
from .format import zstd
from .handle import SaveHandle
from .load import OpenArchive, Part, check_select, check_verify, load_parts, load_state
from .saver import Saver
from .snapshot.host_copy import HostCopy, HostMemory
from .state.tree import Select
from .storage.base import Reader, Sink, Storage
from .storage.compressed import Zstd, compressing, decompressing
from .storage.local import temps_of
from .storage.scratch import refuse_in_running
from .storage.url import Engine, Where, parent_and_name, scheme_of, storage_at

T = TypeVar("T")
Compression = Zstd | Literal["zstd"] | None

_OTHER_COMPRESSIONS: Final = (".gz", ".tgz", ".bz2", ".xz", ".lz4", ".zip")

_saver: Saver | None = None
_host_memory = HostMemory()
_saver_lock = threading.Lock()


def save(
    obj: Any,
    path: Where,
    *,
    guard: Any = None,
    select: Select = None,
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
    `select`: save only this part: a name, a glob over dotted paths ("*.lora_*"), or several.
    `compression`: "zstd", or `Zstd(level=…, threads=…)`; a path that ends in ".zst" is compressed without it, too. The
    report's `num_bytes` are those of the archive, its destination's those that were written.
    `also`: the handle of an `export_hf` of the same moment, nothing having changed in between; what it copies to the
    host is not copied again. Each has its own handle.
    `path` may be a URL ("s3://bucket/x.tar"); `storage_options`, `engine` and `fs` are as for AsyncCheckpointer.
    Raises UnsupportedStateError for a state that cannot be stored, and what `path` itself gives reason for (a folder,
    an unknown scheme, a name that is too long, or promises gzip); all else ends in the handle.
    """
    place = {"storage_options": storage_options, "engine": engine, "fs": fs}
    target = FileTarget.at(path, place, compression)
    if target.path.endswith(_OTHER_COMPRESSIONS):
        raise ValueError(
            f"{target.path}: only zstd is written here; name it .tar.zst, or .tar for a plain one"
        )
    return _default_saver().save(
        lambda: obj, lambda: [target], step=None, guard=guard, select=select, also=host_copy_of(also)
    )


def host_copy_of(handle: SaveHandle | None) -> HostCopy | None:
    """Raises TypeError for a handle of another kind of save."""
    if handle is not None and (not isinstance(handle, SaveHandle) or handle.host_copy is None):
        raise TypeError("also= takes the handle that export_hf has just returned")
    return None if handle is None else handle.host_copy


def release() -> None:
    """Give back the host memory that one-off saves and wrapped functions keep for the next one."""
    if _saver is not None:
        _saver.pool.release()
    _host_memory.release()


def host_memory() -> HostMemory:
    """Memory for whole tensors, of which foreign writers get copies: one for the process."""
    return _host_memory


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
    and KeyError when `select`, or one of several in it, matches nothing.
    """
    check_verify(verify)
    place = {"storage_options": storage_options, "engine": engine, "fs": fs}
    with _open_any(path, verify, place) as archive:
        return state_of(
            archive, map_location=map_location, select=select, trust=trust, mmap=mmap, types=types
        )


def state_of(
    parts: Sequence[Part],
    *,
    map_location: str | torch.device | None,
    select: Select,
    trust: bool,
    mmap: bool,
    types: Iterable[type],
) -> Any:
    """Build the state, from the files themselves or from maps of them."""
    check_select(parts, select)
    if mmap and map_location is not None and torch.device(map_location).type != "cpu":
        raise ValueError("mmap=True makes views of the file, which lie on the CPU; leave map_location out")

    def load(part: Part) -> Any:
        return load_state(
            part.archive,
            map_location=map_location,
            select=select,
            trust=trust,
            types=types,
            mmap=_mapped(part.archive.path) if mmap else None,
            groups=part.groups,
        )

    return load_parts(parts, load)


def _mapped(path: str) -> mmap_module.mmap:
    if scheme_of(path) is not None:
        raise ValueError(f"mmap=True maps a local file, and {path} is none; leave it out")
    with open(path, "rb") as file:
        mapped = mmap_module.mmap(file.fileno(), 0, access=mmap_module.ACCESS_COPY)
    if zstd.begins(mapped[:4]):
        raise ValueError(f"mmap=True maps a file as it is, and {path} is compressed; leave it out")
    return mapped


def from_step(roots: Roots, step: int, use: Callable[[Sequence[Part]], T], *, verify: bool) -> T:
    """What `use` makes of the archives of a committed step. Where several roots hold it, the first that is sound counts.

    Raises NotCommittedError, CorruptCheckpointError, StorageUnavailableError.
    """
    holders = roots.holding(step)
    for run in holders[:-1]:
        try:
            with _open_step(run, step, verify=verify) as parts:
                return use(parts)
        except (NotCommittedError, CorruptCheckpointError, StorageUnavailableError) as error:
            warnings.warn(f"step {step} is read from another root: {error}", RuntimeWarning, stacklevel=4)
    with _open_step(holders[-1], step, verify=verify) as parts:
        return use(parts)


def _open_step(run: Run, step: int, *, verify: bool) -> contextlib.AbstractContextManager[list[Part]]:
    return _open_committed(run.storage, run.folder(step), lambda: run.manifest(step), verify=verify)


@contextlib.contextmanager
def _open_committed(
    root: Storage, folder: str, read: Callable[[], Manifest], *, verify: bool
) -> Iterator[list[Part]]:
    """The archives of a committed step, compared with its manifest, which `read` gives. Raises NotCommittedError."""
    made = read()
    try:
        reader = root.open(f"{folder}/{made.archives[0].name}")
    except FileNotFoundError:  # replaced or deleted between the two reads: what the manifest says now counts
        made = read()
        reader = _open_named(root, f"{folder}/{made.archives[0].name}")
    shown = root.locate(f"{folder}/{made.archives[0].name}")
    with _with_borrowed(reader, made, shown, root, verify) as parts:
        yield parts


@contextlib.contextmanager
def _with_borrowed(
    reader: Reader, made: Manifest, shown: str, root: Storage, verify: bool
) -> Iterator[list[Part]]:
    """The step's own archive, which is open already, and those that it has borrowed groups from."""
    lent: dict[tuple[str, Archive], set[str]] = {}
    for borrowed in made.elsewhere:
        lent.setdefault((borrowed.folder, borrowed.archive), set()).add(borrowed.group)
    with contextlib.ExitStack() as opened:
        parts = [Part(opened.enter_context(_checked(reader, made.archives[0], shown, verify)))]
        for (folder, told), groups in lent.items():
            path = f"{folder}/{told.name}"
            checked = _checked(_open_named(root, path), told, root.locate(path), verify)
            parts.append(Part(opened.enter_context(checked), frozenset(groups)))
        yield parts


@contextlib.contextmanager
def _open_any(path: Where, verify: bool, place: dict[str, Any]) -> Iterator[list[Part]]:
    """A file, the folder of a step, or the root of a run."""
    file = opened_as_file(path, place)
    if file is not None:
        reader, shown = file
        with reader:
            yield [Part(OpenArchive(decompressing(reader, shown), path=shown, verify=verify))]
        return
    storage = storage_at(path, **place)
    if storage.exists(MANIFEST):
        made = parse(storage.read(MANIFEST)[0], path=storage.locate(MANIFEST))
        name = made.archives[0].name
        root = (
            storage_at(parent_and_name(path, fs=place.get("fs"))[0], **place) if made.elsewhere else storage
        )
        with _with_borrowed(_open_named(storage, name), made, storage.locate(name), root, verify) as parts:
            yield parts
        return
    folder = _newest_folder(storage)
    if folder is None:
        where = storage.locate("")
        raise NotCommittedError(f"{where}: {_what_is_there(storage)}", path=where, step=None)

    def read() -> Manifest:
        path = f"{folder}/{MANIFEST}"
        try:
            return parse(storage.read(path)[0], path=storage.locate(path))
        except FileNotFoundError:  # deleted since: by retention, which leaves a newer one
            raise NotCommittedError(
                f"{storage.locate(folder)} was deleted this moment; load again", path=path, step=None
            ) from None

    with _open_committed(storage, folder, read, verify=verify) as parts:
        yield parts


def _what_is_there(storage: Storage) -> str:
    """Instead of a checkpoint."""
    names = storage.names("")
    if names:
        shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
        return f"no committed checkpoint there, but {shown}"
    is_folder = not storage.remote and storage.exists("")
    return "the folder is empty" if is_folder else "there is nothing at this path"


def _newest_folder(storage: Storage) -> str | None:
    """The folder of a run's newest step, whatever its steps are called: the last number in its name says which."""
    numbered = [(int(found[-1]), name) for name in storage.names("") if (found := re.findall(r"\d+", name))]
    for _, name in sorted(numbered, reverse=True):
        if storage.exists(f"{name}/{MANIFEST}"):
            return name
    return None


def opened_as_file(path: Where, place: dict[str, Any]) -> tuple[Reader, str] | None:
    """The object at a path, if it is one and no folder."""
    try:
        parent, name = parent_and_name(path, fs=place.get("fs"))
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
    global _saver, _saver_lock, _host_memory
    _saver, _saver_lock, _host_memory = None, threading.Lock(), HostMemory()


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
        parent, name = parent_and_name(path, fs=place.get("fs"))
        storage, how = storage_at(parent, **place), _how(compression, name)
        return cls(storage if how is None else compressing(storage, how), name)

    def __init__(self, storage: Storage, name: str) -> None:
        self.storage, self._name = storage, name
        self.path = self.storage.locate(self._name)
        if not self.storage.remote and Path(self.path).is_dir():
            example = os.path.join(self.path, "checkpoint.tar")
            raise IsADirectoryError(f"{self.path} is a folder; give the path of a file, such as {example}")
        if not self.storage.remote:
            refuse_in_running(Path(self.path).parent)

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
