"""Host copies: the second form of staging, for code that needs tensors rather than a file.

In: the tensors of one instant. Out: tensors on the host, whose memory stays while anything refers to them. Knows
nothing of: how the copies are used.

A copy has one buffer of exact size, which is cut into segments only so that a `Snapshot` can fill it, with its streams,
guard and tripwires. Storages are copied, not tensors, so that tensors which shared memory share it again.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from ..backends import is_dense
from ..format.layout import cut, slices
from ..host.limits import spare_memory_bytes
from ..host.memory import HostBuffer, Segment
from ..host.pool import Lease
from ..host.threads import Crew, is_library_thread
from ..host.waits import ENDS_THE_CALL, LIVENESS_SECONDS, Wait
from ..report import sized
from ..spec import SEGMENT_BYTES, TensorSpec, align_up
from ..timing import monotonic
from .device import bytes_of, first_device
from .filler import StagingHost
from .guard import Optimizers, deferrable
from .snapshot import Snapshot
from .tensors import ANY_COPY, SourceTensors, Wording

# For vector loads; CUDA's own allocations have the same alignment.
_ALIGNMENT: Final = 512
_MAX_IDLE: Final = 8

_log: Final = logging.getLogger("async_ckpt")


@dataclass(eq=False)
class LentBuffer:
    """A buffer on loan, with the facts by which the memory of its copy is counted."""

    num_bytes: int
    is_held: bool
    buffer: HostBuffer = field(init=False)


class BufferPool:
    """The reusable buffers of host copies. Thread-safe. `saving.kept_memory` owns one for the process.

    Copies in progress use at most half of the free memory together; the next copy waits. Memory that other code keeps
    after the end of a copy is not counted. A copy that is `held`, with no end in sight, is refused instead of waiting,
    and counts until nothing refers to it. At most twice the memory that was ever needed at one time is kept for later
    copies, which is enough for several that differ in size.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        # Finalizers change both, perhaps on a thread that holds the lock: each change is one atomic call of C.
        self._idle: deque[HostBuffer] = deque()
        self._lent: set[LentBuffer] = set()
        # Guards additions to `_lent`, and all fields below. Buffers are made and freed without it.
        self._changed = threading.Condition()
        self._most_bytes = 0
        self._sharers: list[Callable[[], None]] = []  # replaced as a whole, under _changed

    @property
    def is_shared(self) -> bool:
        return bool(self._sharers)

    def share(self, let_go: Callable[[], None]) -> None:
        """Make copies in shared memory from now on. `let_go` is called when memory is short, to drop copies."""
        with self._changed:
            self._sharers = [*self._sharers, let_go]

    def unshare(self, let_go: Callable[[], None]) -> None:
        """Undo `share`."""
        with self._changed:
            self._sharers = [other for other in self._sharers if other != let_go]
        if not self.is_shared:
            for buffer in [buffer for buffer in self._idle.copy() if buffer.fd is not None]:
                with suppress(ValueError):  # another thread has taken it
                    self._idle.remove(buffer)
                    buffer.free()

    def take(
        self,
        num_bytes: int,
        *,
        held: bool = False,
        device: torch.device | None = None,
        max_bytes: int | None = None,
        shared: bool = False,
    ) -> LentBuffer:
        """Wait for a buffer of at least this size, near `device`.

        A single copy never waits. If it is `held`, raises MemoryError instead of waiting; `max_bytes` is then the limit
        of all held copies. With `shared`, the buffer is an ordinary one if the system refuses shared memory.
        """
        loan, wait = LentBuffer(num_bytes, held), Wait("", ENDS_THE_CALL)
        if held and not self._has_room(loan, max_bytes):
            for let_go in self._sharers:
                let_go()
            gc.collect()  # copies in reference cycles are still counted
        while not self._is_counted(loan, max_bytes):
            wait.goes_on(
                lambda: f"{sized(num_bytes)} of host memory, while earlier copies hold {sized(self._bytes(held=False))}"
            )
        try:
            loan.buffer = self._fitting(num_bytes, shared) or self._new(num_bytes, device, shared)
        except BaseException:
            self._lent.discard(loan)
            raise
        return loan

    def lend(self, num_bytes: int, *, max_bytes: int | None = None, shared: bool = False) -> torch.Tensor:
        """A held tensor of bytes. Its memory is returned when nothing refers to it any more. Raises as `take` does."""
        loan = self.take(max(1, num_bytes), held=True, max_bytes=max_bytes, shared=shared)
        return torch.frombuffer(self.array_over(loan), dtype=torch.uint8)[:num_bytes]

    def array_over(self, loan: LentBuffer) -> Any:
        """An array to which tensors in the buffer refer. When the last of them is freed, the pool gets the buffer."""
        array = loan.buffer.array()
        weakref.finalize(array, self._give_back, loan).atexit = False
        return array

    def _is_counted(self, loan: LentBuffer, max_bytes: int | None) -> bool:
        """Count a copy. If another copy must end first, waits for a short time and returns False."""
        with self._changed:
            # A callback, or a function that runs on a copy, would wait for itself.
            may_wait = not is_library_thread() and self._bytes(held=False) > 0
            if (loan.is_held or may_wait) and not self._has_room(loan, max_bytes):
                if loan.is_held:
                    raise self._refusal(loan, max_bytes)
                self._changed.wait(LIVENESS_SECONDS)
                return False
            self._lent.add(loan)
            self._most_bytes = max(self._most_bytes, self.lent_bytes)
            return True

    def end(self, loan: LentBuffer) -> None:
        """Note that a copy has ended. Memory that is still in use counts only if the copy is held."""
        if loan.is_held:
            return
        self._lent.discard(loan)
        # A finalizer must not wait for the lock. Copies that wait also look again after a timeout.
        if self._changed.acquire(blocking=False):
            try:
                self._changed.notify_all()
            finally:
                self._changed.release()

    @property
    def lent_bytes(self) -> int:
        """The memory of all copies at this moment."""
        return self._bytes(held=False) + self._bytes(held=True)

    def _bytes(self, *, held: bool) -> int:
        return sum(loan.num_bytes for loan in self._lent.copy() if loan.is_held is held)

    def _has_room(self, loan: LentBuffer, max_bytes: int | None) -> bool:
        return self._bytes(held=True) + loan.num_bytes <= self._limit(max_bytes)

    def _limit(self, max_bytes: int | None) -> int:
        """The limit for all held copies and one more: the limit given by the call, or the free memory."""
        return self._bytes(held=True) + self._idle_bytes() + spare_memory_bytes() if max_bytes is None else max_bytes

    def _refusal(self, loan: LentBuffer, max_bytes: int | None) -> MemoryError:
        held_bytes = self._bytes(held=True)
        others = f", beside {held_bytes:,} of others, open or still read" if held_bytes else ""
        limit_name = "half of the free host memory is" if max_bytes is None else "host_bytes allows"
        return MemoryError(
            f"the snapshot needs {loan.num_bytes:,} bytes{others}, and {limit_name} {self._limit(max_bytes):,}; close "
            "other snapshots and wait for their readers, leave out what you do not need, or raise host_bytes"
        )

    def _give_back(self, loan: LentBuffer) -> None:
        """Return a buffer that nothing refers to any more. Called by a finalizer."""
        buffer = loan.buffer
        if os.getpid() != self._pid or buffer.is_leaked:  # a forked child owns none of the memory
            return
        self._lent.discard(loan)
        if buffer.fd is not None and not self.is_shared:
            buffer.free()
            return
        self._idle.append(buffer)
        with suppress(IndexError):  # another thread has taken the last one
            while len(self._idle) > _MAX_IDLE or self._idle_bytes() > 2 * self._most_bytes:
                self._idle.popleft().free()

    def release(self) -> None:
        """Return the buffers that are not in use to the system."""
        with suppress(IndexError):
            while True:
                self._idle.popleft().free()

    def _fitting(self, num_bytes: int, shared: bool) -> HostBuffer | None:
        """The smallest idle buffer of this kind that is large enough, but not more than twice as large."""
        idle = [s for s in self._idle.copy() if (s.fd is not None) == shared]
        fitting = [s for s in idle if num_bytes <= s.num_bytes <= 2 * num_bytes]
        for buffer in sorted(fitting, key=lambda s: s.num_bytes):
            with suppress(ValueError):  # another thread has taken it
                self._idle.remove(buffer)
                return buffer
        return None

    def _new(self, num_bytes: int, device: torch.device | None, shared: bool) -> HostBuffer:
        if num_bytes > spare_memory_bytes():
            self.release()
        if shared:
            try:
                return HostBuffer(num_bytes, device, shared=True)
            except OSError as error:
                _log.warning(
                    "%s of memory that other processes of this host can map are not available (%s); their readers take "
                    "versions from the root",
                    sized(num_bytes),
                    error,
                )
        return HostBuffer(num_bytes, device)

    def _idle_bytes(self) -> int:
        return sum(buffer.num_bytes for buffer in self._idle.copy())

    def __repr__(self) -> str:
        return f"<BufferPool {self.lent_bytes:,} bytes lent, {len(self._idle)} buffers idle>"


class _BufferSegments:
    """The segments of one buffer.

    They are lent to the snapshot that fills the buffer, each once, and received from it.
    """

    num_tail = 0

    def __init__(self, buffer: HostBuffer, num_bytes: int) -> None:
        self._buffer = buffer
        self._segments = [
            Segment(buffer, begin, min(begin + SEGMENT_BYTES, num_bytes))
            for begin in range(0, num_bytes, SEGMENT_BYTES)
        ]
        self.max_segments = 2 * len(self._segments) + 2
        self.max_run = len(self._segments)

    def lease_run(self, order: tuple[int, int], num_segments: int, **_: Any) -> list[Lease]:
        return [Lease(self, segment) for segment in self._segments[order[1] :][:num_segments]]

    def take_back(self, segments: Sequence[Segment]) -> None:
        """Do nothing: the memory belongs to the tensors."""

    def write_off(self, _: Segment) -> None:
        self._buffer.leak()

    def put(self, _: int, lease: Lease) -> None:
        lease.release()

    def check(self) -> None:
        """Do nothing: a copy in memory has no other part that could fail."""


class _SourceStorage:
    """One storage to copy: by a tensor that covers it, or as bytes."""

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        storage = tensor.untyped_storage()
        self.num_bytes = storage.nbytes()
        self.name = name
        self.whole = _covers(tensor)
        self.tensor = tensor.detach() if self.whole else bytes_of(storage, tensor.device)
        self.at = 0

    def replace_by(self, tensor: torch.Tensor, name: str) -> None:
        """Copy the storage by this tensor if it covers the storage: a guard knows only tensors."""
        if not self.whole and _covers(tensor):
            self.tensor, self.name, self.whole = tensor.detach(), name, True


class HostCopy:
    """A copy of ordinary tensors (with their own dense memory, on the CPU or CUDA) on the host.

    `tensors` are the copies, in order, with the same shapes, strides, offsets and sharing. Their bytes are there when
    `completion` has resolved. A held snapshot, a save of copies or a DCP stager creates it, calls `begin` on the
    caller's thread, and `release` when it no longer needs the copies.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        names: Sequence[str],
        *,
        optimizers: Optimizers,
        memory: BufferPool,
        crew: Crew,
        held: bool = False,
        max_bytes: int | None = None,
        wording: Wording = ANY_COPY,
    ) -> None:
        sources: dict[tuple[torch.device, int, int], _SourceStorage] = {}
        of_each: list[_SourceStorage] = []
        for tensor, name in zip(tensors, names, strict=True):
            storage = tensor.untyped_storage()
            key = tensor.device, storage.data_ptr(), storage.nbytes()
            source = sources.get(key)
            if source is None:
                source = sources[key] = _SourceStorage(tensor, name)
            source.replace_by(tensor, name)
            of_each.append(source)
        self._memory = memory
        parts = list(sources.values())
        self.num_bytes = _place(parts)
        device = first_device(source.tensor for source in parts)
        self._loan = memory.take(
            max(1, self.num_bytes), held=held, device=device, max_bytes=max_bytes, shared=memory.is_shared
        )
        owner, buffer = memory.array_over(self._loan), self._loan.buffer
        try:
            if device is not None and not buffer.pinned:
                buffer.lock_by(crew, device)
            segments = _BufferSegments(buffer, self.num_bytes)
            pieces = cut(((part.at, part.num_bytes, i) for i, part in enumerate(parts)), SEGMENT_BYTES)
            self.snapshot = Snapshot(
                _to_copy(parts, optimizers, wording),
                slices(self.num_bytes, SEGMENT_BYTES, pieces, ()),
                segments,
                StagingHost(segments, crew.submit, monotonic),
                optimizers=optimizers,
            )
            self.tensors = _rebuilt(tensors, of_each, owner)
            # The owner may drop the copies while they are being filled.
            self.snapshot.keeps = self.tensors
        except BaseException:
            self.release()
            raise

    @property
    def completion(self) -> Future[None]:
        return self.snapshot.completion

    def begin(self) -> None:
        """On the caller's thread: copy, or enqueue the copy of, everything that must not wait."""
        self.snapshot.begin()

    def release(self) -> None:
        """Drop the copies, so that the next copy may have the memory. Idempotent."""
        self.tensors = []
        self._memory.end(self._loan)

    def __repr__(self) -> str:
        return f"<HostCopy {self.num_bytes:,} bytes, {self.snapshot!r}>"


def _place(parts: Sequence[_SourceStorage]) -> int:
    """Assign each storage its place in the buffer. Returns the total size."""
    at = 0
    for part in parts:
        part.at = at
        at = align_up(at + part.num_bytes, _ALIGNMENT)
    return at


def _to_copy(parts: Sequence[_SourceStorage], optimizers: Optimizers, wording: Wording) -> SourceTensors:
    sources = [part.tensor for part in parts]
    return SourceTensors(
        [TensorSpec((part.name,), "uint8", (part.num_bytes,)) for part in parts],
        sources,
        deferred={i: owner for i, owner in deferrable(optimizers, sources).items() if parts[i].whole},
        wording=wording,
    )


def _covers(tensor: torch.Tensor) -> bool:
    """True if a tensor covers its whole storage, in the order of memory."""
    return is_dense(tensor) and tensor.storage_offset() == 0 and tensor.nbytes == tensor.untyped_storage().nbytes()


def _rebuilt(tensors: Sequence[torch.Tensor], of_each: Sequence[_SourceStorage], owner: Any) -> list[torch.Tensor]:
    storages: dict[int, torch.UntypedStorage] = {}
    copies = []
    with torch.inference_mode(False), torch.no_grad():
        for tensor, source in zip(tensors, of_each, strict=True):
            # Tensors of one storage share one again. Different storages may lie at the same address, and do so again.
            key = tensor.untyped_storage()._cdata
            storage = storages.get(key)
            if storage is None:
                storage = storages[key] = _storage(owner, source)
            copies.append(_like(tensor, storage))
    return copies


def _storage(owner: Any, source: _SourceStorage) -> torch.UntypedStorage:
    if not source.num_bytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage()
    data = torch.frombuffer(owner, dtype=torch.uint8, count=source.num_bytes, offset=source.at)
    return data.untyped_storage()


def _like(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    copy = torch.empty(0, dtype=tensor.dtype, device="cpu")
    copy.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    if tensor.is_conj():
        copy = torch.conj(copy)
    if tensor.is_neg():
        copy = torch._neg_view(copy)
    if type(tensor) is torch.Tensor:
        return copy.requires_grad_(tensor.requires_grad)
    return torch.Tensor._make_subclass(type(tensor), copy, tensor.requires_grad)
