"""Whether this process was forked from one with threads of a tokio runtime, which a forked child lacks.

In: nothing. Out: yes or no. Knows nothing of: requests, stores.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from .process import in_forked_child

_is_lost = False


def is_lost() -> bool:
    """Whether a process that this one was forked from had obstore and threads that are named like those of its runtime.

    Other libraries that use tokio have threads of the same names; then obstore is refused without need.
    """
    return _is_lost


@in_forked_child
def _look_at_parent() -> None:
    global _is_lost
    _is_lost = _is_lost or ("obstore" in sys.modules and _has_tokio(os.getppid()))


def _has_tokio(process: int) -> bool:
    """Whether a process has threads of a tokio runtime (on Linux)."""
    with suppress(OSError):
        tasks = f"/proc/{process}/task"
        for task in os.listdir(tasks):
            with suppress(OSError), open(f"{tasks}/{task}/comm", "rb") as file:
                if file.read().startswith(b"tokio-"):
                    return True
    return False
