"""`verify` reads every byte of an archive, a step or a run, and says what is sound or names what is not."""

import bz2
import gzip
import io
import json
import math
import os
import pickle
import re
import shutil
import signal
import tarfile
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from archives import flip, forge_manifest, parsed_index
from buckets import through
from damage import STATE
from rank_oracle import run_of
from states import assert_is_state, difference, noise, open_run, save_into, state_at

import async_ckpt
from async_ckpt import (
    CorruptCheckpointError,
    ForeignFileError,
    FormatVersionError,
    Keep,
    NotCommittedError,
    Place,
    StorageUnavailableError,
)
from async_ckpt.core.format import tar
from async_ckpt.core.loading import verify as verify_module
from async_ckpt.core.loading.catch_up import copy_step
from async_ckpt.core.loading.fill import READ_BYTES
from async_ckpt.core.report import VerifyReport
from async_ckpt.core.spec import BLOCK_BYTES, MIB
from async_ckpt.core.storage.local import LocalReader, LocalStorage


def large_state() -> dict[str, Any]:
    """Eleven blocks, each with a tensor of its own."""
    return {"model": {f"w{i}": torch.frombuffer(bytearray(noise(4 * MIB, i)), dtype=torch.uint8) for i in range(10)}}


@pytest.fixture
def large(archive: Path) -> Path:
    async_ckpt.save(large_state(), archive).result()
    return archive


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three steps."""
    with open_run(tmp_path / "run", keep=None) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(state_at(step), step=step)
    return tmp_path / "run"


def archive_in(root: Path, step: int) -> Path:
    (found,) = (root / f"step_{step:08d}").glob("rank_*.tar")
    return found


def refused(path: Any, match: str | None = None, **how: Any) -> CorruptCheckpointError:
    with pytest.raises(CorruptCheckpointError, match=match) as caught:
        async_ckpt.verify(path, **how)
    return caught.value


# --- what is sound -----------------------------------------------------------------------------------------------


def test_a_sound_archive_is_reported_with_all_its_bytes(large):
    report = async_ckpt.verify(large)

    assert (report.path, report.num_archives, report.steps, report.notes) == (str(large), 1, (), ())
    assert report.num_bytes == large.stat().st_size
    assert report.seconds > 0
    assert report.bandwidth == report.num_bytes / report.seconds


def test_a_sound_step_is_reported_with_its_number(run):
    report = async_ckpt.verify(run / "step_00000002")

    assert (report.num_archives, report.steps) == (1, (2,))
    assert report.num_bytes == archive_in(run, 2).stat().st_size


def test_every_step_of_a_sound_run_is_reported(run):
    report = async_ckpt.verify(run)

    assert (report.num_archives, report.steps, report.notes) == (3, (1, 2, 3), ())
    assert report.num_bytes == sum(archive_in(run, step).stat().st_size for step in (1, 2, 3))


def test_a_report_is_one_line_and_its_numbers_go_to_a_logger(run):
    report = VerifyReport("runs/a", 3, 4 * 10**9, 2.0, (1, 2, 3), ("the tracker latest names no step: ''",))

    assert str(report) == (
        "runs/a: 3 steps, 1 to 3, are sound, 4.00 GB read in 2.00 s at 2.00 GB/s; the tracker latest names no step: ''"
    )
    assert str(VerifyReport("x.tar", 1, 10**9, 1.0)).startswith("x.tar: the archive is sound, 1.00 GB")
    assert str(VerifyReport("x", 1, 10**9, 1.0, (7,))).startswith("x: step 7 is sound")
    assert report.as_dict("verify/") == {
        "verify/num_steps": 3.0, "verify/num_versions": 0.0, "verify/num_notes": 1.0, "verify/num_archives": 3.0, "verify/num_bytes": 4e9,
        "verify/seconds": 2.0, "verify/bandwidth": 2e9,
    }  # fmt: skip
    assert all(math.isfinite(number) for number in async_ckpt.verify(run).as_dict().values())
    with pytest.raises(AttributeError):
        report.num_bytes = 0  # type: ignore[misc]


def test_a_notebook_shows_the_line():
    shown: list[str] = []

    class Printer:
        text = staticmethod(shown.append)

    report = VerifyReport("x.tar", 1, 10**9, 1.0)
    report._repr_pretty_(Printer(), cycle=False)
    assert shown == [str(report)]


def test_no_object_is_unpickled_and_no_tensor_made(archive, monkeypatch):
    async_ckpt.save(STATE, archive).result()

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("not asked for")

    monkeypatch.setattr(torch, "load", fail)
    monkeypatch.setattr(torch, "empty", fail)
    monkeypatch.setattr("async_ckpt.core.loading.archives.contents.decode", fail)
    assert async_ckpt.verify(archive).num_archives == 1


# --- damage ------------------------------------------------------------------------------------------------------


def test_damage_in_any_block_is_found_and_its_tensors_are_named(large):
    told = parsed_index(large)
    for number in range(1, told.digests.data.offset // BLOCK_BYTES + 1):
        offset = min(number * BLOCK_BYTES + 1_234_567, told.digests.data.offset - 1)
        inside = {
            tensor.dotted
            for tensor in told.tensors
            for piece in tensor.slices
            if piece.extent.offset // BLOCK_BYTES <= number <= (piece.extent.end - 1) // BLOCK_BYTES
        }
        flip(large, offset)
        error = refused(large, f"block {number} .from byte {number * BLOCK_BYTES:,}. does not match")
        flip(large, offset)

        assert error.path == str(large)
        assert set(error.tensors) == inside
        assert all(name in str(error) for name in inside)


def test_every_damaged_block_is_named_by_one_error(large):
    for number in (9, 2, 5):
        flip(large, number * BLOCK_BYTES + 2 * MIB)
    error = refused(large, r"3 blocks \(the first from byte 8,388,608\) do not match.*model\.safetensors")

    assert {f"model.w{i}" for i in (1, 2, 4, 5, 8, 9)} == set(error.tensors)
    assert "and 1 more" in str(error)


def test_damage_where_the_index_lies_names_no_tensors(large):
    behind_its_text = parsed_index(large).members[0].data.offset - tar.BLOCK - 1
    flip(large, behind_its_text, ord(" ") ^ ord("\n"))
    assert refused(large, "the index is in it").tensors == ()


def test_an_archive_that_is_cut_short_while_it_is_read_is_refused(large, monkeypatch):
    class Cut(LocalReader):
        def read_into(self, offset: int, target: memoryview) -> None:
            if len(target) == READ_BYTES:
                os.truncate(large, 10 * MIB)
            super().read_into(offset, target)

    monkeypatch.setattr(LocalStorage, "open", lambda self, path: Cut(self.root / path))
    refused(large, "truncated")


def test_a_compressed_archive_is_verified_like_a_plain_one(tmp_path):
    path = tmp_path / "x.tar.zst"
    saved = async_ckpt.save(large_state(), path).result()

    assert async_ckpt.verify(path).num_bytes == saved.num_bytes
    flip(path, path.stat().st_size // 2)
    refused(path, "damaged|does not match")


def test_a_damaged_byte_of_a_small_compressed_archive_is_found_or_changes_nothing(tmp_path):
    path = tmp_path / "x.tar.zst"
    async_ckpt.save(STATE, path).result()
    found = 0
    for offset in range(path.stat().st_size):
        flip(path, offset, 1 << offset % 8)
        try:
            async_ckpt.verify(path)
        except CorruptCheckpointError:
            found += 1
        else:
            assert difference(async_ckpt.load(path), STATE) is None
        flip(path, offset, 1 << offset % 8)
    assert found > 0.9 * path.stat().st_size


def test_what_is_no_archive_and_no_file_of_a_known_kind_is_refused(tmp_path):
    for content in (b"", bytes(5000), noise(5000, 1), b"index.j"):
        (tmp_path / "x").write_bytes(content)
        refused(tmp_path / "x", r"not an async_ckpt archive|is empty")


# --- files of other programs -------------------------------------------------------------------------------------


def _packed(path: Path, **how: Any) -> None:
    with async_ckpt.pack(path, **how) as folder:
        (folder / "index.json").write_text(json.dumps({"weight_map": {"a": "b"}}))  # as our archives begin
        (folder / "weights.bin").write_bytes(noise(3 * MIB, 1))
    folder.handle.result()


def _zipped(path: Path) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in (("./a" + "x" * 150, noise(MIB, 1)), ("b", b"2")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def _compressed(path: Path) -> None:
    _packed(path.with_name("plain.tar"))
    path.write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(path.with_name("plain.tar").read_bytes()))


WEIGHTS = {"w": torch.arange(100_000.0)}
# Files of others that have checksums, the words for these, and whether they cover the middle of the file.
CHECKED: dict[str, tuple[Callable[[Path], object], str, bool]] = {
    "x.pt": (lambda path: torch.save(WEIGHTS, path), "a file of torch.save was checked by the CRC-32", True),
    "wrapped.pt": (lambda path: async_ckpt.wrap(torch.save)(WEIGHTS, path).result(), "a file of torch.save", True),
    "last.ckpt": (lambda path: torch.save({"state_dict": WEIGHTS, "epoch": 1}, path), "a file of torch.save", True),
    "script.pt": (lambda path: torch.jit.trace(torch.nn.Linear(300, 300), torch.ones(300)).save(path), "CRC-32", True),
    "x.npz": (
        lambda path: np.savez(path, a=np.arange(90_000.0)),
        "a file of another program was checked by the CRC-32",
        True,
    ),
    "small.npz": (lambda path: np.savez_compressed(path, a=np.arange(90_000.0)), "the CRC-32", True),
    "x.tar": (_packed, "headers .* with their checksums, but not the data", False),
    "x.tar.zst": (lambda path: _packed(path, compression="zstd"), "the data with the checksums of zstd", True),
    "by_zstd.tar.zst": (_compressed, "the data with the checksums of zstd", True),
    "x.tar.gz": (_zipped, "the data with the CRC-32 of gzip", True),
    "x.json.gz": (lambda path: path.write_bytes(gzip.compress(noise(9000, 2))), "with the CRC-32 of gzip", True),
}


@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TorchScript's
def test_a_sound_file_of_another_program_is_compared_with_its_own_checksums(tmp_path, name):
    write, said, has_all = CHECKED[name]
    path = tmp_path / name
    write(path)
    whole = path.read_bytes()

    report = async_ckpt.verify(path)
    assert (report.num_archives, report.num_bytes, report.steps) == (1, len(whole), ())
    assert re.search(said, str(report))
    with pytest.raises(ForeignFileError, match=r"not an async_ckpt archive: .*(reads it|use |decompress)") as caught:
        async_ckpt.load(path)
    assert not isinstance(caught.value, CorruptCheckpointError)
    assert caught.value.path == str(path)

    path.write_bytes(whole[: len(whole) * 2 // 3])
    refused(path)
    path.write_bytes(whole)
    flip(path, len(whole) // 2)
    if has_all:
        refused(path)
    else:
        assert async_ckpt.verify(path).notes == report.notes
    path.write_bytes(whole)
    if name == "x.tar":
        flip(path, 0)  # in the name of the first member
        refused(path)


UNCHECKED: dict[str, Callable[[Path], object]] = {
    "legacy.pt": lambda path: torch.save(WEIGHTS, path, _use_new_zipfile_serialization=False),
    "notes.txt": lambda path: path.write_text("the loss fell\n"),
    "config.json": lambda path: path.write_text(json.dumps({"layers": 2})),
    "x.npy": lambda path: np.save(path, np.ones(3)),
    "model.gguf": lambda path: path.write_bytes(b"GGUF\3\0\0\0" + bytes(64)),
    "pointer.bin": lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
    "x.pkl": lambda path: path.write_bytes(pickle.dumps({"a": 1})),
    "x.tar.bz2": lambda path: path.write_bytes(bz2.compress(b"abc")),
}


@pytest.mark.parametrize("name", UNCHECKED)
def test_a_file_of_another_program_without_checksums_is_neither_sound_nor_damaged(tmp_path, name):
    path = tmp_path / name
    UNCHECKED[name](path)
    for call, said in (
        (async_ckpt.verify, "and has no checksums to verify: this is"),
        (async_ckpt.load, "not an async_ckpt archive"),
    ):
        with pytest.raises(ForeignFileError, match=said) as caught:
            call(path)
        assert not isinstance(caught.value, CorruptCheckpointError)


def test_a_file_of_torch_that_was_saved_without_checksums_cannot_be_verified(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(WEIGHTS, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    with pytest.raises(ForeignFileError, match=r"has no checksums to verify: .*set_crc32_options"):
        async_ckpt.verify(tmp_path / "x.pt")


def test_an_archive_of_ours_is_damaged_and_of_no_other_program_however_it_is_cut_or_flipped(tmp_path):
    for name, how in (("x.tar", {}), ("x.tar.zst", {"compression": "zstd"})):
        path = tmp_path / name
        async_ckpt.save({"m": WEIGHTS}, path, **how).result()
        whole = path.read_bytes()
        for length in (0, 1, 5, 10, 11, 100, 511, 512, 530, 600, 2000, len(whole) - 20, len(whole) - 1):
            path.write_bytes(whole[:length])
            refused(path)
            with pytest.raises(CorruptCheckpointError):
                async_ckpt.load(path)
        for offset in range(0, 600, 7):
            path.write_bytes(whole)
            flip(path, offset)
            with pytest.raises((CorruptCheckpointError, FormatVersionError)):
                async_ckpt.load(path)


@pytest.mark.parametrize("path", ["missing.tar", "missing/x.tar", ""])
def test_where_nothing_is_committed_there_is_nothing_to_verify(tmp_path, path):
    with pytest.raises(NotCommittedError):
        async_ckpt.verify(tmp_path / path)


# --- steps and runs ----------------------------------------------------------------------------------------------


def test_no_damaged_byte_of_a_manifest_goes_unnoticed(run):
    path = run / "step_00000002" / "manifest.json"
    for offset in range(path.stat().st_size):
        flip(path, offset, 1 << offset % 8)
        refused(run / "step_00000002")
        flip(path, offset, 1 << offset % 8)
    async_ckpt.verify(run / "step_00000002")


def test_a_good_archive_of_another_attempt_is_not_taken_for_the_one_named(run):
    shutil.copy(archive_in(run, 1), archive_in(run, 2))
    refused(run / "step_00000002", "not the archive that its manifest names")


def test_a_run_with_one_damaged_step_is_read_to_its_end_and_the_others_are_called_sound(run):
    flip(archive_in(run, 1), 500_000)
    flip(archive_in(run, 2), 500_000)
    error = refused(run, r"damaged: step 1, step 2; sound: step 3\..*rank_00000")

    assert (error.path, error.damaged_steps, error.sound_steps) == (str(run), (1, 2), (3,))
    assert str(archive_in(run, 1)) in str(error.__cause__)
    (note,) = error.__notes__
    assert str(archive_in(run, 2)) in note


@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: next(folder.glob("*.tar")).unlink(),
        lambda folder: (folder / "manifest.json").write_bytes(b"{}"),
        lambda folder: os.truncate(next(folder.glob("*.tar")), 4096),
    ],
    ids=["its archive is missing", "its manifest is damaged", "its archive is cut short"],
)
def test_a_damaged_step_is_named_whatever_is_wrong_with_it(run, harm):
    harm(run / "step_00000002")
    error = refused(run)
    assert (error.damaged_steps, error.sound_steps) == ((2,), (1, 3))


def test_a_step_of_a_newer_version_is_no_damage_and_not_called_sound(run):
    forge_manifest(run / "step_00000002" / "manifest.json", version=99)
    with pytest.raises(FormatVersionError):
        async_ckpt.verify(run)
    flip(archive_in(run, 3), 500_000)
    error = refused(run)

    assert (error.damaged_steps, error.sound_steps) == ((3,), (1,))
    assert "version 99" in error.__notes__[0]


@pytest.fixture
def borrowing(tmp_path: Path) -> Path:
    """Three steps with a driver's state; the last two have borrowed `ref` from the first."""
    ref = large_state()["model"]
    with open_run(tmp_path / "run", keep=None) as ckpt:
        for step in (1, 2, 3):
            state = {"model": {"w": torch.full((5,), float(step))}, "ref": ref}
            ckpt.save(state, step=step, unchanged={"ref"}, driver={"step": step})
    return tmp_path / "run"


def test_archives_that_steps_share_and_those_of_drivers_are_read_once(borrowing, monkeypatch):
    asked: dict[Path, int] = {}

    class Counted(LocalReader):
        def read_into(self, offset: int, target: memoryview) -> None:
            if len(target) == READ_BYTES:
                asked[self._path] = asked.get(self._path, 0) + 1
            super().read_into(offset, target)

    monkeypatch.setattr(LocalStorage, "open", lambda self, path: Counted(self.root / path))
    whole, last = async_ckpt.verify(borrowing), async_ckpt.verify(borrowing / "step_00000003")

    assert whole.num_archives == len(list(borrowing.rglob("*.tar"))) == 6
    assert whole.num_bytes == sum(path.stat().st_size for path in borrowing.rglob("*.tar"))
    assert (last.steps, last.num_archives) == ((3,), 3)
    size = archive_in(borrowing, 1).stat().st_size
    assert asked == {archive_in(borrowing, 1): 2 * ((size - BLOCK_BYTES) // READ_BYTES)}


def test_damage_in_a_lender_is_damage_in_all_that_borrow_from_it(borrowing):
    flip(archive_in(borrowing, 1), 20 * MIB)
    error = refused(borrowing)
    assert (error.damaged_steps, error.sound_steps) == ((1, 2, 3), ())
    assert str(archive_in(borrowing, 1)) in str(refused(borrowing / "step_00000003"))


def test_a_missing_lender_is_damage(borrowing):
    shutil.rmtree(borrowing / "step_00000001")
    assert refused(borrowing, "is missing").damaged_steps == (2, 3)
    refused(borrowing / "step_00000003", "step_00000001.*is missing")


def test_a_lender_without_the_group_is_damage(borrowing):
    def lie(raw: dict[str, Any]) -> None:
        for row in raw["elsewhere"]:
            row["group"] = row["group"].replace("ref", "reference")

    forge_manifest(borrowing / "step_00000002" / "manifest.json", lie)
    assert refused(borrowing, "'reference' is in it, but it is not").damaged_steps == (2,)


def test_a_damaged_archive_of_a_driver_is_found(borrowing):
    (driver,) = (borrowing / "step_00000002").glob("driver.*.tar")
    flip(driver, driver.stat().st_size // 3)
    assert refused(borrowing, re.escape(driver.name)).damaged_steps == (2,)


def test_a_folder_that_is_not_committed_is_not_looked_at(run):
    (run / "step_00000004").mkdir()
    (run / "step_00000004" / "rank_00000.01234567.tar").write_bytes(b"x")
    assert async_ckpt.verify(run).steps == (1, 2, 3)


def test_a_step_that_a_rollback_has_taken_out_is_not_looked_at(run):
    with open_run(run, keep=None, on_rollback="retire") as ckpt:
        ckpt.save(state_at(2), step=2, overwrite=True).result()
    assert async_ckpt.verify(run).steps == (1, 2)


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("step_00000002\n", "the tracker latest names step 2, not the newest, 3"),
        ("step_00000009\n", "the tracker latest names step 9, which is not committed here"),
        ("\x00", r"the tracker latest names no step: '\x00'"),
    ],
)
def test_a_tracker_that_does_not_name_the_newest_step_is_noted(run, text, note):
    (run / "latest").write_text(text)
    report = async_ckpt.verify(run)
    assert report.notes == (note,)
    assert str(report).endswith(note)


def test_the_trackers_of_trainers_are_known_too(tmp_path):
    with open_run(tmp_path, naming="verl") as ckpt:
        ckpt.save(state_at(5), step=5)
    assert async_ckpt.verify(tmp_path).notes == ()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    assert "names step 4" in async_ckpt.verify(tmp_path).notes[0]


def test_steps_that_retention_deletes_meanwhile_are_passed_over(run, monkeypatch):
    class Overtaken(LocalStorage):
        def open(self, path: str) -> LocalReader:
            shutil.rmtree(run / "step_00000001", ignore_errors=True)
            return super().open(path)

    monkeypatch.setattr(verify_module, "storage_at", lambda path, **_: Overtaken(path))
    assert async_ckpt.verify(run).steps == (2, 3)


def test_a_run_whose_only_step_is_replaced_by_a_newer_one_is_looked_at_again(tmp_path, monkeypatch):
    def save(step: int) -> None:
        save_into(tmp_path, step, keep=Keep(last=1))

    class Overtaken(LocalStorage):
        def open(self, path: str) -> LocalReader:
            if "step_00000001" in path:
                saver = threading.Thread(target=save, args=(2,))
                saver.start()
                saver.join()
            return super().open(path)

    save(1)
    monkeypatch.setattr(verify_module, "storage_at", lambda path, **_: Overtaken(path))
    assert async_ckpt.verify(tmp_path).steps == (2,)


# --- how it reads ------------------------------------------------------------------------------------------------


class Reads:
    """What is asked of local files, and how many reads are under way at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_now = self.num_at_once = 0
        self.asked: list[tuple[int, int]] = []


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    told = Reads()

    class Counting(LocalReader):
        def read_into(self, offset: int, target: memoryview) -> None:
            with told.lock:
                told.num_now += 1
                told.num_at_once = max(told.num_at_once, told.num_now)
                told.asked.append((offset, len(target)))
            super().read_into(offset, target)
            with told.lock:
                told.num_now -= 1

    monkeypatch.setattr(LocalStorage, "open", lambda self, path: Counting(self.root / path))
    return told


def test_every_byte_is_read_once(large, reads):
    async_ckpt.verify(large)
    position = 0
    for offset, length in sorted(asked for asked in reads.asked if asked[1] > 1024):
        assert offset == position
        position += length
    assert position == large.stat().st_size


def test_an_index_of_many_blocks_is_read_once_too(archive, reads):
    async_ckpt.save({"text": ["x" * 1000 for _ in range(9000)], "w": torch.ones(5)}, archive).result()
    reads.asked.clear()
    async_ckpt.verify(archive)
    assert sum(length for _, length in reads.asked if length > 1024) == archive.stat().st_size


def test_a_large_archive_takes_no_more_memory_than_a_ring_of_buffers(archive, reads):
    state = {"w": torch.frombuffer(bytearray(noise(1 * MIB)), dtype=torch.uint8).repeat(200)}
    async_ckpt.save(state, archive).result()
    del state
    tracemalloc.start()
    try:
        async_ckpt.verify(archive)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 2 * BLOCK_BYTES
    assert reads.num_at_once <= 16
    assert max(length for _, length in reads.asked) == READ_BYTES


def test_an_interrupt_ends_it(large, monkeypatch):
    main = threading.main_thread()
    assert threading.current_thread() is main
    interrupted = threading.Lock()

    class Interrupting(LocalReader):
        def read_into(self, offset: int, target: memoryview) -> None:
            if threading.current_thread() is not main and interrupted.acquire(blocking=False):
                signal.pthread_kill(main.ident, signal.SIGINT)
            super().read_into(offset, target)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    monkeypatch.setattr(LocalStorage, "open", lambda self, path: Interrupting(self.root / path))
    try:
        with pytest.raises(KeyboardInterrupt):
            async_ckpt.verify(large)
    finally:
        signal.signal(signal.SIGINT, before)
    monkeypatch.undo()
    async_ckpt.verify(large)


# --- stores ------------------------------------------------------------------------------------------------------


def test_an_archive_of_a_store_is_read_once(bucket, proxy):
    given = through(proxy, bucket)
    saved = async_ckpt.save(large_state(), Place(bucket.url("x.tar"), options=given)).result()
    before = len(proxy.requests)
    report = async_ckpt.verify(Place(bucket.url("x.tar"), options=given))
    ranges = [request.headers["range"] for request in proxy.requests[before:] if request.kind == "get_object"]
    spans = sorted(tuple(map(int, re.findall(r"\d+", text))) for text in ranges)

    assert report.num_bytes == saved.num_bytes
    assert sum(end + 1 - begin for begin, end in spans if end - begin >= 1024) == saved.num_bytes


def test_a_run_of_a_store_is_verified_and_its_damage_found(bucket):
    with open_run(bucket.place("run"), keep=None) as ckpt:
        for step in (1, 2):
            ckpt.save(state_at(step), step=step)
    report = async_ckpt.verify(bucket.place("run"))
    assert (report.steps, report.path, report.notes) == ((1, 2), bucket.url("run"), ())
    assert async_ckpt.verify(bucket.place("run/step_00000001")).steps == (1,)

    (key,) = [key for key in bucket.keys() if "step_00000002/rank" in key]  # noqa: SIM118
    data = bytearray(bucket.read(key))
    data[500_000] ^= 1
    bucket.write([key], bytes(data))
    error = refused(bucket.place("run"))
    assert (error.damaged_steps, error.sound_steps) == ((2,), (1,))


@pytest.mark.parametrize("engine", ["obstore", "s3fs"])
def test_an_archive_of_a_store_that_is_replaced_while_it_is_read_is_an_error(bucket, proxy, engine):
    given = through(proxy, bucket)
    async_ckpt.save(large_state(), Place(bucket.url("x.tar"), options=given)).result()
    third = f"bytes={BLOCK_BYTES + READ_BYTES}-"
    held = proxy.delay(None, where=lambda request: third in request.headers.get("range", ""), times=1)

    def replace() -> None:
        held.wait()
        bucket.write(["x.tar"], b"y" * 50 * MIB)
        held.clear()

    replacing = threading.Thread(target=replace)
    replacing.start()
    with pytest.raises((StorageUnavailableError, CorruptCheckpointError)):
        async_ckpt.verify(Place(bucket.url("x.tar"), options=given, engine=engine))
    replacing.join()
    assert held.hits == 1


def test_an_archive_in_memory_is_verified():
    async_ckpt.save(STATE, "memory://verify/x.tar").result()
    assert async_ckpt.verify("memory://verify/x.tar").num_archives == 1


def test_a_copy_counts_the_bytes_of_an_archive_that_an_interrupted_copy_has_left(tmp_path):
    save_into(tmp_path / "near", 1)
    source, counted, again = run_of(tmp_path / "near"), [], []
    copy_step(source, run_of(tmp_path / "far"), 1, on_bytes=counted.append)
    (tmp_path / "far" / "step_00000001" / "manifest.json").unlink()

    copy_step(source, run_of(tmp_path / "far"), 1, on_bytes=again.append)

    assert sum(again) == sum(counted) == source.manifest(1).archives[0].num_bytes
    assert_is_state(async_ckpt.load(tmp_path / "far"), 1)


# --- what others wrote, and what is published


@pytest.fixture
def dcp(tmp_path: Path) -> Path:
    import torch.distributed.checkpoint

    state = {"model": {"w": torch.randn(1000, 700), "b": torch.zeros(3)}, "note": "a text", "empty": torch.empty(0, 2)}
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def test_a_folder_of_dcp_is_compared_with_the_checksums_of_torch(dcp):
    report = async_ckpt.verify(dcp)

    assert report.steps == ()
    assert report.num_archives == len(list(dcp.glob("*.distcp")))
    assert 1000 * 700 * 4 < report.num_bytes <= sum(path.stat().st_size for path in dcp.iterdir())
    assert "CRC-32" in report.notes[0]


@pytest.mark.parametrize("at", [0.3, 0.6, 0.9])
def test_a_flipped_bit_in_a_folder_of_dcp_is_named(dcp, at):
    file = dcp / "__0_0.distcp"
    flip(file, int(at * file.stat().st_size))

    with pytest.raises(
        CorruptCheckpointError, match=r"1 of its entries are damaged, such as model\.w: .*__0_0"
    ) as raised:
        async_ckpt.verify(dcp)

    assert raised.value.tensors == ("model.w",)


@pytest.mark.parametrize("harm", ["truncated", "missing"])
def test_a_file_of_dcp_that_is_not_whole_is_named(dcp, harm):
    file = dcp / "__0_0.distcp"
    if harm == "missing":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size // 2)

    with pytest.raises(CorruptCheckpointError, match=f"{file}: .*{harm}"):
        async_ckpt.verify(dcp)


def without_crc32(state: Any, folder: Path) -> Path:
    import torch.distributed.checkpoint as torch_dcp

    torch.serialization.set_crc32_options(False)
    try:
        torch_dcp.save(state, checkpoint_id=folder, no_dist=True)
    finally:
        torch.serialization.set_crc32_options(True)
    return folder


def test_a_folder_of_dcp_without_checksums_loads_and_says_that_it_cannot_be_verified(tmp_path):
    folder = without_crc32({"w": torch.ones(3), "n": {"a", 3}}, tmp_path / "x")

    assert async_ckpt.load(folder)["n"] == {"a", 3}
    with pytest.raises(ValueError, match=r"without checksums .*nothing to compare"):
        async_ckpt.verify(folder)
    file = folder / "__0_0.distcp"
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(CorruptCheckpointError):
        async_ckpt.verify(folder)


def test_entries_of_dcp_without_checksums_are_noted(dcp, tmp_path):
    """One of two items is as torch writes it without checksums."""
    folder = without_crc32({"model": {"w": torch.ones(3)}, "n": 3}, tmp_path / "both")
    other = tmp_path / "other"
    import torch.distributed.checkpoint as torch_dcp

    torch_dcp.save({"model": {"w": torch.ones(3)}, "n": 3}, checkpoint_id=other, no_dist=True)
    whole, plain = (path / "__0_0.distcp" for path in (other, folder))
    assert whole.stat().st_size == plain.stat().st_size
    places = torch_dcp.FileSystemReader(folder).read_metadata().storage_data.values()
    begin = max(place.offset for place in places)  # of the second item
    plain.write_bytes(whole.read_bytes()[:begin] + plain.read_bytes()[begin:])

    (_, note) = async_ckpt.verify(folder).notes
    assert note.startswith("1 of its entries have no checksums, such as ")


@pytest.fixture
def versions(tmp_path: Path) -> Path:
    weights = {"w": torch.randn(500, 300), "b": torch.zeros(7)}
    with async_ckpt.Publisher(tmp_path / "weights", anchor_every=3) as publisher:
        for version in (1, 2, 3, 4):
            weights["w"][version] += 1
            publisher.publish(weights, version).result()
    return tmp_path / "weights"


def test_all_versions_of_a_publication_are_verified(versions):
    report = async_ckpt.verify(versions)

    assert (report.versions, report.steps, report.num_archives) == ((1, 2, 3, 4), (), 4)
    assert "4 versions, 1 to 4, are sound" in str(report)
    assert report.as_dict()["num_versions"] == 4.0


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A run with a version at the same root."""
    root = tmp_path / "both"
    with open_run(root) as ckpt:
        for step in (1, 2):
            ckpt.save({"w": torch.randn(100, 100)}, step).result()
    with async_ckpt.Publisher(root) as publisher:
        publisher.publish({"w": torch.ones(3)}, 1).result()
    return root


def test_a_run_with_versions_beside_it_is_verified_with_them(beside):
    report = async_ckpt.verify(beside)
    assert (report.steps, report.versions, report.num_archives) == ((1, 2), (1,), 3)
    assert "2 steps, 1 to 2, and version 1 are sound" in str(report)

    (delta,) = (beside / "weight_v000001").glob("*.safetensors")
    flip(delta, delta.stat().st_size - 1)
    with pytest.raises(CorruptCheckpointError, match="damaged: version 1; sound: none"):
        async_ckpt.verify(beside)
    archive = next((beside / "step_00000002").glob("*.tar"))
    flip(archive, archive.stat().st_size // 2)
    with pytest.raises(CorruptCheckpointError, match="damaged: step 2; sound: step 1") as raised:
        async_ckpt.verify(beside)
    assert "damaged: version 1" in raised.value.__notes__[0]


def test_a_base_is_refused_where_there_are_no_versions(dcp, tmp_path):
    with pytest.raises(ValueError, match="base= is for published versions"):
        async_ckpt.verify(dcp, base=tmp_path)


def test_an_empty_folder_of_a_version_hides_nothing(beside):
    for path in (beside / "weight_v000001").iterdir():
        path.unlink()

    report = async_ckpt.verify(beside)
    assert (report.steps, report.versions) == ((1, 2), ())
    assert "no version there is sound" in report.notes


def test_a_damaged_version_is_named_with_those_that_are_built_on_it(versions):
    file = max((versions / "weight_v000002").glob("*.safetensors"))
    flip(file, file.stat().st_size - 1)

    with pytest.raises(CorruptCheckpointError, match="damaged: version 2, 3; sound: 1, 4") as raised:
        async_ckpt.verify(versions)

    assert "readers keep the weights that they have: publish an anchor" in str(raised.value)
    assert (raised.value.damaged_steps, raised.value.sound_steps) == ((2, 3), (1, 4))
