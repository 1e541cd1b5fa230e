"""The interval between saves that follows from their cost, and from how often the training fails.

In: the costs of recent saves, and the history of the run. Out: the seconds from the beginning of one save to that of
the next, and the rule that they follow from. Knows nothing of: clocks, and how a cost is measured.

A save costs training time: the stall, and steps that are slower while it is under way. With a cost of C seconds and an
interval of T, saves take the share C/T of the time, so `overhead` asks for T = C / overhead.

A failure costs the work since the last save began, T/2 on average. For the mean time M between failures, the sum of
both is least near T = sqrt(2 C M): J. W. Young, "A first order approximation to the optimum checkpoint interval",
Communications of the ACM 17(9), 1974. J. T. Daly, "A higher order estimate of the optimum checkpoint interval for
restart dumps", Future Generation Computer Systems 22(3), 2006, adds terms for failures during a save and for more than
one failure in an interval:

    T = sqrt(2 C M) * (1 + x/3 + x²/9)  with  x = sqrt(C / (2 M)),  if C < 2 M, and otherwise  T = M + C

Daly's interval is the time trained between two saves; ours includes one save, so his "- C" falls away. A save in the
background becomes durable some time after its call. A failure then costs that much more for any T, so the best T is the
same.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from ..events.goodput import goodput_of
from ..events.shapes import Event

# The seconds that a save is expected to take while none has been measured.
FIRST_SAVE_SECONDS: Final = 60.0
# The mean time between failures that is assumed of a run which has not failed yet.
PRIOR_MTBF_SECONDS: Final = 86_400.0
# So many failures say more than the assumption.
_ENOUGH_FAILURES: Final = 3
# The first save also plans and allocates memory, so a median needs a few saves. More than a few would adapt slowly.
NUM_SAVES: Final = 5

Rule = Literal["overhead", "mtbf", "durable", "at_least", "at_most", "first"]


class SaveCost(NamedTuple):
    """The training seconds that one save has cost, and the seconds from its call until it was durable."""

    stall_seconds: float
    slower_seconds: float
    durable_seconds: float


@dataclass(frozen=True, slots=True)
class Failures:
    """The failures of a run so far, and the seconds for which its processes have run."""

    count: int = 0
    seconds: float = 0.0

    def mtbf_seconds(self, more_seconds: float) -> float:
        """The mean time between failures; the run has gone on for `more_seconds` without one.

        Until three failures were seen, one more is assumed, within a day.
        """
        seconds = self.seconds + more_seconds
        if self.count >= _ENOUGH_FAILURES:
            return seconds / self.count
        return (PRIOR_MTBF_SECONDS + seconds) / (1 + self.count)


def median(values: Iterable[float]) -> float:
    """As `statistics.median`, whose module takes as long to import as six of this library."""
    ordered = sorted(values)
    return (ordered[len(ordered) // 2] + ordered[~(len(ordered) // 2)]) / 2


class Past(NamedTuple):
    """The failures of a run so far, and the costs of its last saves, by its history."""

    failures: Failures
    costs: Sequence[SaveCost]

    @classmethod
    def of(cls, events: Iterable[Event]) -> Past:
        events = list(events)
        spent = goodput_of(events)
        # The slower steps beside a save are known once it has ended: the event of the next one tells them.
        saves = [
            one for one in events if one["kind"] == "save" and None not in (one["stall_seconds"], one["total_seconds"])
        ]
        costs = [SaveCost(one["stall_seconds"], one["slower_seconds"] or 0.0, one["total_seconds"]) for one in saves]
        return cls(Failures(spent.num_failed, spent.total_seconds), costs[-NUM_SAVES:])


@dataclass(frozen=True, slots=True)
class SaveInterval:
    """The seconds from the beginning of one save to that of the next, and the rule that they follow from.

        print(ckpt.interval())  # 420 s by overhead: a save costs 4.2 s of training, durable after 9.1 s

    `rule` is "overhead" or "mtbf"; "durable" if a save takes that long to become durable; "at_least" or "at_most"; or
    "first" as long as no save has been measured. `cost_seconds` is the median of what the last five saves have cost,
    `durable_seconds` the longest time that one of them took to become durable. `mtbf_seconds` is the mean time between
    failures. A value that is not known, or has no rule, is None.
    """

    seconds: float
    rule: Rule
    cost_seconds: float | None = None
    durable_seconds: float | None = None
    mtbf_seconds: float | None = None

    def __str__(self) -> str:
        facts = [
            "" if self.cost_seconds is None else f"a save costs {_shown(self.cost_seconds)} of training",
            "" if self.durable_seconds is None else f"durable after {_shown(self.durable_seconds)}",
            "" if self.mtbf_seconds is None else f"{_shown(self.mtbf_seconds)} between failures",
        ]
        return f"{_shown(self.seconds)} by {self.rule}: {', '.join(filter(None, facts)) or 'no save is measured yet'}"


class AdaptiveInterval:
    """The interval by the costs and failures so far. A policy creates it, and guards it by its own lock.

    `mtbf` is the mean time between failures that the user gives, in seconds. If it is "measured", the failures of the
    run so far give it; if it is None, failures do not count.
    """

    def __init__(
        self,
        *,
        overhead: float | None = None,
        mtbf: float | Literal["measured"] | None = None,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> None:
        self._overhead, self._mtbf = overhead, mtbf
        self._at_least, self._at_most = at_least or 0.0, at_most or math.inf
        self._failures = Failures()
        self._costs: deque[SaveCost] = deque(maxlen=NUM_SAVES)
        self._has_decided = False

    def add(self, cost: SaveCost) -> None:
        self._costs.append(cost)

    def resume(self, past: Past) -> None:
        """Go on from what the history of the run tells; the costs that this process has measured count as later."""
        self._failures = past.failures
        self._costs.extend([*past.costs, *self._costs])

    def after(self, seconds: float) -> SaveInterval:
        """The interval once this process has run for so many seconds.

        Raises ValueError at the first decision that knows a cost, if that is above the `mtbf` which the user gives.
        """
        mtbf = self._failures.mtbf_seconds(seconds) if self._mtbf == "measured" else self._mtbf
        if not self._costs:
            return self._bounded(FIRST_SAVE_SECONDS, "first", None, None, mtbf)
        cost = median(one.stall_seconds + one.slower_seconds for one in self._costs)
        durable = max(one.durable_seconds for one in self._costs)
        if not self._has_decided and self._mtbf == mtbf and mtbf is not None and mtbf <= cost:
            raise ValueError(
                f"Due(mtbf={mtbf:g}): a save costs {cost:.3g} s of training, so a training that fails every {mtbf:g} s "
                "gets nowhere; give the mean time between failures in seconds, or make saves cheaper"
            )
        self._has_decided = True
        by_share = 0.0 if self._overhead is None else cost / self._overhead
        by_failures = 0.0 if mtbf is None else daly_seconds(cost, mtbf)
        if mtbf is None or by_share > by_failures:
            return self._bounded(by_share, "overhead", cost, durable, mtbf)
        return self._bounded(by_failures, "mtbf", cost, durable, mtbf)

    def _bounded(
        self, seconds: float, rule: Rule, cost: float | None, durable: float | None, mtbf: float | None
    ) -> SaveInterval:
        """The interval within its bounds. None of them has saves follow each other faster than they become durable."""
        if seconds < self._at_least:
            seconds, rule = self._at_least, "at_least"
        if seconds > self._at_most:
            seconds, rule = self._at_most, "at_most"
        if durable is not None and seconds < durable:
            seconds, rule = durable, "durable"
        return SaveInterval(seconds, rule, cost, durable, mtbf)


def daly_seconds(cost_seconds: float, mtbf_seconds: float) -> float:
    """Daly's interval, from the beginning of one save to that of the next."""
    if cost_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds + cost_seconds
    x = math.sqrt(cost_seconds / (2 * mtbf_seconds))
    return math.sqrt(2 * cost_seconds * mtbf_seconds) * (1 + x / 3 + x * x / 9)


def slower_seconds(beside: list[float], plain_seconds: float, stall_seconds: float) -> float:
    """The seconds that steps have lost beside a save, without its stall; `plain_seconds` is the median step otherwise.

    An evaluation or a slow batch beside a save is none of its cost, so the median step beside it counts for all of
    them. Of one or two steps the median would hold the stall as well, so the sum bounds it.
    """
    if not beside:
        return 0.0
    by_median = len(beside) * (median(beside) - plain_seconds)
    by_sum = sum(beside) - stall_seconds - len(beside) * plain_seconds
    return max(0.0, min(by_median, by_sum))


def _shown(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 1000 else f"{seconds:.3g} s"
