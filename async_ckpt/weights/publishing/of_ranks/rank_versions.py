"""The versions of a model that is spread over ranks: those that all ranks have published in one start.

In: a root. Out: which versions are whole, and the slices of their tensors. Knows nothing of: how versions are written,
or applied.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Final, NamedTuple

from .... import Place
from ....errors import CorruptCheckpointError, NotCommittedError
from ...delta import INDEX, VersionIndex, folder_of, identity_of
from ..versions import Versions, marks_in
from .pieces import SlicedTensor, sliced_tensors

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


def identity_of_ranks(identities: Iterable[str]) -> str:
    """The identity of the whole weights, from those of all ranks' slices."""
    return identity_of({str(rank): identity for rank, identity in enumerate(identities)})


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
        except NotCommittedError:
            return False  # a rank has deleted it meanwhile

    def indices(self, number: int, size: int, *, fresh: bool = False) -> list[VersionIndex]:
        """Each rank's index of a version. Raises NotCommittedError, CorruptCheckpointError."""
        return [self.of_rank(rank, size).read(number, fresh=fresh) for rank in range(size)]

    def read_whole(self, number: int, size: int) -> WholeVersion:
        """A version by all ranks' current indices. Raises as `indices`, for two starts, and for uncovered tensors."""
        indices = self.indices(number, size, fresh=True)
        if len({index.slices.start for index in indices}) > 1:
            raise self._corrupt(number, "ranks have published it in two starts of the training")
        try:
            tensors = sliced_tensors([index.slices.of_tensors for index in indices])
        except ValueError as error:
            raise self._corrupt(number, str(error)) from None
        return WholeVersion(number, identity_of_ranks(index.identity for index in indices), indices, tensors)

    def were_replaced(self, number: int, size: int) -> bool:
        """Whether a rank's version was deleted or replaced since its index was read."""
        return any(self.of_rank(rank, size).were_replaced([number]) for rank in range(size))

    def _corrupt(self, number: int, why: str) -> CorruptCheckpointError:
        root = self.storage.locate("")
        return CorruptCheckpointError(f"{root}: version {number}: {why}; publish it from all ranks", path=root)
