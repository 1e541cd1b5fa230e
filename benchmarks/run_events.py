"""The events of a simulated training, as the history of a run has them after many saves.

In: the number of saves. Out: events, or the log of a run. Knows nothing of: the use of the events.

They include each thing that happens to a run: a slow first save, a pause, a failure, skipped saves, a rollback,
retention, a borrowed group, and saves that a busy disk has slowed down.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from random import Random
from typing import Any, Final

from async_ckpt.core.events.kinds import Event, event
from async_ckpt.core.events.log import EventLog
from async_ckpt.core.storage.local import LocalStorage

BEGIN: Final = 1_790_000_000.0
_INTERVAL_SECONDS: Final = 600.0
_KEPT: Final = 5
_KEPT_EVERY: Final = 20
_LENT_EVERY: Final = 50
_STATE: Final = {"model": 500_000_000, "optimizer": 1_000_000_000, "rng": 5_000}
_BASE_BYTES: Final = 700_000_000
# A log accepts at once only as much as one of its files may have.
_EVENTS_A_WRITE: Final = 50


def events_of_run(num_saves: int, *, seed: int = 0, every: int = 100, num_ranks: int = 1) -> list[Event]:
    """The events of a run that saves every `every` steps, as `async_ckpt.history` returns them."""
    random = Random(seed)
    events: list[Event] = []
    live: dict[int, Event] = {}
    step, lender, time, opened = 0, 0, BEGIN, BEGIN
    for number in range(num_saves):
        step += every
        time += _INTERVAL_SECONDS * random.uniform(0.95, 1.1)
        happened = number * 10 // num_saves if number and number % max(1, num_saves // 10) == 0 else 0
        if happened == 3:
            for told in events:
                told["opened"] = opened
            events.append({**event("progress", time + _INTERVAL_SECONDS / 2, step - every // 2), "opened": opened})
            time += 30 * _INTERVAL_SECONDS
            opened = time - 60
            events.append(event("restore", time - 30, step - every, total_seconds=4.2, behind=False))
        if happened == 5:
            message = "s3://bucket/run: 503 Slow Down, for 30 s"
            events.append(
                event("failed", time, step, error="StorageUnavailableError", message=message, total_seconds=31.0)
            )
            continue
        if happened == 6:
            events.append(event("skipped", time, step, first_step=step - every // 2, count=3))
            continue
        if happened == 8:
            step -= 4 * every
            retired = [one for one in live if one >= step]
            events.append(event("restore", time - 60, step - every, total_seconds=4.6, behind=True))
            events.append(event("rollback", time, step, retired=retired))
            for one in retired:
                del live[one]
        if number % _LENT_EVERY == 0:
            lender = step
        saved = _save(random, time, step, lender, fullness=number / num_saves, num_ranks=num_ranks)
        saved["stall_seconds"] *= 8 if number == 0 else 1
        live[step] = saved
        events.append(saved)
        going = [one for one in sorted(live)[:-_KEPT] if one // every % _KEPT_EVERY and one != lender]
        if going:
            events.append(event("retention", time + 0.2, step, deleted=going))
            for one in going:
                del live[one]
    for told in events:
        told["opened"] = told["opened"] or opened
    for saved in live.values():
        saved["kept"] = True
    return events


def write_history(root: Path, events: Iterable[Event]) -> None:
    """Write events to the log of the run at `root`, at their times."""
    now = 0.0
    log = EventLog(LocalStorage(root), lambda: now)
    for number, one in enumerate(events, 1):
        facts = {name: value for name, value in one.items() if name not in ("kind", "time", "step", "opened", "kept")}
        now = one["time"]
        log.note(one["kind"], one["step"], **facts)
        if number % _EVENTS_A_WRITE == 0:
            log.write()
    log.write()


def _save(random: Random, time: float, step: int, lender: int, *, fullness: float, num_ranks: int) -> Event:
    call = 0.008 * random.lognormvariate(0, 0.25)
    busy = 3.0 if random.random() < 0.02 else 0.0
    write = 0.9 * (1 + fullness / 4 + busy) * random.uniform(0.95, 1.1)
    commit = 0.015 * random.uniform(0.7, 2)
    groups = {**_STATE, **({"base": _BASE_BYTES} if step == lender else {})}
    facts = {
        "attempt": f"{random.getrandbits(32):08x}",
        "num_bytes": sum(groups.values()) + 20_000,
        "num_tensors": 300,
        "stall_seconds": call * random.uniform(1, 1.3),
        "call_seconds": call,
        "stage_seconds": call + 0.35 * random.uniform(0.9, 1.2),
        "write_seconds": write,
        "commit_seconds": commit,
        "total_seconds": call + write + commit,
        "retries": 0,
        "free_bytes": int(9e11 * (1 - fullness / 2)),
        "groups": groups,
        "unchanged": [] if step == lender else ["base"],
        "borrowed": {} if step == lender else {"base": lender},
        "record": {"loss": 2.2 / math.sqrt(1 + step / 900) + random.gauss(0, 0.02), "epoch": step // 1000},
        **(_of_ranks(random, call, write, num_ranks) if num_ranks > 1 else {}),
    }
    return {**event("save", time, step, **facts), "kept": False}


def _of_ranks(random: Random, call: float, write: float, num_ranks: int) -> Mapping[str, Any]:
    return {
        "world_size": num_ranks,
        "slowest_rank": random.choice([3, 3, 3, num_ranks - 1]),
        "slowest_rank_seconds": write * random.uniform(1.02, 1.5),
        "median_rank_seconds": write,
        "most_stalled_rank": random.randrange(num_ranks),
        "most_stalled_rank_seconds": call * 1.5,
        "median_rank_stall_seconds": call,
    }
