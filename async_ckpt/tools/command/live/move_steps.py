"""The subcommand `move`: copies the steps of runs to their further places, until a signal.

In: runs, and their places from `tiers.json` or options. Out: a line for each arrival on stdout, and for each error on
stderr. Knows nothing of: how a step is copied.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeAlias

import typer

from .... import Place
from ....errors import CheckpointError, CorruptCheckpointError, FormatVersionError
from ....plumbing import copy_step, run_movers, runs
from ..output import USAGE, Answer, counted, escaped, print_json, print_note
from ..place_arguments import place_below, place_like
from ..place_kinds import targets_of
from ..pruning import refuse_writer
from ..selection import runs_at
from .sidecar import received_signals

_LEFT: Final = 75  # EX_TEMPFAIL of sysexits.h
_LOOK_SECONDS: Final = 1.0

_ReadPlaces: TypeAlias = Callable[[], "runs.TiersFile | None"]


def show(
    places: Sequence[Place],
    *,
    to: Sequence[str] | None,
    once: bool,
    adopt: bool,
    retire: bool,
    as_json: bool,
    **options: bool,
) -> None:
    """Copy until a signal, or with `once` until all steps are copied, and print each arrival.

    Raises KeyboardInterrupt after Ctrl-C, and typer.Exit if steps are left.
    """
    runs_to_move, unread = _tiers_files(targets_of(places, ("run",)), to or ())
    if adopt and retire:
        raise Answer("--adopt and --retire exclude each other; pass one of them", USAGE)
    if adopt or retire:
        _resolve([tiers_file for _, tiers_file in runs_to_move], adopts=adopt, **options)
    left: list[str] = []
    with received_signals() as signals:
        on_arrival = _print_arrival_json if as_json else _print_arrival
        movers = [run_movers.RunMovers(file, read, copy_step, on_arrival) for read, file in runs_to_move]
        try:
            if once:
                for mover in movers:
                    mover.begin_end()
                left = [words for mover in movers for words in mover.finish(lambda: not signals)]
            never = threading.Event()
            while not (once or signals):
                for mover in movers:
                    mover.look()
                never.wait(_LOOK_SECONDS)
        finally:
            for mover in movers:
                mover.stop()
    if signal.SIGINT in signals:
        raise KeyboardInterrupt
    for words in left:
        print(f"async-ckpt: {escaped(words)}", file=sys.stderr)
    if left or unread:
        raise typer.Exit(_LEFT)


def _tiers_files(
    targets: Sequence[tuple[Place, str]], to: Sequence[str]
) -> tuple[list[tuple[_ReadPlaces, runs.TiersFile]], list[CheckpointError]]:
    """The places of each run, and a function that reads them again; and the errors of runs that are skipped."""
    found: list[tuple[_ReadPlaces, runs.TiersFile]] = []
    unread: list[CheckpointError] = []
    for place, name in targets:
        try:
            tiers_file = runs.tiers_file.read(place)
        except (CorruptCheckpointError, FormatVersionError) as error:
            unread.append(error)
            continue
        if to:
            further = [place_like(place, one) for one in to]
            further = [place_below(one, name) if name else one for one in further]
            naming = runs_at(place)[0].naming if tiers_file is None else tiers_file.naming
            given = runs.TiersFile((place, *further), naming, tiers_file and tiers_file.max_bandwidth)
            found.append((lambda given=given: given, given))  # type: ignore[misc]
        elif tiers_file is not None:
            found.append((partial(runs.tiers_file.read, place), tiers_file))
        elif name:
            print_note(f"{place.shown} has no {runs.tiers_file.NAME}, and is skipped")
        else:
            runs_at(place)  # raises an error that names the kind of the place
    if unread and not found:
        raise unread[0]
    for refusal in unread:
        print_note(f"{refusal}; the other runs are moved")
    if not found:
        raise Answer(
            f"{targets[0][0].shown} has no {runs.tiers_file.NAME}, which the first save of a training with several "
            "places writes; name the further places with --to",
            USAGE,
        )
    return found, unread


def _resolve(tiers_files: Sequence[runs.TiersFile], *, adopts: bool, yes: bool, unattended: bool) -> None:
    """Adopt or retire the steps of other runs at further places, after asking the user."""
    conflicts = [conflict for one in tiers_files for conflict in run_movers.conflicts_of(one)]
    if not conflicts:
        raise Answer("there is no conflict at any further place; leave out --adopt and --retire", USAGE)
    for conflict in conflicts:
        refuse_writer(conflict.run, unattended=unattended)
        print_note(_intention(conflict, adopts=adopts))
    if not yes and not sys.stdin.isatty():
        raise Answer("without a terminal, the command cannot ask: pass --yes", USAGE)
    if not (yes or typer.confirm("Go on?", err=True)):
        raise Answer("nothing was changed")
    for conflict in conflicts:
        (conflict.adopt if adopts else conflict.retire)()


def _intention(conflict: run_movers.Conflict, *, adopts: bool) -> str:
    where, steps = conflict.run.storage.locate(""), sorted(conflict.attempts)
    of_run = [step for run in conflict.roots.runs[:-1] for step in run.steps()]
    theirs = f"{counted(len(steps), 'step')} of another run, up to {steps[-1]}"
    own = f"step {max(of_run)}" if of_run else "no step"
    if not adopts:
        return (
            f"{where}: {theirs}, will be retired in favour of this run, which has {own}; async-ckpt repair --unretire "
            "commits one of them again"
        )
    newest = f"step {max([*steps, *of_run])}"
    return f"{where}: {theirs}, will be adopted by this run, which has {own}; {newest} is the newest then"


def _print_arrival(place: str, step: int) -> None:
    print(escaped(f"step {step} is at {place}"), flush=True)


def _print_arrival_json(place: str, step: int) -> None:
    print_json("moved", {"place": place, "step": step}, in_line=True)
