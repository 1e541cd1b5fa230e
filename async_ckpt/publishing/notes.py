"""Notes in a folder about the weights in it: which version they are, and in which files versions have put them.

In: a folder. Out: small files in its `.weight_sync`, and what they say, as far as every field of them has its type.
Knows nothing of: versions, tensors.

`state.json` says which version is there, and is not while that changes; other receivers have a marker of that name, too. `files.json`
lists the files that versions have put there, and stays: all other files are the user's. Nothing is synced: after a restart of the
machine all bytes are compared with their checksums first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from ..errors import StorageUnavailableError
from ..format.delta import INDEX, is_checksum, is_text, number_of, stays_inside
from ..storage.beneath import Beneath
from .source import State

FOLDER: Final = ".weight_sync"
LOCK: Final = f"{FOLDER}/lock"
# Where files of another version are made, and where those of the version before are until all have their places.
NEW: Final = f"{FOLDER}/new"
OLD: Final = f"{FOLDER}/old"
# The only file of weights of a model that has no index.
SINGLE: Final = "model.safetensors"
_STATE: Final = f"{FOLDER}/state.json"
_FILES: Final = f"{FOLDER}/files.json"


class NotedFiles(NamedTuple):
    """The files that versions have put into a folder, with their sizes then; of these, those with weights, of this structure."""

    sizes: Mapping[str, int]
    weights: tuple[str, ...]
    structure: str


class Noted(NamedTuple):
    """The content of a marker. A marker of another receiver has only the version."""

    version: int
    state: State | None
    boot: str


class Notes:
    """The notes of one folder. Their owner has the lock."""

    def __init__(self, files: Beneath) -> None:
        self._files = files

    def noted(self) -> Noted | None:
        """None where nothing is noted that can be understood."""
        try:
            told = json.loads(self._files.read(_STATE))
            version = number_of(told["version"])
            if "identity" not in told:
                return Noted(version, None, "")
            stamp, boot = told.get("stamp", ""), told.get("boot")
            state = State(version, told["identity"], told["structure"], told["checksums"], stamp)
        except (FileNotFoundError, StorageUnavailableError, ValueError, KeyError, TypeError, RecursionError):
            return None
        texts = (
            (state.identity, state.structure, *state.checksums.values())
            if _is_table(state.checksums)
            else (None,)
        )
        is_sound = isinstance(boot, str) and isinstance(stamp, str) and all(map(is_checksum, texts))
        return Noted(version, state, boot) if is_sound else None

    def note(self, state: State | None, boot: str = "") -> None:
        """These weights are there now, whole, since this start of the machine; with None, they are about to change."""
        if state is None:
            self._files.delete(_STATE)
            return
        told: dict[str, Any] = {"version": f"{state.version:06d}"}
        if not state.is_marked:
            told |= {"identity": state.identity, "structure": state.structure, "boot": boot}
            told |= {"stamp": state.stamp, "checksums": state.checksums}
        self._files.replace(_STATE, json.dumps(told).encode())

    def files(self) -> NotedFiles:
        """The files of versions; none where no note can be understood."""
        nothing = NotedFiles({}, (), "")
        try:
            told = json.loads(self._files.read(_FILES))
        except (FileNotFoundError, StorageUnavailableError, ValueError, RecursionError):
            return nothing
        match told:
            case {"files": dict(sizes), "weights": list(weights), "structure": str(structure)}:
                pass
            case dict(sizes):  # as releases before have noted them
                weights, structure = [name for name in sizes if name.endswith(".safetensors")], ""
            case _:
                return nothing
        is_sound = all(stays_inside(name) and type(size) is int for name, size in sizes.items())
        if not is_sound or not all(name in sizes for name in weights if isinstance(name, str)):
            return nothing
        return NotedFiles(sizes, tuple(weights), structure)

    def note_files(self, files: NotedFiles) -> None:
        told = {"files": files.sizes, "weights": files.weights, "structure": files.structure}
        self._files.replace(_FILES, json.dumps(told).encode())

    def files_of_another(self) -> NotedFiles:
        """The files with weights, and their index, as those who load models find them, where another receiver has put them."""
        index = self._files.size(INDEX)
        weights = [SINGLE]
        if index is not None:
            try:
                names = json.loads(self._files.read(INDEX))["weight_map"].values()
            except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                names = []
            weights = sorted({name for name in names if stays_inside(name)})
        sizes = {name: size for name in weights if (size := self._files.size(name)) is not None}
        return NotedFiles(sizes if index is None else sizes | {INDEX: index}, tuple(sizes), "")


def _is_table(told: Any) -> bool:
    return isinstance(told, dict) and is_text("".join(told))
