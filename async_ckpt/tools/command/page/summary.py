"""The facts of a run at the top of its page.

In: columns, and the current time. Out: names and values, as texts. Knows nothing of: pictures, HTML.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, Final

from ....plumbing import events as run_events
from ....plumbing import reports, spec
from ..output import age, shown_rate, shown_seconds
from .columns import RunColumns

_SHOWN: Final = 3


def facts_of(run: RunColumns, now: float) -> dict[str, str]:
    """The facts by name. All runs have the same names."""
    saves = [run.events[row] for row in run.saves]
    durable = [save for save in saves if save["kept"]]
    newest = max(
        (save for save in durable if _is_durable(run, save["step"])), key=lambda save: save["step"], default=None
    )
    spent = run_events.goodput_of(run.events)
    intervals = [event["interval"] for event in run.events if event.get("interval")]
    stalls = [value for _, value in run.known("stall_seconds")]
    return {
        "last durable step": "none" if newest is None else f"{newest['step']:,}",
        "age of that step": "" if newest is None else age(newest["time"], now),
        "saves": f"{len(saves):,}",
        "kept": f"{len(durable):,}",
        "broken": _steps(sorted(run.broken)),
        "marked bad": _steps([run.events[row]["step"] for row in run.saves if run.is_bad(row)]),
        "on storage": reports.sized(sum(save["num_bytes"] or 0 for save in durable)),
        "median stall": _median(run, "stall_seconds", shown_seconds),
        "all stalls": shown_seconds(sum(stalls)) if stalls else "unknown",
        "median bandwidth": _median(run, "bandwidth", shown_rate),
        "failed": f"{len(run.rows_of('failed')):,}",
        "skipped": f"{run.num_skipped:,}",
        "trained": f"{spent.shares['trained']:.1%}" if spent.total_seconds else "unknown",
        "interval": intervals[-1].partition(":")[0] if intervals else "not measured",
    }


def _is_durable(run: RunColumns, step: int) -> bool:
    """Whether a step is at a place that outlives a reboot, as far as known."""
    return not run.places or any(step in one.steps and one.outlives != "process" for one in run.places)


def _steps(steps: Sequence[int]) -> str:
    """Steps in few words, such as "3: steps 1, 2 and 5"."""
    if not steps:
        return "none"
    return f"{len(steps):,}: {'step' if len(steps) == 1 else 'steps'} {spec.some_of(steps, _SHOWN)}"


def _median(run: RunColumns, column: str, shown: Any) -> str:
    values = [value for _, value in run.known(column)]
    return shown(median(values)) if values else "unknown"
