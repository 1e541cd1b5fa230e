"""CUDA, and ROCm, which torch also calls "cuda": the differences from backends in general.

In: devices, addresses. Out: private streams, registered memory. Knows nothing of: saves, loads.
"""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from .backend import Backend, StreamEvent, thread

# Constants of the CUDA runtime: cudaStreamCaptureModeThreadLocal and cudaStreamNonBlocking.
_THREAD_LOCAL: Final = 1
_NON_BLOCKING: Final = 1


class Cuda(Backend):
    """GPUs by NVIDIA, and by AMD under ROCm."""

    def on_device(self, device: torch.device) -> AbstractContextManager[Any]:
        """A context in which `device` is the current one.

        On a thread of this library, it also sets the capture mode to thread-local: by default, querying an event or
        registering memory on any thread breaks a graph that the training is capturing.
        """
        if thread.is_ours and not thread.minds_captures:
            mode = ctypes.c_int(_THREAD_LOCAL)
            thread.minds_captures = _is_done("cudaThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        return super().on_device(device)

    def new_stream(self, device: torch.device) -> Any:
        """A stream that no other code uses, and that does not wait for the legacy default stream of the training.

        torch hands out its streams in turn from a pool of 32, so a graph captured elsewhere may get the same stream.
        They are used only if the runtime is not found or cannot create a stream.
        """
        stream = ctypes.c_void_p()
        with self.on_device(device):
            if _is_done("cudaStreamCreateWithFlags", ctypes.byref(stream), _NON_BLOCKING) and stream.value:
                return torch.cuda.ExternalStream(stream.value, device=device)
        return super().new_stream(device)

    def waiting_event(self) -> StreamEvent:
        """An event for which a waiting thread sleeps instead of busy-waiting."""
        return StreamEvent(torch.cuda.Event(blocking=True))

    def lends_only_to(self, stream: Any, address: int, device: torch.device) -> bool:
        with suppress(RuntimeError):  # allocators other than torch's own do not report it
            for part in torch.cuda.memory_snapshot():
                if part["device"] == device.index and 0 <= address - part["address"] < part["total_size"]:
                    return bool(part["stream"] == stream.cuda_stream)
        return False

    def forget_refusal(self) -> None:
        """Clear the last error, which CUDA keeps until it is read: the user's next kernel launch would raise it."""
        if (runtime := _runtime()) is not None:
            runtime.cudaGetLastError()
        else:
            with suppress(RuntimeError):
                torch.cuda._sleep(0)  # a launch that needs no memory


def _is_done(name: str, *arguments: Any) -> bool:
    """Make a call of the runtime. Returns False if it fails, or the runtime is not found."""
    if (runtime := _runtime()) is None:
        return False
    if code := getattr(runtime, name)(*arguments):
        runtime.cudaGetLastError()
    return bool(code == 0)


@cache
def _runtime() -> Any:
    """The CUDA runtime that torch has loaded, found through torch's library; None if there is none, as under ROCm."""
    with suppress(OSError, AttributeError):
        runtime = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10_cuda.so"))
        runtime.cudaStreamCreateWithFlags.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint]
        runtime.cudaThreadExchangeStreamCaptureMode.argtypes = [ctypes.POINTER(ctypes.c_int)]
        return runtime if runtime.cudaGetLastError else None
    return None
