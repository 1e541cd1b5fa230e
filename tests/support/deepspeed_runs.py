"""Tiny trainings by the engine of DeepSpeed on processors, of equal losses wherever they run."""

from __future__ import annotations

import os
import warnings
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
warnings.simplefilter("ignore")

import deepspeed  # noqa: E402
import deepspeed.ops  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.utils import logger  # noqa: E402

from async_ckpt.integrations.deepspeed import use  # noqa: E402

# It would be compiled when the first engine is made, which takes a minute.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
logger.setLevel("ERROR")


class Training:
    """Trains by an engine. Its own part of the losses is `losses`, by step."""

    def __init__(
        self,
        stage: int,
        layout: str | None,
        *,
        width: int = 600,
        batch: int = 4,
        kind: Any = torch.optim.AdamW,
        has_scheduler: bool = True,
        **config: Any,
    ) -> None:
        """Without a `layout`, by plain DeepSpeed. One weight is larger than what is copied at once."""
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, width),
                                    torch.nn.Tanh(), torch.nn.Linear(width, 1))  # fmt: skip
        model.register_buffer("count", torch.zeros(1))
        optimizer = kind(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9) if has_scheduler else None
        self.batch = batch
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=scheduler,
            config={
                "train_micro_batch_size_per_gpu": batch,
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
                **config,
            },
            dist_init_required=False,
        )
        self.checkpoints = use(self.engine, layout) if layout else None
        self.losses: dict[int, float] = {}

    @property
    def step(self) -> int:
        return int(self.engine.global_steps)

    def train(self, last: int, save_dir: Any = None, every: int = 2, **options: Any) -> dict[int, float]:
        """Train until a step, and save at some of them."""
        engine = self.engine
        while self.step < last:
            draw = torch.Generator().manual_seed(self.step)
            rows = torch.randn(self.batch * dist.get_world_size(), 8, generator=draw).to(engine.module[0].weight.dtype)
            mine = rows[dist.get_rank() :: dist.get_world_size()]
            loss = engine(mine).float().square().mean()
            engine.backward(loss)
            engine.step()
            engine.module.count += 1
            self.losses[self.step] = loss.item()
            if save_dir is not None and self.step % every == 0:
                engine.save_checkpoint(save_dir, client_state={"step": self.step}, **options)
        return self.losses
