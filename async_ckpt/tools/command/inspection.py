"""The names in a checkpoint, with their shapes, places and statistics.

In: a place. Out: rows of plain values as a table or JSON; plain values as JSON, a single tensor as torch prints it.
Knows nothing of: command-line arguments. Nothing is unpickled.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Final

import torch

from ... import Place
from ...plumbing import contents, find, leaf_names, reports, states
from .comparing.tensor_differences import ITEMS_AT_ONCE, numbers
from .output import Answer, as_json_text, counted, if_known, in_table, print_json, print_table, print_text, short

# As in torch: of larger tensors, only the items at the ends of each dimension are printed.
_PRINTED_ITEMS: Final = 1000
_EDGE_ITEMS: Final = 3
_SHOWN_TOTALS: Final = 8
# The statistics of a tensor, with the headings of their columns.
_STATISTICS: Final = {
    "min": "min", "max": "max", "mean": "mean", "std": "std", "norm": "norm", "num_nan": "NaN", "num_inf": "Inf",
}  # fmt: skip


def show(place: Place, *, names: Sequence[str] | None, stats: bool, as_json: bool) -> None:
    """Print the names in a checkpoint, as a table or a JSON document."""
    patterns = names or ()
    rows, items = find.from_path(
        place, lambda parts: _looked_at(parts, patterns, stats=stats, places=as_json), verify=True
    )
    if patterns and not rows:
        raise Answer(f"{place.shown}: no name in it matches {', '.join(patterns)}")
    if as_json:
        print_json("names", {"place": place.shown, "names": rows})
        return
    if patterns and all(row.kind == "value" for row in rows):
        if len(rows) == 1 and rows[0].name == patterns[0]:  # a single plain value, without its name
            print(as_json_text(rows[0].value))
        else:
            lines = (f" {as_json_text(row.name)}: {as_json_text(row.value)}" for row in rows)
            print("{\n" + ",\n".join(lines) + "\n}")
        return
    files = FilesOfRows.of(rows)
    headings = [f">{name}" for name in _STATISTICS.values()] if stats else ["value or place"]
    if not rows:
        print_text("0 names: it is empty", "dim")
        return
    print_table(
        ("name", "type", "shape", ">size", *headings),
        (_cells(row, files, stats=stats) for row in rows),
    )
    if items is not None:
        print(items)
        for stored in rows[0].places:
            unit = "byte" if stored.num_bytes == 1 else "bytes"
            print_text(f"{stored.file}: {stored.num_bytes:,} {unit} from {stored.offset:,}", "dim")
    else:
        print_text(_totals(rows, files), "dim")


def _cells(row: states.NameRow, files: FilesOfRows, *, stats: bool) -> Iterator[str | None]:
    yield row.name
    kind = row.dtype if row.kind == "tensor" and row.dtype else row.kind
    yield f"array of {row.dtype}" if row.kind == "array" else kind
    yield if_known(row.shape, lambda shape: "x".join(map(str, shape)) or "scalar")
    yield in_table(row.num_bytes) if row.dtype else None
    if stats:
        yield from ("" if row.stats is None else f"{row.stats[key]:.5g}" for key in _STATISTICS)
    else:
        yield _value_or_place(row, files)


@dataclass(frozen=True, slots=True)
class FilesOfRows:
    """The files of some rows: their common folder, and the file that has the most rows."""

    folder: str
    main: str | None
    has_others: bool

    @classmethod
    def of(cls, rows: Sequence[states.NameRow]) -> FilesOfRows:
        files = Counter(one.file for row in rows for one in row.places)
        if not files:
            return cls("", None, has_others=False)
        parents = zip(*(file.split("/")[:-1] for file in files), strict=False)
        common = (same[0] for same in takewhile(lambda names: len({*names}) == 1, parents))
        return cls("".join(f"{name}/" for name in common), max(files, key=files.__getitem__), len(files) > 1)

    def shown(self, file: str) -> str:
        return file.removeprefix(self.folder)


def _value_or_place(row: states.NameRow, files: FilesOfRows) -> str:
    """A short plain value. For a tensor its ranks, or its offset, and its file unless that is the main one."""
    if row.kind == "value":
        return short(row.value)
    if row.alias_of is not None:
        return f"same as {row.alias_of}"
    if row.ranks:
        return f"of rank{'s' if len(row.ranks) > 1 else ''} {_ranks(row)}"
    if len(row.places) == 1:
        (stored,) = row.places
        return f"at {stored.offset:,}" + ("" if stored.file == files.main else f" in {files.shown(stored.file)}")
    return counted(len(row.places), "part") if row.places else ""


def _totals(rows: Sequence[states.NameRow], files: FilesOfRows) -> str:
    """The number of names and bytes, and the bytes of the largest top-level entries."""
    totals = states.entry_sizes(rows)
    largest = sorted(totals, key=lambda top: -totals[top])
    parts = [f"{top} {reports.sized(totals[top])}" for top in largest[:_SHOWN_TOTALS]]
    if len(largest) > _SHOWN_TOTALS:
        parts.append(f"{len(largest) - _SHOWN_TOTALS:,} more")
    inside = f" in {files.shown(files.main)}" if files.main else ""
    inside += " where no other file is named" if files.has_others else ""
    by_entry = f": {', '.join(parts)}" if parts else ""
    return f"{counted(len(rows), 'name')}, {reports.sized(sum(totals.values()))}{inside}{by_entry}"


def _ranks(row: states.NameRow) -> str:
    """The ranks that have written parts of a tensor, such as "0-3, 7"."""
    ranks = {*row.ranks}
    begins = [rank for rank in row.ranks if rank - 1 not in ranks]
    ends = [rank for rank in row.ranks if rank + 1 not in ranks]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(begins, ends, strict=True))


def _looked_at(
    parts: Sequence[contents.Part], patterns: Sequence[str], *, stats: bool, places: bool
) -> tuple[list[states.NameRow], str | None]:
    """The rows. If a single tensor was requested, also its items as torch prints them."""

    def measured(archive: contents.Contents, numbers: Sequence[int]) -> Callable[[int], dict[str, float] | None]:
        return partial(statistics, states.TensorReader(archive, numbers))

    rows = states.rows_of(parts, patterns, measured_by=measured if stats else None, places=places)
    if not patterns or len(rows) != 1 or rows[0].kind not in ("tensor", "array"):
        return rows, None
    for part in parts:
        tree, _ = part.archive.tree(groups=part.groups)
        for path, leaf in states.walked(tree, ()):
            if leaf_names.shown(path) == rows[0].name and isinstance(leaf, contents.StoredLeaf):
                number = part.archive.primary(leaf.number)
                return [replace(rows[0], places=states.places_of(part.archive, number))], printed(part.archive, number)
    return rows, None


def printed(archive: contents.Contents, number: int) -> str:
    """A tensor as torch prints it. Of a large tensor, only the items to print are kept: three at each end."""
    shape = tuple(archive.index.tensors[number].shape)
    kept_sizes = [min(size, 2 * _EDGE_ITEMS + 1) for size in shape] if math.prod(shape) > _PRINTED_ITEMS else [*shape]
    indices = torch.zeros((), dtype=torch.int64)
    for size, kept_size in zip(shape, kept_sizes, strict=True):
        ends = torch.arange(kept_size)
        if kept_size < size:
            ends[-_EDGE_ITEMS:] += size - kept_size
        indices = indices.unsqueeze(-1) * size + ends
    flat = indices.reshape(-1)  # the ascending positions of the kept items in the tensor
    dtype, begin = archive.dtype(number), 0
    kept = torch.empty(len(flat), dtype.itemsize, dtype=torch.uint8)  # bytes: few operations support every dtype
    for items in states.TensorReader(archive, [number]).chunks(number):
        inside = slice(*torch.searchsorted(flat, torch.tensor([begin, begin + len(items)])).tolist())
        kept[inside] = items.view(torch.uint8).view(-1, dtype.itemsize)[flat[inside] - begin]
        begin += len(items)
    return _text_of(kept.view(-1).view(dtype).view(kept_sizes), is_summary=kept_sizes != [*shape])


def _text_of(items: torch.Tensor, *, is_summary: bool) -> str:
    torch.set_printoptions(threshold=0 if is_summary else _PRINTED_ITEMS, edgeitems=_EDGE_ITEMS)
    try:
        return str(items)
    except (RuntimeError, TypeError):  # torch cannot print a few dtypes
        rows = items.reshape(-1).view(torch.uint8).view(*items.shape, items.dtype.itemsize)
        return f"as bytes, since torch cannot print {items.dtype}: {rows}"
    finally:
        torch.set_printoptions(profile="default")


def statistics(reader: states.TensorReader, number: int) -> dict[str, float] | None:
    """Minimum, maximum, mean, standard deviation and 2-norm of the finite items; the numbers of NaN and Inf.

    None for a dtype that torch cannot convert. Computed in pieces, whose deviations are combined (Chan, Golub, LeVeque
    1979).
    """
    count, mean, squares, norm2, num_nan, num_inf = 0, 0.0, 0.0, 0.0, 0, 0
    least, greatest = math.inf, -math.inf
    for items in _pieces(reader, number):
        if items is None:
            return None
        num_nan += int(items.isnan().sum())
        num_inf += int(items.isinf().sum())
        finite = items[items.isfinite()]
        if n := finite.numel():
            least, greatest = min(least, float(finite.min())), max(greatest, float(finite.max()))
            piece_mean = float(finite.mean())
            squares += float(((finite - piece_mean) ** 2).sum()) + (piece_mean - mean) ** 2 * count * n / (count + n)
            mean += (piece_mean - mean) * n / (count + n)
            norm2 += float((finite**2).sum())
            count += n
    return {
        "min": least if count else math.nan,
        "max": greatest if count else math.nan,
        "mean": mean if count else math.nan,
        "std": math.sqrt(squares / count) if count else math.nan,
        "norm": math.sqrt(norm2),
        "num_nan": num_nan,
        "num_inf": num_inf,
    }


def _pieces(reader: states.TensorReader, number: int) -> Iterator[torch.Tensor | None]:
    """The items of a tensor as float64, piece by piece. Complex items are replaced by their absolute values."""
    for items in (piece for chunk in reader.chunks(number) for piece in chunk.split(ITEMS_AT_ONCE)):
        found = numbers(items)
        yield found.abs() if found is not None and found.is_complex() else found
