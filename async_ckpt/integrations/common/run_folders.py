"""The folder of a run with a trainer's checkpoints, on a disk or in a store.

In: a path or URL, and the names of checkpoints. Out: where a checkpoint and its archive are written, and which are
whole; old checkpoints are gone. Knows nothing of: the contents of a checkpoint, and frameworks.

On a disk, a checkpoint has its name when it is whole. A store has no folders, and puts objects one by one: there, one
of them is put last and deleted first, the mark. A folder without a mark is none.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ...errors import CheckpointError
from ...plumbing import places
from .folders import archives_among, names_in_order, remove_archives, remove_leftovers, remove_retired, retire
from .training_archive import TrainingArchive, path_beside, url_beside, url_in


class LocalRun:
    """A folder on a disk."""

    def __init__(self, path: str) -> None:
        self.path: Final = Path(path).absolute()
        self._given: Final = path

    def place(self, name: str) -> str:
        """The path of a checkpoint."""
        return str(self.path / name)

    def named(self, name: str) -> str:
        """The same below the path that was given, as frameworks name it."""
        return os.path.join(self._given, name)

    def has(self, name: str) -> bool:
        """Whether a checkpoint is there and whole."""
        return (self.path / name).is_dir()

    def newest_first(self) -> list[str]:
        """The paths of its checkpoints."""
        names = os.listdir(self.path) if self.path.is_dir() else []
        return [self.named(name) for name in reversed(names_in_order(names)) if self.has(name)]

    def clear(self) -> None:
        """Before the first save: remove what a killed trainer has left."""
        if self.path.is_dir():
            remove_leftovers(self.path)

    def begin(self, name: str) -> None:  # noqa: ARG002
        """Before a save, when no other is under way."""
        remove_archives(self.path)

    def archive(self, state: Any, name: str, kind: type[TrainingArchive] = TrainingArchive) -> TrainingArchive:
        """Begin to write the archive of a checkpoint."""
        return kind(state, path_beside(self.path / name))

    def retire(self, newest: str, limit: int | None, best: str | None) -> None:
        """Have the oldest checkpoints beside the newest one, which is durable, removed until `limit` are left."""
        if self.has(newest):
            retire(self.path / newest, limit, keep=best)

    def make_room(self) -> None:
        """Remove what was retired. No other thread uses this run meanwhile."""
        remove_retired(self.path)

    def end(self) -> None:
        """Leave nothing but checkpoints."""
        self.make_room()
        remove_archives(self.path)


class StoredRun:
    """A folder in a store. Its checkpoints are those that have the mark."""

    def __init__(self, url: str, mark: str) -> None:
        self.url: Final = url.rstrip("/")
        self._mark: Final = mark
        self._storage: Final = places.storage_at(self.url)
        self._old: set[str] = set()  # checkpoints from before the first save
        self._beside: set[str] = set()  # archives beside checkpoints, by name
        self._retired: tuple[str, int, str | None] | None = None

    def place(self, name: str) -> str:
        """The URL of a checkpoint."""
        return f"{self.url}/{name}"

    named = place

    def has(self, name: str) -> bool:
        return self._storage.exists(f"{name}/{self._mark}")

    def clear(self) -> None:
        names = self._storage.names("")
        self._old = {*names_in_order(names)}
        for name in [name for name in self._old if not self.has(name)]:
            self._delete(name)
        self._beside = archives_among(names)

    def begin(self, name: str) -> None:
        self._delete_archives()
        if name in self._old:
            self._delete(name)

    def archive(self, state: Any, name: str, kind: type[TrainingArchive] = TrainingArchive) -> TrainingArchive:
        if kind.is_part:
            return kind(state, url_in(self.place(name)))
        where = url_beside(self.place(name))
        self._beside.add(where.rpartition("/")[2])
        return kind(state, where)

    def retire(self, newest: str, limit: int | None, best: str | None) -> None:
        self._retired = None if limit is None or limit < 1 else (newest, limit, best)

    def make_room(self) -> None:
        """Remove what was retired, unless the store refuses; then it is tried at the next save."""
        if self._retired is None:
            return
        newest, limit, best = self._retired
        kept = {newest} | ({best.rpartition("/")[2]} if best is not None else set())
        with suppress(CheckpointError):
            found = names_in_order(self._storage.names(""))
            num_surplus = len(found) - max(limit, len(kept.intersection(found)))
            for name in [name for name in found if name not in kept][: max(0, num_surplus)]:
                self._delete(name)

    def end(self) -> None:
        self.make_room()
        self._delete_archives()

    def newest_first(self) -> list[str]:
        """The URLs of its whole checkpoints."""
        names = names_in_order(self._storage.names(""))
        whole = {*self._storage.existing([f"{name}/{self._mark}" for name in names])}
        return [self.place(name) for name in reversed(names) if f"{name}/{self._mark}" in whole]

    def _delete_archives(self) -> None:
        for name in self._beside:
            self._storage.delete_all(name)
        self._beside.clear()

    def _delete(self, name: str) -> None:
        self._storage.delete(f"{name}/{self._mark}")  # first: from now on it is no checkpoint
        self._storage.delete_all(name)


def is_url(path: object) -> bool:
    """Whether this is the URL of something that is not on this machine."""
    return isinstance(path, str | os.PathLike) and not places.place_of(path).is_local
