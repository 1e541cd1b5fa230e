"""Sidecars as processes: signals at any moment, engines that are killed, and what is there afterwards."""

import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from children import Child
from engine_servers import PlainServer, SGLangServer, following, publish, status_in, versions_in, wait_a_moment
from racing import Gate, until

from async_ckpt.following import Post, SGLang

NUM_KILLED = 50 if os.environ.get("ASYNC_CKPT_MATRICES") == "all" else 6


@pytest.fixture
def start(nursery: Any, root: Path, into: Path, tmp_path: Path) -> Iterator[Any]:
    """Starts a sidecar by the command; a test that fails leaves none."""
    watches: list[int] = []

    def started(*options: object) -> Child:
        status = tmp_path / "status.json"
        given = (root, "--into", into, "--poll", 0.02, "--status", status, *options)
        child: Child = nursery.start_module("async_ckpt", "follow", *given)
        watches.append(os.pidfd_open(child.pid))
        return child

    yield started
    for watch in watches:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(watch, signal.SIGKILL)
        os.close(watch)


def test_an_engine_never_loads_a_mixture_however_often_its_sidecar_is_killed(root, into, publisher, start):
    """Killed in a pull, in a load, and between them; the next sidecar goes on, and the engine has the newest at last."""
    dice = random.Random(33)
    with SGLangServer() as engine:
        engine.between = wait_a_moment
        version = 0
        for _ in range(NUM_KILLED):
            child = start("--sglang", engine.url)
            version += 1
            publish(publisher, version)
            threading.Event().wait(dice.uniform(0.0, 0.6))
            child.send(signal.SIGKILL)
            child.ended()
            publish(publisher, version := version + 1)
        child = start("--sglang", engine.url)
        engine.wait_for(version)
        child.send(signal.SIGTERM)
        assert child.ended().status == 0

    assert engine.versions == sorted(engine.versions)
    assert versions_in(into) == {float(version)}


def test_a_folder_is_not_changed_while_an_engine_loads_for_a_sidecar_that_was_killed(
    root, into, publisher, start, gate
):
    publish(publisher, 1)
    with SGLangServer() as engine, PlainServer() as other:
        engine.between = gate.passed
        child = start("--sglang", engine.url)
        gate.wait_reached()
        child.send(signal.SIGKILL)
        child.ended()
        publish(publisher, 2)
        with following(root, into, Post(other.url)):  # it may load what is there, and not pull
            again = start("--sglang", engine.url)
            until(lambda: len(engine.asked) == 2)
            assert versions_in(into) == {1.0}
            gate.open()
            engine.wait_for(2)
            other.wait_for(2)
            again.send(signal.SIGTERM)
            assert again.ended().status == 0

    assert engine.versions == [1, 1, 2]
    assert other.versions == [2]


def test_the_folder_of_a_killed_sidecar_is_free_when_the_load_would_be_over(root, into, publisher, start, gate):
    publish(publisher, 1)
    with SGLangServer() as engine, PlainServer() as other:
        engine.between = gate.passed
        child = start("--sglang", engine.url, "--answer-within", 1.5)
        gate.wait_reached()
        child.send(signal.SIGKILL)
        child.ended()
        publish(publisher, 2)
        with following(root, into, Post(other.url)):
            other.wait_for(2)
        gate.open()


def test_sigterm_ends_it_at_once_between_versions(publisher, start, tmp_path):
    publish(publisher, 1)
    with SGLangServer() as engine:
        child = start("--sglang", engine.url)
        engine.wait_for(1)
        child.send(signal.SIGTERM)
        ended = child.ended()

    assert ended.status == 0
    assert ended.out.splitlines()[-1].startswith("ended; version 1 ")
    assert status_in(tmp_path / "status.json")["weight_version"] == 1


def test_sigterm_during_a_load_waits_for_the_answer_and_remembers_it(publisher, start, gate):
    publish(publisher, 1)
    with SGLangServer() as engine:
        engine.between = gate.passed
        child = start("--sglang", engine.url)
        gate.wait_reached()
        child.send(signal.SIGTERM)
        gate.open()
        assert child.ended().status == 0
        assert start("--sglang", engine.url, "--once").ended().status == 0

    assert engine.versions == [1]


def is_locked(file: Path) -> bool:
    with file.open("r+") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_sigterm_ends_a_sidecar_that_waits_for_its_turn_to_pull(root, into, publisher, start):
    publish(publisher, 1)
    with SGLangServer() as engine, PlainServer() as slow:
        gate = Gate()
        slow.between = gate.passed
        with following(root, into, Post(slow.url)):
            gate.wait_reached()
            publish(publisher, 2)
            child = start("--sglang", engine.url)
            until(lambda: is_locked(into / ".weight_sync" / "turnstile"))
            child.send(signal.SIGTERM)
            ended = child.ended()
            assert ended.status == 0, ended.err
            assert engine.loaded == []
            gate.open()


def test_sigterm_at_any_moment_leaves_a_whole_version_and_status_0(root, into, publisher, start, tmp_path):
    dice = random.Random(34)
    with SGLangServer() as engine:
        engine.between = wait_a_moment
        for version in range(1, NUM_KILLED + 1):
            (tmp_path / "status.json").unlink(missing_ok=True)
            publish(publisher, 2 * version)
            child = start("--sglang", engine.url)
            until((tmp_path / "status.json").exists)
            publish(publisher, 2 * version + 1)
            threading.Event().wait(dice.uniform(0.0, 0.3))
            child.send(signal.SIGTERM)
            ended = child.ended()
            assert (ended.status, ended.err) == (0, "")
            assert len(versions_in(into)) == 1 or not into.exists()
            assert not engine.loaded or engine.versions[-1] == int(engine.weight_version)


def test_ctrl_c_is_graceful_too_and_has_its_own_status(publisher, start):
    publish(publisher, 1)
    with SGLangServer() as engine:
        child = start("--sglang", engine.url)
        engine.wait_for(1)
        child.send(signal.SIGINT)
        ended = child.ended()

    assert ended.status == 130
    assert "ended; version 1" in ended.out


ENGINE = """
import sys
from engine_servers import SGLangServer
port = int(sys.argv[1])
class Fixed(SGLangServer):
    def start(self):
        self.port = port
        super().start()
engine = Fixed()
print(engine.port, flush=True)
import threading
threading.Event().wait()
"""


def test_an_engine_that_is_killed_while_it_loads_has_the_newest_when_it_is_back(root, into, publisher, tmp_path):
    def new_engine(port: int) -> tuple[subprocess.Popen[str], int]:
        process = subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(port)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, os.environ.get("PYTHONPATH", "")])},
        )
        assert process.stdout is not None
        return process, int(process.stdout.readline())

    publish(publisher, 1)
    process, port = new_engine(0)
    with following(root, into, SGLang(f"http://127.0.0.1:{port}"), status=tmp_path / "s"):
        until(lambda: status_in(tmp_path / "s").get("weight_version") == 1)
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        publish(publisher, 2)
        until(lambda: "does not answer" in (status_in(tmp_path / "s").get("error") or ""))
        publish(publisher, 3)
        process, _ = new_engine(port)
        until(lambda: status_in(tmp_path / "s").get("weight_version") == 3)
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
