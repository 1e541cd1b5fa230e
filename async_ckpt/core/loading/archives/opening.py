"""The contents of a file or folder: of this library, or by the room for checkpoints of other programs.

In: a reader, or a storage with a folder. Out: contents. Knows nothing of: runs, other formats.
"""

from __future__ import annotations

import contextlib
from importlib import import_module
from typing import Any, Final

from ...format import index
from ...storage.interface import Reader, Storage
from .archive import OpenArchive, first_bytes
from .contents import Contents, Part

_BEGIN: Final = f"{index.MEMBER}\0".encode()  # of every archive of this library


def of_others() -> Any:
    """The room that reads checkpoints of other programs, imported when the first of them is met."""
    return import_module("async_ckpt.face.foreign")


def open_contents(reader: Reader, *, path: str, verify: bool) -> Contents:
    """The archive or bare safetensors file behind a reader.

    Raises ForeignFileError for a file of any other kind that is known, and CorruptCheckpointError for anything else.
    """
    first_block = first_bytes(reader, path=path)
    contents: Contents | None = None
    if bytes(first_block[: len(_BEGIN)]) != _BEGIN:
        contents = of_others().opened(reader, path=path, first_block=first_block)
    return contents or OpenArchive(reader, path=path, verify=verify, first_block=first_block)


def parts_of_folder(storage: Storage, *, verify: bool, stack: contextlib.ExitStack) -> list[Part] | None:
    """The content of a folder that is not a committed step, whose files `stack` closes; None for an unknown one.

    Raises CorruptCheckpointError.
    """
    parts: list[Part] | None = of_others().parts_of_folder(storage, verify=verify, stack=stack)
    return parts
