"""`export_hf` of a model that is spread over ranks: each of them leaves its slices there, and rank 0 makes the folder of them.

In: the weights of one rank. Out: the same folder as of a whole model. Knows nothing of: how models call their weights.

No rank is held up by another: each copies what it holds to the host, and writes that, behind its training, to an archive in a folder
of parts. Once those of all ranks are there, rank 0 reads full tensors from them, by ranges, and writes them one after the
other. The process group is asked for one word, ahead of the first export: what the folders of parts are called.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch

from ..errors import CheckpointError, PeerFailedError, UnsupportedStateError
from ..host.loop import OffLoop
from ..host.memory import HostBuffer
from ..host.process import OnceInProcess
from ..host.waits import ENDS_THE_CALL, Wait
from ..loading.archives.contents import Part
from ..loading.archives.step_archives import opened_parts
from ..loading.load import load_state
from ..loading.ranges import Range, read_ranges
from ..ranks.answers import in_words
from ..ranks.meeting import RankZeroWord
from ..ranks.world import Words, World, world_of
from ..report import SaveReport
from ..saving.default import slices_saver
from ..saving.handle import SaveHandle
from ..saving.request import FileRequest
from ..saving.targets import FileTarget
from ..slicing.sharded import Slicer, is_sharded
from ..spans import monotonic
from ..spec import SEGMENT_BYTES
from ..state.captured import SnapshotView, tree_of
from ..state.dtypes import dtype_named
from ..storage.interface import Storage
from ..storage.local import LocalStorage
from ..storage.place import Place
from .folder import Asked, Export
from .hub import Tensors, Weights
from .shards import Shard

# How long rank 0 waits for the parts of others once its own is there.
PEER_SECONDS: Final = 1800.0
_LOOK_SECONDS: Final = {False: 0.1, True: 1.0}  # from look to look at a folder, and at a store
_FOLDER: Final = ".async_ckpt-parts"
_KEY: Final = "weights"
_counter: Final = itertools.count()


def is_spread(weights: Weights) -> bool:
    return any(map(is_sharded, weights.tensors.values()))


def looks_spread(given: Any) -> bool:
    """Whether something that may be no model at all has parts of what is spread over ranks."""
    with contextlib.suppress(Exception):
        named = tree_of(given) if isinstance(given, SnapshotView) else given
        tensors = named.parameters() if isinstance(named, torch.nn.Module) else named.values()
        return any(map(is_sharded, tensors))
    return False


class Others:
    """The messages of ranks about their calls for one destination, the first of each, the second, and so on. None waits.

    A rank whose own weights are whole cannot know that the others export with it: where it sees so in time, it does not replace
    what they write; and they need not wait for it.
    """

    def __init__(self, place: Place) -> None:
        self._words: Words | None = None
        with contextlib.suppress(ValueError):  # whoever has no group has no others
            world = world_of(None, None)
            if world.store is not None:
                # Not by the start of the world, which a rank that exports alone must not count. What an earlier start has said in a store
                # that outlives it is what the same program says again.
                restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
                self._words = Words(world.store, f"async_ckpt/destinations/{world.size}/{restarts}")
                self._rank = world.rank
        calls = _tokens("").calls
        name = hashlib.blake2b(place.text.encode(errors="replace"), digest_size=8).hexdigest()
        self._key = f"{name}/{next(calls.setdefault(name, itertools.count()))}"

    def tell(self, *, is_spread: bool) -> None:
        if self._words is not None:
            with contextlib.suppress(RuntimeError):  # the store is away: nobody is told, and no export fails
                self._words.say(f"{self._key}/{'spread' if is_spread else 'whole'}", str(self._rank))

    def check_whole(self) -> None:
        """On a rank whose weights are whole. Raises UnsupportedStateError where another rank's are not."""
        if self._said("spread") is not None:
            raise UnsupportedStateError(
                "none of this rank's weights is spread over ranks, but other ranks export theirs to the same folder, and are; nothing was "
                "written: make DTensors of them, on a mesh of this rank alone if need be, or give another folder",
                path="",
            )

    def check_spread(self, path: str) -> None:
        """On a rank whose weights are spread. Raises PeerFailedError where another rank takes no part."""
        if (rank := self._said("whole")) is not None:
            raise PeerFailedError(
                f"{path}: nothing was exported: none of the weights of rank {rank} is spread over ranks; make DTensors of them, on a "
                "mesh of that rank alone if need be",
                rank=int(rank),
                undecided=False,
            )

    def _said(self, word: str) -> str | None:
        if self._words is not None:
            with contextlib.suppress(RuntimeError):
                return self._words.said(f"{self._key}/{word}")
        return None


class Parts:
    """The folder that the ranks of one export leave their slices in, and which of them this one is."""

    def __init__(self, place: Place, destination: Storage) -> None:
        self.world = world_of(None, None)
        self._folder = f"{_FOLDER}-{_token(self.world)}-{next(_counter)}"
        if destination.remote:
            # Nobody takes it for a part of a model, and it is gone when there is one.
            self._above = destination
            self.storage = replace(place, url=f"{place.text.rstrip('/')}/{self._folder}").storage()
        else:
            above, _, name = destination.locate("").rstrip(os.sep).rpartition(os.sep)
            self._folder += f"-{name}"
            self._above, self.storage = LocalStorage(above), LocalStorage(f"{above}/{self._folder}")

    def target(self) -> FileTarget:
        return FileTarget(self.storage, self._name(self.world.rank))

    def tell_of_failure(self, error: BaseException) -> None:
        """On any rank: it has no part in this, and rank 0 need not wait for it."""
        with contextlib.suppress(CheckpointError, OSError):
            self.storage.replace(f"{self.world.rank:05d}.failed", in_words(error).encode())

    def lacking(self) -> list[int]:
        """The ranks whose parts are not there yet. Raises PeerFailedError where one has failed."""
        names = set(self.storage.names(""))
        for name in sorted(name for name in names if name.endswith(".failed")):
            rank = int(name.partition(".")[0])
            why = self.storage.read(name)[0].decode(errors="replace")
            raise PeerFailedError(f"nothing was exported: rank {rank}: {why}", rank=rank, undecided=False)
        return [rank for rank in range(self.world.size) if self._name(rank) not in names]

    def files(self) -> list[str]:
        return [self._name(rank) for rank in range(self.world.size)]

    def delete(self) -> None:
        with contextlib.suppress(CheckpointError, OSError):
            self._above.delete_all(self._folder)

    def _name(self, rank: int) -> str:
        return f"rank_{rank:05d}.tar"


def begin_spread(asked: Asked, weights: Weights, parts: Parts, others: Others, guard: Any) -> SaveHandle:
    """Copy what this rank holds, and have it written; on rank 0, the folder after it."""
    saver = slices_saver(parts.world)
    try:
        part = saver.save(FileRequest({_KEY: _own(weights.tensors)}, parts.target(), guard=guard))
    except BaseException as error:
        parts.tell_of_failure(error)
        raise
    return SpreadExport(asked, weights._replace(tensors={}), part, parts, others).begin()


def _own(tensors: Tensors) -> Tensors:
    """The first of several ranks writes whatever they hold alike, as their placements say."""
    slicer = Slicer()
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not is_sharded(tensor) or slicer.slice(tensor, name=name).slices.replicas().number == 0
    }


class SpreadExport(Export):
    """One export, on one of the ranks."""

    def __init__(
        self, asked: Asked, weights: Weights, part: SaveHandle, parts: Parts, others: Others
    ) -> None:
        self._part, self._parts, self._others = part, parts, others
        self._tied = frozenset(weights.tied)
        super().__init__(asked, weights, after=[part.staging_completion])
        self._numbers: dict[str, int] = {}  # of the tensors to be written, in the file of parts
        self._read: Part | None = None
        self._whole: Tensors = {}  # where they are published otherwise than they are saved

    async def _write(self, off_loop: OffLoop) -> None:
        try:
            await asyncio.wrap_future(self._part)
            await off_loop(self._check_others_export)
            if self._parts.world.rank == 0:
                await self._wait_for_others(off_loop)
                await off_loop(self._write_folder)
        except BaseException as error:
            if self._parts.world.rank and not isinstance(error, PeerFailedError):
                await off_loop(partial(self._parts.tell_of_failure, error))
            raise

    def _check_others_export(self) -> None:
        """Raises PeerFailedError where another rank takes no part: rank 0 may be that, and nobody else delete the parts."""
        try:
            self._others.check_spread(self.path)
        except PeerFailedError:
            self._parts.delete()
            raise

    async def _wait_for_others(self, off_loop: OffLoop) -> None:
        deadline = monotonic() + PEER_SECONDS
        while lacking := await off_loop(self._parts.lacking):
            self._check()
            await off_loop(self._check_others_export)
            if monotonic() > deadline:
                raise PeerFailedError(
                    f"{self.path}: after {PEER_SECONDS:.0f} s rank {lacking[0]} has not left its slices of the model there; call "
                    "export_hf on every rank, with the same destination, which all of them see",
                    rank=lacking[0],
                    undecided=False,
                )
            await asyncio.sleep(_LOOK_SECONDS[self._parts.storage.remote])

    def _commit(self) -> None:
        if self._parts.world.rank == 0:
            super()._commit()

    def failed(self, error: BaseException) -> None:
        super().failed(error)
        if self._parts.world.rank == 0:
            self._parts.delete()

    async def afterwards(self, off_loop: OffLoop) -> None:
        await super().afterwards(off_loop)
        if self._parts.world.rank == 0:
            await off_loop(self._parts.delete)

    def _report(self, call_seconds: float) -> SaveReport:
        part = self._part.result()
        report = super()._report(call_seconds) if self._parts.world.rank == 0 else part
        return replace(
            report,
            path=self.path,
            stall_seconds=call_seconds + part.stall_seconds,
            stage_seconds=part.stage_seconds,
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
                name: torch.empty(
                    index.tensors[n].shape, dtype=dtype_named(index.tensors[n].dtype), device="meta"
                )
                for name, n in self._numbers.items()
            }
            weights = self._weights
            published = weights.as_published(dict(empty))
            if published.keys() != empty.keys() or any(published[n] is not empty[n] for n in empty):
                loaded = load_state(part.archive)[_KEY]  # what makes others of them wants all of them
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
    """The name of the folders of parts of this start of the ranks, and how often it has exported to which destination."""

    def __init__(self) -> None:
        self.known: tuple[Any, str] | None = None  # of which store
        self.calls: dict[str, Iterator[int]] = {}  # by destination


def _new_token(_: str) -> _Token:
    return _Token()


_tokens: Final = OnceInProcess(_new_token)


def _token(world: World) -> str:
    """Raises PeerFailedError where rank 0 does not say it."""
    token = _tokens("")
    if token.known is None or token.known[0] is not world.store:
        token.known = world.store, _agreed(world)
    return token.known[1]


def _agreed(world: World) -> str:
    wait = Wait("in export_hf()", ENDS_THE_CALL)

    def check() -> None:
        wait.goes_on(
            lambda: "the first export of rank 0; a model that is spread over ranks is exported by all of them"
        )

    word = RankZeroWord(world, lambda: world.words("exports"), "token", num_bytes=4)
    return word.hear(check, "rank 0 to call export_hf; call it on every rank")
