"""`VerlCheckpointManager`: verl's checkpoint manager for FSDP, which writes in the background.

In: the calls of verl's engine, on all ranks. Out: a folder of archives, the tracker, and errors on all ranks. Knows
nothing of: how FSDP shards the state, the other folders of a step.

verl's own manager writes the small files (config, tokenizer, FSDP's config); it is called once for them.
"""

from __future__ import annotations

import copy
import logging
import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ... import RngState, SaveHandle, SaveReport, export_hf, load, save, snapshot
from ...errors import NotCommittedError
from ...plumbing import ledger, timing, waits
from ..common import fsdp1_state
from ..common.event_history import HistoryEntry
from ..common.framework_checks import require, require_names
from ..common.joint_errors import meet
from ..common.save_queue import SaveQueue
from ..common.small_files import written_by
from ..common.step_guard import StepGuard
from ..common.training_archive import archive_in
from ..dcp import restore
from . import fsdp_state
from .part_folder import PartFolder

_missing: ImportError | None = None  # raised when a manager is constructed
if TYPE_CHECKING:  # the types must not depend on the installed version
    FSDPCheckpointManager: Any
else:
    try:
        from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
    except ImportError as error:
        FSDPCheckpointManager, _missing = object, error

_HF: Final = "huggingface"
_CONTENTS: Final = ("model", "optimizer", "extra")
_FACTS: Final = "verl"
"""The group with facts about the save, such as the saved contents and the number of ranks."""
# The methods and attributes of verl's managers that are used here.
_USED: Final = (
    "save_checkpoint", "load_checkpoint", "should_save_model", "should_save_optimizer", "should_save_extra",
    "should_save_hf_model", "should_save_lora_only", "should_load_model", "should_load_optimizer", "should_load_extra",
)  # fmt: skip

_log = logging.getLogger("async_ckpt")


class _PartSave(NamedTuple):
    """The save under way. When the trainer `went_on`, the tracker is moved, and then the save has `ended`."""

    went_on: threading.Event
    durable: Future[None]
    ended: Future[None]


class VerlCheckpointManager(FSDPCheckpointManager):  # type: ignore[misc]
    """A checkpoint manager that replaces the one of verl's FSDP engine, with the same arguments.

    A checkpoint is verl's folder with one archive of this library instead of several files for each rank. Any number of
    ranks can load it. Folders of verl's own manager can be loaded only on the number of ranks that has saved them.

    With `async_save=True` in the checkpoint's config, saves are written in the background, and this manager updates
    verl's tracker when all files in the folder of the step are durable; the trainer then does not touch the tracker.
    Otherwise the trainer updates the tracker when the save returns, so a save returns only when it is durable.

    One save is under way at a time. The next save, `load_checkpoint`, `wait`, and the interpreter's exit wait for it.
    The first three raise its error on every rank.

    Pass `moves_state=True` if the model or the optimizer is moved or changed between the steps of the optimizer. Then
    everything is copied before a save returns, as it is for models with adapters, which verl merges for rollouts.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        processing_class: Any = None,
        checkpoint_config: Any = None,
        *others: Any,
        moves_state: bool = False,
        **options: Any,
    ) -> None:
        package = require("verl")
        if _missing is not None:
            raise ImportError(f"verl's checkpoint manager cannot be imported: {_missing}") from _missing
        require_names(package, FSDPCheckpointManager, _USED)
        super().__init__(model, optimizer, lr_scheduler, processing_class, checkpoint_config, *others, **options)
        self._guard = None if moves_state or fsdp_state.has_adapters(model) else StepGuard()
        self._small_files: dict[str, bytes] | None = None  # as of the first save
        self._saves = SaveQueue("verl")
        self._pending: _PartSave | None = None
        self._knows_siblings = False

    # --- what verl calls --------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,  # noqa: ARG002
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Save to a folder. Every rank calls this. With `local_path=None`, this is `wait`.

        Raises the error of the previous save, and then saves nothing. An error of any rank's copy is raised on all.
        """
        began = timing.monotonic()
        if local_path is None:
            self.wait()
            return
        self._check("save", self.should_save_model, self.should_save_optimizer)
        folder, is_async = PartFolder(local_path), self._is_async()
        if is_async and folder.is_step:
            warnings.warn(
                f"async_save: {folder.path} belongs to verl's SFT trainer, which updates the tracker immediately, so "
                "each save waits until it is durable",
                UserWarning,
                stacklevel=2,
            )
            is_async = False
        self._synchronize_after_last(partial(self._begin_folder, folder))
        self.previous_global_step = global_step
        handles: list[SaveHandle] = []
        try:
            files = self._files()
            state = self._state()
            exported = self._exported(state)
            meet(lambda: handles.extend(self._begin(folder, state, exported)))
        except BaseException:
            for handle in handles:
                waits.wait_for(handle)
                handle.exception()  # this save has failed, even if a part was written
            raise
        held_seconds = timing.monotonic() - began
        if self.rank == 0:
            finish, went_on = partial(folder.finish, files), threading.Event()
            entry = HistoryEntry(folder.run, folder.name, global_step, world_size=self.world_size)
            name = partial(self._name, folder, went_on if is_async else None, max_ckpt_to_keep)
            durable = self._saves.add(
                folder.path, handles, finish, step=global_step, held_seconds=held_seconds, entry=entry
            )
            self._pending = _PartSave(went_on, durable, self._saves.follow(folder.path, name))
        else:
            durable = self._saves.add(folder.path, handles, step=global_step, held_seconds=held_seconds)
            self._pending = _PartSave(threading.Event(), durable, durable)
        if not is_async:
            self.wait()

    def load_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        del_local_after_load: bool = False,
    ) -> None:
        """Wait for the save under way, and fill model, optimizer, scheduler and random state from a folder.

        Every rank calls this. Under FSDP, it uses collectives.

        Raises the error of that save, NotCommittedError if there is no checkpoint, ValueError if it lacks an item of
        `load_contents`, FileNotFoundError if verl's own manager has written it on another number of ranks, and the
        errors of `AsyncCheckpointer.restore`.
        """
        self.wait()
        if local_path is None:
            return
        self._check("load", self.should_load_model, self.should_load_optimizer)
        if meet(lambda: self._is_of_verl(PartFolder(local_path)))[0]:
            super().load_checkpoint(local_path, hdfs_path, del_local_after_load)
        else:
            self._fill(PartFolder(local_path))

    # --- what users call --------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until the save under way is durable and in the tracker. Every rank calls this. Raises its error.

        manager.wait()  # the last line of a script
        """
        self._synchronize_after_last()

    close = wait

    def wait_durable(self) -> None:
        """Wait until the save under way is durable, but not for the tracker. Every rank calls this. Raises its error.

        manager.wait_durable()
        """
        meet(self._after_durable)

    def trainer_went_on(self) -> None:
        """Report that the trainer has written all its files to the folder of the step.

        manager.trainer_went_on()  # after the trainer's save, such as when verl's engine asks for weights
        """
        pending = self._pending
        if pending is not None:
            pending.went_on.set()
            if pending.durable.done():
                waits.wait_for(pending.ended)  # a short wait: only the tracker is written

    def reports(self) -> list[SaveReport]:
        """The reports of this rank's parts of the saves that have ended since the last call.

        for report in manager.reports(): tracking.log(report.as_dict("async_ckpt/"), step=report.step)
        """
        return self._saves.take_reports()

    # --- a save -----------------------------------------------------------------------------------------------

    def _check(self, what: str, needs_model: bool, needs_optimizer: bool) -> None:
        if (needs_model and self.model is None) or (needs_optimizer and self.optimizer is None):
            raise ValueError(f"{what}_contents names the model or the optimizer, but this manager was made without it")

    def _is_async(self) -> bool:
        config = self.checkpoint_config
        return bool(config.get("async_save", False)) if config else False

    def _begin_folder(self, folder: PartFolder) -> None:
        if self.rank != 0:
            return
        if not self._knows_siblings:
            self.previous_saved_paths = [str(path) for path in folder.siblings()]
            self._knows_siblings = True
        folder.begin()

    def _files(self) -> dict[str, bytes]:
        """The small files of the folder, on rank 0. Every rank calls this."""
        if self._small_files is None:
            plain = FSDPCheckpointManager(
                self.model,
                processing_class=self.processing_class,
                checkpoint_config={"save_contents": []},
            )
            self._small_files = written_by(plain.save_checkpoint, in_memory=True)
            if self.rank == 0 and self.should_save_hf_model:
                self._small_files |= written_by(self._write_exported_config, in_memory=True)
        return self._small_files

    def _write_exported_config(self, folder: str) -> None:
        """Write the configs beside exported weights as verl does: those of a new model in bfloat16."""
        plain = fsdp1_state.plain_of(self.model)
        config = copy.deepcopy(plain.config)
        config.dtype = torch.bfloat16
        config.save_pretrained(f"{folder}/{_HF}")
        if plain.can_generate() and f"{_HF}/generation_config.json" not in (self._small_files or {}):
            generation: Any = import_module("transformers").GenerationConfig
            generation.from_model_config(config).save_pretrained(f"{folder}/{_HF}")

    def _state(self) -> dict[str, Any]:
        """The state of this rank for the archive, with the parts in `save_contents`. Every rank calls this."""
        state: dict[str, Any] = {}
        if self.should_save_model:
            state["model"] = fsdp_state.weights_of(self.model, only_adapters=self._saves_adapters())
        if self.should_save_optimizer:
            state["optimizer"] = fsdp1_state.optimizer_of(self.model, self.optimizer)
        if self.should_save_extra:
            state["rng"] = RngState("verl")
            if self.lr_scheduler is not None:
                state["lr_scheduler"] = self.lr_scheduler
        return state

    def _saves_adapters(self) -> bool:
        return bool(self.should_save_lora_only) and fsdp_state.has_adapters(self.model)

    def _exported(self, state: Mapping[str, Any]) -> Any:
        """The model or weights to export; None without an export. Every rank calls this."""
        if not self.should_save_hf_model:
            return None
        weights = None if self._saves_adapters() else state.get("model")
        return fsdp_state.exported(self.model, weights or fsdp_state.weights_of(self.model, only_adapters=False))

    def _begin(self, folder: PartFolder, state: dict[str, Any], exported: Any) -> list[SaveHandle]:
        """Copy the state, and begin to write the archive and the export. Returns their handles."""
        guard = (self._guard([self.optimizer]) if self._guard and self.optimizer is not None else []) or None
        facts = {
            "contents": [name for name in _CONTENTS if name in self.checkpoint_save_contents],
            "world_size": self.world_size,
            "lora_only": self._saves_adapters(),
            "has_scheduler": "lr_scheduler" in state,
        }
        state = {**state, _FACTS: facts}
        if self.world_size > 1 and not {"model", "optimizer"} & state.keys():
            state["ranks"] = fsdp_state.rank_number(self.rank, self.world_size)
        with ExitStack() as stack:
            if exported is not None and "model" in state:  # one snapshot, so that weights are copied only once
                snap = stack.enter_context(snapshot({"state": state, "exported": exported}, guard=guard))
                state, exported, guard = snap["state"], snap["exported"], None
            handles = [save(state, folder.archive, guard=guard)]
            if exported is not None:
                handles.append(export_hf(exported, folder.path / _HF, guard=guard))
        return handles

    # --- the end of a save, on the follower's thread ----------------------------------------------------------

    def _name(self, folder: PartFolder, went_on: threading.Event | None, limit: int | None) -> None:
        """When the trainer `went_on`, write the step of a durable folder to the tracker. Then remove older folders."""
        try:
            if went_on is not None:
                folder.wait_for_trainer(went_on)
                folder.name_step()
            self._retire(folder, limit)
        except BaseException as error:
            _log.error("%s is durable, but not named: %s: %s", folder.path, type(error).__name__, error)
            raise

    def _retire(self, folder: PartFolder, limit: int | None) -> None:
        """Remove the oldest folders of this model beyond the limit, except that of the tracker's step."""
        newest = str(folder.path)
        paths = [*(path for path in self.previous_saved_paths if path != newest), newest]
        self.previous_saved_paths = paths
        if not isinstance(limit, int) or limit < 1:
            return
        for path in paths[:-limit]:
            if not PartFolder(path).is_named():
                PartFolder(path).remove()
                self.previous_saved_paths = [other for other in self.previous_saved_paths if other != path]

    # --- waits ------------------------------------------------------------------------------------------------

    def _synchronize_after_last(self, then: Callable[[], object] = lambda: None) -> None:
        """Wait for the previous save on all ranks, and then call `then`. An error of any rank is raised on all."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.went_on.set()
        self._saves.meet(then)

    def _after_durable(self) -> None:
        if self._pending is not None:
            ledger.wait_in_training(self._pending.durable)
            self._pending.durable.result()

    # --- loading ----------------------------------------------------------------------------------------------

    def _is_of_verl(self, folder: PartFolder) -> bool:
        """True if verl's own manager has written this folder last. Raises FileNotFoundError and NotCommittedError."""
        files = folder.files_of_verl()
        if not files:
            if archive_in(folder.path) is None:
                raise NotCommittedError(f"{folder.path} has no checkpoint", path=str(folder.path), step=None)
            return False
        if not any(path.name.endswith(f"_world_size_{self.world_size}_rank_{self.rank}.pt") for path in files):
            raise FileNotFoundError(
                f"{folder.path} was written by verl's own manager on another number of ranks than {self.world_size}, "
                f"such as {files[0].name}; only archives of this one can be loaded on any number"
            )
        return True

    def _fill(self, folder: PartFolder) -> None:
        """Fill the parts in `load_contents` from the archive in a folder. Every rank calls this."""
        facts = meet(lambda: self._facts(folder))[0]
        is_same_world = facts["world_size"] == self.world_size
        only_adapters = bool(facts["lora_only"])
        live: dict[str, Any] = {}
        if self.should_load_model:
            live["model"] = fsdp_state.weights_of(self.model, only_adapters=only_adapters)
        if self.should_load_optimizer:
            live["optimizer"] = fsdp1_state.optimizer_to_fill(self.model, self.optimizer)
        if self.should_load_extra:
            if is_same_world:
                live["rng"] = RngState("verl")
            if self.lr_scheduler is not None and facts["has_scheduler"]:
                live["lr_scheduler"] = self.lr_scheduler
        if live:
            meet(lambda: restore(live, folder.archive, select=tuple(live)))
        if self.should_load_model:
            fsdp_state.take_back(self.model, live["model"], only_adapters=only_adapters)
        if self.should_load_optimizer:
            fsdp1_state.take_back_optimizer(self.model, self.optimizer, live["optimizer"])
        meet(lambda: None)  # like verl's own manager, return when all ranks have loaded

    def _facts(self, folder: PartFolder) -> dict[str, Any]:
        """The facts of an archive. Raises ValueError if it lacks an item of `load_contents`."""
        facts: dict[str, Any] = load(folder.archive, select=_FACTS)[_FACTS]
        for name in _CONTENTS:
            if name in self.checkpoint_load_contents and name not in facts["contents"]:
                raise ValueError(
                    f"{folder.path} has only {', '.join(facts['contents'])}, but load_contents also names {name}"
                )
        return facts
