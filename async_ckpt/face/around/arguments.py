"""The arguments of a wrapped function: the tensors anywhere in them, and a deep copy with other tensors.

In: any Python objects. Out: tensors, and equal objects that share nothing mutable. Knows nothing of: how they are used.

Tensors are searched where `copy.deepcopy` will meet them, by the same rules: its own for known types, else
`__reduce_ex__`. A tensor that the search misses is copied with the rest, only later and more slowly.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import sys
import types
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePath
from typing import Any, Final

import torch

from ...core.backends import has_plain_bytes
from ...core.garbage import no_collection
from ...core.state.capture import is_cut_short, why_not
from ...core.state.captured import SnapshotView, tree_of
from ...errors import UnsupportedStateError

_ATOMS: Final = (
    str, bytes, bytearray, int, float, complex, bool, type(None), type, types.ModuleType, types.FunctionType,
    types.BuiltinFunctionType, PurePath, torch.dtype, torch.device, torch.Size, torch.Generator,
)  # fmt: skip


@no_collection()
def tensors_in(arguments: Mapping[str, Any]) -> tuple[list[str], list[torch.Tensor], list[SnapshotView]]:
    """The names of all plain dense tensors, the tensors themselves (each once), and the snapshots.

    `deep_copied` handles tensors of other kinds. Raises UnsupportedStateError for tensors whose memory was freed.
    """
    names: list[str] = []
    tensors: list[torch.Tensor] = []
    held: list[SnapshotView] = []
    seen: dict[int, Any] = {}  # by id; keeps objects made by the search alive, so that no id is used twice
    todo: list[tuple[str, Any]] = list(arguments.items())[::-1]
    while todo:
        name, value = todo.pop()
        if isinstance(value, _ATOMS) or id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, SnapshotView):
            held.append(value)
            continue
        if isinstance(value, torch.Tensor):
            if is_cut_short(value):  # its deep copy would have any bytes at its end
                raise UnsupportedStateError(f"{name}: {why_not(value)}; nothing was written", path=name)
            if not _is_ordinary(value):
                continue
            names.append(name)
            tensors.append(value)
        parts = [(key, inner) for key, inner in _parts(value) if not isinstance(inner, _ATOMS)]
        todo += [(f"{name}.{key}", inner) for key, inner in reversed(parts)]
    return names, tensors, held


def closure_of(function: Any) -> dict[str, Any]:
    """The variables in a function's closure; globals of its module are not included."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    variables = {}
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        try:
            variables[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            pass
    return variables


@no_collection()
def deep_copied(
    value: Any,
    tensors: Sequence[torch.Tensor],
    replacements: Sequence[torch.Tensor],
    held: Sequence[SnapshotView] = (),
    *,
    function_name: str,
) -> Any:
    """A deep copy with `replacements` in place of `tensors`, and plain states in place of snapshots.

    Each replacement gets the attributes and the gradient of its tensor. Raises UnsupportedStateError for values that
    cannot be copied.
    """
    memo: dict[int, Any] = {id(module): module for module in list(sys.modules.values())}
    memo.update((id(old), new) for old, new in zip(tensors, replacements, strict=True))
    memo.update((id(part), tree_of(part)) for part in held)
    try:
        for old, new in zip(tensors, replacements, strict=True):
            if attributes := vars(old):
                vars(new).update(copy.deepcopy(attributes, memo))
            if (grad := _grad(old)) is not None:
                new.grad = copy.deepcopy(grad, memo).to(new.device)
        return deep_copy(value, memo)
    except Exception as error:
        raise UnsupportedStateError(
            f"{function_name} cannot be called in the background: an argument, or the object that it is a method "
            f"of, cannot be copied ({error}); pass plain data, or what its state_dict() gives",
            path=function_name,
        ) from error


def deep_copy(value: Any, memo: dict[int, Any]) -> Any:
    """`copy.deepcopy` that also copies dicts whose attribute access looks up entries (`__deepcopy__`, too)."""
    try:
        return copy.deepcopy(value, dict(memo))
    except Exception:
        found = _attribute_dicts(value)
        if not found:
            raise
    memo.update((id(part), type(part).__new__(type(part))) for part in found)
    for part in found:
        new, kind = memo[id(part)], OrderedDict if isinstance(part, OrderedDict) else dict
        for key, item in kind.items(part):
            kind.__setitem__(new, copy.deepcopy(key, memo), copy.deepcopy(item, memo))
        if part.__dict__ is not part:
            vars(new).update(copy.deepcopy(part.__dict__, memo))
    return copy.deepcopy(value, memo)


def _attribute_dicts(value: Any) -> list[dict[Any, Any]]:
    """The dicts in a value, at any depth, whose `__deepcopy__` is one of their entries, or raises when looked up."""
    found: list[dict[Any, Any]] = []
    seen: dict[int, Any] = {}
    todo = [value]
    while todo:
        part = todo.pop()
        if isinstance(part, _ATOMS) or id(part) in seen:
            continue
        seen[id(part)] = part
        if isinstance(part, dict) and hasattr(type(part), "__getattr__") and not hasattr(type(part), "__deepcopy__"):
            method: Any = part
            with suppress(Exception):
                method = getattr(part, "__deepcopy__", None)
            if method is not None:
                found.append(part)
        todo += [inner for _, inner in _parts(part)]
    return found


def _is_ordinary(tensor: torch.Tensor) -> bool:
    """True if a tensor consists only of memory and attributes, so that it can be rebuilt around other memory."""
    kind = type(tensor)
    if kind not in (torch.Tensor, torch.nn.Parameter) and (
        kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        or kind.__deepcopy__ not in (torch.Tensor.__deepcopy__, torch.nn.Parameter.__deepcopy__)
    ):
        return False
    return has_plain_bytes(tensor) and why_not(tensor) is None


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    """The parts that a deep copy of a value visits, each with a name."""
    kind = type(value)
    if kind is dict:
        return [*value.items(), *(("key", key) for key in value)]
    if kind in (list, tuple, set, frozenset):
        return enumerate(value)
    if kind is types.MethodType:
        return [("self", value.__self__)]
    if isinstance(value, torch.Tensor):
        return [*vars(value).items(), ("grad", _grad(value))]
    if hasattr(kind, "__deepcopy__"):
        return getattr(value, "__dict__", {}).items()
    try:
        reduce: Any = copyreg.dispatch_table.get(kind)
        reduced = reduce(value) if reduce else value.__reduce_ex__(4)
    except Exception:  # `deep_copied` will raise it
        return ()
    if isinstance(reduced, str):  # the name of a global
        return ()
    _, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    states = state if isinstance(state, tuple) and len(state) == 2 else (state,)  # with slots, there are two
    named = [pair for part in states for pair in (part.items() if isinstance(part, dict) else [("state", part)])]
    return [*enumerate(arguments), *named, *enumerate(items or ()), *_parts(dict(pairs or ()))]


def _grad(tensor: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a leaf tensor; reading it from other tensors makes torch warn."""
    return tensor.grad if tensor.is_leaf else None
