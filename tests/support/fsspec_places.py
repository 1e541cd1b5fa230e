"""Places that fsspec reaches: a memory, a folder, a bucket."""

import itertools

import s3fs
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from loans import Loan
from states import MIB

from async_ckpt.stores.fsspec.store import FsspecStorage

KINDS = ("memory", "local", "folder", "s3fs", "s3fs object")
SEGMENT = 5 * MIB
NUMBERS = itertools.count()


def storage_for(request, tmp_path):
    """The storage of a kind that a fixture is asked for."""
    if request.param == "memory":
        return FsspecStorage(f"memory://root-{next(NUMBERS)}")
    if request.param == "local":
        return FsspecStorage(str(tmp_path / "root"), fs=LocalFileSystem())
    if request.param == "folder":  # real folders, and a filesystem that can do nothing but what all can
        (tmp_path / "root").mkdir()
        return FsspecStorage("run", fs=DirFileSystem(str(tmp_path / "root"), LocalFileSystem()))
    server, name = request.getfixturevalue("s3"), request.getfixturevalue("bucket")
    if request.param == "s3fs":
        return FsspecStorage(f"s3://{name}/run", server.options)
    return FsspecStorage(f"{name}/run", fs=s3fs_of(server))


def s3fs_of(server):
    return s3fs.S3FileSystem(
        key=server.options["access_key_id"],
        secret=server.options["secret_access_key"],
        endpoint_url=server.endpoint,
        skip_instance_cache=True,
    )


def cut(data: bytes, segment_bytes: int = SEGMENT):
    offsets = range(0, len(data), segment_bytes)
    return [(offset, Loan(data[offset : offset + segment_bytes])) for offset in offsets]


def write(sink, offset, lease) -> None:
    try:
        sink.write(offset, lease.view, lease)
    finally:
        lease.release()


def save(storage, path: str, data: bytes, segment_bytes: int = SEGMENT) -> None:
    sink = storage.create(path, num_bytes=len(data), segment_bytes=segment_bytes)
    for offset, lease in cut(data, segment_bytes):
        write(sink, offset, lease)
        assert not storage.exists(path)
    sink.finish()
    sink.close()


def place_of(storage):
    return storage._place


def keeps_folders(storage):
    """Whether it is behind a filesystem of which nobody knows if its `rmdir` spares a folder that is not empty."""
    return isinstance(place_of(storage)._filesystem(), DirFileSystem)
