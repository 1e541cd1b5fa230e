"""Room in memory: what a RAM disk has is what the machine, or the control group of the process, can spare."""

import os
from pathlib import Path

import pytest
import torch
from states import open_run

from async_ckpt import StorageFullError
from async_ckpt.core.storage import volatile
from async_ckpt.core.storage.local import LocalStorage

MEMORY = Path("/dev/shm")
pytestmark = pytest.mark.skipif(not volatile.is_in_memory(MEMORY), reason="there is no RAM disk at /dev/shm")


@pytest.fixture
def memory(monkeypatch, quick_path: Path) -> Path:
    """A folder in memory, for a process that has 256 MiB to spare."""
    if not volatile.is_in_memory(quick_path):
        pytest.skip("the folder for quick tests is no RAM disk")
    monkeypatch.setattr(volatile, "free_memory_bytes", lambda: 256 << 20)
    return quick_path / "run"


def test_a_place_in_memory_has_the_room_that_is_left_of_memory(memory, tmp_path):
    assert LocalStorage(memory).free_bytes() == 192 << 20
    if not volatile.is_in_memory(tmp_path):
        assert (LocalStorage(tmp_path).free_bytes() or 0) > 192 << 20


def test_a_save_that_memory_cannot_take_is_refused_before_anything_is_written(memory):
    state = {"w": torch.empty(200 << 20, dtype=torch.uint8)}
    with open_run(memory, host_bytes=512 << 20) as ckpt:
        handle = ckpt.save(state, 1)
        with pytest.raises(StorageFullError) as raised:
            handle.result()

    assert raised.value.free_bytes == 192 << 20
    assert not list(memory.glob("step_*/*"))


def test_where_memory_has_no_room_any_more_the_next_save_goes_to_the_disk(memory, tmp_path, monkeypatch):
    state = {"w": torch.zeros(1 << 20, dtype=torch.uint8)}
    with open_run([memory, tmp_path / "disk"]) as ckpt:
        assert str(memory) in ckpt.save(state, 1).result().path
        monkeypatch.setattr(volatile, "free_memory_bytes", lambda: 64 << 20)
        assert str(tmp_path) in ckpt.save(state, 2).result().path
        monkeypatch.setattr(volatile, "free_memory_bytes", lambda: 256 << 20)
        assert str(memory) in ckpt.save(state, 3).result().path


def test_a_restart_frees_the_memory_of_killed_writers_before_it_takes_its_own(memory, tmp_path, nursery):
    """Also what ranks have left: the locks of all that write to a RAM disk are visible on its machine."""
    ended = nursery.run(
        """
        import os, signal, sys
        from async_ckpt.core.storage.local import LocalSink
        from states import open_run, state_at
        ckpt = open_run(sys.argv[1:])
        ckpt.save(state_at(1, 5), 1).result()
        LocalSink.finish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        ckpt.save(state_at(2, 5), 2).result()
        """,
        memory,
        tmp_path / "disk",
    )
    assert ended.status < 0
    left = memory / "step_00000002" / "rank_00001.01234567.tar"
    left.write_bytes(b"of another rank")
    assert len(os.listdir(left.parent)) == 2

    with open_run([memory, tmp_path / "disk"]) as ckpt:
        assert ckpt.restore({"step": 0}, strict=False) == 1
        assert not left.parent.exists()
