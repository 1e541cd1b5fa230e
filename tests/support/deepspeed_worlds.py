"""Worlds of ranks that train with DeepSpeed, from a checkpoint or from the beginning, and save into a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rank_worlds import Worlds

_TRAIN = """
from deepspeed_runs import *
training = Training({stage}, {layout!r}, **{config})
loaded = training.engine.load_checkpoint({resume!r}) if {resume!r} else None
training.train({last}, {folder!r})
if training.checkpoints:
    training.checkpoints.wait()
told = {{"losses": training.losses, "count": training.engine.module.count.item()}}
here.tell({{**told, "resumed": loaded and loaded[1]["step"]}})
"""


def trained(
    worlds: Worlds,
    stage: int,
    layout: str | None,
    folder: Path | None,
    resume: Path | None = None,
    *,
    last: int = 6,
    size: int = 2,
    **config: Any,
) -> list[dict[int, float]]:
    """The losses of each rank by step. Without a `layout`, by plain DeepSpeed."""
    script = _TRAIN.format(
        stage=stage,
        layout=layout,
        config=config,
        folder=folder and str(folder),
        resume=resume and str(resume),
        last=last,
    )
    told = [end.told[-1] for end in worlds.run(size, script)]
    losses = [{int(step): loss for step, loss in one["losses"].items()} for one in told]
    assert [one["resumed"] for one in told] == [resume and min(of_rank) - 1 for of_rank in losses]
    assert [one["count"] for one in told] == [last] * size
    return losses


def after(step: int, losses: list[dict[int, float]]) -> list[dict[int, float]]:
    return [{at: loss for at, loss in of_rank.items() if at > step} for of_rank in losses]
