"""The folders that accelerate writes under FSDP2, made from an archive of all ranks.

In: sharded state dicts, and their archive as it becomes durable. Out: folders of torch.distributed.checkpoint.
Knows nothing of: trainers.

accelerate writes these folders by collectives, which would hold the training. Here each rank writes its shards to an
archive, and one rank makes the folders from that, without the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch

from .dcp import to_dcp
from .training_archive import TrainingArchive

# The folders of the parts, by accelerate's names.
_FOLDERS: Final = {"model": "pytorch_model_fsdp_0", "optimizer": "optimizer_0"}


def sharded_parts(model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    """The state dicts of a sharded model and its optimizer by names of parameters: views, without communication."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    inner = getattr(optimizer, "optimizer", optimizer)
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, inner)}


class FsdpFolders(TrainingArchive):
    """An archive of these parts that does not become a part of the checkpoint itself, but folders in it."""

    def take_into(self, folder: str) -> None:
        """Wait until the archive is durable, and make the folders. Raises the error of its save."""
        archive = self.durable()
        for part in self.parts:
            to_dcp(archive, Path(folder, _FOLDERS[part]), select=part)
