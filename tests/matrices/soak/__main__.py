"""`python -m tests.matrices.soak`: an hour of saves, restores and versions with faults and readers, and what grew meanwhile.

In: the command line. Out: a report, with a picture, and exit status 1 if anything grew, was lost or hung. Knows nothing of:
how a quantity is sampled.

The runs lie on a disk, at an S3 server on loopback, and at both. A proxy between this process and the server makes the faults
of the store. All chance comes from the seed; how far the hour gets depends on the machine.
"""

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from random import Random
from typing import Any, Final

import torch

from async_ckpt import CheckpointError, Place
from async_ckpt.testing import FaultyProxy, moto_server
from async_ckpt.testing.servers import Server
from tests.matrices.report import REPOSITORY, Report, keep, show
from tests.matrices.soak.soak_turns import TURNS, SoakedRun, fork, write_files
from tests.matrices.soak.soaked_state import Soaked
from tests.matrices.soak.sprinkled_faults import any_store_fault, no_large_files, stopped, store_fault
from tests.matrices.soak.watched_quantities import (
    BOUNDS,
    Sample,
    Trend,
    files_below,
    num_to_go,
    of_reader,
    of_this_process,
    sampled,
    trend,
)

_BUCKET: Final = "soak"
_TURN_SECONDS: Final = 120
"""No turn may take longer, store faults for ever included: then the process prints its stacks and ends."""
_WARM: Final = 0.15
"""The share of the samples that come before the first that counts: pools and caches fill meanwhile."""
_FAULTY: Final = 0.25
_SAMPLES: Final = 120
_FEWEST: Final = 5
_LOGGED: Final = 60
_CLOSING_SECONDS: Final = 10.0
"""Connections are closed by threads of the client and of the proxy, a moment after the last use."""
# Threads are not among them: pools keep idle ones.
_FINAL: Final = ("descriptors", "memory files", "files in /dev/shm", "temporary files", "open uploads")


class Readers:
    """Two processes that read: one is killed and started again, the other is watched."""

    def __init__(self, places: dict[str, Any], folder: Path, log: Path) -> None:
        self._places, self._folder, self._log = places, folder, log
        self._number = 0
        self.watched, self._killed = self._start(watches=False), self._start(watches=True)

    def _start(self, *, watches: bool) -> subprocess.Popen[bytes]:
        self._number += 1
        told = {**self._places, "seed": self._number, "watches": watches, "pause_seconds": 0.5}
        told["folder"] = str(self._folder / str(self._number))
        command = [sys.executable, "-W", "ignore", "-m", "tests.matrices.soak.soak_reader", json.dumps(told)]
        with open(self._log, "ab") as log:
            return subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log)

    def kill_one(self) -> None:
        self.check()
        self._killed.kill()
        self._killed.wait()
        self._killed = self._start(watches=True)

    def check(self) -> None:
        for process in (self.watched, self._killed):
            assert process.poll() is None, f"a reader ended by itself:\n{self._log.read_text()[-3000:]}"

    def end(self) -> None:
        for process in (self.watched, self._killed):
            process.kill()
            process.wait()


class Soak:
    """The runs, their readers, and all that was sampled."""

    def __init__(self, folder: Path, server: Server, proxy: FaultyProxy, seed: int) -> None:
        self.folder, self.server, self.proxy = folder, server, proxy
        self.rng = Random(seed)
        self.soaked = Soaked()
        self.counts: Counter[str] = Counter()
        self.number = 0
        self.log: deque[str] = deque(maxlen=_LOGGED)  # of the last turns, for whoever looks for the reason of a failure
        self.times: list[float] = []
        self.samples: list[Sample] = []
        (folder / "files").mkdir()
        far = {**server.options, "endpoint": proxy.endpoint, "deadline_seconds": 5.0}

        def store(name: str) -> Place:
            return Place(f"s3://{_BUCKET}/{name}", options=far)

        def disk(name: str) -> Place:
            return Place(str(folder / name))

        places: dict[str, Any] = {
            "disk": ([disk("disk")], disk("disk_weights"), {"max_bandwidth": 50_000_000}),
            "store": ([store("store")], store("store_weights"), {}),
            "both": ([disk("both"), store("both")], disk("both_weights"), {}),
        }
        self.runs = {
            name: SoakedRun(self.soaked, roots, weights, self.rng, **options)
            for name, (roots, weights, options) in places.items()
        }

    def open(self) -> None:
        for run in self.runs.values():
            run.open()

    def close(self) -> None:
        for run in self.runs.values():
            run.close()

    def readers(self) -> Readers:
        near = {**self.server.options}  # they ask the server itself: the faults are those of the training
        runs = [{"url": str(self.folder / "disk")}, {"url": f"s3://{_BUCKET}/store", "options": near}]
        weights = [
            {"url": str(self.folder / "disk_weights")},
            {"url": f"s3://{_BUCKET}/store_weights", "options": near},
        ]
        return Readers({"runs": runs, "weights": weights}, self.folder / "pulled", self.folder / "readers.log")

    def turn(self, readers: Readers) -> None:
        """One thing, perhaps with a fault; and then, without one, whether all is as promised."""
        self.number += 1
        self.proxy._requests.clear()  # it keeps all of them, for tests that count them
        name = self.rng.choice(list(self.runs))
        run, what = self.runs[name], self.rng.choices(list(TURNS), list(TURNS.values()))[0]
        if self.rng.random() < 0.03:
            fork()
            self.counts["forks"] += 1
        if self.rng.random() < 0.1:
            write_files(self.folder / "files", self.soaked, self.number)
            self.counts["files outside of runs"] += 1
        told, fault = self._fault(name, readers) if self.rng.random() < _FAULTY else ("", nullcontext())
        self.log.append(f"{self.number} {name}: {what}, newest {run.acknowledged()}{told and f', {told}'}")
        try:
            with fault:
                getattr(run, what)(self.number)
        except (CheckpointError, OSError) as error:
            if not told:
                raise
            self.counts["failed by a fault"] += 1
            self.log.append(f"  {type(error).__name__}: {error!s:.200}")
            run.close()  # a publisher that lost its root, say, is opened again as a training would start again
            run.open()
        self.counts["turns"] += 1
        if told:
            self.counts[f"fault: {told}"] += 1
        run.check()
        readers.check()

    def _fault(self, name: str, readers: Readers) -> tuple[str, Any]:
        chosen = self.rng.random()
        if chosen < 0.1:
            readers.kill_one()
            return "a reader is killed", nullcontext()
        if chosen < 0.2:
            return "a reader stands still", stopped(readers.watched.pid)
        if name == "disk" or (name == "both" and chosen < 0.6):
            return "a disk that takes no large file", no_large_files()
        fault = any_store_fault(self.rng)
        return fault, store_fault(self.proxy, fault)

    def sample(self, readers: Readers, began: float) -> None:
        for run in self.runs.values():
            run.checkpointer.wait()
        self.times.append(time.monotonic() - began)
        self.samples.append(sampled(of_this_process, lambda: of_reader(readers.watched.pid), self._places_sample))

    def _places_sample(self) -> Sample:
        folders = [self.folder / name for name in ("disk", "disk_weights", "both", "both_weights")]
        return {
            "temporary files": len(files_below(Path(tempfile.gettempdir()))),
            "files of the runs on disk": sum(num_to_go(files_below(folder)) for folder in folders),
            "objects of the runs at the store": num_to_go(self.server.keys(_BUCKET)),
            "open uploads": len(self.server.uploads(_BUCKET)),
        }

    def at_rest(self) -> Sample:
        """What there is when everything is closed."""
        return sampled(of_this_process, self._places_sample)

    def at_rest_since(self, before: Sample) -> Sample:
        """The same, once nothing is left beyond `before`, or some seconds later."""
        deadline = time.monotonic() + _CLOSING_SECONDS
        while _left(before, after := self.at_rest()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return after


def _left(before: Sample, after: Sample) -> list[str]:
    """The names of what is more than before."""
    return [name for name in _FINAL if after[name] > before[name]]


@contextmanager
def _hung_is_told() -> Iterator[None]:
    faulthandler.dump_traceback_later(_TURN_SECONDS, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def soak(seconds: float, seed: int, pause_seconds: float) -> Report:
    """Runs a soak of this length."""
    began = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-", dir=os.environ.get("SOAK_DIR"))))
        (folder / "tmp").mkdir()
        tempfile.tempdir = str(folder / "tmp")
        stack.callback(setattr, tempfile, "tempdir", None)
        server = stack.enter_context(moto_server())
        server.make_bucket(_BUCKET)
        subject = Soak(folder, server, stack.enter_context(FaultyProxy(server.endpoint)), seed)
        for _ in range(2):  # what is made once in a process is there after the first time
            for run in subject.runs.values():
                run.save(0)
                run.publish(0)
            write_files(folder / "files", subject.soaked, 0)
            subject.close()
            before = subject.at_rest()
            subject.open()
        readers = subject.readers()
        stack.callback(readers.end)
        _go_on(subject, readers, began, seconds, pause_seconds)
        subject.close()
        for run in subject.runs.values():
            subject.counts.update(run.counts)
        after = subject.at_rest_since(before)
    return _report(subject, before, after, time.monotonic() - began, seed)


def _go_on(subject: Soak, readers: Readers, began: float, seconds: float, pause_seconds: float) -> None:
    due = time.monotonic()
    while time.monotonic() - began < seconds or len(subject.samples) < _FEWEST:
        with _hung_is_told():
            try:
                subject.turn(readers)
            except BaseException:
                print("the last turns:", *subject.log, sep="\n", flush=True)
                raise
        if time.monotonic() >= due:
            subject.sample(readers, began)
            due = time.monotonic() + seconds / _SAMPLES
            print(f"{subject.times[-1]:,.0f} s: {subject.counts['turns']:,} turns", flush=True)
        time.sleep(subject.rng.uniform(0.0, 2 * pause_seconds))


def _report(subject: Soak, before: Sample, after: Sample, seconds: float, seed: int) -> Report:
    rng, rows, num_grown = Random(seed), [], 0
    first = int(len(subject.times) * _WARM)
    for name, bound in BOUNDS.items():
        series = [(t, sample[name]) for t, sample in zip(subject.times, subject.samples, strict=True) if name in sample]
        found = trend(*zip(*series[first:], strict=True), rng)
        flat = found.is_flat(bound)
        num_grown += not flat
        rows.append(_row(name, found, "flat" if flat else "**grows**"))
    left = _left(before, after)
    counts = dict(subject.counts) | {"quantities that grow": num_grown, "left when all is closed": len(left)}
    details = {
        "left": {name: [before[name], after[name]] for name in left},
        "times": [round(t, 1) for t in subject.times],
        "samples": subject.samples,
        "bounds per hour": {name: bound.per_hour for name, bound in BOUNDS.items()},
    }
    head = ("quantity", "first", "last", "slope, per hour", "its noise", "verdict")
    return Report("soak", head, rows, counts, seconds, seed, "python -m tests.matrices.soak", details)


def _row(name: str, found: Trend, verdict: str) -> list[str]:
    unit = BOUNDS[name].unit
    first, last = (f"{value:,.4g} {unit}".strip() for value in (found.first, found.last))
    return [name, first, last, f"{found.slope:+.3g}", f"{found.low:+.3g} to {found.high:+.3g}", verdict]


def failed(report: Report) -> bool:
    return bool(report.counts["quantities that grow"] or report.counts["left when all is closed"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.matrices.soak")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.3, help="seconds between two turns, on average")
    parser.add_argument("--quick", action="store_true", help="half a minute, which shows that it runs, and no report")
    told = parser.parse_args()
    torch.set_num_threads(1)
    report = soak(30.0 if told.quick else told.minutes * 60, told.seed, 0.0 if told.quick else told.pause)
    for row in report.rows:
        print(*row, sep=" | ")
    print(json.dumps({**report.counts, **report.details["left"]}, indent=1))
    if not told.quick:
        from tests.matrices.soak.soak_picture import draw

        path = keep(report)
        draw(path, REPOSITORY / "docs/soak.svg")
        show(path)
    if failed(report):
        print(f"repeat it by: python -m tests.matrices.soak --seed {told.seed} --minutes {told.minutes:g}")
    return failed(report)


if __name__ == "__main__":
    sys.exit(main())
