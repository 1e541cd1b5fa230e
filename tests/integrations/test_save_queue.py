"""The queue of the saves of a trainer."""

import json
import os

import pytest
import torch

import async_ckpt
from async_ckpt.integrations.common.event_history import HistoryEntry
from async_ckpt.integrations.common.save_queue import SaveQueue


@pytest.fixture
def queue():
    queue = SaveQueue("test")
    yield queue
    queue.stop()


def test_a_save_that_is_durable_does_not_fail_by_its_history(tmp_path, queue):
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    os.mkfifo(folder / "pipe")  # it has no size
    path = folder / "x.ackpt.tar"

    handle = async_ckpt.save({"w": torch.ones(4)}, path)
    ended = queue.add(path, [handle], step=1, entry=HistoryEntry(tmp_path, "checkpoint-1", 1))

    assert ended.exception(60) is None
    assert [report.step for report in queue.take_reports()] == [1]
    assert queue.take_errors() == []
    (told,) = map(json.loads, (tmp_path / "history.jsonl").read_text().splitlines())
    assert (told["step"], told["num_bytes"]) == (1, handle.result().num_bytes)  # the bytes of this rank's part
