"""Who writes: which part of what several ranks hold alike each of them writes, without asking the others.

In: what a rank holds, and with whom. Out: the rectangles that it writes. Knows nothing of: tensors, other ranks' states.

All that one set of ranks holds alike is a line of its own: laid end to end in the order of names, and divided into as many
shares of the same number of bytes as there are ranks. Every one of them has the same line, so no two write the same and
nothing is left out. A line across sets could not be computed alike everywhere: of two ranks each would give a tensor to
the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from math import prod
from typing import Final, NamedTuple

from ..spec import KIB, MIB
from .slices import Mesh, Rectangle, Replicas, Slices

# Of this arithmetic. It is stored with what was written by it: a reader has to find the owners of old checkpoints too.
VERSION: Final = 2
# Whose steps are read as well: structures did not tell of ties then.
KNOWN_VERSIONS: Final = frozenset({1, VERSION})
# What is larger is cut at rows; the rest goes whole to one rank, so that a state does not fall into crumbs.
CUT_BYTES: Final = MIB
# Small whole tensors are written by every rank that has them, so that its archive has its own values of what may turn out
# to differ (running statistics, step counters), at a price that nobody notices.
EVERYBODY_BYTES: Final = 64 * KIB
EVERYBODY_TOTAL_BYTES: Final = 16 * MIB
# Balances are counted by it: a prime, so that sizes which are powers of two take nothing away.
MODULUS: Final = 2**61 - 1


class Holding(NamedTuple):
    """What a rank holds of one tensor, and which ranks hold the same: `slices.replicas()`, or a wider set if more is known."""

    slices: Slices
    item_bytes: int
    replicas: Replicas


class ReplicatedPiece(NamedTuple):
    """A rectangle of a tensor, and where it lies in a line."""

    name: str
    rectangle: Rectangle
    num_bytes: int
    at: int


class ReplicatedBytes(NamedTuple):
    """All that one set of ranks holds alike, laid end to end."""

    pieces: list[ReplicatedPiece]
    num_bytes: int = 0

    def share(self, number: int, shares: int) -> Iterator[tuple[str, Rectangle]]:
        """What of it the rank of this number writes, of so many."""
        for piece in self.pieces:
            part = self._part(piece, number, shares)
            if part is not None:
                yield piece.name, part

    def writers(self, name: str, shares: int) -> Iterator[tuple[int, Rectangle]]:
        """The numbers of the ranks that write something of a tensor, of so many, and what each of them does."""
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
        # The row in which a share begins belongs to the share before it.
        start, stop = (min(max(0, -(-(end - at) // row_bytes)), rows) for end in (first, last))
        return _rows(rectangle, dim, start, stop) if start < stop else None


def rectangles_to_write(holdings: Mapping[str, Holding]) -> dict[str, tuple[Rectangle, ...]]:
    """For each tensor that this rank holds, by its name, the rectangles of it that it writes: all, some or none of them.

    Over the ranks of a set, which must hold the same under the same names, every element is written once; small tensors
    that are whole on each are written by all of them.
    """
    taken: dict[str, list[Rectangle]] = {name: [] for name in holdings}
    everybody = by_everybody(holdings)
    for name, (slices, _, replicas) in holdings.items():
        if not slices.is_copy and (name in everybody or replicas.size == 1):
            taken[name].extend(slices.rectangles)
    for replicas, line in replicated_bytes(holdings, everybody).items():
        for name, rectangle in line.share(replicas.number, replicas.size):
            taken[name].append(rectangle)
    return {name: tuple(rectangles) for name, rectangles in taken.items()}


def balance(holdings: Mapping[str, Holding], taken: Mapping[str, Sequence[Rectangle]]) -> int:
    """What this rank writes of all that it shares, as a number; if it is the first of those that share it, less all of that.

    Over the ranks of a set the sum is a multiple of `MODULUS` where they write each element once; hardly ever else.
    """
    everybody, total = by_everybody(holdings), 0
    for name, (slices, _, replicas) in holdings.items():
        if not (slices.is_copy or name in everybody or replicas.size == 1):
            total += sum(_weight(name, one) for one in taken[name])
            total -= sum(_weight(name, one) for one in slices.rectangles if replicas.number == 0)
    return total % MODULUS


def _weight(name: str, rectangle: Rectangle) -> int:
    """A sum over the elements of a rectangle, so that of two side by side it is that of both."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
    weight = seed
    for dim, (first, size) in enumerate(zip(rectangle.global_offsets, rectangle.sizes, strict=True)):
        weight = weight * (size * (seed >> dim) + size * (2 * first + size - 1) // 2) % MODULUS
    return weight


def replicated_bytes(holdings: Mapping[str, Holding], everybody: set[str]) -> dict[Replicas, ReplicatedBytes]:
    """The bytes that a rank has a share in, by the ranks that it shares with; without what `everybody` writes."""
    found: dict[Replicas, list[ReplicatedPiece]] = {}
    ends: dict[Replicas, int] = {}
    for name in sorted(holdings):
        slices, item_bytes, replicas = holdings[name]
        if slices.is_copy or name in everybody or replicas.size == 1:
            continue
        for one in slices.rectangles:
            at, num_bytes = ends.get(replicas, 0), one.num_elements * item_bytes
            found.setdefault(replicas, []).append(ReplicatedPiece(name, one, num_bytes, at))
            ends[replicas] = at + num_bytes
    return {replicas: ReplicatedBytes(pieces, ends[replicas]) for replicas, pieces in found.items()}


def sharers(slices: Slices, rank: int, mates: Sequence[int], root: Mesh | None = None) -> Replicas:
    """The ranks that hold the same of a tensor as this one, among its `mates`, which are known to have states alike.

    `root` is a mesh of which those of all tensors are parts.
    """
    if slices.is_plain:
        ranks = list(mates)
    else:
        replicas = _under_root(slices, rank, root) or slices.replicas().ranks
        if replicas is None:
            return Replicas()
        known = set(mates)
        ranks = [one for one in replicas.all_ranks() if one in known]
    if len(ranks) < 2:
        return Replicas()
    return Replicas(Mesh.of((len(ranks),), ranks), ranks.index(rank))


def _under_root(slices: Slices, rank: int, root: Mesh | None) -> Mesh | None:
    """The ranks of the root mesh that hold the same of a tensor, if its own mesh is a part of that."""
    mesh = slices.mesh
    if root is None or mesh is None or slices.cuts is None or rank not in (ranks := root.all_ranks()):
        return None
    at, coordinate = ranks.index(rank), list[int]()
    for size in reversed(root.shape):
        at, step = divmod(at, size)
        coordinate.insert(0, step)
    cut = {one.mesh_dim for one in slices.cuts}
    for dims in permutations(range(len(root.shape)), len(mesh.shape)):
        part = root.along(dims, tuple(coordinate))
        if (part.shape, part.all_ranks()) == (mesh.shape, mesh.all_ranks()):
            free = [dim for dim in range(len(root.shape)) if dim not in {dims[n] for n in cut}]
            return root.along(free, tuple(coordinate)) if free else None
    return None


def by_everybody(holdings: Mapping[str, Holding]) -> set[str]:
    """The names of the small whole tensors that each rank writes for itself."""
    names, total = set(), 0
    for name in sorted(name for name, one in holdings.items() if one.slices.is_plain):
        slices, item_bytes, _ = holdings[name]
        num_bytes = prod(slices.global_shape) * item_bytes
        if num_bytes <= EVERYBODY_BYTES and total + num_bytes <= EVERYBODY_TOTAL_BYTES:
            names.add(name)
            total += num_bytes
    return names


def _rows(rectangle: Rectangle, dim: int, start: int, stop: int) -> Rectangle:
    """These rows of it, counted along `dim`."""
    offsets, local, sizes = (list(facts) for facts in rectangle)
    offsets[dim] += start
    local[dim] += start
    sizes[dim] = stop - start
    return Rectangle(tuple(offsets), tuple(local), tuple(sizes))
