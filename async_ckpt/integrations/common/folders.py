"""The folder in which a trainer's checkpoints lie: one trainer at a time, old checkpoints that make room, the file that
names the newest one.

In: a folder, and that of the newest checkpoint in it. Out: nothing; folders are gone. Knows nothing of: the contents of
a checkpoint, and frameworks.

A checkpoint that is to go is renamed first, in no time and as a whole, and removed later: no reader finds half of one.
"""

from __future__ import annotations

import atexit
import fnmatch
import json
import os
import re
import shutil
import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

from ...errors import RunTakenError
from ...plumbing import LocalStorage, disk, locks, process, scratches, timing

_LOCK: Final = ".async_ckpt.lock"
_RETIRED: Final = ".retired"
# The archive for the folder of a checkpoint, beside it.
_BESIDE: Final = ".checkpoint*.tar"
# The number of a checkpoint in the names that trainers give: "checkpoint-100", "checkpoint_3".
_NUMBER: Final = re.compile(r"checkpoint[-_](\d+)")


def name_latest(file: Path, name: str) -> None:
    """Have a framework's file name a durable checkpoint, durably and at once. Leftovers of killed writers go."""
    LocalStorage(file.parent).replace(file.name, name.encode())
    with suppress(OSError):  # it is named
        scratches.sweep(file.parent, file.name)


class FolderHold:
    """A folder that no other trainer may write to, in this process or another one, while the `with` block runs."""

    def __init__(self, folder: Path, name: str = _LOCK) -> None:
        self._path = folder / name
        self._fd = -1

    def __enter__(self) -> Self:
        disk.make_folder(self._path.parent)
        fd = locks.hold_if_free(self._path)
        if fd is None:
            raise self._taken()
        self._fd = fd
        since = {"host": socket.gethostname(), "pid": os.getpid(), "since": timing.wall_time()}
        os.pwrite(fd, json.dumps(since).encode().ljust(1024), 0)
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # the folder may be gone
            self._path.unlink()
        locks.forget(self._fd)

    def _taken(self) -> RunTakenError:
        facts: dict[str, Any] = {"host": "?", "pid": -1, "since": 0.0}
        with suppress(OSError, ValueError):  # it has just been deleted, or is being written
            facts |= json.loads(locks.read_held(self._path))
        return RunTakenError(
            f"{self._path.parent}: another trainer (process {facts['pid']} on {facts['host']}) writes its checkpoints "
            "there; wait until it ends, or give another folder",
            path=str(self._path.parent),
            **facts,
        )


# What this process holds for owners that share it, by folder. Read and written under _holding.
_held: dict[Path, tuple[FolderHold, set[int]]] = {}
_holding = threading.Lock()


def hold_for(owner: object, folder: Path) -> None:
    """Hold a folder until `let_go` of each owner, or the end of this process. Its owners share the folder.

    Raises RunTakenError if another process holds it.
    """
    folder = Path(os.path.realpath(folder))
    with _holding:
        if folder not in _held:
            _held[folder] = FolderHold(folder).__enter__(), set()
        _held[folder][1].add(id(owner))


def let_go(owner: object | None = None) -> None:
    """Give up the folders that are held for an owner; without one, all of them."""
    with _holding:
        for folder, (hold, owners) in [*_held.items()]:
            owners.discard(id(owner))
            if owner is None or not owners:
                del _held[folder]
                hold.__exit__()


atexit.register(let_go)


@process.in_forked_child
def _hold_nothing() -> None:
    """In a forked child: the folders are the parent's, and the thread that held the lock is not here."""
    global _holding
    _held.clear()
    _holding = threading.Lock()


def retire(newest: Path, limit: int | None, *, keep: str | None = None) -> None:
    """Hide the oldest checkpoints beside the newest one, which is durable, until `limit` are left.

    The newest one stays, and so does that at the path `keep`. None, and less than 1, is no limit.
    """
    if limit is None or limit < 1:
        return
    kept = {newest.absolute()} | (set() if keep is None else {Path(keep).absolute()})
    beside = newest.absolute().parent
    found = [path for name in names_in_order(os.listdir(beside)) if (path := beside / name).is_dir()]
    # A training that was taken back to an earlier step writes smaller numbers later.
    found.sort(key=lambda path: path.stat().st_mtime_ns)
    num_surplus = len(found) - max(limit, len(kept.intersection(found)))
    for folder in [folder for folder in found if folder not in kept][: max(0, num_surplus)]:
        with suppress(FileNotFoundError):  # somebody else has removed it
            os.rename(folder, folder.with_name(f".{folder.name}{_RETIRED}"))


def remove_retired(folder: Path) -> None:
    """Remove the checkpoints below a folder that were retired."""
    for hidden in folder.glob(f".checkpoint*{_RETIRED}"):
        shutil.rmtree(hidden, ignore_errors=True)


def remove_archives(folder: Path) -> None:
    """Remove archives that were, or were to be, taken into the folder of a checkpoint. No save may be under way."""
    for hidden in folder.glob(_BESIDE):
        shutil.rmtree(hidden) if hidden.is_dir() else hidden.unlink()


def archives_among(names: Iterable[str]) -> set[str]:
    """The names of such archives among these."""
    return {*fnmatch.filter(names, _BESIDE)}


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed trainer has left below a folder: files of unfinished saves, and retired checkpoints."""
    remove_retired(folder)
    remove_archives(folder)
    if folder.is_dir():
        scratches.sweep(folder)


def number_of(folder: Path) -> int:
    """The number in the name of a checkpoint's folder; -1 for another name."""
    found = _NUMBER.fullmatch(folder.name)
    return -1 if found is None else int(found[1])


def names_in_order(names: Iterable[str]) -> list[str]:
    """The names of checkpoints among these, by their numbers."""
    return sorted((name for name in names if _NUMBER.fullmatch(name)), key=lambda name: number_of(Path(name)))
