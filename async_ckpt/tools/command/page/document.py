"""The text of the page: one HTML file that loads nothing else.

In: runs as columns, and pictures. Out: HTML, as bytes. Knows nothing of: storage, uPlot's calls.

The summary, the sentences and the failures are HTML that any browser shows. The values of the pictures are compressed
JSON, which `page.js` draws and puts into tables. Text of a run is never markup here. The page's policy allows only the
two scripts whose digests it names, and no loading.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any, Final

from ....plumbing import events as run_events
from ....plumbing import timing
from ..listing import Best
from ..output import counted, shown_hours
from ..run_places import durable_steps
from .columns import RunColumns, Value, listed
from .pictures import Picture, comparison_of, pictures_of
from .summary import facts_of

_ASSETS: Final = Path(__file__).parent / "assets"
# How many of the newest failures the HTML has. The table of the first picture has all of them.
_LOSSES: Final = 20
_STARTS: Final = 50
# The parts of the time of a run, with their names on the page.
PARTS: Final = {
    "trained": "training",
    "stall": "stalls",
    "slower": "slower steps",
    "restore": "restores",
    "redone": "done again",
}


def page_of(runs: Sequence[RunColumns], now: float, best: Sequence[Best] = ()) -> bytes:
    """The page of these runs. `now` is in seconds since the epoch."""
    several = len(runs) > 1
    compared = [*comparison_of(runs)] if several else []
    pictures: list[tuple[int | None, Picture]] = [(None, one) for one in compared]
    body = [_comparison(runs, compared, now)] if several else []
    for number, run in enumerate(runs):
        own = pictures_of(run, best)
        body.append(_run(run, number, own, now, first=len(pictures), several=several))
        pictures += [(number, one) for one in own]
    title = counted(len(runs), "run") if several else runs[0].name
    return _document(title, now, body, _packed(runs, pictures)).encode(errors="replace")


def _document(title: str, now: float, body: Iterable[str], data: str) -> str:
    scripts = [_asset("uPlot.iife.min.js"), _asset("page.js")]
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}"
    licence = escape(_asset("uPlot.LICENSE.txt"), quote=False)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}: checkpoints</title>
<style>{_asset("uPlot.min.css")}
{_asset("page.css")}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p>The checkpoints of a training at {escape(timing.shown_time(now))}.</p>
</header>
<main>
<noscript><p>The pictures and their tables need JavaScript. The facts and sentences do without.</p></noscript>
{"".join(body)}</main>
<footer>
<details><summary>Made by async-ckpt page, with uPlot</summary><pre>{licence}</pre></details>
</footer>
<script type="text/plain" id="data">{data}</script>
<script>{scripts[0]}</script>
<script>{scripts[1]}</script>
</body>
</html>
"""


def _comparison(runs: Sequence[RunColumns], pictures: Sequence[Picture], now: float) -> str:
    facts = [facts_of(run, now) for run in runs]
    rows = "".join(
        f'<tr><th scope=row><a href="#run{number}">{escape(run.name)}</a></th>'
        + "".join(f"<td>{escape(value)}</td>" for value in of_run.values())
        + "</tr>\n"
        for number, (run, of_run) in enumerate(zip(runs, facts, strict=True))
    )
    figures = "".join(_figure(number, picture, 3) for number, picture in enumerate(pictures))
    return f"""<section>
<h2>Side by side</h2>
{_table("The runs side by side", ("run", *facts[0]), rows, "runs")}
{figures}</section>
"""


def _run(run: RunColumns, number: int, pictures: Sequence[Picture], now: float, *, first: int, several: bool) -> str:
    facts = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>\n" for name, value in facts_of(run, now).items()
    )
    heading = f"<h2>{escape(run.name)}</h2>\n" if several else ""
    level = 3 if several else 2
    figures = "".join(_figure(first + at, picture, level) for at, picture in enumerate(pictures))
    return f"""<section class="run" id="run{number}">
{heading}<dl class="facts">
{facts}</dl>
{_goodput(run, level)}{_places(run, level)}{_losses(run, level)}<div class="range" data-run="{number}"></div>
{figures}</section>
"""


def _goodput(run: RunColumns, level: int) -> str:
    """How the time of a run was spent: a stacked bar for each start, and a table of the same seconds."""
    spent = run_events.goodput_of(run.events)
    if not spent.total_seconds:
        return ""
    starts = [one for one in spent.starts if one.total_seconds]
    bars = "".join(_bar(one) for one in starts[-_STARTS:])
    key = "".join(f"<li><i class={part}>■</i>{name}</li>" for part, name in PARTS.items())
    rows = "".join(_spent_row(one, escape(timing.shown_time(one.opened or 0))) for one in starts[-_STARTS:])
    rows += _spent_row(spent, "all")
    intervals = [one["interval"] for one in run.events if one.get("interval")]
    interval = f" The last interval between saves was {escape(intervals[-1])}." if intervals else ""
    more = f" The last {_STARTS} of {len(starts):,} starts." if len(starts) > _STARTS else ""
    share, hours = f"{spent.shares['trained']:.1%}", escape(shown_hours(spent.total_seconds))
    name = "What the time went to"
    return f"""<section class="goodput">
<h{level}>{name}</h{level}>
<p>{share} of {hours} was training that counts, in {counted(len(starts), "start")}.
{spent.num_failed:,} of them lost work.{more}{interval}</p>
<ul class="key">{key}</ul>
{bars}<details><summary>Table</summary>{_table(name, ("start", *PARTS.values()), rows)}</details>
</section>
"""


def _bar(spent: run_events.Goodput) -> str:
    """The bar of one start, as SVG."""
    parts, at = "", 0.0
    for part, share in spent.shares.items():
        parts += f'<rect class="{part}" x="{at:.2f}" width="{100 * share:.2f}" height="1"/>'
        at += 100 * share
    return (
        f'<svg class="bar" role="img" viewBox="0 0 100 1" preserveAspectRatio="none" aria-label="{escape(str(spent))}">'
        f"<title>{escape(str(spent))}</title>{parts}</svg>\n"
    )


def _spent_row(spent: run_events.Goodput, name: str) -> str:
    cells = "".join(f"<td class=figure>{escape(shown_hours(spent.seconds[part]))}</td>" for part in PARTS)
    return f"<tr><th scope=row>{name}</th>{cells}</tr>\n"


def _places(run: RunColumns, level: int) -> str:
    """The places of a run that has several, with the steps of each."""
    if not run.places:
        return ""
    durable = (
        f"{where}: {'no step' if step is None else f'step {step:,}'}"
        for where, step in durable_steps(run.places).items()
    )
    rows = "".join(
        f"<tr><td class=long>{escape(one.described)}</td><td>{max(one.steps, default='')}</td>"
        f"<td>{len(one.steps):,}</td>"
        f"<td class=long>{escape(listed(sorted(one.passed_over)) if one.passed_over else '')}</td></tr>\n"
        for one in run.places
    )
    return f"""<section class="places">
<h{level}>Where the steps are</h{level}>
<p>Durable {escape(", ".join(durable))}.</p>
{_table("Where the steps are", ("place", "newest", "steps", "passed over"), rows)}
</section>
"""


def _losses(run: RunColumns, level: int) -> str:
    """The saves that failed or were skipped, the newest first."""
    losses = run.rows_of("failed", "skipped")[::-1]
    if not losses:
        return ""
    rows = ""
    for row in losses[:_LOSSES]:
        one, about = run.events[row], escape(str(run.columns["about"].values[row]))
        step, when = "" if one["step"] is None else f"{one['step']:,}", escape(timing.shown_time(one["time"]))
        rows += f"<tr><td>{step}</td><td>{when}</td><td class=long>{about}</td></tr>\n"
    more = f"<p>The newest {_LOSSES} of {len(losses):,}.</p>\n" if len(losses) > _LOSSES else ""
    return f"""<section class="losses">
<h{level}>Saves that failed or were skipped</h{level}>
{more}{_table("Saves that failed or were skipped", ("step", "when", "details"), rows)}
</section>
"""


def _table(label: str, columns: Iterable[str], rows: str, kind: str = "") -> str:
    heads = "".join(f"<th scope=col>{escape(name)}</th>" for name in columns)
    return f"""<div class="scroll" tabindex=0 role=region aria-label="{label}">
<table class="{kind}"><thead><tr>{heads}</tr></thead>
<tbody>
{rows}</tbody></table></div>"""


def _figure(number: int, picture: Picture, level: int) -> str:
    """The element that a picture is drawn into. `number` is its index among all pictures of the page."""
    return f"""<figure id="picture{number}" data-picture="{escape(picture.name)}">
<figcaption><h{level}>{escape(picture.title)}</h{level}>
<p>{escape(picture.caption)}</p></figcaption>
<div class="chart"></div>
<details class="rows"><summary>Table</summary></details>
</figure>
"""


def _packed(runs: Sequence[RunColumns], pictures: Iterable[tuple[int | None, Picture]]) -> str:
    """The values of the pictures: compressed JSON, encoded as base64."""
    content = {
        "runs": [{"name": run.name, "saves": run.saves, "columns": _columns(run)} for run in runs],
        "pictures": [_without_none({"run": number, **asdict(picture)}) for number, picture in pictures],
    }
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def _columns(run: RunColumns) -> dict[str, dict[str, Any]]:
    """The columns that have a value."""
    return {
        name: {"title": column.title, "unit": column.unit, **_values(column.values)}
        for name, column in run.columns.items()
        if any(value not in (None, "") for value in column.values)
    }


def _values(values: Sequence[Value]) -> dict[str, Sequence[Value]]:
    """The values of a column. Whole numbers are stored as differences from the previous one, which compress better."""
    differences: list[Value] = []
    before = 0
    for value in values:
        if value is None:
            differences.append(None)
        elif isinstance(value, int):
            differences.append(value - before)
            before = value
        else:
            return {"values": values}
    return {"differences": differences}


def _without_none(value: Any) -> Any:
    """A value without the fields that are None. JavaScript reads a missing field as undefined."""
    if isinstance(value, Mapping):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [*map(_without_none, value)]
    return value


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8").strip()
