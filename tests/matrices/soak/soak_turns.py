"""What the training of a soak does: one thing after the other, and after each of them, whether all that was acknowledged is
there.

In: places, a source of chance. Out: counts, and AssertionError for anything that is not as promised. Knows nothing of: time,
faults.
"""

import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, Final

import torch

import async_ckpt
from async_ckpt import (
    AsyncCheckpointer,
    CheckpointError,
    NotCommittedError,
    NotUnchangedError,
    Place,
    Publisher,
    Subscriber,
    TornSnapshotError,
)
from async_ckpt.files import extract, pack_folder
from tests.matrices.soak.soaked_state import NUM_TENSORS, Soaked, check, weights_of

_KEEP: Final = 4


class Rollout(torch.nn.Module):
    """What pulls the published weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList(torch.zeros(1 << 15) for _ in range(NUM_TENSORS))


class SoakedRun:
    """One run and the versions beside it, and what each of them may hold by now."""

    def __init__(self, soaked: Soaked, roots: list[Place], weights: Place, rng: Random, **options: Any) -> None:
        self.counts: Counter[str] = Counter()
        self._soaked, self._roots, self._rng, self._options = soaked, roots, rng, options
        self._weights = weights
        self._may: dict[int, set[int]] = {}  # numbers of states, by step
        self._acknowledged: dict[int, int] = {}
        self._version = 0
        self.open()

    def open(self) -> None:
        self.checkpointer = AsyncCheckpointer(
            self._roots if len(self._roots) > 1 else self._roots[0],
            keep=_KEEP,
            guard=self._soaked.optimizer,
            on_rollback="retire",
            **self._options,
        )
        local = "://" not in self._weights.text
        self.publisher = Publisher(self._weights, anchor_every=5, keep=3, on_rollback="retire", local=local)
        self.subscriber = Subscriber(self._weights)

    def close(self) -> None:
        self.publisher.close()
        with suppress(CheckpointError):  # a save that failed by a fault, and was told of already
            self.checkpointer.close()
        self.subscriber.close()

    # --- turns ------------------------------------------------------------------------------------------------

    def save(self, number: int) -> None:
        self._save(number, self._newest() + self._rng.randint(1, 3))

    def save_again(self, number: int) -> None:
        if self._acknowledged:
            self._save(number, self._newest(), overwrite=True)

    def roll_back(self, number: int) -> None:
        if len(self._acknowledged) > 1:
            self._save(number, self._rng.choice(sorted(self._acknowledged)[:-1]), overwrite=True)

    def save_borrowing(self, number: int) -> None:
        """A group is borrowed from the step before, unless another tensor stands for it since a restore."""
        step = self._newest() + 1
        try:
            self._save(number, step, unchanged=["frozen"] if self._acknowledged else [])
        except NotUnchangedError:
            self.counts["not unchanged, and told"] += 1
            self._save(number, step)

    def save_a_snapshot(self, number: int) -> None:
        with async_ckpt.snapshot(self._soaked.become(number), guard=self._soaked.optimizer) as snap:
            self._save(number, self._newest() + 1, snap)

    def save_torn(self, number: int) -> None:
        """What is written to beside the optimizer fails the save, or comes too late for it."""
        step = self._newest() + 1
        handle = self.checkpointer.save(self._soaked.become(number), step)
        with torch.no_grad():
            self._soaked.parameters[0].add_(1.0)
        try:
            handle.result()
        except TornSnapshotError:
            self.counts["torn, and told"] += 1
        else:
            self._acknowledge(step, number)

    def restore(self, _: int) -> None:
        if not self._acknowledged:
            return
        step = self.checkpointer.latest()
        assert step is not None
        state = self._soaked.state(-1)
        self._soaked.optimizer.step()
        live = {**state, "frozen": {"base": torch.zeros_like(self._soaked.frozen)}, "number": 0}
        self.checkpointer.restore(live, step)
        assert check(live) in self._may[step]

    def publish(self, _: int) -> None:
        self._version += 1
        self.publisher.publish(weights_of(self._version), self._version).result()
        self.counts["versions"] += 1
        module = Rollout()
        self.subscriber.pull(module)
        expected = weights_of(self._version)
        for i, layer in enumerate(module.layers):
            assert torch.equal(layer.detach(), expected[f"layers.{i}"]), f"layers.{i} of version {self._version}"

    def open_again(self, _: int) -> None:
        self.close()
        self.open()

    # --- what holds -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """The newest step that was acknowledged is there, and what is there was saved."""
        self.checkpointer.wait()  # retention deletes steps behind a save
        steps = self.checkpointer.steps()
        self._acknowledged = {step: number for step, number in self._acknowledged.items() if step in steps}
        if not steps:
            return
        for step in {steps[-1], self._rng.choice(steps)}:
            try:
                number = check(self.checkpointer.load(step))
            except NotCommittedError:  # by the retention of a further place, which has gone on meanwhile
                assert step != steps[-1], f"step {step}, the newest, is gone"
                assert step not in self.checkpointer.steps(), f"step {step} is listed, and cannot be loaded"
                continue
            if step in self._acknowledged:
                assert number == self._acknowledged[step], f"step {step} is {number}"
            else:
                assert number in self._may[step], f"step {step} is {number}, of {self._may[step]}"
        self.counts["loads"] += 1

    def _save(self, number: int, step: int, state: Any = None, **options: Any) -> None:
        self._may.setdefault(step, set()).add(number)
        before = self._acknowledged
        told = self._soaked.become(number) if state is None else state
        guard = {} if state is None else {"guard": None}
        lost = [other for other in before if other >= step]
        self._acknowledged = {other: kept for other, kept in before.items() if other < step}
        try:
            self.checkpointer.save(told, step, record={"loss": 1.0 / (number + 1)}, **guard, **options).result()
        except CheckpointError:
            if lost == [] and before:  # only a rollback or an overwriting may have gone half of its way
                assert max(before) in self.checkpointer.steps(), f"{max(before)} is gone"
            raise
        self._acknowledge(step, number)
        assert self.checkpointer.latest() == step

    def _acknowledge(self, step: int, number: int) -> None:
        self._may.setdefault(step, set()).add(number)
        self._acknowledged[step] = number
        self.counts["saves"] += 1

    def acknowledged(self) -> list[int]:
        """The steps that a save was acknowledged for, as far as they are kept."""
        return sorted(self._acknowledged)

    def _newest(self) -> int:
        return max(self.checkpointer.steps(), default=0)


TURNS: Final[Mapping[str, int]] = {
    "save": 10,
    "save_again": 3,
    "roll_back": 2,
    "save_borrowing": 3,
    "save_a_snapshot": 3,
    "save_torn": 1,
    "restore": 3,
    "publish": 4,
    "open_again": 1,
}
"""How often each is taken, beside the others."""


def write_files(folder: Path, soaked: Soaked, number: int) -> None:
    """Archives and packed files outside of any run."""
    state = soaked.become(number)
    async_ckpt.save(state, folder / "one.tar.zst").result()
    assert check(async_ckpt.load(folder / "one.tar.zst")) == number
    async_ckpt.wrap(torch.save)(state, folder / "one.pt").result()
    assert check(torch.load(folder / "one.pt")) == number
    (folder / "given").mkdir()
    (folder / "given/a").write_bytes(bytes([number % 256]) * 100_000)
    pack_folder(folder / "given", folder / "given.tar.zst").result()
    extract(folder / "given.tar.zst", folder / "taken")
    assert (folder / "taken/a").read_bytes() == (folder / "given/a").read_bytes()
    for name in ("given", "taken"):
        shutil.rmtree(folder / name)
    for name in ("one.tar.zst", "one.pt", "given.tar.zst"):
        (folder / name).unlink()


def fork(*_: object) -> None:
    """A child that ends at once, as a data loader's may while a save is under way."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


Turn = Callable[[int], None]
