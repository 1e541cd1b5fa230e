"""Trees of files: written and read on a disk, in a bucket and in fsspec's memory."""

import random
import uuid
from dataclasses import replace
from pathlib import Path

from async_ckpt import Place
from async_ckpt.testing import FaultyProxy

TREE = {"config.json": b"{}", "empty": b"", "model/00001.bin": b"one", "model/deep/er/x y%ü": b"two"}


class Far:
    """A folder that is on no disk, and what opens it."""

    def __init__(self, place: Place) -> None:
        self.place = place

    @property
    def url(self) -> str:
        return self.place.text

    def at(self, more: str) -> Place:
        """Its URL with this behind it."""
        return replace(self.place, url=self.url + more)


class InBucket(Far):
    """A folder of a bucket, looked into behind the library's back."""

    def __init__(self, server, engine: str) -> None:
        self.server = server
        self.bucket = f"bucket-{uuid.uuid4().hex[:12]}"
        super().__init__(Place(f"s3://{self.bucket}/base/ckpt", options=server.options, engine=engine))
        server.make_bucket(self.bucket)

    def whole(self, path: str = "") -> Place:
        """The bucket, or something in it."""
        return replace(self.place, url=f"s3://{self.bucket}{path}")

    def through(self, proxy: FaultyProxy) -> Place:
        return replace(self.place, options={**self.server.options, "endpoint": proxy.endpoint})

    def write(self, tree: dict[str, bytes]) -> None:
        for path, data in tree.items():
            self.server.client.put_object(Bucket=self.bucket, Key=f"base/{path}", Body=data)

    def tree(self) -> dict[str, bytes]:
        assert self.server.uploads(self.bucket) == []
        get = self.server.client.get_object
        return {
            key.removeprefix("base/"): get(Bucket=self.bucket, Key=key)["Body"].read()
            for key in self.server.keys(self.bucket)
        }


class InMemory(Far):
    def __init__(self) -> None:
        self._root = f"/{uuid.uuid4().hex}/base"
        super().__init__(Place(f"memory:/{self._root}/ckpt"))

    def write(self, tree: dict[str, bytes]) -> None:
        from fsspec.implementations.memory import MemoryFileSystem

        for path, data in tree.items():
            MemoryFileSystem().pipe_file(f"{self._root}/{path}", data)

    def tree(self) -> dict[str, bytes]:
        from fsspec.implementations.memory import MemoryFileSystem

        return {
            path.removeprefix(f"{self._root}/"): bytes(file.getvalue())
            for path, file in sorted(MemoryFileSystem.store.items())
            if path.startswith(self._root)
        }


def write(folder: Path, tree: dict[str, bytes]) -> Path:
    for path, data in tree.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


def read(folder: str | Path) -> dict[str, bytes]:
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def below(name: str, tree: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{name}/{path}": data for path, data in tree.items()}


def random_bytes(num_bytes: int) -> bytes:
    return random.Random(num_bytes).randbytes(num_bytes)
