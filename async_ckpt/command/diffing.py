"""The differences of two checkpoints, name by name.

In: two places with checkpoints of any format. Out: rows of plain values, and their table. Knows nothing of: arguments.
Both are read piece by piece, and nothing is unpickled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, NamedTuple

import torch
import typer

from ..errors import CheckpointError
from ..state.tree import StoredLeaf
from ..storage.place import Place
from .screen import NO, counted, escaped, print_json, print_table, print_text
from .sources import NamedItem, shown_name, shown_value, with_items

# The order of the rows, beside the largest difference.
_ORDER: Final = ("only in A", "only in B", "kind", "shape", "dtype", "value", "within tolerance", "not compared")
# What is compared at once: some temporaries of eight bytes per item exist then.
_ITEMS_AT_ONCE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class DifferenceRow:
    """A name that differs. `what` is "only in A", "only in B", "kind", "shape", "dtype", "value", "within tolerance" or
    "not compared", for objects, which are not unpickled.

    Of tensors of one shape: the largest absolute difference, the largest relative to B, and the share of items whose
    bits differ. NaN in one of two items is an infinite difference.
    """

    name: str
    what: str
    a: str
    b: str
    max_abs: float | None = None
    max_rel: float | None = None
    share: float | None = None

    @property
    def counts(self) -> bool:
        return self.what not in ("within tolerance", "not compared")

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class DiffResult(NamedTuple):
    """The names that differ, the number of all names, and of those that are equal in every bit."""

    rows: list[DifferenceRow]
    num_names: int
    num_equal: int


def show(a: Place, b: Place, *, select: Sequence[str], rtol: float, atol: float, trust: bool, as_json: bool) -> None:
    """Print the names that differ, the largest difference first, or their document.

    Raises:
        typer.Exit: something differs by more than the tolerances.
    """
    options: dict[str, Any] = {"select": list(select) or None, "trust": trust}

    def compare(ours: Sequence[NamedItem]) -> DiffResult | CheckpointError:
        try:
            return with_items(b, lambda theirs: differences(ours, theirs, rtol=rtol, atol=atol), **options)
        except CheckpointError as error:
            return error  # it is no fault of A, which would be looked for anew

    compared = with_items(a, compare, **options)
    if isinstance(compared, CheckpointError):
        raise compared
    rows, num_names, num_equal = compared
    num_different = sum(row.counts for row in rows)
    if as_json:
        document = {"a": a.shown, "b": b.shown, "num_names": num_names, "num_equal": num_equal}
        print_json("differences", {**document, "differences": [row.as_json() for row in rows]})
    else:
        if rows:
            print_table(
                ("name", "what", "A", "B", "max abs", "max rel", "items"),
                (
                    (
                        escaped(row.name),
                        row.what,
                        escaped(row.a),
                        escaped(row.b),
                        "" if row.max_abs is None else f"{row.max_abs:.3g}",
                        "" if row.max_rel is None else f"{row.max_rel:.3g}",
                        "" if row.share is None else f"{row.share:.2%}",
                    )
                    for row in rows
                ),
                right=("max abs", "max rel", "items"),
            )
        print_text(
            f"{counted(num_names, 'name')}: {num_equal:,} equal in every bit, {num_different:,} different", "dim"
        )
    if num_different:
        raise typer.Exit(NO)


def differences(
    ours: Sequence[NamedItem], theirs: Sequence[NamedItem], *, rtol: float = 0.0, atol: float = 0.0
) -> DiffResult:
    """The names that differ, the largest difference first; the number of names, and of those that are equal."""
    a, b = {item.name: item for item in ours}, {item.name: item for item in theirs}
    names = [*a, *(name for name in b if name not in a)]
    compared = (_compared(a.get(name), b.get(name), rtol=rtol, atol=atol) for name in names)
    rows = [row for row in compared if row is not None]
    rows.sort(key=lambda row: (_ORDER.index(row.what), -(row.max_abs or 0.0), row.name))
    return DiffResult(rows, len(names), len(names) - len(rows))


def _compared(a: NamedItem | None, b: NamedItem | None, *, rtol: float, atol: float) -> DifferenceRow | None:
    """The difference of two items; None if they are equal in every bit."""
    if a is None or b is None:
        one = a or b
        assert one is not None
        what = "only in A" if b is None else "only in B"
        return DifferenceRow(shown_name(one), what, _about(a), _about(b))
    row = DifferenceRow(shown_name(a), "", _about(a), _about(b))
    if (a.dtype is None) != (b.dtype is None):
        return _with(row, "kind")
    if a.dtype is None or b.dtype is None:
        return _values_compared(row, a.value, b.value)
    if a.shape != b.shape:
        return _with(row, "shape")
    difference = _tensors_compared(a, b, rtol, atol)
    if a.dtype != b.dtype:
        return _with(row, "dtype", difference)
    if not difference.num_different:
        return None
    return _with(row, "value" if difference.is_beyond or not (rtol or atol) else "within tolerance", difference)


def _values_compared(row: DifferenceRow, a: Any, b: Any) -> DifferenceRow | None:
    if isinstance(a, StoredLeaf) or isinstance(b, StoredLeaf):
        return _with(row, "not compared" if isinstance(a, StoredLeaf) and isinstance(b, StoredLeaf) else "kind")
    if type(a) is type(b) and repr(a) == repr(b):  # by texts: NaN is equal to NaN, and 1 not to True
        return None
    return _with(row, "value")


@dataclass(slots=True)
class TensorDifference:
    """The difference of two tensors of one shape, added up over their pieces."""

    num_items: int
    rtol: float
    atol: float
    max_abs: float = 0.0
    max_rel: float = 0.0
    num_different: int = 0  # items whose bits differ; of two dtypes, whose values do
    is_beyond: bool = False  # some item is beyond |a - b| <= atol + rtol * |b|, as in torch.allclose

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add pieces that lie at the same place."""
        if a.dtype == b.dtype:
            size = a.dtype.itemsize
            different = (a.view(torch.uint8).view(-1, size) != b.view(torch.uint8).view(-1, size)).any(1)
        else:
            different = _numbers(a) != _numbers(b)
        count = int(different.sum())
        if not count:
            return
        self.num_different += count
        ours, theirs = _numbers(a[different]), _numbers(b[different])
        same = (ours == theirs) | (ours.isnan() & theirs.isnan())  # 0.0 and -0.0, two kinds of NaN, two infinities
        distance = (ours - theirs).abs().where(~same, 0.0).nan_to_num(nan=math.inf, posinf=math.inf)
        size_of_b = theirs.abs()
        relative = (distance / size_of_b).where(distance > 0, 0.0).nan_to_num(nan=math.inf, posinf=math.inf)
        self.max_abs = max(self.max_abs, float(distance.max()))
        self.max_rel = max(self.max_rel, float(relative.max()))
        allowed = (self.atol + self.rtol * size_of_b).nan_to_num(nan=0.0, posinf=0.0)
        self.is_beyond |= bool((distance > allowed).any())


def _numbers(items: torch.Tensor) -> torch.Tensor:
    return items.to(torch.complex128 if items.is_complex() else torch.float64)


def _tensors_compared(a: NamedItem, b: NamedItem, rtol: float, atol: float) -> TensorDifference:
    assert a.chunks is not None
    assert b.chunks is not None
    difference = TensorDifference(math.prod(a.shape), rtol, atol)
    left = right = torch.empty(0)
    chunks_a, chunks_b = a.chunks(), b.chunks()
    while True:  # pieces of different dtypes have different lengths
        left = left if len(left) else next(chunks_a, left)
        right = right if len(right) else next(chunks_b, right)
        count = min(len(left), len(right))
        if not count:
            return difference
        for begin in range(0, count, _ITEMS_AT_ONCE):
            end = min(count, begin + _ITEMS_AT_ONCE)
            difference.add(left[begin:end], right[begin:end])
        left, right = left[count:], right[count:]


def _with(row: DifferenceRow, what: str, difference: TensorDifference | None = None) -> DifferenceRow:
    if difference is None:
        return replace(row, what=what)
    return replace(
        row,
        what=what,
        max_abs=difference.max_abs,
        max_rel=difference.max_rel,
        share=difference.num_different / max(1, difference.num_items),
    )


def _about(item: NamedItem | None) -> str:
    if item is None:
        return ""
    if item.dtype is None:
        return shown_value(item.value)[:40]
    return f"{str(item.dtype).removeprefix('torch.')} {'x'.join(map(str, item.shape)) or 'scalar'}"
