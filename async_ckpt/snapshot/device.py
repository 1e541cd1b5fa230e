"""One CUDA device during one save: its side stream, and who waits for whom.

In: pieces of device tensors. Out: copies enqueued into segments, and events that mark their end.
Knows nothing of: optimizers, files, the other devices.

Order, then release: the side stream waits for the training stream, the copies are enqueued, the training stream
waits for the last of them. The Python thread never does.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from ..format.layout import Piece
from ..spec import KIB, MIB
from .cuda import on_device
from .pool import Segment

# Tensors below this are gathered by one kernel and cross the bus together.
_PACK_BELOW: Final = 256 * KIB
_SCRATCH_BYTES: Final = 32 * MIB
# A tensor that is not dense is made so in blocks of this size, never as a whole.
_BLOCK_BYTES: Final = 4 * MIB


class _Lane:
    """What one device keeps between saves: its side stream, and the buffer that small tensors are packed into.

    The buffer is used by copies of one stream only, which run one after the other, so it needs no fence; `lock`
    keeps two threads from interleaving the two halves of a packed copy.
    """

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.Lock()
        self.side = torch.cuda.Stream(device)
        with torch.inference_mode(False), on_device(device), torch.cuda.stream(self.side):
            self.scratch = torch.empty(_SCRATCH_BYTES, dtype=torch.uint8, device=device)


_lanes: dict[torch.device, _Lane] = {}


class Device:
    """The copies of one save from one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lane = _lanes.get(device) or _lanes.setdefault(device, _Lane(device))
        self._holds: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @property
    def side(self) -> torch.cuda.Stream:
        return self._lane.side

    @contextmanager
    def on_side(self) -> Iterator[None]:
        """Enqueue on the side stream. The device is set around the stream, or leaving it on a thread that has none
        yet would make a context on the first GPU.
        """
        with on_device(self.device), torch.cuda.stream(self.side):
            yield

    def follow_training(self) -> None:
        """Copies enqueued from now on see all that was enqueued on the current stream until now."""
        self.side.wait_stream(torch.cuda.current_stream(self.device))

    def hold_training(self) -> None:
        """What is enqueued on the current stream from now on waits for the copies enqueued until now."""
        stream = torch.cuda.current_stream(self.device)
        before = torch.cuda.Event(enable_timing=True)
        after = torch.cuda.Event(enable_timing=True)
        before.record(stream)
        stream.wait_stream(self.side)
        after.record(stream)
        self._holds.append((before, after))

    def stall_seconds(self) -> float:
        """How long streams of this device have waited for copies; a wait that is not over yet counts nothing.

        Nor does any on a device that is broken by now: its save may be committed all the same.
        """
        try:
            with on_device(self.device):
                ended = [(before, after) for before, after in self._holds if after.query()]
                return float(sum(before.elapsed_time(after) for before, after in ended)) / 1e3
        except RuntimeError:
            return 0.0

    def enqueue(
        self, segment: Segment, pieces: Iterable[Piece], tensors: list[torch.Tensor], dense: list[bool]
    ) -> torch.cuda.Event:
        """Enqueue the copies of `pieces` into `segment`; the event fires when they have ended. From any thread."""
        with self._lane.lock, self.on_side():
            packed: list[torch.Tensor] = []
            packed_begin = packed_end = 0
            for target, number, source, length in pieces:
                if not dense[number]:
                    for offset, block in dense_blocks(tensors[number], source, source + length):
                        at = target + offset - source
                        segment.tensor[at : at + block.numel()].copy_(block, non_blocking=True)
                    continue
                part = flat_bytes(tensors[number])[source : source + length]
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
            event = torch.cuda.Event(blocking=True)  # a waiting thread sleeps instead of spinning
            event.record(self.side)
            return event

    def _copy_packed(self, segment: Segment, parts: list[torch.Tensor], begin: int, end: int) -> None:
        scratch = self._lane.scratch[: end - begin]
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


def host_pointer(tensor: torch.Tensor) -> int:
    """The address of a dense CPU tensor; 0 for any other, and for one without bytes."""
    dense = (
        tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    )
    return tensor.data_ptr() if dense else 0


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor, as a 1-D uint8 tensor that keeps its storage alive, not the tensor."""
    alias = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    item_bytes = tensor.element_size()
    return alias.set_(
        tensor.untyped_storage(), tensor.storage_offset() * item_bytes, (tensor.numel() * item_bytes,), (1,)
    )


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
    """The first CUDA device with something to save. Raises RuntimeError while a graph is being captured on it."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if device is not None and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "save was called while a CUDA graph is being captured; call it before or after the capture"
        )
    return device


def synchronize(devices: Iterable[Device]) -> None:
    """Wait until no copy is under way any more; what a broken device says is not news to who calls this."""
    for device in devices:
        try:
            with on_device(device.device):
                device.side.synchronize()
        except RuntimeError:
            pass


def event_wait(device: torch.device, event: Any) -> None:
    """Block this thread, off the GIL, until the event of that device has fired."""
    with on_device(device):
        event.synchronize()
