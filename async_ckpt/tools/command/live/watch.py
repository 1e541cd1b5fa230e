"""The command `watch`: the status of a run as a table that is drawn anew, or as documents.

In: looks at a run. Out: text on a terminal, or JSON on stdout. Knows nothing of: where the status comes from.

On a terminal, the whole screen is drawn by one write, so that it does not flicker; elsewhere each look is printed below
the one before. A store is asked at most twice a second.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Final

import typer

from .... import Place
from ....errors import StorageUnavailableError
from ....plumbing import events, reports, runs, spans
from ..listing import kind_of, nothing_at
from ..screen import (
    JSON_VERSION,
    NO,
    USAGE,
    Answer,
    age,
    as_json_text,
    escaped,
    in_table,
    print_json,
    shown_seconds,
    table_lines,
    terminal,
)
from .run_status import RunStatus, RunWatch

_REQUESTS_PER_SECOND: Final = 2
_BARS: Final = "▁▂▃▄▅▆▇█"
_LEAST_WIDTH: Final = 40
_COLUMNS: Final = ("step", "age", "size", "durable in", "stall", "bandwidth")


def show(place: Place, *, once: bool, interval: float, as_json: bool) -> None:
    """Look and draw until Ctrl-C; with `once`, a single time.

    Raises:
        typer.Exit: the single look has warnings.
        Answer: there is no run.
        StorageUnavailableError: the first look has failed. A later one is shown as a warning.
    """
    if not interval > 0:
        raise Answer(f"--interval is a number of seconds above 0, not {interval:g}", USAGE)
    _refuse_other(place, once=once)
    watch = RunWatch(place, spans.wall_time)
    status = watch.look()
    if once:
        _draw_once(status, as_json=as_json)
        if status.warnings:
            raise typer.Exit(NO)
        return
    with _Screen() if sys.stdout.isatty() and not as_json else nullcontext(None) as screen:
        draw: Callable[[RunStatus], None] = _print_document if as_json else screen.draw if screen else _print
        while True:
            draw(status)
            spans.TIMEKEEPER.sleep(
                max(interval, status.num_requests / _REQUESTS_PER_SECOND if place.storage().remote else 0)
            )
            try:
                status = watch.look()
            except StorageUnavailableError as error:
                status = replace(status, warnings=(f"the storage does not answer: {error}",))


def _refuse_other(place: Place, *, once: bool) -> None:
    """Raise Answer unless there is a run, or may come to be one."""
    names = place.storage().names("")
    kind = kind_of(place, names)
    there = {
        "runs": "has several runs; name one of them",
        "publication": "is a publication, and no run",
        "step": "is the folder of one step; name the root of its run",
    }
    if kind in there:
        raise Answer(f"{place.shown} {there[kind]}", USAGE)
    if kind == "nothing" and not runs.split_starts(sorted(names))[1] and (once or names):
        raise nothing_at(place)


def _draw_once(status: RunStatus, *, as_json: bool) -> None:
    if as_json:
        print_json("status", status.as_json())
    else:
        print("\n".join(lines_of(status, _width())))


def _print(status: RunStatus) -> None:
    print("\n".join([*lines_of(status, _width()), ""]), flush=True)


def _print_document(status: RunStatus) -> None:
    print(as_json_text({"version": JSON_VERSION, "kind": "status", **status.as_json()}), flush=True)


def _width() -> int:
    return max(_LEAST_WIDTH, shutil.get_terminal_size().columns)


class _Screen:
    """A terminal whose whole screen shows one status, until the block ends."""

    def __init__(self) -> None:
        from rich.live import Live

        self._live = Live(console=terminal(), screen=True, auto_refresh=False)

    def __enter__(self) -> _Screen:
        self._live.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._live.__exit__(*raised)

    def draw(self, status: RunStatus) -> None:
        from rich.text import Text

        width, height = terminal().size
        lines = lines_of(status, width)[:height]
        self._live.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"), refresh=True)


def lines_of(status: RunStatus, width: int) -> list[str]:
    """The status as lines of at most `width` characters."""
    lines = [escaped(status.place), *_newest(status), *(f"! {escaped(text)}" for text in status.warnings), ""]
    if status.stalls:
        lines.append(f"stall      {sparkline(status.stalls, width // 2)}  {shown_seconds(status.stalls[-1])}")
    if status.bandwidths:
        lines.append(f"bandwidth  {sparkline(status.bandwidths, width // 2)}  {reports.sized(status.bandwidths[-1])}/s")
    if status.saves:
        rows = [_row(one, status.time) for one in status.saves]
        head, *table = table_lines(_COLUMNS, rows, right=_COLUMNS)
        lines += ["", head, *map(_with_failure, table, status.saves)]
    return [line if len(line) <= width else f"{line[: width - 1]}…" for line in lines]


def sparkline(values: Sequence[float], most: int) -> str:
    """The last of these values as bars, from the least to the greatest."""
    values = values[-most:]
    least, greatest = min(values), max(values)
    span = greatest - least
    return "".join(_BARS[round((value - least) / span * (len(_BARS) - 1)) if span else 0] for value in values)


def _newest(status: RunStatus) -> list[str]:
    lines, usual = [], status.usual_seconds
    if status.step is not None and status.created is not None:
        every = "" if usual is None else f"; a save every {shown_seconds(usual) if usual < 1 else _span(usual)}"
        shown = _span(status.age_seconds) if status.age_seconds is not None else age(status.created, status.time)
        lines.append(f"step {status.step}, {shown} ago{every}")
    if (seen := status.under_way) is not None:
        of_all = "" if seen.total_bytes is None else f" of {reports.sized(seen.total_bytes)}"
        rate = "" if seen.bytes_per_second is None else f", {reports.sized(seen.bytes_per_second)}/s"
        lines.append(f"step {seen.step} under way: {reports.sized(seen.num_bytes)}{of_all}{rate}")
    if status.free_bytes is not None:
        lines.append(f"{reports.sized(status.free_bytes)} free")
    return lines


def _row(one: events.Event, now: float) -> Sequence[str]:
    ago = _span(max(0.0, now - one["time"]))
    if one["kind"] == "failed":
        return str(one["step"]), ago, "", "", "", ""
    seconds, stall, bandwidth = one["total_seconds"], one["stall_seconds"], events.bandwidth_of(one)
    return (
        str(one["step"]),
        ago,
        "" if one["num_bytes"] is None else in_table(one["num_bytes"]),
        "" if seconds is None else shown_seconds(seconds),
        "" if stall is None else shown_seconds(stall),
        "" if bandwidth is None else f"{reports.sized(bandwidth)}/s",
    )


def _with_failure(line: str, one: events.Event) -> str:
    return line if one["kind"] == "save" else f"{line}  failed: {escaped(one['error'])}: {escaped(one['message'])}"


def _span(seconds: float) -> str:
    """An age for people, such as "3 h"."""
    return age(0.0, seconds) if 0 <= seconds <= 30 * 86400 else f"{seconds / 86400:.0f} d"
