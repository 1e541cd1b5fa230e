"""obstore's clients of one bucket: made at their first use, and again after the keys have expired or in a forked child.

In: settings. Out: a client for each kind of request. Knows nothing of: requests.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from ...plumbing import process
from .settings import BucketSettings, Kind

_all: weakref.WeakSet[Connections] = weakref.WeakSet()


class Connections:
    """obstore's clients of one bucket, one for each kind of request. A Client creates and owns it. From any thread.

    Raises ImportError if obstore is missing, and ValueError for options that it does not take.
    """

    def __init__(self, settings: BucketSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._stores: dict[Kind, Any] = {}  # under _lock
        self.store("small")  # reports wrong options at once
        _all.add(self)

    def store(self, kind: Kind) -> Any:
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
        """Look up keys again for the next request, since those of this client have expired."""
        with self._lock:
            if store in self._stores.values():
                self._stores = {}
        if self._settings.aws:
            self._settings.aws.renew()

    def begin_anew(self) -> None:
        """In a forked child: the clients, their connections and locks are the parent's."""
        for store in self._stores.values():
            process.never_end(store)
        self._lock, self._stores = threading.Lock(), {}
        if self._settings.aws:
            self._settings.aws.renew()


@process.in_forked_child
def _forget() -> None:
    for connections in list(_all):
        connections.begin_anew()
