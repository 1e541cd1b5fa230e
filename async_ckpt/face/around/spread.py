"""`export_hf` of a model that is spread over ranks: each rank writes its slices, and rank 0 the folder from them.

In: the weights of one rank. Out: the same folder as of a whole model. Knows nothing of: the names of models' weights.

No rank waits for another one: each copies what it holds to the host, and writes it, behind its training, to an
archive in a folder of parts. Once the parts of all ranks are there, rank 0 reads full tensors from them, by ranges,
and writes them one after the other. Before the first export, rank 0 sends one word through the store: the name for
the folders of parts.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch

from ...core.host.loop import OffLoop
from ...core.host.memory import HostBuffer
from ...core.host.process import OnceInProcess
from ...core.host.waits import ENDS_THE_CALL, PEER_SECONDS, Wait
from ...core.loading.archives.contents import Part
from ...core.loading.archives.step_archives import opened_parts
from ...core.loading.load import load_state
from ...core.ranks.answers import in_words
from ...core.ranks.meeting import common_name
from ...core.ranks.start import start_of
from ...core.ranks.store import Words
from ...core.ranks.world import World, world_of
from ...core.report import SaveReport
from ...core.saving.default import slices_saver
from ...core.saving.handle import SaveHandle
from ...core.saving.request import FileRequest
from ...core.saving.targets import FileTarget
from ...core.slicing.sharded import Slicer, is_sharded
from ...core.spans import monotonic
from ...core.spec import SEGMENT_BYTES
from ...core.state.captured import FrozenTensors, SnapshotView, tree_of
from ...core.state.names import dtype_named
from ...core.storage.interface import Storage
from ...core.storage.local import LocalStorage
from ...core.storage.place import Place
from ...errors import CheckpointError, PeerFailedError, UnsupportedStateError
from .hf_folder import Export, ExportRequest
from .hf_weights import Tensors, Weights
from .ranges import Range, read_ranges
from .shards import Shard

_LOOK_SECONDS: Final = {False: 0.1, True: 1.0}  # between polls of a folder, and of a store
_FOLDER: Final = ".async_ckpt-parts"
_KEY: Final = "weights"
_counter: Final = itertools.count()


def looks_whole(given: Any) -> bool:
    """True for a model of whole tensors, which a rank may export alone; False for a value that is no model, too."""
    with contextlib.suppress(Exception):
        named = tree_of(given) if isinstance(given, SnapshotView) else given
        tensors = list(named.parameters() if isinstance(named, torch.nn.Module) else named.values())
        return bool(tensors) and not any(map(is_sharded, tensors))
    return False


class ExportMessages:
    """The messages between ranks about their n-th calls for one destination. No rank waits for one.

    A rank whose weights are whole cannot know that others export with it. A rank that learns of the others in time does
    not replace their output, and they stop waiting for it. Made by each call of `export_hf`.
    """

    def __init__(self, destination: Storage) -> None:
        self._words: Words | None = None
        with contextlib.suppress(ValueError):  # without a process group there are no other ranks
            world = world_of()
            if world.store is not None:
                # The key has no number of the start: a rank that exports alone must not count one. Messages of an
                # earlier start, in a store that outlives it, are those that the same program sends again.
                restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
                prefix = f"async_ckpt/destinations/{world.size}/{restarts}"
                self._words = Words(start_of(world).connection, prefix, given=True)
                self._rank = world.rank
        calls = _tokens("").calls
        where = destination.locate("").rstrip("/")
        name = hashlib.blake2b(where.encode(errors="replace"), digest_size=8).hexdigest()
        self._key = f"{name}/{next(calls.setdefault(name, itertools.count()))}"

    def announce(self, *, is_spread: bool) -> None:
        if self._words is not None:
            with contextlib.suppress(RuntimeError):  # no store: nobody is informed, and no export fails
                self._words.say(f"{self._key}/{'spread' if is_spread else 'whole'}", str(self._rank))

    def announce_parts(self, folder: str) -> None:
        """Say in which folder of parts a rank whose weights are spread leaves its slices."""
        if self._words is not None:
            with contextlib.suppress(RuntimeError):
                self._words.say(f"{self._key}/parts", folder)

    def announce_failure(self, error: BaseException) -> None:
        """Say that this rank has failed, so that no other rank waits for it; not if another one has failed before."""
        if self._words is not None and not isinstance(error, PeerFailedError):
            with contextlib.suppress(RuntimeError):
                self._words.say(f"{self._key}/failed", json.dumps([self._rank, in_words(error)]))

    def check_failed(self, path: str) -> None:
        """Raises PeerFailedError if another rank has failed."""
        if (word := self._said("failed")) is not None:
            rank, why = json.loads(word)
            raise PeerFailedError(f"{path}: nothing was exported: rank {rank}: {why}", rank=rank)

    def check_whole(self, destination: Storage) -> None:
        """Raises UnsupportedStateError if another rank's weights are spread. For ranks whose weights are whole.

        That rank may have looked for this one's message before there was one, and be done: then its part goes here.
        """
        if self._said("spread") is not None:
            if (folder := self._said("parts")) is not None:
                _delete_parts(destination, folder)
            raise UnsupportedStateError(
                "none of this rank's weights is spread over ranks, but those that other ranks export to the same "
                "folder are; nothing was written: make DTensors of this rank's weights, if need be on a mesh of "
                "this rank alone, or give another folder",
                path="",
            )

    def check_spread(self, path: str) -> None:
        """Raises PeerFailedError if another rank's weights are whole. Called on a rank whose weights are spread."""
        if (rank := self._said("whole")) is not None:
            raise PeerFailedError(
                f"{path}: nothing was exported: none of the weights of rank {rank} is spread over ranks; make "
                "DTensors of them, if need be on a mesh of that rank alone",
                rank=int(rank),
            )

    def _said(self, word: str) -> str | None:
        if self._words is not None:
            with contextlib.suppress(RuntimeError):
                return self._words.said(f"{self._key}/{word}")
        return None


class PartsFolder:
    """The folder of parts, in which each rank of one export leaves its slices."""

    def __init__(self, place: Place, destination: Storage, check: Callable[[], None]) -> None:
        """`check` is called while rank 0 has not named the folder, and raises to end that wait."""
        self.world = world_of()
        self.folder = f"{_FOLDER}-{_token(self.world, check)}-{next(_counter)}"
        self._destination = destination
        if destination.remote:
            # Inside the destination: no reader takes it for a part of a model, and it is deleted at the end.
            self.storage = replace(place, url=f"{place.text.rstrip('/')}/{self.folder}").storage()
        else:
            above, name = os.path.split(destination.locate("").rstrip(os.sep))
            self.folder += f"-{name}"
            self.storage = LocalStorage(f"{above}/{self.folder}")

    @staticmethod
    def skip() -> None:
        """Count a folder that this rank does not use, since its call has raised: the other ranks have counted it."""
        next(_counter)

    def target(self) -> FileTarget:
        return FileTarget(self.storage, self._name(self.world.rank))

    def missing_ranks(self) -> list[int]:
        """The ranks whose parts are missing."""
        names = set(self.storage.names(""))
        return [rank for rank in range(self.world.size) if self._name(rank) not in names]

    def files(self) -> list[str]:
        return [self._name(rank) for rank in range(self.world.size)]

    def delete(self) -> None:
        _delete_parts(self._destination, self.folder)

    def _name(self, rank: int) -> str:
        return f"rank_{rank:05d}.tar"


def _delete_parts(destination: Storage, folder: str) -> None:
    above = destination if destination.remote else LocalStorage(os.path.dirname(destination.locate("").rstrip(os.sep)))
    with contextlib.suppress(CheckpointError, OSError):
        above.delete_all(folder)


def begin_spread(
    request: ExportRequest,
    weights: Weights,
    parts: PartsFolder,
    others: ExportMessages,
    *,
    held: SnapshotView | None,
    guard: Any,
) -> SaveHandle:
    """Copy what this rank holds, unless it is `held`, and begin to write it; on rank 0, the folder after it."""
    saver = slices_saver(parts.world)
    others.announce_parts(parts.folder)
    try:
        tensors = _first_replicas(weights.tensors)
        state = {_KEY: tensors if held is None else FrozenTensors(held, tensors)}
        part = saver.save(FileRequest(state, parts.target(), guard=guard))
    except BaseException as error:
        others.announce_failure(error)  # before the parts are deleted, or one may be left behind
        if parts.world.rank == 0:
            parts.delete()
        raise
    return SpreadExport(request, weights._replace(tensors={}), part, parts, others).begin()


def _first_replicas(tensors: Tensors) -> Tensors:
    """The tensors that this rank writes: of slices that several ranks hold alike, the first rank writes them."""
    slicer = Slicer()
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not is_sharded(tensor) or slicer.slice(tensor, name=name).slices.replicas().number == 0
    }


class SpreadExport(Export):
    """The save of one export on one rank: its part, and on rank 0 the folder.

    Made on the caller's thread, and run on the library's loop; its blocking methods run on helper threads.
    """

    def __init__(
        self,
        request: ExportRequest,
        weights: Weights,
        part: SaveHandle,
        parts: PartsFolder,
        others: ExportMessages,
    ) -> None:
        self._part, self._parts, self._others = part, parts, others
        self._tied = frozenset(weights.tied)
        super().__init__(request, weights, after=[part.staging_completion])
        self._numbers: dict[str, int] = {}  # of the tensors to write, in the merged parts
        self._read: Part | None = None
        self._whole: Tensors = {}  # full tensors, if checkpoints of the model have others than its memory

    async def _write(self, off_loop: OffLoop) -> None:
        try:
            await asyncio.gather(asyncio.wrap_future(self._part), return_exceptions=True)
            # First of all: a rank that refuses takes the folder away, also while a part is written to it.
            await off_loop(self._check_others_export)
            self._part.result()
            if self._parts.world.rank == 0:
                await self._wait_for_others(off_loop)
                await off_loop(self._write_folder)
        except BaseException as error:
            await off_loop(partial(self._others.announce_failure, error))
            raise

    def _check_others_export(self) -> None:
        """Raises PeerFailedError, and deletes the parts, if another rank's weights are whole, or it has failed; that
        may be rank 0.
        """
        try:
            self._others.check_spread(self.path)
            self._others.check_failed(self.path)
        except PeerFailedError:
            self._parts.delete()
            raise

    async def _wait_for_others(self, off_loop: OffLoop) -> None:
        deadline = monotonic() + PEER_SECONDS
        while missing_ranks := await off_loop(self._parts.missing_ranks):
            self._check()
            await off_loop(self._check_others_export)
            if monotonic() > deadline:
                raise PeerFailedError(
                    f"{self.path}: after {PEER_SECONDS:.0f} s rank {missing_ranks[0]} has not left its slices of "
                    "the model there; call export_hf on every rank, with the same destination, which all of them see",
                    rank=missing_ranks[0],
                )
            await asyncio.sleep(_LOOK_SECONDS[self._parts.storage.remote])

    def _commit(self) -> None:
        if self._parts.world.rank == 0:
            super()._commit()

    def failed(self, error: BaseException) -> None:
        try:
            super().failed(error)
        finally:
            if self._parts.world.rank == 0:
                self._parts.delete()

    async def tidy(self, off_loop: OffLoop) -> None:
        try:
            await super().tidy(off_loop)
        finally:
            if self._parts.world.rank == 0:
                await off_loop(self._parts.delete)

    def _report(self, call_seconds: float) -> SaveReport:
        part = self._part.result()
        report = super()._report(call_seconds) if self._parts.world.rank == 0 else part
        return replace(
            report, path=self.path, stall_seconds=call_seconds + part.stall_seconds, stage_seconds=part.stage_seconds
        )

    # --- blocking, on a helper thread of rank 0 -----------------------------------------------------------------

    def _write_weights(self) -> Storage:
        with opened_parts(self._parts.storage, self._parts.files()) as part:
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
        yield memoryview(shard.head)
        for name, tensor in shard.tensors.items():
            yield from self._ranges(self._numbers[name], tensor)

    def _ranges(self, number: int, tensor: torch.Tensor) -> Iterator[memoryview]:
        assert self._read is not None
        memory = HostBuffer(SEGMENT_BYTES // tensor.element_size() * tensor.element_size())
        try:
            for at in range(0, tensor.nbytes, memory.num_bytes):
                length = min(memory.num_bytes, tensor.nbytes - at)
                read_ranges([Range(self._read.archive, number, at, length, 0)], memory.tensor)
                yield memory.view[:length]
        finally:
            memory.free()


class _Token:
    """The name of this start's folders of parts, and the number of its exports to each destination. One per process."""

    def __init__(self) -> None:
        self.known: tuple[Any, str] | None = None  # the store, and the name that rank 0 said there
        self.calls: dict[str, Iterator[int]] = {}  # by destination


def _new_token(_: str) -> _Token:
    return _Token()


_tokens: Final = OnceInProcess(_new_token)


def _token(world: World, check: Callable[[], None]) -> str:
    """The name of the folders of parts. Raises PeerFailedError if rank 0 does not say it, and what `check` raises."""
    token = _tokens("")
    if token.known is None or token.known[0] is not world.store:
        token.known = world.store, _token_of_rank_zero(world, check)
    return token.known[1]


def _token_of_rank_zero(world: World, check: Callable[[], None]) -> str:
    wait = Wait("in export_hf()", ENDS_THE_CALL)

    def goes_on() -> None:
        check()
        wait.goes_on(lambda: "the first export of rank 0; a model that is spread over ranks is exported by all of them")

    whom = "rank 0 to call export_hf; call it on every rank"
    return common_name(world, "exports", 4, goes_on, whom)
