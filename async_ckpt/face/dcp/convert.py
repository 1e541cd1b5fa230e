"""Converters: load a checkpoint of torch.distributed.checkpoint into live objects, or write one from a step.

In: paths. Out: filled live objects, or a folder that plain torch loads. Knows nothing of: plans.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Final

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from ...core.loading.archives.contents import CPU, Part
from ...core.loading.archives.find import from_path
from ...core.loading.archives.step_archives import Readers
from ...core.loading.fill import Wanted, fill, planned
from ...core.loading.restore import RestoreOptions, restore_state
from ...core.runs.foreign_entries import OF_DCP
from ...core.runs.manifest import NAME as MANIFEST
from ...core.spec import GIB, MIB, flag
from ...core.state.capture import pickled
from ...core.state.names import Select
from ...core.storage.interface import Storage
from ...core.storage.place import Anywhere, written_at
from ...core.storage.sequential import Appender
from ..around.streams import AppenderFile
from .entries import SavedItem, entries_of, kept_metadata, readers_of_this_rank, selected, value_of
from .metadata import metadata_of

# The bytes in memory at once: one piece of a tensor, or several small tensors.
_BATCH_BYTES: Final = 64 * MIB
# The size after which another file is begun: torch reads several files on several threads.
_FILE_BYTES: Final = 4 * GIB
_FILE: Final = "__0_{}.distcp"


def restore(
    state: Any,
    path: Anywhere,
    *,
    select: Select = None,
    strict: bool | None = None,
    trust: bool = False,
    verify: bool = True,
    types: Iterable[type] = (),
    from_ranks: Mapping[str, int] | None = None,
) -> None:
    """Load a checkpoint of torch.distributed.checkpoint into live objects in place.

        async_ckpt.integrations.dcp.restore({"model": model, "optim": optimizer}, "old/checkpoint")

    It also reads everything that `async_ckpt.load` reads. DTensors may have any placements: each rank reads the ranges
    that it needs. No collective is used, so a single rank may call this. No pickle that could run code is loaded.

    Args:
        state: the objects to load into, in the structure that was saved.
        path: the folder of the checkpoint; a path, a URL or a Place.
        select: restore only this part: a name, a glob over dotted paths such as "*.lora_*", or several of them.
        strict: as for `AsyncCheckpointer.restore`.
        trust: unpickle values that are not plain data. Use it only for files whose writer you trust.
        verify: compare the digest of every block that is read. In a folder of torch, whole entries are read and
            compared with their CRC-32.
        types: classes of namedtuples, dataclasses and enums to rebuild.
        from_ranks: as for `AsyncCheckpointer.restore`.

    Raises the errors of `AsyncCheckpointer.restore`.
    """
    trust, verify = flag("trust", trust), flag("verify", verify)
    options = RestoreOptions(select, None if strict is None else flag("strict", strict), trust, verify, types)

    def fill_state(parts: Sequence[Part]) -> None:
        restore_state(parts, state, options)

    from_path(path, fill_state, verify=verify, readers=readers_of_this_rank(from_ranks))


def to_dcp(
    source: Anywhere,
    destination: Anywhere,
    *,
    select: Select = None,
    verify: bool = True,
    trust: bool = False,
    from_ranks: Mapping[str, int] | None = None,
) -> None:
    """Write the state at `source` as a folder that `torch.distributed.checkpoint.load` reads without this library.

        async_ckpt.integrations.dcp.to_dcp("runs/a", "out/checkpoint")
        torch.distributed.checkpoint.load({"model": model.state_dict()}, checkpoint_id="out/checkpoint")

    The state is streamed through about 256 MiB of memory, regardless of its size. The folder's metadata is written
    last, when everything else is durable. Call it in one process.

    Args:
        source: a step, a run (its newest step), an archive, or another source that `async_ckpt.load` reads; a path, a
            URL or a Place.
        destination: a folder without a checkpoint; a path, a URL or a Place.
        select: write only this part: a name, a glob over dotted paths such as "*.lora_*", or several of them.
        verify: compare the digest of every block that is read.
        trust: unpickle values that are not plain data. Use it only for files whose writer you trust.
        from_ranks: the rank whose value to take for an entry that was saved per rank, by name, such as {"rng": 0}.

    Raises FileExistsError if there is a checkpoint at the destination, ValueError if `from_ranks` lacks an entry that
    was saved per rank, TypeError for a state that is not a dict, and the errors of `async_ckpt.load`.
    """
    trust, verify = flag("trust", trust), flag("verify", verify)
    storage = written_at(destination).storage()
    for name in (OF_DCP, MANIFEST):
        if storage.exists(name):
            raise FileExistsError(f"{storage.locate('')}: a checkpoint already exists; give another folder")

    def write(parts: Sequence[Part]) -> None:
        with _DcpFolder(storage) as folder:
            entries = selected(entries_of(parts), select)
            metadata = metadata_of((entry.described for entry in entries.values()), kept := kept_metadata(parts))
            _write_values(folder, entries, frozenset(kept.get("blobs", ())), trust=trust)
            _write_tensors(folder, entries, metadata)
            folder.finish(metadata)

    from_path(source, write, verify=verify, readers=Readers(from_ranks=from_ranks, reads_all=True))


def _write_values(folder: _DcpFolder, entries: Mapping[str, SavedItem], blobs: frozenset[str], *, trust: bool) -> None:
    for name, entry in entries.items():
        if entry.tensor is None:
            wanted, make = value_of(name, entry, trust=trust)
            fill(planned([(entry.file, wanted)]))
            value = make()
            folder.add(MetadataIndex(name), bytes(value) if name in blobs else pickled(value))


def _write_tensors(folder: _DcpFolder, entries: Mapping[str, SavedItem], metadata: Metadata) -> None:
    batch: list[tuple[str, SavedItem, Wanted]] = []
    for name, entry in entries.items():
        if entry.tensor is None:
            continue
        dtype = entry.file.dtype(entry.tensor)
        chunks = list(_chunks(entry.shape, _BATCH_BYTES // dtype.itemsize))
        metadata.state_dict_metadata[name].chunks = [  # type: ignore[union-attr]
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks
        ]
        for offsets, sizes in chunks:
            into = torch.empty(sizes, dtype=dtype, device=CPU)
            batch.append((name, entry, Wanted(entry.tensor, into, offsets)))
            if sum(item.into.nbytes for _, _, item in batch) >= _BATCH_BYTES:
                _flush(folder, batch)
    _flush(folder, batch)


def _flush(folder: _DcpFolder, batch: list[tuple[str, SavedItem, Wanted]]) -> None:
    fill(planned([(entry.file, [wanted]) for _, entry, wanted in batch]))
    for name, _, wanted in batch:
        folder.add(MetadataIndex(name, wanted.offsets), wanted.into)
    batch.clear()


def _chunks(
    shape: tuple[int, ...], max_items: int, offsets: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The rectangles as which to write a tensor: runs of rows with at most `max_items` items."""
    row, before = prod(shape[len(offsets) + 1 :]), (1,) * len(offsets)
    if len(offsets) >= len(shape) or prod(shape[len(offsets) :]) <= max_items:
        rest = shape[len(offsets) :]
        yield (*offsets, *(0,) * len(rest)), (*before, *rest)
    elif row > max_items:
        for number in range(shape[len(offsets)]):
            yield from _chunks(shape, max_items, (*offsets, number))
    else:
        size, step = shape[len(offsets)], max_items // row
        rest = shape[len(offsets) + 1 :]
        for at in range(0, size, step):
            yield (*offsets, at, *(0,) * len(rest)), (*before, min(step, size - at), *rest)


class _DcpFolder:
    """A checkpoint folder being written. Unless `finish` is called, the end of the block deletes its files."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._storage_infos: dict[MetadataIndex, filesystem._StorageInfo] = {}
        self._files: list[str] = []  # complete files
        self._out: Appender | None = None
        self._is_finished = False

    def add(self, index: MetadataIndex, item: bytes | torch.Tensor) -> None:
        name = _FILE.format(len(self._files))
        out = self._out = self._out or Appender(self._storage, name, limit_bytes=2 * _FILE_BYTES)
        begin = out.num_bytes
        if isinstance(item, bytes):
            out.append(memoryview(item))
        else:
            torch.save(item, AppenderFile(out))  # type: ignore[arg-type]
        self._storage_infos[index] = filesystem._StorageInfo(name, begin, out.num_bytes - begin)
        if out.num_bytes >= _FILE_BYTES:
            self._end_file()

    def _end_file(self) -> None:
        if self._out is not None:
            self._out.finish()
            self._out.sink.close()
            self._files.append(_FILE.format(len(self._files)))
            self._out = None

    def finish(self, metadata: Metadata) -> None:
        self._end_file()
        metadata.storage_data = self._storage_infos
        if hasattr(metadata, "version"):  # from torch 2.9 on
            metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
        self._storage.put_new(OF_DCP, pickle.dumps(metadata))
        self._is_finished = True

    def __enter__(self) -> _DcpFolder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_finished:
            return
        if self._out is not None:
            self._out.abort()
        for name in self._files:
            self._storage.delete(name)
