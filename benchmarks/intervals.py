"""Ten thousand random trainings that fail: the time that they lose with the library's computed interval.

In: a setting. Out: figures by name. Knows nothing of: how they are printed. Nothing is timed here: the clock is a
number.

Each training does the work of thirty mean times between failures, which are from two hours to three days: half of them
exponential, half Weibull with shape 0.7. A save costs from a hundredth of a percent to a percent of that time. The cost
of each save is scattered, and for two of three trainings it is three times as much, or a third, in the second half. A
process knows the costs and failures in the run's history, as after `restore`, and those that it measures.

The result is compared with the best fixed interval: k * sqrt(2 * cost * mtbf) with the true mean of both, and the k at
which all trainings of that kind lose the least. Both meet the same failures. The time lost is all time beyond the work:
saves, and steps that are done again. Restores take equally long in both, and are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from async_ckpt import Due
from async_ckpt.core.saving.interval import NUM_SAVES, AdaptiveInterval, Past, SaveCost
from async_ckpt.core.saving.policy import interval_of

from .setting import Setting
from .table import Figure, Target

_BATCHES: Final = 10
_NUM_FAILURES: Final = 30
_WEIBULL_SHAPE: Final = 0.7
_SCATTER: Final = 0.2
_CHANGES: Final = (1 / 3, 1.0, 3.0)
# The values of k of the fixed intervals.
_FACTORS: Final = [2 ** (n / 4) for n in range(-6, 7)]
_OVERHEAD: Final = 0.01


@dataclass(frozen=True)
class Training:
    """The future of one training. `costs` are those of a save in each half of the work."""

    mtbf: float
    costs: tuple[float, float]
    durable: float
    shape: float
    seed: int

    @property
    def work(self) -> float:
        return _NUM_FAILURES * self.mtbf

    def gaps(self) -> Iterator[float]:
        """The seconds from each start of a process to its failure."""
        dice, scale = Random(self.seed), self.mtbf / math.gamma(1 + 1 / self.shape)
        while True:
            yield dice.weibullvariate(scale, self.shape)

    def cost(self, done: float) -> float:
        return self.costs[done >= self.work / 2]


def training(seed: int, shape: float) -> Training:
    dice = Random(seed)
    mtbf = math.exp(dice.uniform(math.log(2 * 3600), math.log(3 * 86400)))
    cost = mtbf * 10 ** dice.uniform(-4, -2)
    return Training(mtbf, (cost, cost * dice.choice(_CHANGES)), cost * dice.uniform(1, 5), shape, seed)


def lost_by_rule(one: Training, due: Due) -> float:
    """The share of its time that a training loses to saves and failures with the library's own interval."""
    dice, total, kept, past = Random(-one.seed), 0.0, 0.0, Past()
    for number, gap in enumerate(one.gaps()):
        adaptive = interval_of(due)
        assert adaptive is not None
        adaptive.resume(past)
        ran, kept, costs = _start(one, adaptive, gap, kept, dice)
        total += ran
        if kept >= one.work:
            return total / one.work - 1
        past = Past(number + 1, total, [*past.costs, *costs][-NUM_SAVES:])
    raise AssertionError("failures never end")


def _start(
    one: Training, adaptive: AdaptiveInterval, gap: float, kept: float, dice: Random
) -> tuple[float, float, list[SaveCost]]:
    """One process. Returns how long it ran, the work that is durable at its end, and the costs of its saves."""
    now, done, costs = 0.0, kept, list[SaveCost]()
    while True:
        interval = adaptive.after(now).seconds - (costs[-1].stall_seconds if costs else 0.0)
        if now + one.work - done <= min(gap, now + interval):  # the training completes
            return now + one.work - done, one.work, costs
        now, done = now + interval, done + interval
        cost = one.cost(done) * dice.lognormvariate(-(_SCATTER**2) / 2, _SCATTER)
        if now + one.durable > gap:
            return gap, kept, costs
        kept = done
        costs.append(SaveCost(cost, 0.0, one.durable))
        adaptive.add(costs[-1])
        now += cost


def lost_by_fixed(one: Training, factor: float) -> float:
    """The share that a training loses with a fixed interval, by formulas for all saves of a process at once."""
    mean = sum(one.costs) / 2
    interval = max(factor * math.sqrt(2 * mean * one.mtbf), 1.01 * max(*one.costs, one.durable))
    total = kept = 0.0
    for gap in one.gaps():
        cost = one.cost(kept)
        left = one.work - kept
        needed = left + cost * math.floor(left / (interval - cost))
        if needed <= gap:
            return (total + needed) / one.work - 1
        total += gap
        saves = max(0, math.floor((gap - one.durable) / interval))
        kept += saves * interval - max(0, saves - 1) * cost
    raise AssertionError("failures never end")


def beside_the_best_fixed(setting: Setting) -> dict[str, Figure]:
    found: dict[str, Figure] = {}
    for shape, title in ((1.0, "exponential failures"), (_WEIBULL_SHAPE, "Weibull failures, shape 0.7")):
        trainings = [training(seed, shape) for seed in range(setting.num_trainings // 2)]
        fixed = {factor: [lost_by_fixed(one, factor) for one in trainings] for factor in _FACTORS}
        best = min(_FACTORS, key=lambda factor: sum(fixed[factor]))
        for name, known in (("known", True), ("measured", False)):
            lost = [lost_by_rule(one, Due(mtbf=one.mtbf if known else "measured")) for one in trainings]
            figure = Figure(
                f"time lost with mtbf {'given' if known else 'measured'}, {title}",
                "%",
                "best fixed interval",
                Target("≤", 1.05),
                [*zip(_batches(lost), _batches(fixed[best]), strict=True)],
                details={"factor": best, "trainings": len(trainings)},
            )
            found[f"interval_{name}_{'weibull' if shape < 1 else 'exponential'}"] = figure
    return found


def share_of_saves(setting: Setting) -> dict[str, Figure]:
    """The share of saves in a training that never fails, with `overhead`, while the cost of a save varies."""
    shares = [_share(training(seed, 1.0)) for seed in range(setting.num_trainings // 2)]
    pairs = [(share, 100 * _OVERHEAD) for share in _batches(shares)]
    return {"interval_overhead": Figure("share of saves with overhead=0.01", "%", "fixed", Target("≤", 1.05), pairs)}


def _share(one: Training) -> float:
    dice, adaptive = Random(-one.seed), interval_of(Due(overhead=_OVERHEAD))
    assert adaptive is not None
    now = spent = 0.0
    while now < one.work:
        now += adaptive.after(now).seconds
        cost = one.cost(now) * dice.lognormvariate(-(_SCATTER**2) / 2, _SCATTER)
        adaptive.add(SaveCost(cost, 0.0, one.durable))
        spent += cost
    return spent / now


def _batches(values: list[float]) -> list[float]:
    """The means of ten parts of the trainings, in percent."""
    size = max(1, len(values) // _BATCHES)
    return [100 * sum(part) / len(part) for part in (values[n : n + size] for n in range(0, len(values), size))]


MEASURES: Final[dict[str, Any]] = {"beside_the_best_fixed": beside_the_best_fixed, "share_of_saves": share_of_saves}
