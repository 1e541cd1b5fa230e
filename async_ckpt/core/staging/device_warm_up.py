"""Warm-up: what the first save on a device would otherwise allocate, page-lock or load while training waits.

In: the tensors of a state. Out: buffers, and small copies of each kind that a save of these tensors makes. Knows
nothing of: saves, the host memory of segments.

A driver may load a kernel when it is first launched, and wait for an idle device to do so. So the small copies launch
the kernels of a save, by the same code.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import torch

from ..backends import device_of, is_dense
from ..format.layout import Piece
from .device import PACK_BELOW, Device
from .guard import is_large
from .tripwires import SAMPLE_BYTES

# Some kernels differ for memory that is not aligned to this many bytes.
_ALIGNMENT_BYTES: Final = 16


def warm_up(tensors: Iterable[torch.Tensor]) -> None:
    """Make the streams and buffers for the first save of these tensors, guarded or not, and launch its kernels.

    Must run on a thread of the library: page-locking breaks the capture of a graph unless its thread has opted out. A
    full device is warmed up as far as its memory allows.
    """
    on_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if (place := device_of(tensor)) is not None:
            on_device.setdefault(place, []).append(tensor)
    for place, there in on_device.items():
        device = Device(place)
        views = [tensor for tensor in there if not is_dense(tensor)]
        if num_bytes := sum(tensor.nbytes for tensor in there if tensor.nbytes < PACK_BELOW or not is_dense(tensor)):
            device.take_scratch(num_bytes)
        with suppress(torch.OutOfMemoryError):
            _copy_samples(device, max(1, sum(map(is_large, there))))
            _copy_pieces(device, {(t.dtype, t.is_conj(), t.is_neg()): t for t in views}.values())


def _copy_samples(device: Device, num_sampled: int) -> None:
    """Copy samples as tripwires do, twice: the first samples of a save are kept until the second ones are there."""
    with device.on_side():
        memory = torch.zeros(2 * SAMPLE_BYTES, dtype=torch.uint8, device=device.device)
    copies = [device.sample([memory[::2]] * num_sampled) for _ in range(2)]
    for copy in copies:
        copy.bytes()


def _copy_pieces(device: Device, views: Iterable[torch.Tensor]) -> None:
    """Copy small adjacent tensors, aligned and not, and then views like these."""
    with device.on_side():
        tensors = [_zeros(device, num_bytes) for num_bytes in (_ALIGNMENT_BYTES, _ALIGNMENT_BYTES, 3, 5)]
        tensors += [_view_like(view, device) for view in views]
    pieces: list[Piece] = []
    at = 0
    for number, tensor in enumerate(tensors):
        if number not in (1, 3):  # these two are adjacent to the previous tensor
            at += _ALIGNMENT_BYTES
        pieces.append(Piece(at, number, 0, tensor.nbytes))
        at += tensor.nbytes
    device.copy_now(at, pieces, tensors, [is_dense(tensor) for tensor in tensors])


def _zeros(device: Device, num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device.device)


def _view_like(tensor: torch.Tensor, device: Device) -> torch.Tensor:
    """A small tensor that is not dense, and conjugated or negated like this one."""
    memory = _zeros(device, 4 * tensor.element_size())
    view = memory.view(tensor.dtype)[::2]
    if tensor.is_conj():
        view = torch.conj(view)
    return torch._neg_view(view) if tensor.is_neg() else view
