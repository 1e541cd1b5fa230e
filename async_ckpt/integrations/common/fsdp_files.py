"""Files and folders as accelerate writes them under FSDP, made from an archive of all ranks.

In: sharded state dicts, and their archive. Out: folders of torch.distributed.checkpoint, or files of full tensors.
Knows nothing of: trainers.

accelerate writes these by collectives, which would stall the training. Here each rank writes its shards to an archive,
and one rank alone makes the folders or files from it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from ... import load
from ...plumbing import write_by_torch
from ..dcp import to_dcp
from .fsdp1_state import as_dtensors, as_slices
from .training_archive import TrainingArchive

# The folders and files of the parts, by accelerate's names.
_FOLDERS: Final = {"model": "pytorch_model_fsdp_0", "optimizer": "optimizer_0"}
_FILES: Final = {"model": "pytorch_model_fsdp.bin", "optimizer": "optimizer.bin"}


class FsdpArchive(TrainingArchive):
    """An archive of these parts that is converted to files or folders in the checkpoint, and is not part of it."""

    is_part = False

    @classmethod
    @abstractmethod
    def weights_of(cls, model: Any, *, only_adapters: bool) -> dict[str, Any]:
        """The sharded state dict of a model from which the files are made, without communication."""


class FsdpFiles(FsdpArchive):
    """An archive converted to files of full tensors. `save_model`, if set, is called with the folder and weights."""

    save_model: Callable[..., object] | None = None

    @classmethod
    def weights_of(cls, model: Any, *, only_adapters: bool) -> dict[str, Any]:
        """All weights, or only the trained ones."""
        return get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=only_adapters))

    def take_into(self, folder: str) -> None:
        """Wait until the archive is durable, read it to memory, and make the files. Raises the error of its save."""
        state = load(self.durable())
        if self.save_model is not None:
            self.save_model(folder, state_dict={**state["model"]})  # a copy, since save_model empties it
        for part in self.parts:
            write_by_torch(state[part], Path(folder, _FILES[part]))


class FsdpFolders(FsdpArchive):
    """An archive that is converted to folders of torch.distributed.checkpoint."""

    @classmethod
    def weights_of(cls, model: Any, *, only_adapters: bool) -> dict[str, Any]:
        """All weights, or those of the active adapter, by names without the adapter's name."""
        if not only_adapters:
            return get_model_state_dict(model)
        from peft import get_peft_model_state_dict

        weights: dict[str, Any] = get_peft_model_state_dict(model, adapter_name=model.active_adapter)
        return weights

    def take_into(self, folder: str) -> None:
        """Wait until the archive is durable, and make the folders. Raises the error of its save."""
        archive = self.durable()
        for part in self.parts:
            to_dcp(archive, Path(folder, _FOLDERS[part]), select=part)


def kind_for(plugin: Any) -> type[FsdpArchive]:
    """The kind of archive for the files that accelerate writes with this FSDP plugin."""
    return FsdpFiles if "FULL_STATE_DICT" in str(plugin.state_dict_type) else FsdpFolders


def has_optimizer(folder: str) -> bool:
    """True if accelerate has written the state of an optimizer to this folder as a subfolder."""
    return Path(folder, _FOLDERS["optimizer"]).is_dir()


def refuse(plugin: Any, *, has_adapters: bool = False) -> None:
    """Raise NotImplementedError for unsupported settings of FSDP1."""
    if plugin.fsdp_version == 2:
        return
    if "LOCAL_STATE_DICT" in str(plugin.state_dict_type):
        raise NotImplementedError(
            "FSDP1's LOCAL_STATE_DICT is not supported; set state_dict_type to SHARDED_STATE_DICT"
        )
    if "HYBRID" in str(plugin.sharding_strategy or plugin.reshard_after_forward):
        raise NotImplementedError(
            "FSDP1's hybrid sharding is not supported; set FULL_SHARD or SHARD_GRAD_OP, or use FSDP2"
        )
    if has_adapters:
        raise NotImplementedError("adapters under FSDP1 are not supported; use FSDP2: fsdp_version=2")


def sharded_parts(
    model: Any, optimizer: Any, kind: type[FsdpArchive], *, only_adapters: bool = False
) -> dict[str, Any]:
    """The state dicts of a sharded model and of its optimizer, if it has one, by names of parameters.

    Under FSDP2, they are views, made without communication; under FSDP1, they are copies, made by collectives.
    """
    with as_slices(model):
        parts = {"model": kind.weights_of(model, only_adapters=only_adapters)}
        if optimizer is not None:
            parts["optimizer"] = get_optimizer_state_dict(model, getattr(optimizer, "optimizer", optimizer))
    return {name: as_dtensors(part) for name, part in parts.items()}
