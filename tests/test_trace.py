"""The trace of a run: a file that says what each thread did, whole whenever somebody looks."""

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from racing import Call, until
from scripted_disk import scripted
from states import assert_is_state, state_at

from async_ckpt import AsyncCheckpointer, StorageFullError
from async_ckpt.core.timing import NO_TRACE, Spans, Trace
from async_ckpt.core.trace import TraceFile

NUM_SEGMENTS = 3  # of an archive of 9 MiB in segments of 4


def events(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_bytes())


def counted(path: Path) -> Counter[str]:
    return Counter(event["name"] for event in events(path) if event["ph"] == "X")


def traced(root: Path, **options: Any) -> AsyncCheckpointer:
    return AsyncCheckpointer(root / "run", segment_bytes=4 << 20, trace=root / "out" / "run.json", **options)


def test_every_segment_and_every_act_of_each_save_is_in_it(tmp_path):
    with traced(tmp_path) as ckpt:
        ckpt.prewarm(state_at(1, 9))
        for step in (1, 2):
            ckpt.save(state_at(step, 9), step=step)
    told = counted(tmp_path / "out" / "run.json")
    assert told["prewarm"] == 1
    for name in ("plan", "snapshot", "finish", "commit"):
        assert told[name] == 2, name
    for name in ("stage", "write", "digest"):
        assert told[name] == 2 * NUM_SEGMENTS, name


def has_commits(path, num):
    try:
        return counted(path)["commit"] == num
    except json.JSONDecodeError:
        return False  # it is being written at this moment


def test_it_is_whole_after_each_save_and_grows(tmp_path):
    path = tmp_path / "out" / "run.json"
    with traced(tmp_path) as ckpt:
        assert events(path) == []
        for step in (1, 2, 3):
            ckpt.save(state_at(step), step=step).result()
            until(lambda step=step: has_commits(path, step))
        assert_is_state(ckpt.load(), 3)


def test_what_failed_unseen_does_not_keep_it_from_being_complete(tmp_path):
    path = tmp_path / "out" / "run.json"
    ckpt = traced(tmp_path)
    with scripted(ckpt) as disk:
        disk.fail("finish", error=StorageFullError("full", path="x", needed_bytes=2, free_bytes=1))
        path.unlink()
        ckpt.save(state_at(1), step=1)
        with pytest.warns(RuntimeWarning, match="incomplete"), pytest.raises(StorageFullError):
            ckpt.close()


def test_options_that_are_refused_leave_the_file_of_the_run_before(tmp_path):
    with traced(tmp_path) as ckpt:
        ckpt.save(state_at(1), step=1)
    before = (tmp_path / "out" / "run.json").read_bytes()
    with pytest.raises(ValueError, match="max_bandwidth"):
        traced(tmp_path, max_bandwidth=0)
    assert (tmp_path / "out" / "run.json").read_bytes() == before


def test_times_are_those_of_the_clock_and_threads_have_names(tmp_path):
    with traced(tmp_path) as ckpt:
        ckpt.save(state_at(1, 9), step=1).result()
    told = events(tmp_path / "out" / "run.json")
    named = {event["tid"]: event["args"]["name"] for event in told if event["ph"] == "M"}
    spans = [event for event in told if event["ph"] == "X"]
    assert {event["tid"] for event in spans} <= named.keys()
    assert named[threading.get_native_id()] == threading.current_thread().name
    assert all(event["dur"] >= 0 for event in spans)
    whole = {event["ph"]: event["ts"] for event in told if event["name"] == "save 1"}
    assert whole["b"] <= min(event["ts"] for event in spans if event["name"] == "stage")
    assert whole["e"] >= max(event["ts"] + event["dur"] for event in spans if event["name"] == "commit")


def test_a_step_that_the_guard_holds_back_is_in_it(tmp_path):
    parameter = torch.nn.Parameter(torch.zeros(40 << 18))  # several times the host memory that it may take
    optimizer = torch.optim.SGD([parameter])
    parameter.grad = torch.zeros_like(parameter)
    with traced(tmp_path, guard=optimizer, host_bytes=16 << 20) as ckpt, scripted(ckpt) as disk:
        disk.stop("write")
        ckpt.save({"weight": parameter}, step=1)
        stepping = Call(optimizer.step)
        stepping.wait_until_inside("hold")
        disk.release_all()
        stepping.outcome()
    assert counted(tmp_path / "out" / "run.json")["guard"] == 1


def test_what_failed_is_in_it_too(tmp_path):
    full = StorageFullError("full", path="x", needed_bytes=2, free_bytes=1)
    with traced(tmp_path) as ckpt, scripted(ckpt) as disk:
        disk.fail("finish", error=full)
        with pytest.raises(StorageFullError):
            ckpt.save(state_at(1), step=1).result()
    told = counted(tmp_path / "out" / "run.json")
    assert told["finish"] == 1
    assert told["commit"] == 0


def test_a_file_that_cannot_be_made_is_an_error_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        AsyncCheckpointer(tmp_path / "run", trace=tmp_path / "file" / "run.json")


def test_a_file_that_goes_away_costs_no_save_and_is_told_at_the_end(tmp_path):
    ckpt = traced(tmp_path)
    (tmp_path / "out" / "run.json").unlink()
    ckpt.save(state_at(1), step=1).result()
    with pytest.warns(RuntimeWarning, match="incomplete"):
        ckpt.close()
    with AsyncCheckpointer(tmp_path / "run") as again:
        assert again.steps() == [1]


def test_many_threads_write_one_file(tmp_path):
    file = TraceFile(tmp_path / "x.json")

    def work() -> None:
        for number in range(200):
            with file.trace.span("work", number=number):
                pass
            file.write()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.close()
    assert counted(tmp_path / "x.json") == {"work": 800}


def test_without_a_trace_nothing_is_kept():
    with NO_TRACE.span("x"):
        pass
    NO_TRACE.whole("x", 0.0)
    assert NO_TRACE.take() == []
    assert Spans().traced("x", lambda: 5)() == 5


def test_spans_are_told_by_the_clock_that_is_given():
    now = [10.0]
    trace = Trace(lambda: now[0])
    with trace.span("x", segment=3):
        now[0] = 12.5
    told = [event for event in trace.take() if event["ph"] == "X"]
    assert [(event["dur"], event["args"]) for event in told] == [(2.5e6, {"segment": 3})]
    assert trace.take() == []
