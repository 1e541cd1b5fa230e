"""The folder of a run with a trainer's checkpoints, on a disk or in a store.

In: a path or URL, and the names of checkpoints. Out: the paths of checkpoints and their archives, the complete
checkpoints, and the removal of old ones. Knows nothing of: the content of a checkpoint, frameworks.

On a disk, a checkpoint gets its name when it is complete. To remove it, it is first renamed, which is fast and atomic,
and deleted later, so no reader finds a part of it. A store has no folders, and its objects appear one by one. There,
one object, the mark, is put last and deleted first: a folder without a mark is not a checkpoint.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ...errors import CheckpointError
from ...plumbing import places, scratches
from .training_archive import ARCHIVE, TrainingArchive, url_in

_RETIRED: Final = ".retired"
# Archives beside the folder of their checkpoint.
_BESIDE: Final = ".checkpoint*.tar"
# The names that trainers give to checkpoints, with their numbers: "checkpoint-100", "checkpoint_3".
_NUMBER: Final = re.compile(r"checkpoint[-_](\d+)")


class LocalRun:
    """A folder on a disk."""

    def __init__(self, path: str | Path) -> None:
        self.path: Final = Path(path).absolute()
        self._given: Final = path
        self._beside: Path | None = None  # the archive of the newest save, beside its checkpoint

    def place(self, name: str) -> str:
        """The path of a checkpoint."""
        return str(self.path / name)

    def named(self, name: str) -> str:
        """The path of a checkpoint, relative if the given path was, as frameworks name it."""
        return os.path.join(self._given, name)

    def has(self, name: str) -> bool:
        """True if a checkpoint exists and is complete."""
        return (self.path / name).is_dir()

    def newest_first(self) -> list[str]:
        """The paths of the checkpoints, newest first."""
        return [self.named(name) for name in reversed(self._names())]

    def clear(self) -> None:
        """Remove the leftovers of killed trainers. Called before the first save."""
        self.make_room()
        for archive in self.path.glob(_BESIDE):
            _remove(archive)
        if self.path.is_dir():
            scratches.sweep(self.path)

    def begin(self, name: str) -> None:  # noqa: ARG002
        """Remove the archive of the previous save. Called before a save, while no other is under way."""
        if self._beside is not None:
            _remove(self._beside)

    def beside(self, name: str) -> Path:
        """The path of the archive that is later moved to the checkpoint, or converted to files in it."""
        self._beside = self.path / f".{name}.{ARCHIVE}"
        return self._beside

    def archive(self, state: Any, name: str, kind: type[TrainingArchive] = TrainingArchive) -> TrainingArchive:
        """Begin to write the archive of a checkpoint."""
        return kind(state, self.beside(name))

    def retire(self, newest: str, limit: int | None, best: str | None) -> None:
        """Retire the oldest checkpoints until `limit` are left. `make_room` removes them later.

        The durable checkpoint `newest`, and the one at the path `best`, are kept. A `limit` that is None or less than 1
        means no limit.
        """
        if limit is None or limit < 1 or not self.has(newest):
            return
        is_here = best is not None and Path(best).absolute().parent == self.path
        # By time: a training that was rolled back to an earlier step writes smaller numbers later.
        found = sorted(self._names(), key=lambda name: (self.path / name).stat().st_mtime_ns)
        for name in surplus(found, {newest, os.path.basename(best)} if best and is_here else {newest}, limit):
            with suppress(FileNotFoundError):  # another process has removed it
                os.rename(self.path / name, self.path / f".{name}{_RETIRED}")

    def make_room(self) -> None:
        """Remove retired checkpoints. No other thread uses this run meanwhile."""
        for hidden in self.path.glob(f".checkpoint*{_RETIRED}"):
            shutil.rmtree(hidden, ignore_errors=True)

    def end(self) -> None:
        """Remove everything except checkpoints."""
        self.make_room()
        self.begin("")

    def _names(self) -> list[str]:
        names = os.listdir(self.path) if self.path.is_dir() else []
        return [name for name in names_in_order(names) if self.has(name)]


class StoredRun:
    """A folder in a store. A folder in it is a checkpoint if it contains an object with the name `mark`."""

    def __init__(self, url: str, mark: str) -> None:
        self.url: Final = url.rstrip("/")
        self.mark: Final = mark
        self._storage: Final = places.storage_at(self.url)
        self._old: set[str] = set()  # checkpoints from before the first save
        self._beside: set[str] = set()  # archives beside checkpoints, by name
        self._retired: tuple[str, int, str | None] | None = None

    def place(self, name: str) -> str:
        """The URL of a checkpoint."""
        return f"{self.url}/{name}"

    named = place

    def has(self, name: str) -> bool:
        return self._storage.exists(f"{name}/{self.mark}")

    def newest_first(self) -> list[str]:
        """The URLs of the complete checkpoints, newest first."""
        names = names_in_order(self._storage.names(""))
        whole = {*self._storage.existing([f"{name}/{self.mark}" for name in names])}
        return [self.place(name) for name in reversed(names) if f"{name}/{self.mark}" in whole]

    def clear(self) -> None:
        names = self._storage.names("")
        self._old = {*names_in_order(names)}
        for name in [name for name in self._old if not self.has(name)]:
            self._delete(name)
        self._beside = {*fnmatch.filter(names, _BESIDE)}

    def begin(self, name: str) -> None:
        self._delete_archives()
        if name in self._old:
            self._delete(name)

    def archive(self, state: Any, name: str, kind: type[TrainingArchive] = TrainingArchive) -> TrainingArchive:
        if kind.is_part:
            return kind(state, url_in(self.place(name)))
        beside = f".{name}.{ARCHIVE}"
        self._beside.add(beside)
        return kind(state, self.place(beside))

    def retire(self, newest: str, limit: int | None, best: str | None) -> None:
        self._retired = None if limit is None or limit < 1 else (newest, limit, best)

    def make_room(self) -> None:
        """Remove retired checkpoints. If the store raises an error, the next save tries again."""
        if self._retired is None:
            return
        newest, limit, best = self._retired
        kept = {newest} | ({best.rpartition("/")[2]} if best is not None else set())
        with suppress(CheckpointError):
            for name in surplus(names_in_order(self._storage.names("")), kept, limit):
                self._delete(name)

    def end(self) -> None:
        self.make_room()
        self._delete_archives()

    def _delete_archives(self) -> None:
        for name in self._beside:
            self._storage.delete_all(name)
        self._beside.clear()

    def _delete(self, name: str) -> None:
        self._storage.delete(f"{name}/{self.mark}")  # first: without the mark it is not a checkpoint
        self._storage.delete_all(name)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def is_url(path: object) -> bool:
    """True if this is the URL of a place that is not on this machine."""
    return isinstance(path, str | os.PathLike) and not places.place_of(path).is_local


def number_of(folder: Path) -> int:
    """The number in the name of a checkpoint's folder; -1 for another name."""
    found = _NUMBER.fullmatch(folder.name)
    return -1 if found is None else int(found[1])


def names_in_order(names: Iterable[str]) -> list[str]:
    """The names of checkpoints among these, sorted by number."""
    return sorted((name for name in names if _NUMBER.fullmatch(name)), key=lambda name: number_of(Path(name)))


def surplus(found: Sequence[str], kept: set[str], limit: int) -> list[str]:
    """The first of these checkpoints, which must go so that `limit` are left. The `kept` ones count, but never go."""
    num_surplus = len(found) - max(limit, len(kept.intersection(found)))
    return [name for name in found if name not in kept][: max(0, num_surplus)]
