"""Lightning's Trainer on a GPU with our plugin: one file, FSDP2 and FSDPStrategy go on bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_runs import batches, kit_of, quiet, trainer_of

from async_ckpt.integrations.lightning import AsyncTarCheckpointIO

pytestmark = pytest.mark.gpu


def strategies(kit: Any) -> dict[str, Any]:
    made = kit.pytorch.strategies
    return {
        "auto": lambda: "auto",
        "model parallel": lambda: made.ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1),
        "fsdp": lambda: made.FSDPStrategy(state_dict_type="sharded"),
    }


def model_of(kit: Any, strategy: str) -> Any:
    class Sharded(kit.Model):
        def configure_model(self) -> None:
            if strategy == "model parallel":
                torch.distributed.fsdp.fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.layers(batch * (self.trainer.global_step + 1)).square().mean()
            self.losses[self.trainer.global_step] = loss.item().hex()
            return loss

    return (Sharded if strategy == "model parallel" else kit.Model)(2**18)


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")  # there is one device
@pytest.mark.parametrize("strategy", ["auto", "model parallel", "fsdp"])
def test_a_training_on_a_gpu_goes_on_bit_for_bit(tmp_path, strategy):
    pytest.importorskip("pytorch_lightning", reason="Lightning is not installed")
    kit = kit_of("pytorch_lightning")

    def losses(folder: str, *, steps: int, ckpt_path: Path | None = None) -> dict[int, str]:
        checkpoints = AsyncTarCheckpointIO()
        made = strategies(kit)[strategy]()
        options = {} if made == "auto" else {"strategy": checkpoints.sharded(made)}
        saved = kit.ModelCheckpoint(tmp_path / folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
        model = model_of(kit, strategy)
        with quiet():
            trainer = trainer_of(
                kit, tmp_path, checkpoints, saved, accelerator="gpu", devices=1, max_steps=steps, **options
            )
            trainer.fit(model, batches(16), ckpt_path=ckpt_path)
        return model.losses

    whole = losses("whole", steps=8)
    begun = losses("killed", steps=4)
    assert begun | losses("killed", steps=8, ckpt_path=tmp_path / "killed" / "step=4.ckpt") == whole
