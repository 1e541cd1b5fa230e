"""The calls of `save` that all ranks make together, matched by rank 0's words.

In: calls, on every rank. Out: joint saves, each with one name on all ranks, and one decision. Knows nothing of:
archives.

Rank 0 announces each of its calls as a word of the log: its step, and a random name for the attempt. Later it announces
its decision. Another rank registers its call before it looks at an argument, and matches words to calls by their steps,
in order, never by a count. So if one rank misses a call, makes one alone, or makes one with wrong arguments, only that
call fails, on all ranks, which learn why, and the next call works.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol

from ...errors import CheckpointError, ClosedError, PeerFailedError
from ..host.loop import ask_for_exception, awaitable, get_loop
from ..host.threads import Life, running_future
from ..host.waits import DECISION_SECONDS, wait_for
from ..runs.manifest import Manifest
from ..runs.receipts import EMPTY, NO_TABLE, Cause, Table
from ..storage.interface import Storage
from ..timing import monotonic
from .meeting import Meeting
from .start import LINGER_SECONDS, WorldStart
from .word_log import Word

if TYPE_CHECKING:
    from ..state.division import Structure
    from .shared_values import SharedValues

# Keys are deleted in batches of this size, so that other calls of the store can be made between them.
_FORGOTTEN_AT_ONCE: Final = 500


class JointState(Enum):
    """The progress of a joint save on this rank."""

    CALLED = "save() was called"
    BEGUN = "it has a name on all ranks"
    SKIPPED = "no rank makes it"
    REFUSED = "it is not committed, on any rank"
    COMMITTED = "it is committed at some root, on all ranks"


_SUCCESSORS: Final = {
    JointState.CALLED: {JointState.BEGUN, JointState.SKIPPED, JointState.REFUSED},
    JointState.BEGUN: {JointState.REFUSED, JointState.COMMITTED},
    JointState.SKIPPED: set(),
    JointState.REFUSED: set(),
    JointState.COMMITTED: set(),
}

# The pause between two checks whether rank 0, which copies a step, is lost.
_WATCH_SECONDS: Final = 2.0


class Decision(NamedTuple):
    """Rank 0's decision on an attempt.

    "committed": with the text of the manifest, so that ranks need not read it; "unknown": rank 0 does not know whether
    the attempt is committed.
    """

    kind: Literal["committed", "failed", "unknown"]
    causes: tuple[Cause, ...] = ()
    manifest: str = ""


class AttemptPlace(Protocol):
    """The place of the attempts at one root: a run, or the folder of a one-off save."""

    @property
    def storage(self) -> Storage: ...

    def folder(self, step: int) -> str: ...

    def attempt_path(self, step: int, attempt: str, rank: int = 0) -> str: ...

    def look_again(self, manifest: Manifest) -> None: ...


class OwnPart(NamedTuple):
    """This rank's part in a joint save, as planned by `Divider.divided`."""

    structure: Structure  # describes this rank's state
    per_rank: tuple[str, ...]  # names of values that each rank has for itself
    shared: SharedValues  # values that should be equal on all ranks
    balance: int  # a checksum of what this rank writes, see `slicing.shares.balance`
    # Digests of replicas, by the part of the tensor and its name; None where replicas were compared before.
    copies: dict[str, dict[str, str]] | None


@dataclass(slots=True, eq=False)
class JointSave:
    """One save of all ranks, as this rank sees it. Created by `save`; from then on only the loop's thread changes it,
    except for the fields that planning adds.
    """

    step: int | None  # for a one-off save, a number made from its path; None for a call with an invalid step
    path: str = ""  # set for a one-off save
    life: Life[JointState] = field(default_factory=lambda: Life(_SUCCESSORS))
    # resolves when the save has a name, has failed before that, or is skipped
    begun: Future[None] = field(default_factory=running_future)
    number: int = -1  # in the order of rank 0's calls; on another rank, the expected number
    newest_decided: int = -1  # the newest save whose decision all ranks knew when this one began
    attempt: str = ""  # its name, the same on all ranks
    table: Table = EMPTY  # the table that determines this rank's share
    part: OwnPart | None = None  # once it is planned
    place: int = 0  # the number of the save's place; on another rank, the expected one until `begun` has resolved
    # the next place gets a copy at the same time; on another rank, valid once `begun` has resolved
    follows: bool = False
    # rank 0 will delete steps there before any rank writes; on another rank, valid once `begun` has resolved
    makes_room: bool = False
    causes: list[Cause] = field(default_factory=list)  # why it fails
    maybe_put: bool = False  # on rank 0: it has put the manifest, or may have
    decision: Decision | None = None
    bell: asyncio.Event = field(default_factory=asyncio.Event)  # set when a word about this save arrives

    def __post_init__(self) -> None:
        if self.path:
            digest = hashlib.blake2b(self.path.encode(errors="replace"), digest_size=7)
            self.step = int.from_bytes(digest.digest(), "big")

    @property
    def what(self) -> str:
        """The save, for messages."""
        return self.path or ("a call without a step" if self.step is None else f"step {self.step}")

    @property
    def is_decided(self) -> bool:
        return not _SUCCESSORS[self.life.now]

    @property
    def is_committed(self) -> bool:
        return self.life.now is JointState.COMMITTED

    @property
    def shares_by(self) -> str:
        """The digest of the table that determines this rank's share; NO_TABLE if this rank takes no share."""
        is_in_class = self.part is not None and self.part.structure.digest in self.table.classes
        return self.table.digest if is_in_class else NO_TABLE


class Calls:
    """The calls of one checkpointer, as made by this rank. Owned by the loop's thread, except for `plan`."""

    def __init__(self, meeting: Meeting, max_in_flight: int, knows_committed: Callable[[str], None]) -> None:
        """`knows_committed` is called with the structure of this rank's part in each committed save."""
        self._meeting, self._max_in_flight, self._knows_committed = meeting, max_in_flight, knows_committed
        self._numbers = itertools.count()  # used on rank 0
        # The table that holds after the decision on the save of this number. An entry is set once.
        self._tables: dict[int, Table] = {}
        # The fields below are used on other ranks.
        self._lock = threading.Lock()  # also guards what `plan` reads
        self._words: deque[Word] = deque()  # words without a call
        self._entries: deque[JointSave] = deque()  # calls without a word
        self._undecided: dict[str, tuple[JointSave, float]] = {}  # the save and when it began, by attempt
        self._num_words = 0  # words about calls that were heard
        self._is_closed = False  # rank 0 makes no more calls
        # the last word and call that failed together, since they had two paths
        self._failed_together: tuple[int | None, int | None] = None, None
        self._is_hearing = False
        self._watches: set[asyncio.Task[None] | None] = set()
        # On other ranks: called with the number of a place, and the step that rank 0 has committed or copied there;
        # `on_copy` also gets the reason if rank 0 could not copy the step.
        self.on_commit: Callable[[int, int], None] = lambda _place, _step: None
        self.on_copy: Callable[[int, int, str | None], None] = lambda _place, _step, _why: None

    @property
    def _start(self) -> WorldStart:
        return self._meeting.start

    # --- a call -----------------------------------------------------------------------------------------------

    def enter(self, joint: JointSave) -> None:
        """Register a call. On the caller's thread, which may be interrupted at any line."""
        # opened here, so that all ranks open their topics in the order of their first calls
        topic = self._meeting.topic
        if self._meeting.world.rank:
            self._soon(partial(self._enter, joint, topic))

    def _enter(self, joint: JointSave, topic: str) -> None:
        if not self._is_hearing:
            self._is_hearing = True
            self._start.log.subscribe(topic, self._receive)
        with self._lock:
            self._entries.append(joint)
        self._start.log.wait(joint)
        self._match()

    def plan(self, joint: JointSave) -> None:
        """Choose the table for this rank's share, in this call's turn. Rank 0 announces the call. On the caller's
        thread.
        """
        if self._meeting.world.rank == 0:
            joint.number = next(self._numbers)
            joint.attempt = os.urandom(4).hex()
        else:
            with self._lock:
                ahead = itertools.takewhile(lambda other: other is not joint, self._entries)
                if joint.number < 0:
                    joint.number = self._num_words - len(self._words) + sum(1 for _ in ahead)
        joint.newest_decided = joint.number - self._max_in_flight
        joint.table = self._table_before(joint.number)
        if self._meeting.world.rank == 0:
            self._soon(partial(self._announce, joint))

    def _announce(self, joint: JointSave) -> None:
        """On rank 0: announce the call to the other ranks."""
        if joint.life.go(JointState.BEGUN):
            self._append(self._word(joint))
            joint.begun.set_result(None)

    def _word(self, joint: JointSave, **more: Any) -> Word:
        facts = {"step": joint.step, "what": joint.what, "number": joint.number, "attempt": joint.attempt}
        place = {"place": joint.place, "follows": joint.follows, "makes_room": joint.makes_room}
        return {**facts, **place, **more}

    def _append(self, word: Word) -> None:
        self._start.log.append(self._meeting.topic, word)

    def skip(self, joint: JointSave) -> None:
        """On rank 0: announce that no rank makes this save. On the caller's thread."""
        self._number_in_vain(joint)
        self._soon(partial(self._skip, joint))

    def _skip(self, joint: JointSave) -> None:
        if joint.life.go(JointState.SKIPPED):
            self._append(self._word(joint, skipped=True))
            joint.begun.set_result(None)

    def fail(self, joint: JointSave, cause: Cause) -> None:
        """Report to all ranks why the call has raised on this one. Does not wait. On the caller's thread."""
        if self._meeting.world.rank == 0:
            self._number_in_vain(joint)
        self._soon(partial(self._fail, joint, cause))

    def _fail(self, joint: JointSave, cause: Cause) -> None:
        if joint.is_decided:
            return
        joint.causes.append(cause)
        if self._meeting.world.rank == 0:
            if joint.life.now is JointState.CALLED:
                joint.attempt = joint.attempt or os.urandom(4).hex()
                self._append(self._word(joint, causes=[cause]))
                self._decide(joint, JointState.REFUSED, None)
                joint.begun.set_result(None)
            else:
                self.announce_decision(joint, Decision("failed", (cause,)))
                self._decide(joint, JointState.REFUSED, None)
                self.forget(joint)
        elif joint.attempt:
            self.refuse(joint.attempt, cause)
        else:
            # A message for rank 0, which may make the same call after this process has ended.
            self._start.leaving = self._start.send_later(f"why/{cause.rank}", json.dumps(cause))
            self._match()

    def _number_in_vain(self, joint: JointSave) -> None:
        """On rank 0: number a call that commits nothing, and set the table after it, before the next call."""
        if joint.number < 0:
            joint.number = next(self._numbers)
        self._tables.setdefault(joint.number, self._table_before(joint.number))

    def close(self) -> None:
        """Announce that this rank makes no more calls, so that the others need not wait for one. On the thread that
        closes. Rank 0 waits there for ranks that have not come yet, since it cannot answer them once its process group
        is destroyed.
        """
        if self._meeting.has_topic:
            self._soon(self._close)
            if self._meeting.world.rank == 0:
                wait_for(self._start.all_here, LINGER_SECONDS)

    def _close(self) -> None:
        rank, token = self._meeting.world.rank, self._start.token
        if rank == 0:
            self._append({"closed": True})
        elif token.done() and token.exception() is None:
            self._start.connection.ask(lambda store: store.set(self._closed_key(rank), ""))

    def closed(self, ranks: Sequence[int], store: Any) -> list[int]:
        """On rank 0: those of `ranks` that make no more calls. Asks `store`, and so blocks."""
        return [rank for rank in ranks if store.check([self._closed_key(rank)])]

    def _closed_key(self, rank: int) -> str:
        return f"{self._start.prefix}/{self._meeting.topic}/closed/{rank}"

    def announce_room(self, joint: JointSave) -> None:
        """On rank 0: announce that there is room for a save. From any thread."""
        self._soon(partial(self._append, {"room": joint.attempt}))

    def announce_copy(self, place: int, step: int, why: str | None = None) -> None:
        """On rank 0: announce that the step was copied to a place, or `why` it could not be. From any thread."""
        if not (self._meeting.world.is_one or self._meeting.world.rank):
            self._append({"copied": step, "place": place, "why": why})

    def wait_for_arrival(self, arrived: Future[Any]) -> None:
        """On another rank: read words until rank 0 has announced this arrival. From any thread.

        The future raises PeerFailedError if rank 0 is lost, or has closed its checkpointer.
        """
        if self._meeting.world.rank:
            self._soon(lambda: self._watches.add(asyncio.create_task(self._watch(arrived))))

    async def _watch(self, arrived: Future[Any]) -> None:
        waiting, begun = JointSave(None), monotonic()
        self._start.log.wait(waiting)
        ended = awaitable(arrived)
        ended.add_done_callback(ask_for_exception)
        while not arrived.done():
            await asyncio.wait([ended], timeout=_WATCH_SECONDS)
            why = "rank 0 has closed its checkpointer" if self._is_closed else self._start.lost_rank_0(begun)
            if why and not arrived.done():
                text = f"{why}, and has not said that the step was copied; check which steps are there"
                arrived.set_exception(PeerFailedError(text, rank=0, undecided=True))
        self._start.log.wait_no_more(waiting)
        self._watches.discard(asyncio.current_task())

    def last_word(self, rank: int, store: Any) -> Cause | None:
        """On rank 0: why the last call of `rank` failed there, if it has left a message. Asks `store`: blocks."""
        key = f"{self._start.prefix}/why/{rank}"
        return Cause(*json.loads(store.get(key))) if store.check([key]) else None

    # --- words, on another rank -------------------------------------------------------------------------------

    def _receive(self, word: Word) -> None:
        if "decision" in word:
            self._note_decision(word)
        elif "room" in word:
            self._note_room(word["room"])
        elif "copied" in word:
            self.on_copy(word["place"], word["copied"], word["why"])
        elif "closed" in word:
            self._is_closed = True
            self._match()
        else:
            with self._lock:
                self._num_words = max(self._num_words, word["number"] + 1)
                self._words.append(word)
            self._match()

    def _match(self) -> None:
        """Match each word to the first call with the same step. Words and calls before these have no partner."""
        while True:
            with self._lock:
                word, joint = self._next_pair()
                if word is not None:
                    self._words.remove(word)
                if joint is not None:
                    self._entries.remove(joint)
                    if word is not None:
                        joint.number = word["number"]
                elif self._is_closed and word is None and self._entries:
                    joint = self._entries.popleft()
            if word is None and joint is None:
                return
            if word is None:
                assert joint is not None
                why = (
                    "rank 0 has closed its checkpointer"
                    if self._is_closed
                    else f"only rank {self._meeting.world.rank} has made this call"
                )
                self._end(joint, f"{why}; {self._meeting.advice}")
            elif joint is None:
                self._refuse(word, f"it has made no call for {word['what']}; {self._meeting.advice}")
            elif _are_alike(word, joint):
                self._failed_together = None, None
                self._begin(word, joint)
            else:
                self._failed_together = word["step"], joint.step
                self._refuse(word, f"it saves {joint.what} by the same call; give all ranks the same arguments")
                self._end(joint, f"rank 0 saves {word['what']} by the same call; give all ranks the same arguments")

    def _next_pair(self) -> tuple[Word | None, JointSave | None]:
        """The next word and call that belong together, or one of them alone if it has no partner; neither if that is
        not known yet.

        Paths have no order: a word and a call with different paths fail together. Which rank missed a call, or made one
        alone, is known when the other rank comes to the same path.
        """
        for at, word in enumerate(self._words):
            for number, joint in enumerate(self._entries):
                if _are_alike(word, joint):
                    if at:
                        return self._words[0], None
                    return (None, self._entries[0]) if number else (word, joint)
        if not (self._words and self._entries):
            return None, None
        word, joint = self._words[0], self._entries[0]
        if not self._meeting.is_of_paths:
            return (word, None) if word["step"] < joint.step else (None, joint)
        if word["step"] == self._failed_together[1]:
            return word, None
        return (None, joint) if joint.step == self._failed_together[0] else (word, joint)

    def _end(self, joint: JointSave, why: str) -> None:
        """Fail this call before it has begun."""
        if joint.life.go(JointState.REFUSED):
            self._start.log.wait_no_more(joint)
            joint.begun.set_exception(PeerFailedError(f"{joint.what} is not committed: {why}", rank=0))
            joint.bell.set()

    def _refuse(self, word: Word, why: str) -> None:
        """Refuse rank 0's call, in which this rank has no part."""
        self._tables[word["number"]] = self._table_before(word["number"])
        if not (word.get("skipped") or word.get("causes")):
            self.refuse(word["attempt"], Cause(self._meeting.world.rank, why))

    def _begin(self, word: Word, joint: JointSave) -> None:
        """Begin the call that matches this word."""
        number = word["number"]
        if word.get("skipped"):
            self._start.log.wait_no_more(joint)
            self._tables[number] = self._table_before(number)
            if joint.life.go(JointState.SKIPPED):
                joint.begun.set_result(None)
            return
        causes = [Cause(*cause) for cause in word.get("causes", ())]
        if causes or word["step"] is None:
            self._tables[number] = self._table_before(number)
            self._end(joint, _reasons(causes))
        elif joint.causes:  # it has failed here
            self._refuse(word, joint.causes[0].error)
            self._end(joint, joint.causes[0].error)
        else:
            joint.attempt, joint.place, joint.follows = word["attempt"], word["place"], word["follows"]
            joint.makes_room = word["makes_room"]
            joint.life.go(JointState.BEGUN)
            self._drop_old()
            self._undecided[joint.attempt] = joint, monotonic()
            joint.begun.set_result(None)

    def _drop_old(self) -> None:
        """Drop attempts that rank 0 has not decided for so long that no decision will come."""
        for attempt, (joint, since) in list(self._undecided.items()):
            if monotonic() - since > 2 * DECISION_SECONDS:
                del self._undecided[attempt]
                self._start.log.wait_no_more(joint)

    def _note_room(self, attempt: str) -> None:
        for early in self._words:  # this rank has not made that call yet
            if early["attempt"] == attempt:
                early["makes_room"] = False
        joint, _ = self._undecided.get(attempt, (None, 0.0))
        if joint is not None:
            joint.makes_room = False
            joint.bell.set()

    def _note_decision(self, word: Word) -> None:
        joint, _ = self._undecided.get(word["attempt"], (None, 0.0))
        for early in self._words:  # this rank has not made that call yet
            if early["attempt"] == word["attempt"] and word["decision"] == "failed":
                early["causes"] = word["causes"]
        if joint is not None:
            causes = tuple(Cause(*cause) for cause in word["causes"])
            joint.decision = Decision(word["decision"], causes, word["manifest"])
            if word["decision"] == "failed":
                joint.causes += causes
                self._decide(joint, JointState.REFUSED, None)
            elif joint.step is not None and not joint.path:  # it is committed, or may be
                self.on_commit(joint.place, joint.step)  # before the words that it was copied
            joint.bell.set()

    # --- refusals and decisions -------------------------------------------------------------------------------

    def refuse(self, attempt: str, cause: Cause) -> Future[None]:
        """On another rank: report to rank 0 that an attempt fails, and why."""
        key, text = f"{self.key_of(attempt)}/no", json.dumps(cause)
        return self._start.connection.ask(lambda store: store.set(key, text))

    def refusal(self, attempt: str, store: Any) -> Cause | None:
        """On rank 0: why another rank refuses an attempt; None if none does. Asks `store`, and so blocks."""
        key = f"{self.key_of(attempt)}/no"
        return Cause(*json.loads(store.get(key))) if store.check([key]) else None

    def key_of(self, attempt: str) -> str:
        """The prefix of the keys of an attempt."""
        return f"{self._start.prefix}/{attempt}"

    def forget(self, joint: JointSave) -> None:
        """On rank 0, after the decision: delete what the other ranks have written about the attempt."""
        prefix = self.key_of(joint.attempt)
        keys = [f"{prefix}/{rank}" for rank in range(1, self._meeting.world.size)]
        keys += [f"{prefix}/count", f"{prefix}/no"]

        def forget(few: Sequence[str], store: Any) -> None:
            for key in few:
                store.delete_key(key)

        for at in range(0, len(keys), _FORGOTTEN_AT_ONCE):
            self._start.connection.ask(partial(forget, keys[at : at + _FORGOTTEN_AT_ONCE]))

    def announce_decision(self, joint: JointSave, decision: Decision) -> Future[None]:
        """On rank 0: announce the decision to the other ranks. The future ends once the store has it."""
        word = {"decision": decision.kind, "causes": decision.causes, "manifest": decision.manifest}
        return self._start.log.append(self._meeting.topic, {"attempt": joint.attempt, **word})

    def decide(self, joint: JointSave, state: JointState, table: Table | None) -> None:
        """Note a decision. `table` holds from then on; with None, the table before this save. From any thread."""
        self._soon(partial(self._decide, joint, state, table))

    def _decide(self, joint: JointSave, state: JointState, table: Table | None) -> None:
        if not joint.life.go(state):
            return
        if state is JointState.COMMITTED and joint.part is not None:
            self._knows_committed(joint.part.structure.digest)
        self._undecided.pop(joint.attempt, None)
        self._start.log.wait_no_more(joint)
        self._tables[joint.number] = self._table_before(joint.number) if table is None else table
        self._tables.pop(joint.number - 2 * self._max_in_flight - 1, None)
        joint.bell.set()

    def _table_before(self, number: int) -> Table:
        """The table that determines the shares of the save of this number."""
        before = number - self._max_in_flight
        return self._meeting.table if before < 0 else self._tables.get(before, EMPTY)

    def _soon(self, call: Callable[[], None]) -> None:
        with suppress(ClosedError):  # the interpreter is exiting
            get_loop().soon(call)


def _are_alike(word: Word, joint: JointSave) -> bool:
    """True if a word and a call belong together. A call with an invalid step matches whatever comes next."""
    return word["step"] == joint.step or None in (word["step"], joint.step)


def _reasons(causes: Sequence[Cause]) -> str:
    reasons = "; ".join(f"rank {cause.rank}: {cause.error}" for cause in causes[:5])
    return f"{reasons}; and {len(causes) - 5} more" if len(causes) > 5 else reasons


def peers_failed(joint: JointSave, causes: Sequence[Cause]) -> CheckpointError:
    """The error of a save that fails for these causes."""
    return PeerFailedError(f"{joint.what} is not committed: {_reasons(causes)}", rank=causes[0].rank if causes else 0)
