"""obstore's threads: whether this process has them.

In: nothing. Out: a refusal where they are missing. Knows nothing of: stores, requests.

obstore has one tokio runtime per process, made by its first request, and never makes another. A forked child inherits
the runtime without its threads, so that a request there would never be answered, nor reach a timeout. It would also
harm the parent: both share the runtime's epoll instance, which hands the parent's threads an address in the child's
memory for each socket that the child registers. So no request is made by an inherited runtime.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

from ...errors import StorageUnavailableError
from ...host.process import in_forked_child

_starting = threading.Lock()  # held while the runtime starts, which every other request needs, too
_started_in: int | None = None  # the process whose runtime it is, if there is one
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
    """To be called before each request: see that obstore has its runtime here, with all threads. Raises as `require`."""
    require(url)
    if _started_in is None:
        with _starting:
            if _started_in is None:
                _start()


def _start() -> None:
    global _started_in
    import obstore
    from obstore.store import MemoryStore

    _started_in = os.getpid()  # before there is a runtime: a fork may come at any moment
    obstore.put(MemoryStore(), "any", b"")


@in_forked_child
def _forget() -> None:
    global _is_lost, _starting
    _is_lost = _is_lost or _started_in is not None or _is_in_parent()
    _starting = threading.Lock()


def _is_in_parent() -> bool:
    """Whether other code of the parent has started obstore's runtime: on Linux, by the names of the parent's threads.

    Those of another library with tokio have the same names; then obstore is refused without need.
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
