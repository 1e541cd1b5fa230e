"""Trainings with the real containers of torchtitan, in a loop that calls a checkpoint manager as torchtitan's trainer does.

The trainer itself wants a GPU: it moves its model there. Here are its optimizers, schedulers, data loader and managers, on any layout of
ranks: one process, FSDP2, HSDP, tensor parallelism, and stages of a pipeline of which each rank has some.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import IterableDataset

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torchtitan.components.checkpointer as theirs
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
    from torchtitan.protocols.state_dict_adapter import StateDictAdapter

    from async_ckpt.integrations import torchtitan as ours

warnings.filterwarnings("ignore", "To get the last learning rate")

NUM_LAYERS, WIDTH = 4, 8
ADAMW = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}


class Batches(IterableDataset):  # type: ignore[type-arg]
    """Numbers without end, other ones for each rank of data parallelism; torchtitan's datasets keep their place like this."""

    def __init__(self, dp_rank: int) -> None:
        self.dp_rank, self.at = dp_rank, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.at += 1
            yield torch.randn(WIDTH, generator=torch.Generator().manual_seed(1000 * self.dp_rank + self.at))

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Adapter(StateDictAdapter):
    """Other names in Hugging Face's folders, as the adapters of torchtitan's models have them."""

    def __init__(self, hf_assets_path: str | None = None) -> None:
        super().__init__(None, hf_assets_path)  # type: ignore[arg-type]

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {f"model.{name}": value for name, value in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("model."): value for name, value in hf_state_dict.items()}


def part_of(layers: range) -> nn.Module:
    """A part of the model: these layers, each a function of its number and the seed."""
    part = nn.Module()
    made = {str(n): nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH)) for n in layers}
    part.layers = nn.ModuleDict(made)
    return part


def forward(part: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for layer in part.layers.values():  # type: ignore[union-attr, operator]
        x = x + layer(x)
    return x


class Layout:
    """The parts of the model that this rank holds, and its place in data parallelism, for one word."""

    def __init__(self, word: str) -> None:
        size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        self.layers, self.dp_rank, self.dp_size = [range(NUM_LAYERS)], rank, size
        self.mesh: Any = None
        self.tp: Any = None
        if word == "fsdp":
            self.mesh = init_device_mesh("cpu", (size,))
        elif word == "hsdp":
            self.mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
        elif word == "tp":
            world = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
            self.mesh, self.tp = world["dp"], world["tp"]
            self.dp_rank, self.dp_size = rank // 2, size // 2
        elif word == "pp":  # two stages, of which each has two parts that are not neighbours
            world = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("pp", "dp"))
            self.mesh = world["dp"]
            stage, self.dp_rank = divmod(rank, size // 2)
            self.dp_size = size // 2
            self.layers = [range(stage, stage + 1), range(stage + 2, stage + 3)]

    def parts(self, seed: int) -> list[nn.Module]:
        torch.manual_seed(seed)
        whole = part_of(range(NUM_LAYERS))
        return [self._parallel(self._cut(whole, layers)) for layers in self.layers]

    def _cut(self, whole: nn.Module, layers: range) -> nn.Module:
        part = nn.Module()
        part.layers = nn.ModuleDict({str(n): whole.layers[str(n)] for n in layers})  # type: ignore[index]
        return part

    def _parallel(self, part: nn.Module) -> nn.Module:
        for layer in part.layers.values():  # type: ignore[union-attr, operator]
            if self.tp is not None:
                parallelize_module(layer, self.tp, {"0": ColwiseParallel(), "2": RowwiseParallel()})
            if self.mesh is not None:
                fully_shard(layer, mesh=self.mesh)
        return part


class Trainer:
    """What torchtitan's trainer has of a run, and its loop. `kind` is the module of a manager, `ours` or `theirs`."""

    def __init__(
        self,
        folder: object,
        layout: str = "one",
        *,
        kind: Any = ours,
        seed: int = 0,
        hf: str | None = None,
        **options: Any,
    ) -> None:
        at = Layout(layout)
        self.parts, self.step, self.ntokens_seen, self.losses = at.parts(seed), 0, 0, {}
        groups = [ParamGroupConfig(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs=ADAMW)]
        optimizers = OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
        self.optimizers = OptimizersContainer(optimizers, model_parts=self.parts)
        schedules = LRSchedulersContainer.Config(warmup_steps=3)
        self.lr_schedulers = schedules.build(optimizers=self.optimizers, training_steps=20)
        self.dataloader = ParallelAwareDataloader(Batches(at.dp_rank), at.dp_rank, at.dp_size, batch_size=4)
        self.config = kind.CheckpointManager.Config(
            **{"enable": True, "interval": 2, "last_save_model_only": False, **options}
        )
        self.checkpointer = self.config.build(
            dataloader=self.dataloader,
            model_parts=self.parts,
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self},
            sd_adapter=Adapter(hf),
            base_folder=str(folder),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state_dict["step"], state_dict["ntokens_seen"]

    def load(self) -> bool:
        return bool(self.checkpointer.load(step=self.config.load_step))

    def train(self, steps: int, *, until: int | None = None) -> dict[int, str]:
        """Load, and train as `torchtitan.trainer.Trainer.train` does. Returns the losses by step, as text of every bit."""
        self.load()
        batches = iter(self.dataloader)
        while self.step < (steps if until is None else until):
            self.step += 1
            self.train_step(next(batches))
            self.checkpointer.save(self.step, last_step=self.step == steps)
        self.checkpointer.close()
        return self.losses

    def train_step(self, batch: torch.Tensor) -> None:
        self.optimizers.zero_grad()
        loss = sum(forward(part, batch).square().mean() for part in self.parts)
        loss.backward()  # type: ignore[union-attr]
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        self.lr_schedulers.step()
        self.ntokens_seen += batch.numel()
        self.losses[self.step] = loss.item().hex()  # type: ignore[union-attr]

    def all(self) -> dict[str, Any]:
        """The state with full tensors, as a copy. Every rank calls it."""
        states = {
            "model": theirs.ModelWrapper(self.parts),
            "optimizer": self.optimizers,
            "lr_scheduler": self.lr_schedulers,
            "train_state": self,
        }
        found = {name: one.state_dict() for name, one in states.items()}
        made: dict[str, Any] = torch.utils._pytree.tree_map(_whole, found)
        return made


def _whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def digest(state: Any) -> str:
    """A text that is the same for states with the same names and bits."""
    import hashlib
    import io

    out = io.BytesIO()
    flat = sorted((str(path), value) for path, value in torch.utils._pytree.tree_flatten_with_path(state)[0])
    for path, value in flat:
        out.write(path.encode())
        out.write(value.contiguous().numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode())
    return hashlib.sha256(out.getvalue()).hexdigest()[:16]


os.environ.setdefault("HF_HUB_OFFLINE", "1")
