"""Staging: from the tensors of one instant to filled segments.

In: tensors and the cut of their archive. Out: segments, handed on one by one as they are filled.
Knows nothing of: files, digests, commits.

The segment is the unit of work. Segments without deferred bytes are filled before `begin` returns (copies from devices
are then enqueued, and the training stream waits for them); the others by background threads, while a gate keeps the
optimizer off. A segment with both kinds is filled in two goes, and held in between as far as the pool can spare it.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final

import torch

from ..backends import device_of, is_capturing, is_dense
from ..errors import SaveAbandonedError, TornSnapshotError
from ..format.layout import Piece, SegmentPlan
from ..host.limits import num_cpus
from ..host.memory import Segment
from ..host.pool import LIVENESS_SECONDS, Lease, SegmentPool
from ..host.threads import Submits
from ..host.waiting import ENDS_THE_CALL, ENDS_THE_WAIT, Completion, Wait
from ..report import sized
from ..spans import NO_TRACE, Clock, Trace
from ..spec import MIB, TensorSpec
from .device import Alias, Device, dense_blocks, memmove
from .guard import Gate, Holds
from .jobs import Job, append, split
from .tripwires import Tripwires

# A copy of hundreds of MB saturates a host's memory with few threads.
_MAX_COPIERS: Final = 8
_WORTH_A_HELPER_BYTES: Final = 64 * MIB

Put = Callable[[int, Lease], None]


class Snapshot(Holds):
    """The staging of one save: begun on the caller's thread, ended on a background one.

    `put` gets (segment number, lease) as each segment is filled, from several threads. `check` raises when the save
    has failed elsewhere. `completion` resolves when the copy is complete and nothing was torn. `what` is what people
    read that this is.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        tensors: list[torch.Tensor],
        segments: Sequence[SegmentPlan],
        *,
        order: int,
        deferred: Mapping[int, torch.Tensor],
        gates: Sequence[Gate],
        num_tail: int,
        pool: SegmentPool,
        crew: Submits,
        clock: Clock,
        put: Put,
        check: Callable[[], None],
        trace: Trace = NO_TRACE,
        frozen: frozenset[int] = frozenset(),
        after: Sequence[Future[None]] = (),
        what: str = "a copy",
        waited_for_by: str = "handle.wait_staged()",
    ) -> None:
        self._specs, self._tensors = specs, tensors
        self._order, self._deferred, self._gates = order, deferred, gates
        self._pool, self._crew, self._clock = pool, crew, clock
        self._put, self._check, self._trace = put, check, trace
        self._waited_for_by = waited_for_by  # what the caller is told to call
        self.completion: Future[None] = Completion(self._told)
        self._what = what
        self._num_bytes = sum(segment.num_bytes for segment in segments)
        self._copied_bytes = 0  # under _changed
        self.stage_seconds = 0.0
        self._begun = clock()
        # `num_tail` segments are kept by the drain until all others are written; at least one must stay free.
        may_hold = min(pool.max_segments // 2, pool.max_segments - num_tail - 1)
        # `frozen` tensors change no more, and have their bytes `after` other copies have ended.
        self._frozen, self._after = frozen, after
        self._now, self._later = split(segments, frozen.union(deferred), may_hold)
        # Set up by `_look_at_tensors`, then only read, by all copying threads.
        self._pointers = [0] * len(tensors)
        self._dense = [False] * len(tensors)
        # As at `save`: a parameter may move to another device.
        self._where: list[Device | None] = [None] * len(tensors)
        self._aliases: dict[int, Alias] = {}  # what is deferred is read through these
        self._alive: list[Any] = []
        self.keeps: object = None  # what must not go before the last copy has ended
        self._devices: dict[torch.device, Device] = {}
        self._tripwires: Tripwires | None = None
        # Taking a job and its lease is one step: memory that goes to a later segment first could all end in a sink
        # that waits for the earlier one.
        self._taking = threading.Lock()
        self._changed = threading.Condition()
        self._num_filling = 0  # under _changed, like all below
        self._num_copying = 1  # segments that devices still copy to; and one until all copies are enqueued
        self._error: BaseException | None = None
        self._ended = False
        self._released = False  # every copy is done, or enqueued on its device
        self._held_since: list[float] = []  # appended to without _changed
        self._held_seconds = 0.0
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()  # has something in it once it is released

    # --- the caller's thread ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Copy, or enqueue the copy of, all that must not wait. Returns when the caller may go on.

        A failure ends in `completion`; only what is not an Exception (Ctrl-C) is raised as well.
        """
        try:
            self._look_at_tensors()
            if self._after and self._needs_frozen_now():
                self._wait_for_frozen()
            for device in self._devices.values():
                device.follow_training()
            if self._deferred:
                self._tripwires = Tripwires(self._aliases, self._tensors, self._deferred, self._devices)
            if self._now or not self._later:
                self._fill_now()
            for device in self._devices.values():
                device.hold_training()
            if self._later:
                for gate in self._gates:
                    gate.close(self)
                self._crew.submit(self._fill_later, refused=self._end)
        except Exception as error:
            self._end(error)
        except BaseException as error:
            # A task of asyncio must not end in one of these: it would end the loop.
            self.give_up(interrupted(error))
            raise

    def _fill_now(self) -> None:
        """Have the crew fill what must not wait, and wait for that: an interrupt ends the wait, and no copy halfway."""
        outcome: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def fill() -> None:
            try:
                self._fill(self._now, self._num_helpers())
                if not self._later:
                    self._all_enqueued()
            except BaseException as error:
                outcome.put(error)
            else:
                outcome.put(None)

        self._crew.submit(fill, refused=outcome.put)
        wait = Wait("", ENDS_THE_CALL)
        while True:
            try:
                error = outcome.get(timeout=LIVENESS_SECONDS)
                break
            except queue.Empty:
                self._check_alive()
                wait.goes_on(self._told)
        if error is not None:
            raise error

    def hold(self) -> None:
        """Keep an optimizer's step back: this thread until every copy is enqueued, then its streams until they end.

        Without a lock: whoever is interrupted here must not be while it holds one.
        """
        if (tripwires := self._tripwires) is not None:
            tripwires.look_at_versions()
        with self._trace.span("guard"):
            if not self._released:
                self._held_since.append(self._clock())
                wait = Wait("in optimizer.step()", ENDS_THE_WAIT)
                while not self._released:
                    try:
                        self._bell.put(self._bell.get(timeout=LIVENESS_SECONDS))  # it rings for all who wait
                    except queue.Empty:
                        wait.goes_on(self._told)
        if self._devices and not self.completion.done():
            if is_capturing():
                self.completion.exception()  # an event from outside must not get into the graph: wait here
            else:
                for device in self._devices.values():
                    device.hold_training()

    @property
    def stall_seconds(self) -> float:
        """How long the guard has held the thread, and the copies the streams, so far."""
        return self._held_seconds + sum(device.stall_seconds() for device in self._devices.values())

    def _look_at_tensors(self) -> None:
        for i, tensor in enumerate(self._tensors):
            self._dense[i] = dense = i in self._deferred or is_dense(tensor)
            if (there := device_of(tensor)) is not None:
                if there not in self._devices:
                    self._devices[there] = Device(there)
                self._where[i] = self._devices[there]
                self._devices[there].keep(tensor)
            elif dense:
                self._pointers[i] = tensor.data_ptr()
        for i in sorted(self._deferred):
            self._aliases[i] = Alias(self._tensors[i])
        if self._devices or self._deferred:
            # Storages, not tensors: a Parameter's `.data` may be replaced while its old memory is being copied.
            self._alive = [t.untyped_storage() for i, t in enumerate(self._tensors) if i not in self._aliases]

    def _wait_for_frozen(self) -> None:
        for copied in self._after:
            copied.result()

    def _needs_frozen_now(self) -> bool:
        return not self._frozen or any(
            piece.tensor in self._frozen for job in self._now for piece in job.pieces
        )

    def _num_helpers(self) -> int:
        """Threads worth having beside the first: none to enqueue device copies, which is one thread's work."""
        if self._devices:
            on_host = sum(
                s.num_bytes for s, pointer in zip(self._specs, self._pointers, strict=True) if pointer
            )
            if on_host < _WORTH_A_HELPER_BYTES:
                return 0
        return min(_MAX_COPIERS, num_cpus()) - 1

    # --- filling, on several threads --------------------------------------------------------------------------

    def _fill(self, jobs: Sequence[Job], num_helpers: int, *, late: bool = False) -> None:
        """Fill all jobs, with this thread and helpers from the crew; returns when the last one is filled.

        `late`: `save` has returned, and memory may go that is still to be copied.
        """
        todo = deque(jobs)
        for _ in range(min(num_helpers, len(jobs) - 1)):
            # Without it, this thread copies more.
            self._crew.submit(lambda: self._copy(todo, late), refused=lambda _: None)
        self._copy(todo, late)
        with self._changed:
            while self._num_filling:
                self._changed.wait(LIVENESS_SECONDS)
            if self._error:
                raise self._error

    def _copy(self, todo: deque[Job], late: bool) -> None:
        while True:
            self._taking.acquire()
            with self._changed:
                if self._error or not todo:
                    self._taking.release()
                    return
                self._num_filling += 1
            try:
                try:
                    jobs = self._take(todo)
                finally:
                    self._taking.release()
                with self._trace.span("stage", segment=jobs[0].number):
                    self._fill_run(jobs, late)
            except BaseException as error:
                with self._changed:
                    self._error = self._error or error
            finally:
                with self._changed:
                    self._num_filling -= 1
                    self._changed.notify_all()

    def _take(self, todo: deque[Job]) -> list[Job]:
        """The next job, with its lease; of what a device copies, all that can be had in adjacent memory."""
        jobs = [todo.popleft()]
        if jobs[0].lease is not None:
            return jobs
        most = self._pool.max_run if self._devices else 1
        while len(jobs) < most and todo and todo[0].lease is None and todo[0].number == jobs[-1].number + 1:
            jobs.append(todo.popleft())
        leases = self._pool.lease_run(
            (self._order, jobs[0].number),
            len(jobs),
            pin=next(iter(self._devices), None),
            check=self._check_alive,
        )
        for job, lease in zip(jobs, leases, strict=False):
            job.lease = lease
        todo.extendleft(reversed(jobs[len(leases) :]))
        return jobs[: len(leases)]

    def _fill_run(self, jobs: Sequence[Job], late: bool) -> None:
        """Fill segments that lie one behind the other. A tensor is then one copy from its device, whichever it is in."""
        run = [job.lease.segment for job in jobs if job.lease is not None]
        on_device: dict[Device, list[Piece]] = {}
        for job, segment in zip(jobs, run, strict=True):
            self._fill_segment(job, segment, segment.begin - run[0].begin, late, on_device)
        into = run[0].joined_to(run[-1])
        for device, pieces in on_device.items():
            self._refuse_gone(pieces)
            for job in jobs:
                job.is_enqueued = True
            event = device.enqueue(into.tensor, pieces, self._tensors, self._dense, self._aliases)
            for job in jobs:
                job.events.append((device, event))
            # Memory that is freed from now on is lent to nobody before it is copied; any before may have been.
            self._refuse_gone(pieces)
        for job in jobs:
            if job.rest:
                job.pieces, job.literals, job.rest = job.rest, (), ()
            else:
                with self._changed:
                    self._num_copying += 1
                self._hand_on_when_done(job)

    def _fill_segment(
        self, job: Job, segment: Segment, begin: int, late: bool, on_device: dict[Device, list[Piece]]
    ) -> None:
        """Copy what is on the host. What a device is to copy is added for that; there the segment begins at `begin`."""
        for at, data in job.literals:
            segment.view[at : at + len(data)] = data
        pointers, address = self._pointers, segment.address
        aliases = self._aliases if late else {}
        for piece in job.pieces:
            target, number, source, length = piece
            pointer = pointers[number]
            if pointer:
                alias = aliases.get(number)
                if alias is None:
                    memmove(address + target, pointer + source, length)
                elif not alias.copy_to(address + target, source, length):
                    raise self._torn((number,))
            elif (device := self._where[number]) is not None:
                append(on_device.setdefault(device, []), Piece(begin + target, number, source, length))
            else:
                for offset, block in dense_blocks(self._tensors[number], source, source + length):
                    at = target + offset - source
                    segment.tensor[at : at + block.numel()].copy_(block)

    def _hand_on_when_done(self, job: Job) -> None:
        """Hand a segment on when the last of its copies has ended."""
        if not job.events:
            self._hand_on(job)
            self._one_less()
            return
        device, event = job.events.pop()

        def wait() -> None:
            try:
                with self._trace.span("copy", segment=job.number):
                    device.wait(event)
                self._hand_on_when_done(job)
            except BaseException as error:
                self._end(error)

        device.in_turn(wait, refused=self._end)

    def _refuse_gone(self, pieces: Iterable[Piece]) -> None:
        aliases = self._aliases
        gone = [p.tensor for p in pieces if p.tensor in aliases and not aliases[p.tensor].is_there()]
        if gone:
            raise self._torn(gone)

    def _hand_on(self, job: Job) -> None:
        lease = self._lease_of(job)
        if lease is not None:
            with self._changed:
                self._copied_bytes += job.num_bytes
            self._put(job.number, lease)

    def _lease_of(self, job: Job) -> Lease | None:
        """Take the lease out of a job, which one thread alone can."""
        with self._changed:
            lease, job.lease = job.lease, None
        return lease

    def _told(self) -> str:
        """What this is and how far it is, for whoever waits for it."""
        return f"{self._what}: {sized(self._copied_bytes)} of {sized(self._num_bytes)} copied"

    def _check_alive(self) -> None:
        if self._error:
            raise self._error
        self._check()

    # --- background -------------------------------------------------------------------------------------------

    def _fill_later(self) -> None:
        try:
            self._wait_for_frozen()
            # One processor stays with the training.
            self._fill(self._later, min(_MAX_COPIERS // 2, max(1, num_cpus() - 1)) - 1, late=True)
            self._all_enqueued()
        except BaseException as error:
            self._end(error)

    def _all_enqueued(self) -> None:
        if self._tripwires:
            self._tripwires.look_at_bytes()
        self._release_gates()
        self._one_less()

    def _one_less(self) -> None:
        with self._changed:
            self._num_copying -= 1
            ended = self._num_copying == 0
        if ended:
            self._complete()

    def _complete(self) -> None:
        try:
            torn: Sequence[int] = ()
            if (tripwires := self._tripwires) is not None:
                tripwires.look_at_versions()
                torn = tripwires.torn()
            self._end(self._torn(torn) if torn else None)
        except BaseException as error:
            self._end(error)

    def _torn(self, numbers: Iterable[int]) -> TornSnapshotError:
        """What to raise of these tensors, and of all that have lost their memory by now."""
        gone = {i for i, alias in self._aliases.items() if not alias.is_there()}
        names = tuple(self._specs[i].dotted for i in sorted(gone.union(numbers)))
        return TornSnapshotError(
            f"{', '.join(names[:5])}{' and others' if len(names) > 5 else ''} changed or was freed outside of the "
            "guarded optimizer's step() while being copied; leave guard= out, or wait until all is copied: "
            f"{self._waited_for_by}",
            names=names,
        )

    def _release_gates(self) -> None:
        with self._changed:
            if self._released:
                return
            self._released = True
            now = self._clock()
            self._held_seconds = sum(now - since for since in self._held_since)
        self._bell.put(None)

    def give_up(self, error: Exception) -> None:
        """End it, if it has not ended."""
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        """Let everyone go. Only the first call counts."""
        with self._changed:
            if self._ended:
                return
            self._ended = True
            self._error = self._error or error
            while self._num_filling:  # a copy under way must not go on into memory that is given back
                self._changed.wait(LIVENESS_SECONDS)
        if error is not None:
            # No copy may still be writing into a segment that is given back.
            quiet = all(device.is_quiet() for device in self._devices.values())
            for job in (*self._now, *self._later):
                if (lease := self._lease_of(job)) is not None:
                    if quiet or not job.is_enqueued:
                        lease.release()
                    else:
                        lease.leak()
        self._release_gates()
        for gate in self._gates:
            gate.open(self)
        self._now, self._later, self._tensors, self._alive, self._tripwires = [], [], [], [], None
        # A handle may be kept for long.
        self._specs, self._pointers, self._dense, self._where = [], [], [], []
        self._aliases, self._deferred, self.keeps = {}, {}, None
        self.stage_seconds = self._clock() - self._begun
        if error is None:
            self.completion.set_result(None)
        else:
            self.completion.set_exception(error)

    def __repr__(self) -> str:
        state = "staged" if self.completion.done() else "held" if self._held_since else "staging"
        return f"<Snapshot {self._order} {state}>"


def interrupted(cause: BaseException) -> SaveAbandonedError:
    """What a save fails with whose call was interrupted."""
    error = SaveAbandonedError("the call of save was interrupted; earlier checkpoints are intact")
    error.__cause__ = cause
    return error
