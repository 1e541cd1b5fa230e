"""The RAM disk of another node as the middle place of three: an S3 server there exports it, and nothing else is needed."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import store_servers
from racing import PATIENCE
from states import MIB, assert_is_state, open_run, state_at

from async_ckpt import Place
from async_ckpt.testing import moto_server
from async_ckpt.testing.servers import Server

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/dev/shm and /proc as Linux has them")


@pytest.fixture(params=["moto", "seaweed"])
def peer(
    request: pytest.FixtureRequest, quick_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Server, Path]]:
    """A server of S3 that answers ranges and has its objects in a folder in memory, and that folder."""
    with ExitStack() as stack:
        if request.param == "seaweed":
            server = stack.enter_context(store_servers.seaweed(quick_path))
        else:
            monkeypatch.setenv("TMPDIR", str(quick_path))
            monkeypatch.setenv("MOTO_S3_DEFAULT_KEY_BUFFER_SIZE", "1")  # each object is a file
            server = stack.enter_context(moto_server())
        server.make_bucket("peer")
        yield server, quick_path


def places(peer: tuple[Server, Path], tmp_path: Path) -> list[Any]:
    """Memory of this node, of the other one, and a disk that is given every thousandth step."""
    server, _ = peer
    exported = Place("s3://peer/run", options=server.options, volatile=True)
    return [Place(tmp_path / "near", volatile=True), exported, Place(tmp_path / "far", every=1000)]


TRAINING = """
import json, os, signal, sys
from async_ckpt import Place
from states import MIB, assert_is_state, open_run, state_at
near, far, options = sys.argv[1:]
exported = Place("s3://peer/run", options=json.loads(options), volatile=True)
ckpt = open_run([Place(near, volatile=True), exported, Place(far, every=1000)], keep=2)
for step in (1000, 1001, 1002):
    handle = ckpt.save(state_at(step, 9), step)
    assert handle.at(exported).result() == step
    if step == 1000:
        assert handle.result().step == step  # at the disk
os.kill(os.getpid(), signal.SIGKILL)
"""


def bytes_in_memory(peer: tuple[Server, Path]) -> int:
    """The bytes of the files that the server has there, also of those without a name."""
    server, folder = peer
    opened = [f"/proc/{server.pid}/fd/{name}" for name in os.listdir(f"/proc/{server.pid}/fd")] if server.pid else []
    unnamed = [path for path in opened if os.readlink(path).startswith(str(folder))]
    return sum(os.stat(path).st_size for path in (*folder.rglob("*"), *unnamed))


def test_a_step_that_only_another_node_has_in_memory_is_restored_where_this_node_is_lost(
    peer, nursery, tmp_path, caplog
):
    ended = nursery.run(TRAINING, tmp_path / "near", tmp_path / "far", json.dumps(peer[0].options))
    assert ended.status == -signal.SIGKILL, ended.err
    assert bytes_in_memory(peer) > 2 * 9 * MIB
    assert open_run(tmp_path / "far").steps() == [1000]
    shutil.rmtree(tmp_path / "near")

    state = state_at(0, 9)
    with open_run(places(peer, tmp_path), keep=2) as ckpt:
        assert ckpt.restore(state) == 1002
        assert_is_state(state, 1002, 9)
    assert_is_state(open_run(tmp_path / "far").load(1002), 1002, 9)
    assert "whole object" not in caplog.text  # the server answers ranges


def test_another_node_that_has_lost_its_memory_gets_the_next_step(peer, tmp_path):
    server, _ = peer
    _, exported, _ = places(peer, tmp_path)
    with open_run(places(peer, tmp_path), keep=2) as ckpt:
        first = ckpt.save(state_at(1000), 1000)
        assert first.at(exported).result(PATIENCE) == first.result(PATIENCE).step == 1000
        for key in server.keys("peer"):
            server.client.delete_object(Bucket="peer", Key=key)
        assert ckpt.save(state_at(2000), 2000).at(exported).result(PATIENCE) == 2000
    assert open_run(exported).latest() == 2000
    assert_is_state(open_run(exported).load(2000), 2000)
