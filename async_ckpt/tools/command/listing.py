"""The steps of a run, the contents of a folder of runs, and the versions of a publication, as rows.

In: a place. Out: rows of plain values, and their table. Knows nothing of: command-line arguments.

A step whose manifest cannot be read gets a row like any other. Nothing is changed on storage.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from ... import Naming, Place
from ...errors import CheckpointError
from ...plumbing import Storage, runs, spec, threads, timing
from ...plumbing import events as run_events
from .output import (
    USAGE,
    Answer,
    age,
    counted,
    if_known,
    in_table,
    mark_in_words,
    print_json,
    print_table,
    print_text,
    short,
    shown_rate,
    shown_seconds,
)
from .place_arguments import parent_of, place_below
from .place_kinds import USUAL_FORMATS, Found, Walk, beside_versions, kind_of, nothing_at, walk
from .run_places import DURABLE, PlaceStatus, RunPlaces, open_run
from .trainer_folders import TrainerCheckpoint, checkpoints_in, events_at, named_ones, second_names, size_of, time_of

if TYPE_CHECKING:
    from ...weights.publishing.versions import Versions

_BEST: Final = re.compile(r"(?P<metric>.+?)(:(?P<mode>min|max))?(:(?P<count>\d+))?")
_READERS: Final = 32
# Marks of steps that cannot be loaded begin with one of these texts.
_BROKEN: Final = ("broken", "its manifest is damaged")
# The most names that are shown of folders that were not searched, and of broken steps.
_SHOWN: Final = 5
# The table of a run of at least this length ends with a line on how the time was spent.
_WORTH_A_LINE_SECONDS: Final = 60.0
# How many entries of the records get a column, by default and with --records. The most frequent entries come first.
_FEW_METRICS, _MOST_METRICS = 3, 100
# Entries with these endings measure the speed of an evaluation. They get a column last.
_SPEEDS: Final = ("_runtime", "_per_second")


class Best(NamedTuple):
    """The best `num_steps` steps by `metric`, an entry of their records. `mode` is the better end of the metric."""

    metric: str
    mode: Literal["min", "max"]
    num_steps: int


@dataclass(slots=True)
class StepRow:
    """One step of a run. `marks` are facts about it in words.

    `created` is the time of the commit, or of the failure. `seconds` is the time from the call of `save` to the commit,
    and `stall_seconds` is how long the save stalled the training. Both are from the history, and None if it does not
    have them. If the run has several places, `places` are the numbers, from 1, of those with the step, and `durable`
    tells in words what the step outlives there.
    """

    step: int
    folder: str
    created: float | None = None
    num_bytes: int | None = None
    num_ranks: int | None = None
    seconds: float | None = None
    bandwidth: float | None = None
    stall_seconds: float | None = None
    record: Mapping[str, Any] = field(default_factory=dict)
    marks: list[str] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    durable: str = ""


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run in a folder of runs, or another thing found there.

    `kind` is "run", "publication", the name of a framework for checkpoints of its trainer, or the kind of a single
    checkpoint or file. `broken` are the steps with a damaged manifest, a missing archive, or one of another size; in a
    store, archives are looked up only on request. `best` is the best value of a metric, and its step.
    """

    name: str
    num_steps: int
    latest: int | None
    created: float | None
    num_bytes: int
    kind: str = "run"
    best: tuple[float, int] | None = None
    broken: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class VersionRow:
    """One version of a publication: an anchor, a delta against `base`, or damaged.

    `num_complete` is the number of ranks on which it is complete. With several ranks, it is a delta if it is one on any
    rank, and `base` is the oldest base.
    """

    version: int
    kind: str
    base: int | None
    num_bytes: int
    marks: list[str]
    num_ranks: int = 1
    num_complete: int = 1


def show(place: Place, *, all_: bool, check: bool, best: str | None, records: bool, as_json: bool) -> None:
    """Print the contents of a place as a table, or as a JSON document. `check` looks up the objects of all steps, and
    `records` shows up to a hundred entries of the records instead of three.
    """
    storage, metric = place.storage(), None if best is None else parse_best(best)
    names = storage.names("")
    kind = kind_of(place, names)
    if kind == "publication":
        _print_versions(place, versions_of(place), as_json=as_json)
        if not as_json and kind_of(place, beside_versions(names)) == "run":
            _print_steps(place, steps_of(storage, names), as_json=False)
    elif kind == "runs":
        below = walk(place)
        _print_runs(place, rows_of(place, below, metric, check=check), below.unseen, metric, as_json=as_json)
    elif kind in ("run", "trainer") or (kind == "nothing" and all_):
        statuses: Sequence[PlaceStatus] = ()
        spent = run_events.Goodput()
        if kind == "trainer":
            rows = checkpoints_of(place, names)
        else:
            events = run_events.EventLog(storage, timing.wall_time).read()
            spent = run_events.goodput_of(events)
            rows = steps_of(storage, names, events=events, with_all=all_, check=check)
            everywhere = RunPlaces(place)
            statuses = everywhere.look()
            rows = _with_places(rows, everywhere.places, statuses)
        if not rows:
            raise nothing_at(place)
        if metric is not None:
            if not (found := best_of(rows, metric)):
                raise Answer(f"no record of these steps has the metric {metric.metric!r}")
            for _, row in found[: metric.num_steps]:
                row.marks += ["best"] * ("best" not in row.marks)  # the framework may have named it
        most = _MOST_METRICS if records else _FEW_METRICS
        _print_steps(place, rows, statuses, spent, metric, most, as_json=as_json)
    elif kind == "step":
        raise Answer(
            f"{place.shown} is the folder of one step; look into it with async-ckpt inspect, or list its run", USAGE
        )
    else:
        raise nothing_at(place)


def steps_of(
    storage: Storage,
    names: list[str],
    *,
    events: Sequence[run_events.Event] | None = None,
    with_all: bool = False,
    check: bool = False,
) -> list[StepRow]:
    """The steps of the run whose folder has these names, in ascending order, of all its namings.

    `with_all` adds folders with the name of a step that are not committed, and saves that failed according to the
    history. `check` marks steps with a missing archive, or an archive of another size.
    """
    events = run_events.EventLog(storage, timing.wall_time).read() if events is None else events
    saves = {(event["step"], event["attempt"]): event for event in events if event["kind"] == "save"}
    rows: list[StepRow] = []
    # Before the first commit, the naming of the run is not known.
    for step_format in runs.step_formats(storage, names) or (USUAL_FORMATS if with_all else ()):
        rows += _rows(open_run(storage, Naming(step_format, None)), names, saves, with_all=with_all, check=check)
    _mark_newest(rows, storage, names)
    if with_all:
        _add_failures(rows, events)
    return sorted(rows, key=lambda row: (row.step, row.folder))


def _with_places(rows: list[StepRow], places: Sequence[Place], statuses: Sequence[PlaceStatus]) -> list[StepRow]:
    """The rows of a place, and rows of other places for steps that it lacks. Each row gets the places of its step."""
    known = {row.step for row in rows if row.num_bytes is not None}
    for place, status in zip(places, statuses, strict=True):
        if missing := {*status.steps} - known:
            storage = place.storage()
            others = steps_of(storage, storage.names(""))
            rows += [row for row in others if row.step in missing]
            known |= missing
    for row in rows:
        having = {number: status for number, status in enumerate(statuses, 1) if row.step in status.steps}
        outlives = {status.outlives for status in having.values()}
        row.places, row.durable = [*having], next((DURABLE[one] for one in reversed(DURABLE) if one in outlives), "")
        first = next((status.steps[row.step] for status in having.values()), "")
        row.marks += [f"another version at {n}" for n, status in having.items() if status.steps[row.step] != first]
        row.marks += [f"passed over by {n}" for n, status in enumerate(statuses, 1) if row.step in status.passed_over]
    return sorted(rows, key=lambda row: (row.step, row.folder))


def checkpoints_of(place: Place, names: Sequence[str], *, with_second_names: bool = False) -> list[StepRow]:
    """The checkpoints of a framework's trainer in a folder with these names, in ascending order of their steps.

    The history beside them supplies what their names do not tell. Without it, the time is that of the file or folder. A
    second name is a mark of the checkpoint, and has its own row only `with_second_names`.
    """
    storage = place.storage()
    found = checkpoints_in(storage, names)
    saves = {event["name"].partition("/")[0]: event for event in events_at(place) if event["kind"] == "save"}
    seconds = second_names(place, found, saves)
    named = {other: f"also {second}" for second, other in seconds.items()} | named_ones(place, found)
    if with_second_names:
        seconds.clear()
    rows = [_row_of(place, one, saves.get(one.name), named.get(one.name)) for one in found if one.name not in seconds]
    rows.sort(key=lambda row: (row.step, row.folder))
    if rows:
        rows[-1].marks.insert(0, "latest")
    return rows


def _row_of(place: Place, one: TrainerCheckpoint, save: run_events.Event | None, named: str | None) -> StepRow:
    step = one.step if save is None or save["step"] is None else save["step"]
    row = StepRow(-1 if step is None else step, one.name, marks=[one.name, *([] if named is None else [named])])
    row.num_bytes = size_of(place.storage(), one.name)
    if save is None:
        row.created = time_of(place, one.name)
    else:
        row.created, row.num_ranks, row.record = save["time"], save["world_size"], save["record"]
        _fill_times(row, save)
    return row


def rows_of(place: Place, below: Walk, metric: Best | None = None, *, check: bool = False) -> list[RunRow]:
    """The rows of the things that a walk has found, by name, or with `metric` from the best value on. `check` looks up
    the objects of steps in stores, too.
    """
    rows: list[RunRow] = []

    def look(found: Found) -> None:
        rows.append(_found_row(place_below(place, found.name), found, metric, check=check))

    threads.run_together("look", [partial(look, found) for found in below.found], max_threads=_READERS)
    rows.sort(key=lambda row: (row.name, row.kind))
    if metric is not None:
        rows = [row for row in rows if row.best is not None]
        if not rows:
            raise Answer(f"no record of these runs has the metric {metric.metric!r}")
        rows.sort(key=lambda row: row.best or (0.0, 0), reverse=metric.mode == "max")
    return rows


def _found_row(place: Place, found: Found, metric: Best | None, *, check: bool) -> RunRow:
    storage = place.storage()
    if found.kind in ("run", "trainer"):
        names = storage.names("")
        of_run = found.kind == "run"
        check = check or place.is_local  # a store needs a request for each step
        rows = steps_of(storage, names, check=check) if of_run else checkpoints_of(place, names)
        steps = [row for row in rows if row.num_bytes is not None]
        newest = max(steps, key=lambda row: row.step, default=None)
        return RunRow(
            found.name,
            len(steps if of_run else {row.step for row in steps if row.step >= 0} or steps),
            newest.step if newest else None,
            newest.created if newest else None,
            sum(row.num_bytes or 0 for row in steps),
            "run" if of_run else found.writer,
            None if metric is None else next(((v, row.step) for v, row in best_of(steps, metric)), None),
            tuple(row.step for row in rows if any(mark.startswith(_BROKEN) for mark in row.marks)),
        )
    if found.kind == "publication":
        versions = versions_of(place)
        newest_version = max((row.version for row in versions), default=None)
        return RunRow(
            found.name, len(versions), newest_version, None, sum(row.num_bytes for row in versions), "publication"
        )
    folder, name = parent_of(place)
    return RunRow(found.name, 0, None, time_of(folder, name), size_of(folder.storage(), name), found.writer)


def versions_of(place: Place) -> list[VersionRow]:
    """The versions of a publication, in ascending order, including those that only some ranks have begun."""
    from ...weights.publishing.of_ranks.root_versions import RootVersions, worlds_in  # imports torch

    root = RootVersions(place)
    names = root.storage.names("")
    rows = [*_versions_at(root.of_rank(0, 0)).values()]
    whole = root.sizes(names)
    for size, begun in worlds_in(names).items():
        if not size:
            continue
        by_rank: list[dict[int, VersionRow]] = []

        def look(versions: Versions, to: list[dict[int, VersionRow]] = by_rank) -> None:
            to.append(_versions_at(versions))

        threads.run_together("look", [partial(look, root.of_rank(rank, size)) for rank in begun], max_threads=_READERS)
        for version in sorted({version for versions in by_rank for version in versions}):
            of_ranks = [versions[version] for versions in by_rank if version in versions]
            rows.append(_of_ranks(of_ranks, size, is_whole=whole.get(version) == size))
    return sorted(rows, key=lambda row: (row.version, row.num_ranks))


def _versions_at(versions: Versions) -> dict[int, VersionRow]:
    from ...weights.delta import folder_of

    rows: dict[int, VersionRow] = {}
    for version in versions.numbers():
        try:
            base = versions.read(version).base
        except CheckpointError as error:
            rows[version] = VersionRow(version, "damaged", None, 0, [str(error)], num_complete=0)
            continue
        num_bytes = sum(versions.storage.sizes(folder_of(version)).values())
        is_complete = versions.is_complete(version)
        marks = [] if is_complete else [f"version {base} is missing"]
        kind = "anchor" if base is None else "delta"
        rows[version] = VersionRow(version, kind, base, num_bytes, marks, num_complete=int(is_complete))
    return rows


def _of_ranks(rows: Sequence[VersionRow], num_ranks: int, *, is_whole: bool) -> VersionRow:
    """One row for a version that several ranks have published in slices."""
    kinds = {row.kind for row in rows}
    marks = [*dict.fromkeys(mark for row in rows for mark in row.marks)]
    if len(rows) == num_ranks and not is_whole:
        marks.append("of two starts")
    return VersionRow(
        rows[0].version,
        next(kind for kind in ("damaged", "delta", "anchor") if kind in kinds),
        min((row.base for row in rows if row.base is not None), default=None),
        sum(row.num_bytes for row in rows),
        marks,
        num_ranks,
        sum(row.num_complete for row in rows),
    )


def _rows(
    run: runs.Run, names: list[str], saves: Mapping[tuple[int, str], run_events.Event], *, with_all: bool, check: bool
) -> Iterator[StepRow]:
    """The rows of one naming. `saves` are the events of saves by step and attempt."""
    commits = run.view(names)
    broken = broken_steps(run, commits) if check else {}
    marked = _marks_of(run) if commits.marks else {}
    borrowed_from = {one.step for made in commits.values() if made for one in made.elsewhere if one.step != made.step}
    for step, manifest in commits.items():
        row = StepRow(step, run.folder(step))
        if manifest is None:
            is_newer = step in run.root.newer_format
            row.marks.append(f"its manifest is {'of a newer async_ckpt' if is_newer else 'damaged'}")
        else:
            row.created, row.num_bytes, row.num_ranks = manifest.created, manifest.num_bytes, manifest.world_size
            row.record = manifest.record
            if (save := saves.get((step, manifest.attempt))) is not None:
                _fill_times(row, save)
            row.marks += ["rolling"] if row.record.get("rolling") else []
            row.marks += ["expires"] if row.record.get("ttl_seconds") is not None else []
            if lenders := sorted({one.step for one in manifest.elsewhere if one.step != step}):
                row.marks.append(f"borrows from {', '.join(map(str, lenders))}")
        if step in marked:
            row.marks.append(marked[step])
        if step in borrowed_from:
            row.marks.append("lends")
        if step in broken:
            row.marks.append(f"broken: {broken[step]}")
        yield row
    if with_all:
        for name in names:
            step = run.root.step_of(name)
            if step >= 0 and step not in commits and (mark := _uncommitted(run.storage, name)):
                yield StepRow(step, name, marks=[mark])


def _uncommitted(storage: Storage, folder: str) -> str | None:
    """The mark of a folder that has the name of a step and no commit; None for a file."""
    inside = storage.names(folder)
    if any(map(runs.is_retired_name, inside)) or runs.MANIFEST_NAME in inside:
        return "retired"
    if not inside:
        with suppress(FileNotFoundError, IsADirectoryError):
            storage.open(folder).close()
            return None
        return "not committed"
    return "not committed" if all(map(runs.is_library_name, inside)) else "of another program"


def _add_failures(rows: list[StepRow], events: Sequence[run_events.Event]) -> None:
    """Add a row for each failed save that left no folder, and mark the folders that other failed saves left."""
    left = {row.step: row for row in rows if row.marks == ["not committed"]}
    for event in events:
        if event["kind"] == "failed" and event["step"] is not None:
            mark = f"failed: {event['error']}: {event['message']}"
            row = left.get(event["step"])
            if row is None:
                rows.append(StepRow(event["step"], "", created=event["time"], marks=[mark]))
            else:
                row.created, row.marks = event["time"], ["not committed", mark]


def broken_at(storage: Storage, most: int) -> dict[int, str]:
    """The damage of the newest steps of a run, by step. Checks at most `most` steps of each naming."""
    damages = (broken_steps(run, run.root.look_up(run.steps()[-most:])) for run in _runs_at(storage))
    return {step: text for found in damages for step, text in found.items()}


def marks_at(storage: Storage) -> dict[int, str]:
    """The marks of the steps of a run, in words."""
    return {step: text for run in _runs_at(storage) for step, text in _marks_of(run).items()}


def _marks_of(run: runs.Run) -> dict[int, str]:
    return {step: mark_in_words(*mark) for step, mark in runs.Roots([run]).marks().items()}


def _runs_at(storage: Storage) -> Iterator[runs.Run]:
    """The run at a place, once for each of its namings."""
    return (open_run(storage, Naming(step_format, None)) for step_format in runs.formats_at(storage))


def broken_steps(run: runs.Run, commits: Mapping[int, runs.Manifest | None]) -> dict[int, str]:
    """The damage of steps, by step, as far as the names and sizes of the objects that they need show it."""
    manifests = {run.folder(step): manifest for step, manifest in commits.items() if manifest is not None}
    found = runs.broken_folders(run.storage, manifests)
    return {step: found[folder] for step in commits if (folder := run.folder(step)) in found}


def best_of(rows: Sequence[StepRow], best: Best) -> list[tuple[float, StepRow]]:
    """Values of a metric with their rows, the best first, of equal ones the newest. Steps marked bad are left out."""
    sound = [row for row in rows if not any(mark.partition(":")[0] == "bad" for mark in row.marks)]
    values = [(value, row) for row in sound if (value := runs.number(row.record.get(best.metric))) is not None]
    return sorted(values, key=lambda one: (one[0] if best.mode == "max" else -one[0], one[1].step), reverse=True)


def parse_best(text: str) -> Best:
    """Parse a metric, its mode and the number of steps: "loss", "loss:min", "accuracy:max:3"."""
    match = _BEST.fullmatch(text)
    if match is None or int(match["count"] or 1) < 1:
        raise Answer(f"give the metric as loss, loss:min or accuracy:max:3, not {text!r}", USAGE)
    return Best(match["metric"], "max" if match["mode"] == "max" else "min", int(match["count"] or 1))


def _fill_times(row: StepRow, save: run_events.Event) -> None:
    """Take the times from the event of a save, since a manifest is written before the commit ends."""
    row.seconds, row.stall_seconds = save["total_seconds"], save["stall_seconds"]
    row.bandwidth = run_events.bandwidth_of(save)


def _mark_newest(rows: Sequence[StepRow], storage: Storage, names: Collection[str]) -> None:
    committed = [row for row in rows if row.num_bytes is not None]
    if committed:
        max(committed, key=lambda row: row.step).marks.insert(0, "latest")
    for name in runs.TRACKERS:
        if name in names:
            with suppress(CheckpointError, OSError):
                text = storage.read(name)[0].decode(errors="replace").strip()
                for row in committed:
                    if text in (row.folder, str(row.step)):
                        row.marks.append(name if name != "latest" else "tracker")


def _print_versions(place: Place, rows: Sequence[VersionRow], *, as_json: bool) -> None:
    if as_json:
        print_json("versions", {"place": place.shown, "versions": rows})
        return
    print_table(
        (">version", "kind", ">base", ">size", ">ranks", "marks"),
        (
            (
                *(row.version, row.kind, row.base, in_table(row.num_bytes)),
                f"{row.num_complete} of {row.num_ranks}" if row.num_ranks > 1 else None,
                ", ".join(row.marks),
            )
            for row in rows
        ),
    )


def _print_runs(
    place: Place, rows: Sequence[RunRow], unseen: Sequence[str], metric: Best | None, *, as_json: bool
) -> None:
    if as_json:
        document = {"place": place.shown, "runs": rows, "not_looked_into": [*unseen]}
        print_json("runs", document)
        return
    now, best = timing.wall_time(), metric.metric if metric else "best"
    print_table(
        ("name", "kind", ">steps", ">latest", ">age", ">size", f">{best}", ">at step", "broken"),
        (
            (
                *(row.name, row.kind, row.num_steps or None, row.latest),
                if_known(row.created, lambda created: age(created, now)),
                in_table(row.num_bytes),
                *((None, None) if row.best is None else (short(row.best[0]), row.best[1])),
                spec.some_of(row.broken, _SHOWN),
            )
            for row in rows
        ),
    )
    if unseen:
        print_text(f"not looked into: {spec.some_of(unseen, _SHOWN)}; list them by their own names", "dim")


def _print_steps(
    place: Place,
    rows: Sequence[StepRow],
    statuses: Sequence[PlaceStatus] = (),
    spent: run_events.Goodput | None = None,
    metric: Best | None = None,
    most: int = _FEW_METRICS,
    *,
    as_json: bool,
) -> None:
    if as_json:
        document: dict[str, Any] = {"place": place.shown, "steps": rows}
        if spent:
            document["goodput"] = spent.as_dict()
        print_json("steps", document | ({"places": statuses} if statuses else {}))
        return
    now = timing.wall_time()
    counts = Counter(
        key
        for row in rows
        for key, value in row.record.items()
        if isinstance(value, int | float | str) and key not in ("rolling", "ttl_seconds")
    )
    best = metric and metric.metric
    ordered = sorted(
        counts, key=lambda key: (key != best, key.endswith(_SPEEDS), -counts[key], "loss" not in key.lower(), key)
    )
    metrics = sorted(ordered[:most])
    print_table(
        (
            *(">step", ">age", ">size", ">ranks", ">durable in", ">bandwidth", ">stall"),
            *(f">{metric}" for metric in metrics),
            *("at", "durable", "marks"),
        ),
        (
            (
                row.step if row.step >= 0 else None,
                if_known(row.created, lambda created: age(created, now)),
                if_known(row.num_bytes, in_table),
                row.num_ranks or None,
                if_known(row.seconds, shown_seconds),
                if_known(row.bandwidth, shown_rate),
                if_known(row.stall_seconds, shown_seconds),
                *(short(row.record[key]) if key in row.record else None for key in metrics),
                ", ".join(map(str, row.places)),
                row.durable,
                ", ".join(row.marks),
            )
            for row in rows
        ),
    )
    if spent and spent.total_seconds >= _WORTH_A_LINE_SECONDS:
        print_text(f"time: {spent}", "dim")
    for number, status in enumerate(statuses, 1):
        print_text(f"{number}: {status.described}", "" if status.trouble else "dim")
    if len(counts) > len(metrics):
        more = counted(len(counts) - len(metrics), "more column")
        print_text(f"{more} of the records: pass --{'records' if most < _MOST_METRICS else 'json'}", "dim")
