"""Lightning's Trainer and Fabric, with checkpoints that are written in the background.

In: the checkpoints that Lightning collects, optimizers, and paths. Out: the files that Lightning would have written, or
folders of archives, each complete and durable when it gets its name; figures for loggers.
Knows nothing of: the content of a checkpoint.

- `plugin.py`: `AsyncTarCheckpointIO`, the only class that users need.
- `background_saves.py`: the saves, links and removals of one plugin, in order.
- `trainer_hooks.py`: the callback; `sharded_strategies.py`: strategies whose ranks save shards.
- `checkpoint_paths.py`: names, links, locks; `packages.py`: Lightning under its two names.
"""

from __future__ import annotations

from .plugin import AsyncTarCheckpointIO

__all__ = ["AsyncTarCheckpointIO"]
