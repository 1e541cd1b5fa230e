"""`FSDPCheckpoints`: the checkpoint calls of SkyRL's FSDP strategy, with archives that any number of ranks can load.
`FSDPWorkerCheckpoints` makes SkyRL's workers create such a strategy.

In: model, optimizer and scheduler of each rank, and the folder of a checkpoint. Out: archives there, or SkyRL's own
files, or both; objects filled from them. Knows nothing of: the callers, the names of checkpoints.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, Literal

from ... import AsyncCheckpointer, PerRank, RngState, SaveHandle
from ...errors import NotCommittedError, StateMismatchError
from ...files import exists
from ...plumbing import leaf_names, urls, worlds
from ..common.joint_errors import meet
from ..common.step_guard import StepGuard
from ..common.training_archive import refuse_missing

# The folder of our archives in a checkpoint's folder.
_ARCHIVES: Final = "async_ckpt"
# SkyRL's folder of the configurations of model and tokenizer there.
_CONFIGS: Final = "huggingface"

Layout = Literal["async_ckpt", "skyrl", "both"]


class FSDPCheckpoints:
    """`save_checkpoint` and `load_checkpoint` of SkyRL's FSDPStrategy, on each rank: the first base class before it.

        class Strategy(FSDPCheckpoints, FSDPStrategy):
            layout = "both"

    In the background, each rank saves its part of model, optimizer, scheduler and random state as one archive in the
    subfolder `async_ckpt` of the checkpoint's folder; any number of ranks can load these archives. With
    `layout = "skyrl"`, only SkyRL's own files are written, one for each rank, which only the same number of ranks can
    load; with "both", both are written. Loading prefers our archives.

    A checkpoint exists when `finalize_pending_saves` has returned on all ranks, or the handle is done. SkyRL's trainer
    does not wait for that: see `TrainerCheckpoints`.
    """

    layout: Layout = "async_ckpt"
    _saving: tuple[AsyncCheckpointer, SaveHandle] | None = None

    @cached_property
    def _guard(self) -> StepGuard:
        return StepGuard()

    def save_checkpoint(
        self,
        model: Any,
        ckpt_dir: urls.StrPath,
        node_local_rank: int,
        optimizer: Any = None,
        scheduler: Any = None,
        client_state: Mapping[str, Any] = MappingProxyType({}),
        tag: str | None = None,
        tokenizer: Any = None,
    ) -> SaveHandle | None:
        """Save on all ranks. Returns a handle once training may continue; None if only SkyRL's own files are written.

        Large tensors may be copied after the call; the next step of the optimizer waits for these copies. Waits for an
        earlier save that is under way, and raises its error on all ranks.
        """
        self.finalize_pending_saves()
        if self.layout not in ("async_ckpt", "skyrl", "both"):
            raise ValueError(f'layout must be "async_ckpt", "skyrl" or "both", got {self.layout!r}')
        if self.layout != "async_ckpt":
            extra = {"client_state": dict(client_state), "tag": tag, "tokenizer": tokenizer}
            super().save_checkpoint(  # type: ignore[misc]
                model, ckpt_dir, node_local_rank, optimizer=optimizer, scheduler=scheduler, **extra
            )
        if self.layout == "skyrl":
            return None
        if self.layout == "async_ckpt":
            meet(lambda: self._write_configs(model, ckpt_dir, tokenizer))
        ckpt = AsyncCheckpointer(_archives_in(ckpt_dir))
        state = self._parts(model, optimizer, scheduler) | {
            "client_state": dict(client_state),
            "tag": tag,
            "world_size": worlds.ranks()[1],
        }
        guard = [] if optimizer is None else self._guard([optimizer])
        handle = ckpt.save(state, _step_of(ckpt_dir), overwrite=True, guard=guard or None)
        self._saving = ckpt, handle
        return handle

    def load_checkpoint(
        self,
        model: Any,
        ckpt_dir: urls.StrPath,
        optimizer: Any = None,
        scheduler: Any = None,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
    ) -> tuple[urls.StrPath, dict[str, Any]]:
        """Fill model, optimizer and scheduler in place, on all ranks. Returns the folder, and the other saved values.

        The random generators of each rank are restored only in a world of the size that has saved them; otherwise they
        stay unchanged. If `client_state` differs between ranks, each rank gets its own; in a world of another size,
        this raises StateMismatchError, as does a checkpoint without one of the objects. Waits for an earlier save that
        is under way, and warns if it fails; `finalize_pending_saves` raises its error. Raises NotCommittedError for a
        folder with neither our archives nor, if the next base class has this method, SkyRL's files.
        """
        self._finish_own_save()
        archives = _archives_in(ckpt_dir)
        with contextlib.ExitStack() as stack:
            ckpt = stack.enter_context(AsyncCheckpointer(archives)) if exists(archives) else None
            step = None if ckpt is None else ckpt.latest()
            if ckpt is None or step is None:
                return self._load_skyrl_files(
                    model,
                    ckpt_dir,
                    optimizer=optimizer,
                    scheduler=scheduler,
                    tag=tag,
                    load_module_strict=load_module_strict,
                    load_optimizer_states=load_optimizer_states,
                    load_lr_scheduler_states=load_lr_scheduler_states,
                )
            rank, world_size = worlds.ranks()
            extra = ckpt.load(step, select=["client_state", "tag", "world_size"])
            extra = _values_of_rank(extra, rank if extra["world_size"] == world_size else None, ())
            parts = self._parts(
                model, optimizer if load_optimizer_states else None, scheduler if load_lr_scheduler_states else None
            )
            if extra["world_size"] != world_size:
                del parts["rng"]
            refuse_missing(archives, parts)  # `strict` concerns only the names of parameters
            ckpt.restore(parts, step, strict=load_module_strict)
        return ckpt_dir, {**extra, "rank": rank, "fsdp_strategy": getattr(self, "fsdp_strategy", None)}

    def _load_skyrl_files(
        self, model: Any, ckpt_dir: urls.StrPath, **options: Any
    ) -> tuple[urls.StrPath, dict[str, Any]]:
        missing: FileNotFoundError | None = None
        if hasattr(super(), "load_checkpoint"):
            try:
                load: Callable[..., tuple[urls.StrPath, dict[str, Any]]] = super().load_checkpoint  # type: ignore[misc]
                return load(model, ckpt_dir, **options)
            except FileNotFoundError as error:
                missing = error
        why = f", and of the files of SkyRL: {missing}" if missing else ""
        raise NotCommittedError(
            f"{_archives_in(ckpt_dir)}: no committed checkpoint there{why}", path=urls.text_of(ckpt_dir), step=None
        ) from missing

    def finalize_pending_saves(self, *_: Any, **__: Any) -> None:
        """Wait until the save under way is committed, and raise its error. SkyRL's arguments are ignored."""
        if self._saving is not None:
            (ckpt, handle), self._saving = self._saving, None
            wait([handle])  # a dispatch in this process may call this on a thread of the library
            with ckpt:
                handle.result()

    def has_pending_save(self) -> bool:
        """True if this rank's part of a save is under way. Does not wait."""
        return self._saving is not None and not self._saving[1].done()

    def _finish_own_save(self) -> None:
        if self._saving is None or (error := self._saving[1].exception()) is None:
            self.finalize_pending_saves()
            return
        failed = f"{self._saving[1].path}, which was not saved: {type(error).__name__}: {error}"
        warnings.warn(f"load_checkpoint() continues without {failed}", RuntimeWarning, stacklevel=3)

    def _write_configs(self, model: Any, ckpt_dir: urls.StrPath, tokenizer: Any) -> None:
        """On rank 0, let SkyRL write its small folder of configurations, if the model has a config."""
        write = getattr(super(), "save_hf_configs", None)
        config = getattr(_unwrapped(model), "config", None)
        if write is not None and config is not None and worlds.ranks()[0] == 0:
            write(config, f"{urls.text_of(ckpt_dir).rstrip('/')}/{_CONFIGS}", tokenizer)

    def _parts(self, model: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
        parts = {"model": _unwrapped(model), "optimizer": optimizer, "scheduler": scheduler}
        return {name: part for name, part in parts.items() if part is not None} | {"rng": RngState("skyrl")}


class FSDPWorkerCheckpoints:
    """Workers of SkyRL whose strategy is an `FSDPCheckpoints`: the first base class, before a worker's class.

        class Policy(FSDPWorkerCheckpoints, FSDPPolicyWorkerBase):
            layout = "both"

        PolicyWorker = ray.remote(num_gpus=1)(Policy)

    A worker's `save_checkpoint` then returns when the state is copied. `TrainerCheckpoints` and `CheckpointBackend`
    ask the workers if it is durable.
    """

    layout: Layout = "async_ckpt"
    strategy: Any

    def init_model(self, *args: Any, **kwargs: Any) -> Any:
        """Create model and strategy as SkyRL does, and make the strategy save in the background."""
        result = super().init_model(*args, **kwargs)  # type: ignore[misc]
        made = self.strategy
        if not isinstance(made, FSDPCheckpoints):
            # SkyRL's worker hard-codes the class of its strategy in this method, and `__class__` of such an object
            # cannot be assigned.
            kind = type(type(made).__name__, (FSDPCheckpoints, type(made)), {"layout": self.layout})
            self.strategy = object.__new__(kind)
            vars(self.strategy).update(vars(made))
        return result

    def has_pending_save(self) -> bool:
        """True if a save of this worker is under way. Does not wait."""
        return bool(self.strategy.has_pending_save())

    def finalize_pending_saves(self) -> None:
        """Wait until the save under way is durable on all workers, and raise its error."""
        self.strategy.finalize_pending_saves()


def _unwrapped(model: Any) -> Any:
    """The model inside SkyRL's wrapper."""
    inner = getattr(model, "model", None) if type(model).__name__ == "HFModelWrapper" else None
    return model if inner is None else inner


def _values_of_rank(value: Any, rank: int | None, path: tuple[Any, ...]) -> Any:
    """A value in which this rank's own value replaces each `PerRank`.

    `rank` is None in a world of another size than that which has saved; a `PerRank` then raises StateMismatchError.
    """
    if isinstance(value, PerRank):
        if rank is None:
            raise StateMismatchError(
                f"{leaf_names.shown(path)} has a separate value for each rank that saved, and the number of ranks has "
                "changed; load it with async_ckpt.load, or save values that are the same on all ranks",
                mismatched=(leaf_names.shown(path),),
            )
        return value[rank]
    if isinstance(value, dict):
        return {key: _values_of_rank(inner, rank, (*path, key)) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_values_of_rank(inner, rank, (*path, i)) for i, inner in enumerate(value))
    return value


def _archives_in(ckpt_dir: urls.StrPath) -> str:
    return f"{urls.text_of(ckpt_dir).rstrip('/')}/{_ARCHIVES}"


def _step_of(ckpt_dir: urls.StrPath) -> int:
    """The step in SkyRL's name of the folder above; 0 for other names."""
    match = re.search(r"global_step_(\d+)", urls.text_of(ckpt_dir))
    return int(match[1]) if match else 0
