"""The output of the command: tables for people, or one JSON document for programs.

In: rows of values. Out: text on stdout. Knows nothing of: checkpoints.

Text from a checkpoint never reaches a terminal raw: each cell, line and note is escaped here, and rich's markup is not
read. The module rich is imported only for output on a terminal, since its import takes longer than `ls` itself.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar

from ...plumbing import reports, timing

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")

# Exit statuses, besides 0 and the status of Ctrl-C.
NO: Final = 1
USAGE: Final = 2
STORAGE: Final = 74  # EX_IOERR of sysexits.h

# The version of the JSON documents. Later versions only add keys.
JSON_VERSION: Final = 1
# The minimum width of the last column of a table.
_FOLDED: Final = 16


class Answer(Exception):
    """A negative answer, or a wrong call: its text for stderr, and the exit status.

    Any function of the command may raise it, so docstrings do not mention it.
    """

    def __init__(self, text: str, status: int = NO) -> None:
        super().__init__(text)
        self.status = status


class _TableColumn(NamedTuple):
    """A column of a table. The first text is its name."""

    texts: Sequence[str]
    is_right: bool


def print_table(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> None:
    """Print a table without lines. A column whose name begins with ">" is aligned right.

    None is an empty cell, and columns of empty cells are left out. Only if the terminal is too narrow, rich lays the
    table out, which takes seconds for thousands of rows.
    """
    table = _columns_of(columns, rows)
    if sys.stdout.isatty() and sum(_width(one.texts) for one in table) + 2 * len(table) > (to := terminal()).width:
        _print_folded(to, table)
        return
    head, *lines = _lines(table)
    print_text(head, "bold")
    sys.stdout.writelines(f"{line}\n" for line in lines)


def table_lines(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """The lines of a table as `print_table` prints it. The first line has the names of the columns."""
    return _lines(_columns_of(columns, rows))


def _columns_of(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> list[_TableColumn]:
    table = []
    for name, *cells in zip(columns, *rows, strict=True):
        texts = ["" if one is None else escaped(str(one)) for one in cells]
        if any(texts):
            table.append(_TableColumn([escaped(name.removeprefix(">")), *texts], name.startswith(">")))
    return table


def _lines(table: Sequence[_TableColumn]) -> list[str]:
    aligned = (_aligned(texts, _width(texts), is_right) for texts, is_right in table)
    return ["  ".join(row).rstrip() for row in zip(*aligned, strict=True)]


def print_text(text: str, style: str = "") -> None:
    """Print a line of text without wrapping it. `style` is used on a terminal only."""
    text = escaped(text)
    if not sys.stdout.isatty():
        sys.stdout.write(f"{text}\n")
        return
    from rich.text import Text

    terminal().print(Text(text, style=style), soft_wrap=True)


def terminal() -> Console:
    """A console for the terminal at stdout. NO_COLOR in the environment turns colours off."""
    from rich.console import Console

    return Console(no_color="NO_COLOR" in os.environ, highlight=False)


def _width(texts: Sequence[str]) -> int:
    """The width of the widest of these texts, in columns of a terminal."""
    if all(map(str.isascii, texts)):
        return max(map(len, texts))
    from rich.cells import cell_len

    return max(map(cell_len, texts))


def _aligned(texts: Sequence[str], width: int, is_right: bool) -> Iterator[str]:
    """The texts padded with spaces to this many columns of a terminal."""
    if all(map(str.isascii, texts)):
        return map(str.rjust if is_right else str.ljust, texts, repeat(width))
    from rich.cells import cell_len

    spaces = (" " * (width - cell_len(text)) for text in texts)
    return (space + text if is_right else text + space for text, space in zip(texts, spaces, strict=True))


def _print_folded(to: Console, table: Sequence[_TableColumn]) -> None:
    """Print columns, of which the last wraps onto several lines where necessary.

    If too little width is left for the last column, each cell is printed as a line of its own, after its column's name.
    """
    if to.width - sum(_width(column.texts) + 2 for column in table[:-1]) < _FOLDED:
        _print_rows(to, [*zip(*(column.texts for column in table), strict=True)])
        return
    from rich.table import Table
    from rich.text import Text

    folded = Table(box=None, pad_edge=False, header_style="bold")
    for column in table:
        align: Literal["left", "right"] = "right" if column.is_right else "left"
        folded.add_column(column.texts[0], justify=align, overflow="fold", no_wrap=column is not table[-1])
    for row in [*zip(*(column.texts for column in table), strict=True)][1:]:
        folded.add_row(*map(Text, row))
    to.print(folded)


def _print_rows(to: Console, rows: Sequence[Sequence[str]]) -> None:
    """Print each row after the one of names as a line with its first text, and an indented line for each other text
    that is not empty.
    """
    from rich.text import Text

    (head, *others), *rows = rows
    width = max(map(len, others), default=0)
    for first, *texts in rows:
        to.print(Text(f"{head} {first}".strip(), style="bold"), soft_wrap=True)
        for name, text in zip(others, texts, strict=True):
            if text:
                to.print(Text(f"  {name:{width}}  {text}"), soft_wrap=True)


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar of bytes on stderr, if that is a terminal. Any thread may call the result with new bytes."""
    if not sys.stderr.isatty() or not total:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(label, total=total)
        yield lambda num_bytes: bars.advance(bar, num_bytes)


def print_note(text: str) -> None:
    """Print a note on stderr, since a program may read stdout."""
    print(f"note: {escaped(text)}", file=sys.stderr)


# The indentation of documents. Only the thread of the command changes it.
_indent: int | None = 1


@contextmanager
def documents_in_lines() -> Iterator[None]:
    """Print each document of the block on one line."""
    global _indent
    _indent = None
    try:
        yield
    finally:
        _indent = 1


def print_json(kind: str, document: Mapping[str, Any], *, in_line: bool = False) -> None:
    """Print one JSON document. With `in_line`, it is one line of a stream of documents."""
    whole = {"version": JSON_VERSION, "kind": kind, **document}
    print(as_json_text(whole, indent=None if in_line else _indent), flush=True)


def as_json_text(value: Any, *, indent: int | None = None) -> str:
    """A value as JSON in ASCII, which cannot control a terminal. A dataclass becomes an object with its fields, or the
    result of its `as_json`. NaN and infinities become texts.
    """
    return json.dumps(_finite(value), ensure_ascii=True, indent=indent)


def _finite(value: Any) -> Any:
    if is_dataclass(value):
        own = getattr(value, "as_json", None)
        value = own() if own else {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [*map(_finite, value)]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def if_known(value: T | None, shown: Callable[[T], str]) -> str | None:
    """The shown form of a value, or None for None."""
    return None if value is None else shown(value)


def counted(number: int, word: str) -> str:
    """A number of things, such as "1 name" or "1,200 names"."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def in_table(num_bytes: int) -> str:
    """A size for a column of a table, with a short unit."""
    return reports.sized(num_bytes).replace(" bytes", " B")


def escaped(text: str) -> str:
    """A text with escapes for all characters that are not printable, since a terminal may act upon them."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape", "surrogatepass").decode() for one in text)


def age(created: float, now: float) -> str:
    """The time since `created`, such as "3 h". The date if that is more than 30 days ago, or in the future."""
    return span(now - created) if 0 <= now - created <= 30 * 86400 else timing.shown_time(created)


def span(seconds: float) -> str:
    """A duration for people, such as "3 h"."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def shown_seconds(seconds: float) -> str:
    """A short duration for people, such as "3.2 ms"."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.0f} µs"


def shown_rate(bytes_per_second: float) -> str:
    """A bandwidth for people."""
    return f"{reports.sized(bytes_per_second)}/s"


def shown_hours(seconds: float) -> str:
    """A long duration for people, such as "3.25 h"."""
    return f"{seconds / 3600:,.2f} h" if seconds >= 3600 else shown_seconds(seconds)


def mark_in_words(kind: str, note: str) -> str:
    """The mark of a step, as all commands show it: "bad: loss is nan"."""
    return f"{kind}: {note}" if note else kind


def short(value: Any) -> str:
    """A value of a record in few characters."""
    if isinstance(value, float):
        return f"{value:.5g}"
    return (value if isinstance(value, str) else json.dumps(value))[:40]
