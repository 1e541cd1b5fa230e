"""Any rank of any world in one process: torch's `fake` backend, whose collectives do nothing."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, debug, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def standing_at(rank: int, world: int) -> Iterator[None]:
    """This process is that rank, until the end of the block."""
    _forget_meshes()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def distributed(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """`distribute_tensor` of values that every rank has, so that nothing is sent."""
    if "src_data_rank" in inspect.signature(distribute_tensor).parameters:
        return distribute_tensor(tensor, mesh, placements, src_data_rank=None)
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)  # torch 2.6
    part = tensor[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))].clone()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def _forget_meshes() -> None:
    """Or DTensors of this rank would have the mesh of another one, equal to their own."""
    if hasattr(debug, "_clear_sharding_prop_cache"):
        debug._clear_sharding_prop_cache()
    else:  # torch 2.6
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()  # type: ignore[attr-defined]


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
