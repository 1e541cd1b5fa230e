"""The archive of a training: written beside the folder of a checkpoint, and moved to it when it is durable.

In: a state, and a path. Out: the archive in the folder of a checkpoint, and the names in it. Knows nothing of:
frameworks.

In a store, an archive that becomes part of a checkpoint is written to its final place: objects cannot be renamed, and a
mark, not the archive, makes the folder a checkpoint.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Sequence, Sized
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final

from ... import Place, save
from ...errors import StateMismatchError
from ...plumbing import contents, disk, find, places, runs

ARCHIVE: Final = "training.tar"
"""The name of the archive in the folder. If several ranks have written the archive, it is a folder."""
# The archive in a folder to which only one rank has saved.
ONE_ARCHIVE: Final = "rank_00000.tar"


class TrainingArchive:
    """An archive being written."""

    is_part: ClassVar = True
    """True if the archive becomes a part of the checkpoint."""

    def __init__(self, state: Any, where: Path | str) -> None:
        """Begin to write to a path or a URL."""
        self.parts = (*state,)
        self._written = where
        self.handle = save(state, where)

    def durable(self) -> Path | str:
        """Wait until the archive is durable. Returns its path or URL. Raises the error of its save."""
        wait([self.handle])  # cannot deadlock: other threads write the archive, and do not wait for this one
        self.handle.result()
        return self._written

    def take_into(self, folder: str) -> None:
        """Wait until the archive is durable and, on a disk, move it to a folder. Raises the error of its save.

        The archive of several ranks also stays beside the folder, since other ranks may still read it.
        """
        source = self.durable()
        if isinstance(source, Path):
            with disk.translated(source):
                _take(source, Path(folder, ARCHIVE))


def _take(source: Path, target: Path) -> None:
    if not source.is_dir():
        os.rename(source, target)
        return
    target.mkdir()
    for path in source.iterdir():
        if path.is_file():
            try:
                os.link(path, target / path.name)
            except OSError:  # a file system without links
                shutil.copyfile(path, target / path.name)


def archive_of(folder: Path, world_size: int) -> Path:
    """The path to which ranks save a state in a folder: the folder itself, or with a single rank a file in it."""
    return folder / ONE_ARCHIVE if world_size == 1 else folder


def archives_in(folder: places.Anywhere) -> tuple[Place, int] | None:
    """The archives in a folder, and the number of ranks that have saved them; None for a folder of a framework."""
    place = places.place_of(folder)
    storage = place.storage()
    if storage.exists(ONE_ARCHIVE):
        return below(place, ONE_ARCHIVE), 1
    with suppress(FileNotFoundError):
        manifest = storage.read(runs.MANIFEST_NAME)[0]
        return place, runs.parse_manifest(manifest, path=storage.locate(runs.MANIFEST_NAME)).world_size
    return None


def below(place: Place, name: str) -> Place:
    return replace(place, url=f"{place.text.rstrip('/')}/{name}")


def url_in(folder: str) -> str:
    """The URL of the archive in the folder at a URL."""
    return f"{folder}/{ARCHIVE}"


def num_items_in(archive: places.Anywhere) -> dict[str, int]:
    """The number of items of each top-level container in an archive's state. Reads only the structure.

    Raises the errors of `load`.
    """

    def count(parts: Sequence[contents.Part]) -> dict[str, int]:
        tree, _ = parts[0].archive.tree()
        return {name: len(items) for name, items in tree.items() if isinstance(items, Sized)}

    return find.from_path(archive, count, verify=True)


def missing_in(checkpoint: places.Anywhere, names: Collection[str]) -> list[str]:
    """The subset of these names that the state of a checkpoint, a dict, lacks. Reads only the structure.

    Raises the errors of `load`.
    """

    def lacking(parts: Sequence[contents.Part]) -> list[str]:
        return sorted({*names}.difference(*(part.archive.entries() or () for part in parts)))

    return find.from_path(checkpoint, lacking, verify=True)


def refuse_missing(checkpoint: places.Anywhere, names: Collection[str]) -> None:
    """Raise StateMismatchError if the state of a checkpoint lacks one of these names, before anything is filled."""
    if missing := missing_in(checkpoint, names):
        lines = "\n  ".join(f"missing in the checkpoint: {name}" for name in missing)
        raise StateMismatchError(
            f"{places.place_of(checkpoint).shown} does not fit the live state; nothing was overwritten:\n  {lines}",
            missing=tuple(missing),
        )


def archive_in(folder: str | os.PathLike[str] | None) -> Path | None:
    """The archive in the folder of a checkpoint; None if there is none."""
    archive = None if folder is None else Path(folder, ARCHIVE)
    return archive if archive is not None and archive.exists() else None
