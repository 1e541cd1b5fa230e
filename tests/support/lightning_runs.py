"""Small trainings with Lightning's own Trainer, under both names of the package, and what they leave behind."""

from __future__ import annotations

import os
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from async_ckpt.integrations.common.loader_order import ORDER
from async_ckpt.integrations.lightning import AsyncTarCheckpointIO

NAMES = [name for name in ("pytorch_lightning", "lightning") if find_spec(name)]
# What Lightning and torch say of small trainings on two processors, by the beginnings of the messages.
NOISE = (
    ".*does not have many workers", ".*smaller than the logging interval", "Checkpoint directory .* exists",
    ".*LeafSpec.* is deprecated", "GPU available but not used", ".*isinstance.treespec", "You're resuming from a checkpoint",
    ".*is set, but there is no last checkpoint", "The `srun` command", "Starting from v1.9.0", ".*weights_only",
    "`TensorBoard`", "Using ModelCheckpoint with manual optimization", ".*pkg_resources", "Deprecated call to", "Detected call of",
    "Be aware that when using", "You defined a `validation_step`", "The `LightningModule.configure_gradient", "The number of training batches", ".*barrier", "Experiment logs directory", "The dirpath has changed", ".*`torch.distributed",
)  # fmt: skip


def kit_of(name: str) -> SimpleNamespace:
    """What tests use of Lightning, under one of its names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytorch = import_module("lightning.pytorch" if name == "lightning" else name)
        fabric = import_module("lightning.fabric" if name == "lightning" else "lightning_fabric")
    kit = SimpleNamespace(pytorch=pytorch, fabric=fabric, Trainer=pytorch.Trainer, Fabric=fabric.Fabric)
    kit.ModelCheckpoint, kit.CSVLogger = pytorch.callbacks.ModelCheckpoint, pytorch.loggers.CSVLogger
    kit.Model = _model_of(pytorch)
    return kit


def version_of(kit: Any) -> tuple[int, int]:
    major, minor = kit.pytorch.__version__.split(".")[:2]
    return int(major), int(minor)


def _model_of(pytorch: Any) -> type:
    class Model(pytorch.LightningModule):  # type: ignore[misc, name-defined]
        """Its data depend on the step alone, so that a training that goes on in an epoch sees what it would have seen."""

        def __init__(self, width: int = 4, optimizer: Any = torch.optim.AdamW) -> None:
            super().__init__()
            self.save_hyperparameters(ignore="optimizer")
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
            self.made_by, self.losses, self.at_step = optimizer, {}, {}

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            step = self.trainer.global_step
            for at, do in self.at_step.items():
                if at == step:
                    do()
            made = torch.Generator().manual_seed(step)
            loss = (self.layers(torch.randn(8, 4, generator=made).to(self.device)) - 1).square().mean()
            self.losses[step] = loss.item().hex()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.layers(batch).square().mean())

        def configure_optimizers(self) -> Any:
            optimizer = self.made_by(self.parameters(), lr=0.01)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)}

    return Model


def batches(num: int = 4) -> Any:
    return torch.utils.data.DataLoader(torch.ones(num * 2, 4), batch_size=2)


def trainer_of(kit: Any, folder: Any, checkpoints: AsyncTarCheckpointIO | None, *callbacks: Any, **options: Any) -> Any:
    """A Trainer with the plugin and its callback, or without both."""
    ours = [] if checkpoints is None else [checkpoints.callback()]
    saves_itself = not isinstance(options.get("strategy", ""), str)
    plugins = {} if checkpoints is None or saves_itself else {"plugins": [checkpoints]}
    defaults = {
        "accelerator": "cpu",
        "logger": False,
        "max_steps": 12,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "default_root_dir": str(folder),
    }
    return kit.Trainer(**{**defaults, **plugins, **options}, callbacks=[*ours, *callbacks])


def run_of(
    kit: Any, folder: Any, checkpoints: AsyncTarCheckpointIO | None, *, ckpt_path: Any = None, **options: Any
) -> Any:
    """A whole training that saves at every other step. Returns the model."""
    saved = kit.ModelCheckpoint(folder, **{"every_n_train_steps": 2, "save_top_k": -1, **options.pop("saved", {})})
    model = kit.Model(options.pop("width", 4))
    with quiet():
        trainer_of(kit, folder, checkpoints, saved, **options).fit(model, batches(), ckpt_path=ckpt_path)
    return model


class quiet(warnings.catch_warnings):  # noqa: N801
    """Lightning's advice is left out; every other warning is an error in tests."""

    def __enter__(self) -> Any:
        entered = super().__enter__()
        for message in NOISE:
            warnings.filterwarnings("ignore", message)
        return entered


def names_in(folder: Any) -> list[str]:
    """The names in a folder of checkpoints, without the history beside them."""
    return sorted(name for name in os.listdir(folder) if name != "history.jsonl")


def files_in(folder: Any) -> list[str]:
    """The checkpoints in a folder: what has no hidden name."""
    return [name for name in names_in(folder) if not name.startswith(".")]


def loaded(path: Any) -> Any:
    """As a user without any plugin loads it."""
    return torch.load(path, weights_only=True)


def contents(folder: Path) -> dict[str, Any]:
    """The checkpoints in a folder, by name, without the entry that only ours have."""
    found = {name: loaded(folder / name) for name in files_in(folder)}
    for checkpoint in found.values():
        checkpoint.pop(ORDER, None)
    return found
