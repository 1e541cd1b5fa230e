"""Bringing a root that was away up to date: steps are copied, whole and verified, from one that has them.

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
    """Copy to a run what other roots hold and it lacks, the newest first, but for `skip`; the steps that were copied.

    `check` is called between segments, and ends it by raising.
    Raises StorageUnavailableError, and CorruptCheckpointError for a source that is damaged; what was copied stays.
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
                break  # retention was faster, or somebody else has committed the step here
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


def _copy_step(source: Run, to: Run, step: int, check: Callable[[], None]) -> None:
    """Copy the archives of a step, then commit it. What is copied stays locked until then, so that nobody sweeps it."""
    replaced = to.manifest_to_replace(step)
    made = source.manifest(step)
    for earlier in sorted({other.step for other in made.elsewhere} - {step}):
        there = to.committed(earlier)
        if there is None or there.attempt != source.manifest(earlier).attempt:
            _copy_step(source, to, earlier, check)  # what it has borrowed from comes first
    with contextlib.ExitStack() as sinks:
        folder = source.folder(step)
        for archive in (*archives_of(source.storage, folder, made), *made.beside):
            _copy(source, to, step, archive, check, sinks)
        for told in (made.ranks.archives, made.ranks.layout) if made.ranks else ():
            to.storage.replace(
                f"{to.folder(step)}/{told.name}", source.storage.read(f"{folder}/{told.name}")[0]
            )
        to.adopt(made, replaces=replaced)


def _copy(
    source: Run, to: Run, step: int, archive: Archive, check: Callable[[], None], sinks: contextlib.ExitStack
) -> None:
    """Copy one archive; its sink is closed with `sinks`."""
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
            to.storage,
            background=True,
            check=check,
            finished=lambda sink: sinks.callback(sink.close),
        )
