"""The metadata of torch.distributed.checkpoint: the names of a state's items, and the parts that each rank wrote.

In: torch's metadata, states, and the items that each rank wrote. Out: paths, the layout of a step, and torch's metadata
from it.
Knows nothing of: files.

torch joins the keys of nested dicts by dots, and keeps the keys in `planner_data`. A step of this library contains the
nested state, from which the names follow. Only metadata that does not follow from it is stored in addition.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.distributed.checkpoint._traverse import traverse_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ...core.slicing.locator import StepItem, StepLayout, name_of
from ...core.spec import Json
from ...core.state.names import Path, dtype_name, dtype_named
from ...core.state.tree import Encoder, StoredLeaf, decode

# One encoder for all lines: `json.dumps` creates one for each call with `separators`.
_as_line: Final = json.JSONEncoder(separators=(",", ":")).encode

Pieces = dict[str, list[tuple[Sequence[int], Sequence[int]]]]


def path_of(name: str, planner_data: Any) -> Path:
    """The path of an item from the planner's data, or else its name as a single key."""
    path = planner_data.get(name) if isinstance(planner_data, Mapping) else None
    is_path = isinstance(path, tuple) and all(isinstance(key, int | str) for key in path)
    return path if is_path and path and path[0] != 0 and ".".join(map(str, path)) == name else (name,)


def flattened(state: Mapping[Any, Any]) -> dict[str, tuple[Path, Any]]:
    """Items as torch would save a decoded state: path and value by name. Raises ValueError for equal names."""
    items: dict[str, tuple[Path, Any]] = {}

    def visit(path: Path, value: Any) -> None:
        name = ".".join(map(str, path))
        if name in items:
            raise ValueError(
                f"torch.distributed.checkpoint names both {path} and {items[name][0]} {name!r}; load with async_ckpt"
            )
        items[name] = path, value

    traverse_state_dict(state, visit, _is_tensor)  # type: ignore[arg-type]
    return items


def metadata_to_keep(metadata: Metadata, opaque: Iterable[str]) -> dict[str, Json]:
    """The metadata to store in the manifest: the names of opaque blobs, and the planner's data unless it follows from
    the names.

    Raises TypeError for data that is not plain.
    """
    data, kept = metadata.planner_data, {}
    names = metadata.state_dict_metadata
    if data is not None and not (
        isinstance(data, Mapping) and all(data.get(name) == path_of(name, data) for name in names)
    ):
        kept["planner_data"] = Encoder(_not_plain).encode(data)
    if blobs := sorted(opaque):
        kept["blobs"] = blobs
    return kept


def layout_of(metadata: Metadata, written: Mapping[int, Iterable[MetadataIndex]]) -> StepLayout:
    """The layout of a step, from the items that each rank has written.

    Its structures are as in a layout of `AsyncCheckpointer`, with a list of the pieces of each tensor, and a line for
    each value that is not a tensor.
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


def metadata_of(items: Iterable[StepItem], kept: Mapping[str, Any]) -> Metadata:
    """Torch's metadata of the items of a state; every tensor is one chunk."""
    named = {".".join(map(str, item.path)): item for item in items}
    entries: dict[str, Any] = {}
    for name, item in named.items():
        if not item.dtype:
            entries[name] = BytesStorageMetadata()
            continue
        size, properties = torch.Size(item.shape), TensorProperties(dtype=dtype_named(item.dtype))
        whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        entries[name] = TensorStorageMetadata(properties, size, [whole])
    # Without a planner's data, use what torch's planner would make from the paths.
    data = decode(kept["planner_data"])[0] if "planner_data" in kept else {name: named[name].path for name in named}
    return Metadata(entries, planner_data=data)


def _item(name: str, metadata: Metadata) -> StepItem:
    path, entry = path_of(name, metadata.planner_data), metadata.state_dict_metadata[name]
    if isinstance(entry, TensorStorageMetadata):
        return StepItem(path, dtype_name(entry.properties.dtype), tuple(entry.size))
    return StepItem(path)


def _line(item: StepItem, held: Sequence[tuple[Sequence[int], Sequence[int]]]) -> str:
    facts = (item.dtype, item.shape, {"held": held}) if item.dtype else (None, None, None)
    return _as_line([name_of(item.path), *facts])


def _is_tensor(value: object) -> bool:
    return isinstance(value, StoredLeaf) and value.kind == "tensor"


def _not_plain(value: Any, path: Path) -> Json:  # noqa: ARG001
    raise TypeError(
        f"the planner's planner_data has {type(value).__qualname__} in it; a manifest keeps plain values only"
    )
