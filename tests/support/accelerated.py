"""A tiny training by accelerate, of equal losses wherever it runs."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, ProjectConfiguration, set_seed

from async_ckpt.integrations.accelerate import AsyncState

STEPS = 8


def checkpoints_in(folder: str) -> dict[str, list[str]]:
    """The files of each checkpoint of a project that has its name."""
    found = Path(folder, "checkpoints").glob("checkpoint_*")
    return {path.name: sorted(file.name for file in path.iterdir()) for path in sorted(found)}


class Counted:
    """An object of the user's that is registered."""

    def __init__(self) -> None:
        self.number, self.mean = 0, torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number, self.mean = state["number"], state["mean"].clone()


def stay_on_processors() -> None:
    """Have FSDP1 give whole state dicts on processors: there it frees what it moves to where it is."""
    from torch.distributed.fsdp._flat_param import FlatParamHandle

    FlatParamHandle.to_cpu = nullcontext


class Training:
    """An Accelerator with all that it prepares. `dropout=0` has no draws, so that losses depend on no rank's numbers."""

    def __init__(
        self,
        folder: object,
        *,
        sharded: bool = False,
        version: int = 2,
        total_limit: int | None = None,
        dropout: float = 0.1,
        workers: int = 0,
        whole_tensors: bool = False,
        on: dict[str, Any] | None = None,
    ) -> None:
        """`version` is that of FSDP, if it is sharded by it. `on` has the arguments of an Accelerator on another device than the processor."""
        AcceleratorState._reset_state(reset_partial_state=True)
        set_seed(0)
        project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=total_limit)
        self.accelerator = Accelerator(project_config=project, **({"cpu": True} if on is None else on))
        if version == 1:
            stay_on_processors()
        if sharded:  # accelerate sets that type on accelerators only
            # Each AcceleratorState() takes it from there anew.
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.accelerator.state.distributed_type = DistributedType.FSDP
            self.accelerator.state.device = torch.device("cpu")  # FSDP1 takes none with a number
            self.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
                fsdp_version=version,
                auto_wrap_policy="no_wrap",
                reshard_after_forward=True if version == 2 else "FULL_SHARD",
                cpu_ram_efficient_loading=False,
                state_dict_type="FULL_STATE_DICT" if whole_tensors else "SHARDED_STATE_DICT",
            )
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(dropout), torch.nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        draw = torch.Generator().manual_seed(0)
        data = torch.utils.data.TensorDataset(torch.randn(64, 8, generator=draw))
        alone = self.accelerator.num_processes == 1  # accelerate does not restore the order of several ranks' data
        loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=alone, num_workers=workers)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        self.counted = Counted()
        self.accelerator.register_for_checkpointing(self.counted)

    def run(self, num_steps: int = STEPS, save: Callable[[], Any] | None = None) -> list[float]:
        """The losses of steps, with a save after every second one."""
        losses = []
        for step in range(num_steps):
            (batch,) = next(iter(self.loader))
            loss = self.model(batch).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.counted.number += 1
            self.counted.mean += 1
            losses.append(loss.item())
            if save is not None and step % 2 == 1:
                save()
        return losses

    def state(self, layout: str) -> Any:
        """What saves and loads: ours in one of its layouts, or accelerate itself."""
        return self.accelerator if layout == "plain" else AsyncState(self.accelerator, layout)  # type: ignore[arg-type]
