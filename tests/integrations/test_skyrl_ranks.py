"""SkyRL's strategy on real ranks: its own files and our archives, side by side, in the tar that its Tinker backend packs."""

from __future__ import annotations

import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_worlds import Worlds
from states import difference

import async_ckpt
from async_ckpt.integrations.skyrl import CheckpointBackend

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks as Linux has them")

SAVE = """
from skyrl_ranks import Strategy, Trainee
one, strategy = Trainee(), Strategy({layout!r})
one.train(3)
torch.manual_seed(100 + here.rank)
strategy.save_checkpoint(one.model, {folder!r}, 0, *one.parts[1:], client_state={{"epoch": 2}}, tag="a")
strategy.finalize_pending_saves()
here.tell(torch.rand(1).item())
"""
LOAD = """
from skyrl_ranks import Strategy, Trainee
one, strategy = Trainee(), Strategy({layout!r})
_, told = strategy.load_checkpoint(one.model, {folder!r}, *one.parts[1:], load_optimizer_states={optimizer})
here.tell([told["client_state"], told["tag"], torch.rand(1).item()])
keep_full({{"model": one.model, "optimizer": one.optimizer, "scheduler": one.scheduler}}, here.root + ".loaded")
"""
EXPECTED = """
from skyrl_ranks import Trainee
one = Trainee()
one.train(3)
keep_full({"model": one.model, "optimizer": one.optimizer, "scheduler": one.scheduler}, here.root + ".expected")
"""


class Dispatch:
    """Its workers are ranks, started for each call: as many as `size` says by then."""

    def __init__(self, worlds: Worlds, layout: str) -> None:
        self._worlds, self._layout, self.size = worlds, layout, 2
        self.told: list[Any] = []

    def save_checkpoint(self, model: str, ckpt_dir: str, tokenizer: Any = None) -> None:
        script = SAVE.format(layout=self._layout, folder=ckpt_dir)
        self.told = [one.told[0] for one in self._worlds.run(self.size, script)]

    def load_checkpoint(
        self,
        model: str,
        ckpt_dir: str,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
    ) -> None:
        script = LOAD.format(layout="async_ckpt", folder=ckpt_dir, optimizer=load_optimizer_states)
        self.told = [one.told[0] for one in self._worlds.run(self.size, script)]

    def save_hf_model(self, model: str, export_dir: str, tokenizer: Any) -> None:
        raise NotImplementedError


def names_in(path: Path) -> list[str]:
    with tarfile.open(path) as tar:
        return tar.getnames()


@pytest.fixture
def assert_trained(worlds: Worlds) -> Callable[[], None]:
    def check() -> None:
        if not Path(f"{worlds.root}.expected").exists():
            worlds.run(1, EXPECTED)
        loaded, expected = (torch.load(f"{worlds.root}.{name}") for name in ("loaded", "expected"))
        assert loaded.keys() == expected.keys()
        for name, tensor in loaded.items():
            assert torch.allclose(tensor, expected[name], atol=1e-6), name

    return check


def test_what_two_ranks_have_saved_four_load_from_a_tar_that_has_the_files_of_skyrl_beside_it(
    worlds: Worlds, tmp_path: Path, assert_trained: Callable[[], None]
):
    dispatch = Dispatch(worlds, "both")
    tar = tmp_path / "out" / "x.tar.gz"
    tar.parent.mkdir()
    with CheckpointBackend(dispatch) as backend:
        backend.save_checkpoint(tar, "a").result()
        drawn = dispatch.told
        names = names_in(tar)
        ours = [name for name in names if name.startswith("./async_ckpt/step_") and name.endswith(".tar")]
        theirs = [name for name in names if name.endswith(".pt")]
        assert len(ours) == 2
        assert len(theirs) == 6

        dispatch.size = 4
        backend.load_checkpoint(tar, "a")
        assert [one[:2] for one in dispatch.told] == [[{"epoch": 2}, "a"]] * 4
        assert_trained()

        dispatch.size = 2  # as many as have saved: each goes on with its own random numbers
        backend.load_checkpoint(tar, "a")
        assert [one[2] for one in dispatch.told] == drawn


ITS_OWN = """
from pathlib import Path
from skyrl_ranks import Strategy, Trainee
one, strategy = Trainee(), Strategy("both")
one.train(1)
state = {{"seen": here.rank, "log": [here.rank, {{"x": (1, here.rank)}}], "epoch": 2}}
strategy.save_checkpoint(one.model, {folder!r}, 0, *one.parts[1:], client_state=state)
strategy.finalize_pending_saves()
strategy = Strategy("async_ckpt")
_, told = strategy.load_checkpoint(one.model, {folder!r}, *one.parts[1:])
here.tell(told["client_state"] == state)
here.tell("fsdp_strategy" in told)  # ours says it
here.meet("loaded")
if here.rank == 0:
    for path in Path({folder!r}).glob("async_ckpt/step_*/manifest.json"):
        path.rename({folder!r} + "/aside")
here.meet("not committed")
_, told = strategy.load_checkpoint(one.model, {folder!r}, *one.parts[1:])
here.tell(told["client_state"] == state)
here.tell("fsdp_strategy" in told)
for nothing in ("/nothing", ""):
    if nothing == "" and here.rank == 0:
        for path in Path({folder!r}).glob("*.pt"):
            path.unlink()
    here.meet("gone" + nothing[1:])
    try:
        strategy.load_checkpoint(one.model, {folder!r} + nothing, *one.parts[1:])
    except Exception as error:
        here.tell([type(error).__name__, "files of SkyRL" in str(error)])
here.meet("done")
if here.rank == 0:
    (step,) = Path({folder!r}).glob("async_ckpt/step_*")
    Path({folder!r} + "/aside").rename(step / "manifest.json")
"""
ON_OTHERS = """
from skyrl_ranks import Strategy, Trainee
one = Trainee()
before = [parameter.to_local().clone() for parameter in one.model.parameters()]
try:
    Strategy("async_ckpt").load_checkpoint(one.model, {folder!r}, *one.parts[1:])
except Exception as error:
    here.tell([type(error).__name__, str(error).partition(";")[0]])
here.tell(all(torch.equal(a.to_local(), b) for a, b in zip(one.model.parameters(), before, strict=True)))
"""


def test_what_differs_by_rank_is_each_ranks_own_and_whatever_is_complete_is_loaded(worlds: Worlds, tmp_path: Path):
    folder = str(tmp_path / "global_step_7" / "policy")

    ended = worlds.run(2, ITS_OWN.format(folder=folder))

    lacking = [["NotCommittedError", True]] * 2
    assert [one.told for one in ended] == [[True, True, True, False, *lacking]] * 2
    (told, is_as_before), *_ = (one.told for one in worlds.run(1, ON_OTHERS.format(folder=folder)))
    assert told[0] == "StateMismatchError"
    assert told[1].startswith("client_state.")
    assert "was saved by each rank for itself" in told[1]
    assert is_as_before


def test_files_of_skyrl_alone_are_read_as_it_reads_them(
    worlds: Worlds, tmp_path: Path, assert_trained: Callable[[], None]
):
    dispatch = Dispatch(worlds, "skyrl")
    with CheckpointBackend(dispatch) as backend:
        backend.save_checkpoint(tmp_path / "x.tar", "a").result()
        backend.load_checkpoint(tmp_path / "x.tar", "a")

    assert not any("async_ckpt" in name for name in names_in(tmp_path / "x.tar"))
    assert dispatch.told[0][:2] == [{"epoch": 2}, "a"]
    assert_trained()


def test_without_the_optimizer_the_model_is_loaded_alone(worlds: Worlds, tmp_path: Path):
    dispatch = Dispatch(worlds, "async_ckpt")
    folder = str(tmp_path / "global_step_7" / "policy")
    dispatch.save_checkpoint("policy", folder)
    dispatch.size = 1
    dispatch.load_checkpoint("policy", folder, load_optimizer_states=False)

    loaded = torch.load(f"{worlds.root}.loaded")
    assert not any(name.startswith("optimizer.state") for name in loaded)
    there = async_ckpt.load(f"{folder}/async_ckpt")
    model = {name.removeprefix("model."): value for name, value in loaded.items() if name.startswith("model.")}
    assert difference(model, dict(there["model"])) is None
    assert async_ckpt.AsyncCheckpointer(f"{folder}/async_ckpt", ranks=(0, 1)).steps() == [7]
