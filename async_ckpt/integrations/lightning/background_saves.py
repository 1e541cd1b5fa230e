"""The saves, links and removals of one plugin, in the order of their calls.

In: checkpoints and paths, on the training thread. Out: files and folders, reports, errors.
Knows nothing of: Lightning.

A save copies its state once, during the call. A link or a removal waits for the saves before it, and is skipped if one
of them fails: so there is always a complete checkpoint, under the old name or the new one.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from ... import SaveReport, save, wrap
from ...plumbing import process, rendezvous
from ..common.event_history import HistoryEntry, note_closed
from ..common.joint_errors import meet
from ..common.save_queue import Action, SaveQueue, path_key
from ..common.step_guard import StepGuard
from ..common.training_archive import archive_of
from .checkpoint_paths import (
    REST,
    forget_listing,
    hidden_beside,
    is_link,
    publish_shards,
    remove,
    rename,
    rename_both,
)

_ADVICE: Final = "save on every rank"
_log = logging.getLogger("async_ckpt")


class BackgroundSaves:
    """The saves, links and removals of one plugin. Owned by the training thread; `SaveQueue` has the second thread.

    Between `begin_run` and `end_run` a training runs, and `end_run` waits for its saves. After `end_run`, each save
    waits until it is durable. Without `begin_run`, as with Fabric, the exit of the interpreter waits.
    """

    def __init__(self, max_in_flight: int, remove_file: Callable[[Any], None]) -> None:
        self._queue = SaveQueue("lightning", max_in_flight)
        self._remove_file = remove_file
        self._removals: list[str] = []  # requested, but not in the queue yet
        self._twin: str | None = None  # the second name for saves in the block of `also_named`
        self._saved_twin: tuple[str, int | None] | None = None  # the second name of the newest save, and its step
        self._guard: list[Any] = []
        self._choose_guard = StepGuard()
        self._has_ended = False
        self._ended_by: BaseException | None = None
        self._undo = ExitStack()
        self.newest_path: str | None = None  # as in the report of the newest save
        self._max_in_flight = max_in_flight
        self._folders: set[str] = set()  # with saves since the training began

    def __reduce__(self) -> Any:
        """A copy, for example in a process that Lightning spawns, has no saves under way and no guard."""
        return type(self), (self._max_in_flight, self._remove_file), {"_has_ended": self._has_ended}

    # --- saves ----------------------------------------------------------------------------------------------------

    def save_file(self, checkpoint: Mapping[str, Any], path: Any) -> None:
        """Copy a checkpoint, and write the file that `torch.save` writes. Raises the error of an earlier save, and then
        saves nothing. Also raises the errors of `wrap`.
        """
        step = _step_in(checkpoint)
        if self._is_saved(path, step):
            return
        waited_seconds = self._begin(path)
        written, twin = path, self._second_name(path, step)
        then: Action | None = None
        if twin is not None:
            written = hidden_beside(path)
            then = partial(rename_both, written, Path(path), Path(twin))
        elif is_link(path):  # replace the link, not its target
            written = hidden_beside(path)
            then = partial(rename, written, Path(path))
        handle = wrap(torch.save, guard=self._guard or None)(checkpoint, written)
        entry = self._entry(path, step, checkpoint)
        self._queue.add(path, [handle], then, step=step, waited_seconds=waited_seconds, twin=twin, entry=entry)
        self._wait_if_last(path)

    def save_shards(self, strategy: Any, path: Any, parts: dict[str, Any], rest: dict[str, Any]) -> None:
        """Copy sharded state dicts on all ranks, and write a folder of archives. The error of an earlier save on any
        rank is raised on all of them.

        The folder is written under a hidden name. Rank 0 renames it when it is durable as a whole.
        """
        rank, step = strategy.global_rank, _step_in(rest)
        if self._is_saved(path, step):
            return

        def begin() -> tuple[str, float]:
            waited_seconds = self._begin(path)
            if rank == 0:
                shutil.rmtree(hidden_beside(path), ignore_errors=True)  # left by a killed process
            return str(path), waited_seconds

        of_ranks = meet(begin)
        path, waited_seconds = of_ranks[0][0], of_ranks[rank][1]
        hidden, twin = hidden_beside(path), self._second_name(path, step)
        handles = [save(parts, archive_of(hidden, strategy.world_size), guard=self._guard or None)]
        entry = None
        if rank == 0:
            handles.append(wrap(torch.save)(rest, hidden / REST))
            entry = self._entry(path, step, rest)
        call = rendezvous.Channel.of_group("lightning", _ADVICE, is_of_paths=True).call(path=path)
        second = None if twin is None else Path(twin)
        publish = partial(publish_shards, hidden, Path(path), strategy.world_size, second)
        self._queue.add(
            path,
            handles,
            partial(call.conclude, publish),
            step=step,
            waited_seconds=waited_seconds,
            twin=twin,
            failed=call.fail,
            entry=entry,
        )
        self._wait_if_last(path)

    @contextmanager
    def also_named(self, twin: str) -> Iterator[None]:
        """Give each save in the block a second name. A save of the same step to that name is then skipped.

        The second name appears just before the first, so that a training that resumes from it never gets an older
        step. A checkpoint at a URL has no second name.
        """
        self._twin = path_key(twin)
        try:
            yield
        finally:
            self._twin = None

    def _second_name(self, path: Any, step: int | None) -> str | None:
        twin = self._twin
        if twin is None or "://" in f"{path}{twin}" or twin == path_key(path):
            return None
        self._saved_twin = twin, step
        return twin

    def _is_saved(self, path: Any, step: int | None) -> bool:
        """True if the newest save has this step, and this path as its second name."""
        saved, self._saved_twin = self._saved_twin, None
        return saved == (path_key(path), step)

    def _entry(self, path: Any, step: int | None, checkpoint: Mapping[str, Any]) -> HistoryEntry:
        """The entry for the history of a checkpoint's folder. The end of the training will be noted there, too."""
        folder, _, name = path_key(path).rpartition("/")
        self._folders.add(folder)
        return HistoryEntry(folder, name, step, _record_of(checkpoint))

    def _begin(self, path: Any) -> float:
        """Wait until a save to this path may begin. Returns the seconds waited. Raises the error of an earlier save."""
        self._queue_removals()
        waited_seconds = self._queue.admit(path)
        self.raise_error()
        self.newest_path = path_key(path)
        return waited_seconds

    def _wait_if_last(self, path: Any) -> None:
        """Wait for the save if nothing else will: after a training, or before SLURM kills and requeues the job."""
        if self._has_ended or os.path.basename(path).startswith("hpc_ckpt_"):
            self.finish()
            self.raise_error()

    # --- actions after saves --------------------------------------------------------------------------------------

    def follow(self, path: Any, action: Action) -> None:
        """Call `action` for a path after the saves so far, unless one of them fails."""
        self._queue.follow(path, action)

    def remove(self, path: Any) -> None:
        """Remove a checkpoint after the saves so far, unless one of them fails.

        ModelCheckpoint requests the removal of the old file before it moves its link away from it. So the removal joins
        the queue only at the end of the batch, or with the next save.
        """
        self._removals.append(path_key(path))

    def is_to_go(self, path: Any) -> bool:
        """True if this path, or the target of the link, is about to be removed.

        Also True for the second name of the newest save: Lightning, which saves to it next, must find it free.
        """
        key = path_key(path)
        target = path_key(os.path.realpath(key)) if is_link(key) else key
        going = {path_key(os.path.realpath(removal)) for removal in self._removals if "://" not in removal}
        return (self._saved_twin is not None and self._saved_twin[0] == key) or target in {*going, *self._removals}

    def _queue_removals(self) -> None:
        removals, self._removals = self._removals, []
        for path in removals:
            self.follow(path, partial(remove, path, self._remove_file))

    # --- waits, and the outcome of saves --------------------------------------------------------------------------

    def finish(self, path: Any = None) -> None:
        """Wait for everything, or only for saves and actions at one path. Does not raise the errors of saves."""
        if path is None or path_key(path) in self._removals:
            self._queue_removals()
        self._queue.wait(path)
        for saved_to in (path, *self._folders):
            forget_listing(saved_to)

    def take_reports(self) -> list[SaveReport]:
        """The reports of the saves that have succeeded since the last call. Requested removals join the queue."""
        self._queue_removals()
        return self._queue.take_reports()

    def raise_error(self) -> None:
        """Raise the first error since the last call.

        If an exception has ended the training, all errors are logged and added to it as notes, so as not to hide it.
        """
        errors = self._queue.take_errors()
        if errors and self._ended_by is None:
            raise errors[0]
        for error in errors:
            _log.error("a checkpoint was not saved: %s: %s", type(error).__name__, error)
            assert self._ended_by is not None
            self._ended_by.add_note(f"async_ckpt: a checkpoint was not saved: {type(error).__name__}: {error}")

    # --- a training -----------------------------------------------------------------------------------------------

    def begin_run(self) -> ExitStack:
        """Begin a training. Returns a stack of callbacks for its end.

        Trainings that an exception has ended are ended here, too: if another callback raises in `on_exception`,
        Lightning calls no teardown.
        """
        _end(saves for saves in _running if saves._ended_by is not None)
        self._has_ended, self._ended_by = False, None
        _running.add(self)
        return self._undo

    def end_run_by(self, exception: BaseException) -> None:
        """Note the exception that ends the training."""
        self._ended_by = exception

    def end_run(self) -> None:
        """Wait for everything, run the callbacks of the stack, and raise the first error. May be called again."""
        self.finish()
        self._queue.stop()
        self._undo.close()
        for folder in self._folders:
            note_closed(folder)
        self._folders.clear()
        self._guard, self._has_ended = [], True
        _running.discard(self)
        try:
            self.raise_error()
        finally:
            self._ended_by = None

    @property
    def guard(self) -> Sequence[Any]:
        """The optimizers whose `step()` is the only code that changes their parameters and state."""
        return tuple(self._guard)

    def set_guard(self, optimizers: Sequence[Any]) -> None:
        """Guard these optimizers, except those that change tensors outside of `step()`. Warns once about these."""
        self._guard = self._choose_guard(optimizers)

    def __repr__(self) -> str:
        return f"<BackgroundSaves {self._queue!r}>"


# Trainings in this process. In a process that Lightning has spawned, a training that fails ends without a teardown.
_running: set[BackgroundSaves] = set()


def _end(running: Iterable[BackgroundSaves]) -> None:
    """End trainings: do requested removals, release the folders. At the interpreter's exit, all that still run."""
    for saves in [*running]:
        try:
            saves.end_run()
        except Exception as error:
            _log.error("a checkpoint was not saved: %s: %s", type(error).__name__, error)


process.in_forked_child(_running.clear)
threading._register_atexit(partial(_end, _running))  # type: ignore[attr-defined]


def _step_in(checkpoint: Mapping[str, Any]) -> int | None:
    """The step in a checkpoint of the Trainer, or the entry `step` of a user of Fabric."""
    step = checkpoint.get("global_step", checkpoint.get("step"))
    return step if isinstance(step, int) else None


def _record_of(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The epoch, and the metrics that ModelCheckpoint callbacks monitor."""
    record = {"epoch": checkpoint["epoch"]} if "epoch" in checkpoint else {}
    callbacks = checkpoint.get("callbacks")
    for state in callbacks.values() if isinstance(callbacks, Mapping) else ():
        if isinstance(state, Mapping) and isinstance(state.get("monitor"), str):
            score = state.get("current_score")
            record[state["monitor"]] = score.item() if isinstance(score, torch.Tensor) else score
    return record
