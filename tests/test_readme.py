"""The README's Python blocks run as they stand."""

import json
import re
import runpy
from contextlib import nullcontext
from pathlib import Path

import pytest

from async_ckpt.testing import moto_server
from benchmarks.table import markdown

README = Path(__file__).parent.parent / "README.md"
RESULTS = README.parent / "benchmarks" / "results"
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


@pytest.mark.parametrize("name", sorted(path.stem for path in RESULTS.glob("*.json")))
def test_readme_shows_the_figures_that_the_benchmark_wrote(name):
    table = markdown(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))
    assert (RESULTS / f"{name}.md").read_text(encoding="utf-8") == table
    shown = f"<!-- {name} -->\n\n{table}"
    text = README.read_text(encoding="utf-8")
    assert shown + "\n#" in text or text.endswith(shown)


def test_the_readme_has_the_pictures_that_there_are():
    text = README.read_text(encoding="utf-8")
    named = re.findall(r"!\[[^]]*\]\((benchmarks/results/[^)]+)\)", text)
    assert sorted(named) == sorted(f"benchmarks/results/{path.name}" for path in RESULTS.glob("*.png"))
    assert all((README.parent / path).is_file() for path in named)
