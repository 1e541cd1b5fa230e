"""The subcommand `watch`: the status of a run as a table that is redrawn, or as documents.

In: looks at a run. Out: text on a terminal, or JSON on stdout. Knows nothing of: where the status comes from.

On a terminal, the whole screen is drawn by one write, so that it does not flicker. Elsewhere, each look is printed
below the previous one. A store gets at most two requests per second.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Final

import typer

from .... import Place
from ....errors import StorageUnavailableError
from ....plumbing import events, reports, runs, timing
from ..output import (
    NO,
    USAGE,
    Answer,
    escaped,
    if_known,
    in_table,
    print_json,
    shown_rate,
    shown_seconds,
    span,
    table_lines,
    terminal,
)
from ..place_kinds import RUNS, kind_of, nothing_at, targets_of
from ..run_places import durable_steps
from .run_status import RunStatus, RunWatch, failure_of, look_at_trainer

_REQUESTS_PER_SECOND: Final = 2
_BARS: Final = "▁▂▃▄▅▆▇█"
_LEAST_WIDTH: Final = 40
_WIDTH: Final = 80  # of the sparklines without a terminal
_AGE: Final = re.compile(r"(\d+(?:\.\d+)?)(s|min|h|d)")
_UNITS: Final = {"s": 1, "min": 60, "h": 3600, "d": 86400}
_COLUMNS: Final = (">step", ">age", ">size", ">durable in", ">stall", ">bandwidth", "marks")


def show(places: Sequence[Place], *, once: bool, interval: float, older: str | None, as_json: bool) -> None:
    """Look and draw until Ctrl-C. With `once`, look a single time, and raise typer.Exit if there are warnings.

    Several runs have one line each. If the first look at a run fails, StorageUnavailableError is raised. Later failures
    are shown as warnings.
    """
    targets = [place for place, _ in targets_of(places, RUNS)]
    if not 0 < interval <= _UNITS["d"]:
        raise Answer(f"--interval is a number of seconds above 0, at most one day, not {interval:g}", USAGE)
    late_seconds = None if older is None else seconds_of(older)
    looks: list[Callable[[], RunStatus]] = []
    for place in targets:
        if _kind_of_run(place, once=once) == "trainer":
            looks.append(partial(look_at_trainer, place, late_seconds))
        else:
            looks.append(RunWatch(place, timing.wall_time, late_seconds).look)
    statuses = [look() for look in looks]
    if once:
        _print_documents(statuses, in_lines=len(statuses) > 1) if as_json else _print(statuses)
        if any(status.warnings for status in statuses):
            raise typer.Exit(NO)
        return
    is_remote = any(place.storage().remote for place in targets)
    printed = nullcontext(_print_documents if as_json else partial(_print, end="\n\n"))
    with _screen() if sys.stdout.isatty() and not as_json else printed as draw:
        while True:
            draw(statuses)
            num_requests = sum(status.num_requests for status in statuses)
            timing.TIMEKEEPER.sleep(max(interval, num_requests / _REQUESTS_PER_SECOND if is_remote else 0))
            statuses = [*map(_looked_again, looks, statuses)]


def _looked_again(look: Callable[[], RunStatus], last: RunStatus) -> RunStatus:
    try:
        return look()
    except StorageUnavailableError as error:
        return replace(last, warnings=(f"the storage does not answer: {error}",))


def seconds_of(text: str) -> float:
    """The seconds of an age such as "90s", "20min", "2h" or "1d"."""
    match = _AGE.fullmatch(text)
    if match is None:
        raise Answer(f"--older takes an age such as 90s, 20min, 2h or 1d, not {text!r}", USAGE)
    return float(match[1]) * _UNITS[match[2]]


def _kind_of_run(place: Place, *, once: bool) -> str:
    """The kind of a place. Refuses a place that has no run and cannot get one."""
    names = place.storage().names("")
    kind = kind_of(place, names)
    there = {
        "publication": "is a publication, not a run",
        "step": "is the folder of one step; name the root of its run",
    }
    if kind in there:
        raise Answer(f"{place.shown} {there[kind]}", USAGE)
    if kind in ("nothing", "checkpoint") and not runs.split_starts(sorted(names))[1] and (once or names):
        raise nothing_at(place)
    return kind


def _print(statuses: Sequence[RunStatus], end: str = "\n") -> None:
    """Print the lines of a look. On a terminal, they are cut to its width."""
    width = max(_LEAST_WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else None
    print("\n".join(lines_of(statuses, width)), end=end, flush=True)


def _print_documents(statuses: Sequence[RunStatus], *, in_lines: bool = True) -> None:
    for status in statuses:
        print_json("status", status.as_json(), in_line=in_lines)


@contextmanager
def _screen() -> Iterator[Callable[[Sequence[RunStatus]], None]]:
    """Show statuses on the whole terminal until the block ends. Call the result with the statuses."""
    from rich.live import Live
    from rich.text import Text

    with Live(console=terminal(), screen=True, auto_refresh=False) as live:

        def draw(statuses: Sequence[RunStatus]) -> None:
            width, height = terminal().size
            lines = lines_of(statuses, width)[:height]
            live.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"), refresh=True)

        yield draw


def lines_of(statuses: Sequence[RunStatus], width: int | None) -> list[str]:
    """The statuses as lines of at most `width` characters; with None, as for a pipe, lines are not cut."""
    lines = _lines_of_one(statuses[0], width or _WIDTH) if len(statuses) == 1 else _lines_of_several(statuses)
    lines = [*map(escaped, lines)]
    return [line if width is None or len(line) <= width else f"{line[: width - 1]}…" for line in lines]


def _lines_of_one(status: RunStatus, width: int) -> list[str]:
    lines = [status.place, *_newest(status), *(f"! {text}" for text in status.warnings), ""]
    if status.stalls:
        lines.append(f"stall      {sparkline(status.stalls, width // 2)}  {shown_seconds(status.stalls[-1])}")
    if status.bandwidths:
        lines.append(f"bandwidth  {sparkline(status.bandwidths, width // 2)}  {shown_rate(status.bandwidths[-1])}")
    if status.saves:
        rows = [_row(event, status.time, status.marks) for event in status.saves]
        head, *table = table_lines(_COLUMNS, rows)
        failures = ("" if event["kind"] == "save" else f"  failed: {failure_of(event)}" for event in status.saves)
        lines += ["", head, *map(str.__add__, table, failures)]
    return lines


def _lines_of_several(statuses: Sequence[RunStatus]) -> list[str]:
    """A line for each run, and below them the warnings, each with its run."""
    rows = []
    for status in statuses:
        doing = if_known(status.under_way, lambda seen: f"saves step {seen.step}")
        rows.append(
            (
                status.place,
                status.step,
                if_known(status.age_seconds, span),
                if_known(status.usual_seconds, _every),
                shown_seconds(status.stalls[-1]) if status.stalls else None,
                shown_rate(status.bandwidths[-1]) if status.bandwidths else None,
                "ended" if status.ended is not None else "!" if status.warnings else doing,
            )
        )
    columns = ("run", ">step", ">age", ">every", ">stall", ">bandwidth", "is")
    warnings = [f"! {text} ({status.place})" for status in statuses for text in status.warnings]
    return [*table_lines(columns, rows), *([""] if warnings else []), *warnings]


def sparkline(values: Sequence[float], most: int) -> str:
    """The last `most` values as bars, scaled from the smallest to the largest."""
    values = values[-most:]
    least, greatest = min(values), max(values)
    unit = (greatest - least) / (len(_BARS) - 1)
    return "".join(_BARS[round((value - least) / unit) if unit else 0] for value in values)


def _newest(status: RunStatus) -> list[str]:
    lines, usual = [], status.usual_seconds
    if status.step is not None and status.age_seconds is not None:
        every = "" if usual is None else f"; a save every {_every(usual)}"
        lines.append(f"step {status.step}, {span(status.age_seconds)} ago{every}")
    if status.places:
        durable = (f"{where}: {_of(step)}" for where, step in durable_steps(status.places).items())
        lines.append(f"durable {', '.join(durable)}")
        lines += [f"{_of(max(place.steps, default=None))} in {place.described}" for place in status.places]
    if status.ended is not None:
        lines.append(f"ended {span(max(0.0, status.time - status.ended))} ago")
    if (seen := status.under_way) is not None:
        of_all = "" if seen.total_bytes is None else f" of {reports.sized(seen.total_bytes)}"
        rate = "" if seen.bytes_per_second is None else f", {shown_rate(seen.bytes_per_second)}"
        lines.append(f"step {seen.step} under way: {reports.sized(seen.num_bytes)}{of_all}{rate}")
    if status.free_bytes is not None:
        lines.append(f"{reports.sized(status.free_bytes)} free")
    return lines


def _of(step: int | None) -> str:
    return "no step" if step is None else f"step {step}"


def _row(event: events.Event, now: float, marks: Mapping[int, str]) -> Sequence[object]:
    ago = span(max(0.0, now - event["time"]))
    if event["kind"] == "failed":
        return event["step"], ago, *[None] * 5
    return (
        event["step"],
        ago,
        if_known(event["num_bytes"], in_table),
        if_known(event["total_seconds"], shown_seconds),
        if_known(event["stall_seconds"], shown_seconds),
        if_known(events.bandwidth_of(event), shown_rate),
        marks.get(event["step"]),
    )


def _every(seconds: float) -> str:
    """The time between two saves, for people."""
    return shown_seconds(seconds) if seconds < 1 else span(seconds)
