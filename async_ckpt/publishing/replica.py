"""Weights that follow versions, and how they do; here those in memory.

In: the indices of versions, and a storage with their files. Out: the bytes of each tensor, as they are in the newest of
these. Knows nothing of: which versions there are, modules.

A delta is applied in place, and undone if one tensor does not come out as it should. `update_replica` is the whole of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Final, Protocol

import torch

from ..errors import CorruptCheckpointError, NotCommittedError, StateMismatchError
from ..format.delta import INDEX, OUR_CHECKSUMS, VersionIndex, identity_of
from ..host.limits import num_cpus
from ..host.threads import Crew
from ..staging.device import dense_blocks
from ..state.dtypes import dtype_named
from .base_model import BaseModel
from .difference import WrongBaseError, apply, checksum_of
from .proof import is_that_version, source_of
from .source import Anchor, Frame, TensorLocation, TensorPart, VersionSource, WeightsState
from .versions import Versions

_ALIGNMENT: Final = 64
_log: Final = logging.getLogger("async_ckpt")


class DamagedReplicaError(CorruptCheckpointError):
    """The weights here are not those that were noted: they have to begin with an anchor.

    With `perhaps`, it may as well be the delta, of which nothing tells whether its bytes are those that were published.
    """

    perhaps: bool = False


class Replica(Protocol):
    """The weights that versions are brought to. One caller at a time, inside `locked`."""

    @property
    def state(self) -> WeightsState | None:
        """The state of the weights; None if they are not known to be whole."""

    def locked(self) -> AbstractContextManager[None]:
        """Keep others away."""

    def seed(self, anchor: Anchor) -> int:
        """Have the weights of an anchor instead of its own; the bytes that were read.

        Raises StateMismatchError if its own are those of another model.
        """

    def regions(self, names: Collection[str]) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """The bytes of each of these tensors, to be changed in place; without those that it has not."""

    def checksums(self, names: Set[str], checksum_format: str) -> Mapping[str, str]:
        """The checksums of these tensors, computed anew; without those that it has not."""

    def note(self, state: WeightsState | None) -> None:
        """These weights it has now; with None, they are about to change."""


def update_replica(
    replica: Replica,
    versions: Versions,
    target: int,
    crew: Crew,
    *,
    base: BaseModel | None = None,
    planned: Callable[[Sequence[VersionIndex]], None] = lambda _: None,
) -> tuple[list[VersionIndex], int]:
    """Make of a replica a version, by what lies between it and what is there. What was applied, and the bytes read.

    `base` is what the first delta of all is against; `planned` is told what is about to be applied. After an error the replica has
    the last version that was applied as a whole. Raises NotCommittedError, CorruptCheckpointError, StateMismatchError,
    StorageUnavailableError, StorageFullError.
    """
    chain = versions.chain(target, replica.state, base)
    if replica.state is not None and not is_that_version(replica, chain, versions, target, crew, base):
        _log.warning(
            "the weights here are not those of version %d; they are begun anew", replica.state.version
        )
        chain = versions.chain(target, None, base)
    planned(chain)
    try:
        num_bytes = _apply_chain(replica, versions, chain, crew, base)
    except DamagedReplicaError as error:
        chain = _restarted_chain(replica, versions, target, base, chain, error)
        planned(chain)
        num_bytes = _apply_chain(replica, versions, chain, crew, base)
    if not chain and replica.state is not None:
        _note_verified(replica, versions.read_or_base(target, base, fresh=False))
    return chain, num_bytes


def _restarted_chain(
    replica: Replica,
    versions: Versions,
    target: int,
    base: BaseModel | None,
    chain: Sequence[VersionIndex],
    error: DamagedReplicaError,
) -> list[VersionIndex]:
    """The chain to apply from nothing on, once another did not fit the weights here. Raises the error where that is of no use."""
    if error.perhaps and chain[0].is_anchor:
        raise error
    if not error.perhaps and not (replica.state and replica.state.is_marked):
        replica.note(None)
    try:
        anew = versions.chain(target, None, base)
    except NotCommittedError as missing:
        raise error from missing
    _log.warning("%s; what is here begins with an anchor again", error)
    return anew


def _note_verified(replica: Replica, index: VersionIndex) -> None:
    """A version was there already, and may not have been noted as such by us."""
    assert replica.state is not None
    known = replace(replica.state, stamp="" if index.identity else index.stamp, is_marked=False)
    if known != replica.state:
        replica.note(known)


def _apply_chain(
    replica: Replica, versions: Versions, chain: Sequence[VersionIndex], crew: Crew, base: BaseModel | None
) -> int:
    num_bytes = 0
    for index in chain:
        source = source_of(index, versions, base)
        if index.is_anchor:
            num_bytes += replica.seed(Anchor(source, crew))
        else:
            num_bytes += _apply_delta(replica, source, crew)
    return num_bytes


def _apply_delta(replica: Replica, source: VersionSource, crew: Crew) -> int:
    """Apply one delta: all of it is read and understood before anything is changed."""
    before, index = replica.state, source.index
    assert before is not None
    assert index.delta is not None
    if not before.is_base_of(index):
        raise source.corrupt(INDEX, f"it is against other weights than version {before.version} has")
    blobs = {file: source.whole(file, crew) for file in index.tensor_files}
    frames = _read_frames(source, blobs)
    unknown = frames.keys() - before.checksums.keys()
    if unknown or index.structure not in ("", before.structure):
        raise other_model(source.where, unknown)
    is_ours = index.delta.checksum_format == OUR_CHECKSUMS
    checksums = before.checksums | {name: frame.checksum for name, frame in frames.items() if is_ours}
    if index.identity not in ("", identity_of(checksums)):
        raise source.corrupt(
            INDEX, "the checksums in its files are not those of the version that it tells of"
        )
    with replica.regions(frames) as regions:
        if regions.keys() != frames.keys():
            raise DamagedReplicaError("what is here has lost some of its tensors", path=source.where)
        replica.note(None)  # whoever dies here leaves what nobody takes for weights
        undo: list[Callable[[], None]] = []
        by_size = sorted(frames, key=lambda name: -len(regions[name]))
        try:
            crew.run_all(partial(_apply_frame, regions[n], n, frames[n], source, undo) for n in by_size)
        except BaseException:
            for put_back in undo:
                put_back()
            replica.note(before)
            raise
        if not is_ours:
            checksums |= {name: checksum_of(region) for name, region in regions.items()}
    replica.note(
        WeightsState(index.version, identity_of(checksums), before.structure, checksums, source.stamp)
    )
    return sum(map(len, blobs.values()))


def _read_frames(source: VersionSource, blobs: Mapping[str, memoryview]) -> dict[str, Frame]:
    """The tensors that a delta changes. Raises CorruptCheckpointError where its files do not have what its index tells of."""
    frames = {name: frame for file, blob in blobs.items() for name, frame in source.frames(file, blob)}
    if {name: frame.file for name, frame in frames.items()} != source.index.files:
        raise source.corrupt(INDEX, "it names other tensors than its files hold")
    return frames


def _apply_frame(
    region: torch.Tensor, name: str, frame: Frame, source: VersionSource, undo: list[Callable[[], None]]
) -> None:
    delta = source.index.delta
    assert delta is not None
    try:
        undo.append(apply(frame.data, region, delta.encoding, frame.checksum, delta.checksum_format))
    except WrongBaseError as error:
        told = source.corrupt(frame.file, f"{name}: {error}", tensors=(name,))
        # Where the file has its digest, the frame is what was published, so it is the base that is not.
        perhaps = frame.file not in source.index.digests
        raise DamagedReplicaError(str(told), path=told.path, tensors=told.tensors, perhaps=perhaps) from error


def other_model(where: str, names: Collection[str]) -> StateMismatchError:
    """The error about a version whose tensors are not those that are here."""
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
        self._allocate, self._check_model = take, fits
        self.state: WeightsState | None = None
        self.tensors: dict[str, TensorLocation] = {}
        self._memory: torch.Tensor | None = None
        self._regions: dict[str, torch.Tensor] = {}

    def locked(self) -> AbstractContextManager[None]:
        return nullcontext()

    def lay_out(self, tensors: Mapping[str, TensorLocation]) -> None:
        """Take memory for these, unless there is."""
        if {name: where.num_bytes for name, where in tensors.items()} != {
            name: len(region) for name, region in self._regions.items()
        }:
            self.state, self._regions, self._memory = None, {}, None
            begins, at = {}, 0
            for name, where in tensors.items():
                begins[name] = at
                at += -(-where.num_bytes // _ALIGNMENT) * _ALIGNMENT
            memory = self._memory = self._allocate(at)
            self._regions = {n: memory[begins[n] : begins[n] + w.num_bytes] for n, w in tensors.items()}
        self.tensors = dict(tensors)

    def seed(self, anchor: Anchor) -> int:
        self._check_model(anchor)
        self.state = None
        self.lay_out(anchor.tensors)

        def put(file: str, at: int, data: memoryview, parts: list[TensorPart]) -> None:  # noqa: ARG001
            for name, begin, part in parts:
                if part:
                    region = self._regions[name][begin : begin + len(part)]
                    region.copy_(torch.frombuffer(part, dtype=torch.uint8))

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

    def checksums(self, names: Set[str], checksum_format: str) -> dict[str, str]:
        return {n: checksum_of(self._regions[n], checksum_format) for n in self._regions.keys() & names}

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, in this memory."""
        told = self.tensors[name]
        return self._regions[name].view(dtype_named(told.dtype)).view(told.shape)

    def region(self, name: str) -> torch.Tensor:
        """The bytes of one tensor."""
        return self._regions[name]

    def note(self, state: WeightsState | None) -> None:
        self.state = state


def new_crew() -> Crew:
    """The threads of one replica."""
    return Crew("pull", max(2, num_cpus()))
