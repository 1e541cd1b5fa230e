"""`TrainerCheckpoints`: the trainers of SkyRL, with checkpoint folders that appear when they are durable.

In: the calls of a trainer. Out: `global_step_<N>` with all files that the trainer's own code has written, and then
`latest_ckpt_global_step.txt`. Knows nothing of: the content of the folder.

    <ckpt_path>/.global_step_<N>.<random>.async_ckpt-tmp.d/files/   the trainer's `ckpt_path` during the call
        global_step_<N>/                                            becomes <ckpt_path>/global_step_<N>

The trainer and its workers write to the hidden folder by their own methods. Workers that are `FSDPWorkerCheckpoints`
continue to write after the call.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch

from ...plumbing import file_digests, places, scratches, timing, waits
from ..common.event_history import HistoryEntry
from ..common.folders import name_latest
from ..common.run_folders import surplus
from ..common.save_queue import SaveQueue
from .worker_calls import WorkerCalls

_LATEST: Final = "latest_ckpt_global_step.txt"
_STATE: Final = "trainer_state.pt"
_NUMBERED: Final = re.compile(r"global_step_(\d+)")
# The shortest and the longest pause of the follower between two calls to the workers.
_LOOK_SECONDS: Final = 0.05
_LONGEST_LOOK_SECONDS: Final = 1.0


class TrainerCheckpoints:
    """A trainer of SkyRL whose checkpoints appear when they are durable: the first base class, before a trainer.

        class Trainer(TrainerCheckpoints, RayPPOTrainer):
            pass

    For `RayPPOTrainer`, `FullyAsyncRayPPOTrainer` and `SFTTrainer`. A save returns when the workers have copied their
    states. When all files are durable, `global_step_<N>` appears as a whole; then `latest_ckpt_global_step.txt` names
    it; then older checkpoints beyond `max_ckpts_to_keep` are removed. One save is under way at a time: the next save, a
    load, `wait_for_checkpoints` and the end of `train` wait for it, and raise its error.

    The workers should be `FSDPWorkerCheckpoints`; others write during the call. `ckpt_path` must be a folder that all
    nodes share; a save to a URL raises NotImplementedError.
    """

    @cached_property
    def _saves(self) -> SaveQueue:
        return SaveQueue("skyrl")

    def save_checkpoints(self) -> str:
        """Save, as the trainers of reinforcement learning do. Returns the folder, which appears when it is durable."""
        return self._save_by(super().save_checkpoints)  # type: ignore[misc]

    def save_checkpoint(self) -> str:
        """Save, as the trainer of supervised fine-tuning does. Returns the folder, which appears when it is durable."""
        return self._save_by(super().save_checkpoint)  # type: ignore[misc]

    def load_checkpoints(self) -> Any:
        """Wait for the save under way, and load as the reinforcement learning trainers do."""
        self.wait_for_checkpoints()
        return super().load_checkpoints()  # type: ignore[misc]

    def load_checkpoint(self) -> Any:
        """Wait for the save under way, and load as the supervised fine-tuning trainer does."""
        self.wait_for_checkpoints()
        return super().load_checkpoint()  # type: ignore[misc]

    def train(self) -> Any:
        """Train, and return when the last checkpoint is durable. Raises the error of its save."""
        trained = super().train()  # type: ignore[misc]
        if inspect.isawaitable(trained):
            return self._wait_after(trained)
        self.wait_for_checkpoints()
        return trained

    def wait_for_checkpoints(self) -> None:
        """Wait until the save under way is durable, and the file names it. Raises the error of the save."""
        self._saves.finish()

    async def _wait_after(self, training: Awaitable[Any]) -> Any:
        result = await training
        self.wait_for_checkpoints()
        return result

    def _cleanup_old_checkpoints(self) -> None:
        """Do nothing: old checkpoints are removed after the new one is durable."""

    def _save_by(self, write: Callable[[], str]) -> str:
        """Call a method of the trainer that writes a checkpoint to a hidden folder, and begin to follow the workers."""
        self.wait_for_checkpoints()
        settings: Any = _settings_of(self)
        given = settings.ckpt_path
        if not places.place_of(given).is_local:
            raise NotImplementedError(f"{given}: ckpt_path must be a folder; use plain SkyRL for a URL")
        root = Path(os.path.abspath(given))
        os.makedirs(root, exist_ok=True)
        scratches.sweep(root)
        dispatch: Any = self.dispatch  # type: ignore[attr-defined]
        began, step = timing.monotonic(), self.global_step  # type: ignore[attr-defined]
        save = _HiddenSave(root, step, WorkerCalls(dispatch), settings.max_ckpts_to_keep)
        try:
            settings.ckpt_path = str(save.hidden)
            try:
                write()
            finally:
                settings.ckpt_path = given
            save.mend_config(given)
        except BaseException:
            save.give_up()
            raise
        self._saves.add(
            save.target,
            [],
            save.finish,
            step=step,
            held_seconds=timing.monotonic() - began,
            failed=save.failed,
            entry=HistoryEntry(root, save.target.name, step),
        )
        return os.path.join(given, save.target.name)


class _HiddenSave:
    """One checkpoint being saved. Used by the trainer's thread during the call, and then by the follower's thread."""

    def __init__(self, root: Path, step: int, workers: WorkerCalls, limit: int) -> None:
        name = f"global_step_{step}"
        self.target: Final = root / name
        self._step, self._workers, self._limit = step, workers, limit
        self._scratch = scratches.Scratch(root, name)
        self.hidden: Final = self._scratch.folder

    @property
    def _written(self) -> Path:
        return self.hidden / self.target.name

    def mend_config(self, ckpt_path: Any) -> None:
        """In the trainer's state file, replace the hidden folder by the user's path."""
        path = self._written / _STATE
        # Safe: the trainer has just written it.
        state = torch.load(path, map_location="cpu", weights_only=False)  # nosec B614
        config = state["config"]
        config.get("trainer", config)["ckpt_path"] = ckpt_path
        torch.save(state, path)

    def give_up(self) -> None:
        """Remove the hidden folder once no worker writes any more."""
        for model in self._models():
            with suppress(Exception):  # another error is raised already
                self._workers.finalize(model)
        self._scratch.remove()

    def finish(self) -> None:
        """Wait until all files are durable, and make them the newest checkpoint. Runs on the queue's thread."""
        for model in self._models():
            self._wait_for_workers(model)
        file_digests.note_digests(self._written)
        scratches.sync_all(self._written)
        scratches.publish(self._written, self.target, replaced=lambda _: True)
        name_latest(self.target.parent / _LATEST, str(self._step))
        with suppress(Exception):  # the checkpoint exists; the next save tries again
            self._retire()
            self._scratch.remove()

    def failed(self, _: BaseException) -> None:
        with suppress(Exception):  # the error of the save is raised anyway
            self.give_up()

    def _models(self) -> list[str]:
        """The models that the trainer has saved, each in a folder with its name."""
        return sorted(path.name for path in self._written.iterdir() if path.is_dir()) if self._written.is_dir() else []

    def _wait_for_workers(self, model: str) -> None:
        """Wait until the workers of a model are done, without blocking their other work. Raises their error."""
        pauses = waits.growing_pauses(_LOOK_SECONDS, _LONGEST_LOOK_SECONDS)
        while self._workers.have_pending_save(model):
            timing.TIMEKEEPER.sleep(next(pauses))
        self._workers.finalize(model)

    def _retire(self) -> None:
        """Move the oldest checkpoints beyond the limit to the hidden folder, which is removed later.

        The newest one is kept, even if a training that was rolled back has left others with larger numbers.
        """
        if self._limit < 0:
            return
        found = sorted(
            filter(_NUMBERED.fullmatch, os.listdir(self.target.parent)), key=lambda name: int(name.rpartition("_")[2])
        )
        for name in surplus(found, {self.target.name}, self._limit):
            os.rename(self.target.parent / name, self.hidden / f"{name}.retired")


def _settings_of(trainer: Any) -> Any:
    """The part of a trainer's configuration that has `ckpt_path`."""
    return trainer.sft_cfg if hasattr(trainer, "sft_cfg") else trainer.cfg.trainer
