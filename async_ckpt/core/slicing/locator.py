"""The ranks that wrote a part of a tensor, computed so that a reader need not open the archives of all ranks.

In: the structures of the ranks' states, and the table that determines how they divided replicated tensors. Out: ranks.
Knows nothing of: files.

The result is advice: only the index of an archive says where a tensor lies. If a rank is named here without having the
part, its archive is opened in vain; if the named ranks do not have everything, other archives are opened.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from itertools import product
from math import prod
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

from .. import fields
from ..spec import DTYPES
from .boxes import Box, cover
from .shares import Holding, ReplicatedBytes, by_everybody, replicated_bytes, sharers
from .slices import Cut, Ints, Mesh, Slices, check_mesh

# Ranks, in ascending order, by the digest of their states' structure.
Classes: TypeAlias = Mapping[str, Sequence[int]]
_NOTHING: Final[Mapping[Any, Any]] = MappingProxyType({})


class StepItem(NamedTuple):
    """A tensor or another value of a state, by its path. For other values, `dtype` and `shape` are empty."""

    path: tuple[int | str, ...]
    dtype: str = ""
    shape: Ints = ()


class StepLayout(NamedTuple):
    """The structures of the ranks of a step, and how the ranks divided replicated tensors. Read from the step's layout
    file.

    `structures` are the texts of `state.division.Structure`, by digest. If a structure is in `shared`, each of the
    ranks listed there wrote a share of what they hold as replicas; all other ranks wrote everything that they hold.
    `root` is a mesh that contains the meshes of all tensors. `items` are listed if a planner has given each rank a part
    of the state to write: then the texts have lines for all values, and no rank has all names. `of_some` are names that
    all ranks of a structure have, but not all other ranks.
    """

    classes: Classes
    structures: Mapping[str, str]
    shared: Classes = _NOTHING
    root: Mesh | None = None
    items: Sequence[StepItem] = ()
    of_some: Mapping[str, Sequence[str]] = _NOTHING


class _TensorLine(NamedTuple):
    """One tensor of a structure. `spread` describes its sharding as JSON."""

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
    """The name of a tensor in a structure."""
    return "\x1f".join(map(str, path))


class ShardLocator:
    """Finds the ranks that wrote parts of tensors, for one layout."""

    def __init__(self, layout: StepLayout) -> None:
        self._layout = layout
        self._structure_of = {rank: digest for digest, ranks in layout.classes.items() for rank in ranks}
        self._tensors, self._tied = dict[str, dict[str, _TensorLine]](), dict[str, dict[str, str]]()
        self._values = dict[str, set[str]]()  # names of values that are not tensors, in layouts that list them
        for digest in layout.classes:
            self._tensors[digest], self._tied[digest], self._values[digest] = _parsed(layout.structures[digest])
        # For each tensor: its distinct shardings, and the structures with each of these.
        self._alike: dict[str, dict[_TensorLine, tuple[str, ...]]] = {}
        for digest, tensors in self._tensors.items():
            for name, line in tensors.items():
                alike = self._alike.setdefault(name, {})
                alike[line] = (*alike.get(line, ()), digest)
        self._mates = {digest: frozenset(mates) for digest, mates in layout.shared.items()}
        # Cached, since most tensors have the same meshes, cuts and shapes.
        self._meshes, self._place = cache(self._meshes_of), cache(self._place_of)
        self._at, self._touched = cache(_slices_at), cache(self._coordinates)
        self._replicated, self._sole = cache(self._replicated_at), cache(self._sole_writers)

    def representatives(self, preferred: float = 0.0) -> set[int]:
        """One rank for each distinct set of tensors and names that ranks have.

        `preferred`, from 0 to less than 1, selects the rank: its relative position among the ranks of a set.
        """
        alike: dict[tuple[frozenset[Any], frozenset[str]], list[int]] = {}
        for digest, ranks in self._layout.classes.items():
            tensors = self._tensors[digest].items()
            shapes = frozenset((name, line.shape, line.is_cut) for name, line in tensors)
            of_some = frozenset(self._layout.of_some.get(digest, ()))
            alike.setdefault((shapes, of_some), []).extend(ranks)
        return {sorted(ranks)[int(preferred * len(ranks))] for ranks in alike.values()}

    def naming(self, names: Iterable[str]) -> set[int]:
        """Few ranks (not always the fewest) whose archives together have these names, if the layout lists items."""
        left, ranks = {*names}, set[int]()
        named = {
            min(of): {*self._tensors[digest], *self._values[digest]} for digest, of in self._layout.classes.items()
        }
        for rank in sorted(named, key=lambda rank: (-len(named[rank] & left), rank)):
            if not named[rank].isdisjoint(left):
                left -= named[rank]
                ranks.add(rank)
        return ranks

    def having(self, wanted: Mapping[str, Sequence[Box]], preferred: Collection[int] = ()) -> set[int]:
        """Ranks whose archives together have all of these boxes, as far as known.

        Among ranks with the same part, one that is `preferred` is chosen, otherwise the lowest. Preferred ranks may be
        left out if all others are needed.
        """
        ranks: set[int] = set()
        others = self._structure_of.keys() - preferred
        for name, boxes in wanted.items():
            if others <= ranks:
                break
            candidates = self._candidates(name, boxes, preferred)
            candidates.sort(key=lambda candidate: (candidate[0] not in preferred, candidate[0]))
            for box in boxes:
                parts = [(rank, part) for rank, held in candidates if (part := held.common(box))]
                covering = cover(box.sizes, [part.relative_to(box) for _, part in parts])
                ranks |= {parts[number][0] for number, _ in covering.taken}
        return ranks

    def writers(self, name: str) -> frozenset[int]:
        """The ranks that wrote parts of a tensor. Of ranks that wrote the same part, possibly only the lowest."""
        lines = self._alike.get(name, {})
        sole = [self._sole(line, digests) for line, digests in lines.items()]
        if None in sole:
            candidates = self._candidates(name, [Box.whole(line.shape) for line in lines], ())
            return frozenset(rank for rank, box in candidates if box.num_elements)
        return frozenset[int]().union(*filter(None, sole))

    def boxes_of(self, rank: int) -> dict[str, set[Box]]:
        """The boxes that a rank wrote of each tensor."""
        boxes: dict[str, set[Box]] = {}
        for name, line in self._tensors[self._structure_of[rank]].items():
            if name not in self._tied[self._structure_of[rank]]:  # a tied tensor is written only under the stored name
                candidates = self._candidates(name, [Box.whole(line.shape)], {rank})
                boxes[name] = {box for other, box in candidates if other == rank and box.num_elements}
        return boxes

    # --- the ranks that may have a part of a tensor ---------------------------------------------------------

    def _candidates(self, name: str, boxes: Sequence[Box], preferred: Collection[int]) -> list[tuple[int, Box]]:
        """Ranks with the parts of a tensor that they wrote, if these overlap one of the boxes.

        Of ranks that all wrote the same part, only the lowest and the preferred ones are included.
        """
        candidates: list[tuple[int, Box]] = []
        for line, digests in self._alike.get(name, {}).items():
            if line.is_cut:
                candidates += self._of_cut(name, line, digests, tuple(boxes), preferred)
                continue
            for digest in digests:
                ranks = self._layout.classes[digest]
                if line.is_plain:
                    candidates += self._of_set(name, ranks, Slices.plain(line.shape), preferred)
                else:
                    held = json.loads(line.spread)["held"]
                    candidates += [(rank, Box(tuple(at), tuple(sizes))) for rank in ranks for at, sizes in held]
        return candidates

    def _of_cut(
        self,
        name: str,
        line: _TensorLine,
        digests: tuple[str, ...],
        boxes: tuple[Box, ...],
        preferred: Collection[int],
    ) -> Iterator[tuple[int, Box]]:
        for mesh in self._meshes(line.spread, digests):
            cuts = _cuts(line.spread)
            free = [dim for dim in range(len(mesh.shape)) if dim not in {cut.mesh_dim for cut in cuts}]
            for coordinate in self._touched(line.shape, cuts, mesh.shape, boxes):
                ranks = mesh.along(free, coordinate).all_ranks() if free else [mesh.rank_at(coordinate)]
                slices = self._at(coordinate, line.shape, cuts, mesh)
                yield from self._of_set(name, ranks, slices, preferred)

    def _sole_writers(self, line: _TensorLine, digests: tuple[str, ...]) -> frozenset[int] | None:
        """The ranks that hold a part of a tensor, if no other rank holds the same part; otherwise None."""
        meshes = self._meshes(line.spread, digests) if line.is_cut else []
        cuts = _cuts(line.spread) if meshes else ()
        num_pieces = prod(meshes[0].shape[dim] for dim in {cut.mesh_dim for cut in cuts}) if meshes else 0
        num_ranks = max((mesh.size for mesh in (*meshes, self._layout.root) if mesh), default=1)
        if num_pieces != num_ranks:
            return None
        touched = self._touched(line.shape, cuts, meshes[0].shape, (Box.whole(line.shape),))
        return frozenset(mesh.rank_at(coordinate) for mesh in meshes for coordinate in touched)

    def _of_set(
        self, name: str, ranks: Sequence[int], slices: Slices, preferred: Collection[int]
    ) -> Iterator[tuple[int, Box]]:
        """The candidates among ranks that hold the same slices."""
        alone: list[int] = []
        seen: set[int] = set()
        for rank in ranks:
            if rank in seen:
                continue
            stored = self._tied[self._structure_of[rank]].get(name, name)  # a tied tensor is stored under another name
            shared = self._replicated(rank).get(stored)
            if shared is None:
                alone.append(rank)
                continue
            replicas, replicated = shared
            others = replicas.all_ranks()
            seen.update(others)
            for number, part in replicated.writers(stored, len(others)):
                yield others[number], part.box
        for rank in {*alone[:1], *(rank for rank in alone if rank in preferred)}:
            yield from ((rank, rectangle.box) for rectangle in slices.rectangles)

    def _replicated_at(self, rank: int) -> dict[str, tuple[Mesh, ReplicatedBytes]]:
        """The tensors that a rank does not write alone, each with the ranks that share it, and the bytes that these
        share: computed as `state.division` does on that rank.
        """
        digest = self._structure_of[rank]
        if rank not in self._mates.get(digest, ()):
            return {}
        mates = self._layout.shared[digest]
        replicas = cache(lambda placement: sharers(placement, rank, mates, self._layout.root))
        holdings: dict[str, Holding] = {}
        for name, line in self._tensors[digest].items():
            slices = self._slices(name, line, rank)
            if slices is not None and name not in self._tied[digest]:
                holdings[name] = Holding(slices, line.item_bytes, replicas(slices.placement))
        everybody = by_everybody(holdings)
        shared = replicated_bytes(holdings, everybody)
        return {
            name: (ranks, shared[holding.replicas])
            for name, holding in holdings.items()
            if name not in everybody and holding.replicas in shared and (ranks := holding.replicas.ranks)
        }

    # --- slices and places ------------------------------------------------------------------------------------

    def _slices(self, name: str, line: _TensorLine, rank: int) -> Slices | None:
        """The slices of a tensor that a rank holds; None if they cannot be computed."""
        if line.is_plain:
            return Slices.plain(line.shape)
        place = self._place(line.spread, self._alike[name][line], rank) if line.is_cut else None
        return place and self._at(place[1], line.shape, _cuts(line.spread), place[0])

    def _place_of(self, spread: str, digests: tuple[str, ...], rank: int) -> tuple[Mesh, Ints] | None:
        """The mesh that contains a rank, and the rank's coordinate in it."""
        for mesh in self._meshes(spread, digests):
            if (coordinate := mesh.coordinate_of(rank)) is not None:
                return mesh, coordinate
        return None

    def _meshes_of(self, spread: str, digests: tuple[str, ...]) -> list[Mesh]:
        """The meshes of this shape that the ranks form: the lowest rank that is in no mesh yet begins the next one."""
        _, shape, stride, listed, is_inside = json.loads(spread)
        if not is_inside:
            return []
        if listed:
            return [Mesh(listed[0], tuple(shape), (), tuple(listed))] if isinstance(listed, list) else []
        left = {rank for digest in digests for rank in self._layout.classes[digest]}
        # Strides may be negative.
        least = sum((size - 1) * step for size, step in zip(shape, stride, strict=True) if step < 0)
        meshes: list[Mesh] = []
        for rank in sorted(left):
            if rank in left:
                mesh = Mesh(rank - least, tuple(shape), tuple(stride))
                if left.issuperset(ranks := mesh.all_ranks()):
                    left.difference_update(ranks)
                    meshes.append(mesh)
        return meshes

    def _coordinates(self, shape: Ints, cuts: tuple[Cut, ...], mesh_shape: Ints, boxes: tuple[Box, ...]) -> list[Ints]:
        """The coordinates in a mesh that hold a part of these boxes; of replicas only the first."""
        dims_cut = {cut.mesh_dim for cut in cuts}
        mesh = Mesh(0, mesh_shape, (1,) * len(mesh_shape))
        coordinates = []
        for coordinate in product(*(range(n if dim in dims_cut else 1) for dim, n in enumerate(mesh_shape))):
            rectangles = self._at(coordinate, shape, cuts, mesh).rectangles
            if any(rectangle.box.common(box) for rectangle in rectangles for box in boxes):
                coordinates.append(coordinate)
        return coordinates


def check_structure(text: str, num_ranks: int) -> None:
    """Raises ValueError, KeyError or TypeError for a text that is not a structure.

    A mesh that lies inside the `num_ranks` ranks that have saved must not have more places than these.
    """
    for line in dict.fromkeys(_parsed(text)[0].values()):
        spread = json.loads(line.spread)
        if isinstance(spread, dict):
            fields.items(spread["held"], partial(fields.row, of=(_counts, _counts)))
        elif spread is not None:
            cuts, shape, strides, ranks, is_inside = fields.items(spread, lambda part: part)
            fields.items(cuts, _counts)
            listed = _counts(ranks) if isinstance(ranks, list) else ()
            mesh = Mesh(0, _counts(shape), fields.items(strides, fields.whole), listed)
            if is_inside and (isinstance(ranks, list) or not ranks):
                check_mesh(mesh, num_ranks)
            for cut in _cuts(line.spread):
                if cut.dim >= len(line.shape) or cut.mesh_dim >= len(mesh.shape) or not cut.runs:
                    raise ValueError(f"a tensor of shape {line.shape} is not cut by {cut} of a mesh {mesh.shape}")


_counts = partial(fields.items, of=fields.count)


def _parsed(text: str) -> tuple[dict[str, _TensorLine], dict[str, str], set[str]]:
    """The tensors of a structure, the name of the stored tensor for each tied one, and the names of other values."""
    tensors, tied, values = dict[str, _TensorLine](), dict[str, str](), set[str]()
    known: dict[str, _TensorLine] = {}  # most tensors of a model have the same line
    for name, dtype, shape, spread, *to in fields.parsed(f"[{','.join(text.splitlines())}]"):
        if isinstance(dtype, str) and dtype in DTYPES:
            facts = str((dtype, shape, spread))
            if facts not in known:
                known[facts] = _TensorLine(DTYPES[dtype][0], _counts(shape), json.dumps(spread))
            tensors[fields.text(name)] = known[facts]
            if to:
                tied[name] = fields.text(to[0])
        elif dtype is None:
            values.add(fields.text(name))
    return tensors, tied, values


@lru_cache(1 << 12)
def _cuts(spread: str) -> tuple[Cut, ...]:
    return tuple(Cut(*cut) for cut in json.loads(spread)[0])


def _slices_at(coordinate: Ints, shape: Ints, cuts: tuple[Cut, ...], mesh: Mesh) -> Slices:
    return Slices.at(coordinate, global_shape=shape, cuts=cuts, mesh=mesh)
