"""Trainings by trainers of others, killed: the newest checkpoint is whole, and a resumed training has the same losses.

Killed by the number of the call that changes the disk, or a store: at any moment of a save, also where no clock would hit.
Each matrix has 20 moments, which are drawn at random; the tests try one of them. All of them are tried by
`ASYNC_CKPT_MATRICES=all pytest tests/frameworks/trainers/test_trainers_killed.py`.
"""

import json
import random
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from children import Ended
from clients import environment_of
from racing import until
from slices import some

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from trainers import folders

WARM = ("trainers", "accelerated")
NEVER = 10**9


def to_the_end(run: Callable[[object, int], Ended], place: object) -> dict[str, Any]:
    """What a training tells that is not killed."""
    ended = run(place, NEVER)
    assert ended.status == 0, ended.err
    told: dict[str, Any] = json.loads(ended.out.splitlines()[-1])
    return told


def each_killed(run: Callable[[object, int], Ended], places: Callable[[str], object]) -> Iterator[tuple[Any, Any, Any]]:
    """Where trainings were that were killed twice and then ended, and what the last one tells, beside what is expected.

    Each had to find nothing but whole checkpoints: those have the files that they have in a training that goes through.
    """
    expected = to_the_end(run, places("whole"))
    files = {*map(tuple, expected["there"].values())}
    assert len(files) == 1
    for number in some(range(20), 20):
        draw, place = random.Random(number), places(f"killed-{number}")
        for _ in range(2):
            killed = run(place, draw.randrange(1, expected["count"]))
            assert killed.status in (0, -signal.SIGKILL), killed.err
        told = to_the_end(run, place)
        assert {*map(tuple, (told["found"] | told["there"]).values())} == files
        yield place, told, expected


# --- Transformers -------------------------------------------------------------------------------------------------

_TRAINER = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
from children import die_at, die_at_request
from async_ckpt.files import open_file
from trainers import *
kind, place, number = {"Files": Files, "Archives": Archives}[sys.argv[1]], sys.argv[2], int(sys.argv[3])
if "://" in place:
    count = die_at_request(number)
else:
    os.makedirs(place, exist_ok=True)
    count = die_at(number)
found = whole_in(place)
if "checkpoint-8" not in found:
    trainer_of(kind, place, save_total_limit=2).train(resume_from_checkpoint=bool(found))
with open_file(f"{place}/checkpoint-8/trainer_state.json", "r") as file:
    log = json.load(file)["log_history"]
losses = [row["loss"] for row in log if "loss" in row]
print(json.dumps({"found": found, "there": whole_in(place), "count": count(), "losses": losses}))
"""


@pytest.mark.parametrize("kind", ["Files", "Archives"])
def test_a_trainer_that_is_killed_at_any_moment_resumes_with_the_same_losses(nursery, quick_path, kind):
    for folder, told, expected in each_killed(partial(nursery.run, _TRAINER, kind), lambda name: quick_path / name):
        assert told["losses"] == expected["losses"]
        if "checkpoint-8" not in told["found"]:  # it has trained, and has swept
            assert [*told["there"]] == folders(folder)


@pytest.mark.parametrize("kind", ["Files", "Archives"])
def test_a_trainer_that_is_killed_at_any_request_to_a_store_resumes_with_the_same_losses(
    nursery, s3, bucket, tmp_path, kind
):
    def run(url: object, number: int) -> Ended:
        return nursery.start(_TRAINER, kind, url, number, env=environment_of(s3)).ended()

    for _, told, expected in each_killed(run, lambda name: f"s3://{bucket}/{name}"):
        assert told["losses"] == expected["losses"]
        assert "checkpoint-8" in told["there"]


_RANKS = """
import warnings
warnings.simplefilter("ignore")
from children import die_at
from trainers import *
count = die_at({number} if here.rank == {rank} else 10**9, here.die)
found = whole_in({folder!r})
trainer = trainer_of({kind}, {folder!r}, model={model}, max_steps=6, per_device_train_batch_size=4)
trainer.train(resume_from_checkpoint=bool(found))
here.tell({{"losses": losses(trainer), "found": found, "there": whole_in({folder!r}), "count": count()}})
here.say(f"done{{here.rank}}")
"""


@pytest.mark.parametrize(
    ("kind", "model"),
    [("Files", "None"), ("sharded(Archives)", "untied"), ("sharded(Files, version=1)", "untied")],
    ids=["ddp", "fsdp2", "fsdp1"],
)
def test_ranks_of_which_one_is_killed_at_any_moment_resume_with_the_same_losses(worlds, quick_path, kind, model):
    def script(name: str, rank: int = 0, number: int = NEVER) -> str:
        return _RANKS.format(kind=kind, model=model, folder=str(quick_path / name), rank=rank, number=number)

    whole = [end.told[-1] for end in worlds.run(2, script("whole"))]
    files = {*map(tuple, whole[0]["there"].values())}
    for number in some(range(20), 20):
        rank, name = number % 2, f"killed-{number}"
        world = worlds.start(2, script(name, rank, random.Random(number).randrange(1, whole[rank]["count"])))
        until(
            lambda world=world, rank=rank: any((world.folder / f"{word}{rank}").exists() for word in ("dead", "done"))
        )
        for each in (0, 1):  # as torchrun does
            world.kill(each)
        world.ended(failed={0, 1})
        resumed = [end.told[-1] for end in worlds.run(2, script(name))]
        assert {*map(tuple, (resumed[0]["found"] | resumed[0]["there"]).values())} == files
        assert [told["losses"] for told in resumed] == [told["losses"] for told in whole]


def losses_in(out: str) -> dict[int, float]:
    rows = [json.loads(line) for line in out.splitlines() if line.startswith('{"step"')]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@pytest.mark.parametrize("layout", ["transformers", "archive"])
def test_the_example_goes_on_where_it_was_killed(nursery, tmp_path, layout):
    options = ["--steps", "12", "--save-steps", "4", "--layout", layout]
    whole = nursery.start_module("examples.train_trainer", tmp_path / "whole", *options).ended()
    assert whole.status == 0, whole.err
    killed = nursery.start_module("examples.train_trainer", tmp_path / "killed", *options)
    killed.wait_for_line('{"step": 4, "async_ckpt/')
    killed.send(signal.SIGKILL)
    killed.ended()
    resumed = nursery.start_module("examples.train_trainer", tmp_path / "killed", *options).ended()
    assert resumed.status == 0, resumed.err
    again = losses_in(resumed.out)
    assert 12 in again
    assert again.items() <= losses_in(whole.out).items()


# --- accelerate ---------------------------------------------------------------------------------------------------

_STATE = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
from children import die_at
from accelerated import *
layout, folder, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
count = die_at(number)
found = checkpoints_in(folder)
training = Training(folder, total_limit=2)
with AsyncState(training.accelerator, layout) as state:
    try:
        state.load_state()
    except FileNotFoundError:
        pass
    losses = training.run(STEPS - training.counted.number, state.save_state)
print(json.dumps({"found": found, "there": checkpoints_in(folder), "count": count(), "losses": losses}))
"""


@pytest.mark.parametrize("layout", ["archive", "accelerate"])
def test_a_loop_with_accelerate_that_is_killed_at_any_moment_goes_on_with_the_same_losses(nursery, quick_path, layout):
    for folder, told, expected in each_killed(partial(nursery.run, _STATE, layout), lambda name: quick_path / name):
        newest = max([2 * (1 + int(name.partition("_")[2])) for name in told["found"]], default=0)
        assert told["losses"] == expected["losses"][newest:]
        assert "checkpoint_3" in told["there"]
        hidden = {path.name for path in Path(folder, "checkpoints").iterdir() if path.name.startswith(".")}
        known = {f".checkpoint_{number}.{what}" for number in range(4) for what in ("retired", "training.tar")}
        assert {name for name in hidden if "async_ckpt-tmp" not in name} <= known
