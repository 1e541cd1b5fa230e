"""What other programs find in a run: trackers, and the folders of steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_b import Nursery, assert_is_state, open_run, scripted, state_at, until

from async_ckpt import StorageUnavailableError, Tracker

GONE = StorageUnavailableError("the disk is gone", path="/ckpt")
SKYRL: dict[str, Any] = {"step_format": "global_step_{}", "tracker": "latest_ckpt_global_step.txt"}
VERL: dict[str, Any] = {"step_format": "global_step_{}", "tracker": "latest_checkpointed_iteration.txt"}
DEEPSPEED: dict[str, Any] = {"step_format": "global_step{}", "tracker": Tracker("latest", "global_step{}")}


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with Nursery(tmp_path_factory.mktemp("children")) as nursery:
        yield nursery


def save(root: Path, *steps: int, **options: Any) -> None:
    with open_run(root, **options) as ckpt:
        for step in steps:
            ckpt.save(state_at(step), step=step).result()


# --- what the trackers of other programs hold ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "folder", "tracker", "text"),
    [
        ({}, "step_00000500", "latest", "step_00000500\n"),
        (SKYRL, "global_step_500", "latest_ckpt_global_step.txt", "500"),
        (VERL, "global_step_500", "latest_checkpointed_iteration.txt", "500"),
        (DEEPSPEED, "global_step500", "latest", "global_step500"),
        ({"step_format": "step_{}", "tracker": Tracker("newest.txt", "{:06d}")}, "step_500", "newest.txt", "000500"),
        ({"tracker": Tracker("latest", "runs/a/step_{:08d}\n")}, "step_00000500", "latest", "runs/a/step_00000500\n"),
    ],
    ids=["default", "SkyRL", "verl", "DeepSpeed", "a number with zeros", "a path"],
)  # fmt: skip
def test_a_tracker_holds_what_its_readers_parse_and_reads_back(tmp_path, options, folder, tracker, text):
    save(tmp_path, 400, 500, keep_last=1, **options)

    assert (tmp_path / tracker).read_text() == text
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([folder, tracker, "checkpoints.jsonl"])
    with open_run(tmp_path, **options) as ckpt:
        assert_is_state(ckpt.load(), 500)
        ckpt.save(state_at(501), step=501).result()
        assert (tmp_path / tracker).read_text() == text.replace("500", "501")


@pytest.mark.parametrize("options", [SKYRL, VERL], ids=["SkyRL", "verl"])
def test_the_known_trackers_are_numbers_for_int_and_their_folder_is_found(tmp_path, options):
    save(tmp_path, 7, **options)
    step = int((tmp_path / options["tracker"]).read_text())
    assert (tmp_path / f"global_step_{step}" / "manifest.json").exists()


@pytest.mark.parametrize(
    "text", ["", "x", "{}{}", "{:x}", "{:8d}", "{}\n{}", "{}\nmore", "{step}", "{", "{:o}"]
)
def test_a_tracker_whose_text_has_no_plain_step_is_refused(text):
    with pytest.raises(ValueError, match=r"text of tracker latest .* such as"):
        Tracker("latest", text)


@pytest.mark.parametrize("name", ["", "a/b", "..", ".", "a\\b", "a\nb", "/latest"])
def test_a_tracker_is_a_file_in_the_folder_of_the_run(name):
    with pytest.raises(ValueError, match="name of a file"):
        Tracker(name, "{}")


@pytest.mark.parametrize(
    ("text", "content", "step"),
    [
        ("{}", b"500", 500),
        ("{}", b" 500\r\n", 500),
        ("{}", b"00500\n", 500),
        ("global_step{}", b"global_step500\n", 500),
        ("a.b({})\n", b"a.b(5)", 5),
        ("{}", b"", None),
        ("{}", b"-5", None),
        ("{}", b"5.0", None),
        ("{}", b"500 600", None),
        ("{}", b"\xff\xfe5", None),
        ("{}", "\u0665".encode(), None),
        ("{}", b"9" * 5000, None),
        ("global_step{}", b"500", None),
        ("a.b({})", b"axb(5)", None),
    ],
)
def test_what_a_tracker_reads(text, content, step):
    assert Tracker("latest", text).parse(content) == step


# --- a tracker never moves back --------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["500", "500\n", " 500 ", "0500"])
def test_a_newer_step_that_the_trainer_has_written_stays_until_a_newer_one_is_committed(tmp_path, content):
    tracker = tmp_path / "latest_ckpt_global_step.txt"
    tracker.write_text(content)
    save(tmp_path, 400, 499, keep_last=1, **SKYRL)
    assert tracker.read_text() == content
    save(tmp_path, 501, **SKYRL)
    assert tracker.read_text() == "501"


@pytest.mark.parametrize("content", ["", "latest", "global_step_500", "\x00\xff", "500 600"])
def test_a_tracker_that_names_no_step_is_replaced(tmp_path, content):
    tracker = tmp_path / "latest_ckpt_global_step.txt"
    tracker.write_text(content, encoding="latin-1")
    save(tmp_path, 400, **SKYRL)
    assert tracker.read_text() == "400"


def test_a_tracker_that_is_behind_or_missing_is_moved_on(tmp_path):
    tracker = tmp_path / "latest_ckpt_global_step.txt"
    save(tmp_path, 1, 2, **SKYRL)
    tracker.write_text("1")
    save(tmp_path, 3, **SKYRL)
    assert tracker.read_text() == "3"
    tracker.unlink()
    save(tmp_path, 4, **SKYRL)
    assert tracker.read_text() == "4"


def test_what_the_trainer_writes_while_ours_is_on_its_way_is_not_overwritten(tmp_path):
    tracker = tmp_path / "latest_ckpt_global_step.txt"
    with open_run(tmp_path, **SKYRL) as ckpt, scripted(ckpt) as disk:
        ckpt.save(state_at(1), step=1).result()
        stop = disk.stop("replace", tracker.name, times=1)
        late = ckpt.save(state_at(2), step=2)
        stop.wait_reached()
        tracker.write_text("500")
        stop.release()
        late.result()
    assert tracker.read_text() == "500"


@pytest.mark.parametrize("call", ["put_new", "replace"])
def test_a_slow_process_does_not_move_the_tracker_back_even_for_a_moment(tmp_path, call):
    tracker = tmp_path / "latest"
    if call == "replace":
        save(tmp_path, 1)
    with open_run(tmp_path) as slow, open_run(tmp_path) as fast, scripted(slow) as disk:
        moving = disk.stop(call, "latest", times=1)
        late = slow.save(state_at(2), step=2)
        moving.wait_reached()
        fast.save(state_at(3), step=3).result()
        moved = disk.stop("replace", "checkpoints.jsonl", times=1)  # what comes next after the tracker
        moving.release()
        moved.wait_reached()
        assert tracker.read_text() == "step_00000003\n"
        moved.release()
        late.result()
    assert tracker.read_text() == "step_00000003\n"


SAVING = """
import sys
from async_ckpt import StepBehindError, StepExistsError
from helpers_b import open_run, state_at

with open_run(sys.argv[1], tracker="latest_ckpt_global_step.txt") as ckpt:
    for step in range(int(sys.argv[2]), 40, 3):
        try:
            ckpt.save(state_at(step), step=step).result()
        except (StepBehindError, StepExistsError):
            pass
"""


def test_a_tracker_that_several_processes_write_is_only_ever_seen_to_rise(tmp_path, nursery):
    tracker = tmp_path / "run/latest_ckpt_global_step.txt"
    children = [nursery.start(SAVING, tmp_path / "run", first) for first in (1, 2, 3)]
    seen: list[int] = []

    def last_is_seen() -> bool:
        if tracker.exists():
            seen.append(int(tracker.read_text()))
        return 39 in seen[-1:]

    until(last_is_seen)
    assert [(ended.status, ended.err) for ended in [child.ended() for child in children]] == [(0, "")] * 3
    assert seen == sorted(seen)
    with open_run(tmp_path / "run") as ckpt:
        assert int(tracker.read_text()) == ckpt.latest()


def test_a_tracker_moves_back_from_a_step_that_a_rollback_has_retired(tmp_path):
    tracker = tmp_path / "latest_ckpt_global_step.txt"
    with open_run(tmp_path, on_rollback="retire", **SKYRL) as ckpt:
        for step in (10, 20, 30):
            ckpt.save(state_at(step), step=step).result()
        ckpt.restore(state_at(0), step=10)
        ckpt.save(state_at(15), step=15).result()
    assert tracker.read_text() == "15"


def test_a_rollback_that_died_before_it_moved_the_tracker_is_finished_by_a_process_without_that_option(
    tmp_path,
):
    tracker = tmp_path / "latest_ckpt_global_step.txt"
    with open_run(tmp_path, on_rollback="retire", **SKYRL) as ckpt, scripted(ckpt) as disk:
        for step in (10, 20, 30):
            ckpt.save(state_at(step), step=step).result()
        ckpt.restore(state_at(0), step=10)
        disk.fail("put_new", "manifest.json", error=GONE)
        ckpt.save(state_at(15), step=15).exception()
    assert tracker.read_text() == "30"
    save(tmp_path, 11, **SKYRL)
    assert tracker.read_text() == "11"


def test_a_rollback_takes_nobody_elses_newer_step_from_the_tracker(tmp_path):
    tracker = tmp_path / "latest_ckpt_global_step.txt"
    with open_run(tmp_path, on_rollback="retire", **SKYRL) as ckpt:
        for step in (10, 20):
            ckpt.save(state_at(step), step=step).result()
        tracker.write_text("25")
        ckpt.save(state_at(15), step=15).result()
        assert tracker.read_text() == "25"
        ckpt.save(state_at(20), step=20).result()
        assert tracker.read_text() == "25"


def test_a_step_that_was_retired_and_committed_anew_is_not_moved_back_from_even_for_a_moment(tmp_path):
    tracker = tmp_path / "latest"
    with open_run(tmp_path, on_rollback="retire") as ours, scripted(ours) as disk:
        for step in (10, 20):
            ours.save(state_at(step), step=step).result()
        moving = disk.stop("replace", "latest", times=1)
        late = ours.save(state_at(15), step=15)  # retires 20
        moving.wait_reached()
        save(tmp_path, 20)
        moved = disk.stop("replace", "checkpoints.jsonl", times=1)  # what comes next after the tracker
        moving.release()
        moved.wait_reached()
        assert tracker.read_text() == "step_00000020\n"
        moved.release()
        late.result()
    assert tracker.read_text() == "step_00000020\n"


def test_a_store_that_refuses_every_move_is_told_of_and_the_save_is_committed(tmp_path, caplog):
    refused = FileExistsError("changed")
    with open_run(tmp_path) as ckpt, scripted(ckpt) as disk:
        ckpt.save(state_at(1), step=1).result()
        disk.fail("replace", "latest", error=refused, times=None)
        assert ckpt.save(state_at(2), step=2).result().status == "committed"
        ckpt.wait()
        assert ckpt.metrics()["cleanup_failures"] == 1
        assert "is not moved to step 2" in caplog.text
