"""The figures that need a CUDA device; without one they are listed as not measured.

In: a setting. Out: figures by name. Knows nothing of: how they are printed.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

from async_ckpt import AsyncCheckpointer

from .figures import Saves
from .setting import Setting, side_by_side
from .table import Figure, Target
from .workloads import Training, tensors

_COPY = ("staging bandwidth, device to pinned host", "GB/s", "one copy_ to pinned memory", Target("≥", 0.9))
_CALL = ("call of save, CUDA tensors", "ms", "fixed", Target("≤", 1.0))
_GUARDED_CALL = ("call of save(guard=optimizer), CUDA tensors", "ms", "fixed", Target("≤", 1.0))
_LOADED = ("tensors that load back bit for bit", "", "tensors saved", Target("≥", 1.0))
_CALL_MILLISECONDS = 10.0


def gpu(setting: Setting) -> dict[str, Figure]:
    if not torch.cuda.is_available():
        return {
            name: Figure(*facts, pairs=[], note="not measured on a GPU")
            for name, facts in {
                "gpu_copy": _COPY,
                "gpu_call": _CALL,
                "gpu_guarded_call": _GUARDED_CALL,
                "gpu_loaded": _LOADED,
            }.items()
        }
    return {
        **_copy_and_call(setting),
        "gpu_guarded_call": Figure(*_GUARDED_CALL, pairs=_guarded_calls(setting)),
    }


def _copy_and_call(setting: Setting) -> dict[str, Figure]:
    state = {name: tensor.cuda() for name, tensor in tensors(setting.state_bytes).items()}
    flat = torch.empty(setting.state_bytes, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(setting.state_bytes, dtype=torch.uint8, pin_memory=True)
    calls: list[float] = []
    saves = Saves(setting.folder / "gpu", {"model": state})

    def staging_bandwidth() -> float:
        torch.cuda.synchronize()
        begin = perf_counter()
        handle = saves.begin()
        calls.append(perf_counter() - begin)
        handle.wait_staged()
        seconds = perf_counter() - begin
        saves.end(handle)
        return setting.state_bytes / seconds / 1e9

    def copy_bandwidth() -> float:
        torch.cuda.synchronize()
        begin = perf_counter()
        pinned.copy_(flat, non_blocking=True)
        torch.cuda.synchronize()
        return setting.state_bytes / (perf_counter() - begin) / 1e9

    with saves.checkpointer as checkpointer:
        pairs = side_by_side(setting.rounds, staging_bandwidth, copy_bandwidth)
        same = _num_equal(checkpointer, state)
    return {
        "gpu_copy": Figure(*_COPY, pairs=pairs),
        "gpu_call": Figure(*_CALL, pairs=[(s * 1e3, _CALL_MILLISECONDS) for s in calls]),
        "gpu_loaded": Figure(*_LOADED, pairs=[(same, len(state))]),
    }


def _num_equal(checkpointer: AsyncCheckpointer, state: dict[str, torch.Tensor]) -> int:
    """Of the tensors just saved, how many load back with the very same bits."""
    loaded: dict[str, Any] = checkpointer.load(map_location="cuda")["model"]
    return sum(
        torch.equal(tensor.view(torch.int32), loaded[name].view(torch.int32))
        for name, tensor in state.items()
    )


def _guarded_calls(setting: Setting) -> list[tuple[float, float]]:
    training = Training(setting.state_bytes, batch=64, device="cuda")
    saves = Saves(setting.folder / "gpu_guarded", training.state, guard=training.optimizer)
    pairs = []
    with saves.checkpointer:
        for _ in range(setting.rounds):
            training.step()
            begin = perf_counter()
            handle = saves.begin()
            pairs.append(((perf_counter() - begin) * 1e3, _CALL_MILLISECONDS))
            training.step()
            saves.end(handle)
    return pairs
