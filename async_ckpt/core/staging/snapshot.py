"""Staging: from the tensors of one instant to filled segments.

In: tensors and the cut of their archive. Out: segments, handed on one by one as they are filled.
Knows nothing of: files, digests, commits.

`Snapshot.begin` runs on the caller's thread: it notes where the tensors lie, fills everything that must not wait, and
makes the training's stream wait for the copies that are enqueued on devices. Deferred tensors follow on a background
thread, while the optimizers' steps wait. When their last copy is enqueued, `tripwires` checks them once more and the
steps continue, ordered after the copies on their streams. When the last copy has ended, `completion` resolves.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future

from ...errors import SaveAbandonedError
from ..backends import is_capturing
from ..format.layout import SegmentPlan
from ..host.pool import SegmentReceiver
from ..host.threads import conclude
from ..host.waits import ENDS_THE_CALL, LIVENESS_SECONDS, Completion, Wait
from .filler import LAST, LATER, NOW, SegmentFiller, StagingHost
from .guard import Optimizers, StepBarrier
from .tensors import SourceTensors
from .tripwires import Tripwires


class Snapshot:
    """The staging of one save. The saver or a `HostCopy` creates and owns it.

    A snapshot begins on the caller's thread and ends on a background thread. `completion` resolves when the copy is
    complete and nothing was torn.
    """

    def __init__(
        self,
        source: SourceTensors,
        segments: Sequence[SegmentPlan],
        receiver: SegmentReceiver,
        host: StagingHost,
        *,
        order: int = 0,
        optimizers: Optimizers = (),
    ) -> None:
        self._source, self._order, self._host = source, order, host
        self.completion: Future[None] = Completion(self._progress)
        self.stage_seconds = 0.0
        self._start = host.clock()
        self.keeps: object = None  # kept alive until the last copy has ended
        self.after: Snapshot | None = None  # a snapshot made for this one, which copies from it
        self._filler = SegmentFiller(source, segments, receiver, host, order, self._on_end_of_fill)
        self._barrier = StepBarrier(optimizers if source.deferred else (), host.clock, host.trace)
        self._tripwires: Tripwires | None = None
        self._ending = threading.Lock()  # acquired by the first end, and never released

    # --- the caller's thread ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Copy, or enqueue the copy of, everything that must not wait. Returns when the caller may continue.

        A failure ends in `completion`; only an exception that is not an Exception (Ctrl-C) is raised as well.
        """
        source = self._source
        try:
            source.locate()
            if source.needs_frozen(self._filler.tensors_now()):
                source.wait_for_frozen()
            devices = list(source.devices.values())
            for device in devices:
                device.follow_training()
            if source.deferred:
                self._tripwires = Tripwires(source)
            try:
                if self._filler.fills_now:
                    self._fill_now()
            finally:  # also after the copies of a save that has failed, since they still read
                for device in devices:
                    device.hold_training()
            if self._filler.fills_later:
                self._barrier.close(self.hold)
                self._host.submit(self._fill_later, self.end)
        except Exception as error:
            self.end(error)
        except BaseException as error:
            # A task of asyncio must not end with such an exception, which would end the loop.
            self.end(interrupted(error))
            raise

    @property
    def defers(self) -> bool:
        """True if tensors are copied after `begin` has returned."""
        return bool(self._source.deferred)

    def _fill_now(self) -> None:
        """Let the crew fill everything that must not wait.

        An interrupt ends the wait for the crew, but no copy halfway.
        """
        outcome: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        filler = self._filler

        def fill() -> None:
            try:
                filler.fill(NOW)
                if not filler.fills_later:
                    self._let_go()
                    filler.all_enqueued()
            except BaseException as error:
                outcome.put(error)
            else:
                outcome.put(None)

        self._host.submit(fill, outcome.put)
        wait = Wait("", ENDS_THE_CALL)
        while True:
            try:
                error = outcome.get(timeout=LIVENESS_SECONDS)
                break
            except queue.Empty:
                filler.check()
                wait.goes_on(self._progress)
        if error is not None:
            raise error

    def hold(self) -> None:
        """Make an optimizer's step wait: its thread until every copy is enqueued, then its streams until they end."""
        if (tripwires := self._tripwires) is not None:
            tripwires.look_at_versions()
        self._barrier.wait(self._progress)
        devices = self._source.devices
        if devices and not self.completion.done():
            if is_capturing():
                self.completion.exception()  # an event from outside must not get into the graph, so wait here
            else:
                for device in devices.values():
                    device.hold_training()

    @property
    def stall_seconds(self) -> float:
        """Seconds that the guard has stalled threads, and copies have stalled streams, so far."""
        before = 0.0 if self.after is None else self.after.stall_seconds
        return before + self._barrier.seconds + self._source.stall_seconds()

    def _progress(self) -> str:
        return f"{self._source.wording.what}: {self._filler.progress}"

    # --- background -------------------------------------------------------------------------------------------

    def _fill_later(self) -> None:
        try:
            self._filler.fill(LATER)
            self._let_go()  # the other snapshots have their own guards
            self._source.wait_for_frozen()
            self._filler.fill(LAST)
            self._filler.all_enqueued()
        except BaseException as error:
            self.end(error)

    def _let_go(self) -> None:
        """Let the optimizers step, now that every copy of a tensor that may change is enqueued."""
        if self._tripwires:
            self._tripwires.look_at_bytes()
        self._barrier.lift()

    def _on_end_of_fill(self, error: BaseException | None) -> None:
        try:
            if error is None:
                torn = self._source.gone_from_devices()
                if (tripwires := self._tripwires) is not None:
                    tripwires.look_at_versions()
                    torn.update(tripwires.torn())
                if torn:
                    error = self._source.torn(torn)
        except BaseException as failure:
            error = failure
        self.end(error)

    def end(self, error: BaseException | None) -> None:
        """Stop copying, let the optimizers step, and resolve `completion`. Only the first call counts."""
        if not self._ending.acquire(blocking=False):
            return
        try:
            self._filler.stop(error)
        except Exception as failure:
            error = error or failure
        except BaseException as interrupt:
            error = error or interrupted(interrupt)
            raise
        finally:  # whatever was raised, others wait for the completion
            self._barrier.lift()
            self._barrier.open(self.hold)
            self._source.drop()
            self._tripwires = self.keeps = None
            self.stage_seconds = self._host.clock() - self._start
            conclude(self.completion, error)

    def __repr__(self) -> str:
        if self.completion.done():
            state = "staged" if self.completion.exception() is None else "failed"
        elif self._barrier.is_lifted:
            state = "enqueued"
        else:
            state = "holding a step" if self._barrier.holds_steps else "staging"
        return f"<Snapshot {self._order} {state}>"


def interrupted(cause: BaseException) -> SaveAbandonedError:
    """The error of a save whose call was interrupted."""
    error = SaveAbandonedError("the call of save was interrupted; earlier checkpoints are intact")
    error.__cause__ = cause
    return error
