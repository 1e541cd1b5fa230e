"""The runs at a root, and the steps that the user names.

In: a place, and texts from the command line. Out: runs as the library opens them, and steps. Knows nothing of: what
subcommands do with them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, NamedTuple

from ... import Keep, Naming, Place
from ...errors import CorruptCheckpointError, NotCommittedError
from ...plumbing import Storage, runs
from .listing import StepRow, best_of, checkpoints_of, parse_best
from .output import USAGE, Answer
from .place_arguments import parent_of, place_below
from .place_kinds import beside_versions, kind_of, nothing_at
from .run_places import open_run

_RANGE: Final = re.compile(r"(\d*)(:?)(\d*)")
# A step by its number, or as the newest or best of its run: "runs/a@100", "runs/a@latest", "runs/a@best:loss".
_NAMED: Final = re.compile(r"(?P<run>.*[^/])/*@(?P<which>\d+|latest|best(:.*)?)", re.DOTALL)


class ChosenRun(NamedTuple):
    """A run at a root, its naming, and the step if the place is the folder of one."""

    run: runs.Run
    naming: Naming
    step: int | None = None


def step_named(place: Place) -> Place:
    """The folder of the step that a place such as "runs/a@100" names. Other and existing places stay unchanged."""
    match = _NAMED.fullmatch(place.text)
    if match is None:
        return place
    storage, name = place.inside()
    if name and (storage.exists(name) or storage.names(name)):
        return place
    root, selector = replace(place, url=match["run"]), match["which"]
    if kind_of(root) == "trainer":
        return place_below(root, chosen_checkpoints(root, selector)[0].folder)
    step_runs = [one.run for one in whole_runs_at(root, " before the @")]
    run = step_runs[0]
    if selector == "latest":
        run = max(step_runs, key=lambda run: run.manifest(run.steps()[-1]).created)
    elif selector.isdecimal():
        run = next((run for run in step_runs if int(selector) in run.steps()), run)
    return place_below(root, run.folder(chosen_steps(run, selector)[0]))


def chosen_checkpoints(place: Place, *selectors: str) -> list[StepRow]:
    """The checkpoints of a trainer for "latest", "best:loss", or ranges such as "100:500"; by default all."""
    rows = checkpoints_of(place, place.storage().names(""), with_second_names=not selectors)
    chosen = [] if selectors else rows
    for selector in selectors:
        if selector == "latest":
            chosen += rows[-1:]
        elif selector.startswith("best"):
            best = parse_best(selector.partition(":")[2])
            found = [row for _, row in best_of(rows, best)]
            if not found:
                raise Answer(f"{place.shown}: no record of a checkpoint there has the metric {best.metric!r}")
            chosen += found[:1]
        else:
            steps = _within([row.step for row in rows if row.step >= 0], selector, place.shown)
            chosen += [row for row in rows if row.step in steps]
    return chosen


def runs_at(place: Place, *, keep: Keep | None = None) -> list[ChosenRun]:
    """The runs at a place: usually one, or one for each naming. For the folder of a step, its run."""
    names = place.storage().names("")
    kind, step_name = kind_of(place, names), None
    if kind == "publication" and kind_of(place, beside_versions(names)) == "run":
        kind = "run"
    if kind == "step":
        place, name = parent_of(place)
        step_name = runs.parse_step_name(name)
        if step_name is None:
            raise Answer(f"{place.shown}: {name!r} is not the name of a step; name the root of its run", USAGE)
    elif kind != "run":
        there = {"runs": "several runs; name one of them", "publication": "a publication, not a run"}
        raise Answer(f"{place.shown}: {there[kind]}", USAGE) if kind in there else nothing_at(place)
    storage = place.storage()
    names = storage.names("")
    chosen = []
    for step_format in runs.step_formats(storage, names) if step_name is None else [step_name.step_format]:
        naming = Naming(step_format, _tracker_in(storage, names, step_format))
        run = open_run(storage, naming, keep)
        if step_name is not None or run.steps():  # other files may have numbers in their names
            chosen.append(ChosenRun(run, naming, step_name and step_name.step))
    if not chosen:
        raise Answer(f"{place.shown}: nothing is committed there")
    return chosen


def whole_runs_at(place: Place, where: str = "", *, keep: Keep | None = None) -> list[ChosenRun]:
    """The runs at a place that is not the folder of a step. `where` tells, in the error, where to name the run."""
    chosen = runs_at(place, keep=keep)
    if chosen[0].step is not None:
        raise Answer(f"{place.shown} is the folder of one step; name the root of its run{where}", USAGE)
    return chosen


def refuse_newer(run: runs.Run) -> None:
    """Refuse to change a run with a step in a newer format, since its manifest counts as damaged here.

    Raises FormatVersionError.
    """
    run.view()
    for step in run.root.newer_format:
        path = f"{run.folder(step)}/{runs.MANIFEST_NAME}"
        with suppress(FileNotFoundError, CorruptCheckpointError):  # the manifest was replaced meanwhile
            runs.parse_manifest(run.storage.read(path)[0], path=run.storage.locate(path))


def usual_tracker(step_format: str) -> tuple[str, str] | str | None:
    """The default tracker of runs with this naming; None if it is not known."""
    trackers = {one.tracker for one in (Naming(), *runs.NAMINGS.values()) if one.step_format == step_format}
    return trackers.pop() if len(trackers) == 1 else None


def _tracker_in(storage: Storage, names: Sequence[str], step_format: str) -> tuple[str, str] | str | None:
    """The tracker of a naming among the files in a root, with the form of its text."""
    rest, usual = runs.parse_step_name(step_format.format(1)), usual_tracker(step_format)
    for name in runs.TRACKERS:
        if name in names:
            text = storage.read(name)[0][:100].decode(errors="replace")
            tracked = runs.parse_step_name(text)
            if tracked is None:  # damaged: it gets the usual text again
                return usual if isinstance(usual, tuple) and usual[0] == name else name
            if tracked.rest.strip() == "{}":
                return name, text.replace(tracked.digits, "{}", 1)
            if rest is not None and tracked.rest.strip() == rest.rest:
                return name, text.replace(text.strip(), step_format, 1)
    return None


def chosen_steps(run: runs.Run, *selectors: str) -> list[int]:
    """The committed steps for "latest", "best:loss", or ranges such as "100", "100:500", ":500" and "100:", which
    include both ends. By default, all steps.
    """
    committed = run.steps()
    if not committed:
        raise Answer(f"{run.storage.locate('')}: nothing is committed there")
    chosen = set() if selectors else {*committed}
    for selector in selectors:
        if selector == "latest":
            chosen.add(committed[-1])
        elif selector.startswith("best"):
            chosen.add(_best_step(run, selector.partition(":")[2]))
        else:
            chosen.update(_within(committed, selector, run.storage.locate("")))
    return sorted(chosen)


def _within(committed: Sequence[int], text: str, shown: str) -> list[int]:
    """The steps in a range. Raises Answer if there are none."""
    match = _RANGE.fullmatch(text)
    if not text or match is None:
        raise Answer(f"--steps takes a step or a range such as 100:500, not {text!r}", USAGE)
    first = int(match[1] or 0)
    last = (int(match[3]) if match[3] else None) if match[2] else first
    within = [step for step in committed if step >= first and (last is None or step <= last)]
    if not within:
        have = f"{committed[0]} to {committed[-1]} are" if committed else "nothing is"
        raise Answer(f"{shown}: no committed step in {text}; {have} committed")
    return within


def _best_step(run: runs.Run, text: str) -> int:
    """The best step by a metric of the records. Raises NotCommittedError if no record has the metric."""
    by, commits = parse_best(text), run.view()
    best = runs.best_of(list(commits), commits, by)
    if not best:
        shown = run.storage.locate("")
        why = runs.describe_missing_metric(by.metric, commits)
        raise NotCommittedError(f"{shown}: no record of a committed step has the metric {why}", path=shown, step=None)
    return best[-1]
