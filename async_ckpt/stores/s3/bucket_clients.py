"""obstore's clients of one bucket: made at their first use, and again after the keys have expired or in a forked child.

In: settings. Out: a client for each kind of request. Knows nothing of: requests.

obstore has one tokio runtime per process, made by its first request, and never makes another. A forked child inherits
the runtime without its threads, so a request there would neither be answered nor time out. It would also harm the
parent: both share the runtime's epoll instance, which gives the parent's threads an address in the child's memory for
each socket that the child registers. So no request is made with an inherited runtime.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

from ...errors import StorageUnavailableError
from ...plumbing import process
from .settings import BucketSettings, Kind

_all: weakref.WeakSet[Connections] = weakref.WeakSet()
_starting = threading.Lock()  # held while the runtime starts, since every request needs it
_started_in: int | None = None  # the process that has started the runtime


class Connections:
    """obstore's clients of one bucket, one for each kind of request. A Client creates and owns it. Thread-safe.

    Raises ImportError if obstore is missing, ValueError for options that obstore rejects, and StorageUnavailableError
    in a process that has lost the threads of obstore.
    """

    def __init__(self, settings: BucketSettings) -> None:
        _refuse_if_inherited(settings.url)
        self._settings = settings
        self._lock = threading.Lock()
        self._stores: dict[Kind, Any] = {"small": self._make("small")}  # reports wrong options at once; under _lock
        _all.add(self)

    def store(self, kind: Kind, shown: str) -> Any:
        """The client for a kind of request. The first call starts obstore's runtime. Errors show `shown`."""
        _refuse_if_inherited(shown)
        if _started_in is None:
            with _starting:
                if _started_in is None:
                    _start_runtime()
        with self._lock:
            store = self._stores.get(kind)
        if store is None:
            store = self._make(kind)
            with self._lock:
                store = self._stores.setdefault(kind, store)
        return store

    def _make(self, kind: Kind) -> Any:
        settings = self._settings
        try:
            from obstore.store import S3Store, from_url
        except ImportError:
            raise ImportError(f'{settings.scheme}:// needs obstore; pip install "async_ckpt[s3]"') from None
        try:
            if settings.aws:
                return S3Store(settings.bucket, **settings.arguments(kind))
            return from_url(f"{settings.scheme}://{settings.bucket}", **settings.arguments(kind))
        except Exception as error:
            problem = settings.scrub(str(error).partition("\n")[0])
        # Not within the `except` block, since the text of obstore's error may hold keys.
        raise ValueError(f"options of {settings.url}: {problem}")

    def renew(self, store: Any) -> None:
        """Look up keys again for the next request, since the keys of this client have expired."""
        with self._lock:
            if store in self._stores.values():
                self._stores = {}
        if self._settings.aws:
            self._settings.aws.renew()

    def begin_anew(self) -> None:
        """In a forked child, start without clients, since their connections and locks belong to the parent."""
        for store in self._stores.values():
            process.never_end(store)
        self._lock, self._stores = threading.Lock(), {}
        if self._settings.aws:
            self._settings.aws.renew()


def _refuse_if_inherited(shown: str) -> None:
    """Raise StorageUnavailableError if this process has inherited obstore's runtime without its threads."""
    if process.has_lost_tokio() or _started_in not in (None, os.getpid()):
        raise StorageUnavailableError(
            f"{shown}: this process was forked from one that had used a store through obstore, whose threads no forked "
            'process has; start it by "spawn" or "forkserver" (multiprocessing.get_context, DataLoader(…, '
            'multiprocessing_context="spawn")), fork before the first request, or use another client in it: '
            'Place(url, engine="fsspec")',
            path=shown,
        )


def _start_runtime() -> None:
    global _started_in
    import obstore
    from obstore.store import MemoryStore

    _started_in = os.getpid()  # before the runtime starts: a fork may come at any moment
    obstore.put(MemoryStore(), "any", b"")


@process.in_forked_child
def _forget() -> None:
    global _starting
    _starting = threading.Lock()
    for connections in list(_all):
        connections.begin_anew()
