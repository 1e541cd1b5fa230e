"""The places of a run, as the command shows them, and words that are for all of them."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from commands import documented, run_command
from states import everywhere, open_run, save_into, state_at

from async_ckpt import Place
from async_ckpt.core.storage import volatile


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    return [tmp_path / "memory", tmp_path / "disk"]


def save(roots: list[Path], *steps: int, **options: Any) -> None:
    with open_run([Place(roots[0], volatile=True), Place(roots[1], volatile=False)], **options) as ckpt:
        for step in steps:
            everywhere(ckpt, ckpt.save(state_at(step), step))


def test_each_step_is_shown_with_its_places_and_what_it_outlives(roots):
    save(roots, 1, 2, 3)
    shutil.rmtree(roots[1] / "step_00000003")
    shutil.rmtree(roots[0] / "step_00000001")
    document = documented("ls", roots[0])
    assert [(row["step"], row["places"], row["durable"]) for row in document["steps"]] == [
        (1, [2], "on this machine"),
        (2, [1, 2], "on this machine"),
        (3, [1], "no"),
    ]
    assert [one["outlives"] for one in document["places"]] == ["process", "reboot"]
    (status,) = [documented("watch", roots[0], "--once")]
    assert [max(one["steps"]) for one in status["places"]] == [3, 2]
    shown = run_command("watch", roots[0], "--once").stdout
    assert "durable on this machine: step 2, beyond it: no step" in shown
    page = roots[0].with_name("page.html")
    assert run_command("page", roots[0], "-o", page).returncode == 0
    assert "Durable on this machine: step 2, beyond it: no step." in page.read_text()


def test_a_step_that_a_further_place_was_not_given_is_passed_over(roots):
    save(roots, 1, 4)
    save_into(roots[0], 5, 6)
    save(roots, 7)
    marks = {row["step"]: row["marks"] for row in documented("ls", roots[0])["steps"]}
    assert "passed over by 2" in marks[5]
    assert not any("passed over" in mark for step in (1, 4, 7) for mark in marks[step])


def test_a_step_that_a_store_was_not_given_is_passed_over_however_its_url_ends(tmp_path):
    places = [tmp_path, f"memory://{tmp_path.name}/run/"]
    for step in (1, 3):
        save_into(places, step)
        save_into(tmp_path, step + 1)
    marks = {row["step"]: row["marks"] for row in documented("ls", tmp_path)["steps"]}
    assert "passed over by 2" in marks[2]


def test_a_place_with_steps_of_another_line_is_named_as_a_conflict(roots, tmp_path):
    save(roots, 1)
    save_into(tmp_path / "other", 9)
    shutil.rmtree(roots[1])
    shutil.copytree(tmp_path / "other", roots[1])
    trouble = documented("ls", roots[0])["places"][1]["trouble"]
    assert "step 9 there was saved by process" in trouble
    assert trouble in documented("watch", roots[0], "--once", status=1)["warnings"][0]


@pytest.mark.parametrize("words", [("verify",), ("repair",), ("prune", "--keep", "last=1", "--yes")])
def test_a_word_is_for_one_place_and_with_all_for_each(roots, words):
    save(roots, 1, 2)
    word, *options = words
    assert str(roots[1]) not in run_command(word, roots[0], *options).stdout
    ended = run_command(word, roots[0], *options, "--all")
    assert ended.returncode == 0, ended.stderr
    assert str(roots[0]) in ended.stdout
    assert str(roots[1]) in ended.stdout


def test_what_is_pruned_at_a_further_place_does_not_come_back_and_no_more_is_deleted(roots):
    save(roots, 1, 2, 3, 4)
    assert run_command("prune", roots[1], "--keep", "last=2", "--yes").returncode == 0
    save(roots, 5)
    assert open_run(roots[0]).steps() == [1, 2, 3, 4, 5]
    assert open_run(roots[1]).steps() == [3, 4, 5]


def test_a_copy_from_all_places_has_what_any_of_them_has(roots, tmp_path):
    save(roots, 1, 2)
    shutil.rmtree(roots[0] / "step_00000001")
    shutil.rmtree(roots[1] / "step_00000002")
    assert run_command("cp", roots[0], tmp_path / "all", "--all").returncode == 0
    assert open_run(tmp_path / "all").steps() == [1, 2]
    same = run_command("diff", f"{roots[0]}@2", tmp_path / "all", "--all")
    assert f"{roots[0]}/step_00000002:" in same.stdout


def test_a_folder_of_another_machine_is_known_by_the_mount_table(tmp_path, monkeypatch):
    mounts = tmp_path / "mountinfo"
    monkeypatch.setattr(volatile, "_MOUNTS", mounts)
    for kind, outlives in (("tmpfs", "process"), ("ext4", "reboot"), ("nfs4", "machine"), ("fuse.sshfs", "machine")):
        mounts.write_text(f"36 35 98:0 / {tmp_path} rw,noatime shared:1 - {kind} x rw\n")
        assert Place(tmp_path / "run").outlives == outlives
    assert Place("s3://bucket/run").outlives == "machine"
