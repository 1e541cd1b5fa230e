"""Conflicts between places: a further place has commits of a start that the run does not descend from.

In: the roots of a run. Out: the conflict at the last root, and its resolution. Knows nothing of: who decides.

Adopting these commits names their starts as ancestors in the file of the newest start at the nearest place: from then
on the run descends from them, and all steps of both count. Retiring them renames their manifests, as a rollback does.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from .manifest import seal
from .roots import Roots
from .run import Run
from .starts import Start, about_start
from .tenure import refuse_if_alive


class Conflict(NamedTuple):
    """The commits at a place that conflict with a run: `attempts` by step, and `strangers`, their starts."""

    roots: Roots
    run: Run
    attempts: dict[int, str]
    strangers: Collection[Start]

    def adopt(self) -> None:
        """Make the run descend from these starts. Raises RunTakenError if the run's training is alive."""
        nearest = self.roots.runs[0]
        starts = nearest.root.relist().starts
        refuse_if_alive(nearest.storage, starts)
        if starts:
            about = about_start(nearest.storage, max(starts))
            about["ancestors"] = sorted(nearest.descent() | {start.token for start in self.strangers})
            about.pop("digest", None)
            nearest.storage.replace(max(starts).name, seal(about))

    def retire(self) -> None:
        """Retire these commits; `async-ckpt repair --unretire` commits one again.

        Raises RunTakenError if a living process saves there.
        """
        with self.run.changing():
            self.run.root.retire(self.attempts)
            self.run.announce()


def conflict_at(roots: Roots) -> Conflict | None:
    """The conflict at the last of these roots; None if there is none. Raises StorageUnavailableError."""
    run = roots.runs[-1]
    run.root.listing = None
    known = roots.descent_beside(run)
    attempts = {manifest.step: manifest.attempt for manifest, _ in run.strange_commits(known)}
    strangers = [start for start in run.root.starts if start.token not in known]
    return Conflict(roots, run, attempts, strangers) if attempts else None
