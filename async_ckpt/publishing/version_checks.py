"""The soundness of all versions at a root, of whole models and of ranks.

In: a root. Out: for each version whether it can be had, with the error if it cannot. Knows nothing of: engines.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from shutil import rmtree
from typing import NamedTuple

from ..errors import CheckpointError, CorruptCheckpointError, NotCommittedError
from ..format.delta import folder_of, version_of
from ..host.threads import Crew
from ..report import VerifyReport
from ..spans import Clock, monotonic
from ..storage.place import Place, local_place
from .base_model import BaseModel
from .folder_replica import FolderReplica
from .of_ranks.rank_versions import RankVersions, folder_of_rank, worlds_in
from .replica import new_crew, update_replica
from .versions import Versions


def verify_versions(
    place: Place, *, base: str | os.PathLike[str] | None = None, clock: Clock = monotonic
) -> VerifyReport:
    """Verify the versions at a root. Raises CorruptCheckpointError after all of them were read."""
    begin, root = clock(), place.storage().locate("")
    with tempfile.TemporaryDirectory(prefix="async-ckpt-verify-") as scratch:
        checks = [*checks_of_versions(place, Path(scratch), base=None if base is None else local_place(base))]
    errors = {check.version: check.error for check in checks if check.error is not None}
    sound = tuple(sorted({check.version for check in checks} - errors.keys()))
    if errors:
        damaged = tuple(sorted(errors))
        shown = (", ".join(map(str, numbers)) or "none" for numbers in (damaged, sound))
        raise CorruptCheckpointError(
            "{}: damaged: version {}; sound: {}. {}".format(root, *shown, errors[damaged[0]]),
            path=root,
            damaged_steps=damaged,
            sound_steps=sound,
        ) from errors[damaged[0]]
    if not sound:
        raise NotCommittedError(f"{root}: no version there is whole", path=root, step=None)
    return VerifyReport(root, len(checks), sum(check.num_bytes for check in checks), clock() - begin, versions=sound)


def has_versions(names: Iterable[str]) -> bool:
    """Whether these names at a root are those of versions, or of the ranks that publish some."""
    listed = list(names)
    return any(version_of(name) is not None for name in listed) or bool(worlds_in(listed))


class VersionCheck(NamedTuple):
    """A version that was checked, at the root of all or in the folder of a rank, and its error if it is not sound.

    `kind` is "anchor", "delta" or, if its index cannot be read, "damaged". `num_bytes` are those of its files.
    """

    version: int
    folder: str  # below the root: empty, or the folder of a rank
    kind: str
    num_bytes: int
    error: CheckpointError | None


def checks_of_versions(place: Place, scratch: Path, *, base: Path | None = None) -> Iterator[VersionCheck]:
    """Check all versions at a root, and those of the ranks that publish slices there.

    Each is applied to a folder that is thrown away, in ascending order, so that every checksum is compared and each
    delta is applied once. A version that is built on a damaged one cannot be had either, up to the next anchor.

    `base` is the folder of a base model that is not published. `scratch` gets as many bytes as the model has, and for
    anchors twice as many. Raises StorageUnavailableError and StorageFullError.
    """
    base_model, ranks, crew = BaseModel(base) if base is not None else None, RankVersions(place), new_crew()
    names = ranks.storage.names("")
    try:
        yield from _checks_at("", Versions(ranks.storage), scratch / "versions", base_model, crew)
        for size, begun in sorted(worlds_in(names).items()):
            for rank in sorted(begun):
                folder = folder_of_rank(rank, size)
                yield from _checks_at(folder, ranks.of_rank(rank, size), scratch / folder, None, crew)
        for version, size in ranks.sizes(names).items():
            try:
                ranks.read_whole(version, size)
            except (CorruptCheckpointError, NotCommittedError) as error:
                yield VersionCheck(version, "", "damaged", 0, error)
    finally:
        crew.stop()


def _checks_at(
    folder: str, versions: Versions, scratch: Path, base: BaseModel | None, crew: Crew
) -> Iterator[VersionCheck]:
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
                update_replica(replica, versions, number, crew, base=base)
        except (CorruptCheckpointError, NotCommittedError) as caught:
            if number not in versions.numbers():
                continue  # retention was faster
            error = caught
            damaged.add(number)
        yield VersionCheck(number, folder, kind, sum(versions.storage.sizes(folder_of(number)).values()), error)
    rmtree(scratch, ignore_errors=True)
