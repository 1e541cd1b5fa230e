"""The history of a run: the events in its log, and committed steps that are missing from the log.

In: a place, or the roots of a run. Out: events, in the order in which they happened. Knows nothing of: tensors.

A step of an older version, or one that was copied here, has no event in the log; its event is made from its manifest.
Which steps are committed is always read from the run, never from the log.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from ..core.events.goodput import Goodput, goodput_of
from ..core.events.kinds import Event, bandwidth_of
from ..core.events.log import EventLog
from ..core.report import paragraph, sized, table
from ..core.runs.manifest import Manifest
from ..core.runs.root import formats_at
from ..core.runs.roots import Roots
from ..core.runs.run import Run
from ..core.runs.trackers import event_of
from ..core.storage.place import Anywhere, storage_at
from ..core.timing import shown_time, wall_time
from ..errors import StorageUnavailableError

_COLUMNS: Final = ("time", "kind", "step", "")
_SHOWN: Final = 20  # events in a notebook's table


class History(list[Event]):
    """The events of a run, in the order in which they happened: a list of flat mappings of plain values.

    pandas.DataFrame(async_ckpt.history("runs/a"))
    """

    def goodput(self) -> Goodput:
        """How the run spent its time: on training, stalls, slower steps, restores, and repeated steps.

        print(async_ckpt.history("runs/a").goodput().shares["trained"])
        """
        return goodput_of(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002
        printer.text("\n".join([_in_words(self), *("  ".join(row) for row in map(_row, self[-_SHOWN:]))]))

    def _repr_html_(self) -> str:
        saves = [one for one in self if one["kind"] == "save"]
        stalls = [one["stall_seconds"] for one in saves if one["stall_seconds"] is not None]
        bandwidths = [*filter(None, map(bandwidth_of, saves))]
        last = [f"last stall {_in_ms(stalls[-1])}"] if stalls else []
        last += [f"last bandwidth {sized(bandwidths[-1])}/s"] if bandwidths else []
        words = "; ".join([_in_words(self), *last])
        return f"{paragraph(words)}{table(_COLUMNS, map(_row, reversed(self[-_SHOWN:])))}"


def _in_words(events: Sequence[Event]) -> str:
    counts = Counter(one["kind"] for one in events)
    return ", ".join(f"{counts[kind]} {kind}" for kind in counts) or "no events"


def _in_ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _row(one: Event) -> tuple[str, ...]:
    """The row of an event: its time, kind, step, and the most important facts."""
    stall, error = one.get("stall_seconds"), one.get("error")
    facts = [
        "" if one.get("num_bytes") is None else sized(one["num_bytes"]),
        "" if stall is None else f"stall {_in_ms(stall)}",
        "" if one.get("total_seconds") is None else f"{one['total_seconds']:.2f} s",
        f"{error}: {one['message']}" if error else "",
        *(f"{name} {', '.join(map(str, one[name]))}" for name in ("deleted", "retired") if one.get(name)),
        *filter(None, (one.get("mark"), one.get("note"))),
        f"{one['count']} in a row" if one["kind"] == "skipped" else "",
    ]
    step = "" if one["step"] is None else str(one["step"])
    return shown_time(one["time"]), one["kind"], step, ", ".join(filter(None, facts))


def history(run: Anywhere) -> History:
    """The history of a run: its saves (failed and skipped ones, too), restores, rollbacks and deletions.

        for event in async_ckpt.history("runs/a"):
            print(event["kind"], event["step"], event.get("stall_seconds"))

    Each event is a mapping of plain values: its `kind`, the `time` at which it ended in seconds since the epoch, the
    `step`, and the fields of its kind, which `docs/history.md` lists. A value that is not known is None. For steps
    without an event, such as those of older versions, the event is made from the manifest. The log of a run is bounded:
    the oldest events are deleted. Changes nothing.

    Args:
        run: the root of a run; a path, a URL or a Place.

    Raises NotCommittedError if there is neither a committed step nor an event, and StorageUnavailableError.
    """
    storage = storage_at(run)
    events = EventLog(storage, wall_time).read()
    runs = [Run(storage, clock=wall_time, step_format=step_format, tracker=None) for step_format in formats_at(storage)]
    holder = {step: one for one in runs for step in one.steps()}

    def manifests(steps: Sequence[int]) -> dict[int, Manifest | None]:
        by_run = {one: [step for step in steps if holder[step] is one] for one in runs}
        return {step: made for one, own in by_run.items() for step, made in one.root.look_up(own).items()}

    found = _with_steps(events, holder, manifests)
    names_in = functools.cache(storage.names)
    for one in found:
        if one.get("name"):  # a framework's checkpoint, which exists while its name does
            folder, _, name = one["name"].rpartition("/")
            one["kept"] = name in names_in(folder)
    if not found:
        from ..core.loading.archives.find import nothing_committed  # it needs torch

        raise nothing_committed(storage)
    return found


def history_of(roots: Roots) -> History:
    """The history from the log of the first root that has one. Raises StorageUnavailableError if no root answers."""
    steps, events = roots.steps(), events_at(roots, EventLog.read)

    def manifests(steps: Sequence[int]) -> dict[int, Manifest | None]:
        commits = roots.view() if steps else {}
        return {step: commits.get(step) for step in steps}

    return _with_steps(events, steps, manifests)


def events_at(roots: Roots, read: Callable[[EventLog], list[Event]] = EventLog.read_with_noted) -> list[Event]:
    """The events of a run so far, by default with those of this process that are not written yet. Empty if no root
    answers.
    """
    events: list[Event] = []
    for run in roots.runs:
        with suppress(StorageUnavailableError):
            events = events or read(run.events)
    return events


def _with_steps(
    events: Sequence[Event],
    committed: Collection[int],
    manifests: Callable[[Sequence[int]], Mapping[int, Manifest | None]],
) -> History:
    """The events, with `kept` set for each save, and with events made from the manifests of steps without one."""
    newest = {one["step"]: one for one in events if one["kind"] == "save"}
    for one in events:
        if one["kind"] == "save":
            one["kept"] = one["step"] in committed and newest[one["step"]] is one
    missing = manifests(sorted({*committed} - newest.keys()))
    made = [event_of(manifest) for _, manifest in sorted(missing.items()) if manifest is not None]
    return History(_merged(events, [{**one, "kept": True} for one in made]))


def _merged(events: Sequence[Event], made: Sequence[Event]) -> Iterator[Event]:
    """The events, with each of `made` (ascending by step) inserted before the first save of a higher step."""
    at = 0
    for one in events:
        while one["kind"] == "save" and at < len(made) and made[at]["step"] < one["step"]:
            yield made[at]
            at += 1
        yield one
    yield from made[at:]
