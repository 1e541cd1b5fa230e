"""Draws docs/house.txt, the floors of the package and the way of the data through them, as docs/house.svg.

Run by hand when a room is added; `tests/test_layers.py` compares the text with the rooms, and the picture with the text.
"""

from __future__ import annotations

import html
import re
from itertools import pairwise
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
ROW, LINE, TOP = 30, 15, 46
COLUMNS = {"rooms": 12, "save": 312, "load": 664}
WIDTH = 990
Step = tuple[int, str]


def floors(text: str) -> list[tuple[list[str], list[Step], list[Step]]]:
    """The rooms of each floor, and the steps of a save and of a load there."""
    rows = []
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            rooms, save, load = line.split("|")
            rows.append((rooms.split(), steps(save), steps(load)))
    return rows


def steps(cell: str) -> list[Step]:
    found = (re.fullmatch(r"\s*(\d+) (.+?)\s*", part) for part in cell.split(";") if part.strip())
    return [(int(match[1]), match[2]) for match in found if match]


def drawn(text: str) -> str:
    """The picture as SVG: one box for each floor, and arcs from each step of a save and of a load to the next."""
    shapes, y = [], TOP
    points: dict[str, list[tuple[int, int, int]]] = {"save": [], "load": []}
    for rooms, save, load in floors(text):
        height = max(ROW, LINE * max(len(save), len(load)) + 14)
        shapes.append(f'<rect x="4" y="{y}" width="{WIDTH - 8}" height="{height}" class="floor"/>')
        names = [name for name in rooms if name != "__init__"]
        lines = [" ".join(names[at : at + 4]) for at in range(0, len(names), 4)]
        shapes += [label("rooms", y + 19 + LINE * n, line, "room") for n, line in enumerate(lines)]
        for column, column_steps in (("save", save), ("load", load)):
            for n, (number, what) in enumerate(column_steps):
                at = y + 19 + LINE * n
                points[column].append((number, COLUMNS[column], at - 4))
                shapes.append(label(column, at, what, "step", 16))
        y += max(height, LINE * len(lines) + 14) + 4
    for column, marks in points.items():
        marks.sort()
        for (_, x, begin), (_, _, end) in pairwise(marks):
            left = x - 10 - abs(end - begin) // 9
            shapes.append(f'<path d="M{x},{begin} C{left},{begin} {left},{end} {x},{end}" class="way {column}"/>')
        for number, x, at in marks:
            shapes.append(f'<circle cx="{x}" cy="{at}" r="8" class="{column}"/>')
            shapes.append(f'<text x="{x}" y="{at + 4}" class="number">{number}</text>')
    head = [
        label("rooms", 28, "rooms", "title"),
        label("save", 28, "a save, on its way down", "title"),
        label("load", 28, "a load, on its way up", "title"),
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 6}" font-family="sans-serif" font-size="12">',
            (
                "<style>.floor{fill:#f5f5f2;stroke:#c9c9c2}.room{font-weight:bold}.title{font-size:14px}.number{fill:#fff;font-size:10px;"
                "text-anchor:middle}.way{fill:none;stroke-width:1.5;opacity:.45}.way.save{stroke:#b4541a}.way.load{stroke:#1a62b4}"
                "circle.save{fill:#b4541a}circle.load{fill:#1a62b4}</style>"
            ),
            f'<rect width="{WIDTH}" height="{y + 6}" fill="#fff"/>',
            *(shape for shape in shapes if shape.startswith("<rect")),
            *(shape for shape in shapes if not shape.startswith("<rect")),
            *head,
            "</svg>\n",
        ]
    )


def label(column: str, y: int, text: str, kind: str, indent: int = 0) -> str:
    return f'<text x="{COLUMNS[column] + indent}" y="{y}" class="{kind}">{html.escape(text)}</text>'


if __name__ == "__main__":
    (DOCS / "house.svg").write_text(drawn((DOCS / "house.txt").read_text("utf-8")), "utf-8")
