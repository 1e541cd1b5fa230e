"""A tensor covered by overlapping boxes, each element taken from one of them; and the bytes to copy between boxes.

In: the shape of a tensor, and boxes of it in order of preference. Out: boxes that do not overlap, and the elements that
are in no box. Knows nothing of: ranks, files, torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import NamedTuple

from ..spec import Box as Box
from .slices import Ints


class Cover(NamedTuple):
    """The result of `cover`: `taken` are parts of boxes, each with its box's number; `missing` is in no box."""

    taken: list[tuple[int, Box]]
    missing: list[Box]


def cover(shape: Ints, boxes: Sequence[Box]) -> Cover:
    """Take each element of a tensor from the first box that contains it. A box that is taken whole is one part."""
    whole = Box.whole(shape)
    if not whole.num_elements:
        return Cover([], [])
    if whole in boxes[:1]:
        return Cover([(0, whole)], [])
    strips: list[tuple[int | None, Box]] = []
    _sweep(whole, [(i, box) for i, box in enumerate(boxes) if box.num_elements], 0, strips)
    parts: dict[int, list[Box]] = {}
    for number, part in strips:
        if number is not None:
            parts.setdefault(number, []).append(part)
    taken = []
    for number, of_box in sorted(parts.items()):
        box = boxes[number]
        is_whole = sum(part.num_elements for part in of_box) == box.num_elements
        taken += [(number, part) for part in ([box] if is_whole else of_box)]
    return Cover(taken, [part for number, part in strips if number is None])


def _sweep(within: Box, boxes: Sequence[tuple[int, Box]], dim: int, strips: list[tuple[int | None, Box]]) -> None:
    """Cut `within` at each begin and end of a box along one dimension, and each strip along the next dimension."""
    if not boxes:
        strips.append((None, within))
        return
    number, first = boxes[0]
    if first.common(within) == within:
        strips.append((number, within))
        return
    begin, end = within.offsets[dim], within.offsets[dim] + within.sizes[dim]
    cuts = {begin, end}
    for _, box in boxes:
        cuts |= {at for at in (box.offsets[dim], box.offsets[dim] + box.sizes[dim]) if begin < at < end}
    ends = sorted(cuts)
    by_begin = sorted(boxes, key=lambda numbered: numbered[1].offsets[dim])
    active: list[tuple[int, Box]] = []
    at = 0
    for start, stop in pairwise(ends):
        active = [(n, box) for n, box in active if box.offsets[dim] + box.sizes[dim] > start]
        while at < len(by_begin) and by_begin[at][1].offsets[dim] <= start:
            if by_begin[at][1].offsets[dim] + by_begin[at][1].sizes[dim] > start:
                active.append(by_begin[at])
            at += 1
        active.sort(key=lambda numbered: numbered[0])
        strip = Box(_with(within.offsets, dim, start), _with(within.sizes, dim, stop - start))
        _sweep(strip, active, dim + 1, strips)


def _with(values: Ints, dim: int, value: int) -> Ints:
    return (*values[:dim], value, *values[dim + 1 :])


class StridedCopy(NamedTuple):
    """`times` copies of `length` bytes, the first from byte `source` to byte `target`, each next one a step further."""

    source: int
    target: int
    length: int
    times: int = 1
    source_step: int = 0
    target_step: int = 0

    @property
    def source_bytes(self) -> int:
        """The number of source bytes from the first copy to the last."""
        return (self.times - 1) * self.source_step + self.length

    @property
    def source_end(self) -> int:
        return self.source + self.source_bytes

    def moved(self, num_bytes: int) -> StridedCopy:
        """The same copies from a source that begins `num_bytes` earlier."""
        return StridedCopy(self.source + num_bytes, *self[1:])

    def within(self, begin: int, end: int) -> Iterator[StridedCopy]:
        """The parts of the copies that read bytes [begin, end) of the source."""
        if self.times == 1:
            first, last = max(begin, self.source), min(end, self.source + self.length)
            if first < last:
                yield StridedCopy(first, self.target + first - self.source, last - first)
            return
        # The first copy that ends after `begin`, and the first that begins at `end` or later.
        first = max(0, (begin - self.source - self.length) // self.source_step + 1)
        last = min(self.times, -(-(end - self.source) // self.source_step))
        while first < last and (head := self._one(first)).source < begin:
            yield from head.within(begin, end)
            first += 1
        cut: list[StridedCopy] = []
        while first < last and (tail := self._one(last - 1)).source + self.length > end:
            cut += tail.within(begin, end)
            last -= 1
        if first < last:
            head = self._one(first)
            yield StridedCopy(head.source, head.target, self.length, last - first, *self[4:])
        yield from cut

    def apart(self) -> Iterator[StridedCopy]:
        """The copies as separate ones, with `times` 1."""
        yield from map(self._one, range(self.times))

    def _one(self, number: int) -> StridedCopy:
        return StridedCopy(
            self.source + number * self.source_step, self.target + number * self.target_step, self.length
        )


def strided_copies(box: Box, source: Box, target: Box, item_bytes: int) -> Iterator[StridedCopy]:
    """The copies that bring a box of a tensor from one larger box to another. Both are dense, in row-major order."""
    length, source_step, target_step = item_bytes, item_bytes, item_bytes
    begin, into = 0, 0
    steps: list[tuple[int, int, int]] = []  # count, and distances in source and target; innermost first
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
        moved = [sum(n * distances[of] for n, distances in zip(numbers, outer, strict=True)) for of in (1, 2)]
        yield StridedCopy(begin + moved[0], into + moved[1], length, count, *step)
