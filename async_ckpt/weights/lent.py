"""The table of a version that is lent to other processes in memory: where its tensors are, and their checksums.

In: names, positions, checksums. Out: the bytes of a table, and the table parsed from them.
Knows nothing of: memory, processes.

A table begins with two lengths: that of its JSON, and that of the whole table. The JSON follows, then the small files,
one after the other. The memory that holds a table may be longer than the table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Final, NamedTuple

from ..plumbing import fields, spec
from .delta import MAX_VERSION, RankSlices, SliceOf, is_checksum, stays_inside

_LENGTH_BYTES: Final = 8
_HEAD_BYTES: Final = 2 * _LENGTH_BYTES


def loan_of_rank(token: str, rank: int) -> str:
    """The name under which a rank lends its slices. Rank 0 lends them under the token of the publisher itself."""
    return f"{token}.{rank}" if rank else token


class LentTensor(NamedTuple):
    """The position of one tensor: the index of its buffer among those that come with the table, and its first byte."""

    dtype: str
    shape: tuple[int, ...]
    buffer: int
    begin: int
    checksum: str

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * spec.DTYPES[self.dtype][0]


@dataclass(frozen=True)
class LentVersion:
    """A version in the memory of its publisher, with the small files published beside its weights."""

    version: int
    identity: str
    structure: str
    tensors: Mapping[str, LentTensor]
    files: Mapping[str, bytes]
    adapter: Mapping[str, str] = field(default_factory=dict)  # as in the index of a version
    slices: RankSlices = field(default_factory=RankSlices)  # as in the index of a version

    @property
    def slices_of_tensors(self) -> Mapping[str, SliceOf]:
        """The slice that each tensor contains. In a whole model, each slice is a whole tensor."""
        if self.slices.start:
            return self.slices.of_tensors
        return {n: SliceOf(n, t.dtype, t.shape, (0,) * len(t.shape), t.shape) for n, t in self.tensors.items()}


def dump_lent(lent: LentVersion) -> bytes:
    table = {
        "version": lent.version,
        "identity": lent.identity,
        "structure": lent.structure,
        "adapter": dict(lent.adapter),
        "start": lent.slices.start,
        "slices": dict(lent.slices.of_tensors),
        "tensors": lent.tensors,
        "files": {name: len(data) for name, data in lent.files.items()},
    }
    head = json.dumps(table).encode()
    num_bytes = _HEAD_BYTES + len(head) + sum(map(len, lent.files.values()))
    lengths = [length.to_bytes(_LENGTH_BYTES, "little") for length in (len(head), num_bytes)]
    return b"".join([*lengths, head, *lent.files.values()])


def table_bytes(data: memoryview) -> int:
    """The length of the table at the beginning of these bytes."""
    return int.from_bytes(data[_LENGTH_BYTES:_HEAD_BYTES], "little")


def parse_lent(data: memoryview, sizes: list[int]) -> LentVersion:
    """Parse a table. `sizes` are the sizes of the buffers in bytes.

    Raises ValueError if the table is malformed, or refers to bytes outside of the buffers.
    """
    begin = _HEAD_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    try:
        table = json.loads(bytes(data[_HEAD_BYTES:begin]))
        rows = table["tensors"].items()
        tensors = {
            name: LentTensor(*fields.row(place, (fields.text, _shape, fields.count, fields.count, fields.text)))
            for name, place in rows
        }
        files, at = {}, begin
        for name, num_bytes in fields.entries(table["files"], fields.count):
            files[name] = bytes(data[at : at + num_bytes])
            at += num_bytes
        adapter = {name: value for name, value in table["adapter"].items() if isinstance(value, str)}
        slices = RankSlices(table["start"], {n: SliceOf.parsed(value) for n, value in table["slices"].items()})
        lent = LentVersion(
            fields.count(table["version"]), table["identity"], table["structure"], tensors, files, adapter, slices
        )
        is_sound = lent.version <= MAX_VERSION and at <= len(data) and all(map(stays_inside, files))
        is_sound = is_sound and all(_lies_inside(tensor, sizes) for tensor in tensors.values())
        is_sound = is_sound and _are_slices(lent)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise ValueError(f"the table of a lent version cannot be read ({error!r:.200})") from error
    if not is_sound:
        raise ValueError("the table of a lent version names bytes that do not exist")
    return lent


def _shape(value: object) -> tuple[int, ...]:
    shape = fields.items(value, fields.count)
    if len(shape) > spec.MAX_DIMS:
        raise ValueError(f"a tensor has {len(shape)} dimensions")
    return shape


def _lies_inside(tensor: LentTensor, sizes: list[int]) -> bool:
    item_bytes = spec.DTYPES[tensor.dtype][0]
    return (
        tensor.buffer < len(sizes)
        and tensor.begin % item_bytes == 0
        and tensor.begin + tensor.num_bytes <= sizes[tensor.buffer]
        and is_checksum(tensor.checksum)
    )


def _are_slices(lent: LentVersion) -> bool:
    """Whether each tensor has the dtype and the size of its slice."""
    slices = lent.slices_of_tensors
    return lent.tensors.keys() == slices.keys() and all(
        (tensor.dtype, prod(tensor.shape)) == (slices[name].dtype, prod(slices[name].sizes))
        for name, tensor in lent.tensors.items()
    )
