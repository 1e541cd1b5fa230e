"""Files and folders as accelerate writes them under FSDP2, made from an archive of all ranks.

In: sharded state dicts, and their archive as it becomes durable. Out: folders of torch.distributed.checkpoint, or files
of whole tensors. Knows nothing of: trainers.

accelerate writes these by collectives, which would hold the training. Here each rank writes its shards to an archive,
and one rank makes the folders or files from that, without the others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from ...oneoff import load
from ..dcp import to_dcp
from .training_archive import TrainingArchive

# The folders and files of the parts, by accelerate's names.
_FOLDERS: Final = {"model": "pytorch_model_fsdp_0", "optimizer": "optimizer_0"}
_FILES: Final = {"model": "pytorch_model_fsdp.bin", "optimizer": "optimizer.bin"}


def sharded_parts(model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    """The state dicts of a sharded model and its optimizer by names of parameters: views, without communication."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    inner = getattr(optimizer, "optimizer", optimizer)
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, inner)}


class FsdpFiles(TrainingArchive):
    """An archive of these parts that does not become a part of the checkpoint itself, but files of whole tensors in it.

    `save_model`, if it is set, is called with the folder and the weights.
    """

    save_model: Callable[..., object] | None = None

    def take_into(self, folder: str) -> None:
        """Wait until the archive is durable, read it to memory, and make the files. Raises the error of its save."""
        state = load(self.durable())
        if self.save_model is not None:
            self.save_model(folder, state_dict={**state["model"]})  # which it empties
        for part in self.parts:
            torch.save(state[part], Path(folder, _FILES[part]))


class FsdpFolders(TrainingArchive):
    """An archive of these parts that does not become a part of the checkpoint itself, but folders in it."""

    def take_into(self, folder: str) -> None:
        """Wait until the archive is durable, and make the folders. Raises the error of its save."""
        archive = self.durable()
        for part in self.parts:
            to_dcp(archive, Path(folder, _FOLDERS[part]), select=part)
