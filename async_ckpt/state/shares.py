"""Who writes: which part of what several ranks hold alike each of them writes, without asking the others.

In: what this rank holds, and with whom. Out: the rectangles that it writes. Knows nothing of: tensors, other ranks' states.

All that one set of ranks holds alike is a line of its own: laid end to end in the order of names, and divided into as many
shares of the same number of bytes as there are ranks. Every one of them has the same line, so no two write the same and
nothing is left out. A line across sets could not be computed alike everywhere: of two ranks each would give a tensor to
the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Final, NamedTuple

from ..spec import KIB, MIB
from .slices import Rectangle, Replicas, Slices

# Of this arithmetic. It is stored with what was written by it: a reader has to find the owners of old checkpoints too.
VERSION: Final = 1
# What is larger is cut at rows; the rest goes whole to one rank, so that a state does not fall into crumbs.
CUT_BYTES: Final = MIB
# Small whole tensors are written by every rank that has them, so that its archive has its own values of what may turn out
# to differ (running statistics, step counters), at a price that nobody notices.
EVERYBODY_BYTES: Final = 64 * KIB
EVERYBODY_TOTAL_BYTES: Final = 16 * MIB


class Holding(NamedTuple):
    """What a rank holds of one tensor, and which ranks hold the same: `slices.replicas()`, or a wider set if more is known."""

    slices: Slices
    item_bytes: int
    replicas: Replicas


class _Piece(NamedTuple):
    name: str
    rectangle: Rectangle
    num_bytes: int


def written(holdings: Mapping[str, Holding]) -> dict[str, tuple[Rectangle, ...]]:
    """For each tensor that this rank holds, by its name, the rectangles of it that it writes: all, some or none of them.

    Over the ranks of a set, which must hold the same under the same names, every element is written once; small tensors
    that are whole on each are written by all of them.
    """
    taken: dict[str, list[Rectangle]] = {name: [] for name in holdings}
    lines: dict[Replicas, list[_Piece]] = {}
    everybody = by_everybody(holdings)
    for name in sorted(holdings):
        slices, item_bytes, replicas = holdings[name]
        if slices.is_copy:
            continue
        if name in everybody or replicas.size == 1:
            taken[name].extend(slices.rectangles)
        else:
            line = lines.setdefault(replicas, [])
            line.extend(_Piece(name, one, one.num_elements * item_bytes) for one in slices.rectangles)
    for replicas, line in lines.items():
        for name, rectangle in _share(line, replicas.number, replicas.size):
            taken[name].append(rectangle)
    return {name: tuple(rectangles) for name, rectangles in taken.items()}


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


def _share(line: list[_Piece], number: int, shares: int) -> Iterable[tuple[str, Rectangle]]:
    """What of a line lies in the share of this number."""
    total = sum(piece.num_bytes for piece in line)
    first, last = total * number // shares, total * (number + 1) // shares
    at = 0
    for name, rectangle, num_bytes in line:
        if num_bytes >= CUT_BYTES:
            dim, rows = next((dim, size) for dim, size in enumerate(rectangle.sizes) if size > 1)
            row_bytes = num_bytes // rows
            # The row in which a share begins belongs to the share before it.
            start, stop = (min(max(0, -(-(end - at) // row_bytes)), rows) for end in (first, last))
            if start < stop:
                yield name, _rows(rectangle, dim, start, stop)
        elif first <= at < last:
            yield name, rectangle
        at += num_bytes


def _rows(rectangle: Rectangle, dim: int, start: int, stop: int) -> Rectangle:
    """These rows of it, counted along `dim`."""
    offsets, local, sizes = (list(facts) for facts in rectangle)
    offsets[dim] += start
    local[dim] += start
    sizes[dim] = stop - start
    return Rectangle(tuple(offsets), tuple(local), tuple(sizes))
