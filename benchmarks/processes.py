"""Facts that Linux reports about processes: their memory, and their processor time.

In: the number of a process. Out: numbers. Knows nothing of: what the processes do. Imports no module that needs much
memory.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_TICKS: Final = os.sysconf("SC_CLK_TCK")


def status(pid: int | str = "self") -> dict[str, str]:
    """The lines of its status, by name."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def status_bytes(key: str, pid: int | str = "self") -> int:
    """A size in its status; 0 if it is missing, as for a process that has ended."""
    return int(status(pid).get(key, "0").split()[0]) * 1024


def processor_seconds(pid: int, *, with_children: bool = False) -> float:
    """Processor seconds of all its threads, and with `with_children` of its child processes that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11 : 15 if with_children else 13])) / _TICKS
