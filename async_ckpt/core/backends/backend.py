"""Backends in general: streams, events and page-locked memory, as every accelerator of torch offers them.

In: tensors, devices, addresses. Out: streams, events, page-locked memory. Knows nothing of: saves, loads.

All calls go to `torch.get_device_module(kind)`: `torch.cuda`, `torch.npu`, `torch.xpu`, or the module of any
PrivateUse1 backend. Its names are the same in all versions of torch. `by_torch.py` replaces names that it lacks.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from itertools import chain
from typing import Any, Final

import torch

from ..spec import PAGE_BYTES

# The names that a device's module must have for copies in streams.
_NEEDED: Final = ("Stream", "Event", "current_stream", "device")
# The error code of a runtime that has no call to page-lock memory.
UNSUPPORTED: Final = -1
# The flags of the call that page-locks memory. CUDA: cudaHostRegisterPortable, for all contexts. Ascend, untested, by
# its documentation: ACL_HOST_REG_MAPPED of aclrtHostRegisterV2, which accepts only whole pages (else error 507899).
_REGISTER_FLAGS: Final = {"cuda": 1, "npu": 2}


class _ThreadRole(threading.local):
    """Facts about the calling thread."""

    is_ours = False  # a thread of the library
    minds_captures = False  # its calls do not break captures by other threads


thread: Final = _ThreadRole()


class StreamEvent:
    """A point in a stream: an event of torch, registered in the set of this process's events.

    The set refers weakly to this object, not to torch's: with torch 2.11 on CUDA, weak references to an event are not
    cleared when the event is destroyed, and the process crashes at the next use of such a reference.
    """

    __slots__ = ("__weakref__", "_event")

    def __init__(self, event: Any) -> None:
        self._event = event
        _events.add(self)

    def record(self, stream: Any) -> None:
        self._event.record(stream)

    def query(self) -> bool:
        """True once all work before this point has ended."""
        return bool(self._event.query())

    def synchronize(self) -> None:
        """Block until all work before this point has ended."""
        self._event.synchronize()

    def elapsed_time(self, later: StreamEvent) -> float:
        """Milliseconds from this event to a later one. Both must be timing events."""
        return float(self._event.elapsed_time(later._event))


# The events of this process. Destroying one calls the runtime, which fails in a forked child and ends it. So a child
# keeps all events that it inherits: they are held before the fork, since fork hooks of others may drop objects in the
# child.
_events: Final[weakref.WeakSet[StreamEvent]] = weakref.WeakSet()
_held_at_fork: Final[list[list[StreamEvent]]] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lambda: _held_at_fork.append(list(_events)),
        after_in_parent=_held_at_fork.pop,
        after_in_child=lambda: [ctypes.pythonapi.Py_IncRef(ctypes.py_object(event)) for event in chain(*_held_at_fork)],
    )


class Backend:
    """A kind of accelerator that can copy in streams."""

    def __init__(self, kind: str, module: Any) -> None:
        self.kind, self.module = kind, module

    @staticmethod
    def lacks(module: Any) -> list[str]:
        """The names that a device's module lacks for copies in streams."""
        enters = hasattr(module, "stream") or hasattr(getattr(module, "Stream", None), "__enter__")
        return [name for name in _NEEDED if not hasattr(module, name)] + ([] if enters else ["stream"])

    # --- where this thread works --------------------------------------------------------------------------------

    def on_device(self, device: torch.device) -> AbstractContextManager[Any]:
        """A context in which `device` is the current one."""
        context: AbstractContextManager[Any] = self.module.device(device)
        return context

    def current_device(self) -> torch.device | None:
        """The current device of this thread; None if the process has not used any, or torch does not report it."""
        is_initialized = getattr(self.module, "is_initialized", lambda: True)
        current = getattr(self.module, "current_device", None)
        return None if current is None or not is_initialized() else torch.device(self.kind, current())

    def is_capturing(self) -> bool:
        """True while the current stream is captured into a graph."""
        is_capturing = getattr(self.module, "is_current_stream_capturing", None)
        return is_capturing is not None and self.module.is_available() and bool(is_capturing())

    # --- streams and events -------------------------------------------------------------------------------------

    def new_stream(self, device: torch.device) -> Any:
        """A stream that no other code uses."""
        return self.module.Stream(device)

    def current_stream(self, device: torch.device) -> Any:
        return self.module.current_stream(device)

    @contextmanager
    def on_stream(self, device: torch.device, stream: Any) -> Iterator[None]:
        """A context in which work is enqueued on this stream.

        It also makes the device the current one: on a thread that has no device yet, leaving the stream would otherwise
        create a CUDA context on the first device.
        """
        enter = getattr(self.module, "stream", lambda stream: stream)  # from torch 2.7 on a stream is a context itself
        with self.on_device(device), enter(stream):
            yield

    def timing_event(self) -> StreamEvent:
        return StreamEvent(self.module.Event(enable_timing=True))

    def waiting_event(self) -> StreamEvent:
        """An event to wait for, without timing."""
        return StreamEvent(self.module.Event())

    # --- memory -------------------------------------------------------------------------------------------------

    def free_bytes(self, device: torch.device) -> int | None:
        """The free memory of a device in bytes; None if torch does not report it."""
        mem_get_info = getattr(self.module, "mem_get_info", None)
        return None if mem_get_info is None else int(mem_get_info(device)[0])

    def lends_only_to(self, stream: Any, address: int, device: torch.device) -> bool:  # noqa: ARG002
        """True if torch's allocator reports that the memory at this address belongs to this stream."""
        return False

    def is_broken(self, device: torch.device) -> bool:
        """True if every call for this device fails, as it does after a failed assertion in a kernel."""
        try:
            with self.on_device(device):
                self.module.Stream(device).query()
        except RuntimeError:
            return True
        return False

    @cached_property
    def _can_register(self) -> bool:
        """True if the runtime can page-lock existing memory; Intel's cannot."""
        return self._of_runtime("HostRegister") is not None

    def host_memory(self, num_bytes: int) -> torch.Tensor | None:
        """Page-locked memory from torch's allocator, if the runtime cannot page-lock existing memory; else None."""
        return None if self._can_register else page_locked(num_bytes)

    def taken_bytes(self, num_bytes: int) -> int:
        """The memory that a buffer of this size takes.

        On every device, torch's allocator rounds up to the next power of two (ATen/core/CachingHostAllocator.h).
        """
        return num_bytes if self._can_register else 1 << (num_bytes - 1).bit_length()

    def register(self, address: int, num_bytes: int, device: torch.device) -> int:
        """Page-lock host memory for the device's copy engine. Returns the runtime's error code, 0 on success.

        This process must have used the device before. The name of the call follows the pattern of CUDA and Ascend:
        `torch.npu.npurt().npuHostRegister(address, bytes, flags)`.
        """
        return self._call("HostRegister", device, address, num_bytes, _REGISTER_FLAGS.get(self.kind, 0))

    def unregister(self, address: int, device: torch.device) -> int:
        """Undo `register`. Returns the runtime's error code. Raises RuntimeError if the device is broken."""
        return self._call("HostUnregister", device, address)

    def _call(self, name: str, device: torch.device, *arguments: int) -> int:
        call = self._of_runtime(name)
        if call is None:
            return UNSUPPORTED
        code = UNSUPPORTED
        try:
            with self.on_device(device):
                if code := int(call(*arguments)):
                    self.forget_refusal()
        except RuntimeError:
            if code != 0:  # if 0, the call succeeded, and only the switch back to the previous device failed
                raise
        return code

    def forget_refusal(self) -> None:
        """Clear the error of the call that has just failed on this thread, if the runtime keeps it."""

    def _of_runtime(self, name: str) -> Any:
        runtime = getattr(self.module, f"{self.kind}rt", None)
        return None if runtime is None else getattr(runtime(), f"{self.kind}{name}", None)

    def bus_address(self, device: torch.device) -> str | None:
        """The address of a device on the PCI bus; None if torch does not report it."""
        properties_of = getattr(self.module, "get_device_properties", None)
        properties = None if properties_of is None else properties_of(device)
        parts = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
        if any(part is None for part in parts):
            return None
        domain, bus, number = parts
        return f"{domain:04x}:{bus:02x}:{number:02x}.0"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.kind}>"


def accelerator_device() -> torch.device | None:
    """The accelerator that torch was built for; None if this machine has none, where torch 2.6 itself raises."""
    try:
        return torch.accelerator.current_accelerator()
    except RuntimeError:
        return None


def page_locked(num_bytes: int) -> torch.Tensor | None:
    """Page-aligned memory from torch's allocator of page-locked memory; None if it cannot be allocated.

    Large allocations usually begin on a page. If one does not, a page more is requested, which may double the memory.
    """
    for slack_bytes in (0, PAGE_BYTES):
        try:
            memory = torch.empty(num_bytes + slack_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError:  # no memory, or the device has no such allocator
            return None
        begin = -memory.data_ptr() % PAGE_BYTES
        if begin <= slack_bytes:
            break
    return memory[begin : begin + num_bytes]
