"""Facts that this process has found out about the clients of places and their servers.

In: facts, each once. Out: the same facts, and a line in the log for each. Knows nothing of: requests.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from typing import Any, Final

from ...plumbing import process

_log: Final = logging.getLogger("async_ckpt")


class ClientFacts:
    """The facts about one client of one place, shared by all storages of that place. Thread-safe.

    Each field is only ever set to one other value, so two threads may set it at the same time.
    """

    def __init__(self, identity: str) -> None:
        self.identity = identity
        self.serves_runs = self.serves_files = False  # what was proved
        self.ignores_ranges = False  # a part of an object cannot be read
        self._logged: set[tuple[str, str]] = set()

    def log_once(self, shown: str, fact: str) -> None:
        """Log a fact about the place, unless it was logged before."""
        if (shown, fact) not in self._logged:
            self._logged.add((shown, fact))
            _log.warning("%s: %s", shown, fact)

    def __repr__(self) -> str:
        return f"<ClientFacts runs={self.serves_runs} files={self.serves_files} ignores_ranges={self.ignores_ranges}>"


known_of = process.OnceInProcess(ClientFacts)


_of_objects: weakref.WeakKeyDictionary[Any, ClientFacts] = weakref.WeakKeyDictionary()


def known_to(client: Any) -> ClientFacts:
    """The facts about a client that a user has made."""
    try:
        return _of_objects.setdefault(client, ClientFacts(""))
    except TypeError:  # the client's class has no weak references, or no hash
        return ClientFacts("")


def identity_of(*parts: object) -> str:
    """A text that is equal for clients of the same class, place and options, and shows none of these."""
    return hashlib.blake2b(repr(parts).encode(errors="replace"), digest_size=16).hexdigest()
