"""Files that exist only while they are read: concatenated pieces, and zeros.

In: bytes, and readers. Out: readers. Knows nothing of: their content.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from ...core.storage.interface import Reader


class Zeros(Reader):
    """A file of zeros in the place of a missing one. No tensor is read from it, only the bytes around it."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def read_into(self, offset: int, target: memoryview) -> None:  # noqa: ARG002
        target[:] = bytes(len(target))

    def close(self) -> None:
        """Do nothing: there is no file."""


class JoinedFile(Reader):
    """Texts and files, one after the other, as one file. The files belong to whoever opened them."""

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

    def close(self) -> None:
        """Do nothing: whoever opened the files closes them."""
