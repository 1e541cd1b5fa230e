"""The folder in which a trainer's checkpoints lie: one trainer at a time, and the file that names the newest one.

In: a folder. Out: a hold on it, and what that file names. Knows nothing of: the contents of a checkpoint, and
frameworks.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

from ...errors import RunTakenError
from ...plumbing import LocalStorage, disk, locks, places, process, scratches, timing

_LOCK: Final = ".async_ckpt.lock"


def name_latest(file: Path, name: str) -> None:
    """Have a framework's file name a durable checkpoint, durably and at once. Leftovers of killed writers go."""
    LocalStorage(file.parent).replace(file.name, name.encode())
    with suppress(OSError):  # it is named
        scratches.sweep(file.parent, file.name)


def latest_in(folder: places.Anywhere, file: str) -> str | None:
    """The name in a framework's file; None if there is no such file."""
    try:
        return places.storage_at(folder).read(file)[0].decode().strip()
    except FileNotFoundError:
        return None


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
