"""At most one line of a run goes on: the process that has lost it is told so, and what it commits all the same does not count."""

import json
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_command
from hypothesis import given
from hypothesis import strategies as st
from scripted_disk import scripted
from states import assert_is_state, open_run, save, save_into, state_at

import async_ckpt
from async_ckpt import (
    AsyncCheckpointer,
    NotCommittedError,
    Place,
    RunTakenError,
    StepBehindError,
    StorageUnavailableError,
)
from async_ckpt.core.runs.manifest import Manifest, seal
from async_ckpt.core.runs.starts import Line, Start
from async_ckpt.core.runs.tenure import Tenure

GONE = StorageUnavailableError("the disk is gone", path="/ckpt")


def of_another_process(root: Any, **options: Any) -> AsyncCheckpointer:
    """A checkpointer as another process has it, of which no lock tells that it lives."""
    ckpt = open_run(root, **options)
    for run in ckpt._roots.runs:
        run._tenure = Tenure()
    return ckpt


def starts(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("start-*.json"))


def assert_line(root: Any, steps: list[int]) -> None:
    """The run as every reader sees it."""
    with open_run(root) as ckpt:
        assert ckpt.steps() == steps
        assert ckpt.latest() == steps[-1]
        assert [*ckpt.records()] == steps
        live = state_at(0)
        assert ckpt.restore(live) == steps[-1]
        assert_is_state(live, steps[-1])
        assert_is_state(ckpt.load(), steps[-1])
    if not isinstance(root, list):
        assert_is_state(async_ckpt.load(root), steps[-1])


# --- two that both believe they are alive ------------------------------------------------------------------------


@pytest.mark.parametrize("since", [10**400, -(10**400), float("inf"), True, "x", None])
def test_a_start_is_told_of_whatever_its_file_says_of_its_time(tmp_path, since):
    with of_another_process(tmp_path) as old:
        save(old, 1)
        with of_another_process(tmp_path) as new:
            save(new, 2)
            (tmp_path / starts(tmp_path)[-1]).write_bytes(seal({"host": "h", "pid": 7, "since": since}))
            with pytest.raises(RunTakenError, match="process 7 on 'h'") as taken:
                save(old, 3)
    assert taken.value.since == 0.0


@pytest.mark.parametrize(
    ("call", "path"),
    [("create", "rank_"), ("write", "rank_"), ("finish", "rank_"), ("put_new", "manifest.json")],
)
def test_a_process_that_wakes_after_another_has_gone_on_commits_nothing_that_counts(tmp_path, call, path):
    with of_another_process(tmp_path) as old, scripted(old) as disk:
        save(old, 1)
        save(old, 2)
        stop = disk.stop(call, f"step_00000010/{path}", times=1)
        handle = old.save(state_at(10), step=10)
        stop.wait_reached()
        with of_another_process(tmp_path) as new:
            assert new.restore(state_at(0)) == 2
            save(new, 3)
            save(new, 4)
            stop.release()
            with pytest.raises(RunTakenError, match=f"process {os.getpid()} on .*, which began to save") as taken:
                handle.result()
            assert taken.value.path == str(tmp_path)
            assert taken.value.pid == os.getpid()
            assert taken.value.since > 1e9
            assert_line(tmp_path, [1, 2, 3, 4])
            save(new, 5)
            save(new, 6)
        with pytest.raises(RunTakenError):
            old.save(state_at(11), step=11)
    assert_line(tmp_path, [1, 2, 3, 4, 5, 6])
    with open_run(tmp_path) as again:  # its step is free again
        save(again, 10, 11)
    assert_line(tmp_path, [1, 2, 3, 4, 5, 6, 10, 11])


def test_a_commit_just_before_the_next_start_counts_and_that_start_is_refused(tmp_path):
    with of_another_process(tmp_path) as old, of_another_process(tmp_path) as new, scripted(old) as disk:
        save(old, 2)
        new.restore(state_at(0))
        stop = disk.stop("replace", "latest", times=1)
        handle = old.save(state_at(10), step=10)
        stop.wait_reached()  # it has looked for later starts, and is acknowledged
        with pytest.raises(StepBehindError):
            new.save(state_at(3), step=3)
        stop.release()
        handle.result()
        save(old, 11)
    assert_line(tmp_path, [2, 10, 11])


@pytest.mark.parametrize("later", [[3, 8], [8, 3]])
def test_a_manifest_that_comes_late_between_steps_of_the_next_start_does_not_count(tmp_path, later):
    """Also where the next start has rolled back below its own first step."""
    with of_another_process(tmp_path) as old, scripted(old) as disk:
        save(old, 2)
        stop = disk.stop("put_new", "step_00000005/manifest.json", times=1)
        handle = old.save(state_at(5), step=5)
        stop.wait_reached()
        with of_another_process(tmp_path, on_rollback="retire") as new:
            new.restore(state_at(0))
            save(new, *later)
            stop.release()
            assert isinstance(handle.exception(), RunTakenError)
            steps = [2, *sorted(later)] if later[-1] == 8 else [2, 3]
            assert_line(tmp_path, steps)
            with open_run(tmp_path) as ckpt, pytest.raises(NotCommittedError):
                ckpt.load(5)
            save(new, 9)
        assert_line(tmp_path, [*steps, 9])
        assert not (tmp_path / "step_00000005" / "manifest.json").exists()


def test_in_a_store_the_one_that_is_overtaken_is_told_who_has_the_run(s3, bucket, proxy):
    slow = Place(f"s3://{bucket}/run", options={**s3.options, "endpoint": proxy.endpoint})
    root = Place(f"s3://{bucket}/run", options=s3.options)
    with of_another_process(slow) as old, of_another_process(root) as new:
        save(old, 2)
        held = proxy.delay(None, method="PUT", target=r"step_00000010/manifest\.json")
        handle = old.save(state_at(10), step=10)
        held.wait()
        new.restore(state_at(0))
        save(new, 3)
        held.clear()
        with pytest.raises(RunTakenError, match=f"process {os.getpid()} on"):
            handle.result()
        with pytest.raises(RunTakenError):
            old.save(state_at(11), step=11).result()
        save(new, 4)
    assert_line(root, [2, 3, 4])


def test_a_late_rollback_between_the_steps_that_the_next_start_has_seen_is_seen_by_no_reader(tmp_path):
    with of_another_process(tmp_path, on_rollback="retire") as old, scripted(old) as disk:
        save(old, 2)
        save(old, 8)
        stop = disk.stop("put_new", "step_00000005/manifest.json", times=1)
        handle = old.save(state_at(5), step=5)
        stop.wait_reached()
        with of_another_process(tmp_path) as new:
            assert new.restore(state_at(0)) == 8
            save(new, 9)
            stop.release()
            with pytest.raises(RunTakenError) as taken:
                handle.result()
            assert taken.value.undecided
            assert (tmp_path / "step_00000005/manifest.json").exists()
            assert_line(tmp_path, [2, 8, 9])
            assert run_command("verify", tmp_path).returncode == 0
            assert [row["step"] for row in json.loads(run_command("ls", tmp_path, "--json").stdout)["steps"]] == [
                2,
                8,
                9,
            ]
            with open_run(tmp_path) as ckpt, pytest.raises(NotCommittedError):
                ckpt.restore(state_at(0), step=5)
            save(new, 10)
    assert not (tmp_path / "step_00000005/manifest.json").exists()
    assert_line(tmp_path, [2, 8, 9, 10])


def test_in_a_store_only_the_first_save_of_a_start_says_what_it_has_seen(s3, bucket, proxy):
    root = Place(f"s3://{bucket}/run", options={**s3.options, "endpoint": proxy.endpoint})
    with of_another_process(root) as first:
        save(first, 1)
    with of_another_process(root) as second:
        for step in (2, 3, 4):
            before = len(proxy.requests)
            save(second, step)
            asked = [one for one in proxy.requests[before:] if ".seen" in one.target]
            assert [one.method for one in asked] == (["PUT"] if step == 2 else [])


@pytest.mark.parametrize("unchanged", [None, "frozen"])
def test_the_retention_of_who_was_overtaken_deletes_nothing_that_the_next_start_goes_on_from(
    tmp_path, gate, monkeypatch, caplog, unchanged
):
    """Not the step that it has restored, nor what a later one borrows from there."""
    frozen = {"weight": torch.arange(500.0)}

    def state_of(step: int) -> dict[str, Any]:
        return {"step": step, "frozen": frozen}

    with of_another_process(tmp_path, keep=2) as old, of_another_process(tmp_path, keep=3, on_rollback="retire") as new:
        for step in (8, 9):
            old.save(state_of(step), step).result()
        old.wait()
        sweeper = old._roots.runs[0].sweeper
        real = sweeper.read_folder
        monkeypatch.setattr(sweeper, "read_folder", lambda step: (gate.passed(), real(step))[1])
        handle = old.save(state_of(10), 10)
        gate.wait_reached()
        new.restore(state_of(0), step=8)
        new.save(state_of(9), 9, overwrite=True, unchanged=unchanged).result()
        gate.open()
        old.wait()
        assert handle.result().step == 10  # committed before the next start; its retention was not
    assert "has taken the run over" in caplog.text
    with open_run(tmp_path) as ckpt:
        assert ckpt.steps() == [8, 9]
        for step in (8, 9):
            assert torch.equal(ckpt.load(step)["frozen"]["weight"], frozen["weight"])
            assert ckpt.load(step)["step"] == step


def test_clocks_decide_nothing(tmp_path):
    with of_another_process(tmp_path) as old, of_another_process(tmp_path) as new:
        for ckpt, clock in ((old, 4e9), (new, 1e9)):
            ckpt._roots.runs[0]._clock = lambda clock=clock: clock
        save(old, 1)
        save(new, 2)
        with pytest.raises(RunTakenError):
            old.save(state_at(3), step=3)
        save(new, 4)
    assert_line(tmp_path, [1, 2, 4])


# --- several roots -------------------------------------------------------------------------------------------------


def test_when_roots_meet_again_the_later_line_counts(tmp_path):
    roots = [tmp_path / "near", tmp_path / "far"]
    with of_another_process(roots) as old:
        save(old, 2)
    with of_another_process(roots[1], on_rollback=None) as new:  # the other root is away
        new.restore(state_at(0))
        save(new, 3)
        save(new, 4)
    with of_another_process(roots[0]) as zombie:
        tenure = zombie._roots.runs[0]._tenure
        tenure.start = next(iter(old_starts(roots[0])))  # the old process, for which that root alone is there
        zombie._roots.runs[0].root.own = tenure.start
        save(zombie, 10)
    with open_run(roots) as again:
        assert again.steps() == [2, 3, 4]
        assert again.restore(state_at(0)) == 4
        save(again, 5)
        again.catch_up()
    assert_line(roots, [2, 3, 4, 5])


def old_starts(root: Path) -> Iterator[Start]:
    for name in starts(root):
        number, token, first = name.removeprefix("start-").removesuffix(".json").split(".")
        yield Start(int(number), token, int(first))


def test_roots_that_were_saved_to_separately_hide_nothing_from_each_other(tmp_path):
    roots = [tmp_path / "near", tmp_path / "far"]
    for _ in range(3):
        with of_another_process(roots[0]) as ckpt:
            save(ckpt, (ckpt.latest() or 0) + 1)
    with of_another_process(roots[1]) as ckpt:
        save(ckpt, 10)
    assert_line(roots, [1, 2, 3, 10])


def test_a_step_that_one_root_lacked_when_a_start_took_it_counts_there_once_it_is_copied(tmp_path):
    roots = [tmp_path / "near", tmp_path / "far"]
    with of_another_process(roots) as old:
        save(old, 1, 2)
    shutil.rmtree(roots[1] / "step_00000001")
    with of_another_process(roots[1]) as new:
        save(new, 3)
    with open_run(roots) as both:
        both.catch_up()
    assert_line(roots[1], [1, 2, 3])
    assert_line(roots, [1, 2, 3])


def test_a_start_at_several_roots_is_one_start(tmp_path):
    roots = [tmp_path / "near", tmp_path / "far"]
    for _ in range(2):
        with of_another_process(roots[0]) as ckpt:
            save(ckpt, (ckpt.latest() or 0) + 1)
    with open_run(roots) as ckpt:
        save(ckpt, 3, 4)
        ckpt.catch_up()
    near, far = (list(old_starts(root)) for root in roots)
    assert near[-1].token == far[-1].token
    assert_line(roots, [1, 2, 3, 4])
    assert_line(roots[0], [1, 2, 3, 4])


# --- who lives -------------------------------------------------------------------------------------------------------

HOLDS = """
import os, signal, sys, time
from states import open_run, state_at
ckpt = open_run(sys.argv[1])
ckpt.save(state_at(1), step=1).result()
ckpt.wait()
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="record locks and signals as Linux has them")


@pytest.mark.parametrize("sleeps", [False, True], ids=["runs", "is stopped"])
def test_a_second_process_is_refused_by_name_while_the_first_lives(tmp_path, nursery, sleeps):
    child = nursery.start(HOLDS + "print('saved', flush=True)\nsys.stdin.read()\nsignal.pause()", tmp_path)
    child.wait_for_line("saved\n")
    if sleeps:
        child.send(signal.SIGSTOP)
    with open_run(tmp_path) as ckpt:
        with pytest.raises(RunTakenError, match="is alive and owns the run; stop it") as taken:
            ckpt.save(state_at(2), step=2)
        assert taken.value.pid == child.pid
        with pytest.warns(RuntimeWarning, match=f"no step can be saved: .*: process {child.pid} .* is alive"):
            assert ckpt.restore(state_at(0)) == 1  # reading changes nothing
        with pytest.warns(RuntimeWarning, match="no step can be saved: .* is alive") as warned:
            again = open_run(tmp_path, keep=3)  # it is going to save
        assert again.restore(state_at(0)) == 1  # without a second warning
        assert len(warned) == 1
        again.close()
        assert len(starts(tmp_path)) == 1
        child.send(signal.SIGKILL)
        child.ended()
        save(ckpt, 2)
    assert_line(tmp_path, [1, 2])


@pytest.mark.parametrize("end", ["ckpt.close()", "del ckpt", "pass"])
def test_after_a_process_has_closed_its_checkpointer_the_next_one_goes_on_without_a_word(
    tmp_path, nursery, end, caplog
):
    child = nursery.start(
        HOLDS + f"{end}\nprint('closed', flush=True)\n{'time.sleep(9)' if 'close' in end else ''}", tmp_path
    )
    child.wait_for_line("closed\n")
    if end != "ckpt.close()":
        child.ended()
    save_into(tmp_path, 2)
    if end == "ckpt.close()":
        child.ended()
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []
    assert_line(tmp_path, [1, 2])


def test_a_process_that_is_killed_between_its_start_and_its_first_commit_holds_nothing_up(tmp_path, nursery):
    body = """
    from scripted_disk import scripted
    ckpt = open_run(sys.argv[2])
    disk = scripted(ckpt)
    stop = disk.stop("put_new", "manifest.json")
    ckpt.save(state_at(1), step=1)
    stop.wait_reached()
    os.kill(os.getpid(), signal.SIGKILL)
    """
    nursery.run(HOLDS + textwrap.dedent(body), tmp_path / "other", tmp_path / "run")
    with open_run(tmp_path / "run") as ckpt:
        assert ckpt.latest() is None
        save(ckpt, 1)
        save(ckpt, 2)
    assert len(starts(tmp_path / "run")) == 1  # that of the process that has ended is swept
    assert_line(tmp_path / "run", [1, 2])


def test_a_forked_child_is_another_start(tmp_path, nursery):
    body = """
    child = os.fork()
    if child == 0:
        from async_ckpt import RunTakenError
        try:
            open_run(sys.argv[1]).save(state_at(2), step=2)
        except RunTakenError as error:
            assert error.pid == os.getppid(), error
            with open_run(sys.argv[1] + "-own") as own:
                own.save(state_at(2), step=2).result()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    ckpt.save(state_at(3), step=3).result()
    """
    ended = nursery.run(HOLDS + textwrap.dedent(body), tmp_path / "run")
    assert ended.status == 0, ended.err
    assert_line(tmp_path / "run", [1, 3])
    assert_line(tmp_path / "run-own", [2])


# --- what stays as it was --------------------------------------------------------------------------------------------


def test_checkpointers_of_one_process_share_its_start(tmp_path):
    with open_run(tmp_path) as one, open_run(tmp_path) as other:
        save(one, 1)
        save(other, 2)
        save(one, 3)
    assert len(starts(tmp_path)) == 1
    assert_line(tmp_path, [1, 2, 3])


def test_a_run_that_knows_no_starts_goes_on(tmp_path):
    save_into(tmp_path, 1, 2)
    for manifest in tmp_path.glob("*/manifest.json"):
        made = async_ckpt.core.runs.manifest.parse(manifest.read_bytes(), path=str(manifest))
        fields = {**async_ckpt.core.runs.manifest.unseal(made.dump())}
        del fields["start"]
        manifest.write_bytes(async_ckpt.core.runs.manifest.seal(fields))
    for name in starts(tmp_path):
        (tmp_path / name).unlink()
    assert_line(tmp_path, [1, 2])
    save_into(tmp_path, 3)
    assert_line(tmp_path, [1, 2, 3])


def test_a_step_that_is_replaced_below_newer_ones_hides_none_of_them(tmp_path):
    with of_another_process(tmp_path) as ckpt:
        save(ckpt, 1, 2, 3)
    with of_another_process(tmp_path) as ckpt:
        save(ckpt, 2, overwrite=True)
        assert_line(tmp_path, [1, 2, 3])
        save(ckpt, 4)
    assert_line(tmp_path, [1, 2, 3, 4])


def test_a_commit_of_a_closed_checkpointer_that_comes_late_does_not_count(tmp_path, monkeypatch):
    """A save that Ctrl-C gave up hangs in its last request, while the same process goes on with a new checkpointer."""
    monkeypatch.setattr("async_ckpt.core.host.waits.ABANDON_SECONDS", 0.0)
    old = open_run(tmp_path)
    save(old, 1)
    with scripted(old) as disk:
        stop = disk.stop("put_new", "step_00000007/manifest.json", times=1)
        handle = old.save(state_at(7), step=7)
        stop.wait_reached()
        with monkeypatch.context() as patch:
            patch.setattr("async_ckpt.core.saving.saver.wait_for_saves", interrupting)
            with pytest.raises(KeyboardInterrupt):
                old.close()
        with open_run(tmp_path) as new:
            save(new, 2, 3)
        stop.release()
        with pytest.raises(RunTakenError):
            handle.result()
    assert_line(tmp_path, [1, 2, 3])


def interrupting(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_start_stays_while_a_commit_of_it_that_does_not_count_cannot_be_read(tmp_path):
    with of_another_process(tmp_path) as old, scripted(old) as disk:
        save(old, 1)
        stop = disk.stop("put_new", "step_00000007/manifest.json", times=1)
        handle = old.save(state_at(7), step=7)
        stop.wait_reached()
        with of_another_process(tmp_path) as new:
            save(new, 2)
        stop.release()
        with pytest.raises(RunTakenError):
            handle.result()
    with of_another_process(tmp_path) as third, scripted(third) as disk:
        stop = disk.stop("put_new", "step_00000003/manifest.json", times=1)
        handle = third.save(state_at(3), step=3)
        stop.wait_reached()
        fault = disk.fail("read", "step_00000007/manifest.json", error=GONE, times=None)
        stop.release()
        handle.result()
        third.wait()
        fault.end()
    assert_line(tmp_path, [1, 2, 3])


def test_of_starts_that_have_ended_the_newest_is_kept(tmp_path):
    for step in range(1, 40):
        with of_another_process(tmp_path) as ckpt:
            save(ckpt, step)
    assert len(starts(tmp_path)) == 1
    assert_line(tmp_path, list(range(1, 40)))


def test_a_root_that_was_emptied_is_taken_again(tmp_path):
    with open_run(tmp_path) as ckpt:
        save(ckpt, 1)
        for name in starts(tmp_path):
            (tmp_path / name).unlink()
        save(ckpt, 2)
        assert len(starts(tmp_path)) == 1
        save(ckpt, 3)


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"digest": "0"}', "ä".encode("latin-1")])
def test_a_start_that_cannot_be_read_is_a_start(tmp_path, damage):
    with of_another_process(tmp_path) as old, of_another_process(tmp_path) as new:
        save(old, 1)
        save(new, 2)
        (tmp_path / starts(tmp_path)[-1]).write_bytes(damage)
        with pytest.raises(RunTakenError, match="process 0 on 'an unknown host'"):
            old.save(state_at(3), step=3).result()


# --- the rule --------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=12),
    st.sets(st.integers(1, 5)),
)
def test_the_steps_that_count_are_those_of_the_definition(owners, listed):
    """By the definition, a step is out if one below it was committed by a later start that is listed, as its own is."""
    firsts = {n: min((i for i, (own, _) in enumerate(owners) if own == n), default=0) for n in listed}
    known = [Start(n, f"{n:08x}", first) for n, first in firsts.items()]
    commits = {
        i: Manifest(i, f"{i:08x}", 1, 0.0, (), start=f"{own:08d}.{own:08x}" if own else "")
        for i, (own, there) in enumerate(owners)
        if there
    }

    def is_out(step: int) -> bool:
        own = owners[step][0]
        return own in listed and any(
            other in listed and other > own for i, (other, there) in enumerate(owners[:step]) if there
        )

    steps = range(len(owners))
    stale = {step for step in commits if is_out(step)}
    line = Line(steps, known, commits.get)
    assert {*line.out(steps)} == stale
    assert {step for step in commits if not line.counts(step, commits[step])} == stale
