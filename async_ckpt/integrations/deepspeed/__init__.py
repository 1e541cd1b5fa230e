"""DeepSpeed's engine, with checkpoints that are written behind the training.

In: an engine. Out: the files that DeepSpeed would have written, or archives, and `latest` when those of all ranks are
durable. Knows nothing of: the contents of DeepSpeed's files.

- `checkpoint_engine.py`: `use`, and the object that takes the place of the engine's checkpoint engine.
- `tag_folder.py`: the folder of one checkpoint, which all ranks fill.
- `trainer_files.py`: the files of an engine in the folder of a trainer's checkpoint.
- `zero_archive.py`: the state of ZeRO 1 to 3 as slices of whole parameters.
- `zero_guard.py`: what a ZeRO optimizer changes in its steps.
"""

from __future__ import annotations

from .checkpoint_engine import DeepSpeedCheckpoints, use

__all__ = ["DeepSpeedCheckpoints", "use"]
