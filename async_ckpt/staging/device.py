"""One CUDA device during one save: its side stream, and who waits for whom.

In: pieces of device tensors. Out: copies enqueued into segments, and events that mark their end.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Final

import torch

from ..backends import cuda
from ..format.layout import Piece
from ..host.pool import Segment
from ..spec import KIB, MIB

# Tensors below this are gathered by one kernel and cross the bus together.
_PACK_BELOW: Final = 256 * KIB
_SCRATCH_BYTES: Final = 32 * MIB
# A tensor that is not dense is made so in blocks of this size, never as a whole.
_BLOCK_BYTES: Final = 4 * MIB
# Where the kernel does not copy for us, a storage is looked at before each piece of this size.
_UNCHECKED_BYTES: Final = 4 * MIB


class _Side:
    """What one device keeps between saves: its side stream, and the buffer that small tensors are packed into.

    The buffer is used by copies of one stream only, which run one after the other, so it needs no fence; `lock`
    keeps two threads from interleaving the two halves of a packed copy.
    """

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.Lock()
        self.side = cuda.new_stream(device)
        with torch.inference_mode(False), cuda.on_stream(device, self.side):
            self.scratch = torch.empty(_SCRATCH_BYTES, dtype=torch.uint8, device=device)


_sides: dict[torch.device, _Side] = {}


class Device:
    """The copies of one save from one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kept = _sides.get(device) or _sides.setdefault(device, _Side(device))
        self._holds: list[tuple[Any, Any]] = []  # events before and after each

    @property
    def side(self) -> Any:
        return self._kept.side

    def on_side(self) -> AbstractContextManager[Any]:
        """Enqueue on the side stream."""
        return cuda.on_stream(self.device, self.side)

    def follow_training(self) -> None:
        """Copies enqueued from now on see all that was enqueued on the current stream until now."""
        self.side.wait_stream(cuda.current_stream(self.device))

    def hold_training(self) -> None:
        """What is enqueued on the current stream from now on waits for the copies enqueued until now."""
        stream = cuda.current_stream(self.device)
        before, after = cuda.timing_event(), cuda.timing_event()
        before.record(stream)
        stream.wait_stream(self.side)
        after.record(stream)
        self._holds.append((before, after))

    def keep(self, tensor: torch.Tensor) -> None:
        """Have the allocator lend the tensor's memory to nobody before the copies enqueued until then have ended."""
        flat_bytes(tensor).record_stream(self.side)

    def stall_seconds(self) -> float:
        """How long streams of this device have waited for copies; a wait that is not over yet counts as zero.

        Waits on a failed device count as zero, too: its save may be committed all the same.
        """
        try:
            with cuda.on_device(self.device):
                ended = [(before, after) for before, after in self._holds if after.query()]
                return float(sum(before.elapsed_time(after) for before, after in ended)) / 1e3
        except RuntimeError:
            return 0.0

    def enqueue(
        self,
        segment: Segment,
        pieces: Iterable[Piece],
        tensors: list[torch.Tensor],
        dense: list[bool],
        aliases: Mapping[int, Alias],
    ) -> Any:
        """Enqueue the copies of `pieces` into `segment`; the event fires when they have ended. From any thread.

        A tensor that has an alias is read through that.
        """
        with self._kept.lock, self.on_side():
            packed: list[torch.Tensor] = []
            packed_begin = packed_end = 0
            for target, number, source, length in pieces:
                if not dense[number]:
                    for offset, block in dense_blocks(tensors[number], source, source + length):
                        at = target + offset - source
                        segment.tensor[at : at + block.numel()].copy_(block, non_blocking=True)
                    continue
                alias = aliases.get(number)
                if alias is None:
                    part = flat_bytes(tensors[number])[source : source + length]
                else:
                    part = alias.part(source, length)
                if length >= _PACK_BELOW:
                    segment.tensor[target : target + length].copy_(part, non_blocking=True)
                    continue
                if packed and (packed_end != target or target + length - packed_begin > _SCRATCH_BYTES):
                    self._copy_packed(segment, packed, packed_begin, packed_end)
                    packed = []
                if not packed:
                    packed_begin = target
                packed.append(part)
                packed_end = target + length
            if packed:
                self._copy_packed(segment, packed, packed_begin, packed_end)
            return self._mark()

    def _mark(self) -> Any:
        event = cuda.waiting_event()
        event.record(self.side)
        return event

    def wait(self, event: Any) -> None:
        """Block this thread, off the GIL, until the event has fired."""
        with cuda.on_device(self.device):
            event.synchronize()

    def synchronize(self) -> None:
        """Wait until no copy is under way any more; what a broken device says is not news to who calls this."""
        with suppress(RuntimeError), cuda.on_device(self.device):
            self.side.synchronize()

    def _copy_packed(self, segment: Segment, parts: list[torch.Tensor], begin: int, end: int) -> None:
        scratch = self._kept.scratch[: end - begin]
        torch.cat(parts, out=scratch)
        segment.tensor[begin:end].copy_(scratch, non_blocking=True)


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
    num_bytes = sum(length for _, length in sources)
    flat = [number for source in (*sources, (target, num_bytes)) for number in source]
    vectors = (ctypes.c_size_t * len(flat))(*flat)  # struct iovec, one after the other
    at = ctypes.addressof(vectors)
    last = at + ctypes.sizeof(vectors) - 2 * ctypes.sizeof(ctypes.c_size_t)
    copied: int = _process_vm_writev(os.getpid(), at, len(sources), last, 1, 0)
    if copied >= 0:
        return copied
    return 0 if ctypes.get_errno() == errno.EFAULT else None


def host_pointer(tensor: torch.Tensor) -> int:
    """The address of a dense CPU tensor; 0 for any other, and for one without bytes."""
    dense = cuda.is_on_host(tensor) and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    return tensor.data_ptr() if dense else 0


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

    __slots__ = ("_memory", "_pages", "_storage", "address", "device", "num_bytes")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = tensor.untyped_storage()
        self._memory = self._storage.data_ptr(), self._storage.nbytes()
        self.device = tensor.device
        self.address, self.num_bytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        # The same memory by its address: through the storage, a read just after a resize would be one at address 0, and
        # `set_` would even give the storage memory again.
        self._pages = torch._C._construct_storage_from_data_pointer(self.address, self.device, self.num_bytes)

    def part(self, begin: int, length: int, stride: int = 1) -> torch.Tensor:
        """`length` bytes from `begin` on, every `stride`-th one."""
        empty = torch.empty(0, dtype=torch.uint8, device=self.device)
        return empty.set_(self._pages, begin, (length,), (stride,))

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
    device = next((there for tensor in tensors if (there := cuda.device_of(tensor)) is not None), None)
    if device is not None and cuda.is_capturing():
        raise RuntimeError(
            "save was called while a CUDA graph is being captured; call it before or after the capture"
        )
    return device
