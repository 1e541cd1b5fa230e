"""Where a save goes: one object at a path of the user's choice, or one attempt at a step of a run.

In: places, runs. Out: targets. Knows nothing of: tensors.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, Self

from ..runs.manifest import Archive
from ..storage.base import Sink, Storage
from ..storage.compressed import Zstd, compressing
from ..storage.local import temps_of
from ..storage.place import Where, parent_and_name, storage_at
from ..storage.scratch import refuse_in_running

Compression = Zstd | Literal["zstd"] | None


def _how(compression: Compression, name: str) -> Zstd | None:
    """What the user said, or what the name says."""
    if compression is None:
        return Zstd() if name.endswith(".zst") else None
    if compression == "zstd":
        return Zstd()
    if not isinstance(compression, Zstd):
        raise ValueError(f'compression must be "zstd", a Zstd(…) or None, got {compression!r}')
    return compression


class FileTarget:
    """One object at a path of the user's choice: durable is committed."""

    num_bytes_beside = 0

    @classmethod
    def at(cls, path: Where, place: dict[str, Any], compression: Compression = None) -> Self:
        """What the user said, checked. `place` are the options of its URL."""
        parent, name = parent_and_name(path, fs=place.get("fs"))
        storage, how = storage_at(parent, **place), _how(compression, name)
        return cls(storage if how is None else compressing(storage, how), name)

    def __init__(self, storage: Storage, name: str) -> None:
        self.storage, self._name = storage, name
        self.path = self.storage.locate(self._name)
        if not self.storage.remote and Path(self.path).is_dir():
            example = os.path.join(self.path, "checkpoint.tar")
            raise IsADirectoryError(f"{self.path} is a folder; give the path of a file, such as {example}")
        if not self.storage.remote:
            refuse_in_running(Path(self.path).parent)

    def open(self, num_bytes: int, segment_bytes: int, max_segments: int) -> Sink:
        if not self.storage.remote:
            self.storage.sweep("", temps_of(self._name, self.storage.names("")), delete=True)
        return self.storage.create(
            self._name, num_bytes=num_bytes, segment_bytes=segment_bytes, max_segments=max_segments
        )

    def check(self) -> None:
        """Nothing to ask."""

    def commit(self, archive: Archive, *, late: bool = False) -> None:
        """Nothing to agree on."""

    def hangs(self, quiet: Future[None]) -> None:
        """There is no other place to go on with."""

    def discard(self) -> None:
        """It may have replaced an older file: this one is whole, so it stays."""

    def afterwards(self) -> None:
        """Nothing to delete."""
