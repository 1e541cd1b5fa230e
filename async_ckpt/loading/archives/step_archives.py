"""The archives that all ranks have written of one step, opened as far as they are needed.

In: the names of archives, and what a reader finds missing in those that are open. Out: what is open, as one file.
Knows nothing of: runs, live objects.

Which archives are needed is known only once it is known what is wanted. A rank of as many as have saved opens its own, and most
find all there. Any other reader opens one of each kind, which know all names. What is in none of these is asked of the
layout, by arithmetic (`slicing.locator`). Where that does not know it either, all archives are opened, if they are not too many.
What a planner has shared out, by no arithmetic that is known here, is in no layout: all archives are opened.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from ...errors import CheckpointError, CorruptCheckpointError
from ...host.threads import run_together
from ...runs import layouts
from ...runs.manifest import Archive, missing_error
from ...slicing.cover import Box
from ...slicing.locator import ShardLocator, StepLayout, name_of
from ...state.names import shown
from ...state.skeletons import UnknownChoiceError
from ...storage.interface import Storage
from .archive import OpenArchive
from .contents import Groups, Part
from .merged_archives import MergedArchives

# Archives of one step that are opened at once, and whose first blocks are kept for those who read on.
_MAX_OPENERS: Final = 16
# Indices that are read without anything that says they are needed.
MAX_UNEXPLAINED: Final = 256
# Names in a message.
_MANY: Final = 8


class Readers(NamedTuple):
    """The reader of a step that several ranks have saved; see `MergedArchives`. With `reads_all` it reads everything."""

    ranks: tuple[int, int] | None = None
    from_ranks: Mapping[str, int] | None = None
    reads_all: bool = False


def check_from_ranks(from_ranks: Any) -> None:
    """Raises TypeError for what does not say which rank's value is wanted of which name."""
    if from_ranks is not None and not (
        isinstance(from_ranks, Mapping)
        and all(isinstance(name, str) for name in from_ranks)
        and all(hasattr(rank, "__index__") and not isinstance(rank, bool) for rank in from_ranks.values())
    ):
        raise TypeError(
            f'from_ranks must be a mapping from names to numbers of ranks, such as {{"rng": 0}}; got {from_ranks!r:.100}'
        )


class NamedArchives(NamedTuple):
    """Archives that a manifest names: those of all ranks of one attempt; the groups for which it does, None for all; and what
    each rank has for itself.
    """

    storage: Storage
    folder: str
    archives: Sequence[tuple[str, Archive]]
    attempt: str
    step: int
    named_by: int
    """The step whose manifest it is: a later one than `step` where groups are borrowed."""
    per_rank: Collection[str] = ()
    groups: Groups = None
    near: Sequence[Storage] = ()
    """Which may have some of these archives, too, and are read first."""
    is_shared_out: bool = False
    """Whether a planner has given each rank a part to write: then no archive has all names that its rank has."""


class StepArchives:
    """Opens the archives that a manifest names, for one reader; they are closed with `stack`."""

    def __init__(
        self, named: NamedArchives, readers: Readers, stack: contextlib.ExitStack, *, verify: bool
    ) -> None:
        self.named, self._readers, self._stack, self._verify = named, readers, stack, verify
        self._opened: dict[int, OpenArchive] = {}
        self._has_all_names = False
        self._layout: StepLayout | None = None
        self._has_asked, self._is_rebuilt = False, False
        self._is_complete = False  # what is not in the open archives is in none

    def part(self) -> Part:
        """The archives as one file; more of them are opened when it is found what the reader wants. Raises CorruptCheckpointError."""
        archives, groups = self.named.archives, self.named.groups
        self._open(self._first())
        if len(archives) == 1:
            return Part(self._opened[0], groups)
        try:
            merged = self._as_one()
        except UnknownChoiceError:
            if self.is_whole or len(archives) > MAX_UNEXPLAINED:
                raise
            self.open_all()  # to say who has such a value
            merged = self._as_one()
        if len(archives) != merged.world_size:
            raise merged.corrupt(
                f"its manifest names {len(archives)} archives, but {merged.world_size} ranks have saved it"
            )
        return Part(merged, groups)

    @property
    def opened(self) -> Sequence[OpenArchive]:
        return [self._opened[rank] for rank in sorted(self._opened)]

    @property
    def is_whole(self) -> bool:
        return self._is_complete or len(self._opened) == len(self.named.archives)

    @property
    def has_all_names(self) -> bool:
        return self._has_all_names or self.is_whole

    def open_all(self) -> None:
        self._open(range(len(self.named.archives)))

    def open_names(self) -> None:
        """Open one archive of each kind. Raises CheckpointError where nobody knows which that are."""
        layout = self._ask_layout()
        if layout is not None:
            self._open(ShardLocator(layout, self._aliases()).representatives(self._preferred))
            self._has_all_names = True
        elif self._num_left <= MAX_UNEXPLAINED:
            self.open_all()
        else:
            raise self._unknown("which names")

    def open_boxes(self, boxes: Mapping[str, Sequence[Box]]) -> None:
        """Open the archives of those who have these boxes. Raises CheckpointError where nobody knows who has them."""
        layout = self._ask_layout()
        if layout is not None:
            writers, _ = ShardLocator(layout, self._aliases()).having(boxes, self._opened)
            if writers - self._opened.keys():
                self._open(writers)
                return
        if self._num_left <= MAX_UNEXPLAINED:
            self.open_all()
        elif self._is_rebuilt:
            self._is_complete = True  # nobody else has it
        elif (rebuilt := self._read_layout(rebuilt=True)) is not None:
            self._layout, self._is_rebuilt = rebuilt, True
            self.open_boxes(boxes)
        else:
            raise self._unknown(shown(tuple(next(iter(boxes)).split("\x1f"))))

    # --- which ------------------------------------------------------------------------------------------------

    @property
    def _num_left(self) -> int:
        return len(self.named.archives) - len(self._opened)

    @property
    def _preferred(self) -> float:
        """The rank, of several alike, that is likely to have the tensors that this reader wants."""
        rank, size = self._readers.ranks or (0, 1)
        return rank / size

    def _first(self) -> Collection[int]:
        size = len(self.named.archives)
        everybody = range(size)
        rank, num_readers = self._readers.ranks or (0, 0)
        chosen = {rank for rank in (self._readers.from_ranks or {}).values() if rank in everybody}
        if size == 1 or self._readers.reads_all or self.named.is_shared_out:
            return everybody
        if num_readers == size and not chosen:
            return {rank}
        layout = self._ask_layout()
        if layout is None:
            return everybody if size <= MAX_UNEXPLAINED else {0, *chosen}
        self._has_all_names = True
        return {*ShardLocator(layout).representatives(self._preferred), *chosen}

    def _ask_layout(self) -> StepLayout | None:
        if not self._has_asked:
            self._has_asked, self._layout = True, self._read_layout()
        if self._layout is None:
            self._layout = self._read_layout(rebuilt=True)
            self._is_rebuilt = self._layout is not None
        return self._layout

    def _read_layout(self, *, rebuilt: bool = False) -> StepLayout | None:
        found = layouts.read(self.named.storage, self.named.folder, self.named.attempt, rebuilt=rebuilt)
        if found is None:
            return None
        ranks = sorted(rank for mates in found.classes.values() for rank in mates)
        return found if ranks == list(range(len(self.named.archives))) else None

    def _aliases(self) -> set[str]:
        return {
            name_of(told.path)
            for archive in self._opened.values()
            for told in archive.index.tensors
            if told.alias_of is not None
        }

    def _unknown(self, what: str) -> CheckpointError:
        where = self.named.storage.locate(self.named.folder)
        root, _, _ = where.rstrip("/").rpartition("/")
        return CheckpointError(
            f"{where}: {len(self.named.archives):,} ranks have saved it, and nothing there says whose archive has {what}: its layout is "
            f"missing, damaged, or does not fit; make it again with async_ckpt.files.rebuild_layout({root!r}, {self.named.step})"
        )

    # --- opening ----------------------------------------------------------------------------------------------

    def _open(self, ranks: Collection[int]) -> None:
        fresh = sorted({*ranks} - self._opened.keys())
        opened: dict[int, OpenArchive] = {}

        def open_one(rank: int) -> None:
            path, told = self.named.archives[rank]
            storage = next((one for one in self.named.near if _has(one, path, told)), self.named.storage)
            try:
                opened[rank] = open_archive(
                    storage, path, told, self._verify, self._stack, self.named.named_by
                )
            except CorruptCheckpointError as error:
                if isinstance(error.__cause__, FileNotFoundError) and (names := self._written_by(rank)):
                    first, more = ", ".join(names[:_MANY]), len(names) - _MANY
                    raise CorruptCheckpointError(
                        f"{error}. It is rank {rank}'s, and has parts of {first}{f' and {more} more' if more > 0 else ''}",
                        path=error.path,
                        tensors=names,
                    ) from error.__cause__
                raise
            if len(self._opened) + len(fresh) > _MAX_OPENERS:
                opened[rank].keep_little()

        run_together("open", [functools.partial(open_one, rank) for rank in fresh], max_threads=_MAX_OPENERS)
        self._opened |= opened
        _, num_readers = self._readers.ranks or (0, 1)
        if num_readers > 1 and len(self._opened) > 1:
            for archive in self._opened.values():  # who needs others' archives reads what others read, too
                archive.share()

    def _written_by(self, rank: int) -> tuple[str, ...]:
        """The tensors of which a rank's archive has something, as the layout says; none where there is no layout."""
        layout = self._ask_layout()
        if layout is None or len(self.named.archives) == 1:
            return ()
        written = ShardLocator(layout, self._aliases()).boxes_of(rank)
        return tuple(sorted(shown(tuple(name.split("\x1f"))) for name, boxes in written.items() if boxes))

    def _as_one(self) -> MergedArchives:
        named, readers = self.named, self._readers
        return MergedArchives(
            self,
            path=named.storage.locate(named.folder),
            ranks=readers.ranks,
            per_rank=named.per_rank,
            from_ranks=readers.from_ranks,
            groups=named.groups,
        )


@contextlib.contextmanager
def opened_parts(storage: Storage, names: Sequence[str]) -> Iterator[Part]:
    """Archives that no manifest names, one of each rank, as one file. Raises CorruptCheckpointError."""
    with contextlib.ExitStack() as stack:
        opened: dict[str, OpenArchive] = {}

        def open_one(name: str) -> None:
            reader = stack.enter_context(storage.open(name))
            opened[name] = OpenArchive(reader, path=storage.locate(name), verify=True)
            if len(names) > _MAX_OPENERS:
                opened[name].keep_little()

        run_together("open", [functools.partial(open_one, name) for name in names], max_threads=_MAX_OPENERS)
        yield Part(MergedArchives([opened[name] for name in names], path=storage.locate("")))


def open_archive(
    storage: Storage, path: str, told: Archive, verify: bool, stack: contextlib.ExitStack, named_by: int
) -> OpenArchive:
    """The archive that the manifest of a step names. Raises CorruptCheckpointError for any other."""
    where = storage.locate(path)
    try:
        reader = stack.enter_context(storage.open(path))
    except FileNotFoundError as error:
        raise missing_error(where, named_by) from error
    except (IsADirectoryError, ValueError) as error:  # a folder, or what is no name of a file
        raise CorruptCheckpointError(
            f"{where!a} is not a file, though its manifest names it", path=where
        ) from error
    if reader.num_bytes != told.num_bytes:
        raise CorruptCheckpointError(
            f"{where}: {reader.num_bytes:,} bytes, its manifest says {told.num_bytes:,}; load an earlier checkpoint",
            path=where,
        )
    archive = OpenArchive(reader, path=where, verify=verify)
    if verify and archive.digest != told.digest:
        raise archive.corrupt("it is not the archive that its manifest names")
    return archive


def _has(storage: Storage, path: str, told: Archive) -> bool:
    """Whether there is a file of this name and size."""
    try:
        with storage.open(path) as reader:
            return reader.num_bytes == told.num_bytes
    except (CheckpointError, OSError, ValueError):
        return False
