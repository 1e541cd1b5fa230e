"""Versions of a model that is spread over ranks: each rank has versions of its own, of the slices that it holds.

In: the weights of one rank; later, the versions of all. Out: plain tensors by the names of their slices; later, whole ones.
Knows nothing of: how versions are written, or brought.

No rank waits for another, and none asks what the others do: what one publishes is a version of its slices, against a base of
its own. A version of all is there when each rank has it, and they had it from one start of the training, which is called by
one word: rank 0 says it, once, by a key in the store of the process group.
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
from ..slicing.sharded import Slicer, is_sharded
from ..staging.device import as_integers
from ..state.dtypes import dtype_name, dtype_named
from ..storage.place import Place
from .replica import MemoryReplica
from .versions import Versions, marks_in

_FOLDER: Final = re.compile(r"rank_(\d{5})_of_(\d{5})")


def is_spread(weights: Weights) -> bool:
    return any(map(is_sharded, weights.tensors.values()))


def folder_of_rank(rank: int, size: int) -> str:
    return f"rank_{rank:05d}_of_{size:05d}"


def place_of_rank(root: Place, rank: int, size: int) -> Place:
    """Where the versions of one rank are."""
    return replace(root, url=f"{root.text.rstrip('/')}/{folder_of_rank(rank, size)}")


def worlds_in(names: Iterable[str]) -> dict[int, list[int]]:
    """The worlds that have published at a root, by the names there: their sizes, each with the ranks that have begun."""
    found: dict[int, list[int]] = {}
    for name in names:
        if match := _FOLDER.fullmatch(name):
            found.setdefault(int(match[2]), []).append(int(match[1]))
    return found


# --- what a rank publishes ----------------------------------------------------------------------------------------


def own_slices(weights: Weights) -> tuple[Weights, dict[str, SliceOf]]:
    """The plain tensors that this rank publishes, by names of their slices, and which slices these are.

    Of what several ranks hold alike by their placements, the first publishes it. A plain tensor is each rank's own.
    Raises UnsupportedStateError for a model whose checkpoints are cut otherwise than its memory.
    """
    empty = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in weights.tensors.items()
    }
    if weights.as_published(dict(empty)).keys() != empty.keys():
        raise UnsupportedStateError(
            "this model is spread over ranks, and has its weights in memory otherwise than in its checkpoints; export it by "
            "export_hf, which is read as it is",
            path="",
        )
    slicer = Slicer()
    tensors: dict[str, torch.Tensor] = {}
    told: dict[str, SliceOf] = {}
    for name, tensor in weights.tensors.items():
        sliced = slicer.slice(tensor, name=name)
        if sliced.slices.replicas().number:
            continue
        shape, dtype = sliced.slices.global_shape, dtype_name(tensor.dtype)
        held = [
            (Box(r.global_offsets, r.sizes), p)
            for r, p in zip(sliced.slices.rectangles, sliced.parts, strict=True)
        ]
        if not prod(shape):  # nothing is held of it anywhere
            held = [(Box.whole(shape), torch.empty(shape, dtype=tensor.dtype, device="cpu"))]
        for box, part in held:
            key = f"{name}{box}"
            tensors[key] = part.detach()
            told[key] = SliceOf(name, dtype, shape, *box)
    return weights._replace(tensors=tensors, tied={}, as_published=dict), told


class RanksStart:
    """The name of one start of all ranks, for the publisher of this number at this root."""

    def __init__(self, world: World, root: str, number: int) -> None:
        self._world = world
        key = hashlib.blake2b(f"{root}/{number}".encode(), digest_size=8).hexdigest()
        self._word = RankZeroWord(world, lambda: world.words(f"publish/{key}"), "start", num_bytes=8)

    def word(self, check: Callable[[], None]) -> str:
        """Not on the caller's thread: rank 0 may come later. `check` may end the wait. Raises PeerFailedError."""
        return self._word.hear(
            check,
            "rank 0 to publish; a model that is spread over ranks is published by all of them, at the same root",
        )

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._world.size

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self._world.rank == 0


# --- what all have published --------------------------------------------------------------------------------------


class SlicedTensor(NamedTuple):
    """One tensor of the model, and where its slices are: of which rank, by which name, and where they belong."""

    dtype: str
    shape: tuple[int, ...]
    slices: list[tuple[int, str, Box]]


class WholeVersion(NamedTuple):
    """A version of one start of all ranks, as their indices say: what is read by these must have their identities."""

    number: int
    identity: str
    indices: list[VersionIndex]
    tensors: dict[str, SlicedTensor]

    def compare(self, rank: int, identity: str, where: str) -> None:
        """Raises CorruptCheckpointError where a rank's weights are not those that its index told of."""
        if identity != self.indices[rank].identity:
            raise CorruptCheckpointError(
                f"{where}: version {self.number} was published again while it was read; pull it again",
                path=where,
            )


class RankVersions:
    """The versions of all ranks at one root. One caller at a time."""

    def __init__(self, place: Place) -> None:
        self._place, self.storage = place, place.storage()
        self._by_rank: dict[tuple[int, int], Versions] = {}
        self._whole: dict[int, int] = {}  # versions that all ranks of a world have, and its size
        self._marks: frozenset[str] = frozenset()  # in the listing by which these are known

    def of_rank(self, rank: int, size: int) -> Versions:
        key = rank, size
        if key not in self._by_rank:
            self._by_rank[key] = Versions(place_of_rank(self._place, rank, size).storage())
        return self._by_rank[key]

    def sizes(self, names: Iterable[str] | None = None) -> dict[int, int]:
        """The versions that are whole, ascending, and of how many ranks each is. `names` are those at the root."""
        whole: dict[int, int] = {}
        there = [*(self.storage.names("") if names is None else names)]
        if (
            marks_in(there) != self._marks
        ):  # versions have taken the place of others: nothing known before counts
            self._marks, self._whole, self._by_rank = marks_in(there), {}, {}
        for size, begun in worlds_in(there).items():
            if len(begun) < size:
                continue
            for number in self.of_rank(0, size).numbers():
                if self._whole.get(number) == size or self._is_whole(number, size):
                    whole[number] = size
        self._whole = dict(sorted(whole.items()))
        return dict(self._whole)

    def of_other_worlds(self, size: int | None) -> dict[str, Versions]:
        """The versions of ranks at the root that are not of a world of this size (with None, of all worlds), by their folders."""
        others_by_folder = {} if size is None else {"": Versions(self.storage)}
        for other, begun in worlds_in(self.storage.names("")).items():
            if other != size:
                others_by_folder |= {folder_of_rank(rank, other): self.of_rank(rank, other) for rank in begun}
        return others_by_folder

    def remove(self, folder: str) -> None:
        """Delete the rest of a rank's folder in which there are no versions any more."""
        if folder:
            self.storage.delete_all(folder)

    def newest_of_other_worlds(self, size: int | None) -> int:
        """The newest version of these, as far as the first ranks have it; -1 if there is none."""
        others = (other for other in worlds_in(self.storage.names("")) if other != size)
        numbers = [number for other in others for number in self.of_rank(0, other).numbers()]
        numbers += self.plain_numbers() if size is not None else []
        return max(numbers, default=-1)

    def plain_numbers(self) -> list[int]:
        """The versions at the root of models that were not spread."""
        return Versions(self.storage).numbers()

    def _is_whole(self, number: int, size: int) -> bool:
        paths = [f"{folder_of_rank(rank, size)}/{folder_of(number)}/{INDEX}" for rank in range(1, size)]
        if len(self.storage.existing(paths)) < len(paths):
            return False
        try:
            return len({index.slices.start for index in self.indices(number, size)}) == 1
        except CorruptCheckpointError:
            return True  # it is there, and whoever reads it is told

    def indices(self, number: int, size: int, *, fresh: bool = False) -> list[VersionIndex]:
        """Each rank's index of a version. Raises NotCommittedError, CorruptCheckpointError."""
        return [self.of_rank(rank, size).read(number, fresh=fresh) for rank in range(size)]

    def read_whole(self, number: int, size: int) -> WholeVersion:
        """A version as all ranks say now. Raises as above, for two starts, and for tensors that are not covered."""
        indices = self.indices(number, size, fresh=True)
        if len({index.slices.start for index in indices}) > 1:
            raise self._corrupt(number, "ranks have published it in two starts of the training")
        identity = identity_of({str(rank): index.identity for rank, index in enumerate(indices)})
        return WholeVersion(number, identity, indices, self._tensors(number, indices))

    def _tensors(self, number: int, indices: Sequence[VersionIndex]) -> dict[str, SlicedTensor]:
        """The tensors of the model, each covered once."""
        found: dict[str, SlicedTensor] = {}
        for rank, index in enumerate(indices):
            for key, told in index.slices.of_tensors.items():
                whole = found.setdefault(told.name, SlicedTensor(told.dtype, told.global_shape, []))
                if (whole.dtype, whole.shape) != (told.dtype, told.global_shape):
                    raise self._corrupt(number, f"ranks have {told.name!a} of other dtypes or shapes")
                whole.slices.append((rank, key, Box(told.offsets, told.sizes)))
        for name, whole in found.items():
            missing = cover(whole.shape, [box for _, _, box in whole.slices]).missing
            if missing:
                raise self._corrupt(number, f"no rank has published {name}{missing[0]}")
        return dict(sorted(found.items()))

    def were_replaced(self, number: int, size: int) -> bool:
        """Whether what one of the ranks has published is gone, or another version by now."""
        return any(self.of_rank(rank, size).were_replaced([number]) for rank in range(size))

    def _corrupt(self, number: int, why: str) -> CorruptCheckpointError:
        where = self.storage.locate("")
        return CorruptCheckpointError(
            f"{where}: version {number}: {why}; publish it from all ranks", path=where
        )


def assemble(whole: SlicedTensor, replicas: Mapping[int, MemoryReplica]) -> torch.Tensor:
    """A whole tensor, of its slices; where they overlap, that of the lowest rank counts."""
    dtype = dtype_named(whole.dtype)
    full = torch.empty(whole.shape, dtype=dtype, device="cpu")
    bits = as_integers(full)  # which are copied as they are, whatever they mean
    for rank, key, box in reversed(whole.slices):
        part = as_integers(replicas[rank].region(key).view(dtype).view(box.sizes))
        bits[tuple(slice(at, at + size) for at, size in zip(*box, strict=True))] = part
    return full
