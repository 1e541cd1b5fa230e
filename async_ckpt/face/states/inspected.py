"""The names in a checkpoint, with their shapes and places, without reading its tensors.

In: a path. Out: a row of plain values for each name. Knows nothing of: statistics, terminals. Nothing is unpickled.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, TypeAlias

from ...core.loading.archives.contents import Contents, Part
from ...core.loading.archives.find import from_path
from ...core.report import paragraph, sized, table
from ...core.spec import DTYPES
from ...core.state.names import dotted, shown
from ...core.state.tree import StoredLeaf, ValuesByRank, parts_in
from ...core.storage.place import Anywhere, place_of

# Takes an archive and the numbers of the tensors to measure; returns a function from a number to its statistics.
Measuring: TypeAlias = Callable[[Contents, Sequence[int]], Callable[[int], dict[str, float] | None]]

_RANK: Final = re.compile(r"rank_(\d{5,})[^/]*$")
# The names that a notebook shows.
_SHOWN: Final = 100
_SHOWN_ENTRIES: Final = 12


@dataclass(frozen=True, slots=True)
class BytesInFile:
    """A part of a tensor in a file: `num_bytes` from `offset` on. `rank` is the rank that has written the file."""

    file: str
    offset: int
    num_bytes: int
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class NameRow:
    """One name of a checkpoint. `kind` is "tensor", "array", "bytes", "object" or "value"; only a value has `value`.

    For a step that several ranks have saved, `ranks` lists those that have written parts of a tensor. `places` is where
    its bytes are; for such a step they must be requested, since every archive has to be opened to find them.
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


@dataclass(frozen=True, slots=True)
class Inspection:
    """The names in a checkpoint, in its order, as `inspect` returns them.

    Printed as a table; a notebook also shows a picture of the sizes of the top-level entries.

        async_ckpt.inspect("runs/a").entries  # {"model": 497759232, "optimizer": 995518464}
    """

    path: str
    names: tuple[NameRow, ...]

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors; tied tensors count once."""
        return sum(self.entries.values())

    @property
    def entries(self) -> dict[str, int]:
        """The bytes of the tensors below each top-level entry; tied tensors count once."""
        return entry_sizes(self.names)

    def __str__(self) -> str:
        rows = [f"{row.name}  {'  '.join(_cells(row)[1:])}".rstrip() for row in self.names]
        return "\n".join([self._summary, *rows])

    @property
    def _summary(self) -> str:
        return f"{self.path}: {len(self.names):,} names, {sized(self.num_bytes)}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002
        printer.text(str(self))

    def _repr_html_(self) -> str:
        largest = sorted(self.entries.items(), key=lambda one: -one[1])[:_SHOWN_ENTRIES]
        more = f"and {len(self.names) - _SHOWN:,} more" if len(self.names) > _SHOWN else ""
        return (
            paragraph(self._summary)
            + table(("entry", "size"), ((name, sized(num_bytes)) for name, num_bytes in largest))
            + table(("name", "type", "shape", "size"), map(_cells, self.names[:_SHOWN]))
            + (paragraph(more) if more else "")
        )


def inspect(path: Anywhere) -> Inspection:
    """List the names in a checkpoint, with types, shapes, sizes and plain values. Reads no tensor, unpickles nothing.

        print(async_ckpt.inspect("runs/a"))

    `path` is an archive, the folder of a step, the root of a run (its newest step), a safetensors file, or a folder of
    Hugging Face or torch.distributed.checkpoint; a path, a URL or a Place.

    Raises NotCommittedError, CorruptCheckpointError, FormatVersionError and StorageUnavailableError.
    """
    rows = from_path(path, lambda parts: rows_of(parts, ()), verify=True)
    return Inspection(place_of(path).shown, tuple(rows))


def entry_sizes(rows: Sequence[NameRow]) -> dict[str, int]:
    """The bytes below each top-level entry; tied tensors count once."""
    sizes: dict[str, int] = {}
    for row in rows:
        if row.num_bytes and row.alias_of is None:
            top = row.name.partition(".")[0]
            sizes[top] = sizes.get(top, 0) + row.num_bytes
    return sizes


def _cells(row: NameRow) -> tuple[str, str, str, str]:
    shape = "" if row.shape is None else "x".join(map(str, row.shape)) or "scalar"
    if row.kind == "value":
        return row.name, "value", repr(row.value)[:80], ""
    return row.name, row.dtype or row.kind, shape, sized(row.num_bytes) if row.dtype else ""


def rows_of(
    parts: Sequence[Part], patterns: Sequence[str], *, measured_by: Measuring | None = None, places: bool = False
) -> list[NameRow]:
    """The rows of all names that a pattern matches, or that are below such a name, in the order of the checkpoint;
    without patterns, of all names. `measured_by` adds the statistics of tensors.
    """
    return [row for part in parts for row in _rows_in(part, patterns, measured_by, places=places)]


def _rows_in(part: Part, patterns: Sequence[str], measured_by: Measuring | None, *, places: bool) -> Iterator[NameRow]:
    archive = part.archive
    tree, _ = archive.tree(groups=part.groups)
    matching = [
        (path, leaf)
        for path, leaf in walked(tree, ())
        if not patterns or any(_matches(dotted(path), pattern) for pattern in patterns)
    ]
    stored = [leaf for _, leaf in matching if isinstance(leaf, StoredLeaf) and leaf.kind != "object"]
    if measured_by or places:
        archive.need((leaf.number, None) for leaf in stored)
    numbers = [leaf.number for leaf in stored if leaf.kind == "tensor"]
    statistics = None if measured_by is None else measured_by(archive, numbers)
    for path, leaf in matching:
        yield _row(archive, path, leaf, statistics, places=places)


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


def _row(
    archive: Contents,
    path: tuple[Any, ...],
    leaf: Any,
    statistics: Callable[[int], dict[str, float] | None] | None,
    *,
    places: bool,
) -> NameRow:
    """The row of a leaf, with the statistics of a tensor if `statistics` is given."""
    name = shown(path)
    if not isinstance(leaf, StoredLeaf):
        return NameRow(name, "value", value=leaf if _is_json(leaf) else repr(leaf)[:200])
    if leaf.kind == "object":
        return NameRow(name, "object")
    tensor = archive.index.tensors[leaf.number]
    primary = archive.primary(leaf.number)
    num_bytes = math.prod(tensor.shape) * DTYPES[tensor.dtype][0]
    ranks = tuple(archive.writers(primary))
    return NameRow(
        name,
        {"ndarray": "array"}.get(leaf.kind, leaf.kind),
        tensor.dtype,
        tuple(tensor.shape),
        num_bytes,
        None if primary == leaf.number else shown(archive.index.tensors[primary].path),
        ranks,
        places_of(archive, primary) if places or not ranks else (),
        stats=statistics(primary) if statistics is not None and leaf.kind == "tensor" else None,
    )


def places_of(archive: Contents, number: int) -> tuple[BytesInFile, ...]:
    """The places of a tensor's bytes, with each item once."""
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


def _rank_of(path: str) -> int | None:
    match = _RANK.search(path)
    return int(match[1]) if match else None


def walked(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The leaves of a tree with their paths. A list without tensors is one leaf, as is an empty dict below the top
    level. Values that were saved per rank are below their name, as "rank 3".
    """
    inner: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, ValuesByRank):
        inner = [(f"rank {rank}", one) for rank, one in value.values.items()]
    elif isinstance(value, list | tuple | deque) and any(parts_in(value, StoredLeaf)):
        inner = list(enumerate(value))
    if inner:
        for key, one in inner:
            yield from walked(one, (*path, key))
    elif path or not isinstance(value, dict | ValuesByRank):
        yield path, value
