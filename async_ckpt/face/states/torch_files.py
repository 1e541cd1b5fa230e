"""Files of `torch.save`, including old ones, and TorchScript files.

In: a place. Out: the state in the file there, or the items of a program. Knows nothing of: archives, folders.
"""

from __future__ import annotations

import contextlib
import pickle
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch

from ...core.loading.archives.find import opened_as_file
from ...core.pickles.saved_objects import missing_class
from ...core.storage.interface import Reader
from ...core.storage.local import LocalReader
from ...core.storage.place import Place
from ...errors import CheckpointError, CorruptCheckpointError, UntrustedObjectError, UsageError
from ..foreign.foreign_files import NEEDED_BYTES, ForeignFile, foreign_file
from ..foreign.virtual_files import RangeFile
from .named_items import CHUNK_BYTES, ItemWalk, NamedItem

_READ: Final = ("torch", "legacy torch", "torchscript")


class TorchFile(NamedTuple):
    """The content of a file of torch: a state, or the items of a TorchScript file."""

    state: Any
    program: list[NamedItem] | None = None


@contextlib.contextmanager
def torch_file(place: Place, *, trust: bool, as_state: bool = False) -> Iterator[TorchFile | None]:
    """The content of a file of torch, mapped if torch supports it; None for any other file.

    Raises UntrustedObjectError, CorruptCheckpointError, ImportError for an object whose class is missing, and, with
    `as_state`, UsageError for a TorchScript file, which is not a state.
    """
    with contextlib.ExitStack() as stack:
        yield _opened(place, stack, trust=trust, as_state=as_state)


def _opened(place: Place, stack: contextlib.ExitStack, *, trust: bool, as_state: bool) -> TorchFile | None:
    opened = opened_as_file(place)
    if opened is None:
        return None
    reader, path = stack.enter_context(opened[0]), opened[1]
    head = bytearray(min(NEEDED_BYTES, reader.num_bytes))
    reader.read_into(0, memoryview(head))
    kind = foreign_file(head, path=path)
    if kind is None or kind.kind not in (*_READ, "zip", "pickle"):
        return None
    local = stack.enter_context(_as_local_file(reader, path))
    if kind.kind != "legacy torch":
        kind = _kind_inside(local, path, head, kind)
    if kind.kind not in _READ:
        return None
    if kind.kind == "torchscript" and as_state:
        raise UsageError(
            f"{path}: this is {kind.words}, which would be lost; extract its weights alone to safetensors, by "
            "--trust and --select"
        )
    return _loaded(local, path, kind, trust=trust)


def _kind_inside(local: str, path: str, head: bytearray, kind: ForeignFile) -> ForeignFile:
    """The kind of a zip by the names in it, or `kind` if they cannot be read."""
    try:
        with zipfile.ZipFile(local) as file:
            return foreign_file(head, path=path, members=file.namelist()) or kind
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError):
        return kind


@contextlib.contextmanager
def _as_local_file(reader: Reader, path: str) -> Iterator[str]:
    if isinstance(reader, LocalReader):
        yield path
        return
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        shutil.copyfileobj(RangeFile(reader.read_into, reader.num_bytes), file, CHUNK_BYTES)
        file.flush()
        yield file.name


def _loaded(local: str, path: str, kind: ForeignFile, *, trust: bool) -> TorchFile:
    is_script, is_zip = kind.kind == "torchscript", kind.kind != "legacy torch"
    if is_script and not trust:
        raise UntrustedObjectError(
            f"{path} is {kind.words}, so reading it may run its code; pass --trust if you know where it comes from",
            path=path,
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's deprecation warnings do not concern this file
            if is_script:
                return TorchFile(None, _items_of_script(local))
            # Weights only, unless --trust is given.
            state = torch.load(local, map_location="cpu", weights_only=not trust, mmap=is_zip)  # nosec B614
            return TorchFile(state)
    except Exception as error:
        if is_zip and not zipfile.is_zipfile(local):  # torch's own error depends on where the file is cut
            raise CorruptCheckpointError(
                f"{path}: {kind.words}, but its end is missing or damaged; fetch it again", path=path
            ) from error
        raise _refusal(path, error, trust=trust) from error


def _refusal(path: str, error: Exception, *, trust: bool) -> Exception:
    why = f"{error!s:.200}".partition("\n")[0] or type(error).__name__
    if isinstance(error, CheckpointError):
        return error
    if isinstance(error, pickle.UnpicklingError) and not trust:
        return UntrustedObjectError(
            f"{path} has more than weights, so reading it runs code from the file; pass --trust if you know where it "
            f"comes from ({why})",
            path=path,
        )
    if trust and isinstance(error, ImportError | AttributeError):
        return missing_class(path, error)
    return CorruptCheckpointError(f"{path}: torch.load cannot read it ({why})", path=path)


def _items_of_script(local: str) -> list[NamedItem]:
    """The tensors of a TorchScript file, and the text of its code and of its other attributes."""
    module = torch.jit.load(local, map_location="cpu")
    walk = ItemWalk()
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        walk.add(tensor, (name,))
    with zipfile.ZipFile(local) as file:
        for member in sorted(file.namelist()):
            name = member.partition("/")[2]
            if name in ("constants.pkl", "data.pkl") or (name.startswith("code/") and name.endswith(".py")):
                walk.leaves.append(NamedItem((name,), "code", value=file.read(member)))
    return walk.leaves
