"""Megatron's objects in a state: a tensor brings along the name that it has on all ranks, wherever in the state it lies.

In: leaves of a state. Out: the tensors among them, each under its name; and skeletons with these. Knows nothing of: other ranks.

On a stage of a pipeline, `model.layers.0.weight` is another layer than on the first, or a row of the tensor of all layers. So
such a tensor is an entry of the group that it lies in, called by its key; slices of one key are one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ..errors import UnsupportedStateError
from ..slicing.sharded import Slicer, is_of_megatron, joined
from ..slicing.slices import Slices
from ..spec import Json, with_article
from .names import Path, shown
from .tree import key_of


class KeyedTensor(NamedTuple):
    """What is here of one tensor, under its name."""

    path: Path
    slices: Slices
    parts: tuple[torch.Tensor, ...]
    dtype: torch.dtype


class KeyedTensors:
    """Those of one state, as they are met."""

    def __init__(self, slicer: Slicer | None) -> None:
        self._slicer = slicer
        self._found: dict[Path, dict[Path, Any]] = {}  # by name, and then by where it lies

    def take(self, value: Any, path: Path) -> bool:
        """Whether it is one. Raises UnsupportedStateError for Megatron's objects that are no tensors yet, or none at all."""
        if is_of_megatron(value):
            if not path or not isinstance(value.key, str):
                raise _refused(path, f"a ShardedTensor called {value.key!r:.100} must be an entry of a dict")
            if self._slicer is None:
                raise _refused(
                    path,
                    "a ShardedTensor is spread over ranks, each of which has a part of it; save it on every rank with an "
                    "AsyncCheckpointer, in a process group",
                )
            self._found.setdefault(name_of(value, path), {})[path] = value
            return True
        refuse_others(value, path)
        return False

    def tensors(self) -> Iterator[KeyedTensor]:
        """Each once. Raises UnsupportedStateError, naming where it lies, for slices that contradict each other."""
        assert self._slicer is not None or not self._found
        for name, values in self._found.items():
            sliced = [self._slicer.slice(one, name=shown(at)) for at, one in values.items() if self._slicer]
            dtypes = {one.data.dtype for one in values.values()}
            if len(dtypes) > 1:
                raise _refused(name, f"its slices are {', '.join(sorted(map(str, dtypes)))}")
            slices, parts = joined(sliced, name=shown(name))
            yield KeyedTensor(name, slices, parts, dtypes.pop())


def refuse_others(value: Any, path: Path) -> None:
    """Raises UnsupportedStateError for Megatron's objects that are no tensors yet, or none at all."""
    if why := _why_not(value):
        raise _refused(path, f"{with_article(type(value).__name__)} {why}")


def name_of(value: Any, path: Path) -> Path:
    """Where in the saved state Megatron's tensor is, which lies there in the live one."""
    return (*path[:-1][:1], value.key)


def keys_below(value: Any, *, deep: bool) -> set[str]:
    """The keys of Megatron's tensors in a dict, and with `deep` in dicts below it."""
    found: set[str] = set()
    for item in value.values():
        if is_of_megatron(item):
            found.add(item.key)
        elif deep and isinstance(item, Mapping):
            found |= keys_below(item, deep=True)
    return found


def with_keyed(node: Json, numbers: Mapping[Path, int]) -> Json:
    """A skeleton, and in it these tensors by their names. Raises UnsupportedStateError where there is something else already."""
    for name, number in numbers.items():
        items = _items_of(node, name)
        for key in name[:-1]:
            inner = next((item for raw, item in items if key_of(raw) == key), None)
            if inner is None:
                inner = {"dict": []}
                items.append([key, inner])
            items = _items_of(inner, name)
        if any(key_of(raw) == name[-1] for raw, _ in items):
            raise _refused(
                name, "there is another entry where a ShardedTensor of this key belongs; rename it"
            )
        items.append([name[-1], {"tensor": number}])
    return node


def _items_of(node: Json, name: Path) -> Any:
    items = node.get("dict", node.get("ordered")) if isinstance(node, dict) else None
    if items is None:
        raise _refused(
            name, "a ShardedTensor must lie in a dict of the state, or in dicts in it; it is in no dict"
        )
    return items


def _why_not(value: Any) -> str | None:
    """Why one of Megatron's other objects cannot be stored, and what to do; None for what is none."""
    if all(hasattr(value, name) for name in ("key", "data", "build_fn", "merge_fn", "replica_id")):
        return "makes ShardedTensors, and is none; replace it by its build(), as apply_factories() does for a whole state"
    if all(hasattr(value, name) for name in ("key", "data", "global_shape", "global_offset", "replica_id")):
        return "holds any kind of object; save its data instead, with its group in per_rank= if each rank has its own"
    if type(value).__name__ == "LocalNonpersistentObject":
        return "is not to be saved; leave it out of the state"
    return None


def _refused(path: Path, why: str) -> UnsupportedStateError:
    return UnsupportedStateError(f"{shown(path)}: {why}; nothing was written", path=shown(path))
