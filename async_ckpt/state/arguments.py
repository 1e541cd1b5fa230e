"""The arguments of somebody's function: the tensors anywhere in them, and a copy with others in their place.

In: any Python objects. Out: tensors, and equal objects that share nothing that changes. Knows nothing of: what for.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final

import torch

from ..errors import UnsupportedStateError
from .capture import why_not

_ATOMS: Final = (
    str, bytes, bytearray, int, float, complex, bool, type(None), type, types.ModuleType, types.FunctionType,
    types.BuiltinFunctionType, types.MethodType, PurePath, torch.dtype, torch.device, torch.Size, torch.Generator,
)  # fmt: skip


def tensors_in(arguments: Mapping[str, Any]) -> tuple[list[str], list[torch.Tensor]]:
    """Names and tensors: each tensor with dense memory of its own once, wherever it hangs. Others are left to `copied`."""
    names: list[str] = []
    tensors: list[torch.Tensor] = []
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = list(arguments.items())[::-1]
    while todo:
        name, value = todo.pop()
        if isinstance(value, _ATOMS) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.device.type in ("cpu", "cuda") and why_not(value) is None:
                names.append(name)
                tensors.append(value)
        else:
            todo += reversed([(f"{name}.{key}", inner) for key, inner in _parts(value)])
    return names, tensors


def _parts(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return [*value.items(), *(("key", key) for key in value if not isinstance(key, _ATOMS))]
    if isinstance(value, Sequence | set | frozenset):
        return list(enumerate(value))
    slots = [slot for kind in type(value).__mro__ for slot in _slots(kind) if hasattr(value, slot)]
    return [*getattr(value, "__dict__", {}).items(), *((slot, getattr(value, slot)) for slot in slots)]


def _slots(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    return [slots] if isinstance(slots, str) else [slot for slot in slots if not slot.startswith("__")]


def copied(value: Any, tensors: Sequence[torch.Tensor], instead: Sequence[torch.Tensor], *, what: str) -> Any:
    """A deep copy, in which each of `tensors` is the one `instead`.

    Raises UnsupportedStateError for what cannot be copied.
    """
    memo: dict[int, Any] = {id(old): new for old, new in zip(tensors, instead, strict=True)}
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        raise UnsupportedStateError(
            f"an argument of {what} cannot be copied ({error}); pass plain data, or what its state_dict() gives",
            path=what,
        ) from error
