# ruff: noqa: E402
"""Actors of Ray with verl's own workers: ranks of a training that only export weights, and rollouts that only take them.

verl's workers want GPUs to build models and engines. Here are the parts around: what the manager calls is theirs.
"""

from __future__ import annotations

import os
import warnings
from types import SimpleNamespace
from typing import Any

warnings.simplefilter("ignore")
os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")

import ray
import torch
from omegaconf import OmegaConf
from verl.checkpoint_engine.base import CheckpointEngineManager, CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout import BaseRollout
from verl_syncs import digest, exported

BACKEND = "async_ckpt"


class Exporter(ActorRolloutRefWorker):
    """A rank of a training, with a model that is made of its step."""

    def __init__(self, config: dict[str, Any]) -> None:
        Worker.__init__(self)
        self.step = 0
        engine = SimpleNamespace(get_per_tensor_param=lambda: (exported(self.step), None))
        self.actor = SimpleNamespace(engine=engine)
        import_external_libs(config["custom_backend_module"])
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            BACKEND, is_master=self.rank == 0, bucket_size=4096, **config["engine_kwargs"][BACKEND]
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train_to(self, step: int) -> None:
        self.step = step


class Rollout(BaseRollout):
    """The adapter of a rollout, which keeps the weights."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.told: tuple[Any, ...] = ()

    async def resume(self, tags: list[str]) -> None: ...
    async def release(self) -> None: ...

    async def update_weights(self, weights: Any, wire_format: str = "named_tensors", **kwargs: Any) -> None:
        self.weights = {name: tensor.clone() async for name, tensor in weights}
        self.told = (wire_format, kwargs["global_steps"])


class Taker(CheckpointEngineWorker):
    """A worker of a rollout, which tells what its engine has got."""

    def __init__(self, config: Any) -> None:
        super().__init__(OmegaConf.create(config), None, server_adapter=Rollout())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def taken(self) -> tuple[Any, ...]:
        return digest(self.server_adapter.weights), *self.server_adapter.told

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def taken_again(self) -> str:
        return digest({name: tensor.clone() async for name, tensor in self.checkpoint_engine.get_weights()})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def process(self) -> int:
        return os.getpid()


class Replica:
    """A replica as the manager sees it, with the worker group of its rollout, and what it was asked for."""

    def __init__(self, config: dict[str, Any]) -> None:
        rollout = {"name": "vllm", "mode": "async", "checkpoint_engine": config}
        self.group = group_of(Taker, 1, config=rollout)
        self.workers = self.group.workers
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name not in ("abort_all_requests", "release_kv_cache", "resume_kv_cache", "resume_generation"):
            raise AttributeError(name)

        async def asked(**_: Any) -> None:
            self.asked.append(name)

        return asked


def group_of(kind: type, size: int, **arguments: Any) -> RayWorkerGroup:
    made = RayClassWithInitArgs(cls=ray.remote(kind), **arguments)
    pool = RayResourcePool(process_on_nodes=[size], use_gpu=False, max_colocate_count=1)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, use_gpu=False, device_name="cpu")


def config_of(root: object, **options: Any) -> dict[str, Any]:
    return {
        "backend": BACKEND,
        "update_weights_bucket_megabytes": 1,
        "custom_backend_module": "async_ckpt.integrations.verl_weights",
        "engine_kwargs": {BACKEND: {"root": str(root), "timeout_seconds": 60.0, **options}},
    }


def manager_of(config: dict[str, Any], exporters: RayWorkerGroup, replicas: list[Replica]) -> CheckpointEngineManager:
    return CheckpointEngineManager(CheckpointEngineConfig(**config), exporters, replicas)
