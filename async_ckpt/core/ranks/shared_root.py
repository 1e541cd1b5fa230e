"""The test that all ranks share a root, and not a folder that each node has for itself.

In: a root, on each rank. Out: what is known of that. Knows nothing of: saves.

Rank 0 puts a file there ahead of its first archive, and then says by the store of the ranks that it has. A rank that
does not find the file, though rank 0 has said so, tries to put one of the same name: a place refuses that at once if
there is one already, whatever its listings still hide. If it does not refuse, the root is not the one that rank 0
has.
"""

from __future__ import annotations

import json
import secrets
from contextlib import suppress

from ...errors import CheckpointError, CorruptCheckpointError
from ..fields import count, parsed, table
from ..storage.interface import Storage
from .store import Words, quietly
from .world import World


class SharedRoot:
    """One root of one checkpointer, as this rank knows it. Blocking calls, from any thread."""

    def __init__(self, storage: Storage, key: str, world: World, token: str, words: Words, *, folder: str = "") -> None:
        """`key` is the name of the root for all ranks, and `token` that of the claim, which lies in `folder`."""
        self._storage, self._key, self._world, self._words = storage, key, world, words
        self._claim = f"{folder}/world.{token}.json" if folder else f"world.{token}.json"
        self._folder, self._nonce = folder, secrets.token_hex(8)
        self._is_claimed = self._is_seen = False
        # On another rank: rank 0 has said that it has put there what proves the root the same.
        self.is_named = False
        self.is_shared = False  # by all ranks: each has had a part in a commit there
        self.lead = 0  # the rank that was the first to put the file which this one sees
        self.apart_rank: int | None = None  # one that does not see here what rank 0 has written

    @property
    def is_apart(self) -> bool:
        return self.apart_rank is not None

    @property
    def where(self) -> str:
        """The root, for messages."""
        return self._storage.locate(self._folder)

    def claim(self) -> None:
        """On rank 0, before anything is written: say that this start of the ranks writes here."""
        if not self._is_claimed:
            with suppress(FileExistsError):  # a put may arrive though it was answered with an error
                self._put_claim()
            self._is_claimed = True
            self._say("claimed")

    def sees(self) -> bool | None:
        """On another rank: whether this is the root that rank 0 writes to; None as long as that is not known.

        Raises CorruptCheckpointError.
        """
        if self._is_seen or self.is_apart:
            return self._is_seen
        try:
            rank = self._rank_of_claim()
        except FileNotFoundError:
            if not self.is_named:
                self.is_named = self._heard("claimed") is not None
                return None
            try:
                self._put_claim()
            except FileExistsError:
                return None  # it is shown soon
            if self._heard("withdrawn") is not None:  # rank 0 has given the save up, as its decision tells
                self._delete_claim()
                return None
            self.lead = self._world.rank
            return False
        self.lead, self._is_seen = rank, rank == 0
        return self._is_seen  # else it is this rank's own, or that of another one on this node

    def note_apart(self) -> None:
        """Note that each node has a folder of its own here, and that this is known to all ranks."""
        self._is_seen = self.is_shared = True

    def say_apart(self) -> None:
        """On another rank: say that this is not the root that rank 0 writes to."""
        self.apart_rank = self._world.rank
        self._say("apart")

    def withdraw(self) -> None:
        """Delete the claim of one attempt. A rank that still looks for it is told first, or it would take the root for
        another one than that of rank 0.
        """
        self._say("withdrawn")
        self._delete_claim()

    def found_apart(self) -> bool:
        """True if some rank has said that it sees another root than rank 0. Nothing is asked once that is known."""
        if not (self.is_shared or self.is_apart):
            self.apart_rank = self._heard("apart")
        return self.is_apart

    def _rank_of_claim(self) -> int:
        """Raises CorruptCheckpointError for a file that is no claim."""
        try:
            return count(table(parsed(self._storage.read(self._claim)[0]))["rank"])
        except (ValueError, KeyError) as error:
            where = self._storage.locate(self._claim)
            raise CorruptCheckpointError(
                f"{where}: it is not the claim of a rank ({error!r:.200}); delete it, and start all ranks again",
                path=where,
            ) from error

    def _delete_claim(self) -> None:
        with suppress(CheckpointError, OSError):
            self._storage.delete(self._claim)

    def _put_claim(self) -> None:
        claim = {"rank": self._world.rank, "world_size": self._world.size, "nonce": self._nonce}
        self._storage.put_new(self._claim, json.dumps(claim).encode())

    def _say(self, what: str) -> None:
        quietly(lambda: self._words.say(f"{self._key}/{what}", str(self._world.rank)))

    def _heard(self, what: str) -> int | None:
        """The rank that has said so."""
        word = quietly(lambda: self._words.said(f"{self._key}/{what}"))
        return None if word is None else int(word)
