"""torchtitan's containers on four ranks with our manager: FSDP2, HSDP, tensor parallelism and stages, resumed in other layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from racing import until
from rank_worlds import Worlds
from safetensors.torch import load_file
from slices import some

import async_ckpt
from async_ckpt import AsyncCheckpointer, Naming

pytest.importorskip("torchtitan", reason="torchtitan is not installed")


WARM = ("titan_trainers",)

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
    assert {end["digest"] for end in ends} == {end["digest"] for end in whole}


@pytest.mark.parametrize("layout", ["fsdp", "pp"])
def test_ranks_go_on_from_the_folder_that_the_manager_of_torchtitan_has_written(worlds, tmp_path, layout):
    whole = trained(worlds, 4, tmp_path / "whole", layout, kind="theirs", keep_latest_k=0)
    trained(worlds, 4, tmp_path / "cut", layout, kind="theirs", until=5, keep_latest_k=0)
    resumed = trained(worlds, 4, tmp_path / "cut", layout, seed=5)
    assert [end["digest"] for end in resumed] == [end["digest"] for end in whole]
    assert [*resumed[0]["losses"]] == ["5", "6"]


FAIL = """
from titan_trainers import *
from async_ckpt.core.storage.local import LocalSink
write = LocalSink.write
def fail(sink, *arguments):
    if here.rank == 1 and "step-4" in str(sink._target):
        raise OSError("this disk is broken")
    return write(sink, *arguments)
LocalSink.write = fail
trainer = Trainer({folder!r}, "fsdp")
try:
    trainer.train(8)
except Exception as error:
    here.tell({{"error": type(error).__name__, "step": trainer.step}})
"""


def test_a_save_that_fails_on_one_rank_fails_on_all_of_them_at_the_next(worlds, tmp_path):
    ends = worlds.run(2, FAIL.format(folder=str(tmp_path)))
    assert [end.told[0]["step"] for end in ends] == [6, 6]
    assert {end.told[0]["error"] for end in ends} == {"PeerFailedError", "OSError"}
    assert loaded(worlds, 2, tmp_path)[0]["step"] == 2


@pytest.mark.parametrize("layout", ["fsdp", "one"])
def test_the_last_step_of_ranks_is_written_for_hugging_face(worlds, tmp_path, layout):
    """Whether the model is sharded, or whole on each rank."""
    trained(worlds, 2, tmp_path, layout, last_save_model_only=True, last_save_in_hf=True, export_dtype="bfloat16")
    (file,) = (tmp_path / "checkpoint" / "step-6").glob("*.safetensors")
    weights = load_file(file)
    assert len(weights) == 16
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert all(name.startswith("model.layers.") for name in weights)
    (end, _) = loaded(worlds, 2, tmp_path / "next", layout, initial_load_path=str(file.parent), initial_load_in_hf=True)
    assert end["loaded"] is True


# --- killed -------------------------------------------------------------------------------------------------------

KILLED = """
from titan_trainers import *
from children import die_at
count = die_at({number} if here.rank == {rank} else 10**9, here.die)
trainer = Trainer({folder!r}, "fsdp", seed={seed})
losses = trainer.train(6)
here.tell({{"losses": losses, "calls": count()}})
here.say(f"done{{here.rank}}")
"""
NUM_KILLS = 20


def test_whenever_a_rank_is_killed_the_newest_step_is_whole_and_training_goes_on_bit_for_bit(worlds, quick_path):
    """Killed at calls that change the disk, a write half done."""
    script = KILLED.format(number=10**9, rank=0, folder=str(quick_path / "whole"), seed=0)
    whole = [end.told[0] for end in worlds.run(2, script)]
    moments = [
        (rank, 1 + whole[rank]["calls"] * n // (NUM_KILLS // 2)) for rank in (0, 1) for n in range(NUM_KILLS // 2)
    ]
    for rank, number in some(moments, NUM_KILLS // 2):
        folder = quick_path / f"killed-{rank}-{number}"
        script = KILLED.format(number=number, rank=rank, folder=str(folder), seed=0)
        world = worlds.start(2, script)
        until(lambda: any((world.folder / f"{word}{rank}").exists() for word in ("dead", "done")))  # noqa: B023
        for other in (0, 1):  # as torchrun does
            world.kill(other)
        world.ended(failed={0, 1})
        durable = max(AsyncCheckpointer(folder / "checkpoint", naming=Naming("step-{}")).steps(), default=0)
        if durable:
            async_ckpt.verify(folder / "checkpoint")
        resumed = trained(worlds, 2, folder, steps=6, seed=5 if durable else 0)
        for before, after in zip(whole, resumed, strict=True):
            assert after["losses"] == {step: loss for step, loss in before["losses"].items() if int(step) > durable}
