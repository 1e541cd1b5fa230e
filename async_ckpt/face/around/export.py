"""`export_hf`: weights in the layout of the Hugging Face ecosystem, written beside a checkpoint or alone.

In: a model, or its state dict. Out: a folder of safetensors, index, config and tokenizer, on disk or in a store.
Knows nothing of: the names that models give their weights.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ...core.saving.handle import SaveHandle
from ...core.spec import whole_bytes
from ...core.staging.guard import refuse_guard, unwrapped
from ...core.state.captured import SnapshotView
from ...core.storage.compressed import refuse_archive_name
from ...core.storage.disk import refuse_dangling
from ...core.storage.interface import Storage
from ...core.storage.local import LocalStorage
from ...core.storage.place import Anywhere, local_place, written_at
from ...core.timing import Spans
from ...errors import NotAFolderError
from .hf_folder import Export, ExportRequest
from .hf_weights import Weights, files_of, weights_of
from .scratch import refuse_current
from .shards import MAX_SHARD_BYTES
from .spread import OtherRanks, begin_spread


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

    The weights are written to `model.safetensors`, or to shards with an index, under the names that
    `save_pretrained` uses: those of the plain model, even if it is wrapped (DDP, DataParallel, FSDP1, `torch.compile`).
    Tied weights are written once. For a PEFT model, or for LoRA weights with an `adapter_config.json` in
    `config_folder`, the active adapter is written to `adapter_model.safetensors`. The weights may change as soon as
    the call returns.

    A local folder appears as a whole. It replaces an existing folder, and takes over all other files of that folder. At
    a URL, `config.json` is deleted first and written last, so that a failed export leaves nothing that loads. Exports
    are written in the order of the calls.

    If the model is sharded over ranks (FSDP2, HSDP, tensor parallelism), every rank makes this call, with a destination
    that all of them see. No call waits for another rank: each rank writes its shards, and rank 0 assembles the folder
    from them, using less than 256 MiB of memory. The handles of all ranks are done when the folder is complete, or
    raise PeerFailedError. Every rank must hold DTensors, or the export fails: a rank with whole weights converts them
    to DTensors on a mesh of its own.

    To write a checkpoint of the same instant as well, and copy the weights from the device only once:

        with async_ckpt.snapshot({"model": model, "optimizer": optimizer}) as snap:
            async_ckpt.save(snap, "x.ackpt.tar")
            async_ckpt.export_hf(snap["model"], "hf")

    Args:
        state_or_model: a module, a flat mapping of names to tensors, or a snapshot of either. The names of a mapping
            are written unchanged, so it must be the state dict of the plain model; names that look wrapped cause a
            warning. A module has its config and a list of its tied weights; a mapping has neither.
        destination: the path or URL of a folder.
        config_folder: a local folder. Its files (config, tokenizer, generation config, chat templates) are copied
            beside the weights, except weights and other subfolders. They take precedence over the model's own config.
        max_shard_bytes: the largest size of a file. A larger tensor gets a file of its own.
        guard: as for `save`.

    Raises UnsupportedStateError for values other than plain tensors of dtypes that safetensors knows,
    NotADirectoryError if `config_folder` or the destination is not a folder, ValueError if the folder is in use or has
    the name of a compressed archive, and ReferenceError for a snapshot whose module was deleted. The handle raises
    FileExistsError if a model is written to a folder that contains an adapter, which would be loaded instead.
    """
    place = written_at(destination)
    storage: Storage = place.storage()
    spans = Spans()
    others = OtherRanks(storage)
    try:  # an error on this rank is reported to the other ranks
        refuse_archive_name(place.shown)
        max_shard_bytes = whole_bytes("max_shard_bytes", max_shard_bytes)
        if not storage.remote:
            storage = LocalStorage(_replaceable(storage.locate("")))
        config_files = {} if config_folder is None else files_of(local_place(config_folder))
        held = state_or_model if isinstance(state_or_model, SnapshotView) else None
        refuse_guard([held] if held is not None else [], guard)
        weights = weights_of(state_or_model, config_files)
        request = ExportRequest(storage, config_files, max_shard_bytes, spans)
        if not weights.is_spread:
            others.announce_whole()
            request = request._replace(check=others.check_whole)
            return Export(request, weights, held=held, optimizers=unwrapped(guard)).begin()
    except BaseException as error:
        if Weights.looks_whole(state_or_model):
            others.announce_whole()
        else:
            others.fail(error)
        raise
    else:
        return begin_spread(request, weights, others, held=held, guard=guard)
    finally:
        spans.called()


def _replaceable(folder: str) -> str:
    """The folder that is replaced: the target, if `folder` is a link. Raises if it cannot be replaced."""
    real = os.path.realpath(folder)
    if os.path.lexists(real) and not os.path.isdir(real):
        refuse_dangling(Path(real))
        raise NotAFolderError(f"{folder} is a file; give the folder to write the model to")
    refuse_current(folder)
    return real
