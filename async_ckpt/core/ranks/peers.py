"""The other ranks, as one checkpointer knows them.

In: calls of `save` and `restore`, the same on every rank. Out: joint saves with their names, divided states. Knows
nothing of: archives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from ..runs.receipts import Cause
from ..spec import entry_names, flag
from ..state.captured import Capture
from .calls import Calls, JointSave, JointState
from .divide import Divider
from .meeting import Meeting, in_words
from .nodes import RunNodes
from .store import quietly
from .world import World

Differing: TypeAlias = Literal["keep", "fail"]

# The key of the message of a rank that was asked to leave.
_LEAVING: Final = "leaving"


@dataclass(slots=True)
class KnownStates:
    """The knowledge of this rank about the states of all ranks, from commits. Changed on the loop's thread."""

    texts: dict[str, str] = field(default_factory=dict)  # structures that rank 0 has read, by their digest
    # Tables whose ranks together hold everything, and the names of values that each of their ranks has for itself.
    covered: dict[str, tuple[str, ...]] = field(default_factory=dict)
    compared: set[str] = field(default_factory=set)  # structures whose replicas have been compared
    committed: str = ""  # the structure of this rank's part in the last commit

    def note_committed(self, structure: str) -> None:
        """Note that this rank's part in a commit has this structure."""
        self.compared.add(structure)
        self.committed = structure


class Ranks:
    """The other ranks of one checkpointer, which creates it. Used on the thread that saves or restores.

    `meeting` has their messages, `calls` their joint saves, `divider` the part that this rank writes, `known` what is
    known from commits.
    """

    def __init__(
        self,
        meeting: Meeting,
        max_in_flight: int,
        *,
        differing: Differing = "keep",
        check_replicas: bool = False,
        mesh: Any = None,
    ) -> None:
        if differing not in ("keep", "fail"):
            raise ValueError(f'differing must be "keep" or "fail", got {differing!r}')
        self.may_differ, self.known = differing == "keep", KnownStates()
        self.meeting = meeting
        self.calls = Calls(self.meeting, max_in_flight, self.known.note_committed)
        self.divider = Divider(
            self.meeting, self.known.compared, mesh=mesh, check_replicas=flag("check_replicas", check_replicas)
        )
        self.nodes: RunNodes | None = None  # set for a run at several places
        self._is_leaving = False  # on rank 0: some rank was asked to leave

    @property
    def world(self) -> World:
        return self.meeting.world

    @property
    def is_alone(self) -> bool:
        return self.world.is_one

    def called(self, step: int | None, path: str = "") -> JointSave | None:
        """Register a call of `save`, to a path or with a step; None stands for an invalid step. Returns None if there
        is only one rank.

        Raises ValueError if the process group has changed.
        """
        self.meeting.refuse_if_changed()
        if self.is_alone:
            return None
        joint = JointSave(step, path)
        self.calls.enter(joint)
        if not path:
            try:
                self.meet_nodes()
            except BaseException as error:
                self.failed(joint, error)
                raise
        return joint

    def called_in_vain(self, error: BaseException) -> None:
        """Report that `save` was called with an invalid step, so that the other ranks' saves by this call fail."""
        with suppress(ValueError):  # the group has changed, which the caller reports
            joint = self.called(None)
            if joint is not None:
                self.failed(joint, error)

    def enters(self, joint: JointSave, ask: Callable[[], bool]) -> bool:
        """True if all ranks make a save, False if they skip it; `ask` decides on rank 0. Raises PeerFailedError."""
        if self.world.rank == 0:
            enters = ask()
            if not enters:
                self.calls.skip(joint)
            return enters
        self.meeting.wait_for_rank_0(joint.begun, f"rank 0's word on {joint.what}")
        joint.begun.result()
        return joint.life.now is not JointState.SKIPPED

    def failed(self, joint: JointSave, error: BaseException) -> None:
        """Report to the other ranks why the call has raised on this one. Does not wait."""
        self.calls.fail(joint, Cause(self.world.rank, in_words(error)))
        self.meeting.does_not_meet()

    @contextmanager
    def meeting_ahead(self, per_rank: Collection[str]) -> Iterator[Callable[[Capture], None]]:
        """Before the first save: yields a function that takes the captured state, and waits until rank 0 knows the
        structures of all ranks, so that no save has to wait for them.
        """
        self.meeting.refuse_if_changed()
        try:
            names = entry_names("per_rank", per_rank)
            yield lambda captured: self.divider.meet(captured, names)
        except BaseException:
            self.meeting.does_not_meet()
            raise

    def meet_nodes(self) -> None:
        """Find out, at the first call of all ranks, at which places each node has its own folder.

        Raises PeerFailedError, StorageUnavailableError.
        """
        if self.nodes is not None:
            self.nodes.meet()

    def hang_up(self) -> None:
        """Close connections to other nodes, after much was read from them; nothing will be read for a while."""
        if self.nodes is not None:
            self.nodes.hang_up()

    def close(self) -> None:
        """Make no more calls, and stop answering other nodes."""
        self.calls.close()
        if self.nodes is not None:
            self.nodes.close()

    def answer_of_rank_0(self, what: str, step: int, ask: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """Return rank 0's result of `ask` on all ranks, which must ask about the same steps.

        Raises PeerFailedError on the other ranks if `ask` raises on rank 0.
        """
        self.meeting.refuse_if_changed()
        return ask() if self.is_alone else self.meeting.answer_of_rank_0(what, step, ask)

    def asks_in_vain(self, error: BaseException) -> None:
        """On rank 0, report that it could not ask, so that the other ranks do not wait for its answer."""
        with suppress(ValueError):  # the group has changed, which the caller reports
            self.meeting.refuse_if_changed()
            if not self.is_alone and self.world.rank == 0:
                self.meeting.send_answer(None, error=in_words(error))

    def is_leaving(self, *, asked: bool) -> bool:
        """True if this rank was asked to leave, which it then reports to rank 0; on rank 0, True if any rank was.

        Raises ValueError if the process group has changed.
        """
        self.meeting.refuse_if_changed()
        if self.is_alone or self._is_leaving:
            return asked or self._is_leaving
        messages, is_rank_0 = self.meeting.messages(), self.world.rank == 0
        if asked and not is_rank_0:
            quietly(lambda: messages.send(_LEAVING, str(self.world.rank)))
        self._is_leaving = asked or (is_rank_0 and quietly(lambda: messages.sent(_LEAVING)) is not None)
        return asked or self._is_leaving

    def reader(self) -> tuple[int, int] | None:
        """The reading rank and the number of ranks; None for a single rank. Raises ValueError as `called` does."""
        self.meeting.refuse_if_changed()
        return None if self.is_alone else (self.world.rank, self.world.size)
