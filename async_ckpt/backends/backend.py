"""What the house asks of an accelerator, answered as any backend of torch's answers it.

In: tensors, devices, addresses. Out: streams, events, page-locked memory. Knows nothing of: saves, loads.

Everything is asked of `torch.get_device_module(kind)`: `torch.cuda`, `torch.npu`, `torch.xpu`, or the module of any
PrivateUse1 backend. It has the same names there for all versions of torch, which `torch.accelerator` has not.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import torch

# What copies beside the training cannot do without.
_NEEDED: Final = ("Stream", "Event", "current_stream", "device")
# For a runtime without one of its own: nothing there page-locks memory.
UNSUPPORTED: Final = -1


class _ThreadRole(threading.local):
    is_ours = False  # of the library
    minds_captures = False


thread: Final = _ThreadRole()


class Backend:
    """One kind of accelerator that copies in streams."""

    register_flags = 0

    def __init__(self, kind: str, module: Any) -> None:
        self.kind, self.module = kind, module

    @staticmethod
    def lacks(module: Any) -> list[str]:
        """What a device's module would need for copies beside the training, and has not."""
        enters = hasattr(module, "stream") or hasattr(getattr(module, "Stream", None), "__enter__")
        return [name for name in _NEEDED if not hasattr(module, name)] + ([] if enters else ["stream"])

    # --- where this thread works --------------------------------------------------------------------------------

    def on_device(self, device: torch.device) -> AbstractContextManager[Any]:
        """Make `device` the current one."""
        context: AbstractContextManager[Any] = self.module.device(device)
        return context

    def current_device(self) -> torch.device | None:
        """The device that this thread works on; None in a process that has used none, and where nobody tells."""
        is_initialized = getattr(self.module, "is_initialized", lambda: True)
        asked = getattr(self.module, "current_device", None)
        return None if asked is None or not is_initialized() else torch.device(self.kind, asked())

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a graph, which replays no hooks and takes no foreign events."""
        asked = getattr(self.module, "is_current_stream_capturing", None)
        return asked is not None and self.module.is_available() and bool(asked())

    # --- streams and events -------------------------------------------------------------------------------------

    def new_stream(self, device: torch.device) -> Any:
        """A stream that nobody else has."""
        return self.module.Stream(device)

    def current_stream(self, device: torch.device) -> Any:
        return self.module.current_stream(device)

    @contextmanager
    def on_stream(self, device: torch.device, stream: Any) -> Iterator[None]:
        """Enqueue on this stream. The device is set around it, or leaving it on a thread that has none yet would make a
        context on the first one.
        """
        enter = getattr(self.module, "stream", lambda entered: entered)  # which torch's own are from 2.7 on
        with self.on_device(device), enter(stream):
            yield

    def timing_event(self) -> Any:
        return self.module.Event(enable_timing=True)

    def waiting_event(self) -> Any:
        """One that is only waited for."""
        return self.module.Event()

    # --- memory -------------------------------------------------------------------------------------------------

    def host_memory(self, num_bytes: int) -> torch.Tensor | None:  # noqa: ARG002
        """Page-locked memory by torch's own allocator, where a runtime locks no memory that is there; None elsewhere."""
        return None

    def register(self, address: int, num_bytes: int, device: torch.device) -> int:
        """Page-lock memory of the host for the device's copy engine; the runtime's error code, 0 when it is locked.

        `device` is one that this process uses. The runtime is asked by the names that CUDA and Ascend have given it:
        `torch.npu.npurt().npuHostRegister(address, bytes, flags)`.
        """
        call = self._of_runtime("HostRegister")
        if call is None:
            return UNSUPPORTED
        with self.on_device(device):
            return int(call(address, num_bytes, self.register_flags))

    def unregister(self, address: int, device: torch.device) -> int:
        """Undo `register`; the runtime's error code. Raises RuntimeError on a device that is broken."""
        call = self._of_runtime("HostUnregister")
        if call is None:
            return UNSUPPORTED
        with self.on_device(device):
            return int(call(address))

    def _of_runtime(self, name: str) -> Any:
        runtime = getattr(self.module, f"{self.kind}rt", None)
        return None if runtime is None else getattr(runtime(), f"{self.kind}{name}", None)

    def bus_address(self, device: torch.device) -> str | None:
        """Where a device is on the PCI bus; None when torch does not tell."""
        asked = getattr(self.module, "get_device_properties", None)
        told = None if asked is None else asked(device)
        parts = [getattr(told, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
        if any(part is None for part in parts):
            return None
        domain, bus, number = parts
        return f"{domain:04x}:{bus:02x}:{number:02x}.0"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.kind}>"
