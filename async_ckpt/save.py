"""A save, told once from top to bottom. No threads are started here, and nothing is logged.

In: a layout, segments as they are filled, one or several targets. Out: a committed checkpoint and its report.
Knows nothing of: where segments come from, what is in them.

Filled segments do not pass through the story: `Drain` takes them from the copying threads straight to the writing
ones. The story waits for the last, and decides what becomes of the archives.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, Protocol, TypeVar

from .commit.manifest import Archive
from .errors import CheckpointError, StorageUnavailableError
from .format import digests
from .format.layout import Image
from .report import Destination, Progress, SaveReport
from .snapshot.crew import running_future
from .snapshot.pool import Lease
from .spans import NO_TRACE, Spans, Trace
from .spec import BLOCK_BYTES
from .storage.base import Sink, Storage
from .storage.pace import Pace

T = TypeVar("T")
CommitRule = Literal["all", "any"]

# How long a place that does not even open is waited for once the save could go on without it, or has failed,
_OPEN_SECONDS: Final = 10.0
# and with `commit="any"`, how long one that lags behind a committed one goes on before it is left to be caught up.
_LAG_SECONDS: Final = 900.0

Submit = Callable[[Callable[[], None]], None]


class OffLoop(Protocol):
    """Runs a blocking call somewhere else than on the loop, and waits for it."""

    def __call__(self, fn: Callable[[], T], /) -> Awaitable[T]: ...


class Target(Protocol):
    """One place that a save goes to, and what makes it true there. Blocking calls."""

    path: str
    storage: Storage
    num_bytes_beside: int  # of other objects of the checkpoint, which `commit` writes

    def open(self, num_bytes: int, segment_bytes: int, max_segments: int) -> Sink:
        """Begin the object; asks nothing over a network."""

    def check(self) -> None:
        """Check, while the writing goes on, what had to be asked over a network. Raises what refuses the save."""

    def commit(self, archive: Archive, *, late: bool = False) -> None:
        """The object is durable: make it the checkpoint. `late`: it is one elsewhere already, and others may follow it."""

    def discard(self) -> None:
        """The object is durable, but committing it failed: remove it, unless it is the checkpoint after all."""

    def afterwards(self) -> None:
        """Retention; the checkpoint is true whatever happens here."""

    def hangs(self, quiet: Future[None]) -> None:
        """The save goes on without this place, where writes of it are still under way until `quiet` resolves."""


class Staging(Protocol):
    """What the story wants to know of a snapshot in the making."""

    completion: Future[None]
    stage_seconds: float

    @property
    def stall_seconds(self) -> float: ...


@dataclass(slots=True)
class SaveJob:
    """One save on its way from plan to report."""

    step: int | None
    layout: Image
    num_tensors: int
    targets: Sequence[Target]
    rule: CommitRule
    drain: Drain
    spans: Spans
    turn: Future[None] | None  # resolved when the save before this one has been decided
    call_seconds: Future[float]  # resolved when the caller has its handle
    staging: Staging
    writers: Callable[[Target], Submit]
    pace: Callable[[Target], Pace | None] = lambda _: None
    deliveries: list[Delivery] = field(default_factory=list)

    @property
    def archive(self) -> Archive:
        """What a manifest says of it, at every target."""
        return Archive(self.targets[0].path.rpartition("/")[2], self.layout.file_bytes, self.drain.digest)


@dataclass(slots=True, eq=False)
class Delivery:
    """The way of the archive to one target."""

    target: Target
    sink: Sink | None = None
    lane: Lane | None = None
    task: asyncio.Task[None] | None = None  # ends when the archive is durable there
    finished: bool = False  # or halfway: visible, and not known to be durable
    committed: bool = False
    error: BaseException | None = None
    write_seconds: float = 0.0
    # Takes it back when a call has returned that nobody waits for any more.
    left_behind: asyncio.Task[None] | None = None


async def run_save(job: SaveJob, off_loop: OffLoop) -> SaveReport:
    """Write, then commit. Raises what went wrong, after every trace of the attempt is gone."""
    job.deliveries = [Delivery(target) for target in job.targets]
    try:
        with job.spans.span("write"):
            opened = await _open(job, off_loop)
            lanes = job.drain.open(
                [(d.sink, job.writers(d.target), job.pace(d.target)) for d in opened if d.sink is not None]
            )
            for delivery, lane in zip(opened, lanes, strict=True):
                delivery.lane = lane
                delivery.task = asyncio.create_task(_deliver(job, delivery, off_loop))
            await asyncio.wrap_future(job.staging.completion)
        while not any(delivery.committed for delivery in job.deliveries):
            with job.spans.span("write"):
                durable = await _durable(job)
            if job.turn is not None:
                await asyncio.wrap_future(job.turn)
            with job.spans.span("commit"):
                await _commit(job, durable, off_loop)
    except BaseException as error:
        job.drain.fail(error)
        await asyncio.wrap_future(job.drain.idle)
        for delivery in job.deliveries:
            if delivery.left_behind is None:
                await _take_back(delivery, off_loop, _LAG_SECONDS)
        left_behind = [d.left_behind for d in job.deliveries if d.left_behind is not None]
        if left_behind:
            await asyncio.wait(left_behind, timeout=_OPEN_SECONDS)
        raise
    for delivery in job.deliveries:
        if delivery.committed and delivery.sink is not None:
            await off_loop(delivery.sink.close)
    return _report(job, await asyncio.wrap_future(job.call_seconds))


async def follow_up(job: SaveJob, off_loop: OffLoop) -> None:
    """The save is true. Deliveries that lag may still arrive and be committed where they go; then retention everywhere.

    Raises the first thing that went wrong; nothing of that makes the save less true.
    """
    job.drain.decided()
    errors: list[BaseException] = []
    late = [delivery for delivery in job.deliveries if not delivery.committed]
    for delivery in job.deliveries:
        if delivery.committed:  # first, for a disk must not fill while it waits for a store
            await _afterwards(delivery, errors, off_loop)
    for delivery in late:
        await _arrive_late(job, delivery, off_loop)
        if delivery.committed:
            await _afterwards(delivery, errors, off_loop)
    if errors:
        raise errors[0]


async def _afterwards(delivery: Delivery, errors: list[BaseException], off_loop: OffLoop) -> None:
    try:
        await off_loop(delivery.target.afterwards)
    except Exception as error:
        errors.append(error)


async def _arrive_late(job: SaveJob, delivery: Delivery, off_loop: OffLoop) -> None:
    """Commit a delivery where the save was not waited for, if it comes in time; else it leaves no trace."""
    if delivery.task is None:
        return
    await asyncio.wait([delivery.task], timeout=_LAG_SECONDS)
    if not delivery.task.done():
        delivery.error = _lagging(delivery, "did not arrive in time")
        if delivery.lane is not None:
            job.drain.drop(delivery.lane, delivery.error)
            job.drain.let_go(delivery.lane)
        _leave_behind(delivery, delivery.task, off_loop)
        return
    try:
        delivery.task.result()
        await off_loop(partial(delivery.target.commit, job.archive, late=True))
        delivery.committed = True
    except Exception as error:
        delivery.error = error
    await _take_back(delivery, off_loop, _LAG_SECONDS)


def _ask_for_exception(future: asyncio.Future[Any]) -> None:
    """Or asyncio would say that nobody has."""
    if not future.cancelled():
        future.exception()


async def _open(job: SaveJob, off_loop: OffLoop) -> list[Delivery]:
    """Begin the object everywhere, or under "any" wherever that is possible."""

    async def begin(delivery: Delivery) -> None:
        drain = job.drain
        room = drain.max_segments - drain.num_tail  # the tail waits for all else
        open_there = partial(delivery.target.open, job.layout.file_bytes, drain.segment_bytes, room)
        delivery.sink = await off_loop(open_there)

    tasks = {asyncio.create_task(begin(delivery)): delivery for delivery in job.deliveries}
    failed = asyncio.wrap_future(job.drain.idle)  # while nothing is open, it is that for no other reason

    def is_in_vain() -> bool:
        errors = [error for task in tasks if task.done() and (error := task.exception()) is not None]
        return failed.done() or not all(_may_miss(job, error) for error in errors)

    while (opening := [task for task in tasks if not task.done()]) and not is_in_vain():
        enough = job.rule == "any" and any(delivery.sink is not None for delivery in job.deliveries)
        done, _ = await asyncio.wait(
            [*opening, failed],
            timeout=_OPEN_SECONDS if enough else None,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not done:
            break
    for task, delivery in tasks.items():
        if task.done():
            delivery.error = task.exception()
        else:
            _leave_behind(delivery, task, off_loop)
    job.drain.check()
    errors = [delivery.error for delivery in job.deliveries if delivery.error is not None]
    for error in errors:
        if not _may_miss(job, error) or len(errors) == len(job.deliveries):
            raise error
    for delivery in job.deliveries:
        if delivery.left_behind is not None:
            delivery.error = _lagging(delivery, "does not answer")
    return [delivery for delivery in job.deliveries if delivery.error is None]


def _leave_behind(delivery: Delivery, calling: asyncio.Task[None], off_loop: OffLoop) -> None:
    """Go on without a place where a call does not return. If it does after all, nothing of the delivery stays there."""
    quiet = running_future()

    async def take_back() -> None:
        try:
            await asyncio.wait([calling])
            _ask_for_exception(calling)
            await _take_back(delivery, off_loop, None)
        finally:
            quiet.set_result(None)

    delivery.left_behind = asyncio.create_task(take_back())
    delivery.target.hangs(quiet)


async def _deliver(job: SaveJob, delivery: Delivery, off_loop: OffLoop) -> None:
    """Returns when the archive is durable at one target; raises when it will not be."""
    assert delivery.sink is not None
    assert delivery.lane is not None
    checked = asyncio.ensure_future(off_loop(delivery.target.check))
    written = asyncio.wrap_future(delivery.lane.written)
    try:
        await asyncio.wait([checked, written], return_when=asyncio.FIRST_EXCEPTION)
        if checked.done():
            checked.result()
        await written
        await checked
        delivery.finished = True
        await off_loop(job.spans.traced("finish", delivery.sink.finish, path=delivery.target.path))
    except BaseException as error:
        delivery.error = error
        for future in (checked, written):  # nobody waits for them any more
            future.add_done_callback(_ask_for_exception)
        if _may_miss(job, error):
            job.drain.drop(delivery.lane, error)
            job.drain.let_go(delivery.lane)  # at once, for its memory is needed
            if not delivery.lane.quiet.done():
                delivery.target.hangs(delivery.lane.quiet)
        else:
            job.drain.fail(error)
        raise
    delivery.write_seconds = job.spans.total()


async def _durable(job: SaveJob) -> list[Delivery]:
    """Those that are durable: all, or under "any" the first. Raises as soon as that cannot be any more."""
    running = {delivery.task: delivery for delivery in job.deliveries if delivery.task is not None}
    pending = set(running)
    while pending:
        _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        errors = [delivery.error for delivery in running.values() if delivery.error is not None]
        for error in errors:
            if not _may_miss(job, error) or len(errors) == len(running):
                raise error
        arrived = [d for task, d in running.items() if task.done() and d.error is None]
        if arrived and (job.rule == "any" or not pending):
            return arrived
    raise AssertionError("every delivery ends in an error or durable")


async def _commit(job: SaveJob, durable: list[Delivery], off_loop: OffLoop) -> None:
    """Make it true wherever it is durable. Raises what the save cannot do without."""
    for delivery in durable:
        try:
            commit = partial(delivery.target.commit, job.archive)
            await off_loop(job.spans.traced("commit", commit, path=delivery.target.path))
            delivery.committed = True
        except BaseException as error:
            delivery.error = error
            done = [other.target.path for other in durable if other.committed]
            if done:
                error.add_note(
                    f"async_ckpt: it is committed at {', '.join(done)}; the other places are caught up later"
                )
            if not _may_miss(job, error):
                raise


def _may_miss(job: SaveJob, error: BaseException) -> bool:
    """Whether the save can do without a place that has this error: the place is away, and another may do."""
    return job.rule == "any" and isinstance(error, StorageUnavailableError)


def _lagging(delivery: Delivery, why: str) -> StorageUnavailableError:
    path = delivery.target.path
    return StorageUnavailableError(
        f"{path}: {why}; it is caught up by a later save, or by catch_up()", path=path
    )


async def _abort(delivery: Delivery, off_loop: OffLoop, timeout: float | None) -> bool:
    """Abort the sink, once nobody writes to it. False when its writes hang for ever: then it is left alone."""
    if delivery.sink is None:
        return False
    if delivery.lane is not None:
        quiet = asyncio.wrap_future(delivery.lane.quiet)
        await asyncio.wait([quiet], timeout=timeout)
        if not quiet.done():
            return False
    await off_loop(delivery.sink.abort)
    return True


async def _take_back(delivery: Delivery, off_loop: OffLoop, timeout: float | None) -> None:
    """End a delivery: what is not committed leaves no trace. Its writes are waited for so long."""
    if delivery.task is not None:
        await asyncio.wait([delivery.task])
        _ask_for_exception(delivery.task)
    if delivery.sink is None or not (delivery.committed or await _abort(delivery, off_loop, timeout)):
        return
    if delivery.finished and not delivery.committed:
        with suppress(CheckpointError, OSError):  # what is left then is swept by the next process
            await off_loop(delivery.target.discard)
    await off_loop(delivery.sink.close)


def _report(job: SaveJob, call_seconds: float) -> SaveReport:
    seconds = job.spans.seconds
    target = next(delivery.target for delivery in job.deliveries if delivery.committed)
    return SaveReport(
        status="committed",
        step=job.step,
        path=target.path,
        num_bytes=job.layout.file_bytes + target.num_bytes_beside,
        num_tensors=job.num_tensors,
        stall_seconds=call_seconds + job.staging.stall_seconds,
        stage_seconds=job.staging.stage_seconds,
        write_seconds=seconds["write"],
        commit_seconds=seconds["commit"],
        total_seconds=job.spans.total(),
        retries=sum(delivery.sink.num_retries for delivery in job.deliveries if delivery.sink is not None),
        destinations=tuple(_destination(delivery) for delivery in job.deliveries),
    )


def _destination(delivery: Delivery) -> Destination:
    error = delivery.error
    if error is None and not delivery.committed:
        error = _lagging(delivery, "not durable yet when the step was committed elsewhere")
    return Destination(
        path=delivery.target.path,
        num_bytes=delivery.sink.num_bytes + delivery.target.num_bytes_beside
        if delivery.sink is not None and error is None
        else 0,
        write_seconds=delivery.write_seconds,
        retries=0 if delivery.sink is None else delivery.sink.num_retries,
        retryable=delivery.sink is not None and delivery.sink.retryable,
        error=None if error is None else f"{type(error).__name__}: {error}",
    )


class _Piece:
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
        self.queue: deque[_Piece] = deque()
        self.num_writing = 0
        self.num_left = num_segments
        self.num_held = 0  # leases that the sink has retained
        self.written_bytes = 0
        self.ended = False
        self.is_quiet = False
        self.is_given_up = False


class _LaneHeld:
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
        self.digest = ""
        self.idle = running_future()  # all lanes have ended, and no task is under way
        self._lock = threading.Lock()
        self._lanes: list[Lane] = []  # under _lock, like all below
        self._opened = False
        self._early: list[tuple[int, Lease]] = []
        self._tail: dict[int, Lease] = {}
        self._num_undigested = self._first_tail
        self._num_active = 0
        self._sealed = layout.digests is None
        self._decided = False
        self._error: BaseException | None = None
        self._staged_bytes = 0

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

    def check(self) -> None:
        """Raise what made this save fail, if it did."""
        if self._error:
            raise self._error

    # --- what comes in ----------------------------------------------------------------------------------------

    def put(self, number: int, lease: Lease) -> None:
        """Segment `number` is filled; the drain releases the lease."""
        with self._lock:
            self._staged_bytes += self._bytes_of(number)
            refused = self._error is not None
            send = False
            if not refused:
                if number >= self._first_tail:
                    self._tail[number] = lease
                elif self._opened:
                    send = True
                else:
                    self._early.append((number, lease))
        if refused:
            lease.release()
        elif send:
            self._send(_Piece(number, lease, undigested=self._covered > 0))
        else:
            self._seal_if_due()

    def open(self, sinks: Sequence[tuple[Sink, Submit, Pace | None]]) -> list[Lane]:
        """There is somewhere to write to: one lane for each sink, with what runs its writes, and how fast."""
        lanes = [Lane(sink, submit, self.num_segments, pace) for sink, submit, pace in sinks]
        with self._lock:
            failed = self._error
            self._lanes, self._opened = lanes, True
            early, self._early = self._early, []
        if failed is not None:
            self.fail(failed)
        for number, lease in early:
            self._send(_Piece(number, lease, undigested=self._covered > 0))
        self._seal_if_due()
        return lanes

    # --- what ends it -----------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Give up: writes under way end, no other begins. The first error counts."""
        with self._lock:
            self._error = self._error or error
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
            if lane.ended:
                return
            lane.ended = True
            dropped, lane.queue = lane.queue, deque()
            self._num_active -= len(dropped)
            none_left = all(other.ended and other.num_left for other in self._lanes)
        for piece in dropped:
            piece.lease.release()
        lane.written.set_exception(error)
        self._settle_lane(lane)
        if none_left:
            self.fail(error)
        self._settle()

    def decided(self) -> None:
        """The save is true without the lanes that have not ended: from now on memory goes before them."""
        with self._lock:
            self._decided = True

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
                if not lane.is_given_up and not (lane.ended and lane.num_left)
            }
            last = max(behind, key=lambda lane: behind[lane], default=None)
            if last is None or not behind[last]:
                return False
            # Dropping it helps only as far as it alone keeps others from going on.
            lag = behind[last] - min(behind.values())
            if not self._decided and (len(behind) < 2 or lag * 2 < self.max_segments - self.num_tail):
                return False
        path = repr(last.sink)
        self.drop(last, StorageUnavailableError(f"{path} fell behind, and its memory was needed", path=path))
        self.let_go(last)
        return True

    def let_go(self, lane: Lane) -> None:
        """Nothing will come of a lane: what its sink holds and does not send this moment is free at once."""
        with self._lock:
            lane.is_given_up = True
        lane.sink.give_up()

    def count_held(self, lane: Lane, change: int) -> None:
        with self._lock:
            lane.num_held += change

    # --- the lanes --------------------------------------------------------------------------------------------

    def _send(self, piece: _Piece) -> None:
        for lane in self._lanes:
            piece.lease.retain()
            with self._lock:
                taken = not lane.ended and self._error is None
                if taken:
                    lane.queue.append(piece)
                    self._num_active += 1
            if taken:
                lane.submit(partial(self._write_next, lane))
            else:
                piece.lease.release()
        piece.lease.release()

    def _write_next(self, lane: Lane) -> None:
        while (piece := self._take(lane)) is not None:
            self._write(lane, piece)

    def _take(self, lane: Lane) -> _Piece | None:
        with self._lock:
            if not lane.queue or lane.num_writing >= self._max_writing:
                return None
            lane.num_writing += 1
            return lane.queue.popleft()

    def _write(self, lane: Lane, piece: _Piece) -> None:
        num_bytes = self._bytes_of(piece.number)
        try:
            self.check()
            if lane.pace is not None:
                lane.pace.wait(num_bytes, partial(self._check_lane, lane))
            data = piece.lease.segment.view[:num_bytes]
            with self._trace.span("write", segment=piece.number, sink=repr(lane.sink)):
                lane.sink.write(piece.number * self.segment_bytes, data, _LaneHeld(self, lane, piece.lease))
        except BaseException as error:
            self._end(lane, error)
        else:
            self._count_written(lane, num_bytes)
        try:
            self._digest_once(piece)
        except BaseException as error:
            self.fail(error)
        piece.lease.release()
        with self._lock:
            lane.num_writing -= 1
        self._settle_lane(lane)
        self._leave()

    def _check_lane(self, lane: Lane) -> None:
        self.check()
        if lane.ended:  # dropped: the others go on without it
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
            arrived = lane.num_left == 0 and not lane.ended
            lane.ended |= arrived
        if arrived:
            lane.written.set_result(None)

    def _digest_once(self, piece: _Piece) -> None:
        with self._lock:
            mine, piece.undigested = piece.undigested and self._error is None, False
        if mine:
            self._digest(piece.number, piece.lease, self.segment_bytes)
            with self._lock:
                self._num_undigested -= 1
            self._seal_if_due()

    def _seal_if_due(self) -> None:
        """Once all else is digested, the tail can be."""
        with self._lock:
            complete = self._opened and len(self._tail) == self.num_tail and self._error is None
            if not complete or self._num_undigested or self._sealed:
                return
            self._sealed = True
            tail, self._tail = self._tail, {}
            self._num_active += 1
        self._submit(partial(self._seal, tail))

    def _seal(self, leases: dict[int, Lease]) -> None:
        try:
            self._write_digests(leases)
        except BaseException as error:
            self.fail(error)
        for number, lease in sorted(leases.items()):
            self._send(_Piece(number, lease, undigested=False))
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
                at = (first + i) * digests.DIGEST_BYTES
                self._digests[at : at + digests.DIGEST_BYTES] = digests.block_digest(block)

    def _bytes_of(self, number: int) -> int:
        return min(self.segment_bytes, self._layout.file_bytes - number * self.segment_bytes)

    def _leave(self) -> None:
        with self._lock:
            self._num_active -= 1
        self._settle()

    def _settle_lane(self, lane: Lane) -> None:
        with self._lock:
            due = lane.ended and not (lane.num_writing or lane.queue or lane.is_quiet)
            lane.is_quiet |= due
        if due:
            lane.quiet.set_result(None)

    def _settle(self) -> None:
        with self._lock:
            over = self._error is not None or (bool(self._lanes) and all(lane.ended for lane in self._lanes))
            if self._num_active or not over or self.idle.done():
                return
            self.idle.set_result(None)

    def __repr__(self) -> str:
        p = self.progress
        return f"<Drain {p.written_bytes:,}/{p.staged_bytes:,}/{p.total_bytes:,} bytes written/staged/total>"
