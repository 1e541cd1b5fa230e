"""The tensors of one instant: where the memory of each lies, and how its bytes get into a segment.

In: the tensors of a save. Out: their bytes in segments; for tensors on devices, enqueued copies. Knows nothing of:
leases, threads, optimizers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final, NamedTuple

import torch

from ...errors import TornSnapshotError
from ..backends import device_of, is_dense, is_on_host
from ..format.layout import Piece
from ..host.limits import num_cpus
from ..host.memory import Segment
from ..spec import KIB, MIB, TensorSpec, some_of
from .device import Alias, Device, dense_blocks, memmove


class Wording(NamedTuple):
    """The words of messages about one snapshot: its description, and the call that waits for it."""

    what: str = "the copy of a snapshot"
    wait_call: str = "handle.wait_staged()"


ANY_COPY: Final = Wording()

# The limits of what `locate` copies itself when tensors are deferred. Waking a thread for small tensors would stall the
# caller longer, and so would filling every segment with such a tensor at once, since few segments can be filled in two
# passes.
_SMALL_BYTES: Final = 64 * KIB
_MAX_SMALL: Final = 1024
_MAX_SMALL_BYTES: Final = 2 * MIB
# A copy of hundreds of MB saturates a host's memory bandwidth with few threads.
_MAX_COPIERS: Final = 8
_WORTH_A_HELPER_BYTES: Final = 64 * MIB


class SourceTensors:
    """The tensors that one snapshot copies. The caller of `Snapshot` creates it, and the snapshot owns it.

    It needs no lock: `locate` sets it up on the caller's thread before any other thread sees it, the threads that copy
    only read it, and `drop` is called when none of them copies any more.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        tensors: list[torch.Tensor],
        *,
        deferred: Mapping[int, torch.Tensor],
        frozen: frozenset[int] = frozenset(),
        after: Sequence[Future[None]] = (),
        copies_small: bool = False,
        wording: Wording = ANY_COPY,
    ) -> None:
        """`deferred` has the optimizer's own tensor, by the number of each tensor that may be copied later.

        `frozen` tensors are parts of other snapshots: they no longer change, and have their bytes once `after` has
        resolved. With `copies_small`, and if tensors are deferred, `locate` copies small tensors at once, so that their
        segments can be filled later, too. A held snapshot does not use this, since its readers take arrays as they are
        after the call.
        """
        self.specs, self.tensors, self.deferred = specs, tensors, deferred
        self.frozen, self._after, self.wording = frozen, after, wording
        self.devices: dict[torch.device, Device] = {}
        # The device of each tensor at the call, since a parameter may later move to another one.
        self._device_of: list[Device | None] = [None] * len(tensors)
        self._pointers = [0] * len(tensors)
        self._dense = [False] * len(tensors)
        self.aliases: dict[int, Alias] = {}  # deferred tensors are read through their aliases
        self._storages: list[Any] = []  # kept until everything is copied
        self._addresses: dict[int, int] = {}  # addresses of storages on devices
        self._small = self._small_ones() if deferred and copies_small else ()
        self._copies: torch.Tensor | None = None  # copies of the small tensors

    def _small_ones(self) -> list[int]:
        """The numbers of small tensors on the host, such as AdamW's steps. Frozen ones may lack their bytes yet."""
        small: list[int] = []
        left = _MAX_SMALL_BYTES
        for i, tensor in enumerate(self.tensors):
            num_bytes = tensor.nbytes
            is_small = num_bytes <= min(left, _SMALL_BYTES) and i not in self.frozen
            if is_small and is_on_host(tensor) and is_dense(tensor):
                small.append(i)
                left -= num_bytes
                if len(small) == _MAX_SMALL:
                    break
        return small

    def locate(self) -> None:
        """Note where each tensor lies, keep its memory alive, and copy the small ones. On the caller's thread."""
        for i, tensor in enumerate(self.tensors):
            self._dense[i] = dense = i in self.deferred or is_dense(tensor)
            if (place := device_of(tensor)) is not None:
                if place not in self.devices:
                    self.devices[place] = Device(place)
                self._device_of[i] = self.devices[place]
            elif dense:
                self._pointers[i] = tensor.data_ptr()
        for i in sorted(self.deferred):
            self.aliases[i] = Alias(self.tensors[i])
        if self.devices or self.deferred:
            # Storages, not tensors: a Parameter's `.data` may be replaced while its old memory is being copied.
            self._storages = [tensor.untyped_storage() for tensor in self.tensors]
            self._addresses = {i: s.data_ptr() for i, s in enumerate(self._storages) if self._device_of[i] is not None}
        if self._small:
            self._copy_small()

    def _copy_small(self) -> None:
        sizes = [self.tensors[i].nbytes for i in self._small]
        self._copies = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        place = self._copies.data_ptr()
        for i, num_bytes in zip(self._small, sizes, strict=True):
            if num_bytes:
                memmove(place, self._pointers[i], num_bytes)
                self._pointers[i] = place
                place += num_bytes

    @property
    def may_be_late(self) -> frozenset[int]:
        """The numbers of the tensors that may be copied after `save` has returned."""
        return self.frozen.union(self.deferred, self._small)

    def needs_frozen(self, numbers: Iterable[int]) -> bool:
        """True if copying these tensors must wait for the snapshots that frozen tensors are parts of.

        Without frozen tensors, all tensors are copied at once, including those of other snapshots.
        """
        return bool(self._after) and not (self.frozen and self.frozen.isdisjoint(numbers))

    def wait_for_frozen(self) -> None:
        for completion in self._after:
            completion.result()

    def num_threads(self, *, late: bool) -> int:
        """The number of threads that are useful. `late`: `save` has returned, and one processor is left to the
        training.

        Enqueueing copies from devices needs only one thread.
        """
        if late:
            return min(_MAX_COPIERS // 2, max(1, num_cpus() - 1))
        num_host_bytes = sum(s.num_bytes for s, pointer in zip(self.specs, self._pointers, strict=True) if pointer)
        return 1 if self.devices and num_host_bytes < _WORTH_A_HELPER_BYTES else min(_MAX_COPIERS, num_cpus())

    def copy_from_host(
        self, pieces: Iterable[Piece], segment: Segment, begin: int, on_device: dict[Device, list[Piece]], *, late: bool
    ) -> None:
        """Copy the pieces of tensors on the host into a segment. Pieces on devices are added to `on_device`.

        Their targets are counted from the start of a run of segments, in which this one begins at `begin`. `late`:
        `save` has returned, and the memory of a deferred tensor may be freed meanwhile.
        """
        pointers, address = self._pointers, segment.address
        aliases = self.aliases if late else {}
        for target, number, source, length in pieces:
            pointer = pointers[number]
            if pointer:
                alias = aliases.get(number)
                if alias is None:
                    memmove(address + target, pointer + source, length)
                elif not alias.copy_to(address + target, source, length):
                    raise self.torn((number,))
            elif (device := self._device_of[number]) is not None:
                _append(on_device.setdefault(device, []), Piece(begin + target, number, source, length))
            else:
                for offset, block in dense_blocks(self.tensors[number], source, source + length):
                    at = target + offset - source
                    segment.tensor[at : at + block.numel()].copy_(block)

    def enqueue(self, device: Device, into: Segment, pieces: Sequence[Piece]) -> Any:
        """Enqueue the copies of pieces on a device. The returned event fires when they have ended.

        Raises TornSnapshotError if a deferred tensor of these pieces has lost its memory.
        """
        try:
            return device.enqueue(into.tensor, pieces, self.tensors, self._dense, self.aliases)
        finally:
            aliases = self.aliases
            gone = [p.tensor for p in pieces if p.tensor in aliases and not aliases[p.tensor].is_there()]
            if gone:
                raise self.torn(gone)

    def gone_from_devices(self) -> set[int]:
        """The tensors that have lost their memory, by `resize_` of their storages, before devices had copied it.

        `record_stream` would keep that memory, but it marks a tensor permanently: freeing it would then be a call of
        the CUDA runtime, which ends a forked child, and a process whose device is broken.
        """
        moved = [(i, at) for i, at in self._addresses.items() if self._storages[i].data_ptr() != at]
        devices = self._device_of
        return {i for i, at in moved if i in self.aliases or not ((device := devices[i]) and device.has_order(at))}

    def torn(self, numbers: Iterable[int]) -> TornSnapshotError:
        """The error for these tensors, and for all that have lost their memory by now."""
        gone = {i for i, alias in self.aliases.items() if not alias.is_there()}
        names = tuple(self.specs[i].dotted for i in sorted(gone.union(numbers)))
        change, instead = "lost its memory by resize_ of its storage", ""
        if self.deferred:
            change, instead = "changed or was freed outside of the guarded optimizer's step()", "leave guard= out, or "
        return TornSnapshotError(
            f"{some_of(names, 5)} {change} while being copied; {instead}wait until all is copied: "
            f"{self.wording.wait_call}",
            names=names,
        )

    def are_devices_quiet(self) -> bool:
        """Wait until no device copies any more. False if one of them is broken: its copies may still write."""
        return all(device.is_quiet() for device in self.devices.values())

    def stall_seconds(self) -> float:
        """Seconds that streams have waited for the copies, so far."""
        return sum(device.stall_seconds() for device in self.devices.values())

    def drop(self) -> None:
        """Drop the tensors, since a handle may be kept for long. The devices stay, for `stall_seconds`."""
        self.specs, self.tensors, self.deferred = (), [], {}
        self._device_of, self._pointers, self._dense = [], [], []
        self.aliases, self._storages, self._addresses, self._copies = {}, [], {}, None


def _append(pieces: list[Piece], piece: Piece) -> None:
    """Add a piece, or lengthen the last piece if the new one continues it."""
    if pieces:
        target, number, source, length = pieces[-1]
        if (target + length, number, source + length) == piece[:3]:
            pieces[-1] = Piece(target, number, source, length + piece.length)
            return
    pieces.append(piece)
