"""The weights of a model under FSDP, FSDP2 or neither, as slices of whole tensors.

In: a model as verl makes it. Out: what an archive is made of, and what it fills. Knows nothing of: folders, saves.

FSDP2 and plain modules have tensors that are filled where they are. For FSDP there is `common.fsdp1_state`.
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
    """Whether this is the name of an adapter's weight, as verl tells it."""
    return any(part in name for part in _LORA)


def weights_of(model: Any, *, only_adapters: bool) -> dict[str, Any]:
    """The weights of this rank by name. Under FSDP every rank calls it. Raises ValueError without adapters."""
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
    """Give filled weights back to the model. Every rank calls it."""
    with as_slices(model):
        model.load_state_dict(weights, strict=not only_adapters)


def rank_number(rank: int, world_size: int) -> Any:
    """A rank's number as its element of a tensor: with it, all ranks save a state in which nothing else is spread."""
    number: Any = torch.tensor([rank])
    number.global_shape, number.global_offsets = (world_size,), [(rank,)]
    number.local_offsets, number.local_sizes = [(0,)], [(1,)]
    return number


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
        import_module("verl.utils.transformers_compat").drop_tied_target_keys(weights, same, plain.config)
    return weights
