"""The current status of a run, read from storage: the newest step, a step in progress, the last saves.

In: the place of a run. Out: a frozen status for each look, in plain values. Knows nothing of: how it is shown.

The newest step is read from its manifest. The last saves and their trend are from the history, which is not
authoritative, or from the manifests of the last steps if there is no history. A look makes three requests if nothing
has changed, and one more for a step in progress. Nothing is changed on storage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, Final

from .... import Place
from ....errors import CheckpointError
from ....plumbing import events as run_events
from ....plumbing import reports, runs, spec, threads, timing
from ..listing import checkpoints_of, marks_at
from ..place_kinds import USUAL_NAMINGS
from ..run_places import PlaceStatus, RunPlaces
from ..trainer_folders import events_at, without_second_names

# How many saves the table shows, and how many make up the trend.
_SHOWN: Final = 10
_IN_TREND: Final = 40
# How many of the newest folders of each naming are searched for a manifest.
_LOOKED_INTO: Final = 3
_NAMES_PER_REQUEST: Final = 1000
_REQUESTS_PER_PLACE: Final = 4  # for a run with several places, if nothing has changed
# Warn if the newest step is older than this many usual intervals, and than this many seconds.
_LATE: Final = 3
_LATE_SECONDS: Final = 60.0
# Warn if there is room for fewer saves than this.
_FEW: Final = 5


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A step in progress: its bytes on storage so far, and their number at the end if that is known.

    `bytes_per_second` is the rate since the previous look; None at the first.
    """

    step: int
    num_bytes: int
    total_bytes: int | None
    bytes_per_second: float | None


@dataclass(frozen=True, slots=True)
class RunStatus:
    """One look at a run.

    `age_seconds` is the age of the newest step. `saves` are the last saves, the newest first. `ended` is the time at
    which the last process closed the run, and None while more steps may come. `stalls`, in seconds, and `bandwidths`,
    in bytes per second, are those of the last committed saves, the oldest first. `usual_seconds` is the median time
    between two saves. `places` are the places of a run with several. `marks` maps steps to their marks, in words.
    """

    place: str
    time: float
    step: int | None = None
    created: float | None = None
    age_seconds: float | None = None
    usual_seconds: float | None = None
    free_bytes: int | None = None
    under_way: UnderWay | None = None
    saves: tuple[run_events.Event, ...] = ()
    stalls: tuple[float, ...] = ()
    bandwidths: tuple[float, ...] = ()
    warnings: tuple[str, ...] = ()
    ended: float | None = None
    places: tuple[PlaceStatus, ...] = ()
    marks: Mapping[int, str] = field(default_factory=dict)
    num_requests: int = field(default=0, compare=False)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "places": [one.as_json() for one in self.places]}


def look_at_trainer(place: Place, late_seconds: float | None = None) -> RunStatus:
    """Look at the folder of a framework's trainer once. Raises StorageUnavailableError.

    A save in progress has no name there yet, so the status does not show it.
    """
    storage = place.storage()
    rows = checkpoints_of(place, storage.names(""))
    events = without_second_names(events_at(place))
    newest = (rows[-1].step, rows[-1].created) if rows else (None, None)
    status = _status(place, timing.wall_time(), newest, events, storage.free_bytes())
    return replace(status, num_requests=2 + 2 * len(rows), warnings=tuple(_warnings(status, late_seconds)))


class RunWatch:
    """Looks at one run. `watch` creates it, and uses it on one thread.

    A newest step older than `late_seconds` causes a warning. With None, the limit depends on the usual interval.
    """

    def __init__(self, place: Place, clock: timing.Clock, late_seconds: float | None = None) -> None:
        self._place, self._storage, self._clock = place, place.storage(), clock
        self._late_seconds = late_seconds
        self._log = run_events.EventLog(self._storage, clock)
        self._naming: str | None = None  # a folder's name without the step; None: not known
        self._before: list[run_events.Event] | None = None  # the events of the last compressed file; None: not read
        self._num_newest = 0  # of the events that are not compressed
        self._manifests: dict[str, runs.Manifest | None] = {}  # by step folder; None for a damaged one
        self._last: tuple[float, UnderWay] | None = None  # the time of the last look that saw a step in progress
        self._checked: tuple[runs.Manifest, str | None] | None = None  # the newest commit, and its damage
        self._places: RunPlaces | None = None
        self._marks: Mapping[int, str] = {}
        self._marks_of: tuple[Sequence[str], runs.Manifest | None] = (), None  # the files, and the newest commit
        self._num_requests = 0

    def look(self) -> RunStatus:
        """Look at the storage once. Raises StorageUnavailableError."""
        names = self._storage.names("")
        self._num_requests = 1 + len(names) // _NAMES_PER_REQUEST
        if self._places is None and runs.tiers_file.NAME in names:
            self._places = RunPlaces(self._place)
        places = () if self._places is None else tuple(self._places.look())
        self._num_requests += _REQUESTS_PER_PLACE * len(places)
        folders = self._folders(names)
        newest, under_way = self._newest(folders)
        made = (None, None) if newest is None else (newest.step, newest.created)
        events = self._events(folders)
        status = _status(self._place, self._clock(), made, events, self._storage.free_bytes())
        self._read_marks(names, newest)
        num_requests, marks = self._num_requests, self._marks
        status = replace(status, under_way=under_way, num_requests=num_requests, places=places, marks=marks)
        damaged = sorted(name for name in folders.values() if name in self._manifests and not self._manifests[name])
        broken = None if newest is None else self._lack_of(newest, folders[newest.step])
        return replace(status, warnings=tuple(_warnings(status, self._late_seconds, damaged, broken)))

    def _lack_of(self, newest: runs.Manifest, folder: str) -> str | None:
        """The damage of the newest step, in words. In a store, each step is checked once."""
        if self._checked is None or self._checked[0] != newest or not self._storage.remote:
            self._num_requests += 2 + len({folder, *(lent.folder for lent in newest.elsewhere)})
            self._checked = newest, runs.broken_folders(self._storage, {folder: newest}).get(folder)
        return self._checked[1]

    def _read_marks(self, names: Sequence[str], newest: runs.Manifest | None) -> None:
        """Read the marks of steps, if the files of marks or the newest step have changed since the last look."""
        files = [name for name in names if name.startswith("mark-")]
        if files and self._marks_of != (files, newest):
            self._num_requests += 2 + 2 * len(files)
            self._marks = marks_at(self._storage)
        self._marks = self._marks if files else {}
        self._marks_of = files, newest

    def _folders(self, names: Sequence[str]) -> dict[int, str]:
        """The folders of the run's steps, by step. Before the first commit, folders of all usual namings."""
        found = list(runs.possible_steps(names))
        if self._naming is None:
            newest: dict[str, list[str]] = {}
            for parsed, name in sorted(found, reverse=True):
                newest.setdefault(parsed.rest, []).append(name)
            namings = {
                f"{name}/{runs.MANIFEST_NAME}": rest for rest, last in newest.items() for name in last[:_LOOKED_INTO]
            }
            self._num_requests += len(namings)
            self._naming = next((namings[path] for path in self._storage.existing([*namings])), None)
        namings_here = USUAL_NAMINGS if self._naming is None else {self._naming}
        return {parsed.step: name for parsed, name in found if parsed.rest in namings_here}

    def _newest(self, folders: dict[int, str]) -> tuple[runs.Manifest | None, UnderWay | None]:
        """The manifest of the newest committed step, and the step above it that is in progress."""
        under_way: UnderWay | None = None
        for step in sorted(folders, reverse=True):
            folder = folders[step]
            if self._manifests.pop(folder, None) is not None:
                self._read(folder)  # again: it may have been retired or replaced
            if folder not in self._manifests:
                inside = self._storage.sizes(folder)
                self._num_requests += 1
                if runs.MANIFEST_NAME in inside:
                    self._read(folder)
                elif under_way is None and not any(map(runs.is_retired_name, inside)):
                    under_way = self._seen_under_way(step, folder, sum(inside.values()))
            if (manifest := self._manifests.get(folder)) is not None:
                return manifest, under_way
        return None, under_way

    def _seen_under_way(self, step: int, folder: str, num_whole: int) -> UnderWay | None:
        """The step in progress in a folder; None if the folder has no complete file and no living writer."""
        written, total = self._storage.under_way(folder)
        if not (num_whole or total):
            return None
        now, num_bytes, rate = self._clock(), num_whole + written, None
        if self._last is not None and self._last[1].step == step and now > self._last[0]:
            rate = max(0.0, (num_bytes - self._last[1].num_bytes) / (now - self._last[0]))
        seen = UnderWay(step, num_bytes, num_whole + total if total else None, rate)
        self._last = now, seen
        return seen

    def _events(self, folders: dict[int, str]) -> list[run_events.Event]:
        """The last events of the history. If it has no saves, the manifests of the last steps supply them."""
        self._num_requests += 1
        newest = self._log.read_newest()
        if self._before is None or len(newest) < self._num_newest:  # some were compressed since
            self._num_requests += 2
            self._before = self._log.read_before()
        self._num_newest = len(newest)
        events = [*self._before, *newest]
        if any(event["kind"] == "save" for event in events):
            return events
        last = [folders[step] for step in sorted(folders)[-_SHOWN:]]
        missing = [folder for folder in last if folder not in self._manifests]
        self._num_requests += len(missing)
        threads.run_together("read", [partial(self._parse, folder) for folder in missing], max_threads=_SHOWN)
        made = (self._manifests.get(folder) for folder in last)
        return [*(runs.event_of(manifest) for manifest in made if manifest is not None), *events]

    def _read(self, folder: str) -> None:
        """Read the manifest in a folder, if there is one."""
        self._num_requests += 1
        self._parse(folder)

    def _parse(self, folder: str) -> None:
        """Read a manifest without counting the request. Several threads may call this, each for another folder."""
        path = f"{folder}/{runs.MANIFEST_NAME}"
        try:
            self._manifests[folder] = runs.parse_manifest(self._storage.read(path)[0], path=self._storage.locate(path))
        except FileNotFoundError:
            pass
        except CheckpointError:
            self._manifests[folder] = None


def _status(
    place: Place,
    now: float,
    newest: tuple[int | None, float | None],
    events: Sequence[run_events.Event],
    free_bytes: int | None,
) -> RunStatus:
    """The status from the newest step, its time, and the history, without warnings."""
    step, created = newest
    saves = [event for event in events if event["kind"] in ("save", "failed")]
    committed = [event for event in saves if event["kind"] == "save"][-_IN_TREND:]
    pairs = pairwise(event["time"] for event in committed)
    between = [later - earlier for earlier, later in pairs if later > earlier]  # not where the clock was set back
    return RunStatus(
        place.shown,
        now,
        step,
        created,
        None if created is None else max(0.0, now - created),
        median(between) if between else None,
        free_bytes,
        saves=tuple(reversed(saves[-_SHOWN:])),
        stalls=tuple(event["stall_seconds"] for event in committed if event["stall_seconds"] is not None),
        bandwidths=tuple(filter(None, map(run_events.bandwidth_of, committed))),
        ended=events[-1]["time"] if events and events[-1]["kind"] == "closed" else None,
    )


def _warnings(
    status: RunStatus, late_seconds: float | None, damaged: Sequence[str] = (), broken: str | None = None
) -> Iterator[str]:
    if broken is not None:
        yield f"step {status.step} is broken: {broken}; look into it with async-ckpt verify"
    yield from _late(status, late_seconds)
    yield from _failures(status.saves)
    yield from _space(status)
    if damaged:
        yield f"the manifest of {spec.some_of(damaged, 3)} cannot be read; look into it with async-ckpt verify"
    yield from (f"{one.place}: {one.trouble}" for one in status.places if one.trouble)
    mark = status.marks.get(status.step or 0, "")
    if mark.partition(":")[0] == "bad" and status.ended is None:
        yield f"step {status.step} is marked {mark}; a restart passes over it"


def _late(status: RunStatus, late_seconds: float | None) -> Iterator[str]:
    usual, age = status.usual_seconds, status.age_seconds
    if status.step is None:
        yield "nothing is committed yet"
    elif age is not None and status.ended is None:
        if late_seconds is not None and age > late_seconds:
            yield f"step {status.step} is {age:,.0f} s old, and --older allows {late_seconds:,.0f} s"
        elif late_seconds is None and usual is not None and age > max(_LATE * usual, _LATE_SECONDS):
            yield f"step {status.step} is {age:,.0f} s old; a save was usual every {usual:,.1f} s"
    if status.created is not None and status.created > status.time + 1:
        ahead = status.created - status.time
        yield f"step {status.step} was committed {ahead:,.0f} s from now, by the clock of its writer"


def _failures(saves: Sequence[run_events.Event]) -> Iterator[str]:
    """A warning of the failed saves among these, the newest first."""
    failed = [one for one in saves if one["kind"] == "failed"]
    if failed:
        last = failed[0]
        count = "a save has failed" if len(failed) == 1 else f"{len(failed)} saves have failed"
        of_last = f"of the last {len(saves)}: " if len(saves) > 1 else ""
        yield f"{count} {of_last}step {last['step']}: {failure_of(last)}".strip()


def failure_of(one: run_events.Event) -> str:
    """The error of a failed save. The reason comes before the path, which may be as long as a line."""
    path, colon, reason = one["message"].partition(": ")
    is_path = colon and "/" in path and " " not in path
    return f"{one['error']}: {f'{reason} ({path})' if is_path else one['message']}"


def _space(status: RunStatus) -> Iterator[str]:
    """A warning if the free space is enough for few saves of the recent size."""
    free = [event["free_bytes"] for event in reversed(status.saves) if event.get("free_bytes") is not None]
    left = status.free_bytes if status.free_bytes is not None else free[-1] if free else None
    if left is None or len(free) < 2 or free[-1] >= free[0]:
        return
    per_save = (free[0] - free[-1]) / (len(free) - 1)
    if left < _FEW * per_save:
        yield (
            f"{reports.sized(left)} are free, and each save takes {reports.sized(per_save)}: room for "
            f"{left / per_save:.0f} more"
        )
