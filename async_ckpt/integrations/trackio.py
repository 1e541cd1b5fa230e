"""Trackio: an artifact with the reference and the numbers of each save, and the checkpoint that a run went on from.

In: references to steps. Out: artifacts and numbers of a run. Knows nothing of: saves.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # whichever version is installed, if any
    trackio: Any
else:
    try:
        import trackio
    except ImportError as error:
        raise ImportError("this needs Trackio: pip install trackio") from error


class TrackioTracker:
    """Tells a run of Trackio of the checkpoints.

        ckpt.track(TrackioTracker(trackio.init(project="gpt")))

    Each commit is a version of an artifact of type "checkpoint", whose only file is the reference as JSON, since
    Trackio takes references to few kinds of URLs. Its aliases are `step-<step>`, `latest` and `best`. Its name stands
    for the root, so that it is the same in each run that goes on there. After a restore, the run uses the artifact of
    that step, if the project has it, which is the lineage that Trackio shows.

    Args:
        run: what `trackio.init` returns. Of several ranks, only rank 0 needs one.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def committed(self, reference: dict[str, Any], numbers: dict[str, float], aliases: Sequence[str]) -> None:
        """See `ExperimentTracker`."""
        run = self._active()
        run.log(numbers, step=reference["step"])
        artifact = trackio.Artifact(reference["name"], "checkpoint", metadata=reference)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "reference.json"
            file.write_text(json.dumps(reference), encoding="utf-8")
            artifact.add_file(file)
            run.log_artifact(artifact, aliases=[f"step-{reference['step']}", *aliases])

    def restored(self, reference: dict[str, Any]) -> None:
        """See `ExperimentTracker`."""
        run = self._active()
        run.log({"ckpt/restored_from_step": reference["step"]}, step=reference["step"])
        with suppress(ValueError):  # the step was saved before there was a tracker
            run.use_artifact(f"{reference['name']}:step-{reference['step']}")

    def _active(self) -> Any:
        if self._run is None:
            raise ValueError("there is no run; give it what trackio.init() returns")
        return self._run
