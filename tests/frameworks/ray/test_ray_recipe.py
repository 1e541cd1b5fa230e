"""The recipe for Ray in docs/schedulers.md: run as it is printed, and run again, which goes on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from async_ckpt import AsyncCheckpointer

pytest.importorskip("ray", reason="ray is not installed: make test-frameworks")

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "schedulers.md").read_text(encoding="utf-8")


def test_the_script_trains_and_goes_on_when_it_is_started_again(tmp_path):
    block = re.search(r'^```python title="train_ray.py"\n(.*?)^```$', PAGE, flags=re.M | re.S)
    assert block is not None
    (tmp_path / "train_ray.py").write_text(block[1], encoding="utf-8")
    folder = tmp_path / "runs" / "a"
    for num_steps, newest in ((100, 99), (150, 149)):
        env = {**os.environ, "PYTHONPATH": str(ROOT), "STEPS": str(num_steps), "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [sys.executable, "train_ray.py"],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.splitlines()[-1] == str(folder / f"step_{newest:08d}")
    assert AsyncCheckpointer(folder).steps() == [49, 99, 149]
