"""`async-ckpt bench` and `doctor`: figures that hang together, and nothing that is left behind."""

import json
import os
import signal
import subprocess
import sys
import threading
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from commands import documented, run_command, store_options
from racing import until

from async_ckpt.core.timing import wall_time
from async_ckpt.tools.command.bench import Measured, advice_for

SMALL = ("--size", "8MB", "--tensors", "10")


def test_a_disk_is_measured_and_left_as_it_was(tmp_path):
    (tmp_path / "mine").touch()
    told = documented("bench", tmp_path, *SMALL)

    rows = {row["name"]: row for row in told["rows"]}
    assert (told["num_bytes"], told["num_tensors"], told["num_rounds"]) == (8_000_000, 10, 3)
    assert {"save until durable", "restore, in place", "torch.save and fsync", "fsync of 4 kB", "listing"} < {*rows}
    save = rows["save until durable"]
    assert save["bandwidth"] == pytest.approx(8_000_000 / save["seconds"])
    assert rows[save["beside"]]["ratio"] is None
    assert save["ratio"] > 0
    assert told["advice"].endswith(".")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_folder_that_was_not_there_is_gone_again(tmp_path):
    assert "training held up" in run_command("bench", tmp_path / "new", *SMALL).stdout
    assert not (tmp_path / "new").exists()


def test_a_store_is_measured_and_left_as_it_was(bucket):
    store, keys = store_options(bucket.server.options)
    ended = run_command("bench", bucket.url("runs"), *SMALL, *store, "--json", **keys)
    assert ended.returncode == 0, ended.stderr
    rows = {row["name"]: row for row in json.loads(ended.stdout)["rows"]}
    assert {"raw write, multipart", "save until durable", "conditional put of 4 kB"} < {*rows}
    assert "torch.save and fsync" not in rows
    assert bucket.server.keys(bucket) == []
    assert bucket.uploads() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_when_it_is_interrupted(tmp_path, number):
    command = [sys.executable, "-m", "async_ckpt", "bench", str(tmp_path), "--size", "200MB"]
    before = signal.signal(number, signal.default_int_handler)  # a child inherits only that a signal is ignored
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        signal.signal(number, before)
        until(lambda: any(tmp_path.glob("async-ckpt-bench.*/run/step_*")))
        child.send_signal(number)
        out, _ = child.communicate(timeout=60)
    assert (child.returncode, out) == (130, b"")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_in_a_store_when_it_is_terminated(bucket):
    store, keys = store_options(bucket.server.options)
    command = [sys.executable, "-m", "async_ckpt", "bench", bucket.url("runs"), "--size", "200MB", *store]
    with subprocess.Popen(command, env=os.environ | keys, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        until(lambda: any("/run/step_" in key for key in bucket.keys()))  # noqa: SIM118
        child.send_signal(signal.SIGTERM)
        out, _ = child.communicate(timeout=60)
    assert (child.returncode, out) == (130, b"")
    assert bucket.keys() == []
    assert bucket.uploads() == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--size", "large"), "give the size as 1GB"),
        (("--size", "0"), "at least"),
        (("--size", "100000GB"), "pass a smaller --size"),
        (("--tensors", "0"), "--tensors must be at least 1, got 0"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(tmp_path, arguments, said):
    ended = run_command("bench", tmp_path, *arguments)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert said in ended.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("save", "stall", "write", "is_local", "said"),
    [
        (0.5, 0.001, 0.4, True, "Nothing stands out"),
        (0.5, 0.2, 0.4, True, "guard=optimizer"),
        (1.0, 0.001, 0.4, True, "Saves are slower than the place"),
        (9.0, 0.001, 8.0, True, "The place itself writes"),
        (9.0, 0.2, 8.0, False, "AsyncCheckpointer([a local folder, this root])"),
    ],
)
def test_the_advice_follows_from_the_figures(save, stall, write, is_local, said):
    raw = Measured("raw write, O_DIRECT", 10**9, None, [write])
    rows = [
        raw,
        Measured("save until durable", 10**9, raw, [save]),
        Measured("training held up", 0, None, [stall]),
    ]
    assert said in advice_for(rows, is_local=is_local)


class LateClock(BaseHTTPRequestHandler):
    """A store that refuses everything, an hour late."""

    def send_response(self, code: int, message: str | None = None) -> None:
        self.send_response_only(code, message)
        self.send_header("Date", formatdate(wall_time() - 3600, usegmt=True))

    def do_GET(self) -> None:
        self.send_response(403)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_doctor_compares_the_clock_with_that_of_the_store(bucket):
    store, keys = store_options(bucket.server.options)
    told = json.loads(run_command("doctor", bucket.url("runs"), *store, "--json", **keys).stdout)["findings"]
    assert [(one["verdict"], "agrees" in one["text"]) for one in told if one["subject"] == "clock"] == [("ok", True)]

    with HTTPServer(("127.0.0.1", 0), LateClock) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        place = ["--endpoint", f"http://127.0.0.1:{server.server_port}", "--deadline", "1"]
        ended = run_command("doctor", "s3://bucket/runs", *place, "--json", **keys)
        server.shutdown()
        thread.join()
    (clock,) = [one for one in json.loads(ended.stdout)["findings"] if one["subject"] == "clock"]
    assert (ended.returncode, clock["verdict"]) == (1, "bad")
    assert "3600 s ahead of" in clock["text"]


@pytest.mark.skipif(sys.platform != "linux", reason="has /proc")
def test_doctor_says_where_no_file_can_be_made():
    told = documented("doctor", "/proc/nowhere", status=1)["findings"]
    assert [one["verdict"] for one in told if one["subject"] == "/proc/nowhere"] == ["bad"]
