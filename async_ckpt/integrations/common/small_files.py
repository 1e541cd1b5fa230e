"""Files of a framework's own, as values: what its methods write into a folder, and such files written elsewhere.

In: a method, or the content of files. Out: the content, or files. Knows nothing of: what is in them, and frameworks.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from torch import is_tensor
from torch.utils._pytree import tree_leaves

from ...plumbing import disk

# Where a few KiB are files for a moment, in a folder with a random name, if there is such a place.
_IN_MEMORY: Final = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # nosec B108


def written_by(method: Callable[[str], object], *, in_memory: bool = False) -> dict[str, bytes]:
    """The files that a method of a framework writes into a folder, by name. `in_memory` is for a few KiB."""
    with tempfile.TemporaryDirectory(dir=_IN_MEMORY if in_memory else None) as folder:
        method(folder)
        paths = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def write_files(files: Mapping[str, bytes], folder: str) -> None:
    """Write small files below a folder."""
    for name, data in files.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def refuse_full(folder: str, parts: Any) -> None:
    """Raise StorageFullError if the disk has no room for these tensors, each storage once."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tree_leaves(parts) if is_tensor(t)
    }
    free_bytes, needed_bytes = disk.free_bytes_at(Path(folder)), sum(storages.values())
    if free_bytes is not None and free_bytes < needed_bytes:
        raise disk.full(Path(folder), needed_bytes, free_bytes)
