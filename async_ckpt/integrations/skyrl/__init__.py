"""SkyRL, with checkpoints that are written in the background.

In: the calls of its strategy, its trainers and its Tinker backend. Out: folders and tars that they can read, named when
they are durable. Knows nothing of: GPUs.

- `tinker_backend.py`: the checkpoint calls of the Tinker backend.
- `fsdp_ranks.py`: base classes for the FSDP strategy and for its workers.
- `trainer_folder.py`: a base class for its trainers: their folder, and the file that names the newest checkpoint.
- `worker_calls.py`: calls to the workers about a save that is under way.
"""

from __future__ import annotations

from .fsdp_ranks import FSDPCheckpoints, FSDPWorkerCheckpoints
from .tinker_backend import CheckpointBackend, Dispatch
from .trainer_folder import TrainerCheckpoints

__all__ = ["CheckpointBackend", "Dispatch", "FSDPCheckpoints", "FSDPWorkerCheckpoints", "TrainerCheckpoints"]
