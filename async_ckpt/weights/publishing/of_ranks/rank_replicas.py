"""A version that all ranks have published: its slices in the memory of a reader, and its tensors in pieces.

In: the versions at a root. Out: the values of a version's tensors. Knows nothing of: folders, modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ....errors import CorruptCheckpointError
from ....plumbing import threads
from ..live_weights import MemoryReplica, PullResult, update_replica
from ..version_files import VersionSource
from ..versions import Versions
from .pieces import PiecedTensor, sliced_tensors
from .root_versions import RootVersions, identity_of_ranks


class VersionOfRanks:
    """A version, according to the current indices of all ranks. A `Subscriber` creates it for one pull.

    `held` are the slices of each rank in the version that was read last. Raises NotCommittedError, and
    CorruptCheckpointError, also if ranks published it in different starts, or if slices do not cover a tensor.
    """

    def __init__(self, root: RootVersions, number: int, size: int, held: Sequence[MemoryReplica] = ()) -> None:
        self.number, self._held = number, held
        self._ranks = [root.of_rank(rank, size) for rank in range(size)]
        self._indices = indices = [versions.read(number, fresh=True) for versions in self._ranks]
        try:
            if len({index.slices.start for index in indices}) > 1:
                raise ValueError("ranks have published it in two starts of the training")
            self._sliced = sliced_tensors([index.slices.of_tensors for index in indices])
        except ValueError as error:
            path = root.storage.locate("")
            raise CorruptCheckpointError(
                f"{path}: version {number}: {error}; publish it from all ranks", path=path
            ) from None
        self.identity, self.adapter = identity_of_ranks(index.identity for index in indices), indices[0].adapter
        self.kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in self._sliced.items()}

    def read(self, crew: threads.Crew) -> PullResult:
        """Bring the slices of all ranks to this version. Raises as `update_replica` does."""
        result = PullResult(None, 0, 0)
        for rank, (versions, replica) in enumerate(zip(self._ranks, self._held, strict=True)):
            more = update_replica(replica, versions, self.number, crew)
            self._compare(rank, versions, replica.state.identity if replica.state else "")
            num_versions = max(result.num_versions, more.num_versions)
            result = PullResult(more.base, num_versions, result.num_bytes + more.num_bytes)
        return result

    def _compare(self, rank: int, versions: Versions, identity: str) -> None:
        """Raises CorruptCheckpointError if a rank's weights do not have the identity in its index."""
        if identity != self._indices[rank].identity:
            path = versions.root
            raise CorruptCheckpointError(
                f"{path}: version {self.number} was published again while it was read; pull it again", path=path
            )

    @property
    def tensors(self) -> Mapping[str, PiecedTensor]:
        """The tensors, once the slices are at this version."""
        return {
            name: tensor.pieced(lambda rank, key: (self._held[rank].region(key), ""))
            for name, tensor in self._sliced.items()
        }

    @property
    def files(self) -> Mapping[str, bytes]:
        """Config, tokenizer and other small files, which rank 0 published with the anchor below this version."""
        versions = self._ranks[0]
        chain = versions.chain(self.number, None)
        self._compare(0, versions, chain[-1].identity)
        source = VersionSource(versions.storage, chain[0])
        return {name: bytes(source.read(name)) for name in source.other_files()}
