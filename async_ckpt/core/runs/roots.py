"""A run at several roots, from near to far, any of which may be away, or lack steps.

In: one Run for each root. Out: the steps, the runs that hold them, and the steps to copy to a further root. Knows
nothing of: how a step is copied.

`steps` is the union over all roots and `latest` its maximum; a step is read from the nearest run that holds it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import accumulate, takewhile
from typing import Final, NamedTuple, TypeVar

from ...errors import (
    CheckpointError,
    NotAFolderError,
    NotCommittedError,
    RunTakenError,
    StorageUnavailableError,
)
from ..events.kinds import shortened
from ..spec import Keep, keep_of
from ..storage.local import LocalStorage
from ..storage.node_folders import AllNodes
from ..storage.place import Anywhere, Place, place_of
from ..timing import Clock
from .manifest import Manifest, Retired
from .marks import BAD, GOOD, Mark, MarkKind, kind_of, marked_bad, marks_of, newest_of, note_of, read_note
from .naming import Naming
from .retention import Commits
from .root import attempt_of
from .run import Elsewhere, Run
from .starts import Line
from .tiers_file import TiersFile

T = TypeVar("T")

# Why `newest_sound` passes over a step that has no mark.
NOT_GOOD: Final = "it is not marked good"


class Ahead(NamedTuple):
    """The step that a further root is to get next from the nearer ones."""

    holders: Mapping[int, Sequence[Run]]
    """All steps, and the roots that hold them."""
    step: int | None
    """The step to copy next; None if there is none."""
    stale: tuple[Retired, ...]
    """The commits at the further root that the copy retires there, since nearer roots have retired or replaced them."""


class Roots:
    """The runs of one checkpointer, which creates it, in the user's order. Thread-safe.

    With a single root, all errors are those of its Run.
    """

    def __init__(self, runs: Sequence[Run], tiers_file: TiersFile | None = None) -> None:
        """`tiers_file` is given for a run with several roots."""
        self.runs, self._tiers_file = tuple(runs), tiers_file
        self.listed: Collection[int] = ()  # the steps of all roots, as last asked for
        self._told: set[Run] = set()  # the roots at which this object has written the places

    @property
    def names(self) -> tuple[str, ...]:
        """The roots, for messages."""
        return tuple(run.storage.locate("").rstrip("/") or "/" for run in self.runs)

    def known(self) -> str:
        """The committed steps in words, as far as they are known without a request to a store."""
        steps = sorted({step for run in self.runs for step in run.known_steps()})
        if not steps:
            return "no steps"
        if len(steps) > 5:
            return f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
        return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"

    def check_naming(self) -> None:
        """Raise NotCommittedError if the newest step at a root has another naming than this run."""
        for run in self.runs:
            with suppress(StorageUnavailableError):  # reported when a step is read
                run.check_naming()

    def foreign_notes(self) -> list[str]:
        """Descriptions of roots without a commit, but with checkpoints of other programs: they must not look empty."""
        notes = []
        for name, run in zip(self.names, self.runs, strict=True):
            with suppress(CheckpointError):
                description = run.describe_foreign()
                if description is not None:
                    notes.append(
                        f"{name}: no step there was committed by async_ckpt (a step has a manifest.json), but "
                        f"the folder holds {description}"
                    )
        return notes

    def owner_notes(self) -> list[str]:
        """The roots at which another living process saves, so that this one cannot. Makes no request to a store."""
        notes = []
        for run in self.runs:
            try:
                with suppress(StorageUnavailableError, OSError):
                    run.check_start()
            except RunTakenError as error:
                notes.append(str(error))
        return notes

    def sweep_memory(self, *, has_ranks: bool) -> None:
        """Delete leftovers of killed writers at volatile roots, before the training needs that memory."""
        for run in self.runs:
            if run.is_volatile:
                with suppress(CheckpointError):
                    run.sweeper.sweep_once(has_ranks=has_ranks)

    def close(self, *, is_quiet: bool = True) -> None:
        """Give up the right to commit at the roots. See `Tenure.leave`."""
        for run in self.runs:
            run.close(is_quiet=is_quiet)

    def steps(self) -> list[int]:
        """The steps committed at any root that answers, ascending. Raises StorageUnavailableError."""
        return sorted(self._holders())

    def refuse_if_left_out(self) -> None:
        """Raise StorageUnavailableError if no step is committed only because nodes may have lost archives, or may have
        those of another run. A training must not start from scratch by mistake.
        """
        for run in self.runs:
            where, why = run.storage.locate(""), run.refusal
            if isinstance(run.storage, AllNodes) and run.storage.left_out:
                name, reason = next(iter(run.storage.left_out.items()))
                why = f"{where}: {name} is there, but the step is not whole: {reason}"
            if why:
                raise StorageUnavailableError(
                    f"no place has a step to restore, but there may be one at {why}. To start over, leave that place "
                    "out, or empty the folder on all nodes",
                    path=where,
                )

    def latest(self) -> int | None:
        """The newest committed step at any root that answers."""
        if len(self.runs) == 1:
            return self.runs[0].latest()
        return max(self._holders(), default=None)

    def holding(self, step: int) -> list[Run]:
        """The runs that hold a step, in the user's order. Raises NotCommittedError if there is none."""
        if len(self.runs) == 1:
            return list(self.runs)  # the run's own error has more detail
        holders = self._holders()
        if step not in holders:
            steps = sorted(holders)[-5:]
            have = f"committed: {', '.join(map(str, steps))}" if steps else "nothing is committed yet"
            raise NotCommittedError(f"{self!r}: no step {step}; {have}", path=repr(self), step=step)
        if len(holders[step]) < 2:
            return holders[step]
        return self._current(step, {run: run.committed(step) for run in holders[step]})

    def newest_sound(self, skipped: dict[int, str], *, only_good: bool = False) -> int | None:
        """The newest committed step that is neither in `skipped` nor marked bad; with `only_good`, it must be marked
        good. None if there is none.

        Steps that are passed over because of their marks are added to `skipped`, with the reason in words. Reads the
        marks from the newest step down to the result.
        """
        newest = None if skipped else self.latest()
        if not skipped and (newest is None or not (reason := self._mark_against(newest, only_good=only_good))):
            return newest
        for step in reversed(self.steps()):
            if step not in skipped:
                reason = self._mark_against(step, only_good=only_good)
                if not reason:
                    return step
                skipped[step] = reason
        return None

    def bad_mark(self, step: int) -> str:
        """The mark of a bad step in words, with its note; empty for any other step."""
        mark = self._mark_of(step)
        return "" if mark is None or mark.kind != BAD else marked_bad(self._note_of(mark))

    def _mark_against(self, step: int, *, only_good: bool) -> str:
        mark = self._mark_of(step) if only_good else None
        return self.bad_mark(step) or ("" if not only_good or (mark and mark.kind == GOOD) else NOT_GOOD)

    def _mark_of(self, step: int) -> Mark | None:
        """The mark of a step that counts, according to the last listings of all roots."""
        if not any(mark.step == step for run in self.runs for mark in run.root.marks):
            return None
        holders = self.holding(step) if len(self.runs) > 1 else self.runs
        attempts = {attempt_of(run.committed(step)) for run in holders}
        listed = (mark for run in self.runs for mark in run.root.marks if mark.step == step)
        return newest_of(mark for mark in listed if mark.attempt in attempts)

    def _note_of(self, mark: Mark) -> str:
        notes = (read_note(run.storage, mark) for run in self.runs if mark in run.root.marks)
        return next(filter(None, notes), "")

    def marks(self) -> dict[int, tuple[str, str]]:
        """The mark of each marked step, "good" or "bad", and its note."""
        steps = {*self.steps()}
        marked = sorted(steps & {mark.step for run in self.runs for mark in run.root.marks})
        return {step: (mark.kind, self._note_of(mark)) for step in marked if (mark := self._mark_of(step))}

    def mark(self, step: int, kind: MarkKind | None, note: str) -> None:
        """Put a mark at each root that has the step and answers. The kind None takes the step's mark back.

        Raises NotCommittedError if no root has the step, StorageUnavailableError if no root stores the mark, and
        ValueError and TypeError for an invalid kind or note.
        """
        word, text = kind_of(kind), note_of(note)
        attempts = {run: run.manifest(step).attempt for run in self.holding(step)}
        before = [mark.number for run in attempts for mark in run.root.marks if mark.step == step]
        refusals: list[StorageUnavailableError] = []
        for run, attempt in attempts.items():
            try:
                run.put_mark(Mark(step, attempt, max(before, default=0) + 1, word), text)
            except StorageUnavailableError as error:
                refusals.append(error)
            else:
                run.events.note("mark", step, mark=word, note=shortened(text))
        if len(refusals) == len(attempts):
            raise refusals[0]
        for refusal in refusals:
            warnings.warn(
                f"step {step} is not marked at a root that does not answer: {refusal}", RuntimeWarning, stacklevel=3
            )

    def view(self) -> Commits:
        """The steps committed at any root that answers, with their manifests; None for one that is damaged."""
        if len(self.runs) == 1:
            return self.runs[0].view()
        return self._merged(dict(self._ask(Run.view)))[0]

    def missing(self, run: Run) -> list[tuple[int, list[Run]]]:
        """The steps that `run` takes but lacks, or holds in an overwritten version, and that its retention would keep.

        Newest first, each with the runs that hold it, up to the room that `Keep(free=)` leaves. Raises
        StorageUnavailableError if the root of `run` is away.
        """
        commits, current = self._merged(dict(self._ask(Run.view, but_not_without=run)))
        doomed = set(run.steps_to_delete(commits))
        lacking = (step for step in sorted(current, reverse=True) if step not in doomed and run not in current[step])
        missing = [*filter(run.takes, lacking)]
        sizes = [manifest.num_bytes if (manifest := commits[step]) is not None else 0 for step in missing]
        fitting = takewhile(lambda one: not run.lack_bytes(one[1]), zip(missing, accumulate(sizes), strict=True))
        return [(step, current[step]) for step, _ in fitting]

    def ahead(self, run: Run, *, is_last: bool = False, first: int | None = None) -> Ahead:
        """The step to copy next to the last root, `run`, from the nearer ones. Only steps newer than its newest count:
        `first` if it is one of them, else the lowest that its `keep` keeps for good, else the newest. With `is_last`,
        the newest, even if it is not a multiple of `every`.

        Raises StorageUnavailableError if the root of `run` is away.
        """
        views = dict(self._ask(Run.view, but_not_without=run, logs=False))
        commits, current = self._merged(views)
        newest = max((step for step, holders in current.items() if run in holders), default=-1)
        doomed = set(run.steps_to_delete(commits))
        newer = [step for step, holders in current.items() if step > newest and run not in holders]
        wanted = [step for step in newer if step not in doomed and run.takes(step)]
        lasting = run.kept_for_good(commits).intersection(wanted)
        if first in newer:
            wanted, lasting, is_last = [first], set(), False
        chosen = min(lasting) if lasting and not is_last else max(newer if is_last else wanted, default=None)
        # An older step retires nothing: a reboot may lose the nearer roots before the newest one has been copied.
        is_newest = chosen is not None and chosen >= max(wanted, default=chosen)
        stale = {
            step: manifest.attempt
            for step, manifest in views[run].items()
            if manifest is not None and step != chosen and run not in current.get(step, ())
        }
        stale.update(run.root.out)  # those that an earlier look has found
        return Ahead(current, chosen, tuple(map(Retired._make, sorted(stale.items()))) if is_newest else ())

    def known_elsewhere(self, run: Run) -> Elsewhere:
        """The commits that other roots are known to have. Makes no request."""
        commits, others = dict[int, list[Manifest]](), [other.root for other in self.runs if other is not run]
        for other in others:
            for step, manifest in other.known.items():
                if manifest is not None:
                    commits.setdefault(step, []).append(manifest)
        return Elsewhere(commits, is_complete=all(other.is_viewed for other in others))

    def take(self, run: Run, step: int) -> bool:
        """Take one of the roots for this process, at its first save there. Returns True if it was taken by this call.

        Raises RunTakenError, and ConflictError if this process has taken another root and this one has commits of
        starts that the run does not descend from.
        """
        others = [other for other in self.runs if other is not run]
        if not run.has_start and any(other.has_start for other in others):
            self.refuse_strangers(run)
        return run.take(step, others)

    def write_places(self, run: Run) -> None:
        """Write the places of the run into `tiers.json` at one of them, unless this object has, and it is there."""
        is_told = run in self._told and run.root.has_tiers_file
        if not (self._tiers_file is None or is_told or any(isinstance(one.storage, AllNodes) for one in self.runs)):
            self._tiers_file.write(run.storage, self.runs.index(run))
            self._told.add(run)

    @property
    def are_taken(self) -> bool:
        """True if this process has taken one of the roots, or stands in for a process that has."""
        return any(run.has_start or run.stands_in for run in self.runs)

    def check_taken(self, run: Run) -> None:
        """Raise RunTakenError if another process has taken the root of `run` since this start of the run did."""
        run.check_taken(next((one.token for one in self.runs if one.token), ""))

    def refuse_strangers(self, run: Run) -> None:
        """Raise ConflictError if a root has a commit of a start that the other roots do not descend from."""
        run.refuse_strangers(self.descent_beside(run))

    def descent_beside(self, run: Run) -> set[str]:
        """The tokens of the starts that the run has had at all roots but this one."""
        return {token for other in self.runs if other is not run for token in other.descent()}

    def _merged(self, views: Mapping[Run, Commits]) -> tuple[Commits, dict[int, list[Run]]]:
        """The union of the commits of all roots, and the runs that hold the current version of each step."""
        current = {
            step: self._current(step, {holder: views[holder][step] for holder in holders})
            for step, holders in self._without_retired(views).items()
        }
        first = {step: next(filter(None, (views[run][step] for run in runs)), None) for step, runs in current.items()}
        marks = marks_of({mark for run in views for mark in run.root.marks}, lambda step: attempt_of(first.get(step)))
        return Commits(first).with_marks(marks), current

    def _current(self, step: int, manifests: Mapping[Run, Manifest | None]) -> list[Run]:
        """The runs whose commit of the step was neither replaced nor retired at another root; else all."""
        attempts = {manifest.attempt for manifest in manifests.values() if manifest is not None}
        if len(attempts) < 2:
            return list(manifests)
        replaced = {attempt for manifest in manifests.values() if manifest is not None for attempt in manifest.replaces}
        for run in manifests:
            replaced |= run.retired_attempts(step)
        current = [run for run, manifest in manifests.items() if manifest is None or manifest.attempt not in replaced]
        return current or list(manifests)

    def _holders(self) -> dict[int, list[Run]]:
        steps_of = dict(self._ask(Run.steps))
        if len(steps_of) > 1 and any(len(run.root.starts) > 1 for run in steps_of):
            for run in steps_of:
                with suppress(StorageUnavailableError):
                    run.learn()  # to decide which commits count, each manifest is read once, and many at a time
        holders = self._without_retired(steps_of)
        self.listed = holders.keys()
        return holders

    def _without_retired(self, steps_of: Mapping[Run, Iterable[int]]) -> dict[int, list[Run]]:
        """The runs that hold each step, leaving out steps that a rollback has retired at another root."""
        holders: dict[int, list[Run]] = {}
        for run, steps in steps_of.items():
            for step in steps:
                holders.setdefault(step, []).append(run)
        if len(steps_of) < 2:
            return self._in_line(holders, steps_of)
        retired = {run: run.retired_by(max(steps, default=None)) for run, steps in steps_of.items()}
        traces = {run: run.root.traces().union(one.step for one in of_newest) for run, of_newest in retired.items()}
        for step, runs in list(holders.items()):
            # A root that was away during a rollback still holds the step.
            others = {run: retired[run] for run in steps_of if run not in runs and step in traces[run]}
            if others and self._is_retired(step, runs[0], others):
                for run in runs:
                    if found := run.root.known_or_found(step):
                        run.root.leave_out(step, found.attempt)
                del holders[step]
        return self._in_line(holders, steps_of)

    def _in_line(self, holders: dict[int, list[Run]], runs: Iterable[Run]) -> dict[int, list[Run]]:
        """Remove commits of processes that had lost the run, according to the starts of each root and all steps."""
        commit = cache(lambda run, step: run.root.known_or_found(step))

        def elsewhere(step: int) -> Iterable[Manifest | None]:
            return (commit(run, step) for run in holders[step][1:])

        steps, sound = sorted(holders), {step: dict.fromkeys(holders[step]) for step in holders}
        for listed in (run.root.starts for run in runs):  # a root that lists two starts knows their order
            line = Line(steps, listed, lambda step: commit(holders[step][0], step), elsewhere=elsewhere)
            for step in line.unseen(steps):
                for run in holders[step]:  # a commit that counts hides those of the same step at further roots
                    manifest = commit(run, step)
                    if manifest is None or line.counts(step, manifest):
                        break
                    run.root.leave_out(step, manifest.attempt)
                    sound[step].pop(run, None)
        return {step: [*left] for step, left in sound.items() if left}

    def _is_retired(self, step: int, holder: Run, others: Mapping[Run, Collection[Retired]]) -> bool:
        """Whether `others`, each with the commits that its newest manifest retires, have retired that of `holder`."""
        try:
            manifest, _ = holder.root.read(step, explain=False)
            return any(Retired(step, manifest.attempt) in of_newest for of_newest in others.values()) or any(
                manifest.attempt in other.retired_attempts(step) for other in others
            )
        except NotCommittedError:  # since the root was listed, it was retired or deleted there, too
            return True
        except CheckpointError:  # the manifest is damaged, or a root went away since: the step stays
            return False

    def _ask(
        self, question: Callable[[Run], T], but_not_without: Run | None = None, *, logs: bool = True
    ) -> list[tuple[Run, T]]:
        """The result of `question` for each run whose root answers. If `logs`, a warning names the others. Raises
        StorageUnavailableError if none answers, `but_not_without` does not, or those that answer have no step.
        """
        answers: list[tuple[Run, T]] = []
        errors: list[StorageUnavailableError] = []
        for run in self.runs:
            try:
                answers.append((run, question(run)))
            except StorageUnavailableError as error:
                if run is but_not_without:
                    raise
                errors.append(error)
        if errors and not answers:
            raise errors[0]
        if errors and not any(answer for _, answer in answers):  # a training must not start from scratch by mistake
            raise StorageUnavailableError(
                "no step is committed at the roots that answer, but there may be one at a root that does not answer: "
                f"{errors[0]}. Try again once that root answers; to start over without it, leave it out of the roots",
                path=errors[0].path,
            ) from errors[0]
        for refusal in errors if logs else ():
            warnings.warn(f"a root does not answer and is ignored: {refusal}", RuntimeWarning, stacklevel=2)
        return answers

    def __repr__(self) -> str:
        return ", ".join(self.names)


def open_roots(
    root: Anywhere | Sequence[Anywhere],
    *,
    keep: Keep,
    naming: Naming,
    clock: Clock,
    max_bandwidth: float | None = None,
) -> Roots:
    """The runs at one root or several. Makes no request. `max_bandwidth` is only recorded for other processes.

    Raises ValueError for no root, for equal roots, for a root inside another root, and for options of further roots at
    the first one; ImportError for missing packages, NotADirectoryError for a file, and the errors of `Place.storage`.
    """
    is_one = isinstance(root, str | os.PathLike | Place) or not isinstance(root, Sequence)
    places = [place_of(root)] if is_one else [place_of(each) for each in root]  # type: ignore[arg-type, union-attr]
    if not places:
        raise ValueError("a run needs at least one root")
    storages = [place.storage() for place in places]
    for storage in storages:
        if isinstance(storage, LocalStorage) and storage.root.exists() and not storage.root.is_dir():
            raise NotAFolderError(f"{storage.root} is a file; a run needs a folder")
    for name in ("every", "compression"):
        if getattr(places[0], name) is not None:
            raise ValueError(
                f"{places[0]!r}: {name}= is for a further place, to which steps are copied; give a place before it, or "
                "leave it out"
            )
    if any(place.compression for place in places):
        from ..storage.compressed import refuse_if_missing  # lazy: most runs do not compress

        refuse_if_missing(with_planes=True)
    names = [os.path.realpath(one.root) if isinstance(one, LocalStorage) else one.locate("") for one in storages]
    if len(set(names)) < len(names):
        twice = next(one.locate("") for one, name in zip(storages, names, strict=True) if names.count(name) > 1)
        raise ValueError(
            f"two roots are the same: {twice}. A place is known by its path or URL, whatever its options=, engine= and "
            "fs= are; with two stores, give the bucket or folder another name at one of them"
        )
    folders = sorted(f"{name.rstrip('/')}/" for name in names)
    for outer in folders:
        inner = next((name for name in folders if name != outer and name.startswith(outer)), None)
        if inner is not None:
            raise ValueError(f"the root {inner} lies inside the root {outer}; put them side by side")
    opening = os.urandom(4).hex()
    places = [replace(place, keep=keep if place.keep is None else place.keep) for place in places]
    return Roots(
        [
            Run(
                storage,
                clock=clock,
                step_format=naming.step_format,
                tracker=naming.tracker,
                keep=keep_of(place.keep),
                every=place.every,
                is_volatile=len(places) > 1 and place.is_volatile,
                compresses=place.compression is not None,
                opening=opening,
            )
            for storage, place in zip(storages, places, strict=True)
        ],
        TiersFile(tuple(places), naming, max_bandwidth) if len(places) > 1 else None,
    )
