"""Which of the processes of a distributed training this one is.

In: torch.distributed, or what a launcher has set. Out: rank and world size. Knows nothing of: groups, meshes; asks no
other process.
"""

from __future__ import annotations

import os


def ranks() -> tuple[int, int]:
    """Rank and world size; (0, 1) where nothing says that there are others."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    try:  # torchrun, and most other launchers
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1
