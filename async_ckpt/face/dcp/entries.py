"""The content of a step, by its names in torch.distributed.checkpoint.

In: opened archives. Out: items, and values as torch.save writes them. Knows nothing of: plans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ...core.loading.archives.archive import OpenArchive
from ...core.loading.archives.contents import CPU, Contents, Part
from ...core.loading.archives.merged_archives import MergedArchives
from ...core.loading.archives.step_archives import Readers
from ...core.loading.fill import Wanted
from ...core.ranks.world import world_of
from ...core.runs.record import DCP_RECORD
from ...core.slicing.locator import StepItem
from ...core.spec import with_article
from ...core.state.names import Path, Select, dtype_name, selector, shown
from ...core.state.tree import StoredLeaf, ValuesByRank, parts_in, replaced
from .metadata import flattened


class SavedItem(NamedTuple):
    """An item of the state as in torch's metadata: its path, its value, and the file that contains it."""

    path: Path
    value: Any
    file: Contents

    @property
    def tensor(self) -> int | None:
        """The number of the tensor in the file; None for other values."""
        is_tensor = isinstance(self.value, StoredLeaf) and self.value.kind == "tensor"
        return self.file.primary(self.value.number) if is_tensor else None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        assert self.tensor is not None
        return self.file.index.tensors[self.tensor].shape

    @property
    def described(self) -> StepItem:
        """The item as in a layout. Raises FormatVersionError for a dtype that this version of torch lacks."""
        if self.tensor is None:
            return StepItem(self.path)
        return StepItem(self.path, dtype_name(self.file.dtype(self.tensor)), self.shape)


def readers_of_this_rank(from_ranks: Mapping[str, int] | None) -> Readers:
    """The readers for this rank: with several ranks, each gets its own values."""
    world = world_of()
    return Readers(None if world.is_one else (world.rank, world.size), from_ranks)


def kept_metadata(parts: Sequence[Part]) -> Mapping[str, Any]:
    """The metadata that `TarStorageWriter` keeps in the record of a step."""
    kept = None if parts[0].manifest is None else parts[0].manifest.record.get(DCP_RECORD)
    return kept if isinstance(kept, dict) else {}


def identity_of(parts: Sequence[Part]) -> str:
    """A string that identifies a checkpoint, and does not depend on which of its files are open."""
    manifest, file = parts[0].manifest, parts[0].archive
    if manifest is not None:
        return f"step {manifest.step}, attempt {manifest.attempt}"
    return file.digest if isinstance(file, OpenArchive) else f"{file.path}, {len(file.index.tensors)} tensors"


def listed_items(parts: Sequence[Part]) -> Sequence[StepItem]:
    """The items in the layout of a step, for which no archive has to be opened. Empty without a layout."""
    archive = parts[0].archive
    return archive.items if len(parts) == 1 and isinstance(archive, MergedArchives) else ()


def entries_of(parts: Sequence[Part]) -> dict[str, SavedItem]:
    """The items of a step, by torch's names. Raises TypeError if it is not a dict, and ValueError for equal names."""
    items: dict[str, SavedItem] = {}
    for part in parts:
        part.archive.learn_names()
        tree, _ = part.archive.tree(groups=part.groups)
        if not isinstance(tree, dict):
            kind = tree.kind if isinstance(tree, StoredLeaf) else type(tree).__name__
            raise TypeError(
                f"{part.archive.path}: torch.distributed.checkpoint loads dicts, but this is {with_article(kind)}; "
                "load it with async_ckpt.load"
            )
        for name, (path, value) in flattened(tree).items():
            items[name] = SavedItem(path, value, part.archive)
    return items


def selected(entries: dict[str, SavedItem], select: Select) -> dict[str, SavedItem]:
    """The items that a user has selected. Raises KeyError if there is none."""
    chosen = selector(select)
    if chosen is None:
        return entries
    found = {name: entry for name, entry in entries.items() if chosen(entry.path)}
    if not found:
        raise KeyError(f"select={select!r} matches nothing; there are {', '.join(sorted(entries)[:5])}, …")
    return found


def value_of(name: str, entry: SavedItem, *, trust: bool) -> tuple[list[Wanted], Callable[[], Any]]:
    """The tensors to read for a value that is not a tensor, and the function that creates the value from them.

    Raises ValueError for a value that was saved per rank and has none for this rank, and UntrustedObjectError.
    """
    for value in parts_in(entry.value, ValuesByRank):
        raise ValueError(
            f"{shown((name,))} has a separate value for each rank that saved, and the number of ranks has "
            f"changed; choose a rank, such as from_ranks={{{shown(value.path)!r}: {min(value.values)}}}"
        )
    file, stored = entry.file, list(parts_in(entry.value, StoredLeaf))
    objects = file.objects(stored, trust=trust)
    numbers = {file.primary(leaf.number) for leaf in stored if leaf.kind != "object"}
    tensors = {number: file.empty(number, CPU) for number in numbers}

    def give(leaf: StoredLeaf) -> Any:
        if leaf.kind == "object":
            return objects[leaf.number]
        return file.leaf(leaf, tensors[file.primary(leaf.number)], CPU)

    wanted = [Wanted(number, tensor) for number, tensor in tensors.items()]
    return wanted, lambda: replaced(entry.value, give)
