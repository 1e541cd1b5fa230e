"""A root, its publisher, and the folder of a sidecar."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import async_ckpt


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def into(tmp_path: Path) -> Path:
    return tmp_path / "model"


@pytest.fixture
def publisher(root: Path) -> Iterator[async_ckpt.Publisher]:
    with async_ckpt.Publisher(root, anchor_every=4) as one:
        yield one
