"""Tripwires detect that a tensor was written to before its copy was complete.

In: deferred tensors, at `save` and later. Out: the numbers of torn tensors. Knows nothing of: segments, threads.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import torch

from .device import Alias, MemoryGoneError, sample_by_kernel, sample_now
from .tensors import SourceTensors

# The number of bytes that are compared in each deferred tensor.
SAMPLE_BYTES: Final = 64
_STEPS: Final = torch.arange(SAMPLE_BYTES, dtype=torch.int64, device="cpu")
# The number of tensors that are sampled at once. For more than 32,768 numbers, torch would use several threads, and
# wait for threads of a training on the host.
_AT_ONCE: Final = 128


class _WatchedTensor:
    """One deferred tensor: the stride of its samples, and the counters of writes to it."""

    __slots__ = ("_counters", "_owner", "_versions", "alias", "number", "stride")

    def __init__(self, number: int, alias: Alias, tensor: torch.Tensor, owner: torch.Tensor) -> None:
        """`owner` is the optimizer's own tensor of this memory, perhaps the same object."""
        self.number, self.alias = number, alias
        # With an odd stride, samples hit every byte position of an item in turn.
        self.stride = (alias.num_bytes // SAMPLE_BYTES - 1) | 1
        self._owner, self._counters = owner, (tensor,) if tensor is owner else (tensor, owner)
        self._versions = list(map(version_of, self._counters))

    def has_moved(self) -> bool:
        """True if a write was counted. A parameter with new `.data` counts writes to other memory, so it is ignored."""
        versions = list(map(version_of, self._counters))
        return versions != self._versions and self._owner.data_ptr() == self.alias.address


def _sampled_on_host(tensors: Sequence[_WatchedTensor], gone: set[int] | None) -> bytearray:
    """Samples of tensors on the host, taken at once. A tensor that is gone gets zeros, and its number is added to
    `gone`.

    On the caller's thread, where no tensor can be freed, `gone` is None.
    """
    samples = bytearray(len(tensors) * SAMPLE_BYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(samples))
    starts = torch.frombuffer(array("q", [w.alias.address for w in tensors]), dtype=torch.int64)
    strides = torch.frombuffer(array("q", [w.stride for w in tensors]), dtype=torch.int64)
    addresses = torch.addcmul(starts[:, None], strides[:, None], _STEPS)
    if gone is None:
        sample_now(samples, addresses)
    elif sample_by_kernel(address, addresses) != len(samples):
        # A tensor is gone, or the kernel cannot copy for us: sample each tensor separately.
        for at, watched in enumerate(tensors):
            if not watched.alias.sample_to(address + at * SAMPLE_BYTES, addresses[at]):
                gone.add(watched.number)
    return samples


class Tripwires:
    """Version counters and samples of one snapshot's deferred tensors, taken in `begin` and compared later.

    A version counter that moved proves a write. A counter that did not move proves nothing, as fused kernels and
    `.data` do not move it, so bytes are compared, too. The thread that copies compares the bytes. The counters are
    compared by that thread or by the optimizer's next step, whichever comes first.
    """

    def __init__(self, source: SourceTensors) -> None:
        self._devices = source.devices
        self._watched = [
            _WatchedTensor(i, alias, source.tensors[i], source.deferred[i]) for i, alias in source.aliases.items()
        ]
        self._on: dict[torch.device, list[_WatchedTensor]] = {}
        for watched in self._watched:
            self._on.setdefault(watched.alias.device, []).append(watched)
        self._gone: set[int] = set()
        self._before = {device: self._sample(device, tensors, None) for device, tensors in self._on.items()}
        self._after: dict[torch.device, Callable[[], bytes]] = {}  # these wait for the samples, and are called once
        # Empty, or one entry. `setdefault` is one atomic call of C, so no lock is needed: Ctrl-C may interrupt a step.
        self._moved: dict[str, list[int]] = {}

    def look_at_versions(self) -> None:
        """Compare the counters, at the first call only: before the optimizer's next step, or after the last copy."""
        if not self._moved:
            moved = [watched.number for watched in self._watched if watched.has_moved()]
            self._moved.setdefault("first look", moved)

    def look_at_bytes(self) -> None:
        """Take the second samples: every copy is done or enqueued, and no optimizer has stepped yet."""
        for device, tensors in self._on.items():
            with suppress(MemoryGoneError):  # the tensor is in `_gone`
                self._after[device] = self._sample(device, tensors, self._gone)
        self._look_for_gone()

    def _look_for_gone(self) -> None:
        self._gone.update(watched.number for watched in self._watched if not watched.alias.is_there())

    def torn(self) -> list[int]:
        """The tensors that were written to between the samples, or lost their memory. Waits for the samples."""
        torn = self._gone.union(*self._moved.values())
        for device, second in self._after.items():
            before, after = self._before[device](), second()
            for at, watched in enumerate(self._on[device]):
                sample = slice(at * SAMPLE_BYTES, (at + 1) * SAMPLE_BYTES)
                if before[sample] != after[sample]:
                    torn.add(watched.number)
        return sorted(torn)

    def _sample(
        self, device: torch.device, tensors: Sequence[_WatchedTensor], gone: set[int] | None
    ) -> Callable[[], bytes]:
        """Sample tensors of one device: on the host at once, or on the device's side stream, after the copies.

        Raises MemoryGoneError if a tensor is gone from a device: reading memory that is not mapped would break the
        device.
        """
        if device not in self._devices:
            groups = (tensors[begin : begin + _AT_ONCE] for begin in range(0, len(tensors), _AT_ONCE))
            samples = b"".join(_sampled_on_host(group, gone) for group in groups)
            return lambda: samples
        parts = [w.alias.part(0, SAMPLE_BYTES, w.stride) for w in tensors]
        if gone is not None:
            self._look_for_gone()
        if gone:
            raise MemoryGoneError
        return self._devices[device].sample(parts).bytes


def version_of(tensor: torch.Tensor) -> int | None:
    """A number that most writes to the tensor's memory change; None for inference tensors, which have none."""
    return None if tensor.is_inference() else tensor._version
