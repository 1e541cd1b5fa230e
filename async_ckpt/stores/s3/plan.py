"""The cut of an object into the parts of a multipart upload.

In: sizes. Out: segments in a part, parts at once. Knows nothing of: stores, memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ...plumbing import store_facts

# More do not make one host faster, and each holds a segment.
_MAX_PARTS_IN_FLIGHT: Final = 8


@dataclass(frozen=True, slots=True)
class UploadPlan:
    """The cut of one object: into segments of `segment_bytes`, and parts of `part_segments` segments."""

    is_multipart: bool
    segment_bytes: int
    part_segments: int
    max_parts_in_flight: int

    @property
    def part_bytes(self) -> int:
        return self.part_segments * self.segment_bytes

    def parts_in_flight(self, num_retries: int) -> int:
        """The number of parts to send at once: fewer with each retry, since the store is in trouble."""
        return max(1, self.max_parts_in_flight >> num_retries)


def plan_upload(num_bytes: int, segment_bytes: int, *, max_segments: int | None) -> UploadPlan:
    """The plan for an object of at most `num_bytes`, whose segments come out of `max_segments` at most."""
    part_segments = store_facts.part_segments(num_bytes, segment_bytes)
    num_parts = _MAX_PARTS_IN_FLIGHT
    if max_segments is not None:
        num_parts = max(1, min(num_parts, max_segments // part_segments - 1))
    return UploadPlan(num_bytes > segment_bytes, segment_bytes, part_segments, num_parts)
