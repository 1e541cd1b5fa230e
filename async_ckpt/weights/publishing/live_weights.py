"""Weights that versions are applied to: the protocol, the application, the proof, and weights in memory.

In: the indices of versions, and a storage with their files. Out: the bytes of each tensor in the newest of them.
Knows nothing of: which versions exist, modules.

A delta is applied in place, and undone if a tensor does not have its checksum afterwards. `update_replica` is the entry
point.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Final, NamedTuple, Protocol

import torch

from ...errors import CorruptCheckpointError, NotCommittedError, StateMismatchError
from ...plumbing import device, leaf_names, limits, spec, threads
from ..delta import INDEX, OUR_CHECKSUMS, VersionIndex, identity_of
from .difference import WrongBaseError, apply, checksum_of
from .version_files import Anchor, Frame, TensorLocation, VersionSource, WeightsState
from .versions import Versions

_ALIGNMENT: Final = 64
_log: Final = logging.getLogger("async_ckpt")


class PullResult(NamedTuple):
    """The version that the pull began with (None for an anchor), and the numbers of versions applied and bytes read."""

    base: int | None
    num_versions: int
    num_bytes: int


class DamagedReplicaError(CorruptCheckpointError):
    """The weights here are not those in the notes, so the next chain must begin with an anchor.

    With `perhaps`, the delta may be damaged instead, which cannot be told because it has no digest.
    """

    perhaps: bool = False


class Replica(Protocol):
    """Weights that versions are applied to. Used by one caller at a time."""

    @property
    def state(self) -> WeightsState | None:
        """The state of the weights; None if they may be incomplete."""

    def checksums(self, names: Set[str], checksum_format: str) -> Mapping[str, str]:
        """The checksums of the named tensors, as far as they exist here, computed from their bytes."""

    def seed(self, anchor: Anchor) -> int:
        """Replace the weights by those of an anchor. Returns the number of bytes read.

        Raises StateMismatchError if the anchor is of another model.
        """

    def regions(self, names: Collection[str]) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """The bytes of the named tensors, as far as they exist here, writable in place."""

    def note(self, state: WeightsState | None) -> None:
        """Record that the weights are now in this state; None means that they are about to change."""


def update_replica(
    replica: Replica,
    versions: Versions,
    target: int,
    crew: threads.Crew,
    *,
    before_apply: Callable[[Sequence[VersionIndex]], None] = lambda _: None,
    before_seed: Callable[[Anchor], None] = lambda _: None,
) -> PullResult:
    """Bring a replica to the version `target`.

    `before_apply` is called with each chain before it is applied, and `before_seed` with an anchor before it is read;
    both may raise. After an error the replica has the last version that was applied completely. Raises
    NotCommittedError, CorruptCheckpointError, StateMismatchError, StorageUnavailableError, StorageFullError.
    """
    return _Update(replica, versions, target, crew, before_apply, before_seed).run()


class _Update(NamedTuple):
    """One call of `update_replica`."""

    replica: Replica
    versions: Versions
    target: int
    crew: threads.Crew
    before_apply: Callable[[Sequence[VersionIndex]], None]
    before_seed: Callable[[Anchor], None]

    def run(self) -> PullResult:
        before = self.replica.state
        chain = self.versions.chain(self.target, before)
        if before is not None and not self._begins_at(before, chain):
            _log.warning("the weights here are not those of version %d; the pull starts from an anchor", before.version)
            chain = self.versions.chain(self.target, None)
        try:
            num_bytes = self._apply(chain)
        except DamagedReplicaError as error:
            chain = self._restarted(chain, error)
            num_bytes = self._apply(chain)
        state = self.replica.state
        if not chain and state is not None:  # already here, but perhaps marked by another receiver
            index = self.versions.read_or_base(self.target, fresh=False)
            known = replace(state, stamp="" if index.identity else index.stamp, is_marked=False)
            if known != state:
                self.replica.note(known)
        built_on = None if before is None or (chain and chain[0].is_anchor) else before.version
        return PullResult(built_on, len(chain), num_bytes)

    def _restarted(self, chain: Sequence[VersionIndex], error: DamagedReplicaError) -> list[VersionIndex]:
        """The chain from an anchor on, after `chain` failed. Raises `error` if no other chain can be tried."""
        if error.perhaps and chain[0].is_anchor:
            raise error
        state = self.replica.state
        if not error.perhaps and not (state and state.is_marked):
            self.replica.note(None)
        try:
            restarted = self.versions.chain(self.target, None)
        except NotCommittedError as missing:
            raise error from missing
        _log.warning("%s; the pull starts from an anchor", error)
        return restarted

    def _apply(self, chain: Sequence[VersionIndex]) -> int:
        """Apply versions in order. Returns the number of bytes read."""
        self.before_apply(chain)
        num_bytes = 0
        for index in chain:
            source = self.versions.source(index)
            if index.is_anchor:
                anchor = Anchor(source, self.crew)
                self.before_seed(anchor)
                num_bytes += self.replica.seed(anchor)
            else:
                num_bytes += _apply_delta(self.replica, source, self.crew)
        return num_bytes

    # A Publisher's delta identifies its base by the digest of the weights. Deltas of other programs only give a number.
    # A training that was started again may have published other weights under the same number, and a folder that
    # another receiver has marked may contain half of the next version. So the held weights are compared with the
    # checksums in the deltas that led to that number, and tensors that no delta changed with those of the anchor or the
    # base model before them.

    def _begins_at(self, state: WeightsState, chain: Sequence[VersionIndex]) -> bool:
        """Whether a chain begins at the held weights. True if there is nothing to compare them with.

        The weights are identified by the first index of the chain, or by the target's index if the chain is empty.
        """
        first = chain[0] if chain else self.versions.read_or_base(self.target, fresh=False)
        is_named = first.delta is None or first.delta.base_identity if chain else first.identity
        if is_named:
            return True
        try:
            if state.stamp and self.versions.read_or_base(state.version).stamp == state.stamp:
                return True  # the weights were made by applying this very index
            return self._was_made(state)
        except NotCommittedError:
            return True  # the deltas that led here were deleted, or began with an unknown model
        except CorruptCheckpointError:
            return not state.is_marked  # weights in our own notes were compared when they were applied

    def _was_made(self, state: WeightsState) -> bool:
        """Whether the tensors of a state have the checksums in the deltas, and in their anchor, up to its version."""
        unchecked, number = set(state.checksums), state.version
        while unchecked:
            index = self.versions.read_or_base(number)
            source = self.versions.source(index)
            held: Mapping[str, str] = state.checksums
            if index.delta is None:
                made: Mapping[str, str] = index.checksums or Anchor(source, self.crew).read(lambda *_: None).checksums
                return all(made.get(name) == held[name] for name in unchecked)
            made = source.frame_checksums()
            names = made.keys() & unchecked
            if index.delta.checksum_format != OUR_CHECKSUMS:
                held = self.replica.checksums(names, index.delta.checksum_format)
            if any(held.get(name) != made[name] for name in names):
                return False
            unchecked -= names
            number = index.delta.base
        return True


def _apply_delta(replica: Replica, source: VersionSource, crew: threads.Crew) -> int:
    """Apply one delta. The whole delta is read and parsed before anything is changed."""
    before, index = replica.state, source.index
    assert before is not None
    assert index.delta is not None
    if not before.is_base_of(index):
        raise source.corrupt(INDEX, f"its base is not the weights of version {before.version}")
    frames, num_bytes = source.frames(crew)
    unknown = frames.keys() - before.checksums.keys()
    if unknown or index.structure not in ("", before.structure):
        raise other_model(source.path, unknown)
    is_ours = index.delta.checksum_format == OUR_CHECKSUMS
    checksums = before.checksums | {name: frame.checksum for name, frame in frames.items() if is_ours}
    if index.identity not in ("", identity_of(checksums)):
        raise source.corrupt(INDEX, "the checksums in its files are not those of the version that it describes")
    with replica.regions(frames) as regions:
        if regions.keys() != frames.keys():
            raise DamagedReplicaError("some tensors of the weights here are missing", path=source.path)
        replica.note(None)  # if this process dies now, the mixture does not count as a version
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
    replica.note(WeightsState(index.version, identity_of(checksums), before.structure, checksums, source.stamp))
    return num_bytes


def _apply_frame(
    region: torch.Tensor, name: str, frame: Frame, source: VersionSource, undo: list[Callable[[], None]]
) -> None:
    delta = source.index.delta
    assert delta is not None
    try:
        undo.append(apply(frame.data, region, delta.encoding, frame.checksum, delta.checksum_format))
    except WrongBaseError as error:
        corrupt = source.corrupt(frame.file, f"{name}: {error}", tensors=(name,))
        # If the file has a digest, it was compared, so the weights here must be wrong.
        perhaps = frame.file not in source.index.digests
        raise DamagedReplicaError(str(corrupt), path=corrupt.path, tensors=corrupt.tensors, perhaps=perhaps) from error


def other_model(version: str, names: Collection[str]) -> StateMismatchError:
    """The error for a version whose model differs from the one here."""
    example = f" (such as {min(names)!a:.200})" if names else ""
    return StateMismatchError(
        f"{version}: it is of another model than the weights here{example}; pull it into another folder or module",
        unexpected=tuple(sorted(names)),
    )


# --- in memory ----------------------------------------------------------------------------------------------------


def regions_in(sizes: Mapping[str, int], allocate: Callable[[int], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Aligned regions of these sizes in one new buffer. `allocate` returns a uint8 tensor of a given size."""
    begins = [*accumulate((spec.align_up(size, _ALIGNMENT) for size in sizes.values()), initial=0)]
    memory = allocate(begins[-1])
    return {name: memory[at : at + size] for (name, size), at in zip(sizes.items(), begins[:-1], strict=True)}


def copy_all(tensors: Mapping[str, torch.Tensor], regions: Mapping[str, torch.Tensor], crew: threads.Crew) -> None:
    """Copy the bytes of each tensor to the region of the same name."""

    def copy(name: str) -> None:
        for at, block in device.dense_blocks(tensors[name], 0, tensors[name].nbytes):
            regions[name][at : at + block.numel()].copy_(block)

    crew.run_all(partial(copy, name) for name in tensors)


class MemoryReplica:
    """Weights in host memory, created by a `DeltaBase`, or by a `Subscriber` for a module or the slices of a rank.

    `allocate` is as for `regions_in`.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor]) -> None:
        self._allocate = allocate
        self.state: WeightsState | None = None
        self.tensors: dict[str, TensorLocation] = {}
        self._regions: dict[str, torch.Tensor] = {}

    def lay_out(self, tensors: Mapping[str, TensorLocation]) -> None:
        """Allocate memory for these tensors, unless the present memory is laid out for them."""
        sizes = {name: location.num_bytes for name, location in tensors.items()}
        if sizes != {name: len(region) for name, region in self._regions.items()}:
            self.state, self._regions = None, {}  # free the old memory first
            self._regions = regions_in(sizes, self._allocate)
        self.tensors = dict(tensors)

    def seed(self, anchor: Anchor) -> int:
        self.state = None
        self.lay_out(anchor.tensors)

        def put(name: str, at: int, data: memoryview) -> None:
            if data:
                self._regions[name][at : at + len(data)].copy_(torch.frombuffer(data, dtype=torch.uint8))

        self.state = anchor.read(put)
        return anchor.num_bytes

    def take_over(self, tensors: Mapping[str, torch.Tensor], crew: threads.Crew) -> None:
        """Replace the bytes of these tensors."""
        copy_all(tensors, self._regions, crew)

    @contextmanager
    def regions(self, names: Collection[str]) -> Iterator[Mapping[str, torch.Tensor]]:
        yield {name: self._regions[name] for name in names if name in self._regions}

    def checksums(self, names: Set[str], checksum_format: str) -> dict[str, str]:
        return {n: checksum_of(self._regions[n], checksum_format) for n in self._regions.keys() & names}

    def tensor(self, name: str) -> torch.Tensor:
        """A view of one tensor, with its dtype and shape."""
        location = self.tensors[name]
        return self._regions[name].view(leaf_names.dtype_named(location.dtype)).view(location.shape)

    def region(self, name: str) -> torch.Tensor:
        """The bytes of one tensor."""
        return self._regions[name]

    def note(self, state: WeightsState | None) -> None:
        self.state = state


def new_crew() -> threads.Crew:
    """The threads that apply versions for one `Subscriber`."""
    return threads.Crew("pull", max(2, limits.num_cpus()))
