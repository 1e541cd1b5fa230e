"""The cost of saving one state from several ranks, compared with one rank that writes the same bytes, and with DCP.

In: a setting. Out: figures by name. Knows nothing of: how many ranks a real training has; `scale` simulates those.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from .limits import MIB
from .setting import Setting, side_by_side
from .table import Figure, Target

_PATIENCE_SECONDS: Final = 300


class World:
    """Several ranks with the same state under FSDP, each in its own process."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self._processes = processes
        self._numbers = itertools.count(1)

    def save(self, how: str) -> tuple[float, float]:
        """Seconds that the slowest rank was stalled, and until the last rank knew that the save is durable."""
        number = next(self._numbers)
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{how} {number}\n")
            process.stdin.flush()
        told = []
        for process in self._processes:
            assert process.stdout is not None
            told.append(json.loads(process.stdout.readline()))
        return max(stall for stall, _ in told), max(whole for _, whole in told)


@contextmanager
def world(size: int, folder: Path, num_bytes: int, worker: str = "rank_worker", *more: str) -> Iterator[World]:
    """Ranks that run the module `worker` of this package, with the arguments `more`."""
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", f"benchmarks.{worker}"]
    rest = [str(size), str(folder / "store"), str(folder), str(num_bytes), *more]
    processes = [
        subprocess.Popen(
            [*command, str(rank), *rest],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        yield World(processes)
        for process in processes:
            process.communicate("end\n", timeout=_PATIENCE_SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def two_ranks(setting: Setting) -> dict[str, Figure]:
    with ExitStack() as stack:
        one, two = (
            stack.enter_context(world(size, setting.folder / f"of_{size}", setting.state_bytes)) for size in (1, 2)
        )
        one.save("ours"), two.save("ours")
        pairs = side_by_side(2 * setting.rounds, lambda: two.save("ours")[1], lambda: one.save("ours")[1])
    title = f"two ranks under FSDP, call to durable, {setting.state_bytes // MIB} MiB in all"
    return {"two_ranks": Figure(title, "s", "one rank, the same bytes", Target("≤", 1.1), pairs)}


def beside_dcp(setting: Setting) -> dict[str, Figure]:
    with world(4, setting.folder / "of_4", setting.state_bytes) as four:
        for how in ("ours", "dcp", "ours", "dcp"):
            four.save(how)
        rounds = side_by_side(2 * setting.rounds, lambda: four.save("ours"), lambda: four.save("dcp"))
    limit = "dcp.async_save, the same state and ranks"
    stalls = [(ours[0], dcp[0]) for ours, dcp in rounds]
    whole = [(ours[1], dcp[1]) for ours, dcp in rounds]
    of = f"four ranks under FSDP, {setting.state_bytes // MIB} MiB in all"
    return {
        "ranks_stall": Figure(f"{of}: stall of save(guard=optimizer)", "s", limit, Target("≤", 0.2), stalls),
        "ranks_durable": Figure(f"{of}: call to durable", "s", limit, Target("≤", 0.5), whole),
    }


def plugged_into_dcp(setting: Setting) -> dict[str, Figure]:
    """Torch's own engine with and without our writer, and loads of each save into another layout."""
    with world(4, setting.folder / "plugged", setting.state_bytes) as four:
        for how in (*("plugged", "unplugged", "engine", "ours") * 2, "keep"):
            four.save(how)

        def both(ours: str, torchs: str) -> list[tuple[tuple[float, float], tuple[float, float]]]:
            return side_by_side(setting.rounds, lambda: four.save(ours), lambda: four.save(torchs))

        saves = both("plugged", "unplugged")
        alone = side_by_side(
            setting.rounds, lambda: four.save("plugged")[1], lambda: four.save("engine")[1] + four.save("ours")[1]
        )
        loads = {layout: both(f"restore-{layout}", f"load-{layout}") for layout in _LAYOUTS}
        bare = {layout: both(f"restore-{layout}", f"bare-{layout}") for layout in _LAYOUTS}
        reads = both("read-columns", "load-columns")
    of = f"four ranks under FSDP, {setting.state_bytes // MIB} MiB in all"
    torchs_own, loaded = "with its own writer and stager", "dcp.load of what dcp.save has written, likewise"
    stalls = [(ours[0], torchs[0]) for ours, torchs in saves]
    figures = {
        "plugged_stall": Figure(
            f"{of}: stall of dcp.async_save with our writer, guard=optimizer",
            "s",
            torchs_own,
            Target("≤", 0.2),
            stalls,
        ),
        "plugged_durable": Figure(
            f"{of}: dcp.async_save with our writer, call to durable",
            "s",
            torchs_own,
            Target("≤", 0.85),
            _whole(saves),
        ),
        "plugged_limit": Figure(
            f"{of}: the same",
            "s",
            "dcp.async_save that stages, plans and writes nothing, and then a save of AsyncCheckpointer",
            Target("≤", 1.1),
            alone,
        ),
    }
    for layout, (told, allowed) in _LAYOUTS.items():
        title = f"{of}: restore into {told}, cold cache"
        figures[f"restore_{layout}"] = Figure(title, "s", loaded, Target("≤", allowed), _whole(loads[layout]))
        limit = "read of the archives that it needs through the page cache, digests, memmove, on all four ranks"
        pairs = _whole(bare[layout])
        figures[f"restore_{layout}_limit"] = Figure(f"{of}: the same", "s", limit, Target("≤", 1.25), pairs)
    title = f"{of}: dcp.load with our reader into {_LAYOUTS['columns'][0]}, cold cache"
    return {**figures, "read_columns": Figure(title, "s", loaded, None, _whole(reads))}


# The share of dcp.load's time that a restore may take. Reading, digests and copies alone take 0.42 and 0.52 of it.
_LAYOUTS: Final = {
    "columns": ("shards along the other dimension", 0.8),
    "pairs": ("shards along the same dimension, each on two ranks", 0.65),
}


def _whole(pairs: list[tuple[tuple[float, float], tuple[float, float]]]) -> list[tuple[float, float]]:
    return [(ours[1], torchs[1]) for ours, torchs in pairs]


MEASURES: Final = {"two_ranks": two_ranks, "beside_dcp": beside_dcp, "dcp": plugged_into_dcp}
