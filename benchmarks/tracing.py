"""The time of one save: the trace that the library writes, and its spans by name.

In: a setting. Out: rows, and the trace itself, for Perfetto. Knows nothing of: how spans are made.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import Any, ClassVar, Final

from async_ckpt import AsyncCheckpointer

from .figures import one_thread
from .setting import KEPT, Setting
from .table import Row, shown
from .workloads import Training

# Steps before and after the save, so that the picture shows the usual training.
_OTHER_STEPS: Final = 2


@dataclass(frozen=True, slots=True)
class Span:
    """All spans of one name: (thread, begin, milliseconds). The call of save begins at 0."""

    title: str
    spans: Sequence[tuple[str, float, float]]

    GROUP: ClassVar = "spans"
    HEAD: ClassVar = [
        "span",
        "times",
        "threads",
        "in all, ms",
        "longest, ms",
        "first begins at, ms",
        "last ends at, ms",
    ]

    def as_dict(self) -> dict[str, Any]:
        return {"title": self.title, "spans": [list(span) for span in self.spans]}

    def cells(self) -> list[str]:
        lengths = [length for _, _, length in self.spans]
        ends = (min(at for _, at, _ in self.spans), max(at + length for _, at, length in self.spans))
        threads = {thread for thread, _, _ in self.spans}
        numbers = [shown(value) for value in (sum(lengths), max(lengths), *ends)]
        return [self.title, str(len(lengths)), str(len(threads)), *numbers]


def trace(setting: Setting) -> dict[str, Row]:
    """The first save of a run, guarded, during a training on one thread."""
    path = setting.folder / KEPT / "one_save.json"
    with one_thread():
        called, steps = _save(setting, path)
    # Remove paths of this machine.
    text = path.read_text().replace(f"{setting.folder}/", "")
    path.write_text(text)
    events = json.loads(text)
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    by_name: dict[str, list[tuple[str, float, float]]] = {"step of the training": []}
    for begin, seconds in steps:
        by_name["step of the training"].append(("MainThread", *_milliseconds(begin - called, seconds)))
    for event in events:
        begin = event.get("ts", 0) / 1e6 - called
        if event["ph"] == "X" and begin > 0:  # earlier spans belong to prewarm
            span = (names[event["tid"]], *_milliseconds(begin, event["dur"] / 1e6))
            by_name.setdefault(event["name"], []).append(span)
    return {name.replace(" ", "_"): Span(name, found) for name, found in by_name.items()}


def _save(setting: Setting, path: Path) -> tuple[float, list[tuple[float, float]]]:
    """Write the trace. Returns the time of the call, and (begin, seconds) of each training step, by the wall clock."""
    subject = Training(setting.compare_bytes, batch=4)
    steps: list[tuple[float, float]] = []

    def step() -> None:
        begin = time()
        subject.step()
        steps.append((begin, time() - begin))

    with AsyncCheckpointer(setting.folder / "run", guard=subject.optimizer, trace=path) as checkpointer:
        checkpointer.prewarm(subject.state)
        for _ in range(_OTHER_STEPS):
            step()
        called = time()
        handle = checkpointer.save(subject.state, step=1)
        while not handle.done():
            step()
        for _ in range(_OTHER_STEPS):
            step()
    return called, steps


def _milliseconds(begin: float, seconds: float) -> tuple[float, float]:
    return round(begin * 1e3, 3), round(seconds * 1e3, 3)


MEASURES: Final = {"trace": trace}
