"""CUDA, and what else torch calls by that name: devices, streams, events, registered memory.

In: tensors, devices, addresses. Out: what the rest of the house asks of an accelerator. Knows nothing of: saves, loads.

Every question of where a tensor is, and every call of `torch.cuda` but for generators of random numbers, is here.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Final

import torch

_HOST_REGISTER_PORTABLE: Final = 1  # cudaHostRegisterPortable: for all contexts
# CU_STREAM_CAPTURE_MODE_THREAD_LOCAL of the CUDA driver API.
_THREAD_LOCAL: Final = 1
_DRIVER: Final = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


class _Thread(threading.local):
    is_ours = False
    minds_itself = False


_thread = _Thread()


def claim_thread() -> None:
    """This is a thread of the library, and must not get in the way of the user's."""
    _thread.is_ours = True


def on_device(device: torch.device | int) -> AbstractContextManager[Any]:
    """Make `device` the current one. A thread of this library then leaves captures of others alone: by default, asking
    for an event or registering memory on any thread breaks a graph that the training captures meanwhile.
    """
    if _thread.is_ours and not _thread.minds_itself:
        _thread.minds_itself = True
        with suppress(OSError, AttributeError):  # not NVIDIA's
            mode = ctypes.c_int(_THREAD_LOCAL)
            ctypes.CDLL(_DRIVER).cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    return torch.cuda.device(device)


def device_of(tensor: torch.Tensor) -> torch.device | None:
    """The accelerator that a tensor is on, whose copies we enqueue; None for one on the host, or anywhere else."""
    return tensor.device if tensor.is_cuda else None


def is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu


def is_host(device: torch.device) -> bool:
    return device.type == "cpu"


def has_plain_bytes(tensor: torch.Tensor) -> bool:
    """Whether its bytes are copied by us as they are: on the host, or on an accelerator that is known here."""
    return tensor.is_cpu or tensor.is_cuda


def is_at(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor is on a device; one without a number is any of its kind."""
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def is_capturing() -> bool:
    """Whether the current stream is being captured into a graph, which replays no hooks and takes no foreign events."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def current_device() -> int | None:
    """The device that this thread works on; None in a process that has used none."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def current_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.current_stream(device)


@contextmanager
def on_stream(device: torch.device, stream: torch.cuda.Stream) -> Iterator[None]:
    """Enqueue on this stream. The device is set around it, or leaving it on a thread that has none yet would make a
    context on the first GPU.
    """
    with on_device(device), torch.cuda.stream(stream):
        yield


def timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def waiting_event() -> torch.cuda.Event:
    """One that a waiting thread sleeps for instead of spinning."""
    return torch.cuda.Event(blocking=True)


def register(address: int, num_bytes: int, device: torch.device) -> int:
    """Page-lock memory for every device's copy engine; CUDA's error code, 0 when it is locked.

    `device` is one that this process uses: on a thread without one, CUDA would take a context on the first GPU.
    """
    with on_device(device):
        code = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, _HOST_REGISTER_PORTABLE))
        if code != 0:
            # The refusal stays in CUDA's memory until a launch has reported it.
            with suppress(RuntimeError):
                torch.zeros(1, device=device)
    return code


def unregister(address: int, device: torch.device) -> None:
    with on_device(device):
        torch.cuda.cudart().cudaHostUnregister(address)


def bus_address(device: torch.device) -> str | None:
    """Where a device is on the PCI bus; None when torch does not tell."""
    told = torch.cuda.get_device_properties(device)
    parts = [getattr(told, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if any(part is None for part in parts):
        return None
    domain, bus, number = parts
    return f"{domain:04x}:{bus:02x}:{number:02x}.0"
