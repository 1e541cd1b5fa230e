"""Pictures of stored results only: each is drawn from the JSON file that the tables are made of.

In: results/*.json. Out: PNG and SVG beside them. Knows nothing of: how anything was measured.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import linear_regression
from typing import Any, Final

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .table import NOISE_SECONDS

Kept = Mapping[str, Any]

_OURS: Final = "#0b6e4f"
_THEIRS: Final = "#8d99ae"
_LIMIT: Final = "#c1121f"
_INK: Final = "#22223b"
# The candidates in the timeline: this library, the two that overlap most, and a widely used one.
_SHOWN: Final = ("ours_guarded", "torch_checkpointing", "dcp_async_cached", "torch_save")
_STYLE: Final[dict[Any, Any]] = {
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _INK,
    "svg.fonttype": "none",
    "svg.hashsalt": "async_ckpt",  # equal figures make equal files
    "figure.constrained_layout.use": True,
}


def draw(stem: Path) -> list[Path]:
    """Draw every picture for which the results of this name have data. Returns the written paths."""
    kept = json.loads(stem.with_suffix(".json").read_text())
    written = []
    with mpl.rc_context(_STYLE):
        for name, (group, picture) in _PICTURES.items():
            if kept.get(group):
                figure = picture(kept[group])
                if figure is None:
                    continue
                for suffix, facts in ((".png", {"Software": None}), (".svg", {"Date": None})):
                    path = stem.with_name(f"{stem.name}_{name}{suffix}")
                    figure.savefig(path, dpi=144, metadata=facts)
                    written.append(path)
                plt.close(figure)
    return written


def lost(candidates: Kept) -> Figure | None:
    """The cost of a save for the training, and the part of its call, on logarithmic scales."""
    names = [name for name, told in candidates.items() if "medians" in told]
    if not names:
        return None
    names.sort(key=lambda name: -candidates[name]["medians"]["lost"])
    figure, both = plt.subplots(1, 2, sharey=True, figsize=(9.6, 0.32 * len(names) + 1.0))
    _bars(both[0], candidates, names, "lost", NOISE_SECONDS)
    both[0].set_xlabel("training seconds lost to one save (later saves, median)")
    _bars(both[1], candidates, names, "stall", 0.0)
    both[1].set_xlabel("stall: seconds in the call, and held before a step")
    return figure


def _bars(axes: Axes, candidates: Kept, names: list[str], value: str, least: float) -> None:
    values = [max(candidates[name]["medians"][value], least) for name in names]
    bars = axes.barh([candidates[name]["title"] for name in names], values, height=0.68)
    for bar, name, seconds in zip(bars, names, values, strict=True):
        bar.set_color(_OURS if name.startswith("ours") else _THEIRS)
        less = "≤ " if seconds <= least else ""
        middle = bar.get_y() + bar.get_height() / 2
        axes.annotate(f" {less}{seconds:.2g} s", (seconds, middle), va="center", color=_INK)
    axes.set_xscale("log")
    axes.margins(x=0.2)


def timeline(candidates: Kept) -> Figure | None:
    """Steps of a training during one save: as wide as their time, and dark where they took longer."""
    shown = [name for name in _SHOWN if "results" in candidates.get(name, {})]
    if not shown:
        return None
    figure, axes = plt.subplots(figsize=(7.2, 0.62 * len(shown) + 1.0))
    for row, name in enumerate(reversed(shown)):
        saves = [save for result in candidates[name]["results"] for save in result["later"]]
        save = sorted(saves, key=lambda save: save["lost"])[len(saves) // 2]
        _steps(axes, row, save, _OURS if name.startswith("ours") else _THEIRS)
        axes.barh(row - 0.32, save["total"], height=0.1, color=_LIMIT)
    axes.set_yticks(range(len(shown)), [candidates[name]["title"] for name in reversed(shown)])
    axes.set_xlabel("seconds from the call of save (the median one); red: until it says that it is written")
    return figure


def _steps(axes: Axes, row: int, save: Kept, color: str) -> None:
    ends = list(itertools.accumulate(save["steps"]))
    for seconds, end in zip(save["steps"], ends, strict=True):
        slower = min(1.0, max(0.0, seconds / save["step"] - 1))
        left, width = end - seconds, seconds
        axes.barh(row, width, left=left, height=0.5, color=color, alpha=0.35 + 0.65 * slower, edgecolor="white")
    for number in range(3):  # steps without a save, for comparison
        axes.barh(
            row, save["step"], left=ends[-1] + number * save["step"], height=0.5, color=color, alpha=0.2,
            edgecolor="white",
        )  # fmt: skip


def throughput(growth: Kept) -> Figure | None:
    """GB/s until durable, by size, and the bandwidth of the disk from bare memory."""
    series = growth.get("growth_durable")
    if series is None:
        return None
    figure, axes = plt.subplots(figsize=(6.0, 3.4))
    for points, color, label in (
        (series["limit"], _LIMIT, "raw O_DIRECT write + fsync"),
        (series["points"], _OURS, "async_ckpt, call to durable"),
    ):
        axes.plot([x for x, _ in points], [x / y for x, y in points], marker="o", color=color, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks([x for x, _ in series["points"]], [f"{x:.2g}" for x, _ in series["points"]], minor=False)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("GB")
    axes.set_ylabel("GB/s")
    axes.legend(frameon=False)
    return figure


def growth(kept: Kept) -> Figure:
    """Every series with its fitted line."""
    columns = 3
    rows = -(-len(kept) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(9.6, 2.6 * rows), squeeze=False)
    for axes in grid.flat[len(kept) :]:
        axes.set_visible(False)
    for axes, series in zip(grid.flat, kept.values(), strict=False):
        xs, ys = [x for x, _ in series["points"]], [y for _, y in series["points"]]
        axes.plot(xs, ys, "." if len(xs) > 20 else "o", color=_OURS)
        line = _line(xs, ys)
        axes.plot([xs[0], xs[-1]], [line(xs[0]), line(xs[-1])], color=_INK, linewidth=0.8)
        axes.set_ylim(bottom=0)
        axes.set_title(f"{series['title']}\n{series['slope']:.3g} {series['per']}", fontsize=8)
        axes.set_xlabel(series["x"])
        axes.set_ylabel(series["y"])
    return figure


_SPAN_COLORS: Final = {
    "step of the training": "#d9d9e3", "stage": _OURS, "write": _THEIRS, "digest": "#e09f3e", "guard": _LIMIT,
    "finish": "#5a189a", "commit": "#9d4edd",
}  # fmt: skip


def spans(kept: Kept) -> Figure:
    """The activity of each thread from the call of save."""
    every = [(thread, at) for row in kept.values() for thread, at, _ in row["spans"]]
    first: dict[str, float] = {}
    for thread, at in every:
        first[thread] = min(at, first.get(thread, at))
    threads = sorted(first, key=lambda thread: (thread != "MainThread", first[thread]))
    figure, axes = plt.subplots(figsize=(9.6, 0.24 * len(threads) + 1.2))
    for row in kept.values():
        color = _SPAN_COLORS.get(row["title"])
        if color is None:  # too short for this scale
            continue
        for number, (thread, at, length) in enumerate(row["spans"]):
            label = row["title"] if not number else None
            thick = 0.84 if row["title"] == "step of the training" else 0.6
            axes.barh(threads.index(thread), length, left=at, height=thick, color=color, label=label)
    axes.set_yticks(range(len(threads)), [thread.removeprefix("async_ckpt-") for thread in threads])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds from the call of save")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _line(xs: list[float], ys: list[float]) -> Callable[[float], float]:
    slope, begin = linear_regression(xs, ys)
    return lambda x: begin + slope * x


_PICTURES: Final[dict[str, tuple[str, Callable[[Kept], Figure | None]]]] = {
    "lost": ("candidates", lost),
    "timeline": ("candidates", timeline),
    "throughput": ("growth", throughput),
    "growth": ("growth", growth),
    "spans": ("spans", spans),
}
