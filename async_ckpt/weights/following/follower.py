"""`follow`: keep a folder and an engine at the newest version of a root.

In: a root with versions, a folder, an engine. Out: an engine that has the newest of them. Knows nothing of: HTTP.

The sidecar has the engine load each version in the folder. A success counts only if the engine then reports that
version. After an error or a timeout it may have any weights, so the newest version is loaded, after growing pauses.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Final

from ...errors import CheckpointError, StorageUnavailableError
from ...plumbing import places, spec, waits
from ...plumbing import timing as clock
from ..publishing.subscriber import Subscriber
from .health import Event, Health, LogEvent
from .rollout_engines import Engine, Loading, engine_of
from .shared_folder import Held, Record, SharedFolder, Stop
from .web import EngineError

# The time between two checks which version the engine has, since it may have been started again.
_CHECK_SECONDS: Final = 10.0
# The longest time between two attempts that fail.
_MAX_RETRY_SECONDS: Final = 30.0
PATIENCE_SECONDS: Final = 1800.0

_log: Final = logging.getLogger("async_ckpt")


def follow(
    root: places.Anywhere | Subscriber,
    into: str | os.PathLike[str],
    engine: Engine | Callable[[Path, int], object] | None = None,
    *,
    once: bool = False,
    status: str | os.PathLike[str] | None = None,
    poll_seconds: float = 1.0,
    patience_seconds: float = PATIENCE_SECONDS,
    stop: Stop | None = None,
) -> int | None:
    """Pull each new version into a folder and have an engine load it, until `stop()` is true.

        from async_ckpt.following import SGLang

        async_ckpt.follow("s3://bucket/weights", "/dev/shm/model", SGLang("http://127.0.0.1:30000"))

    The version that the engine has loaded is recorded in the folder, so a restarted sidecar does not notify the engine
    again. Several sidecars of a host may share a folder, each for its own engine: none pulls while an engine loads.
    Events are sent to the logger `async_ckpt`.

    Args:
        root: where the versions are, as for a `Subscriber`; or a `Subscriber`, which stays open.
        into: a folder on this machine, as for `Subscriber.pull`.
        engine: a `SGLang`, `VLLM`, `Post` or `Program` of `async_ckpt.following`, or a function that gets the folder
            and the version, and returns when they are loaded. Without an engine, the folder is only kept up to date.
        once: end when the engine has loaded the newest version.
        status: a JSON file that is rewritten at each poll of the root, and before a pull or a load: the version that
            the engine has, its age, the newest version, the running operation, and errors.
        poll_seconds: the time between two polls of the root.
        patience_seconds: how long the root may have no version or be unreachable.
        stop: a function that returns whether to end. It is called five times a second, between versions.

    Returns the last version that the engine has loaded.

    Raises StorageUnavailableError if the root was unreachable or without versions for longer than `patience_seconds`;
    DestinationBusyError if another sidecar uses this folder for this engine; ValueError if the folder and the root are
    inside each other; FileExistsError and NotADirectoryError for a folder that versions cannot be pulled into; OSError
    if the status file cannot be written at the beginning. After any other error, the sidecar reports it and retries.
    """
    subscriber = root if isinstance(root, Subscriber) else Subscriber(root)
    try:
        sidecar = Sidecar(
            subscriber,
            into,
            engine_of(engine),
            _log_event,
            status=status,
            poll_seconds=poll_seconds,
            patience_seconds=patience_seconds,
            stop=stop or (lambda: False),
        )
        return sidecar.run(once=once)
    finally:
        if subscriber is not root:
            subscriber.close()


def _apart_from(root: str, folder: Path) -> Path:
    """The folder. Raises ValueError if it is inside the root, or the root inside it."""
    if places.place_of(root).is_local:
        real, of_root = Path(os.path.realpath(folder)), Path(os.path.realpath(places.local_place(root)))
        if real.is_relative_to(of_root) or of_root.is_relative_to(real):
            raise ValueError(f"{folder} and the root {of_root} lie inside each other; pull into a folder elsewhere")
    return folder


def _log_event(event: Event) -> None:
    _log.log(logging.WARNING if event.is_bad else logging.INFO, "%s", event.line)


class _Retries:
    """When to retry after a failure: at once for another subject, after growing pauses for the same subject."""

    def __init__(self) -> None:
        self._subject: Hashable = None
        self._num_failures, self._at = 0, 0.0

    def is_due(self, subject: Hashable) -> bool:
        return subject != self._subject or clock.TIMEKEEPER.now() >= self._at

    def failed(self, subject: Hashable) -> None:
        self._num_failures = self._num_failures + 1 if subject == self._subject else 1
        self._subject = subject
        self._at = clock.TIMEKEEPER.now() + min(2.0 ** (self._num_failures - 1), _MAX_RETRY_SECONDS)

    def succeeded(self) -> None:
        self._subject, self._num_failures = None, 0


class Sidecar:
    """One sidecar, run by one thread. Reports events to `log`. Raises the errors of `follow` for wrong arguments."""

    def __init__(
        self,
        subscriber: Subscriber,
        into: str | os.PathLike[str],
        engine: Engine,
        log: LogEvent,
        *,
        status: str | os.PathLike[str] | None,
        poll_seconds: float,
        patience_seconds: float,
        stop: Stop,
    ) -> None:
        self._poll_seconds = spec.seconds_above_0("poll_seconds", poll_seconds)
        self._patience_seconds = spec.seconds_above_0("patience_seconds", patience_seconds)
        self._stop = stop
        path = _apart_from(subscriber.root, places.local_place(into).absolute())
        self._subscriber, self._engine = subscriber, engine
        self._folder = SharedFolder(path, engine.name, engine.address)
        facts = {"root": subscriber.root, "folder": str(self._folder.path), "engine": engine.name, "pid": os.getpid()}
        self._health = Health(facts, None if status is None else places.local_place(status).absolute(), log)
        self._seen_at = clock.TIMEKEEPER.now()  # when the root had a version, or the start of this sidecar
        self._pulled: tuple[int, str] | None = None  # the version at the root that the folder was brought to
        self._held: Held | None = None  # the version that the folder had after that pull
        self._pulls, self._loads = _Retries(), _Retries()
        self._next_check = self._seen_at

    def run(self, *, once: bool) -> int | None:
        """Follow until the end, and return the last version that the engine has loaded. Raises as `follow` does."""
        with self._folder.claimed():
            loaded = self._folder.record.loaded
            self._health.has(None if loaded is None else loaded.version)
            while not self._stop():
                is_current = self._round()
                self._health.beat()
                if once and is_current:
                    break
                self._sleep(self._poll_seconds)
        self._health.ended()
        loaded = self._folder.record.loaded
        return None if loaded is None else loaded.version

    def _round(self) -> bool:
        """Poll the root, then pull and load if that is due. Returns whether the engine has the newest version."""
        newest = self._newest()
        # The engine may still be loading for a killed sidecar. It answers a repeated request after that load.
        is_loading = self._folder.record.loading is not None
        wanted = None if is_loading or newest == self._pulled else newest
        if wanted is not None and not self._found(wanted) and self._pulls.is_due(wanted):
            self._pull(wanted)
        if not is_loading:
            self._check()
        held = self._held
        is_news = held not in (None, self._folder.record.loaded) and self._loads.is_due(held)
        if is_loading or (is_news and self._answers(held)):
            self._load()
        return newest is not None and newest == self._pulled and self._held == self._folder.record.loaded

    def _newest(self) -> tuple[int, str] | None:
        """The newest version at the root, or None. Raises StorageUnavailableError after `patience_seconds` without."""
        newest, error = None, None
        try:
            newest = self._subscriber.newest()
        except (CheckpointError, OSError) as failure:
            error = failure
            self._health.failed("root", error)
        else:
            self._health.works("root")
        self._health.sees(newest and newest[0])
        if newest is not None:
            self._seen_at = clock.TIMEKEEPER.now()
        elif clock.TIMEKEEPER.now() > self._seen_at + self._patience_seconds:
            reason = "there is no version" if error is None else f"{error}"
            root = self._subscriber.root
            raise StorageUnavailableError(
                f"{root}: {reason}, for more than {self._patience_seconds:g} s; "
                "check the root, or start again when it is reachable",
                path=root,
            ) from error
        return newest

    def _found(self, newest: tuple[int, str]) -> bool:
        """Whether another sidecar has brought the folder to this version. If so, no pull is needed."""
        if not self._folder.has(*newest):
            return False
        self._pulled, self._held = newest, Held(*newest)
        return True

    def _pull(self, wanted: tuple[int, str]) -> None:
        """Bring the folder to the newest version while no engine loads from it."""
        newest = None
        try:
            # Another sidecar may be pulling this version, whose engine then loads it.
            with self._folder.pulling(lambda: self._stop() or self._found(wanted)) as may:
                newest = self._subscriber.newest() if may else None  # again, since the wait may have been long
                if newest is None:
                    return
                with self._health.doing("pull", newest[0]):
                    report = self._subscriber.pull(self._folder.path, newest[0])
            self._pulled, self._held = newest, self._folder.held()
        except (CheckpointError, OSError, MemoryError) as error:
            self._health.failed("pull", error)
            self._pulls.failed(newest)
        else:
            self._health.works("pull")
            self._health.pulled(report)
            self._pulls.succeeded()
        finally:
            self._seen_at = clock.TIMEKEEPER.now()

    def _load(self) -> None:
        """Have the engine load the version in the folder, and record the result."""
        with self._folder.loading(self._stop) as lock:
            if lock is None:
                return
            held = self._folder.held()
            if held is None:  # a pull was killed
                self._pulled = self._held = None
                self._note(Record())
                return
            self._held, begin = held, clock.TIMEKEEPER.now()
            try:
                self._folder.note_loading(held, self._engine.answer_seconds)
                with self._health.doing("load", held.version):
                    self._request(Loading(self._folder.path, held.version, lock), begin + self._engine.answer_seconds)
            except (EngineError, CheckpointError, OSError) as error:
                self._note(Record())
                self._fail(held, error)
            else:
                self._note(Record(held))
                self._health.works("engine")
                self._health.loaded(held.version, clock.TIMEKEEPER.now() - begin)
                self._loads.succeeded()
                self._next_check = clock.TIMEKEEPER.now() + _CHECK_SECONDS
        self._seen_at = clock.TIMEKEEPER.now()

    def _answers(self, subject: Held | None) -> bool:
        """Whether the engine answers. Called before the folder is locked for a load."""
        try:
            self._engine.version()
        except EngineError as error:
            self._fail(subject, error)
            return False
        return True

    def _request(self, loading: Loading, deadline: float) -> None:
        """Have the engine load a version. Raises EngineError if it fails, or reports another version afterwards."""
        self._engine.take(loading, deadline)
        reported = self._engine.version()
        if reported not in (None, str(loading.version)):
            raise EngineError(
                f"{self._engine.name} answered that it has loaded version {loading.version}, but says that it has "
                f"{reported!r:.100}"
            )

    def _fail(self, held: Held | None, error: Exception) -> None:
        self._health.has(None)
        self._health.failed("engine", error)
        self._loads.failed(held)

    def _note(self, record: Record) -> None:
        """Record the version that the engine has. If that fails, a later sidecar has the engine load it again."""
        try:
            self._folder.note(record)
            self._health.works("record")
        except (CheckpointError, OSError) as error:
            self._health.failed("record", error)

    def _check(self) -> None:
        """Check every 10 s that the engine still has the version that it has loaded."""
        loaded = self._folder.record.loaded
        if loaded is None or clock.TIMEKEEPER.now() < self._next_check:
            return
        self._next_check = clock.TIMEKEEPER.now() + _CHECK_SECONDS
        try:
            reported = self._engine.version()
        except EngineError as error:
            self._health.failed("engine", error)
            return
        self._health.works("engine")
        if reported not in (None, str(loaded.version)):
            self._health.lost(loaded.version, reported)
            self._note(Record())

    def _sleep(self, seconds: float) -> None:
        deadline = clock.TIMEKEEPER.now() + seconds
        while (left := deadline - clock.TIMEKEEPER.now()) > 0 and not self._stop():
            threading.Event().wait(min(left, waits.LIVENESS_SECONDS))
