"""Fine-tuning in the manner of tinker-cookbook's supervised loop, on a backend whose saves hold nobody up.

In: a folder for the log, a folder or URL for the archives. Out: `checkpoints.jsonl`, and one line of JSON per event.
Knows nothing of: what an archive is.

    python -m examples.supervised                       trains, is killed in the middle of a save, resumes; compares every loss
    python -m examples.supervised LOG [--store PLACE]   the loop alone; run again, it goes on from its last record

A record says which batch comes next, not which one came last: a run that is resumed repeats no batch and misses none.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from async_ckpt import CheckpointError
from async_ckpt.core.runs.journal import NAME, parse
from examples.gpt import Sizes, corpus, digest
from examples.process import events, running
from examples.tinker import Saving, TrainingClient
from examples.trace import Trace
from examples.train import Log

Record = dict[str, Any]

EPOCHS: Final = 3
EPOCH_BATCHES: Final = 16
SAVE_EVERY: Final = 12
ROLLING_SAVE_EVERY: Final = 4
KILL_FROM: Final = 20
TOY: Final = Sizes(width=32, heads=2, blocks=1, context=16, batch=2)
OUT: Final = Path("demo_out/supervised")


# --- the loop -------------------------------------------------------------------------------------------------


async def train(client: TrainingClient, journal: Journal, log: Log, data: Dataset) -> None:
    """Train for all epochs, from the beginning or from what the last record of the journal says comes next."""
    step = 0
    last = journal.last_with("state_path")
    if last is not None:
        await client.load_state_with_optimizer_async(last["state_path"])
        step = last["epoch"] * data.num_batches + last["batch"]
    log.tell("start", step=step)
    checkpoints = CheckpointManager(client, journal, log, data.num_batches)
    while step < EPOCHS * data.num_batches:
        begin = log.now()
        loss = await client.forward_backward_async(data.batch(*divmod(step, data.num_batches)))
        await client.optim_step_async()
        step += 1
        log.tell("step", step=step, loss=loss.hex(), begin=begin, end=log.now())
        await checkpoints.maybe_save_async(step)
    if last is None or not last.get("final"):
        await checkpoints.save_final_async(step)


class CheckpointManager:
    """Saves every so many steps, one at a time; a record is written once its checkpoint is there, and not before.

    Between those that stay, rolling ones are saved more often, each of which goes when the next checkpoint is there. A
    periodic save that fails is logged, and training goes on; a final one that fails is raised.
    """

    def __init__(self, client: TrainingClient, journal: Journal, log: Log, epoch_batches: int) -> None:
        self._client, self._journal, self._log = client, journal, log
        self._epoch_batches = epoch_batches
        self._under_way: asyncio.Task[None] | None = None
        self._rolling = [record["state_path"] for record in journal.records if record.get("rolling")]

    async def maybe_save_async(self, step: int) -> None:
        """Begin a save if one is due, after the one before it has ended."""
        rolling = step % SAVE_EVERY != 0
        if rolling and step % ROLLING_SAVE_EVERY:
            await asyncio.sleep(0)  # a turn for the save under way
            return
        await self._drain()
        record = self._record(f"{step:06d}", step) | ({"rolling": True} if rolling else {})
        saving = await self._client.save_state_async(record["name"])
        self._log.tell("saving", step=step, path=saving.path)
        self._under_way = asyncio.create_task(self._follow(saving, record))

    async def save_final_async(self, step: int) -> None:
        """Save what training goes on from, and what is sampled from, after the last periodic save has ended."""
        await self._drain()
        state = await self._client.save_state_async("final")
        sampler = await self._client.save_weights_for_sampler_async("final")
        record = self._record("final", step) | {"final": True, "sampler_path": sampler.path}
        await sampler.result_async()
        await self._succeeded(await state.result_async(), record)

    async def _drain(self) -> None:
        if self._under_way is not None:
            await self._under_way

    async def _follow(self, saving: Saving, record: Record) -> None:
        try:
            await saving.result_async()
        except CheckpointError:
            logging.exception("checkpoint %s was not saved; training goes on", record["name"])
        else:
            await self._succeeded(saving, record)

    async def _succeeded(self, saving: Saving, record: Record) -> None:
        self._journal.append(record | {"state_path": saving.path})
        for path in self._rolling:
            try:
                await self._client.delete_async(path)
            except (CheckpointError, OSError):
                logging.exception("%s, which is no longer needed, is still there", path)
        self._rolling = [saving.path] if record.get("rolling") else []
        self._log.tell("saved", name=record["name"])

    def _record(self, name: str, step: int) -> Record:
        epoch, batch = divmod(step, self._epoch_batches)
        return {"name": name, "batch": batch, "epoch": epoch}


class Journal:
    """`checkpoints.jsonl`: a JSON object per line, only ever appended to. A last line that a kill has torn does not count."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / NAME
        data = self._path.read_bytes() if self._path.exists() else b""
        self.records: list[Record] = parse(data)
        self._is_torn = not data.endswith(b"\n") and bool(data)

    def last_with(self, key: str) -> Record | None:
        """The last record that has such a path."""
        return next((record for record in reversed(self.records) if key in record), None)

    def append(self, record: Record) -> None:
        with open(self._path, "ab") as file:
            file.write(b"\n" * self._is_torn + json.dumps(record).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._is_torn = False
        self.records.append(record)


class Dataset:
    """Windows of the text, in an order that the epoch alone decides."""

    def __init__(self, sizes: Sizes, num_batches: int) -> None:
        self._text, self._sizes = corpus(), sizes
        self.num_batches = num_batches

    def batch(self, epoch: int, number: int) -> Tensor:
        size, context = self._sizes.batch, self._sizes.context
        order = torch.randperm(self.num_batches * size, generator=torch.Generator().manual_seed(epoch))
        starts = order[number * size : (number + 1) * size, None] * context
        return self._text[starts + torch.arange(context + 1)].long()


def train_as_told(log_folder: Path, store: str, sizes: Sizes) -> None:
    """The loop as a process."""
    torch.set_num_threads(1)  # sums come out the same on every machine size, and a core is left for writing
    torch.use_deterministic_algorithms(True)
    log = Log()
    with TrainingClient(store, sizes) as client:
        asyncio.run(train(client, Journal(log_folder), log, Dataset(sizes, EPOCH_BATCHES)))
        log.tell("end", end=log.now(), digest=digest(client.model))


# --- the story ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Story:
    """Runs the loop as a process of its own, so that a kill is a kill."""

    toy: bool

    def tell(self) -> None:
        shutil.rmtree(OUT, ignore_errors=True)
        steps = EPOCHS * EPOCH_BATCHES
        print(f"{steps} steps without interruption")
        whole = self._run("whole")
        print(f"the same, killed in the first save from step {KILL_FROM} on")
        killed = self._run("killed", kill_from=KILL_FROM)
        last = Journal(OUT / "killed").last_with("state_path")
        if killed.killed_in is None or last is None:
            sys.exit("the training ended before it could be killed")
        print(f"SIGKILL in the save of step {killed.killed_in}; the last record: {json.dumps(last)}")
        print(f"left behind: {', '.join(set(_files('killed')) - set(_files('whole')))}")
        resumed = self._run("killed")
        print(f"resumed: the first step was {resumed.first_step + 1}")
        if resumed.first_step != last["epoch"] * EPOCH_BATCHES + last["batch"]:
            sys.exit("that is not the next batch of the record")
        for trace in (killed, resumed):
            difference = trace.difference_from(whole)
            if difference:
                sys.exit(f"NOT the same training: {difference}")
        print(f"steps {resumed.first_step + 1} to {steps}: every loss is that of the uninterrupted run, bit for bit;")
        print(f"the last one {resumed.losses[steps]}; so is every weight, sha256 {resumed.digest[:12]}")
        self._check_files()

    def _run(self, name: str, *, kill_from: int | None = None) -> Trace:
        trace = Trace(name)
        command = [sys.executable, "-m", "examples.supervised", str(OUT / name)]
        with running(command + ["--toy"] * self.toy) as process:
            for event in events(process):
                trace.add(event)
                saving = event["event"] == "saving" and trace.killed_in is None
                if saving and kill_from is not None and event["step"] >= kill_from:
                    process.kill()  # SIGKILL: no handler, no exit hook, no last write
                    trace.killed_in = event["step"]
        if process.returncode != (0 if trace.killed_in is None else -signal.SIGKILL):
            sys.exit(f"the training ended with exit code {process.returncode}; see above")
        return trace

    def _check_files(self) -> None:
        """What the killed run has left is what the other one has: no half archives, no scratch, no rolling ones."""
        whole, killed = _files("whole"), _files("killed")
        if whole != killed:
            sys.exit(f"NOT the same files: {sorted(set(whole) ^ set(killed))}")
        print(f"on disk: {', '.join(killed)}")


def _files(name: str) -> list[str]:
    folder = OUT / name
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a small GPT in the manner of tinker-cookbook.")
    parser.add_argument("log", nargs="?", type=Path, help="folder of the log; without it, the whole story is told")
    parser.add_argument("--store", help="where archives go, such as s3://bucket/runs; by default into the log's folder")
    parser.add_argument("--toy", action="store_true", help="a tiny model")
    args = parser.parse_args()
    if args.log is None:
        begin = time.perf_counter()
        Story(args.toy).tell()
        print(f"{time.perf_counter() - begin:.0f} s")
    else:
        train_as_told(args.log, args.store or str(args.log), TOY if args.toy else Sizes())


if __name__ == "__main__":
    main()
