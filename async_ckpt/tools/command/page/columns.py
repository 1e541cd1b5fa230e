"""The events of a run as columns of equal length, from which pictures are drawn.

In: the events of a history. Out: columns with a title, a unit, and a value for each event. Knows nothing of: pictures.

Values are texts, None, and numbers that JavaScript can represent. Times are in whole milliseconds. Measured numbers are
rounded to four digits, and numbers of records to five. A picture shows fewer digits, and rounding halves the page.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final, Literal, TypeAlias

from ....plumbing import events as run_events
from ....plumbing import spec
from ..output import counted, mark_in_words, shown_seconds
from ..run_places import PlaceStatus

Unit: TypeAlias = Literal["text", "number", "count", "step", "time", "seconds", "bytes", "rate"]
Value: TypeAlias = float | int | str | None

# How many entries of records are shown: numbers first, then those that most saves have.
MAX_ENTRIES: Final = 12
# How many groups, the largest ones, have their own column. The others are added up.
MAX_GROUPS: Final = 7
OTHER_GROUPS: Final = "all others"
_TEXT_CHARACTERS: Final = 120
_MEASURED_DIGITS: Final = 4
_ENTRY_DIGITS: Final = 5
# JavaScript cannot represent all larger integers.
_MOST: Final = 2**53
# The year 2100. A later time cannot be from a correct clock.
_LATEST: Final = 4.1e9
_MEASURED: Final[Mapping[str, tuple[str, Unit]]] = {
    "stall_seconds": ("stall", "seconds"),
    "call_seconds": ("call", "seconds"),
    "stage_seconds": ("staging", "seconds"),
    "write_seconds": ("writing", "seconds"),
    "commit_seconds": ("commit", "seconds"),
    "total_seconds": ("from call to commit", "seconds"),
    "slower_seconds": ("slower steps", "seconds"),
    "num_bytes": ("size", "bytes"),
    "free_bytes": ("free", "bytes"),
    "retries": ("retries", "count"),
    "world_size": ("ranks", "count"),
    "slowest_rank": ("slowest rank", "count"),
    "slowest_rank_seconds": ("its archive durable after", "seconds"),
    "median_rank_seconds": ("the median rank's archive durable after", "seconds"),
    "most_stalled_rank": ("most stalled rank", "count"),
    "most_stalled_rank_seconds": ("its stall", "seconds"),
    "median_rank_stall_seconds": ("stall of the median rank", "seconds"),
}


@dataclass(frozen=True, slots=True)
class Column:
    """A value for each event of a run; None where an event has none."""

    title: str
    unit: Unit
    values: Sequence[Value]


@dataclass(frozen=True, slots=True)
class RunColumns:
    """The events of one run as columns by name.

    `groups` and `entries` name the columns of groups and of entries of records. `saves` are the row numbers of the
    committed saves, in the order of time. `broken` maps kept steps that cannot be loaded to their damage, as far as
    they were checked. `marks` maps steps to their marks, in words. `places` are the places of a run with several.
    """

    name: str
    events: Sequence[Mapping[str, Any]]
    columns: Mapping[str, Column]
    groups: Sequence[str]
    entries: Sequence[str]
    saves: Sequence[int]
    broken: Mapping[int, str] = field(default_factory=dict)
    places: Sequence[PlaceStatus] = ()
    marks: Mapping[int, str] = field(default_factory=dict)

    def is_bad(self, row: int) -> bool:
        """Whether a save is kept, and its step is now marked as bad."""
        event = self.events[row]
        return event["kept"] and self.marks.get(event["step"], "").partition(":")[0] == "bad"

    def rows_of(self, *kinds: str) -> tuple[int, ...]:
        """The numbers of the rows that are events of these kinds."""
        return tuple(row for row, event in enumerate(self.events) if event["kind"] in kinds)

    @property
    def num_skipped(self) -> int:
        """The number of skipped saves. One event may count several."""
        return sum(self.events[row]["count"] for row in self.rows_of("skipped"))

    def known(self, name: str) -> list[tuple[int, Any]]:
        """The rows of saves that have a value in a column, as pairs (row, value)."""
        values = self.columns[name].values
        return [(row, values[row]) for row in self.saves if values[row] is not None]


def columns_of(
    name: str,
    events: Sequence[Mapping[str, Any]],
    broken: Mapping[int, str] | None = None,
    places: Sequence[PlaceStatus] = (),
    marks: Mapping[int, str] | None = None,
) -> RunColumns:
    """The columns of a run's events."""
    broken, marks = broken or {}, marks or {}
    # Pictures are drawn over steps, and a checkpoint of Fabric may have no step.
    events = [one for one in events if one["kind"] != "save" or one["step"] is not None]
    times = [one["time"] for one in events]
    columns = {
        "kind": Column("what", "text", [_KINDS.get(one["kind"], one["kind"]) for one in events]),
        "step": Column("step", "step", [_rounded(one["step"]) for one in events]),
        "time": Column("when", "time", [round(when * 1e3) if 0 < when < _LATEST else None for when in times]),
        "about": Column("details", "text", [_shortened(about(one)) for one in events]),
        "fate": Column("now", "text", [_fate(one, broken, marks) for one in events]),
        "borrowed": Column("borrowed", "text", [_borrowed(one) for one in events]),
        "unchanged": Column("unchanged", "text", [_shortened(", ".join(one.get("unchanged", ()))) for one in events]),
        "bandwidth": Column(
            "bandwidth",
            "rate",
            [_rounded(run_events.bandwidth_of(one) if one["kind"] == "save" else None) for one in events],
        ),
        "archived": Column("archives written after", "seconds", [_rounded(_written_after(one)) for one in events]),
        "stored": Column("on storage", "bytes", stored_bytes(events)),
        "written": Column("written so far", "bytes", [*accumulate(one.get("num_bytes") or 0 for one in events)]),
    }
    for key, (title, unit) in _MEASURED.items():
        columns[key] = Column(title, unit, [_rounded(one.get(key)) for one in events])
    groups, entries = _group_columns(events), _entry_columns(events)
    saves = [row for row, one in enumerate(events) if one["kind"] == "save"]
    return RunColumns(name, events, columns | groups | entries, [*groups], [*entries], saves, broken, places, marks)


def about(event: Mapping[str, Any]) -> str:
    """The details of an event that is not a committed save, in words."""
    match event["kind"]:
        case "failed":
            return f"{event['error']}: {event['message']}"
        case "skipped":
            first = event["first_step"]
            since = "" if first in (None, event["step"]) else f", from step {first:,}"
            return f"{counted(event['count'], 'save')} skipped{since}, since an earlier one was under way"
        case "restore":
            parts = [
                f"{name} {shown_seconds(event[f'{name}_seconds'])}" for name in _RESTORED if event[f"{name}_seconds"]
            ]
            return ", ".join(["a newer step was committed" if event["behind"] else "from the newest step", *parts])
        case "rollback":
            return f"retired {listed(event['retired'])}"
        case "retention":
            return f"deleted {listed(event['deleted'])}"
        case "moved":
            return f"to {event['place']}"
        case "mark":
            return mark_in_words(event["mark"], event["note"])
    return ""


def stored_bytes(events: Sequence[Mapping[str, Any]]) -> list[Value]:
    """The bytes of all steps that existed after each event, as far as the events tell.

    A step whose deletion is not among the events counts until the last event.
    """
    live: dict[int, int] = {}
    total, totals = 0, []
    for event in events:
        gone = event.get("deleted", ()) if event["kind"] == "retention" else event.get("retired", ())
        if event["kind"] == "save":
            gone = [event["step"]]
        total -= sum(live.pop(step, 0) for step in gone)
        if event["kind"] == "save":
            live[event["step"]] = event["num_bytes"] or 0
            total += live[event["step"]]
        totals.append(total)
    if totals:
        totals[-1] = sum(event["num_bytes"] or 0 for event in events if event["kind"] == "save" and event["kept"])
    return [*totals]


_KINDS: Final[Mapping[str, str]] = {
    "save": "saved",
    "failed": "save failed",
    "skipped": "save skipped",
    "restore": "restored",
    "rollback": "rolled back",
    "retention": "deleted",
    "moved": "copied",
    "mark": "marked",
    "progress": "trained",
}
# The parts of a restore.
_RESTORED: Final = ("find", "plan", "read", "fill")


def _written_after(event: Mapping[str, Any]) -> float | None:
    """The seconds from the call of a save until all of its bytes were on storage, and the commit began."""
    total, commit = event.get("total_seconds"), event.get("commit_seconds")
    return None if total is None or commit is None else max(0.0, total - commit)


def _group_columns(events: Sequence[Mapping[str, Any]]) -> dict[str, Column]:
    """The bytes of each group that a save wrote. The smaller groups share one column."""
    largest: dict[str, int] = {}
    for event in events:
        for group, num_bytes in event.get("groups", {}).items():
            largest[group] = max(largest.get(group, 0), num_bytes)
    own = sorted(largest, key=lambda group: -largest[group])[:MAX_GROUPS]
    columns = {
        f"group {number}": Column(
            _shortened(group),
            "bytes",
            [event["groups"].get(group, 0) if event.get("groups") else None for event in events],
        )
        for number, group in enumerate(own)
    }
    if len(largest) > len(own):
        rest = [
            sum(size for group, size in event["groups"].items() if group not in own) if event.get("groups") else None
            for event in events
        ]
        columns[f"group {len(own)}"] = Column(OTHER_GROUPS, "bytes", rest)
    return columns


def _entry_columns(events: Sequence[Mapping[str, Any]]) -> dict[str, Column]:
    """The entries of the records: numbers first, then those that most saves have."""
    counts: Counter[str] = Counter()
    numeric: Counter[str] = Counter()
    for event in events:
        for key, value in event.get("record", {}).items():
            counts[key] += 1
            numeric[key] += _rounded(value) is not None
    keys = sorted(counts, key=lambda key: (-bool(numeric[key]), -counts[key]))[:MAX_ENTRIES]
    columns = {}
    for number, key in enumerate(keys):
        values = [event.get("record", {}).get(key) for event in events]
        if numeric[key]:
            columns[f"entry {number}"] = Column(
                _shortened(key), "number", [_rounded(value, _ENTRY_DIGITS) for value in values]
            )
        else:
            texts = (value if value is None or isinstance(value, str) else json.dumps(value) for value in values)
            columns[f"entry {number}"] = Column(_shortened(key), "text", [text and _shortened(text) for text in texts])
    return columns


def _fate(event: Mapping[str, Any], broken: Mapping[int, str], marks: Mapping[int, str]) -> str | None:
    if event["kind"] != "save":
        return None
    if event["kept"] and event["step"] in broken:
        return _shortened(f"broken: {broken[event['step']]}")
    return _shortened(", ".join(filter(None, ("kept", marks.get(event["step"]))))) if event["kept"] else "gone"


def _borrowed(event: Mapping[str, Any]) -> str:
    return _shortened(", ".join(f"{group} of step {step:,}" for group, step in event.get("borrowed", {}).items()))


def listed(steps: Sequence[int]) -> str:
    """Steps in few words, such as "steps 1, 2 and 98 more"."""
    return f"{'step' if len(steps) == 1 else 'steps'} {spec.some_of([f'{step:,}' for step in steps], 8)}"


def _rounded(value: Any, digits: int = _MEASURED_DIGITS) -> float | int | None:
    """A number with `digits` digits; None for anything else. Integers are not rounded."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, int):
        return value if abs(value) <= _MOST else None
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < _MOST else short


def _shortened(text: str) -> str:
    return text if len(text) <= _TEXT_CHARACTERS else f"{text[:_TEXT_CHARACTERS]}…"
