"""The kinds of events in the history of a run, and their text: one JSON object per line.

In: events, or untrusted lines. Out: lines; events with all fields of their kind.
Knows nothing of: storage, the clock.

Every event has a `kind`, the `time` at which it ended in seconds since the epoch, and a `step`:

    save         the step was committed; the fields are those of its report
    failed       a save began and was not committed
    skipped      saves were skipped because others were in progress: `count` in a row, up to `step`
    restore      live objects were filled from the step
    rollback     the commit of the step has retired the newer steps `retired`
    retention    after the commit of the step, the steps `deleted` were deleted
    mark         the step was marked "good" or "bad", or its mark was taken back ("none")
    progress     about once a minute: the training has reached the step
    closed       the process that saved there has closed the run

A reader ignores damaged lines and unknown kinds. A field that is missing or has the wrong type becomes None, or empty
if it is a collection: the log may be of another version.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

from ..fields import count, entries, items, number, table, text, whole
from ..report import bandwidth

Event: TypeAlias = dict[str, Any]
_Read: TypeAlias = Callable[[Any], Any]

# The limits of one value in a record, and of all its values together. The record of a save may have 64 KiB, and the log
# holds many.
_VALUE_BYTES: Final = 1 << 10
_RECORD_BYTES: Final = 4 << 10
# Only the sizes of this many groups of a save are kept, the largest.
_GROUPS: Final = 64
# Only this many of the steps that were deleted or retired at once are named.
_MOST_STEPS: Final = 1000
_MESSAGE_CHARACTERS: Final = 500


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r:.100} is neither true nor false")
    return value


def _seconds(value: object) -> float:
    return round(number(value), 5)  # more digits would be noise, which does not compress


def _time(value: object) -> float:
    return round(number(value), 3)


def _steps(value: object) -> list[int]:
    return list(items(value, whole))[:_MOST_STEPS]


def _names(value: object) -> list[str]:
    return list(items(value, text))


def _counts(value: object) -> dict[str, int]:
    return dict(entries(value, count))


def _places(value: object) -> list[dict[str, Any]]:
    return list(items(value, lambda one: _read_fields(table(one), _DESTINATION)))


_DESTINATION: Final[Mapping[str, tuple[_Read, Any]]] = {
    "path": (text, ""),
    "num_bytes": (count, None),
    "write_seconds": (_seconds, None),
    "retries": (count, None),
    "error": (text, None),
}
# The fields of each kind, with their types, and the values of unknown fields.
KINDS: Final[Mapping[str, Mapping[str, tuple[_Read, Any]]]] = {
    "save": {
        "attempt": (text, ""),
        "name": (text, ""),  # the name of a framework's checkpoint
        "num_bytes": (count, None),
        "num_tensors": (count, None),
        "stall_seconds": (_seconds, None),
        "call_seconds": (_seconds, None),
        "stage_seconds": (_seconds, None),
        "write_seconds": (_seconds, None),
        "commit_seconds": (_seconds, None),
        "total_seconds": (_seconds, None),
        "retries": (count, None),
        "free_bytes": (count, None),
        "groups": (_counts, {}),
        "unchanged": (_names, []),
        "borrowed": (_counts, {}),
        "record": (table, {}),
        "destinations": (_places, []),
        "slower_seconds": (_seconds, None),
        "interval": (text, ""),
        "world_size": (count, 1),
        "slowest_rank": (count, None),
        "slowest_rank_seconds": (_seconds, None),
        "median_rank_seconds": (_seconds, None),
        "most_stalled_rank": (count, None),
        "most_stalled_rank_seconds": (_seconds, None),
        "median_rank_stall_seconds": (_seconds, None),
    },
    "failed": {"error": (text, ""), "message": (text, ""), "total_seconds": (_seconds, None)},
    "skipped": {"first_step": (whole, None), "count": (count, 1)},
    "restore": {
        "total_seconds": (_seconds, None),
        "behind": (_flag, False),
        **{f"{phase}_seconds": (_seconds, None) for phase in ("find", "plan", "read", "fill")},
    },
    "rollback": {"retired": (_steps, [])},
    "retention": {"deleted": (_steps, [])},
    "mark": {"mark": (text, ""), "note": (text, "")},
    "moved": {"place": (text, ""), "total_seconds": (_seconds, None)},
    "progress": {"slower_seconds": (_seconds, None), "interval": (text, "")},
    "closed": {},
}
# After its step, every event has the time at which its process opened the run, which distinguishes the starts.
_OPENED: Final = {"opened": (_time, None)}


# The fields of a save that are copied from its report.
MEASURED: Final = (
    "num_bytes",
    "num_tensors",
    "stall_seconds",
    "stage_seconds",
    "write_seconds",
    "commit_seconds",
    "total_seconds",
    "retries",
)


def event(kind: str, time: float, step: int | None, **facts: Any) -> Event:
    """An event of this kind, with all of its fields."""
    return {"kind": kind, "time": _time(time), "step": step, **_read_fields(facts, {**_OPENED, **KINDS[kind]})}


def dump(events: Iterable[Event]) -> list[bytes]:
    """The lines of events. Consecutive skipped saves are joined into one event."""
    joined: list[Event] = []
    for one in events:
        if one["kind"] == "skipped" and joined and joined[-1]["kind"] == "skipped":
            before = joined.pop()
            one = {**one, "first_step": before["first_step"], "count": before["count"] + one["count"]}
        joined.append(one)
    return [json.dumps(_without_unknown(one), separators=(",", ":")).encode() + b"\n" for one in joined]


def parse(data: bytes) -> list[Event]:
    """The events in these lines, without duplicates."""
    return [one for line in dict.fromkeys(data.splitlines()) if (one := _event_of(line)) is not None]


def bandwidth_of(save: Mapping[str, Any]) -> float | None:
    """Bytes per second of a save, from its call until it was committed; None if unknown."""
    return bandwidth(save["num_bytes"], save["total_seconds"])


def brief(record: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a save's record that are short enough for the log."""
    kept: dict[str, Any] = {}
    left = _RECORD_BYTES
    for name, value in record.items():
        num_bytes = len(name) + len(json.dumps(value))
        if num_bytes <= min(_VALUE_BYTES, left):
            kept[name], left = value, left - num_bytes
    return kept


def largest(groups: Mapping[str, int]) -> dict[str, int]:
    """The sizes of the largest groups, in their original order."""
    chosen = {*sorted(groups, key=lambda name: -groups[name])[:_GROUPS]}
    return {name: num_bytes for name, num_bytes in groups.items() if name in chosen}


def shortened(message: str) -> str:
    """The beginning of an error's message."""
    return message[:_MESSAGE_CHARACTERS].encode(errors="replace").decode()


def _event_of(line: bytes) -> Event | None:
    try:
        fields = table(json.loads(line, parse_constant=lambda _: None))
        step = None if fields.get("step") is None else whole(fields["step"])
        return event(text(fields["kind"]), number(fields["time"]), step, **_others(fields))
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None


def _others(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in ("kind", "time", "step")}


def _read_fields(facts: Mapping[str, Any], types: Mapping[str, tuple[_Read, Any]]) -> dict[str, Any]:
    fields = {}
    for name, (read, unknown) in types.items():
        try:
            fields[name] = read(facts[name])
        except (ValueError, KeyError, TypeError, OverflowError):
            fields[name] = unknown.copy() if isinstance(unknown, dict | list) else unknown
    return fields


def _without_unknown(one: Event) -> Event:
    """The event without fields of unknown value, which keeps its line short."""
    unknown = {name: nothing for name, (_, nothing) in {**_OPENED, **KINDS[one["kind"]]}.items()}
    return {name: value for name, value in one.items() if name not in unknown or value != unknown[name]}
