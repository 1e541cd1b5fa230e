"""An attempt to write and commit one archive, from top to bottom. It starts no threads, and logs nothing.

In: a layout, segments as they are filled, a target. Out: a committed checkpoint and its report, or no trace of it.
Knows nothing of: where segments come from, their contents.

Filled segments do not pass through the attempt: `Drain` takes them from the copying threads directly to the writing
threads. The attempt waits for the last segment, and decides whether the archive is committed or taken back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final, NamedTuple

from ...errors import CheckpointError, StorageUnavailableError
from ..host.loop import ask_for_exception, awaitable, off_loop
from ..host.threads import Life, running_future
from ..host.waits import END_SECONDS, OPEN_SECONDS, PROGRESS_SECONDS
from ..report import Destination, SaveReport
from ..runs.manifest import Archive, SaveTimes
from ..staging.snapshot import Snapshot
from ..storage.interface import Sink, Storage
from ..timing import Spans
from .block_digests import GroupDigest, GroupDigests
from .drain import Drain, Lane, Writers
from .finite import FiniteCheck
from .mover import PassingCopy
from .save import Save, SaveState

# A copy at the next place that does not open within this time is left to the mover.
_FOLLOW_SECONDS: Final = 0.05
# How often to look whether that copy has to be sent again.
_LOOK_SECONDS: Final = 0.5


async def write_and_commit(attempt: Attempt, turn: Future[None] | None, life: Life[SaveState]) -> None:
    """Write, then commit once `turn` is done: once the previous save is settled.

    Raises the error if the save fails, after every trace of the attempt is gone.
    """
    async with attempt.running():
        with attempt.spans.span("write"):
            await attempt.open()  # from here on the drain passes segments to the sink
            await awaitable(attempt.snapshot.completion)
            life.go(SaveState.WRITING)
            await attempt.durable()
            life.go(SaveState.DURABLE)
        if turn is not None:
            await awaitable(turn)
        with attempt.spans.span("commit"):
            await attempt.agree()  # with the other ranks, if there are any
            await attempt.commit()
        life.go(SaveState.COMMITTED)


class Attempt:
    """One archive on its way to its place. The saver creates it, the save owns it, and the loop runs it.

    An exception that leaves its `running()` block removes every trace of it. All of it runs on the loop's thread, so
    there is no lock: between two awaits nothing changes. Calls that block run on helper threads and touch nothing here.
    The lane belongs to the drain and changes on any thread; its two futures, which resolve once and outside the drain's
    lock, tell the loop all that it has to know.
    """

    def __init__(self, drain: Drain, target: Target, snapshot: Snapshot, spans: Spans, *, writers: Writers) -> None:
        self.drain, self.target, self.snapshot, self.spans = drain, target, snapshot, spans
        self._writers = writers
        self._may_be_visible = False  # the object must be removed if it is not committed
        self._is_committed = False
        self._sink: Sink | None = None
        self._lane: Lane | None = None
        self._opening: asyncio.Task[None] | None = None
        self._finishing: asyncio.Task[None] | None = None  # ends when the archive is durable there
        self._following: asyncio.Task[None] | None = None  # the copy to the next place
        self.over: Future[None] = running_future()  # resolves when nothing of the attempt holds memory any more
        self._write_seconds = 0.0

    @property
    def written_bytes(self) -> int:
        """The bytes that this process has written for the checkpoint."""
        return self.drain.file_bytes + self.target.num_driver_bytes

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The block in which the attempt is made."""
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
            may_delete = await off_loop(partial(self.target.refuse, error))
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
        # While no lane is open, the drain becomes idle only after a failure.
        failed = awaitable(self.drain.idle)
        await asyncio.wait([self._opening, failed], return_when=asyncio.FIRST_COMPLETED)
        self.drain.check()
        self._opening.result()
        assert self._sink is not None
        follower = await self._open_follower() if self.target.has_further_places else None
        submit, pace = self._writers.of(self.target.storage, alone=not self.target.has_further_places)
        sinks = [(self._sink, submit, pace)]
        if follower is not None:
            sinks.append((follower.sink, *self._writers.of(follower.storage, alone=False)))
        lanes = self.drain.open(sinks)
        self._lane = lanes[0]
        if follower is not None:
            self._following = asyncio.create_task(self._follow(follower, lanes[1]))
        self._finishing = asyncio.create_task(self._finish(self._sink, self._lane))
        self._finishing.add_done_callback(ask_for_exception)

    async def _open(self) -> None:
        self._sink = await off_loop(partial(self.target.open, self._size))

    async def _open_follower(self) -> PassingCopy | None:
        """The copy to the next place, if it opens at once."""
        opening = asyncio.ensure_future(off_loop(partial(self.target.follow, self._size)))
        await asyncio.wait([opening], timeout=_FOLLOW_SECONDS)
        if not opening.done():
            self._following = asyncio.create_task(self._end_late(opening))
            return None
        return None if opening.exception() is not None else opening.result()

    async def _end_late(self, opening: asyncio.Future[PassingCopy | None]) -> None:
        """End a copy that was not open when the save began to write."""
        with suppress(Exception):
            if (copy := await opening) is not None:
                await off_loop(partial(copy.end, is_whole=False))

    async def _follow(self, copy: PassingCopy, lane: Lane) -> None:
        """Finish the copy at the next place. If it fails, or its memory is needed, leave no trace of it.

        If parts have to be sent again, the copy is left to the mover, which needs no memory of the save, and learns
        when the copy ends.
        """
        is_whole = False
        finishing = asyncio.ensure_future(self._finish_copy(copy.sink, lane))
        try:
            while not (await asyncio.wait([finishing], timeout=_LOOK_SECONDS))[0]:
                copy.written_bytes = lane.written_bytes
                if copy.sink.num_retries:
                    self.drain.give_up(lane, StorageUnavailableError("it has to be sent again"))
            finishing.result()
            is_whole = True
        except Exception as error:
            self.drain.give_up(lane, error)
            await awaitable(lane.quiet)
        finally:
            await off_loop(partial(copy.end, is_whole=is_whole))

    async def _finish_copy(self, sink: Sink, lane: Lane) -> None:
        await awaitable(lane.written)
        await off_loop(sink.finish)

    async def _finish(self, sink: Sink, lane: Lane) -> None:
        """Return when the archive is durable; raise if it will not be."""
        checked = asyncio.ensure_future(off_loop(self.target.check))
        arrived: asyncio.Future[Any] = asyncio.gather(checked, awaitable(lane.written))
        failed = [] if sink.failed is None else [awaitable(sink.failed)]
        try:
            done, _ = await asyncio.wait([arrived, *failed], return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                future.result()
            self._may_be_visible = True
            await off_loop(self.spans.traced("finish", sink.finish, path=self.target.path))
        except BaseException as error:
            for future in (checked, arrived, *failed):  # nobody waits for these futures any more
                future.add_done_callback(ask_for_exception)
            self.drain.fail(error)
            raise
        self._write_seconds = self.spans.total()

    async def durable(self) -> None:
        """Wait until the object is durable. Raises the error that prevents it."""
        assert self._finishing is not None
        written, since = -1, 0.0
        while not self._finishing.done():
            await asyncio.wait([self._finishing], timeout=1.0 if self.target.has_further_places else None)
            progress, now = self.drain.progress, self.spans.total()
            if self._may_be_visible or progress.written_bytes != written:
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
        """True if a write has begun, and no bandwidth limit delays it."""
        return self._lane is not None and self._lane.num_writing > 0 and self._lane.pace is None

    async def agree(self) -> None:
        """Wait for the ranks' agreement: on the deciding rank for all reports, on another rank for the decision."""
        await self.target.agree(self._archive, self._times())

    async def commit(self) -> None:
        """Make the object the checkpoint; raise the error that prevents it."""
        commit = partial(self.target.commit, self._archive, self._times())
        await off_loop(self.spans.traced("commit", commit, path=self.target.path))
        self._is_committed = True

    async def _take_back(self, *, may_delete: bool) -> None:
        """End the sink once all calls have returned, and remove an object that is not committed."""
        if self._opening is not None:
            await asyncio.wait([self._opening])
            ask_for_exception(self._opening)
        await awaitable(self.drain.idle)
        tasks = [task for task in (self._finishing, self._following) if task is not None]
        if tasks:
            await asyncio.wait(tasks)
        if self._sink is None:
            return
        if not self._is_committed:
            await off_loop(self._sink.abort)
            if self._may_be_visible and may_delete:
                with suppress(CheckpointError, OSError):  # the next process sweeps what is left
                    await off_loop(self.target.discard)
        await off_loop(self._sink.close)

    def report(
        self,
        call_seconds: float,
        *,
        step: int | None = None,
        num_tensors: int = 0,
        unchanged_groups: tuple[str, ...] = (),
    ) -> SaveReport:
        """The report of the save, for its caller."""
        spans, snapshot, target = self.spans, self.snapshot, self.target
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
            stall_seconds=call_seconds + snapshot.stall_seconds,
            stage_seconds=snapshot.stage_seconds,
            write_seconds=spans.seconds["write"],
            commit_seconds=spans.seconds["commit"],
            total_seconds=spans.total(),
            retries=destination.retries,
            destinations=(destination,),
            unchanged_groups=unchanged_groups,
        )

    @property
    def _size(self) -> ObjectSize:
        drain = self.drain
        room = drain.max_segments - drain.num_tail  # the tail waits for all other segments
        return ObjectSize(drain.file_bytes, drain.segment_bytes, room)

    def _times(self) -> SaveTimes:
        """How long the save has taken so far."""
        seconds, call = self.spans.total(), self.spans.call
        call_seconds = call.result() if call.done() else seconds
        return SaveTimes(seconds, call_seconds + self.snapshot.stall_seconds)

    @property
    def _archive(self) -> Archive:
        """The archive as a manifest names it."""
        return Archive(self.target.name, self.drain.file_bytes, self.drain.digests.of_archive)


class StateSave(Save):
    """A save of a state: the snapshot fills the segments of an archive, and the attempt writes them to its target."""

    _outcome: SaveOutcome

    def __init__(self, step: int | None, attempt: Attempt, num_tensors: int, groups: GroupDigests) -> None:
        drain, snapshot = attempt.drain, attempt.snapshot
        super().__init__(step, attempt.target.path, snapshot.completion, lambda: drain.progress, attempt.spans)
        self.attempt, self.snapshot = attempt, snapshot
        self._num_tensors, self._groups = num_tensors, groups

    async def run(self, turn: Future[None] | None) -> SaveReport:
        attempt = self.attempt
        await write_and_commit(attempt, turn, self.life)
        call_seconds = await awaitable(self.spans.call)
        report = attempt.report(
            call_seconds,
            step=self.handle.step,
            num_tensors=self._num_tensors,
            unchanged_groups=attempt.target.unchanged_in(self._groups.result(attempt.drain.digests.of_blocks)),
        )
        self.written_bytes = attempt.written_bytes
        self._outcome = SaveOutcome(report, call_seconds, self._groups.sizes)
        return report

    def promise(self) -> Future[int] | None:
        return self.attempt.target.promise()

    def is_kept(self) -> bool:
        return self.life.now is SaveState.COMMITTED and self.attempt.target.is_kept()

    def failed(self, error: BaseException) -> None:
        """Do nothing: the attempt leaves no trace."""

    async def after_failure(self, error: BaseException) -> None:
        seconds = self.attempt.spans.total()
        await off_loop(partial(self.attempt.target.failed, error, seconds))

    def give_up(self, error: BaseException) -> None:
        super().give_up(error)
        self.attempt.drain.fail(error)

    async def tidy(self) -> None:
        await off_loop(self.attempt.target.tidy)

    async def afterwards(self) -> None:
        await off_loop(partial(self.attempt.target.afterwards, self._outcome))


# --- what an attempt needs -----------------------------------------------------------------------------------


class ObjectSize(NamedTuple):
    """The size of an object, the size of its segments, and how many segments the sink may hold at a time."""

    num_bytes: int
    segment_bytes: int
    max_segments: int

    def create(self, storage: Storage, path: str) -> Sink:
        """Begin an object of this size."""
        return storage.create(
            path, num_bytes=self.num_bytes, segment_bytes=self.segment_bytes, max_segments=self.max_segments
        )


class SaveOutcome(NamedTuple):
    """The report of a committed save, and facts that only the history records: the sizes of the groups in bytes."""

    report: SaveReport
    call_seconds: float
    groups: Mapping[str, int]


class Target:
    """The place that a save goes to, and its object there. A request creates it; an attempt calls it on helper threads.

    By default a durable object is committed, and there are no other ranks to agree with.
    """

    has_further_places = False
    """True if the next save can use another place when this place does not answer."""

    num_bytes_beside = 0
    """The bytes of the checkpoint's other objects, which `commit` writes."""

    num_driver_bytes = 0
    """The part of `num_bytes_beside` that this process wrote."""

    finite: FiniteCheck | None = None
    """The check of the values in this rank's archive, set before the archive is written; None without a check."""

    def __init__(self, storage: Storage, name: str, shown: str | None = None) -> None:
        """`shown` names the place in reports and messages; by default the path of the object does."""
        self.storage = storage
        self.path = storage.locate(name if shown is None else shown)
        self.rename(name)

    def rename(self, name: str) -> None:
        """Give the object another name, before it is opened."""
        self._name, self.name = name, name.rpartition("/")[2]

    @property
    def in_order(self) -> bool:
        """True if its sink sends in file order, and holds segments that arrive early."""
        return self.storage.in_order

    def part_segments(self, num_bytes: int, segment_bytes: int) -> int:
        """The number of consecutive segments that its sink must hold at once before it can send any of them."""
        return self.storage.part_segments(num_bytes, segment_bytes)

    async def begin(self, check: Callable[[], None]) -> None:
        """Wait until the name of the object is known. `check` is called meanwhile, and may raise."""

    def open(self, size: ObjectSize) -> Sink:
        """Begin the object, without a request over a network."""
        return size.create(self.storage, self._name)

    def follow(self, size: ObjectSize) -> PassingCopy | None:  # noqa: ARG002
        """Begin a copy of the object at the next place, if that place can take it. A failure ends only the copy."""
        return None

    def check(self) -> None:
        """Make the checks that need requests over a network, while segments are written. Raises to refuse the save."""

    async def agree(self, archive: Archive, times: SaveTimes) -> None:
        """Report to the other ranks that the object is durable, after these `times`. Then wait: on the deciding rank
        for all reports, on another rank for the decision. Raises if the decision is a refusal, and whatever the `check`
        of `begin` raises.
        """

    def refuse(self, error: BaseException) -> bool:  # noqa: ARG002
        """Report to the other ranks that the save has failed.

        Returns False if the save may be committed anyway, so that its object must stay.
        """
        return True

    def commit(self, archive: Archive, times: SaveTimes) -> None:
        """Make the durable object the checkpoint. `times` is how long the save has taken so far."""

    def unchanged_in(self, digests: Mapping[str, GroupDigest]) -> tuple[str, ...]:  # noqa: ARG002
        """The groups whose bytes equal those in the previous commit. Called once, after the commit."""
        return ()

    def promise(self) -> Future[int] | None:
        """The future that the save still waits for after the commit, if there is one."""
        return None

    def is_kept(self) -> bool:
        """True if the promise was kept after its future had failed."""
        return False

    def discard(self) -> None:
        """Remove a durable object, and its copy, that could not be committed, unless it is the checkpoint after all."""

    def tidy(self) -> None:
        """Remove the temporary files that the save has put beside the checkpoint. The handle waits for this."""

    def afterwards(self, outcome: SaveOutcome) -> None:
        """Apply retention. The checkpoint stands, whatever happens here."""

    def failed(self, error: BaseException, seconds: float) -> None:
        """Note in the history that the save has failed after `seconds`, without a trace. Nobody waits for this."""

    def hangs(self, quiet: Future[None]) -> None:
        """Note that the save has failed while calls to this place still run. `quiet` resolves when they return."""
