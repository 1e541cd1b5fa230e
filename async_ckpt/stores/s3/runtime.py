"""obstore's threads, which a forked child lacks.

In: nothing. Out: an error if they are missing. Knows nothing of: stores, requests.

obstore has one tokio runtime per process, made by its first request, and never makes another. A forked child inherits
the runtime without its threads, so a request there would neither be answered nor time out. It would also harm the
parent: both share the runtime's epoll instance, which gives the parent's threads an address in the child's memory for
each socket that the child registers. So an inherited runtime makes no request.
"""

from __future__ import annotations

import os
import threading

from ...errors import StorageUnavailableError
from ...plumbing import process

_starting = threading.Lock()  # held while the runtime starts, since every request needs it
_started_in: int | None = None  # the process that has started the runtime


def require(url: str) -> None:
    """Raise StorageUnavailableError if this process has obstore's runtime without its threads."""
    if process.has_lost_tokio() or _started_in not in (None, os.getpid()):
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


@process.in_forked_child
def _forget() -> None:
    global _starting
    _starting = threading.Lock()
