"""Saving as it is often done: write some files, pack them, and let the training wait.

In: a state and a step. Out: one tar or tar.gz, durable when `save` returns. Knows nothing of: async_ckpt.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch


class TarSaver:
    """torch.save into a folder, tarfile over the folder, fsync, rename; the two newest are kept."""

    def __init__(self, root: Path, *, compression: Literal["", "gz"] = "") -> None:
        self.root = root
        self.suffix = f".tar.{compression}" if compression else ".tar"
        self._mode: Literal["w:", "w:gz"] = "w:gz" if compression else "w:"
        root.mkdir(parents=True, exist_ok=True)

    def save(self, state: Mapping[str, Any], step: int) -> int:
        """Returns the size of the archive in bytes."""
        folder = self.root / f"step_{step:08d}"
        folder.mkdir()
        for name, part in state.items():
            torch.save(part.state_dict() if hasattr(part, "state_dict") else part, folder / f"{name}.pt")

        archive = folder.with_suffix(self.suffix)
        unfinished = folder.with_suffix(".unfinished")
        with unfinished.open("wb") as file:
            with tarfile.open(fileobj=file, mode=self._mode) as tar:
                tar.add(folder, arcname=folder.name)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(archive)
        _sync_folder(self.root)  # without it, a power cut may undo the rename
        shutil.rmtree(folder)
        for old in sorted(self.root.glob(f"step_*{self.suffix}"))[:-2]:
            old.unlink()
        return archive.stat().st_size


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
