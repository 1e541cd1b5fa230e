"""The pictures of one run, and the pictures that compare several runs, each with a sentence on what it shows.

In: columns. Out: pictures, as values that name columns. Knows nothing of: HTML, how lines are drawn.

A picture without known values is left out. Each picture has a table of the same rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from statistics import median
from typing import Any, Final, Literal, TypeAlias

from ....plumbing import reports, spec
from ..listing import Best
from ..output import counted, shown_rate, shown_seconds
from .columns import RunColumns

# Each meaning has one colour on the whole page, which `page.css` defines.
Colour: TypeAlias = Literal[
    "stall", "stage", "write", "commit", "best", "kept", "failed", "skipped", "restored", "deleted", "plain",
    "reference",
]  # fmt: skip
Look: TypeAlias = Literal["line", "dashes", "area", "hollow", "dot", "ring", "cross", "triangle", "diamond", "span"]

# How many entries of records get a picture.
MAX_RECORDS: Final = 6
_value: Final = itemgetter(1)  # the value of a pair (row, value) of `RunColumns.known`


@dataclass(frozen=True, slots=True)
class Series:
    """A line, or marks: the values of a column on the given rows, or the constant `level`.

    `number` distinguishes series of one meaning, such as the groups of a state or compared runs. In a picture that
    compares runs, `run` is the number of the column's run.
    """

    label: str
    column: str
    look: Look
    colour: Colour | None = None
    rows: Sequence[int] | None = None
    level: float | None = None
    number: int | None = None
    run: int | None = None


@dataclass(frozen=True, slots=True)
class GroupLane:
    """The spans of one group: first step, last step and lender, which is None where saves wrote the group."""

    name: str
    spans: Sequence[tuple[int, int, int | None]]


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture. `table` names the columns of its table, which also describe the save under the cursor.

    A picture over steps shows committed saves, of each step the last one. A picture over time shows all events. In a
    `stacked` picture, each series is drawn on top of the previous ones.
    """

    name: str
    title: str
    caption: str
    x: Literal["step", "time"]
    series: Sequence[Series]
    table: Sequence[str]
    stacked: bool = False
    lanes: Sequence[GroupLane] | None = None


def pictures_of(run: RunColumns, best: Sequence[Best] = ()) -> list[Picture]:
    """The pictures of one run: its saves, their costs, and the storage that they use."""
    made = (_timeline(run), _costs(run), _sizes(run), _borrowing(run), _records(run, best), _left(run), _ranks(run))
    return [*chain.from_iterable(made)]


# --- saves --------------------------------------------------------------------------------------------------------


def _timeline(run: RunColumns) -> Iterator[Picture]:
    rows = {kind: run.rows_of(kind) for kind in ("save", "failed", "skipped", "restore", "rollback", "retention")}
    rows["bad"] = tuple(filter(run.is_bad, run.saves))
    marks: list[tuple[str, str, Look, Colour]] = [
        ("committed", "save", "dot", "commit"),
        ("failed", "failed", "cross", "failed"),
        ("skipped", "skipped", "triangle", "skipped"),
        ("marked bad", "bad", "cross", "skipped"),
        ("restored", "restore", "ring", "restored"),
        ("rolled back", "rollback", "diamond", "deleted"),
    ]
    spans: list[tuple[str, Colour]] = [("call", "stall"), ("stage", "stage"), ("write", "write"), ("commit", "commit")]
    is_measured = bool(run.known("total_seconds"))
    series = [
        *(Series(label, "step", "span", colour, rows["save"]) for label, colour in spans if is_measured),
        *(Series(label, "step", look, colour, rows[kind]) for label, kind, look, colour in marks if rows[kind]),
    ]
    if not any(rows.values()):
        return
    lost = [
        f"{number:,} {word}"
        for number, word in ((len(rows["failed"]), "failed"), (run.num_skipped, "skipped"))
        if number
    ]
    others = f"; {' and '.join(lost)} beside them" if lost else "; none failed"
    zoomed = " Zoom in to see the call, staging, writing and commit of each." if is_measured else ""
    yield Picture(
        "timeline",
        "Saves over time",
        f"{counted(len(rows['save']), 'save')} committed{others}.{zoomed} Where the steps go down, the training went "
        "back to an earlier step; a gap means that nothing was saved.",
        "time",
        series,
        ("step", "kind", "time", "total_seconds", "num_bytes", "about"),
    )


def _costs(run: RunColumns) -> Iterator[Picture]:
    if totals := run.known("total_seconds"):
        row, slowest = max(totals, key=_value)
        series = [
            Series("committed", "total_seconds", "area", "commit"),
            Series("archives written", "archived", "area", "write"),
            Series("staged", "stage_seconds", "line", "stage"),
            Series("call returned", "call_seconds", "area", "stall"),
        ]
        yield Picture(
            "phases",
            "From the call to the commit",
            f"Half of the saves were committed within {shown_seconds(median(map(_value, totals)))} of the call; "
            f"the slowest took {shown_seconds(slowest)}, at {_step(run, row)}.",
            "step",
            [one for one in series if run.known(one.column)],
            (
                *("step", "time", "num_bytes", "call_seconds", "stage_seconds", "write_seconds", "commit_seconds"),
                *("total_seconds", "bandwidth", "retries", "fate"),
            ),
        )
    if stalls := run.known("stall_seconds"):
        row, longest = max(stalls, key=_value)
        middle = median(map(_value, stalls))
        yield Picture(
            "stall",
            "Stall",
            f"A save held the training up for {shown_seconds(middle)} at the median, and for {shown_seconds(longest)} "
            f"at the most, at {_step(run, row)}. Together: {shown_seconds(sum(map(_value, stalls)))}.",
            "step",
            [
                Series("stall", "stall_seconds", "line", "stall"),
                Series("median", "stall_seconds", "dashes", "reference", level=middle),
            ],
            ("step", "time", "stall_seconds", "call_seconds", "fate"),
        )
    if rates := run.known("bandwidth"):
        row, best = max(rates, key=_value)
        yield Picture(
            "bandwidth",
            "Bandwidth",
            f"Bytes per second from the call until the commit: {shown_rate(median(map(_value, rates)))} at the median. "
            f"The dashes are the best of this run, {shown_rate(best)}, at {_step(run, row)}; saves far below them have "
            "waited.",
            "step",
            [
                Series("bandwidth", "bandwidth", "line", "write"),
                Series("best of this run", "bandwidth", "dashes", "reference", level=best),
            ],
            ("step", "time", "bandwidth", "num_bytes", "total_seconds", "retries"),
        )


def _sizes(run: RunColumns) -> Iterator[Picture]:
    sizes = run.known("num_bytes")
    if not any(map(_value, sizes)):
        return
    row, newest = sizes[-1]
    columns = [f"group {number}" for number in range(len(run.groups))]
    parts = [
        f"{run.columns[column].title} {reports.sized(_float(value))}"
        for column in columns
        if (value := run.columns[column].values[row])
    ]
    # The groups of an event are those of rank 0, but its size is the size of all ranks.
    num_ranks = run.events[row]["world_size"] or 1
    of_groups = spec.some_of(parts, 4)
    of_groups = of_groups and (f", and of that rank 0: {of_groups}" if num_ranks > 1 else f": {of_groups}")
    has_ranks = any((run.events[saved]["world_size"] or 1) > 1 for saved in run.saves)
    stacked = [
        Series(run.columns[column].title, column, "area", number=number) for number, column in enumerate(columns)
    ]
    yield Picture(
        "sizes",
        "Size by entry of the state" + (", as rank 0 wrote them" if has_ranks else ""),
        f"The last save wrote {reports.sized(newest)}{f' on {num_ranks:,} ranks' if num_ranks > 1 else ''}{of_groups}. "
        "A borrowed group is not written again.",
        "step",
        stacked or [Series("size", "num_bytes", "area", "write")],
        ("step", "time", "num_bytes", *columns, "borrowed", "unchanged"),
        stacked=bool(stacked),
    )


def _borrowing(run: RunColumns) -> Iterator[Picture]:
    borrowers = [row for row in run.saves if run.events[row]["borrowed"]]
    if not borrowers:
        return
    newest = run.events[borrowers[-1]]
    loans = ", ".join(f"{group} of step {step:,}" for group, step in [*newest["borrowed"].items()][:4])
    yield Picture(
        "borrowing",
        "Borrowed groups",
        f"{len(borrowers):,} of {counted(len(run.saves), 'save')} did not write a group that had not changed. Step "
        f"{newest['step']:,} borrows {loans}. A full bar is a group that was written, a hollow one is borrowed.",
        "step",
        [Series("written", "step", "area", "write"), Series("borrowed", "step", "hollow", "write")],
        ("step", "time", "borrowed", "unchanged", "num_bytes"),
        lanes=lanes_of([run.events[row] for row in run.saves]),
    )


def lanes_of(saves: Sequence[Mapping[str, Any]]) -> list[GroupLane]:
    """The groups that these saves borrowed at least once. A span ends where the lender changes."""
    names = dict.fromkeys(group for save in saves for group in save["borrowed"])
    lanes = []
    for name in names:
        spans: list[tuple[int, int, int | None]] = []
        for save in sorted(saves, key=lambda one: one["step"]):
            if name not in save["borrowed"] and name not in save["groups"]:
                continue
            lender = save["borrowed"].get(name)
            if spans and spans[-1][2] == lender:
                spans[-1] = (spans[-1][0], save["step"], lender)
            else:
                spans.append((save["step"], save["step"], lender))
        lanes.append(GroupLane(name, spans))
    return lanes


# --- records ------------------------------------------------------------------------------------------------------


def _records(run: RunColumns, best: Sequence[Best]) -> Iterator[Picture]:
    by_title = {one.metric: one for one in best}
    drawn = [name for name in run.entries if run.columns[name].unit == "number"]
    chosen = [name for name in drawn if run.columns[name].title in by_title]
    for name in [*chosen, *(one for one in drawn if one not in chosen)][:MAX_RECORDS]:
        yield _record(run, name, by_title.get(run.columns[name].title))


def _record(run: RunColumns, name: str, best: Best | None) -> Picture:
    title, values = run.columns[name].title, run.known(name)
    sound = [one for one in values if not run.is_bad(one[0])] or values
    ordered = sorted(
        sound, key=lambda one: (one[1], -run.events[one[0]]["step"]), reverse=best is not None and best.mode == "max"
    )
    marked = ordered[: best.num_steps if best else 1]
    word = "best" if best else "lowest"
    row, value = marked[0]
    kept = [row for row, _ in values if run.events[row]["kept"]]
    also = "" if best else f", highest {ordered[-1][1]:.5g}"
    series = [Series(title, name, "line", "plain")]
    if len(kept) < len(values):
        series.append(Series("kept", name, "dot", "kept", kept))
    series.append(Series(word, name, "ring", "best", [row for row, _ in marked]))
    return Picture(
        f"record {name}",
        f"Record: {title}",
        f"{word.capitalize()} {value:.5g} at {_step(run, row)}{also}; {values[-1][1]:.5g} in the last save. "
        f"{len(kept):,} of {counted(len(values), 'step')} are kept.",
        "step",
        series,
        ("step", "time", name, *(other for other in run.entries if other != name), "fate"),
    )


# --- storage, ranks -----------------------------------------------------------------------------------------------


def _left(run: RunColumns) -> Iterator[Picture]:
    written = run.columns["written"].values
    if run.saves and written[-1]:
        num_kept = sum(bool(run.events[row]["kept"]) for row in run.saves)
        stored = run.columns["stored"].values[-1]
        yield Picture(
            "storage",
            "Space, and what retention saves",
            f"{num_kept:,} of {counted(len(run.saves), 'save')} are kept, {reports.sized(_float(stored))} of the "
            f"{reports.sized(_float(written[-1]))} that were written. The area is what the run takes, the dashes what "
            "it would take if nothing were deleted.",
            "time",
            [
                Series("written so far", "written", "dashes", "reference"),
                Series("on storage", "stored", "area", "kept"),
            ],
            ("step", "kind", "time", "num_bytes", "stored", "written", "about"),
        )
    if free := run.known("free_bytes"):
        row, least = min(free, key=_value)
        yield Picture(
            "free",
            "Free space",
            f"{reports.sized(free[-1][1])} were free after the last save; the least was {reports.sized(least)}, at "
            f"{_step(run, row)}.",
            "time",
            [Series("free", "free_bytes", "area", "kept")],
            ("step", "time", "free_bytes", "num_bytes"),
        )


def _ranks(run: RunColumns) -> Iterator[Picture]:
    if slowest := run.known("slowest_rank_seconds"):
        middles = dict(run.known("median_rank_seconds"))
        gaps = [slow - middles[row] for row, slow in slowest if row in middles]
        often = Counter(map(_value, run.known("slowest_rank"))).most_common(1)
        worst = f" Rank {often[0][0]} was the slowest most often, in {counted(often[0][1], 'save')}." if often else ""
        after = shown_seconds(median(gaps)) if gaps else ""
        late = f"The slowest rank's archive was durable {after} after the median rank's, at the median." if gaps else ""
        yield Picture(
            "ranks",
            "Spread of the ranks",
            f"{late}{worst}",
            *_of_ranks("slowest", "slowest_rank", "median_rank_seconds", "plain"),
        )
    if stalls := run.known("most_stalled_rank_seconds"):
        row, longest = max(stalls, key=_value)
        rank = run.columns["most_stalled_rank"].values[row]
        yield Picture(
            "rank stalls",
            "Stall of the ranks",
            f"Training waits for its slowest rank: the longest stall was {shown_seconds(longest)}, of rank {rank} at "
            f"{_step(run, row)}.",
            *_of_ranks("most stalled", "most_stalled_rank", "median_rank_stall_seconds", "stall"),
        )


def _of_ranks(word: str, rank: str, middle: str, colour: Colour) -> tuple[Literal["step"], list[Series], list[str]]:
    """The last fields of a picture with two lines: the worst rank, and the median rank."""
    lines = [Series(f"{word} rank", f"{rank}_seconds", "line", colour)]
    lines.append(Series("median rank", middle, "line", "reference"))
    return "step", lines, ["step", "time", "world_size", rank, f"{rank}_seconds", middle]


# --- several runs -------------------------------------------------------------------------------------------------


def comparison_of(runs: Sequence[RunColumns]) -> Iterator[Picture]:
    """The pictures that compare runs, with a line for each."""
    for name, title, caption in (
        ("stall_seconds", "Stall", "How long each save held the training up. Lower is better."),
        ("bandwidth", "Bandwidth", "Bytes per second from the call until the commit. Higher is better."),
        ("num_bytes", "Size", "The bytes that each save wrote."),
    ):
        series = [_line(run, number, name) for number, run in enumerate(runs) if run.known(name)]
        if series:
            yield Picture(f"compared {name}", title, caption, "step", series, ())
    titles = Counter(run.columns[name].title for run in runs for name in run.entries if _is_number(run, name))
    for title, _ in titles.most_common(MAX_RECORDS):
        series = [
            _line(run, number, name)
            for number, run in enumerate(runs)
            for name in run.entries
            if _is_number(run, name) and run.columns[name].title == title
        ]
        yield Picture(f"compared record {title}", f"Record: {title}", "The same entry of all runs.", "step", series, ())


def _is_number(run: RunColumns, name: str) -> bool:
    return run.columns[name].unit == "number"


def _line(run: RunColumns, number: int, column: str) -> Series:
    return Series(run.name, column, "line", number=number, run=number)


def _step(run: RunColumns, row: int) -> str:
    return f"step {run.events[row]['step']:,}"


def _float(value: Any) -> float:
    return float(value or 0)
