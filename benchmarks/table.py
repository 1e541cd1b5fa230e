"""A figure: what was measured, side by side with the limit that it is held against.

In: pairs of samples. Out: ratios, verdicts, a JSON file and a markdown table. Knows nothing of: what was measured.

Other work on the machine slows both halves of a pair, so the ratio of each pair is taken first and the median of
the ratios is the figure. The medians of the halves themselves are shown to make the ratio readable.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final, Literal

MARK: Final = "<!-- figures -->"


@dataclass(frozen=True, slots=True)
class Target:
    """The bound that a figure's ratio is to keep."""

    sign: Literal["≤", "≥"]
    ratio: float

    def met_by(self, ratio: float) -> bool:
        keeps = operator.le if self.sign == "≤" else operator.ge
        return bool(keeps(ratio, self.ratio))

    def __str__(self) -> str:
        return f"{self.sign} {self.ratio:g}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One row. `pairs` are (measured, limit), one for each round; none at all: it could not be measured here."""

    title: str
    unit: str
    limit: str
    target: Target
    pairs: Sequence[tuple[float, float]]
    note: str = ""

    @property
    def ratios(self) -> list[float]:
        return [measured / limit for measured, limit in self.pairs]

    @property
    def met(self) -> bool | None:
        return self.target.met_by(median(self.ratios)) if self.pairs else None

    def as_dict(self) -> dict[str, Any]:
        row: dict[str, Any] = {"title": self.title, "limit": self.limit, "unit": self.unit}
        if self.pairs:
            low, high = _spread(self.ratios)
            row["measured_median"] = median(measured for measured, _ in self.pairs)
            row["limit_median"] = median(limit for _, limit in self.pairs)
            row |= {"ratio_median": median(self.ratios), "ratio_quartiles": [low, high]}
            row["pairs"] = [list(pair) for pair in self.pairs]
        return row | {"target": str(self.target), "met": self.met, "note": self.note}

    def cells(self) -> list[str]:
        if not self.pairs:
            return [self.title, self.note, self.limit, "", str(self.target), "-"]
        low, high = _spread(self.ratios)
        measured = median(measured for measured, _ in self.pairs)
        limit = median(limit for _, limit in self.pairs)
        return [
            self.title + (f" ({self.note})" if self.note else ""),
            f"{_shown(measured)} {self.unit}".strip(),
            f"{self.limit}: {_shown(limit)} {self.unit}".strip(),
            f"{median(self.ratios):.3g} ({low:.3g} - {high:.3g})",
            str(self.target),
            "yes" if self.met else "**no**",
        ]


def markdown(figures: Sequence[Figure], environment: dict[str, str | int | float]) -> str:
    head = ["what", "measured", "limit", "ratio (quartiles)", "target", "met"]
    rows = [head, ["---"] * len(head), *(figure.cells() for figure in figures)]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    where = ", ".join(f"{name} {value}" for name, value in environment.items())
    return "\n".join([*lines, "", f"Medians of pairs measured side by side. {where}.", ""])


def write(stem: Path, figures: dict[str, Figure], environment: dict[str, str | int | float]) -> None:
    """`stem`.json for programs and `stem`.md for people."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    rows = {name: figure.as_dict() for name, figure in figures.items()}
    text = json.dumps({"environment": environment, "figures": rows}, indent=1, ensure_ascii=False)
    stem.with_suffix(".json").write_text(text + "\n")
    stem.with_suffix(".md").write_text(markdown(list(figures.values()), environment))


def show_in(readme: Path, stem: Path) -> None:
    """Put the kept table where the README shows it, so that its figures are never others."""
    before, mark, _ = readme.read_text().partition(MARK)
    readme.write_text(before + mark + "\n\n" + stem.with_suffix(".md").read_text())


def _shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _spread(ratios: Sequence[float]) -> tuple[float, float]:
    """The quartiles; of fewer than two values, the value itself."""
    if len(ratios) < 2:
        return ratios[0], ratios[0]
    low, _, high = quantiles(ratios, n=4, method="inclusive")
    return low, high
