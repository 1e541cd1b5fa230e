"""Trainings by SkyRL's own strategy and trainers on processors, of equal losses wherever they run.

SkyRL is written for GPUs alone. Here its device mesh is one of processors, calls that wait for a GPU do nothing, and the
package `flash_attn`, whose kernels are never called, is an empty module.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.simplefilter("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from loguru import logger  # noqa: E402
from torch.distributed import device_mesh  # noqa: E402
from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from benchmarks.frameworks import have_skyrl_without_gpu  # noqa: E402

have_skyrl_without_gpu()
_mesh_of = device_mesh.init_device_mesh
device_mesh.init_device_mesh = lambda _, *shape, **names: _mesh_of("cpu", *shape, **names)

from skyrl.backends.skyrl_train.distributed import fsdp_utils  # noqa: E402
from skyrl.backends.skyrl_train.distributed.fsdp_strategy import FSDPStrategy  # noqa: E402
from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper  # noqa: E402
from skyrl.backends.skyrl_train.workers.worker_dispatch import WorkerDispatch  # noqa: E402
from skyrl.backends.skyrl_train_backend import SkyRLTrainBackend  # noqa: E402
from skyrl.train.config import FSDPConfig, ModelConfig, OptimizerConfig, SkyRLTrainConfig  # noqa: E402
from skyrl.train.trainer import RayPPOTrainer  # noqa: E402

from async_ckpt.integrations.skyrl import FSDPCheckpoints, TrainerCheckpoints  # noqa: E402

logger.remove()
logging.getLogger("skyrl").setLevel("ERROR")
torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
torch.cuda.set_device = lambda _: None


def _sync_buffers(model: torch.nn.Module, _: Any) -> None:
    """Broadcast the buffers that are not in a state dict, as SkyRL does by GPUs when it makes a model."""
    for module in model.modules():
        for name in sorted(module._non_persistent_buffers_set):
            value = module._buffers[name]
            module._buffers[name] = value = torch.empty_like(value, device="cpu") if value.is_meta else value
            dist.broadcast(value, src=0)


fsdp_utils._sync_non_persistent_buffers = _sync_buffers


class PlainStrategy(FSDPStrategy):
    """SkyRL's own."""

    def print(self, *_: Any) -> None:
        """Nothing: what a script prints is what it tells its test."""


class Strategy(FSDPCheckpoints, PlainStrategy):
    """Ours in front of it."""

    def __init__(self, layout: Any) -> None:
        super().__init__(FSDPConfig(), OptimizerConfig(lr=1e-2), ModelConfig(), num_training_steps=20)
        self.layout = layout


def plain_strategy() -> PlainStrategy:
    return PlainStrategy(FSDPConfig(), OptimizerConfig(lr=1e-2), ModelConfig(), num_training_steps=20)


SIZES: Mapping[str, int] = MappingProxyType({"hidden_size": 16, "intermediate_size": 32})


def model_of(sizes: Mapping[str, int] = SIZES) -> LlamaForCausalLM:
    """A small model, always the same."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **sizes, vocab_size=32, num_hidden_layers=2, num_attention_heads=2, tie_word_embeddings=False,
        attention_dropout=0.2, attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Training:
    """A worker of SkyRL by what its checkpoint calls need: a strategy, a model, an optimizer, a scheduler."""

    def __init__(self, layout: str | None, sizes: Mapping[str, int] = SIZES) -> None:
        """Without a `layout`, by plain SkyRL. Dropout draws from the generator of each rank."""
        self.strategy = strategy = Strategy(layout) if layout else plain_strategy()
        strategy.setup_distributed()
        wrapper = HFModelWrapper(model_of(sizes).train())
        self.model, self.optimizer, self.scheduler = strategy.prepare((wrapper, None, None))
        torch.manual_seed(7 + dist.get_rank())
        self.step = 0

    def train(self, last: int) -> list[str]:
        """Train until a step. Returns this rank's part of the losses, in every bit."""
        losses = []
        while self.step < last:
            ids = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(self.step))
            mine = ids[dist.get_rank() :: dist.get_world_size()]
            loss = self.model.model(input_ids=mine, labels=mine).loss
            self.strategy.backward(loss, self.model, self.optimizer)
            self.strategy.optimizer_step(self.optimizer, self.model, self.scheduler)
            losses.append(loss.item().hex())
            self.step += 1
        return losses

    def save_checkpoint(self, ckpt_dir: str, tokenizer: Any = None, **options: Any) -> Any:
        """As SkyRL's worker calls its strategy."""
        return self.strategy.save_checkpoint(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            ckpt_dir=ckpt_dir,
            node_local_rank=dist.get_rank(),
            tokenizer=tokenizer,
            **options,
        )

    def load_checkpoint(self, ckpt_dir: str, optimizer: bool = True) -> dict[str, Any]:
        """As SkyRL's worker calls its strategy."""
        _, states = self.strategy.load_checkpoint(
            model=self.model,
            optimizer=self.optimizer if optimizer else None,
            scheduler=self.scheduler if optimizer else None,
            ckpt_dir=ckpt_dir,
            load_optimizer_states=optimizer,
            load_lr_scheduler_states=optimizer,
        )
        return states

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model.model, "optimizer": self.optimizer, "scheduler": self.scheduler}


# --- trainers, and the Tinker backend, in the process of their only worker ------------------------------------------


class OneWorker(WorkerDispatch):
    """SkyRL's dispatch, whose only worker is in this process, and no actor of Ray."""

    def __init__(self, training: Training) -> None:
        self._training, self._actor_groups = training, {}

    def save_checkpoint(self, model: str, ckpt_dir: str, tokenizer: Any = None, model_id: str | None = None) -> None:
        self._training.save_checkpoint(ckpt_dir, tokenizer)

    def load_checkpoint(
        self,
        model: str,
        ckpt_dir: str,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        model_id: str | None = None,
    ) -> None:
        self._training.load_checkpoint(ckpt_dir, load_optimizer_states)

    def save_hf_model(self, model: str, export_dir: str, tokenizer: Any) -> None:
        self._training.strategy.save_hf_model(self._training.model, export_dir, tokenizer)

    async def save_weights_for_sampler(self, model_id: str | None = None) -> None:
        """Nothing: there are no inference engines."""

    def finalize_pending_saves(self, model: str) -> None:
        if isinstance(self._training.strategy, FSDPCheckpoints):
            self._training.strategy.finalize_pending_saves()


class BackgroundTrainer(TrainerCheckpoints, RayPPOTrainer):
    """Ours in front of SkyRL's."""


def trainer_of(kind: type[RayPPOTrainer], root: str, dispatch: WorkerDispatch | None = None, keep: int = -1) -> Any:
    config = SkyRLTrainConfig()
    config.trainer.ckpt_path, config.trainer.max_ckpts_to_keep = root, keep
    config.generator.inference_engine.enable_ray_prometheus_stats = False
    trainer = kind(config, None, None, None, None, None)
    trainer.dispatch = dispatch
    if kind is RayPPOTrainer:
        trainer._cleanup_old_checkpoints = lambda: None  # there are no nodes of Ray to clean up on
    # With a generator of its own: it takes no random numbers of the worker, which is in this process.
    trainer.train_dataloader = StatefulDataLoader(range(100), batch_size=2, generator=torch.Generator())
    return trainer


class TrainingByTrainer:
    """A training of one worker, whose checkpoints are those of a trainer. `data` is what the trainer's loader gave."""

    def __init__(
        self, root: str, layout: str | None = "async_ckpt", keep: int = -1, sizes: Mapping[str, int] = SIZES
    ) -> None:
        self.worker = Training(layout, sizes)
        self.trainer = trainer_of(BackgroundTrainer if layout else RayPPOTrainer, root, OneWorker(self.worker), keep)
        self.data: list[int] = []
        self._batches: Any = None

    def resume(self) -> int:
        step, _ = self.trainer.load_checkpoints()
        self.worker.step = self.trainer.global_step = step
        return int(step)

    def train(self, last: int, save: bool = True) -> list[str]:
        """Train until a step, and save at each. Returns the losses."""
        losses = []
        self._batches = self._batches or iter(self.trainer.train_dataloader)
        for step in range(self.worker.step + 1, last + 1):
            self.data += next(self._batches).tolist()
            losses += self.worker.train(step)
            self.trainer.global_step = step
            if save:
                self.trainer.save_checkpoints()
        return losses


def tinker_backend(dispatch: WorkerDispatch) -> SkyRLTrainBackend:
    """SkyRL's own Tinker backend, of one model with the id "a"."""
    backend = object.__new__(SkyRLTrainBackend)
    backend._dispatch, backend._tokenizer = dispatch, None
    backend._get_role = lambda _: "policy"
    return backend
