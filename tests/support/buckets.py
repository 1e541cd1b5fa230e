"""Buckets of a test's own, runs in them and in memory, and the way to them through a proxy."""

import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from racing import until
from states import SEGMENT, is_incidental, open_run

import async_ckpt
from async_ckpt import AsyncCheckpointer, Place
from async_ckpt.testing import FaultyProxy
from async_ckpt.testing.servers import Server

# Whole parts: with smaller segments, two of them make one part.
PART = 2 * SEGMENT
ENGINES = ["obstore", "s3fs"]


class Bucket(str):
    """The name of a bucket, which is looked into behind the library's back."""

    def __new__(cls, server: Server) -> Any:
        made = super().__new__(cls, f"bucket-{uuid.uuid4().hex[:12]}")
        made.server = server
        return made

    def url(self, path: str = "") -> str:
        return f"s3://{self}/{path}".rstrip("/")

    def place(self, path: str = "", engine: Any = None, **options: Any) -> Place:
        """The same, with what opens it."""
        return Place(self.url(path), options={**self.server.options, **options}, engine=engine)

    def keys(self) -> list[str]:
        """All objects, but for those that tell which processes have had a run."""
        return [key for key in self.server.keys(self) if not is_incidental(key.rpartition("/")[2])]

    def uploads(self) -> list[str]:
        return self.server.uploads(self)

    def read(self, key: str) -> bytes:
        return self.server.client.get_object(Bucket=self, Key=key)["Body"].read()

    def write(self, keys: list[str], data: bytes = b"x") -> None:
        def put(key: str) -> None:
            self.server.client.put_object(Bucket=self, Key=key, Body=data)

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(put, keys))

    def delete(self, key: str) -> None:
        self.server.client.delete_object(Bucket=self, Key=key)

    def begin_upload(self, key: str) -> None:
        self.server.client.create_multipart_upload(Bucket=self, Key=key)


@dataclass
class RunAt:
    """A run, and what opens it."""

    place: Place

    @property
    def url(self) -> str:
        return self.place.text

    def at(self, path: str) -> Place:
        """What lies below it."""
        return replace(self.place, url=f"{self.url}/{path}".rstrip("/"))

    def run(self, **options: Any) -> AsyncCheckpointer:
        return open_run(self.place, **{"segment_bytes": PART, **options})

    def load(self, path: str = "", **options: Any) -> Any:
        return async_ckpt.load(self.at(path), **options)


class OnServer(RunAt):
    """A run below a prefix of a bucket."""

    def __init__(self, bucket: Bucket, engine: str, **options: Any) -> None:
        super().__init__(bucket.place("runs/a", engine, **options))
        self._bucket = bucket

    def names(self) -> list[str]:
        # One that was tried again is aborted by a thread of its own.
        until(lambda: self._bucket.uploads() == [])
        names = (key.removeprefix("runs/a/") for key in self._bucket.keys())  # noqa: SIM118
        # A background thread may ask for the store's clock by an object of its own at any time.
        return [name for name in names if not is_incidental(name) and not name.startswith(".async_ckpt-probe-")]

    def read(self, name: str) -> bytes:
        return self._bucket.read(f"runs/a/{name}")


class InMemory(RunAt):
    def __init__(self) -> None:
        super().__init__(Place(f"memory://{uuid.uuid4().hex}/runs/a"))
        self._root = self.url.removeprefix("memory:/")

    def names(self) -> list[str]:
        from fsspec.implementations.memory import MemoryFileSystem

        names = (p.removeprefix(f"{self._root}/") for p in MemoryFileSystem.store if p.startswith(self._root))
        return sorted(name for name in names if not is_incidental(name))

    def read(self, name: str) -> bytes:
        from fsspec.implementations.memory import MemoryFileSystem

        return bytes(MemoryFileSystem.store[f"{self._root}/{name}"].getvalue())


def through(proxy: FaultyProxy, bucket: Bucket, **options: Any) -> dict[str, Any]:
    """The options that lead through the proxy."""
    return {**bucket.server.options, "endpoint": proxy.endpoint, **options}


def archive_of(names: list[str], step: int) -> str:
    """The one archive in the folder of a step."""
    (found,) = [name for name in names if f"step_{step:08d}/" in name and name.endswith(".tar")]
    return found


def no_memory_is_lent(ckpt: AsyncCheckpointer) -> None:
    """A request that was broken off lets go of its part a moment later."""
    until(lambda: ", 0 of " in repr(ckpt._saver.pool))
