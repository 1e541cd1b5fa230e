"""`AsyncTarCheckpointIO`: the plugin for Lightning's Trainer and for Fabric.

In: the calls that Lightning makes to a CheckpointIO. Out: the same, in the background. Knows nothing of: how to save.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ... import SaveReport
from ...plumbing import spec
from ..common.frameworks import require_names
from .background_saves import BackgroundSaves
from .packages import imported_packages
from .sharded_strategies import FabricShards, TrainerShards
from .trainer_hooks import TrainerHooks

# The entry of a checkpoint that the Trainer adds, and Fabric does not.
_OF_TRAINER: Final = "pytorch-lightning_version"


class AsyncTarCheckpointIO:
    """A plugin for the Trainer and for Fabric, of `lightning` and of `pytorch_lightning`, that saves asynchronously.

        checkpoints = AsyncTarCheckpointIO()
        trainer = Trainer(plugins=[checkpoints], callbacks=[checkpoints.callback(), ModelCheckpoint(...)])

    A checkpoint is the file that Lightning writes itself, with one more entry, by which the callback compares the order
    of the data: `torch.load` and Lightning without this plugin read it. It appears under its name when it is durable.
    Loading waits for the saves under way, and so do the end of the training, however it comes, and the exit of the
    interpreter. The error of a failed save is raised by the next save, by `wait`, and at the end of the training; after
    another exception it is logged, and noted there. A save after the end of the training waits for itself.

    Args:
        max_in_flight: how many saves may be under way at once; another one waits. Each takes as much host memory as the
            checkpoint. The default lets ModelCheckpoint save twice in a row, as for `save_last=True` at a URL.

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
        nothing; and what `async_ckpt.wrap` raises.
        """
        if storage_options is not None:
            raise TypeError("storage_options is not supported here; set the environment variables of the store instead")
        if _OF_TRAINER in checkpoint and not self._has_callback:
            self._has_callback = True  # so that it is said once
            warnings.warn(
                "the Trainer has this plugin without its callback: saves copy everything during the call, and no "
                "logger gets their figures; pass callbacks=[checkpoints.callback()]",
                UserWarning,
                stacklevel=2,
            )
        self._saves.save_file(checkpoint, path)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint as Lightning does, after the saves under way."""
        self._saves.finish()
        return self._plain.load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint behind the saves under way; if one of them fails, it is kept."""
        self._saves.remove(path)

    def teardown(self) -> None:
        """End a training: wait for everything, and raise the first error."""
        self._saves.end_run()

    # --- what users call ------------------------------------------------------------------------------------------

    def callback(self) -> Any:
        """A callback for the Trainer. Without it, saves work too, but:

        - the optimizers are not guarded, so everything is copied during the call of a save,
        - the figures of the saves do not go to the loggers,
        - ModelCheckpoint counts versions without the files under way, and moves its link ahead of the file,
        - two trainings may save into one folder.

        Raises RuntimeError if this version of Lightning lacks what the callback needs.
        """
        _, pytorch = imported_packages()[0]
        if pytorch is None:
            raise ImportError("the callback is for the Trainer, which is not installed: pip install lightning")
        self._has_callback = True
        kind = type("AsyncTarCallback", (TrainerHooks, pytorch.Callback), {"__doc__": TrainerHooks.__doc__})
        return kind(self, self._saves)

    def sharded(self, strategy: Any) -> Any:
        """Make a ModelParallelStrategy or an FSDPStrategy, of the Trainer or of Fabric, save its shards by this plugin.

            strategy = checkpoints.sharded(ModelParallelStrategy())
            trainer = Trainer(strategy=strategy, callbacks=[checkpoints.callback(), ModelCheckpoint(...)])

        Each rank writes an archive in the background, and any other mesh loads them. Returns the strategy. One that
        gathers full state dicts saves as before. Raises RuntimeError if this version of Lightning lacks what is needed.
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
        """The optimizers that alone change their parameters and state, in `step()`. The callback sets them.

        With Fabric, set them after `fabric.setup`: `checkpoints.guard = optimizer`. One that changes something at other
        times is left out, with one warning: then a save returns when everything is copied.
        """
        return self._saves.guard

    @guard.setter
    def guard(self, optimizers: Any) -> None:
        self._saves.set_guard(optimizers if isinstance(optimizers, list | tuple) else [optimizers])

    def wait(self) -> None:
        """Wait for everything that was asked for, and raise the first error that no save has raised.

        checkpoints.wait()  # the last line of a script with Fabric
        """
        self._saves.finish()
        self._saves.raise_error()

    def reports(self) -> list[SaveReport]:
        """The reports of the saves that have ended since the last call. `step` is the `global_step` in the checkpoint,
        or the `step`. With the callback, they go to the loggers.

        for report in checkpoints.reports(): fabric.log_dict(report.as_dict("async_ckpt/"), report.step)
        """
        return self._saves.take_reports()

    def __repr__(self) -> str:
        return f"<AsyncTarCheckpointIO {self._saves!r}>"
