"""Which groups of a state have the very bytes of the commit before: a training that stands still, a snapshot that is stale.

In: where the tensors of each group lie, blocks as they are digested. Out: one digest for each group.
Knows nothing of: who writes.

The digests of whole blocks serve the group that fills them, so only what it shares with others at either end is digested
a second time. A group that has moved in the file, because what is before it has grown, is digested once more as a whole, by
the blocks of the place where it was.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..format import digests
from ..spec import BLOCK_BYTES, Extent

Groups = Mapping[str, Sequence[Extent]]


class GroupDigest(NamedTuple):
    """What the bytes of a group are known by."""

    here: bytes
    """By the blocks of this file."""
    before: bytes
    """By those of the file before, which is the same for a group that lies alike."""


class GroupDigests:
    """The digests of one archive's groups. `note` is called from any thread, once for each block."""

    def __init__(self, groups: Groups, before: Groups | None = None) -> None:
        """`before`: where the groups lay in the file that this one is compared with."""
        before = before or {}
        self._groups = groups
        self._moved = {
            name: [MovedExtent(extent, old.offset) for extent, old in zip(extents, before[name], strict=True)]
            for name, extents in groups.items()
            if name in before and _has_moved(extents, before[name])
        }
        # By block: what of it is a group's, from where to where. Groups with tied tensors may share it.
        self._shared: dict[int, set[tuple[int, int]]] = {}
        for extent in (extent for extents in groups.values() for extent in extents):
            for number, begin, end in _ends(extent):
                self._shared.setdefault(number, set()).add((begin, end))
        self._parts: dict[tuple[int, int, int], bytes] = {}

    def note(self, number: int, block: memoryview) -> None:
        """This is block `number` of the file."""
        for begin, end in self._shared.get(number, ()):
            self._parts[number, begin, end] = digests.block_digest(block[begin:end])
        for moved in self._moved.values():
            for extent in moved:
                extent.note(number * BLOCK_BYTES, block)

    def result(self, of_blocks: bytes | bytearray) -> dict[str, GroupDigest]:
        """Those of each group that has bytes, once all its blocks were noted; `of_blocks`: the blocks' own."""
        found = {}
        for name, extents in self._groups.items():
            if any(extent.length for extent in extents):
                here = before = digests.block_digest(b"".join(self._pieces(extents, of_blocks)))
                if name in self._moved:
                    before = digests.block_digest(b"".join(moved.pieces() for moved in self._moved[name]))
                found[name] = GroupDigest(here, before)
        return found

    def _pieces(self, extents: Sequence[Extent], of_blocks: bytes | bytearray) -> list[bytes]:
        found = []
        for extent in extents:
            ends = _ends(extent)
            first, last = -(-extent.offset // BLOCK_BYTES), extent.end // BLOCK_BYTES
            whole = of_blocks[first * digests.DIGEST_BYTES : last * digests.DIGEST_BYTES]
            before = [self._parts[key] for key in ends if key[0] < first]
            after = [self._parts[key] for key in ends if key[0] >= first]
            found += [extent.length.to_bytes(8, "big"), *before, bytes(whole), *after]
        return found


class MovedExtent:
    """An extent, digested by the blocks that it lay in elsewhere; each is in two blocks of this file at most."""

    def __init__(self, extent: Extent, offset_before: int) -> None:
        self._extent, self._before = extent, Extent(offset_before, extent.length)
        self._shift = offset_before - extent.offset
        self._lock = threading.Lock()
        self._digests: dict[int, bytes] = {}
        self._halves: dict[int, bytes] = {}  # of blocks whose other part is still to come; under _lock

    def note(self, offset: int, block: memoryview) -> None:
        """These bytes are in the file from `offset` on."""
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
            other = self._halves.pop(number, None)
            if other is None:
                self._halves[number] = bytes(part)
                return
        self._digests[number] = (
            digests.joined_digest(part, other)
            if begin == first
            else digests.joined_digest(memoryview(other), part)
        )

    def pieces(self) -> bytes:
        in_order = (self._digests[number] for number in sorted(self._digests))
        return self._extent.length.to_bytes(8, "big") + b"".join(in_order)


def _has_moved(extents: Sequence[Extent], before: Sequence[Extent]) -> bool:
    """Whether these are cut into other blocks than before, and may have the same bytes all the same."""
    return [extent.length for extent in extents] == [extent.length for extent in before] and any(
        extent.offset % BLOCK_BYTES != old.offset % BLOCK_BYTES
        for extent, old in zip(extents, before, strict=True)
    )


def _ends(extent: Extent) -> list[tuple[int, int, int]]:
    """What of an extent fills no whole block: (block, begin, end) in it, none, one or two of them."""
    if not extent.length:
        return []
    first, begin = divmod(extent.offset, BLOCK_BYTES)
    last, end = divmod(extent.end, BLOCK_BYTES)
    if first == last:
        return [(first, begin, end)]
    return ([(first, begin, BLOCK_BYTES)] if begin else []) + ([(last, 0, end)] if end else [])
