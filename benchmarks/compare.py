"""The comparison: every candidate in turn, repeatedly, and the ratios of this library to the others.

In: a setting. Out: a row for each candidate, and figures with targets. Knows nothing of: how each candidate saves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any, ClassVar, Final

from . import trial
from .candidates import CANDIDATES, NO_SAVE_STEPS, Candidate
from .setting import Setting
from .table import Figure, Noise, Row, Target, above_noise, shown

_OURS: Final = {name for name in CANDIDATES if name.startswith("ours")}
# The columns of the table of workloads: this library, and the fastest of each other kind.
_FEW: Final = ("ours_guarded", "torch_checkpointing", "dcp_async_cached", "safetensors", "torch_save")
# Candidates that no figure needs are measured in the first round only.
_IN_EACH_ROUND: Final = (
    "ours_guarded", "ours", "ours_keeping", "torch_checkpointing", "dcp_async", "dcp_async_cached", "moonclip", "safetensors",
    "torch_save", "tar", "gzip", "limit",
)  # fmt: skip
PACKAGES: Final = ("safetensors", "torch_checkpointing", "moonclip", "pytorch-lightning", "zstandard")
_GB: Final = 1e9
Values = Callable[[Mapping[str, Any]], list[float]]


@dataclass(frozen=True, slots=True)
class Contender:
    """The results of one candidate, one for each round, each from a new process. With `why_not`, it has no results."""

    name: str
    results: Sequence[Mapping[str, Any]]
    why_not: str = ""

    GROUP: ClassVar = "candidates"
    HEAD: ClassVar = [
        "save", "training lost, s", "first save, s", "stall, ms", "durable, s", "GB/s", "CPU s/GB",
        "memory / state", "disk / state", "restore cold, s", "warm, s", "saves faster than the disk: lost, s each",
    ]  # fmt: skip

    @property
    def candidate(self) -> type[Candidate]:
        return CANDIDATES[self.name]

    def as_dict(self) -> dict[str, Any]:
        told = {"title": self.candidate.title, "configuration": self.candidate.configuration}
        if self.why_not:
            return told | {"not_measured": self.why_not}
        return told | {"medians": self.medians, "results": list(self.results)}

    @property
    def medians(self) -> dict[str, float]:
        return {name: median(self.values(name)) for name in VALUES}

    def values(self, name: str) -> list[float]:
        """The samples of all rounds."""
        return [value for result in self.results for value in VALUES[name](result)]

    def cells(self) -> list[str]:
        if self.why_not:
            return [self.candidate.title, self.why_not, *[""] * (len(self.HEAD) - 2)]
        at = self.medians
        burst = [result["burst"]["lost"] for result in self.results if "burst" in result]
        return [
            self.candidate.title,
            f"{at['lost']:.3f}",
            f"{at['first']:.3f}",
            shown(at["stall"] * 1e3),
            f"{at['durable']:.2f}",
            f"{at['bandwidth'] / _GB:.2f}",
            f"{at['processor_per_byte'] * _GB:.2f}",
            f"{at['memory']:.2f}",
            f"{at['disk']:.2f}",
            f"{at['restore_cold']:.2f}",
            f"{at['restore_warm']:.2f}",
            f"{median(burst):.2f}" if burst else "-",
        ]


def _of_later(key: str) -> Values:
    return lambda result: [save[key] for save in result["later"]]


def _of_alone(key: str) -> Values:
    return lambda result: [save[key] for save in result["alone"]]


def _per_byte(values: Values, *, inverse: bool = False) -> Values:
    def told(result: Mapping[str, Any]) -> list[float]:
        num_bytes = result["num_bytes"]
        return [num_bytes / value if inverse else value / num_bytes for value in values(result)]

    return told


VALUES: Final[dict[str, Values]] = {
    "lost": _of_later("lost"),
    "first": lambda result: [result["first"]["lost"]],
    "stall": _of_later("stall"),
    "durable": _of_alone("durable"),
    "bandwidth": _per_byte(_of_alone("durable"), inverse=True),
    "processor_per_byte": _per_byte(_of_alone("processor")),
    "memory": _per_byte(lambda result: [result["peak_bytes"]]),
    "disk": _per_byte(lambda result: [result["disk_bytes"]]),
    "restore_cold": lambda result: result["restore_cold"],
    "restore_warm": lambda result: [result["restore_warm"]],
}


def comparison(setting: Setting) -> dict[str, Row]:
    """All candidates, for a training of linear layers under AdamW on one thread; a few candidates for GPT-2."""
    nothing: list[float] = []
    contenders = measured(setting, "training", list(CANDIDATES), setting.compare_bytes, nothing)
    noise = noise_of(nothing)
    figures = against(contenders, noise)
    gpt2 = _shape("gpt2", setting, (*_few(setting), "limit"))
    return {**figures, "no_save": noise, **contenders, "gpt2": gpt2}


def measured(
    setting: Setting, workload: str, names: Sequence[str], num_bytes: int, nothing: list[float] | None = None
) -> dict[str, Contender]:
    """The results by name, measured in the order A B C A B C, so that other load affects all of them.

    `nothing` gets the seconds that a training seems to lose to no save, before and after each round.
    """
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    why_not = {name: CANDIDATES[name].why_not() for name in names}
    for number, name in itertools.product(range(setting.compare_rounds), names):
        if nothing is not None and name in (names[0], names[-1]):
            lost = trial.lost_to_nothing(workload, num_bytes, setting.folder / f"nothing-{len(nothing)}", setting)
            nothing.append(median(lost))
        if why_not[name] or (number and name not in _IN_EACH_ROUND):
            continue
        folder = setting.folder / f"{workload}-{name}-{number}"
        begin = perf_counter()
        # One round is enough to see how saves behave that come too fast.
        result = trial.run(name, workload, num_bytes, folder, setting, burst=number == 0)
        print(f"  {CANDIDATES[name].title}: {perf_counter() - begin:.0f} s", flush=True)
        if "failed" in result:
            why_not[name] = f"failed: {result['failed']}"
        elif not result["same"]:
            why_not[name] = "void: what it brought back is not what was saved"
        else:
            results[name].append(result)
    sizes = [result["num_bytes"] for name in names for result in results[name] if CANDIDATES[name].share == 1]
    for name in names:
        if CANDIDATES[name].share < 1 and sizes:
            results[name] = [_scaled(result, max(sizes)) for result in results[name]]
    return {name: Contender(name, [] if why_not[name] else results[name], why_not[name]) for name in names}


def noise_of(nothing: Sequence[float]) -> Noise:
    return Noise(f"training seconds lost in {NO_SAVE_STEPS} steps", list(zip(nothing[::2], nothing[1::2], strict=True)))


def _scaled(result: Any, num_bytes: int) -> Any:
    """The result for a part of the state, scaled to all of it. `sample_bytes` is the size of the measured part."""
    factor = num_bytes / result["num_bytes"]

    def scale(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: inner if key == "step" else scale(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [scale(inner) for inner in value]
        return value if isinstance(value, bool) else value * factor

    return {**scale(result), "sample_bytes": result["num_bytes"]}


def pairs_of(ours: Contender, other: Contender, value: str) -> list[tuple[float, float]]:
    """The medians of both candidates in each round, in which they were measured one soon after the other.

    The samples of one process are more similar than samples of two processes.
    """
    rounds = zip(ours.results, other.results, strict=False)
    return [(median(VALUES[value](one)), median(VALUES[value](another))) for one, another in rounds]


def against(contenders: Mapping[str, Contender], noise: Noise) -> dict[str, Row]:
    """The figures with targets."""
    others = [name for name, contender in contenders.items() if contender.results]
    num_rounds = len(contenders["ours_guarded"].results)
    peers = [name for name in others if name not in {*_OURS, "limit"} and len(contenders[name].results) == num_rounds]
    named = [(name, limit) for name, limit in (("torch_checkpointing", 0.5), ("moonclip", None)) if name in others]
    durable = [name for name in peers if CANDIDATES[name].durable]

    def best(names: Sequence[str], value: str) -> str:
        return min(names, key=lambda name: contenders[name].medians[value])

    def held(title: str, ours: str, other: str, value: str, limit: float | None) -> Figure:
        pairs = above_noise(pairs_of(contenders[ours], contenders[other], value))
        target = None if limit is None else Target("≤", limit)
        off = noise.seconds if value == "lost" else 0.0
        return Figure(title, "s", CANDIDATES[other].title, target, pairs, noise=off)

    num_bytes = contenders["ours"].results[0]["num_bytes"]
    lost = f"training seconds lost to a save(guard=) of {num_bytes / _GB:.2f} GB, later ones"
    to_durable = "call to durable, without guard="
    restored = "restore, cold, saved without guard="
    figures = {
        "lost_best": held(lost, "ours_guarded", best(peers, "lost"), "lost", 1.0),
        "lost_dcp_async": held(lost, "ours_guarded", "dcp_async", "lost", 1 / 20),
        "lost_tar": held(lost, "ours_guarded", "tar", "lost", 1 / 80),
        "lost_gzip": held(lost, "ours_guarded", "gzip", "lost", 1 / 1000),
        "lost_limit": held(lost, "ours_guarded", "limit", "lost", None),
        **{f"lost_{name}": held(lost, "ours_guarded", name, "lost", limit) for name, limit in named},
        "durable_best": held(to_durable, "ours", best(durable, "durable"), "durable", 1 / 2),
        "durable_tar": held(to_durable, "ours", "tar", "durable", 1 / 8),
        "durable_gzip": held(to_durable, "ours", "gzip", "durable", 1 / 80),
        "durable_limit": held(to_durable, "ours", "limit", "durable", 1.08),
        "restore_torch": held(restored, "ours", "torch_save", "restore_cold", 1 / 2),
        "restore_limit": held(restored, "ours", "limit", "restore_cold", 1.1),
    }
    guarded = contenders["ours_guarded"].results
    first = [(VALUES["first"](result)[0], 0.1 * result["num_bytes"] / _GB) for result in guarded]
    title = "training seconds lost to the first save(guard=), after prewarm"
    return {**figures, "lost_first": Figure(title, "s", "0.1 s per GB", Target("≤", 1.0), first, noise=noise.seconds)}


def _short(name: str) -> str:
    return "async_ckpt" if name in _OURS else CANDIDATES[name].title


@dataclass(frozen=True, slots=True)
class Shape:
    """One workload, saved by a few candidates."""

    title: str
    num_bytes: int
    contenders: Mapping[str, Contender]

    GROUP: ClassVar = "workloads"
    HEAD: ClassVar = ["state", *(f"{_short(name)}: lost / durable, s" for name in _FEW)]

    def as_dict(self) -> dict[str, Any]:
        told = {name: contender.as_dict() for name, contender in self.contenders.items()}
        return {"title": self.title, "num_bytes": self.num_bytes, "candidates": told}

    def cells(self) -> list[str]:
        return [f"{self.title}, {self.num_bytes / _GB:.2f} GB", *map(self._cell, _FEW)]

    def _cell(self, name: str) -> str:
        contender = self.contenders.get(name)
        if contender is None or contender.why_not:
            return contender.why_not if contender else "-"
        return f"{contender.medians['lost']:.3f} / {contender.medians['durable']:.2f}"


_SHAPES: Final = {
    "gpt2": "GPT-2 124M with AdamW, fp32",
    "rank_of_8b": "one rank of an 8B model under FSDP over 8, fewer layers",
    "lora": "LoRA over a frozen bf16 base",
    "small": "20,000 tensors of 1 KiB",
    "huge": "one tensor",
}


def shapes(setting: Setting) -> dict[str, Row]:
    return {f"shape_{workload}": _shape(workload, setting, _few(setting)) for workload in _SHAPES}


def _few(setting: Setting) -> tuple[str, ...]:
    return _FEW[: setting.num_shaped]


def _shape(workload: str, setting: Setting, names: Sequence[str]) -> Shape:
    # With 100,000 tensors, some candidates need minutes for each save.
    num_bytes = setting.num_small // 5 * 1024 if workload == "small" else setting.shape_bytes_here()
    once = replace(setting, compare_rounds=setting.shape_rounds)
    contenders = measured(once, workload, names, num_bytes)
    sizes = [result["num_bytes"] for one in contenders.values() for result in one.results]
    return Shape(_SHAPES[workload], max(sizes, default=0), contenders)


MEASURES: Final = {"comparison": comparison, "shapes": shapes}
