"""The test that all ranks share a root, and not a folder that each node has for itself.

In: a root, on each rank. Out: what is known of that. Knows nothing of: saves.

Rank 0 puts a file there ahead of its first archive, and then says by the store of the process group that it has. A rank
that does not find the file, though rank 0 has said so, tries to put one of the same name: a place refuses that at
once if there is one already, whatever its listings still hide. If it does not refuse, the root is not the one that
rank 0 has.

Ranks without a process group know of each other nothing but the `run_id`, which may have been given before, or to a
rank that was started again alone. Each of them puts such a file of its own, which only the first can.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ...errors import CheckpointError, CorruptCheckpointError
from ..fields import count, parsed, table, text
from ..runs.receipts import Cause, Verdict
from ..storage.interface import Storage
from .world import Words, World


class SharedRoot:
    """One root of one checkpointer, as this rank knows it. Blocking calls, from any thread."""

    def __init__(
        self,
        storage: Storage,
        key: str,
        world: World,
        token: Callable[[], str],
        words: Callable[[], Words | None],
        *,
        folder: str = "",
    ) -> None:
        """`key` is the name of the root for all ranks. Claims lie in `folder`."""
        self._storage, self._key, self._world = storage, key, world
        self._token, self._words, self._folder = token, words, folder
        self._is_claimed = self._is_seen = False
        # On another rank: rank 0 has said that it has put there what proves the root the same.
        self.is_named = False
        self._nonce = secrets.token_hex(8)
        self.is_shared = False  # by all ranks: each has had a part in a commit there
        self.apart_rank: int | None = None  # one that does not see here what rank 0 has written

    @property
    def is_apart(self) -> bool:
        return self.apart_rank is not None

    @property
    def where(self) -> str:
        """The root, for messages."""
        return self._storage.locate(self._folder)

    @property
    def _claim(self) -> str:
        """By which ranks find out whether they see the root of rank 0."""
        return self._named(f"world.{self._token()}.json")

    @property
    def _own_claim(self) -> str:
        rank = self._world.rank
        return self._claim if rank == 0 else self._named(f"world.{self._token()}.{rank:05d}.json")

    def _named(self, name: str) -> str:
        return f"{self._folder}/{name}" if self._folder else name

    def claim(self) -> None:
        """Before anything is written: say that this start of the ranks writes here. Ranks other than 0 that have a
        process group have no need of that.

        Raises CheckpointError for a run_id that was used before.
        """
        world = self._world
        if self._is_claimed or (world.rank and world.run_id is None):
            return
        try:
            self._put_claim(self._own_claim)
        except FileExistsError as error:
            # Saves that are begun at once both come here, and a put may arrive though it was answered with an error.
            if self._read_claim(self._own_claim)["nonce"] != self._nonce:
                raise CheckpointError(
                    f"{self.where}: run_id={world.run_id!r} was used by an earlier start of rank {world.rank}; "
                    "start all ranks together, and give a new one at every start"
                ) from error
        self._is_claimed = True
        if world.rank == 0:
            self._say("claimed")

    def sees(self) -> bool | None:
        """On another rank: whether this is the root that rank 0 writes to; None as long as that is not known.

        Raises CheckpointError where rank 0 counts another number of ranks.
        """
        if self._is_seen or self.is_apart:
            return self._is_seen
        try:
            claim = self._read_claim(self._claim)
        except FileNotFoundError:
            if not self.is_named:
                self.is_named = self._heard("claimed") is not None
                return None  # what rank 0 saves is known by now as well: the caller compares that first
            try:
                self._put_claim(self._claim)
            except FileExistsError:
                return None  # it is shown soon
        else:
            if claim["rank"] == 0:
                self._compare_sizes(claim["world_size"])
                self._is_seen = True
                return True
        return False  # it is this rank's own, or that of another one on this node

    def say_apart(self) -> None:
        """On another rank: say that this is not the root that rank 0 writes to."""
        self.apart_rank = self._world.rank
        self._say("apart")

    def _compare_sizes(self, of_rank_0: int) -> None:
        world = self._world
        if of_rank_0 != world.size:
            raise CheckpointError(
                f"{self.where}: rank 0 counts {of_rank_0} ranks and rank {world.rank} {world.size}; give ranks= the "
                "same number on every rank, and a new run_id"
            )

    def withdraw(self, earlier: Sequence[str] = ()) -> None:
        """Delete the claim of one attempt, and of earlier ones: no rank looks for them any more."""
        start = self._token().partition(".")[0]
        claims = [self._named(f"world.{start}.{attempt}.json") for attempt in earlier]
        self._storage.delete_many([self._claim, *claims])

    def found_apart(self) -> bool:
        """True if some rank has said that it sees another root than rank 0. Nothing is asked once that is known."""
        if not (self.is_shared or self.is_apart):
            self.apart_rank = self._heard("apart")
        return self.is_apart

    # --- what cannot be said at the root ----------------------------------------------------------------------

    def say_refusal(self, attempt: str, cause: Cause) -> bool:
        """This rank can write nothing here: tell rank 0 by the store of the process group. False without one."""
        return self._say(f"refusal/{attempt}", json.dumps(cause))

    def refusal(self, attempt: str) -> Cause | None:
        """The cause that one of the ranks that can write nothing here has said; None if there is none."""
        word = self._word(f"refusal/{attempt}")
        return None if word is None else Cause(*json.loads(word))

    def say_verdict(self, verdict: Verdict) -> bool:
        """The same for rank 0 and its no."""
        return self._say(f"verdict/{verdict.attempt}", json.dumps(verdict.packed()))

    def verdict(self, attempt: str) -> Verdict | None:
        word = self._word(f"verdict/{attempt}")
        return None if word is None else Verdict.unpacked(json.loads(word))

    def say_unknown(self, attempt: str) -> bool:
        """The same for rank 0 when it has given an attempt up without knowing whether it is committed here."""
        return self._say(f"unknown/{attempt}")

    def is_unknown(self, attempt: str) -> bool:
        """Whether rank 0 has said so."""
        return self._word(f"unknown/{attempt}") is not None

    def _read_claim(self, name: str) -> dict[str, Any]:
        """Raises CorruptCheckpointError for a file that is no claim."""
        try:
            claim = table(parsed(self._storage.read(name)[0]))
            size = count(claim["world_size"])
            return {"rank": count(claim["rank"]), "world_size": size, "nonce": text(claim["nonce"])}
        except (ValueError, KeyError) as error:
            where = self._storage.locate(name)
            raise CorruptCheckpointError(
                f"{where}: it is not the claim of a rank ({error!r:.200}); delete it, and start all ranks again",
                path=where,
            ) from error

    def _put_claim(self, name: str) -> None:
        claim = {"rank": self._world.rank, "world_size": self._world.size, "nonce": self._nonce}
        self._storage.put_new(name, json.dumps(claim).encode())

    def _say(self, what: str, word: str | None = None) -> bool:
        words = self._words()
        if words is not None:
            with suppress(RuntimeError):  # the store is gone: then deadlines tell
                words.say(f"{self._key}/{what}", str(self._world.rank) if word is None else word)
                return True
        return False

    def _heard(self, what: str) -> int | None:
        """The rank that has said so."""
        word = self._word(what)
        return None if word is None else int(word)

    def _word(self, what: str) -> str | None:
        words = self._words()
        if words is not None:
            with suppress(RuntimeError):
                return words.said(f"{self._key}/{what}")
        return None
