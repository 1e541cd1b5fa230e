"""Accelerators: the only room that knows where a tensor is, and how to copy its bytes without stopping the training.

In: tensors, devices. Out: the backend of each. Knows nothing of: saves, loads.

A kind of device that can copy in streams has a `Backend`. Other kinds, such as MPS, have none: their tensors are copied
while the caller waits. `backend.py`: backends in general; `cuda.py`: CUDA and ROCm; `by_torch.py`: devices that have
only torch's generic classes.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from .backend import UNSUPPORTED, Backend, StreamEvent, accelerator_device, thread
from .by_torch import backend_by_torch
from .cuda import Cuda

__all__ = [
    "UNSUPPORTED", "Backend", "StreamEvent", "accelerator", "backend_of", "claim_thread", "current_device", "device_of",
    "has_plain_bytes", "is_at", "is_capturing", "is_host", "is_on_host", "on_device",
]  # fmt: skip

_log = logging.getLogger("async_ckpt")


def device_of(tensor: torch.Tensor) -> torch.device | None:
    """The accelerator that a tensor is on, if copies from it are enqueued; None for any other device."""
    if tensor.is_cpu:
        return None
    device = tensor.device
    return None if _backend(device.type) is None else device


def backend_of(device: torch.device) -> Backend:
    """The backend of a device that `device_of` has returned."""
    backend = _backend(device.type)
    assert backend is not None
    return backend


@cache
def _backend(kind: str) -> Backend | None:
    """The backend of a kind of device; None if it cannot copy in streams, which is logged once."""
    if kind in ("cpu", "meta"):
        return None
    module = _module_of(kind)
    lacking = Backend.lacks(module)
    if lacking and (backend := backend_by_torch(kind, module)) is not None:
        return backend
    if lacking:
        _log.info(
            "torch.%s has no %s: save waits while its tensors are copied, and guard= defers none of them",
            kind,
            ", ".join(lacking),
        )
        return None
    return (Cuda if kind == "cuda" else Backend)(kind, module)


def _module_of(kind: str) -> Any:
    """The torch module for a kind of device, such as torch.cuda; None if there is none."""
    try:
        return torch.get_device_module(kind)
    except RuntimeError:
        return None


def accelerator() -> str | None:
    """The kind of accelerator that this process can use, such as "cuda"; None if there is none.

    A process that was forked from one that has used the accelerator cannot use it: there, even a query is an error.
    """
    device = accelerator_device()
    if device is None:
        return None
    is_in_bad_fork = getattr(_module_of(device.type), "_is_in_bad_fork", lambda: False)
    return None if is_in_bad_fork() or not torch.accelerator.is_available() else device.type


def _of_process() -> Backend | None:
    kind = accelerator()
    return None if kind is None else _backend(kind)


def is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu


def is_host(device: torch.device) -> bool:
    return device.type == "cpu"


def has_plain_bytes(tensor: torch.Tensor) -> bool:
    """True if the tensor's bytes can be copied directly: it is on the host, or on an accelerator with a backend."""
    return tensor.is_cpu or device_of(tensor) is not None


def is_dense(tensor: torch.Tensor) -> bool:
    """True for a strided tensor whose bytes lie in memory in the same order as in a file."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def is_at(tensor: torch.Tensor, device: torch.device) -> bool:
    """True if a tensor is on this device. A device without an index matches all devices of its kind."""
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def is_capturing() -> bool:
    """True while the current stream is captured into a graph, which does not replay hooks or accept outside events."""
    backend = _of_process()
    return backend is not None and backend.is_capturing()


def current_device() -> torch.device | None:
    """The device that this thread works on; None in a process that has not used any."""
    backend = _of_process()
    return None if backend is None else backend.current_device()


def on_device(device: torch.device | None) -> AbstractContextManager[Any]:
    """A context in which `device` is the current one. None changes nothing."""
    return nullcontext() if device is None else backend_of(device).on_device(device)


def claim_thread() -> None:
    """Mark the calling thread as one of the library, which must not interfere with threads of the user."""
    thread.is_ours = True
