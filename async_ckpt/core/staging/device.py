"""One accelerator during one save: its side stream, the order of copies and training, and raw copies of bytes.

In: pieces of device tensors. Out: copies enqueued into segments, and calls that follow the end of each copy. Knows
nothing of: optimizers, files, other devices.

Copies run on a side stream that no other code uses. The side stream waits for the training's stream, the copies are
enqueued, and the training's stream waits for the last of them; the Python thread waits for none. Small tensors that are
adjacent in the file are gathered by kernels into a scratch buffer on the device and cross the bus together. One thread
for each device waits for the events of the copies, which fire in the order of the stream, and runs the call that
follows each.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import lru_cache
from itertools import chain, groupby
from typing import Any, Final, NamedTuple, TypeVar

import torch

from ...errors import UsageError
from ..backends import Backend, device_of, is_capturing, is_dense, is_on_host
from ..format.layout import Piece
from ..host.memory import HostBuffer
from ..spec import KIB, MIB
from .side_stream import side_of

# Tensors below this size are gathered on the device and cross the bus together.
PACK_BELOW: Final = 256 * KIB
# The dtypes of integers, by item size in bytes.
INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# A tensor that is not dense is made dense in blocks of at most this size, never as a whole.
SCRATCH_BYTES: Final = 32 * MIB
# The same limit for blocks in memory that is allocated for each of them.
_BLOCK_BYTES: Final = 4 * MIB
# If the kernel cannot copy for us, a storage is checked before each piece of this size.
_UNCHECKED_BYTES: Final = 4 * MIB


T = TypeVar("T")
Tensors = list[torch.Tensor]
Aliases = Mapping[int, "Alias"]  # keyed by the numbers of tensors


class Device:
    """The copies of one save from one device. Its snapshot creates it; threads of that snapshot use it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side = side_of(device)
        self._backend: Backend = self._side.backend
        self._training: Any = None  # the stream that has waited for the first copies
        # Under `_counting`: waits that had not ended at the last look, and the total seconds of all others.
        self._holds: list[tuple[Any, Any]] = []  # events before and after each wait
        self._stall_seconds = 0.0
        self._counting = threading.Lock()

    @property
    def side(self) -> Any:
        return self._side.stream

    def on_side(self) -> AbstractContextManager[Any]:
        """Enqueue on the side stream."""
        return self._backend.on_stream(self.device, self.side)

    def follow_training(self) -> None:
        """Order the copies that are enqueued from now on after everything enqueued on the current stream so far."""
        self.side.wait_stream(self._backend.current_stream(self.device))

    def hold_training(self) -> None:
        """Order everything that is enqueued on the current stream from now on after the copies enqueued so far."""
        stream = self._backend.current_stream(self.device)
        before, after = self._backend.timing_event(), self._backend.timing_event()
        before.record(stream)
        stream.wait_stream(self.side)
        after.record(stream)
        self._training = self._training or stream
        with self._counting:
            self._holds.append((before, after))

    def has_order(self, address: int) -> bool:
        """True if the allocator lends lost memory only to the training's stream, which waits for the copies."""
        return self._backend.lends_only_to(self._training, address, self.device)

    def take_scratch(self, num_bytes: int) -> None:
        """Allocate the buffer on the device that copies of small and strided tensors need."""
        with self._side.lock, self.on_side():
            self._side.forget_refusal()
            self._side.scratch(min(num_bytes, SCRATCH_BYTES))

    def stall_seconds(self) -> float:
        """Seconds that streams have waited for copies. Waits that go on, or on a failed device, count as zero."""
        with self._counting, suppress(RuntimeError), self._backend.on_device(self.device):
            waiting, self._holds = self._holds, []
            for before, after in waiting:
                if after.query():
                    self._stall_seconds += before.elapsed_time(after) / 1e3
                else:
                    self._holds.append((before, after))
        return self._stall_seconds

    def enqueue(
        self, into: torch.Tensor, pieces: Iterable[Piece], tensors: Tensors, dense: list[bool], aliases: Aliases
    ) -> Any:
        """Enqueue the copies of `pieces` into these bytes. From any thread. The returned event fires when they have
        ended.

        A tensor that has an alias is read through the alias. Raises MemoryGoneError if its memory is gone.
        """
        with self._side.lock, self.on_side():
            gathered: list[_Gatherable] = []
            begin = end = 0
            for part in self._parts(into, pieces, tensors, dense, aliases):
                if gathered and not (end == part.target and part.may_lie_at(part.target - begin)):
                    self._copy_gathered(into, gathered, begin, end)
                    gathered = []
                if not gathered:
                    begin = part.target
                gathered.append(part)
                end = part.end
            if gathered:
                self._copy_gathered(into, gathered, begin, end)
            return self._side.mark()

    def _parts(
        self, into: torch.Tensor, pieces: Iterable[Piece], tensors: Tensors, dense: list[bool], aliases: Aliases
    ) -> Iterator[_Gatherable]:
        """Enqueue the copies of pieces that cross the bus alone. Yields the others, which may be gathered first."""
        for target, number, source, length in pieces:
            if (alias := aliases.get(number)) is not None:
                # Only by the copy engine: it refuses an unmapped address, whereas a kernel would break the device.
                self._copy(into, target, alias.part_now(source, length))
            elif dense[number]:
                part = flat_bytes(tensors[number])
                if length != part.numel():
                    part = part[source : source + length]
                if length < PACK_BELOW:
                    yield _Gatherable(target, part, is_flat=True)
                else:
                    self._copy(into, target, part)
            else:
                for at, block, first, last in _blocks(tensors[number], source, source + length, SCRATCH_BYTES):
                    if last - first == block.nbytes:
                        yield _Gatherable(target + at - source, block, is_flat=False)
                    else:  # the segments begin or end within this block
                        self._copy_strided(into, target + at + first - source, block, first, last)

    def _copy_gathered(self, into: torch.Tensor, parts: list[_Gatherable], begin: int, end: int) -> None:
        """Copy parts that are adjacent in the file, through one buffer unless a single copy is enough."""
        scratch = None if len(parts) == 1 and parts[0].is_flat else self._side.scratch(end - begin)
        if scratch is None:
            for part in parts:
                if part.is_flat:
                    self._copy(into, part.target, part.tensor)
                else:
                    self._copy_strided(into, part.target, part.tensor, 0, part.tensor.nbytes)
            return
        for is_flat, group in groupby(parts, key=lambda part: part.is_flat):
            if is_flat:
                side_by_side = list(group)
                self._side.make_room()
                out = scratch[side_by_side[0].target - begin : side_by_side[-1].end - begin]
                torch.cat([part.tensor for part in side_by_side], out=out)
            else:
                for part in group:
                    self._side.make_room()
                    _gather(part.tensor, scratch[part.target - begin : part.end - begin])
        self._copy(into, begin, scratch)

    def _copy(self, into: torch.Tensor, begin: int, part: torch.Tensor) -> None:
        self._side.make_room()
        into[begin : begin + part.numel()].copy_(part, non_blocking=True)

    def _copy_strided(self, into: torch.Tensor, target: int, tensor: torch.Tensor, first: int, last: int) -> None:
        """Copy some bytes of a tensor that is not dense through small blocks, which are allocated for this."""
        for at, block, begin, end in _blocks(tensor, first, last, _BLOCK_BYTES):
            self._side.make_room()
            try:
                flat = flat_items(block)
            except RuntimeError:  # out of memory; if the device is broken, the next call raises, too
                flat = flat_bytes(self._on_host(block))
            self._copy(into, target + at + begin - first, flat[begin:end])

    def _on_host(self, block: torch.Tensor) -> torch.Tensor:
        """The items of a view, contiguous in host memory, for a device that has no memory left. Waits for the copy."""
        plain = block.conj() if block.is_conj() else block
        plain = torch._neg_view(plain) if plain.is_neg() else plain
        found = torch.empty(block.shape, dtype=block.dtype, device="cpu")
        self._copy_apart(plain, found)
        found = found.conj().resolve_conj() if block.is_conj() else found
        return found.neg() if block.is_neg() else found

    def _copy_apart(self, view: torch.Tensor, into: torch.Tensor) -> None:
        span = 1 + sum((length - 1) * stride for length, stride in zip(view.shape, view.stride(), strict=True))
        if span > 16 * view.numel():  # much unrelated memory lies between the items
            widest = max(range(view.dim()), key=lambda dim: (view.shape[dim] > 1) * view.stride(dim))
            for part, place in zip(view.tensor_split(2, widest), into.tensor_split(2, widest), strict=True):
                self._copy_apart(part, place)
            return
        there = torch.empty(span, dtype=view.dtype, device="cpu")
        there.copy_(view.as_strided((span,), (1,)), non_blocking=True)
        self._side.mark().synchronize()
        into.copy_(there.as_strided(view.shape, view.stride()))

    def sample(self, parts: Sequence[torch.Tensor]) -> HostFetch:
        """Enqueue the copy of a few bytes of each of these tensors to the host, after all copies so far."""
        num_bytes = sum(part.numel() for part in parts)
        with self._side.lock, self.on_side():
            box = self._side.box(num_bytes)
            if (joined := self._side.scratch(num_bytes)) is None:
                for at, byte in enumerate(chain(*(part.split(1) for part in parts))):
                    self._copy(box.tensor, at, byte)
            else:
                self._side.make_room()
                self._copy(box.tensor, 0, torch.cat(list(parts), out=joined))
            return HostFetch(self, box, num_bytes, self._side.mark())

    def copy_now(self, num_bytes: int, pieces: Sequence[Piece], tensors: list[torch.Tensor], dense: list[bool]) -> None:
        """Copy a few small pieces to the host, as `enqueue` does, and discard them."""
        with self._side.lock:
            box = self._side.box(num_bytes)
        self.wait(self.enqueue(box.tensor, pieces, tensors, dense, {}))
        self._side.give_back(box)

    def read(self, alias: Alias, begin: int, length: int, use: Callable[[memoryview], T]) -> T:
        """The result of `use` for some bytes of a tensor. Blocks. Raises MemoryGoneError."""
        with self._side.lock:
            box = self._side.box(length)
        try:
            self.wait(self.enqueue(box.tensor, [Piece(0, 0, begin, length)], [], [], {0: alias}))
        except BaseException:
            box.leak()  # the copy into it may still be running
            raise
        try:
            alias.part_now(begin, length)  # the memory is still there, so it was there during the copy
            return use(box.view[:length])
        finally:
            self._side.give_back(box)

    def in_turn(self, task: Callable[[], None], refused: Callable[[RuntimeError], None]) -> None:
        """Run a task that waits for a copy and then does what follows, on the thread that waits for this device's
        copies.

        Tasks run one after the other, since copies end in the order in which they were enqueued.
        """
        self._side.waiter.submit(task, refused)

    def wait(self, event: Any) -> None:
        """Block this thread, without the GIL, until the event has fired."""
        with self._backend.on_device(self.device):
            event.synchronize()

    def is_quiet(self) -> bool:
        """Wait until no copy is running. Returns False if the device is broken: then copies may still write.

        It waits for an event, since waiting for a stream is an error under `torch.cuda.set_sync_debug_mode("error")`.
        """
        try:
            with self._backend.on_device(self.device):
                self._side.mark().synchronize()
        except RuntimeError:
            return False
        return True


class _Gatherable(NamedTuple):
    """Bytes of one tensor that may be gathered with adjacent ones: flat bytes, or a view that is copied as a whole."""

    target: int
    tensor: torch.Tensor
    is_flat: bool

    @property
    def end(self) -> int:
        return self.target + self.tensor.nbytes

    def may_lie_at(self, offset: int) -> bool:
        """True if it fits at this offset of a scratch buffer, and its items are aligned there."""
        item_bytes = 1 if self.is_flat else self.tensor.element_size()
        return offset + self.tensor.nbytes <= SCRATCH_BYTES and offset % item_bytes == 0


class HostFetch:
    """The copy of a few bytes to the host, enqueued by `Device.sample`. Any one thread may take the bytes, once."""

    def __init__(self, device: Device, box: HostBuffer, num_bytes: int, event: Any) -> None:
        self._device, self._num_bytes, self._event = device, num_bytes, event
        self._box: HostBuffer | None = box

    def bytes(self) -> bytes:
        """Wait for the bytes and return them. Call it once."""
        self._device.wait(self._event)
        assert self._box is not None
        data = bytes(self._box.view[: self._num_bytes])
        self._device._side.give_back(self._box)
        self._box = None
        return data

    def __del__(self) -> None:
        if self._box is not None:  # the copy into it may still be running
            self._box.leak()


# ctypes releases the GIL around a foreign call. That pays off only if the copy takes longer than switching threads.
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


# process_vm_writev copies between processes, and so also within one.
_VECTOR_BYTES: Final = 2 * ctypes.sizeof(ctypes.c_size_t)
_MAX_VECTORS: Final = 1024  # the kernel's limit for one call
_process_vm_writev: Any = None
if sys.platform == "linux":
    _process_vm_writev = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_writev", None)
if _process_vm_writev is not None:
    _process_vm_writev.restype = ctypes.c_ssize_t
    _process_vm_writev.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong
    ]  # fmt: skip


def copy_by_kernel(target: int, source: int, num_bytes: int) -> int | None:
    """Copy host memory from address to address. Returns the number of bytes copied.

    Fewer than `num_bytes` are copied if some of the source is not mapped, where memmove would end the process. None if
    the system does not copy: some seccomp profiles refuse the call, and only Linux has it.

    The call takes 1.15 times as long as memmove. Reading from this process instead of writing to it would take 1.6
    times as long: the kernel looks up the remote side page by page, and a segment is in huge pages.
    """
    if _process_vm_writev is None:
        return None
    vector = (ctypes.c_size_t * 2)(source, num_bytes)  # struct iovec
    return _write_vectors(target, num_bytes, ctypes.addressof(vector), 1)


def sample_by_kernel(target: int, addresses: torch.Tensor) -> int | None:
    """Like `copy_by_kernel`, for the single bytes at these addresses, an int64 tensor of any shape."""
    if _process_vm_writev is None:
        return None
    vectors = torch.stack((addresses.flatten(), torch.ones_like(addresses).flatten()), dim=-1)
    num_bytes, first = len(vectors), vectors.data_ptr()
    for num_done in range(0, num_bytes, _MAX_VECTORS):
        length = min(_MAX_VECTORS, num_bytes - num_done)
        num_copied = _write_vectors(target + num_done, length, first + num_done * _VECTOR_BYTES, length)
        if num_copied != length:
            return None if num_copied is None else num_done + num_copied
    return num_bytes


def sample_now(target: bytearray, addresses: torch.Tensor) -> None:
    """Like `sample_by_kernel`, in half the time, for memory that cannot be freed meanwhile."""
    first, last = int(addresses.min()), int(addresses.max())
    memory = _bytes_at(first, addresses.device, last + 1 - first)
    # Not `torch.take`: it always uses several threads, and waits for threads of a training on the host.
    torch.index_select(memory, 0, (addresses - first).flatten(), out=torch.frombuffer(target, dtype=torch.uint8))


@lru_cache(maxsize=4096)  # making a tensor takes microseconds, and most saves read the same memory as the last one
def _bytes_at(address: int, device: torch.device, length: int, stride: int = 1) -> torch.Tensor:
    """A tensor of `length` bytes that other code owns: every `stride`-th byte from an address on."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, (length - 1) * stride + 1)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (length,), (stride,))


def _write_vectors(target: int, num_bytes: int, vectors: int, num_vectors: int) -> int | None:
    into = (ctypes.c_size_t * 2)(target, num_bytes)
    num_copied: int = _process_vm_writev(os.getpid(), vectors, num_vectors, ctypes.addressof(into), 1, 0)
    if num_copied >= 0:
        return num_copied
    return 0 if ctypes.get_errno() == errno.EFAULT else None


def host_pointer(tensor: torch.Tensor) -> int:
    """The address of a dense CPU tensor; 0 for any other tensor, and for a tensor without bytes."""
    return tensor.data_ptr() if is_on_host(tensor) and is_dense(tensor) else 0


def bytes_of(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    """All bytes of a storage, as a 1-D uint8 tensor."""
    alias = torch.empty(0, dtype=torch.uint8, device=device)
    return alias.set_(storage, 0, (storage.nbytes(),), (1,))


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor, as a 1-D uint8 tensor that keeps its storage alive, not the tensor."""
    alias = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    item_bytes = tensor.element_size()
    return alias.set_(
        tensor.untyped_storage(), tensor.storage_offset() * item_bytes, (tensor.numel() * item_bytes,), (1,)
    )


class MemoryGoneError(RuntimeError):
    """The memory of a deferred tensor is gone; the snapshot's error names the tensor."""


class Alias:
    """The bytes of a dense tensor at its current address, which stay readable after its `.data` was replaced.

    An alias keeps the storage alive. The storage may still lose its memory by `untyped_storage().resize_()`, so bytes
    that were read count only if the memory `is_there` afterwards. A snapshot creates one alias for each deferred
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

        They are read by their address. Through the storage, a read just after a resize would read at address 0, and
        `set_` would even allocate memory for the storage again.
        """
        return _bytes_at(self.address + begin, self.device, length, stride)

    def part_now(self, begin: int, length: int) -> torch.Tensor:
        """Like `part`, but raises MemoryGoneError if the storage has lost its memory."""
        if not self.is_there():
            raise MemoryGoneError
        return self.part(begin, length)

    def is_there(self) -> bool:
        return (self._storage.data_ptr(), self._storage.nbytes()) == self._memory

    def copy_to(self, target: int, begin: int, length: int) -> bool:
        """Copy some of the bytes, on the host, to an address. Returns False if the storage has lost them meanwhile.

        If the kernel cannot copy for us, a resize by another thread in the middle of the copy ends the process.
        """
        num_done = 0
        while num_done < length and self.is_there():
            source = self.address + begin + num_done
            num_copied = copy_by_kernel(target + num_done, source, length - num_done)
            if num_copied is None:
                num_copied = min(_UNCHECKED_BYTES, length - num_done)
                memmove(target + num_done, source, num_copied)
            elif num_copied == 0:
                return False
            num_done += num_copied
        return self.is_there()

    def sample_to(self, target: int, addresses: torch.Tensor) -> bool:
        """Like `copy_to`, for the single bytes at these addresses within it, a tensor as for `sample_by_kernel`."""
        if not self.is_there():
            return False
        num_copied = sample_by_kernel(target, addresses)
        if num_copied is None:
            for at, source in enumerate(addresses.tolist(), target):
                memmove(at, source, 1)
        return num_copied in (None, len(addresses)) and self.is_there()


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the items as integers of the same size: torch copies some of its dtypes only if they are dense."""
    integers = INTEGERS.get(tensor.element_size())
    return tensor if integers is None else tensor.view(integers)


def dense_blocks(tensor: torch.Tensor, begin: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(offset, bytes) blocks that cover bytes [begin, end) of a tensor, in the order of a dense copy of it.

    Blocks have a few MiB, so that a transposed 8 GB weight does not need another 8 GB. Conj and neg views are resolved.
    """
    for at, block, first, last in _blocks(tensor, begin, end, _BLOCK_BYTES):
        yield at + first, flat_items(block)[first:last]


def flat_items(block: torch.Tensor) -> torch.Tensor:
    """The bytes of a view's items, contiguous; in newly allocated memory unless they already are."""
    return flat_bytes(as_integers(block.resolve_conj().resolve_neg()).contiguous())


def _blocks(
    tensor: torch.Tensor, begin: int, end: int, block_bytes: int
) -> Iterator[tuple[int, torch.Tensor, int, int]]:
    """(offset, view, first, last): views of parts of a tensor, and the bytes of each that are in [begin, end)."""
    num_bytes = tensor.nbytes
    if num_bytes <= block_bytes or tensor.dim() == 0:
        first, last = max(0, begin), min(end, num_bytes)
        if first < last:
            yield 0, tensor, first, last
        return
    row_bytes = num_bytes // tensor.shape[0]
    num_rows = max(1, block_bytes // row_bytes)
    for row in range(max(0, begin) // row_bytes, min(tensor.shape[0], -(-end // row_bytes)), num_rows):
        offset = row * row_bytes
        part = tensor[row] if row_bytes > block_bytes else tensor[row : row + num_rows]
        for at, block, first, last in _blocks(part, begin - offset, end - offset, block_bytes):
            yield offset + at, block, first, last


def _gather(tensor: torch.Tensor, into: torch.Tensor) -> None:
    """Write the items of a tensor contiguously, by one kernel."""
    tensor = tensor.detach()
    if not (tensor.is_conj() or tensor.is_neg()):
        tensor = as_integers(tensor)
    into.view(tensor.dtype).view(tensor.shape).copy_(tensor)


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
        raise UsageError("save was called while a graph is being captured; call it before or after the capture")
    return device
