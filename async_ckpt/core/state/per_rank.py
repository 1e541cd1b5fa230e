"""Containers that a state has only if several ranks save it, and dicts and lists built from flat names.

In: values with their ranks or paths. Out: mappings, dicts and lists. Knows nothing of: files, tensors.

A path from torch.distributed.checkpoint has a string for the key of a dict, and a number for an index of a list. The
items of one list may be on several ranks. Each rank keeps its items as `ListItems`, which become a list once they are
complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from .names import Path, shown


class PerRank(Mapping[int, Any]):
    """The values that several ranks saved separately under one name: rank -> value.

        state = async_ckpt.load("runs/a")
        state["rng"][3]  # the value of rank 3

    The mapping is read-only. `async_ckpt.load(…, from_ranks={"rng": 3})` returns only the value of rank 3.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[int, Any]) -> None:
        self._values = MappingProxyType(dict(values))

    def __getitem__(self, rank: int) -> Any:
        return self._values[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        values = ", ".join(f"{rank}: {value!r:.60}" for rank, value in self._values.items())
        return f"PerRank({{{values:.600}}})"


class ListItems(dict[int, Any]):
    """Some of the items of a list, by index.

    `nested` creates it. It is stored for a rank that has only a part of the list.
    """


def nested(entries: Iterable[tuple[Path, Any]], *, are_all: bool = True) -> dict[str, Any]:
    """Put values at their paths. With `are_all`, no other rank has values, and `ListItems` become lists.

    Raises ValueError if a path leads through the value of another path, or if a container mixes numbers and strings.
    """
    root: dict[Any, Any] = {}
    # The containers made here, inner containers last; any other dict is a value.
    containers: dict[int, tuple[dict[Any, Any], dict[Any, Any], Any]] = {id(root): (root, {}, None)}
    for path, value in entries:
        inside = root
        for key, following in pairwise(path):
            if key not in inside and _fits(key, inside):
                new: dict[Any, Any] = ListItems() if isinstance(following, int) else {}
                inside[key] = new
                containers[id(new)] = new, inside, key
            inside = inside.get(key, root)
            if id(inside) not in containers or inside is root:
                raise _contradicted(path)
        if not path or path[-1] in inside or not _fits(path[-1], inside):
            raise _contradicted(path)
        inside[path[-1]] = value
    for container, outside, key in reversed(containers.values()):
        if are_all and isinstance(container, ListItems) and container.keys() == {*range(len(container))}:
            outside[key] = [container[place] for place in range(len(container))]
    return root


def _fits(key: Any, container: dict[Any, Any]) -> bool:
    return isinstance(key, int) is isinstance(container, ListItems)


def _contradicted(path: Path) -> ValueError:
    return ValueError(f"{shown(path)!a:.300} contradicts another name")
