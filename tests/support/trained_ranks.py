"""Models and optimizers that any rank of any world has, and values of its own, each a function of its seed or its rank."""

from typing import Any

import torch
from fake_ranks import distributed
from matrix_slices import numbered
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from async_ckpt.core.slicing.sharded import local_part


def trained(world: int | None, *, seed: int = 0) -> dict[str, Any]:
    """A model and an optimizer that has moments, sharded or not; of equal values for each seed, wherever it is made."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 13), nn.BatchNorm1d(13), nn.Linear(13, 3))
    if world is not None:
        fully_shard(model[0], mesh=init_device_mesh("cpu", (world,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        state["step"] = torch.tensor(float(seed))
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(parameter)
            values = numbered(tuple(parameter.shape)) + len(name) + seed
            local_part(state[name]).copy_(local_part(values if world is None else distributed_like(parameter, values)))
    return {"model": model, "optimizer": optimizer}


def distributed_like(tensor: Any, full: torch.Tensor) -> DTensor:
    return distributed(full, tensor.device_mesh, tensor.placements)


def own_values(rank: int) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((3,), 7.0)},
        "rng": {"python": [rank, 1], "torch": torch.tensor([rank])},
        "timer": float(rank),
    }
