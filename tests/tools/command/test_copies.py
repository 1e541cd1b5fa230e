"""`async-ckpt cp`: a run at another root, whole, or some of its steps, after any interruption."""

import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from archives import forge_manifest
from commands import documented, run_command, store_options
from folders import read as tree_of
from published import flip
from rank_archives import commit, write_all
from slices import some
from states import leftovers, open_run

import async_ckpt

# `cp` with the kill armed; prints how many calls it made.
DYING = """
import contextlib, io, sys
from children import die_at
from async_ckpt.tools.command.main import status_of
target, source, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
count = die_at(number)
with contextlib.redirect_stdout(io.StringIO()):
    assert status_of(["cp", source, target]) == 0
print(count())
"""


# `cp` that waits at the end of each archive until a file is there.
WAITING = """
import sys, time
from pathlib import Path
from async_ckpt.tools.command.main import main
from async_ckpt.core.storage.local import LocalSink
source, target, goes_on = sys.argv[1:]
finish = LocalSink.finish
def waiting(self, *arguments):
    print("finishing", flush=True)
    while not Path(goes_on).exists():
        time.sleep(0.01)
    finish(self, *arguments)
LocalSink.finish = waiting
main(["cp", source, target])
"""


def saved(root: Any, steps: int = 4, **options: Any) -> Any:
    """A run whose later steps borrow a group from the first."""
    base = {"w": torch.arange(5000.0)}
    with open_run(root, **options) as ckpt:
        for step in range(1, steps + 1):
            state = {"base": base, "own": torch.full((3000,), float(step))}
            unchanged = "base" if step > 1 else None
            ckpt.save(state, step, unchanged=unchanged, record={"loss": abs(step - 3.0), "size": step}).result()
    return root


def assert_is_copy(target: Any, steps: list[int]) -> None:
    with open_run(target) as ckpt:
        assert ckpt.steps() == steps
        for step in steps:
            loaded = ckpt.load(step)
            assert torch.equal(loaded["base"]["w"], torch.arange(5000.0))
            assert torch.equal(loaded["own"], torch.full((3000,), float(step)))
        if steps:
            assert ckpt.latest() == steps[-1]


def outcomes(*arguments: Any) -> dict[int, str]:
    return {row["step"]: row["outcome"] for row in documented("cp", *arguments)["steps"]}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return saved(tmp_path / "a")


def test_a_run_is_copied_with_tracker_and_journal_and_the_source_stays_as_it_was(tmp_path, source):
    before, target = tree_of(source), tmp_path / "b"
    assert outcomes(source, target) == dict.fromkeys((1, 2, 3, 4), "copied")

    assert_is_copy(target, [1, 2, 3, 4])
    assert async_ckpt.verify(target).steps == (1, 2, 3, 4)
    assert (target / "latest").read_text() == "step_00000004\n"
    assert (target / "checkpoints.jsonl").read_bytes() == (source / "checkpoints.jsonl").read_bytes()
    assert tree_of(source) == before
    assert leftovers(target) == []


def test_what_is_there_is_not_copied_again(tmp_path, source):
    target = tmp_path / "b"
    assert outcomes(source, target, "--steps", "2:3") == {1: "copied, lends", 2: "copied", 3: "copied"}
    inodes = {path: path.stat().st_ino for path in target.rglob("*.tar")}

    assert outcomes(source, target) == {1: "was there", 2: "was there", 3: "was there", 4: "copied"}
    assert {path: path.stat().st_ino for path in inodes} == inodes


def test_an_archive_that_an_interrupted_copy_has_left_is_not_copied_again(tmp_path, source):
    target = tmp_path / "b"
    (archive,) = (source / "step_00000001").glob("*.tar")
    (target / "step_00000001").mkdir(parents=True)
    there = Path(shutil.copy(archive, target / "step_00000001"))
    inode = there.stat().st_ino

    run_command("cp", source, target)
    assert there.stat().st_ino == inode
    assert_is_copy(target, [1, 2, 3, 4])


def test_half_an_archive_is_copied_again(tmp_path, source):
    target = tmp_path / "b"
    (archive,) = (source / "step_00000001").glob("*.tar")
    (target / "step_00000001").mkdir(parents=True)
    (target / "step_00000001" / archive.name).write_bytes(archive.read_bytes()[:-512])

    run_command("cp", source, target)
    assert_is_copy(target, [1, 2, 3, 4])


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (("--latest",), [4]),
        (("--best", "loss"), [3]),
        (("--best", "size:min"), [1]),
        (("--best", "size:max"), [4]),
        (("--steps", "3"), [3]),
        (("--steps", ":1", "--steps", "4:"), [1, 4]),
    ],
)
def test_steps_are_chosen(tmp_path, source, options, steps):
    told = outcomes(source, tmp_path / "b", *options)
    assert [step for step, outcome in told.items() if outcome == "copied"] == steps


def test_the_folder_of_a_step_is_copied_as_this_step(tmp_path, source):
    assert outcomes(source / "step_00000002", tmp_path / "b") == {1: "copied, lends", 2: "copied"}


@pytest.mark.parametrize("naming", ["verl", "deepspeed", "skyrl"])
def test_the_naming_of_another_trainer_is_kept(tmp_path, naming):
    source = saved(tmp_path / "a", naming=naming)
    run_command("cp", source, tmp_path / "b")
    trackers = {path.name: path.read_text() for path in source.iterdir() if path.is_file() and "start" not in path.name}
    assert {name: (tmp_path / "b" / name).read_text() for name in trackers} == trackers
    with open_run(tmp_path / "b", naming=naming) as ckpt:
        assert ckpt.latest() == 4


def test_a_step_of_four_ranks_is_copied_with_all_its_archives(tmp_path):
    folder = tmp_path / "a" / "step_00000001"
    folder.mkdir(parents=True)
    commit(
        write_all(folder, 4, lambda rank: {"whole": torch.arange(1e5), "own": rank}, per_rank=("own",)),
        per_rank=("own",),
    )

    assert outcomes(tmp_path / "a", tmp_path / "b") == {1: "copied"}
    assert torch.equal(async_ckpt.load(tmp_path / "b", from_ranks={"own": 2})["whole"], torch.arange(1e5))
    assert len(list((tmp_path / "b").rglob("*.tar"))) == 4


def test_a_run_goes_to_a_bucket_and_back(tmp_path, source, bucket):
    place = bucket.place("runs/b")
    at, keys = store_options(place.options)
    assert run_command("cp", source, place.url, *at, **keys).returncode == 0
    assert_is_copy(place, [1, 2, 3, 4])
    assert run_command("cp", place.url, tmp_path / "back", *at, **keys).returncode == 0
    assert_is_copy(tmp_path / "back", [1, 2, 3, 4])


def test_two_stores_may_have_different_endpoints(source, bucket):
    place = bucket.place("runs/b")
    _, keys = store_options(place.options)
    with open_run(bucket.place("runs/a")) as ckpt:
        ckpt.save({"a": torch.ones(4)}, 1).result()
    wrong = ("--endpoint", "http://127.0.0.1:9", "--region", "us-east-1", "--deadline", "1")
    right = ("--dst-endpoint", place.options["endpoint"], "--dst-deadline", "30")

    assert run_command("cp", source, place.url, *wrong, *right, **keys).returncode == 0
    ended = run_command("cp", bucket.url("runs/a"), place.url, *wrong, *right, **keys)
    assert (ended.returncode, "127.0.0.1:9" in ended.stderr or "runs/a" in ended.stderr) == (74, True)


# --- what must not be harmed --------------------------------------------------------------------------------------


def test_another_version_of_a_step_is_replaced_only_if_that_is_said(tmp_path, source):
    target = tmp_path / "b"
    with open_run(target) as ckpt:
        ckpt.save({"mine": torch.ones(3)}, 2).result()
    before = tree_of(target)

    ended = run_command("cp", source, target)
    assert ended.returncode == 1
    assert "--overwrite" in ended.stderr
    assert tree_of(target) == before
    assert outcomes(source, target, "--overwrite") == {1: "copied", 2: "replaced", 3: "copied", 4: "copied"}
    assert_is_copy(target, [1, 2, 3, 4])


def test_the_steps_of_two_runs_are_not_mixed(tmp_path, source):
    with open_run(tmp_path / "b") as ckpt:
        ckpt.save({"mine": torch.ones(3)}, 9).result()
    before = tree_of(tmp_path / "b")

    for options in ((), ("--latest",), ("--overwrite",)):
        ended = run_command("cp", source, tmp_path / "b", *options)
        assert (ended.returncode, tree_of(tmp_path / "b")) == (1, before)
        assert "Copy to another folder" in ended.stderr
    copy = tmp_path / "c"
    assert run_command("cp", tmp_path / "b", copy).returncode == 0
    assert run_command("cp", source, copy).returncode == 1, "a copy has the manifests alone"


def test_copies_go_on_after_restarts_and_come_back_from_where_the_run_went_on(tmp_path, source):
    copy = tmp_path / "b"
    assert run_command("cp", source, copy).returncode == 0
    for step in (5, 6):  # each is another start
        with open_run(copy, keep=3) as ckpt:
            ckpt.save({"mine": torch.ones(3)}, step).result()
            ckpt.wait()
    assert outcomes(copy, source, "--latest") == {6: "copied"}
    assert outcomes(source, tmp_path / "c", "--steps", "3") == {1: "copied, lends", 3: "copied"}


def test_only_what_was_damaged_is_said_to_be_mended(tmp_path, source):
    target = tmp_path / "b"
    run_command("cp", source, target)
    (archive,) = (target / "step_00000003").glob("*.tar")
    flip(archive, archive.stat().st_size // 2)

    assert outcomes(source, target, "--overwrite") == {1: "was there", 2: "was there", 3: "mended", 4: "was there"}
    (archive,) = (target / "step_00000001").glob("*.tar")
    flip(archive, archive.stat().st_size // 2)
    assert outcomes(source, target, "--steps", "3", "--overwrite") == {1: "mended", 3: "was there"}
    assert_is_copy(target, [1, 2, 3, 4])


def test_a_lender_in_another_version_is_replaced_only_if_that_is_said(tmp_path, source):
    with open_run(tmp_path / "b") as ckpt:
        ckpt.save({"mine": torch.ones(3)}, 1).result()
    before = tree_of(tmp_path / "b")

    ended = run_command("cp", source, tmp_path / "b", "--steps", "3")

    assert (ended.returncode, tree_of(tmp_path / "b")) == (1, before)
    assert "step 1 is committed" in ended.stderr


def test_a_root_to_which_a_living_process_saves_is_refused(tmp_path, source, nursery):
    target = Path(shutil.copytree(source, tmp_path / "b"))
    child = nursery.start(
        """
        import sys, time
        from states import open_run, state_at
        ckpt = open_run(sys.argv[1])
        ckpt.save(state_at(9), 9).result()
        print("saved", flush=True)
        time.sleep(60)
        """,
        target,
    )
    child.wait_for_line("saved")
    ended = run_command("cp", source, target)
    child.send(signal.SIGKILL)
    child.ended()
    assert ended.returncode == 1
    assert str(child.pid) in ended.stderr
    assert run_command("cp", source, target).returncode == 0


def test_damaged_steps_are_not_copied_and_all_others_are(tmp_path, source):
    (archive,) = (source / "step_00000003").glob("*.tar")
    flip(archive, archive.stat().st_size // 2)
    flip(source / "step_00000002/manifest.json", 200)

    told = documented("cp", source, tmp_path / "b", status=1)["steps"]

    assert {row["step"]: row["outcome"] for row in told} == {1: "copied", 2: "damaged", 3: "damaged", 4: "copied"}
    assert "manifest.json" in told[1]["error"]
    assert archive.name in told[2]["error"]
    assert_is_copy(tmp_path / "b", [1, 4])
    assert "step 2 was not copied: " in run_command("cp", source, tmp_path / "b").stdout


def test_a_step_of_a_later_format_is_left_out_and_nothing_of_its_run_is_changed(tmp_path, source):
    forge_manifest(source / "step_00000002/manifest.json", version=9)
    before = tree_of(source)

    assert documented("ls", source)["steps"][1]["marks"] == ["its manifest is of a newer async_ckpt"]
    told = documented("cp", source, tmp_path / "b", status=1)["steps"]
    assert [row["step"] for row in told if row["outcome"] == "copied"] == [1, 3, 4]
    assert [fault["subject"] for fault in documented("verify", source, status=1)["faults"]] == ["step 2"]
    for change in (("prune", "--keep", "last=1", "--yes"), ("repair", "--apply")):
        ended = run_command(change[0], source, *change[1:])
        assert (ended.returncode, "install a newer async_ckpt" in ended.stderr) == (1, True)
    assert tree_of(source) == before


def test_two_copies_to_one_root_at_once_leave_one_whole_run(tmp_path, source):
    command = [sys.executable, "-m", "async_ckpt", "cp", str(source), str(tmp_path / "b")]
    with ThreadPoolExecutor(2) as threads:
        runs = list(
            threads.map(lambda _: subprocess.run(command, capture_output=True, text=True, timeout=120), range(2))
        )
    assert [(run.returncode, run.stderr) for run in runs] == [(0, "")] * 2
    assert_is_copy(tmp_path / "b", [1, 2, 3, 4])
    assert async_ckpt.verify(tmp_path / "b").steps == (1, 2, 3, 4)
    assert leftovers(tmp_path / "b") == []


def test_two_copies_to_one_bucket_at_once_leave_one_whole_run(source, bucket):
    place = bucket.place("runs/b")
    at, keys = store_options(place.options)
    command = [sys.executable, "-m", "async_ckpt", "cp", str(source), place.url, *at]
    children = [
        subprocess.Popen(command, env=os.environ | keys, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    ends = [(child.communicate(timeout=120)[1], child.returncode) for child in children]
    assert ends == [("", 0)] * 2
    assert_is_copy(place, [1, 2, 3, 4])
    assert async_ckpt.verify(place).steps == (1, 2, 3, 4)
    assert bucket.uploads() == []


def test_interrupted_the_target_is_a_run_and_the_same_command_ends_it(tmp_path, source, nursery):
    before, target = tree_of(source), tmp_path / "b"
    child = nursery.start(WAITING, source, target, tmp_path / "go")
    child.wait_for_line("finishing")
    child.send(signal.SIGINT)
    (tmp_path / "go").touch()
    ended = child.ended()

    assert (ended.status, "Traceback" in ended.err) == (130, False), ended.err
    assert_is_copy(target, _committed(target))
    assert tree_of(source) == before
    assert run_command("cp", source, target).returncode == 0
    assert_is_copy(target, [1, 2, 3, 4])
    assert leftovers(target) == []


def test_killed_at_any_call_the_target_is_a_run_and_the_same_command_ends_it(quick_path, nursery):
    source = saved(quick_path / "a", steps=2)
    before = tree_of(source)
    roots = (quick_path / str(number) for number in itertools.count())
    whole = nursery.run(DYING, next(roots), source, 0)
    assert (whole.status, whole.err) == (0, "")
    ends = set()
    for number in some(range(1, int(whole.out) + 1), 3):
        target = next(roots)
        assert nursery.run(DYING, target, source, number).status == -signal.SIGKILL
        steps = _committed(target)
        ends.add(tuple(steps))
        if target.exists():
            assert_is_copy(target, steps)
        assert run_command("cp", source, target).returncode == 0
        assert_is_copy(target, [1, 2])
        assert leftovers(target) == []
        assert (target / "latest").read_text() == "step_00000002\n"
        assert tree_of(source) == before
        shutil.rmtree(target)
    assert () in ends
    assert (1, 2) in ends


def _committed(root: Path) -> list[int]:
    return sorted(int(path.parent.name[-8:]) for path in root.glob("*/manifest.json"))


# --- what cannot be copied ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("{tmp}/nowhere", "{tmp}/b"), 1, "there is nothing at this path"),
        (("{tmp}/a", "{tmp}/a"), 2, "both source and target"),
        (("{tmp}/a", "{tmp}/b", "--steps", "x"), 2, "--steps takes"),
        (("{tmp}/a", "{tmp}/b", "--steps", ":"), 0, ""),
        (("{tmp}/a", "{tmp}/b", "--steps", "7:9"), 1, "1 to 4 are committed"),
        (("{tmp}/a", "{tmp}/b", "--latest", "--best", "loss"), 2, "in one way"),
        (("{tmp}/a", "{tmp}/b", "--best", "accuracy"), 1, "accuracy"),
        (("{tmp}/a/step_00000001", "{tmp}/b", "--latest"), 2, "folder of one step"),
        (("{tmp}", "{tmp}/b"), 2, "is inside the source folder"),
        (("{tmp}/a", "{tmp}/a/inside"), 2, "is inside the source folder"),
        (("{tmp}/a", "{tmp}/x/a", "{tmp}/b"), 2, "2 sources have the name a"),
        (("{tmp}/a", "{tmp}/file/b"), 74, "file"),
        (("{tmp}/a", "/proc/nowhere"), 74, "/proc/nowhere"),
        (("{tmp}/a",), 2, "Missing argument"),
    ],
)
def test_what_cannot_be_copied_is_said(tmp_path, source, arguments, status, said):
    (tmp_path / "file").touch()
    (tmp_path / "x/a").mkdir(parents=True)
    ended = run_command("cp", *(one.format(tmp=tmp_path) for one in arguments))
    assert ended.returncode == status, ended.stderr
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_store_that_never_answers_is_given_up_and_says_which(source):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        at = ("--endpoint", f"http://127.0.0.1:{mute.getsockname()[1]}", "--region", "x", "--deadline", "1")
        env = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
        ended = run_command("cp", source, "s3://bucket/b", *at, **env)
    assert ended.returncode == 74
    assert "bucket" in ended.stderr
