"""The share of replicated tensors that each rank writes, computed without asking the other ranks.

In: the slices of a rank, and the ranks with the same slices. Out: the rectangles that this rank writes.
Knows nothing of: tensors, the states of other ranks.

The bytes replicated on one set of ranks are laid end to end in the order of names, and divided into equal shares, one
for each rank. Every rank of the set computes the same division, so no two write the same bytes and none are left out.
Bytes of several sets cannot be laid end to end: two ranks could each leave a tensor to the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from math import prod
from typing import Final, NamedTuple

from ..spec import KIB, MIB
from .slices import Mesh, Rectangle, Replicas, Slices

# The version of this arithmetic, stored with each step: readers of old checkpoints must find the writers, too.
VERSION: Final = 2
# Steps of version 1 can be read, too. Their structures did not list tied tensors, so their readers open more archives.
KNOWN_VERSIONS: Final = frozenset({1, VERSION})
# Larger tensors are cut at rows. A smaller one goes whole to one rank, so that a state is not cut into tiny pieces.
CUT_BYTES: Final = MIB
# Small whole tensors are written by every rank that has them, at a negligible cost: their values may turn out to differ
# (running statistics, step counters), and then each archive has its rank's values.
EVERYBODY_BYTES: Final = 64 * KIB
EVERYBODY_TOTAL_BYTES: Final = 16 * MIB
# Balances are numbers modulo a prime, so that sizes which are powers of two lose no information.
MODULUS: Final = 2**61 - 1


class Holding(NamedTuple):
    """A rank's slices of one tensor, and the ranks with the same: its `replicas()`, or a wider set if known."""

    slices: Slices
    item_bytes: int
    replicas: Replicas


class ReplicatedPiece(NamedTuple):
    """A rectangle of a tensor, and its offset `at` in the replicated bytes."""

    name: str
    rectangle: Rectangle
    num_bytes: int
    at: int


class ReplicatedBytes(NamedTuple):
    """The bytes replicated on one set of ranks, laid end to end."""

    pieces: list[ReplicatedPiece]
    num_bytes: int = 0

    def share(self, number: int, shares: int) -> Iterator[tuple[str, Rectangle]]:
        """The rectangles that rank `number` of a set of `shares` ranks writes."""
        for piece in self.pieces:
            part = self._part(piece, number, shares)
            if part is not None:
                yield piece.name, part

    def writers(self, name: str, shares: int) -> Iterator[tuple[int, Rectangle]]:
        """The numbers of the ranks, of a set of `shares` ranks, that write parts of a tensor, with their rectangles."""
        for piece in self.pieces:
            if piece.name == name:
                begin = max(0, piece.at * shares // self.num_bytes - 1)
                end = min(shares, (piece.at + piece.num_bytes) * shares // self.num_bytes + 2)
                for number in range(begin, end):
                    part = self._part(piece, number, shares)
                    if part is not None:
                        yield number, part

    def _part(self, piece: ReplicatedPiece, number: int, shares: int) -> Rectangle | None:
        first, last = self.num_bytes * number // shares, self.num_bytes * (number + 1) // shares
        _, rectangle, num_bytes, at = piece
        if num_bytes < CUT_BYTES:
            return rectangle if first <= at < last else None
        dim, rows = next((dim, size) for dim, size in enumerate(rectangle.sizes) if size > 1)
        row_bytes = num_bytes // rows
        # A row in which two shares meet belongs to the first of them.
        start, stop = (min(max(0, -(-(end - at) // row_bytes)), rows) for end in (first, last))
        return _rows(rectangle, dim, start, stop) if start < stop else None


def rectangles_to_write(holdings: Mapping[str, Holding]) -> dict[str, tuple[Rectangle, ...]]:
    """The rectangles that this rank writes of each of its tensors, by name: all, some or none of those that it holds.

    The ranks of a set must hold the same slices under the same names. Together they write every element once; small
    tensors that are whole on each rank are written by all of them.
    """
    taken: dict[str, list[Rectangle]] = {name: [] for name in holdings}
    everybody = by_everybody(holdings)
    for name, (slices, _, replicas) in holdings.items():
        if not slices.is_copy and (name in everybody or replicas.size == 1):
            taken[name].extend(slices.rectangles)
    for replicas, replicated in replicated_bytes(holdings, everybody).items():
        for name, rectangle in replicated.share(replicas.number, replicas.size):
            taken[name].append(rectangle)
    return {name: tuple(rectangles) for name, rectangles in taken.items()}


def balance(holdings: Mapping[str, Holding], taken: Mapping[str, Sequence[Rectangle]]) -> int:
    """A checksum of the rectangles that this rank writes of replicated tensors. The first rank of a set subtracts the
    checksum of all replicated rectangles.

    So the sum over a set is a multiple of `MODULUS` if its ranks write each element once, and hardly ever otherwise.
    """
    everybody, total = by_everybody(holdings), 0
    for name, (slices, _, replicas) in holdings.items():
        if not (slices.is_copy or name in everybody or replicas.size == 1):
            total += sum(_weight(name, rectangle) for rectangle in taken[name])
            if replicas.number == 0:
                total -= sum(_weight(name, rectangle) for rectangle in slices.rectangles)
    return total % MODULUS


def _weight(name: str, rectangle: Rectangle) -> int:
    """A sum over the elements of a rectangle: the weights of two adjacent rectangles add up to that of their union."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
    weight = seed
    for dim, (first, size) in enumerate(zip(rectangle.global_offsets, rectangle.sizes, strict=True)):
        weight = weight * (size * (seed >> dim) + size * (2 * first + size - 1) // 2) % MODULUS
    return weight


def replicated_bytes(holdings: Mapping[str, Holding], everybody: set[str]) -> dict[Replicas, ReplicatedBytes]:
    """The bytes that a rank shares with others, by the set of these ranks; without the tensors in `everybody`."""
    pieces: dict[Replicas, list[ReplicatedPiece]] = {}
    ends: dict[Replicas, int] = {}
    for name in sorted(holdings):
        slices, item_bytes, replicas = holdings[name]
        if slices.is_copy or name in everybody or replicas.size == 1:
            continue
        for rectangle in slices.rectangles:
            at, num_bytes = ends.get(replicas, 0), rectangle.num_elements * item_bytes
            pieces.setdefault(replicas, []).append(ReplicatedPiece(name, rectangle, num_bytes, at))
            ends[replicas] = at + num_bytes
    return {replicas: ReplicatedBytes(pieces[replicas], ends[replicas]) for replicas in pieces}


def sharers(slices: Slices, rank: int, mates: Sequence[int], root: Mesh | None = None) -> Replicas:
    """The ranks that hold the same slices of a tensor as this one, among `mates`, which are known to have the same
    structure.

    `root` is a mesh that contains the meshes of all tensors.
    """
    if slices.is_plain:
        ranks = list(mates)
    else:
        replicas = _under_root(slices, rank, root) or slices.replicas().ranks
        if replicas is None:
            return Replicas()
        known = set(mates)
        ranks = [mate for mate in replicas.all_ranks() if mate in known]
    if len(ranks) < 2:
        return Replicas()
    return Replicas(Mesh.of((len(ranks),), ranks), ranks.index(rank))


def _under_root(slices: Slices, rank: int, root: Mesh | None) -> Mesh | None:
    """The ranks of the root mesh that hold the same slices, if the tensor's mesh is a part of the root mesh."""
    mesh = slices.mesh
    coordinate = None if root is None else root.coordinate_of(rank)
    if root is None or coordinate is None or mesh is None or slices.cuts is None:
        return None
    dims_cut = {cut.mesh_dim for cut in slices.cuts}
    for dims in permutations(range(len(root.shape)), len(mesh.shape)):
        part = root.along(dims, coordinate)
        if (part.shape, part.all_ranks()) == (mesh.shape, mesh.all_ranks()):
            free = [dim for dim in range(len(root.shape)) if dim not in {dims[n] for n in dims_cut}]
            return root.along(free, coordinate) if free else None
    return None


def by_everybody(holdings: Mapping[str, Holding]) -> set[str]:
    """The names of the small whole tensors that every rank writes."""
    names, total = set(), 0
    for name in sorted(name for name, holding in holdings.items() if holding.slices.is_plain):
        slices, item_bytes, _ = holdings[name]
        num_bytes = prod(slices.global_shape) * item_bytes
        if num_bytes <= EVERYBODY_BYTES and total + num_bytes <= EVERYBODY_TOTAL_BYTES:
            names.add(name)
            total += num_bytes
    return names


def _rows(rectangle: Rectangle, dim: int, start: int, stop: int) -> Rectangle:
    """Rows [start, stop) of a rectangle, counted along `dim`."""
    offsets, local, sizes = (list(facts) for facts in rectangle)
    offsets[dim] += start
    local[dim] += start
    sizes[dim] = stop - start
    return Rectangle(tuple(offsets), tuple(local), tuple(sizes))
