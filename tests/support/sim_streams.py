"""Streams that do their work when a schedule says so, and know what should have waited for what.

Nothing sleeps, and nothing runs by itself: work runs in the call that enqueues it, or in one that waits for it. Which of
the work that may run does so, the schedule says:

- "early": copies as soon as their waits allow, before all else;
- "late": training before copies, which run only when somebody waits for them and nothing else can go on;
- a number: either, drawn by that seed.

Whatever the schedule: two accesses to the same memory of which one is a write, on two streams of which neither has
waited for the other, are a race, and are noted.
"""

from __future__ import annotations

import bisect
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from racing import PATIENCE

# What each piece of work takes by the device's clock: more than any call of a test takes by that of the host.
WORK_SECONDS = 1000.0

Clock = dict[int, int]  # by stream: how much of its work is before


class Broken(RuntimeError):
    """What a device says from a device-side assert on, whatever it is asked."""

    def __init__(self) -> None:
        super().__init__("CUDA error: device-side assert triggered (simulated)")


class Access:
    """Bytes that a piece of work reads or writes."""

    __slots__ = ("at", "begin", "end", "is_write", "stream", "told")

    def __init__(self, begin: int, end: int, *, is_write: bool) -> None:
        self.begin, self.end, self.is_write = begin, end, is_write
        self.stream = self.at = 0
        self.told = ""

    def is_before(self, clock: Clock) -> bool:
        return clock.get(self.stream, 0) >= self.at

    def conflicts(self, other: Access) -> bool:
        return (self.is_write or other.is_write) and self.begin < other.end and other.begin < self.end


class _Work:
    __slots__ = ("does", "number", "waits_for")

    def __init__(self, number: int, does: Callable[[], None] | None, waits_for: Callable[[], bool] | None) -> None:
        self.number, self.does, self.waits_for = number, does, waits_for


class Queue:
    """The work of one stream, in order."""

    def __init__(self, number: int, device: int, *, of_training: bool) -> None:
        self.number, self.device, self.of_training = number, device, of_training
        self.work: deque[_Work] = deque()
        self.num_enqueued = self.num_done = 0
        self.clock: Clock = {number: 0}

    def may_go_on(self) -> bool:
        return bool(self.work) and (self.work[0].waits_for is None or self.work[0].waits_for())


class Mark:
    """A point in a stream, which an event is recorded at."""

    def __init__(self, queue: Queue) -> None:
        self.queue, self.number, self.clock = queue, queue.num_enqueued, dict(queue.clock)
        self.seconds = 0.0  # when it was reached, by the device's clock

    def is_reached(self) -> bool:
        return self.queue.num_done >= self.number


class Scheduler:
    """All streams of all devices. From any thread."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self._pid = os.getpid()
        self.num_asked_elsewhere = 0
        self.queues: list[Queue] = []  # under `changed`, like all below
        self._num_queues = 0
        self.restart("early")

    def restart(self, schedule: str | int) -> None:
        """As if every device had just been made whole, with nothing under way. Streams of the library stay, as it keeps them."""
        self.schedule = schedule
        self._draw = random.Random(schedule if isinstance(schedule, int) else 0)
        self.queues = [queue for queue in self.queues if not queue.of_training]
        for queue in self.queues:
            queue.work.clear()
            queue.num_done = queue.num_enqueued
            queue.clock = {queue.number: queue.num_enqueued}
        self.broken: set[int] = set()
        self.races: list[str] = []
        self.failures: list[str] = []
        self._waiting: set[int] = set()  # threads that wait for work that cannot go on; of this start alone
        self.num_operations = 0
        self._num_run = 0
        # What any thread has waited for: they are taken for one.
        self._seen: Clock = {}
        self._is_ahead = False
        self._kernels: list[list[bool]] = []  # which run until somebody waits for them
        self._accesses: dict[int, list[Access]] = {}  # by the address of the block that they are in
        self._blocks: list[int] = []
        self._is_advancing = False

    @property
    def num_waiting(self) -> int:
        """Threads that wait for work that cannot go on."""
        return len(self._waiting)

    def new_queue(self, device: int, *, of_training: bool) -> Queue:
        with self.changed:
            self._num_queues += 1
            self.queues.append(Queue(self._num_queues, device, of_training=of_training))
            return self.queues[-1]

    def know_block(self, address: int) -> None:
        """Accesses are kept by the block that they begin in."""
        with self.changed:
            if address not in self._accesses:
                bisect.insort(self._blocks, address)
                self._accesses[address] = []

    # --- enqueuing --------------------------------------------------------------------------------------------

    def enqueue(
        self, queue: Queue, does: Callable[[], None] | None, accesses: Sequence[Access] = (), told: str = ""
    ) -> None:
        with self.changed:
            self.check(queue.device)
            self._put(queue, does, None)
            for access in accesses:
                access.stream, access.at, access.told = queue.number, queue.num_enqueued, told
                self._note(access, queue.clock)
            self._advance()

    def _put(self, queue: Queue, does: Callable[[], None] | None, waits_for: Callable[[], bool] | None) -> None:
        queue.num_enqueued += 1
        for stream, number in self._seen.items():
            queue.clock[stream] = max(queue.clock.get(stream, 0), number)
        queue.clock[queue.number] = queue.num_enqueued
        queue.work.append(_Work(queue.num_enqueued, does, waits_for))
        self.num_operations += 1

    def _note(self, access: Access, clock: Clock) -> None:
        at = bisect.bisect_right(self._blocks, access.begin) - 1
        if at < 0:
            return
        before = self._accesses[self._blocks[at]]
        left = []
        for other in before:
            is_before = other.is_before(clock)
            if not is_before and access.conflicts(other):
                self.races.append(f"{other.told} on stream {other.stream} and {access.told} on {access.stream}")
            covered = access.begin <= other.begin and other.end <= access.end
            if not (is_before and covered and (access.is_write or not other.is_write)):
                left.append(other)
        left.append(access)
        self._accesses[self._blocks[at]] = left

    def mark(self, queue: Queue) -> Mark:
        with self.changed:
            self.check(queue.device)
            self._put(queue, None, None)
            mark = Mark(queue)
            queue.work[-1].does = lambda: setattr(mark, "seconds", self._num_run * WORK_SECONDS)
            self._advance()
            return mark

    def wait_in(self, queue: Queue, mark: Mark) -> None:
        """What is enqueued from now on waits for the mark."""
        with self.changed:
            self.check(queue.device)
            self._put(queue, None, mark.is_reached)
            for stream, number in mark.clock.items():
                queue.clock[stream] = max(queue.clock.get(stream, 0), number)
            self._advance()

    def run_kernel(self, queue: Queue) -> list[bool]:
        """A kernel that runs until it is let go; or, outside of `ahead`, until somebody waits for it."""
        going: list[bool] = [True]
        with self.changed:
            self._put(queue, None, lambda: not going[0])
            if not self._is_ahead:
                self._kernels.append(going)
        return going

    def let_go(self, going: list[bool]) -> None:
        with self.changed:
            going[0] = False
            self._advance()
            self.changed.notify_all()

    # --- running ----------------------------------------------------------------------------------------------

    @property
    def belongs_here(self) -> bool:
        return os.getpid() == self._pid

    def check_process(self) -> None:
        if not self.belongs_here:
            self.num_asked_elsewhere += 1
            raise RuntimeError("cannot re-initialize the device in a forked process (simulated)")

    def check(self, device: int) -> None:
        self.check_process()
        if device in self.broken:
            raise Broken()

    def break_down(self, device: int) -> None:
        """A device-side assert: nothing of what is enqueued there runs any more."""
        with self.changed:
            self.broken.add(device)
            for queue in self.queues:
                if queue.device == device:
                    queue.work.clear()
            self.changed.notify_all()

    def _advance(self) -> None:
        """Run what the schedule lets run without anybody waiting."""
        if self._is_advancing:
            return
        self._is_advancing = True
        try:
            while (queue := self._next()) is not None:
                self._run(queue)
        finally:
            self._is_advancing = False
        self.changed.notify_all()

    def _next(self) -> Queue | None:
        able = [queue for queue in self.queues if queue.may_go_on()]
        if self.schedule == "early":
            return min(able, key=lambda queue: queue.of_training, default=None)
        if self.schedule == "late":
            return next((queue for queue in able if queue.of_training), None)
        return self._draw.choice(able) if able and self._draw.random() < 0.7 else None

    def _run(self, queue: Queue) -> None:
        work = queue.work.popleft()
        self._num_run += 1
        try:
            if work.does is not None:
                work.does()
        except Exception as error:  # as an assert of a kernel would
            self.failures.append(f"{error!r}")
            self.break_down(queue.device)
        queue.num_done = work.number

    def wait(self, mark: Mark, *, timeout: float = PATIENCE) -> None:
        """Have work run until the mark is reached, and see it."""
        with self.changed:
            while not mark.is_reached():
                self.check(mark.queue.device)
                if not self._go_on(mark):
                    timeout -= 0.02
                    assert timeout > 0, "a stream waits for what nobody lets go"
                    self._waiting.add(threading.get_ident())
                    self.changed.wait(0.02)
                    self._waiting.discard(threading.get_ident())
            self.check(mark.queue.device)
            self._see(mark)

    def _go_on(self, mark: Mark) -> bool:
        """Run something that brings the mark nearer, training first if copies are late."""
        able = [queue for queue in self.queues if queue.may_go_on()]
        if not able:
            if self._kernels:  # it has run for long enough
                self._kernels.pop(0)[0] = False
                return True
            return False
        if self.schedule == "late":
            queue = min(able, key=lambda queue: (not queue.of_training, queue is not mark.queue))
        elif self.schedule == "early":
            queue = min(able, key=lambda queue: queue.of_training)
        else:
            queue = self._draw.choice(able)
        self._run(queue)
        self.changed.notify_all()
        return True

    def is_reached(self, mark: Mark) -> bool:
        with self.changed:
            self.check(mark.queue.device)
            self._advance()
            if mark.is_reached():
                self._see(mark)
            return mark.is_reached()

    def _see(self, mark: Mark) -> None:
        for stream, number in mark.clock.items():
            self._seen[stream] = max(self._seen.get(stream, 0), number)

    @contextmanager
    def ahead(self, queues: Sequence[Queue]) -> Iterator[None]:
        """Meanwhile a long kernel runs on these streams: what this thread enqueues is enqueued before any of it runs."""
        self._is_ahead = True
        try:
            kernels = [self.run_kernel(queue) for queue in queues]
        finally:
            self._is_ahead = False
        try:
            yield
        finally:
            for going in kernels:
                self.let_go(going)
