"""Disks of a test's own: file systems that are mounted for it, and whole objects on them."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from async_ckpt.core.storage.local import LocalStorage


@contextlib.contextmanager
def mounted(folder: Path, options: str):
    """A file system of one's own."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("mounting a file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def can_mount() -> bool:
    return sys.platform == "linux" and os.geteuid() == 0


needs_mount = pytest.mark.skipif(not can_mount(), reason="mounting a file system needs root")


def write_whole(disk: LocalStorage, path: str, data: bytes) -> None:
    sink = disk.create(path, num_bytes=len(data))
    sink.write(0, memoryview(data))
    sink.finish()
    sink.close()
