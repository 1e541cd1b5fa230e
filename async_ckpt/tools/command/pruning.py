"""The deletion of steps by rules of retention, after the user has seen which.

In: a place with a run, and rules. Out: the run without the steps that no rule keeps. Knows nothing of: arguments.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import typer

from ... import Keep, Place
from ...plumbing import reports, runs, timing
from .exit_statuses import for_each
from .listing import broken_steps, parse_best
from .output import USAGE, Answer, counted, in_table, print_json, print_table, print_text
from .place_kinds import RUNS, kind_of, targets_of
from .run_places import everywhere
from .selection import ChosenRun, refuse_newer, whole_runs_at
from .trainer_changes import PruneRow, ShownCheckpoints, refuse_living_trainer

_RULES: Final = "last=3, every=1000, best=loss:min:2, seconds=86400, good=2, bytes=200e9 or free=50e9"


def show(places: Sequence[Place], *, keep: Sequence[str] | None, all_: bool, as_json: bool, **options: Any) -> None:
    """Show the steps of each run that the rules keep and delete, ask, and delete."""
    targets = everywhere((place for place, _ in targets_of(places, RUNS)), asks_all=all_)
    for_each(partial(_prune, rules=keep or (), as_json=as_json, **options), targets, with_headings=not as_json)


def _prune(place: Place, *, rules: Sequence[str], dry_run: bool, yes: bool, unattended: bool, as_json: bool) -> None:
    """Prune one run. With `unattended`, the user confirms that no process writes to it, if that cannot be found out."""
    keep = parse_keep(rules)
    if not (dry_run or yes or sys.stdin.isatty()):
        raise Answer("without a terminal, the command cannot ask: pass --yes to delete, or --dry-run to look", USAGE)
    shown: Sequence[_Shown | ShownCheckpoints]
    if kind_of(place) == "trainer":
        if not dry_run:  # refuse before showing a table of steps that cannot be deleted
            refuse_living_trainer(place, unattended=unattended)
        if keep.free is not None:
            raise Answer(
                f"{place.shown}: --keep free=… is for runs, not for the folder of a trainer; pass bytes=…", USAGE
            )
        shown = [ShownCheckpoints(place, keep)]
    else:
        chosen = whole_runs_at(place, keep=keep)
        for one in chosen:
            refuse_newer(one.run)
            if not dry_run:
                refuse_writer(one.run, unattended=unattended)
        shown = [_Shown.of(one) for one in chosen]
    for each in shown:
        _refuse_unknown_metric(place, keep, each.commits)
    broken = {step: text for each in shown for step, text in each.broken.items()}
    rows = [row for each in shown for row in each.rows()]
    going = [row for row in rows if row.deleted]
    freed = sum(row.num_bytes or 0 for row in going)
    if not as_json:
        print_table(
            (">step", ">size", "checkpoint", "fate"),
            (
                (
                    row.step if row.step >= 0 else None,
                    "damaged" if row.num_bytes is None else in_table(row.num_bytes),
                    row.name,
                    ("delete" if row.deleted else "keep")
                    + (f", broken: {broken[row.step]}" if row.step in broken else ""),
                )
                for row in rows
            ),
        )
        verb = "would be deleted" if dry_run else "will be deleted"
        print_text(f"{len(going)} of {counted(len(rows), 'step')} {verb}, {reports.sized(freed)} of {place.shown}")
    if going and not dry_run:
        if not (yes or typer.confirm("Delete them?", err=True)):
            raise Answer("nothing was deleted")
        gone = {step for each in shown for step in each.delete(unattended=unattended)}
        rows = [replace(row, deleted=row.step in gone) for row in rows]
        if not as_json:
            stay = [row.step for row in going if row.step not in gone]
            changed = "; the run has changed since it was shown, so"
            others = f"{changed} {counted(len(stay), 'step')} stay, such as {stay[0]}" if stay else ""
            print_text(f"{counted(len(gone), 'step')} deleted{others}")
    if as_json:
        freed = sum(row.num_bytes or 0 for row in rows if row.deleted)
        fields = {"place": place.shown, "dry_run": dry_run, "steps": rows, "num_bytes": freed, "broken": [*broken]}
        print_json("pruning", fields)


def parse_keep(rules: Sequence[str]) -> Keep:
    """Parse rules of retention such as "last=3"."""
    values: dict[str, Any] = {}
    for rule in rules:
        name, _, text = rule.partition("=")
        if name in values:
            raise Answer(f"--keep {name}=… is given twice; pass each kind of rule once", USAGE)
        try:
            if name in ("last", "every", "good"):
                values[name] = int(text)
            elif name in ("seconds", "bytes", "free"):
                values[name] = float(text)
            elif name == "best" and text:
                values[name] = parse_best(text)
            else:
                raise ValueError(name)
            Keep(**{name: values[name]})
        except ValueError as error:
            raise Answer(f"--keep takes {_RULES}, with numbers above 0, not {rule!r}", USAGE) from error
    if not values:
        raise Answer(f"--keep is missing: say which steps to keep by --keep {_RULES}; the newest always stays", USAGE)
    return Keep(**values)


def _refuse_unknown_metric(place: Place, keep: Keep, commits: runs.Commits) -> None:
    """Refuse a metric that no record has. A training keeps every step then; here the name is probably misspelt."""
    if keep.best is not None and commits and runs.best_of([*commits], commits, keep.best) is None:
        why = runs.describe_missing_metric(keep.best[0], commits).partition("; ")[0]
        raise Answer(f"{place.shown}: --keep best={keep.best[0]}: no record of a step has the metric {why}", USAGE)


def refuse_writer(run: runs.Run, *, unattended: bool) -> None:
    """Refuse to change a run that another process writes to, or may write to.

    On a disk, the lock of the newest start shows it. In a store, only a process of this machine can be checked.
    """
    run.steps()
    runs.refuse_if_alive(run.storage, run.root.starts)
    newest = max(run.root.starts, default=None)
    if newest is None or unattended or not run.storage.remote:
        return
    about = runs.about_start(run.storage, newest)
    host, pid, since = about.get("host"), about.get("pid"), about.get("since")
    writer = f"process {pid!r:.20} on {host!a:.100}" if pid and host else "a process that left no name"
    when = f", which began at {timing.shown_time(float(since))}" if isinstance(since, int | float) else ""
    if host == socket.gethostname() and isinstance(pid, int) and runs.lives(pid):
        raise Answer(
            f"{run.storage.locate('')}: {writer}{when}, is alive on this machine and saves there; end it first, or "
            "pass --unattended if it now saves elsewhere"
        )
    if host != socket.gethostname():
        raise Answer(
            f"{run.storage.locate('')}: {writer}{when}, saved there last. A store has no locks, so the command "
            "cannot see whether it is alive; make sure that it has ended, and pass --unattended"
        )


class _Shown(NamedTuple):
    """A run as it was shown to the user: its commits, the broken ones, the steps to delete, and its newest start."""

    run: runs.Run
    commits: runs.Commits
    broken: Mapping[int, str]
    going: frozenset[int]
    start: runs.Start | None

    @classmethod
    def of(cls, one: ChosenRun) -> _Shown:
        commits = one.run.view()
        broken = {
            **{step: "its manifest is damaged" for step, manifest in commits.items() if manifest is None},
            **broken_steps(one.run, commits),
        }
        going = frozenset(one.run.doomed(commits, protected=one.run.protected(), broken=broken))
        return cls(one.run, commits, broken, going, max(one.run.root.starts, default=None))

    def rows(self) -> list[PruneRow]:
        return [
            PruneRow(step, manifest.num_bytes if manifest else None, step in self.going)
            for step, manifest in self.commits.items()
        ]

    def delete(self, *, unattended: bool) -> list[int]:
        """Delete the steps that were shown for deletion and have not changed since. Returns them. Refuses if another
        process may save there. No save begins during the deletion.
        """
        run = self.run
        run.steps()
        is_as_shown = max(run.root.starts, default=None) == self.start
        refuse_writer(run, unattended=unattended and is_as_shown)
        with run.changing():
            newest = run.latest()
            only = runs.Commits({step: self.commits[step] for step in self.going})
            gone = [] if newest is None else run.retain(newest, replaced=None, in_flight=(), only=only)
            run.events.write()
        return gone
