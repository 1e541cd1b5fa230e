"""A verification, told once: every byte of an archive, a step or a run is read and compared with its digest.

In: a path. Out: a report of what is sound, or one error that names what is not. Knows nothing of: tensors, states.

Bytes are read as a load reads them, into the same ring of buffers, and go nowhere from there: the memory that it takes
does not grow with the archive. Nothing is decoded or unpickled. An archive that several steps share is read once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from ..errors import (
    CheckpointError,
    CorruptCheckpointError,
    FormatVersionError,
    NotCommittedError,
    StorageUnavailableError,
)
from ..host.memory import Segment
from ..report import VerifyReport
from ..runs.naming import TRACKERS, parse_step_name
from ..runs.root import TRIES, overtaken_error
from ..spans import Clock, monotonic
from ..spec import Extent
from ..storage.compressed import open_decompressed
from ..storage.interface import Storage
from ..storage.place import Anywhere, storage_at
from .archives.archive import OpenArchive
from .archives.contents import Contents, Part
from .archives.find import (
    Committed,
    committed_folders,
    from_committed,
    nothing_committed,
    opened_as_file,
    step_at,
)
from .archives.foreign import opened
from .archives.step_archives import Readers
from .fill import READ_BYTES, Read, run_reads
from .load import check_lent

_READS_ALL: Final = Readers(reads_all=True)


def verify_path(path: Anywhere, *, clock: Clock = monotonic) -> VerifyReport:
    """Verify what is at a path: an archive, the folder of a step, or every committed step of a run.

    Raises CorruptCheckpointError; of a run, after all of it was read.
    """
    begin = clock()
    reading = _Reading()
    steps: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    file = opened_as_file(path)
    if file is not None:
        reader, shown = file
        with reader:
            reading.compare([Part(opened(open_decompressed(reader, shown), path=shown, verify=True))])
    else:
        storage = storage_at(path)
        shown = storage.locate("")
        step = step_at(storage, path)
        if step is not None:
            steps = (step.read().step,)
            from_committed(step, reading.compare, verify=True, readers=_READS_ALL)
        else:
            steps, notes = _verify_run(storage, reading)
    return VerifyReport(shown, len(reading.found), reading.num_bytes, clock() - begin, steps, notes)


class _Reading:
    """The archives read so far. An archive that is shared is known by its name and its own digest."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], CorruptCheckpointError | None] = {}
        self.num_bytes = 0

    def compare(self, parts: Sequence[Part]) -> None:
        """Read the archives of a step that were not read yet. Raises CorruptCheckpointError when any of them is damaged."""
        check_lent(parts, None)
        files = (_with_digests(file) for part in parts for file in part.archive.files)
        archives = {(archive.path, archive.digest): archive for archive in files}
        fresh = [key for key in archives if key not in self.found]
        at_path = {path: archives[path, digest] for path, digest in fresh}
        blocks: dict[str, list[int]] = {path: [] for path in at_path}

        def compare(read: Read, segment: Segment) -> None:
            path, data = read.archive.path, segment.view[: read.extent.length]
            blocks[path].extend(at_path[path].damaged(read.extent.offset, data))

        run_reads([read for archive in at_path.values() for read in _reads(archive)], compare)
        for path, digest in fresh:
            archive, damaged = at_path[path], sorted(blocks[path])
            self.found[path, digest] = archive.damage(damaged) if damaged else None
            self.num_bytes += archive.index.file_bytes
        errors = [error for key in archives if (error := self.found[key]) is not None]
        if errors:
            raise _with_notes(errors[0], errors[1:])


def _with_digests(file: Contents) -> OpenArchive:
    if not isinstance(file, OpenArchive):
        raise ValueError(
            f"{file.path} is a safetensors file, which has no digests to compare its bytes with; only what "
            "async_ckpt has saved can be verified"
        )
    return file


def _reads(archive: OpenArchive) -> list[Read]:
    """All that the digests cover and that was not read when the archive was opened."""
    covered = archive.index.digests.data.offset
    begins = range(archive.num_begun, covered, READ_BYTES)
    return [Read(archive, Extent(begin, min(READ_BYTES, covered - begin)), []) for begin in begins]


def _verify_run(storage: Storage, reading: _Reading) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The steps of a run, all of them sound, and notes on its trackers."""
    where = storage.locate("")
    for _ in range(TRIES):
        trackers = _trackers(storage)
        folders = sorted(committed_folders(storage))
        if not folders:
            raise nothing_committed(storage)
        sound: list[int] = []
        errors: list[tuple[int, CheckpointError]] = []
        for step, folder in folders:
            try:
                there = Committed.at(storage, folder, lambda: storage)
                from_committed(there, reading.compare, verify=True, readers=_READS_ALL)
            except NotCommittedError:
                continue  # retention was faster
            except (CorruptCheckpointError, FormatVersionError) as error:
                errors.append((step, error))
            else:
                sound.append(step)
        if errors:
            raise _error(where, sound, errors)
        if sound:
            return tuple(sound), _notes(trackers, sound)
    raise overtaken_error(where)


def _error(
    where: str, sound: Sequence[int], errors: Sequence[tuple[int, CheckpointError]]
) -> CheckpointError:
    """One error for all steps of a run that are damaged; one that is only too new counts when none is."""
    damaged = [step for step, error in errors if isinstance(error, CorruptCheckpointError)]
    if not damaged:
        return errors[0][1]
    first = next(error for _, error in errors if isinstance(error, CorruptCheckpointError))
    made = CorruptCheckpointError(
        f"{where}: damaged: {_steps(damaged)}; sound: {_steps(sound)}. {first}",
        path=where,
        damaged_steps=tuple(damaged),
        sound_steps=tuple(sound),
    )
    made.__cause__ = first
    return _with_notes(made, [error for _, error in errors if error is not first])


def _steps(steps: Sequence[int]) -> str:
    return ", ".join(f"step {step}" for step in steps) or "none"


def _with_notes(error: CorruptCheckpointError, others: Sequence[CheckpointError]) -> CorruptCheckpointError:
    for other in others:
        error.add_note(str(other))
    return error


def _trackers(storage: Storage) -> dict[str, str]:
    """The content of the trackers that are there, by their names."""
    found = {}
    for name in TRACKERS:
        with suppress(FileNotFoundError, StorageUnavailableError):  # nobody depends on them
            found[name] = storage.read(name)[0][:100].decode(errors="replace").strip()
    return found


def _notes(trackers: Mapping[str, str], steps: Sequence[int]) -> tuple[str, ...]:
    """Where a tracker does not name the newest step; it may be another program's word."""
    notes = []
    for name, text in trackers.items():
        told = parse_step_name(text)
        if told is None:
            notes.append(f"the tracker {name} names no step: {text!r}")
        elif told.step not in steps:
            notes.append(f"the tracker {name} names step {told.step}, which is not committed here")
        elif told.step != steps[-1]:
            notes.append(f"the tracker {name} names step {told.step}, not the newest, {steps[-1]}")
    return tuple(notes)
