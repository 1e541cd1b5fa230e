"""One accelerator during one save: its side stream, the order of copies and training, and raw copies of bytes.

In: pieces of device tensors. Out: copies enqueued into segments, and calls that follow the end of each.
Knows nothing of: optimizers, files, other devices.

Copies run on a side stream that no other code uses. The side stream waits for the training's, the copies are enqueued,
and the training's stream waits for the last of them; the Python thread waits for none. Small tensors that lie side by
side in the file are gathered by one kernel into a scratch buffer on the device and cross the bus together. One thread
for each device waits for the events of the copies, which fire in the order of the stream, and runs what follows each.
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

# Tensors below this size are gathered by one kernel and cross the bus together.
_PACK_BELOW: Final = 256 * KIB
_SCRATCH_BYTES: Final = 32 * MIB
# A tensor that is not dense is made so in blocks of this size, never as a whole.
_BLOCK_BYTES: Final = 4 * MIB
# If the kernel does not copy for us, a storage is checked before each piece of this size.
_UNCHECKED_BYTES: Final = 4 * MIB


class _SideStream:
    """The side stream of one device, with its buffers and its waiting thread. All are kept between saves.

    `_side_of` creates it, once in a process, and the `Device` of each save uses it.
    """

    def __init__(self, device: torch.device) -> None:
        # Keeps two threads from interleaving the two halves of a packed copy: into the scratch buffer, and out of it.
        # The buffer needs no other fence, since copies of one stream run one after the other.
        self.lock = threading.Lock()
        self.device, self.backend = device, backend_of(device)
        self.stream = self.backend.new_stream(device)
        self.waiter = Crew(f"wait-{device.index}", 1)
        self._scratch: torch.Tensor | None = None  # under `lock`, like all below
        self._boxes: list[HostBuffer] = []

    def scratch(self, num_bytes: int) -> torch.Tensor | None:
        """A buffer on the device; None if there is no memory left for it. On the side stream, under `lock`."""
        if self._scratch is None or self._scratch.numel() < num_bytes:
            self._scratch = None  # first, so that the larger one may have its memory
            try:
                with torch.inference_mode(False):
                    self._scratch = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            except RuntimeError:  # out of memory; a broken device raises at the next call as well
                return None
        return self._scratch[:num_bytes]

    def box(self, num_bytes: int) -> HostBuffer:
        """Page-locked memory for a few bytes from the device. Under `lock`."""
        for box in self._boxes:
            if box.num_bytes >= num_bytes:
                self._boxes.remove(box)
                return box
        box = HostBuffer(align_up(num_bytes, PAGE_BYTES))
        box.pin(self.device)  # if it is refused, the copy blocks
        return box

    def give_back(self, box: HostBuffer) -> None:
        with self.lock:
            self._boxes.append(box)


_side_of: Final = OnceInProcess(_SideStream)


class Device:
    """The copies of one save from one device. Its snapshot creates it; threads of that snapshot enqueue by it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side = _side_of(device)
        self._backend: Backend = self._side.backend
        self._holds: list[tuple[Any, Any]] = []  # events before and after each

    @property
    def side(self) -> Any:
        return self._side.stream

    def on_side(self) -> AbstractContextManager[Any]:
        """Enqueue on the side stream."""
        return self._backend.on_stream(self.device, self.side)

    def follow_training(self) -> None:
        """Order the copies enqueued from now on after everything enqueued on the current stream until now."""
        self.side.wait_stream(self._backend.current_stream(self.device))

    def hold_training(self) -> None:
        """Order everything enqueued on the current stream from now on after the copies enqueued until now."""
        stream = self._backend.current_stream(self.device)
        before, after = self._backend.timing_event(), self._backend.timing_event()
        before.record(stream)
        stream.wait_stream(self.side)
        after.record(stream)
        self._holds.append((before, after))

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep the allocator from lending the tensor's memory before the copies enqueued until its release have ended.

        That holds for a tensor of any stream, also of one whose order does not include these copies.
        """
        tensor.record_stream(self.side)

    def warm_up(self, packed_bytes: int) -> None:
        """Allocate the buffers of the first copies, and copy a little: the driver completes a stream at its first use.

        `packed_bytes`: how many bytes of small tensors may lie side by side. If the device is full, nothing is done.
        """
        with self._side.lock, self.on_side():
            if packed_bytes:
                self._side.scratch(min(packed_bytes, _SCRATCH_BYTES))
            try:
                tensor = torch.zeros(1, dtype=torch.uint8, device=self.device)
            except torch.OutOfMemoryError:
                return
        self.fetch(tensor).bytes()

    def stall_seconds(self) -> float:
        """Seconds that streams of this device have waited for copies. A wait that is not over yet counts as zero.

        Waits on a failed device count as zero, too: its save may be committed all the same.
        """
        try:
            with self._backend.on_device(self.device):
                holds = [(before, after) for before, after in self._holds if after.query()]
                return float(sum(before.elapsed_time(after) for before, after in holds)) / 1e3
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
        """Enqueue the copies of `pieces` into these bytes. From any thread. The event fires when they have ended.

        A tensor that has an alias is read through the alias.
        """
        with self._side.lock, self.on_side():
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

    def fetch(self, tensor: torch.Tensor) -> HostFetch:
        """Enqueue the copy of a few bytes to the host, of a tensor whose making the side stream has waited for."""
        with self._side.lock, self.on_side():
            box = self._side.box(tensor.numel())
            box.tensor[: tensor.numel()].copy_(tensor, non_blocking=True)
            return HostFetch(self, box, tensor.numel(), self._mark())

    def in_turn(self, task: Callable[[], None], refused: Callable[[RuntimeError], None]) -> None:
        """Run a task that waits for a copy, and does what follows, on the thread that waits for this device's copies.

        The thread waits for nothing else: copies end in the order in which they were enqueued.
        """
        self._side.waiter.submit(task, refused)

    def wait(self, event: Any) -> None:
        """Block this thread, off the GIL, until the event has fired."""
        with self._backend.on_device(self.device):
            event.synchronize()

    def is_quiet(self) -> bool:
        """Wait until no copy is under way. False if the device is broken: then copies may still write.

        This waits for an event, as a wait for a stream is an error under `torch.cuda.set_sync_debug_mode("error")`.
        """
        try:
            with self._backend.on_device(self.device):
                self._mark().synchronize()
        except RuntimeError:
            return False
        return True

    def _copy_packed(self, into: torch.Tensor, parts: list[torch.Tensor], begin: int, end: int) -> None:
        scratch = self._side.scratch(end - begin) if len(parts) > 1 else None
        if scratch is not None:
            torch.cat(parts, out=scratch)
            parts = [scratch]
        for part in parts:
            into[begin : begin + part.numel()].copy_(part, non_blocking=True)
            begin += part.numel()


class HostFetch:
    """The copy of a few bytes to the host, enqueued by `Device.fetch`. Any one thread may take the bytes, once."""

    def __init__(self, device: Device, box: HostBuffer, num_bytes: int, event: Any) -> None:
        self._device, self._num_bytes, self._event = device, num_bytes, event
        self._box: HostBuffer | None = box

    def bytes(self) -> bytes:
        """Wait for the bytes and return them. Once."""
        self._device.wait(self._event)
        assert self._box is not None
        data = bytes(self._box.view[: self._num_bytes])
        self._device._side.give_back(self._box)
        self._box = None
        return data

    def __del__(self) -> None:
        if self._box is not None:  # the copy into it may still be under way
            self._box.leak()


# ctypes releases the GIL around a foreign call. That pays only if the copy takes longer than the hand-over.
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


# process_vm_writev copies between processes, and so within one.
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
    """Copy host memory from (address, bytes) pairs to one address. Returns the number of bytes copied.

    That is less than the sum if a source is not mapped; memmove would end the process. None if the system does not
    copy: some seccomp profiles refuse the call, and only Linux has it.

    The call takes 1.15 times the time of memmove. Reading from this process instead of writing to it would take 1.6
    times: the kernel looks up the remote side page by page, and a segment is in huge pages.
    """
    if _process_vm_writev is None:
        return None
    flat = [number for source in sources for number in source]
    vectors = (ctypes.c_size_t * len(flat))(*flat)  # struct iovec, one after the other
    num_bytes = sum(length for _, length in sources)
    return _gather(target, num_bytes, ctypes.addressof(vectors), len(sources))


def sample_by_kernel(target: int, addresses: torch.Tensor) -> int | None:
    """Like `copy_by_kernel`, for the single bytes at these addresses, an int64 tensor of any shape."""
    if _process_vm_writev is None:
        return None
    vectors = torch.stack((addresses.flatten(), torch.ones_like(addresses).flatten()), dim=-1)
    num_bytes, first = len(vectors), vectors.data_ptr()
    for num_done in range(0, num_bytes, _MAX_VECTORS):
        length = min(_MAX_VECTORS, num_bytes - num_done)
        num_copied = _gather(target + num_done, length, first + num_done * _VECTOR_BYTES, length)
        if num_copied != length:
            return None if num_copied is None else num_done + num_copied
    return num_bytes


def sample_now(target: bytearray, addresses: torch.Tensor) -> None:
    """Like `sample_by_kernel`, in half the time, for memory that cannot be freed meanwhile."""
    first, last = int(addresses.min()), int(addresses.max())
    memory = _bytes_at(first, addresses.device, last + 1 - first)
    torch.take(memory, addresses - first, out=torch.frombuffer(target, dtype=torch.uint8).view_as(addresses))


def _bytes_at(address: int, device: torch.device, length: int, stride: int = 1) -> torch.Tensor:
    """A tensor of `length` bytes that other code owns: every `stride`-th one from an address on."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, (length - 1) * stride + 1)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (length,), (stride,))


def _gather(target: int, num_bytes: int, vectors: int, num_vectors: int) -> int | None:
    into = (ctypes.c_size_t * 2)(target, num_bytes)
    num_copied: int = _process_vm_writev(os.getpid(), vectors, num_vectors, ctypes.addressof(into), 1, 0)
    if num_copied >= 0:
        return num_copied
    return 0 if ctypes.get_errno() == errno.EFAULT else None


def host_pointer(tensor: torch.Tensor) -> int:
    """The address of a dense CPU tensor; 0 for any other tensor, and for one without bytes."""
    return tensor.data_ptr() if is_on_host(tensor) and is_dense(tensor) else 0


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor, as a 1-D uint8 tensor that keeps its storage alive, not the tensor."""
    alias = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    item_bytes = tensor.element_size()
    return alias.set_(
        tensor.untyped_storage(), tensor.storage_offset() * item_bytes, (tensor.numel() * item_bytes,), (1,)
    )


class Alias:
    """The bytes of a dense tensor where they lie now, also after its `.data` was replaced.

    An alias keeps the storage alive. The storage may lose its memory all the same, by `untyped_storage().resize_()`.
    Bytes that were read count only if the memory `is_there` afterwards. A snapshot creates one for each deferred
    tensor; several threads read through it.
    """

    __slots__ = ("_memory", "_storage", "address", "device", "num_bytes")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = tensor.untyped_storage()
        self._memory = self._storage.data_ptr(), self._storage.nbytes()
        self.device = tensor.device
        self.address, self.num_bytes = tensor.data_ptr(), tensor.nbytes

    def part(self, begin: int, length: int, stride: int = 1) -> torch.Tensor:
        """`length` bytes from `begin` on, every `stride`-th one.

        They are read by their address. Through the storage, a read just after a resize would be one at address 0, and
        `set_` would even give the storage memory again.
        """
        return _bytes_at(self.address + begin, self.device, length, stride)

    def is_there(self) -> bool:
        return (self._storage.data_ptr(), self._storage.nbytes()) == self._memory

    def copy_to(self, target: int, begin: int, length: int) -> bool:
        """Copy some of the bytes, on the host, to an address. False if the storage has lost them meanwhile.

        If the kernel does not copy for us, a resize by another thread in the middle of the copy ends the process.
        """
        num_done = 0
        while num_done < length and self.is_there():
            source = self.address + begin + num_done
            num_copied = copy_by_kernel(target + num_done, [(source, length - num_done)])
            if num_copied is None:
                num_copied = min(_UNCHECKED_BYTES, length - num_done)
                memmove(target + num_done, source, num_copied)
            elif num_copied == 0:
                return False
            num_done += num_copied
        return self.is_there()

    def sample_to(self, target: int, offsets: Iterable[int]) -> bool:
        """Like `copy_to`, for the single bytes at these offsets."""
        sources = [(self.address + offset, 1) for offset in offsets]
        if not self.is_there():
            return False
        num_copied = copy_by_kernel(target, sources)
        if num_copied is None:
            for at, (source, length) in enumerate(sources, target):
                memmove(at, source, length)
        return num_copied in (None, len(sources)) and self.is_there()


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the items as integers of the same size: torch copies some of its dtypes only if they are dense."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.element_size())
    return tensor if integers is None else tensor.view(integers)


def dense_blocks(tensor: torch.Tensor, begin: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(offset, bytes) blocks that cover bytes [begin, end) of a tensor as it would lie in memory if it were dense.

    Blocks have a few MiB, so that a transposed 8 GB weight does not need another 8 GB. Conj and neg views are resolved.
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
    """Copy a few small pieces into ordinary memory, one after the other."""
    target = torch.frombuffer(image, dtype=torch.uint8)
    for begin, number, source, length in pieces:
        for offset, block in dense_blocks(tensors[number], source, source + length):
            at = begin + offset - source
            target[at : at + block.numel()].copy_(block)


def first_device(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """The accelerator of the first tensor that is on one. Raises RuntimeError while a graph is being captured on it."""
    device = next((place for tensor in tensors if (place := device_of(tensor)) is not None), None)
    if device is not None and is_capturing():
        raise RuntimeError("save was called while a graph is being captured; call it before or after the capture")
    return device


def warm_up(tensors: Iterable[torch.Tensor]) -> None:
    """Make streams and buffers for the first save of these tensors on their devices."""
    packed_bytes: dict[torch.device, int] = {}
    for tensor in tensors:
        if (device := device_of(tensor)) is not None:
            small = tensor.nbytes if tensor.nbytes < _PACK_BELOW else 0
            packed_bytes[device] = packed_bytes.get(device, 0) + small
    for device, num_bytes in packed_bytes.items():
        Device(device).warm_up(num_bytes)
