"""From the device to the host: the cost of enqueueing, the bandwidth of copies, and the time of a call of save.

In: a bench. Out: rows by name. Knows nothing of: trainings, other parts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from statistics import median
from time import perf_counter, thread_time
from typing import Any, Final, NamedTuple

import torch

from async_ckpt.core.backends import claim_thread
from async_ckpt.core.host.memory import HostBuffer
from async_ckpt.core.host.pool import MAX_RUN_BYTES
from async_ckpt.core.spec import GIB
from async_ckpt.core.staging.side_stream import MAX_UNDER_WAY

from .gpu_bench import Bench, CannotMeasureError, Found, Saves, on_stream
from .limits import SEGMENT_BYTES
from .setting import side_by_side
from .workloads import tensors

_GB: Final = 1e9
_SMALL_BYTES: Final = 4096
_BUSY_SECONDS: Final = 0.5
# A call of copy_ takes microseconds, or milliseconds on a busy machine. A call that waits for the kernel takes most of
# `_BUSY_SECONDS`.
_BLOCKED_SECONDS: Final = 0.05
_RAW_BYTES: Final = 2**30
# Processor time of the thread that calls save, for each tensor.
CPU_MICROSECONDS: Final = {"unguarded": 20.0, "guarded": 12.0}


class _Calls(NamedTuple):
    """The calls of copy_ behind one kernel: the number pending before one blocked, and microseconds by that number."""

    num_pending: int
    microseconds: dict[str, list[float]]
    """The median and the longest call while 1, 2 to 3, 4 to 7 … calls were pending."""


def latency(bench: Bench) -> Mapping[str, Found]:
    """Enqueue small copies to pinned memory behind a busy kernel, until a call blocks."""
    on_busy = [_enqueued(bench, on_other=False) for _ in bench.rounds()]
    on_other = [_enqueued(bench, on_other=True) for _ in bench.rounds()]
    wanted = MAX_UNDER_WAY
    most = f"of at most {bench.setting.num_pending:,}"
    return {
        "gpu_pending": Found(
            [(calls.num_pending, wanted) for calls in on_busy], most, {"calls": [c._asdict() for c in on_busy]}
        ),
        "gpu_pending_behind": Found(
            [(calls.num_pending, wanted) for calls in on_other], most, {"calls": [c._asdict() for c in on_other]}
        ),
        "gpu_enqueue": Found([(calls.microseconds["1"][0], 10.0) for calls in on_busy]),
    }  # fmt: skip


def pinning(bench: Bench) -> Mapping[str, Found]:
    """The longest call of the training while another thread page-locks memory, at once or in small parts.

    The driver may delay calls meanwhile. The size of the pool's runs is based on this.
    """
    device = torch.device(bench.device.kind, bench.device.module.current_device())
    whole = bench.gib(1)
    sizes = {"run": bench.gib(MAX_RUN_BYTES / GIB), "whole": whole}
    target = torch.zeros(1, device=device)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sizes}
    rates: dict[str, list[float]] = {name: [] for name in sizes}
    for _ in bench.rounds():
        for name, num_bytes in sizes.items():
            memories = [HostBuffer(num_bytes) for _ in range(whole // num_bytes)]
            for memory in memories:
                memory.touch()
            seconds: list[float] = []

            def pin(memories: list[HostBuffer] = memories, seconds: list[float] = seconds) -> None:
                claim_thread()
                begin = perf_counter()
                codes = [memory.pin(device) for memory in memories]
                seconds.append(perf_counter() - begin if not any(codes) else float("nan"))

            thread = threading.Thread(target=pin)
            thread.start()
            beside = _longest_call(target, thread.is_alive)
            thread.join()
            alone = _longest_call(target, partial(_is_before, perf_counter() + seconds[0]))
            bench.device.synchronize()
            found[name].append((beside * 1e3, alone * 1e3))
            rates[name].append(whole / seconds[0] / _GB)
            for memory in memories:
                memory.free()
    return {
        f"gpu_pinning_{name}": Found(pairs, f"{median(rates[name]):.1f} GB/s page-locked", {"rates": rates[name]})
        for name, pairs in found.items()
    }


def _is_before(end: float) -> bool:
    return perf_counter() < end


def _longest_call(target: torch.Tensor, goes_on: Callable[[], bool]) -> float:
    """Seconds of the longest of repeated calls that enqueue a small operation, at least one."""
    longest = 0.0
    while True:
        begin = perf_counter()
        target.add_(1)
        longest = max(longest, perf_counter() - begin)
        if not goes_on():
            return longest


def _enqueued(bench: Bench, *, on_other: bool) -> _Calls:
    """Copies on the busy stream itself, or on another stream that waits for it, like the copies of a save."""
    device, count = bench.device, bench.setting.num_pending
    source = torch.ones(count * _SMALL_BYTES, dtype=torch.uint8, device=device.kind)
    target = device.pinned(count * _SMALL_BYTES)
    copies = list(zip(target.split(_SMALL_BYTES), source.split(_SMALL_BYTES), strict=True))
    other = device.stream() if on_other else None
    copies[0][0].copy_(copies[0][1], non_blocking=True)
    device.synchronize()
    device.busy(_BUSY_SECONDS)
    ended = device.module.Event()
    ended.record()
    seconds = []
    with nullcontext() if other is None else on_stream(device, other):
        if other is not None:
            other.wait_event(ended)
        for into, of in copies:
            begin = perf_counter()
            into.copy_(of, non_blocking=True)
            seconds.append(perf_counter() - begin)
    was_busy = not ended.query()
    device.synchronize()
    blocked = next((n for n, taken in enumerate(seconds) if taken > _BLOCKED_SECONDS), None)
    if blocked is None and not was_busy:
        raise CannotMeasureError(f"the kernel of about {_BUSY_SECONDS} s ended first")
    by_number: dict[str, list[float]] = {}
    begin_at = 1
    while begin_at < count:
        some = [taken * 1e6 for taken in seconds[begin_at : 2 * begin_at]]
        by_number[str(begin_at)] = [median(some), max(some)]
        begin_at *= 2
    return _Calls(count if blocked is None else blocked, by_number)


def _num_operations(num_bytes: int, num_tensors: int) -> int:
    """The most operations that a save may enqueue: a copy of each tensor, and one more in each run of memory."""
    return num_tensors + -(-num_bytes // MAX_RUN_BYTES)


def copies(bench: Bench, num_gib: int) -> Mapping[str, Found]:
    """The bandwidth of a save, and of copies to existing pinned memory."""
    bench.require_room(bench.gib(num_gib))
    device = bench.device
    state = tensors(bench.gib(num_gib), device=device.kind)
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    flat = torch.ones(min(num_bytes, _RAW_BYTES), dtype=torch.uint8, device=device.kind)
    # As large as possible without doubling the host memory of the state.
    pinned = device.pinned(flat.numel())
    durable: list[float] = []

    def saved() -> float:
        device.synchronize()
        begin = perf_counter()
        handle = saves.begin()
        handle.wait_staged()
        seconds = perf_counter() - begin
        durable.append(saves.end(handle).total_seconds)
        return num_bytes / seconds / _GB

    def copied() -> float:
        device.synchronize()
        begin = perf_counter()
        for _ in range(num_bytes // flat.numel()):
            pinned.copy_(flat, non_blocking=True)
        device.synchronize()
        return num_bytes // flat.numel() * flat.numel() / (perf_counter() - begin) / _GB

    with Saves(bench.setting.folder / "run", {"model": state}) as saves:
        saves.checkpointer.prewarm(saves.state)
        copied()
        pairs = side_by_side(bench.rounds(), saved, copied)
    details = {"num_bytes": num_bytes, "durable_seconds": durable}
    return {f"gpu_copy_{num_gib}": Found(pairs, details=details)}


def calls(bench: Bench) -> Mapping[str, Found]:
    """The call of save, with and without a guard: its seconds, processor time, and enqueued operations."""
    bench.require_room(bench.gib(4))
    count = bench.setting.num_pending // 8
    items = bench.gib(4) // count // 4
    parameters = [torch.nn.Parameter(torch.rand(items, device=bench.device.kind)) for _ in range(count)]
    # An optimizer without state, so that there are only parameters.
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    found: dict[str, Found] = {}
    for kind, guard in (("unguarded", None), ("guarded", optimizer)):
        found |= _calls(bench, kind, parameters, guard)
    return found


def _calls(bench: Bench, kind: str, parameters: list[torch.nn.Parameter], guard: Any) -> Mapping[str, Found]:
    num_bytes = sum(parameter.nbytes for parameter in parameters)
    seconds, processor = [], []
    counted: dict[str, int] = {}
    note = ""
    with Saves(bench.setting.folder / kind, {"model": parameters}, {"guard": guard}) as saves:
        saves.checkpointer.prewarm(saves.state)
        saves.end(saves.begin())
        for _ in bench.rounds():
            bench.device.synchronize()
            begin, own = perf_counter(), thread_time()
            handle = saves.begin()
            seconds.append(perf_counter() - begin)
            processor.append(thread_time() - own)
            saves.end(handle)
        try:
            with bench.device.operations() as counted:
                handle = saves.begin()
                handle.wait_staged()
            saves.end(handle)
        except CannotMeasureError as error:
            note = f"not measured: {error}"
    count = len(parameters)
    allowed = 20e-3 * (count + -(-num_bytes // SEGMENT_BYTES))
    enqueued = [(sum(counted.values()), _num_operations(num_bytes, count))] if not note else []
    return {
        f"gpu_call_{kind}": Found([(taken * 1e3, allowed) for taken in seconds]),
        f"gpu_call_cpu_{kind}": Found([(taken * 1e6 / count, CPU_MICROSECONDS[kind]) for taken in processor]),
        f"gpu_operations_{kind}": Found(enqueued, note, {"operations": counted}),
    }
