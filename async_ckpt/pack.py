"""`pack`: what existing code writes into a folder becomes one tar, streamed away in the background.

In: a folder. Out: a handle. Knows nothing of: what is in the files.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from .errors import NothingWrittenError
from .format.tarball import Tarball
from .functional import Compression, FileTarget
from .handle import SaveHandle
from .saver import Saver
from .snapshot.files import Source, scan
from .storage.local import translated
from .storage.scratch import Scratch
from .storage.url import Engine, Where

_PathType: Any = type(Path())
# Files are read while others are written: what a pack needs is a few segments, however large the folder is.
_HOST_BYTES = 256 * 1024 * 1024

_saver: Saver | None = None


class Folder(_PathType):  # type: ignore[misc]
    """A `pathlib.Path`; once the block that it belongs to is left, `handle` is that of the save."""

    handle: SaveHandle


class Pack:
    """A folder to write into; leaving the block streams it away. See `pack`."""

    def __init__(self, target: FileTarget, scratch: Path, name: str) -> None:
        self._target, self._parent, self._name = target, scratch, name
        self._scratch: Scratch | None = None
        self._folder: Folder | None = None
        self._handle: SaveHandle | None = None

    @property
    def handle(self) -> SaveHandle:
        """The save, once the block has been left."""
        if self._handle is None:
            raise RuntimeError("there is no handle before the block has been left without an exception")
        return self._handle

    def __enter__(self) -> Folder:
        if self._scratch is not None:
            raise RuntimeError("this folder was packed already; call pack() again for another one")
        self._scratch = Scratch(self._parent, self._name)
        self._folder = Folder(self._scratch.folder)
        return self._folder

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._scratch is not None
        assert self._folder is not None
        scratch = self._scratch
        if error is not None:
            scratch.remove()
            return
        self._handle = self._folder.handle = _stream(scratch.folder, self._target, scratch)

    def __repr__(self) -> str:
        return f"<Pack {self._target.path}{f' {self._handle!r}' if self._handle else ''}>"


def pack(
    destination: Where,
    *,
    compression: Compression = None,
    scratch: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    engine: Engine | None = None,
    fs: Any = None,
) -> Pack:
    """A folder for existing code to fill, in a `with` block; what it holds becomes the archive at `destination`.

    Leaving the block returns at once, and `folder.handle` is there; the folder is then streamed as one plain tar (members `./…`; modes, links and
    holes kept), and removed once that is committed. Leaving it by an exception publishes nothing. When the save
    fails the folder stays, and the error says where. Packs are streamed one after the other.
    The folder lies beside a local destination, where every node sees it, and otherwise in the system's temp folder or
    in `scratch`. `compression` is as for `save`, the rest as for AsyncCheckpointer.
    """
    target = FileTarget(
        destination, {"storage_options": storage_options, "engine": engine, "fs": fs}, compression
    )
    name = target.path.rstrip("/").rpartition("/")[2] if target.storage.remote else Path(target.path).name
    beside = Path(tempfile.gettempdir()) if target.storage.remote else Path(target.path).parent
    return Pack(target, beside if scratch is None else Path(scratch).absolute(), name)


def pack_folder(
    folder: str | os.PathLike[str],
    destination: Where,
    *,
    compression: Compression = None,
    storage_options: Mapping[str, Any] | None = None,
    engine: Engine | None = None,
    fs: Any = None,
) -> SaveHandle:
    """Stream a folder that is there already, and stays, as `pack` does. It must not change until the handle is done.

    Raises NotADirectoryError for anything but a folder, and ValueError for a destination inside of it.
    """
    source = Path(folder).absolute()
    if not source.is_dir():
        raise NotADirectoryError(f"{source} is no folder; give the folder that is to be packed")
    target = FileTarget(
        destination, {"storage_options": storage_options, "engine": engine, "fs": fs}, compression
    )
    if not target.storage.remote and Path(target.path).resolve().is_relative_to(source.resolve()):
        raise ValueError(f"{target.path} lies in {source}, which would pack itself; write it elsewhere")
    return _stream(source, target, None)


def _stream(folder: Path, target: FileTarget, scratch: Scratch | None) -> SaveHandle:
    def plan() -> tuple[Tarball, Sequence[Source]]:
        with translated(folder):
            entries, sources = scan(folder)
        if len(entries) == 1:
            raise NothingWrittenError(f"nothing was written into {folder}; {target.path} is left as it was")
        return Tarball(entries), sources

    def cleanup() -> None:
        if scratch is not None:
            scratch.remove()

    def keep(error: BaseException) -> None:
        if scratch is not None:
            if isinstance(error, NothingWrittenError):
                scratch.remove()
            else:
                scratch.keep()
                error.add_note(f"async_ckpt: what was to be packed is kept in {scratch.folder}")

    return files_saver().save_files(plan, target, cleanup=cleanup, keep=keep)


def files_saver() -> Saver:
    """One for all files of the process, made on first use."""
    global _saver
    if _saver is None or not _saver.belongs_here:
        _saver = Saver(host_bytes=_HOST_BYTES)
    return _saver
