"""Everything between a call of `save` and its handle: admission, capture, plan, staging.

In: states and targets. Out: handles. Knows nothing of: steps that exist, retention, what a target is made of.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from ..errors import ClosedError
from ..format.layout import Layout
from ..host.loop import get_loop
from ..host.waits import ENDS_THE_CALL, ENDS_THE_WAIT, GIVES_UP, Wait
from ..ranks.attempts import Joint, Ranks
from ..spans import NO_TRACE, Clock, Spans, monotonic
from ..spec import RankFacts, flag, seconds_or_none, whole_count
from ..staging.device import first_device, warm_up
from ..staging.files import FileFill, FilesImage
from ..staging.filler import StagingHost
from ..staging.guard import Optimizers, deferrable, unwrapped
from ..staging.snapshot import Snapshot, interrupted
from ..staging.tensors import SourceTensors, Wording
from ..state.capture import capture
from ..state.captured import Capture
from ..state.division import RankShare
from ..state.names import Select
from ..storage.place import local_place
from ..trace import TraceFile
from .admission import Admission, OnOverlap, Slot
from .bar import Bars
from .delivery import Target
from .drain import Drain
from .exit import note_exit_status
from .handle import SaveHandle, named, skipped
from .ledger import Ledger, abandon
from .planner import Planner, pool_for
from .save import Request, Save, StateSave, wait_for_saves
from .story import Attempt, State
from .writers import Writers


class Saver:
    """Saves one after the other, at most `max_in_flight` under way, from one pool of host memory. From any thread."""

    def __init__(
        self,
        *,
        host_bytes: int | None = None,
        segment_bytes: int | None = None,
        on_overlap: OnOverlap = "wait",
        max_in_flight: int = 1,
        strict: bool = False,
        exit_timeout: float | None = None,
        keep_warm: bool = False,
        max_bandwidth: float | None = None,
        trace: str | os.PathLike[str] | None = None,
        progress: bool = False,
        clock: Clock = monotonic,
        ranks: Ranks | None = None,
    ) -> None:
        if on_overlap not in ("wait", "skip"):
            raise ValueError(f'on_overlap must be "wait" or "skip", got {on_overlap!r}')
        max_in_flight = whole_count("max_in_flight", max_in_flight)
        self._writers = Writers(max_bandwidth)
        self.pool = pool_for(segment_bytes, host_bytes)
        self._planner = Planner(self.pool, max_in_flight)
        self._admission = Admission(max_in_flight, on_overlap)
        self._strict, self._keep_warm = flag("strict", strict), keep_warm
        self._clock, self._ranks = clock, ranks
        self.ledger = Ledger(
            seconds_or_none("exit_timeout", exit_timeout), Bars() if flag("progress", progress) else None
        )
        self._trace_file = None if trace is None else TraceFile(local_place(trace), clock)
        self._trace = NO_TRACE if self._trace_file is None else self._trace_file.trace
        self._orders = itertools.count(1)  # of saves
        self._pid = os.getpid()
        self.is_closed = False

    @property
    def belongs_here(self) -> bool:
        """False in a child that was forked after this saver was made."""
        return os.getpid() == self._pid

    def save(self, request: Request) -> SaveHandle:
        """Begin a save, as soon as it is its turn.

        Raises UnsupportedStateError, ClosedError, what the request refuses the save with, and under `strict` the last unseen
        error.
        """
        step = request.step
        optimizers = unwrapped(request.guard)
        self._tell_of_unseen(stacklevel=4)
        spans = Spans(self._clock, self._trace)
        # From here on this thread may be interrupted at any line: what it has begun is taken back below.
        slot = Slot(step, request.needs)
        save: StateSave | None = None
        try:
            with self._trace.span("wait for a place", step=step):
                is_admitted = self._admit(slot, request.joint)
            if not is_admitted:
                self.ledger.skipped()
                return skipped(step, request.skipped_path, get_loop().callbacks.submit)
            with self._trace.span("plan", step=step):
                targets = request.targets()
                save, device = self._set_up(request, targets, optimizers, spans)
            get_loop().soon(partial(self._begin_state, save, slot, device))
            with self._trace.span("snapshot", step=step):
                save.snapshot.begin()
            save.called.set_result(spans.total())
            return save.handle
        except BaseException as error:
            if save is None:
                self._admission.leave(slot)
            else:
                self._abandon(save, slot, interrupted(error))
            raise

    def _set_up(
        self, request: Request, targets: Sequence[Target], optimizers: Optimizers, spans: Spans
    ) -> tuple[StateSave, torch.device | None]:
        """Plan the archive, and what copies, writes and commits it; nothing of that has begun."""
        joint, step = request.joint, request.step
        captured, facts = self._take(request.state(), request.select, joint, request.captured)
        device = first_device(captured.tensors)
        layout = self._planner.lay_out(captured, step, facts)
        shared = None if joint is None else joint.shared
        if shared is not None:
            shared.lie_in(layout)
        drain = Drain(
            layout,
            self.pool.segment_bytes,
            self._planner.admit(layout, targets),
            get_loop().background.submit,
            values=shared,
            groups=self._planner.group_digests(layout, step),
            may_drop=request.rule == "any" and len(targets) > 1,
            trace=self._trace,
        )
        frozen = captured.frozen
        if not self._planner.may_defer(drain.num_segments, layout, targets):
            optimizers, frozen = (), frozenset()
        what = f"the copy of {named(step, targets[0].path)}"
        snapshot = self._snapshot(captured, layout, drain, optimizers, frozen, device, what)
        attempt = Attempt(
            drain,
            targets,
            snapshot,
            spans,
            request.rule,
            writers=lambda target: self._writers.of(target.storage, alone=len(targets) == 1),
            pace=lambda target: self._writers.pace(target.storage),
        )
        return StateSave(step, attempt, snapshot, len(captured.specs), request.unchanged_in), device

    def _begin_state(self, save: StateSave, slot: Slot, device: torch.device | None) -> None:
        """Show a save of a state to others. On the loop's thread."""
        if not save.life.go(State.STAGING):
            return  # the call has raised meanwhile
        drain, spans = save.attempt.drain, save.attempt.spans
        self.pool.add_reliever(drain.relieve)
        save.finished.add_done_callback(lambda _: self.pool.remove_reliever(drain.relieve))
        if self._trace_file is not None:
            write, name = self._trace_file.write, f"save {save.handle.step}"
            save.settled.add_done_callback(lambda _: self._trace.whole(name, spans.begin))
            save.finished.add_done_callback(lambda _: get_loop().background.submit(write))
        self._begin(save, slot)
        self.warm_for(drain.num_segments, device)

    def _begin(self, save: Save, slot: Slot) -> None:
        save.settled.add_done_callback(lambda _: self._admission.leave(slot))
        self.ledger.begin(save)

    def _abandon(self, save: StateSave, slot: Slot, error: Exception) -> None:
        """The call of `save` has raised: nothing of it becomes visible, and its memory comes back."""

        def end() -> None:
            if save.life.now is State.PLANNED:
                self._admission.leave(slot)
            else:
                save.handle.looked_at = True  # whoever called `save` knows
                save.attempt.drain.fail(error)
            save.life.go(State.ABANDONED)
            if not save.called.done():
                save.called.set_result(0.0)

        with suppress(ClosedError):  # the interpreter is exiting: the drain gives it up
            get_loop().soon(end)
        save.snapshot.give_up(error)

    def _snapshot(
        self,
        captured: Capture,
        layout: Layout,
        drain: Drain,
        optimizers: Optimizers,
        frozen: frozenset[int],
        device: torch.device | None,
        what: str,
    ) -> Snapshot:
        """What copies the tensors into the segments that the drain takes; from here on it alone keeps them alive.

        `frozen` change no more; they have their bytes once the snapshots that they are held by are complete.
        """
        loop = get_loop()
        deferred = deferrable(optimizers, captured.tensors)
        if device is not None and not deferred:
            # All copies are about to be enqueued at once: lock the memory on several threads, not on this one.
            loop.call(partial(self.pool.reserve, drain.num_segments, loop.copiers, pin=device), what)
        source = SourceTensors(
            captured.specs,
            captured.tensors,
            deferred=deferred,
            frozen=frozen,
            after=captured.completions,
            wording=Wording(what),
        )
        return Snapshot(
            source,
            layout.segments(self.pool.segment_bytes),
            drain,
            StagingHost(self.pool, loop.copying, self._clock, self._trace),
            order=next(self._orders),
            optimizers=optimizers,
        )

    def take_on(self, save: Save) -> SaveHandle:
        """Begin a save that needs no staging here. No call waits; such saves run one at a time, in their order.

        Raises ClosedError.
        """
        self._tell_of_unseen(stacklevel=5)
        self._refuse_if_forked()
        self._refuse_if_closed()

        def begin() -> None:
            slot = Slot(None)
            self._admission.enter_at_once(slot)
            # The next one needs little memory, which is soon there again.
            save.finished.add_done_callback(lambda _: self.pool.release())
            save.life.go(State.STAGING)
            self._begin(save, slot)

        note_exit_status()
        get_loop().soon(begin)
        return save.handle

    def files_attempt(self, files: FilesImage, target: Target, spans: Spans) -> tuple[Attempt, FileFill]:
        """What streams files to a target: begin the fill, then tell the story. May take a while, for 100,000 files."""
        loop, size = get_loop(), self.pool.segment_bytes
        drain = Drain(files.image, size, self._planner.admit(files.image, [target]), loop.background.submit)
        fill = FileFill(
            files, drain, order=next(self._orders), pool=self.pool, crew=loop.readers, clock=self._clock
        )
        writers = loop.writers().submit
        return Attempt(drain, [target], fill, spans, writers=lambda _: writers), fill

    @contextmanager
    def relieved_by(self, drain: Drain) -> Iterator[None]:
        """Meanwhile, whoever waits for memory may have what this drain's sinks can do without."""
        self.pool.add_reliever(drain.relieve)
        try:
            yield
        finally:
            self.pool.remove_reliever(drain.relieve)

    def prewarm(self, state: Any, captured_as: Callable[[Capture], None]) -> None:
        """Plan the state and take its host memory now, touched and page-locked by several threads."""
        with self._trace.span("prewarm"):
            captured, _ = self._take(state, captured_as=captured_as)
            self._planner.take_memory(captured, get_loop().copiers)
            warm_up(captured.tensors)

    def warm(self, state: Any) -> Capture | None:
        """The same in the background, at the lowest priority; what cannot be had now, the first save takes. Returns all that is
        here of the state; None where no save of it can follow.
        """
        if not self._keep_warm or self.is_closed or not self.belongs_here:
            return None
        with suppress(Exception):  # of what a state dict may raise, the first save tells
            looks: list[Capture] = []
            captured, _ = self._take(state, captured_as=looks.append)
            self._in_background(lambda goes_on: self._planner.take_memory(captured, None, goes_on=goes_on))
            return looks[0]
        return None

    def warm_for(self, num_segments: int, device: torch.device | None) -> None:
        """Have the pool grow to what a save takes while that is under way, so that neither it nor the next waits for
        segments to be written. On the loop's thread.
        """
        if self._keep_warm and self.pool.num_bytes < num_segments * self.pool.segment_bytes:
            self._in_background(
                lambda goes_on: self.pool.reserve(num_segments, None, pin=device, goes_on=goes_on)
            )

    def _in_background(self, take: Callable[[Callable[[], bool]], None]) -> None:
        loop = get_loop()

        def run() -> None:
            # On this thread alone: once the interpreter exits, nobody ends a thread that begins.
            with suppress(Exception), self._trace.span("prewarm"):
                take(lambda: not (self.is_closed or loop.is_stopped))

        loop.soon(lambda: loop.background.submit(run, lambda _: None))

    def wait(self, timeout: float | None = None) -> None:
        """Wait for every save begun so far, retention included; raise the first error that nobody has looked at."""
        wait_for_saves(self.ledger.saves(), Wait("in wait()", ENDS_THE_WAIT), timeout)
        self.ledger.raise_unseen()

    def close(self) -> None:
        """Wait for every save, raise the first unseen error, give the memory back. Ctrl-C gives the saves up."""
        if not self.belongs_here:  # a lock of the parent's may have been forked held
            return
        self.is_closed = True
        try:
            wait_for_saves(self.ledger.saves(), Wait("in close()", GIVES_UP))
        except KeyboardInterrupt:
            abandon(self.ledger.saves(), "interrupted while it was waited for")
            raise
        finally:
            self.pool.close()
            self._writers.stop()
            self._close_trace()
        self.ledger.raise_unseen()

    def _close_trace(self) -> None:
        if self._trace_file is not None:
            try:
                self._trace_file.close()
            except OSError as error:
                warnings.warn(f"{self._trace_file!r} is incomplete: {error}", RuntimeWarning, stacklevel=4)

    def under_way(self) -> list[Slot]:
        """The slots of saves that are not settled yet."""
        return self._admission.under_way()

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Counters and the last report, as numbers under constant keys."""
        in_flight = len(self.under_way())
        return self.ledger.metrics(prefix, num_in_flight=in_flight, pool_bytes=self.pool.num_bytes)

    # --- parts ------------------------------------------------------------------------------------------------

    def _take(
        self,
        state: Any,
        select: Select = None,
        joint: Joint | None = None,
        captured_as: Callable[[Capture], None] = lambda _: None,
    ) -> tuple[Capture, RankFacts | None]:
        """What of a state is written here; with several ranks, only what falls to this one."""
        if isinstance(state, RankShare):  # others have planned it
            return state.captured, state.ranks
        ranks = self._ranks
        captured = capture(state, select, slicer=ranks.slicer if ranks else None)
        captured_as(captured)
        return ranks.divided(captured, joint) if ranks else (captured, None)

    def _admit(self, slot: Slot, joint: Joint | None) -> bool:
        """Take one of the slots for saves under way, waiting for it or not. False: skip."""
        note_exit_status()
        self._refuse_if_forked()
        self._refuse_if_closed()
        wait = Wait(f"in save(){'' if slot.step is None else f' of step {slot.step}'}", ENDS_THE_CALL)

        def goes_on() -> None:
            self._refuse_if_closed()
            wait.goes_on(self.ledger.progress)

        admission = self._admission
        if self._ranks is None or joint is None or not admission.may_skip:
            return admission.enter(slot, goes_on)
        enters = self._ranks.enters(joint, lambda: admission.enter(slot, goes_on))
        return enters and (slot.is_admitted or admission.enter(slot, goes_on, must=True))

    def _refuse_if_closed(self) -> None:
        if self.is_closed:
            raise ClosedError("this checkpointer is closed; open a new one to save")

    def _refuse_if_forked(self) -> None:
        if not self.belongs_here:
            raise ClosedError("this checkpointer belongs to the parent process; open one in this process")

    def _tell_of_unseen(self, stacklevel: int) -> None:
        if self._strict:
            self.ledger.raise_unseen()
        self.ledger.warn_of_unseen(stacklevel + 1)

    def __repr__(self) -> str:
        return f"<Saver {len(self.under_way())}/{self._admission.max_in_flight} in flight, {self.pool!r}>"
