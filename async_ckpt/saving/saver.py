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
from functools import partial
from math import inf
from typing import Any, Literal, NamedTuple, Protocol

from ..errors import ClosedError
from ..format import digests
from ..format.layout import Image, Layout, TensorPlan, lay_out
from ..host.pool import MIN_SEGMENTS, SegmentPool
from ..host.threads import Crew, running_future
from ..report import Progress, SaveReport
from ..spans import NO_TRACE, Clock, Spans, monotonic, wall_time
from ..spec import BLOCK_BYTES, MIB, SEGMENT_BYTES, align_up
from ..staging.device import fill_image, first_device
from ..staging.files import FileFill, Source
from ..staging.guard import Optimizers, deferrable, gate_of, unwrapped
from ..staging.stager import Snapshot, interrupted
from ..staging.whole import HostCopy
from ..state.capture import Capture, capture
from ..state.tree import Select
from ..storage.pace import Pace
from ..trace import TraceFile
from .admission import Admission, OnOverlap, Place
from .drain import Drain
from .handle import SaveHandle
from .story import CommitRule, OffLoop, SaveJob, Target, follow_up, run_save
from .worker import Pending, abandon, get_worker, wait_for


class FileImage(Image, Protocol):
    """An image whose pieces are of runs of files."""

    @property
    def runs(self) -> Sequence[tuple[int, int]]:
        """(file, offset in it) of each run."""


class Files(NamedTuple):
    """Files, and the image of what is made of them."""

    image: FileImage
    sources: Sequence[Source]


class Errand(Protocol):
    """A save that others make than the stager: of files, or by somebody's function."""

    path: str
    staged: Future[None]  # resolved when the caller may change what is saved

    @property
    def progress(self) -> Progress: ...

    def give_up(self, error: BaseException) -> None:
        """The process, or the user, waits for it no more. From any thread."""

    async def run(self, turn: Future[None] | None, off_loop: OffLoop) -> SaveReport:
        """Once `turn` has come, make it durable and visible; or raise what went wrong."""

    def failed(self, error: BaseException) -> None:
        """It has raised this: leave no trace of it. Blocks."""

    async def afterwards(self, off_loop: OffLoop) -> None:
        """It is true; clean up."""


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
        clock: Clock = monotonic,
    ) -> None:
        if on_overlap not in ("wait", "skip"):
            raise ValueError(f'on_overlap must be "wait" or "skip", got {on_overlap!r}')
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight must be at least 1, got {max_in_flight}")
        if max_bandwidth is not None and not (_is_number(max_bandwidth) and 0 < max_bandwidth < inf):
            raise ValueError(
                f"max_bandwidth must be a number of bytes per second, such as 500e6, got {max_bandwidth!r}"
            )
        self.pool = SegmentPool(_segment_bytes(segment_bytes, host_bytes), max_bytes=host_bytes)
        self._max_in_flight = max_in_flight
        self._strict, self._exit_timeout, self._clock = strict, exit_timeout, clock
        self._keep_warm = keep_warm
        self._pid = os.getpid()
        self._plan: TensorPlan | None = None  # of the last save; replaced as a whole
        self._places: set[str] = set()  # that have threads of their own
        self._max_bandwidth = max_bandwidth
        self._admission = Admission(max_in_flight, on_overlap)
        self._trace_file = None if trace is None else TraceFile(trace, clock)
        self._trace = NO_TRACE if self._trace_file is None else self._trace_file.trace
        self._orders = itertools.count(1)  # of saves
        self._skips = itertools.count(1)
        self._num_skipped = 0
        self._closed = False
        self._given_up: BaseException | None = None  # the process, or the user, waits for nothing more
        self._warned: list[SaveHandle] = []
        # Changed by the loop's thread alone, which no signal interrupts; read by all.
        self._last: Future[None] | None = None  # resolved when the newest save is decided
        self._pending: list[Pending] = []  # replaced as a whole
        self._last_report: SaveReport | None = None
        self._paces: dict[str, Pace] = {}  # by place
        self._stall_seconds = 0.0
        self._num_committed = self._num_failed = self._num_cleanup_failures = self._num_missed = 0

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
        also: HostCopy | None = None,
    ) -> SaveHandle:
        """Begin a save. `make_targets` and then `state` are called once it is this save's turn, and may refuse it.

        `captured_as` is told what is saved, `needs` tells the steps that must stay on storage until it is decided. What
        `also` has copied to the host of this moment's state is taken from there.

        Raises UnsupportedStateError, ClosedError, what `make_targets` raises, and under `strict` the last unseen error.
        """
        optimizers = unwrapped(guard)
        self._report_unseen()
        spans = Spans(self._clock, self._trace)
        # From here on this thread may be interrupted at any line. It holds no lock, and changes nothing that others see
        # but through `soon`; what it has begun is taken back below.
        place = Place(step, needs)
        begun: _Begun | None = None
        try:
            with self._trace.span("wait for a place", step=step):
                admitted = self._admit(place)
            if not admitted:
                self._num_skipped = next(self._skips)
                return _skipped(step, skipped_path)
            with self._trace.span("plan", step=step):
                targets = make_targets()
                captured = capture(state(), select)
                captured_as(captured)
                begun = self._set_up(captured, targets, rule, step, optimizers, spans, place, also)
            get_worker().soon(begun.start)
            with self._trace.span("snapshot", step=step):
                begun.snapshot.begin()
            begun.call_seconds.set_result(spans.total())
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
        targets: Sequence[Target],
        rule: CommitRule,
        step: int | None,
        optimizers: Optimizers,
        spans: Spans,
        place: Place,
        also: HostCopy | None,
    ) -> _Begun:
        """Plan the archive; what is returned starts its story, which waits for the segments of the snapshot."""
        frozen = also.take_over(captured.tensors) if also is not None else frozenset()
        device = first_device(captured.tensors)
        layout = self._lay_out(captured, step)
        worker = get_worker()
        call_seconds: Future[float] = running_future()
        num_tensors = len(captured.specs)
        drain = Drain(
            layout,
            self.pool.segment_bytes,
            self._admit_bytes(layout, targets),
            worker.background.submit,
            may_drop=rule == "any" and len(targets) > 1,
            trace=self._trace,
        )
        reserve = partial(self.pool.reserve, drain.num_segments, pin=device)
        after = also.completion if also is not None and frozen else None
        in_turn = self._waits_for_others(layout, targets)
        snapshot = self._snapshot(
            captured,
            layout,
            drain,
            optimizers,
            frozen,
            after,
            reserve=None if device is None else reserve,
            in_turn=in_turn,
        )
        handle = SaveHandle(
            step=step,
            path=targets[0].path,
            staging=snapshot.completion,
            progress=lambda: drain.progress,
            submit_callbacks=worker.callbacks.submit,
        )

        def give_up(error: BaseException) -> None:
            self._given_up = error
            drain.fail(error)

        def writers(target: Target) -> Callable[[Callable[[], None]], None]:
            if len(targets) == 1 and self._max_bandwidth is None:
                return worker.writers().submit
            place = target.storage.locate("")
            self._places.add(place)
            return worker.writers(place).submit

        pending = Pending(handle, give_up, self._exit_timeout)
        job = SaveJob(
            step,
            layout,
            num_tensors,
            targets,
            rule,
            drain,
            spans,
            None,
            call_seconds,
            snapshot,
            writers,
            self._pace,
        )

        async def afterwards() -> None:
            try:
                await follow_up(job, worker.off_loop)
            finally:
                self._num_missed += sum(not delivery.committed for delivery in job.deliveries)
            if self._keep_warm:
                # A cold pool makes do with few segments. Now that nobody waits, take what the next save would miss.
                await worker.off_loop(partial(reserve, worker.background))

        def start() -> None:
            job.turn = self._follow(pending, place)
            self.pool.add_reliever(drain.relieve)
            pending.finished.add_done_callback(lambda _: self.pool.remove_reliever(drain.relieve))
            if self._trace_file is not None:
                Future.add_done_callback(handle, lambda _: self._trace.whole(f"save {step}", spans.begin))
                write = self._trace_file.write
                pending.finished.add_done_callback(lambda _: worker.background.submit(write))
            worker.start(pending, run_save(job, worker.off_loop), afterwards)

        return _Begun(handle, snapshot, call_seconds, start, lambda: self._admission.leave(place), drain.fail)

    def _snapshot(
        self,
        captured: Capture,
        layout: Layout,
        drain: Drain,
        optimizers: Optimizers,
        frozen: frozenset[int],
        after: Future[None] | None,
        *,
        reserve: Callable[[Crew], None] | None,
        in_turn: bool,
    ) -> Snapshot:
        """What copies the tensors into the segments that the drain takes; from here on it alone keeps them alive.

        `frozen` are there when `after` has resolved. `reserve` makes memory for a device. `in_turn`: a sink may hold a
        segment until another one has come.
        """
        worker = get_worker()
        deferred = deferrable(optimizers, captured.specs, captured.tensors)
        if self._is_tight(drain.num_segments) and (self._max_in_flight > 1 or in_turn):
            # What is copied up front could fill the pool, and wait there for what is copied later.
            deferred, frozen = {}, frozenset()
        if reserve is not None and not deferred:
            # All copies are about to be enqueued at once: lock the memory on several threads, not on this one.
            worker.call(partial(reserve, worker.copiers))
        return Snapshot(
            captured.specs,
            captured.tensors,
            layout.segments(self.pool.segment_bytes),
            order=self._next_order(),
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
            after=after,
        )

    def _pace(self, target: Target) -> Pace | None:
        """One for each place, whatever the number of saves on their way to it."""
        if self._max_bandwidth is None:
            return None
        return self._paces.setdefault(target.storage.locate(""), Pace(self._max_bandwidth))

    def take_on(self, errand: Errand) -> SaveHandle:
        """Have a save made that needs no staging here. No call waits; errands run one at a time, in their order.

        Raises ClosedError.
        """
        self._report_unseen(stacklevel=5)
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

        async def story(turn: Future[None] | None) -> SaveReport:
            try:
                return await errand.run(turn, worker.off_loop)
            except BaseException as error:
                if not errand.staged.done():
                    errand.staged.set_exception(error)
                try:
                    await worker.off_loop(partial(errand.failed, error))
                except Exception as another:
                    error.add_note(f"async_ckpt: cleaning up after it failed too: {another}")
                raise

        def start() -> None:
            place = Place(None)
            self._admission.enter_at_once(place)
            turn = self._follow(pending, place)
            # What the next one needs is little, and soon there again.
            pending.finished.add_done_callback(lambda _: self.pool.release())
            worker.start(pending, story(turn), lambda: errand.afterwards(worker.off_loop))

        worker.soon(start)
        return handle

    def files_job(
        self, files: Files, target: Target, spans: Spans, call_seconds: Future[float]
    ) -> tuple[SaveJob, FileFill]:
        """What streams files to a target: begin the fill, then `run_save`. May take a while, for 100,000 files."""
        worker, size = get_worker(), self.pool.segment_bytes
        drain = Drain(files.image, size, self._admit_bytes(files.image, [target]), worker.background.submit)
        fill = FileFill(
            files.sources,
            files.image.runs,
            files.image.segments(size),
            order=self._next_order(),
            pool=self.pool,
            crew=worker.readers,
            clock=self._clock,
            put=drain.put,
            check=drain.check,
        )
        writers = worker.writers().submit
        job = SaveJob(
            None, files.image, 0, [target], "all", drain, spans, None, call_seconds, fill, lambda _: writers
        )
        return job, fill

    @contextmanager
    def relieved_by(self, drain: Drain) -> Iterator[None]:
        """Meanwhile, whoever waits for memory may have what this drain's sinks can do without."""
        self.pool.add_reliever(drain.relieve)
        try:
            yield
        finally:
            self.pool.remove_reliever(drain.relieve)

    def prewarm(self, state: Any) -> None:
        """Plan the state and take its host memory now, touched and page-locked by several threads."""
        captured = capture(state)
        layout = self._lay_out(captured, step=0)
        self._admit_bytes(layout, ())
        num_segments = -(-layout.file_bytes // self.pool.segment_bytes)
        with self._trace.span("prewarm"):
            self.pool.reserve(num_segments, get_worker().copiers, pin=first_device(captured.tensors))

    def wait(self, timeout: float | None = None) -> None:
        """Wait for every save begun so far, retention included; raise the first error that nobody has looked at."""
        deadline = None if timeout is None else self._clock() + timeout
        for pending in self.pending():
            left = None if deadline is None else max(0.0, deadline - self._clock())
            if not wait_for(pending.finished, left):
                raise TimeoutError(f"{pending.handle!r} is still under way after {timeout} s")
        self._raise_unseen()

    def close(self) -> None:
        """Wait for every save, raise the first unseen error, give the memory back. Ctrl-C gives the saves up."""
        if not self.belongs_here:  # a lock of the parent's may have been forked held
            return
        self._closed = True
        try:
            for pending in self.pending():
                wait_for(pending.finished)
        except KeyboardInterrupt:
            abandon(self.pending(), "interrupted while it was waited for")
            raise
        finally:
            self.pool.close()
            with suppress(ClosedError):  # the interpreter is exiting, and ends all threads
                for place in list(self._places):
                    get_worker().stop_writers(place)
            self._close_trace()
        self._raise_unseen()

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

    def pending(self) -> list[Pending]:
        """The saves that were begun, and have not ended, or have failed without anybody having looked."""
        with suppress(ClosedError):  # the interpreter is exiting: none begins any more
            get_worker().sync()
        return self._pending

    def under_way(self) -> list[Place]:
        """The places of saves that are not decided yet."""
        return self._admission.under_way()

    def metrics(self) -> dict[str, float]:
        """Counters and the last report, as numbers under constant keys."""
        last = self._last_report or SaveReport("committed", None, "")
        numbers = {
            "saves_committed": self._num_committed,
            "saves_failed": self._num_failed,
            "saves_skipped": self._num_skipped,
            "saves_in_flight": len(self._admission.under_way()),
            "cleanup_failures": self._num_cleanup_failures,
            "destinations_missed": self._num_missed,
            "stall_seconds_total": self._stall_seconds,
            "pool_bytes": self.pool.num_bytes,
        }
        both = {**numbers, **last.as_dict("last_")}
        return {key: float(value) for key, value in both.items() if not isinstance(value, str)}

    # --- parts ------------------------------------------------------------------------------------------------

    def _admit(self, place: Place) -> bool:
        """Take one of the places for saves under way, waiting for it or not. False: skip."""
        self._refuse_if_forked()
        self._refuse_if_closed()
        return self._admission.enter(place, self._refuse_if_closed)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise ClosedError("this checkpointer is closed; open a new one to save")

    def _refuse_if_forked(self) -> None:
        if not self.belongs_here:
            raise ClosedError(
                "this checkpointer belongs to the process that was forked from; open one in this process"
            )

    def _next_order(self) -> int:
        return next(self._orders)

    def _follow(self, pending: Pending, place: Place) -> Future[None] | None:
        """Keep account of a save: who waits for it, and how it ended. Returns the end of the save before it."""
        self._pending = [*self._pending, pending]
        turn, self._last = self._last, pending.settled

        def ended(_: Future[SaveReport]) -> None:
            if Future.exception(pending.handle) is None:
                report = self._last_report = Future.result(pending.handle)
                self._num_committed += 1
                self._stall_seconds += report.stall_seconds
            else:
                self._num_failed += 1

        def finished(future: Future[None]) -> None:
            self._num_cleanup_failures += future.exception() is not None
            # A failed save stays until somebody has looked at it.
            self._pending = [
                p
                for p in self._pending
                if not p.finished.done() or (_failed(p.handle) and not p.handle.looked_at)
            ]

        pending.settled.add_done_callback(lambda _: self._admission.leave(place))
        Future.add_done_callback(pending.handle, ended)
        pending.finished.add_done_callback(finished)
        return turn

    def _unseen(self) -> list[SaveHandle]:
        return [p.handle for p in self._pending if _failed(p.handle) and not p.handle.looked_at]

    def _report_unseen(self, stacklevel: int = 4) -> None:
        if self._strict:
            self._raise_unseen()
        for handle in self._unseen():
            if handle not in self._warned:
                self._warned = [*self._warned[-8:], handle]
                error = Future.exception(handle)
                warnings.warn(
                    f"{handle.path} was not saved: {type(error).__name__}: {error}",
                    RuntimeWarning,
                    stacklevel=stacklevel,
                )

    def _raise_unseen(self) -> None:
        errors = [error for handle in self._unseen() if (error := handle.exception()) is not None]
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"another save failed too: {type(other).__name__}: {other}")
            raise errors[0]

    def _lay_out(self, captured: Capture, step: int | None) -> Layout:
        plan = self._plan
        if plan is None or plan.specs != captured.specs:
            plan = self._plan = TensorPlan(captured.specs)
        return lay_out(
            plan, skeleton=captured.skeleton, objects=captured.objects, step=step, mtime=int(wall_time())
        )

    def _admit_bytes(self, layout: Image, targets: Sequence[Target]) -> int:
        """Make sure that the pool can hold what has to be in it at one time; how many segments it may have."""
        size = self.pool.segment_bytes
        digests = layout.digests
        num_tail = -(-layout.file_bytes // size) - digests.data.offset // size if digests else 0
        # The tail waits for all else, of which a part is sent while the next one is filled.
        part = max((t.storage.part_segments(layout.file_bytes, size) for t in targets), default=1)
        least = num_tail + 2 * part
        self.pool.admit(layout.file_bytes, self._max_in_flight, least=least)
        if least > self.pool.max_segments:
            raise ValueError(
                f"host_bytes is too small for an archive of {layout.file_bytes:,} bytes; "
                f"give at least {least * size:,}"
            )
        return self.pool.max_segments

    def _waits_for_others(self, layout: Image, targets: Sequence[Target]) -> bool:
        """Whether a sink may hold a segment until another one has come."""
        size = self.pool.segment_bytes
        storages = [target.storage for target in targets]
        return any(s.in_order or s.part_segments(layout.file_bytes, size) > 1 for s in storages)

    def _is_tight(self, num_segments: int) -> bool:
        return num_segments * self._max_in_flight > self.pool.max_segments

    def __repr__(self) -> str:
        return f"<Saver {len(self.under_way())}/{self._max_in_flight} in flight, {self.pool!r}>"


class _Begun:
    """A save that the caller's thread has set up. What others see of it is done on the loop's thread."""

    def __init__(
        self,
        handle: SaveHandle,
        snapshot: Snapshot,
        call_seconds: Future[float],
        start: Callable[[], None],
        leave: Callable[[], None],
        give_up: Callable[[BaseException], None],
    ) -> None:
        self.handle, self.snapshot, self.call_seconds = handle, snapshot, call_seconds
        self._start, self._leave, self._give_up = start, leave, give_up
        self._fate: Literal["set up", "started", "abandoned"] = "set up"  # on the loop's thread alone

    def start(self) -> None:
        """Begin its story; on the loop's thread."""
        if self._fate == "set up":
            self._fate = "started"
            self._start()

    def abandon(self, cause: BaseException) -> None:
        """The call of `save` has raised: nothing of it becomes visible, and its memory comes back."""
        error = interrupted(cause)
        with suppress(ClosedError):  # the interpreter is exiting: the drain gives it up
            get_worker().soon(partial(self._end, error))
        self.snapshot.give_up(error)

    def _end(self, error: BaseException) -> None:
        if self._fate == "started":
            self.handle.looked_at = True  # whoever called `save` knows
            self._give_up(error)
        else:
            self._leave()
        self._fate = "abandoned"
        if not self.call_seconds.done():
            self.call_seconds.set_result(0.0)


def small_archive(state: Any, *, step: int, max_bytes: int) -> tuple[bytes, str]:
    """The archive of a small state, made at once in memory, and its digest. Raises ValueError when it is too large."""
    captured = capture(state)
    layout = lay_out(
        TensorPlan(captured.specs),
        skeleton=captured.skeleton,
        objects=captured.objects,
        step=step,
        mtime=int(wall_time()),
    )
    if layout.file_bytes > max_bytes:
        raise ValueError(
            f"{layout.file_bytes:,} bytes are too many for one put (at most {max_bytes:,}); put tensors into the state"
        )
    image = bytearray(layout.file_bytes)
    (plan,) = layout.segments(align_up(layout.file_bytes, BLOCK_BYTES))
    for at, data in plan.literals:
        image[at : at + len(data)] = data
    fill_image(image, plan.pieces, captured.tensors)
    covered = layout.digests.data.offset
    blocks = (memoryview(image)[at : min(at + BLOCK_BYTES, covered)] for at in range(0, covered, BLOCK_BYTES))
    tail = digests.dump(covered, b"".join(map(digests.block_digest, blocks)))
    image[covered : covered + len(tail)] = tail
    return bytes(image), digests.self_digest(tail)


def _failed(handle: SaveHandle) -> bool:
    return handle.done() and Future.exception(handle) is not None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _segment_bytes(segment_bytes: int | None, host_bytes: int | None) -> int:
    """The segment size of a pool, from what the user has said."""
    for name, given in (("segment_bytes", segment_bytes), ("host_bytes", host_bytes)):
        if given is not None and not _is_number(given):
            raise ValueError(f"{name} must be a number of bytes, such as 4 * 2**30, got {given!r}")
    if host_bytes is not None and host_bytes < MIN_SEGMENTS * BLOCK_BYTES:
        raise ValueError(
            f"host_bytes must be at least {MIN_SEGMENTS * BLOCK_BYTES // MIB} MiB, got {host_bytes:,}"
        )
    if segment_bytes is None:
        share = SEGMENT_BYTES if host_bytes is None else host_bytes // MIN_SEGMENTS
        return min(SEGMENT_BYTES, share // BLOCK_BYTES * BLOCK_BYTES)
    if segment_bytes <= 0 or segment_bytes % BLOCK_BYTES:
        raise ValueError(
            f"segment_bytes must be a multiple of {BLOCK_BYTES // MIB} MiB, got {segment_bytes:,}"
        )
    if host_bytes is not None and host_bytes < MIN_SEGMENTS * segment_bytes:
        raise ValueError(f"host_bytes must hold at least {MIN_SEGMENTS} segments of {segment_bytes:,} bytes")
    return segment_bytes


def _skipped(step: int | None, path: str) -> SaveHandle:
    handle = SaveHandle(
        step=step,
        path=path,
        staging=running_future(),
        progress=lambda: Progress(0, 0, 0),
        submit_callbacks=get_worker().callbacks.submit,
    )
    handle.staging_completion.set_result(None)
    handle.set_result(SaveReport("skipped", step, path))
    return handle
