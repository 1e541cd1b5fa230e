"""The part of a state that this rank writes, where several hold it together.

In: captured states. Out: captured states with the part to write, and what the other ranks are told of it. Knows
nothing of: archives.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from ..format.digests import block_digest
from ..slicing.sharded import Slicer, mesh_of
from ..spec import RankFacts
from ..staging.device import dense_blocks
from ..state.captured import Capture
from ..state.division import StateDivider
from .attempts import JointSave
from .meeting import Meeting
from .shared_values import SharedValues


class Divider:
    """Divides the states of one checkpointer. On the thread that saves.

    `compared` are structures in which what ranks hold alike was compared before; with `check_replicas` it is at each
    save.
    """

    def __init__(
        self, meeting: Meeting, compared: Collection[str], *, mesh: Any = None, check_replicas: bool = False
    ) -> None:
        self._meeting, self._compared, self._check_replicas = meeting, compared, check_replicas
        self.root_mesh = None if mesh is None else mesh_of(mesh)
        self._per_rank: tuple[str, ...] = ()  # of the state by which ranks met ahead of the first save
        self._states: StateDivider | None = None

    @property
    def slicer(self) -> Slicer | None:
        """The slicer that finds the local slices of tensors; None in a process that is no part of anything."""
        states = self._ranked()
        return None if states is None else states.slicer

    def _ranked(self) -> StateDivider | None:
        """None in a process that is no part of anything: then tensors are all that they are."""
        world = self._meeting.world
        if self._states is None and (world.has_group or not world.is_one):
            self._states = StateDivider(world.rank, world.size, self.root_mesh)
        return self._states

    def meet(self, captured: Capture, per_rank: tuple[str, ...]) -> None:
        """Ahead of the first save: wait until rank 0 knows how the states of all ranks look, so that no save has to."""
        states, meeting = self._ranked(), self._meeting
        if states is not None and meeting.world.store is not None and not meeting.has_met:
            meeting.token()
            self._per_rank = per_rank
            meeting.meet(states.structure(captured, self._own_in(captured)).digest, "prewarm()")

    def divided(self, captured: Capture, joint: JointSave | None) -> tuple[Capture, RankFacts | None]:
        """The part of a state that this rank writes. The first save waits until rank 0 knows the structures of all
        ranks.

        Without `joint`, nothing is written yet: the part that would be.
        """
        states = self._ranked()
        if states is None:
            return captured, None
        if joint is None:
            known, own = self._meeting.table.classes, self._own_in(captured)
            mates = known.get(states.structure(captured, own).digest, ()) if known else ()
            share = states.divided(captured, mates, own)
            return share.captured, share.ranks
        part = joint.part
        per_rank = tuple(sorted({*part.per_rank, *captured.per_rank}))
        structure = part.structure = states.structure(captured, per_rank, part.borrowed)
        if not self._meeting.has_met:
            joint.table = self._meeting.meet(structure.digest, "save()")
        share = states.divided(captured, joint.table.classes.get(structure.digest, ()), per_rank)
        part.balance = share.balance
        part.per_rank = tuple(sorted({*per_rank, *joint.table.differing}))
        part.shared = SharedValues(
            captured.skeleton,
            captured.objects,
            share.small,
            share.captured.specs,
            part.per_rank,
            joint.table.of_some.get(structure.digest, ()),
        )
        if self._check_replicas or structure.digest not in self._compared:
            for completion in captured.completions:  # of snapshots: before that, their bytes are not there
                completion.result()
            part.copies = _digests(states.copies(captured))
        return share.captured, share.ranks

    def _own_in(self, captured: Capture) -> tuple[str, ...]:
        """The names that each rank has for itself in a state that is not saved yet."""
        return tuple(sorted({*self._per_rank, *captured.per_rank}))


def _digests(copies: Sequence[tuple[str, str, list[torch.Tensor]]]) -> dict[str, dict[str, str]]:
    """Digests of the local bytes of each tensor, by the part of it and its name. Takes its time."""
    digests: dict[str, dict[str, str]] = {}
    for what, name, slices in copies:
        blocks = (block for one in slices for _, block in dense_blocks(one.detach(), 0, one.nbytes))
        data = b"".join(block_digest(block.cpu().numpy().data) for block in blocks)
        digests.setdefault(what, {})[name.replace("\x1f", ".")] = block_digest(data).hex()[:16]
    return digests
