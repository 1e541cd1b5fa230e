"""Archives compressed on their way: saved, read by any reader of zstd, and loaded by ranges."""

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
from disks import mounted, needs_mount
from hypothesis import given, settings
from hypothesis import strategies as st
from racing import PATIENCE, Call, appenders, until
from slices import examples
from states import MIB, assert_is_state, difference, noise, state_at

import async_ckpt
from async_ckpt import CorruptCheckpointError, StorageFullError, Zstd, load, save, unpack
from async_ckpt.core.format.zstd import FOOTER_BYTES, ZstdFrame, dump, parse, table_bytes
from async_ckpt.core.saving.planner import pool_for
from async_ckpt.core.storage.compressed import ZstdReader
from async_ckpt.core.storage.local import LocalStorage
from async_ckpt.files import extract, pack_folder

zstandard = pytest.importorskip("zstandard")
BLOCK = 4 * MIB
needs_zstd = pytest.mark.skipif(shutil.which("zstd") is None, reason="zstd is not installed")
needs_tar = pytest.mark.skipif(
    shutil.which("tar") is None or shutil.which("zstd") is None, reason="tar or zstd is not installed"
)


def frames_of(path: Path) -> list[ZstdFrame]:
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
        assert {"index.json", "model.safetensors", "optimizer.safetensors", "digests.json"} <= set(os.listdir(folder))


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
        (lambda: Zstd(level=0), "at least 1"),
        (lambda: Zstd(level=23), "from 1 to 22"),
        (lambda: Zstd(threads=0), "at least 1"),
        (lambda: Zstd(level=True), "level must be a whole number, at least 1, got True"),
        (lambda: Zstd(threads=2.5), "threads must be a whole number, at least 1, got 2.5; leave it out"),
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
        "async_ckpt.core.saving.kept_memory._shared.one_off",
        async_ckpt.core.saving.saver.Saver(pool_for(BLOCK, 16 * MIB)),
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


def test_a_guarded_save_whose_first_segments_would_come_later_than_a_small_pool_can_wait_ends(tmp_path, monkeypatch):
    """What is copied at once fills the pool, and a compressor holds it until what comes before it is there."""
    monkeypatch.setattr(
        "async_ckpt.core.saving.kept_memory._shared.one_off",
        async_ckpt.core.saving.saver.Saver(pool_for(BLOCK, 16 * MIB)),
    )
    parameter = torch.nn.Parameter(torch.randn(3 * MIB))  # three segments
    state = {"a": parameter, "b": torch.randn(16 * MIB)}
    call = Call(lambda: save(state, tmp_path / "x.tar.zst", guard=torch.optim.SGD([parameter])))
    assert call.outcome().result(PATIENCE).num_bytes > 76 * MIB
    loaded = load(tmp_path / "x.tar.zst")
    assert torch.equal(loaded["a"], parameter)
    assert torch.equal(loaded["b"], state["b"])


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


@settings(max_examples=examples(40), deadline=None)
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
        frames = [ZstdFrame(len(a), len(b)) for a, b in zip(made, blocks, strict=True)]
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

    assert difference(load(tmp_path / "x.tar.zst", select="optimizer")["optimizer"], state["optimizer"]) is None
    assert torch.equal(load(tmp_path / "x.tar.zst", select="model.bias")["model"]["bias"], torch.arange(5.0))
    with pytest.raises(
        CorruptCheckpointError,
        match=r"block \d .* does not match its digest; damaged: model.safetensors with model.noisy",
    ):
        load(tmp_path / "x.tar.zst", select="model")


def test_a_map_of_a_compressed_file_is_refused_whatever_its_name(tmp_path):
    save(state_at(1), tmp_path / "x.tar", compression="zstd").result()
    with pytest.raises(ValueError, match="compressed or extracted; leave mmap out"):
        load(tmp_path / "x.tar", mmap=True)


@needs_zstd
@pytest.mark.parametrize("how", [(), ("-T2",), ("--no-check",), ("--long",)])
def test_what_another_program_has_compressed_is_extracted_and_not_loaded(tmp_path, how):
    save(state_at(1, 9), tmp_path / "x.tar").result()
    subprocess.run(["zstd", "-q", *how, "--rm", str(tmp_path / "x.tar")], check=True)
    with pytest.raises(CorruptCheckpointError, match="another program has compressed it: then use unpack"):
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


@settings(max_examples=examples(80), deadline=None)
@given(st.integers(0, 1 << 30), st.integers(0, 255), st.booleans())
def test_a_compressed_archive_with_a_wrong_byte_loads_exactly_or_is_damage(tmp_path_factory, at, value, at_end):
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
        "more than a frame can hold": [ZstdFrame(f.compressed, 2 * BLOCK) for f in frames],
        "nothing in a frame": [*frames, ZstdFrame(0, BLOCK)],
        "much in very little": [ZstdFrame(len(body) - 10 * 120, BLOCK), *[ZstdFrame(120, BLOCK)] * 10],
        "an empty frame": [*frames, ZstdFrame(0, 0)],
        "many": [*frames, *[ZstdFrame(0, BLOCK)] * 100_000],
    }
    for lie in lies.values():
        small.write_bytes(body + dump(lie))
        with LocalStorage(small.parent).open(small.name) as file, pytest.raises(CorruptCheckpointError):
            ZstdReader(file, str(small))
    for lie in ([], [ZstdFrame(len(body), BLOCK)], [frames[-1], *frames[:-1]]):
        small.write_bytes(body + dump(lie))
        with little_memory(), pytest.raises(CorruptCheckpointError):
            load(small)


def test_a_frame_that_holds_another_size_than_the_table_says_is_damage(small):
    frames = [zstandard.compress(b"x" * n) for n in (BLOCK, 512)]
    swapped = [ZstdFrame(len(frames[0]), BLOCK - 1), ZstdFrame(len(frames[1]), 513)]
    small.write_bytes(b"".join(frames) + dump(swapped))
    with pytest.raises(
        CorruptCheckpointError, match=r"block 0 is damaged .it contains 4,194,304 bytes, but the table says"
    ):
        load(small)


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
