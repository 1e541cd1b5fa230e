"""Ranges of the bytes of whole tensors, wherever their slices lie.

In: files, and ranges of their tensors as these are row by row. Out: host memory with these bytes. Knows nothing of: what they are for.

So a file with full tensors is written from front to back out of the archives of many ranks, and never is more of it in memory
than is being written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Final, NamedTuple

import torch

from ..slicing.slices import flat_range
from ..spec import DTYPES
from .archives.contents import Contents
from .fill import Wanted, fill, planned

# Of the size of an item; which of them does not matter.
_ITEMS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Range(NamedTuple):
    """`length` bytes of a tensor of a file, from its byte `begin` on, go to byte `target` of the memory."""

    file: Contents
    number: int
    begin: int
    length: int
    target: int


def read_ranges(ranges: Iterable[Range], memory: torch.Tensor) -> None:
    """Fill host memory, a dense uint8 tensor, with these. Each begins and ends with whole items.

    Raises CorruptCheckpointError.
    """
    by_file: dict[int, tuple[Contents, list[Wanted]]] = {}
    for one in ranges:
        by_file.setdefault(id(one.file), (one.file, []))[1].extend(_wanted(one, memory))
    fill(planned(by_file.values()))


def _wanted(one: Range, memory: torch.Tensor) -> Iterator[Wanted]:
    told = one.file.index.tensors[one.number]
    item_bytes = DTYPES[told.dtype][0]
    at = one.target
    for offsets, sizes in flat_range(
        told.shape, one.begin // item_bytes, (one.begin + one.length) // item_bytes
    ):
        num_bytes = prod(sizes) * item_bytes
        # Where an archive of ours has the tensor, items are aligned; where another program does, they need not be.
        into = memory[at : at + num_bytes]
        yield Wanted(one.number, into.view(_ITEMS[item_bytes]).view(sizes), offsets)
        at += num_bytes
