"""Which of the processes of a distributed training this one is.

In: torch.distributed, or what a launcher has set. Out: rank and world size. Knows nothing of: groups, meshes; asks no
other process.
"""

from __future__ import annotations

import os
import warnings


def warn_of_ranks(*, stacklevel: int) -> None:
    """Warn that a file which every rank writes is that of the last one. The text is always the same, so Python shows it once."""
    rank, world_size = ranks()
    if rank:
        warnings.warn(
            f"this is rank {rank} of {world_size}: if every rank saves to the same path, each replaces the file of the "
            "others. Save on rank 0 alone (`if dist.get_rank() == 0: …`), or give each rank a path of its own",
            RuntimeWarning,
            stacklevel=stacklevel + 1,
        )


def ranks() -> tuple[int, int]:
    """Rank and world size; (0, 1) where nothing says that there are others."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    try:  # torchrun, and most other launchers
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1
