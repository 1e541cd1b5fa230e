"""The folder of a trainer's checkpoints: the lock of its only trainer, and the file that names the newest checkpoint.

In: a folder. Out: a lock on it, and the name in that file. Knows nothing of: the content of a checkpoint, frameworks.
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
    """Write a durable checkpoint's name to a framework's file, atomically. Sweeps leftovers of killed writers."""
    LocalStorage(file.parent).replace(file.name, name.encode())
    with suppress(OSError):  # the name is written already
        scratches.sweep(file.parent, file.name)


def latest_in(folder: places.Anywhere, file: str) -> str | None:
    """The name in a framework's file; None if there is no such file."""
    try:
        return places.storage_at(folder).read(file)[0].decode().strip()
    except FileNotFoundError:
        return None


class FolderHold:
    """A lock on a folder: during the `with` block, no other trainer, in any process, may write to it."""

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
        with suppress(OSError):  # a full disk: the first save may make room, and `_taken` does without these facts
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


# The folders that this process holds, with the ids of their owners. Read and written under _holding.
_held: dict[Path, tuple[FolderHold, set[int]]] = {}
_holding = threading.Lock()


def hold_for(owner: object, folder: Path) -> None:
    """Hold a folder until `let_go` of each of its owners, or the end of this process. Owners share the folder.

    Raises RunTakenError if another process holds it.
    """
    folder = Path(os.path.realpath(folder))
    with _holding:
        if folder not in _held:
            _held[folder] = FolderHold(folder).__enter__(), set()
        _held[folder][1].add(id(owner))


def let_go(owner: object | None = None) -> None:
    """Release the folders that are held for an owner; without an owner, all of them."""
    with _holding:
        for folder, (hold, owners) in [*_held.items()]:
            owners.discard(id(owner))
            if owner is None or not owners:
                del _held[folder]
                hold.__exit__()


atexit.register(let_go)


@process.in_forked_child
def _hold_nothing() -> None:
    """Start anew in a forked child: the parent holds the folders, and the thread that has the lock may be missing."""
    global _holding
    _held.clear()
    _holding = threading.Lock()
