"""The model that the first delta of a root is against, where no version holds it: a folder of Hugging Face on this machine.

In: a folder. Out: its weights as an anchor. Knows nothing of: versions, who applies them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ..around.export import files_of
from ..errors import CorruptCheckpointError
from ..format.delta import INDEX, VersionIndex, checksum, weight_map_in
from ..storage.disk import translated
from ..storage.local import LocalStorage
from .notes import SINGLE
from .source import VersionSource


class BaseModel:
    """The weights of a folder, as those of a version with a number that is below all at a root."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise NotADirectoryError(f"base {folder} is not a folder; give the one with the model")
        self.folder = folder
        self._storage = LocalStorage(folder)
        self._index: VersionIndex | None = None  # which was made last

    def index(self, number: int) -> VersionIndex:
        """The equivalent of the index of a version with this number. Raises CorruptCheckpointError."""
        found = VersionIndex(number, self._files())
        found = replace(found, stamp=self._stamp(found.tensor_files))
        if self._index is None or (self._index, self._index.stamp) != (found, found.stamp):
            self._index = found
        return self._index

    def _files(self) -> dict[str, str]:
        try:
            return weight_map_in(self._storage.read(INDEX)[0])
        except ValueError as error:
            where = str(self.folder / INDEX)
            raise CorruptCheckpointError(
                f"{where}: {error}; give a folder with a model", path=where
            ) from error
        except FileNotFoundError:
            alone = _BaseModelSource(self._storage, VersionIndex(0, {}))
            return dict.fromkeys(alone.held_in(SINGLE), SINGLE)

    def _stamp(self, files: Sequence[str]) -> str:
        """By which its files are told from others of their names."""
        found = []
        for file in files:
            with suppress(OSError):  # which reading it will tell of
                told = os.stat(self.folder / file)
                found.append(f"{file} {told.st_dev} {told.st_ino} {told.st_mtime_ns} {told.st_size}")
        return checksum("\n".join(found).encode())

    def made(self, index: VersionIndex) -> bool:
        """Whether an index is the one that was made of this folder."""
        return index is self._index

    def source(self, index: VersionIndex) -> VersionSource:
        return _BaseModelSource(self._storage, index)


class _BaseModelSource(VersionSource):
    """The files of a model that was not published. Small ones are read when they are listed."""

    def __init__(self, storage: LocalStorage, index: VersionIndex) -> None:
        super().__init__(storage, index)
        self.folder, self.where = ".", storage.locate("")
        self._small: dict[str, bytes] | None = None

    def other_files(self) -> list[str]:
        if self._small is None:
            with translated(Path(self.where)):
                self._small = files_of(Path(self.where))
        return list(self._small)

    def read(self, file: str) -> memoryview:
        assert self._small is not None
        return memoryview(self._small[file])
