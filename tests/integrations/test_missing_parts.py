"""What the checkpoint of a trainer lacks is named before anything is filled: where the trainer itself is not needed."""

from typing import Any

import pytest
import torch
from matrix_restores import saved

import async_ckpt
from async_ckpt import StateMismatchError
from async_ckpt.core.state.per_rank import PerRank
from async_ckpt.integrations.common.training_archive import missing_in, num_items_in
from async_ckpt.integrations.skyrl.fsdp_ranks import FSDPCheckpoints


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", ["optimizer", "scheduler"])
def test_the_archives_of_skyrl_are_refused_without_one_of_the_objects(tmp_path, name, strict):
    """However strict it is about the names of weights."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    parts: dict[str, Any] = {
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
    }
    strategy, folder = FSDPCheckpoints(), str(tmp_path / "global_step_3" / "policy")
    strategy.save_checkpoint(model, folder, 0, **{key: part for key, part in parts.items() if key != name})
    strategy.finalize_pending_saves()
    live = torch.nn.Linear(2, 2)
    before = live.weight.detach().clone()
    with pytest.raises(StateMismatchError, match=f"{folder}.*\n  missing in the checkpoint: {name}"):
        strategy.load_checkpoint(live, folder, **parts, load_module_strict=strict)
    assert torch.equal(live.weight, before)
    strategy.load_checkpoint(live, folder, **{key: part for key, part in parts.items() if key != name})
    assert torch.equal(live.weight, model.weight)


def test_the_names_of_all_ranks_count(tmp_path):
    """Of stages of a pipeline, and values that differ."""
    folder = saved(
        tmp_path, 2, lambda rank: {f"stage {rank}": {"w": torch.ones(rank + 1)}, "of all": [rank], "n": rank}
    )
    names = ["stage 0", "stage 1", "of all", "n", "none"]
    assert missing_in(folder, names) == ["none"]
    assert isinstance(async_ckpt.load(folder)["n"], PerRank)


def test_the_items_of_an_archive_are_counted_without_being_read(tmp_path):
    async_ckpt.save(
        {"models": [torch.ones(2), {}], "custom": [], "files": {"a": b"1"}, "n": 1}, tmp_path / "x.tar"
    ).result()
    assert num_items_in(tmp_path / "x.tar") == {"models": 2, "custom": 0, "files": 1}
