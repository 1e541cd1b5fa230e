"""The metrics of all backends: their names, units and descriptions, and their values for an operation.

In: operations that have ended. Out: values for instruments. Knows nothing of: backends.

Names follow OpenTelemetry's rules, and units those of UCUM. A backend derives its own names from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

from .. import SaveReport
from ..plumbing import disk, operations

# Seconds: a stall should take a few milliseconds, and saving a large model to a slow store may take an hour.
_SHORT: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_LONG: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `attributes` has the names that distinguish its series; `buckets` the bounds of a histogram."""

    name: str
    kind: Literal["counter", "gauge", "histogram", "active"]
    unit: str
    description: str
    attributes: tuple[str, ...] = ("operation", "run")
    buckets: tuple[float, ...] = ()


OPERATIONS: Final = Metric(
    "async_ckpt.operations",
    "counter",
    "{operation}",
    "Operations that have ended, by their outcome: done, failed or skipped.",
    ("operation", "run", "outcome", "error_type"),
)
ACTIVE: Final = Metric("async_ckpt.active_operations", "active", "{operation}", "Operations that are under way.")
DURATION: Final = Metric(
    "async_ckpt.operation.duration",
    "histogram",
    "s",
    "Duration of a completed operation; for a save, from its call until the checkpoint is durable and committed.",
    buckets=_LONG,
)
PHASE: Final = Metric(
    "async_ckpt.phase.duration",
    "histogram",
    "s",
    "Duration of a part of a save: stage, write or commit, which overlap; or of a restore: find, plan, read or fill.",
    ("operation", "run", "phase"),
    buckets=_LONG,
)
STALL: Final = Metric(
    "async_ckpt.stall.duration", "histogram", "s", "Time for which a save stalled the training.", buckets=_SHORT
)
IO: Final = Metric(
    "async_ckpt.io", "counter", "By", "Bytes that saves of this process have written, and pulls have read."
)
RETRIES: Final = Metric("async_ckpt.retries", "counter", "{retry}", "Requests to storage that were sent again.")
RECOVERY_POINT: Final = Metric(
    "async_ckpt.recovery_point.timestamp",
    "gauge",
    "s",
    "Unix time after which work would be lost if the process died: the call of the newest save that is committed, or "
    "the end of a later restore.",
    ("run",),
)
RECOVERY_STEP: Final = Metric(
    "async_ckpt.recovery_point.step", "gauge", "{step}", "The step that was committed or restored last.", ("run",)
)
STEP_SIZE: Final = Metric(
    "async_ckpt.step.size",
    "gauge",
    "By",
    "Bytes that this process wrote for the step that was committed last.",
    ("run",),
)
FREE: Final = Metric(
    "async_ckpt.storage.free",
    "gauge",
    "By",
    "Free space at a root on a disk, looked at when a save has ended.",
    ("run", "root"),
)

TIME: Final = Metric(
    "async_ckpt.training.time",
    "gauge",
    "s",
    "Time of this process so far, by activity: trained, stall, slower, restore or redone.",
    ("run", "part"),
)

MARKS: Final = Metric(
    "async_ckpt.marks",
    "counter",
    "{mark}",
    "Marks that this process has put on steps: good, bad, or none for a removed mark.",
    ("run", "mark"),
)

METRICS: Final = (
    OPERATIONS, ACTIVE, DURATION, PHASE, STALL, IO, RETRIES, RECOVERY_POINT, RECOVERY_STEP, STEP_SIZE, FREE, TIME,
    MARKS,
)  # fmt: skip


class Measurement(NamedTuple):
    """A value for a metric: to be added to a counter or histogram, or the new value of a gauge."""

    metric: Metric
    value: float
    attributes: Mapping[str, str]


def measured(ended: operations.Ended) -> Iterator[Measurement]:
    """The values of one operation. May block while a disk reports its free space."""
    run = {"run": ended.run}
    if ended.kind == "train":
        yield from (Measurement(TIME, seconds, {**run, "part": part}) for part, seconds in ended.parts.items())
        return
    if ended.kind == "mark":
        yield from (Measurement(MARKS, count, {**run, "mark": mark}) for mark, count in ended.parts.items())
        return
    series = {"operation": ended.kind, **run}
    yield Measurement(OPERATIONS, 1, {**series, "outcome": ended.outcome, "error_type": ended.error_type})
    report = ended.report
    if ended.outcome == "done":
        yield Measurement(DURATION, ended.seconds, series)
        if report is not None:
            yield Measurement(IO, ended.num_bytes, series)
        if isinstance(report, SaveReport):
            yield Measurement(STALL, report.stall_seconds, series)
            yield Measurement(RETRIES, report.retries, series)
            for phase in ("stage", "write", "commit"):
                yield Measurement(PHASE, getattr(report, f"{phase}_seconds"), {**series, "phase": phase})
        if ended.kind == "restore":
            for one in ended.phases:
                yield Measurement(PHASE, one.end - one.begin, {**series, "phase": one.name})
        if ended.run and ended.kind in ("save", "restore"):
            yield Measurement(RECOVERY_POINT, ended.begin if ended.kind == "save" else ended.end, run)
            if ended.step is not None:
                yield Measurement(RECOVERY_STEP, ended.step, run)
            if report is not None:
                yield Measurement(STEP_SIZE, ended.num_bytes, run)
    if ended.kind in ("save", "publish"):
        for root in ended.roots:
            free = None if "://" in root else disk.free_bytes_at(Path(root))
            if free is not None:
                yield Measurement(FREE, free, {**run, "root": root})


class ActiveOperations:
    """The number of operations under way, for one backend. Used by any thread."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], None] = {}  # kinds and runs; only ever grows

    def measured(self) -> list[Measurement]:
        """A value for each kind and run of which an operation was ever under way, or has ended."""
        counts = dict.fromkeys(self._seen.copy(), 0)
        for operation in operations.under_way():
            self.note(operation.kind, operation.run)
            counts[operation.kind, operation.run] = counts.get((operation.kind, operation.run), 0) + 1
        return [Measurement(ACTIVE, n, {"operation": kind, "run": run}) for (kind, run), n in counts.items()]

    def note(self, kind: str, run: str) -> None:
        if kind not in ("train", "mark"):  # these have no duration
            self._seen[kind, run] = None
