"""One version on its way, and what it leaves to the next one.

In: weights on the host. Out: the folder of a version, durable and whole. Knows nothing of: who reads it, checkpoints.

One publication at a time has the line: the newest version, and the bytes that the next delta is against. These change only
when what they change to is durable.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import torch
import xxhash

from ..around.hub import Weights
from ..around.shards import MAX_SHARD_BYTES, Shard, ShardReader, index_of, shards_of
from ..errors import (
    CheckpointError,
    StateMismatchError,
    StepBehindError,
    StepExistsError,
    UnsupportedStateError,
)
from ..format import safetensors
from ..format.delta import (
    INDEX,
    Encoding,
    SliceOf,
    VersionIndex,
    checksum,
    dump_delta,
    folder_of,
    identity_of,
    structure_of,
)
from ..host.limits import num_cpus
from ..host.threads import Crew, running_future
from ..report import Progress, SaveReport
from ..saving.default import held_memory
from ..saving.delivery import OffLoop
from ..saving.errand import CopyErrand
from ..saving.worker import get_worker
from ..spans import Spans
from ..spec import MIB
from ..staging.guard import Optimizers
from ..state.dtypes import dtype_name
from ..state.held import Held
from ..storage.base import Sink, Storage
from ..storage.bulk import Parcel, copy
from ..storage.disk import free_bytes_at, full, sync_folder, translated
from ..storage.local import LocalStorage
from ..storage.place import Place
from ..storage.scratch import Scratch
from .difference import checksum_of, encode
from .ranks import RankLines, Start, newest_elsewhere
from .replica import MemoryReplica, bring
from .versions import Ownership, State, Versions, Where

# Of frames: so many are in memory until a file of them is written, beside those of the tensors being encoded.
_FILE_BYTES: Final = 256 * MIB
_ENCODED_AT_ONCE_BYTES: Final = 512 * MIB
# Most of which wait for the disk.
_NUM_WRITERS: Final = 4

_log = logging.getLogger("async_ckpt")


class Line:
    """What one publication leaves to the next. The one whose turn it is has it."""

    def __init__(
        self,
        storage: Storage,
        *,
        anchor_every: int,
        encoding: Encoding | None,
        keep: int | None,
        max_bytes: int | None,
        follows: bool,
        place: Place,
        start: Start | None = None,
        size: int | None = None,
    ) -> None:
        """`place` is the root; of what is spread over ranks, `start` and `size` are those of all ranks."""
        self.start = start
        self._place, self._size = place, size
        self._elsewhere: int | None = (
            None  # the newest version of other lines at the root, once it was looked for
        )
        self.is_clean = False  # nothing unfinished is left, of this publisher or one before it
        self._ranks = None if size is None else RankLines(place)
        self.storage, self.encoding, self.keep = storage, encoding, keep
        self.versions, self.ownership = Versions(storage), Ownership(storage)
        # Not all of them: the training has the better claim, and is slowed by whoever reads memory beside it.
        self.crew = Crew("encode", max(1, num_cpus() // 2), background=True)
        self._anchor_every, self._max_bytes = anchor_every, max_bytes
        self._follows = follows  # the newest version that is durable, not an acknowledged one
        self._base = MemoryReplica(self._take)
        self._num_since_anchor = 0
        self._structure = ""  # of the newest version

    def _take(self, num_bytes: int) -> torch.Tensor:
        try:
            return held_memory().lend(num_bytes, crew=get_worker().copiers, max_bytes=self._max_bytes)
        except MemoryError as error:
            raise MemoryError(
                f"deltas need the weights of the version before in host memory: {error}; encoding=None needs none"
            ) from None

    def prepare(self, version: int, structure: str) -> None:
        """See that a version may be added. Asks the storage."""
        root = self.versions.root
        self.ownership.take()
        if self._elsewhere is None:
            self._elsewhere = newest_elsewhere(self._place, self._size)
            self.storage.sweep_uploads()
        own = max(self.versions.numbers(), default=-1)
        newest = max(own, self._elsewhere)
        if newest == version:
            raise StepExistsError(
                f"{root}: version {version} is published already; give a higher one", step=version
            )
        if newest > version:
            raise StepBehindError(
                f"{root}: version {version} is not newer than {newest}, which is published; give a higher one, or "
                "publish to another root",
                step=version,
                newest=newest,
            )
        before = self._structure or (self.versions.read(own).structure if own >= 0 else "")
        if before not in ("", structure):
            raise StateMismatchError(
                f"{root}: version {own} has tensors of other names, dtypes or shapes, and readers apply one version to the "
                "other; publish another model to a root of its own",
                missing=(),
                unexpected=(),
                mismatched=(),
            )
        if not self.is_clean:
            self.versions.delete_unfinished()
            self.is_clean = True

    def make_room(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the memory for what deltas are against, before anything is written. Raises MemoryError."""
        if self.encoding is not None and self._anchor_every > 1:
            self._base.lay_out(_where(tensors))

    def base_for(self, acknowledged: int | None) -> MemoryReplica | None:
        """What a delta may be against now; None if the version is to be an anchor."""
        if self.encoding is None or self._num_since_anchor + 1 >= self._anchor_every:
            return None
        base = self._base
        if not self._follows:
            if acknowledged is None:
                return None
            try:
                # Against the bytes that are there, not those that were meant to be.
                bring(base, self.versions, acknowledged, self.crew)
            except CheckpointError as error:
                _log.warning("version %d was acknowledged, and cannot be read: %s", acknowledged, error)
                return None
        return base if base.state and base.state.version in self.versions.numbers() else None

    def published(self, index: VersionIndex, state: State, tensors: Mapping[str, torch.Tensor]) -> None:
        """A version is durable: it is the base of the next ones, if nothing else is."""
        self._structure = state.structure
        self._num_since_anchor = 0 if index.is_anchor else self._num_since_anchor + 1
        if self.encoding is None or self._anchor_every == 1:
            return
        base = self._base
        if not self._follows and base.state is not None:
            return
        is_all = index.is_anchor or base.state is None
        changed = tensors if is_all else {name: tensors[name] for name in index.files}
        base.note(None)
        base.take_over(changed, self.crew)
        base.note(state)

    def retain(self) -> None:
        """Delete what is neither among the newest versions nor needed by one of them."""
        if self.keep is None:
            return
        there = self.versions.numbers()
        # Of what other ranks may yet fail to publish, what is whole counts, and all after it.
        whole = there if self._ranks is None else sorted(self._ranks.sizes())
        if not whole:
            return
        oldest = whole[-self.keep :][0]
        needed = self.versions.needed_by([number for number in there if number >= oldest])
        self.versions.delete([number for number in there if number not in needed])

    def close(self) -> None:
        self.crew.stop()
        self._base = MemoryReplica(self._take)


def _where(tensors: Mapping[str, torch.Tensor]) -> dict[str, Where]:
    return {
        name: Where("", dtype_name(tensor.dtype), tuple(tensor.shape), 0, tensor.nbytes)
        for name, tensor in tensors.items()
    }


class Publication(CopyErrand):
    """One version on its way."""

    def __init__(
        self,
        line: Line,
        version: int,
        weights: Weights,
        beside: Mapping[str, bytes],
        acknowledged: int | None,
        held: Held | None,
        optimizers: Optimizers,
        spans: Spans,
        called: Future[float],
        slices: Mapping[str, SliceOf] | None = None,
    ) -> None:
        names, tensors = list(weights.tensors), list(weights.tensors.values())
        self._folder = folder_of(version)
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
        self.ended: Future[None] = running_future()  # of one that was published: what is not kept is deleted

    @property
    def progress(self) -> Progress:
        staged = self._total_bytes if self.staged.done() else 0
        return Progress(self._total_bytes, staged, self._num_bytes)

    async def _write(self, off_loop: OffLoop) -> None:
        await off_loop(self._write_version)

    def failed(self, error: BaseException) -> None:
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
        self._line.prepare(self._version, structure)
        self._line.make_room(weights.tensors)
        place, prefix = self._place()
        base = self._line.base_for(self._acknowledged)
        if base is None:
            self._made = self._write_anchor(place, prefix, structure)
        else:
            self._made = self._write_delta(place, prefix, structure, base)

    def _place(self) -> tuple[Storage, str]:
        """Where the files go until all of them are there: beside the folder on a disk; in it in a store, which has no other way."""
        storage = self._line.storage
        if storage.remote:
            return storage, f"{self._folder}/"
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
            start=self._start(),
            slices=self._slices,
        )
        state = State(self._version, identity, structure, checksums)
        return index, state, index_of(shards, **index.metadata())

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
        )
        return index, state, dump_delta(index)

    def _start(self) -> str:
        return "" if self._line.start is None else self._line.start.word(self._check)

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
        if self._scratch is None:
            storage.put_new(f"{self._folder}/{INDEX}", data)
        else:
            LocalStorage(self._scratch.folder).replace(INDEX, data)
            target = Path(storage.locate(self._folder))
            with translated(target):
                os.replace(self._scratch.folder, target)  # which replaces no folder that has files
                sync_folder(target.parent)
        self._num_bytes += len(data)
        line.published(index, state, self._weights.tensors)
        self._let_go()
        line.crew.stop()

    def _let_go(self) -> None:
        """Of the copies, and of the model."""
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
