"""`AsyncTarCheckpointIO`: the plugin for Lightning's Trainer and for Fabric.

In: Lightning's calls of a CheckpointIO. Out: the same effects, in the background. Knows nothing of: how to save.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ... import SaveReport
from ...plumbing import spec
from ..common.framework_checks import require_names
from .background_saves import BackgroundSaves
from .packages import imported_packages
from .sharded_strategies import FabricShards, TrainerShards
from .trainer_hooks import TrainerHooks

# An entry that only the Trainer's checkpoints have, not those of Fabric.
_OF_TRAINER: Final = "pytorch-lightning_version"


class AsyncTarCheckpointIO:
    """A plugin for asynchronous saves by the Trainer or by Fabric, for `lightning` and `pytorch_lightning`.

        checkpoints = AsyncTarCheckpointIO()
        trainer = Trainer(plugins=[checkpoints], callbacks=[checkpoints.callback(), ModelCheckpoint(...)])

    A checkpoint is the same file as Lightning's own, with one more entry, by which the callback checks the order of the
    data: `torch.load`, and Lightning without this plugin, can read it. It appears under its name when it is durable.
    Loading, the end of the training, even by an exception, and the exit of the interpreter wait for the saves under
    way. The error of a failed save is raised by the next save, by `wait`, or at the end of the training; if an
    exception has ended the training, the error is logged and added to it as a note. After the end of the training, a
    save returns when it is durable.

    Args:
        max_in_flight: how many saves may be under way at once; a further save waits. Each takes as much host memory as
            the checkpoint. The default lets ModelCheckpoint save twice in a row, as for `save_last=True` at a URL.

    Raises ImportError without Lightning.
    """

    def __init__(self, *, max_in_flight: int = 2) -> None:
        fabrics = [fabric for fabric, _ in imported_packages()]
        for fabric in fabrics:
            fabric.plugins.CheckpointIO.register(type(self))
        self._plain = fabrics[0].plugins.TorchCheckpointIO()
        self._has_callback = False
        self._saves = BackgroundSaves(spec.whole_count("max_in_flight", max_in_flight), self._plain.remove_checkpoint)

    # --- what Lightning calls -------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: Mapping[str, Any], path: Any, storage_options: Any = None) -> None:
        """Copy a checkpoint, and write it in the background. Raises the error of an earlier save, and then saves
        nothing. Also raises the errors of `async_ckpt.wrap`.
        """
        if storage_options is not None:
            raise TypeError("storage_options is not supported here; set the environment variables of the store instead")
        if _OF_TRAINER in checkpoint and not self._has_callback:
            self._has_callback = True  # so that it warns only once
            warnings.warn(
                "the Trainer has this plugin without its callback: saves copy everything during the call, and no "
                "logger gets their figures; pass callbacks=[checkpoints.callback()]",
                UserWarning,
                stacklevel=2,
            )
        self._saves.save_file(checkpoint, path)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Wait for the saves under way, and load a checkpoint as Lightning does."""
        self._saves.finish()
        return self._plain.load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint after the saves under way. It is kept if one of them fails."""
        self._saves.remove(path)

    def teardown(self) -> None:
        """End a training: wait for everything, and raise the first error."""
        self._saves.end_run()

    # --- what users call ------------------------------------------------------------------------------------------

    def callback(self) -> Any:
        """A callback for the Trainer. Saves also work without it, but then:

        - the optimizers are not guarded, so everything is copied during the call of a save,
        - the loggers do not get the figures of the saves,
        - ModelCheckpoint ignores files under way when it counts versions, and moves its link before the file exists,
        - two trainings may save to the same folder.

        Raises RuntimeError if this version of Lightning lacks what the callback needs.
        """
        _, pytorch = imported_packages()[0]
        if pytorch is None:
            raise ImportError("the callback is for the Trainer, which is not installed: pip install lightning")
        self._has_callback = True
        kind = type("AsyncTarCallback", (TrainerHooks, pytorch.Callback), {"__doc__": TrainerHooks.__doc__})
        return kind(self, self._saves)

    def sharded(self, strategy: Any) -> Any:
        """Make a ModelParallelStrategy or an FSDPStrategy of the Trainer or of Fabric save its shards with this plugin.

            strategy = checkpoints.sharded(ModelParallelStrategy())
            trainer = Trainer(strategy=strategy, callbacks=[checkpoints.callback(), ModelCheckpoint(...)])

        Each rank writes an archive in the background, and any other mesh can load the archives. Returns the strategy. A
        strategy that gathers full state dicts saves as before. Raises RuntimeError for an unsupported version.
        """
        fabric, pytorch = imported_packages()[0]
        is_of_trainer = hasattr(strategy, "lightning_module_state_dict")
        shards = TrainerShards if is_of_trainer else FabricShards
        flag = "_state_dict_type" if hasattr(strategy, "_state_dict_type") else "_save_distributed_checkpoint"
        require_names(pytorch if is_of_trainer else fabric, strategy, [flag, "broadcast", *shards.names])
        shards(self._saves, strategy)
        return strategy

    @property
    def guard(self) -> Sequence[Any]:
        """The optimizers whose `step()` is the only code that changes their parameters and state. Set by the callback.

        With Fabric, set them after `fabric.setup`: `checkpoints.guard = optimizer`. An optimizer that changes tensors
        at other times is left out, with one warning: a save then returns when its tensors are copied.
        """
        return self._saves.guard

    @guard.setter
    def guard(self, optimizers: Any) -> None:
        self._saves.set_guard(optimizers if isinstance(optimizers, list | tuple) else [optimizers])

    def wait(self) -> None:
        """Wait for all saves, links and removals, and raise the first error that no save has raised.

        checkpoints.wait()  # the last line of a script with Fabric
        """
        self._saves.finish()
        self._saves.raise_error()

    def reports(self) -> list[SaveReport]:
        """The reports of the saves that have ended since the last call. `step` is `global_step` or `step` in the
        checkpoint. With the callback, the reports go to the loggers.

        for report in checkpoints.reports(): fabric.log_dict(report.as_dict("async_ckpt/"), report.step)
        """
        return self._saves.take_reports()

    def __repr__(self) -> str:
        return f"<AsyncTarCheckpointIO {self._saves!r}>"
