"""The content of a step, by the names that torch.distributed.checkpoint has for it.

In: opened archives. Out: torch's metadata, and values as torch.save writes them. Knows nothing of: plans.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from ...loading.archives.archive import OpenArchive
from ...loading.archives.contents import CPU, Contents, Part
from ...loading.archives.step_archives import Readers
from ...loading.fill import Wanted
from ...ranks.world import world_of
from ...spec import with_article
from ...state.names import Path, shown
from ...state.tree import StoredLeaf, ValuesByRank, leaves, replaced
from .names import KEPT, flattened, planner_data_of


class SavedItem(NamedTuple):
    """A thing that torch has a name for, where in the state it is, and in which file."""

    path: Path
    value: Any
    file: Contents

    @property
    def tensor(self) -> int | None:
        """Its number in the file; None for what is no tensor."""
        is_tensor = isinstance(self.value, StoredLeaf) and self.value.kind == "tensor"
        return self.file.primary(self.value.number) if is_tensor else None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape and dtype of a tensor."""
        assert self.tensor is not None
        return self.file.index.tensors[self.tensor].shape


def this_rank(from_ranks: Mapping[str, int] | None) -> Readers:
    """The rank that reads: where there are several ranks, each gets its own values."""
    world = world_of(None, None)
    return Readers(None if world.is_one else (world.rank, world.size), from_ranks)


def kept_in(parts: Sequence[Part]) -> Mapping[str, Any]:
    """The metadata that a writer of ours has kept beside the state."""
    kept = None if parts[0].made is None else parts[0].made.record.get(KEPT)
    return kept if isinstance(kept, dict) else {}


def identity_of(parts: Sequence[Part]) -> str:
    """A text that is the same for the same checkpoint, whichever of its files are open."""
    made, file = parts[0].made, parts[0].archive
    if made is not None:
        return f"step {made.step}, attempt {made.attempt}"
    return file.digest if isinstance(file, OpenArchive) else f"{file.path}, {len(file.index.tensors)} tensors"


def entries_of(parts: Sequence[Part]) -> dict[str, SavedItem]:
    """Raises TypeError for a state that is not a dict, and ValueError where two entries have one name."""
    found: dict[str, SavedItem] = {}
    for part in parts:
        part.archive.learn_names()
        tree, _ = part.archive.tree(groups=part.groups)
        if not isinstance(tree, dict):
            kind = tree.kind if isinstance(tree, StoredLeaf) else type(tree).__name__
            raise TypeError(
                f"{part.archive.path}: torch.distributed.checkpoint loads dicts, and this is {with_article(kind)}; "
                "load it by async_ckpt.load"
            )
        for name, (path, value) in flattened(tree).items():
            found[name] = SavedItem(path, value, part.archive)
    return found


def metadata_of(entries: Mapping[str, SavedItem], kept: Mapping[str, Any]) -> Metadata:
    """To torch, every tensor is in one chunk."""
    told: dict[str, Any] = {}
    for name, entry in entries.items():
        if entry.tensor is None:
            told[name] = BytesStorageMetadata()
            continue
        size = torch.Size(entry.shape)
        whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        properties = TensorProperties(dtype=entry.file.dtype(entry.tensor))
        told[name] = TensorStorageMetadata(properties, size, [whole])
    return Metadata(
        told, planner_data=planner_data_of(kept, {name: one.path for name, one in entries.items()})
    )


def value_of(name: str, entry: SavedItem, *, trust: bool) -> tuple[list[Wanted], Callable[[], Any]]:
    """The bytes to be read for a value that is no tensor, and the function that makes the value of them.

    Raises ValueError for what each rank has saved for itself, and UntrustedObjectError.
    """
    inside = list(leaves(entry.value))
    for apart in inside:
        if isinstance(apart, ValuesByRank):
            raise ValueError(
                f"{shown((name,))} was saved by each rank for itself, and this rank, in a world of this size, has none; say "
                f"whose it is to get, such as from_ranks={{{shown(apart.path)!r}: {min(apart.values)}}}"
            )
    file, stored = entry.file, [leaf for leaf in inside if isinstance(leaf, StoredLeaf)]
    objects = file.objects(stored, trust=trust)
    numbers = {file.primary(leaf.number) for leaf in stored if leaf.kind != "object"}
    tensors = {number: file.empty(number, CPU) for number in numbers}

    def give(leaf: StoredLeaf) -> Any:
        if leaf.kind == "object":
            return objects[leaf.number]
        return file.leaf(leaf, tensors[file.primary(leaf.number)], CPU)

    wanted = [Wanted(number, tensor) for number, tensor in tensors.items()]
    return wanted, lambda: replaced(entry.value, give)


def saved(value: Any) -> bytes:
    """As torch's planners write what is no tensor."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
