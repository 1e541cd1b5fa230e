"""The demo as one picture: whole runs on one time axis, one save magnified, and the losses.

In: traces. Out: a PNG. Knows nothing of: how they were made.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from examples.trace import Save, Trace

STEP, STALL, WRITE, INK, FAINT = "#7d9cc4", "#d1343a", "#2a9d5c", "#222222", "#9a9a9a"
LANE: Final = 0.26  # of a row, which holds three: steps, stalls, writes


def draw(path: Path, ways: Sequence[Trace], *, whole: Trace, killed: Trace, resumed: Trace) -> None:
    """`ways` are uninterrupted runs that saved, ours first; the other three tell the story of the kill."""
    figure = Figure(figsize=(13, 8.4), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(1.2, 1), width_ratios=(1.2, 1))
    _whole_runs(figure.add_subplot(grid[0, :]), ways)
    _one_save(figure.add_subplot(grid[1, 0]), ways[:2])
    _losses(figure.add_subplot(grid[1, 1]), whole, killed, resumed)
    figure.legend(
        handles=[
            Patch(color=STEP, label="training steps"),
            Patch(color=STALL, label="stall: training is held up"),
            Patch(color=WRITE, label="write: from the call until durable"),
        ],
        loc="outside upper center",
        ncols=3,
        frameon=False,
        fontsize=11,
    )
    figure.savefig(path, dpi=130)


def _whole_runs(axes: Axes, ways: Sequence[Trace]) -> None:
    some = ways[0]
    _dress(axes, f"The same {len(some.steps)} steps and {len(some.saves)} saves, on one time axis")
    _name_rows(axes, ways)
    for row, trace in enumerate(ways):
        _lanes(axes, row, trace, edge=1.2)
        axes.text(
            trace.end,
            row,
            f"  {trace.end:.1f} s, of which\n  stalled {brief(trace.stall_seconds)}",
            va="center",
        )
    axes.set_xlim(-0.1, 1.12 * max(trace.end for trace in ways))
    axes.set_xlabel("seconds")


def _one_save(axes: Axes, ways: Sequence[Trace]) -> None:
    _dress(axes, "One save, magnified")
    _name_rows(axes, ways)
    saves = [typical(trace) for trace in ways]
    for row, (trace, save) in enumerate(zip(ways, saves, strict=True)):
        _lanes(axes, row, trace, zero=save.begin)
        axes.text(save.stall_seconds, row, f"  stall {brief(save.stall_seconds)}", va="center", color=STALL)
        axes.text(
            save.total_seconds,
            row + LANE,
            f"  durable after {brief(save.total_seconds)}",
            va="center",
            color=WRITE,
        )
    longest = max(save.total_seconds for save in saves)
    axes.set_xlim(-0.4 * longest, 1.8 * longest)
    axes.set_xlabel("seconds since the save was asked for")


def _losses(axes: Axes, whole: Trace, killed: Trace, resumed: Trace) -> None:
    _dress(axes, "Killed, resumed, and the same to the last bit")
    axes.plot(list(whole.losses), _floats(whole), color=FAINT, lw=5, alpha=0.45)
    axes.plot(list(killed.losses), _floats(killed), color=INK, lw=1.2)
    axes.plot(list(resumed.losses), _floats(resumed), "o", color=STALL, ms=2.6)
    low, top = min(_floats(whole)), max(_floats(whole))
    if killed.killed_in is not None:
        axes.axvline(killed.killed_in, color=STALL, lw=1, ls=":")
        axes.text(killed.killed_in, top, f"  SIGKILL while\n  step {killed.killed_in} was being saved", va="top")
    axes.axvline(resumed.first_step, color=FAINT, lw=1, ls=":")
    axes.text(resumed.first_step, low, f"resumed from step {resumed.first_step}  ", va="bottom", ha="right")
    axes.legend(
        handles=[
            Line2D([], [], color=FAINT, lw=5, alpha=0.45, label="never interrupted, never saved"),
            Line2D([], [], color=INK, lw=1.2, label="until the kill"),
            Line2D([], [], color=STALL, marker="o", ms=3, lw=0, label="after resuming"),
        ],
        loc="upper right",
        bbox_to_anchor=(1.02, 0.84),
        handlelength=1.2,
        frameon=False,
        fontsize=9,
    )
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per byte")


def typical(trace: Trace) -> Save:
    """The save of median length. The first one also takes and touches its memory, so it is left out."""
    saves = sorted(trace.saves[1:] or trace.saves, key=lambda save: save.total_seconds)
    return saves[len(saves) // 2]


def brief(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _lanes(axes: Axes, row: int, trace: Trace, *, zero: float = 0.0, edge: float = 0.0) -> None:
    """`edge` widens what would be thinner than a pixel; on a magnified axis nothing needs it."""
    steps = [(begin - zero, end - begin) for begin, end in trace.steps]
    stalls = [(save.begin - zero, save.stall_seconds) for save in trace.saves]
    writes = [(save.begin - zero, save.total_seconds) for save in trace.saves]
    axes.broken_barh(steps, (row - 1.5 * LANE, LANE * 0.9), facecolor=STEP, edgecolor="white", lw=0.4)
    axes.broken_barh(stalls, (row - 0.5 * LANE, LANE * 0.9), facecolor=STALL, edgecolor=STALL, lw=edge)
    axes.broken_barh(writes, (row + 0.5 * LANE, LANE * 0.9), facecolor=WRITE, edgecolor=WRITE, lw=edge)


def _name_rows(axes: Axes, ways: Sequence[Trace]) -> None:
    axes.set_yticks(range(len(ways)), [trace.way for trace in ways], fontsize=11)
    axes.set_ylim(len(ways) - 0.4, -0.6)  # the first on top
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e6e6e6")


def _dress(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontweight="bold", fontsize=12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)


def _floats(trace: Trace) -> list[float]:
    return [float.fromhex(loss) for loss in trace.losses.values()]
