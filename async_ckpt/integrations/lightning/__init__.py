"""Lightning's Trainer and Fabric, with checkpoints that are written behind the training.

In: the checkpoints that Lightning collects, optimizers, and paths. Out: the files that Lightning would have written, or
folders of archives, each whole and durable as soon as it has its name; figures for loggers.
Knows nothing of: what is in a checkpoint.

- `plugin.py`: `AsyncTarCheckpointIO`, which is all that users see.
- `background_saves.py`: the saves, links and removals of one plugin, in order.
- `trainer_hooks.py`: the callback; `sharded_strategies.py`: strategies whose ranks save shards.
- `checkpoint_paths.py`: names, links, locks; `packages.py`: Lightning under its two names.
"""

from __future__ import annotations

from .plugin import AsyncTarCheckpointIO

__all__ = ["AsyncTarCheckpointIO"]
