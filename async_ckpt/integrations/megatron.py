"""Megatron-Core's `dist_checkpointing`, with checkpoints that are archives and are written in the background.

In: sharded state dicts of all ranks. Out: an archive in the folder of each checkpoint, and state dicts filled from it,
or from the files of Megatron's own strategy. Knows nothing of: models, optimizers, the division of parts among ranks.

    <save>/latest_checkpointed_iteration.txt
    <save>/iter_0000100/metadata.json    by which Megatron recognizes a checkpoint
                       /training.tar     our archive; with several ranks, a folder of archives

In an archive, a ShardedTensor has its key as its name, and a ShardedObject, stored by torch.save, its unique key.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import pickle  # nosec B403 - for its error
import tempfile
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from .. import SaveHandle, SaveReport, inspect, load, save
from ..errors import StateMismatchError, UntrustedObjectError
from ..plumbing import locks, places, threads
from .common.folders import latest_in
from .common.framework_checks import require, require_names
from .common.joint_errors import meet
from .common.training_archive import url_in
from .dcp import restore

_core: Final = require("megatron.core")
_package: Final[Any] = import_module("megatron.core.dist_checkpointing")
_dicts: Final[Any] = import_module("megatron.core.dist_checkpointing.dict_utils")
_mapping: Final[Any] = import_module("megatron.core.dist_checkpointing.mapping")
_preprocess: Final[Any] = import_module("megatron.core.dist_checkpointing.state_dict_utils")
_serialization: Final[Any] = import_module("megatron.core.dist_checkpointing.serialization")
_strategies: Final[Any] = import_module("megatron.core.dist_checkpointing.strategies.torch")
_utils: Final[Any] = import_module("megatron.core.dist_checkpointing.utils")
_PlainSave: Any = _strategies.TorchDistSaveShardedStrategy
_PlainLoad: Any = _strategies.TorchDistLoadShardedStrategy
_SAVES: Final = ("save", "async_save")
_LOADS: Final = ("load", "load_tensors_metadata", "load_sharded_metadata")
require_names(_core, _PlainSave, _SAVES)
require_names(_core, _PlainLoad, _LOADS)
require_names(_core, _serialization, ["load_common_state_dict", "save_config", "CheckpointingConfig"])
require_names(_core, _strategies, ["get_async_strategy"])
# Megatron's methods, for its own checkpoints; `use` replaces them.
_plain: Final[dict[str, Any]] = {name: getattr(_PlainLoad, name) for name in _LOADS}
_plain_common: Final = _serialization.load_common_state_dict

TRACKER: Final = "latest_checkpointed_iteration.txt"
_ITERATION: Final = "iter_{:07d}"
_CONFIG: Final = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_COMMON: Final = "common_state"
_OF_OBJECT: Final = "/shard_"
"""The text between the key and the position in a ShardedObject's unique key."""
_RANKS: Final = "ranks"
"""The name of an entry that this module adds to the state of every rank."""


def use(*, trust: bool = False) -> None:
    """Make `megatron.core.dist_checkpointing` save and load with this library in this process. Call it on every rank.

        async_ckpt.integrations.megatron.use()
        pretrain(…)  # with --async-save as before

    From then on, Megatron's own strategies write archives, including those that a framework creates. They load archives
    as well as their earlier checkpoints. With `trust`, objects of any class are unpickled; without it, loading an
    object that Megatron has not declared safe to torch raises UntrustedObjectError.
    """
    LoadStrategy.trust = _PlainLoad.trust = trust
    for name in _SAVES:
        setattr(_PlainSave, name, getattr(SaveStrategy, name))
    for name in _LOADS:
        setattr(_PlainLoad, name, getattr(LoadStrategy, name))
    _package.load_common_state_dict = _serialization.load_common_state_dict = _common_state


def save_checkpoint(
    sharded_state_dict: dict[str, Any], save_dir: str | os.PathLike[str], iteration: int
) -> Future[SaveReport]:
    """Save a sharded state dict as an iteration, without Megatron's training loop. Every rank calls this.

        future = save_checkpoint({"model": model.sharded_state_dict(), "iteration": 100}, "runs/a", 100)

    Returns when the state is copied. Factories are applied in place, as by `dist_checkpointing.save`. The future
    resolves to this rank's report once the archives of all ranks are durable, on rank 0 once the tracker names the
    iteration. If any rank has failed, the future raises an error on all ranks.
    """
    parts, common = _preprocess.save_preprocess(sharded_state_dict, validate_access_integrity=False)
    parts[_COMMON] = _mapping.ShardedObject(_COMMON, common, (1,), (0,), replica_id=dist.get_rank())
    storage, name = places.storage_at(save_dir), _ITERATION.format(iteration)
    names_it = dist.get_rank() == 0
    named: Future[SaveReport] = threads.running_future()

    def name_iteration(handle: SaveHandle) -> None:
        try:
            report = handle.result()
            if names_it:
                storage.replace(f"{name}/{_package.core.CONFIG_FNAME}", json.dumps(_CONFIG).encode())
                storage.replace(TRACKER, str(iteration).encode())
        except BaseException as error:
            named.set_exception(error)
        else:
            named.set_result(report)

    _begin(parts, f"{os.fspath(save_dir)}/{name}").add_done_callback(name_iteration)
    return named


def load_checkpoint(
    sharded_state_dict: dict[str, Any],
    load_dir: str | os.PathLike[str],
    iteration: int | None = None,
    *,
    trust: bool = False,
) -> tuple[dict[str, Any], int] | None:
    """Load an iteration, by default the one in the tracker, on any number of ranks. Every rank calls this.

        if (found := load_checkpoint({"model": model.sharded_state_dict()}, "runs/a")) is not None:
            state, iteration = found
            model.load_state_dict(state["model"])

    Returns the state dict, including the values that all ranks have in common, and the iteration; None without a
    tracker. It also loads checkpoints of Megatron's own strategy. `trust` is as for `use`.

    Raises Megatron's CheckpointingException if the checkpoint lacks a key, or has it in another shape or dtype, and the
    errors of `load`. An unreadable tracker is an error on all ranks.
    """
    if iteration is None:
        iteration = meet(lambda: _tracked(load_dir))[0]
        if iteration is None:
            return None
    folder = f"{os.fspath(load_dir)}/{_ITERATION.format(iteration)}"
    parts, local, factories = _preprocess.load_preprocess(sharded_state_dict)
    state = _common_state(folder, trust=trust)
    _dicts.merge(state, local)
    parts, _ = _utils.extract_sharded_base(parts)
    _dicts.merge(state, LoadStrategy(trust=trust).load(parts, folder))
    return _mapping.apply_factory_merges(state, factories), iteration


class SaveStrategy(_PlainSave):  # type: ignore[misc]
    """A save strategy for `megatron.core.dist_checkpointing.save`, in place of `TorchDistSaveShardedStrategy`.

        checkpointing_context = {"save_strategy": SaveStrategy()}

    The main replica of each part is saved. `async_save` copies everything, and returns a request for Megatron's queue.
    The request is done when the archives of all ranks are durable; then its finalize functions update the tracker. The
    first of these functions raises the error of a failed save, on every rank.
    """

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | os.PathLike[str]) -> None:
        """Save, and wait until the archives of all ranks are durable. An error of any rank is raised on all of them."""
        _begin(sharded_state_dict, checkpoint_dir).result()

    def async_save(
        self,
        sharded_state_dict: dict[str, Any],
        checkpoint_dir: str | os.PathLike[str],
        async_strategy: str = "nvrx",
    ) -> Any:
        """Copy everything, and begin to write. Returns Megatron's AsyncRequest."""
        request: Any = _strategies.get_async_strategy(async_strategy, "AsyncRequest")[1]
        handle = _begin(sharded_state_dict, checkpoint_dir)
        return request(_wait_for, (_lock_during(handle),), [handle.result])


class LoadStrategy(_PlainLoad):  # type: ignore[misc]
    """A load strategy for `megatron.core.dist_checkpointing.load`, in place of `TorchDistLoadShardedStrategy`.

    Megatron reads the common state before any strategy runs, so call `use` first. Each rank reads the ranges that it
    needs, for any sizes of tensor, pipeline and data parallelism at the save. Checkpoints of Megatron's own strategy
    are loaded by that strategy. `trust` is as for `use`.
    """

    trust = False

    def __init__(self, *args: Any, trust: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.trust = trust

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | os.PathLike[str], *others: Any) -> Any:
        """Fill the tensors of a sharded state dict. Returns a dict of the same structure with tensors and objects.

        Raises Megatron's CheckpointingException if the checkpoint lacks a key, or has it in another shape or dtype.
        """
        if (archive := _archive_in(checkpoint_dir)) is None:
            return _plain["load"](self, sharded_state_dict, checkpoint_dir, *others)
        try:
            return _filled(sharded_state_dict, archive, trust=self.trust)
        except StateMismatchError as error:
            raise _package.core.CheckpointingException(str(error)) from error

    def load_tensors_metadata(self, checkpoint_dir: Any, metadata: Any = None) -> Any:
        """The ShardedTensors in a checkpoint by their keys, unsharded and without data."""
        if (archive := _archive_in(checkpoint_dir)) is None:
            return _plain["load_tensors_metadata"](self, checkpoint_dir, metadata)
        return {name: part for name, part in _parts_in(archive).items() if isinstance(part, _mapping.ShardedTensor)}

    def load_sharded_metadata(self, checkpoint_dir: Any) -> Any:
        """The ShardedTensors and ShardedObjects in a checkpoint, without data."""
        if (archive := _archive_in(checkpoint_dir)) is None:
            return _plain["load_sharded_metadata"](self, checkpoint_dir)
        return _parts_in(archive)


# --- saving -------------------------------------------------------------------------------------------------------


def _begin(sharded_state_dict: dict[str, Any], checkpoint_dir: str | os.PathLike[str]) -> SaveHandle:
    """Copy those parts of this rank that are main replicas, and begin to write them to the folder of a checkpoint."""
    parts = filter(lambda part: _mapping.is_main_replica(part.replica_id), _dicts.nested_values(sharded_state_dict))
    state = {str(number): _as_tensor(part) for number, part in enumerate(parts)}
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size > 1:
        state[_RANKS] = _mapping.ShardedTensor.from_rank_offsets(_RANKS, torch.tensor([rank]), (0, rank, world_size))
    return save(state, url_in(os.fspath(checkpoint_dir)))


def _as_tensor(part: Any) -> Any:
    """The part; for a ShardedObject, a ShardedTensor with the bytes of torch.save, under its unique key.

    It is saved as a tensor because ranks exchange the names of all tensors, but the names of plain values only if their
    tensors differ.
    """
    if isinstance(part, _mapping.ShardedTensor):
        return part
    file = io.BytesIO()
    torch.save([part.data], file)
    data = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    return _mapping.ShardedTensor.from_rank_offsets(part.unique_key, data)


def _lock_during(handle: SaveHandle) -> str:
    """The path of a file that this process locks until a save has ended."""
    descriptor, path = tempfile.mkstemp(prefix="async_ckpt-")
    os.close(descriptor)
    held = locks.hold_if_free(Path(path))
    assert held is not None, "nobody else knows this file"

    def release(_: SaveHandle) -> None:
        os.unlink(path)
        locks.forget(held)

    handle.add_done_callback(release)
    return path


def _wait_for(path: str) -> None:
    """Wait until a save or its process has ended. Megatron calls this in a separate process."""
    with suppress(FileNotFoundError), open(path) as file:  # without the file, it has ended
        fcntl.lockf(file, fcntl.LOCK_SH)  # the lock ends with its process


# --- loading ------------------------------------------------------------------------------------------------------


def _archive_in(checkpoint_dir: str | os.PathLike[str]) -> str | None:
    """The archive in the folder of a checkpoint; None if it has none."""
    folder, _, name = (archive := url_in(os.fspath(checkpoint_dir))).rpartition("/")
    return archive if name in places.storage_at(folder).names("") else None


def _tracked(load_dir: str | os.PathLike[str]) -> int | None:
    """The iteration in the tracker; None if there is no tracker. Raises ValueError for other content."""
    text = latest_in(load_dir, TRACKER)
    if text is not None and not text.isdecimal():
        where = places.storage_at(load_dir).locate(TRACKER)
        raise ValueError(f"{where} names no iteration, but has {text!r:.100}; give iteration=")
    return None if text is None else int(text)


def _common_state(checkpoint_dir: str | os.PathLike[str], *, trust: bool | None = None) -> dict[str, Any]:
    """The values that all ranks have in common. Replaces Megatron's `load_common_state_dict`."""
    if (archive := _archive_in(checkpoint_dir)) is None:
        plain: dict[str, Any] = _plain_common(checkpoint_dir)
        return plain
    name = _mapping.ShardedObject(_COMMON, None, (1,), (0,)).unique_key
    return dict(_objects_in(archive, [name], trust=LoadStrategy.trust if trust is None else trust)[name])


def _filled(sharded_state_dict: dict[str, Any], archive: str, *, trust: bool) -> Any:
    _utils.force_all_tensors_to_non_fp8(sharded_state_dict)
    parts = [*_dicts.nested_values(sharded_state_dict)]
    tensors = [part for part in parts if isinstance(part, _mapping.ShardedTensor)]
    for tensor in tensors:
        tensor.init_data("cpu")
        tensor.data = tensor.data.detach()
        if tensor.allow_shape_mismatch:
            tensor.data.zero_()  # for items that the saved tensor lacks
    saved = _parts_in(archive)
    filled = [_of_dtype(tensor, saved) for tensor in tensors]
    if tensors:
        restore(dict(enumerate(filled)), archive, trust=trust)
    for tensor, source in zip(tensors, filled, strict=True):
        if source is not tensor:
            tensor.data.copy_(source.data)
    names = {part.unique_key for part in parts if isinstance(part, _mapping.ShardedObject)}
    if missing := sorted(names.difference(saved)):
        raise StateMismatchError(f"{archive} has no {missing[0]}", missing=tuple(missing))
    objects = _objects_in(archive, [*names], trust=trust) if names else {}

    def value_of(part: Any) -> Any:
        return part.data if isinstance(part, _mapping.ShardedTensor) else objects[part.unique_key]

    return _dicts.dict_list_map_outplace(value_of, sharded_state_dict)


def _of_dtype(tensor: Any, saved: dict[str, Any]) -> Any:
    """The ShardedTensor, or one with the saved dtype from which to convert, as in Megatron."""
    dtype = saved[tensor.key].dtype if tensor.key in saved else tensor.dtype
    return tensor if dtype == tensor.dtype else replace(tensor, data=tensor.data.to(dtype), dtype=dtype)


def _objects_in(archive: str, names: list[str], *, trust: bool) -> dict[str, Any]:
    """Saved objects by their unique keys. In a converted archive, they are lists instead of bytes."""
    objects = load(archive, select=names, trust=trust)
    for name, value in objects.items():
        if isinstance(value, torch.Tensor):
            file = io.BytesIO(value.numpy().tobytes())
            try:
                value = torch.load(file, "cpu", weights_only=not trust)  # nosec B614
            except pickle.UnpicklingError as error:
                raise UntrustedObjectError(
                    f"{archive}: {name} has objects of classes that were not declared safe; if you trust whoever wrote "
                    "it, load it with trust=True"
                ) from error
        (objects[name],) = value
    return dict(objects)


def _parts_in(archive: str) -> dict[str, Any]:
    """The parts of a checkpoint by name, unsharded and without data."""
    parts: dict[str, Any] = {}
    for row in inspect(archive).names:
        key, of_object, place = row.name.partition(_OF_OBJECT)
        if of_object:  # the row may be that of a value inside the object
            offset, _, shape = place.partition("_")
            shape = ".".join(shape.split(".")[: offset.count(".") + 1])
            part = _mapping.ShardedObject.empty_from_unique_key(f"{key}{_OF_OBJECT}{offset}_{shape}")
            parts[part.unique_key] = part
        elif row.name != _RANKS:
            assert row.dtype is not None, "everything else is in a ShardedObject"
            empty = torch.empty(row.shape or (), dtype=getattr(torch, row.dtype), device="meta")
            parts[row.name] = _mapping.ShardedTensor.from_rank_offsets(row.name, empty).without_data()
    return parts
