"""The places of a run, from near to far: which one takes the next save, and how the others follow.

In: the runs at the places; commits, and failures. Out: a place for each save; the same steps at the places behind it.
Knows nothing of: tensors, saves under way.

A save is committed at one place: the first that answers and has room. Each further place has a mover, which copies to
it the newest step that the nearer places hold, so a slow or absent place delays neither a save nor another place.
Movers only go forward: they skip steps older than the newest step at their place, and write nothing where a start has
committed that this run does not descend from.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any, Final, NamedTuple

from ...errors import CheckpointError, ConflictError, StorageUnavailableError
from ..host.loop import get_loop
from ..host.process import in_forked_child
from ..host.threads import running_future
from ..host.waits import ENDS_THE_WAIT, LIVENESS_SECONDS, Wait, wait_for
from ..ranks.peers import Ranks
from ..runs.mover_file import Announcement, Moving
from ..runs.roots import Roots
from ..runs.run import Run
from ..storage.interface import Storage
from ..storage.node_folders import OneOfNodes
from ..storage.pace import Pace
from ..storage.place import Anywhere, place_of
from ..storage.store_facts import PROBE
from ..timing import monotonic
from .mover import CopyStep, Mover, MovingProcess

# For how long a store takes no saves after one has failed there.
_AWAY_SECONDS: Final = 60.0

_log = logging.getLogger("async_ckpt")
# The `Tiers` that copy, until they have finished: the exit waits for them, even if their checkpointer was not closed.
_all: set[Tiers] = set()


class _Out(NamedTuple):
    """A place that takes no saves for now."""

    since: float
    quiet: Future[None] | None  # resolves when all calls there have returned
    for_good: bool = False  # not all ranks see the place
    on_other_rank: bool = False  # it failed on another rank, so this one cannot see whether it answers


class Tiers:
    """The places of one checkpointer, which creates it. May be called from any thread.

    The lock guards tables; it is not held during a call to a place.
    """

    def __init__(
        self,
        roots: Roots,
        copy_step: CopyStep,
        pace_of: Callable[[Storage], Pace | None],
        in_flight: Callable[[Run], Collection[int]],
        ranks: Ranks,
    ) -> None:
        """`in_flight` lists the steps that retention must not delete at a place. With several ranks, rank 0 copies."""
        self.runs, self._calls, self._in_flight, self._copy_step = roots.runs, ranks.calls, in_flight, copy_step
        self._lock = threading.Lock()
        self._out: dict[Run, _Out] = {}  # places that are skipped; under _lock
        self._num_bytes = 0  # the size of the last committed step
        self._promised: tuple[int, int] | None = None  # the place and the step that the newest handle waits for
        # where the newest step is; whether this rank has committed
        self.near, self._has_committed = self.runs[0], False
        self._is_finished = False
        self.exit_timeout: float | None = None  # seconds that the interpreter's exit waits for copies
        self.movers = [
            Mover(Roots(self.runs[: number + 1]), copy_step, _Training(self.runs, number, pace_of, in_flight, ranks))
            for number in range(1, len(self.runs))
        ]
        ranks.calls.on_commit = lambda number, step: self.note_commit(self.runs[number], step)
        ranks.calls.on_copy = self._note_copy

    # --- the place of a save ----------------------------------------------------------------------------------

    def choose(self) -> int:
        """The number of the place for the next save: the first that answers and has room. Sends no network request."""
        if len(self.runs) == 1:
            return 0
        full: list[int] = []
        # stop at the first good one: a further place may hang when it is asked
        for number, run in enumerate(self.runs):
            if self._answers(run):
                if self._has_room(run):
                    return number
                full.append(number)
        return full[0] if full else 0

    def _answers(self, run: Run) -> bool:
        """True if a place may take a save. A failed folder is tried again at once, a failed store after a minute."""
        with self._lock:
            out = self._out.get(run)
        if run.refusal:
            return False
        if out is not None and (out.for_good or (out.quiet is not None and not out.quiet.done())):
            return False
        if run.storage.remote or (out is not None and out.on_other_rank):
            return out is None or monotonic() > out.since + _AWAY_SECONDS
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
        """Note that a save of `num_bytes` has failed at a place. Until the place answers, or has room, saves go to
        another one. `for_good`: not all ranks see the place. `quiet` resolves when calls that hang there have returned.
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
        """Note a commit, and begin to copy it to further places."""
        self._num_bytes, self._has_committed = num_bytes, True
        self._note_answer(run)
        self.note_commit(run, step)
        self.wake(after=run)

    def note_commit(self, run: Run, step: int) -> None:
        """Note that a step was committed at a place, so that the places behind it lack it."""
        if isinstance(run.storage, OneOfNodes):
            _all.add(self)  # rank 0 copies from this node's disk, so the exit must wait
        self.near = run
        for mover in self.movers[max(0, self.runs.index(run) - 1) :]:
            if mover.run is run:
                mover.arrivals.arrived(step)
            else:
                mover.arrivals.want(step)

    def _note_copy(self, number: int, step: int, why: str | None) -> None:
        arrivals = self.movers[number - 1].arrivals
        if why is None:
            arrivals.arrived(step)
        else:
            arrivals.fail_impatient(why, step)

    def bring(self, run: Run, step: int, attempt: str) -> None:
        """Copy a step to a place where another step that borrows from it is about to be committed, unless the place
        has it, or no place does. Raises the errors of the copy.
        """
        for source in (run, *(other for other in self.runs if other is not run)):
            manifest = source.committed(step)
            if manifest is not None and manifest.attempt == attempt:
                if source is not run:
                    with run.copying:
                        self._copy_step(source, run, step)
                return

    def wake(self, after: Run | None = None) -> None:
        """Begin to copy steps from nearer places to the places behind `after`, or to all."""
        if self.movers:
            _all.add(self)
        first = self.runs.index(after) if after is not None else 0
        for mover in self.movers[first:]:
            mover.worker.wake()

    def arrival(self, number: int, step: int, *, is_patient: bool = True) -> Future[int]:
        """A future that resolves when the further place of this number holds `step`, or a newer one; its result is that
        step. Unless it is patient, it fails with the first copy that fails.
        """
        arrived = self.movers[number - 1].arrivals.arrival(step, is_patient=is_patient)
        if not arrived.done():
            self._calls.wait_for_arrival(arrived)
        return arrived

    def at(self, place: Anywhere, step: int, saved: Future[Any]) -> Future[int]:
        """See `SaveHandle.at`. `saved` is done when the save of `step` is committed."""
        wanted = place_of(place).storage().locate("")
        names = [run.storage.locate("") for run in self.runs]
        if wanted not in names:
            given = ", ".join(names)
            raise ValueError(f"{wanted} is not a place of this run, whose places are {given}")
        number, arrived = names.index(wanted), running_future()

        def follow(ended: Future[int]) -> None:
            if (error := ended.exception()) is not None:
                arrived.set_exception(error)
            else:
                arrived.set_result(ended.result())

        def committed(_: object) -> None:
            if (error := Future.exception(saved)) is not None:
                arrived.set_exception(error)
            elif not any(Future.result(saved).path.startswith(f"{name.rstrip('/')}/") for name in names[: number + 1]):
                why = f"{wanted}: step {step} was committed behind this place, which did not answer or had no room"
                arrived.set_exception(StorageUnavailableError(why, path=wanted))
            elif number:
                self.arrival(number, step).add_done_callback(follow)
            else:
                arrived.set_result(step)

        Future.add_done_callback(saved, committed)
        return arrived

    def promise(self, run: Run, step: int) -> Future[int] | None:
        """The arrival of a step, committed at `run`, at the first place that is not volatile. None if `run` is that
        place, or if no place behind it is lasting.

        The future fails once a copy has been tried without success, which takes as long as a failing save there; the
        step may still arrive later.
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
        """True if a further place that is not volatile has this committed step, or a newer one."""
        return any(mover.arrivals.has(step) for mover in self.movers if not mover.run.is_volatile)

    @property
    def is_safe(self) -> bool:
        """True if a lasting place has the newest step, as far as known, or if there is no lasting place behind."""
        behind = [mover for mover in self.movers if not mover.run.is_volatile]
        return not (self.near.is_volatile and behind) or any(mover.arrivals.missing() is None for mover in behind)

    @property
    def has_lost(self) -> bool:
        """True if this process has committed the newest step, and a reboot would lose it."""
        return self._has_committed and not self.is_safe

    def next_mover(self, run: Run) -> Mover | None:
        """The mover to the place behind `run`, which saves may also copy to directly."""
        at = self.runs.index(run)
        return self.movers[at] if at < len(self.movers) else None

    # --- what is where ----------------------------------------------------------------------------------------

    def held(self, run: Run) -> set[int]:
        """The steps that must stay at a place: being copied, or kept for good behind it (while two more saves fit)."""
        held = {step for mover in self.movers if (step := mover.copier.step) is not None}
        behind = self.movers[self.runs.index(run) :]
        free = run.storage.free_bytes() if behind else None
        if free is None or free > 2 * self._num_bytes:
            for there in (mover.run for mover in behind):
                lasting = there.kept_for_good(run.root.known)
                held.update(step for step in lasting if there.takes(step) and step not in there.root.known)
        return held

    def awaited(self) -> str:
        """The reason why a handle waits after the commit, in words."""
        return "; ".join(self.behind()) or "cleaning up"

    def behind(self) -> list[str]:
        """The steps that further places lack, in words. Asks no place."""
        return [words for mover in self.movers if (words := mover.arrivals.lag())]

    # --- the end ----------------------------------------------------------------------------------------------

    def finish(self, timeout: float | None = None, *, log: Callable[[str], None] = _log.warning) -> list[str]:
        """Copy the newest step to all places, without a bandwidth limit, and stop. Returns in words what is left; after
        Ctrl-C, `log` reports it instead.

        A place that does not answer is not tried again. It is not waited for if a place that is not volatile has the
        step.
        """
        if self._is_finished:
            return []
        self._is_finished = True
        begun, wait = monotonic(), Wait("", ENDS_THE_WAIT, log=log)
        try:
            if self in _all and not self._is_read_by_others:
                for mover in self.movers:
                    mover.begin_end()
                    get_loop().begin(mover.ask())
            for arrived in self._awaited():  # rank 0 resolves these arrivals
                while not wait_for(arrived, LIVENESS_SECONDS) and (timeout is None or monotonic() < begun + timeout):
                    wait.goes_on(lambda: f"copies from this node: {self.awaited()}")
            while going_on := [mover for mover in self.movers if mover.is_going_on(must_answer=self.is_safe)]:
                if timeout is not None and monotonic() > begun + timeout:
                    break
                wait_for(going_on[0].worker.ended, LIVENESS_SECONDS)
                wait.goes_on(lambda: f"a copy: {self.awaited()}")
        except KeyboardInterrupt:
            for left in self._left():
                log(f"async_ckpt: {left}")
            raise
        finally:
            for mover in self.movers:
                mover.stop()
            _all.discard(self)
        return self._left()

    def _left(self) -> list[str]:
        """The steps that further places lack at the end, in words, and what to do."""
        left = [(mover.arrivals.error, words) for mover in self.movers if (words := mover.arrivals.lag())]
        move = "" if self._is_read_by_others else f"`async-ckpt move {self.near.storage.locate('')} --once` or "
        then = f"; {move}the next start of the training copies it"
        return [words if isinstance(error, ConflictError) else words + then for error, words in left]

    @property
    def _is_read_by_others(self) -> bool:
        return any(isinstance(run.storage, OneOfNodes) for run in self.runs)

    def _awaited(self) -> list[Future[int]]:
        """The arrivals that rank 0 copies and this process waits for: from the disk of this node, or for a handle."""
        if self._is_read_by_others:
            missing = enumerate((mover.arrivals.missing() for mover in self.movers), start=1)
            return [self.arrival(n, step) for n, step in missing if step is not None]
        return [] if self in _all or self._promised is None else [self.arrival(*self._promised)]


class _Training(MovingProcess):
    """The process that saves the steps. It alone moves them up to the first lasting place: its handles wait for it."""

    def __init__(
        self,
        runs: Sequence[Run],
        number: int,
        pace_of: Callable[[Storage], Pace | None],
        in_flight: Callable[[Run], Collection[int]],
        ranks: Ranks,
    ) -> None:
        """`number` is the index of the place among `runs`."""
        super().__init__(in_flight)
        self._run, self._number, self._ranks = runs[number], number, ranks
        self._pace = pace_of(self._run.storage)
        lasting = next((number for number, run in enumerate(runs) if not run.is_volatile), 0)
        self._moving = Moving(self._run.storage) if number > lasting else None
        self._is_waited_for = runs[number - 1].is_volatile  # handles wait for this place

    def pace(self, *, is_last: bool) -> Pace | None:
        return None if is_last else self._pace

    def has_ranks(self) -> bool:
        return not self._ranks.is_alone

    def other(self, step: int | None, num_bytes: int) -> Announcement | None:  # noqa: ARG002
        return self._moving.other() if self._moving and self._run.root.has_mover_file else None

    def arrived(self, step: int) -> None:
        self._ranks.calls.announce_copy(self._number, step)

    def failed(self, step: int, why: str) -> None:
        if self._is_waited_for:
            self._ranks.calls.announce_copy(self._number, step, why)


def all_tiers() -> list[Tiers]:
    """The places of all checkpointers of this process that were not closed."""
    return list(_all)


@in_forked_child
def _forget() -> None:
    global _all
    _all = set()
