"""Any rank of any world in one process: torch's `fake` backend, whose collectives do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch.distributed as dist
import torch.distributed._functional_collectives as functional
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


@contextmanager
def no_collectives() -> Iterator[None]:
    """Whatever torch would send to other ranks fails."""
    names = {
        dist: "all_gather_into_tensor all_gather all_reduce broadcast scatter all_to_all reduce_scatter_tensor barrier gather",
        functional: "all_gather_tensor all_reduce broadcast all_to_all_single",
    }
    with ExitStack() as stack:
        for module, listed in names.items():
            for name in listed.split():
                stack.enter_context(patch.object(module, name, None))
        yield
