"""`async-ckpt move`: processes that bring steps to further places, beside a training, after it, and beside each other."""

import json
import random
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from buckets import Bucket
from children import Child, Nursery
from clients import environment_of
from commands import run_command
from racing import PATIENCE, until
from slices import some
from states import assert_is_state, leftovers, open_run, save_into, state_at

import async_ckpt
from async_ckpt import Keep, Place
from async_ckpt.core.events.log import parse
from async_ckpt.core.runs.manifest import seal

# A training that saves the steps that the test asks for, one file each, and tells what has become of them.
TRAINING = """
import os, sys
from pathlib import Path
from async_ckpt import Keep, Place
from racing import until
from states import open_run, state_at
asked, options, *places = sys.argv[1:]
places = [eval(place) for place in places]
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
with open_run(places, **eval(options)) as ckpt:
    step = ckpt.restore(state_at(0, 9)) or 0
    for mover in ckpt._lineage.tiers.movers:
        def told(source, target, step, *, of=mover.copier._copy_step, **how):
            say("copies", step, target.storage.locate(""))
            return of(source, target, step, **how)
        mover.copier._copy_step = told
    say("begins after", step)
    while True:
        step += 1
        until(lambda: any(Path(asked, name).exists() for name in (str(step), "close")))
        if not Path(asked, str(step)).exists():
            break
        handle = ckpt.save(state_at(step, 9), step)
        handle.at(places[-1]).add_done_callback(lambda done: say("arrived", done.exception() or done.result()))
        say("committed", handle.result().step)
say("closed")
"""


class Training:
    """A training in a process of its own."""

    def __init__(self, nursery: Nursery, folder: Path, *places: Any, env: Any = None, **options: Any) -> None:
        self.asked = folder / f"asked {len(list(folder.iterdir()))}"
        self.asked.mkdir()
        self.child = nursery.start(TRAINING, self.asked, options, *map(_code, places), env=env)
        self.child.wait_for_line("begins after")

    def save(self, *steps: int, told: str = "committed") -> None:
        """Have it save these steps, and wait until it has told so much of each."""
        for step in steps:
            (self.asked / str(step)).touch()
            self.child.wait_for_line(f"{told} {step}\n")

    def close(self) -> Any:
        (self.asked / "close").touch()
        return self.child.ended()


def _code(place: Any) -> str:
    return repr(str(place)) if isinstance(place, Path) else str(place)


def move(nursery: Nursery, *arguments: Any, env: Any = None) -> Child:
    return nursery.start_module("async_ckpt", "move", *arguments, env=env)


def begun(roots: list[Any], step: int = 1, **options: Any) -> None:
    """A run of several places, of which the last has this step, too."""
    save_into(roots, step, mib=9, **options)


def ahead(root: Path, *steps: int, **options: Any) -> None:
    """The first place alone goes on."""
    with open_run(root, **options) as alone:
        alone.restore(state_at(0, 9))
        for step in steps:
            alone.save(state_at(step, 9), step=step).result()


def slow(root: Path, bytes_per_second: float) -> None:
    """Limit the bandwidth of the movers of a run, as a training with `max_bandwidth` tells them."""
    fields = json.loads((root / "tiers.json").read_text())
    del fields["digest"]
    (root / "tiers.json").write_bytes(seal({**fields, "max_bandwidth": bytes_per_second}))


def assert_has(root: Path | str, step: int) -> None:
    assert open_run(root).steps()[-1] == step
    assert_is_state(async_ckpt.load(root), step, 9)


def moved(root: Path) -> list[int]:
    """The steps that movers have brought to a place, by its history."""
    return [event["step"] for event in parse((root / "history.jsonl").read_bytes()) if event["kind"] == "moved"]


def word(root: Path) -> dict[str, Any]:
    """The word of the process that moves steps to a place."""
    told: dict[str, Any] = json.loads((root / "moving.json").read_text())
    return told


# --- beside a training ----------------------------------------------------------------------------------------


def test_a_training_leaves_its_steps_to_a_mover_and_hears_of_their_arrival(nursery, roots, tmp_path):
    training = Training(nursery, tmp_path, *roots)
    training.save(1, told="arrived")
    mover = move(nursery, roots[0])
    mover.wait_for_line(f"step 1 is at {roots[1]}")
    until(lambda: (roots[1] / "moving.json").exists())
    training.save(2, 3, 4, told="arrived")
    ended = training.close()
    assert (ended.status, ended.err) == (0, "")
    copied = [line for line in ended.out.splitlines() if line.startswith("copies")]
    assert len(copied) <= 1  # the first one, which no mover was there for
    mover.send(signal.SIGTERM)
    assert mover.ended().status == 0
    assert_has(roots[1], 4)
    assert {2, 3, 4} <= {*moved(roots[1])}
    assert leftovers(roots[1]) == []
    assert not (roots[1] / "moving.json").exists()


def test_a_mover_goes_on_when_the_training_is_killed(nursery, roots, tmp_path):
    begun(roots)
    training = Training(nursery, tmp_path, *roots, max_bandwidth=5e6)
    mover = move(nursery, roots[0])
    mover.wait_for_line("step 1 is at")
    until(lambda: (roots[1] / "moving.json").exists())
    training.save(2)
    training.child.send(signal.SIGKILL)
    training.child.ended()
    mover.wait_for_line(f"step 2 is at {roots[1]}")
    mover.send(signal.SIGTERM)
    assert mover.ended().status == 0
    assert_has(roots[1], 2)
    training = Training(nursery, tmp_path, *roots)  # the next start takes the far place from the one before
    training.save(3, told="arrived")
    assert training.close().status == 0
    assert_has(roots[1], 3)


def test_a_training_moves_by_itself_again_when_the_mover_is_killed(nursery, roots, tmp_path):
    training = Training(nursery, tmp_path, *roots, max_bandwidth=5e6)
    training.save(1, told="arrived")
    mover = move(nursery, roots[0])
    until(lambda: (roots[1] / "moving.json").exists())
    training.save(2)
    until(lambda: word(roots[1])["step"] is not None)
    mover.send(signal.SIGKILL)
    mover.ended()
    training.child.wait_for_line("arrived 2")
    ended = training.close()
    assert ended.status == 0
    assert "copies 2" in ended.out
    assert_has(roots[1], 2)
    assert leftovers(roots[1]) == ["moving.json"]


def test_a_near_place_that_keeps_one_step_feeds_a_slow_mover(nursery, roots, tmp_path):
    training = Training(nursery, tmp_path, *roots, keep=1, max_bandwidth=12e6)
    training.save(1, told="arrived")
    mover = move(nursery, roots[0])
    until(lambda: (roots[1] / "moving.json").exists())
    training.save(*range(2, 12))
    mover.wait_for_line("step 11 is at")
    ended = training.close()
    assert ended.status == 0
    mover.send(signal.SIGTERM)
    ended = mover.ended()
    assert ended.err == ""
    assert_has(roots[1], 11)
    assert open_run(roots[1]).steps() == [11]
    assert [*moved(roots[1])] != [11]  # nor was each one passed over


def test_a_training_in_memory_brings_its_steps_to_the_disk_by_itself(nursery, quick_path, tmp_path):
    memory, disk, far = quick_path / "run", tmp_path / "disk", tmp_path / "far"
    training = Training(nursery, tmp_path, Place(memory, volatile=True), disk, far)
    training.save(1, told="arrived")
    mover = move(nursery, memory)
    until(lambda: (far / "moving.json").exists() and not (disk / "moving.json").exists())
    training.save(2, 3, told="arrived")
    training.child.send(signal.SIGKILL)
    out = training.child.ended().out
    assert f"copies 3 {far}" not in out
    ahead(memory, 4)  # the training has ended: the mover brings it to the disk, too
    mover.wait_for_line(f"step 4 is at {disk}")
    mover.wait_for_line(f"step 4 is at {far}")
    mover.send(signal.SIGINT)
    assert mover.ended().status == 130
    for root in (disk, far):
        assert_has(root, 4)


def test_a_rollback_of_the_training_reaches_the_far_place(nursery, roots, tmp_path):
    training = Training(nursery, tmp_path, *roots, on_rollback="retire")
    training.save(1, told="arrived")
    mover = move(nursery, roots[0])
    until(lambda: (roots[1] / "moving.json").exists())
    training.save(2, 3, told="arrived")
    assert training.close().status == 0
    with open_run(roots, on_rollback="retire") as ckpt:
        assert ckpt.restore(state_at(0, 9), step=1) == 1
        assert ckpt.save(state_at(20, 9), step=2, overwrite=True).at(roots[1]).result(PATIENCE) == 2
    mover.send(signal.SIGTERM)
    assert mover.ended().status == 0
    assert open_run(roots[1]).steps() == [1, 2]
    assert_is_state(async_ckpt.load(roots[1]), 20, 9)


# --- several movers, and kills --------------------------------------------------------------------------------


def test_of_two_movers_one_copies_and_the_other_goes_on_when_it_is_killed(nursery, roots):
    begun(roots)
    slow(roots[0], 8e6)
    ahead(roots[0], 2)
    movers = [move(nursery, roots[0]) for _ in range(2)]
    for mover in movers:
        mover.wait_for_line("step 2 is at")
    assert moved(roots[1]).count(2) == 1
    first = word(roots[1])["pid"]
    ahead(roots[0], 3)
    until(lambda: word(roots[1])["step"] is not None)
    killed, other = sorted(movers, key=lambda mover: mover.pid != first)
    killed.send(signal.SIGKILL)
    killed.ended()
    other.wait_for_line("step 3 is at")
    other.send(signal.SIGTERM)
    assert other.ended().status == 0
    assert_has(roots[1], 3)
    assert leftovers(roots[1]) == []


@pytest.mark.parametrize("seed", some(range(100), 8))
def test_what_a_training_hears_has_arrived_is_restored_from_there_whenever_movers_are_killed(
    nursery, roots, tmp_path, seed
):
    dice = random.Random(seed)
    training = Training(nursery, tmp_path, *roots, keep=dice.choice([1, 2, None]))
    step = 0
    for _ in range(4):
        mover = move(nursery, roots[0]) if step else None
        for _ in range(3):
            step += 1
            training.save(step)
        time.sleep(dice.uniform(0.0, 0.5))
        if mover is not None:
            mover.send(signal.SIGKILL)
            mover.ended()
    training.child.wait_for_line(f"arrived {step}\n")
    training.child.send(signal.SIGKILL)
    heard = max(int(line.split()[1]) for line in training.child.ended().out.splitlines() if line.startswith("arrived"))
    shutil.rmtree(roots[0])
    with open_run(roots[1]) as alone:
        state = state_at(0, 9)
        restored = alone.restore(state)
        assert restored is not None
        assert restored >= heard
        assert_is_state(state, restored, 9)
    run_command(
        "repair", "--apply", roots[1]
    )  # of the tracker and the journal, which whoever was killed had not reached
    assert run_command("verify", roots[1]).returncode == 0


# --- a store ----------------------------------------------------------------------------------------------------


@pytest.fixture
def store(s3: Any, bucket: Bucket, monkeypatch: Any) -> Bucket:
    """A bucket whose server and keys every process finds in its environment."""
    for name, value in environment_of(s3).items():
        monkeypatch.setenv(name, value)
    return bucket


def test_a_mover_that_is_killed_in_an_upload_is_followed_by_another_which_goes_on(nursery, store, proxy, tmp_path):
    near, far, env = tmp_path / "near", store.url("far"), environment_of(store.server)
    begun([near, far])
    ahead(near, 2)
    proxy.delay(None, kind="complete_multipart_upload")
    mover = move(nursery, near, env={**env, "AWS_ENDPOINT_URL": proxy.endpoint})
    until(lambda: proxy.count(kind="complete_multipart_upload") > 0)
    mover.send(signal.SIGKILL)
    mover.ended()
    assert open_run(far).steps() == [1]
    assert len(store.uploads()) == 1
    mover = move(nursery, near, env=env)
    mover.wait_for_line(f"step 2 is at {far}\n")
    ahead(near, 3, 4)
    mover.wait_for_line(f"step 4 is at {far}\n")
    mover.send(signal.SIGTERM)
    ended = mover.ended()
    assert (ended.status, ended.err) == (0, "")
    assert store.server.options["secret_access_key"] not in (near / "tiers.json").read_text() + ended.out
    assert_has(far, 4)
    assert_is_state(async_ckpt.load(f"{far}/step_00000002"), 2, 9)
    archives = [key for key in store.keys() if key.endswith(".tar")]  # noqa: SIM118
    assert sorted(key.split("/")[1] for key in archives) == [f"step_{n:08d}" for n in open_run(far).steps()]
    assert "far/moving.json" not in store.keys()  # noqa: SIM118


def test_a_mover_to_a_store_goes_on_when_the_training_is_killed(nursery, store, tmp_path):
    near, far, env = tmp_path / "near", store.url("far"), environment_of(store.server)
    training = Training(nursery, tmp_path, near, repr(far), env=env, max_bandwidth=5e6)
    training.save(1, told="arrived")
    mover = move(nursery, near, env=env)
    mover.wait_for_line("step 1 is at")
    until(lambda: "far/moving.json" in store.keys())  # noqa: SIM118
    training.save(2)
    training.child.send(signal.SIGKILL)
    assert "copies 2" not in training.child.ended().out
    mover.wait_for_line(f"step 2 is at {far}\n")
    mover.send(signal.SIGTERM)
    assert mover.ended().status == 0
    assert_has(far, 2)
    training = Training(nursery, tmp_path, near, repr(far), env=env)  # takes the store from the one before
    training.save(3, told="arrived")
    assert training.close().status == 0
    assert_has(far, 3)


# --- once -----------------------------------------------------------------------------------------------------


def test_once_ends_when_all_is_there(roots):
    begun([roots[0], Place(roots[1], every=10, keep=Keep(last=2))], step=10)
    ahead(roots[0], 11, 12, 20, 21)
    ended = run_command("move", roots[0], "--once")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert open_run(roots[1]).steps() == [10, 21]  # the last one, whatever the cadence
    again = run_command("move", roots[0], "--once", "--json")
    assert [json.loads(line) for line in again.stdout.splitlines()] == [
        {"version": 1, "kind": "moved", "place": str(roots[1]), "step": 21}
    ]


def test_once_names_what_is_left_and_ends_with_75(roots):
    far = roots[1] / "inside"
    begun([roots[0], far])
    ahead(roots[0], 2)
    shutil.rmtree(roots[1])
    roots[1].write_text("a file")
    ended = run_command("move", roots[0], "--once")
    assert ended.returncode == 75
    assert str(far) in ended.stderr.splitlines()[-1]


def test_places_may_be_given_by_hand_to_a_run_without_the_file(roots, tmp_path):
    save_into(roots[0], 1, 2, mib=9, naming="verl")
    ended = run_command("move", roots[0], "--to", roots[1], "--to", tmp_path / "farther", "--once")
    assert (ended.returncode, ended.stderr) == (0, "")
    for root in (roots[1], tmp_path / "farther"):
        assert (root / "latest_checkpointed_iteration.txt").read_text() == "2"
        assert_is_state(async_ckpt.load(root), 2, 9)


def test_the_runs_in_a_folder_are_moved_together(tmp_path):
    for name in ("a", "b"):
        begun([tmp_path / "near" / name, tmp_path / "far" / name])
        ahead(tmp_path / "near" / name, 2)
    ahead(tmp_path / "near" / "c", 1)
    ended = run_command("move", tmp_path / "near", "--once")
    assert ended.returncode == 0
    assert "near/c has no tiers.json, and is skipped" in ended.stderr
    for name in ("a", "b"):
        assert_has(tmp_path / "far" / name, 2)


def test_a_run_whose_places_cannot_be_read_keeps_no_other_from_being_moved(tmp_path):
    for name in ("a", "b"):
        begun([tmp_path / "runs" / name, tmp_path / "far" / name])
        ahead(tmp_path / "runs" / name, 2)
    (tmp_path / "runs/a/tiers.json").write_bytes(b"{}")
    ended = run_command("move", tmp_path / "runs", "--once")
    assert ended.returncode == 75
    assert "a/tiers.json cannot be read" in ended.stderr
    assert_has(tmp_path / "far/b", 2)
    assert_has(tmp_path / "far/a", 1)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["near"], 2, r"near has no tiers\.json.*name the further places with --to"),
        (["near", "--to", "near"], 2, "two roots are the same"),
        (["near", "--to", "near/inside"], 2, "lies inside"),
        (["nowhere"], 1, "nothing is committed|nowhere"),
        (["file"], 2, "is a file"),
        (["near", "--to", "far", "--adopt", "--retire"], 2, "exclude each other"),
        (["near", "--to", "far", "--adopt"], 2, "there is no conflict"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, monkeypatch, arguments, status, message):
    monkeypatch.chdir(tmp_path)
    save_into(tmp_path / "near", 1, mib=9)
    (tmp_path / "file").write_text("text")
    ended = run_command("move", *arguments, "--once")
    assert ended.returncode == status
    assert re.search(message, ended.stderr, re.DOTALL), ended.stderr
    assert not (tmp_path / "far").exists()


@pytest.mark.parametrize(
    ("data", "message"), [(b"{}", "cannot be read"), (seal({"version": 9}), "install a newer async_ckpt")]
)
def test_a_file_of_places_that_cannot_be_read_is_an_error(roots, data, message):
    begun(roots)
    (roots[0] / "tiers.json").write_bytes(data)
    ended = run_command("move", roots[0], "--once")
    assert ended.returncode == 1
    assert message in ended.stderr


# --- conflicts ------------------------------------------------------------------------------------------------


def in_conflict(roots: list[Path]) -> None:
    """The far place has steps 5 and 7 of another run, and the near one step 3 of its own."""
    save_into(roots[1], 5, 7, mib=9)
    save_into(roots[0], 3, mib=9)


def test_a_conflict_is_left_and_named(roots):
    in_conflict(roots)
    ended = run_command("move", roots[0], "--to", roots[1], "--once")
    assert ended.returncode == 75
    assert "step 7 there was saved by process" in ended.stderr
    assert "--adopt or --retire" in ended.stderr
    assert open_run(roots[1]).steps() == [5, 7]


def test_a_run_goes_on_from_the_steps_that_it_has_adopted(roots):
    in_conflict(roots)
    ended = run_command("move", roots[0], "--to", roots[1], "--adopt", "--yes", "--once")
    assert ended.returncode == 0, ended.stderr
    assert "2 steps of another run, up to 7, will be adopted" in ended.stderr
    assert "step 7 is the newest then" in ended.stderr
    with open_run(roots) as ckpt:
        state = state_at(0, 9)
        assert ckpt.restore(state) == 7
        assert ckpt.save(state_at(8, 9), step=8).at(roots[1]).result(PATIENCE) == 8
    assert open_run(roots[1]).steps() == [5, 7, 8]


def test_steps_that_were_retired_make_way_and_can_be_put_back(roots):
    in_conflict(roots)
    asked = run_command("move", roots[0], "--to", roots[1], "--retire", "--once")
    assert asked.returncode == 2
    assert "pass --yes" in asked.stderr
    assert open_run(roots[1]).steps() == [5, 7]
    ended = run_command("move", roots[0], "--to", roots[1], "--retire", "--yes", "--once")
    assert ended.returncode == 0, ended.stderr
    assert "will be retired in favour of this run, which has step 3" in ended.stderr
    assert open_run(roots[1]).steps() == [3]
    assert_has(roots[1], 3)
    assert run_command("repair", roots[1], "--unretire", "7", "--apply").returncode == 0
    assert open_run(roots[1]).steps() == [3, 7]
