"""Whether held weights are the version that a number says, where nothing else does.

In: held weights, and the indices and headers of versions. Out: yes or no. Knows nothing of: how versions are applied.

A Publisher's delta names its base by the digest of the weights. Deltas of other programs name a number alone. Under
the same number there may be other weights, of a training that was started again; and a folder that another receiver
has marked may hold half of the next version. So the held weights are compared with the checksums in the deltas that
lead to the number, of all tensors that these change, and with the anchor or the base model at their beginning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Protocol

from ...errors import CorruptCheckpointError, NotCommittedError
from ...plumbing import threads
from ..delta import OUR_CHECKSUMS, VersionIndex
from .base_model import BaseModel
from .source import Anchor, VersionSource, WeightsState
from .versions import Versions


def source_of(index: VersionIndex, versions: Versions, base: BaseModel | None) -> VersionSource:
    """The files of the version, or of the base model, that an index belongs to."""
    if base is not None and base.is_source_of(index):
        return base.source(index)
    return VersionSource(versions.storage, index)


class HeldWeights(Protocol):
    """Weights that can be compared."""

    @property
    def state(self) -> WeightsState | None:
        """The state of the weights; None if they are not known to be whole."""

    def checksums(self, names: Set[str], checksum_format: str) -> Mapping[str, str]:
        """The checksums of the named tensors that are here, computed from their bytes."""


def is_that_version(
    held: HeldWeights,
    chain: Sequence[VersionIndex],
    versions: Versions,
    target: int,
    crew: threads.Crew,
    base: BaseModel | None = None,
) -> bool:
    """Whether held weights are those that a chain begins with; true if there is nothing to compare them with.

    `chain` leads from the held weights to the version `target`. Its first index names its base; if the chain is
    empty, the target's index names the weights.
    """
    state = held.state
    assert state is not None
    first = chain[0] if chain else versions.read_or_base(target, base, fresh=False)
    if chain and (first.delta is None or first.delta.base_identity):
        return True
    if not chain and first.identity:
        return True
    try:
        if state.stamp and versions.read_or_base(state.version, base).stamp == state.stamp:
            return True  # it became the version by this very index
        return _leads_to(held, state, versions, crew, base)
    except NotCommittedError:
        return True  # the deltas that led here were deleted, or began with a model that is unknown
    except CorruptCheckpointError:
        return not state.is_marked  # weights that we noted ourselves were compared when they were applied


def _leads_to(
    held: HeldWeights, state: WeightsState, versions: Versions, crew: threads.Crew, base: BaseModel | None
) -> bool:
    """Whether the tensors of a state are those that the deltas up to its version make."""
    unchecked, number = set(state.checksums), state.version
    while unchecked:
        index = versions.read_or_base(number, base)
        source = source_of(index, versions, base)
        if index.delta is None:
            return _holds(Anchor(source, crew), state, unchecked)
        delta_checksums = source.frame_checksums()
        names = delta_checksums.keys() & unchecked
        held_checksums = (
            state.checksums
            if index.delta.checksum_format == OUR_CHECKSUMS
            else held.checksums(names, index.delta.checksum_format)
        )
        if any(held_checksums.get(name) != delta_checksums[name] for name in names):
            return False
        unchecked -= names
        number = index.delta.base
    return True


def _holds(anchor: Anchor, state: WeightsState, names: Set[str]) -> bool:
    """Whether these tensors are those of an anchor."""
    checksums = anchor.source.index.checksums or anchor.read(lambda *_: None).checksums
    return all(checksums.get(name) == state.checksums[name] for name in names)
