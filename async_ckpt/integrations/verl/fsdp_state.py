"""The state of a model and its optimizer under FSDP, FSDP2 or neither, as slices of whole tensors.

In: a model and an optimizer as verl makes them. Out: what an archive is made of, and what it fills. Knows nothing of:
folders, saves.

FSDP2 and plain modules have tensors that are filled where they are. FSDP makes its slices by collectives, and takes
them back from copies.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

_LORA: Final = ("lora_", ".adapter_")


def is_fsdp1(model: Any) -> bool:
    return isinstance(model, FullyShardedDataParallel)


def plain_of(model: Any) -> Any:
    """The model that knows its config, as verl finds it."""
    return model._fsdp_wrapped_module if is_fsdp1(model) else model


def has_adapters(model: Any) -> bool:
    return hasattr(getattr(model, "_fsdp_wrapped_module", model), "peft_config")


def is_adapter(name: str) -> bool:
    """Whether this is the name of an adapter's weight, as verl tells it."""
    return any(part in name for part in _LORA)


def weights_of(model: Any, *, only_adapters: bool) -> dict[str, Any]:
    """The weights of this rank by name. Under FSDP every rank calls it. Raises ValueError without adapters."""
    with _sharded(model):
        weights = dict(model.state_dict())
    if not only_adapters:
        return weights
    adapters = {name: value for name, value in weights.items() if is_adapter(name)}
    if not adapters:
        raise ValueError(
            f"save_lora_only is set, but none of the {len(weights)} weights is one of an adapter; leave it out"
        )
    return adapters


def take_back(model: Any, weights: Mapping[str, Any], *, only_adapters: bool) -> None:
    """Give filled weights back to the model. Every rank calls it."""
    with _sharded(model):
        model.load_state_dict(weights, strict=not only_adapters)


def optimizer_of(model: Any, optimizer: Any) -> Any:
    """The optimizer for an archive: itself, or under FSDP its state by names of parameters, from a collective."""
    if not is_fsdp1(model):
        return optimizer
    if not optimizer.state:  # torch's function would take a step to make it
        with _sharded(model):
            return FullyShardedDataParallel.optim_state_dict(model, optimizer)
    with _quietly():
        return get_optimizer_state_dict(model, optimizer)


def optimizer_to_fill(model: Any, optimizer: Any) -> Any:
    """The same to be filled: an optimizer that has taken no step has its state all the same."""
    if not is_fsdp1(model):
        return optimizer
    with _quietly():
        return get_optimizer_state_dict(model, optimizer)


def take_back_optimizer(model: Any, optimizer: Any, state: Any) -> None:
    """Give a filled state back to the optimizer. Every rank calls it."""
    if is_fsdp1(model):
        with _quietly():
            set_optimizer_state_dict(model, optimizer, state)


def exported(model: Any, weights: Mapping[str, Any]) -> Any:
    """The model to export as a folder of Hugging Face, or its weights by the names that verl gives them there.

    `weights` are all of this rank. A model of FSDP has none of its own, and adapters stay beside what they adapt.
    """
    if not is_fsdp1(model) and not has_adapters(model):
        return model
    weights = dict(weights)
    if not has_adapters(model):
        plain = plain_of(model)
        with torch.device("meta"):  # slices do not show which weights are one
            same = type(plain)(plain.config)
        _of_verl("transformers_compat").drop_tied_target_keys(weights, same, plain.config)
    return weights


def _of_verl(module: str) -> Any:
    return import_module(f"verl.utils.{module}")


@contextmanager
def _sharded(model: Any) -> Iterator[None]:
    """In this block, the state dict of a model of FSDP is of slices on its device."""
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
        warnings.simplefilter("ignore")  # torch's, of FSDP and of functions that it replaces itself
        yield
