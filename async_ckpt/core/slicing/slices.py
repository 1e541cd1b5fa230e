"""The rectangles of a sharded tensor that a rank holds, computed with the same result on every rank.

In: shapes, the cuts of a tensor, and a place in a mesh of ranks. Out: frozen values. Knows nothing of: torch,
processes.

A tensor's cuts follow from its placements alone, and are the same on all ranks. The cuts and the mesh together
determine the rectangles of every rank. A cut divides as `torch.chunk` does: into pieces of ceil(n / k), the last ones
smaller or empty. Several cuts of one dimension follow each other, and each divides the pieces of the cut before it.
Their order is the difficult part: fully_shard cuts tensors that tensor parallelism has already cut, so the later
dimension of the mesh comes first, marked by a `_StridedShard`. With uneven sizes, cutting from left to right would
assign some rows to the wrong rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import NamedTuple, TypeAlias

from ..spec import MAX_DIMS, Box

Ints: TypeAlias = tuple[int, ...]


class Rectangle(NamedTuple):
    """A block of a global tensor, and its place in a rank's local tensor.

    The names are those of torch's `CheckpointableTensor`.
    """

    global_offsets: Ints
    local_offsets: Ints
    sizes: Ints

    @property
    def num_elements(self) -> int:
        return prod(self.sizes)

    @property
    def box(self) -> Box:
        """The place of the rectangle in the global tensor."""
        return Box(self.global_offsets, self.sizes)

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Rectangle:
        sizes = tuple(shape)
        return cls((0,) * len(sizes), (0,) * len(sizes), sizes)


class Cut(NamedTuple):
    """A division of dimension `dim` of a tensor into as many pieces as dimension `mesh_dim` of the mesh has ranks.

    With several `runs`, the dimension is first cut into that many runs, and a rank holds its piece of each run, one
    after the other: packed matrices (q, k and v in one) under tensor parallelism.
    """

    dim: int
    mesh_dim: int
    runs: int = 1


class Mesh(NamedTuple):
    """Ranks in a grid: the rank at a coordinate is `start` plus its steps times `stride`.

    An irregular grid lists its `ranks`, in row-major order, and has no `stride`.
    """

    start: int
    shape: Ints
    stride: Ints
    ranks: Ints = ()

    @classmethod
    def of(cls, shape: Iterable[int], ranks: Iterable[int]) -> Mesh:
        """The mesh of these ranks, in row-major order. Raises ValueError unless the shape has a place for each."""
        shape, listed = tuple(shape), tuple(ranks)
        if not listed or len(listed) != prod(shape):
            raise ValueError(f"a mesh of shape {shape} does not have {len(listed)} ranks")
        stride = tuple(listed[prod(shape[dim + 1 :])] - listed[0] if size > 1 else 0 for dim, size in enumerate(shape))
        regular = cls(listed[0], shape, stride)
        return regular if tuple(regular.all_ranks()) == listed else cls(listed[0], shape, (), listed)

    @property
    def size(self) -> int:
        return prod(self.shape)

    def rank_at(self, coordinate: Ints) -> int:
        if self.ranks:
            return self.ranks[_number(coordinate, self.shape)]
        return self.start + sum(step * stride for step, stride in zip(coordinate, self.stride, strict=True))

    def coordinate_of(self, rank: int) -> Ints | None:
        """The coordinate of a rank; None if the rank is not in the mesh."""
        if rank not in (ranks := self.all_ranks()):
            return None
        at, coordinate = ranks.index(rank), list[int]()
        for size in reversed(self.shape):
            at, step = divmod(at, size)
            coordinate.insert(0, step)
        return tuple(coordinate)

    def all_ranks(self) -> list[int]:
        """The ranks of the mesh, in row-major order."""
        ranks = [self.start]
        for size, stride in zip(self.shape, self.stride, strict=False):
            ranks = [rank + step * stride for rank in ranks for step in range(size)]
        return list(self.ranks) or ranks

    def along(self, dims: Sequence[int], coordinate: Ints) -> Mesh:
        """The part of the mesh along these dimensions, through a coordinate."""
        start = tuple(0 if dim in dims else step for dim, step in enumerate(coordinate))
        shape = tuple(self.shape[dim] for dim in dims)
        if not self.ranks:
            return Mesh(self.rank_at(start), shape, tuple(self.stride[dim] for dim in dims))

        def through(steps: Ints) -> Ints:
            moved = dict(zip(dims, steps, strict=True))
            return tuple(moved.get(dim, step) for dim, step in enumerate(start))

        return Mesh.of(shape, [self.rank_at(through(steps)) for steps in product(*map(range, shape))])


def check_mesh(mesh: Mesh, num_ranks: int) -> None:
    """Raises ValueError for a mesh with more places than ranks, or whose strides or ranks do not fit its shape."""
    if len(mesh.shape) > MAX_DIMS or not 0 < mesh.size <= num_ranks:
        raise ValueError(f"a mesh of shape {mesh.shape!r:.100} must have 1 to {num_ranks} places")
    if len(mesh.ranks) != mesh.size if mesh.ranks else len(mesh.stride) != len(mesh.shape):
        raise ValueError(f"a mesh of shape {mesh.shape!r:.100} has ranks or strides that do not fit it")


class Replicas(NamedTuple):
    """The ranks that hold the same slices of a tensor, and the number of this rank among them.

    Without `ranks`, this rank has no replicas.
    """

    ranks: Mesh | None = None
    number: int = 0

    @property
    def size(self) -> int:
        return self.ranks.size if self.ranks else 1


class Slices(NamedTuple):
    """The slices of one tensor that one rank holds.

    Args:
        global_shape: shape of the whole tensor.
        rectangles: the rectangles of the tensor on this rank. None of them is empty, and no two overlap.
        cuts: the cuts that make the rectangles, in their order; empty for a tensor that is whole on each rank; None
            if the rectangles were given, so that nothing is known about other ranks.
        mesh: the ranks over which the tensor is sharded or replicated; None for a plain tensor.
        coordinate: place of this rank in the mesh; None if it is outside, or there is no mesh.
        is_copy: whoever gave the rectangles states that another rank has them too, and writes them.
    """

    global_shape: Ints
    rectangles: tuple[Rectangle, ...]
    cuts: tuple[Cut, ...] | None = ()
    mesh: Mesh | None = None
    coordinate: Ints | None = None
    is_copy: bool = False

    @classmethod
    def plain(cls, shape: Iterable[int]) -> Slices:
        """The slices of a whole tensor that is not known to have a mesh."""
        whole = Rectangle.whole(shape)
        return cls(whole.sizes, (whole,) if whole.num_elements else ())

    @classmethod
    def at(cls, coordinate: Ints | None, *, global_shape: Iterable[int], cuts: tuple[Cut, ...], mesh: Mesh) -> Slices:
        """The slices of the rank at a coordinate of the mesh; none for a rank outside the mesh."""
        shape = tuple(global_shape)
        rectangles = () if coordinate is None else _rectangles(_runs(shape, cuts, mesh.shape, coordinate))
        return cls(shape, rectangles, cuts, mesh, coordinate)

    @property
    def placement(self) -> Slices:
        """Only the mesh, the cuts and the coordinate, which most tensors share, as a key for what depends on them."""
        return Slices((), (), self.cuts, self.mesh, self.coordinate)

    @property
    def is_plain(self) -> bool:
        return self.mesh is None and self.cuts is not None

    @property
    def local_shape(self) -> Ints | None:
        """The shape of a rank's local tensor according to the cuts; None if it does not follow from them."""
        if self.mesh is None or self.cuts is None or self.coordinate is None:
            return self.global_shape if self.is_plain else None
        runs = _runs(self.global_shape, self.cuts, self.mesh.shape, self.coordinate)
        return tuple(sum(stop - start for start, stop in of_dim) for of_dim in runs)

    def replicas(self) -> Replicas:
        """The ranks of the mesh with the same slices: their coordinates differ only in dimensions without a cut."""
        if self.mesh is None or self.cuts is None or self.coordinate is None:
            return Replicas()
        dims_cut = {cut.mesh_dim for cut in self.cuts}
        free = [dim for dim, size in enumerate(self.mesh.shape) if size > 1 and dim not in dims_cut]
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
    """The cuts that placements stand for, in their order.

    For each dimension of the mesh, `placed` has the tensor's dimension and the split factor (1 for `Shard`), or None
    for a replica. Cuts go from left to right, with one exception: a split factor equal to the number of pieces made by
    the mesh's dimensions to the right means that this cut comes after theirs. This is how fully_shard cuts a tensor
    that was cut before, and how torch encodes a shard order. Any other factor is the number of runs.

    `order` lists, by the tensor's dimension, the dimensions of the mesh in the order of their cuts, if torch states it;
    then split factors are runs. Raises ValueError if `order` does not name the dimensions that are cut.
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
    for dim, mesh_dims in (order or {}).items():
        cuts = {cut.mesh_dim: cut for cut in by_dim.get(dim, ())}
        if sorted(mesh_dims) != sorted(cuts):
            raise ValueError(
                f"its shard order cuts dimension {dim} along {list(mesh_dims)}, its placements {sorted(cuts)}"
            )
        by_dim[dim] = [cuts[mesh_dim] for mesh_dim in mesh_dims]
    return tuple(cut for dim in sorted(by_dim) for cut in by_dim[dim])


def flat_range(shape: Ints, start: int, stop: int) -> Iterator[tuple[Ints, Ints]]:
    """Offsets and sizes of the rectangles that make up elements [start, stop) of a tensor in row-major order."""
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


# Ranges [start, stop) of a dimension, in the order in which a rank holds them.
_Runs: TypeAlias = list[tuple[int, int]]


def _runs(shape: Ints, cuts: Iterable[Cut], mesh_shape: Ints, coordinate: Ints) -> list[_Runs]:
    """The runs of each dimension that the rank at a coordinate holds."""
    held: list[_Runs] = [[(0, size)] for size in shape]
    for cut in cuts:
        whole, pieces, number = held[cut.dim], mesh_shape[cut.mesh_dim], coordinate[cut.mesh_dim]
        run = [piece for n in range(cut.runs) for piece in _piece(_piece(whole, cut.runs, n), pieces, number)]
        held[cut.dim] = _joined(run)
    return held


def _piece(runs: _Runs, pieces: int, number: int) -> _Runs:
    """Piece `number` of the runs, cut as `torch.chunk` does."""
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
    """The runs, with adjacent ones joined."""
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
        Rectangle(tuple(a for a, _, _ in block), tuple(b for _, b, _ in block), tuple(n for _, _, n in block))
        for block in product(*spans)
    )


def _number(coordinate: Sequence[int], shape: Ints) -> int:
    """The index of a coordinate in row-major order."""
    number = 0
    for step, size in zip(coordinate, shape, strict=True):
        number = number * size + step
    return number
