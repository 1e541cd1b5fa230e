"""How what is compressed is written: a table of its frames, segments in any order, to a disk and to a bucket."""

import os
import random
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from racing import PATIENCE, Call, Thrown, appenders, until
from scripted_disk import ScriptedStorage
from states import MIB, difference, noise

from async_ckpt import StorageUnavailableError, Zstd, load, save
from async_ckpt.core.format.zstd import FOOTER_BYTES, ZstdFrame, begins, dump, parse, table_bytes
from async_ckpt.core.host.pool import Lease, SegmentPool
from async_ckpt.core.storage.compressed import CompressingSink, ZstdFrames, ZstdReader
from async_ckpt.core.storage.local import LocalStorage
from async_ckpt.core.storage.sequential import Appender

zstandard = pytest.importorskip("zstandard")
BLOCK = 4 * MIB


# --- the table -------------------------------------------------------------------------------------------------

sizes = st.lists(
    st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)).map(lambda s: ZstdFrame(*s)), max_size=30
)


@given(sizes)
def test_a_table_comes_back(frames):
    table = dump(frames)

    assert table_bytes(table[-FOOTER_BYTES:]) == len(table) == 17 + 8 * len(frames)
    assert parse(table, data_bytes=sum(frame.compressed for frame in frames)) == frames


@given(sizes)
def test_checksums_of_other_writers_are_passed_over(frames):
    entries = b"".join(struct.pack("<III", *frame, 0xDEADBEEF) for frame in frames)
    footer = struct.pack("<IBI", len(frames), 0x80, 0x8F92EAB1)
    table = struct.pack("<II", 0x184D2A5E, len(entries) + 9) + entries + footer

    assert table_bytes(footer) == len(table)
    assert parse(table, data_bytes=sum(frame.compressed for frame in frames)) == frames


@given(sizes, st.integers(0, 400), st.integers(0, 255))
def test_a_table_with_a_wrong_byte_is_refused_or_tells_of_the_same_bytes(frames, at, value):
    table, num_bytes = bytearray(dump(frames)), sum(frame.compressed for frame in frames)
    table[at % len(table)] = value
    try:
        found = parse(bytes(table), data_bytes=num_bytes)
    except ValueError:
        return
    assert sum(frame.compressed for frame in found) == num_bytes


@pytest.mark.parametrize("table", [b"", b"x", bytes(9), bytes(17), dump([ZstdFrame(1, 2)])[1:], dump([])[:-1]])
def test_what_is_no_table_is_said_to_be_none(table):
    with pytest.raises(ValueError, match="seek table"):
        parse(table, data_bytes=1)


def test_a_table_of_other_frames_is_refused():
    with pytest.raises(ValueError, match="does not describe the frames"):
        parse(dump([ZstdFrame(10, 20)]), data_bytes=11)


def test_only_what_begins_with_a_frame_is_taken_for_zstd():
    assert begins(zstandard.compress(b"x"))
    assert begins(dump([]))
    for data in (b"", b"\x28", b"\x28\xb5\x2f", b"PK\x03\x04", b"\x5e\x2a\x4d", bytes(8)):
        assert not begins(data)


# --- the sink --------------------------------------------------------------------------------------------------


class Segments:
    """Leases of a real pool, filled, for a sink; what is lent is counted."""

    def __init__(self, num_segments: int, *, segment_bytes: int = BLOCK, last_bytes: int = 1234) -> None:
        self.pool = SegmentPool(segment_bytes, max_bytes=num_segments * segment_bytes)
        self.segment_bytes, self.num_segments = segment_bytes, num_segments
        self.num_bytes = (num_segments - 1) * segment_bytes + last_bytes
        self.data = [
            noise(segment_bytes if i < num_segments - 1 else last_bytes, seed=i) if i % 2 else
            bytes([i % 256]) * (segment_bytes if i < num_segments - 1 else last_bytes)
            for i in range(num_segments)
        ]  # fmt: skip

    def lease(self, number: int) -> tuple[memoryview, Lease]:
        lease = self.pool.lease((0, number), pin=None, check=lambda: None)
        view = lease.segment.view[: len(self.data[number])]
        view[:] = self.data[number]
        return view, lease

    def write(self, sink: Any, number: int) -> None:
        view, lease = self.lease(number)
        try:
            sink.write(number * self.segment_bytes, view, lease)
        finally:
            lease.release()

    @property
    def num_lent(self) -> int:
        return int(repr(self.pool).split(" MiB, ")[1].split(" of ")[0])


def sink_for(storage: Any, segments: Segments, **how: Any) -> CompressingSink:
    settings = Zstd(**how)
    return CompressingSink(
        storage,
        "x.zst",
        num_bytes=segments.num_bytes,
        segment_bytes=segments.segment_bytes,
        packing=ZstdFrames(settings.level),
        num_threads=settings.num_threads,
    )


def assert_whole(path: Path, segments: Segments) -> None:
    data = path.read_bytes()
    out = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
    assert out == b"".join(segments.data)
    with ZstdReader(LocalStorage(path.parent).open(path.name), str(path)) as reader:
        assert reader.num_bytes == segments.num_bytes


@pytest.mark.parametrize("threads", [1, 3, 16])
def test_segments_by_many_threads_at_once_are_each_there_once(tmp_path, threads):
    for attempt in range(5):
        segments = Segments(60, segment_bytes=128 * 1024)
        sink = sink_for(LocalStorage(tmp_path), segments, threads=threads)
        numbers = list(range(60))
        random.Random(attempt).shuffle(numbers)
        todo, lock = iter(numbers), threading.Lock()

        def work(
            sink: CompressingSink = sink, segments: Segments = segments, todo: Any = todo, lock: Any = lock
        ) -> None:
            while True:
                with lock:
                    number = next(todo, None)
                if number is None:
                    return
                segments.write(sink, number)

        for call in [Call(work) for _ in range(16)]:
            call.outcome()
        sink.finish()
        sink.close()
        assert segments.num_lent == 0
        assert_whole(tmp_path / "x.zst", segments)


def test_one_that_comes_very_late_holds_up_memory_within_bounds_and_nobody(tmp_path):
    segments = Segments(20, segment_bytes=64 * 1024)
    sink = sink_for(LocalStorage(tmp_path), segments, threads=2)
    for number in range(1, 20):
        segments.write(sink, number)  # returns: nobody waits for the first
    assert len(sink._compressed) <= 2 * 2
    assert segments.num_lent == 19 - len(sink._compressed)
    assert sink.num_bytes == 0
    segments.write(sink, 0)
    assert segments.num_lent == 0
    sink.finish()
    sink.close()
    assert_whole(tmp_path / "x.zst", segments)


def test_a_segment_is_compressed_by_one_thread_even_when_another_comes_in_that_moment(tmp_path, monkeypatch):
    """Two threads see the same earliest segment; one takes it, and the other must find the next."""
    segments = Segments(4, segment_bytes=64 * 1024)
    sink = sink_for(LocalStorage(tmp_path), segments, threads=2)
    compress, taken = CompressingSink._compress, []
    first, go_on = threading.Event(), threading.Event()

    def stopping(self: CompressingSink, number: int, *rest: Any) -> None:
        taken.append(number)
        if not first.is_set():
            first.set()
            assert go_on.wait(PATIENCE)
        compress(self, number, *rest)

    monkeypatch.setattr(CompressingSink, "_compress", stopping)
    call = Call(lambda: segments.write(sink, 0))
    assert first.wait(PATIENCE)
    for number in (1, 2, 3):
        segments.write(sink, number)
    go_on.set()
    call.outcome()
    sink.finish()
    sink.close()

    assert sorted(taken) == [0, 1, 2, 3]
    assert_whole(tmp_path / "x.zst", segments)


def test_after_many_segments_no_more_threads_compress_than_before(tmp_path, monkeypatch):
    segments = Segments(14, segment_bytes=64 * 1024)
    sink = sink_for(LocalStorage(tmp_path), segments, threads=2)
    for number in range(8):
        segments.write(sink, number)
    compress, inside, go_on = CompressingSink._compress, [], threading.Event()

    def held(self: CompressingSink, number: int, *rest: Any) -> None:
        inside.append(number)
        assert go_on.wait(PATIENCE)
        compress(self, number, *rest)

    monkeypatch.setattr(CompressingSink, "_compress", held)
    calls = [Call(lambda n=n: segments.write(sink, n)) for n in range(8, 14)]  # type: ignore[misc]
    until(lambda: len(inside) + sum(not call.is_alive() for call in calls) == 6)
    at_once = len(inside)
    go_on.set()
    for call in calls:
        call.outcome()
    sink.finish()
    sink.close()

    assert at_once == 2
    assert_whole(tmp_path / "x.zst", segments)


def test_an_object_that_lacks_a_segment_cannot_be_finished_and_leaves_no_trace(tmp_path):
    segments = Segments(4, segment_bytes=64 * 1024)
    sink = sink_for(LocalStorage(tmp_path), segments)
    for number in (0, 1, 3):
        segments.write(sink, number)
    with pytest.raises(RuntimeError, match="of 4 segments were written"):
        sink.finish()
    sink.abort()
    sink.abort()

    assert segments.num_lent == 0
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("call", ["write", "finish"])
def test_a_write_that_fails_below_is_raised_and_all_memory_comes_back(tmp_path, call):
    segments = Segments(5)
    with ScriptedStorage(tmp_path) as disk:
        disk.fail(call, error=StorageUnavailableError("the disk is gone", path="x"))
        sink = sink_for(disk, segments)

        def all_of_it() -> None:
            for number in range(5):
                segments.write(sink, number)
            sink.finish()

        with pytest.raises(StorageUnavailableError, match="the disk is gone"):
            all_of_it()
        sink.abort()
        assert segments.num_lent == 0
        assert os.listdir(tmp_path) == []
    until(lambda: not appenders())


def test_when_it_is_given_up_elsewhere_what_is_held_comes_back_and_nothing_more_is_taken(tmp_path):
    segments = Segments(6, segment_bytes=64 * 1024)
    sink = sink_for(LocalStorage(tmp_path), segments, threads=1)
    for number in (5, 4, 3, 2):
        segments.write(sink, number)
    assert segments.num_lent > 0
    sink.give_up()
    assert segments.num_lent == 0
    with pytest.raises(RuntimeError, match="abandoned"):
        segments.write(sink, 0)
    assert segments.num_lent == 0
    sink.give_up()
    sink.abort()
    assert os.listdir(tmp_path) == []


def test_given_up_while_a_segment_is_compressed_it_ends(tmp_path, monkeypatch):
    segments = Segments(6, segment_bytes=64 * 1024)
    sink = sink_for(LocalStorage(tmp_path), segments, threads=1)
    compress, inside, go_on = CompressingSink._compress, threading.Event(), threading.Event()

    def stopping(self: CompressingSink, *taken: Any) -> None:
        inside.set()
        assert go_on.wait(PATIENCE)
        compress(self, *taken)

    monkeypatch.setattr(CompressingSink, "_compress", stopping)
    call = Call(lambda: segments.write(sink, 0))
    assert inside.wait(PATIENCE)
    segments.write(sink, 1)  # is left to the other thread
    sink.give_up()
    go_on.set()
    call.outcome()
    sink.abort()
    assert segments.num_lent == 0
    assert os.listdir(tmp_path) == []


# --- appending -------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 9 * MIB), min_size=1, max_size=6))
def test_bytes_of_any_length_are_appended(tmp_path_factory, lengths):
    folder = tmp_path_factory.mktemp("append")
    data = noise(sum(lengths) + 1)
    out = Appender(LocalStorage(folder), "x", limit_bytes=1 << 40)
    at = 0
    for length in [*lengths, 1]:
        piece = bytearray(data[at : at + length])
        out.append(memoryview(piece))
        piece[:] = bytes(length)  # it may change once the call has returned
        at += length
    assert out.finish() == len(data) == out.sink.num_bytes
    out.sink.close()

    assert (folder / "x").read_bytes() == data


def test_whoever_appends_waits_for_memory_and_no_more_than_64_mib_is_held(tmp_path):
    with ScriptedStorage(tmp_path) as disk:
        held = disk.stop("write")
        out = Appender(disk, "x", limit_bytes=1 << 30)
        call = Call(lambda: [out.append(memoryview(bytes(MIB))) for _ in range(200)])
        held.wait_reached()
        call.wait_until_inside("lease")
        assert out._pool.num_bytes <= 64 * MIB
        disk.release_all()
        call.outcome()
        assert out.finish() == 200 * MIB
        out.sink.close()
    assert (tmp_path / "x").stat().st_size == 200 * MIB
    until(lambda: not appenders())


@pytest.mark.parametrize("who", ["a write", "another thread"])
def test_whoever_appends_gets_what_has_ended_it_even_while_it_waits_for_memory(tmp_path, who):
    with ScriptedStorage(tmp_path) as disk:
        held = disk.stop("write")
        out = Appender(disk, "x", limit_bytes=1 << 30)
        call = Call(lambda: [out.append(memoryview(bytes(MIB))) for _ in range(200)])
        held.wait_reached()
        call.wait_until_inside("lease")
        if who == "a write":
            held.release(Thrown("gone"))
        else:
            out.fail(Thrown("gone"))
        with pytest.raises(Thrown, match="gone"):
            call.outcome()
        with pytest.raises(Thrown, match="gone"):
            out.append(memoryview(b"x"))
        disk.release_all()
        with pytest.raises(Thrown, match="gone"):
            out.finish()
        out.abort()
        out.abort()
    assert os.listdir(tmp_path) == []
    until(lambda: ", 0 of " in repr(out._pool))
    until(lambda: not appenders())


def test_an_object_whose_end_fails_leaves_no_trace(tmp_path):
    with ScriptedStorage(tmp_path) as disk:
        disk.fail("finish", error=Thrown("gone"))
        out = Appender(disk, "x", limit_bytes=1 << 30)
        out.append(memoryview(bytes(20 * MIB)))
        with pytest.raises(Thrown):
            out.finish()
        out.abort()
    assert os.listdir(tmp_path) == []
    until(lambda: not appenders())


# --- stores ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["obstore", "s3fs"])
@pytest.mark.parametrize("mib", [1, 12])
def test_a_compressed_save_goes_to_a_bucket_and_is_loaded_by_ranges(bucket, proxy, engine, mib):
    place = bucket.place("runs/x.tar.zst", engine, endpoint=proxy.endpoint)
    noisy = torch.frombuffer(bytearray(noise(mib * MIB)), dtype=torch.uint8)
    state = {"model": {"noisy": noisy, "other": noisy.flip(0)}, "small": {"bias": torch.arange(7.0)}}
    report = save(state, place).result()

    assert report.destinations[0].num_bytes == len(bucket.read("runs/x.tar.zst"))
    assert bucket.keys() == ["runs/x.tar.zst"]
    assert bucket.uploads() == []
    assert difference(load(place), state) is None
    before = len(proxy.requests)
    part = load(place, select="small")
    assert torch.equal(part["small"]["bias"], state["small"]["bias"])
    ranges = [r.headers["range"] for r in proxy.requests[before:] if r.kind == "get_object"]
    read = sum(int(end) - int(begin) + 1 for begin, end in (r.removeprefix("bytes=").split("-") for r in ranges))
    assert read < report.destinations[0].num_bytes * 0.75 or mib == 1


def test_an_upload_that_breaks_off_is_made_again_while_all_of_it_is_in_memory(bucket, proxy, tmp_path):
    place = bucket.place(endpoint=proxy.endpoint, retry_config={"max_retries": 0})
    proxy.cut_request(MIB, times=1, kind="upload_part", target=r"partNumber=2\b")
    out = Appender(place.storage(), "x", limit_bytes=1 << 30)
    data = noise(30 * MIB)
    out.append(memoryview(data))
    out.finish()

    assert out.sink.num_retries == 1
    assert bucket.read("x") == data
    assert bucket.uploads() == []


def test_an_upload_that_is_too_far_to_be_made_again_fails_and_leaves_no_trace(bucket, proxy):
    place = bucket.place("x.tar.zst", endpoint=proxy.endpoint, retry_config={"max_retries": 0})
    proxy.cut_request(MIB, kind="upload_part", target=r"partNumber=12\b")
    lost = proxy.answer("InternalError", kind="abort_multipart_upload", times=1)
    state = {"a": torch.frombuffer(bytearray(noise(120 * MIB)), dtype=torch.uint8)}
    bucket.write(["x.tar.zst"], b"of before")
    handle = save(state, place)
    with pytest.raises(StorageUnavailableError, match="another save needed the memory"):
        handle.result()

    assert lost.hits == 1
    assert bucket.read("x.tar.zst") == b"of before"
    assert bucket.uploads() == []
    until(lambda: not appenders())


def test_memory_that_somebody_waits_for_comes_back_in_the_moment_in_which_a_part_has_been_sent(bucket, proxy):
    storage = bucket.place(endpoint=proxy.endpoint).storage()
    held = proxy.delay(None, kind="upload_part")
    segments = Segments(4, segment_bytes=8 * MIB)
    sink = storage.create("x", num_bytes=segments.num_bytes, segment_bytes=8 * MIB, max_segments=4)
    for number in range(3):
        view, lease = segments.lease(number)
        sink.write(number * 8 * MIB, view, lease)
        lease.release()
    held.wait()
    assert not sink.relieve()  # all of it is being sent
    assert segments.num_lent == 3
    held.clear()
    until(lambda: segments.num_lent == 2)  # and nobody has asked again
    segments.write(sink, 3)
    sink.finish()

    assert not sink.retryable
    assert bucket.read("x") == b"".join(segments.data)


def test_an_object_that_is_given_up_in_the_middle_of_its_upload_leaves_no_trace(bucket, proxy):
    storage = bucket.place(endpoint=proxy.endpoint).storage()
    held = proxy.delay(None, kind="upload_part", target=r"partNumber=2\b")
    out = Appender(storage, "x", limit_bytes=1 << 30)
    call = Call(lambda: [out.append(memoryview(noise(MIB))) for _ in range(150)])
    held.wait()
    out.fail(Thrown("given up"))
    with pytest.raises(Thrown):
        call.outcome()
    held.clear()
    out.abort()

    assert bucket.keys() == []
    assert bucket.uploads() == []
    until(lambda: ", 0 of " in repr(out._pool))


def test_a_file_for_which_no_thread_is_left_is_given_up_with_that_error(tmp_path, monkeypatch):
    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    out = Appender(LocalStorage(tmp_path), "x", limit_bytes=1 << 20)
    out.append(memoryview(b"some"))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        with pytest.raises(RuntimeError, match="needs another thread: can't start new thread; if this process"):
            out.finish()
    out.abort()

    assert [*tmp_path.iterdir()] == []
