"""The files of an engine in the folder of a trainer's checkpoint.

In: an engine, and the path of a hidden folder beside that checkpoint. Out: the files of DeepSpeed, taken into the
checkpoint when those of all ranks are durable. Knows nothing of: trainers.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from ...plumbing import disk
from ..common.training_archive import TrainingArchive
from .checkpoint_engine import DeepSpeedCheckpoints, checked


def for_trainer(engine: Any) -> DeepSpeedCheckpoints:
    """Have an engine write its files in the background, as parts of checkpoints. Raises what `use` raises."""
    return DeepSpeedCheckpoints(checked(engine, "deepspeed"), "deepspeed", is_part=True)


class EngineFiles(TrainingArchive):
    """The files of all ranks, in place of an archive. Every rank makes this: all raise the error of any."""

    __slots__ = ("_ended",)
    is_part = False

    def __init__(self, saves: DeepSpeedCheckpoints, where: Path, tag: str | None = None, **options: Any) -> None:
        self.parts, self._written = (), where
        self._ended: Future[None] = saves.begin(where, tag, **options)

    def durable(self) -> Path | str:
        self._ended.result()
        return self._written

    def take_into(self, folder: str) -> None:
        """Wait until the files are durable, and move them into a folder. Raises the error of their save."""
        source = Path(self.durable())
        with disk.translated(source):
            for path in source.iterdir():
                os.rename(path, Path(folder, path.name))
            source.rmdir()
