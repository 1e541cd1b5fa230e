"""How the cost of a save grows: with bytes, tensors, saves, kept steps, and ranks on one host.

In: a setting. Out: series of points, and the slope of a fitted line. Knows nothing of: pictures.
"""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import linear_regression, median
from typing import Any, ClassVar, Final

import torch

from async_ckpt import AsyncCheckpointer, Place
from async_ckpt.core.host.limits import free_memory_bytes
from async_ckpt.core.runs.manifest import NAME as MANIFEST
from async_ckpt.core.runs.manifest import Archive, Manifest
from async_ckpt.core.timing import monotonic
from async_ckpt.stores.s3.store import ObjectStorage
from async_ckpt.testing import FaultyProxy

from .apart import Apart, Channel, begun
from .figures import Saves
from .limits import MIB, SEGMENT_BYTES, WarmMemory
from .processes import status, status_bytes
from .setting import Setting, side_by_side
from .store_server import options_for, store_server
from .table import Row, shown
from .workloads import small_tensors, tensors

_GB: Final = 1e9
_WARM_SAVES: Final = 20
# The share of memory and disk for a state. Memory also holds the snapshot and the memory of the limit; the disk also
# holds the last archive and the next one.
_PART: Final = 1 / 6


@dataclass(frozen=True, slots=True)
class Series:
    """Points (x, y), with a line that is fitted by least squares."""

    title: str
    x: str
    y: str
    points: Sequence[tuple[float, float]]
    per: str
    """The unit of the slope, such as "s per GB"."""
    scale: float = 1.0
    """The factor from y per x to the unit `per`."""
    limit: Sequence[tuple[float, float]] = field(default=())
    """The points of the machine's own limit."""

    GROUP: ClassVar = "growth"
    HEAD: ClassVar = ["cost", "grows with", "first", "last", "slope"]

    @property
    def slope(self) -> float:
        xs, ys = zip(*self.points, strict=True)
        return linear_regression(xs, ys).slope * self.scale

    def as_dict(self) -> dict[str, Any]:
        told = {
            "title": self.title,
            "x": self.x,
            "y": self.y,
            "points": [list(point) for point in self.points],
        }
        return told | {"slope": self.slope, "per": self.per, "limit": [list(point) for point in self.limit]}

    def cells(self) -> list[str]:
        ends = [f"{shown(y)} {self.y} at {shown(x)}" for x, y in (self.points[0], self.points[-1])]
        return [self.title, self.x, *ends, f"{self.slope:.3g} {self.per}"]


def by_bytes(setting: Setting) -> dict[str, Row]:
    """Up to the size that memory and disk allow."""
    setting.folder.mkdir(parents=True, exist_ok=True)
    room = min(free_memory_bytes(), shutil.disk_usage(setting.folder).free)
    most = min(setting.growth_bytes, int(room * _PART))
    stalls, durable, limits = [], [], []
    num_bytes = 64 * MIB
    while num_bytes <= most:
        state = tensors(num_bytes)
        saves = Saves(setting.folder / f"bytes-{num_bytes}", {"model": state})
        warm = WarmMemory(num_bytes, SEGMENT_BYTES)
        with saves.checkpointer:
            both = side_by_side(
                setting.few_rounds, saves.run, partial(warm.write_seconds, setting.folder / "raw", num_bytes)
            )
        reports, raw = zip(*both, strict=True)
        del saves, warm, state
        gc.collect()
        size = num_bytes / _GB
        stalls.append((size, median(report.stall_seconds for report in reports)))
        durable.append((size, median(report.total_seconds for report in reports)))
        limits.append((size, median(raw)))
        num_bytes *= 2
    return {
        "growth_stall": Series("stall of save", "GB", "s", stalls, "s per GB"),
        "growth_durable": Series("call to durable", "GB", "s", durable, "s per GB", limit=limits),
    }


def by_tensors(setting: Setting) -> dict[str, Row]:
    points = []
    count = 10
    while count <= setting.num_small:
        saves = Saves(setting.folder / f"tensors-{count}", {"model": small_tensors(count)})
        with saves.checkpointer:
            stalls = [saves.run().stall_seconds for _ in range(setting.few_rounds)]
        points.append((float(count), median(stalls) * 1e3))
        count *= 10
    title = "stall of save, tensors of 1 KiB, plan known"
    return {"growth_tensors": Series(title, "tensors", "ms", points, "µs per tensor", scale=1e3)}


def by_saves(setting: Setting) -> dict[str, Row]:
    """The memory, descriptors and threads of a process after each further save."""
    saves = Saves(setting.folder / "saves", {"model": tensors(16 * MIB)})
    seconds, memory, descriptors, threads = [], [], [], []
    with saves.checkpointer:
        for _ in range(_WARM_SAVES):
            saves.run()
        for number in range(setting.many_saves):
            seconds.append((float(number), saves.run().total_seconds * 1e3))
            held = _held()
            memory.append((float(number), held["VmRSS"] / MIB))
            descriptors.append((float(number), held["descriptors"]))
            threads.append((float(number), held["Threads"]))
    title = "{}, after {} saves of 16 MiB"
    made = {
        "growth_saves_seconds": ("call to durable", "ms", seconds, "µs per save", 1e3),
        "growth_saves_memory": ("resident memory", "MiB", memory, "KiB per save", 1024.0),
        "growth_saves_descriptors": ("open descriptors", "", descriptors, "per save", 1.0),
        "growth_saves_threads": ("threads", "", threads, "per save", 1.0),
    }
    return {
        name: Series(title.format(what, setting.many_saves), "saves", unit, points, per, scale)
        for name, (what, unit, points, per, scale) in made.items()
    }


def by_kept(setting: Setting) -> dict[str, Row]:
    """The commit of one more step, with the retention that deletes one, by the number of kept steps."""
    with ExitStack() as stack:
        runs = [stack.enter_context(_Kept(setting.folder / f"kept-{number}", number)) for number in setting.kept_steps]
        rounds = [[run.commit_seconds() for run in runs] for _ in range(setting.kept_rounds)]
    seconds = [median(column) * 1e3 for column in zip(*rounds, strict=True)]
    requests = [(float(number), _requests_per_commit(number)) for number in setting.stored_steps]
    disk = list(zip(map(float, setting.kept_steps), seconds, strict=True))
    title = "a commit of 1 KiB and its retention"
    return {
        "growth_kept": Series(f"{title}, on the disk", "kept steps", "ms", disk, "µs per step", scale=1e3),
        "growth_kept_store": Series(f"{title}, at a store", "kept steps", "requests", requests, "per step"),
    }


class _Kept:
    """A run that keeps this number of steps, with a checkpointer that has listed them."""

    def __init__(self, root: Path | Place, num_kept: int) -> None:
        if isinstance(root, Path):
            for step in range(num_kept):
                for name, data in _step(step):
                    path = root / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(data)
        self._checkpointer = AsyncCheckpointer(root, keep=num_kept)
        self._step = num_kept
        for _ in range(3):
            self.commit_seconds()

    def commit_seconds(self) -> float:
        begin = monotonic()
        self._checkpointer.save({"weight": torch.zeros(256)}, step=self._step).result()
        self._checkpointer.wait()
        self._step += 1
        return monotonic() - begin

    def __enter__(self) -> _Kept:
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpointer.close()


def _step(step: int) -> Iterator[tuple[str, bytes]]:
    """The files of a committed step with an unreadable archive."""
    attempt = f"{step:08x}"
    archive = Archive(f"rank_00000.{attempt}.tar", 5, "0" * 32)
    folder = f"step_{step:08d}"
    yield f"{folder}/{archive.name}", b"bytes"
    yield f"{folder}/{MANIFEST}", Manifest(step, attempt, 1, 1e9 + step, (archive,)).dump()


def _requests_per_commit(num_kept: int) -> float:
    """The requests of a commit to a store, by a process that knows the store's content."""
    url = f"s3://benchmark/kept-{num_kept}"
    with store_server(keep=True) as server, FaultyProxy(server) as proxy:
        there = ObjectStorage(url, options_for(server))
        for step in range(num_kept):
            for name, data in _step(step):
                there.replace(name, data)
        with _Kept(Place(url, options=options_for(proxy.endpoint)), num_kept) as run:
            before = len(proxy.requests)
            run.commit_seconds()
            return float(len(proxy.requests) - before)


def by_ranks(setting: Setting) -> dict[str, Row]:
    """Processes of one host, each with its own run and state, that save at the same time."""
    points = [(float(count), median(_together(setting, count, setting.few_rounds))) for count in (1, 2, 4)]
    size = setting.rank_bytes / _GB
    title = f"call to durable, {size:.2f} GB for each rank"
    return {"growth_ranks": Series(title, "ranks", "s", points, "s per rank")}


def _together(setting: Setting, count: int, rounds: int) -> list[float]:
    """For each round, seconds until the last process is durable."""
    with ExitStack() as stack:
        folders = [setting.folder / f"ranks-{count}-{rank}" for rank in range(count)]
        ranks = [stack.enter_context(begun(_as_rank, folder, setting.rank_bytes, count, rounds)) for folder in folders]
        return [_one_save(ranks) for _ in range(rounds)]


def _one_save(ranks: Sequence[Apart]) -> float:
    for rank in ranks:
        rank.receive()  # the rank is ready
    for rank in ranks:
        rank.send("go")
    return max(float(rank.receive()) for rank in ranks)


def _as_rank(channel: Channel, folder: Path, num_bytes: int, count: int, rounds: int) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(count)
    torch.set_num_threads(1)
    saves = Saves(folder, {"model": tensors(num_bytes)})
    with saves.checkpointer:
        for _ in range(rounds):
            channel.send("ready")
            channel.receive()
            channel.send(saves.durable_seconds())


def _held() -> dict[str, float]:
    return {
        "VmRSS": status_bytes("VmRSS"),
        "Threads": int(status()["Threads"]),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


MEASURES: Final[dict[str, Callable[[Setting], dict[str, Row]]]] = {
    "by_saves": by_saves,  # first, while the process is small
    "by_bytes": by_bytes,
    "by_tensors": by_tensors,
    "by_kept": by_kept,
    "by_ranks": by_ranks,
}
