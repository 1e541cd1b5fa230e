"""The weights of a model under FSDP, FSDP2 or neither, as slices of full tensors.

In: a model as verl creates it. Out: the state to save or to load into. Knows nothing of: folders, saves.

The tensors of FSDP2 and of plain modules are filled in place. For FSDP, see `common.fsdp1_state`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

import torch

from ..common.fsdp1_state import as_slices, is_fsdp1, plain_of

_LORA: Final = ("lora_", ".adapter_")


def has_adapters(model: Any) -> bool:
    return hasattr(getattr(model, "_fsdp_wrapped_module", model), "peft_config")


def is_adapter(name: str) -> bool:
    """True if this is the name of an adapter's weight, by verl's rule."""
    return any(part in name for part in _LORA)


def weights_of(model: Any, *, only_adapters: bool) -> dict[str, Any]:
    """This rank's weights by name. Under FSDP, every rank calls this. Raises ValueError if adapters are missing."""
    with as_slices(model):
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
    """Load the filled weights of `weights_of` into the model. Every rank calls this."""
    with as_slices(model):
        model.load_state_dict(weights, strict=not only_adapters)


def rank_number(rank: int, world_size: int) -> Any:
    """A rank's number as its slice of a tensor, so that all ranks save a state in which nothing else is sharded."""
    number: Any = torch.tensor([rank])
    number.global_shape, number.global_offsets = (world_size,), [(rank,)]
    number.local_offsets, number.local_sizes = [(0,)], [(1,)]
    return number


def exported(model: Any, weights: Mapping[str, Any]) -> Any:
    """The model to export as a Hugging Face folder, or its weights by the names that verl gives them there.

    `weights` has all weights of this rank. Weights are returned for a model of FSDP, which has no full tensors, and
    for one with adapters, which are exported beside the base weights.
    """
    if not is_fsdp1(model) and not has_adapters(model):
        return model
    weights = dict(weights)
    if not has_adapters(model):
        plain = plain_of(model)
        with torch.device("meta"):  # slices do not show which weights are one
            same = type(plain)(plain.config)
        import_module("verl.utils.transformers_compat").drop_tied_target_keys(weights, same, plain.config)
    return weights
