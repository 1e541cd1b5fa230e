"""Where tests write to, and what they write."""

from pathlib import Path

import pytest
from tarballs import make_tree


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """An empty folder, so that what is left beside what is written is seen."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "tree")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder for archives and what is made of them, with a file beside it that no archive may reach."""
    (tmp_path / "outside").write_text("untouched")
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


@pytest.fixture
def config_folder(tmp_path: Path) -> Path:
    """The config of the small Llama, as it comes without weights."""
    from exported import SMALL, transformers

    folder = tmp_path / "config"
    transformers.LlamaConfig(**SMALL, num_key_value_heads=2).save_pretrained(folder)
    return folder


@pytest.fixture
def adapter_config(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "bias": "none"}')
    return folder
