"""What a rank holds of a tensor that is spread over many: rectangles, by arithmetic that comes out alike on every rank.

In: shapes, the cuts of a tensor, and a place in a mesh of ranks. Out: frozen values. Knows nothing of: torch, processes.

A tensor's cuts follow from its placements alone, and are the same on all ranks; whoever has them and the mesh can say
what any other rank holds. A cut is `torch.chunk`'s: pieces of ceil(n / k), the last ones smaller or empty. Cuts of one
dimension follow each other, each cutting what the one before has left. In which order they do is the whole difficulty:
fully_shard cuts what tensor parallelism has cut already, so the later dimension of the mesh comes first, and says so by
a `_StridedShard`; where sizes are uneven, reading that from left to right names another rank for some rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple, TypeAlias

Ints: TypeAlias = tuple[int, ...]


class Rectangle(NamedTuple):
    """A block of a global tensor, and where it lies in what a rank holds; the names of torch's `CheckpointableTensor`."""

    global_offsets: Ints
    local_offsets: Ints
    sizes: Ints

    @property
    def num_elements(self) -> int:
        return prod(self.sizes)

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Rectangle:
        sizes = tuple(shape)
        return cls((0,) * len(sizes), (0,) * len(sizes), sizes)


class Cut(NamedTuple):
    """Dimension `dim` of a tensor is cut into as many pieces as dimension `mesh_dim` of the mesh has ranks.

    With several `runs` it is first cut into that many, and a rank holds its piece of each, one after the other: packed
    matrices (q, k and v in one) under tensor parallelism.
    """

    dim: int
    mesh_dim: int
    runs: int = 1


class Mesh(NamedTuple):
    """Ranks in a grid: the one at a coordinate is `start` plus its steps times `stride`.

    The few grids that are not as regular as that list their `ranks`, row by row, and have no `stride`.
    """

    start: int
    shape: Ints
    stride: Ints
    ranks: Ints = ()

    @classmethod
    def of(cls, shape: Iterable[int], ranks: Iterable[int]) -> Mesh:
        """The mesh of these ranks, row by row. Raises ValueError where they are not as many as the shape has places."""
        shape, listed = tuple(shape), tuple(ranks)
        if not listed or len(listed) != prod(shape):
            raise ValueError(f"a mesh of shape {shape} does not have {len(listed)} ranks")
        stride = tuple(
            listed[prod(shape[dim + 1 :])] - listed[0] if size > 1 else 0 for dim, size in enumerate(shape)
        )
        regular = cls(listed[0], shape, stride)
        return regular if tuple(regular.all_ranks()) == listed else cls(listed[0], shape, (), listed)

    @property
    def size(self) -> int:
        return prod(self.shape)

    def rank_at(self, coordinate: Ints) -> int:
        if self.ranks:
            return self.ranks[_number(coordinate, self.shape)]
        return self.start + sum(step * stride for step, stride in zip(coordinate, self.stride, strict=True))

    def all_ranks(self) -> list[int]:
        """Row by row."""
        ranks = [self.start]
        for size, stride in zip(self.shape, self.stride, strict=False):
            ranks = [rank + step * stride for rank in ranks for step in range(size)]
        return list(self.ranks) or ranks

    def along(self, dims: Sequence[int], coordinate: Ints) -> Mesh:
        """The part of it through a coordinate that runs along these dimensions."""
        start = tuple(0 if dim in dims else step for dim, step in enumerate(coordinate))
        shape = tuple(self.shape[dim] for dim in dims)
        if not self.ranks:
            return Mesh(self.rank_at(start), shape, tuple(self.stride[dim] for dim in dims))

        def through(steps: Ints) -> Ints:
            moved = dict(zip(dims, steps, strict=True))
            return tuple(moved.get(dim, step) for dim, step in enumerate(start))

        return Mesh.of(shape, [self.rank_at(through(steps)) for steps in product(*map(range, shape))])


class Replicas(NamedTuple):
    """Ranks that hold the very same of a tensor, and which of them this one is. Without `ranks` it is alone."""

    ranks: Mesh | None = None
    number: int = 0

    @property
    def size(self) -> int:
        return self.ranks.size if self.ranks else 1


@dataclass(frozen=True, slots=True)
class Slices:
    """What one rank holds of one tensor.

    Args:
        global_shape: of the whole tensor.
        rectangles: those of it that are here. None of them is empty, and no two overlap.
        cuts: by which they are made, in their order; empty for a tensor that is whole on each rank; None where the
            rectangles were given, and nothing says what other ranks hold.
        mesh: of the ranks that it is spread over; None for a tensor that knows of no other rank.
        coordinate: of this rank in the mesh; None when it stands outside, or there is no mesh.
        is_copy: whoever gave the rectangles says that another rank has these too, and is the one to write them.
    """

    global_shape: Ints
    rectangles: tuple[Rectangle, ...]
    cuts: tuple[Cut, ...] | None = ()
    mesh: Mesh | None = None
    coordinate: Ints | None = None
    is_copy: bool = False

    @classmethod
    def plain(cls, shape: Iterable[int]) -> Slices:
        """All of a tensor that knows of no other rank."""
        whole = Rectangle.whole(shape)
        return cls(whole.sizes, (whole,) if whole.num_elements else ())

    @classmethod
    def at(
        cls, coordinate: Ints | None, *, global_shape: Iterable[int], cuts: tuple[Cut, ...], mesh: Mesh
    ) -> Slices:
        """What the rank at this coordinate of the mesh holds; nothing outside of it, where the coordinate is None."""
        shape = tuple(global_shape)
        rectangles = () if coordinate is None else _rectangles(_runs(shape, cuts, mesh.shape, coordinate))
        return cls(shape, rectangles, cuts, mesh, coordinate)

    @property
    def is_plain(self) -> bool:
        return self.mesh is None and self.cuts is not None

    @property
    def local_shape(self) -> Ints | None:
        """The shape of what a rank holds, by the cuts; None where nothing follows from them."""
        if self.mesh is None or self.cuts is None or self.coordinate is None:
            return self.global_shape if self.is_plain else None
        runs = _runs(self.global_shape, self.cuts, self.mesh.shape, self.coordinate)
        return tuple(sum(stop - start for start, stop in of_dim) for of_dim in runs)

    def replicas(self) -> Replicas:
        """The ranks of its mesh that hold the same: those that differ only where nothing is cut."""
        if self.mesh is None or self.cuts is None or self.coordinate is None:
            return Replicas()
        cut = {one.mesh_dim for one in self.cuts}
        free = [dim for dim, size in enumerate(self.mesh.shape) if size > 1 and dim not in cut]
        if not free:
            return Replicas()
        ranks = self.mesh.along(free, self.coordinate)
        return Replicas(ranks, _number([self.coordinate[dim] for dim in free], ranks.shape))


def cuts_of(
    placed: Sequence[tuple[int, int] | None],
    mesh_shape: Ints,
    *,
    order: Mapping[int, Sequence[int]] | None = None,
) -> tuple[Cut, ...]:
    """The cuts, in their order, that placements stand for.

    For each dimension of the mesh `placed` has the tensor's dimension and the split factor (1 for `Shard`), or None where
    it replicates. Cuts are from left to right. But a split factor that is the number of pieces which the dimensions of
    the mesh to the right have made says that this cut comes after theirs: so fully_shard cuts a tensor that was cut
    before, and torch writes a shard order that way. Any other factor is the number of runs.

    `order` has, by the tensor's dimension, those of the mesh in the order of their cuts, where that is said outright;
    split factors are runs then. Raises ValueError where it does not name the dimensions that are cut.
    """
    by_dim: dict[int, list[Cut]] = {}
    for mesh_dim in reversed(range(len(placed))):
        if (here := placed[mesh_dim]) is not None:
            dim, factor = here
            later = by_dim.setdefault(dim, [])
            pieces = [prod(mesh_shape[cut.mesh_dim] for cut in later[:n]) for n in range(len(later) + 1)]
            if order is None and factor > 1 and factor in pieces:
                later.insert(pieces.index(factor), Cut(dim, mesh_dim))
            else:
                later.insert(0, Cut(dim, mesh_dim, factor))
    for dim, said in (order or {}).items():
        cuts = {cut.mesh_dim: cut for cut in by_dim.get(dim, ())}
        if sorted(said) != sorted(cuts):
            raise ValueError(
                f"its shard order cuts dimension {dim} along {list(said)}, its placements {sorted(cuts)}"
            )
        by_dim[dim] = [cuts[mesh_dim] for mesh_dim in said]
    return tuple(cut for dim in sorted(by_dim) for cut in by_dim[dim])


def flat_range(shape: Ints, start: int, stop: int) -> Iterator[tuple[Ints, Ints]]:
    """Offsets and sizes of the rectangles that are elements [start, stop) of a tensor, row by row, in that order."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        for offsets, sizes in flat_range(shape[1:], start - last * row, stop - last * row):
            yield (last, *offsets), (1, *sizes)
        return
    for offsets, sizes in flat_range(shape[1:], start - (first - 1) * row, row):
        yield (first - 1, *offsets), (1, *sizes)
    if first < last:
        yield (first, *(0,) * len(shape[1:])), (last - first, *shape[1:])
    for offsets, sizes in flat_range(shape[1:], 0, stop - last * row):
        yield (last, *offsets), (1, *sizes)


_Runs: TypeAlias = list[
    tuple[int, int]
]  # [start, stop) of a dimension, in the order in which a rank holds them


def _runs(shape: Ints, cuts: Iterable[Cut], mesh_shape: Ints, coordinate: Ints) -> list[_Runs]:
    """By dimension, what the rank there holds."""
    held: list[_Runs] = [[(0, size)] for size in shape]
    for cut in cuts:
        whole, pieces, number = held[cut.dim], mesh_shape[cut.mesh_dim], coordinate[cut.mesh_dim]
        run = [piece for n in range(cut.runs) for piece in _piece(_piece(whole, cut.runs, n), pieces, number)]
        held[cut.dim] = _joined(run)
    return held


def _piece(runs: _Runs, pieces: int, number: int) -> _Runs:
    """The piece of this number, when what the runs have is cut as `torch.chunk` does."""
    length = sum(stop - start for start, stop in runs)
    size = -(-length // pieces)
    first, last = number * size, (number + 1) * size
    taken, at = [], 0
    for start, stop in runs:
        a, b = max(first, at), min(last, at + stop - start)
        if a < b:
            taken.append((start + a - at, start + b - at))
        at += stop - start
    return taken


def _joined(runs: _Runs) -> _Runs:
    """Runs that continue each other, as one."""
    joined: _Runs = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def _rectangles(held: list[_Runs]) -> tuple[Rectangle, ...]:
    spans = []
    for runs in held:
        of_dim, at = [], 0
        for start, stop in runs:
            if start < stop:
                of_dim.append((start, at, stop - start))
            at += stop - start
        spans.append(of_dim)
    return tuple(
        Rectangle(tuple(a for a, _, _ in one), tuple(b for _, b, _ in one), tuple(n for _, _, n in one))
        for one in product(*spans)
    )


def _number(coordinate: Sequence[int], shape: Ints) -> int:
    """Which one it is, row by row."""
    number = 0
    for step, size in zip(coordinate, shape, strict=True):
        number = number * size + step
    return number
