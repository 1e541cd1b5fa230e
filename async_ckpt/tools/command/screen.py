"""The output of the command: tables for people, or one JSON document for programs.

In: rows of values. Out: text on stdout. Knows nothing of: checkpoints.

Nothing that a checkpoint contains reaches a terminal raw: control characters in names are escaped, and rich's markup
is not read. Only output on a terminal needs rich, which is imported there: it would take longer than `ls` itself.
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
from typing import TYPE_CHECKING, Any, Final, Literal

from ...plumbing import reports, timing

if TYPE_CHECKING:
    from rich.console import Console

# Exit statuses, beside 0 and that of Ctrl-C.
NO: Final = 1
USAGE: Final = 2
STORAGE: Final = 74  # EX_IOERR of sysexits.h

# The version of the JSON documents. Keys are only added to them.
JSON_VERSION: Final = 1
# The least width for the last column of a table.
_FOLDED: Final = 16


class Answer(Exception):
    """An answer that is no, or a wrong call: what is said of it on stderr, and the exit status."""

    def __init__(self, text: str, status: int = NO) -> None:
        super().__init__(text)
        self.status = status


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[str] = ()) -> None:
    """A table without lines; columns named in `right` are aligned there. Empty columns are left out.

    Only where a terminal is too narrow for it, rich lays it out: for thousands of rows that takes seconds.
    """
    table = _columns_of(columns, rows)
    if sys.stdout.isatty() and sum(map(_width, table)) + 2 * len(table) > (to := terminal()).width:
        _print_folded(to, table, right)
        return
    head, *lines = _lines(table, right)
    print_text(head, "bold")
    sys.stdout.writelines(f"{line}\n" for line in lines)


def table_lines(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[str] = ()) -> list[str]:
    """The lines of such a table, the first with the names of its columns."""
    return _lines(_columns_of(columns, rows), right)


def _columns_of(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """The columns that have a text, each with its name at the top."""
    cells = [[*columns], *map(list, rows)]
    return [column for column in zip(*cells, strict=True) if any(column[1:])]


def _lines(table: Sequence[Sequence[str]], right: Iterable[str]) -> list[str]:
    aligned = (_aligned(column, _width(column), column[0] in right) for column in table)
    return ["  ".join(row).rstrip() for row in zip(*aligned, strict=True)]


def print_text(text: str, style: str = "") -> None:
    """A line of text, as wide as it is; `style` is for terminals. Piped, there are no colours."""
    if not sys.stdout.isatty():
        sys.stdout.write(f"{text}\n")
        return
    from rich.text import Text

    terminal().print(Text(text, style=style), soft_wrap=True)


def terminal() -> Console:
    """The terminal that stdout is. With NO_COLOR, it has no colours."""
    from rich.console import Console

    return Console(no_color="NO_COLOR" in os.environ, highlight=False)


def _width(texts: Sequence[str]) -> int:
    """The number of columns of a terminal that the widest of these texts takes."""
    if all(map(str.isascii, texts)):
        return max(map(len, texts))
    from rich.cells import cell_len

    return max(map(cell_len, texts))


def _aligned(texts: Sequence[str], width: int, is_right: bool) -> Iterator[str]:
    """The texts with spaces, so that all take this many columns."""
    if all(map(str.isascii, texts)):
        return map(str.rjust if is_right else str.ljust, texts, repeat(width))
    from rich.cells import cell_len

    spaces = (" " * (width - cell_len(text)) for text in texts)
    return (space + text if is_right else text + space for text, space in zip(texts, spaces, strict=True))


def _print_folded(to: Console, table: Sequence[Sequence[str]], right: Iterable[str]) -> None:
    """Print columns of texts, each with its name at the top, of which the last takes several lines where it has to.

    Where nothing is left for that one, each row is printed as lines of a name and a text.
    """
    if to.width - sum(_width(column) + 2 for column in table[:-1]) < _FOLDED:
        _print_rows(to, table)
        return
    from rich.table import Table
    from rich.text import Text

    folded = Table(box=None, pad_edge=False, header_style="bold")
    for column in table:
        align: Literal["left", "right"] = "right" if column[0] in right else "left"
        folded.add_column(column[0], justify=align, overflow="fold", no_wrap=column is not table[-1])
    for row in [*zip(*table, strict=True)][1:]:
        folded.add_row(*map(Text, row))
    to.print(folded)


def _print_rows(to: Console, table: Sequence[Sequence[str]]) -> None:
    """Print each row as a line for its first text, and an indented one for each of the others that is not empty."""
    from rich.text import Text

    (head, *others), *rows = zip(*table, strict=True)
    width = max(map(len, others), default=0)
    for first, *texts in rows:
        to.print(Text(f"{head} {first}".strip(), style="bold"), soft_wrap=True)
        for name, text in zip(others, texts, strict=True):
            if text:
                to.print(Text(f"  {name:{width}}  {text}"), soft_wrap=True)


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, where that is a terminal, for so many bytes; it is advanced by calls, from any thread."""
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
    """A note on stderr, beside what a program may read on stdout."""
    print(f"note: {escaped(text)}", file=sys.stderr)


# How documents are printed now; the thread of the command alone changes it.
_indent: int | None = 1


@contextmanager
def documents_in_lines() -> Iterator[None]:
    """In the block, each document of several is one line."""
    global _indent
    _indent = None
    try:
        yield
    finally:
        _indent = 1


def print_json(kind: str, document: Mapping[str, Any], *, in_line: bool = False) -> None:
    """One document, and nothing else; `in_line` for one of a stream."""
    told = {"version": JSON_VERSION, "kind": kind, **document}
    print(as_json_text(told, indent=None if in_line else _indent), flush=True)


def as_json_text(value: Any, *, indent: int | None = None) -> str:
    """A value as JSON in ASCII, so that a terminal acts upon nothing in it. A row is an object with its fields, or what
    its `as_json` says; numbers that JSON does not have are texts.
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


def counted(number: int, word: str) -> str:
    """A number of things, such as "1 name" or "1,200 names"."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def in_table(num_bytes: int) -> str:
    """A size for the column of a table, whose units are short."""
    return reports.sized(num_bytes).replace(" bytes", " B")


def escaped(text: str) -> str:
    """A text from a checkpoint, with what a terminal would act upon as escapes."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape", "surrogatepass").decode() for one in text)


def age(created: float, now: float) -> str:
    """How long ago that was, such as "3 h"; the date beyond a month, and in the future."""
    seconds = now - created
    if seconds < 0 or seconds > 30 * 86400:
        return timing.shown_time(created)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def shown_seconds(seconds: float) -> str:
    """A short time for people, such as "3.2 ms"."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.0f} µs"


def shown_hours(seconds: float) -> str:
    """A long time for people, such as "3.25 h"."""
    return f"{seconds / 3600:,.2f} h" if seconds >= 3600 else shown_seconds(seconds)


def mark_in_words(kind: str, note: str) -> str:
    """The mark of a step, as all commands show it: "bad: loss is nan"."""
    return f"{kind}: {note}" if note else kind


def short(value: Any) -> str:
    """A value of a record in few characters."""
    if isinstance(value, float):
        return f"{value:.5g}"
    return escaped(value if isinstance(value, str) else json.dumps(value))[:40]
