"""What a training process told about itself, gathered.

In: events. Out: steps, saves, losses. Knows nothing of: processes, screens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

NEIGHBOURS: Final = 10  # about a second of steps
Event = dict[str, Any]  # a line of JSON of examples.train


@dataclass(frozen=True, slots=True)
class Save:
    """One durable save; seconds are on the clock of its process."""

    step: int
    num_bytes: int
    begin: float
    stall_seconds: float
    total_seconds: float

    @property
    def bandwidth(self) -> float:
        return self.num_bytes / self.total_seconds


@dataclass(slots=True)
class Trace:
    """One process: where it started, each step, each save, how it ended."""

    way: str
    first_step: int = 0  # committed before it began
    losses: dict[int, str] = field(default_factory=dict)  # float.hex: every bit
    steps: list[tuple[float, float]] = field(default_factory=list)  # begin and end
    saves: list[Save] = field(default_factory=list)
    end: float = 0.0  # after the last step and the last save
    digest: str = ""  # of all weights at the end; empty if it never got there
    killed_in: int | None = None  # the step whose save was in flight

    def add(self, event: Event) -> None:
        match event["event"]:
            case "start":
                self.first_step = event["step"]
            case "step":
                self.losses[event["step"]] = event["loss"]
                self.steps.append((event["begin"], event["end"]))
            case "durable":
                fields = ("step", "bytes", "begin", "stall_seconds", "total_seconds")
                self.saves.append(Save(*(event[name] for name in fields)))
            case "end":
                self.end, self.digest = event["end"], event["digest"]

    @property
    def stall_seconds(self) -> float:
        return sum(save.stall_seconds for save in self.saves)

    @property
    def step_seconds(self) -> float:
        """The median step during which nothing was written."""
        return median(self._took(i) for i in self._quiet())

    @property
    def slowed_seconds(self) -> float:
        """What steps beside a write took longer than their quiet neighbours, and the wait at the end.

        Neighbours, because the load of a machine changes within seconds. It may come out negative: that is noise.
        Time that the guard holds a step is in here and in the stalls: rather too much than too little.
        """
        quiet = self._quiet()
        slowed = self.end - self.steps[-1][1]
        for i in range(len(self.steps)):
            if self._beside_a_write(i):
                by_distance = sorted((abs(i - other), other) for other in quiet)
                slowed += self._took(i) - median(self._took(other) for _, other in by_distance[:NEIGHBOURS])
        return slowed

    @property
    def lost_seconds(self) -> float:
        return self.stall_seconds + self.slowed_seconds

    def difference_from(self, other: Trace) -> str | None:
        """The first bit in which two runs differ, in words; None when there is none."""
        for step, loss in self.losses.items():
            if loss != other.losses.get(step):
                return f"step {step}: loss {loss} here, {other.losses.get(step)} there"
        if self.digest and self.digest != other.digest:
            return f"the weights at the end: sha256 {self.digest[:12]} here, {other.digest[:12]} there"
        return None

    def _took(self, i: int) -> float:
        begin, end = self.steps[i]
        return end - begin

    def _quiet(self) -> list[int]:
        """The steps beside no write; on a disk so slow that there are none, all of them."""
        everyone = range(len(self.steps))
        return [i for i in everyone if not self._beside_a_write(i)] or list(everyone)

    def _beside_a_write(self, i: int) -> bool:
        begin, end = self.steps[i]
        return any(save.begin < end and begin < save.begin + save.total_seconds for save in self.saves)
