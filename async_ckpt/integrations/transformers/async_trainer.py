"""`AsyncCheckpointing`: a base class for the `Trainer` of Transformers that writes its checkpoints in the background.

In: a trainer. Out: its folders `checkpoint-<step>`, each visible once it is durable as a whole; a training that resumes
from them. Knows nothing of: the formats of the files, which the trainer itself writes.

A save has two halves. The call copies the weights, the optimizer and all small values to one snapshot. In the
background, the trainer's own methods write the folder from that snapshot.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from ... import load, snapshot
from ...errors import StateMismatchError
from ...files import local_work_dir
from ...plumbing import sharded, timing
from ..common.event_history import note_closed
from ..common.folder_saves import FolderSaves, noted_on
from ..common.folders import FolderHold
from ..common.framework_checks import LOGGED_AS, name_in, require, require_names
from ..common.fsdp1_state import optimizer_to_fill, take_back, take_back_optimizer, weights_of
from ..common.fsdp_files import has_optimizer, refuse
from ..common.joint_errors import meet
from ..common.loader_order import ORDER, order_file, warn_of_order
from ..common.run_folders import LocalRun, StoredRun, is_url
from ..common.small_files import write_files, written_by
from ..common.sound_folders import check, local, sound_folder
from ..common.training_archive import TrainingArchive, archive_in, missing_in
from ..dcp import restore
from .trainer_parts import FILES, parts_of, peft_config_of, written_weights
from .trainer_save import STATE, TrainerSave

Trainer: Any = name_in("transformers", "Trainer")
TrainerCallback: Any = name_in("transformers", "TrainerCallback")
ExportableState: Any = name_in("transformers.trainer_callback", "ExportableState")
Layout = Literal["transformers", "archive"]

_log = logging.getLogger("async_ckpt")
_PREFIX: Final = "checkpoint"
# The mark that the trainer puts into the folder of a checkpoint on SIGTERM, before it saves.
_JIT_MARK: Final = "checkpoint-is-incomplete.txt"
# The file in `output_dir` that is locked. Files whose names begin with "_" are not pushed to the hub.
_LOCK: Final = "_async_ckpt.lock"
# An entry that only the summary of a training has in the log.
_IN_SUMMARY: Final = "train_runtime"
# The figures of a save that are logged by default.
_FIGURES: Final = [f"{LOGGED_AS}{name}" for name in ("stall_seconds", "total_seconds", "bandwidth")]
# The trainer's default folder.
_OUTPUT_DIR: Final = "trainer_output"
# The methods of Trainer that are called or replaced here.
_USED: Final = (
    "_get_output_dir", "_save_checkpoint", "save_model", "_save", "_save_optimizer_and_scheduler", "_save_scaler",
    "_save_rng_state", "_push_from_checkpoint", "_load_from_checkpoint", "_load_best_model",
    "_load_optimizer_and_scheduler", "_load_scaler", "_load_rng_state", "store_flos", "log", "train",
)  # fmt: skip


def make_async(trainer: Any, layout: Layout = "transformers", *, all_figures: bool = False) -> Any:
    """Make an existing trainer, of any class, write its checkpoints in the background. Returns the same object.

        trainer = make_async(SFTTrainer(model, args=args, train_dataset=dataset))

    `all_figures` logs all figures of each save instead of three. Raises the errors of the constructor of
    `AsyncCheckpointing`.
    """
    require("transformers")
    kind = type(trainer)
    bases = (AsyncCheckpointing,) if kind is Trainer else (kind, AsyncCheckpointing)
    own = {"layout": layout, "all_figures": all_figures, "__module__": kind.__module__}
    trainer.__class__ = type(kind.__name__, bases, own)
    trainer._begin_async()
    return trainer


def use(layout: Layout = "transformers", *, all_figures: bool = False) -> None:
    """Make all trainers of this process write their checkpoints in the background, even those that other code creates.

        async_ckpt.integrations.transformers.use()
        llamafactory.train.tuner.run_exp()

    Each trainer is converted by `make_async` when its `train` is called, which may raise the errors of `make_async`.
    """
    require("transformers")
    plain = Trainer.train

    @functools.wraps(plain)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, AsyncCheckpointing):
            return plain(self, *args, **kwargs)
        return AsyncCheckpointing.train(make_async(self, layout, all_figures=all_figures), *args, **kwargs)

    Trainer.train = train


class AsyncCheckpointing(Trainer):  # type: ignore[misc]
    """A Trainer whose checkpoints are written in the background. It must be the last of the base classes.

        class MyTrainer(AsyncCheckpointing): ...
        class MySFTTrainer(SFTTrainer, AsyncCheckpointing): ...

    `checkpoint-<step>` appears in `output_dir` once it is durable as a whole. One save is under way at a time: the next
    save, the end of `train`, even by an exception, and the interpreter's exit wait for it. The next save and a normal
    end of `train` raise its error; on ranks where it has not failed, they raise PeerFailedError.

    `layout = "transformers"` writes the files of the plain Trainer, which can resume from them. `layout = "archive"`
    writes one verified archive instead of the files of the optimizer, the scheduler, the scaler and the random states.
    With either, both can be loaded. `all_figures` logs all figures of each save, not only stall, time and bandwidth.

    `output_dir` may be a URL. There, a checkpoint is complete when it has its `trainer_state.json`, which is put last
    and deleted first. All other files of the Trainer then go to the local folder `trainer_output`.

    The constructor raises ImportError without Transformers, RuntimeError if its version lacks a name that is used here,
    NotImplementedError for XLA and a tp_plan, for DeepSpeed with a URL or `layout = "archive"`, and for FSDP1 with
    adapters, hybrid sharding or LOCAL_STATE_DICT, and ValueError for another layout, and for `push_to_hub` with a URL.
    """

    layout: Layout = "transformers"
    all_figures: bool = False
    args: Any

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        mro = cls.__mro__
        for base in mro[mro.index(AsyncCheckpointing) + 1 : mro.index(Trainer)]:
            if "_save_checkpoint" in vars(base):
                raise TypeError(
                    f"AsyncCheckpointing would hide {base.__name__}._save_checkpoint; put it behind: "
                    f"class {cls.__name__}({base.__name__}, AsyncCheckpointing)"
                )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        require("transformers")
        super().__init__(*args, **kwargs)
        self._begin_async()

    def _begin_async(self) -> None:
        """The end of the constructor. Raises for unsupported settings now, so that they do not end a training later."""
        require_names(require("transformers"), Trainer, _USED)
        if is_url(self.args.output_dir):
            with suppress(OSError):
                os.removedirs(self.args.output_dir)  # the Trainer has created a local folder with this name
        if self.layout not in ("transformers", "archive"):
            raise ValueError(f'layout must be "transformers" or "archive", got {self.layout!r}')
        if self.is_fsdp_xla_enabled:
            raise NotImplementedError("AsyncCheckpointing does not support XLA; use the plain Trainer there")
        if self.is_deepspeed_enabled and self.layout == "archive":
            raise NotImplementedError('layout="archive" is not supported under DeepSpeed; leave it out')
        if self.is_deepspeed_enabled and is_url(self.args.output_dir):
            raise NotImplementedError("under DeepSpeed, output_dir must be a local folder")
        if not self.is_fsdp_enabled and any(map(sharded.is_dtensor, self.model.parameters())):
            raise NotImplementedError(
                "a model with a tp_plan is not supported; save it by an AsyncCheckpointer in a loop of your own"
            )
        if self.is_fsdp_enabled:
            refuse(self.accelerator.state.fsdp_plugin, has_adapters=peft_config_of(self.model) is not None)
        self._saves = FolderSaves("transformers")
        self._url: str | None = None
        self._resumed: str | None = None  # the checkpoint from which the training resumed
        if is_url(self.args.output_dir):
            self._write_to(self.args.output_dir)
        # Before callbacks that close loggers; in a new list, since this may run in a callback, during an iteration.
        self.callback_handler.callbacks = [_BeginAndEnd(self), *self.callback_handler.callbacks]

    def _write_to(self, url: str) -> None:
        """Write checkpoints and the model to a URL, and the trainer's other files to its default folder."""
        if self.args.push_to_hub:
            raise ValueError("push_to_hub sends files of output_dir; give a local path")
        self._url, self.args = url.rstrip("/"), copy.copy(self.args)
        self.args.output_dir = _OUTPUT_DIR

    # --- training ---------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """`Trainer.train`, which also resumes from a URL. Returns when the last checkpoint is durable.

        With `resume_from_checkpoint=True`, checkpoints whose files have changed are skipped, with a warning.

        Raises RunTakenError while another trainer writes to `output_dir`, CorruptCheckpointError for a checkpoint whose
        files have changed since the save, and the error of a save that failed.
        """
        newest_first = partial(self._newest_first, resume_from_checkpoint)
        with self._output_dir_of_its_own(), sound_folder(resume_from_checkpoint, newest_first) as folder:
            try:
                output = super().train(folder, *args, **kwargs)
            except BaseException as error:
                self._wait_beside(error)
                self._close_history()
                raise
            self.wait_for_checkpoint()
            self._close_history()
            return output

    def _newest_first(self, resume: Any) -> list[str]:
        """The checkpoints beside the one from which to resume; with True, those of this training."""
        folder = (self._url or self.args.output_dir) if resume is True else os.path.dirname(str(resume).rstrip("/"))
        found = StoredRun(folder, STATE).newest_first() if is_url(folder) else LocalRun(folder).newest_first()
        if not found and resume is True and self._url is not None:
            raise ValueError(f"there is no whole checkpoint in {self._url}; leave out resume_from_checkpoint")
        return found

    def _close_history(self) -> None:
        if self._saves.run is not None and self.args.should_save and not self.args.push_to_hub:
            note_closed(self._saves.run.place(""))

    def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint that is under way is durable and in its folder. Raises its error if it failed.

        Ranks that write nothing return at once.

        trainer.wait_for_checkpoint()  # such as in a callback's `on_save`
        """
        done = self._saves.wait()
        if isinstance(done, TrainerSave):
            self._log_save(done)
            if self.args.should_save:
                done.run.retire(done.name, self.args.save_total_limit, self.state.best_model_checkpoint)

    def _wait_on_all_ranks(self) -> None:
        """Wait for the checkpoint on all ranks. Every rank raises an error if it failed on any."""
        meet(self.wait_for_checkpoint)

    def _wait_beside(self, error: BaseException) -> None:
        with noted_on(error):
            self.wait_for_checkpoint()
        run = self._saves.run
        if run is not None and self.args.should_save:
            with suppress(Exception):  # another error is raised already
                # With several ranks, others may still read an archive.
                run.end() if self.args.world_size == 1 else run.make_room()

    def _output_dir_of_its_own(self) -> AbstractContextManager[object]:
        writes_there = self.args.should_save and self._url is None
        return FolderHold(Path(self.args.output_dir), _LOCK) if writes_there else nullcontext()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if _IN_SUMMARY in logs:
            self._wait_on_all_ranks()  # the last row of a training is its summary
        super().log(logs, *args, **kwargs)
        pending = self._saves.pending
        if pending is not None and pending.handle.done() and pending.handle.exception() is None:
            self.wait_for_checkpoint()

    def _log_save(self, save: TrainerSave) -> None:
        """Log the figures of a save with its step, after the rows that existed when it began.

        So the order of the rows does not depend on how long a save takes. The figures of a save that began after the
        summary go only to the loggers.
        """
        figures = {key: value for key, value in save.figures().items() if math.isfinite(value)}
        figures = {key: value for key, value in figures.items() if self.all_figures or key in _FIGURES} | save.epoch
        history = self.state.log_history
        if save.row_before is None or _IN_SUMMARY not in save.row_before:
            at = next((i for i, row in enumerate(history, 1) if row is save.row_before), 0)
            history.insert(at, {**figures, "step": save.step})
        then = copy.copy(self.state)
        then.global_step = save.step
        # A copy of the control, so that a log that is due stays due.
        self.callback_handler.on_log(self.args, then, copy.copy(self.control), figures)

    def _compare_order(self, loader: Any) -> None:
        """Warn if the skipped batches are not those that the training had seen at the checkpoint."""
        path = None if self._resumed is None or self.args.ignore_data_skip else Path(self._resumed, ORDER)
        if path is not None and path.is_file():
            warn_of_order({ORDER: path.read_bytes()}, [loader], str(path.parent))

    def _end(self) -> None:
        """The end of a training, before any logger is closed."""
        self._wait_on_all_ranks()
        run, best = self._saves.run, self.state.best_model_checkpoint
        if run is None or not self.args.should_save:
            return
        if self.args.save_total_limit == 1 and best is not None and run.has(os.path.basename(best)):
            run.retire(os.path.basename(best), 1, None)  # the trainer has done this only with the folders it saw
        run.end()

    # --- saving -----------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:  # noqa: ARG002
        """Take the snapshot of a checkpoint, and write it in the background.

        All ranks meet four times, so that an error of any is raised on all: when the previous save has ended, since
        slices may be made by collectives; when each has its snapshot; when the folder is ready; and when every save has
        begun.
        """
        began = timing.monotonic()
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        run_dir, name = self._get_output_dir(trial=trial), f"{_PREFIX}-{self.state.global_step}"
        save: TrainerSave | None = None

        def take() -> dict[str, bytes]:
            """Take this rank's snapshot. Returns the files of its random states, by name."""
            nonlocal save
            save = self._take(self._enter(run_dir), name, began)
            return {} if self.args.save_only_model else written_by(self._save_rng_state, in_memory=True)

        meet(self._wait_for_last)
        rng = {file: data for files in meet(take) for file, data in files.items()}
        run = self._enter(run_dir)
        self._note_best(run, name)
        meet(lambda: self._make_ready(run, name))
        files = self._files_of_engine(name) if self.is_deepspeed_enabled else None
        meet(lambda: self._begin(save, rng, files))
        if self.args.push_to_hub:
            self._wait_on_all_ranks()
            if save is not None and self.args.should_save:
                run.end()  # hidden files would be pushed, too
            self._push_from_checkpoint(run.place(name))

    def _wait_for_last(self) -> None:
        """Wait for the push under way, which includes hidden files in `output_dir`, and for the save."""
        push = getattr(self, "push_in_progress", None)
        if push is not None:
            push.wait_until_done()
        self.wait_for_checkpoint()

    def _take(self, run: LocalRun | StoredRun, name: str, began: float) -> TrainerSave | None:
        """Take this rank's snapshot. Returns its part of the save; None if this rank writes nothing."""
        is_spread = self.is_fsdp_enabled or self.is_deepspeed_enabled
        parts = parts_of(self) if self.args.should_save or is_spread else {}
        if not self.args.should_save and not self.is_fsdp_enabled:
            return None
        files = {} if is_spread else self._files_of_subclass(parts)
        if not self.args.push_to_hub:  # the hub gets what the plain Trainer pushes
            files |= order_file([self.callback_handler.train_dataloader])
        return TrainerSave(run, name, snapshot(parts, guard=self._guards() or None), files, began)

    def _guards(self) -> list[Any]:
        if not self.is_deepspeed_enabled:
            return self._saves.guard([self.optimizer])
        from ..deepspeed.trainer_files import for_trainer  # it imports DeepSpeed

        return for_trainer(self.deepspeed).guards()

    def _files_of_engine(self, name: str) -> Any:
        """Begin to write the files of the engine. Every rank calls this. Each `train` creates an engine."""
        from ..deepspeed.trainer_files import begin_files

        only_trained = peft_config_of(self.model) is not None
        return begin_files(self._saves, self.deepspeed, name, exclude_frozen_parameters=only_trained)

    def _make_ready(self, run: LocalRun | StoredRun, name: str) -> None:
        """Remove leftovers of earlier saves from the paths to which ranks will write. No rank writes meanwhile."""
        if self.args.should_save:
            _clear_jit_mark(Path(run.place(name)))
            run.begin(name)

    def _begin(self, save: TrainerSave | None, rng: Mapping[str, bytes], files: TrainingArchive | None) -> None:
        """Begin to write this rank's part of a save."""
        if self.args.should_save:
            self._note_callbacks()
        if save is not None:
            self._saves.begun(save, save.begin(self, rng, files))

    def _get_output_dir(self, trial: Any) -> str:
        """The folder of the checkpoints of a training, which may be a URL."""
        folder: str = super()._get_output_dir(trial=trial)
        if self._url is None:
            return folder
        below = os.path.relpath(folder, self.args.output_dir)
        return self._url if below == os.curdir else f"{self._url}/{Path(below).as_posix()}"

    def _enter(self, run_dir: str) -> LocalRun | StoredRun:
        """The run in a folder. Before the first save there, leftovers of killed trainers are removed."""
        run = StoredRun(run_dir, STATE) if self._url is not None else LocalRun(run_dir)
        return self._saves.enter(run, writes=self.args.should_save)

    def _files_of_subclass(self, parts: dict[str, Any]) -> dict[str, bytes]:
        """The files of methods that a subclass overrides, written now, since these methods read the live state.

        Their parts are removed from `parts`.
        """
        files: dict[str, bytes] = {}
        is_quantized = getattr(self.model, "hf_quantizer", None) is not None and peft_config_of(self.model) is None
        if is_quantized or self._overrides("_save") or self._overrides("save_model"):
            files |= written_by(partial(self.save_model, _internal_call=True))
            del parts["model"]
        if "optimizer" in parts and self._overrides("_save_optimizer_and_scheduler"):
            files |= written_by(self._save_optimizer_and_scheduler)
            del parts["optimizer"], parts["scheduler"]
        if "scaler" in parts and self._overrides("_save_scaler"):
            files |= written_by(self._save_scaler)
            del parts["scaler"]
        return files

    def _overrides(self, name: str) -> bool:
        mro = type(self).__mro__
        return any(name in vars(kind) for kind in mro[: mro.index(Trainer)] if kind is not AsyncCheckpointing)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """`Trainer.save_model`, which also writes to a URL."""
        url = self._url if output_dir is None else output_dir
        with local_work_dir(url) if url is not None and is_url(url) else nullcontext(output_dir) as folder:
            super().save_model(folder, _internal_call)
            if self._saves.of_engine is not None:  # DeepSpeed may have saved to the folder
                self._saves.of_engine.wait()

    def _note_best(self, run: LocalRun | StoredRun, name: str) -> None:
        """Set `best_model_checkpoint` to the folder of the best step, if it was saved or is being saved."""
        if step := getattr(self.state, "best_global_step", None):
            best = f"{_PREFIX}-{step}"
            if best == name or run.has(best):
                self.state.best_model_checkpoint = run.named(best)

    def _note_callbacks(self) -> None:
        """Update the states of callbacks in the trainer's state."""
        kept = self.state.stateful_callbacks
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                name = type(callback).__name__
                if isinstance(kept[name], list):
                    kept[name].append(callback.state())
                else:
                    kept[name] = callback.state()

    # --- loading ----------------------------------------------------------------------------------------------

    def _load_best_model(self) -> None:
        self._wait_on_all_ranks()
        best = self.state.best_model_checkpoint
        with local(best) as folder:
            check(folder)
            if not self._restore_model(archive_in(folder), self.model):
                self.state.best_model_checkpoint = folder
                super()._load_best_model()
        self.state.best_model_checkpoint = best

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._refuse_scaler(resume_from_checkpoint)
        if not self._restore_model(archive_in(resume_from_checkpoint), self.model if model is None else model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _refuse_scaler(self, checkpoint: str) -> None:
        """Refuse the state of a scaler if this training has none, before the model is filled. The Trainer would raise
        AttributeError afterwards.
        """
        if getattr(self.accelerator, "scaler", None) is None and (
            os.path.isfile(os.path.join(checkpoint, FILES["scaler"]))
            or ((archive := archive_in(checkpoint)) is not None and not missing_in(archive, ["scaler"]))
        ):
            raise StateMismatchError(
                f"{checkpoint} has the state of a GradScaler, but this training has none; train in the precision that "
                "was saved; nothing was overwritten",
                unexpected=("scaler",),
            )

    def _restore_model(self, archive: Path | None, model: Any) -> bool:
        """Fill the model from an archive. Returns False if the archive has no model."""
        if archive is None or not archive.is_dir():  # the weights are in it only if several ranks wrote it
            return False
        weights = weights_of(model) if peft_config_of(model) is None else written_weights(model)
        restore({"model": weights}, archive, select="model")
        take_back(model, weights, strict=peft_config_of(model) is None)
        return True

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self._resumed = checkpoint
        archive = archive_in(checkpoint)
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        if archive is None:
            if checkpoint is not None and has_optimizer(checkpoint):
                optimizer_to_fill(self.model, optimizer)  # for FSDP1, accelerate loads only into existing state
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        if lacking := missing_in(archive, ["optimizer", "scheduler"]):  # the Trainer continues, too
            self._report_lacking(checkpoint, lacking)
        else:
            to_fill = optimizer_to_fill(self.model, optimizer)
            live = {"optimizer": to_fill, "scheduler": self.lr_scheduler}
            restore(live, archive, select=tuple(live))
            take_back_optimizer(self.model, optimizer, to_fill)

    def _load_scaler(self, checkpoint: str | None) -> None:
        archive, scaler = archive_in(checkpoint), getattr(self.accelerator, "scaler", None)
        if archive is None:
            super()._load_scaler(checkpoint)
        elif scaler is not None and not missing_in(archive, ["scaler"]):
            restore({"scaler": scaler}, archive, select="scaler")
        elif scaler is not None:
            self._report_lacking(checkpoint, ["scaler"])

    def _report_lacking(self, checkpoint: str | None, parts: list[str]) -> None:
        _log.warning("async_ckpt: %s has no %s; training continues with new ones", checkpoint, " and no ".join(parts))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        archive = archive_in(checkpoint)
        if archive is None:
            super()._load_rng_state(checkpoint)
            return
        with tempfile.TemporaryDirectory() as folder:
            write_files(load(archive, select="rng")["rng"], folder)
            super()._load_rng_state(folder)


class _BeginAndEnd(TrainerCallback):  # type: ignore[misc]
    """Compares the order of the data at the beginning. At the end, waits for the last checkpoint, while loggers are
    still open for its figures.
    """

    def __init__(self, trainer: AsyncCheckpointing) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, train_dataloader: Any = None, **__: Any) -> None:
        self._trainer._compare_order(train_dataloader)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._trainer._end()


def _clear_jit_mark(folder: Path) -> None:
    """Remove a folder that contains at most the trainer's mark. The trainer creates it on SIGTERM, or a subclass before
    the save.
    """
    if folder.is_dir() and {path.name for path in folder.iterdir()} <= {_JIT_MARK}:
        shutil.rmtree(folder)
