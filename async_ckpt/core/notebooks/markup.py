"""Tables and small pictures as HTML, for the values that notebooks show.

In: texts and numbers. Out: HTML without scripts, page styles, or links. Knows nothing of: checkpoints.

Every text is escaped here, since names and messages may come from untrusted checkpoints. Pictures use the colour of the
surrounding text, so they also fit a dark page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

_WIDTH: Final = 480
_HEIGHT: Final = 40
_BAR_HEIGHT: Final = 14
_LABEL_WIDTH: Final = 90


def _escaped(text: str) -> str:
    from html import escape  # lazy: its table of entities takes milliseconds, and no save needs it

    return escape(text)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table. If `columns` is empty, the first text of each row is its heading."""
    head = "".join(f"<th>{_escaped(column)}</th>" for column in columns)
    lines = [f"<thead><tr>{head}</tr></thead>"] if columns else []
    for first, *texts in rows:
        tag = "td" if columns else "th"
        cells = [f"<{tag}>{_escaped(first)}</{tag}>", *(f"<td>{_escaped(text)}</td>" for text in texts)]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table>{''.join(lines)}</table>"


def paragraph(text: str) -> str:
    """A paragraph of text."""
    return f"<p>{_escaped(text)}</p>"


def line(title: str, values: Sequence[float]) -> str:
    """A line chart of the values, from left to right, with zero at the bottom. `title` is its description."""
    most = max(values, default=0.0) or 1.0
    step = _WIDTH / max(1, len(values) - 1)
    points = " ".join(
        f"{step * at:.1f},{_HEIGHT - 2 - value / most * (_HEIGHT - 4):.1f}" for at, value in enumerate(values)
    )
    drawing = f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.5"/>'
    return _picture(title, _HEIGHT, drawing)


def bars(title: str, lengths: Sequence[tuple[str, float]]) -> str:
    """A bar chart with one bar below the other, each labelled by its name and scaled to the largest number."""
    most = max((length for _, length in lengths), default=0.0) or 1.0
    drawn = []
    for at, (name, length) in enumerate(lengths):
        top = at * (_BAR_HEIGHT + 4)
        width = max(1.0, length / most * (_WIDTH - _LABEL_WIDTH))
        drawn.append(
            f'<text x="0" y="{top + 11}" font-size="11" fill="currentColor">{_escaped(name[:14])}</text>'
            f'<rect x="{_LABEL_WIDTH}" y="{top}" width="{width:.1f}" height="{_BAR_HEIGHT}" '
            'fill="currentColor" opacity="0.5"/>'
        )
    return _picture(title, len(lengths) * (_BAR_HEIGHT + 4), "".join(drawn))


def _picture(title: str, height: int, drawing: str) -> str:
    label = _escaped(title)
    return (
        f'<svg role="img" aria-label="{label}" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}">'
        f"<title>{label}</title>{drawing}</svg>"
    )
