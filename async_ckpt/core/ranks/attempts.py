"""The joint saves of all ranks: their numbers and names, and what is known of the ranks when each of them begins.

In: saves, called alike on every rank. Out: attempts that are decided once, for all ranks. Knows nothing of: archives.

There is no collective, and no plan that one rank makes for all. The name of an attempt follows from the token of this
start of the ranks, the step and what was decided there before, and all else goes through the folder of the step
(`runs.receipts`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple, Protocol

from ...errors import PeerFailedError
from ..host.threads import Life
from ..host.waits import ENDS_THE_CALL, MEETING_SECONDS, Wait
from ..runs.manifest import Manifest
from ..runs.receipts import EMPTY, NO_TABLE, Cause, Exchange, Table
from ..spans import TIMEKEEPER, monotonic
from ..state.division import Structure
from ..storage.interface import Storage
from .meeting import Meeting
from .shared_values import SharedValues

_LOOK_SECONDS: Final = 0.02
_NO_STEP: Final = -1


class JointState(Enum):
    """How far a joint save has come on this rank."""

    CALLED = "save() was called"
    FAILED = "it has failed on this rank before it had a name; the other ranks have begun it, or are about to"
    BEGUN = "it has a name, and somebody on this rank is going to learn what is decided"
    LEFT = "nobody on this rank learns any more what is decided"
    SKIPPED = "no rank makes it"
    REFUSED = "it is not committed, on any rank"
    COMMITTED = "it is committed at some root, on all ranks"


_DECIDED: Final = frozenset({JointState.SKIPPED, JointState.REFUSED, JointState.COMMITTED})
_SUCCESSORS: Final = {
    JointState.CALLED: {JointState.FAILED, JointState.BEGUN, JointState.SKIPPED},
    JointState.FAILED: {JointState.BEGUN, JointState.LEFT},
    JointState.BEGUN: {JointState.LEFT, JointState.REFUSED, JointState.COMMITTED},
    JointState.LEFT: {JointState.BEGUN, JointState.REFUSED, JointState.COMMITTED},
    JointState.SKIPPED: set(),
    JointState.REFUSED: set(),
    JointState.COMMITTED: set(),
}


class AttemptPlace(Protocol):
    """The place of the attempts at one root: a run, or the folder of a one-off save."""

    @property
    def storage(self) -> Storage: ...

    def folder(self, step: int) -> str: ...

    def attempt_path(self, step: int, attempt: str, rank: int = 0) -> str: ...

    def look_again(self, manifest: Manifest) -> None: ...

    def do_all(self, tasks: Sequence[Callable[[], None]]) -> None: ...


class SavedInstead(NamedTuple):
    """The save that rank 0 makes by the same call, where it is another one."""

    step: int
    what: str
    attempt: str  # "" if it saves nothing


@dataclass(frozen=True, slots=True)
class OwnPart:
    """This rank's part in a joint save, as `Divider.divided` plans it."""

    structure: Structure  # of its state
    per_rank: tuple[str, ...]  # the names of what each rank has for itself
    shared: SharedValues  # what all should have alike
    balance: int  # of what this rank writes, see `slicing.shares`
    # Digests of what other ranks may hold, too, by what it is of which tensor; None where that was compared before.
    copies: dict[str, dict[str, str]] | None


@dataclass(slots=True)
class JointSave:
    """One save of all ranks, as this rank sees it. Created by `save`; its state changes on the thread that saves, and
    on the loop's once it has begun.
    """

    step: int  # of a one-off save, a number made of its path
    path: str = ""  # of a one-off save
    question: str = ""  # whether it is skipped, where that is still to be asked
    # Whatever happens later at one of several roots changes nothing of what was decided.
    life: Life[JointState] = field(default_factory=lambda: Life(_SUCCESSORS))
    number: int = -1  # among those that have begun, as on all ranks; -1 before that
    newest_decided: int = -1  # the last of these that all ranks knew the decision of when this one began
    table: Table = EMPTY  # by which this rank shares
    attempt: str = ""  # its name, the same on all ranks
    before: JointSave | None = None  # of one that has no name yet: what was begun at its step before
    part: OwnPart | None = None  # once it is planned
    is_any: bool = False  # one of several roots is enough
    causes: list[Cause] = field(default_factory=list)
    maybe_at: set[AttemptPlace] = field(default_factory=set)  # on rank 0: where it has put the manifest, or may have
    # The attempts at the roots that have got a receipt of this rank; True as long as it is being put.
    receipts: dict[Exchange, bool] = field(default_factory=dict)
    instead: SavedInstead | None = None  # by the same call, on rank 0; set on the loop's thread

    @property
    def what(self) -> str:
        """The save, for messages."""
        return self.path or f"step {self.step}"

    @property
    def is_decided(self) -> bool:
        return self.life.now in _DECIDED

    @property
    def is_committed(self) -> bool:
        return self.life.now is JointState.COMMITTED

    @property
    def is_left(self) -> bool:
        return self.life.now is JointState.LEFT

    @property
    def shares_by(self) -> str:
        """The table that this rank shares by; it takes no share where its structure is in no class."""
        is_in_class = self.part is not None and self.part.structure.digest in self.table.classes
        return self.table.digest if is_in_class else NO_TABLE

    def take(self, part: OwnPart, table: Table) -> None:
        """Take this rank's part, once it is planned, and the table by which it shares."""
        self.part, self.table = part, table


class Attempts:
    """The joint saves of one checkpointer, as all of its ranks count them. From the thread that saves; `decide` from
    the loop's.
    """

    def __init__(self, meeting: Meeting, max_in_flight: int) -> None:
        self._meeting, self._max_in_flight = meeting, max_in_flight
        self._numbers = itertools.count()
        # That follow from the decision of the save of this number. An entry is set once, on the loop's thread; that of
        # a call that has saved nothing here, on the thread that saves.
        self._tables: dict[int, Table] = {}
        # Changed on the loop's thread alone, entries at a time.
        self._num_decided: Counter[int] = Counter()  # attempts, by step
        self._begun: dict[int, JointSave] = {}  # the last one that this rank has begun at a step
        # Changed on the thread that saves.
        self._in_vain: deque[int] = deque()  # calls that have saved nothing here, until the others have given theirs up
        self._num_missed: Counter[int] = Counter()  # attempts that were given up so, by step

    def begin(self, joint: JointSave, listen_again: Callable[[JointSave], None]) -> None:
        """Begin this save, whose turn it is. The first one waits for rank 0's word.

        `listen_again` is called with an attempt at the step that was given up undecided: rank 0 may have decided since.

        Raises PeerFailedError where rank 0 does not say anything, or has not decided about this step's last attempt.
        """
        self._wait_for_others()
        self._wait_for_decision(joint.step, listen_again)
        self._meeting.token()
        self._count(joint)
        self._name(joint)

    def _count(self, joint: JointSave) -> None:
        joint.number = next(self._numbers)
        joint.newest_decided = joint.number - self._max_in_flight
        joint.table = self._table_of(joint.number)

    def _table_of(self, number: int) -> Table:
        """The table by which the ranks share the save of this number."""
        newest_decided = number - self._max_in_flight
        return self._meeting.table if newest_decided < 0 else self._tables.get(newest_decided, EMPTY)

    def _name(self, joint: JointSave) -> None:
        """Give its attempt the name that it has on all ranks."""
        joint.attempt, joint.before = self._attempt(joint.step, self._num_over(joint.step)), None
        joint.life.go(JointState.BEGUN)
        self._begun[joint.step] = joint

    def _attempt(self, step: int, number: int) -> str:
        text = f"{self._meeting.token()}/{step}/{number}"
        return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()

    def decided_at(self, step: int) -> list[str]:
        """The attempts of this start of the world at a step that are decided."""
        return [self._attempt(step, number) for number in range(self._num_over(step))]

    def _num_over(self, step: int) -> int:
        return self._num_decided[step] + self._num_missed[step]

    def _wait_for_decision(self, step: int, listen_again: Callable[[JointSave], None]) -> None:
        begun, wait = self._begun.get(step), Wait("in save()", ENDS_THE_CALL)
        if begun is not None and begun.is_left:
            listen_again(begun)
        while begun is not None and not begun.is_decided:
            if begun.is_left:
                raise PeerFailedError(
                    f"{begun.what} was saved before, and this rank does not know whether it is committed, since rank 0 "
                    f"has not said so in time; save {'to another path' if begun.path else 'another step'}",
                    rank=0,
                    undecided=True,
                )
            wait.goes_on(lambda: f"the decision on the attempt at {begun.what} that failed here")
            TIMEKEEPER.sleep(_LOOK_SECONDS)

    # --- a save that has failed before it had a name --------------------------------------------------------

    def fail(self, joint: JointSave, cause: Cause) -> None:
        """The call has raised on this rank: the others have begun it, or are about to. It gets the name that it has
        there at once, or by `is_named`.
        """
        if joint.number < 0:
            self._count(joint)
        self.say_dropped(joint.number, joint.step)  # at once: this process may end before it hears of rank 0
        if not joint.attempt:
            joint.life.go(JointState.FAILED)
            joint.before, self._begun[joint.step] = self._begun.get(joint.step), joint
            self._name_if_known(joint)
        joint.causes.append(cause)

    def _name_if_known(self, joint: JointSave) -> None:
        is_next = joint.before is None or joint.before.is_decided
        if self._meeting.knows_token() and is_next and not self._in_vain:
            self._name(joint)

    def is_named(self, joint: JointSave) -> bool:
        """True if a save that has failed has its name by now: this rank knows the token, and the attempt before it at
        its step is decided. Asks the store, and does not wait.
        """
        self._meeting.look_for_token()
        if not joint.attempt:
            self._name_if_known(joint)
        return bool(joint.attempt)

    def forget(self, joint: JointSave) -> None:
        """A save will have no name: rank 0 has not come, or has not decided about the attempt before."""
        joint.life.go(JointState.LEFT)
        if self._begun.get(joint.step) is joint:
            del self._begun[joint.step]
            if joint.before is not None:
                self._begun[joint.step] = joint.before

    # --- a call that saves nothing on this rank -------------------------------------------------------------

    def begin_nothing(self, why: str) -> None:
        """The call has raised before it was known what it saves. It is counted, since the other ranks count theirs, and
        they are told: what they save by the same call fails. Ranks without a store cannot be told.
        """
        number, world = next(self._numbers), self._meeting.world
        self._in_vain.append(number)
        if world.store is None:
            return
        if world.rank == 0:
            self._meeting.token()  # the others may wait for it
            self._say(number, SavedInstead(_NO_STEP, f"nothing ({why})", ""))
        else:
            self._meeting.words().say(f"nothing/{number}", json.dumps(Cause(world.rank, why)))
            self.say_dropped(number, _NO_STEP)

    def saves_nothing(self, joint: JointSave) -> Cause | None:
        """On rank 0: the cause of a rank that saves nothing by the same call, if one has said so."""
        word = self._word(f"nothing/{joint.number}")
        return None if word is None else Cause(*json.loads(word))

    def say_dropped(self, number: int, step: int) -> None:
        """On another rank: what it has saved by this call is given up, for the case that rank 0 saves nothing."""
        world = self._meeting.world
        if world.rank and world.store is not None:
            with suppress(RuntimeError):  # the store is gone: then deadlines tell
                self._meeting.words().say(f"dropped/{number}/{world.rank}", str(step))

    def _wait_for_others(self) -> None:
        """Wait until the other ranks have given up what they saved by calls that have saved nothing here.

        The next attempt at such a step needs another name than theirs. None of them has to make another call for that,
        which it could not if its training waited for this rank.
        """
        wait, deadline = Wait("in save()", ENDS_THE_CALL), monotonic() + MEETING_SECONDS
        while self._in_vain:
            number = self._in_vain[0]
            steps = self._given_up(number)
            if steps is not None:
                self._num_missed.update(steps)
                self._tables[number] = self._table_of(number)
                self._in_vain.popleft()
            elif monotonic() > deadline:
                raise PeerFailedError(
                    f"an earlier call of save() raised on this rank, and after {MEETING_SECONDS:.0f} s the other ranks "
                    f"have not made that call, or have not ended it: {self._meeting.advice}",
                    rank=0,
                )
            else:
                wait.goes_on(lambda: "the other ranks, whose save by the call that raised here is to fail")
                TIMEKEEPER.sleep(_LOOK_SECONDS)

    def _given_up(self, number: int) -> set[int] | None:
        """The steps at which other ranks have given up an attempt by a call that saves nothing here; None as long as
        that is not known. Does not wait.
        """
        world = self._meeting.world
        if world.store is None:
            return set()
        words = self._meeting.words()
        if world.rank:
            instead = self._said(number)
            if instead is None or instead.attempt:
                return None if instead is None else {instead.step}
        keys = [f"dropped/{number}/{rank}" for rank in range(1, world.size)]  # rank 0 saves nothing
        if not words.are_said(keys):
            return None
        return {int(word) for word in words.hear(keys, lambda _: None)} - {_NO_STEP}

    # --- ranks that save other things by the same call ------------------------------------------------------

    def say(self, joint: JointSave) -> None:
        """On rank 0: tell the other ranks what this call saves. Ranks without a store cannot be told."""
        if self._meeting.world.store is not None:
            with suppress(RuntimeError):  # the store is gone: then deadlines tell
                self._say(joint.number, SavedInstead(joint.step, joint.what, joint.attempt))

    def _say(self, number: int, word: SavedInstead) -> None:
        self._meeting.words().say(f"save/{number}", json.dumps(word))

    def said_instead(self, joint: JointSave) -> SavedInstead | None:
        """On another rank: the save that rank 0 makes by the same call, if it has said so, and it is not this one."""
        instead = self._said(joint.number)
        return None if instead is None or instead.attempt == joint.attempt else instead

    def _said(self, number: int) -> SavedInstead | None:
        word = self._word(f"save/{number}")
        return None if word is None else SavedInstead(*json.loads(word))

    def _word(self, key: str) -> str | None:
        if self._meeting.world.store is not None:
            with suppress(RuntimeError):
                return self._meeting.words().said(key)
        return None

    def is_mistaken(self, joint: JointSave, instead: SavedInstead) -> None:
        """No rank commits this save; and rank 0 will not commit its own, of which this rank has no part."""
        if not joint.is_decided:
            joint.life.go(JointState.REFUSED)
            self._num_decided[instead.step if instead.attempt else joint.step] += 1
            self._tables[joint.number] = joint.table

    # --- the decision -------------------------------------------------------------------------------------

    def decide(self, joint: JointSave, state: JointState, table: Table | None) -> None:
        """A save is decided, and `table` is what is known of the ranks from then on; None: what it was begun with."""
        if joint.is_decided:
            return
        joint.life.go(state)
        self._num_decided[joint.step] += 1
        self._tables[joint.number] = joint.table if table is None else table
        self._tables.pop(joint.number - 2 * self._max_in_flight - 1, None)
