"""Entering a CUDA device, from a thread of the user's or of this library.

In: a device. Out: a block in which it is the current one. Knows nothing of: streams, memory.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from contextlib import AbstractContextManager, suppress
from typing import Any, Final

import torch

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
