"""Many objects copied at once: whole or not at all, in a few segments of memory, and never waiting for each other."""

import random
import threading
import uuid
from functools import partial

import pytest
from states import MIB

from async_ckpt.core.storage.bulk import Parcel, copy, delete
from async_ckpt.core.storage.local import LocalStorage
from async_ckpt.errors import CorruptCheckpointError, StorageUnavailableError
from async_ckpt.stores.fsspec.store import FsspecStorage
from async_ckpt.stores.s3.store import ObjectStorage

SEGMENT = 8 * MIB
NUM_SEGMENTS = 16
SIZES = [0, 1, 4096, SEGMENT - 1, SEGMENT, SEGMENT + 1, 3 * SEGMENT + 5]


@pytest.fixture
def local(tmp_path):
    return LocalStorage(tmp_path / "here")


@pytest.fixture(params=["local", "memory", "obstore", "s3fs"])
def place(request, tmp_path):
    """An empty storage of each kind."""
    if request.param == "local":
        return LocalStorage(tmp_path / "there")
    if request.param == "memory":
        return FsspecStorage(f"memory://{uuid.uuid4().hex}")
    server = request.getfixturevalue("s3")
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    server.make_bucket(bucket)
    kind = ObjectStorage if request.param == "obstore" else FsspecStorage
    return kind(f"s3://{bucket}/run", server.options)


@pytest.fixture
def memory():
    return FsspecStorage(f"memory://{uuid.uuid4().hex}")


def write(storage: LocalStorage, sizes: list[int]) -> dict[str, bytes]:
    tree = {f"folder/{number}": random.Random(size).randbytes(size) for number, size in enumerate(sizes)}
    (storage.root / "folder").mkdir(parents=True, exist_ok=True)
    for path, data in tree.items():
        (storage.root / path).write_bytes(data)
    return tree


def parcels(storage, sizes=None, **options) -> list[Parcel]:
    sizes = storage.sizes("") if sizes is None else sizes
    return [Parcel(partial(storage.open, path), path, size, **options) for path, size in sizes.items()]


def content(storage) -> dict[str, bytes]:
    return {path: storage.read(path)[0] for path in storage.sizes("")}


class Patient:
    """A reader that gives its first segment only when all memory is taken by those behind it."""

    num_bytes = (NUM_SEGMENTS + 4) * SEGMENT

    def __init__(self) -> None:
        self._num_read = threading.Semaphore(0)

    def read_into(self, offset: int, target: memoryview) -> None:
        if offset:
            target[0] = offset // SEGMENT
            self._num_read.release()
            return
        for _ in range(NUM_SEGMENTS - 1):
            assert self._num_read.acquire(timeout=60)

    def close(self) -> None:
        pass


def test_objects_of_any_size_arrive_as_they_were_there_and_back(local, place, tmp_path):
    tree = write(local, SIZES)
    copy(parcels(local), place)
    assert place.sizes("") == {path: len(data) for path, data in tree.items()}
    back = LocalStorage(tmp_path / "back")
    copy(parcels(place), back)
    assert content(back) == tree


def test_a_segment_that_comes_last_has_its_memory_before_those_behind_it(memory):
    source = Patient()
    copy([Parcel(lambda: source, "x", source.num_bytes)], memory)
    with memory.open("x") as reader:
        assert reader.num_bytes == source.num_bytes
        first = bytearray(1)
        for number in range(NUM_SEGMENTS + 4):
            reader.read_into(number * SEGMENT, memoryview(first))
            assert first[0] == number


@pytest.mark.parametrize("told", [SEGMENT + 1, 3 * SEGMENT])
def test_a_source_that_changes_meanwhile_is_told_of_and_not_copied(local, place, told):
    write(local, [2 * SEGMENT])
    with pytest.raises(StorageUnavailableError, match="source changed during the copy"):
        copy(parcels(local, {"folder/0": told}), place)
    assert content(place) == {}


def test_a_source_that_gets_shorter_while_it_is_read_is_told_of(local, place):
    write(local, [3 * SEGMENT])

    def shorten(offset: int, data: memoryview) -> None:
        with open(local.root / "folder/0", "r+b") as file:
            file.truncate(1)

    with pytest.raises(StorageUnavailableError, match="source changed during the copy"):
        copy(parcels(local, verify=shorten), place, background=True)
    assert content(place) == {}


def test_what_is_not_right_is_not_copied(local, place):
    write(local, [SEGMENT, 3 * SEGMENT])

    def verify(offset: int, data: memoryview) -> None:
        if offset == 2 * SEGMENT:
            raise CorruptCheckpointError("not right", path="x")

    with pytest.raises(CorruptCheckpointError, match="not right"):
        copy(parcels(local, verify=verify), place)
    assert "folder/1" not in place.sizes("")


def test_a_missing_source_ends_it_without_waiting_for_memory(local, place):
    write(local, [2 * SEGMENT] * 2)
    sizes = {"folder/0": 2 * SEGMENT, "folder/missing": 40 * SEGMENT, "folder/1": 2 * SEGMENT}
    with pytest.raises(FileNotFoundError, match="missing"):
        copy(parcels(local, sizes), place)
    assert "folder/missing" not in place.sizes("")


def test_a_check_that_raises_ends_it(local, place):
    write(local, [2 * SEGMENT])
    calls = []

    def check() -> None:
        calls.append(None)
        if len(calls) == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        copy(parcels(local), place, check=check)
    assert content(place) == {}


def test_who_asks_for_it_closes_the_sinks_of_what_is_there(local, tmp_path):
    tree = write(local, SIZES)
    there = LocalStorage(tmp_path / "there")
    sinks = []
    copy(parcels(local), there, finished=sinks.append)
    assert len(sinks) == len(SIZES) - 1  # what is empty is there at once
    assert content(there) == tree
    assert there.sweep("folder", there.names("folder"), decided=True) == ["0"]
    for sink in sinks:
        sink.close()


def test_objects_are_deleted_and_those_that_are_gone_are_no_error(place):
    for number in range(30):
        place.replace(f"folder/{number}", b"1")
    delete(place, [f"folder/{number}" for number in range(1, 40)])
    assert content(place) == {"folder/0": b"1"}
    delete(place, [])
