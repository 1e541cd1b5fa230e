"""Ranks that hold other names than they have saved: whatever is in the checkpoint is found, and nothing is passed over."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fake_ranks import standing_at
from matrix_restores import restore, saved
from rank_archives import ATTEMPT, parsed_digest, write_all
from states import difference

import async_ckpt
from async_ckpt.core.runs.manifest import Archive, Manifest


def stage(number: int) -> dict[str, Any]:
    return {"model": {f"layer{number}": torch.full((3,), 1.0 + number)}, "n": 7}


def emptied(number: int) -> dict[str, Any]:
    return {"model": {f"layer{number}": torch.zeros(3)}, "n": 0}


@pytest.mark.parametrize(
    ("how", "n"),
    [
        ({"strict": False}, 7),
        ({"select": "model"}, 0),
        ({"select": "model.layer*"}, 0),
        ({"select": ["model.*", "n"]}, 7),
        ({"select": ["model.layer0", "model.layer1"]}, 0),
    ],
    ids=str,
)
def test_a_rank_that_took_over_another_stage_gets_what_its_neighbour_has_saved(how, n, tmp_path):
    folder = saved(tmp_path, 2, stage)
    for rank in (0, 1):
        live = emptied(1 - rank)
        with standing_at(rank, 2):
            restore(folder, rank, 2, live, **how)
        assert difference(live, {**stage(1 - rank), "n": n}) is None


def shared_out(folder: Path) -> Path:
    """A step as a planner shares it out: each rank has written some of what all of them have."""
    whole = trained()
    state = whole["optim"]["state"]
    parts = [
        {"model": {"weight": whole["model"]["weight"]}, "optim": {"state": {0: {"step": state[0]["step"]}}}},
        {"model": {"bias": whole["model"]["bias"]}, "optim": {"param_groups": whole["optim"]["param_groups"]}},
        {
            "optim": {
                "state": {0: {k: v for k, v in state[0].items() if k != "step"}, 1: state[1]},
            }
        },
    ]  # fmt: skip
    paths = write_all(folder, 3, parts.__getitem__, shared=False)
    archives = tuple(Archive(path.name, path.stat().st_size, parsed_digest(path)) for path in paths)
    (folder / "manifest.json").write_bytes(Manifest(1, ATTEMPT, 3, 0.0, archives).dump())
    return folder


def trained(seed: int = 0) -> dict[str, Any]:
    live = training(seed)
    return {name: one.state_dict() for name, one in live.items()}


def training(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return {"model": model, "optim": optimizer}


@pytest.mark.parametrize("how", [{}, {"strict": False}, {"select": ["optim", "model.bias"]}], ids=str)
def test_each_rank_gets_all_of_what_a_planner_has_shared_out_however_many_have_saved(how, tmp_path):
    folder = shared_out(tmp_path / "run" / "step_00000001")
    for rank in range(3):
        live = training(1)
        with standing_at(rank, 3):
            restore(folder, rank, 3, live, **how)
        found, want = {name: one.state_dict() for name, one in live.items()}, trained()
        if how.get("select"):
            want["model"]["weight"] = found["model"]["weight"]
        assert difference(found, want) is None
    assert (
        difference(async_ckpt.load(folder, select="model.bias"), {"model": {"bias": trained()["model"]["bias"]}})
        is None
    )
