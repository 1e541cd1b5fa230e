"""verl's checkpoint manager for FSDP, with checkpoints that are written behind the training.

In: a model, its optimizer and scheduler. Out: archives in the folders of verl's trainers, and their tracker, which
names what is durable. Knows nothing of: how an archive is written and read.

- `checkpoint_manager.py`: `VerlCheckpointManager`, which verl's engine, or a script of your own, saves and loads by.
- `part_folder.py`: the folder of one model in that of a step, and the tracker.
- `fsdp_state.py`: the weights of a model under FSDP, FSDP2 or neither.
- `engines.py`: verl's FSDP engines with this manager, by the name `async_ckpt`. It is imported by verl.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

# First: it may import our engines, which need the manager, which needs verl.
with suppress(ImportError):  # said when a manager is made
    import_module("verl")

from .checkpoint_manager import VerlCheckpointManager

__all__ = ["VerlCheckpointManager"]
