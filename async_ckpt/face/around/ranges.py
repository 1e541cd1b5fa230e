"""Reads byte ranges of whole tensors, whose slices may be in several archives.

In: files, and byte ranges of their tensors in row-major order. Out: host memory with these bytes.
Knows nothing of: the use of the bytes.

With these ranges, a file of full tensors is written from front to back out of the archives of many ranks, with only the
current part in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Final, NamedTuple

import torch

from ...core.loading.archives.contents import Contents
from ...core.loading.fill import Wanted, fill, planned
from ...core.slicing.slices import flat_range
from ...core.spec import DTYPES, SEGMENT_BYTES

# A dtype for each item size in bytes; only the size matters.
_ITEMS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Range(NamedTuple):
    """`length` bytes of a tensor from its byte `begin`, to be read to byte `target` of the memory."""

    file: Contents
    number: int
    begin: int
    length: int
    target: int


def read_ranges(ranges: Iterable[Range], memory: torch.Tensor) -> None:
    """Fill host memory, a dense uint8 tensor, with ranges that begin and end at whole items.

    Raises CorruptCheckpointError.
    """
    by_file: dict[int, tuple[Contents, list[Wanted]]] = {}
    for range_ in ranges:
        by_file.setdefault(id(range_.file), (range_.file, []))[1].extend(_wanted(range_, memory))
    fill(planned(by_file.values()))


def chunks_of(file: Contents, number: int) -> Iterator[torch.Tensor]:
    """The items of a tensor, flat, in pieces of 32 MiB that reuse one buffer. Raises CorruptCheckpointError."""
    dtype = file.dtype(number)
    total = prod(file.index.tensors[number].shape) * dtype.itemsize
    step = SEGMENT_BYTES // dtype.itemsize * dtype.itemsize
    memory = torch.empty(min(step, total), dtype=torch.uint8)
    for begin in range(0, total, step):
        length = min(step, total - begin)
        read_ranges([Range(file, number, begin, length, 0)], memory)
        yield memory[:length].view(dtype)


def _wanted(range_: Range, memory: torch.Tensor) -> Iterator[Wanted]:
    tensor = range_.file.index.tensors[range_.number]
    item_bytes = DTYPES[tensor.dtype][0]
    at = range_.target
    for offsets, sizes in flat_range(
        tensor.shape, range_.begin // item_bytes, (range_.begin + range_.length) // item_bytes
    ):
        num_bytes = prod(sizes) * item_bytes
        into = memory[at : at + num_bytes]
        yield Wanted(range_.number, into.view(_ITEMS[item_bytes]).view(sizes), offsets)
        at += num_bytes
