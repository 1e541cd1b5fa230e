"""Finds the archives of a path: a single file, the folder of a step, or a run, whose newest step is used.

In: paths and runs. Out: opened archives, passed to a function. Knows nothing of: what the function does with them.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any, Final, NamedTuple, Self, TypeVar

from ....errors import (
    CheckpointError,
    CorruptCheckpointError,
    NotCommittedError,
    StorageUnavailableError,
)
from ...format import index
from ...runs.foreign_entries import foreign_kind, formats_of, possible_steps
from ...runs.manifest import NAME as MANIFEST
from ...runs.manifest import Archive, Manifest, parse
from ...runs.marks import no_good_step
from ...runs.root import TRIES, Root, formats_at, overtaken_error
from ...runs.roots import Roots
from ...runs.run import Run
from ...spec import some_of
from ...state.names import Selector, shown
from ...storage.compressed import open_decompressed
from ...storage.interface import Reader, Storage
from ...storage.place import Anywhere, place_of, storage_at
from ...timing import wall_time
from .archive import OpenArchive, first_bytes
from .contents import Contents, Part
from .copies import Holders
from .merged_archives import MergedArchives, part_of
from .step_archives import Readers, StepArchives, check_from_ranks

T = TypeVar("T")

_ANY_READER: Final = Readers()
_BEGIN: Final = f"{index.MEMBER}\0".encode()  # the first bytes of every archive of this library
# The most folders that are searched for an error message.
_MOST_BELOW: Final = 32


def from_newest(
    roots: Roots,
    use: Callable[[Sequence[Part]], T],
    *,
    verify: bool,
    readers: Readers = _ANY_READER,
    only_good: bool = False,
    falls_back: bool = False,
    on_skip: Callable[[int, str], None] | None = None,
    stacklevel: int = 5,
) -> tuple[int, T] | None:
    """The newest committed step that is not marked bad, and the result of `use` for its archives.

    Returns None if nothing is committed. With `only_good`, only steps that are marked good are tried; with
    `falls_back`, a corrupt step is skipped. If a step is deleted while it is read, the newest step of that moment is
    read instead. `on_skip` receives each skipped step and the reason; by default it warns, with `stacklevel`. Raises
    CorruptCheckpointError, NoGoodStepError, NotCommittedError and StorageUnavailableError.
    """
    passed, num_gone = PassedOver(on_skip or partial(_warn_of_bad, stacklevel)), 0
    while (step := passed.next(partial(roots.newest_sound, only_good=only_good))) is not None:
        try:
            return step, from_step(roots, step, use, verify=verify, readers=readers)
        except CorruptCheckpointError as error:
            if not falls_back:
                raise
            passed.note(step, error)
        except NotCommittedError as error:
            num_gone += 1
            if num_gone == TRIES:
                raise overtaken_error(", ".join(roots.names)) from error
    passed.raise_any(roots)
    return None


class PassedOver:
    """The steps that one reader has skipped because they are marked or corrupt, with the reasons as text."""

    def __init__(self, on_skip: Callable[[int, str], None]) -> None:
        """`on_skip` is called with each skipped step and the reason, if there is another step to read."""
        self.reasons: dict[int, str] = {}
        self.corrupt: list[CorruptCheckpointError] = []
        self._on_skip = on_skip

    def next(self, find: Callable[[dict[int, str]], int | None]) -> int | None:
        """The step that `find` returns. `find` adds the steps that it skips to the reasons."""
        before = {*self.reasons}
        step = find(self.reasons)
        for one in sorted(self.reasons.keys() - before, reverse=True) if step is not None else ():
            self._on_skip(one, self.reasons[one])
        return step

    def note(self, step: int, error: CorruptCheckpointError) -> None:
        """Record that a step is corrupt."""
        self.corrupt.append(error)
        self.reasons[step] = str(error)
        self._on_skip(step, str(error))

    def raise_any(self, roots: Roots) -> None:
        """When no step is left, raise the error of a corrupt step, or NoGoodStepError if steps were skipped."""
        if self.corrupt:
            raise max(self.corrupt, key=lambda error: error.partly_overwritten)
        if self.reasons:
            raise no_good_step(", ".join(roots.names), self.reasons)


def _warn_of_bad(stacklevel: int, step: int, reason: str) -> None:
    warnings.warn(f"step {step} is passed over: {reason}", RuntimeWarning, stacklevel=stacklevel)


def from_step(
    roots: Roots,
    step: int,
    use: Callable[[Sequence[Part]], T],
    *,
    verify: bool,
    readers: Readers = _ANY_READER,
) -> T:
    """The result of `use` for the archives of a committed step, each block from the first root where it is sound.

    Raises NotCommittedError, also if the step is deleted meanwhile, CorruptCheckpointError, StorageUnavailableError.
    """
    runs = roots.holding(step)
    if len(runs) == 1:
        return from_committed(CommittedStep.of(runs[0], step), use, verify=verify, readers=readers)
    holders = Holders([run.storage for run in runs])
    for run in runs:
        candidate = CommittedStep.of(run, step, holders)
        try:
            result = from_committed(candidate, use, verify=verify, readers=readers)
            break
        except (NotCommittedError, CorruptCheckpointError, StorageUnavailableError) as error:
            if run is runs[-1]:
                raise
            holders.note(candidate.storage.locate(candidate.folder), error)
    if holders.troubles:
        first, *others = holders.troubles.values()
        more = f", and {len(others)} more" if others else ""
        warnings.warn(
            f"step {step} is read from another place, since a copy is damaged or missing: {first}{more}",
            RuntimeWarning,
            stacklevel=4,
        )
    return result


def from_path(path: Anywhere, use: Callable[[Sequence[Part]], T], *, verify: bool, readers: Readers = _ANY_READER) -> T:
    """The result of `use` for a path: an archive, a safetensors file, a step, a run's newest step or a foreign folder.

    Raises TypeError for invalid `readers`.
    """
    check_from_ranks(readers.from_ranks)
    file = opened_as_file(path)
    if file is not None:
        reader, shown = file
        with reader:
            parts: Sequence[Part] = [Part(open_contents(reader, path=shown, verify=verify))]
            _check_names(parts, readers)
            return use(parts)
    storage = storage_at(path)
    step = step_at(storage, path)
    if step is not None:
        return from_committed(step, use, verify=verify, readers=readers)
    roots = _run_at(storage)
    found = None if roots is None else from_newest(roots, use, verify=verify, readers=readers, stacklevel=6)
    if found is not None:
        return found[1]
    with contextlib.ExitStack() as stack:
        folder_parts: list[Part] | None = of_others().parts_of_folder(storage, verify=verify, stack=stack)
        if folder_parts is not None:
            _check_names(folder_parts, readers)
            return use(folder_parts)
    raise nothing_committed(storage)


def step_at(storage: Storage, path: Anywhere) -> CommittedStep | None:
    """The committed step whose folder is this storage; None if it is not the folder of a step."""
    if not storage.exists(MANIFEST):
        return None
    # Resolved only when a group is borrowed, since a bucket has no parent folder.
    root = cache(lambda: place_of(path).object()[0])
    return CommittedStep.at(storage, "", root)


def committed_step(run: Anywhere, step: int | None) -> CommittedStep:
    """A committed step of a run; the newest step if `step` is None. `run` may also be the folder of the step itself.

    Raises NotCommittedError, and TypeError for a step that is not a number.
    """
    if step is not None and (isinstance(step, bool) or not hasattr(step, "__index__")):
        raise TypeError(f"step must be the number of a step, got {step!r:.100}")
    storage = storage_at(run)
    own_step = step_at(storage, run)
    if own_step is not None:
        own = own_step.read().step
        if step is not None and step != own:
            path = storage.locate("")
            raise NotCommittedError(
                f"{path} is the folder of step {own}, not of {step}; give the root of the run", path=path, step=step
            )
        return own_step
    folders = dict(committed_folders(storage))
    if not folders:
        raise nothing_committed(storage)
    number = max(folders) if step is None else step
    if number not in folders:
        path, others = storage.locate(""), ", ".join(map(str, sorted(folders)))
        raise NotCommittedError(f"{path}: step {number} is not committed there; {others} are", path=path, step=number)
    return CommittedStep.at(storage, folders[number], lambda: storage)


def nothing_committed(storage: Storage) -> NotCommittedError:
    """The error for a path without a checkpoint."""
    path = storage.locate("")
    return NotCommittedError(f"{path}: {_describe_content(storage)}", path=path, step=None)


class CommittedStep(NamedTuple):
    """The location of a committed step: its folder in a storage, and functions for its manifest and its run's root."""

    storage: Storage
    folder: str  # empty if the storage is the folder
    read: Callable[[], Manifest]  # raises NotCommittedError
    root: Callable[[], Storage]  # the storage of the run, with the folders of the steps that lend groups
    holders: Holders | None = None  # all places that hold the step, if there are several

    @classmethod
    def of(cls, run: Run, step: int, holders: Holders | None = None) -> Self:
        return cls(run.storage, run.folder(step), lambda: run.manifest(step), lambda: run.storage, holders)

    @classmethod
    def at(cls, storage: Storage, folder: str, root: Callable[[], Storage]) -> Self:
        path = f"{folder}/{MANIFEST}" if folder else MANIFEST

        def read() -> Manifest:
            shown = storage.locate(path)
            try:
                return parse(storage.read(path)[0], path=shown)
            except FileNotFoundError as error:
                raise NotCommittedError(
                    f"{storage.locate(folder)} was deleted just now; load another step, or the newest step of its run",
                    path=shown,
                    step=None,
                ) from error

        return cls(storage, folder, read, root)

    def archives(
        self, manifest: Manifest, readers: Readers, stack: contextlib.ExitStack, *, verify: bool
    ) -> list[StepArchives]:
        """The step's own archives, and the archives of earlier steps that lend groups to it. `stack` closes them."""
        named = partial(
            StepArchives,
            manifest=manifest, readers=readers, stack=stack, verify=verify, holders=self.holders, root=self.root,
        )  # fmt: skip
        lent: dict[tuple[str, str], list[Archive]] = {}
        for one in manifest.elsewhere:
            if not one.in_part:
                lent.setdefault((one.group, one.folder), []).append(one.archive)
        groups_of: dict[tuple[str, tuple[Archive, ...]], set[str]] = {}
        for (group, folder), entries in lent.items():
            groups_of.setdefault((folder, tuple(entries)), set()).add(group)
        return [
            named(self.storage, self.folder, manifest.lenders),
            *(named(self.root(), *place, groups=frozenset(groups)) for place, groups in groups_of.items()),
        ]


def from_committed(
    step: CommittedStep, use: Callable[[Sequence[Part]], T], *, verify: bool, readers: Readers = _ANY_READER
) -> T:
    """The result of `use` for a committed step's archives, compared with its manifest. Raises NotCommittedError.

    A step that is deleted or replaced meanwhile may cause any error, so the manifest is read again after an error.
    """
    check_from_ranks(readers.from_ranks)
    manifest = step.read()
    for _ in range(TRIES):
        try:
            with contextlib.ExitStack() as stack:
                of_world = readers.of_world(manifest.world_size)
                steps = step.archives(manifest, of_world, stack, verify=verify)
                parts = [*map(part_of, steps)]
                _check_names(parts, readers)
                _warn_of_wrapped(parts, readers, of_world, manifest)
                result = use(parts)
                if readers.kept is not None:
                    readers.kept.enter_context(stack.pop_all())
                return result
        except (CorruptCheckpointError, StorageUnavailableError) as error:
            before, manifest = manifest, _read_again(step, manifest, error)
            if manifest == before:
                raise
    path = step.storage.locate(step.folder)
    raise StorageUnavailableError(f"{path} was replaced {TRIES} times while it was read; load it again", path=path)


def _check_names(parts: Sequence[Part], readers: Readers) -> None:
    """Raises KeyError if a name in `from_ranks` does not exist."""
    merged = [part.archive for part in parts if isinstance(part.archive, MergedArchives)]
    unknown = {*(readers.from_ranks or ())}.difference(*(archive.merged.chosen for archive in merged))
    if merged and unknown:
        apart = sorted({shown(path) for archive in merged for path in archive.merged.apart})
        raise KeyError(
            f"from_ranks={readers.from_ranks!r}, {min(unknown)!r} names nothing in {merged[0].path}; these values "
            f"differ by rank: {', '.join(apart) or 'nothing'}"
        )
    for name in unknown:  # names in the checkpoint of a single rank
        selected = Selector([name])
        for part in parts:
            part.archive.match(selected, part.groups)
        if selected.unused:
            raise KeyError(
                f"from_ranks={readers.from_ranks!r}, {name!r} names nothing in {parts[0].archive.path}; it holds "
                f"{parts[0].archive.names()}"
            )


def _warn_of_wrapped(parts: Sequence[Part], readers: Readers, of_world: Readers, manifest: Manifest) -> None:
    """Warn, on rank 0, of values that ranks take from other ranks, since the number of ranks has changed."""
    rank, num_readers = readers.ranks or (0, 1)
    merged = [part.archive for part in parts if isinstance(part.archive, MergedArchives)]
    wrapped = {*(of_world.from_ranks or ())} - {*(readers.from_ranks or ())}
    names = wrapped.intersection(name for archive in merged for name in archive.merged.chosen)
    if names and rank == 0:
        warnings.warn(
            f"step {manifest.step} was saved by {manifest.world_size} ranks, and is restored by {num_readers}: for "
            f"{', '.join(sorted(names))}, rank n takes the random state of rank n modulo {manifest.world_size}. Choose "
            "otherwise with from_ranks=",
            RuntimeWarning,
            stacklevel=4,
        )


def _read_again(step: CommittedStep, manifest: Manifest, error: CheckpointError) -> Manifest:
    """The manifest, read again after an error. Raises NotCommittedError if it was deleted, which explains the error."""
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
        return manifest  # the first error is more informative


def _describe_content(storage: Storage) -> str:
    """A description of a path without a checkpoint, for an error message."""
    names = storage.names("")
    if below := _checkpoints_below(storage, names):
        return f"no committed checkpoint there, but in folders in it; name one of them: {some_of(below, 3)}"
    if names:
        return f"no committed checkpoint there, but {foreign_kind(names) or some_of(names, 5)}"
    is_folder = not storage.remote and storage.exists("")
    return "the folder is empty" if is_folder else "there is nothing at this path"


def _checkpoints_below(storage: Storage, names: Sequence[str]) -> list[str]:
    """The paths of the folders with these names that are runs, or checkpoints of other programs."""
    found = []
    for name in [name for name in names if not name.startswith(".")][:_MOST_BELOW]:
        inside = storage.names(name)
        steps = (f"{name}/{folder}/{MANIFEST}" for _, folder in possible_steps(inside))
        if foreign_kind(inside) is not None or storage.existing([*steps][-_MOST_BELOW:]):
            found.append(storage.locate(name))
    return found


def _run_at(storage: Storage) -> Roots | None:
    """The run at a root, or None; if steps have several name formats, the run whose newest step was committed last."""

    def created(roots: Roots) -> float:
        step = roots.newest_sound({})
        manifest = None if step is None else roots.runs[0].committed(step)
        return 0.0 if manifest is None else manifest.created

    steps = sorted(possible_steps(storage.names("")), key=lambda one: one[0].step)
    formats = formats_of(steps)
    # Asking a store for all steps takes long. Usually there is one name format, and its newest step is committed.
    if len(formats) != 1 or not storage.exists(f"{steps[-1][1]}/{MANIFEST}"):
        formats = formats_at(storage)
    found = [Roots([Run(storage, clock=wall_time, step_format=one, tracker=None)]) for one in formats]
    return max(found, key=created) if len(found) > 1 else next(iter(found), None)


def committed_folders(storage: Storage) -> list[tuple[int, str]]:
    """The committed steps of a run, ascending, with their folders; steps of all name formats are included."""
    roots = [Root(storage, step_format) for step_format in formats_at(storage)]
    return sorted((step, root.folder(step)) for root in roots for step in root.steps())


def opened_as_file(path: Anywhere) -> tuple[Reader, str] | None:
    """The object at a path and its name for messages; None if it is a folder, or missing."""
    try:
        storage, name = place_of(path).object()
    except ValueError:  # the path is the root of a bucket
        return None
    try:
        return storage.open(name), storage.locate(name)
    except (FileNotFoundError, IsADirectoryError):
        return None


def open_contents(reader: Reader, *, path: str, verify: bool) -> Contents:
    """The archive or bare safetensors file that a reader reads, which may be compressed.

    Raises ForeignFileError for a file of another known kind, and CorruptCheckpointError for anything else.
    """
    reader = open_decompressed(reader, path)
    first_block = first_bytes(reader, path=path)
    contents: Contents | None = None
    if bytes(first_block[: len(_BEGIN)]) != _BEGIN:
        contents = of_others().opened(reader, path=path, first_block=first_block)
    return contents or OpenArchive(reader, path=path, verify=verify, first_block=first_block)


def of_others() -> Any:
    """The package that reads checkpoints of other programs, imported on first use."""
    return import_module("async_ckpt.face.foreign")
