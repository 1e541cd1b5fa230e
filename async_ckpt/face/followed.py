"""The places of a run whose training is another process, or has ended.

In: the runs at its places. Out: what the last one is to get next, and the right to bring it there. Knows nothing of:
how steps are moved.

A process that brings steps to a place takes the place in the name of the start that has made them, so nobody is
overtaken by it, and commits there count as if the training had moved them.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from ..core.runs.naming import JOURNAL
from ..core.runs.roots import Ahead, Roots
from ..core.runs.run import Run
from ..core.runs.starts import Start, about_start
from ..errors import StorageUnavailableError

# What the file of a start has of its process.
_OF_PROCESS: Final = ("host", "pid", "since")


class FollowedRoots(Roots):
    """The roots before one, and that one, for a process that brings their steps there."""

    def ahead(self, run: Run, *, is_last: bool = False, first: int | None = None) -> Ahead:
        """See `Roots.ahead`."""
        self._stand_in()
        return super().ahead(run, is_last=is_last, first=first)

    def _stand_in(self) -> None:
        """Have the last root taken in the name of the newest start at those before it, if there is one. The start at a
        further one is newer if it follows those at nearer ones.
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
        """Whether a process that saves at one of the roots is provably alive."""
        newest = [(run, max(run.root.starts)) for run in self.runs if run.root.starts]
        return any(run.storage.is_held(start.name) for run, start in newest)


class Changes:
    """The changes at a root that are made by another process. One thread asks."""

    def __init__(self, run: Run) -> None:
        self._run, self._version = run, ""

    def are_there(self) -> bool:
        """Whether steps were committed or deleted since the last call: the journal was replaced. Then all that was
        known is read again, as one of the steps may have been overwritten.
        """
        version = ""
        with suppress(FileNotFoundError):
            version = self._run.storage.read(JOURNAL)[1]
        if version == self._version:
            return False
        self._version = version
        self._run.root.forget(list(self._run.root.known))
        return True
