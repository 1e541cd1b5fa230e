"""Files of `torch.save`, whose errors say what has happened.

In: a value, and where to write. Out: a file that `torch.load` reads. Knows nothing of: what is in the value.

Given a path, torch writes by streams of C++, which forget why they have failed: a full disk is an "iostream error".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import torch

from ...core.storage.disk import translated


class _Noted:
    """A file that remembers its first error: torch goes on after it, and ends with another."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self._file.flush()


def write_by_torch(value: Any, path: Path, *, in_zip: bool = True) -> None:
    """Write a local file by `torch.save`; without `in_zip`, in its format of before torch 1.6.

    Raises StorageFullError and StorageUnavailableError.
    """
    with translated(path), open(path, "wb") as file:
        noted = _Noted(file)
        try:
            torch.save(value, noted, _use_new_zipfile_serialization=in_zip)  # type: ignore[arg-type]
        except RuntimeError:
            if noted.error is None:
                raise
        if noted.error is not None:
            raise noted.error
