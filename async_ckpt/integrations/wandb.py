"""Weights & Biases: a reference artifact and the numbers of each save, and the checkpoint that a run went on from.

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
    """Tells a run of Weights & Biases of the checkpoints.

        ckpt.track(WandbTracker())

    Each commit is a version of an artifact of type "checkpoint", which refers to the step's folder, with the aliases
    `step-<step>`, `latest` and `best`. Nothing of the checkpoint is uploaded. The artifact's name stands for the root,
    so that it is the same in each run that goes on there.

    The numbers of a save join the row that the training logs next, so that its own steps are not moved; their x axis is
    `ckpt/step`. A restore sets `restored_from` in the run's configuration. Online, the run also uses the artifact.

    Args:
        run: by default the active one, `wandb.run`. Of several ranks, only rank 0 needs one.
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
        # The entry of add_reference(checksum=False), which lists a local folder, and asks for the client of a bucket.
        folder, url = reference["url"].rpartition("/")[2], reference["url"]
        artifact.manifest.add_entry(ArtifactManifestEntry(path=folder, ref=url, digest=url))
        run.log_artifact(artifact, aliases=[f"step-{reference['step']}", *aliases])

    def restored(self, reference: dict[str, Any]) -> None:
        """See `ExperimentTracker`."""
        run = self._active()
        run.config.update({"restored_from": reference}, allow_val_change=True)
        if not run.offline:  # where it is refused
            with suppress(wandb.errors.CommError, ValueError):  # the step was saved before there was a tracker
                run.use_artifact(f"{reference['name']}:step-{reference['step']}")

    def _active(self) -> Any:
        if self._run is None:
            raise ValueError("no run is active; call wandb.init() before WandbTracker()")
        return self._run
