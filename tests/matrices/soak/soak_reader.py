"""A reader beside a training: it loads, lists, watches and pulls, again and again, until it is killed.

In: the roots of a run and of versions. Out: nothing; it exits with 1 if it sees anything that was never saved. Knows nothing
of: who writes.

Steps and versions that go while they are read, and a store that does not answer, are what a reader has to expect.
"""

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import async_ckpt
from async_ckpt import AsyncCheckpointer, CheckpointError, Place, Subscriber
from tests.matrices.soak.soaked_state import check


def main() -> None:
    told: dict[str, Any] = json.loads(sys.argv[1])
    rng = random.Random(told["seed"])
    runs = [Place(**place) for place in told["runs"]]
    weights = [Place(**place) for place in told["weights"]]
    folder = Path(told["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    readers = [
        _Reader(run, Subscriber(place), folder / str(number))
        for number, (run, place) in enumerate(zip(runs, weights, strict=True))
    ]
    while True:
        reader = rng.choice(readers)
        try:
            rng.choice([reader.load, reader.list, reader.pull])()
        except (CheckpointError, FileNotFoundError):
            pass
        if told["watches"] and rng.random() < 0.02 and "://" not in reader.run.text:
            command = [sys.executable, "-m", "async_ckpt", "watch", "--once", reader.run.text]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
            assert "Traceback" not in done.stderr, done.stderr
            assert done.returncode in (0, 1), done.stderr  # 1: the run is to be looked at, as after faults it is
        time.sleep(rng.uniform(0.0, told["pause_seconds"]))


class _Reader:
    """What can be read of one run and of the versions beside it."""

    def __init__(self, run: Place, subscriber: Subscriber, folder: Path) -> None:
        self.run, self._subscriber, self._folder = run, subscriber, folder

    def load(self) -> None:
        check(async_ckpt.load(self.run))

    def list(self) -> None:
        with AsyncCheckpointer(self.run) as reader:
            steps = reader.steps()
            assert steps == sorted(set(steps))
            if steps:
                check(reader.load(steps[-1]))

    def pull(self) -> None:
        self._subscriber.pull(self._folder)


if __name__ == "__main__":
    main()
