"""States of the witnesses: each is a function of its step, so that what is read back needs no file to be compared with.

In: a step. Out: modules, optimizers and plain values. Knows nothing of: async_ckpt, but for its `RngState`.
"""

from datetime import date, timedelta
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any

import torch
from torch import nn

RANKS = 2


def model_at(step: int) -> nn.Module:
    """A module whose weights and buffers are multiples of eighths, which each dtype holds."""
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 2, bias=False).to(torch.bfloat16))
    with torch.no_grad():
        for number, tensor in enumerate(model.state_dict().values()):
            tensor.copy_(values(tensor.shape, step + number))
    return model


def values(shape: Any, start: int) -> torch.Tensor:
    size = torch.Size(shape)
    return (torch.arange(size.numel(), dtype=torch.float32).reshape(size) + start) / 8


def optimizer_at(model: nn.Module, step: int) -> torch.optim.Optimizer:
    """AdamW that has taken one step, with moments that depend on `step`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=step / 1000)
    for number, parameter in enumerate(model.parameters()):
        optimizer.state[parameter] = {
            "step": torch.tensor(float(step)),
            "exp_avg": values(parameter.shape, step + number).to(parameter.dtype),
            "exp_avg_sq": values(parameter.shape, 2 * step + number).to(parameter.dtype),
        }
    return optimizer


def plain_at(step: int) -> dict[str, Any]:
    """Values that are stored as plain data, and tensors of unusual kinds."""
    return {
        "epoch": step,
        "losses": [1 / (1 + one) for one in range(step)],
        "day": date(2026, 11, 1) + timedelta(days=step),
        "price": Decimal(step) / 4,
        "path": PurePosixPath(f"data/{step}"),
        "seen": {step, step + 1},
        ("tuple", 0): b"bytes",
        "complex": torch.complex(values([2], step), values([2], 1)),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(step),
        "empty": torch.empty(0, 3),
        "turned": values([3, 4], step).t(),
    }


def state_at(step: int) -> dict[str, Any]:
    """The state of one process."""
    model = model_at(step)
    return {
        "model": model,
        "optimizer": optimizer_at(model, step),
        "frozen": {"weight": values([7], 1)},
        "plain": plain_at(step),
    }


def weights_at(step: int) -> dict[str, torch.Tensor]:
    """Weights as an export or a publication holds them."""
    return {
        "layer.weight": values([6, 8], step).to(torch.bfloat16),
        "layer.bias": values([6], step),
        "head": values([4, 4], 1),
    }


def sharded_at(step: int, mesh: Any) -> dict[str, Any]:
    """The state of one of several ranks: DTensors over them, a replicated tensor, and a value of its own."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    rank = mesh.get_local_rank()
    return {
        "model": {
            "rows": distribute_tensor(values([5, 3], step), mesh, [Shard(0)]),
            "columns": distribute_tensor(values([3, 5], step + 1), mesh, [Shard(1)]),
            "whole": distribute_tensor(values([4], step + 2), mesh, [Replicate()]),
        },
        "frozen": {"rows": distribute_tensor(values([6, 2], 1), mesh, [Shard(0)])},
        "data": {"position": 100 * step + rank},
        "epoch": step,
    }


def full_at(step: int) -> dict[str, torch.Tensor]:
    """The tensors of `sharded_at` as one process reads them, by dotted name."""
    return {
        "model.rows": values([5, 3], step),
        "model.columns": values([3, 5], step + 1),
        "model.whole": values([4], step + 2),
        "frozen.rows": values([6, 2], 1),
    }
