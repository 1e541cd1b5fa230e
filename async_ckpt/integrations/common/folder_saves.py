"""The saves of a trainer that fill folders: each takes a snapshot, and makes a folder from it in the background.

In: snapshots, archives, and functions that write the files of a framework. Out: folders, or objects in a store, that
appear when they are durable; figures, errors, the history. Knows nothing of: frameworks, the content of the files.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ... import HeldSnapshot, SaveHandle, SaveReport, wrap
from ...files import local_work_dir
from ...plumbing import disk, file_digests, timing
from .event_history import HistoryEntry
from .framework_checks import LOGGED_AS
from .run_folders import LocalRun, StoredRun
from .save_queue import SaveQueue
from .small_files import room_for
from .step_guard import StepGuard
from .training_archive import TrainingArchive


class FolderSave:
    """One save, from its snapshot on. `began` is the moment at which the trainer began to wait."""

    handle: SaveHandle  # set by `begin_archive`, and replaced by `begin_folder`

    def __init__(self, run: LocalRun | StoredRun, name: str, snap: HeldSnapshot, began: float) -> None:
        self.run, self.name, self.snap, self._began = run, name, snap, began
        self.step: int | None = None
        self._call_seconds, self._stall_in_call = 0.0, snap.stall_seconds
        self._archive: TrainingArchive | None = None
        self._uploaded: list[int] = []  # sizes of the files that this rank uploads; added by the save's thread

    def begin_archive(self, state: Mapping[str, Any], kind: type[TrainingArchive]) -> TrainingArchive:
        """Begin to write an archive that is moved to the folder, or converted to files in it."""
        archive = self._archive = self.run.archive(state, self.name, kind)
        self.handle = archive.handle
        self.handle.add_done_callback(SaveHandle.exception)  # the save of the folder fails with the same error
        return archive

    def begin_folder(
        self,
        parts: Any,
        write: Callable[[Any, str], object],
        archive: TrainingArchive | None,
        *,
        has_digests: bool = True,
    ) -> None:
        """Begin to fill the folder: `write` is called with copies of the parts and a folder."""
        run, place, uploaded = self.run, self.run.place(self.name), self._uploaded

        def fill(copied: Any, folder: str) -> None:
            run.make_room()
            with disk.translated(Path(folder)):
                os.makedirs(folder, exist_ok=True)
            with room_for(copied, folder):
                write(copied, folder)
                if archive is not None:
                    archive.take_into(folder)
            if has_digests:
                file_digests.note_digests(folder)

        if isinstance(run, LocalRun):
            self.handle = _write(parts, fill, place)
            return

        def upload(copied: Any, mark: str) -> None:
            with local_work_dir(place) as folder:
                fill(copied, folder)
                uploaded.extend(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
                shutil.move(Path(folder, run.mark), mark)

        self.handle = _write(parts, upload, f"{place}/{run.mark}")

    def called(self) -> None:
        """Note that the trainer continues."""
        self._call_seconds = timing.monotonic() - self._began

    def figures(self) -> dict[str, float]:
        """The report of a save that has ended, as numbers by their names for a logger."""
        return self.report().as_dict(LOGGED_AS)

    def report(self) -> SaveReport:
        """The report of a save that has ended, with the stall of the snapshot."""
        report: SaveReport = self.handle.result()
        return dataclasses.replace(
            report,
            step=self.step,
            num_bytes=self._num_bytes(report),
            stall_seconds=self._call_seconds + self.snap.stall_seconds - self._stall_in_call,
            total_seconds=self._call_seconds + report.total_seconds,
        )

    def _num_bytes(self, report: SaveReport) -> int:
        """The bytes of the whole checkpoint. In a store, the save of the folder counts only its mark."""
        if not self._uploaded:
            return report.num_bytes
        archive = self._archive if self._archive is not None and self._archive.is_part else None
        return sum(self._uploaded) + (0 if archive is None else archive.handle.result().num_bytes)


class FolderSaves:
    """The saves of one trainer, one at a time. Owned by the training thread."""

    def __init__(self, name: str) -> None:
        self.guard = StepGuard()
        self.pending: FolderSave | None = None
        self.run: LocalRun | StoredRun | None = None  # the run of the newest save
        self.of_engine: Any = None  # the saves of DeepSpeed's engine, from the first one on
        self._queue = SaveQueue(name)

    def enter(self, run: LocalRun | StoredRun, *, writes: bool, clear: bool = True) -> LocalRun | StoredRun:
        """The run of the next save: the object of the last save, if it is the same run. No save is under way.

        The process that `writes` the folders tidies the run that it leaves. With `clear`, it also removes the leftovers
        of killed trainers in the new run.
        """
        if self.run is not None and self.run.place("") == run.place(""):
            return self.run
        if writes and self.run is not None:
            self.run.end()
        if writes and clear:
            run.clear()
        self.run = run
        return run

    def begun(self, save: FolderSave, entry: HistoryEntry | None) -> None:
        """Add a save that has begun. Without an `entry`, it is not in the history."""
        save.called()
        self.pending = save
        path = save.run.place(save.name)
        self._queue.add(path, [save.handle], step=save.step, report=save.report, entry=entry)

    def wait(self) -> FolderSave | None:
        """Wait for the save under way on this rank. Returns it, if there was one. Raises its error."""
        self._queue.wait()
        pending, self.pending = self.pending, None
        errors = self._queue.take_errors()
        self._queue.take_reports()
        if self.of_engine is not None and (error := self.of_engine.finish()) is not None:
            errors.insert(0, error)
        if errors:
            raise errors[0]
        return pending


@contextmanager
def noted_on(error: BaseException) -> Iterator[None]:
    """A block in which the failure of a save becomes a note on an error that is being raised."""
    try:
        yield
    except Exception as failed:
        error.add_note(f"async_ckpt: a save failed, too: {type(failed).__name__}: {failed}")


def _write_files(parts: Any, fill: Callable[[Any, str], object], path: str) -> None:
    """Call a save's function in the background. `wrap` does not copy a function, or the objects that it refers to."""
    fill(parts, path)


_write: Callable[..., SaveHandle] = wrap(_write_files, destination="path", whole_folder=True)
