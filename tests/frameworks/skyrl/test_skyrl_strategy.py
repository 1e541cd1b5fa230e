"""SkyRL's FSDP strategy on two ranks, with checkpoints in the background: equal losses, on other ranks, and its own files."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_worlds import Worlds

pytest.importorskip("skyrl", reason="skyrl is not installed: make test-frameworks")

WARM = ("skyrl_runs",)
FOLDER = "global_step_3/policy"
OWN_FILES = [f"{what}_world_size_2_rank_{rank}.pt" for what in ("extra_state", "model", "optim") for rank in (0, 1)]

_SAVE = """
from skyrl_runs import *
one = Training({layout!r})
losses = one.train(3)
one.save_checkpoint({folder!r}, client_state={{"epoch": 2, "rank": here.rank}}, tag="a")
losses = one.train(6)  # while the save goes on
if {layout!r}:
    one.strategy.finalize_pending_saves()
here.tell(losses)
"""
_LOAD = """
from skyrl_runs import *
one = Training({layout!r})
one.train(1)
told = one.load_checkpoint({folder!r})
one.step = 3
keep_full(one.parts, here.root + {kept!r})
here.tell([told, one.train(6)])
"""
_EXPECTED = """
from skyrl_runs import *
one = Training(None)
one.train(3)
keep_full(one.parts, here.root + ".expected")
"""


def saved(worlds: Worlds, tmp_path: Path, layout: str | None) -> tuple[str, list[Any]]:
    """A folder that two ranks have saved, and their losses after that."""
    folder = str(tmp_path / (layout or "plain") / FOLDER)
    return folder, [end.told[-1] for end in worlds.run(2, _SAVE.format(layout=layout, folder=folder))]


def loaded(worlds: Worlds, folder: str, layout: str | None, size: int = 2, kept: str = ".loaded") -> list[Any]:
    return [end.told[-1] for end in worlds.run(size, _LOAD.format(layout=layout, folder=folder, kept=kept))]


def names_in(folder: str) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file())


@pytest.mark.parametrize("layout", ["async_ckpt", "both"])
def test_a_training_goes_on_with_the_same_losses_and_its_own_random_numbers(worlds, tmp_path, layout):
    folder, losses = saved(worlds, tmp_path, layout)
    names = names_in(folder)
    assert [name for name in names if name.endswith(".pt")] == (OWN_FILES if layout == "both" else [])
    assert "huggingface/config.json" in names

    told = loaded(worlds, folder, layout)
    assert [after for _, after in told] == losses
    states = {"tag": "a", "fsdp_strategy": "fsdp", "world_size": 2}
    assert [one for one, _ in told] == [
        {**states, "rank": rank, "client_state": {"epoch": 2, "rank": rank}} for rank in (0, 1)
    ]
    if layout == "both":
        assert [after for _, after in loaded(worlds, folder, None)] == losses  # by plain SkyRL


def test_files_that_plain_skyrl_has_written_are_loaded(worlds, tmp_path):
    folder, losses = saved(worlds, tmp_path, None)
    assert [after for _, after in loaded(worlds, folder, "async_ckpt")] == losses


@pytest.mark.parametrize("size", [1, 3])
def test_other_numbers_of_ranks_resume_from_the_same_state(worlds, tmp_path, size):
    folder = str(tmp_path / FOLDER)
    script = _SAVE.format(layout="async_ckpt", folder=folder).replace('"rank": here.rank', "")
    worlds.run(2, script)
    worlds.run(2, _EXPECTED)
    loaded(worlds, folder, "async_ckpt", size)

    there, expected = (torch.load(f"{worlds.root}.{name}") for name in ("loaded", "expected"))
    assert there.keys() == expected.keys()
    assert [name for name, tensor in there.items() if not torch.equal(tensor, expected[name])] == []


_WITHOUT_OPTIMIZER = """
from skyrl_runs import *
one = Training("async_ckpt")
one.train(1)
before = {{id(p): s["exp_avg"].to_local().clone() for p, s in one.optimizer.state.items()}}
one.load_checkpoint({folder!r}, optimizer=False)
here.tell(all(torch.equal(s["exp_avg"].to_local(), before[id(p)]) for p, s in one.optimizer.state.items()))
here.tell(one.scheduler.last_epoch)
keep_full({{"model": one.model.model}}, here.root + ".model")
"""


def test_without_the_optimizer_the_model_is_loaded_alone(worlds, tmp_path):
    folder, _ = saved(worlds, tmp_path, "async_ckpt")
    worlds.run(2, _EXPECTED)
    assert [end.told for end in worlds.run(2, _WITHOUT_OPTIMIZER.format(folder=folder))] == [[True, 1]] * 2
    there, expected = (torch.load(f"{worlds.root}.{name}") for name in ("model", "expected"))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in there.items())


_OWN_SAVE = """
import warnings
from skyrl_runs import *
one = Training("async_ckpt")
folders = [{root!r} + "/global_step_1/policy", {root!r} + "/global_step_2/policy"]
one.train(1)
one.save_checkpoint(folders[0], client_state={{"step": 1}})
here.tell(one.load_checkpoint(folders[0])["client_state"])
one.train(2)
if here.rank == 1:
    here.at("write", lambda: here.fail(OSError("gone")), step=2)
one.save_checkpoint(folders[1], client_state={{"step": 2}})
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    told = one.load_checkpoint(folders[0])
here.tell([told["client_state"], sum("continues without" in str(one.message) for one in caught)])
try:
    one.strategy.finalize_pending_saves()
except Exception as error:
    here.tell("failed")
"""


def test_a_load_waits_for_the_save_under_way_and_goes_on_without_one_that_fails(worlds, tmp_path):
    ended = worlds.run(2, _OWN_SAVE.format(root=str(tmp_path)))
    assert [end.told for end in ended] == [[{"step": 1}, [{"step": 1}, 1], "failed"]] * 2


_OTHER_RANKS = """
from skyrl_runs import *
one = Training("async_ckpt")
one.train(1)
before = [part.to_local().clone() for part in one.model.parameters()]
try:
    one.load_checkpoint({folder!r})
except Exception as error:
    here.tell([type(error).__name__, error.mismatched, str(error)])
here.tell(all(map(torch.equal, before, [part.to_local() for part in one.model.parameters()])))
"""


@pytest.mark.parametrize("size", [1, 3])
def test_values_that_each_rank_has_saved_for_itself_are_refused_on_other_numbers_of_ranks(worlds, tmp_path, size):
    folder, _ = saved(worlds, tmp_path, "async_ckpt")
    for end in worlds.run(size, _OTHER_RANKS.format(folder=folder)):
        (name, mismatched, text), is_as_before = end.told
        assert (name, mismatched) == ("StateMismatchError", ["client_state.rank"])
        assert "has a separate value for each rank that saved, and the number of ranks has changed" in text
        assert is_as_before


_FAILS = """
from skyrl_runs import *
from async_ckpt.core.storage.local import LocalSink
one = Training("async_ckpt")
one.train(1)
real = LocalSink.finish
def fail(*args, **options):
    raise OSError(5, "the disk of rank 1 is broken")
if here.rank == 1:
    LocalSink.finish = fail
one.save_checkpoint({folder!r} + "/global_step_1/policy")
while one.strategy.has_pending_save():
    pass
LocalSink.finish = real
for call in (lambda: one.save_checkpoint({folder!r} + "/global_step_2/policy"), one.strategy.finalize_pending_saves):
    try:
        call()
        here.tell("saved")
    except Exception as error:
        here.tell(type(error).__name__)
"""


def test_a_rank_that_fails_fails_the_save_on_all_and_the_next_call_says_so(worlds, tmp_path):
    ended = worlds.run(2, _FAILS.format(folder=str(tmp_path)))
    assert [end.told for end in ended] == [["PeerFailedError", "saved"], ["OSError", "saved"]]
    assert not list(tmp_path.glob("global_step_*/policy/async_ckpt/step_*/manifest.json"))


# --- the Tinker backend ---------------------------------------------------------------------------------------------

_TAR = """
from skyrl_runs import *
from async_ckpt.integrations.skyrl import CheckpointBackend
one = Training({layout!r})
one.train(3)
ours, theirs = CheckpointBackend(OneWorker(one)), tinker_backend(OneWorker(one))
if {by_ours}:
    with ours:
        ours.save_checkpoint({tar!r}, "a")
        ours.save_sampler_checkpoint({tar!r} + ".sampler", "a")
else:
    theirs.save_checkpoint({tar!r}, "a")
losses = one.train(6)
again = Training("async_ckpt" if {by_ours} and {layout!r} else None)
(tinker_backend if {by_theirs} else CheckpointBackend)(OneWorker(again)).load_checkpoint({tar!r}, "a")
again.step = 3
here.tell(losses == again.train(6))
"""


@pytest.mark.parametrize(
    ("layout", "by_ours", "by_theirs"), [("async_ckpt", True, True), (None, True, True), (None, False, False)]
)
def test_tars_of_the_tinker_backend_are_loaded_by_ours_and_by_theirs(worlds, tmp_path, layout, by_ours, by_theirs):
    tar = tmp_path / "a" / "000003.tar.gz"
    script = _TAR.format(layout=layout, tar=str(tar), by_ours=by_ours, by_theirs=by_theirs)
    assert [end.told for end in worlds.run(1, script)] == [[True]]
    if by_ours:
        with tarfile.open(f"{tar}.sampler", "r:") as sampler:
            assert {"./config.json", "./model.safetensors"} <= {*sampler.getnames()}
