"""The processes of a distributed training: which of them this one is, and what they tell each other once.

In: torch.distributed, what a launcher has set, or what the user says. Out: worlds; words of one rank to another.
Knows nothing of: checkpoints. There are no collectives here: a word is a key in the store that the process group was
started with, which any rank may read at any time.
"""

from __future__ import annotations

import itertools
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

from ..host.process import in_forked_child
from ..host.waits import growing_pauses

# From look to look at the store; it grows to the second.
_FIRST_LOOK_SECONDS: Final = 0.005
_LOOK_SECONDS: Final = 0.2


@dataclass(frozen=True, slots=True)
class World:
    """All processes that save one state together, and the rank of this process.

    `run_id` is what the user calls this start of them; None where they have a store to agree by.
    """

    rank: int = 0
    size: int = 1
    run_id: str | None = None
    store: Any = None  # torch's; None where the user has said which rank this is, and has given none
    has_group: bool = False  # even one process may have tensors that are spread over a group
    is_given: bool = False  # the user has said which rank this is

    @property
    def is_one(self) -> bool:
        return self.size == 1

    def words(self, topic: str) -> Words:
        """The words of the ranks about a topic, without those of an earlier start of the ranks."""
        return Words(self.store, f"{_start_of(self).prefix}/{topic}")

    def opening(self) -> Words:
        """Words of something that all ranks open in the same order: those of the next such thing at this start."""
        start = _start_of(self)
        return Words(self.store, f"{start.prefix}/{next(start.openings)}")

    def is_over(self) -> bool:
        """True if rank 0 is at a later start than this rank, of which it knows nothing. The next one is the same for
        both.
        """
        start = _start_of(self)
        start.is_over = start.is_over or start.missed(self.store)
        return start.is_over


def world_of(given: tuple[int, int] | None = None, run_id: str | None = None, store: Any = None) -> World:
    """The world that the user gives; else that of the initialised process group; else this process alone.

    Raises ValueError for ranks that cannot be, and TypeError for a `store` that is none of torch.distributed.
    """
    if run_id is not None and not isinstance(run_id, str):
        raise TypeError(f"run_id must be a text, got {run_id!r:.100}")
    if store is not None:
        _check_store(store)
    if given is not None:
        rank, size = _checked(given)
        if run_id is not None and store is not None:
            raise ValueError("run_id= is for ranks without a store; with store= leave it out")
        if size > 1 and not run_id and store is None:
            raise ValueError(
                f"ranks=({rank}, {size}) needs store=, a store of torch.distributed to which all ranks are connected; "
                "or run_id=, a text that is the same on all ranks, and new at every start of them"
            )
        return World(rank, size, run_id, store=store if size > 1 else None, is_given=True)
    if run_id is not None or store is not None:
        name = "store=" if run_id is None else "run_id="
        raise ValueError(f"{name} belongs to ranks=(rank, world_size); a process group needs none")
    if _group() is None:
        _check_environment()
    return world_of_group()


def world_of_group() -> World:
    """The world of the initialised process group; without one, this process alone."""
    group = _group()
    if group is None:
        return World()
    from torch.distributed import distributed_c10d

    rank, size = group
    return World(rank, size, store=distributed_c10d._get_default_store() if size > 1 else None, has_group=True)


def refuse_if_changed(world: World) -> None:
    """Raises ValueError where the process group that is initialised now has not the ranks that the world has."""
    group = None if world.is_given else _group()
    if group is None or group == (world.rank, world.size):
        return
    rank, size = group
    raise ValueError(
        f"there were {world.size} ranks, of which this was {world.rank}, and the process group now has "
        f"{size}, of which this is {rank}; make a new AsyncCheckpointer for each process group"
    )


def _check_store(store: Any) -> None:
    import torch.distributed as dist

    if not (dist.is_available() and isinstance(store, dist.Store)):  # type: ignore[attr-defined]
        raise TypeError(
            f'store must be a store of torch.distributed, such as TCPStore("host", 29500), got {store!r:.100}'
        )


def _checked(given: Any) -> tuple[int, int]:
    is_pair = isinstance(given, Sequence) and len(given) == 2 and not isinstance(given, str)
    if not is_pair or not all(isinstance(n, int) and not isinstance(n, bool) for n in given):
        raise TypeError(f"ranks must be (rank, world_size), such as (0, 4), got {given!r:.100}")
    rank, size = given
    if not 0 <= rank < size:
        raise ValueError(f"ranks=({rank}, {size}): the ranks of {size} processes are 0 to {size - 1}")
    return rank, size


def _check_environment() -> None:
    """Raises ValueError for what no launcher sets."""
    given = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if not (given[0] and given[1]):
        return
    try:
        rank, size = map(int, given)  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"RANK and WORLD_SIZE in the environment must be numbers: {error}") from error
    if not 0 <= rank < size:
        raise ValueError(
            f"RANK={rank} and WORLD_SIZE={size} in the environment cannot be: the ranks of {size} processes are 0 to "
            f"{size - 1}"
        )


class _WorldStart:
    """One start of a world, as this rank counts them by its store.

    A store may outlive the ranks: torchrun keeps its own, and starts all of them again. So each rank counts its
    starts in worlds of this size, which may grow and shrink. One that ended before this rank could count it is known
    by rank 0's count, which is ahead then; and where one agent has started all ranks, by the number of restarts,
    which agents of several nodes count each for itself. A rank that starts again alone is ahead of rank 0, and hears
    nothing.
    """

    def __init__(self, world: World) -> None:
        is_of_one_agent = os.environ.get("GROUP_WORLD_SIZE") == "1"
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_of_one_agent else "0"
        counter = f"async_ckpt/starts/{world.size}/{restarts}"
        self._own, self._of_rank_0 = f"{counter}/{world.rank}", f"{counter}/0"
        self._number = int(world.store.add(self._own, 1))
        self.missed(world.store)
        self.prefix = f"async_ckpt/{world.size}/{restarts}.{self._number}"
        self.openings = itertools.count(1)
        self.is_over = False  # rank 0 is at a later one

    def missed(self, store: Any) -> bool:
        """True if rank 0 has counted more starts; then this rank counts these, too."""
        missed = int(store.add(self._of_rank_0, 0)) - self._number
        if missed > 0:
            self._number = int(store.add(self._own, missed))
        return missed > 0


# By store: a new group in the same process has another.
_starts: WeakKeyDictionary[Any, _WorldStart] = WeakKeyDictionary()
_counting = threading.Lock()


@in_forked_child
def _forget_starts() -> None:
    global _starts, _counting
    _starts, _counting = WeakKeyDictionary(), threading.Lock()


def _start_of(world: World) -> _WorldStart:
    with _counting:  # one short question to the store: of two threads that asked it, each would count a start
        if world.store not in _starts:
            _starts[world.store] = _WorldStart(world)
        return _starts[world.store]


class Words:
    """Messages of ranks by keys in the store of their process group; each key is written once.

    Only short questions are asked, never one that waits in the store: that would hold up other calls of the process.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def say(self, key: str, word: str) -> None:
        self._store.set(f"{self._prefix}/{key}", word)

    def hear(self, keys: Sequence[str], wait: Callable[[float], None]) -> list[str]:
        """The words of these keys, once all are there. `wait` is called with seconds between looks, and may raise."""
        full = [f"{self._prefix}/{key}" for key in keys]
        pauses = growing_pauses(_FIRST_LOOK_SECONDS, _LOOK_SECONDS)
        while not self._store.check(full):
            wait(next(pauses))
        return [word.decode() for word in self._store.multi_get(full)]

    def forget(self, key: str) -> None:
        """Delete a word that no rank asks for any more. A key that was never said is no error."""
        self._store.delete_key(f"{self._prefix}/{key}")

    def is_said(self, key: str) -> bool:
        return self.are_said([key])

    def are_said(self, keys: Sequence[str]) -> bool:
        """True if all of these words are there."""
        return bool(self._store.check([f"{self._prefix}/{key}" for key in keys]))

    def said(self, key: str) -> str | None:
        """The word of a key, if it is there already."""
        return self.hear([key], lambda _: None)[0] if self.is_said(key) else None


def warn_of_ranks(*, stacklevel: int) -> None:
    """Warn that a file which every rank writes is that of the last one. The text is always the same, so Python shows
    it once.
    """
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
    group = _group()
    if group is not None:
        return group
    try:  # torchrun, and most other launchers
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1


def _group() -> tuple[int, int] | None:
    import torch.distributed as dist

    group = dist.GroupMember.WORLD if dist.is_available() else None
    return None if group is None else (group.rank(), group.size())
