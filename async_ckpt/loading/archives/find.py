"""Where the archives of a path are: one file, the folder of a step, or the newest step of a run.

In: paths, and runs. Out: opened archives, for whoever is handed them. Knows nothing of: what is made of them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, Self, TypeVar

from ...errors import (
    CheckpointError,
    CorruptCheckpointError,
    FormatVersionError,
    NotCommittedError,
    StorageUnavailableError,
)
from ...runs.manifest import NAME as MANIFEST
from ...runs.manifest import Archive, Manifest, parse, parse_intent, retired_attempts
from ...runs.naming import parse_step_name
from ...runs.receipts import archives_in, archives_of, attempt_of_all
from ...runs.root import TRIES, overtaken_error
from ...runs.roots import Roots
from ...runs.run import Run
from ...runs.starts import Commit, counts, split_starts
from ...runs.unmanaged import foreign_kind, newest_of_other_namings
from ...state.names import Selector, shown
from ...storage.compressed import open_decompressed
from ...storage.interface import Reader, Storage
from ...storage.place import Anywhere, place_of, storage_at
from .contents import Part
from .foreign import opened, parts_of_folder
from .merged_archives import MergedArchives
from .step_archives import NamedArchives, Readers, StepArchives, check_from_ranks

T = TypeVar("T")


_ANYBODY: Final = Readers()


def from_newest(
    roots: Roots,
    use: Callable[[Sequence[Part]], T],
    *,
    verify: bool,
    readers: Readers = _ANYBODY,
    passed_over: Callable[[int, CorruptCheckpointError], None] | None = None,
) -> tuple[int, T] | None:
    """The newest committed step, and what `use` makes of its archives; None when nothing is committed.

    A step that is deleted while it is read is followed by what is the newest then. With `passed_over`, which is told of
    it, a corrupt step is followed by the next older one; when all of them are corrupt, that error is raised.
    Raises NotCommittedError when the newest step goes by another naming, CorruptCheckpointError, StorageUnavailableError.
    """
    roots.check_naming()
    corrupt: dict[int, CorruptCheckpointError] = {}

    def newest() -> int | None:
        if not corrupt:
            return roots.latest()
        return max((step for step in roots.steps() if step not in corrupt), default=None)

    num_gone = 0
    while (step := newest()) is not None:
        try:
            return step, from_step(roots, step, use, verify=verify, readers=readers)
        except NotCommittedError as error:
            num_gone += 1
            if num_gone == TRIES:
                raise overtaken_error(repr(roots)) from error
        except CorruptCheckpointError as error:
            if passed_over is None:
                raise
            corrupt[step] = error
            passed_over(step, error)
    if corrupt:
        raise max(corrupt.values(), key=lambda error: error.partly_overwritten)
    return None


def from_step(
    roots: Roots,
    step: int,
    use: Callable[[Sequence[Part]], T],
    *,
    verify: bool,
    readers: Readers = _ANYBODY,
) -> T:
    """The result of `use` for the archives of a committed step. Where several roots hold it, the first that is sound counts.

    Archives that lie in the folder of a root where the step is not committed, as in the cache of a node, are read there.
    Raises NotCommittedError, also when the step is deleted while it is read, CorruptCheckpointError,
    StorageUnavailableError.
    """
    holders = roots.holding(step)
    near = [run.storage for run in roots.runs if run not in holders and not run.storage.remote]
    found = [Committed.of(run, step, near) for run in holders]
    if near:
        found.append(Committed.of(holders[-1], step))
    for one in found[:-1]:
        try:
            return from_committed(one, use, verify=verify, readers=readers)
        except (NotCommittedError, CorruptCheckpointError, StorageUnavailableError) as error:
            warnings.warn(f"step {step} is read from another root: {error}", RuntimeWarning, stacklevel=4)
    return from_committed(found[-1], use, verify=verify, readers=readers)


def from_path(
    path: Anywhere, use: Callable[[Sequence[Part]], T], *, verify: bool, readers: Readers = _ANYBODY
) -> T:
    """The result of `use` for the content of a path: an archive, the folder of a step, or the newest step of a run.

    Or a safetensors file, and a folder that `parts_of_folder` knows. Raises TypeError for `readers` that are not valid.
    """
    check_from_ranks(readers.from_ranks)
    file = opened_as_file(path)
    if file is not None:
        reader, shown = file
        with reader:
            parts: Sequence[Part] = [
                Part(opened(open_decompressed(reader, shown), path=shown, verify=verify))
            ]
            _check_names(parts, readers)
            return use(parts)
    storage = storage_at(path)
    step = step_at(storage, path)
    if step is not None:
        return from_committed(step, use, verify=verify, readers=readers)
    num_gone = 0
    while (newest := _newest_folder(storage)) is not None:
        try:
            found = Committed.at(storage, newest, lambda: storage)
            return from_committed(found, use, verify=verify, readers=readers)
        except NotCommittedError as error:
            num_gone += 1
            if num_gone == TRIES:
                raise overtaken_error(storage.locate("")) from error
    with contextlib.ExitStack() as stack:
        found_there = parts_of_folder(storage, verify=verify, stack=stack)
        if found_there is not None:
            _check_names(found_there, readers)
            return use(found_there)
    raise nothing_committed(storage)


def step_at(storage: Storage, path: Anywhere) -> Committed | None:
    """The committed step whose folder this storage is, if it is one."""
    if not storage.exists(MANIFEST):
        return None
    # Looked for only when something lies there: a bucket has nothing above it.
    root = functools.cache(lambda: place_of(path).object()[0])
    return Committed.at(storage, "", root)


def committed_step(run: Anywhere, step: int | None) -> Committed:
    """A committed step of a run; with None, the newest. The folder of the step itself may be given instead.

    Raises NotCommittedError, and TypeError for a step that is no number.
    """
    if step is not None and (isinstance(step, bool) or not hasattr(step, "__index__")):
        raise TypeError(f"step must be the number of a step, got {step!r:.100}")
    storage = storage_at(run)
    alone = step_at(storage, run)
    if alone is not None:
        own = alone.read().step
        if step is not None and step != own:
            where = storage.locate("")
            raise NotCommittedError(
                f"{where} is the folder of step {own}, not of {step}; give the root of the run",
                path=where,
                step=step,
            )
        return alone
    folders = dict(committed_folders(storage))
    if not folders:
        raise nothing_committed(storage)
    number = max(folders) if step is None else step
    if number not in folders:
        where, there = storage.locate(""), ", ".join(map(str, sorted(folders)))
        raise NotCommittedError(
            f"{where}: step {number} is not committed there; {there} are", path=where, step=number
        )
    return Committed.at(storage, folders[number], lambda: storage)


def nothing_committed(storage: Storage) -> NotCommittedError:
    """The error for a path without a checkpoint."""
    where = storage.locate("")
    return NotCommittedError(f"{where}: {_what_is_there(storage)}", path=where, step=None)


class Committed(NamedTuple):
    """Where a committed step is: its folder in a storage, what reads its manifest, and the root of its run."""

    storage: Storage
    folder: str  # empty for the storage itself
    read: Callable[[], Manifest]  # raises NotCommittedError
    root: Callable[[], Storage]  # in which the folders of steps lie that it has borrowed from
    near: Sequence[Storage] = ()  # which may have some of its archives, too

    @classmethod
    def of(cls, run: Run, step: int, near: Sequence[Storage] = ()) -> Self:
        return cls(run.storage, run.folder(step), lambda: run.manifest(step), lambda: run.storage, near)

    @classmethod
    def at(cls, storage: Storage, folder: str, root: Callable[[], Storage]) -> Self:
        path = f"{folder}/{MANIFEST}" if folder else MANIFEST

        def read() -> Manifest:
            shown = storage.locate(path)
            try:
                return parse(storage.read(path)[0], path=shown)
            except FileNotFoundError as error:
                raise NotCommittedError(
                    f"{storage.locate(folder)} was deleted this moment; load another step, or the newest one of its run",
                    path=shown,
                    step=None,
                ) from error

        return cls(storage, folder, read, root)

    def named(self, made: Manifest) -> list[NamedArchives]:
        """The step's own archives, and those that it has borrowed groups from."""
        below = f"{self.folder}/" if self.folder else ""
        own = [(f"{below}{told.name}", told) for told in archives_of(self.storage, self.folder, made)]
        per_rank = made.ranks.per_rank if made.ranks else ()
        first = NamedArchives(
            self.storage,
            self.folder,
            own,
            made.attempt,
            made.step,
            named_by=made.step,
            per_rank=per_rank,
            near=self.near,
            is_shared_out=made.ranks is None and len(own) > 1,
        )
        found = [first]
        lent: dict[tuple[str, str, int], list[Archive]] = {}
        for one in made.elsewhere:
            lent.setdefault((one.group, one.folder, one.step), []).append(one.archive)
        lots: dict[tuple[str, int, tuple[Archive, ...]], set[str]] = {}
        for (group, folder, step), archives in lent.items():
            lots.setdefault((folder, step, tuple(archives)), set()).add(group)
        for (folder, step, lenders), groups in lots.items():
            root = self.root()
            paths = [
                (f"{folder}/{told.name}", told) for told in archives_in(root, folder, lenders, made.step)
            ]
            lot = first._replace(
                storage=root,
                folder=folder,
                archives=paths,
                attempt=attempt_of_all(lenders[0].name) or "",
                step=step,
                groups=frozenset(groups),
                is_shared_out=len(lenders) > 1,
            )
            found.append(lot)
        return found


def from_committed(
    step: Committed, use: Callable[[Sequence[Part]], T], *, verify: bool, readers: Readers = _ANYBODY
) -> T:
    """The result of `use` for the archives of a committed step, compared with its manifest. Raises NotCommittedError.

    A step that is deleted or replaced meanwhile fails in many ways: its manifest tells.
    """
    check_from_ranks(readers.from_ranks)
    made = step.read()
    for _ in range(TRIES):
        try:
            with contextlib.ExitStack() as stack:
                archives = [StepArchives(named, readers, stack, verify=verify) for named in step.named(made)]
                parts = [one.part()._replace(made=made) for one in archives]
                _check_names(parts, readers)
                return use(parts)
        except (CorruptCheckpointError, StorageUnavailableError) as error:
            before, made = made, _read_again(step, made, error)
            if made == before:
                raise
    where = step.storage.locate(step.folder)
    raise StorageUnavailableError(
        f"{where} was replaced {TRIES} times while it was read; load it again", path=where
    )


def _check_names(parts: Sequence[Part], readers: Readers) -> None:
    """Whoever says whose value he wants must be right about the name. Raises KeyError."""
    merged = [part.archive for part in parts if isinstance(part.archive, MergedArchives)]
    unknown = {*(readers.from_ranks or ())}.difference(*(one.chosen for one in merged))
    if merged and unknown:
        apart = sorted({shown(path) for one in merged for path in one.apart})
        raise KeyError(
            f"of from_ranks={readers.from_ranks!r}, {min(unknown)!r} names nothing in {merged[0].path}; ranks have their own "
            f"values of: {', '.join(apart) or 'nothing'}"
        )
    for name in unknown:  # one rank has saved all of it
        selected = Selector([name])
        for part in parts:
            part.archive.match(selected, part.groups)
        if selected.unused:
            raise KeyError(
                f"of from_ranks={readers.from_ranks!r}, {name!r} names nothing in {parts[0].archive.path}; it holds "
                f"{parts[0].archive.names()}"
            )


def _read_again(step: Committed, made: Manifest, error: CheckpointError) -> Manifest:
    """The manifest as it is after an error. Raises NotCommittedError when it is gone: that explains the error."""
    try:
        return step.read()
    except NotCommittedError as gone:
        raise NotCommittedError(
            f"{gone}; it was deleted while it was read ({error})",
            path=gone.path,
            step=gone.step,
            partly_overwritten=getattr(error, "partly_overwritten", False),
        ) from error
    except CheckpointError:
        return made  # the first error says more


def _what_is_there(storage: Storage) -> str:
    """Instead of a checkpoint."""
    names = storage.names("")
    kind = foreign_kind(names)
    if kind is not None:
        return f"no committed checkpoint there, but {kind}"
    if names:
        shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
        return f"no committed checkpoint there, but {shown}"
    is_folder = not storage.remote and storage.exists("")
    return "the folder is empty" if is_folder else "there is nothing at this path"


def _newest_folder(storage: Storage) -> str | None:
    """The folder of a run's newest committed step; of several namings, of that which was committed last."""
    newest = next(committed_folders(storage), None)
    if newest is None:
        return None
    folder = newest[1]
    other = newest_of_other_namings(storage, lambda name: _naming_of(name) == _naming_of(folder))
    made = None if other is None else _made(storage, folder)
    return other.folder if other and made and other.manifest.created > made.created else folder


def _naming_of(folder: str) -> str | None:
    told = parse_step_name(folder)
    return told and told.rest


def committed_folders(storage: Storage) -> Iterator[tuple[int, str]]:
    """The folders of a run's committed steps, the newest first, with the last number in their names, which is the step.

    A folder that is not committed may belong to a save under way, or to a step that was deleted for a newer one since
    it was listed: listed again, an older step comes first only if nothing has changed.
    """
    before: list[str] | None = None
    for _ in range(TRIES):
        names = storage.names("")
        folders = [(told.step, name) for name in names if (told := parse_step_name(name))]
        is_committed = _judge(storage, names, folders)
        ranked = ((step, name) for step, name in sorted(folders, reverse=True) if is_committed(step, name))
        newest = next(ranked, None)
        if names == before or (folders and newest == max(folders)):
            return itertools.chain(() if newest is None else (newest,), ranked)
        before = names
    raise overtaken_error(storage.locate(""))


def _judge(
    storage: Storage, names: Sequence[str], folders: Sequence[tuple[int, str]]
) -> Callable[[int, str], bool]:
    """A test whether a folder of a step is committed: no rollback has taken it out, and no later start goes on below it."""

    def manifests(step: int) -> Iterator[Manifest]:
        found = (_made(storage, name) for number, name in folders if number == step)
        return (manifest for manifest in found if manifest is not None)

    retired = retired_attempts(filter(None, map(parse_intent, names)), manifests)
    starts = split_starts(sorted(names))[1]
    steps = sorted({step for step, _ in folders})

    @functools.cache
    def committed(step: int) -> Commit | None:
        counting = (made for made in manifests(step) if made.attempt != retired.get(step))
        return next((Commit(made.attempt, made.start) for made in counting), None)

    def is_committed(step: int, folder: str) -> bool:
        if not storage.exists(f"{folder}/{MANIFEST}"):
            return False
        if step in retired:
            made = _made(storage, folder)
            if made is None or made.attempt == retired[step]:
                return False
        return counts(step, steps, starts, committed)

    return is_committed


def _made(storage: Storage, folder: str) -> Manifest | None:
    """The manifest in a folder; None when there is none that can be read."""
    if not storage.exists(f"{folder}/{MANIFEST}"):  # it may be a file
        return None
    try:
        return Committed.at(storage, folder, lambda: storage).read()
    except (NotCommittedError, CorruptCheckpointError, FormatVersionError):
        return None


def opened_as_file(path: Anywhere) -> tuple[Reader, str] | None:
    """The object at a path, if it is one and no folder."""
    try:
        storage, name = place_of(path).object()
    except ValueError:  # the root of a bucket
        return None
    try:
        return storage.open(name), storage.locate(name)
    except (FileNotFoundError, IsADirectoryError):
        return None
