"""The words of the ranks of one checkpointer to each other, by the store of their process group.

In: words, by what they are about. Out: the words of other ranks. Knows nothing of: saves, archives.

Before its first save rank 0 says what this start of the ranks is called (the token), and which ranks have states
alike. A word is said once; a rank waits for the words of others until a deadline, and takes a rank that says nothing
for dead. So a rank that has to wait for something of its own before it can say a word says meanwhile that this takes
time.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Protocol

from ...errors import PeerFailedError
from ..host.waits import ENDS_THE_CALL, MEETING_SECONDS, SIGN_SECONDS, Wait
from ..runs.receipts import EMPTY, Table
from ..slicing.locator import Classes
from ..spans import TIMEKEEPER, monotonic
from .heartbeats import Heartbeats
from .world import Words, World, refuse_if_changed, world_of

# Seconds between two calls of `look_around`.
_LOOK_AROUND_SECONDS: Final = 5.0
NOT_ALONE: Final = "make the same calls on every rank; if this one alone saves, give its AsyncCheckpointer ranks=(0, 1)"
_NO_STRUCTURE: Final = "-"


def hear(
    words: Words,
    keys: Sequence[str],
    check: Callable[[], None],
    late: Callable[[], PeerFailedError],
    look_around: Callable[[], bool] = lambda: False,
) -> list[str]:
    """Return the words of these keys once all of them are said. Raises the error that `late` makes, after
    MEETING_SECONDS.

    `check` is called between looks and may raise. `look_around` is called every few seconds, and the deadline begins
    anew when it returns True.
    """
    begin = looked = monotonic()

    def go_on(seconds: float) -> None:
        nonlocal begin, looked
        check()
        if monotonic() - begin > MEETING_SECONDS:
            raise late()
        if monotonic() - looked > _LOOK_AROUND_SECONDS:
            looked = monotonic()
            if look_around():
                begin = looked
        TIMEKEEPER.sleep(seconds)

    return words.hear(keys, go_on)


class RankZeroWord:
    """A random word of rank 0 that names something for all ranks. Each rank creates its own for the same key.

    A process without a store has a word of its own. Words are opened only where there is a store.
    """

    def __init__(self, world: World, words: Callable[[], Words], key: str, *, num_bytes: int) -> None:
        self._words, self._key = words, key
        self._word: str | None = None
        if world.rank == 0 or world.store is None:
            self._word = os.urandom(num_bytes).hex()
            if world.store is not None:
                words().say(key, self._word)

    def hear(self, check: Callable[[], None], whom: str) -> str:
        """Return the word, and wait for it if need be. Raises PeerFailedError: "waited 600 s for" `whom`."""
        if self._word is None:
            (self._word,) = hear(
                self._words(),
                [self._key],
                check,
                lambda: PeerFailedError(f"waited {MEETING_SECONDS:.0f} s for {whom}", rank=0),
            )
        return self._word


class Hear(Protocol):
    """Waits for the words of these keys: what they are, where it is waited, and whether there was a sign since the
    last call.
    """

    def __call__(self, keys: Sequence[str], what: str, where: str, takes_time: Callable[[], bool]) -> list[str]: ...


class Talk:
    """The words of one restore, which all ranks call in the same order. From the thread that restores."""

    def __init__(self, rank: int, size: int, words: Callable[[], Words], hear: Hear, prefix: str) -> None:
        self.rank, self.size = rank, size
        self._words, self._hear, self._prefix = words, hear, prefix
        self._signed = monotonic()  # when this rank has last said that it takes time
        self._num_signs = 0  # that this rank has given, or heard

    def say(self, key: str, word: str) -> None:
        """To all ranks; each key once."""
        self._words().say(f"{self._prefix}/{key}", word)

    def hear(self, keys: Sequence[str], what: str) -> list[str]:
        """The words of these keys, once they are said. Raises PeerFailedError if that takes too long."""
        return self._hear([f"{self._prefix}/{key}" for key in keys], what, "restore()", self._has_signed)

    def take_time(self) -> None:
        """On rank 0, now and then: the others are to wait longer for its next word."""
        if monotonic() - self._signed > SIGN_SECONDS:
            self._signed = monotonic()
            self.say(self._sign(), "")
            self._num_signs += 1

    def _has_signed(self) -> bool:
        """True if rank 0 has said once more that it takes time."""
        is_said = self.rank != 0 and self._words().is_said(f"{self._prefix}/{self._sign()}")
        self._num_signs += is_said
        return is_said

    def _sign(self) -> str:
        return f"takes time/{self._num_signs}"


class Meeting:
    """The words of one checkpointer. On the thread that saves or restores, but for `token_if_said`.

    Args:
        given: the number of this rank and how many there are, as the user gave them; None for those of the process
            group.
        run_id: a name of this start of the ranks, for ranks without a process group and without a store.
        store: of ranks without a process group, the store that all of them are connected to.
        needs_group: of arguments that can do nothing where ranks have no store, whether they were given.
        topic: of words that all ranks have, whichever meetings each of them has opened before; by default all ranks
            open theirs in the same order.
        advice: what to do if a rank does not come.
    """

    def __init__(
        self,
        given: tuple[int, int] | None = None,
        run_id: str | None = None,
        needs_group: Mapping[str, bool] = MappingProxyType({}),
        *,
        store: Any = None,
        topic: str | None = None,
        advice: str = NOT_ALONE,
    ) -> None:
        self._topic, self.advice = topic, advice
        self._world: World | None = None
        if (given, run_id, store) != (None, None, None):
            self._world = world_of(given, run_id, store)
            given_all_the_same = [argument for argument, is_given in needs_group.items() if is_given]
            if given_all_the_same and not self._world.is_one and self._world.store is None:
                raise ValueError(
                    f"{given_all_the_same[0]} needs a process group or store=, by which ranks agree on what they do; "
                    "give store=, or leave it out"
                )
        self._words: Words | None = None
        self._token: str | None = None
        self.heartbeats = Heartbeats()
        self._restores = itertools.count()
        self.has_met = False
        self.table = EMPTY  # of the ranks before the first decision

    @property
    def world(self) -> World:
        """Fixed when it is first asked for, which is at the first save or restore."""
        if self._world is None:
            self._world = world_of()
        return self._world

    def refuse_if_changed(self) -> None:
        """Raises ValueError where the process group is another one by now."""
        refuse_if_changed(self.world)

    def words(self) -> Words:
        """The words of this meeting, on all ranks."""
        if self._words is None:
            self._words = self.world.opening() if self._topic is None else self.world.words(self._topic)
        return self._words

    # --- the first save -----------------------------------------------------------------------------------

    def token(self) -> str:
        """The name of this start of the world: the same on all ranks, and of no other start."""
        if self._token is None:
            world = self.world
            if world.run_id is not None:
                self._token = hashlib.blake2b(world.run_id.encode(), digest_size=8).hexdigest()
            elif world.rank == 0:
                self._token = os.urandom(8).hex()
                self.words().say("token", self._token)
            else:
                (self._token,) = self.hear(["token"], "the first save or restore of rank 0")
            self.heartbeats.begin(world, self._token)
        return self._token

    def knows_token(self) -> bool:
        """True if `token` would not wait."""
        return self._token is not None or self.world.rank == 0 or self.world.run_id is not None

    def look_for_token(self) -> None:
        """Ask the store for it, and do not wait."""
        if self._token is None and self.world.store is not None:
            self._token = self.words().said("token")
            if self._token is not None:
                self.heartbeats.begin(self.world, self._token)

    def meet(self, structure: str, where: str) -> Table:
        """Tell rank 0 how the state looks here, and hear which ranks have states alike."""
        self.has_met = True
        self.table = Table(self._classes(structure, where))
        return self.table

    def _classes(self, structure: str, where: str) -> Classes:
        rank, size = self.world.rank, self.world.size
        if self.world.store is None:
            return {}  # they learn it from the first receipts
        words = self.words()
        words.say(f"structure/{rank}", structure)
        if rank == 0:
            structures = self.hear([f"structure/{n}" for n in range(size)], "the first save of the other ranks", where)
            classes: dict[str, list[int]] = {}
            for n, digest in enumerate(structures):
                if digest != _NO_STRUCTURE:  # that rank's save has raised
                    classes.setdefault(digest, []).append(n)
            words.say("classes", json.dumps(Table(classes).packed()))
        (text,) = self.hear(["classes"], "the first save of all ranks", where)
        return Table.unpacked(json.loads(text)).classes

    def does_not_meet(self) -> None:
        """Tell rank 0 not to wait for the structure of this rank's state, since the call has raised before it was
        known.
        """
        if not self.has_met and self.world.store is not None:
            self.has_met = True
            self.words().say(f"structure/{self.world.rank}", _NO_STRUCTURE)
            if self.world.rank == 0:
                self.words().say("classes", json.dumps(EMPTY.packed()))

    # --- waiting ------------------------------------------------------------------------------------------

    def talk(self) -> Talk | None:
        """The words of one restore; None for a rank alone. Raises ValueError without a store."""
        world = self.world
        if world.is_one:
            return None
        if world.store is None:
            raise ValueError(
                "with ranks= and run_id=, there is nothing by which ranks could agree on the newest step; give step=, "
                "or make the AsyncCheckpointer with store="
            )
        self.token()  # by which ranks give heartbeats from here on
        return Talk(world.rank, world.size, self.words, self.hear, f"restore/{next(self._restores)}")

    def hear(
        self,
        keys: Sequence[str],
        what: str,
        where: str = "save()",
        takes_time: Callable[[], bool] = lambda: False,
    ) -> list[str]:
        """The words of these keys, once all of them are said. `takes_time`: the rank that is to say them has told
        just now that this takes longer.
        """
        wait = Wait(f"in {where}", ENDS_THE_CALL)

        def late() -> PeerFailedError:
            missing = [key.rpartition("/")[2] for key in keys if not self.words().is_said(key)]
            who = f"; nothing was heard of ranks {', '.join(missing[:20])}" if len(keys) > 1 else ""
            return PeerFailedError(
                f"waited {MEETING_SECONDS:.0f} s for {what}{who}. {self.advice[0].upper()}{self.advice[1:]}",
                rank=int(missing[0]) if missing and len(keys) > 1 else 0,
            )

        def look_around() -> bool:
            goes_on = takes_time()
            if self.world.is_over():
                raise PeerFailedError(
                    f"waited for {what}, but rank 0 is at a later start of the ranks than this one; start "
                    "all of them again",
                    rank=0,
                )
            for rank, why in self.heartbeats.lost(self._ranks_of(keys)).items():
                if not any(self.words().are_said([key]) for key in keys if rank in self._ranks_of([key])):
                    raise PeerFailedError(
                        f"waited for {what}, but of rank {rank}: {why}; start all ranks again", rank=rank
                    )
            return goes_on

        return hear(self.words(), keys, lambda: wait.goes_on(lambda: f"{what}; {self.advice}"), late, look_around)

    def _ranks_of(self, keys: Sequence[str]) -> set[int]:
        """The other ranks that are to say these words: most are rank 0's."""
        whose = {int(key.rpartition("/")[2]) if key.startswith("structure/") else 0 for key in keys}
        return whose - {self.world.rank}
