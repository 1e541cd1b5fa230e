"""The files of an engine in the folder of a trainer's checkpoint.

In: an engine, and the path of a hidden folder beside that checkpoint. Out: DeepSpeed's files, moved to the checkpoint
when the files of all ranks are durable. Knows nothing of: trainers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ...plumbing import disk
from ..common.folder_saves import FolderSaves
from ..common.run_folders import LocalRun
from ..common.training_archive import TrainingArchive
from .checkpoint_engine import DeepSpeedCheckpoints, checked


def for_trainer(engine: Any) -> DeepSpeedCheckpoints:
    """Make an engine write its files in the background, as parts of checkpoints. Raises the errors of `use`.

    Returns the same object for the same engine.
    """
    made = engine.checkpoint_engine
    if isinstance(made, DeepSpeedCheckpoints) and made.is_part:
        return made
    return DeepSpeedCheckpoints(checked(engine, "deepspeed"), "deepspeed", is_part=True)


def begin_files(saves: FolderSaves, engine: Any, name: str, tag: str | None = None, **options: Any) -> EngineFiles:
    """Begin to write the files of an engine for a checkpoint of this name. Every rank calls this."""
    assert isinstance(saves.run, LocalRun), "DeepSpeed's own files are not written to a store"
    saves.of_engine = for_trainer(engine)
    return EngineFiles(saves.of_engine, saves.run.beside(name), tag, **options)


class EngineFiles(TrainingArchive):
    """The files of all ranks, in place of an archive. Constructed on every rank; an error of any is raised on all."""

    is_part = False

    def __init__(self, saves: DeepSpeedCheckpoints, where: Path, tag: str | None = None, **options: Any) -> None:
        self.parts, self._written = (), where
        saves.save_checkpoint(where, tag, **options)
        self._ended = saves.ended

    def durable(self) -> Path | str:
        assert self._ended is not None
        self._ended.result()
        return self._written

    def take_into(self, folder: str) -> None:
        """Wait until the files are durable, and move them to a folder. Raises the error of their save."""
        source = Path(self.durable())
        with disk.translated(source):
            for path in source.iterdir():
                os.rename(path, Path(folder, path.name))
            source.rmdir()
