"""The target of a save to one file: an archive that is committed once it is durable, and compressed on request.

In: a place given by the user. Out: one object there. Knows nothing of: runs, ranks.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, Self

from ...errors import IsAFolderError
from ..storage.compressed import CompressingSink, Zstd, ZstdFrames, promises_zstd, refuse_if_missing
from ..storage.interface import Sink, Storage
from ..storage.locks import refuse_in_running, temps_of
from ..storage.place import Place
from .attempt import ObjectSize, Target

Compression = Zstd | Literal["zstd"] | None


def _zstd_of(compression: Compression, *, is_named: bool) -> Zstd | None:
    """The compression that the user gave, or that the name implies."""
    if compression is None:
        return Zstd() if is_named else None
    if compression == "zstd":
        return Zstd()
    if not isinstance(compression, Zstd):
        raise ValueError(f'compression must be "zstd", a Zstd(…) or None, got {compression!r}')
    return compression


class FileTarget(Target):
    """One object at a path of the user's choice. It counts as committed once it is durable."""

    @classmethod
    def at(cls, place: Place, compression: Compression = None, *, may_mislead: bool = False) -> Self:
        """A target at a place given by the user. Raises the errors of a path or compression that cannot be used.

        With `may_mislead`, an uncompressed archive may have a name that implies compression.
        """
        storage, name = place.object()
        zstd = _zstd_of(compression, is_named=promises_zstd(name, place.shown, may_mislead=may_mislead))
        if zstd is not None:
            refuse_if_missing()
        return cls(storage, name, zstd)

    def __init__(self, storage: Storage, name: str, zstd: Zstd | None = None) -> None:
        """`zstd`: how to compress the archive while it is written; None for no compression."""
        super().__init__(storage, name)
        self._zstd = zstd
        if not self.storage.remote and Path(self.path).is_dir():
            example = os.path.join(self.path, "checkpoint.ackpt.tar")
            raise IsAFolderError(f"{self.path} is a folder; give the path of a file, such as {example}")
        if not self.storage.remote:
            refuse_in_running(Path(self.path).parent)

    def open(self, size: ObjectSize) -> Sink:
        if not self.storage.remote:
            self.storage.sweep("", temps_of(self._name, self.storage.names("")), delete=True)
        if self._zstd is not None:
            return CompressingSink(
                self.storage,
                self._name,
                num_bytes=size.num_bytes,
                segment_bytes=size.segment_bytes,
                packing=ZstdFrames(self._zstd.level),
                num_threads=self._zstd.num_threads,
            )
        return super().open(size)

    def check(self) -> None:
        self.storage.prove()

    @property
    def is_compressed(self) -> bool:
        return self._zstd is not None

    @property
    def in_order(self) -> bool:
        return self.storage.in_order or self.is_compressed

    def part_segments(self, num_bytes: int, segment_bytes: int) -> int:
        return 1 if self.is_compressed else self.storage.part_segments(num_bytes, segment_bytes)

    def discard(self) -> None:
        """Do nothing: the file is whole, and may have replaced an older one."""
