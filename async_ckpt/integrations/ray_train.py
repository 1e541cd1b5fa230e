"""`RayCheckpointer`: the checkpoints of a Ray Train run, written in the background, and reported to Ray when durable.

In: the state on each worker. Out: one step of all workers below the run's storage path, as a `ray.train.Checkpoint`.
Knows nothing of: how Ray maintains its list of checkpoints.

The folder of a step is the checkpoint itself, so nothing is uploaded a second time. A thread of Ray waits for the save,
and then adds the checkpoint to Ray's list.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist

from .. import AsyncCheckpointer, Place, SaveHandle
from .common.framework_checks import LOGGED_AS, require, require_names

if TYPE_CHECKING:
    Checkpoint = Any

# The names of ray.train that are used here.
_USED: Final = (
    "report", "get_context", "get_all_reported_checkpoints", "collective", "Checkpoint", "CheckpointUploadMode",
    "CheckpointConsistencyMode",
)  # fmt: skip
# Ray broadcasts at most a kilobyte.
_MOST_LATE: Final = 64
# URL schemes, by pyarrow's names of file systems.
_SCHEMES: Final = {"s3": "s3://", "gcs": "gs://", "abfs": "az://"}


class RayCheckpointer(AsyncCheckpointer):
    """An AsyncCheckpointer whose root is the storage path of this Ray Train run. Every worker constructs one.

        def train_loop(config):
            with RayCheckpointer() as ckpt:
                start = ckpt.restore(state)
                for step in range(0 if start is None else start + 1, config["steps"]):
                    ...
                    handle = ckpt.save(state, step, record={"loss": loss})
                    ckpt.report({"loss": loss}, handle)

    The ranks are those of the process group, or without one those of Ray's context, which coordinate through a store on
    rank 0. Ray lists and deletes the checkpoints by the rules of its `CheckpointConfig`. So `keep=` is refused, and so
    is `unchanged=`, since no step may depend on another.

    Args:
        options: options of the client for the storage path, if that is a URL; as for `Place`.
        others: as for `AsyncCheckpointer`.

    Raises ImportError without Ray, RuntimeError outside of a worker of Ray Train, TypeError for arguments that Ray's
    context or `CheckpointConfig` determines, and ValueError for a storage file system whose URL is not known.
    """

    def __init__(self, *, options: Mapping[str, Any] | None = None, **others: Any) -> None:
        ray = require("ray")
        self._train = train = importlib.import_module("ray.train")
        importlib.import_module("ray.train.collective")
        require_names(ray, train, _USED)
        for name, where in _DECIDED.items():
            if name in others:
                raise TypeError(f"{name}= is not accepted here: {where}")
        context = train.get_context()
        storage = context.get_storage()
        require_names(ray, storage, ("storage_filesystem", "experiment_fs_path"))
        self._filesystem, self._folder = storage.storage_filesystem, storage.experiment_fs_path
        if not dist.is_initialized():
            rank, size = others["ranks"] = context.get_world_rank(), context.get_world_size()
            others["store"] = _store_of_workers(train, rank) if size > 1 else None
        super().__init__(_root_of(self._filesystem.type_name, self._folder, options), **others)

    def save(self, state: Any, step: int, *, unchanged: Collection[str] = (), **others: Any) -> SaveHandle:
        """`AsyncCheckpointer.save`. Raises ValueError for `unchanged`."""
        if unchanged:
            raise ValueError(
                "unchanged= would let a step need the archives of earlier steps, and Ray deletes steps one by one; "
                "leave it out"
            )
        return super().save(state, step, unchanged=(), **others)

    def restore(self, state: Any, step: int | None = None, **others: Any) -> int | None:
        """`AsyncCheckpointer.restore`. All workers make this call together.

        Steps that became durable just before all workers were killed are missing in Ray's list. Those up to the
        restored step are reported now, with their records as metrics.
        """
        restored = super().restore(state, step, **others)
        if restored is not None:
            self._report_late(restored)
        return restored

    def _report_late(self, restored: int) -> None:
        train, late = self._train, list[int]()
        if train.get_context().get_world_rank() == 0:
            consistency = train.CheckpointConsistencyMode.COMMITTED
            listed = {reported.checkpoint.path for reported in train.get_all_reported_checkpoints(consistency)}
            steps = [step for step in self.steps() if step <= restored and self._checkpoint(step).path not in listed]
            late = steps[-_MOST_LATE:]
        for step in train.collective.broadcast_from_rank_zero(late):
            train.report(
                dict(self.records().get(step, {})),
                checkpoint=self._checkpoint(step),
                checkpoint_upload_mode=train.CheckpointUploadMode.NO_UPLOAD,
                delete_local_checkpoint_after_upload=False,
            )

    def report(self, metrics: Mapping[str, Any], handle: SaveHandle | None = None, **others: Any) -> None:
        """`ray.train.report` for a save that is under way. All workers make this call. It does not wait for the save.

        The checkpoint joins Ray's list when it is durable. If the save fails, the training fails. Without `handle`, or
        with the handle of a skipped save, only the metrics are reported. The figures of the last durable save are added
        to the metrics, under names that begin with `async_ckpt/`.

        Args:
            metrics: as for `ray.train.report`.
            handle: the handle of a save of this checkpointer.
            others: `validation`, as for `ray.train.report`.
        """
        figures = {key: value for key, value in self.metrics(LOGGED_AS).items() if math.isfinite(value)}
        reported = {**figures, **metrics}
        if handle is None or _is_skipped(handle):
            self._train.report(reported)
            return
        assert handle.step is not None
        self._train.report(
            reported,
            checkpoint=self._checkpoint(handle.step),
            checkpoint_upload_mode=self._train.CheckpointUploadMode.ASYNC,
            delete_local_checkpoint_after_upload=False,
            checkpoint_upload_fn=self.upload_fn(handle),
            **others,
        )

    def upload_fn(self, handle: SaveHandle) -> Callable[[Checkpoint, str], Checkpoint]:
        """The `checkpoint_upload_fn` of a save, for code that calls `ray.train.report` itself.

        The function waits until the save is durable, and returns its folder. It raises the error of the save. Pass
        `delete_local_checkpoint_after_upload=False` as well, since the folder is the checkpoint.
        """
        return partial(self._uploaded, handle)

    def _uploaded(self, handle: SaveHandle, *_: Any) -> Checkpoint:
        assert handle.step is not None
        handle.result()
        return self._checkpoint(handle.step)

    def _checkpoint(self, step: int) -> Checkpoint:
        folder = self._roots.runs[0].folder(step)
        return self._train.Checkpoint(f"{self._folder}/{folder}", filesystem=self._filesystem)


_DECIDED: Final = {
    "root": "the root is the run's storage path, which RunConfig(storage_path=…, name=…) gives",
    "keep": "give RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=…, checkpoint_score_attribute=…))",
    "ranks": "the ranks are those of the workers",
    "store": "the ranks are those of the workers",
}


def _store_of_workers(train: Any, rank: int) -> Any:
    """A store on rank 0 for the workers of a training without a process group. It ends with rank 0."""
    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    server = make("0.0.0.0", 0, is_master=True, wait_for_workers=False) if rank == 0 else None  # nosec B104
    address = (importlib.import_module("ray.util").get_node_ip_address(), server.port) if server else None
    host, port = train.collective.broadcast_from_rank_zero(address)
    return server or make(host, port, is_master=False)


def _root_of(kind: str, folder: str, options: Mapping[str, Any] | None) -> Place | str:
    """The root for a folder on a pyarrow file system with the type name `kind`."""
    if kind == "local":
        return folder
    if kind not in _SCHEMES:
        raise ValueError(
            f"the storage path is on a file system of type {kind!r}, which async_ckpt has no URL for; known are local "
            f"disks and {', '.join(sorted(_SCHEMES))}"
        )
    return Place(_SCHEMES[kind] + folder, options=dict(options or {}))


def _is_skipped(handle: SaveHandle) -> bool:
    return handle.done() and handle.exception() is None and handle.result().status == "skipped"
