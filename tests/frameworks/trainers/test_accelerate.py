"""`AsyncState`: folders of an Accelerator, written in the background, loaded by us, by accelerate, and by other ranks."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from racing import Thrown
from rank_worlds import Worlds

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.data_loader import IterableDatasetShard, SeedableRandomSampler
from accelerate.state import AcceleratorState
from accelerate.tracking import GeneralTracker
from accelerate.utils import DataLoaderConfiguration, DistributedType
from accelerated import STEPS, Counted, Training
from torch.optim.lr_scheduler import StepLR

import async_ckpt
from async_ckpt import StateMismatchError
from async_ckpt.errors import CorruptCheckpointError
from async_ckpt.face.around import wrap as wrapping
from async_ckpt.integrations.accelerate import AsyncState
from async_ckpt.integrations.common.folder_saves import FolderSave
from async_ckpt.integrations.common.run_folders import LocalRun, number_of
from async_ckpt.integrations.common.training_archive import TrainingArchive

LAYOUTS = ["archive", "accelerate"]
WAYS = [*LAYOUTS, "plain"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The losses of a training that saves nothing, and where trainings have saved in each way."""
    losses = Training(tmp_path_factory.mktemp("none")).run()
    saved = {}
    for way in WAYS:
        saved[way] = tmp_path_factory.mktemp(way)
        training = Training(saved[way])
        state = training.state(way)
        assert training.run(save=state.save_state) == losses
        if way != "plain":
            state.wait()
    return losses, saved


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {
        "history.jsonl",
        "_async_ckpt.digests.json",
        "_async_ckpt.loaders.json",
    }


# --- what is written, and loaded ----------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", WAYS)
@pytest.mark.parametrize("writer", WAYS)
def test_a_loaded_training_goes_on_with_the_same_losses(whole, tmp_path, writer, reader):
    if (writer, reader) == ("archive", "plain"):
        pytest.skip("accelerate reads no archives")
    losses, saved = whole
    training = Training(tmp_path)
    training.state(reader).load_state(str(saved[writer] / "checkpoints" / "checkpoint_1"))
    assert training.counted.number == 4
    assert training.run(STEPS - 4) == losses[4:]


def test_the_files_are_those_of_accelerate(whole):
    _, saved = whole
    ours, plain = (saved[way] / "checkpoints" / "checkpoint_2" for way in ("accelerate", "plain"))
    assert names(ours) == names(plain)
    assert (ours / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()
    for name in names(plain) - {"model.safetensors"}:
        loaded = [torch.load(folder / name, weights_only=False) for folder in (ours, plain)]
        if not name.startswith("random_states"):  # which has numpy's arrays
            torch.testing.assert_close(*loaded, rtol=0, atol=0)


def test_an_archive_is_the_whole_folder_and_is_sound(whole):
    _, saved = whole
    folder = saved["archive"] / "checkpoints" / "checkpoint_2"
    assert names(folder) == {"training.tar"}
    assert async_ckpt.verify(folder / "training.tar").num_archives == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_newest_checkpoint_of_the_project_is_loaded(whole, tmp_path, layout):
    training = Training(whole[1][layout])
    training.state(layout).load_state()
    assert training.counted.number == STEPS
    assert training.accelerator.save_iteration == STEPS // 2  # which the next save is named by


def test_a_damaged_checkpoint_is_refused_by_its_name_and_skipped_as_the_newest(whole, tmp_path):
    folder = tmp_path / "project"
    shutil.copytree(whole[1]["accelerate"], folder)
    newest, before = sorted((folder / "checkpoints").iterdir(), key=number_of)[:-3:-1]
    (newest / "optimizer.bin").write_bytes(b"another")
    training = Training(folder)
    weights = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    with pytest.raises(CorruptCheckpointError, match=f"optimizer.bin: .*the newest sound checkpoint is {before};"):
        training.state("accelerate").load_state(newest)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in training.model.state_dict().items())
    with pytest.warns(RuntimeWarning, match=f"{newest} is skipped"):
        training.state("accelerate").load_state()
    assert training.counted.number == STEPS - 2
    assert training.accelerator.save_iteration == STEPS // 2  # the damaged folder is not written over


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_of_ones_own_name_is_saved_and_loaded(tmp_path, layout, whole):
    training = Training(tmp_path)
    training.accelerator.project_configuration.automatic_checkpoint_naming = False
    with AsyncState(training.accelerator, layout) as state:
        training.run(2)
        state.save_state(tmp_path / "mine" / "one")
    assert names(tmp_path / "mine") == {"one"}
    again = Training(tmp_path)
    again.state(layout).load_state(tmp_path / "mine" / "one")
    assert again.run(2) == whole[0][2:4]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_hooks_write_is_saved_and_what_they_take_is_not(tmp_path, layout):
    def hook(models: list[Any], weights: list[Any], folder: str) -> None:
        weights.clear()
        Path(folder, "adapter.txt").write_text("of the hook")

    training = Training(tmp_path)
    training.accelerator.register_save_state_pre_hook(hook)
    with AsyncState(training.accelerator, layout) as state:
        state.save_state()
    folder = tmp_path / "checkpoints" / "checkpoint_0"
    if layout == "accelerate":
        assert (folder / "adapter.txt").read_text() == "of the hook"
        assert "model.safetensors" not in names(folder)
    else:
        assert async_ckpt.load(folder / "training.tar", select="files")["files"]["adapter.txt"] == b"of the hook"


def test_a_loader_with_workers_is_no_hindrance(tmp_path, whole):
    training = Training(tmp_path, workers=1)
    with AsyncState(training.accelerator) as state:
        assert training.run(4, state.save_state) == whole[0][:4]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("workers", [0, 1])
def test_data_in_another_order_is_told_when_it_is_loaded(tmp_path, whole, caplog, layout, workers):
    training = Training(tmp_path, workers=workers)
    training.state(layout).load_state(str(whole[1][layout] / "checkpoints" / "checkpoint_1"))
    told = [record.getMessage() for record in caplog.records if "in another order" in record.getMessage()]
    assert len(told) == workers
    assert all("data loader 0" in line and "number of workers 0 in the checkpoint and 1 here" in line for line in told)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_seed_of_a_seedable_sampler_is_told_when_it_is_loaded(tmp_path, caplog, layout):
    for seed, told in ((1, 0), (1, 0), (2, 1)):
        AcceleratorState._reset_state(reset_partial_state=True)
        how = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=seed)
        accelerator = Accelerator(cpu=True, dataloader_config=how)
        accelerator.prepare(torch.utils.data.DataLoader(torch.arange(8), batch_size=2, shuffle=True))
        with AsyncState(accelerator, layout) as state:
            if (tmp_path / "one").exists():
                state.load_state(tmp_path / "one")
            else:
                state.save_state(tmp_path / "one")
        lines = [record.getMessage() for record in caplog.records if "in another order" in record.getMessage()]
        assert len(lines) == told
    assert "loader 0 yields its data in another order than at the save: seed 1 in the checkpoint and 2 here" in lines[0]


@pytest.mark.parametrize("kind", [DistributedType.XLA, DistributedType.MEGATRON_LM])
def test_a_way_to_train_that_is_not_supported_is_refused(tmp_path, monkeypatch, kind):
    training = Training(tmp_path)
    monkeypatch.setattr(training.accelerator.state, "distributed_type", kind)
    with pytest.raises(NotImplementedError, match=f"AsyncState does not support {kind.value}; use accelerator.save_st"):
        AsyncState(training.accelerator)


# --- objects of one side alone ------------------------------------------------------------------------------------


def prepared(**numbers: int) -> Any:
    """An Accelerator with so many objects of each kind."""
    kinds = {"models": 1, "optimizers": 1, "schedulers": 1, "samplers": 0, "registered": 1, "scalers": 1, **numbers}
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    models = [torch.nn.Linear(2, 2) for _ in range(kinds["models"])]
    weights = [torch.nn.Parameter(torch.randn(2)) for _ in range(2)]
    optimizers = [torch.optim.AdamW(weights) for _ in range(kinds["optimizers"])]
    schedulers = [StepLR(torch.optim.SGD(weights), 1) for _ in range(kinds["schedulers"])]
    accelerator.prepare(*models, *optimizers, *schedulers)
    for _ in range(kinds["samplers"]):  # those of accelerate's own, of data that several processes share
        shard = IterableDatasetShard(range(4), batch_size=1)
        accelerator._dataloaders.append(SimpleNamespace(dataset=shard, get_sampler=sampler, set_sampler=lambda _: None))
    for _ in range(kinds["registered"]):
        accelerator.register_for_checkpointing(Counted())
    if kinds["scalers"]:
        accelerator.scaler = torch.amp.GradScaler("cpu")
    return accelerator


def sampler() -> Any:
    return SeedableRandomSampler(range(4), data_seed=0)


ONE_SIDE = {
    "a model": ({"models": 1}, {"models": 2}, "missing in the checkpoint: model 1"),
    "an optimizer": ({"optimizers": 1}, {"optimizers": 2}, "missing in the checkpoint: optimizer 1"),
    "all optimizers": ({"optimizers": 0}, {}, "missing in the checkpoint: optimizer 0"),
    "a scheduler": ({}, {"schedulers": 2}, r"missing in the checkpoint: scheduler_1\.bin"),
    "all schedulers": ({"schedulers": 0}, {}, r"missing in the checkpoint: scheduler\.bin"),
    "a sampler": ({"samplers": 0}, {"samplers": 1}, r"missing in the checkpoint: sampler\.bin"),
    "a scaler": ({"scalers": 0}, {}, r"missing in the checkpoint: scaler\.pt"),
    "a registered object": ({}, {"registered": 2}, "missing in the checkpoint: registered object 1"),
    "all registered objects": ({"registered": 0}, {}, "missing in the checkpoint: registered object 0"),
    "a registered object more": ({"registered": 2}, {}, "unexpected in the checkpoint: registered object 1"),
    "registered objects alone": ({}, {"registered": 0}, "unexpected in the checkpoint: registered object 0"),
    "several": ({"registered": 0, "scalers": 0}, {}, "registered object 0\n  missing in the checkpoint: scaler"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", ONE_SIDE)
def test_what_one_side_lacks_is_named_with_the_checkpoint_before_anything_is_overwritten(tmp_path, case, layout):
    of, into, match = ONE_SIDE[case]
    with AsyncState(prepared(**of), layout) as state:
        state.save_state(tmp_path / "one")
    accelerator = prepared(**into)
    weights = [*accelerator._models[0].parameters(), *accelerator._optimizers[0].param_groups[0]["params"]]
    before = [weight.detach().clone() for weight in weights]
    with pytest.raises(StateMismatchError, match=match) as caught:
        AsyncState(accelerator, layout).load_state(tmp_path / "one")
    assert str(tmp_path / "one") in str(caught.value)
    assert all(map(torch.equal, weights, before))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["optimizers", "schedulers", "samplers", "scalers"])
def test_what_accelerate_leaves_in_a_checkpoint_is_left_with_a_word(tmp_path, caplog, kind, layout):
    """Such as an optimizer, by a program that only evaluates."""
    with AsyncState(prepared(samplers=1 if kind == "samplers" else 0), layout) as state:
        state.save_state(tmp_path / "one")
    AsyncState(prepared(**{kind: 0}), layout).load_state(tmp_path / "one")
    assert f"{tmp_path / 'one'} also has {kind[:-1]}" in caplog.text


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_that_is_prepared_is_loaded_without_a_word(tmp_path, caplog, layout):
    with AsyncState(prepared(models=2, optimizers=2, registered=2), layout) as state:
        state.save_state(tmp_path / "one")
    AsyncState(prepared(models=2, optimizers=2, registered=2), layout).load_state(tmp_path / "one")
    assert "also has" not in caplog.text


# --- when a folder appears, and what is kept ----------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_folder_appears_when_it_is_durable(tmp_path, layout, gate, monkeypatch):
    real = wrapping.sync_all
    monkeypatch.setattr(wrapping, "sync_all", lambda path: (gate.passed(), real(path))[1])
    training = Training(tmp_path)
    state = training.state(layout)
    training.run(1)
    handle = state.save_state()
    gate.wait_reached()
    training.run(2)
    assert not (tmp_path / "checkpoints" / "checkpoint_0").exists()
    gate.open()
    handle.result()
    assert (tmp_path / "checkpoints" / "checkpoint_0").exists()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_oldest_goes_when_the_newest_is_durable(tmp_path, layout):
    seen = []
    training = Training(tmp_path, total_limit=2)
    with AsyncState(training.accelerator, layout) as state:

        def save() -> None:
            state.save_state().result()
            seen.append({name for name in names(tmp_path / "checkpoints") if not name.startswith(".")})

        training.run(save=save)
    assert seen[2] == {"checkpoint_0", "checkpoint_1", "checkpoint_2"}
    assert names(tmp_path / "checkpoints") == {"checkpoint_2", "checkpoint_3"}


def test_an_archive_that_is_being_written_is_not_looked_into(tmp_path):
    """A search for tensors in its handle would meet what other threads change meanwhile."""
    searched = []

    class Handle:
        def __reduce_ex__(self, _: Any) -> Any:
            searched.append(self)
            return Handle, ()

    save = FolderSave(LocalRun(tmp_path), "checkpoint-1", async_ckpt.snapshot({}), 0.0)
    archive = save.begin_archive({"weight": torch.ones(3)}, TrainingArchive)
    archive.handle.result()
    archive.handle = Handle()
    save.begin_folder({}, lambda *_: None, archive)
    save.handle.exception()
    assert searched == []


# --- failures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_failed_save_is_raised_at_the_next_one_and_by_wait(tmp_path, layout):
    training = Training(tmp_path)
    training.accelerator.project_configuration.automatic_checkpoint_naming = False
    state = AsyncState(training.accelerator, layout)
    (tmp_path / "file").write_text("in the way")
    for raising in (lambda: state.save_state(tmp_path / "two"), state.wait):
        state.save_state(tmp_path / "file").exception()
        with pytest.raises((OSError, async_ckpt.CheckpointError)):
            raising()
    state.save_state(tmp_path / "two").result()
    assert names(tmp_path) >= {"file", "two"}


def test_an_error_in_the_block_waits_for_the_save(tmp_path):
    def fail(state: AsyncState) -> None:
        with state:
            state.save_state()
            raise Thrown("in the block")

    with pytest.raises(Thrown):
        fail(AsyncState(Training(tmp_path).accelerator))
    assert names(tmp_path / "checkpoints") == {"checkpoint_0"}


def test_a_folder_of_the_project_that_exists_is_refused(tmp_path):
    training = Training(tmp_path)
    (tmp_path / "checkpoints" / "checkpoint_0").mkdir(parents=True)
    with pytest.raises(ValueError, match="exists; set the iteration"):
        AsyncState(training.accelerator).save_state()


def test_nothing_to_load_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint to load"):
        AsyncState(Training(tmp_path).accelerator).load_state()


def test_a_url_is_refused_and_the_home_folder_is_known(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    accelerator = Training(tmp_path).accelerator
    accelerator.project_configuration.automatic_checkpoint_naming = False
    state = AsyncState(accelerator)
    for call in (state.save_state, state.load_state):
        with pytest.raises(ValueError, match="s3://bucket/run is not a local path"):
            call("s3://bucket/run")
    state.save_state("~/saved").result()
    state.load_state("~/saved")

    assert names(tmp_path) == {"home"}


def test_a_limit_of_no_checkpoints_keeps_the_newest(tmp_path):
    state = AsyncState(Training(tmp_path, total_limit=0).accelerator)
    for _ in range(3):
        state.save_state()
    state.wait()

    assert names(tmp_path / "checkpoints") == {"checkpoint_2"}


def test_names_by_number_without_a_project_folder_are_refused(tmp_path):
    accelerator = Training(tmp_path).accelerator
    accelerator.project_configuration.project_dir = None
    for call in (AsyncState(accelerator).save_state, AsyncState(accelerator).load_state):
        with pytest.raises(ValueError, match="set project_dir"):
            call()


def test_an_unknown_layout_is_refused(tmp_path):
    with pytest.raises(ValueError, match="layout must be"):
        AsyncState(Training(tmp_path).accelerator, "tar")


# --- the caller's side --------------------------------------------------------------------------------------------


class Rows(GeneralTracker):
    name, requires_logging_directory = "rows", False

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, Any]] = []

    @property
    def tracker(self) -> Any:
        return self.rows

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.rows.append(values)


def test_the_figures_of_each_save_go_to_the_trackers(tmp_path):
    training, rows = Training(tmp_path), Rows()
    training.accelerator.trackers = [rows]
    with AsyncState(training.accelerator) as state:
        training.run(save=state.save_state)
    assert len(rows.rows) == 4
    assert all(row["async_ckpt/num_bytes"] > 0 and row["async_ckpt/stall_seconds"] > 0 for row in rows.rows)


# --- several ranks ------------------------------------------------------------------------------------------------


WARM = ("accelerated",)


_RANKS = """
import contextlib, warnings
warnings.simplefilter("ignore")
from accelerated import *
training = Training({folder!r}, sharded={sharded}, dropout={dropout}, whole_tensors={whole_tensors})
plain = contextlib.nullcontext(training.accelerator)
with plain if {layout!r} == "plain" else AsyncState(training.accelerator, {layout!r}) as state:
    if {load!r}:
        state.load_state({load!r})
        losses = training.run(4)
    else:
        losses = training.run(8, state.save_state)
here.tell({{"losses": losses, "names": sorted(os.listdir({folder!r} + "/checkpoints")) if not {load!r} else []}})
"""


def ran(worlds: Worlds, size: int, folder: Path, load: Path | str = "", layout: str = "archive", **options: Any) -> Any:
    values = {"sharded": False, "dropout": 0.1, "whole_tensors": False, **options}
    ended = worlds.run(size, _RANKS.format(folder=str(folder), load=str(load), layout=layout, **values))
    return [next(told for told in end.told if "losses" in told) for end in ended]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_of_ddp_go_on_with_the_same_losses(worlds, tmp_path, layout):
    first = ran(worlds, 2, tmp_path / "one", layout=layout)
    again = ran(worlds, 2, tmp_path / "two", tmp_path / "one" / "checkpoints" / "checkpoint_1", layout=layout)
    assert [told["losses"] for told in again] == [told["losses"][4:] for told in first]


_FAILING = """
import warnings
warnings.simplefilter("ignore")
from accelerated import *
training = Training({folder!r}, sharded={sharded})
training.accelerator.project_configuration.automatic_checkpoint_naming = False
errors = []
state = AsyncState(training.accelerator, {layout!r})
for end in (lambda: state.save_state({folder!r} + "/two"), state.wait):
    state.save_state({folder!r} + "/file")
    try:
        end()
    except Exception as error:
        errors.append(type(error).__name__)
state.save_state({folder!r} + "/two")
state.wait()
here.tell({{"errors": errors}})
"""


@pytest.mark.parametrize(("layout", "sharded"), [("archive", False), ("accelerate", False), ("archive", True)])
def test_a_save_that_fails_on_one_rank_is_raised_on_all(worlds, tmp_path, layout, sharded):
    (tmp_path / "file").write_text("in the way")
    ended = worlds.run(2, _FAILING.format(folder=str(tmp_path), layout=layout, sharded=sharded))
    told = [next(told for told in end.told if "errors" in told)["errors"] for end in ended]
    assert told[1] == ["PeerFailedError"] * 2
    assert len(told[0]) == 2
    assert names(tmp_path) >= {"file", "two"}


_SLOW_RANK = """
import time
import warnings
warnings.simplefilter("ignore")
from accelerated import *
training = Training({folder!r}, sharded=True)
training.accelerator.project_configuration.automatic_checkpoint_naming = False
state = AsyncState(training.accelerator, "archive")
make_ready = state._begin_folder
def late(folder):
    time.sleep(0.5 * (here.rank == 0))
    make_ready(folder)
state._begin_folder = late
for _ in range(2):
    state.save_state({folder!r} + "/again")
    state.wait()
here.tell({{"ended": True}})
"""


def test_a_rank_that_removes_what_was_left_late_removes_nothing_of_a_save_that_others_begin(worlds, tmp_path):
    ended = worlds.run(2, _SLOW_RANK.format(folder=str(tmp_path)))
    assert [end.told[-1] for end in ended] == [{"ended": True}] * 2
    assert len([*(tmp_path / "again" / "training.tar").glob("rank_*.tar")]) == 2


def test_four_ranks_of_fsdp2_are_loaded_by_four_and_by_two(worlds, tmp_path):
    first = ran(worlds, 4, tmp_path / "four", sharded=True, dropout=0.0)
    folder = tmp_path / "four" / "checkpoints" / "checkpoint_1"
    assert len([*(folder / "training.tar").glob("rank_*.tar")]) == 4
    assert [name for name in first[0]["names"] if name.endswith(".training.tar")] == []
    again = ran(worlds, 4, tmp_path / "again", folder, sharded=True, dropout=0.0)
    assert [told["losses"] for told in again] == [told["losses"][4:] for told in first]
    fewer = ran(worlds, 2, tmp_path / "two", folder, sharded=True, dropout=0.0)
    ran(worlds, 4, tmp_path / "plain", sharded=True, dropout=0.0, layout="plain")
    folder = tmp_path / "plain" / "checkpoints" / "checkpoint_1"
    plain = ran(worlds, 2, tmp_path / "plain-two", folder, sharded=True, dropout=0.0, layout="plain")
    assert [told["losses"] for told in fewer] == [told["losses"] for told in plain]


@pytest.mark.parametrize("whole_tensors", [False, True], ids=["folders", "files"])
def test_the_files_under_fsdp2_are_those_of_accelerate_which_loads_them(worlds, tmp_path, whole_tensors):
    options = {"sharded": True, "dropout": 0.0, "whole_tensors": whole_tensors}
    first = {way: ran(worlds, 2, tmp_path / way, layout=way, **options) for way in ("accelerate", "plain")}
    assert [told["losses"] for told in first["accelerate"]] == [told["losses"] for told in first["plain"]]
    ours, plain = (tmp_path / way / "checkpoints" / "checkpoint_1" for way in first)
    assert names(ours) == names(plain)
    assert [name for name in first["accelerate"][0]["names"] if name.endswith(".training.tar")] == []
    for way in first:
        again = ran(worlds, 2, tmp_path / f"again-{way}", ours, layout=way, **options)
        assert [told["losses"] for told in again] == [told["losses"][4:] for told in first["plain"]]


_FULL = """
import warnings
warnings.simplefilter("ignore")
from accelerated import *
from async_ckpt.integrations import accelerate
training = Training({folder!r}, sharded={sharded})
state = AsyncState(training.accelerator, {layout!r})
def full(*_, **__):
    raise MemoryError("no room")
taken = accelerate.snapshot
if here.rank == {rank}:
    accelerate.snapshot = full
try:
    state.save_state()
except Exception as error:
    here.tell({{"error": type(error).__name__}})
accelerate.snapshot = taken
state.save_state()
state.wait()
"""


@pytest.mark.parametrize(
    ("layout", "sharded", "rank"), [("archive", False, 0), ("archive", True, 1), ("accelerate", True, 1)]
)
def test_a_snapshot_that_fails_on_one_rank_is_raised_on_all(worlds, tmp_path, layout, sharded, rank):
    script = _FULL.format(folder=str(tmp_path), layout=layout, sharded=sharded, rank=rank)
    told = [next(told for told in end.told if "error" in told)["error"] for end in worlds.run(2, script)]
    assert told == ["MemoryError" if number == rank else "PeerFailedError" for number in range(2)]
    assert "checkpoint_0" in names(tmp_path / "checkpoints")
