"""The state of a model of FSDP1 and of its optimizer, as slices of whole tensors.

In: a model and an optimizer, of FSDP1 or not. Out: the state to save or to load into: slices for FSDP1, otherwise the
objects themselves. Knows nothing of: trainers, folders, saves.

FSDP1 makes its slices by collectives, and loads them from copies. So every rank calls these functions, on its training
thread.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only

from ...plumbing import backends


def is_fsdp1(model: Any) -> bool:
    return isinstance(model, FullyShardedDataParallel)


def plain_of(model: Any) -> Any:
    """The model inside the wrapper of FSDP1; it has the config."""
    return model._fsdp_wrapped_module if is_fsdp1(model) else model


def weights_of(model: Any) -> Any:
    """The state of a model to save, or to load into: the model itself, or under FSDP1 its state dict."""
    if not is_fsdp1(model):
        return model
    with as_slices(model):
        return as_dtensors(model.state_dict())


def take_back(model: Any, weights: Any, *, strict: bool = True) -> None:
    """Load the filled weights of `weights_of` into the model."""
    if is_fsdp1(model):
        with as_slices(model):
            model.load_state_dict(_as_sharded(weights), strict=strict)


def optimizer_of(model: Any, optimizer: Any) -> Any:
    """The state of an optimizer to save: the optimizer itself, or under FSDP1 its state by names of parameters."""
    if not is_fsdp1(model):
        return optimizer
    optimizer = getattr(optimizer, "optimizer", optimizer)  # below a trainer's wrapper
    if not optimizer.state:  # the function below would take a step to create it
        with as_slices(model):
            return as_dtensors(FullyShardedDataParallel.optim_state_dict(model, optimizer))
    return optimizer_to_fill(model, optimizer)


def optimizer_to_fill(model: Any, optimizer: Any) -> Any:
    """The state of an optimizer to load into, like `optimizer_of`. It is complete even before the first step."""
    if not is_fsdp1(model):
        return optimizer
    with _quietly():
        return as_dtensors(get_optimizer_state_dict(model, optimizer))


def take_back_optimizer(model: Any, optimizer: Any, state: Any) -> None:
    """Load the filled state of `optimizer_to_fill` into the optimizer."""
    if is_fsdp1(model):
        with _quietly():
            set_optimizer_state_dict(model, optimizer, _as_sharded(state))


def as_dtensors(state: Any) -> Any:
    """A state with DTensors over the memory of FSDP1's ShardedTensors, for snapshots and for loading."""
    return tree_map_only(ShardedTensor, _dtensor, state)


def _dtensor(tensor: ShardedTensor) -> DTensor:
    """The DTensor of a ShardedTensor. FSDP1 shards the first dimension, as `Shard(0)` does."""
    size, shards = tensor.size(), tensor.local_shards()
    placement = tensor.metadata().shards_metadata[0].placement
    assert placement is not None
    kind = "cpu" if backends.is_host(placement.device()) else backends.accelerator() or "cpu"
    local = shards[0].tensor if shards else torch.empty((0, *size[1:]), dtype=tensor.dtype, device=kind)
    mesh = DeviceMesh.from_group(tensor._process_group, kind)
    stride = torch.empty(size, device="meta").stride()
    slices = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=size, stride=stride)
    slices.of_fsdp1 = tensor  # type: ignore[attr-defined]
    return slices


def _as_sharded(state: Any) -> Any:
    """A state of `as_dtensors`, with the ShardedTensors that FSDP1 loads."""
    return tree_map_only(DTensor, lambda tensor: getattr(tensor, "of_fsdp1", tensor), state)


@contextmanager
def as_slices(model: Any) -> Iterator[None]:
    """In this block, the state dict of a model of FSDP1 has slices on its device."""
    if not is_fsdp1(model):
        yield
        return
    with (
        _quietly(),
        FullyShardedDataParallel.state_dict_type(
            model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()
        ),
    ):
        yield


@contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates FSDP1, and functions that it uses itself
        yield
