"""The differences of two checkpoints, name by name.

In: two places with checkpoints of any format. Out: rows of plain values, and their table. Knows nothing of: arguments.
Both checkpoints are read piece by piece. Objects are unpickled only with `trust`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

import torch
import typer

from .... import Place
from ....errors import CheckpointError, UntrustedObjectError
from ....plumbing import contents, leaf_names, states
from ..exit_statuses import for_each
from ..output import NO, USAGE, Answer, counted, if_known, print_json, print_table, print_text
from ..run_places import everywhere
from .equality import Equality, equality
from .tensor_differences import TensorDifference

# Rows are sorted by this order, then by the largest difference.
_ORDER: Final = ("only in A", "only in B", "kind", "shape", "dtype", "value", "within tolerance", "not compared")
_NOT_COMPARED: Final = "not compared"
_SHOWN_LENGTH: Final = 40


@dataclass(frozen=True, slots=True)
class DifferenceRow:
    """A name that differs. `what` is the kind of the difference, one of `_ORDER`.

    Objects are "not compared" if they were not unpickled, or if their parts are not known. For tensors of one shape:
    `max_abs` is the largest absolute difference, `max_rel` the largest relative to B, and `share` the share of items
    whose bits differ. If only one of two items is NaN, their difference is infinite.
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
        return self.what not in ("within tolerance", _NOT_COMPARED)


class DiffResult(NamedTuple):
    """The names that differ, the number of all names, and the number of names that are equal in every bit."""

    rows: list[DifferenceRow]
    num_names: int
    num_equal: int


def show(a: Place, *, all_: bool, as_json: bool, **options: Any) -> None:
    """Compare a checkpoint with another one. `all_` compares the checkpoint at each place of its run."""
    for name in ("rtol", "atol"):
        if not 0 <= options[name] < math.inf:
            raise Answer(f"--{name} must be a number from 0 on, got {options[name]:g}", USAGE)
    for_each(partial(_diff, as_json=as_json, **options), everywhere([a], asks_all=all_), with_headings=not as_json)


def _diff(
    a: Place, *, b: Place, select: Sequence[str] | None, rtol: float, atol: float, trust: bool, as_json: bool
) -> None:
    """Print the names that differ, the largest difference first, as a table or a JSON document. Raises typer.Exit if
    something differs by more than the tolerances, or cannot be compared.
    """
    options: dict[str, Any] = {"select": select or None, "trust": trust}

    def compare(ours: states.Items) -> DiffResult | CheckpointError:
        try:
            return states.with_items(b, lambda theirs: differences(ours, theirs, rtol=rtol, atol=atol), **options)
        except CheckpointError as error:
            return error  # raised outside: inside, it would count as damage of A

    try:
        compared = states.with_items(a, compare, **options)
        if isinstance(compared, CheckpointError):
            raise compared
    except UntrustedObjectError as error:
        raise Answer(str(error), USAGE) from error  # nothing was compared
    rows, num_names, num_equal = compared
    num_different = sum(row.counts for row in rows)
    num_unknown = sum(row.what == _NOT_COMPARED for row in rows)
    if as_json:
        document = {"a": a.shown, "b": b.shown, "num_names": num_names, "num_equal": num_equal}
        print_json("differences", {**document, "differences": rows})
    else:
        _print(rows)
        unknown = f", {num_unknown:,} not compared" if num_unknown else ""
        print_text(
            f"{counted(num_names, 'name')}: {num_equal:,} equal in every bit, {num_different:,} different{unknown}",
            "dim",
        )
    if num_different or num_unknown:
        raise typer.Exit(NO if num_different else USAGE)


def _print(rows: Sequence[DifferenceRow]) -> None:
    if not rows:
        return
    print_table(
        ("name", "what", "A", "B", ">max abs", ">max rel", ">items"),
        (
            (
                *(row.name, row.what, row.a, row.b),
                *(if_known(one, "{:.3g}".format) for one in (row.max_abs, row.max_rel)),
                if_known(row.share, "{:.2%}".format),
            )
            for row in rows
        ),
    )


# --- names --------------------------------------------------------------------------------------------------------


def differences(ours: states.Items, theirs: states.Items, *, rtol: float = 0.0, atol: float = 0.0) -> DiffResult:
    """Compare two checkpoints. Rows are sorted by the kind of difference, then by its size."""
    naming = max(ours.naming, theirs.naming)
    pairs = [*_pairs(ours.leaves, theirs.leaves, naming)]
    if not (ours.keeps_empty and theirs.keeps_empty):
        pairs = [(a, b) for a, b in pairs if (a and b) or (a or b).kind != "empty"]  # type: ignore[union-attr]
    names = _Names([leaf.path for items in (ours, theirs) for leaf in items.leaves])
    compared = (_compared(a, b, names, rtol=rtol, atol=atol) for a, b in pairs)
    rows = [row for row in compared if row is not None]
    num_names, num_equal = len(pairs), len(pairs) - len(rows)
    if naming is states.PathForm.EXACT:
        around = [row for row in _containers_compared(ours.containers, theirs.containers, names) if row is not None]
        rows, num_names = rows + around, num_names + len(around)
    rows.sort(key=lambda row: (_ORDER.index(row.what), -(row.max_abs or 0.0), row.name))
    return DiffResult(rows, num_names, num_equal)


_Pair = tuple[states.NamedItem | None, states.NamedItem | None]


def _pairs(
    ours: Iterable[states.NamedItem], theirs: Iterable[states.NamedItem], naming: states.PathForm
) -> Iterator[_Pair]:
    """The pairs of items with one name, in the order of A. None stands for an item that one checkpoint lacks.

    Items with identical paths are paired first. If a format keeps less of a path, as `naming` says, the other items are
    paired by the part that it keeps, unless several items share it.
    """
    a, b = ({states.typed(item.path): item for item in items} for items in (ours, theirs))
    partner = {path: path for path in a if path in b}
    if naming is not states.PathForm.EXACT:
        loose = leaf_names.dotted if naming is states.PathForm.FLAT else lambda path: tuple(map(str, path))
        alone_a, alone_b = (_alone(loose, (p for p in one if p not in partner), one) for one in (a, b))
        partner |= {path: alone_b[name] for name, path in alone_a.items() if name in alone_b}
    for path, item in a.items():
        yield item, b.pop(partner[path]) if path in partner else None
    yield from ((None, item) for item in b.values())


def _alone(
    loose: Callable[[states.Path], Hashable],
    paths: Iterable[states.Path],
    items: Mapping[states.Path, states.NamedItem],
) -> dict[Hashable, states.Path]:
    """The paths by their loose names, without paths that share a loose name."""
    named = [(loose(items[path].path), path) for path in paths]
    counts = Counter(name for name, _ in named)
    return {name: path for name, path in named if counts[name] == 1}


class _Names:
    """The names of paths for people: dotted, unless two paths would look the same."""

    def __init__(self, paths: Iterable[states.Path]) -> None:
        typed_of: dict[str, states.Path] = {}
        self._ambiguous = {
            name
            for path in paths
            if typed_of.setdefault(name := leaf_names.dotted(path), key := states.typed(path)) != key
        }

    def of(self, path: states.Path) -> str:
        if leaf_names.dotted(path) not in self._ambiguous:
            return leaf_names.shown(path)
        return leaf_names.printable(".".join(states.shown_value(key) for key in path)) or "the state"


# --- containers ---------------------------------------------------------------------------------------------------


def _containers_compared(
    ours: Iterable[states.Container], theirs: Iterable[states.Container], names: _Names
) -> Iterator[DifferenceRow | None]:
    """The differences of containers that both checkpoints have, apart from their items."""
    others = {states.typed(container.path): container for container in theirs}
    for a in ours:
        b = others.get(states.typed(a.path))
        if b is None:
            continue
        row = DifferenceRow(names.of(a.path), "", a.of[-_SHOWN_LENGTH:], b.of[-_SHOWN_LENGTH:])
        yield replace(row, what="kind") if a.of != b.of else _with_equality(row, equality(a.beside, b.beside))


# --- items --------------------------------------------------------------------------------------------------------


def _compared(
    a: states.NamedItem | None, b: states.NamedItem | None, names: _Names, *, rtol: float, atol: float
) -> DifferenceRow | None:
    """The difference of two items; None if they are equal in every bit."""
    if a is None or b is None:
        item = a or b
        assert item is not None
        side = "only in A" if b is None else "only in B"
        return DifferenceRow(names.of(item.path), side, _about(a), _about(b))
    row = DifferenceRow(names.of(a.path), "", _about(a), _about(b))
    if a.kind != b.kind:  # one of them may be an unread pickle
        return replace(row, what=_NOT_COMPARED if states.Unread in (type(a.value), type(b.value)) else "kind")
    if a.dtype is None or b.dtype is None:
        return _with_equality(row, _equality_of_values(a, b))
    if a.chunks is None or b.chunks is None:
        return _with_equality(row, equality(a.value, b.value)) if a.chunks is b.chunks else replace(row, what="kind")
    if a.kind == "array" and a.facts != b.facts:
        return replace(row, what="shape" if _dtype_in(a) == _dtype_in(b) else "dtype")
    if a.shape != b.shape:
        return replace(row, what="shape")
    try:
        difference = TensorDifference(math.prod(a.shape), rtol, atol)
        for left, right in states.side_by_side(a.chunks(), b.chunks()):
            difference.add(left, right)
        return _with_difference(row, a, b, difference)
    except CheckpointError:
        raise
    except (RuntimeError, TypeError):  # torch does not support this dtype
        return replace(row, what=_NOT_COMPARED)


def _with_difference(
    row: DifferenceRow, a: states.NamedItem, b: states.NamedItem, difference: TensorDifference
) -> DifferenceRow | None:
    """The row of two tensors or arrays of one shape whose items have been compared."""
    facts = Equality.EQUAL if None in (a.facts, b.facts) else equality(a.facts, b.facts)
    if a.kind == "array" and a.facts is not None:  # different bytes may be padding between fields
        return _with_equality(row, equality(_array(a), _array(b))) if difference.num_different else None
    share = difference.num_different / max(1, difference.num_items)
    measured = replace(row, share=share)
    if difference.is_measured:
        measured = replace(measured, max_abs=difference.max_abs, max_rel=difference.max_rel)
    if facts is Equality.DIFFERENT:
        return replace(measured, what="kind")
    if a.dtype != b.dtype:
        return replace(measured, what="dtype")
    if difference.num_different:
        is_value = difference.is_beyond or not (difference.rtol or difference.atol)
        return replace(measured, what="value" if is_value else "within tolerance")
    return _with_equality(row, facts)


def _dtype_in(item: states.NamedItem) -> Any:
    """The dtype of an array, as numpy describes it."""
    return item.dtype if item.facts is None else json.loads(item.facts)[0]


def _array(item: states.NamedItem) -> Any:
    """An array that is stored as bytes. Raises ValueError if its bytes do not fit."""
    assert item.chunks is not None
    descr, shape = json.loads(item.facts)
    pieces = [piece.clone() for piece in item.chunks()]
    data = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)
    return contents.StoredLeaf("ndarray", 0, descr, shape).as_array(data)


def _equality_of_values(a: states.NamedItem, b: states.NamedItem) -> Equality:
    if isinstance(a.value, states.Unread) or isinstance(b.value, states.Unread):
        return Equality.EQUAL if a.value == b.value else Equality.UNKNOWN
    if a.kind == "value":
        node = states.node_of(a.value)
        if node is not None:
            return Equality.EQUAL if node == states.node_of(b.value) else Equality.DIFFERENT
    return equality(a.value, b.value)


def _with_equality(row: DifferenceRow, found: Equality) -> DifferenceRow | None:
    if found is Equality.EQUAL:
        return None
    return replace(row, what="value" if found is Equality.DIFFERENT else _NOT_COMPARED)


def _about(item: states.NamedItem | None) -> str:
    """An item in few words."""
    if item is None:
        return ""
    if item.kind in ("empty", "code"):
        return item.kind
    if item.dtype is None:
        return states.shown_value(item.value)[:_SHOWN_LENGTH]
    if item.facts is not None and item.kind == "array":
        descr, shape = json.loads(item.facts)
        return f"array of {descr!s:.30} {_shown_shape(shape)}"
    words = [str(item.dtype).removeprefix("torch."), _shown_shape(item.shape), *_extras(item)]
    return " ".join((["array of"] if item.kind == "array" else ["bytes"] if item.kind == "bytes" else []) + words)


def _shown_shape(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _extras(item: states.NamedItem) -> Iterator[str]:
    """Further facts about a tensor in a file of torch.save."""
    if item.kind != "tensor" or item.facts is None:
        return
    kind, requires_grad, attributes = item.facts
    if item.chunks is None:
        yield states.kind_of_tensor(item.value)
    if kind is not torch.Tensor:
        yield kind.__qualname__
    if requires_grad and kind is not torch.nn.Parameter:
        yield "requires_grad"
    if attributes:
        yield f"with {', '.join(attributes)}"
