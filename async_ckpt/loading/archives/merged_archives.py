"""The parts of one state that several ranks have saved, each in an archive of its own, as one file.

In: the opened archives of one step. Out: one tree of names, and where the bytes of each tensor lie.
Knows nothing of: runs, live objects, how bytes are read.

An archive has its rank's own skeleton, and those slices of tensors that the rank has written. Whatever the indices say,
nothing is allocated for a tensor before each of its elements was found in one of the archives.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, NoReturn, Protocol

from ...errors import CorruptCheckpointError
from ...format import digests
from ...format.index import Index, IndexedTensor, Member
from ...slicing.cover import Box
from ...slicing.locator import name_of
from ...slicing.slices import Cut, Mesh, Slices
from ...spec import Extent
from ...state.names import Path, Select, dotted, is_within, printable, shown
from ...state.skeletons import Choice, MergedSkeleton, UnknownChoiceError, merge
from ...state.tree import StoredLeaf, ValuesByRank, leaves
from .contents import Contents, Covers, Groups, Source, sources_in
from .virtual_files import Zeros

# More of them are not named one by one, and not looked for among more.
_MANY: Final = 8
_MAX_SEARCHED: Final = 1 << 16


class Opener(Protocol):
    """The one who opens archives of a step, some of which may not be open yet."""

    @property
    def opened(self) -> Sequence[Contents]: ...

    @property
    def is_whole(self) -> bool:
        """Whether the archives that are not open have nothing that is in none of these."""

    @property
    def has_all_names(self) -> bool:
        """Whether these archives together know all names of the state."""

    def open_names(self) -> None:
        """Open archives that together know all names."""

    def open_boxes(self, boxes: Mapping[str, Sequence[Box]]) -> None:
        """Open archives with some of these boxes of tensors, by the names that tensors have in structures; `is_whole` is true if nobody
        has more of them.
        """

    def open_all(self) -> None: ...


class _AllOpen(NamedTuple):
    """Archives to which there are no others."""

    opened: Sequence[Contents]
    is_whole: bool = True
    has_all_names: bool = True

    def open_names(self) -> None:
        """All names are known."""

    def open_boxes(self, boxes: Mapping[str, Sequence[Box]]) -> None:
        """There is nothing to open."""

    def open_all(self) -> None:
        """There is nothing to open."""


class MergedArchives(Contents):
    """The archives of all ranks of a step, as one file. Whoever hands them over opens and closes them.

    Where some are not open yet, it has more of them opened as they are needed: for bytes, at any time, while numbers and trees stay
    what they are; for names, by `learn_names`, which a reader calls before it matches names, or after it has found some missing.

    Args:
        archives: in any order; all of the same step. Or who opens them.
        path: what they are together, for people: the folder of the step.
        ranks: the rank that restores, and how many restore together; None for a load by one process. A rank of as many
            as have saved gets its own values, where ranks have their own. All others get a `PerRank` of these.
        per_rank: the dotted names of what each rank has its own of. What else differs is found.
        from_ranks: whose values to take instead, by dotted name.
        groups: the only top-level entries that count; None for all.

    Raises CorruptCheckpointError for archives that contradict each other, and KeyError where `from_ranks` names a rank that
    has no such value.
    """

    def __init__(
        self,
        archives: Sequence[Contents] | Opener,
        *,
        path: str,
        ranks: tuple[int, int] | None = None,
        per_rank: Collection[str] = (),
        from_ranks: Mapping[str, int] | None = None,
        groups: Groups = None,
    ) -> None:
        super().__init__(Zeros(0), path=path)
        self._opener = _AllOpen(archives) if isinstance(archives, Sequence) else archives
        self._per_rank, self._groups = frozenset(per_rank), groups
        self._is_of_anybody = ranks is None
        self._archives = self._by_rank(self._opener.opened)
        rank, world_size = ranks or (None, None)
        self._choice = Choice(rank if world_size == self.world_size else None, dict(from_ranks or {}))
        self._covers: Covers = {}
        self._take(self._merge())

    def _take(self, merged: MergedSkeleton) -> None:
        """Have the tree, the numbers and the tensors of the archives that are open by now."""
        self._merged, self._knows_names = merged, self._opener.has_all_names
        self._apart_names = frozenset(map(dotted, merged.apart))
        self.index = self._index()
        # Tensors that one rank has for itself, though it holds them together with others.
        self._parts = {
            n
            for n, (ranks, told) in enumerate(zip(merged.tensors, self.index.tensors, strict=True))
            if len(ranks) == 1 and told.spread and is_within(dotted(told.path), self._per_rank)
        }
        self._sources: dict[int, tuple[list[Source], list[Box]]] = {}

    def _grow(self) -> None:
        """Have what archives that were opened since then have of the same tensors. Numbers stay."""
        self._archives = self._by_rank(self._opener.opened)
        grown = self._merge().tensors
        places = {(rank, there): n for n, one in enumerate(grown) for rank, there in one.items()}
        self._merged = self._merged._replace(
            tensors=[
                one if (n := places.get(next(iter(one.items())))) is None else grown[n]
                for one in self._merged.tensors
            ]
        )
        self.index, self._sources = self._index(), {}

    def _by_rank(self, archives: Sequence[Contents]) -> dict[int, Contents]:
        found: dict[int, Contents] = {}
        sizes = set()
        for archive in archives:
            ranks = archive.index.ranks
            if ranks is None:
                raise archive.corrupt("a manifest says that it is one rank's of several, but it is not")
            if ranks.rank in found:
                raise archive.corrupt(f"it is rank {ranks.rank}'s, and so is {found[ranks.rank].path}")
            found[ranks.rank] = archive
            sizes.add(ranks.world_size)
        if len(sizes) != 1:
            raise self.corrupt(f"its archives were saved by worlds of {sorted(sizes)} ranks")
        (self.world_size,) = sizes
        return dict(sorted(found.items()))

    def _merge(self) -> MergedSkeleton:
        try:
            return merge(
                {rank: archive.index.skeleton for rank, archive in self._archives.items()},
                {rank: len(archive.index.tensors) for rank, archive in self._archives.items()},
                per_rank=self._per_rank,
                choice=self._choice,
                groups=self._groups,
            )
        except UnknownChoiceError:
            raise
        except Exception as error:  # the texts may be anybody's
            why = printable(f"{type(error).__name__}: {error!s:.200}")
            raise self.corrupt(f"the skeletons of its archives cannot be read as one ({why})") from error

    def _index(self) -> Index:
        """The index that all archives make together."""
        numbers = {
            (rank, there): n for n, one in enumerate(self._merged.tensors) for rank, there in one.items()
        }
        apart: dict[frozenset[tuple[int, int]], int] = {}
        tensors: list[IndexedTensor] = []
        while len(tensors) < len(self._merged.tensors):  # which may grow by what others are tied to
            tensors.append(self._tensor(len(tensors), numbers, apart))
        first = next(iter(self._archives.values())).index
        nowhere = Member(digests.MEMBER, Extent(0, 0))
        return Index(first.step, (), tuple(tensors), (), self._merged.skeleton, nowhere, 0)

    def _tensor(
        self,
        n: int,
        numbers: Mapping[tuple[int, int], int],
        apart: dict[frozenset[tuple[int, int]], int],
    ) -> IndexedTensor:
        told = {rank: self._archives[rank].index.tensors[i] for rank, i in self._merged.tensors[n].items()}
        first_rank, first = next(iter(told.items()))
        for rank, other in told.items():
            if (other.dtype, other.shape) != (first.dtype, first.shape):
                raise self.corrupt(
                    f"{shown(first.path)} is {first.dtype}{list(first.shape)} on rank {first_rank} and "
                    f"{other.dtype}{list(other.shape)} on rank {rank}"
                )
        # A rank that has nothing of a tensor does not know what it is tied to.
        ties = {rank: one.alias_of for rank, one in told.items() if one.alias_of is not None or one.slices}
        alias = None
        if any(i is not None for i in ties.values()):
            to = {(rank, i) for rank, i in ties.items() if i is not None}
            known = {numbers.get(one) for one in to}
            alias = known.pop()
            if len(to) < len(ties):
                alias = None  # of ranks that have tied it, what that has is this, too
            elif known or alias is None:  # it is tied to what ranks have for themselves
                alias = apart.setdefault(frozenset(to), len(self._merged.tensors))
                if alias == len(self._merged.tensors):
                    self._merged.tensors.append(dict(to))
        spread = next(filter(None, (one.spread for one in told.values())), None)
        return IndexedTensor(first.path, first.dtype, first.shape, (), alias, spread)

    @property
    def chosen(self) -> Collection[str]:
        """The names in `from_ranks` that exist."""
        return self._merged.chosen

    @property
    def apart(self) -> Collection[Path]:
        """The paths of values that each rank has for itself."""
        return self._merged.apart

    # --- as a file --------------------------------------------------------------------------------------------

    @property
    def files(self) -> Sequence[Contents]:
        return list(self._archives.values())

    def map(self) -> NoReturn:
        raise ValueError(
            f"mmap=True maps one file, but several ranks have saved {self.path}, each in a file of its own; leave mmap out"
        )

    def is_of_each(self, number: int) -> bool:
        return is_within(dotted(self.index.tensors[number].path), self._apart_names)

    def is_of_some(self, path: Path) -> bool:
        return path in self._merged.of_some

    def sources(self, number: int, within: Box | None = None) -> Sequence[Source]:
        """Where a tensor is to be read from, each element once: of several copies the lowest rank's.

        Raises CorruptCheckpointError if some element of it is in none of the archives, and ValueError if one rank has a part
        of it for itself, and more is wanted.
        """
        gaps = _gaps(self._missing(number), within)
        if gaps and number in self._parts:
            (rank,) = self._merged.tensors[number]
            raise ValueError(
                f"{self.path}: {shown(self.index.tensors[number].path)} is of each rank, and rank {rank} has only a part of it; "
                "restore it on as many ranks as have saved it, or leave it out with select="
            )
        if gaps and not self._opener.is_whole:
            # Whoever wants one tensor before all that he wants is known will want others: those that ranks divide among them.
            divided = [
                n
                for n, told in enumerate(self.index.tensors)
                if told.alias_of is None and told.spread is None
            ]
            self._open([(number, within), *((n, None) for n in divided if n != number)])
            number = self.primary(
                number
            )  # only a rank that has something of a tensor knows what it is tied to
        missing = self._missing(number)
        if missing and self._opener.is_whole and number not in self._parts:
            raise self._lacks(number, missing)
        return self._sources[number][0]

    def need(self, wanted: Iterable[tuple[int, Box | None]]) -> None:
        wanted = list(wanted)
        num_whole = sum(within is None for _, within in wanted)
        num_tensors = sum(told.alias_of is None for told in self.index.tensors)
        if num_whole >= num_tensors and self._gaps_of(wanted) and not self._opener.is_whole:
            self._opener.open_all()
            self._grow()
        self._open(wanted)

    def _open(self, wanted: Sequence[tuple[int, Box | None]]) -> None:
        """Open archives until all of this is in them, or in none."""
        while not self._opener.is_whole and (gaps := self._gaps_of(wanted)):
            self._opener.open_boxes(gaps)
            self._grow()

    def _gaps_of(self, wanted: Iterable[tuple[int, Box | None]]) -> dict[str, list[Box]]:
        """The boxes that are in none of the open archives, by the names of tensors in structures."""
        gaps: dict[str, list[Box]] = {}
        for number, within in wanted:
            number = self.primary(number)
            if number not in self._parts and (missing := _gaps(self._missing(number), within)):
                gaps.setdefault(name_of(self.index.tensors[number].path), []).extend(missing)
        return gaps

    @property
    def has_all_names(self) -> bool:
        return self._knows_names

    def learn_names(self, *, everything: bool = False) -> bool:
        if self._knows_names:
            return False
        (self._opener.open_all if everything else self._opener.open_names)()
        self._begin_again()
        return True

    def _begin_again(self) -> None:
        self._archives = self._by_rank(self._opener.opened)
        self._take(self._merge())

    def tree(
        self, *, select: Select = None, types: Iterable[type] = (), groups: Groups = None
    ) -> tuple[Any, list[StoredLeaf]]:
        value, stored = super().tree(select=select, types=types, groups=groups)
        are_apart = self._is_of_anybody and any(isinstance(leaf, ValuesByRank) for leaf in leaves(value))
        if are_apart and not self._opener.is_whole:  # each rank's own is wanted
            self._opener.open_all()
            self._begin_again()
            return super().tree(select=select, types=types, groups=groups)
        return value, stored

    def _missing(self, number: int) -> list[Box]:
        """The boxes of a tensor that are in none of these archives."""
        if number not in self._sources:
            pieces = [
                (self._archives[rank], piece)
                for rank, there in self._merged.tensors[number].items()
                for piece in self._archives[rank].index.tensors[there].slices
            ]
            self._sources[number] = sources_in(pieces, self.index.tensors[number].shape, self._covers)
        return self._sources[number][1]

    def objects(self, stored: Iterable[StoredLeaf], *, trust: bool) -> list[Any]:
        """The pickled leaves of all ranks; none are opened unless one of them is asked for."""
        wanted = {leaf.number: leaf for leaf in stored if leaf.kind == "object"}
        found: list[Any] = [None] * (max(wanted, default=-1) + 1)
        by_rank: dict[int, list[tuple[int, StoredLeaf]]] = {}
        for number, leaf in wanted.items():
            objects = self._merged.objects
            rank, there = (next(iter(self._archives)), number) if objects is None else objects[number]
            by_rank.setdefault(rank, []).append((number, StoredLeaf("object", there, path=leaf.path)))
        for rank, numbered in by_rank.items():
            loaded = self._archives[rank].objects([leaf for _, leaf in numbered], trust=trust)
            for number, leaf in numbered:
                found[number] = loaded[leaf.number]
        return found

    def _lacks(self, number: int, missing: list[Box]) -> CorruptCheckpointError:
        told = self.index.tensors[number]
        boxes = ", ".join(map(str, missing[:_MANY])) + (", …" if len(missing) > _MANY else "")
        num_missing = sum(box.num_elements for box in missing)
        owners = sorted(self._owners(number, missing))
        who = ", ".join(f"rank {rank}" for rank in owners[:_MANY]) + (", …" if len(owners) > _MANY else "")
        error = self.corrupt(
            f"{shown(told.path)}: {boxes} of shape {list(told.shape)} is in none of its archives, {num_missing:,} elements"
            + (f", which {who} should have" if owners else "")
        )
        error.tensors = (shown(told.path),)
        return error

    def _owners(self, number: int, missing: list[Box]) -> set[int]:
        """The ranks that hold something of it, as far as the archives say so."""
        found: set[int] = set()
        for rank, there in self._merged.tensors[number].items():
            index = self._archives[rank].index
            told = index.tensors[there]
            if told.spread is None or index.ranks is None:
                continue
            if told.spread.cuts is None:
                if any(Box(*held).common(box) for held in told.spread.held for box in missing):
                    found.add(rank)
                continue
            mesh = Mesh(*index.ranks.meshes[told.spread.mesh])
            cuts = tuple(Cut(*cut) for cut in told.spread.cuts)
            if mesh.size * sum(cut.runs for cut in cuts) > _MAX_SEARCHED:
                continue
            for coordinate in itertools.product(*map(range, mesh.shape)):
                there_held = Slices.at(coordinate, global_shape=told.shape, cuts=cuts, mesh=mesh).rectangles
                boxes = [Box(one.global_offsets, one.sizes) for one in there_held]
                if any(held.common(box) for held in boxes for box in missing):
                    found.add(mesh.rank_at(coordinate))
            break  # all say the same
        return found


def _gaps(missing: Iterable[Box], within: Box | None) -> list[Box]:
    """The part of that which somebody wants."""
    if within is None:
        return list(missing)
    return [common for box in missing if (common := box.common(within))]
