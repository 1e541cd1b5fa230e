"""What makes a checkpoint true: one writer wins, readers see all or nothing, old steps go when they may."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest
import torch
from archives import forge_manifest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from racing import Call, until
from scripted_disk import scripted
from states import MIB, assert_is_state, footprint, leftovers, names_below, open_run, state_at

import async_ckpt
from async_ckpt import (
    AsyncCheckpointer,
    CorruptCheckpointError,
    FormatVersionError,
    NotCommittedError,
    StepBehindError,
    StepExistsError,
    StorageUnavailableError,
)
from async_ckpt.runs import journal, manifest
from async_ckpt.runs.retention import Retention
from async_ckpt.runs.run import Run
from async_ckpt.storage.local import LocalStorage

GONE = StorageUnavailableError("the disk is gone", path="/ckpt")


def archives(root: Path, step: int) -> list[str]:
    return sorted(path.name for path in (root / f"step_{step:08d}").glob("*.tar"))


def retired(root: Path, step: int) -> list[Path]:
    return list((root / f"step_{step:08d}").glob("manifest.retired-*.json"))


def records(root: Path) -> list[dict]:
    return [json.loads(line) for line in (root / "checkpoints.jsonl").read_text().splitlines()]


# --- what lies where -------------------------------------------------------------------------------------------


def test_a_run_looks_as_the_manual_says(tmp_path):
    with open_run(tmp_path) as ckpt:
        report = ckpt.save(state_at(500), step=500).result()

    archive = report.path.rpartition("/")[2]
    assert names_below(tmp_path) == [
        "checkpoints.jsonl",
        "latest",
        "step_00000500/manifest.json",
        f"step_00000500/{archive}",
    ]
    rank, attempt, ending = archive.split(".")
    assert (rank, ending) == ("rank_00000", "tar")
    assert len(attempt) == 8
    assert int(attempt, 16) >= 0


def test_a_manifest_names_the_attempt_the_size_and_the_digest_of_the_archive(tmp_path):
    with open_run(tmp_path) as ckpt:
        report = ckpt.save(state_at(5), step=5).result()

    manifest = json.loads((tmp_path / "step_00000005/manifest.json").read_text())
    (archive,) = manifest["archives"]
    assert (manifest["format"], manifest["version"], manifest["step"], manifest["world_size"]) == (
        "async_ckpt",
        1,
        5,
        1,
    )
    assert archive["name"] == f"rank_00000.{manifest['attempt']}.tar"
    assert archive["num_bytes"] == report.num_bytes == Path(report.path).stat().st_size
    assert manifest["created"] > 1_700_000_000


def test_a_run_may_be_moved_to_another_folder(tmp_path):
    with open_run(tmp_path / "here") as ckpt:
        ckpt.save(state_at(1), step=1).result()
    (tmp_path / "here").rename(tmp_path / "there")

    with open_run(tmp_path / "there") as ckpt:
        assert_is_state(ckpt.load(), 1)


# --- one writer wins -------------------------------------------------------------------------------------------


def test_saving_a_committed_step_again_is_refused_at_once(tmp_path):
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_at(1), step=1).result()
        with pytest.raises(StepExistsError, match="overwrite=True") as caught:
            ckpt.save(state_at(1), step=1)
        assert caught.value.step == 1
        assert ckpt.save(state_at(2), step=2).result().status == "committed"


def test_of_two_writers_of_one_step_exactly_one_commits_and_the_other_is_told(tmp_path):
    with open_run(tmp_path) as ours, open_run(tmp_path) as theirs, scripted(ours) as disk:
        stop = disk.stop("put_new", "manifest.json")
        late = ours.save(state_at(1), step=1)
        stop.wait_reached()
        winner = theirs.save({"theirs": True}, step=1).result()
        stop.release()

        error = late.exception()
        assert isinstance(error, StepExistsError)
        assert error.step == 1
        assert ours.load(1) == {"theirs": True}
        assert archives(tmp_path, 1) == [winner.path.rpartition("/")[2]]


def test_when_many_writers_race_for_a_step_one_wins_whole(tmp_path):
    together = threading.Barrier(6)
    won, lost = [], []

    def write(number: int) -> None:
        with open_run(tmp_path, keep_last=None) as ckpt:
            together.wait(60)
            try:
                ckpt.save({"number": number, "w": torch.full((MIB,), number)}, step=3).result()
                won.append(number)
            except StepExistsError:
                lost.append(number)

    for call in [Call(lambda n=n: write(n)) for n in range(6)]:
        call.outcome()

    assert len(won) == 1
    assert len(lost) == 5
    state = async_ckpt.load(tmp_path)
    assert state["number"] == won[0]
    assert bool((state["w"] == won[0]).all())
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_at(4), step=4).result()
    assert leftovers(tmp_path) == []


def test_of_two_overwriters_the_one_that_read_an_older_manifest_loses(tmp_path):
    with open_run(tmp_path) as ours, open_run(tmp_path) as theirs, scripted(ours) as disk:
        ours.save(state_at(1), step=1).result()
        stop = disk.stop("replace", "manifest.json", times=1)
        late = ours.save({"ours": True}, step=1, overwrite=True)
        stop.wait_reached()
        theirs.save({"theirs": True}, step=1, overwrite=True).result()
        stop.release()

        assert isinstance(late.exception(), StepExistsError)
        assert ours.load(1) == {"theirs": True}
        theirs.wait()
        ours.wait()
    assert leftovers(tmp_path) == []


# --- overwriting -----------------------------------------------------------------------------------------------


def test_while_a_step_is_overwritten_the_old_one_loads_until_the_new_one_is_committed(tmp_path):
    with open_run(tmp_path) as ckpt, scripted(ckpt) as disk:
        ckpt.save(state_at(1), step=1).result()
        old = archives(tmp_path, 1)
        stop = disk.stop("replace", "manifest.json")
        handle = ckpt.save({"new": True}, step=1, overwrite=True)
        stop.wait_reached()
        assert_is_state(async_ckpt.load(tmp_path), 1)
        assert ckpt.steps() == [1]
        stop.release()
        report = handle.result()
        assert async_ckpt.load(tmp_path) == {"new": True}
        ckpt.wait()

    assert archives(tmp_path, 1) == [report.path.rpartition("/")[2]]
    assert archives(tmp_path, 1) != old


def test_an_overwrite_that_fails_leaves_the_old_one(tmp_path):
    with open_run(tmp_path) as ckpt, scripted(ckpt) as disk:
        ckpt.save(state_at(1), step=1).result()
        disk.fail("replace", "manifest.json", error=GONE)
        assert ckpt.save({"new": True}, step=1, overwrite=True).exception() is GONE

        assert_is_state(ckpt.load(1), 1)
        assert ckpt.save({"newer": True}, step=1, overwrite=True).result().status == "committed"
        ckpt.wait()
        assert ckpt.load(1) == {"newer": True}


def test_overwrite_of_a_step_that_is_not_there_is_a_save(tmp_path):
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_at(1), step=1, overwrite=True).result()
        assert_is_state(ckpt.load(), 1)


def test_an_older_step_may_be_overwritten_and_the_tracker_stays(tmp_path):
    with open_run(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(state_at(step), step=step).result()
        ckpt.save({"new": True}, step=1, overwrite=True).result()

        assert ckpt.load(1) == {"new": True}
        assert ckpt.steps() == [1, 2]
        assert (tmp_path / "latest").read_text().strip() == "step_00000002"


def test_what_a_reader_has_open_stays_readable_when_its_step_is_overwritten(tmp_path):
    with open_run(tmp_path) as ckpt, open_run(tmp_path) as reader, scripted(reader) as disk:
        ckpt.save(state_at(1), step=1).result()
        stop = disk.stop("open")
        loading = Call(lambda: reader.load(1))
        stop.wait_reached()
        ckpt.save(state_at(1) | {"note": "new"}, step=1, overwrite=True).result()
        ckpt.wait()
        stop.release()
        state = loading.outcome()

    assert state["note"] == "new"
    assert torch.equal(state["model"]["weight"], state_at(1)["model"]["weight"])


def test_a_damaged_manifest_may_be_overwritten(tmp_path):
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_at(1), step=1).result()
        (tmp_path / "step_00000001/manifest.json").write_text("{")
        with pytest.raises(CorruptCheckpointError):
            ckpt.load(1)
        ckpt.save(state_at(1), step=1, overwrite=True).result()
        assert_is_state(ckpt.load(1), 1)


def test_a_manifest_is_never_written_in_place(tmp_path):
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_at(1), step=1).result()
        with open(tmp_path / "step_00000001/manifest.json", "rb") as held:
            before = held.read()
            ckpt.save({"new": True}, step=1, overwrite=True).result()
            held.seek(0)
            assert held.read() == before


def test_no_archive_is_ever_written_again(tmp_path):
    with open_run(tmp_path) as ckpt:
        first = Path(ckpt.save(state_at(1), step=1).result().path)
        stamp = first.stat().st_mtime_ns, first.stat().st_ino
        for step in (2, 3):
            ckpt.save(state_at(step), step=step).result()
        assert (first.stat().st_mtime_ns, first.stat().st_ino) == stamp


# --- the tracker -----------------------------------------------------------------------------------------------


def test_the_tracker_names_the_newest_step_only_after_its_commit(tmp_path):
    with open_run(tmp_path) as ckpt, scripted(ckpt) as disk:
        ckpt.save(state_at(1), step=1).result()
        assert (tmp_path / "latest").read_text() == "step_00000001\n"
        stop = disk.stop("put_new", "manifest.json")
        handle = ckpt.save(state_at(2), step=2)
        stop.wait_reached()
        assert (tmp_path / "latest").read_text() == "step_00000001\n"
        stop.release()
        handle.result()
        assert (tmp_path / "latest").read_text() == "step_00000002\n"


def test_the_tracker_never_moves_back_when_a_slow_writer_commits_late(tmp_path):
    with open_run(tmp_path) as slow, open_run(tmp_path) as fast, scripted(slow) as disk:
        stop = disk.stop("put_new", "latest", times=1)
        late = slow.save(state_at(1), step=1)
        stop.wait_reached()
        fast.save(state_at(2), step=2).result()
        stop.release()
        late.result()

    assert (tmp_path / "latest").read_text() == "step_00000002\n"
    assert [record["step"] for record in records(tmp_path)] == [1, 2]


def test_the_tracker_can_have_another_name_or_be_left_out(tmp_path):
    with open_run(tmp_path / "named", tracker="newest") as ckpt:
        ckpt.save(state_at(1), step=1).result()
    with open_run(tmp_path / "none", tracker=None, keep_last=1) as ckpt:
        for step in (1, 2):
            ckpt.save(state_at(step), step=step).result()

    assert (tmp_path / "named/newest").read_text() == "step_00000001\n"
    assert not (tmp_path / "named/latest").exists()
    assert not (tmp_path / "none/latest").exists()


@pytest.mark.parametrize("content", ["", "step_", "../../etc", "\x00\xff", "step_00000001 step_2"])
def test_nobody_trusts_the_tracker(tmp_path, content):
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_at(1), step=1).result()
        (tmp_path / "latest").write_text(content, encoding="latin-1")

        assert ckpt.latest() == 1
        assert_is_state(ckpt.load(), 1)
        ckpt.save(state_at(2), step=2).result()
    assert (tmp_path / "latest").read_text() == "step_00000002\n"


# --- the journal -----------------------------------------------------------------------------------------------


def test_the_journal_has_one_line_per_commit(tmp_path):
    with open_run(tmp_path) as ckpt:
        reports = [ckpt.save(state_at(step), step=step).result() for step in (1, 2, 3)]

    lines = records(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["num_bytes"] for line in lines] == [report.num_bytes for report in reports]
    assert [str(tmp_path / line["path"]) for line in lines] == [report.path for report in reports]
    assert all(line["created"] > 1_700_000_000 for line in lines)


def test_the_journal_follows_retention_and_overwriting(tmp_path):
    with open_run(tmp_path, keep_last=2) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(state_at(step), step=step).result()
        ckpt.save({"new": True}, step=3, overwrite=True).result()
        ckpt.wait()

    lines = records(tmp_path)
    assert [line["step"] for line in lines] == [2, 3]
    assert (tmp_path / lines[-1]["path"]).exists()


def test_a_torn_last_line_of_the_journal_breaks_nothing(tmp_path):
    with open_run(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(state_at(step), step=step).result()
        whole = (tmp_path / "checkpoints.jsonl").read_bytes()
        for length in range(len(whole)):
            (tmp_path / "checkpoints.jsonl").write_bytes(whole[:length])
            kept = [record["step"] for record in ckpt._roots.runs[0].journal()]
            assert kept == [1, 2][: len(kept)]
        assert ckpt.steps() == [1, 2]
        ckpt.save(state_at(3), step=3).result()
        assert [record["step"] for record in ckpt._roots.runs[0].journal()] == [1, 2, 3]


def test_the_journal_is_written_again_when_somebody_has_deleted_it(tmp_path):
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_at(1), step=1).result()
    (tmp_path / "checkpoints.jsonl").unlink()
    with open_run(tmp_path) as ckpt:
        assert ckpt._roots.runs[0].journal() == []
        ckpt.save(state_at(2), step=2).result()
        assert [record["step"] for record in ckpt._roots.runs[0].journal()] == [1, 2]


def test_lines_that_are_no_records_are_passed_over():
    assert journal.parse(b'[1]\n\xff\xfe\n{"step": 1}\nnull\n{"step"') == [{"step": 1}]


# --- retention -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 5, 10, 15, 20, 25]),
        ({"keep_last": 1}, [25]),
        ({"keep_last": 3}, [15, 20, 25]),
        ({"keep_last": 99}, [0, 5, 10, 15, 20, 25]),
        ({"keep_last": 1, "keep_every": 10}, [0, 10, 20, 25]),
        ({"keep_last": 2, "keep_every": 15}, [0, 15, 20, 25]),
    ],
    ids=str,
)
def test_retention_keeps_the_newest_and_the_milestones(tmp_path, options, kept):
    with open_run(tmp_path, **options) as ckpt:
        for step in (0, 5, 10, 15, 20, 25):
            ckpt.save(state_at(step), step=step).result()
        ckpt.wait()
        assert ckpt.steps() == kept
        for step in kept:
            assert_is_state(ckpt.load(step), step)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        f"step_{s:08d}" for s in kept
    ]


def test_the_future_resolves_before_retention_begins(tmp_path):
    with open_run(tmp_path, keep_last=1) as ckpt, scripted(ckpt) as disk:
        ckpt.save(state_at(1), step=1).result()
        stop = disk.stop("delete")
        report = ckpt.save(state_at(2), step=2).result(60)
        stop.wait_reached()

        assert report.status == "committed"
        assert ckpt.steps() == [1, 2]
        stop.release()
        ckpt.wait()
        assert ckpt.steps() == [2]


def test_the_next_save_need_not_wait_for_retention(tmp_path):
    with open_run(tmp_path, keep_last=1) as ckpt, scripted(ckpt) as disk:
        ckpt.save(state_at(1), step=1).result()
        disk.stop("delete")
        ckpt.save(state_at(2), step=2).result()
        assert ckpt.save(state_at(3), step=3).result(60).status == "committed"


def test_the_manifest_goes_before_its_archive(tmp_path):
    with open_run(tmp_path, keep_last=1) as ckpt, scripted(ckpt) as disk:
        ckpt.save(state_at(1), step=1).result()
        ckpt.save(state_at(2), step=2).result()
        ckpt.wait()
        deleted = [path for call, path in disk.calls if call == "delete"]

    assert deleted[0] == "step_00000001/manifest.json"
    assert deleted[1].endswith(".tar")


def test_retention_that_is_cut_short_is_finished_by_a_later_run(tmp_path):
    ckpt = open_run(tmp_path, keep_last=1)
    with scripted(ckpt) as disk:
        ckpt.save(state_at(1), step=1).result()
        disk.fail("delete", ".tar", error=GONE)
        ckpt.save(state_at(2), step=2).result()
        ckpt.wait()
        assert len(archives(tmp_path, 1)) == 1
        ckpt.close()

    with open_run(tmp_path, keep_last=1) as ckpt:
        assert ckpt.steps() == [2]
        ckpt.save(state_at(3), step=3).result()
    assert leftovers(tmp_path) == []


def test_a_failure_of_retention_is_logged_and_counted_and_raised_by_nobody(tmp_path, caplog):
    with open_run(tmp_path, keep_last=1) as ckpt, scripted(ckpt) as disk:
        ckpt.save(state_at(1), step=1).result()
        disk.fail("delete", error=GONE)
        handle = ckpt.save(state_at(2), step=2)
        assert handle.result().status == "committed"
        ckpt.wait()

        assert handle.exception() is None
        assert ckpt.metrics()["cleanup_failures"] == 1
        assert [(r.name, r.levelname) for r in caplog.records] == [("async_ckpt", "WARNING")]
        assert "the disk is gone" in caplog.text
        ckpt.save(state_at(3), step=3).result()
        ckpt.wait()
        assert ckpt.steps() == [3]


def test_retention_never_deletes_what_the_tracker_names(tmp_path):
    with open_run(tmp_path, keep_last=1) as ckpt, scripted(ckpt) as disk:
        for step in (1, 2):
            ckpt.save(state_at(step), step=step).result()
        ckpt.wait()
        disk.fail("replace", "latest", error=GONE, times=2)  # so the tracker stays with step 2
        assert ckpt.save(state_at(3), step=3).result().status == "committed"
        ckpt.wait()
        assert (tmp_path / "latest").read_text() == "step_00000002\n"
        assert 2 in ckpt.steps()


def test_retention_never_deletes_a_step_in_flight(tmp_path):
    with open_run(tmp_path) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(state_at(step), step=step).result()
    run = Run(LocalStorage(tmp_path), clock=lambda: 0.0, retention=Retention(1))

    assert run.retain(3, replaced=None, in_flight={2}) == [1]
    assert run.steps() == [2, 3]


def test_a_step_whose_retention_is_still_running_is_not_in_flight_any_more(tmp_path):
    with open_run(tmp_path, keep_last=1) as ckpt, scripted(ckpt) as disk:
        ckpt.save(state_at(1), step=1).result()
        stop = disk.stop("delete", "step_00000001/manifest.json", times=1)
        ckpt.save(state_at(2), step=2).result()
        stop.wait_reached()
        ckpt.save(state_at(3), step=3).result()
        until(lambda: len([c for c in disk.calls if c == ("delete", "step_00000001/manifest.json")]) == 2)
        stop.release()
        ckpt.wait()

        assert ckpt.steps() == [3]


def test_retention_works_from_what_is_on_storage(tmp_path):
    with open_run(tmp_path) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(state_at(step), step=step).result()
    with open_run(tmp_path, keep_last=2) as ckpt:
        ckpt.save(state_at(4), step=4).result()
        ckpt.wait()
        assert ckpt.steps() == [3, 4]


def test_files_of_the_user_in_a_step_are_left_alone(tmp_path):
    with open_run(tmp_path, keep_last=1) as ckpt:
        ckpt.save(state_at(1), step=1).result()
        (tmp_path / "step_00000001/notes.txt").write_text("mine")
        (tmp_path / "step_00000001/other.tar").write_text("mine too")
        (tmp_path / "step_notes").mkdir()
        ckpt.save(state_at(2), step=2).result()
        ckpt.wait()

    assert names_below(tmp_path / "step_00000001") == ["notes.txt", "other.tar"]
    assert (tmp_path / "step_notes").is_dir()


# --- a run is a line -------------------------------------------------------------------------------------------


def test_a_step_behind_the_newest_is_refused(tmp_path):
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_at(5), step=5).result()
        with pytest.raises(StepBehindError, match="on_rollback") as caught:
            ckpt.save(state_at(3), step=3)
        assert (caught.value.step, caught.value.newest) == (3, 5)
        assert ckpt.steps() == [5]


def test_after_a_restore_of_an_older_step_saving_below_the_newest_is_refused(tmp_path):
    with open_run(tmp_path) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(state_at(step), step=step).result()
        ckpt.restore(state_at(0), step=1)
        with pytest.raises(StepBehindError):
            ckpt.save(state_at(2), step=2, overwrite=True)
        with pytest.raises((StepBehindError, StepExistsError)):
            ckpt.save(state_at(2), step=2)
        assert ckpt.save(state_at(4), step=4).result().status == "committed"


def test_with_retire_newer_steps_leave_the_run_and_the_tracker_moves_back(tmp_path):
    with open_run(tmp_path, on_rollback="retire") as ckpt:
        for step in (10, 20, 30):
            ckpt.save(state_at(step), step=step).result()
        assert ckpt.restore(state_at(0), step=10) == 10
        ckpt.save(state_at(15), step=15).result()
        ckpt.wait()

        assert ckpt.steps() == [10, 15]
        assert ckpt.latest() == 15
        assert (tmp_path / "latest").read_text() == "step_00000015\n"
        assert [record["step"] for record in records(tmp_path)] == [10, 15]
        assert len(retired(tmp_path, 20)) == len(retired(tmp_path, 30)) == 1
        with pytest.raises(NotCommittedError):
            ckpt.load(20)


def test_a_retired_step_can_be_saved_anew(tmp_path):
    with open_run(tmp_path, on_rollback="retire", keep_last=2) as ckpt:
        for step in (10, 20):
            ckpt.save(state_at(step), step=step).result()
        ckpt.save(state_at(15), step=15).result()
        ckpt.save({"again": True}, step=20).result()
        ckpt.wait()

        assert ckpt.steps() == [15, 20]
        assert ckpt.load(20) == {"again": True}


def test_the_archive_of_a_retired_step_survives_a_sweep_and_can_be_brought_back(tmp_path):
    with open_run(tmp_path, on_rollback="retire") as ckpt:
        for step in (10, 20):
            ckpt.save(state_at(step), step=step).result()
        ckpt.save(state_at(15), step=15).result()
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_at(16), step=16).result()
    (manifest,) = retired(tmp_path, 20)
    manifest.rename(manifest.with_name("manifest.json"))

    with open_run(tmp_path) as ckpt:
        assert_is_state(ckpt.load(20), 20)


def test_nothing_is_retired_when_the_save_fails(tmp_path):
    with open_run(tmp_path, on_rollback="retire") as ckpt, scripted(ckpt) as disk:
        for step in (10, 20):
            ckpt.save(state_at(step), step=step).result()
        disk.fail("finish", "step_00000015", error=GONE)
        ckpt.save(state_at(15), step=15).exception()

        assert ckpt.steps() == [10, 20]


def test_without_retire_the_tracker_never_moves_back(tmp_path):
    with open_run(tmp_path) as ckpt:
        for step in (10, 20):
            ckpt.save(state_at(step), step=step).result()
        ckpt.save({"again": True}, step=10, overwrite=True).result()
        assert (tmp_path / "latest").read_text() == "step_00000020\n"


# --- steps and their folders -----------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [-1, True, False, 1.0, "1", None, torch.tensor(1)], ids=repr)
def test_a_step_is_a_whole_number_from_zero_on(tmp_path, step):
    with open_run(tmp_path) as ckpt, pytest.raises(ValueError, match="step must be a whole number"):
        ckpt.save(state_at(1), step=step)
    assert names_below(tmp_path) == []


def test_step_zero_and_very_large_steps_are_steps(tmp_path):
    with open_run(tmp_path) as ckpt:
        for step in (0, 99_999_999, 100_000_000, 10**15):
            ckpt.save(state_at(step % 1000), step=step).result()
        assert ckpt.steps() == [0, 99_999_999, 100_000_000, 10**15]
        assert ckpt.latest() == 10**15
        assert_is_state(ckpt.load(100_000_000), 0)


@pytest.mark.parametrize(
    ("step_format", "folder"),
    [
        ("step_{:08d}", "step_00000042"),
        ("{}", "42"),
        ("{:d}", "42"),
        ("checkpoint-{}", "checkpoint-42"),
        ("iter_{:07d}_done", "iter_0000042_done"),
        ("a.b+c({:03d})", "a.b+c(042)"),
        ("{0:05d}", "00042"),
    ],
)
def test_the_folder_of_a_step_follows_its_format(tmp_path, step_format, folder):
    with open_run(tmp_path, step_format=step_format, keep_last=1) as ckpt:
        for step in (41, 42):
            ckpt.save(state_at(step), step=step).result()
        ckpt.wait()
        assert ckpt.steps() == [42]
        assert_is_state(ckpt.load(), 42)
    assert (tmp_path / folder / "manifest.json").exists()
    assert (tmp_path / "latest").read_text() == folder + "\n"


@pytest.mark.parametrize(
    "step_format",
    [
        "step", "", "{}{}", "a/{}", "a\\{}", "{:x}", "{:o}", "{:b}", "{:c}", "{:,}", "{:+d}", "{", "{name}", "{1}", "{0.real}",
        "step_{:8d}", "{:1>9}", "{:.0f}", "{!r:>9}", "{{{}}}", "step\n{}",
    ],
)  # fmt: skip
def test_a_format_without_exactly_one_step_in_it_is_refused(tmp_path, step_format):
    with pytest.raises(ValueError, match="step_format"):
        AsyncCheckpointer(tmp_path, step_format=step_format)


def test_folders_that_are_no_steps_are_not_listed(tmp_path):
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_at(7), step=7).result()
        for name in ("step_7", "step_000000007", "step_00000008", "xstep_00000009", "step_00000010.bak"):
            (tmp_path / name).mkdir()
        shutil.copy(tmp_path / "step_00000007/manifest.json", tmp_path / "step_7")
        shutil.copy(tmp_path / "step_00000007/manifest.json", tmp_path / "step_00000010.bak")

        assert ckpt.steps() == [7]


# --- reading ---------------------------------------------------------------------------------------------------


def test_nothing_is_committed_in_an_empty_or_missing_folder(tmp_path):
    ckpt = open_run(tmp_path / "missing")

    assert ckpt.steps() == []
    assert ckpt.latest() is None
    assert ckpt.restore({"w": torch.zeros(3)}) is None
    with pytest.raises(NotCommittedError, match="nothing is committed yet"):
        ckpt.load()
    with pytest.raises(NotCommittedError):
        ckpt.restore({"w": torch.zeros(3)}, step=3)
    with pytest.raises(FileNotFoundError):
        async_ckpt.load(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()


def test_a_missing_step_is_told_with_the_steps_that_are_there(tmp_path):
    with open_run(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(state_at(step), step=step).result()
        with pytest.raises(NotCommittedError, match="1, 2") as caught:
            ckpt.load(3)
    assert caught.value.step == 3


def test_opening_listing_and_reading_change_nothing_on_storage(tmp_path):
    with open_run(tmp_path, keep_last=1) as ckpt:
        for step in (1, 2):
            ckpt.save(state_at(step), step=step).result()
    dead = tmp_path / "step_00000003"
    dead.mkdir()
    (dead / "rank_00000.0123abcd.tar").write_bytes(b"half")
    (dead / ".rank_00000.0123abcd.tar.4567cdef.async_ckpt-tmp").write_bytes(b"half")
    before = footprint(tmp_path)

    with open_run(tmp_path, keep_last=1) as ckpt:
        assert ckpt.steps() == [2]
        assert ckpt.latest() == 2
        ckpt.load()
        ckpt.load(2, mmap=True)
        ckpt.restore(state_at(0))
        ckpt._roots.runs[0].journal()
        ckpt.prewarm(state_at(0))
        ckpt.metrics()
        ckpt.wait()
    async_ckpt.load(tmp_path)
    async_ckpt.load(tmp_path / "step_00000002")

    assert footprint(tmp_path) == before


def test_the_first_save_sweeps_what_dead_writers_left(tmp_path):
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_at(1), step=1).result()
    dead = tmp_path / "step_00000003"
    dead.mkdir()
    for folder in (dead, tmp_path / "step_00000001"):
        (folder / "rank_00000.0123abcd.tar").write_bytes(b"half")
        (folder / ".rank_00000.0123abcd.tar.4567cdef.async_ckpt-tmp").write_bytes(b"half")
    (tmp_path / ".latest.01234567.async_ckpt-tmp").write_bytes(b"half")

    with open_run(tmp_path) as ckpt:
        ckpt.save(state_at(2), step=2).result()
        assert ckpt.steps() == [1, 2]
        assert_is_state(ckpt.load(1), 1)
    assert leftovers(tmp_path) == []
    assert not dead.exists()


def test_a_sweep_leaves_what_a_living_writer_has_finished_but_not_committed(tmp_path):
    with open_run(tmp_path) as slow, open_run(tmp_path) as other, scripted(slow) as disk:
        stop = disk.stop("put_new", "manifest.json")
        late = slow.save(state_at(5), step=5)
        stop.wait_reached()
        other.save(state_at(4), step=4).result()
        stop.release()

        assert late.result().status == "committed"
        assert_is_state(other.load(5), 5)


def test_a_sweep_leaves_what_a_damaged_manifest_might_name(tmp_path):
    with open_run(tmp_path) as ckpt:
        path = Path(ckpt.save(state_at(1), step=1).result().path)
    (tmp_path / "step_00000001/manifest.json").write_text("{")
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_at(2), step=2).result()

    assert path.exists()


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path):
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_at(1), step=1).result()
        ckpt.save(state_at(2), step=2).result()
    (tmp_path / "step_00000002/manifest.json").unlink()

    with open_run(tmp_path) as ckpt:
        assert ckpt.latest() == 1
        assert_is_state(ckpt.load(), 1)
        with pytest.raises(NotCommittedError):
            ckpt.load(2)


def test_a_manifest_whose_archive_is_missing_is_corrupt(tmp_path):
    with open_run(tmp_path) as ckpt:
        report = ckpt.save(state_at(1), step=1).result()
        Path(report.path).unlink()
        with pytest.raises(CorruptCheckpointError, match="missing"):
            ckpt.load()


@pytest.mark.parametrize(
    "change",
    [
        {"archives": []},
        {"archives": [{"name": "../x.tar", "num_bytes": 1, "digest": ""}]},
        {"archives": [{"name": "..", "num_bytes": 1, "digest": ""}]},
        {"archives": [{"name": "", "num_bytes": 1, "digest": ""}]},
        {"archives": [{"name": "a\\b", "num_bytes": 1, "digest": ""}]},
        {"archives": [{"name": 5, "num_bytes": 1, "digest": ""}]},
        {"archives": [{}]},
        {"archives": 3},
        {"step": "one"},
        {"version": "one"},
        {"created": None},
    ],
    ids=str,
)
def test_a_manifest_that_lies_is_corrupt(tmp_path, change):
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_at(1), step=1).result()
        path = tmp_path / "step_00000001/manifest.json"
        forge_manifest(path, **change)
        with pytest.raises(CorruptCheckpointError, match=r"manifest\.json"):
            ckpt.load(1)


def test_a_manifest_from_a_newer_version_says_so(tmp_path):
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_at(1), step=1).result()
        path = tmp_path / "step_00000001/manifest.json"
        forge_manifest(path, version=3, archives="elsewhere")
        with pytest.raises(FormatVersionError) as caught:
            ckpt.load(1)
    assert caught.value.version == 3


def test_a_flip_of_any_bit_of_a_manifest_is_found(tmp_path):
    """With borrowed groups and a record, since a key that is misread must not be taken for one that is absent."""
    frozen = {"weight": torch.zeros(4)}
    with open_run(tmp_path) as ckpt:
        for step in (1, 2):
            state = {"base": frozen, "adapter": torch.full((2,), float(step))}
            ckpt.save(state, step=step, unchanged="base", record={"loss": 0.5}).result()
    path = tmp_path / "step_00000002/manifest.json"
    data = path.read_bytes()
    sound = manifest.parse(data, path="")
    assert [borrowed.group for borrowed in sound.elsewhere] == ["base"]
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptCheckpointError):
            manifest.parse(bytes(flipped), path="")
    for bit in range(0, 8 * len(data), 97):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with open_run(tmp_path) as ckpt:
            with pytest.raises(CorruptCheckpointError):
                ckpt.load(2)
            live = {"base": {"weight": torch.ones(4)}, "adapter": torch.zeros(2)}
            with pytest.warns(RuntimeWarning, match="step 2 is passed over"):
                assert ckpt.restore(live) == 1
            assert torch.equal(live["base"]["weight"], frozen["weight"])


def test_a_manifest_that_ends_too_early_or_goes_on_is_found(tmp_path):
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_at(1), step=1).result()
    data = (tmp_path / "step_00000001/manifest.json").read_bytes()
    for damaged in (*(data[:length] for length in range(len(data))), data + b" ", b"", bytes(len(data))):
        with pytest.raises(CorruptCheckpointError):
            manifest.parse(damaged, path="")


def test_an_archive_that_was_swapped_for_another_is_found(tmp_path):
    with open_run(tmp_path) as ckpt:
        paths = [Path(ckpt.save(state_at(step), step=step).result().path) for step in (1, 2)]
        shutil.copy(paths[0], paths[1])
        with pytest.raises(CorruptCheckpointError, match="manifest"):
            ckpt.load(2)


# --- everything at once ----------------------------------------------------------------------------------------


class RunMachine(RuleBasedStateMachine):
    """A run against a dictionary: step -> value. Kills are files that a dead writer would have left."""

    steps = st.integers(0, 12)

    @initialize(keep_last=st.sampled_from([None, 1, 2]), retire=st.booleans())
    def begin(self, keep_last: int | None, retire: bool) -> None:
        self.root = Path(RunMachine.folder) / f"run-{next(RunMachine.numbers)}"
        self.options = {"keep_last": keep_last, "on_rollback": "retire" if retire else None}
        self.model: dict[int, int] = {}
        self.value = 0
        self.rolled_back = False
        self.ckpt = open_run(self.root, **self.options)

    def saved(self, step: int) -> None:
        self.rolled_back = False
        self.model[step] = self.value
        if self.options["on_rollback"]:
            self.model = {s: v for s, v in self.model.items() if s <= step}
        keep = self.options["keep_last"]
        if keep:
            newest = sorted(self.model)[-keep:]
            self.model = {s: v for s, v in self.model.items() if s in newest or s == step}

    @rule(step=steps, overwrite=st.booleans())
    def save(self, step: int, overwrite: bool) -> None:
        self.value += 1
        exists, newest = step in self.model, max(self.model, default=-1)
        behind = newest > step and not self.options["on_rollback"] and (self.rolled_back or not exists)
        try:
            self.ckpt.save({"value": self.value}, step=step, overwrite=overwrite).result()
        except StepExistsError:
            assert exists
            assert not overwrite
        except StepBehindError:
            assert behind
        else:
            assert not (exists and not overwrite)
            assert not behind
            self.ckpt.wait()
            self.saved(step)

    @rule(step=steps, point=st.sampled_from(["create", "write", "finish", "put_new"]))
    def save_on_a_broken_disk(self, step: int, point: str) -> None:
        if step in self.model or step < max(self.model, default=-1):
            return
        disk = scripted(self.ckpt)
        disk.fail(point, f"step_{step:08d}", error=GONE)
        assert self.ckpt.save({"value": -1}, step=step).exception() is GONE

    @rule(step=steps)
    def restore(self, step: int) -> None:
        live = {"value": None}
        if step in self.model:
            assert self.ckpt.restore(live, step=step) == step
            assert live["value"] == self.model[step]
            self.rolled_back = step < max(self.model)
        else:
            with pytest.raises(NotCommittedError):
                self.ckpt.restore(live, step=step)

    @rule(step=steps)
    def die_while_writing(self, step: int) -> None:
        folder = self.root / f"step_{step:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".rank_00000.ffffffff.tar.ffffffff.async_ckpt-tmp").write_bytes(b"half")
        (folder / "rank_00000.eeeeeeee.tar").write_bytes(b"whole, but never committed")
        self.reopen()

    @rule()
    def reopen(self) -> None:
        self.ckpt.close()
        self.ckpt = open_run(self.root, **self.options)
        self.rolled_back = False

    @precondition(lambda self: self.model)
    @rule()
    def lose_tracker_and_journal(self) -> None:
        for name in ("latest", "checkpoints.jsonl"):
            (self.root / name).unlink(missing_ok=True)

    @invariant()
    def the_run_is_the_model(self) -> None:
        if not hasattr(self, "model"):
            return
        assert self.ckpt.steps() == sorted(self.model)
        assert self.ckpt.latest() == max(self.model, default=None)
        for step, value in self.model.items():
            assert self.ckpt.load(step) == {"value": value}

    def teardown(self) -> None:
        if hasattr(self, "ckpt"):
            self.ckpt.close()
            shutil.rmtree(self.root, ignore_errors=True)


def test_a_run_behaves_like_a_dictionary_of_its_commits(tmp_path):
    import itertools

    from hypothesis.stateful import run_state_machine_as_test

    RunMachine.folder = str(tmp_path)
    RunMachine.numbers = itertools.count()
    run_state_machine_as_test(
        RunMachine,
        settings=settings(
            max_examples=60, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
