"""`export_hf`: weights as the Hugging Face ecosystem reads them, written beside a checkpoint or alone.

In: a model, or its state dict. Out: a folder of safetensors, index, config and tokenizer, on disk or in a store.
Knows nothing of: transformers, which is not needed.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from enum import Enum
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from .errors import UnsupportedStateError
from .format import safetensors
from .functional import host_memory
from .handle import SaveHandle
from .pack import files_saver
from .report import Destination, Progress, SaveReport
from .save import OffLoop
from .snapshot.crew import running_future
from .snapshot.device import dense_blocks
from .snapshot.guard import Optimizers, unwrapped
from .snapshot.host_copy import HostCopy
from .spans import Spans, monotonic
from .spec import DTYPES
from .state.capture import why_not
from .state.tree import dtype_name
from .storage.append import Appender
from .storage.base import Storage
from .storage.local import LocalStorage, translated
from .storage.scratch import Scratch, publish
from .storage.url import Engine, Where, storage_at
from .worker import get_worker

MAX_SHARD_BYTES: Final = 5 * 10**9
# What says that the rest is there: nothing loads a model without one of these.
_LAST: Final = ("adapter_config.json", "config.json")
_WEIGHTS: Final = re.compile(
    r"(model|adapter_model)(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
)
# Of what lies beside a config, what are weights, in any format.
_NOT_COPIED: Final = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|gguf|h5|msgpack|onnx|tar|zst|gz)|.*\.index\.json|\..*", re.IGNORECASE
)
# PEFT's parameters, and the name of the adapter in theirs, which its files leave out.
_ADAPTER: Final = re.compile(r"\.(lora_[A-Za-z_]+|modules_to_save)(?=\.)")
_HEADER_MODULO: Final = 8


def export_hf(
    state_or_model: Any,
    destination: Where,
    config_folder: str | os.PathLike[str] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    *,
    guard: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    engine: Engine | None = None,
    fs: Any = None,
) -> SaveHandle:
    """Write a model as a folder that `from_pretrained` loads; returns a handle at once.

    One `model.safetensors`, or shards with their index; of a PEFT model, or of LoRA weights with an
    `adapter_config.json` in `config_folder`, `adapter_model.safetensors`. Tied weights are written once. A local folder
    appears at once, or is exchanged for one that keeps its other files; at a URL `config.json` comes last, and one that
    was there goes first. To save a checkpoint of the same moment, give the handle to it: what is copied from the
    device already is not copied again.

        save({"model": model, "optimizer": optimizer}, "x.tar", also=export_hf(model, "hf"))

    Args:
        state_or_model: a module, or a flat mapping of names to tensors.
        destination: a folder, or the URL of one.
        config_folder: whose files (config, tokenizer, generation config, …; no weights) are copied. Without it the
            model's own `config` is written, if it has one.
        max_shard_bytes: of one file; a larger tensor has one to itself.
        guard: as for `save`.
        storage_options: what the client of a URL needs; see AsyncCheckpointer, for the next two as well.
        engine: which client that is.
        fs: an fsspec filesystem to use instead.

    Raises UnsupportedStateError for what is no plain tensor, or of a dtype that safetensors does not know, and
    NotADirectoryError for a `config_folder` or destination that is none.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be at least 1, got {max_shard_bytes}")
    folder = None if config_folder is None else Path(config_folder)
    if folder is not None and not folder.is_dir():
        raise NotADirectoryError(
            f"config_folder {folder} is no folder; give the one with the model's config.json"
        )
    storage = storage_at(destination, storage_options=storage_options, engine=engine, fs=fs)
    where = storage.locate("")
    if not storage.remote and os.path.lexists(where) and not os.path.isdir(where):
        raise NotADirectoryError(f"{where} is a file; give the folder that the model goes to")
    spans, called = Spans(), running_future()
    try:
        weights = _weights_of(state_or_model, folder)
        return _Export(storage, weights, folder, max_shard_bytes, unwrapped(guard), spans, called).begin()
    finally:
        called.set_result(spans.total())


class _Weights(NamedTuple):
    """What is to be written: tensors by name, names tied to others, and small files made from the model."""

    stem: str
    tensors: dict[str, torch.Tensor]
    tied: dict[str, str]
    files: dict[str, bytes]


def _weights_of(given: Any, folder: Path | None) -> _Weights:
    state = given if isinstance(given, Mapping) else given.state_dict()
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise UnsupportedStateError(
                f"{name!r:.200} is a {type(value).__qualname__}; give a model, or a flat mapping of names to tensors "
                'such as state["model"]',
                path=str(name),
            )
    adapters = getattr(given, "peft_config", None)
    has_adapter = bool(adapters) or (folder is not None and (folder / "adapter_config.json").is_file())
    tensors = {name: value.detach() for name, value in state.items()}
    files: dict[str, bytes] = {}
    if has_adapter:
        adapter = _active(given, adapters) if adapters else None
        tensors = _adapter_only(tensors, adapter)
        if adapters:
            files["adapter_config.json"] = _dumped(adapters[adapter].to_dict())
    elif folder is None:
        files = _configs_of(given)
    kept, tied = _without_tied(tensors, set(getattr(given, "_tied_weights_keys", None) or ()))
    for name, tensor in kept.items():
        _check(name, tensor)
    if not kept:
        raise UnsupportedStateError("there are no weights to export", path="")
    return _Weights("adapter_model" if has_adapter else "model", kept, tied, files)


def _configs_of(model: Any) -> dict[str, bytes]:
    """What `save_pretrained` writes beside the weights, of a model that knows its own config."""
    files = {}
    for name in ("config", "generation_config"):
        config: Any = getattr(model, name, None)
        if hasattr(config, "to_json_string"):
            told = json.loads(config.to_json_string())
            if name == "config":
                told["architectures"] = [type(model).__name__]
                told["dtype"] = str(getattr(model, "dtype", "float32")).removeprefix("torch.")
            files[f"{name}.json"] = _dumped(told)
    return files


def _active(model: Any, adapters: Mapping[str, Any]) -> str:
    """The adapter that is in use, or the only one."""
    active = getattr(model, "active_adapter", None)
    return active if isinstance(active, str) and active in adapters else next(iter(adapters))


def _adapter_only(tensors: dict[str, torch.Tensor], adapter: str | None) -> dict[str, torch.Tensor]:
    """The adapter's parameters under the names that PEFT's files have: without the name of the adapter."""
    found = {}
    for name, tensor in tensors.items():
        match = _ADAPTER.search(name)
        if match is not None:
            head, tail = name[: match.end()], name[match.end() + 1 :]
            if adapter is not None:
                if tail.partition(".")[0] != adapter:
                    continue  # another adapter's
                tail = tail.partition(".")[2]
            if match[1] == "modules_to_save":
                head = head[: match.start()]
            found[".".join(filter(None, (head, tail)))] = tensor
    return found


def _without_tied(
    tensors: Mapping[str, torch.Tensor], never_kept: set[str]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Of tensors with the very same memory one, not one that the model says is tied to another; and the others' names."""
    groups: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        key = (
            (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if why_not(tensor) is None and tensor.numel()
            else name
        )
        groups.setdefault(key, []).append(name)
    tied = {}
    for names in groups.values():
        kept = next((name for name in names if name not in never_kept), names[0])
        tied.update({name: kept for name in names if name != kept})
    return {name: tensor for name, tensor in tensors.items() if name not in tied}, tied


def _check(name: str, tensor: torch.Tensor) -> None:
    why = why_not(tensor)
    if why is None and DTYPES[dtype_name(tensor.dtype)][1] is None:
        why = f"safetensors does not know {tensor.dtype}; convert it first"
    if why is None and tensor.device.type not in ("cpu", "cuda"):
        why = f"it is on {tensor.device}; move it to the CPU first"
    if why is not None:
        raise UnsupportedStateError(f"{name}: {why}; nothing was written", path=name)


class _Shard(NamedTuple):
    """One file: its header, and the tensors behind it."""

    name: str
    head: bytes
    tensors: list[str]


def _shards(weights: _Weights, max_bytes: int) -> list[_Shard]:
    """In the order of names, as many to a file as fit."""
    parts: list[list[str]] = [[]]
    room = max_bytes
    for name, tensor in weights.tensors.items():
        if weights.stem == "model" and parts[-1] and tensor.nbytes > room:
            parts.append([])
            room = max_bytes
        parts[-1].append(name)
        room -= tensor.nbytes
    shards = []
    for number, names in enumerate(parts, start=1):
        # Descending item size aligns every tensor without holes, which the format forbids.
        names.sort(key=lambda name: -weights.tensors[name].element_size())
        entries, at = [], 0
        for name in names:
            tensor = weights.tensors[name]
            end = at + tensor.nbytes
            entries.append(safetensors.Entry(name, dtype_name(tensor.dtype), tuple(tensor.shape), at, end))
            at = end
        metadata = {"format": "pt"} | {other: kept for other, kept in weights.tied.items() if kept in names}
        head = safetensors.header(entries, metadata, header_bytes_modulo=_HEADER_MODULO, at=0)
        part = f"-{number:05d}-of-{len(parts):05d}" if len(parts) > 1 else ""
        shards.append(_Shard(f"{weights.stem}{part}.safetensors", head, names))
    return shards


def _index(weights: _Weights, shards: Sequence[_Shard]) -> bytes:
    total = sum(tensor.nbytes for tensor in weights.tensors.values())
    count = sum(tensor.numel() for tensor in weights.tensors.values())
    where = {name: shard.name for shard in shards for name in shard.tensors}
    return _dumped(
        {
            "metadata": {"total_size": total, "total_parameters": count},
            "weight_map": dict(sorted(where.items())),
        }
    )


def _dumped(value: Any) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True, default=_plain) + "\n").encode()


def _plain(value: Any) -> Any:
    """What configs hold that JSON has not."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    if hasattr(value, "to_dict"):
        return value.to_dict()
    return str(value).removeprefix("torch.")


class _Export:
    """The errand of one export."""

    def __init__(
        self,
        storage: Storage,
        weights: _Weights,
        config_folder: Path | None,
        max_shard_bytes: int,
        optimizers: Optimizers,
        spans: Spans,
        called: Future[float],
    ) -> None:
        self._storage, self._weights, self._config_folder = storage, weights, config_folder
        self._spans, self._called = spans, called
        self.path = storage.locate("")
        self._shards = _shards(weights, max_shard_bytes)
        names = list(weights.tensors)
        self._copy = HostCopy(
            list(weights.tensors.values()),
            names,
            optimizers=optimizers,
            memory=host_memory(),
            crew=get_worker().copiers,
            clock=monotonic,
        )
        self._tensors = dict(zip(names, self._copy.tensors, strict=True))
        self._weights = weights._replace(tensors={})  # from here on the copy alone keeps tensors alive
        self._index = _index(weights, self._shards) if len(self._shards) > 1 else None
        self._total_bytes = sum(len(s.head) for s in self._shards) + sum(
            t.nbytes for t in weights.tensors.values()
        )
        self.staged = self._copy.completion
        self._scratch: Scratch | None = None
        self._out: Appender | None = None
        self._num_bytes = self._num_retries = 0
        self._small: dict[str, bytes] = {}
        self._given_up: BaseException | None = None

    def begin(self) -> SaveHandle:
        """On the caller's thread: from now on the weights may change."""
        try:
            handle = files_saver().take_on(self)
        except BaseException:
            self._copy.let_go()
            raise
        handle.host_copy = self._copy
        self._copy.begin()
        return handle

    @property
    def progress(self) -> Progress:
        staged = self._total_bytes if self.staged.done() else 0
        return Progress(self._total_bytes, staged, self._num_bytes)

    def give_up(self, error: BaseException) -> None:
        self._given_up = error
        if self._out is not None:
            self._out.fail(error)

    async def run(self, turn: Future[None] | None, off_loop: OffLoop) -> SaveReport:
        await asyncio.wrap_future(self.staged)
        if turn is not None:
            await asyncio.wrap_future(turn)
        with self._spans.span("write"):
            await off_loop(self._write)
        with self._spans.span("commit"):
            await off_loop(self._commit)
        return self._report(await asyncio.wrap_future(self._called))

    def failed(self, error: BaseException) -> None:  # noqa: ARG002
        self._tensors = {}
        self._copy.let_go()
        if self._out is not None:
            self._out.abort()
        if self._scratch is not None:
            self._scratch.remove()

    async def afterwards(self, off_loop: OffLoop) -> None:
        if self._scratch is not None:
            await off_loop(self._scratch.remove)

    # --- blocking, on helper threads --------------------------------------------------------------------------

    def _write(self) -> None:
        """All but what makes it visible."""
        storage, self._small = self._storage, self._read_small()
        if storage.remote:
            self._hide_the_one_before()
        else:
            path = Path(self.path)
            self._scratch = Scratch(path.parent, path.name)
            storage = LocalStorage(self._scratch.folder)
        for shard in self._shards:
            self._write_shard(storage, shard)
        self._tensors = {}
        self._copy.let_go()
        for name in sorted(self._small, key=lambda name: (name in _LAST, name)):
            if not (self._storage.remote and name in _LAST):
                storage.replace(name, self._small[name])
            self._num_bytes += len(self._small[name])

    def _read_small(self) -> dict[str, bytes]:
        """Config and tokenizer, as they are now, and what is made from the model."""
        small = {}
        if self._config_folder is not None:
            with translated(self._config_folder):
                for path in sorted(self._config_folder.iterdir()):
                    if path.is_file() and not _NOT_COPIED.fullmatch(path.name):
                        small[path.name] = path.read_bytes()
        if self._index is not None:
            small["model.safetensors.index.json"] = self._index
        return {**small, **self._weights.files}

    def _write_shard(self, storage: Storage, shard: _Shard) -> None:
        num_bytes = len(shard.head) + sum(self._tensors[name].nbytes for name in shard.tensors)
        out = self._out = Appender(storage, shard.name, limit_bytes=num_bytes)
        before = self._num_bytes
        if self._given_up is not None:
            raise self._given_up
        out.append(memoryview(shard.head))
        for name in shard.tensors:
            tensor = self._tensors[name]
            for _, block in dense_blocks(tensor, 0, tensor.nbytes):
                view = (ctypes.c_ubyte * block.numel()).from_address(block.data_ptr())
                out.append(memoryview(view).cast("B"))
                self._num_bytes = before + out.num_bytes
        out.finish()
        out.sink.close()
        self._num_bytes = before + out.num_bytes
        self._num_retries += out.sink.num_retries
        self._out = None

    def _hide_the_one_before(self) -> None:
        """What stands there must not be loaded while its files are replaced one by one."""
        for name in self._storage.names(""):
            if name in _LAST:
                self._storage.delete(name)

    def _commit(self) -> None:
        if self._given_up is not None:
            raise self._given_up
        if self._scratch is not None:
            with translated(Path(self.path)):
                publish(self._scratch.folder, Path(self.path), replaced=_is_weights)
                self._scratch.folder.mkdir(exist_ok=True)
            return
        new = {shard.name for shard in self._shards} | set(self._small)
        for name in self._storage.names(""):
            if _is_weights(name) and name not in new:
                self._storage.delete(name)  # shards of the one before, which would be loaded first
        for name in _LAST:
            if name in self._small:
                self._storage.replace(name, self._small[name])

    def _report(self, call_seconds: float) -> SaveReport:
        seconds, total = self._spans.seconds, self._spans.total()
        return SaveReport(
            status="committed",
            step=None,
            path=self.path,
            num_bytes=self._num_bytes,
            num_tensors=sum(len(shard.tensors) for shard in self._shards),
            stall_seconds=call_seconds + self._copy.snapshot.stall_seconds,
            stage_seconds=self._copy.snapshot.stage_seconds,
            write_seconds=seconds["write"],
            commit_seconds=seconds["commit"],
            total_seconds=total,
            retries=self._num_retries,
            destinations=(Destination(self.path, self._num_bytes, total, self._num_retries),),
        )


def _is_weights(name: str) -> bool:
    return _WEIGHTS.fullmatch(name) is not None
