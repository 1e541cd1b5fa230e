"""DeepSpeed's engine, with checkpoints that are written in the background.

In: an engine. Out: the files that DeepSpeed would have written, or archives; then `latest`, when the files of all ranks
are durable. Knows nothing of: the content of DeepSpeed's files.

- `checkpoint_engine.py`: `use`, and the object that replaces the engine's checkpoint engine.
- `tag_folder.py`: the folder of one checkpoint, which all ranks fill.
- `trainer_files.py`: the files of an engine in the folder of a trainer's checkpoint.
- `zero_archive.py`: the state of ZeRO 1 to 3 as slices of full parameters.
- `zero_guard.py`: the guard of a ZeRO optimizer.
"""

from __future__ import annotations

from .checkpoint_engine import DeepSpeedCheckpoints, use

__all__ = ["DeepSpeedCheckpoints", "use"]
