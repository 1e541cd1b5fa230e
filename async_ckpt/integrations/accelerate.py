"""`AsyncState`: the `save_state` and `load_state` of an Accelerator, with folders that are written in the background.

In: an Accelerator. Out: folders, each visible once it is durable as a whole; objects filled from them. Knows nothing
of: the training loop.

A save has two halves. The call copies everything that the Accelerator has prepared to one snapshot. In the background,
the folder is written from the snapshot.
"""

from __future__ import annotations

import logging
import math
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, Literal, Self

from .. import SaveHandle, load, snapshot
from ..errors import StateMismatchError
from ..plumbing import places, runs, timing, write_by_torch
from .common.event_history import HistoryEntry
from .common.folder_saves import FolderSave, FolderSaves, noted_on
from .common.framework_checks import name_in, require, require_names
from .common.fsdp1_state import optimizer_of, optimizer_to_fill, take_back, take_back_optimizer, weights_of
from .common.fsdp_files import kind_for, refuse, sharded_parts
from .common.joint_errors import meet
from .common.loader_order import ORDER, order_file, warn_of_order
from .common.run_folders import LocalRun, StoredRun, number_of
from .common.small_files import write_files, written_by
from .common.sound_folders import sound_folder
from .common.training_archive import TrainingArchive, archive_in, num_items_in
from .dcp import restore

checkpointing: Any = name_in("accelerate", "checkpointing")
data_loader: Any = name_in("accelerate", "data_loader")
utils: Any = name_in("accelerate", "utils")
Layout = Literal["archive", "accelerate"]

_USED: Final = (
    "_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects", "_save_model_state_pre_hook",
    "_load_model_state_pre_hook", "get_state_dict", "project_configuration", "step",
)  # fmt: skip


# The prefixes of accelerate's small files, and the names of the objects in its other files.
_FILES: Final = ("scheduler", "sampler", "scaler")
_KINDS: Final = {"models": "model", "optimizers": "optimizer", "custom": "registered object"}
_log = logging.getLogger("async_ckpt")


class AsyncState:
    """Saves and loads everything that an Accelerator has prepared, and all objects registered with it.

        checkpoints = AsyncState(accelerator)
        checkpoints.save_state("out/step-100")  # in place of accelerator.save_state
        checkpoints.load_state("out/step-100")

    A folder appears once it is durable as a whole. One save is under way at a time: the next save, `wait`, and the end
    of a `with` block wait for it, and raise its error. The exit of the interpreter waits, too.

    With `automatic_checkpoint_naming`, the Accelerator names the folders. When a newer one is durable, the folders
    beyond the Accelerator's `total_limit` are deleted.

    Args:
        accelerator: it must have prepared everything before the first save.
        layout: "archive" writes one verified archive that any number of ranks can load; "accelerate" writes the files
            that `accelerator.load_state` reads. With either, folders of both layouts, and of accelerate, can be loaded.

    Raises ImportError without accelerate, NotImplementedError for Megatron-LM and XLA, for DeepSpeed with
    archives, and for FSDP1 with hybrid sharding or LOCAL_STATE_DICT, and ValueError for another layout.
    """

    def __init__(self, accelerator: Any, layout: Layout = "archive") -> None:
        require_names(require("accelerate"), accelerator, _USED)
        if layout not in ("archive", "accelerate"):
            raise ValueError(f'layout must be "archive" or "accelerate", got {layout!r}')
        kind = accelerator.distributed_type
        self._is_deepspeed = kind == utils.DistributedType.DEEPSPEED
        if self._is_deepspeed and layout == "archive":
            raise NotImplementedError('layout="archive" is not supported under DeepSpeed; pass layout="accelerate"')
        if kind in (utils.DistributedType.MEGATRON_LM, utils.DistributedType.XLA):
            raise NotImplementedError(f"AsyncState does not support {kind.value}; use accelerator.save_state")
        plugin = getattr(accelerator.state, "fsdp_plugin", None)
        self._is_sharded = plugin is not None
        if plugin is not None:
            refuse(plugin)
        self._accelerator, self._layout = accelerator, layout
        self._saves = FolderSaves("accelerate")

    # --- saving -----------------------------------------------------------------------------------------------

    def save_state(self, output_dir: str | os.PathLike[str] | None = None) -> SaveHandle | None:
        """Save to a folder, by default to the project's next one. Every rank calls this.

        Returns when training may continue: a handle, or None on a rank that writes nothing. Raises the error of the
        previous save, and ValueError for a URL, or if the project's next folder exists.
        """
        began = timing.monotonic()
        folder = self._next_folder() if output_dir is None or self._is_named else places.local_place(output_dir)
        save: FolderSave | None = None

        def take() -> dict[str, bytes]:
            """Take this rank's snapshot. Returns its small files, by name."""
            nonlocal save
            accelerator = self._accelerator
            models = [accelerator.get_state_dict(model, unwrap=False) for model in self._plain_models]
            files = written_by(lambda folder: self._write_small_files(models, folder), in_memory=True)
            files |= order_file(accelerator._dataloaders)
            if self._writes or self._is_sharded:  # under DeepSpeed, only of registered objects
                optimizers = [] if self._is_deepspeed else accelerator._optimizers
                run = self._enter(folder)
                snap = snapshot(self._parts(models), guard=self._saves.guard(optimizers) or None)
                save = FolderSave(run, folder.name, snap, began)
            return files

        # All ranks meet when the previous save has ended, since slices may be made by collectives; when each has its
        # snapshot; when the folder is ready; and when every save has begun. An error of any rank is raised on all. If
        # several ranks have files of the same name, the first rank's file counts.
        meet(self._settle)
        of_ranks = meet(take)
        files = {name: data for files in reversed(of_ranks) for name, data in files.items()}
        self._accelerator.project_configuration.iteration += 1
        meet(lambda: self._begin_folder(folder))
        of_engine = self._files_of_engine(folder.name) if self._is_deepspeed else None
        meet(lambda: self._begin(save, files, folder, of_engine))
        return None if save is None else save.handle

    def wait(self) -> None:
        """Wait until the save that is under way is durable. Every rank calls this. Raises the error of the save, or
        PeerFailedError if it failed on another rank. To wait on a single rank, use the handle.
        """
        try:
            meet(self._settle)
        finally:
            self._clear()

    def _enter(self, folder: Path) -> LocalRun | StoredRun:
        """The run of a checkpoint's folder. In the project's run, leftovers of killed trainings are removed."""
        return self._saves.enter(LocalRun(folder.parent), writes=self._writes, clear=self._is_named)

    def _begin_folder(self, folder: Path) -> None:
        """Remove archives that no rank reads any more; before the first save, also leftovers. No rank writes now."""
        run = self._enter(folder)
        if self._writes:
            run.begin(folder.name)

    def _clear(self) -> None:
        """Remove everything except checkpoints. No save is under way, and no rank reads an archive any more."""
        if self._writes and self._saves.run is not None:
            self._saves.run.end()

    def _files_of_engine(self, name: str) -> TrainingArchive:
        """Begin to write the files of DeepSpeed's engine. Every rank calls this."""
        from .deepspeed.trainer_files import begin_files  # it imports DeepSpeed

        return begin_files(self._saves, self._accelerator._models[0], name, utils.MODEL_NAME)

    def _settle(self) -> None:
        done = self._saves.wait()
        if done is None:
            return
        self._accelerator.log({key: value for key, value in done.figures().items() if math.isfinite(value)})
        if self._writes and self._is_named:
            limit = self._accelerator.project_configuration.total_limit
            done.run.retire(done.name, None if limit is None else max(limit, 1), None)

    def _parts(self, models: list[Any]) -> dict[str, Any]:
        """The state to copy, in the structure of an archive. `models` has full state dicts."""
        accelerator = self._accelerator
        parts = {"optimizers": accelerator._optimizers, "custom": accelerator._custom_objects}
        if self._layout == "archive":
            optimizers = [optimizer_of(*pair) for pair in self._pairs()]
            models = [*map(weights_of, accelerator._models)]
            return {**parts, "models": models, "optimizers": optimizers}
        if self._is_deepspeed:
            return {"custom": accelerator._custom_objects}
        if not self._is_sharded:
            return {"models": models, **parts}
        optimizer, kind = next(iter(accelerator._optimizers), None), kind_for(accelerator.state.fsdp_plugin)
        return {**sharded_parts(accelerator._models[0], optimizer, kind), "custom": accelerator._custom_objects}

    def _pairs(self) -> list[tuple[Any, Any]]:
        """Pairs of each model and the optimizer with the same number, without accelerate's wrapper."""
        accelerator = self._accelerator
        optimizers = [getattr(optimizer, "optimizer", optimizer) for optimizer in accelerator._optimizers]
        return [
            (model, optimizer)
            for model, optimizer in zip_longest(accelerator._models, optimizers)
            if optimizer is not None
        ]

    def _archived(self, parts: Iterable[str]) -> tuple[type[TrainingArchive] | None, list[str]]:
        """The kind of archive, if there is one, and its parts: all parts, or only those that are sharded."""
        if self._layout == "archive":
            return TrainingArchive, [*parts]
        if not self._is_sharded:
            return None, []
        return kind_for(self._accelerator.state.fsdp_plugin), [part for part in parts if part != "custom"]

    def _begin(
        self, save: FolderSave | None, files: dict[str, bytes], folder: Path, archive: TrainingArchive | None
    ) -> None:
        """Begin to write this rank's part of a save. `archive` is the one that is being written already."""
        if save is None:
            return
        with save.snap as snap:
            kind, names = self._archived(snap.keys())
            in_archive, in_files = {name: snap[name] for name in names}, {n: snap[n] for n in snap.keys() - {*names}}
            if self._layout == "archive":
                in_archive, files = {**in_archive, "files": files}, {}
            if kind is not None:
                archive = save.begin_archive(in_archive, kind)
            if self._writes:
                save.begin_folder(in_files, partial(_write_parts, files), archive)
        # The history goes beside `checkpoints`, since accelerate takes every name in there for a checkpoint.
        beside = folder.parent.parent if self._is_named else folder.parent
        number = runs.parse_step_name(folder.name)
        step = self._accelerator.project_configuration.iteration - 1 if number is None else number.step
        entry = HistoryEntry(beside, folder.relative_to(beside).as_posix(), step)
        self._saves.begun(save, entry if self._writes else None)

    def _write_small_files(self, models: list[Any], folder: str) -> None:
        """Write the files of hooks, schedulers, samplers, the scaler and this rank's random states."""
        accelerator = self._accelerator
        for hook in accelerator._save_model_state_pre_hook.values():
            hook(accelerator._models, models, folder)
        checkpointing.save_accelerator_state(
            folder,
            [],
            [],
            self._own_schedulers,
            accelerator._dataloaders,
            accelerator.process_index,
            accelerator.step,
            accelerator.scaler,
        )

    def _next_folder(self) -> Path:
        if not self._is_named:
            raise ValueError("give the folder to save to, or set automatic_checkpoint_naming")
        folder = self._project / f"checkpoint_{self._accelerator.save_iteration}"
        if folder.exists():
            raise ValueError(f"{folder} exists; set the iteration of the project's configuration to the next number")
        return folder

    @property
    def _is_named(self) -> bool:
        return bool(self._accelerator.project_configuration.automatic_checkpoint_naming)

    @property
    def _project(self) -> Path:
        if self._accelerator.project_dir is None:
            raise ValueError("automatic_checkpoint_naming needs a folder; set project_dir")
        return Path(self._accelerator.project_dir, "checkpoints").absolute()

    @property
    def _plain_models(self) -> list[Any]:
        """The models whose weights this process writes as a whole; none under FSDP and DeepSpeed."""
        return [] if self._is_sharded or self._is_deepspeed else list(self._accelerator._models)

    @property
    def _own_schedulers(self) -> list[Any]:
        """The schedulers that the engine of DeepSpeed does not save."""
        schedulers = self._accelerator._schedulers
        return [one for one in schedulers if type(one).__name__ != "DeepSpeedSchedulerWrapper"]

    @property
    def _writes(self) -> bool:
        accelerator = self._accelerator
        if accelerator.project_configuration.save_on_each_node:
            return bool(accelerator.is_local_main_process)
        return bool(accelerator.is_main_process)

    # --- loading ----------------------------------------------------------------------------------------------

    def load_state(self, input_dir: str | os.PathLike[str] | None = None, **options: Any) -> None:
        """Load everything from a folder, by default from the project's newest one; the next save continues its number.

        Every rank calls this. For a folder of accelerate, this calls `accelerator.load_state` with these options.
        Raises FileNotFoundError if there is no folder. Before anything is overwritten, raises CorruptCheckpointError if
        files have changed since the save, and StateMismatchError if the folder lacks a prepared or registered object,
        or has more registered objects. By default, folders of the project whose files have changed are skipped, with a
        warning.
        """
        self.wait()
        folder: Any = None if input_dir is None else places.local_place(input_dir)
        if input_dir is None and self._is_named:
            folder = next(iter(LocalRun(self._project).newest_first()), None)
            if folder is not None:
                self._accelerator.project_configuration.iteration = number_of(Path(folder)) + 1
        if folder is None or not Path(folder).is_dir():
            raise FileNotFoundError(f"there is no checkpoint to load at {folder or self._accelerator.project_dir}")
        newest_first = LocalRun(Path(folder).parent).newest_first
        with sound_folder(True if input_dir is None else str(folder), newest_first) as sound:
            archive = archive_in(sound)
            if archive is not None:
                self._load_archive(archive)
            else:
                meet(lambda: self._compare(Path(sound), self._numbers_in(sound), os.listdir(sound)))
                for pair in self._pairs():
                    optimizer_to_fill(*pair)  # for FSDP1, accelerate loads only into existing state
                order = Path(sound, ORDER)
                files = {ORDER: order.read_bytes()} if order.is_file() else {}
                warn_of_order(files, self._accelerator._dataloaders, sound)
                self._accelerator.load_state(sound, **options)

    def _numbers_in(self, folder: str | os.PathLike[str]) -> dict[str, int]:
        """The numbers of objects in a folder of accelerate, without those that FSDP and DeepSpeed name otherwise."""
        names = os.listdir(folder)
        numbers = {"custom": sum(re.fullmatch(r"custom_checkpoint_\d+\.pkl", name) is not None for name in names)}
        if not self._is_sharded and not self._is_deepspeed:
            models = (re.fullmatch(r"(?:pytorch_)?model(_\d+)?\.(?:safetensors|bin)", name) for name in names)
            numbers["models"] = len({found[1] for found in models if found})
            numbers["optimizers"] = sum(re.fullmatch(r"optimizer(_\d+)?\.bin", name) is not None for name in names)
        return numbers

    def _compare(self, folder: Path, saved: Mapping[str, int], files: Iterable[str]) -> None:
        """Refuse a checkpoint that lacks a prepared object, or has more registered objects; accelerate refuses it only
        after it has loaded the rest. Other objects without a prepared counterpart are logged and ignored.

        `saved` has the numbers of models, optimizers and registered objects.
        """
        accelerator = self._accelerator
        live = {"custom": accelerator._custom_objects}
        if not accelerator._load_model_state_pre_hook:  # a hook may take objects from these lists
            live |= {"models": accelerator._models, "optimizers": accelerator._optimizers}
        numbers = {name: (len(objects), saved[name]) for name, objects in live.items() if name in saved}
        needed = self._files_to_load()
        beside = {name for name in files if name.startswith(_FILES)} - needed
        missing = [_object(name, i) for name, (here, there) in numbers.items() for i in range(there, here)]
        unexpected = [_object("custom", i) for i in range(*numbers.get("custom", (0, 0)))]
        missing += sorted(needed - {*files})
        if missing or unexpected:
            lines = [f"missing in the checkpoint: {name}" for name in missing]
            lines += [f"unexpected in the checkpoint: {name}" for name in unexpected]
            raise StateMismatchError(
                f"{folder} does not have the objects that the Accelerator has; prepare and register those that were "
                "saved; nothing was overwritten:\n  " + "\n  ".join(lines),
                missing=tuple(missing),
                unexpected=tuple(unexpected),
            )
        beside |= {_object(name, i) for name, (here, there) in numbers.items() for i in range(here, there)}
        if beside:
            _log.warning(
                "async_ckpt: %s also has %s, which the Accelerator has not prepared; it is not loaded",
                folder,
                ", ".join(sorted(beside)),
            )

    def _files_to_load(self) -> set[str]:
        """The names of the small files that accelerate needs for the objects prepared now."""
        accelerator = self._accelerator
        loaders = [
            i
            for i, loader in enumerate(accelerator._dataloaders)
            if isinstance(loader.dataset, data_loader.IterableDatasetShard)
            and isinstance(loader.get_sampler(), data_loader.SeedableRandomSampler)
        ]
        names = {_numbered("", "scheduler", i, "bin") for i in range(len(self._own_schedulers))}
        names |= {_numbered("", "sampler", i, "bin") for i in loaders}
        return names if accelerator.scaler is None else {*names, "scaler.pt"}

    def _load_archive(self, archive: Path) -> None:
        accelerator = self._accelerator
        models, optimizers = accelerator._models, [optimizer_to_fill(*pair) for pair in self._pairs()]
        weights = [*map(weights_of, models)]
        live = {"models": weights, "optimizers": optimizers, "custom": accelerator._custom_objects}
        live = {name: objects for name, objects in live.items() if objects}
        files: dict[str, bytes] = {}

        def compare() -> None:
            files.update(load(archive, select="files")["files"])
            self._compare(archive.parent, num_items_in(archive), files)

        meet(compare)
        warn_of_order(files, accelerator._dataloaders, str(archive.parent))
        if live:
            restore(live, archive, select=tuple(live))
        for model, filled in zip(models, weights, strict=True):
            take_back(model, filled)
        for pair, state in zip(self._pairs(), optimizers, strict=True):
            take_back_optimizer(*pair, state)
        with tempfile.TemporaryDirectory() as folder:
            write_files(files, folder)
            for hook in accelerator._load_model_state_pre_hook.values():
                hook([], folder)
            overrides = checkpointing.load_accelerator_state(
                folder,
                [],
                [],
                accelerator._schedulers,
                accelerator._dataloaders,
                accelerator.process_index,
                accelerator.scaler,
            )
        accelerator.step = overrides.get("step", accelerator.step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if error is None:
            self.wait()
            return
        with noted_on(error):
            self._settle()
        if not self._is_sharded and not self._is_deepspeed:  # otherwise other ranks may still use the archive
            self._clear()


def _write_parts(files: dict[str, bytes], parts: Any, folder: str) -> None:
    """Write accelerate's files. Runs in the background."""
    write_files(files, folder)
    for number, weights in enumerate(parts.get("models", ())):
        utils.save(weights, _numbered(folder, "model", number, "safetensors"), safe_serialization=True)
    for number, state in enumerate(parts.get("optimizers", ())):
        write_by_torch(state, Path(_numbered(folder, "optimizer", number, "bin")))
    for number, state in enumerate(parts.get("custom", ())):
        write_by_torch(state, Path(folder, f"custom_checkpoint_{number}.pkl"))


def _object(kind: str, number: int) -> str:
    return f"{_KINDS[kind]} {number}"


def _numbered(folder: str, name: str, number: int, ending: str) -> str:
    return os.path.join(folder, f"{name}_{number}.{ending}" if number else f"{name}.{ending}")
