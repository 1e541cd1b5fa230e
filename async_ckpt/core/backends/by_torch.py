"""Backends by torch's generic classes, for accelerators whose own module lacks names that a backend needs.

In: the kind of the process's accelerator. Out: its backend, if it has separate streams.
Knows nothing of: saves, loads.

Streams are entered by `torch.accelerator.set_stream`: they are context managers only from torch 2.7 on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .backend import Backend, accelerator_device


class _ModuleByTorch:
    """A device's module (if any), with the names that a backend needs replaced by torch's generic classes."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def Stream(self, device: torch.device) -> torch.Stream:  # noqa: N802
        return torch.Stream(device)

    def Event(self, *, enable_timing: bool = False) -> torch.Event:  # noqa: N802
        return torch.Event(enable_timing=enable_timing)

    def current_stream(self, device: torch.device) -> torch.Stream:
        return torch.accelerator.current_stream(device)

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(device.index)
        try:
            yield
        finally:
            torch.accelerator.set_device_index(before)

    @contextmanager
    def stream(self, stream: torch.Stream) -> Iterator[None]:
        before = torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def backend_by_torch(kind: str, module: Any) -> Backend | None:
    """The backend of the process's accelerator; None if it is of another kind, or has no second stream.

    torch creates streams for any device, but for some devices every stream is the same.
    """
    if (device := accelerator_device()) is None or device.type != kind:
        return None
    backend = Backend(kind, _ModuleByTorch(module))
    here = torch.device(kind, 0)
    try:
        stream = backend.new_stream(here)
        backend.timing_event().record(stream)
        has_streams = stream != backend.current_stream(here)
    except (RuntimeError, NotImplementedError):
        return None
    return backend if has_streams else None
