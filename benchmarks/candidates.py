"""All compared ways to save: one small adapter each, with one interface.

In: a folder, the state that is trained. Out: saves, and the restored state. Knows nothing of: clocks, other candidates.

Each candidate runs in the fastest configuration that its documentation gives for one process on this device; its
`configuration` says which. If the documentation tells the caller to wait for the previous save, the adapter does so.
"""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Final

import torch

import async_ckpt
from async_ckpt import SaveHandle

from .limits import NUM_CPUS, SEGMENT_BYTES, WarmMemory, torch_save, whole_pages
from .workloads import State, Subject

_GZIP_LEVEL: Final = 6
NO_SAVE_STEPS: Final = 6
"""The steps that `NoSave` measures: as many as a slower asynchronous save of 0.2 GB overlaps."""


class Candidate:
    """One way to save. When `save` returns, at most one save is in progress: it may wait for the previous one."""

    title: ClassVar[str]
    configuration: ClassVar[str]
    package: ClassVar[str] = "torch"
    durable: ClassVar[bool] = True
    """True if the candidate makes its files durable itself; otherwise the trial does, which counts as its time."""
    share: ClassVar[float] = 1.0
    """The part of the state to save, if all of it would take minutes. The times are scaled to the whole state."""
    synchronous: ClassVar[bool] = False
    """True if `save` returns when everything is written."""
    has_process: ClassVar[bool] = False
    """True if the candidate starts a process when it is created, which takes a while."""
    needs_cuda: ClassVar[bool] = False
    into_objects: ClassVar[bool] = False
    """True if `restore` needs the modules and optimizers themselves instead of their state dicts."""

    def __init__(self, folder: Path, subject: Subject) -> None:
        self.folder, self.subject = folder, subject
        self._saved: Future[Any] | None = None  # the last save, if its library returns a future

    @classmethod
    def why_not(cls) -> str:
        """The reason why it cannot run here; empty if it can."""
        found = find_spec(cls.package)
        if found is None or found.loader is None:  # without a loader: a leftover folder
            return "not installed"
        return "needs CUDA" if cls.needs_cuda and not torch.cuda.is_available() else ""

    def path(self, number: int) -> Path:
        """The file or folder of a save."""
        return self.folder / str(number)

    def prewarm(self) -> None:
        """Do what the documentation recommends before the first save."""

    def save(self, number: int) -> None:
        """Begin a save. Returns when the training may continue."""
        raise NotImplementedError

    def stepping(self) -> AbstractContextManager[Any]:
        """The context of every step of the optimizer."""
        return nullcontext()

    def done(self) -> bool:
        """Whether the last save is complete."""
        return self._saved is None or self._saved.done()

    def wait(self) -> None:
        """Return when the last save is complete. Raises its error."""
        if self._saved is not None:
            self._saved.result()

    @property
    def stall_seconds(self) -> float:
        """How long the last save stalled the training beyond its call, if its steps do not show it."""
        return 0.0

    def forget(self) -> None:
        """Drop saved data that is still in the candidate's memory, if it would be restored from there."""

    def restore(self, number: int, into: State) -> None:
        """Restore a save into existing tensors."""
        raise NotImplementedError

    def delete(self, number: int) -> None:
        """Delete a save."""
        path = self.path(number)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Release threads and processes."""


# --- synchronous ----------------------------------------------------------------------------------------------


class TorchSave(Candidate):
    title = "torch.save + fsync"
    synchronous = True
    configuration = (
        "one file, by its path, torch.serialization.set_crc32_options(False); torch.load(mmap=True), copied into place"
    )

    def save(self, number: int) -> None:
        torch_save(self.subject.state_dict(), self.path(number))

    def restore(self, number: int, into: State) -> None:
        _load_torch(self.path(number), into)


class Tar(Candidate):
    title = "torch.save, tar"
    synchronous = True
    configuration = "the same torch.save into a folder, tarfile of it, fsync"

    def save(self, number: int) -> None:
        folder = self.folder / "files"
        folder.mkdir()
        torch.serialization.set_crc32_options(False)
        torch.save(self.subject.state_dict(), folder / "state.pt")
        with open(self.path(number), "wb") as file:
            with self._opened(file) as tar:
                tar.add(folder, arcname=".")
            _sync(file)
        shutil.rmtree(folder)

    def _opened(self, file: Any) -> tarfile.TarFile:
        return tarfile.open(fileobj=file, mode="w")

    def restore(self, number: int, into: State) -> None:
        folder = self.folder / "out"
        with tarfile.open(self.path(number)) as tar:
            tar.extractall(folder, filter="data")
        _load_torch(folder / "state.pt", into)
        shutil.rmtree(folder)


class Gzip(Tar):
    title = "torch.save, tar.gz"
    configuration = f"the same, gzip level {_GZIP_LEVEL}; measured on a part of the state (`sample_bytes`) in one process, and scaled"
    share = 1 / 16

    def _opened(self, file: Any) -> tarfile.TarFile:
        return tarfile.open(fileobj=file, mode="w:gz", compresslevel=_GZIP_LEVEL)


class Safetensors(Candidate):
    title = "safetensors.save_file + fsync"
    synchronous = True
    configuration = "tensors under flat names, other values as JSON in the metadata; safe_open, copied into place"
    package = "safetensors"

    def save(self, number: int) -> None:
        flat = dict(leaves(self.subject.state_dict()))
        tensors = dict(tensors_of(flat))
        others = {name: value for name, value in flat.items() if name not in tensors}
        path = self.path(number)
        import_module("safetensors.torch").save_file(tensors, path, {"others": json.dumps(others)})
        with open(path, "rb+") as file:
            _sync(file)

    def restore(self, number: int, into: State) -> None:
        with import_module("safetensors").safe_open(self.path(number), "pt") as file:
            for name, tensor in tensors_of(into):
                tensor.copy_(file.get_tensor(name))


class Dcp(Candidate):
    title = "dcp.save"
    package = "torch.distributed.checkpoint"
    synchronous = True
    configuration = "FileSystemWriter, as many threads as processors; fsyncs"

    def _writer(self, number: int) -> Any:
        return _dcp("filesystem").FileSystemWriter(self.path(number), thread_count=NUM_CPUS)

    def save(self, number: int) -> None:
        _dcp("state_dict_saver").save(self.subject.state_dict(), storage_writer=self._writer(number), no_dist=True)

    def restore(self, number: int, into: State) -> None:
        _dcp("state_dict_loader").load(into, checkpoint_id=self.path(number), no_dist=True)


# --- asynchronous ---------------------------------------------------------------------------------------------


class DcpAsync(Dcp):
    title = "dcp.async_save"
    synchronous = False
    configuration = "as it comes: a path and nothing else; copied in the call, written by a thread; fsyncs"

    def __init__(self, folder: Path, subject: Subject) -> None:
        super().__init__(folder, subject)
        self._staged: Future[Any] | None = None

    def _begin(self, number: int) -> Any:
        return _dcp("state_dict_saver").async_save(
            self.subject.state_dict(), checkpoint_id=self.path(number), no_dist=True
        )

    def save(self, number: int) -> None:
        self.wait()
        response = self._begin(number)
        self._staged = getattr(response, "staging_completion", None)
        self._saved = getattr(response, "upload_completion", response)

    def stepping(self) -> AbstractContextManager[Any]:
        if self._staged is not None:  # like torchtitan before the optimizer's step
            self._staged.result()
        return nullcontext()


class DcpAsyncCached(DcpAsync):
    title = "dcp.async_save, cached stager"
    configuration = (
        "DefaultStager copies on a thread into memory that it keeps (pinned where there is CUDA); "
        "the step waits for the copy; written by a thread"
    )
    shared: ClassVar[bool] = False

    @classmethod
    def why_not(cls) -> str:
        if why := super().why_not():
            return why
        staging = _dcp("staging")
        stager = staging.DefaultStager(staging.StagingOptions(False, False, False, False))
        try:
            for _ in range(2):
                stager.stage({"model": OrderedDict()})
        except KeyError:  # in torch 2.11, the stager fails after its first call
            return f"the stager of torch {torch.__version__} can be used once"
        return ""

    def __init__(self, folder: Path, subject: Subject) -> None:
        super().__init__(folder, subject)
        cuda = torch.cuda.is_available()
        self._stager = _dcp("staging").DefaultStager(
            _dcp("staging").StagingOptions(
                use_pinned_memory=cuda,
                use_shared_memory=self.shared,
                use_async_staging=True,
                use_non_blocking_copy=cuda,
            )
        )

    def _begin(self, number: int) -> Any:
        return _dcp("state_dict_saver").async_save(
            self.subject.state_dict(),
            storage_writer=self._writer(number),
            async_stager=self._stager,
            no_dist=True,
        )

    def close(self) -> None:
        self.wait()
        self._stager.close()


class DcpAsyncProcess(DcpAsyncCached):
    title = "dcp.async_save, process"
    configuration = "the same stager, into shared memory; written by a process of its own (gloo, one rank)"
    shared = True

    def __init__(self, folder: Path, subject: Subject) -> None:
        super().__init__(folder, subject)
        _alone_in_a_group()

    def _begin(self, number: int) -> Any:
        return _dcp("state_dict_saver").async_save(
            self.subject.state_dict(),
            storage_writer=self._writer(number),
            async_stager=self._stager,
            async_checkpointer_type=_dcp("state_dict_saver").AsyncCheckpointerType.PROCESS,
        )

    def close(self) -> None:
        super().close()
        torch.distributed.destroy_process_group()


class TorchCheckpointing(Candidate):
    title = "torch_checkpointing"
    configuration = (
        "CheckpointManager, prewarmed, step under its lock, written by its process, by as many threads as processors; "
        "use_direct_io=False"
    )
    package = "torch_checkpointing"
    durable = False
    has_process = True

    def __init__(self, folder: Path, subject: Subject) -> None:
        super().__init__(folder, subject)
        package = import_module("torch_checkpointing")
        storage = import_module("torch_checkpointing.storage.filesystem").LocalFileSystemStorageConfig(
            use_direct_io=False  # with the default, it cannot write to the opened file on ext4
        )
        config = package.CheckpointManager.Config(storage_config=storage)
        config.save.writer_config.file_write_max_threads = NUM_CPUS
        self._manager = config.build()

    def prewarm(self) -> None:
        self._manager.prewarm_staging(self.subject.state_dict())

    def save(self, number: int) -> None:
        self._saved = self._manager.save(str(self.path(number)), self.subject.state_dict())

    def stepping(self) -> AbstractContextManager[Any]:
        return self._manager.lock()  # type: ignore[no-any-return]

    def restore(self, number: int, into: State) -> None:
        self._manager.load(str(self.path(number)), into=into)

    def close(self) -> None:
        self._manager.close()


class Lightning(Candidate):
    title = "Lightning AsyncCheckpointIO"
    configuration = "over TorchCheckpointIO: clones every tensor in the call, written by a thread"
    package = "pytorch_lightning"
    durable = False

    def __init__(self, folder: Path, subject: Subject) -> None:
        super().__init__(folder, subject)
        tempfile.tempdir = str(folder)  # it writes there first, and renames within one file system
        plugins = import_module("pytorch_lightning.plugins")
        self._io = plugins.AsyncCheckpointIO(plugins.TorchCheckpointIO())
        self._number = 0

    def save(self, number: int) -> None:
        self._number = number
        self._io.save_checkpoint(self.subject.state_dict(), self.path(number))

    def done(self) -> bool:
        return self.path(self._number).exists()  # it reports no end; the file appears complete

    def wait(self) -> None:
        self._io.teardown()  # the only call that waits

    def restore(self, number: int, into: State) -> None:
        _load_torch(self.path(number), into)

    def close(self) -> None:
        self._io.teardown()


class Moonclip(Candidate):
    title = "moonclip"
    configuration = (
        "CheckpointManager, without a cast; copied in the call, differences to the save before and zstd by its threads; "
        "it deletes old saves itself, and a cold restore finds the save that the differences are from in the page cache"
    )
    package = "moonclip"
    into_objects = True

    def __init__(self, folder: Path, subject: Subject) -> None:
        super().__init__(folder, subject)
        self._manager = import_module("moonclip").CheckpointManager(str(folder), world_size=1, rank=0)
        self._ids: dict[int, str] = {}

    def path(self, number: int) -> Path:
        return self.folder / "snapshots" / self._ids[number]

    def save(self, number: int) -> None:
        self.wait()
        self._ids[number] = self._manager.save(number, **self.subject.state)
        saved = self._saved = Future()
        threading.Thread(target=lambda: saved.set_result(self._manager.flush())).start()  # the only report of the end

    def delete(self, number: int) -> None:
        """Delete nothing: other saves may be differences from this one."""

    def restore(self, number: int, into: State) -> None:
        self._manager.load(self._ids[number], **into)


class Resiliency(Candidate):
    title = "nvidia-resiliency-ext TorchAsyncCheckpoint"
    configuration = "persistent worker; finalized before every step, as its documentation has it"
    package = "nvidia_resiliency_ext"
    durable = False
    needs_cuda = True

    def __init__(self, folder: Path, subject: Subject) -> None:
        super().__init__(folder, subject)
        _alone_in_a_group()  # it asks torch for its rank
        module = import_module("nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt")
        self._checkpoint = module.TorchAsyncCheckpoint(persistent_queue=True)

    def save(self, number: int) -> None:
        self._checkpoint.async_save(self.subject.state_dict(), self.path(number))

    def stepping(self) -> AbstractContextManager[Any]:
        self._checkpoint.finalize_async_save(blocking=False, no_dist=True)
        return nullcontext()

    def done(self) -> bool:
        self._checkpoint.finalize_async_save(blocking=False, no_dist=True)
        return bool(self._checkpoint._async_calls_queue.get_num_unfinalized_calls() == 0)

    def wait(self) -> None:
        self._checkpoint.finalize_async_save(blocking=True, no_dist=True)

    def restore(self, number: int, into: State) -> None:
        _load_torch(self.path(number), into)

    def close(self) -> None:
        self._checkpoint._async_calls_queue.close()
        torch.distributed.destroy_process_group()


# --- this library ---------------------------------------------------------------------------------------------


class Ours(Candidate):
    title = "async_ckpt"
    configuration = "AsyncCheckpointer, prewarmed; the copy is waited for"
    package = "async_ckpt"
    into_objects = True

    def __init__(self, folder: Path, subject: Subject) -> None:
        super().__init__(folder, subject)
        self._checkpointer = async_ckpt.AsyncCheckpointer(folder, **self._options())

    def _options(self) -> dict[str, Any]:
        return {}

    def path(self, number: int) -> Path:
        return self.folder / f"step_{number:08d}"

    def prewarm(self) -> None:
        self._checkpointer.prewarm(self.subject.state)

    def save(self, number: int) -> None:
        self._saved = self._checkpointer.save(self.subject.state, step=number)

    def restore(self, number: int, into: State) -> None:
        self._checkpointer.restore(into, step=number)

    @property
    def stall_seconds(self) -> float:
        assert isinstance(self._saved, SaveHandle)
        return self._saved.result().stall_seconds

    def close(self) -> None:
        self._checkpointer.close()


class OursGuarded(Ours):
    title = "async_ckpt, guard="
    configuration = "AsyncCheckpointer(guard=optimizer), prewarmed; the copy overlaps forward and backward"

    def _options(self) -> dict[str, Any]:
        return {"guard": self.subject.optimizer}


class OursKeeping(OursGuarded):
    title = "async_ckpt, guard=, keep=4"
    configuration = (
        "the same, and it deletes old steps itself: a step may need those before, whose frozen parameters it has"
    )

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "keep": 4}

    def delete(self, number: int) -> None:
        """Delete nothing: other saves may borrow from this one."""


class OursBudgeted(Ours):
    title = "async_ckpt, host_bytes="
    configuration = "prewarmed, a quarter of the state's size as host memory, 128 MiB at least; the copy is waited for"

    def _options(self) -> dict[str, Any]:
        return {"host_bytes": max(128 << 20, num_bytes_of(self.subject.state_dict()) // 4)}


class OursCompressed(Candidate):
    title = "async_ckpt, zstd"
    configuration = 'save("x.tar.zst"), level 3'
    package = "zstandard"

    def path(self, number: int) -> Path:
        return self.folder / f"{number}.tar.zst"

    def save(self, number: int) -> None:
        self._saved = async_ckpt.save(self.subject.state, self.path(number))

    def restore(self, number: int, into: State) -> None:
        copy_into(into, async_ckpt.load(self.path(number)))


# --- what it is all held against ---------------------------------------------------------------------------------


class NoSave(Candidate):
    title = "no save"
    configuration = "as many steps as a save overlaps, and nothing else"

    def save(self, _number: int) -> None:
        self._left = NO_SAVE_STEPS - 1

    def done(self) -> bool:
        self._left -= 1
        return self._left < 0


# --- what no library could do better ---------------------------------------------------------------------------


class Limit(Candidate):
    title = "the limit: memmove, O_DIRECT"
    configuration = "into memory that is there, in the call; written by threads, fsync; no names, no digests, no commit"

    def prewarm(self) -> None:
        self._tensors = [tensor for _, tensor in tensors_of(self.subject.state_dict())]
        self._num_bytes = whole_pages(num_bytes_of(self.subject.state_dict()))
        self._memory = WarmMemory(self._num_bytes, SEGMENT_BYTES)

    def save(self, number: int) -> None:
        self.wait()
        self._memory.copy_seconds(self._tensors)
        saved: Future[None] = Future()
        self._saved = saved

        def write() -> None:
            try:
                self._memory.write(self.path(number), self._num_bytes)
                saved.set_result(None)
            except BaseException as error:
                saved.set_exception(error)

        threading.Thread(target=write).start()

    def forget(self) -> None:
        self._memory.forget()

    def restore(self, number: int, into: State) -> None:
        self._memory.read(self.path(number))
        self._memory.copy_seconds([tensor for _, tensor in tensors_of(into)], back=True)


CANDIDATES: Final[dict[str, type[Candidate]]] = {
    "ours_guarded": OursGuarded,
    "ours": Ours,
    "ours_keeping": OursKeeping,
    "ours_budgeted": OursBudgeted,
    "ours_zstd": OursCompressed,
    "torch_checkpointing": TorchCheckpointing,
    "dcp_async_cached": DcpAsyncCached,
    "dcp_async_process": DcpAsyncProcess,
    "dcp_async": DcpAsync,
    "moonclip": Moonclip,
    "lightning": Lightning,
    "resiliency": Resiliency,
    "dcp": Dcp,
    "safetensors": Safetensors,
    "torch_save": TorchSave,
    "tar": Tar,
    "gzip": Gzip,
    "limit": Limit,
}


# --- states ---------------------------------------------------------------------------------------------------


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted paths and values of everything that is not a container."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from leaves(inner, f"{path}.{number}")
    else:
        yield path, value


def copy_into(live: State, loaded: State) -> None:
    found = dict(leaves(loaded))
    for name, tensor in tensors_of(live):
        tensor.copy_(found[name])


def _load_torch(path: Path, into: State) -> None:
    copy_into(into, torch.load(path, mmap=True, weights_only=True))


def tensors_of(state: State) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, value) for name, value in leaves(state) if isinstance(value, torch.Tensor))


def num_bytes_of(state: State) -> int:
    return sum(tensor.nbytes for _, tensor in tensors_of(state))


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _alone_in_a_group() -> None:
    store = torch._C._distributed_c10d.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def _dcp(module: str) -> Any:
    """Import torch.distributed.checkpoint, which takes longer than the rest of torch, when a candidate needs it."""
    return import_module(f"torch.distributed.checkpoint.{module}")
