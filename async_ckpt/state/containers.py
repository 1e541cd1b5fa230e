"""The containers that a state has only where several ranks save it, and dicts and lists made of flat names.

In: values, each with its rank or its path. Out: mappings, dicts and lists. Knows nothing of: files, tensors.

A path, as torch.distributed.checkpoint gives it, is text for the key of a dict, and a number for a place in a list. One
rank may have a few items of a list, and others the rest: each rank keeps its items as `ListItems`, which become a list once
they are complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from .names import Path, shown


class PerRank(Mapping[int, Any]):
    """What several ranks have saved under one name, where each had a value of its own: rank -> value.

        state = async_ckpt.load("runs/a")
        state["rng"][3]  # that of rank 3

    It cannot be changed. `async_ckpt.load(…, from_ranks={"rng": 3})` gives the value of rank 3 alone.
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
        told = ", ".join(f"{rank}: {value!r:.60}" for rank, value in self._values.items())
        return f"PerRank({{{told:.600}}})"


class ListItems(dict[int, Any]):
    """Some of the items of a list, by their places."""

    def as_list(self) -> Any:
        """The list, if no place of it is empty; else itself."""
        return [self[i] for i in range(len(self))] if self.keys() == set(range(len(self))) else self


def nested(entries: Iterable[tuple[Path, Any]], *, are_all: bool = True) -> dict[str, Any]:
    """Put values where their paths lead. With `are_all` there are no others anywhere, and `ListItems` become lists.

    Raises ValueError where one path leads through the value of another, or a number stands beside the key of a dict.
    """
    root: dict[Any, Any] = {}
    # Made here; a value may be a dict as well. The inner ones come last.
    made: dict[int, tuple[dict[Any, Any], dict[Any, Any], Any]] = {id(root): (root, {}, None)}
    for path, value in entries:
        inside = root
        for key, following in pairwise(path):
            if key not in inside and _fits(key, inside):
                new: dict[Any, Any] = ListItems() if isinstance(following, int) else {}
                inside[key] = new
                made[id(new)] = new, inside, key
            inside = inside.get(key, root)
            if id(inside) not in made or inside is root:
                raise _contradicted(path)
        if not path or path[-1] in inside or not _fits(path[-1], inside):
            raise _contradicted(path)
        inside[path[-1]] = value
    for container, outside, key in reversed(made.values()):
        if are_all and isinstance(container, ListItems):
            outside[key] = container.as_list()
    return root


def _fits(key: Any, container: dict[Any, Any]) -> bool:
    return isinstance(key, int) is isinstance(container, ListItems)


def _contradicted(path: Path) -> ValueError:
    return ValueError(f"{shown(path)!a:.300} contradicts another name beside it")
