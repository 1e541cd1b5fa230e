"""The drain of one save: filled segments on their way to its sink, and perhaps to the sink of a further place.

In: segments, in any order and from any thread. Out: segments written and digested, their memory returned. Knows nothing
of: where segments come from, what becomes of the archives.

The first lane leads to the place that commits the save. A second lane may follow it to the next place of the run: if it
fails, or its memory is needed, it is dropped and the save continues. With two lanes, each has its own threads, so that
neither delays the other. The thread that writes a segment first also digests it, since the disk works meanwhile without
the processor. Once everything is staged, the processor is free, and another thread digests the segments that are still
being written. The last segments of an archive (the tail) contain the digests of all others; the drain keeps the tail
until these are known. It also keeps segments that arrive before the sinks are open. After a failure the drain releases
memory without writing it, so that threads that wait for memory continue.

One lock guards the queues, the counts and the error. No thread holds it while it calls a sink, digests, releases a
lease or resolves a future: each method takes what it needs out of the tables under the lock, and acts on it afterwards.
Hence the order of events does not matter: a segment that is taken from a queue counts as active until its write and its
digest have returned, and `idle` resolves when all lanes have ended and nothing is active. The thread that makes the
last of these conditions true learns that under the lock, so exactly one thread seals the tail, and exactly one ends
each lane.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import InvalidStateError
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from ...errors import ClosedError, StorageUnavailableError
from ..format.layout import Image
from ..host.loop import get_loop
from ..host.pool import Lease
from ..host.threads import Submit, running_future
from ..report import Progress
from ..spec import number_above_0
from ..storage.interface import Sink, Storage
from ..storage.pace import Pace
from ..timing import NO_TRACE, Trace
from .block_digests import BlockDigests, BlockReader


class Writers:
    """The threads that write to each place, and the pace of each place. All saves of a saver share them.

    Used on the loop's thread; `pace_of` from any thread.
    """

    def __init__(self, max_bandwidth: float | None = None) -> None:
        if max_bandwidth is not None:
            rule = "a number of bytes per second, such as 500e6"
            max_bandwidth = number_above_0("max_bandwidth", max_bandwidth, rule)
        self.max_bandwidth = max_bandwidth
        self._places: set[str] = set()  # places with threads of their own
        self._paces: dict[str, Pace] = {}  # the pace of each place

    def of(self, storage: Storage, *, alone: bool) -> tuple[Submit, Pace | None]:
        """The `submit` of the threads that write to a place, and its pace. `alone`: the save has no other place."""
        if alone and self.max_bandwidth is None:
            return get_loop().writers().submit, None
        place = storage.locate("")
        self._places.add(place)
        return get_loop().writers(place).submit, self.pace_of(storage)

    def pace_of(self, storage: Storage) -> Pace | None:
        """The pace of all writes to a place; None if bandwidth is not limited."""
        if self.max_bandwidth is None:
            return None
        return self._paces.setdefault(storage.locate(""), Pace(self.max_bandwidth))

    def stop(self) -> None:
        """Let the writing threads end."""
        with suppress(ClosedError):  # the interpreter is exiting, and ends all threads
            for place in list(self._places):
                get_loop().stop_writers(place)


class FilledSegment(NamedTuple):
    """One filled segment on its way into every lane."""

    number: int
    lease: Lease


class Lane:
    """The queue of one archive's segments for one sink. The drain creates it, and guards it by the drain's lock."""

    def __init__(self, sink: Sink, submit: Submit, num_segments: int, pace: Pace | None, *, follows: bool) -> None:
        self.sink = sink
        self.follows = follows  # the save continues without it if it fails
        self.submit = submit
        self.pace = pace
        self.written = running_future()  # resolves when every segment is written, or with the error that ended the lane
        self.quiet = running_future()  # resolves when the lane has ended and no write to its sink is running
        self.queue: deque[FilledSegment] = deque()
        self.num_writing = 0
        self.num_left = num_segments
        self.written_bytes = 0
        self.has_ended = False  # `written` resolves
        self.is_given_up = False  # its sink frees all memory that it holds


class Drain:
    """Writes the filled segments of one save to its sinks, digests them, and returns their memory.

    The saver creates it. Staging threads call `put`; the loop's thread opens sinks and decides; the threads of the
    lanes write.
    """

    def __init__(
        self,
        file: Image,
        segment_bytes: int,
        max_segments: int,
        submit: Submit,
        *,
        block_readers: Sequence[BlockReader] = (),
        trace: Trace = NO_TRACE,
    ) -> None:
        """`submit` runs the tasks that belong to no lane."""
        self._file, self.segment_bytes, self.max_segments = file, segment_bytes, max_segments
        self._submit, self._trace = submit, trace
        # The digested bytes come before the digests. A file without digests has no tail, and is written as it arrives.
        self.digests = BlockDigests(file, block_readers)
        self._first_tail = self.num_segments if file.digests is None else self.digests.covered // segment_bytes
        self.idle = running_future()  # resolves when all lanes have ended and no task is running
        self._lock = threading.Lock()
        self._lanes: list[Lane] = []  # under _lock, like all fields below
        self._early: list[FilledSegment] = []  # arrived before the sinks were open
        self._tail: dict[int, Lease] = {}  # kept until all other segments are digested
        self._undigested: dict[int, Lease] = {}  # until a thread takes on the digest
        self._num_undigested = self._first_tail
        self._is_sealed = file.digests is None  # the tail has been sent, or the file has none
        self._staged_bytes = 0
        self._num_active = 0
        self._error: BaseException | None = None  # the first failure

    @property
    def file_bytes(self) -> int:
        return self._file.file_bytes

    @property
    def num_segments(self) -> int:
        return -(-self.file_bytes // self.segment_bytes)

    @property
    def num_tail(self) -> int:
        """The number of segments that are kept until the end."""
        return self.num_segments - self._first_tail

    @property
    def progress(self) -> Progress:
        """The bytes that are staged, and the bytes that the first lane has written."""
        with self._lock:
            return Progress(self.file_bytes, self._staged_bytes, self._lanes[0].written_bytes if self._lanes else 0)

    def check(self) -> None:
        """Raise the error that made this save fail, if it has failed."""
        if self._error:
            raise self._error

    # --- segments come in -------------------------------------------------------------------------------------

    def put(self, number: int, lease: Lease) -> None:
        """Take over filled segment `number`. The drain releases the lease."""
        is_tail = number >= self._first_tail
        filled = FilledSegment(number, lease)
        with self._lock:
            failed = self._error is not None
            self._staged_bytes += self._bytes_of(number)
            if not (failed or is_tail) and self.digests.covered:
                lease.retain()
                self._undigested[number] = lease
            is_last = not failed and self._staged_bytes == self.file_bytes
            self._num_active += is_last
            is_early = not (failed or is_tail or self._lanes)
            if is_early:
                self._early.append(filled)
            elif is_tail and not failed:
                self._tail[number] = lease
        if failed:
            lease.release()
        elif is_tail:
            self._seal_if_due()
        elif not is_early:
            self._send(filled)
        if is_last:
            # if no thread is free, the writing threads digest the rest
            self._submit(self._digest_rest, lambda _: self._leave())

    def open(self, sinks: Sequence[tuple[Sink, Submit, Pace | None]]) -> list[Lane]:
        """Open one lane for each (sink, `submit` of its threads, pace), and send the segments that have arrived."""
        lanes = [
            Lane(sink, submit, self.num_segments, pace, follows=number > 0)
            for number, (sink, submit, pace) in enumerate(sinks)
        ]
        with self._lock:
            self._lanes = lanes
            failed = self._error
            early, self._early = self._early, []
        if failed is not None:
            self.fail(failed)
        for filled in early:
            self._send(filled)
        self._seal_if_due()
        return lanes

    # --- the end ----------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Give up: running writes end, and no other write begins. The first error counts."""
        with self._lock:
            self._error = self._error or error
            leases = [*(filled.lease for filled in self._early), *self._tail.values(), *self._undigested.values()]
            self._early, self._tail, self._undigested = [], {}, {}
            lanes = list(self._lanes)
        for lease in leases:
            lease.release()
        for lane in lanes:
            self.drop(lane, error)
        self._settle()

    def drop(self, lane: Lane, error: BaseException) -> None:
        """End a lane with an error, unless it has ended."""
        with self._lock:
            if lane.has_ended:
                return
            lane.has_ended = lane.is_given_up = True
            dropped, lane.queue = lane.queue, deque()
            self._num_active -= len(dropped)
            is_quiet = not lane.num_writing
        for filled in dropped:
            filled.lease.release()
        lane.written.set_exception(error)
        if is_quiet:
            lane.quiet.set_result(None)
        self._settle()

    def relieve(self, starving: bool) -> bool:
        """Free memory: first segments that are kept only for retries, then, if `starving`, the lane that follows."""
        with self._lock:
            lanes = list(self._lanes)
        if any(lane.sink.relieve() for lane in lanes):
            return True
        lagging = [lane for lane in lanes[1:] if not lane.is_given_up]
        if not (starving and lagging):
            return False
        path = repr(lagging[0].sink)
        self.give_up(lagging[0], StorageUnavailableError(f"{path} fell behind, and its memory was needed", path=path))
        return True

    def give_up(self, lane: Lane, error: BaseException) -> None:
        """End a lane, and have its sink free all memory that it is not sending at this moment."""
        self.drop(lane, error)
        with self._lock:
            lane.is_given_up = True
        lane.sink.give_up()

    # --- the lanes --------------------------------------------------------------------------------------------

    def _send(self, filled: FilledSegment) -> None:
        for lane in self._lanes:
            filled.lease.retain()
            with self._lock:
                taken = not lane.has_ended and self._error is None
                if taken:
                    lane.queue.append(filled)
                    self._num_active += 1
            if taken:
                lane.submit(partial(self._write_next, lane), partial(self._refused, lane))
            else:
                filled.lease.release()
        filled.lease.release()

    def _refused(self, lane: Lane, error: RuntimeError) -> None:
        """Handle that no thread could be started. A thread that is writing already may have taken all segments."""
        with self._lock:
            is_left = bool(lane.queue)
        if is_left:
            self._fail_lane(lane, error)

    def _fail_lane(self, lane: Lane, error: BaseException) -> None:
        if lane.follows:
            self.drop(lane, error)
        else:
            self.fail(error)

    def _write_next(self, lane: Lane) -> None:
        while (filled := self._take(lane)) is not None:
            self._write(lane, filled)

    def _take(self, lane: Lane) -> FilledSegment | None:
        with self._lock:
            # A hanging write holds its memory until it returns, so a lane that follows may hold only part of the pool.
            if not lane.queue or (lane.follows and lane.num_writing >= max(1, self.max_segments // 4)):
                return None
            lane.num_writing += 1
            return lane.queue.popleft()

    def _write(self, lane: Lane, filled: FilledSegment) -> None:
        num_bytes = self._bytes_of(filled.number)
        try:
            self.check()
            if lane.pace is not None:
                lane.pace.wait(num_bytes, partial(self._check_lane, lane))
            data = filled.lease.segment.view[:num_bytes]
            with self._trace.span("write", segment=filled.number, sink=repr(lane.sink)):
                lane.sink.write(filled.number * self.segment_bytes, data, filled.lease)
        except BaseException as error:
            self._fail_lane(lane, error)
        else:
            self._count_written(lane, num_bytes)
        try:
            self._digest_once(filled.number)
        except BaseException as error:
            self.fail(error)
        filled.lease.release()
        with self._lock:
            lane.num_writing -= 1
            is_quiet = lane.has_ended and not lane.num_writing  # a lane that has ended takes no more segments
        if is_quiet:
            lane.quiet.set_result(None)
        self._leave()

    def _check_lane(self, lane: Lane) -> None:
        self.check()
        if lane.has_ended:  # dropped: the save continues without it
            raise StorageUnavailableError(f"{lane.sink!r} was abandoned", path=repr(lane.sink))

    def _count_written(self, lane: Lane, num_bytes: int) -> None:
        with self._lock:
            lane.num_left -= 1
            lane.written_bytes += num_bytes
            arrived = lane.num_left == 0 and not lane.has_ended
            lane.has_ended |= arrived
        if arrived:
            lane.written.set_result(None)

    def _digest_rest(self) -> None:
        with self._lock:
            numbers = [*self._undigested]
        try:
            for number in reversed(numbers):  # the writing threads come from the other end
                self._digest_once(number)
        except BaseException as error:
            self.fail(error)
        self._leave()

    def _digest_once(self, number: int) -> None:
        with self._lock:
            lease = self._undigested.pop(number, None)
        if lease is None:  # another thread digests it, or the save has failed
            return
        try:
            self._digest(number, lease, self._bytes_of(number))
        finally:
            lease.release()
        with self._lock:
            self._num_undigested -= 1
        self._seal_if_due()

    def _digest(self, number: int, lease: Lease, num_bytes: int) -> None:
        with self._trace.span("digest", segment=number):
            self.digests.note(number * self.segment_bytes, lease.segment.view[:num_bytes])

    def _seal_if_due(self) -> None:
        """Digest and send the tail, once all other segments are digested."""
        with self._lock:
            is_due = not (self._is_sealed or self._num_undigested) and len(self._tail) == self.num_tail
            if not (is_due and self._lanes) or self._error is not None:
                return
            self._is_sealed = True
            tail, self._tail = self._tail, {}
            self._num_active += 1
        self._submit(partial(self._seal, tail), lambda _: self._seal(tail))

    def _seal(self, leases: dict[int, Lease]) -> None:
        try:
            self._write_digests(leases)
        except BaseException as error:
            self.fail(error)
        for number, lease in sorted(leases.items()):
            self._send(FilledSegment(number, lease))
        self._leave()

    def _write_digests(self, leases: dict[int, Lease]) -> None:
        at, size = self.digests.covered, self.segment_bytes
        for number, lease in leases.items():
            self._digest(number, lease, max(0, at - number * size))
        data = memoryview(self.digests.sealed())
        while data:
            number, begin = divmod(at, size)
            length = min(len(data), size - begin)
            leases[number].segment.view[begin : begin + length] = data[:length]
            at, data = at + length, data[length:]

    def _bytes_of(self, number: int) -> int:
        return min(self.segment_bytes, self.file_bytes - number * self.segment_bytes)

    def _leave(self) -> None:
        with self._lock:
            self._num_active -= 1
        self._settle()

    def _settle(self) -> None:
        with self._lock:
            ended = bool(self._lanes) and all(lane.has_ended for lane in self._lanes)
            is_idle = not self._num_active and (ended or self._error is not None)
        if is_idle:
            with suppress(InvalidStateError):  # another thread has resolved it
                self.idle.set_result(None)
