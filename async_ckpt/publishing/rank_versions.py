"""Versions of a model that is spread over ranks: each rank publishes versions of the slices that it holds.

In: the weights of one rank; later, the versions of all. Out: plain tensors by the names of their slices; later, whole
ones.
Knows nothing of: how versions are written, or applied.

No rank waits for another one or asks what it does: a rank publishes versions of its slices, against a base of its
own. A version of the model exists when each rank has published it in the same start of the training. Rank 0 gives
each start a name, once, by a key in the store of the process group.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Final, NamedTuple

import torch

from ..around.hf_weights import Weights
from ..errors import CorruptCheckpointError, UnsupportedStateError
from ..format.delta import INDEX, SliceOf, VersionIndex, folder_of, identity_of
from ..ranks.meeting import RankZeroWord
from ..ranks.world import World
from ..slicing.cover import Box, cover
from ..slicing.sharded import Slicer
from ..staging.device import as_integers
from ..state.dtypes import dtype_name, dtype_named
from ..storage.place import Place
from .replica import MemoryReplica
from .versions import Versions, marks_in

_FOLDER: Final = re.compile(r"rank_(\d{5})_of_(\d{5})")


def folder_of_rank(rank: int, size: int) -> str:
    return f"rank_{rank:05d}_of_{size:05d}"


def place_of_rank(root: Place, rank: int, size: int) -> Place:
    """The root of the versions of one rank."""
    return replace(root, url=f"{root.text.rstrip('/')}/{folder_of_rank(rank, size)}")


def worlds_in(names: Iterable[str]) -> dict[int, list[int]]:
    """The worlds that have published at a root, by their sizes, each with the ranks that have begun.

    `names` are the names at the root.
    """
    worlds: dict[int, list[int]] = {}
    for name in names:
        if match := _FOLDER.fullmatch(name):
            worlds.setdefault(int(match[2]), []).append(int(match[1]))
    return worlds


# --- the slices that a rank publishes ------------------------------------------------------------------------------


def own_slices(weights: Weights) -> tuple[Weights, dict[str, SliceOf]]:
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
    slicer = Slicer()
    tensors: dict[str, torch.Tensor] = {}
    slices: dict[str, SliceOf] = {}
    for name, tensor in weights.tensors.items():
        sliced = slicer.slice(tensor, name=name)
        if sliced.slices.replicas().number:
            continue
        shape, dtype = sliced.slices.global_shape, dtype_name(tensor.dtype)
        held = list(zip(map(Box.of, sliced.slices.rectangles), sliced.parts, strict=True))
        if not prod(shape):  # an empty tensor, of which no rank holds a slice
            held = [(Box.whole(shape), torch.empty(shape, dtype=tensor.dtype, device="cpu"))]
        for box, part in held:
            key = f"{name}{box}"
            tensors[key] = part.detach()
            slices[key] = SliceOf(name, dtype, shape, *box)
    return weights._replace(tensors=tensors, tied={}, as_published=dict), slices


class RanksStart:
    """The name of one start of all ranks, for the publisher with this number at this root.

    Made by a `Publisher`, and owned by its `VersionSeries`. Rank 0 says the name, the others wait for it on helper
    threads.
    """

    def __init__(self, world: World, root: str, number: int) -> None:
        self._world = world
        key = hashlib.blake2b(f"{root}/{number}".encode(), digest_size=8).hexdigest()
        self._word = RankZeroWord(world, lambda: world.words(f"publish/{key}"), "start", num_bytes=8)

    def word(self, check: Callable[[], None]) -> str:
        """The name of the start; waits for rank 0. `check` may end the wait by raising. Raises PeerFailedError."""
        return self._word.hear(
            check, "rank 0 to publish; a model that is spread over ranks is published by all of them, at the same root"
        )

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._world.size

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self._world.rank == 0


# --- the versions of all ranks -------------------------------------------------------------------------------------


class SlicedTensor(NamedTuple):
    """One tensor of the model, and its slices: for each, the rank, its name there, and its place in the tensor."""

    dtype: str
    shape: tuple[int, ...]
    slices: list[tuple[int, str, Box]]


class WholeVersion(NamedTuple):
    """A version that all ranks have published in one start, with their indices."""

    number: int
    identity: str
    indices: list[VersionIndex]
    tensors: dict[str, SlicedTensor]

    def compare(self, rank: int, identity: str, root: str) -> None:
        """Raises CorruptCheckpointError if a rank's weights do not have the identity in its index."""
        if identity != self.indices[rank].identity:
            raise CorruptCheckpointError(
                f"{root}: version {self.number} was published again while it was read; pull it again", path=root
            )


class RankVersions:
    """The versions of all ranks at one root, with a cache of those that are whole. One caller at a time.

    Owned by a `Subscriber`, a `VersionSeries`, or a call of `Publisher.versions`.
    """

    def __init__(self, place: Place) -> None:
        self._place, self.storage = place, place.storage()
        self._by_rank: dict[tuple[int, int], Versions] = {}
        # By version, of those that all ranks have: the size of the world, and the start that rank 0 has published in.
        self._whole: dict[int, tuple[int, str]] = {}
        self._marks: frozenset[str] = frozenset()  # in the last listing

    def of_rank(self, rank: int, size: int) -> Versions:
        key = rank, size
        if key not in self._by_rank:
            self._by_rank[key] = Versions(place_of_rank(self._place, rank, size).storage())
        return self._by_rank[key]

    def sizes(self, names: Iterable[str] | None = None) -> dict[int, int]:
        """The whole versions, ascending, each with the size of its world. `names` are the names at the root."""
        whole: dict[int, tuple[int, str]] = {}
        listed = [*(self.storage.names("") if names is None else names)]
        if marks_in(listed) != self._marks:  # versions were replaced: discard the cache
            self._marks, self._whole, self._by_rank = marks_in(listed), {}, {}
        for size, begun in worlds_in(listed).items():
            if len(begun) < size:
                continue
            versions = self.of_rank(0, size)
            for number in versions.numbers():
                world = size, versions.start_of(number)
                if self._whole.get(number) == world or self._is_whole(number, size):
                    whole[number] = world
        self._whole = dict(sorted(whole.items()))
        return {number: size for number, (size, _) in self._whole.items()}

    def of_other_worlds(self, size: int | None) -> dict[str, Versions]:
        """The versions at the root of other worlds, by folder. `size` is None, and the folder "", for a whole model."""
        others_by_folder = {} if size is None else {"": Versions(self.storage)}
        for other, begun in worlds_in(self.storage.names("")).items():
            if other != size:
                others_by_folder |= {folder_of_rank(rank, other): self.of_rank(rank, other) for rank in begun}
        return others_by_folder

    def remove(self, folder: str) -> None:
        """Delete what is left of a rank's folder that has no versions any more."""
        if folder:
            self.storage.delete_all(folder)

    def newest_of_other_worlds(self, size: int | None) -> int:
        """The newest version of other worlds, judged by their first ranks; -1 if there is none."""
        others = (other for other in worlds_in(self.storage.names("")) if other != size)
        numbers = [number for other in others for number in self.of_rank(0, other).numbers()]
        numbers += self.plain_numbers() if size is not None else []
        return max(numbers, default=-1)

    def plain_numbers(self) -> list[int]:
        """The versions of whole models at the root."""
        return Versions(self.storage).numbers()

    def _is_whole(self, number: int, size: int) -> bool:
        paths = [f"{folder_of_rank(rank, size)}/{folder_of(number)}/{INDEX}" for rank in range(1, size)]
        if len(self.storage.existing(paths)) < len(paths):
            return False
        try:
            return len({index.slices.start for index in self.indices(number, size)}) == 1
        except CorruptCheckpointError:
            return True  # it exists, and its reader gets the error

    def indices(self, number: int, size: int, *, fresh: bool = False) -> list[VersionIndex]:
        """Each rank's index of a version. Raises NotCommittedError, CorruptCheckpointError."""
        return [self.of_rank(rank, size).read(number, fresh=fresh) for rank in range(size)]

    def read_whole(self, number: int, size: int) -> WholeVersion:
        """A version by all ranks' current indices. Raises as `indices`, for two starts, and for uncovered tensors."""
        indices = self.indices(number, size, fresh=True)
        if len({index.slices.start for index in indices}) > 1:
            raise self._corrupt(number, "ranks have published it in two starts of the training")
        identity = identity_of({str(rank): index.identity for rank, index in enumerate(indices)})
        return WholeVersion(number, identity, indices, self._tensors(number, indices))

    def _tensors(self, number: int, indices: Sequence[VersionIndex]) -> dict[str, SlicedTensor]:
        """The tensors of the model. Raises CorruptCheckpointError if slices disagree, or do not cover one."""
        tensors: dict[str, SlicedTensor] = {}
        for rank, index in enumerate(indices):
            for key, part in index.slices.of_tensors.items():
                tensor = tensors.setdefault(part.name, SlicedTensor(part.dtype, part.global_shape, []))
                if (tensor.dtype, tensor.shape) != (part.dtype, part.global_shape):
                    raise self._corrupt(number, f"ranks have {part.name!a} of other dtypes or shapes")
                tensor.slices.append((rank, key, Box(part.offsets, part.sizes)))
        for name, tensor in tensors.items():
            missing = cover(tensor.shape, [box for _, _, box in tensor.slices]).missing
            if missing:
                raise self._corrupt(number, f"no rank has published {name}{missing[0]}")
        return dict(sorted(tensors.items()))

    def were_replaced(self, number: int, size: int) -> bool:
        """Whether a rank's version was deleted or replaced since its index was read."""
        return any(self.of_rank(rank, size).were_replaced([number]) for rank in range(size))

    def _corrupt(self, number: int, why: str) -> CorruptCheckpointError:
        root = self.storage.locate("")
        return CorruptCheckpointError(f"{root}: version {number}: {why}; publish it from all ranks", path=root)


def assemble(tensor: SlicedTensor, replicas: Mapping[int, MemoryReplica]) -> torch.Tensor:
    """A whole tensor from its slices. Where slices overlap, that of the lowest rank counts."""
    dtype = dtype_named(tensor.dtype)
    full = torch.empty(tensor.shape, dtype=dtype, device="cpu")
    bits = as_integers(full)  # copied as they are, whatever values they encode
    for rank, key, box in reversed(tensor.slices):
        part = as_integers(replicas[rank].region(key).view(dtype).view(box.sizes))
        bits[tuple(slice(at, at + size) for at, size in zip(*box, strict=True))] = part
    return full
