"""Reports of a run's steps to experiment trackers.

In: operations that have ended, the commits of the run. Out: calls of a tracker, on a thread of its own. Knows nothing
of: the packages of trackers.
"""

from __future__ import annotations

import json
import logging
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from ..core.host.operations import Ended, listen
from ..core.report import SaveReport
from ..core.runs.manifest import Manifest
from ..core.runs.retention import best_of
from ..core.runs.roots import Roots
from ..core.runs.run import Run

_log: Final = logging.getLogger("async_ckpt")


class ExperimentTracker(Protocol):
    """A class of `async_ckpt.integrations`, or your own. It is called on one thread, and may block or raise there.

    A reference is plain JSON data. `url` is the URL of the step's folder (file:// for a local run); `step`,
    `num_bytes` (of all ranks), `created` (seconds since the epoch) and `record` are those of the commit; `digest` is
    the digest at the beginning of the step's manifest.json. `roots` lists all places of the run. `name` identifies the
    run, consists of letters, digits, dots, dashes and underscores, and is the same at each start.
    """

    def committed(self, reference: dict[str, Any], numbers: dict[str, float], aliases: Sequence[str]) -> None:
        """Called after a commit. `numbers` is the save's report, under constant keys such as "ckpt/stall_seconds".
        `aliases` contains "latest" if no newer step is committed, and "best" if no step has a better metric.
        """

    def restored(self, reference: dict[str, Any]) -> None:
        """Called when the training continues from a restored step."""


class Tracking:
    """Reports the steps of one checkpointer to one tracker. The checkpointer creates and closes it. `_report` runs on
    the thread of the listener.
    """

    def __init__(
        self,
        tracker: ExperimentTracker,
        roots: Roots,
        best: tuple[str, Literal["min", "max"]] | None,
        *,
        is_first_rank: Callable[[], bool],
        timeout: float,
    ) -> None:
        if not (callable(getattr(tracker, "committed", None)) and callable(getattr(tracker, "restored", None))):
            raise TypeError(
                "a tracker has the methods committed() and restored(), such as async_ckpt.integrations.wandb."
                f"WandbTracker(); got {tracker!r:.100}"
            )
        if best is not None and not (isinstance(best, tuple) and len(best) == 2 and best[1] in ("min", "max")):
            raise ValueError(f'best must be a metric of the records, and "min" or "max", got {best!r:.100}')
        if best is None and (kept := roots.runs[0].keep.best) is not None:
            best = kept[:2]
        self._tracker, self._roots, self._best = tracker, roots, best
        self._is_first_rank, self._timeout = is_first_rank, timeout
        self._has_warned = False
        self._listening = listen(self._report)

    def close(self) -> None:
        """Wait until the tracker has handled everything, for at most `timeout` seconds. May be called again."""
        if not self._listening.flush(self._timeout):
            _log.warning(
                "%s has not handled the last checkpoints within %g s, and is dropped; they are committed, and "
                "async_ckpt.history(%r) lists them",
                self,
                self._timeout,
                self._roots.names[0],
            )
        self._listening.close()

    def _report(self, ended: Ended) -> None:
        if ended.roots != self._roots.names or ended.step is None or ended.outcome != "done":
            return
        try:
            if not self._is_first_rank():
                return
            run = self._run_with(ended.step)
            if ended.kind == "restore":
                self._tracker.restored(_reference(run, run.manifest(ended.step), self._roots))
            elif isinstance(ended.report, SaveReport):
                self._report_commit(run, ended.step, ended.report.as_dict("ckpt/"))
        except Exception as error:
            if not self._has_warned:
                _log.warning("%s has failed at step %d: %r. Saves go on; its later errors are not logged",
                             self, ended.step, error)  # fmt: skip
            self._has_warned = True

    def _report_commit(self, run: Run, step: int, numbers: dict[str, float]) -> None:
        commits = run.view()
        if (manifest := commits.get(step)) is None:  # retention has deleted it while the tracker was slow
            return
        aliases = ["latest"] if step == max(commits) else []
        if self._best and step in (best_of(list(commits), commits, (*self._best, 1)) or ()):
            aliases.append("best")
        self._tracker.committed(_reference(run, manifest, self._roots), numbers, aliases)

    def _run_with(self, step: int) -> Run:
        """The place at which the step is known to be committed, or else, by a request, one that has it."""
        known = (run for run in self._roots.runs if step in run.root.known)
        return next(known, None) or self._roots.holding(step)[0]

    def __repr__(self) -> str:
        return type(self._tracker).__qualname__


def _reference(run: Run, manifest: Manifest, roots: Roots) -> dict[str, Any]:
    first, root = (_url(one.storage.locate("")).rstrip("/") for one in (roots.runs[0], run))
    return {
        "name": f"{re.sub('[^A-Za-z0-9._-]', '-', first.rpartition('/')[2])}-{zlib.crc32(first.encode()):08x}",
        "url": f"{root}/{run.folder(manifest.step)}",
        "step": manifest.step,
        "num_bytes": manifest.num_bytes,
        "digest": json.loads(manifest.dump())["digest"],
        "created": manifest.created,
        "record": json.loads(json.dumps(manifest.record)),  # a copy that a tracker may change
        "roots": [_url(one.storage.locate("")).rstrip("/") for one in roots.runs],
    }


def _url(place: str) -> str:
    return place if "://" in place else Path(place).absolute().as_uri()
