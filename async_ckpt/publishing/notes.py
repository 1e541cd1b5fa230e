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
from ..fields import count, entries, items, table, text
from ..format.delta import INDEX, is_checksum, number_of, stays_inside
from ..storage.confined import ConfinedFolder
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
_UNREADABLE: Final = (FileNotFoundError, StorageUnavailableError, ValueError, KeyError, RecursionError)


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

    def __init__(self, files: ConfinedFolder) -> None:
        self._files = files

    def noted(self) -> Noted | None:
        """None where nothing is noted that can be understood."""
        try:
            marker = table(json.loads(self._files.read(_STATE)))
            version = number_of(marker["version"])
            if "identity" not in marker:
                return Noted(version, None, "")
            identity, structure = _checksum(marker["identity"]), _checksum(marker["structure"])
            checksums = dict(entries(marker["checksums"], _checksum))
            state = State(version, identity, structure, checksums, text(marker.get("stamp", "")))
            return Noted(version, state, text(marker["boot"]))
        except _UNREADABLE:
            return None

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
        try:
            noted = table(json.loads(self._files.read(_FILES)))
            if not isinstance(noted.get("files"), dict):  # a release before has noted only the sizes
                weights = [name for name in noted if name.endswith(".safetensors")]
                noted = {"files": noted, "weights": weights, "structure": ""}
            sizes = {_inside(name): size for name, size in entries(noted["files"], count)}
            weights_there = items(noted["weights"], text)
            if not {*weights_there} <= sizes.keys():
                raise ValueError("it notes weights in files that it does not note")
            return NotedFiles(sizes, weights_there, text(noted["structure"]))
        except _UNREADABLE:
            return NotedFiles({}, (), "")

    def note_files(self, files: NotedFiles) -> None:
        told = {"files": files.sizes, "weights": files.weights, "structure": files.structure}
        self._files.replace(_FILES, json.dumps(told).encode())

    def files_of_another(self) -> NotedFiles:
        """The files with weights, and their index, as those who load models find them, where another receiver has put them."""
        index = self._files.size(INDEX)
        weights = [SINGLE]
        if index is not None:
            try:
                weight_map = table(json.loads(self._files.read(INDEX)))["weight_map"]
                weights = sorted({_inside(name) for _, name in entries(weight_map, text)})
            except _UNREADABLE:
                weights = []
        sizes = {name: size for name in weights if (size := self._files.size(name)) is not None}
        return NotedFiles(sizes if index is None else sizes | {INDEX: index}, tuple(sizes), "")


def _checksum(value: object) -> str:
    if not is_checksum(value):
        raise ValueError(f"{value!r:.100} is not a checksum")
    return text(value)


def _inside(name: str) -> str:
    if not stays_inside(name):
        raise ValueError(f"{name!r:.300} is not the name of a file of this folder")
    return name
