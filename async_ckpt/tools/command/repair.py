"""The repair of files that can be rebuilt from manifests and archives.

In: a place with a run. Out: the damage, and the repaired run. Knows nothing of: arguments, the bytes of tensors.

The tracker and the journal are rebuilt from the manifests. Leftovers of dead writers are deleted. A retired step is
committed again by a manifest that names the same archives and no start, so that the rule against the steps of overtaken
processes does not apply to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import typer

from ... import Place
from ...errors import CheckpointError, NotCommittedError, StepExistsError
from ...plumbing import Storage, runs, spec
from .exit_statuses import for_each
from .listing import broken_steps
from .output import NO, USAGE, Answer, print_json, print_table, print_text
from .place_kinds import RUNS, note_trainers, targets_of
from .pruning import refuse_writer
from .run_places import everywhere
from .selection import ChosenRun, refuse_newer, usual_tracker, whole_runs_at

_SHOWN_LEFTOVERS: Final = 3


@dataclass(frozen=True, slots=True)
class Damage:
    """A thing that contradicts the manifests. Without `mend`, it is only reported."""

    subject: str
    text: str
    mend: Callable[[], object] | None = None

    def as_json(self) -> dict[str, Any]:
        return {"subject": self.subject, "text": self.text, "can_be_mended": self.mend is not None}


def show(places: Sequence[Place], *, unretire: int | None, all_: bool, **options: Any) -> None:
    """Show the damage of each run. With `apply`, repair it."""
    targets = note_trainers(targets_of(places, RUNS))
    if unretire is not None and len(targets) > 1:
        raise Answer("--unretire names a step of one run; give that run alone", USAGE)
    for_each(partial(_repair, unretire=unretire, **options), everywhere((place for place, _ in targets), asks_all=all_))


def _repair(place: Place, *, unretire: int | None, apply: bool, unattended: bool, as_json: bool) -> None:
    """Repair one run. Raises typer.Exit if damage is left."""
    chosen = whole_runs_at(place)
    damages = []
    with ExitStack() as taken:
        for chosen_run in chosen:
            refuse_newer(chosen_run.run)
            if apply:
                refuse_writer(chosen_run.run, unattended=unattended)
                taken.enter_context(chosen_run.run.changing())
        for damage in damages_of(chosen, unretire):
            damages.append(damage)
            if apply and damage.mend is not None:
                for chosen_run in chosen:
                    chosen_run.run.check_taken()
                damage.mend()
    if as_json:
        print_json("repairs", {"place": place.shown, "applied": apply, "damages": damages})
    else:
        if damages:
            print_table(("what", "is"), ((damage.subject, damage.text) for damage in damages))
        print_text(_summary(place, damages, apply=apply))
    if any(not apply or damage.mend is None for damage in damages):
        raise typer.Exit(NO)


def _summary(place: Place, damages: list[Damage], *, apply: bool) -> str:
    num_mendable = sum(one.mend is not None for one in damages)
    if not damages:
        return f"{place.shown}: nothing to repair"
    ends = "repaired" if apply else "can be repaired, by --apply; nothing was changed"
    return f"{place.shown}: {num_mendable} of {len(damages)} {ends}"


def damages_of(chosen: list[ChosenRun], unretire: int | None = None, *, leftovers: bool = True) -> Iterator[Damage]:
    """The damage of the runs at a root. Each one is looked for after the caller has mended the previous ones.

    `leftovers` also looks for leftovers of dead writers, for which every folder is listed.
    """
    if unretire is not None:
        yield _retired(chosen, unretire)
    for chosen_run in chosen:
        run = chosen_run.run
        commits = run.view()
        broken = broken_steps(run, commits)
        for step, manifest in commits.items():
            if step in broken:
                yield Damage(f"step {step}", f"{broken[step]}; copy it again from an intact copy, or save it again")
            if manifest is None:
                text = "does not match its digest; copy the step again from where it is whole, or save it anew"
                yield Damage(f"{run.folder(step)}/{runs.MANIFEST_NAME}", text)
        if leftovers and (left := run.sweeper.sweep(delete=False)):
            text = f"of writers that have ended: {spec.some_of(left, _SHOWN_LEFTOVERS)}"
            yield Damage("leftovers", text, run.sweeper.sweep)
    newest = max(chosen, key=lambda one: max((made.created for made in one.run.view().values() if made), default=0.0))
    commits = newest.run.view()
    if commits:
        yield from _announced(newest, commits)


def _announced(one: ChosenRun, commits: runs.Commits) -> Iterator[Damage]:
    """The damage of tracker and journal, compared with the manifests."""
    run, storage, newest = one.run, one.run.storage, max(commits)
    tracker = runs.tracker_of(one.naming.tracker or usual_tracker(one.naming.step_format), one.naming.step_format)
    if tracker is not None:
        text = _content(storage, tracker.name)
        tracked = None if text is None else tracker.parse(text)
        if tracked != newest:
            is_says = "is missing" if text is None else f"says {text[:100].decode(errors='replace').strip()!r}"
            is_of_other = tracked is not None and tracked > newest and bool(storage.names(run.folder(tracked)))
            mend = None if is_of_other else partial(storage.replace, tracker.name, tracker.dump(newest))
            why = "; that folder was not committed by async_ckpt, and is left alone" if is_of_other else ""
            yield Damage(tracker.name, f"{is_says}; the newest step is {newest}{why}", mend)
    expected = runs.journal.dump([(m.path_in(run.folder(step)), m) for step, m in commits.items() if m is not None])
    there = _content(storage, runs.journal.NAME)
    has_one = there is not None or any(m.start for m in commits.values() if m is not None)  # else only one-off saves
    if has_one and there != expected:
        have, need = len((there or b"").splitlines()), len(expected.splitlines())
        yield Damage(
            runs.journal.NAME,
            "is missing" if there is None else f"differs from the manifests ({have} lines, {need} steps)",
            partial(storage.replace, runs.journal.NAME, expected),
        )


def _content(storage: Storage, name: str) -> bytes | None:
    with suppress(FileNotFoundError):
        return storage.read(name)[0]
    return None


def _retired(chosen: list[ChosenRun], step: int) -> Damage:
    """A retired step as damage, which is mended by committing it again. Raises StepExistsError if it is committed, and
    NotCommittedError if it does not exist, or its archives are gone.
    """
    for chosen_run in chosen:
        run, folder = chosen_run.run, chosen_run.run.folder(step)
        names = run.storage.names(folder)
        if runs.MANIFEST_NAME in names and step in run.steps():
            raise StepExistsError(f"step {step} is committed in {run.storage.locate('')}; it needs no repair")
        found = [
            (name, manifest) for name in names if runs.is_retired_name(name) if (manifest := _read(run, step, name))
        ]
        if not found:
            continue
        name, manifest = max(found, key=lambda pair: pair[1].created)
        missing = {*manifest.own_names} - {*names}
        if missing:
            shown = run.storage.locate(folder)
            raise NotCommittedError(
                f"{shown}: step {step} cannot be committed again: {min(missing)}, named in its manifest, is missing",
                path=shown,
                step=step,
            )
        return Damage(folder, f"step {step} was retired by a rollback", partial(_put_back, run, step, name, manifest))
    shown = chosen[0].run.storage.locate("")
    raise NotCommittedError(f"{shown}: no step {step} was retired there", path=shown, step=step)


def _read(run: runs.Run, step: int, name: str) -> runs.Manifest | None:
    path = f"{run.folder(step)}/{name}"
    with suppress(CheckpointError, FileNotFoundError):
        return runs.parse_manifest(run.storage.read(path)[0], path=path)
    return None


def _put_back(run: runs.Run, step: int, name: str, manifest: runs.Manifest) -> None:
    folder = run.folder(step)
    run.storage.put_new(f"{folder}/{runs.MANIFEST_NAME}", manifest._replace(start="", retires=()).dump())
    run.storage.delete(f"{folder}/{name}")
