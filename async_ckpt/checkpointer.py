"""`AsyncCheckpointer`: the managed run that users hold.

In: states and steps. Out: handles, and states back. Knows nothing of: bytes, threads.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal, Self

import torch

from .commit.manifest import Archive, Manifest
from .commit.retention import Retention
from .commit.run import STEP_FORMAT, TRACKER, Run
from .errors import CheckpointError, CorruptCheckpointError, NotCommittedError
from .functional import local_path, open_run_archive, state_of
from .handle import SaveHandle
from .load import Select, Verify
from .restore import restore_state
from .saver import OnOverlap, Saver
from .spans import wall_time
from .storage.base import Sink
from .storage.local import LocalStorage

_UNSET: Any = object()


class AsyncCheckpointer:
    """Saves of one training run below one folder, and what to do with the old ones.

    Args:
        root: the run's folder; made by the first save.
        keep_last: after each commit keep this many of the newest steps; None keeps all.
        keep_every: with `keep_last`, keep for good every step that this divides.
        guard: the optimizer (or several) that alone changes its parameters and state, in `step()`: the copy of these
            then overlaps the next forward and backward, and `step()` waits for what is left of it.
        host_bytes: hard budget of host memory for snapshots, at least 16 MiB; by default what the state needs, up to
            half of the memory that is free. With less than the state, `save` waits for the disk.
        segment_bytes: the unit of copying and writing, a multiple of 4 MiB; 32 MiB unless the budget is small.
        on_overlap: what `save` does while `max_in_flight` saves are under way: "wait" (reported as stall), or "skip".
        max_in_flight: saves that may be under way at once; each takes host memory of its own.
        on_rollback: "retire" lets a save below the newest commit take the newer ones out of the run; by default
            such a save raises StepBehindError.
        tracker: name of the file that holds the newest step's folder; None writes none.
        step_format: the folder of a step, with the step in it.
        strict: raise at `save`, before anything is started, what an earlier save failed with and nobody looked at.
        exit_timeout: seconds that the interpreter's exit waits for saves; None: as long as they take.

    Safe to call from any thread. Opening, listing and reading change nothing on storage.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        guard: Any = None,
        host_bytes: int | None = None,
        segment_bytes: int | None = None,
        on_overlap: OnOverlap = "wait",
        max_in_flight: int = 1,
        on_rollback: Literal["retire"] | None = None,
        tracker: str | None = TRACKER,
        step_format: str = STEP_FORMAT,
        strict: bool = False,
        exit_timeout: float | None = None,
    ) -> None:
        if on_rollback not in (None, "retire"):
            raise ValueError(f'on_rollback must be None or "retire", got {on_rollback!r}')
        folder = local_path(root)
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(f"{folder} is a file; a run needs a folder")
        self.root = str(folder)
        self._run = Run(
            LocalStorage(folder),
            clock=wall_time,
            step_format=step_format,
            tracker=tracker,
            retention=Retention(keep_last, keep_every),
        )
        self._guard = guard
        self._retire = on_rollback == "retire"
        self._saver = Saver(
            host_bytes=host_bytes,
            segment_bytes=segment_bytes,
            on_overlap=on_overlap,
            max_in_flight=max_in_flight,
            strict=strict,
            exit_timeout=exit_timeout,
            keep_warm=True,
        )
        self._rolled_back = False  # restored from below the newest commit, and not committed since
        self._swept = False

    # --- saving -----------------------------------------------------------------------------------------------

    def save(self, state: Any, step: int, *, overwrite: bool = False, guard: Any = _UNSET) -> SaveHandle:
        """Begin to save `state` as `step`; returns as soon as the caller may go on training.

        `guard` overrides the checkpointer's for this save. With `overwrite`, a committed step stays loadable until
        the new one is committed.
        Raises UnsupportedStateError, StepExistsError, StepBehindError, ClosedError; all else ends in the handle.
        """
        if type(step) is not int or step < 0:
            raise ValueError(f"step must be a whole number from 0 on, got {step!r}")
        token = os.urandom(4).hex()

        def make_target() -> _StepTarget:
            self._run.check(step, overwrite=overwrite, rolled_back=self._rolled_back, retire=self._retire)
            return _StepTarget(self, step, token, overwrite)

        return self._saver.save(
            state,
            make_target,
            step=step,
            guard=self._guard if guard is _UNSET else guard,
            skipped_path=self._run.storage.locate(self._run.folder(step)),
        )

    def prewarm(self, state: Any) -> None:
        """Do ahead of the first save what only it would have to wait for: planning, taking and locking memory."""
        self._saver.prewarm(state)

    def release(self) -> None:
        """Give back the host memory that no save is using; the next one takes it again."""
        self._saver.pool.release()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for every save begun so far, retention included, and raise the first error nobody has looked at."""
        self._saver.wait(timeout)

    def metrics(self) -> dict[str, float]:
        """Numbers for a logger, under the same keys on every call, from the first on."""
        return self._saver.metrics()

    def close(self) -> None:
        """Wait for every save and raise the first error nobody has looked at. Idempotent."""
        self._saver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError as failed:
            if error is None:
                raise
            error.add_note(f"async_ckpt: a save failed too: {type(failed).__name__}: {failed}")

    # --- reading ----------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The committed steps, ascending."""
        return self._run.steps()

    def latest(self) -> int | None:
        """The newest committed step, or None."""
        return self._run.latest()

    def load(
        self,
        step: int | None = None,
        *,
        map_location: str | torch.device | None = None,
        select: Select = None,
        trust: bool = False,
        verify: bool = True,
        mmap: bool = False,
        types: Iterable[type] = (),
    ) -> Any:
        """Build the state of a step, by default the newest; see `async_ckpt.load`. Raises NotCommittedError."""
        with open_run_archive(self._run, self._step_or_latest(step), verify=verify) as archive:
            return state_of(
                archive, map_location=map_location, select=select, trust=trust, mmap=mmap, types=types
            )

    def restore(
        self,
        state: Any,
        step: int | None = None,
        *,
        select: Select = None,
        strict: bool = True,
        trust: bool = False,
        verify: Verify = True,
        types: Iterable[type] = (),
    ) -> int | None:
        """Fill live objects in place from a step, by default the newest; the step, or None when nothing is committed.

        With `step=None`, a step that turns out to be corrupt is passed over with a warning, for the next older one.
        `verify="first"` checks every byte before any is written, at the price of reading twice.
        Raises StateMismatchError before anything is written, CorruptCheckpointError, NotCommittedError.
        """
        newest = self.latest()
        for pending in self._saver.pending():
            pending.handle.staging_completion.exception()  # what is being copied must not be overwritten
        first_error: CorruptCheckpointError | None = None
        for candidate in reversed(self.steps()) if step is None else [step]:
            try:
                with open_run_archive(self._run, candidate, verify=bool(verify)) as archive:
                    restore_state(
                        archive, state, select=select, strict=strict, trust=trust, verify=verify, types=types
                    )
            except CorruptCheckpointError as error:
                if step is not None:
                    raise
                warnings.warn(f"step {candidate} is passed over: {error}", RuntimeWarning, stacklevel=2)
                if first_error is None or error.partly_overwritten:
                    first_error = error
                continue
            self._rolled_back = newest is not None and candidate < newest
            return candidate
        if first_error is not None:
            raise first_error
        return None

    # --- parts ------------------------------------------------------------------------------------------------

    def _step_or_latest(self, step: int | None) -> int:
        found = self.latest() if step is None else step
        if found is None:
            raise NotCommittedError(f"{self.root}: nothing is committed yet", path=self.root, step=None)
        return found

    def _steps_in_flight(self) -> Collection[int]:
        undecided = [p.handle.step for p in self._saver.pending() if not p.settled.done()]
        return {step for step in undecided if step is not None}

    def __repr__(self) -> str:
        return f"<AsyncCheckpointer {self.root} {self._saver!r}>"


class _StepTarget:
    """One attempt at one step. Its methods run one after the other, on helper threads."""

    def __init__(self, checkpointer: AsyncCheckpointer, step: int, token: str, overwrite: bool) -> None:
        self._owner, self._step, self._token, self._overwrite = checkpointer, step, token, overwrite
        self._run = checkpointer._run
        self._replaces: tuple[Manifest, str] | None = None
        self._announced = False
        self._name = self._run.attempt_path(step, token)
        self.path = self._run.storage.locate(self._name)

    def open(self, num_bytes: int) -> Sink:
        if not self._owner._swept:  # what an earlier process left behind; our own failures leave nothing
            self._owner._swept = True
            self._run.sweep()
        if self._overwrite:
            self._replaces = self._run.found(self._step)
        return self._run.storage.create(self._name, num_bytes=num_bytes)

    def commit(self, archive: Archive) -> None:
        self._run.commit(
            self._step, self._token, (archive,), replaces=self._replaces, retire=self._owner._retire
        )
        self._owner._rolled_back = False
        with suppress(CheckpointError):  # the checkpoint is true already; tried once more afterwards
            self._run.announce()
            self._announced = True

    def discard(self) -> None:
        self._run.discard(self._step, self._token)

    def afterwards(self) -> None:
        if not self._announced:
            self._run.announce()
        replaced = self._replaces[0] if self._replaces else None
        self._run.retain(self._step, replaced=replaced, in_flight=self._owner._steps_in_flight())
