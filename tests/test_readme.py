"""The README's Python blocks run as they stand."""

import json
import re
import runpy
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from async_ckpt.testing import moto_server

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.S)


def test_readme_has_examples():
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("block", BLOCKS, ids=[block.splitlines()[-1][:40] for block in BLOCKS])
def test_readme_block_runs_twice_from_an_empty_folder(block, tmp_path, monkeypatch):
    """The second time it finds what the first has saved. Its bucket is on a server of its own."""
    monkeypatch.chdir(tmp_path)
    with moto_server() if "s3://" in block else nullcontext() as server:
        if server is not None:
            server.make_bucket("my-bucket")
            monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
            for name in ("region", "access_key_id", "secret_access_key"):
                monkeypatch.setenv(f"AWS_{name.upper()}", server.options[name])
        run_twice(block, tmp_path)


def run_twice(block, tmp_path):
    script = tmp_path / "block.py"
    script.write_text(block, encoding="utf-8")
    for _ in range(2):
        runpy.run_path(str(script))


@pytest.mark.parametrize("name", ["figures", "stores"])
def test_readme_shows_the_figures_that_the_benchmark_wrote(name):
    table = README.parent / "benchmarks" / "results" / f"{name}.md"
    shown = f"<!-- {name} -->\n\n{table.read_text(encoding='utf-8')}"
    text = README.read_text(encoding="utf-8")
    assert shown + "\n#" in text or text.endswith(shown)


TOY_FIGURES = {
    "figures": {"stall", "guarded_stall", "durable_bandwidth", "restore", "training"},
    "stores": {"upload", "upload_link", "upload_cpu", "upload_memory", "download", "two_roots"},
}


@pytest.mark.parametrize("name", TOY_FIGURES)
def test_the_benchmark_runs_at_toy_size(name, tmp_path):
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
        *(["--stores"] if name == "stores" else []),
    ]
    subprocess.run(command, cwd=README.parent, check=True, capture_output=True, timeout=300)
    kept = json.loads((tmp_path / "toy.json").read_text(encoding="utf-8"))
    assert TOY_FIGURES[name] <= kept["figures"].keys()
    if name == "stores":
        assert {"raw", "s3fs", "boto3", "moto", "rclone"} <= kept["peers"].keys()
