"""The planner: from a state to the layout of its archive, and to the host memory that it may use.

In: captured states, a target. Out: layouts, and numbers of segments. Knows nothing of: copies, saves under way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..format.layout import Image, Layout, TensorPlan, lay_out
from ..host.pool import MIN_SEGMENTS, SegmentPool
from ..host.threads import Crew
from ..spec import BLOCK_BYTES, MIB, SEGMENT_BYTES, RankFacts, align_up, whole_bytes
from ..staging.device import fill_image, first_device
from ..state.capture import capture
from ..state.captured import Capture
from ..timing import wall_time
from .attempt import Target
from .block_digests import BlockDigests, GroupDigests, Groups
from .taken_over import TakenOver

if TYPE_CHECKING:
    from ..ranks.shared_values import SharedValues


class SavePlan(NamedTuple):
    """The plan of one save, made before any part of the save begins. It keeps the tensors alive."""

    step: int | None
    target: Target
    captured: Capture
    """The state, or the part of it that this rank writes."""
    device: torch.device | None
    """The first device that tensors are copied from."""
    layout: Layout
    """The place of each byte in the archive."""
    shared: SharedValues | None
    """The values that should be equal on all ranks; None with one rank."""
    groups: GroupDigests
    over: TakenOver | None
    """The tensors that are taken over from earlier steps; None if none can be."""


class Planner:
    """The planner of one saver, which creates it. Reuses the last plan if the tensors are the same. Any thread."""

    def __init__(self, pool: SegmentPool, max_in_flight: int) -> None:
        self._pool, self._max_in_flight = pool, max_in_flight
        self._plan: TensorPlan | None = None  # the last save's plan; replaced as a whole
        self._groups: Groups = {}  # the extents of each group in the last archive that had it; replaced as a whole

    def lay_out(
        self,
        captured: Capture,
        step: int | None,
        ranks: RankFacts | None = None,
        lenders: Sequence[tuple[str, str]] = (),
    ) -> Layout:
        plan = self._plan
        if plan is None or plan.specs != captured.specs:
            plan = self._plan = TensorPlan(captured.specs)
        return _lay_out(plan, captured, step, ranks=ranks, lenders=lenders)

    def group_digests(self, layout: Layout, step: int | None) -> GroupDigests:
        """The digests of the groups of an archive, to be filled block by block. A one-off save has none."""
        if step is None:
            return GroupDigests({})
        before, self._groups = self._groups, {**self._groups, **layout.groups}
        return GroupDigests(layout.groups, before)

    def admit(self, layout: Image, target: Target | None) -> int:
        """Let the pool grow to the needs of an archive. Returns the number of segments that the archive may use.

        Raises ValueError if the pool cannot hold the segments that must exist at the same time.
        """
        size = self._pool.segment_bytes
        member = layout.digests
        num_tail = -(-layout.file_bytes // size) - member.data.offset // size if member else 0
        # The tail waits for all other segments, which are sent in parts: one part is sent while the next one is filled.
        part = 1 if target is None else target.part_segments(layout.file_bytes, size)
        least = num_tail + 2 * part
        self._pool.admit(layout.file_bytes, self._max_in_flight, least=least)
        if least > self._pool.max_segments:
            raise ValueError(
                f"host_bytes is too small for an archive of {layout.file_bytes:,} bytes; give at least {least * size:,}"
            )
        return self._pool.max_segments

    def take_memory(self, captured: Capture, crew: Crew | None, *, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Plan a state, and take the memory for its archive, while `goes_on()` is True."""
        layout = self.lay_out(captured, step=0)
        self.admit(layout, None)
        num_segments = -(-layout.file_bytes // self._pool.segment_bytes)
        self._pool.reserve(num_segments, crew, pin=first_device(captured.tensors), goes_on=goes_on)

    def may_defer(self, num_segments: int, layout: Image, target: Target) -> bool:
        """True if some tensors may be copied later than others.

        The tensors that are copied first could fill a small pool and wait there for the later ones: if other saves are
        under way, or if a sink holds a segment until another one has come.
        """
        is_tight = num_segments * self._max_in_flight > self._pool.max_segments
        size = self._pool.segment_bytes
        in_turn = target.in_order or target.part_segments(layout.file_bytes, size) > 1
        return not (is_tight and (self._max_in_flight > 1 or in_turn))


def small_archive(state: object, *, step: int, max_bytes: int) -> tuple[bytes, str]:
    """The archive of a small state, as bytes, and its digest. Raises ValueError if it is too large."""
    captured = capture(state)
    layout = _lay_out(TensorPlan(captured.specs), captured, step)
    if layout.file_bytes > max_bytes:
        raise ValueError(
            f"driver= is too large, an archive of {layout.file_bytes:,} bytes; the limit is {max_bytes:,}. Put large "
            "values into the state"
        )
    image = bytearray(layout.file_bytes)
    (plan,) = layout.segments(align_up(layout.file_bytes, BLOCK_BYTES))
    for at, data in plan.literals:
        image[at : at + len(data)] = data
    fill_image(image, plan.pieces, captured.tensors)
    digests = BlockDigests(layout)
    digests.note(0, memoryview(image)[: digests.covered])
    tail = digests.sealed()
    image[digests.covered : digests.covered + len(tail)] = tail
    return bytes(image), digests.of_archive


def pool_for(segment_bytes: int | None = None, host_bytes: int | None = None) -> SegmentPool:
    """A pool with these sizes. Raises ValueError for invalid sizes."""
    segment_bytes = None if segment_bytes is None else whole_bytes("segment_bytes", segment_bytes)
    host_bytes = None if host_bytes is None else whole_bytes("host_bytes", host_bytes)
    if host_bytes is not None and host_bytes < MIN_SEGMENTS * BLOCK_BYTES:
        raise ValueError(f"host_bytes must be at least {MIN_SEGMENTS * BLOCK_BYTES // MIB} MiB, got {host_bytes:,}")
    if segment_bytes is None:
        share = SEGMENT_BYTES if host_bytes is None else host_bytes // MIN_SEGMENTS
        return SegmentPool(min(SEGMENT_BYTES, share // BLOCK_BYTES * BLOCK_BYTES), max_bytes=host_bytes)
    if segment_bytes <= 0 or segment_bytes % BLOCK_BYTES:
        raise ValueError(f"segment_bytes must be a multiple of {BLOCK_BYTES // MIB} MiB, got {segment_bytes:,}")
    if host_bytes is not None and host_bytes < MIN_SEGMENTS * segment_bytes:
        raise ValueError(f"host_bytes must hold at least {MIN_SEGMENTS} segments of {segment_bytes:,} bytes")
    return SegmentPool(segment_bytes, max_bytes=host_bytes)


def _lay_out(plan: TensorPlan, captured: Capture, step: int | None, **of_ranks: Any) -> Layout:
    skeleton, objects, now = captured.skeleton, captured.objects, int(wall_time())
    return lay_out(plan, skeleton=skeleton, objects=objects, step=step, mtime=now, **of_ranks)
