"""DTensors of any rank of any world in one process, by torch's `fake` backend, whose collectives do nothing.

In: a rank, and the data that it holds. Out: DTensors. Knows nothing of: what is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def standing_at(rank: int, size: int) -> Iterator[DeviceMesh]:
    """Make this process the given rank during the block. The mesh has all ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield DeviceMesh("cpu", torch.arange(size), _init_backend=False)
    finally:
        dist.destroy_process_group()


def sharded(local: torch.Tensor, shape: Sequence[int], mesh: DeviceMesh) -> DTensor:
    """A tensor of this shape, of which this rank holds the rows `local`."""
    stride = torch.empty(*shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride)
