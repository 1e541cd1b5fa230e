"""MLflow: a reference file, tags and the numbers of each save, and the checkpoint from which a run resumed.

In: references to steps. Out: metrics, tags and small files of a run. Knows nothing of: saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

try:
    import mlflow
    from mlflow.entities import Metric, RunTag
except ImportError as error:
    raise ImportError("this needs MLflow: pip install mlflow") from error


class MlflowTracker:
    """Reports checkpoints to an MLflow run.

        ckpt.track(MlflowTracker())

    Each commit adds a file `checkpoints/step_<step>.json` with the reference to the run's artifacts, and the numbers of
    the save at its step. The tags `ckpt.latest` and `ckpt.best` are the URLs of those steps. A restore sets the tag
    `ckpt.restored_from`, and adds the file `checkpoints/restored_from.json`.

    Args:
        run: a run, by default the one that is active on this thread. With several ranks, only rank 0 needs a run. The
            current tracking URI is used.
    """

    def __init__(self, run: Any = None) -> None:
        run = mlflow.active_run() if run is None else run
        self._run_id: str | None = None if run is None else run.info.run_id
        self._client = mlflow.MlflowClient()

    def committed(self, reference: dict[str, Any], numbers: dict[str, float], aliases: Sequence[str]) -> None:
        """See `ExperimentTracker`."""
        run_id, step, url = self._active(), reference["step"], reference["url"]
        self._client.log_dict(run_id, reference, f"checkpoints/step_{step:08d}.json")
        milliseconds = round(reference["created"] * 1e3)
        metrics = [Metric(name, value, milliseconds, step) for name, value in numbers.items()]
        self._client.log_batch(run_id, metrics, tags=[RunTag(f"ckpt.{alias}", url) for alias in aliases])

    def restored(self, reference: dict[str, Any]) -> None:
        """See `ExperimentTracker`."""
        run_id = self._active()
        self._client.set_tag(run_id, "ckpt.restored_from", reference["url"])
        self._client.log_dict(run_id, reference, "checkpoints/restored_from.json")

    def _active(self) -> str:
        if self._run_id is None:
            raise ValueError("no run is active; call mlflow.start_run() before MlflowTracker(), on the same thread")
        return self._run_id
