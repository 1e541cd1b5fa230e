"""A simulated remote store on a virtual clock: every request takes its given time, and nothing really waits.

In: latency, requests of simulated ranks. Out: answers; for each rank, how many requests it has made, how many bytes
they moved, and when each was answered. Knows nothing of: the purpose of requests.

The clock is that of an asyncio loop that never sleeps: instead of waiting, it advances its time. The blocking calls of
a rank are made at one moment, one after the other, and their time is waited for afterwards. An object is visible from
the moment at which its put was answered. The computing time of the calls is measured, and added to the virtual time.
"""

from __future__ import annotations

import asyncio
import itertools
import selectors
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from time import thread_time
from typing import Any, Final, NamedTuple, Self, TypeVar

from async_ckpt.core.storage.interface import Reader, Sink, Storage

T = TypeVar("T")

PAGE_NAMES: Final = 1000
# The bytes of an entry of an S3 listing, besides the name.
_LINE_BYTES: Final = 250
# How many requests the library makes at once in `look_all`, `delete` and `existing`.
_IN_FLIGHT: Final = 16


class _Leap(selectors.DefaultSelector):
    """A selector that advances the time instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        self.now += timeout or 0.0
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose time begins at 0, and jumps to the next scheduled call."""

    def __init__(self) -> None:
        self._leap = _Leap()
        super().__init__(self._leap)

    def time(self) -> float:
        return self._leap.now

    def leap_to(self, moment: float) -> None:
        """Advance the time to this moment. Only while the loop does not run."""
        self._leap.now = max(self._leap.now, moment)


class _Object(NamedTuple):
    data: bytes | Callable[[], Reader]
    since: float
    version: str

    @property
    def num_bytes(self) -> int:
        if isinstance(self.data, bytes):
            return len(self.data)
        with self.data() as reader:
            return reader.num_bytes


class Bucket:
    """The objects, by folder and name."""

    def __init__(self) -> None:
        self.folders: dict[str, dict[str, _Object]] = {"": {}}
        self._versions = itertools.count()

    def put(self, path: str, data: bytes | Callable[[], Reader], since: float = 0.0) -> str:
        """Store an object that is visible from the time `since`."""
        folder, _, name = path.rpartition("/")
        made = _Object(data, since, str(next(self._versions)))
        if folder not in self.folders:
            above, _, own = folder.rpartition("/")
            self.folders[folder] = {}
            self.folders.setdefault(above, {})[f"{own}/"] = _Object(b"", since, "")
            if above and above not in self.folders[""]:
                self.folders[""][f"{above}/"] = _Object(b"", since, "")
        self.folders[folder][name] = made
        return made.version

    def at(self, path: str) -> tuple[dict[str, _Object], str]:
        folder, _, name = path.rpartition("/")
        return self.folders.get(folder, {}), name


@dataclass(slots=True)
class Traffic:
    """The requests of one rank."""

    requests: int = 0
    received: int = 0
    sent: int = 0

    def note(self, *, received: int = 0, sent: int = 0) -> None:
        self.requests += 1
        self.received += received
        self.sent += sent


class FarStorage(Storage):
    """A bucket as one rank sees it: a `Storage` over a network."""

    remote = True
    in_order = True

    def __init__(self, bucket: Bucket, latency_seconds: float, now: Callable[[], float] = lambda: 0.0) -> None:
        self.bucket, self.traffic = bucket, Traffic()
        self._latency, self._now = latency_seconds, now
        self._lock = threading.Lock()
        self._owner = threading.get_ident()
        # Of the current call: the seconds of its requests, and the number of its concurrent requests.
        self._taken, self._beside = 0.0, 0
        self.is_calling = False

    async def off_loop(self, fn: Callable[[], T], /) -> T:
        """Make a blocking call, then wait for as long as it takes."""
        self._taken, self._beside, begin = 0.0, 0, thread_time()
        self.is_calling = True
        try:
            return fn()
        finally:
            taken = self._total() + thread_time() - begin
            self._taken, self._beside, self.is_calling = 0.0, 0, False
            await asyncio.sleep(taken)

    @property
    def moment(self) -> float:
        """The time that the current call has reached."""
        return self._now() + self._total()

    def take_until(self, moment: float) -> None:
        """Have the current call wait for something else until this moment."""
        self._taken += max(0.0, moment - self.moment)

    # --- requests ---------------------------------------------------------------------------------------------

    def _ask(self, *, received: int = 0, sent: int = 0) -> float:
        """Make one request. Returns the moment of its answer."""
        with self._lock:
            self.traffic.note(received=received, sent=sent)
            if threading.get_ident() == self._owner:
                self._taken = self._total() + self._latency
                self._beside = 0
            else:  # a thread of a crew, which makes requests concurrently
                self._beside += 1
            return self._now() + self._total()

    def _ask_many(self, count: int) -> None:
        """Make requests that the library makes concurrently."""
        for _ in range(count):
            self.traffic.note()
        self._taken += -(-count // _IN_FLIGHT) * self._latency

    def _total(self) -> float:
        return self._taken + -(-self._beside // _IN_FLIGHT) * self._latency

    def _found(self, path: str) -> _Object | None:
        folder, name = self.bucket.at(path)
        found = folder.get(name)
        return found if found is not None and found.since <= self._now() + self._total() else None

    # --- as a `Storage` ---------------------------------------------------------------------------------------

    def locate(self, path: str) -> str:
        return f"far://bucket/{path}"

    def part_segments(self, num_bytes: int, segment_bytes: int) -> int:  # noqa: ARG002
        return 1

    def create(self, path: str, **_: Any) -> Sink:
        raise NotImplementedError(f"{path}: nobody writes archives here; they are said to be durable")

    def open(self, path: str) -> Reader:
        found = self._found(path)
        if found is None:
            raise FileNotFoundError(path)
        return _FarReader(found, self)

    def read(self, path: str) -> tuple[bytes, str]:
        found = self._found(path)
        if found is None or not isinstance(found.data, bytes):
            self._ask()
            raise FileNotFoundError(path)
        self._ask(received=len(found.data))
        return found.data, found.version

    def exists(self, path: str) -> bool:
        self._ask()
        return self._found(path) is not None

    def put_new(self, path: str, data: bytes) -> None:
        answered = self._ask(sent=len(data))
        folder, name = self.bucket.at(path)
        if name in folder:
            raise FileExistsError(path)
        self.bucket.put(path, data, answered)

    def replace(self, path: str, data: bytes, *, version: str | None = None) -> str:
        answered = self._ask(sent=len(data))
        found = self._found(path)
        if version is not None and (found is None or found.version != version):
            raise FileExistsError(path)
        return self.bucket.put(path, data, answered)

    def move(self, path: str, to: str) -> None:
        self.put_new(to, self.read(path)[0])
        self.delete(path)

    def delete(self, path: str) -> None:
        self._ask()
        folder, name = self.bucket.at(path)
        folder.pop(name, None)

    def delete_many(self, paths: Sequence[str]) -> None:
        self._ask_many(-(-len(paths) // PAGE_NAMES))
        for path in paths:
            folder, name = self.bucket.at(path)
            folder.pop(name, None)

    def delete_all(self, path: str) -> None:
        below = self.sizes(path)
        self._ask_many(-(-len(below) // PAGE_NAMES) + 1)
        for name in below:
            folder, last = self.bucket.at(f"{path}/{name}")
            folder.pop(last, None)
        folder, name = self.bucket.at(path)
        folder.pop(f"{name}/", None)

    def remove_if_empty(self, folder: str) -> bool:  # noqa: ARG002
        return False

    def names(self, folder: str) -> list[str]:
        listed = self.bucket.folders.get(folder, {})
        found = [*listed.items()]
        pages = [found[at : at + PAGE_NAMES] for at in range(0, max(1, len(found)), PAGE_NAMES)]
        return sorted(name.removesuffix("/") for page in pages for name in self._page(folder, page))

    def _page(self, folder: str, listed: Iterable[tuple[str, _Object]]) -> list[str]:
        moment = self._now() + self._total()
        names = [name for name, found in listed if found.since <= moment]
        self._ask(received=sum(map(len, names)) + len(names) * (len(folder) + _LINE_BYTES))
        return names

    def listed(self, folder: str, names: Collection[str]) -> set[str]:
        self._ask_many(-(-len(names) // PAGE_NAMES))
        self.traffic.received += len(names) * (len(folder) + _LINE_BYTES) + sum(map(len, names))
        return {name for name in names if self._found(f"{folder}/{name}") is not None}

    def sizes(self, folder: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for name in self.names(folder):
            listed = self.bucket.folders[folder].get(name)
            if listed is None:  # a folder
                found |= {f"{name}/{below}": n for below, n in self.sizes(f"{folder}/{name}").items()}
            else:
                found[name] = listed.num_bytes
        return found

    def existing(self, paths: Sequence[str]) -> list[str]:
        self._ask_many(len(paths))
        return [path for path in paths if self._found(path) is not None]

    def sweep(
        self,
        folder: str,
        names: list[str],
        *,
        delete: bool = False,  # noqa: ARG002
        decided: bool = False,
        of_ranks: bool = False,  # noqa: ARG002
    ) -> list[str]:
        if decided and names:
            self.names(folder)  # for the ages; nothing is old here
        return []

    def hold(self, path: str) -> Callable[[], None]:  # noqa: ARG002
        return lambda: None

    def is_held(self, path: str) -> bool:  # noqa: ARG002
        return False

    def sweep_uploads(self) -> list[str]:
        return []


class _FarReader:
    """One object, read by ranges."""

    def __init__(self, found: _Object, storage: FarStorage) -> None:
        self._found, self._storage = found, storage
        self.num_bytes = found.num_bytes

    @cached_property
    def _reader(self) -> Reader | None:
        return None if isinstance(self._found.data, bytes) else self._found.data()

    def read_into(self, offset: int, target: memoryview) -> None:
        self._storage._ask(received=len(target))
        if isinstance(self._found.data, bytes):
            target[:] = self._found.data[offset : offset + len(target)]
        else:
            assert self._reader is not None
            self._reader.read_into(offset, target)

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...
