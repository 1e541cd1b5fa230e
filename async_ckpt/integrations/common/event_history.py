"""The history beside the checkpoints of a trainer, with the same events as that of a run.

In: the outcome of a save. Out: lines of the log in the folder. Knows nothing of: frameworks.

Nothing here raises an error: the history is a convenience, and must not make a durable save fail. In a store, a line
takes two requests, so it is written on threads for which no training waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ... import CheckpointError, SaveReport
from ...plumbing import events, places, runs, timing
from .framework_checks import LOGGED_AS


@dataclass(frozen=True)
class HistoryEntry:
    """The entry of a save in the history of a folder. `name` is the checkpoint in it, a file or a folder."""

    folder: places.Anywhere
    name: str
    step: int | None
    record: Mapping[str, Any] = field(default_factory=dict)
    world_size: int = 1

    def note_saved(self, report: SaveReport | Mapping[str, Any]) -> None:
        """Note that the checkpoint is durable. Its size includes all ranks."""
        facts = dict(report) if isinstance(report, Mapping) else {one: getattr(report, one) for one in events.MEASURED}
        storage = places.storage_at(self.folder)
        with suppress(CheckpointError):  # then the size is that of this rank's part
            if not storage.remote and (sizes := storage.sizes(self.name)):
                facts["num_bytes"] = sum(sizes.values())
        facts["free_bytes"] = storage.free_bytes()
        others = {key: value for key, value in self.record.items() if not key.startswith(LOGGED_AS)}
        numbers = {key: number for key, value in others.items() if (number := runs.number(value)) is not None}
        _note(self.folder, "save", self.step, name=self.name, **facts, record=numbers, world_size=self.world_size)

    def note_failed(self, error: BaseException) -> None:
        """Note that the save has failed."""
        _note(self.folder, "failed", self.step, error=type(error).__name__, message=events.shortened(str(error)))


def note_closed(folder: places.Anywhere) -> None:
    """Note that a training has ended, and saves nothing more to the folder."""
    _note(folder, "closed", None)


def _note(folder: places.Anywhere, event: str, step: int | None, **facts: Any) -> None:
    log = events.EventLog(places.storage_at(folder), timing.wall_time)
    log.note(event, step, **facts)
    log.write()
