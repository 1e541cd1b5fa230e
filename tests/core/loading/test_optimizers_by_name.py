"""Optimizers that torch.distributed.checkpoint has saved: by the names of parameters, and without what is empty."""

from pathlib import Path
from typing import Any

import pytest
import torch
from dcp_states import dcp, save
from matrix_restores import saved
from states import difference, open_run
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import async_ckpt
from async_ckpt import StateMismatchError
from async_ckpt.integrations.dcp import restore

GROUPS = {"one": lambda model: model.parameters(), "two": lambda model: [
    {"params": [one for one in model.parameters() if one.dim() > 1], "lr": 0.5},
    {"params": [one for one in model.parameters() if one.dim() == 1]},
]}  # fmt: skip


def training(seed: int, *, groups: str = "one", steps: int = 2, kind: Any = torch.optim.AdamW) -> dict[str, Any]:
    """With a part that is not trained."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = kind(GROUPS[groups](model), lr=0.1 + seed)
    for _ in range(steps):
        model[0](torch.ones(3)).sum().backward()
        optimizer.step()
    return {"model": model, "optim": optimizer}


def by_name(live: dict[str, Any], *, is_flat: bool) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    taken = {name: value.detach().clone() for name, value in live["model"].state_dict().items()}
    return {"model": taken, "optim": get_optimizer_state_dict(live["model"], live["optim"], options=options)}


@pytest.fixture(params=["checkpointer", "folder of torch", "writer"])
def written(request: Any, tmp_path: Path) -> Any:
    """What saves a state, and what restores it."""

    def by_checkpointer(state: Any, live: Any) -> None:
        with open_run(tmp_path / "run") as ckpt:
            ckpt.save(state, 1).result()
            ckpt.restore(live)

    def by_torch(state: Any, live: Any) -> None:
        dcp.save(state, checkpoint_id=tmp_path / "x")
        restore(live, tmp_path / "x")

    def by_writer(state: Any, live: Any) -> None:
        save(state, tmp_path / "run" / "step_00000001")
        with open_run(tmp_path / "run") as ckpt:
            ckpt.restore(live)

    return {"checkpointer": by_checkpointer, "folder of torch": by_torch, "writer": by_writer}[request.param]


def wrapped(live: dict[str, Any]) -> dict[str, Any]:
    return {**live, "model": torch.nn.DataParallel(live["model"])}


@pytest.mark.parametrize("is_flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("groups", GROUPS)
def test_an_optimizer_takes_what_was_saved_by_the_names_of_its_parameters(written, groups, is_flat):
    before, live = training(0, groups=groups), training(1, groups=groups)

    written(by_name(before, is_flat=is_flat), wrapped(live))

    want, found = before["optim"].state_dict(), live["optim"].state_dict()
    want["state"] = {number: state for number, state in want["state"].items() if state}
    found["state"] = {number: state for number, state in found["state"].items() if number in want["state"]}
    assert difference(found["state"], want["state"]) is None
    for one, other in zip(found["param_groups"], want["param_groups"], strict=True):
        assert difference(dict(sorted(one.items())), dict(sorted(other.items()))) is None
    assert difference(live["model"].state_dict(), before["model"].state_dict()) is None


@pytest.mark.parametrize(
    ("kind", "steps"),
    [(torch.optim.SGD, 2), (torch.optim.AdamW, 0)],
    ids=["SGD", "AdamW before its first step"],
)
def test_an_optimizer_without_state_comes_back_as_one(written, kind, steps):
    before = training(0, kind=kind, steps=steps)
    live = training(1, kind=kind)
    written({name: one.state_dict() for name, one in before.items()}, live)
    assert live["optim"].param_groups[0]["lr"] == 0.1
    assert not any(live["optim"].state.values())


def test_the_state_of_an_optimizer_that_was_not_selected_is_left_alone(tmp_path):
    before, live = training(0), training(1)
    with open_run(tmp_path) as ckpt:
        ckpt.save(before, 1).result()
        with pytest.raises(StateMismatchError, match="is an optimizer here"):
            ckpt.restore(live, select="optim.param_groups")
    assert all(live["optim"].state.values())


HARM = {
    "without its model": (lambda live: {"optim": live["optim"]}, r"get_optimizer_state_dict\(model, optimizer\)"),
    "in other groups": (lambda live: {**live, "optim": training_over(live["model"], GROUPS["two"])}, "other groups"),
    "of fewer": (lambda live: {**live, "optim": training_over(live["model"], lambda m: m[0].parameters())}, "other groups"),
}  # fmt: skip


def training_over(model: Any, groups: Any) -> Any:
    return torch.optim.AdamW(groups(model))


@pytest.mark.parametrize("how", HARM)
def test_where_names_are_of_no_help_it_is_told_what_is(how, tmp_path):
    make, match = HARM[how]
    async_ckpt.save(by_name(training(0), is_flat=False), tmp_path / "x.tar").result()
    with pytest.raises(StateMismatchError, match=match):
        restore(make(training(1)), tmp_path / "x.tar")


def stage(rank: int) -> dict[str, Any]:
    """A part of a model, and what optimizes it."""
    model = torch.nn.ModuleDict({f"layer{rank}": torch.nn.Linear(2, 2)})
    optimizer = torch.optim.AdamW(model.parameters())
    model[f"layer{rank}"](torch.full((2,), 1.0 + rank)).sum().backward()
    optimizer.step()
    return {"model": model, "optim": optimizer}


def test_a_stage_of_a_pipeline_takes_its_own_of_flat_names(tmp_path):
    torch.manual_seed(0)
    stages = [stage(rank) for rank in range(2)]
    folder = saved(tmp_path, 2, lambda rank: by_name(stages[rank], is_flat=True))
    live = stage(1)
    restore(live, folder)
    assert difference(live["optim"].state_dict()["state"], stages[1]["optim"].state_dict()["state"]) is None


def test_flat_names_of_parameters_that_are_not_there_are_told(tmp_path):
    async_ckpt.save(by_name(training(0), is_flat=True), tmp_path / "x.tar").result()
    live = HARM["of fewer"][0](training(1))
    with pytest.raises(StateMismatchError, match=r"lacks here: 1\.bias, 1\.weight"):
        restore(live, tmp_path / "x.tar")
