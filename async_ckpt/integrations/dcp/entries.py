"""What is in a step, by the names that torch.distributed.checkpoint has for it.

In: opened archives. Out: torch's metadata, and values as torch.save writes them. Knows nothing of: plans.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from ...host.ranks import world_of
from ...loading.contents import CPU, Contents, Part
from ...loading.fill import Wanted
from ...loading.open import OpenArchive
from ...spec import with_article
from ...state.names import Path, shown
from ...state.tree import SavedApart, Stored, leaves, replaced
from .names import KEPT, flattened, planner_data_of


class Entry(NamedTuple):
    """What torch has a name for, where in the state it is, and in which file."""

    path: Path
    value: Any
    file: Contents

    @property
    def tensor(self) -> int | None:
        """Its number in the file; None for what is no tensor."""
        is_tensor = isinstance(self.value, Stored) and self.value.kind == "tensor"
        return self.file.primary(self.value.number) if is_tensor else None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a tensor."""
        assert self.tensor is not None
        return self.file.index.tensors[self.tensor].shape


def kept_in(parts: Sequence[Part]) -> Mapping[str, Any]:
    """What a writer of ours has kept beside the state."""
    kept = parts[0].record.get(KEPT)
    return kept if isinstance(kept, dict) else {}


def identity_of(parts: Sequence[Part]) -> str:
    """A text that is the same for the same files."""
    found = hashlib.blake2b(digest_size=16)
    for file in (file for part in parts for file in part.archive.files):
        told = file.digest if isinstance(file, OpenArchive) else str(file.index.file_bytes)
        found.update(f"{file.path.rpartition('/')[2]} {told}\n".encode())
    return found.hexdigest()


def entries_of(parts: Sequence[Part]) -> dict[str, Entry]:
    """Raises TypeError for a state that is not a dict, and ValueError where two entries have one name."""
    found: dict[str, Entry] = {}
    for part in parts:
        tree, _ = part.archive.tree(groups=part.groups)
        if not isinstance(tree, dict):
            raise TypeError(
                f"{part.archive.path}: torch.distributed.checkpoint loads dicts, and this is {with_article(type(tree).__name__)}; "
                "load it by async_ckpt.load"
            )
        own = replaced(tree, _as_it_is, partial(_own, part.archive))
        for name, (path, value) in flattened(own).items():
            found[name] = Entry(path, value, part.archive)
    return found


def metadata_of(entries: Mapping[str, Entry], kept: Mapping[str, Any]) -> Metadata:
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


def value_of(name: str, entry: Entry, *, trust: bool) -> tuple[list[Wanted], Callable[[], Any]]:
    """What has to be read for a value that is no tensor, and what makes the value once it is.

    Raises ValueError for what each rank has saved for itself, and UntrustedObjectError.
    """
    inside = list(leaves(entry.value))
    for apart in inside:
        if isinstance(apart, SavedApart):
            raise ValueError(
                f"{shown((name,))} was saved by each rank for itself, and this rank, in a world of this size, has none; say "
                f"whose it is to get, such as from_ranks={{{shown(apart.path)!r}: {min(apart.values)}}}"
            )
    file, stored = entry.file, [leaf for leaf in inside if isinstance(leaf, Stored)]
    objects = file.objects(stored, trust=trust)
    numbers = {file.primary(leaf.number) for leaf in stored if leaf.kind != "object"}
    tensors = {number: file.empty(number, CPU) for number in numbers}

    def give(leaf: Stored) -> Any:
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


def _own(file: Contents, apart: SavedApart) -> Any:
    """This rank's value, in a world of the size that has saved it."""
    world = world_of(None, None)
    is_same = world.size == len(file.files) and world.rank in apart.values
    return replaced(apart.values[world.rank], _as_it_is) if is_same else apart


def _as_it_is(leaf: Stored) -> Stored:
    return leaf
