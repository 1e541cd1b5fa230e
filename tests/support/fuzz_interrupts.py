"""Ctrl-C at any line of `save`, guarded or not, leaves a checkpointer that saves on, and nothing half done.

The interrupt is raised by a trace function, where Python itself would run a signal's handler: between two lines. Some of the lines are
in `tests/core/saving/test_interrupts.py`. `python tests/support/fuzz_interrupts.py 10000` interrupts as many saves at random lines.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import async_ckpt
from async_ckpt import AsyncCheckpointer

OURS = str(Path(async_ckpt.__file__).parent)
PATIENCE = 60.0


class Interrupt:
    """Raises KeyboardInterrupt at a line of the library on this thread: the `number`-th, or none; counts them."""

    def __init__(self, number: int | None) -> None:
        self.number = number
        self.files: list[str] = []  # of each line
        self.where = ""

    def _trace(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(OURS):
            return self._trace if event == "call" else None  # it may call us
        if event == "line":
            self.files.append(frame.f_code.co_filename)
            if len(self.files) == self.number:
                self.where = f"{self.files[-1]}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._trace

    def __enter__(self) -> Interrupt:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)


class Training:
    """Some tensors that a guard defers, and some that are copied at once."""

    def __init__(self, root: Path, *, guarded: bool) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(1 << 19))  # 2 MiB
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0, momentum=0.9)
        self.run_step()
        self.frozen = {"bias": torch.arange(1000)}
        self.guard = self.optimizer if guarded else None
        self.ckpt = AsyncCheckpointer(root, keep=2, segment_bytes=4 << 20, host_bytes=16 << 20)
        self.number = 0

    def run_step(self) -> None:
        self.weight.grad = torch.ones_like(self.weight)
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {
            "weight": self.weight,
            "optimizer": self.optimizer,
            "frozen": self.frozen,
            "step": self.number,
        }

    def save(self) -> async_ckpt.SaveHandle:
        self.number += 1
        return self.ckpt.save(
            self.state(), step=self.number, guard=self.guard, record={"loss": 0.5}, unchanged="frozen"
        )

    def interrupted_save(self, number: int | None) -> Interrupt:
        with Interrupt(number) as interrupt:
            try:
                self.save()
            except KeyboardInterrupt:
                pass
        return interrupt

    def assert_usable(self, where: str) -> None:
        """The next step and the next save are what they would have been; nothing waits for ever."""
        self.run_step()
        before = self.weight.detach().clone()
        handle = self.save()
        self.run_step()  # which the guard holds back
        handle.result(PATIENCE)
        loaded = self.ckpt.load(self.number)
        assert loaded["step"] == self.number, where
        assert torch.equal(loaded["weight"], before), where
        assert torch.equal(loaded["frozen"]["bias"], torch.arange(1000)), where
        self.ckpt.wait(PATIENCE)
        assert self.ckpt.metrics()["saves_in_flight"] == 0, where
        assert self.ckpt._saver.pool._num_segments <= 4, where


def main(num_saves: int) -> None:
    chooser = random.Random(0)
    for guarded in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            training = Training(Path(folder), guarded=guarded)
            num_lines = len(training.interrupted_save(None).files)
            places: dict[str, int] = {}
            for number in range(num_saves // 2):
                interrupt = training.interrupted_save(chooser.randint(1, num_lines))
                places[interrupt.where] = places.get(interrupt.where, 0) + 1
                training.assert_usable(interrupt.where)
                if number % 500 == 0:
                    print(f"{number} of {num_saves // 2}, guarded={guarded}", flush=True)
            training.ckpt.close()
            print(f"guarded={guarded}: interrupted at {len(places)} different lines; every next save was right")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
