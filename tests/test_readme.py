"""The README's Python blocks run as they stand."""

import re
import runpy
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
