"""The lock of a trainer's folder."""

import errno
import os

import pytest

from async_ckpt import RunTakenError
from async_ckpt.integrations.common.folders import FolderHold


def test_a_full_disk_keeps_no_trainer_from_its_folder_and_leaves_no_lock_behind(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", fail)
        with FolderHold(tmp_path), pytest.raises(RunTakenError, match="another trainer"):
            FolderHold(tmp_path).__enter__()

    with FolderHold(tmp_path):
        assert os.listdir(tmp_path) == [".async_ckpt.lock"]
