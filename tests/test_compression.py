"""Archives compressed on their way: frames that any reader of zstd knows, and a table by which ranges are read."""

from __future__ import annotations

import gc
import hashlib
import itertools
import os
import random
import shutil
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from archives import flip, little_memory
from hypothesis import given, settings
from hypothesis import strategies as st
from racing import PATIENCE, Call, Thrown, until
from scripted_disk import ScriptedStorage
from states import MIB, assert_is_state, difference, state_at
from test_local_storage import mounted, needs_mount
from test_stores import _botocore_reads_its_files_once, bucket, proxy, through  # noqa: F401

import async_ckpt
from async_ckpt import (
    CorruptCheckpointError,
    StorageFullError,
    StorageUnavailableError,
    Zstd,
    extract,
    load,
    pack_folder,
    save,
    unpack,
)
from async_ckpt.format.zstd import FOOTER_BYTES, Frame, begins, dump, parse, table_bytes
from async_ckpt.host.pool import Lease, SegmentPool
from async_ckpt.storage.append import Appender
from async_ckpt.storage.compressed import ZstdReader, ZstdSink
from async_ckpt.storage.local import LocalStorage
from async_ckpt.storage.place import storage_at

zstandard = pytest.importorskip("zstandard")
BLOCK = 4 * MIB
needs_zstd = pytest.mark.skipif(shutil.which("zstd") is None, reason="zstd is not installed")
needs_tar = pytest.mark.skipif(
    shutil.which("tar") is None or shutil.which("zstd") is None, reason="tar or zstd is not installed"
)


def noise(num_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


def frames_of(path: Path) -> list[Frame]:
    """What the table of a file says."""
    data = path.read_bytes()
    length = table_bytes(data[-FOOTER_BYTES:])
    return parse(data[-length:], data_bytes=len(data) - length)


def big_state() -> dict[str, Any]:
    """Several segments; half of it gets smaller, half does not."""
    noisy = torch.frombuffer(bytearray(noise(36 * MIB)), dtype=torch.uint8)
    return {
        "model": {"noisy": noisy, "bias": torch.arange(5.0)},
        "optimizer": {"zeros": torch.zeros(12 * MIB), "step": 3},
    }


# --- the table -------------------------------------------------------------------------------------------------

sizes = st.lists(
    st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)).map(lambda s: Frame(*s)), max_size=30
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


@pytest.mark.parametrize("table", [b"", b"x", bytes(9), bytes(17), dump([Frame(1, 2)])[1:], dump([])[:-1]])
def test_what_is_no_table_is_said_to_be_none(table):
    with pytest.raises(ValueError, match="seek table"):
        parse(table, data_bytes=1)


def test_a_table_of_other_frames_is_refused():
    with pytest.raises(ValueError, match="other frames than there are"):
        parse(dump([Frame(10, 20)]), data_bytes=11)


def test_only_what_begins_with_a_frame_is_taken_for_zstd():
    assert begins(zstandard.compress(b"x"))
    assert begins(dump([]))
    for data in (b"", b"\x28", b"\x28\xb5\x2f", b"PK\x03\x04", b"\x5e\x2a\x4d", bytes(8)):
        assert not begins(data)


# --- saves -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x.tar.zst", "x.tar"])
def test_a_compressed_save_comes_back_bit_for_bit(tmp_path, name):
    state = big_state()
    report = save(state, tmp_path / name, compression=None if name.endswith("zst") else "zstd").result()

    assert difference(load(tmp_path / name), state) is None
    assert difference(load(tmp_path / name, verify=False), state) is None
    written = (tmp_path / name).stat().st_size
    assert report.destinations[0].num_bytes == written
    assert written < report.num_bytes * 3 / 4
    assert report.num_bytes > 84 * MIB
    assert not report.destinations[0].retryable
    assert os.listdir(tmp_path) == [name]


@needs_zstd
def test_what_is_compressed_is_the_archive_itself_digests_and_all(tmp_path):
    state = big_state()
    report = save(state, tmp_path / "x.tar.zst").result()
    subprocess.run(["zstd", "-dq", str(tmp_path / "x.tar.zst")], check=True)
    subprocess.run(["zstd", "-tq", str(tmp_path / "x.tar.zst")], check=True)

    assert (tmp_path / "x.tar").stat().st_size == report.num_bytes
    assert difference(load(tmp_path / "x.tar"), state) is None


@needs_tar
def test_tar_and_safetensors_read_it_without_this_library(tmp_path):
    from safetensors.torch import load_file

    state = big_state()
    save(state, tmp_path / "x.tar.zst").result()
    subprocess.run(["tar", "--zstd", "-xf", "x.tar.zst", "model.safetensors"], check=True, cwd=tmp_path)

    assert torch.equal(load_file(tmp_path / "model.safetensors")["noisy"], state["model"]["noisy"])


def test_extract_gives_back_the_members_of_a_compressed_save(tmp_path):
    save(big_state(), tmp_path / "x.tar.zst").result()
    with unpack(tmp_path / "x.tar.zst") as folder:
        assert {"index.json", "model.safetensors", "optimizer.safetensors", "digests.json"} <= set(
            os.listdir(folder)
        )


def test_every_frame_is_one_digest_block_by_itself(tmp_path):
    report = save(big_state(), tmp_path / "x.tar.zst").result()
    frames, data = frames_of(tmp_path / "x.tar.zst"), (tmp_path / "x.tar.zst").read_bytes()

    assert [frame.uncompressed for frame in frames[:-1]] == [BLOCK] * (len(frames) - 1)
    assert sum(frame.uncompressed for frame in frames) == report.num_bytes
    begins_at = [0, *itertools.accumulate(frame.compressed for frame in frames)]
    for number in (len(frames) - 1, 3):
        frame = data[begins_at[number] : begins_at[number + 1]]
        assert len(zstandard.decompress(frame)) == frames[number].uncompressed
        assert zstandard.get_frame_parameters(frame).has_checksum


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_however_many_threads_the_bytes_are_the_same(tmp_path, threads):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a").write_bytes(noise(50 * MIB) + bytes(50 * MIB))
    for name, how in (("x", Zstd(threads=threads)), ("y", Zstd(threads=1))):
        pack_folder(folder, tmp_path / name, compression=how).result()

    assert digest(tmp_path / "x") == digest(tmp_path / "y")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_higher_level_makes_it_smaller(tmp_path):
    words = [b"weight", b"bias", b"layer", b"norm", b"attention", b"step"]
    text = b" ".join(random.Random(0).choices(words, k=300_000))
    state = {"a": torch.frombuffer(bytearray(text), dtype=torch.uint8)}
    written = []
    for level in (1, 19):
        save(state, tmp_path / "x.tar", compression=Zstd(level=level)).result()
        written.append((tmp_path / "x.tar").stat().st_size)
        assert difference(load(tmp_path / "x.tar"), state) is None

    assert written[1] < written[0] * 0.9


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Zstd(level=0), "from 1 to 22"),
        (lambda: Zstd(level=23), "from 1 to 22"),
        (lambda: Zstd(threads=0), "at least 1"),
        (lambda: save({}, "x.tar", compression="gzip"), "compression must be"),  # type: ignore[arg-type]
        (lambda: save({}, "x.tar", compression=3), "compression must be"),  # type: ignore[arg-type]
    ],
)
def test_what_makes_no_sense_is_refused_at_once(tmp_path, monkeypatch, make, why):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=why):
        make()
    assert os.listdir(tmp_path) == []


def test_without_the_package_it_is_said_what_to_install(tmp_path, monkeypatch):
    save({"a": 1}, tmp_path / "there.tar.zst").result()
    monkeypatch.setitem(sys.modules, "zstandard", None)
    for call in (
        lambda: save({"a": 1}, tmp_path / "x.tar.zst"),
        lambda: save({"a": 1}, tmp_path / "x.tar", compression="zstd"),
        lambda: pack_folder(tmp_path, tmp_path.parent / "x.tar.zst"),
        lambda: extract(tmp_path / "there.tar.zst", tmp_path / "out"),
        lambda: load(tmp_path / "there.tar.zst"),
    ):
        with pytest.raises(ImportError, match=r"pip install \"async_ckpt\[zstd\]\""):
            call()
    assert os.listdir(tmp_path) == ["there.tar.zst"]


def test_a_guarded_save_through_a_pool_that_is_too_small_for_it_ends(tmp_path, monkeypatch):
    """What is held until its turn must not keep memory from what comes before it."""
    monkeypatch.setattr(
        "async_ckpt.saving.default._one_off_saver",
        async_ckpt.saving.saver.Saver(host_bytes=16 * MIB, segment_bytes=BLOCK),
    )
    parameters = [torch.nn.Parameter(torch.randn(MIB)) for _ in range(12)]
    optimizer = torch.optim.SGD(parameters)
    state = {"parameters": parameters, "small": [torch.randn(1000) for _ in range(2000)]}
    for _ in range(3):
        handle = save(state, tmp_path / "x.tar.zst", guard=optimizer)
        expected = [parameter.detach().clone() for parameter in parameters]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        handle.result()
        loaded = load(tmp_path / "x.tar.zst")["parameters"]
        assert all(torch.equal(a, b) for a, b in zip(loaded, expected, strict=True))


@needs_mount
def test_a_disk_that_runs_full_fails_the_save_and_leaves_the_earlier_one(tmp_path):
    with mounted(tmp_path / "small", "size=24m") as small:
        save(state_at(1), small / "x.tar.zst").result()
        error = save(big_state(), small / "x.tar.zst").exception()
        assert isinstance(error, StorageFullError)
        assert os.listdir(small) == ["x.tar.zst"]
        assert_is_state(load(small / "x.tar.zst"), 1)
        save(state_at(2), small / "x.tar.zst").result()


# --- loading ---------------------------------------------------------------------------------------------------


class Counted:
    """A real reader that counts what is asked of it."""

    def __init__(self, reader: Any) -> None:
        self._reader, self.num_bytes, self.asked = reader, reader.num_bytes, 0

    def read_into(self, offset: int, target: memoryview) -> None:
        self.asked += len(target)
        self._reader.read_into(offset, target)

    def close(self) -> None:
        self._reader.close()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30 * MIB), st.integers(0, 9 * MIB)), min_size=1, max_size=6))
def test_any_range_is_read_and_only_the_frames_that_it_touches(tmp_path_factory, ranges):
    path, data = compressed_file(tmp_path_factory)
    counted = Counted(LocalStorage(path.parent).open(path.name))
    with ZstdReader(counted, str(path)) as reader:
        assert reader.num_bytes == len(data)
        frames = frames_of(path)
        for offset, length in ranges:
            offset, length = min(offset, len(data)), min(length, len(data) - min(offset, len(data)))
            before, target = counted.asked, bytearray(length)
            reader.read_into(offset, memoryview(target))
            assert target == data[offset : offset + length]
            touched = frames[offset // BLOCK : -(-(offset + length) // BLOCK)] if length else []
            assert counted.asked - before <= sum(frame.compressed for frame in touched)
        with pytest.raises(EOFError, match="ends at byte"):
            reader.read_into(len(data), memoryview(bytearray(1)))


_files: list[tuple[Path, bytes]] = []


def compressed_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """Made once: a file of 8 frames."""
    if not _files:
        folder = tmp_path_factory.mktemp("compressed")
        data = noise(15 * MIB) + bytes(14 * MIB + 99)
        blocks = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]
        made = [zstandard.compress(part) for part in blocks]
        frames = [Frame(len(a), len(b)) for a, b in zip(made, blocks, strict=True)]
        (folder / "x").write_bytes(b"".join(made) + dump(frames))
        _files.append((folder / "x", data))
    return _files[0]


def test_many_threads_read_at_once(tmp_path_factory):
    path, data = compressed_file(tmp_path_factory)
    with ZstdReader(LocalStorage(path.parent).open(path.name), str(path)) as reader:

        def read(seed: int) -> None:
            for _ in range(20):
                offset = random.Random(seed).randrange(len(data) - MIB)
                target = bytearray(MIB)
                reader.read_into(offset, memoryview(target))
                assert target == data[offset : offset + MIB]

        for call in [Call(lambda seed=seed: read(seed)) for seed in range(8)]:  # type: ignore[misc]
            call.outcome()


def test_a_part_is_loaded_by_reading_a_part(tmp_path):
    state = big_state()
    save(state, tmp_path / "x.tar.zst").result()
    flip(tmp_path / "x.tar.zst", 20 * MIB)  # in a frame of the model's

    assert (
        difference(load(tmp_path / "x.tar.zst", select="optimizer")["optimizer"], state["optimizer"]) is None
    )
    assert torch.equal(load(tmp_path / "x.tar.zst", select="model.bias")["model"]["bias"], torch.arange(5.0))
    with pytest.raises(CorruptCheckpointError, match=r"frame \d is damaged"):
        load(tmp_path / "x.tar.zst", select="model")


def test_a_map_of_a_compressed_file_is_refused_whatever_its_name(tmp_path):
    save(state_at(1), tmp_path / "x.tar", compression="zstd").result()
    with pytest.raises(ValueError, match="compressed; leave it out"):
        load(tmp_path / "x.tar", mmap=True)


@needs_zstd
@pytest.mark.parametrize("how", [(), ("-T2",), ("--no-check",), ("--long",)])
def test_what_another_program_has_compressed_is_extracted_and_not_loaded(tmp_path, how):
    save(state_at(1, 9), tmp_path / "x.tar").result()
    subprocess.run(["zstd", "-q", *how, "--rm", str(tmp_path / "x.tar")], check=True)
    with pytest.raises(CorruptCheckpointError, match="compressed by another program: then use unpack"):
        load(tmp_path / "x.tar.zst")
    with unpack(tmp_path / "x.tar.zst") as folder:
        assert "model.safetensors" in os.listdir(folder)


def test_a_file_by_another_writer_whose_table_has_checksums_is_loaded(tmp_path):
    save(state_at(1, 9), tmp_path / "plain.tar").result()
    data = (tmp_path / "plain.tar").read_bytes()
    blocks = [data[at : at + MIB] for at in range(0, len(data), MIB)]
    made = [zstandard.compress(part) for part in blocks]
    entries = b"".join(struct.pack("<III", len(a), len(b), 7) for a, b in zip(made, blocks, strict=True))
    table = struct.pack("<II", 0x184D2A5E, len(entries) + 9) + entries
    table += struct.pack("<IBI", len(made), 0x80, 0x8F92EAB1)
    (tmp_path / "x.tar.zst").write_bytes(b"".join(made) + table)

    assert_is_state(load(tmp_path / "x.tar.zst"), 1, 9)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    save(state_at(1, 9), tmp_path / "x.tar.zst").result()
    return tmp_path / "x.tar.zst"


def test_a_compressed_archive_that_is_cut_off_is_damage_wherever_the_cut_is(small):
    whole = small.read_bytes()
    table = table_bytes(whole[-FOOTER_BYTES:])
    cuts = {0, 1, 3, 4, 5, 1000, len(whole) - table, *range(len(whole) - table - 3, len(whole))}
    for cut in cuts:
        small.write_bytes(whole[:cut])
        with pytest.raises(CorruptCheckpointError):
            load(small)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(0, 255), st.booleans())
def test_a_compressed_archive_with_a_wrong_byte_loads_exactly_or_is_damage(
    tmp_path_factory, at, value, at_end
):
    if not _smalls:
        path = tmp_path_factory.mktemp("small") / "x.tar.zst"
        save(state_at(1, 1), path).result()
        _smalls.append(path.read_bytes())
    data = bytearray(_smalls[0])
    data[-1 - at % 200 if at_end else at % len(data)] = value
    path = tmp_path_factory.mktemp("bad") / "x.tar.zst"
    path.write_bytes(data)
    try:
        state = load(path)
    except CorruptCheckpointError:
        return
    assert_is_state(state, 1, 1)


_smalls: list[bytes] = []


def test_a_table_that_lies_is_found_out_before_memory_is_taken(small):
    whole = small.read_bytes()
    frames = frames_of(small)
    body = whole[: -table_bytes(whole[-FOOTER_BYTES:])]
    lies = {
        "more than a frame can hold": [Frame(f.compressed, 2 * BLOCK) for f in frames],
        "nothing in a frame": [*frames, Frame(0, BLOCK)],
        "much in very little": [Frame(len(body) - 10 * 120, BLOCK), *[Frame(120, BLOCK)] * 10],
        "an empty frame": [*frames, Frame(0, 0)],
        "many": [*frames, *[Frame(0, BLOCK)] * 100_000],
    }
    for lie in lies.values():
        small.write_bytes(body + dump(lie))
        with LocalStorage(small.parent).open(small.name) as file, pytest.raises(CorruptCheckpointError):
            ZstdReader(file, str(small))
    for lie in ([], [Frame(len(body), BLOCK)], [frames[-1], *frames[:-1]]):
        small.write_bytes(body + dump(lie))
        with little_memory(), pytest.raises(CorruptCheckpointError):
            load(small)


def test_a_frame_that_holds_another_size_than_the_table_says_is_damage(small):
    frames = [zstandard.compress(b"x" * n) for n in (BLOCK, 512)]
    swapped = [Frame(len(frames[0]), BLOCK - 1), Frame(len(frames[1]), 513)]
    small.write_bytes(b"".join(frames) + dump(swapped))
    with pytest.raises(
        CorruptCheckpointError, match="a frame holds 4,194,304 bytes where the seek table says"
    ):
        load(small)


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


def sink_for(storage: Any, segments: Segments, **how: Any) -> ZstdSink:
    return ZstdSink(
        storage,
        "x.zst",
        num_bytes=segments.num_bytes,
        segment_bytes=segments.segment_bytes,
        how=Zstd(**how),
    )


def assert_whole(path: Path, segments: Segments) -> None:
    data = path.read_bytes()
    out = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
    assert out == b"".join(segments.data)
    with ZstdReader(LocalStorage(path.parent).open(path.name), str(path)) as reader:
        assert reader.num_bytes == segments.num_bytes


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(9)), st.integers(1, 4))
def test_segments_in_any_order_are_in_file_order_in_the_object(tmp_path_factory, order, threads):
    folder, segments = tmp_path_factory.mktemp("sink"), Segments(9, segment_bytes=64 * 1024)
    sink = sink_for(LocalStorage(folder), segments, threads=threads)
    for number in order:
        segments.write(sink, number)
    sink.finish()
    sink.close()

    assert segments.num_lent == 0
    assert_whole(folder / "x.zst", segments)


@pytest.mark.parametrize("threads", [1, 3, 16])
def test_segments_by_many_threads_at_once_are_each_there_once(tmp_path, threads):
    for attempt in range(5):
        segments = Segments(60, segment_bytes=128 * 1024)
        sink = sink_for(LocalStorage(tmp_path), segments, threads=threads)
        numbers = list(range(60))
        random.Random(attempt).shuffle(numbers)
        todo, lock = iter(numbers), threading.Lock()

        def work(
            sink: ZstdSink = sink, segments: Segments = segments, todo: Any = todo, lock: Any = lock
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
    assert len(sink._ready) <= 2 * 2
    assert segments.num_lent == 19 - len(sink._ready)
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
    compress, taken = ZstdSink._compress, []
    first, go_on = threading.Event(), threading.Event()

    def stopping(self: ZstdSink, number: int, *rest: Any) -> None:
        taken.append(number)
        if not first.is_set():
            first.set()
            assert go_on.wait(PATIENCE)
        compress(self, number, *rest)

    monkeypatch.setattr(ZstdSink, "_compress", stopping)
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


def test_no_more_threads_compress_at_once_than_told(tmp_path, monkeypatch):
    segments = Segments(24, segment_bytes=256 * 1024)
    sink = sink_for(LocalStorage(tmp_path), segments, threads=2)
    compress, inside, most, lock = ZstdSink._compress, 0, 0, threading.Lock()

    def counted(self: ZstdSink, *taken: Any) -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        compress(self, *taken)
        with lock:
            inside -= 1

    monkeypatch.setattr(ZstdSink, "_compress", counted)
    for call in [Call(lambda n=n: segments.write(sink, n)) for n in range(24)]:  # type: ignore[misc]
        call.outcome()
    sink.finish()
    sink.close()
    assert most <= 3  # one may be on its way out


def test_an_object_that_lacks_a_segment_cannot_be_finished_and_leaves_no_trace(tmp_path):
    segments = Segments(4, segment_bytes=64 * 1024)
    sink = sink_for(LocalStorage(tmp_path), segments)
    for number in (0, 1, 3):
        segments.write(sink, number)
    with pytest.raises(RuntimeError, match="segments arrived of 4"):
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


def appenders() -> int:
    return sum("append" in thread.name for thread in threading.enumerate())


def test_when_it_is_given_up_elsewhere_what_is_held_comes_back_and_nothing_more_is_taken(tmp_path):
    segments = Segments(6, segment_bytes=64 * 1024)
    sink = sink_for(LocalStorage(tmp_path), segments, threads=1)
    for number in (5, 4, 3, 2):
        segments.write(sink, number)
    assert segments.num_lent > 0
    sink.give_up()
    assert segments.num_lent == 0
    with pytest.raises(RuntimeError, match="given up"):
        segments.write(sink, 0)
    assert segments.num_lent == 0
    sink.give_up()
    sink.abort()
    assert os.listdir(tmp_path) == []


def test_given_up_while_a_segment_is_compressed_it_ends(tmp_path, monkeypatch):
    segments = Segments(6, segment_bytes=64 * 1024)
    sink = sink_for(LocalStorage(tmp_path), segments, threads=1)
    compress, inside, go_on = ZstdSink._compress, threading.Event(), threading.Event()

    def stopping(self: ZstdSink, *taken: Any) -> None:
        inside.set()
        assert go_on.wait(PATIENCE)
        compress(self, *taken)

    monkeypatch.setattr(ZstdSink, "_compress", stopping)
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
@pytest.mark.parametrize("mib", [1, 30])
def test_a_compressed_save_goes_to_a_bucket_and_is_loaded_by_ranges(bucket, proxy, engine, mib):  # noqa: F811
    options = {"storage_options": through(proxy, bucket), "engine": engine}
    noisy = torch.frombuffer(bytearray(noise(mib * MIB)), dtype=torch.uint8)
    state = {"model": {"noisy": noisy, "other": noisy.flip(0)}, "small": {"bias": torch.arange(7.0)}}
    report = save(state, bucket.url("runs/x.tar.zst"), **options).result()

    assert report.destinations[0].num_bytes == len(bucket.read("runs/x.tar.zst"))
    assert bucket.keys() == ["runs/x.tar.zst"]
    assert bucket.uploads() == []
    assert difference(load(bucket.url("runs/x.tar.zst"), **options), state) is None
    before = len(proxy.requests)
    part = load(bucket.url("runs/x.tar.zst"), select="small", **options)
    assert torch.equal(part["small"]["bias"], state["small"]["bias"])
    ranges = [r.headers["range"] for r in proxy.requests[before:] if r.kind == "get_object"]
    read = sum(
        int(end) - int(begin) + 1 for begin, end in (r.removeprefix("bytes=").split("-") for r in ranges)
    )
    assert read < report.destinations[0].num_bytes * 0.75 or mib == 1


def test_an_upload_that_breaks_off_is_made_again_while_all_of_it_is_in_memory(bucket, proxy, tmp_path):  # noqa: F811
    given = through(proxy, bucket, retry_config={"max_retries": 0})
    proxy.cut_request(MIB, times=1, kind="upload_part", target=r"partNumber=2\b")
    out = Appender(storage_at(bucket.url(), storage_options=given), "x", limit_bytes=1 << 30)
    data = noise(30 * MIB)
    out.append(memoryview(data))
    out.finish()

    assert out.sink.num_retries == 1
    assert bucket.read("x") == data
    assert bucket.uploads() == []


def test_an_upload_that_is_too_far_to_be_made_again_fails_and_leaves_no_trace(bucket, proxy):  # noqa: F811
    given = through(proxy, bucket, retry_config={"max_retries": 0})
    proxy.cut_request(MIB, kind="upload_part", target=r"partNumber=12\b")
    lost = proxy.answer("InternalError", kind="abort_multipart_upload", times=1)
    state = {"a": torch.frombuffer(bytearray(noise(120 * MIB)), dtype=torch.uint8)}
    bucket.write(["x.tar.zst"], b"of before")
    handle = save(state, bucket.url("x.tar.zst"), storage_options=given)
    with pytest.raises(StorageUnavailableError, match="memory was needed elsewhere"):
        handle.result()

    assert lost.hits == 1
    assert bucket.read("x.tar.zst") == b"of before"
    assert bucket.uploads() == []
    until(lambda: not appenders())


def test_memory_that_somebody_waits_for_comes_back_in_the_moment_in_which_a_part_has_been_sent(bucket, proxy):  # noqa: F811
    storage = storage_at(bucket.url(), storage_options=through(proxy, bucket))
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


def test_an_object_that_is_given_up_in_the_middle_of_its_upload_leaves_no_trace(bucket, proxy):  # noqa: F811
    given = through(proxy, bucket)
    held = proxy.delay(None, kind="upload_part", target=r"partNumber=2\b")
    out = Appender(storage_at(bucket.url(), storage_options=given), "x", limit_bytes=1 << 30)
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


# --- nothing is left behind ------------------------------------------------------------------------------------


def test_many_compressed_saves_leave_no_thread_descriptor_or_memory_behind(tmp_path):
    state = state_at(1, 9)

    def some() -> None:
        for number in range(12):
            path = tmp_path / f"{number % 3}.tar.zst"
            save(state, path).result()
            assert_is_state(load(path), 1, 9)
            path.write_bytes(path.read_bytes()[:-20])
            with pytest.raises(CorruptCheckpointError):
                load(path)
        gc.collect()
        until(lambda: not appenders())

    def counts() -> tuple[int, int]:
        fds = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
        return fds, threading.active_count()

    some()
    before = counts()
    some()
    after = counts()
    assert after[0] <= before[0]
    assert after[1] <= before[1] + 2  # crews grow up to their sizes
