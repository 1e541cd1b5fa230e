"""A folder of weights that the sidecars of a host share: one pulls at a time, and none while an engine loads.

In: a folder, the name of an engine. Out: turns to pull and to load; a record of what the engine was told.
Knows nothing of: roots, requests.

A pull holds the lock of the folder alone, as every `Subscriber` does; a load shares it with other loads. A sidecar that
waits to pull holds a second lock, the turnstile, and no load begins without that: so loads that follow each other
cannot keep it waiting. The system gives locks back when their process dies, but the engine goes on loading: the record
of a dead sidecar says so until the load would have been over, or the sidecar is back and has told the engine again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from ...errors import DestinationBusyError, StorageUnavailableError
from ...plumbing import disk, timing, waits
from ...plumbing import fields as json_fields
from ..confined_files import ConfinedFolder
from ..publishing.folder_notes import FOLDER, LOCK, Notes
from ..publishing.folder_replica import FolderReplica, boot_id
from .web import nobody_listens

_TURNSTILE: Final = f"{FOLDER}/turnstile"
_RECORD: Final = re.compile(r"follow\.([0-9a-f]{16})\.json")
_POLL_SECONDS: Final = 0.05
_CLAIM_SECONDS: Final = 2.0
_ENDS: Final = "SIGTERM ends the sidecar"

Stop = Callable[[], bool]


class Held(NamedTuple):
    """The version in the folder, and the identity of its weights: empty if another receiver has put them there."""

    version: int
    identity: str


class Record(NamedTuple):
    """The last version that an engine has taken; or one that it may be loading, since `at` and for `seconds`.

    `address` is where the engine listens, if it is a server.
    """

    told: Held | None = None
    loading: Held | None = None
    at: float = 0.0
    seconds: float = 0.0
    boot: str = ""
    address: tuple[str, int] | None = None

    def is_loading(self) -> bool:
        """Whether the engine may still be loading: not after its time, nor after a restart of the machine."""
        is_in_time = self.at <= timing.wall_time() < self.at + self.seconds
        return self.loading is not None and is_in_time and self.boot == boot_id()

    def outlives_its_sidecar(self) -> bool:
        """Whether a server may be loading, even if no sidecar lives. A program that is told inherits the lock."""
        return self.is_loading() and self.address is not None and not nobody_listens(self.address)


class SharedFolder:
    """The folder of one sidecar. Used by its thread only; other sidecars have their own.

    Raises NotADirectoryError and FileExistsError for a folder that versions cannot be pulled into.
    """

    def __init__(self, folder: Path, engine: str, address: tuple[str, int] | None = None) -> None:
        self.path = FolderReplica(folder).folder
        self._files = ConfinedFolder(self.path)
        self._notes = Notes(self._files)
        self._engine, self._address = engine, address
        self._id = hashlib.sha256(engine.encode()).hexdigest()[:16]
        self.record = Record()

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Be the only sidecar of this engine here. Raises DestinationBusyError if another process is."""
        with self._files.lock_file(f"{FOLDER}/follow.{self._id}.lock") as fd:
            # The one before may be about to end.
            deadline = timing.TIMEKEEPER.now() + _CLAIM_SECONDS
            if not self._wait(lambda: self._files.try_lock(fd, alone=True), lambda: timing.TIMEKEEPER.now() > deadline):
                raise DestinationBusyError(
                    f"another sidecar follows for {self._engine} with {self.path}; end it, or give another folder",
                    path=str(self.path),
                )
            self.record = self._read(self._id)
            if not self.record.is_loading():
                self.record = self.record._replace(loading=None)
            yield

    @contextmanager
    def pulling(self, stop: Stop) -> Iterator[bool]:
        """A turn to pull, which begins when no engine loads; False if `stop()` has come true before."""
        with self._files.lock_file(_TURNSTILE) as turnstile, self._files.lock_file(LOCK) as lock:

            def is_free() -> bool:
                if not self._files.try_lock(turnstile, alone=True) or not self._files.try_lock(lock, alone=True):
                    return False
                self._files.unlock(lock)  # the pull itself locks it
                if self._others_load():  # nobody has the lock, so these are of dead sidecars
                    self._files.unlock(turnstile)  # let those that are back have their turn
                    return False
                return True

            yield self._wait(is_free, stop)

    @contextmanager
    def loading(self, stop: Stop) -> Iterator[int | None]:
        """A turn to load, during which nobody pulls: the descriptor of the lock. None if `stop()` has come true."""
        with self._files.lock_file(LOCK) as lock:
            with self._files.lock_file(_TURNSTILE) as turnstile:
                may = self._wait(lambda: self._files.try_lock(turnstile, alone=False), stop)
                may = may and self._wait(lambda: self._files.try_lock(lock, alone=False), stop)
            try:
                yield lock if may else None
            finally:
                self._files.unlock(lock)  # also of a program that has inherited it

    def held(self) -> Held | None:
        """The version in the folder; None if there is none, such as after a pull that was killed."""
        marker = self._notes.marker()
        if marker is None:
            return None
        return Held(marker.version, "" if marker.state is None else marker.state.identity)

    def has(self, version: int, identity: str) -> bool:
        """Whether a pull since the machine's start has brought the folder to this version of a Publisher."""
        marker = self._notes.marker()
        is_it = marker is not None and marker.state is not None and marker.boot == boot_id() != ""
        return is_it and self.held() == Held(version, identity)

    def note(self, record: Record) -> None:
        """Record what the engine has been told. It survives this process, not the machine: nothing is synced."""
        self.record = record._replace(boot=boot_id())
        with disk.translated(self.path):
            os.makedirs(self.path, exist_ok=True)
        self._files.replace(f"{FOLDER}/follow.{self._id}.json", json.dumps(self.record._asdict()).encode())

    def note_loading(self, held: Held, seconds: float) -> None:
        """Record that the engine is about to load this version, which may take so many seconds."""
        self.note(Record(None, held, timing.wall_time(), seconds, address=self._address))

    def _others_load(self) -> bool:
        """Whether another engine may be loading, by the records: its sidecar may have been killed, and hold no lock."""
        with disk.translated(self.path):
            names = os.listdir(self.path / FOLDER)
        others = {match[1] for name in names if (match := _RECORD.fullmatch(name))} - {self._id}
        return any(self._read(other).outlives_its_sidecar() for other in others)

    def _read(self, sidecar: str) -> Record:
        """The record of a sidecar; an empty one if it cannot be read."""
        try:
            fields = json_fields.table(json_fields.parsed(self._files.read(f"{FOLDER}/follow.{sidecar}.json")))
            told, loading = (_held(fields[name]) for name in ("told", "loading"))
            address = fields["address"] and json_fields.row(fields["address"], (json_fields.text, json_fields.count))
            at, seconds, boot = (
                json_fields.number(fields["at"]),
                json_fields.number(fields["seconds"]),
                json_fields.text(fields["boot"]),
            )
            return Record(told, loading, at, seconds, boot, address or None)
        except (FileNotFoundError, StorageUnavailableError, ValueError, KeyError):
            return Record()

    def _wait(self, is_ready: Callable[[], bool], stop: Stop) -> bool:
        """Wait for other sidecars, whose locks go with them. False if `stop()` has come true before."""
        wait = waits.Wait("", _ENDS)
        while not is_ready():
            if stop():
                return False
            wait.goes_on(lambda: f"another process that pulls into {self.path}, or an engine that loads from it")
            threading.Event().wait(_POLL_SECONDS)
        return True


def _held(value: object) -> Held | None:
    return None if value is None else Held(*json_fields.row(value, (json_fields.count, json_fields.text)))
