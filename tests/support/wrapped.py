"""Functions to wrap, what they have written, and that nothing else is left."""

import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from states import names_below

from async_ckpt.core.saving import kept_memory


def records(path: Path) -> dict[str, bytes]:
    """What `torch.save` wrote, record by record, but for its own name and the number that it draws from it."""
    with zipfile.ZipFile(path) as file:
        both = {name.partition("/")[2]: file.read(name) for name in file.namelist()}
    return {name: data for name, data in both.items() if "serialization_id" not in name}


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=False)


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path):
    """After every test: no temporary file, and no memory counted as in use."""
    yield
    assert [name for name in names(tmp_path) if "async_ckpt-tmp" in name] == []
    assert not kept_memory.host_memory()._bytes(held=False)


def names(root: Path) -> list[str]:
    """Every file below a folder."""
    return names_below(root)


def save_text(text: str, path: str) -> None:
    Path(path).write_text(text)


def save_folder(state: dict[str, Any], folder: str) -> None:
    os.makedirs(folder, exist_ok=True)
    torch.save(state, os.path.join(folder, "state.pt"))
    Path(folder, "config.json").write_text("{}")
