"""What a matrix found: a file of counts in `reports/`, and the same as a table in docs/evidence.md, both written by its run.

In: a `Report`. Out: `reports/<name>.json`, and the table below the mark of that name. Knows nothing of: what was tried.
"""

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import table

REPOSITORY: Final = Path(__file__).parents[2]
REPORTS: Final = Path(__file__).parent / "reports"
EVIDENCE: Final = REPOSITORY / "docs/evidence.md"


@dataclass(frozen=True, slots=True)
class Report:
    """What one matrix found. The cells of `rows` are counts and words, in the order of `head`."""

    name: str
    """Of the file, and of the mark in the docs."""
    head: Sequence[str]
    rows: Sequence[Sequence[str | int]]
    counts: Mapping[str, int]
    """What was tried, and what went wrong, in all."""
    seconds: float
    seed: int
    command: str
    """Which makes this report."""
    details: Mapping[str, Any]
    """What the file keeps beside it, and no table shows."""

    def as_dict(self) -> dict[str, Any]:
        kept = {"command": self.command, "seed": self.seed, "seconds": round(self.seconds, 1), "where": _where()}
        rows = [dict(zip(self.head, row, strict=True)) for row in self.rows]
        return kept | {"counts": dict(self.counts), "rows": rows, "details": dict(self.details)}


def keep(report: Report, folder: Path = REPORTS) -> Path:
    """Writes the file of a report, and returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{report.name}.json"
    path.write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    return path


def show(path: Path, page: Path = EVIDENCE) -> None:
    """Replaces the table of this file's name in the docs. The page has the mark `<!-- name -->` where it belongs."""
    kept = json.loads(path.read_text())
    rows = [list(row.values()) for row in kept["rows"]]
    table.show_in(page, path.stem, "\n".join([*_table(list(kept["rows"][0]), rows), "", _origin(kept), ""]))


def _table(head: Sequence[str], rows: Sequence[Sequence[str | int]]) -> list[str]:
    cells = [[f"{cell:,}" if isinstance(cell, int) else cell for cell in row] for row in rows]
    return ["| " + " | ".join(line) + " |" for line in [list(head), ["---"] * len(head), *cells]]


def _origin(kept: Mapping[str, Any]) -> str:
    where = ", ".join(f"{name} {value}" for name, value in kept["where"].items())
    return f"`{kept['command']}`: seed {kept['seed']}, {kept['seconds']:,.0f} s. {where}."


def _where() -> dict[str, str]:
    done = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=REPOSITORY, capture_output=True, text=True)
    return {
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        "cores": str(os.cpu_count()),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "async_ckpt": done.stdout.strip() or "unknown",
    }
