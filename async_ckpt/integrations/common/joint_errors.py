"""A meeting of all ranks at which each learns of an error of any.

In: what a rank brings, or its error. Out: what all have brought, or an error on every rank. Knows nothing of: saves,
frameworks.

A save in the background fails on the ranks that write. Where the training thread meets the others anyway, they hear of
it, so that none waits in a collective for one that has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ...errors import PeerFailedError

T = TypeVar("T")


def lists_of_all_ranks(brought: list[Any], group: Any = None) -> list[Any]:
    """The lists of all ranks, of the world or a group, one after the other; without a process group, this rank's."""
    if not (dist.is_available() and dist.is_initialized()):
        return brought
    of_ranks: list[list[Any]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(of_ranks, brought, group)
    return [one for of_rank in of_ranks for one in of_rank]


def meet(bring: Callable[[], T], gather: Callable[[list[Any]], list[Any]] = lists_of_all_ranks) -> list[T]:
    """Everything that the ranks bring, by rank. Every rank calls this, on its training thread.

    `gather` concatenates lists of ranks: here of all, or of those alone that can fail. Raises the error of `bring`, and
    PeerFailedError if another rank's has failed.
    """
    brought, failed = None, None
    try:
        brought = bring()
    except Exception as error:
        failed = error
    of_ranks = gather([(brought, None if failed is None else f"{type(failed).__name__}: {failed}")])
    if failed is not None:
        raise failed
    for rank, (_, why) in enumerate(of_ranks):
        if why is not None:
            raise PeerFailedError(f"rank {rank} has failed: {why}", rank=rank)
    return [value for value, _ in of_ranks]
