"""The history beside the checkpoints of a trainer: the same events as those of a run, for people and the command.

In: what a save has come to. Out: lines of the log in the folder. Knows nothing of: frameworks.

Nothing here raises an error: the history is a convenience. At a store a line takes two requests, so these functions are
for threads that no training waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from ... import SaveHandle, SaveReport
from ...plumbing import events, places, runs, threads, timing
from .frameworks import LOGGED_AS


def note_when_done(
    handle: SaveHandle,
    folder: places.Anywhere,
    name: str,
    step: int | None,
    report: Callable[[], SaveReport],
    record: Mapping[str, Any] | None = None,
) -> Future[None]:
    """Note a save when it has ended. Returns a future of when that is done, which never fails."""
    noted: Future[None] = threads.running_future()

    def note(done: SaveHandle) -> None:
        try:
            error = Future.exception(done)  # nobody has been told of it yet
            if error is None:
                note_saved(folder, name, step, report(), record)
            else:
                note_failed(folder, step, error)
        finally:
            noted.set_result(None)

    handle.add_done_callback(note)
    return noted


def note_saved(
    folder: places.Anywhere,
    name: str,
    step: int | None,
    report: SaveReport | Mapping[str, Any],
    record: Mapping[str, Any] | None = None,
    world_size: int = 1,
) -> None:
    """Note that a checkpoint, a file or folder of this name, is durable. Its bytes are those of all ranks."""
    facts = dict(report) if isinstance(report, Mapping) else {one: getattr(report, one) for one in events.MEASURED}
    log, storage = _log_at(folder)
    if not storage.remote and (sizes := storage.sizes(name)):
        facts["num_bytes"] = sum(sizes.values())
    others = {key: value for key, value in (record or {}).items() if not key.startswith(LOGGED_AS)}
    numbers = {key: number for key, value in others.items() if (number := runs.number(value)) is not None}
    log.note("save", step, name=name, **facts, free_bytes=storage.free_bytes(), record=numbers, world_size=world_size)
    log.write()


def note_failed(folder: places.Anywhere, step: int | None, error: BaseException) -> None:
    """Note that a save has failed."""
    log, _ = _log_at(folder)
    log.note("failed", step, error=type(error).__name__, message=events.shortened(str(error)))
    log.write()


def note_closed(folder: places.Anywhere) -> None:
    """Note that a training has ended, and saves nothing more there."""
    log, _ = _log_at(folder)
    log.note("closed", None)
    log.write()


def _log_at(folder: places.Anywhere) -> tuple[events.EventLog, Any]:
    storage = places.storage_at(folder)
    return events.EventLog(storage, timing.wall_time), storage
