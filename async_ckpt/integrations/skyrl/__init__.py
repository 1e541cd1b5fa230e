"""SkyRL, with checkpoints that are written behind the training.

In: what its strategy, its trainers and its Tinker backend are called with. Out: folders and tars that they read, named
when they are durable. Knows nothing of: GPUs.

- `tinker_backend.py`: the checkpoint calls of the Tinker backend.
- `fsdp_ranks.py`: base classes for the FSDP strategy and for the workers that have it.
- `trainer_folder.py`: a base class for its trainers: their folder, and the file that names the newest one.
- `worker_calls.py`: what the workers are asked about a save that is under way.
"""

from __future__ import annotations

from .fsdp_ranks import FSDPCheckpoints, FSDPWorkerCheckpoints
from .tinker_backend import CheckpointBackend, Dispatch
from .trainer_folder import TrainerCheckpoints

__all__ = ["CheckpointBackend", "Dispatch", "FSDPCheckpoints", "FSDPWorkerCheckpoints", "TrainerCheckpoints"]
