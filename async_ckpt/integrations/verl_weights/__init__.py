"""A checkpoint engine for verl: weights go to rollouts through host memory, or through the root of a `Publisher`.

verl imports this module on every worker, because its configuration names it as
`actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module`. The import registers the engine `async_ckpt`.

- `weight_engine.py`: the engine, with the methods that verl's manager calls. `blocking_calls.py` runs blocking
  calls on threads.
- `weight_sender.py`: rank 0 of the training. `gathered.py` copies the exported weights to host memory.
- `weight_receiver.py`: a worker of a rollout. It reads the tensors of a version from the sender's memory, or from a
  folder of the host.
- `sync_line.py`: the sender reports to the receivers that a version can be read, or why it cannot.
"""

from __future__ import annotations

from .weight_engine import BACKEND, AsyncCkptEngine

__all__ = ["BACKEND", "AsyncCkptEngine"]
