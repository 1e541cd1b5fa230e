"""The places of a run, from near to far: which one takes the next save, and how the others follow.

In: the runs at the places; commits, and failures. Out: a place for each save; the same steps at the places behind it.
Knows nothing of: tensors, saves under way.

A save is committed at one place: the first that answers and has room. One mover for each further place copies to it
the newest step that the nearer ones hold, so a place that is slow or away holds up neither a save nor another place.
Movers only go forward: they leave out what is older than the newest step there, and write nothing where a start has
committed that this run does not descend from.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from ...errors import (
    CheckpointError,
    ConflictError,
    CorruptCheckpointError,
    NotCommittedError,
    StepExistsError,
    StorageUnavailableError,
)
from ..host import waits
from ..host.loop import OffLoop, ask_for_exception, get_loop
from ..host.process import in_forked_child
from ..host.threads import Crew, running_future
from ..host.waits import ENDS_THE_WAIT, LIVENESS_SECONDS, Wait, growing_pauses, wait_for
from ..ranks.peers import Ranks
from ..runs.moving import Moving, Told
from ..runs.retention import Commits
from ..runs.roots import Ahead, Roots
from ..runs.run import Run
from ..runs.tiers_file import NAME as TIERS
from ..storage.interface import Storage
from ..storage.node_folders import OneOfNodes
from ..storage.pace import Pace
from ..storage.place import Anywhere, place_of
from ..storage.store_facts import PROBE
from ..timing import monotonic

if TYPE_CHECKING:
    from ..host.pool import SegmentPool

# Between two tries to move to a place that does not answer.
_FIRST_PAUSE_SECONDS: Final = 1.0
_PAUSE_SECONDS: Final = 60.0
# Between two looks whether a step has arrived that another process moves.
_FIRST_LOOK_SECONDS: Final = 0.2
_LOOK_SECONDS: Final = 5.0
# Between two looks, at the end, whether a place answers.
_LOOK_AT_END_SECONDS: Final = 2.0
# How long memory waits for the next copy. New pages for each copy would be a large part of the processor time of copies
# that follow one another at once, and nothing beside a training that saves once a minute, which gets its memory back.
_KEEP_MEMORY_SECONDS: Final = 10.0

_log = logging.getLogger("async_ckpt")
# Those that copy, until they have finished: the exit waits for them, also if nobody has closed their checkpointer.
_all: set[Tiers] = set()


# Copies a step from one run to another: `loading.catch_up.copy_step`.
CopyStep: TypeAlias = Callable[..., list[int]]


class _Out(NamedTuple):
    """A place that takes no saves for now."""

    since: float
    quiet: Future[None] | None  # calls there that have not returned
    for_good: bool = False  # not all ranks see it
    on_other_rank: bool = False  # this one cannot tell whether it answers there


class Tiers:
    """The places of one checkpointer, which creates it. From any thread.

    The lock guards tables; it is not held over a call to a place.
    """

    def __init__(
        self,
        roots: Roots,
        copy_step: CopyStep,
        pace_of: Callable[[Storage], Pace | None],
        in_flight: Callable[[Run], Collection[int]],
        ranks: Ranks,
    ) -> None:
        """`in_flight` lists the steps that retention leaves alone at a place. Of several `ranks`, rank 0 copies."""
        self.runs, self._calls, self._in_flight = roots.runs, ranks.calls, in_flight
        self._lock = threading.Lock()
        self._copying = {run: threading.Lock() for run in self.runs}
        self._out: dict[Run, _Out] = {}  # places that are passed over; under _lock
        self._num_bytes = 0  # of the last step that was committed
        self._promised: tuple[int, int] | None = None  # the place and the step that the newest handle waits for
        self._near, self._has_committed = self.runs[0], False  # of the newest step; whether this rank put it there
        self._is_finished = False
        self.exit_timeout: float | None = None  # seconds that the interpreter's exit waits for copies
        self.movers = [
            Mover(
                Roots(self.runs[: number + 1]),
                self._copying[run],
                copy_step,
                pace_of,
                in_flight,
                partial(ranks.calls.say_copy, number),
            )
            for number, run in enumerate(self.runs)
            if number
        ]
        lasting = next((number for number, run in enumerate(self.runs) if not run.is_volatile), 0)
        for number, mover in enumerate(self.movers, 1):
            mover.has_ranks = lambda: not ranks.is_alone
            if number > lasting:
                mover.elsewhere = partial(_told_at, mover.run, Moving(mover.run.storage))
            if self.runs[number - 1].is_volatile:  # handles wait for this place
                mover.on_failure = partial(ranks.calls.say_copy, number)
        ranks.calls.hear_commit = lambda number, step: self.note_commit(self.runs[number], step)
        ranks.calls.hear_copy = self._hear_copy

    # --- the place of a save ----------------------------------------------------------------------------------

    def choose(self) -> int:
        """The number of the place that the next save goes to: the first that answers and has room. No request over a
        network is made.
        """
        if len(self.runs) == 1:
            return 0
        full: list[int] = []
        for number, run in enumerate(self.runs):  # one behind that may hang: nobody asks it
            if self._answers(run):
                if self._has_room(run):
                    return number
                full.append(number)
        return full[0] if full else 0

    def _answers(self, run: Run) -> bool:
        """Whether a place may take a save. One that has failed is tried again: a folder at once, if its calls have
        returned, a store after a minute.
        """
        with self._lock:
            out = self._out.get(run)
        if run.refusal:
            return False
        if out is not None and (out.for_good or (out.quiet is not None and not out.quiet.done())):
            return False
        if run.storage.remote or (out is not None and out.on_other_rank):
            return out is None or monotonic() > out.since + _PAUSE_SECONDS
        try:
            if out is None:
                run.storage.names("")
            else:
                probe = f"{PROBE}{os.urandom(4).hex()}"
                run.storage.put_new(probe, b"")
                run.storage.delete(probe)
        except (CheckpointError, OSError):
            return False
        self._note_answer(run)
        return True

    def _has_room(self, run: Run) -> bool:
        free = None if run.storage.remote else run.storage.free_bytes()
        if free is None or free >= self._num_bytes:
            return True
        return run.can_free(self._num_bytes - free, self._in_flight(run))

    def _note_answer(self, run: Run) -> None:
        with self._lock:
            self._out.pop(run, None)

    def failed(
        self,
        run: Run,
        error: BaseException,
        quiet: Future[None] | None = None,
        *,
        num_bytes: int = 0,
        for_good: bool = False,
        on_other_rank: bool = False,
    ) -> None:
        """Note that a save of so many bytes has failed at a place for this reason: until it answers, or has room, saves
        go to another one. `for_good`: not all ranks see the place.
        """
        if self.movers:
            with self._lock:
                is_new, before = run not in self._out, self._out.get(run)
                self._out[run] = _Out(monotonic(), quiet or (before.quiet if before else None), for_good, on_other_rank)
            self._num_bytes = max(self._num_bytes, num_bytes)
            if is_new:
                until = "" if for_good else " until it answers"
                _log.warning("%s takes no saves%s: %s", run.storage.locate(""), until, error)

    def committed(self, run: Run, step: int, num_bytes: int) -> None:
        """Note a commit, and begin to move it."""
        self._num_bytes, self._has_committed = num_bytes, True
        self._note_answer(run)
        self.note_commit(run, step)
        self.wake(after=run)

    def note_commit(self, run: Run, step: int) -> None:
        """Note that a step was committed at a place: those behind it are to get it."""
        if isinstance(run.storage, OneOfNodes):
            _all.add(self)  # rank 0 copies what lies on this node
        self._near = run
        for mover in self.movers[max(0, self.runs.index(run) - 1) :]:
            if mover.run is run:
                mover.arrived(step)
            else:
                mover.want(step)

    def _hear_copy(self, number: int, step: int, why: str | None) -> None:
        mover = self.movers[number - 1]
        if why is None:
            mover.arrived(step)
        else:
            mover.failed_elsewhere(step, why)

    def wake(self, after: Run | None = None) -> None:
        """Begin to move what nearer places hold, to the places behind `after`, or to all."""
        if self.movers:
            _all.add(self)
        first = self.runs.index(after) if after is not None else 0
        for mover in self.movers[first:]:
            mover.wake()

    def arrival(self, number: int, step: int, *, is_patient: bool = True) -> Future[int]:
        """A future of the step by which the further place of this number holds `step`, or a newer one. If it is not
        patient, it fails with the first copy that does.
        """
        arrived = self.movers[number - 1].arrival(step, is_patient=is_patient)
        if not arrived.done():
            self._calls.wait_for_arrival(arrived)
        return arrived

    def promise(self, run: Run, step: int) -> Future[int] | None:
        """The arrival at the first place that is not volatile of a step that was committed at this one. None if that
        is this one, or there is none.

        It fails once a copy was tried in vain, which takes as long as a save there would take to fail; the step may
        arrive all the same.
        """
        first = self.runs.index(run)
        lasting = next((number for number in range(first, len(self.runs)) if not self.runs[number].is_volatile), first)
        self._promised = None if lasting == first else (lasting, step)
        if self._promised is None:
            return None
        arrived = self.arrival(lasting, step, is_patient=False)
        get_loop().begin(self.movers[lasting - 1].watch(arrived))
        return arrived

    def is_kept(self, step: int) -> bool:
        """Whether a place that is not volatile behind others has a step that was committed, or a newer one."""
        return any(mover.has(step) for mover in self.movers if not mover.run.is_volatile)

    @property
    def is_safe(self) -> bool:
        """Whether a place that is not volatile has the newest step, as far as is known, or there is none."""
        behind = [mover for mover in self.movers if not mover.run.is_volatile]
        return not (self._near.is_volatile and behind) or any(mover.missing() is None for mover in behind)

    @property
    def has_lost(self) -> bool:
        """Whether a reboot would lose the newest step, which this process has committed."""
        return self._has_committed and not self.is_safe

    def next_mover(self, run: Run) -> Mover | None:
        """The mover to the place behind this one, which may get copies in the pass of a save."""
        at = self.runs.index(run)
        return self.movers[at] if at < len(self.movers) else None

    def copying(self, run: Run) -> threading.Lock:
        """The lock under which steps are copied to a place: two copies would write the same object."""
        return self._copying[run]

    # --- what is where ----------------------------------------------------------------------------------------

    def held(self, run: Run) -> set[int]:
        """The steps that must stay at a place, since they are being moved, or since a place behind it would keep them
        for good; the latter while two more saves fit.
        """
        held = {mover.moving for mover in self.movers if mover.moving is not None}
        behind = self.movers[self.runs.index(run) :]
        free = run.storage.free_bytes() if behind else None
        if free is None or free > 2 * self._num_bytes:
            held.update(*(mover.wants(run.root.known) for mover in behind))
        return held

    def behind(self) -> list[str]:
        """The steps that further places lack, in words. Nothing is asked."""
        return [words for mover in self.movers if (words := mover.lag())]

    # --- the end ----------------------------------------------------------------------------------------------

    def finish(self, timeout: float | None = None, *, say: Callable[[str], None] = _log.warning) -> list[str]:
        """Move the newest step everywhere, without a limit of bandwidth, and stop. Returns in words what is left, which
        Ctrl-C has it say instead.

        A place that does not answer at this moment is not tried again, nor waited for if one that lasts has the step.
        """
        if self._is_finished:
            return []
        self._is_finished = True
        begun, wait = monotonic(), Wait("", ENDS_THE_WAIT, say=say)
        try:
            if self in _all and not self._is_read_by_others:
                for mover in self.movers:
                    mover.begin_end()
                    get_loop().begin(mover.ask(get_loop().off_loop))
            for arrived in self._awaited():  # rank 0 ends these waits
                while not wait_for(arrived, LIVENESS_SECONDS) and (timeout is None or monotonic() < begun + timeout):
                    wait.goes_on(lambda: f"copies from this node: {self._behind_in_words()}")
            while going_on := [mover for mover in self.movers if mover.is_going_on(must_answer=self.is_safe)]:
                if timeout is not None and monotonic() > begun + timeout:
                    break
                wait_for(going_on[0].ended, LIVENESS_SECONDS)
                wait.goes_on(lambda: f"a copy: {self._behind_in_words()}")
        except KeyboardInterrupt:
            for left in self._left():
                say(f"async_ckpt: {left}")
            raise
        finally:
            for mover in self.movers:
                mover.stop()
            _all.discard(self)
        return self._left()

    def _left(self) -> list[str]:
        """The steps that further places lack at the end, in words, and what to do."""
        left = [(mover, words) for mover in self.movers if (words := mover.lag())]
        move = "" if self._is_read_by_others else f"`async-ckpt move {self._near.storage.locate('')} --once` or "
        then = f"; {move}the next start of the training copies it"
        return [words if isinstance(mover.error, ConflictError) else words + then for mover, words in left]

    def _behind_in_words(self) -> str:
        return "; ".join(self.behind()) or "all steps have arrived, and the places are brought up to date"

    @property
    def _is_read_by_others(self) -> bool:
        return any(isinstance(run.storage, OneOfNodes) for run in self.runs)

    def _awaited(self) -> list[Future[int]]:
        """The arrivals of what rank 0 copies, from the disk of this node or since a handle waits for it."""
        if self._is_read_by_others:
            missing = enumerate((mover.missing() for mover in self.movers), start=1)
            return [self.arrival(n, step) for n, step in missing if step is not None]
        return [] if self in _all or self._promised is None else [self.arrival(*self._promised)]


class Places:
    """The places of one save, for `SaveHandle.at`."""

    def __init__(self, tiers: Tiers, step: int) -> None:
        self._tiers, self._step = tiers, step

    def awaited(self) -> str:
        """The reason why a handle waits after the commit, in words."""
        return "; ".join(self._tiers.behind()) or "cleaning up"

    def at(self, place: Anywhere, saved: Future[Any]) -> Future[int]:
        """See `SaveHandle.at`. `saved` is done when the save is committed."""
        wanted, runs = place_of(place).storage().locate(""), self._tiers.runs
        number = next((number for number, run in enumerate(runs) if run.storage.locate("") == wanted), None)
        if number is None:
            given = ", ".join(run.storage.locate("") for run in runs)
            raise ValueError(f"{place_of(place).shown} is not a place of this run, whose places are {given}")
        arrived: Future[int] = running_future()

        def follow(ended: Future[int]) -> None:
            if (error := ended.exception()) is not None:
                arrived.set_exception(error)
            else:
                arrived.set_result(ended.result())

        def committed(_: object) -> None:
            if (error := Future.exception(saved)) is not None:
                arrived.set_exception(error)
            elif number:
                self._tiers.arrival(number, self._step).add_done_callback(follow)
            elif Future.result(saved).path.startswith(wanted):
                arrived.set_result(self._step)
            else:
                why = f"{wanted}: step {self._step} was committed at another place, since this one did not answer"
                arrived.set_exception(StorageUnavailableError(why, path=wanted))

        Future.add_done_callback(saved, committed)
        return arrived


def all_tiers() -> list[Tiers]:
    """The places of all checkpointers of this process that were not closed."""
    return list(_all)


def _told_at(run: Run, moving: Moving, step: int | None, num_bytes: int) -> Told | None:  # noqa: ARG001
    """The word of another process that moves steps to a place, which was just listed."""
    return moving.other() if run.root.is_told_of_mover else None


@in_forked_child
def _forget() -> None:
    global _all
    _all = set()


class _Stopped(CheckpointError):
    """The move was ended, since nobody waits for it any more."""


class _Expected(NamedTuple):
    """A step that somebody waits for, since so many wants; if patient, also after a copy has failed."""

    since: int
    step: int
    arrived: Future[int]
    is_patient: bool


class Mover:
    """Brings one place up to date with those before it. `Tiers` creates it. One thread moves; any may call."""

    def __init__(
        self,
        roots: Roots,
        copying: threading.Lock,
        copy_step: CopyStep,
        pace_of: Callable[[Storage], Pace | None],
        in_flight: Callable[[Run], Collection[int]],
        on_arrival: Callable[[int], None],
    ) -> None:
        """`roots` are the nearer places, and last the one that is brought up to date."""
        self.run, self._roots, self._copying = roots.runs[-1], roots, copying
        self._copy_step, self._pace_of, self._in_flight = copy_step, pace_of, in_flight
        self._crew = Crew("move", 1, background=True)
        self._on_arrival = on_arrival
        self.on_failure: Callable[[int, str], None] = lambda step, why: None  # noqa: ARG005
        self.has_ranks: Callable[[], bool] = lambda: False  # whether other ranks write there, too
        # Asked before a step is moved, with the bytes moved so far: who does that, if it is another process.
        self.elsewhere: Callable[[int | None, int], Told | None] = lambda step, num_bytes: None  # noqa: ARG005
        self._is_elsewhere = False  # as it was answered last
        self.hurries = True  # at the end, no limit of bandwidth holds
        self.moving: int | None = None
        # The memory of copies, and when the last one has ended. Only the thread that moves knows them.
        self._pool: SegmentPool | None = None
        self._copied_at = 0.0
        self._looked_again: int | None = None  # the step that could not be copied at the last try
        self.ended: Future[None] = running_future()  # nothing is moved any more
        self._num_bytes = 0  # that were copied
        self._followed_bytes: Callable[[], int] = int  # of the last copy in the pass of a save
        self._seen_bytes, self._seen_at = (-1, 0), 0.0  # by whom waits
        self._answered_at = 0.0  # when the place has answered last, after the end has begun
        self._bell = threading.Event()  # ends a pause
        self._lock = threading.Lock()  # guards all below
        self._is_wanted = self._is_running = False  # something is to be copied; is being copied, or about to be
        self._is_ending = self._is_stopped = False
        self._num_wants = 0  # calls of `want`: what was found before the last one is old
        self._newest: int | None = None  # the newest step there, as far as is known
        self._wanted: int | None = None  # the newest step that the nearer places had
        self._followed: tuple[int, Future[None]] | None = None  # the step that a save copies there in its own pass
        self._first: int | None = None  # the last of these steps
        self._waiting: list[_Expected] = []
        self._num_tried = self._num_failed = 0  # the wants that the last copy, and the last to fail, took account of
        self._error: CheckpointError | None = None  # why the last move has failed

    @property
    def shown(self) -> str:
        return self.run.storage.locate("").rstrip("/") or "/"

    def may_follow(self, step: int) -> bool:
        """Whether the place is idle, answers, and wants a step."""
        with self._lock:
            return self._may_follow(step)

    def _may_follow(self, step: int) -> bool:
        is_idle = not (self._is_running or self._is_stopped or self._followed or self._error or self._is_elsewhere)
        # Room is made before a copy, and compression takes its time: a save does not wait for either.
        if self.run.keep.free is not None or self.run.compresses:
            return False
        return is_idle and (self._newest is None or step > self._newest) and self.run.takes(step)

    def begin_following(self, step: int, written: Callable[[], int]) -> bool:
        """Take a copy in the pass of a save, of which so many bytes are `written`, if the place may have one.
        `end_following` follows if this is True.
        """
        with self._lock:
            begins = self._may_follow(step)
            if begins:
                self._followed, self._followed_bytes = (step, running_future()), written
            return begins

    def end_following(self, step: int) -> None:
        """A copy in the pass of a save has ended; what there is of it is found."""
        with self._lock:
            followed = self._followed if self._followed and self._followed[0] == step else None
            if followed is not None:
                self._followed, self._first = None, step
        if followed is not None:
            followed[1].set_result(None)

    def want(self, step: int) -> None:
        """A nearer place has just this step, its newest: what the place has of it, and above, does not count."""
        with self._lock:
            self._wanted = step
            self._num_wants += 1
            if self._newest is not None and self._newest >= step:
                self._newest = None

    def wants(self, commits: Commits) -> set[int]:
        """The steps, of these commits, that the place would keep for good and may lack."""
        with self._lock:
            newest = self._newest
        return {step for step in self.run.kept_for_good(commits) if newest is None or step > newest}

    def wake(self) -> None:
        """Move what there is to move."""
        with self._lock:
            if self._is_stopped:
                return
            self._is_wanted = True
            begins, self._is_running = not self._is_running, True
            self._bell.set()
        if begins:
            self._crew.submit(self._work, self._refused)

    @property
    def error(self) -> CheckpointError | None:
        """Why the last move has failed."""
        return self._error

    def begin_end(self) -> None:
        """Have `ended` resolve once the newest step is there, or the place does not answer."""
        self._answered_at = monotonic()
        with self._lock:
            self._is_ending = True
        self._crew.hurry()
        self.wake()

    async def ask(self, off_loop: OffLoop) -> None:
        """Until the end, see whether the place answers."""
        while not (self.ended.done() or self._is_stopped):
            with suppress(CheckpointError, OSError):
                await off_loop(partial(self.run.storage.exists, TIERS))
                self._answered_at = monotonic()
            await asyncio.wait([asyncio.wrap_future(self.ended)], timeout=_LOOK_AT_END_SECONDS)

    def is_going_on(self, *, must_answer: bool = False) -> bool:
        """Whether the end is to be waited for: it has begun, and copies make progress, or the place answers."""
        is_away = must_answer and monotonic() > self._answered_at + waits.ANSWER_SECONDS
        return self._is_ending and not (self.ended.done() or is_away or self._is_still())

    def _is_still(self) -> bool:
        """Whether what is copied has made no progress for long, as far as whoever asks again and again has seen."""
        uploads = self._followed is not None and self.run.storage.remote  # which ends by itself
        num_bytes = self._num_bytes, self._followed_bytes()
        if uploads or not self._is_running or num_bytes != self._seen_bytes:
            self._seen_bytes, self._seen_at = num_bytes, monotonic()
        return monotonic() > self._seen_at + waits.FINISH_SECONDS

    async def watch(self, arrived: Future[int]) -> None:
        """Fail those who wait for the place if a call there does not return. Requests to a store end by themselves."""
        future = asyncio.wrap_future(arrived)
        future.add_done_callback(ask_for_exception)
        while not (self.run.storage.remote or (await asyncio.wait([future], timeout=_LOOK_SECONDS))[0]):
            if self._is_still():
                why = f"a copy there has made no progress for {waits.FINISH_SECONDS:.0f} s"
                self._failed(self._num_wants, StorageUnavailableError(why, path=self.shown))

    def stop(self) -> None:
        """End a move that is under way."""
        with self._lock:
            self._is_stopped = True
            is_running, self._is_ending = self._is_running, True
            self._bell.set()
        self._crew.stop()
        if is_running:
            get_loop().note_call(self.ended)
        self._give_up(self._left())

    def arrival(self, step: int, *, is_patient: bool = True) -> Future[int]:
        """A future of the step by which the place holds `step`, or a newer one. If it is not patient, it fails with the
        next copy that does, or the last, if that one knew of all that was wanted.
        """
        arrived: Future[int] = running_future()
        with self._lock:
            newest, is_over = self._newest, self._is_stopped or isinstance(self._error, ConflictError)
            is_waiting = not is_over and (newest is None or newest < step)
            if is_waiting:
                self._waiting.append(_Expected(self._num_wants, step, arrived, is_patient))
        if newest is not None and newest >= step:
            arrived.set_result(newest)
        elif not is_waiting:
            arrived.set_exception(self._error if isinstance(self._error, ConflictError) else self._left())
        elif self._error is not None:  # the last copy may have known of the step
            self._failed(self._num_failed, self._error)
        return arrived

    def _failed(self, num_wants: int, error: CheckpointError) -> None:
        """A copy that took account of so many wants has failed: those who are not patient wait no longer."""
        with self._lock:
            ending = [one for one in self._waiting if not one.is_patient and one.since <= num_wants]
            self._waiting = [one for one in self._waiting if one not in ending]
        for one in ending:
            with suppress(InvalidStateError):  # rank 0 was lost meanwhile
                one.arrived.set_exception(self._lacks(one.step, error))

    def failed_elsewhere(self, step: int, why: str) -> None:
        """Rank 0 could not copy this step, its newest: if it is the newest here, too, some wait no longer."""
        if self._wanted is None or self._wanted <= step:
            self._failed(self._num_wants, StorageUnavailableError(why, path=self.shown))

    def has(self, step: int) -> bool:
        """Whether the place is known to have a step, or a newer one."""
        newest = self._newest
        return newest is not None and newest >= step

    def _left(self) -> StorageUnavailableError:
        """The error for those who wait for the place, when nothing is copied there any more."""
        return StorageUnavailableError(self.lag() or f"{self.shown}: no step is copied there any more", path=self.shown)

    def _lacks(self, step: int, error: CheckpointError) -> CheckpointError:
        """The error for those who wait for a step that could not be copied, and will be."""
        words = f"{self._behind(step, error)}; it is copied once the place answers"
        return type(error)(words, **{"path": self.shown, **vars(error)})

    def missing(self) -> int | None:
        """The newest step that the place lacks; None if none is known to be missing."""
        with self._lock:
            wanted, newest = self._wanted, self._newest
        return None if newest is not None and wanted is not None and newest >= wanted else wanted

    def lag(self) -> str:
        """The step that the place lacks, in words; empty if none is known to be missing."""
        wanted = self.missing()
        return "" if wanted is None else self._behind(wanted, self._error)

    def _behind(self, step: int, error: CheckpointError | None) -> str:
        newest, why = self._newest, "" if error is None else f": {error}"
        has = "no step yet" if newest is None else f"step {newest}"
        return f"step {step} is not at {self.shown}, which has {has}{why}"

    # --- on the mover's thread --------------------------------------------------------------------------------

    def _refused(self, error: RuntimeError) -> None:
        with self._lock:
            self._is_running = False
        self._give_up(error)
        self._end()

    def _work(self) -> None:
        pauses = growing_pauses(_FIRST_PAUSE_SECONDS, _PAUSE_SECONDS)
        while True:
            with self._lock:
                if not self._is_wanted or self._is_stopped:
                    self._is_running = False
                    break
                self._is_wanted = False
                self._bell.clear()  # whoever rings from now on ends the pause
            try:
                self._bring_up()
                error = None
            except CheckpointError as failed:
                error = failed
            except Exception as failed:  # a client may raise anything, and nobody must wait for a thread that has ended
                why = failed if isinstance(failed, OSError) else repr(failed)
                error = StorageUnavailableError(f"{self.shown}: {why}", path=self.shown)
            self.moving = None
            with self._lock:
                is_news, self._error, self._num_failed = str(error) != str(self._error), error, self._num_tried
                tries_again = isinstance(error, StorageUnavailableError) and not (self._is_ending or self._is_stopped)
                self._is_wanted |= tries_again
            if error is None:
                pauses = growing_pauses(_FIRST_PAUSE_SECONDS, _PAUSE_SECONDS)
            elif is_news and not isinstance(error, _Stopped):
                _log.warning("%s is not up to date: %s", self.shown, error)
            if isinstance(error, ConflictError):
                self._give_up(error)
            elif error is not None and not isinstance(error, _Stopped):
                self._failed(self._num_failed, error)
                self.on_failure(self._wanted or 0, str(error))
            if error is not None:
                self._free_memory()  # of which a request may still hold some
            if tries_again:
                self._bell.wait(next(pauses))
        self._end()
        if self._pool is not None and not self._is_stopped:  # the next `wake`, or `stop`, ends the wait
            self._bell.wait(max(0.0, self._copied_at + _KEEP_MEMORY_SECONDS - monotonic()))
        if not self._is_running:
            self._free_memory()

    def _free_memory(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def _end(self) -> None:
        with self._lock:
            ends = self._is_ending and not self._is_running and not self.ended.done()
        if ends:
            self.ended.set_result(None)

    def _bring_up(self) -> None:
        """Move steps until there is none to move, or wait until another process has."""
        pauses = growing_pauses(_FIRST_LOOK_SECONDS, _LOOK_SECONDS)
        while True:
            self._check()
            first = self._wait_for_follower()
            self._num_tried = num_wants = self._num_wants
            ahead = self._roots.ahead(self.run, is_last=self._is_ending, first=first)
            if self._roots.are_taken:
                self._roots.refuse_strangers(self.run)
            here = max((step for step, holders in ahead.holders.items() if self.run in holders), default=None)
            with self._lock:
                self._wanted = max(ahead.holders, default=None)
                is_news = here is not None and here != self._newest
            if here is not None:
                if is_news:  # it was not moved by this process
                    self._roots.check_taken(self.run)
                    self._found(here)
                self.arrived(here, num_wants)
            told = self.elsewhere(ahead.step, self._num_bytes)
            if told is not None and self._is_ending and ahead.step is not None and not self.run.takes(ahead.step):
                told = None  # the last step, which only this process knows to be the last
            if here is not None and is_news and self._is_elsewhere:
                self._release(here)
            self._is_elsewhere = told is not None
            if ahead.step is None:
                return
            if told is None:
                with self._copying:
                    self._move(ahead.step, ahead, num_wants)
            else:
                self.moving, self._num_bytes = told.step, told.num_bytes
                self._free_memory()
                self._bell.wait(next(pauses))
                self._bell.clear()
                self.run.root.forget([ahead.step])  # the other process may replace it

    def _wait_for_follower(self) -> int | None:
        """Wait while a save copies its step there in its own pass. Returns the last such step, which comes first: its
        archive is there, or those of other ranks are.
        """
        with self._lock:
            followed = self._followed
        while followed is not None and not wait_for(followed[1], LIVENESS_SECONDS):
            self._check()
        return self._first

    def _move(self, step: int, ahead: Ahead, num_wants: int) -> None:
        from ..storage.bulk import new_pool  # most runs have one place

        begun, holders = monotonic(), [run for run in ahead.holders[step] if run is not self.run]
        with self._of(step):
            if self._roots.are_taken:
                self._roots.take(self.run, step)
            self._pool = self._pool or new_pool()
            errors: list[CheckpointError] = []
            for source in holders:
                try:
                    self._make_room(source, step)
                    self._copy_step(
                        source,
                        self.run,
                        step,
                        check=self._check,
                        background=not self._is_ending,
                        pace=None if self._is_ending and self.hurries else self._pace_of(self.run.storage),
                        retires=ahead.stale,
                        on_bytes=self._count,
                        pool=self._pool,
                    )
                    break
                except (NotCommittedError, StepExistsError) as error:
                    # Retention was faster, or another process has committed the step there: look again, but not at once
                    # for the same step.
                    if self._looked_again == step:
                        raise StorageUnavailableError(str(error), path=self.shown) from error
                    self._looked_again = step
                    return
                except (CorruptCheckpointError, StorageUnavailableError) as error:
                    errors.append(error)  # another place may hold it whole
            else:
                raise errors[0]
        self._copied_at = monotonic()
        self.arrived(step, num_wants)
        self._follow_up(step, self._copied_at - begun)

    def _make_room(self, source: Run, step: int) -> None:
        if self.run.keep.free is not None:
            manifest = source.manifest(step)
            in_flight = {*self._in_flight(self.run), *(lent.step for lent in manifest.elsewhere)}
            self.run.make_room(step, manifest.num_bytes, in_flight=in_flight)

    def _follow_up(self, step: int, seconds: float) -> None:
        """After a step has arrived: the tracker, the history and retention, also where the step was held for this."""
        run = self.run
        run.announce(step, in_flight=self._in_flight(run))
        if run.has_start:
            run.sweeper.sweep_once(has_ranks=self.has_ranks())
        for one in self._roots.runs:
            one.events.note("moved", step, place=self.shown, total_seconds=seconds)
        run.retain(step, replaced=None, in_flight=self._in_flight(run))
        self._release(step)
        run.write_events()

    def _found(self, step: int) -> None:
        """The newest step there was moved by another process, or an earlier one."""

    def _release(self, step: int) -> None:
        """Have the nearer places delete what they held until this step has arrived."""
        for one in self._roots.runs[-2::-1]:
            if one.has_start:
                one.retain(step, replaced=None, in_flight=self._in_flight(one))

    @contextmanager
    def _of(self, step: int) -> Iterator[None]:
        self.moving = step
        try:
            yield
        finally:
            self.moving = None

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes

    def _check(self) -> None:
        if self._is_stopped:
            raise _Stopped(f"{self.shown}: the move was ended")

    def arrived(self, step: int, num_wants: int | None = None) -> None:
        """The place has this step, which is the newest there. `num_wants`: how many `want` calls this takes account of;
        by default all.
        """
        with self._lock:
            is_newest = num_wants is None or num_wants == self._num_wants
            num_wants = self._num_wants if num_wants is None else num_wants
            is_news = is_newest and step != self._newest
            if is_newest:
                self._newest = step
            here = [one for one in self._waiting if one.since <= num_wants and one.step <= step]
            self._waiting = [one for one in self._waiting if one not in here]
        for one in here:
            with suppress(InvalidStateError):  # rank 0 was lost meanwhile
                one.arrived.set_result(step)
        if is_news:
            self._on_arrival(step)

    def _give_up(self, error: Exception) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for one in waiting:
            with suppress(InvalidStateError):
                one.arrived.set_exception(error)
