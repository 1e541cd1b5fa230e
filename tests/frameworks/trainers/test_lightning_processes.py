"""Trainings with Lightning in processes of their own: killed, interrupted, ended in the middle of a save, and on ranks."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from children import Nursery
from lightning_runs import NAMES, files_in, loaded, names_in
from rank_worlds import Worlds
from slices import some

import async_ckpt
from async_ckpt.integrations.common.folders import FolderHold

if not NAMES:
    pytest.skip("Lightning is not installed", allow_module_level=True)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks as Linux has them")


WARM = NAMES[:1]

BEGIN = """
import json, os, signal, sys, threading
from lightning_runs import *
from async_ckpt.core.storage.local import LocalSink
kit, checkpoints, folder = kit_of(NAMES[0]), AsyncTarCheckpointIO(), Path(sys.argv[1])
"""

# --- killed -------------------------------------------------------------------------------------------------------

TRAIN = (
    BEGIN
    + """
from children import die_at
count = die_at(int(sys.argv[2]))
saved = {"save_top_k": 1, "every_n_train_steps": 1, "save_last": json.loads(sys.argv[3]), "filename": "{step}"}
whole = {name: loaded(folder / name)["global_step"] for name in files_in(folder)} if folder.is_dir() else {}
model = run_of(kit, folder, checkpoints, ckpt_path="last", saved=saved)
print(json.dumps([whole, model.losses, count()]))
"""
)
NEVER = 10**9


def trained(
    nursery: Nursery, folder: Path, save_last: object, number: int = NEVER
) -> tuple[dict[str, int], dict[str, str], int]:
    """The files that were there with their steps, the losses, and the calls that changed the disk."""
    ended = nursery.run(TRAIN, folder, number, json.dumps(save_last))
    assert ended.status == 0, ended.err
    return tuple(json.loads(ended.out.splitlines()[-1]))


@pytest.mark.parametrize("save_last", ["link", True])
def test_whenever_a_training_is_killed_its_newest_checkpoint_is_whole_and_it_goes_on_bit_for_bit(
    nursery, quick_path, save_last
):
    """Killed at calls that change the disk, a write half done."""
    _, losses, num_calls = trained(nursery, quick_path / "whole", save_last)
    assert len(losses) == 12
    for number in some([*range(1, num_calls, max(1, num_calls // 20))], 6):
        folder = quick_path / f"killed-{number}"
        killed = nursery.run(TRAIN, folder, number, json.dumps(save_last))
        assert killed.status in (-signal.SIGKILL, 0), killed.err
        whole, resumed, _ = trained(nursery, folder, save_last)
        last = whole.get("last.ckpt", 0)
        # The link, which moves on another thread, may lead to an older file than the newest, and an old one may still be there.
        assert {*whole.values()} <= {*range(last - 1, 13 if save_last == "link" else last + 1)}
        assert resumed == {step: losses[step] for step in map(str, range(last, 12))}
        assert loaded(folder / "last.ckpt")["global_step"] == 12
        # The first save may have been alone in the folder: its file is older than what the training knows of.
        assert {"12.ckpt"} <= {name.rpartition("=")[2] for name in os.listdir(folder)}
        # A last step whose file the link did not lead to yet is saved again, beside that file.
        again = ["step=12-v1.ckpt"] if 12 in whole.values() and last < 12 else []
        assert [path.name for path in folder.iterdir() if path.name.startswith(".") or "-v" in path.name] == again


# --- interrupted, and ended in the middle of a save ---------------------------------------------------------------

HOLD = """
from children import hold_writes
from racing import Call, until, _functions_of
go, main = hold_writes(), threading.main_thread().ident

def let_go_when_waited_for(name):
    def let_go():
        until(lambda: name in _functions_of(main))
        go.set()
    return Call(let_go)
"""


def test_ctrl_c_waits_for_the_save_under_way(nursery, tmp_path):
    script = """
model = kit.Model()

def interrupt():
    let_go_when_waited_for("finish")
    os.kill(os.getpid(), signal.SIGINT)

model.at_step = {2: interrupt}
saved = kit.ModelCheckpoint(folder, every_n_train_steps=2, filename="{step}")
with quiet():
    trainer_of(kit, folder, checkpoints, saved).fit(model, batches())
"""
    ended = nursery.run(BEGIN + HOLD + script, tmp_path)
    assert ended.status == 1  # Lightning's own
    assert names_in(tmp_path) == ["step=2.ckpt"]
    assert loaded(tmp_path / "step=2.ckpt")["global_step"] == 2


def test_the_exit_of_the_interpreter_waits_for_saves_and_for_what_follows_them(nursery, tmp_path):
    """As with Fabric, which has no end of its own."""
    (tmp_path / "old.ckpt").touch()
    script = """
checkpoints.save_checkpoint({"step": 1}, folder / "1.ckpt")
checkpoints.remove_checkpoint(folder / "old.ckpt")
checkpoints.save_checkpoint({"step": 2}, folder / "2.ckpt")
let_go_when_waited_for("drain_at_exit")
"""
    ended = nursery.run(BEGIN + HOLD + script, tmp_path)
    assert ended.status == 0, ended.err
    assert names_in(tmp_path) == ["1.ckpt", "2.ckpt"]
    assert loaded(tmp_path / "2.ckpt") == {"step": 2}


def test_a_save_that_fails_at_the_exit_is_told_of_and_is_the_exit_status(nursery, tmp_path):
    script = """
from async_ckpt import StorageFullError

def full(self, *args):
    raise StorageFullError("no space left")

LocalSink.finish = full
checkpoints.save_checkpoint({"step": 1}, folder / "1.ckpt")
"""
    ended = nursery.run(BEGIN + script, tmp_path)
    assert ended.status == 75
    assert "1.ckpt was not saved: StorageFullError: no space left" in ended.err


def test_a_second_training_in_the_same_folder_is_refused_while_the_first_lives(nursery, tmp_path):
    """In the process of the first one, and after that in another process."""
    script = """
def train_beside():
    try:
        run_of(kit, folder, AsyncTarCheckpointIO(), max_steps=1)
    except async_ckpt.RunTakenError as error:
        print(error)
    print("training", flush=True)
    sys.stdin.read()

import async_ckpt
model = kit.Model()
model.at_step = {2: train_beside}
saved = kit.ModelCheckpoint(folder, every_n_train_steps=2)
with quiet():
    trainer_of(kit, folder, checkpoints, saved).fit(model, batches())
"""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    first = nursery.start(BEGIN + script, tmp_path / "run", stdin=str(pipe))
    with pipe.open("w"):
        first.wait_for_line("training")
        second = nursery.run(BEGIN + script, tmp_path / "run")
    refusal = f"{tmp_path / 'run'}: another trainer (process {first.pid} on "
    assert second.status == 1
    assert f"RunTakenError: {refusal}" in second.err
    ended = first.ended()
    assert ended.status == 0, ended.err
    assert refusal in ended.out
    third = nursery.run(BEGIN + script, tmp_path / "run")
    assert third.status == 0, third.err


SPAWNING = """
import sys
from pathlib import Path
import lightning_runs
from lightning_runs import *

kit, folder = kit_of(NAMES[0]), Path(sys.argv[1])


class Model(kit.Model):
    fails_at = None

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == self.fails_at:
            raise RuntimeError("no luck")
        return super().training_step(batch, batch_idx)

    def test_step(self, batch, batch_idx):
        self.log("loss", self.layers(batch).mean())


if __name__ == "__main__":
    checkpoints, model = AsyncTarCheckpointIO(), Model()
    saved = kit.ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=1, save_last="link", filename="{step}")
    options = {"strategy": "ddp_spawn", "devices": 1, "max_steps": 4}
    with quiet():
        trainer = trainer_of(kit, folder, checkpoints, saved, **options)
        trainer.fit(model, batches())
        print(files_in(folder))
        trainer.save_checkpoint(folder / "own.ckpt")
        trainer.test(model, batches(), verbose=False)
        print(names_in(folder))
        (folder / "own.ckpt").unlink()
        model.fails_at, model.made_by = 6, torch.optim.AdamW
        trainer = trainer_of(kit, folder, checkpoints, saved, **options | {"max_steps": 8})
        try:
            trainer.fit(model, batches(), ckpt_path=folder / "step=4.ckpt")
        except Exception as error:
            print("no luck" in str(error))
        print(names_in(folder))
"""


def test_a_training_in_a_process_that_lightning_spawns_leaves_what_the_plain_one_leaves(tmp_path):
    """One that ends well, after which the trainer saves and is used again; and one whose process fails."""
    script = tmp_path / "spawning.py"
    script.write_text(SPAWNING)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}
    ended = subprocess.run(
        [sys.executable, script, tmp_path / "run"], env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "['last.ckpt', 'step=4.ckpt']",
        "['last.ckpt', 'own.ckpt', 'step=4.ckpt']",
        "True",
        "['last.ckpt', 'step=4.ckpt', 'step=6.ckpt']",  # it was resumed from step 4
    ]


# --- ranks --------------------------------------------------------------------------------------------------------

RANKS = """
from lightning_runs import *
from torch.distributed.fsdp import fully_shard
kit = kit_of(NAMES[0])
checkpoints = AsyncTarCheckpointIO()

class Sharded(kit.Model):
    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for layer in (self.layers[0], self.layers[2], self.layers):
            fully_shard(layer, mesh=mesh)

def model_parallel(ours=True):
    strategy = kit.pytorch.strategies.ModelParallelStrategy(data_parallel_size=here.size, tensor_parallel_size=1)
    return checkpoints.sharded(strategy) if ours else strategy

def train(model, folder, ckpt_path=None, *, steps=12, ours=True, saved=(), **options):
    saved = kit.ModelCheckpoint(folder, **{"every_n_train_steps": 2, "save_top_k": 1, "filename": "{step}", **dict(saved)})
    with quiet():
        trainer = trainer_of(kit, folder, checkpoints if ours else None, saved, max_steps=steps, devices=here.size, **options)
        trainer.fit(model, batches(16), ckpt_path=ckpt_path)
    here.tell(model.losses)
"""
ELASTIC = {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": 0}


def losses_of(worlds: Worlds, size: int, script: str, **options: Any) -> dict[str, str]:
    return worlds.run(size, RANKS + script, **ELASTIC, **options)[0].told[-1]


def test_ddp_of_two_goes_on_bit_for_bit(worlds, tmp_path):
    train = "train(kit.Model(), {!r}, {!r}, steps={}, ours={}, strategy='ddp')"
    plain = losses_of(worlds, 2, train.format(str(tmp_path / "plain"), None, 8, False))
    begun = losses_of(worlds, 2, train.format(str(tmp_path / "ours"), None, 4, True))
    path = tmp_path / "ours" / "step=4.ckpt"
    assert loaded(path)["global_step"] == 4
    resumed = losses_of(worlds, 2, train.format(str(tmp_path / "ours"), str(path), 8, True))
    assert begun | resumed == plain


def test_fsdp2_of_four_goes_on_on_two_as_with_lightnings_own_folders(worlds, tmp_path):
    """Ours and Lightning's, and a training that begins with one and goes on with the other."""
    train = "train(Sharded(16), {!r}, {!r}, steps={}, ours={}, strategy=model_parallel({}))"
    for ours in (True, False):
        folder = str(tmp_path / f"{ours}")
        losses_of(worlds, 4, train.format(folder, None, 4, ours, ours))
    assert names_in(tmp_path / "True") == ["step=4.ckpt"]
    names = sorted(path.name for path in (tmp_path / "True" / "step=4.ckpt").iterdir())
    assert [name.partition(".")[0] for name in names] == [
        "archives",
        "layout",
        "manifest",
        "meta",
        *(f"rank_0000{i}" for i in range(4)),
    ]
    resumed = [
        losses_of(
            worlds,
            2,
            train.format(str(tmp_path / f"new-{i}"), str(tmp_path / f"{begun}" / "step=4.ckpt"), 8, ours, ours),
        )
        for i, (begun, ours) in enumerate([(True, True), (False, False), (False, True)])
    ]
    assert [*resumed[0]] == ["4", "5", "6", "7"]
    assert resumed[0] == resumed[1] == resumed[2]
    async_ckpt.verify(tmp_path / "True" / "step=4.ckpt")
    weights = async_ckpt.load(tmp_path / "True" / "step=4.ckpt")["state_dict"]
    assert {name: tuple(weight.shape) for name, weight in weights.items()}["layers.0.weight"] == (16, 4)


def test_fsdp2_of_one_rank_goes_on_on_two(worlds, tmp_path):
    train = f"train(Sharded(16), {str(tmp_path / 'run')!r}, {{!r}}, steps={{}}, strategy=model_parallel())"
    losses_of(worlds, 1, train.format(None, 4))
    assert [*losses_of(worlds, 2, train.format(str(tmp_path / "run" / "step=4.ckpt"), 6))] == ["4", "5"]


def test_fabric_saves_shards_and_loads_them_on_another_mesh(worlds, tmp_path):
    script = """
import torch
from async_ckpt import StateMismatchError, load

def parallelize(model, mesh):
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["data_parallel"])
    return model

strategy = checkpoints.sharded(kit.fabric.strategies.ModelParallelStrategy(parallelize, here.size, 1))
fabric = kit.Fabric(accelerator="cpu", devices=here.size, strategy=strategy)
fabric.launch()
torch.manual_seed(here.size)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
model.register_buffer("statistics", torch.tensor([10.0 + here.rank]))  # of each rank, as batch norm has them
model = fabric.setup_module(model)
optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.1))
checkpoints.guard = optimizer

def step():
    loss = model(torch.ones(2, 6)).square().sum()
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item().hex()

state = {"model": model, "optimizer": optimizer, "step": 0, "words": ["a"]}
path = PATH
if here.size == 4:
    for number in range(3):
        step()
        state["step"] = number
        fabric.save(path, state)
    next_loss = step()
    checkpoints.wait()
    here.tell([next_loss, [report.step for report in checkpoints.reports()]])
else:
    before = model.statistics.clone(), next(model.parameters()).to_local().clone()
    for more in ({"optimizer 2": optimizer}, {"note": ""}):  # which the checkpoint lacks
        try:
            fabric.load(path, {**state, **more})
        except (KeyError, StateMismatchError) as error:
            assert str(path) in str(error) and next(iter(more)) in str(error), error
        else:
            raise AssertionError("was loaded")
        assert torch.equal(model.statistics, before[0])
        assert torch.equal(next(model.parameters()).to_local(), before[1])
    rest = fabric.load(path, state)
    here.tell([step(), state["step"], state["words"], rest, model.statistics.item()])
"""
    path = tmp_path / "x.ckpt"
    script = script.replace("PATH", repr(str(path)))
    saved = worlds.run(4, RANKS + script, **ELASTIC)
    assert saved[0].told[0][1] == [0, 1, 2]
    restored = worlds.run(2, RANKS + script, **ELASTIC)
    for rank in restored:  # on another number of ranks, each gets the statistics of rank 0
        assert rank.told[0] == [saved[0].told[0][0], 2, ["a"], {}, 10.0]
    assert [entry.name for entry in tmp_path.iterdir() if "ckpt" in entry.name] == ["x.ckpt"]


@pytest.mark.parametrize("package", ["fabric", "pytorch"])
def test_the_methods_of_fsdp_strategy_save_shards_and_load_them_on_another_number_of_ranks(worlds, tmp_path, package):
    """Called by hand, since Lightning takes that strategy on GPUs only."""
    script = """
import torch
from torch.distributed.fsdp import FullyShardedDataParallel

strategy = kit.PACKAGE.strategies.FSDPStrategy(state_dict_type="sharded")
strategy.parallel_devices = [torch.device("cpu")] * here.size
strategy.cluster_environment = kit.fabric.plugins.environments.TorchElasticEnvironment()
checkpoints.sharded(strategy)
torch.manual_seed(here.size)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

def step():
    loss = model(torch.ones(2, 6)).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item().hex()

if "PACKAGE" == "fabric":
    state = {"model": model, "optimizer": optimizer, "step": 2}

    def save():
        strategy.save_checkpoint(PATH, state)

    def load():
        return strategy.load_checkpoint(PATH, state)
else:
    strategy.model, strategy._lightning_module, strategy.optimizers = model, kit.Model(), [optimizer]

    def save():
        states = {"state_dict": strategy.lightning_module_state_dict(), "optimizer_states": [strategy.optimizer_state(optimizer)]}
        strategy.save_checkpoint({**states, "global_step": 2}, PATH)

    def load():
        return strategy.load_checkpoint(PATH)

if here.size == 4:
    for _ in range(3):
        step()
    save()
    next_loss = step()
    checkpoints.wait()
    here.tell(next_loss)
else:
    here.tell([load(), step()])
"""
    script = script.replace("PACKAGE", package).replace("PATH", repr(str(tmp_path / "x.ckpt")))
    saved = worlds.run(4, RANKS + script, **ELASTIC)
    restored = worlds.run(2, RANKS + script, **ELASTIC)
    assert restored[0].told == [[{} if package == "fabric" else {"global_step": 2}, saved[0].told[0]]]


def test_a_folder_of_shards_has_no_name_before_it_is_whole(worlds, tmp_path):
    script = """
here.at("manifest", here.die) if here.rank == 0 else None
train(Sharded(16), FOLDER, steps=4, strategy=model_parallel())
"""
    script = RANKS + script.replace("FOLDER", repr(str(tmp_path / "run")))
    world = worlds.start(2, script, **ELASTIC)
    world.wait_for("dead0")
    world.kill(1)
    world.ended(killed={0, 1})
    assert [path.name for path in (tmp_path / "run").glob("*.ckpt")] == []
    assert [path.name for path in (tmp_path / "run").glob(".*saving")] == [".step=2.ckpt.async_ckpt-saving"]
    losses_of(worlds, 2, f"train(Sharded(16), {str(tmp_path / 'run')!r}, steps=4, strategy=model_parallel())")
    assert names_in(tmp_path / "run") == ["step=4.ckpt"]


def test_shards_are_saved_once_under_the_names_of_both_the_newest_and_the_last_checkpoint(worlds, tmp_path):
    folder = tmp_path / "run"
    call = "train(Sharded(16), {!r}, {!r}, steps={}, saved={{'save_last': True}}, strategy=model_parallel())"
    losses_of(worlds, 2, call.format(str(folder), None, 4))
    assert names_in(folder) == ["last.ckpt", "step=4.ckpt"]
    for path in (folder / "step=4.ckpt").iterdir():
        assert (folder / "last.ckpt" / path.name).samefile(path)
    losses = losses_of(worlds, 2, call.format(str(folder), "last", 8))
    assert names_in(folder) == ["last.ckpt", "step=8.ckpt"]
    assert [*losses] == ["4", "5", "6", "7"]


def test_a_folder_that_another_training_has_is_refused_on_all_ranks(worlds, tmp_path):
    script = """
try:
    train(kit.Model(), FOLDER, strategy="ddp")
except Exception as error:
    here.tell([type(error).__name__, str(error)])
"""
    with FolderHold(tmp_path / "run"):
        told = [
            rank.told[0]
            for rank in worlds.run(2, RANKS + script.replace("FOLDER", repr(str(tmp_path / "run"))), **ELASTIC)
        ]
    assert [name for name, _ in told] == ["RunTakenError", "PeerFailedError"]
    assert all(f"another trainer (process {os.getpid()} on " in text for _, text in told)


@pytest.mark.parametrize("knows", ["the rank itself", "rank 0"])
def test_a_rank_that_fails_fails_the_next_save_on_all_ranks(worlds, tmp_path, knows):
    """Also while rank 0 has not heard of it yet: it would wait for the shards of a rank that has ended its training."""
    script = """
from async_ckpt import StorageFullError
from async_ckpt.core.storage.local import LocalSink
from racing import until

def full(self, *args):
    raise StorageFullError("no space left")

def know():
    if here.rank == FIRST:
        until(lambda: not checkpoints._saves._queue._saves_under_way())
    here.meet("known")

if here.rank == 1:
    LocalSink.finish = full
elif FIRST == 1:
    here.at("verdict", lambda: here.hear("raised"))
model = Sharded(16)
model.at_step = {3: know}
try:
    train(model, FOLDER, strategy=model_parallel())
except Exception as error:
    here.tell([len(model.losses), type(error).__name__, str(error)])
    here.say("raised")
"""
    script = script.replace("FIRST", "1" if knows == "the rank itself" else "0")
    first, second = worlds.run(2, RANKS + script.replace("FOLDER", repr(str(tmp_path / "run"))), **ELASTIC)
    assert first.told[0][:2] == [4, "PeerFailedError"]
    assert second.told[0][:2] == [4, "StorageFullError"]
    assert "rank 1" in first.told[0][2]
    assert "no space left" in first.told[0][2]
    assert files_in(tmp_path / "run") == []


@pytest.mark.parametrize("point", ["write", "manifest"])
def test_a_folder_that_is_deleted_while_shards_are_saved_there_fails_that_save(worlds, tmp_path, point):
    """If rank 0 alone is concerned, the others would hear of it at the next save."""
    script = """
import shutil

def delete():
    if not here.is_said("deleted"):
        here.say("deleted")
        shutil.rmtree(FOLDER, ignore_errors=True)  # the other rank may write there meanwhile

here.at(POINT, delete) if here.rank == 0 else None
try:
    train(Sharded(16), FOLDER, steps=2, strategy=model_parallel())
except Exception as error:
    here.tell(type(error).__name__)
"""
    script = script.replace("FOLDER", repr(str(tmp_path / "run"))).replace("POINT", repr(point))
    first, _ = worlds.run(2, RANKS + script, **ELASTIC)
    # The other one may have said yes before.
    assert first.told in (["StorageUnavailableError"], ["PeerFailedError"])
    assert [path.name for path in (tmp_path / "run").glob("*.ckpt")] == []


# The ranks of a machine die together, at a call of one of them that changes the disk.
DYING_TOGETHER = """
import json, os, signal
import torch.distributed as dist
from children import die_at
write, pids = os.write, [None] * here.size
here.tell = lambda what: write(1, (json.dumps(what) + "\\n").encode())  # to the test, which is no file
dist.all_gather_object(pids, os.getpid())

def die():
    for pid in sorted(pids, key=os.getpid().__eq__):  # itself last
        os.kill(pid, signal.SIGKILL)

count = die_at({number} if here.rank == {who} else {never}, die)
saved = {{"every_n_train_steps": 1, "save_last": "link"}}
train(Sharded(16), {folder!r}, {ckpt_path!r}, steps=5, saved=saved, strategy=model_parallel())
here.tell(count())
"""


def test_whenever_ranks_that_save_shards_are_killed_their_newest_folder_is_whole_and_they_go_on_bit_for_bit(
    worlds, quick_path
):
    def run(folder: Path, ckpt_path: object = None, number: int = NEVER, who: int = 0) -> list[Any]:
        script = DYING_TOGETHER.format(
            number=number, who=who, never=NEVER, folder=str(folder), ckpt_path=ckpt_path and str(ckpt_path)
        )
        return worlds.start(2, RANKS + script, **ELASTIC).ended(failed=() if number == NEVER else {0, 1})

    whole = run(quick_path / "whole")
    losses, num_calls = whole[0].told[0], [rank.told[1] for rank in whole]
    for moment in some(range(20), 20):
        draw, folder = random.Random(moment), quick_path / f"killed-{moment}"
        who = draw.randrange(2)
        killed = run(folder, None, draw.randrange(1, num_calls[who]), who)
        assert {rank.status for rank in killed} <= {0, -signal.SIGKILL}, [rank.err for rank in killed]
        found = {path: steps_of_shards(path) for path in folder.glob("*.ckpt")} if folder.is_dir() else {}
        newest = max(found, key=found.__getitem__, default=None)
        step = found.get(newest, 0)
        assert all(name.name in ("last.ckpt", f"step={at}.ckpt") for name, at in found.items())
        assert {*found.values()} <= {step - 1, step}
        resumed = run(folder, newest)[0].told[0]
        assert resumed == {at: losses[at] for at in map(str, range(step, 5))}
        assert steps_of_shards(folder / "last.ckpt") == 5
        assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def steps_of_shards(folder: Path) -> int:
    """The step of a folder that is whole."""
    async_ckpt.verify(folder)
    assert async_ckpt.load(folder, select="optimizer_0")
    return loaded(folder / "meta.pt")["global_step"]
