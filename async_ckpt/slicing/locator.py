"""Which ranks have written some part of a tensor, by arithmetic: a reader need not look into the archives of all.

In: how the states of the ranks look, and by which table they shared what they hold alike. Out: ranks. Knows nothing of: files.

What comes out is advice. Where a tensor lies is what the index of an archive says; a rank that is named here and has written
nothing of it costs a look, and where all that are named do not have everything, others are looked into.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import product
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

from ..spec import DTYPES
from .cover import Box, cover
from .shares import Holding, ReplicatedBytes, by_everybody, replicated_bytes, sharers
from .slices import Cut, Ints, Mesh, Replicas, Slices

# Ranks, ascending, by the digest of the structure that their states have.
Classes: TypeAlias = Mapping[str, Sequence[int]]
_NOTHING: Final[Mapping[Any, Any]] = MappingProxyType({})


class StepLayout(NamedTuple):
    """What the ranks of a step have saved.

    `structures` are the texts of `state.ranked.Structure`, by digest. Ranks of a structure in `shared` have each written a
    share of what all the ranks hold alike that are named there; all others, all that they hold. `root` is the mesh of which
    those of all tensors are parts. What ranks in `apart` have written is no such share: it is given, by rank and name.
    """

    classes: Classes
    structures: Mapping[str, str]
    shared: Classes = _NOTHING
    root: Mesh | None = None
    apart: Mapping[int, Mapping[str, Sequence[Box]]] = _NOTHING


class _StructureLine(NamedTuple):
    """A line of a structure; `spread` is JSON."""

    item_bytes: int
    shape: Ints
    spread: str

    @property
    def is_plain(self) -> bool:
        return self.spread == "null"

    @property
    def is_cut(self) -> bool:
        return self.spread.startswith("[")


def name_of(path: Iterable[Any]) -> str:
    """What a tensor is called in a structure."""
    return "\x1f".join(map(str, path))


class ShardLocator:
    """Says who has written what, for one layout. `aliases` are the names of tensors that are tied to others, for one that does not
    tell of any itself.
    """

    def __init__(self, layout: StepLayout, aliases: Collection[str] = ()) -> None:
        self._layout = layout
        self._structure_of = {rank: digest for digest, ranks in layout.classes.items() for rank in ranks}
        self._tensors, self._tied = dict[str, dict[str, _StructureLine]](), dict[str, dict[str, str]]()
        for digest in layout.classes:
            self._tensors[digest], self._tied[digest] = _parsed(layout.structures[digest])
        self._aliases = frozenset() if any(self._tied.values()) else frozenset(aliases)
        # Tensors that are spread alike, and the structures that have them.
        self._alike: dict[str, dict[_StructureLine, tuple[str, ...]]] = {}
        for digest, tensors in self._tensors.items():
            for name, told in tensors.items():
                alike = self._alike.setdefault(name, {})
                alike[told] = (*alike.get(told, ()), digest)
        self._mates = {digest: frozenset(mates) for digest, mates in layout.shared.items()}
        # Most tensors have the same meshes, cuts and shapes.
        self._meshes, self._place = cache(self._meshes_of), cache(self._place_of)
        self._at, self._touched = cache(_slices_at), cache(self._coordinates)
        self._lines = cache(self._lines_at)

    def representatives(self, preferred: float = 0.0) -> set[int]:
        """A rank for each set of tensors that ranks have; of those that have the same, the one as far into them as said, from 0
        to less than 1.
        """
        found: dict[frozenset[Any], list[int]] = {}
        for digest, ranks in self._layout.classes.items():
            tensors = self._tensors[digest].items()
            look = frozenset((name, told.shape, told.is_cut) for name, told in tensors)
            found.setdefault(look, []).extend(ranks)
        return {sorted(ranks)[int(preferred * len(ranks))] for ranks in found.values()}

    def having(
        self, wanted: Mapping[str, Sequence[Box]], preferred: Collection[int] = ()
    ) -> tuple[set[int], bool]:
        """Ranks whose archives have all of these boxes, and whether that follows for all of them.

        Of ranks that have the same, one that is `preferred`, else the lowest.
        """
        ranks: set[int] = set()
        is_all = True
        for name, boxes in wanted.items():
            found = self._candidates(name, boxes, preferred)
            found.sort(key=lambda one: (one[0] not in preferred, one[0]))
            for box in boxes:
                there = [(rank, common) for rank, held in found if (common := held.common(box))]
                moved = [Box(_minus(common.offsets, box.offsets), common.sizes) for _, common in there]
                taken, missing = cover(box.sizes, moved)
                ranks |= {there[number][0] for number, _ in taken}
                is_all = is_all and not missing
        return ranks, is_all

    def boxes_of(self, rank: int) -> dict[str, set[Box]]:
        """What a rank has written of each tensor."""
        found: dict[str, set[Box]] = {}
        for name, told in self._tensors[self._structure_of[rank]].items():
            if not self._is_tied(name, rank):
                candidates = self._candidates(name, [Box.whole(told.shape)], {rank})
                found[name] = {box for other, box in candidates if other == rank and box.num_elements}
        return found

    # --- who may have something of a tensor -----------------------------------------------------------------

    def _candidates(
        self, name: str, boxes: Sequence[Box], preferred: Collection[int]
    ) -> list[tuple[int, Box]]:
        """Ranks with what they have written of a tensor, as far as it touches one of these boxes. Of those that have all of the
        same, the lowest and what is preferred.
        """
        found: list[tuple[int, Box]] = []
        for rank, tensors_of in self._layout.apart.items():
            found += [(rank, box) for box in tensors_of.get(name, ())]
        for told, digests in self._alike.get(name, {}).items():
            if told.is_cut:
                found += self._of_cut(name, told, digests, tuple(boxes), preferred)
                continue
            for digest in digests:
                ranks = self._layout.classes[digest]
                if told.is_plain:
                    found += self._of_set(name, ranks, Slices.plain(told.shape), preferred)
                else:
                    held = json.loads(told.spread)["held"]
                    found += [(rank, Box(tuple(at), tuple(sizes))) for rank in ranks for at, sizes in held]
        return found

    def _of_cut(
        self,
        name: str,
        told: _StructureLine,
        digests: tuple[str, ...],
        boxes: tuple[Box, ...],
        preferred: Collection[int],
    ) -> Iterator[tuple[int, Box]]:
        for mesh in self._meshes(told.spread, digests):
            cuts = _cuts(told.spread)
            free = [dim for dim in range(len(mesh.shape)) if dim not in {cut.mesh_dim for cut in cuts}]
            for coordinate in self._touched(told.shape, cuts, mesh.shape, boxes):
                ranks = mesh.along(free, coordinate).all_ranks() if free else [mesh.rank_at(coordinate)]
                slices = self._at(coordinate, told.shape, cuts, mesh)
                yield from self._of_set(name, ranks, slices, preferred)

    def _of_set(
        self, name: str, ranks: Sequence[int], slices: Slices, preferred: Collection[int]
    ) -> Iterator[tuple[int, Box]]:
        """Of ranks that hold the same."""
        alone: list[int] = []
        seen: set[int] = set()
        for rank in ranks:
            if rank in self._layout.apart or rank in seen:
                continue
            stored = self._tied[self._structure_of[rank]].get(
                name, name
            )  # it is read from what it is tied to
            line, replicas = self._line(stored, rank)
            if line is None or replicas is None:
                alone.append(rank)
                continue
            others = replicas.all_ranks()
            seen.update(others)
            for number, part in line.writers(stored, len(others)):
                yield others[number], Box(part.global_offsets, part.sizes)
        for rank in {*alone[:1], *(rank for rank in alone if rank in preferred)}:
            yield from ((rank, Box(one.global_offsets, one.sizes)) for one in slices.rectangles)

    def _line(self, name: str, rank: int) -> tuple[ReplicatedBytes | None, Mesh | None]:
        """What a rank shares of a tensor, and with whom; nothing where it writes all that it holds."""
        if rank not in self._mates.get(self._structure_of[rank], ()):
            return None, None
        shared, found = self._lines(rank)
        replicas = shared.get(name)
        return (None, None) if replicas is None else (found.get(replicas), replicas.ranks)

    def _lines_at(self, rank: int) -> tuple[dict[str, Replicas], dict[Replicas, ReplicatedBytes]]:
        """As the rank itself divides what it holds alike with others; see `state.ranked`."""
        digest = self._structure_of[rank]
        mates = self._layout.shared[digest]
        sharing: dict[tuple[Any, Any, Any], Replicas] = {}
        holdings: dict[str, Holding] = {}
        for name, told in self._tensors[digest].items():
            slices = self._slices(name, told, rank)
            if slices is None or self._is_tied(name, rank):
                continue
            key = slices.mesh, slices.cuts, slices.coordinate
            if key not in sharing:
                sharing[key] = sharers(slices, rank, mates, self._layout.root)
            holdings[name] = Holding(slices, told.item_bytes, sharing[key])
        everybody = by_everybody(holdings)
        shared = {
            name: one.replicas
            for name, one in holdings.items()
            if one.replicas.size > 1 and name not in everybody
        }
        return shared, replicated_bytes(holdings, everybody)

    def _is_tied(self, name: str, rank: int) -> bool:
        """Whether a rank has written nothing under this name, for it has it under another."""
        return name in self._aliases or name in self._tied[self._structure_of[rank]]

    # --- what is where ----------------------------------------------------------------------------------------

    def _slices(self, name: str, told: _StructureLine, rank: int) -> Slices | None:
        """What a rank holds of a tensor; None where that does not follow from anything."""
        if told.is_plain:
            return Slices.plain(told.shape)
        place = self._place(told.spread, self._alike[name][told], rank) if told.is_cut else None
        return place and self._at(place[1], told.shape, _cuts(told.spread), place[0])

    def _place_of(self, spread: str, digests: tuple[str, ...], rank: int) -> tuple[Mesh, Ints] | None:
        """The mesh that a rank is in, and where in it."""
        for mesh in self._meshes(spread, digests):
            if rank in (ranks := mesh.all_ranks()):
                at, coordinate = ranks.index(rank), list[int]()
                for size in reversed(mesh.shape):
                    at, step = divmod(at, size)
                    coordinate.insert(0, step)
                return mesh, tuple(coordinate)
        return None

    def _meshes_of(self, spread: str, digests: tuple[str, ...]) -> list[Mesh]:
        """The meshes of this shape that these ranks are in: the lowest rank that is in none yet begins the next one."""
        _, shape, stride, listed, is_inside = json.loads(spread)
        if not is_inside:
            return []
        if listed:
            return [Mesh(listed[0], tuple(shape), (), tuple(listed))] if isinstance(listed, list) else []
        left = {rank for digest in digests for rank in self._layout.classes[digest]}
        # A mesh may run downwards.
        least = sum((size - 1) * step for size, step in zip(shape, stride, strict=True) if step < 0)
        found: list[Mesh] = []
        for rank in sorted(left):
            if rank in left:
                mesh = Mesh(rank - least, tuple(shape), tuple(stride))
                if left.issuperset(there := mesh.all_ranks()):
                    left.difference_update(there)
                    found.append(mesh)
        return found

    def _coordinates(
        self, shape: Ints, cuts: tuple[Cut, ...], mesh_shape: Ints, boxes: tuple[Box, ...]
    ) -> list[Ints]:
        """Where in a mesh something of these boxes is held; of copies, the first."""
        cut = {one.mesh_dim for one in cuts}
        mesh = Mesh(0, mesh_shape, (1,) * len(mesh_shape))
        found = []
        for coordinate in product(*(range(n if dim in cut else 1) for dim, n in enumerate(mesh_shape))):
            held = self._at(coordinate, shape, cuts, mesh).rectangles
            if any(Box(one.global_offsets, one.sizes).common(box) for one in held for box in boxes):
                found.append(coordinate)
        return found


def _parsed(text: str) -> tuple[dict[str, _StructureLine], dict[str, str]]:
    """The tensors of a structure, and which of them are tied to which."""
    found, tied = dict[str, _StructureLine](), dict[str, str]()
    for line in text.splitlines():
        name, dtype, shape, spread, *to = json.loads(line)
        if dtype in DTYPES:
            found[name] = _StructureLine(DTYPES[dtype][0], tuple(shape), json.dumps(spread))
            if to:
                tied[name] = to[0]
    return found, tied


@lru_cache(1 << 12)
def _cuts(spread: str) -> tuple[Cut, ...]:
    return tuple(Cut(*cut) for cut in json.loads(spread)[0])


def _slices_at(coordinate: Ints, shape: Ints, cuts: tuple[Cut, ...], mesh: Mesh) -> Slices:
    return Slices.at(coordinate, global_shape=shape, cuts=cuts, mesh=mesh)


def _minus(one: Ints, other: Ints) -> Ints:
    return tuple(a - b for a, b in zip(one, other, strict=True))
