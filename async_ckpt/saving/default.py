"""What one-off saves, wrapped functions and saves of files share: one saver of each kind for the process, and their memory.

In: nothing. Out: savers, and memory for whole tensors. Knows nothing of: states, paths.
"""

from __future__ import annotations

import threading
from typing import Final

from ..host.process import in_forked_child
from ..ranks.attempts import Ranks
from ..ranks.world import World
from ..spec import MIB
from ..staging.host_copy import BufferPool
from .saver import Saver

# Files are read while others are written: what a pack needs is a few segments, however large the folder is.
_FILES_BYTES: Final = 256 * MIB

_one_off_saver: Saver | None = None
_slices_saver: tuple[World, Saver] | None = None
_files_saver = Saver(host_bytes=_FILES_BYTES)
_host_memory = BufferPool()
_held_memory = BufferPool(held=True)
_making = threading.Lock()


def one_off_saver() -> Saver:
    """One for all saves of a state to a path."""
    global _one_off_saver
    with _making:
        if _one_off_saver is None:
            _one_off_saver = Saver()
        return _one_off_saver


def slices_saver(world: World) -> Saver:
    """One for what this process has of states that are spread over the ranks of a world."""
    global _slices_saver
    with _making:
        if _slices_saver is None or _slices_saver[0] != world:
            _slices_saver = world, Saver(ranks=Ranks(None, None, 1))
        return _slices_saver[1]


def files_saver() -> Saver:
    """One for all files of the process."""
    return _files_saver


def host_memory() -> BufferPool:
    """Memory for whole tensors, of which foreign writers get copies: one for the process."""
    return _host_memory


def held_memory() -> BufferPool:
    """Memory for snapshots that are held: one for the process."""
    return _held_memory


def release() -> None:
    """Give back what is kept for the next save of a state, call of a wrapped function, or snapshot."""
    if _one_off_saver is not None:
        _one_off_saver.pool.release()
    if _slices_saver is not None:
        _slices_saver[1].pool.release()
    _host_memory.release()
    _held_memory.release()


@in_forked_child
def _forget() -> None:
    """All of its own; and who held the lock is not here to release it."""
    global _one_off_saver, _slices_saver, _files_saver, _host_memory, _held_memory, _making
    _one_off_saver, _slices_saver, _files_saver = None, None, Saver(host_bytes=_FILES_BYTES)
    _host_memory, _held_memory, _making = BufferPool(), BufferPool(held=True), threading.Lock()
