"""Lightning's Trainer with our plugin: the files are its own, whole and durable, and links and removals keep their order."""

import contextlib
import copy
import gc
import inspect
import os
import pickle
import shutil
import sys
import threading
import warnings
from collections.abc import Sequence
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import mounted, needs_mount
from lightning_runs import (
    NAMES,
    batches,
    contents,
    files_in,
    kit_of,
    loaded,
    names_in,
    quiet,
    run_of,
    trainer_of,
    version_of,
)
from racing import Call, Gate, until
from states import difference

from async_ckpt import CheckpointError, StorageFullError, files
from async_ckpt.core.saving.ledger import all_saves
from async_ckpt.core.storage.local import LocalSink
from async_ckpt.integrations.common.framework_checks import require
from async_ckpt.integrations.lightning import AsyncTarCheckpointIO

if not NAMES:
    pytest.skip("Lightning is not installed", allow_module_level=True)
# Both names are one code: the tests run with each that is installed.
MIB = 2**20


@pytest.fixture(scope="module", params=NAMES)
def kit(request: pytest.FixtureRequest) -> Any:
    return kit_of(request.param)


@pytest.fixture
def checkpoints(kit: Any) -> AsyncTarCheckpointIO:
    return AsyncTarCheckpointIO()


@pytest.fixture
def held_writes(monkeypatch: pytest.MonkeyPatch, gate: Gate) -> Gate:
    """Nothing is written to the disk before the gate is open."""
    finish = LocalSink.finish

    def held(self: LocalSink, *args: Any) -> Any:
        gate.passed()
        return finish(self, *args)

    monkeypatch.setattr(LocalSink, "finish", held)
    return gate


@pytest.fixture
def broken_writes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Parts of the names of files that cannot be written."""
    names: list[str] = []
    finish = LocalSink.finish

    def failing(self: LocalSink, *args: Any) -> Any:
        if any(name in str(self._target) for name in names):
            raise StorageFullError(f"{self._target}: no space left")
        return finish(self, *args)

    monkeypatch.setattr(LocalSink, "finish", failing)
    return names


# --- the main path ------------------------------------------------------------------------------------------------

CONFIGS: dict[str, dict[str, Any]] = {
    "every step, all kept": {"save_top_k": -1, "every_n_train_steps": 1},
    "the newest": {"save_top_k": 1, "every_n_train_steps": 2},
    "the best two and the last": {"monitor": "loss", "save_top_k": 2, "every_n_train_steps": 2, "save_last": True},
    "the best two and a link": {"monitor": "loss", "save_top_k": 2, "every_n_train_steps": 2, "save_last": "link"},
    "the worst one and a link": {"monitor": "loss", "mode": "max", "every_n_train_steps": 1, "save_last": "link"},
    "at any time": {"train_time_interval": timedelta(microseconds=1), "save_top_k": -1},
    "by validation": {"monitor": "val_loss", "save_top_k": 2, "save_last": True},
    "weights alone": {"save_weights_only": True, "every_n_train_steps": 3, "save_top_k": -1},
    "one name, by version": {"filename": "model", "every_n_train_steps": 2, "save_top_k": -1},
    "one name, replaced": {"filename": "model", "every_n_train_steps": 2, "save_top_k": -1, "enable_version_counter": False},
}  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS)
def test_the_files_are_those_that_lightning_writes_itself(kit, checkpoints, tmp_path, config):
    """By name and by content, so that `torch.load` and Lightning without the plugin read them."""
    left = {}
    for name, plugin in (("plain", None), ("ours", checkpoints)):
        saved = kit.ModelCheckpoint(tmp_path / "run", **CONFIGS[config])
        model = kit.Model()
        with quiet():
            trainer = trainer_of(kit, tmp_path, plugin, saved, max_epochs=3, max_steps=-1)
            trainer.fit(model, batches(), batches())
        left[name] = contents(tmp_path / "run")
        links = {path.name: os.readlink(path) for path in (tmp_path / "run").iterdir() if path.is_symlink()}
        left[name]["links"] = links
        left[name]["best"] = saved.best_model_path, saved.last_model_path
        shutil.rmtree(tmp_path / "run")

    assert [*left["ours"]] == [*left["plain"]]
    assert len(left["ours"]) > 2
    for name in left["ours"] if CONFIGS[config].get("save_last") is True else ():
        if name not in ("links", "best", "last.ckpt"):  # the same file as the last one, which knows its own name
            states = [next(iter(one[name]["callbacks"].values())) for one in (left["plain"], left["ours"])]
            states[0]["last_model_path"] = states[1]["last_model_path"]
            assert states[1]["last_model_path"] == str(tmp_path / "run" / "last.ckpt")
    assert difference(left["ours"], left["plain"]) is None


def trained_on(kit: Any, checkpoints: Any, folder: Path, data: Any, other_data: Any) -> None:
    """Two steps on one loader, and from their checkpoint two more on another."""
    for end, loaders, before in ((2, data, None), (4, other_data, "epoch=0-step=2.ckpt")):
        saved = kit.ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)
        with quiet():
            trainer = trainer_of(kit, folder, checkpoints, saved, max_steps=end)
            trainer.fit(kit.Model(), loaders, ckpt_path=before and folder / before)


def assert_told_of_order(caplog: pytest.LogCaptureFixture, told: Sequence[str]) -> None:
    warned = [record.getMessage() for record in caplog.records if "in another order" in record.getMessage()]
    assert len(warned) == len(told)
    assert all(part in message for part, message in zip(told, warned, strict=True))


@pytest.mark.parametrize(
    ("batch", "workers", "as_list", "told"),
    [
        (2, 0, False, ()),
        (2, 1, False, ("data loader 0 yields its data in another order than at the save: number of workers 0 in the checkpoint and 1 here",)),
        (1, 0, True, ("data loader 0", "data loader 1")),
    ],
)  # fmt: skip
def test_data_in_another_order_is_told_when_a_training_is_resumed(
    kit, checkpoints, tmp_path, caplog, batch, workers, as_list, told
):
    def loaders(batch: int, workers: int) -> Any:
        made = [torch.utils.data.DataLoader(torch.ones(8, 4), batch, num_workers=workers) for _ in range(1 + as_list)]
        return made if as_list else made[0]

    trained_on(kit, checkpoints, tmp_path, loaders(2, 0), loaders(batch, workers))
    assert_told_of_order(caplog, told)


@pytest.mark.parametrize(
    ("seed", "told"), [(1, ()), (2, ("data loader 0 yields its data in another order than at the save: seed 1 in",))]
)
def test_another_seed_of_a_sampler_is_told_when_a_training_is_resumed(kit, checkpoints, tmp_path, caplog, seed, told):
    def loader(seed: int) -> Any:
        return torch.utils.data.DataLoader(
            torch.ones(8, 4), 2, shuffle=True, generator=torch.Generator().manual_seed(seed)
        )

    trained_on(kit, checkpoints, tmp_path, loader(1), loader(seed))
    assert_told_of_order(caplog, told)


def test_a_training_goes_on_from_ours_and_from_lightnings_own_with_the_same_losses(kit, checkpoints, tmp_path):
    saved = {"save_last": "link"}
    whole = run_of(kit, tmp_path / "whole", None).losses
    if version_of(kit) < (2, 5):  # its own resumed trainings differ, since it steps the scheduler once less
        run_of(kit, tmp_path / "plain", None, max_steps=6)
        whole |= run_of(kit, tmp_path / "plain", None, ckpt_path=tmp_path / "plain" / "epoch=1-step=6.ckpt").losses
    for name, first, second in (
        ("ours", checkpoints, checkpoints),
        ("back", checkpoints, None),
        ("there", None, checkpoints),
    ):
        folder = tmp_path / name
        begun = run_of(kit, folder, first, max_steps=6, saved=saved).losses
        for ckpt_path in ("last", folder / "epoch=1-step=6.ckpt"):
            resumed = run_of(kit, folder, second, ckpt_path=ckpt_path, saved=saved).losses
            assert [*resumed] == [6, 7, 8, 9, 10, 11]
            assert begun | resumed == whole


def test_the_best_checkpoint_is_found_after_the_training(kit, checkpoints, tmp_path):
    saved = kit.ModelCheckpoint(tmp_path, monitor="loss", every_n_train_steps=1)
    model = kit.Model()
    with quiet():
        trainer = trainer_of(kit, tmp_path, checkpoints, saved)
        trainer.fit(model, batches())
        trainer.validate(kit.Model(), batches(), ckpt_path="best", verbose=False)
        again = kit.Model.load_from_checkpoint(saved.best_model_path)
    assert difference(again.state_dict(), loaded(saved.best_model_path)["state_dict"]) is None
    assert again.hparams.width == 4


def test_a_save_after_the_training_is_durable_when_it_returns(kit, checkpoints, tmp_path, held_writes):
    held_writes.open()
    with quiet():
        trainer = trainer_of(kit, tmp_path, checkpoints, enable_checkpointing=False)
        trainer.fit(kit.Model(), batches())
        trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert loaded(tmp_path / "x.ckpt")["global_step"] == 12


def test_every_file_has_the_state_of_its_own_step_though_the_copies_overlap_the_training(kit, checkpoints, tmp_path):
    """The tensors are larger than 1 MiB, so their copies are left to the guard."""
    width = MIB // 8
    run_of(kit, tmp_path / "plain", None, saved={"every_n_train_steps": 1}, width=width, max_steps=5)
    run_of(kit, tmp_path / "ours", checkpoints, saved={"every_n_train_steps": 1}, width=width, max_steps=5)
    plain, ours = contents(tmp_path / "plain"), contents(tmp_path / "ours")
    assert [*ours] == [*plain]
    for name, checkpoint in ours.items():
        for part in ("state_dict", "optimizer_states", "lr_schedulers", "loops"):
            assert difference(checkpoint[part], plain[name][part]) is None


def test_the_state_may_change_while_it_is_written(kit, checkpoints, tmp_path, held_writes):
    state = {"state_dict": {"w": torch.ones(4)}, "global_step": 3, "loops": {"a": [1]}}
    checkpoints.save_checkpoint(state, tmp_path / "x.ckpt")
    state["state_dict"]["w"].zero_()
    state["loops"]["a"].append(2)
    held_writes.wait_reached()
    assert files_in(tmp_path) == []
    held_writes.open()
    checkpoints.wait()
    assert (
        difference(
            loaded(tmp_path / "x.ckpt"), {"state_dict": {"w": torch.ones(4)}, "global_step": 3, "loops": {"a": [1]}}
        )
        is None
    )


def test_views_and_tied_tensors_are_stored_once(checkpoints, tmp_path):
    base = torch.arange(1000.0)
    checkpoints.save_checkpoint({"a": base, "b": base, "c": base[10:20]}, tmp_path / "x.ckpt")
    checkpoints.wait()
    found = loaded(tmp_path / "x.ckpt")
    assert found["a"].data_ptr() == found["b"].data_ptr() == found["c"].data_ptr() - 40
    assert (tmp_path / "x.ckpt").stat().st_size < 6000


def test_the_checkpoint_for_a_job_that_is_requeued_is_durable_when_the_call_returns(kit, checkpoints, tmp_path):
    """Lightning has SLURM kill the job next."""
    model, seen, path = kit.Model(), [], tmp_path / "hpc_ckpt_1.ckpt"
    with quiet():
        trainer = trainer_of(kit, tmp_path, checkpoints, enable_checkpointing=False)
        model.at_step = {3: lambda: (trainer.save_checkpoint(path), seen.append(loaded(path)["global_step"]))}
        trainer.fit(model, batches())
    assert seen == [3]


def test_the_plugin_and_its_callback_can_be_pickled_for_processes_that_lightning_spawns(kit, checkpoints, tmp_path):
    plugin, callback = pickle.loads(pickle.dumps((checkpoints, checkpoints.callback())))
    with quiet():
        trainer = kit.Trainer(plugins=[plugin], callbacks=[callback], max_steps=2, logger=False, accelerator="cpu")
        assert trainer.strategy.checkpoint_io is plugin
    assert isinstance(callback, kit.pytorch.Callback)


def test_a_trainer_that_has_saved_is_copied_and_trains_on(kit, checkpoints, tmp_path):
    """In the middle of the training, and after it."""
    saved = kit.ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=1, save_last=True, filename="ck-{step}")
    model, copies = kit.Model(), []
    with quiet():
        trainer = trainer_of(kit, tmp_path, checkpoints, saved, max_steps=4)
        model.at_step = {3: lambda: copies.append(copy.deepcopy([*trainer.callbacks, checkpoints]))}
        trainer.fit(model, batches())
        model.at_step = {}
        saved.log = saved.log_dict = None  # methods of a class that has no name to find it by
        copies.append(pickle.loads(pickle.dumps([*trainer.callbacks, checkpoints])))
        for *callbacks, plugin in copies:
            (last,) = (one for one in callbacks if isinstance(one, kit.ModelCheckpoint))
            hooks = next(one for one in callbacks if type(one).__name__ == "AsyncTarCallback")
            assert hooks._plugin is plugin is not checkpoints
            again = kit.Trainer(
                accelerator="cpu", logger=False, max_steps=8, enable_progress_bar=False, enable_model_summary=False,
                callbacks=[hooks, last], plugins=[plugin],
            )  # fmt: skip
            again.fit(kit.Model(), batches(), ckpt_path=tmp_path / "last.ckpt")
            assert files_in(tmp_path) == ["ck-step=8.ckpt", "last.ckpt"]
    assert copy.deepcopy(trainer).checkpoint_callback is not saved


def test_no_thread_and_no_file_of_ours_is_left_behind_a_training(kit, tmp_path):
    def threads() -> int:
        return sum(thread.name.startswith("async_ckpt") for thread in threading.enumerate())

    seen = []
    for number in range(4):
        run_of(kit, tmp_path / str(number), AsyncTarCheckpointIO(), saved={"save_last": True})
        assert [path.name for path in (tmp_path / str(number)).iterdir() if path.name.startswith(".")] == []
        seen.append(threads())
    until(lambda: threads() <= seen[0])


@pytest.mark.skipif(find_spec("s3fs") is None, reason="Lightning reads s3:// by s3fs")
def test_a_dirpath_may_be_a_url(kit, checkpoints, s3, bucket, monkeypatch):
    for name in ("region", "access_key_id", "secret_access_key"):
        monkeypatch.setenv(f"AWS_{name.upper()}", s3.options[name])
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    whole = run_of(kit, f"s3://{bucket}/whole", checkpoints, default_root_dir=".").losses
    folder, saved = f"s3://{bucket}/run", {"save_top_k": 1, "save_last": True}
    begun = run_of(kit, folder, checkpoints, saved=saved, max_steps=6, default_root_dir=".").losses
    names = {name.rpartition("/")[2] for name in files.list_dir(folder)}
    assert names == {"epoch=1-step=6.ckpt", "last.ckpt", "history.jsonl"}
    saved["save_top_k"] = -1  # a deletion would make Lightning's client list the folder anew
    last = f"{folder}/last.ckpt"
    resumed = run_of(kit, folder, checkpoints, saved=saved, ckpt_path=last, default_root_dir=".").losses
    assert min(resumed) == 6
    assert begun | resumed == whole
    # Lightning has listed the folder before these saves were there; its client keeps listings.
    newest = kit.Model.load_from_checkpoint(f"{folder}/epoch=2-step=12.ckpt")
    assert difference(newest.state_dict(), kit.Model.load_from_checkpoint(last).state_dict()) is None


# --- what the callback brings -------------------------------------------------------------------------------------


def test_the_figures_of_every_save_go_to_the_logger(kit, checkpoints, tmp_path):
    rows_seen: list[tuple[Any, dict[str, float]]] = []

    class Logger(kit.CSVLogger):
        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            rows_seen.append((step, dict(metrics)))

    logger = Logger(tmp_path)
    run_of(kit, tmp_path / "run", checkpoints, logger=logger)
    rows = {step: row for step, row in rows_seen if "async_ckpt/stall_seconds" in row}
    assert [*rows] == [2, 4, 6, 8, 10, 12]
    for step, row in rows.items():
        assert row["async_ckpt/step"] == step
        assert row["async_ckpt/committed"] == 1
        assert row["async_ckpt/num_bytes"] == next((tmp_path / "run").glob(f"*step={step}.ckpt")).stat().st_size
        assert row["async_ckpt/bandwidth"] > 0
        assert row["async_ckpt/stall_seconds"] > 0
        assert row["async_ckpt/total_seconds"] > 0


def test_a_logger_is_told_of_a_checkpoint_when_the_file_is_there(kit, checkpoints, tmp_path, held_writes):
    """Some upload it then, and leave out files that are not there."""
    told: list[tuple[list[str], bool]] = []

    class Uploader(kit.CSVLogger):
        def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
            is_main = threading.current_thread() is threading.main_thread()
            told.append((files_in(checkpoint_callback.dirpath), is_main))

    model, seen = kit.Model(), []
    model.at_step = {2: lambda: (seen.append(len(told)), held_writes.open())}
    saved = kit.ModelCheckpoint(tmp_path / "run", every_n_train_steps=1, filename="{step}", save_top_k=-1)
    logger = Uploader(tmp_path)
    with quiet():
        trainer_of(kit, tmp_path, checkpoints, saved, logger=logger, max_steps=5).fit(model, batches())
    assert seen == [0]
    assert len(told) == 5
    for step, (files_then, is_main) in enumerate(told, 1):
        assert f"step={step}.ckpt" in files_then
        assert is_main
    assert "after_save_checkpoint" not in vars(logger)


def test_a_callback_that_opens_the_best_file_waits_for_it(kit, checkpoints, tmp_path, held_writes):
    """Its path is known as soon as the save has begun, and the file is not there yet."""
    saved = kit.ModelCheckpoint(tmp_path, monitor="loss", every_n_train_steps=2)
    seen: list[Any] = []

    class Opening(kit.pytorch.callbacks.Checkpoint):  # called behind the ModelCheckpoint
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                seen.append(os.path.exists(saved.best_model_path))
                held_writes.open()
                checkpoints.wait()
                seen.append(loaded(saved.best_model_path)["global_step"])

    with quiet():
        trainer_of(kit, tmp_path, checkpoints, saved, Opening(), max_steps=2).fit(kit.Model(), batches())
    assert seen == [False, 2]


def test_the_optimizers_are_guarded_while_the_training_runs_and_no_longer(kit, checkpoints, tmp_path):
    model, seen = kit.Model(), []
    with quiet():
        trainer = trainer_of(kit, tmp_path, checkpoints, enable_checkpointing=False)
        model.at_step = {3: lambda: seen.append((checkpoints.guard, trainer.optimizers))}
        trainer.fit(model, batches())
    (guard, optimizers), *_ = seen
    assert [*guard] == optimizers
    assert checkpoints.guard == ()


class ScheduleFree(torch.optim.SGD):
    """Changes the weights in `train` and `eval`, as schedule-free optimizers do."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


def in_backward(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Steps each parameter as soon as it has its gradient."""
    kept = [*parameters]
    for parameter in kept:
        one = torch.optim.SGD([parameter], lr=lr)
        parameter.register_post_accumulate_grad_hook(lambda _, one=one: one.step())
    return torch.optim.SGD(kept, lr=0.0)


@pytest.mark.parametrize("made_by", [ScheduleFree, in_backward], ids=["schedule-free", "fused in backward"])
def test_an_optimizer_that_cannot_be_guarded_is_told_of_once_and_its_files_are_right(
    kit, checkpoints, tmp_path, made_by
):
    for name, plugin in (("plain", None), ("ours", checkpoints)):
        for number in range(2):
            model = kit.Model(MIB // 8, made_by)
            saved = kit.ModelCheckpoint(
                tmp_path / name, every_n_train_steps=1, save_top_k=-1, enable_version_counter=False
            )
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                trainer_of(kit, tmp_path, plugin, saved, max_steps=3).fit(model, batches())
            if plugin is not None:
                assert checkpoints.guard == ()
                count = sum("cannot be guarded" in str(one.message) for one in told)
                assert count == (number == 0)
    plain, ours = contents(tmp_path / "plain"), contents(tmp_path / "ours")
    for name, checkpoint in ours.items():
        assert difference(checkpoint["state_dict"], plain[name]["state_dict"]) is None


def test_the_changes_to_lightning_are_undone_at_the_end(kit, checkpoints, tmp_path):
    saved = kit.ModelCheckpoint(tmp_path, every_n_train_steps=2)
    saving = kit.pytorch.core.saving
    before, loader, found = {*vars(saved)}, saving.pl_load, []
    model = kit.Model()
    with quiet():
        model.at_step = {1: lambda: found.append(({*vars(saved)} - before, saving.pl_load is loader))}
        trainer_of(kit, tmp_path, checkpoints, saved).fit(model, batches())
    assert {"file_exists", "_link_checkpoint"} <= found[0][0]
    assert found[0][1] is False
    assert saving.pl_load is loader
    assert not {"file_exists", "_link_checkpoint"} & {*vars(saved)}
    assert not (tmp_path / ".async_ckpt.lock").exists()


# --- order --------------------------------------------------------------------------------------------------------


def test_what_is_replaced_is_removed_only_when_its_successor_is_durable(checkpoints, tmp_path, held_writes):
    (tmp_path / "old.ckpt").write_text("old")
    checkpoints.save_checkpoint({"global_step": 1}, tmp_path / "new.ckpt")
    checkpoints.remove_checkpoint(tmp_path / "old.ckpt")
    assert checkpoints.reports() == []  # as at the end of a batch
    held_writes.wait_reached()
    assert files_in(tmp_path) == ["old.ckpt"]
    held_writes.open()
    checkpoints.wait()
    assert files_in(tmp_path) == ["new.ckpt"]


def test_what_a_failed_save_was_to_replace_is_kept(checkpoints, tmp_path, broken_writes, caplog):
    (tmp_path / "old.ckpt").write_text("old")
    broken_writes.append("new.ckpt")
    checkpoints.save_checkpoint({"global_step": 1}, tmp_path / "new.ckpt")
    checkpoints.remove_checkpoint(tmp_path / "old.ckpt")
    with pytest.raises(CheckpointError, match="no space left"):
        checkpoints.wait()
    assert files_in(tmp_path) == ["old.ckpt"]
    assert "old.ckpt is left as it is, since a save before it has failed" in caplog.text
    checkpoints.wait()  # it is told once


def test_a_name_that_is_still_to_be_removed_is_removed_before_it_is_written_again(checkpoints, tmp_path):
    for step in range(5):
        checkpoints.save_checkpoint({"global_step": step}, tmp_path / "a.ckpt")
        checkpoints.remove_checkpoint(tmp_path / "a.ckpt")
    checkpoints.save_checkpoint({"global_step": 5}, tmp_path / "a.ckpt")
    checkpoints.wait()
    assert loaded(tmp_path / "a.ckpt") == {"global_step": 5}


def test_the_link_leads_to_the_old_file_until_the_new_one_is_durable(kit, checkpoints, tmp_path, held_writes):
    """And the file that it leads to is not removed before it has moved."""
    link, seen = tmp_path / "last.ckpt", []
    saved = kit.ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=1, save_last="link", filename="{step}")
    model, opened = kit.Model(), threading.Event()

    def look() -> None:
        held_writes.wait_reached()
        seen.append((os.path.lexists(link), files_in(tmp_path)))
        held_writes.open()
        opened.set()

    with quiet():
        model.at_step = {1: look, 6: lambda: seen.append(link.exists())}
        trainer_of(kit, tmp_path, checkpoints, saved).fit(model, batches())
    assert seen == [(False, []), True]
    assert os.readlink(link) == "step=12.ckpt"
    assert files_in(tmp_path) == ["last.ckpt", "step=12.ckpt"]


def test_every_moment_of_a_training_has_a_last_checkpoint_that_loads(kit, checkpoints, tmp_path, monkeypatch):
    """Looked at ahead of every removal, renaming and link."""
    link, states = tmp_path / "last.ckpt", []

    def watched(real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if os.path.lexists(link):
                states.append(loaded(link)["global_step"])
            return real(*args, **options)

        return call

    for name in ("unlink", "remove", "replace", "rename", "symlink"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    saved = {"save_top_k": 1, "every_n_train_steps": 1, "save_last": "link"}
    run_of(kit, tmp_path, checkpoints, saved=saved)
    assert {*states} >= {*range(1, 12)}


@pytest.mark.parametrize("name", ["last", "last-{step}"])
def test_the_last_checkpoint_is_the_newest_one_under_a_second_name(kit, checkpoints, tmp_path, monkeypatch, name):
    """Seen ahead of every call that gives or takes a name: the last one is never behind, and it is written once."""
    written, behind = [], []

    def newest(pattern: str) -> int:
        steps = [0]
        for path in tmp_path.glob(pattern):
            with contextlib.suppress(FileNotFoundError):  # another thread has just removed it
                steps.append(loaded(path)["global_step"])
        return max(steps)

    def watched(real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if newest("last*.ckpt") < newest("ck-*.ckpt"):
                behind.append((real.__name__, args))
            return real(*args, **options)

        return call

    for call in ("unlink", "remove", "replace", "rename", "link"):
        monkeypatch.setattr(os, call, watched(getattr(os, call)))
    finish = LocalSink.finish
    monkeypatch.setattr(LocalSink, "finish", lambda self, *args: (written.append(self), finish(self, *args))[1])
    monkeypatch.setattr(kit.ModelCheckpoint, "CHECKPOINT_NAME_LAST", name)
    saved = {"save_top_k": 1, "save_last": True, "filename": "ck-{step}"}
    run_of(kit, tmp_path, checkpoints, saved=saved, max_steps=8)
    last = "last.ckpt" if name == "last" else "last-step=8.ckpt"
    assert behind == []
    assert files_in(tmp_path) == ["ck-step=8.ckpt", last]
    assert (tmp_path / last).samefile(tmp_path / "ck-step=8.ckpt")
    assert len(written) == 4

    checkpoints.save_checkpoint({"global_step": 9}, tmp_path / last)  # which leaves the other name alone
    assert loaded(tmp_path / "ck-step=8.ckpt")["global_step"] == 8

    resumed = {**saved, "filename": "ck-{step}"}
    run_of(kit, tmp_path, checkpoints, ckpt_path=tmp_path / "ck-step=8.ckpt", saved=resumed)
    assert files_in(tmp_path)[-1] == last.replace("8", "12")
    assert "-v" not in "".join(files_in(tmp_path))


def test_where_files_have_one_name_each_the_last_checkpoint_is_a_copy(kit, checkpoints, tmp_path, monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    run_of(kit, tmp_path, checkpoints, saved={"save_top_k": 1, "save_last": True, "filename": "ck-{step}"})
    assert loaded(tmp_path / "last.ckpt")["global_step"] == loaded(tmp_path / "ck-step=12.ckpt")["global_step"] == 12
    assert not (tmp_path / "last.ckpt").samefile(tmp_path / "ck-step=12.ckpt")


def test_only_a_save_of_the_same_step_is_the_last_one(kit, checkpoints, tmp_path):
    """Where the best one did not improve, the last one is saved alone; the other callback saves for itself."""
    worst = kit.ModelCheckpoint(
        tmp_path / "worst", monitor="loss", mode="max", every_n_train_steps=2, save_last=True, filename="ck-{step}"
    )
    run_of(kit, tmp_path / "best", checkpoints, saved={"save_top_k": 1, "save_last": True, "filename": "ck-{step}"})
    with quiet():
        trainer_of(kit, tmp_path, checkpoints, worst).fit(kit.Model(), batches())
    assert loaded(tmp_path / "worst" / "last.ckpt")["global_step"] == 12
    assert "ck-step=12.ckpt" not in files_in(tmp_path / "worst")
    assert files_in(tmp_path / "best") == ["ck-step=12.ckpt", "last.ckpt"]


@pytest.mark.parametrize("save_last", ["link", True])
def test_what_is_about_to_be_removed_is_gone_for_the_names_of_the_next_checkpoint(
    kit, checkpoints, tmp_path, save_last
):
    """Resumed from the first checkpoint, whose state knows no last one. Its link would dangle, and `last-v1` follow."""
    saved = {"save_top_k": 1, "save_last": save_last, "filename": "ck-{step}"}
    run_of(kit, tmp_path, checkpoints, saved=saved, max_steps=2)
    run_of(kit, tmp_path, checkpoints, saved=saved, ckpt_path="last", max_steps=6)
    assert files_in(tmp_path) == ["ck-step=6.ckpt", "last.ckpt"]
    assert loaded(tmp_path / "last.ckpt")["global_step"] == 6


def test_a_link_that_is_saved_over_leaves_the_file_that_it_leads_to(checkpoints, tmp_path):
    checkpoints.save_checkpoint({"step": 1}, tmp_path / "one.ckpt")
    checkpoints.wait()
    os.symlink("one.ckpt", tmp_path / "last.ckpt")
    checkpoints.save_checkpoint({"step": 2}, tmp_path / "last.ckpt")
    checkpoints.wait()
    assert loaded(tmp_path / "one.ckpt") == {"step": 1}
    assert loaded(tmp_path / "last.ckpt") == {"step": 2}
    assert not (tmp_path / "last.ckpt").is_symlink()


def test_loading_waits_for_the_saves_under_way(kit, checkpoints, tmp_path, held_writes):
    path = tmp_path / "x.ckpt"
    checkpoints.save_checkpoint({"global_step": 7}, path)
    loading = Call(lambda: checkpoints.load_checkpoint(path))
    loading.wait_until_inside("wait_for")
    assert loading.is_alive()
    held_writes.open()
    assert loading.outcome() == {"global_step": 7}


def test_load_from_checkpoint_waits_in_the_middle_of_a_training(kit, checkpoints, tmp_path, held_writes):
    model, seen = kit.Model(), []

    def look() -> None:
        loading = Call(lambda: kit.Model.load_from_checkpoint(tmp_path / "step=2.ckpt"))
        loading.wait_until_inside("wait_for")
        held_writes.open()
        seen.append(loading.outcome())

    saved = kit.ModelCheckpoint(tmp_path, every_n_train_steps=2, filename="{step}", save_top_k=-1)
    with quiet():
        model.at_step = {2: look}
        trainer_of(kit, tmp_path, checkpoints, saved).fit(model, batches())
    assert difference(seen[0].state_dict(), loaded(tmp_path / "step=2.ckpt")["state_dict"]) is None


def test_no_more_saves_are_under_way_than_allowed(kit, tmp_path, held_writes):
    checkpoints = AsyncTarCheckpointIO(max_in_flight=2)
    for step in (1, 2):
        checkpoints.save_checkpoint({"step": step}, tmp_path / f"{step}.ckpt")
    third = Call(lambda: checkpoints.save_checkpoint({"step": 3}, tmp_path / "3.ckpt"))
    third.wait_until_inside("wait_for")
    assert "2 under way" in repr(checkpoints)
    held_writes.open()
    third.outcome()
    checkpoints.wait()
    assert files_in(tmp_path) == ["1.ckpt", "2.ckpt", "3.ckpt"]
    with pytest.raises(ValueError, match="max_in_flight must be a whole number, at least 1"):
        AsyncTarCheckpointIO(max_in_flight=0)


# --- failures -----------------------------------------------------------------------------------------------------


def test_a_failed_save_is_raised_by_the_next_one_and_the_one_after_that_is_saved(checkpoints, tmp_path, broken_writes):
    broken_writes.append("1.ckpt")
    checkpoints.save_checkpoint({"step": 1}, tmp_path / "1.ckpt")
    with pytest.raises(CheckpointError, match=r"1\.ckpt.*no space left"):  # noqa: PT012
        for _ in range(3):  # the error is known when the save before has ended
            checkpoints.save_checkpoint({"step": 2}, tmp_path / "2.ckpt")
    checkpoints.save_checkpoint({"step": 2}, tmp_path / "2.ckpt")
    checkpoints.wait()
    assert loaded(tmp_path / "2.ckpt") == {"step": 2}


def test_the_error_of_the_last_save_ends_the_training(kit, checkpoints, tmp_path, broken_writes):
    broken_writes.append("step=12.ckpt")
    with pytest.raises(CheckpointError, match=r"step=12\.ckpt.*no space left"):
        run_of(kit, tmp_path, checkpoints)
    assert files_in(tmp_path) == [f"epoch={e}-step={s}.ckpt" for e, s in ((0, 2), (0, 4), (1, 6), (1, 8), (2, 10))][::1]
    assert not (tmp_path / ".async_ckpt.lock").exists()
    run_of(kit, tmp_path, checkpoints, max_steps=2, saved={"enable_version_counter": False})  # the plugin still works


def test_an_exception_in_the_training_is_not_hidden_by_that_of_a_save(
    kit, checkpoints, tmp_path, broken_writes, caplog
):
    broken_writes.append("step=4.ckpt")
    model = kit.Model()

    def fail() -> None:
        raise RuntimeError("out of luck")

    model.at_step = {4: fail}
    saved = kit.ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    with quiet(), pytest.raises(RuntimeError, match="out of luck") as caught:
        trainer_of(kit, tmp_path, checkpoints, saved).fit(model, batches())
    assert files_in(tmp_path) == ["epoch=0-step=2.ckpt"]
    assert any("a checkpoint was not saved" in note for note in caught.value.__notes__)
    assert "a checkpoint was not saved" in caplog.text


@pytest.mark.parametrize("hook", ["on_save_checkpoint", "on_train_batch_end"])
def test_an_exception_in_a_callback_ends_the_training_and_leaves_whole_files(kit, checkpoints, tmp_path, hook):
    """Ahead of a save, and when it has begun."""

    def fail(self: Any, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 4:
            raise RuntimeError("out of luck")

    # Lightning calls a Checkpoint behind all other callbacks, so that this one comes behind the ModelCheckpoint.
    kind = kit.pytorch.Callback if hook == "on_save_checkpoint" else kit.pytorch.callbacks.Checkpoint
    failing = type("Failing", (kind,), {hook: fail})()
    saved = kit.ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    with quiet(), pytest.raises(RuntimeError, match="out of luck"):
        trainer_of(kit, tmp_path, checkpoints, saved, failing).fit(kit.Model(), batches())
    steps = [2] if hook == "on_save_checkpoint" else [2, 4]
    assert [checkpoint["global_step"] for checkpoint in contents(tmp_path).values()] == steps
    assert names_in(tmp_path) == [f"step={step}.ckpt" for step in steps]
    run_of(kit, tmp_path, checkpoints, ckpt_path=tmp_path / f"step={steps[-1]}.ckpt", max_steps=6)  # it still works


def test_a_folder_is_free_for_the_next_training_whatever_callbacks_raise_at_the_end_of_the_last(kit, tmp_path):
    """Lightning calls no teardown if a callback raises while another exception ends the training."""

    class Failing(kit.pytorch.Callback):  # type: ignore[misc, name-defined]
        def on_save_checkpoint(self, *_: Any) -> None:
            raise RuntimeError("out of luck")

    saved = kit.ModelCheckpoint(tmp_path, every_n_train_steps=2, save_on_exception=True)
    with quiet(), pytest.raises(RuntimeError, match="out of luck"):
        trainer_of(kit, tmp_path, AsyncTarCheckpointIO(), saved, Failing()).fit(kit.Model(), batches())
    gc.collect()

    run_of(kit, tmp_path, AsyncTarCheckpointIO(), max_steps=2)
    assert [checkpoint["global_step"] for checkpoint in contents(tmp_path).values()] == [2]
    assert names_in(tmp_path) == ["epoch=0-step=2.ckpt"]


def test_a_training_that_reaches_its_last_step_waits_for_the_saves_under_way(kit, checkpoints, tmp_path, held_writes):
    training = Call(lambda: run_of(kit, tmp_path, checkpoints, max_steps=4))
    training.wait_until_inside("end_run")
    assert training.is_alive()
    assert files_in(tmp_path) == []
    held_writes.open()
    training.outcome()
    assert [checkpoint["global_step"] for checkpoint in contents(tmp_path).values()] == [2, 4]


def test_an_exception_waits_for_what_is_under_way_and_for_the_checkpoint_that_it_causes(kit, checkpoints, tmp_path):
    if "save_on_exception" not in inspect.signature(kit.ModelCheckpoint).parameters:
        pytest.skip("ModelCheckpoint(save_on_exception=True) is newer")
    model = kit.Model()

    def fail() -> None:
        raise RuntimeError("out of luck")

    model.at_step = {5: fail}
    saved = kit.ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, save_on_exception=True)
    with quiet(), pytest.raises(RuntimeError, match="out of luck"):
        trainer_of(kit, tmp_path, checkpoints, saved).fit(model, batches())
    assert [checkpoint["global_step"] for checkpoint in contents(tmp_path).values()][:3] == [2, 4, 5]


def test_a_save_that_fails_just_before_the_next_one_is_raised_and_not_warned_of(checkpoints, tmp_path, held_writes):
    """The queue's thread is still busy with what follows an earlier save, and has not seen the failure."""
    busy = Gate()
    checkpoints._saves.follow(tmp_path / "0.ckpt", busy.passed)
    checkpoints.save_checkpoint({"step": 1}, tmp_path / "gone" / "1.ckpt")
    held_writes.wait_reached()
    shutil.rmtree(tmp_path / "gone")
    held_writes.open()
    until(lambda: any(save.is_unseen for save in all_saves()))
    checkpoints.save_checkpoint({"step": 2}, tmp_path / "2.ckpt")
    busy.open()
    with pytest.raises(CheckpointError):
        checkpoints.wait()
    assert contents(tmp_path) == {"2.ckpt": {"step": 2}}


def test_a_folder_that_is_deleted_while_a_save_runs_costs_that_save_only(kit, checkpoints, tmp_path, held_writes):
    folder = tmp_path / "run"
    checkpoints.save_checkpoint({"step": 1}, folder / "1.ckpt")
    held_writes.wait_reached()
    shutil.rmtree(folder)
    held_writes.open()
    with pytest.raises(CheckpointError):
        checkpoints.wait()
    checkpoints.save_checkpoint({"step": 2}, folder / "2.ckpt")
    checkpoints.wait()
    assert contents(folder) == {"2.ckpt": {"step": 2}}


def test_a_folder_that_cannot_be_written_to_is_refused_at_once_or_by_the_next_save(checkpoints, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises((OSError, CheckpointError), match="file"):  # noqa: PT012
        checkpoints.save_checkpoint({"step": 1}, tmp_path / "file" / "1.ckpt")
        checkpoints.wait()


@needs_mount
def test_on_a_full_disk_the_files_that_fit_stay_whole(kit, checkpoints, tmp_path):
    with mounted(tmp_path / "small", "size=4m") as small, pytest.raises(StorageFullError):
        run_of(kit, small, checkpoints, width=2**15)  # 2.3 MB each
    with mounted(tmp_path / "smaller", "size=4m") as small:
        with pytest.raises(StorageFullError):
            run_of(kit, small, checkpoints, width=2**15, saved={"save_top_k": 1})
        assert [checkpoint["global_step"] for checkpoint in contents(small).values()] == [2]


def test_options_for_the_storage_are_refused(checkpoints, tmp_path):
    with pytest.raises(TypeError, match="storage_options is not supported here"):
        checkpoints.save_checkpoint({}, tmp_path / "x.ckpt", storage_options={})


def test_the_plugin_without_its_callback_warns_once(kit, checkpoints, tmp_path):
    saved = kit.ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    with quiet(), pytest.warns(UserWarning, match=r"without its callback: .*checkpoints\.callback\(\)") as warned:
        trainer_of(kit, tmp_path, None, saved, plugins=[checkpoints], max_steps=4).fit(kit.Model(), batches())
    assert len([one for one in warned if "without its callback" in str(one.message)]) == 1


def test_the_callback_without_the_plugin_is_refused(kit, checkpoints, tmp_path):
    with quiet(), pytest.raises(ValueError, match="belongs to an AsyncTarCheckpointIO that the Trainer does not have"):
        trainer_of(kit, tmp_path, None, checkpoints.callback()).fit(kit.Model(), batches())


def test_a_strategy_that_writes_shards_by_itself_is_refused_until_it_is_made_ours(kit, checkpoints, tmp_path):
    callback, model = checkpoints.callback(), kit.Model()
    strategy = kit.pytorch.strategies.ModelParallelStrategy()
    trainer = trainer_of(kit, tmp_path, None, plugins=[checkpoints], strategy=strategy, devices=1)
    with pytest.raises(
        ValueError, match=r"ModelParallelStrategy writes its checkpoints by itself; .*sharded\(strategy\)"
    ):
        callback.setup(trainer, model, "fit")
    assert checkpoints.sharded(strategy) is strategy
    callback.setup(trainer, model, "fit")
    checkpoints.teardown()


def test_a_strategy_that_lacks_what_is_called_is_an_error_when_it_is_made_ours(kit, checkpoints, monkeypatch):
    strategy = kit.fabric.strategies.ModelParallelStrategy(lambda model, mesh: model)
    monkeypatch.delattr(strategy, "_save_distributed_checkpoint")
    with pytest.raises(
        RuntimeError, match=r"has no ModelParallelStrategy\._save_distributed_checkpoint, which async_ckpt"
    ):
        checkpoints.sharded(strategy)


def test_without_the_callback_the_files_are_the_same(kit, checkpoints, tmp_path):
    for name, plugins in (("plain", []), ("ours", [checkpoints])):
        saved = kit.ModelCheckpoint(
            tmp_path / name, monitor="loss", every_n_train_steps=2, save_top_k=2, save_last=True
        )
        with quiet():
            warnings.filterwarnings("ignore", "the Trainer has this plugin without its callback")
            trainer_of(kit, tmp_path, None, saved, plugins=plugins).fit(kit.Model(), batches())
    assert files_in(tmp_path / "ours") == files_in(tmp_path / "plain")
    for name, checkpoint in contents(tmp_path / "ours").items():
        assert difference(checkpoint["state_dict"], loaded(tmp_path / "plain" / name)["state_dict"]) is None


@pytest.mark.parametrize(
    ("owner", "name"), [("callbacks.ModelCheckpoint", "_link_checkpoint"), ("core.saving", "pl_load")]
)
def test_a_method_that_is_gone_is_an_error_when_the_callback_is_made(kit, checkpoints, monkeypatch, owner, name):
    found = kit.pytorch
    for part in owner.split("."):
        found = getattr(found, part)
    monkeypatch.delattr(found, name)
    with pytest.raises(RuntimeError, match=rf"{kit.pytorch.__name__} \S+ has no .*{name}, which async_ckpt needs"):
        checkpoints.callback()


def test_without_lightning_the_error_says_what_to_install(monkeypatch):
    for name in ("lightning", "lightning.fabric", "lightning_fabric", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    require.cache_clear()
    with pytest.raises(
        ImportError, match=r"this needs lightning, which is not installed: pip install 'lightning>=2\.4'"
    ):
        AsyncTarCheckpointIO()


def test_accumulated_gradients_and_two_workers_of_the_loader_do_no_harm(kit, checkpoints, tmp_path):
    """The workers are forked when our threads are there."""
    for name, plugin in (("plain", None), ("ours", checkpoints)):
        saved = kit.ModelCheckpoint(tmp_path / name, every_n_train_steps=1, save_top_k=-1)
        loader = torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2, num_workers=2)
        with quiet():
            trainer = trainer_of(kit, tmp_path, plugin, saved, max_steps=4, accumulate_grad_batches=2)
            trainer.fit(kit.Model(), loader)
    plain, ours = contents(tmp_path / "plain"), contents(tmp_path / "ours")
    assert [*ours] == [*plain]
    assert difference([c["state_dict"] for c in ours.values()], [c["state_dict"] for c in plain.values()]) is None


def test_manual_optimization_and_a_compiled_model_are_saved_as_by_lightning(kit, checkpoints, tmp_path):
    class Manual(kit.Model):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    for name, plugin in (("plain", None), ("ours", checkpoints)):
        saved = kit.ModelCheckpoint(tmp_path / name, every_n_train_steps=2, save_top_k=-1)
        with quiet():
            model = Manual()
            model.layers = torch.compile(model.layers, backend="eager")
            trainer_of(kit, tmp_path, plugin, saved, max_steps=4).fit(model, batches())
    assert (
        difference(
            contents(tmp_path / "ours")["epoch=0-step=4.ckpt"]["state_dict"],
            contents(tmp_path / "plain")["epoch=0-step=4.ckpt"]["state_dict"],
        )
        is None
    )


@pytest.mark.parametrize("how", ["an adapter of PEFT", "compiled as a whole"])
def test_a_wrapped_module_has_lightnings_own_files_and_goes_on_with_the_same_losses(kit, checkpoints, tmp_path, how):
    class Compilable(kit.Model):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return (self.layers(batch) - 1).square().mean()

        def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
            self.losses[self.trainer.global_step - 1] = outputs["loss"].item().hex()

    def wrapped() -> Any:
        if how == "compiled as a whole":
            model = Compilable(8)
            return model, torch.compile(model, backend="eager")
        model = kit.Model(8)
        peft = pytest.importorskip("peft")
        model.layers = peft.get_peft_model(model.layers, peft.LoraConfig(r=2, target_modules=["0", "2"]))
        assert sum(parameter.requires_grad for parameter in model.parameters()) == 4
        return model, model

    def train(name: str, plugin: Any, max_steps: int, ckpt_path: Any = None) -> dict[int, str]:
        saved = kit.ModelCheckpoint(tmp_path / name, every_n_train_steps=2, save_top_k=-1, filename="{step}")
        model, given = wrapped()
        with quiet():
            trainer_of(kit, tmp_path, plugin, saved, max_steps=max_steps).fit(given, batches(), ckpt_path=ckpt_path)
        return model.losses

    whole = train("plain", None, 8)
    begun = train("ours", checkpoints, 4)
    assert begun | train("ours", checkpoints, 8, tmp_path / "ours" / "step=4.ckpt") == whole
    plain, ours = contents(tmp_path / "plain"), contents(tmp_path / "ours")
    assert [*ours] == [*plain]
    for name, checkpoint in ours.items():
        for part in ("state_dict", "optimizer_states"):
            assert difference(checkpoint[part], plain[name][part]) is None


def test_fabric_saves_in_the_background_too(kit, checkpoints, tmp_path, held_writes):
    with quiet():
        fabric = kit.Fabric(accelerator="cpu", devices=1, plugins=[checkpoints])
        model, optimizer = fabric.setup(torch.nn.Linear(4, 4), torch.optim.AdamW(torch.nn.Linear(4, 4).parameters()))
        checkpoints.guard = optimizer
        assert [*checkpoints.guard] == [optimizer]
        state = {"model": model, "optimizer": optimizer, "step": 3}
        fabric.save(tmp_path / "x.ckpt", state)
        held_writes.wait_reached()
        assert files_in(tmp_path) == []
        held_writes.open()
        other, _ = fabric.setup(torch.nn.Linear(4, 4), torch.optim.AdamW(torch.nn.Linear(4, 4).parameters()))
        rest = fabric.load(tmp_path / "x.ckpt", {"model": other})
    assert rest["step"] == 3
    assert difference(other.state_dict(), model.state_dict()) is None
    checkpoints.wait()
    assert [report.step for report in checkpoints.reports()] == [3]


def test_what_a_killed_process_has_left_is_swept_when_the_next_one_begins(kit, checkpoints, tmp_path):
    left = [".epoch=7.ckpt.1234abcd.async_ckpt-tmp", ".last.ckpt.async_ckpt-saving"]
    for name in left:
        (tmp_path / name).write_text("half")
    (tmp_path / ".a.ckpt.async_ckpt-saving").mkdir()
    run_of(kit, tmp_path, checkpoints, max_steps=2)
    assert {path.name for path in Path(tmp_path).iterdir()} == {"epoch=0-step=2.ckpt", "history.jsonl"}
