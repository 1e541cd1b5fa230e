"""Every storage that comes with the library keeps the contract, against real servers where it speaks to one."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from async_ckpt.storage.local import LocalStorage
from async_ckpt.testing import StorageContract


class TestLocalStorage(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path):
        return LocalStorage(tmp_path / "root")
