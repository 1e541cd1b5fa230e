"""The check of a save's values for NaN and infinity.

In: the layout of an archive, its blocks as they are digested. Out: the names of tensors with such values. Knows nothing
of: marks, who writes.

A block is checked by the thread that is about to digest it, so its bytes enter the cache once for both, and no memory
is held longer. The norm of a block is finite only if all its numbers are. torch computes it on the calling thread, at
the speed of memory, without a copy and without the GIL. If the norm is not finite, huge numbers may have overflowed, so
the minimum and the maximum decide. Adjacent tensors of one dtype are checked by one call; only if that call finds
something is each of them checked alone.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from operator import attrgetter
from typing import Final, NamedTuple

import torch

from ..format.layout import Layout, TensorPlan
from ..spec import BLOCK_BYTES, some_of, whole_count
from ..state.names import Select, selector, shown

_SHOWN: Final = 3
# For at most this many elements, torch uses only the calling thread. More threads would take processors from the
# training, and wait for each other where processors are scarce.
_SERIAL: Final = 32_767
# The dtype in which torch reads each format. A complex number is two numbers, and no block boundary divides one.
_NUMBERS: Final = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "complex128": torch.float64,
    "complex64": torch.float32,
    "complex32": torch.float16,
}
# Formats that torch cannot compare. Bitwise with the mask, the codes of NaN and Inf, of either sign, become at least
# the limit, and all other codes less.
_CODES: Final[dict[str, tuple[Callable[[torch.Tensor, int], torch.Tensor], int, int]]] = {
    "float8_e4m3fn": (torch.bitwise_and, 0x7F, 0x7F),
    "float8_e5m2": (torch.bitwise_and, 0x7F, 0x7C),
    "float8_e4m3fnuz": (torch.bitwise_xor, 0x7F, 0xFF),
    "float8_e5m2fnuz": (torch.bitwise_xor, 0x7F, 0xFF),
    "float8_e8m0fnu": (torch.bitwise_and, 0xFF, 0xFF),
}


@dataclass(frozen=True, slots=True)
class NonFinite:
    """A check of each save for NaN and Inf, which marks such a step as bad.

        AsyncCheckpointer("runs/a", check=NonFinite(every=10, ignore="*.attn_mask"))

    It checks all tensors of floating-point and complex numbers, such as weights and moments, in the host's copy of the
    state, on the threads that write it. The training does not wait for it. Groups that are `unchanged`, `driver=` and
    plain numbers are not checked. The note of the mark names the tensors. With several ranks, each one checks what it
    writes.

    Args:
        every: check the first save of the checkpointer, and every N-th from there. With 1, all saves.
        ignore: tensors that may have such values, such as masks: a name, a glob over dotted paths, or several of them.

    Raises ValueError and TypeError for other values.
    """

    every: int = 1
    ignore: Select = None

    def __post_init__(self) -> None:
        whole_count("NonFinite(every=…)", self.every)
        selector(self.ignore, what="NonFinite(ignore=…)")


class _FloatExtent(NamedTuple):
    """The place of a tensor: offsets from the end of the index, its dtype, and the number of its spec."""

    begin: int
    end: int
    dtype: str
    number: int


class _Floats:
    """The places of a plan's floating-point tensors. All saves of one plan share them."""

    def __init__(self, plan: TensorPlan, ignore: Select) -> None:
        self.plan, self._ignore = plan, ignore

    @cached_property  # computed on the first thread that asks, never the caller's; two threads would compute the same
    def tensors(self) -> list[_FloatExtent]:
        ignored, specs = selector(self._ignore), self.plan.specs
        return [
            _FloatExtent(begin, begin + num_bytes, specs[number].dtype, number)
            for begin, num_bytes, number in self.plan.in_file_order
            if specs[number].dtype in _NUMBERS or specs[number].dtype in _CODES
            if not (ignored and ignored(specs[number].path))
        ]

    @cached_property
    def joined(self) -> list[_FloatExtent]:
        """The same extents, with adjacent extents of one dtype joined."""
        joined: list[_FloatExtent] = []
        for one in self.tensors:
            if joined and (joined[-1].end, joined[-1].dtype) == (one.begin, one.dtype):
                one = joined.pop()._replace(end=one.end)
            joined.append(one)
        return joined


class FiniteCheck:
    """The check of one archive's values. `note` is called from any thread, once for each block of the archive."""

    def __init__(self, floats: _Floats, base: int) -> None:
        self._floats, self._base = floats, base
        self._found: set[int] = set()  # numbers of specs; any thread adds one

    def note(self, number: int, block: memoryview) -> None:
        """Check block `number` of the file."""
        offset = number * BLOCK_BYTES - self._base  # from the end of the index, as in the plan
        for extent in _within(self._floats.joined, offset, len(block)):
            if _has_non_finite(extent, offset, block):
                begin, end = max(offset, extent.begin), min(offset + len(block), extent.end)
                tensors = _within(self._floats.tensors, begin, end - begin)
                self._found.update(one.number for one in tensors if _has_non_finite(one, offset, block))

    def found(self) -> str:
        """The tensors with NaN or Inf, in words; empty if there are none. Call it once every block is noted."""
        names = [shown(self._floats.plan.specs[number].path) for number in sorted(self._found)]
        return f"NaN or Inf in {some_of(names, _SHOWN)}" if names else ""


class FiniteChecks:
    """The checks of all saves of one checkpointer, which creates it. Used by any thread that saves."""

    def __init__(self, rule: NonFinite) -> None:
        self._rule, self._numbers = rule, itertools.count()
        self._floats: _Floats | None = None  # the last plan's; replaced as a whole

    def of(self, layout: Layout) -> FiniteCheck | None:
        """The check of the next save; None if that save is not checked."""
        if next(self._numbers) % self._rule.every:
            return None
        floats = self._floats
        if floats is None or floats.plan is not layout.plan:
            floats = self._floats = _Floats(layout.plan, self._rule.ignore)
        return FiniteCheck(floats, layout.base)


def _within(extents: Sequence[_FloatExtent], begin: int, length: int) -> Sequence[_FloatExtent]:
    """The extents that have bytes in [begin, begin + length). `extents` are in ascending order."""
    first = bisect_right(extents, begin, key=attrgetter("end"))
    return extents[first : bisect_left(extents, begin + length, lo=first, key=attrgetter("begin"))]


def _has_non_finite(extent: _FloatExtent, offset: int, block: memoryview) -> bool:
    """True if the part of an extent in a block, which begins at `offset`, has NaN or Inf."""
    begin, end = max(extent.begin - offset, 0), min(extent.end - offset, len(block))
    raw = torch.frombuffer(block[begin:end], dtype=torch.uint8)
    if (codes := _CODES.get(extent.dtype)) is not None:
        operation, mask, limit = codes
        return any(int(operation(part, mask).max()) >= limit for part in raw.split(_SERIAL))
    numbers = raw.view(_NUMBERS[extent.dtype])
    if numbers.dtype != torch.float16 and isfinite(torch.linalg.vector_norm(numbers)):  # float16 is slow there
        return False
    return not all(isfinite(end) for part in numbers.split(_SERIAL) for end in torch.aminmax(part))
