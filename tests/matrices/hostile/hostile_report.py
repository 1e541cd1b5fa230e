"""The report of hostile inputs: one row for each parser, and what all of them came to.

In: targets, and what was found. Out: the report, in its file and in the docs. Knows nothing of: how inputs are made.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tests.matrices.report import Report, keep, show

from .hostile_target import Target
from .input_engines import name
from .input_watch import MAX_MEMORY, MAX_SECONDS

_HEAD = ["parser", "inputs", "branches met", "corpus", "slowest", "memory", "refused as", "wrong"]


def report(targets: Sequence[Target], found: Mapping[str, Mapping[str, Any]], seconds: float, seed: int) -> None:
    rows = [_row(target, found[target.name]) for target in targets]
    counts = {
        "inputs": sum(told.get("inputs", 0) for told in found.values()),
        "parsers": len(targets),
        "wrong": sum(sum(told.get("wrong", {}).values()) for told in found.values()),
    }
    details = {
        "engine": name(),
        "limits": {"seconds": MAX_SECONDS, "bytes": MAX_MEMORY},
        "targets": {target.name: dict(found[target.name]) for target in targets},
    }
    total = [
        "all",
        counts["inputs"],
        sum(told["branches"] for told in found.values()),
        "",
        "",
        "",
        name(),
        counts["wrong"],
    ]
    command = f"python -m tests.matrices.hostile --seed {seed}"
    show(keep(Report("hostile", _HEAD, [*rows, total], counts, seconds, seed, command, details)))


def _row(target: Target, told: Mapping[str, Any]) -> list[str | int]:
    errors = [kind for kind in told.get("errors", {}) if kind != "accepted"]
    return [
        target.name,
        told.get("inputs", 0),
        told["branches"],
        told["corpus"],
        f"{1000 * told.get('slowest', 0):,.0f} ms",
        f"{told.get('peak_mib', 0)} MiB",
        ", ".join(errors) or "never",
        sum(told.get("wrong", {}).values()),
    ]
