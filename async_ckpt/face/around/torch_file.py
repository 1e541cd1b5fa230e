"""Files of `torch.save`, with errors that name their cause.

In: a value, and a path. Out: a file that `torch.load` reads. Knows nothing of: the content of the value.

Given a path, torch writes through C++ streams, which lose the cause of a failure: a full disk is an "iostream error".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import torch

from ...core.storage.disk import translated


class _Noted:
    """A file that remembers its first error, since torch continues after it and raises another one."""

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
    """Write a local file by `torch.save`; with `in_zip=False`, in the format of torch before 1.6.

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
