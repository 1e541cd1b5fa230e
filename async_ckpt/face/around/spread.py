"""`export_hf` of a model that is sharded over ranks: each rank writes its slices; rank 0 assembles the folder.

In: the weights of one rank. Out: the same folder as of a whole model. Knows nothing of: the names of models' weights.

Each rank copies its slices to the host and writes them in the background to an archive beside the destination (in a
store: inside it). When the archives of all ranks are complete, rank 0 reads full tensors from them by ranges, writes
them one after the other, and notifies the other ranks, as in any collective call (`core.ranks.rendezvous`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch

from ...core.host.loop import awaitable, off_loop
from ...core.host.waits import wait_for
from ...core.loading.archives.contents import Part
from ...core.loading.archives.merged_archives import opened_parts
from ...core.loading.load import load_state
from ...core.ranks.rendezvous import Channel, RankCall
from ...core.ranks.start import WorldStart, start_of
from ...core.ranks.world import world_of_group
from ...core.report import SaveReport
from ...core.saving.file_target import FileTarget
from ...core.saving.handle import SaveHandle
from ...core.saving.kept_memory import slices_saver
from ...core.saving.request import FileRequest
from ...core.slicing.sharded import Slicer, is_sharded
from ...core.state.captured import FrozenTensors, SnapshotView
from ...core.state.names import dtype_named
from ...core.storage.interface import Storage
from ...core.storage.local import LocalStorage
from ...errors import CheckpointError, PeerFailedError, UnsupportedStateError
from .hf_folder import Export, ExportRequest
from .hf_weights import Tensors, Weights
from .ranges import chunks_of
from .shards import Shard, view_of

# How long a rank with whole weights waits for the store, and the time between two checks on a rank with sharded ones.
_LOOK_SECONDS: Final = 2.0
_PART: Final = ".async_ckpt-part"
_KEY: Final = "weights"
_ADVICE: Final = "call export_hf on every rank, with the same destination"


class OtherRanks:
    """The other ranks that may export to the same destination. Each call of `export_hf` creates one.

    A rank with whole weights exports alone, and cannot know whether other ranks wait for it. So it writes a note to the
    ranks' store that its weights are whole, and ranks with sharded weights keep a note there while they export.
    """

    def __init__(self, destination: Storage) -> None:
        self.path = destination.locate("").rstrip("/")
        self._start: WorldStart | None = None
        world = world_of_group()
        if world.store is not None:
            self._start = start_of(world)
        self._own = f"{world.rank} {os.urandom(4).hex()}"
        self._whole = ""  # the note of a rank with whole weights

    def call(self) -> RankCall:
        """Join the call of all ranks with sharded weights."""
        self._put_note("spread")
        self._call_store(partial(self._delete_note, "whole", f"{self._own.split()[0]} "))
        return self._channel.call(path=self.path)

    @property
    def _channel(self) -> Channel:
        return Channel.of_group("exports", _ADVICE, is_of_paths=True)

    def fail(self, error: BaseException) -> None:
        """Report an error that this rank has raised before it was known whether its weights are sharded."""
        if self._start is not None:
            self._channel.fail(error, path=self.path)

    def end(self) -> None:
        """End the call: delete this rank's note, and the note about whole weights that it has seen."""
        self._call_store(partial(self._delete_note, "spread", self._own))
        if self._whole:
            self._call_store(partial(self._delete_note, "whole", self._whole))

    def announce_whole(self) -> None:
        self._put_note("whole")

    def check_whole(self) -> None:
        """On a rank with whole weights, raise UnsupportedStateError if others export sharded weights. Blocks."""
        start = self._start
        # At the first export, the token may not have arrived yet. If rank 0 has not begun a collective call, no token
        # arrives, and no rank is exporting sharded weights.
        if start is None or not wait_for(start.token, _LOOK_SECONDS) or start.token.exception():
            return
        note = start.connection.ask(partial(self._note_about, "spread"))
        if wait_for(note, _LOOK_SECONDS) and not note.exception() and note.result():
            error = UnsupportedStateError(
                "none of this rank's weights is sharded, but other ranks export sharded weights to the same folder; "
                "nothing was written: make DTensors of this rank's weights, if need be on a mesh of this "
                "rank alone, or give another folder",
                path="",
            )
            self._channel.fail(error, path=self.path)  # so that this rank makes the same calls as the others
            raise error

    def check_spread(self) -> None:
        """On a rank with sharded weights, raise PeerFailedError if `watch` has seen a rank with whole weights."""
        if self._whole:
            rank = int(self._whole.split()[0])
            raise PeerFailedError(
                f"{self.path}: nothing was exported: none of the weights of rank {rank} is sharded; make DTensors of "
                "them, if need be on a mesh of that rank alone",
                rank=rank,
            )

    async def watch(self) -> None:
        """Check periodically whether another rank's weights are whole."""
        if self._start is None:
            return
        with contextlib.suppress(PeerFailedError):  # the call itself raises it
            await awaitable(self._start.token)
            while True:
                await asyncio.sleep(_LOOK_SECONDS)
                with contextlib.suppress(RuntimeError):
                    self._whole = await awaitable(self._start.connection.ask(partial(self._note_about, "whole")))

    # --- on the store's thread, once the token is known -------------------------------------------------------

    def _key(self, what: str) -> str:
        assert self._start is not None
        return f"{self._start.prefix}/exports/{what}/{self.path}"

    def _put_note(self, what: str) -> None:
        self._call_store(lambda store: store.set(self._key(what), self._own))

    def _note_about(self, what: str, store: Any) -> str:
        return store.get(self._key(what)).decode() if store.check([self._key(what)]) else ""

    def _delete_note(self, what: str, begin: str, store: Any) -> None:
        """Delete the note about `what` if it starts with `begin`."""
        if self._note_about(what, store).startswith(begin):
            store.delete_key(self._key(what))

    def _call_store(self, call: Any) -> None:
        """Call the store once the start has its token. Does not wait."""
        start = self._start
        if start is not None:
            start.token.add_done_callback(lambda token: token.exception() or start.connection.ask(call))


class PartFile:
    """The archive in which this rank leaves its slices for rank 0."""

    def __init__(self, destination: Storage) -> None:
        rank, name = world_of_group().rank, ""
        self.storage = destination
        if not destination.remote:
            above, name = os.path.split(destination.locate("").rstrip(os.sep))
            self.storage = LocalStorage(above)
        # In a store, the archive is inside the destination: its name is not that of a model's file.
        self._stem = f"{_PART}-{name}-"
        self.name = f"{self._stem}rank_{rank:05d}.{os.urandom(4).hex()}.tar"

    def delete(self, names: Sequence[str] = ()) -> None:
        """Delete this archive, or those in `names`, and those of ranks that were killed at least a day ago. Blocks."""
        with contextlib.suppress(CheckpointError, OSError):
            self.storage.delete_many([*(names or (self.name,))])
            left = [name for name in self.storage.names("") if name.startswith(self._stem)]
            self.storage.sweep("", left, delete=True, decided=True, of_ranks=True)


def begin_spread(
    request: ExportRequest, weights: Weights, others: OtherRanks, *, held: SnapshotView | None, guard: Any
) -> SaveHandle:
    """Begin to write this rank's slices, copied unless the snapshot `held` has them; on rank 0, also the folder."""
    call, file = others.call(), PartFile(request.storage)
    try:
        tensors = _first_replicas(weights.tensors)
        state = {_KEY: tensors if held is None else FrozenTensors(held, tensors)}
        part = slices_saver(world_of_group()).save(FileRequest(state, FileTarget(file.storage, file.name), guard=guard))
        return SpreadExport(request, weights._replace(tensors={}), part, file, call, others).begin()
    except BaseException as error:
        call.fail(error)
        others.end()
        raise


def _first_replicas(tensors: Tensors) -> Tensors:
    """The tensors that this rank writes: replicated slices are written by the first rank that holds them."""
    slicer = Slicer()
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not is_sharded(tensor) or slicer.slice(tensor, name=name).slices.replicas().number == 0
    }


class SpreadExport(Export):
    """The save of one export on one rank: its archive, and on rank 0 the folder.

    Created on the caller's thread, and run on the library's loop; its blocking methods run on helper threads.
    """

    def __init__(
        self,
        request: ExportRequest,
        weights: Weights,
        part: SaveHandle,
        file: PartFile,
        call: RankCall,
        others: OtherRanks,
    ) -> None:
        self._part, self._file, self._call, self._others = part, file, call, others
        self._tied = frozenset(weights.tied)
        super().__init__(request, weights, after=[part.staging_completion])
        self._files: list[str] = []  # on rank 0, the archives of all ranks
        self._numbers: dict[str, int] = {}  # by name, the number of each tensor to write, in the merged archives
        self._read: Part | None = None
        self._whole: Tensors = {}  # full tensors, if the published form differs from that in memory

    async def _write(self) -> None:
        watch = asyncio.create_task(self._others.watch())
        try:
            await asyncio.gather(awaitable(self._part), return_exceptions=True)
            self._part.result()
            parts = await self._call.all_done([self._file.name], self._goes_on)
            if parts is None:
                await self._call.receive()
            else:
                self._files = [name for (name,) in parts]
                await off_loop(self._write_folder)
        finally:
            watch.cancel()

    def _goes_on(self) -> None:
        self._check()
        self._others.check_spread()

    def _commit(self) -> None:
        if self._call.decides:
            super()._commit()
            self._file.delete(self._files)
            self._call.decide()

    def failed(self, error: BaseException) -> None:
        self._call.fail(error)
        try:
            super().failed(error)
        finally:
            self._file.delete()
            self._others.end()

    async def tidy(self) -> None:
        self._others.end()
        await super().tidy()

    def _report(self, call_seconds: float) -> SaveReport:
        part = self._part.result()
        report = super()._report(call_seconds) if self._call.decides else part
        return replace(
            report, path=self.path, stall_seconds=call_seconds + part.stall_seconds, stage_seconds=part.stage_seconds
        )

    # --- blocking, on a helper thread of rank 0 -----------------------------------------------------------------

    def _write_weights(self) -> Storage:
        with opened_parts(self._file.storage, self._files) as part:
            self._read = part
            _, stored = part.archive.tree()
            index = part.archive.index
            numbers = {index.tensors[leaf.number].path[-1]: leaf.number for leaf in stored}
            self._numbers = {name: n for name, n in numbers.items() if name not in self._tied}
            empty = {
                name: torch.empty(index.tensors[n].shape, dtype=dtype_named(index.tensors[n].dtype), device="meta")
                for name, n in self._numbers.items()
            }
            weights = self._weights
            published = weights.as_published(dict(empty))
            if published.keys() != empty.keys() or any(published[n] is not empty[n] for n in empty):
                loaded = load_state(part.archive)[_KEY]  # the conversion needs all tensors
                self._whole = weights.as_published({name: loaded[name] for name in self._numbers})
                published = self._whole
            self._num_tensors = len(published)
            self._weights = weights._replace(tensors=published, as_published=dict)
            try:
                return super()._write_weights()
            finally:
                self._whole = {}

    def _pieces(self, shard: Shard) -> Iterator[memoryview]:
        if self._whole:
            yield from super()._pieces(shard)
            return
        assert self._read is not None
        yield memoryview(shard.head)
        for name in shard.tensors:
            for chunk in chunks_of(self._read.archive, self._numbers[name]):
                yield view_of(chunk.view(torch.uint8))
