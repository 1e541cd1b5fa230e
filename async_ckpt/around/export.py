"""`export_hf`: weights as the Hugging Face ecosystem reads them, written beside a checkpoint or alone.

In: a model, or its state dict. Out: a folder of safetensors, index, config and tokenizer, on disk or in a store.
Knows nothing of: how models call their weights.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ..host.threads import running_future
from ..report import Progress
from ..saving.delivery import OffLoop
from ..saving.errand import CopyErrand
from ..saving.handle import SaveHandle
from ..spans import Spans
from ..staging.guard import Optimizers, unwrapped
from ..staging.held import refuse_guard
from ..state.held import Held
from ..storage.base import Storage
from ..storage.disk import free_bytes_at, full, translated
from ..storage.local import LocalStorage
from ..storage.place import Anywhere, local_place, written_at
from ..storage.scratch import Scratch, publish
from .hub import ADAPTER_CONFIG, Weights, weights_of
from .shards import INDEX, MAX_SHARD_BYTES, index_of, shards_of

# Of what lies beside a config: weights in any format and their indices, archives, hidden files.
_NOT_COPIED: Final = re.compile(
    r"\..*|.*\.index\.json|.*\.(safetensors|bin|pt|pth|ckpt|gguf|h5|msgpack|ot|onnx|onnx_data|tflite|pkl|npz|distcp"
    r"|tar|zst|gz|zip)",
    re.IGNORECASE,
)
# The only folder that a tokenizer has.
_TEMPLATES: Final = "additional_chat_templates"


def export_hf(
    state_or_model: Any,
    destination: Anywhere,
    config_folder: str | os.PathLike[str] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    *,
    guard: Any = None,
) -> SaveHandle:
    """Write a model as a folder that `from_pretrained` loads. Returns a handle at once.

        handle = async_ckpt.export_hf(model, "out/hf")

    The weights are written to `model.safetensors`, or to shards and their index, under the names that
    `save_pretrained` uses: those of the plain model, also if it is wrapped (DDP, DataParallel, FSDP1, `torch.compile`).
    Tied weights are written once. For a PEFT model, or for LoRA weights with an `adapter_config.json` in `config_folder`, the active
    adapter is written to `adapter_model.safetensors`. The weights may change as soon as the call returns.

    A local folder appears as a whole. If it already exists, it is replaced by one that has its other files as well. At a
    URL, `config.json` is deleted first and written last, so that nothing there loads if the export fails in between.
    Exports are written in the order of the calls.

    Together with a checkpoint of the same instant, the weights are copied from the device once:

        with async_ckpt.snapshot({"model": model, "optimizer": optimizer}) as snap:
            async_ckpt.save(snap, "x.tar")
            async_ckpt.export_hf(snap["model"], "hf")

    Args:
        state_or_model: a module; a flat mapping of names to tensors; or either of them in a snapshot. The names of a
            mapping are written as they are, so it must be the state dict of the plain model; a warning says if they look
            otherwise. A module knows its config and which weights it ties; a mapping does not.
        destination: a folder, or the URL of one.
        config_folder: a local folder. Its files are copied beside the weights (config, tokenizer, generation config, chat
            templates), but no weights and no other subfolders. They take precedence over the model's own config.
        max_shard_bytes: the largest size of a file. A larger tensor gets a file of its own.
        guard: as for `save`.

    Raises UnsupportedStateError for anything but plain tensors of dtypes that safetensors knows, NotADirectoryError if
    `config_folder` or the destination is not a folder, and ReferenceError for a snapshot whose module was deleted. The
    handle raises FileExistsError for a model in a folder that contains an adapter, which would be loaded instead.
    """
    if isinstance(max_shard_bytes, str) or max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be a number of bytes, at least 1, got {max_shard_bytes!r}")
    storage = written_at(destination).storage()
    if not storage.remote:
        storage = LocalStorage(_replaceable(storage.locate("")))
    spans, called = Spans(), running_future()
    try:
        beside = {} if config_folder is None else files_of(local_place(config_folder))
        held = state_or_model if isinstance(state_or_model, Held) else None
        refuse_guard([held] if held is not None else [], guard)
        weights = weights_of(state_or_model, beside)
        export = _Export(
            storage,
            weights,
            beside,
            max_shard_bytes,
            held,
            unwrapped(guard),
            spans,
            called,
        )
        return export.begin()
    finally:
        called.set_result(spans.total())


def _replaceable(folder: str) -> str:
    """What is behind a link to a folder, since it is exchanged. Raises for what cannot be."""
    real = os.path.realpath(folder)
    if os.path.lexists(real) and not os.path.isdir(real):
        raise NotADirectoryError(f"{folder} is a file; give the folder to write the model to")
    with suppress(FileNotFoundError):  # there is no current folder any more
        if Path.cwd().is_relative_to(real):
            raise ValueError(
                f"{folder} is the current folder, or a parent of it, and would be replaced; give a folder inside it"
            )
    return real


def files_of(folder: Path) -> dict[str, bytes]:
    """Config, tokenizer and the like. Read now, so that the folder may go as soon as the call returns."""
    if not folder.is_dir():
        raise NotADirectoryError(
            f"config_folder {folder} is not a folder; give the one with the model's config.json"
        )
    paths = [path for path in folder.iterdir() if not _NOT_COPIED.fullmatch(path.name) and not path.is_dir()]
    paths += (folder / _TEMPLATES).glob("*.jinja")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(paths)}


class _Export(CopyErrand):
    """One export."""

    def __init__(
        self,
        storage: Storage,
        weights: Weights,
        beside: Mapping[str, bytes],
        max_shard_bytes: int,
        held: Held | None,
        optimizers: Optimizers,
        spans: Spans,
        called: Future[float],
    ) -> None:
        names, tensors = list(weights.tensors), list(weights.tensors.values())
        super().__init__(
            storage.locate(""),
            [] if held is not None else tensors,
            [] if held is not None else names,
            held=[] if held is None else [held],
            num_tensors=len(tensors),
            optimizers=optimizers,
            spans=spans,
            called=called,
        )
        self._storage, self._max_shard_bytes = storage, max_shard_bytes
        self._small = {**weights.files, **beside}
        self._total_bytes = sum(map(len, self._small.values())) + sum(tensor.nbytes for tensor in tensors)
        self._shard_names: set[str] = set()  # written
        copies = tensors if held is not None else self.copy.tensors
        self._weights = weights._replace(tensors=dict(zip(names, copies, strict=True)))

    @property
    def progress(self) -> Progress:
        staged = self._total_bytes if self.staged.done() else 0
        return Progress(self._total_bytes, staged, self._num_bytes)

    async def _write(self, off_loop: OffLoop) -> None:
        await off_loop(self._write_folder)

    def failed(self, error: BaseException) -> None:
        self._let_go()
        self._small.clear()
        super().failed(error)

    async def afterwards(self, off_loop: OffLoop) -> None:
        self._small.clear()
        await super().afterwards(off_loop)

    # --- blocking, on helper threads --------------------------------------------------------------------------

    def _write_folder(self) -> None:
        if self._weights.stem == "model" and self._storage.exists(ADAPTER_CONFIG):
            raise FileExistsError(
                f"{self.path} holds an adapter ({ADAPTER_CONFIG}), which would be loaded in place of the model; "
                "delete it, or give another folder"
            )
        place = self._write_weights()
        self._let_go()
        for name, data in sorted(self._small.items()):
            if not (place.remote and name == self._weights.last):
                place.replace(name, data)
            self._num_bytes += len(data)

    def _write_weights(self) -> Storage:
        """Returns where the other files go, too."""
        weights = self._weights
        shards = shards_of(
            weights._replace(tensors=weights.as_published(weights.tensors)), self._max_shard_bytes
        )
        if len(shards) > 1:
            self._small[INDEX] = index_of(shards)
        self._total_bytes = sum(shard.num_bytes for shard in shards) + sum(map(len, self._small.values()))
        place = self._place()
        for shard in shards:
            self._write_file(place, shard.name, shard.num_bytes, (view for _, view in shard.pieces()))
            self._shard_names.add(shard.name)
        return place

    def _place(self) -> Storage:
        """Beside the folder that it will be, or where it stays."""
        if self._storage.remote:
            self._hide_the_one_before()
            return self._storage
        path = Path(self.path)
        free = free_bytes_at(path.parent)
        if free is not None and free < self._total_bytes:
            raise full(path, self._total_bytes, free)
        self._scratch = Scratch(path.parent, path.name)
        return LocalStorage(self._scratch.folder)

    def _hide_the_one_before(self) -> None:
        """What stands there must not be loaded while its files are replaced one by one."""
        last = self._weights.last
        if self._storage.exists(last):
            if last not in self._small:  # it stays that of the new weights
                self._small[last] = self._storage.read(last)[0]
                self._total_bytes += len(self._small[last])
            self._storage.delete(last)

    def _let_go(self) -> None:
        """Of the copies, and of the model."""
        self._weights = self._weights._replace(tensors={}, as_published=dict)
        self.copy.release()

    def _commit(self) -> None:
        weights, storage = self._weights, self._storage
        if self._scratch is not None:
            with translated(Path(self.path)):
                publish(self._scratch.folder, Path(self.path), replaced=weights.is_own)
            return
        for name in storage.names(""):
            if weights.is_own(name) and name not in self._shard_names | set(self._small):
                storage.delete(name)  # shards of the one before, which would be loaded first
        if weights.last in self._small:
            storage.replace(weights.last, self._small[weights.last])
