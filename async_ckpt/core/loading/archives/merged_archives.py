"""The archives of one state, one from each rank, presented as one file.

In: the opened archives of one step. Out: one tree of names, and the locations of each tensor's bytes.
Knows nothing of: runs, live objects, the reading of bytes.

An archive has its rank's own skeleton, and the slices of tensors that the rank has written. The indices are not
trusted: memory for a tensor is allocated only after each of its elements was located in one of the archives.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

from ....errors import CorruptCheckpointError
from ...format import digests
from ...format.index import Index, IndexedTensor, Member
from ...host.threads import run_together
from ...slicing.boxes import Box, cover
from ...slicing.locator import StepItem, name_of
from ...spec import Extent, some_of
from ...state.names import Path, Select, dotted, is_within, printable, shown
from ...state.skeletons import Choice, MergedSkeleton, UnknownChoiceError, merge
from ...state.tree import StoredLeaf, ValuesByRank, parts_in
from ...storage.compressed import open_decompressed
from ...storage.interface import Storage
from .archive import OpenArchive
from .contents import Contents, Groups, Part, Source, sources_in
from .step_archives import MAX_OPENERS, StepArchives

_MANY: Final = 8  # names in a message


def part_of(step: StepArchives) -> Part:
    """The archives of a step as one file, which opens more archives when its reader needs them.

    Raises CorruptCheckpointError, and KeyError if the reader chooses the value of a rank that has no such value.
    """
    step.open_first()
    if step.num_ranks == 1:
        return Part(step.opened[0], step.groups, step.manifest)
    ranks = step.manifest.ranks
    archive = MergedArchives(
        step.opened,
        path=step.path,
        ranks=step.readers.ranks,
        per_rank=ranks.per_rank if ranks else (),
        from_ranks=step.readers.from_ranks,
        groups=step.groups,
        step=step,
    )
    return Part(archive, step.groups, step.manifest)


@contextlib.contextmanager
def opened_parts(storage: Storage, names: Sequence[str]) -> Iterator[Part]:
    """Archives without a manifest, one from each rank, as one file. Raises CorruptCheckpointError."""
    with contextlib.ExitStack() as stack:
        opened: dict[str, OpenArchive] = {}

        def open_one(name: str) -> None:
            reader = open_decompressed(stack.enter_context(storage.open(name)), storage.locate(name))
            opened[name] = OpenArchive(reader, path=storage.locate(name), verify=True)
            if len(names) > MAX_OPENERS:
                opened[name].keep_little()

        run_together("open", [functools.partial(open_one, name) for name in names], max_threads=MAX_OPENERS)
        yield Part(MergedArchives([opened[name] for name in names], path=storage.locate("")))


class MergedArchives(Contents):
    """The archives of all ranks of a step, as one file. The code that opens the archives closes them.

    More archives are opened as they are needed. If bytes are missing, this happens at any time, and numbers and trees
    stay valid. For missing names, a reader calls `learn_names`.

    Args:
        archives: the open archives of one step in any order.
        path: the folder of the step, for messages.
        ranks: the rank that restores, and the number of ranks that restore together; None for a load by one process. If
            the number of ranks has not changed, a rank gets its own value where each rank has its own. Other readers
            get a `PerRank` of these values.
        per_rank: the dotted names of values that each rank has separately. Other differences are detected.
        from_ranks: the rank whose value to take instead, by dotted name.
        groups: the only top-level entries to include; None for all.
        step: opens more of the archives; None if all existing archives are open.

    Raises CorruptCheckpointError for archives that contradict each other, and KeyError if `from_ranks` names a rank
    that has no such value.
    """

    def __init__(
        self,
        archives: Sequence[Contents],
        *,
        path: str,
        ranks: tuple[int, int] | None = None,
        per_rank: Collection[str] = (),
        from_ranks: Mapping[str, int] | None = None,
        groups: Groups = None,
        step: StepArchives | None = None,
    ) -> None:
        super().__init__(None, path=path)
        self._step = step
        self._per_rank, self._groups, self._from_ranks = frozenset(per_rank), groups, dict(from_ranks or {})
        self._ranks = ranks
        self._cover = functools.cache(cover)  # layers of a model have the same shapes
        self._take(archives)

    def _take(self, archives: Sequence[Contents]) -> None:
        """Build the tree, the numbers and the tensors from the archives that are open now."""
        self._archives = self._by_rank(archives)
        self.merged, self._num_merged = self._merge(), len(self._archives)
        self.of_some = self.merged.of_some
        self._knows_names = self._step is None or self._step.has_all_names
        self._apart_names = frozenset(map(dotted, self.merged.apart))
        self.index = self._index()
        # Tensors with a separate value on each rank, of which the rank holds only a shard. Those that a layout lists
        # are shards of one tensor: only their containers differ.
        self._parts = {
            n
            for n, (ranks, tensor) in enumerate(zip(self.merged.tensors, self.index.tensors, strict=True))
            if len(ranks) == 1 and tensor.is_spread and is_within(dotted(tensor.path), self._per_rank)
            if not (self._step and self._step.locator and self._step.locator.writers(name_of(tensor.path)))
        }
        self._sources: dict[int, tuple[list[Source], list[Box]]] = {}

    @property
    def _choice(self) -> Choice:
        rank, num_readers = self._ranks or (None, None)
        return Choice(rank if num_readers == self.world_size else None, self._from_ranks)

    @property
    def _unopened(self) -> StepArchives | None:
        """The step if it has archives that are not open yet; otherwise None."""
        return None if self._step is None or self._step.is_whole else self._step

    def _grow(self, step: StepArchives) -> None:
        """Add the slices of the same tensors that newly opened archives have. Numbers stay valid."""
        self._archives = self._by_rank(step.opened)
        grown = self._merge().tensors
        merged_numbers = _by_own_number(grown)
        self.merged = self.merged._replace(
            tensors=[
                numbers if (n := merged_numbers.get(next(iter(numbers.items())))) is None else grown[n]
                for numbers in self.merged.tensors
            ]
        )
        self.index, self._sources = self._index(), {}

    def _by_rank(self, archives: Sequence[Contents]) -> dict[int, Contents]:
        archive_of: dict[int, Contents] = {}
        sizes = set()
        for archive in archives:
            ranks = archive.index.ranks
            if ranks is None:
                raise archive.corrupt("its manifest says that it belongs to one of several ranks, but it does not")
            if ranks.rank in archive_of:
                raise archive.corrupt(f"it is rank {ranks.rank}'s, and so is {archive_of[ranks.rank].path}")
            archive_of[ranks.rank] = archive
            sizes.add(ranks.world_size)
        if len(sizes) != 1:
            raise self.corrupt(f"its archives were saved by worlds of {sorted(sizes)} ranks")
        (self.world_size,) = sizes
        if self._step is not None and self._step.num_ranks != self.world_size:
            raise self.corrupt(
                f"its manifest names {self._step.num_ranks} archives, but {self.world_size} ranks have saved it"
            )
        return dict(sorted(archive_of.items()))

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
            if (step := self._unopened) is None:
                raise
            step.open_all()  # so that the error names the ranks that have such a value
            self._archives = self._by_rank(step.opened)
            return self._merge()
        except Exception as error:  # the skeletons are untrusted
            why = printable(f"{type(error).__name__}: {error!s:.200}")
            raise self.corrupt(f"the skeletons of its archives cannot be read as one ({why})") from error

    def _index(self) -> Index:
        """The merged index of all archives."""
        numbers = _by_own_number(self.merged.tensors)
        apart: dict[frozenset[tuple[int, int]], int] = {}
        tensors: list[IndexedTensor] = []
        while len(tensors) < len(self.merged.tensors):  # which grows by tensors that other tensors are tied to
            tensors.append(self._tensor(len(tensors), numbers, apart))
        first = next(iter(self._archives.values())).index
        nowhere = Member(digests.MEMBER, Extent(0, 0))
        return Index(first.step, (), tuple(tensors), (), self.merged.skeleton, nowhere, 0)

    def _tensor(
        self,
        n: int,
        numbers: Mapping[tuple[int, int], int],
        apart: dict[frozenset[tuple[int, int]], int],
    ) -> IndexedTensor:
        tensors = {rank: self._archives[rank].index.tensors[i] for rank, i in self.merged.tensors[n].items()}
        first_rank, first = next(iter(tensors.items()))
        for rank, other in tensors.items():
            if (other.dtype, other.shape) != (first.dtype, first.shape):
                raise self.corrupt(
                    f"{shown(first.path)} is {first.dtype}{list(first.shape)} on rank {first_rank} and "
                    f"{other.dtype}{list(other.shape)} on rank {rank}"
                )
        # The archive of a rank without a slice of a tensor does not record whether the tensor is tied to another one.
        ties = {
            rank: tensor.alias_of
            for rank, tensor in tensors.items()
            if tensor.alias_of is not None or tensor.slices or tensor.lent
        }
        alias = None
        if any(i is not None for i in ties.values()):
            targets = {(rank, i) for rank, i in ties.items() if i is not None}
            known = {numbers.get(target) for target in targets}
            alias = known.pop()
            if len(targets) < len(ties):
                alias = None  # on some ranks the tensor is not tied, so it is a tensor of its own
            elif known or alias is None:  # the tensor is tied to different tensors on different ranks
                alias = apart.setdefault(frozenset(targets), len(self.merged.tensors))
                if alias == len(self.merged.tensors):
                    self.merged.tensors.append(dict(targets))
        is_spread = any(tensor.is_spread for tensor in tensors.values())
        return IndexedTensor(first.path, first.dtype, first.shape, (), alias, is_spread)

    @property
    def items(self) -> Sequence[StepItem]:
        """The items of a state that a planner has divided among the ranks, as listed in a layout; else empty."""
        return self._step.items if self._step else ()

    # --- as a file --------------------------------------------------------------------------------------------

    @property
    def files(self) -> Sequence[Contents]:
        return [file for archive in self._archives.values() for file in archive.files]

    def map(self) -> NoReturn:
        raise ValueError(
            f"mmap=True maps one file, but several ranks have saved {self.path}, each in a file of its own; "
            "leave mmap out"
        )

    def is_of_each(self, number: int) -> bool:
        return is_within(dotted(self.index.tensors[number].path), self._apart_names)

    def is_of_others(self, path: Path) -> bool:
        rank = self._choice.rank
        return rank is not None and rank not in self.of_some.get(path, (rank,))

    def sources(self, number: int, within: Box | None = None) -> Sequence[Source]:
        """The places to read a tensor from, each element once; of several copies, the copy of the lowest rank.

        Raises CorruptCheckpointError if an element is in none of the archives, and ValueError if each rank has a
        separate value and this rank has only a part of its value.
        """
        if not self._missing(number):
            return self._sources[number][0]
        gaps = _gaps(self._missing(number), within)
        if gaps and number in self._parts:
            (rank,) = self.merged.tensors[number]
            raise ValueError(
                f"{self.path}: {shown(self.index.tensors[number].path)} has a separate value for each rank that saved, "
                f"but rank {rank} has only its shard; restore on as many ranks, or leave it out with select="
            )
        if gaps and self._unopened:
            # A caller that did not announce its tensors will probably read all tensors that the ranks divided.
            divided = [
                n for n, tensor in enumerate(self.index.tensors) if tensor.alias_of is None and not tensor.is_spread
            ]
            self._open([(number, within), *((n, None) for n in divided if n != number)])
            # Only the archive of a rank with a slice of a tensor records whether it is tied to another tensor.
            number = self.primary(number)
        missing = self._missing(number)
        if missing and not self._unopened and number not in self._parts:
            raise self._missing_error(number, missing)
        return self._sources[number][0]

    def writers(self, number: int) -> Collection[int]:
        if self.is_of_each(number):
            return sorted(self.merged.tensors[number])
        if self._unopened and self._unopened.locator:
            return sorted(self._unopened.locator.writers(name_of(self.index.tensors[number].path)))
        return sorted({rank for source in self.sources(number) for rank in source.file.writers(number)})

    def need(self, wanted: Iterable[tuple[int, Box | None]]) -> None:
        wanted = list(wanted)
        num_whole = sum(within is None for _, within in wanted)
        num_tensors = sum(tensor.alias_of is None for tensor in self.index.tensors)
        if num_whole >= num_tensors and (step := self._unopened) and self._gaps_of(wanted):
            step.open_all()
            self._grow(step)
        self._open(wanted)

    def _open(self, wanted: Sequence[tuple[int, Box | None]]) -> None:
        """Open archives until they have all these boxes, or no other archive can have them."""
        while (step := self._unopened) and (gaps := self._gaps_of(wanted)):
            step.open_boxes(gaps)
            self._grow(step)

    def _gaps_of(self, wanted: Iterable[tuple[int, Box | None]]) -> dict[str, list[Box]]:
        """The boxes that no open archive has, by the names of tensors in a layout."""
        gaps: dict[str, list[Box]] = {}
        for number, within in wanted:
            number = self.primary(number)
            if number not in self._parts and (missing := _gaps(self._missing(number), within)):
                gaps.setdefault(name_of(self.index.tensors[number].path), []).extend(missing)
        return gaps

    @property
    def has_all_names(self) -> bool:
        return self._knows_names

    def learn_names(self) -> bool:
        if self._step is None or self._knows_names:
            return False
        self._step.open_names()
        self._knows_names = True
        if len(self._step.opened) == self._num_merged:
            return False
        self._take(self._step.opened)
        return True

    def tree(
        self, *, select: Select = None, types: Iterable[type] | None = (), groups: Groups = None
    ) -> tuple[Any, list[StoredLeaf]]:
        try:
            value, stored = super().tree(select=select, types=types, groups=groups)
        except KeyError:  # another archive may have the selected entries
            if not self.learn_names():
                raise
            return self.tree(select=select, types=types, groups=groups)
        are_apart = self._ranks is None and any(parts_in(value, ValuesByRank))
        if are_apart and (step := self._unopened):  # a load returns the values of all ranks
            step.open_all()
            self._take(step.opened)
            return super().tree(select=select, types=types, groups=groups)
        return value, stored

    def _missing(self, number: int) -> list[Box]:
        """The boxes of a tensor that no open archive has."""
        if number not in self._sources:
            pieces = [
                piece
                for rank, own_number in self.merged.tensors[number].items()
                for piece in self._archives[rank].pieces(own_number)
            ]
            tensor = self.index.tensors[number]
            found = sources_in(pieces, tensor.shape, self._cover)
            if found[1] and not self._unopened and number not in self._parts:
                # Its container is of another kind on some ranks, but ranks divide tensors by names and shapes alone.
                for archive, own_number in self._by_name[name_of(tensor.path)]:
                    other = archive.index.tensors[own_number]
                    if (other.shape, other.dtype) == (tensor.shape, tensor.dtype):
                        pieces += archive.pieces(own_number)
                found = sources_in(pieces, tensor.shape, self._cover)
            self._sources[number] = found
        return self._sources[number][1]

    @functools.cached_property
    def _by_name(self) -> dict[str, list[tuple[Contents, int]]]:
        """The tensors of all archives by name, once all archives are open."""
        found: dict[str, list[tuple[Contents, int]]] = {}
        for archive in self._archives.values():
            for number, tensor in enumerate(archive.index.tensors):
                found.setdefault(name_of(tensor.path), []).append((archive, number))
        return found

    def objects(self, stored: Iterable[StoredLeaf], *, trust: bool) -> list[Any]:
        by_rank = self._objects_by_rank(stored)
        objects: list[Any] = [None] * (1 + max((n for numbered in by_rank.values() for n in numbered), default=-1))
        for rank, numbered in by_rank.items():
            loaded = self._archives[rank].objects(numbered.values(), trust=trust)
            for number, leaf in numbered.items():
                objects[number] = loaded[leaf.number]
        return objects

    def object_digests(self, stored: Iterable[StoredLeaf]) -> dict[int, str]:
        digests_of: dict[int, str] = {}
        for rank, numbered in self._objects_by_rank(stored).items():
            own = self._archives[rank].object_digests(numbered.values())
            digests_of |= {number: own[leaf.number] for number, leaf in numbered.items()}
        return digests_of

    def _objects_by_rank(self, stored: Iterable[StoredLeaf]) -> dict[int, dict[int, StoredLeaf]]:
        """Maps ranks and numbers here to pickled leaves, which have their numbers in the rank's archive."""
        by_rank: dict[int, dict[int, StoredLeaf]] = {}
        for leaf in stored:
            if leaf.kind == "object":
                owners, number = self.merged.objects, leaf.number
                rank, own_number = (next(iter(self._archives)), number) if owners is None else owners[number]
                by_rank.setdefault(rank, {})[number] = StoredLeaf("object", own_number, path=leaf.path)
        return by_rank

    def _missing_error(self, number: int, missing: list[Box]) -> CorruptCheckpointError:
        tensor = self.index.tensors[number]
        num_missing = sum(box.num_elements for box in missing)
        locator = self._step.locator if self._step else None
        owners = sorted(locator.having({name_of(tensor.path): missing})) if locator else []
        boxes, ranks = some_of(missing, _MANY), some_of([f"rank {rank}" for rank in owners], _MANY)
        error = self.corrupt(
            f"{shown(tensor.path)}: {boxes} of shape {list(tensor.shape)} is in none of its archives, "
            f"{num_missing:,} elements" + (f", which {ranks} should have" if owners else "")
        )
        error.tensors = (shown(tensor.path),)
        return error


def _by_own_number(tensors: Sequence[Mapping[int, int]]) -> dict[tuple[int, int], int]:
    """The number of each merged tensor, by a rank and the tensor's number there."""
    return {(rank, own_number): n for n, numbers in enumerate(tensors) for rank, own_number in numbers.items()}


def _gaps(missing: Iterable[Box], within: Box | None) -> list[Box]:
    """The missing boxes, cut to the part that is wanted."""
    if within is None:
        return list(missing)
    return [common for box in missing if (common := box.common(within))]
