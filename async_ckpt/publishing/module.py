"""Filling a module with the weights of a version: whether they fit, and then all of them or none.

In: a module, and the tensors of a version by name. Out: the module with their bytes.
Knows nothing of: where the tensors come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..around.hf_weights import weights_of
from ..errors import StateMismatchError, UnsupportedStateError
from ..slicing.sharded import is_sharded
from ..state.capture import why_not
from ..state.dtypes import dtype_name
from ..state.wrappers import plain_model, plain_state_dict
from .difference import checksum_of

_ADVICE = "pull into a folder, and load that"


def refuse_misfit(module: torch.nn.Module, given: Mapping[str, tuple[str, tuple[int, ...]]], source: str) -> None:
    """Check that the version and the module have the same tensors.

    Raises StateMismatchError, and UnsupportedStateError for a module that cannot be filled in place.
    """
    live = plain_state_dict(module)
    _refuse_unfillable(module, live)
    wanted = weights_of(module, {})
    if wanted.as_published(dict(wanted.tensors)).keys() != wanted.tensors.keys():
        raise StateMismatchError(
            f"{source}: {type(plain_model(module)).__qualname__} has other weights in memory than in its "
            f"checkpoints; {_ADVICE}"
        )
    storages = {_memory_key(live[name]) for name in given if name in live}
    missing = sorted(name for name in wanted.tensors.keys() - given.keys() if _memory_key(live[name]) not in storages)
    unexpected = sorted(given.keys() - live.keys())
    mismatched = sorted(
        name
        for name, kind in given.items()
        if name in live and (dtype_name(live[name].dtype), tuple(live[name].shape)) != kind
    )
    if missing or unexpected or mismatched:
        problems = [
            f"{problem}: {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
            for problem, names in (
                ("missing in the version", missing),
                ("unknown to the module", unexpected),
                ("of another dtype or shape", mismatched),
            )
            if names
        ]
        raise StateMismatchError(
            f"{source}: it does not fit the module ({'; '.join(problems)}); the module is as it was. Make the "
            "module of the same config and dtype, or pull into a folder",
            missing=tuple(missing),
            unexpected=tuple(unexpected),
            mismatched=tuple(mismatched),
        )


def fill(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], source: str) -> None:
    """Copy the new bytes to the module, tied tensors once. Raises as `refuse_misfit`, before anything is copied."""
    refuse_misfit(module, {n: (dtype_name(t.dtype), tuple(t.shape)) for n, t in tensors.items()}, source)
    live: Mapping[str, torch.Tensor] = plain_state_dict(module)
    for names in _tied(live, tensors):
        if len({checksum_of(tensors[name]) for name in names}) > 1:
            raise StateMismatchError(
                f"{source}: {' and '.join(names[:3])} are one tensor in the module, and have different values in "
                "the version; the module is as it was. Untie them, or publish a model in which they are tied",
                mismatched=tuple(names),
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            # A tensor made in inference mode can be changed only there.
            with torch.inference_mode(live[name].is_inference()):
                live[name].detach().copy_(tensor)


def _tied(live: Mapping[str, torch.Tensor], names: Mapping[str, object]) -> Iterator[list[str]]:
    """Groups of names that share one tensor of the module."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name in names:
        if live[name].numel():
            groups.setdefault(_memory_key(live[name]), []).append(name)
    return (group for group in groups.values() if len(group) > 1)


def _refuse_unfillable(module: torch.nn.Module, live: Mapping[str, Any]) -> None:
    own = {
        tensor.untyped_storage().data_ptr()
        for tensor in (*module.parameters(), *module.buffers())
        if _why_not(tensor) is None
    }
    for name, tensor in live.items():
        if not isinstance(tensor, torch.Tensor) and not is_sharded(tensor):
            continue  # `weights_of` refuses it
        why = _why_not(tensor)
        if why is None and tensor.numel() and tensor.untyped_storage().data_ptr() not in own:
            why = f"the module's state dict has a copy of it, as that of FSDP1 has; {_ADVICE}"
        if why is not None:
            raise UnsupportedStateError(f"{name!a}: {why}; the module is as it was", path=name)


def _why_not(tensor: Any) -> str | None:
    """The reason why a tensor of a module cannot be filled; None if it can."""
    if is_sharded(tensor):
        return f"it is spread over ranks, and only plain tensors are filled; {_ADVICE} into the model"
    return why_not(tensor) or (
        f"several of its elements share one place in memory; clone() it, or {_ADVICE}" if _overlaps(tensor) else None
    )


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements may share memory, judged by the strides alone."""
    extent = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and tensor.numel():
            if stride <= extent:
                return True
            extent += stride * (size - 1)
    return False


def _memory_key(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
