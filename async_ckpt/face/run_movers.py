"""The movers of a run in a separate process, during its training or after it.

In: the run's `tiers.json`. Out: the newest step at each further place. Knows nothing of: arguments.

Only one process at a time copies steps to a place: the process whose file is there (`runs.mover_file`). It continues
when the training ends; if it ends itself, another process takes over. While the training is alive, only the training
copies its steps up to the first place that is not volatile, since its handles wait for these copies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final

from ..core.host.waits import LIVENESS_SECONDS, wait_for
from ..core.runs.conflict import Conflict as Conflict
from ..core.runs.conflict import conflict_at
from ..core.runs.mover_file import Announcement, Moving
from ..core.runs.naming import JOURNAL
from ..core.runs.roots import Ahead, Roots, open_roots
from ..core.runs.run import Run
from ..core.runs.starts import Start, about_start
from ..core.runs.tiers_file import TiersFile
from ..core.saving.mover import Arrivals, CopyStep, Mover, MovingProcess
from ..core.spec import Keep
from ..core.storage.pace import Pace
from ..core.timing import monotonic, wall_time
from ..errors import CheckpointError, StorageUnavailableError

# How often a place is checked even if nothing has changed at the nearer places.
_LOOK_SECONDS: Final = 5.0
# How long an abandoned copy may take to end.
_END_SECONDS: Final = 10.0
# The fields by which the file of a start identifies its process.
_OF_PROCESS: Final = ("host", "pid", "since")


class RunMovers:
    """The movers of one run. Created and called by one thread."""

    def __init__(
        self,
        tiers_file: TiersFile,
        read_places: Callable[[], TiersFile | None],
        copy_step: CopyStep,
        on_arrival: Callable[[str, int], None],
    ) -> None:
        """`read_places` returns the current places of the run, or None if they are not known now. `on_arrival` is
        called, on any thread, with a place and the newest step there.

        Raises the errors of `open_roots`.
        """
        self._read_places, self._copy_step, self._on_arrival = read_places, copy_step, on_arrival
        self._open(tiers_file)

    def _open(self, tiers_file: TiersFile) -> None:
        self._tiers_file, self._looked_at = tiers_file, 0.0
        runs = _roots_of(tiers_file).runs
        lasting = next((number for number, run in enumerate(runs) if not run.is_volatile), 0)
        self._changes = [Changes(run) for run in runs[:-1]]
        self._movers: list[tuple[Mover, _Turn]] = []
        for number in range(1, len(runs)):
            roots = FollowedRoots(runs[: number + 1])
            pace = None if tiers_file.max_bandwidth is None else Pace(tiers_file.max_bandwidth)
            turn = _Turn(roots, self._in_flight, pace, self._on_arrival, waits_for_training=number <= lasting)
            self._movers.append((Mover(roots, self._copy_step, turn), turn))

    def _in_flight(self, run: Run) -> Collection[int]:
        """The steps that are being copied from `run`, which retention must keep."""
        return {step for mover, _ in self._movers if (step := mover.copier.step) is not None and mover.run is not run}

    def look(self) -> None:
        """Copy new steps. Raises the errors of `read_places`."""
        tiers_file = None
        with suppress(StorageUnavailableError):
            tiers_file = self._read_places()
        if tiers_file is not None and tiers_file != self._tiers_file:
            self.stop()
            self._open(tiers_file)
        changes = [one.are_there() for one in self._changes]  # a list: each must be asked, since asking resets it
        if any(changes) or monotonic() > self._looked_at + _LOOK_SECONDS:
            self._looked_at = monotonic()
            for mover, turn in self._movers:
                if mover.arrivals.error is not None:
                    turn.moving.leave()  # another process may be able to copy
                mover.worker.wake()

    def begin_end(self) -> None:
        """Copy the newest step to every place, regardless of `every`."""
        for mover, _ in self._movers:
            mover.begin_end()

    def finish(self, goes_on: Callable[[], bool]) -> list[str]:
        """After `begin_end`, wait for the steps to arrive, and stop. Returns a text for each place that lacks one."""
        while (waited := [mover for mover, _ in self._movers if mover.is_going_on()]) and goes_on():
            wait_for(waited[0].worker.ended, LIVENESS_SECONDS)
        self.stop()
        return [words for mover, _ in self._movers if (words := _left(mover.arrivals))]

    def stop(self) -> None:
        """End the copies that are under way, and let another process take over."""
        for mover, _ in self._movers:
            mover.stop()
        for mover, turn in self._movers:
            if mover.worker.is_running:
                wait_for(mover.worker.ended, _END_SECONDS)
            turn.moving.leave()


def _left(arrivals: Arrivals) -> str:
    """A text that names the step that a place lacks, or why that is not known; empty if it lacks none."""
    error = arrivals.error
    return arrivals.lag() or ("" if error is None else f"{arrivals.shown} may lack steps: {error}")


def conflicts_of(tiers_file: TiersFile) -> list[Conflict]:
    """The conflicts at the further places of a run. Raises StorageUnavailableError."""
    runs = _roots_of(tiers_file).runs
    found = (conflict_at(Roots(runs[: number + 1])) for number in range(1, len(runs)))
    return [conflict for conflict in found if conflict is not None]


def _roots_of(tiers_file: TiersFile) -> Roots:
    return open_roots(tiers_file.places, keep=Keep(), naming=tiers_file.naming, clock=wall_time)


class FollowedRoots(Roots):
    """A root and all nearer ones, for a process that copies steps from the nearer roots to it.

    The process writes to the last root in the name of the start that made the steps. So no other start is overtaken,
    and its commits count as if the training had copied the steps.
    """

    def ahead(self, run: Run, *, is_last: bool = False, first: int | None = None) -> Ahead:
        """See `Roots.ahead`."""
        self._stand_in()
        return super().ahead(run, is_last=is_last, first=first)

    def _stand_in(self) -> None:
        """Take the last root in the name of the newest start at the roots before it, if there is one. The start at a
        further root counts as newer if it descends from those at nearer roots.
        """
        found: tuple[Start, Run] | None = None
        ancestors: set[str] = set()
        *nearer, run = self.runs
        for one in nearer:
            with suppress(StorageUnavailableError):
                newest, descent = max(one.root.relist().starts, default=None), one.descent()
                ancestors |= descent
                if newest is not None and (found is None or found[0].token in descent):
                    found = newest, one
        if found is not None:
            about = about_start(found[1].storage, found[0])
            run.stand_in(found[0], {name: about[name] for name in _OF_PROCESS if name in about}, ancestors)

    def is_training(self) -> bool:
        """True if a process that saves to one of the roots is provably alive."""
        newest = [(run, max(run.root.starts)) for run in self.runs if run.root.starts]
        return any(run.storage.is_held(start.name) for run, start in newest)


class Changes:
    """Detects changes that another process makes at a root. Used by one thread."""

    def __init__(self, run: Run) -> None:
        self._run, self._version = run, ""

    def are_there(self) -> bool:
        """True if steps were committed or deleted since the last call, so that the journal was replaced. All cached
        facts are then read again, since a step may have been overwritten.
        """
        version = ""
        with suppress(FileNotFoundError):
            version = self._run.storage.read(JOURNAL)[1]
        if version == self._version:
            return False
        self._version = version
        self._run.root.forget(list(self._run.root.known))
        return True


class _Turn(MovingProcess):
    """The claim of this process to copy steps to a place. If another process claimed the place earlier, only that
    process copies.
    """

    def __init__(
        self,
        roots: FollowedRoots,
        in_flight: Callable[[Run], Collection[int]],
        pace: Pace | None,
        on_arrival: Callable[[str, int], None],
        *,
        waits_for_training: bool,
    ) -> None:
        super().__init__(in_flight)
        self._roots, self._run, self._pace, self._on_arrival = roots, roots.runs[-1], pace, on_arrival
        self._waits_for_training = waits_for_training
        self.moving = Moving(self._run.storage)

    def pace(self, *, is_last: bool) -> Pace | None:  # noqa: ARG002
        return self._pace

    def has_ranks(self) -> bool:
        return any(one is not None and one.world_size > 1 for one in self._run.root.known.values())

    def other(self, step: int | None, num_bytes: int) -> Announcement | None:
        if self._waits_for_training and self._roots.is_training():
            return Announcement("the training")
        return self.moving.announce(step, num_bytes)

    def check(self, step: int, num_bytes: int) -> None:
        other = None
        with suppress(StorageUnavailableError):  # the copy will raise it
            other = self.moving.announce(step, num_bytes)
        if other is not None:
            where = self._roots.names[-1]
            raise StorageUnavailableError(f"{where}: {other.by} is moving steps there now", path=where)

    def found(self, step: int) -> None:
        with suppress(CheckpointError):  # the process that copied it may have been killed before it wrote the tracker
            self._run.announce(step, in_flight=self.in_flight(self._run))

    def arrived(self, step: int) -> None:
        self._on_arrival(self._run.storage.locate(""), step)
