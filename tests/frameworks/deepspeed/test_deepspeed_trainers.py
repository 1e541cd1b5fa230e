"""The Trainer of Transformers and accelerate under DeepSpeed's ZeRO 1 to 3: resumed with the same losses, also killed."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from racing import until
from rank_worlds import Worlds
from slices import some

from async_ckpt.integrations.lightning import AsyncTarCheckpointIO

pytest.importorskip("deepspeed", reason="deepspeed is not installed: make test-frameworks")
pytest.importorskip("transformers", reason="transformers is not installed: make test-frameworks")

WARM = ("deepspeed_trainers",)
NEVER = 10**9
STAGES = [1, 2, 3]

_TRAIN = """
from deepspeed_trainers import *
from transformers import Trainer
trainer = under_deepspeed({kind}, {stage}, {folder!r}, gathers={gathers})
trainer.train(resume_from_checkpoint={resume!r})
here.tell({{"losses": losses(trainer), "folders": folders({folder!r})}})
"""


def trained(
    worlds: Worlds, stage: int, kind: str, folder: Path, resume: Path | None = None, *, gathers: bool = True
) -> dict[str, float]:
    """The losses that rank 0 has seen. Nothing but checkpoints is left."""
    script = _TRAIN.format(stage=stage, kind=kind, folder=str(folder), resume=resume and str(resume), gathers=gathers)
    told: dict[str, Any] = worlds.run(2, script)[0].told[-1]
    assert set(told["folders"]) <= {"checkpoint-2", "checkpoint-4", "checkpoint-6"}
    losses: dict[str, float] = told["losses"]
    return losses


def files_in(folder: Path) -> set[str]:
    """The files of DeepSpeed and of the Trainer in a checkpoint, without our own."""
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return {name for name in names if "_async_ckpt." not in name}


@pytest.mark.parametrize(("stage", "gathers"), [(1, True), (2, True), (3, True), (3, False)])
def test_the_files_are_those_of_the_plain_trainer_and_each_resumes_from_the_other(worlds, tmp_path, stage, gathers):
    losses = {kind: trained(worlds, stage, kind, tmp_path / kind, gathers=gathers) for kind in ("Trainer", "Files")}
    assert losses["Files"] == losses["Trainer"]
    plain, ours = (tmp_path / kind / "checkpoint-2" for kind in losses)
    assert files_in(ours) == files_in(plain)
    for kind, folder in (("Files", ours), ("Files", plain), ("Trainer", ours)):
        target = tmp_path / f"{kind}-from-{folder.parent.name}"
        assert trained(worlds, stage, kind, target, folder, gathers=gathers) == losses["Trainer"]


_BEST = """
from deepspeed_trainers import *
trainer = under_deepspeed(Files, {stage}, {folder!r}, load_best_model_at_end=True, eval_strategy="steps", eval_steps=2,
    greater_is_better=True, metric_for_best_model="loss", save_total_limit=1)
trainer.train()
best = trainer.state.best_model_checkpoint, trainer.state.best_metric
here.tell({{"best": best, "loss": trainer.evaluate()["eval_loss"], "folders": folders({folder!r})}})
"""


@pytest.mark.parametrize("stage", [2, 3])
def test_the_best_model_is_loaded_at_the_end(worlds, tmp_path, stage):
    for end in worlds.run(2, _BEST.format(stage=stage, folder=str(tmp_path))):
        folder, loss = end.told[-1]["best"]
        assert Path(folder).name == "checkpoint-2"  # not the last one
        assert end.told[-1]["loss"] == loss
        assert end.told[-1]["folders"] == ["checkpoint-2"]


_FAILING = """
from deepspeed_trainers import *
from async_ckpt.integrations.deepspeed import checkpoint_engine
write, calls = checkpoint_engine.write_by_torch, iter(range(1, 100))
def fail(content, path, **options):
    if here.rank == 1 and next(calls) == 1:
        raise OSError("no room")
    write(content, path, **options)
checkpoint_engine.write_by_torch = fail
trainer = under_deepspeed(Files, 2, {folder!r})
try:
    trainer.train()
except Exception as error:
    here.tell({{"error": type(error).__name__, "step": trainer.state.global_step, "folders": folders({folder!r})}})
"""


def test_a_save_that_fails_on_one_rank_is_raised_on_all_and_leaves_no_checkpoint(worlds, tmp_path):
    told = [end.told[-1] for end in worlds.run(2, _FAILING.format(folder=str(tmp_path)))]
    assert [one["error"] for one in told] == ["PeerFailedError", "OSError"]
    assert [one["step"] for one in told] == [4, 4]
    assert not [name for name in told[0]["folders"] if name.startswith("checkpoint")]


_KILLED = """
from children import die_at
from deepspeed_trainers import *
count = die_at({number} if here.rank == {rank} else 10**9, here.die)
found = whole_in({folder!r})
trainer = under_deepspeed(Files, {stage}, {folder!r})
trainer.train(resume_from_checkpoint=bool(found))
here.tell({{"losses": losses(trainer), "found": found, "there": whole_in({folder!r}), "count": count()}})
here.say(f"done{{here.rank}}")
"""


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_of_which_one_is_killed_at_any_moment_resume_with_the_same_losses(worlds, quick_path, stage):
    def script(name: str, rank: int = 0, number: int = NEVER) -> str:
        return _KILLED.format(stage=stage, folder=str(quick_path / name), rank=rank, number=number)

    whole = [end.told[-1] for end in worlds.run(2, script("whole"))]
    files = set(whole[0]["there"]["checkpoint-2"]) - {"global_step2"}
    for number in some(range(20), 20):
        rank, name = number % 2, f"killed-{number}"
        world = worlds.start(2, script(name, rank, random.Random(number).randrange(1, whole[rank]["count"])))
        until(lambda world=world, rank=rank: any((world.folder / f"{w}{rank}").exists() for w in ("dead", "done")))
        for each in (0, 1):  # as torchrun does
            world.kill(each)
        world.ended(failed={0, 1})
        resumed = [end.told[-1] for end in worlds.run(2, script(name))]
        for step, names in (resumed[0]["found"] | resumed[0]["there"]).items():
            assert {*names} == files | {step.replace("checkpoint-", "global_step")}
        assert [told["losses"] for told in resumed] == [told["losses"] for told in whole]


_LOOP = """
from deepspeed_trainers import *
from async_ckpt.integrations.accelerate import AsyncState
loop = Loop({stage}, {folder!r})
plain, told = loop.accelerator, {{}}
state = AsyncState(plain, "accelerate") if {ours} else plain
if {load!r}:
    state.load_state({load!r})
    told["counted"] = loop.counted.number
    told["losses"] = loop.run(4)
else:
    told["losses"] = loop.run(6, state.save_state)
if {ours}:
    state.wait()
here.tell(told)
"""


@pytest.mark.parametrize("stage", STAGES)
def test_accelerate_and_we_load_the_folders_of_both(worlds, tmp_path, stage):
    def ran(ours: bool, folder: Path, load: Path | str = "") -> list[Any]:
        script = _LOOP.format(stage=stage, ours=ours, folder=str(folder), load=str(load))
        return [end.told[-1] for end in worlds.run(2, script)]

    folders = {ours: tmp_path / f"ours-{ours}" for ours in (True, False)}
    first = {ours: ran(ours, folder) for ours, folder in folders.items()}
    assert first[True] == first[False]
    ours, plain = (folders[way] / "checkpoints" / "checkpoint_0" for way in (True, False))
    assert files_in(ours) == files_in(plain)
    again = ran(False, tmp_path / "reference", plain)
    assert again[0]["counted"] == 2
    assert ran(True, tmp_path / "one", ours) == again
    assert ran(True, tmp_path / "two", plain) == again
    assert ran(False, tmp_path / "three", ours) == again


_REFUSED = """
from deepspeed_trainers import *
from transformers import Trainer
from async_ckpt.integrations.accelerate import AsyncState
def refusal(make):
    try:
        make()
    except NotImplementedError as error:
        return str(error)
here.tell([
    refusal(lambda: under_deepspeed(Archives, 2, {folder!r})),
    refusal(lambda: under_deepspeed(Files, 2, "s3://bucket/run")),
    refusal(lambda: AsyncState(Loop(2, {folder!r}).accelerator)),
])
"""


def test_what_is_not_supported_is_refused_before_any_training(worlds, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for end in worlds.run(2, _REFUSED.format(folder=str(tmp_path))):
        assert end.told == [
            [
                'layout="archive" is not supported under DeepSpeed; leave it out',
                "under DeepSpeed, output_dir must be a local folder",
                'layout="archive" is not supported under DeepSpeed; pass layout="accelerate"',
            ]
        ]
    assert not (tmp_path / "s3:").exists()


def test_the_callback_for_lightning_refuses_its_strategy_for_deepspeed():
    """Called by hand: Lightning itself refuses this strategy without a GPU, ahead of any callback."""
    lightning = pytest.importorskip("pytorch_lightning", reason="Lightning is not installed: make test-frameworks")
    checkpoints = AsyncTarCheckpointIO()
    callback, strategy = checkpoints.callback(), lightning.strategies.DeepSpeedStrategy()
    strategy.checkpoint_io = checkpoints
    trainer = SimpleNamespace(strategy=strategy)
    with pytest.raises(ValueError, match="DeepSpeedStrategy writes its checkpoints by itself, and is not supported"):
        callback._refuse_other_plugin(trainer)
