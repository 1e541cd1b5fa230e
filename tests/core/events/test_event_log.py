"""The bounded log of a run's events: nothing that happens to it is an error of a save, and anything may be in it."""

import gzip
import json
import logging
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from racing import Call, Gate

from async_ckpt import Place
from async_ckpt.core.events.kinds import KINDS, brief, dump, event, largest, parse
from async_ckpt.core.events.log import FOLDER, MAX_BYTES, NAME, PART_BYTES, EventLog
from async_ckpt.core.storage.local import LocalStorage
from async_ckpt.errors import StorageUnavailableError

NOW = 1_700_000_000.25


def log_at(folder: Path) -> EventLog:
    return EventLog(LocalStorage(folder), lambda: NOW)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def steps_of(log: EventLog) -> list[int]:
    return [one["step"] for one in log.read()]


def test_events_come_back_in_their_order_with_all_fields_of_their_kind(tmp_path):
    log = log_at(tmp_path)
    log.note("save", 5, num_bytes=7, groups={"model": 7}, record={"loss": 0.5, "name": "<b>"})
    log.note("retention", 5, deleted=[1, 2])
    log.write()
    log.note("restore", 5, behind=True, total_seconds=1.5)
    log.write()

    save, retention, restore = log.read()

    assert save == event("save", NOW, 5, num_bytes=7, groups={"model": 7}, record={"loss": 0.5, "name": "<b>"})
    assert save["stall_seconds"] is None
    assert save["unchanged"] == []
    assert retention == {"kind": "retention", "time": NOW, "step": 5, "opened": None, "deleted": [1, 2]}
    assert restore == event("restore", NOW, 5, total_seconds=1.5, behind=True)
    assert (restore["total_seconds"], restore["behind"], restore["find_seconds"]) == (1.5, True, None)


def test_saves_that_are_skipped_in_a_row_are_one_event(tmp_path):
    log = log_at(tmp_path)
    for step in (4, 5, 6):
        log.note("skipped", step, first_step=step, count=1)
    log.note("failed", 7, error="StorageFullError", message="full")
    log.note("skipped", 8, first_step=8, count=1)
    log.write()

    assert [(one["kind"], one["step"], one.get("first_step"), one.get("count")) for one in log.read()] == [
        ("skipped", 6, 4, 3),
        ("failed", 7, None, None),
        ("skipped", 8, 8, 1),
    ]


def test_the_files_stay_below_their_limit_and_the_oldest_events_go_first(tmp_path):
    log = log_at(tmp_path)
    step = 0
    while step < 100 or steps_of(log)[0] == 0:
        for _ in range(100):
            log.note("failed", step, message=random.Random(step).randbytes(200).hex())  # which hardly compresses
            step += 1
        log.write()
        assert size_of(tmp_path) <= MAX_BYTES

    found = steps_of(log)

    assert found == list(range(found[0], step))
    assert size_of(tmp_path) > MAX_BYTES / 2
    # They are what gzip and jq read.
    parts = sorted((tmp_path / FOLDER).iterdir())
    assert json.loads(gzip.decompress(parts[0].read_bytes()).splitlines()[0])["step"] == found[0]


def test_a_line_that_a_killed_writer_has_left_half_costs_only_itself(tmp_path):
    log = log_at(tmp_path)
    log.note("save", 1)
    log.write()
    with open(tmp_path / NAME, "ab") as file:
        file.write(b'{"kind":"save","time":17')
    log.note("save", 2)
    log.write()

    assert steps_of(log) == [1, 2]


def test_lines_that_are_put_away_at_this_moment_are_read_once(tmp_path):
    log = log_at(tmp_path)
    log.note("save", 1)
    log.note("save", 2)
    log.write()
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "000001.jsonl.gz").write_bytes(gzip.compress((tmp_path / NAME).read_bytes()))

    assert steps_of(log) == [1, 2]


def test_damaged_files_and_those_of_others_are_left_out(tmp_path):
    log = log_at(tmp_path)
    log.note("save", 1)
    log.write()
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "000001.jsonl.gz").write_bytes(b"\x1f\x8b no gzip")
    (tmp_path / FOLDER / "000002.jsonl.gz").write_bytes(
        gzip.compress(b" " * 10**8 + b'\n{"kind":"save","time":1,"step":9}')
    )
    (tmp_path / FOLDER / "notes.txt").write_text("mine")

    assert steps_of(log) == [1]


def test_an_error_is_logged_once_and_the_events_are_written_when_it_is_over(tmp_path, caplog):
    log = log_at(tmp_path)
    (tmp_path / NAME).mkdir()
    with caplog.at_level(logging.WARNING, "async_ckpt"):
        for step in (1, 2):
            log.note("save", step)
            log.write()
    (tmp_path / NAME).rmdir()
    log.note("save", 3)
    log.write(again=False)
    assert not (tmp_path / NAME).exists()
    log.write()

    assert len(caplog.records) == 1
    assert "is incomplete" in caplog.text
    assert steps_of(log) == [1, 2, 3]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_no_error_of_a_writer_and_one_of_a_reader(tmp_path):
    log = log_at(tmp_path)
    log.note("save", 1)
    log.write()
    (tmp_path / NAME).chmod(0)
    log.note("save", 2)
    log.write()
    with pytest.raises(StorageUnavailableError):
        log.read()
    (tmp_path / NAME).chmod(0o600)

    assert steps_of(log) == [1]


def test_a_caller_of_save_never_waits_for_the_log(tmp_path):
    """`note` takes no lock: a write that hangs holds up nobody but itself."""

    class Hanging(LocalStorage):
        gate = Gate()

        def append_lines(self, path: str, lines: bytes) -> int:
            self.gate.passed()
            return super().append_lines(path, lines)

    storage = Hanging(tmp_path)
    log = EventLog(storage, lambda: NOW)
    log.note("save", 1)
    write = Call(log.write)
    storage.gate.wait_reached()
    log.note("save", 2)
    storage.gate.open()
    write.outcome()
    log.write()

    assert steps_of(log) == [1, 2]


def test_processes_that_append_at_once_lose_no_line(tmp_path):
    script = (
        "import sys; from async_ckpt.core.events.log import EventLog; from async_ckpt.core.storage.local import LocalStorage\n"
        "log = EventLog(LocalStorage(sys.argv[1]), lambda: 1.7e9)\n"
        "for step in range(50):\n    log.note('save', int(sys.argv[2]) + step); log.write()"
    )
    writers = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path), str(first)]) for first in (0, 50)]

    assert [writer.wait() for writer in writers] == [0, 0]
    assert sorted(steps_of(log_at(tmp_path))) == list(range(100))


def test_at_a_store_the_lines_of_two_processes_are_kept_and_nothing_grows_without_bound(s3, bucket):
    storage = Place(f"s3://{bucket}/run", options=s3.options).storage()
    one, other = EventLog(storage, lambda: NOW), EventLog(storage, lambda: NOW)
    for step in range(0, 6, 2):
        one.note("save", step)
        one.write()
        other.note("save", step + 1)
        other.write()
    assert steps_of(one) == list(range(6))
    for step in range(6, 600):
        one.note("failed", step, message="x" * 400)
        if step % 50 == 0:
            one.write()
    one.write()

    assert steps_of(other) == list(range(600))
    assert len(storage.names(FOLDER)) < 600 * 500 / PART_BYTES + 2
    assert storage.sizes("").get(NAME, 0) <= 2 * PART_BYTES


def test_the_page_names_every_field_of_an_event():
    page = (Path(__file__).parents[3] / "docs" / "history.md").read_text("utf-8")
    named = {*re.findall(r"`(\w+)`", page)}
    for kind in KINDS:
        assert {kind, *event(kind, NOW, 1)} <= named, kind


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    ["num_bytes", "groups", "record", "destinations", "unchanged", "deleted", "count", "x", "step"]
)


@given(
    kind=st.sampled_from(["save", "failed", "skipped", "restore", "rollback", "retention", "of a later version", 3]),
    fields=st.dictionaries(FIELDS, ANYTHING, max_size=6),
    time=ANYTHING | st.just(1.5),
)
def test_whatever_a_line_says_an_event_has_fields_of_their_types(kind, fields, time):
    line = json.dumps({"kind": kind, "time": time, **fields}).encode()
    for one in parse(line):
        known = event(one["kind"], 0.0, 0)
        assert one.keys() == known.keys()
        assert isinstance(one["time"], float)
        json.dumps(one, allow_nan=False)
        for name, value in one.items():
            if isinstance(known[name], dict | list | str):
                assert isinstance(value, type(known[name])), name
        assert parse(b"".join(dump([one]))) == [one]


@pytest.mark.parametrize(
    "line",
    [b"", b"null", b"[1]", b"{", b"\xff\xfe", b'{"kind":"save"}', b"[" * 100_000, b'{"kind":"save","time":1,"step":' + b"9" * 5000 + b"}"],
)  # fmt: skip
def test_a_line_that_is_no_event_is_left_out(line):
    good = dump([event("save", NOW, 1)])[0]

    assert [one["step"] for one in parse(good + line + b"\n" + dump([event("save", NOW, 2)])[0])] == [1, 2]


def test_what_is_no_number_in_a_record_is_none():
    line = b'{"kind":"save","time":1.0,"step":1,"record":{"loss":NaN,"text":"\\u003cscript>","most":-Infinity}}'

    (one,) = parse(line)

    assert one["record"] == {"loss": None, "text": "<script>", "most": None}
    assert not any(isinstance(value, float) and math.isnan(value) for value in one["record"].values())


def test_long_values_of_a_record_and_small_groups_are_left_out_of_the_log():
    assert brief({"loss": 0.5, "text": "x" * 2000, "name": "a"}) == {"loss": 0.5, "name": "a"}
    assert len(brief({str(number): "x" * 500 for number in range(100)})) < 10
    groups = {f"group {number}": number for number in range(100)}
    assert largest(groups) == {f"group {number}": number for number in range(36, 100)}
