"""The Trainer of Transformers with checkpoints in the background: the same folders, the same losses, nothing half-written."""

import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_command
from disks import mounted, needs_mount
from local_hub import local_hub
from racing import Thrown, until
from states import MIB

pytest.importorskip("transformers")

from safetensors.torch import load_file
from trainers import (
    OURS,
    STEPS,
    Archives,
    At,
    Files,
    Kept,
    folders,
    losses,
    names_in,
    tiny_model,
    trainer_of,
    with_adapter,
)
from transformers import GPT2LMHeadModel, Trainer, TrainerCallback

import async_ckpt
from async_ckpt import CheckpointError, StateMismatchError, StorageFullError
from async_ckpt.errors import CorruptCheckpointError, RunTakenError
from async_ckpt.integrations.transformers import AsyncCheckpointing, make_async, use

KINDS = [Trainer, *OURS]


def saved(step: int) -> str:
    return f"checkpoint-{step}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The trainings from the beginning to the end, by the names of their classes, and where each has saved."""
    found = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind.__name__)
        trainer = trainer_of(kind, folder)
        trainer.train()
        found[kind.__name__] = (losses(trainer), folder)
    return found


# --- what is written, and resumed ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OURS)
def test_saving_changes_no_loss(whole, kind):
    assert whole[kind.__name__][0] == whole["Trainer"][0]
    assert len(whole["Trainer"][0]) == STEPS


@pytest.mark.parametrize("reader", KINDS)
@pytest.mark.parametrize("writer", KINDS)
def test_a_resumed_training_has_the_losses_of_one_that_was_never_stopped(whole, tmp_path, writer, reader):
    if writer is Archives and reader is Trainer:
        pytest.skip("the plain Trainer reads no archives")
    expected, folder = whole[writer.__name__]
    trainer = trainer_of(reader, tmp_path)
    trainer.train(resume_from_checkpoint=str(folder / saved(4)))
    assert losses(trainer) == expected


def test_the_files_are_those_of_the_plain_trainer(whole):
    plain, ours = whole["Trainer"][1] / saved(6), whole["Files"][1] / saved(6)
    assert names_in(ours) == names_in(plain)
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (ours / name).read_bytes() == (plain / name).read_bytes()
    for name in ("optimizer.pt", "scheduler.pt"):
        theirs = torch.load(plain / name, weights_only=True)
        torch.testing.assert_close(torch.load(ours / name, weights_only=True), theirs, rtol=0, atol=0)
    logs = [json.loads((folder / "trainer_state.json").read_text())["log_history"] for folder in (ours, plain)]
    assert [row for row in logs[0] if "loss" in row] == [row for row in logs[1] if "loss" in row]


def test_an_archive_stands_in_for_four_files(whole):
    plain, ours = whole["Trainer"][1] / saved(6), whole["Archives"][1] / saved(6)
    names = names_in(plain) - {"optimizer.pt", "scheduler.pt", "rng_state.pth"}
    assert names_in(ours) == names | {"training.tar"}
    assert async_ckpt.verify(ours / "training.tar").num_archives == 1
    assert {*async_ckpt.load(ours / "training.tar")} == {"optimizer", "scheduler", "rng"}


@pytest.mark.parametrize("kind", OURS)
def test_a_model_in_several_files_is_resumed(tmp_path, kind):
    class Sharded(GPT2LMHeadModel):
        def save_pretrained(self, *args: Any, **options: Any) -> None:
            super().save_pretrained(*args, max_shard_size="20KB", **options)

    def model() -> Any:
        made = tiny_model()
        made.__class__ = Sharded
        return made

    first = trainer_of(kind, tmp_path, model=model, max_steps=4)
    first.train()
    assert (tmp_path / saved(2) / "model.safetensors.index.json").exists()
    again = trainer_of(kind, tmp_path / "again", model=model, max_steps=4)
    again.train(resume_from_checkpoint=str(tmp_path / saved(2)))
    assert losses(again) == losses(first)


def test_only_the_model_is_saved_if_that_is_asked_for(tmp_path):
    for kind in KINDS:
        trainer_of(kind, tmp_path / kind.__name__, save_only_model=True, max_steps=2).train()
    names = [names_in(tmp_path / kind.__name__ / saved(2)) for kind in KINDS]
    assert names[1] == names[2] == names[0]


def test_the_states_of_callbacks_are_those_of_the_save(whole):
    states = []
    for kind in KINDS:
        kept = json.loads((whole[kind.__name__][1] / saved(6) / "trainer_state.json").read_text())
        states.append(kept["stateful_callbacks"])
    assert states[1] == states[2] == states[0]


def test_a_checkpoint_at_a_url_is_resumed(whole, tmp_path):
    expected, folder = whole["Files"]
    url = f"memory://{tmp_path.name}/{saved(4)}"
    async_ckpt.files.upload_directory(folder / saved(4), url)
    trainer = trainer_of(Files, tmp_path)
    trainer.train(resume_from_checkpoint=url)
    assert losses(trainer) == expected


# --- when a folder appears ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OURS)
def test_training_goes_on_while_a_folder_is_written_which_appears_as_a_whole(tmp_path, gate, kind):
    seen = []

    def look() -> None:
        gate.wait_reached()  # the writing has begun, two steps ago
        seen.append([name for name in folders(tmp_path) if not name.startswith(".")])
        gate.open()
        trainer.wait_for_checkpoint()
        seen.append([name for name in folders(tmp_path) if not name.startswith(".")])

    trainer = trainer_of(kind, tmp_path, callbacks=[At(5, look)], processor=Kept(gate.passed), save_steps=4)
    trainer.train()
    assert seen == [[], [saved(4)]]
    assert {"processor.json", "trainer_state.json"} <= names_in(tmp_path / saved(4))


def test_the_end_of_a_training_waits_for_its_last_checkpoint(tmp_path, gate):
    trainer = trainer_of(Files, tmp_path, processor=Kept(gate.passed), save_steps=STEPS)
    trainer.add_callback(type("Opening", (TrainerCallback,), {"on_save": lambda *_, **__: gate.open()}))
    trainer.train()
    assert folders(tmp_path) == [saved(STEPS)]


@pytest.mark.parametrize("error", [Thrown("in a callback"), KeyboardInterrupt(), SystemExit(3)])
def test_an_exception_in_a_training_waits_for_the_checkpoint(tmp_path, gate, error):
    def fail() -> None:
        gate.open()
        if isinstance(error, KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise error

    trainer = trainer_of(Files, tmp_path, callbacks=[At(3, fail)], processor=Kept(gate.passed))
    with pytest.raises(type(error)):
        trainer.train()
    assert folders(tmp_path) == [saved(2)]


def test_a_checkpoint_replaces_one_of_the_same_name_with_all_its_files(whole, tmp_path):
    trainer_of(Files, tmp_path, max_steps=2).train()
    trainer_of(Archives, tmp_path, max_steps=2).train()
    names = names_in(tmp_path / saved(2))
    assert names == names_in(whole["Archives"][1] / saved(2))


# --- what is kept -------------------------------------------------------------------------------------------------

_KEPT = {
    "the newest": {"save_total_limit": 2},
    "one": {"save_total_limit": 1},
    "the best, too": {"save_total_limit": 1, "load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2},
    "the best by a metric": {"save_total_limit": 2, "metric_for_best_model": "loss", "eval_strategy": "steps", "eval_steps": 2},
    "only the best": {"save_strategy": "best", "metric_for_best_model": "loss", "eval_strategy": "steps", "eval_steps": 2},
    "each epoch's": {"save_strategy": "epoch", "max_steps": -1, "num_train_epochs": 2, "save_total_limit": 1},
}  # fmt: skip


@pytest.mark.parametrize("options", _KEPT.values(), ids=[*_KEPT])
def test_the_folders_at_the_end_are_those_of_the_plain_trainer(tmp_path, monkeypatch, options):
    ends = []
    monkeypatch.chdir(tmp_path)
    for kind in (Trainer, Files):
        trainer = trainer_of(kind, kind.__name__, **options)
        trainer.train()
        weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        best = trainer.state.best_model_checkpoint
        ends.append((folders(tmp_path / kind.__name__), best and best.replace(kind.__name__, "run"), weights))
    assert ends[1][:2] == ends[0][:2]
    torch.testing.assert_close(ends[1][2], ends[0][2], rtol=0, atol=0)


def test_an_old_checkpoint_goes_when_the_new_one_is_durable(tmp_path, gate):
    seen = []
    calls = iter([lambda: None, gate.passed, lambda: None])

    def look() -> None:
        gate.wait_reached()
        seen.append(folders(tmp_path)[-1:])
        gate.open()

    trainer = trainer_of(
        Files, tmp_path, callbacks=[At(5, look)], processor=Kept(lambda: next(calls)()), max_steps=5, save_total_limit=1
    )
    trainer.train()
    assert seen == [[saved(2)]]
    assert folders(tmp_path) == [saved(5)]


def test_a_training_that_was_taken_back_keeps_its_newest_checkpoint(tmp_path):
    trainer_of(Files, tmp_path).train()
    trainer = trainer_of(Files, tmp_path, max_steps=5, save_total_limit=1)
    trainer.train(resume_from_checkpoint=str(tmp_path / saved(2)))
    assert folders(tmp_path) == [saved(5)]


# --- failures -----------------------------------------------------------------------------------------------------


def failing_at(number: int) -> Kept:
    numbers = iter(range(1, 100))

    def fail() -> None:
        if next(numbers) == number:
            raise Thrown("the processor cannot be written")

    return Kept(fail)


@pytest.mark.parametrize("kind", OURS)
def test_a_failed_save_is_raised_at_the_next_one(tmp_path, kind):
    trainer = trainer_of(kind, tmp_path, processor=failing_at(2))
    with pytest.raises(Thrown):
        trainer.train()
    assert trainer.state.global_step == 6
    assert folders(tmp_path)[-1:] == [saved(2)]


def test_a_failed_save_is_raised_at_the_end(tmp_path):
    trainer = trainer_of(Files, tmp_path, processor=failing_at(4))
    with pytest.raises(Thrown):
        trainer.train()
    assert trainer.state.global_step == STEPS
    assert folders(tmp_path) == [saved(2), saved(4), saved(6)]


def test_a_failed_save_is_told_beside_another_error(tmp_path):
    def fail() -> None:
        raise Thrown("in a callback")

    trainer = trainer_of(Files, tmp_path, callbacks=[At(3, fail)], processor=failing_at(1))
    with pytest.raises(Thrown, match="in a callback") as caught:
        trainer.train()
    assert "the processor cannot be written" in caught.value.__notes__[0]


@pytest.mark.parametrize("kind", OURS)
def test_an_error_in_the_training_leaves_nothing_but_checkpoints(tmp_path, kind):
    """The oldest one is retired at the end, when no later save removes it."""

    def fail() -> None:
        raise Thrown("in a callback")

    trainer = trainer_of(kind, tmp_path, callbacks=[At(5, fail)], save_total_limit=1)
    with pytest.raises(Thrown, match="in a callback"):
        trainer.train()

    assert [name for name in os.listdir(tmp_path) if name not in ("runs", "history.jsonl")] == [saved(4)]


def test_a_failed_save_is_followed_by_one_that_is_whole(tmp_path, whole):
    with pytest.raises(Thrown):
        trainer_of(Files, tmp_path, processor=failing_at(2)).train()
    trainer = trainer_of(Files, tmp_path)
    trainer.train(resume_from_checkpoint=True)
    assert losses(trainer) == whole["Files"][0]


@needs_mount
@pytest.mark.parametrize("kind", OURS)
def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, kind):
    with mounted(tmp_path / "disk", "size=4m") as disk:
        trainer = trainer_of(kind, disk, model=lambda: tiny_model(n_embd=128, vocab_size=128))
        with pytest.raises(StorageFullError):
            trainer.train()
        assert folders(disk) == [saved(2)]
        again = trainer_of(kind, tmp_path, model=lambda: tiny_model(n_embd=128, vocab_size=128))
        again.train(resume_from_checkpoint=str(disk / saved(2)))


def test_a_file_in_the_place_of_a_checkpoint_fails_the_save(tmp_path):
    (tmp_path / saved(4)).write_text("mine")
    with pytest.raises((CheckpointError, OSError)):
        trainer_of(Files, tmp_path).train()
    assert (tmp_path / saved(4)).read_text() == "mine"


def test_a_folder_that_is_deleted_while_a_save_runs_fails_that_save(tmp_path, gate):
    import shutil

    def delete() -> None:
        gate.wait_reached()
        shutil.rmtree(tmp_path / "run")
        gate.open()

    trainer = trainer_of(Files, tmp_path / "run", callbacks=[At(3, delete)], processor=Kept(gate.passed))
    with pytest.raises((CheckpointError, OSError)):
        trainer.train()


def test_a_checkpoint_that_is_deleted_by_hand_is_no_error(tmp_path):
    import shutil

    trainer = trainer_of(
        Files, tmp_path, callbacks=[At(5, lambda: shutil.rmtree(tmp_path / saved(2)))], save_total_limit=3
    )
    trainer.train()
    assert folders(tmp_path) == [saved(4), saved(6), saved(8)]


def test_two_trainers_on_one_folder_are_refused(tmp_path):
    other = trainer_of(Files, tmp_path)
    trainer = trainer_of(Files, tmp_path, callbacks=[At(1, other.train)])
    with pytest.raises(RunTakenError, match="another trainer") as caught:
        trainer.train()
    assert caught.value.pid == os.getpid()
    other.train()


# --- the caller's side --------------------------------------------------------------------------------------------


def test_three_figures_of_each_save_are_logged_and_all_of_them_if_that_is_asked_for(whole, tmp_path):
    three = {"async_ckpt/stall_seconds", "async_ckpt/total_seconds", "async_ckpt/bandwidth"}
    trainer = make_async(trainer_of(Trainer, tmp_path / "three", max_steps=2))
    trainer.train()
    rows = [row for row in trainer.state.log_history if "async_ckpt/bandwidth" in row]
    assert [{*row} - {"step", "epoch"} for row in rows] == [three]

    trainer = make_async(trainer_of(Trainer, tmp_path), all_figures=True)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "async_ckpt/step" in row]
    assert [row["async_ckpt/step"] for row in rows] == [2, 4, 6, 8]
    for row in rows:
        assert row["async_ckpt/num_bytes"] >= (tmp_path / saved(2) / "model.safetensors").stat().st_size
        assert 0 < row["async_ckpt/stall_seconds"] <= row["async_ckpt/total_seconds"]
        assert row["async_ckpt/bandwidth"] > 0


def rows_of(trainer: Any) -> list[tuple[str, int]]:
    """What each row of a log is of, and its step."""
    marks = ("loss", "eval_loss", "async_ckpt/bandwidth", "train_runtime")
    return [(next(mark for mark in marks if mark in row), row["step"]) for row in trainer.state.log_history]


@pytest.mark.parametrize("ends", [2, 3])
def test_a_save_is_logged_at_its_step_whenever_it_ends_and_the_summary_is_last(tmp_path, gate, ends):
    """The save of step 2 ends at once, or behind step 3 and its rows."""
    options = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}
    trainer = trainer_of(Files, tmp_path, processor=Kept(gate.passed), **options)
    seen = []

    class Seeing(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == ends == 2:
                gate.open()
                trainer.wait_for_checkpoint()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == ends == 3:
                gate.open()
                trainer.wait_for_checkpoint()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
            if "async_ckpt/bandwidth" in logs:
                seen.append(state.global_step)

    trainer.add_callback(Seeing())
    trainer.train()
    saves = [("async_ckpt/bandwidth", step) for step in (2, 4)]
    evaluated = [[("loss", step), ("eval_loss", step), save] for step, save in zip((2, 4), saves, strict=True)]
    assert rows_of(trainer) == [("loss", 1), *evaluated[0], ("loss", 3), *evaluated[1], ("train_runtime", 4)]
    assert seen == [2, 4]
    written = json.loads((tmp_path / saved(4) / "trainer_state.json").read_text())["log_history"]
    assert [row["step"] for row in written if "async_ckpt/bandwidth" in row] == [2]
    assert [row["epoch"] for row in trainer.state.log_history if "async_ckpt/bandwidth" in row] == [2 / 32, 4 / 32]


def test_a_resumed_training_has_the_log_of_a_whole_one_but_for_the_save_that_it_resumed_from(whole, tmp_path):
    """That save was under way when its checkpoint, with the log in it, was written."""
    plain = trainer_of(Files, tmp_path)
    plain.train()
    again = trainer_of(Files, tmp_path)
    again.train(resume_from_checkpoint=str(tmp_path / saved(4)))
    assert rows_of(again) == [row for row in rows_of(plain) if row != ("async_ckpt/bandwidth", 4)]


def test_the_guard_holds_the_optimizer_until_all_is_copied(tmp_path):
    """Deferred copies of large tensors are of the instant of the save, though the optimizer steps behind it."""
    kept = {}

    def keep() -> None:
        kept.update({name: value.clone() for name, value in trainer.model.state_dict().items()})

    trainer = trainer_of(
        Files,
        tmp_path,
        model=lambda: tiny_model(n_embd=64, vocab_size=2 * MIB // 256),
        callbacks=[At(2, keep)],
        max_steps=3,
    )
    trainer.train()
    for name, value in load_file(tmp_path / saved(2) / "model.safetensors").items():
        assert torch.equal(value, kept[name])


class ScheduleFree(torch.optim.AdamW):
    """Changes its parameters outside of `step`, as schedule-free optimizers do."""

    def eval(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(1)

    def train(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(1)


def test_an_optimizer_that_changes_parameters_elsewhere_is_told_of_once_and_held_by_all_its_methods(tmp_path):
    kept = {}

    class Keeping(Files):
        def _save_checkpoint(self, *args: Any) -> None:
            kept[self.state.global_step] = {name: value.clone() for name, value in self.model.state_dict().items()}
            super()._save_checkpoint(*args)

    model = partial(tiny_model, n_embd=64, vocab_size=2 * MIB // 256)
    trainer = trainer_of(Keeping, tmp_path, model=model, eval_strategy="steps", eval_steps=1, max_steps=3)
    trainer.optimizer = ScheduleFree(trainer.model.parameters(), lr=1e-3)
    with pytest.warns(UserWarning, match="ScheduleFree cannot be guarded by a hook alone") as caught:
        trainer.train()
    assert len(caught) == 1
    for step, weights in kept.items():
        for name, value in load_file(tmp_path / saved(step) / "model.safetensors").items():
            assert torch.equal(value, weights[name])


class WithCard(Trainer):
    """A trainer of another package: it writes a file more, and the model in its own way."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.cards = getattr(self, "cards", 0) + 1
        super()._save_checkpoint(model, trial)

    def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
        super()._save(output_dir)  # the live weights, whatever was given
        Path(output_dir, "README.md").write_text("a card")


@pytest.mark.parametrize("layout", ["transformers", "archive"])
def test_a_trainer_of_any_class_is_made_asynchronous(tmp_path, whole, layout):
    trainer = trainer_of(WithCard, tmp_path)
    assert make_async(trainer, layout) is trainer
    trainer.train()
    assert trainer.cards == 4
    assert (tmp_path / saved(6) / "README.md").read_text() == "a card"
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / saved(6) / name).read_bytes() == (whole["Trainer"][1] / saved(6) / name).read_bytes()
    again = make_async(trainer_of(WithCard, tmp_path), layout)
    again.train(resume_from_checkpoint=str(tmp_path / saved(4)))
    assert losses(again) == whole["Trainer"][0]


def test_a_plain_trainer_is_made_asynchronous(tmp_path):
    trainer = make_async(trainer_of(Trainer, tmp_path, max_steps=2))
    trainer.train()
    assert isinstance(trainer, AsyncCheckpointing)
    assert folders(tmp_path) == [saved(2)]


def test_each_trainer_of_the_process_is_made_asynchronous_when_it_trains(tmp_path, monkeypatch, whole):
    """Also that of another program, whatever its class."""

    class Theirs(Trainer):
        def train(self, *args: Any, **kwargs: Any) -> Any:
            return super().train(*args, **kwargs)

    monkeypatch.setattr(Trainer, "train", Trainer.train)  # which is put back
    use("archive", all_figures=True)
    use("archive")
    for kind in (Trainer, Theirs, Files):
        lock, held = tmp_path / kind.__name__ / "_async_ckpt.lock", list[bool]()
        look = At(1, lambda lock=lock, held=held: held.append(lock.exists()))
        trainer = trainer_of(kind, lock.parent, callbacks=[look])
        trainer.train()
        assert isinstance(trainer, AsyncCheckpointing)
        assert held == [True]  # by our own `train`
        assert not trainer.all_figures
        assert losses(trainer) == whole["Trainer"][0]
        is_archive = "training.tar" in names_in(tmp_path / kind.__name__ / saved(STEPS))
        assert is_archive is (kind is not Files)  # whose layout is its own


def test_a_class_that_would_hide_the_save_of_another_one_is_refused():
    class Saving(Trainer):
        def _save_checkpoint(self, *args: Any) -> None:
            super()._save_checkpoint(*args)

    with pytest.raises(TypeError, match=r"would hide Saving\._save_checkpoint; put it behind: class Wrong\(Saving, "):
        type("Wrong", (AsyncCheckpointing, Saving), {})


def test_xla_is_refused_at_the_start(tmp_path):
    trainer = trainer_of(Trainer, tmp_path, max_steps=2)
    trainer.is_fsdp_xla_enabled = True
    with pytest.raises(
        NotImplementedError, match="AsyncCheckpointing does not support XLA; use the plain Trainer there"
    ):
        make_async(trainer)


def test_a_callback_of_the_trainer_makes_it_asynchronous(tmp_path):
    class MakesAsync(TrainerCallback):
        trainer: Any

        def on_init_end(self, *_: Any, **__: Any) -> None:
            make_async(self.trainer)

    class Knows(Trainer):
        """Gives itself to its callbacks before they are called, as that of ms-swift does."""

        def __init__(self, *args: Any, callbacks: Any, **given: Any) -> None:
            callbacks[0].trainer = self
            super().__init__(*args, callbacks=callbacks, **given)

    trainer = trainer_of(Knows, tmp_path, max_steps=2, callbacks=[MakesAsync()])
    trainer.train()
    assert isinstance(trainer, AsyncCheckpointing)


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"per_device_train_batch_size": 4}, "number of batches 32 in the checkpoint and 16 here, batch size 2"),
        ({"dataloader_num_workers": 1}, "number of workers 0 in the checkpoint and 1 here"),
        ({"data_seed": 9}, "seed 1 in the checkpoint and 9 here"),
        ({"dataloader_pin_memory": False}, None),
        ({"dataloader_num_workers": 1, "ignore_data_skip": True}, None),
    ],
)
def test_data_in_another_order_is_told_when_a_training_is_resumed(tmp_path, caplog, whole, kind, given, facts):
    trainer = trainer_of(kind, tmp_path, max_steps=4, **given)
    trainer.train(resume_from_checkpoint=str(whole[kind.__name__][1] / saved(2)))
    warnings = [record.getMessage() for record in caplog.records if "in another order" in record.getMessage()]
    assert len(warnings) == (facts is not None)
    assert facts is None or f"data loader 0 yields its data in another order than at the save: {facts}" in warnings[0]


def tuner_of_trl(folder: Path, **given: Any) -> Any:
    """trl's trainer, with a tokenizer of single letters."""
    trl = pytest.importorskip("trl", reason="trl is not installed")
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, set_seed

    rows = [[3, 4, 5], [5, 4, 3], [10, 9, 8], [8, 7, 6, 5, 4]]
    letters = {letter: number for number, letter in enumerate(["<pad>", "<s>", "</s>", *"abcdefgh"])}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    set_seed(1)
    options = {"max_steps": 4, "save_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 2, **given}
    return trl.SFTTrainer(
        model=tiny_model(),
        args=trl.SFTConfig(
            str(folder),
            dataset_kwargs={"skip_prepare_dataset": True},
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            seed=1,
            **options,
        ),
        train_dataset=Dataset(InMemoryTable.from_pydict({"input_ids": rows * 8}), fingerprint="rows"),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
        ),
    )


@pytest.mark.filterwarnings("default", "ignore:.gradient_checkpointing. is deprecated:FutureWarning")  # trl asks for it
@pytest.mark.parametrize("layout", ["transformers", "archive"])
def test_a_trainer_of_trl_writes_the_same_files_and_is_resumed_with_the_same_losses(tmp_path, layout):
    plain = tuner_of_trl(tmp_path / "plain")
    plain.train()
    ours = make_async(tuner_of_trl(tmp_path / "ours"), layout)
    ours.train()
    assert losses(ours) == losses(plain)
    files = [names_in(tmp_path / run / saved(2)) for run in ("plain", "ours")]
    if layout == "archive":
        files[0] = files[0] - {"optimizer.pt", "scheduler.pt", "rng_state.pth"} | {"training.tar"}
    assert files[0] == files[1]
    again = make_async(tuner_of_trl(tmp_path / "again"), layout)
    again.train(resume_from_checkpoint=str(tmp_path / "ours" / saved(2)))
    assert losses(again) == losses(plain)


def test_a_base_that_would_be_hidden_is_refused():
    with pytest.raises(TypeError, match=r"class Wrong\(WithCard, AsyncCheckpointing\)"):
        type("Wrong", (AsyncCheckpointing, WithCard), {})


def test_an_unknown_layout_is_refused(tmp_path):
    with pytest.raises(ValueError, match="layout must be"):
        make_async(trainer_of(Trainer, tmp_path), "tar")


def test_a_method_that_has_gone_is_told_of_when_the_trainer_is_made(tmp_path, monkeypatch):
    trainer = trainer_of(Trainer, tmp_path)
    monkeypatch.delattr(Trainer, "_save_scaler")
    with pytest.raises(RuntimeError, match=r"transformers [\d.]+ has no Trainer._save_scaler"):
        make_async(trainer)


@pytest.mark.parametrize(
    ("module", "call"),
    [
        ("transformers", "make_async(None)"),
        ("transformers", "AsyncCheckpointing()"),
        ("accelerate", "AsyncState(None)"),
        ("verl", "VerlCheckpointManager(None)"),
    ],
)
def test_without_the_framework_the_module_is_imported_and_says_what_is_missing(nursery, module, call):
    ended = nursery.run(
        f"""
        import sys
        sys.modules[{module!r}] = None
        from async_ckpt.integrations.{module} import *
        from async_ckpt.integrations import {module} as plugin
        try:
            plugin.{call}
        except ImportError as error:
            print(error)
        """
    )
    assert f"this needs {module}, which is not installed: pip install" in ended.out, ended.err


class OfTrials(Files):
    """A trainer whose trainings have folders of their own, as those of a hyperparameter search have."""

    def _get_output_dir(self, trial: Any) -> str:
        return str(Path(self.args.output_dir, "run-3"))


def test_the_trials_of_a_search_have_checkpoints_of_their_own(tmp_path):
    trainer_of(OfTrials, tmp_path, save_total_limit=2).train()
    assert folders(tmp_path) == []
    assert folders(tmp_path / "run-3") == [saved(6), saved(8)]


def test_a_search_by_optuna_has_a_folder_of_each_trial(tmp_path):
    pytest.importorskip("optuna", reason="optuna is not installed")
    trainer = trainer_of(Files, tmp_path, max_steps=4, save_total_limit=1)
    trainer.model_init = lambda: tiny_model()
    trainer.hyperparameter_search(
        backend="optuna",
        n_trials=2,
        hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-5, 1e-3)},
        compute_objective=lambda metrics: metrics.get("eval_loss", 0.0),
    )
    assert [folders(tmp_path / f"run-{number}") for number in range(2)] == [[saved(4)]] * 2


def scaler(scale: float) -> torch.amp.GradScaler:
    made = torch.amp.GradScaler("cpu", init_scale=scale)
    made._lazy_init_scale_growth_tracker(torch.device("cpu"))
    return made


@pytest.mark.parametrize("kind", OURS)
def test_the_scaler_of_fp16_is_not_lost_by_a_training_without_one(tmp_path, kind):
    trainer = trainer_of(kind, tmp_path, max_steps=2)
    trainer.accelerator.scaler = scaler(1024.0)
    trainer.train()
    again = trainer_of(kind, tmp_path, max_steps=4)
    before = [weight.detach().clone() for weight in again.model.parameters()]
    with pytest.raises(StateMismatchError, match=saved(2) + ".* has the state of a GradScaler"):
        again.train(resume_from_checkpoint=True)
    assert all(map(torch.equal, again.model.parameters(), before))


@pytest.mark.parametrize("kind", OURS)
def test_a_scaler_that_was_not_saved_begins_anew(tmp_path, kind):
    """As with the plain Trainer."""
    trainer_of(kind, tmp_path, max_steps=2).train()
    again = trainer_of(kind, tmp_path, max_steps=4)
    again.accelerator.scaler = scaler(1024.0)
    again._load_scaler(str(tmp_path / saved(2)))
    assert again.accelerator.scaler.get_scale() == 1024.0


@pytest.mark.parametrize("kind", OURS)
def test_the_scaler_of_fp16_is_saved_and_loaded(tmp_path, kind):
    trainer = trainer_of(kind, tmp_path, max_steps=2)
    trainer.accelerator.scaler = scaler(1024.0)
    trainer.train()
    again = trainer_of(kind, tmp_path / "again")
    again.accelerator.scaler = scaler(2.0)
    again._load_scaler(str(tmp_path / saved(2)))
    assert again.accelerator.scaler.state_dict() == trainer.accelerator.scaler.state_dict()
    assert again.accelerator.scaler.get_scale() == 1024.0


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The hub that this process knows."""
    import huggingface_hub
    from transformers.utils import hub as utilities

    with local_hub() as started:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", started.endpoint)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(utilities, "_hf_api", None, raising=False)  # has been made for another endpoint
        yield started


def wait_for_push(trainer: Any) -> None:
    if trainer.push_in_progress is not None:
        trainer.push_in_progress.wait_until_done()


@pytest.mark.parametrize("strategy", ["end", "every_save", "checkpoint", "all_checkpoints"])
def test_what_is_pushed_to_the_hub_is_what_the_plain_trainer_pushes(tmp_path, hub, strategy):
    pushed = []
    for kind in (Trainer, Files):
        hub.commits.clear()
        options = {"push_to_hub": True, "hub_model_id": "nobody/nothing", "hub_token": "hf_none"}
        trainer = trainer_of(
            kind,
            tmp_path / kind.__name__,
            max_steps=4,
            hub_strategy=strategy,
            hub_always_push=True,
            **options,
        )
        if kind is Trainer:  # it would write to files that are still being pushed, and lose the push
            trainer.add_callback(At(3, partial(wait_for_push, trainer)))
        trainer.train()
        trainer.push_to_hub()
        until(lambda: len(hub.commits) == {"end": 1, "every_save": 3}.get(strategy, 5))
        pushed.append(sorted((message, sorted(files)) for message, files in hub.commits))
    assert pushed[1] == pushed[0]
    weights = [files["model.safetensors"] for message, files in hub.commits if message.endswith("step 2")]
    assert weights in ([], [(tmp_path / "Files" / saved(2) / "model.safetensors").read_bytes()])


def test_sigterm_saves_a_whole_checkpoint_and_ends_the_training(tmp_path, whole):
    def end() -> None:
        jit = next(one for one in trainer.callback_handler.callbacks if hasattr(one, "jit_manager"))
        jit.jit_manager._enable_checkpoint()  # its timer would do so seconds after the signal

    trainer = trainer_of(Files, tmp_path, callbacks=[At(3, end)], enable_jit_checkpoint=True, save_steps=100)
    trainer.train()
    assert trainer.state.global_step < STEPS
    assert folders(tmp_path) == [saved(3)]
    again = trainer_of(Files, tmp_path)
    again.train(resume_from_checkpoint=True)
    assert losses(again).items() <= whole["Trainer"][0].items()
    assert STEPS in losses(again)


# --- the ways people train ----------------------------------------------------------------------------------------


def adapted() -> Any:
    pytest.importorskip("peft")
    return with_adapter(tiny_model())


_WAYS = {
    "accumulation": {"gradient_accumulation_steps": 2},
    "workers": {"dataloader_num_workers": 1},
    "compiled": {"torch_compile": True, "torch_compile_backend": "eager"},
    "adapter": {"model": adapted},
    "bf16": {"bf16": True},
    "schedule-free": {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant"},
    "8-bit": {"optim": "adamw_8bit"},
    "step in backward": {"optim": "lomo"},
}


_OPTIMIZERS = {"schedule_free_adamw": "schedulefree", "adamw_8bit": "bitsandbytes", "lomo": "lomo_optim"}


# Dynamo looks at the gradients of all tensors, and silences the warning of that by a function that is not this filter.
@pytest.mark.filterwarnings("ignore:.* cannot be guarded by a hook alone:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("way", "kind"), [(way, kind) for way in _WAYS for kind in OURS if (way, kind) != ("compiled", Archives)]
)
def test_a_training_of_this_kind_is_resumed_with_the_same_losses(tmp_path, way, kind):
    options = _WAYS[way]
    if (package := _OPTIMIZERS.get(options.get("optim"))) is not None:
        pytest.importorskip(package, reason=f"{package} is not installed")
    plain = trainer_of(Trainer, tmp_path / "plain", **options, save_strategy="no", max_steps=4)
    plain.train()
    trainer_of(kind, tmp_path / "ours", **options, max_steps=4).train()
    resumed = trainer_of(kind, tmp_path / "resumed", **options, max_steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / saved(2)))
    assert losses(resumed) == losses(plain)


def test_of_an_adapted_model_the_adapter_alone_is_copied_and_written(tmp_path):
    for kind in (Trainer, Files):
        trainer_of(kind, tmp_path / kind.__name__, model=adapted, max_steps=2).train()
    ours, plain = (tmp_path / kind.__name__ / saved(2) for kind in (Files, Trainer))
    assert names_in(ours) == names_in(plain)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (ours / name).read_bytes() == (plain / name).read_bytes()


def test_a_folder_that_a_subclass_makes_before_its_save_is_not_there_until_it_is_whole(tmp_path, monkeypatch):
    """As that of axolotl does: after a kill, an empty folder would be taken for the newest checkpoint."""

    class Early(Trainer):
        def _save_checkpoint(self, *given: Any) -> None:
            Path(self.args.output_dir, saved(self.state.global_step)).mkdir()
            super()._save_checkpoint(*given)

    found, begin = list[bool](), AsyncCheckpointing._begin
    monkeypatch.setattr(
        AsyncCheckpointing, "_begin", lambda *given: (found.append((tmp_path / saved(2)).exists()), begin(*given))[1]
    )
    make_async(trainer_of(Early, tmp_path, max_steps=2)).train()
    assert found == [False]
    assert folders(tmp_path) == [saved(2)]


# --- files that have changed since they were saved ------------------------------------------------------------------


@pytest.fixture
def damaged(whole, tmp_path) -> Path:
    """The folder of a training whose newest checkpoint has a flipped bit in its optimizer."""
    shutil.copytree(whole["Files"][1], tmp_path / "damaged")
    path = tmp_path / "damaged" / saved(STEPS) / "optimizer.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return tmp_path / "damaged"


def test_a_resume_from_a_damaged_checkpoint_is_refused_before_anything_is_loaded(damaged):
    trainer = trainer_of(Files, damaged)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    with pytest.raises(CorruptCheckpointError) as error:
        trainer.train(resume_from_checkpoint=str(damaged / saved(STEPS)))
    assert error.value.path == str(damaged / saved(STEPS) / "optimizer.pt")
    assert f"the newest sound checkpoint is {damaged / saved(STEPS - 2)};" in str(error.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.model.state_dict().items())


def test_a_resume_from_the_newest_checkpoint_skips_a_damaged_one_with_a_warning(damaged, whole):
    trainer = trainer_of(Files, damaged)
    with pytest.warns(RuntimeWarning, match=f"{saved(STEPS)} is skipped: .*optimizer.pt"):
        trainer.train(resume_from_checkpoint=True)
    assert losses(trainer) == whole["Files"][0]
    assert os.path.basename(trainer._saves.run.newest_first()[0]) == saved(STEPS)


def test_a_missing_file_is_damage_too(damaged):
    (damaged / saved(STEPS) / "optimizer.pt").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"optimizer\.pt: it is missing"):
        trainer_of(Files, damaged).train(resume_from_checkpoint=str(damaged / saved(STEPS)))


def test_a_resume_where_no_checkpoint_is_sound_is_refused(damaged):
    for folder in damaged.glob("checkpoint-*"):
        (folder / "optimizer.pt").write_bytes(b"another")
    with pytest.warns(RuntimeWarning, match="is skipped"), pytest.raises(CorruptCheckpointError, match=saved(STEPS)):
        trainer_of(Files, damaged).train(resume_from_checkpoint=True)


def test_a_folder_whose_digests_were_deleted_is_resumed_from(damaged, whole):
    """As the error advises to whoever has changed a file on purpose."""
    (damaged / saved(4) / "config.json").write_text((damaged / saved(4) / "config.json").read_text() + " ")
    with pytest.raises(CorruptCheckpointError, match=r"delete _async_ckpt\.digests"):
        trainer_of(Files, damaged).train(resume_from_checkpoint=str(damaged / saved(4)))
    (damaged / saved(4) / "_async_ckpt.digests.json").unlink()
    trainer = trainer_of(Files, damaged)
    trainer.train(resume_from_checkpoint=str(damaged / saved(4)))
    assert losses(trainer) == whole["Files"][0]


def test_verify_names_the_newest_sound_checkpoint(damaged):
    found = run_command("verify", damaged)
    assert found.returncode == 1
    assert f"the newest sound step is {STEPS - 2}" in found.stdout


@needs_mount
def test_a_disk_that_fills_while_the_framework_writes_is_told_as_a_full_disk(tmp_path):
    """The Trainer's own torch.save tells of it as a RuntimeError about an iostream."""
    with mounted(tmp_path / "disk", "size=4m") as disk:

        class Filling:
            def save_pretrained(self, folder: str) -> None:
                """Leave no room for what the Trainer writes next."""
                free_bytes = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
                (disk / "other").write_bytes(bytes(free_bytes))

        with pytest.raises(StorageFullError) as error:
            trainer_of(Files, disk, processor=Filling()).train()
        assert isinstance(error.value.__cause__, RuntimeError)
        rows = [json.loads(row) for row in (disk / "history.jsonl").read_text().splitlines()]
        assert [row["error"] for row in rows if row["kind"] == "failed"] == ["StorageFullError"]


def test_another_error_of_the_framework_stays_as_it_is(tmp_path):
    def fail() -> None:
        raise RuntimeError("of the processor")

    with pytest.raises(RuntimeError, match="of the processor"):
        trainer_of(Files, tmp_path, processor=Kept(fail)).train()
