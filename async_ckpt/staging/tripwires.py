"""What betrays a tensor that was written to while it was still to be copied.

In: deferred tensors, at `save` and later. Out: the numbers of those that are torn. Knows nothing of: segments, threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch

from .device import Alias, Device

# Bytes looked at in each deferred tensor by its tripwire.
_SAMPLE_BYTES: Final = 64


class _Watched:
    """One deferred tensor: where it is sampled, and who counts the writes to it."""

    def __init__(self, number: int, alias: Alias, tensor: torch.Tensor, owner: torch.Tensor) -> None:
        """`owner` is the optimizer's own, and may be the same."""
        self.number, self.alias = number, alias
        # An odd stride meets every byte of an item in turn.
        stride = (alias.num_bytes // _SAMPLE_BYTES - 1) | 1
        self.positions = range(0, stride * _SAMPLE_BYTES, stride)
        self.sampled = alias.part(0, _SAMPLE_BYTES, stride)
        self._tensor, self._owner = tensor, owner
        self._versions = version_of(tensor), version_of(owner)

    def has_moved(self) -> bool:
        """Whether a write was counted. Once a parameter's `.data` is other memory, writes to that are counted as well."""
        now = version_of(self._tensor), version_of(self._owner)
        return now != self._versions and self._owner.data_ptr() == self.alias.address


class Tripwires:
    """Versions and samples of the deferred tensors, taken in `save` and looked at again.

    A moved version counter is proof of a write; one that stands still is not (fused kernels and `.data` do not move
    it), hence the bytes.
    """

    def __init__(
        self,
        aliases: Mapping[int, Alias],
        tensors: Sequence[torch.Tensor],
        owners: Mapping[int, torch.Tensor],
        devices: dict[torch.device, Device],
    ) -> None:
        self._devices = devices
        self._watched = [_Watched(i, alias, tensors[i], owners[i]) for i, alias in aliases.items()]
        self._on: dict[torch.device, list[_Watched]] = {}
        for watched in self._watched:
            self._on.setdefault(watched.alias.device, []).append(watched)
        self._before = {device: self._sample(device, there) for device, there in self._on.items()}
        self._after: dict[torch.device, torch.Tensor] = {}
        self._gone: set[int] = set()
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
            if device not in self._devices:
                self._after[device] = self._sample_again(there)
            elif not self._gone:  # what is gone may not even be mapped any more, and would break the device
                self._after[device] = self._sample(device, there)
        self._look_for_gone()

    def _look_for_gone(self) -> None:
        self._gone.update(watched.number for watched in self._watched if not watched.alias.is_there())

    def _sample_again(self, there: Sequence[_Watched]) -> torch.Tensor:
        """On the host, of memory that may go at any moment."""
        samples = torch.zeros(len(there) * _SAMPLE_BYTES, dtype=torch.uint8, device="cpu")
        for at, watched in enumerate(there):
            if not watched.alias.sample_to(samples.data_ptr() + at * _SAMPLE_BYTES, watched.positions):
                self._gone.add(watched.number)
        return samples

    def torn(self) -> list[int]:
        """The tensors that were written to in between, or lost their memory. Waits for the samples."""
        torn = self._gone.union(*self._moved.values())
        for device, after in self._after.items():
            there = self._on[device]
            with self._stream_of(device):
                same = self._before[device] == after
                intact = same.view(len(there), _SAMPLE_BYTES).all(1).tolist()
            torn.update(watched.number for watched, whole in zip(there, intact, strict=True) if not whole)
        return sorted(torn)

    def _sample(self, device: torch.device, there: Sequence[_Watched]) -> torch.Tensor:
        with self._stream_of(device):
            return torch.cat([watched.sampled for watched in there])

    def _stream_of(self, device: torch.device) -> AbstractContextManager[Any]:
        """The order of copies and samples: the device's side stream; on the CPU, program order."""
        return self._devices[device].on_side() if device in self._devices else nullcontext()


def version_of(tensor: torch.Tensor) -> int | None:
    """A number that most writes to the tensor's memory change; None where nobody counts."""
    return None if tensor.is_inference() else tensor._version
