"""One training run, as a process of its own: how `async_ckpt` is used in a loop, and what it is compared with.

In: a way of saving, and folders or URLs. Out: one line of JSON per event on stdout. Knows nothing of: who reads them.

    python -m examples.train async_ckpt demo_out/run/mine

Run it again after a Ctrl-C or a SIGKILL: it goes on from the last commit.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Final

import torch

import async_ckpt
from examples.baselines import TarSaver
from examples.gpt import GPT, Sizes, batches, digest

WAYS: Final = ("async_ckpt", "tar", "tar.gz", "nothing")


def train_with_async_ckpt(training: Training, places: list[str], *, steps: int, every: int) -> None:
    """The example: all that `async_ckpt` adds to a loop. Of several places, each is in front of the next."""
    with (
        async_ckpt.AsyncCheckpointer(places, keep=2, guard=training.optimizer) as ckpt,
        Watch(training.log) as watch,
    ):
        ckpt.restore(training.state)  # the last commit; in an empty folder, nothing happens
        for step in training.run(steps):
            if step % every == 0:
                watch.follow(ckpt.save(training.state, step=step))


def train_with_tar(training: Training, saver: TarSaver, *, steps: int, every: int) -> None:
    """The same loop, waiting for every save."""
    for step in training.run(steps):
        if step % every == 0:
            begin = training.log.now()
            num_bytes = saver.save(training.state, step)
            seconds = training.log.now() - begin
            training.log.tell(
                "durable",
                step=step,
                begin=begin,
                bytes=num_bytes,
                stall_seconds=seconds,
                total_seconds=seconds,
            )


def train_without_saving(training: Training, *, steps: int) -> None:
    """The same loop, for its losses."""
    for _ in training.run(steps):
        pass


class Training:
    """The model, the optimizer, the data, and all that decides the next step."""

    def __init__(self, log: Log) -> None:
        sizes = Sizes()
        torch.manual_seed(0)
        self.log = log
        self.model = GPT(sizes)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-4)
        self.counters: dict[str, Any] = {"step": 0, "bytes_read": 0, "loss": 0.0}
        self._draw = batches(sizes)

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint holds. Batches and dropout are drawn from the generators, so these are the data position."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "rng": async_ckpt.RngState(),
            "counters": self.counters,
        }

    def run(self, steps: int) -> Iterator[int]:
        """Train on until `steps` have been taken in all; yields after each."""
        step = self.counters["step"]
        self.log.tell("start", step=step)
        while step < steps:
            begin = self.log.now()
            text = self._draw()
            self.optimizer.zero_grad()
            loss = self.model.loss(text)
            loss.backward()
            self.optimizer.step()
            value = float(loss.item())
            step += 1
            self.counters.update(step=step, bytes_read=self.counters["bytes_read"] + text.numel(), loss=value)
            self.log.tell("step", step=step, loss=value.hex(), begin=begin, end=self.log.now())
            yield step


class Watch:
    """Tells how far each save is until it is durable. Its one thread ends with the `with` block."""

    _LOOK_SECONDS: Final = 0.004  # a save of this size may be durable after 30 ms

    def __init__(self, log: Log) -> None:
        self._log = log
        self._thread = ThreadPoolExecutor(1)
        self._followed: list[Future[None]] = []

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._thread.shutdown()
        for followed in self._followed:
            followed.result()  # a save that failed must fail the run

    def follow(self, handle: async_ckpt.SaveHandle) -> None:
        self._followed.append(self._thread.submit(self._follow, handle, self._log.now()))

    def _follow(self, handle: async_ckpt.SaveHandle, returned: float) -> None:
        while not handle.done():
            progress = handle.progress
            self._log.tell("writing", step=handle.step, written=progress.written_bytes, total=progress.total_bytes)
            wait([handle], timeout=self._LOOK_SECONDS)
        report = handle.result()
        self._log.tell(
            "durable",
            step=report.step,
            begin=returned - report.stall_seconds,
            bytes=report.num_bytes,
            stall_seconds=report.stall_seconds,
            total_seconds=report.total_seconds,
        )


class Log:
    """One line of JSON per event; its clock starts with it."""

    def __init__(self) -> None:
        self._zero = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._zero

    def tell(self, event: str, **fields: object) -> None:
        # One write per line, so that the lines of two threads cannot mix.
        sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
        sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT, saving as you go.")
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("root", nargs="+", help="a folder; for async_ckpt also URLs such as s3://b/run, or several")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=16)
    args = parser.parse_args()

    torch.set_num_threads(1)  # sums come out the same on every machine size, and a core is left for writing
    torch.use_deterministic_algorithms(True)
    log = Log()
    training = Training(log)
    if args.way == "async_ckpt":
        train_with_async_ckpt(training, args.root, steps=args.steps, every=args.every)
    elif args.way == "nothing":
        train_without_saving(training, steps=args.steps)
    else:
        saver = TarSaver(Path(args.root[0]), compression="gz" if args.way == "tar.gz" else "")
        train_with_tar(training, saver, steps=args.steps, every=args.every)
    log.tell("end", end=log.now(), digest=digest(training.model))


if __name__ == "__main__":
    main()
