"""Strategies whose ranks save shards: methods that replace their own.

In: the checkpoints of a ModelParallelStrategy or an FSDPStrategy. Out: folders of archives, and models and optimizers
filled from them on any mesh. Knows nothing of: the order of saves.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from ... import Place
from ...plumbing import sharded, wrappers
from ..common.training_archive import archives_in, refuse_missing
from ..dcp import TarStorageReader
from .background_saves import BackgroundSaves
from .checkpoint_paths import REST


def saves_shards(strategy: Any) -> bool:
    """True if a strategy saves shards; False if it gathers full state dicts, or has no shards."""
    state_dict_type = getattr(strategy, "_state_dict_type", None)  # of an FSDPStrategy
    return bool(getattr(strategy, "_save_distributed_checkpoint", state_dict_type == "sharded"))


class StrategyShards:
    """The methods that replace a strategy's own, so that its ranks save shards in the background.

    They are set on the object, not on its class. `plain` has the original methods.
    """

    names: tuple[str, ...] = ("save_checkpoint", "load_checkpoint", "teardown")

    def __init__(self, saves: BackgroundSaves, strategy: Any) -> None:
        self.saves, self.strategy = saves, strategy
        self.plain = SimpleNamespace(**{name: getattr(strategy, name) for name in self.names})
        for name in self.names:
            setattr(strategy, name, getattr(self, name))

    def __reduce__(self) -> Any:
        """A copy replaces the methods of the copied strategy, which has those of its class."""
        return type(self), (self.saves, self.strategy)

    @property
    def is_on(self) -> bool:
        return saves_shards(self.strategy)

    def teardown(self) -> None:
        """Wait for the saves under way, then tear down the strategy, then raise the error of the saves."""
        try:
            self.saves.end_run()
        finally:
            self.plain.teardown()

    def path_to_load(self, path: Any) -> Path:
        """Wait for the saves under way. Returns the path from which rank 0 loads."""
        self.saves.finish()
        return Path(self.strategy.broadcast(path))


class TrainerShards(StrategyShards):
    """The shards of a strategy of the Trainer. The tensors stay on their devices until they are copied."""

    names = (*StrategyShards.names, "remove_checkpoint", "lightning_module_state_dict", "optimizer_state")

    def lightning_module_state_dict(self) -> Any:
        if not self.is_on:
            return self.plain.lightning_module_state_dict()
        return _state_dicts().get_model_state_dict(self.strategy.model)

    def optimizer_state(self, optimizer: Any) -> Any:
        if not self.is_on:
            return self.plain.optimizer_state(optimizer)
        optimizer = getattr(optimizer, "_optimizer", optimizer)  # Lightning's wrapper
        return _state_dicts().get_optimizer_state_dict(self.strategy.model, optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save on all ranks: the shards as archives, and everything else on rank 0."""
        if not self.is_on or storage_options is not None:
            self.plain.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        rest = dict(checkpoint)
        parts = {"state_dict": rest.pop("state_dict")}
        parts |= {f"optimizer_{i}": part for i, part in enumerate(rest.pop("optimizer_states", ()))}
        if not wrappers.StateDictCache().is_spread(parts):  # `configure_model` has not sharded anything
            self.plain.save_checkpoint(checkpoint, filepath)
            return
        self.saves.save_shards(self.strategy, filepath, parts, rest)

    def load_checkpoint(self, checkpoint_path: Any, **options: Any) -> Any:
        """Fill model and optimizers, on any mesh, from our folder or from Lightning's. Returns the rest."""
        path, strategy = self.path_to_load(checkpoint_path), self.strategy
        if (archives := archives_in(path)) is None:
            return self.plain.load_checkpoint(path, **options)
        optimizers = {f"optimizer_{i}": optimizer for i, optimizer in enumerate(strategy.optimizers)}
        refuse_missing(archives[0], {"state_dict", *optimizers})
        _fill(archives, "state_dict", strategy.model, optimizers, strict=strategy.lightning_module.strict_loading)
        # Lightning decides by the options whether to trust the file.
        return torch.load(path / REST, map_location="cpu", **options)  # nosec B614

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint after the saves under way."""
        if self.strategy.is_global_zero:
            self.saves.remove(filepath)


class FabricShards(StrategyShards):
    """The shards of a strategy of Fabric."""

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Any = None,  # noqa: A002
    ) -> None:
        """Save on all ranks: models and optimizers as archives, and everything else on rank 0."""
        model = _sharded_model(state)
        if not self.is_on or model is None or storage_options is not None or filter is not None:
            self.plain.save_checkpoint(path, state, storage_options, filter)
            return
        parts, rest = {}, {}
        for key, value in state.items():
            if isinstance(value, torch.nn.Module):
                parts[key] = _state_dicts().get_model_state_dict(value)
            elif isinstance(value, torch.optim.Optimizer):
                parts[key] = _state_dicts().get_optimizer_state_dict(model, value)
            else:
                rest[key] = value if wrappers.method_of(value, "state_dict") is None else value.state_dict()
        self.saves.save_shards(self.strategy, path, parts, rest)

    def load_checkpoint(self, path: Any, state: Any = None, strict: bool = True, **options: Any) -> Any:
        """Fill the objects in `state`, on any mesh, from our folder or from Lightning's. Returns the rest."""
        path = self.path_to_load(path)
        model = _sharded_model(state) if isinstance(state, dict) else None
        if (archives := archives_in(path)) is None or model is None:
            return self.plain.load_checkpoint(path, state, strict, **options)
        models = {key: value for key, value in state.items() if isinstance(value, torch.nn.Module)}
        optimizers = {key: value for key, value in state.items() if isinstance(value, torch.optim.Optimizer)}
        # Lightning decides by the options whether to trust the file.
        rest = torch.load(path / REST, map_location="cpu", **options)  # nosec B614
        wanted = state.keys() - models.keys() - optimizers.keys()
        if strict and (missing := sorted(wanted - rest.keys())):
            raise KeyError(f"{path} has no {missing[0]!r}; leave it out of the state, or pass strict=False")
        refuse_missing(archives[0], {*models, *optimizers})
        for key, value in models.items():
            _fill(archives, key, value, optimizers if value is model else {}, strict=strict)
        state.update({key: rest.pop(key) for key in wanted if key in rest})
        return rest


def _sharded_model(state: Mapping[str, Any]) -> torch.nn.Module | None:
    """The model whose parameters are sharded."""
    from ..common.fsdp1_state import is_fsdp1  # it imports FSDP

    models = [value for value in state.values() if isinstance(value, torch.nn.Module)]
    spread = (m for m in models if any(map(sharded.is_dtensor, m.parameters())) or any(map(is_fsdp1, m.modules())))
    return next(spread, None)


def _state_dicts() -> ModuleType:
    return import_module("torch.distributed.checkpoint.state_dict")


def _fill(archives: tuple[Place, int], key: str, model: Any, optimizers: Mapping[str, Any], *, strict: bool) -> None:
    """Fill a model and its optimizers from the archives of all ranks. Every rank calls this."""
    dcp, torch_ = import_module("torch.distributed.checkpoint"), _state_dicts()
    # Running statistics may differ by rank. Each rank gets its own, or with another number of ranks those of rank 0.
    place, saved_world_size = archives
    is_same_world = saved_world_size == torch.distributed.get_world_size()
    from_ranks = None if is_same_world else {key: 0, **dict.fromkeys(optimizers, 0)}
    reader = TarStorageReader(place, from_ranks=from_ranks)
    weights = torch_.get_model_state_dict(model)
    states = {name: torch_.get_optimizer_state_dict(model, optimizer) for name, optimizer in optimizers.items()}
    dcp.load({key: weights, **states}, storage_reader=reader)  # in one call, which fills nothing if a name is missing
    torch_.set_model_state_dict(model, weights, options=torch_.StateDictOptions(strict=strict))
    for name, optimizer in optimizers.items():
        torch_.set_optimizer_state_dict(model, optimizer, states[name])
