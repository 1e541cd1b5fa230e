"""A training on a clock of its own, which asks a policy after each step. Time is a number that the tests move."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from async_ckpt import Due
from async_ckpt.core.report import SaveReport
from async_ckpt.core.saving.policy import SavePolicy


class ClockedTraining:
    """Steps take as long as they are told to. `saved` has the steps of saves, `begun` when they began.

    `noon` is the time of day, in seconds since the epoch, at which the clock is 0.
    """

    def __init__(self, *, noon: float = 0.0, stall_seconds: Callable[[], float] = lambda: 0.0, **rules: Any) -> None:
        self.now, self.step = 0.0, 0
        self.saved: list[int] = []
        self.begun: list[float] = []
        self.policy = SavePolicy(
            Due(**rules),
            clock=lambda: self.now,
            wall_clock=lambda: noon + self.now,
            stall_seconds=stall_seconds,
        )

    def run(self, seconds: float = 1.0) -> bool:
        """One step, and what the policy says after it."""
        self.now += seconds
        self.step += 1
        return self.policy.should_save(self.step)

    def begin_save(self) -> Future[SaveReport]:
        save: Future[SaveReport] = Future()
        self.policy.follow(self.step, save)
        self.saved.append(self.step)
        self.begun.append(self.now)
        return save
