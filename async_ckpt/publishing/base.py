"""The model that the first delta of a root is against, where no version holds it: a folder of Hugging Face on this machine.

In: a folder. Out: its weights as an anchor. Knows nothing of: versions, who applies them.
"""

from __future__ import annotations

from pathlib import Path

from ..around.export import files_of
from ..errors import CorruptCheckpointError
from ..format.delta import INDEX, VersionIndex, weight_map_in
from ..storage.disk import translated
from ..storage.local import LocalStorage
from .notes import SINGLE
from .source import Source


class Base:
    """The weights of a folder, as those of a version with a number that is below all at a root."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise NotADirectoryError(f"base {folder} is not a folder; give the one with the model")
        self.folder = folder
        self._storage = LocalStorage(folder)
        self._index: VersionIndex | None = None  # which was made last

    def index(self, number: int) -> VersionIndex:
        """What says as much as the index of a version with this number. Raises CorruptCheckpointError."""
        if self._index is None or self._index.version != number:
            self._index = VersionIndex(number, self._files())
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
            alone = _SourceOfBase(self._storage, VersionIndex(0, {}))
            return dict.fromkeys(alone.held_in(SINGLE), SINGLE)

    def is_meant(self, index: VersionIndex) -> bool:
        """Whether an index is the one that was made of this folder."""
        return index is self._index

    def source(self, index: VersionIndex) -> Source:
        return _SourceOfBase(self._storage, index)


class _SourceOfBase(Source):
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
