"""The README's results: comparisons of several runs on any machines, so that no figure rests on one run.

In: stored results of the comparison. Out: results/runs/comparison.json, and the README's table with the range of its
ratios. Knows nothing of: how anything was measured.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from .table import NOISE_SECONDS

Run = Mapping[str, Any]

# This library, the fastest of each other kind, and widely used ways.
_SHOWN: Final = (
    "ours_guarded", "dcp_async_cached", "torch_checkpointing", "safetensors", "torch_save", "tar", "gzip",
)  # fmt: skip
_BESIDE: Final = "torch_checkpointing"
_GB: Final = 1e9
# The most runs that are kept. A further run replaces the oldest.
_MOST_RUNS: Final = 12
_WIDTH: Final = 124


def add_run(path: Path, kept: Run) -> list[Run]:
    """Store the medians of this comparison after those of earlier runs. Returns all of them, the oldest first."""
    runs = [*(json.loads(path.read_text(encoding="utf-8")) if path.exists() else []), summary(kept)][-_MOST_RUNS:]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(runs, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return runs


def summary(kept: Run) -> Run:
    """The machine, and for each saved state its size, and the seconds of each candidate."""
    states = {
        "linear": kept["candidates"],
        **{name: row["candidates"] for name, row in kept.get("workloads", {}).items()},
    }
    return {"environment": kept["environment"], "states": {name: _state(told) for name, told in states.items()}}


def _state(candidates: Mapping[str, Any]) -> dict[str, Any]:
    measured = {name: told for name, told in candidates.items() if "medians" in told}
    limit = measured.get("limit")
    seconds = {
        name: {"title": told["title"], **{value: told["medians"][value] for value in ("lost", "durable")}}
        for name, told in measured.items()
    }
    return {
        "num_bytes": max(result["num_bytes"] for told in measured.values() for result in told["results"]),
        "disk_bandwidth": limit["medians"]["bandwidth"] if limit else None,
        "lost_ratio": _lost_ratio(measured),
        "candidates": seconds,
    }


def _lost_ratio(measured: Mapping[str, Any]) -> float | None:
    """The median of the ratios of the medians of each round, as in the comparison's own table."""
    if _BESIDE not in measured:
        return None
    ours, theirs = (
        [max(median(save["lost"] for save in result["later"]), NOISE_SECONDS) for result in measured[name]["results"]]
        for name in ("ours_guarded", _BESIDE)
    )
    return float(median(own / other for own, other in zip(ours, theirs, strict=False)))


def headline(runs: Sequence[Run]) -> str:
    """The Markdown of a table with the medians of all runs, and of a sentence on the median and range of the ratios."""
    states = list(dict.fromkeys(name for run in runs for name in run["states"]))
    of_state = {name: [run["states"][name] for run in runs if name in run["states"]] for name in states}
    head = [
        "save",
        *(f"{_gigabytes(of_state[name])}: {what}, s" for name in states for what in ("training lost", "durable")),
    ]
    lines = [head, ["---"] * len(head)]
    for candidate in _SHOWN:
        cells = [cell for name in states for cell in _cells(of_state[name], candidate)]
        lines.append([_title(of_state, candidate), *cells])
    ranges = ", ".join(_range(of_state[name]) for name in states)
    table = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    text = (
        f"{_where(runs)} Training lost to a guarded save, as a ratio to {_BESIDE} in the same run: {ranges}. "
        "Less than 5 ms counts as 5 ms."
    )
    return f"{table}\n{textwrap.fill(text, _WIDTH)}\n"


def _gigabytes(states: Sequence[Run]) -> str:
    return f"{states[-1]['num_bytes'] / _GB:.1f} GB"


def _title(of_state: Mapping[str, Sequence[Run]], candidate: str) -> str:
    return next(
        str(state["candidates"][candidate]["title"])
        for states in of_state.values()
        for state in states
        if candidate in state["candidates"]
    )


def _cells(states: Sequence[Run], candidate: str) -> list[str]:
    found = [state["candidates"][candidate] for state in states if candidate in state["candidates"]]
    if not found:
        return ["-", "-"]
    lost, durable = (median(one[value] for one in found) for value in ("lost", "durable"))
    return [f"{lost:.3f}" if lost > NOISE_SECONDS else f"≤ {NOISE_SECONDS:g}", f"{durable:.2f}"]


def _where(runs: Sequence[Run]) -> str:
    disks = [
        state["disk_bandwidth"] / _GB for run in runs for state in run["states"].values() if state["disk_bandwidth"]
    ]
    machines = sorted({run["environment"]["cpu"] for run in runs})
    dates = sorted(str(run["environment"]["date"])[:10] for run in runs)
    last = runs[-1]["environment"]
    return (
        f"Medians of {len(runs)} runs from {dates[0]} to {dates[-1]}, {last['cores']} cores of {' and '.join(machines)}, "
        f"no GPU, disks that write {min(disks):.1f} to {max(disks):.1f} GB/s, torch {last['torch']}."
    )


def _range(states: Sequence[Run]) -> str:
    """The median, the minimum and the maximum of the ratios of several runs."""
    ratios = [state["lost_ratio"] for state in states if state["lost_ratio"] is not None]
    counted = f"{min(ratios):.2g}-{max(ratios):.2g} in {len(ratios)} runs" if len(ratios) > 1 else "one run"
    return f"{median(ratios):.2g} ({_gigabytes(states)}, {counted})"
