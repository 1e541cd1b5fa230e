"""Several ranks save one state: what each of them tells the others, and how all come to know what was decided.

In: saves, called alike on every rank. Out: attempts that are decided once, for all ranks. Knows nothing of: archives.

There is no collective, and no plan that one rank makes for all. Before the first save rank 0 says, by the store of the
process group, what this start of the world is called (its token) and which ranks have states alike. From then on nothing
is asked of the group: the name of an attempt follows from the token, the step and what was decided there before, and all
else goes through the folder of the step (`runs.receipts`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

import torch

from ..errors import PeerFailedError
from ..format.digests import block_digest
from ..host.waits import ENDS_THE_CALL, Wait
from ..runs.receipts import EMPTY, NO_TABLE, Cause, Table
from ..runs.run import Run
from ..slicing.locator import Classes
from ..slicing.sharded import Slicer, mesh_of
from ..spans import TIMEKEEPER
from ..spec import RankFacts, flag
from ..staging.device import dense_blocks
from ..state.captured import Capture
from ..state.division import StateDivider, Structure
from .answers import Answers, in_words
from .meeting import MEETING_SECONDS, hear
from .shared_root import SharedRoot
from .shared_values import SharedValues
from .talk import Talk
from .world import Words, World, refuse_if_changed, world_of

Differing: TypeAlias = Literal["keep", "fail"]

_LOOK_SECONDS: Final = 0.02
NOT_ALONE: Final = (
    "call save on every rank, or, if this one alone saves, give its AsyncCheckpointer ranks=(0, 1)"
)


@dataclass(slots=True)
class Joint:
    """One save of all ranks, as this rank sees it."""

    step: int
    attempt: str = ""  # once it has begun
    number: int = -1  # among those that have begun, as on all ranks; -1 before that
    decided: int = -1  # the last of these that all ranks knew the decision of when this one began
    table: Table = EMPTY  # by which this rank shares
    question: str = ""  # whether it is skipped, where that is still to be asked
    before: Joint | None = None  # of one that has no name yet: what was begun at its step before
    structure: Structure | None = None  # of its state, once it is known
    per_rank: tuple[str, ...] = ()  # the names of what each rank has for itself
    # Groups that are not saved again, and the steps that have them.
    borrowed: Mapping[str, int] = field(default_factory=dict)
    shared: SharedValues | None = None  # what all should have alike
    balance: int = 0  # of what this rank writes, see `slicing.shares`
    # Digests of what other ranks may hold, too, by what it is of which tensor; None where that was compared before.
    copies: dict[str, dict[str, str]] | None = None
    causes: list[Cause] = field(default_factory=list)
    is_followed: bool = True  # somebody here is going to learn what is decided
    is_any: bool = False  # one of several roots is enough
    is_decided: bool = False
    is_committed: bool = False  # at some root
    maybe_at: set[Run] = field(default_factory=set)  # on rank 0: where it has put the manifest, or may have

    @property
    def shares_by(self) -> str:
        """The table that this rank shares by; it takes no share where its structure is in no class."""
        is_known = self.structure is not None and self.structure.digest in self.table.classes
        return self.table.digest if is_known else NO_TABLE


class Ranks:
    """The other ranks, as one checkpointer knows them. From the thread that saves; `decided` from the loop's."""

    def __init__(
        self,
        given: tuple[int, int] | None,
        run_id: str | None,
        max_in_flight: int,
        *,
        differing: Differing = "keep",
        check_replicas: bool = False,
        mesh: Any = None,
        skips: bool = False,
        needs_group: Mapping[str, bool] = MappingProxyType({}),
    ) -> None:
        """`skips`: whether overlapping saves are skipped. `needs_group` says of arguments that can do nothing where ranks
        have no store whether they were given.
        """
        if differing not in ("keep", "fail"):
            raise ValueError(f'differing must be "keep" or "fail", got {differing!r}')
        self.may_differ, self._check_replicas = differing == "keep", flag("check_replicas", check_replicas)
        self._max_in_flight = max_in_flight
        self.root_mesh = None if mesh is None else mesh_of(mesh)
        self._world: World | None = None
        if given is not None or run_id is not None:
            self._world = world_of(given, run_id)
            given_all_the_same = [argument for argument, is_given in needs_group.items() if is_given]
            if given_all_the_same and not self._world.is_one:
                raise ValueError(
                    f"{given_all_the_same[0]} needs a process group, by which ranks agree on what they do; with ranks= there is none, so "
                    "leave it out"
                )
        self._words: Words | None = None
        self._token: str | None = None
        self._numbers, self._restores = itertools.count(), itertools.count()
        self._skips, self._answers = skips, Answers(self._said, self._hear)
        self._has_met = False
        self._met = EMPTY  # what was known of the ranks before the first decision
        self._per_rank: tuple[str, ...] = ()  # of the state by which they met ahead of it
        self._states: StateDivider | None = None
        # Changed on the loop's thread alone, entries at a time.
        self._tables: dict[int, Table] = {}  # that follow from the decision of the save of this number
        self._num_decided: Counter[int] = Counter()  # attempts, by step
        self._begun: dict[int, Joint] = {}  # the last one that this rank has begun at a step
        self.known: dict[str, str] = {}  # structures that rank 0 has read, by their digest
        # Tables whose ranks hold everything, and the names of what each rank has for itself there.
        self.covered: dict[str, tuple[str, ...]] = {}
        self._roots: dict[Run, SharedRoot] = {}
        self.compared: set[str] = set()  # structures of commits, in which what ranks hold alike was compared

    @property
    def world(self) -> World:
        """Fixed when it is first asked for, which is at the first save or restore."""
        if self._world is None:
            self._world = world_of(None, None)
        return self._world

    @property
    def is_alone(self) -> bool:
        return self.world.is_one

    @property
    def have_store(self) -> bool:
        """True if there is a process group, by whose store the ranks can tell each other things."""
        return self.world.store is not None

    def called(self, step: int) -> Joint | None:
        """`save` was called; None where there is one rank. Raises ValueError where the process group is another one by now."""
        refuse_if_changed(self.world)
        if self.world.is_one:
            return None
        return Joint(step, question=self._answers.question("save()", step) if self._skips else "")

    def enters(self, joint: Joint, ask: Callable[[], bool]) -> bool:
        """True if a save is made, and not skipped, on all ranks; `ask` says so on rank 0. Raises its errors, PeerFailedError."""
        question, joint.question = joint.question, ""
        (enters,) = self._answers.of_rank_0(question, (lambda: (ask(),)) if self.world.rank == 0 else None)
        return enters

    def begin(self, joint: Joint, listen_again: Callable[[Joint], None]) -> None:
        """Begin this save, whose turn it is. The first one waits for rank 0's word.

        `listen_again` is called with an attempt at the step that was given up undecided: rank 0 may have decided since.

        Raises PeerFailedError where rank 0 does not say anything, or has not decided about this step's last attempt.
        """
        self._wait_for_decision(joint.step, listen_again)
        self.token()
        self._count(joint)
        self._name(joint)

    def _count(self, joint: Joint) -> None:
        joint.number = next(self._numbers)
        joint.decided = joint.number - self._max_in_flight
        joint.table = self._met if joint.decided < 0 else self._tables.get(joint.decided, EMPTY)

    def _name(self, joint: Joint) -> None:
        """Give its attempt the name that it has on all ranks."""
        joint.attempt = self._attempt(joint.step, self._num_decided[joint.step])
        self._begun[joint.step] = joint

    def _attempt(self, step: int, number: int) -> str:
        told = f"{self.token()}/{step}/{number}"
        return hashlib.blake2b(told.encode(), digest_size=4).hexdigest()

    def decided_attempts(self, step: int) -> list[str]:
        """The attempts of this start of the world at a step that are decided."""
        return [self._attempt(step, number) for number in range(self._num_decided[step])]

    def _wait_for_decision(self, step: int, listen_again: Callable[[Joint], None]) -> None:
        begun, wait = self._begun.get(step), Wait("in save()", ENDS_THE_CALL)
        if begun is not None and not begun.is_decided and not begun.is_followed:
            listen_again(begun)
        while begun is not None and not begun.is_decided:
            if not begun.is_followed:
                raise PeerFailedError(
                    f"step {step} was saved before, and this rank does not know whether it is committed, since rank 0 has not "
                    "said so in time; save another step",
                    rank=0,
                    undecided=True,
                )
            wait.goes_on(lambda: f"the decision on the attempt at step {step} that failed here")
            TIMEKEEPER.sleep(_LOOK_SECONDS)

    @property
    def slicer(self) -> Slicer | None:
        """The slicer that finds the local slices of tensors; None in a process that is no part of anything."""
        states = self._ranked()
        return None if states is None else states.slicer

    def divided(self, captured: Capture, joint: Joint | None) -> tuple[Capture, RankFacts | None]:
        """The part of a state that this rank writes. The first save waits until rank 0 knows the structures of all ranks.

        Without `joint`, nothing is written yet: the part that would be.
        """
        states = self._ranked()
        if states is None:
            return captured, None
        if joint is None:
            known, own = self._met.classes, self._own_in(captured)
            mates = known.get(states.structure(captured, own).digest, ()) if known else ()
            made = states.divided(captured, mates, own)
            return made.captured, made.ranks
        per_rank = tuple(sorted({*joint.per_rank, *captured.per_rank}))
        joint.structure = states.structure(captured, per_rank, joint.borrowed)
        if not self._has_met:
            joint.table = self._met = Table(self._meet(joint.structure.digest, "save()"))
        made = states.divided(captured, joint.table.classes.get(joint.structure.digest, ()), per_rank)
        joint.balance = made.balance
        joint.per_rank = tuple(sorted({*per_rank, *joint.table.differing}))
        joint.shared = SharedValues(
            captured.skeleton,
            captured.objects,
            made.small,
            made.captured.specs,
            joint.per_rank,
            joint.table.of_some.get(joint.structure.digest, ()),
        )
        if self._check_replicas or joint.structure.digest not in self.compared:
            joint.copies = _digests(states.copies(captured))
        return made.captured, made.ranks

    @contextmanager
    def meeting(self, per_rank: Collection[str]) -> Iterator[Callable[[Capture], None]]:
        """Ahead of the first save; to be called with the captured state: waits until rank 0 knows how the states of all ranks
        look, so that no save has to.
        """
        refuse_if_changed(self.world)

        def meet(captured: Capture) -> None:
            states = self._ranked()
            if states is not None and self.have_store and not self._has_met:
                self.token()
                self._per_rank = (per_rank,) if isinstance(per_rank, str) else tuple(per_rank)
                structure = states.structure(captured, self._own_in(captured))
                self._met = Table(self._meet(structure.digest, "prewarm()"))

        try:
            yield meet
        except BaseException:
            self.does_not_meet()
            raise

    def _own_in(self, captured: Capture) -> tuple[str, ...]:
        """The names that each rank has for itself in a state that is not saved yet."""
        return tuple(sorted({*self._per_rank, *captured.per_rank}))

    def does_not_meet(self) -> None:
        """Tell rank 0 not to wait for the structure of this rank's state, since the call has raised before it was known."""
        if not self._has_met and self.have_store:
            self._has_met = True
            self._said().say(f"structure/{self.world.rank}", _NONE)
            if self.world.rank == 0:
                self._said().say("classes", json.dumps(EMPTY.packed()))

    def token(self) -> str:
        """The name of this start of the world: the same on all ranks, and of no other start."""
        if self._token is None:
            world = self.world
            if world.run_id is not None:
                self._token = hashlib.blake2b(world.run_id.encode(), digest_size=8).hexdigest()
            elif world.rank == 0:
                self._token = os.urandom(8).hex()
                self._said().say("token", self._token)
            else:
                (self._token,) = self._hear(["token"], "the first save or restore of rank 0")
        return self._token

    def root(self, run: Run) -> SharedRoot:
        """The knowledge of one root. All ranks ask for their roots in the same order."""
        if run not in self._roots:
            self._roots[run] = SharedRoot(
                run,
                len(self._roots),
                self.world,
                self.token,
                lambda: None if self.world.store is None else self._said(),
            )
        return self._roots[run]

    def is_apart(self, run: Run) -> bool:
        """True if it is known that not all ranks see the same at this root."""
        return run in self._roots and self._roots[run].is_apart

    def _ranked(self) -> StateDivider | None:
        """None in a process that is no part of anything: then tensors are all that they are."""
        world = self.world
        if self._states is None and (world.has_group or not world.is_one):
            self._states = StateDivider(world.rank, world.size, self.root_mesh)
        return self._states

    def answers_of_rank_0(
        self, what: str, step: int, ask: Callable[[], tuple[bool, ...]]
    ) -> tuple[bool, ...]:
        """Return rank 0's answers of `ask` on all ranks, which ask about the same steps.

        Raises PeerFailedError on the others where it raises on rank 0.
        """
        refuse_if_changed(self.world)
        if self.world.is_one:
            return ask()
        return self._answers.of_rank_0(
            self._answers.question(what, step), ask if self.world.rank == 0 else None
        )

    # --- a restore ----------------------------------------------------------------------------------------

    def readers(
        self, from_ranks: Mapping[str, int] | None
    ) -> tuple[tuple[int, int] | None, Mapping[str, int] | None]:
        """The reading rank and the number of ranks, where there are several; and the ranks whose values it wants.

        Raises ValueError as `called`.
        """
        world = self.world
        refuse_if_changed(world)
        return None if world.is_one else (world.rank, world.size), from_ranks

    def talk(self) -> Talk | None:
        """The words of one restore; None for a rank alone. Raises ValueError without a store."""
        world = self.world
        if world.is_one:
            return None
        if world.store is None:
            raise ValueError(
                "with ranks=, there is no process group by which ranks could agree on the newest step; give step="
            )
        return Talk(world.rank, world.size, self._said, self._hear, f"restore/{next(self._restores)}")

    # --- the first save -----------------------------------------------------------------------------------

    def _said(self) -> Words:
        """The words of this checkpointer: all ranks open theirs in the same order."""
        if self._words is None:
            self._words = self.world.opening()
        return self._words

    def _meet(self, structure: str, where: str) -> Classes:
        """Tell rank 0 how the state looks here, and hear which ranks have states alike."""
        self._has_met = True
        rank, size = self.world.rank, self.world.size
        if self.world.store is None:
            return {}  # they learn it from the first receipts
        words = self._said()
        words.say(f"structure/{rank}", structure)
        if rank == 0:
            told = self._hear(
                [f"structure/{n}" for n in range(size)], "the first save of the other ranks", where
            )
            classes: dict[str, list[int]] = {}
            for n, digest in enumerate(told):
                if digest != _NONE:  # that rank's save has raised
                    classes.setdefault(digest, []).append(n)
            words.say("classes", json.dumps(Table(classes).packed()))
        (text,) = self._hear(["classes"], "the first save of all ranks", where)
        return Table.unpacked(json.loads(text)).classes

    def _hear(
        self,
        keys: Sequence[str],
        what: str,
        where: str = "save()",
        takes_time: Callable[[], bool] = lambda: False,
    ) -> list[str]:
        """The words of these keys, once all of them are said. `takes_time`: the rank that is to say them has told just now that this takes
        longer.
        """
        wait = Wait(f"in {where}", ENDS_THE_CALL)

        def late() -> PeerFailedError:
            missing = [key.rpartition("/")[2] for key in keys if not self._said().is_said(key)]
            who = f"; nothing was heard of ranks {', '.join(missing[:20])}" if len(keys) > 1 else ""
            return PeerFailedError(
                f"waited {MEETING_SECONDS:.0f} s for {what}{who}. {NOT_ALONE[0].upper()}{NOT_ALONE[1:]}",
                rank=int(missing[0]) if missing and len(keys) > 1 else 0,
                undecided=False,
            )

        def look_around() -> bool:
            goes_on = takes_time()
            if self.world.is_over():
                raise PeerFailedError(
                    f"waited for {what}, but rank 0 is at a later start of the ranks than this one; start all of them again",
                    rank=0,
                    undecided=False,
                )
            return goes_on

        return hear(
            self._said(), keys, lambda: wait.goes_on(lambda: f"{what}; {NOT_ALONE}"), late, look_around
        )

    def failed(self, joint: Joint, error: BaseException) -> None:
        """The call has raised on this rank: the others have begun it, or are about to. It gets the name that it has there at
        once, or by `is_named`. Waits at most for rank 0's word on whether it is skipped.
        """
        if joint.question and not self._is_begun(joint, error):
            joint.is_decided = True
            return
        if joint.number < 0:
            self._count(joint)
        if not joint.attempt:
            joint.before, self._begun[joint.step] = self._begun.get(joint.step), joint
            self._name_if_known(joint)
        self.does_not_meet()
        joint.causes.append(Cause(self.world.rank, in_words(error)))

    def _is_begun(self, joint: Joint, error: BaseException) -> bool:
        """True if the other ranks make this save, which has failed here before that was known."""
        if self.world.rank == 0:
            self._answers.fail(joint.question, error)
        elif isinstance(error, Exception):  # whoever interrupts does not want to wait
            try:
                return self.enters(joint, lambda: True)
            except PeerFailedError:
                pass  # all have failed
        return True

    def _name_if_known(self, joint: Joint) -> None:
        is_known = self._token is not None or self.world.rank == 0 or self.world.run_id is not None
        if is_known and (joint.before is None or joint.before.is_decided):
            self._name(joint)
            joint.before = None

    def is_named(self, joint: Joint) -> bool:
        """True if a save that has failed has its name by now: this rank knows the token, and the attempt before it at its step
        is decided. Asks the store, and does not wait.
        """
        if self._token is None and self.have_store:
            self._token = self._said().said("token")
        if not joint.attempt:
            self._name_if_known(joint)
        return bool(joint.attempt)

    def is_unheard_of(self, joint: Joint) -> None:
        """Forget a save that will have no name: rank 0 has not come, or has not decided about the attempt before."""
        joint.is_followed = False
        if self._begun.get(joint.step) is joint:
            del self._begun[joint.step]
            if joint.before is not None:
                self._begun[joint.step] = joint.before

    # --- what is decided ----------------------------------------------------------------------------------

    def decided(self, joint: Joint, table: Table | None) -> None:
        """A save is decided, and `table` is what is known of the ranks from then on; None: what it was begun with."""
        if joint.is_decided:
            return
        joint.is_decided = True
        self._num_decided[joint.step] += 1
        self._tables[joint.number] = joint.table if table is None else table
        self._tables.pop(joint.number - 2 * self._max_in_flight - 1, None)


_NONE: Final = "-"


def _digests(copies: Sequence[tuple[str, str, list[torch.Tensor]]]) -> dict[str, dict[str, str]]:
    """Digests of the local bytes of each tensor, by the part of it and its name. Takes its time."""
    found: dict[str, dict[str, str]] = {}
    for what, name, slices in copies:
        blocks = (block for one in slices for _, block in dense_blocks(one.detach(), 0, one.nbytes))
        data = b"".join(block_digest(block.cpu().numpy().data) for block in blocks)
        found.setdefault(what, {})[name.replace("\x1f", ".")] = block_digest(data).hex()[:16]
    return found
