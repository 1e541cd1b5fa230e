"""A disk that stops, or fails, at named points."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

from racing import PATIENCE

from async_ckpt import AsyncCheckpointer
from async_ckpt.core.host.threads import running_future
from async_ckpt.core.storage.local import LocalSink, LocalStorage


class Stop:
    """A point of the script: whoever comes by waits there for the test, or fails."""

    def __init__(self, call: str, path: str, *, error: BaseException | None = None, times: int | None = None):
        self.call, self.path = call, path
        self._error, self._times = error, times
        self._reached = threading.Event()
        self._released = threading.Event()
        if error is not None:
            self._released.set()

    def wait_reached(self) -> None:
        assert self._reached.wait(PATIENCE), f"nobody came to {self.call} {self.path}"

    @property
    def reached(self) -> bool:
        return self._reached.is_set()

    def end(self) -> None:
        """From now on nothing meets it."""
        self._times = 0

    def release(self, error: BaseException | None = None) -> None:
        self._error = error
        self._released.set()

    def takes(self, call: str, path: str) -> bool:
        """Whether this call stops here. Once used up, it lets everything pass."""
        if call != self.call or self.path not in path or self._times == 0:
            return False
        if self._times is not None:
            self._times -= 1
        return True

    def meet(self) -> None:
        self._reached.set()
        assert self._released.wait(PATIENCE), f"the test left {self.call} {self.path} waiting"
        if self._error is not None:
            raise self._error


class ScriptedStorage(LocalStorage):
    """The local disk, with stops before the calls that a test names. Leaving the block lets everyone go."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__(root)
        self.calls: list[tuple[str, str]] = []
        self.sinks: list[ScriptedSink] = []
        self._stops: list[Stop] = []
        self._lock = threading.Lock()

    def stop(self, call: str, path: str = "", *, times: int | None = None) -> Stop:
        """Hold the calls of this name whose path contains `path`."""
        self._stops.append(Stop(call, path, times=times))
        return self._stops[-1]

    def fail(self, call: str, path: str = "", *, error: BaseException, times: int | None = 1) -> Stop:
        """Fail such calls instead: the first `times`, or all."""
        self._stops.append(Stop(call, path, error=error, times=times))
        return self._stops[-1]

    def release_all(self) -> None:
        for stop in self._stops:
            if not stop._released.is_set():
                stop.release()

    def __enter__(self) -> ScriptedStorage:
        return self

    def __exit__(self, *_: object) -> None:
        self.release_all()

    def pass_by(self, call: str, path: str) -> None:
        with self._lock:
            self.calls.append((call, path))
            stops = [stop for stop in self._stops if stop.takes(call, path)]
        for stop in stops:
            stop.meet()

    def create(self, path: str, *, num_bytes: int, **sizes: Any) -> Any:
        self.pass_by("create", path)
        self.sinks.append(ScriptedSink(self, path, super().create(path, num_bytes=num_bytes, **sizes)))
        return self.sinks[-1]

    def read(self, path: str) -> tuple[bytes, str]:
        self.pass_by("read", path)
        return super().read(path)

    def open(self, path: str) -> Any:
        self.pass_by("open", path)
        return super().open(path)

    def put_new(self, path: str, data: bytes) -> None:
        self.pass_by("put_new", path)
        super().put_new(path, data)

    def replace(self, path: str, data: bytes, *, version: str | None = None) -> str | None:
        self.pass_by("replace", path)
        return super().replace(path, data, version=version)

    def move(self, path: str, to: str) -> None:
        self.pass_by("move", path)
        super().move(path, to)

    def delete_many(self, paths: Sequence[str]) -> None:  # which `delete` calls, too
        for path in paths:
            self.pass_by("delete", path)
        super().delete_many(paths)

    def delete_all(self, path: str) -> None:
        self.pass_by("delete_all", path)
        super().delete_all(path)


class ScriptedSink:
    """One file of a scripted disk."""

    num_retries = 0
    retryable = False

    def __init__(self, storage: ScriptedStorage, path: str, sink: LocalSink) -> None:
        self._storage, self._path, self._sink = storage, path, sink
        self.failed = running_future()

    def write(self, offset: int, data: memoryview, lease: Any = None) -> None:
        self._storage.pass_by("write", self._path)
        self._sink.write(offset, data, lease)

    @property
    def num_bytes(self) -> int:
        return self._sink.num_bytes

    def finish(self, num_bytes: int | None = None) -> None:
        self._storage.pass_by("finish", self._path)
        self._sink.finish(num_bytes)

    def abort(self) -> None:
        self._storage.pass_by("abort", self._path)
        self._sink.abort()

    def close(self) -> None:
        self._storage.pass_by("close", self._path)
        self._sink.close()

    def give_up(self) -> None:
        self._sink.give_up()

    def relieve(self) -> bool:
        return self._sink.relieve()


def scripted(ckpt: AsyncCheckpointer, number: int = 0) -> ScriptedStorage:
    """Put a root of a checkpointer on a scripted disk. The one place in the tests that reaches into its parts."""
    disk = ScriptedStorage(ckpt.roots[number])
    ckpt._roots.runs[number].root.storage = disk
    return disk
