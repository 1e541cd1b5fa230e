"""A checkpoint engine for verl: weights go to rollouts through host memory, or through the root of a `Publisher`.

verl imports this module on every worker, because its configuration names it as
`actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module`. The import registers the engine `async_ckpt`.

- `weight_engine.py`: the engine, with the calls of verl's manager.
- `weight_sender.py`: rank 0 of the training; `gathered.py`: its weights as they come, copied to host memory.
- `weight_receiver.py`: a worker of a rollout: the tensors of a version, in memory of the sender or in a folder of the
  host.
- `sync_line.py`: the sender tells the receivers that a version can be read, or why it cannot; `blocking_calls.py`.
"""

from __future__ import annotations

from .weight_engine import BACKEND, AsyncCkptEngine

__all__ = ["BACKEND", "AsyncCkptEngine"]
