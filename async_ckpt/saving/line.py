"""A run is a line of steps: what its saves and restores leave for those that follow.

In: restores, commits, writes that hang. Out: what a new save has to know of the others. Knows nothing of: archives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Protocol

from ..errors import CheckpointError
from ..ranks.attempts import Ranks
from ..runs.roots import Roots
from ..runs.run import Run
from .borrowed import UnchangedGroups
from .groups import GroupDigest
from .saver import Saver
from .story import CommitRule


class CatchUp(Protocol):
    """Copies to a run what other roots hold and it lacks; the steps that were copied."""

    def __call__(
        self, roots: Roots, run: Run, *, skip: Collection[int], check: Callable[[], None]
    ) -> list[int]: ...


class Line:
    """The saves and restores of one checkpointer. From any thread."""

    def __init__(
        self, roots: Roots, saver: Saver, *, rule: CommitRule, retire: bool, catch_up: CatchUp, ranks: Ranks
    ) -> None:
        self.roots, self.rule, self.retire = roots, rule, retire
        self.groups = UnchangedGroups(lambda: ranks.slicer)
        self._saver, self._catch_up, self._ranks = saver, catch_up, ranks
        self._catching_up = threading.Lock()  # one copies at a time: two would write the same object
        self._lock = threading.Lock()
        # Under _lock, and read without it: the restore from below the newest commit that no commit has followed.
        self.rolled_back: object | None = None
        self._hanging: dict[Run, list[Future[None]]] = {}  # writes that saves went on without; under _lock
        self._digests: dict[str, bytes] = {}  # of the groups of the last commit; under _lock

    def unchanged_in(self, digests: Mapping[str, GroupDigest], borrowed: Collection[str]) -> tuple[str, ...]:
        """The groups of a commit that have the bytes of the commit before: those that it has borrowed, and others.

        Asked once for each commit, in their order.
        """
        with self._lock:
            before, self._digests = self._digests, {name: digest.here for name, digest in digests.items()}
            self._digests.update({name: before[name] for name in borrowed if name in before})
        same = {name for name, digest in digests.items() if before.get(name) == digest.before}
        return tuple(sorted(same.union(borrowed)))

    @property
    def has_one_root(self) -> bool:
        return len(self.roots.runs) == 1

    def restored(self, *, behind: bool) -> None:
        """Training goes on from a step; `behind` the newest commit."""
        with self._lock:
            self.rolled_back = object() if behind else None
            self._digests = {}

    def committed(self, *, since: object | None) -> None:
        """A save is true that was begun after the restore `since`: the run goes on from there."""
        with self._lock:
            if self.rolled_back is since:
                self.rolled_back = None

    def left_behind(self, run: Run, quiet: Future[None]) -> None:
        """A save goes on without writes at this root, which are under way until `quiet` resolves."""
        with self._lock:
            hanging = [future for future in self._hanging.get(run, ()) if not future.done()]
            self._hanging[run] = [*hanging, quiet]

    def hangs(self, run: Run) -> bool:
        """Whether writes at this root are still under way that a save went on without."""
        with self._lock:
            return not all(quiet.done() for quiet in self._hanging.get(run, ()))

    def in_flight(self) -> Collection[int]:
        """What retention must not touch: steps that saves are about, and those that they borrow from, or the next may."""
        steps = {step for slot in self._saver.under_way() for step in (slot.step, *slot.needs())}
        return {step for step in steps if step is not None} | self.groups.lenders()

    def catch_up(self) -> dict[str, list[int]]:
        """Copy to each root what others hold and it lacks; the steps that each was given.

        Raises StorageUnavailableError when a root is still away, after the others have been caught up.
        """
        copied: dict[str, list[int]] = {}
        errors: list[CheckpointError] = []
        with self._catching_up:
            for run in self.roots.runs:
                if self._ranks.is_apart(run):
                    continue  # it is never committed to
                root = run.storage.locate("").rstrip("/") or "/"
                try:
                    copied[root] = self._catch_up(
                        self.roots, run, skip=self._on_the_way(), check=lambda: None
                    )
                except CheckpointError as error:
                    errors.append(error)
        if errors:
            raise errors[0]
        return copied

    def catch_up_behind(self, run: Run) -> None:
        """In the background, after a save that reached this root: give it what it has missed before."""
        if not self.has_one_root and self._catching_up.acquire(blocking=False):
            try:
                self._catch_up(
                    self.roots, run, skip=self._on_the_way(), check=self._saver.ledger.check_going_on
                )
            finally:
                self._catching_up.release()

    def _on_the_way(self) -> Collection[int]:
        """Steps that may still arrive where they lag."""
        return {
            p.handle.step
            for p in self._saver.ledger.saves()
            if p.handle.step is not None and not p.finished.done()
        }
