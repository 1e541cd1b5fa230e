"""What Linux tells of processes: their memory, and the time that they have had of the processors.

In: the number of a process. Out: numbers. Knows nothing of: what the processes do. Imports nothing that takes memory.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_TICKS: Final = os.sysconf("SC_CLK_TCK")


def status(pid: int | str = "self") -> dict[str, str]:
    """The lines of its status, by their names."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def status_bytes(key: str, pid: int | str = "self") -> int:
    """An entry of its status that is a size; 0 where there is none, as of a process that has ended."""
    return int(status(pid).get(key, "0").split()[0]) * 1024


def processor_seconds(pid: int, *, with_children: bool = False) -> float:
    """Of all its threads; and of its processes that have ended, if they are to count."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11 : 15 if with_children else 13])) / _TICKS
