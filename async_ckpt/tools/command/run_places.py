"""The places of a run, from near to far: the steps at each, and what these steps outlive.

In: the place of a run, which lists the others. Out: places, and a status of each. Knows nothing of: how they are shown.

A place that does not respond gets a status with its error. Nothing is changed on storage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from ... import Keep, Naming, Place
from ...errors import CheckpointError, ConflictError
from ...plumbing import Storage, runs, timing
from ...plumbing import events as run_events
from .place_arguments import DEADLINE_SECONDS, parent_of, place_below

# How durable a step is, by what it outlives at its most durable place. The most durable comes last.
DURABLE: Final = {"process": "no", "reboot": "on this machine", "machine": "beyond it"}
_WORDS: Final = {"process": "memory", "reboot": "this machine", "machine": "beyond this machine"}


@dataclass(frozen=True, slots=True)
class PlaceStatus:
    """One place of a run: its steps with their attempts, and the steps of nearer places that it was not given.

    `outlives` is what the steps there outlive: "process", "reboot" or "machine". `trouble` is the reason why nothing is
    copied there, or why nothing is known.
    """

    place: str
    outlives: str
    steps: Mapping[int, str] = field(default_factory=dict)
    passed_over: Collection[int] = ()
    trouble: str = ""

    @property
    def described(self) -> str:
        """The place in words, with its trouble."""
        return f"{self.place}, {_WORDS[self.outlives]}" + (f": {self.trouble}" if self.trouble else "")

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"steps": [*self.steps], "passed_over": [*self.passed_over]}


def durable_steps(statuses: Sequence[PlaceStatus]) -> dict[str, int | None]:
    """The newest step on disks of this machine, and beyond it; None if no step is known."""
    return {
        DURABLE[outlives]: max(
            (step for one in statuses if one.outlives == outlives for step in one.steps), default=None
        )
        for outlives in ("reboot", "machine")
    }


def places_of(place: Place) -> list[Place]:
    """The places of the run at a place, from near to far. For the folder of a step, its folder at each place.

    A run with one place, and anything else, gives the place alone. Raises CorruptCheckpointError and FormatVersionError
    for a list of places that cannot be read.
    """
    below = ""
    if place.storage().exists(runs.MANIFEST_NAME):
        place, below = parent_of(place)
    tiers_file = runs.tiers_file.read(place)
    places = [place] if tiers_file is None else [*tiers_file.places]
    for number, one in enumerate(places):
        if not one.is_local:
            places[number] = replace(one, options={"deadline_seconds": DEADLINE_SECONDS, **(one.options or {})})
    return [place_below(one, below) for one in places] if below else places


def everywhere(places: Iterable[Place], *, asks_all: bool) -> list[Place]:
    """These places, and with `asks_all` all other places of their runs."""
    return [one for place in places for one in (places_of(place) if asks_all else [place])]


def open_run(storage: Storage, naming: Naming, keep: Keep | None = None) -> runs.Run:
    return runs.Run(storage, clock=timing.wall_time, step_format=naming.step_format, tracker=naming.tracker, keep=keep)


class RunPlaces:
    """All places of a run, for repeated looks from one thread."""

    def __init__(self, place: Place) -> None:
        self.places: list[Place] = []
        self._runs: list[runs.Run] = []
        if (tiers_file := runs.tiers_file.read(place)) is not None:
            self.places = places_of(place)
            self._runs = [open_run(one.storage(), tiers_file.naming) for one in self.places]

    def look(self) -> list[PlaceStatus]:
        """The status of each place, from near to far; an empty list for a run with one place."""
        found: list[PlaceStatus] = []
        events = run_events.EventLog(self._runs[0].storage, timing.wall_time).read() if self._runs else []
        for number, (place, run) in enumerate(zip(self.places, self._runs, strict=True)):
            status = PlaceStatus(place.shown, place.outlives)
            try:
                steps = {step: manifest.attempt if manifest else "" for step, manifest in run.view().items()}
                status = replace(status, steps=steps)
                known = [nearer.descent() for nearer in self._runs[:number] if nearer.root.starts]
                if known:  # steps here whose start no nearer place knows belong to another run
                    run.refuse_strangers({token for tokens in known for token in tokens})
            except ConflictError as conflict:
                status = replace(status, trouble=str(conflict))
            except CheckpointError as error:
                status = replace(status, trouble=f"it cannot be read: {error}")
            nearer = {step for one in found for step in one.steps}
            where = run.storage.locate("").rstrip("/")
            arrived = {one["step"] for one in events if one["kind"] == "moved" and one["place"] == where}
            found.append(replace(status, passed_over=_passed_over(nearer, status.steps, arrived, place.every or 1)))
        return found


def _passed_over(nearer: Collection[int], here: Collection[int], arrived: Collection[int], every: int) -> list[int]:
    """The steps of nearer places that were skipped here in favour of a newer one, as far back as the history goes."""
    if not here or not arrived:
        return []
    between = (step for step in nearer if min(arrived) < step < max(here) and step % every == 0)
    return sorted(step for step in between if step not in here and step not in arrived)
