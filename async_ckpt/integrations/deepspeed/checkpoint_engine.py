"""`use`: make DeepSpeed's engine write its checkpoints in the background.

In: the calls of `engine.save_checkpoint` and `engine.load_checkpoint`, on all ranks. Out: the same files, written in
the background; errors on all ranks. Knows nothing of: the content of the files.

DeepSpeed passes one file after the other to its checkpoint engine. They are collected, and copied together when the
last one is known: one snapshot. Our engine claims to be decoupled, so that DeepSpeed leaves `latest` to it; but it
never reports a pending commit, for which DeepSpeed would hold each step of the optimizer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Literal

import torch

from ... import SaveHandle, SaveReport, save, wrap
from ...errors import NotCommittedError
from ...plumbing import disk, file_digests, places, rendezvous, timing, waits, write_by_torch
from ..common.event_history import HistoryEntry, note_closed
from ..common.folders import hold_for, latest_in, let_go
from ..common.framework_checks import name_in, require, require_names
from ..common.joint_errors import meet
from ..common.save_queue import SaveQueue
from ..common.small_files import room_for
from ..common.sound_folders import check
from ..common.training_archive import archives_in, below
from . import zero_archive
from .tag_folder import LATEST, StoredFolder, TagFolder
from .zero_guard import ZeroGuard

_ENGINES: Final = "deepspeed.runtime.checkpoint_engine"
CheckpointEngine: Any = name_in(f"{_ENGINES}.checkpoint_engine", "CheckpointEngine")
TorchCheckpointEngine: Any = name_in(f"{_ENGINES}.torch_checkpoint_engine", "TorchCheckpointEngine")
Layout = Literal["deepspeed", "archive"]

_ADVICE: Final = "call save_checkpoint on every rank"
# The methods of the engine that are called or replaced here.
_USED: Final = (
    "save_checkpoint", "load_checkpoint", "checkpoint_engine", "zero_nvme_offload_optimizer",
    "use_node_local_storage", "global_steps", "global_rank", "zero_optimization_stage", "destroy",
)  # fmt: skip


def use(engine: Any, layout: Layout = "deepspeed") -> DeepSpeedCheckpoints:
    """Make an engine of DeepSpeed write its checkpoints in the background. Every rank calls this.

        engine, *_ = deepspeed.initialize(model=model, config=config)
        checkpoints = async_ckpt.integrations.deepspeed.use(engine)
        engine.save_checkpoint("runs/ds")  # as before, but returns at once
        checkpoints.wait()  # the last line: raises the error of a failed save

    `layout="deepspeed"` writes DeepSpeed's files, under their names and in their formats. `layout="archive"` writes
    verified archives of full parameters, from which any number of ranks can resume, and which may be at a URL; plain
    DeepSpeed does not load them. With either layout, the folders of both can be loaded.

    Raises ImportError without DeepSpeed, RuntimeError if its version lacks a name that is used here, ValueError for
    another layout, a second call, or an engine whose config names another writer of checkpoints, and
    NotImplementedError for optimizers offloaded to NVMe, ZenFlow, checkpoints in a separate folder on each node, and,
    with `layout="archive"`, for engines without ZeRO, with model parallelism or with experts.
    """
    return DeepSpeedCheckpoints(checked(engine, layout), layout)


def checked(engine: Any, layout: Layout) -> Any:
    """The engine. Raises the errors of `use`."""
    package = require("deepspeed")
    require_names(package, engine, _USED)
    if layout not in ("deepspeed", "archive"):
        raise ValueError(f'layout must be "deepspeed" or "archive", got {layout!r}')
    if isinstance(engine.checkpoint_engine, DeepSpeedCheckpoints):
        raise ValueError("this engine saves in the background already; call use() once")
    _refuse(engine)
    if layout == "archive":
        zero_archive.refuse(engine)
    return engine


def _refuse(engine: Any) -> None:
    """Raise for an engine that is not supported."""
    if type(engine.checkpoint_engine) is not TorchCheckpointEngine:
        raise ValueError(
            f"the engine's config makes {type(engine.checkpoint_engine).__name__} save; remove that from the config"
        )
    if engine.zero_nvme_offload_optimizer():
        raise NotImplementedError("an optimizer that is offloaded to NVMe is not supported; use plain DeepSpeed there")
    if engine.use_node_local_storage():
        raise NotImplementedError("all ranks must save into one folder: set use_node_local_storage to false")
    if getattr(engine, "zenflow", False):
        raise NotImplementedError("ZenFlow updates asynchronously, and is not supported; use plain DeepSpeed there")


class DeepSpeedCheckpoints(CheckpointEngine):  # type: ignore[misc]
    """The checkpoints of one engine of DeepSpeed, as its checkpoint engine. Created by `use`; see there.

    Plain DeepSpeed can load the checkpoints. A folder appears when the files of all ranks are durable, and then
    `latest` names it. One save is under way at a time: the next save, `engine.load_checkpoint`, `wait`,
    `engine.destroy` and the exit of the interpreter wait for it. The first three raise its error on every rank.

    With `is_part`, the folders are parts of a trainer's checkpoints: they have neither a lock nor a history.
    """

    def __init__(self, engine: Any, layout: Layout, *, is_part: bool = False) -> None:
        super().__init__()
        self.is_part = is_part
        self.name = "async_ckpt"
        self._engine, self._layout, self._guard = engine, layout, ZeroGuard()
        self._plain = SimpleNamespace(
            engine=engine.checkpoint_engine, save=engine.save_checkpoint, load=engine.load_checkpoint
        )
        self._files: dict[str, Any] | None = None  # while DeepSpeed names the files of a save
        self._saves = SaveQueue("deepspeed")
        self._folder: TagFolder | StoredFolder | None = None  # the last save's, until the ranks meet again
        self.ended: Future[None] | None = None  # done when the files of all ranks of the newest save are durable
        engine.checkpoint_engine = self
        engine.save_checkpoint, engine.load_checkpoint = self.save_checkpoint, self.load_checkpoint

    # --- what users call --------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: places.Anywhere,
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Replaces the engine's method: copy everything, and write it in the background. Every rank calls this.

        Raises the error of the previous save, and then saves nothing; RunTakenError while another process saves to the
        folder; ValueError for a URL, unless `layout="archive"`; and, on all ranks, an error of the copy on any rank.
        """
        began, engine = timing.monotonic(), self._engine
        folder = self._folder_of(save_dir, tag, save_latest)
        handle: SaveHandle | None = None

        def begin() -> None:
            nonlocal handle
            handle = self._begin_archive(folder, rests) if self._layout == "archive" else self._begin(folder, files)

        try:
            folder.enter(self._synchronize_after_last(partial(self._make, folder))[0])
            files: dict[str, Any] = {}
            rests: list[bytes] = []
            if self._layout == "archive":
                rests = meet(partial(zero_archive.rest_of, engine, client_state or {}))
            else:
                files = self._collect(folder, client_state or {}, save_latest, exclude_frozen_parameters)
            meet(begin)
            call = rendezvous.Channel.of_group("deepspeed", _ADVICE, is_of_paths=True).call(path=str(folder.target))
        except BaseException:
            if handle is not None:
                waits.wait_for(handle)
                handle.exception()  # this save has failed, even if its part was written
            with suppress(Exception):  # another rank may be writing to it: removed at the next meeting
                folder.remove()
            raise
        finally:
            self._folder = folder
        entry = HistoryEntry(
            folder.save_dir, folder.tag, engine.global_steps, world_size=torch.distributed.get_world_size()
        )
        self.ended = self._saves.add(
            folder.target,
            [] if handle is None else [handle],
            partial(folder.done, call),
            step=engine.global_steps,
            held_seconds=timing.monotonic() - began,
            failed=call.fail,
            entry=entry if engine.global_rank == 0 and not self.is_part else None,
        )
        return True

    def load_checkpoint(
        self,
        load_dir: places.Anywhere,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> Any:
        """Replaces the engine's method: wait for the save under way, and load as DeepSpeed does. Every rank calls this.

        Raises the error of that save, CorruptCheckpointError if DeepSpeed's files have changed since the save,
        NotCommittedError for a URL without archives, and for archives the errors of `AsyncCheckpointer.restore`.
        """
        self.wait()
        place = places.place_of(load_dir)
        named = latest_in(place, LATEST) if tag is None else str(tag)
        found = None if named is None else archives_in(below(place, named))
        if found is None and not place.is_local:
            if named is None:
                return None, None  # like DeepSpeed without `latest`
            where = f"{place.shown.rstrip('/')}/{named}"
            raise NotCommittedError(
                f"{where} has no archive; DeepSpeed's own files are loaded from a local folder only",
                path=where,
                step=None,
            )
        if found is None:
            folder = places.local_place(place)
            if named is not None and not self.is_part:  # for a part, the trainer checks its whole checkpoint
                check(folder / named)
            return self._plain.load(
                str(folder),
                tag,
                load_module_strict=load_module_strict,
                load_optimizer_states=load_optimizer_states,
                load_lr_scheduler_states=load_lr_scheduler_states,
                load_module_only=load_module_only,
                custom_load_fn=custom_load_fn,
            )
        if custom_load_fn is not None:
            raise ValueError("custom_load_fn is for DeepSpeed's own files, but this is an archive; leave it out")
        zero_archive.refuse(self._engine)
        client_state = zero_archive.fill(
            self._engine,
            *found,
            optimizer=load_optimizer_states,
            scheduler=load_lr_scheduler_states,
            only=load_module_only,
        )
        return found[0].shown, client_state

    def wait(self) -> None:
        """Wait until the save under way is durable on all ranks. Every rank calls this. Raises the error of the save.

        checkpoints.wait()  # the last line of a script
        """
        self._synchronize_after_last()

    def reports(self) -> list[SaveReport]:
        """The reports of this rank's parts of the saves that have ended since the last call.

        for report in checkpoints.reports(): wandb.log(report.as_dict("async_ckpt/"), step=report.step)
        """
        return self._saves.take_reports()

    # --- what trainers call -----------------------------------------------------------------------------------

    def guards(self) -> list[Any]:
        """The guards for a snapshot taken now."""
        return self._guard(self._engine)

    def finish(self) -> Exception | None:
        """Wait for this rank's part of the save under way. Returns its error. A single rank may call this."""
        try:
            with self._removing_last():
                self._saves.finish()
        except Exception as error:
            return error
        finally:
            self._saves.take_reports()  # the trainer makes its own report
        return None

    # --- what DeepSpeed calls ---------------------------------------------------------------------------------

    def create(self, info: Any) -> None:
        """Do nothing: `save_checkpoint` has created the folder."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Create a folder, unless it is that of a save, which appears when it is durable."""
        if self._files is None:
            self._plain.engine.makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        """During a save, collect a file. Otherwise, for example for an inference model, write it."""
        if self._files is None:
            self._plain.engine.save(state_dict, path)
        else:
            self._files[path] = state_dict

    def load(self, path: str, map_location: Any = None) -> Any:
        return self._plain.engine.load(path, map_location=map_location)

    def commit(self, info: Any) -> bool:  # noqa: ARG002
        return True

    def is_decoupled(self) -> bool:
        """True, so that DeepSpeed does not write `latest`, and calls `cleanup` at the end."""
        return True

    def get_commit_info(self) -> None:
        """None: no step has to wait for a commit."""

    def cleanup(self) -> None:
        """Wait for this rank's part of the save under way, at the end of the engine. Raises its error."""
        last = self._folder
        try:
            with self._removing_last():
                self._saves.finish()
        finally:
            if last is not None and self._engine.global_rank == 0 and not self.is_part:
                note_closed(last.save_dir)
            let_go(self)

    # --- parts ------------------------------------------------------------------------------------------------

    def _synchronize_after_last(self, then: Callable[[], Any] = lambda: None) -> list[Any]:
        """Wait for the previous save on all ranks, and then call `then`. An error of any rank is raised on all."""
        with self._removing_last():
            return self._saves.meet(then)

    @contextmanager
    def _removing_last(self) -> Iterator[None]:
        """Remove a failed save's folder after the block, in which ranks meet. Before, others may write to it."""
        folder, self._folder = self._folder, None
        try:
            yield
        finally:
            if folder is not None:
                with suppress(Exception):  # a later save will remove it
                    folder.remove()

    def _folder_of(self, save_dir: places.Anywhere, tag: Any, save_latest: bool) -> TagFolder | StoredFolder:
        if not save_dir:
            raise ValueError(f"save_dir must be a non-empty string, got {save_dir!r}")
        engine, place = self._engine, places.written_at(save_dir)
        tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
        rank, world_size = engine.global_rank, torch.distributed.get_world_size()
        if not place.is_local and self._layout == "archive":
            return StoredFolder(place, tag, save_latest=save_latest, world_size=world_size)
        path = places.local_place(
            place, 'DeepSpeed\'s own files need a folder; to save to a URL, call use(engine, layout="archive")'
        )
        return TagFolder(path, tag, save_latest=save_latest, rank=rank, world_size=world_size)

    def _make(self, folder: TagFolder | StoredFolder) -> str | None:
        """On rank 0, lock the folder for this process, and create the hidden folder of a save."""
        if isinstance(folder, TagFolder) and self._engine.global_rank == 0 and not self.is_part:
            hold_for(self, folder.save_dir)
        return folder.make()

    def _collect(self, folder: Any, client_state: Any, save_latest: bool, no_frozen: bool) -> dict[str, Any]:
        """The files that DeepSpeed writes on this rank, by name, with their live content."""
        self._files = {}
        try:
            self._plain.save(
                str(folder.save_dir),
                tag=folder.tag,
                client_state=client_state,
                save_latest=save_latest,
                exclude_frozen_parameters=no_frozen,
            )
            return {os.path.basename(path): content for path, content in self._files.items()}
        finally:
            self._files = None

    def _begin(self, folder: Any, files: dict[str, Any]) -> SaveHandle | None:
        """Copy the content of this rank's files, and begin to write them."""
        if not files:
            return None
        write: Callable[..., SaveHandle] = wrap(
            _write_files, destination="folder", guard=self._guard(self._engine) or None
        )
        in_zip = bool(self._plain.engine.zipfile_serialization)
        return write(files, in_zip, self._engine.global_rank, str(folder.of_rank))

    def _begin_archive(self, folder: Any, rests: list[bytes]) -> SaveHandle:
        """Copy this rank's slices, and begin to write its archive. All ranks have the same `rests`, one of each."""
        engine = self._engine
        tensors = zero_archive.tensors_of(engine)
        guard = self._guard(engine, zero_archive.parts_of(tensors))
        return save({**tensors, zero_archive.RESTS: rests}, folder.archive, guard=guard or None)


def _write_files(files: Mapping[str, Any], in_zip: bool, rank: int, folder: str) -> None:
    """Write the files of one rank. Runs in the background."""
    with disk.translated(Path(folder)):
        os.makedirs(folder, exist_ok=True)
    with room_for([*files.values()], folder):
        for name, content in files.items():
            write_by_torch(content, Path(folder, name), in_zip=in_zip)
    file_digests.note_digests(folder, rank=rank)
