"""Merges the skeletons that several ranks have of one state, and compares skeletons by their plain values.

In: a skeleton for each rank. Out: one skeleton with each tensor once, and the tensor's number on each rank; plain
values as text. Knows nothing of: files, tensors.

Dicts are merged key by key, since the stages of a pipeline have different keys. A value or tensor that is equal on all
ranks that have it is merged into one. Values that differ, or are per rank, are kept for each rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

from ..spec import Json
from .names import Path, dotted, is_within, shown
from .tree import IN_ORDER, KEYED, NodesByRank, joined, key_of, kind_of, notes_of_all, split

# Ranks with equal nodes, and the node.
_Variant: TypeAlias = tuple[tuple[int, ...], Json]
_NUMBERED: Final = frozenset({"tensor", "ndarray", "bytes"})
# The containers whose items get separate texts. Not "places", since each rank has other items of the list.
_SPLIT: Final = (KEYED | IN_ORDER) - {"places"}


class MergedSkeleton(NamedTuple):
    """The result of `merge`. Numbers of tensors and objects in `skeleton` are indices of the lists."""

    skeleton: Json
    tensors: list[Mapping[int, int]]
    """The number of each tensor on each rank that saved it."""
    objects: list[tuple[int, int]] | None
    """For each object, a rank and its number there; None if all ranks have the same numbers."""
    of_some: Mapping[Path, Collection[int]] = MappingProxyType({})
    """The paths of entries that only some ranks have in their dicts, each with these ranks."""
    chosen: Collection[str] = ()
    """The names in `from_ranks` that exist."""
    apart: Collection[Path] = ()
    """The paths of values that each rank has separately."""


class UnknownChoiceError(KeyError):
    """The caller has chosen the value of a rank that has no such value."""


class Choice(NamedTuple):
    """The rank whose value is used where each rank has its own: `rank`, unless `from_ranks` names another rank."""

    rank: int | None = None
    from_ranks: Mapping[str, int] = MappingProxyType({})

    def of(self, path: Path, ranks: Collection[int]) -> int | None:
        """The rank whose value is used; None for all ranks. Raises UnknownChoiceError if a chosen rank has no value."""
        name = dotted(path)
        for group, rank in self.from_ranks.items():
            if is_within(name, {group}):
                if rank not in ranks:
                    raise UnknownChoiceError(
                        f"from_ranks={dict(self.from_ranks)!r}: rank {rank} has saved no {shown(path)}; "
                        f"{_ranks(ranks)} have"
                    )
                return rank
        return self.rank if self.rank in ranks else None


_NO_CHOICE: Final = Choice()


def merge(
    skeletons: Mapping[int, Json],
    num_tensors: Mapping[int, int],
    *,
    per_rank: Collection[str] = (),
    choice: Choice = _NO_CHOICE,
    groups: Collection[str] | None = None,
) -> MergedSkeleton:
    """Merge skeletons, given by rank with the number of their tensors. `per_rank` are dotted names.

    With `groups`, only these top-level entries are merged. Raises UnknownChoiceError if the chosen rank has no such
    value, ValueError if the skeletons contradict each other, and any error for a malformed skeleton.
    """
    variants = _grouped(skeletons.items())
    if len(variants) == 1 and not per_rank and not choice.from_ranks:
        ((ranks, skeleton),) = variants
        num_alike = min(num_tensors[rank] for rank in ranks)
        return MergedSkeleton(skeleton, [dict.fromkeys(ranks, n) for n in range(num_alike)], None)
    walk = _MergeWalk(num_tensors, frozenset(per_rank), choice, groups)
    node = walk.merge(variants, ())
    return MergedSkeleton(node, walk.tensors, walk.objects, walk.of_some, walk.names, walk.apart)


class _MergeWalk:
    def __init__(
        self,
        num_tensors: Mapping[int, int],
        per_rank: frozenset[str],
        choice: Choice,
        groups: Collection[str] | None = None,
    ) -> None:
        self.tensors: list[Mapping[int, int]] = []
        self.objects: list[tuple[int, int]] = []
        self.of_some: dict[Path, Collection[int]] = {}
        self.apart: list[Path] = []
        self.names: set[str] = set()  # the names in `from_ranks` that exist
        self._num_tensors = num_tensors
        self._per_rank, self._choice, self._groups = per_rank, choice, groups
        self._looks_for_names = bool(per_rank or choice.from_ranks)
        self._number: dict[tuple[int, int], int] = {}  # merged number by rank and number on that rank

    def merge(self, variants: Sequence[_Variant], path: Path) -> Json:
        if self._looks_for_names and path:
            name = dotted(path)
            self.names |= {name} & self._choice.from_ranks.keys()
            if name in self._per_rank:
                return self._kept_apart(variants, path)
        kinds = {kind_of(node) for _, node in variants}
        if len(kinds) > 1:
            return self._kept_apart(variants, path)
        (kind,) = kinds
        if kind == "wrapped" and any(is_within(one, {dotted(path)}) for one in self._per_rank):
            return self._kept_apart(variants, path)  # the inner tensors of a sparse tensor belong together
        if kind in KEYED or kind in IN_ORDER:
            return self._container(kind, variants, path)
        if kind in _NUMBERED or kind == "object":
            return self._leaf(kind, variants, path)
        return variants[0][1] if len(variants) == 1 else self._kept_apart(variants, path)

    def _container(self, kind: str, variants: Sequence[_Variant], path: Path) -> Json:
        of_each = [(ranks, *split(kind, node[kind])) for ranks, node in variants]
        texts = {json.dumps(facts) for _, facts, _ in of_each}
        if len(texts) > 1 or (kind in IN_ORDER and len({len(inside) for _, _, inside in of_each}) > 1):
            return self._kept_apart(variants, path)
        facts = of_each[0][1]
        if kind in IN_ORDER:
            nodes = [
                self.merge(_grouped((ranks, inside[i]) for ranks, _, inside in of_each), (*path, i))
                for i in range(len(of_each[0][2]))
            ]
            return {kind: joined(kind, facts, nodes)}
        items = joined(kind, facts, self._items([(ranks, inside) for ranks, _, inside in of_each], path))
        metadata = [(ranks, node["metadata"]) for ranks, node in variants if "metadata" in node]
        # The metadata are version numbers of all modules, some of which exist only on some ranks.
        more = {"metadata": self._metadata(metadata)} if metadata else {}
        return {kind: items, **more, **notes_of_all([node for _, node in variants])}

    def _items(self, variants: Sequence[tuple[tuple[int, ...], Json]], path: Path) -> list[Json]:
        entries: dict[tuple[bool, str], tuple[Json, list[_Variant]]] = {}
        for ranks, items in variants:
            for raw, node in items:
                if self._groups is not None and not path and raw not in self._groups:
                    continue
                key = (True, raw) if isinstance(raw, str) else (False, json.dumps(raw))
                entries.setdefault(key, (raw, []))[1].append((ranks, node))
        num_ranks = sum(len(ranks) for ranks, _ in variants)
        merged = []
        for raw, inside in entries.values():
            inner = (*path, key_of(raw))
            owners = [rank for ranks, _ in inside for rank in ranks]
            if len(owners) < num_ranks:
                self.of_some[inner] = owners
            merged.append([raw, self.merge(_grouped(inside), inner)])
        return merged

    def _metadata(self, variants: Sequence[_Variant]) -> Json:
        items: dict[str, Json] = {}
        for _, node in variants:
            for raw, value in node["dict"]:
                items.setdefault(json.dumps(raw), [raw, value])
        return {"dict": list(items.values())}

    def _leaf(self, kind: str, variants: Sequence[_Variant], path: Path) -> Json:
        values = [(ranks, *(node[kind] if kind == "ndarray" else [node[kind]])) for ranks, node in variants]
        if len({json.dumps(facts) for _, _, *facts in values}) > 1:
            return self._kept_apart(variants, path)
        ranks, first, *facts = values[0]
        if kind == "object":
            self.objects.append((ranks[0], first))
            return {kind: len(self.objects) - 1}
        number = self.number_of({rank: number for ranks, number, *_ in values for rank in ranks})
        return {kind: [number, *facts] if kind == "ndarray" else number}

    def number_of(self, numbers: Mapping[int, int]) -> int:
        """The merged number of the tensor with these numbers by rank. Raises ValueError if ranks disagree."""
        for rank, number in numbers.items():
            if type(number) is not int or not 0 <= number < self._num_tensors[rank]:
                raise ValueError(f"{number!r:.50} is not the number of a tensor of rank {rank}")
        known = {self._number.get(pair) for pair in numbers.items()}
        if known == {None}:
            self.tensors.append(numbers)
            self._number.update(dict.fromkeys(numbers.items(), len(self.tensors) - 1))
            return len(self.tensors) - 1
        number_before = known.pop()
        if known or number_before is None or self.tensors[number_before] != numbers:
            raise ValueError("a tensor has two paths in the state on some ranks, but only one on others")
        return number_before

    def _kept_apart(self, variants: Sequence[_Variant], path: Path) -> Json:
        by_rank = {rank: node for ranks, node in variants for rank in ranks}
        self.apart.append(path)
        chosen = self._choice.of(path, by_rank)
        if chosen is not None:
            return self._own(chosen, by_rank[chosen], path)
        return NodesByRank({rank: self._own(rank, by_rank[rank], path) for rank in sorted(by_rank)})

    def _own(self, rank: int, node: Json, path: Path) -> Json:
        """The node of one rank, with the merged numbers of its tensors."""
        walk = _MergeWalk(self._num_tensors, frozenset(), _NO_CHOICE)
        walk.tensors, walk.objects, walk._number = self.tensors, self.objects, self._number
        return walk.merge([((rank,), node)], path)


def _grouped(nodes: Iterable[tuple[Any, Json]]) -> list[_Variant]:
    """Groups ranks with equal nodes. The texts of nodes are compared, since 1, 1.0 and True are equal in Python."""
    listed = [((ranks,) if isinstance(ranks, int) else ranks, node) for ranks, node in nodes]
    if len(listed) == 1:
        return listed
    by_text: dict[str, _Variant] = {}
    for ranks, node in listed:
        text = json.dumps(node)
        by_text[text] = (by_text[text][0] + ranks if text in by_text else ranks, node)
    return list(by_text.values())


def _ranks(ranks: Collection[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


# --- plain values ---------------------------------------------------------------------------------------------------


def plain_leaves(skeleton: Json, objects: Callable[[int], str]) -> dict[str, str]:
    """The values of a skeleton as texts by dotted name, with the lengths of lists and the positions of tensors.

    `objects` returns the text for the pickled object with this number. If two skeletons have the same leaves, their
    states differ only in the values of tensors.
    """
    return {
        dotted(path): f"object {objects(leaf)}" if isinstance(leaf, int) else leaf
        for path, leaf in _leaf_texts(skeleton, ())
    }


def _leaf_texts(node: Json, path: Path) -> Iterator[tuple[Path, str | int]]:
    """The text of each leaf, or the number of a pickled object."""
    kind = kind_of(node)
    if kind in _SPLIT:
        facts, inside = split(kind, node[kind])
        if kind in IN_ORDER or kind == "wrapped" or not inside:
            yield path, json.dumps([kind, *facts, len(inside)])
        items = enumerate(inside) if kind in IN_ORDER else ((key_of(raw), inner) for raw, inner in inside)
        for key, inner in items:
            yield from _leaf_texts(inner, (*path, key))
        if "metadata" in node:
            yield (*path, "_metadata"), json.dumps(node["metadata"], sort_keys=True)
    elif kind == "object":
        yield path, int(node[kind])
    elif kind in _NUMBERED:  # without the number, which depends on the rest of the state
        yield path, json.dumps([kind, *(node[kind][1:] if kind == "ndarray" else ())])
    else:
        yield path, json.dumps(node, sort_keys=True)
