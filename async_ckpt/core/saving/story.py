"""The story of a save, told once from top to bottom. It starts no threads, and logs nothing.

In: a layout, segments as they are filled, one or several targets. Out: a committed checkpoint and its report.
Knows nothing of: where segments come from, or their contents.

Filled segments do not pass through the story: `Drain` takes them from the copying threads straight to the writing
ones. The story waits for the last, and decides whether the archives are committed or taken back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Literal, Protocol, Self

from ...errors import PeerFailedError, StorageUnavailableError
from ..host.loop import OffLoop
from ..host.threads import Life, running_future
from ..host.waits import OPEN_SECONDS
from ..report import SaveReport
from ..runs.manifest import Archive, SaveTimes
from ..spans import Spans
from ..staging.snapshot import Snapshot
from .block_digests import GroupDigest, GroupDigests
from .delivery import Delivery, SaveOutcome, Target
from .drain import Drain, Writers
from .save import Save, SaveState

CommitRule = Literal["all", "any"]
UnchangedIn = Callable[[Mapping[str, GroupDigest]], tuple[str, ...]]


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
    async with attempt:
        with attempt.spans.span("write"):
            await attempt.open(off_loop)  # from here on segments go to the sinks, past the story
            await asyncio.wrap_future(attempt.staging.completion)
            life.go(SaveState.WRITING)
        while not attempt.is_committed:
            with attempt.spans.span("write"):
                durable = await attempt.durable()  # all, or the first
                life.go(SaveState.DURABLE)
            if turn is not None:
                await asyncio.wrap_future(turn)
            with attempt.spans.span("commit"):
                agreed = await attempt.agree(durable)  # the other ranks too, if there are any
                await attempt.commit(agreed)
        life.go(SaveState.COMMITTED)


class Attempt:
    """All deliveries of one save. The saver creates it, the save owns it, and the loop runs it.

    When its block is left by an exception, no trace of it stays.
    """

    def __init__(
        self,
        drain: Drain,
        targets: Sequence[Target],
        staging: Staging,
        spans: Spans,
        *,
        rule: CommitRule = "all",
        writers: Writers,
    ) -> None:
        self.drain, self.targets, self.staging, self.spans = drain, targets, staging, spans
        self._rule, self._writers = rule, writers
        # Not a method: a delivery keeps it, and in a cycle a save that has ended would wait for the garbage collection.
        self._may_miss = partial(_may_miss, rule)
        # The seconds of the call, once the caller has its handle.
        self.called: Future[float] = running_future()
        self._deliveries: list[Delivery] = []  # from `open` on, in the order of the targets

    @property
    def is_committed(self) -> bool:
        """True if it is the checkpoint at one of its targets."""
        return any(delivery.is_committed for delivery in self._deliveries)

    @property
    def written_bytes(self) -> int:
        """The bytes that this process has written for the checkpoint, counted once for all targets."""
        return self.drain.file_bytes + max(target.num_driver_bytes for target in self.targets)

    @property
    def num_missed(self) -> int:
        """The number of targets without a committed checkpoint."""
        return sum(not (delivery.is_committed or delivery.is_kept) for delivery in self._deliveries)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if error is None:
            for delivery in self._deliveries:
                await delivery.close()
            return
        self.drain.fail(error)
        for delivery in self._deliveries:
            await delivery.part.end(error)
        for delivery in self._deliveries:
            await delivery.part.refuse(error)
        await asyncio.wrap_future(self.drain.idle)
        for delivery in self._deliveries:
            if delivery.left_behind is None:
                await delivery.take_back()
        left_behind = [d.left_behind for d in self._deliveries if d.left_behind is not None]
        if left_behind:
            await asyncio.wait(left_behind, timeout=OPEN_SECONDS)

    async def open(self, off_loop: OffLoop) -> None:
        """Begin the object everywhere, or under "any" wherever that is possible, and let the drain write to them.

        Raises the error of a place that the save cannot do without.
        """
        self._deliveries = [
            Delivery(target, self.drain, self.spans, off_loop, self._may_miss) for target in self.targets
        ]
        await self._begin_objects()
        self.drain.check()
        errors = [delivery.error for delivery in self._deliveries if delivery.error is not None]
        for error in errors:
            if not self._may_miss(error) or len(errors) == len(self._deliveries):
                raise error
        for delivery in self._deliveries:
            if delivery.left_behind is not None:
                delivery.error = delivery.lagging("does not answer")
        opened = [delivery for delivery in self._deliveries if delivery.error is None]
        lanes = self.drain.open(
            [
                (d.sink, *self._writers.of(d.target.storage, alone=len(self.targets) == 1))
                for d in opened
                if d.sink is not None
            ]
        )
        for delivery, lane in zip(opened, lanes, strict=True):
            delivery.begin(lane)

    async def _begin_objects(self) -> None:
        """Open every delivery. Those that do not answer are left behind once the save can do without them, or has
        failed.
        """
        tasks = {asyncio.create_task(delivery.open()): delivery for delivery in self._deliveries}
        # While nothing is open, the drain is idle only after a failure.
        failed = asyncio.wrap_future(self.drain.idle)

        def is_in_vain() -> bool:
            errors = [error for task in tasks if task.done() and (error := task.exception()) is not None]
            return failed.done() or not all(map(self._may_miss, errors))

        while (opening := [task for task in tasks if not task.done()]) and not is_in_vain():
            enough = self._rule == "any" and any(d.sink is not None for d in self._deliveries)
            done, _ = await asyncio.wait(
                [*opening, failed], timeout=OPEN_SECONDS if enough else None, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                break
        for task, delivery in tasks.items():
            if task.done():
                delivery.error = task.exception()
            else:
                delivery.leave_behind(task)

    async def durable(self) -> list[Delivery]:
        """Wait for durable deliveries: all, or under "any" the first. Raises as soon as that is impossible."""
        return await self._arrived({d: d.task for d in self._deliveries if d.task is not None})

    async def agree(self, durable: Sequence[Delivery]) -> list[Delivery]:
        """Wait until all ranks have done their parts at the durable deliveries; under "any" at the first one of all.

        Raises as soon as that is impossible.
        """
        times = self._times()
        for delivery in self._deliveries if self._rule == "any" else durable:
            if delivery.part.task is None:
                delivery.target.times = times
                others = [other for other in self._deliveries if other is not delivery]
                delivery.part.begin(delivery.take_part(self._archives[0], others))
        return await self._arrived({d: d.part.task for d in self._deliveries if d.part.task is not None})

    async def _arrived(self, running: Mapping[Delivery, asyncio.Task[None]]) -> list[Delivery]:
        """Wait for tasks that end well: all, or under "any" the first. Raises the error of one that the save needs."""
        pending = set(running.values())
        while True:
            done = [delivery for delivery, task in running.items() if task.done()]
            errors = [delivery.error for delivery in done if delivery.error is not None]
            for error in errors:
                if not self._may_miss(error):
                    raise error
            if errors and len(errors) == len(running):
                raise _worst(errors)
            arrived = [delivery for delivery in done if delivery.error is None]
            if arrived and (self._rule == "any" or len(done) == len(running)):
                return arrived
            assert pending, "every delivery ends in an error, or well"
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)

    async def commit(self, durable: Sequence[Delivery]) -> None:
        """Commit the durable deliveries. Raises the error of one that the save needs."""
        times = self._times()
        for delivery in durable:
            delivery.target.times = times
            try:
                await delivery.commit(self._archives)
            except BaseException as error:
                done = [other.target.path for other in durable if other.is_committed]
                if done:
                    error.add_note(
                        f"async_ckpt: it is committed at {', '.join(done)}; the other places are caught up later"
                    )
                if not self._may_miss(error):
                    raise

    async def tidy(self) -> None:
        """After the commit: remove what the save has put beside the checkpoint and is not to stay."""
        for delivery in self._deliveries:
            await delivery.tidy()

    async def afterwards(self) -> None:
        """After the commit: let deliveries that lag arrive and commit them, too; then apply retention everywhere.

        Raises the first error, which does not make the save less true.
        """
        self.drain.committed()
        errors: list[BaseException] = []
        late = [delivery for delivery in self._deliveries if not delivery.is_committed]
        for delivery in self._deliveries:
            if delivery.is_committed:  # first, for a disk must not fill while it waits for a store
                await delivery.afterwards(errors)
        for delivery in late:
            await delivery.arrive_late(self._archives)
            if delivery.is_committed or delivery.is_kept:
                await delivery.afterwards(errors)
        if errors:
            raise errors[0]

    def report(
        self,
        call_seconds: float,
        *,
        step: int | None = None,
        num_tensors: int = 0,
        unchanged_groups: tuple[str, ...] = (),
    ) -> SaveReport:
        """The report of the save, for its caller."""
        spans, staging = self.spans, self.staging
        target = next(delivery.target for delivery in self._deliveries if delivery.is_committed)
        destinations = tuple(delivery.destination() for delivery in self._deliveries)
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
            retries=sum(destination.retries for destination in destinations),
            destinations=destinations,
            unchanged_groups=unchanged_groups,
        )

    def _times(self) -> SaveTimes:
        """How long the save has taken so far."""
        seconds = self.spans.total()
        call_seconds = self.called.result() if self.called.done() else seconds
        return SaveTimes(seconds, call_seconds + self.staging.stall_seconds)

    @property
    def _archives(self) -> tuple[Archive, ...]:
        """The archive as a manifest names it, the same at every target."""
        return (Archive(self.targets[0].name, self.drain.file_bytes, self.drain.digests.of_archive),)


def _may_miss(rule: CommitRule, error: BaseException) -> bool:
    """True if a save can do without a place that has this error: the place is away, and another may do."""
    # The rank that decides has not been heard of at this place.
    is_unheard = isinstance(error, PeerFailedError) and error.undecided
    return rule == "any" and (is_unheard or isinstance(error, StorageUnavailableError))


def _worst(errors: Sequence[BaseException]) -> BaseException:
    """The error to raise if all places have failed: first of all that the commit is undecided."""
    worst = next((error for error in errors if isinstance(error, PeerFailedError)), errors[0])
    for error in errors:
        if error is not worst:
            worst.add_note(f"async_ckpt: another root failed, too: {type(error).__name__}: {error}")
    return worst


class StateSave(Save):
    """A save of a state: the snapshot fills the segments of an archive, and the attempt takes them to every target."""

    def __init__(
        self,
        step: int | None,
        attempt: Attempt,
        snapshot: Snapshot,
        num_tensors: int,
        groups: GroupDigests,
        unchanged_in: UnchangedIn,
    ) -> None:
        """`unchanged_in` names the groups with the bytes of the commit before. It is called once, after the commit."""
        drain = attempt.drain
        super().__init__(step, attempt.targets[0].path, snapshot.completion, lambda: drain.progress, attempt.spans)
        self.attempt, self.snapshot = attempt, snapshot
        self.called = attempt.called
        self._num_tensors, self._groups, self._unchanged_in = num_tensors, groups, unchanged_in

    async def run(self, turn: Future[None] | None, off_loop: OffLoop) -> SaveReport:
        attempt = self.attempt
        await story(attempt, turn, off_loop, self.life)
        call_seconds = await asyncio.wrap_future(self.called)
        report = attempt.report(
            call_seconds,
            step=self.handle.step,
            num_tensors=self._num_tensors,
            unchanged_groups=self._unchanged_in(self._groups.result(attempt.drain.digests.of_blocks)),
        )
        self.written_bytes = attempt.written_bytes
        for target in attempt.targets:
            target.outcome = SaveOutcome(report, call_seconds, self._groups.sizes)
        return report

    def failed(self, error: BaseException) -> None:
        """Nothing to do: the attempt leaves no trace."""

    async def after_failure(self, error: BaseException, off_loop: OffLoop) -> None:
        seconds = self.attempt.spans.total()
        for target in self.attempt.targets:
            await off_loop(partial(target.failed, error, seconds))

    def give_up(self, error: BaseException) -> None:
        super().give_up(error)
        self.attempt.drain.fail(error)

    async def tidy(self, off_loop: OffLoop) -> None:  # noqa: ARG002
        await self.attempt.tidy()

    async def afterwards(self, off_loop: OffLoop) -> None:  # noqa: ARG002
        try:
            await self.attempt.afterwards()
        finally:
            self.num_missed = self.attempt.num_missed
