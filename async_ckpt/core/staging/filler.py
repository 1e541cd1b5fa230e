"""The filling of segments: which bytes are copied at once and which later, by which threads, into which leases.

In: the tensors of one instant, and the segments of their archive. Out: leases, handed on one by one as they are filled.
Knows nothing of: optimizers, files, commits.

The segment is the unit of work. A segment without deferred bytes is filled at once (the pass NOW), a segment with only
deferred bytes later (LATER), and a segment with bytes of other snapshots last, once these are complete (LAST). A
segment with several kinds is filled in two passes, and keeps its lease in between if the lender can spare it. A free
thread takes the next job together with its lease. Copies on the host are done when the fill returns; copies from a
device are only enqueued, and the thread that waits for the device hands the segment on when they have ended.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

from ..format.layout import Piece, SegmentPlan
from ..host.memory import Segment
from ..host.pool import Lease, SegmentLender, SegmentReceiver
from ..host.threads import Submit
from ..host.waits import LIVENESS_SECONDS
from ..report import sized
from ..timing import NO_TRACE, Clock, Trace
from .device import Device
from .tensors import SourceTensors

# The passes in which segments are filled.
NOW: Final = 0
LATER: Final = 1
LAST: Final = 2


class StagingHost(NamedTuple):
    """The memory and the threads of the host that snapshots use, and their clock."""

    lender: SegmentLender
    submit: Submit
    clock: Clock
    trace: Trace = NO_TRACE


class SegmentJob:
    """The filling of one segment: `pieces` in the next pass, and `rest` in a second one with the same lease."""

    __slots__ = ("events", "is_enqueued", "lease", "literals", "num_bytes", "number", "pieces", "rest")

    def __init__(self, plan: SegmentPlan, pieces: Sequence[Piece], rest: Sequence[Piece] = ()) -> None:
        self.number = plan.number
        self.num_bytes = plan.num_bytes
        self.literals = plan.literals
        self.pieces = pieces
        self.rest = rest
        self.lease: Lease | None = None
        self.events: list[tuple[Device, Any]] = []
        self.is_enqueued = False  # a device may write to the lease's memory until its events have fired


def _split(
    segments: Sequence[SegmentPlan], may_be_late: frozenset[int], frozen: frozenset[int], may_hold: int
) -> tuple[list[SegmentJob], list[SegmentJob], list[SegmentJob]]:
    """The jobs of each pass: NOW, LATER, and LAST, when the frozen tensors have their bytes. Frozen tensors must be in
    `may_be_late`, too. At most `may_hold` segments are filled in two passes, and so appear in two of the lists.
    """
    jobs: tuple[list[SegmentJob], list[SegmentJob], list[SegmentJob]] = [], [], []
    num_held = 0
    for segment in segments:
        # The pass of each piece: NOW, LATER or LAST.
        goes = [(n in may_be_late) + (n in frozen) for _, n, _, _ in segment.pieces] if may_be_late else []
        goes = goes or [LATER if may_be_late else NOW]
        first, second = min(goes), max(goes)
        if first < second and num_held < may_hold:
            num_held += 1
            pieces = [p for p, go in zip(segment.pieces, goes, strict=True) if go < second]
            rest = [p for p, go in zip(segment.pieces, goes, strict=True) if go == second]
            job = SegmentJob(segment, pieces, rest=rest)
            jobs[first].append(job)
            jobs[second].append(job)
        else:
            jobs[first if first == second else NOW].append(SegmentJob(segment, segment.pieces))
    return jobs


class SegmentFiller:
    """Fills the segments of one snapshot, which creates and owns it.

    `on_end` is called, perhaps more than once, with the error that has ended the filling, or with None when every
    segment is handed on.
    """

    def __init__(
        self,
        source: SourceTensors,
        segments: Sequence[SegmentPlan],
        receiver: SegmentReceiver,
        host: StagingHost,
        order: int,
        on_end: Callable[[BaseException | None], None],
    ) -> None:
        self._source, self._receiver, self._host, self._order = source, receiver, host, order
        self._on_end = on_end
        self._num_bytes = sum(segment.num_bytes for segment in segments)
        most = host.lender.max_segments
        # The receiver keeps its tail until it has all other segments; at least one segment must stay free.
        may_hold = min(most // 2, most - receiver.num_tail - 1)
        self._jobs = _split(segments, source.may_be_late, source.frozen, may_hold)
        # A job and its lease are taken in one step: if memory went to a later segment first, all of it could end up in
        # a sink that waits for the earlier one. So this lock is held during the wait for the lender. No thread takes it
        # while holding `_changed`, or any lock of the lender or the receiver.
        self._taking = threading.Lock()
        # Guards all fields below, for a few instructions at a time: nothing is called out under it.
        self._changed = threading.Condition()
        self._num_filling = 0
        self._num_unfinished = 1  # segments that devices still copy to, plus one until all copies are enqueued
        self._copied_bytes = 0
        self._error: BaseException | None = None

    @property
    def fills_now(self) -> bool:
        """False if every byte is copied later."""
        return bool(self._jobs[NOW] or not self.fills_later)

    @property
    def fills_later(self) -> bool:
        return bool(self._jobs[LATER] or self._jobs[LAST])

    @property
    def progress(self) -> str:
        return f"{sized(self._copied_bytes)} of {sized(self._num_bytes)} copied"

    def tensors_now(self) -> Iterator[int]:
        """The numbers of the tensors that are copied at once."""
        return (piece.tensor for job in self._jobs[NOW] for piece in job.pieces)

    def fill(self, go: int) -> None:
        """Fill the segments of one pass, on several threads. Returns when the last one is filled.

        NOW fills everything that must not wait. LATER fills deferred bytes, after `save` has returned. LAST fills bytes
        of other snapshots, which are complete by then.
        """
        jobs, late = self._jobs[go], go > NOW
        todo = deque(jobs)
        for _ in range(min(self._source.num_threads(late=late), len(jobs)) - 1):
            # If no helper can be started, this thread copies more.
            self._host.submit(lambda: self._copy(todo, late), lambda _: None)
        self._copy(todo, late)
        with self._changed:
            while self._num_filling:
                self._changed.wait(LIVENESS_SECONDS)
            if self._error:
                raise self._error

    def all_enqueued(self) -> None:
        """Note that no more fills follow: `on_end` is called once the devices have copied everything."""
        self._finish_one()

    def check(self) -> None:
        """Raise the error if this snapshot or its save has failed."""
        if self._error:
            raise self._error
        self._receiver.check()

    def stop(self, error: BaseException | None) -> None:
        """Wait for running copies, and return memory that was not handed on. No more copies begin.

        An interrupt of the wait is raised at the end: no tensor may be freed while a thread still reads it.
        """
        interrupt: BaseException | None = None
        with self._changed:
            self._error = self._error or error
        while self._num_filling:
            try:
                with self._changed:
                    if self._num_filling:
                        self._changed.wait(LIVENESS_SECONDS)
            except BaseException as raised:
                interrupt = interrupt or raised
        try:
            if error is not None:
                self._give_back_memory()
        finally:
            # Drop the jobs, and the callback, which refers to the snapshot.
            self._jobs, self._on_end = ([], [], []), lambda _: None
        if interrupt is not None:
            raise interrupt

    def _give_back_memory(self) -> None:
        """Release the leases of a failed snapshot. Memory that a device may still write to is leaked."""
        quiet = False  # stays False if the wait for the devices is interrupted
        try:
            quiet = self._source.are_devices_quiet()
        finally:
            for job in chain(*self._jobs):
                if (lease := self._lease_of(job)) is not None:
                    if quiet or not job.is_enqueued:
                        lease.release()
                    else:
                        lease.leak()

    # --- on the threads that fill -------------------------------------------------------------------------------

    def _copy(self, todo: deque[SegmentJob], late: bool) -> None:
        """Fill one run of segments after the other, until none is left or a thread has failed."""
        while True:
            self._taking.acquire()
            with self._changed:
                if self._error or not todo:
                    self._taking.release()
                    return
                self._num_filling += 1
            try:
                try:
                    jobs = self._take(todo)
                finally:
                    self._taking.release()
                with self._host.trace.span("stage", segment=jobs[0].number):
                    self._fill_run(jobs, late)
            except BaseException as error:
                with self._changed:
                    self._error = self._error or error
            finally:
                with self._changed:
                    self._num_filling -= 1
                    self._changed.notify_all()

    def _take(self, todo: deque[SegmentJob]) -> list[SegmentJob]:
        """The next job, with its lease; if devices copy, as many as adjacent memory allows. Under `_taking`."""
        jobs = [todo.popleft()]
        if jobs[0].lease is not None:
            return jobs
        lender, devices = self._host.lender, self._source.devices
        most = lender.max_run if devices else 1
        while len(jobs) < most and todo and todo[0].lease is None and todo[0].number == jobs[-1].number + 1:
            jobs.append(todo.popleft())
        pin = next(iter(devices), None)
        leases = lender.lease_run((self._order, jobs[0].number), len(jobs), pin=pin, check=self.check)
        for job, lease in zip(jobs, leases, strict=False):
            job.lease = lease
        todo.extendleft(reversed(jobs[len(leases) :]))
        return jobs[: len(leases)]

    def _fill_run(self, jobs: Sequence[SegmentJob], late: bool) -> None:
        """Fill consecutive segments, so that a tensor that spans several of them is one copy from its device."""
        source = self._source
        run = [job.lease.segment for job in jobs if job.lease is not None]
        on_device: dict[Device, list[Piece]] = {}
        for job, segment in zip(jobs, run, strict=True):
            for at, data in job.literals:
                segment.view[at : at + len(data)] = data
            source.copy_from_host(job.pieces, segment, segment.begin - run[0].begin, on_device, late=late)
        into: Segment = run[0].joined_to(run[-1])
        for device, pieces in on_device.items():
            for job in jobs:
                job.is_enqueued = True
            event = source.enqueue(device, into, pieces)
            for job in jobs:
                job.events.append((device, event))
        for job in jobs:
            if job.rest:
                job.pieces, job.literals, job.rest = job.rest, (), ()
            else:
                with self._changed:
                    self._num_unfinished += 1
                self._hand_on_when_copied(job)

    def _hand_on_when_copied(self, job: SegmentJob) -> None:
        """Hand a segment on when the last of its copies has ended."""
        if not job.events:
            lease = self._lease_of(job)
            if lease is not None:
                with self._changed:
                    self._copied_bytes += job.num_bytes
                self._receiver.put(job.number, lease)
            self._finish_one()
            return
        device, event = job.events.pop()

        def wait() -> None:
            try:
                with self._host.trace.span("copy", segment=job.number):
                    device.wait(event)
                self._hand_on_when_copied(job)
            except BaseException as error:
                self._on_end(error)

        device.in_turn(wait, refused=self._on_end)

    def _lease_of(self, job: SegmentJob) -> Lease | None:
        """Take the lease out of a job, so that only one thread releases it or hands it on."""
        with self._changed:
            lease, job.lease = job.lease, None
        return lease

    def _finish_one(self) -> None:
        with self._changed:
            self._num_unfinished -= 1
            is_last = self._num_unfinished == 0
        if is_last:
            self._on_end(None)
