"""The side stream of one device, with its buffers: created once in a process, and kept between saves.

In: a device. Out: a stream for copies, scratch memory on the device, page-locked memory for a few bytes. Knows nothing
of: tensors, saves.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from typing import Final

import torch

from ..backends import StreamEvent, backend_of
from ..host.memory import HostBuffer
from ..host.process import OnceInProcess
from ..host.threads import Crew
from ..spec import PAGE_BYTES, align_up

# A driver queues about 1,024 launches for a stream (1,021 on an H200). The next launch blocks, and with it calls of
# other threads. So when many operations are in the queue, we wait for an event before we enqueue more.
_MARK_EVERY: Final = 128
_MAX_MARKS: Final = 4
MAX_UNDER_WAY: Final = (_MAX_MARKS + 1) * _MARK_EVERY


class SideStream:
    """The side stream of one device. `side_of` creates it, and the `Device` of each save uses it."""

    def __init__(self, device: torch.device) -> None:
        # Keeps two threads from interleaving the two halves of a packed copy: into the scratch buffer, and out of it.
        # The buffer needs no other protection, since copies of one stream run one after the other.
        self.lock = threading.Lock()
        self.device, self.backend = device, backend_of(device)
        self.stream = self.backend.new_stream(device)
        self.waiter = Crew(f"wait-{device.index}", 1)
        self._scratch: torch.Tensor | None = None  # under `lock`, like all fields below
        self._refused_bytes: int | None = None  # the size of the scratch buffer for which the device had no memory
        self._boxes: list[HostBuffer] = []
        self._num_unmarked = 0
        self._marks: deque[StreamEvent] = deque()  # events, one after each `_MARK_EVERY` operations

    # --- all below: under `lock`, on the side stream ------------------------------------------------------------

    def mark(self) -> StreamEvent:
        """An event that fires when everything enqueued so far has ended."""
        event = self.backend.waiting_event()
        event.record(self.stream)
        return event

    def make_room(self) -> None:
        """Count one operation that is about to be enqueued; wait while too many are queued."""
        self._num_unmarked += 1
        if self._num_unmarked >= _MARK_EVERY:
            self._num_unmarked = 0
            self._marks.append(self.mark())
            if len(self._marks) > _MAX_MARKS:
                self._marks.popleft().synchronize()

    def scratch(self, num_bytes: int) -> torch.Tensor | None:
        """A buffer on the device; None if there is no memory left for it.

        Before torch's allocator refuses, it frees all memory that it has cached for the training, which must then
        allocate it again. So after a refusal the allocator is asked only when the driver reports enough free memory.
        """
        if self._scratch is None or self._scratch.numel() < num_bytes:
            if self._is_hopeless(num_bytes):
                return None
            self._scratch = None  # first, so that the larger buffer may have its memory
            try:
                with torch.inference_mode(False):
                    self._scratch = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            except RuntimeError:  # out of memory; a broken device raises at the next call as well
                self._refused_bytes = num_bytes
                return None
            self._refused_bytes = None
        return self._scratch[:num_bytes]

    def forget_refusal(self) -> None:
        """Allow the allocator to be asked again."""
        self._refused_bytes = None

    def _is_hopeless(self, num_bytes: int) -> bool:
        if self._refused_bytes is None or num_bytes < self._refused_bytes:
            return False
        free_bytes = self.backend.free_bytes(self.device)
        return free_bytes is None or free_bytes < num_bytes

    def box(self, num_bytes: int) -> HostBuffer:
        """Page-locked memory for a few bytes from the device."""
        for box in self._boxes:
            if box.num_bytes >= num_bytes:
                self._boxes.remove(box)
                return box
        box = HostBuffer(align_up(num_bytes, PAGE_BYTES), self.device)
        locker = Crew(f"lock-{self.device.index}", 1)
        with suppress(RuntimeError):  # refused, or no thread is left: then the copy blocks
            box.lock_by(locker, self.device)
        locker.stop()
        return box

    # --- any thread ---------------------------------------------------------------------------------------------

    def give_back(self, box: HostBuffer) -> None:
        if box.pinned:  # a copy into pageable memory blocks, so the next save tries to page-lock another buffer
            with self.lock:
                self._boxes.append(box)


side_of: Final = OnceInProcess(SideStream)
