"""Which groups of a state have the very bytes of the commit before: a training that stands still, a snapshot that is stale.

In: where the tensors of each group lie, blocks as they are digested. Out: one digest for each group.
Knows nothing of: who writes.

The digests of whole blocks serve the group that fills them, so only what it shares with others at either end is digested
a second time. A group is therefore compared as it lies in the file: one that spans several blocks and has moved since,
because what is before it has grown, is not known to be the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..format import digests
from ..spec import BLOCK_BYTES, Extent


class GroupDigests:
    """The digests of one archive's groups. `note` is called from any thread, once for each block."""

    def __init__(self, groups: Mapping[str, Sequence[Extent]]) -> None:
        self._groups = groups
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

    def result(self, of_blocks: bytes | bytearray) -> dict[str, bytes]:
        """One digest for each group that has bytes, once all its blocks were noted; `of_blocks`: the blocks' own."""
        return {
            name: digests.block_digest(b"".join(self._pieces(extents, of_blocks)))
            for name, extents in self._groups.items()
            if any(extent.length for extent in extents)
        }

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


def _ends(extent: Extent) -> list[tuple[int, int, int]]:
    """What of an extent fills no whole block: (block, begin, end) in it, none, one or two of them."""
    if not extent.length:
        return []
    first, begin = divmod(extent.offset, BLOCK_BYTES)
    last, end = divmod(extent.end, BLOCK_BYTES)
    if first == last:
        return [(first, begin, end)]
    return ([(first, begin, BLOCK_BYTES)] if begin else []) + ([(last, 0, end)] if end else [])
