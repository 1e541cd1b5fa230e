"""From archives into memory: what is to be read is planned, read in large pieces, and copied to where it belongs.

In: tensors of archives, and live tensors. Out: filled tensors. Knows nothing of: names, states, runs.
"""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

import torch

from ..backends import backend_of, device_of, has_plain_bytes
from ..host.limits import num_cpus
from ..host.memory import Segment
from ..host.pool import MIN_SEGMENTS, Lease, SegmentPool
from ..host.process import OnceInProcess
from ..host.threads import Crew
from ..spec import BLOCK_BYTES, MIB, PAGE_BYTES, Extent, align_up
from ..staging.device import as_integers, flat_bytes, host_pointer, memmove
from .contents import CPU, Contents

# One read: large enough for a disk's full speed, small enough that a few of them are no memory to speak of.
READ_BYTES: Final = 8 * MIB
# Some read while others verify and copy.
_MIN_READERS: Final = 12
_MAX_READERS: Final = 16


class Wanted(NamedTuple):
    """One tensor of the archive and the memory that its bytes are to fill: same shape, same dtype, any device."""

    number: int
    into: torch.Tensor


class _Stretch(NamedTuple):
    """`length` bytes from byte `source` of a read go to byte `target` of `wanted[wanted]`."""

    source: int
    wanted: int
    target: int
    length: int


@dataclass(slots=True)
class Read:
    """One read of an archive: whole digest blocks, or pages, up to a buffer's size; and where their bytes go."""

    archive: Contents
    extent: Extent
    parts: list[_Stretch]


def fill(
    wanted: Sequence[tuple[Contents, Sequence[Wanted]]],
    *,
    copy: bool = True,
    pool: SegmentPool | None = None,
) -> None:
    """Read every wanted tensor of these archives into its memory, in parallel. With `copy=False` only verify the bytes.

    It reads through what `pool` can spare.
    What is on a device is filled in order with its current stream. Raises CorruptCheckpointError; tensors that were
    filled before stay so.
    """
    targets: list[_Target] = []
    reads: list[Read] = []
    for archive, items in wanted:
        numbers = [item.number for item in items]
        reads += plan_reads(archive, numbers, keep_parts=copy, first=len(targets))
        targets += [_Target(item.into) for item in items] if copy else []
    devices = {device for target in targets if (device := device_of(target.flat)) is not None}
    streams = {device: _stream_of(device) for device in devices}
    for device, stream in streams.items():
        stream.wait_stream(backend_of(device).current_stream(device))

    def use(read: Read, segment: Segment) -> None:
        read.archive.verify(read.extent.offset, segment.view[: read.extent.length])
        _copy_out(read, segment, targets, streams)

    run_reads(reads, use, pin=next(iter(devices), None), pool=pool)
    for device, stream in streams.items():
        backend_of(device).current_stream(device).wait_stream(stream)
    for target in targets:
        target.finish()


def run_reads(
    reads: Sequence[Read],
    use: Callable[[Read, Segment], None],
    *,
    pin: torch.device | None = None,
    pool: SegmentPool | None = None,
) -> None:
    """Read, in parallel, into a ring of buffers; `use` is called with each, on the thread that has read it.

    The buffers are memory of `pool` as far as that has some to spare: it stays warm there for the next save.

    Raises CorruptCheckpointError for an archive that ends too early, and what `use` raises.
    """
    if not reads:
        return
    crew = Crew("read", min(max(_MIN_READERS, num_cpus()), _MAX_READERS, len(reads)))
    with _Ring(crew.max_threads, pin, pool) as ring:

        def run(read: Read) -> None:
            with ring.buffer() as buffer:
                read.archive.read_into(read.extent.offset, buffer.view[: read.extent.length])
                use(read, buffer)

        try:
            crew.run_all(functools.partial(run, read) for read in reads)
        finally:
            crew.stop()


def _new_stream(device: torch.device) -> Any:
    return backend_of(device).new_stream(device)


# The one stream of each device that loads use: those of torch's pool may be anybody's.
_stream_of: Final = OnceInProcess(_new_stream)


class _Ring:
    """As many buffers as threads: parts of what a pool has to spare, and the others new."""

    def __init__(self, num_buffers: int, pin: torch.device | None, pool: SegmentPool | None) -> None:
        self._pin = pin
        self._own = SegmentPool(READ_BYTES, max_bytes=max(num_buffers, MIN_SEGMENTS) * READ_BYTES)
        self._leases: list[Lease] = []
        self._idle: queue.SimpleQueue[Segment] = queue.SimpleQueue()
        per_segment = pool.segment_bytes // READ_BYTES if pool is not None else 0
        if pool is not None and per_segment:
            self._leases += pool.borrow(-(-num_buffers // per_segment), pin=pin)
        for lease in self._leases:
            for begin in range(0, per_segment * READ_BYTES, READ_BYTES):
                self._idle.put(lease.segment.part(begin, begin + READ_BYTES))

    @contextmanager
    def buffer(self) -> Iterator[Segment]:
        """One of them. Nobody waits for another's."""
        try:
            buffer = self._idle.get_nowait()
        except queue.Empty:
            (lease,) = self._own.borrow(1, pin=self._pin)
            self._leases.append(lease)
            buffer = lease.segment
        try:
            yield buffer
        finally:
            self._idle.put(buffer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for lease in self._leases:
            lease.release()
        self._own.close()


def _copy_out(read: Read, segment: Segment, targets: list[_Target], streams: dict[Any, Any]) -> None:
    for device, stream in streams.items():
        parts = [part for part in read.parts if targets[part.wanted].device == device]
        if parts:
            _enqueue(parts, segment, targets, device, stream)
    for source, wanted, begin, length in read.parts:
        target = targets[wanted]
        if target.pointer:
            memmove(target.pointer + begin, segment.address + source, length)


def _enqueue(
    parts: list[_Stretch], segment: Segment, targets: list[_Target], device: torch.device, stream: Any
) -> None:
    """Copy parts of a read to a device, and wait for that: the buffer is read from until then."""
    backend = backend_of(device)
    ended = backend.waiting_event()  # for no other's copies
    # In inference mode, because so may the caller be: its tensors take no writes outside.
    with torch.inference_mode(), backend.on_stream(device, stream):
        try:
            for source, wanted, begin, length in parts:
                piece = segment.tensor[source : source + length]
                targets[wanted].flat[begin : begin + length].copy_(piece, non_blocking=True)
        finally:
            ended.record(stream)
            ended.synchronize()


class _Target:
    """Memory to fill. What is not dense, or on a device without a copy engine of ours, goes through a dense copy."""

    def __init__(self, tensor: torch.Tensor) -> None:
        tensor = tensor.detach()
        # Others see by its counter that it was written to; our copies move none.
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
        self._final: torch.Tensor | None = None
        plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        if not plain or not has_plain_bytes(tensor):
            self._final = tensor
            tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=CPU)
        self.device = tensor.device
        self.flat = flat_bytes(tensor)
        self.pointer = host_pointer(self.flat)

    def finish(self) -> None:
        if self._final is None:
            return
        with torch.inference_mode():  # for tensors that were made in it; the others take it as well
            if self._final.is_conj() or self._final.is_neg():
                self._final.copy_(self.flat.view(self._final.dtype).reshape(self._final.shape))
            else:
                items = as_integers(self._final)
                items.copy_(self.flat.view(items.dtype).reshape(items.shape))


def plan_reads(archive: Contents, numbers: Sequence[int], *, keep_parts: bool, first: int = 0) -> list[Read]:
    """Cut what these tensors need into reads: whole digest blocks (or pages), neighbours together, up to a buffer's size.

    What is wanted is numbered from `first` on.
    """
    wanted: dict[Extent, list[int]] = {}  # one tensor may fill several, that are tied no more
    for i, number in enumerate(numbers, first):
        for piece in archive.index.tensors[number].slices:
            wanted.setdefault(piece.extent, []).append(i)
    extents = sorted({*wanted, *archive.headers(numbers)}, key=lambda extent: extent.offset)
    granule = BLOCK_BYTES if archive.is_verified else PAGE_BYTES
    file_bytes = archive.index.file_bytes
    reads: list[Read] = []
    for extent in extents:
        at, end = extent.offset, extent.end
        while at < end:
            last = reads[-1].extent if reads else Extent(0, 0)
            if at < last.offset:
                raise archive.corrupt("parts of it overlap")
            if at >= last.end:
                begin = at // granule * granule
                # A block that the read before has fetched already is not read again: `at` lies behind it.
                room = min(file_bytes - begin, align_up(min(end - begin, READ_BYTES), granule))
                if begin == last.end and last.length + room <= READ_BYTES and reads:
                    reads[-1].extent = last = Extent(last.offset, last.length + room)
                else:
                    last = Extent(begin, room)
                    reads.append(Read(archive, last, []))
            stop = min(end, last.end)
            if keep_parts:
                reads[-1].parts += [
                    _Stretch(at - last.offset, i, at - extent.offset, stop - at)
                    for i in wanted.get(extent, ())
                ]
            at = stop
    return reads
