"""How saving grows with the number of ranks: plans, commits, restarts, and messages to real clients of a store.

In: a setting. Out: figures and growths by name. Knows nothing of: how ranks are simulated.

Plans are compared with the planner of torch.distributed.checkpoint.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import linear_regression, median
from time import process_time
from typing import Any, ClassVar, Final, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh

from async_ckpt.core.saving.planner import Planner, pool_for
from async_ckpt.core.state.division import StateDivider

from . import restarts, waiting_clients
from .fake_ranks import sharded, standing_at
from .far_store import Traffic
from .limits import MIB
from .setting import Setting
from .simulated_ranks import KINDS, LATENCY_SECONDS, Kind, Placed, Rest, Saved, SimulatedWorld, captured, state
from .table import Figure, Row, Target, fixed, shown

_FIRST_MS: Final = 100.0
_CACHED_MS: Final = 2.0
_COMMIT_SECONDS: Final = 2.0
_KNOWN_SECONDS: Final = 3.0
_RANK_0_MIB: Final = 512.0
_NUM_CACHED: Final = 10
_STEPS: Final = (100, 200, 300)

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Growth:
    """A cost by the number of ranks, for each way to spread a state over them.

    The slope is that of the logarithms: 0 is constant, 1 is linear.
    """

    title: str
    unit: str
    points: Mapping[str, Points]

    GROUP: ClassVar = "ranks"
    HEAD: ClassVar = ["what", "fewest ranks", "most ranks", "slope"]

    def slope(self, kind: str) -> float | None:
        """The slope; None if a logarithm does not exist."""
        xs, ys = zip(*self.points[kind], strict=True)
        if len(xs) < 2 or min(ys) <= 0:
            return None
        return linear_regression(list(map(math.log, xs)), list(map(math.log, ys))).slope

    def as_dict(self) -> dict[str, Any]:
        points = {kind: [list(point) for point in points] for kind, points in self.points.items()}
        slopes = {kind: self.slope(kind) for kind in self.points}
        return {"title": self.title, "unit": self.unit, "points": points, "slopes": slopes}

    def cells(self) -> list[str]:
        return [self.title, self._at(0), self._at(-1), _each({k: _two(self.slope(k)) for k in self.points})]

    def _at(self, number: int) -> str:
        ranks = {points[number][0] for points in self.points.values()}
        told = _each({kind: shown(points[number][1]) for kind, points in self.points.items()})
        return f"{' '.join(filter(None, (told, self.unit)))} at {' or '.join(map(shown, sorted(ranks)))}"


def _two(slope: float | None) -> str:
    return "-" if slope is None else f"{slope:.2f}"


def _each(told: Mapping[str, str]) -> str:
    """A single value if all are equal, else the value of each kind."""
    if len({*told.values()}) == 1:
        return next(iter(told.values()))
    return ", ".join(f"{kind} {value}" for kind, value in told.items())


# --- plans ----------------------------------------------------------------------------------------------------


def plans(setting: Setting) -> dict[str, Row]:
    """The work between the capture of a state and its first written bytes, in processor time."""
    largest = max(setting.world_sizes)
    measured = {
        (kind, size): [_planned(kind, size, setting.world_tensors) for _ in range(setting.few_rounds)]
        for kind in KINDS
        for size in setting.world_sizes
    }
    rows: dict[str, Row] = {}
    of_what = f"{setting.world_tensors:,} tensors, {largest:,} ranks"
    for kind in KINDS:
        for number, (which, limit) in enumerate((("first", _FIRST_MS), ("cached", _CACHED_MS))):
            samples = [of[number] for of in measured[kind, largest]]
            title = f"plan of one rank, {which}, {kind}, {of_what}"
            rows[f"plan_{which}_{kind.lower()}"] = fixed(title, "ms", samples, limit)
    for number, which in enumerate(("first", "cached")):
        rows[f"growth_plan_{which}"] = Growth(
            f"plan of one rank, {which}",
            "ms",
            {
                kind: [(size, median(of[number] for of in measured[kind, size])) for size in setting.world_sizes]
                for kind in KINDS
            },
        )
    return rows | _beside_dcp(setting)


class _Planned(NamedTuple):
    """Milliseconds of a rank's plans: which rank writes which part, and its position in the file."""

    first: float
    cached: float
    who: float
    """The part of `first` that assigns the parts to ranks."""


def _planned(kind: Kind, size: int, num_tensors: int) -> _Planned:
    """The plans of a rank in the middle."""
    rank, mates = size // 2 + 1, list(range(size))
    placed = Placed(kind, rank, size)
    captures = [captured(kind, rank, size, num_tensors, placed) for _ in range(1 + _NUM_CACHED)]
    states, planner = StateDivider(rank, size), Planner(pool_for(None, None), 1)
    gc.collect()
    took, who = [], []
    for here in captures:
        begin = process_time()
        states.structure(here)
        divided = states.divided(here, mates)
        who.append(1e3 * (process_time() - begin))
        planner.lay_out(divided.captured, 1, divided.ranks)
        took.append(1e3 * (process_time() - begin))
    return _Planned(took[0], median(took[1:]), who[0])


def _beside_dcp(setting: Setting) -> dict[str, Row]:
    sizes = setting.central_sizes
    largest = max(sizes)
    # First, since the other one leaves memory behind that would slow it down.
    ours = [_planned("FSDP", largest, setting.world_tensors).who / 1e3 for _ in range(setting.few_rounds)]
    of_dcp = {size: _planned_by_dcp(size, setting.world_tensors) for size in sizes}
    return {
        "plan_beside_dcp": Figure(
            f"who writes what, first, FSDP, {setting.world_tensors:,} tensors, {largest:,} ranks",
            "s",
            "create_global_plan of torch.distributed.checkpoint, on rank 0 for all ranks",
            Target("≤", 1 / 300),
            [(seconds, of_dcp[largest][1]) for seconds in ours],
        ),
        "growth_dcp_local": Growth(
            "torch.distributed.checkpoint: create_local_plan",
            "ms",
            {"FSDP": [(n, of_dcp[n][0] * 1e3) for n in sizes]},
        ),
        "growth_dcp_global": Growth(
            "torch.distributed.checkpoint: create_global_plan",
            "ms",
            {"FSDP": [(n, of_dcp[n][1] * 1e3) for n in sizes]},
        ),
    }


def _planned_by_dcp(size: int, num_tensors: int) -> tuple[float, float]:
    """Seconds of one rank's local plan, and of rank 0's global plan."""
    local, found = [], []
    leader = DefaultSavePlanner()
    for rank in range(size):
        with standing_at(rank, size) as mesh:
            here = _distributed(rank, mesh, num_tensors)
            planner = leader if rank == 0 else DefaultSavePlanner()
            begin = process_time()
            planner.set_up_planner(here, None, is_coordinator=rank == 0)
            found.append(planner.create_local_plan())
            local.append(process_time() - begin)
    begin = process_time()
    leader.create_global_plan(found)
    return median(local), process_time() - begin


def _distributed(rank: int, mesh: DeviceMesh, num_tensors: int) -> dict[str, Any]:
    """The same state as DTensors."""

    def shard(whole: torch.Tensor) -> Any:
        if not whole.dim():
            return whole
        chunk = -(-whole.shape[0] // mesh.size())
        rows = min(max(0, whole.shape[0] - rank * chunk), chunk)
        return sharded(whole[:rows], whole.shape, mesh)

    whole = state(num_tensors)
    model = {name: shard(value) for name, value in whole["model"].items()}
    optimizer = {
        name: {key: shard(value) for key, value in of.items()} for name, of in whole["optimizer"]["state"].items()
    }
    return {"model": model, "optimizer": {"state": optimizer}}


# --- commits --------------------------------------------------------------------------------------------------


def commits(setting: Setting) -> dict[str, Row]:
    """Simulated seconds from the moment at which the last archive is durable."""
    worlds = {(kind, size): _saved(kind, size, setting.world_tensors) for kind in KINDS for size in setting.world_sizes}
    saves = {key: world.saves for key, world in worlds.items()}
    memory = {
        (kind, size): _rank_0_mib(kind, size, setting.world_tensors) for kind in KINDS for size in setting.world_sizes
    }
    largest = max(setting.world_sizes)
    where = f"{largest:,} ranks, {LATENCY_SECONDS * 1e3:.0f} ms for each request"
    rows: dict[str, Row] = {}
    for kind in KINDS:
        first, *later = saves[kind, largest]
        of_later = [one.commit_seconds for one in later]
        known = [one.known_seconds for one in later]
        held = {
            "commit_first": ("commit of the first save", [first.commit_seconds], _COMMIT_SECONDS),
            "commit": ("commit of a later save", of_later, _COMMIT_SECONDS),
            "known": ("until the last rank knows of a later save", known, _KNOWN_SECONDS),
        }
        for name, (title, samples, most) in held.items():
            rows[f"{name}_{kind.lower()}"] = fixed(f"{title}, {kind}, {where}", "s, simulated", samples, most)
        title = f"memory that rank 0 takes for the first commit, {kind}, {largest:,} ranks"
        rows[f"memory_{kind.lower()}"] = fixed(title, "MiB", [memory[kind, largest]], _RANK_0_MIB)

    def growth(title: str, unit: str, of: Callable[[Saved], float], *, of_first: bool = False) -> Growth:
        def at(kind: Kind, size: int) -> tuple[float, float]:
            first, *later = saves[kind, size]
            return size, of(first) if of_first else median(map(of, later))

        return Growth(title, unit, {kind: [at(kind, size) for size in setting.world_sizes] for kind in KINDS})

    def growth_of_world(title: str, unit: str, of: Callable[[_World], float]) -> Growth:
        return Growth(
            title,
            unit,
            {kind: [(size, of(worlds[kind, size])) for size in setting.world_sizes] for kind in KINDS},
        )

    rows |= {
        "growth_met": growth_of_world("start: until all ranks have met in their store", "s", lambda one: one.met_seconds),
        "growth_commit_first": growth(
            "commit of the first save", "s", lambda one: one.commit_seconds, of_first=True
        ),
        "growth_commit": growth("commit of a later save", "s", lambda one: one.commit_seconds),
        "growth_said": growth("until rank 0 has said so", "s", lambda one: one.said_seconds),
        "growth_known": growth("until the last rank knows", "s", lambda one: one.known_seconds),
        "growth_afterwards": growth(
            "what rank 0 deletes after the commit, beside the training", "s", lambda one: one.afterwards_seconds
        ),
        "growth_rank_0_requests": growth("rank 0, until the commit", "requests", lambda one: one.rank_0.requests),
        "growth_rank_0_received": growth("rank 0, receives", "KiB", lambda one: one.rank_0.received / 1024),
        "growth_rank_0_sent": growth("rank 0, sends besides its archive", "KiB", lambda one: one.rank_0.sent / 1024),
        "growth_rank_0_deletes": growth("rank 0, after the commit", "requests", lambda one: one.afterwards_requests),
        "growth_follower_requests": growth("another rank", "requests", lambda one: one.follower.requests),
        "growth_follower_received": growth("another rank, receives", "bytes", lambda one: one.follower.received),
        "growth_follower_sent_first": growth(
            "another rank, sends besides its archive, first save", "bytes", lambda one: one.follower.sent, of_first=True
        ),
        "growth_follower_sent": growth(
            "another rank, sends besides its archive", "bytes", lambda one: one.follower.sent
        ),
        "growth_requests": growth("all ranks, until the last knows", "requests", lambda one: one.requests),
        "growth_busiest": growth("all ranks, in the busiest second", "requests", lambda one: one.busiest),
        "growth_words_rank_0": growth(
            "ranks' store: rank 0, a save", "requests", lambda one: one.words_of_rank_0.requests
        ),
        "growth_words_rank_0_bytes": growth(
            "ranks' store: rank 0, a save", "KiB", lambda one: _moved(one.words_of_rank_0) / 1024
        ),
        "growth_words_follower": growth(
            "ranks' store: another rank, from its durable archive on", "requests",
            lambda one: one.words_of_follower.requests,
        ),
        "growth_words_follower_bytes": growth(
            "ranks' store: another rank, from its durable archive on", "bytes",
            lambda one: _moved(one.words_of_follower),
        ),
        "growth_words_share": growth(
            "ranks' store: its thread, from the first durable archive until the last rank knows", "%",
            lambda one: 100 * one.store_share,
        ),
        "growth_rest_requests": growth_of_world(
            "ranks' store: heartbeats of all ranks, a second", "requests", lambda one: one.rest.requests
        ),
        "growth_rest_bytes": growth_of_world(
            "ranks' store: heartbeats of all ranks, a second", "KiB", lambda one: one.rest.bytes / 1024
        ),
        "growth_rest_share": growth_of_world(
            "ranks' store: its thread, where nobody saves", "%", lambda one: 100 * one.rest.store_share
        ),
        "growth_manifest": growth("manifest.json", "bytes", lambda one: one.manifest_bytes),
        "growth_layout": growth("layout.json", "KiB", lambda one: one.layout_bytes / 1024),
        "growth_archives": growth("archives.bin", "KiB", lambda one: one.archives_bytes / 1024),
        "growth_memory": Growth(
            "memory that rank 0 takes for the first commit",
            "MiB",
            {kind: [(size, memory[kind, size]) for size in setting.world_sizes] for kind in KINDS},
        ),
    }  # fmt: skip
    return rows


class _World(NamedTuple):
    met_seconds: float
    saves: list[Saved]
    rest: Rest


def _saved(kind: Kind, size: int, num_tensors: int) -> _World:
    world = SimulatedWorld(kind, size, num_tensors)
    try:
        return _World(world.met_seconds, [world.save(step) for step in _STEPS], world.rest())
    finally:
        world.close()


def _moved(traffic: Traffic) -> int:
    return traffic.sent + traffic.received


def _rank_0_mib(kind: Kind, size: int, num_tensors: int) -> float:
    world = SimulatedWorld(kind, size, num_tensors)
    try:
        return world.rank_0_bytes(_STEPS[0]) / MIB
    finally:
        world.close()


# --- restarts -------------------------------------------------------------------------------------------------


def storm(setting: Setting) -> dict[str, Row]:
    """All ranks restore one step at the same time, each its own part. The requests of a few of them are measured."""
    found = {
        size: restarts.of_one_reader(size, setting.world_tensors, setting.few_rounds) for size in setting.reader_sizes
    }

    def growth(title: str, unit: str, of: Callable[[restarts.Restart], float]) -> Growth:
        return Growth(title, unit, {"FSDP": [(size, of(one)) for size, one in found.items()]})

    return {
        "growth_restart_requests": growth("restart: requests of one rank", "", lambda one: one.requests),
        "growth_restart_received": growth(
            "restart: one rank reads, of what it holds itself", "times", lambda one: one.received / one.own_bytes
        ),
        "growth_restart_all": growth(
            "restart: requests of all ranks", "", lambda one: one.requests * one.num_ranks
        ),
        "growth_restart_object": growth(
            "restart: requests of all ranks for one archive", "", lambda one: one.reads
        ),
        "growth_restart_shared": growth(
            "restart: requests of all ranks for the object that all read", "", lambda one: one.shared * one.num_ranks
        ),
    }  # fmt: skip


MEASURES: Final[dict[str, Callable[[Setting], Mapping[str, Row]]]] = {
    "plans": plans,
    "commits": commits,
    "storm": storm,
    "clients": waiting_clients.clients,
}
