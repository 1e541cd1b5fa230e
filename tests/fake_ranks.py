"""Any rank of any world in one process: torch's `fake` backend, whose collectives do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.tensor import debug
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def standing_at(rank: int, world: int) -> Iterator[None]:
    """This process is that rank, until the end of the block."""
    debug._clear_sharding_prop_cache()  # or DTensors of this rank have the mesh of another one, equal to their own
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
