"""Packs that have ended, and what they have left."""

import os
from pathlib import Path

from racing import until

from async_ckpt.face.around.pack import files_saver


def settled() -> None:
    """Return when every pack has ended and cleaned up."""
    until(lambda: not any(not save.finished.done() for save in files_saver().ledger.saves()))


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def kept(folder: Path) -> Path:
    """The one folder that a failed pack has left, with what was to be packed."""
    (found,) = [name for name in os.listdir(folder) if name.endswith(".kept")]
    return folder / found / "files"
