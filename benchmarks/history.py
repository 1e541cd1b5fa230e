"""The cost of a run's history: background time, requests to a store, and the number of saves in a full log.

In: a setting. Out: figures by name. Knows nothing of: how they are printed.

Seconds are those of `EventLog.write`, on the thread that cleans up after a commit, for which nothing waits. They are
compared with the rest of the commit: from the last durable byte to the journal.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import torch

from async_ckpt import AsyncCheckpointer, Place
from async_ckpt.core.events.log import FOLDER, MAX_BYTES, NAME, EventLog
from async_ckpt.core.storage.local import LocalStorage
from async_ckpt.core.timing import monotonic, wall_time
from async_ckpt.testing import FaultyProxy

from .limits import files_of
from .setting import Setting
from .store_server import options_for, store_server
from .table import Figure, Target, fixed

PACKAGES: Final = ("obstore",)
_KEEP: Final = 3
_MOST_MS: Final = 1.0
_MOST_REQUESTS: Final = 2.0
_HELD_SAVES: Final = 10_000


def on_disk(setting: Setting) -> dict[str, Figure]:
    """Saves of a small state. Its history is as long as that of a large one."""
    with AsyncCheckpointer(setting.folder / "run", keep=_KEEP) as ckpt:
        log = ckpt._roots.runs[0].events
        timed = _Timed(log.write)
        log.write = timed  # type: ignore[method-assign]
        commits = [_saved(ckpt, step).commit_seconds for step in range(setting.kept_rounds)]
    ms = [seconds * 1e3 for seconds in timed.seconds[: len(commits)]]
    beside = list(zip(ms, (seconds * 1e3 for seconds in commits), strict=True))
    title = "history of a save on the disk"
    return {
        "history_disk": fixed(title, "ms", ms, _MOST_MS),
        "history_disk_beside": Figure(f"{title}, beside its commit", "ms", "commit", None, beside),
    }


class _Timed:
    """A function whose calls are timed."""

    def __init__(self, fn: Callable[..., None]) -> None:
        self.seconds: list[float] = []
        self._fn = fn

    def __call__(self, **options: Any) -> None:
        begin = monotonic()
        self._fn(**options)
        self.seconds.append(monotonic() - begin)


def at_store(setting: Setting) -> dict[str, Figure]:
    """The requests of a commit whose retention deletes a step."""
    pairs, sizes = [], []
    with store_server(keep=True) as server, FaultyProxy(server) as proxy:
        place = Place("s3://benchmark/run", options=options_for(proxy.endpoint))
        with AsyncCheckpointer(place, keep=_KEEP) as ckpt:
            for step in range(_KEEP + setting.kept_rounds):
                before = len(proxy.requests)
                _saved(ckpt, step)
                asked = [request.target for request in proxy.requests[before:]]
                own = [target for target in asked if NAME in target or f"/{FOLDER}" in target]
                if step > _KEEP:
                    pairs.append((float(len(own)), float(len(asked) - len(own))))
                    sizes.append(ckpt._roots.runs[0].storage.sizes("")[NAME])
    title = "requests of a commit to a store for its history"
    return {
        "history_requests": fixed(title, "", [own for own, _ in pairs], _MOST_REQUESTS),
        "history_requests_beside": Figure(f"{title}, beside all others", "", "others", None, pairs),
        "history_store_bytes": Figure(
            "bytes of each such request", "kB", "the largest", None, [(size / 1e3, max(sizes) / 1e3) for size in sizes]
        ),
    }


def held(setting: Setting) -> dict[str, Figure]:
    """The number of saves in a full log, with six groups, eight ranks and a record of three numbers."""
    folder = setting.folder / "log"
    folder.mkdir(parents=True)
    log = EventLog(LocalStorage(folder), wall_time)
    for step in range(10 * _HELD_SAVES):
        log.note("save", 100 * step, **_facts(step))
        log.write()
        if step % 500 == 0 and step > 1000 and log.read()[0]["step"] > 0:
            break
    num_bytes = sum(path.stat().st_size for path in files_of(folder))
    events = [(float(len(log.read())), float(_HELD_SAVES))]
    return {
        "history_saves": Figure("saves that a full log holds", "", "fixed", Target("≥", 1.0), events),
        "history_bytes": fixed("size of a full log", "kB", [num_bytes / 1e3], MAX_BYTES / 1e3),
    }  # fmt: skip


def _facts(step: int) -> dict[str, Any]:
    """The event of a save in a training of some days: durations with all digits, and a record of three numbers."""
    numbers = random.Random(step)
    seconds = 4 + numbers.random()
    return {
        "attempt": f"{numbers.getrandbits(32):08x}",
        "num_bytes": 1_490_000_896,
        "num_tensors": 442,
        **{f"{name}_seconds": numbers.random() / 50 for name in ("stall", "call", "commit")},
        **{f"{name}_seconds": seconds - numbers.random() for name in ("stage", "write", "total")},
        "retries": 0,
        "free_bytes": 10**12 - numbers.randrange(10**10),
        "groups": dict.fromkeys(("model", "optimizer", "ema", "scheduler", "loader", "rng"), 10**8),
        "record": {"loss": numbers.random(), "lr": 3e-4, "tokens": step * 4_194_304},
        "world_size": 8,
        "slowest_rank": numbers.randrange(8),
        "slowest_rank_seconds": seconds,
        "median_rank_seconds": seconds - numbers.random() / 5,
        "most_stalled_rank": numbers.randrange(8),
        "most_stalled_rank_seconds": numbers.random() / 40,
        "median_rank_stall_seconds": numbers.random() / 50,
    }


def _saved(ckpt: AsyncCheckpointer, step: int) -> Any:
    report = ckpt.save({"model": {"weight": torch.zeros(256)}}, step, record={"loss": 0.5}).result()
    ckpt.wait()
    return report


MEASURES: Final = {"on_disk": on_disk, "at_store": at_store, "held": held}
