"""The figures that need a CUDA device; without one they are listed as not measured.

In: a setting. Out: figures by name, and rows of the comparison. Knows nothing of: how they are printed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any, Final

import torch

from async_ckpt import AsyncCheckpointer
from async_ckpt.host.limits import free_memory_bytes

from .figures import Saves
from .limits import SEGMENT_BYTES
from .setting import Setting, side_by_side
from .table import Figure, Row, Target
from .workloads import Gpt2, tensors

_GB: Final = 1e9
_COPY = ("staging bandwidth, device to pinned host", "GB/s", "one copy_ to pinned memory", Target("≥", 0.9))
_CALL = ("call of save, CUDA tensors", "ms", "20 µs per tensor and segment", Target("≤", 1.0))
_GUARDED_CALL = ("call of save(guard=optimizer), CUDA tensors", "ms", "10 µs per tensor", Target("≤", 1.0))
_LOADED = (
    "tensors that load back bit for bit, changed right after save",
    "",
    "tensors saved",
    Target("≥", 1.0),
)
_LOST = ("training seconds lost to one save of GPT-2", "s", "seconds of the save", None)
_GUARDED_LOST = (
    "training seconds lost to one save(guard=optimizer) of GPT-2", "s", "seconds of the save", Target("≤", 0.03),
)  # fmt: skip
# Side by side, on the device: this library, and the two that pin memory.
CANDIDATES: Final = (
    "ours_guarded",
    "ours",
    "torch_checkpointing",
    "dcp_async_cached",
    "dcp_async",
    "resiliency",
)
_NUM_STEPS: Final = 20
_NUM_COMPARED: Final = 64  # tensors at a time


def gpu(setting: Setting) -> dict[str, Row]:
    """Copies of states as large as the device and the host can hold, and a training of GPT-2."""
    if not torch.cuda.is_available():
        facts = {
            "gpu_copy": _COPY, "gpu_call": _CALL, "gpu_guarded_call": _GUARDED_CALL, "gpu_loaded": _LOADED,
            "gpu_lost": _LOST, "gpu_guarded_lost": _GUARDED_LOST,
        }  # fmt: skip
        return {name: Figure(*told, pairs=[], note="not measured on a GPU") for name, told in facts.items()}
    rows: dict[str, Row] = {}
    for num_bytes in setting.gpu_bytes:
        lacks = _lacks(setting, num_bytes)
        if lacks:
            note = f"{_size(num_bytes)}: not measured, {lacks}"
            rows[f"gpu_copy_{num_bytes}"] = Figure(*_COPY, pairs=[], note=note)
        else:
            rows |= _copy_and_call(setting, num_bytes)
    training = Gpt2(setting.gpu_bytes[0], batch=8, length=512, device="cuda")
    rows |= _lost("gpu_lost", _LOST, setting, training, guard=None)
    rows |= _lost("gpu_guarded_lost", _GUARDED_LOST, setting, training, guard=training.optimizer)
    return rows


def _lacks(setting: Setting, num_bytes: int) -> str:
    """What the machine has too little of for a state of this size; empty when it can be measured."""
    setting.folder.mkdir(parents=True, exist_ok=True)
    if torch.cuda.mem_get_info()[0] < 1.1 * num_bytes:
        return "the device has too little memory"
    if free_memory_bytes() < 2.1 * num_bytes:  # the pool takes no more than a half
        return "the host has too little memory"
    # The last archive, and the next.
    return "the disk has too little room" if shutil.disk_usage(setting.folder).free < 2.2 * num_bytes else ""


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"


def gpu_comparison(setting: Setting) -> dict[str, Row]:
    """The asynchronous ways to save, and GPT-2 on the device."""
    from .compare import Contender, measured

    if not torch.cuda.is_available():
        return {name: Contender(name, [], "not measured on a GPU") for name in CANDIDATES}
    return dict(measured(setting, "gpt2_cuda", CANDIDATES, setting.gpu_bytes[0]))


def _copy_and_call(setting: Setting, num_bytes: int) -> dict[str, Row]:
    state = tensors(num_bytes, device="cuda")
    size = _size(num_bytes)
    num_segments = -(-num_bytes // SEGMENT_BYTES)
    calls: list[float] = []
    saves = Saves(setting.folder / f"gpu-{num_bytes}", {"model": state})
    # As large as pinned memory can be without doubling what the state takes of the host.
    flat = torch.empty(min(num_bytes, 2**30), dtype=torch.uint8, device="cuda")
    pinned = torch.empty(flat.numel(), dtype=torch.uint8, pin_memory=True)

    def staging_bandwidth() -> float:
        torch.cuda.synchronize()
        begin = perf_counter()
        handle = saves.begin()
        calls.append(perf_counter() - begin)
        handle.wait_staged()
        seconds = perf_counter() - begin
        saves.end(handle)
        return num_bytes / seconds / _GB

    def copy_bandwidth() -> float:
        torch.cuda.synchronize()
        begin = perf_counter()
        for _ in range(num_bytes // flat.numel()):
            pinned.copy_(flat, non_blocking=True)
        torch.cuda.synchronize()
        return num_bytes // flat.numel() * flat.numel() / (perf_counter() - begin) / _GB

    with saves.checkpointer as checkpointer:
        pairs = side_by_side(setting.few_rounds, staging_bandwidth, copy_bandwidth)
        same = _num_equal(checkpointer, saves, state)
    num_tensors = len(state)
    state.clear()
    torch.cuda.empty_cache()
    shutil.rmtree(setting.folder / f"gpu-{num_bytes}")  # the disk may not have room for this one, too
    allowed = 20e-3 * (num_tensors + num_segments)
    return {
        f"gpu_copy_{num_bytes}": Figure(*_COPY, pairs=pairs, note=size),
        f"gpu_call_{num_bytes}": Figure(*_CALL, pairs=[(s * 1e3, allowed) for s in calls], note=size),
        f"gpu_guarded_call_{num_bytes}": _guarded_call(setting, num_bytes, size),
        f"gpu_loaded_{num_bytes}": Figure(*_LOADED, pairs=[(same, num_tensors)], note=size),
    }


def _num_equal(checkpointer: AsyncCheckpointer, saves: Saves, state: dict[str, torch.Tensor]) -> int:
    """Saved while the device is busy, and changed behind it: how many tensors load back as they were at the call."""
    torch.cuda._sleep(100_000_000)
    handle = saves.begin()
    for tensor in state.values():
        tensor.neg_()  # which is undone without a trace
    saves.end(handle)
    saves.checkpointer.release()  # the host need not hold a snapshot beside what is loaded
    names, same = list(state), 0
    for begin in range(0, len(names), _NUM_COMPARED):
        some = names[begin : begin + _NUM_COMPARED]
        loaded = checkpointer.load(select=[f"model.{name}" for name in some], map_location="cuda")["model"]
        same += sum(torch.equal(state[name].neg_(), loaded[name]) for name in some)
    return same


def _guarded_call(setting: Setting, num_bytes: int, size: str) -> Figure:
    parameters = [torch.nn.Parameter(tensor) for tensor in tensors(num_bytes, device="cuda").values()]
    # Without a state of its own: the parameters are all there is.
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    state = {"model": dict(enumerate(parameters))}
    saves = Saves(setting.folder / f"gpu-guarded-{num_bytes}", state, guard=optimizer)
    pairs = []
    with saves.checkpointer:
        for _ in range(setting.few_rounds):
            torch.cuda.synchronize()
            begin = perf_counter()
            handle = saves.begin()
            pairs.append(((perf_counter() - begin) * 1e3, 10e-3 * len(parameters)))
            optimizer.step()
            saves.end(handle)
    return Figure(*_GUARDED_CALL, pairs=pairs, note=size)


def _lost(
    name: str, facts: tuple[str, str, str, Target | None], setting: Setting, training: Gpt2, guard: Any
) -> dict[str, Row]:
    saves = Saves(setting.folder / name, training.state, guard=guard)
    pairs = []
    with saves.checkpointer:
        for _ in range(setting.rounds):
            others = [_seconds(training.step) for _ in range(_NUM_STEPS)]
            begin = perf_counter()
            handle = saves.begin()
            during = [perf_counter() - begin + _seconds(training.step)]
            while not handle.done():
                during.append(_seconds(training.step))
            report = saves.end(handle)
            others += [_seconds(training.step) for _ in range(_NUM_STEPS)]
            usual = median(others)
            pairs.append((sum(seconds - usual for seconds in during), report.total_seconds))
    return {name: Figure(*facts, pairs=pairs)}


def _seconds(step: Callable[[], None]) -> float:
    begin = perf_counter()
    step()
    torch.cuda.synchronize()
    return perf_counter() - begin
