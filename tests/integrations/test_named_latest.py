"""The file by which frameworks find their newest checkpoint, however the writers before were killed."""

import os

from async_ckpt.integrations.common.folders import name_latest

KILLED = """
import os, signal
from pathlib import Path
import async_ckpt.core.storage.local
from async_ckpt.integrations.common.folders import name_latest
os.rename = os.replace = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
name_latest(Path({folder!r}, "latest"), "global_step2")
"""


def test_what_a_killed_writer_has_left_goes_when_the_next_checkpoint_is_named(nursery, tmp_path):
    latest = tmp_path / "latest"
    name_latest(latest, "global_step1")
    nursery.start(KILLED.format(folder=str(tmp_path))).ended()
    assert latest.read_text() == "global_step1"
    assert len(os.listdir(tmp_path)) == 2

    name_latest(latest, "global_step3")

    assert latest.read_text() == "global_step3"
    assert os.listdir(tmp_path) == ["latest"]
