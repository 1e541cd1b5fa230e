"""The weights of one sync, copied to host memory while they are exported.

In: names and tensors, one after the other, as verl's engines export them. Out: a snapshot of all of them. Knows nothing
of: verl, versions.

An exported tensor is valid only until the next one, which may reuse its memory. So each tensor is copied at once, into
a few large buffers that other processes of the host can map. A tensor is never split.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Final

import torch

from ...errors import UnsupportedStateError
from ...plumbing import capture, kept_memory, spec
from ...plumbing import captured as captured_state

_ALIGNMENT: Final = 64
_HALF_BYTES: Final = 2


class GatheredWeights:
    """The tensors of one sync. Created and filled by the thread that iterates over the export.

    A buffer has `room_bytes`, or the size of a larger tensor. With `shared`, the buffers are in memory that other
    processes can map, if the system has such memory.
    """

    def __init__(self, room_bytes: int, *, shared: bool, max_bytes: int | None) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.num_bytes = 0
        self._room_bytes, self._shared, self._max_bytes = room_bytes, shared, max_bytes
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._used_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor. Raises UnsupportedStateError, ValueError for a repeated name, and MemoryError."""
        why = capture.why_not(tensor)
        if why is not None:
            raise UnsupportedStateError(f"{name!a}: {why}; nothing was sent", path=name)
        if name in self.tensors:
            raise ValueError(f"the weights have {name!a} twice; nothing was sent")
        region = self._region(tensor.nbytes)
        with torch.inference_mode(False), torch.no_grad():
            copy = region.view(tensor.dtype).view(tensor.shape)
            copy.copy_(tensor.detach())
        self.tensors[name] = copy
        self.num_bytes += tensor.nbytes

    def _region(self, num_bytes: int) -> torch.Tensor:
        begin = spec.align_up(self._used_bytes, _ALIGNMENT)
        if begin + num_bytes > len(self._buffer):
            begin = 0
            self._buffer = kept_memory.host_memory().lend(
                max(num_bytes, self._room_bytes), max_bytes=self._max_bytes, shared=self._shared
            )
        self._used_bytes = begin + num_bytes
        return self._buffer[begin : self._used_bytes]

    def drop(self) -> None:
        """Release the memory. No more tensors are added."""
        self.tensors, self._buffer = {}, self._buffer[:0].clone()

    @property
    def room_for_all(self) -> int:
        """The size of one buffer that has room for all these weights."""
        return sum(spec.align_up(tensor.nbytes, _ALIGNMENT) for tensor in self.tensors.values())

    @property
    def change_little(self) -> bool:
        """Whether most bytes are of floating point types of at most two bytes, of which a training step changes few."""
        small = sum(
            tensor.nbytes
            for tensor in self.tensors.values()
            if tensor.is_floating_point() and tensor.element_size() <= _HALF_BYTES
        )
        return 2 * small > self.num_bytes

    def snapshot(self) -> captured_state.SnapshotView:
        """The tensors as a snapshot, without another copy. They must not be written to afterwards."""
        captured = capture.capture(self.tensors)
        completion: Future[None] = Future()
        completion.set_result(None)
        return captured_state.SnapshotView(
            captured_state.SnapshotCopies(captured, captured.tensors, completion), captured_state.structure_of(captured)
        )
