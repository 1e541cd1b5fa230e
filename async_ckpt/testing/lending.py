"""Memory for the tests of storages, which is overwritten when its last holder releases it.

In: sizes. Out: segments on loan, and objects written from them. Knows nothing of: assertions.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, Final, TypeVar

import pytest

from ..plumbing import Sink, Storage, spec

T = TypeVar("T")

PATIENCE_SECONDS: Final = 60.0  # longer than any test takes; reached only if a test fails
SEGMENT_BYTES: Final = 4 * spec.MIB
NUM_THREADS: Final = 8
SIZES: Final = [
    (4 * spec.MIB, spec.PAGE_BYTES),
    (4 * spec.MIB, 4 * spec.MIB),
    (4 * spec.MIB, 4 * spec.MIB + spec.PAGE_BYTES),
    (4 * spec.MIB, 12 * spec.MIB),
    (4 * spec.MIB, 20 * spec.MIB + 3 * spec.PAGE_BYTES),
    (8 * spec.MIB, 8 * spec.MIB - spec.PAGE_BYTES),
    (8 * spec.MIB, 16 * spec.MIB),
    (8 * spec.MIB, 24 * spec.MIB + 3 * spec.PAGE_BYTES),
]
ODD_NAMES: Final = ["x y", "größe 検", "a+b", "100%", "%2F", "a#b", "a?b=c&d", "~(it's)*!"]


# Names of folders that sort differently with a slash at their end, or in UTF-16.
SORTED_NAMES: Final = [f"step{end}" for end in ("", " 1", "!", "-1", ".1", "0", "1", "10", "é", "検", "😀")]


class Loan:
    """A segment on loan, which counts its holders. LentMemory creates it. Thread-safe."""

    def __init__(self, memory: LentMemory, segment: mmap.mmap) -> None:
        self.view = memoryview(segment)
        self._memory = memory
        self._segment = segment
        self._num_holders = 1

    def retain(self) -> None:
        with self._memory.changed:
            if not self._num_holders:
                self._memory.misuse = "a segment was retained after its release"
            self._num_holders += 1

    def release(self) -> None:
        with self._memory.changed:
            self._num_holders -= 1
            if self._num_holders < 0:
                self._memory.misuse = "a segment was released more often than retained"
            if self._num_holders:
                return
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(self._segment)), 0xEE, len(self._segment))
        with self._memory.changed:
            self._memory.free.append(self._segment)
            self._memory.num_released += 1
            self._memory.changed.notify_all()


class LentMemory:
    """A pool of a few segments. A test creates and owns it. Thread-safe."""

    def __init__(self, num_segments: int = 8, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.segment_bytes = segment_bytes
        self.num_segments = num_segments
        self.changed = threading.Condition()
        self.free = [mmap.mmap(-1, segment_bytes) for _ in range(num_segments)]
        self.num_released = 0
        self.misuse = ""

    def lease(self, relieve: Callable[[], bool] = lambda: False) -> Loan:
        """Wait for a free segment. While none is free, `relieve` asks a holder to release one."""
        with self.changed:
            for _ in range(int(PATIENCE_SECONDS / 0.1)):
                if self.free:
                    return Loan(self, self.free.pop())
                self.changed.release()
                try:
                    relieved = relieve()
                finally:
                    self.changed.acquire()
                if not relieved and not self.free:
                    self.changed.wait(0.1)
        raise AssertionError(f"none of {self.num_segments} segments comes back")

    def assert_all_back(self) -> None:
        assert not self.misuse
        assert len(self.free) == self.num_segments, "segments are still held"


def random_bytes(num_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


def create(storage: Storage, path: str, data: bytes, memory: LentMemory) -> Sink:
    return storage.create(
        path, num_bytes=len(data), segment_bytes=memory.segment_bytes, max_segments=memory.num_segments
    )


def put_archive(storage: Storage, path: str, data: bytes, memory: LentMemory) -> None:
    """Write a whole object as a save does: filled in file order, written by several threads."""
    sink = create(storage, path, data, memory)
    try:
        write(sink, data, memory, order=range(-(-len(data) // memory.segment_bytes)))
        sink.finish()
    except BaseException:
        sink.abort()
        raise
    finally:
        sink.close()


def write(sink: Sink, data: bytes, memory: LentMemory, *, order: Iterable[int]) -> None:
    """Write these segments with several threads, each segment as soon as memory is free."""

    def write(number: int, loan: Loan) -> None:
        begin = number * memory.segment_bytes
        piece = data[begin : begin + memory.segment_bytes]
        try:
            loan.view[: len(piece)] = piece
            sink.write(begin, loan.view[: len(piece)], loan)
        finally:
            loan.release()

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        calls = [threads.submit(write, number, memory.lease(sink.relieve)) for number in order]
    for call in calls:
        call.result()


def together(call: Callable[[int], T], arguments: Sequence[int]) -> list[T]:
    """Call a function from many threads that begin at once."""
    begin = threading.Barrier(len(arguments))

    def run(argument: int) -> T:
        begin.wait(PATIENCE_SECONDS)
        return call(argument)

    with ThreadPoolExecutor(len(arguments)) as threads:
        return list(threads.map(run, arguments))


def same(actual: Any, expected: Any) -> bool:
    """Whether two contents are equal. pytest would need minutes to explain how megabytes differ."""
    return bytes(actual) == bytes(expected)


def everything(storage: Storage, folder: str = "") -> list[str]:
    """The paths of all objects, and of empty folders if folders are real."""
    paths = []
    for name in storage.names(folder):
        path = f"{folder}/{name}" if folder else name
        paths += everything(storage, path) or storage.existing([path])
    return paths


class ContractBase:
    """The common part of the contract's classes; see `StorageContract`."""

    secrets: Sequence[str] = ()
    num_listed = 12
    not_applicable: Mapping[str, str] = MappingProxyType({})

    @pytest.fixture
    def storage(self) -> Storage:
        raise NotImplementedError("give a `storage` fixture that returns a storage with an empty root")

    def uploads(self) -> Iterable[str]:
        """The unfinished uploads of the store below the root."""
        return []

    def content(self, storage: Storage, path: str) -> bytes:
        """The bytes of an object. Override this if the storage cannot read, or to read by other means."""
        with storage.open(path) as reader:
            data = bytearray(reader.num_bytes)
            reader.read_into(0, memoryview(data))
        return bytes(data)

    @pytest.fixture(autouse=True)
    def _applicable(self, request: pytest.FixtureRequest) -> None:
        unknown = [name for name in self.not_applicable if not hasattr(self, name)]
        assert not unknown, f"not_applicable names tests that do not exist: {unknown}"
        if reason := self.not_applicable.get(request.function.__name__):
            pytest.skip(reason)
