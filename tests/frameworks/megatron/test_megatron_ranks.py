"""Megatron-Core's GPTModel on several ranks with our checkpoints: resumed bit for bit, also in other layouts, and killed at any moment."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_command
from racing import until
from rank_worlds import Worlds
from slices import some
from states import difference

import async_ckpt

pytest.importorskip("megatron.core", reason="megatron-core is not installed: make test-megatron")


WARM = ("megatron_runs",)
TRACKER = "latest_checkpointed_iteration.txt"
NEVER = 10**9
NUM_KILLS = 20

TRAIN = """
from megatron_runs import *
training = Training({tp}, {pp}, {optimizer!r}, dropout={dropout})
{script}
here.tell(training.losses)
"""


def run(
    worlds: Worlds, size: int, tp: int, pp: int, optimizer: str, script: str, *, dropout: float = 0.0
) -> list[dict[str, Any]]:
    """What the ranks of a training tell: their losses at the end."""
    code = TRAIN.format(tp=tp, pp=pp, optimizer=optimizer, script=script, dropout=dropout)
    return [end.told[-1] for end in worlds.run(size, code)]


@pytest.mark.parametrize(
    ("size", "tp", "pp", "optimizer"),
    [(4, 2, 2, "plain"), (4, 2, 1, "dp_reshardable"), (2, 1, 2, "dp_reshardable"), (4, 2, 1, "fully_reshardable")],
)
def test_training_goes_on_with_the_same_losses_and_random_states_to_the_last_bit(
    worlds, tmp_path, size, tp, pp, optimizer
):
    folder = str(tmp_path / "ckpt")
    saved = f"training.train(2); future = training.save({folder!r}); training.train(5); future.result()"
    whole = run(worlds, size, tp, pp, optimizer, saved, dropout=0.1)
    resumed = run(worlds, size, tp, pp, optimizer, f"training.load({folder!r}); training.train(5)", dropout=0.1)

    assert (tmp_path / "ckpt" / TRACKER).read_text() == "2"
    for before, after in zip(whole, resumed, strict=True):
        assert after == {step: loss for step, loss in before.items() if int(step) > 2}
    assert any(any(losses.values()) for losses in resumed)  # the last stage has them


# Adding up in another order gives other bits, so what Megatron's own checkpoint of the same moment gives is the measure.
@pytest.mark.parametrize(
    ("saved", "loaded", "optimizer"),
    [
        ((2, 2, 1), (2, 1, 2), "plain"),
        ((4, 2, 1), (2, 1, 2), "fully_reshardable"),
        ((2, 1, 2), (4, 4, 1), "fully_reshardable"),
        ((4, 2, 2), (1, 1, 1), "fully_reshardable"),
        ((4, 1, 1), (2, 1, 1), "dp_reshardable"),
        ((4, 2, 1), (2, 2, 1), "dp_reshardable"),
    ],
)
def test_other_layouts_go_on_with_the_losses_that_a_checkpoint_of_megatron_gives(
    worlds, tmp_path, saved, loaded, optimizer
):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    theirs.mkdir()
    script = f"training.train(2); training.save({str(ours)!r}).result(); training.save_theirs({str(theirs)!r})"
    run(worlds, *saved, optimizer, script)
    without = "none" if saved[1:] == loaded[1:] else "rng-"
    goes_on = "; training.train(5)"
    after_ours = run(worlds, *loaded, optimizer, f"training.load({str(ours)!r}, without={without!r}){goes_on}")
    after_theirs = run(
        worlds, *loaded, optimizer, f"training.load_theirs({str(theirs)!r}, without={without!r}){goes_on}"
    )

    assert after_ours == after_theirs
    assert [*after_ours[-1]] == ["3", "4", "5"]


def test_the_archive_has_the_tensors_of_megatrons_own_checkpoint_by_their_keys(worlds, tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    theirs.mkdir()
    script = f"training.train(1); training.save({str(ours)!r}).result(); training.save_theirs({str(theirs)!r})"
    run(worlds, 4, 2, 2, "fully_reshardable", script)
    archive, plain = (
        async_ckpt.load(ours / "iter_0000001" / "training.tar", trust=True),
        async_ckpt.load(theirs, trust=True),
    )

    keys = {name for name, value in plain.items() if isinstance(value, torch.Tensor)}
    assert any("mlp.linear_fc1.weight" in key for key in keys)  # which factories have cut
    assert archive.keys() == {*plain, "ranks"}
    for key in keys:
        assert torch.equal(archive[key], plain[key]), key
    async_ckpt.verify(ours / "iter_0000001" / "training.tar")


def test_the_functions_of_megatron_lms_training_loop_save_and_load_by_use(worlds, tmp_path):
    folder = str(tmp_path / "ckpt")
    begun = f"ours.use(); loop = LoopOfMegatronLM(training, {folder!r})"
    layout = (2, 1, 1, "dp_reshardable")
    whole = run(worlds, *layout, f"{begun}; training.train(2); loop.save(); training.train(5)")
    resumed = run(worlds, *layout, f"{begun}; loop.load(); training.train(5)")

    async_ckpt.verify(tmp_path / "ckpt" / "iter_0000002" / "training.tar")
    assert (tmp_path / "ckpt" / TRACKER).read_text() == "2"
    for before, after in zip(whole, resumed, strict=True):
        assert after == {step: loss for step, loss in before.items() if int(step) > 2}


@pytest.mark.parametrize("direction", ["from ours", "from theirs"])
def test_a_converted_checkpoint_goes_on_with_the_losses_of_the_one_that_was_converted(worlds, tmp_path, direction):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs" / "iter_0000002"
    archive = ours / "iter_0000002" / "training.tar"
    theirs.mkdir(parents=True)
    layout = (2, 2, 1, "fully_reshardable")
    goes_on = "training.train(5)"
    if direction == "from ours":
        whole = run(worlds, *layout, f"training.train(2); training.save({str(ours)!r}).result(); {goes_on}")
        theirs.rmdir()
        assert run_command("convert", archive, theirs, "--as", "dcp", "--trust").returncode == 0
        resumed = run(worlds, *layout, f"training.load_theirs({str(theirs)!r}); {goes_on}")
        for before, after in zip(whole, resumed, strict=True):
            assert after == {step: loss for step, loss in before.items() if int(step) > 2}
    else:
        run(worlds, *layout, f"training.train(2); training.save_theirs({str(theirs)!r})")
        assert run_command("convert", theirs, tmp_path / "all.tar", "--trust").returncode == 0
        async_ckpt.verify(tmp_path / "all.tar")
        plain, converted = (async_ckpt.load(path, trust=True) for path in (theirs, tmp_path / "all.tar"))
        assert difference(converted, plain) is None
        assert any("mlp.linear_fc1.weight" in key for key in converted)


_KILLED = """
from children import die_at
from megatron_runs import *
def is_alone():
    return here.is_said(f"dead{{1 - here.rank}}")
here.expire(is_alone)
training = Training(2, 1, "plain")
training.load({folder!r})
count = die_at({number} if here.rank == {rank} else 10**9, here.die)
try:
    while training.iteration < 4:
        training.train(training.iteration + 1)
        training.save({folder!r}).result()
except Exception:
    here.say(f"failed{{here.rank}}")
    raise
here.tell({{"losses": training.losses, "calls": count()}})
here.say(f"done{{here.rank}}")
"""


def killed(folder: Path, rank: int = 0, number: int = NEVER) -> str:
    return _KILLED.format(folder=str(folder), rank=rank, number=number)


def test_whenever_a_rank_is_killed_the_tracker_names_a_whole_iteration_and_training_goes_on(worlds, quick_path):
    whole = [end.told[-1] for end in worlds.run(2, killed(quick_path / "whole"))]
    for number in some(range(NUM_KILLS), NUM_KILLS):
        folder, rank = quick_path / f"killed-{number}", number % 2
        moment = random.Random(number).randrange(1, 1 + whole[rank]["calls"])
        world = worlds.start(2, killed(folder, rank, moment))
        until(lambda w=world, r=rank: any((w.folder / f"{word}{r}").exists() for word in ("dead", "done")))
        for each in (0, 1):
            world.kill(each)
        world.ended(failed={0, 1})

        newest = int((folder / TRACKER).read_text()) if (folder / TRACKER).exists() else 0
        if newest:
            async_ckpt.verify(folder / f"iter_{newest:07d}" / "training.tar")
        for before, after in zip(whole, worlds.run(2, killed(folder)), strict=True):
            assert after.told[-1]["losses"] == {
                step: loss for step, loss in before["losses"].items() if int(step) > newest
            }
        assert (folder / TRACKER).read_text() == "4"


_FAILED = """
from megatron_runs import *
training = Training(2, 1, "plain")
training.train(1)
training.save({folder!r}).result()
training.train(2)
state = training.state()
if here.rank == 1:
    part = next(value for value in state["model"].values() if hasattr(value, "local_shape"))
    part.data = torch.empty(part.local_shape, device="meta")
try:
    here.tell(str(ours.save_checkpoint(state, {folder!r}, 2).result()))
except Exception as error:
    here.tell(f"{{type(error).__name__}}: {{error}}")
"""


def test_what_a_rank_cannot_save_fails_by_name_on_all_and_the_tracker_stays(worlds, tmp_path):
    other, bad = worlds.run(2, _FAILED.format(folder=str(tmp_path)))
    assert bad.told[0].startswith("UnsupportedStateError: ")
    assert "a meta tensor has no values" in bad.told[0]
    assert other.told[0].startswith("PeerFailedError: ")
    assert "rank 1" in other.told[0]
    assert (tmp_path / TRACKER).read_text() == "1"
