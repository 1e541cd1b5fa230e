"""torchtitan's own containers with a plain checkpointer: its optimizers and schedulers come back."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from states import difference, open_run
from torch import nn

from async_ckpt.core.staging.guard import unwrapped

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    titan: Any = pytest.importorskip(
        "torchtitan.components.optimizer",
        reason="torchtitan and what it needs are not installed",
        exc_type=ImportError,
    )
    base: Any = pytest.importorskip("torchtitan.components.checkpointer.base", exc_type=ImportError)

pytestmark = pytest.mark.filterwarnings("ignore:To get the last learning rate:UserWarning")

ADAMW = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1}
GROUPS: dict[str, list[tuple[str, str, dict[str, Any]]]] = {
    "one group": [(".*", "AdamW", ADAMW)],
    "two groups": [("bias$", "AdamW", {**ADAMW, "weight_decay": 0.0}), (".*", "AdamW", ADAMW)],
    "two optimizers": [("bias$", "Adam", {"lr": 0.2}), (".*", "AdamW", ADAMW)],
}


class Trainer:
    """What torchtitan's has of the run, its parts, and what optimizes these."""

    def __init__(self, seed: int, *, parts: int = 1, groups: str = "one group", steps: int = 2) -> None:
        torch.manual_seed(seed)
        self.parts = [
            nn.ModuleDict({f"layer{n}": nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))}) for n in range(parts)
        ]
        configs = [
            titan.ParamGroupConfig(pattern=pattern, optimizer_name=name, optimizer_kwargs=options)
            for pattern, name, options in GROUPS[groups]
        ]
        config = titan.OptimizersContainer.Config(param_groups=configs, implementation="for-loop")
        self.optimizers = titan.OptimizersContainer(config, model_parts=self.parts)
        self.lr_schedulers = titan.LRSchedulersContainer.Config(warmup_steps=5).build(
            optimizers=self.optimizers, training_steps=20
        )
        self.step = 0
        for _ in range(steps):
            self.train()

    def train(self) -> None:
        self.optimizers.zero_grad()
        sum(p.square().sum() for part in self.parts for p in part.parameters()).backward()
        self.optimizers.step()
        self.lr_schedulers.step()
        self.optimizers.zero_grad()
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]

    @property
    def states(self) -> dict[str, Any]:
        return {
            "model": base.ModelWrapper(self.parts),
            "optimizer": self.optimizers,
            "lr_scheduler": self.lr_schedulers,
            "train_state": self,
        }

    def all(self) -> dict[str, Any]:
        """As a copy."""
        found = {name: one.state_dict() for name, one in self.states.items()}
        made: dict[str, Any] = torch.utils._pytree.tree_map(
            lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, found
        )
        return made


def assert_goes_on_alike(before: Trainer, live: Trainer) -> None:
    for _ in range(3):
        assert difference(before.all(), live.all()) is None
        before.train()
        live.train()


@pytest.mark.parametrize("steps", [0, 3], ids=["fresh", "trained"])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("groups", GROUPS)
def test_what_torchtitan_trains_comes_back(tmp_path, groups, parts, steps):
    before = Trainer(0, groups=groups, parts=parts)
    live = Trainer(1, groups=groups, parts=parts, steps=steps)
    with open_run(tmp_path, guard=before.optimizers) as ckpt:
        ckpt.save(before.states, 1)
        assert ckpt.restore(live.states) == 1
    assert_goes_on_alike(before, live)


def plain(one: Trainer) -> torch.optim.Optimizer:
    """A plain optimizer with the state of the container."""
    optimizer = torch.optim.AdamW(one.parts[0].parameters(), foreach=False, fused=False, **ADAMW)
    optimizer.load_state_dict({**one.optimizers.optimizers[0].state_dict()})
    for group in optimizer.param_groups:
        group.pop("param_names", None)
    return optimizer


def test_a_plain_optimizer_and_the_container_take_each_others_state(tmp_path):
    before, live = Trainer(0), Trainer(1)
    model = nn.ModuleList(before.parts)[0]
    with open_run(tmp_path / "plain") as ckpt:
        ckpt.save({"model": model, "optimizer": plain(before)}, 1).result()
        ckpt.restore({"model": live.parts[0], "optimizer": live.optimizers})
    assert difference(before.optimizers.state_dict(), live.optimizers.state_dict()) is None

    other = torch.optim.AdamW(live.parts[0].parameters(), foreach=False)
    with open_run(tmp_path / "container") as ckpt:
        ckpt.save({"model": model, "optimizer": before.optimizers}, 1).result()
        ckpt.restore({"model": live.parts[0], "optimizer": other})
    assert difference(other.state_dict()["state"], plain(before).state_dict()["state"]) is None


def test_the_guard_reaches_every_optimizer_inside():
    one = Trainer(0, parts=2, groups="two optimizers")
    assert unwrapped(one.optimizers) == (one.optimizers, *one.optimizers.optimizers)
    with pytest.raises(TypeError, match="guard must be a torch optimizer"):
        unwrapped(one.lr_schedulers)
