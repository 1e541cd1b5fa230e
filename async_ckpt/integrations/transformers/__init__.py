"""The `Trainer` of Transformers with checkpoints that are written behind the training.

    from async_ckpt.integrations.transformers import AsyncCheckpointing, make_async, use

- `async_trainer.py`: the base class: when a save begins, what waits for it, and what is loaded.
- `trainer_parts.py`: what of a trainer is copied, and what kind of archive takes it.
- `trainer_save.py`: one save, from its snapshot to the folder.
"""

from .async_trainer import AsyncCheckpointing, Layout, make_async, use

__all__ = ["AsyncCheckpointing", "Layout", "make_async", "use"]
