"""What is to be filled of each segment, at once and later.

In: the cut of an archive, and what of it may wait. Out: jobs. Knows nothing of: threads, streams, budgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..format.layout import Piece, SegmentPlan
from ..host.pool import Lease
from .device import Device


class Job:
    """What is to be filled of one segment: now `pieces`, and `rest` in a second go with the same lease."""

    __slots__ = ("events", "is_enqueued", "lease", "literals", "num_bytes", "number", "pieces", "rest")

    def __init__(self, plan: SegmentPlan, pieces: Sequence[Piece], rest: Sequence[Piece] = ()) -> None:
        self.number = plan.number
        self.num_bytes = plan.num_bytes
        self.literals = plan.literals
        self.pieces = pieces
        self.rest = rest
        self.lease: Lease | None = None
        self.events: list[tuple[Device, Any]] = []
        self.is_enqueued = False  # a device may write to the lease's memory, until its events have fired


def append(pieces: list[Piece], piece: Piece) -> None:
    """Add a piece; one that goes on where the last one ends lengthens it."""
    if pieces:
        target, number, source, length = pieces[-1]
        if (target + length, number, source + length) == piece[:3]:
            pieces[-1] = Piece(target, number, source, length + piece.length)
            return
    pieces.append(piece)


def split(
    segments: Sequence[SegmentPlan], deferred: frozenset[int], may_hold: int
) -> tuple[list[Job], list[Job]]:
    """Jobs for now and for later; a segment that is filled in two goes is in both."""
    now: list[Job] = []
    later: list[Job] = []
    num_held = 0
    for segment in segments:
        late = [p for p in segment.pieces if p.tensor in deferred] if deferred else []
        urgent = [p for p in segment.pieces if p.tensor not in deferred] if late else segment.pieces
        if late and not urgent and not segment.literals:
            later.append(Job(segment, late))
        elif late and num_held < may_hold:
            num_held += 1
            now.append(Job(segment, urgent, rest=late))
            later.append(now[-1])
        else:
            now.append(Job(segment, segment.pieces))
    return now, later
