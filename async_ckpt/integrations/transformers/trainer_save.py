"""One save of a trainer: a snapshot, and in the background the folder of a checkpoint that is filled from it.

In: a trainer, a snapshot of its parts, small files. Out: a folder, or objects in a store; figures. Knows nothing of:
the formats of the files, which the trainer's own methods write, and other saves.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

from ... import HeldSnapshot, SaveHandle, SaveReport, wrap
from ...files import local_work_dir
from ...plumbing import disk, file_digests, timing, write_by_torch
from ..common.checkpoint_history import note_when_done
from ..common.frameworks import LOGGED_AS
from ..common.fsdp1_state import plain_of
from ..common.fsdp_files import FsdpFiles
from ..common.run_folders import LocalRun, StoredRun
from ..common.small_files import room_for, write_files
from ..common.training_archive import TrainingArchive
from .trainer_parts import FILES, archived, kind_of_archive

# The file that is written last: in a store, the mark of a whole checkpoint.
STATE: Final = "trainer_state.json"


class TrainerSave:
    """One save, from its snapshot on. The trainer has one at most, and its thread alone reads and drops it.

    `files` are those that a subclass has written already. `began` is when the trainer was held.
    """

    # From `begin` on. `row_before` is the last row of the trainer's log then, None if there was none.
    handle: SaveHandle
    row_before: dict[str, Any] | None
    epoch: dict[str, float]

    def __init__(
        self, run: LocalRun | StoredRun, name: str, snap: HeldSnapshot, files: Mapping[str, bytes], began: float
    ) -> None:
        self.run, self.name, self._snap, self._files, self._began = run, name, snap, files, began
        self.step, self._call_seconds, self._stall_in_call = 0, 0.0, snap.stall_seconds
        self._uploaded: list[int] = []  # the sizes of files that this rank uploads; the thread of the save adds them
        self._archive: TrainingArchive | None = None
        self.noted: Future[None] | None = None  # done when the history has the save

    def begin(self, trainer: Any, rng: Mapping[str, bytes], archive: TrainingArchive | None = None) -> None:
        """Have everything written that this rank writes. `rng` has the files of random states of all ranks, and
        `archive` what is being written already.
        """
        with self._snap as snap:
            in_archive: dict[str, Any] = {part: snap[part] for part in archived(trainer, snap.keys())}
            if rng and trainer.layout == "archive":
                in_archive["rng"] = rng
            if in_archive:
                archive = self._archive = self.run.archive(in_archive, self.name, kind_of_archive(trainer))
                self.handle = archive.handle
                self.handle.add_done_callback(SaveHandle.exception)  # the save of the folder fails with it
            if trainer.args.should_save:
                files = {**self._files, **({} if "rng" in in_archive else rng)}
                rest = _Rest(_frozen(trainer), files, self._uploaded)
                self.handle = self._begin_folder(snap, in_archive, rest, archive)
        state = trainer.state
        rows = [row for row in state.log_history if row.get("step") == state.global_step]
        record = {key: value for row in rows for key, value in row.items() if key != "step"}
        self.step, self.row_before = state.global_step, state.log_history[-1] if state.log_history else None
        self.epoch = {} if state.epoch is None else {"epoch": state.epoch}
        self._call_seconds = timing.monotonic() - self._began
        if trainer.args.should_save and not trainer.args.push_to_hub:  # which would push the history, too
            self.noted = note_when_done(
                self.handle, self.run.place(""), self.name, self.step, self.report, {**record, **self.epoch}
            )

    def _begin_folder(
        self, snap: HeldSnapshot, in_archive: Mapping[str, Any], rest: _Rest, archive: TrainingArchive | None
    ) -> SaveHandle:
        place, weights = self.run.place(self.name), snap.get("model")
        if isinstance(archive, FsdpFiles):
            archive.save_model = rest.trainer._save
        if "model" in in_archive:  # its config is written beside an archive that stays
            weights = {} if archive is not None and archive.is_part else None
        in_files = {part: snap[part] for part in FILES if part in snap and part not in in_archive}
        if isinstance(self.run, LocalRun):
            return _write(weights, in_files, rest, archive, place)
        return _upload(weights, in_files, rest, archive, place, f"{place}/{STATE}")

    def figures(self) -> dict[str, float]:
        """The report of a save that has ended, by the names for a logger."""
        return self.report().as_dict(LOGGED_AS)

    def report(self) -> SaveReport:
        """The report of a save that has ended, with what the snapshot cost."""
        report: SaveReport = self.handle.result()
        return dataclasses.replace(
            report,
            step=self.step,
            num_bytes=self._num_bytes(report),
            stall_seconds=self._call_seconds + self._snap.stall_seconds - self._stall_in_call,
            total_seconds=self._call_seconds + report.total_seconds,
        )

    def _num_bytes(self, report: SaveReport) -> int:
        """The bytes of the whole checkpoint. In a store, the save of the folder counts its mark alone."""
        if not self._uploaded:
            return report.num_bytes
        archive = self._archive if self._archive is not None and self._archive.is_part else None
        return sum(self._uploaded) + (0 if archive is None else archive.handle.result().num_bytes)


def _frozen(trainer: Any) -> Any:
    """A trainer with the small values that are written later, as they are now."""
    frozen = copy.copy(trainer)
    frozen.args, frozen.state = copy.copy(trainer.args), copy.copy(trainer.state)
    frozen.state.log_history = list(trainer.state.log_history)
    frozen.state.stateful_callbacks = copy.deepcopy(trainer.state.stateful_callbacks)
    model = plain_of(trainer.model)
    frozen.model = object.__new__(type(model))  # not copy.copy: FSDP2 has its modules made anew
    frozen.model.__dict__.update(vars(model))
    for name in {"config", "generation_config"} & {*vars(model)}:
        frozen.model.__dict__[name] = copy.deepcopy(vars(model)[name])
    return frozen


# --- in the background ------------------------------------------------------------------------------------------------


class _Rest:
    """The rest of a folder, beside its tensors. `wrap` passes it on as it is: nothing in it changes any more.

    `uploaded` gets the sizes of files that are uploaded.
    """

    __slots__ = ("files", "trainer", "uploaded")

    def __init__(self, trainer: Any, files: Mapping[str, bytes], uploaded: list[int]) -> None:
        self.trainer, self.files, self.uploaded = trainer, files, uploaded

    def __deepcopy__(self, memo: dict[int, Any]) -> _Rest:
        return self


def _write_folder(
    weights: Any, in_files: dict[str, Any], rest: _Rest, archive: TrainingArchive | None, folder: str
) -> None:
    """Fill the folder of a checkpoint."""
    trainer = rest.trainer
    trainer._run.make_room()
    with disk.translated(Path(folder)):
        os.makedirs(folder, exist_ok=True)
    with room_for([weights, in_files], folder):
        if weights is not None:
            is_in_archive = not weights
            trainer._save(folder, state_dict=weights)
            if is_in_archive:
                Path(folder, "model.safetensors").unlink(missing_ok=True)  # of no weights
        for name, value in in_files.items():
            write_by_torch(value, Path(folder, FILES[name]))
        write_files(rest.files, folder)
        if archive is not None:
            archive.take_into(folder)
        trainer.state.save_to_json(os.path.join(folder, STATE))
        if not trainer.args.push_to_hub:
            file_digests.note_digests(folder)


def _upload_folder(
    weights: Any, in_files: dict[str, Any], rest: _Rest, archive: TrainingArchive | None, url: str, mark: str
) -> None:
    """Fill the folder at a URL; its mark is uploaded when this has ended."""
    with local_work_dir(url) as folder:
        _write_folder(weights, in_files, rest, archive, folder)
        rest.uploaded.extend(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        shutil.move(os.path.join(folder, STATE), mark)


_write: Callable[..., SaveHandle] = wrap(_write_folder, destination="folder", whole_folder=True)
_upload: Callable[..., SaveHandle] = wrap(_upload_folder, destination="mark")
