"""`CheckpointManager`: torchtitan's trainer writes its checkpoints in the background.

In: the states that the trainer passes to its checkpoint manager. Out: a run with the steps `step-<N>`; states filled
from it, or from checkpoints of torchtitan's own manager. Knows nothing of: how a step is written and read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch

from .. import AsyncCheckpointer, Naming, PerRank, SaveHandle, export_hf, load
from ..errors import StateMismatchError
from ..plumbing import places, runs, sharded, worlds
from .common.framework_checks import require, require_names
from .common.joint_errors import meet
from .common.step_guard import StepGuard
from .common.training_archive import refuse_missing
from .dcp import restore

_torchtitan: Final = require("torchtitan")
try:
    _base: Final[Any] = import_module("torchtitan.components.checkpointer.base")
    _filesystem: Final[Any] = import_module("torchtitan.tools.filesystem")
    _log: Final[Any] = import_module("torchtitan.tools.logging").logger
    _DTYPES: Final[Mapping[str, torch.dtype]] = import_module("torchtitan.config").TORCH_DTYPE_MAP
except ModuleNotFoundError as error:
    raise ImportError(f"this needs torchtitan 0.3, and {error.name} is missing in the installed one") from error
require_names(_torchtitan, _base, ["BaseCheckpointManager", "ModelWrapper", "MODEL", "OPTIMIZER", "LR_SCHEDULER"])
require_names(_torchtitan, _base, ["DATALOADER", "TRAIN_STATE"])
require_names(_torchtitan, _base.BaseCheckpointManager, ["Config", "save", "load", "close", "maybe_wait_for_saving"])
require_names(_torchtitan, _filesystem, ["join"])

_STEP: Final = "step-{}"
_NUMBERED: Final = re.compile(r"step-(\d+)")
# States that are separate on each rank.
_OF_EACH_RANK: Final = (_base.DATALOADER, _base.TRAIN_STATE)


class CheckpointManager(_base.BaseCheckpointManager):  # type: ignore[misc]
    """A checkpoint manager for torchtitan's trainer, with the fields of its `BaseCheckpointManager.Config`.

        config.checkpoint = CheckpointManager.Config(enable=True, interval=500)

    The checkpoints are the steps of a run at `folder`, which may be a URL. `save` copies the state and returns. One
    save is under way at a time: the next save, the last step, `close` and the interpreter's exit wait for it. The first
    three raise its error, on every rank. `load` also reads checkpoints of torchtitan's own manager.

    `checkpointer` is the `AsyncCheckpointer` of the run; None if the manager is disabled.

    The constructor raises ValueError for `last_save_in_hf` without an adapter, and for an unknown name in
    `exclude_from_loading`. A save raises RunTakenError if another training writes to the folder.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_base.BaseCheckpointManager.Config):  # type: ignore[misc]
        """The configuration: only torchtitan's own fields."""

    def __init__(
        self,
        config: Any,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable: bool = config.enable
        self.save_future: SaveHandle | None = None
        self.checkpointer: AsyncCheckpointer | None = None
        if not self.enable:
            return
        if config.last_save_in_hf and sd_adapter is None:
            raise ValueError("last_save_in_hf needs a model that has a state_dict_adapter; leave it out")
        self._config, self._adapter, self._optimizers = config, sd_adapter, optimizers
        self._model = _base.ModelWrapper(model_parts)
        states.update(
            {
                _base.MODEL: self._model,
                _base.OPTIMIZER: optimizers,
                _base.DATALOADER: dataloader,
                _base.LR_SCHEDULER: lr_schedulers,
            }
        )
        self.states = states
        if unknown := [name for name in config.exclude_from_loading if name not in states]:
            raise ValueError(f"exclude_from_loading has {unknown[0]!r}; the states are {', '.join(states)}")
        self.folder: str = _filesystem.join(base_folder, config.folder)
        self._guard = StepGuard()
        self.checkpointer = AsyncCheckpointer(
            self.folder,
            keep=config.keep_latest_k or None,
            naming=Naming(_STEP),
            # Newer steps may only be retired if the user has asked for a rollback.
            on_rollback=None if config.load_step == -1 else "retire",
        )

    # --- saving -----------------------------------------------------------------------------------------------

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._is_due(curr_step, last_step):
            return False
        self.maybe_wait_for_saving()
        if not (last_step and self._config.last_save_model_only):
            self._begin_save(self._present(), curr_step)
        elif not self._config.last_save_in_hf:
            self._begin_save({_base.MODEL: self._exported()}, curr_step)
        else:
            self._export(curr_step)
        if last_step:
            self.maybe_wait_for_saving()
        return True

    def _is_due(self, step: int, last_step: bool) -> bool:
        config = self._config
        is_first = step == 1 and config.enable_first_step_checkpoint
        return not config.load_only and (is_first or last_step or step % config.interval == 0)

    def _begin_save(self, state: dict[str, Any], step: int) -> None:
        assert self.checkpointer is not None
        self.save_future = self.checkpointer.save(
            state,
            step,
            overwrite=True,
            guard=self._guard([self._optimizers]) or None,
            per_rank=[name for name in _OF_EACH_RANK if name in state],
        )

    def _present(self) -> dict[str, Any]:
        """The states of the training; the data loader may be None."""
        return {name: state for name, state in self.states.items() if state is not None}

    @torch.no_grad()
    def _exported(self) -> dict[str, Any]:
        """Only the weights, in the dtype `export_dtype`."""
        dtype = _DTYPES[self._config.export_dtype]
        return {
            name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for name, value in self._model.state_dict().items()
        }

    def _export(self, step: int) -> None:
        """Write the model as a Hugging Face folder. An error of any rank is raised on all of them."""
        weights = self._adapter.to_hf(self._exported())
        assets = self._adapter.hf_assets_path
        config_folder = assets if assets and _filesystem.isdir(assets) else None

        def write() -> None:
            if worlds.ranks()[0] == 0 or any(map(sharded.is_sharded, weights.values())):
                export_hf(weights, self._path(step), config_folder).result()

        meet(write)

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing: the guard makes the optimizers wait until the snapshot is complete."""

    def _wait_for_saving(self) -> None:
        assert self.save_future is not None
        future, self.save_future = self.save_future, None
        wait([future])
        report = future.result()
        _log.info(f"Saved {report}")

    def _close(self) -> None:
        """Wait for the save under way. Raises its error."""
        if self.checkpointer is not None:
            self.checkpointer.close()

    # --- loading ----------------------------------------------------------------------------------------------

    def _load(self, step: int = -1) -> bool:
        assert self.checkpointer is not None
        newest, is_own = meet(lambda: self._find(step))[0]
        if newest is None:
            return self._load_initially()
        states = {_base.MODEL: self._model} if newest == 0 else self._to_load()
        path = self._path(newest)
        if is_own:
            try:
                self._fill(
                    path,
                    states,
                    partial(self.checkpointer.restore, step=newest),
                    partial(self.checkpointer.load, newest),
                )
            except StateMismatchError as error:
                if _base.OPTIMIZER in error.missing:
                    why = f"step {newest} may have only the model, by last_save_model_only"
                    error.add_note(f"{why}; give load_step= an earlier one")
                raise
        else:
            self._fill_from(path, states)
        _log.info(f"Loaded {path}")
        return True

    def _find(self, step: int) -> tuple[int | None, bool]:
        """The step to load, or None, and True if it is a step of the run. Raises FileNotFoundError."""
        assert self.checkpointer is not None
        own, others = self.checkpointer.latest(), self._steps_of_torchtitan()
        if step == -1:
            newest = max([*others, *([] if own is None else [own])], default=None)
            return newest, newest == own
        if step in self.checkpointer.steps():
            return step, True
        if step in others:
            return step, False
        raise FileNotFoundError(f"{self.folder}: there is no {_STEP.format(step)}; change load_step")

    def _steps_of_torchtitan(self) -> list[int]:
        """The complete steps of torchtitan's own manager in the folder."""
        storage = places.storage_at(self.folder)
        numbered = ((name, _NUMBERED.fullmatch(name)) for name in storage.names(""))
        steps = {f"{name}/{runs.OF_DCP}": int(match[1]) for name, match in numbered if match}
        return sorted(steps[path] for path in storage.existing([*steps]))

    def _to_load(self) -> dict[str, Any]:
        return {name: state for name, state in self._present().items() if name not in self._config.exclude_from_loading}

    def _load_initially(self) -> bool:
        """Load from `initial_load_path`, or the model's own assets. Returns False if there is neither."""
        config, path = self._config, self._config.initial_load_path
        if config.initial_load_in_hf:
            self._load_hf(path)
            return True
        if not path:
            return False
        self._fill_from(path, {_base.MODEL: self._model} if config.initial_load_model_only else self._to_load())
        _log.info(f"Loaded {path}")
        return True

    def _fill_from(self, path: str, states: dict[str, Any]) -> None:
        """Fill these states from a checkpoint of this manager, or of torchtitan's own."""
        of_torchtitan = places.storage_at(path).exists(runs.OF_DCP)
        restore_from = partial(_restore_known if of_torchtitan else restore, path=path)
        self._fill(path, states, restore_from, partial(load, path), is_flat=of_torchtitan)

    def _fill(
        self,
        path: str,
        states: dict[str, Any],
        restore_from: Callable[[dict[str, Any]], object],
        load_from: Callable[..., Any],
        *,
        is_flat: bool = False,
    ) -> None:
        """Fill these states from a path, with one function that restores and another that loads. With `is_flat`, the
        weights are top-level entries.
        """
        refuse_missing(path, [name for name in states if not (is_flat and name == _base.MODEL)])
        own = {name: state for name, state in states.items() if name in _OF_EACH_RANK}
        values = _values_of_this_rank(own, restore_from, load_from) if own else {}
        live = {name: state for name, state in states.items() if name not in own}
        weights = self._model.state_dict() if live.pop(_base.MODEL, None) is not None else None
        if weights is not None:
            live |= weights if is_flat else {_base.MODEL: weights}
        restore_from(live)
        if weights is not None:
            self._model.load_state_dict(weights)  # for names that are not the model's own tensors
        for name, state in own.items():
            state.load_state_dict(values[name])

    def _load_hf(self, path: str | None) -> None:
        """Fill the model from a Hugging Face folder, which the adapter reads."""
        if self._adapter is None:
            raise ValueError("initial_load_in_hf needs a model that has a state_dict_adapter; leave it out")
        path = path or self._adapter.hf_assets_path
        if not path or not _filesystem.isdir(path):
            raise ValueError(f"{path}: there is no such folder; give initial_load_path, or the model's hf_assets_path")
        weights = self._adapter.to_hf(self._model.state_dict())
        reader = self._adapter.get_hf_storage_reader(path, self._config.initial_load_in_hf_quantized)
        import_module("torch.distributed.checkpoint").load(weights, storage_reader=reader)
        self._model.load_state_dict(self._adapter.from_hf(weights))
        _log.info(f"Loaded {path}")

    def _path(self, step: int) -> str:
        return str(_filesystem.join(self.folder, _STEP.format(step)))


def _restore_known(live: dict[str, Any], path: str) -> None:
    """Fill these states from a folder of torchtitan's own manager.

    As in that manager, entries that the states lack are ignored: they may belong to other stages of a pipeline.
    """
    try:
        restore(live, path)
    except StateMismatchError as error:
        if error.missing or error.mismatched:
            raise
        restore(live, path, strict=False)


def _values_of_this_rank(
    states: Mapping[str, Any], restore_from: Callable[[dict[str, Any]], object], load_from: Callable[..., Any]
) -> dict[str, Any]:
    """The saved values of states that are separate on each rank.

    If the saved ranks differ from the loading ones, or this rank has no entries, the entries of all ranks are merged:
    the data loader has an entry for each data-parallel rank. If several ranks have the same entry, the lowest rank's
    counts.
    """
    values: dict[str, Any] = {name: {} for name in states}
    try:
        restore_from(values)
        if all(values[name].keys() >= state.state_dict().keys() for name, state in states.items()):
            return values
    except StateMismatchError as error:
        if not error.mismatched:
            raise
    loaded = load_from(select=[*states])
    for name, value in loaded.items():
        merged: dict[str, Any] = {}
        for of_rank in value.values() if isinstance(value, PerRank) else [value]:
            merged = {**of_rank, **merged}
        values[name] = merged
    return values
