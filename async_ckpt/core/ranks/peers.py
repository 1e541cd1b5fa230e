"""The other ranks, as one checkpointer knows them.

In: calls of `save` and `restore`, alike on every rank. Out: joint saves with their names, divided states. Knows
nothing of: archives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias
from weakref import WeakKeyDictionary

from ...errors import PeerFailedError
from ..runs.receipts import Cause
from ..runs.run import Run
from ..spec import entry_names, flag
from ..state.captured import Capture
from .answers import Answers, in_words
from .attempts import AttemptPlace, Attempts, JointSave, JointState
from .divide import Divider
from .meeting import Meeting
from .one_off import OneOffFolder
from .shared_root import SharedRoot
from .world import World

Differing: TypeAlias = Literal["keep", "fail"]


# Said by a rank that was asked to leave.
_LEAVING: Final = "leaving"


@dataclass(slots=True)
class KnownStates:
    """The knowledge of this rank about the states of ranks, from commits. Changed on the loop's thread."""

    texts: dict[str, str] = field(default_factory=dict)  # structures that rank 0 has read, by their digest
    # Tables whose ranks hold everything, and the names of what each rank has for itself there.
    covered: dict[str, tuple[str, ...]] = field(default_factory=dict)
    compared: set[str] = field(default_factory=set)  # structures in which what ranks hold alike was compared


class Ranks:
    """The other ranks of one checkpointer, which creates it. From the thread that saves or restores.

    `meeting` has their words, `attempts` their joint saves, `divider` the part that this rank writes, `known` what
    commits have taught.
    """

    def __init__(
        self,
        meeting: Meeting,
        max_in_flight: int,
        *,
        differing: Differing = "keep",
        check_replicas: bool = False,
        mesh: Any = None,
        skips: bool = False,
    ) -> None:
        """`skips`: whether overlapping saves are skipped."""
        if differing not in ("keep", "fail"):
            raise ValueError(f'differing must be "keep" or "fail", got {differing!r}')
        self.may_differ, self.known = differing == "keep", KnownStates()
        self.meeting = meeting
        self.attempts = Attempts(self.meeting, max_in_flight)
        self.divider = Divider(
            self.meeting, self.known.compared, mesh=mesh, check_replicas=flag("check_replicas", check_replicas)
        )
        self._skips, self._answers = skips, Answers(self.meeting.words, self.meeting.hear)
        self._is_leaving = False  # rank 0 was told that some rank is to leave
        # Those of one-off saves go with these.
        self._roots: WeakKeyDictionary[AttemptPlace, SharedRoot] = WeakKeyDictionary()

    @property
    def world(self) -> World:
        return self.meeting.world

    @property
    def is_alone(self) -> bool:
        return self.world.is_one

    def called(self, step: int) -> JointSave | None:
        """`save` was called; None where there is one rank. Raises ValueError where the process group is another one
        by now.
        """
        self.meeting.refuse_if_changed()
        if self.is_alone:
            return None
        return JointSave(step, question=self._answers.question("save()", step) if self._skips else "")

    def called_in_vain(self, error: BaseException) -> None:
        """`save` was called with something that is no step: tell the other ranks, whose save by the same call fails.

        Where overlapping saves are skipped, nobody knows whether such a call counts, and nobody is told.
        """
        with suppress(ValueError, RuntimeError):  # the group has changed, or its store is gone: the caller raises
            if not (self.is_alone or self._skips):
                self.attempts.begin_nothing(in_words(error))
                self.meeting.does_not_meet()

    def called_once(self, folder: OneOffFolder) -> JointSave:
        """A one-off `save` to a folder was called. Raises as `called`."""
        self.meeting.refuse_if_changed()
        return JointSave(folder.number, folder.path)

    def enters(self, joint: JointSave, ask: Callable[[], bool]) -> bool:
        """True if a save is made, and not skipped, on all ranks; `ask` says so on rank 0. Raises its errors,
        PeerFailedError.
        """
        question, joint.question = joint.question, ""
        (enters,) = self._answers.of_rank_0(question, (lambda: (ask(),)) if self.world.rank == 0 else None)
        return enters

    def failed(self, joint: JointSave, error: BaseException) -> None:
        """The call has raised on this rank. Waits at most for rank 0's word on whether the save is skipped."""
        if joint.question and not self._is_begun(joint, error):
            joint.life.go(JointState.SKIPPED)
            return
        self.attempts.fail(joint, Cause(self.world.rank, in_words(error)))
        self.meeting.does_not_meet()

    def _is_begun(self, joint: JointSave, error: BaseException) -> bool:
        """True if the other ranks make this save, which has failed here before that was known."""
        if self.world.rank == 0:
            self._answers.fail(joint.question, error)
        elif isinstance(error, Exception):  # whoever interrupts does not want to wait
            try:
                return self.enters(joint, lambda: True)
            except PeerFailedError:
                pass  # all have failed
        return True

    @contextmanager
    def meeting_ahead(self, per_rank: Collection[str]) -> Iterator[Callable[[Capture], None]]:
        """Ahead of the first save; to be called with the captured state: waits until rank 0 knows how the states of
        all ranks look, so that no save has to.
        """
        self.meeting.refuse_if_changed()
        try:
            names = entry_names("per_rank", per_rank)
            yield lambda captured: self.divider.meet(captured, names)
        except BaseException:
            self.meeting.does_not_meet()
            raise

    def root(self, place: AttemptPlace, joint: JointSave) -> SharedRoot:
        """The knowledge of one root. All ranks ask for their roots in the same order."""
        if place not in self._roots:
            self._roots[place] = SharedRoot(
                place.storage,
                f"save/{joint.number}" if joint.path else f"root/{len(self._roots)}",
                self.world,
                # The folder of a one-off save is claimed by each of its attempts.
                (lambda: f"{self.meeting.token()}.{joint.attempt}") if joint.path else self.meeting.token,
                lambda: None if self.world.store is None else self.meeting.words(),
                folder=place.folder(joint.step) if joint.path else "",
            )
        return self._roots[place]

    def is_apart(self, run: Run) -> bool:
        """True if it is known that not all ranks see the same at this root."""
        return run in self._roots and self._roots[run].is_apart

    def answers_of_rank_0(self, what: str, step: int, ask: Callable[[], tuple[bool, ...]]) -> tuple[bool, ...]:
        """Return rank 0's answers of `ask` on all ranks, which ask about the same steps.

        Raises PeerFailedError on the others where it raises on rank 0.
        """
        self.meeting.refuse_if_changed()
        if self.is_alone:
            return ask()
        return self._answers.of_rank_0(self._answers.question(what, step), ask if self.world.rank == 0 else None)

    def is_leaving(self, *, asked: bool) -> bool:
        """Whether this rank was asked to leave, which it tells rank 0 here; on rank 0, whether any has told it so.

        Raises ValueError where the process group is another one by now.
        """
        self.meeting.refuse_if_changed()
        if self.is_alone or self._is_leaving:
            return asked or self._is_leaving
        with suppress(RuntimeError):  # the store is gone: then rank 0's answer does not come either
            words, is_rank_0 = self.meeting.words(), self.world.rank == 0
            if asked and not is_rank_0:
                words.say(_LEAVING, str(self.world.rank))
            self._is_leaving = asked or (is_rank_0 and words.is_said(_LEAVING))
        return asked or self._is_leaving

    def readers(self, from_ranks: Mapping[str, int] | None) -> tuple[tuple[int, int] | None, Mapping[str, int] | None]:
        """The reading rank and the number of ranks, where there are several; and the ranks whose values it wants.

        Raises ValueError as `called`.
        """
        self.meeting.refuse_if_changed()
        return None if self.is_alone else (self.world.rank, self.world.size), from_ranks
