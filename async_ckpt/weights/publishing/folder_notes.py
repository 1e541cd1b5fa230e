"""Notes in a folder about the weights in it: which version they are, and in which files.

In: a folder. Out: small JSON files in its `.weight_sync`, and their content, with every field checked for its type.
Knows nothing of: versions, tensors.

`state.json` is the marker of the version in the folder. It is deleted before the weights change. Receivers of other
programs also write a marker of this name. `files.json` lists the files that versions have installed; all other files
are the user's. The notes are not synced: after a reboot, or if a file of weights has changed since it was recorded, all
bytes are compared with their checksums first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from ...errors import StorageUnavailableError
from ...plumbing import fields as json_fields
from ..confined_files import ConfinedFolder
from ..delta import INDEX, is_checksum, number_of, stays_inside
from .version_files import WeightsState

FOLDER: Final = ".weight_sync"
LOCK: Final = f"{FOLDER}/lock"
# The files of a new version are written to NEW. Old files are moved to OLD until all are replaced.
NEW: Final = f"{FOLDER}/new"
OLD: Final = f"{FOLDER}/old"
# The file of weights in a model without an index.
SINGLE: Final = "model.safetensors"
_STATE: Final = f"{FOLDER}/state.json"
_FILES: Final = f"{FOLDER}/files.json"
_UNREADABLE: Final = (FileNotFoundError, StorageUnavailableError, ValueError, KeyError, RecursionError)


class InstalledFiles(NamedTuple):
    """The sizes of the files that versions have installed, the names of those with weights, and their structure."""

    sizes: Mapping[str, int]
    weights: tuple[str, ...]
    structure: str


class Marker(NamedTuple):
    """The content of `state.json`. A marker of another receiver has only the version.

    `stamps` are those of the files of weights at the time of the note.
    """

    version: int
    state: WeightsState | None
    boot: str = ""
    stamps: Mapping[str, str] = MappingProxyType({})


class Notes:
    """The notes of one folder. Owned by a `FolderReplica`, which uses them while it holds the folder's lock."""

    def __init__(self, files: ConfinedFolder) -> None:
        self._files = files

    def marker(self) -> Marker | None:
        """The marker; None if it does not exist or cannot be read."""
        try:
            fields = json_fields.table(json.loads(self._files.read(_STATE)))
            version = number_of(fields["version"])
            if "identity" not in fields:
                return Marker(version, None)
            identity, structure = _checksum(fields["identity"]), _checksum(fields["structure"])
            checksums = dict(json_fields.entries(fields["checksums"], _checksum))
            state = WeightsState(version, identity, structure, checksums, json_fields.text(fields.get("stamp", "")))
            stamps = dict(json_fields.entries(fields.get("stamps", {}), json_fields.text))
            return Marker(version, state, json_fields.text(fields["boot"]), stamps)
        except _UNREADABLE:
            return None

    def note(self, state: WeightsState | None, boot: str = "", stamps: Mapping[str, str] | None = None) -> None:
        """Write the marker for these weights, with the boot of the machine. None deletes the marker."""
        if state is None:
            self._files.delete(_STATE)
            return
        fields: dict[str, Any] = {"version": f"{state.version:06d}"}
        if not state.is_marked:
            fields |= {"identity": state.identity, "structure": state.structure, "boot": boot}
            fields |= {"stamp": state.stamp, "stamps": stamps or {}, "checksums": state.checksums}
        self._files.replace(_STATE, json.dumps(fields).encode())

    def files(self) -> InstalledFiles:
        """The files that versions have installed; empty if the note cannot be read."""
        try:
            noted = json_fields.table(json.loads(self._files.read(_FILES)))
            if not isinstance(noted.get("files"), dict):  # earlier releases recorded only the sizes
                weights = [name for name in noted if name.endswith(".safetensors")]
                noted = {"files": noted, "weights": weights, "structure": ""}
            sizes = {_inside(name): size for name, size in json_fields.entries(noted["files"], json_fields.count)}
            weights_there = json_fields.items(noted["weights"], json_fields.text)
            if not {*weights_there} <= sizes.keys():
                raise ValueError("it lists files with weights that it does not list as files")
            return InstalledFiles(sizes, weights_there, json_fields.text(noted["structure"]))
        except _UNREADABLE:
            return InstalledFiles({}, (), "")

    def record_files(self, files: InstalledFiles) -> None:
        fields = {"files": files.sizes, "weights": files.weights, "structure": files.structure}
        self._files.replace(_FILES, json.dumps(fields).encode())

    def foreign_files(self) -> InstalledFiles:
        """The files with weights in a folder that another receiver has filled, and their index."""
        index = self._files.size(INDEX)
        weights = [SINGLE]
        if index is not None:
            try:
                weight_map = json_fields.table(json.loads(self._files.read(INDEX)))["weight_map"]
                weights = sorted({_inside(name) for _, name in json_fields.entries(weight_map, json_fields.text)})
            except _UNREADABLE:
                weights = []
        sizes = {name: size for name in weights if (size := self._files.size(name)) is not None}
        return InstalledFiles(sizes if index is None else sizes | {INDEX: index}, tuple(sizes), "")


# No file system allows longer names.
_NAME_BYTES: Final = 255


def _checksum(value: object) -> str:
    if not is_checksum(value):
        raise ValueError(f"{value!r:.100} is not a checksum")
    return json_fields.text(value)


def _inside(name: str) -> str:
    if not stays_inside(name) or any(len(os.fsencode(part)) > _NAME_BYTES for part in name.split("/")):
        raise ValueError(f"{name!r:.300} is not the name of a file of this folder")
    return name
