"""`mark`: from a shell, at all places of a run, and what the other words make of it."""

from pathlib import Path

import pytest
from commands import documented, run_command
from states import everywhere, open_run, state_at

from async_ckpt import Place
from async_ckpt.core.timing import wall_time
from async_ckpt.tools.command.live.run_status import RunWatch


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with open_run(tmp_path / "run") as ckpt:
        for step in (1, 2, 3):
            ckpt.save(state_at(step), step, record={"loss": 1 / step}).result()
    return tmp_path / "run"


def marks_of(root: Path) -> dict[int, tuple[str, str]]:
    with open_run(root) as ckpt:
        return ckpt.marks()


def test_a_step_is_marked_with_a_note_and_the_mark_is_taken_back(root):
    assert run_command("mark", root, "3", "--bad", "loss is nan").stdout.endswith("is marked bad: loss is nan\n")
    assert documented("mark", root, "1", "--good", "")["places"] == [str(root)]
    assert marks_of(root) == {1: ("good", ""), 3: ("bad", "loss is nan")}
    shown = {row["step"]: row["marks"] for row in documented("ls", root, "--best", "loss:min")["steps"]}
    assert shown == {1: ["good"], 2: ["best"], 3: ["latest", "bad: loss is nan", "tracker"]}

    assert run_command("mark", root, "3", "--clear").returncode == 0
    assert marks_of(root) == {1: ("good", "")}


def test_the_rules_of_prune_know_good_and_bad_steps(root):
    run_command("mark", root, "1", "--good", "eval")
    run_command("mark", root, "2", "--bad", "spike")

    assert run_command("prune", root, "--keep", "last=3", "--keep", "good=1", "--yes").returncode == 0
    assert [row["step"] for row in documented("ls", root)["steps"]] == [1, 3]


def test_other_words_leave_marks_where_they_are_and_a_copy_has_them(root, tmp_path):
    run_command("mark", root, "2", "--bad", "spike")
    before = sorted(path.name for path in root.iterdir())

    for words in (("verify", root), ("repair", root, "--apply"), ("ls", root, "--all")):
        assert run_command(*words).returncode == 0
    assert run_command("cp", root, tmp_path / "copy").returncode == 0

    assert sorted(path.name for path in root.iterdir()) == before
    assert marks_of(tmp_path / "copy") == marks_of(root) == {2: ("bad", "spike")}


def test_watch_and_page_show_marks_and_watch_warns_of_a_bad_newest_step_of_a_training(root, tmp_path):
    run_command("mark", root, "3", "--bad", "loss is nan")
    assert documented("watch", root, "--once")["marks"] == {"3": "bad: loss is nan"}
    assert "  bad: loss is nan\n" in run_command("watch", root, "--once").stdout
    assert run_command("page", root, "-o", tmp_path / "page.html").returncode == 0
    assert "<dt>marked bad</dt><dd>1: step 3</dd>" in (tmp_path / "page.html").read_text()

    with open_run(root) as ckpt:
        ckpt.save(state_at(4), 4).result()
        ckpt.mark(4, "bad", note="spike")
        ckpt.save(state_at(5), 5).result()
        watched = RunWatch(Place(root), wall_time)
        assert watched.look().warnings == ()
        assert watched.look().marks == {3: "bad: loss is nan", 4: "bad: spike"}
        ckpt.mark(5, "bad")
        assert watched.look().warnings == ("step 5 is marked bad; a restart passes over it",)
        ckpt.mark(5, None)
        assert (watched.look().warnings, 5 in watched.look().marks) == ((), False)


def test_the_mark_is_put_at_all_places_of_the_run(tmp_path):
    near, far = tmp_path / "near", tmp_path / "far"
    with open_run([near, far]) as ckpt:
        everywhere(ckpt, ckpt.save(state_at(1), 1))

    assert documented("mark", near, "1", "--bad", "spike")["places"] == [str(near), str(far)]
    assert marks_of(near) == marks_of(far) == {1: ("bad", "spike")}


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (("7", "--bad", "x"), 1, "no step 7; committed: 1, 2, 3"),
        (("3",), 2, "pass one of --bad NOTE, --good NOTE and --clear"),
        (("3", "--bad", "x", "--clear"), 2, "pass one of"),
        (("3", "--bad", "x" * 5000), 2, "at most 4,096"),
    ],
)
def test_a_mark_that_makes_no_sense_says_what_to_give(root, words, status, says):
    ended = run_command("mark", root, *words)

    assert (ended.returncode, says in ended.stderr) == (status, True)
    assert marks_of(root) == {}


def test_the_folder_of_a_step_is_no_run(root):
    ended = run_command("mark", f"{root}@3", "3", "--bad", "x")

    assert (ended.returncode, "name the root of its run, and the step after it" in ended.stderr) == (2, True)
