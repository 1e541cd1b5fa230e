"""Nested containers out of the flat names that torch.distributed.checkpoint gives to what is in them.

In: values, each with its path. Out: dicts and lists. Knows nothing of: files, tensors.

A path is text for the key of a dict, and a number for a place in a list. One rank of several may have a few items of a
list, and others the rest: it keeps them as `Places`, which become a list where all of them have come together.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from .names import Path, shown


class Places(dict[int, Any]):
    """Some of the items of a list, by their places."""

    def as_list(self) -> Any:
        """The list, if no place of it is empty; else itself."""
        return [self[i] for i in range(len(self))] if self.keys() == set(range(len(self))) else self


def nested(entries: Iterable[tuple[Path, Any]], *, are_all: bool = True) -> dict[str, Any]:
    """Put values where their paths lead. With `are_all` there are no others anywhere, and `Places` become lists.

    Raises ValueError where one path leads through the value of another, or a number stands beside the key of a dict.
    """
    root: dict[Any, Any] = {}
    # Made here; a value may be a dict as well. The inner ones come last.
    made: dict[int, tuple[dict[Any, Any], dict[Any, Any], Any]] = {id(root): (root, {}, None)}
    for path, value in entries:
        inside = root
        for key, following in pairwise(path):
            if key not in inside and _fits(key, inside):
                new: dict[Any, Any] = Places() if isinstance(following, int) else {}
                inside[key] = new
                made[id(new)] = new, inside, key
            inside = inside.get(key, root)
            if id(inside) not in made or inside is root:
                raise _contradicted(path)
        if not path or path[-1] in inside or not _fits(path[-1], inside):
            raise _contradicted(path)
        inside[path[-1]] = value
    for container, outside, key in reversed(made.values()):
        if are_all and isinstance(container, Places):
            outside[key] = container.as_list()
    return root


def _fits(key: Any, container: dict[Any, Any]) -> bool:
    return isinstance(key, int) is isinstance(container, Places)


def _contradicted(path: Path) -> ValueError:
    return ValueError(f"{shown(path)!a:.300} contradicts another name beside it")
