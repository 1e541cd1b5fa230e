"""Megatron's ShardedTensors in a state, each of which carries its global name, independent of its path in the state.

In: leaves of a state. Out: the ShardedTensors among them by name, and skeletons with these tensors.
Knows nothing of: other ranks.

On a later stage of a pipeline, `model.layers.0.weight` is another layer than on the first stage, or a row of the tensor
of all layers. So a ShardedTensor becomes an entry of its group under its key, and slices of one key are one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..slicing.sharded import Slicer, declares_fields, is_of_megatron, joined, refused
from ..slicing.slices import Slices
from ..spec import Json, with_article
from .names import Path, shown
from .tree import key_of


class MegatronTensors:
    """Collects the ShardedTensors of one state during a capture."""

    def __init__(self, slicer: Slicer | None) -> None:
        self._slicer = slicer
        self._tensors: dict[Path, dict[Path, Any]] = {}  # by name, then by path in the live state

    def take(self, value: Any, path: Path) -> bool:
        """True if the value is a ShardedTensor, which is then collected.

        Raises UnsupportedStateError for Megatron's objects that are not tensors.
        """
        if is_of_megatron(value):
            if not path or not isinstance(value.key, str):
                raise refused(shown(path), f"a ShardedTensor called {value.key!r:.100} must be an entry of a dict")
            if self._slicer is None:
                raise refused(
                    shown(path),
                    "each rank has only a part of a ShardedTensor; save it on every rank with an AsyncCheckpointer, "
                    "in a process group",
                )
            self._tensors.setdefault(name_of(value, path), {})[path] = value
            return True
        refuse_others(value, path)
        return False

    def tensors(self) -> Iterator[tuple[Path, Slices, tuple[torch.Tensor, ...], torch.dtype]]:
        """Each tensor once: its path, its slices on this rank, the memory of the slices, and its dtype.

        Raises UnsupportedStateError, naming the path, for slices that contradict each other.
        """
        assert self._slicer is not None or not self._tensors
        for name, values in self._tensors.items():
            sliced = [self._slicer.slice(value, name=shown(at)) for at, value in values.items() if self._slicer]
            dtypes = {value.data.dtype for value in values.values()}
            if len(dtypes) > 1:
                raise refused(shown(name), f"its slices have different dtypes: {', '.join(sorted(map(str, dtypes)))}")
            slices, parts = joined(sliced, name=shown(name))
            yield name, slices, parts, dtypes.pop()


def refuse_others(value: Any, path: Path) -> None:
    """Raise UnsupportedStateError for Megatron's objects that are not tensors."""
    if why := _why_not(value):
        raise refused(shown(path), f"{with_article(type(value).__name__)} {why}")


def name_of(value: Any, path: Path) -> Path:
    """The path in the saved state of a ShardedTensor at `path` in the live state."""
    return (*path[:-1][:1], value.key)


def keys_below(value: Any, *, deep: bool) -> set[str]:
    """The keys of the ShardedTensors in a dict; with `deep`, also in nested dicts."""
    keys: set[str] = set()
    for item in value.values():
        if is_of_megatron(item):
            keys.add(item.key)
        elif deep and isinstance(item, Mapping):
            keys |= keys_below(item, deep=True)
    return keys


def with_megatron(node: Json, numbers: Mapping[Path, int]) -> Json:
    """A skeleton with these tensors added by name. Raises UnsupportedStateError if a name is already used."""
    for name, number in numbers.items():
        items = _items_of(node, name)
        for key in name[:-1]:
            inner = next((item for raw, item in items if key_of(raw) == key), None)
            if inner is None:
                inner = {"dict": []}
                items.append([key, inner])
            items = _items_of(inner, name)
        if any(key_of(raw) == name[-1] for raw, _ in items):
            raise refused(shown(name), "another entry has the name of this ShardedTensor; rename the entry")
        items.append([name[-1], {"tensor": number}])
    return node


def _items_of(node: Json, name: Path) -> Any:
    items = node.get("dict", node.get("ordered")) if isinstance(node, dict) else None
    if items is None:
        raise refused(
            shown(name), "a ShardedTensor must be in a dict of the state, or in nested dicts; put it into one"
        )
    return items


def _why_not(value: Any) -> str | None:
    """The reason why one of Megatron's other objects cannot be stored, and a remedy; None for any other value."""
    if declares_fields(value, {"key", "data", "build_fn", "merge_fn", "replica_id"}):
        return "makes ShardedTensors, but is not one; replace it by its build(), as apply_factories() does for a state"
    if declares_fields(value, {"key", "data", "global_shape", "global_offset", "replica_id"}):
        return "holds any kind of object; save its data instead, with its group in per_rank= if each rank has its own"
    if type(value).__name__ == "LocalNonpersistentObject":
        return "is not to be saved; leave it out of the state"
    return None
