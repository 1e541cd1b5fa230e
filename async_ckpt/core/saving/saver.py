"""The way from a call of `save` to its handle: admission, capture, plan, staging.

In: requests. Out: handles. Knows nothing of: steps that exist, retention, how a target commits.

All of this runs on the caller's thread, which a signal may interrupt at any line. So the thread holds no lock, and a
slot that it drops is freed automatically. A save becomes known to others on the loop's thread, by `_begin_state`.
`_abandon`, on the same thread, takes back the save of an interrupted call, known or not.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ...errors import ClosedError
from ..backends import has_plain_bytes
from ..host.loop import get_loop
from ..host.pool import SegmentPool
from ..host.threads import Crew
from ..host.waits import ENDS_THE_CALL, ENDS_THE_WAIT, GIVES_UP, Wait
from ..ranks.calls import JointSave
from ..ranks.divide import PlannedPart
from ..ranks.meeting import Meeting
from ..ranks.peers import Ranks
from ..ranks.world import world_of
from ..staging.device import first_device
from ..staging.device_warm_up import warm_up
from ..staging.filler import StagingHost
from ..staging.guard import Optimizers, deferrable, unwrapped
from ..staging.snapshot import Snapshot, interrupted
from ..staging.tensors import SourceTensors, Wording
from ..state.capture import capture
from ..state.captured import Capture, RankShare
from ..state.names import Select
from ..state.wrapped import plain_parts
from ..state.wrappers import StateDictOf, state_dict_of
from ..timing import NO_TRACE, Spans, monotonic
from ..trace import TraceFile
from .admission import Admission, Slot
from .attempt import Attempt, StateSave, Target
from .drain import Drain, Writers
from .exit import note_exit_status
from .finite import FiniteChecks, NonFinite
from .handle import SaveHandle, named, skipped
from .ledger import Ledger, abandon, raise_error_of
from .planner import Planner, SavePlan, pool_for
from .request import SaveRequest
from .save import Save, SaveState, wait_for_saves

if TYPE_CHECKING:
    from ..staging.file_segments import FilesImage


class Saver:
    """The saves of one checkpointer, or of the process, with one pool of host memory. May be called from any thread."""

    def __init__(
        self,
        pool: SegmentPool | None = None,
        *,
        admission: Admission | None = None,
        ledger: Ledger | None = None,
        writers: Writers | None = None,
        trace_file: TraceFile | None = None,
        keep_warm: bool = False,
        ranks: Ranks | None = None,
        check: NonFinite | None = None,
    ) -> None:
        self.pool = pool or pool_for()
        self.admission, self.ledger = admission or Admission(), ledger or Ledger()
        self._planner = Planner(self.pool, self.admission.max_in_flight)
        self._writers = writers or Writers()
        self._trace_file = trace_file
        self._trace = NO_TRACE if trace_file is None else trace_file.trace
        self._keep_warm, self._ranks = keep_warm, ranks or Ranks(Meeting((0, 1)), 1)
        self._finite_checks = None if check is None else FiniteChecks(check)
        self._orders = itertools.count(1)  # numbers the saves
        self._pid = os.getpid()
        self.is_closed = False

    @property
    def belongs_here(self) -> bool:
        """False in a child that was forked after this saver was created."""
        return os.getpid() == self._pid

    def save(self, request: SaveRequest) -> SaveHandle:
        """Begin a save as soon as it is its turn.

        Raises UnsupportedStateError, ClosedError, the errors of the request, and under `strict` the last unseen error.
        """
        step = request.step
        optimizers = unwrapped(request.guard)
        self.ledger.report_unseen(stacklevel=4)
        spans = Spans(monotonic, self._trace)
        slot = Slot(step)
        save: StateSave | None = None
        try:
            with self._trace.span("wait for a place", step=step):
                is_admitted = self._admit(slot, request.joint)
            if not is_admitted:
                handle = skipped(step, request.skipped())
                self.ledger.skipped(handle, spans)
                return handle
            with self._trace.span("plan", step=step):
                plan = self._plan(request, optimizers, slot)
                save = self._started(plan, optimizers, spans)
                save.snapshot.after = request.copy
            begin = partial(self._begin_state, save, slot, plan.device)
            del plan  # so that only the snapshot keeps the tensors alive
            # A call that defers its copies is so short that opening the archive meanwhile would only cost it the GIL.
            is_short = save.snapshot.defers
            if not is_short:
                get_loop().soon(begin)
            with self._trace.span("snapshot", step=step):
                save.snapshot.begin()
            if is_short:
                get_loop().soon(begin)
            spans.called()
            return save.handle
        except BaseException as error:
            if save is None:
                self.admission.leave(slot)
            else:
                self._abandon(save, slot, interrupted(error))
            raise

    def _plan(self, request: SaveRequest, optimizers: Optimizers, slot: Slot) -> SavePlan:
        """Plan a save whose turn it is, from its target to the place of each byte. Nothing is written yet."""
        target, state, contents = request.begin(), request.written(), request.contents
        lenders, per_rank = contents.lenders, contents.call.per_rank
        slot.needs = lenders.values  # from now on, retention keeps these steps
        if isinstance(state, RankShare):  # divided already
            part = PlannedPart(state.captured, state.ranks)
            captured = part.captured
        else:
            whole = self._captured(state, request.select, request.state_dict_of)
            request.check_captured(whole, optimizers)
            part = self._ranks.divider.divided(whole, request.joint, per_rank=per_rank, borrowed=lenders)
            captured = request.taken_over(part.captured, whole)
        step, over = request.step, contents.over
        layout = self._planner.lay_out(captured, step, part.facts, () if over is None else [*over.lenders])
        if over is not None:
            over.laid_out(layout)
            steps = [lent.step for lent in contents.lent()]
            slot.needs = lambda: steps
        shared = None if part.part is None else part.part.shared
        if shared is not None:
            shared.lie_in(layout)
        return SavePlan(
            step,
            target,
            captured,
            first_device(captured.tensors),
            layout,
            shared,
            self._planner.group_digests(layout, step),
            over,
        )

    def _started(self, plan: SavePlan, optimizers: Optimizers, spans: Spans) -> StateSave:
        """The objects that copy, write and commit a plan. None of them starts working yet."""
        layout, target, groups, over = plan.layout, plan.target, plan.groups, plan.over
        target.finite = None if self._finite_checks is None else self._finite_checks.of(layout)
        readers = (groups, plan.shared, target.finite, None if over is None else over.digests)
        drain = Drain(
            layout,
            self.pool.segment_bytes,
            self._planner.admit(layout, target),
            get_loop().background.submit,
            block_readers=[reader for reader in readers if reader is not None],
            trace=self._trace,
        )
        if over is not None:
            over.of_blocks = drain.digests.of_blocks
        attempt = Attempt(drain, target, self._snapshot(plan, drain, optimizers), spans, writers=self._writers)
        save = StateSave(plan.step, attempt, len(plan.captured.specs), groups)
        if over is not None:
            save.finished.add_done_callback(lambda _: over.drop())
        return save

    def _begin_state(self, save: StateSave, slot: Slot, device: torch.device | None) -> None:
        """Make the save of a state known to others. On the loop's thread."""
        if not save.life.go(SaveState.STAGING):
            return  # the call has raised
        drain, spans = save.attempt.drain, save.attempt.spans
        self.pool.add_reliever(drain.relieve)
        save.attempt.over.add_done_callback(lambda _: self.pool.remove_reliever(drain.relieve))
        if self._trace_file is not None:
            write, name = self._trace_file.write, f"save {save.handle.step}"
            save.settled.add_done_callback(lambda _: self._trace.whole(name, spans.begin))
            save.finished.add_done_callback(lambda _: get_loop().background.submit(write))
        self._begin(save, slot)
        if self._keep_warm:  # so that neither this save nor the next waits until segments are written
            self._reserve(drain.num_segments, device)

    def _begin(self, save: Save, slot: Slot) -> None:
        save.settled.add_done_callback(lambda _: self.admission.leave(slot))
        self.ledger.begin(save)

    def _abandon(self, save: StateSave, slot: Slot, error: Exception) -> None:
        """Undo a save whose call has raised: it never becomes visible, and its memory is returned."""

        def end() -> None:
            if save.life.now is SaveState.PLANNED:
                self.admission.leave(slot)
            else:
                save.handle.looked_at = True  # the caller of `save` knows
            save.attempt.drain.fail(error)
            save.life.go(SaveState.ABANDONED)
            if not save.spans.call.done():
                save.spans.call.set_result(0.0)

        with suppress(ClosedError):  # the interpreter is exiting: the drain gives the save up
            get_loop().soon(end)
        save.snapshot.end(error)

    def _snapshot(self, plan: SavePlan, drain: Drain, optimizers: Optimizers) -> Snapshot:
        """The snapshot, which copies tensors into segments for the drain, and from now on alone keeps them alive."""
        captured, layout, loop = plan.captured, plan.layout, get_loop()
        frozen = captured.frozen  # tensors of held snapshots: no longer changed, but perhaps still being filled
        if not self._planner.may_defer(drain.num_segments, layout, plan.target):
            optimizers, frozen = (), frozenset()
        deferred = deferrable(optimizers, captured.tensors)
        if plan.device is not None:
            # Several threads allocate memory while copies begin. A failure is ignored: the copy that lacks memory
            # raises.
            self._reserve(drain.num_segments, plan.device, loop.copiers)
        source = SourceTensors(
            captured.specs,
            captured.tensors,
            deferred=deferred,
            frozen=frozen,
            after=captured.completions,
            copies_small=True,
            wording=Wording(f"the copy of {named(plan.step, plan.target.path)}"),
        )
        return Snapshot(
            source,
            layout.segments(self.pool.segment_bytes),
            drain,
            StagingHost(self.pool, loop.copy, monotonic, self._trace),
            order=next(self._orders),
            optimizers=optimizers,
        )

    def take_on(self, save: Save) -> SaveHandle:
        """Begin a save that stages by itself. The call does not wait; such saves commit one after the other.

        Raises ClosedError.
        """
        self.ledger.report_unseen(stacklevel=5)
        self._refuse_if_over()

        def begin() -> None:
            slot = Slot(None)
            self.admission.enter_at_once(slot)
            # The next save needs little memory, which is quickly allocated again.
            save.finished.add_done_callback(lambda _: self.pool.release())
            save.life.go(SaveState.STAGING)
            self._begin(save, slot)

        note_exit_status()
        get_loop().soon(begin)
        return save.handle

    def files_attempt(self, files: FilesImage, target: Target, spans: Spans) -> Attempt:
        """An attempt that streams files to a target, after its snapshot has begun. Takes seconds for 100,000 files."""
        from ..staging.file_segments import SourceFiles  # a training saves no files

        loop, size = get_loop(), self.pool.segment_bytes
        drain = Drain(files.image, size, self._planner.admit(files.image, target), loop.background.submit)
        segments = files.image.segments(size)
        snapshot = Snapshot(
            SourceFiles(files, len(segments), drain.check),
            segments,
            drain,
            StagingHost(self.pool, loop.readers.submit, monotonic),
            order=next(self._orders),
        )
        return Attempt(drain, target, snapshot, spans, writers=self._writers)

    @contextmanager
    def relieved_by(self, drain: Drain) -> Iterator[None]:
        """Within the block, threads that wait for memory may get segments that the drain's sinks can spare."""
        self.pool.add_reliever(drain.relieve)
        try:
            yield
        finally:
            self.pool.remove_reliever(drain.relieve)

    def prewarm(self, state: Any, note: Callable[[Capture], None]) -> None:
        """Plan the state and allocate its host memory now; several threads touch and page-lock it."""
        with self._trace.span("prewarm"):
            whole = self._captured(state)
            note(whole)
            captured = self._ranks.divider.divided(whole).captured
            crew = get_loop().copiers
            self._planner.take_memory(captured, crew)
            crew.run_all([partial(warm_up, captured.tensors)])

    def warm(self, state: Any, state_dict_of: StateDictOf = state_dict_of) -> Capture | None:
        """Prewarm in the background, at the lowest priority. The first save allocates whatever memory is still missing.

        Returns the captured state with everything that this process holds, or None if no save of it can follow.
        """
        if not self._keep_warm or self.is_closed or not self.belongs_here:
            return None
        with suppress(Exception):  # the first save raises the errors of a state dict
            whole = self._captured(state, state_dict_of=state_dict_of)
            captured = self._ranks.divider.divided(whole).captured
            self._in_background(lambda goes_on: self._planner.take_memory(captured, None, goes_on=goes_on))
            return whole
        return None

    def expect(self, values: list[Any]) -> None:
        """Allocate memory in the background for the tensors among these values, before a first save of them.

        Does nothing with several ranks: the part of each rank is not known yet.
        """
        if not self.is_closed and self.belongs_here and world_of().is_one:
            self._in_background(partial(self._take_for, values))

    def _take_for(self, values: list[Any], goes_on: Callable[[], bool]) -> None:
        tensors = [part for one in values if isinstance(one, torch.Tensor) for part in plain_parts(one)]
        num_bytes = sum(part.nbytes for part in tensors if has_plain_bytes(part))
        self.pool.admit(num_bytes, self.admission.max_in_flight, least=0)
        self.pool.reserve(-(-num_bytes // self.pool.segment_bytes), None, pin=first_device(tensors), goes_on=goes_on)

    def _reserve(self, num_segments: int, device: torch.device | None, crew: Crew | None = None) -> None:
        """Allocate memory for this many segments in the background, if the pool may have more than it has."""
        if self.pool.num_bytes < min(num_segments, self.pool.max_segments) * self.pool.segment_bytes:
            self._in_background(lambda goes_on: self.pool.reserve(num_segments, crew, pin=device, goes_on=goes_on))

    def _in_background(self, take: Callable[[Callable[[], bool]], None]) -> None:
        loop = get_loop()

        def run() -> None:
            # Not on a crew: nobody would end its thread if it started after the interpreter began to exit.
            with suppress(Exception), self._trace.span("prewarm"):
                take(lambda: not (self.is_closed or loop.is_stopped))

        loop.soon(lambda: loop.background.submit(run, lambda _: None))

    def wait(self, timeout: float | None = None) -> None:
        """Wait for every save begun so far, retention included; raise the first unseen error."""
        wait_for_saves(self.ledger.saves(), Wait("in wait()", ENDS_THE_WAIT), timeout)
        raise_error_of(self.ledger.unseen())

    def close(self) -> None:
        """Wait for every save, and free the memory. Ctrl-C gives the saves up.

        It neither waits for copies after the commit, for which handles wait too, nor raises errors: the later `wait`
        does.
        """
        if not self.belongs_here:  # another thread of the parent may have held a lock
            return
        self.is_closed = True
        try:
            wait_for_saves(self.ledger.saves(), Wait("in close()", GIVES_UP), promises=False)
        except KeyboardInterrupt:
            abandon(self.ledger.saves(), "interrupted while it was waited for")
            raise
        finally:
            self.pool.close()
            self._writers.stop()
            self._close_trace()

    def _close_trace(self) -> None:
        if self._trace_file is not None:
            try:
                self._trace_file.close()
            except OSError as error:
                warnings.warn(f"{self._trace_file!r} is incomplete: {error}", RuntimeWarning, stacklevel=4)

    def metrics(self, prefix: str = "", *, num_behind: int = 0) -> dict[str, float]:
        """Counters and the last report, as numbers under constant keys. `num_behind`: places that lack a step."""
        in_flight, pool_bytes = len(self.admission.under_way()), self.pool.num_bytes
        return self.ledger.metrics(prefix, num_in_flight=in_flight, pool_bytes=pool_bytes, num_behind=num_behind)

    # --- parts ------------------------------------------------------------------------------------------------

    def _captured(self, state: Any, select: Select = None, state_dict_of: StateDictOf = state_dict_of) -> Capture:
        return capture(state, select, slicer=self._ranks.divider.slicer, state_dict_of=state_dict_of)

    def _admit(self, slot: Slot, joint: JointSave | None) -> bool:
        """Enter a slot, and wait for its turn if necessary. Returns False if the save is skipped."""
        note_exit_status()
        self._refuse_if_over()
        wait = Wait(f"in save(){'' if slot.step is None else f' of step {slot.step}'}", ENDS_THE_CALL)

        def goes_on() -> None:
            self._refuse_if_over()
            wait.goes_on(self.ledger.progress)

        admission = self.admission
        if joint is None or not admission.may_skip:
            return admission.enter(slot, goes_on)
        enters = self._ranks.enters(joint, lambda: admission.enter(slot, goes_on))
        return enters and (slot.is_admitted or admission.enter(slot, goes_on, must=True))

    def _refuse_if_over(self) -> None:
        if not self.belongs_here:
            raise ClosedError("this checkpointer belongs to the parent process; open one in this process")
        if self.is_closed:
            raise ClosedError("this checkpointer is closed; open a new one to save")
