"""The folder of one model in the folder of a step, and the tracker that names the newest step.

In: the durable files of a model. Out: a complete folder, and the tracker. Knows nothing of: the content of archives,
verl.

    <run>/latest_checkpointed_iteration.txt
    <run>/global_step_<N>/data.pt                       written by the trainer, after the saves of all models have begun
    <run>/global_step_<N>/actor/training.tar            our archive; with several ranks, a folder of archives
                               /huggingface/, *.json    verl's files
                               /.async_ckpt.saving      a mark, there during the save

Several models are saved by processes that do not communicate. The process that finishes last finds no mark in the
folder of the step, and updates the tracker. So that none does this before all have begun, each first waits for the
trainer's file, or for another sign that the trainer has continued.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from ...plumbing import LocalStorage, disk, file_digests, runs, waits
from ..common.folders import latest_in, name_latest
from ..common.training_archive import ARCHIVE, archive_in

TRACKER: Final = "latest_checkpointed_iteration.txt"
_STEP: Final = re.compile(r"global_step_(\d+)")
_MARK: Final = ".async_ckpt.saving"
_OF_TRAINER: Final = "data.pt"
# The files of verl's own manager, one of each kind for each rank.
_OF_VERL: Final = "*_world_size_*_rank_*.pt"
# The shortest and the longest pause between two checks for the trainer's file.
_LOOK_SECONDS: Final = 0.02
_LONGEST_LOOK_SECONDS: Final = 0.5


class PartFolder:
    """The folder of a model, such as `<run>/global_step_100/actor`. Only rank 0 writes to it, except for archives."""

    def __init__(self, local_path: str) -> None:
        self.path: Final = Path(local_path).absolute()
        self.archive: Final = self.path / ARCHIVE
        self.is_step: Final = _STEP.fullmatch(self.path.name) is not None
        """True if this is the folder of the step itself, as for verl's SFT trainers, which train one model."""
        self._step_folder: Final = self.path if self.is_step else self.path.parent
        found = _STEP.fullmatch(self._step_folder.name)
        self._step: Final = None if found is None else int(found[1])
        self._data_before: tuple[int, ...] | None = None

    @property
    def run(self) -> Path:
        """The folder with the folders of all steps."""
        return self._step_folder.parent

    @property
    def name(self) -> str:
        """The path of this folder, relative to the folder of the run."""
        return self.path.relative_to(self.run).as_posix()

    def begin(self) -> None:
        """Create the folder, and mark it as unfinished."""
        self._data_before = self._seen_data()
        disk.make_folder(self.path)
        LocalStorage(self.path).replace(_MARK, b"This is removed when the checkpoint is durable.\n")

    def finish(self, files: Mapping[str, bytes]) -> None:
        """Write the small files, and end the save. All other files are durable."""
        storage = LocalStorage(self.path)
        for name, data in files.items():
            storage.replace(name, data)
        for path in self.files_of_verl():  # of an earlier save, which this one replaces
            path.unlink()
        file_digests.note_digests(self.path, but=_OF_TRAINER)
        self.unmark()

    def unmark(self) -> None:
        LocalStorage(self.path).delete(_MARK)
        disk.sync_folder(self.path)

    def wait_for_trainer(self, went_on: threading.Event) -> None:
        """Wait until the trainer has written its file, has continued, or has ended."""
        pauses = waits.growing_pauses(_LOOK_SECONDS, _LONGEST_LOOK_SECONDS)
        while self._step is not None and threading.main_thread().is_alive() and not self._has_data():
            if went_on.wait(next(pauses)):
                return

    def name_step(self) -> None:
        """Write the step of this folder to the tracker, unless another model is still being saved."""
        step_folder = self._step_folder
        if self._step is None or any(step_folder.glob(f"*/{_MARK}")):
            return
        with suppress(FileNotFoundError):
            fd = os.open(step_folder / _OF_TRAINER, os.O_RDWR)
            try:
                disk.sync_file(fd)
            finally:
                disk.close_quietly(fd)
        disk.sync_folder(step_folder)
        disk.sync_folder(self.run)
        name_latest(self.run / TRACKER, str(self._step))

    def is_named(self) -> bool:
        """True if the tracker names the step of this folder."""
        return latest_in(self.run, TRACKER) == str(self._step)

    def siblings(self) -> list[Path]:
        """The folders of this model with a complete archive of ours, in all steps, in the order of writing."""
        found = []
        pattern = "global_step_*" if self.is_step else f"global_step_*/{self.path.name}"
        for path in self.run.glob(pattern):
            archive = archive_in(path)
            if archive is not None and not (path / _MARK).exists():
                with suppress(FileNotFoundError):  # not committed
                    found.append(
                        ((archive / runs.MANIFEST_NAME if archive.is_dir() else archive).stat().st_mtime_ns, path)
                    )
        return [path for _, path in sorted(found)]

    def remove(self) -> None:
        """Remove the folder. The archive is uncommitted first, so that no reader takes the rest for a checkpoint."""
        with suppress(FileNotFoundError):
            (self.archive / runs.MANIFEST_NAME if self.archive.is_dir() else self.archive).unlink()
        shutil.rmtree(self.path, ignore_errors=True)

    def files_of_verl(self) -> list[Path]:
        return [*self.path.glob(_OF_VERL)]

    def _seen_data(self) -> tuple[int, ...] | None:
        try:
            stat = (self._step_folder / _OF_TRAINER).stat()
        except OSError:
            return None
        return stat.st_ino, stat.st_mtime_ns, stat.st_size

    def _has_data(self) -> bool:
        """True if the trainer's file exists, is newer than the save, and is complete: a zip ends with its directory."""
        seen = self._seen_data()
        return seen not in (None, self._data_before) and zipfile.is_zipfile(self._step_folder / _OF_TRAINER)
