"""The callback of the plugin: hooks of the Trainer, and the few methods of ModelCheckpoint that must wait for saves.

In: the Trainer. Out: optimizers for the guard, figures and files for loggers, links in order. All hooks are removed at
the end of the training.
Knows nothing of: how to save.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import methodcaller
from typing import Any, Final

from torch.utils._pytree import tree_leaves

from ..common.framework_checks import LOGGED_AS, require_names
from ..common.joint_errors import meet
from ..common.loader_order import ORDER, order_file, warn_of_order
from .background_saves import BackgroundSaves
from .checkpoint_paths import locked, move_link
from .packages import imported_packages
from .sharded_strategies import StrategyShards, saves_shards

_MISSING: Final = object()


class TrainerHooks:
    """The hooks of an AsyncTarCheckpointIO's callback, which derives a class from this one and Lightning's Callback."""

    def __init__(self, plugin: Any, saves: BackgroundSaves) -> None:
        _, pytorch = imported_packages()[0]
        require_names(pytorch, pytorch.callbacks.ModelCheckpoint, [*CheckpointHooks.names, "setup"])
        require_names(pytorch, pytorch.core.saving, ["pl_load"])
        self._plugin, self._saves = plugin, saves
        self._undo = ExitStack()
        # Deferred calls of loggers, each with the path of the save for which it waits.
        self._waiting: list[tuple[str | None, Callable[[], object]]] = []
        self._order: dict[str, bytes] = {}  # of the checkpoint from which the training resumes

    def __reduce__(self) -> Any:
        """Lightning pickles callbacks for processes that it spawns; pickle cannot find the derived class by name."""
        return methodcaller("callback"), (self._plugin,)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Make ModelCheckpoint, loggers and `load_from_checkpoint` wait for what they read, until training ends."""
        if stage != "fit":
            return
        self._refuse_other_plugin(trainer)
        undo = self._undo = self._saves.begin_run()
        for callback in trainer.checkpoint_callbacks:
            if hasattr(callback, "_link_checkpoint"):
                hooks = CheckpointHooks(self._saves, callback)
                for name in CheckpointHooks.names:
                    undo.enter_context(_replaced(callback, name, getattr(hooks, name)))
        self._waiting = []
        for logger in trainer.loggers:
            notify_later = partial(self._notify_when_durable, logger.after_save_checkpoint)
            undo.enter_context(_replaced(logger, "after_save_checkpoint", notify_later))
        for saving in [pytorch.core.saving for _, pytorch in imported_packages() if pytorch is not None]:
            undo.enter_context(_replaced(saving, "pl_load", _after_saves_to(self._saves, saving.pl_load)))

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Lock the folders of checkpoints, on rank 0. Raises an error on every rank if another trainer saves to one of
        them, or if it is not writable.
        """
        meet(lambda: self._lock_folders(trainer) if trainer.is_global_zero else None, trainer.strategy.broadcast)

    def _lock_folders(self, trainer: Any) -> None:
        folders = {
            os.path.realpath(callback.dirpath) for callback in trainer.checkpoint_callbacks if _is_local(callback)
        }
        for folder in sorted(folders):
            self._undo.enter_context(locked(folder))

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Add an entry to the checkpoint with the facts on which the order of the data depends."""
        checkpoint.update(order_file(_loaders_of(trainer)))

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Keep the entry about the order of the data until the trainer has its loaders."""
        self._order = {ORDER: checkpoint[ORDER]} if ORDER in checkpoint else {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Pass the optimizers to the guard, and warn if the order of the data differs from the checkpoint's."""
        self._saves.set_guard(list(trainer.optimizers))
        warn_of_order(self._order, _loaders_of(trainer), str(trainer.ckpt_path))
        self._order = {}

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Log the saves that have ended. Requested removals join the queue."""
        self._log_reports(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """Wait for the saves under way, before other callbacks save a checkpoint, and log them."""
        self._saves.end_run_by(exception)
        self._saves.finish()
        self._log_reports(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Log the last saves; the strategy's teardown has waited for them."""
        self._log_reports(trainer)

    def _refuse_other_plugin(self, trainer: Any) -> None:
        strategy = trainer.strategy
        shards = getattr(strategy.save_checkpoint, "__self__", None)
        if isinstance(shards, StrategyShards) and shards.saves is self._saves:
            return
        if strategy.checkpoint_io is not self._plugin:
            raise ValueError(
                "this callback belongs to an AsyncTarCheckpointIO that the Trainer does not have; pass both: "
                "Trainer(plugins=[checkpoints], callbacks=[checkpoints.callback()])"
            )
        kinds = {kind.__name__ for kind in type(strategy).mro()}
        if "DeepSpeedStrategy" in kinds:
            raise ValueError(
                "DeepSpeedStrategy writes its checkpoints by itself, and is not supported; leave plugin and callback "
                "out, or train by an engine of your own, with async_ckpt.integrations.deepspeed.use(engine)"
            )
        if saves_shards(strategy):
            raise ValueError(
                f"{type(strategy).__name__} writes its checkpoints by itself; if it is a ModelParallelStrategy or an "
                "FSDPStrategy, pass strategy=checkpoints.sharded(strategy); other strategies are not supported"
            )

    def _notify_when_durable(self, notify: Callable[[Any], object], checkpoint_callback: Any) -> None:
        """Replaces `Logger.after_save_checkpoint`, in which some loggers upload the file."""
        self._waiting.append((self._saves.newest_path, partial(notify, checkpoint_callback)))

    def _log_reports(self, trainer: Any) -> None:
        reports = self._saves.take_reports()
        for report in reports:
            for logger in trainer.loggers:
                logger.log_metrics(report.as_dict(LOGGED_AS), step=report.step)
        durable = {report.path for report in reports}
        ready = [entry for entry in self._waiting if entry[0] in durable]
        self._waiting = [entry for entry in self._waiting if entry[0] not in durable]
        for _, notify in ready:
            notify()


class CheckpointHooks:
    """The methods that replace those of one ModelCheckpoint while a training runs."""

    names: Final = ("file_exists", "_link_checkpoint", "_save_topk_checkpoint")

    def __init__(self, saves: BackgroundSaves, callback: Any) -> None:
        self._saves, self._callback = saves, callback
        # The methods of the class, since the callback of a trainer that was copied during a training has ours.
        self._plain = {name: getattr(type(callback), name) for name in ("file_exists", "_save_topk_checkpoint")}

    def __reduce__(self) -> Any:
        return type(self), (self._saves, self._callback)

    def file_exists(self, filepath: Any, trainer: Any) -> bool:
        """Check a path after the saves to it. A file that is about to be removed counts as missing."""
        self._saves.finish(filepath)
        if trainer.is_global_zero and self._saves.is_to_go(filepath):
            filepath = f"{filepath}/is to go"  # a path that never exists: all ranks must take part in the call
        return bool(self._plain["file_exists"](self._callback, filepath, trainer))

    def _link_checkpoint(self, trainer: Any, filepath: str, linkpath: str) -> None:
        """Move the link when the file is durable."""
        if trainer.is_global_zero and os.path.abspath(filepath) != os.path.abspath(linkpath):
            self._saves.follow(linkpath, partial(move_link, linkpath, filepath))
        trainer.strategy.barrier()

    def _save_topk_checkpoint(self, trainer: Any, monitor_candidates: Any) -> None:
        """With `save_last=True`, save once under both names. The saved state contains the new `last_model_path`."""
        callback = self._callback
        if callback.save_last is not True:
            self._plain["_save_topk_checkpoint"](callback, trainer, monitor_candidates)
            return
        previous, last = callback.last_model_path, self._last_path(trainer, monitor_candidates)
        callback.last_model_path = last
        try:
            with self._saves.also_named(last):
                self._plain["_save_topk_checkpoint"](callback, trainer, monitor_candidates)
        finally:
            callback.last_model_path = previous

    def _last_path(self, trainer: Any, monitor_candidates: Any) -> str:
        """The path to which ModelCheckpoint will save its next last checkpoint."""
        callback = self._callback
        name, version = callback.CHECKPOINT_NAME_LAST, getattr(callback, "STARTING_VERSION", 1)
        path = callback.format_checkpoint_name(monitor_candidates, name)
        if getattr(callback, "_enable_version_counter", False):
            while callback.file_exists(path, trainer) and path != callback.last_model_path:
                path = callback.format_checkpoint_name(monitor_candidates, name, ver=version)
                version += 1
        return str(path)


def _after_saves_to(saves: BackgroundSaves, look: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a path that first waits for the saves to the path."""

    def look_later(path: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(path, str | os.PathLike):
            saves.finish(path)
        return look(path, *args, **kwargs)

    return look_later


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of an object or module during the block."""
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _loaders_of(trainer: Any) -> list[Any]:
    """The loaders of a training; several if they were given as a list or a dict."""
    return [loader for loader in tree_leaves(trainer.train_dataloader) if loader is not None]


def _is_local(callback: Any) -> bool:
    return getattr(callback, "dirpath", None) is not None and "://" not in str(callback.dirpath)
