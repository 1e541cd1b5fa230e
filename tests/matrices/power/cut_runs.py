"""One scenario: recorded once, cut behind each of its calls, each state read.

In: a scenario, a seed, bounds. Out: counts, and the states that were wrong. Knows nothing of: which scenarios there are.
"""

import os
import pickle
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .cut_check import Folder, wrong_afterwards, wrong_with
from .cut_model import POSIX, Disk, Tree
from .disk_recorder import Recorder, trace
from .disk_records import Acknowledged, Begun, Mark, Record, Sync
from .power_scenarios import Scenario

FILES, FOLDERS, PARENTS = "of a file", "of a folder", "of the parent of a new folder"
KINDS_OF_SYNC = (FILES, FOLDERS, PARENTS)
_MOST_KEPT = 5  # states that were wrong


def record(scenario: Scenario, place: Path) -> list[Record]:
    """What a process does that runs the scenario, in a folder of its own below `place`."""
    folder, log = place / "recorded", place / "log"
    folder.mkdir(parents=True)
    log.touch()
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        try:
            recorder = Recorder(folder, log)
            recorder.install()
            scenario.run(folder, recorder)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        raise RuntimeError(f"{scenario.name}: the recorded process ended with {status}")
    return trace(folder, log)


def without(kind: str, records: Sequence[Record]) -> list[Record]:
    """The same calls by a library that leaves out a kind of sync."""
    disk, kept = Disk(), []
    for one in records:
        left_out = isinstance(one, Sync) and (
            (kind == FILES and disk.is_file(one.of))
            or (kind == FOLDERS and not disk.is_file(one.of) and not disk.makes_folders_in(one.of))
            or (kind == PARENTS and disk.makes_folders_in(one.of))
        )
        if not left_out:
            disk.apply(one)
            kept.append(one)
    return kept


def cuts(records: Sequence[Record], seed: str, most: int, model: str) -> Iterator[tuple[int, Tree, tuple[Mark, ...]]]:
    """Each state that may be there after a cut, once for each set of marks that were made before it."""
    disk, marks, met = Disk(model), [], {}
    for number, one in enumerate(records, 1):
        if isinstance(one, Begun | Acknowledged):
            marks.append(one)
        else:
            disk.apply(one)
        for tree in disk.states(most, random.Random(f"{seed} {number}")):
            key = frozenset(tree.items())
            if met.get(key) != len(marks):
                met[key] = len(marks)
                yield number, tree, tuple(marks)


@dataclass
class Outcome:
    """What became of a scenario."""

    calls: int = 0
    states: int = 0
    readings: int = 0
    continued: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    files: list[str] = field(default_factory=list)
    seconds: float = 0.0


def try_all(
    scenario: Scenario,
    place: Path,
    *,
    seed: int,
    most: int,
    states: int,
    model: str = POSIX,
    continue_each: int = 50,
    records: Sequence[Record] | None = None,
    until_wrong: bool = False,
) -> Outcome:
    """Read at most so many states. One in `continue_each` is worked on. States that were wrong are kept in files; `until_wrong`, the first ends it."""
    begun, outcome, met = time.monotonic(), Outcome(), set()
    records = record(scenario, place) if records is None else records
    outcome.calls = sum(not isinstance(one, Begun | Acknowledged) for one in records)
    found = [*cuts(records, f"{seed} {scenario.name}", most, model)]
    if len(found) > states:
        found = [found[index] for index in sorted(random.Random(seed).sample(range(len(found)), states))]
    folder = Folder(place / "read")
    for number, (cut, tree, marks) in enumerate(found):
        folder.become(tree)
        wrong = wrong_with(scenario, folder.path, marks)
        outcome.readings += 1
        met.add(frozenset(tree.items()))
        goes_on = scenario.goes_on is not None and continue_each
        if wrong is None and goes_on and number % continue_each == seed % continue_each:
            wrong = wrong_afterwards(scenario, folder.path)
            outcome.continued += 1
            folder.begin_again()
        elif scenario.reading_writes:
            folder.begin_again()
        if wrong is not None:
            outcome.wrong[wrong.partition(":")[0]] += 1
            if until_wrong:
                break
            if len(outcome.files) < _MOST_KEPT:
                outcome.files.append(keep_case(scenario, cut, tree, marks, wrong))
    outcome.states, outcome.seconds = len(met), time.monotonic() - begun
    return outcome


def keep_case(scenario: Scenario, cut: int, tree: Tree, marks: Sequence[Mark], wrong: str) -> str:
    """Keep a state in a file, since threads make another trace each time. Returns the path."""
    fd, path = tempfile.mkstemp(prefix="power-case-", suffix=".pickle")
    with os.fdopen(fd, "wb") as file:
        pickle.dump((scenario.name, cut, dict(tree), tuple(marks), wrong), file)
    return path
