"""The contract of every storage for archives: writing, aborting and reading.

In: a storage with an empty root. Out: tests. Knows nothing of: implementations.
"""

from __future__ import annotations

import pytest

from ..errors import StorageUnavailableError
from ..plumbing import Storage, spec
from .lending import (
    SEGMENT_BYTES,
    SIZES,
    ContractBase,
    LentMemory,
    create,
    everything,
    put_archive,
    random_bytes,
    same,
    together,
    write,
)


class ArchiveContract(ContractBase):
    """The tests of archives; see StorageContract."""

    # --- writing ----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(("segment_bytes", "num_bytes"), SIZES)
    def test_an_object_of_any_size_arrives_as_it_was_written(
        self, storage: Storage, segment_bytes: int, num_bytes: int
    ) -> None:
        data = random_bytes(num_bytes)
        memory = LentMemory(segment_bytes=segment_bytes)
        put_archive(storage, "folder/x.tar", data, memory)

        memory.assert_all_back()
        assert same(self.content(storage, "folder/x.tar"), data)
        assert not list(self.uploads())

    def test_an_object_appears_when_it_is_finished_and_not_before(self, storage: Storage) -> None:
        data = random_bytes(3 * SEGMENT_BYTES)
        memory = LentMemory()
        sink = create(storage, "folder/x.tar", data, memory)
        for stage in ("created", "written"):
            if stage == "written":
                write(sink, data, memory, order=[0, 1, 2])
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
        data = random_bytes(5 * SEGMENT_BYTES + spec.PAGE_BYTES)
        memory = LentMemory()
        sink = create(storage, "x.tar", data, memory)
        write(sink, data, memory, order=order)
        sink.finish()
        sink.close()

        memory.assert_all_back()
        assert same(self.content(storage, "x.tar"), data)

    def test_segments_may_come_in_any_order_one_after_the_other(self, storage: Storage) -> None:
        data = random_bytes(4 * SEGMENT_BYTES)
        memory = LentMemory()
        sink = create(storage, "x.tar", data, memory)
        for number in (2, 3, 1, 0):
            write(sink, data, memory, order=[number])
        sink.finish()
        sink.close()

        assert same(self.content(storage, "x.tar"), data)

    def test_an_object_may_be_much_larger_than_the_memory_it_is_written_from(self, storage: Storage) -> None:
        data = random_bytes(10 * SEGMENT_BYTES + spec.PAGE_BYTES)
        num_segments = 2 * storage.part_segments(len(data), SEGMENT_BYTES)
        memory = LentMemory(num_segments)
        put_archive(storage, "x.tar", data, memory)

        memory.assert_all_back()
        assert memory.num_released == 11
        assert same(self.content(storage, "x.tar"), data)

    def test_several_objects_may_be_written_at_once(self, storage: Storage) -> None:
        images = [random_bytes(2 * SEGMENT_BYTES + spec.PAGE_BYTES, seed) for seed in range(3)]

        def upload(number: int) -> None:
            put_archive(storage, f"folder/{number}", images[number], LentMemory())

        together(upload, range(3))

        assert storage.names("folder") == ["0", "1", "2"]
        for number, data in enumerate(images):
            assert same(self.content(storage, f"folder/{number}"), data)

    def test_a_finished_object_takes_the_place_of_the_one_before(self, storage: Storage) -> None:
        put_archive(storage, "folder/x.tar", b"a" * spec.PAGE_BYTES, LentMemory())
        put_archive(storage, "folder/x.tar", b"b" * 2 * spec.PAGE_BYTES, LentMemory())

        assert same(self.content(storage, "folder/x.tar"), b"b" * 2 * spec.PAGE_BYTES)
        assert storage.names("folder") == ["x.tar"]

    @pytest.mark.parametrize(
        ("num_bytes", "limit_bytes"),
        [
            (1, SEGMENT_BYTES),
            (SEGMENT_BYTES, SEGMENT_BYTES),
            (1, 1 << 40),
            *((3 * SEGMENT_BYTES + more, limit) for more in (0, 4097) for limit in (40 * SEGMENT_BYTES, 1 << 40)),
        ],
    )
    def test_an_object_may_end_before_its_limit(self, storage: Storage, num_bytes: int, limit_bytes: int) -> None:
        data, memory = random_bytes(num_bytes), LentMemory()
        sink = storage.create(
            "folder/x.tar", num_bytes=limit_bytes, segment_bytes=SEGMENT_BYTES, max_segments=64, exact=False
        )
        write(sink, data, memory, order=range(-(-num_bytes // SEGMENT_BYTES)))
        assert not storage.exists("folder/x.tar")
        sink.finish(num_bytes)
        sink.close()

        memory.assert_all_back()
        assert sink.num_bytes == num_bytes
        assert same(self.content(storage, "folder/x.tar"), data)
        assert not list(self.uploads())

    def test_a_sink_says_how_many_segments_it_must_hold_at_once(self, storage: Storage) -> None:
        for num_bytes in (spec.PAGE_BYTES, 5 * SEGMENT_BYTES, 1 << 40):
            for segment_bytes in (SEGMENT_BYTES, 32 * spec.MIB):
                assert storage.part_segments(num_bytes, segment_bytes) >= 1

    # --- giving up --------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("written", [[], [0], [2, 3], [0, 1, 2, 3]], ids=["none", "first", "last", "all"])
    def test_an_aborted_object_leaves_no_trace(self, storage: Storage, written: list[int]) -> None:
        data = random_bytes(3 * SEGMENT_BYTES + spec.PAGE_BYTES)
        memory = LentMemory()
        sink = create(storage, "folder/x.tar", data, memory)
        write(sink, data, memory, order=written)
        sink.abort()
        sink.abort()
        sink.close()
        sink.close()

        memory.assert_all_back()
        assert not storage.exists("folder/x.tar")
        assert everything(storage) == []
        assert not list(self.uploads())

    def test_an_abort_leaves_the_object_that_was_there_before(self, storage: Storage) -> None:
        put_archive(storage, "folder/x.tar", b"a" * spec.PAGE_BYTES, LentMemory())
        data, memory = random_bytes(2 * SEGMENT_BYTES), LentMemory()
        sink = create(storage, "folder/x.tar", data, memory)
        write(sink, data, memory, order=[0, 1])
        sink.abort()
        sink.close()

        assert same(self.content(storage, "folder/x.tar"), b"a" * spec.PAGE_BYTES)
        assert storage.names("folder") == ["x.tar"]

    def test_an_abort_after_the_end_harms_nothing(self, storage: Storage) -> None:
        data, memory = random_bytes(2 * SEGMENT_BYTES), LentMemory()
        sink = create(storage, "x.tar", data, memory)
        write(sink, data, memory, order=[0, 1])
        sink.finish()
        sink.abort()
        sink.close()
        sink.close()
        sink.abort()

        memory.assert_all_back()
        assert same(self.content(storage, "x.tar"), data)

    # --- memory -----------------------------------------------------------------------------------------------

    def test_all_memory_is_back_when_an_object_is_finished(self, storage: Storage) -> None:
        data, memory = random_bytes(3 * SEGMENT_BYTES), LentMemory()
        sink = create(storage, "x.tar", data, memory)
        write(sink, data, memory, order=[1, 0, 2])
        sink.finish()
        memory.assert_all_back()
        assert not sink.relieve()
        sink.close()

        memory.assert_all_back()

    def test_a_sink_that_is_asked_for_memory_gives_only_what_it_no_longer_needs(self, storage: Storage) -> None:
        data, memory = random_bytes(4 * SEGMENT_BYTES + spec.PAGE_BYTES), LentMemory()
        sink = create(storage, "x.tar", data, memory)
        num_relieved = 0
        for number in range(5):
            write(sink, data, memory, order=[number])
            while sink.relieve():
                num_relieved += 1
        assert memory.num_released >= num_relieved
        if num_relieved:
            assert not sink.retryable
        sink.finish()
        sink.close()

        memory.assert_all_back()
        assert same(self.content(storage, "x.tar"), data)

    def test_an_undisturbed_upload_has_no_retries(self, storage: Storage) -> None:
        data, memory = random_bytes(3 * SEGMENT_BYTES), LentMemory()
        sink = create(storage, "x.tar", data, memory)
        assert isinstance(sink.retryable, bool)
        write(sink, data, memory, order=[0, 1, 2])
        sink.finish()
        sink.close()

        assert sink.num_retries == 0

    # --- reading ----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("offset", "length"),
        [(0, 4096), (4096, 8192), (1, 5), (4095, 2), (0, 0), (12287, 1), (12288, 0), (0, 12288)],
    )
    def test_a_range_is_read_exactly(self, storage: Storage, offset: int, length: int) -> None:
        data = random_bytes(12288)
        put_archive(storage, "x.tar", data, LentMemory())
        target = bytearray(length)
        with storage.open("x.tar") as reader:
            assert reader.num_bytes == 12288
            reader.read_into(offset, memoryview(target))

        assert same(target, data[offset : offset + length])

    def test_ranges_are_read_by_many_threads_at_once(self, storage: Storage) -> None:
        data = random_bytes(4 * SEGMENT_BYTES)
        put_archive(storage, "x.tar", data, LentMemory())
        target = bytearray(len(data))
        piece = spec.MIB + spec.PAGE_BYTES
        with storage.open("x.tar") as reader:
            together(
                lambda begin: reader.read_into(begin, memoryview(target)[begin : begin + piece]),
                range(0, len(data), piece),
            )

        assert same(target, data)

    @pytest.mark.parametrize("offset", [0, 4096, 12287, 12288, 20000])
    def test_reading_past_the_end_is_an_end_of_file(self, storage: Storage, offset: int) -> None:
        put_archive(storage, "x.tar", random_bytes(12288), LentMemory())
        with storage.open("x.tar") as reader, pytest.raises(EOFError):
            reader.read_into(offset, memoryview(bytearray(12289)))

    def test_an_object_that_is_replaced_while_it_is_read_is_never_a_mixture(self, storage: Storage) -> None:
        put_archive(storage, "x.tar", b"a" * 12288, LentMemory())
        target = bytearray(4096)
        with storage.open("x.tar") as reader:
            reader.read_into(0, memoryview(target))
            for data in (b"b" * 12288, b"c" * 4096):
                put_archive(storage, "x.tar", data, LentMemory())
                try:
                    reader.read_into(4096, memoryview(target))
                    assert target == b"a" * 4096
                except (StorageUnavailableError, EOFError):
                    pass  # the reader has noticed

    def test_a_reader_may_be_closed_twice(self, storage: Storage) -> None:
        put_archive(storage, "x.tar", b"a" * spec.PAGE_BYTES, LentMemory())
        with storage.open("x.tar") as reader:
            reader.close()

    def test_a_missing_object_is_a_file_not_found(self, storage: Storage) -> None:
        storage.replace("folder/other", b"1")
        for path in ("missing", "folder/missing", "missing/missing"):
            for call in (storage.open, storage.read, lambda path: storage.move(path, "folder/new")):
                with pytest.raises(FileNotFoundError):
                    call(path)

        assert everything(storage) == ["folder/other"]
