"""The slices that a rank publishes of a spread model, and whole tensors made of the slices of all ranks.

In: the weights of one rank; the slices of all ranks, and their values. Out: plain tensors by the names of their slices;
the values of whole tensors, in new or given tensors. Knows nothing of: where values are stored, modules, versions.

No call waits for another rank: each rank publishes versions of its slices, as deltas against its own base. A version of
the model exists when each rank has published it in the same call, which rank 0 names (`plumbing.Channel`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch

from ....plumbing import boxes, device, hf_weights, leaf_names, sharded
from ...delta import SliceOf


class SlicedTensor(NamedTuple):
    """One tensor of the model, and its slices: for each, the rank, the name on that rank, and the box in the tensor."""

    dtype: str
    shape: tuple[int, ...]
    slices: list[tuple[int, str, boxes.Box]]

    def pieced(self, values: Callable[[int, str], tuple[torch.Tensor, str]]) -> PiecedTensor:
        """The tensor with the bytes and checksums of its slices. `values` returns them for a rank and a name."""
        dtype, pieces = leaf_names.dtype_named(self.dtype), []
        for rank, key, box in self.slices:
            data, checksum = values(rank, key)
            pieces.append(TensorPiece(box, data.view(dtype).view(box.sizes), checksum))
        return PiecedTensor(dtype, self.shape, pieces)


def own_slices(weights: hf_weights.Weights) -> tuple[hf_weights.Weights, dict[str, SliceOf]]:
    """The plain tensors that this rank publishes, by the names of their slices, and the slices.

    If several ranks have the same slice by their placements, the first of them publishes it. Each rank publishes its
    plain tensors. Raises UnsupportedStateError for a model whose checkpoints have other tensors than its memory.
    """
    weights.refuse_converted()
    slicer = sharded.Slicer()
    tensors: dict[str, torch.Tensor] = {}
    slices: dict[str, SliceOf] = {}
    for name, tensor in weights.tensors.items():
        sliced = slicer.slice(tensor, name=name)
        if sliced.slices.replicas().number:
            continue
        shape, dtype = sliced.slices.global_shape, leaf_names.dtype_name(tensor.dtype)
        held = [(one.box, part) for one, part in zip(sliced.slices.rectangles, sliced.parts, strict=True)]
        if not prod(shape):  # an empty tensor, so no rank has a slice of it
            held = [(boxes.Box.whole(shape), torch.empty(shape, dtype=tensor.dtype, device="cpu"))]
        for box, part in held:
            key = f"{name}{box}"
            tensors[key] = part.detach()
            slices[key] = SliceOf(name, dtype, shape, *box)
    return weights._replace(tensors=tensors, tied={}, as_published=dict), slices


def sliced_tensors(of_ranks: Sequence[Mapping[str, SliceOf]]) -> dict[str, SlicedTensor]:
    """The tensors of a model from the slices of all ranks. Omits slices that slices of lower ranks cover.

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
    """The values of one box of a tensor. `checksum` is the checksum of their bytes, or empty if unknown."""

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
        """The tensor on the host, without a copy if it is in one piece. Callers must not write to it."""
        whole = self._in_one_piece
        if whole is None:
            whole = torch.empty(self.shape, dtype=self.dtype, device="cpu")
            self.copy_to(whole)
        return whole

    @property
    def _in_one_piece(self) -> torch.Tensor | None:
        is_one = len(self.pieces) == 1 and self.pieces[0].box == boxes.Box.whole(self.shape)
        return self.pieces[0].values if is_one else None
