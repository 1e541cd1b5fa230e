"""The story of a save, told once from top to bottom. It starts no threads, and logs nothing.

In: a layout, segments as they are filled, a target. Out: a committed checkpoint and its report, or no trace of it.
Knows nothing of: where segments come from, or their contents.

Filled segments do not pass through the story: `Drain` takes them from the copying threads straight to the writing
ones. The story waits for the last, and decides whether the archive is committed or taken back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from enum import IntEnum
from functools import partial
from typing import Any, Final, Protocol

from ...errors import CheckpointError, StorageUnavailableError
from ..host.loop import OffLoop, ask_for_exception
from ..host.threads import Life, running_future
from ..host.waits import END_SECONDS, OPEN_SECONDS, PROGRESS_SECONDS
from ..report import Destination, SaveReport
from ..runs.manifest import Archive, SaveTimes
from ..staging.snapshot import Snapshot
from ..storage.interface import Sink, Storage
from ..timing import Spans
from .block_digests import GroupDigests
from .drain import Drain, Lane, Writers
from .save import Save, SaveState
from .target import SaveOutcome, Target

# A copy to the next place that does not even open in this time is left to the mover.
_FOLLOW_SECONDS: Final = 0.05
# Between two looks whether a copy there has to be sent again.
_LOOK_SECONDS: Final = 0.5


class Staging(Protocol):
    """The snapshot as the story sees it."""

    completion: Future[None]
    stage_seconds: float

    @property
    def stall_seconds(self) -> float: ...


async def story(attempt: Attempt, turn: Future[None] | None, off_loop: OffLoop, life: Life[SaveState]) -> None:
    """Write, then commit once `turn` has come: the save before this one is settled.

    Raises the error if it fails, after every trace of the attempt is gone.
    """
    async with attempt.running(off_loop):
        with attempt.spans.span("write"):
            await attempt.open()  # from here on segments go to the sink, past the story
            await asyncio.wrap_future(attempt.staging.completion)
            life.go(SaveState.WRITING)
            await attempt.durable()
            life.go(SaveState.DURABLE)
        if turn is not None:
            await asyncio.wrap_future(turn)
        with attempt.spans.span("commit"):
            await attempt.agree()  # the other ranks too, if there are any
            await attempt.commit()
        life.go(SaveState.COMMITTED)


class ObjectState(IntEnum):
    """The progress of the object at its place, from each state to the next."""

    OPENING = 0  # there is no object yet
    WRITING = 1  # there is a sink, which takes segments
    FINISHING = 2  # the object may be visible, and must be taken away if it is not committed
    DURABLE = 3  # the object is visible, and stays
    COMMITTED = 4  # the object is the checkpoint


class Attempt:
    """One archive on its way to its place. The saver creates it, the save owns it, and the loop runs it.

    When its block is left by an exception, no trace of it stays. All of it runs on the loop's thread, so there is no
    lock: between two awaits nothing changes. Calls that block run on helper threads and touch nothing here. The lane
    belongs to the drain and changes on any thread; its two futures, which resolve once and outside the drain's lock,
    bring the loop all that it has to know.
    """

    _off_loop: OffLoop

    def __init__(self, drain: Drain, target: Target, staging: Staging, spans: Spans, *, writers: Writers) -> None:
        self.drain, self.target, self.staging, self.spans = drain, target, staging, spans
        self._writers = writers
        self.state = ObjectState.OPENING
        self._sink: Sink | None = None
        self._lane: Lane | None = None
        self._opening: asyncio.Task[None] | None = None
        self._finishing: asyncio.Task[None] | None = None  # ends when the archive is durable there
        self._following: asyncio.Task[None] | None = None  # the copy to the next place
        self.over: Future[None] = running_future()  # nothing of it holds memory any more
        self._write_seconds = 0.0

    @property
    def written_bytes(self) -> int:
        """The bytes that this process has written for the checkpoint."""
        return self.drain.file_bytes + self.target.num_driver_bytes

    @asynccontextmanager
    async def running(self, off_loop: OffLoop) -> AsyncIterator[None]:
        """The block in which the attempt is made."""
        self._off_loop = off_loop
        try:
            yield
        except BaseException as error:
            await self._end_in_vain(error)
            raise
        assert self._sink is not None
        await off_loop(self._sink.close)
        if self._following is None:
            self.over.set_result(None)
        else:
            self._following.add_done_callback(lambda _: self.over.set_result(None))

    async def _end_in_vain(self, error: BaseException) -> None:
        self.drain.fail(error)
        may_delete = False
        with suppress(CheckpointError, OSError):
            may_delete = await self._off_loop(partial(self.target.refuse, error))
        taking_back = asyncio.create_task(self._take_back(may_delete=may_delete))
        taking_back.add_done_callback(lambda _: self.over.set_result(None))
        is_open = self._opening is not None and not self._opening.done()
        limit = OPEN_SECONDS if is_open else END_SECONDS if self.target.has_further_places else None
        await asyncio.wait([taking_back], timeout=limit)
        if not taking_back.done():
            quiet = running_future()
            taking_back.add_done_callback(lambda _: quiet.set_result(None))
            self.target.hangs(quiet)
        taking_back.add_done_callback(ask_for_exception)

    async def open(self) -> None:
        """Begin the object, and let the drain write to it."""
        await self.target.begin(self.drain.check)
        self._opening = asyncio.create_task(self._open())
        # While nothing is open, the drain is idle only after a failure.
        failed = asyncio.wrap_future(self.drain.idle)
        await asyncio.wait([self._opening, failed], return_when=asyncio.FIRST_COMPLETED)
        self.drain.check()
        self._opening.result()
        assert self._sink is not None
        follower = await self._open_follower() if self.target.has_further_places else None
        submit, pace = self._writers.of(self.target.storage, alone=not self.target.has_further_places)
        sinks = [(self._sink, submit, pace)]
        if follower is not None:
            sinks.append((follower[0], *self._writers.of(follower[1], alone=False)))
        lanes = self.drain.open(sinks)
        self._lane = lanes[0]
        if follower is not None:
            self._following = asyncio.create_task(self._follow(follower[0], lanes[1]))
        self.state = ObjectState.WRITING
        self._finishing = asyncio.create_task(self._finish(self._sink, self._lane))
        self._finishing.add_done_callback(ask_for_exception)

    async def _open(self) -> None:
        drain = self.drain
        room = drain.max_segments - drain.num_tail  # the tail waits for all else
        self._sink = await self._off_loop(partial(self.target.open, drain.file_bytes, drain.segment_bytes, room))

    async def _open_follower(self) -> tuple[Sink, Storage] | None:
        """The sink of the copy to the next place, if that opens at once."""
        drain, target = self.drain, self.target
        room = drain.max_segments - drain.num_tail
        opening = asyncio.ensure_future(
            self._off_loop(partial(target.follow, drain.file_bytes, drain.segment_bytes, room))
        )
        await asyncio.wait([opening], timeout=_FOLLOW_SECONDS)
        if not opening.done():
            self._following = asyncio.create_task(self._end_late(opening))
            return None
        opened = None if opening.exception() is not None else opening.result()
        if opened is None:
            target.followed(is_whole=False)
        return opened

    async def _end_late(self, opening: asyncio.Future[tuple[Sink, Storage] | None]) -> None:
        """End a copy that was not open when the save began to write."""
        with suppress(Exception):
            if (opened := await opening) is not None:
                await self._off_loop(opened[0].abort)
                await self._off_loop(opened[0].close)
        self.target.followed(is_whole=False)

    async def _follow(self, sink: Sink, lane: Lane) -> None:
        """Finish the copy at the next place; or leave no trace of it, if it fails or its memory was needed.

        What has to be sent again is left to the mover, which needs no memory of the save, and hears of the end.
        """
        is_whole = False
        finishing = asyncio.ensure_future(self._finish_copy(sink, lane))
        try:
            while not (await asyncio.wait([finishing], timeout=_LOOK_SECONDS))[0]:
                self.target.followed_bytes = lane.written_bytes
                if sink.num_retries:
                    self.drain.give_up(lane, StorageUnavailableError("it has to be sent again"))
            finishing.result()
            is_whole = True
        except Exception as error:
            self.drain.give_up(lane, error)
            await asyncio.wrap_future(lane.quiet)
            await self._off_loop(sink.abort)
        finally:
            await self._off_loop(sink.close)
            self.target.followed(is_whole=is_whole)

    async def _finish_copy(self, sink: Sink, lane: Lane) -> None:
        await asyncio.wrap_future(lane.written)
        await self._off_loop(sink.finish)

    async def _finish(self, sink: Sink, lane: Lane) -> None:
        """Return when the archive is durable; raise when it will not be."""
        checked = asyncio.ensure_future(self._off_loop(self.target.check))
        arrived: asyncio.Future[Any] = asyncio.gather(checked, asyncio.wrap_future(lane.written))
        failed = [] if sink.failed is None else [asyncio.wrap_future(sink.failed)]
        try:
            done, _ = await asyncio.wait([arrived, *failed], return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                future.result()
            self.state = ObjectState.FINISHING
            await self._off_loop(self.spans.traced("finish", sink.finish, path=self.target.path))
        except BaseException as error:
            for future in (checked, arrived, *failed):  # nobody waits for them any more
                future.add_done_callback(ask_for_exception)
            self.drain.fail(error)
            raise
        self.state = ObjectState.DURABLE
        self._write_seconds = self.spans.total()

    async def durable(self) -> None:
        """Wait until the object is durable. Raises the error that prevents it."""
        assert self._finishing is not None
        written, since = -1, 0.0
        while not self._finishing.done():
            await asyncio.wait([self._finishing], timeout=1.0 if self.target.has_further_places else None)
            progress, now = self.drain.progress, self.spans.total()
            if self.state is not ObjectState.WRITING or progress.written_bytes != written:
                written, since = progress.written_bytes, now
            elif now > since + PROGRESS_SECONDS and self._is_writing:
                raise StorageUnavailableError(
                    f"{self.target.path}: nothing could be written there for {PROGRESS_SECONDS:.0f} s; until it "
                    "answers, saves go to the next place",
                    path=self.target.path,
                )
        self._finishing.result()

    @property
    def _is_writing(self) -> bool:
        """Whether a write has begun, and no limit of bandwidth holds it up."""
        return self._lane is not None and self._lane.num_writing > 0 and self._lane.pace is None

    async def agree(self) -> None:
        """Wait until all ranks have done their parts, as far as this one is to know."""
        self.target.times = self._times()
        await self.target.agree(self._archive, self._off_loop, self.drain.check)

    async def commit(self) -> None:
        """Make the object the checkpoint; raise the error that prevents it."""
        self.target.times = self._times()
        commit = partial(self.target.commit, (self._archive,))
        await self._off_loop(self.spans.traced("commit", commit, path=self.target.path))
        self.state = ObjectState.COMMITTED

    async def _take_back(self, *, may_delete: bool) -> None:
        """Once its calls have returned: end the sink, and remove an object that is not committed."""
        if self._opening is not None:
            await asyncio.wait([self._opening])
            ask_for_exception(self._opening)
        await asyncio.wrap_future(self.drain.idle)
        tasks = [task for task in (self._finishing, self._following) if task is not None]
        if tasks:
            await asyncio.wait(tasks)
        if self._sink is None:
            return
        if self.state is not ObjectState.COMMITTED:
            await self._off_loop(self._sink.abort)
            if self.state in (ObjectState.FINISHING, ObjectState.DURABLE) and may_delete:
                with suppress(CheckpointError, OSError):  # what is left then is swept by the next process
                    await self._off_loop(self.target.discard)
        await self._off_loop(self._sink.close)

    def report(
        self,
        call_seconds: float,
        *,
        step: int | None = None,
        num_tensors: int = 0,
        unchanged_groups: tuple[str, ...] = (),
    ) -> SaveReport:
        """The report of the save, for its caller."""
        spans, staging, target = self.spans, self.staging, self.target
        assert self._sink is not None
        destination = Destination(
            path=target.path,
            num_bytes=self._sink.num_bytes + target.num_bytes_beside,
            write_seconds=self._write_seconds,
            retries=self._sink.num_retries,
            retryable=self._sink.retryable,
        )
        return SaveReport(
            status="committed",
            step=step,
            path=target.path,
            num_bytes=self.drain.file_bytes + target.num_bytes_beside,
            num_tensors=num_tensors,
            stall_seconds=call_seconds + staging.stall_seconds,
            stage_seconds=staging.stage_seconds,
            write_seconds=spans.seconds["write"],
            commit_seconds=spans.seconds["commit"],
            total_seconds=spans.total(),
            retries=destination.retries,
            destinations=(destination,),
            unchanged_groups=unchanged_groups,
        )

    def _times(self) -> SaveTimes:
        """How long the save has taken so far."""
        seconds, call = self.spans.total(), self.spans.call
        call_seconds = call.result() if call.done() else seconds
        return SaveTimes(seconds, call_seconds + self.staging.stall_seconds)

    @property
    def _archive(self) -> Archive:
        """The archive as a manifest names it."""
        return Archive(self.target.name, self.drain.file_bytes, self.drain.digests.of_archive)


class StateSave(Save):
    """A save of a state: the snapshot fills the segments of an archive, and the attempt takes them to its target."""

    def __init__(
        self, step: int | None, attempt: Attempt, snapshot: Snapshot, num_tensors: int, groups: GroupDigests
    ) -> None:
        drain = attempt.drain
        super().__init__(step, attempt.target.path, snapshot.completion, lambda: drain.progress, attempt.spans)
        self.attempt, self.snapshot = attempt, snapshot
        self._num_tensors, self._groups = num_tensors, groups

    async def run(self, turn: Future[None] | None, off_loop: OffLoop) -> SaveReport:
        attempt = self.attempt
        await story(attempt, turn, off_loop, self.life)
        call_seconds = await asyncio.wrap_future(self.spans.call)
        report = attempt.report(
            call_seconds,
            step=self.handle.step,
            num_tensors=self._num_tensors,
            unchanged_groups=attempt.target.unchanged_in(self._groups.result(attempt.drain.digests.of_blocks)),
        )
        self.written_bytes = attempt.written_bytes
        attempt.target.outcome = SaveOutcome(report, call_seconds, self._groups.sizes)
        return report

    def promise(self) -> Future[int] | None:
        return self.attempt.target.promise()

    def is_kept(self) -> bool:
        return self.life.now is SaveState.COMMITTED and self.attempt.target.is_kept()

    def failed(self, error: BaseException) -> None:
        """Nothing to do: the attempt leaves no trace."""

    async def after_failure(self, error: BaseException, off_loop: OffLoop) -> None:
        seconds = self.attempt.spans.total()
        await off_loop(partial(self.attempt.target.failed, error, seconds))

    def give_up(self, error: BaseException) -> None:
        super().give_up(error)
        self.attempt.drain.fail(error)

    async def tidy(self, off_loop: OffLoop) -> None:
        await off_loop(self.attempt.target.tidy)

    async def afterwards(self, off_loop: OffLoop) -> None:
        await off_loop(self.attempt.target.afterwards)
