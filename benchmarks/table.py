"""A figure: a measurement, side by side with its limit. A peer: a measurement, side by side with another way's cost.

In: pairs of samples. Out: ratios, verdicts, a JSON file and Markdown tables. Knows nothing of: what was measured.

Other work on the machine slows both halves of a pair, so the ratio of each pair is taken first, and the figure is the
median of the ratios. The medians of the halves are shown to make the ratio readable. A verdict needs the whole interval
of the median, widened by the noise if that was measured: a bound inside the interval is neither met nor missed.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Final, Literal, NamedTuple, Protocol

# Steps of a training differ by as much without a save, so no save is known to cost less.
NOISE_SECONDS: Final = 0.005
# The probability that the median is outside of its interval, on each side.
_TAIL: Final = 0.025


@dataclass(frozen=True, slots=True)
class Target:
    """The bound for a figure's ratio."""

    sign: Literal["≤", "≥"]
    ratio: float

    def met_by(self, ratio: float) -> bool:
        keeps = operator.le if self.sign == "≤" else operator.ge
        return bool(keeps(ratio, self.ratio))

    def __str__(self) -> str:
        return f"{self.sign} {self.ratio:g}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One row. `pairs` are (measured, limit), one for each round; empty if it could not be measured here.

    Without a target, it is shown for information.
    """

    title: str
    unit: str
    limit: str
    target: Target | None
    pairs: Sequence[tuple[float, float]]
    note: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Values that are only stored in the file of results, not shown in a table."""
    noise: float = 0.0
    """The error of the measured value, measured without a save."""

    GROUP: ClassVar = "figures"
    HEAD: ClassVar = ["what", "measured", "limit", "ratio (interval)", "target", "met"]

    @property
    def ratios(self) -> list[float]:
        return [measured / limit for measured, limit in self.pairs]

    @property
    def met(self) -> bool | None:
        """None if there is no target, or if the pairs cannot decide, with the noise added or subtracted."""
        if not (self.pairs and self.target):
            return None
        verdicts = {
            self.target.met_by(end)
            for noise in (-self.noise, self.noise)
            for end in interval([(measured + noise) / limit for measured, limit in self.pairs])
        }
        return verdicts.pop() if len(verdicts) == 1 else None

    def as_dict(self) -> dict[str, Any]:
        row: dict[str, Any] = {"title": self.title, "limit": self.limit, "unit": self.unit}
        if self.pairs:
            low, high = interval(self.ratios)
            row["measured_median"] = median(measured for measured, _ in self.pairs)
            row["limit_median"] = median(limit for _, limit in self.pairs)
            row |= {"ratio_median": median(self.ratios), "ratio_interval": [low, high]}
            row["pairs"] = [list(pair) for pair in self.pairs]
        row |= {"target": self._target, "met": self.met, "note": self.note}
        row |= {"noise": self.noise} if self.noise else {}
        return row | {"details": dict(self.details)} if self.details else row

    def cells(self) -> list[str]:
        if not self.pairs:
            return [self.title, self.note, self.limit, "", self._target, "-"]
        low, high = interval(self.ratios)
        measured = median(measured for measured, _ in self.pairs)
        limit = median(limit for _, limit in self.pairs)
        return [
            self.title + (f" ({self.note})" if self.note else ""),
            f"{shown(measured)} {self.unit}".strip(),
            f"{self.limit}: {shown(limit)} {self.unit}".strip(),
            f"{median(self.ratios):.3g} ({low:.3g} - {high:.3g})",
            self._target,
            {True: "yes", False: "**no**", None: "cannot tell" if self.target else "-"}[self.met],
        ]

    @property
    def _target(self) -> str:
        return str(self.target) if self.target else "-"


def fixed(title: str, unit: str, samples: Iterable[float], most: float, note: str = "") -> Figure:
    """A figure that is compared with a fixed number."""
    return Figure(title, unit, "fixed", Target("≤", 1.0), [(sample, most) for sample in samples], note)


def above_noise(pairs: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Pairs of seconds lost to saves, raised to the noise of steps if they are below it."""
    return [(max(NOISE_SECONDS, measured), max(NOISE_SECONDS, limit)) for measured, limit in pairs]


@dataclass(frozen=True, slots=True)
class Noise:
    """No save, measured like a save, twice in each round. `pairs` are the seconds that it seems to cost."""

    title: str
    pairs: Sequence[tuple[float, float]]

    GROUP: ClassVar = "noise"
    HEAD: ClassVar = ["noise of the machine", "no save, ms", "no save again, ms", "difference, ms (interval)"]

    @property
    def differences(self) -> list[float]:
        return [first - second for first, second in self.pairs]

    @property
    def seconds(self) -> float:
        """The largest difference that two equal measurements may have."""
        return max(map(abs, interval(self.differences)))

    def as_dict(self) -> dict[str, Any]:
        told = {"difference_median": median(self.differences), "difference_interval": list(interval(self.differences))}
        return {"title": self.title, **told, "pairs": [list(pair) for pair in self.pairs]}

    def cells(self) -> list[str]:
        first, second = (shown(median(values) * 1e3) for values in zip(*self.pairs, strict=True))
        low, high = (shown(end * 1e3) for end in interval(self.differences))
        return [self.title, first, second, f"{shown(median(self.differences) * 1e3)} ({low} - {high})"]


class Cost(NamedTuple):
    """The cost of one transfer."""

    seconds: float
    processor_seconds: float
    """The processor time of all threads of this process, per GB."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another way to do the same. `pairs` are (its cost, our cost), one for each round; empty if not measured."""

    title: str
    configuration: str
    pairs: Sequence[tuple[Cost, Cost]]

    GROUP: ClassVar = "peers"
    HEAD: ClassVar = ["upload", "seconds", "async_ckpt", "ratio", "client CPU s/GB", "async_ckpt", "ratio"]

    def as_dict(self) -> dict[str, Any]:
        row: dict[str, Any] = {"title": self.title, "configuration": self.configuration}
        for number, name in enumerate(Cost._fields if self.pairs else ()):
            theirs, ours, ratio = self._medians(number)
            row |= {f"{name}_median": theirs, f"{name}_median_ours": ours, f"{name}_ratio_median": ratio}
        return row | {"pairs": [[list(cost) for cost in pair] for pair in self.pairs]}

    def cells(self) -> list[str]:
        values = [value for number in (0, 1) for value in self._medians(number)] if self.pairs else []
        title = f"{self.title} ({self.configuration})" if self.configuration else self.title
        return [title, *([f"{value:.3g}" for value in values] or ["-"] * 6)]

    def _medians(self, number: int) -> tuple[float, float, float]:
        """The peer's median, our median, and the median ratio of ours to the peer's."""
        theirs = [pair[0][number] for pair in self.pairs]
        ours = [pair[1][number] for pair in self.pairs]
        ratios = [own / other for other, own in zip(theirs, ours, strict=True)]
        return median(theirs), median(ours), median(ratios)


class Row(Protocol):
    """A line of a table. Rows of one kind share a table, and a group in the file."""

    GROUP: ClassVar[str]
    HEAD: ClassVar[list[str]]

    def as_dict(self) -> dict[str, Any]: ...

    def cells(self) -> list[str]: ...


Environment = dict[str, str | int | float]


def kept_of(rows: Mapping[str, Row], environment: Environment) -> dict[str, Any]:
    """The content of a file of results: every sample, by group and name, and the tables."""
    kept: dict[str, Any] = {"environment": environment, "tables": []}
    for name, row in rows.items():
        kept.setdefault(row.GROUP, {})[name] = row.as_dict()
    kinds: dict[type[Row], None] = dict.fromkeys(type(row) for row in rows.values())
    for kind in kinds:
        lines = [row.cells() for row in rows.values() if isinstance(row, kind)]
        kept["tables"].append({"head": kind.HEAD, "lines": lines})
    return kept


def markdown(*kept: Mapping[str, Any]) -> str:
    """The tables of such files, with the facts about their machines. Tables with the same columns are joined."""
    lines: dict[tuple[str, ...], list[Sequence[str]]] = {}
    for table in (table for one in kept for table in one["tables"]):
        lines.setdefault(tuple(table["head"]), []).extend(table["lines"])
    where = [", ".join(f"{name} {value}" for name, value in one["environment"].items()) for one in kept]
    tables = [_table(head, found) for head, found in lines.items()]
    return "\n".join([*tables, *(f"Medians, measured side by side. {one}.\n" for one in where)])


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "".join("| " + " | ".join(line) + " |\n" for line in (head, ["---"] * len(head), *lines))


def write(stem: Path, kept: Mapping[str, Any]) -> None:
    """Write `stem`.json for programs, and `stem`.md with the tables for people."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    stem.with_suffix(".md").write_text(markdown(kept))


def show_in(page: Path, mark: str, text: str) -> None:
    """Put a table into a page, so that the page's figures are always the measured ones.

    The table replaces the text from the mark to the next heading, or to the end.
    """
    mark = f"<!-- {mark} -->\n\n"
    before, found, after = page.read_text(encoding="utf-8").partition(mark)
    if not found:
        raise ValueError(f"{page} has no mark {mark.strip()}")
    heading = re.search(r"^#+ ", after, re.MULTILINE)
    rest = "\n" + after[heading.start() :] if heading else ""
    page.write_text(before + mark + text + rest, encoding="utf-8")


def shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """The interval that has the median of the ratios' distribution with a probability of at least 95 %.

    It is that of the sign test (W. J. Conover, Practical Nonparametric Statistics, 3rd edition, 1999, section 3.2), for
    any distribution. For fewer than six ratios it is their range, which has the median with 94 % for five, 88 % for
    four and 75 % for three.
    """
    ordered, count = sorted(ratios), len(ratios)
    rank, tail = 0, 1 / 2**count
    while tail <= _TAIL:
        rank += 1
        tail += comb(count, rank) / 2**count
    at = max(0, rank - 1)
    return ordered[at], ordered[-1 - at]
