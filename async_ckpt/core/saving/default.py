"""The savers and the host memory that all one-off saves, wrapped functions and saves of files of a process share.

In: nothing. Out: savers, and memory for whole tensors. Knows nothing of: states, paths.
"""

from __future__ import annotations

import threading
from typing import Final

from ..host.process import in_forked_child
from ..ranks.meeting import Meeting
from ..ranks.peers import Ranks
from ..ranks.world import World
from ..spec import MIB
from ..staging.host_copy import BufferPool
from .planner import pool_for
from .saver import Saver

# Files are read while others are written: a pack needs a few segments, however large the folder is.
_FILES_BYTES: Final = 256 * MIB
_SAME_PATH: Final = "call save on every rank, with the same path"

_one_off_saver: Saver | None = None
_ranks_saver: tuple[Ranks, Saver] | None = None
_slices_saver: tuple[World, Saver] | None = None
_files_saver = Saver(pool_for(host_bytes=_FILES_BYTES))
_host_memory = BufferPool()
_making = threading.Lock()


def one_off_saver() -> Saver:
    """The saver of all states that are saved to a path."""
    global _one_off_saver
    with _making:
        if _one_off_saver is None:
            _one_off_saver = Saver()
        return _one_off_saver


def ranks_saver(world: World) -> tuple[Ranks, Saver]:
    """The saver of all states that are spread over the ranks of a world and saved to a path, and these ranks."""
    global _ranks_saver
    with _making:
        if _ranks_saver is None or _ranks_saver[0].world != world:
            ranks = Ranks(Meeting(topic="one-off saves", advice=_SAME_PATH, is_of_paths=True), 1)
            _ranks_saver = ranks, Saver(ranks=ranks)
        return _ranks_saver


def slices_saver(world: World) -> Saver:
    """The saver of this process's parts of states that are spread over the ranks of a world."""
    global _slices_saver
    with _making:
        if _slices_saver is None or _slices_saver[0] != world:
            _slices_saver = world, Saver(ranks=Ranks(Meeting(), 1))
        return _slices_saver[1]


def files_saver() -> Saver:
    """The saver of all files."""
    return _files_saver


def host_memory() -> BufferPool:
    """Memory for whole tensors: of held snapshots, and of what foreign writers get copies of."""
    return _host_memory


def release() -> None:
    """Free the memory that is kept for the next save, call of a wrapped function, or snapshot."""
    if _one_off_saver is not None:
        _one_off_saver.pool.release()
    for of_world in (_ranks_saver, _slices_saver):
        if of_world is not None:
            of_world[1].pool.release()
    _host_memory.release()


@in_forked_child
def _forget() -> None:
    """Begin anew in a forked child, with a lock that no thread holds."""
    global _one_off_saver, _ranks_saver, _slices_saver, _files_saver, _host_memory, _making
    _one_off_saver = _ranks_saver = _slices_saver = None
    _files_saver = Saver(pool_for(host_bytes=_FILES_BYTES))
    _host_memory, _making = BufferPool(), threading.Lock()
