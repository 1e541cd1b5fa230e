"""Copies of steps to another root.

In: a place with a run, and the root that the steps go to. Out: the same commits there, and a table of them.
Knows nothing of: arguments.

The steps are copied one after the other, the oldest first; of each, all archives at once. Each is committed when its
bytes have been compared with their digests and are durable, so the root is a run at every instant. A copy that was
ended goes on where it was: steps and archives that are there are not copied again. The tracker comes last.
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
from .lookup import RUNS, own_kind, targets_of, trainer_of
from .run_places import everywhere, open_run
from .screen import NO, USAGE, Answer, in_table, print_json, print_table, print_text, progress, shown_rate
from .selection import ChosenRun, chosen_checkpoints, chosen_steps, runs_at
from .statuses import for_each
from .trainer_changes import copy_checkpoints
from .where import place_below

_COPIED: Final = "copied"
_THERE: Final = "was there"
_LENDER: Final = "copied, lends"
_MENDED: Final = "mended"
_REPLACED: Final = "replaced"
_GONE: Final = "deleted meanwhile"
_DAMAGED: Final = "damaged"


@dataclass(frozen=True, slots=True)
class CopyRow:
    """The outcome for one step: "copied", "copied, lends" if it was not asked for, "was there", "mended" if it was
    there and damaged, "replaced" if it was there in another version, "deleted meanwhile"; "damaged" if it is not sound
    at its source, and was not copied, with the error.
    """

    step: int
    num_bytes: int
    outcome: str
    error: str = ""
    name: str = ""  # of the checkpoint of a framework


def show(
    src: Sequence[Place], dst: Place, *, steps: Sequence[str] | None, all_: bool, as_json: bool, **options: Any
) -> None:
    """Copy steps of each source, and print a table of them, or a document."""
    pairs = [
        (one, target)
        for source, target in _targets_below(targets_of(src, RUNS), dst)
        for one in everywhere([source], asks_all=all_)
        if not all_ or one.text.rstrip("/") != target.text.rstrip("/")
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
    """Copy steps of one source. A step that is damaged there is left out, and typer.Exit is raised at the end.

    Raises StepExistsError if a step is at the target in another version, unless `overwrite` was given.
    """
    if bool(ranges) + latest + (best is not None) > 1:
        raise Answer("name the steps in one way: --steps, --latest or --best", USAGE)
    compressed.refuse_archive_name(target.shown)
    which = [*ranges, *(["latest"] if latest else []), *([] if best is None else [f"best:{best}"])]
    trainer = trainer_of(source)
    if own_kind(target, target.storage().names("")) == ("run" if trainer else "trainer"):
        raise Answer(f"{target.shown} has checkpoints of another training; copy to another folder; nothing was copied")
    begin = timing.monotonic()
    if trainer is not None:
        root, name = trainer
        _refuse_inside(source, root.storage(), target)
        if name and which:
            raise Answer("the source is one checkpoint; name the folder of its trainer to choose others", USAGE)
        ones = [row for row in chosen_checkpoints(root, *which) if name in ("", row.folder)]
        with progress("copy", sum(row.num_bytes or 0 for row in ones)) as advance:
            is_whole = not (name or which)
            outcomes = copy_checkpoints(root, target, ones, advance, overwrite=overwrite, is_whole=is_whole)
        rows = [CopyRow(row.step, row.num_bytes or 0, outcomes[row.folder], name=row.folder) for row in ones]
        _print_copies(rows, source, target, timing.monotonic() - begin, as_json=as_json)
        return
    found = runs_at(source)
    _refuse_inside(source, found[0].run.storage, target)
    if which and found[0].step is not None:
        raise Answer("the source is the folder of one step; name the root of its run to choose others", USAGE)
    chosen = [(one, chosen_steps(one.run, *which) if one.step is None else [one.step]) for one in found]
    rows = [
        row for one, steps in chosen for row in copy_steps(one, target, steps, overwrite=overwrite, is_whole=not which)
    ]
    _print_copies(rows, source, target, timing.monotonic() - begin, as_json=as_json)
    if any(row.error for row in rows):
        raise typer.Exit(NO)


def _print_copies(rows: Sequence[CopyRow], source: Place, target: Place, seconds: float, *, as_json: bool) -> None:
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
    """The sources with their targets: a single one goes to the target itself, each of several below it, by its name."""
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
    """Copy steps with those that lend to them, then the tracker. With `is_whole`, a step may be deleted meanwhile.

    With `overwrite`, steps that are there in another version are replaced, and those that are there are read, and
    copied again where they are damaged. If the target is refused, nothing has been copied.
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
    if is_whole and not to.root.starts:  # nobody has saved there
        to.events.copy_from(source.run.events)
    to.sweeper.sweep()  # what an earlier copy that was killed has left
    return rows


def _lenders(source: runs.Run, steps: Sequence[int]) -> set[int]:
    """The steps that others borrow from. They are copied first: all of them are older."""
    found: set[int] = set()
    new = {*steps}
    while new:
        manifests = [made for step in new if (made := source.committed(step)) is not None]
        new = {one.step for made in manifests for one in made.elsewhere} - {*steps, *found}
        found |= new
    return found


def _planned(source: runs.Run, to: runs.Run, step: int, checked: verification.Verification | None) -> str:
    """The plan for a step. With `checked`, another version is replaced, and the same one is read."""
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
    """The row of a step after it was copied."""
    try:
        copy_step(source, to, step, on_bytes=advance, mends=plan == _MENDED)
    except NotCommittedError:
        if not is_whole:  # it was named; of a whole run, retention was faster
            raise
        return CopyRow(step, 0, _GONE)
    except StepExistsError:  # by a copy beside this one
        plan = _THERE
    except (CorruptCheckpointError, FormatVersionError) as error:
        return CopyRow(step, 0, _DAMAGED, str(error))
    return CopyRow(step, _num_bytes(to, step), plan if is_asked or plan != _COPIED else _LENDER)


def _num_bytes(run: runs.Run, step: int) -> int:
    manifest = run.committed(step)
    return manifest.num_bytes if manifest is not None else 0


def _is_sound(run: runs.Run, step: int, checked: verification.Verification) -> bool:
    """Whether the archives in the folder of a step are sound, whatever those are that it borrows from."""
    folder = run.storage.locate(run.folder(step))
    try:
        checked.compare_step(find.CommittedStep.of(run, step))
    except CorruptCheckpointError as error:
        damaged = {error.path, *(path for (path, _), damage in checked.errors.items() if damage is not None)}
        return not any(path.startswith(f"{folder}/") for path in damaged)
    return True


def _refuse_inside(source: Place, root: Storage, target: Place) -> None:
    """Refuse a target that is the root of the source, or in the source."""
    inner = target.storage().locate("").rstrip("/")
    if inner == root.locate("").rstrip("/"):
        raise Answer(f"{target.shown} is both source and target", USAGE)
    if inner.startswith(f"{source.storage().locate('').rstrip('/')}/"):
        raise Answer(f"{target.shown} is inside the source folder; give another destination", USAGE)


def _refuse_unrelated(source: runs.Run, to: runs.Run, steps: Collection[int]) -> None:
    """Refuse to mix the steps of two runs: a training would go on from those of the other one.

    A start is known to a run by a file in its root, as an ancestor, or by a commit; a copy has only the commits. The
    runs are one if either knows the starts of the other's commits: of those that `to` gets, or that stay there.
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
