"""The whole story in under three minutes: train, kill in the middle of a save, resume, compare every bit; then the same
with a RAM disk in front.

In: a folder or URL for checkpoints. Out: lines to read, a table, a picture; exit code 1 if one bit differs.
Knows nothing of: where that is.

    python -m examples.demo [--root FOLDER_OR_URL]
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import async_ckpt
from examples.picture import draw
from examples.process import command_line, events, running
from examples.screen import Screen
from examples.trace import Event, Trace

STEPS: Final = 84
EVERY: Final = 16  # no divisor of STEPS: the last save, too, has steps to hide behind, as in a longer training
KILL_FROM: Final = 48  # the first save that may be killed: two are committed by then
MEMORY_KILL_FROM: Final = 32  # one step is behind the memory by then
MEMORY: Final = Path("/dev/shm")
MEMORY_BYTES: Final = 400_000_000  # keep + 2 states of 59 MB, and as much again
LOCAL: Final = Path("demo_out/run")
PICTURE: Final = Path("demo_out/timeline.png")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train, kill, resume, compare.")
    parser.add_argument(
        "--root",
        default=os.environ.get("ROOT") or str(LOCAL),
        help=f"where checkpoints go, such as s3://bucket/prefix; default $ROOT, or {LOCAL}",
    )
    began = time.perf_counter()
    demo = Demo(parser.parse_args().root)
    say, chapter = demo.screen.say, demo.screen.chapter

    chapter(f"1. {STEPS} steps without interruption and without a save, to compare with")
    whole = demo.train("nothing")
    say(f"loss {_loss(whole, 1):.3f} at step 1, {_loss(whole, STEPS):.3f} at step {STEPS}")

    chapter(f"2. The same, saved every {EVERY} steps through async_ckpt, and killed in the middle of a save")
    killed = demo.train_until_killed_in_a_save()

    chapter("3. Started again")
    resumed = demo.resume(killed[-1])
    demo.compare(whole, *killed, resumed)
    say(f"steps {resumed.first_step + 1} to {STEPS}: every loss equals that of the uninterrupted run, bit for bit,")
    say(f"up to the last one, {resumed.losses[STEPS]} ({_loss(resumed, STEPS):.6f}); so does every weight after it")

    chapter(f"4. A RAM disk in front, {MEMORY}: killed as soon as a step is there, and started again")
    from_memory = demo.resume_from_memory()
    demo.compare(whole, *from_memory)
    if from_memory:
        say("memory outlives a process that is killed: again every loss, and every weight, is that of the whole run")

    chapter("5. What saving costs: the same training, uninterrupted, saved in three ways")
    ways = [demo.train(way) for way in ("async_ckpt", "tar", "tar.gz")]
    demo.compare(whole, *ways)
    demo.screen.table(ways)
    if demo.in_store:
        say("async_ckpt wrote to the store, tar and tar.gz to a local disk.")

    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    draw(PICTURE, ways, whole=whole, killed=killed[-1], resumed=resumed)
    say("")
    say(f"checkpoints: {demo.root}")
    say(f"picture:     {PICTURE.resolve()}")
    say(f"time:        {time.perf_counter() - began:.0f} s")
    # The store of the demo ends with it.
    say("next:        make demo-ranks" if demo.in_store else f"next:        {command_line()} ls {demo.root}")


class Demo:
    """Runs every training as a process of its own, so that a kill is a kill."""

    def __init__(self, root: str) -> None:
        self.in_store = "://" in root
        # What synchronous saving is compared on is always a disk.
        self.local = (LOCAL if self.in_store else Path(root)).resolve()
        # Nothing in a store is deleted, not even what is ours: each demo has a prefix of its own there.
        self.root = f"{root.rstrip('/')}/demo-{os.urandom(4).hex()}" if self.in_store else str(self.local)
        self.screen = Screen()
        for old in self.local.glob("demo-*"):  # our own of last time; whatever else is there stays
            shutil.rmtree(old)

    def place(self, way: str, folder: str) -> str:
        root = self.root if way == "async_ckpt" else str(self.local)
        return f"{root}/demo-{folder or way}"

    @property
    def killed(self) -> async_ckpt.AsyncCheckpointer:
        """The run that was killed, to be looked at."""
        return async_ckpt.AsyncCheckpointer(self.place("async_ckpt", "killed"))

    def train(self, way: str, *places: str, is_due: Callable[[Event], bool] = lambda _: False) -> Trace:
        """One process from start to end, or until an event after which the kill `is_due`."""
        trace = Trace(way)
        command = [sys.executable, "-m", "examples.train", way, *(places or [self.place(way, "")])]
        command += ["--steps", str(STEPS), "--every", str(EVERY)]
        with self.screen.following(trace, steps=STEPS) as show, running(command) as process:
            for event in events(process):
                trace.add(event)
                show(event)
                if trace.killed_in is None and is_due(event):
                    process.kill()  # SIGKILL: no handler, no exit hook, no last write
                    trace.killed_in = event["step"]
        if process.returncode != (0 if trace.killed_in is None else -signal.SIGKILL):
            sys.exit(f"the training with {way} ended with exit code {process.returncode}; see above")
        return trace

    def train_until_killed_in_a_save(self) -> list[Trace]:
        """Usually one process; each one whose commit was faster than the kill is followed by another."""
        tries: list[Trace] = []
        place, kill_from = self.place("async_ckpt", "killed"), KILL_FROM
        while True:
            tries.append(self.train("async_ckpt", place, is_due=partial(self._in_mid_save, kill_from)))
            step = tries[-1].killed_in
            if step is None:
                sys.exit("each save was durable before a kill could hit it; try a slower disk with --root")
            committed = self.killed.steps()
            if step not in committed:
                break
            self.screen.say(f"the save of step {step} was faster than the kill; again, at the next one")
            kill_from = step + EVERY
        self.screen.say(f"SIGKILL in the middle of saving step {step}. Committed: {committed}, without step {step}.")
        if self.in_store:  # there an object is not there at all before it is whole
            return tries
        torn = self._uncommitted_files(step)
        if not torn:
            sys.exit(
                f"step {step} is neither committed nor did the kill leave a file of it: that is no kill in mid-save"
            )
        for path in torn:
            self.screen.say(f"left behind: {path.name}, {path.stat().st_size / 1e6:.1f} MB that no manifest names")
        return tries

    def resume(self, killed: Trace) -> Trace:
        """The same command again; what the kill left behind must be gone afterwards."""
        assert killed.killed_in is not None
        torn = self._uncommitted_files(killed.killed_in)
        newest = self.killed.latest()
        resumed = self.train("async_ckpt", self.place("async_ckpt", "killed"))
        if resumed.first_step != newest:
            sys.exit(f"resumed from step {resumed.first_step}, and the last commit was {newest}")
        if any(path.exists() for path in torn):
            sys.exit(f"the first save after the kill did not sweep {torn[0]}")
        if torn:
            self.screen.say("what the kill had left behind was swept away by the first save")
        return resumed

    def resume_from_memory(self) -> list[Trace]:
        """Processes that are killed with a step in memory alone, and one that goes on from it. None without memory."""
        if not os.access(MEMORY, os.W_OK) or shutil.disk_usage(MEMORY).free < MEMORY_BYTES:
            self.screen.say(f"skipped: there is no RAM disk at {MEMORY} with {MEMORY_BYTES / 1e6:.0f} MB of room")
            return []
        with tempfile.TemporaryDirectory(prefix="async_ckpt-demo-", dir=MEMORY) as memory:
            behind = self.place("async_ckpt", "behind-memory")
            tries = self._train_until_killed_with_a_step_in(memory, behind)
            resumed = self.train("async_ckpt", memory, behind)
            if resumed.first_step != tries[-1].killed_in:
                sys.exit(f"resumed from step {resumed.first_step}, and memory had step {tries[-1].killed_in}")
            return [*tries, resumed]

    def _train_until_killed_with_a_step_in(self, memory: str, behind: str) -> list[Trace]:
        """Each process that is killed too late, with the step behind the memory already, is followed by another."""
        tries: list[Trace] = []
        kill_from = MEMORY_KILL_FROM
        while True:
            due = partial(_in_memory, memory, kill_from)
            tries.append(self.train("async_ckpt", memory, behind, is_due=due))
            step = tries[-1].killed_in
            if step is None:
                sys.exit(f"each step was at {behind} before a kill could hit it; try a slower disk with --root")
            arrived = async_ckpt.AsyncCheckpointer(behind).steps()
            if step not in arrived:
                self.screen.say(f"SIGKILL. Step {step} is in memory, and not behind it yet: {arrived} are.")
                return tries
            self.screen.say(f"step {step} was behind the memory before the kill; again, at the next one")
            kill_from = step + EVERY

    def compare(self, whole: Trace, *others: Trace) -> None:
        """Ends the demo with exit code 1 at the first bit that differs."""
        for trace in others:
            difference = trace.difference_from(whole)
            if difference:
                sys.exit(f"NOT the same training as without saving ({trace.way}): {difference}")

    def _in_mid_save(self, kill_from: int, event: Event) -> bool:
        """Whether a save is being written, of this step or a later one. On a fast disk, nothing may be seen of it between
        the file that it begins and its last byte.
        """
        if event["event"] != "writing" or event["step"] < kill_from or event["written"] == event["total"]:
            return False
        return event["written"] > 0 or bool(self._uncommitted_files(event["step"]))

    def _uncommitted_files(self, step: int) -> list[Path]:
        """Of a step without a manifest, that is: every file. None in a store."""
        return [] if self.in_store else list(Path(self.root, "demo-killed", f"step_{step:08d}").glob("*"))


def _in_memory(memory: str, kill_from: int, event: Event) -> bool:
    """Whether a step, this one or a later, is committed in memory while its handle still waits for what is behind."""
    if event["event"] != "writing" or event["step"] < kill_from:
        return False
    return Path(memory, f"step_{event['step']:08d}", "manifest.json").exists()


def _loss(trace: Trace, step: int) -> float:
    return float.fromhex(trace.losses[step])


if __name__ == "__main__":
    main()
