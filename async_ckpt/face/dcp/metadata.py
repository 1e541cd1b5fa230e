"""The layout of a step of torch.distributed.checkpoint: which rank wrote which part of which item.

In: torch's metadata, and the items that each rank wrote. Out: the layout, and torch's metadata from it.
Knows nothing of: files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ...core.slicing.locator import StepItem, StepLayout, name_of
from ...core.state.names import dtype_name, dtype_named
from .fqn import path_of, planner_data_of

Pieces = dict[str, list[tuple[Sequence[int], Sequence[int]]]]


def layout_of(metadata: Metadata, written: Mapping[int, Iterable[MetadataIndex]]) -> StepLayout:
    """The layout of a step, from what each rank has written.

    Its structures are as in a layout of `AsyncCheckpointer`, with the pieces of each tensor listed, and with a line for
    each value that is no tensor.
    """
    items = {name: _item(name, metadata) for name in metadata.state_dict_metadata}
    sizes = {
        (name, tuple(chunk.offsets)): tuple(chunk.sizes)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks
    }
    classes, structures = dict[str, list[int]](), dict[str, str]()
    for rank, indices in sorted(written.items()):
        pieces = Pieces()
        for index in indices:
            if index.fqn not in items:  # this rank has written nothing
                continue
            held = pieces.setdefault(index.fqn, [])
            if items[index.fqn].dtype:
                at = tuple(index.offset or ())
                held.append((at, sizes[index.fqn, at]))
        text = "\n".join(sorted(_line(items[name], held) for name, held in pieces.items()))
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        structures[digest] = text
        classes.setdefault(digest, []).append(rank)
    return StepLayout(classes, structures, items=tuple(items.values()))


def metadata_of_layout(items: Iterable[StepItem], kept: Mapping[str, Any]) -> Metadata:
    """Torch's metadata of the items of a layout; every tensor is one chunk."""
    entries: dict[str, Any] = {}
    paths = {".".join(map(str, item.path)): item.path for item in items}
    for name, item in zip(paths, items, strict=True):
        entries[name] = tensor_metadata(dtype_named(item.dtype), item.shape) if item.dtype else BytesStorageMetadata()
    return Metadata(entries, planner_data=planner_data_of(kept, paths))


def tensor_metadata(dtype: torch.dtype, shape: Sequence[int]) -> TensorStorageMetadata:
    """Torch's metadata of a tensor that is one chunk."""
    size = torch.Size(shape)
    whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, [whole])


def _item(name: str, metadata: Metadata) -> StepItem:
    path, entry = path_of(name, metadata.planner_data), metadata.state_dict_metadata[name]
    if isinstance(entry, TensorStorageMetadata):
        return StepItem(path, dtype_name(entry.properties.dtype), tuple(entry.size))
    return StepItem(path)


def _line(item: StepItem, held: Sequence[tuple[Sequence[int], Sequence[int]]]) -> str:
    facts = (item.dtype, item.shape, {"held": held}) if item.dtype else (None, None, None)
    return json.dumps([name_of(item.path), *facts], separators=(",", ":"))
