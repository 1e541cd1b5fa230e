"""Checks whether the versions at a root are sound, both of whole models and of ranks.

In: a root. Out: for each version, whether it can be restored, or its error; and a report on the whole root.
Knows nothing of: engines.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import NamedTuple

from ... import Place, VerifyReport
from ...errors import CheckpointError, CorruptCheckpointError, FormatVersionError, NotCommittedError
from ...plumbing import places, threads, timing, verification
from ..delta import folder_of, version_of
from .base_model import BaseModel
from .folder_replica import FolderReplica
from .live_weights import new_crew, update_replica
from .of_ranks.rank_replicas import VersionOfRanks
from .of_ranks.root_versions import RootVersions, folder_of_rank, worlds_in
from .versions import Versions


def verify_root(path: places.Anywhere, *, base: str | os.PathLike[str] | None = None) -> VerifyReport:
    """Verify the versions at a root, and also a run or checkpoint at the same place.

    Raises CorruptCheckpointError after everything was read, FormatVersionError, and NotCommittedError if nothing there
    is complete.
    """
    reports: list[VerifyReport] = []
    errors: list[CheckpointError] = []
    missing: list[NotCommittedError] = []
    for verify in (
        partial(verification.verify_path, path),
        partial(_verify_versions, places.place_of(path), base=base),
    ):
        try:
            reports.append(verify())
        except NotCommittedError as error:
            missing.append(error)
        except (CorruptCheckpointError, FormatVersionError) as error:
            errors.append(error)
        except Exception as error:
            if not errors:
                raise
            errors[0].add_note(str(error))  # raised below, since it was found first
    if errors:
        first, *others = sorted(errors, key=lambda error: not isinstance(error, CorruptCheckpointError))
        for other in others:
            first.add_note(str(other))
        raise first
    if not reports:
        raise missing[-1]
    report, *others_there = reports
    for of_versions in others_there:
        report = replace(
            report,
            num_archives=report.num_archives + of_versions.num_archives,
            num_bytes=report.num_bytes + of_versions.num_bytes,
            seconds=report.seconds + of_versions.seconds,
            notes=report.notes + of_versions.notes,
            versions=of_versions.versions,
        )
    if not report.versions:
        report = replace(report, notes=(*report.notes, "no version there is sound"))
    return report


def _verify_versions(place: Place, *, base: str | os.PathLike[str] | None) -> VerifyReport:
    """Raises CorruptCheckpointError after all versions were read, and NotCommittedError if none is complete."""
    begin, root = timing.monotonic(), place.storage().locate("")
    checked = check_versions(place, base=None if base is None else places.local_place(base))
    if checked.damaged:
        shown = (", ".join(map(str, numbers)) or "none" for numbers in (checked.damaged, checked.sound))
        first = next(check.error for check in checked.checks if check.version == checked.damaged[0] and check.error)
        raise CorruptCheckpointError(
            "{}: damaged: version {}; sound: {}. {}".format(root, *shown, first),
            path=root,
            damaged_steps=checked.damaged,
            sound_steps=checked.sound,
        ) from first
    num_bytes = sum(check.num_bytes for check in checked.checks)
    seconds = timing.monotonic() - begin
    return VerifyReport(root, len(checked.checks), num_bytes, seconds, notes=checked.notes, versions=checked.sound)


def has_versions(names: Iterable[str]) -> bool:
    """Whether the names at a root include versions, or folders of ranks that publish versions."""
    listed = list(names)
    return any(version_of(name) is not None for name in listed) or len(worlds_in(listed)) > 1


class VersionCheck(NamedTuple):
    """A checked version, at the root or in the folder of a rank, with its error if it is not sound.

    `kind` is "anchor", "delta" or, if the index cannot be read, "damaged". `num_bytes` is the total size of its files.
    """

    version: int
    folder: str  # below the root: empty, or the folder of a rank
    kind: str
    num_bytes: int
    error: CheckpointError | None


class CheckedVersions(NamedTuple):
    """The checked versions at a root, and the numbers, ascending, of sound, damaged and partial versions. Readers do
    not see a partial version, which not all ranks have published.
    """

    checks: list[VersionCheck]
    sound: tuple[int, ...]
    damaged: tuple[int, ...]
    partial: tuple[int, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        numbers = ", ".join(map(str, self.partial))
        return (f"not all ranks have published version {numbers}",) if numbers else ()


def check_versions(
    place: Place, *, base: Path | None = None, on_check: Callable[[VersionCheck], None] = lambda _: None
) -> CheckedVersions:
    """Check all versions at a root, including those in the folders of ranks. `on_check` is called after each check.

    The versions are applied to a temporary folder, in ascending order, so that every checksum is compared and each
    delta is applied once. A damaged version makes all versions up to the next anchor damaged. The folder needs as many
    bytes as the model has, and twice as many while an anchor is written.

    `base` is the folder of a base model that is not published. Raises NotCommittedError if no version is complete,
    StorageUnavailableError and StorageFullError.
    """
    whole = RootVersions(place).sizes().keys()
    checks: list[VersionCheck] = []
    with tempfile.TemporaryDirectory(prefix="async-ckpt-verify-") as scratch:
        for check in _checks_of(place, Path(scratch), base=base):
            checks.append(check)
            on_check(check)
    found = {check.version for check in checks}
    existing = found & whole
    damaged = {check.version for check in checks if check.error is not None}
    if not (existing or damaged):
        root = place.storage().locate("")
        raise NotCommittedError(f"{root}: no version there is sound", path=root, step=None)
    incomplete = found - existing - damaged - RootVersions(place).sizes().keys()  # other ranks may have completed some
    numbers = (tuple(sorted(some)) for some in (existing - damaged, damaged, incomplete))
    return CheckedVersions(checks, *numbers)


def _checks_of(place: Place, scratch: Path, *, base: Path | None) -> Iterator[VersionCheck]:
    root, crew = RootVersions(place, None if base is None else BaseModel(base)), new_crew()
    names = root.storage.names("")
    try:
        for size, begun in sorted(worlds_in(names).items()):
            for rank in sorted(begun):
                folder = folder_of_rank(rank, size)
                yield from _checks_at(folder, root.of_rank(rank, size), scratch / (folder or "versions"), crew)
        for version, size in root.sizes(names).items():
            try:
                if size:
                    VersionOfRanks(root, version, size)  # raises
            except (CorruptCheckpointError, NotCommittedError) as error:
                yield VersionCheck(version, "", "damaged", 0, error)
    finally:
        crew.stop()


def _checks_at(folder: str, versions: Versions, scratch: Path, crew: threads.Crew) -> Iterator[VersionCheck]:
    damaged: set[int] = set()
    for number in versions.numbers():
        kind, error = "damaged", None
        try:
            index = versions.read(number)
            kind = "anchor" if index.base is None else "delta"
            if index.base in damaged:
                raise CorruptCheckpointError(
                    f"{versions.root}: version {number} is a delta against version {index.base}, which is damaged",
                    path=versions.root,
                )
            replica = FolderReplica(scratch)
            with replica.locked():
                update_replica(replica, versions, number, crew)
        except (CorruptCheckpointError, NotCommittedError) as caught:
            if number not in versions.numbers():
                continue  # retention has deleted it meanwhile
            error = caught
            damaged.add(number)
        yield VersionCheck(number, folder, kind, sum(versions.storage.sizes(folder_of(number)).values()), error)
    rmtree(scratch, ignore_errors=True)
