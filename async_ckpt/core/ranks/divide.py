"""The part of a state that this rank writes, where several ranks hold it together.

In: captured states. Out: captured states with the part to write, and the facts about it for the other ranks. Knows
nothing of: archives.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..format.digests import block_digest
from ..slicing.sharded import Slicer, mesh_of
from ..spec import RankFacts
from ..staging.device import dense_blocks
from ..state.captured import Capture
from .calls import JointSave, OwnPart
from .meeting import Meeting

if TYPE_CHECKING:
    from ..state.division import StateDivider


class PlannedPart(NamedTuple):
    """The captured state with the part that this rank writes, the facts for its archive, and its `OwnPart`."""

    captured: Capture
    facts: RankFacts | None = None
    part: OwnPart | None = None


class Divider:
    """Divides the states of one checkpointer. Used on the thread that saves.

    `compared` are structures whose replicas have been compared in an earlier save; with `check_replicas`, every save
    compares them.
    """

    def __init__(
        self, meeting: Meeting, compared: Collection[str], *, mesh: Any = None, check_replicas: bool = False
    ) -> None:
        self._meeting, self._compared, self._check_replicas = meeting, compared, check_replicas
        self.root_mesh = None if mesh is None else mesh_of(mesh)
        self._per_rank: tuple[str, ...] = ()  # names in the state with which ranks met before the first save
        self._states: StateDivider | None = None

    @property
    def slicer(self) -> Slicer | None:
        """The slicer that finds the local slices of tensors; None without a process group."""
        states = self._ranked()
        return None if states is None else states.slicer

    def _ranked(self) -> StateDivider | None:
        """The divider; None without a process group: then no tensor is a shard."""
        world = self._meeting.world
        if self._states is None and (world.has_group or not world.is_one):
            from ..state.division import StateDivider  # a process that saves alone divides nothing

            self._states = StateDivider(world.rank, world.size, self.root_mesh)
        return self._states

    def meet(self, captured: Capture, per_rank: tuple[str, ...]) -> None:
        """Before the first save: wait until rank 0 knows the structures of all ranks, so that no save has to wait."""
        states, meeting = self._ranked(), self._meeting
        if states is not None and not (meeting.world.is_one or meeting.has_met):
            meeting.token()
            self._per_rank = per_rank
            meeting.meet(states.structure(captured, self._own_in(captured)).digest, "prewarm()")

    def divided(
        self,
        captured: Capture,
        joint: JointSave | None = None,
        *,
        per_rank: Collection[str] = (),
        borrowed: Mapping[str, int] | None = None,
    ) -> PlannedPart:
        """Plan the part of a state that this rank writes, and set it in the joint save. The first save waits until rank
        0 knows the structures of all ranks.

        Args:
            captured: all that this rank holds.
            joint: the save; None to plan a future save, for which nothing is set.
            per_rank: the names of values that each rank has for itself.
            borrowed: groups that are not saved again, and the steps that have them.
        """
        states = self._ranked()
        if states is None:
            return PlannedPart(captured)
        from .shared_values import SharedValues  # a process that saves alone shares no values

        if joint is None:
            known, own = self._meeting.table.classes, self._own_in(captured)
            mates = known.get(states.structure(captured, own).digest, ()) if known else ()
            share = states.divided(captured, mates, own)
            return PlannedPart(share.captured, share.ranks)
        own = tuple(sorted({*per_rank, *captured.per_rank}))
        structure = states.structure(captured, own, borrowed or {})
        table = joint.table if self._meeting.has_met else self._meeting.meet(structure.digest, "save()")
        share = states.divided(captured, table.classes.get(structure.digest, ()), own)
        own = tuple(sorted({*own, *table.differing}))
        shared = SharedValues(
            captured.skeleton,
            captured.objects,
            share.small,
            share.captured.specs,
            own,
            table.of_some.get(structure.digest, ()),
        )
        copies = None
        if self._check_replicas or structure.digest not in self._compared:
            for completion in captured.completions:  # held snapshots have their bytes only afterwards
                completion.result()
            copies = _digests(states.copies(captured))
        part = OwnPart(structure, own, shared, share.balance, copies)
        joint.part, joint.table = part, table
        return PlannedPart(share.captured, share.ranks, part)

    def _own_in(self, captured: Capture) -> tuple[str, ...]:
        """The names of values that each rank has for itself, in a state that is not saved yet."""
        return tuple(sorted({*self._per_rank, *captured.per_rank}))


def _digests(copies: Sequence[tuple[str, str, list[torch.Tensor]]]) -> dict[str, dict[str, str]]:
    """Digests of the local bytes of each tensor, by the part of the tensor and its name. Takes long."""
    digests: dict[str, dict[str, str]] = {}
    for part, name, slices in copies:
        blocks = (block for piece in slices for _, block in dense_blocks(piece.detach(), 0, piece.nbytes))
        data = b"".join(block_digest(block.cpu().numpy().data) for block in blocks)
        digests.setdefault(part, {})[name.replace("\x1f", ".")] = block_digest(data).hex()[:16]
    return digests
