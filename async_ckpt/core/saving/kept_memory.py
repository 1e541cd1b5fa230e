"""The savers and the host memory that a process shares among all its one-off saves, wrapped functions and saves of
files.

In: nothing. Out: savers, and memory for whole tensors. Knows nothing of: states, paths.
"""

from __future__ import annotations

import threading
from typing import Any, Final

from ..host.process import in_forked_child
from ..ranks.meeting import Meeting
from ..ranks.peers import Ranks
from ..ranks.world import World
from ..spec import MIB
from ..staging.host_copy import BufferPool
from .planner import pool_for
from .saver import Saver

# Files are read while others are written, so a pack of files needs only a few segments, however large the folder is.
_FILES_BYTES: Final = 256 * MIB
_SAME_PATH: Final = "call save on every rank, with the same path"


class _Shared:
    """The shared savers and memory. A forked child creates them anew, with a lock that no thread holds."""

    def __init__(self) -> None:
        self.one_off, self.files = Saver(), Saver(pool_for(host_bytes=_FILES_BYTES))
        self.host_memory = BufferPool()
        self._making = threading.Lock()
        # By topic: the last world whose ranks saved together, their `Ranks`, and their saver.
        self.of_ranks: dict[str, tuple[World, Ranks, Saver]] = {}

    def of_world(self, world: World, topic: str = "", **more: Any) -> tuple[Ranks, Saver]:
        """The ranks of a world that save together, and their saver. `more` goes to `Meeting`."""
        with self._making:
            if topic not in self.of_ranks or self.of_ranks[topic][0] != world:
                ranks = Ranks(Meeting(topic=topic, **more), 1)
                self.of_ranks[topic] = world, ranks, Saver(ranks=ranks)
            return self.of_ranks[topic][1:]


_shared = _Shared()


def one_off_saver() -> Saver:
    """The saver of all states that are saved to a path by one process."""
    return _shared.one_off


def ranks_saver(world: World) -> tuple[Ranks, Saver]:
    """The ranks of a world, and the saver of all states that are sharded over them and saved to a path."""
    return _shared.of_world(world, "one-off saves", advice=_SAME_PATH, is_of_paths=True)


def slices_saver(world: World) -> Saver:
    """The saver of this process's shards of states that are sharded over the ranks of a world."""
    return _shared.of_world(world)[1]


def files_saver() -> Saver:
    """The saver of all saves of files."""
    return _shared.files


def host_memory() -> BufferPool:
    """Memory for whole tensors: for held snapshots, and for the copies that foreign writers get."""
    return _shared.host_memory


def release() -> None:
    """Free the memory that is kept for the next save, wrapped call or snapshot."""
    for saver in (_shared.one_off, *(saver for _, _, saver in _shared.of_ranks.values())):
        saver.pool.release()
    _shared.host_memory.release()


@in_forked_child
def _forget() -> None:
    global _shared
    _shared = _Shared()
