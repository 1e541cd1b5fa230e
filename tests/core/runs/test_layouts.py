"""What other programs find in a run: trackers, the folders of steps, the journal, and what a save says of itself."""

import json
import shutil
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from racing import until
from scripted_disk import scripted
from states import assert_is_state, everywhere, is_incidental, names_below, open_run, records, save, save_into, state_at

import async_ckpt
from async_ckpt import AsyncCheckpointer, Keep, Naming, Place, StorageUnavailableError
from async_ckpt.core.runs.naming import Tracker
from async_ckpt.core.runs.record import RECORD_BYTES

GONE = StorageUnavailableError("the disk is gone", path="/ckpt")
SKYRL: dict[str, Any] = {"naming": "skyrl"}
VERL: dict[str, Any] = {"naming": "verl"}
DEEPSPEED: dict[str, Any] = {"naming": "deepspeed"}


# --- what the trackers of other programs hold ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "folder", "tracker", "text"),
    [
        ({}, "step_00000500", "latest", "step_00000500\n"),
        (SKYRL, "global_step_500", "latest_ckpt_global_step.txt", "500"),
        (VERL, "global_step_500", "latest_checkpointed_iteration.txt", "500"),
        (DEEPSPEED, "global_step500", "latest", "global_step500"),
        ({"naming": Naming("step_{}", ("newest.txt", "{:06d}"))}, "step_500", "newest.txt", "000500"),
        ({"naming": Naming(tracker=("latest", "runs/a/step_{:08d}\n"))}, "step_00000500", "latest", "runs/a/step_00000500\n"),
    ],
    ids=["default", "SkyRL", "verl", "DeepSpeed", "a number with zeros", "a path"],
)  # fmt: skip
def test_a_tracker_holds_what_its_readers_parse_and_reads_back(tmp_path, options, folder, tracker, text):
    save_into(tmp_path, 400, 500, keep=1, **options)

    assert (tmp_path / tracker).read_text() == text
    found = sorted(path.name for path in tmp_path.iterdir() if not is_incidental(path.name))
    assert found == sorted([folder, tracker, "checkpoints.jsonl"])
    with open_run(tmp_path, **options) as ckpt:
        assert_is_state(ckpt.load(), 500)
        ckpt.save(state_at(501), step=501).result()
        assert (tmp_path / tracker).read_text() == text.replace("500", "501")


@pytest.mark.parametrize(
    ("naming", "error", "said"),
    [
        ("slime", ValueError, '"skyrl", "verl", "open-instruct", "deepspeed"'),
        (3, TypeError, "a word or Naming"),
    ],
)
def test_a_naming_that_nobody_knows_is_refused(tmp_path, naming, error, said):
    with pytest.raises(error, match=said):
        AsyncCheckpointer(tmp_path / "run", naming=naming)


@pytest.mark.parametrize("tracker", ["", "a/b", "..", ".", "a\\b", "a\nb", "/latest"])
def test_a_tracker_that_is_no_name_of_a_file_is_refused(tracker):
    with pytest.raises(ValueError, match="tracker must be the name of a file"):
        Naming(tracker=tracker)


@pytest.mark.parametrize("text", ["", "x", "{}{}", "{:x}", "{:8d}", "{}\n{}", "{}\nmore", "{step}", "{", "{:o}"])
def test_a_tracker_whose_text_has_no_plain_step_is_refused(text):
    with pytest.raises(ValueError, match=r"text of tracker latest .* such as"):
        Tracker("latest", text)


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
    save_into(tmp_path, 400, 499, keep=1, **SKYRL)
    assert tracker.read_text() == content
    save_into(tmp_path, 501, **SKYRL)
    assert tracker.read_text() == "501"


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
        save_into(tmp_path, 1)
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
import os, sys
from async_ckpt import Naming, RunTakenError, StepBehindError, StepExistsError
from states import open_run, state_at

with open_run(sys.argv[1], naming=Naming(tracker="latest_ckpt_global_step.txt")) as ckpt:
    for step in range(int(sys.argv[2]), 40, 3):
        try:
            ckpt.save(state_at(step), step=step).result()
        except (RunTakenError, StepBehindError, StepExistsError):
            pass
os._exit(0)  # how an interpreter ends is for other tests
"""


def test_a_tracker_that_several_processes_write_is_only_ever_seen_to_rise(tmp_path, nursery):
    tracker = tmp_path / "run/latest_ckpt_global_step.txt"
    children = [nursery.start(SAVING, tmp_path / "run", first) for first in (1, 2, 3)]
    seen: list[int] = []

    def last_is_seen() -> bool:
        if tracker.exists():
            seen.append(int(tracker.read_text()))
        return bool({37, 38, 39} & {*seen[-1:]})  # the last step of the one that has the run

    until(last_is_seen)
    assert [(ended.status, ended.err) for ended in [child.ended() for child in children]] == [(0, "")] * 3
    assert seen == sorted(seen)
    with open_run(tmp_path / "run") as ckpt:
        assert int(tracker.read_text()) == ckpt.latest()


def test_a_rollback_that_died_before_it_moved_the_tracker_is_finished_by_a_process_without_that_option(
    tmp_path,
):
    tracker = tmp_path / "latest_ckpt_global_step.txt"
    with open_run(tmp_path, on_rollback="retire", **SKYRL) as ckpt, scripted(ckpt) as disk:
        save(ckpt, 10, 20, 30)
        ckpt.restore(state_at(0), step=10)
        disk.fail("move", error=GONE, times=None)
        ckpt.save(state_at(15), step=15).result()
    assert tracker.read_text() == "30"
    save_into(tmp_path, 16, **SKYRL)
    assert tracker.read_text() == "16"


def test_a_rollback_takes_nobody_elses_newer_step_from_the_tracker(tmp_path):
    tracker = tmp_path / "latest_ckpt_global_step.txt"
    with open_run(tmp_path, on_rollback="retire", **SKYRL) as ckpt:
        save(ckpt, 10, 20)
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
        save_into(tmp_path, 20)
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
        assert "was not moved to step 2" in caplog.text


# --- the record ------------------------------------------------------------------------------------------------


def test_a_record_is_committed_with_its_step_and_stands_in_the_journal(tmp_path):
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_at(1), step=1, record={"loss": 0.5, "epoch": 3, "lr": [1, 2.5], "tags": {"a": None}}).result()
        ckpt.save(state_at(2), step=2).result()

    manifest = json.loads((tmp_path / "step_00000001/manifest.json").read_text())
    assert manifest["record"] == {"loss": 0.5, "epoch": 3, "lr": [1, 2.5], "tags": {"a": None}}
    first, second = (json.loads(line) for line in (tmp_path / "checkpoints.jsonl").read_text().splitlines())
    assert (first["loss"], first["epoch"], first["lr"]) == (0.5, 3, [1, 2.5])
    assert set(second) == {"name", "batch", "state_path", "step", "path", "num_bytes", "created"}


def test_a_record_is_what_it_was_when_save_was_called(tmp_path):
    record = {"loss": 1.0, "seen": [1]}
    with open_run(tmp_path) as ckpt, scripted(ckpt) as disk:
        stop = disk.stop("write")
        handle = ckpt.save(state_at(1), step=1, record=record)
        record["loss"] = 2.0
        record["seen"].append(2)
        stop.release()
        handle.result()
    manifest = json.loads((tmp_path / "step_00000001/manifest.json").read_text())
    assert manifest["record"] == {"loss": 1.0, "seen": [1]}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_loss_that_is_not_finite_costs_no_save_and_every_line_stays_json(tmp_path, value):
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_at(1), step=1, record={"loss": value, "all": [value, 1.0]}).result()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    manifest = json.loads((tmp_path / "step_00000001/manifest.json").read_text(), parse_constant=refuse)
    assert manifest["record"] == {"loss": None, "all": [None, 1.0]}
    line = json.loads((tmp_path / "checkpoints.jsonl").read_text(), parse_constant=refuse)
    assert "loss" not in line


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    ("record", "error", "told"),
    [
        ({"loss": torch.ones(2)}, TypeError, r'record\["loss"\] is of type torch\.Tensor'),
        ({"a": {"b": [1, {2, 3}]}}, TypeError, r'record\["a"\]\["b"\]\[1\] is of type builtins\.set'),
        ({"a": b"x"}, TypeError, r'record\["a"\] is of type builtins\.bytes'),
        ({"a": {1: 2}}, TypeError, r'record\["a"\] has the key 1'),
        ({5: 2}, TypeError, "record has the key 5"),
        ([("loss", 1)], TypeError, "must be a mapping"),
        ({"a": CIRCLE}, ValueError, "nested more than"),
        ({"a": 10**5000}, ValueError, "cannot be written as JSON"),
        ({"text": "x" * RECORD_BYTES}, ValueError, "bytes of JSON"),
        ({"step": 5}, ValueError, r'record\["step"\]'),
        ({"path": "x"}, ValueError, r'record\["path"\]'),
        ({"num_bytes": 5}, ValueError, r'record\["num_bytes"\]'),
        ({"created": 5}, ValueError, r'record\["created"\]'),
        ({"state_path": "x"}, ValueError, r'record\["state_path"\]'),
        ({"name": 5}, ValueError, r'record\["name"\]'),
        ({"batch": "5"}, ValueError, r'record\["batch"\]'),
        ({"batch": True}, ValueError, r'record\["batch"\]'),
        ({"rolling": 1}, ValueError, r'record\["rolling"\]'),
        ({"ttl_seconds": -1}, ValueError, "ttl_seconds"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_record_that_cannot_be_written_is_refused_by_name_before_anything_is_started(tmp_path, record, error, told):
    with open_run(tmp_path) as ckpt:
        with pytest.raises(error, match=told):
            ckpt.save(state_at(1), step=1, record=record)
        assert names_below(tmp_path) == []
        assert ckpt.metrics()["saves_in_flight"] == 0
        assert ckpt.save(state_at(1), step=1).result().status == "committed"


@pytest.mark.parametrize("ttl_seconds", [0, -1, float("nan"), float("inf"), "60", True])
def test_a_time_to_live_is_a_finite_number_above_zero(tmp_path, ttl_seconds):
    with open_run(tmp_path) as ckpt, pytest.raises(ValueError, match="ttl_seconds"):
        ckpt.save(state_at(1), step=1, ttl_seconds=ttl_seconds)


def test_a_record_as_large_as_may_be_is_taken(tmp_path):
    text = "x" * (RECORD_BYTES - len('{"text": ""}'))
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_at(1), step=1, record={"text": text}).result()
        with pytest.raises(ValueError, match="bytes of JSON"):
            ckpt.save(state_at(2), step=2, record={"text": text + "x"})
        assert_is_state(ckpt.load(1), 1)


def test_overwriting_a_step_replaces_its_record(tmp_path):
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_at(1), step=1, record={"loss": 1.0, "old": True}).result()
        ckpt.save(state_at(1), step=1, record={"loss": 0.5}, overwrite=True).result()
        (line,) = records(tmp_path)
    assert line["loss"] == 0.5
    assert "old" not in line


# --- the journal as tinker-cookbook reads it ---------------------------------------------------------------------


@dataclass
class CheckpointRecord:
    """What its reader makes of a line: the fields that it knows, and the rest."""

    name: str
    batch: int
    epoch: int | None = None
    final: bool | None = None
    state_path: str | None = None
    sampler_path: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def cookbook_records(journal: bytes) -> list[CheckpointRecord]:
    """Strict, as the cookbook's own reader: a line that is no JSON object, or lacks a name or a batch, raises."""
    found = []
    for line in journal.decode("utf-8").splitlines():
        raw = json.loads(line)
        known = {key: raw.pop(key) for key in CheckpointRecord.__dataclass_fields__ if key in raw}
        found.append(CheckpointRecord(**known, extra=raw))
        assert type(found[-1].name) is str
        assert type(found[-1].batch) is int
    return found


def test_tinker_cookbook_finds_the_last_checkpoint_in_the_journal_and_its_path_loads(tmp_path):
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_at(20), step=20).result()
        last = {
            "name": "final",
            "batch": 41,
            "epoch": 2,
            "final": True,
            "sampler_path": "s3://b/w",
            "tokens": 10**7,
        }
        report = ckpt.save(state_at(40), step=40, record={**last, "loss": None}).result()

    first, second = cookbook_records((tmp_path / "checkpoints.jsonl").read_bytes())
    assert (first.name, first.batch, first.epoch, first.final) == ("000020", 21, None, None)
    assert (second.name, second.batch, second.epoch, second.final) == ("final", 41, 2, True)
    assert second.sampler_path == "s3://b/w"
    assert str(tmp_path / second.state_path) == report.path
    assert second.extra.keys() == {"tokens", "step", "path", "num_bytes", "created"}
    assert_is_state(async_ckpt.load(tmp_path / second.state_path), 40)


def test_a_reader_of_the_journal_never_finds_a_torn_line_while_it_is_written(tmp_path):
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_at(1), step=1).result()
        with open(tmp_path / "checkpoints.jsonl", "rb") as held:
            ckpt.save(state_at(2), step=2).result()
            assert len(cookbook_records(held.read())) == 1
    assert len(cookbook_records((tmp_path / "checkpoints.jsonl").read_bytes())) == 2


# --- several roots, and stores -----------------------------------------------------------------------------------


def test_every_root_has_its_own_tracker_and_the_record(tmp_path):
    roots = [tmp_path / "near", tmp_path / "far"]
    roots[0].mkdir()
    (roots[0] / "latest_ckpt_global_step.txt").write_text("500")
    with open_run(roots, **SKYRL) as ckpt:
        report = everywhere(ckpt, ckpt.save(state_at(400), step=400, record={"loss": 0.5}))
    assert [(root / "latest_ckpt_global_step.txt").read_text() for root in roots] == ["500", "400"]
    lines = [json.loads((root / "checkpoints.jsonl").read_text()) for root in roots]
    assert [line["loss"] for line in lines] == [0.5, 0.5]
    assert f"{roots[0]}/{lines[0]['state_path']}" == report.path
    assert lines[1]["state_path"] == lines[0]["state_path"]


def test_a_step_that_is_copied_to_another_root_keeps_its_record(tmp_path):
    roots = [tmp_path / "near", tmp_path / "far"]
    with open_run(roots) as ckpt:
        everywhere(ckpt, ckpt.save(state_at(1), step=1, record={"loss": 0.5}, ttl_seconds=1e6))
        shutil.rmtree(roots[1])
        assert ckpt.catch_up() == {str(roots[0]): [], str(roots[1]): [1]}
    near, far = (root / "step_00000001/manifest.json" for root in roots)
    assert near.read_bytes() == far.read_bytes()
    line = json.loads((roots[1] / "checkpoints.jsonl").read_text())
    assert (line["loss"], line["ttl_seconds"]) == (0.5, 1e6)


def test_on_a_store_the_tracker_stays_with_what_is_newer_and_the_journal_names_no_credentials(s3):
    s3.client.create_bucket(Bucket="layouts")
    root = Place("s3://layouts/run", options=s3.options)

    def read(name: str) -> bytes:
        return s3.client.get_object(Bucket="layouts", Key=f"run/{name}")["Body"].read()

    with AsyncCheckpointer(root, keep=Keep(best=("loss", "min", 1)), **SKYRL) as ckpt:
        for step, loss in ((100, 0.1), (200, 0.3), (300, 0.2)):
            ckpt.save(state_at(step), step=step, record={"loss": loss}).result()
            ckpt.wait()
        assert read("latest_ckpt_global_step.txt") == b"300"
        assert ckpt.steps() == [100, 300]
        s3.client.put_object(Bucket="layouts", Key="run/latest_ckpt_global_step.txt", Body=b"500\n")
        ckpt.save(state_at(400), step=400, record={"loss": 0.4}).result()
        ckpt.wait()
        assert read("latest_ckpt_global_step.txt") == b"500\n"
        assert ckpt.steps() == [100, 400]

    journal = read("checkpoints.jsonl")
    assert s3.options["secret_access_key"].encode() not in journal
    first, second = cookbook_records(journal)
    assert (first.batch, first.extra["loss"], second.batch) == (101, 0.1, 401)
    assert first.state_path is not None
    assert first.state_path.startswith("global_step_100/rank_00000.")
    assert_is_state(async_ckpt.load(replace(root, url=f"{root.text}/{first.state_path}")), 100)


@pytest.mark.parametrize("step_format", ["step_{:08d}", "global_step_{}", "global_step{}", "v2-{}"])
def test_a_run_is_loaded_by_its_root_whatever_its_steps_are_called(tmp_path, step_format):
    with AsyncCheckpointer(tmp_path, naming=Naming(step_format)) as ckpt:
        for step in (9, 10, 100):
            ckpt.save({"w": torch.tensor(step)}, step=step).result()
    (tmp_path / "global_step_2000").mkdir()  # of another writer: no commit

    assert async_ckpt.load(tmp_path)["w"] == 100
