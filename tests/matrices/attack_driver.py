"""A matrix of scenarios and faults: its places are tried side by side, kept as they come, counted, and reported.

In: attackers, which know their places and try them. Out: a report, and the exit status of a program. Knows nothing of: what is
attacked, and by what.
"""

import argparse
import json
import os
import queue
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import torch

from tests.matrices.report import REPOSITORY, Report, keep, show

_RESULTS: Final = REPOSITORY / "build"

NOT_MET: Final = "not met"
"""What is found at a place that the child did not come to: threads had made fewer calls of this kind than before."""


class Place(NamedTuple):
    """One call or request of a scenario, and what happens to it."""

    scenario: str
    fault: str
    kind: str
    number: int
    """Of the calls of this kind. Threads may make them in another order when they are repeated."""

    def __str__(self) -> str:
        return ":".join(map(str, self))


class Attacker(Protocol):
    """Tries places, one after the other. One thread owns it."""

    def places(self, scenario: str) -> Sequence[Place]:
        """Each call or request of the unharmed scenario with each fault that fits it."""
        ...

    def wrong(self, place: Place) -> str | None:
        """What does not hold after this. None if all does."""
        ...


Results = dict[Place, str | None]


@dataclass(frozen=True)
class Matrix:
    """What is tried. `attackers` makes some of them, which work in a folder."""

    name: str
    scenarios: Sequence[str]
    faults: Sequence[str]
    attackers: Callable[[Path, int], AbstractContextManager[Sequence[Attacker]]]
    command: str
    parts: int = 1
    """The whole is one place of so many, others with another seed: there are too many to try all of them."""
    columns: Mapping[str, Sequence[str]] | None = None
    """The faults of each column of the table; by default, each has its own."""

    def attack(
        self,
        folder: Path,
        chosen: Callable[[Place], bool],
        *,
        scenarios: Iterable[str] | None = None,
        num_workers: int = 2,
        done: Results | None = None,
        note: Callable[[Place, str | None], None] = lambda *_: None,
    ) -> Results:
        """What is wrong at each of the chosen places, None where nothing is."""
        todo: queue.SimpleQueue[Place] = queue.SimpleQueue()
        results: Results = dict(done or {})
        errors: list[BaseException] = []

        def work(attacker: Attacker) -> None:
            try:
                while not errors:
                    place = todo.get_nowait()
                    results[place] = attacker.wrong(place)
                    note(place, results[place])
            except queue.Empty:
                pass
            except BaseException as error:
                errors.append(error)

        with self.attackers(folder, num_workers) as attackers:
            for name in self.scenarios if scenarios is None else scenarios:
                for place in attackers[0].places(name):
                    if place not in results and chosen(place):
                        todo.put(place)
            workers = [threading.Thread(target=work, args=(attacker,)) for attacker in attackers]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        if errors:
            raise errors[0]
        return results

    def report(self, results: Results, seconds: float, seed: int, command: str) -> Report:
        met = {place: found for place, found in results.items() if found != NOT_MET}
        tried = Counter((place.scenario, place.fault) for place in met)
        wrong = [place for place, found in met.items() if found]
        columns = self.columns or {fault: [fault] for fault in self.faults}
        rows = [
            (
                name,
                *(sum(tried[name, fault] for fault in faults) for faults in columns.values()),
                sum(place.scenario == name for place in wrong),
            )
            for name in self.scenarios
        ]
        counts = {"places": len(met), "wrong": len(wrong), "not met": len(results) - len(met)}
        by_fault = {fault: sum(tried[name, fault] for name in self.scenarios) for fault in self.faults}
        details = {"by fault": by_fault, "wrong": {str(place): met[place] for place in wrong}}
        return Report(self.name, ("scenario", *columns, "wrong"), rows, counts, seconds, seed, command, details)

    def run(self, afterwards: Callable[[Path], None] = lambda _: None) -> int:
        """The program. `afterwards` gets the file of the report. Returns the exit status."""
        told = self._told()
        torch.set_num_threads(1)
        began, is_part = time.monotonic(), bool(told.only) or told.quick
        usual = (1, 300) if told.quick else (1, 1) if told.only else (1, self.parts)
        shard = told.shard or usual
        path = Path(os.devnull) if is_part else _RESULTS / f"{self.name}-{told.seed}-{shard[0]}-of-{shard[1]}.jsonl"
        path.parent.mkdir(exist_ok=True)
        done, seconds_before = _resumed(path) if told.resume and not is_part else ({}, 0.0)
        began -= seconds_before
        with (
            tempfile.TemporaryDirectory(dir=os.environ.get("ATTACK_DIR")) as folder,
            open(path, "a" if done else "w") as kept,
        ):

            def note(place: Place, found: str | None) -> None:
                kept.write(json.dumps([*place, found, round(time.monotonic() - began, 1)]) + "\n")
                kept.flush()
                if found and found != NOT_MET:
                    repeat = f"{self.command} --only '{place}'"
                    print(f"{place}: {found}\n  repeat it by: {repeat}", file=sys.stderr, flush=True)

            results = self.attack(
                Path(folder),
                lambda place: _matches(place, told.only) and is_in_shard(place, told.seed, shard),
                scenarios=[name for name in self.scenarios if told.only.split(":")[0] in ("", name)],
                num_workers=told.workers,
                done=done,
                note=note,
            )
        is_whole = shard == (1, self.parts)
        command = self.command if is_whole else f"{self.command} --shard {shard[0]}/{shard[1]}"
        report = self.report(results, time.monotonic() - began, told.seed, command)
        print(json.dumps(dict(report.counts)))
        if not is_part:
            kept_at = keep(report)
            afterwards(kept_at)
            show(kept_at)
        return min(1, report.counts["wrong"])

    def _told(self) -> argparse.Namespace:
        parser = argparse.ArgumentParser(prog=self.command)
        parser.add_argument("--seed", type=int, default=0, help="which places are in which shard")
        parser.add_argument(
            "--shard",
            type=_shard,
            metavar="I/N",
            help=f"a part of the places; 1/{self.parts} if nothing else is said",
        )
        parser.add_argument("--only", default="", metavar="SCENARIO[:FAULT[:KIND[:NUMBER]]]", help="some of them")
        parser.add_argument("--resume", action="store_true", help="go on where an earlier run of this stopped")
        parser.add_argument("--workers", type=int, default=2)
        parser.add_argument("--quick", action="store_true", help="one place in 300, and no report")
        return parser.parse_args()


def is_in_shard(place: Place, seed: int, shard: tuple[int, int]) -> bool:
    number, count = shard
    return zlib.crc32(f"{seed} {place}".encode()) % count == number - 1


def _shard(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    return int(number), int(count)


def _matches(place: Place, only: str) -> bool:
    wanted = only.split(":")
    return all(want in ("", str(have)) for want, have in zip(wanted, place, strict=False))


def _resumed(path: Path) -> tuple[Results, float]:
    """What an earlier run has found, and the seconds that it has taken."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {Place(*place): found for *place, found, _ in lines}, max((line[-1] for line in lines), default=0.0)
