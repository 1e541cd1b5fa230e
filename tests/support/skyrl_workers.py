"""SkyRL's own workers as actors of Ray, on processors, and a training by them through SkyRL's own dispatch and trainer.

Ray is told of GPUs, which are numbers only. What SkyRL asks of a GPU is answered as in `skyrl_runs`.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

# First: it makes SkyRL importable.
from skyrl_runs import BackgroundTrainer, model_of, trainer_of

# isort: split
import ray
import torch
import torch.distributed as dist
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase
from skyrl.backends.skyrl_train.workers.worker import PPORayActorGroup
from skyrl.backends.skyrl_train.workers.worker_dispatch import WorkerDispatch
from skyrl.train.config import SkyRLTrainConfig

from async_ckpt.core.storage.local import LocalSink
from async_ckpt.integrations.skyrl import FSDPWorkerCheckpoints

_LENGTH, _VOCABULARY = 8, 32


class Policy(FSDPWorkerCheckpoints, FSDPPolicyWorkerBase):
    """SkyRL's worker with ours in front of it, and what a test does to it."""

    def init_worker_process_group(self) -> None:
        dist.init_process_group("gloo")  # SkyRL's own asks for NCCL as well
        super().init_worker_process_group()

    def pid(self) -> int:
        return os.getpid()

    def hold_files(self) -> None:
        """Let no file of an archive become durable until `let_files_go`."""
        self._may_finish, real = threading.Event(), LocalSink.finish

        def finish(*args: Any, **options: Any) -> Any:
            self._may_finish.wait()
            return real(*args, **options)

        LocalSink.finish = finish  # type: ignore[method-assign]

    def let_files_go(self) -> None:
        self._may_finish.set()

    def break_disk_of(self, rank: int) -> None:
        """Let one file of an archive of this rank fail."""
        real = LocalSink.finish

        def finish(*_: Any, **__: Any) -> Any:
            LocalSink.finish = real  # type: ignore[method-assign]
            raise OSError(5, f"the disk of rank {rank} is broken")

        if dist.get_rank() == rank:
            LocalSink.finish = finish  # type: ignore[method-assign]


class TrainingByWorkers:
    """A training by SkyRL's dispatch to two workers, from the model in a folder. Its checkpoints are the trainer's."""

    def __init__(self, root: Path, model: Path) -> None:
        config = SkyRLTrainConfig()
        config.trainer.placement.colocate_all = config.trainer.placement.colocate_policy_ref = False
        config.trainer.algorithm.temperature = 1.0
        config.trainer.flash_attn = config.trainer.remove_microbatch_padding = False
        config.trainer.gradient_checkpointing = False
        config.trainer.policy.optimizer_config.lr = 1e-2
        self._model = model
        self._group = PPORayActorGroup(config.trainer, 1, 2, ray.remote(num_gpus=1)(Policy))
        self._dispatch = WorkerDispatch(config, self._group)
        self.begin(root)

    def begin(self, root: Path) -> None:
        """Begin anew, by the same workers, with checkpoints there."""
        self.trainer: Any = trainer_of(BackgroundTrainer, str(root), self._dispatch)
        self.trainer.global_step = 0
        self._dispatch.init_model("policy", str(self._model), num_training_steps=20)
        self._batches: Any = None

    def resume(self) -> int:
        self.trainer.global_step, _ = self.trainer.load_checkpoints()
        return int(self.trainer.global_step)

    def train(self, last: int) -> list[str]:
        """Train until a step. Returns the losses, in every bit."""
        losses = []
        self._batches = self._batches or iter(self.trainer.train_dataloader)
        for step in range(self.trainer.global_step + 1, last + 1):
            batch = _batch_of(next(self._batches).tolist())
            output = self._dispatch.forward_backward("policy", batch, loss_fn="cross_entropy")
            self._dispatch.optim_step("policy")
            losses.append(output.metrics["loss"].hex())
            self.trainer.global_step = step
        return losses

    def on_each(self, name: str, *arguments: Any) -> list[Any]:
        """The results of a method of the workers."""
        results: list[Any] = ray.get(self._group.async_run_ray_method("pass_through", name, *arguments))
        return results

    def end(self) -> None:
        """Have the workers die, those that have not yet."""
        for worker in self._group._actor_handlers:
            ray.kill(worker)


def _batch_of(numbers: list[int]) -> TrainingInputBatch:
    """A text of random tokens for each number."""
    rows = [torch.randint(_VOCABULARY, (_LENGTH,), generator=torch.Generator().manual_seed(n)) for n in numbers]
    mask = torch.ones(len(rows), _LENGTH - 1)
    batch = TrainingInputBatch(
        {
            "sequences": torch.stack(rows),
            "attention_mask": torch.ones(len(rows), _LENGTH, dtype=torch.long),
            "loss_mask": mask / mask.numel(),
            "response_mask": mask.long(),
        }
    )
    batch.metadata = {"response_length": _LENGTH - 1}
    return batch


def kept_model(folder: Path) -> Path:
    """A folder with the small model of `skyrl_runs`, as workers load one."""
    model_of().save_pretrained(folder)
    return folder
