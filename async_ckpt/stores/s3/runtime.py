"""obstore's threads, which a forked child lacks.

In: nothing. Out: an error if they are missing. Knows nothing of: stores, requests.

obstore has one tokio runtime per process, made by its first request, and never makes another. A forked child inherits
the runtime without its threads, so a request there would neither be answered nor time out. It would also harm the
parent: both share the runtime's epoll instance, which gives the parent's threads an address in the child's memory for
each socket that the child registers. So an inherited runtime makes no request.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

from ...core.host.process import in_forked_child
from ...errors import StorageUnavailableError

_starting = threading.Lock()  # held while the runtime starts, since every request needs it
_started_in: int | None = None  # the process that has started the runtime
_is_lost = False  # the runtime was started before a fork that led to this process


def require(url: str) -> None:
    """Raise StorageUnavailableError if this process has obstore's runtime without its threads."""
    if _is_lost or _started_in not in (None, os.getpid()):
        raise StorageUnavailableError(
            f"{url}: this process was forked from one that had used a store through obstore, whose threads no forked "
            'process has; start it by "spawn" or "forkserver" (multiprocessing.get_context, DataLoader(…, '
            'multiprocessing_context="spawn")), fork before the first request, or use another client in it: '
            'Place(url, engine="fsspec")',
            path=url,
        )


def start(url: str) -> None:
    """Start obstore's runtime, if it is not started. To be called before each request. Raises as `require` does."""
    require(url)
    if _started_in is None:
        with _starting:
            if _started_in is None:
                _start()


def _start() -> None:
    global _started_in
    import obstore
    from obstore.store import MemoryStore

    _started_in = os.getpid()  # before the runtime starts: a fork may come at any moment
    obstore.put(MemoryStore(), "any", b"")


@in_forked_child
def _forget() -> None:
    global _is_lost, _starting
    _is_lost = _is_lost or _started_in is not None or _is_in_parent()
    _starting = threading.Lock()


def _is_in_parent() -> bool:
    """Whether other code of the parent has started obstore's runtime, by the names of the parent's threads (on Linux).

    Other libraries that use tokio have threads of the same names; then obstore is refused without need.
    """
    if "obstore" not in sys.modules:
        return False
    with suppress(OSError):
        tasks = f"/proc/{os.getppid()}/task"
        for task in os.listdir(tasks):
            with suppress(OSError), open(f"{tasks}/{task}/comm", "rb") as file:
                if file.read().startswith(b"tokio-"):
                    return True
    return False
