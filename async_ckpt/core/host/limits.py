"""Limits of the host: how many processors and how much memory this process may use.

In: the environment, /proc, control groups of either version. Out: two numbers. Knows nothing of: their uses.

The ranks of one host share both. Limits of control groups apply, whether they are set for a container or for a job.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

from ..spec import KIB, MIB

_ROOT: Final = Path("/")
# The variables in which torchrun, Open MPI, MPICH, and Slurm ("8(x2)") pass each rank the number of ranks on its host.
_LOCAL_SIZES: Final = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE")


def local_world_size() -> int:
    """The number of ranks on this host."""
    for name in _LOCAL_SIZES:
        number = os.environ.get(name, "").partition("(")[0]
        if number.isdecimal():
            return max(1, int(number))
    return 1


def num_cpus() -> int:
    """The number of processors that this process may use: its even share among the ranks of the host."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # All threads of a control group share its quota, whatever their priority: more threads would slow the training
    # down.
    return max(1, min(usable, _quota()) // local_world_size())


def free_memory_bytes(root: Path = _ROOT) -> int:
    """The memory that can be taken without swapping: of the machine, or of a control group if that has less."""
    free = _available_bytes(root)
    for folder, version in _groups(root, "memory"):
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, used = (_number(folder / name) for name in names)
        if limit is not None and used is not None:
            free = min(free, max(0, limit - used + _reclaimable_bytes(folder, version)))
    return free


def spare_memory_bytes() -> int:
    """The most memory that this rank takes if the user sets no budget: its share of half of the free memory."""
    return free_memory_bytes() // 2 // local_world_size()


@cache
def _quota(root: Path = _ROOT) -> int:
    """The number of processors that control groups grant this process; a large number if no group has a limit."""
    quotas = [math.inf]
    for folder, version in _groups(root, "cpu"):
        if version == 2:
            quota, _, period = (_text(folder / "cpu.max") or "max").partition(" ")
        else:
            quota, period = (_text(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period"))
        if quota.isdecimal() and period.isdecimal() and int(period):
            quotas.append(math.ceil(int(quota) / int(period)))
    least = min(quotas)
    return 1 << 30 if least == math.inf else max(1, int(least))


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """The folders of this process's control groups, each with its version, up to the root that the process sees."""
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        inner = top / path.lstrip("/")
        # A container may see its own group as the root, while the path in /proc is that outside of the container.
        for folder in (inner, *inner.parents):
            if folder.is_relative_to(top) and folder.is_dir():
                yield folder, 1 if controllers else 2


def _reclaimable_bytes(folder: Path, version: int) -> int:
    """The inactive part of the page cache: it counts as used memory, but the kernel drops it when memory is short."""
    name = "inactive_file" if version == 2 else "total_inactive_file"
    for line in (_text(folder / "memory.stat") or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdecimal():
            return int(value)
    return 0


def _available_bytes(root: Path) -> int:
    for line in (_text(root / "proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * KIB
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 8 * 1024 * MIB


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text is not None and text.isdecimal() else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
