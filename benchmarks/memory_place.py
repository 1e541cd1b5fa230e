"""A RAM disk in front of a disk, compared with the disk alone: when is it worth it?

In: a setting. Out: figures by name. Knows nothing of: how they are printed.

Both keep one step. The archives on the disk are read as after a kill: `O_DIRECT` has left none of them in the page
cache.
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Final

from async_ckpt import AsyncCheckpointer

from .figures import Saves
from .limits import drop_cache
from .setting import Setting, side_by_side
from .table import Figure
from .workloads import tensors

MEMORY: Final = Path("/dev/shm")


def memory_place(setting: Setting) -> dict[str, Figure]:
    """No figures if there is no RAM disk."""
    if not os.access(MEMORY, os.W_OK):
        return {}
    state = {"model": tensors(setting.state_bytes // 2)}
    disk, behind = setting.folder / "alone", setting.folder / "behind"
    rounds = 2 * setting.rounds
    with TemporaryDirectory(dir=MEMORY) as folder:
        memory = Path(folder)
        alone, in_front = Saves(disk, state), Saves([memory, behind], state)
        with alone.checkpointer, in_front.checkpointer:
            committed = side_by_side(rounds, lambda: in_front.arrival_seconds(memory), alone.durable_seconds)
            durable = side_by_side(rounds, in_front.durable_seconds, alone.durable_seconds)
        restored = side_by_side(rounds, lambda: restore_seconds(memory, state), lambda: restore_seconds(disk, state))
    what = f"save of {setting.state_bytes / 2e9:.2g} GB with a RAM disk in front"
    limit = "the disk alone"
    return {
        "memory_committed": Figure(f"{what}, call to committed in memory", "s", limit, None, committed),
        "memory_durable": Figure("the same, call to durable on the disk", "s", limit, None, durable),
        "memory_restored": Figure("restore of that from the RAM disk, verified", "s", limit, None, restored),
    }


def restore_seconds(place: Path, state: Any) -> float:
    """Seconds to restore the newest step there, by a new checkpointer."""
    for archive in place.glob("step_*/*.tar"):
        drop_cache(archive)  # no effect on a RAM disk
    begin = perf_counter()
    with AsyncCheckpointer(place) as ckpt:
        ckpt.restore(state)
        return perf_counter() - begin


MEASURES: Final = {"memory": memory_place}
