"""Copies whole, verified steps from root to root, and lets a root that was unavailable catch up.

In: runs. Out: the same commits at another root. Knows nothing of: tensors, saves under way.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from ...errors import (
    CheckpointError,
    CorruptCheckpointError,
    NotCommittedError,
    StepExistsError,
    StorageUnavailableError,
)
from ..host.threads import run_together
from ..runs.manifest import Archive, Manifest, Retired, missing_error
from ..runs.receipts import archives_of, layout_name, read_beside
from ..runs.roots import Roots
from ..runs.run import Run
from ..storage.bulk import Parcel, copy
from ..storage.interface import Reader, Storage
from ..storage.pace import Pace
from .archives.archive import OpenArchive, open_named
from .verify import Verification

if TYPE_CHECKING:
    from ..host.pool import SegmentPool

_SENT_AT_ONCE: Final = 32


def catch_up(
    roots: Roots,
    run: Run,
    *,
    skip: Collection[int] = (),
    pace: Pace | None = None,
) -> list[int]:
    """Copy to a run the steps that only other roots have, newest first, except `skip`. Returns the copied steps.

    `pace` limits the bandwidth. Raises StorageUnavailableError, and CorruptCheckpointError for a damaged source; steps
    that were copied before the error stay.
    """
    copied = []
    errors: list[CheckpointError] = []
    for step, holders in roots.missing(run):
        if step in skip:
            continue
        for source in holders:
            try:
                copy_step(source, run, step, background=True, pace=pace)
            except (NotCommittedError, StepExistsError):
                break  # retention has deleted the step at the source, or another process has committed it here
            except CorruptCheckpointError as error:
                errors.append(error)  # another root may hold the step undamaged
            else:
                copied.append(step)
                break
    for other in roots.runs:
        if other is not run:
            run.bring_marks(other)
    if copied:
        run.announce()
    if errors:
        raise errors[0]
    return copied


def copy_step(
    source: Run,
    target: Run,
    step: int,
    *,
    check: Callable[[], None] = lambda: None,
    background: bool = False,
    on_bytes: Callable[[int], None] = lambda _: None,
    mends: bool = False,
    pace: Pace | None = None,
    retires: Sequence[Retired] = (),
    pool: SegmentPool | None = None,
) -> list[int]:
    """Copy a step and its marks to another root, after the steps that lend to it. Returns the steps committed there.

    If another version of the step is committed at the target, it is replaced. An archive that already exists there,
    such as after an interrupted copy, is not copied again. The copies are locked until the commit, so that no sweep
    deletes them. `on_bytes` is called on any thread with the number of bytes that were compared with their digests.
    With `mends`, existing archives at the target are read, too, and damaged archives are replaced; the step stays
    committed meanwhile. With `retires`, the commit retires these commits at the target. `pool` is passed to
    `storage.bulk.copy`.

    Raises NotCommittedError, StepExistsError if another process has committed the step at the target meanwhile,
    CorruptCheckpointError for a damaged source, StorageUnavailableError and StorageFullError.
    """
    committed: list[int] = []
    replaced = target.manifest_to_replace(step)
    manifest = source.manifest(step)
    again = partial(
        copy_step, source, target,
        check=check, background=background, on_bytes=on_bytes, mends=mends, pace=pace, pool=pool,
    )  # fmt: skip
    for earlier in sorted({other.step for other in manifest.elsewhere} - {step}):
        lent = {one.archive.name for one in manifest.elsewhere if one.step == earlier}
        lender = target.committed(earlier)
        if mends or lender is None or not lent.issubset(lender.own_names):
            committed += again(earlier)
    with contextlib.ExitStack() as locks, _deletion_translated(source, manifest):
        folder = source.folder(step)
        parcels, sends, sent = [], [], dict[str, Archive]()
        for archive in (*archives_of(source.storage, folder, manifest), *manifest.beside):
            path = target.root.archive_path(step, archive)
            if _is_there(target.storage, path, archive, reads_all=mends):
                if not target.storage.is_held(path):  # another copy in progress holds the archive until its commit
                    locks.callback(target.storage.hold(path))
                target.storage.settle(path)
                on_bytes(archive.num_bytes)
            elif send := source.storage.sender(path, target.storage, archive.num_bytes, archive.digest):
                sends.append(send)
                sent[path] = archive
            else:
                parcels.append(_parcel(source.storage, path, step, archive, on_bytes))
        copy(
            parcels,
            target.storage,
            background=background,
            check=check,
            finished=lambda sink: locks.callback(sink.close),
            pace=pace,
            pool=pool,
            compresses=target.compresses,
        )
        run_together("send", [partial(send, check) for send in sends], max_threads=_SENT_AT_ONCE)
        for path, archive in sent.items():
            if not _is_there(target.storage, path, archive, reads_all=False):
                shown = target.storage.locate(path)
                why = f"{shown}: the copy made by another process is missing"
                raise StorageUnavailableError(why, path=shown)
            locks.callback(target.storage.hold(path))
        for entry in (manifest.ranks.archives, manifest.ranks.layout) if manifest.ranks else ():
            data = read_beside(source.storage, folder, entry, step)
            target.storage.replace(f"{target.folder(step)}/{entry.name}", data)
        if manifest.ranks is None and len(manifest.archives) > 1:  # a layout is only a hint, and may be missing
            name = layout_name(manifest.attempt)
            with contextlib.suppress(FileNotFoundError):
                target.storage.replace(f"{target.folder(step)}/{name}", source.storage.read(f"{folder}/{name}")[0])
        target.adopt(manifest, replaces=replaced, retires=retires)
    target.bring_marks(source)
    return [*committed, step]


def send_archive(source: Storage, target: Run, path: str, archive: Archive, *, pace: Pace | None = None) -> None:
    """Copy one archive of a step to another place, verified, for a process that commits the step there.

    Raises the same errors as `copy_step`.
    """
    parcel = _parcel(source, path, -1, archive, lambda _: None)
    copy([parcel], target.storage, background=True, pace=pace, compresses=target.compresses)


@contextlib.contextmanager
def _deletion_translated(source: Run, manifest: Manifest) -> Iterator[None]:
    """Raises NotCommittedError instead of CorruptCheckpointError if the step was deleted during the block."""
    try:
        yield
    except CorruptCheckpointError:
        source.manifest(manifest.step)
        raise


def _is_there(storage: Storage, path: str, archive: Archive, *, reads_all: bool) -> bool:
    """Whether an object has the size and the digest of this archive, which suffice since objects appear whole.

    With `reads_all`, all of its bytes are compared.
    """
    try:
        with storage.open(path) as stored:
            reader = open_named(stored, archive, path=path).reader
            if reads_all:
                Verification().compare_file(reader, path)
            return True
    except (FileNotFoundError, IsADirectoryError, CorruptCheckpointError):
        return False


def _parcel(storage: Storage, path: str, step: int, archive: Archive, on_bytes: Callable[[int], None]) -> Parcel:
    """An archive to copy to the same path. It is opened when its copy begins, and dropped after its last byte."""
    opened: OpenArchive | None = None
    num_left = archive.num_bytes  # under the lock
    lock = threading.Lock()

    def begin() -> Reader:
        nonlocal opened
        shown = storage.locate(path)
        try:
            reader = storage.open(path)
        except FileNotFoundError as error:
            raise missing_error(shown, step) from error
        try:
            opened = open_named(reader, archive, path=shown)
        except BaseException:
            reader.close()
            raise
        return opened.reader

    def verify(offset: int, data: memoryview) -> None:
        nonlocal opened, num_left
        assert opened is not None
        opened.verify(offset, data)
        on_bytes(len(data))
        with lock:
            num_left -= len(data)
            if not num_left:
                opened = None  # otherwise the indices of hundreds of ranks would stay in memory

    return Parcel(begin, path, archive.num_bytes, verify)
