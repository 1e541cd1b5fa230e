"""The segments of one object while they are on loan to its upload.

In: segments in any order. Out: views of them in file order; a lease is released once nothing reads its memory any more.
Knows nothing of: the store, and how often the object is sent.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from ...plumbing import MemoryLoan, threads, timing
from ..watched_calls import WatchedCall


class GivenUpError(Exception):
    """Ends an upload from within: obstore aborts an upload whose iterator raises. obstore must never be cancelled."""


class Phase(Enum):
    """The phases of an upload."""

    TAKING = "segments come, and are sent"
    WRITTEN = "all segments have come"
    SENT = "the store has acknowledged the object"
    FINISHED = "`finish` has returned"
    FAILED = "the upload has ended with an error"
    GIVEN_UP = "no more segments are taken, and the upload ends"


_SUCCESSORS: Final = {
    Phase.TAKING: (Phase.WRITTEN, Phase.FAILED, Phase.GIVEN_UP),
    Phase.WRITTEN: (Phase.SENT, Phase.FAILED, Phase.GIVEN_UP),
    Phase.SENT: (Phase.FINISHED, Phase.GIVEN_UP),
    Phase.FINISHED: (),
    Phase.FAILED: (Phase.GIVEN_UP,),
    Phase.GIVEN_UP: (),
}


@dataclass(slots=True)
class _LentSegment:
    data: memoryview
    lease: MemoryLoan
    num_views: int = 0  # how many views of it the upload holds


class SegmentQueue:
    """The segments on loan to one upload, and its phase. Its ObjectSink creates and owns it. Thread-safe.

    A segment stays on loan until the object is finished, so that the object can be sent again if an attempt fails. If
    memory is needed elsewhere, a segment that has been sent is released earlier, but never while a view of it exists.
    If memory is requested while every segment is in use, the next segment that has been sent is released.
    """

    def __init__(self, num_bytes: int, segment_bytes: int, timer: timing.Timekeeper) -> None:
        self.changed = threading.Condition()
        # Under `changed`, like all below:
        self.life = threads.Life(_SUCCESSORS)
        self.lent: dict[int, _LentSegment] = {}
        self.num_segments = -(-num_bytes // segment_bytes)  # at most; `complete` sets the exact number
        self.num_arrived = 0
        self.next = 0  # the first segment that this attempt has not taken
        self.moved_at = timer.now()  # when the upload last took or dropped a segment
        self.retryable = True  # no segment has been released before the end
        self._is_wanted = False  # memory was requested
        self._segment_bytes, self._timer = segment_bytes, timer

    @property
    def is_given_up(self) -> bool:
        return self.life.now is Phase.GIVEN_UP

    def put(self, offset: int, data: memoryview, lease: MemoryLoan) -> bool:
        """Keep a segment, whose lease the caller has retained. Returns False if no more segments are accepted."""
        with self.changed:
            if self.life.now is not Phase.TAKING:
                return False
            self.lent[offset // self._segment_bytes] = _LentSegment(data, lease)
            self.num_arrived += 1
            self.changed.notify_all()
            return True

    def complete(self, num_bytes: int | None) -> bool:
        """Note that no more segments come, and the size if it was unknown. Returns False if segments are missing."""
        with self.changed:
            if num_bytes is not None:
                self.num_segments = max(1, -(-num_bytes // self._segment_bytes))
            if self.num_arrived == self.num_segments:
                self.life.go(Phase.WRITTEN)
            self.changed.notify_all()
            return self.life.now is not Phase.TAKING

    def end(self, phase: Phase) -> None:
        """Enter one of the last phases, and release the segments that the upload is not reading."""
        with self.changed:
            self.life.go(phase)
            leases = [self.lent.pop(number).lease for number in self._idle()]
            self.changed.notify_all()
        for lease in leases:
            lease.release()

    def relieve(self) -> bool:
        """Release the oldest sent segment. If there is none, return False, and release the next segment once sent."""
        with self.changed:
            idle = [number for number in self._idle() if number < self.next]
            self._is_wanted = not idle
            if not idle:
                return False
            self.retryable = False
            segment = self.lent.pop(min(idle))
        segment.lease.release()
        return True

    def _idle(self) -> list[int]:
        """The segments that the upload is not reading. Under `changed`."""
        return [number for number, segment in self.lent.items() if not segment.num_views]

    # --- for the threads of the upload ------------------------------------------------------------------------

    def restart(self) -> bool:
        """Start again with the first segment. Returns False if segments were released."""
        with self.changed:
            self.next = 0
            return self.retryable

    def wait_until(self, call: WatchedCall, happened: Callable[[], bool]) -> None:
        """Wait for the writers. Raises GivenUpError if they give up."""
        with call.ours(), self.changed:
            self.changed.wait_for(lambda: self.is_given_up or happened())
            if self.is_given_up:
                raise GivenUpError

    def is_there(self, call: WatchedCall, number: int) -> bool:
        """Wait for a segment. Returns False if the object ends before it."""
        self.wait_until(call, lambda: number in self.lent or number >= self.num_segments)
        return number < self.num_segments

    def take(self, call: WatchedCall, number: int) -> memoryview:
        """A view of a segment. Once the view is garbage-collected, the upload no longer reads the memory."""
        with call.lent(), self.changed:
            segment = self.lent[number]
            segment.num_views += 1
            self.next, self.moved_at = number + 1, self._timer.now()
            view = segment.data[:]
        weakref.finalize(view, self._drop, call, number).atexit = False
        return view

    def _drop(self, call: WatchedCall, number: int) -> None:
        """Note that a view was garbage-collected. Called on one of obstore's threads."""
        call.moved()
        with self.changed:
            self.moved_at = self._timer.now()
            segment = self.lent[number]
            segment.num_views -= 1
            is_wanted = self._is_wanted and number < self.next
            is_over = self.life.now not in (Phase.TAKING, Phase.WRITTEN)
            is_released = (is_wanted or is_over) and not segment.num_views
            if is_released:
                del self.lent[number]
                if is_wanted:
                    self.retryable = self._is_wanted = False
            self.changed.notify_all()
        if is_released:
            segment.lease.release()

    def pause(self, seconds: float) -> None:
        """Sleep for `seconds`, or until the upload is given up."""
        with self.changed:
            self._timer.wait_for(self.changed, lambda: self.is_given_up, seconds)

    def wait_until_released(self, seconds: float) -> None:
        """Wait until all segments are released: aborted requests drop their segments a moment later."""
        with self.changed:
            self.changed.wait_for(lambda: not self.lent, seconds)
