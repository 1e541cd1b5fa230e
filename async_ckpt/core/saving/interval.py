"""The interval between saves, from their cost and from how often the training fails.

In: the costs of recent saves, and the history of the run. Out: the seconds from the beginning of one save to that of
the next, and the rule that gave them. Knows nothing of: clocks, how a cost is measured.

A save costs training time: the stall, and the slowdown of steps while the save is under way. With a cost of C seconds
and an interval of T, saves take the share C/T of the time, so `overhead` requires T = C / overhead.

A failure loses the work since the last save began, T/2 on average. For a mean time M between failures, the sum of both
costs is minimal near T = sqrt(2 C M): J. W. Young, "A first order approximation to the optimum checkpoint interval",
Communications of the ACM 17(9), 1974. J. T. Daly, "A higher order estimate of the optimum checkpoint interval for
restart dumps", Future Generation Computer Systems 22(3), 2006, adds terms for failures during a save and for more than
one failure in an interval:

    T = sqrt(2 C M) * (1 + x/3 + x²/9)  with  x = sqrt(C / (2 M)),  if C < 2 M, and otherwise  T = M + C

Daly's interval is the training time between two saves; ours includes one save, so his term "- C" disappears. A
background save becomes durable some time after its call. A failure then costs that much more for any T, so the best T
is the same.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple

from ..events.goodput import goodput_of
from ..events.kinds import Event

# The assumed duration of a save, until one has been measured.
FIRST_SAVE_SECONDS: Final = 60.0
# The assumed mean time between failures of a run that has not failed yet.
PRIOR_MTBF_SECONDS: Final = 86_400.0
# From this number of failures on, the measured mean replaces the assumption.
_ENOUGH_FAILURES: Final = 3
# The first save also plans and allocates memory, so a median needs several saves. Many more would adapt slowly.
NUM_SAVES: Final = 5

Rule = Literal["overhead", "mtbf", "durable", "at_least", "at_most", "first"]


class SaveCost(NamedTuple):
    """The training seconds that one save has cost, and the seconds from its call until it was durable."""

    stall_seconds: float
    slower_seconds: float
    durable_seconds: float


def median(values: Iterable[float]) -> float:
    """Like `statistics.median`, but importing that module takes as long as importing six modules of this library."""
    ordered = sorted(values)
    return (ordered[len(ordered) // 2] + ordered[~(len(ordered) // 2)]) / 2


class Past(NamedTuple):
    """A run so far: its failures, the seconds for which its processes have run, and the costs of its last saves."""

    num_failures: int = 0
    seconds: float = 0.0
    costs: Sequence[SaveCost] = ()

    @classmethod
    def of(cls, events: Iterable[Event]) -> Past:
        events = list(events)
        spent = goodput_of(events)
        # The slowdown of steps is known only after a save has ended: the event of the next save reports it.
        saves = [
            one for one in events if one["kind"] == "save" and None not in (one["stall_seconds"], one["total_seconds"])
        ]
        costs = [SaveCost(one["stall_seconds"], one["slower_seconds"] or 0.0, one["total_seconds"]) for one in saves]
        return cls(spent.num_failed, spent.total_seconds, costs[-NUM_SAVES:])

    def mtbf_seconds(self, more_seconds: float) -> float:
        """The mean time between failures, if the run has continued for `more_seconds` since without one.

        Below three failures, one more failure within a day is assumed.
        """
        seconds = self.seconds + more_seconds
        if self.num_failures >= _ENOUGH_FAILURES:
            return seconds / self.num_failures
        return (PRIOR_MTBF_SECONDS + seconds) / (1 + self.num_failures)


class SaveInterval(NamedTuple):
    """The seconds from the beginning of one save to that of the next, and the rule that gave them.

        print(ckpt.interval())  # 420 s by overhead: a save costs 4.2 s of training, durable after 9.1 s

    `rule` is "overhead" or "mtbf"; "durable" if a save takes that long to become durable; "at_least" or "at_most"; or
    "first" until a save has been measured. `cost_seconds` is the median cost of the last five saves, `durable_seconds`
    the longest time that one of them took to become durable. `mtbf_seconds` is the mean time between failures. A value
    that is not known, or has no rule, is None.
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
    """The interval from the costs and failures so far. A policy creates it, and guards it by the policy's lock.

    `mtbf` is the mean time between failures in seconds, as given by the user. With "measured", the failures of the run
    so far give it; with None, failures do not count.
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
        self._past = Past()
        self._costs: deque[SaveCost] = deque(maxlen=NUM_SAVES)
        self._has_decided = False

    def add(self, cost: SaveCost) -> None:
        self._costs.append(cost)

    def resume(self, past: Past) -> None:
        """Continue from the history of the run. Costs that this process has measured count as later ones."""
        self._past = past
        self._costs.extend([*past.costs, *self._costs])

    def after(self, seconds: float) -> SaveInterval:
        """The interval after this process has run for `seconds`.

        Raises ValueError at the first decision with a known cost, if that cost is at least the `mtbf` given by the
        user.
        """
        mtbf = self._past.mtbf_seconds(seconds) if self._mtbf == "measured" else self._mtbf
        if not self._costs:
            return self._bounded(SaveInterval(FIRST_SAVE_SECONDS, "first", mtbf_seconds=mtbf))
        cost = median(save.stall_seconds + save.slower_seconds for save in self._costs)
        durable = max(save.durable_seconds for save in self._costs)
        if not self._has_decided and self._mtbf == mtbf and mtbf is not None and mtbf <= cost:
            raise ValueError(
                f"Due(mtbf={mtbf:g}): a save costs {cost:.3g} s of training, so a training that fails every {mtbf:g} s "
                "makes no progress; give the mean time between failures in seconds, or make saves cheaper"
            )
        self._has_decided = True
        by_share = 0.0 if self._overhead is None else cost / self._overhead
        by_failures = 0.0 if mtbf is None else daly_seconds(cost, mtbf)
        rule: Rule = "overhead" if mtbf is None or by_share > by_failures else "mtbf"
        return self._bounded(SaveInterval(max(by_share, by_failures), rule, cost, durable, mtbf))

    def _bounded(self, interval: SaveInterval) -> SaveInterval:
        """The interval within its bounds. No bound makes saves follow each other faster than they become durable."""
        if interval.seconds < self._at_least:
            interval = interval._replace(seconds=self._at_least, rule="at_least")
        if interval.seconds > self._at_most:
            interval = interval._replace(seconds=self._at_most, rule="at_most")
        if interval.durable_seconds is not None and interval.seconds < interval.durable_seconds:
            interval = interval._replace(seconds=interval.durable_seconds, rule="durable")
        return interval


def daly_seconds(cost_seconds: float, mtbf_seconds: float) -> float:
    """Daly's interval, from the beginning of one save to that of the next."""
    if cost_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds + cost_seconds
    x = math.sqrt(cost_seconds / (2 * mtbf_seconds))
    return math.sqrt(2 * cost_seconds * mtbf_seconds) * (1 + x / 3 + x * x / 9)


def slower_seconds(beside: list[float], plain_seconds: float, stall_seconds: float) -> float:
    """The seconds that steps have lost while a save was under way, without its stall.

    `beside` are the seconds of these steps, `plain_seconds` is the median of other steps. An evaluation or a slow batch
    during a save is not part of its cost, so the median of `beside` stands for each of them. With one or two steps that
    median would include the stall, so the sum without the stall is an upper bound.
    """
    if not beside:
        return 0.0
    by_median = len(beside) * (median(beside) - plain_seconds)
    by_sum = sum(beside) - stall_seconds - len(beside) * plain_seconds
    return max(0.0, min(by_median, by_sum))


def _shown(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 1000 else f"{seconds:.3g} s"
