"""`AsyncTarCheckpointIO`: the checkpoints of Lightning's Trainer and of Fabric, written behind the training.

In: the checkpoints that Lightning collects, optimizers, and paths. Out: the files and folders that Lightning would have
written, each whole and durable as soon as it has its name; figures for loggers.
Knows nothing of: what is in a checkpoint.

A save copies the state once, during the call. From then on, everything is in one queue, in the order of the calls: files
that are being written, links and removals. A link or a removal waits for the saves before it, and is left undone if one
of them fails. The training thread alone owns the queue; one thread of this module does what follows a save.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import socket
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch

from ..around.wrap import wrap
from ..errors import CheckpointError, PeerFailedError, RunTakenError
from ..host.waits import ENDS_THE_WAIT, Wait, wait_for, wait_for_all
from ..oneoff import save
from ..report import SaveReport
from ..runs.manifest import NAME as MANIFEST
from ..saving.handle import SaveHandle, progress_of
from ..spans import monotonic
from ..spec import whole_count
from ..staging.guard import unwrapped
from ..storage.disk import sync_folder
from ..storage.scratch import publish
from .frameworks import require, require_names

try:
    import fcntl
except ImportError:  # Windows has no record locks: nobody is refused there
    fcntl = None  # type: ignore[assignment]

PREFIX: Final = "async_ckpt/"
# The versions of Lightning that the tests have run with.
_OLDEST: Final = "2.4"
_NEWEST: Final = "2.6"
# The same code under two names, of which a program may have either: Fabric, the package with its version, the Trainer.
_PACKAGES: Final = (
    ("lightning.fabric", "lightning", "lightning.pytorch"),
    ("lightning_fabric", "lightning_fabric", "pytorch_lightning"),
)
# The file with everything but the shards in a folder of Lightning, and in ours.
_REST: Final = "meta.pt"
_LOCK: Final = ".async_ckpt.lock"

_log = logging.getLogger("async_ckpt")


class AsyncTarCheckpointIO:
    """A plugin for the Trainer and for Fabric, of `lightning` and of `pytorch_lightning`, that saves asynchronously.

        checkpoints = AsyncTarCheckpointIO()
        trainer = Trainer(plugins=[checkpoints], callbacks=[checkpoints.callback(), ModelCheckpoint(...)])

    A checkpoint is the file that Lightning writes itself: `torch.load` and Lightning without this plugin read it. It
    appears under its name when it is durable. Loading waits for the saves under way, and so do the end of the training,
    however it comes, and the exit of the interpreter. The error of a failed save is raised by the next save, by `wait`,
    and at the end of the training; after another exception it is logged and noted there.

    After the end of a training no one waits any more, so each save then waits for itself.

    Args:
        max_in_flight: how many saves may be under way at once; another one waits. Each takes as much host memory as the
            checkpoint. The default is for ModelCheckpoint, which saves twice in a row for `save_last=True`.

    Raises ImportError without Lightning, and RuntimeError for a version that lacks what this needs.
    """

    def __init__(self, *, max_in_flight: int = 2) -> None:
        fabrics = [fabric for fabric, _ in _imported_packages()]
        for fabric in fabrics:
            fabric.plugins.CheckpointIO.register(type(self))
        self._plain = fabrics[0].plugins.TorchCheckpointIO()
        self._queue = _SaveQueue(whole_count("max_in_flight", max_in_flight))
        self._removals: list[str] = []  # asked for, and not in the queue yet
        self._guard: list[Any] = []
        self._unguarded: set[str] = set()  # told of once
        self._has_ended = False
        self._interrupted_by: BaseException | None = None
        self._undo = ExitStack()  # the changes that the callback has made for one training

    # --- what Lightning calls -------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: Mapping[str, Any], path: Any, storage_options: Any = None) -> None:
        """Copy a checkpoint, and write it in the background. Raises the error of an earlier save, and then saves
        nothing; and what `wrap` raises.
        """
        if storage_options is not None:
            raise TypeError("storage_options is not supported here; set the environment variables of the store instead")
        waited_seconds = self._begin(path)
        handle = wrap(torch.save, guard=self._guard or None)(checkpoint, path)
        self._queue.add(path, [handle], step=_step_in(checkpoint), waited_seconds=waited_seconds)
        self._wait_if_ended()

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint as Lightning does, after the saves under way."""
        self.finish()
        return self._plain.load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint behind the saves under way; if one of them fails, it is kept.

        ModelCheckpoint moves its link after it has asked for the removal of the file that the link names. So the
        removal joins the queue at the end of the batch, or with the next save.
        """
        self._removals.append(_key(path))

    def teardown(self) -> None:
        """End a training: wait for everything, undo the callback's changes, and raise the first error."""
        self.finish()
        self._undo.close()
        self._guard, self._has_ended = [], True
        try:
            self._raise_error()
        finally:
            self._interrupted_by = None

    # --- what users call ------------------------------------------------------------------------------------------

    def callback(self) -> Any:
        """A callback for the Trainer, which makes saves cheaper and complete. Lightning works without it, but then:

        - the optimizers are not guarded, so everything is copied during the call of a save,
        - the figures of the saves do not go to the loggers,
        - ModelCheckpoint counts versions without the files under way, and moves its link ahead of the file,
        - two trainings may save into one folder.
        """
        pytorch = _imported_packages()[0][1]
        kind = type("AsyncTarCallback", (_TrainerHooks, pytorch.Callback), {"__doc__": _TrainerHooks.__doc__})
        return kind(self)

    def sharded(self, strategy: Any) -> Any:
        """Make a ModelParallelStrategy or an FSDPStrategy, of the Trainer or of Fabric, save its shards by this plugin.

            Trainer(strategy=checkpoints.sharded(ModelParallelStrategy()), callbacks=[checkpoints.callback()])

        Each rank writes an archive in the background, and any other mesh loads them. Returns the same strategy. A
        strategy that gathers full state dicts is left as it is: its files go to the plugin.
        """
        fabric, pytorch = _imported_packages()[0]
        of_trainer = hasattr(strategy, "lightning_module_state_dict")
        flag = "_state_dict_type" if hasattr(strategy, "_state_dict_type") else "_save_distributed_checkpoint"
        require_names(pytorch if of_trainer else fabric, strategy, [flag, "broadcast", "save_checkpoint"])
        kind = type(strategy)
        mixin = _TrainerShards if of_trainer else _FabricShards
        strategy.__class__ = type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})
        strategy._checkpoints = self
        return strategy

    @property
    def guard(self) -> Sequence[Any]:
        """The optimizers that alone change their parameters and state, in `step()`; the callback sets them.

        With Fabric, set it after `fabric.setup`: `checkpoints.guard = optimizer`. Optimizers that change something at
        other times are left out, with one warning: then a save returns when everything is copied.
        """
        return tuple(self._guard)

    @guard.setter
    def guard(self, optimizers: Any) -> None:
        several = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
        reasons = [(optimizer, _why_not_guarded(optimizer)) for optimizer in several]
        self._guard = [optimizer for optimizer, reason in reasons if reason is None]
        for optimizer, reason in reasons:
            name = type(optimizer).__qualname__
            if reason is not None and name not in self._unguarded:
                self._unguarded.add(name)
                warnings.warn(f"{name} cannot be guarded, since {reason}: saves copy everything at once", stacklevel=2)

    def wait(self) -> None:
        """Wait for everything that was asked for, and raise the first error that no save has raised."""
        self.finish()
        self._raise_error()

    def reports(self) -> list[SaveReport]:
        """The reports of the saves that have ended since the last call; `step` is the global step.

        for report in checkpoints.reports(): fabric.log_dict(report.as_dict("async_ckpt/"), report.step)
        """
        self._queue_removals()
        self._queue.collect()
        reports, self._queue.reports = self._queue.reports, []
        return reports

    # --- parts, also for the callback and the strategies ----------------------------------------------------------

    def finish(self, path: Any = None) -> None:
        """Wait for everything that was asked for, or for all that concerns one path. Raises no error of a save."""
        if path is None or _key(path) in self._removals:
            self._queue_removals()
        self._queue.wait(path)

    def follow(self, path: Any, action: Callable[[], None]) -> None:
        """Do something to a path after the saves under way, unless one of them fails."""
        self._queue.follow(path, action)

    def begin_run(self) -> ExitStack:
        """Begin a training. Returns the stack for what is to be undone at its end."""
        self._has_ended, self._interrupted_by = False, None
        return self._undo

    def interrupt(self, exception: BaseException) -> None:
        """Note the exception that ends the training; no error of a save is to hide it."""
        self._interrupted_by = exception

    def save_shards(self, strategy: Any, path: Any, parts: dict[str, Any], rest: dict[str, Any]) -> None:
        """Write sharded state dicts as a folder, on all ranks; it appears when all of it is durable.

        The archives and the rest are written into a hidden folder beside it. Raises the error of an earlier save of any
        rank, on all of them.
        """
        waited_seconds = 0.0
        failed: Exception | None = None
        try:
            waited_seconds = self._begin(path)
        except Exception as error:
            failed = error
        if strategy.global_rank == 0 and failed is None:
            shutil.rmtree(_hidden(path), ignore_errors=True)  # of a process that was killed
        path, why = strategy.broadcast((str(path), failed and str(failed)))
        if failed is not None or why is not None:
            raise failed or PeerFailedError(f"{path}: rank 0: {why}", rank=0)
        hidden = _hidden(path)
        handles = [save(parts, hidden, guard=self._guard or None)]
        then: Callable[[], None] = _nothing
        if strategy.global_rank == 0:
            handles.append(wrap(torch.save)(rest, hidden / _REST))
            then = partial(_publish, hidden, Path(path))
        self._queue.add(path, handles, step=_step_in(rest), waited_seconds=waited_seconds, then=then)
        self._wait_if_ended()

    def _begin(self, path: Any) -> float:
        """Wait until a save to this path may begin. Returns for how long. Raises the error of an earlier save."""
        self._queue_removals()
        waited_seconds = self._queue.admit(path)
        self._raise_error()
        return waited_seconds

    def _queue_removals(self) -> None:
        removals, self._removals = self._removals, []
        for path in removals:
            self.follow(path, partial(_remove, path, self._plain))

    def _wait_if_ended(self) -> None:
        if self._has_ended:
            self.wait()

    def _raise_error(self) -> None:
        """Raise the first error; behind an exception that ends the training, log and note all errors instead."""
        self._queue.collect()
        errors, self._queue.errors = self._queue.errors, []
        if errors and self._interrupted_by is None:
            raise errors[0]
        for error in errors:
            _log.error("a checkpoint was not saved: %s: %s", type(error).__name__, error)
            assert self._interrupted_by is not None
            self._interrupted_by.add_note(f"async_ckpt: a save failed too: {type(error).__name__}: {error}")

    def __repr__(self) -> str:
        return f"<AsyncTarCheckpointIO, {self._queue!r}>"


@dataclass(frozen=True, slots=True)
class _Queued:
    """A save, or what follows saves at one path. `ended` is the outcome; a save has handles."""

    path: str
    ended: Future[None]
    handles: tuple[SaveHandle, ...] = ()
    step: int | None = None
    waited_seconds: float = 0.0

    def report(self) -> SaveReport:
        """The report of the archive or file; the stall is that of all parts, and of the wait before them."""
        reports = [handle.result() for handle in self.handles]
        stall_seconds = self.waited_seconds + sum(report.stall_seconds for report in reports)
        return replace(reports[0], path=self.path, step=self.step, stall_seconds=stall_seconds)


class _SaveQueue:
    """The saves under way, and what follows them, in their order. Used by the training thread alone.

    A thread of its own waits for each save and then does what follows. It is given everything that it needs.
    """

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self._queued: deque[_Queued] = deque()
        self._thread: ThreadPoolExecutor | None = None
        self.errors: list[BaseException] = []
        self.reports: list[SaveReport] = []

    def admit(self, path: Any) -> float:
        """Wait until nothing concerns this path, and few enough saves are under way. Returns for how many seconds."""
        begin = monotonic()
        self.wait(path)
        while len(saves := [one for one in self._queued if one.handles and not one.ended.done()]) >= self._max_in_flight:
            _wait_for(saves[0])
        return monotonic() - begin

    def add(
        self,
        path: Any,
        handles: Sequence[SaveHandle],
        *,
        step: int | None,
        waited_seconds: float,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Add a save that has begun. It has ended when all handles are done, and then `then` is."""
        ended = self._submit(partial(_finish, tuple(handles), then or _nothing))
        self._queued.append(_Queued(_key(path), ended, tuple(handles), step, waited_seconds))

    def follow(self, path: Any, action: Callable[[], None]) -> None:
        """Add an action behind the saves under way, which is left undone if one of them fails."""
        saves = [one.ended for one in self._queued if one.handles]
        self._queued.append(_Queued(_key(path), self._submit(partial(_act, _key(path), saves, action))))

    def wait(self, path: Any = None) -> None:
        """Wait for everything, or for all that concerns one path. Raises nothing."""
        for one in [*self._queued]:
            if path is None or one.path == _key(path):
                _wait_for(one)

    def collect(self) -> None:
        """Take what has ended out of the queue, into `reports` and `errors`."""
        while self._queued and self._queued[0].ended.done():
            one = self._queued.popleft()
            for handle in one.handles:
                handle.exception()  # is told from here: the exit of the interpreter need not tell it again
            error = one.ended.exception()
            if error is not None:
                self.errors.append(error)
            elif one.handles:
                self.reports.append(one.report())

    def _submit(self, task: Callable[[], None]) -> Future[None]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="async_ckpt-lightning")
        return self._thread.submit(task)

    def __repr__(self) -> str:
        return f"{sum(not one.ended.done() for one in self._queued)} under way"


def _wait_for(one: _Queued) -> None:
    wait = Wait("for a checkpoint", ENDS_THE_WAIT)
    wait_for(one.ended, None, lambda: wait.goes_on(lambda: progress_of(one.handles)))


def _finish(handles: tuple[SaveHandle, ...], then: Callable[[], None]) -> None:
    """Wait for a save, and do the rest of it. Raises its error, without looking at it for the user."""
    wait_for_all(handles)
    for handle in handles:
        if (error := Future.exception(handle)) is not None:
            raise error
    then()


def _act(path: str, saves: list[Future[None]], action: Callable[[], None]) -> None:
    """Do what follows saves, which have all ended, since one thread does everything in order."""
    if any(ended.exception() is not None for ended in saves):
        _log.warning("%s is left as it is, since a save before it has failed", path)
    else:
        action()


def _nothing() -> None:
    pass


# --- the callback -------------------------------------------------------------------------------------------------


class _TrainerHooks:
    """The part of an `AsyncTarCheckpointIO` that is a callback: see there. Made by its `callback`."""

    def __init__(self, checkpoints: AsyncTarCheckpointIO) -> None:
        _, pytorch = _imported_packages()[0]
        require_names(pytorch, pytorch.callbacks.ModelCheckpoint, ["file_exists", "_link_checkpoint", "setup"])
        require_names(pytorch, pytorch.core.saving, ["pl_load"])
        self._checkpoints = checkpoints
        self._undo = ExitStack()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Have ModelCheckpoint and `load_from_checkpoint` wait for what they look at, until the training ends."""
        if stage != "fit":
            return
        self._refuse_other_plugin(trainer)
        undo = self._undo = self._checkpoints.begin_run()
        for callback in trainer.checkpoint_callbacks:
            if hasattr(callback, "_link_checkpoint"):
                undo.enter_context(_replaced(callback, "file_exists", self._after_saves_to(callback.file_exists)))
                undo.enter_context(_replaced(callback, "_link_checkpoint", self._link))
        for _, pytorch in _imported_packages():
            saving = pytorch.core.saving
            undo.enter_context(_replaced(saving, "pl_load", self._after_saves_to(saving.pl_load)))

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Lock the folders of checkpoints. Raises RunTakenError if another process saves there."""
        if trainer.is_global_zero:
            folders = {os.path.realpath(callback.dirpath) for callback in trainer.checkpoint_callbacks if _is_local(callback)}
            for folder in sorted(folders):
                self._undo.enter_context(_locked(folder))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Hand the optimizers to the guard."""
        self._checkpoints.guard = list(trainer.optimizers)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Log the saves that have ended; what is to be removed joins the queue."""
        self._log_reports(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """Wait for the saves under way, ahead of the checkpoint that others may save now, and log them."""
        self._checkpoints.interrupt(exception)
        self._checkpoints.finish()
        self._log_reports(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Log the last saves, which the strategy's teardown has waited for."""
        self._log_reports(trainer)

    def _refuse_other_plugin(self, trainer: Any) -> None:
        strategy, ours = trainer.strategy, self._checkpoints
        if getattr(strategy, "_checkpoints", None) is not ours and strategy.checkpoint_io is not ours:
            raise ValueError(
                "this callback belongs to an AsyncTarCheckpointIO that the Trainer does not have; pass both: "
                "Trainer(plugins=[checkpoints], callbacks=[checkpoints.callback()])"
            )
        bypasses = getattr(type(strategy).save_checkpoint, "__qualname__", "") != "Strategy.save_checkpoint"
        if bypasses and not isinstance(strategy, _ShardSaves):
            raise ValueError(
                f"{type(strategy).__name__} writes its checkpoints by itself; pass strategy=checkpoints.sharded(strategy) "
                "if it is a ModelParallelStrategy or an FSDPStrategy; others are not served"
            )

    def _after_saves_to(self, look: Callable[..., Any]) -> Callable[..., Any]:
        """A function of a path that looks at it only after the saves to it."""

        def look_later(path: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, str | os.PathLike):
                self._checkpoints.finish(path)
            return look(path, *args, **kwargs)

        return look_later

    def _link(self, trainer: Any, filepath: str, linkpath: str) -> None:
        """Stand in for `ModelCheckpoint._link_checkpoint`: move the link when the file is durable."""
        if trainer.is_global_zero and os.path.abspath(filepath) != os.path.abspath(linkpath):
            self._checkpoints.follow(linkpath, partial(_move_link, linkpath, filepath))
        trainer.strategy.barrier()

    def _log_reports(self, trainer: Any) -> None:
        for report in self._checkpoints.reports():
            for logger in trainer.loggers:
                logger.log_metrics(report.as_dict(PREFIX), step=report.step)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of an object or module, replaced while the block lasts."""
    before = vars(owner).get(name, _nothing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _nothing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


# --- strategies that save shards ----------------------------------------------------------------------------------


class _ShardSaves:
    """A strategy whose ranks save shards; `AsyncTarCheckpointIO.sharded` makes it the class of one, with its own."""

    _checkpoints: AsyncTarCheckpointIO

    @property
    def _saves_shards(self) -> bool:
        state_dict_type = getattr(self, "_state_dict_type", None)  # that of an FSDPStrategy
        return getattr(self, "_save_distributed_checkpoint", state_dict_type == "sharded")

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint behind the saves under way."""
        if self.is_global_zero:  # type: ignore[attr-defined]
            self._checkpoints.remove_checkpoint(filepath)

    def teardown(self) -> None:
        """Wait for the saves under way first, and raise their error last."""
        try:
            self._checkpoints.teardown()
        finally:
            super().teardown()  # type: ignore[misc]

    def _loaded_from(self, path: Any) -> Path:
        """The path that rank 0 loads from, after the saves under way."""
        self._checkpoints.finish()
        return Path(self.broadcast(path))  # type: ignore[attr-defined]


class _TrainerShards(_ShardSaves):
    """The shards of a strategy of the Trainer. The tensors stay on their devices until they are copied."""

    def lightning_module_state_dict(self) -> Any:
        if not self._saves_shards:
            return super().lightning_module_state_dict()  # type: ignore[misc]
        return _state_dicts().get_model_state_dict(self.model)  # type: ignore[attr-defined]

    def optimizer_state(self, optimizer: Any) -> Any:
        if not self._saves_shards:
            return super().optimizer_state(optimizer)  # type: ignore[misc]
        optimizer = getattr(optimizer, "_optimizer", optimizer)  # Lightning's wrapper
        return _state_dicts().get_optimizer_state_dict(self.model, optimizer)  # type: ignore[attr-defined]

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save on all ranks: the shards as archives, and everything else on rank 0."""
        if not self._saves_shards or storage_options is not None:
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)  # type: ignore[misc]
            return
        rest = dict(checkpoint)
        parts = {"state_dict": rest.pop("state_dict")}
        parts |= {f"optimizer_{i}": part for i, part in enumerate(rest.pop("optimizer_states", ()))}
        self._checkpoints.save_shards(self, filepath, parts, rest)

    def load_checkpoint(self, checkpoint_path: Any, **options: Any) -> Any:
        """Fill model and optimizers, on any mesh, from our folder or from Lightning's. Returns the rest."""
        path = self._loaded_from(checkpoint_path)
        if not _is_ours(path):
            return super().load_checkpoint(path, **options)  # type: ignore[misc]
        optimizers = {f"optimizer_{i}": optimizer for i, optimizer in enumerate(self.optimizers)}  # type: ignore[attr-defined]
        strict = self.lightning_module.strict_loading  # type: ignore[attr-defined]
        _fill(path, "state_dict", self.model, optimizers, strict=strict)  # type: ignore[attr-defined]
        return torch.load(path / _REST, map_location="cpu", **options)


class _FabricShards(_ShardSaves):
    """The shards of a strategy of Fabric."""

    def save_checkpoint(self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None) -> None:  # noqa: A002
        """Save on all ranks: models and optimizers as archives, and everything else on rank 0."""
        model = _sharded_model(state)
        if not self._saves_shards or model is None or storage_options is not None or filter is not None:
            super().save_checkpoint(path, state, storage_options, filter)  # type: ignore[misc]
            return
        parts, rest = {}, {}
        for key, value in state.items():
            if isinstance(value, torch.nn.Module):
                parts[key] = _state_dicts().get_model_state_dict(value)
            elif isinstance(value, torch.optim.Optimizer):
                parts[key] = _state_dicts().get_optimizer_state_dict(model, value)
            else:
                rest[key] = value.state_dict() if hasattr(value, "state_dict") else value
        self._checkpoints.save_shards(self, path, parts, rest)

    def load_checkpoint(self, path: Any, state: Any = None, strict: bool = True, **options: Any) -> Any:
        """Fill the objects in `state`, on any mesh, from our folder or from Lightning's. Returns the rest."""
        path = self._loaded_from(path)
        model = _sharded_model(state) if isinstance(state, dict) else None
        if not _is_ours(path) or model is None:
            return super().load_checkpoint(path, state, strict, **options)  # type: ignore[misc]
        optimizers = {key: value for key, value in state.items() if isinstance(value, torch.optim.Optimizer)}
        for key, value in state.items():
            if isinstance(value, torch.nn.Module):
                _fill(path, key, value, optimizers if value is model else {}, strict=strict)
        rest = torch.load(path / _REST, map_location="cpu", **options)
        wanted = [key for key, value in state.items() if not isinstance(value, torch.nn.Module) and key not in optimizers]
        if strict and (missing := [key for key in wanted if key not in rest]):
            raise KeyError(f"{path} has no {missing[0]!r}; leave it out of the state, or pass strict=False")
        state.update({key: rest.pop(key) for key in wanted if key in rest})
        return rest


def _sharded_model(state: Mapping[str, Any]) -> torch.nn.Module | None:
    """The model whose parameters are spread over ranks."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    for value in state.values():
        if isinstance(value, torch.nn.Module) and (
            any(isinstance(parameter, DTensor) for parameter in value.parameters())
            or any(isinstance(module, FullyShardedDataParallel) for module in value.modules())
        ):
            return value
    return None


def _state_dicts() -> ModuleType:
    return import_module("torch.distributed.checkpoint.state_dict")


def _fill(path: Path, key: str, model: Any, optimizers: Mapping[str, Any], *, strict: bool) -> None:
    """Fill a model, and its optimizers, from the archives of all ranks. Every rank calls it."""
    import torch.distributed.checkpoint as dcp

    from .dcp import TarStorageReader

    torch_ = _state_dicts()
    weights = torch_.get_model_state_dict(model)
    dcp.load({key: weights}, storage_reader=TarStorageReader(path))
    torch_.set_model_state_dict(model, weights, options=torch_.StateDictOptions(strict=strict))
    for name, optimizer in optimizers.items():
        state = torch_.get_optimizer_state_dict(model, optimizer)
        dcp.load({name: state}, storage_reader=TarStorageReader(path))
        torch_.set_optimizer_state_dict(model, optimizer, state)


# --- files and folders --------------------------------------------------------------------------------------------


def _key(path: Any) -> str:
    """One key for every spelling of a local path, and a URL as it is."""
    text = os.fspath(path)
    return text if "://" in text else os.path.abspath(text)


def _hidden(path: Any) -> Path:
    """The folder beside a checkpoint in which it is written."""
    path = Path(path)
    return path.with_name(f".{path.name}.async_ckpt-saving")


def _is_ours(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def _publish(hidden: Path, path: Path) -> None:
    """Give a complete folder its name, in place of an older one."""
    sync_folder(hidden)
    publish(hidden, path, replaced=lambda _: True)
    shutil.rmtree(hidden, ignore_errors=True)  # the older one, which has been exchanged for it


def _remove(path: str, plain: Any) -> None:
    """Remove a file as Lightning does; a folder loses its name first, so that no part of it is taken for the whole."""
    if os.path.isdir(path) and not os.path.islink(path):
        hidden = _hidden(path)
        shutil.rmtree(hidden, ignore_errors=True)
        os.rename(path, hidden)
        shutil.rmtree(hidden)
    elif os.path.islink(path):
        os.unlink(path)
    else:
        plain.remove_checkpoint(path)


def _move_link(link: str, target: str) -> None:
    """Make a link lead to a durable checkpoint; there is always one, the old or the new."""
    folder, name = os.path.split(link)
    temp = os.path.join(folder, f".{name}.async_ckpt-link")
    with suppress(FileNotFoundError):
        os.unlink(temp)
    os.symlink(os.path.relpath(target, folder), temp)
    if os.path.isdir(link) and not os.path.islink(link):
        _remove(link, None)
    os.replace(temp, link)
    sync_folder(Path(folder))


def _is_local(callback: Any) -> bool:
    return getattr(callback, "dirpath", None) is not None and "://" not in str(callback.dirpath)


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    """A folder that no other process may lock meanwhile. Raises RunTakenError if one has.

    Without locks, as in some network file systems, nobody is refused.
    """
    os.makedirs(folder, exist_ok=True)
    path = Path(folder, _LOCK)
    fd = _lock(path)
    try:
        yield
    finally:
        if fd is not None:
            with suppress(FileNotFoundError):
                path.unlink()
            os.close(fd)


def _lock(path: Path) -> int | None:
    while fcntl is not None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.read(fd, 1000).decode(errors="replace").split()
            os.close(fd)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return None
            host, pid = owner if len(owner) == 2 else ("", "0")
            raise RunTakenError(
                f"{path.parent}: process {pid} on {host or 'an unknown host'} saves its checkpoints there; end it, or "
                "give this training another dirpath",
                path=str(path.parent),
                host=host,
                pid=int(pid),
                since=path.stat().st_mtime,
            ) from None
        with suppress(FileNotFoundError):  # its owner has deleted it, and another process may have made it again
            if os.path.samestat(os.fstat(fd), path.stat()):
                os.ftruncate(fd, 0)
                os.write(fd, f"{socket.gethostname()} {os.getpid()}".encode())
                return fd
        os.close(fd)
    return None


# --- Lightning ----------------------------------------------------------------------------------------------------


def _imported_packages() -> list[tuple[Any, Any]]:
    """Fabric and the Trainer's package, under each name that the program has imported, or else that is installed.

    In place of the Trainer's package is None if it is not there. Raises ImportError without any.
    """
    rows = [row for row in _PACKAGES if row[0] in sys.modules] or [row for row in _PACKAGES if find_spec(row[1])]
    if not rows:
        require("lightning", oldest=_OLDEST, newest=_NEWEST)
    packages = []
    for fabric, versioned, pytorch in rows:
        require(versioned, oldest=_OLDEST, newest=_NEWEST)
        trainer = import_module(pytorch) if pytorch in sys.modules or find_spec(pytorch) else None
        packages.append((import_module(fabric), trainer))
    return packages


def _why_not_guarded(optimizer: Any) -> str | None:
    """The reason why an optimizer may change something outside of its `step()`, as far as that shows; or None."""
    try:
        stepped = unwrapped(optimizer)
    except TypeError:
        return "its step() is not that of a torch optimizer"
    for one in (optimizer, *stepped):
        if callable(getattr(one, "train", None)) and callable(getattr(one, "eval", None)):
            return "its train() and eval() change the weights"
        groups = getattr(one, "param_groups", ())
        if any(getattr(p, "_post_accumulate_grad_hooks", None) for group in groups for p in group["params"]):
            return "it steps in the backward pass"
    return None


def _step_in(checkpoint: Mapping[str, Any]) -> int | None:
    """The step of a checkpoint of the Trainer, or one that a user of Fabric has named like it."""
    step = checkpoint.get("global_step", checkpoint.get("step"))
    return step if isinstance(step, int) else None
