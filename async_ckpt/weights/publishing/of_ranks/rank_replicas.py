"""The slices of all ranks in the memory of a reader, brought from version to version.

In: a version that all ranks have published. Out: the values of its tensors, in pieces.
Knows nothing of: folders, modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ....plumbing import leaf_names, threads
from ..live_weights import MemoryReplica, PullResult, update_replica
from ..source import VersionSource
from .pieces import PiecedTensor, TensorPiece
from .rank_versions import RankVersions, WholeVersion


class RankReplicas:
    """The slices of the ranks of one world, each as it was in the version that was read last.

    Owned by a `Subscriber`; one pull at a time uses it. `allocate` is as for a `MemoryReplica`.
    """

    def __init__(self, ranks: RankVersions, allocate: Callable[[int], torch.Tensor]) -> None:
        self._ranks, self._allocate = ranks, allocate
        self._held: list[MemoryReplica] = []

    def version(self, number: int, size: int) -> VersionOfRanks:
        """A version that a world of this size has published, to be read. Raises as `RankVersions.read_whole`."""
        whole = self._ranks.read_whole(number, size)
        if len(self._held) != size:  # drop those of another world
            self._held = [MemoryReplica(self._allocate) for _ in range(size)]
        return VersionOfRanks(whole, self._ranks, self._held)

    def drop(self) -> None:
        """Give the memory back."""
        self._held = []


class VersionOfRanks:
    """A version that all ranks have published. Made by `RankReplicas`, and used before it makes the next one."""

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
            name: PiecedTensor(
                leaf_names.dtype_named(tensor.dtype),
                tensor.shape,
                [
                    TensorPiece(
                        box, self._held[rank].region(key).view(leaf_names.dtype_named(tensor.dtype)).view(box.sizes)
                    )
                    for rank, key, box in tensor.slices
                ],
            )
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
