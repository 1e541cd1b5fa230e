"""The way of an archive to one target.

In: a target, and the drain that writes to it. Out: an object that is durable there, and committed; or no trace of it.
Knows nothing of: other targets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from enum import IntEnum
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

from ..errors import CheckpointError, StorageUnavailableError
from ..host.loop import OffLoop
from ..host.threads import running_future
from ..report import Destination
from ..runs.manifest import Archive
from ..spans import Spans
from ..storage.base import Sink, Storage
from .drain import Drain, Lane

# With `commit="any"`, how long a place that lags behind a committed one goes on before it is left to be caught up.
_LAG_SECONDS: Final = 900.0
# How long a place that was away is tried again, while other ranks may wait for what belongs there; and between tries.
_AGAIN_SECONDS: Final = 1800.0
_FIRST_PAUSE_SECONDS: Final = 1.0
_PAUSE_SECONDS: Final = 5.0
# How long whatever still runs at a place is waited for once it is in vain.
_END_SECONDS: Final = 10.0

Verify: TypeAlias = Callable[[int, memoryview], None]


class Target(Protocol):
    """One place that a save goes to, and what makes it true there. Blocking calls."""

    path: str
    name: str  # of its object there
    storage: Storage
    in_order: bool  # its sink sends in file order, and holds what comes early
    num_bytes_beside: int  # of other objects of the checkpoint, which `commit` writes

    def part_segments(self, num_bytes: int, segment_bytes: int) -> int:
        """How many segments in a row its sink must hold at once before it can send any of them."""

    def open(self, num_bytes: int, segment_bytes: int, max_segments: int) -> Sink:
        """Begin the object; asks nothing over a network."""

    def check(self) -> None:
        """Check, while the writing goes on, what had to be asked over a network. Raises what refuses the save."""

    @property
    def is_cache(self) -> bool:
        """What is durable there stays, and is never committed: it is this node's own, and other ranks do not see it."""

    @property
    def may_be_sent_again(self) -> bool:
        """Whether, if this place was away, the object is to be copied there from another one as soon as it is back."""

    def copy_of(self, other: Target, num_bytes: int, verify: Verify, check: Callable[[], None]) -> Sink:
        """Copy the object from another place, where it is durable; its sink, finished."""

    async def agree(self, archive: Archive, off_loop: OffLoop, check: Callable[[], None]) -> None:
        """The object is durable: say so to the other ranks, and where this one decides, wait for theirs.

        `check` is called in between, and raises when nobody waits any more.
        """

    async def hear(self, off_loop: OffLoop, check: Callable[[], None]) -> None:
        """Wait for the word of the rank that decides, where that is another one. Raises when it says no."""

    def refuse(self, error: BaseException) -> bool:
        """The save has failed, there or altogether: tell the other ranks. False if they may commit it all the same: then its
        object stays.
        """

    async def follow(self, off_loop: OffLoop) -> None:
        """It has failed here, and the others know: learn what they decide."""

    def commit(self, archives: tuple[Archive, ...], *, late: bool = False) -> None:
        """The object is durable: make it the checkpoint. `late`: it is one elsewhere already, and others may follow it."""

    def discard(self) -> None:
        """The object is durable, but committing it failed: remove it, unless it is the checkpoint after all."""

    def afterwards(self) -> None:
        """Retention; the checkpoint is true whatever happens here."""

    def hangs(self, quiet: Future[None]) -> None:
        """The save goes on without this place, where writes of it are still under way until `quiet` resolves."""


class DeliveryState(IntEnum):
    """The life of a delivery: how far it came. It goes from each to the next; `error` says why it went no further."""

    OPENING = 0  # there is no object yet
    WRITING = 1  # there is a sink, which takes segments
    FINISHING = 2  # the object may be visible: what is not committed must be taken away
    DURABLE = 3  # it is visible, and stays
    COMMITTED = 4  # it is the checkpoint


class Delivery:
    """One of them. On the loop."""

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
        self.reached = DeliveryState.OPENING
        self.error: BaseException | None = None
        self.sink: Sink | None = None
        self.lane: Lane | None = None
        self.task: asyncio.Task[None] | None = None  # ends when the archive is durable there
        self.part: asyncio.Task[None] | None = None  # ends when all ranks have done their parts there
        # Takes it back when a call has returned that nobody waits for any more.
        self.left_behind: asyncio.Task[None] | None = None
        self._may_delete = True
        self._following: asyncio.Task[None] | None = None
        self._drain, self._spans, self._off_loop, self._may_miss = drain, spans, off_loop, may_miss
        self._write_seconds = 0.0
        self._in_vain: BaseException | None = None  # nobody waits for its part any more

    @property
    def is_committed(self) -> bool:
        return self.reached is DeliveryState.COMMITTED

    @property
    def is_kept(self) -> bool:
        """It stays there, though it is not committed."""
        return self.target.is_cache and self.reached is DeliveryState.DURABLE

    async def open(self) -> None:
        """Begin the object."""
        drain = self._drain
        room = drain.max_segments - drain.num_tail  # the tail waits for all else
        self.sink = await self._off_loop(
            partial(self.target.open, drain.file_bytes, drain.segment_bytes, room)
        )

    def begin(self, lane: Lane) -> None:
        """Segments go to the sink from now on."""
        self.reached, self.lane = DeliveryState.WRITING, lane
        self.task = asyncio.create_task(self._deliver(lane))

    async def _deliver(self, lane: Lane) -> None:
        """Returns when the archive is durable; raises when it will not be."""
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
            self.reached = DeliveryState.FINISHING
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
        self.reached = DeliveryState.DURABLE
        self._write_seconds = self._spans.total()

    async def commit(self, archives: tuple[Archive, ...], *, late: bool = False) -> None:
        """Make it the checkpoint there; raises what keeps it from that."""
        commit = partial(self.target.commit, archives, late=late)
        try:
            await self._off_loop(self._spans.traced("commit", commit, path=self.target.path))
        except BaseException as error:
            self.error = error
            raise
        self.error, self.reached = None, DeliveryState.COMMITTED

    async def take_part(self, archive: Archive, others: Sequence[Delivery]) -> None:
        """See that all ranks have done their parts there, as far as this one is to know; first of all, do this rank's.

        Where the object is not, for the place was away or fell behind, it is copied from one of the `others`, once that has
        it. Raises what keeps it from being committed.
        """
        try:
            if self.task is not None:
                await asyncio.wait([self.task])
                self._check()
            if self.reached is not DeliveryState.DURABLE:
                await self._copy_from(others, archive)
            await self.target.agree(archive, self._off_loop, self._check)
            await self.target.hear(self._off_loop, self._check)
        except BaseException as error:
            self.error = error
            raise

    async def _copy_from(self, others: Sequence[Delivery], archive: Archive) -> None:
        """Raises its error, if it cannot be helped."""
        error = self.error
        assert error is not None
        source = next((other for other in others if other.reached >= DeliveryState.DURABLE), None)
        is_answering = self.left_behind is None and self._may_miss(error)
        if source is None or not (is_answering and self.target.may_be_sent_again):
            raise error
        if self.sink is not None and not await self._abort(self.sink, for_ever=False):
            raise error
        copy = partial(
            self.target.copy_of, source.target, archive.num_bytes, self._drain.digests.compare, self._check
        )
        deadline, pause = self._spans.total() + _AGAIN_SECONDS, _FIRST_PAUSE_SECONDS
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
        self.error, self.reached = None, DeliveryState.DURABLE
        self._write_seconds = self._spans.total()

    def _check(self) -> None:
        """Raise what made its part be in vain."""
        self._drain.check()
        if self._in_vain is not None:
            raise self._in_vain

    async def end_part(self, error: BaseException) -> None:
        """Nobody waits for its part any more."""
        if self.part is None:
            return
        self._in_vain = self._in_vain or error
        await asyncio.wait([self.part], timeout=_END_SECONDS)

    async def refuse(self, error: BaseException) -> None:
        """Tell the other ranks that there will be no commit, if there are any."""
        self._may_delete = False
        if self.part is not None and not self.part.done():
            return  # a call does not return, and what it says counts
        with suppress(CheckpointError, OSError):
            self._may_delete = await self._off_loop(partial(self.target.refuse, error))
            if self._may_delete:
                self._following = asyncio.create_task(self.target.follow(self._off_loop))

    async def arrive_late(self, archives: tuple[Archive, ...]) -> None:
        """Commit it where the save was not waited for, if it comes in time; else it leaves no trace."""
        if self.part is None or self.left_behind is not None:
            return
        await asyncio.wait([self.part], timeout=_LAG_SECONDS)
        if self.task is not None and not self.task.done():
            self.error = self._in_vain = self.lagging("did not arrive in time")
            if self.lane is not None:
                self._drain.drop(self.lane, self.error)
                self._drain.give_up(self.lane)
            self.leave_behind(self.task)
            return
        await self.end_part(self.lagging("not all ranks were in time"))
        try:
            if not self.part.done():
                raise self.lagging("does not answer")
            self.part.result()
            await self._commit_late(archives)
        except Exception as error:
            self.error = error
            if not self.is_kept:
                await self.refuse(error)
        await self.take_back()

    async def _commit_late(self, archives: tuple[Archive, ...]) -> None:
        """Where other ranks wait for it, a place that was away at that moment is tried again."""
        deadline, pause = self._spans.total() + _LAG_SECONDS, _FIRST_PAUSE_SECONDS
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
        """Go on without a place where a call does not return. If it does after all, nothing of the delivery stays there."""
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
        """End it: what is not committed leaves no trace. Its writes are waited for, though not `for_ever`."""
        if self.task is not None:
            await asyncio.wait([self.task])
            ask_for_exception(self.task)
        if self.sink is None or not (self.is_committed or await self._abort(self.sink, for_ever=for_ever)):
            return
        is_there = self.reached in (DeliveryState.FINISHING, DeliveryState.DURABLE)
        if is_there and self._may_delete and not (self.is_kept and self._drain.is_committed):
            with suppress(CheckpointError, OSError):  # what is left then is swept by the next process
                await self._off_loop(self.target.discard)
        await self._off_loop(self.sink.close)

    async def _abort(self, sink: Sink, *, for_ever: bool) -> bool:
        """Abort the sink, once nobody writes to it. False when its writes hang for ever: then it is left alone."""
        if self.lane is not None:
            quiet = asyncio.wrap_future(self.lane.quiet)
            await asyncio.wait([quiet], timeout=None if for_ever else _LAG_SECONDS)
            if not quiet.done():
                return False
        await self._off_loop(sink.abort)
        return True

    async def close(self) -> None:
        """It is decided."""
        if self.is_committed and self.sink is not None:
            await self._off_loop(self.sink.close)

    async def afterwards(self, errors: list[BaseException]) -> None:
        """Retention there; what goes wrong is added to `errors`."""
        try:
            await self._off_loop(self.target.afterwards)
        except Exception as error:
            errors.append(error)

    def lagging(self, why: str) -> StorageUnavailableError:
        path = self.target.path
        return StorageUnavailableError(
            f"{path}: {why}; it is caught up by a later save, or by catch_up()", path=path
        )

    def destination(self) -> Destination:
        """What the report says of it."""
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


def ask_for_exception(future: asyncio.Future[Any]) -> None:
    """Retrieve the exception, or asyncio logs it as never retrieved."""
    if not future.cancelled():
        future.exception()
