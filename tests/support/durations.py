"""How long each test file takes, by which a run of several workers orders them: the longest first, so that no worker ends long after
the others. With `--write-durations` a run writes down what its files have taken.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
KEPT = TESTS / "durations.json"


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _kept() -> dict[str, float]:
    return json.loads(KEPT.read_text(encoding="utf-8"))


def longest_first(items: list[pytest.Item]) -> None:
    """Order the files, and leave the tests of each as they are. A file that is not known yet may be long."""
    seconds = _kept()
    items.sort(key=lambda item: -seconds.get(file_of(item.nodeid), 1e6))


class Recorder:
    """Sums up the seconds of each file, and keeps them at the end."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[file_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        told = _kept() | {file: round(seconds, 1) for file, seconds in self._seconds.items()}
        there = {file: told[file] for file in sorted(told) if (TESTS.parent / file).exists()}
        KEPT.write_text(json.dumps(there, indent=1) + "\n", encoding="utf-8")
