"""A save, told once from top to bottom. No threads are started here, and nothing is logged.

In: a layout, segments as they are filled, a target. Out: a committed checkpoint and its report.
Knows nothing of: where segments come from, what is in them.

Filled segments do not pass through the story: `Drain` takes them from the copying threads straight to the writing
ones. The story waits for the last, and decides what becomes of the archive.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

from .commit.manifest import Archive
from .errors import CheckpointError
from .format import digests
from .format.layout import Layout
from .report import Destination, Progress, SaveReport
from .snapshot.crew import running_future
from .snapshot.pool import Lease
from .spans import Spans
from .spec import BLOCK_BYTES
from .storage.base import Sink

T = TypeVar("T")


class OffLoop(Protocol):
    """Runs a blocking call somewhere else than on the loop, and waits for it."""

    def __call__(self, fn: Callable[[], T], /) -> Awaitable[T]: ...


class Target(Protocol):
    """Where one save goes, and what makes it true. Blocking calls."""

    path: str

    def open(self, num_bytes: int) -> Sink:
        """Check what can be checked, and begin the object."""

    def commit(self, archive: Archive) -> None:
        """The object is durable: make it the checkpoint."""

    def discard(self) -> None:
        """The object is durable, but committing it failed: remove it, unless it is the checkpoint after all."""

    def afterwards(self) -> None:
        """Retention; the checkpoint is true whatever happens here."""


class Staging(Protocol):
    """What the story wants to know of a snapshot in the making."""

    completion: Future[None]
    stage_seconds: float

    @property
    def stall_seconds(self) -> float: ...


@dataclass(slots=True)
class SaveJob:
    """One save on its way from plan to report."""

    step: int | None
    layout: Layout
    num_tensors: int
    target: Target
    drain: Drain
    spans: Spans
    turn: Future[None] | None  # resolved when the save before this one has been decided
    call_seconds: Future[float]  # resolved when the caller has its handle
    staging: Staging


async def run_save(job: SaveJob, off_loop: OffLoop) -> SaveReport:
    """Write, then commit. Raises what went wrong, after every trace of the attempt is gone."""
    sink: Sink | None = None
    finished = False
    try:
        with job.spans.span("write"):
            sink = await off_loop(lambda: job.target.open(job.layout.file_bytes))
            job.drain.open([sink])
            await asyncio.wrap_future(job.staging.completion)
            await asyncio.wrap_future(job.drain.completed)
            finished = True  # or halfway: visible, and not known to be durable
            await off_loop(sink.finish)
        if job.turn is not None:
            await asyncio.wrap_future(job.turn)
        with job.spans.span("commit"):
            archive = Archive(job.target.path.rpartition("/")[2], job.layout.file_bytes, job.drain.digest)
            await off_loop(lambda: job.target.commit(archive))
    except BaseException as error:
        job.drain.fail(error)
        await asyncio.wrap_future(job.drain.idle)
        if sink is not None:
            await off_loop(sink.abort)
        if finished:
            with suppress(CheckpointError, OSError):  # what is left then is swept by the next process
                await off_loop(job.target.discard)
        raise
    await off_loop(sink.close)
    return _report(job, await asyncio.wrap_future(job.call_seconds))


def _report(job: SaveJob, call_seconds: float) -> SaveReport:
    seconds = job.spans.seconds
    destination = Destination(job.target.path, job.layout.file_bytes, seconds["write"])
    return SaveReport(
        status="committed",
        step=job.step,
        path=job.target.path,
        num_bytes=job.layout.file_bytes,
        num_tensors=job.num_tensors,
        stall_seconds=call_seconds + job.staging.stall_seconds,
        stage_seconds=job.staging.stage_seconds,
        write_seconds=seconds["write"],
        commit_seconds=seconds["commit"],
        total_seconds=job.spans.total(),
        destinations=(destination,),
    )


class Drain:
    """Takes filled segments to every sink: write, digest, give the memory back. From any thread, in any order.

    The segments that hold the digests themselves come last; they are kept until all others are digested.
    After a failure memory is given back unread, so that whoever waits for it goes on.
    """

    def __init__(
        self, layout: Layout, segment_bytes: int, submit: Callable[[Callable[[], None]], None]
    ) -> None:
        self._layout = layout
        self._segment_bytes = segment_bytes
        self._submit = submit
        self._first_tail = layout.digests.data.offset // segment_bytes
        self.num_segments = -(-layout.file_bytes // segment_bytes)
        self._digests = bytearray(digests.num_blocks(layout.digests.data.offset) * digests.DIGEST_BYTES)
        self.digest = ""
        self.completed = running_future()
        self.idle = running_future()
        self._lock = threading.Lock()
        self._sinks: Sequence[Sink] | None = None  # under _lock, like all below
        self._early: list[tuple[int, Lease]] = []
        self._tail: dict[int, Lease] = {}
        self._num_body_left = self._first_tail
        self._num_active = 0
        self._tail_written = False
        self._error: BaseException | None = None
        self._staged_bytes = 0
        self._written_bytes = 0

    @property
    def num_tail(self) -> int:
        """Segments that are kept until the end."""
        return self.num_segments - self._first_tail

    @property
    def progress(self) -> Progress:
        with self._lock:
            return Progress(self._layout.file_bytes, self._staged_bytes, self._written_bytes)

    def check(self) -> None:
        """Raise what made this save fail, if it did."""
        if self._error:
            raise self._error

    def put(self, number: int, lease: Lease) -> None:
        """Segment `number` is filled; the drain releases the lease."""
        with self._lock:
            self._staged_bytes += self._bytes_of(number)
            refused = self._error is not None
            if not refused:
                if number >= self._first_tail:
                    self._tail[number] = lease
                else:
                    self._early.append((number, lease))
        if refused:
            lease.release()
        else:
            self._advance()

    def open(self, sinks: Sequence[Sink]) -> None:
        """There is somewhere to write to."""
        with self._lock:
            self._sinks = sinks
        self._advance()

    def fail(self, error: BaseException) -> None:
        """Give up: writes under way end, no other begins. The first error counts."""
        with self._lock:
            self._error = self._error or error
            leases = [lease for _, lease in self._early] + list(self._tail.values())
            self._early, self._tail = [], {}
            idle = self._num_active == 0
        for lease in leases:
            lease.release()
        if idle:
            self._settle()

    def _advance(self) -> None:
        with self._lock:
            if self._sinks is None:
                return
            ready, self._early = self._early, []
            tail: dict[int, Lease] = {}
            if self._num_body_left == 0 and len(self._tail) == self.num_tail:
                tail, self._tail = self._tail, {}
            self._num_active += len(ready) + bool(tail)
        for number, lease in ready:
            self._submit(lambda number=number, lease=lease: self._write_body(number, lease))  # type: ignore[misc]
        if tail:
            self._submit(lambda: self._write_tail(tail))

    def _write_body(self, number: int, lease: Lease) -> None:
        error: BaseException | None = None
        try:
            self.check()
            # Written first: what the disk does meanwhile costs no processor, and staging is not over yet.
            self._write(number, lease)
            self._digest(number, lease, self._segment_bytes)
        except BaseException as caught:
            error = caught
        lease.release()
        self._leave(error, body=1)

    def _write_tail(self, leases: dict[int, Lease]) -> None:
        error: BaseException | None = None
        try:
            self.check()
            covered, size = self._layout.digests.data.offset, self._segment_bytes
            for number, lease in leases.items():
                self._digest(number, lease, covered - number * size)
            data = memoryview(digests.dump(covered, bytes(self._digests)))
            self.digest = digests.self_digest(bytes(data[-128:]))
            at = covered
            while data:
                number, begin = divmod(at, size)
                length = min(len(data), size - begin)
                leases[number].segment.view[begin : begin + length] = data[:length]
                at, data = at + length, data[length:]
            for number, lease in sorted(leases.items()):
                self._write(number, lease)
        except BaseException as caught:
            error = caught
        for lease in leases.values():
            lease.release()
        self._leave(error, tail=True)

    def _digest(self, number: int, lease: Lease, num_bytes: int) -> None:
        first = number * self._segment_bytes // BLOCK_BYTES
        for i, begin in enumerate(range(0, num_bytes, BLOCK_BYTES)):
            block = lease.segment.view[begin : min(begin + BLOCK_BYTES, num_bytes)]
            at = (first + i) * digests.DIGEST_BYTES
            self._digests[at : at + digests.DIGEST_BYTES] = digests.block_digest(block)

    def _write(self, number: int, lease: Lease) -> None:
        num_bytes = self._bytes_of(number)
        for sink in self._sinks or ():
            sink.write(number * self._segment_bytes, lease.segment.view[:num_bytes])
        with self._lock:
            self._written_bytes += num_bytes

    def _bytes_of(self, number: int) -> int:
        return min(self._segment_bytes, self._layout.file_bytes - number * self._segment_bytes)

    def _leave(self, error: BaseException | None, *, body: int = 0, tail: bool = False) -> None:
        if error is not None:
            self.fail(error)
        # All in one go: the tail may be begun, and done, as soon as the last body segment is counted.
        with self._lock:
            self._num_active -= 1
            self._num_body_left -= body
            self._tail_written |= tail
            settled = self._num_active == 0 and (self._error is not None or self._tail_written)
        if settled:
            self._settle()
        else:
            self._advance()

    def _settle(self) -> None:
        with self._lock:
            if self.completed.done():
                return
            if self._error is None:
                self.completed.set_result(None)
            else:
                self.completed.set_exception(self._error)
            self.idle.set_result(None)

    def __repr__(self) -> str:
        p = self.progress
        return f"<Drain {p.written_bytes:,}/{p.staged_bytes:,}/{p.total_bytes:,} bytes written/staged/total>"
