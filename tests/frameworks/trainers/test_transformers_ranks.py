"""The Trainer of Transformers on several ranks, resumed on as many and on others with the same losses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_worlds import Worlds
from torch.distributed.checkpoint import FileSystemReader

import async_ckpt

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from trainers import names_in

WARM = ("trainers", "accelerate")

_TRAIN = """
import warnings
warnings.simplefilter("ignore")
from trainers import *
from transformers import Trainer
kind = {kind}
trainer = trainer_of(kind, {folder!r}, model={model}, max_steps=6,
    per_device_train_batch_size=8 // here.size)
trainer.train(resume_from_checkpoint={resume!r})
here.tell({{"losses": losses(trainer), "folders": folders({folder!r})}})
"""


def trained(
    worlds: Worlds,
    size: int,
    kind: str,
    folder: Path,
    resume: Path | None = None,
    model: str = "None",
) -> Any:
    """The losses that rank 0 has seen, and the folders that are there at the end."""
    script = _TRAIN.format(kind=kind, folder=str(folder), resume=resume and str(resume), model=model)
    ended = worlds.run(size, script)
    told = next(told for told in ended[0].told if "losses" in told)
    return {int(step): loss for step, loss in told["losses"].items()}, told["folders"]


# --- several ranks ------------------------------------------------------------------------------------------------


_SLOW_RANK = """
import time
from trainers import *
from transformers import Trainer
from async_ckpt.integrations.common.run_folders import LocalRun
begin = LocalRun.begin
def late(run, name):
    time.sleep(0.3 * (here.rank == 0))
    begin(run, name)
LocalRun.begin = late
trainer = trainer_of(sharded(Archives), {folder!r}, model=untied, max_steps=6, per_device_train_batch_size=4)
trainer.train()
here.tell({{"folders": folders({folder!r})}})
"""


def test_a_rank_that_removes_what_was_left_late_removes_nothing_of_a_save_that_others_begin(worlds, tmp_path):
    ended = worlds.run(2, _SLOW_RANK.format(folder=str(tmp_path)))
    there = next(told["folders"] for told in ended[0].told if "folders" in told)
    assert there == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert [len([*(tmp_path / name / "training.tar").glob("rank_*.tar")]) for name in there] == [2] * 3


@pytest.mark.parametrize("kind", ["Files", "Archives"])
def test_two_ranks_of_ddp_are_resumed_with_the_same_losses(worlds, tmp_path, kind):
    plain, _ = trained(worlds, 2, "Trainer", tmp_path / "plain")
    ours, there = trained(worlds, 2, kind, tmp_path / "ours")
    assert ours == plain
    assert there == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    resumed, _ = trained(worlds, 2, kind, tmp_path / "resumed", tmp_path / "ours" / "checkpoint-2")
    assert resumed == plain
    if kind == "Files":
        names = [names_in(tmp_path / run / "checkpoint-2") for run in ("plain", "ours")]
        assert names[0] == names[1]
        resumed, _ = trained(worlds, 2, "Trainer", tmp_path / "again", tmp_path / "ours" / "checkpoint-2")
        assert resumed == plain


_FAILING = """
import warnings
warnings.simplefilter("ignore")
from trainers import *
from transformers import Trainer
numbers = iter(range(1, 10))
def fail():
    if next(numbers) == {number}:
        raise OSError("no room")
trainer = trainer_of({kind}, {folder!r}, processor=Kept(fail), model={model}, max_steps=6, **{options})
try:
    trainer.train()
except Exception as error:
    here.tell({{"error": type(error).__name__, "text": str(error), "step": trainer.state.global_step}})
"""
_FULL = """
import warnings
warnings.simplefilter("ignore")
from trainers import *
from transformers import Trainer
from async_ckpt.integrations.transformers import async_trainer
trainer = trainer_of({kind}, {folder!r}, model={model}, max_steps=6)
taken, calls = async_trainer.snapshot, iter(range(1, 10))
def snapshot(*arguments, **options):
    if next(calls) == 2 and here.rank == {rank}:
        raise MemoryError("no room")
    return taken(*arguments, **options)
async_trainer.snapshot = snapshot
try:
    trainer.train()
except Exception as error:
    here.tell({{"error": type(error).__name__, "text": str(error), "folders": folders({folder!r})}})
"""


@pytest.mark.parametrize(
    ("kind", "rank"), [("Files", 0), ("sharded(Archives)", 1), ("sharded(Files)", 0)], ids=["ddp", "fsdp2", "folders"]
)
def test_a_snapshot_that_fails_on_one_rank_is_raised_on_all(worlds, tmp_path, kind, rank):
    model = "untied" if kind.startswith("sharded") else "None"
    script = _FULL.format(kind=kind, folder=str(tmp_path), model=model, rank=rank)
    told = [next(told for told in end.told if "error" in told) for end in worlds.run(2, script)]
    assert told[rank]["error"] == "MemoryError"
    assert told[1 - rank]["error"] == "PeerFailedError"
    assert told[1 - rank]["text"] == f"rank {rank} has failed: MemoryError: no room"
    assert "checkpoint-2" in told[0]["folders"]
    assert "checkpoint-4" not in told[0]["folders"]


_BEST = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}


@pytest.mark.parametrize(
    ("kind", "number", "step", "options"),
    [
        ("Files", 2, 6, {}),
        ("Files", 3, 6, {}),
        ("Archives", 1, 4, {}),
        ("Files", 3, 6, _BEST),
        ("sharded(Archives)", 1, 4, {}),
    ],
    ids=["next save", "end", "archive", "best model", "fsdp2"],
)
def test_a_save_that_fails_on_one_rank_is_raised_on_all(worlds, tmp_path, kind, number, step, options):
    model = "untied" if kind.startswith("sharded") else "None"
    script = _FAILING.format(number=number, kind=kind, folder=str(tmp_path), model=model, options=options)
    told = [next(told for told in end.told if "error" in told) for end in worlds.run(2, script)]
    assert told[0] == {"error": "OSError", "text": "no room", "step": step}
    assert told[1] == {"error": "PeerFailedError", "text": "rank 0 has failed: OSError: no room", "step": step}


def test_four_ranks_of_fsdp2_are_resumed_on_four_and_on_two(worlds, tmp_path):
    kind = "sharded(Archives)"
    whole, there = trained(worlds, 4, kind, tmp_path / "four", model="untied")
    assert there == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    folder = tmp_path / "four" / "checkpoint-2"
    assert len([*(folder / "training.tar").glob("rank_*.tar")]) == 4
    same, _ = trained(worlds, 4, kind, tmp_path / "same", folder, model="untied")
    assert same == whole
    fewer, _ = trained(worlds, 2, kind, tmp_path / "fewer", folder, model="untied")
    assert fewer == pytest.approx(whole, rel=1e-5)


def test_what_the_plain_trainer_has_saved_under_fsdp2_is_resumed(worlds, tmp_path):
    plain, _ = trained(worlds, 2, "sharded(Trainer)", tmp_path / "plain", model="untied")
    folder = tmp_path / "plain" / "checkpoint-2"
    ours, _ = trained(worlds, 2, "sharded(Archives)", tmp_path / "ours", folder, model="untied")
    assert ours == plain


def test_the_files_under_fsdp2_are_those_of_the_plain_trainer_which_resumes_from_them(worlds, tmp_path):
    losses = {}
    for kind in ("Trainer", "Files"):
        losses[kind], _ = trained(worlds, 2, f"sharded({kind})", tmp_path / kind, model="untied")
    assert losses["Files"] == losses["Trainer"]
    plain, ours = (tmp_path / kind / "checkpoint-2" for kind in losses)
    assert names_in(ours) == names_in(plain)
    for folder in ("pytorch_model_fsdp_0", "optimizer_0"):
        keys = [{*FileSystemReader(one / folder).read_metadata().state_dict_metadata} for one in (plain, ours)]
        assert keys[0] == keys[1]
    resumed, _ = trained(worlds, 2, "sharded(Trainer)", tmp_path / "resumed", ours, model="untied")
    assert resumed == losses["Trainer"]
    more, _ = trained(worlds, 4, "sharded(Files)", tmp_path / "more", ours, model="untied")
    assert more == pytest.approx(losses["Trainer"], rel=1e-5)


def test_whole_state_dicts_under_fsdp2_are_in_the_files_of_the_plain_trainer_which_resumes_from_them(worlds, tmp_path):
    losses = {}
    for kind in ("Trainer", "Files"):
        script = f"sharded({kind}, 'FULL_STATE_DICT')"
        losses[kind], _ = trained(worlds, 2, script, tmp_path / kind, model="untied")
    assert losses["Files"] == losses["Trainer"]
    plain, ours = (tmp_path / kind / "checkpoint-2" for kind in losses)
    assert names_in(ours) == names_in(plain)
    assert (ours / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()
    for name in ("pytorch_model_fsdp.bin", "optimizer.bin"):
        theirs, loaded = (torch.load(one / name, weights_only=True) for one in (plain, ours))
        assert loaded.pop("param_groups", None) == theirs.pop("param_groups", None)
        torch.testing.assert_close(loaded, theirs, rtol=0, atol=0)
    resumed, _ = trained(worlds, 2, "sharded(Trainer, 'FULL_STATE_DICT')", tmp_path / "resumed", ours, model="untied")
    assert resumed == losses["Trainer"]


@pytest.mark.parametrize("kind", ["sharded({})", "sharded({}, 'FULL_STATE_DICT')"], ids=["folders", "files"])
def test_adapters_under_fsdp2_are_in_the_files_of_the_plain_trainer_which_resumes_from_them(worlds, tmp_path, kind):
    pytest.importorskip("peft")
    losses = {}
    for name in ("Trainer", "Files"):
        losses[name], _ = trained(worlds, 2, kind.format(name), tmp_path / name, model="untied_with_adapter")
    assert losses["Files"] == losses["Trainer"]
    plain, ours = (tmp_path / name / "checkpoint-2" for name in losses)
    assert names_in(ours) == names_in(plain)
    for file in {"adapter_model.safetensors", "adapter_config.json"} & names_in(plain):
        assert (ours / file).read_bytes() == (plain / file).read_bytes()
    for folder in [path.name for path in plain.iterdir() if path.is_dir()]:
        keys = [{*FileSystemReader(one / folder).read_metadata().state_dict_metadata} for one in (plain, ours)]
        assert keys[0] == keys[1]
    for name in ("Trainer", "Files"):
        folder = tmp_path / f"resumed-{name}"
        resumed, _ = trained(worlds, 2, kind.format(name), folder, ours, model="untied_with_adapter")
        assert resumed == losses["Trainer"]


def test_adapters_under_fsdp2_are_resumed_from_an_archive(worlds, tmp_path):
    pytest.importorskip("peft")
    kind, model = "sharded(Archives)", "untied_with_adapter"
    whole, _ = trained(worlds, 2, kind, tmp_path / "whole", model=model)
    archive = async_ckpt.load(tmp_path / "whole" / "checkpoint-2" / "training.tar", select="model")
    assert all("lora" in name for name in archive["model"])
    resumed, _ = trained(worlds, 2, kind, tmp_path / "resumed", tmp_path / "whole" / "checkpoint-2", model=model)
    assert resumed == whole
