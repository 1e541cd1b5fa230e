"""A folder of weights that the sidecars of a host share: one pulls at a time, and none while an engine loads.

In: a folder, the name of an engine. Out: turns to pull and to load; a record of the version that the engine has.
Knows nothing of: roots, requests.

A pull holds the lock of the folder exclusively, as every `Subscriber` does. Loads share that lock. A sidecar that waits
to pull holds a second lock, the turnstile, which each load needs to begin, so that successive loads cannot keep the
pull waiting. The system releases the locks of a sidecar that dies, but its engine continues to load. The record of the
dead sidecar shows that, until the time for the load is over, or a new sidecar has had the engine load again.
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
    """The version in the folder, and the identity of its weights: empty if another receiver has written them."""

    version: int
    identity: str


class Record(NamedTuple):
    """The last version that an engine has loaded, or may be loading since `at`, for `seconds`.

    `address` is the host and port of the engine, if it is a server.
    """

    loaded: Held | None = None
    loading: Held | None = None
    at: float = 0.0
    seconds: float = 0.0
    boot: str = ""
    address: tuple[str, int] | None = None

    def is_loading(self) -> bool:
        """Whether the engine may still be loading: within its time, and without a restart of the machine since."""
        is_in_time = self.at <= timing.wall_time() < self.at + self.seconds
        return self.loading is not None and is_in_time and self.boot == boot_id()

    def outlives_its_sidecar(self) -> bool:
        """Whether a server may still be loading for a dead sidecar. False for a `Program`, which inherits the lock."""
        return self.is_loading() and self.address is not None and not nobody_listens(self.address)


class SharedFolder:
    """The folder of one sidecar, used by its thread only. Other sidecars have their own objects.

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
        """Be the only sidecar of this engine in this folder. Raises DestinationBusyError if another process is."""
        with self._files.lock_file(f"{FOLDER}/follow.{self._id}.lock") as fd:
            # An earlier sidecar may be about to end.
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
        """Wait for a turn to pull, while no engine loads. Yields False if `stop()` became true before."""
        with self._files.lock_file(_TURNSTILE) as turnstile, self._files.lock_file(LOCK) as lock:

            def is_free() -> bool:
                if not self._files.try_lock(turnstile, alone=True) or not self._files.try_lock(lock, alone=True):
                    return False
                self._files.unlock(lock)  # the pull itself locks it
                if self._others_load():  # no sidecar has the lock, so these engines load for dead sidecars
                    self._files.unlock(turnstile)  # let restarted sidecars take a turn to load
                    return False
                return True

            yield self._wait(is_free, stop)

    @contextmanager
    def loading(self, stop: Stop) -> Iterator[int | None]:
        """Wait for a turn to load, while no sidecar pulls. Yields the lock's descriptor, or None after `stop()`."""
        with self._files.lock_file(LOCK) as lock:
            with self._files.lock_file(_TURNSTILE) as turnstile:
                may = self._wait(lambda: self._files.try_lock(turnstile, alone=False), stop)
                may = may and self._wait(lambda: self._files.try_lock(lock, alone=False), stop)
            try:
                yield lock if may else None
            finally:
                self._files.unlock(lock)  # also for a program that has inherited it

    def held(self) -> Held | None:
        """The version in the folder; None if there is no complete version, such as after a killed pull."""
        marker = self._notes.marker()
        if marker is None:
            return None
        return Held(marker.version, "" if marker.state is None else marker.state.identity)

    def has(self, version: int, identity: str) -> bool:
        """Whether a pull in the current boot of the machine has brought the folder to this version of a Publisher."""
        marker = self._notes.marker()
        is_it = marker is not None and marker.state is not None and marker.boot == boot_id() != ""
        return is_it and self.held() == Held(version, identity)

    def note(self, record: Record) -> None:
        """Write the record of the engine. It survives this process, but not the machine, because it is not synced."""
        self.record = record._replace(boot=boot_id())
        with disk.translated(self.path):
            os.makedirs(self.path, exist_ok=True)
        fields = self.record._asdict()
        fields["told"] = fields.pop("loaded")  # the name in the file, which earlier versions read
        self._files.replace(f"{FOLDER}/follow.{self._id}.json", json.dumps(fields).encode())

    def note_loading(self, held: Held, seconds: float) -> None:
        """Record that the engine is about to load this version, for at most `seconds`."""
        self.note(Record(None, held, timing.wall_time(), seconds, address=self._address))

    def _others_load(self) -> bool:
        """Whether another engine may be loading for a killed sidecar, which holds no lock, according to the records."""
        with disk.translated(self.path):
            names = os.listdir(self.path / FOLDER)
        others = {match[1] for name in names if (match := _RECORD.fullmatch(name))} - {self._id}
        return any(self._read(other).outlives_its_sidecar() for other in others)

    def _read(self, sidecar: str) -> Record:
        """The record of a sidecar; an empty record if it cannot be read."""
        try:
            fields = json_fields.table(json_fields.parsed(self._files.read(f"{FOLDER}/follow.{sidecar}.json")))
            loaded, loading = (_held(fields[name]) for name in ("told", "loading"))
            address = fields["address"] and json_fields.row(fields["address"], (json_fields.text, json_fields.count))
            at, seconds, boot = (
                json_fields.number(fields["at"]),
                json_fields.number(fields["seconds"]),
                json_fields.text(fields["boot"]),
            )
            return Record(loaded, loading, at, seconds, boot, address or None)
        except (FileNotFoundError, StorageUnavailableError, ValueError, KeyError):
            return Record()

    def _wait(self, is_ready: Callable[[], bool], stop: Stop) -> bool:
        """Wait for other sidecars, whose locks end with their processes. Returns False if `stop()` became true."""
        wait = waits.Wait("", _ENDS)
        while not is_ready():
            if stop():
                return False
            wait.goes_on(lambda: f"another process that pulls into {self.path}, or an engine that loads from it")
            threading.Event().wait(_POLL_SECONDS)
        return True


def _held(value: object) -> Held | None:
    return None if value is None else Held(*json_fields.row(value, (json_fields.count, json_fields.text)))
