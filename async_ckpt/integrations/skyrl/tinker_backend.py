"""`CheckpointBackend`: the checkpoint calls of SkyRL's Tinker backend, without tenants waiting for tars or uploads.

In: an object with the methods of SkyRL's `WorkerDispatch`, paths, ids of models. Out: archives as SkyRL reads and
writes them, with a handle for each; models loaded from them.
Knows nothing of: GPUs, databases.

A save has two halves. During the call, the workers write their files to a folder; then the models are free again. In
the background, without the workers, that folder becomes one plain tar on a disk or in a store; until the tar is
complete, the path has its old content. A checkpoint exists when its handle is done, not when the call returns: an
engine marks it as completed in `handle.add_done_callback`, or after `await handle`.
"""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol, Self
from weakref import WeakValueDictionary

from ... import Place, SaveHandle, unpack, wrap
from ...errors import CheckpointError, ClosedError
from ...plumbing import pack, urls
from .worker_calls import WorkerCalls, with_model_id

_MARKER: Final = "MARKER"
# The role whose weights are sent to the inference engines.
_SAMPLED: Final = "policy"


class Dispatch(Protocol):
    """The methods that every `WorkerDispatch` has. Those with a parameter `model_id` get that argument.

    A folder to write does not exist yet, but its parent does; a folder to read exists.

    Newer versions also have `finalize_pending_saves(model)`, which returns when the files of a save are complete, and
    `async save_weights_for_sampler(model_id=None)`, which sends the weights to the inference engines.
    """

    def save_checkpoint(self, model: str, ckpt_dir: str, tokenizer: Any = None) -> object:
        """Make every worker write its files of model, optimizer and scheduler."""

    def load_checkpoint(
        self,
        model: str,
        ckpt_dir: str,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
    ) -> object:
        """Make every worker read its files."""

    def save_hf_model(self, model: str, export_dir: str, tokenizer: Any) -> object:
        """Write the model in the format that inference engines read."""


class CheckpointBackend:
    """Saves and loads the models of one dispatch.

    Args:
        dispatch: an object with SkyRL's methods. Which of the newer methods it has is checked only at construction.
        role: the dispatch's name for the models ("policy"), or a mapping from a model's id to that name. The mapping
            may change; other ids are refused.
        validate: called first in every call, with the model's id; raises for a model that cannot be saved or loaded.
        tokenizer: passed to the dispatch with every save.
        lora: the models are adapters of one base, so the inference engines need the id of the model.
        scratch: the folder below which the workers write and read; by default beside an archive on a disk. For a URL,
            the default is the system's temp folder, which workers on other nodes do not see: give a shared folder.
        place: a function from a URL to the Place to use, such as `lambda url: Place(url, options=…)`.

    Paths are strings, Paths, URLs, or objects of cloudpathlib. The dispatch is called on the caller's thread; make one
    call at a time. Archives are streamed one after the other, in the order of the calls. The next save warns about a
    failed one, and `wait` and `close` raise its error, unless it was retrieved from the handle.
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
        place: Callable[[urls.StrPath], Place] = Place,
    ) -> None:
        self._save = _required(dispatch, "save_checkpoint")
        self._load = _required(dispatch, "load_checkpoint")
        self._export = _required(dispatch, "save_hf_model")
        self._workers = WorkerCalls(dispatch)
        self._send = with_model_id(dispatch, "save_weights_for_sampler")
        self._role, self._validate, self._tokenizer, self._lora = role, validate, tokenizer, lora
        self._scratch = scratch
        self._place_of = place
        self._saves = pack.FileSaves()
        self._newest: WeakValueDictionary[str, SaveHandle] = WeakValueDictionary()  # by path
        self._closed = False

    # --- saving -----------------------------------------------------------------------------------------------

    def save_checkpoint(self, output_path: urls.StrPath, model_id: str) -> SaveHandle:
        """Save model, optimizer and scheduler as one tar. Returns when the workers have written their files.

        Raises ValueError for an unknown model, before anything is written, and the errors of the dispatch, after which
        all files of the save are removed.
        """
        role = self._begin(model_id)

        def write(folder: str) -> None:
            self._save(model=role, ckpt_dir=folder, tokenizer=self._tokenizer, model_id=model_id)
            self._workers.finalize(role, model_id)

        return self._pack(output_path, write)

    def save_sampler_checkpoint(self, output_path: urls.StrPath, model_id: str, persist: bool = True) -> SaveHandle:
        """Send the weights to the inference engines, and save them as an export from which others can sample.

        With `persist=False`, the archive is only a marker, which `load_checkpoint` refuses. If the dispatch can send
        weights, the call waits until they are sent. Raises, before anything is done, RuntimeError on a thread with a
        running event loop (use `save_sampler_checkpoint_async` there), and ValueError for a model whose role is not
        "policy".
        """
        role = self._begin_sampler(model_id)
        if self._send is not None:
            _refuse_running_loop()
            asyncio.run(self._send_weights(model_id))
        return self._save_sampler(output_path, role, model_id, persist)

    async def save_sampler_checkpoint_async(
        self, output_path: urls.StrPath, model_id: str, persist: bool = True
    ) -> SaveHandle:
        """`save_sampler_checkpoint` for an event loop, which is not blocked meanwhile: `report = await (await …)`."""
        role = self._begin_sampler(model_id)
        if self._send is not None:
            await self._send_weights(model_id)
        return self._save_sampler(output_path, role, model_id, persist)

    # --- loading ----------------------------------------------------------------------------------------------

    def load_checkpoint(self, checkpoint_path: urls.StrPath, model_id: str, load_optimizer: bool = True) -> None:
        """Load a model, with or without its optimizer and scheduler, from any tar: ours or SkyRL's, gzipped or not.

        Waits for a save to the same path that is under way, and raises its error if that was not retrieved yet. The
        unpacked files are always removed. Raises ValueError for an unknown model, FileNotFoundError, NotCommittedError
        for a marker, CorruptCheckpointError, UnsafeArchiveError, and the errors of the dispatch.
        """
        role = self._role_of(model_id)
        place = self._place(checkpoint_path)
        storage, name = place.object()
        self._wait_for_save_to(_path_key(storage.locate(name)))
        # Reading must not create folders: if the archive's folder is missing, there is no archive.
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
        """Wait for every save and the removal of its files, and raise the first error not retrieved yet."""
        self._saves.wait(timeout)

    def _place(self, path: urls.StrPath) -> Place:
        place = Place(path)
        return place if place.is_local else self._place_of(path)

    def close(self) -> None:
        """Refuse further saves, wait for all, and raise the first error not retrieved yet. May be called again."""
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

    def _save_sampler(self, output_path: urls.StrPath, role: str, model_id: str, persist: bool) -> SaveHandle:
        if not persist:
            mark = wrap(_write_marker, destination="file", file_object=True)
            return self._follow(mark(self._place(output_path), model_id))

        def write(folder: str) -> None:
            self._export(model=role, export_dir=folder, tokenizer=self._tokenizer, model_id=model_id)

        return self._pack(output_path, write)

    def _pack(self, output_path: urls.StrPath, write: Callable[[str], None]) -> SaveHandle:
        with pack.pack_under(self._place(output_path), scratch=self._scratch) as folder:
            # SkyRL passes a path that does not exist yet, and some dispatches insist on creating the folder.
            os.rmdir(folder)
            write(str(folder))
            os.makedirs(folder, exist_ok=True)  # an empty folder makes the save fail with NothingWrittenError
        return self._follow(folder.handle)

    def _follow(self, handle: SaveHandle) -> SaveHandle:
        self._saves.add(handle)
        self._newest[_path_key(handle.path)] = handle
        return handle

    def _wait_for_save_to(self, key: str) -> None:
        handle = self._newest.get(key)
        if handle is not None and not handle.looked_at:
            handle.result()

    def __repr__(self) -> str:
        return f"<CheckpointBackend of {self._role}, {self._saves.num_under_way} saves under way>"


def _write_marker(file: Any, model_id: str) -> None:
    """Write a tar with one member, in the form of SkyRL's own."""
    text = f"The weights of {model_id} are in the inference engines alone (persist=False).\n".encode()
    with tarfile.open(fileobj=file, mode="w") as tar:
        info = tarfile.TarInfo(_MARKER)
        info.size = len(text)
        tar.addfile(info, io.BytesIO(text))


def _required(dispatch: Dispatch, name: str) -> Callable[..., Any]:
    method = with_model_id(dispatch, name)
    if method is None:
        raise TypeError(f"{type(dispatch).__qualname__} has no {name}; give an object like SkyRL's WorkerDispatch")
    return method


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
    """A key that is the same for every spelling of a local path."""
    return path if "://" in path else os.path.realpath(path)
