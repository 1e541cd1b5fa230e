"""Whether what somebody has is the version that it is said to be, where only a number says so.

In: what is there, and the indices and headers of versions. Out: yes or no. Knows nothing of: how versions are applied.

What a Publisher has made names the weights that it is against by their digest. What others have made names a number alone. Under
that there may be other weights by now, of a training that was begun anew; and where another receiver has marked a folder, there may
be half of the next version. What tells are the checksums in the deltas that lead to the number, of all tensors that these change, and
the full version, or the model, that they begin with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Protocol

from ..errors import CorruptCheckpointError, NotCommittedError
from ..format.delta import OUR_CHECKSUMS, VersionIndex
from ..host.threads import Crew
from .base_model import BaseModel
from .source import Anchor, VersionSource, WeightsState
from .versions import Versions


def source_of(index: VersionIndex, versions: Versions, base: BaseModel | None) -> VersionSource:
    """The files of what an index tells of, which may be the base."""
    if base is not None and base.made(index):
        return base.source(index)
    return VersionSource(versions.storage, index)


class HeldWeights(Protocol):
    """Weights that somebody has."""

    @property
    def state(self) -> WeightsState | None: ...

    def checksums(self, names: Set[str], checksum_format: str) -> Mapping[str, str]: ...


def is_that_version(
    held: HeldWeights,
    chain: Sequence[VersionIndex],
    versions: Versions,
    target: int,
    crew: Crew,
    base: BaseModel | None = None,
) -> bool:
    """Whether what is there is what a chain to a version begins with, as far as anything tells."""
    state = held.state
    assert state is not None
    first = chain[0] if chain else versions.read_or_base(target, base, fresh=False)
    if chain and (first.delta is None or first.delta.base_identity):
        return True
    if not chain and first.identity:
        return True
    try:
        if state.stamp and versions.read_or_base(state.version, base).stamp == state.stamp:
            return True  # by this very index it has become the version
        return _leads_to(held, state, versions, crew, base)
    except NotCommittedError:
        return True  # what led here was deleted, or began with a model that nobody can look into
    except CorruptCheckpointError:
        return not state.is_marked  # of what we have noted ourselves, all was compared when it was applied


def _leads_to(
    held: HeldWeights, state: WeightsState, versions: Versions, crew: Crew, base: BaseModel | None
) -> bool:
    """Whether the tensors of a state are those to which deltas lead."""
    left, number = set(state.checksums), state.version
    while left:
        index = versions.read_or_base(number, base)
        source = source_of(index, versions, base)
        if index.delta is None:
            return _holds(Anchor(source, crew), state, left)
        told = source.frame_checksums()
        names = told.keys() & left
        found = (
            state.checksums
            if index.delta.checksum_format == OUR_CHECKSUMS
            else held.checksums(names, index.delta.checksum_format)
        )
        if any(found.get(name) != told[name] for name in names):
            return False
        left -= names
        number = index.delta.base
    return True


def _holds(anchor: Anchor, state: WeightsState, names: Set[str]) -> bool:
    """Whether these tensors are those of an anchor."""
    told = anchor.source.index.checksums or anchor.read(lambda *_: None).checksums
    return all(told.get(name) == state.checksums[name] for name in names)
