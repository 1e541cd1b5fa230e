"""The archives that all ranks have written for one step, opened as they are needed.

In: the names of archives, and the boxes that the open archives lack. Out: more open archives.
Knows nothing of: runs, live objects, the state that the archives make up together.

The reader decides which archives are needed. If the number of ranks has not changed, a rank opens its own archive,
which usually has everything. Any other reader opens one archive of each class; these together have all names. From the
layout, `slicing.locator` then computes which archives have the remaining boxes. Without a layout all archives are
opened. If a planner has divided the state, no rank has all names, and the archives with the wanted names are opened.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from ....errors import CorruptCheckpointError, StorageUnavailableError
from ...host.threads import run_together
from ...runs import layouts
from ...runs.manifest import Archive, Manifest, missing_error
from ...runs.receipts import archives_in, attempt_of_all
from ...slicing.boxes import Box
from ...slicing.locator import ShardLocator, StepItem, StepLayout, name_of
from ...spec import some_of
from ...state.names import Path, Select, selector, shown
from ...storage.interface import Storage
from .archive import OpenArchive, open_named
from .contents import Groups
from .copies import Copies, Holders

# The most archives of one step that are opened at once, and whose first blocks are kept in memory.
MAX_OPENERS: Final = 16
_MANY: Final = 8  # names in a message


class Readers(NamedTuple):
    """The reader of a step that several ranks have saved; see `MergedArchives`.

    With `reads_all`, it opens all archives. `wants` selects the paths that it will read from all paths of the state, or
    returns no path while that is unknown; without `wants` it reads all paths. If the number of ranks has changed, then
    for the names in `wrapping` a rank takes the value of the rank with its own number modulo the saved number of ranks.
    Archives stay open until `kept` is closed; without `kept`, until they have been used.
    """

    ranks: tuple[int, int] | None = None
    from_ranks: Mapping[str, int] | None = None
    reads_all: bool = False
    wants: Callable[[Sequence[Path]], Iterable[Path]] | None = None
    wrapping: Collection[str] = ()
    kept: contextlib.ExitStack | None = None

    def of_world(self, size: int) -> Readers:
        """These readers, for a step that `size` ranks have saved."""
        rank, num_readers = self.ranks or (0, 1)
        wrapped = {} if size == num_readers else dict.fromkeys(self.wrapping, rank % size)
        return self._replace(from_ranks={**wrapped, **(self.from_ranks or {})}) if wrapped else self


def check_from_ranks(from_ranks: Any) -> None:
    """Raises TypeError unless this is a mapping from names to ranks, or None."""
    if from_ranks is not None and not (
        isinstance(from_ranks, Mapping)
        and all(isinstance(name, str) for name in from_ranks)
        and all(hasattr(rank, "__index__") and not isinstance(rank, bool) for rank in from_ranks.values())
    ):
        raise TypeError(
            'from_ranks must be a mapping from names to numbers of ranks, such as {"rng": 0}; '
            f"got {from_ranks!r:.100}"
        )


class StepArchives:
    """The archives of all ranks of one attempt that a step's manifest names: of the step itself, or of an earlier step.

    Archives are opened on the thread that reads. `stack` closes them.

    Args:
        entries: the archives in the manifest, or the file that lists them. If there are several entries, a planner has
            divided the state among the ranks, and no archive has all names of its rank.
        groups: the top-level entries that the manifest takes from these archives; None for all.
        holders: all places that hold the step, if there are several.
        root: the storage of the run, for archives of earlier steps that these refer to.
    """

    def __init__(
        self,
        storage: Storage,
        folder: str,
        entries: Sequence[Archive],
        manifest: Manifest,
        readers: Readers,
        stack: contextlib.ExitStack,
        *,
        verify: bool,
        groups: Groups = None,
        holders: Holders | None = None,
        root: Callable[[], Storage],
    ) -> None:
        self._storage, self._folder, self.path = storage, folder, storage.locate(folder)
        self._archives = archives_in(storage, folder, entries, manifest.step)  # by rank
        self._attempt, self._is_shared_out = attempt_of_all(entries[0].name) or manifest.attempt, len(entries) > 1
        self.manifest, self.readers, self.groups = manifest, readers, groups
        self._stack, self._verify, self._holders, self._root = stack, verify, holders, root
        self._opened: dict[int, OpenArchive] = {}
        self._lenders: dict[tuple[str, str], OpenArchive] = {}
        self._has_all_names = False
        for archives in (self._opened, self._lenders):  # they refer to this object, and hold blocks that were read
            stack.callback(archives.clear)

    @property
    def num_ranks(self) -> int:
        return len(self._archives)

    @property
    def items(self) -> Sequence[StepItem]:
        """The items of a state that a planner has divided among the ranks, as listed in a layout; else empty."""
        layout = self._layout if self._is_shared_out else None
        return layout.items if layout else ()

    @property
    def opened(self) -> Sequence[OpenArchive]:
        return [self._opened[rank] for rank in sorted(self._opened)]

    @property
    def is_whole(self) -> bool:
        """True if all archives are open."""
        return len(self._opened) == self.num_ranks

    @property
    def has_all_names(self) -> bool:
        """True if the open archives together have all names of the state."""
        return self._has_all_names or self.is_whole

    def open_first(self) -> None:
        """Open the archives that this reader needs first. Raises CorruptCheckpointError."""
        self._open(self._initial_ranks())

    def open_all(self) -> None:
        self._open(range(self.num_ranks))

    def open_names(self) -> None:
        """Open one archive of each class; if a planner has divided the state, the archives with the wanted names."""
        self._open(self._naming_ranks() if self._is_shared_out else self._representatives())
        self._has_all_names = True

    def open_boxes(self, boxes: Mapping[str, Sequence[Box]]) -> None:
        """Open the archives with some of these boxes, by tensor name; all archives if the layout names none."""
        writers = set() if self.locator is None else self.locator.having(boxes, self._opened)
        if writers - self._opened.keys():
            self._open(writers)
        else:
            self.open_all()

    @functools.cached_property
    def locator(self) -> ShardLocator | None:
        """Finds in the layout which ranks wrote a tensor; None without a layout."""
        return ShardLocator(self._layout) if self._layout else None

    # --- choosing ---------------------------------------------------------------------------------------------

    def _initial_ranks(self) -> Collection[int]:
        everybody = range(self.num_ranks)
        rank, num_readers = self.readers.ranks or (0, 0)
        chosen = {rank for rank in (self.readers.from_ranks or {}).values() if rank in everybody}
        if self.num_ranks == 1 or self.readers.reads_all:
            return everybody
        if self._is_shared_out:
            return {*self._naming_ranks(), *chosen}
        if num_readers == self.num_ranks and not chosen:
            return {rank}
        self._has_all_names = True
        return {*self._representatives(), *chosen}

    def _representatives(self) -> Collection[int]:
        """Ranks whose archives together have all names."""
        if self.locator is None:
            return range(self.num_ranks)
        rank, size = self.readers.ranks or (0, 1)
        return self.locator.representatives(rank / size)  # of each class, the rank that probably has the wanted tensors

    def _naming_ranks(self) -> Collection[int]:
        """The ranks whose archives have the wanted names of a state that a planner has divided."""
        if self.locator is None or not self.items:
            return range(self.num_ranks)
        paths, rank = [item.path for item in self.items], (self.readers.ranks or (0, 1))[0]
        lists = {*map(_outside_lists, paths if self.readers.wants is None else self.readers.wants(paths))}
        self._has_all_names = bool(lists)
        chosen = (path for path in paths if _outside_lists(path) in lists)
        # One archive is enough to know how many ranks have saved. Ranks that read together each open a different one.
        return self.locator.naming(map(name_of, chosen)) or {rank % self.num_ranks}

    @functools.cached_property
    def _layout(self) -> StepLayout | None:
        """The layout, which is read once; None if it is missing, damaged, or does not fit."""
        layout = layouts.read(self._storage, self._folder, self._attempt)
        ranks = sorted(rank for mates in layout.classes.values() for rank in mates) if layout else []
        return layout if ranks == list(range(self.num_ranks)) else None

    # --- opening ----------------------------------------------------------------------------------------------

    def _open(self, ranks: Collection[int]) -> None:
        fresh = sorted({*ranks} - self._opened.keys())
        opened: dict[int, OpenArchive] = {}

        def open_one(rank: int) -> None:
            try:
                opened[rank] = self._opened_at(self._storage, self._folder, self._archives[rank])
            except CorruptCheckpointError as error:
                if isinstance(error.__cause__, FileNotFoundError) and (names := self._written_by(rank)):
                    raise CorruptCheckpointError(
                        f"{error}. It is rank {rank}'s, and has parts of {some_of(names, _MANY)}",
                        path=error.path,
                        tensors=names,
                    ) from error.__cause__
                raise
            opened[rank].lender_of = self._lender
            if len(self._opened) + len(fresh) > MAX_OPENERS:
                opened[rank].keep_little()

        run_together("open", [functools.partial(open_one, rank) for rank in fresh], max_threads=MAX_OPENERS)
        self._opened |= opened
        _, num_readers = self.readers.ranks or (0, 1)
        if num_readers > 1 and len(self._opened) > 1:
            for archive in self._opened.values():  # other readers also open archives of several ranks
                archive.share()

    def _lender(self, folder: str, name: str) -> OpenArchive:
        """An archive of an earlier step that one of these archives refers to."""
        if (folder, name) not in self._lenders:
            entry = self._entries_of_lenders.get((folder, name))
            if entry is None:
                raise CorruptCheckpointError(f"{self.path}: its manifest does not name {folder}/{name}", path=self.path)
            self._lenders[folder, name] = self._opened_at(self._root(), folder, entry)
        return self._lenders[folder, name]

    @functools.cached_property
    def _entries_of_lenders(self) -> dict[tuple[str, str], Archive]:
        """The archives that the manifest refers to for some of the step's tensors, by folder and name."""
        return {
            (one.folder, entry.name): entry
            for one in self.manifest.elsewhere
            if one.in_part
            for entry in archives_in(self._root(), one.folder, (one.archive,), self.manifest.step)
        }

    def _opened_at(self, storage: Storage, folder: str, entry: Archive) -> OpenArchive:
        """An opened archive; if several places hold the step, from the first place where it is sound.

        Raises CorruptCheckpointError if the archive is missing, or is not the one that the manifest names.
        """
        path = f"{folder}/{entry.name}" if folder else entry.name
        if self._holders is None:
            return self._at_place(storage, path, entry)
        copies = Copies(self._holders, path, entry, self._stack)
        for each in self._holders.storages:
            try:
                return self._at_place(each, path, entry, copies)
            except (CorruptCheckpointError, StorageUnavailableError) as error:
                self._holders.note(each.locate(path), error)
        return OpenArchive(copies, path=storage.locate(path), verify=self._verify)

    def _at_place(self, storage: Storage, path: str, entry: Archive, copies: Copies | None = None) -> OpenArchive:
        location = storage.locate(path)
        try:
            reader = self._stack.enter_context(storage.open(path))
        except FileNotFoundError as error:
            raise missing_error(location, self.manifest.step) from error
        except (IsADirectoryError, ValueError) as error:  # a folder, or not a valid file name
            raise CorruptCheckpointError(
                f"{location!a} is not a file, though its manifest names it", path=location
            ) from error
        return open_named(reader, entry, path=location, verify=self._verify, copies=copies)

    def _written_by(self, rank: int) -> tuple[str, ...]:
        """The tensors in a rank's archive, according to the layout; none without a layout."""
        if self.num_ranks == 1 or self.locator is None:
            return ()
        written = self.locator.boxes_of(rank)
        return tuple(sorted(shown(tuple(name.split("\x1f"))) for name, boxes in written.items() if boxes))


def selected_by(select: Select) -> Callable[[Sequence[Path]], Iterable[Path]] | None:
    """A function that selects the paths that a reader with this `select` wants; None if it wants all.

    If a pattern matches no path, all paths are wanted: either the pattern is for something inside a value, or an error
    lists all names.
    """
    if select is None:
        return None

    def wants(paths: Sequence[Path]) -> Iterable[Path]:
        chosen = selector(select)
        assert chosen is not None
        selected = list(filter(chosen, paths))
        return paths if chosen.unused else selected

    return wants


def _outside_lists(path: Path) -> Path:
    """The path of the outermost list, or dict with numbers as keys, around a path; otherwise the path itself.

    A list is read as a whole, since an archive with a part of the list does not record its length.
    """
    return path[: next((n for n, key in enumerate(path) if not isinstance(key, str)), len(path))]
