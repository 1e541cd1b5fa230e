"""Goodput: how a run has spent its time. Training counts as such unless it was done again.

In: the events of a run. Out: seconds by use, for each start and in total. Knows nothing of: storage.

A start lasts from the moment when its process opened the run until its last event. The events that name a step divide
this time into stretches. A stall belongs to the stretch after the call of its save; the seconds of slower steps are in
the event after those steps. A restore takes the training back: stretches above its step are done again, no matter which
start trained them. If a process never closed the run, the stretch after its last step is lost as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

# Events whose step is one that the training had reached.
_REACHED: Final = frozenset({"save", "failed", "skipped", "progress"})
PARTS: Final = ("trained", "stall", "slower", "restore", "redone")


class Goodput(NamedTuple):
    """How a run, or one of its starts, has spent its time. For a single start, `starts` is empty.

        print(async_ckpt.history("runs/a").goodput())  # 97.1 % of 3.2 h trained, 0.4 % stall, …

    `trained_seconds` is training that was not done again. All other time is lost: `stall_seconds` while saves held the
    training, `slower_seconds` in steps that were slower during a save, `restore_seconds`, and `redone_seconds` in steps
    that were done again. `opened` is the time at which the start began, in seconds since the epoch. `has_failed` is
    True if work was lost at its end.
    """

    trained_seconds: float = 0.0
    stall_seconds: float = 0.0
    slower_seconds: float = 0.0
    restore_seconds: float = 0.0
    redone_seconds: float = 0.0
    opened: float | None = None
    has_failed: bool = False
    starts: tuple[Goodput, ...] = ()

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def shares(self) -> dict[str, float]:
        """The share of each part in the total time, from 0 to 1; NaN if no time has passed."""
        total = self.total_seconds
        return {part: seconds / total if total else math.nan for part, seconds in self.seconds.items()}

    @property
    def num_failed(self) -> int:
        """The number of starts at whose end work was lost."""
        return sum(start.has_failed for start in self.starts)

    def as_dict(self, prefix: str = "") -> dict[str, float]:
        """The seconds and shares as numbers for a logger, with the same keys on every call."""
        row = {f"{part}_seconds": seconds for part, seconds in self.seconds.items()}
        row |= {f"{part}_share": share for part, share in self.shares.items()}
        return {prefix + key: value for key, value in row.items()}

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of each part."""
        return {part: getattr(self, f"{part}_seconds") for part in PARTS}

    def __str__(self) -> str:
        if not self.total_seconds:
            return "no time is known"
        shares = ", ".join(f"{share:.1%} {part}" for part, share in self.shares.items())
        return f"{shares}, of {self.total_seconds:,.0f} s"


@dataclass(slots=True)
class _Trained:
    """A stretch of training up to a step; the step is infinite if the stretch ended without a save."""

    step: float
    seconds: float
    start: _StartSpent


@dataclass(slots=True)
class _StartSpent:
    opened: float
    events: list[Mapping[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    has_failed: bool = False

    @property
    def is_closed(self) -> bool:
        return str(self.events[-1]["kind"]) == "closed"


def goodput_of(events: Sequence[Mapping[str, Any]]) -> Goodput:
    """How a run has spent its time, according to its events."""
    starts = _starts_of(events)
    trained: list[_Trained] = []
    for number, start in enumerate(starts):
        _account(start, trained)
        if not start.is_closed and number + 1 < len(starts):
            start.has_failed = True
            _go_back(trained, math.inf, starts[number + 1])
    made = tuple(_made(start.seconds, opened=start.opened, has_failed=start.has_failed) for start in starts)
    sums = {part: sum(start.seconds[part] for start in starts) for part in PARTS}
    return _made(sums, opened=starts[0].opened if starts else None, starts=made)


def _made(seconds: Mapping[str, float], **facts: Any) -> Goodput:
    named: dict[str, Any] = {f"{part}_seconds": value for part, value in seconds.items()}
    return Goodput(**named, **facts)


def _starts_of(events: Sequence[Mapping[str, Any]]) -> list[_StartSpent]:
    """The starts with their events. In old logs without `opened`, each closing of the run ends a start."""
    starts: list[_StartSpent] = []
    for one in events:
        opened = one.get("opened")
        is_new = not starts or (starts[-1].is_closed if opened is None else starts[-1].opened != opened)
        if is_new:
            starts.append(_StartSpent(_reached_at(one) if opened is None else opened))
        starts[-1].events.append(one)
    return starts


def _account(start: _StartSpent, trained: list[_Trained]) -> None:
    """Account for the time of one start. `trained` are the stretches that count so far; it is updated."""
    at, held = start.opened, 0.0  # the end of the last stretch, and the seconds since then that were not training

    def stretch(step: float, until: float) -> None:
        nonlocal at, held
        stretch = _Trained(step, max(0.0, until - at - held), start)
        start.seconds["trained"] += stretch.seconds
        if not math.isnan(step):
            trained.append(stretch)
        at, held = max(at, until), 0.0

    for event in sorted(start.events, key=_reached_at):
        kind, until = event["kind"], _reached_at(event)
        for part in ("slower", "stall"):
            start.seconds[part] += event.get(f"{part}_seconds") or 0.0
        held += event.get("slower_seconds") or 0.0
        if kind in _REACHED and event["step"] is not None:
            stretch(event["step"], until)
            held += event.get("stall_seconds") or 0.0
        elif kind == "restore":
            seconds = event["total_seconds"] or 0.0
            start.seconds["restore"] += seconds
            has_trained = trained and trained[-1].start is start
            stretch(math.inf if has_trained else math.nan, until - seconds)  # setup, if this is its first restore
            _go_back(trained, event["step"], start)
            at = max(at, until)
    stretch(trained[-1].step if start.is_closed and trained else math.inf, max(event["time"] for event in start.events))


def _go_back(trained: list[_Trained], step: float, start: _StartSpent) -> None:
    """The training of `start` continues from a step: stretches above that step are lost, and count as done again."""
    while trained and (trained[-1].step > step or trained[-1].step == math.inf):
        lost = trained.pop()
        lost.start.seconds["trained"] -= lost.seconds
        lost.start.seconds["redone"] += lost.seconds
        lost.start.has_failed |= lost.start is not start


def _reached_at(event: Mapping[str, Any]) -> float:
    """The time at which the training had reached the step of an event. The event of a save has the time of its end."""
    begun_before = event.get("total_seconds") if event["kind"] in ("save", "failed") else None
    return float(event["time"]) - (begun_before or 0.0)
