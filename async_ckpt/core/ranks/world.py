"""The processes of a distributed training, and which of them this process is.

In: torch.distributed, a launcher's environment variables, or the user's arguments. Out: worlds. Knows nothing of:
messages between ranks.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..spec import integer


class World(NamedTuple):
    """All processes that save one state together, and the rank of this process."""

    rank: int = 0
    size: int = 1
    store: Any = None  # a store of torch.distributed; None for a single process
    has_group: bool = False  # even a single process may have tensors that are sharded over a group
    is_given: bool = False  # the user has given the rank and size

    @property
    def is_one(self) -> bool:
        return self.size == 1


def world_of(given: tuple[int, int] | None = None, store: Any = None) -> World:
    """The world given by the user; otherwise that of the initialised process group; otherwise this process alone.

    Raises ValueError for impossible ranks, and TypeError for a `store` that is not from torch.distributed.
    """
    if store is not None:
        _check_store(store)
    if given is not None:
        rank, size = _checked(given)
        if size > 1 and store is None:
            raise ValueError(
                f"ranks=({rank}, {size}) needs store=, a store of torch.distributed to which all ranks are connected, "
                'such as TCPStore("host of rank 0", 29500, is_master=rank == 0)'
            )
        return World(rank, size, store if size > 1 else None, is_given=True)
    if store is not None:
        raise ValueError("store= needs ranks=(rank, world_size); leave it out if there is a process group")
    if _group() is None:
        _check_environment()
    return world_of_group()


def world_of_group() -> World:
    """The world of the initialised process group; without a group, this process alone."""
    group = _group()
    if group is None:
        return World()
    from torch.distributed import distributed_c10d

    rank, size = group
    return World(rank, size, distributed_c10d._get_default_store() if size > 1 else None, has_group=True)


def refuse_if_changed(world: World) -> None:
    """Raises ValueError if the process group that is initialised now has other ranks than `world`."""
    group = None if world.is_given else _group()
    if group is None or group == (world.rank, world.size):
        return
    rank, size = group
    raise ValueError(
        f"this process was rank {world.rank} of {world.size}, but in the current process group it is rank {rank} of "
        f"{size}; create a new AsyncCheckpointer for each process group"
    )


def _check_store(store: Any) -> None:
    import torch.distributed as dist

    if not (dist.is_available() and isinstance(store, dist.Store)):  # type: ignore[attr-defined]
        raise TypeError(
            f'store must be a store of torch.distributed, such as TCPStore("host", 29500), got {store!r:.100}'
        )


def _checked(given: Any) -> tuple[int, int]:
    is_pair = isinstance(given, Sequence) and len(given) == 2 and not isinstance(given, str)
    try:
        rank, size = map(integer, given if is_pair else ())
    except (TypeError, ValueError):
        raise TypeError(f"ranks must be (rank, world_size), such as (0, 4), got {given!r:.100}") from None
    if not 0 <= rank < size:
        raise ValueError(f"ranks=({rank}, {size}): the ranks of {size} processes are 0 to {size - 1}")
    return rank, size


def _check_environment() -> None:
    """Raises ValueError if RANK and WORLD_SIZE have values that no launcher sets."""
    given = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if not (given[0] and given[1]):
        return
    try:
        rank, size = map(int, given)  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"RANK and WORLD_SIZE in the environment must be numbers: {error}") from error
    if not 0 <= rank < size:
        raise ValueError(
            f"RANK={rank} and WORLD_SIZE={size} in the environment contradict each other: the ranks of {size} "
            "processes are 0 to "
            f"{size - 1}"
        )


def warn_of_ranks(*, stacklevel: int) -> None:
    """Warn that each rank replaces the file of the others. Python shows the constant text only once."""
    rank, world_size = ranks()
    if rank:
        warnings.warn(
            f"this is rank {rank} of {world_size}: if every rank saves to the same path, each replaces the file of the "
            "others. Save on rank 0 alone (`if dist.get_rank() == 0: …`), or give each rank a path of its own",
            RuntimeWarning,
            stacklevel=stacklevel + 1,
        )


def ranks() -> tuple[int, int]:
    """Rank and world size; (0, 1) if nothing indicates that there are other ranks."""
    group = _group()
    if group is not None:
        return group
    try:  # set by torchrun and most other launchers
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1


def _group() -> tuple[int, int] | None:
    import torch.distributed as dist

    group = dist.GroupMember.WORLD if dist.is_available() else None
    return None if group is None else (group.rank(), group.size())
