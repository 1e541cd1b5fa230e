"""The share of one rank in a spread model: the slices that it publishes, and the name of the start of all ranks.

In: the weights of one rank. Out: plain tensors by the names of their slices; one name for all ranks.
Knows nothing of: how versions are written.

No rank waits for another one or asks what it does: a rank publishes versions of its slices, against a base of its
own. A version of the model exists when each rank has published it in the same start of the training. Rank 0 gives
each start a name, once, by a key in the store of the process group.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from math import prod
from typing import NamedTuple

import torch

from ....errors import UnsupportedStateError
from ....plumbing import common_name, cover, hf_weights, leaf_names, sharded, worlds
from ...delta import RankSlices, SliceOf


class OwnSlices(NamedTuple):
    """The slices that one rank publishes as a version, and how often it has published that version before."""

    of_tensors: Mapping[str, SliceOf]
    num_before: int


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
            "this model is spread over ranks, and has other tensors in memory than in its checkpoints; export it with "
            "export_hf instead",
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
        held = list(zip(map(cover.Box.of, sliced.slices.rectangles), sliced.parts, strict=True))
        if not prod(shape):  # an empty tensor, of which no rank holds a slice
            held = [(cover.Box.whole(shape), torch.empty(shape, dtype=tensor.dtype, device="cpu"))]
        for box, part in held:
            key = f"{name}{box}"
            tensors[key] = part.detach()
            slices[key] = SliceOf(name, dtype, shape, *box)
    return weights._replace(tensors=tensors, tied={}, as_published=dict), slices


class RanksStart:
    """The name of one start of all ranks, for the publisher with this number at this root.

    Made by a `Publisher`, and owned by its `VersionSeries`. Rank 0 says the name, the others wait for it on helper
    threads. A training that is set back publishes the same numbers again, and ranks do so each at its own time: so a
    publication is known by the name of the start, and by how often its number was published before.
    """

    def __init__(self, world: worlds.World, root: str, number: int) -> None:
        self._world = world
        key = hashlib.blake2b(f"{root}/{number}".encode(), digest_size=8).hexdigest()
        self._topic, self._known = f"publish/{key}", ""
        self._num_calls: Counter[int] = Counter()  # by version

    def word(self, check: Callable[[], None]) -> str:
        """The name of the start; waits for rank 0. `check` may end the wait by raising. Raises PeerFailedError."""
        if not self._known:
            whom = "rank 0 to publish; a model that is spread over ranks is published by all of them, at the same root"
            self._known = common_name(self._world, self._topic, 8, check, whom)
        return self._known

    def count(self, version: int) -> int:
        """How often this version was published before. To be called at each `publish`, which all ranks call alike."""
        self._num_calls[version] += 1
        return self._num_calls[version] - 1

    def named(self, own: OwnSlices, check: Callable[[], None]) -> RankSlices:
        """The slices of a version, with the name that all ranks give it. Waits and raises as `word`."""
        word = self.word(check)
        return RankSlices(f"{word}-{own.num_before}" if own.num_before else word, own.of_tensors)

    def has(self, name: str, check: Callable[[], None]) -> bool:
        """Whether a version with this name is of this start. Waits and raises as `word`."""
        return name.partition("-")[0] == self.word(check)

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self._world.rank

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._world.size
