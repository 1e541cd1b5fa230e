"""The base model of a root whose first version is a delta: a Hugging Face folder on this machine.

In: a folder. Out: its weights as an anchor. Knows nothing of: versions, replicas.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ...errors import CorruptCheckpointError, NotAFolderError
from ...plumbing import LocalStorage, disk, hf_weights, threads
from ..delta import INDEX, VersionIndex, checksum, weight_map_in
from .folder_notes import SINGLE
from .version_files import VersionSource


class BaseModel:
    """The weights in a folder, as an anchor that is older than all versions.

    A `Subscriber` with a `base` creates it, and uses it in its pulls.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            disk.refuse_dangling(folder)
            raise NotAFolderError(f"base {folder} is not a folder; give the one with the model")
        self.folder = folder
        self._storage = LocalStorage(folder)
        self._index: VersionIndex | None = None  # the last one that was returned

    def index(self, number: int) -> VersionIndex:
        """The index of an anchor with this number and the folder's tensors. Raises CorruptCheckpointError."""
        index = VersionIndex(number, self._files())
        index = replace(index, stamp=self._stamp(index.tensor_files))
        if self._index is None or (self._index, self._index.stamp) != (index, index.stamp):
            self._index = index
        return self._index

    def _files(self) -> dict[str, str]:
        try:
            return weight_map_in(self._storage.read(INDEX)[0])
        except ValueError as error:
            path = str(self.folder / INDEX)
            raise CorruptCheckpointError(f"{path}: {error}; give a folder with a model", path=path) from error
        except FileNotFoundError:
            source = _BaseModelSource(self._storage, VersionIndex(0, {}))
            return dict.fromkeys(source.tensors_in(SINGLE), SINGLE)

    def _stamp(self, files: Sequence[str]) -> str:
        """A checksum that changes when one of the files is replaced or written."""
        lines = []
        for file in files:
            with suppress(OSError):  # reading the file will raise it again
                status = os.stat(self.folder / file)
                lines.append(f"{file} {status.st_dev} {status.st_ino} {status.st_mtime_ns} {status.st_size}")
        return checksum("\n".join(lines).encode())

    def is_source_of(self, index: VersionIndex) -> bool:
        """Whether `self.index` has returned this index."""
        return index is self._index

    def source(self, index: VersionIndex) -> VersionSource:
        return _BaseModelSource(self._storage, index)


class _BaseModelSource(VersionSource):
    """The files of a model that was not published. Listing the small files also reads them."""

    def __init__(self, storage: LocalStorage, index: VersionIndex) -> None:
        super().__init__(storage, index)
        self.folder, self.path = ".", storage.locate("")
        self._small: dict[str, bytes] | None = None

    def other_files(self) -> list[str]:
        if self._small is None:
            with disk.translated(Path(self.path)):
                self._small = hf_weights.files_of(Path(self.path))
        return list(self._small)

    def read(self, file: str, crew: threads.Crew | None = None) -> memoryview:  # noqa: ARG002
        assert self._small is not None
        return memoryview(self._small[file])
