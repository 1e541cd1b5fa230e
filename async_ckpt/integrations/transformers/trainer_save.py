"""One save of a trainer: its own methods write the folder of a checkpoint from a snapshot.

In: a trainer, a snapshot of its parts, small files. Out: a save that has begun. Knows nothing of: the formats of the
files, which the trainer's own methods write, and other saves.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from ... import HeldSnapshot
from ...plumbing import write_by_torch
from ..common.event_history import HistoryEntry
from ..common.folder_saves import FolderSave
from ..common.fsdp1_state import plain_of
from ..common.fsdp_files import FsdpFiles
from ..common.run_folders import LocalRun, StoredRun
from ..common.small_files import write_files
from ..common.training_archive import TrainingArchive
from .trainer_parts import FILES, archived, kind_of_archive

# In a store, the mark of a complete checkpoint.
STATE: Final = "trainer_state.json"


class TrainerSave(FolderSave):
    """One save, from its snapshot on. `files` has the files that a subclass has already written."""

    # Set by `begin`. `row_before` is the last row of the trainer's log at that time, or None.
    row_before: dict[str, Any] | None
    epoch: dict[str, float]

    def __init__(
        self, run: LocalRun | StoredRun, name: str, snap: HeldSnapshot, files: Mapping[str, bytes], began: float
    ) -> None:
        super().__init__(run, name, snap, began)
        self._files = files

    def begin(
        self, trainer: Any, rng: Mapping[str, bytes], archive: TrainingArchive | None = None
    ) -> HistoryEntry | None:
        """Begin to write this rank's part. `rng` has the files of random states of all ranks; `archive` is the archive
        that is already being written. Returns the entry for the history.
        """
        writes, is_pushed = trainer.args.should_save, trainer.args.push_to_hub
        with self.snap as snap:
            in_archive: dict[str, Any] = {part: snap[part] for part in archived(trainer, snap.keys())}
            weights = snap.get("model")
            if rng and trainer.layout == "archive":
                in_archive["rng"] = rng
            if in_archive:
                archive = self.begin_archive(in_archive, kind_of_archive(trainer))
                if "model" in in_archive:  # only its config is written beside an archive that stays
                    weights = {} if archive.is_part else None
            if writes:
                in_files = {part: snap[part] for part in FILES if part in snap and part not in in_archive}
                files = {**self._files, **({} if "rng" in in_archive else rng)}
                frozen = _frozen(trainer)
                if isinstance(archive, FsdpFiles):
                    archive.save_model = frozen._save
                write = partial(_write_parts, frozen, files)
                self.begin_folder([weights, in_files], write, archive, has_digests=not is_pushed)
        state = trainer.state
        rows = [row for row in state.log_history if row.get("step") == state.global_step]
        record = {key: value for row in rows for key, value in row.items() if key != "step"}
        self.step, self.row_before = state.global_step, state.log_history[-1] if state.log_history else None
        self.epoch = {} if state.epoch is None else {"epoch": state.epoch}
        if not writes or is_pushed:  # the history would be pushed, too
            return None
        return HistoryEntry(self.run.place(""), self.name, self.step, {**record, **self.epoch})


def _frozen(trainer: Any) -> Any:
    """A copy of the trainer with the current small values, which are written later."""
    frozen = copy.copy(trainer)
    frozen.args, frozen.state = copy.copy(trainer.args), copy.copy(trainer.state)
    frozen.state.log_history = list(trainer.state.log_history)
    frozen.state.stateful_callbacks = copy.deepcopy(trainer.state.stateful_callbacks)
    model = plain_of(trainer.model)
    frozen.model = object.__new__(type(model))  # not copy.copy, for which FSDP2 creates a new module
    frozen.model.__dict__.update(vars(model))
    for name in {"config", "generation_config"} & {*vars(model)}:
        frozen.model.__dict__[name] = copy.deepcopy(vars(model)[name])
    return frozen


def _write_parts(trainer: Any, files: Mapping[str, bytes], parts: Any, folder: str) -> None:
    """Write the weights and other parts, small files, and the trainer's state. Runs in the background."""
    weights, in_files = parts
    if weights is not None:
        is_in_archive = not weights
        trainer._save(folder, state_dict=weights)
        if is_in_archive:
            Path(folder, "model.safetensors").unlink(missing_ok=True)  # it has no weights
    for name, value in in_files.items():
        write_by_torch(value, Path(folder, FILES[name]))
    write_files(files, folder)
    trainer.state.save_to_json(os.path.join(folder, STATE))
