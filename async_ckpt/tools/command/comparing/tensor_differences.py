"""The difference of two tensors, added up piece by piece.

In: pieces of both tensors at the same position, of any dtypes. Out: the largest difference, and the number of items
that differ. Knows nothing of: names, files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

# How many items are compared at once. Each needs several temporaries of eight bytes.
ITEMS_AT_ONCE: Final = 1 << 20
# Float64 represents every integer below this exactly.
_EXACT: Final = 2.0**53
_WIDE_INTEGERS: Final = (torch.int64, torch.uint64)
# The numbers of float4_e2m1fn by their bits (OCP Microscaling Formats, table 7).
_FLOAT4: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def numbers(items: torch.Tensor) -> torch.Tensor | None:
    """Flat dense items as float64 or complex128; None for a dtype that torch cannot convert.

    An item of `float4_e2m1fn_x2` becomes two numbers.
    """
    if items.dtype is torch.float4_e2m1fn_x2:
        pairs = items.view(torch.uint8)
        return torch.tensor(_FLOAT4, dtype=torch.float64)[torch.stack((pairs & 15, pairs >> 4), -1).view(-1).long()]
    try:
        return items.to(torch.complex128 if items.is_complex() else torch.float64)
    except (RuntimeError, TypeError):  # NotImplementedError is a RuntimeError
        return None


@dataclass(slots=True)
class TensorDifference:
    """The difference of two tensors of one shape. `diffing` creates one for each pair, and adds their pieces."""

    num_items: int
    rtol: float
    atol: float
    max_abs: float = 0.0
    max_rel: float = 0.0
    num_different: int = 0  # items whose bits differ, or whose values differ if the dtypes differ
    is_beyond: bool = False  # some item is beyond |a - b| <= atol + rtol * |b|, as in torch.allclose
    is_measured: bool = True  # False if some items are not numbers

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add two pieces at the same position."""
        for begin in range(0, len(a), ITEMS_AT_ONCE):
            self._add(a[begin : begin + ITEMS_AT_ONCE], b[begin : begin + ITEMS_AT_ONCE])

    def _add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        if a.dtype == b.dtype:
            rows_a, rows_b = _rows(a), _rows(b)
            different = (rows_a != rows_b).any(1)
            self.num_different += int(different.sum())
            if not different.any():
                return
            # As bytes, since few operations support every dtype.
            a, b = rows_a[different].view(-1).view(a.dtype), rows_b[different].view(-1).view(b.dtype)
        ours, theirs = numbers(a), numbers(b)
        if ours is None or theirs is None or len(ours) != len(theirs):
            self.is_measured, self.is_beyond = False, True
            return
        if a.dtype != b.dtype:
            self.num_different += int((ours != theirs).sum())
        self._measure(ours, theirs, _exact_distance(a, b))

    def _measure(self, ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor | None) -> None:
        same = (ours == theirs) | (ours.isnan() & theirs.isnan())  # 0.0 and -0.0, two kinds of NaN, two infinities
        distance = (ours - theirs).abs().where(~same, 0.0)
        if exact is not None:
            distance = distance.where(distance >= _EXACT, exact)
        distance = distance.nan_to_num(nan=math.inf, posinf=math.inf)
        size_of_b = theirs.abs()
        relative = (distance / size_of_b).where(distance > 0, 0.0).nan_to_num(nan=math.inf, posinf=math.inf)
        self.max_abs = max(self.max_abs, float(distance.max()))
        self.max_rel = max(self.max_rel, float(relative.max()))
        allowed = (self.atol + self.rtol * size_of_b).nan_to_num(nan=0.0, posinf=0.0)
        self.is_beyond |= bool((distance > allowed).any())


def _rows(items: torch.Tensor) -> torch.Tensor:
    """The bytes of flat items, one row per item."""
    return items.view(torch.uint8).view(-1, items.dtype.itemsize)


def _exact_distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    """The exact distances of 64-bit integers, wrong if they overflow; None for other dtypes."""
    if a.dtype != b.dtype or a.dtype not in _WIDE_INTEGERS:
        return None
    return (a.view(torch.int64) - b.view(torch.int64)).abs().to(torch.float64)
