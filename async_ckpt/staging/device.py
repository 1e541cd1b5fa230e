"""One accelerator during one save: its side stream, and who waits for whom.

In: pieces of device tensors. Out: copies enqueued into segments, and calls that follow each one's end.
Knows nothing of: optimizers, files, the other devices.

Order, then release: the side stream waits for the training stream, the copies are enqueued, the training stream
waits for the last of them. The Python thread never does.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

from ..backends import Backend, backend_of, device_of, is_capturing, is_dense, is_on_host
from ..format.layout import Piece
from ..host.memory import HostBuffer
from ..host.process import OnceInProcess
from ..host.threads import Crew
from ..spec import KIB, MIB, PAGE_BYTES, align_up

# Tensors below this are gathered by one kernel and cross the bus together.
_PACK_BELOW: Final = 256 * KIB
_SCRATCH_BYTES: Final = 32 * MIB
# A tensor that is not dense is made so in blocks of this size, never as a whole.
_BLOCK_BYTES: Final = 4 * MIB
# Where the kernel does not copy for us, a storage is looked at before each piece of this size.
_UNCHECKED_BYTES: Final = 4 * MIB


class _SideStream:
    """What one device keeps between saves: its side stream, and the buffer that small tensors are packed into.

    The buffer is used by copies of one stream only, which run one after the other, so it needs no fence; `lock`
    keeps two threads from interleaving the two halves of a packed copy. One thread waits for the copies of all saves:
    they end in the order of the stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.Lock()
        self.device, self.backend = device, backend_of(device)
        self.stream = self.backend.new_stream(device)
        self.waiter = Crew(f"wait-{device.index}", 1)
        self._scratch: torch.Tensor | None = None  # under `lock`, like all below
        self._boxes: list[HostBuffer] = []

    def scratch(self, num_bytes: int) -> torch.Tensor | None:
        """A buffer on the device; None where there is no memory left for it. On the side stream, under `lock`."""
        if self._scratch is None or self._scratch.numel() < num_bytes:
            self._scratch = None  # before the larger one, which may have its memory
            try:
                with torch.inference_mode(False):
                    self._scratch = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            except RuntimeError:  # out of memory; a device that is broken says so at the next call
                return None
        return self._scratch[:num_bytes]

    def box(self, num_bytes: int) -> HostBuffer:
        """Page-locked memory for a few bytes from the device. Under `lock`."""
        for box in self._boxes:
            if box.num_bytes >= num_bytes:
                self._boxes.remove(box)
                return box
        box = HostBuffer(align_up(num_bytes, PAGE_BYTES))
        box.pin(self.device)  # refused: the copy waits, and is right
        return box

    def give_back(self, box: HostBuffer) -> None:
        with self.lock:
            self._boxes.append(box)


_side_of: Final = OnceInProcess(_SideStream)


class Device:
    """The copies of one save from one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kept = _side_of(device)
        self._backend: Backend = self._kept.backend
        self._holds: list[tuple[Any, Any]] = []  # events before and after each

    @property
    def side(self) -> Any:
        return self._kept.stream

    def on_side(self) -> AbstractContextManager[Any]:
        """Enqueue on the side stream."""
        return self._backend.on_stream(self.device, self.side)

    def follow_training(self) -> None:
        """Copies enqueued from now on see all that was enqueued on the current stream until now."""
        self.side.wait_stream(self._backend.current_stream(self.device))

    def hold_training(self) -> None:
        """What is enqueued on the current stream from now on waits for the copies enqueued until now."""
        stream = self._backend.current_stream(self.device)
        before, after = self._backend.timing_event(), self._backend.timing_event()
        before.record(stream)
        stream.wait_stream(self.side)
        after.record(stream)
        self._holds.append((before, after))

    def keep(self, tensor: torch.Tensor) -> None:
        """Have the allocator lend the tensor's memory to nobody before the copies enqueued until then have ended.

        Also when it was allocated on another stream than the current one, whose order says nothing of these copies.
        """
        tensor.record_stream(self.side)

    def warm_up(self, packed_bytes: int) -> None:
        """Make what the first copies need, and copy a little: a stream is made in full when it is first used.

        Of small tensors, so many bytes may lie side by side. On a device that is full, a save does without.
        """
        with self._kept.lock, self.on_side():
            if packed_bytes:
                self._kept.scratch(min(packed_bytes, _SCRATCH_BYTES))
            try:
                few = torch.zeros(1, dtype=torch.uint8, device=self.device)
            except torch.OutOfMemoryError:
                return
        self.fetch(few).bytes()

    def stall_seconds(self) -> float:
        """How long streams of this device have waited for copies; a wait that is not over yet counts as zero.

        Waits on a failed device count as zero, too: its save may be committed all the same.
        """
        try:
            with self._backend.on_device(self.device):
                ended = [(before, after) for before, after in self._holds if after.query()]
                return float(sum(before.elapsed_time(after) for before, after in ended)) / 1e3
        except RuntimeError:
            return 0.0

    def enqueue(
        self,
        into: torch.Tensor,
        pieces: Iterable[Piece],
        tensors: list[torch.Tensor],
        dense: list[bool],
        aliases: Mapping[int, Alias],
    ) -> Any:
        """Enqueue the copies of `pieces` into these bytes; the event fires when they have ended. From any thread.

        A tensor that has an alias is read through that.
        """
        with self._kept.lock, self.on_side():
            packed: list[torch.Tensor] = []
            packed_begin = packed_end = 0
            for target, number, source, length in pieces:
                if not dense[number]:
                    for offset, block in dense_blocks(tensors[number], source, source + length):
                        at = target + offset - source
                        into[at : at + block.numel()].copy_(block, non_blocking=True)
                    continue
                alias = aliases.get(number)
                if alias is None:
                    part = flat_bytes(tensors[number])
                    if length != part.numel():
                        part = part[source : source + length]
                else:
                    part = alias.part(source, length)
                if length >= _PACK_BELOW:
                    into[target : target + length].copy_(part, non_blocking=True)
                    continue
                if packed and (packed_end != target or target + length - packed_begin > _SCRATCH_BYTES):
                    self._copy_packed(into, packed, packed_begin, packed_end)
                    packed = []
                if not packed:
                    packed_begin = target
                packed.append(part)
                packed_end = target + length
            if packed:
                self._copy_packed(into, packed, packed_begin, packed_end)
            return self._mark()

    def _mark(self) -> Any:
        event = self._backend.waiting_event()
        event.record(self.side)
        return event

    def fetch(self, few: torch.Tensor) -> HostFetch:
        """Enqueue the copy of a few bytes to the host. A tensor of the side stream, or one that it has waited for."""
        with self._kept.lock, self.on_side():
            box = self._kept.box(few.numel())
            box.tensor[: few.numel()].copy_(few, non_blocking=True)
            return HostFetch(self, box, few.numel(), self._mark())

    def in_turn(self, task: Callable[[], None], refused: Callable[[RuntimeError], None]) -> None:
        """Run what waits for a copy, and what follows it, on the one thread that waits for this device's copies.

        It waits for nothing else: copies end in the order in which they were enqueued, whatever other threads do.
        """
        self._kept.waiter.submit(task, refused)

    def wait(self, event: Any) -> None:
        """Block this thread, off the GIL, until the event has fired."""
        with self._backend.on_device(self.device):
            event.synchronize()

    def is_quiet(self) -> bool:
        """Wait until no copy is under way any more. False where the device does not tell, as a broken one does not: then
        copies may still write.

        By an event: to wait for a stream is an error under `torch.cuda.set_sync_debug_mode("error")`.
        """
        try:
            with self._backend.on_device(self.device):
                self._mark().synchronize()
        except RuntimeError:
            return False
        return True

    def _copy_packed(self, into: torch.Tensor, parts: list[torch.Tensor], begin: int, end: int) -> None:
        scratch = self._kept.scratch(end - begin) if len(parts) > 1 else None
        if scratch is not None:
            torch.cat(parts, out=scratch)
            parts = [scratch]
        for part in parts:
            into[begin : begin + part.numel()].copy_(part, non_blocking=True)
            begin += part.numel()


class HostFetch:
    """A few bytes on their way to the host."""

    def __init__(self, device: Device, box: HostBuffer, num_bytes: int, event: Any) -> None:
        self._device, self._num_bytes, self._event = device, num_bytes, event
        self._box: HostBuffer | None = box

    def bytes(self) -> bytes:
        """Wait for them. Once."""
        self._device.wait(self._event)
        assert self._box is not None
        data = bytes(self._box.view[: self._num_bytes])
        self._device._kept.give_back(self._box)
        self._box = None
        return data

    def __del__(self) -> None:
        if self._box is not None:  # nobody knows whether the copy into it has ended
            self._box.leak()


# ctypes releases the GIL around a foreign call, which pays only when the copy outlasts the hand-over.
_releasing_gil = ctypes.memmove
_keeping_gil = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)
_KEEP_GIL_BELOW: Final = 32 * KIB


def memmove(target: int, source: int, num_bytes: int) -> None:
    """Copy host memory from address to address."""
    if num_bytes < _KEEP_GIL_BELOW:
        _keeping_gil(target, source, num_bytes)
    else:
        _releasing_gil(target, source, num_bytes)


# Copies between processes, and so within one.
_VECTOR_BYTES: Final = 2 * ctypes.sizeof(ctypes.c_size_t)
_MAX_VECTORS: Final = 1024  # the kernel takes no more at once
_process_vm_writev: Any = None
if sys.platform == "linux":
    _process_vm_writev = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_writev", None)
if _process_vm_writev is not None:
    _process_vm_writev.restype = ctypes.c_ssize_t
    _process_vm_writev.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong
    ]  # fmt: skip


def copy_by_kernel(target: int, sources: Sequence[tuple[int, int]]) -> int | None:
    """Copy host memory from (address, bytes) pairs to one address; how many bytes were copied.

    Fewer than asked for where a source is not mapped, which would end the process in memmove. None where the system
    copies nothing for us: some seccomp profiles refuse this call, and only Linux has it.

    It takes 1.15 times the time of memmove. Reading from this process rather than writing to it would take 1.6: what
    is looked up page by page is the other side's memory, and that of a segment is in huge pages.
    """
    if _process_vm_writev is None:
        return None
    flat = [number for source in sources for number in source]
    vectors = (ctypes.c_size_t * len(flat))(*flat)  # struct iovec, one after the other
    num_bytes = sum(length for _, length in sources)
    return _gather(target, num_bytes, ctypes.addressof(vectors), len(sources))


def sample_by_kernel(target: int, addresses: torch.Tensor) -> int | None:
    """Like `copy_by_kernel`, of the single bytes at these addresses: an int64 tensor of any shape."""
    if _process_vm_writev is None:
        return None
    vectors = torch.stack((addresses.flatten(), torch.ones_like(addresses).flatten()), dim=-1)
    num_bytes, first = len(vectors), vectors.data_ptr()
    for done in range(0, num_bytes, _MAX_VECTORS):
        length = min(_MAX_VECTORS, num_bytes - done)
        copied = _gather(target + done, length, first + done * _VECTOR_BYTES, length)
        if copied != length:
            return None if copied is None else done + copied
    return num_bytes


def sample_now(target: bytearray, addresses: torch.Tensor) -> None:
    """The same where none of it can go meanwhile: half the time, for the kernel looks up each byte's page."""
    first, last = int(addresses.min()), int(addresses.max())
    memory = _bytes_at(first, addresses.device, last + 1 - first)
    torch.take(memory, addresses - first, out=torch.frombuffer(target, dtype=torch.uint8).view_as(addresses))


def _bytes_at(address: int, device: torch.device, length: int, stride: int = 1) -> torch.Tensor:
    """A tensor of `length` bytes that somebody else owns: every `stride`-th one from an address on."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, (length - 1) * stride + 1)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (length,), (stride,))


def _gather(target: int, num_bytes: int, vectors: int, num_vectors: int) -> int | None:
    into = (ctypes.c_size_t * 2)(target, num_bytes)
    copied: int = _process_vm_writev(os.getpid(), vectors, num_vectors, ctypes.addressof(into), 1, 0)
    if copied >= 0:
        return copied
    return 0 if ctypes.get_errno() == errno.EFAULT else None


def host_pointer(tensor: torch.Tensor) -> int:
    """The address of a dense CPU tensor; 0 for any other, and for one without bytes."""
    return tensor.data_ptr() if is_on_host(tensor) and is_dense(tensor) else 0


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor, as a 1-D uint8 tensor that keeps its storage alive, not the tensor."""
    alias = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    item_bytes = tensor.element_size()
    return alias.set_(
        tensor.untyped_storage(), tensor.storage_offset() * item_bytes, (tensor.numel() * item_bytes,), (1,)
    )


class Alias:
    """The bytes of a dense tensor where they lie now, wherever its `.data` is later. It keeps the storage, not the tensor.

    The storage may lose this memory all the same: `untyped_storage().resize_()` asks nobody. What was read counts
    only if it `is_there` afterwards.
    """

    __slots__ = ("_memory", "_storage", "address", "device", "num_bytes")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = tensor.untyped_storage()
        self._memory = self._storage.data_ptr(), self._storage.nbytes()
        self.device = tensor.device
        self.address, self.num_bytes = tensor.data_ptr(), tensor.nbytes

    def part(self, begin: int, length: int, stride: int = 1) -> torch.Tensor:
        """`length` bytes from `begin` on, every `stride`-th one.

        By the address: through the storage, a read just after a resize would be one at address 0, and `set_` would even
        give the storage memory again.
        """
        return _bytes_at(self.address + begin, self.device, length, stride)

    def is_there(self) -> bool:
        return (self._storage.data_ptr(), self._storage.nbytes()) == self._memory

    def copy_to(self, target: int, begin: int, length: int) -> bool:
        """Copy some of the bytes, on the host, to an address; False if the storage has lost them meanwhile.

        Where the kernel does not copy for us, a resize on another thread in the middle of it ends the process.
        """
        done = 0
        while done < length and self.is_there():
            source = self.address + begin + done
            copied = copy_by_kernel(target + done, [(source, length - done)])
            if copied is None:
                copied = min(_UNCHECKED_BYTES, length - done)
                memmove(target + done, source, copied)
            elif copied == 0:
                return False
            done += copied
        return self.is_there()

    def sample_to(self, target: int, offsets: Iterable[int]) -> bool:
        """Like `copy_to`, of single bytes."""
        sources = [(self.address + offset, 1) for offset in offsets]
        if not self.is_there():
            return False
        copied = copy_by_kernel(target, sources)
        if copied is None:
            for at, (source, length) in enumerate(sources, target):
                memmove(at, source, length)
        return copied in (None, len(sources)) and self.is_there()


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same items as integers of the same size: torch copies some of its dtypes only when they are dense."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.element_size())
    return tensor if integers is None else tensor.view(integers)


def dense_blocks(tensor: torch.Tensor, begin: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(offset, bytes) blocks that cover bytes [begin, end) of the tensor as it would lie in memory if it were dense.

    A few MiB at a time, so that a transposed 8 GB weight does not need another 8 GB. Conj and neg views are resolved.
    """
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes <= _BLOCK_BYTES or tensor.dim() == 0:
        flat = flat_bytes(as_integers(tensor.resolve_conj().resolve_neg()).contiguous())
        first, last = max(0, begin), min(end, num_bytes)
        if first < last:
            yield first, flat[first:last]
        return
    row_bytes = num_bytes // tensor.shape[0]
    num_rows = max(1, _BLOCK_BYTES // row_bytes)
    for row in range(max(0, begin) // row_bytes, min(tensor.shape[0], -(-end // row_bytes)), num_rows):
        offset = row * row_bytes
        part = tensor[row] if row_bytes > _BLOCK_BYTES else tensor[row : row + num_rows]
        for inner, block in dense_blocks(part, begin - offset, end - offset):
            yield offset + inner, block


def fill_image(image: bytearray, pieces: Iterable[Piece], tensors: Sequence[torch.Tensor]) -> None:
    """Copy pieces into ordinary memory, one after the other: for what is small."""
    target = torch.frombuffer(image, dtype=torch.uint8)
    for begin, number, source, length in pieces:
        for offset, block in dense_blocks(tensors[number], source, source + length):
            at = begin + offset - source
            target[at : at + block.numel()].copy_(block)


def first_device(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """The first accelerator with something to save. Raises RuntimeError while a graph is being captured on it."""
    device = next((there for tensor in tensors if (there := device_of(tensor)) is not None), None)
    if device is not None and is_capturing():
        raise RuntimeError(
            "save was called while a graph is being captured; call it before or after the capture"
        )
    return device


def warm_up(tensors: Iterable[torch.Tensor]) -> None:
    """Make what the first save of these would have to make on their devices."""
    packed_bytes: dict[torch.device, int] = {}
    for tensor in tensors:
        if (there := device_of(tensor)) is not None:
            small = tensor.nbytes if tensor.nbytes < _PACK_BELOW else 0
            packed_bytes[there] = packed_bytes.get(there, 0) + small
    for there, num_bytes in packed_bytes.items():
        Device(there).warm_up(num_bytes)
