"""`digests.json`, the last member: the xxh3-128 of every 4 MiB block of the file before its own data, and of itself.

In: block digests. Out: the member's bytes, whose size is known before the digests are. Knows nothing of: files.
The text is canonical: a reader rebuilds it from the parsed digests and compares, so that every flipped bit is found.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Final

import xxhash

from ..spec import BLOCK_BYTES

MEMBER: Final = "digests.json"
DIGEST_BYTES: Final = 16
_TAIL: Final = b'"}\n'


def block_digest(block: memoryview | bytes) -> bytes:
    """The xxh3-128 of a block, big-endian. Releases the GIL."""
    return xxhash.xxh3_128_digest(block)


def damaged_blocks(offset: int, data: memoryview, expected: bytes) -> list[int]:
    """The numbers of the blocks, from `offset` on, whose digests differ from the expected ones. Releases the GIL."""
    numbers = []
    for begin in range(0, len(data), BLOCK_BYTES):
        number = (offset + begin) // BLOCK_BYTES
        digest = expected[number * DIGEST_BYTES :][:DIGEST_BYTES]
        if block_digest(data[begin : begin + BLOCK_BYTES]) != digest:
            numbers.append(number)
    return numbers


def joined_digest(parts: Iterable[memoryview]) -> bytes:
    """The digest of a block that comes in parts."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.digest()


def num_blocks(covered_bytes: int) -> int:
    return -(-covered_bytes // BLOCK_BYTES)


def num_bytes(covered_bytes: int) -> int:
    """Size of the member for a file with this many bytes before the member's data."""
    return len(_head(covered_bytes, b"")) + num_blocks(covered_bytes) * DIGEST_BYTES * 2 + DIGEST_BYTES * 2 + len(_TAIL)


def dump(covered_bytes: int, digests: bytes) -> bytes:
    """The member's bytes. `digests` are concatenated, 16 bytes each."""
    head = _head(covered_bytes, digests)
    return head + block_digest(head).hex().encode() + _TAIL


def parse(data: bytes, *, covered_bytes: int) -> bytes:
    """The concatenated block digests. Raises ValueError unless every byte is as `dump` writes it."""
    try:
        digests = bytes.fromhex(json.loads(data)["blocks"])
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{MEMBER} is malformed: {error!r}") from error
    if len(digests) != num_blocks(covered_bytes) * DIGEST_BYTES or dump(covered_bytes, digests) != data:
        raise ValueError(f"{MEMBER} does not match its own digest")
    return digests


def self_digest(data: bytes) -> str:
    """The digest of the member itself, which identifies the archive in its manifest: it covers all block digests."""
    return data[-len(_TAIL) - 2 * DIGEST_BYTES : -len(_TAIL)].decode("ascii")


def _head(covered_bytes: int, digests: bytes) -> bytes:
    return (
        f'{{"algorithm":"xxh3_128","block_bytes":{BLOCK_BYTES},"covered_bytes":{covered_bytes},'
        f'"blocks":"{digests.hex()}","self":"'
    ).encode()
