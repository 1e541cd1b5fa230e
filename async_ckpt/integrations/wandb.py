"""Weights & Biases: a reference artifact and the numbers of each save, and the checkpoint from which a run resumed.

In: references to steps. Out: artifacts, numbers and the configuration of a run. Knows nothing of: saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

try:
    import wandb
    from wandb.sdk.artifacts.artifact_manifest_entry import ArtifactManifestEntry
except ImportError as error:
    raise ImportError("this needs Weights & Biases: pip install wandb") from error


class WandbTracker:
    """Reports checkpoints to a Weights & Biases run.

        ckpt.track(WandbTracker())

    Each commit is a version of an artifact of type "checkpoint", which refers to the step's folder, with the aliases
    `step-<step>`, `latest` and `best`. Nothing of the checkpoint is uploaded. The artifact's name is derived from the
    root, so that it is the same in each run that continues there.

    The numbers of a save are added to the next row that the training logs, so that they do not advance its steps; their
    x axis is `ckpt/step`. A restore sets `restored_from` in the run's configuration. Online, the run also uses the
    artifact.

    Args:
        run: a run, by default the active one, `wandb.run`. With several ranks, only rank 0 needs a run.
    """

    def __init__(self, run: Any = None) -> None:
        self._run = wandb.run if run is None else run
        if self._run is not None:
            self._run.define_metric("ckpt/*", step_metric="ckpt/step")

    def committed(self, reference: dict[str, Any], numbers: dict[str, float], aliases: Sequence[str]) -> None:
        """See `ExperimentTracker`."""
        run = self._active()
        run.log(numbers, commit=False)
        artifact = wandb.Artifact(reference["name"], "checkpoint", metadata=reference)
        # The same entry as by add_reference(checksum=False), which would also list a local folder and need the client
        # of a bucket.
        folder, url = reference["url"].rpartition("/")[2], reference["url"]
        artifact.manifest.add_entry(ArtifactManifestEntry(path=folder, ref=url, digest=url))
        run.log_artifact(artifact, aliases=[f"step-{reference['step']}", *aliases])

    def restored(self, reference: dict[str, Any]) -> None:
        """See `ExperimentTracker`."""
        run = self._active()
        run.config.update({"restored_from": reference}, allow_val_change=True)
        if not run.offline:  # offline it is refused
            with suppress(wandb.errors.CommError, ValueError):  # the step was saved without a tracker
                run.use_artifact(f"{reference['name']}:step-{reference['step']}")

    def _active(self) -> Any:
        if self._run is None:
            raise ValueError("no run is active; call wandb.init() before WandbTracker()")
        return self._run
