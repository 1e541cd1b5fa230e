"""Rows of any length, between any places in memory, are copied as they are, and nothing beside them."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_ckpt.core.host.memory import Segment
from async_ckpt.core.host.pool import SegmentPool
from async_ckpt.core.loading.fill import _copy_rows, _FillTarget
from async_ckpt.core.slicing.boxes import StridedCopy
from async_ckpt.core.spec import MIB


def segment_of(data: bytes) -> Segment:
    (lease,) = SegmentPool(MIB, max_bytes=4 * MIB).borrow(1, pin=None)
    lease.segment.view[: len(data)] = data
    return lease.segment


@st.composite
def runs(draw: st.DrawFn) -> StridedCopy:
    """Often all distances but one or two are multiples of 2, 4 or 8."""
    unit = draw(st.sampled_from([1, 2, 4, 8]))
    shifts = draw(st.lists(st.integers(0, 4), min_size=0, max_size=2))
    length, source, target, source_gap, target_gap = draw(st.permutations(([*shifts, 0, 0, 0, 0, 0])[:5]))
    length += unit * draw(st.integers(1, 40))
    source_step = source_gap + length + unit * draw(st.integers(0, 40))
    target_step = target_gap + length + unit * draw(st.integers(0, 40))
    times = draw(st.integers(1, 100) | st.just(700))
    source, target = source + unit * draw(st.integers(0, 9)), target + unit * draw(st.integers(0, 9))
    return StridedCopy(source, target, length, times, source_step, target_step)


@settings(max_examples=300)
@given(run=runs(), lead=st.integers(0, 9), inference=st.booleans())
def test_rows_are_copied_as_they_are_and_nothing_beside_them(run, lead, inference):
    source = bytes(range(1, 252)) * (1 + (run.source + run.source_bytes) // 251)
    target_bytes = run.target + run.times * run.target_step + 9
    want = bytearray(lead + target_bytes)
    for copied in run.apart():
        at = lead + copied.target
        want[at : at + run.length] = source[copied.source : copied.source + run.length]
    with torch.inference_mode(inference):
        memory = torch.zeros(len(want), dtype=torch.uint8)
        target = _FillTarget(memory[lead:])

    _copy_rows(run, segment_of(source), target)

    assert bytes(memory.numpy()) == want
