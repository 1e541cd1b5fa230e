"""`moving.json`: names the mover, the process beside the training that copies the steps of a run to a place.

In: a place; a process that moves steps there. Out: the active mover's announcement. Knows nothing of: how a step is
moved.

The file only avoids double work: two movers of one step write the same archives, and one of them commits the step. A
mover puts the file if there is none, or if the process that wrote it has ended, and rewrites it every ten seconds,
between the pieces that it copies. If the file stays unchanged for a minute, by the reader's clock, its writer counts as
ended or hung; on the same Linux machine, the end of its process is seen at once.
"""

from __future__ import annotations

import math
import os
import socket
import threading
from contextlib import suppress
from typing import Final, NamedTuple

from ...errors import StorageUnavailableError
from ..fields import count, table, text
from ..host.process import has_ended, own_process
from ..storage.interface import Storage
from ..timing import monotonic
from .manifest import seal, unseal

NAME: Final = "moving.json"
_REPEAT_SECONDS: Final = 10.0
_SILENCE_SECONDS: Final = 60.0


class Announcement(NamedTuple):
    """The announcement of a mover: who it is, the step that it moves, and the bytes that it has moved so far."""

    by: str
    step: int | None = None
    num_bytes: int = 0


class Moving:
    """Reads and writes `moving.json` at one place. Methods may be called from any thread."""

    def __init__(self, storage: Storage) -> None:
        self._storage, self._token = storage, os.urandom(8).hex()
        # The step in this process's last announcement, when it was written, and how many there were:
        self._step: int | None = None
        self._announced_at = -math.inf
        self._num_announcements = 0
        self._seen_version, self._seen_at = "", 0.0  # the version of the file read last, and when it was first read
        self._requesting = threading.Lock()  # held during requests by one thread; other threads do not wait for it

    def other(self) -> Announcement | None:
        """The announcement of another process that moves steps to this place; None if there is none."""
        return self._look()[0]

    def announce(self, step: int | None, num_bytes: int) -> Announcement | None:
        """Announce that this process moves `step`, if due. If another process does, return its announcement instead."""
        is_old = monotonic() >= self._announced_at + _REPEAT_SECONDS
        if not (is_old or step != self._step) or not self._requesting.acquire(blocking=False):
            return None
        try:
            other, version = self._look()
            return other or self._put(step, num_bytes, version)
        finally:
            self._requesting.release()

    def leave(self) -> None:
        """Delete this process's announcement, so that no other process waits for it."""
        with suppress(StorageUnavailableError):
            if self._announced_at > -math.inf and self._look()[0] is None:
                self._storage.delete(NAME)
        self._announced_at = -math.inf

    def _put(self, step: int | None, num_bytes: int, version: str | None) -> Announcement | None:
        self._num_announcements += 1
        fields = {"step": step, "num_bytes": num_bytes, "token": self._token, "word": self._num_announcements}
        data = seal(
            {"version": 1, "host": socket.gethostname(), "pid": os.getpid(), "process": own_process(), **fields}
        )
        try:
            if version is None:
                self._storage.put_new(NAME, data)
            else:
                self._storage.replace(NAME, data, version=version)
        except FileExistsError:  # another process was faster
            return self.other()
        self._step, self._announced_at = step, monotonic()
        return None

    def _look(self) -> tuple[Announcement | None, str | None]:
        """The announcement of another process, if that is still at work, and the version of the file."""
        try:
            data, version = self._storage.read(NAME)
        except FileNotFoundError:
            return None, None
        if version != self._seen_version:
            self._seen_version, self._seen_at = version, monotonic()
        try:
            fields = table(unseal(data))
            by = f"process {count(fields['pid'])} on {text(fields['host'])!a:.200}"
            step = None if fields["step"] is None else count(fields["step"])
            other = Announcement(by, step, count(fields["num_bytes"]))
        except (ValueError, KeyError):
            fields, other = {}, Announcement("another process")
        process = str(fields.get("process"))
        is_own = (fields.get("host"), process) == (socket.gethostname(), own_process())
        is_over = fields.get("token") == self._token or is_own or has_ended(process)
        return (None if is_over or monotonic() > self._seen_at + _SILENCE_SECONDS else other), version
