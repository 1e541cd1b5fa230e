"""What every storage promises, as tests that any storage can be held to.

In: a storage with an empty root. Out: tests that pass where it keeps what `storage/base.py` says.
Knows nothing of: how it does so. Needs pytest.

The memory that objects are written from is overwritten in the moment its last holder lets go of it, as the pool's is
by the next save: a storage that lets go too early has written something else.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, Final, TypeVar

import pytest

from ..errors import StorageUnavailableError
from ..spec import MIB, PAGE_BYTES
from ..storage.base import Sink, Storage

T = TypeVar("T")

_PATIENCE_SECONDS: Final = 60.0  # longer than anything here takes; reached only when a test fails
_SEGMENT_BYTES: Final = 4 * MIB
_NUM_THREADS: Final = 8
_SIZES: Final = [
    (4 * MIB, PAGE_BYTES),
    (4 * MIB, 4 * MIB),
    (4 * MIB, 4 * MIB + PAGE_BYTES),
    (4 * MIB, 12 * MIB),
    (4 * MIB, 20 * MIB + 3 * PAGE_BYTES),
    (8 * MIB, 8 * MIB - PAGE_BYTES),
    (8 * MIB, 16 * MIB),
    (8 * MIB, 24 * MIB + 3 * PAGE_BYTES),
]
_ODD_NAMES: Final = ["x y", "größe 検", "a+b", "100%", "%2F", "a#b", "a?b=c&d", "~(it's)*!"]


class Loan:
    """A segment on loan, which counts its holders."""

    def __init__(self, memory: Memory, segment: mmap.mmap) -> None:
        self.view = memoryview(segment)
        self._memory = memory
        self._segment = segment
        self._num_holders = 1

    def retain(self) -> None:
        with self._memory.changed:
            if not self._num_holders:
                self._memory.misuse = "a segment was retained after it had been given back"
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


class Memory:
    """A pool of a few segments."""

    def __init__(self, num_segments: int = 8, segment_bytes: int = _SEGMENT_BYTES) -> None:
        self.segment_bytes = segment_bytes
        self.num_segments = num_segments
        self.changed = threading.Condition()
        self.free = [mmap.mmap(-1, segment_bytes) for _ in range(num_segments)]
        self.num_released = 0
        self.misuse = ""

    def lease(self, relieve: Callable[[], bool] = lambda: False) -> Loan:
        """Wait for a segment; a holder is asked to let go of one when there is none."""
        with self.changed:
            for _ in range(int(_PATIENCE_SECONDS / 0.1)):
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


class StorageContract:
    """Derive from it, and give a `storage` fixture: a storage whose root is empty, another one for each test.

        from async_ckpt.testing import StorageContract

        class TestMyStorage(StorageContract):
            secrets = ("my-secret-key",)

            @pytest.fixture
            def storage(self, tmp_path):
                return MyStorage(tmp_path)

    `secrets` are texts that no message may contain. `uploads` says which unfinished uploads the store holds, where it
    can be asked. `not_applicable` names tests that cannot hold for this storage, with the reason.
    """

    secrets: Sequence[str] = ()
    not_applicable: Mapping[str, str] = MappingProxyType({})

    @pytest.fixture
    def storage(self) -> Storage:
        raise NotImplementedError("give a `storage` fixture that returns a storage with an empty root")

    def uploads(self) -> Iterable[str]:
        """Unfinished uploads that the store holds below the root."""
        return []

    def content(self, storage: Storage, path: str) -> bytes:
        """The bytes of an object. Override where the storage can write but not read, or to look behind its back."""
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

    # --- writing ----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(("segment_bytes", "num_bytes"), _SIZES)
    def test_an_object_of_any_size_arrives_as_it_was_written(
        self, storage: Storage, segment_bytes: int, num_bytes: int
    ) -> None:
        data = _random_bytes(num_bytes)
        memory = Memory(segment_bytes=segment_bytes)
        _upload(storage, "folder/x.tar", data, memory)

        memory.assert_all_back()
        assert _same(self.content(storage, "folder/x.tar"), data)
        assert not list(self.uploads())

    def test_an_object_appears_when_it_is_finished_and_not_before(self, storage: Storage) -> None:
        data = _random_bytes(3 * _SEGMENT_BYTES)
        memory = Memory()
        sink = _create(storage, "folder/x.tar", data, memory)
        for stage in ("created", "written"):
            if stage == "written":
                _write(sink, data, memory, order=[0, 1, 2])
            assert not storage.exists("folder/x.tar")
            assert storage.existing(["folder/x.tar"]) == []
            assert "x.tar" not in storage.names("folder")
            with pytest.raises(FileNotFoundError):
                storage.read("folder/x.tar")
        sink.finish()

        assert storage.exists("folder/x.tar")
        assert storage.names("folder") == ["x.tar"]
        sink.close()
        assert storage.names("folder") == ["x.tar"]

    @pytest.mark.parametrize("order", [[5, 4, 3, 2, 1, 0], [3, 0, 5, 1, 4, 2]])
    def test_segments_may_come_in_any_order_from_any_thread(self, storage: Storage, order: list[int]) -> None:
        data = _random_bytes(5 * _SEGMENT_BYTES + PAGE_BYTES)
        memory = Memory()
        sink = _create(storage, "x.tar", data, memory)
        _write(sink, data, memory, order=order)
        sink.finish()
        sink.close()

        memory.assert_all_back()
        assert _same(self.content(storage, "x.tar"), data)

    def test_segments_may_come_in_any_order_one_after_the_other(self, storage: Storage) -> None:
        data = _random_bytes(4 * _SEGMENT_BYTES)
        memory = Memory()
        sink = _create(storage, "x.tar", data, memory)
        for number in (2, 3, 1, 0):
            _write(sink, data, memory, order=[number])
        sink.finish()
        sink.close()

        assert _same(self.content(storage, "x.tar"), data)

    def test_an_object_may_be_much_larger_than_the_memory_it_is_written_from(self, storage: Storage) -> None:
        data = _random_bytes(10 * _SEGMENT_BYTES + PAGE_BYTES)
        num_segments = 2 * storage.part_segments(len(data), _SEGMENT_BYTES)
        memory = Memory(num_segments)
        _upload(storage, "x.tar", data, memory)

        memory.assert_all_back()
        assert memory.num_released == 11
        assert _same(self.content(storage, "x.tar"), data)

    def test_several_objects_may_be_written_at_once(self, storage: Storage) -> None:
        images = [_random_bytes(2 * _SEGMENT_BYTES + PAGE_BYTES, seed) for seed in range(3)]

        def upload(number: int) -> None:
            _upload(storage, f"folder/{number}", images[number], Memory())

        _together(upload, range(3))

        assert storage.names("folder") == ["0", "1", "2"]
        for number, data in enumerate(images):
            assert _same(self.content(storage, f"folder/{number}"), data)

    def test_a_finished_object_takes_the_place_of_the_one_before(self, storage: Storage) -> None:
        _upload(storage, "folder/x.tar", b"a" * PAGE_BYTES, Memory())
        _upload(storage, "folder/x.tar", b"b" * 2 * PAGE_BYTES, Memory())

        assert _same(self.content(storage, "folder/x.tar"), b"b" * 2 * PAGE_BYTES)
        assert storage.names("folder") == ["x.tar"]

    @pytest.mark.parametrize(
        ("num_bytes", "limit_bytes"),
        [
            (1, _SEGMENT_BYTES),
            (_SEGMENT_BYTES, _SEGMENT_BYTES),
            (1, 1 << 40),
            *(
                (3 * _SEGMENT_BYTES + more, limit)
                for more in (0, 4097)
                for limit in (40 * _SEGMENT_BYTES, 1 << 40)
            ),
        ],
    )
    def test_an_object_may_end_before_its_limit(
        self, storage: Storage, num_bytes: int, limit_bytes: int
    ) -> None:
        data, memory = _random_bytes(num_bytes), Memory()
        sink = storage.create(
            "folder/x.tar", num_bytes=limit_bytes, segment_bytes=_SEGMENT_BYTES, max_segments=64, exact=False
        )
        _write(sink, data, memory, order=range(-(-num_bytes // _SEGMENT_BYTES)))
        assert not storage.exists("folder/x.tar")
        sink.finish(num_bytes)
        sink.close()

        memory.assert_all_back()
        assert sink.num_bytes == num_bytes
        assert _same(self.content(storage, "folder/x.tar"), data)
        assert not list(self.uploads())

    def test_a_sink_says_how_many_segments_it_must_hold_at_once(self, storage: Storage) -> None:
        for num_bytes in (PAGE_BYTES, 5 * _SEGMENT_BYTES, 1 << 40):
            for segment_bytes in (_SEGMENT_BYTES, 32 * MIB):
                assert storage.part_segments(num_bytes, segment_bytes) >= 1

    # --- giving up --------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("written", [[], [0], [2, 3], [0, 1, 2, 3]], ids=["none", "first", "last", "all"])
    def test_an_aborted_object_leaves_no_trace(self, storage: Storage, written: list[int]) -> None:
        data = _random_bytes(3 * _SEGMENT_BYTES + PAGE_BYTES)
        memory = Memory()
        sink = _create(storage, "folder/x.tar", data, memory)
        _write(sink, data, memory, order=written)
        sink.abort()
        sink.abort()
        sink.close()
        sink.close()

        memory.assert_all_back()
        assert not storage.exists("folder/x.tar")
        assert _everything(storage) == []
        assert not list(self.uploads())

    def test_an_abort_leaves_the_object_that_was_there_before(self, storage: Storage) -> None:
        _upload(storage, "folder/x.tar", b"a" * PAGE_BYTES, Memory())
        data, memory = _random_bytes(2 * _SEGMENT_BYTES), Memory()
        sink = _create(storage, "folder/x.tar", data, memory)
        _write(sink, data, memory, order=[0, 1])
        sink.abort()
        sink.close()

        assert _same(self.content(storage, "folder/x.tar"), b"a" * PAGE_BYTES)
        assert storage.names("folder") == ["x.tar"]

    def test_an_abort_after_the_end_harms_nothing(self, storage: Storage) -> None:
        data, memory = _random_bytes(2 * _SEGMENT_BYTES), Memory()
        sink = _create(storage, "x.tar", data, memory)
        _write(sink, data, memory, order=[0, 1])
        sink.finish()
        sink.abort()
        sink.close()
        sink.close()
        sink.abort()

        memory.assert_all_back()
        assert _same(self.content(storage, "x.tar"), data)

    # --- memory -----------------------------------------------------------------------------------------------

    def test_all_memory_is_back_when_an_object_is_finished(self, storage: Storage) -> None:
        data, memory = _random_bytes(3 * _SEGMENT_BYTES), Memory()
        sink = _create(storage, "x.tar", data, memory)
        _write(sink, data, memory, order=[1, 0, 2])
        sink.finish()
        memory.assert_all_back()
        assert not sink.relieve()
        sink.close()

        memory.assert_all_back()

    def test_a_sink_that_is_asked_for_memory_gives_only_what_it_no_longer_needs(
        self, storage: Storage
    ) -> None:
        data, memory = _random_bytes(4 * _SEGMENT_BYTES + PAGE_BYTES), Memory()
        sink = _create(storage, "x.tar", data, memory)
        num_relieved = 0
        for number in range(5):
            _write(sink, data, memory, order=[number])
            while sink.relieve():
                num_relieved += 1
        assert memory.num_released >= num_relieved
        if num_relieved:
            assert not sink.retryable
        sink.finish()
        sink.close()

        memory.assert_all_back()
        assert _same(self.content(storage, "x.tar"), data)

    def test_an_undisturbed_upload_has_no_retries(self, storage: Storage) -> None:
        data, memory = _random_bytes(3 * _SEGMENT_BYTES), Memory()
        sink = _create(storage, "x.tar", data, memory)
        assert isinstance(sink.retryable, bool)
        _write(sink, data, memory, order=[0, 1, 2])
        sink.finish()
        sink.close()

        assert sink.num_retries == 0

    # --- reading ----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("offset", "length"),
        [(0, 4096), (4096, 8192), (1, 5), (4095, 2), (0, 0), (12287, 1), (12288, 0), (0, 12288)],
    )
    def test_a_range_is_read_exactly(self, storage: Storage, offset: int, length: int) -> None:
        data = _random_bytes(12288)
        _upload(storage, "x.tar", data, Memory())
        target = bytearray(length)
        with storage.open("x.tar") as reader:
            assert reader.num_bytes == 12288
            reader.read_into(offset, memoryview(target))

        assert _same(target, data[offset : offset + length])

    def test_ranges_are_read_by_many_threads_at_once(self, storage: Storage) -> None:
        data = _random_bytes(4 * _SEGMENT_BYTES)
        _upload(storage, "x.tar", data, Memory())
        target = bytearray(len(data))
        piece = MIB + PAGE_BYTES
        with storage.open("x.tar") as reader:
            _together(
                lambda begin: reader.read_into(begin, memoryview(target)[begin : begin + piece]),
                range(0, len(data), piece),
            )

        assert _same(target, data)

    @pytest.mark.parametrize("offset", [0, 4096, 12287, 12288, 20000])
    def test_reading_past_the_end_is_an_end_of_file(self, storage: Storage, offset: int) -> None:
        _upload(storage, "x.tar", _random_bytes(12288), Memory())
        with storage.open("x.tar") as reader, pytest.raises(EOFError):
            reader.read_into(offset, memoryview(bytearray(12289)))

    def test_an_object_that_is_replaced_while_it_is_read_is_never_a_mixture(self, storage: Storage) -> None:
        _upload(storage, "x.tar", b"a" * 12288, Memory())
        target = bytearray(4096)
        with storage.open("x.tar") as reader:
            reader.read_into(0, memoryview(target))
            for data in (b"b" * 12288, b"c" * 4096):
                _upload(storage, "x.tar", data, Memory())
                try:
                    reader.read_into(4096, memoryview(target))
                    assert target == b"a" * 4096
                except (StorageUnavailableError, EOFError):
                    pass  # it was noticed

    def test_a_reader_may_be_closed_twice(self, storage: Storage) -> None:
        _upload(storage, "x.tar", b"a" * PAGE_BYTES, Memory())
        with storage.open("x.tar") as reader:
            reader.close()

    def test_a_missing_object_is_a_file_not_found(self, storage: Storage) -> None:
        storage.replace("folder/other", b"1")
        for path in ("missing", "folder/missing", "missing/missing"):
            for call in (storage.open, storage.read, lambda path: storage.move(path, "folder/new")):
                with pytest.raises(FileNotFoundError):
                    call(path)

        assert _everything(storage) == ["folder/other"]

    # --- small objects ----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("data", [b"", b"1", b"\x00\r\n\xff" * 1000, bytes(MIB)], ids=len)
    def test_a_small_object_is_read_as_it_was_written(self, storage: Storage, data: bytes) -> None:
        storage.put_new("folder/new", data)
        storage.replace("folder/replaced", data)

        assert storage.read("folder/new")[0] == data
        assert storage.read("folder/replaced")[0] == data

    def test_a_new_object_is_refused_when_there_is_one(self, storage: Storage) -> None:
        storage.put_new("folder/manifest", b"first")
        with pytest.raises(FileExistsError):
            storage.put_new("folder/manifest", b"second")
        with pytest.raises(FileExistsError):
            storage.put_new("folder/manifest", b"first")

        assert storage.read("folder/manifest")[0] == b"first"
        assert _everything(storage) == ["folder/manifest"]

    def test_of_many_writers_that_put_a_new_object_exactly_one_wins(self, storage: Storage) -> None:
        def put(number: int) -> bool:
            try:
                storage.put_new("folder/manifest", str(number).encode())
            except FileExistsError:
                return False
            return True

        won = _together(put, range(_NUM_THREADS))

        assert won.count(True) == 1
        assert storage.read("folder/manifest")[0] == str(won.index(True)).encode()
        assert _everything(storage) == ["folder/manifest"]

    def test_an_object_may_be_new_again_once_it_is_deleted(self, storage: Storage) -> None:
        storage.put_new("folder/manifest", b"first")
        storage.delete("folder/manifest")
        storage.put_new("folder/manifest", b"second")

        assert storage.read("folder/manifest")[0] == b"second"

    def test_replacing_shows_at_once(self, storage: Storage) -> None:
        for number in range(5):
            storage.replace("latest", str(number).encode())
            assert storage.read("latest")[0] == str(number).encode()

        assert storage.names("") == ["latest"]

    def test_the_version_changes_when_an_object_is_replaced_and_only_then(self, storage: Storage) -> None:
        versions = set()
        for number in range(5):
            storage.replace("x", str(number).encode())
            versions |= {storage.read("x")[1], storage.read("x")[1]}

        assert len(versions) == 5

    def test_replacing_needs_the_version_that_was_read(self, storage: Storage) -> None:
        storage.put_new("x", b"one")
        first = storage.read("x")[1]
        storage.replace("x", b"two", version=first)
        with pytest.raises(FileExistsError):
            storage.replace("x", b"three", version=first)
        with pytest.raises(FileExistsError):
            storage.replace("missing", b"one", version=first)

        assert storage.read("x")[0] == b"two"
        assert storage.names("") == ["x"]

    def test_the_version_that_replacing_tells_is_the_one_that_is_read(self, storage: Storage) -> None:
        """A place that cannot tell says so by None."""
        told = storage.replace("x", b"one")
        again = storage.replace("x", b"two", version=storage.read("x")[1])

        assert again in (None, storage.read("x")[1])
        assert told is None or told != again

    def test_of_many_writers_that_replace_one_version_exactly_one_wins(self, storage: Storage) -> None:
        storage.put_new("x", b"old")
        version = storage.read("x")[1]

        def replace(number: int) -> bool:
            try:
                storage.replace("x", str(number).encode(), version=version)
            except FileExistsError:
                return False
            return True

        won = _together(replace, range(_NUM_THREADS))

        assert won.count(True) == 1
        assert storage.read("x")[0] == str(won.index(True)).encode()

    def test_moving_keeps_the_content(self, storage: Storage) -> None:
        storage.replace("folder/x", b"data")
        storage.move("folder/x", "folder/y")

        assert storage.names("folder") == ["y"]
        assert storage.read("folder/y")[0] == b"data"
        assert not storage.exists("folder/x")

    def test_deleting_what_is_not_there_is_no_error(self, storage: Storage) -> None:
        for path in ("missing", "missing/too"):
            storage.delete(path)
        storage.replace("folder/x", b"1")
        storage.replace("folder/y", b"2")
        storage.delete("folder/x")
        storage.delete("folder/x")

        assert _everything(storage) == ["folder/y"]

    def test_a_folder_that_a_deletion_leaves_empty_goes_too(self, storage: Storage) -> None:
        storage.replace("other", b"0")
        storage.replace("folder/x", b"1")
        storage.delete("folder/x")

        assert storage.names("") == ["other"]
        assert not storage.exists("folder")

    def test_a_folder_with_something_in_it_is_not_removed(self, storage: Storage) -> None:
        storage.replace("folder/deep/x", b"1")
        for folder in ("folder", "folder/deep", "folder/deep/x", "missing", "missing/too", ""):
            assert not storage.remove_if_empty(folder)
        data, memory = _random_bytes(2 * _SEGMENT_BYTES), Memory()
        sink = _create(storage, "other/x.tar", data, memory)
        assert not storage.remove_if_empty("other")
        _write(sink, data, memory, order=[0, 1])
        sink.finish()
        sink.close()

        assert _everything(storage) == ["folder/deep/x", "other/x.tar"]

    def test_a_folder_that_others_remove_while_something_is_begun_in_it_is_made_again(
        self, storage: Storage
    ) -> None:
        data = _random_bytes(PAGE_BYTES)

        def run(who: int) -> None:
            if who == 0:
                _upload(storage, "folder/x.tar", data, Memory())
            elif who == 1:
                storage.put_new("folder/manifest", b"1")
            else:  # again and again, as if many processes came by
                for _ in range(10):
                    storage.remove_if_empty("folder")

        for _ in range(5):
            _together(run, range(4))
            assert _same(self.content(storage, "folder/x.tar"), data)
            assert storage.names("folder") == ["manifest", "x.tar"]
            storage.delete("folder/x.tar")
            storage.delete("folder/manifest")
            assert _everything(storage) == []

    # --- names ------------------------------------------------------------------------------------------------

    def test_names_are_of_one_level_and_sorted(self, storage: Storage) -> None:
        for path in ("step_10/x", "step_9/deep/x", "step_9/x", "latest", "B", "ä", "step_1", "step_90/x"):
            storage.replace(path, b"1")

        assert storage.names("") == sorted(["step_10", "step_9", "latest", "B", "ä", "step_1", "step_90"])
        assert storage.names("step_9") == ["deep", "x"]
        assert storage.names("step_9/deep") == ["x"]

    def test_a_missing_folder_has_no_names(self, storage: Storage) -> None:
        assert storage.names("") == []
        assert storage.names("missing") == []
        storage.replace("folder/x", b"1")

        assert storage.names("fold") == []
        assert storage.names("folder/missing") == []

    def test_the_sizes_are_of_everything_below_a_folder(self, storage: Storage) -> None:
        for path, num_bytes in (("a/b/c/x", 3), ("a/b/y", 0), ("a/z", 2), ("ab", 1), ("a2/x", 1)):
            storage.replace(path, bytes(num_bytes))

        assert list(storage.sizes("a").items()) == [("b/c/x", 3), ("b/y", 0), ("z", 2)]
        assert storage.sizes("a/b/c") == {"x": 3}
        assert list(storage.sizes("")) == ["a/b/c/x", "a/b/y", "a/z", "a2/x", "ab"]

    def test_a_missing_folder_has_no_sizes(self, storage: Storage) -> None:
        assert storage.sizes("") == {}
        storage.replace("folder/x", b"1")

        for folder in ("missing", "folder/missing", "fold", "folder/x"):
            assert storage.sizes(folder) == {}

    def test_what_is_being_written_has_no_size_yet(self, storage: Storage) -> None:
        data, memory = _random_bytes(2 * _SEGMENT_BYTES), Memory()
        sink = _create(storage, "folder/x.tar", data, memory)
        _write(sink, data, memory, order=[0, 1])
        assert storage.sizes("") == {}
        sink.finish()
        sink.close()

        assert storage.sizes("") == {"folder/x.tar": len(data)}

    @pytest.mark.parametrize("name", _ODD_NAMES)
    def test_sizes_are_by_the_names_that_objects_were_given(self, storage: Storage, name: str) -> None:
        storage.replace(f"{name}/{name}/x", b"12")
        storage.replace(f"{name}/{name}/y", b"")

        assert storage.sizes(name) == {f"{name}/x": 2, f"{name}/y": 0}

    def test_what_exists_is_told_in_the_order_that_was_asked(self, storage: Storage) -> None:
        for path in ("a/1", "a/2", "b/1"):
            storage.replace(path, b"1")

        assert storage.existing([]) == []
        assert storage.existing(["b/1", "a/9", "a/2", "c/1", "a/1"]) == ["b/1", "a/2", "a/1"]
        assert storage.exists("a/1")
        assert not storage.exists("a/9")
        assert not storage.exists("c/1")

    @pytest.mark.parametrize("name", _ODD_NAMES)
    def test_a_name_may_have_any_character(self, storage: Storage, name: str) -> None:
        data = _random_bytes(PAGE_BYTES)
        _upload(storage, f"{name}/{name}.tar", data, Memory())
        storage.put_new(f"{name}/{name}.json", b"1")
        storage.put_new(f"{name}/old", b"2")
        storage.move(f"{name}/old", f"{name}/{name}.txt")

        assert storage.names("") == [name]
        assert storage.names(name) == [f"{name}.json", f"{name}.tar", f"{name}.txt"]
        assert _same(self.content(storage, f"{name}/{name}.tar"), data)
        assert storage.read(f"{name}/{name}.txt")[0] == b"2"
        assert storage.existing([f"{name}/{name}.json", f"{name}/old"]) == [f"{name}/{name}.json"]
        for end in ("json", "tar", "txt"):
            storage.delete(f"{name}/{name}.{end}")
        assert _everything(storage) == []

    def test_a_location_is_for_people(self, storage: Storage) -> None:
        assert storage.locate("folder/x.tar").endswith("folder/x.tar")
        assert isinstance(storage.remote, bool)
        assert isinstance(storage.in_order, bool)

    def test_secrets_are_shown_nowhere(self, storage: Storage) -> None:
        sink = storage.create("x.tar", num_bytes=PAGE_BYTES, segment_bytes=_SEGMENT_BYTES, max_segments=4)
        with pytest.raises(FileNotFoundError) as missing:
            storage.read("missing")
        shown = [
            repr(storage), str(storage), storage.locate("x.tar"), repr(sink), *traceback.format_exception(missing.value)
        ]  # fmt: skip
        sink.abort()
        sink.close()

        assert not [secret for secret in self.secrets if secret in "".join(shown)]

    # --- leftovers --------------------------------------------------------------------------------------------

    def test_an_object_that_is_being_written_is_never_swept(self, storage: Storage) -> None:
        data, memory = _random_bytes(3 * _SEGMENT_BYTES), Memory()
        sink = _create(storage, "folder/x.tar", data, memory)
        _write(sink, data, memory, order=[0, 1])
        found = storage.sweep("folder", storage.names("folder"), delete=True, decided=True)
        aborted = storage.sweep_uploads()
        _write(sink, data, memory, order=[2])
        sink.finish()
        after = storage.sweep("folder", ["x.tar"], delete=True, decided=True)
        sink.close()

        assert (found, aborted, after) == ([], [], [])
        assert _same(self.content(storage, "folder/x.tar"), data)

    def test_a_sweep_deletes_only_what_it_is_told_to(self, storage: Storage) -> None:
        storage.replace("folder/x", b"1")
        storage.sweep("folder", ["x"], decided=True)
        storage.sweep("folder", ["x"])

        assert storage.sweep("folder", ["missing"], delete=True, decided=True) == []
        assert storage.sweep("folder", [], delete=True, decided=True) == []
        assert storage.read("folder/x")[0] == b"1"


def _random_bytes(num_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


def _create(storage: Storage, path: str, data: bytes, memory: Memory) -> Sink:
    return storage.create(
        path, num_bytes=len(data), segment_bytes=memory.segment_bytes, max_segments=memory.num_segments
    )


def _upload(storage: Storage, path: str, data: bytes, memory: Memory) -> None:
    """A whole object, as a save writes it: filled in file order, written by several threads, never held up for long."""
    sink = _create(storage, path, data, memory)
    try:
        _write(sink, data, memory, order=range(-(-len(data) // memory.segment_bytes)))
        sink.finish()
    except BaseException:
        sink.abort()
        raise
    finally:
        sink.close()


def _write(sink: Sink, data: bytes, memory: Memory, *, order: Iterable[int]) -> None:
    """Write these segments, each when there is memory for it, by several threads."""

    def write(number: int, loan: Loan) -> None:
        begin = number * memory.segment_bytes
        piece = data[begin : begin + memory.segment_bytes]
        try:
            loan.view[: len(piece)] = piece
            sink.write(begin, loan.view[: len(piece)], loan)
        finally:
            loan.release()

    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        calls = [threads.submit(write, number, memory.lease(sink.relieve)) for number in order]
    for call in calls:
        call.result()


def _together(call: Callable[[int], T], arguments: Sequence[int]) -> list[T]:
    """The same call by many threads that begin at once."""
    begin = threading.Barrier(len(arguments))

    def run(argument: int) -> T:
        begin.wait(_PATIENCE_SECONDS)
        return call(argument)

    with ThreadPoolExecutor(len(arguments)) as threads:
        return list(threads.map(run, arguments))


def _same(found: Any, told: Any) -> bool:
    """Whether two contents are equal; pytest would spend minutes on explaining how megabytes differ."""
    return bytes(found) == bytes(told)


def _everything(storage: Storage, folder: str = "") -> list[str]:
    """The path of every object; where folders are real, of empty ones too."""
    found = []
    for name in storage.names(folder):
        path = f"{folder}/{name}" if folder else name
        found += _everything(storage, path) or storage.existing([path])
    return found
