"""Which rectangles of a tensor are read from where, against arithmetic done element by element."""

import json
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slices import examples

from async_ckpt.core.slicing.boxes import Box, cover, strided_copies
from async_ckpt.core.slicing.locator import ShardLocator, StepLayout

Ints = tuple[int, ...]


@st.composite
def boxes_in(draw: st.DrawFn, shape: Ints, *, least: int = 0) -> Box:
    offsets = tuple(draw(st.integers(0, size - least)) for size in shape)
    sizes = tuple(draw(st.integers(least, size - at)) for size, at in zip(shape, offsets, strict=True))
    return Box(offsets, sizes)


shapes = st.lists(st.integers(1, 6), max_size=3).map(tuple)


def block(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(at, at + size) for at, size in zip(*box, strict=True))]


@settings(max_examples=examples(600))
@given(st.data())
def test_each_element_is_taken_once_from_the_first_box_that_has_it(data):
    shape = data.draw(shapes)
    boxes = data.draw(st.lists(boxes_in(shape), max_size=6))
    first = torch.full(shape, -1)
    for number, box in reversed(list(enumerate(boxes))):
        block(first, box).fill_(number)

    taken, missing = cover(shape, boxes)

    found = torch.full(shape, -2)
    for number, box in [*taken, *((-1, box) for box in missing)]:
        assert bool((block(found, box) == -2).all()), "taken twice"
        block(found, box).fill_(number)
    assert torch.equal(found, first)
    numbers = [number for number, _ in taken]
    for number in {n for n in numbers if int((first == n).sum()) == boxes[n].num_elements}:
        assert (number, boxes[number]) in taken, "taken as a whole, and yet in parts"


def test_a_grid_of_many_boxes_is_covered_quickly():
    """1,024 ranks: each box is looked at in its own strip alone."""
    boxes = [Box((4 * i, 4 * j), (4, 4)) for i in range(32) for j in range(32)]
    compared = 0

    class Counting(Box):
        def common(self, other: Box) -> Box | None:
            nonlocal compared
            compared += 1
            return super().common(other)

    taken, missing = cover((128, 128), [Counting(*box) for box in boxes])

    assert len(taken) == len(boxes)
    assert not missing
    assert compared < 3 * len(boxes)


@settings(max_examples=examples(600))
@given(st.data())
def test_a_box_is_copied_byte_by_byte_to_where_it_belongs(data):
    """Also in pieces, as reads of a file cut it."""
    shape, item_bytes = data.draw(shapes), data.draw(st.sampled_from([1, 4]))
    source, target = data.draw(boxes_in(shape, least=1)), data.draw(boxes_in(shape, least=1))
    box = source.common(target)
    if box is None:
        return
    whole = torch.arange(math.prod(shape) * item_bytes).reshape(*shape, item_bytes)
    held, into = block(whole, source).flatten(), torch.full((*target.sizes, item_bytes), -1).flatten()
    cuts = sorted({0, len(held), *data.draw(st.lists(st.integers(0, len(held)), max_size=4))})

    for run in strided_copies(box, source, target, item_bytes):
        for begin, end in pairwise(cuts):
            for part in run.within(begin, end):
                assert begin <= part.source
                assert part.source + part.source_bytes <= end
                for one in part.apart():
                    into[one.target : one.target + one.length] = held[one.source : one.source + one.length]

    expected = torch.full((*shape, item_bytes), -1)
    block(expected, box).copy_(block(whole, box))
    assert torch.equal(into.reshape(*target.sizes, item_bytes), block(expected, target))


@pytest.mark.parametrize(
    ("source", "target", "num_runs"),
    [
        (Box((0, 0, 0), (8, 4, 4)), Box((0, 0, 0), (8, 4, 4)), 1),
        (Box((0, 0, 0), (8, 4, 4)), Box((2, 0, 0), (3, 4, 4)), 1),
        (Box((0, 0, 0), (8, 4, 4)), Box((0, 0, 1), (8, 4, 2)), 1),
        (Box((0, 0, 0), (8, 4, 4)), Box((0, 1, 1), (8, 2, 2)), 8),
    ],
    ids=["whole", "rows", "columns", "cut twice"],
)
def test_what_is_regular_is_one_run_that_repeats(source, target, num_runs):
    box = source.common(target)
    assert box is not None

    assert len(list(strided_copies(box, source, target, 4))) == num_runs


def test_a_box_is_shown_as_python_writes_it():
    assert str(Box((0, 2), (4, 3))) == "[0:4, 2:5]"


def test_a_value_that_is_no_tensor_is_looked_for_at_the_rank_that_has_written_it():
    written = {"first": ["model.steps", "epoch"], "second": ["loader"]}  # as a planner has divided them
    structures = {
        digest: "\n".join(json.dumps([name, None, None, None]) for name in names) for digest, names in written.items()
    }
    locator = ShardLocator(StepLayout({"first": [0], "second": [1]}, structures))

    assert locator.naming(["loader"]) == {1}
    assert locator.naming(["epoch", "loader"]) == {0, 1}
    assert locator.naming(["of no rank"]) == set()
