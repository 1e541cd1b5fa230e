"""What SkyRL's FSDP strategy does with a folder, for tests on real ranks: its names and its keys, one file for each rank."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
import torch.distributed as dist
from rank_states import mesh_of, network
from torch import nn
from torch.distributed.fsdp import fully_shard

from async_ckpt.integrations.skyrl import FSDPCheckpoints


class FSDPStrategy:
    """Stands in for SkyRL's."""

    fsdp_strategy = "fsdp2"

    def save_checkpoint(
        self, model, ckpt_dir, node_local_rank, optimizer=None, scheduler=None, client_state=None, tag=None, tokenizer=None
    ):  # fmt: skip
        os.makedirs(ckpt_dir, exist_ok=True)
        extra = {
            "lr_scheduler": scheduler.state_dict(),
            "client_state": client_state,
            "tag": tag,
            "rank": dist.get_rank(),
        }
        parts = {"model": model.state_dict(), "optim": optimizer.state_dict(), "extra_state": extra}
        for what, state in parts.items():
            torch.save(state, self._path(ckpt_dir, what))
        if dist.get_rank() == 0:
            with open(f"{ckpt_dir}/fsdp_config.json", "w") as file:
                json.dump({"fsdp_strategy": self.fsdp_strategy, "world_size": dist.get_world_size()}, file)
        dist.barrier()

    def load_checkpoint(self, model, ckpt_dir, optimizer=None, scheduler=None, **_: Any):
        model.load_state_dict(torch.load(self._path(ckpt_dir, "model"), weights_only=False))
        optimizer.load_state_dict(torch.load(self._path(ckpt_dir, "optim"), weights_only=False))
        extra = torch.load(self._path(ckpt_dir, "extra_state"), weights_only=False)
        scheduler.load_state_dict(extra["lr_scheduler"])
        return ckpt_dir, extra

    def _path(self, folder, what):
        return f"{folder}/{what}_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"


class Strategy(FSDPCheckpoints, FSDPStrategy):
    def __init__(self, layout: str) -> None:
        self.layout = layout  # type: ignore[assignment]


class Trainee:
    """A small model on all ranks, and steps that are the same on any number of them."""

    def __init__(self) -> None:
        self.model = network()
        for layer in self.model:
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh_of())
        fully_shard(self.model, mesh=mesh_of())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)

    @property
    def parts(self) -> tuple[nn.Module, Any, Any]:
        return self.model, self.optimizer, self.scheduler

    def train(self, steps: int) -> None:
        for step in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.linspace(-1, 1, 4 * 13).view(4, 13) + step).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()
