"""Which of many overlapping rectangles of a tensor to take, so that each element is taken once; and what none of them has.

In: the shape of a tensor, and rectangles of it in the order in which they are preferred. Out: rectangles that do not
overlap. Knows nothing of: ranks, files, torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from .slices import Ints


class Box(NamedTuple):
    """The elements of a tensor from `offsets` on, `sizes` along each dimension."""

    offsets: Ints
    sizes: Ints

    @property
    def num_elements(self) -> int:
        return prod(self.sizes)

    @classmethod
    def whole(cls, shape: Ints) -> Box:
        return cls((0,) * len(shape), shape)

    def common(self, other: Box) -> Box | None:
        """What is in both; None if that is nothing."""
        begins, sizes = [], []
        for a, n, b, m in zip(*self, *other, strict=True):
            begin, end = max(a, b), min(a + n, b + m)
            if begin >= end:
                return None
            begins.append(begin)
            sizes.append(end - begin)
        return Box(tuple(begins), tuple(sizes))

    def __str__(self) -> str:
        """As it is written in Python: `[0:4, 2:6]`."""
        return f"[{', '.join(f'{at}:{at + size}' for at, size in zip(*self, strict=True))}]"


class Cover(NamedTuple):
    """`taken` are parts of boxes, each with the number of its box; `missing` is what no box has."""

    taken: list[tuple[int, Box]]
    missing: list[Box]


def cover(shape: Ints, boxes: Sequence[Box]) -> Cover:
    """Take each element of a tensor from the first of the boxes that has it.

    A box that is taken as a whole is taken in one part.
    """
    whole = Box.whole(shape)
    if not whole.num_elements:
        return Cover([], [])
    if whole in boxes[:1]:
        return Cover([(0, whole)], [])
    found: list[tuple[int | None, Box]] = []
    _sweep(whole, [(i, box) for i, box in enumerate(boxes) if box.num_elements], 0, found)
    parts: dict[int, list[Box]] = {}
    for number, part in found:
        if number is not None:
            parts.setdefault(number, []).append(part)
    taken = []
    for number, of_box in sorted(parts.items()):
        box = boxes[number]
        is_whole = sum(part.num_elements for part in of_box) == box.num_elements
        taken += [(number, part) for part in ([box] if is_whole else of_box)]
    return Cover(taken, [part for number, part in found if number is None])


def _sweep(
    within: Box, boxes: Sequence[tuple[int, Box]], dim: int, found: list[tuple[int | None, Box]]
) -> None:
    """Cut what is to be covered at every begin and end of a box along one dimension, and each strip along the next."""
    if not boxes:
        found.append((None, within))
        return
    number, first = boxes[0]
    if first.common(within) == within:
        found.append((number, within))
        return
    begin, end = within.offsets[dim], within.offsets[dim] + within.sizes[dim]
    cuts = {begin, end}
    for _, box in boxes:
        cuts |= {at for at in (box.offsets[dim], box.offsets[dim] + box.sizes[dim]) if begin < at < end}
    ends = sorted(cuts)
    by_begin = sorted(boxes, key=lambda one: one[1].offsets[dim])
    active: list[tuple[int, Box]] = []
    at = 0
    for start, stop in pairwise(ends):
        active = [one for one in active if one[1].offsets[dim] + one[1].sizes[dim] > start]
        while at < len(by_begin) and by_begin[at][1].offsets[dim] <= start:
            if by_begin[at][1].offsets[dim] + by_begin[at][1].sizes[dim] > start:
                active.append(by_begin[at])
            at += 1
        active.sort(key=lambda one: one[0])
        strip = Box(_with(within.offsets, dim, start), _with(within.sizes, dim, stop - start))
        _sweep(strip, active, dim + 1, found)


def _with(values: Ints, dim: int, value: int) -> Ints:
    return (*values[:dim], value, *values[dim + 1 :])


class StridedCopy(NamedTuple):
    """`length` bytes from byte `source` on go to byte `target`; and so on, `times` times, each some steps further."""

    source: int
    target: int
    length: int
    times: int = 1
    source_step: int = 0
    target_step: int = 0

    @property
    def source_bytes(self) -> int:
        """From its first byte to its last."""
        return (self.times - 1) * self.source_step + self.length

    def within(self, begin: int, end: int) -> Iterator[StridedCopy]:
        """Those of its bytes that lie in bytes [begin, end) of the source."""
        if self.times == 1:
            first, last = max(begin, self.source), min(end, self.source + self.length)
            if first < last:
                yield StridedCopy(first, self.target + first - self.source, last - first)
            return
        # The first that ends behind `begin`, and the first that begins at `end` or later.
        first = max(0, (begin - self.source - self.length) // self.source_step + 1)
        last = min(self.times, -(-(end - self.source) // self.source_step))
        while first < last and (one := self._one(first)).source < begin:
            yield from one.within(begin, end)
            first += 1
        cut: list[StridedCopy] = []
        while first < last and (one := self._one(last - 1)).source + self.length > end:
            cut += one.within(begin, end)
            last -= 1
        if first < last:
            one = self._one(first)
            yield self._replace(source=one.source, target=one.target, times=last - first)
        yield from cut

    def apart(self) -> Iterator[StridedCopy]:
        """Each of them on its own."""
        yield from map(self._one, range(self.times))

    def _one(self, number: int) -> StridedCopy:
        return StridedCopy(
            self.source + number * self.source_step, self.target + number * self.target_step, self.length
        )


def strided_copies(box: Box, source: Box, target: Box, item_bytes: int) -> Iterator[StridedCopy]:
    """How a box of a tensor is copied from a larger one to another, each of them dense, row by row."""
    length, source_step, target_step = item_bytes, item_bytes, item_bytes
    begin, into = 0, 0
    steps: list[tuple[int, int, int]] = []  # how many, and how far from one to the next; the innermost first
    for dim in reversed(range(len(box.sizes))):
        size = box.sizes[dim]
        begin += (box.offsets[dim] - source.offsets[dim]) * source_step
        into += (box.offsets[dim] - target.offsets[dim]) * target_step
        if not steps and (source_step, target_step) == (length, length):
            length *= size
        elif (
            steps
            and size > 1
            and (source_step, target_step) == (steps[-1][0] * steps[-1][1], steps[-1][0] * steps[-1][2])
        ):
            steps[-1] = (steps[-1][0] * size, *steps[-1][1:])
        elif size > 1:
            steps.append((size, source_step, target_step))
        source_step *= source.sizes[dim]
        target_step *= target.sizes[dim]
    (count, *step), *outer = steps or [(1, 0, 0)]
    for numbers in product(*(range(n) for n, _, _ in outer)):
        moved = [sum(n * one[of] for n, one in zip(numbers, outer, strict=True)) for of in (1, 2)]
        yield StridedCopy(begin + moved[0], into + moved[1], length, count, *step)
