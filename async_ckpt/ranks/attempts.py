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
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple, Protocol

from ..errors import PeerFailedError
from ..host.life import Life
from ..host.waits import ENDS_THE_CALL, Wait
from ..runs.receipts import EMPTY, NO_TABLE, Cause, Exchange, Table
from ..spans import TIMEKEEPER
from ..state.division import Structure
from ..storage.interface import Storage
from .meeting import Meeting
from .shared_values import SharedValues

_LOOK_SECONDS: Final = 0.02


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

    def do_all(self, tasks: Sequence[Callable[[], None]]) -> None: ...


class SavedInstead(NamedTuple):
    """The save that rank 0 makes by the same call, where it is another one."""

    step: int
    what: str
    attempt: str


@dataclass(slots=True)
class OwnPart:
    """This rank's part in a joint save. Made by the thread that saves, before the attempt has an archive."""

    per_rank: tuple[str, ...] = ()  # the names of what each rank has for itself
    # Groups that are not saved again, and the steps that have them.
    borrowed: Mapping[str, int] = field(default_factory=dict)
    structure: Structure | None = None  # of its state, once it is known
    shared: SharedValues | None = None  # what all should have alike
    balance: int = 0  # of what this rank writes, see `slicing.shares`
    # Digests of what other ranks may hold, too, by what it is of which tensor; None where that was compared before.
    copies: dict[str, dict[str, str]] | None = None


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
    part: OwnPart = field(default_factory=OwnPart)
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
        structure = self.part.structure
        return NO_TABLE if structure is None or structure.digest not in self.table.classes else self.table.digest


class Attempts:
    """The joint saves of one checkpointer, as all of its ranks count them. From the thread that saves; `decide` from
    the loop's.
    """

    def __init__(self, meeting: Meeting, max_in_flight: int) -> None:
        self._meeting, self._max_in_flight = meeting, max_in_flight
        self._numbers = itertools.count()
        # Changed on the loop's thread alone, entries at a time.
        self._tables: dict[int, Table] = {}  # that follow from the decision of the save of this number
        self._num_decided: Counter[int] = Counter()  # attempts, by step
        self._begun: dict[int, JointSave] = {}  # the last one that this rank has begun at a step

    def begin(self, joint: JointSave, listen_again: Callable[[JointSave], None]) -> None:
        """Begin this save, whose turn it is. The first one waits for rank 0's word.

        `listen_again` is called with an attempt at the step that was given up undecided: rank 0 may have decided since.

        Raises PeerFailedError where rank 0 does not say anything, or has not decided about this step's last attempt.
        """
        self._wait_for_decision(joint.step, listen_again)
        self._meeting.token()
        self._count(joint)
        self._name(joint)

    def _count(self, joint: JointSave) -> None:
        joint.number = next(self._numbers)
        joint.newest_decided = joint.number - self._max_in_flight
        is_first = joint.newest_decided < 0
        joint.table = self._meeting.table if is_first else self._tables.get(joint.newest_decided, EMPTY)

    def _name(self, joint: JointSave) -> None:
        """Give its attempt the name that it has on all ranks."""
        joint.attempt, joint.before = self._attempt(joint.step, self._num_decided[joint.step]), None
        joint.life.go(JointState.BEGUN)
        self._begun[joint.step] = joint

    def _attempt(self, step: int, number: int) -> str:
        text = f"{self._meeting.token()}/{step}/{number}"
        return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()

    def decided_at(self, step: int) -> list[str]:
        """The attempts of this start of the world at a step that are decided."""
        return [self._attempt(step, number) for number in range(self._num_decided[step])]

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
        if not joint.attempt:
            joint.life.go(JointState.FAILED)
            joint.before, self._begun[joint.step] = self._begun.get(joint.step), joint
            self._name_if_known(joint)
        joint.causes.append(cause)

    def _name_if_known(self, joint: JointSave) -> None:
        if self._meeting.knows_token() and (joint.before is None or joint.before.is_decided):
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

    # --- ranks that save other things by the same call ------------------------------------------------------

    def say(self, joint: JointSave) -> None:
        """On rank 0: tell the other ranks what this call saves. Ranks without a store cannot be told."""
        if self._meeting.world.store is not None:
            word = SavedInstead(joint.step, joint.what, joint.attempt)
            with suppress(RuntimeError):  # the store is gone: then deadlines tell
                self._meeting.words().say(f"save/{joint.number}", json.dumps(word))

    def said_instead(self, joint: JointSave) -> SavedInstead | None:
        """On another rank: the save that rank 0 makes by the same call, if it has said so, and it is not this one."""
        word: str | None = None
        if self._meeting.world.store is not None:
            with suppress(RuntimeError):
                word = self._meeting.words().said(f"save/{joint.number}")
        instead = None if word is None else SavedInstead(*json.loads(word))
        return None if instead is None or instead.attempt == joint.attempt else instead

    def is_mistaken(self, joint: JointSave, instead: SavedInstead) -> None:
        """No rank commits this save; and rank 0 will not commit its own, of which this rank has no part."""
        if not joint.is_decided:
            joint.life.go(JointState.REFUSED)
            self._num_decided[instead.step] += 1
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
