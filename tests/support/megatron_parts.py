"""What Megatron-Core puts into a sharded state dict: classes with the attributes of its own, which is not installed here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

ReplicaId = int | tuple[int, ...]


@dataclass
class ShardedTensor:
    """A block of a global tensor, which other ranks may hold, too: those with a `replica_id` that is not zero."""

    key: str
    data: torch.Tensor | None = field(repr=False)
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None

    @classmethod
    def of(
        cls,
        key: str,
        data: torch.Tensor,
        *cuts: tuple[int, int, int],
        replica_id: ReplicaId = 0,
        prepended: int = 0,
    ) -> ShardedTensor:
        """`cuts` are (axis, number of this block, of how many), counted with the axes that are prepended."""
        offsets, fragments = [0] * (data.ndim + prepended), [1] * (data.ndim + prepended)
        sizes = [1] * prepended + list(data.shape)
        for axis, number, count in cuts:
            offsets[axis], fragments[axis] = number * sizes[axis], count
        whole = tuple(size * count for size, count in zip(sizes, fragments, strict=True))
        return cls(
            key,
            data,
            data.dtype,
            tuple(data.shape),
            whole,
            tuple(offsets),
            tuple(fragments),
            replica_id,
            prepended,
        )


@dataclass
class ShardedObject:
    """Anything else, called by a key and a position."""

    key: str
    data: Any
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: ReplicaId = 0


@dataclass
class ShardedTensorFactory:
    """What becomes ShardedTensors only when it is saved."""

    key: str
    data: torch.Tensor
    build_fn: Callable[..., Any]
    merge_fn: Callable[..., Any]
    replica_id: ReplicaId = 0


class LocalNonpersistentObject:
    """What is in a state dict, and is not to be saved."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj
