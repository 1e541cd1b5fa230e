"""The `Trainer` of Transformers with checkpoints that are written in the background.

    from async_ckpt.integrations.transformers import AsyncCheckpointing, make_async, use

- `async_trainer.py`: the base class: the beginning of saves, the waits for them, and loading.
- `trainer_parts.py`: the parts of a trainer that are copied, and the kind of archive for them.
- `trainer_save.py`: one save, from its snapshot to the folder.
"""

from .async_trainer import AsyncCheckpointing, Layout, make_async, use

__all__ = ["AsyncCheckpointing", "Layout", "make_async", "use"]
