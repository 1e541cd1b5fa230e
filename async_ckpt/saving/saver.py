"""Everything between a call of `save` and its handle: admission, capture, plan, staging.

In: states and targets. Out: handles. Knows nothing of: steps that exist, retention, what a target is made of.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from typing import Any

import torch

from ..errors import ClosedError, UnsupportedStateError
from ..format.layout import Layout
from ..host.threads import running_future
from ..host.waiting import ENDS_THE_CALL, ENDS_THE_WAIT, GIVES_UP, Wait
from ..spans import NO_TRACE, Clock, Spans, monotonic
from ..spec import RankFacts, flag, seconds_or_none, whole_count
from ..staging.device import first_device, warm_up
from ..staging.files import FileFill, FilesImage
from ..staging.guard import Optimizers, deferrable, gate_of, unwrapped
from ..staging.stager import Snapshot, interrupted
from ..state.capture import capture
from ..state.captured import Capture
from ..state.division import RankShare
from ..state.names import Select
from ..storage.place import local_place
from ..trace import TraceFile
from .admission import Admission, OnOverlap, Place
from .bar import Bars
from .delivery import Target
from .drain import Drain
from .handle import SaveHandle, skipped
from .ledger import Ledger
from .planner import Planner, pool_for
from .ranks import Joint, Ranks
from .story import Attempt, CommitRule, Errand, Order, UnchangedIn, story, tell
from .waiting import named, wait_for_saves
from .worker import Carriers, Pending, abandon, get_worker


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
        exit_timeout = seconds_or_none("exit_timeout", exit_timeout)
        self._carriers = Carriers(max_bandwidth)
        self.pool = pool_for(segment_bytes, host_bytes)
        self._planner = Planner(self.pool, max_in_flight)
        self._admission = Admission(max_in_flight, on_overlap)
        self.ledger = Ledger()
        self._strict, self._exit_timeout, self._keep_warm = flag("strict", strict), exit_timeout, keep_warm
        self._clock, self._ranks = clock, ranks
        self._bars = Bars() if flag("progress", progress) else None
        self._trace_file = None if trace is None else TraceFile(local_place(trace), clock)
        self._trace = NO_TRACE if self._trace_file is None else self._trace_file.trace
        self._orders = itertools.count(1)  # of saves
        self._pid = os.getpid()
        self.is_closed = False
        self._given_up: BaseException | None = None  # the process, or the user, waits for nothing more

    @property
    def belongs_here(self) -> bool:
        """False in a child that was forked after this saver was made."""
        return os.getpid() == self._pid

    def save(
        self,
        state: Callable[[], Any],
        make_targets: Callable[[], Sequence[Target]],
        *,
        step: int | None,
        needs: Callable[[], Collection[int]] = tuple,
        guard: Any,
        select: Select = None,
        captured_as: Callable[[Capture], None] = lambda _: None,
        rule: CommitRule = "all",
        skipped_path: str = "",
        unchanged_in: UnchangedIn = lambda _: (),
        joint: Joint | None = None,
    ) -> SaveHandle:
        """Begin a save. `make_targets` and then `state` are called once it is this save's turn, and may refuse it.

        `captured_as` is told what is saved, `needs` tells the steps that must stay on storage until it is decided, and
        `unchanged_in` which groups, by their digests, are those of the commit before. With `joint`, other ranks save, too.

        Raises UnsupportedStateError, ClosedError, what `make_targets` raises, and under `strict` the last unseen error.
        """
        optimizers = unwrapped(guard)
        self._tell_of_unseen(stacklevel=4)
        spans = Spans(self._clock, self._trace)
        # From here on this thread may be interrupted at any line: what it has begun is taken back below.
        place = Place(step, needs)
        begun: _Begun | None = None
        try:
            with self._trace.span("wait for a place", step=step):
                admitted = self._admit(place, joint)
            if not admitted:
                self.ledger.skipped()
                return skipped(step, skipped_path, get_worker().callbacks.submit)
            with self._trace.span("plan", step=step):
                targets = make_targets()
                captured, facts = self._take(state(), select, joint, captured_as)
                begun = self._set_up(
                    captured, facts, joint, targets, rule, step, optimizers, spans, place, unchanged_in
                )
            get_worker().soon(begun.start)
            with self._trace.span("snapshot", step=step):
                begun.snapshot.begin()
            begun.order.call_seconds.set_result(spans.total())
            return begun.handle
        except BaseException as error:
            if begun is None:
                self._admission.leave(place)
            else:
                begun.abandon(error)
            raise

    def _set_up(
        self,
        captured: Capture,
        facts: RankFacts | None,
        joint: Joint | None,
        targets: Sequence[Target],
        rule: CommitRule,
        step: int | None,
        optimizers: Optimizers,
        spans: Spans,
        place: Place,
        unchanged_in: UnchangedIn,
    ) -> _Begun:
        """Plan the archive, and what copies, writes and commits it; nothing of that has begun."""
        device = first_device(captured.tensors)
        layout = self._planner.lay_out(captured, step, facts)
        shared = None if joint is None else joint.shared
        if shared is not None:
            shared.lie_in(layout)
        drain = Drain(
            layout,
            self.pool.segment_bytes,
            self._planner.admit(layout, targets),
            get_worker().background.submit,
            values=shared,
            groups=self._planner.group_digests(layout, step),
            may_drop=rule == "any" and len(targets) > 1,
            trace=self._trace,
        )
        frozen = captured.frozen
        if not self._planner.may_defer(drain.num_segments, layout, targets):
            optimizers, frozen = (), frozenset()
        what = f"the copy of {named(step, targets[0].path)}"
        snapshot = self._snapshot(captured, layout, drain, optimizers, frozen, device, what)
        order = Order(
            step,
            layout,
            len(captured.specs),
            targets,
            rule,
            drain,
            spans,
            None,
            running_future(),
            snapshot,
            lambda target: self._carriers.writers(target.storage, alone=len(targets) == 1),
            lambda target: self._carriers.pace(target.storage),
            unchanged_in,
        )
        return _Begun(self, order, snapshot, place, device)

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
        worker = get_worker()
        deferred = deferrable(optimizers, captured.tensors)
        if device is not None and not deferred:
            # All copies are about to be enqueued at once: lock the memory on several threads, not on this one.
            worker.call(partial(self.pool.reserve, drain.num_segments, worker.copiers, pin=device), what)
        return Snapshot(
            captured.specs,
            captured.tensors,
            layout.segments(self.pool.segment_bytes),
            order=next(self._orders),
            deferred=deferred,
            gates=[gate_of(optimizer) for optimizer in optimizers] if deferred else [],
            num_tail=drain.num_tail,
            pool=self.pool,
            crew=worker.copying,
            clock=self._clock,
            put=drain.put,
            check=drain.check,
            trace=self._trace,
            frozen=frozen,
            after=captured.completions,
            what=what,
        )

    def take_on(self, errand: Errand) -> SaveHandle:
        """Have a save made that needs no staging here. No call waits; errands run one at a time, in their order.

        Raises ClosedError.
        """
        self._tell_of_unseen(stacklevel=5)
        self._refuse_if_forked()
        self._refuse_if_closed()
        worker = get_worker()
        handle = SaveHandle(
            step=None,
            path=errand.path,
            staging=errand.staged,
            progress=lambda: errand.progress,
            submit_callbacks=worker.callbacks.submit,
        )
        pending = Pending(handle, errand.give_up, self._exit_timeout)

        def start() -> None:
            place = Place(None)
            self._admission.enter_at_once(place)
            turn = self.ledger.follow(pending, lambda: self._admission.leave(place))
            # What the next one needs is little, and soon there again.
            pending.finished.add_done_callback(lambda _: self.pool.release())
            told = tell(errand, turn, worker.off_loop)
            worker.start(pending, told, lambda: errand.afterwards(worker.off_loop))

        worker.soon(start)
        return handle

    def files_order(
        self, files: FilesImage, target: Target, spans: Spans, call_seconds: Future[float]
    ) -> tuple[Order, FileFill]:
        """What streams files to a target: begin the fill, then tell the story. May take a while, for 100,000 files."""
        worker, size = get_worker(), self.pool.segment_bytes
        drain = Drain(files.image, size, self._planner.admit(files.image, [target]), worker.background.submit)
        fill = FileFill(
            files.sources,
            files.image.runs,
            files.image.segments(size),
            order=next(self._orders),
            pool=self.pool,
            crew=worker.readers,
            clock=self._clock,
            put=drain.put,
            check=drain.check,
        )
        writers = worker.writers().submit
        order = Order(
            None, files.image, 0, [target], "all", drain, spans, None, call_seconds, fill, lambda _: writers
        )
        return order, fill

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
            self._planner.take_memory(captured, get_worker().copiers)
            warm_up(captured.tensors)

    def warm(self, state: Any) -> Capture | None:
        """The same in the background, at the lowest priority; what cannot be had now, the first save takes. Returns all that is
        here of the state; None where no save of it can follow.
        """
        if not self._keep_warm or self.is_closed or not self.belongs_here:
            return None
        with suppress(UnsupportedStateError, ClosedError):
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
        worker = get_worker()

        def run() -> None:
            # On this thread alone: once the interpreter exits, nobody ends a thread that begins.
            with suppress(Exception), self._trace.span("prewarm"):
                take(lambda: not (self.is_closed or worker.stopped))

        worker.soon(lambda: worker.background.submit(run, lambda _: None))

    def wait(self, timeout: float | None = None) -> None:
        """Wait for every save begun so far, retention included; raise the first error that nobody has looked at."""
        wait_for_saves(self.ledger.pending(), Wait("in wait()", ENDS_THE_WAIT), timeout)
        self.ledger.raise_unseen()

    def close(self) -> None:
        """Wait for every save, raise the first unseen error, give the memory back. Ctrl-C gives the saves up."""
        if not self.belongs_here:  # a lock of the parent's may have been forked held
            return
        self.is_closed = True
        try:
            wait_for_saves(self.ledger.pending(), Wait("in close()", GIVES_UP))
        except KeyboardInterrupt:
            abandon(self.ledger.pending(), "interrupted while it was waited for")
            raise
        finally:
            self.pool.close()
            self._carriers.stop()
            self._close_trace()
        self.ledger.raise_unseen()

    def _close_trace(self) -> None:
        if self._trace_file is not None:
            try:
                self._trace_file.close()
            except OSError as error:
                warnings.warn(f"{self._trace_file!r} is incomplete: {error}", RuntimeWarning, stacklevel=4)

    def check_going_on(self) -> None:
        """Raise what ended the work in the background, if anything did."""
        if self._given_up is not None:
            raise self._given_up

    def under_way(self) -> list[Place]:
        """The places of saves that are not decided yet."""
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

    def _admit(self, place: Place, joint: Joint | None) -> bool:
        """Take one of the places for saves under way, waiting for it or not. False: skip."""
        self._refuse_if_forked()
        self._refuse_if_closed()
        wait = Wait(f"in save(){'' if place.step is None else f' of step {place.step}'}", ENDS_THE_CALL)

        def goes_on() -> None:
            self._refuse_if_closed()
            wait.goes_on(self.ledger.told_of_undecided)

        admission = self._admission
        if self._ranks is None or joint is None or not admission.may_skip:
            return admission.enter(place, goes_on)
        enters = self._ranks.enters(joint, lambda: admission.enter(place, goes_on))
        return enters and (place.is_admitted or admission.enter(place, goes_on, must=True))

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


class _Fate(Enum):
    """The life of a save that a caller has set up, as the loop's thread sees it."""

    SET_UP = "nobody else knows of it"
    STARTED = "its story is told"
    ABANDONED = "the call of `save` has raised"


class _Begun:
    """A save that the caller's thread has set up. What others see of it is done on the loop's thread."""

    def __init__(
        self, saver: Saver, order: Order, snapshot: Snapshot, place: Place, device: torch.device | None
    ) -> None:
        worker = get_worker()
        drain = order.drain
        self.order, self.snapshot = order, snapshot
        self.handle = SaveHandle(
            step=order.step,
            path=order.targets[0].path,
            staging=snapshot.completion,
            progress=lambda: drain.progress,
            submit_callbacks=worker.callbacks.submit,
        )
        self._saver, self._place, self._device, self._worker = saver, place, device, worker
        self._fate = _Fate.SET_UP  # on the loop's thread alone

    def start(self) -> None:
        """Begin its story; on the loop's thread."""
        if self._fate is not _Fate.SET_UP:
            return
        self._fate = _Fate.STARTED
        saver, order, worker = self._saver, self.order, self._worker
        pending = Pending(self.handle, self._give_up, saver._exit_timeout, saver._bars)
        order.turn = saver.ledger.follow(pending, self._leave)
        relieve = order.drain.relieve
        saver.pool.add_reliever(relieve)
        pending.finished.add_done_callback(lambda _: saver.pool.remove_reliever(relieve))
        if saver._trace_file is not None:
            began, write = order.spans.begin, saver._trace_file.write
            Future.add_done_callback(self.handle, lambda _: saver._trace.whole(f"save {order.step}", began))
            pending.finished.add_done_callback(lambda _: worker.background.submit(write))
        attempt = Attempt(order, worker.off_loop)
        worker.start(pending, story(attempt), partial(self._afterwards, attempt))
        saver.warm_for(order.drain.num_segments, self._device)

    async def _afterwards(self, attempt: Attempt) -> None:
        try:
            await attempt.afterwards()
        finally:
            self._saver.ledger.missed(attempt.num_missed)

    def abandon(self, cause: BaseException) -> None:
        """The call of `save` has raised: nothing of it becomes visible, and its memory comes back."""
        error = interrupted(cause)
        with suppress(ClosedError):  # the interpreter is exiting: the drain gives it up
            self._worker.soon(partial(self._end, error))
        self.snapshot.give_up(error)

    def _end(self, error: BaseException) -> None:
        if self._fate is _Fate.STARTED:
            self.handle.looked_at = True  # whoever called `save` knows
            self.order.drain.fail(error)
        else:
            self._leave()
        self._fate = _Fate.ABANDONED
        if not self.order.call_seconds.done():
            self.order.call_seconds.set_result(0.0)

    def _give_up(self, error: BaseException) -> None:
        """The process, or the user, waits for it no more."""
        self._saver._given_up = error
        self.order.drain.fail(error)

    def _leave(self) -> None:
        self._saver._admission.leave(self._place)
