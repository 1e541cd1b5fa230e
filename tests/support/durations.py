"""How long each test file takes, by which a run of several workers orders them: the longest first, so that no worker ends long after
the others. With `--write-durations` a run writes down what its files have taken. With `--fast` a run takes of each long file as many
tests as take a few seconds, others with each commit, and leaves out the frameworks.
"""

import json
import math
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from slices import PART

TESTS = Path(__file__).parents[1]
KEPT = TESTS / "durations.json"
FAST_SECONDS = 5.0  # of each file in the fast lane


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _kept() -> dict[str, float]:
    return json.loads(KEPT.read_text(encoding="utf-8"))


def longest_first(items: list[pytest.Item]) -> None:
    """Order the files, and leave the tests of each as they are. A file that is not known yet may be long."""
    seconds = _kept()
    items.sort(key=lambda item: -seconds.get(file_of(item.nodeid), 1e6))


def fast_ones(items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests of the fast lane: all of the short files, and every n-th of a file that takes n times as long."""
    seconds, of_file = _kept(), defaultdict(list)
    for item in items:
        of_file[file_of(item.nodeid)].append(item)
    kept: list[pytest.Item] = []
    for file, tests in of_file.items():
        if file.startswith("tests/frameworks/"):
            continue
        number = min(math.ceil(seconds.get(file, 0) / FAST_SECONDS) or 1, len(tests))
        kept += tests[PART // 1009 % number :: number]  # apart from the part of a matrix that a test tries
    return kept


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
