"""Virtual files: concatenated pieces, zeros, and ranges as files of Python's `io`.

In: bytes, and readers. Out: readers, and raw files. Knows nothing of: their content.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

from ...core.storage.interface import Reader

ReadInto: TypeAlias = Callable[[int, memoryview], None]  # fills memory from an offset of a file


class Zeros(Reader):
    """Zeros in place of a missing file. They are read only as part of a block, never as a tensor."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def read_into(self, offset: int, target: memoryview) -> None:  # noqa: ARG002
        target[:] = bytes(len(target))


class JoinedFile(Reader):
    """Byte strings and files, concatenated to one file. Closing it does not close the files."""

    def __init__(self, pieces: Sequence[bytes | Reader]) -> None:
        self._pieces = pieces
        sizes = (len(piece) if isinstance(piece, bytes) else piece.num_bytes for piece in pieces)
        self._begins = [0, *accumulate(sizes)]
        self.num_bytes = self._begins[-1]

    def read_into(self, offset: int, target: memoryview) -> None:
        if offset + len(target) > self.num_bytes:
            raise EOFError(f"it ends at byte {self.num_bytes:,}")
        while target:
            number = bisect_right(self._begins, offset) - 1
            piece, at = self._pieces[number], offset - self._begins[number]
            part = target[: self._begins[number + 1] - offset]
            if isinstance(piece, bytes):
                part[:] = piece[at : at + len(part)]
            else:
                piece.read_into(at, part)
            offset, target = offset + len(part), target[len(part) :]


class RangeFile(io.RawIOBase):
    """`num_bytes` bytes from offset `begin` on, as a raw file. Closing it does not close the file that it reads."""

    def __init__(self, read_into: ReadInto, num_bytes: int, *, begin: int = 0) -> None:
        self._read_into, self._num_bytes, self._begin = read_into, num_bytes, begin
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + (0, self._at, self._num_bytes)[whence]  # SEEK_SET, SEEK_CUR, SEEK_END
        if at < 0:
            raise ValueError(f"cannot seek to byte {at}, before the beginning")
        self._at = at
        return at

    def readinto(self, target: Any) -> int:
        part = memoryview(target).cast("B")[: max(0, self._num_bytes - self._at)]
        if part:
            self._read_into(self._begin + self._at, part)
        self._at += len(part)
        return len(part)
