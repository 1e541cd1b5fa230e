"""Reads from archives into memory: reads are planned, made in large pieces, and copied to the tensors.

In: tensors of archives, and live tensors. Out: filled tensors. Knows nothing of: names, states, runs of bytes.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from ..backends import backend_of, device_of, has_plain_bytes, is_dense
from ..garbage import no_collection
from ..host.limits import num_cpus
from ..host.memory import Segment
from ..host.pool import MIN_SEGMENTS, Lease, SegmentPool
from ..host.process import OnceInProcess
from ..host.threads import Crew, run_together
from ..slicing.boxes import Box, StridedCopy, strided_copies
from ..slicing.slices import Ints
from ..spec import BLOCK_BYTES, DTYPES, MIB, PAGE_BYTES, Extent, align_up
from ..staging.device import INTEGERS, as_integers, flat_bytes, host_pointer, memmove
from .archives.contents import CPU, Contents

# The size of a read: large enough for a disk's full speed, and small enough that a dozen take little memory.
READ_BYTES: Final = 8 * MIB
# The size of a read from the page cache: a block is verified and copied while it is in the processor's caches.
_SHARED_READ_BYTES: Final = BLOCK_BYTES
# The most items that torch copies on the calling thread; torch divides larger copies among its own threads.
_FEW_ITEMS: Final = 32 * 1024 - 1
# More than a disk needs to be busy, since some threads verify and copy while others read.
_MIN_READERS: Final = 12
# Fewer suffice for reads from the page cache: they use the processors, which all ranks share.
_MIN_SHARED_READERS: Final = 4
_MAX_READERS: Final = 16


class Wanted(NamedTuple):
    """Memory to fill with the rectangle of a tensor that begins at `offsets` and has the memory's shape.

    The memory may be on any device, and has the dtype of tensor `number`. `offsets` is None for the whole tensor.
    """

    number: int
    into: torch.Tensor
    offsets: Ints | None = None

    @property
    def box(self) -> Box | None:
        """The box of the tensor that fills this memory; None for the whole tensor."""
        return None if self.offsets is None else Box(self.offsets, tuple(self.into.shape))


# The index of the memory to fill, and a copy from the bytes of a read. Not a class, because there are many.
_Stretch: TypeAlias = tuple[int, StridedCopy]


@dataclass(slots=True)
class Read:
    """One read of an archive: whole digest blocks or pages, up to a buffer's size, and the targets of their bytes."""

    archive: Contents
    extent: Extent
    parts: list[_Stretch]


class Plan(NamedTuple):
    """The memory to fill, and the reads that fill it. `planned` creates a plan for one `fill`."""

    wanted: Sequence[Wanted]
    reads: Sequence[Read]


@no_collection()
def planned(wanted: Iterable[tuple[Contents, Iterable[Wanted]]]) -> Plan:
    """Plan the reads for all requests, and check the headers of the members that they touch.

    Raises CorruptCheckpointError.
    """
    requests: list[Wanted] = []
    files: dict[int, _FilePlan] = {}
    copies = functools.cache(_copies)  # layers of a model have the same shapes
    for archive, items in wanted:
        for item in items:
            tensor = archive.index.tensors[item.number]
            box = Box(item.offsets or (0,) * len(tensor.shape), tuple(item.into.shape))
            for file, piece, held in archive.sources(item.number, box):
                runs = copies(held, piece.box, box, DTYPES[tensor.dtype][0])
                if runs and piece.extent.length:
                    plan = files.setdefault(id(file), _FilePlan(file, [], set()))
                    plan.members.add(piece.member)
                    plan.stretches.extend((len(requests), run.moved(piece.extent.offset)) for run in runs)
            requests.append(item)
    checks = [functools.partial(plan.file.check_members, plan.members) for plan in files.values()]
    run_together("check", checks, max_threads=_MAX_READERS)
    return Plan(requests, [read for plan in files.values() for read in plan.reads()])


def fill(plan: Plan, *, copy: bool = True, pool: SegmentPool | None = None) -> None:
    """Read everything into its memory in parallel, through buffers from `pool` as far as it can spare them.

    With `copy=False` the bytes are only verified. Copies to a device are ordered with its current stream. Raises
    CorruptCheckpointError; tensors that were filled before the error stay filled.
    """
    targets = [_FillTarget(item.into) for item in plan.wanted] if copy else []
    devices = {device for target in targets if (device := device_of(target.flat)) is not None}
    uploads = [_Upload(device, targets) for device in devices]
    for upload in uploads:
        upload.follow_caller()

    def use(read: Read, segment: Segment) -> None:
        read.archive.verify(read.extent.offset, segment.view[: read.extent.length])
        if copy:
            for upload in uploads:
                upload.copy(read, segment)
            _copy_out(read, segment, targets)

    run_reads(plan.reads, use, pin=next(iter(devices), None), pool=pool)
    for upload in uploads:
        upload.hold_caller()
    for target in targets:
        target.finish()


def run_reads(
    reads: Sequence[Read],
    use: Callable[[Read, Segment], None],
    *,
    pin: torch.device | None = None,
    pool: SegmentPool | None = None,
    max_threads: int = _MAX_READERS,
) -> None:
    """Read in parallel, and call `use` for each read on the thread that made the read.

    Each thread has one buffer. Buffers are taken from `pool` as far as it can spare memory. Memory that the pool
    allocates for this is reused by the next save.

    Raises CorruptCheckpointError for an archive that ends too early, and the errors of `use`.
    """
    if not reads:
        return
    fewest = _MIN_SHARED_READERS if any(read.archive.is_shared for read in reads) else _MIN_READERS
    crew = Crew("read", min(max(fewest, num_cpus()), max_threads, len(reads)))
    with _buffers(crew.max_threads, pin, pool) as idle:

        def run(read: Read) -> None:
            buffer = idle.pop()
            try:
                read.archive.read_into(read.extent.offset, buffer.view[: read.extent.length])
                use(read, buffer)
            finally:
                idle.append(buffer)

        try:
            crew.run_all(functools.partial(run, read) for read in reads)
        finally:
            crew.stop()


@contextmanager
def _buffers(num_buffers: int, pin: torch.device | None, pool: SegmentPool | None) -> Iterator[list[Segment]]:
    """A list of buffers: new memory, and then parts of segments that the pool can spare. Threads take the last one.

    New memory is used last, since its pages are only allocated when they are filled.
    """
    per_segment = pool.segment_bytes // READ_BYTES if pool is not None else 0
    own = SegmentPool(READ_BYTES, max_bytes=max(num_buffers, MIN_SEGMENTS) * READ_BYTES)
    leases: list[Lease] = []
    try:
        if pool is not None and per_segment:
            leases += pool.borrow(-(-num_buffers // per_segment), pin=pin)
        lent = [
            lease.segment.part(begin, begin + READ_BYTES)
            for lease in leases
            for begin in range(0, per_segment * READ_BYTES, READ_BYTES)
        ]
        new = own.borrow(num_buffers - len(lent), pin=pin)  # page-locked by one call, since each call takes long
        leases += new
        yield [*(lease.segment for lease in new), *lent]
    finally:
        for lease in leases:
            lease.release()
        own.close()


# One stream per device for all loads. Streams from torch's pool may also be used by other code.
_stream_of: Final[OnceInProcess[torch.device, Any]] = OnceInProcess(
    lambda device: backend_of(device).new_stream(device)
)


def _copy_out(read: Read, segment: Segment, targets: list[_FillTarget]) -> None:
    """Copy a read to its targets on the host."""
    for wanted, run in read.parts:
        target = targets[wanted]
        if target.pointer and run.times > 1 and run.length <= _FEW_ITEMS:  # a longer row is worth a call of its own
            _copy_rows(run, segment, target)
        elif target.pointer:
            for source, into, length, *_ in run.apart():
                memmove(target.pointer + into, segment.address + source, length)


def _copy_rows(run: StridedCopy, segment: Segment, target: _FillTarget) -> None:
    """Copy many short pieces a few at a time: a call for each would hold the GIL too often.

    The bytes are copied as the widest integers that divide all distances, so that one call copies more bytes.
    """
    rows = segment.tensor[run.source : run.source + run.source_bytes]
    into = target.flat[run.target : run.target + (run.times - 1) * run.target_step + run.length]
    width = math.gcd(8, run.length, run.source_step, run.target_step, *_place(rows), *_place(into))
    rows, into = rows.view(INTEGERS[width]), into.view(INTEGERS[width])
    length, source_step, target_step = run.length // width, run.source_step // width, run.target_step // width
    per_copy = _FEW_ITEMS // length
    with torch.inference_mode():  # the target may be an inference tensor
        for first in range(0, run.times, per_copy):
            shape = min(per_copy, run.times - first), length
            piece = rows[first * source_step :].as_strided(shape, (source_step, 1))
            into[first * target_step :].as_strided(shape, (target_step, 1)).copy_(piece)


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """The address and the storage offset of a tensor: a view with wider items requires that both are aligned."""
    return tensor.data_ptr(), int(tensor.storage_offset())


class _Upload:
    """The copies of one `fill` to one device. Its reading threads share it."""

    def __init__(self, device: torch.device, targets: Sequence[_FillTarget]) -> None:
        self._device, self._backend, self._targets = device, backend_of(device), targets
        self._stream = _stream_of(device)
        # Keeps the copies into and out of the scratch buffer together. The stream keeps them in order.
        self._lock = threading.Lock()

    def follow_caller(self) -> None:
        """Order the copies after everything enqueued on the caller's stream so far."""
        self._stream.wait_stream(self._backend.current_stream(self._device))

    def hold_caller(self) -> None:
        """Order everything enqueued on the caller's stream from now on after the copies."""
        self._backend.current_stream(self._device).wait_stream(self._stream)

    def copy(self, read: Read, segment: Segment) -> None:
        """Copy the parts of a read that go to this device, and wait until the device no longer reads the buffer."""
        parts = [
            (self._targets[wanted].flat, run)
            for wanted, run in read.parts
            if self._targets[wanted].device == self._device
        ]
        if not parts:
            return
        ended = self._backend.waiting_event()  # for these copies only
        # In inference mode, since the caller's inference tensors can only be written there.
        with torch.inference_mode(), self._backend.on_stream(self._device, self._stream):
            try:
                for flat, run in parts:
                    if run.times == 1:
                        piece = segment.tensor[run.source : run.source + run.length]
                        flat[run.target : run.target + run.length].copy_(piece, non_blocking=True)
                self._copy_rows([part for part in parts if part[1].times > 1], segment)
            finally:
                ended.record(self._stream)
                ended.synchronize()

    def _copy_rows(self, parts: Sequence[tuple[torch.Tensor, StridedCopy]], segment: Segment) -> None:
        """Copy strided parts: copy the bytes to the device in one piece, and let the device pick the rows out of them.

        For a strided copy from the host, torch would first make a contiguous copy in pageable memory.
        """
        if not parts:
            return
        begin = min(run.source for _, run in parts)
        end = max(run.source + run.source_bytes for _, run in parts)
        with self._lock:
            rows = segment.tensor[begin:end]
            if (scratch := self._scratch) is not None:
                rows = scratch[: end - begin].copy_(rows, non_blocking=True)
            for flat, run in parts:
                shape = run.times, run.length
                # Slice first: `as_strided` counts an explicit offset from the begin of the storage.
                piece = rows[run.source - begin :].as_strided(shape, (run.source_step, 1))
                into = flat[run.target :].as_strided(shape, (run.target_step, 1))
                into.copy_(piece, non_blocking=True)

    @functools.cached_property
    def _scratch(self) -> torch.Tensor | None:
        """A buffer on the device; None if there is no memory left for it. Under `_lock`."""
        with suppress(torch.OutOfMemoryError):
            return torch.empty(READ_BYTES, dtype=torch.uint8, device=self._device)
        return None


class _FillTarget:
    """Memory to fill. A tensor that is not dense, or on a device without a backend, is filled through a dense copy."""

    def __init__(self, tensor: torch.Tensor) -> None:
        tensor = tensor.detach()
        # Autograd detects writes by the version counter, which the copies here do not change.
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
        self._final: torch.Tensor | None = None
        if not is_dense(tensor) or not has_plain_bytes(tensor):
            self._final = tensor
            tensor = _dense_copy_of(tensor)
        self.device = tensor.device
        self.flat = flat_bytes(tensor)
        self.pointer = host_pointer(self.flat)

    def finish(self) -> None:
        if self._final is None:
            return
        with torch.inference_mode():  # required by inference tensors, and allowed for all others
            if self._final.is_conj() or self._final.is_neg():
                self._final.copy_(self.flat.view(self._final.dtype).reshape(self._final.shape))
            else:
                items = as_integers(self._final)
                items.copy_(self.flat.view(items.dtype).reshape(items.shape))


def _dense_copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Dense memory for the items of a tensor, on its device if there is room, else on the host."""
    if device_of(tensor) is not None:
        with suppress(torch.OutOfMemoryError):
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=CPU)


def _copies(held: Box, piece: Box, target: Box, item_bytes: int) -> Sequence[StridedCopy]:
    """The copies from the box `held` of a piece to a target, with offsets from the begin of the piece.

    Bytes between two copies are also read, unless the gap is at least a digest block long.
    """
    common = held.common(target)
    runs = () if common is None else strided_copies(common, piece, target, item_bytes)
    apart = (run.apart() if run.source_step - run.length >= BLOCK_BYTES else (run,) for run in runs)
    return [*itertools.chain.from_iterable(apart)]


class _FilePlan(NamedTuple):
    """The bytes to be read from one file."""

    file: Contents
    stretches: list[_Stretch]
    members: set[int]

    def reads(self) -> list[Read]:
        """Reads of whole digest blocks (or pages), neighbours together up to the size of a read. No byte is read twice.

        Each read has the stretches inside it, with offsets from the begin of the read.
        """
        granule = BLOCK_BYTES if self.file.is_verified else PAGE_BYTES
        at_most = _SHARED_READ_BYTES if self.file.is_shared else READ_BYTES
        file_bytes = self.file.index.file_bytes
        extents = [(run.source, run.source_end) for _, run in self.stretches]
        extents += [(header.offset, header.end) for header in self.file.headers(self.members)]
        spans: list[list[int]] = []
        for first, last in sorted(extents):
            begin, end = first // granule * granule, min(align_up(last, granule), file_bytes)
            if spans and begin <= spans[-1][1]:
                spans[-1][1] = max(spans[-1][1], end)
            else:
                spans.append([begin, end])
        reads = [
            Read(self.file, Extent(at, min(at_most, end - at)), [])
            for begin, end in spans
            for at in range(begin, end, at_most)
        ]
        begins = [read.extent.offset for read in reads]
        for wanted, run in self.stretches:
            for number in range(bisect_right(begins, run.source) - 1, bisect_left(begins, run.source_end)):
                begin, end = begins[number], reads[number].extent.end
                parts = (run,) if begin <= run.source and run.source_end <= end else run.within(begin, end)
                reads[number].parts += [(wanted, part.moved(-begin)) for part in parts]
        return reads
