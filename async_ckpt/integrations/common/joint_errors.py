"""A rendezvous of all ranks that raises the error of any rank on every rank.

In: a value of each rank, or its error. Out: the values of all ranks, or an error on every rank. Knows nothing of:
saves, frameworks.

A save in the background fails only on the ranks that write. Where the training threads meet anyway, they exchange
errors, so that no rank waits in a collective for one that has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ...errors import PeerFailedError

T = TypeVar("T")


def lists_of_all_ranks(brought: list[Any], group: Any = None) -> list[Any]:
    """The lists of all ranks of a group (by default the world), concatenated; without a process group, this rank's."""
    if not (dist.is_available() and dist.is_initialized()):
        return brought
    of_ranks: list[list[Any]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(of_ranks, brought, group)
    return [one for of_rank in of_ranks for one in of_rank]


def meet(bring: Callable[[], T], gather: Callable[[list[Any]], list[Any]] = lists_of_all_ranks) -> list[T]:
    """The results of `bring` of all ranks, by rank. Every rank calls this, on its training thread.

    `gather` concatenates the lists of ranks: of all ranks, or only of those that can fail. Raises the error of `bring`,
    or PeerFailedError if `bring` has failed on another rank.
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
