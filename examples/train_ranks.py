"""Training under FSDP on several ranks: the same loop as on one, and the same calls on every rank.

In: a folder or URL. Out: one line of JSON per event of rank 0 on stdout. Knows nothing of: who reads them.

    torchrun --nproc-per-node 4 -m examples.train_ranks demo_out/run/ranks

Run it again after a Ctrl-C or a SIGKILL, with any number of ranks: it goes on from the last commit.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import async_ckpt
from examples.gpt import GPT, Sizes, batches

EVERY = 10
SIZES = Sizes(width=128, blocks=4)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", nargs="?", help="where checkpoints go; without it, nothing is saved")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--die-in", type=int, default=-1, help="the step in whose save the last rank is killed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if arguments.root is None:
        for _ in Training().run(arguments.steps):
            pass
    else:
        train(Training(), arguments.root, steps=arguments.steps, die_in=arguments.die_in)
    dist.destroy_process_group()


def train(training: Training, root: str, *, steps: int, die_in: int) -> None:
    """The example: all that `async_ckpt` adds to a loop, on every rank."""
    slowly = 2e6 if die_in >= 0 else None  # so that the kill comes in the middle of writing
    with async_ckpt.AsyncCheckpointer(root, keep=2, guard=training.optimizer, max_bandwidth=slowly) as ckpt:
        start = ckpt.restore(training.state)  # also of another number of ranks
        training.tell("restored", step=start)
        for step in training.run(steps):
            if step % EVERY == 0:
                handle = ckpt.save(training.state, step)
                if step == die_in:
                    kill_in_mid_save(handle)


class Training:
    """The model, cut over all ranks, and all that decides the next step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = GPT(SIZES)
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-4)
        self.counters = {"step": 0}
        torch.manual_seed(1000 + dist.get_rank())  # each rank draws its own batches
        self._draw = batches(SIZES)

    @property
    def state(self) -> dict[str, object]:
        """What a checkpoint holds. Each rank has generators of its own, and gets these back."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "rng": async_ckpt.RngState(),
            "counters": self.counters,
        }

    def run(self, steps: int) -> Iterator[int]:
        """Train on until `steps` have been taken in all; yields after each."""
        while self.counters["step"] < steps:
            text = self._draw()
            self.optimizer.zero_grad()
            loss = self.model.loss(text)  # which calls the model, as FSDP wants
            loss.backward()
            self.optimizer.step()
            self.counters["step"] += 1
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            self.tell("step", step=self.counters["step"], loss=float(mean.item() / dist.get_world_size()).hex())
            yield self.counters["step"]

    def tell(self, event: str, **facts: object) -> None:
        if dist.get_rank() == 0:
            print(json.dumps({"event": event, **facts}), flush=True)


def kill_in_mid_save(handle: async_ckpt.SaveHandle) -> None:
    """Kill the last rank once it has written something of this save, and not all."""
    if dist.get_rank() < dist.get_world_size() - 1:
        return

    def watch() -> None:
        while not handle.progress.written_bytes:
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main()
