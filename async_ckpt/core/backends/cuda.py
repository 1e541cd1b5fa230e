"""CUDA, and ROCm, which torch calls by the same name: its differences from backends in general.

In: devices, addresses. Out: streams of its own, registered memory. Knows nothing of: saves, loads.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import AbstractContextManager, suppress
from functools import cache
from typing import Any, Final

import torch

from .backend import Backend, thread

_HOST_REGISTER_PORTABLE: Final = 1  # cudaHostRegisterPortable: for all contexts
# Constants of the CUDA driver API: CU_STREAM_CAPTURE_MODE_THREAD_LOCAL and CU_STREAM_NON_BLOCKING.
_THREAD_LOCAL: Final = 1
_NON_BLOCKING: Final = 1
_DRIVER: Final = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


class Cuda(Backend):
    """NVIDIA, and AMD under ROCm."""

    register_flags = _HOST_REGISTER_PORTABLE

    def on_device(self, device: torch.device) -> AbstractContextManager[Any]:
        """Make `device` the current one.

        A thread of this library also opts out of breaking captures: by default, a query of an event or a registration
        of memory on any thread breaks a graph that the training captures meanwhile.
        """
        if thread.is_ours and not thread.minds_captures and (driver := _driver()) is not None:
            mode = ctypes.c_int(_THREAD_LOCAL)
            thread.minds_captures = driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == 0
        return super().on_device(device)

    def new_stream(self, device: torch.device) -> Any:
        """A stream that no other code uses, and that does not wait for the legacy default stream of the training.

        Streams of torch come from a pool of 32 in turn, so that a graph captured elsewhere may get the same one. They
        are used only if the driver is not NVIDIA's, or creates no stream.
        """
        stream = _stream_of_driver(device)
        return super().new_stream(device) if stream is None else torch.cuda.ExternalStream(stream, device=device)

    def waiting_event(self) -> Any:
        """An event for which a waiting thread sleeps instead of spinning."""
        return self._event(blocking=True)

    def lends_only_to(self, stream: Any, address: int, device: torch.device) -> bool:
        with suppress(RuntimeError):  # an allocator of others does not report it
            for part in torch.cuda.memory_snapshot():
                if part["device"] == device.index and 0 <= address - part["address"] < part["total_size"]:
                    return bool(part["stream"] == stream.cuda_stream)
        return False

    def forget_refusal(self) -> None:
        """CUDA keeps a refusal until a launch has reported it, which would be the next one of the user's."""
        with suppress(RuntimeError):
            torch.cuda._sleep(0)  # a launch that needs no memory


def _stream_of_driver(device: torch.device) -> int | None:
    """A new stream in the context that torch uses, which need not be this thread's yet. None without such a driver."""
    driver = _driver()
    if driver is None:
        return None
    its_device, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    if (
        driver.cuDeviceGet(ctypes.byref(its_device), device.index)
        or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), its_device)
        or driver.cuCtxPushCurrent_v2(context)
    ):
        return None
    codes = driver.cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING), driver.cuCtxPopCurrent_v2(ctypes.byref(context))
    return None if any(codes) else stream.value


_INT, _POINTER = ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_void_p)
# The calls of the driver, each of which returns 0 or an error's code, and the types of their arguments.
_CALLS: Final[dict[str, list[Any]]] = {
    "cuDeviceGet": [_INT, ctypes.c_int],
    "cuDevicePrimaryCtxRetain": [_POINTER, ctypes.c_int],
    "cuCtxPushCurrent_v2": [ctypes.c_void_p],
    "cuCtxPopCurrent_v2": [_POINTER],
    "cuStreamCreate": [_POINTER, ctypes.c_uint],
    "cuThreadExchangeStreamCaptureMode": [_INT],
}


@cache
def _driver() -> Any:
    """The driver of NVIDIA; None if there is none with these calls, as under ROCm."""
    with suppress(OSError, AttributeError):
        driver = ctypes.CDLL(_DRIVER)
        for name, types in _CALLS.items():
            getattr(driver, name).argtypes = types
        return driver
    return None
