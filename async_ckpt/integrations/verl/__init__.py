"""verl's checkpoint manager for FSDP, with checkpoints that are written in the background.

In: a model, its optimizer and scheduler. Out: archives in the folders of verl's trainers, and their tracker, which
names the newest durable step. Knows nothing of: how an archive is written and read.

- `checkpoint_manager.py`: `VerlCheckpointManager`, with which verl's engine, or your own script, saves and loads.
- `part_folder.py`: the folder of one model in the folder of a step, and the tracker.
- `fsdp_state.py`: the weights of a model under FSDP, FSDP2 or neither.
- `engines.py`: verl's FSDP engines with this manager, for the vendor `async_ckpt`. Imported by verl.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

# First: it may import our engines, which need the manager, which needs verl.
with suppress(ImportError):  # raised when a manager is constructed
    import_module("verl")

from .checkpoint_manager import VerlCheckpointManager

__all__ = ["VerlCheckpointManager"]
