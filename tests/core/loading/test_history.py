"""The history of a run as users read it: what happened there, whatever has happened to the run since."""

import json
import shutil

import pytest
import torch
from scripted_disk import scripted
from states import everywhere, open_run, state_at

import async_ckpt
from async_ckpt import NotCommittedError, StorageUnavailableError
from async_ckpt.core.events.log import FOLDER, NAME


def save(ckpt, *steps, **options):
    for step in steps:
        ckpt.save(state_at(step), step=step, **options).result()
        ckpt.wait()


def kinds(history):
    return [(one["kind"], one["step"]) for one in history]


def test_a_save_has_what_its_report_has_and_what_only_the_run_knows(tmp_path):
    with open_run(tmp_path) as ckpt:
        first = ckpt.save(state_at(1), step=1, record={"loss": 0.5, "note": "<script>"}).result()
        state = {"model": {"weight": torch.zeros(1000)}, "optimizer": {"m": torch.zeros(500)}}
        ckpt.save(state, step=2).result()
        ckpt.save(state, step=3, unchanged=["optimizer"]).result()
        ckpt.wait()

        one, two, three = ckpt.history()

    for name in ("num_bytes", "num_tensors", "retries"):
        assert one[name] == getattr(first, name)
    for name in ("stall_seconds", "stage_seconds", "write_seconds", "commit_seconds", "total_seconds"):
        assert one[name] == pytest.approx(getattr(first, name), abs=1e-5)
    assert 0 < one["call_seconds"] <= one["stall_seconds"] + 1e-5
    assert one["record"] == {"loss": 0.5, "note": "<script>"}
    assert one["free_bytes"] > 0
    assert (one["kept"], one["world_size"], one["slowest_rank"]) == (True, 1, None)
    assert two["groups"] == {"model": 4000, "optimizer": 2000}
    assert three["groups"] == {"model": 4000}
    assert three["borrowed"] == {"optimizer": 2}
    assert three["unchanged"] == ["model", "optimizer"]
    assert one["time"] < two["time"] < three["time"]


def test_failures_skips_restores_rollbacks_and_deletions_are_told_in_their_order(tmp_path):
    with open_run(tmp_path, keep=2, on_rollback="retire") as ckpt:
        save(ckpt, 1, 2, 3)
        with scripted(ckpt) as disk:
            disk.fail("write", error=StorageUnavailableError("the disk is away", path=str(tmp_path)))
            assert ckpt.save(state_at(4), step=4).exception() is not None
            ckpt.wait()
        assert kinds(ckpt.history())[-1] == ("failed", 4)  # before the next save
        ckpt.restore(state_at(2), step=2)
        save(ckpt, 3, overwrite=True)

        told = ckpt.history()

    assert kinds(told) == [
        ("save", 1), ("save", 2), ("save", 3), ("retention", 3), ("failed", 4), ("restore", 2), ("save", 3),
    ]  # fmt: skip
    failed = next(one for one in told if one["kind"] == "failed")
    assert failed["error"] == "StorageUnavailableError"
    assert "the disk is away" in failed["message"]
    assert failed["total_seconds"] > 0
    restored = next(one for one in told if one["kind"] == "restore")
    assert restored["behind"] is True
    assert next(one["deleted"] for one in told if one["kind"] == "retention") == [1]
    assert [(one["step"], one["kept"]) for one in told if one["kind"] == "save"] == [
        (1, False), (2, True), (3, False), (3, True),
    ]  # fmt: skip


def test_a_rollback_names_the_steps_that_it_has_retired(tmp_path):
    with open_run(tmp_path, on_rollback="retire") as ckpt:
        save(ckpt, 1, 2, 3)
        ckpt.restore(state_at(0), step=1)
        save(ckpt, 2, overwrite=True)
        ckpt.restore(state_at(0), step=1)
        ckpt.save(state_at(1), step=1, overwrite=True).result()
        ckpt.wait()

        told = ckpt.history()

    rollbacks = {one["step"]: one["retired"] for one in told if one["kind"] == "rollback"}
    assert rollbacks[1] == [2]
    assert [one["step"] for one in told if one["kind"] == "save" and one["kept"]] == [1]


def test_saves_that_were_skipped_come_with_the_next_one(tmp_path):
    with open_run(tmp_path, on_overlap="skip") as ckpt, scripted(ckpt) as disk:
        held = disk.stop("write", times=1)
        ckpt.save(state_at(1), step=1)
        held.wait_reached()
        for step in (2, 3):
            assert ckpt.save(state_at(step), step=step).result().status == "skipped"
        held.release()
        ckpt.wait()

        skipped = next(one for one in ckpt.history() if one["kind"] == "skipped")

    assert (skipped["first_step"], skipped["step"], skipped["count"]) == (2, 3, 2)


def test_a_run_is_closed_once_by_each_process_that_has_saved(tmp_path):
    with open_run(tmp_path) as ckpt:
        save(ckpt, 1)
        ckpt.close()
    with open_run(tmp_path) as ckpt:
        save(ckpt, 2)

    assert kinds(async_ckpt.history(tmp_path)) == [("save", 1), ("closed", None), ("save", 2), ("closed", None)]


def test_a_process_that_only_reads_leaves_no_trace(tmp_path):
    with open_run(tmp_path) as ckpt:
        save(ckpt, 1)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with open_run(tmp_path) as reader:
        reader.restore(state_at(0))
        assert kinds(reader.history()) == [("save", 1), ("closed", None)]
    assert async_ckpt.history(tmp_path) == reader.history()

    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_history_that_cannot_be_written_costs_no_save(tmp_path, caplog):
    (tmp_path / NAME).mkdir(parents=True)
    with open_run(tmp_path, keep=1) as ckpt:
        save(ckpt, 1, 2, 3)
        assert ckpt.steps() == [3]
        assert ckpt.metrics()["cleanup_failures"] == 0

    assert sum("history" in record.message for record in caplog.records) == 1


def test_steps_without_an_event_have_what_their_manifests_say(tmp_path):
    with open_run(tmp_path) as ckpt:
        save(ckpt, 1, 2, record={"loss": 1})
        old = [*ckpt.history()]
        (tmp_path / NAME).unlink()  # as a version without a history has left it
        save(ckpt, 3)
        told = ckpt.history()

    assert kinds(told) == [("save", 1), ("save", 2), ("save", 3)]
    assert told[0]["num_bytes"] == old[0]["num_bytes"]
    assert told[0]["record"] == {"loss": 1}
    assert told[0]["attempt"] == old[0]["attempt"]
    assert told[0]["stage_seconds"] is None
    assert told[0].keys() == told[2].keys()


def test_a_damaged_manifest_is_left_out_where_nothing_else_is_known(tmp_path):
    with open_run(tmp_path) as ckpt:
        save(ckpt, 1, 2)
    (tmp_path / "step_00000001" / "manifest.json").write_text("{}")

    assert kinds(async_ckpt.history(tmp_path)) == [("save", 1), ("save", 2), ("closed", None)]
    (tmp_path / NAME).unlink()
    assert kinds(async_ckpt.history(tmp_path)) == [("save", 2)]


def test_a_history_of_anything_else_is_refused(tmp_path):
    with pytest.raises(NotCommittedError, match="empty"):
        async_ckpt.history(tmp_path)
    with pytest.raises(NotCommittedError, match="nothing at this path"):
        async_ckpt.history(tmp_path / "away")
    with open_run(tmp_path / "run") as ckpt:
        assert ckpt.history() == []


def test_a_history_is_one_call_away_from_a_table(tmp_path):
    with open_run(tmp_path) as ckpt:
        save(ckpt, 1, 2)
    told = async_ckpt.history(tmp_path)

    assert json.loads(json.dumps(told, allow_nan=False)) == told


def test_with_several_roots_each_has_the_history_and_one_that_is_away_is_passed_over(tmp_path):
    roots = [tmp_path / "a", tmp_path / "b"]
    with open_run(roots) as ckpt:
        for step in (1, 2):
            everywhere(ckpt, ckpt.save(state_at(step), step=step))
        one = ckpt.history()[0]
    assert [place["path"].startswith(str(roots[0])) for place in one["destinations"]] == [True]
    told = [("closed", None), ("moved", 1), ("moved", 2), ("save", 1), ("save", 2)]
    assert [sorted(kinds(async_ckpt.history(root))) for root in roots] == [told] * 2
    assert {one["place"] for one in async_ckpt.history(roots[1]) if one["kind"] == "moved"} == {str(roots[1])}
    shutil.rmtree(roots[0])
    with open_run(roots) as reader:
        assert sorted(kinds(reader.history())) == told


def test_at_a_store_a_commit_makes_one_request_for_its_history(s3, bucket, proxy):
    place = async_ckpt.Place(f"s3://{bucket}/run", options={**s3.options, "endpoint": proxy.endpoint})
    with open_run(place, keep=2) as ckpt:
        save(ckpt, 1, 2, 3)
        before = len(proxy.requests)
        save(ckpt, 4)
        asked = [
            request for request in proxy.requests[before:] if NAME in request.target or f"/{FOLDER}/" in request.target
        ]
        assert [request.method for request in asked] == ["PUT"]
        assert kinds(ckpt.history())[-2:] == [("save", 4), ("retention", 4)]


def test_a_copy_of_a_whole_run_has_its_history(tmp_path):
    from commands import run_command

    with open_run(tmp_path / "a", keep=2) as ckpt:
        save(ckpt, 1, 2, 3)
    assert run_command("cp", tmp_path / "a", tmp_path / "b").returncode == 0
    assert async_ckpt.history(tmp_path / "b") == async_ckpt.history(tmp_path / "a")
    with open_run(tmp_path / "a", keep=2) as ckpt:
        save(ckpt, 4)
    assert run_command("cp", tmp_path / "a", tmp_path / "b").returncode == 0

    assert [one for one in async_ckpt.history(tmp_path / "b") if one["kind"] == "retention"] == [
        one for one in async_ckpt.history(tmp_path / "a") if one["kind"] == "retention"
    ]


def test_what_prune_deletes_is_in_the_history(tmp_path):
    from commands import run_command

    with open_run(tmp_path) as ckpt:
        save(ckpt, 1, 2, 3)
    assert run_command("prune", tmp_path, "--keep", "last=1", "--yes").returncode == 0

    last = async_ckpt.history(tmp_path)[-1]

    assert (last["kind"], last["deleted"]) == ("retention", [1, 2])
