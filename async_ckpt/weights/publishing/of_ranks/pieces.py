"""Whole tensors out of pieces: which slices make up each tensor of a model, and how its values come together.

In: the slices of all ranks, and their values. Out: the values of whole tensors, in new tensors or in given ones.
Knows nothing of: where the values lie, modules, versions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch

from ....plumbing import boxes, device
from ...delta import SliceOf


class SlicedTensor(NamedTuple):
    """One tensor of the model, and its slices: for each, the rank, its name there, and its place in the tensor."""

    dtype: str
    shape: tuple[int, ...]
    slices: list[tuple[int, str, boxes.Box]]


def sliced_tensors(of_ranks: Sequence[Mapping[str, SliceOf]]) -> dict[str, SlicedTensor]:
    """The tensors of a model by the slices of all ranks, without slices whose elements lower ranks have.

    Raises ValueError if slices disagree, or do not cover a tensor.
    """
    tensors: dict[str, SlicedTensor] = {}
    for rank, slices in enumerate(of_ranks):
        for key, part in slices.items():
            tensor = tensors.setdefault(part.name, SlicedTensor(part.dtype, part.global_shape, []))
            if (tensor.dtype, tensor.shape) != (part.dtype, part.global_shape):
                raise ValueError(f"ranks have {part.name!a} of other dtypes or shapes")
            tensor.slices.append((rank, key, boxes.Box(part.offsets, part.sizes)))
    for name, tensor in tensors.items():
        covered = boxes.cover(tensor.shape, [box for _, _, box in tensor.slices])
        if covered.missing:
            raise ValueError(f"no rank has published {name}{covered.missing[0]}")
        tensor.slices[:] = [tensor.slices[number] for number in sorted({number for number, _ in covered.taken})]
    return dict(sorted(tensors.items()))


class TensorPiece(NamedTuple):
    """The values of one box of a tensor; `checksum` is that of their bytes, or empty if it is not known."""

    box: boxes.Box
    values: torch.Tensor
    checksum: str = ""


class PiecedTensor(NamedTuple):
    """The values of a tensor in pieces that cover it. Where pieces overlap, the first one counts."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: list[TensorPiece]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> PiecedTensor:
        """A tensor in one piece."""
        shape = tuple(tensor.shape)
        return cls(tensor.dtype, shape, [TensorPiece(boxes.Box.whole(shape), tensor)])

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def copy_to(self, target: torch.Tensor) -> None:
        """Copy the values, bit by bit, into a tensor of the same dtype and shape on any device."""
        whole = self._in_one_piece
        if whole is not None:
            target.copy_(whole)
            return
        bits = device.as_integers(target)
        for box, values, _ in reversed(self.pieces):
            inside = tuple(slice(at, at + size) for at, size in zip(*box, strict=True))
            bits[inside].copy_(device.as_integers(values))

    def whole(self) -> torch.Tensor:
        """The tensor on the host, which must not be written to. It is not copied if it is in one piece."""
        whole = self._in_one_piece
        if whole is None:
            whole = torch.empty(self.shape, dtype=self.dtype, device="cpu")
            self.copy_to(whole)
        return whole

    @property
    def _in_one_piece(self) -> torch.Tensor | None:
        is_one = len(self.pieces) == 1 and self.pieces[0].box == boxes.Box.whole(self.shape)
        return self.pieces[0].values if is_one else None
