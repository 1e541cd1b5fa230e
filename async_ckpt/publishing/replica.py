"""Weights that follow versions, and how they do; here those in memory.

In: the indices of versions, and a storage with their files. Out: the bytes of each tensor, as they are in the newest of
these. Knows nothing of: which versions there are, modules.

A delta is applied in place, and undone if one tensor does not come out as it should. `bring` is the whole of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Final, Protocol

import torch

from ..errors import CorruptCheckpointError, StateMismatchError
from ..format.delta import INDEX, VersionIndex, identity_of
from ..host.limits import num_cpus
from ..host.threads import Crew
from ..staging.device import dense_blocks
from ..state.dtypes import dtype_named
from .difference import NotTheBase, apply
from .source import Anchor, Frame, Source, State, Where
from .versions import Versions

_ALIGNMENT: Final = 64
_log: Final = logging.getLogger("async_ckpt")


class Damaged(CorruptCheckpointError):
    """What is here is not what was noted: the weights have to begin with an anchor."""


class Replica(Protocol):
    """What versions are brought to. One caller at a time, inside `locked`."""

    @property
    def state(self) -> State | None:
        """Which weights it has; None if it has none that are known to be whole."""

    def locked(self) -> AbstractContextManager[None]:
        """Keep others away."""

    def seed(self, anchor: Anchor) -> int:
        """Have the weights of an anchor instead of its own; the bytes that were read.

        Raises StateMismatchError if its own are those of another model.
        """

    def regions(self, names: Collection[str]) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """The bytes of each of these tensors, to be changed in place; without those that it has not."""

    def note(self, state: State | None) -> None:
        """These weights it has now; with None, they are about to change."""


def bring(replica: Replica, versions: Versions, target: int, crew: Crew) -> tuple[list[VersionIndex], int]:
    """Make of a replica a version, by what lies between it and what is there. What was applied, and the bytes read.

    After an error it has the last version that was applied as a whole. Raises NotCommittedError, CorruptCheckpointError,
    StateMismatchError, StorageUnavailableError, StorageFullError.
    """
    chain = versions.chain(target, replica.state)
    try:
        return chain, _follow(replica, versions, chain, crew)
    except Damaged as error:
        _log.warning("%s; what is here begins with an anchor again", error)
        replica.note(None)
    chain = versions.chain(target, None)
    return chain, _follow(replica, versions, chain, crew)


def _follow(replica: Replica, versions: Versions, chain: Sequence[VersionIndex], crew: Crew) -> int:
    num_bytes = 0
    for index in chain:
        source = Source(versions.storage, index)
        if index.is_anchor:
            num_bytes += replica.seed(Anchor(source, crew))
        else:
            num_bytes += _apply(replica, source, crew)
    return num_bytes


def _apply(replica: Replica, source: Source, crew: Crew) -> int:
    """Apply one delta: all of it is read and understood before anything is changed."""
    before, index = replica.state, source.index
    assert before is not None
    assert index.encoding is not None
    blobs = {file: source.whole(file, crew) for file in index.tensor_files}
    frames = {name: frame for file, blob in blobs.items() for name, frame in source.frames(file, blob)}
    if frames.keys() != index.files.keys():
        raise source.corrupt(INDEX, "it names other tensors than its files hold")
    unknown = frames.keys() - before.checksums.keys()
    if unknown or index.structure not in ("", before.structure):
        raise other_model(source.where, unknown)
    checksums = before.checksums | {name: frame.checksum for name, frame in frames.items()}
    now = State(index.version, identity_of(checksums), before.structure, checksums)
    if index.identity not in ("", now.identity):
        raise source.corrupt(
            INDEX, "the checksums in its files are not those of the version that it tells of"
        )
    with replica.regions(frames) as regions:
        if regions.keys() != frames.keys():
            raise Damaged("what is here has lost some of its tensors", path=source.where)
        replica.note(None)  # whoever dies here leaves what nobody takes for weights
        undo: list[Callable[[], None]] = []
        by_size = sorted(frames, key=lambda name: -len(regions[name]))
        try:
            crew.run_all(partial(_change, regions[n], n, frames[n], source, undo) for n in by_size)
        except BaseException:
            for put_back in undo:
                put_back()
            replica.note(before)
            raise
    replica.note(now)
    return sum(map(len, blobs.values()))


def _change(
    region: torch.Tensor, name: str, frame: Frame, source: Source, undo: list[Callable[[], None]]
) -> None:
    assert source.index.encoding is not None
    try:
        undo.append(apply(frame.data, region, source.index.encoding, frame.checksum))
    except NotTheBase as error:
        told = source.corrupt(frame.file, f"{name}: {error}", tensors=(name,))
        if source.index.digests.get(
            frame.file
        ):  # the frame is what was published, so it is the base that is not
            raise Damaged(str(told), path=told.path, tensors=told.tensors) from error
        raise told from error


def other_model(where: str, names: Collection[str]) -> StateMismatchError:
    """What is said of a version whose tensors are not those that are here."""
    told = f" (such as {min(names)!a:.200})" if names else ""
    return StateMismatchError(
        f"{where}: it is of another model than what is here{told}; pull it into another folder or module",
        missing=(),
        unexpected=tuple(sorted(names)),
        mismatched=(),
    )


# --- in memory ----------------------------------------------------------------------------------------------------


class MemoryReplica:
    """In memory: `take` gives as many bytes as it is asked for, as a uint8 tensor. `fits` raises for another model."""

    def __init__(
        self,
        take: Callable[[int], torch.Tensor],
        fits: Callable[[Anchor], None] = lambda _: None,
    ) -> None:
        self._take, self._fits = take, fits
        self.state: State | None = None
        self.tensors: dict[str, Where] = {}
        self._memory: torch.Tensor | None = None
        self._regions: dict[str, torch.Tensor] = {}

    def locked(self) -> AbstractContextManager[None]:
        return nullcontext()

    def lay_out(self, tensors: Mapping[str, Where]) -> None:
        """Take memory for these, unless there is."""
        if {name: where.num_bytes for name, where in tensors.items()} != {
            name: len(region) for name, region in self._regions.items()
        }:
            self.state, self._regions, self._memory = None, {}, None
            begins, at = {}, 0
            for name, where in tensors.items():
                begins[name] = at
                at += -(-where.num_bytes // _ALIGNMENT) * _ALIGNMENT
            memory = self._memory = self._take(at)
            self._regions = {n: memory[begins[n] : begins[n] + w.num_bytes] for n, w in tensors.items()}
        self.tensors = dict(tensors)

    def seed(self, anchor: Anchor) -> int:
        self._fits(anchor)
        self.state = None
        self.lay_out(anchor.tensors)

        def put(name: str, at: int, part: memoryview) -> None:
            self._regions[name][at : at + len(part)].copy_(torch.frombuffer(part, dtype=torch.uint8))

        self.state = anchor.read(put)
        return anchor.num_bytes

    def take_over(self, tensors: Mapping[str, torch.Tensor], crew: Crew) -> None:
        """Have the bytes of these instead of its own, under their names."""

        def one(name: str) -> None:
            for at, block in dense_blocks(tensors[name], 0, tensors[name].nbytes):
                self._regions[name][at : at + block.numel()].copy_(block)

        crew.run_all(partial(one, name) for name in tensors)

    @contextmanager
    def regions(self, names: Collection[str]) -> Iterator[Mapping[str, torch.Tensor]]:
        yield {name: self._regions[name] for name in names if name in self._regions}

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, in this memory."""
        told = self.tensors[name]
        return self._regions[name].view(dtype_named(told.dtype)).view(told.shape)

    def region(self, name: str) -> torch.Tensor:
        """The bytes of one tensor."""
        return self._regions[name]

    def note(self, state: State | None) -> None:
        self.state = state


def new_crew() -> Crew:
    """The threads of one replica."""
    return Crew("pull", max(2, num_cpus()))
