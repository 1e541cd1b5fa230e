"""Archives of DeepSpeed's ZeRO: resumed on as many ranks with the same losses, and on others with losses as near as sums are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rank_worlds import Worlds

import async_ckpt

pytest.importorskip("deepspeed", reason="deepspeed is not installed: make test-frameworks")


WARM = "deepspeed_runs"

_TRAIN = """
from deepspeed_runs import *
training = Training({stage}, "archive", batch=12 // here.size, **{config})
loaded = training.engine.load_checkpoint({resume!r}) if {resume!r} else None
training.train({last}, {folder!r})
training.checkpoints.wait()
here.tell({{"losses": training.losses, "client_state": loaded and loaded[1], "count": training.engine.module.count.item()}})
"""


def trained(
    worlds: Worlds,
    size: int,
    stage: int,
    folder: Path | None,
    resume: Path | None = None,
    last: int = 6,
    **config: Any,
) -> list[dict[int, float]]:
    """The losses of each rank by step."""
    script = _TRAIN.format(
        stage=stage,
        config=config,
        folder=folder and str(folder),
        resume=resume and str(resume),
        last=last,
    )
    told = [end.told[-1] for end in worlds.run(size, script)]
    assert [one["client_state"] for one in told] == [resume and {"step": 4}] * size
    assert [one["count"] for one in told] == [last] * size
    return [{int(step): loss for step, loss in one["losses"].items()} for one in told]


def means(losses: list[dict[int, float]]) -> dict[int, float]:
    return {step: sum(of_rank[step] for of_rank in losses) / len(losses) for step in losses[0]}


def after(step: int, losses: list[dict[int, float]]) -> list[dict[int, float]]:
    return [{at: loss for at, loss in of_rank.items() if at > step} for of_rank in losses]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_archives_are_resumed_on_as_many_ranks_and_on_others(worlds, tmp_path, stage):
    whole = trained(worlds, 2, stage, None)
    run = tmp_path / "run"
    assert trained(worlds, 2, stage, run, last=4) == [
        {step: loss for step, loss in of_rank.items() if step <= 4} for of_rank in whole
    ]
    assert (run / "latest").read_text() == "global_step4"
    assert sorted(path.name for path in run.iterdir()) == ["global_step2", "global_step4", "latest"]
    assert trained(worlds, 2, stage, None, run) == after(4, whole)
    for size in (1, 3):
        resumed = trained(worlds, size, stage, tmp_path / str(size), run)
        assert means(resumed) == pytest.approx(means(after(4, whole)), rel=1e-4)
    assert async_ckpt.load(run / "global_step4", select="fp32")["fp32"]["0.weight"].shape == (600, 8)
    async_ckpt.verify(run / "global_step4")
