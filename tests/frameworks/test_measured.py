"""The benchmark of each framework runs to its end at toy size; the values say nothing at that size."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIGURES = {
    "torchtitan": {"torchtitan_archive_beside_own", "torchtitan_archive_beside_async"},
    "deepspeed": {
        "deepspeed_archive_beside_plain",
        "deepspeed_deepspeed_durable",
        "deepspeed_archive_beside_decoupled",
    },
    "ray": {"ray_archive_beside_own", "ray_archive_beside_CheckpointUploadMode.ASYNC"},
    "verl": {"verl_archive_beside_plain", "verl_archive_beside_own", "verl_archive_durable"},
    "skyrl": {"skyrl_async_ckpt_beside_plain", "skyrl_async_ckpt_beside_own", "skyrl_async_ckpt_durable"},
}


@pytest.mark.parametrize("name", FIGURES)
def test_the_benchmark_of_a_framework_runs_at_toy_size(name, tmp_path):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: make test-frameworks")
    command = [sys.executable, "-m", "benchmarks", name, "--dir", str(tmp_path / "disk"), "--out", str(tmp_path)]
    environment = {**os.environ, "QUICK": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=600, env=environment)
    kept = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
    assert FIGURES[name] <= kept["figures"].keys()
