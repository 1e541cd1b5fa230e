"""Tiny trainings by the Trainer of Transformers and by accelerate under DeepSpeed on processors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed_runs  # noqa: F401  (sets DeepSpeed up for processors)
import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, ProjectConfiguration, set_seed
from accelerated import Counted
from trainers import *  # noqa: F403
from trainers import trainer_of, untied

# accelerate knows DeepSpeed on accelerators only, and takes the backend from there.
PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_CPU)


def config_of(stage: int, *, gathers: bool = True) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": gathers},
    }


def under_deepspeed(kind: type[Any], stage: int, folder: object, *, gathers: bool = True, **given: Any) -> Any:
    """A trainer whose batches do not depend on the number of ranks."""
    options = {"model": untied, "max_steps": 6, "per_device_train_batch_size": 8 // dist.get_world_size(), **given}
    return trainer_of(kind, folder, use_cpu=False, deepspeed=config_of(stage, gathers=gathers), **options)


class Loop:
    """A loop of one's own with an Accelerator under DeepSpeed, and an object that is registered."""

    def __init__(self, stage: int, folder: object) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        set_seed(0)
        config = config_of(stage) | {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0}
        project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
        self.accelerator = Accelerator(project_config=project, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        rows = torch.utils.data.TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(0)))
        loader = torch.utils.data.DataLoader(rows, batch_size=4)
        prepared = self.accelerator.prepare(model, optimizer, scheduler, loader)
        self.model, self.optimizer, self.scheduler, self.loader = prepared
        self.counted = Counted()
        self.accelerator.register_for_checkpointing(self.counted)

    def run(self, num_steps: int, save: Callable[[], Any] | None = None) -> list[float]:
        """The losses of steps, with a save after every second one."""
        losses = []
        batches = iter(self.loader)
        for step in range(num_steps):
            (batch,) = next(batches)
            loss = self.model(batch).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.counted.number += 1
            losses.append(loss.item())
            if save is not None and step % 2 == 1:
                save()
        return losses
