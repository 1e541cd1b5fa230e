"""The names that torch.distributed.checkpoint has for what is in a state, and the paths that these stand for.

In: names, states, and what a planner says of them. Out: paths, names, and what does not follow from either.
Knows nothing of: files, tensors.

torch joins the keys of nested dicts by dots, and says in `planner_data` which keys these were. A step of this library has
the nested state itself, so the names follow from it; kept beside it is only what does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch.distributed.checkpoint._traverse import traverse_state_dict
from torch.distributed.checkpoint.metadata import Metadata

from ...spec import Json
from ...state.names import Path
from ...state.tree import Encoder, StoredLeaf, decode

# Under which a manifest's record has what does not follow from the state.
KEPT: Final = "torch.distributed.checkpoint"


def path_of(name: str, planner_data: Any) -> Path:
    """Where in the state this is, as far as the planner says so; else it is a key at the top."""
    path = planner_data.get(name) if isinstance(planner_data, Mapping) else None
    is_path = isinstance(path, tuple) and all(isinstance(key, int | str) for key in path)
    return path if is_path and path and path[0] != 0 and ".".join(map(str, path)) == name else (name,)


def flattened(state: Mapping[Any, Any]) -> dict[str, tuple[Path, Any]]:
    """The items that torch would save of a decoded state, by its names, with the paths. Raises ValueError for two of one name."""
    found: dict[str, tuple[Path, Any]] = {}

    def visit(path: Path, value: Any) -> None:
        name = ".".join(map(str, path))
        if name in found:
            raise ValueError(
                f"torch.distributed.checkpoint calls both {path} and {found[name][0]} {name!r}; load it by async_ckpt"
            )
        found[name] = path, value

    traverse_state_dict(state, visit, _is_tensor)  # type: ignore[arg-type]
    return found


def metadata_to_keep(metadata: Metadata, opaque: Iterable[str]) -> dict[str, Json]:
    """The metadata that a manifest is to keep: the planner's data, unless it follows from the names, and the names of blobs that are no
    values. Raises TypeError for data that is not plain.
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
    """The planner's words, or those that it would have said."""
    if "planner_data" in kept:
        return decode(kept["planner_data"])[0]
    return dict(paths)


def _is_tensor(value: object) -> bool:
    return isinstance(value, StoredLeaf) and value.kind == "tensor"


def _not_plain(value: Any, path: Path) -> Json:  # noqa: ARG001
    raise TypeError(
        f"the planner's planner_data has {type(value).__qualname__} in it; a manifest keeps plain values only"
    )
