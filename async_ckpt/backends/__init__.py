"""Accelerators: the one room that knows where a tensor is, and how its bytes are fetched beside the training.

In: tensors, devices. Out: the backend of each. Knows nothing of: saves, loads.

A kind of device that has what copying in streams needs is a `Backend`; another one (MPS, and whoever publishes less) is
none, and its tensors are fetched by a copy that the caller waits for.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Final

import torch

from .backend import UNSUPPORTED, Backend, thread
from .cuda import Cuda
from .npu_xpu import Npu, Xpu

__all__ = [
    "UNSUPPORTED", "Backend", "accelerator", "backend_of", "claim_thread", "current_device", "device_of", "has_plain_bytes", "is_at",
    "is_capturing", "is_host", "is_on_host", "on_device",
]  # fmt: skip

_KINDS: Final[dict[str, type[Backend]]] = {"cuda": Cuda, "npu": Npu, "xpu": Xpu}
_log = logging.getLogger("async_ckpt")


def device_of(tensor: torch.Tensor) -> torch.device | None:
    """The accelerator that a tensor is on, whose copies are enqueued; None for one on the host, or anywhere else."""
    if tensor.is_cpu:
        return None
    device = tensor.device
    return None if _backend(device.type) is None else device


def backend_of(device: torch.device) -> Backend:
    """Of a device that `device_of` has told."""
    backend = _backend(device.type)
    assert backend is not None
    return backend


@cache
def _backend(kind: str) -> Backend | None:
    """None for what is no accelerator, and for one that lacks what copies beside the training need, which is logged once."""
    if kind in ("cpu", "meta"):
        return None
    try:
        module = torch.get_device_module(kind)
    except RuntimeError:  # torch has no module of this name
        module = None
    lacking = Backend.lacks(module)
    if lacking:
        _log.info(
            "torch.%s has no %s: its tensors are copied while save waits, and guard= defers none of them",
            kind,
            ", ".join(lacking),
        )
        return None
    return _KINDS.get(kind, Backend)(kind, module)


def accelerator() -> str | None:
    """The kind of accelerator that this process has, such as "cuda"; None for a process without.

    Nor has one that was forked from a process that used it: there even a question is an error.
    """
    device = torch.accelerator.current_accelerator()
    if device is None:
        return None
    is_in_bad_fork = getattr(torch.get_device_module(device), "_is_in_bad_fork", lambda: False)
    return None if is_in_bad_fork() or not torch.accelerator.is_available() else device.type


def _of_process() -> Backend | None:
    kind = accelerator()
    return None if kind is None else _backend(kind)


def is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu


def is_host(device: torch.device) -> bool:
    return device.type == "cpu"


def has_plain_bytes(tensor: torch.Tensor) -> bool:
    """Whether its bytes are copied as they are: on the host, or on an accelerator with a backend."""
    return tensor.is_cpu or device_of(tensor) is not None


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a strided tensor's bytes lie in memory as they would in a file."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def is_at(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor is on a device; one without a number is any of its kind."""
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def is_capturing() -> bool:
    """Whether the current stream is being captured into a graph, which replays no hooks and takes no foreign events."""
    backend = _of_process()
    return backend is not None and backend.is_capturing()


def current_device() -> torch.device | None:
    """The device that this thread works on; None in a process that has used none."""
    backend = _of_process()
    return None if backend is None else backend.current_device()


def on_device(device: torch.device | None) -> AbstractContextManager[Any]:
    """Make `device` the current one; None changes nothing."""
    return nullcontext() if device is None else backend_of(device).on_device(device)


def claim_thread() -> None:
    """This is a thread of the library, and must not get in the way of the user's."""
    thread.is_ours = True
