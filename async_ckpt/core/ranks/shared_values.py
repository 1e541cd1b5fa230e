"""The values besides large tensors that should be equal on all ranks: plain values and small tensors.

In: the skeleton of one rank, and its archive's blocks as they are digested; archives of others on storage. Out: one
digest, and the names of values that differ. Knows nothing of: receipts, which ranks are asked.

Every rank has its small tensors in its own archive, so values that turn out to differ (timers, running statistics) are
saved for each rank.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NamedTuple

from ...errors import CheckpointError
from ..format import digests, index, tar
from ..format.layout import Layout
from ..pickles.object_digests import object_digests
from ..spec import BLOCK_BYTES, MIB, Extent, TensorSpec
from ..state.names import dotted, is_within
from ..state.skeletons import plain_leaves
from ..storage.interface import Reader, Storage

_GAP_BYTES: Final = MIB  # small tensors with a smaller gap are read at once


class SharedValues:
    """The shared values in one save of this rank. `note` is called from any thread, once for each block."""

    def __init__(
        self,
        skeleton: str,
        objects: bytes | None,
        small: Mapping[str, int],
        specs: Sequence[TensorSpec],
        per_rank: Collection[str],
        of_some: Collection[str] = (),
    ) -> None:
        """`small` gives the numbers of the specs of small tensors by their names. Values in `per_rank` do not count.
        Values in `of_some` are known to exist only on some ranks.
        """
        self._skeleton, self._objects, self._per_rank = skeleton, objects, tuple(sorted(per_rank))
        self._excluded, self._of_some = frozenset(per_rank), frozenset(of_some)
        self._small = {name: number for name, number in sorted(small.items()) if not is_within(name, self._excluded)}
        self._specs = specs
        self._extents: list[Extent] = []
        self._data: list[bytearray] = []
        self._in_block: dict[int, list[int]] = {}

    def lie_in(self, layout: Layout) -> None:
        """Note where the small tensors are in the archive."""
        begins = layout.plan.begins
        for number in self._small.values():
            begin = begins[number]
            self._extents.append(Extent(0 if begin is None else layout.base + begin, self._specs[number].num_bytes))
        self._data = [bytearray(extent.length) for extent in self._extents]
        for at, extent in enumerate(self._extents):
            for block in range(extent.offset // BLOCK_BYTES, -(-extent.end // BLOCK_BYTES)):
                self._in_block.setdefault(block, []).append(at)

    def note(self, number: int, block: memoryview) -> None:
        """Copy the shared values out of block `number` of the file."""
        offset = number * BLOCK_BYTES
        for at in self._in_block.get(number, ()):
            extent = self._extents[at]
            begin, end = max(extent.offset, offset), min(extent.end, offset + len(block))
            self._data[at][begin - extent.offset : end - extent.offset] = block[begin - offset : end - offset]

    def digest(self) -> str:
        """The digest of all values, once every block was noted: 16 characters for the values that all ranks have, and
        16 for those in `of_some`. Takes time for each value, so it must not be called on the caller's thread.
        """
        leaves: list[tuple[str, str | bytearray]] = sorted(
            plain_leaves(json.loads(self._skeleton), _digests(self._objects)).items()
        )
        halves: tuple[list[bytes | bytearray], ...] = [json.dumps(self._per_rank).encode()], []
        for name, value in itertools.chain(leaves, zip(self._small, self._data, strict=True)):
            if not is_within(name, self._excluded):
                half = halves[is_within(name, self._of_some)]
                half += [name.encode(), value.encode() if isinstance(value, str) else value]
        return "".join(digests.block_digest(b"\0".join(half)).hex()[:16] for half in halves)


def _digests(objects: bytes | None) -> Callable[[int], str]:
    return str if objects is None else object_digests(objects)


class _Archived:
    """The values of one rank's archive."""

    def __init__(self, reader: Reader, path: str) -> None:
        self._reader = reader
        head = self._read(Extent(0, min(BLOCK_BYTES, reader.num_bytes)))
        end = tar.BLOCK + tar.parse_header(head[: tar.BLOCK])[1]
        if end > len(head):
            head += self._read(Extent(len(head), end - len(head)))
        self.index = index.parse(head[tar.BLOCK : end], path=path)
        self.small = {
            dotted(tensor.path): (tensor.dtype, tensor.shape, tensor.slices[0].extent)
            for tensor in self.index.tensors
            if not tensor.is_spread
            if len(tensor.slices) == 1 and tensor.slices[0].box.sizes == tensor.shape
        }
        objects = self.index.member(index.OBJECTS)
        self.leaves = plain_leaves(self.index.skeleton, _digests(None if objects is None else self._read(objects.data)))

    def bytes_of(self, extents: Collection[Extent]) -> dict[Extent, bytes]:
        """The bytes of small extents; neighbours are read at once."""
        pieces: dict[Extent, bytes] = {}
        spans: list[list[Extent]] = []
        for extent in sorted(extents, key=lambda extent: extent.offset):
            if spans and extent.offset - spans[-1][-1].end < _GAP_BYTES:
                spans[-1].append(extent)
            else:
                spans.append([extent])
        for span in spans:
            begin = span[0].offset
            data = self._read(Extent(begin, max(extent.end for extent in span) - begin))
            pieces |= {extent: data[extent.offset - begin :][: extent.length] for extent in span}
        return pieces

    def _read(self, extent: Extent) -> bytes:
        data = bytearray(extent.length)
        self._reader.read_into(extent.offset, memoryview(data))
        return bytes(data)


class Values(NamedTuple):
    """The shared values of one rank, by their names."""

    plain: Mapping[str, str]
    tensors: Mapping[str, bytes]
    """The bytes of small tensors. `plain` also has an entry for each of them, with its kind."""


def values_of(storage: Storage, path: str, small_bytes: int, per_rank: Collection[str]) -> Values:
    """The plain values, and tensors of up to `small_bytes`, in one rank's archive, except those in `per_rank`."""
    excluded = frozenset(per_rank)
    with storage.open(path) as reader:
        try:
            archive = _Archived(reader, storage.locate(path))
            chosen = {
                name: extent
                for name, (_, _, extent) in archive.small.items()
                if extent.length <= small_bytes and not is_within(name, excluded)
            }
            data = archive.bytes_of(set(chosen.values()))
        except (ValueError, EOFError) as error:
            raise CheckpointError(f"{storage.locate(path)} cannot be compared: {error}") from error
    plain = {name: text for name, text in archive.leaves.items() if not is_within(name, excluded)}
    return Values(plain, {name: data[extent] for name, extent in chosen.items()})


def differing(of_ranks: Sequence[Values]) -> list[str]:
    """The names whose values are not equal on all ranks that have them."""
    plain: dict[str, str] = {}
    tensors: dict[str, bytes] = {}
    different: set[str] = set()
    for values in of_ranks:
        different |= {name for name, text in values.plain.items() if plain.setdefault(name, text) != text}
        different |= {name for name, data in values.tensors.items() if tensors.setdefault(name, data) != data}
    return sorted(different)


def lacking(of_ranks: Sequence[Values], all_names: Collection[str]) -> list[str]:
    """The names that some ranks lack."""
    return sorted({name for values in of_ranks for name in set(all_names).difference(values.plain)})


def apart(names: Collection[str], common: Collection[str]) -> tuple[str, ...]:
    """The shortest prefixes of the names that are not in `common`, such that no common name begins with them."""
    around = {name[:end] for name in common for end in (*_ends(name), len(name))}
    left = set(names).difference(common)
    shortest = (
        next((name[:end] for end in (*_ends(name), len(name)) if name[:end] not in around), None) for name in left
    )
    return tuple(sorted({name for name in shortest if name is not None}))


def _ends(name: str) -> list[int]:
    return [at for at, one in enumerate(name) if one == "."]
