"""The README's Python blocks run as they stand."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.S)


def test_readme_has_examples():
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("block", BLOCKS, ids=[block.splitlines()[-1][:40] for block in BLOCKS])
def test_readme_block_runs_twice_from_an_empty_folder(block, tmp_path, monkeypatch):
    """The second time it finds what the first has saved."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "block.py"
    script.write_text(block, encoding="utf-8")
    for _ in range(2):
        runpy.run_path(str(script))


def test_readme_shows_the_figures_that_the_benchmark_wrote():
    table = README.parent / "benchmarks" / "results" / "figures.md"
    assert README.read_text(encoding="utf-8").endswith(table.read_text(encoding="utf-8"))


def test_the_benchmark_runs_at_toy_size(tmp_path):
    """All figures once, in seconds; their values say nothing at that size."""
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "--quick",
        "--dir",
        str(tmp_path),
        "--out",
        str(tmp_path / "toy"),
    ]
    subprocess.run(command, cwd=README.parent, check=True, capture_output=True, timeout=300)
    figures = json.loads((tmp_path / "toy.json").read_text(encoding="utf-8"))["figures"]
    assert {"stall", "guarded_stall", "durable_bandwidth", "restore", "training"} <= figures.keys()
