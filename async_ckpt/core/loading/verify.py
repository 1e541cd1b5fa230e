"""Verification: reads every byte of an archive, a step or a run, and compares it with its digest.

In: a path. Out: a report, or one error that lists all damage. Knows nothing of: tensors, states.

Bytes are read as in a load, into the same ring of buffers, and dropped, so memory does not grow with the archive.
Nothing is decoded or unpickled. An archive that several steps share is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from ...errors import (
    CheckpointError,
    CorruptCheckpointError,
    ForeignFileError,
    FormatVersionError,
    NotCommittedError,
    StorageUnavailableError,
)
from ..host.memory import Segment
from ..report import VerifyReport
from ..runs.foreign_entries import OF_DCP
from ..runs.naming import TRACKERS, parse_step_name
from ..runs.root import TRIES, overtaken_error
from ..spec import Extent
from ..state.names import shown
from ..storage.interface import Reader, Storage
from ..storage.place import Anywhere, storage_at
from ..timing import Clock, monotonic
from .archives.archive import OpenArchive
from .archives.contents import Contents, Part
from .archives.find import (
    CommittedStep,
    committed_folders,
    from_committed,
    nothing_committed,
    of_others,
    open_contents,
    opened_as_file,
    step_at,
)
from .archives.step_archives import Readers
from .fill import READ_BYTES, Read, run_reads
from .load import check_lent

_READS_ALL: Final = Readers(reads_all=True)
_MAX_READERS: Final = 8


def verify_path(path: Anywhere, *, clock: Clock = monotonic) -> VerifyReport:
    """Verify an archive, the folder of a step or of torch.distributed.checkpoint, or all committed steps of a run.

    Raises CorruptCheckpointError; for a run, after all steps have been read.
    """
    begin = clock()
    verification = Verification()
    steps: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    file = opened_as_file(path)
    if file is not None:
        reader, shown = file
        with reader:
            notes = verification.compare_file(reader, shown)
    else:
        storage = storage_at(path)
        shown = storage.locate("")
        step = step_at(storage, path)
        if step is not None:
            steps = (step.read().step,)
            verification.compare_step(step)
        elif storage.exists(OF_DCP):
            notes = verification.compare_dcp(storage)
        else:
            steps, notes = _verify_run(storage, verification)
    return VerifyReport(shown, len(verification.errors), verification.num_bytes, clock() - begin, steps, notes)


class StepCheck(NamedTuple):
    """The result for a verified step of a run: its folder in the run, and its error, None if it is sound."""

    step: int
    folder: str
    error: CheckpointError | None


class Verification:
    """The archives that a verification has read. One instance is shared by all steps of a verification.

    An archive is identified by its path and digest, so an archive that several steps share is read once. `on_bytes` is
    called on any thread with the number of bytes that were compared.
    """

    def __init__(self, on_bytes: Callable[[int], None] = lambda _: None) -> None:
        self.errors: dict[tuple[str, str], CorruptCheckpointError | None] = {}
        self.num_bytes = 0
        self._on_bytes = on_bytes

    def compare_file(self, reader: Reader, path: str) -> tuple[str, ...]:
        """Read a file outside of a run. Returns notes on what was compared if it is not an archive of this library.

        Raises CorruptCheckpointError, and ForeignFileError if the file has no checksums to compare its bytes with.
        """
        try:
            contents = open_contents(reader, path=path, verify=True)
            if isinstance(contents, OpenArchive):
                self._compare([Part(contents)])
                return ()
            note = "a safetensors file has no digests: its header was compared with its size, but not its tensors"
        except ForeignFileError:
            note = of_others().compare_foreign(reader, path, self._on_bytes)
        self.errors[path, ""], self.num_bytes = None, self.num_bytes + reader.num_bytes
        return (note,)

    def compare_step(self, step: CommittedStep) -> None:
        """Read the archives of a step, and the archives that lend to it, unless they were read before.

        Raises CorruptCheckpointError, which names the damaged tensors of all archives; NotCommittedError if the step
        was deleted; FormatVersionError.
        """
        from_committed(step, self._compare, verify=True, readers=_READS_ALL)

    def compare_dcp(self, storage: Storage) -> tuple[str, ...]:
        """Read the files of a checkpoint of torch.distributed.checkpoint. Returns notes on what was compared.

        Raises CorruptCheckpointError, which names the damaged tensors and values, and ValueError if no file has a
        checksum.
        """
        paths, num_bytes, notes = of_others().compare_dcp(storage, self._on_bytes)
        self.errors |= {(path, ""): None for path in paths}
        self.num_bytes += num_bytes
        return tuple(notes)

    def _compare(self, parts: Sequence[Part]) -> None:
        check_lent(parts, None)
        files = (_require_digests(file) for part in parts for file in part.archive.files)
        archives = {(archive.path, archive.digest): archive for archive in files}
        fresh = [key for key in archives if key not in self.errors]
        at_path = {path: archives[path, digest] for path, digest in fresh}
        blocks: dict[str, list[int]] = {path: [] for path in at_path}

        def compare(read: Read, segment: Segment) -> None:
            path, data = read.archive.path, segment.view[: read.extent.length]
            blocks[path].extend(at_path[path].damaged_blocks(read.extent.offset, data))
            self._on_bytes(read.extent.length)

        reads = [read for archive in at_path.values() for read in _reads(archive)]
        run_reads(reads, compare, max_threads=_MAX_READERS)
        for path, digest in fresh:
            archive, damaged = at_path[path], sorted(blocks[path])
            self.errors[path, digest] = archive.damage_error(damaged) if damaged else None
            self.num_bytes += archive.index.file_bytes
        if any(self.errors[key] is not None for key in archives):
            raise self._error_of(parts)

    def _error_of(self, parts: Sequence[Part]) -> CorruptCheckpointError:
        """The first error of these archives, with all damaged tensors of the step and the other errors as notes."""
        errors: dict[str, CorruptCheckpointError] = {}
        tensors: dict[str, None] = {}
        for part in parts:
            for file in map(_require_digests, part.archive.files):
                error = self.errors[file.path, file.digest]
                if error is not None:
                    errors[file.path] = error
                    mine = {
                        shown(t.path) for t in file.index.tensors if part.groups is None or t.path[0] in part.groups
                    }
                    tensors |= dict.fromkeys(name for name in error.tensors if name in mine)
        first, *others = errors.values()
        return _with_notes(CorruptCheckpointError(str(first), path=first.path, tensors=tuple(tensors)), others)


def _require_digests(file: Contents) -> OpenArchive:
    if not isinstance(file, OpenArchive):
        raise ValueError(
            f"{file.path} is a safetensors file, which has no digests to compare its bytes with; only what "
            "async_ckpt has saved can be verified"
        )
    return file


def _reads(archive: OpenArchive) -> list[Read]:
    """The reads of all bytes that the digests cover, except the bytes that were read when the archive was opened."""
    covered = archive.index.digests.data.offset
    begins = range(archive.num_begun, covered, READ_BYTES)
    return [Read(archive, Extent(begin, min(READ_BYTES, covered - begin)), []) for begin in begins]


def checks_of_run(storage: Storage, verification: Verification) -> Iterator[StepCheck]:
    """Verify the committed steps of a run in ascending order. Steps that retention deletes meanwhile are left out.

    Raises NotCommittedError if nothing is committed, and StorageUnavailableError.
    """
    folders = committed_folders(storage)
    if not folders:
        raise nothing_committed(storage)
    for step, folder in folders:
        try:
            verification.compare_step(CommittedStep.at(storage, folder, lambda: storage))
        except NotCommittedError:
            continue  # retention has deleted the step meanwhile
        except (CorruptCheckpointError, FormatVersionError) as error:
            yield StepCheck(step, folder, error)
        else:
            yield StepCheck(step, folder, None)


def _verify_run(storage: Storage, verification: Verification) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The sound steps of a run and notes on its trackers. Raises an error if a step is not sound."""
    root = storage.locate("")
    for _ in range(TRIES):
        trackers = trackers_in(storage)
        checks = list(checks_of_run(storage, verification))
        sound = [check.step for check in checks if check.error is None]
        errors = [(check.step, check.error) for check in checks if check.error is not None]
        if errors:
            raise _run_error(root, sound, errors)
        if sound:
            return tuple(sound), notes_on(trackers, sound)
    raise overtaken_error(root)


def _run_error(root: str, sound: Sequence[int], errors: Sequence[tuple[int, CheckpointError]]) -> CheckpointError:
    """One error for all damaged steps of a run. If no step is damaged, the error of a step in a newer format."""
    damaged = [step for step, error in errors if isinstance(error, CorruptCheckpointError)]
    if not damaged:
        return errors[0][1]
    first = next(error for _, error in errors if isinstance(error, CorruptCheckpointError))
    combined = CorruptCheckpointError(
        f"{root}: damaged: {_steps(damaged)}; sound: {_steps(sound)}. {first}",
        path=root,
        damaged_steps=tuple(damaged),
        sound_steps=tuple(sound),
    )
    combined.__cause__ = first
    return _with_notes(combined, [error for _, error in errors if error is not first])


def _steps(steps: Sequence[int]) -> str:
    return ", ".join(f"step {step}" for step in steps) or "none"


def _with_notes(error: CorruptCheckpointError, others: Iterable[CheckpointError]) -> CorruptCheckpointError:
    for other in others:
        error.add_note(str(other))
    return error


def trackers_in(storage: Storage) -> dict[str, str]:
    """The content of the existing trackers, by their names."""
    texts = {}
    for name in TRACKERS:
        with suppress(FileNotFoundError, StorageUnavailableError):  # no reader depends on trackers
            texts[name] = storage.read(name)[0][:100].decode(errors="replace").strip()
    return texts


def notes_on(trackers: Mapping[str, str], steps: Sequence[int]) -> tuple[str, ...]:
    """Notes on trackers that do not name the newest step; another program may have written them."""
    notes = []
    for name, text in trackers.items():
        tracked = parse_step_name(text)
        if tracked is None:
            notes.append(f"the tracker {name} names no step: {text!r}")
        elif tracked.step not in steps:
            notes.append(f"the tracker {name} names step {tracked.step}, which is not committed here")
        elif tracked.step != steps[-1]:
            notes.append(f"the tracker {name} names step {tracked.step}, not the newest, {steps[-1]}")
    return tuple(notes)
