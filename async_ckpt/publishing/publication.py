"""One version on its way, and what it leaves to the next one.

In: weights on the host. Out: the folder of a version, durable and whole. Knows nothing of: who reads it, checkpoints.

One publication at a time has the `Line`, which says what a version may be against.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import torch
import xxhash

from ..around.hub import Weights
from ..around.shards import MAX_SHARD_BYTES, Shard, ShardReader, index_of, shards_of
from ..errors import CheckpointError, StepExistsError, UnsupportedStateError
from ..format import safetensors
from ..format.delta import (
    INDEX,
    SliceOf,
    VersionIndex,
    checksum,
    dump_delta,
    folder_of,
    identity_of,
    seal,
    structure_of,
)
from ..host.loop import OffLoop
from ..host.threads import Crew, running_future
from ..report import Progress, SaveReport
from ..saving.copy_save import CopySave
from ..spans import Spans
from ..spec import MIB
from ..staging.guard import Optimizers
from ..state.captured import SnapshotView
from ..state.dtypes import dtype_name
from ..storage.bulk import Parcel, copy
from ..storage.disk import free_bytes_at, full, sync_folder, translated
from ..storage.interface import Sink, Storage
from ..storage.local import LocalStorage
from ..storage.scratch import Scratch
from .difference import checksum_of, encode, overwritten_bytes
from .line import Line
from .replica import MemoryReplica
from .source import State

# Of frames: so many are in memory until a file of them is written, beside those of the tensors being encoded.
_FILE_BYTES: Final = 256 * MIB
_ENCODED_AT_ONCE_BYTES: Final = 512 * MIB
# Most of which wait for the disk, which many small writes keep busier than a few large ones.
_NUM_WRITERS: Final = 8
_WRITE_BYTES: Final = 4 * MIB
_PART_BYTES: Final = 8 * MIB


class Publication(CopySave):
    """One version on its way."""

    def __init__(
        self,
        line: Line,
        version: int,
        weights: Weights,
        beside: Mapping[str, bytes],
        acknowledged: int | None,
        held: SnapshotView | None,
        optimizers: Optimizers,
        spans: Spans,
        called: Future[float],
        slices: Mapping[str, SliceOf] | None = None,
    ) -> None:
        names, tensors = list(weights.tensors), list(weights.tensors.values())
        self._folder = folder_of(version)
        # In a store nothing can be renamed: files of a publisher that has lost the root must not be those of another one.
        self._attempt = f"files.{os.urandom(4).hex()}" if line.storage.remote else ""
        super().__init__(
            line.storage.locate(self._folder),
            [] if held is not None else tensors,
            [] if held is not None else names,
            after=[] if held is None else [held.completion],
            num_tensors=len(tensors),
            optimizers=optimizers,
            spans=spans,
            called=called,
        )
        self._line, self._version, self._acknowledged = line, version, acknowledged
        self._slices = slices or {}
        self._small = {**weights.files, **beside}
        self._total_bytes = sum(tensor.nbytes for tensor in tensors)
        copies = tensors if held is not None else self.copy.tensors
        self._weights = weights._replace(tensors=dict(zip(names, copies, strict=True)))
        self._made: tuple[VersionIndex, State, bytes] | None = None
        self._is_put = False  # the index may be there
        self.ended: Future[None] = running_future()  # of one that was published: what is not kept is deleted

    @property
    def progress(self) -> Progress:
        staged = self._total_bytes if self.staged.done() else 0
        return Progress(self._total_bytes, staged, self._num_bytes)

    async def _write(self, off_loop: OffLoop) -> None:
        await off_loop(self._write_version)

    def failed(self, error: BaseException) -> None:
        if self._attempt and not self._is_put:
            with suppress(CheckpointError):
                self._line.versions.discard(self._version, self._attempt)
        self._let_go()
        self._line.is_clean = False
        super().failed(error)
        self._line.crew.stop()

    async def afterwards(self, off_loop: OffLoop) -> None:
        try:
            await super().afterwards(off_loop)
            await off_loop(self._line.retain)
        finally:
            self.ended.set_result(None)

    def _report(self, call_seconds: float) -> SaveReport:
        return replace(super()._report(call_seconds), step=self._version)

    # --- blocking, on helper threads --------------------------------------------------------------------------

    def _write_version(self) -> None:
        weights = self._weights = self._weights._replace(
            tensors=self._weights.as_published(self._weights.tensors), as_published=dict
        )
        structure = structure_of((n, dtype_name(t.dtype), tuple(t.shape)) for n, t in weights.tensors.items())
        self._line.prepare(self._version, structure, self._check)
        self._line.make_room(weights.tensors)
        place, prefix = self._place()
        base = self._line.base_for(self._acknowledged)
        if base is None or self._is_too_much(base):
            self._made = self._write_anchor(place, prefix, structure)
        else:
            self._made = self._write_delta(place, prefix, structure, base)

    def _place(self) -> tuple[Storage, str]:
        """Where the files go until all of them are there: beside the folder on a disk; in it in a store, which has no other way."""
        storage = self._line.storage
        if storage.remote:
            self._line.retire()
            self._line.versions.begin(self._version, token=self._line.ownership.token)
            return storage, f"{self._folder}/{self._attempt}/"
        root = Path(storage.locate(""))
        self._scratch = Scratch(root, "weight_v")
        return LocalStorage(self._scratch.folder), ""

    def _write_anchor(self, place: Storage, prefix: str, structure: str) -> tuple[VersionIndex, State, bytes]:
        shards = shards_of(self._weights, MAX_SHARD_BYTES)
        self._total_bytes = sum(shard.num_bytes for shard in shards) + sum(map(len, self._small.values()))
        free = None if place.remote else free_bytes_at(Path(place.locate("")))
        if free is not None and free < self._total_bytes:
            raise full(Path(self.path), self._total_bytes, free)
        checksums = self._copy_shards(shards, place, prefix)
        for name, data in sorted(self._small.items()):
            self._check()
            place.replace(prefix + name, data)
            self._num_bytes += len(data)
        identity = identity_of(checksums)
        index = VersionIndex(
            version=self._version,
            files={name: shard.name for shard in shards for name in shard.tensors},
            identity=identity,
            structure=structure,
            checksums=checksums,
            digests={name: checksum(data) for name, data in self._small.items()},
            heads={shard.name: checksum(shard.head) for shard in shards},
            start=self._start(),
            slices=self._slices,
            attempt=self._attempt,
        )
        state = State(self._version, identity, structure, checksums)
        return index, state, seal(index_of(shards, index.weight_map, **index.metadata()))

    def _copy_shards(self, shards: list[Shard], place: Storage, prefix: str) -> dict[str, str]:
        """Write the files, several parts at once, and take the checksums of the tensors meanwhile."""
        parcels = [Parcel(partial(ShardReader, s), prefix + s.name, s.num_bytes) for s in shards]
        checksums: dict[str, str] = {}

        def finished(sink: Sink) -> None:
            self._num_bytes += sink.num_bytes
            self._num_retries += sink.num_retries
            sink.close()

        def copy_all() -> None:
            copy(
                parcels,
                place,
                background=True,
                num_threads=_NUM_WRITERS,
                segment_bytes=_PART_BYTES if place.remote else _WRITE_BYTES,
                check=self._check,
                finished=finished,
            )

        def take(name: str) -> None:
            self._check()
            checksums[name] = checksum_of(self._weights.tensors[name])

        crew = Crew("anchor", 2, background=True)
        try:
            crew.run_all([copy_all, *(partial(take, name) for name in self._weights.tensors)])
        finally:
            crew.stop()
        return checksums

    def _write_delta(
        self, place: Storage, prefix: str, structure: str, base: MemoryReplica
    ) -> tuple[VersionIndex, State, bytes]:
        assert base.state is not None
        checksums, files, digests = dict(base.state.checksums), {}, {}
        for number, frames in enumerate(self._files_of_frames(base), start=1):
            name = f"model-{number:05d}.safetensors"
            files.update(dict.fromkeys(frames, name))
            checksums.update({name: wanted for name, (_, wanted) in frames.items()})
            head, whole = _head(frames), xxhash.xxh3_128()
            pieces = [head, *(frame for frame, _ in frames.values())]
            for piece in pieces:
                whole.update(piece)
            num_bytes = sum(map(len, pieces))
            self._write_file(place, prefix + name, num_bytes, map(memoryview, pieces))
            digests[name] = whole.hexdigest()
        state = State(self._version, identity_of(checksums), structure, checksums)
        index = VersionIndex(
            version=self._version,
            files=files,
            base=base.state.version,
            encoding=self._line.encoding,
            identity=state.identity,
            base_identity=base.state.identity,
            structure=structure,
            digests=digests,
            start=self._start(),
            slices=self._slices,
            attempt=self._attempt,
        )
        return index, state, dump_delta(index)

    def _start(self) -> str:
        return "" if self._line.start is None else self._line.start.word(self._check)

    def _is_too_much(self, base: MemoryReplica) -> bool:
        """Whether positions and values may be more than the weights themselves."""
        if self._line.encoding != "overwrite":
            return False
        sizes: list[int] = []  # each added at once

        def one(name: str) -> None:
            self._check()
            sizes.append(overwritten_bytes(self._weights.tensors[name], base.region(name)))

        self._line.crew.run_all(partial(one, name) for name in self._weights.tensors)
        return sum(sizes) > self._total_bytes

    def _files_of_frames(self, base: MemoryReplica) -> Iterator[dict[str, tuple[bytes, str]]]:
        """The frames of each file, by name."""
        pending: dict[str, tuple[bytes, str]] = {}
        for names in _batches(self._weights.tensors):
            found = self._encoded(names, base)
            pending.update({name: found[name] for name in names if name in found})
            if sum(len(frame) for frame, _ in pending.values()) >= _FILE_BYTES:
                yield pending
                pending = {}
        if pending:
            yield pending

    def _encoded(self, names: list[str], base: MemoryReplica) -> dict[str, tuple[bytes, str]]:
        found: dict[str, tuple[bytes, str]] = {}
        encoding = self._line.encoding
        assert encoding is not None

        def one(name: str) -> None:
            self._check()
            try:
                made = encode(self._weights.tensors[name], base.region(name), encoding)
            except ValueError as error:
                raise UnsupportedStateError(f"{name!a}: {error}; nothing was published", path=name) from None
            if made is not None:
                found[name] = made

        self._line.crew.run_all(
            partial(one, name) for name in sorted(names, key=lambda n: -self._weights.tensors[n].nbytes)
        )
        return found

    def _commit(self) -> None:
        assert self._made is not None
        line, storage, (index, state, data) = self._line, self._line.storage, self._made
        line.ownership.check()
        self._is_put = True
        if self._scratch is None:
            try:
                storage.put_new(f"{self._folder}/{INDEX}", data)
            except FileExistsError as error:
                self._is_put = False
                raise StepExistsError(
                    f"{self.path}: another Publisher has published this version meanwhile; it is kept",
                    step=self._version,
                ) from error
            line.ownership.check()  # who has lost the root meanwhile must not take it for a version of this line
        else:
            LocalStorage(self._scratch.folder).replace(INDEX, data)
            target = Path(storage.locate(self._folder))
            line.retire()
            with translated(target):
                os.replace(self._scratch.folder, target)  # which replaces no folder that has files
                sync_folder(target.parent)
        self._num_bytes += len(data)
        line.published(index, state, self._weights.tensors)
        line.mark_replaced()
        self._let_go()
        line.crew.stop()

    def _let_go(self) -> None:
        """The optimizers of the copies, and of the model."""
        self._weights = self._weights._replace(tensors={}, as_published=dict)
        self._small = {}
        self.copy.release()


def _batches(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """All names, as many at a time as are worth several threads."""
    batch: list[str] = []
    num_bytes = 0
    for name, tensor in tensors.items():
        batch.append(name)
        num_bytes += tensor.nbytes
        if num_bytes >= _ENCODED_AT_ONCE_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _head(frames: Mapping[str, tuple[bytes, str]]) -> bytes:
    entries, at = [], 0
    for name, (frame, _) in frames.items():
        entries.append(safetensors.Entry(name, "uint8", (len(frame),), at, at + len(frame)))
        at += len(frame)
    wanted = {name: checksum for name, (_, checksum) in frames.items()}
    return safetensors.header(entries, wanted, header_bytes_modulo=8, at=0)
