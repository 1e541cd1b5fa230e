"""A save, told once from top to bottom. No threads are started here, and nothing is logged.

In: a layout, segments as they are filled, one or several targets. Out: a committed checkpoint and its report.
Knows nothing of: where segments come from, what is in them.

Filled segments do not pass through the story: `Drain` takes them from the copying threads straight to the writing
ones. The story waits for the last, and decides what becomes of the archives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, Protocol, TypeVar

from ..errors import CheckpointError, StorageUnavailableError
from ..format.layout import Image
from ..host.threads import running_future
from ..report import Destination, SaveReport
from ..runs.manifest import Archive
from ..spans import Spans
from ..storage.base import Sink, Storage
from ..storage.pace import Pace
from .drain import Drain, Lane, Submit

T = TypeVar("T")
CommitRule = Literal["all", "any"]

# How long a place that does not even open is waited for once the save could go on without it, or has failed,
_OPEN_SECONDS: Final = 10.0
# and with `commit="any"`, how long one that lags behind a committed one goes on before it is left to be caught up.
_LAG_SECONDS: Final = 900.0


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
