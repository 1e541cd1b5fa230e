"""Fully qualified names: torch.distributed.checkpoint's names for the items of a state, and their paths in it.

In: names, states, and a planner's data. Out: paths, names, and metadata that follows from neither.
Knows nothing of: files, tensors.

torch joins the keys of nested dicts by dots, and keeps the keys in `planner_data`. A step of this library has the
nested state itself, so the names follow from it; only metadata that does not is kept beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed.checkpoint._traverse import traverse_state_dict
from torch.distributed.checkpoint.metadata import Metadata

from ...core.spec import Json
from ...core.state.names import Path
from ...core.state.tree import Encoder, StoredLeaf, decode


def path_of(name: str, planner_data: Any) -> Path:
    """The path of an item, if the planner's data tell it; else its name as a key at the top."""
    path = planner_data.get(name) if isinstance(planner_data, Mapping) else None
    is_path = isinstance(path, tuple) and all(isinstance(key, int | str) for key in path)
    return path if is_path and path and path[0] != 0 and ".".join(map(str, path)) == name else (name,)


def flattened(state: Mapping[Any, Any]) -> dict[str, tuple[Path, Any]]:
    """The items that torch would save of a decoded state, by name, with paths. Raises ValueError for equal names."""
    items: dict[str, tuple[Path, Any]] = {}

    def visit(path: Path, value: Any) -> None:
        name = ".".join(map(str, path))
        if name in items:
            raise ValueError(
                f"torch.distributed.checkpoint calls both {path} and {items[name][0]} {name!r}; load it by async_ckpt"
            )
        items[name] = path, value

    traverse_state_dict(state, visit, _is_tensor)  # type: ignore[arg-type]
    return items


def metadata_to_keep(metadata: Metadata, opaque: Iterable[str]) -> dict[str, Json]:
    """The metadata to keep in the manifest: opaque blobs, and the planner's data if they do not follow from the
    names.

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


def planner_data_of(kept: Mapping[str, Json], paths: Mapping[str, Path]) -> Any:
    """The planner's data, or those that it would make from these paths."""
    if "planner_data" in kept:
        return decode(kept["planner_data"])[0]
    return dict(paths)


def _is_tensor(value: object) -> bool:
    return isinstance(value, StoredLeaf) and value.kind == "tensor"


def _not_plain(value: Any, path: Path) -> Json:  # noqa: ARG001
    raise TypeError(
        f"the planner's planner_data has {type(value).__qualname__} in it; a manifest keeps plain values only"
    )
