"""The mover of one further place: a thread that copies to it the newest step that the nearer places hold.

In: wake-ups; the steps at all these places; copies that saves write there themselves. Out: the newest step at the
place; resolved waits for it. Knows nothing of: tensors, which place takes a save.

`Arrivals` records what is known of the place. `PassingCopy` is a copy that a save writes; `_Copier` makes the mover's
own copies, on the thread of its `_Worker`. `MovingProcess` is what differs between a training and a separate moving
process.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from ...errors import (
    CheckpointError,
    ConflictError,
    CorruptCheckpointError,
    NotCommittedError,
    StepExistsError,
    StorageUnavailableError,
)
from ..host import waits
from ..host.loop import ask_for_exception, awaitable, get_loop, off_loop
from ..host.threads import Crew, running_future
from ..host.waits import LIVENESS_SECONDS, growing_pauses, wait_for
from ..runs.mover_file import Announcement
from ..runs.roots import Ahead, Roots
from ..runs.run import Run
from ..runs.tiers_file import NAME as TIERS
from ..storage.interface import Sink, Storage
from ..storage.pace import Pace
from ..timing import monotonic

if TYPE_CHECKING:
    from ..host.pool import SegmentPool

# The first and the longest pause between two tries to move to a place that does not answer.
_FIRST_PAUSE_SECONDS: Final = 1.0
_PAUSE_SECONDS: Final = 60.0
# The first and the longest pause between two looks for a step that another process moves.
_FIRST_LOOK_SECONDS: Final = 0.2
_LOOK_SECONDS: Final = 5.0
# The pause between two requests to a place, at the end, to see whether it answers.
_LOOK_AT_END_SECONDS: Final = 2.0
# How long memory is kept for the next copy. Allocating new pages for each copy would take much of the processor time of
# copies that directly follow each other. A training that saves once a minute gets its memory back in between.
_KEEP_MEMORY_SECONDS: Final = 10.0

_log = logging.getLogger("async_ckpt")

# Copies a step from one run to another: `loading.catch_up.copy_step`.
CopyStep: TypeAlias = Callable[..., list[int]]


class MovingProcess:
    """The mover's view of the process that it runs in. By default no other process moves to the place."""

    def __init__(self, in_flight: Callable[[Run], Collection[int]]) -> None:
        """`in_flight` lists the steps at a place that retention must not delete."""
        self.in_flight = in_flight

    def pace(self, *, is_last: bool) -> Pace | None:  # noqa: ARG002
        """The bandwidth limit of a copy, if there is one. `is_last`: the process waits for this copy before it ends."""
        return None

    def has_ranks(self) -> bool:
        """True if other ranks write to the place, too."""
        return False

    def other(self, step: int | None, num_bytes: int) -> Announcement | None:  # noqa: ARG002
        """The other process that moves to the place, if any. This one would move `step`, and has copied `num_bytes`."""
        return None

    def check(self, step: int, num_bytes: int) -> None:
        """While this process copies `step`: raise StorageUnavailableError if another process moves to the place now."""

    def found(self, step: int) -> None:
        """Note that the place's newest step was moved by another process, or before this process started."""

    def arrived(self, step: int) -> None:
        """Note that the place has this step, its newest."""

    def failed(self, step: int, why: str) -> None:
        """Note that the newest step could not be copied."""


class _Stopped(CheckpointError):
    """The move was stopped, since nobody waits for it any more."""


class _Expected(NamedTuple):
    """A wait for a step. `since` is the number of wants when it began. A patient wait continues after a failed copy."""

    since: int
    step: int
    arrived: Future[int]
    is_patient: bool


class Arrivals:
    """The steps that one place is known to have and to lack, and the waits for them. May be called from any thread."""

    def __init__(self, shown: str, on_arrival: Callable[[int], None]) -> None:
        """`shown` is the place in messages. `on_arrival` is called with each newest step that has arrived."""
        self.shown, self._on_arrival = shown, on_arrival
        self._lock = threading.Lock()  # guards all fields below
        self._num_wants = 0  # calls of `want`; what was found before the last call is outdated
        self.num_seen = 0  # the wants that the mover's last look at the places took into account
        self._newest: int | None = None  # the newest step at the place, as far as known
        self.wanted: int | None = None  # the newest step of the nearer places
        self._waiting: list[_Expected] = []
        self.error: CheckpointError | None = None  # why the last copy failed
        self._num_failed = 0  # the wants that the failed copy took into account
        self._is_over = False  # nothing is copied to the place any more

    def want(self, step: int) -> None:
        """Note that a nearer place now has `step`, its newest. The same and later steps at this place are outdated."""
        with self._lock:
            self.wanted = step
            self._num_wants += 1
            if self._newest is not None and self._newest >= step:
                self._newest = None

    def begin_look(self) -> None:
        """Begin a look at the places. What it finds takes all wants so far into account, `num_seen` of them."""
        with self._lock:
            self.num_seen = self._num_wants

    def end_look(self, wanted: int | None, here: int | None) -> bool:
        """Note the newest step of all places. True if the newest step of this place has changed."""
        with self._lock:
            self.wanted = wanted
            return here is not None and here != self._newest

    def arrived(self, step: int, num_wants: int | None = None) -> None:
        """Note that the place has this step, its newest. `num_wants`: how many wants this answers; by default all."""
        with self._lock:
            known = self._num_wants if num_wants is None else num_wants
            is_newest = known == self._num_wants
            is_news = is_newest and step != self._newest
            if is_newest:
                self._newest = step
        self._end(lambda one: one.since <= known and one.step <= step, lambda one: one.arrived.set_result(step))
        if is_news:
            self._on_arrival(step)

    def copied(self, error: CheckpointError | None) -> None:
        """Note the end of a copy. After an error, impatient waits fail; after a conflict, all waits fail."""
        with self._lock:
            is_news = str(error) != str(self.error)
            self.error, self._num_failed = error, self.num_seen
        if error is None or isinstance(error, _Stopped):
            return
        if is_news:
            _log.warning("%s is not up to date: %s", self.shown, error)
        if isinstance(error, ConflictError):
            self.give_up(error)
        else:
            self._fail(error, self._num_failed)

    def _fail(self, error: CheckpointError, num_wants: int) -> None:
        """Fail the waits that are not patient, after a failed copy that took `num_wants` wants into account."""

        def fail(one: _Expected) -> None:
            words = f"{self._behind(one.step, error)}; it is copied once the place answers"
            one.arrived.set_exception(type(error)(words, **{"path": self.shown, **vars(error)}))

        self._end(lambda one: not one.is_patient and one.since <= num_wants, fail)

    def fail_impatient(self, why: str, step: int | None = None) -> None:
        """Fail impatient waits: a copy makes no progress, or rank 0 could not copy `step` and no newer one is known."""
        if step is None or self.wanted is None or self.wanted <= step:
            self._fail(StorageUnavailableError(why, path=self.shown), self._num_wants)

    def give_up(self, error: Exception) -> None:
        """Fail all waits with an error."""
        self._end(lambda _: True, lambda one: one.arrived.set_exception(error))

    def end(self) -> None:
        """Note that nothing is copied to the place any more, and fail all waits."""
        with self._lock:
            self._is_over = True
        self.give_up(self._left())

    def arrival(self, step: int, *, is_patient: bool = True) -> Future[int]:
        """A future that resolves when the place holds `step`, or a newer one; its result is that step. Unless it is
        patient, it fails with the next copy that fails, or with the last one, if that took all wants into account.
        """
        arrived: Future[int] = running_future()
        with self._lock:
            newest, is_over = self._newest, self._is_over or isinstance(self.error, ConflictError)
            is_waiting = not is_over and (newest is None or newest < step)
            if is_waiting:
                self._waiting.append(_Expected(self._num_wants, step, arrived, is_patient))
        if newest is not None and newest >= step:
            arrived.set_result(newest)
        elif not is_waiting:
            arrived.set_exception(self.error if isinstance(self.error, ConflictError) else self._left())
        elif self.error is not None:  # the last copy may have included the step
            self._fail(self.error, self._num_failed)
        return arrived

    def has(self, step: int) -> bool:
        """True if the place is known to have a step, or a newer one."""
        newest = self._newest
        return newest is not None and newest >= step

    def missing(self) -> int | None:
        """The newest step that the place lacks; None if none is known to be missing."""
        with self._lock:
            wanted, newest = self.wanted, self._newest
        return None if newest is not None and wanted is not None and newest >= wanted else wanted

    def lag(self) -> str:
        """The step that the place lacks, in words; empty if none is known to be missing."""
        wanted = self.missing()
        return "" if wanted is None else self._behind(wanted, self.error)

    def _end(self, ends: Callable[[_Expected], bool], resolve: Callable[[_Expected], None]) -> None:
        """Remove the waits that satisfy `ends`, and resolve them outside the lock."""
        with self._lock:
            ending = [one for one in self._waiting if ends(one)]
            self._waiting = [one for one in self._waiting if one not in ending]
        for one in ending:
            with suppress(InvalidStateError):  # already failed, since rank 0 was lost
                resolve(one)

    def _left(self) -> StorageUnavailableError:
        """The error for those who wait for the place, when nothing is copied there any more."""
        return StorageUnavailableError(self.lag() or f"{self.shown}: no more steps are copied there", path=self.shown)

    def _behind(self, step: int, error: CheckpointError | None) -> str:
        newest, why = self._newest, "" if error is None else f": {error}"
        has = "no step yet" if newest is None else f"step {newest}"
        return f"step {step} is not at {self.shown}, which has {has}{why}"


class PassingCopy:
    """The archive of one step that a save writes to a further place, at the same time as to the nearer one."""

    sink: Sink
    """Set before the save gets this object."""

    def __init__(self, step: int, storage: Storage, name: str) -> None:
        self.step, self.storage, self._name = step, storage, name
        self.written_bytes = 0  # so far, as reported by the save
        self.ended: Future[None] = running_future()
        self._is_whole = False

    def end(self, *, is_whole: bool) -> None:
        """Note that the save writes no more, and remove the object unless it is whole. Blocks."""
        try:
            if not is_whole:
                self.sink.abort()
            self.sink.close()
        finally:
            self._is_whole = is_whole
            self.ended.set_result(None)

    def discard(self) -> None:
        """Delete the archive, since the step was not committed."""
        if self._is_whole:
            with suppress(CheckpointError):
                self.storage.delete(self._name)


class _Worker:
    """A thread that works after each `wake`, until it is stopped. Methods may be called from any thread."""

    def __init__(
        self, work: Callable[[], bool], rest: Callable[[], None], refused: Callable[[RuntimeError], None]
    ) -> None:
        """`work` returns True to be repeated after a pause; else `rest` follows. `refused`: no thread could be had."""
        self._work, self._rest, self._refused = work, rest, refused
        self._crew = Crew("move", 1, background=True)
        self._bell = threading.Event()  # set to end a pause
        self.ended: Future[None] = running_future()  # resolves when no work remains after `begin_end`
        self._lock = threading.Lock()  # guards all fields below
        self._is_wanted = self.is_running = False  # work is requested; work is running, or about to
        self.is_ending = self.is_stopped = False

    def wake(self) -> None:
        """Request work; if it is running, it runs once more."""
        with self._lock:
            if self.is_stopped:
                return
            self._is_wanted = True
            begins, self.is_running = not self.is_running, True
            self._bell.set()
        if begins:
            self._crew.submit(self._run, self._refuse)

    def begin_end(self) -> None:
        """Work for the last time, at normal priority, and then resolve `ended`."""
        with self._lock:
            self.is_ending = True
        self._crew.hurry()
        self.wake()

    def stop(self) -> None:
        """Stop working. Work that is running must check `is_stopped`."""
        with self._lock:
            self.is_stopped = self.is_ending = True
            is_running = self.is_running
            self._bell.set()
        self._crew.stop()
        if is_running:
            get_loop().note_call(self.ended)

    def pause(self, seconds: float) -> None:
        """On the worker's thread: wait for `seconds`, or until `wake` or `stop` is called."""
        if not self.is_stopped:
            self._bell.wait(seconds)
            self._bell.clear()

    def _refuse(self, error: RuntimeError) -> None:
        with self._lock:
            self.is_running = False
        self._refused(error)
        self._end()

    def _run(self) -> None:
        pauses = growing_pauses(_FIRST_PAUSE_SECONDS, _PAUSE_SECONDS)
        while self._goes_on():
            if not self._work():
                pauses = growing_pauses(_FIRST_PAUSE_SECONDS, _PAUSE_SECONDS)
            elif not self.is_ending:
                with self._lock:
                    self._is_wanted = True
                self.pause(next(pauses))
        self._end()
        self._rest()

    def _goes_on(self) -> bool:
        with self._lock:
            self.is_running = self._is_wanted and not self.is_stopped
            self._is_wanted = False
            if self.is_running:
                self._bell.clear()  # a bell from now on ends the pause
            return self.is_running

    def _end(self) -> None:
        with self._lock:
            ends = self.is_ending and not self.is_running and not self.ended.done()
        if ends:
            self.ended.set_result(None)


class _Copier:
    """Copies steps to one place, and keeps the memory for that. On the mover's thread."""

    def __init__(self, roots: Roots, copy_step: CopyStep, process: MovingProcess) -> None:
        self._roots, self._run, self._copy_step, self._process = roots, roots.runs[-1], copy_step, process
        self.step: int | None = None  # the step that is being copied there, perhaps by another process
        self.num_bytes = 0  # copied so far
        self._pool: SegmentPool | None = None
        self._ended_at = 0.0
        self._gone: int | None = None  # the step that could not be copied at the last try

    def copy(self, step: int, ahead: Ahead, *, is_last: bool, check: Callable[[], None]) -> bool:
        """Copy a step from the nearest place that has it whole. Returns False if all places must be looked at again."""
        from ..storage.bulk import new_pool  # most runs have one place

        self.step, errors = step, list[CheckpointError]()
        try:
            if self._roots.are_taken:
                self._roots.take(self._run, step)
            self._pool = self._pool or new_pool()
            for source in ahead.holders[step]:
                try:
                    self._make_room(source, step)
                    self._copy_step(
                        source,
                        self._run,
                        step,
                        check=check,
                        background=not is_last,
                        pace=self._process.pace(is_last=is_last),
                        retires=ahead.stale,
                        on_bytes=self._count,
                        pool=self._pool,
                    )
                except (NotCommittedError, StepExistsError) as error:
                    # Retention was faster, or another process has committed the step there: look again, but raise if it
                    # happens twice for the same step.
                    if self._gone == step:
                        raise StorageUnavailableError(str(error), path=self._roots.names[-1]) from error
                    self._gone = step
                    return False
                except (CorruptCheckpointError, StorageUnavailableError) as error:
                    errors.append(error)  # another place may hold it whole
                else:
                    self._ended_at = monotonic()
                    return True
            raise errors[0]
        finally:
            self.step = None

    def _make_room(self, source: Run, step: int) -> None:
        if self._run.keep.free is not None:
            manifest = source.manifest(step)
            in_flight = {*self._process.in_flight(self._run), *(lent.step for lent in manifest.elsewhere)}
            self._run.make_room(step, manifest.num_bytes, in_flight=in_flight)

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes

    @property
    def seconds_to_keep(self) -> float:
        """How much longer the memory is kept for the next copy."""
        return 0.0 if self._pool is None else max(0.0, self._ended_at + _KEEP_MEMORY_SECONDS - monotonic())

    def free_memory(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()


class Mover:
    """Brings one place up to date with the nearer ones. `Tiers` creates it. One thread moves; any thread may call."""

    def __init__(self, roots: Roots, copy_step: CopyStep, process: MovingProcess) -> None:
        """`roots` are the nearer places, and last the place to bring up to date."""
        self.run, self._roots, self._process = roots.runs[-1], roots, process
        self.arrivals = Arrivals(roots.names[-1], process.arrived)
        self.copier = _Copier(roots, copy_step, process)
        self._passing: PassingCopy | None = None  # the last one; it may have ended
        self.worker = _Worker(self._work, self._rest, self.arrivals.give_up)
        self._following = threading.Lock()  # held while `_passing` is set
        self._is_elsewhere = False  # another process moves to the place, according to its last announcement
        # the bytes copied, as last seen by `_is_still`, and when they last changed
        self._seen, self._seen_at = (-1, 0), 0.0
        self._answered_at = 0.0  # when the place last answered, after the end began

    # --- a copy in the pass of a save -------------------------------------------------------------------------

    def may_follow(self, step: int) -> bool:
        """True if the place is idle, answers, and lacks this step."""
        is_busy = self.worker.is_running or self.worker.is_stopped or self._is_passing or self._is_elsewhere
        # Making room and compression take time, and a save waits for neither.
        if is_busy or self.arrivals.error or self.run.keep.free is not None or self.run.compresses:
            return False
        return not self.arrivals.has(step) and self.run.takes(step)

    def follow(self, step: int, name: str, create: Callable[[Storage, str], Sink]) -> PassingCopy | None:
        """Begin a copy that a save writes itself; None if the place cannot take one. Raises the errors of `create`."""
        with self._following:
            if not self.may_follow(step):
                return None
            passing = self._passing = PassingCopy(step, self.run.storage, name)
        try:
            passing.sink = create(passing.storage, name)
        except BaseException:
            passing.ended.set_result(None)
            raise
        return passing

    @property
    def _is_passing(self) -> bool:
        return self._passing is not None and not self._passing.ended.done()

    # --- the end ----------------------------------------------------------------------------------------------

    def begin_end(self) -> None:
        """Make `worker.ended` resolve once the newest step is there, or the place does not answer."""
        self._answered_at = monotonic()
        self.worker.begin_end()

    async def ask(self) -> None:
        """Until the end, keep checking whether the place answers."""
        while not (self.worker.ended.done() or self.worker.is_stopped):
            with suppress(CheckpointError, OSError):
                await off_loop(partial(self.run.storage.exists, TIERS))
                self._answered_at = monotonic()
            await asyncio.wait([awaitable(self.worker.ended)], timeout=_LOOK_AT_END_SECONDS)

    def is_going_on(self, *, must_answer: bool = False) -> bool:
        """True if the end must be waited for: copies make progress, and the place answers if it `must_answer`."""
        is_away = must_answer and monotonic() > self._answered_at + waits.ANSWER_SECONDS
        return self.worker.is_ending and not (self.worker.ended.done() or is_away or self._is_still())

    async def watch(self, arrived: Future[int]) -> None:
        """Fail the waits that are not patient if a call to the place hangs. Requests to a store end by themselves."""
        future = awaitable(arrived)
        future.add_done_callback(ask_for_exception)
        while not (self.run.storage.remote or (await asyncio.wait([future], timeout=_LOOK_SECONDS))[0]):
            if self._is_still():
                self.arrivals.fail_impatient(f"a copy there has made no progress for {waits.FINISH_SECONDS:.0f} s")

    def _is_still(self) -> bool:
        """True if copies have made no progress for FINISH_SECONDS, as far as earlier calls of this method have seen."""
        uploads = self._is_passing and self.run.storage.remote  # it ends by itself
        num_bytes = self.copier.num_bytes, self._passing.written_bytes if self._passing else 0
        if uploads or not self.worker.is_running or num_bytes != self._seen:
            self._seen, self._seen_at = num_bytes, monotonic()
        return monotonic() > self._seen_at + waits.FINISH_SECONDS

    def stop(self) -> None:
        """Stop a move that is under way, and end all waits."""
        self.worker.stop()
        self.arrivals.end()

    # --- on the mover's thread --------------------------------------------------------------------------------

    def _work(self) -> bool:
        """Bring the place up to date. Returns True if that has failed and must be tried again."""
        error: CheckpointError | None = None
        try:
            self._bring_up()
        except CheckpointError as failed:
            error = failed
        except Exception as failed:  # a client may raise anything, and nobody may be left waiting for a dead thread
            why = failed if isinstance(failed, OSError) else repr(failed)
            error = StorageUnavailableError(f"{self.arrivals.shown}: {why}", path=self.arrivals.shown)
        self.copier.step = None
        self.arrivals.copied(error)
        if error is not None:
            self.copier.free_memory()  # a request that is still running may hold some
            if not isinstance(error, ConflictError | _Stopped):
                self._process.failed(self.arrivals.wanted or 0, str(error))
        return isinstance(error, StorageUnavailableError)

    def _bring_up(self) -> None:
        """Move steps until none is left to move, or until another process has moved them."""
        pauses = growing_pauses(_FIRST_LOOK_SECONDS, _LOOK_SECONDS)
        while True:
            self._check()
            passing = self._passing
            while passing is not None and not wait_for(passing.ended, LIVENESS_SECONDS):
                self._check()
            self.arrivals.begin_look()
            # The last step that a save copied itself: its archive is there, or those of other ranks are.
            first = None if passing is None else passing.step
            ahead = self._roots.ahead(self.run, is_last=self.worker.is_ending, first=first)
            if self._roots.are_taken:
                self._roots.refuse_strangers(self.run)
            here = max((step for step, holders in ahead.holders.items() if self.run in holders), default=None)
            is_news = self.arrivals.end_look(max(ahead.holders, default=None), here)
            if here is not None:
                if is_news:  # this process has not moved it
                    self._roots.check_taken(self.run)
                    self._process.found(here)
                self.arrivals.arrived(here, self.arrivals.num_seen)
            other = self._process.other(ahead.step, self.copier.num_bytes)
            if other and self.worker.is_ending and ahead.step is not None and not self.run.takes(ahead.step):
                other = None  # only this process knows that this step is the last
            if here is not None and is_news and self._is_elsewhere:
                self._release(here)
            self._is_elsewhere = other is not None
            if ahead.step is None:
                return
            if other is None:
                with self.run.copying:
                    self._move(ahead.step, ahead)
            else:
                self.copier.step, self.copier.num_bytes = other.step, other.num_bytes
                self.copier.free_memory()
                self.worker.pause(next(pauses))
                self.run.root.forget([ahead.step])  # the other process may replace it

    def _move(self, step: int, ahead: Ahead) -> None:
        """Copy a step; then move the tracker, and apply retention, also at places that held the step until now."""
        run, begun = self.run, monotonic()
        if not self.copier.copy(step, ahead, is_last=self.worker.is_ending, check=self._check):
            return
        seconds = monotonic() - begun
        self.arrivals.arrived(step, self.arrivals.num_seen)
        run.announce(step, in_flight=self._process.in_flight(run))
        if run.has_start:
            run.sweeper.sweep_once(has_ranks=self._process.has_ranks())
        for one in self._roots.runs:
            one.events.note("moved", step, place=self.arrivals.shown, total_seconds=seconds)
        run.retain(step, replaced=None, in_flight=self._process.in_flight(run), is_copy=True)
        self._release(step)
        run.write_events()

    def _release(self, step: int) -> None:
        """Apply retention at the nearer places, which kept steps until this one arrived."""
        for one in self._roots.runs[-2::-1]:
            if one.has_start:
                one.retain(step, replaced=None, in_flight=self._process.in_flight(one), is_copy=True)

    def _rest(self) -> None:
        """Keep the memory for the next copy, but free it after a while."""
        self.worker.pause(self.copier.seconds_to_keep)
        if not self.worker.is_running:
            self.copier.free_memory()

    def _check(self) -> None:
        if self.worker.is_stopped:
            raise _Stopped(f"{self.arrivals.shown}: the move was ended")
        if (step := self.copier.step) is not None and not self._is_elsewhere:
            self._process.check(step, self.copier.num_bytes)
