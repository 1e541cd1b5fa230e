"""torchtitan's containers on four ranks with our manager: FSDP2, HSDP, tensor parallelism and stages, resumed in other layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from children import Nursery
from rank_worlds import Worlds

pytest.importorskip("torchtitan", reason="torchtitan is not installed")


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Its children have imported torchtitan already."""
    with Nursery(tmp_path_factory.mktemp("children"), "titan_trainers") as started:
        yield started


TRAIN = """
from titan_trainers import *
trainer = Trainer({folder!r}, {layout!r}, kind={kind}, seed={seed}, **{options})
losses = trainer.train({steps}, until={until})
here.tell({{"losses": losses, "digest": digest(trainer.all())}})
"""


def trained(
    worlds: Worlds, size: int, folder: Path, layout: str = "fsdp", *, steps: int = 6, until: int | None = None,
    kind: str = "ours", seed: int = 0, **options: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """The losses of each rank by step, and the state at the end."""
    script = TRAIN.format(
        folder=str(folder), layout=layout, kind=kind, seed=seed, options=options, steps=steps, until=until
    )
    return [next(told for told in end.told if "losses" in told) for end in worlds.run(size, script)]


LOAD = """
from titan_trainers import *
trainer = Trainer({folder!r}, {layout!r}, seed=9, **{options})
here.tell({{"loaded": trainer.load(), "step": trainer.step, "digest": digest(trainer.all())}})
trainer.checkpointer.close()
"""


def loaded(worlds: Worlds, size: int, folder: Path, layout: str = "fsdp", **options: Any) -> list[dict[str, Any]]:
    ends = worlds.run(size, LOAD.format(folder=str(folder), layout=layout, options=options))
    return [end.told[0] for end in ends]


@pytest.mark.parametrize("layout", ["fsdp", "hsdp", "tp", "pp"])
def test_four_ranks_go_on_where_they_were_with_the_same_losses_to_the_last_bit(worlds, tmp_path, layout):
    whole = trained(worlds, 4, tmp_path / "whole", layout)
    cut = trained(worlds, 4, tmp_path / "cut", layout, until=5)
    resumed = trained(worlds, 4, tmp_path / "cut", layout, seed=5)
    for rank in range(4):
        assert [*resumed[rank]["losses"]] == ["5", "6"]
        assert {**cut[rank]["losses"], **resumed[rank]["losses"]} == whole[rank]["losses"]
        assert resumed[rank]["digest"] == whole[rank]["digest"]


@pytest.mark.parametrize(
    ("layout", "size", "other"), [("fsdp", 2, "fsdp"), ("tp", 2, "fsdp"), ("hsdp", 1, "one"), ("pp", 2, "pp")]
)
def test_fewer_ranks_get_the_state_that_four_have_saved(worlds, tmp_path, layout, size, other):
    whole = trained(worlds, 4, tmp_path, layout)
    # As with torchtitan's own manager, its data loader refuses another degree of data parallelism.
    excluded = [] if layout == "tp" else ["dataloader"]
    ends = loaded(worlds, size, tmp_path, other, exclude_from_loading=excluded)
    assert [end["step"] for end in ends] == [6] * size
    digests = {end["digest"] for end in whole}
    assert {end["digest"] for end in ends} <= digests or layout == "pp"
