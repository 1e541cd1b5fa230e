"""The story of published weights: an engine follows a training by its sidecar, out of memory where there is any, else from files.

In: a folder. Out: lines to read; exit code 1 if one bit of the logits differs.

    python -m examples.demo_rollout
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import async_ckpt
from examples.process import command_line, events, running

ROOT: Final = Path("demo_out/rollout")
STEPS: Final = 120
EVERY: Final = 10
SWAPS_BEFORE_THE_KILL: Final = 3

Event = dict[str, Any]


def main() -> None:
    began = time.perf_counter()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.update({"RANK": "", "WORLD_SIZE": ""})  # as some launchers leave them
    shutil.rmtree(ROOT, ignore_errors=True)
    published: dict[int, Event] = {}
    swapped: list[Event] = []

    print(f"1. A training of {STEPS} steps saves and publishes one snapshot every {EVERY}; an engine generates")
    with (
        engine_with_sidecar() as (heard, kill),
        running(command("train_rollout", str(ROOT), "--steps", str(STEPS))) as training,
    ):
        told = events(training)
        for event in heard:
            swapped.append(event)
            hear_until(told, event["version"], published)
            show(event, published)
            if len(swapped) == SWAPS_BEFORE_THE_KILL:
                break
        kill()
        last = swapped[-1]["version"]
        print(f"\n2. The engine and its sidecar are killed at version {last}; the training goes on")
        hear_until(told, STEPS, published)
        sizes = [event["num_bytes"] for event in published.values()]
        print(f"   published: {', '.join(map(str, published))}; {min(sizes):,} to {max(sizes):,} bytes each")
    if training.returncode != 0:
        sys.exit(f"the training ended with exit code {training.returncode}; see above")

    print("\n3. The training has ended. Both start again; the engine has untrained weights, and the sidecar the files")
    with engine_with_sidecar("--until", str(STEPS)) as (heard, _):
        for event in heard:
            swapped.append(event)
            show(event, published)
    wrong = [event["version"] for event in swapped if event["logits"] != published[event["version"]]["logits"]]
    if wrong or swapped[-1]["version"] != STEPS:
        sys.exit(f"NOT the weights of the training: versions {wrong or swapped[-1]['version']}")

    print("\n4. The checkpoint of the same step")
    with async_ckpt.AsyncCheckpointer(ROOT / "run", ranks=(0, 1)) as ckpt:
        print(f"   committed: {ckpt.steps()}; versions kept: {async_ckpt.Subscriber(ROOT / 'weights').versions()}")
        if ckpt.latest() != STEPS:
            sys.exit(f"step {STEPS} should be committed")
    print(f"\nlogits of {len(swapped)} versions equal the training's, bit for bit")
    print(f"files: {ROOT}\ntime:  {time.perf_counter() - began:.0f} s\nnext:  {command_line()} ls {ROOT}")


@contextmanager
def engine_with_sidecar(*options: str) -> Iterator[tuple[Iterator[Event], Callable[[], None]]]:
    """The versions that an engine takes over, each with the pull of its sidecar; and what kills both."""
    with running(command("rollout", *options)) as engine:
        told = events(engine)
        follow = [sys.executable, "-m", "async_ckpt", "follow", str(ROOT / "weights"), "--into", str(ROOT / "model")]
        with running([*follow, "--post", next(told)["url"], "--poll", "0.05", "--json"]) as sidecar:

            def kill() -> None:
                sidecar.kill()
                engine.kill()

            pulls = (event for event in events(sidecar) if event["kind"] == "pulled")
            yield ({**pull, **swap} for swap, pull in zip(told, pulls, strict=False)), kill
            sidecar.terminate()


def command(module: str, *options: str) -> list[str]:
    return [sys.executable, "-m", f"examples.{module}", *options]


def hear_until(told: Iterator[Event], version: int, published: dict[int, Event]) -> None:
    """Read what the training tells until it has told of a version."""
    while version not in published:
        event = next(told, None)
        if event is None:
            sys.exit(f"the training ended before it told of version {version}")
        published[event["version"]] = event


def show(event: Event, published: dict[int, Event]) -> None:
    version, base, count = event["version"], event["base"], event["num_versions"]
    latency = event["at"] - published[version]["at"]
    deltas = count if base is not None else count - 1
    begin = "an anchor" if base is None else f"version {base}"
    kind = f"{begin} and {deltas} delta{'s' * (deltas != 1)}" if deltas else begin
    kind = "from memory" if event["from_memory"] else kind
    logits = event["logits"][:8]
    proof = f"logits {logits}, as in the training"
    if event["logits"] != published[version]["logits"]:
        proof = f"logits {logits}, NOT {published[version]['logits'][:8]} of the training"
    print(
        f"   version {version:3d}: {kind}, {event['num_bytes'] / 1e6:.2f} MB, pulled in {event['seconds'] * 1e3:.0f} ms, "
        f"loaded {abs(latency):.2f} s {'after' if latency >= 0 else 'before'} it was durable; {proof}"
    )


if __name__ == "__main__":
    main()
