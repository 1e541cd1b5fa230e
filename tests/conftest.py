"""Fixtures that several test files ask for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test draws the same numbers, whichever tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Where a test may save one archive."""
    return tmp_path / "x.tar"
