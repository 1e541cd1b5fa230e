"""The parts of a trainer's checkpoint: those that are copied, and those that go to an archive.

In: a trainer. Out: its state by parts; the kind of its archive. Knows nothing of: files, saves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

from ..common.fsdp1_state import as_dtensors, as_slices, optimizer_of
from ..common.fsdp_files import FsdpArchive, kind_for, sharded_parts
from ..common.training_archive import TrainingArchive

# The parts that the layout "transformers" stores in files of torch, with the trainer's names.
FILES: Final = {"optimizer": "optimizer.pt", "scheduler": "scheduler.pt", "scaler": "scaler.pt"}


def parts_of(trainer: Any) -> dict[str, Any]:
    """The state to copy, in the structure of an archive, without random states.

    Under FSDP1 and ZeRO 3, this uses collectives.
    """
    kind, adapters = kind_of_archive(trainer), peft_config_of(trainer.model)
    if trainer.is_deepspeed_enabled:
        parts = {"model": _weights_under_deepspeed(trainer)}
    elif issubclass(kind, FsdpArchive):
        parts = sharded_parts(trainer.model, trainer.optimizer, kind, only_adapters=adapters is not None)
    else:
        optimizer = optimizer_of(trainer.model, trainer.optimizer)
        parts = {"model": written_weights(trainer.model), "optimizer": optimizer}
    if trainer.args.save_only_model:
        return {"model": parts["model"]}
    if type(trainer.lr_scheduler).__name__ != "DeepSpeedSchedulerWrapper":  # the engine saves that one
        parts["scheduler"] = trainer.lr_scheduler.state_dict()
    scaler = getattr(trainer.accelerator, "scaler", None)
    if scaler is not None:
        parts["scaler"] = scaler.state_dict()
    return parts


def _weights_under_deepspeed(trainer: Any) -> dict[str, torch.Tensor]:
    """The weights that the Trainer writes beside the engine's files; empty if ZeRO 3 is not to gather them."""
    engine = trainer.deepspeed
    if engine.zero_optimization_stage() < 3:
        return written_weights(trainer.model)
    if not engine.zero_gather_16bit_weights_on_model_save():
        return {}
    only_trained = peft_config_of(trainer.model) is not None
    return engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=only_trained) or {}


def archived(trainer: Any, parts: Iterable[str]) -> list[str]:
    """The parts in an archive: sharded parts and, with layout "archive", all parts except the model."""
    of_ranks = {"model", "optimizer"} if trainer.is_fsdp_enabled else set()
    rest = {*parts} - {"model"} if trainer.layout == "archive" else set()
    return [part for part in parts if part in of_ranks | rest]


def kind_of_archive(trainer: Any) -> type[TrainingArchive]:
    """The kind of archive: a part of the checkpoint, or under FSDP one to be converted to the plain Trainer's files."""
    if not trainer.is_fsdp_enabled or trainer.layout == "archive":
        return TrainingArchive
    return kind_for(trainer.accelerator.state.fsdp_plugin)


def peft_config_of(model: Any) -> Mapping[str, Any] | None:
    """The configs of a model's adapters, if only adapters are written; otherwise None."""
    return getattr(model, "peft_config", None) or None


def written_weights(model: Any) -> dict[str, torch.Tensor]:
    """The part of a model's state dict that its `save_pretrained` writes; for a PEFT model, only the adapters."""
    with as_slices(model):
        weights: dict[str, torch.Tensor] = as_dtensors(model.state_dict())
    adapters = peft_config_of(model)
    if adapters is None:
        return weights
    from peft import get_peft_model_state_dict

    written = {
        _identity(tensor)
        for adapter in adapters
        for tensor in get_peft_model_state_dict(model, state_dict=weights, adapter_name=adapter).values()
    }
    return {name: tensor for name, tensor in weights.items() if _identity(tensor) in written}


def _identity(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory, or of the object if the memory has none, as for a DTensor."""
    return tensor.data_ptr() or id(tensor)
