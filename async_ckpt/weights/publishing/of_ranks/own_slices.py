"""The share of one rank in a spread model: the slices that it publishes.

In: the weights of one rank. Out: plain tensors by the names of their slices. Knows nothing of: how versions are
written.

No call waits for another rank: a rank publishes versions of its slices, against a base of its own. A version of the
model exists when each rank has published it in the same call, which rank 0 names (`plumbing.Channel`).
"""

from __future__ import annotations

from math import prod

import torch

from ....errors import UnsupportedStateError
from ....plumbing import boxes, hf_weights, leaf_names, sharded
from ...delta import SliceOf


def own_slices(weights: hf_weights.Weights) -> tuple[hf_weights.Weights, dict[str, SliceOf]]:
    """The plain tensors that this rank publishes, by the names of their slices, and the slices.

    Of slices that several ranks hold alike, by their placements, the first rank publishes them. A plain tensor is
    each rank's own. Raises UnsupportedStateError for a model whose checkpoints have other tensors than its memory.
    """
    empty = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in weights.tensors.items()
    }
    if weights.as_published(dict(empty)).keys() != empty.keys():
        raise UnsupportedStateError(
            "this model is sharded, and its tensors in memory differ from those in its checkpoints; use export_hf "
            "instead",
            path="",
        )
    slicer = sharded.Slicer()
    tensors: dict[str, torch.Tensor] = {}
    slices: dict[str, SliceOf] = {}
    for name, tensor in weights.tensors.items():
        sliced = slicer.slice(tensor, name=name)
        if sliced.slices.replicas().number:
            continue
        shape, dtype = sliced.slices.global_shape, leaf_names.dtype_name(tensor.dtype)
        held = list(zip(map(boxes.Box.of, sliced.slices.rectangles), sliced.parts, strict=True))
        if not prod(shape):  # an empty tensor, of which no rank holds a slice
            held = [(boxes.Box.whole(shape), torch.empty(shape, dtype=tensor.dtype, device="cpu"))]
        for box, part in held:
            key = f"{name}{box}"
            tensors[key] = part.detach()
            slices[key] = SliceOf(name, dtype, shape, *box)
    return weights._replace(tensors=tensors, tied={}, as_published=dict), slices
