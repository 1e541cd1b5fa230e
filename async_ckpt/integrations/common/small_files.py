"""A framework's own small files, as values: those that its methods write to a folder, to be written elsewhere.

In: a method, or the content of files. Out: the content, or files. Knows nothing of: their format, frameworks.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from torch import is_tensor
from torch.utils._pytree import tree_leaves

from ...errors import CheckpointError
from ...plumbing import LocalStorage, disk, spec

# The most that a checkpoint has besides its tensors: headers of files, plain values, configurations.
_BESIDE_TENSORS: Final = spec.MIB
# The place for a few KiB of short-lived files, in a folder with a random name, if there is such a place.
_IN_MEMORY: Final = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # nosec B108


def written_by(method: Callable[[str], object], *, in_memory: bool = False) -> dict[str, bytes]:
    """The files that a method of a framework writes to a folder, by name. `in_memory` is for a few KiB."""
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


@contextmanager
def room_for(parts: Any, folder: str) -> Iterator[None]:
    """Raise StorageFullError if the disk has no room for these tensors, each storage once, or the block has filled it.

    Frameworks write files by libraries that report a full disk by errors of many kinds, such as a RuntimeError about
    an iostream. So after an error, this checks if the rest of the tensors would fit.
    """
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tree_leaves(parts) if is_tensor(t)
    }
    path, needed_bytes = Path(folder), sum(storages.values())
    free_bytes = disk.free_bytes_at(path)
    if free_bytes is not None and free_bytes < needed_bytes:
        raise disk.full(path, needed_bytes, free_bytes)
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        free_bytes, num_written = disk.free_bytes_at(path), sum(LocalStorage(path).sizes("").values())
        is_full = free_bytes is not None and num_written + free_bytes < needed_bytes + _BESIDE_TENSORS
        if is_full or (isinstance(error, OSError) and error.errno in disk.NO_ROOM):
            raise disk.full(path, needed_bytes if num_written < needed_bytes else 0, free_bytes) from error
        raise
