"""Filled segments on their way to every sink.

In: segments, in any order and from any thread. Out: written, digested, their memory given back. Knows nothing of: where
segments come from, what becomes of the archives.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Final

from ..errors import StorageUnavailableError
from ..format import digests
from ..format.layout import Image
from ..host.life import Life
from ..host.pool import Lease
from ..host.threads import running_future
from ..ranks.shared_values import SharedValues
from ..report import Progress
from ..spans import NO_TRACE, Trace
from ..spec import BLOCK_BYTES
from ..storage.base import Sink
from ..storage.pace import Pace
from .groups import GroupDigest, GroupDigests

Submit = Callable[[Callable[[], None]], None]


class Way(Enum):
    """The life of a lane. `quiet` resolves when it has ended and no write to its sink is under way any more."""

    WRITING = "segments are still to be written"
    ARRIVED = "the sink has taken all of them"
    DROPPED = "an error has ended it; the others go on"
    GIVEN_UP = "and its sink lets go of all that it holds"


# What may become of a lane; `written` resolves when it leaves WRITING.
_LANE_GOES: Final = {
    Way.WRITING: (Way.ARRIVED, Way.DROPPED),
    Way.ARRIVED: (Way.GIVEN_UP,),
    Way.DROPPED: (Way.GIVEN_UP,),
    Way.GIVEN_UP: (),
}


class Flow(Enum):
    """The life of a drain."""

    FILLING = "there is no sink yet: what comes is kept"
    SENDING = "what comes is sent; the segments of the digests are kept"
    SEALED = "all else is digested: these are sent, too"
    DECIDED = "the save is true without the lanes that have not ended: memory goes before them"
    FAILED = "what comes is given back unread"


_DRAIN_GOES: Final = {
    Flow.FILLING: (Flow.SENDING, Flow.FAILED),
    Flow.SENDING: (Flow.SEALED, Flow.FAILED),
    Flow.SEALED: (Flow.DECIDED, Flow.FAILED),
    Flow.DECIDED: (Flow.FAILED,),
    Flow.FAILED: (),
}


class _Filled:
    """One filled segment on its way into every lane."""

    __slots__ = ("lease", "number", "undigested")

    def __init__(self, number: int, lease: Lease, *, undigested: bool) -> None:
        self.number = number
        self.lease = lease
        self.undigested = undigested  # until a thread takes that upon itself


class Lane:
    """The way of one archive's segments to one sink. All its state belongs to the drain."""

    def __init__(self, sink: Sink, submit: Submit, num_segments: int, pace: Pace | None) -> None:
        self.sink = sink
        self.submit = submit
        self.pace = pace
        self.written = running_future()  # every segment is taken, or what ended it
        self.quiet = running_future()  # it has ended, and no write to its sink is under way
        self.queue: deque[_Filled] = deque()
        self.num_writing = 0
        self.num_left = num_segments
        self.num_held = 0  # leases that the sink has retained
        self.written_bytes = 0
        self.way = Life(_LANE_GOES)

    @property
    def has_ended(self) -> bool:
        return self.way.now is not Way.WRITING


class _Counted:
    """A lease as a lane's sink sees it: counted, so that a lane that lags is known by what it holds."""

    __slots__ = ("_drain", "_lane", "_lease")

    def __init__(self, drain: Drain, lane: Lane, lease: Lease) -> None:
        self._drain, self._lane, self._lease = drain, lane, lease

    def retain(self) -> None:
        self._lease.retain()
        self._drain.count_held(self._lane, 1)

    def release(self) -> None:
        self._drain.count_held(self._lane, -1)
        self._lease.release()


class Drain:
    """Takes filled segments to every sink: write, digest, give the memory back. From any thread, in any order.

    Each sink has a lane with threads of its own, so that one that hangs holds up no other. Whoever has written a
    segment first digests it: what the disk does meanwhile costs no processor, and staging is not over yet.
    The segments that hold the digests themselves come last; they are kept until all others are digested.
    After a failure memory is given back unread, so that whoever waits for it goes on.

    `submit` runs what belongs to no lane; `may_drop` is whether the save can do without a lane.
    """

    def __init__(
        self,
        layout: Image,
        segment_bytes: int,
        max_segments: int,
        submit: Submit,
        *,
        groups: GroupDigests | None = None,
        values: SharedValues | None = None,
        may_drop: bool = False,
        trace: Trace = NO_TRACE,
    ) -> None:
        self._layout = layout
        self._trace = trace
        self.segment_bytes = segment_bytes
        self.max_segments = max_segments
        self._submit = submit
        self.num_segments = -(-layout.file_bytes // segment_bytes)
        self._may_drop = may_drop
        # The memory of a write that hangs comes back only with it: a lane may hold a part of the pool in that way.
        self._max_writing = max(1, max_segments // 4) if may_drop else self.num_segments
        # What is digested comes before the digests; a file without them is written as it comes.
        self._covered = layout.digests.data.offset if layout.digests else 0
        self._first_tail = self._covered // segment_bytes if layout.digests else self.num_segments
        self._digests = bytearray(digests.num_blocks(self._covered) * digests.DIGEST_BYTES)
        self._groups, self._values = groups or GroupDigests({}), values
        self.digest = ""
        self.idle = running_future()  # all lanes have ended, and no task is under way
        self._lock = threading.Lock()
        self._flow = Life(_DRAIN_GOES)  # under _lock, like all below
        self._lanes: list[Lane] = []
        self._early: list[tuple[int, Lease]] = []
        self._tail: dict[int, Lease] = {}
        self._num_undigested = self._first_tail
        self._num_active = 0
        self._error: BaseException | None = None  # if it has failed
        self._staged_bytes = 0

    @property
    def file_bytes(self) -> int:
        return self._layout.file_bytes

    @property
    def num_tail(self) -> int:
        """Segments that are kept until the end."""
        return self.num_segments - self._first_tail

    @property
    def progress(self) -> Progress:
        """What is written everywhere, or under "any" at the fastest place."""
        with self._lock:
            written = [lane.written_bytes for lane in self._lanes]
        least_or_most = max if self._may_drop else min
        return Progress(self._layout.file_bytes, self._staged_bytes, least_or_most(written, default=0))

    def group_digests(self) -> dict[str, GroupDigest]:
        """Those of the tensors of each entry of the state, when all is written."""
        return self._groups.result(self._digests)

    def check(self) -> None:
        """Raise what made this save fail, if it did."""
        if self._error:
            raise self._error

    # --- what comes in ----------------------------------------------------------------------------------------

    def put(self, number: int, lease: Lease) -> None:
        """Segment `number` is filled; the drain releases the lease."""
        with self._lock:
            self._staged_bytes += self._bytes_of(number)
            flow = self._flow.now
            if flow is not Flow.FAILED and number >= self._first_tail:
                self._tail[number] = lease
            elif flow is Flow.FILLING:
                self._early.append((number, lease))
        if flow is Flow.FAILED:
            lease.release()
        elif number >= self._first_tail:
            self._seal_if_due()
        elif flow is not Flow.FILLING:
            self._send(_Filled(number, lease, undigested=self._covered > 0))

    def open(self, sinks: Sequence[tuple[Sink, Submit, Pace | None]]) -> list[Lane]:
        """There is somewhere to write to: one lane for each sink, with what runs its writes, and how fast."""
        lanes = [Lane(sink, submit, self.num_segments, pace) for sink, submit, pace in sinks]
        with self._lock:
            self._lanes = lanes
            self._flow.go(Flow.SENDING)
            if self._layout.digests is None:
                self._flow.go(Flow.SEALED)
            failed = self._error
            early, self._early = self._early, []
        if failed is not None:
            self.fail(failed)
        for number, lease in early:
            self._send(_Filled(number, lease, undigested=self._covered > 0))
        self._seal_if_due()
        return lanes

    # --- what ends it -----------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Give up: writes under way end, no other begins. The first error counts."""
        with self._lock:
            self._error = self._error or error
            self._flow.go(Flow.FAILED)
            leases = [lease for _, lease in self._early] + list(self._tail.values())
            self._early, self._tail = [], {}
            lanes = list(self._lanes)
        for lease in leases:
            lease.release()
        for lane in lanes:
            self.drop(lane, error)
        self._settle()

    def drop(self, lane: Lane, error: BaseException) -> None:
        """End a lane, if it has not ended: the others go on without it; when none is left, the save fails."""
        with self._lock:
            if not lane.way.go(Way.DROPPED):
                return
            dropped, lane.queue = lane.queue, deque()
            self._num_active -= len(dropped)
            is_quiet = not lane.num_writing
            none_left = all(other.has_ended and other.num_left for other in self._lanes)
        for filled in dropped:
            filled.lease.release()
        lane.written.set_exception(error)
        if is_quiet:
            lane.quiet.set_result(None)
        if none_left:
            self.fail(error)
        self._settle()

    def decided(self) -> None:
        """The save is true without the lanes that have not ended: from now on memory goes before them."""
        with self._lock:
            self._flow.go(Flow.DECIDED)

    @property
    def is_decided(self) -> bool:
        """Whether the save is true."""
        return self._flow.now is Flow.DECIDED

    def compare(self, offset: int, data: memoryview) -> None:
        """Whether these whole blocks, which were read back, are those that were digested. Raises StorageUnavailableError."""
        for begin in range(offset, min(offset + len(data), self._covered), BLOCK_BYTES):
            block = data[begin - offset : min(begin + BLOCK_BYTES, self._covered) - offset]
            at = begin // BLOCK_BYTES * digests.DIGEST_BYTES
            if digests.block_digest(block) != self._digests[at : at + digests.DIGEST_BYTES]:
                raise StorageUnavailableError(
                    f"what was written is not read back: block {begin // BLOCK_BYTES} differs", path=""
                )

    def relieve(self, starving: bool) -> bool:
        """Memory is short. First goes what is only kept for trying again, then a lane that the save can do without."""
        with self._lock:
            lanes = list(self._lanes)
        if any(lane.sink.relieve() for lane in lanes):
            return True
        if not (starving and self._may_drop):
            return False
        with self._lock:
            behind = {
                lane: lane.num_left + lane.num_held
                for lane in lanes
                if lane.way.now in (Way.WRITING, Way.ARRIVED)
            }
            last = max(behind, key=lambda lane: behind[lane], default=None)
            if last is None or not behind[last]:
                return False
            # Dropping it helps only as far as it alone keeps others from going on.
            lag = behind[last] - min(behind.values())
            if self._flow.now is not Flow.DECIDED and (
                len(behind) < 2 or lag * 2 < self.max_segments - self.num_tail
            ):
                return False
        path = repr(last.sink)
        self.drop(last, StorageUnavailableError(f"{path} fell behind, and its memory was needed", path=path))
        self.give_up(last)
        return True

    def give_up(self, lane: Lane) -> None:
        """Nothing will come of a lane: what its sink holds and does not send this moment is free at once."""
        with self._lock:
            lane.way.go(Way.GIVEN_UP)
        lane.sink.give_up()

    def count_held(self, lane: Lane, change: int) -> None:
        with self._lock:
            lane.num_held += change

    # --- the lanes --------------------------------------------------------------------------------------------

    def _send(self, filled: _Filled) -> None:
        for lane in self._lanes:
            filled.lease.retain()
            with self._lock:
                taken = not lane.has_ended and self._error is None
                if taken:
                    lane.queue.append(filled)
                    self._num_active += 1
            if taken:
                lane.submit(partial(self._write_next, lane))
            else:
                filled.lease.release()
        filled.lease.release()

    def _write_next(self, lane: Lane) -> None:
        while (filled := self._take(lane)) is not None:
            self._write(lane, filled)

    def _take(self, lane: Lane) -> _Filled | None:
        with self._lock:
            if not lane.queue or lane.num_writing >= self._max_writing:
                return None
            lane.num_writing += 1
            return lane.queue.popleft()

    def _write(self, lane: Lane, filled: _Filled) -> None:
        num_bytes = self._bytes_of(filled.number)
        try:
            self.check()
            if lane.pace is not None:
                lane.pace.wait(num_bytes, partial(self._check_lane, lane))
            data = filled.lease.segment.view[:num_bytes]
            with self._trace.span("write", segment=filled.number, sink=repr(lane.sink)):
                lane.sink.write(filled.number * self.segment_bytes, data, _Counted(self, lane, filled.lease))
        except BaseException as error:
            self._end(lane, error)
        else:
            self._count_written(lane, num_bytes)
        try:
            self._digest_once(filled)
        except BaseException as error:
            self.fail(error)
        filled.lease.release()
        with self._lock:
            lane.num_writing -= 1
            is_quiet = lane.has_ended and not lane.num_writing  # nothing is taken from a lane that has ended
        if is_quiet:
            lane.quiet.set_result(None)
        self._leave()

    def _check_lane(self, lane: Lane) -> None:
        self.check()
        if lane.has_ended:  # dropped: the others go on without it
            raise StorageUnavailableError(f"{lane.sink!r} was given up", path=repr(lane.sink))

    def _end(self, lane: Lane, error: BaseException) -> None:
        if self._may_drop and isinstance(error, StorageUnavailableError):
            self.drop(lane, error)
        else:
            self.fail(error)

    def _count_written(self, lane: Lane, num_bytes: int) -> None:
        with self._lock:
            lane.num_left -= 1
            lane.written_bytes += num_bytes
            arrived = lane.num_left == 0 and lane.way.go(Way.ARRIVED)
        if arrived:
            lane.written.set_result(None)

    def _digest_once(self, filled: _Filled) -> None:
        with self._lock:
            mine, filled.undigested = filled.undigested and self._error is None, False
        if mine:
            self._digest(filled.number, filled.lease, self.segment_bytes)
            with self._lock:
                self._num_undigested -= 1
            self._seal_if_due()

    def _seal_if_due(self) -> None:
        """Once all else is digested, the tail can be."""
        with self._lock:
            complete = len(self._tail) == self.num_tail and not self._num_undigested
            if self._flow.now is not Flow.SENDING or not complete:
                return
            self._flow.go(Flow.SEALED)
            tail, self._tail = self._tail, {}
            self._num_active += 1
        self._submit(partial(self._seal, tail))

    def _seal(self, leases: dict[int, Lease]) -> None:
        try:
            self._write_digests(leases)
        except BaseException as error:
            self.fail(error)
        for number, lease in sorted(leases.items()):
            self._send(_Filled(number, lease, undigested=False))
        self._leave()

    def _write_digests(self, leases: dict[int, Lease]) -> None:
        covered, size = self._covered, self.segment_bytes
        for number, lease in leases.items():
            self._digest(number, lease, covered - number * size)
        data = memoryview(digests.dump(covered, bytes(self._digests)))
        self.digest = digests.self_digest(bytes(data[-128:]))
        at = covered
        while data:
            number, begin = divmod(at, size)
            length = min(len(data), size - begin)
            leases[number].segment.view[begin : begin + length] = data[:length]
            at, data = at + length, data[length:]

    def _digest(self, number: int, lease: Lease, num_bytes: int) -> None:
        first = number * self.segment_bytes // BLOCK_BYTES
        with self._trace.span("digest", segment=number):
            for i, begin in enumerate(range(0, num_bytes, BLOCK_BYTES)):
                block = lease.segment.view[begin : min(begin + BLOCK_BYTES, num_bytes)]
                self._groups.note(first + i, block)
                if self._values is not None:
                    self._values.note(first + i, block)
                at = (first + i) * digests.DIGEST_BYTES
                self._digests[at : at + digests.DIGEST_BYTES] = digests.block_digest(block)

    def _bytes_of(self, number: int) -> int:
        return min(self.segment_bytes, self._layout.file_bytes - number * self.segment_bytes)

    def _leave(self) -> None:
        with self._lock:
            self._num_active -= 1
        self._settle()

    def _settle(self) -> None:
        with self._lock:
            ended = bool(self._lanes) and all(lane.has_ended for lane in self._lanes)
            over = self._flow.now is Flow.FAILED or ended
            if self._num_active or not over or self.idle.done():
                return
            self.idle.set_result(None)

    def __repr__(self) -> str:
        p = self.progress
        return f"<Drain {p.written_bytes:,}/{p.staged_bytes:,}/{p.total_bytes:,} bytes written/staged/total>"
