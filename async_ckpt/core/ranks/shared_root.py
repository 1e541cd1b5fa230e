"""The test that all ranks share a root, and that it is not a separate folder on each node.

In: a root, on each rank. Out: whether it is shared, as far as known. Knows nothing of: saves.

Rank 0 puts a file there before its first archive, and then announces it in the store of the ranks. A rank that does not
find the file after the announcement tries to put one with the same name: a storage refuses that at once if the file
exists, even if its listings do not show it yet. If the storage accepts the file, this is another root than rank 0's.
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
    """One root of one checkpointer, as this rank knows it. Its methods block, and may be called from any thread."""

    def __init__(self, storage: Storage, key: str, world: World, token: str, words: Words, *, folder: str = "") -> None:
        """`key` identifies the root on all ranks. The claim is a file in `folder`; `token` is part of its name."""
        self._storage, self._key, self._world, self._words = storage, key, world, words
        self._claim = f"{folder}/world.{token}.json" if folder else f"world.{token}.json"
        self._folder, self._nonce = folder, secrets.token_hex(8)
        self._is_claimed = self._is_seen = False
        # On another rank: rank 0 has announced that its claim is there.
        self.is_named = False
        self.is_shared = False  # all ranks have taken part in a commit there
        self.lead = 0  # the rank that was the first to put the file which this rank sees
        self.apart_rank: int | None = None  # a rank that does not see here what rank 0 has written

    @property
    def is_apart(self) -> bool:
        return self.apart_rank is not None

    @property
    def where(self) -> str:
        """The root, for messages."""
        return self._storage.locate(self._folder)

    def claim(self) -> None:
        """On rank 0, before anything is written: claim the root for this start of the ranks."""
        if not self._is_claimed:
            with suppress(FileExistsError):  # a put may have arrived although it returned an error
                self._put_claim()
            self._is_claimed = True
            self._say("claimed")

    def sees(self) -> bool | None:
        """On another rank: True if this is the root that rank 0 writes to, False if it is not, None if that is not
        known yet.

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
                return None  # the claim will be visible soon
            if self._heard("withdrawn") is not None:  # rank 0 has given the save up, as its decision reports
                self._delete_claim()
                return None
            self.lead = self._world.rank
            return False
        self.lead, self._is_seen = rank, rank == 0
        return self._is_seen  # otherwise the claim is by this rank, or by another rank on this node

    def note_apart(self) -> None:
        """Note that each node has its own folder here, and that all ranks know this."""
        self._is_seen = self.is_shared = True

    def say_apart(self) -> None:
        """On another rank: announce that this is not the root that rank 0 writes to."""
        self.apart_rank = self._world.rank
        self._say("apart")

    def withdraw(self) -> None:
        """Withdraw the claim of one attempt. Ranks that still look for it must not take the root for another one."""
        self._say("withdrawn")
        self._delete_claim()

    def found_apart(self) -> bool:
        """True if some rank has announced that it sees another root than rank 0. Asks only until this is known."""
        if not (self.is_shared or self.is_apart):
            self.apart_rank = self._heard("apart")
        return self.is_apart

    def _rank_of_claim(self) -> int:
        """The rank that has put the claim. Raises CorruptCheckpointError for a file that is not a claim."""
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
        """The rank that has made this announcement, if any."""
        word = quietly(lambda: self._words.said(f"{self._key}/{what}"))
        return None if word is None else int(word)
