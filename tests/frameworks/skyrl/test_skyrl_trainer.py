"""SkyRL's trainer with its folder written in the background: visible when durable, read by its own code, killed anywhere."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from rank_worlds import Worlds
from slices import some

pytest.importorskip("skyrl", reason="skyrl is not installed: make test-frameworks")

WARM = ("skyrl_runs",)
LATEST = "latest_ckpt_global_step.txt"

_WHOLE = """
from skyrl_runs import *
one = TrainingByTrainer(here.root + "-whole")
here.tell([one.train(6, save=False), one.data])
"""
_TRAIN = """
from skyrl_runs import *
one = TrainingByTrainer({root!r}, {layout!r}, keep={keep})
step = one.resume()
losses = one.train({last})
if {layout!r}:
    one.trainer.wait_for_checkpoints()
here.tell([step, losses, one.data])
"""


def trained(worlds: Worlds, root: Path, last: int, layout: str | None = "async_ckpt", keep: int = -1) -> Any:
    """The step that a training resumed from, its losses up to a step, and its data. Each step is saved."""
    script = _TRAIN.format(root=str(root), layout=layout, keep=keep, last=last)
    return worlds.run(1, script)[0].told[-1]


def whole(worlds: Worlds) -> tuple[list[str], list[int]]:
    losses, data = worlds.run(1, _WHOLE)[0].told[-1]
    return losses, data


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The folder of the trainer's checkpoints; the worlds have theirs beside it."""
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints"


def shown(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name[0] != "." and path.name != "history.jsonl")


def test_a_folder_is_read_by_skyrl_s_own_trainer_and_goes_on_with_the_same_losses_and_data(worlds, tmp_path):
    losses, data = whole(worlds)
    assert trained(worlds, tmp_path / "ours", 3, "both") == [0, losses[:3], data[:6]]
    assert shown(tmp_path / "ours") == ["global_step_1", "global_step_2", "global_step_3", LATEST]
    inside = {*shown(tmp_path / "ours" / "global_step_3")}
    assert inside == {"policy", "data.pt", "trainer_state.pt", "_async_ckpt.digests.json"}
    assert not [path.name for path in (tmp_path / "ours").iterdir() if path.name.startswith(".")]
    for layout in ("async_ckpt", None):  # by ours, and by plain SkyRL
        assert trained(worlds, tmp_path / "ours", 5, layout)[1:] == [losses[3:5], data[6:10]]
        (tmp_path / "ours" / LATEST).write_text("3")
        for step in (4, 5):
            (tmp_path / "ours" / f"global_step_{step}").rename(tmp_path / f"{layout}-{step}")

    trained(worlds, tmp_path / "plain", 3, None)
    assert trained(worlds, tmp_path / "plain", 6) == [3, losses[3:], data[6:12]]
    assert (tmp_path / "plain" / LATEST).read_text() == "6"


_CONFIG = """
from skyrl_runs import *
one = TrainingByTrainer({root!r})
one.train(1)
one.trainer.wait_for_checkpoints()
here.tell(torch.load({root!r} + "/global_step_1/trainer_state.pt", weights_only=False)["config"]["trainer"]["ckpt_path"])
here.tell(one.trainer.cfg.trainer.ckpt_path)
"""


def test_the_trainer_s_state_names_the_folder_that_the_user_has_given(worlds, tmp_path):
    root = str(tmp_path / "run")
    assert worlds.run(1, _CONFIG.format(root=root))[0].told == [root, root]


def test_the_newest_checkpoints_stay_and_one_of_a_training_that_went_back_is_the_newest(worlds, root):
    trained(worlds, root, 4, keep=2)
    assert shown(root) == ["global_step_3", "global_step_4", LATEST]

    (root / "global_step_3").rename(root / "global_step_1")
    (root / LATEST).write_text("1")
    script = _TRAIN.format(root=str(root), layout="async_ckpt", keep=2, last=2)
    script = script.replace("step = one", "one.trainer.cfg.trainer.ckpt_interval = 9; step = one")
    worlds.run(1, script)
    assert shown(root) == ["global_step_2", "global_step_4", LATEST]
    assert (root / LATEST).read_text() == "2"


# --- what waits, and what fails -------------------------------------------------------------------------------------

_HELD = """
import threading
from skyrl_runs import *
from async_ckpt.core.storage.local import LocalSink
one, may_finish, real = TrainingByTrainer({root!r}), threading.Event(), LocalSink.finish
def finish(*args, **options):
    may_finish.wait()
    return real(*args, **options)
LocalSink.finish = finish
one.train(1)
losses = one.train(3, save=False)  # while nothing of step 1 is durable
here.tell([name for name in os.listdir({root!r}) if name[0] != "." and name != "history.jsonl"])
may_finish.set()
one.trainer.wait_for_checkpoints()
here.tell(sorted(name for name in os.listdir({root!r}) if name[0] != "." and name != "history.jsonl"))
"""


def test_training_goes_on_while_nothing_is_durable_and_no_folder_shows_until_then(worlds, root):
    told = worlds.run(1, _HELD.format(root=str(root)))[0].told
    assert told == [[], ["global_step_1", LATEST]]


_FAILS = """
import asyncio
from skyrl_runs import *
from async_ckpt.core.storage.local import LocalSink
one, real = TrainingByTrainer({root!r}), LocalSink.finish
def fail(*args, **options):
    raise OSError(5, "the disk is broken")
def train(*_):
    async def trained():
        one.train(one.worker.step + 1)
    return trained()
def outcome(call):
    try:
        call()
    except OSError as error:
        return str(error)
one.train(1)
one.trainer.wait_for_checkpoints()
LocalSink.finish = fail
one.train(2)
here.tell(outcome(one.trainer.save_checkpoints))
one.trainer.save_checkpoints()
here.tell(outcome(one.trainer.load_checkpoints))
RayPPOTrainer.train = train
here.tell(outcome(lambda: asyncio.run(one.trainer.train())))
LocalSink.finish = real
here.tell(sorted(name for name in os.listdir({root!r}) if name != "history.jsonl"))
one.trainer.save_checkpoints()
one.trainer.wait_for_checkpoints()
here.tell(open({root!r} + "/{latest}").read())
"""


def test_the_error_of_a_save_is_raised_by_the_next_one_by_a_load_and_at_the_end_of_the_training(worlds, root):
    *errors, there, latest = worlds.run(1, _FAILS.format(root=str(root), latest=LATEST))[0].told
    assert all("the disk is broken" in error for error in errors)
    assert (len(errors), there, latest) == (3, ["global_step_1", LATEST], "3")


_URL = """
from skyrl_runs import *
one = TrainingByTrainer("s3://bucket/run")
try:
    one.train(1)
except NotImplementedError as error:
    here.tell(str(error))
"""


def test_a_url_is_refused_by_name(worlds):
    (told,) = worlds.run(1, _URL)[0].told
    assert told.startswith("s3://bucket/run: ckpt_path must be a folder")


# --- killed ---------------------------------------------------------------------------------------------------------

# Each function of a save at which the process is killed, before or after it, and the newest step that is left of two.
_POINTS = {
    ("async_ckpt.core.storage.local.LocalSink.finish", "before"): 1,
    ("async_ckpt.face.around.scratch.sync_all", "before"): 1,
    ("async_ckpt.face.around.scratch.publish", "before"): 1,
    ("async_ckpt.face.around.scratch.publish", "after"): 1,
    ("async_ckpt.integrations.skyrl.trainer_folder.name_latest", "after"): 2,
}
_KILLED = """
import pkgutil
from skyrl_runs import *
one = TrainingByTrainer({root!r}, {layout!r}, keep=1)
one.train(1)
one.trainer.wait_for_checkpoints()
owner, name = {point!r}.rpartition(".")[::2]
owner = pkgutil.resolve_name(owner)
real = getattr(owner, name)
def die(*args, **options):
    if {when!r} == "after":
        real(*args, **options)
    here.die()
setattr(owner, name, die)
one.train(2)
one.trainer.wait_for_checkpoints()
"""


@pytest.mark.parametrize(("point", "when"), _POINTS)
def test_a_kill_before_or_after_each_durable_point_leaves_latest_at_what_is_durable(worlds, root, point, when):
    newest = _POINTS[point, when]
    worlds.run(1, _KILLED.format(root=str(root), layout="async_ckpt", point=point, when=when), killed={0})
    assert (root / LATEST).read_text() == str(newest)
    losses, data = whole(worlds)
    assert trained(worlds, root, 3) == [newest, losses[newest:3], data[2 * newest : 6]]
    assert not [path.name for path in root.iterdir() if path.name.startswith(".")]


_ANYWHERE = """
from children import die_at
from skyrl_runs import *
count = die_at({number})
one = TrainingByTrainer({root!r}, {layout!r}, keep=2)
step = one.resume()
losses = one.train(6)
one.trainer.wait_for_checkpoints()
here.tell([step, losses, one.data, count()])
"""


@pytest.mark.parametrize("layout", ["async_ckpt", "skyrl"])
def test_killed_at_any_change_of_the_disk_it_resumes_with_the_same_losses_and_data(worlds, tmp_path, layout):
    """Twice in each training. All twenty moments are tried with ASYNC_CKPT_MATRICES=all."""
    script = _ANYWHERE.format(root=str(tmp_path / "whole"), layout=layout, number=10**9)
    _, losses, data, count = worlds.run(1, script)[0].told[-1]
    for number in some(range(20), 20):
        draw, root = random.Random(number), tmp_path / f"killed-{number}"
        for _ in range(2):
            script = _ANYWHERE.format(root=str(root), layout=layout, number=draw.randrange(1, count))
            worlds.start(1, script).ended(failed={0})
        script = _ANYWHERE.format(root=str(root), layout=layout, number=10**9)
        step, resumed, drawn, _ = worlds.run(1, script)[0].told[-1]
        assert (resumed, drawn) == (losses[step:], data[2 * step :]), f"killed by {number}"
        assert shown(root) == ["global_step_5", "global_step_6", LATEST]
