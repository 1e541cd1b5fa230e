"""The folder of one checkpoint, which all ranks fill: hidden until the files of all are durable.

In: the files of one rank, or its error. Out: `<save_dir>/<tag>`, which appears as a whole, and then `latest`.
Knows nothing of: the content of the files, DeepSpeed.

    <save_dir>/.<tag>.<random>.async_ckpt-tmp.d/    created by rank 0, whose lock shows that it is alive
        rank_00001/                                 DeepSpeed's files of one rank
        files/                                      archives of the ranks; becomes <save_dir>/<tag>

No collective is used: the ranks meet in the background (`plumbing.rendezvous`). In a store, objects cannot be renamed:
the archives are under the tag from the start, and their manifest makes them a checkpoint.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from ... import Place
from ...plumbing import disk, file_digests, rendezvous, runs, scratches
from ..common.folders import name_latest
from ..common.training_archive import ONE_ARCHIVE, archive_of, below

LATEST: Final = "latest"
_FILES: Final = "files"


class TagFolder:
    """One rank's view of the folder of one save. Rank 0 creates the hidden folder, and sends its path to all others."""

    def __init__(self, save_dir: Path, tag: str, *, save_latest: bool, rank: int, world_size: int) -> None:
        self.save_dir, self.tag = save_dir.absolute(), tag
        self.target = self.save_dir / tag
        self._save_latest, self._rank, self._world_size = save_latest, rank, world_size
        self._scratch: scratches.Scratch | None = None
        self._hidden = Path()

    def make(self) -> str | None:
        """On rank 0, create the hidden folder, and remove those of killed trainings. Returns its path."""
        if self._rank != 0:
            return None
        with suppress(FileNotFoundError):
            scratches.sweep(self.target.parent)
        self._scratch = scratches.Scratch(self.target.parent, self.target.name)
        return str(self._scratch.folder.parent)

    def enter(self, hidden: str | None) -> None:
        """Set the path of the hidden folder that rank 0 has created."""
        assert hidden is not None
        self._hidden = Path(hidden)

    @property
    def of_rank(self) -> Path:
        """The folder to which this rank writes DeepSpeed's files."""
        return self._hidden / f"rank_{self._rank:05d}"

    @property
    def archive(self) -> Path:
        """The path to which all ranks save one state."""
        return archive_of(self._hidden / _FILES, self._world_size)

    def done(self, call: rendezvous.RankCall) -> None:
        """Report that this rank's files are durable, and wait until the files of all ranks are published.

        Raises PeerFailedError if another rank has failed, or does not answer.
        """
        if self.of_rank.is_dir():
            for path in self.of_rank.iterdir():
                os.replace(path, self._hidden / _FILES / path.name)
        call.conclude(self._publish)
        with suppress(Exception):  # the checkpoint is published; the next save removes the rest
            self.remove()

    def _publish(self) -> None:
        files = self._hidden / _FILES
        disk.sync_folder(files)
        scratches.publish(files, self.target, replaced=_is_of_library)
        if self._save_latest:
            name_latest(self.save_dir / LATEST, self.tag)

    def remove(self) -> None:
        """On rank 0, remove the hidden folder and its content."""
        if self._scratch is not None:
            self._scratch.remove()


class StoredFolder:
    """The folder of one save in a store. Its manifest makes it a checkpoint, so only `latest` has to be written."""

    def __init__(self, save_dir: Place, tag: str, *, save_latest: bool, world_size: int) -> None:
        self.save_dir, self.tag = save_dir, tag
        self.archive = below(save_dir, tag if world_size > 1 else f"{tag}/{ONE_ARCHIVE}")
        self.target = below(save_dir, tag).shown
        self._save_latest = save_latest

    def make(self) -> str | None:
        """None: archives are written directly to the tag's folder."""

    def enter(self, hidden: str | None) -> None:
        """Do nothing: archives are written directly to the tag's folder."""

    def done(self, call: rendezvous.RankCall) -> None:
        """After the archives of all ranks are committed, write `latest`."""
        call.conclude(self._name_latest)

    def _name_latest(self) -> None:
        if self._save_latest:
            self.save_dir.storage().replace(LATEST, self.tag.encode())

    def remove(self) -> None:
        """Do nothing: archives are written directly to the tag's folder."""


def _is_of_library(path: str) -> bool:
    """True for a file of this library in the folder of a tag, which a later save to that tag replaces."""
    name = path.partition("/")[0]
    return (
        name in (runs.MANIFEST_NAME, ONE_ARCHIVE) or runs.is_library_name(name) or name.startswith(file_digests.DIGESTS)
    )
