"""The publication of one version: from weights in host memory to a durable folder.

In: weights on the host. Out: the folder of a version, durable and complete. Knows nothing of: readers, checkpoints.

One publication at a time uses the `VersionSeries`, which decides whether the version may be added, and which version a
delta is computed against.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import xxhash

from ... import SaveHandle, SaveReport
from ...errors import CheckpointError, ClosedError, StepExistsError, StorageUnavailableError, UnsupportedStateError
from ...plumbing import (
    LocalStorage,
    Sink,
    Storage,
    WeightsSave,
    bulk,
    captured,
    disk,
    guards,
    hf_shards,
    hf_weights,
    leaf_names,
    loops,
    operations,
    rendezvous,
    safetensors,
    scratches,
    spec,
    threads,
)
from ...plumbing import timing as clock
from ..delta import (
    INDEX,
    DeltaFields,
    RankSlices,
    SliceOf,
    VersionIndex,
    checksum,
    dump_delta,
    folder_of,
    identity_of,
    seal,
    structure_of,
)
from ..lent import LentVersion
from .difference import checksum_of, encode, overwritten_bytes
from .live_weights import MemoryReplica
from .series import VersionSeries
from .version_files import WeightsState
from .versions import UNFINISHED_VERSION

# Encoded frames are collected in memory up to _FILE_BYTES, then written as a file. Tensors are encoded in batches of
# _ENCODED_AT_ONCE_BYTES.
_FILE_BYTES: Final = 256 * spec.MIB
_ENCODED_AT_ONCE_BYTES: Final = 512 * spec.MIB
# Most of these threads wait for the disk, which many small writes keep busier than a few large writes.
_NUM_WRITERS: Final = 8
_WRITE_BYTES: Final = 4 * spec.MIB
_PART_BYTES: Final = 8 * spec.MIB


class Publication(WeightsSave):
    """The save of one version, created by `Publisher.publish` on the caller's thread, and run on the library's loop.

    Its blocking methods run on helper threads, and only when it is this publication's turn.
    """

    def __init__(
        self,
        series: VersionSeries,
        version: int,
        weights: hf_weights.Weights,
        *,
        slices: Mapping[str, SliceOf],
        call: rendezvous.RankCall | None,
        acknowledged: int | None,
        held: captured.SnapshotView | None,
        optimizers: guards.Optimizers,
        spans: clock.Spans,
    ) -> None:
        """`weights` include the small files to publish. The weights are copied unless a snapshot holds them (`held`).

        For a model that is spread over ranks, `slices` are this rank's slices, and `call` is the call of all ranks.
        """
        # A store cannot rename folders, so each attempt has its own: files of two publishers never have the same name.
        self._attempt = f"files.{os.urandom(4).hex()}" if series.storage.remote else ""
        path = series.storage.locate(folder_of(version))
        super().__init__(path, weights, held=held, optimizers=optimizers, spans=spans)
        self._series, self.version, self._acknowledged = series, version, acknowledged
        self._slices, self._call = slices, call
        self._lent: Mapping[str, str] | None = None  # the checksums of all tensors, if the version is lent
        self._result: tuple[VersionIndex, WeightsState, bytes] | None = None
        self._is_put = False  # whether the index may have been written
        self.readable: Future[None] = threads.running_future()  # resolves when lent, durable or failed
        self.readable_of_all: Future[None] = threads.running_future()  # the same, on all ranks

    def reported_as(self, roots: tuple[str, ...]) -> tuple[operations.Kind, tuple[str, ...]]:  # noqa: ARG002
        return "publish", (self._series.versions.root,)

    @property
    def _folder(self) -> str:
        return folder_of(self.version)

    def begin(self) -> SaveHandle:
        handle = super().begin()
        loops.get_loop().begin(self._wait_for_ranks())
        return handle

    async def _wait_for_ranks(self) -> None:
        """Wait until all ranks have published the version, after notifying them that this rank has."""
        try:
            await loops.awaitable(self.readable)
            if self._call is not None and await self._call.all_done([], self._check_failed):
                await loops.off_loop(self._call.decide)
            elif self._call is not None:
                await self._call.receive()
            self.readable_of_all.set_result(None)
        except BaseException as error:
            self.readable_of_all.set_exception(error)

    def _check_failed(self) -> None:
        """Raises ClosedError, to end a wait, once this publication has failed."""
        if self.has_failed:
            raise ClosedError(f"{self.path} was not published")

    async def _write(self) -> None:
        try:
            await loops.off_loop(self._write_version)
        except StorageUnavailableError:
            if self._scratch is not None and not self._scratch.is_there:
                await loops.off_loop(self._series.ownership.check)  # raises if another publisher has removed it
            raise

    def failed(self, error: BaseException) -> None:
        if self._attempt and not self._is_put:
            with suppress(CheckpointError):
                self._series.versions.discard(self.version, self._attempt)
        self._release_weights()
        self._series.is_clean = False
        # A publisher that has lost its root lends no versions any more.
        if self._series.offer is not None and (self._lent is not None or isinstance(error, ClosedError)):
            self._series.offer.withdraw()
        if not self.readable.done():
            self.readable.set_exception(error)
        if self._call is not None:
            self._call.fail(error)
        super().failed(error)
        self._series.base.crew.stop()

    async def tidy(self) -> None:
        """Delete old versions, too. On a disk, each has a hidden name while it is being deleted."""
        await super().tidy()
        await loops.off_loop(self._series.retain)

    def _report(self, call_seconds: float) -> SaveReport:
        return replace(super()._report(call_seconds), step=self.version)

    # --- blocking, on helper threads --------------------------------------------------------------------------

    def _write_version(self) -> None:
        weights = self._weights = self._weights._replace(
            tensors=self._weights.as_published(self._weights.tensors), as_published=dict
        )
        structure = structure_of(
            (n, leaf_names.dtype_name(t.dtype), tuple(t.shape)) for n, t in weights.tensors.items()
        )
        self._series.prepare(self.version, structure, weights.adapter, self._check)
        self._series.base.reserve(weights.tensors)
        self._offer(structure)
        place, prefix = self._begin_folder()
        base = self._series.base.replica_for(self.version, self._series.versions, self._acknowledged)
        if base is None or self._exceeds_weights(base):
            self._result = self._write_anchor(place, prefix, structure)
        else:
            self._result = self._write_delta(place, prefix, structure, base)

    def _offer(self, structure: str) -> None:
        """Lend the weights to other processes of this host, before they are durable."""
        if self._series.offer is None:
            return
        name, weights = self._series.loan_name(self._check), self._weights
        lent = LentVersion(self.version, "", structure, {}, weights.files, weights.adapter, self.rank_slices)
        num_ranks = self._series.num_ranks
        self._lent = self._series.offer.offer(name, lent, weights.tensors, self._check, num_ranks=num_ranks)
        if self._lent is not None:
            self.readable.set_result(None)

    def _begin_folder(self) -> tuple[Storage, str]:
        """The storage and the prefix for the files: a scratch folder at the root of a disk, an attempt in a store."""
        storage = self._series.storage
        if storage.remote:
            self._series.delete_replaced()
            return storage, f"{self._folder}/{self._attempt}/"
        root = Path(storage.locate(""))
        self._scratch = scratches.Scratch(root, UNFINISHED_VERSION)
        self._series.ownership.check()  # a publisher that takes the root from now on removes the folder
        return LocalStorage(self._scratch.folder), ""

    def _write_anchor(self, place: Storage, prefix: str, structure: str) -> tuple[VersionIndex, WeightsState, bytes]:
        shards = hf_shards.shards_of(self._weights, hf_shards.MAX_SHARD_BYTES)
        small_files = sorted(self._weights.files.items())
        self._total_bytes = sum(shard.num_bytes for shard in shards) + sum(len(data) for _, data in small_files)
        free = None if place.remote else disk.free_bytes_at(Path(place.locate("")))
        if free is not None and free < self._total_bytes:
            raise disk.full(Path(self.path), self._total_bytes, free)
        checksums = self._copy_shards(shards, place, prefix)
        for name, data in small_files:
            self._check()
            place.replace(prefix + name, data)
            self._num_bytes += len(data)
        state = WeightsState(self.version, identity_of(checksums), structure, checksums)
        index = self._index(
            state,
            {name: shard.name for shard in shards for name in shard.tensors},
            checksums=checksums,
            digests={name: checksum(data) for name, data in small_files},
            heads={shard.name: checksum(shard.head) for shard in shards},
        )
        return index, state, seal(hf_shards.index_of(shards, index.weight_map, **index.metadata()))

    def _copy_shards(self, shards: list[hf_shards.Shard], place: Storage, prefix: str) -> dict[str, str]:
        """Write the files, several parts at once, and compute the checksums of the tensors at the same time."""
        parcels = [bulk.Parcel(partial(hf_shards.ShardReader, s), prefix + s.name, s.num_bytes) for s in shards]
        checksums = dict(self._lent or {})

        def finished(sink: Sink) -> None:
            self._num_bytes += sink.num_bytes
            self._num_retries += sink.num_retries
            sink.close()

        def copy_all() -> None:
            bulk.copy(
                parcels,
                place,
                background=True,
                num_threads=_NUM_WRITERS,
                segment_bytes=_PART_BYTES if place.remote else _WRITE_BYTES,
                check=self._check,
                finished=finished,
            )

        def add_checksum(name: str) -> None:
            self._check()
            checksums[name] = checksum_of(self._weights.tensors[name])

        crew = threads.Crew("anchor", 2, background=True)
        try:
            unknown = self._weights.tensors.keys() - checksums.keys()
            crew.run_all([copy_all, *(partial(add_checksum, name) for name in unknown)])
        finally:
            crew.stop()
        return checksums

    def _write_delta(
        self, place: Storage, prefix: str, structure: str, base: MemoryReplica
    ) -> tuple[VersionIndex, WeightsState, bytes]:
        encoding = self._series.base.policy.encoding
        assert base.state is not None
        assert encoding is not None
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
        state = WeightsState(self.version, identity_of(checksums), structure, checksums)
        delta = DeltaFields(base.state.version, encoding, base_identity=base.state.identity)
        index = self._index(state, files, delta=delta, digests=digests)
        return index, state, dump_delta(index)

    def _index(self, state: WeightsState, files: Mapping[str, str], **fields: Any) -> VersionIndex:
        """The index of the version, with the file of each tensor. `fields` are those of an anchor or of a delta."""
        return VersionIndex(
            self.version,
            files,
            identity=state.identity,
            structure=state.structure,
            slices=self.rank_slices,
            adapter=self._weights.adapter,
            attempt=self._attempt,
            **fields,
        )

    @property
    def rank_slices(self) -> RankSlices:
        """The slices of this rank, with the name of the call of all ranks. Waits for that name, and may raise."""
        if self._call is None:
            return RankSlices()
        return RankSlices(self._series.name_of(self._call, self._check), self._slices)

    def _exceeds_weights(self, base: MemoryReplica) -> bool:
        """Whether a delta of positions and values may need more bytes than the weights themselves."""
        if self._series.base.policy.encoding != "overwrite":
            return False
        sizes: list[int] = []  # appended to by several threads

        def add_size(name: str) -> None:
            self._check()
            sizes.append(overwritten_bytes(self._weights.tensors[name], base.region(name)))

        self._series.base.crew.run_all(partial(add_size, name) for name in self._weights.tensors)
        return sum(sizes) > self._total_bytes

    def _files_of_frames(self, base: MemoryReplica) -> Iterator[dict[str, tuple[bytes, str]]]:
        """For each file, its frames and the checksums of the new bytes, by tensor name."""
        pending: dict[str, tuple[bytes, str]] = {}
        for names in _batches(self._weights.tensors):
            encoded = self._encoded(names, base)
            pending.update({name: encoded[name] for name in names if name in encoded})
            if sum(len(frame) for frame, _ in pending.values()) >= _FILE_BYTES:
                yield pending
                pending = {}
        if pending:
            yield pending

    def _encoded(self, names: list[str], base: MemoryReplica) -> dict[str, tuple[bytes, str]]:
        frames: dict[str, tuple[bytes, str]] = {}
        encoding = self._series.base.policy.encoding
        assert encoding is not None

        def encode_tensor(name: str) -> None:
            self._check()
            try:
                frame = encode(self._weights.tensors[name], base.region(name), encoding)
            except ValueError as error:
                raise UnsupportedStateError(f"{name!a}: {error}; nothing was published", path=name) from None
            if frame is not None:
                frames[name] = frame

        self._series.base.crew.run_all(
            partial(encode_tensor, name) for name in sorted(names, key=lambda n: -self._weights.tensors[n].nbytes)
        )
        return frames

    def _commit(self) -> None:
        assert self._result is not None
        series, storage, (index, state, data) = self._series, self._series.storage, self._result
        series.ownership.check()
        self._is_put = True
        if self._scratch is None:
            try:
                storage.put_new(f"{self._folder}/{INDEX}", data)
            except FileExistsError as error:
                self._is_put = False
                raise StepExistsError(
                    f"{self.path}: another Publisher has meanwhile published this version, which is kept",
                    step=self.version,
                ) from error
        else:
            LocalStorage(self._scratch.folder).replace(INDEX, data)
            series.delete_replaced()
            self._rename(self._scratch, Path(storage.locate(self._folder)))
        try:
            series.ownership.check()
        except ClosedError:  # this publisher has lost the root meanwhile, so the version must not exist
            series.versions.withdraw(self.version, data, self._attempt)
            raise
        self._num_bytes += len(data)
        self._total_bytes = self._num_bytes  # the size of a delta was unknown until now
        series.base.update(index, state, self._weights.tensors)
        series.published(index)
        if not self.readable.done():
            self.readable.set_result(None)
        self._release_weights()
        series.base.crew.stop()

    def _rename(self, scratch: scratches.Scratch, target: Path) -> None:
        """Rename the folder into place. Raises ClosedError if another publisher owns the root."""
        try:
            with disk.translated(target):
                if not scratch.is_there:
                    raise FileNotFoundError(errno.ENOENT, "the folder of the version was removed", str(target))
                os.replace(scratch.folder, target)  # fails if the target has files
                disk.sync_folder(target.parent)
        except StorageUnavailableError as error:
            self._series.ownership.check()
            if os.path.lexists(target):
                raise StepExistsError(
                    f"{self.path} already exists and is kept; give a higher version", step=self.version
                ) from error
            raise


def _batches(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """The names of all tensors, in batches that are large enough to keep several threads busy."""
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
