"""`TrainerCheckpoints`: the trainers of SkyRL, with checkpoint folders that appear when they are durable.

In: the calls of a trainer. Out: `global_step_<N>` with everything that its own code has written there, and then
`latest_ckpt_global_step.txt`. Knows nothing of: what is in the folder.

    <ckpt_path>/.global_step_<N>.<random>.async_ckpt-tmp.d/files/   what the trainer takes for `ckpt_path` in the call
        global_step_<N>/                                            becomes <ckpt_path>/global_step_<N>

The trainer and its workers write into the hidden folder by their own methods. Workers that are `FSDPWorkerCheckpoints`
go on after the call.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from ...plumbing import file_digests, ledger, places, scratches, threads, timing, waits
from ..common.checkpoint_history import note_failed, note_saved
from ..common.folders import name_latest
from .worker_calls import WorkerCalls

_LATEST: Final = "latest_ckpt_global_step.txt"
_STATE: Final = "trainer_state.pt"
_NUMBERED: Final = re.compile(r"global_step_(\d+)")
# How long the follower pauses between two looks at the workers.
_LOOK_SECONDS: Final = 0.05
_LONGEST_LOOK_SECONDS: Final = 1.0

_log = logging.getLogger("async_ckpt")


class TrainerCheckpoints:
    """A trainer of SkyRL whose checkpoints become visible when they are durable; put it in front as a base.

        class Trainer(TrainerCheckpoints, RayPPOTrainer):
            pass

    For `RayPPOTrainer`, `FullyAsyncRayPPOTrainer` and `SFTTrainer`. A save returns when the workers have copied their
    states. `global_step_<N>` appears as a whole when all of it is durable, then `latest_ckpt_global_step.txt` names it,
    and then older ones are removed, by `max_ckpts_to_keep`. One save is under way at a time: the next one, loading,
    `wait_for_checkpoints` and the end of `train` wait for it, and raise its error.

    The workers should be `FSDPWorkerCheckpoints`; others write during the call. `ckpt_path` must be a folder that all
    nodes share; a save to a URL raises NotImplementedError.
    """

    _saving: Future[None] | None = None
    _follower: threads.Crew | None = None

    def save_checkpoints(self) -> str:
        """Save as the trainer of reinforcement learning does. Returns the folder, which appears when it is durable."""
        return self._save_by(super().save_checkpoints)  # type: ignore[misc]

    def save_checkpoint(self) -> str:
        """Save as the trainer of supervised fine-tuning does. Returns the folder, which appears when it is durable."""
        return self._save_by(super().save_checkpoint)  # type: ignore[misc]

    def load_checkpoints(self) -> Any:
        """Load as the trainer of reinforcement learning does, after the save under way."""
        self.wait_for_checkpoints()
        return super().load_checkpoints()  # type: ignore[misc]

    def load_checkpoint(self) -> Any:
        """Load as the trainer of supervised fine-tuning does, after the save under way."""
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
        """Return when the save under way is durable, and named. Raises its error."""
        saving = self._saving
        if saving is not None:
            ledger.wait_in_training(saving)
            self._saving = None
            saving.result()

    async def _wait_after(self, training: Awaitable[Any]) -> Any:
        result = await training
        self.wait_for_checkpoints()
        return result

    def _cleanup_old_checkpoints(self) -> None:
        """Remove nothing in the call: that comes after the new checkpoint is durable."""

    def _save_by(self, write: Callable[[], str]) -> str:
        """Have a method of the trainer write a checkpoint into a hidden folder, and begin to follow the workers."""
        self.wait_for_checkpoints()
        settings: Any = _settings_of(self)
        given = settings.ckpt_path
        if not places.place_of(given).is_local:
            raise NotImplementedError(f"{given}: ckpt_path must be a folder; use plain SkyRL for a URL")
        root = Path(os.path.abspath(given))
        os.makedirs(root, exist_ok=True)
        scratches.sweep(root)
        dispatch: Any = self.dispatch  # type: ignore[attr-defined]
        save = _FolderSave(root, f"global_step_{self.global_step}", WorkerCalls(dispatch))  # type: ignore[attr-defined]
        save.limit = settings.max_ckpts_to_keep
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
        save.note_call()
        ended = self._saving = threads.running_future()
        self._follower = self._follower or threads.Crew("skyrl", 1)
        self._follower.submit(partial(save.follow, ended), ended.set_exception)
        return os.path.join(given, save.target.name)


class _FolderSave:
    """One checkpoint that is being saved. Used by the trainer's thread in the call, and then by the follower's."""

    def __init__(self, root: Path, name: str, workers: WorkerCalls) -> None:
        self.target: Final = root / name
        self.limit, self._began = -1, timing.monotonic()
        self._workers, self._call_seconds = workers, 0.0
        self._scratch = scratches.Scratch(root, name)
        self.hidden: Final = self._scratch.folder

    @property
    def _step(self) -> int:
        return int(self.target.name.removeprefix("global_step_"))

    @property
    def _written(self) -> Path:
        return self.hidden / self.target.name

    def mend_config(self, ckpt_path: Any) -> None:
        """Note the path that the user has given in the trainer's state, in place of the hidden folder."""
        path = self._written / _STATE
        # The trainer has just written it.
        state = torch.load(path, map_location="cpu", weights_only=False)  # nosec B614
        config = state["config"]
        config.get("trainer", config)["ckpt_path"] = ckpt_path
        torch.save(state, path)

    def note_call(self) -> None:
        """Note the end of the trainer's call, which held the training."""
        self._call_seconds = timing.monotonic() - self._began

    def give_up(self) -> None:
        """Remove what has been written, once no worker writes any more."""
        for model in self._models():
            with suppress(Exception):  # another error is raised already
                self._workers.finalize(model)
        self._scratch.remove()

    def follow(self, ended: Future[None]) -> None:
        """Wait until everything is durable, and make it the newest checkpoint. Runs on the follower's thread."""
        try:
            for model in self._models():
                self._wait_for_workers(model)
            file_digests.note_digests(self._written)
            scratches.sync_all(self._written)
            scratches.publish(self._written, self.target, replaced=lambda _: True)
            name_latest(self.target.parent / _LATEST, self.target.name.removeprefix("global_step_"))
        except BaseException as error:
            _log.error("%s was not saved: %s: %s", self.target, type(error).__name__, error)
            note_failed(self.target.parent, self._step, error)
            with suppress(Exception):
                self.give_up()
            ended.set_exception(error)
            return
        seconds = {"stall_seconds": self._call_seconds, "total_seconds": timing.monotonic() - self._began}
        note_saved(self.target.parent, self.target.name, self._step, seconds)
        with suppress(Exception):  # the checkpoint exists; the next save tries again
            self._retire()
            self._scratch.remove()
        ended.set_result(None)

    def _models(self) -> list[str]:
        """The models that the trainer has saved, each in a folder of its name."""
        return sorted(path.name for path in self._written.iterdir() if path.is_dir()) if self._written.is_dir() else []

    def _wait_for_workers(self, model: str) -> None:
        """Wait until the workers of a model are done, without holding their other work. Raises their error."""
        pauses = waits.growing_pauses(_LOOK_SECONDS, _LONGEST_LOOK_SECONDS)
        while self._workers.have_pending_save(model):
            timing.TIMEKEEPER.sleep(next(pauses))
        self._workers.finalize(model)

    def _retire(self) -> None:
        """Hide the oldest checkpoints until `limit` are left; the hidden folder is removed later, with them in it.

        The newest one stays, even if a training that went back has left others with larger numbers.
        """
        if self.limit < 0:
            return
        matches = map(_NUMBERED.fullmatch, os.listdir(self.target.parent))
        numbers = sorted(int(match[1]) for match in matches if match)
        others = [number for number in numbers if f"global_step_{number}" != self.target.name]
        for number in others[: max(0, len(others) + 1 - max(1, self.limit))]:
            name = f"global_step_{number}"
            os.rename(self.target.parent / name, self.hidden / f"{name}.retired")


def _settings_of(trainer: Any) -> Any:
    """The part of a trainer's configuration that has `ckpt_path`."""
    return trainer.sft_cfg if hasattr(trainer, "sft_cfg") else trainer.cfg.trainer
