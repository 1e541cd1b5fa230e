"""`CheckpointBackend`: the checkpoint calls of SkyRL's Tinker backend, with no tenant waiting for a tar or an upload.
`FSDPCheckpoints`: those of its FSDP strategy, on every rank, with archives that any number of ranks loads.

In: an object with the methods of SkyRL's `WorkerDispatch`, paths, ids of models. Out: archives as SkyRL reads and
writes them, a handle for each; models loaded from them.
Knows nothing of: GPUs, databases.

A save has two halves. During the call, the workers write their files into a folder; then the models are free again.
In the background, that folder becomes one plain tar on a disk or in a store, with no worker involved; until it is
complete, the path has its old content. A checkpoint exists when its handle is done, not when the call returns: an
engine marks it as completed in `handle.add_done_callback`, or after `await handle`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import os
import re
import tarfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, Protocol, Self
from weakref import WeakSet, WeakValueDictionary

from ..around.pack import pack
from ..around.unpack import unpack
from ..around.wrap import wrap
from ..checkpointer import AsyncCheckpointer
from ..errors import CheckpointError, ClosedError, NotCommittedError, StateMismatchError
from ..files import exists
from ..host.waits import ENDS_THE_WAIT, Wait
from ..ranks.world import ranks
from ..saving.default import files_saver
from ..saving.handle import SaveHandle
from ..saving.ledger import raise_error_of
from ..saving.save import Save, wait_for_saves
from ..state.names import shown
from ..state.per_rank import PerRank
from ..state.rng import RngState
from ..storage.place import Place
from ..storage.url import StrPath as Where
from ..storage.url import text_of

_MARKER: Final = "MARKER"
# The folder of our archives in a checkpoint's folder.
_ARCHIVES: Final = "async_ckpt"
# The role whose weights are sent to the inference engines.
_SAMPLED: Final = "policy"


class Dispatch(Protocol):
    """The methods that every `WorkerDispatch` has. Those that take a `model_id` are given it.

    A folder to write does not exist yet, but its parent does; a folder to read exists.

    Newer ones also have `finalize_pending_saves(model)`, which returns when the files of a save are complete, and
    `async save_weights_for_sampler(model_id=None)`, which sends the weights to the inference engines.
    """

    def save_checkpoint(self, model: str, ckpt_dir: str, tokenizer: Any = None) -> object:
        """Have every worker write its files of model, optimizer and scheduler."""

    def load_checkpoint(
        self,
        model: str,
        ckpt_dir: str,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
    ) -> object:
        """Have every worker read its files."""

    def save_hf_model(self, model: str, export_dir: str, tokenizer: Any) -> object:
        """Write the model in the form that inference engines read."""


class CheckpointBackend:
    """Saves and loads the models of one dispatch.

    Args:
        dispatch: an object with SkyRL's methods; which of the newer ones it has is looked up once, here.
        role: the name under which the dispatch knows the models ("policy"), or a mapping from a model's id to that
            name, which may change: then only its ids are known.
        validate: called first in every call, with the model's id; it raises for one that cannot be saved or loaded.
        tokenizer: passed to the dispatch with every save.
        lora: the models are adapters of one base, so the inference engines must be told whose weights they get.
        scratch: the folder below which the workers write and read; by default beside an archive on a disk. For a URL
            it is the system's temp folder, which workers on other nodes do not see: give a shared one.
        place: called with every URL, it returns the Place to use, such as `lambda url: Place(url, options=…)`.

    Paths are strings, Paths, URLs, or objects of cloudpathlib. The dispatch is called on the caller's thread; give
    it one call at a time. Archives are streamed one after the other, in the order of the calls. A failed save is a
    warning at the next one, and is raised by `wait` and `close`, unless its handle's error was retrieved.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        *,
        role: str | Mapping[str, str] = "policy",
        validate: Callable[[str], object] | None = None,
        tokenizer: Any = None,
        lora: bool = False,
        scratch: str | os.PathLike[str] | None = None,
        place: Callable[[Where], Place] = Place,
    ) -> None:
        self._save = _required(dispatch, "save_checkpoint")
        self._load = _required(dispatch, "load_checkpoint")
        self._export = _required(dispatch, "save_hf_model")
        self._finalize = _optional(dispatch, "finalize_pending_saves")
        self._send = _optional(dispatch, "save_weights_for_sampler")
        self._role, self._validate, self._tokenizer, self._lora = role, validate, tokenizer, lora
        self._scratch = scratch
        self._place_of = place
        # The saver of all files holds the saves that go on, or that failed unseen; other handles may go.
        self._handles: WeakSet[SaveHandle] = WeakSet()
        self._newest: WeakValueDictionary[str, SaveHandle] = WeakValueDictionary()  # by path
        self._closed = False

    # --- saving -----------------------------------------------------------------------------------------------

    def save_checkpoint(self, output_path: Where, model_id: str) -> SaveHandle:
        """Save model, optimizer and scheduler as one tar; returns when the workers have written their files.

        Raises ValueError for an unknown model, before anything is written, and what the dispatch raises; nothing is
        left of the save then.
        """
        role = self._begin(model_id)

        def write(folder: str) -> None:
            self._save(model=role, ckpt_dir=folder, tokenizer=self._tokenizer, model_id=model_id)
            if self._finalize is not None:
                self._finalize(model=role, model_id=model_id)

        return self._pack(output_path, write)

    def save_sampler_checkpoint(self, output_path: Where, model_id: str, persist: bool = True) -> SaveHandle:
        """Send the weights to the inference engines, and save them as an export that others can sample from.

        With `persist=False` the archive is only a marker, which `load_checkpoint` refuses. The call waits until the
        weights are sent, if the dispatch does that. It raises RuntimeError, before anything is done, on a thread
        with a running event loop; use `save_sampler_checkpoint_async` there. Raises ValueError, before anything is
        done, for a model whose role is not "policy".
        """
        role = self._begin_sampler(model_id)
        if self._send is not None:
            _refuse_running_loop()
            asyncio.run(self._send_weights(model_id))
        return self._save_sampler(output_path, role, model_id, persist)

    async def save_sampler_checkpoint_async(
        self, output_path: Where, model_id: str, persist: bool = True
    ) -> SaveHandle:
        """The same call for an event loop, which goes on while weights are sent: `report = await (await …)`."""
        role = self._begin_sampler(model_id)
        if self._send is not None:
            await self._send_weights(model_id)
        return self._save_sampler(output_path, role, model_id, persist)

    # --- loading ----------------------------------------------------------------------------------------------

    def load_checkpoint(self, checkpoint_path: Where, model_id: str, load_optimizer: bool = True) -> None:
        """Load a model, with or without its optimizer and scheduler, from any tar: ours, SkyRL's, gzip or not.

        If a save to the same path is under way, it is waited for; if it failed, and its error was not retrieved yet,
        this raises the error. The unpacked files are removed in any case. Raises ValueError for an unknown model,
        FileNotFoundError, NotCommittedError for a marker, CorruptCheckpointError, UnsafeArchiveError, and what the
        dispatch raises.
        """
        role = self._role_of(model_id)
        place = self._place(checkpoint_path)
        storage, name = place.object()
        self._wait_for_save_to(_path_key(storage.locate(name)))
        # Reading creates no folders: without the archive's folder there is no archive either.
        beside = None if storage.remote or not (above := Path(storage.locate(""))).is_dir() else above
        with unpack(place, scratch=self._scratch or beside) as folder:
            self._load(
                model=role,
                ckpt_dir=str(folder),
                load_optimizer_states=load_optimizer,
                load_lr_scheduler_states=load_optimizer,
                model_id=model_id,
            )

    # --- the end ----------------------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> None:
        """Wait for every save begun so far, and the removal of its files; raise the first error not retrieved yet."""
        wait_for_saves(self._pending(), Wait("in wait()", ENDS_THE_WAIT), timeout)
        self._raise_unseen()

    def _place(self, path: Where) -> Place:
        place = Place(path)
        return place if place.is_local else self._place_of(path)

    def close(self) -> None:
        """Wait for every save, then refuse more. Raises the first error not retrieved yet. May be called again."""
        self._closed = True
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        try:
            self.close()
        except CheckpointError as failed:
            if error is None:
                raise
            error.add_note(f"async_ckpt: a save failed too: {type(failed).__name__}: {failed}")

    # --- parts ------------------------------------------------------------------------------------------------

    def _begin(self, model_id: str) -> str:
        """Check a save's arguments. Returns the role of its model."""
        if self._closed:
            raise ClosedError("this backend is closed; make a new one to save")
        return self._role_of(model_id)

    def _begin_sampler(self, model_id: str) -> str:
        role = self._begin(model_id)
        if role != _SAMPLED:
            raise ValueError(
                f"{model_id!r} is a {role}, and only a policy has weights to sample from; save it with save_checkpoint"
            )
        return role

    def _role_of(self, model_id: str) -> str:
        if self._validate is not None:
            self._validate(model_id)
        if isinstance(self._role, str):
            return self._role
        if model_id not in self._role:
            known = ", ".join(map(repr, self._role)) or "none"
            raise ValueError(f"there is no model {model_id!r} here (known: {known:.500}); create it first")
        return self._role[model_id]

    async def _send_weights(self, model_id: str) -> None:
        assert self._send is not None
        await self._send(model_id=model_id if self._lora else None)

    def _save_sampler(self, output_path: Where, role: str, model_id: str, persist: bool) -> SaveHandle:
        if not persist:
            mark = wrap(_write_marker, destination="file", file_object=True)
            return self._follow(mark(self._place(output_path), model_id))

        def write(folder: str) -> None:
            self._export(model=role, export_dir=folder, tokenizer=self._tokenizer, model_id=model_id)

        return self._pack(output_path, write)

    def _pack(self, output_path: Where, write: Callable[[str], None]) -> SaveHandle:
        with pack(self._place(output_path), scratch=self._scratch) as folder:
            # SkyRL passes a path that does not exist yet, and some dispatches insist on creating the folder.
            os.rmdir(folder)
            write(str(folder))
            os.makedirs(folder, exist_ok=True)  # an empty folder makes the save fail with NothingWrittenError
        return self._follow(folder.handle)

    def _follow(self, handle: SaveHandle) -> SaveHandle:
        self._handles.add(handle)
        self._newest[_path_key(handle.path)] = handle
        return handle

    def _pending(self) -> list[Save]:
        """The saves of this backend that are under way, or that failed without anybody retrieving the error."""
        return [save for save in files_saver().ledger.saves() if save.handle in self._handles]

    def _wait_for_save_to(self, key: str) -> None:
        handle = self._newest.get(key)
        if handle is not None and not handle.looked_at:
            handle.result()

    def _raise_unseen(self) -> None:
        raise_error_of([save.handle for save in self._pending() if save.is_unseen])

    def __repr__(self) -> str:
        num_saves = sum(not pending.handle.done() for pending in self._pending())
        return f"<CheckpointBackend of {self._role}, {num_saves} saves under way>"


class FSDPCheckpoints:
    """`save_checkpoint` and `load_checkpoint` of SkyRL's FSDPStrategy, on each rank; put it in front of that as a base.

        class Strategy(FSDPCheckpoints, FSDPStrategy):
            layout = "both"

    Each rank saves its part of model, optimizer, scheduler and random state as one of a set of archives, in the folder
    `async_ckpt` in the checkpoint's, behind the training; any number of ranks can load them. With `layout = "skyrl"`,
    only SkyRL's own files are written, one for each rank, which the same number of ranks can load; with "both", they
    are side by side. Loading prefers our archives.

    A checkpoint exists when `finalize_pending_saves` has returned on all ranks, or the handle is done: SkyRL marks
    it, or packs it into a tar, after that.
    """

    layout: Literal["async_ckpt", "skyrl", "both"] = "async_ckpt"
    _saving: tuple[AsyncCheckpointer, SaveHandle] | None = None

    def save_checkpoint(
        self,
        model: Any,
        ckpt_dir: Where,
        node_local_rank: int,
        optimizer: Any = None,
        scheduler: Any = None,
        client_state: Mapping[str, Any] = MappingProxyType({}),
        tag: str | None = None,
        tokenizer: Any = None,
    ) -> SaveHandle | None:
        """Save on all ranks. Returns a handle once training may go on; None if only SkyRL's own files are written.

        Waits for an earlier save that is under way, and raises its error.
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
        ckpt = AsyncCheckpointer(_archives_in(ckpt_dir))
        state = self._parts(model, optimizer, scheduler) | {
            "client_state": dict(client_state),
            "tag": tag,
            "world_size": ranks()[1],
        }
        handle = ckpt.save(state, _step_of(ckpt_dir), overwrite=True)
        self._saving = ckpt, handle
        return handle

    def load_checkpoint(
        self,
        model: Any,
        ckpt_dir: Where,
        optimizer: Any = None,
        scheduler: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
    ) -> tuple[Where, dict[str, Any]]:
        """Fill model, optimizer and scheduler in place, on all ranks. Returns the folder, and the other values that
        were saved.

        The generators of each rank are restored only on as many ranks as have saved them; on other numbers they stay
        as they are. If `client_state` differs between ranks, each gets its own; on another number of ranks that
        raises StateMismatchError. An earlier save that is under way is waited for; if it fails, that is a warning
        here, and `finalize_pending_saves` raises its error. Raises NotCommittedError for a folder with neither our
        archives nor, if the next base class has this method, SkyRL's files.
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
                    load_module_strict=load_module_strict,
                    load_optimizer_states=load_optimizer_states,
                    load_lr_scheduler_states=load_lr_scheduler_states,
                )
            rank, world_size = ranks()
            extra = ckpt.load(step, select=["client_state", "tag", "world_size"])
            extra = _values_of_rank(extra, rank if extra["world_size"] == world_size else None, ())
            parts = self._parts(
                model, optimizer if load_optimizer_states else None, scheduler if load_lr_scheduler_states else None
            )
            if extra["world_size"] != world_size:
                del parts["rng"]
            ckpt.restore(parts, step, strict=load_module_strict)
        return ckpt_dir, {**extra, "rank": rank, "fsdp_strategy": getattr(self, "fsdp_strategy", None)}

    def _load_skyrl_files(self, model: Any, ckpt_dir: Where, **options: Any) -> tuple[Where, dict[str, Any]]:
        missing: FileNotFoundError | None = None
        if hasattr(super(), "load_checkpoint"):
            try:
                load: Callable[..., tuple[Where, dict[str, Any]]] = super().load_checkpoint  # type: ignore[misc]
                return load(model, ckpt_dir, **options)
            except FileNotFoundError as error:
                missing = error
        why = f", and of the files of SkyRL: {missing}" if missing else ""
        raise NotCommittedError(
            f"{_archives_in(ckpt_dir)}: no committed checkpoint there{why}", path=text_of(ckpt_dir), step=None
        ) from missing

    def finalize_pending_saves(self, *_: Any, **__: Any) -> None:
        """Wait until the save under way is committed, and raise its error. Arguments that SkyRL passes are ignored."""
        if self._saving is not None:
            (ckpt, handle), self._saving = self._saving, None
            with ckpt:
                handle.result()

    def _finish_own_save(self) -> None:
        if self._saving is None or (error := self._saving[1].exception()) is None:
            self.finalize_pending_saves()
            return
        failed = f"{self._saving[1].path}, which was not saved: {type(error).__name__}: {error}"
        warnings.warn(f"load_checkpoint() goes on without {failed}", RuntimeWarning, stacklevel=3)

    def _parts(self, model: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
        # SkyRL wraps transformers' model.
        inner = getattr(model, "model", None) if type(model).__name__ == "HFModelWrapper" else None
        parts = {"model": model if inner is None else inner, "optimizer": optimizer, "scheduler": scheduler}
        return {name: part for name, part in parts.items() if part is not None} | {"rng": RngState("skyrl")}


def _values_of_rank(value: Any, rank: int | None, path: tuple[Any, ...]) -> Any:
    """A value with this rank's own in place of each `PerRank`.

    `rank` is None on another number of ranks than have saved; then a `PerRank` raises StateMismatchError.
    """
    if isinstance(value, PerRank):
        if rank is None:
            raise StateMismatchError(
                f"{shown(path)} was saved by each rank for itself, and there are not as many ranks now; load it with "
                "async_ckpt.load, or save values that are the same on all ranks",
                mismatched=(shown(path),),
            )
        return value[rank]
    if isinstance(value, dict):
        return {key: _values_of_rank(inner, rank, (*path, key)) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_values_of_rank(inner, rank, (*path, i)) for i, inner in enumerate(value))
    return value


def _archives_in(ckpt_dir: Where) -> str:
    return f"{text_of(ckpt_dir).rstrip('/')}/{_ARCHIVES}"


def _step_of(ckpt_dir: Where) -> int:
    """The step in the name that SkyRL gives the folder above; 0 for other names."""
    match = re.search(r"global_step_(\d+)", text_of(ckpt_dir))
    return int(match[1]) if match else 0


def _write_marker(file: Any, model_id: str) -> None:
    """Write a tar with one member, in the form of SkyRL's own."""
    text = f"The weights of {model_id} are in the inference engines alone (persist=False).\n".encode()
    with tarfile.open(fileobj=file, mode="w") as tar:
        info = tarfile.TarInfo(_MARKER)
        info.size = len(text)
        tar.addfile(info, io.BytesIO(text))


def _required(dispatch: Dispatch, name: str) -> Callable[..., Any]:
    method = _optional(dispatch, name)
    if method is None:
        raise TypeError(f"{type(dispatch).__qualname__} has no {name}; give an object like SkyRL's WorkerDispatch")
    return method


def _optional(dispatch: Dispatch, name: str) -> Callable[..., Any] | None:
    """A method of the dispatch that accepts a `model_id` even if the dispatch's own does not; None without one."""
    method: Callable[..., Any] | None = getattr(dispatch, name, None)
    if method is None:
        return None
    parameters = inspect.signature(method).parameters.values()
    if any(p.name == "model_id" or p.kind is p.VAR_KEYWORD for p in parameters):
        return method

    def without_id(*, model_id: str | None, **arguments: Any) -> Any:  # noqa: ARG001
        return method(**arguments)

    return without_id


def _refuse_running_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(
        "an event loop runs on this thread, and sending weights would block it; "
        "await save_sampler_checkpoint_async instead"
    )


def _path_key(path: str) -> str:
    """One key for every spelling of a local path."""
    return path if "://" in path else os.path.realpath(path)
