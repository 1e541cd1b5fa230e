"""DeepSpeed's own layout, written behind the training: its files, `latest` last, and equal losses after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from children import Nursery
from rank_worlds import Worlds

pytest.importorskip("deepspeed", reason="deepspeed is not installed: make test-frameworks")


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs scripts in processes that have imported the framework already."""
    with Nursery(tmp_path_factory.mktemp("children"), "deepspeed_runs") as started:
        yield started


_TRAIN = """
from deepspeed_runs import *
training = Training({stage}, {layout!r}, **{config})
loaded = training.engine.load_checkpoint({resume!r}) if {resume!r} else None
training.train({last}, {folder!r})
if training.checkpoints:
    training.checkpoints.wait()
here.tell({{"losses": training.losses, "client_state": loaded and loaded[1].get("step")}})
"""


def trained(
    worlds: Worlds, stage: int, layout: str | None, folder: Path | None, resume: Path | None = None, last: int = 6, **config: Any
) -> list[dict[int, float]]:
    """The losses of each rank by step."""
    script = _TRAIN.format(
        stage=stage, layout=layout, config=config, folder=folder and str(folder), resume=resume and str(resume), last=last
    )
    told = [end.told[-1] for end in worlds.run(2, script)]
    return [{int(step): loss for step, loss in one["losses"].items()} for one in told]


def files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def after(step: int, losses: list[dict[int, float]]) -> list[dict[int, float]]:
    return [{at: loss for at, loss in of_rank.items() if at > step} for of_rank in losses]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_files_are_those_of_deepspeed_and_both_resume_from_them(worlds, tmp_path, stage):
    plain = trained(worlds, stage, None, tmp_path / "plain", last=4)
    ours = trained(worlds, stage, "deepspeed", tmp_path / "ours", last=4)
    assert ours == plain
    assert files_in(tmp_path / "ours") == files_in(tmp_path / "plain")
    assert (tmp_path / "ours" / "latest").read_text() == "global_step4"
    whole = trained(worlds, stage, None, None, last=6)
    for layout in (None, "deepspeed"):
        assert trained(worlds, stage, layout, None, tmp_path / "ours") == after(4, whole)
    assert trained(worlds, stage, "deepspeed", None, tmp_path / "plain") == after(4, whole)
