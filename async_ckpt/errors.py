"""All errors of the library: one base class, and subclasses by what the caller can do about them.

In: facts about what went wrong. Out: an exception whose message says what happened, where, and what to do.
Knows nothing of: all other modules. Facts are also attributes, so that no caller has to parse the text.
"""

from __future__ import annotations

from typing import Any


class CheckpointError(Exception):
    """The base class of all errors of this library. Wrong arguments raise built-in exceptions instead."""

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.__dict__.update(facts)


class UnsupportedStateError(CheckpointError, TypeError):
    """The state contains a value that cannot be stored; nothing was written. `path` is its name in the state."""

    path: str


class TornSnapshotError(CheckpointError):
    """Guarded tensors changed while they were being copied; the save was dropped. `names` lists the tensors."""

    names: tuple[str, ...]


class NotUnchangedError(CheckpointError):
    """Groups passed as `unchanged=` have changed since they were saved; nothing was written. `names` lists them."""

    names: tuple[str, ...]


class StorageUnavailableError(CheckpointError):
    """A place cannot be written to or read from. `path` names it; `__cause__` is the original error."""

    path: str


class StorageFullError(StorageUnavailableError):
    """There is not enough space for the checkpoint. Where possible, this is detected before anything is written."""

    needed_bytes: int
    free_bytes: int | None


class CorruptCheckpointError(CheckpointError):
    """The bytes differ from those that were saved. `partly_overwritten` is True if live state was already overwritten.

    `tensors` names the tensors in damaged blocks, as far as they are known. If a whole run was verified,
    `damaged_steps` and `sound_steps` list its steps.
    """

    path: str
    partly_overwritten: bool = False
    tensors: tuple[str, ...] = ()
    damaged_steps: tuple[int, ...] = ()
    sound_steps: tuple[int, ...] = ()


class ForeignFileError(CheckpointError):
    """The file was written by another program, and is presumably intact: the message says which program reads it.

    `kind` is a short name of its format, such as "torch", "gguf", "tar" or "text".
    """

    path: str
    kind: str


class FormatVersionError(CheckpointError):
    """The archive was written by a newer version of the library than this one."""

    path: str
    version: int


class UntrustedObjectError(CheckpointError):
    """The archive contains a pickle that is not plain data; it is loaded only with `trust=True`."""

    path: str


class NotCommittedError(CheckpointError, FileNotFoundError):
    """The checkpoint does not exist or is not committed, or a step that a save borrows from is gone."""

    path: str
    step: int | None


class NoGoodStepError(CheckpointError):
    """Marks leave no step of the run to restore: all are marked bad, or none is good, if that is required.

    `steps` lists the steps that were passed over.
    """

    path: str
    steps: tuple[int, ...]


class NotAFolderError(CheckpointError, NotADirectoryError):
    """The given path must be a folder, but is not."""


class IsAFolderError(CheckpointError, IsADirectoryError):
    """The given path must be a file, but is a folder."""


class NotFoundError(CheckpointError, FileNotFoundError):
    """There is no file or folder at the given path."""


class OccupiedError(CheckpointError, FileExistsError):
    """The target of a write already exists; it is not replaced."""


class UsageError(CheckpointError, RuntimeError):
    """The call is not allowed at this time, or from this thread or function."""


class UnsafeArchiveError(CheckpointError):
    """Extracting the archive could do harm: it has names or links that lead outside, devices, or too much data."""

    path: str
    member: str


class NothingWrittenError(CheckpointError):
    """The code that should have written a checkpoint wrote nothing; an earlier checkpoint there is unchanged."""


class DestinationBusyError(CheckpointError):
    """An earlier save to the same destination is still in progress; wait for its handle, or use another name."""

    path: str


class StateMismatchError(CheckpointError):
    """The live state and the checkpoint differ in names, shapes or dtypes; nothing was overwritten."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()


class StepExistsError(CheckpointError):
    """The step is already committed, perhaps by another writer."""

    step: int


class StepBehindError(CheckpointError):
    """The step is below the newest committed step; the steps of a run must increase."""

    step: int
    newest: int


class RunTakenError(CheckpointError):
    """Another process has the run: it has taken it over from this process, or it took it before and is still alive.

    `host`, `pid` and `since` (seconds since the epoch, by its clock) identify that process; the steps that it commits
    count. With `undecided`, the manifest was put before this was known, so the step may be committed all the same.
    """

    path: str
    host: str
    pid: int
    since: float
    undecided: bool = False


class ConflictError(CheckpointError):
    """A place of the run has a commit of a start that this run does not descend from; nothing is written there.

    This happens if two machines continue from the same step, each at its own place, and later reach a common place.
    """

    path: str
    step: int


class PeerFailedError(CheckpointError):
    """Another rank could not do its part of the checkpoint, or did not report it in time.

    If `undecided` is True, the checkpoint may be committed all the same: check which steps are committed.
    """

    rank: int
    undecided: bool = False


class SaveAbandonedError(CheckpointError):
    """The save was abandoned before it was committed, because of an interrupt or the exit timeout."""


class ClosedError(CheckpointError, RuntimeError):
    """The checkpointer is closed, or belongs to another process."""
