"""The state of an engine under ZeRO 1 to 3 as slices of full parameters, which any number of ranks can load.

In: an engine. Out: its state for an archive, or the engine filled from an archive. Knows nothing of: folders, saves.

A rank has ranges of parameters, in flat partitions with padding that depends on the number of ranks. Each range is
described in the way of Megatron: elements [start, stop) of a parameter with a name and a shape. So an archive has full
tensors: the group "fp32" those of the parameters, "exp_avg" those of this optimizer state, and so on.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from ... import Place, load
from ...errors import StateMismatchError
from ...plumbing import another_kind, optimizer_parts, sharded
from ..dcp import restore
from .zero_guard import innermost

# The flat fp32 partitions, by DeepSpeed's names: under ZeRO 1 and 2, and under ZeRO 3.
_FLATS: Final = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
_FP32: Final = "fp32"
_MODEL: Final = "model"
RESTS: Final = "ranks"
"""The group with each rank's result of `rest_of`."""
# Small values of the engine and of its optimizer, which DeepSpeed stores, too.
_OF_ENGINE: Final = ("global_steps", "global_samples", "skipped_steps")
_OF_OPTIMIZER: Final = ("loss_scaler", "dynamic_loss_scale", "overflow")


@dataclass(frozen=True)
class ZeroSlice:
    """A range of a parameter on this rank, with the attributes of Megatron's ShardedTensor. It may be empty."""

    key: str
    data: torch.Tensor
    local_shape: tuple[int, ...]
    flattened_range: slice
    axis_fragmentations: tuple[int, ...] | None = None
    replica_id: int = 0

    @property
    def global_shape(self) -> tuple[int, ...]:
        return self.local_shape

    @property
    def global_offset(self) -> tuple[int, ...]:
        return (0,) * len(self.local_shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype


def refuse(engine: Any) -> None:
    """Raise NotImplementedError for an engine whose state is sharded in another way."""
    if engine.zero_optimization_stage() == 0:
        raise NotImplementedError("without ZeRO, DeepSpeed's own files are loaded on any number of ranks; use these")
    if not any(hasattr(engine.optimizer, name) for name in _FLATS):
        raise NotImplementedError(f'{type(engine.optimizer).__name__} is not supported with layout="archive"')
    sizes = {torch.distributed.get_world_size(group=engine.optimizer.dp_process_group), engine.seq_dp_world_size}
    if engine.has_moe_layers or sizes != {torch.distributed.get_world_size()}:
        raise NotImplementedError(
            'layout="archive" supports ZeRO over all ranks, without model parallelism and experts'
        )


def tensors_of(engine: Any) -> dict[str, dict[str, Any]]:
    """The tensors of a state, by group and name: the weights, and slices of the optimizer's tensors."""
    ranges, flats = [*_ranges(engine)], _flats(engine)
    state = innermost(engine.optimizer).state  # type: ignore[union-attr]
    keys = sorted({key for flat in flats for key, value in state[flat].items() if _is_like(value, flat)})
    groups: dict[str, dict[str, Any]] = {_MODEL: _weights(engine), _FP32: _sliced(ranges, flats)}
    return groups | {key: _sliced(ranges, [state[flat][key] for flat in flats]) for key in keys}


def parts_of(tensors: Mapping[str, Mapping[str, Any]]) -> list[torch.Tensor]:
    """The plain tensors that a snapshot of slices copies."""
    slicer = sharded.Slicer()
    slices = [value for group in tensors.values() for value in group.values() if isinstance(value, ZeroSlice)]
    return [part for one in slices for part in slicer.slice(one, name=one.key).parts]


def rest_of(engine: Any, client_state: Mapping[str, Any]) -> bytes:
    """The rest of this rank's state, as a pickle like DeepSpeed's."""
    optimizer, scheduler = engine.optimizer, engine.lr_scheduler
    inner, flats = innermost(optimizer), _flats(engine)
    assert inner is not None
    rest = {
        "client_state": dict(client_state),
        "engine": {name: getattr(engine, name) for name in _OF_ENGINE},
        "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
        "optimizer": {name: getattr(optimizer, name) for name in _OF_OPTIMIZER if hasattr(optimizer, name)},
        "param_groups": [{key: value for key, value in g.items() if key != "params"} for g in inner.param_groups],
        "state": {key: value for key, value in inner.state[flats[0]].items() if not _is_like(value, flats[0])},
        "classes": optimizer_parts.classes_of(inner),
        "keys": [key for key, value in inner.state[flats[0]].items() if _is_like(value, flats[0])],
    }
    file = io.BytesIO()
    torch.save(rest, file)
    return file.getvalue()


def fill(engine: Any, archive: Place, saved_world_size: int, *, optimizer: bool, scheduler: bool, only: bool) -> Any:
    """Fill an engine from an archive, and return the client state. With `only`, fill only the weights."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    number = rank if rank < saved_world_size else 0
    # The pickle is trusted as far as DeepSpeed trusts its own files.
    pickled = io.BytesIO(load(archive, select=RESTS)[RESTS][number])
    rest = torch.load(pickled, map_location="cpu", weights_only=False)  # nosec B614
    _compare(engine, archive, rest, optimizer=optimizer and not only, scheduler=scheduler and not only)
    with _partitioned(engine.optimizer):
        inner, flats = innermost(engine.optimizer), _flats(engine)
        assert inner is not None
        if optimizer and not only:
            for flat in flats:
                for key, value in rest["state"].items():
                    inner.state[flat][key] = value.clone() if isinstance(value, torch.Tensor) else value
                for key in rest["keys"]:
                    inner.state[flat].setdefault(key, torch.zeros_like(flat))
            for group, saved in zip(inner.param_groups, rest["param_groups"], strict=True):
                group.update(saved)
            for name, value in rest["optimizer"].items():
                setattr(engine.optimizer, name, value)
        live = tensors_of(engine)
        if not optimizer or only:
            live = {name: live[name] for name in (_MODEL, _FP32)}
        from_ranks = None if world_size == saved_world_size else {_MODEL: 0}
        restore(live, archive, select=tuple(live), from_ranks=from_ranks)
        _update_weights(engine.optimizer)
    if not only:
        for name, value in rest["engine"].items():
            setattr(engine, name, value)
        if scheduler and engine.lr_scheduler is not None:
            engine.lr_scheduler.load_state_dict(rest["lr_scheduler"])
    return rest["client_state"]


def _compare(engine: Any, archive: Place, rest: Mapping[str, Any], *, optimizer: bool, scheduler: bool) -> None:
    """Refuse a checkpoint without a scheduler, which DeepSpeed notices only when all else is loaded, and the state of
    another kind of optimizer.
    """
    if scheduler and engine.lr_scheduler is not None and rest["lr_scheduler"] is None:
        raise StateMismatchError(
            f"{archive.shown} has no lr_scheduler; pass load_lr_scheduler_states=False; nothing was overwritten",
            missing=("lr_scheduler",),
        )
    inner = innermost(engine.optimizer)
    keys = dict.fromkeys([*rest["keys"], *rest["state"]])
    groups = [{**group, "params": [number]} for number, group in enumerate(rest["param_groups"])]
    saved = {"state": dict.fromkeys(range(len(groups)), keys), "param_groups": groups}
    if optimizer and inner is not None and (why := another_kind(inner, saved, dict, rest.get("classes", ()))):
        raise StateMismatchError(
            f"{archive.shown} does not fit the engine; nothing was overwritten:\n  optimizer {why}", mismatched=(why,)
        )


@contextmanager
def _partitioned(optimizer: Any) -> Iterator[None]:
    """A block in which all parameters of a ZeRO 3 optimizer are partitioned, as while DeepSpeed loads."""
    getattr(optimizer, "checkpoint_event_prologue", lambda: None)()
    try:
        yield
    finally:
        getattr(optimizer, "checkpoint_event_epilogue", lambda: None)()


def _update_weights(optimizer: Any) -> None:
    """Update the weights that a ZeRO optimizer derives from its fp32 partitions."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        for fp32, weights in zip(
            optimizer.fp32_partitioned_groups_flat, optimizer.fp16_partitioned_groups_flat, strict=True
        ):
            weights.data.copy_(fp32.data)
    else:
        optimizer._link_all_hp_params()


def _flats(engine: Any) -> list[torch.Tensor]:
    return [flat for name in _FLATS for flat in getattr(engine.optimizer, name, ())]


def _is_like(value: Any, flat: torch.Tensor) -> bool:
    """True if a value of the optimizer's state has an element for each element of the partition."""
    return isinstance(value, torch.Tensor) and value.shape == flat.shape


# A parameter's name, shape and start of its range; then the number of its partition, and the offset and length there.
_Range = tuple[str, tuple[int, ...], int, int, int, int]


def _ranges(engine: Any) -> Iterator[_Range]:
    optimizer = engine.optimizer
    for param, name in engine.param_names.items():
        if not param.requires_grad:
            continue
        if hasattr(param, "ds_id"):
            number, offset, _ = optimizer.grad_position[optimizer.get_param_id(param)]
            start, length = _own_range(param)
            yield name, tuple(param.ds_shape), start, number, offset, length
        elif (mapping := getattr(param, "_hp_mapping", None)) is not None:
            address = mapping.hp_fragment_address
            start = mapping.lp_fragment_address.start
            yield name, tuple(param.shape), start, mapping.param_group_index, address.start, address.numel
        else:
            yield name, tuple(param.shape), 0, 0, 0, 0


def _own_range(param: Any) -> tuple[int, int]:
    """The elements of a ZeRO 3 parameter on this rank: the number of the first, and the count without padding."""
    start = torch.distributed.get_rank() * param.partition_numel()
    return start, max(0, min(param.partition_numel(), param.ds_numel - start))


def _sliced(ranges: list[_Range], flats: list[torch.Tensor]) -> dict[str, ZeroSlice]:
    return {
        name: ZeroSlice(name, flats[number].detach().narrow(0, offset, length), shape, slice(start, start + length))
        for name, shape, start, number, offset, length in ranges
    }


def _weights(engine: Any) -> dict[str, Any]:
    """The state dict of the model. Under ZeRO 3, without the parameters in the optimizer, and with slices of others."""
    if not hasattr(engine.optimizer, "fp32_partitioned_groups_flat"):
        return dict(engine.module.state_dict())
    names = {name: param for param, name in engine.param_names.items()}
    weights = {name: value for name, value in engine.module.state_dict().items() if name not in names}
    for name, param in names.items():
        if not param.requires_grad:
            start, length = _own_range(param)
            held = param.ds_tensor.detach().narrow(0, 0, length)
            weights[name] = ZeroSlice(name, held, tuple(param.ds_shape), slice(start, start + length))
    return weights
