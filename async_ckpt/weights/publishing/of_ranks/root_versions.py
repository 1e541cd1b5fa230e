"""The versions at a root: of a whole model, and those that all ranks of a spread model have published in one start.

In: a root. Out: which versions are complete. Knows nothing of: how versions are written, or applied.

The ranks of a spread model are a world. Its size is the number of ranks, and 0 stands for a whole model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from .... import Place
from ....errors import CorruptCheckpointError, NotCommittedError
from ...delta import INDEX, VersionIndex, folder_of, identity_of
from ..base_model import BaseModel
from ..versions import Versions, marks_in

_FOLDER: Final = re.compile(r"rank_(\d{5})_of_(\d{5})")


def folder_of_rank(rank: int, size: int) -> str:
    """The folder with the versions of a rank, below the root; empty for a whole model."""
    return f"rank_{rank:05d}_of_{size:05d}" if size else ""


def worlds_in(names: Iterable[str]) -> dict[int, list[int]]:
    """The worlds that have published at a root: by size, the ranks that have a folder there.

    `names` are the names at the root. Size 0 with rank 0, for whole models, is always included.
    """
    worlds: dict[int, list[int]] = {0: [0]}
    for name in names:
        if match := _FOLDER.fullmatch(name):
            worlds.setdefault(int(match[2]), []).append(int(match[1]))
    return worlds


def identity_of_ranks(identities: Iterable[str]) -> str:
    """The identity of the whole weights, from the identities of all ranks' slices."""
    return identity_of({str(rank): identity for rank, identity in enumerate(identities)})


class RootVersions:
    """All versions at one root, with a cache of the complete ones. Used by one caller at a time.

    Owned by a `Subscriber`, a `VersionSeries`, or a call of `Publisher.versions`. `base` is as for `Versions`.
    """

    def __init__(self, place: Place, base: BaseModel | None = None) -> None:
        self._place, self.storage = place, place.storage()
        self._of_whole = Versions(self.storage, base)
        self._by_rank: dict[tuple[int, int], Versions] = {}
        # By complete version: the size of its world, and the start in which rank 0 published it.
        self._whole: dict[int, tuple[int, str]] = {}
        self._marks: frozenset[str] = frozenset()  # in the last listing

    def of_rank(self, rank: int, size: int) -> Versions:
        """The versions of one rank, or of a whole model."""
        if not size:
            return self._of_whole
        key = rank, size
        if key not in self._by_rank:
            url = f"{self._place.text.rstrip('/')}/{folder_of_rank(rank, size)}"
            self._by_rank[key] = Versions(replace(self._place, url=url).storage())
        return self._by_rank[key]

    def sizes(self, names: Iterable[str] | None = None) -> dict[int, int]:
        """The complete versions, ascending, each with the size of its world. `names` are the names at the root."""
        listed = [*(self.storage.names("") if names is None else names)]
        if marks_in(listed) != self._marks:  # versions were replaced: discard the cache
            self._marks, self._whole, self._by_rank = marks_in(listed), {}, {}
        whole = dict.fromkeys(self._of_whole.numbers(listed), (0, ""))
        for size, begun in worlds_in(listed).items():
            if not size or len(begun) < size:
                continue
            versions = self.of_rank(0, size)
            for number in versions.numbers():
                world = size, versions.start_of(number)
                if self._whole.get(number) == world or self._is_whole(number, size):
                    whole[number] = world
        self._whole = dict(sorted(whole.items()))
        return {number: size for number, (size, _) in self._whole.items()}

    def of_other_worlds(self, size: int) -> dict[str, Versions]:
        """The versions of other worlds than that of `size`, by their folders below the root."""
        worlds = worlds_in(self.storage.names(""))
        others = [(rank, other) for other, begun in worlds.items() if other != size for rank in begun]
        return {folder_of_rank(*other): self.of_rank(*other) for other in others}

    def newest_of_other_worlds(self, size: int) -> int:
        """The newest version of rank 0 of any other world than that of `size`; -1 if there is none."""
        others = worlds_in(self.storage.names("")).keys() - {size}
        return max((number for other in others for number in self.of_rank(0, other).numbers()), default=-1)

    def identity(self, number: int) -> str:
        """The identity of the weights of a complete version. Raises NotCommittedError, CorruptCheckpointError."""
        size, _ = self._whole.get(number, (0, ""))
        if not size:
            return self._of_whole.read(number).identity
        return identity_of_ranks(index.identity for index in self._indices(number, size))

    def _is_whole(self, number: int, size: int) -> bool:
        paths = [f"{folder_of_rank(rank, size)}/{folder_of(number)}/{INDEX}" for rank in range(1, size)]
        if len(self.storage.existing(paths)) < len(paths):
            return False
        try:
            return len({index.slices.start for index in self._indices(number, size)}) == 1
        except CorruptCheckpointError:
            return True  # it exists, and its readers get the error
        except NotCommittedError:
            return False  # a rank has deleted it meanwhile

    def _indices(self, number: int, size: int) -> Iterator[VersionIndex]:
        """Each rank's index of a version. Raises NotCommittedError, CorruptCheckpointError."""
        return (self.of_rank(rank, size).read(number) for rank in range(size))

    def were_replaced(self, number: int, size: int) -> bool:
        """Whether a rank's version was deleted or replaced since its index was read."""
        return any(self.of_rank(rank, size).were_replaced([number]) for rank in range(size))
