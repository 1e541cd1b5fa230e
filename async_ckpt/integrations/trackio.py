"""Trackio: an artifact with the reference and the numbers of each save, and the checkpoint from which a run resumed.

In: references to steps. Out: artifacts and numbers of a run. Knows nothing of: saves.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the types must not depend on the installed version
    trackio: Any
else:
    try:
        import trackio
    except ImportError as error:
        raise ImportError("this needs Trackio: pip install trackio") from error


class TrackioTracker:
    """Reports checkpoints to a Trackio run.

        ckpt.track(TrackioTracker(trackio.init(project="gpt")))

    Each commit is a version of an artifact of type "checkpoint". Its only file is the reference as JSON, since Trackio
    accepts references to few kinds of URLs. Its aliases are `step-<step>`, `latest` and `best`. Its name is derived
    from the root, so that it is the same in each run that continues there. After a restore, the run uses the artifact
    of that step, if the project has it; Trackio shows this as lineage.

    Args:
        run: the result of `trackio.init`. With several ranks, only rank 0 needs a run.
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
        with suppress(ValueError):  # the step was saved without a tracker
            run.use_artifact(f"{reference['name']}:step-{reference['step']}")

    def _active(self) -> Any:
        if self._run is None:
            raise ValueError("there is no run; give it what trackio.init() returns")
        return self._run
