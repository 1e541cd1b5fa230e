"""The way of an archive to one target.

In: a target, and the drain that writes to it. Out: an object that is durable there, and committed; or no trace of it.
Knows nothing of: other targets.

A delivery has two tasks. `task` waits until the lane of the drain has written every segment and the target's check
has passed, then finishes the object. `part.task` waits for `task` and then for the other ranks, where there are
several. The story commits a delivery when both have ended. `state` says how far the object is, and so what has to be
taken back when the save fails: an object that was never finished goes with its sink, a finished one is discarded
unless it is committed.

All of this runs on the loop's thread, so there is no lock: between two awaits nothing changes. Calls that block run on
helper threads and touch nothing here. The lane belongs to the drain and changes on any thread; its two futures, which
resolve once and outside the drain's lock, bring the loop all that it has to know. A call that does not return is left
behind in a task of its own, which takes the object back when the call returns after all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from enum import IntEnum
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

from ...errors import CheckpointError, StorageUnavailableError
from ..host.loop import OffLoop, ask_for_exception
from ..host.threads import running_future
from ..host.waits import AGAIN_SECONDS, END_SECONDS, LAG_SECONDS
from ..report import Destination, SaveReport
from ..runs.manifest import Archive, SaveTimes
from ..spans import Spans
from ..storage.interface import Sink, Storage
from .drain import Drain, Lane

_FIRST_PAUSE_SECONDS: Final = 1.0
_PAUSE_SECONDS: Final = 5.0

Verify: TypeAlias = Callable[[int, memoryview], None]


class SaveOutcome(NamedTuple):
    """The report of a committed save, and what only the history of its run has: the sizes of its groups in bytes."""

    report: SaveReport
    call_seconds: float
    groups: Mapping[str, int]


class Target:
    """One place that a save goes to, and one object there. A request creates it; a delivery calls it on helper threads.

    By default a durable object is committed, and there are no other ranks to agree with.
    """

    num_bytes_beside = 0
    """Bytes of other objects of the checkpoint, which `commit` writes."""

    num_driver_bytes = 0
    """Those of them that this process wrote."""

    times: SaveTimes | None = None
    """How long the save has taken, set before `agree` and before `commit`."""

    outcome: SaveOutcome | None = None
    """What the save has come to, set before `afterwards`."""

    def __init__(self, storage: Storage, name: str, shown: str | None = None) -> None:
        """`shown` names the place in reports and messages, if that is not the object."""
        self.storage = storage
        self.path = storage.locate(name if shown is None else shown)
        self.rename(name)

    def rename(self, name: str) -> None:
        """Take another name for the object, before it is opened."""
        self._name, self.name = name, name.rpartition("/")[2]

    @property
    def in_order(self) -> bool:
        """True if its sink sends in file order, and holds what comes early."""
        return self.storage.in_order

    @property
    def is_cache(self) -> bool:
        """True if the place is this node's own: its object stays when it is durable, and is never committed."""
        return False

    @property
    def may_be_sent_again(self) -> bool:
        """True if the object is copied from another place when this one is back after a failure."""
        return False

    def part_segments(self, num_bytes: int, segment_bytes: int) -> int:
        """The number of segments in a row that its sink must hold at once before it can send any of them."""
        return self.storage.part_segments(num_bytes, segment_bytes)

    async def begin(self, check: Callable[[], None]) -> None:
        """Wait until it is known what the object is called. `check` is called meanwhile, and may raise."""

    def open(self, num_bytes: int, segment_bytes: int, max_segments: int) -> Sink:
        """Begin the object, without a request over a network."""
        return self.storage.create(
            self._name, num_bytes=num_bytes, segment_bytes=segment_bytes, max_segments=max_segments
        )

    def check(self) -> None:
        """Make the checks that need requests over a network, while segments are written. Raises a refusal."""

    def copy_of(self, other: Target, num_bytes: int, verify: Verify, check: Callable[[], None]) -> Sink:
        """Copy the object from another place, where it is durable. Returns its finished sink."""
        raise NotImplementedError

    async def agree(self, archive: Archive, off_loop: OffLoop, check: Callable[[], None]) -> None:
        """Tell the other ranks that the object is durable; on the rank that decides, wait for theirs.

        `check` is called in between, and raises when nobody waits any more.
        """

    async def hear(self, off_loop: OffLoop, check: Callable[[], None]) -> None:
        """Wait for the decision, if another rank decides. Raises when it is a refusal."""

    def refuse(self, error: BaseException) -> bool:  # noqa: ARG002
        """Tell the other ranks that the save has failed, there or altogether.

        False if they may commit it all the same: then its object stays.
        """
        return True

    def commit(self, archives: tuple[Archive, ...], *, late: bool = False) -> None:
        """Make the durable object the checkpoint. `late`: it is one elsewhere already, and newer ones may exist."""

    def discard(self) -> None:
        """Remove a durable object that could not be committed, unless it is the checkpoint after all."""

    def tidy(self) -> None:
        """Remove what the save has put beside the checkpoint and is not to stay. The handle waits for this."""

    def afterwards(self) -> None:
        """Apply retention. The checkpoint is true whatever happens here."""

    def failed(self, error: BaseException, seconds: float) -> None:
        """Tell the history that the save has failed after so many seconds, without a trace. Nobody waits for this."""

    def hangs(self, quiet: Future[None]) -> None:
        """Note that the save goes on without this place; its writes there are under way until `quiet` resolves."""


class DeliveryState(IntEnum):
    """The progress of the object at one target, from each state to the next; `error` says why it went no further."""

    OPENING = 0  # there is no object yet
    WRITING = 1  # there is a sink, which takes segments
    FINISHING = 2  # the object may be visible, and must be taken away if it is not committed
    DURABLE = 3  # the object is visible, and stays
    COMMITTED = 4  # the object is the checkpoint


class RankPart:
    """The part of this rank at one target: to say that its object is durable, and to learn what all ranks decide.

    A delivery creates and owns it, on the loop. With one rank there is nobody to tell.
    """

    def __init__(self, target: Target, off_loop: OffLoop) -> None:
        self.task: asyncio.Task[None] | None = None  # ends when all ranks have done their parts there
        self.may_delete = True  # the object, if the save fails
        self._target, self._off_loop = target, off_loop
        self._in_vain: BaseException | None = None  # nobody waits for it any more

    def begin(self, part: Coroutine[Any, Any, None]) -> None:
        self.task = asyncio.create_task(part)
        self.task.add_done_callback(ask_for_exception)  # `Delivery.error` has it

    def check(self) -> None:
        """Raise the error that cancelled this part, if there is one."""
        if self._in_vain is not None:
            raise self._in_vain

    def is_in_vain(self, error: BaseException) -> None:
        self._in_vain = self._in_vain or error

    async def end(self, error: BaseException) -> None:
        """Wait a while for its end, since nobody waits for its outcome any more."""
        if self.task is not None:
            self.is_in_vain(error)
            await asyncio.wait([self.task], timeout=END_SECONDS)

    async def refuse(self, error: BaseException) -> None:
        """Tell the other ranks that there will be no commit, if there are any."""
        self.may_delete = False
        if self.task is not None and not self.task.done():
            return  # a call does not return, and what it says counts
        with suppress(CheckpointError, OSError):
            self.may_delete = await self._off_loop(partial(self._target.refuse, error))


class Delivery:
    """The archive of one save on its way to one target. An attempt creates and owns it, on the loop."""

    def __init__(
        self,
        target: Target,
        drain: Drain,
        spans: Spans,
        off_loop: OffLoop,
        may_miss: Callable[[BaseException], bool],
    ) -> None:
        """`may_miss` tells whether the save can do without a place that has this error."""
        self.target = target
        self.state = DeliveryState.OPENING
        self.error: BaseException | None = None
        self.sink: Sink | None = None
        self.lane: Lane | None = None
        self.task: asyncio.Task[None] | None = None  # ends when the archive is durable there
        self.part = RankPart(target, off_loop)
        # Takes the object back when a call has returned that nobody waits for any more.
        self.left_behind: asyncio.Task[None] | None = None
        self._drain, self._spans, self._off_loop, self._may_miss = drain, spans, off_loop, may_miss
        self._write_seconds = 0.0

    @property
    def is_committed(self) -> bool:
        return self.state is DeliveryState.COMMITTED

    @property
    def is_kept(self) -> bool:
        """True if the object stays there, though it is not committed."""
        return self.target.is_cache and self.state is DeliveryState.DURABLE

    async def open(self) -> None:
        """Begin the object."""
        drain = self._drain
        await self.target.begin(drain.check)
        room = drain.max_segments - drain.num_tail  # the tail waits for all else
        self.sink = await self._off_loop(partial(self.target.open, drain.file_bytes, drain.segment_bytes, room))

    def begin(self, lane: Lane) -> None:
        """Finish the object when the lane has brought all segments to its sink."""
        self.state, self.lane = DeliveryState.WRITING, lane
        self.task = asyncio.create_task(self._deliver(lane))

    async def _deliver(self, lane: Lane) -> None:
        """Return when the archive is durable; raise when it will not be."""
        sink = lane.sink
        checked = asyncio.ensure_future(self._off_loop(self.target.check))
        arrived: asyncio.Future[Any] = asyncio.gather(checked, asyncio.wrap_future(lane.written))
        failed: list[asyncio.Future[Any]] = []
        if sink.failed is not None:
            failed.append(asyncio.wrap_future(sink.failed))
        try:
            done, _ = await asyncio.wait([arrived, *failed], return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                future.result()
            self.state = DeliveryState.FINISHING
            await self._off_loop(self._spans.traced("finish", sink.finish, path=self.target.path))
        except BaseException as error:
            self.error = error
            for future in (checked, arrived, *failed):  # nobody waits for them any more
                future.add_done_callback(ask_for_exception)
            if self._may_miss(error):
                self._drain.drop(lane, error)
                self._drain.give_up(lane)  # at once, for its memory is needed
                if not lane.quiet.done():
                    self.target.hangs(lane.quiet)
            else:
                self._drain.fail(error)
            raise
        self.state = DeliveryState.DURABLE
        self._write_seconds = self._spans.total()

    async def commit(self, archives: tuple[Archive, ...], *, late: bool = False) -> None:
        """Make the object the checkpoint there; raise the error that prevents it."""
        commit = partial(self.target.commit, archives, late=late)
        try:
            await self._off_loop(self._spans.traced("commit", commit, path=self.target.path))
        except BaseException as error:
            self.error = error
            raise
        self.error, self.state = None, DeliveryState.COMMITTED

    async def take_part(self, archive: Archive, others: Sequence[Delivery]) -> None:
        """Do this rank's part there, and wait until all ranks have done theirs, as far as this one is to know.

        If the place was away or fell behind, the object is copied from one of the `others` that has it. Raises the
        error that prevents a commit there.
        """
        try:
            if self.task is not None:
                await asyncio.wait([self.task])
                self._check()
            if self.state is not DeliveryState.DURABLE:
                await self._copy_from(others, archive)
            await self.target.agree(archive, self._off_loop, self._check)
            await self.target.hear(self._off_loop, self._check)
        except BaseException as error:
            self.error = error
            raise

    async def _copy_from(self, others: Sequence[Delivery], archive: Archive) -> None:
        """Copy the object from another target. Raises the delivery's own error if that is not possible."""
        error = self.error
        assert error is not None
        source = next((other for other in others if other.state >= DeliveryState.DURABLE), None)
        is_answering = self.left_behind is None and self._may_miss(error)
        if source is None or not (is_answering and self.target.may_be_sent_again):
            raise error
        if self.sink is not None and not await self._abort(self.sink, for_ever=False):
            raise error
        copy = partial(self.target.copy_of, source.target, archive.num_bytes, self._drain.digests.compare, self._check)
        deadline, pause = self._spans.total() + AGAIN_SECONDS, _FIRST_PAUSE_SECONDS
        while True:
            try:
                self.sink = await self._off_loop(copy)
                break
            except StorageUnavailableError as again:
                if self._spans.total() > deadline:
                    raise again from error
            self._check()
            await asyncio.sleep(pause)
            pause = min(2 * pause, _PAUSE_SECONDS)
        self.error, self.state = None, DeliveryState.DURABLE
        self._write_seconds = self._spans.total()

    def _check(self) -> None:
        """Raise the error that made this rank's part be in vain."""
        self._drain.check()
        self.part.check()

    async def arrive_late(self, archives: tuple[Archive, ...]) -> None:
        """Commit at a place that the save has not waited for, if the object arrives in time; else take it back."""
        part = self.part.task
        if part is None or self.left_behind is not None:
            return
        await asyncio.wait([part], timeout=LAG_SECONDS)
        if self.task is not None and not self.task.done():
            self.error = self.lagging("did not arrive in time")
            self.part.is_in_vain(self.error)
            if self.lane is not None:
                self._drain.drop(self.lane, self.error)
                self._drain.give_up(self.lane)
            self.leave_behind(self.task)
            return
        await self.part.end(self.lagging("not all ranks were in time"))
        try:
            if not part.done():
                raise self.lagging("does not answer")
            part.result()
            await self._commit_late(archives)
        except Exception as error:
            self.error = error
            if not self.is_kept:
                await self.part.refuse(error)
        await self.take_back()

    async def _commit_late(self, archives: tuple[Archive, ...]) -> None:
        """Commit; a place that is away at that moment is tried again if other ranks wait for it."""
        deadline, pause = self._spans.total() + LAG_SECONDS, _FIRST_PAUSE_SECONDS
        while True:
            try:
                return await self.commit(archives, late=True)
            except StorageUnavailableError:
                if not self.target.may_be_sent_again or self._spans.total() > deadline:
                    raise
            self._drain.check()
            await asyncio.sleep(pause)
            pause = min(2 * pause, _PAUSE_SECONDS)

    def leave_behind(self, calling: asyncio.Task[None]) -> None:
        """Go on without a place where a call does not return. If the call returns after all, take the object back."""
        quiet = running_future()

        async def take_back() -> None:
            try:
                await asyncio.wait([calling])
                ask_for_exception(calling)
                await self.take_back(for_ever=True)
            finally:
                quiet.set_result(None)

        self.left_behind = asyncio.create_task(take_back())
        self.target.hangs(quiet)

    async def take_back(self, *, for_ever: bool = False) -> None:
        """End the delivery, and remove an object that is not committed. Waits for its writes, `for_ever` or some
        time.
        """
        if self.task is not None:
            await asyncio.wait([self.task])
            ask_for_exception(self.task)
        if self.sink is None or not (self.is_committed or await self._abort(self.sink, for_ever=for_ever)):
            return
        is_there = self.state in (DeliveryState.FINISHING, DeliveryState.DURABLE)
        if is_there and self.part.may_delete and not (self.is_kept and self._drain.is_committed):
            with suppress(CheckpointError, OSError):  # what is left then is swept by the next process
                await self._off_loop(self.target.discard)
        await self._off_loop(self.sink.close)

    async def _abort(self, sink: Sink, *, for_ever: bool) -> bool:
        """Abort the sink once its writes have returned. False if they do not return: then the sink is left alone."""
        if self.lane is not None:
            quiet = asyncio.wrap_future(self.lane.quiet)
            await asyncio.wait([quiet], timeout=None if for_ever else LAG_SECONDS)
            if not quiet.done():
                return False
        await self._off_loop(sink.abort)
        return True

    async def close(self) -> None:
        """Close the sink of a committed object."""
        if self.is_committed and self.sink is not None:
            await self._off_loop(self.sink.close)

    async def tidy(self) -> None:
        """Remove, at a place where it is committed, what is not to stay."""
        if self.is_committed:
            await self._off_loop(self.target.tidy)

    async def afterwards(self, errors: list[BaseException]) -> None:
        """Apply retention there; add its error to `errors`."""
        try:
            await self._off_loop(self.target.afterwards)
        except Exception as error:
            errors.append(error)

    def lagging(self, why: str) -> StorageUnavailableError:
        path = self.target.path
        return StorageUnavailableError(f"{path}: {why}; it is caught up by a later save, or by catch_up()", path=path)

    def destination(self) -> Destination:
        """The result at this place, for the report."""
        error, sink = self.error, self.sink
        if self.is_kept:
            error = None
        elif error is None and not self.is_committed:
            error = self.lagging("not durable yet when the step was committed elsewhere")
        is_there = sink is not None and error is None
        return Destination(
            path=self.target.path,
            num_bytes=sink.num_bytes + self.target.num_bytes_beside if sink is not None and is_there else 0,
            write_seconds=self._write_seconds,
            retries=0 if sink is None else sink.num_retries,
            retryable=sink is not None and sink.retryable,
            error=None if error is None else f"{type(error).__name__}: {error}",
        )
