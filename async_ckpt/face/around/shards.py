"""Weights divided into files in the way of `save_pretrained`.

In: tensors by name. Out: safetensors files, front to back, and their index. Knows nothing of: where they are written.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

import torch

from ...core.format import safetensors
from ...core.staging.device import dense_blocks, memmove
from ...core.state.names import dtype_name
from ...core.storage.disk import address
from ...core.storage.interface import Reader
from .hf_weights import Weights, json_bytes

MAX_SHARD_BYTES: Final = 5 * 10**9
INDEX: Final = "model.safetensors.index.json"
_HEADER_MODULO: Final = 8


class Shard(NamedTuple):
    """One safetensors file: its header, and the tensors behind it."""

    name: str
    head: bytes
    tensors: dict[str, torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return len(self.head) + sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def begins(self) -> list[int]:
        """The offset of each tensor in the file."""
        return list(accumulate([t.nbytes for t in self.tensors.values()], initial=len(self.head)))[:-1]

    def pieces(self) -> Iterator[memoryview]:
        """The bytes of the file, from front to back."""
        yield memoryview(self.head)
        for tensor in self.tensors.values():
            for _, block in dense_blocks(tensor, 0, tensor.nbytes):
                yield view_of(block)


class ShardReader(Reader):
    """Reads a shard like a stored file, in any order and from any thread."""

    def __init__(self, shard: Shard) -> None:
        self.num_bytes = shard.num_bytes
        self._head = shard.head
        self._tensors, self._begins = list(shard.tensors.values()), shard.begins

    def read_into(self, offset: int, target: memoryview) -> None:
        end = offset + len(target)
        head = self._head[offset:end]
        target[: len(head)] = head
        first = max(0, bisect_right(self._begins, offset) - 1)
        for begin, tensor in zip(self._begins[first:], self._tensors[first:], strict=True):
            if begin >= end:
                break
            inside = max(0, offset - begin), min(tensor.nbytes, end - begin)
            for at, block in dense_blocks(tensor, *inside):
                place = address(target) + begin + at - offset
                memmove(place, block.data_ptr(), block.numel())


def view_of(flat: torch.Tensor) -> memoryview:
    """A view of a dense uint8 tensor's memory. The tensor must outlive it."""
    return memoryview((ctypes.c_ubyte * flat.numel()).from_address(flat.data_ptr())).cast("B")


def shards_of(weights: Weights, max_bytes: int) -> list[Shard]:
    """The shards of weights, filled in the order of their names, each up to `max_bytes`."""
    parts: list[list[str]] = [[]]
    room = max_bytes
    for name, tensor in weights.tensors.items():
        if weights.stem == "model" and parts[-1] and tensor.nbytes > room:
            parts.append([])
            room = max_bytes
        parts[-1].append(name)
        room -= tensor.nbytes
    shards = []
    for number, names in enumerate(parts, start=1):
        # Descending item sizes align every tensor without padding, which the format forbids.
        names.sort(key=lambda name: -weights.tensors[name].element_size())
        part = f"-{number:05d}-of-{len(parts):05d}" if len(parts) > 1 else ""
        tensors = {name: weights.tensors[name] for name in names}
        shards.append(Shard(f"{weights.stem}{part}.safetensors", _head(tensors, weights.tied), tensors))
    return shards


def _head(tensors: Mapping[str, torch.Tensor], tied: Mapping[str, str]) -> bytes:
    entries, at = [], 0
    for name, tensor in tensors.items():
        end = at + tensor.nbytes
        entries.append(safetensors.Entry(name, dtype_name(tensor.dtype), tuple(tensor.shape), at, end))
        at = end
    metadata = {other: kept for other, kept in tied.items() if kept in tensors} | {"format": "pt"}
    return safetensors.header(entries, metadata, header_bytes_modulo=_HEADER_MODULO, at=0, of_model=True)


def index_of(shards: Sequence[Shard], weight_map: Mapping[str, str] | None = None, /, **more: Any) -> bytes:
    """The index of several shards, with `more` in its metadata. `weight_map` replaces the map of tensors to shards."""
    tensors = [tensor for shard in shards for tensor in shard.tensors.values()]
    numbers = {
        "total_size": sum(tensor.nbytes for tensor in tensors),
        "total_parameters": sum(tensor.numel() for tensor in tensors),
    }
    if weight_map is None:
        weight_map = {name: shard.name for shard in shards for name in shard.tensors}
    return json_bytes({"metadata": {**numbers, **more}, "weight_map": weight_map})
