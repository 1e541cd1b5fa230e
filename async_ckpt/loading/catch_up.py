"""Catching up a root that was unavailable: steps are copied, whole and verified, from a root that has them.

In: runs. Out: the same commits at another root. Knows nothing of: tensors, saves under way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection

from ..errors import CheckpointError, CorruptCheckpointError, NotCommittedError, StepExistsError
from ..runs.manifest import Archive, missing_error
from ..runs.receipts import archives_of
from ..runs.roots import Roots
from ..runs.run import Run
from ..storage.bulk import Parcel, copy
from .archives.archive import OpenArchive


def catch_up(
    roots: Roots, run: Run, *, skip: Collection[int] = (), check: Callable[[], None] = lambda: None
) -> list[int]:
    """Copy to a run the steps that only other roots have, the newest first, except `skip`. Returns the copied steps.

    `check` is called between segments, and ends the copying by raising. Raises StorageUnavailableError, and
    CorruptCheckpointError for a damaged source; the steps that have been copied stay.
    """
    copied = []
    errors: list[CheckpointError] = []
    for step, holders in roots.missing(run):
        if step in skip:
            continue
        for source in holders:
            check()
            try:
                _copy_step(source, run, step, check)
            except (NotCommittedError, StepExistsError):
                break  # retention was faster, or another process has committed the step here
            except CorruptCheckpointError as error:
                errors.append(error)  # another root may hold it whole
            else:
                copied.append(step)
                break
    if copied:
        run.announce()
    if errors:
        raise errors[0]
    return copied


def _copy_step(source: Run, target: Run, step: int, check: Callable[[], None]) -> None:
    """Copy the archives of a step, then commit it. The copies are locked until then, so that no sweep deletes them."""
    replaced = target.manifest_to_replace(step)
    manifest = source.manifest(step)
    for earlier in sorted({other.step for other in manifest.elsewhere} - {step}):
        committed = target.committed(earlier)
        if committed is None or committed.attempt != source.manifest(earlier).attempt:
            _copy_step(source, target, earlier, check)  # the lender must be committed first
    with contextlib.ExitStack() as sinks:
        folder = source.folder(step)
        for archive in (*archives_of(source.storage, folder, manifest), *manifest.beside):
            _copy_archive(source, target, step, archive, check, sinks)
        for entry in (manifest.ranks.archives, manifest.ranks.layout) if manifest.ranks else ():
            target.storage.replace(
                f"{target.folder(step)}/{entry.name}", source.storage.read(f"{folder}/{entry.name}")[0]
            )
        target.adopt(manifest, replaces=replaced)


def _copy_archive(
    source: Run,
    target: Run,
    step: int,
    archive: Archive,
    check: Callable[[], None],
    sinks: contextlib.ExitStack,
) -> None:
    """Copy one archive. `sinks` closes its sink."""
    path = source.archive_path(step, archive)
    try:
        reader = source.storage.open(path)
    except FileNotFoundError as error:
        raise missing_error(source.storage.locate(path), step) from error

    with reader:
        opened = OpenArchive(reader, path=source.storage.locate(path), verify=True)
        if (reader.num_bytes, opened.digest) != (archive.num_bytes, archive.digest):
            raise opened.corrupt("it is not the archive that its manifest names")
        parcel = Parcel(lambda: reader, path, archive.num_bytes, opened.verify)
        copy(
            [parcel],
            target.storage,
            background=True,
            check=check,
            finished=lambda sink: sinks.callback(sink.close),
        )
