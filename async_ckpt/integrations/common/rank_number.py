"""The number of each rank as a part of its state.

In: a rank. Out: its element of a tensor that all ranks hold together. Knows nothing of: frameworks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RankNumber:
    """The number of this rank as its element of a tensor, with the attributes of Megatron's ShardedTensor.

    A state in which nothing else is spread over the ranks is saved by all of them with it.
    """

    data: torch.Tensor
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    key: str = "ranks"
    local_shape: tuple[int, ...] = (1,)
    axis_fragmentations: tuple[int, ...] | None = None
    replica_id: int = 0
    dtype: torch.dtype = torch.int64

    @classmethod
    def of(cls, rank: int, world_size: int) -> RankNumber:
        return cls(torch.tensor([rank]), (world_size,), (rank,))
