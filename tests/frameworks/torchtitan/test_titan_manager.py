"""Our checkpoint manager for torchtitan in one process: each field of its configuration, and folders that other managers wrote."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import load_file
from states import difference

import async_ckpt
from async_ckpt.core.staging.guard import unwrapped
from async_ckpt.errors import StateMismatchError, StepBehindError

pytest.importorskip("torchtitan", reason="torchtitan is not installed")
titan: Any = pytest.importorskip("titan_trainers", exc_type=ImportError)
Trainer = titan.Trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:To get the last learning rate:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*set_vital.*:UserWarning"),
]


def steps_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoint").glob("step-*"))


def block_with(text: str) -> str:
    """The block of our page that has this text."""
    page = (Path(async_ckpt.__file__).parents[1] / "docs" / "torchtitan.md").read_text()
    (block,) = [block for block in re.findall(r"```\n(.*?)```", page, flags=re.DOTALL) if text in block]
    return block


@pytest.mark.filterwarnings("ignore")  # of the model's own imports
def test_one_line_of_the_page_gives_a_configuration_of_torchtitan_our_manager():
    pytest.importorskip("triton", reason="triton, which torchtitan's models import, is not installed")
    names: dict[str, Any] = {}
    exec(block_with("llama3_debugmodel"), names)
    config = names["llama3_debugmodel_async"]()
    assert type(config.checkpoint).__qualname__ == "CheckpointManager.Config"
    assert config.checkpoint._owner is titan.ours.CheckpointManager


def test_a_training_goes_on_with_the_same_losses_to_the_last_bit(tmp_path):
    whole = Trainer(tmp_path / "whole").train(8)
    cut = Trainer(tmp_path / "cut").train(8, until=5)
    live = Trainer(tmp_path / "cut", seed=5)
    assert {**cut, **live.train(8)} == whole
    assert [*live.losses] == [5, 6, 7, 8]
    assert live.ntokens_seen == 8 * 32


def test_a_fresh_folder_has_nothing_to_load(tmp_path):
    trainer = Trainer(tmp_path)
    before = trainer.all()
    assert trainer.load() is False
    assert difference(before, trainer.all()) is None


def test_a_manager_that_is_not_enabled_does_nothing(tmp_path):
    trainer = Trainer(tmp_path, enable=False)
    assert trainer.checkpointer.checkpointer is None
    trainer.train(4)
    assert not (tmp_path / "checkpoint").exists()


def test_the_optimizers_wait_for_the_snapshot_by_themselves(tmp_path):
    trainer = Trainer(tmp_path)
    taken = []
    save = trainer.checkpointer.checkpointer.save

    def watched(*arguments: Any, **options: Any) -> Any:
        taken.append(options["guard"])
        return save(*arguments, **options)

    trainer.checkpointer.checkpointer.save = watched
    trainer.train(2)
    assert taken == [[trainer.optimizers]]
    assert unwrapped(trainer.optimizers) == (trainer.optimizers, *trainer.optimizers.optimizers)


def test_so_many_of_the_newest_steps_are_kept(tmp_path):
    Trainer(tmp_path, keep_latest_k=2).train(8)
    assert steps_in(tmp_path) == ["step-6", "step-8"]


def test_the_first_step_is_saved_where_it_is_wanted_and_none_where_saves_are_off(tmp_path):
    Trainer(tmp_path / "first", enable_first_step_checkpoint=True).train(3)
    assert steps_in(tmp_path / "first") == ["step-1", "step-2", "step-3"]
    Trainer(tmp_path / "none", load_only=True).train(3)
    assert steps_in(tmp_path / "none") == []


def test_a_folder_that_the_manager_of_torchtitan_has_written_is_gone_on_from(tmp_path):
    whole = Trainer(tmp_path / "whole", kind=titan.theirs, keep_latest_k=0).train(6)
    cut = Trainer(tmp_path / "cut", kind=titan.theirs, keep_latest_k=0).train(6, until=3)
    live = Trainer(tmp_path / "cut", seed=5)
    assert {**cut, **live.train(6)} == whole
    assert [*live.losses] == [3, 4, 5, 6]
    assert live.checkpointer.checkpointer.steps() == [4, 6]
    again = Trainer(tmp_path / "cut", seed=5, load_step=2)
    assert again.load() is True
    assert again.step == 2


def test_the_manager_of_torchtitan_goes_on_from_a_step_that_was_converted(tmp_path):
    """By the lines in the docs."""
    whole = Trainer(tmp_path / "whole").train(6)
    cut = Trainer(tmp_path / "cut").train(6, until=4)
    lines = block_with("torch.distributed.checkpoint.save")
    for name, path in {"outputs": tmp_path / "cut", "back": tmp_path / "back"}.items():
        lines = lines.replace(f'"{name}/checkpoint/step-500', f'"{path}/checkpoint/step-4')
    exec(lines, {"torch": torch, "async_ckpt": async_ckpt})
    back = Trainer(tmp_path / "back", kind=titan.theirs, seed=5, keep_latest_k=0)
    assert {**cut, **back.train(6)} == whole


@pytest.mark.parametrize("kind", ["ours", "theirs"])
@pytest.mark.parametrize("model_only", [True, False])
def test_an_initial_checkpoint_of_either_manager_is_loaded_while_the_folder_is_empty(tmp_path, kind, model_only):
    before = Trainer(tmp_path / "before", kind=getattr(titan, kind), keep_latest_k=0)
    before.train(4)
    path = str(tmp_path / "before" / "checkpoint" / "step-4")
    live = Trainer(tmp_path / "live", seed=5, initial_load_path=path, initial_load_model_only=model_only)
    assert live.load() is True
    assert live.step == (0 if model_only else 4)
    assert difference(before.all()["model"], live.all()["model"]) is None
    assert (difference(before.all(), live.all()) is None) is not model_only
    live.train(2 if model_only else 6)
    again = Trainer(tmp_path / "live", seed=6, initial_load_path="/nowhere")
    assert again.load() is True
    assert difference(live.all(), again.all()) is None


def test_states_may_be_excluded_from_loading(tmp_path):
    Trainer(tmp_path).train(4)
    live = Trainer(tmp_path, seed=5, exclude_from_loading=["dataloader", "lr_scheduler"])
    fresh = live.lr_schedulers.state_dict()
    assert live.load() is True
    assert live.step == 4
    assert live.lr_schedulers.state_dict() == fresh
    with pytest.raises(ValueError, match="exclude_from_loading has 'data'"):
        Trainer(tmp_path, exclude_from_loading=["data"])


@pytest.mark.parametrize("name", ["dataloader", "train_state", "lr_scheduler", "optimizer"])
def test_what_a_checkpoint_lacks_is_named_before_the_model_is_filled(tmp_path, name):
    Trainer(tmp_path).train(2)
    state = async_ckpt.load(tmp_path / "checkpoint" / "step-2")
    del state[name]
    async_ckpt.save(state, tmp_path / "part.tar").result()
    live = Trainer(
        tmp_path / "live", seed=5, initial_load_path=str(tmp_path / "part.tar"), initial_load_model_only=False
    )
    before = copy.deepcopy([part.state_dict() for part in live.parts])
    with pytest.raises(StateMismatchError, match=rf"part\.tar[^\n]*\n  missing in the checkpoint: {name}"):
        live.load()
    assert difference([part.state_dict() for part in live.parts], before) is None


def test_the_last_step_may_have_the_model_alone_in_another_dtype(tmp_path):
    before = Trainer(tmp_path, last_save_model_only=True, export_dtype="bfloat16")
    before.train(4)
    state = async_ckpt.load(tmp_path / "checkpoint" / "step-4")
    assert [*state] == ["model"]
    assert {weight.dtype for weight in state["model"].values()} == {torch.bfloat16}

    live = Trainer(tmp_path)
    with pytest.raises(StateMismatchError, match="missing in the checkpoint: optimizer") as caught:
        live.load()
    assert "give load_step= an earlier one" in caught.value.__notes__[0]
    assert Trainer(tmp_path, load_step=2).load() is True


def test_a_training_that_was_told_to_go_back_retires_the_steps_after_that(tmp_path):
    whole = Trainer(tmp_path).train(6)
    other = Trainer(tmp_path).checkpointer
    with pytest.raises(StepBehindError):
        other.save(3, last_step=True)
    live = Trainer(tmp_path, seed=5, load_step=2)
    live.train(8, until=5)
    assert live.losses == {step: whole[step] for step in (3, 4, 5)}
    assert live.checkpointer.checkpointer.steps() == [2, 4]
    with pytest.raises(FileNotFoundError, match="there is no step-6; change load_step"):
        Trainer(tmp_path, load_step=6).load()


def test_a_seed_checkpoint_gives_every_training_the_same_weights(tmp_path):
    seed = Trainer(tmp_path, last_save_model_only=True, create_seed_checkpoint=True)
    seed.checkpointer.save(0, last_step=True)
    seed.checkpointer.close()
    live = Trainer(tmp_path, seed=5)
    assert live.load() is True
    assert difference(seed.all()["model"], live.all()["model"]) is None
    assert live.step == 0


def test_the_last_step_is_a_folder_of_hugging_face_through_the_adapter(tmp_path):
    assets = tmp_path / "assets"
    assets.mkdir()
    (assets / "config.json").write_text(json.dumps({"model_type": "tiny"}))
    before = Trainer(tmp_path, hf=str(assets), last_save_model_only=True, last_save_in_hf=True)
    before.train(4)
    folder = tmp_path / "checkpoint" / "step-4"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    want = {f"model.{name}": value for name, value in before.all()["model"].items()}
    assert difference(dict(sorted(want.items())), dict(sorted(load_file(folder / "model.safetensors").items()))) is None

    live = Trainer(tmp_path / "live", seed=5, initial_load_path=str(folder), initial_load_in_hf=True)
    assert live.load() is True
    assert difference(before.all()["model"], live.all()["model"]) is None
    # The newest step that has everything is that before it.
    again = Trainer(tmp_path, seed=6)
    assert again.load() is True
    assert again.step == 2


def test_a_failed_save_is_raised_at_the_next_one_and_by_close(tmp_path, monkeypatch):
    from async_ckpt.core.storage.local import LocalSink

    trainer = Trainer(tmp_path)
    trainer.train(8, until=3)
    trainer = Trainer(tmp_path)
    monkeypatch.setattr(LocalSink, "write", lambda *_: (_ for _ in ()).throw(OSError("this disk is broken")))
    with pytest.raises(Exception, match="this disk is broken"):
        trainer.train(8)
    assert trainer.step == 6
    with pytest.raises(Exception, match="this disk is broken"):
        Trainer(tmp_path / "other").train(8, until=3)
    monkeypatch.undo()
    live = Trainer(tmp_path)
    live.load()
    assert live.step == 2


def test_the_folder_may_be_a_url(s3, bucket, tmp_path, monkeypatch):
    for key in ("region", "access_key_id", "secret_access_key"):
        monkeypatch.setenv(f"AWS_{key.upper()}", s3.options[key])
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    whole = Trainer(tmp_path).train(6)
    url = f"s3://{bucket}/run"
    cut = Trainer(url).train(6, until=4)
    live = Trainer(url, seed=5, keep_latest_k=2)
    assert {**cut, **live.train(6)} == whole
    assert live.losses.keys() == {5, 6}
    assert live.checkpointer.checkpointer.steps() == [4, 6]
    other = Trainer(tmp_path / "other", initial_load_path=f"{url}/checkpoint/step-4")
    assert other.load() is True
