"""What betrays a tensor that was written to while it was still to be copied.

In: deferred tensors, at `save` and later. Out: the numbers of those that are torn. Knows nothing of: segments, threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final, Protocol

import torch

from .device import Alias, sample_by_kernel, sample_now
from .tensors import SourceTensors

# Bytes looked at in each deferred tensor by its tripwire.
_SAMPLE_BYTES: Final = 64


class _WatchedTensor:
    """One deferred tensor: where it is sampled, and who counts the writes to it."""

    def __init__(self, number: int, alias: Alias, tensor: torch.Tensor, owner: torch.Tensor) -> None:
        """`owner` is the optimizer's own, and may be the same."""
        self.number, self.alias = number, alias
        # An odd stride meets every byte of an item in turn.
        self.stride = (alias.num_bytes // _SAMPLE_BYTES - 1) | 1
        self._owner, self._counters = owner, (tensor,) if tensor is owner else (tensor, owner)
        self._versions = list(map(version_of, self._counters))

    def has_moved(self) -> bool:
        """Whether a write was counted. Once a parameter's `.data` is other memory, writes to that are counted as well."""
        now = list(map(version_of, self._counters))
        return now != self._versions and self._owner.data_ptr() == self.alias.address


class _Sample(Protocol):
    """Bytes of several tensors, one after the other."""

    def bytes(self) -> bytes:
        """Wait for them. Once."""


class _HostSample:
    """Those that are there already; of what is gone, zeros."""

    def __init__(self, there: Sequence[_WatchedTensor], gone: set[int] | None) -> None:
        """`gone` takes the numbers of those that are; None in `save`, where the caller's thread is, and none goes."""
        samples = bytearray(len(there) * _SAMPLE_BYTES)
        address = ctypes.addressof(ctypes.c_char.from_buffer(samples))
        starts = torch.tensor([(w.alias.address, w.stride) for w in there], dtype=torch.int64, device="cpu")
        steps = torch.arange(_SAMPLE_BYTES, dtype=torch.int64, device="cpu")
        addresses = starts[:, :1] + starts[:, 1:] * steps
        if gone is None:
            sample_now(samples, addresses)
        elif sample_by_kernel(address, addresses) != len(samples):
            # One is gone, or nobody copies for us: each by itself.
            for at, watched in enumerate(there):
                offsets = range(0, watched.stride * _SAMPLE_BYTES, watched.stride)
                if not watched.alias.sample_to(address + at * _SAMPLE_BYTES, offsets):
                    gone.add(watched.number)
        self._samples = samples

    def bytes(self) -> bytes:
        return bytes(self._samples)


class Tripwires:
    """Versions and samples of the deferred tensors, taken in `save` and looked at again.

    A moved version counter is proof of a write; one that stands still is not (fused kernels and `.data` do not move
    it), hence the bytes.
    """

    def __init__(self, source: SourceTensors) -> None:
        self._devices = source.devices
        self._watched = [
            _WatchedTensor(i, alias, source.tensors[i], source.deferred[i])
            for i, alias in source.aliases.items()
        ]
        self._on: dict[torch.device, list[_WatchedTensor]] = {}
        for watched in self._watched:
            self._on.setdefault(watched.alias.device, []).append(watched)
        self._gone: set[int] = set()
        self._before = {device: self._sample(device, there, None) for device, there in self._on.items()}
        self._after: dict[torch.device, _Sample] = {}
        self._moved: dict[str, list[int]] = {}  # nothing, or one entry, made in one step

    def look_at_versions(self) -> None:
        """Before the optimizer's next step, or when every copy has ended: whatever comes first, and that alone."""
        if not self._moved:
            moved = [watched.number for watched in self._watched if watched.has_moved()]
            self._moved.setdefault("first look", moved)

    def look_at_bytes(self) -> None:
        """Every copy is done, or enqueued, and no gate is open yet: what is seen now is what was copied."""
        self._look_for_gone()
        for device, there in self._on.items():
            # What is gone may not even be mapped any more, and would break a device.
            if device not in self._devices or not self._gone:
                self._after[device] = self._sample(device, there, self._gone)
        self._look_for_gone()

    def _look_for_gone(self) -> None:
        self._gone.update(watched.number for watched in self._watched if not watched.alias.is_there())

    def torn(self) -> list[int]:
        """The tensors that were written to in between, or lost their memory. Waits for the samples."""
        torn = self._gone.union(*self._moved.values())
        for device, sample in self._after.items():
            before, after = self._before[device].bytes(), sample.bytes()
            for at, watched in enumerate(self._on[device]):
                mine = slice(at * _SAMPLE_BYTES, (at + 1) * _SAMPLE_BYTES)
                if before[mine] != after[mine]:
                    torn.add(watched.number)
        return sorted(torn)

    def _sample(
        self, device: torch.device, there: Sequence[_WatchedTensor], gone: set[int] | None
    ) -> _Sample:
        """In the order of the copies: program order on the host, the side stream of a device."""
        if device not in self._devices:
            return _HostSample(there, gone)
        on = self._devices[device]
        with on.on_side():
            return on.fetch(torch.cat([w.alias.part(0, _SAMPLE_BYTES, w.stride) for w in there]))


def version_of(tensor: torch.Tensor) -> int | None:
    """A number that most writes to the tensor's memory change; None where nobody counts."""
    return None if tensor.is_inference() else tensor._version
