"""`pack`: a folder that existing code fills becomes one tar, streamed in the background.

In: a folder. Out: a handle. Knows nothing of: the content of the files.
"""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakSet

from ...core.format.tar_of_files import Tarball
from ...core.host.loop import awaitable, off_loop
from ...core.host.threads import conclude
from ...core.host.waits import ENDS_THE_WAIT, Completion, Wait
from ...core.report import Progress, SaveReport
from ...core.saving.attempt import Attempt, write_and_commit
from ...core.saving.file_target import Compression, FileTarget
from ...core.saving.handle import SaveHandle
from ...core.saving.kept_memory import files_saver
from ...core.saving.ledger import raise_error_of
from ...core.saving.save import Save, wait_for_saves
from ...core.saving.saver import Saver
from ...core.staging.file_segments import FilesImage, scan
from ...core.storage.disk import refuse_dangling, translated
from ...core.storage.place import Anywhere, local_place, written_at
from ...core.timing import Spans
from ...errors import ClosedError, NotAFolderError, NothingWrittenError, StorageUnavailableError, UsageError
from .scratch import Scratch

_PathType: Any = type(Path())


class PackedFolder(_PathType):  # type: ignore[misc]
    """A `pathlib.Path` with the handle of the save, which exists after the end of the `with` block."""

    _handle: SaveHandle | None = None

    @property
    def handle(self) -> SaveHandle:
        """The handle of the save. Raises before the end of the block."""
        if self._handle is None:
            raise UsageError("there is no handle until the `with` block has ended without an exception")
        return self._handle

    def result(self, timeout: float | None = None) -> SaveReport:
        """`handle.result`. Raises before the end of the block."""
        return self.handle.result(timeout)


class Pack:
    """A folder to write into, made by `pack`. Leaving its `with` block streams the folder."""

    def __init__(self, target: FileTarget, scratch: Path, name: str) -> None:
        self._target, self._parent, self._name = target, scratch, name
        self._scratch: Scratch | None = None
        self._folder = PackedFolder(scratch)  # when the block is entered, replaced by the folder to write into

    @property
    def handle(self) -> SaveHandle:
        """The handle of the save. Raises before the end of the block."""
        return self._folder.handle

    def __enter__(self) -> PackedFolder:
        if self._scratch is not None:
            raise UsageError("this folder was packed already; call pack() again for another one")
        self._scratch = Scratch(self._parent, self._name)
        self._folder = PackedFolder(self._scratch.folder)
        return self._folder

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._scratch is not None
        if error is not None:
            self._scratch.__exit__(kind, error, trace)
        elif not self._scratch.belongs_here:
            raise ClosedError(f"{self._folder} belongs to the parent process; leave the block there")
        else:
            self._folder._handle = _stream(self._scratch.folder, self._target, self._scratch)

    def __repr__(self) -> str:
        handle = self._folder._handle
        return f"<Pack {self._target.path}{f' {handle!r}' if handle else ''}>"


def pack(
    destination: Anywhere,
    *,
    compression: Compression = None,
    scratch: str | os.PathLike[str] | None = None,
) -> Pack:
    """A `with` block that gives existing code a folder to fill. Its content becomes the archive at `destination`.

        with async_ckpt.pack("s3://bucket/x.tar") as folder:
            model.save_pretrained(folder)
        report = folder.handle.result()

    The block ends without waiting. The folder is then streamed in the background as one plain tar (members `./…`, with
    their modes, links and holes), and removed once the archive is committed. If the block raises an exception, nothing
    is published. If the save fails, the folder is kept, and the error names it. Packs are streamed one after the other,
    in the order in which their blocks ended: of two with the same destination, the later one replaces the earlier.

    The folder is created in `scratch`; by default beside a local destination, where every node sees it, and in the
    system's temp folder for a URL. `compression` is as for `save`.

    Raises ValueError, IsADirectoryError or NotADirectoryError for a destination that cannot be written to, for example
    if its suffix stands for another compression.
    """
    return _pack(FileTarget.at(written_at(destination), compression), scratch)


def pack_under(destination: Anywhere, *, scratch: str | os.PathLike[str] | None = None) -> Pack:
    """Like `pack`, but writes a plain tar under any name: for programs whose files are plain tars named .tar.gz."""
    return _pack(FileTarget.at(written_at(destination), may_mislead=True), scratch)


def _pack(target: FileTarget, scratch: str | os.PathLike[str] | None) -> Pack:
    name = target.path.rstrip("/").rpartition("/")[2] if target.storage.remote else Path(target.path).name
    beside = Path(tempfile.gettempdir()) if target.storage.remote else Path(target.path).parent
    return Pack(target, beside if scratch is None else local_place(scratch), name)


def pack_folder(
    folder: Anywhere,
    destination: Anywhere,
    *,
    compression: Compression = None,
) -> SaveHandle:
    """Stream a local folder as `pack` does, but keep the folder. It must not change until the handle is done.

        async_ckpt.files.pack_folder("out/model", "s3://bucket/model.tar").result()

    Raises NotADirectoryError if there is no such folder, and ValueError for a URL, or for a destination inside the
    folder.
    """
    source = local_place(folder, "fetch the folder with files.download_directory, then pack it")
    if not source.is_dir():
        refuse_dangling(source)
        raise NotAFolderError(f"{source} is not a folder; give the folder to pack")
    source = source.resolve()
    target = FileTarget.at(written_at(destination), compression)
    if not target.storage.remote and Path(target.path).resolve().is_relative_to(source):
        raise ValueError(f"{target.path} is inside {source}, so the archive would contain itself; write it elsewhere")
    return _stream(source, target, None)


def _stream(folder: Path, target: FileTarget, scratch: Scratch | None) -> SaveHandle:
    try:
        packing = _PackSave(files_saver(), folder, target, scratch)
        handle = packing.saver.take_on(packing)
    except BaseException as error:  # for example at the exit of the interpreter
        if scratch is not None:
            _keep(scratch, error)
        raise
    packing.spans.called()
    return handle


class _PackSave(Save):
    """The save of one folder. Created at the end of the block, and run on the library's loop. Helper threads fill and
    write the segments.
    """

    def __init__(self, saver: Saver, folder: Path, target: FileTarget, scratch: Scratch | None) -> None:
        self.saver, self._folder, self._target, self._scratch = saver, folder, target, scratch
        self.path = target.path
        staged: Future[None] = Completion(lambda: f"the files of {self.path}: {self.progress}")
        super().__init__(None, target.path, staged, lambda: self.progress, Spans())
        self._attempt: Attempt | None = None

    @property
    def progress(self) -> Progress:
        return self._attempt.drain.progress if self._attempt else Progress(0, 0, 0)

    def give_up(self, error: BaseException) -> None:
        super().give_up(error)
        if self._attempt is not None:
            self._attempt.drain.fail(error)

    async def run(self, turn: Future[None] | None) -> SaveReport:
        if turn is not None:
            await awaitable(turn)
        attempt = await off_loop(self._set_up)
        attempt.snapshot.completion.add_done_callback(lambda ended: conclude(self.staged, ended.exception()))
        with self.saver.relieved_by(attempt.drain):
            attempt.snapshot.begin()
            try:
                await write_and_commit(attempt, None, self.life)
            finally:  # until then, the snapshot reads from the folder
                await off_loop(attempt.snapshot.completion.exception)
        return attempt.report(await awaitable(self.spans.call))

    def _set_up(self) -> Attempt:
        attempt = self._attempt = self.saver.files_attempt(self._scan(), self._target, self.spans)
        if self.given_up is not None:
            attempt.drain.fail(self.given_up)
        return attempt

    def _scan(self) -> FilesImage:
        if self._scratch is not None:
            self._scratch.make_links_relative()
        with translated(self._folder):
            entries, sources = scan(self._folder)
        if len(entries) == 1:
            raise NothingWrittenError(f"nothing was written into {self._folder}; {self.path} is left as it was")
        return FilesImage(Tarball(entries), sources)

    def failed(self, error: BaseException) -> None:
        self._end_staging(error)
        if self._scratch is not None:
            _keep(self._scratch, error)

    async def tidy(self) -> None:
        if self._scratch is not None:
            await off_loop(self._scratch.remove)


def _keep(scratch: Scratch, error: BaseException) -> None:
    """Keep the files that were not packed, if there are any: there may be no other copy of this checkpoint."""
    try:
        if isinstance(error, NothingWrittenError):
            scratch.remove()
        else:
            scratch.keep()
            error.add_note(f"async_ckpt: what was to be packed is kept in {scratch.folder}")
    except StorageUnavailableError as failure:
        error.add_note(f"async_ckpt: {failure}")


class FileSaves:
    """The file saves of one owner, including those whose handles were dropped.

    The saver of all files holds a save while it is under way, and a failed one until its error is retrieved.
    """

    def __init__(self) -> None:
        self._handles: WeakSet[SaveHandle] = WeakSet()

    def add(self, handle: SaveHandle) -> None:
        """Include a save of files, or of a wrapped function, in `wait`."""
        self._handles.add(handle)

    @property
    def num_under_way(self) -> int:
        """The number of saves that are not done."""
        return sum(not save.handle.done() for save in self._pending())

    def wait(self, timeout: float | None = None) -> None:
        """Wait for every save and the removal of its temporary files, and raise the first error not retrieved yet.

        Raises TimeoutError after `timeout` seconds.
        """
        wait_for_saves(self._pending(), Wait("in wait()", ENDS_THE_WAIT), timeout)
        raise_error_of([save.handle for save in self._pending() if save.is_unseen])

    def _pending(self) -> list[Save]:
        return [save for save in files_saver().ledger.saves() if save.handle in self._handles]
