"""First saves: cold, after `prewarm`, after `restore`; and a restore onto the device.

In: a bench. Out: rows by name. Knows nothing of: trainings.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Final

import torch

from async_ckpt import SaveReport

from .candidates import copy_into
from .gpu_bench import Bench, Found, Saves
from .limits import drop_cache, fill_cache, torch_save
from .setting import side_by_side
from .workloads import tensors

_GIB: Final = 7
FIRSTS: Final = ("cold", "second", "prewarmed", "restored")


def first(bench: Bench) -> Mapping[str, Found]:
    """First saves, each compared with a later save of the same round."""
    bench.require_room(2 * bench.gib(_GIB))
    state = tensors(bench.gib(_GIB), device=bench.device.kind)
    root = bench.setting.folder / "run"
    reports: list[dict[str, SaveReport]] = []
    for _ in bench.rounds():
        told: dict[str, SaveReport] = {}
        with Saves(root, {"model": state}) as saves:
            for name in ("cold", "second"):
                told[name] = saves.end(saves.begin())
            told["later"] = saves.end(saves.begin(), delete=False)
        with Saves(root, {"model": state}) as saves:
            saves.checkpointer.restore(saves.state)
            told["restored"] = saves.end(saves.begin())
        with Saves(root, {"model": state}) as saves:
            saves.checkpointer.prewarm(saves.state)
            told["prewarmed"] = saves.end(saves.begin())
        reports.append(told)
        shutil.rmtree(root)
    found: dict[str, Found] = {}
    for name in FIRSTS:
        stalls = [(told[name].stall_seconds * 1e3, told["later"].stall_seconds * 1e3) for told in reports]
        totals = [(told[name].total_seconds, told["later"].total_seconds) for told in reports]
        found |= {f"gpu_first_{name}_stall": Found(stalls), f"gpu_first_{name}_total": Found(totals)}
    return found


def restore(bench: Bench) -> Mapping[str, Found]:
    """A verified restore into existing tensors, compared with torch.load, with a cold and a warm page cache."""
    bench.require_room(2 * bench.gib(_GIB))
    state = tensors(bench.gib(_GIB), device=bench.device.kind)
    theirs = bench.setting.folder / "torch.pt"
    torch_save({name: tensor.cpu() for name, tensor in state.items()}, theirs)
    with Saves(bench.setting.folder / "run", state) as saves:
        ours = Path(saves.end(saves.begin(), delete=False).path)

        def restored() -> None:
            saves.checkpointer.restore(state)

        def loaded() -> None:
            copy_into(state, torch.load(theirs, mmap=True, weights_only=True, map_location="cpu"))

        def seconds(path: Path, cache: Callable[[Path], None], bring_back: Callable[[], None]) -> float:
            cache(path)
            bench.device.synchronize()
            begin = perf_counter()
            bring_back()
            bench.device.synchronize()
            return perf_counter() - begin

        def found(cache: Callable[[Path], None]) -> Found:
            ways = partial(seconds, ours, cache, restored), partial(seconds, theirs, cache, loaded)
            return Found(side_by_side(bench.rounds(), *ways))

        return {"gpu_restore_cold": found(drop_cache), "gpu_restore_warm": found(fill_cache)}
