"""The slices of all ranks in the memory of a reader, brought from version to version.

In: a version that all ranks have published. Out: the values of its tensors, in pieces.
Knows nothing of: folders, modules.
"""

from __future__ import annotations

from collections.abc import Mapping

from ....plumbing import threads
from ..live_weights import MemoryReplica, PullResult, update_replica
from ..source import VersionSource
from .pieces import PiecedTensor
from .rank_versions import RankVersions, WholeVersion


class VersionOfRanks:
    """A version that all ranks have published. Made by a `Subscriber`, and used in one pull.

    `held` has the slices of each rank, as they were in the version that was read last.
    """

    def __init__(self, whole: WholeVersion, ranks: RankVersions, held: list[MemoryReplica]) -> None:
        self.number, self.identity, self.adapter = whole.number, whole.identity, whole.indices[0].adapter
        self._whole, self._ranks, self._held = whole, ranks, held

    @property
    def kinds(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """The dtype and the shape of each tensor."""
        return {name: (tensor.dtype, tensor.shape) for name, tensor in self._whole.tensors.items()}

    def read(self, crew: threads.Crew) -> PullResult:
        """Bring the slices of all ranks to this version. Raises as `update_replica`."""
        size, result = len(self._held), PullResult(None, 0, 0)
        for rank, replica in enumerate(self._held):
            versions = self._ranks.of_rank(rank, size)
            more = update_replica(replica, versions, self.number, crew)
            self._whole.compare(rank, replica.state.identity if replica.state else "", versions.root)
            num_versions = max(result.num_versions, more.num_versions)
            result = PullResult(more.base, num_versions, result.num_bytes + more.num_bytes)
        return result

    @property
    def tensors(self) -> Mapping[str, PiecedTensor]:
        """The tensors, once the slices are at this version."""
        return {
            name: tensor.pieced(lambda rank, key: (self._held[rank].region(key), ""))
            for name, tensor in self._whole.tensors.items()
        }

    @property
    def files(self) -> Mapping[str, bytes]:
        """Config, tokenizer and the like, which rank 0 has published with the anchor that the version is built on."""
        versions = self._ranks.of_rank(0, len(self._held))
        chain = versions.chain(self.number, None)
        self._whole.compare(0, chain[-1].identity, versions.root)
        source = VersionSource(versions.storage, chain[0])
        return {name: bytes(source.read(name)) for name in source.other_files()}
