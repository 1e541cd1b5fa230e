"""The Trainer of Transformers with its checkpoints in a store: a folder counts when its mark is there, and only then."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from clients import environment_of
from racing import Thrown

pytest.importorskip("transformers")

from trainers import OURS, STEPS, Archives, Files, Kept, losses, trainer_of
from transformers import GPT2LMHeadModel, Trainer

from async_ckpt import Place, files
from async_ckpt.integrations.transformers import make_async

MARK = "trainer_state.json"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, where the Trainer makes its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def url(s3: Any, bucket: str, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in environment_of(s3).items():
        monkeypatch.setenv(name, value)
    return f"s3://{bucket}/run"


def names(url: str) -> list[str]:
    found = [path.rpartition("/")[2] for path in files.list_dir(url)]
    return [name for name in found if name != "history.jsonl"]


def whole(url: str) -> list[str]:
    return [name for name in names(url) if MARK in names(f"{url}/{name}")]


def test_a_push_to_the_hub_from_a_url_is_refused():
    trainer = trainer_of(Trainer, "s3://bucket/run")
    trainer.args.push_to_hub = True
    with pytest.raises(ValueError, match="push_to_hub sends files of output_dir; give a local path"):
        make_async(trainer)
    assert os.listdir() == []  # the Trainer has made a folder with the name of the URL


@pytest.mark.parametrize("kind", OURS)
def test_a_training_is_resumed_from_the_newest_whole_checkpoint_of_a_store(url, folder, kind):
    plain = trainer_of(Trainer, folder / "plain")
    plain.train()
    first = trainer_of(kind, url, save_total_limit=2)
    first.all_figures = True
    first.train()
    assert losses(first) == losses(plain)
    assert names(url) == whole(url) == ["checkpoint-6", "checkpoint-8"]
    trainer_of(kind, folder / "local", max_steps=2).train()
    assert names(f"{url}/checkpoint-6") == sorted(os.listdir(folder / "local" / "checkpoint-2"))
    files.remove(f"{url}/checkpoint-8/{MARK}")  # as if a training had been killed while it wrote there
    again = trainer_of(kind, url, save_total_limit=2)
    again.all_figures = True
    again.train(resume_from_checkpoint=True)
    saves = [row["async_ckpt/step"] for row in again.state.log_history if "async_ckpt/step" in row]
    assert saves == [2, 4, 8]  # that of 6 was under way when 6 was saved
    assert losses(again) == losses(plain)
    assert names(url) == whole(url) == ["checkpoint-6", "checkpoint-8"]
    assert sorted(os.listdir(folder)) == ["local", "plain"]


def test_a_checkpoint_of_the_same_name_is_replaced_with_all_its_files(url):
    for kind in (Files, Archives):
        trainer = trainer_of(kind, url, max_steps=2)
        trainer.all_figures = True
        trainer.train()
        (logged,) = [row for row in trainer.state.log_history if "async_ckpt/num_bytes" in row]
        storage = Place(url).storage()
        assert logged["async_ckpt/num_bytes"] == sum(storage.sizes("checkpoint-2").values())
        seconds = logged["async_ckpt/total_seconds"]
        assert logged["async_ckpt/bandwidth"] == pytest.approx(logged["async_ckpt/num_bytes"] / seconds)
    assert "training.tar" in names(f"{url}/checkpoint-2")
    assert "optimizer.pt" not in names(f"{url}/checkpoint-2")


def test_the_mark_is_put_last(url):
    seen = []

    def look() -> None:
        seen.append(files.exists(f"{url}/checkpoint-2/{MARK}"))

    trainer = trainer_of(Archives, url, processor=Kept(look), max_steps=2)
    trainer.train()
    assert seen == [False]
    assert whole(url) == ["checkpoint-2"]


def test_a_failed_save_leaves_no_mark_and_is_raised(url):
    numbers = iter(range(1, 10))

    def fail() -> None:
        if next(numbers) == 2:
            raise Thrown("the processor cannot be written")

    with pytest.raises(Thrown):
        trainer_of(Files, url, processor=Kept(fail)).train()
    assert whole(url) == ["checkpoint-2"]


def test_the_best_model_is_loaded_from_a_store_and_the_last_is_written_there(url, folder):
    options = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 1}
    plain = trainer_of(Trainer, folder / "plain", **options)
    plain.train()
    ours = trainer_of(Files, url, **options)
    ours.train()
    best = ours.state.best_model_checkpoint
    assert best == f"{url}/{Path(plain.state.best_model_checkpoint).name}"
    assert names(url) == [Path(best).name]
    ours.save_model()
    with files.local_read_dir(url) as local:
        read = GPT2LMHeadModel.from_pretrained(local).state_dict()
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, read[name])


def test_a_trainer_that_is_made_already_writes_to_a_store(url, folder):
    make_async(trainer_of(Trainer, url, max_steps=2)).train()
    assert whole(url) == ["checkpoint-2"]
    assert os.listdir(folder) == []


def test_nothing_to_resume_from_in_a_store_is_an_error(url):
    with pytest.raises(ValueError, match="no whole checkpoint"):
        trainer_of(Files, url).train(resume_from_checkpoint=True)


_TRAIN = """
import os, warnings
warnings.simplefilter("ignore")
os.environ.update({environment})
os.chdir({folder!r})
from trainers import *
trainer = trainer_of({kind}, {url!r}, model={model}, max_steps={steps}, per_device_train_batch_size=4)
trainer.train(resume_from_checkpoint={steps} > 4)
here.tell({{"losses": losses(trainer)}})
"""


_KINDS = [
    ("Files", "None"),
    ("sharded(Archives)", "untied"),
    ("sharded(Files)", "untied"),
    ("sharded(Files, 'FULL_STATE_DICT')", "untied"),
]


@pytest.mark.parametrize(("kind", "model"), _KINDS, ids=["ddp", "fsdp2", "folders", "files"])
def test_two_ranks_write_to_a_store_and_are_resumed(worlds, s3, url, folder, kind, model):
    told = []
    for steps in (4, STEPS):
        script = _TRAIN.format(
            environment=environment_of(s3), folder=str(folder), kind=kind, url=url, model=model, steps=steps
        )
        told.append(next(told for told in worlds.run(2, script)[0].told if "losses" in told)["losses"])
    assert told[0].items() <= told[1].items()
    assert names(url) == whole(url) == [f"checkpoint-{step}" for step in range(2, STEPS + 1, 2)]
