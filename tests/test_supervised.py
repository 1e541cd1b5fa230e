"""The supervised loop of examples/, as a process: killed, resumed, refused by its store; no batch twice, none left out."""

import json
import signal
import uuid
from pathlib import Path
from typing import Any

import pytest
from children import Child, Nursery

from async_ckpt.testing import FaultyProxy
from async_ckpt.testing.servers import Server
from examples.supervised import Journal

STEPS = 48


class Loop:
    """The loop with a tiny model, in a folder for its log, with its archives in a bucket behind a proxy."""

    def __init__(self, log: Path, server: Server, proxy: FaultyProxy, nursery: Nursery) -> None:
        self.log, self._nursery = log, nursery
        self.bucket = f"supervised-{uuid.uuid4().hex[:12]}"
        told = {"region": "us-east-1", **server.options, "endpoint_url": proxy.endpoint}
        (log.parent / "tmp").mkdir(exist_ok=True)
        self.environment = {
            "TMPDIR": str(log.parent / "tmp"),  # for what kills and failures leave
            **{
                f"AWS_{name.upper()}": told[name]
                for name in ("region", "access_key_id", "secret_access_key", "endpoint_url")
            },
        }
        server.make_bucket(self.bucket)
        self._server = server

    def start(self) -> Child:
        store = f"s3://{self.bucket}/runs"
        return self._nursery.start_module(
            "examples.supervised", self.log, "--toy", "--store", store, env=self.environment
        )

    def run(self) -> tuple[dict[int, str], str]:
        """The loss of every step, and what was said on stderr."""
        ended = self.start().ended()
        assert ended.status == 0, ended.err
        return losses(ended.out), ended.err

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.log / "checkpoints.jsonl").read_text().splitlines()]

    @property
    def names(self) -> list[str]:
        return [record["name"] for record in self.records]

    @property
    def archives(self) -> list[str]:
        return [key.removeprefix("runs/model_a/") for key in self._server.keys(self.bucket)]


def losses(out: str) -> dict[int, str]:
    events = [json.loads(line) for line in out.splitlines()]
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


KEPT = [f"{step:06d}.tar.gz" for step in (12, 24, 36, 48)] + ["final.tar.gz", "sampler_weights/final.tar.gz"]


@pytest.fixture
def loop(tmp_path: Path, s3: Server, proxy: FaultyProxy, nursery: Nursery) -> Loop:
    return Loop(tmp_path / "log", s3, proxy, nursery)


def test_a_run_that_is_killed_in_a_save_goes_on_at_the_next_batch_bit_for_bit(tmp_path, s3, proxy, nursery, loop):
    """The upload of step 20 is held up until the kill, which so hits it for certain; 16 is the end of an epoch."""
    whole, _ = Loop(tmp_path / "whole", s3, proxy, nursery).run()
    hold = proxy.delay(None, method="PUT", target=loop.bucket + ".*000020")
    process = loop.start()
    hold.wait()
    process.send(signal.SIGKILL)
    ended = process.ended()
    before = losses(ended.out)
    hold.clear()
    assert ended.status == -signal.SIGKILL
    assert loop.names == ["000004", "000008", "000012", "000016"]
    assert (loop.records[-1]["epoch"], loop.records[-1]["batch"]) == (1, 0)

    after, _ = loop.run()

    assert list(after) == list(range(17, STEPS + 1))
    assert before | after == whole
    assert before == {step: whole[step] for step in before}
    assert loop.archives == KEPT


def test_records_are_what_tinkers_cookbook_reads_and_a_finished_run_adds_none(loop):
    loop.run()
    names = loop.names

    assert loop.records[2] == {
        "name": "000012",
        "batch": 12,
        "epoch": 0,
        "state_path": "model_a/000012.tar.gz",
    }
    assert loop.records[3]["rolling"] is True
    assert loop.records[-1] == {
        "name": "final",
        "batch": 0,
        "epoch": 3,
        "final": True,
        "state_path": "model_a/final.tar.gz",
        "sampler_path": "model_a/sampler_weights/final.tar.gz",
    }

    again, _ = loop.run()

    assert again == {}
    assert loop.names == names


def test_a_run_that_is_moved_with_its_archives_goes_on_bit_for_bit_where_it_is_now(tmp_path, nursery):
    """Its records name the archives below the folder that they are in, whatever that is called."""
    old, new = tmp_path / "old", tmp_path / "new"
    whole = run_toy(nursery, old)
    old.rename(new)
    journal = new / "checkpoints.jsonl"  # as if killed after the third record
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:3]))

    assert run_toy(nursery, new) == {step: whole[step] for step in range(13, STEPS + 1)}
    assert not old.exists()


def run_toy(nursery: Nursery, log: Path) -> dict[int, str]:
    """The loss of every step of the loop, with its archives in the folder of its log."""
    ended = nursery.start_module("examples.supervised", log, "--toy").ended()
    assert (ended.status, ended.err) == (0, "")
    return losses(ended.out)


def test_a_checkpoint_that_fails_leaves_no_record_and_the_rolling_one_before_it(loop, proxy):
    """Training goes on; what the failed one would have replaced goes with the next that succeeds."""
    denied = proxy.answer("AccessDenied", method="PUT", target="0000(08|12)")
    hold = proxy.delay(None, method="PUT", target="000016")
    process = loop.start()
    hold.wait()
    assert loop.archives == ["000004.tar.gz"]
    assert loop.names == ["000004"]
    hold.clear()
    ended = process.ended()

    assert denied.hits
    assert list(losses(ended.out)) == list(range(1, STEPS + 1))
    assert "checkpoint 000008 was not saved; training goes on" in ended.err
    assert "000008" not in loop.names
    assert "000012" not in loop.names
    assert loop.archives == KEPT[1:]


def test_a_final_checkpoint_that_fails_ends_the_run(loop, proxy):
    proxy.answer("AccessDenied", method="PUT", target="sampler_weights")
    ended = loop.start().ended()

    assert ended.status == 1
    assert "StorageUnavailableError" in ended.err
    assert "final" not in loop.names


def test_a_line_that_a_kill_has_torn_does_not_count_and_spoils_no_other(tmp_path):
    Journal(tmp_path).append({"name": "000004", "state_path": "a"})
    with open(tmp_path / "checkpoints.jsonl", "ab") as file:
        file.write(b'{"name": "000008", "sta')

    journal = Journal(tmp_path)
    assert [record["name"] for record in journal.records] == ["000004"]
    journal.append({"name": "000012", "state_path": "b"})
    journal.append({"name": "000016", "sampler_path": "c"})

    assert [record["name"] for record in Journal(tmp_path).records] == ["000004", "000012", "000016"]
    assert Journal(tmp_path).last_with("state_path") == {"name": "000012", "state_path": "b"}


# As `python -m examples.supervised --toy` with each training forked, since to import torch takes longer than to train.
STORY = """
import os, runpy, signal, sys
import examples.process

class Forked:
    \"\"\"A process that `python -m` would run, as far as the story asks one.\"\"\"

    def __init__(self, command, **_):
        assert command[:3] == [sys.executable, "-m", "examples.supervised"]
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.dup2(write, 1)
            sys.argv = command[2:]
            runpy.run_module("examples.supervised", run_name="__main__", alter_sys=True)
            sys.stdout.flush()
            os._exit(0)
        os.close(write)
        self.stdout = open(read)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stdout.close()
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)

examples.process.subprocess.Popen = Forked
os.chdir(sys.argv[1])
sys.argv = ["examples.supervised", "--toy"]
runpy.run_module("examples.supervised", run_name="__main__", alter_sys=True)
"""


def test_the_whole_story_is_told_at_toy_size(tmp_path, nursery):
    done = nursery.run(STORY, tmp_path)

    told = [line for line in done.err.splitlines() if "async_ckpt has waited" not in line]
    assert (done.status, told) == (0, [])
    assert "every loss is that of the uninterrupted run, bit for bit" in done.out
