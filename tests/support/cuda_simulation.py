"""The simulated CUDA runtime, as tests speak to it; `tests/cuda` has it, and `make test-cuda` builds it.

`load` is called at the end of every `import torch` in its environment: torch finds it as a backend of others. The runtime is
preloaded there, so that the process's own names are the runtime's.
"""

import asyncio
import ctypes
import os
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

# Around scripts that run in processes of their own: their first argument is a folder.
ABOVE = """
import gc, os, sys, threading
import torch
import async_ckpt, children, cuda_simulation
from cuda_simulation import held, refuse
from scripted_disk import scripted
from states import MIB, open_run
cuda_simulation.tell_of_gates()
children.forks_on_purpose()
root = sys.argv[1]
"""
BELOW = """
reports = cuda_simulation.reports()
assert not reports, reports
print("all is well")
"""

NEEDED = "needs the simulated CUDA runtime: make test-cuda"
# Of a real device's clock: about half a second, in which a test enqueues what is to be behind.
_HELD_CYCLES = 1_000_000_000

INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, NOT_READY, ASSERT = 1, 2, 3, 600, 710


@cache
def _runtime() -> Any:
    """The runtime in this process; None if it has none, or a real one."""
    process = ctypes.CDLL(None)
    if not hasattr(process, "sim_reports"):
        return None
    process.sim_reports.restype = ctypes.c_char_p
    process.sim_hold.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
    process.sim_refuse.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_long, ctypes.c_int]
    process.sim_leave_free.argtypes = [ctypes.c_int, ctypes.c_long]
    process.sim_publish.argtypes = process.sim_observe.argtypes = [ctypes.c_size_t]
    process.sim_num_calls.argtypes, process.sim_num_calls.restype = [ctypes.c_char_p], ctypes.c_long
    return process


def is_here() -> bool:
    return _runtime() is not None


def _asked() -> Any:
    """The runtime, asked for what hardware does not do. Skips the test where there is none."""
    runtime = _runtime()
    if runtime is None:
        pytest.skip(NEEDED)
    return runtime


def load() -> None:
    """Register torch's operators for the device, and have the runtime learn what threads hand over without a lock."""
    if not is_here():
        return
    import torch

    operators = ctypes.CDLL("libsim_operators.so")
    operators.sim_register_operators()
    for kind in ("flash", "mem_efficient", "cudnn", "math"):
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(kind == "math")
    queue.SimpleQueue = _Told  # type: ignore[misc]
    _tell_of_calls()


class _Told(queue.SimpleQueue):  # type: ignore[type-arg]
    """A queue of which the runtime knows: `get` comes behind `put`."""

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        _runtime().sim_publish(id(self))
        super().put(item, block, timeout)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        item = super().get(block, timeout)
        _runtime().sim_observe(id(self))
        return item


def _tell_of_calls() -> None:
    """The runtime knows that a loop's call comes behind whoever has asked for it from another thread."""
    asked = asyncio.BaseEventLoop.call_soon_threadsafe

    def told(self: Any, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        _runtime().sim_publish(id(self))

        def behind(*given: Any) -> Any:
            _runtime().sim_observe(id(self))
            return callback(*given)

        return asked(self, behind, *args, context=context)

    asyncio.BaseEventLoop.call_soon_threadsafe = told  # type: ignore[method-assign]


def tell_of_gates() -> None:
    """The runtime knows that a step comes behind the snapshot that holds it no more: the gate between has no lock."""
    if not is_here():
        return
    from async_ckpt.core.staging.guard import Gate, StepBarrier

    def before(owner: type, name: str) -> None:
        call = getattr(owner, name)

        def told(self: Any, *args: Any) -> None:
            _runtime().sim_publish(id(Gate))
            call(self, *args)

        setattr(owner, name, told)

    hold = Gate.hold

    def behind(self: Any) -> None:
        hold(self)
        _runtime().sim_observe(id(Gate))

    before(Gate, "open")
    before(StepBarrier, "lift")
    Gate.hold = behind  # type: ignore[method-assign]


# --- what tests ask and say --------------------------------------------------------------------------------------------


def reports() -> list[str]:
    """What was out of order since the last call; hardware tells nobody."""
    return _asked().sim_reports(1).decode().splitlines() if is_here() else []


def start_over() -> None:
    """Forget refusals, holds, limits and reports; what is broken stays so until the process ends."""
    if not is_here():
        return
    runtime = _asked()
    runtime.sim_refuse_nothing()
    for device in range(2):
        runtime.sim_hold(device, None, -(1 << 20))
        runtime.sim_leave_free(device, -1)
    reports()


@contextmanager
def held(*streams: Any) -> Iterator[None]:
    """Nothing that these streams of torch have runs inside; on hardware, for half a second."""
    import torch

    if not is_here():
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(_HELD_CYCLES)
        yield
        return
    runtime, process = _asked(), os.getpid()
    for stream in streams:
        runtime.sim_hold(stream.device.index, stream.cuda_stream or 1, 1)
    try:
        yield
    finally:
        # A forked child that ends inside has none of the threads that would be told.
        for stream in streams if os.getpid() == process else ():
            runtime.sim_hold(stream.device.index, stream.cuda_stream or 1, -1)


def refuse(call: str, *, after: int = 0, times: int = 1, code: int = INVALID_VALUE) -> None:
    """Refuse `times` calls of this name ("*": any call) with this code, from that on which follows `after` others."""
    _asked().sim_refuse(call.encode(), after, times, code)


def num_calls(call: str = "*") -> int:
    return int(_asked().sim_num_calls(call.encode()))


def leave_free(num_bytes: int, device: int = 0) -> None:
    """Have the driver lend only so many more bytes."""
    _asked().sim_leave_free(device, num_bytes)


def break_device(device: int = 0, code: int = ASSERT) -> None:
    """As a failed assert of a kernel does: every call for this device fails from now on."""
    _asked().sim_break(device, code)


def has_context(device: int) -> bool:
    return bool(_asked().sim_has_context(device))


def num_pending(device: int = 0) -> int:
    return int(_asked().sim_num_pending(device))


def num_registered() -> int:
    """The pieces of host memory that are page-locked by cudaHostRegister."""
    return int(_asked().sim_num_locked())


def environment() -> dict[str, str]:
    """The variables by which a child has the runtime, too."""
    return {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "LD_PRELOAD") if name in os.environ}
