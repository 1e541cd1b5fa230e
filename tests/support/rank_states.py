"""States of several ranks, made by torch's own parallelisms, and what they are as full tensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

__all__ = [
    "DTensor",
    "Replicate",
    "Shard",
    "ddp",
    "distribute_tensor",
    "fsdp",
    "fsdp_tp",
    "fully_shard",
    "hsdp",
    "init_device_mesh",
    "keep_full",
    "mesh_of",
    "network",
    "numbered",
    "small",
    "spread",
    "trained",
]


def network(width: int = 37) -> nn.Sequential:
    """Nothing of it is divisible by the ranks that there are; the same on all of them."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, width), nn.ReLU(), nn.Linear(width, 5), nn.LayerNorm(5))


def trained(model: nn.Module) -> dict[str, Any]:
    """With an optimizer that has taken a step, each rank on other data."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    made = torch.Generator().manual_seed(dist.get_rank())
    model(torch.randn(4, 13, generator=made)).square().sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "lr": 0.01}


def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=names)


def fsdp(mesh: DeviceMesh | None = None, width: int = 37) -> dict[str, Any]:
    model, mesh = network(width), mesh or mesh_of()
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return trained(fully_shard(model, mesh=mesh))


def hsdp(replicas: int, width: int = 37) -> dict[str, Any]:
    return fsdp(mesh_of(replicas, dist.get_world_size() // replicas, names=("replicate", "shard")), width)


def fsdp_tp(tp: int) -> dict[str, Any]:
    mesh = mesh_of(dist.get_world_size() // tp, tp, names=("dp", "tp"))
    model = network(7 * tp)  # tensor parallelism wants equal parts, which then are cut unevenly
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return trained(fully_shard(model, mesh=mesh["dp"]))


def ddp(width: int = 37) -> dict[str, Any]:
    return trained(nn.parallel.DistributedDataParallel(network(width)))


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Every item is another number."""
    return torch.arange(torch.Size(shape).numel()).to(dtype).reshape(shape)


def spread(
    *shape: int, mesh: DeviceMesh | None = None, placements: tuple[Any, ...] = (Shard(0),), add: float = 0.0
) -> DTensor:
    return distribute_tensor(numbered(*shape) + add, mesh or mesh_of(), placements)


def small(step: int) -> dict[str, Any]:
    """A state that is a function of its step, and quickly made."""
    return {"model": {"cut": spread(41, 3, add=step), "whole": numbered(300, 1000) + step}, "step": step}


def keep_full(state: Any, path: str | Path) -> None:
    """Leave there what torch says that the full tensors are, by dotted path. A collective: all ranks call it."""
    tensors: dict[str, torch.Tensor] = {}
    _gather(state, (), tensors)
    if dist.get_rank() == 0:
        torch.save(tensors, path)
    dist.barrier()


def _gather(value: Any, path: tuple[Any, ...], into: dict[str, torch.Tensor]) -> None:
    if isinstance(value, nn.parallel.DistributedDataParallel):
        value = value.module
    if hasattr(value, "state_dict"):
        value = value.state_dict()
    if isinstance(value, torch.Tensor):
        full = value.full_tensor() if isinstance(value, DTensor) else value
        into[".".join(map(str, path))] = full.detach().clone()
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        _gather(inner, (*path, key), into)
