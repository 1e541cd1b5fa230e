"""A tar of the compressed blocks of an archive, which a run stores at a place with `compression=`.

In: sizes of blocks. Out: the parts of the tar around them, and the extent of each block. Knows nothing of: compression.

The tar has `index.json`, which marks it as compressed; a member for each block of the archive, named by the number of
the block and its number of byte planes; and `sizes.txt`, with a line for each block, at a fixed distance from the end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from ..spec import BLOCK_BYTES, Extent, align_up
from . import index, tar

VERSION: Final = 3
PLANES: Final = (1, 4)
"""The numbers of byte planes that a block may be divided into. Four suit items of 2, 4 and 8 bytes."""
_SIZES: Final = "sizes.txt"
_LINE: Final = b"%8d %d\n"
_LINE_BYTES: Final = 11
# The size limit of a compressed block: in the worst case, zstd's output is less than 1 % larger than its input.
_MOST_BYTES: Final = BLOCK_BYTES + BLOCK_BYTES // 100
_HEAD: Final = re.compile(rb'\{"format":"%s","version":3,"compressed":\{' % index.FORMAT.encode())
# The tar header of the index, and its text.
HEAD_BYTES: Final = 2 * tar.BLOCK


class CompressedBlock(NamedTuple):
    """A compressed block: its number of bytes, and the number of byte planes that it was divided into."""

    num_bytes: int
    planes: int


def begins(data: bytes | bytearray | memoryview) -> bool:
    """True if these bytes begin such a tar."""
    return _HEAD.match(data, tar.BLOCK) is not None


def head(num_bytes: int) -> bytes:
    """The beginning of the tar for an archive of `num_bytes`."""
    facts = {"num_bytes": num_bytes, "block_bytes": BLOCK_BYTES, "block": "byte planes, zstd"}
    fields = {"format": index.FORMAT, "version": VERSION, "compressed": facts}
    return _member(index.MEMBER, json.dumps(fields, separators=(",", ":")).encode() + b"\n")


def content_bytes(data: bytes | bytearray) -> int:
    """The size of the archive, read from the beginning of the tar. Raises ValueError."""
    _, length = tar.parse_header(bytes(data[: tar.BLOCK]))
    facts = json.loads(data[tar.BLOCK : tar.BLOCK + length])["compressed"]
    num_bytes = facts["num_bytes"]
    if type(num_bytes) is not int or num_bytes < 0 or facts["block_bytes"] != BLOCK_BYTES:
        raise ValueError(f"{facts!r:.100} does not have the sizes of an archive and its blocks")
    return num_bytes


def block_header(number: int, block: CompressedBlock) -> bytes:
    """The tar header of a block, with the number of its planes in its name."""
    return tar.header(f"blocks/{number:08}.{block.planes}.zst", block.num_bytes, mtime=0)


def end(blocks: Sequence[CompressedBlock]) -> bytes:
    """The end of the tar: the sizes of all blocks."""
    return _member(_SIZES, b"".join(_LINE % block for block in blocks)) + bytes(tar.END_BYTES)


def end_extent(num_bytes: int, total_bytes: int) -> Extent:
    """The extent of `end` in a tar of `total_bytes`, for an archive of `num_bytes`. Raises ValueError without room."""
    length = tar.BLOCK + align_up(-(-num_bytes // BLOCK_BYTES) * _LINE_BYTES, tar.BLOCK) + tar.END_BYTES
    if total_bytes < HEAD_BYTES + length:
        raise ValueError("it is too short")
    return Extent(total_bytes - length, length)


def parse_end(data: bytes, num_bytes: int, at: int) -> Iterator[tuple[Extent, CompressedBlock]]:
    """The compressed blocks, each with its extent in the tar, including its header. `data` are the bytes from offset
    `at` on, made by `end`.

    Raises ValueError unless the blocks fill the tar up to `at`.
    """
    num_lines = -(-num_bytes // BLOCK_BYTES)
    if tar.parse_header(data[: tar.BLOCK]) != (_SIZES, num_lines * _LINE_BYTES):
        raise ValueError(f"{_SIZES} is not where it should be")
    offset = HEAD_BYTES
    for begin in range(tar.BLOCK, tar.BLOCK + num_lines * _LINE_BYTES, _LINE_BYTES):
        line = data[begin : begin + _LINE_BYTES]
        block = CompressedBlock(*map(int, line.split()))
        if line != _LINE % block or not 0 < block.num_bytes <= _MOST_BYTES or block.planes not in PLANES:
            raise ValueError(f"{line!r} in {_SIZES} is not the size of a block")
        yield Extent(offset, tar.BLOCK + block.num_bytes), block
        offset += tar.BLOCK + align_up(block.num_bytes, tar.BLOCK)
    if offset != at:
        raise ValueError(f"{_SIZES} does not describe the blocks")


def _member(name: str, data: bytes) -> bytes:
    return tar.header(name, len(data), mtime=0) + data + bytes(tar.padding_after(len(data)))
