"""Every error of the library: one root, and leaves by what the caller can do about them.

In: facts about what went wrong. Out: an exception whose message says what happened, where, and what to do.
Knows nothing of: anything else. Facts are attributes too, so no caller has to read the text.
"""

from __future__ import annotations

from typing import Any


class CheckpointError(Exception):
    """The base class of all errors of this library. Wrong arguments raise built-in exceptions instead."""

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.__dict__.update(facts)


class UnsupportedStateError(CheckpointError, TypeError):
    """The state holds something that cannot be stored; nothing was written. `path` names it."""

    path: str


class TornSnapshotError(CheckpointError):
    """A guarded tensor changed while it was being copied; the save was dropped. `names` lists them."""

    names: tuple[str, ...]


class NotUnchangedError(CheckpointError):
    """A group that was said to be `unchanged` has changed since it was saved; nothing was written. `names` has it."""

    names: tuple[str, ...]


class StorageUnavailableError(CheckpointError):
    """A place cannot be written to or read from. `path` says which one; `__cause__` is the original error."""

    path: str


class StorageFullError(StorageUnavailableError):
    """There is not enough space for the checkpoint. Where possible, this is found before anything is written."""

    needed_bytes: int
    free_bytes: int | None


class CorruptCheckpointError(CheckpointError):
    """The bytes are not what was saved. `partly_overwritten` says whether live state was already touched.

    `tensors` names those that lie in damaged blocks, as far as that is known. When a whole run was verified,
    `damaged_steps` and `sound_steps` list its steps.
    """

    path: str
    partly_overwritten: bool = False
    tensors: tuple[str, ...] = ()
    damaged_steps: tuple[int, ...] = ()
    sound_steps: tuple[int, ...] = ()


class ForeignFileError(CheckpointError):
    """The file is another program's, and presumably sound: the message says what reads it.

    `kind` names its format in short: "torch", "gguf", "tar", "text".
    """

    path: str
    kind: str


class FormatVersionError(CheckpointError):
    """The archive was written by a newer version of the library than this one."""

    path: str
    version: int


class UntrustedObjectError(CheckpointError):
    """The archive holds a pickle that is not plain data; it is opened only with `trust=True`."""

    path: str


class NotCommittedError(CheckpointError, FileNotFoundError):
    """There is no such committed checkpoint, or one that a save borrows from is gone."""

    path: str
    step: int | None


class NoGoodStepError(CheckpointError):
    """The marks of a run's steps leave none to restore: all are marked bad, or none is good where that was asked for.

    `steps` lists the steps that were passed over.
    """

    path: str
    steps: tuple[int, ...]


class NotAFolderError(CheckpointError, NotADirectoryError):
    """A path that was given for a folder is that of something else."""


class IsAFolderError(CheckpointError, IsADirectoryError):
    """A path that was given for a file is that of a folder."""


class NotFoundError(CheckpointError, FileNotFoundError):
    """There is no file or folder at a path that was given."""


class OccupiedError(CheckpointError, FileExistsError):
    """There is something already where a file or a folder is to be written, and it is not replaced."""


class UsageError(CheckpointError, RuntimeError):
    """A call came at a moment, or from a place, where it cannot be made."""


class UnsafeArchiveError(CheckpointError):
    """Extracting the archive could do harm: names or links that lead outside, devices, or too much data."""

    path: str
    member: str


class NothingWrittenError(CheckpointError):
    """The code that should have written a checkpoint wrote nothing; what was there before is still there."""


class DestinationBusyError(CheckpointError):
    """An earlier save to the same destination is still under way; wait for its handle, or give another name."""

    path: str


class StateMismatchError(CheckpointError):
    """The live state and the checkpoint differ in names, shapes or dtypes; nothing was overwritten."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()


class StepExistsError(CheckpointError):
    """The step is committed already (or another writer committed it first)."""

    step: int


class StepBehindError(CheckpointError):
    """The step is below the newest committed one; the steps of a run must increase."""

    step: int
    newest: int


class RunTakenError(CheckpointError):
    """Another process has the run: it has begun to save there since, or it is alive and began before.

    `host`, `pid` and `since` (seconds since the epoch, by its clock) tell which; the steps that it commits count. With
    `undecided`, the manifest of the save was put before that was known, so the step may be committed all the same.
    """

    path: str
    host: str
    pid: int
    since: float
    undecided: bool = False


class ConflictError(CheckpointError):
    """A place of the run has a commit of a start that this run does not descend from: nothing is written there.

    It happens if two machines go on from the same step, each at a place of its own, and then reach a common one.
    """

    path: str
    step: int


class PeerFailedError(CheckpointError):
    """Another rank could not do its part of the checkpoint, or did not say in time that it has.

    With `undecided`, the checkpoint may be committed all the same: look at what is committed.
    """

    rank: int
    undecided: bool = False


class SaveAbandonedError(CheckpointError):
    """The save was given up before it was committed: an interrupt, or the exit timeout."""


class ClosedError(CheckpointError, RuntimeError):
    """The checkpointer was closed, or belongs to another process."""
