"""Copies of steps to another root.

In: a place with a run, and the target root. Out: the same commits there, and a table of them. Knows nothing of:
command-line arguments.

The steps are copied one after the other, the oldest first, and all archives of a step at once. A step is committed when
its bytes have been compared with their digests and are durable, so the target is a valid run at any time. Steps and
archives that an interrupted copy has left at the target are not copied again. The tracker is written last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import typer

from ... import Place
from ...errors import CorruptCheckpointError, FormatVersionError, NotCommittedError, StepExistsError
from ...plumbing import Storage, compressed, copy_step, find, reports, runs, timing, verification
from .exit_statuses import for_each
from .output import NO, USAGE, Answer, in_table, print_json, print_table, print_text, progress, shown_rate
from .place_arguments import place_below
from .place_kinds import RUNS, own_kind, targets_of, trainer_of
from .run_places import everywhere, open_run
from .selection import ChosenRun, chosen_checkpoints, chosen_steps, runs_at
from .trainer_changes import copy_checkpoints

_COPIED: Final = "copied"
_THERE: Final = "was there"
_LENDER: Final = "copied, lends"
_MENDED: Final = "mended"
_REPLACED: Final = "replaced"
_GONE: Final = "deleted meanwhile"
_DAMAGED: Final = "damaged"


@dataclass(frozen=True, slots=True)
class CopyRow:
    """The outcome for one step: "copied"; "copied, lends" if it was not requested, but lends to a requested step; "was
    there"; "mended" if the target's copy was damaged; "replaced" if that was another version; "deleted meanwhile"; or
    "damaged" at its source, with the error, and not copied.
    """

    step: int
    num_bytes: int
    outcome: str
    error: str = ""
    name: str = ""  # of the checkpoint of a framework


def show(
    src: Sequence[Place], dst: Place, *, steps: Sequence[str] | None, all_: bool, as_json: bool, **options: Any
) -> None:
    """Copy steps of each source, and print them as a table or a JSON document."""
    pairs = [
        (place, target)
        for source, target in _targets_below(targets_of(src, RUNS), dst)
        for place in everywhere([source], asks_all=all_)
        if not all_ or place.text.rstrip("/") != target.text.rstrip("/")
    ]
    copy = partial(copy_place, ranges=steps or (), as_json=as_json, **options)
    for_each(copy, *zip(*pairs, strict=True), with_headings=not as_json)


def copy_place(
    source: Place,
    target: Place,
    *,
    ranges: Sequence[str],
    latest: bool,
    best: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Copy steps of one source. Damaged steps are skipped, and typer.Exit is raised at the end.

    Raises StepExistsError if the target has another version of a step, unless `overwrite` is given.
    """
    if bool(ranges) + latest + (best is not None) > 1:
        raise Answer("name the steps in one way: --steps, --latest or --best", USAGE)
    compressed.refuse_archive_name(target.shown)
    names = [*ranges, *(["latest"] if latest else []), *([] if best is None else [f"best:{best}"])]
    trainer = trainer_of(source)
    if own_kind(target, target.storage().names("")) == ("run" if trainer else "trainer"):
        raise Answer(f"{target.shown} has checkpoints of another training; copy to another folder; nothing was copied")
    begin = timing.monotonic()
    if trainer is not None:
        root, name = trainer
        _refuse_inside(source, root.storage(), target)
        if name and names:
            raise Answer("the source is one checkpoint; name the folder of its trainer to choose others", USAGE)
        checkpoints = [row for row in chosen_checkpoints(root, *names) if name in ("", row.folder)]
        with progress("copy", sum(row.num_bytes or 0 for row in checkpoints)) as advance:
            is_whole = not (name or names)
            outcomes = copy_checkpoints(root, target, checkpoints, advance, overwrite=overwrite, is_whole=is_whole)
        rows = [CopyRow(row.step, row.num_bytes or 0, outcomes[row.folder], name=row.folder) for row in checkpoints]
        _print_outcomes(rows, source, target, timing.monotonic() - begin, as_json=as_json)
        return
    found = runs_at(source)
    _refuse_inside(source, found[0].run.storage, target)
    if names and found[0].step is not None:
        raise Answer("the source is the folder of one step; name the root of its run to choose others", USAGE)
    chosen = [(one, chosen_steps(one.run, *names) if one.step is None else [one.step]) for one in found]
    rows = [
        row for one, steps in chosen for row in copy_steps(one, target, steps, overwrite=overwrite, is_whole=not names)
    ]
    _print_outcomes(rows, source, target, timing.monotonic() - begin, as_json=as_json)
    if any(row.error for row in rows):
        raise typer.Exit(NO)


def _print_outcomes(rows: Sequence[CopyRow], source: Place, target: Place, seconds: float, *, as_json: bool) -> None:
    num_bytes = sum(row.num_bytes for row in rows if row.outcome in (_COPIED, _LENDER, _MENDED, _REPLACED))
    if as_json:
        document = {"source": source.shown, "target": target.shown, "steps": rows}
        print_json("copies", {**document, "num_bytes": num_bytes, "seconds": seconds})
        return
    print_table(
        (">step", ">size", "checkpoint", "outcome"),
        (
            (
                row.step if row.step >= 0 else None,
                in_table(row.num_bytes) if row.num_bytes else None,
                row.name,
                row.outcome,
            )
            for row in rows
        ),
    )
    for row in rows:
        if row.error:
            print_text(f"step {row.step} was not copied: {row.error}")
    speed = f", {shown_rate(num_bytes / seconds)}" if num_bytes and seconds else ""
    print_text(f"{reports.sized(num_bytes)} copied to {target.shown} in {seconds:.1f} s{speed}", "dim")


def _targets_below(sources: Sequence[tuple[Place, str]], target: Place) -> list[tuple[Place, Place]]:
    """The sources with their targets: `target` for a single source, else a folder below it with the source's name."""
    if len(sources) == 1 and not sources[0][1]:
        return [(sources[0][0], target)]
    for source, name in sources:
        folder = source.text.rstrip("/").removesuffix(name)
        if name and f"{target.text.rstrip('/')}/".startswith(folder):
            raise Answer(f"{target.shown} is inside the source folder; give another destination", USAGE)
    names = [name or source.text.rstrip("/").rpartition("/")[2] for source, name in sources]
    for name, times in Counter(names).items():
        if times > 1:
            raise Answer(f"{times} sources have the name {name}; copy them one by one", USAGE)
    return [(source, place_below(target, name)) for (source, _), name in zip(sources, names, strict=True)]


def copy_steps(
    source: ChosenRun, target: Place, steps: Sequence[int], *, overwrite: bool, is_whole: bool
) -> list[CopyRow]:
    """Copy steps and the steps that lend to them, then the tracker.

    With `is_whole`, the source may delete steps meanwhile. With `overwrite`, other versions at the target are replaced,
    and equal ones are read, and copied again if damaged. A target is refused before anything is copied.
    """
    to = open_run(target.storage(), source.naming)
    to.steps()
    runs.refuse_if_alive(to.storage, to.root.starts)
    checked = verification.Verification()
    plans = {
        step: _planned(source.run, to, step, checked if overwrite else None)
        for step in sorted({*steps, *_lenders(source.run, steps)})
    }
    _refuse_unrelated(source.run, to, plans)
    rows = []
    with progress("copy", sum(_num_bytes(source.run, step) for step in plans if plans[step] != _THERE)) as advance:
        for step, plan in plans.items():
            row = CopyRow(step, _num_bytes(to, step), _THERE)
            if plan != _THERE:
                row = _copied(source.run, to, step, advance, plan, is_asked=step in steps, is_whole=is_whole)
            if step in steps or row.outcome != _THERE:
                rows.append(row)
    to.announce()
    if is_whole and not to.root.starts:  # no process has saved there
        to.events.copy_from(source.run.events)
    to.sweeper.sweep()  # leftovers of a copy that was killed
    return rows


def _lenders(source: runs.Run, steps: Sequence[int]) -> set[int]:
    """The further steps that these steps borrow from. They are copied first, since all of them are older."""
    found: set[int] = set()
    new = {*steps}
    while new:
        manifests = [made for step in new if (made := source.committed(step)) is not None]
        new = {one.step for made in manifests for one in made.elsewhere} - {*steps, *found}
        found |= new
    return found


def _planned(source: runs.Run, to: runs.Run, step: int, checked: verification.Verification | None) -> str:
    """The plan for a step. With `checked`, another version is replaced, and an equal version is read."""
    own, other = source.committed(step), to.committed(step)
    if own is None or other is None:
        return _COPIED
    if other.attempt == own.attempt:
        return _THERE if checked is None or _is_sound(to, step, checked) else _MENDED
    if checked is None:
        raise StepExistsError(
            f"step {step} is committed in {to.storage.locate('')} in another version; pass --overwrite to replace "
            "it, or copy to another root",
            step=step,
        )
    return _REPLACED


def _copied(
    source: runs.Run,
    to: runs.Run,
    step: int,
    advance: Callable[[int], None],
    plan: str,
    *,
    is_asked: bool,
    is_whole: bool,
) -> CopyRow:
    """Copy a step, and return its row."""
    try:
        copy_step(source, to, step, on_bytes=advance, mends=plan == _MENDED)
    except NotCommittedError:
        if not is_whole:  # the step was requested; of a whole run, retention may delete steps
            raise
        return CopyRow(step, 0, _GONE)
    except StepExistsError:  # another copy has committed it
        plan = _THERE
    except (CorruptCheckpointError, FormatVersionError) as error:
        return CopyRow(step, 0, _DAMAGED, str(error))
    return CopyRow(step, _num_bytes(to, step), plan if is_asked or plan != _COPIED else _LENDER)


def _num_bytes(run: runs.Run, step: int) -> int:
    manifest = run.committed(step)
    return manifest.num_bytes if manifest is not None else 0


def _is_sound(run: runs.Run, step: int, checked: verification.Verification) -> bool:
    """Whether the archives in the folder of a step are sound. Borrowed archives do not count."""
    folder = run.storage.locate(run.folder(step))
    try:
        checked.compare_step(find.CommittedStep.of(run, step))
    except CorruptCheckpointError as error:
        damaged = {error.path, *(path for (path, _), damage in checked.errors.items() if damage is not None)}
        return not any(path.startswith(f"{folder}/") for path in damaged)
    return True


def _refuse_inside(source: Place, root: Storage, target: Place) -> None:
    """Refuse a target that is the root of the source, or inside the source."""
    inner = target.storage().locate("").rstrip("/")
    if inner == root.locate("").rstrip("/"):
        raise Answer(f"{target.shown} is both source and target", USAGE)
    if inner.startswith(f"{source.storage().locate('').rstrip('/')}/"):
        raise Answer(f"{target.shown} is inside the source folder; give another destination", USAGE)


def _refuse_unrelated(source: runs.Run, to: runs.Run, steps: Collection[int]) -> None:
    """Refuse to mix the steps of two runs, since a training could continue from steps of the other run.

    A run knows a start by a file in its root, as an ancestor, or by a commit; a copy knows only commits. The runs are
    one if `to` knows the starts of all commits that it gets, or `source` those of all that stay in `to`.
    """
    here, there = source.view(), to.view()
    given = _starts_of(here[step] for step in steps if step in here)
    staying = _starts_of(manifest for step, manifest in there.items() if step not in steps)
    if not given <= _starts_of(there.values()) | to.descent() and (
        not staying <= _starts_of(here.values()) | source.descent()
    ):
        where, other = (run.storage.locate("") for run in (to, source))
        raise Answer(
            f"{where} has steps of another run, which does not continue {other}: a training there would go on from the "
            "copied steps. Copy to another folder; nothing was copied"
        )


def _starts_of(manifests: Iterable[runs.Manifest | None]) -> set[str]:
    """The tokens of the starts that made these commits, as far as the manifests name them."""
    return {one.start.rpartition(".")[2] for one in manifests if one is not None and one.start}
