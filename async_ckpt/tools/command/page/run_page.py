"""The subcommand `page`: the histories of runs, as one HTML file.

In: the places of runs, and of a file. Out: the complete file, or none. Knows nothing of: HTML.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Final

from .... import Place, history
from ....errors import NotCommittedError
from ....plumbing import events as run_events
from ....plumbing import timing
from ..listing import broken_at, marks_at, parse_best
from ..output import Answer, counted, print_json, print_text
from ..place_arguments import place_like
from ..place_kinds import RUNS, nothing_at, targets_of
from ..run_places import RunPlaces
from ..trainer_folders import events_at, without_second_names
from .columns import RunColumns, columns_of
from .document import page_of

# How many of the newest steps of a run are checked for missing objects.
_LOOKED_AT: Final = 1000


def show(places: Sequence[Place], *, output: str, best: Sequence[str] | None, overwrite: bool, as_json: bool) -> None:
    """Write the page of these runs, and print what was written, as text or as a JSON document.

    By default, the file is in the current folder, with the name of the run, or "runs" for several runs.
    """
    own_name = PurePosixPath(places[0].shown).name if len(places) == 1 else ""
    target = place_like(places[0], output or f"{own_name or 'runs'}.html")
    storage, name = target.object()
    if not overwrite and storage.exists(name):
        raise Answer(f"{target.shown} already exists; pass --overwrite to replace it, or give another name with -o")
    chosen = [*map(parse_best, best or ())]
    runs = [columns for place, name in targets_of(places, RUNS) for columns in _columns_at(place, name)]
    for criterion in chosen:
        if not any(run.columns[entry].title == criterion.metric for run in runs for entry in run.entries):
            raise Answer(f"no record of these runs has the metric {criterion.metric!r}")
    page = page_of(runs, timing.wall_time(), chosen)
    storage.replace(name, page)
    if as_json:
        rows = [{"name": run.name, "num_events": len(run.events), "num_saves": len(run.saves)} for run in runs]
        print_json("page", {"target": target.shown, "num_bytes": len(page), "runs": rows})
    else:
        num_saves = counted(sum(len(run.saves) for run in runs), "save")
        print_text(f"{target.shown}: {num_saves} of {counted(len(runs), 'run')}")


def _columns_at(place: Place, name: str) -> Iterator[RunColumns]:
    """The columns of the run at a place. A run that was found in a folder, as `name`, is left out without a history."""
    storage = place.storage()
    try:
        events: list[run_events.Event] = history(place)
    except NotCommittedError:
        there = {*storage.names("")}
        events = [{**event, "kept": event.get("name") in there} for event in events_at(place)]
        if not events and not name:
            raise nothing_at(place) from None
    if events:
        events, broken, marks = without_second_names(events), broken_at(storage, _LOOKED_AT), marks_at(storage)
        yield columns_of(_name(place), events, broken, RunPlaces(place).look(), marks)


def _name(place: Place) -> str:
    """The name of a run on the page: the last two parts of its path."""
    parts = PurePosixPath(place.shown).parts
    return "/".join(parts[-2:]).lstrip("/") or place.shown
