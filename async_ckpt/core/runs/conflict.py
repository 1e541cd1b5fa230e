"""Conflicts between places: a further place has commits of a start that the run does not descend from.

In: the roots of a run. Out: the conflict at the last of them, and its end. Knows nothing of: who decides.

To adopt such commits, their starts are named as ancestors in the file of the newest start at the nearest place: from
then on the run descends from them, and all steps of both count. To retire them, their manifests are renamed as by a
rollback.
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
    """The commits at a place that stand against a run: the attempts by their steps, and the starts there."""

    roots: Roots
    run: Run
    attempts: dict[int, str]
    strangers: Collection[Start]

    def adopt(self) -> None:
        """Have the run descend from these starts. Raises RunTakenError if its training is alive."""
        nearest = self.roots.runs[0]
        starts = nearest.root.relist().starts
        refuse_if_alive(nearest.storage, starts)
        if starts:
            about = about_start(nearest.storage, max(starts))
            about["ancestors"] = sorted(nearest.descent() | {start.token for start in self.strangers})
            about.pop("digest", None)
            nearest.storage.replace(max(starts).name, seal(about))

    def retire(self) -> None:
        """Take these commits back; `async-ckpt repair --unretire` commits one again.

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
