"""`moving.json`: which process, beside the training, brings the steps of a run to a place.

In: a place; a process that moves steps there. Out: the word of the one that does. Knows nothing of: how a step is
moved.

The file saves work, and nothing else depends on it: two processes that move one step write the same archives, and one
of them commits it. A process puts the file if there is none, or in the place of one whose process has ended, and
repeats it every ten seconds, between the pieces that it copies. Where the same file lies for a minute, by the clock of
who looks, its process has ended, or hangs; on the same machine, Linux tells it at once.
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


class Told(NamedTuple):
    """The word of a process: who it is, the step that it is moving, and the bytes that it has moved so far."""

    by: str
    step: int | None = None
    num_bytes: int = 0


class Moving:
    """The word of this process and of others on who moves steps to a place. From any thread."""

    def __init__(self, storage: Storage) -> None:
        self._storage, self._token = storage, os.urandom(8).hex()
        self._step: int | None = None  # of the last word, like the next
        self._said_at = -math.inf
        self._num_words = 0
        self._heard, self._heard_at = "", 0.0  # the version that was read last, and when it was read first
        self._speaking = threading.Lock()  # held over requests by one thread; no other waits for it

    def other(self) -> Told | None:
        """The word of another process that moves steps there; None if there is none."""
        return self._look()[0]

    def say(self, step: int | None, num_bytes: int) -> Told | None:
        """Say that this process moves there, if that is news or was said long ago. If another one does, return its
        word instead.
        """
        is_old = monotonic() >= self._said_at + _REPEAT_SECONDS
        if not (is_old or step != self._step) or not self._speaking.acquire(blocking=False):
            return None
        try:
            told, version = self._look()
            return told or self._put(step, num_bytes, version)
        finally:
            self._speaking.release()

    def leave(self) -> None:
        """Take back the word of this process, so that no other waits for it."""
        with suppress(StorageUnavailableError):
            if self._said_at > -math.inf and self._look()[0] is None:
                self._storage.delete(NAME)
        self._said_at = -math.inf

    def _put(self, step: int | None, num_bytes: int, version: str | None) -> Told | None:
        self._num_words += 1
        fields = {"step": step, "num_bytes": num_bytes, "token": self._token, "word": self._num_words}
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
        self._step, self._said_at = step, monotonic()
        return None

    def _look(self) -> tuple[Told | None, str | None]:
        """The word of another process that goes on, and the version of the file."""
        try:
            data, version = self._storage.read(NAME)
        except FileNotFoundError:
            return None, None
        if version != self._heard:
            self._heard, self._heard_at = version, monotonic()
        try:
            fields = table(unseal(data))
            by = f"process {count(fields['pid'])} on {text(fields['host'])!a:.200}"
            step = None if fields["step"] is None else count(fields["step"])
            told = Told(by, step, count(fields["num_bytes"]))
        except (ValueError, KeyError):
            fields, told = {}, Told("another process")
        process = str(fields.get("process"))
        is_own = (fields.get("host"), process) == (socket.gethostname(), own_process())
        is_over = fields.get("token") == self._token or is_own or has_ended(process)
        return (None if is_over or monotonic() > self._heard_at + _SILENCE_SECONDS else told), version
