"""The digests of one archive's blocks, and of the groups of a state in that archive.

In: where the groups lie, blocks as they are digested. Out: the digests of the archive; one digest for each group. Knows
nothing of: who writes.

A group whose digest is the same as in the previous commit has the same bytes: the training stands still, or the
snapshot is stale. A group's digest is computed from the digests of the blocks that it fills, so only the ends that it
shares with other groups are digested a second time. A group that has moved in the file, because something before it has
grown, is also digested by the block boundaries of its previous position.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from ..format import digests
from ..format.layout import Image
from ..spec import BLOCK_BYTES, Extent

Groups = Mapping[str, Sequence[Extent]]


class BlockReader(Protocol):
    """Sees each block of an archive as it is digested."""

    def note(self, number: int, block: memoryview) -> None:
        """Look at block `number` of the file. Called from any thread, once for each block."""


class BlockDigests:
    """The digests of the blocks of one archive. A drain creates and owns them; any thread may note blocks, each block
    once.

    Needs no lock: every block has its own bytes in the table, and the drain seals the table once all blocks are noted.
    """

    def __init__(self, file: Image, readers: Sequence[BlockReader] = ()) -> None:
        self.covered = file.digests.data.offset if file.digests else 0  # bytes that are digested
        self.of_blocks = bytearray(digests.num_blocks(self.covered) * digests.DIGEST_BYTES)
        self.of_archive = ""
        self._readers = readers

    def note(self, offset: int, data: memoryview) -> None:
        """Digest `data`, which begins at `offset` of the file: whole blocks, or up to the end of the digested bytes."""
        for begin in range(0, len(data), BLOCK_BYTES):
            number, block = (offset + begin) // BLOCK_BYTES, data[begin : begin + BLOCK_BYTES]
            for reader in self._readers:
                reader.note(number, block)
            at = number * digests.DIGEST_BYTES
            self.of_blocks[at : at + digests.DIGEST_BYTES] = digests.block_digest(block)

    def sealed(self) -> bytes:
        """The table of digests as it is written into the file. Call it once all blocks are noted."""
        data = digests.dump(self.covered, bytes(self.of_blocks))
        self.of_archive = digests.self_digest(data)
        return data


class GroupDigest(NamedTuple):
    """The digest of the bytes of one group."""

    here: bytes
    """The digest by the block boundaries of this file."""
    before: bytes
    """The digest by the block boundaries of the previous file; equal to `here` for a group that has not moved."""


class GroupDigests:
    """The digests of one archive's groups. The planner creates it; it reads the blocks of one archive."""

    def __init__(self, groups: Groups, before: Groups | None = None) -> None:
        """`before` gives the extents of the groups in the file that this one is compared with."""
        before = before or {}
        self._groups = groups
        self._moved = {
            name: [MovedExtent(extent, old.offset) for extent, old in zip(extents, before[name], strict=True)]
            for name, extents in groups.items()
            if name in before and _has_moved(extents, before[name])
        }
        # By block: the parts of it (begin, end) that are the end of a group. Groups with tied tensors may share a part.
        self._shared: dict[int, set[tuple[int, int]]] = {}
        for extent in (extent for extents in groups.values() for extent in extents):
            for number, begin, end in _ends(extent):
                self._shared.setdefault(number, set()).add((begin, end))
        self._parts: dict[tuple[int, int, int], bytes] = {}

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of each group in the archive. Groups that share a tensor count its bytes each."""
        return {name: sum(extent.length for extent in extents) for name, extents in self._groups.items()}

    def note(self, number: int, block: memoryview) -> None:
        """Digest the parts of block `number` that only partly belong to a group, and the groups that have moved."""
        for begin, end in self._shared.get(number, ()):
            self._parts[number, begin, end] = digests.block_digest(block[begin:end])
        for moved in self._moved.values():
            for extent in moved:
                extent.note(number * BLOCK_BYTES, block)

    def result(self, of_blocks: bytes | bytearray) -> dict[str, GroupDigest]:
        """The digest of each group that has bytes, once all blocks are noted; `of_blocks` are the blocks' digests."""
        result = {}
        for name, extents in self._groups.items():
            if any(extent.length for extent in extents):
                here = before = digests.block_digest(b"".join(self._pieces(extents, of_blocks)))
                if name in self._moved:
                    before = digests.block_digest(b"".join(moved.pieces() for moved in self._moved[name]))
                result[name] = GroupDigest(here, before)
        return result

    def _pieces(self, extents: Sequence[Extent], of_blocks: bytes | bytearray) -> list[bytes]:
        pieces = []
        for extent in extents:
            ends = _ends(extent)
            first, last = -(-extent.offset // BLOCK_BYTES), extent.end // BLOCK_BYTES
            whole = of_blocks[first * digests.DIGEST_BYTES : last * digests.DIGEST_BYTES]
            before = [self._parts[key] for key in ends if key[0] < first]
            after = [self._parts[key] for key in ends if key[0] >= first]
            pieces += [extent.length.to_bytes(8, "big"), *before, bytes(whole), *after]
        return pieces


class MovedExtent:
    """An extent, digested by the block boundaries of its previous position. Each previous block lies in at most two
    blocks of this file.

    Two threads may note the two halves of such a block at once. The first one leaves a copy of its half under the lock;
    the second one takes that copy, and digests both halves without the lock.
    """

    def __init__(self, extent: Extent, offset_before: int) -> None:
        self._extent, self._before = extent, Extent(offset_before, extent.length)
        self._shift = offset_before - extent.offset
        self._lock = threading.Lock()
        self._digests: dict[int, bytes] = {}
        self._halves: dict[int, bytes] = {}  # blocks whose other half is missing; under _lock

    def note(self, offset: int, block: memoryview) -> None:
        """Digest the part of this extent in `block`, which is in the file from `offset` on."""
        at, end = max(offset, self._extent.offset), min(offset + len(block), self._extent.end)
        while at < end:
            number, begin = divmod(at + self._shift, BLOCK_BYTES)
            stop = min(end, at + BLOCK_BYTES - begin)
            self._note_part(number, at + self._shift, block[at - offset : stop - offset])
            at = stop

    def _note_part(self, number: int, begin: int, part: memoryview) -> None:
        first = max(number * BLOCK_BYTES, self._before.offset)
        last = min((number + 1) * BLOCK_BYTES, self._before.end)
        if len(part) == last - first:
            self._digests[number] = digests.block_digest(part)
            return
        with self._lock:
            half = self._halves.pop(number, None)
            if half is None:
                self._halves[number] = bytes(part)
                return
        head, tail = (part, memoryview(half)) if begin == first else (memoryview(half), part)
        self._digests[number] = digests.joined_digest((head, tail))

    def pieces(self) -> bytes:
        in_order = (self._digests[number] for number in sorted(self._digests))
        return self._extent.length.to_bytes(8, "big") + b"".join(in_order)


def _has_moved(extents: Sequence[Extent], before: Sequence[Extent]) -> bool:
    """True if the block boundaries have moved, while the sizes are unchanged, so that the bytes may still be equal."""
    return [extent.length for extent in extents] == [extent.length for extent in before] and any(
        extent.offset % BLOCK_BYTES != old.offset % BLOCK_BYTES for extent, old in zip(extents, before, strict=True)
    )


def _ends(extent: Extent) -> list[tuple[int, int, int]]:
    """The parts of an extent that do not fill a whole block, at most two: (block, begin, end)."""
    if not extent.length:
        return []
    first, begin = divmod(extent.offset, BLOCK_BYTES)
    last, end = divmod(extent.end, BLOCK_BYTES)
    if first == last:
        return [(first, begin, end)]
    return ([(first, begin, BLOCK_BYTES)] if begin else []) + ([(last, 0, end)] if end else [])
