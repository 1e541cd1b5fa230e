"""The weights that the next delta is computed against, and the rules for when a version is a delta.

In: the weights of published versions. Out: the bytes to compare new weights with, or None.
Knows nothing of: how versions are written, who owns a root.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from ...errors import CheckpointError
from ...plumbing import kept_memory, leaf_names, limits, threads
from ..delta import Encoding, VersionIndex
from .live_weights import MemoryReplica, update_replica
from .version_files import TensorLocation, WeightsState
from .versions import Versions

_log: Final = logging.getLogger("async_ckpt")


@dataclass(frozen=True, slots=True)
class DeltaPolicy:
    """The user's rules for deltas."""

    encoding: Encoding | None  # None publishes anchors only
    anchor_every: int  # one of this many versions is an anchor
    follows: bool  # deltas are against the newest durable version, not an acknowledged one
    max_bytes: int | None  # the most host memory for the base

    @property
    def has_deltas(self) -> bool:
        return self.encoding is not None and self.anchor_every > 1


class DeltaBase:
    """The weights, in host memory, that the next delta is computed against.

    Owned by a `VersionSeries`. Only the publication whose turn it is uses it, on helper threads.
    """

    def __init__(self, policy: DeltaPolicy) -> None:
        self.policy = policy
        # Half of the CPUs, since encoding competes with the training for memory bandwidth.
        self.crew = threads.Crew("encode", max(1, limits.num_cpus() // 2), background=True)
        self._replica = MemoryReplica(self._allocate)
        self._num_since_anchor = 0

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        try:
            return kept_memory.host_memory().lend(num_bytes, max_bytes=self.policy.max_bytes)
        except MemoryError as error:
            raise MemoryError(
                f"deltas need the weights of the previous version in host memory: {error}; encoding=None does not"
            ) from None

    def reserve(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Allocate the memory for these weights, before anything is written. Raises MemoryError."""
        if self.policy.has_deltas:
            self._replica.lay_out(
                {
                    name: TensorLocation("", leaf_names.dtype_name(tensor.dtype), tuple(tensor.shape), 0, tensor.nbytes)
                    for name, tensor in tensors.items()
                }
            )

    def replica_for(self, version: int, versions: Versions, acknowledged: int | None) -> MemoryReplica | None:
        """The weights that this version may be a delta against; None if it must be an anchor."""
        if not self.policy.has_deltas or self._num_since_anchor + 1 >= self.policy.anchor_every:
            return None
        replica = self._replica
        if not self.policy.follows:
            if acknowledged is None or acknowledged >= version:
                return None
            try:
                # Read from the storage, since readers have these bytes even if others were meant to be written.
                update_replica(replica, versions, acknowledged, self.crew)
            except CheckpointError as error:
                _log.warning("version %d was acknowledged but cannot be read: %s", acknowledged, error)
                return None
        state = replica.state
        if state is None or state.version >= version or not versions.is_complete(state.version):
            return None
        return replica

    def update(self, index: VersionIndex, state: WeightsState, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the weights of a version that has become durable, unless the base is an acknowledged version."""
        self._num_since_anchor = 0 if index.is_anchor else self._num_since_anchor + 1
        replica = self._replica
        if not self.policy.has_deltas or (not self.policy.follows and replica.state is not None):
            return
        is_all = index.is_anchor or replica.state is None
        changed = tensors if is_all else {name: tensors[name] for name in index.files}
        replica.note(None)
        replica.take_over(changed, self.crew)
        replica.note(state)

    def close(self) -> None:
        """Stop the threads, and free the memory."""
        self.crew.stop()
        self._replica = MemoryReplica(self._allocate)
