"""What makes a checkpoint true: one writer wins, readers see all or nothing, old steps go when they may."""

import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from racing import Call, until
from scripted_disk import scripted
from slices import examples
from states import MIB, assert_is_state, leftovers, names_below, open_run, records, save_into, state_at

import async_ckpt
from async_ckpt import (
    CorruptCheckpointError,
    NotCommittedError,
    StepBehindError,
    StepExistsError,
    StorageUnavailableError,
)

GONE = StorageUnavailableError("the disk is gone", path="/ckpt")


def archives(root: Path, step: int) -> list[str]:
    return sorted(path.name for path in (root / f"step_{step:08d}").glob("*.tar"))


def retired(root: Path, step: int) -> list[Path]:
    return list((root / f"step_{step:08d}").glob("manifest.retired-*.json"))


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
        with open_run(tmp_path, keep=None) as ckpt:
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
    save_into(tmp_path, 4)
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


def test_a_manifest_that_cannot_be_read_for_a_moment_is_not_taken_for_a_damaged_one(tmp_path):
    """Else the new one would not name the commit that it replaces, and further places would keep that."""
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_at(1), step=1).result()
        with scripted(ckpt) as disk:
            disk.fail("read", "manifest.json", error=GONE)
            assert ckpt.save({"new": True}, step=1, overwrite=True).exception() is GONE
        assert_is_state(ckpt.load(1), 1)


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


# --- retention -------------------------------------------------------------------------------------------------


def test_the_future_resolves_before_retention_begins(tmp_path):
    with open_run(tmp_path, keep=1) as ckpt, scripted(ckpt) as disk:
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
    with open_run(tmp_path, keep=1) as ckpt, scripted(ckpt) as disk:
        ckpt.save(state_at(1), step=1).result()
        disk.stop("delete")
        ckpt.save(state_at(2), step=2).result()
        assert ckpt.save(state_at(3), step=3).result(60).status == "committed"


def test_the_manifest_goes_before_its_archive(tmp_path):
    with open_run(tmp_path, keep=1) as ckpt, scripted(ckpt) as disk:
        ckpt.save(state_at(1), step=1).result()
        ckpt.save(state_at(2), step=2).result()
        ckpt.wait()
        deleted = [path for call, path in disk.calls if call == "delete"]

    assert deleted[0] == "step_00000001/manifest.json"
    assert deleted[1].endswith(".tar")


def test_retention_that_is_cut_short_is_finished_by_a_later_run(tmp_path):
    ckpt = open_run(tmp_path, keep=1)
    with scripted(ckpt) as disk:
        ckpt.save(state_at(1), step=1).result()
        disk.fail("delete", ".tar", error=GONE)
        ckpt.save(state_at(2), step=2).result()
        ckpt.wait()
        assert len(archives(tmp_path, 1)) == 1
        ckpt.close()

    with open_run(tmp_path, keep=1) as ckpt:
        assert ckpt.steps() == [2]
        ckpt.save(state_at(3), step=3).result()
    assert leftovers(tmp_path) == []


def test_a_failure_of_retention_is_logged_and_counted_and_raised_by_nobody(tmp_path, caplog):
    with open_run(tmp_path, keep=1) as ckpt, scripted(ckpt) as disk:
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


def test_a_step_whose_retention_is_still_running_is_not_in_flight_any_more(tmp_path):
    with open_run(tmp_path, keep=1) as ckpt, scripted(ckpt) as disk:
        ckpt.save(state_at(1), step=1).result()
        stop = disk.stop("delete", "step_00000001/manifest.json", times=1)
        ckpt.save(state_at(2), step=2).result()
        stop.wait_reached()
        ckpt.save(state_at(3), step=3).result()
        until(lambda: len([c for c in disk.calls if c == ("delete", "step_00000001/manifest.json")]) == 2)
        stop.release()
        ckpt.wait()

        assert ckpt.steps() == [3]


def test_files_of_the_user_in_a_step_are_left_alone(tmp_path):
    with open_run(tmp_path, keep=1) as ckpt:
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


def test_the_archive_of_a_retired_step_survives_a_sweep_and_can_be_brought_back(tmp_path):
    save_into(tmp_path, 10, 20, 15, on_rollback="retire")
    save_into(tmp_path, 16)
    (manifest,) = retired(tmp_path, 20)
    manifest.rename(manifest.with_name("manifest.json"))
    for start in tmp_path.glob("start-*.json"):  # by which the run has gone on below it
        start.unlink()

    with open_run(tmp_path) as ckpt:
        assert_is_state(ckpt.load(20), 20)


# --- everything at once ----------------------------------------------------------------------------------------


class RunMachine(RuleBasedStateMachine):
    """A run against a dictionary: step -> value. Kills are files that a dead writer would have left."""

    steps = st.integers(0, 12)

    @initialize(keep=st.sampled_from([None, 1, 2]), retire=st.booleans())
    def begin(self, keep: int | None, retire: bool) -> None:
        self.root = Path(RunMachine.folder) / f"run-{next(RunMachine.numbers)}"
        self.options = {"keep": keep, "on_rollback": "retire" if retire else None}
        self.model: dict[int, int] = {}
        self.value = 0
        self.rolled_back = False
        self.ckpt = open_run(self.root, **self.options)

    def saved(self, step: int) -> None:
        self.rolled_back = False
        self.model[step] = self.value
        if self.options["on_rollback"]:
            self.model = {s: v for s, v in self.model.items() if s <= step}
        keep = self.options["keep"]
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
            max_examples=examples(60),
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("days", [0, 2])
def test_receipts_of_ranks_that_were_killed_before_any_archive_go_a_day_later(tmp_path, days):
    save_into(tmp_path, 1)
    receipts = tmp_path / "step_00000001" / "receipts.0123abcd"
    receipts.mkdir()
    receipt = receipts / "00000.json"
    receipt.write_text("")
    then = receipt.stat().st_mtime - days * 24 * 3600 - 60
    os.utime(receipt, (then, then))
    save_into(tmp_path, 2)
    assert receipts.exists() == (days == 0)
