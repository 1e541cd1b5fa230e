"""Live objects that one restore fills, each once: one that is at two places of the state has one value.

In: live objects, and what is to fill them. Out: a refusal where that differs. Knows nothing of: how they are filled.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from ...state.names import Path, shown
from ...state.tree import InnerTensors, SavedRecord, StoredLeaf
from ..archives.contents import Contents
from .containers import are_same_objects


class FilledObjects:
    """The objects of one walk, which `Match` creates. `objects` are the unpickled ones of the archive."""

    def __init__(self, archive: Contents, objects: Sequence[Any]) -> None:
        self._archive, self._objects = archive, objects
        self._seen: dict[int, tuple[Any, Any, Path]] = {}  # by id; keeps the objects, so that no id is used twice

    def why_not(self, live: Any, saved: Any, path: Path) -> str | None:
        """The reason why an object cannot be filled at this place; None if nothing else fills it."""
        _, before, first = self._seen.setdefault(id(live), (live, saved, path))
        if first == path or self._are_alike(before, saved):
            return None
        return f"is the same object as {shown(first)} here, and has another value in the checkpoint"

    def _are_alike(self, one: Any, other: Any) -> bool:
        """True if two saved values are the same."""
        if isinstance(one, StoredLeaf) and isinstance(other, StoredLeaf):
            return self._are_leaves_alike(one, other)
        if type(one) is not type(other):
            return False
        if isinstance(one, SavedRecord):
            return self._are_alike(one.fields, other.fields)
        if isinstance(one, InnerTensors) and one.facts != other.facts:
            return False
        if isinstance(one, dict):
            return list(one) == list(other) and all(self._are_alike(one[key], other[key]) for key in one)
        if isinstance(one, list | tuple | deque):
            return len(one) == len(other) and all(map(self._are_alike, one, other))
        return bool(one == other or (isinstance(one, float) and math.isnan(one) and math.isnan(other)))

    def _are_leaves_alike(self, one: StoredLeaf, other: StoredLeaf) -> bool:
        if (one.kind, one.descr, one.shape) != (other.kind, other.descr, other.shape):
            return False
        if one.kind == "object":
            return are_same_objects(self._objects[one.number], self._objects[other.number])
        first, second = self._archive.primary(one.number), self._archive.primary(other.number)
        if first == second:
            return True
        return one.kind != "tensor" and self._archive.content(first) == self._archive.content(second)
