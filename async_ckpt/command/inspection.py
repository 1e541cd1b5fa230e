"""The names in a checkpoint, with their shapes, places and statistics.

In: a place. Out: rows of plain values, and their table. Knows nothing of: arguments. Nothing is unpickled.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Final

import torch

from ..loading.archives.contents import Contents, Part
from ..loading.archives.find import from_path
from ..report import sized
from ..spec import DTYPES
from ..state.names import dotted, shown
from ..state.tree import StoredLeaf
from ..storage.place import Place
from .screen import Answer, escaped, print_json, print_table, print_text, short
from .sources import chunks, walked

_RANK: Final = re.compile(r"rank_(\d{5,})[^/]*$")
# As torch prints: larger tensors are summed up by the items at the ends of each dimension.
_PRINTED_ITEMS: Final = 1000
_EDGE_ITEMS: Final = 3
# Statistics are computed of so many at once: some temporaries of eight bytes per item exist then.
_ITEMS_AT_ONCE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class BytesInFile:
    """A part of a tensor in a file: `num_bytes` from `offset` on. `rank` is the one that has written the file."""

    file: str
    offset: int
    num_bytes: int
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class NameRow:
    """One name of a checkpoint. `kind` is "tensor", "array", "bytes", "object" or "value"; only a value has `value`.

    `ranks` have written parts of a tensor. `places` are where its bytes are, if they were asked for: each archive has
    to be opened for that, but not for the ranks.
    """

    name: str
    kind: str
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    num_bytes: int = 0
    alias_of: str | None = None
    ranks: tuple[int, ...] = ()
    places: tuple[BytesInFile, ...] = ()
    value: Any = None
    stats: dict[str, float] | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def show(place: Place, patterns: Sequence[str], *, stats: bool, as_json: bool) -> None:
    """Print the table of the names in a checkpoint, or its document.

    Raises:
        Answer: none of the names matches.
    """
    rows, items = from_path(place, lambda parts: _looked_at(parts, patterns, stats=stats, places=as_json), verify=True)
    if not rows:
        raise Answer(f"{place.shown}: none of its names is {', '.join(patterns)}")
    if as_json:
        print_json("names", {"place": place.shown, "names": [row.as_json() for row in rows]})
        return
    statistics = ("min", "max", "mean", "std", "norm", "num_nan", "num_inf") if stats else ()
    print_table(
        ("name", "kind", "dtype", "shape", "size", "value", *statistics, "ranks"),
        ((*_columns(row), *_statistics_in(row, statistics), _ranks(row)) for row in rows),
        right=("size", *statistics),
    )
    if items is not None:
        print_text(items)
        for one in rows[0].places:
            print_text(escaped(f"{one.file}: {one.num_bytes:,} bytes from {one.offset:,}"), "dim")
    totals: dict[str, int] = {}
    for row in rows:
        top = row.name.partition(".")[0]
        totals[top] = totals.get(top, 0) + (row.num_bytes if row.alias_of is None else 0)
    parts = ", ".join(f"{escaped(top)} {sized(size)}" for top, size in totals.items() if size)
    print_text(f"{len(rows)} names, {sized(sum(totals.values()))}" + (f": {parts}" if parts else ""), "dim")


def _columns(row: NameRow) -> tuple[str, ...]:
    return (
        escaped(row.name),
        row.kind if row.alias_of is None else f"= {escaped(row.alias_of)}",
        row.dtype or "",
        "" if row.shape is None else "x".join(map(str, row.shape)) or "scalar",
        sized(row.num_bytes) if row.dtype else "",
        short(row.value) if row.kind == "value" else "",
    )


def _statistics_in(row: NameRow, keys: Sequence[str]) -> Iterator[str]:
    return ("" if row.stats is None else f"{row.stats[key]:.5g}" for key in keys)


def _ranks(row: NameRow) -> str:
    """The ranks that have written parts of a tensor, such as "0-3, 7"; nothing if it was rank 0 alone."""
    if row.ranks in ((), (0,)):
        return ""
    ranks = {*row.ranks}
    begins = [rank for rank in row.ranks if rank - 1 not in ranks]
    ends = [rank for rank in row.ranks if rank + 1 not in ranks]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(begins, ends, strict=True))


def _rank_of(path: str) -> int | None:
    match = _RANK.search(path)
    return int(match[1]) if match else None


def _looked_at(
    parts: Sequence[Part], patterns: Sequence[str], *, stats: bool, places: bool
) -> tuple[list[NameRow], str | None]:
    """The rows, and the items of the tensor as torch prints them if it is the only one that was asked for."""
    rows = rows_of(parts, patterns, stats=stats, places=places)
    if not patterns or len(rows) != 1 or rows[0].kind not in ("tensor", "array"):
        return rows, None
    for part in parts:
        tree, _ = part.archive.tree(groups=part.groups)
        for path, leaf in walked(tree, ()):
            if shown(path) == rows[0].name and isinstance(leaf, StoredLeaf):
                number = part.archive.primary(leaf.number)
                return [replace(rows[0], places=_places(part.archive, number))], printed(part.archive, number)
    return rows, None


def printed(archive: Contents, number: int) -> str:
    """A tensor as torch prints it. Of a large one, only the items that are shown are kept: three at each end."""
    shape = tuple(archive.index.tensors[number].shape)
    kept_sizes = [min(size, 2 * _EDGE_ITEMS + 1) for size in shape] if math.prod(shape) > _PRINTED_ITEMS else [*shape]
    indices = torch.zeros((), dtype=torch.int64)
    for size, kept_size in zip(shape, kept_sizes, strict=True):
        ends = torch.arange(kept_size)
        if kept_size < size:
            ends[-_EDGE_ITEMS:] += size - kept_size
        indices = indices.unsqueeze(-1) * size + ends
    flat = indices.reshape(-1)  # ascending: where the kept items are in the tensor
    dtype, begin = archive.dtype(number), 0
    kept = torch.empty(len(flat), dtype.itemsize, dtype=torch.uint8)  # bytes, since few operations know every dtype
    for items in chunks(archive, number):
        inside = slice(*torch.searchsorted(flat, torch.tensor([begin, begin + len(items)])).tolist())
        kept[inside] = items.view(torch.uint8).view(-1, dtype.itemsize)[flat[inside] - begin]
        begin += len(items)
    return _text_of(kept.view(-1).view(dtype).view(kept_sizes), is_summary=kept_sizes != [*shape])


def _text_of(items: torch.Tensor, *, is_summary: bool) -> str:
    torch.set_printoptions(threshold=0 if is_summary else _PRINTED_ITEMS, edgeitems=_EDGE_ITEMS)
    try:
        return str(items)
    finally:
        torch.set_printoptions(profile="default")


def rows_of(
    parts: Sequence[Part], patterns: Sequence[str], *, stats: bool = False, places: bool = False
) -> list[NameRow]:
    """The names that one of the patterns matches, or that lie below one, in the order of the checkpoint; without
    patterns, all.
    """
    return [row for part in parts for row in _rows_in(part, patterns, stats=stats, places=places)]


def _rows_in(part: Part, patterns: Sequence[str], *, stats: bool, places: bool) -> Iterator[NameRow]:
    archive = part.archive
    archive.learn_names()
    tree, _ = archive.tree(groups=part.groups)
    matching = [
        (path, leaf)
        for path, leaf in walked(tree, ())
        if not patterns or any(_matches(dotted(path), pattern) for pattern in patterns)
    ]
    stored = [leaf for _, leaf in matching if isinstance(leaf, StoredLeaf) and leaf.kind != "object"]
    if stats or places:
        archive.need((leaf.number, None) for leaf in stored)
    for path, leaf in matching:
        yield _row(archive, path, leaf, stats=stats, places=places)


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


def _row(archive: Contents, path: tuple[Any, ...], leaf: Any, *, stats: bool, places: bool) -> NameRow:
    name = shown(path)
    if not isinstance(leaf, StoredLeaf):
        return NameRow(name, "value", value=leaf if _is_json(leaf) else repr(leaf)[:200])
    if leaf.kind == "object":
        return NameRow(name, "object")
    tensor = archive.index.tensors[leaf.number]
    primary = archive.primary(leaf.number)
    num_bytes = math.prod(tensor.shape) * DTYPES[tensor.dtype][0]
    return NameRow(
        name,
        {"ndarray": "array"}.get(leaf.kind, leaf.kind),
        tensor.dtype,
        tuple(tensor.shape),
        num_bytes,
        None if primary == leaf.number else shown(archive.index.tensors[primary].path),
        tuple(archive.writers(primary)),
        _places(archive, primary) if places else (),
        stats=statistics(archive, primary) if stats and leaf.kind == "tensor" else None,
    )


def _places(archive: Contents, number: int) -> tuple[BytesInFile, ...]:
    """Where the bytes of a tensor are, each item once."""
    return tuple(
        BytesInFile(file.path, piece.extent.offset, piece.extent.length, _rank_of(file.path))
        for file, piece, _ in archive.sources(number)
    )


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return value is None or isinstance(value, bool | int | float | str)


def statistics(archive: Contents, number: int) -> dict[str, float]:
    """Least, greatest, mean, standard deviation and 2-norm of the finite items, and how many are NaN or infinite.

    Computed in pieces of a million items. The deviation is put together from those of the pieces (Chan, Golub, LeVeque
    1979).
    """
    count, mean, squares, norm2, num_nan, num_inf = 0, 0.0, 0.0, 0.0, 0, 0
    least, greatest = math.inf, -math.inf
    for items in _pieces(archive, number):
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


def _pieces(archive: Contents, number: int) -> Iterator[torch.Tensor]:
    """The items of a tensor as float64, piece by piece; of complex ones the absolute values."""
    for chunk in chunks(archive, number):
        for items in chunk.split(_ITEMS_AT_ONCE):
            yield (items.abs() if items.is_complex() else items).to(torch.float64)
