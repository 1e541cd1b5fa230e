"""What verl's tracker names is durable: saves that are killed, held or fail, of one model or two, and old ones that go."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest
from rank_worlds import Worlds
from slices import some

pytest.importorskip("verl", reason="verl is not installed: make test-frameworks")


WARM = ("verl_runs",)

_TRAIN = """
from verl_runs import *
training = Training(os.environ["RUN"], **{options})
resumed = training.resume()
training.train({last}, every={every})
training.manager.wait()
here.tell({{"losses": training.losses, "resumed": resumed}})
"""


def trained(worlds: Worlds, root: Path, last: int = 6, every: int | None = 2, **options: Any) -> list[dict[str, Any]]:
    script = _TRAIN.format(options=options, last=last, every=every)
    return [end.told[-1] for end in worlds.run(2, script, RUN=str(root))]


def losses(trainings: list[dict[str, Any]], after: int) -> list[dict[str, float]]:
    return [{step: loss for step, loss in one["losses"].items() if int(step) > after} for one in trainings]


def tracked(root: Path) -> str | None:
    path = root / "latest_checkpointed_iteration.txt"
    return path.read_text() if path.exists() else None


def folders(root: Path) -> list[str]:
    return sorted(path.parent.name for path in root.glob("global_step_*/actor"))


# --- killed -------------------------------------------------------------------------------------------------------

_KILLED = """
import signal
from verl_runs import *
from async_ckpt.integrations.verl.part_folder import PartFolder
from async_ckpt.core.storage.local import LocalSink
owner, name, rank = {{"archive": (LocalSink, "finish", 1), "finish": (PartFolder, "finish", 0),
                     "unmark": (PartFolder, "unmark", 0), "name": (PartFolder, "name_step", 0),
                     "named": (PartFolder, "name_step", 0)}}[{point!r}]
real = getattr(owner, name)
def call(self, *args, **options):
    concerned = "global_step_4" in str(getattr(self, "path", self))
    if concerned:
        here.hear("trained-0", "trained-1")  # nobody waits for the dead
    if concerned and {point!r} != "named":
        here.die()
    real(self, *args, **options)
    if concerned:
        here.die()
training = Training(os.environ["RUN"])
if here.rank == rank:
    setattr(owner, name, call)
training.train(4)
here.say(f"trained-{{here.rank}}")
if here.rank == rank:
    signal.pause()  # another thread dies
here.hear(f"dead{{rank}}")
os._exit(0)
"""


def test_what_is_killed_at_a_durable_point_resumes_from_what_the_tracker_names(worlds, tmp_path):
    whole = trained(worlds, tmp_path / "whole", every=None)
    for point, newest in [("archive", 2), ("finish", 2), ("unmark", 2), ("name", 2), ("named", 4)]:
        run = tmp_path / point
        worlds.run(2, _KILLED.format(point=point), RUN=str(run), killed={1 if point == "archive" else 0})
        assert (point, tracked(run)) == (point, str(newest))
        resumed = trained(worlds, run)
        assert [one["resumed"] for one in resumed] == [newest] * 2
        assert losses(resumed, 0) == losses(whole, newest)
        assert tracked(run) == "6"
        assert not [*run.rglob(".async_ckpt.saving")]


_AT_RANDOM = """
from children import die_at
from verl_runs import *
os.makedirs(os.environ["RUN"], exist_ok=True)
count = die_at(int(os.environ["NUMBER"]))
training = Training(os.environ["RUN"], keep=1)
resumed = training.resume()
training.train(6)
training.manager.wait()
here.tell({"losses": training.losses, "resumed": resumed, "count": count()})
"""


def test_what_is_killed_at_any_call_that_changes_the_disk_resumes_with_the_same_losses(worlds, tmp_path):
    """20 random calls with ASYNC_CKPT_MATRICES=all, and one of them without, each in two starts."""

    def run(root: Path, number: int) -> Any:
        return worlds.start(1, _AT_RANDOM, RUN=str(root), NUMBER=number).ended(failed={0})[0]

    [whole] = run(tmp_path / "whole", 10**9).told
    for number in some(range(20), 20):
        draw, root = random.Random(number), tmp_path / f"killed-{number}"
        for _ in range(2):
            killed = run(root, draw.randrange(1, whole["count"] - 20))  # not while it tells
            assert killed.status in (0, -signal.SIGKILL), killed.err
        named = tracked(root)
        [last] = run(root, 10**9).told
        assert last["resumed"] == int(named or 0)
        assert losses([last], 0) == losses([whole], last["resumed"])
        assert tracked(root) == "6"
        assert (root / "global_step_6" / "actor" / "training.tar").is_file()


# --- what waits, and what fails -----------------------------------------------------------------------------------

_HELD = """
import threading
from verl_runs import *
from async_ckpt.core.storage.local import LocalSink
training, may_write, real = Training(os.environ["RUN"], keep=1), threading.Event(), LocalSink.finish
training.train(2)
training.manager.wait()
def finish(self, *args, **options):
    may_write.wait()
    return real(self, *args, **options)
LocalSink.finish = finish
training.train(6, every=4)  # steps 5 and 6 are taken while nothing of step 4 is durable
here.tell([training.global_steps, tracked(training.root), Path(training.root, "global_step_2/actor").exists()])
dist.barrier()
may_write.set()
training.manager.wait()
here.tell([one.step for one in training.manager.reports()])
"""


def test_no_step_waits_for_files_and_the_last_good_one_is_named_and_kept_until_the_next_is_durable(worlds, tmp_path):
    for end in worlds.run(2, _HELD, RUN=str(tmp_path)):
        assert end.told == [[6, 2, True], [2, 4]]
    assert tracked(tmp_path) == "4"
    assert folders(tmp_path) == ["global_step_4"]


_FAILS = """
from verl_runs import *
from async_ckpt.core.storage.local import LocalSink
training, real = Training(os.environ["RUN"], keep=1), LocalSink.finish
def finish(self, *args, **options):
    if here.rank == {rank} and training.global_steps >= 4:
        raise OSError("no room")
    return real(self, *args, **options)
LocalSink.finish = finish
try:
    training.train(6)
except Exception as error:
    here.tell([training.global_steps, str(error)])
LocalSink.finish = real
here.tell(training.resume())
training.train(4)
training.manager.wait()
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_that_fails_on_one_rank_is_raised_on_all_by_the_next_and_the_one_before_stays(worlds, tmp_path, rank):
    for end in worlds.run(2, _FAILS.format(rank=rank), RUN=str(tmp_path)):
        (step, text), resumed = end.told
        assert (step, resumed) == (6, 2)
        assert "no room" in text
    assert tracked(tmp_path) == "4"  # saved again
    assert folders(tmp_path) == ["global_step_4"]


def test_as_many_folders_are_kept_as_verl_keeps_also_of_an_earlier_start(worlds, tmp_path):
    trained(worlds, tmp_path, keep=2)
    assert folders(tmp_path) == ["global_step_4", "global_step_6"]
    trained(worlds, tmp_path, last=8, keep=2)
    assert folders(tmp_path) == ["global_step_6", "global_step_8"]


_AT_ONCE = """
from verl_runs import *
training = Training(os.environ["RUN"], keep=1, async_save=False)
for step in (2, 4, 6):
    training.train(step)
    there = [Path(training.root, f"global_step_{n}/actor/training.tar/manifest.json").exists() for n in (2, 4, 6)]
    dist.barrier()
    here.tell([tracked(training.root), there])
    dist.barrier()
"""


def test_without_async_save_a_save_is_durable_when_it_returns_and_none_goes_that_the_trainer_still_names(
    worlds, tmp_path
):
    for end in worlds.run(2, _AT_ONCE, RUN=str(tmp_path)):
        assert end.told == [[2, [True, False, False]], [4, [True, True, False]], [6, [False, True, True]]]


_MOVES = """
from verl_runs import *
training = Training(os.environ["RUN"], moves_state=True)
training.train(2, every=None)
digest = training.digest()
training.manager.save_checkpoint(os.environ["RUN"] + "/global_step_2/actor", None, 2)
with torch.no_grad():
    for parameter in training.model.parameters():
        parameter.mul_(2)
training.manager.load_checkpoint(os.environ["RUN"] + "/global_step_2/actor")
here.tell(training.digest() == digest)
"""


def test_a_state_that_moves_between_steps_is_copied_before_the_save_returns(worlds, tmp_path):
    assert [end.told for end in worlds.run(2, _MOVES, RUN=str(tmp_path))] == [[True]] * 2


# --- the folder of the step ---------------------------------------------------------------------------------------

_TWO_MODELS = """
import threading
from racing import until
from verl_runs import *
from async_ckpt.integrations.verl.part_folder import PartFolder
root = os.environ["RUN"]
actor, critic = Training(root), Training(root, role="critic")
may_finish, real = threading.Event(), PartFolder.finish
def finish(self, files):
    if self.path.name == "critic":
        may_finish.wait()
    real(self, files)
PartFolder.finish = finish
for one in (actor, critic):
    one.train(1, every=None)
    one.manager.save_checkpoint(f"{root}/global_step_1/{one.role}", None, 1)
actor.manager.wait_durable()
data = Path(root, "global_step_1/data.pt")
found = [tracked(root)]
dist.barrier()
if here.rank == 0:
    torch.save({"at": 1}, root + "/whole.pt")
    data.write_bytes(Path(root, "whole.pt").read_bytes()[:-1])  # is still being written
    found.append(tracked(root))
    data.write_bytes(Path(root, "whole.pt").read_bytes())
    actor.manager._pending.ended.result()  # and has left it to the critic
    found.append(tracked(root))
    may_finish.set()
    until(lambda: tracked(root) == 1)
here.tell(found)
critic.manager.wait()
actor.manager.wait()
"""


def test_the_tracker_waits_for_the_trainers_file_and_for_every_model_of_the_step(worlds, tmp_path):
    first, second = worlds.run(2, _TWO_MODELS, RUN=str(tmp_path))
    assert first.told == [[None, None, None]]
    assert second.told == [[None]]
    assert tracked(tmp_path) == "1"


_SFT = """
import warnings
from verl_runs import *
from verl.utils.checkpoint import CheckpointHandler
training = Training(os.environ["RUN"])
engine = SimpleNamespace(
    save_checkpoint=training.manager.save_checkpoint, load_checkpoint=training.manager.load_checkpoint,
    is_mp_src_rank_with_outputs=lambda: True, get_data_parallel_rank=dist.get_rank)
with contextlib.redirect_stdout(io.StringIO()):
    handler = CheckpointHandler(
        engine, training.train_dataloader, default_local_dir=os.environ["RUN"], max_ckpt_to_keep=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in (1, 2, 3):
            training.train(step, every=None)
            handler.save_checkpoint(step)
    digest = training.digest()
    training.train(4, every=None)
    step = handler.load_checkpoint()
here.tell([step, tracked(os.environ["RUN"]), training.digest() == digest, any("SFT" in str(one.message) for one in caught)])
"""


def test_in_the_folders_of_the_sft_trainer_a_save_waits_until_it_is_durable(worlds, tmp_path):
    assert [end.told for end in worlds.run(2, _SFT, RUN=str(tmp_path))] == [[[3, 3, True, True]]] * 2
    # Step 2 was the one that the tracker named when step 3 was saved.
    assert sorted(path.name for path in tmp_path.glob("*_step_*")) == ["global_step_2", "global_step_3"]
