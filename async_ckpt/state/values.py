"""The plain values of a state, by their names: what ranks that save one state should have alike.

In: skeletons. Out: names and values as text, which can be compared. Knows nothing of: tensors' bytes, ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Set
from typing import Final

from ..spec import Json
from .names import Path, dotted
from .tree import key_of

_OF_TENSORS: Final = frozenset({"tensor", "ndarray", "bytes"})


def leaves(skeleton: Json, objects: Callable[[int], str]) -> dict[str, str]:
    """All values by their dotted names, and what is neither a dict nor a value: how long lists are, where tensors hang.

    `objects` says what stands for the pickled object of a number. Two skeletons with the same leaves stand for states that
    differ in nothing but their tensors.
    """
    return {
        dotted(path): f"object {objects(found)}" if isinstance(found, int) else found
        for path, found in _leaves(skeleton, ())
    }


def is_within(name: str, groups: Set[str]) -> bool:
    """Whether a dotted name is one of these, or of something inside one of them. However many there are, it takes no longer."""
    end = len(name) if groups else -1
    while end >= 0 and name[:end] not in groups:
        end = name.rfind(".", 0, end)
    return end >= 0


def _leaves(node: Json, path: Path) -> Iterator[tuple[Path, str | int]]:
    """Of an object, its number."""
    kind = next(iter(node), None) if isinstance(node, dict) else None
    if kind is None:
        yield path, json.dumps(node)
        return
    value = node[kind]
    if kind in ("dict", "ordered"):
        yield from _entries(value, path, kind)
        if "metadata" in node:
            yield (*path, "_metadata"), json.dumps(node["metadata"], sort_keys=True)
    elif kind in ("list", "tuple"):
        yield from _items(value, path, kind)
    elif kind == "deque":
        yield from _items(value[0], path, f"deque of {value[1]}")
    elif kind == "namedtuple":
        yield from _items(value[2], path, f"namedtuple {value[0]}")
    elif kind == "dataclass":
        yield from _entries(value[1], path, f"dataclass {value[0]}")
    elif kind == "object":
        yield path, int(value)
    elif kind in _OF_TENSORS:  # but for their numbers, which depend on what else is in a state
        yield path, json.dumps([kind, *(value[1:] if kind == "ndarray" else ())])
    else:
        yield path, json.dumps(node, sort_keys=True)


def _entries(items: Json, path: Path, kind: str) -> Iterator[tuple[Path, str | int]]:
    if not items:
        yield path, kind
    for key, node in items:
        yield from _leaves(node, (*path, key_of(key)))


def _items(nodes: Json, path: Path, kind: str) -> Iterator[tuple[Path, str | int]]:
    yield path, f"{kind} of {len(nodes)}"
    for number, node in enumerate(nodes):
        yield from _leaves(node, (*path, number))
