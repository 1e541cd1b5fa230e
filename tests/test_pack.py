"""A folder that existing code has filled becomes one tar that every reader knows, in the background, whole or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import shutil
import socket
import stat
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from racing import PATIENCE, Thrown, until
from states import MIB
from test_crash import quick_path  # noqa: F401
from test_local_storage import mounted, needs_mount
from test_stores import _botocore_reads_its_files_once, bucket, proxy, through  # noqa: F401
from test_unpack import gnu_tar, in_names, look, make_tree, tar, with_holes

from async_ckpt import (
    CheckpointError,
    NothingWrittenError,
    StorageFullError,
    StorageUnavailableError,
    TornSnapshotError,
    UnsupportedStateError,
    extract,
    pack,
    pack_folder,
    unpack,
)
from async_ckpt.around.pack import files_saver
from async_ckpt.format.layout import SegmentPlan
from async_ckpt.format.tarball import Entry, Tarball, WholeFile, stays_inside
from async_ckpt.host.pool import Lease, SegmentPool
from async_ckpt.host.threads import Crew
from async_ckpt.spans import monotonic
from async_ckpt.staging.files import FileFill, Source, scan
from async_ckpt.storage.local import LocalSink

pytestmark = pytest.mark.skipif(os.name != "posix", reason="links, modes and tar as POSIX has them")
GIB = 1 << 30
BLOCK = 4 * MIB


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "tree")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder for archives, so that what is left beside them is seen."""
    (tmp_path / "archives").mkdir()
    return tmp_path / "archives"


def settled() -> None:
    """Return when every pack has ended and cleaned up."""
    until(lambda: not any(not pending.finished.done() for pending in files_saver().ledger.pending()))


def names(folder: Path) -> list[str]:
    settled()
    return sorted(os.listdir(folder))


class Held:
    """Writes to archives on this disk stop here until the test lets them go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: str = "") -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        write = LocalSink.write

        def held(sink: LocalSink, offset: int, data: memoryview, lease: Any) -> None:
            if path in str(sink._target):
                self.reached.set()
                assert self.go_on.wait(PATIENCE)
            write(sink, offset, data, lease)

        monkeypatch.setattr(LocalSink, "write", held)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    stop = Held(monkeypatch)
    yield stop
    stop.go_on.set()
    settled()


# --- what comes of it ------------------------------------------------------------------------------------------


@gnu_tar
@pytest.mark.parametrize("ending", ["tar", "tar.zst"])
def test_gnu_tar_gives_back_what_was_packed(tmp_path, tree, ending):
    in_names(tree)
    with_holes(tree / "sparse", 20)
    pack_folder(tree, tmp_path / f"x.{ending}").result()
    (tmp_path / "out").mkdir()
    if ending == "tar.zst" and shutil.which("zstd") is None:
        pytest.skip("zstd is not installed")
    how = ["--zstd"] if ending == "tar.zst" else []
    tar(*how, "-xpf", tmp_path / f"x.{ending}", "-C", tmp_path / "out")

    assert look(tmp_path / "out") == look(tree)
    assert (tmp_path / "out/sparse").stat().st_blocks * 512 < MIB
    same = (tmp_path / "out/config.json").stat().st_ino
    assert (tmp_path / "out/huggingface/config again.json").stat().st_ino == same
    listed = tar(*how, "-tvf", tmp_path / f"x.{ending}").splitlines()
    assert listed[0].split()[0] == "drwxr-xr-x"
    assert listed[0].endswith(" ./")
    assert any(line.startswith("-rwxr-xr-x") and line.endswith(" ./run.sh") for line in listed)
    assert any(line.endswith("./latest -> huggingface/deep") for line in listed)


def test_tarfile_gives_back_what_was_packed(tmp_path, tree):
    in_names(tree)
    with_holes(tree / "sparse", 20)
    with_holes(tree / "mit Löchern", 20)
    with_holes(tree / ("holes" * 40), 20)
    pack_folder(tree, tmp_path / "x.tar").result()
    with tarfile.open(tmp_path / "x.tar") as archive:
        members = archive.getnames()
        archive.extractall(tmp_path / "out", filter="data")

    assert look(tmp_path / "out") == look(tree)
    assert members[0] == "."
    assert all(name.startswith("./") for name in members[1:])
    assert members[1:] == sorted(members[1:], key=lambda name: name.split("/"))


@pytest.mark.parametrize("ending", ["tar", "tar.zst", "tar.gz"])
def test_extract_and_unpack_give_back_what_was_packed(tmp_path, tree, ending):
    in_names(tree)
    with pack(tmp_path / f"x.{ending}") as folder:
        shutil.copytree(tree, folder, symlinks=True, dirs_exist_ok=True)
        with_holes(folder / "mit Löchern", 20)
        expected = look(folder)
    folder.handle.result()

    assert look(extract(tmp_path / f"x.{ending}", tmp_path / "out")) == expected
    with unpack(tmp_path / f"x.{ending}") as unpacked:
        assert look(unpacked) == expected
    assert (tmp_path / "out/mit Löchern").stat().st_blocks * 512 < MIB


def test_modes_are_kept(tmp_path, tree):
    for mode in (0o400, 0o640, 0o777, 0o4755, 0o1644):
        (tree / f"{mode:o}").touch()
        (tree / f"{mode:o}").chmod(mode)
    (tree / "private").mkdir(mode=0o700)
    pack_folder(tree, tmp_path / "x.tar").result()
    with tarfile.open(tmp_path / "x.tar") as archive:
        told = {member.name: (member.mode, member.uid, member.uname) for member in archive}

    for path in tree.rglob("*"):
        if not path.is_symlink():
            assert told[f"./{path.relative_to(tree)}"] == (stat.S_IMODE(path.stat().st_mode), 0, "root")


@pytest.mark.parametrize("when", [-1, 0, 8**11 - 1, 8**11, 2 * 8**11])
def test_any_time_that_a_file_may_have_is_kept(tmp_path, when):
    entries = [Entry("./a", tarfile.REGTYPE, 0o644, when, 3, runs=((0, 3),))]
    (tmp_path / "x.tar").write_bytes(image_of(Tarball(entries), {0: b"abc"}, BLOCK))
    with tarfile.open(tmp_path / "x.tar") as archive:
        (found,) = archive.getmembers()
        assert int(found.mtime) == when
        content = archive.extractfile(found)
        assert content is not None
        assert content.read() == b"abc"


def test_equal_folders_make_equal_archives(tmp_path, tree):
    first, second = (pack_folder(tree, tmp_path / name) for name in ("a.tar", "b.tar"))
    first.result(), second.result()

    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()


def test_many_small_files_come_back(quick_path):  # noqa: F811
    count = 20_000
    with pack(quick_path / "x.tar") as folder:
        for number in range(count):
            if number % 1000 == 0:
                (folder / f"{number // 1000:03}").mkdir()
            (folder / f"{number // 1000:03}/{number:06}").write_bytes(b"%d" % number)
    folder.handle.result()
    settled()
    with unpack(quick_path / "x.tar", scratch=quick_path) as unpacked:
        found = {path.name: path.read_bytes() for path in unpacked.rglob("*") if path.is_file()}

    assert found == {f"{number:06}": b"%d" % number for number in range(count)}


HOLES: dict[str, tuple[int, list[tuple[int, int]]]] = {
    "nothing but a hole": (16 * MIB, []),
    "a hole at the beginning": (16 * MIB, [(16 * MIB - 4096, 4096)]),
    "a hole at the end": (16 * MIB, [(0, 5000)]),
    "an end in the middle of a page": (16 * MIB + 1, [(8 * MIB, 4096)]),
    "thousands of holes": (64 * MIB, [(at, 100) for at in range(0, 64 * MIB, 32 * 1024)]),
}


@pytest.mark.parametrize("case", HOLES)
def test_holes_take_no_room_in_the_archive(tmp_path, case):
    size, data = HOLES[case]
    with pack(tmp_path / "x.tar") as folder:
        with open(folder / "holes", "wb") as file:
            for at, length in data:
                file.seek(at)
                file.write(random.Random(at).randbytes(length))
            file.truncate(size)
        expected = look(folder)
    report = folder.handle.result()
    if hasattr(os, "SEEK_DATA"):
        assert report.num_bytes < size * 3 / 4

    assert look(extract(tmp_path / "x.tar", tmp_path / "out")) == expected
    with tarfile.open(tmp_path / "x.tar") as archive:
        archive.extractall(tmp_path / "python", filter="data")
    assert look(tmp_path / "python") == expected


def test_a_file_of_more_holes_than_a_map_may_tell_of_is_packed_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("async_ckpt.staging.files._MAX_RUNS", 8)
    (tmp_path / "few").mkdir()
    with_holes(tmp_path / "few/holes", 8)
    with_holes(tmp_path / "few/more holes", 9)
    sizes = {
        path: sum(length for _, length in e.runs)
        for path, e in zip("-fm", scan(tmp_path / "few")[0], strict=True)
    }

    assert sizes["f"] < MIB
    assert sizes["m"] == 9 * MIB + 123


@gnu_tar
@pytest.mark.parametrize("size", [8 * GIB - 1, 8 * GIB, 9 * GIB + 5, 70 * GIB])
def test_members_of_8_gib_and_more_are_known_to_every_reader(tmp_path, size):
    """The image is written as a file with holes: only headers, and the end of the data, are real."""
    entries = [
        Entry("./before", tarfile.REGTYPE, 0o644, 7, 3, runs=((0, 3),)),
        Entry("./large", tarfile.REGTYPE, 0o644, 7, size, runs=((0, size),)),
        Entry("./with holes", tarfile.REGTYPE, 0o644, 7, 2 * size, runs=((size, 512), (2 * size - 512, 512))),
        Entry("./after", tarfile.REGTYPE, 0o644, 7, 3, runs=((0, 3),)),
    ]
    image = Tarball(entries)
    with open(tmp_path / "x.tar", "wb") as file:
        file.truncate(image.file_bytes)
        for at, data in image._literals:
            file.seek(at)
            file.write(data)
    expected = [("./before", 3), ("./large", size), ("./with holes", 2 * size), ("./after", 3)]
    with tarfile.open(tmp_path / "x.tar") as archive:
        assert [(member.name, member.size) for member in archive] == expected
    listed = [line.split(maxsplit=5) for line in tar("-tvf", tmp_path / "x.tar").splitlines()]
    assert [(row[5], int(row[2])) for row in listed] == expected


def test_a_large_sparse_file_goes_through_whole(tmp_path):
    with pack(tmp_path / "x.tar") as folder, open(folder / "huge", "wb") as file:
        file.seek(9 * GIB)
        file.write(b"the end")
    assert folder.handle.result().num_bytes < MIB
    extract(tmp_path / "x.tar", tmp_path / "out")
    with open(tmp_path / "out/huge", "rb") as file:
        file.seek(9 * GIB)
        assert file.read() == b"the end"


# --- the plan --------------------------------------------------------------------------------------------------


def image_of(image: Tarball | WholeFile, files: dict[int, bytes], segment_bytes: int) -> bytes:
    """The whole file as its segments say; every byte of it must be told of exactly once."""
    whole = bytearray()
    for number, plan in enumerate(image.segments(segment_bytes)):
        assert (plan.number, plan.offset) == (number, number * segment_bytes)
        covered, segment = bytearray(plan.num_bytes), bytearray(plan.num_bytes)
        for at, data in plan.literals:
            covered[at : at + len(data)] = bytes(b + 1 for b in covered[at : at + len(data)])
            segment[at : at + len(data)] = data
        for piece in plan.pieces:
            source, offset = image.runs[piece.tensor]
            begin = offset + piece.source
            data = files[source][begin : begin + piece.length]
            assert len(data) == piece.length
            span = slice(piece.target, piece.target + piece.length)
            covered[span] = bytes(b + 1 for b in covered[span])
            segment[span] = data
        assert covered == b"\1" * plan.num_bytes
        whole += segment
    assert len(whole) == image.file_bytes
    return bytes(whole)


member_names = st.lists(
    st.text(
        st.characters(exclude_characters="/\0", exclude_categories=("Cs",)) | st.just("\udcff"),
        min_size=1,
        max_size=120,
    ).filter(lambda name: name not in (".", "..")),
    min_size=1,
    max_size=4,
).map(lambda parts: "/".join([".", *parts]))


@st.composite
def entries_and_files(draw: Any) -> tuple[list[Entry], dict[int, bytes]]:
    entries, files = [], {}
    for number, name in enumerate(draw(st.lists(member_names, max_size=6, unique=True))):
        kind = draw(st.sampled_from([tarfile.REGTYPE, tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE]))
        mode, mtime = draw(st.integers(0, 0o7777)), draw(st.integers(-(10**9), 10**11))
        if kind != tarfile.REGTYPE:
            linkname = draw(member_names) if kind == tarfile.SYMTYPE else ""
            entries.append(Entry(name, kind, mode, mtime, link=linkname))
            continue
        data = draw(st.binary(max_size=3000))
        cuts = draw(st.lists(st.integers(0, len(data)), max_size=6, unique=True).map(sorted))
        runs = [(a, b - a) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
        if draw(st.booleans()):
            runs = [(0, len(data))] if data else []
        holes = bytearray(len(data))
        for at, length in runs:
            holes[at : at + length] = data[at : at + length]
        files[number] = bytes(holes)
        entries.append(Entry(name, kind, mode, mtime, len(data), runs=tuple(runs)))
    return entries, files


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(entries_and_files(), st.integers(1, 40).map(lambda blocks: blocks * 512))
def test_whatever_the_segments_the_image_is_the_same_and_what_tarfile_reads_from_it(made, segment_bytes):
    import io

    entries, files = made
    image = image_of(Tarball(entries), files, segment_bytes)
    assert image == image_of(Tarball(entries), files, BLOCK)
    assert len(image) % 10240 == 0
    with tarfile.open(fileobj=io.BytesIO(image)) as archive:
        found = archive.getmembers()
        assert [(m.name, m.type if m.type != b"0" else tarfile.REGTYPE) for m in found] == [
            (e.name, e.kind) for e in entries
        ]
        for number, (member, entry) in enumerate(zip(found, entries, strict=True)):
            assert (member.mode, int(member.mtime), member.linkname) == (entry.mode, entry.mtime, entry.link)
            if entry.kind == tarfile.REGTYPE:
                content = archive.extractfile(member)
                assert content is not None
                assert content.read() == files[number]


@given(st.integers(1, 100_000), st.integers(1, 40).map(lambda blocks: blocks * 512))
def test_a_single_file_is_its_own_image(num_bytes, segment_bytes):
    data = random.Random(num_bytes).randbytes(num_bytes)

    assert image_of(WholeFile(num_bytes), {0: data}, segment_bytes) == data


def test_an_empty_file_has_no_image():
    with pytest.raises(ValueError, match="small object"):
        WholeFile(0)


small_trees = st.recursive(
    st.binary(max_size=200),
    lambda inside: st.dictionaries(
        st.text(
            st.characters(exclude_characters="/\0", exclude_categories=("Cs",)), min_size=1, max_size=30
        ).filter(lambda name: name not in (".", "..")),
        inside,
        max_size=4,
    ),
    max_leaves=12,
).filter(lambda made: isinstance(made, dict) and made)


def grow(folder: Path, made: dict[str, Any]) -> None:
    for name, inside in made.items():
        if isinstance(inside, dict):
            (folder / name).mkdir()
            grow(folder / name, inside)
        else:
            (folder / name).write_bytes(inside)


@settings(max_examples=30, deadline=None)
@given(small_trees, st.sampled_from(["x.tar", "x.tar.zst"]))
def test_any_tree_of_small_files_comes_back_the_same_by_tarfile_and_by_extract(tmp_path_factory, made, name):
    top = tmp_path_factory.mktemp("any")
    with pack(top / name) as folder:
        grow(folder, made)
        expected = look(folder)
    folder.handle.result()
    assert look(extract(top / name, top / "ours")) == expected
    if name == "x.tar":
        with tarfile.open(top / name) as archive:
            archive.extractall(top / "python", filter="data")
        assert look(top / "python") == expected


@pytest.mark.parametrize(
    ("name", "target", "inside"),
    [
        ("./a", "b", True),
        ("./a", "b/c", True),
        ("./a", ".", True),
        ("./a", "..", False),
        ("./a/b", "..", True),
        ("./a/b", "../..", False),
        ("./a/b", "../c/./d", True),
        ("./a/b", "../c/../d", False),  # c may be a link
        ("./a/b", "c/..", False),
        ("./a", "/etc", False),
        ("./a", "./../b", False),
    ],
)
def test_a_link_stays_inside_whatever_other_links_there_are_or_it_does_not(name, target, inside):
    assert stays_inside(name, target) is inside


# --- the block -------------------------------------------------------------------------------------------------


def test_leaving_the_block_does_not_wait_and_nothing_is_visible_before_all_is_there(out, held):
    with pack(out / "x.tar") as folder:
        (folder / "a").write_text("b")
        assert set(os.listdir(out)) == {folder.parent.name, folder.parent.name.removesuffix(".d")}
    held.reached.wait(PATIENCE)
    assert not folder.handle.done()
    assert not (out / "x.tar").exists()
    assert folder.exists()
    held.go_on.set()
    assert folder.handle.result().status == "committed"
    assert names(out) == ["x.tar"]


def test_the_folder_is_a_path(out):
    with pack(out / "x.tar") as folder:
        assert isinstance(folder, Path)
        assert os.fspath(folder) == str(folder)
        assert folder.parent.parent == out
        assert os.listdir(folder) == []
        (folder / "a").write_text("b")
    folder.handle.result()


def test_there_is_no_handle_before_the_block_is_left(out):
    packing = pack(out / "x.tar")
    with pytest.raises(RuntimeError, match="no handle before the block"):
        packing.handle  # noqa: B018
    with packing as folder:
        (folder / "a").write_text("b")
        for either in (packing, folder):
            with pytest.raises(RuntimeError, match="no handle before the block"):
                either.handle  # noqa: B018
        assert "x.tar" in repr(packing)
    assert packing.handle is folder.handle
    packing.handle.result()
    assert "done" in repr(packing)


def test_a_folder_is_packed_once(out):
    packing = pack(out / "x.tar")
    with packing as folder:
        (folder / "a").write_text("b")
        with pytest.raises(RuntimeError, match="call pack"):
            packing.__enter__()
    with pytest.raises(RuntimeError, match="call pack"):
        packing.__enter__()
    folder.handle.result()
    assert names(out) == ["x.tar"]


def fill_and_raise(folder: Path, error: type[BaseException]) -> None:
    (folder / "a").write_text("b")
    raise error


@pytest.mark.parametrize("error", [Thrown, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_exception_in_the_block_publishes_nothing_and_passes(out, error):
    (out / "x.tar").write_bytes(b"of before")
    packing = pack(out / "x.tar")
    with pytest.raises(error), packing as folder:
        fill_and_raise(folder, error)
    with pytest.raises(RuntimeError, match="without an exception"):
        packing.handle  # noqa: B018
    assert names(out) == ["x.tar"]
    assert (out / "x.tar").read_bytes() == b"of before"


def test_a_folder_that_cannot_be_removed_does_not_hide_the_exception(out, monkeypatch):
    def refuse(*_: Any) -> None:
        raise OSError(16, "Device or resource busy")

    packing, error = pack(out / "x.tar"), Thrown()
    packing.__enter__()
    monkeypatch.setattr(shutil, "rmtree", refuse)
    packing.__exit__(Thrown, error, None)

    assert any("busy" in note for note in error.__notes__)


def test_nothing_written_leaves_what_was_there(out):
    (out / "x.tar").write_bytes(b"of before")
    with pack(out / "x.tar") as folder:
        pass
    with pytest.raises(NothingWrittenError, match="left as it was"):
        folder.handle.result()
    with pytest.raises(NothingWrittenError):
        folder.handle.wait_staged()
    assert names(out) == ["x.tar"]
    assert (out / "x.tar").read_bytes() == b"of before"


def test_folders_alone_are_something(out):
    with pack(out / "x.tar") as folder:
        (folder / "a").mkdir()
    folder.handle.result()
    assert os.listdir(extract(out / "x.tar", out / "out")) == ["a"]


async def test_leaving_the_block_does_not_hold_up_a_running_loop_and_the_handle_is_awaited_there(out, held):
    with pack(out / "x.tar") as folder:
        (folder / "a").write_bytes(bytes(20 * MIB))
    held.reached.wait(PATIENCE)
    waiting = asyncio.ensure_future(folder.handle)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done()
    held.go_on.set()

    assert (await waiting).status == "committed"
    assert (await folder.handle).num_bytes > 20 * MIB


async def test_a_cancelled_await_leaves_the_pack_alone(out, held):
    with pack(out / "x.tar") as folder:
        (folder / "a").write_text("b")
    waiting = asyncio.ensure_future(folder.handle)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    held.go_on.set()
    assert (await folder.handle).status == "committed"


def test_two_packs_to_one_destination_are_both_made_and_the_later_one_stays(out, held):
    with pack(out / "x.tar") as first:
        (first / "a").write_text("first")
        with pack(out / "x.tar") as second:
            (second / "a").write_text("second")
    held.go_on.set()

    assert (first.handle.result().status, second.handle.result().status) == ("committed", "committed")
    assert names(out) == ["x.tar"]
    with unpack(out / "x.tar") as folder:  # of the one whose block was left later
        assert (folder / "a").read_text() == "first"


def test_packs_begun_by_many_threads_are_all_made(out):
    handles: list[Any] = []

    def some(number: int) -> None:
        with pack(out / f"{number}.tar") as folder:
            (folder / "a").write_text(str(number))
        handles.append(folder.handle)

    threads = [threading.Thread(target=some, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for handle in handles:
        handle.result()
    assert names(out) == [f"{number}.tar" for number in range(8)]
    for number in range(8):
        with unpack(out / f"{number}.tar") as folder:
            assert (folder / "a").read_text() == str(number)


def test_the_scratch_folder_is_where_it_is_wanted(tmp_path, out):
    with pack(out / "x.tar", scratch=tmp_path / "scratch") as folder:
        assert folder.is_relative_to(tmp_path / "scratch")
        assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
        (folder / "a").write_text("b")
    folder.handle.result()
    assert (names(tmp_path / "scratch"), names(out)) == ([], ["x.tar"])


def test_the_report_tells_what_was_done(out):
    with pack(out / "x.tar") as folder:
        (folder / "a").write_bytes(bytes(50 * MIB))
    report = folder.handle.result()

    assert report.path == report.destinations[0].path == str(out / "x.tar")
    assert report.num_bytes == report.destinations[0].num_bytes == (out / "x.tar").stat().st_size
    assert (report.status, report.step, report.num_tensors, report.retries) == ("committed", None, 0, 0)
    assert 0 < report.stall_seconds < report.total_seconds
    assert 0 < report.stage_seconds < report.total_seconds
    assert 0 < report.write_seconds < report.total_seconds
    assert 0 < report.destinations[0].write_seconds <= report.total_seconds
    progress = folder.handle.progress
    assert progress.total_bytes == progress.staged_bytes == progress.written_bytes == report.num_bytes


# --- a folder that is there already ----------------------------------------------------------------------------


def test_a_folder_that_is_there_stays_as_it_is(out, tree):
    before = look(tree)
    pack_folder(str(tree), out / "x.tar").result()

    assert look(tree) == before
    assert look(extract(out / "x.tar", out / "out")) == before


def test_a_link_to_a_folder_is_that_folder(tmp_path, out, tree):
    (tmp_path / "link").symlink_to(tree)
    pack_folder(tmp_path / "link", out / "x.tar").result()

    assert look(extract(out / "x.tar", out / "out")) == look(tree)


@pytest.mark.parametrize("where", ["x.tar", "huggingface/x.tar", "new/x.tar", "../tree/x.tar"])
def test_an_archive_inside_of_the_folder_itself_is_refused(tmp_path, tree, where):
    (tmp_path / "link").symlink_to(tree)
    before = look(tree)
    for destination in (
        tree / where,
        tmp_path / "link" / where,
        (tree / where).as_uri().replace("..", "../tree/.."),
    ):
        with pytest.raises(ValueError, match="pack itself"):
            pack_folder(tree, destination)
    assert look(tree) == before


def test_the_folder_above_is_no_name_for_an_archive(tree):
    for destination in (tree.parent, tree):
        with pytest.raises((IsADirectoryError, ValueError)):
            pack_folder(tree, destination)
    with pytest.raises(IsADirectoryError, match="give the path of a file"):
        pack(tree)


@pytest.mark.parametrize("source", ["missing", "config.json"])
def test_only_folders_are_packed(out, tree, source):
    with pytest.raises(NotADirectoryError, match="no folder"):
        pack_folder(tree / source, out / "x.tar")
    assert os.listdir(out) == []


def test_beside_the_folder_is_a_good_place(tmp_path, tree):
    pack_folder(tree, tmp_path / "x.tar").result()
    pack_folder(tree, tmp_path / "tree.tar").result()

    assert names(tmp_path) == ["tree", "tree.tar", "x.tar"]


@pytest.mark.parametrize("compression", ["gzip", 3, True])
def test_a_compression_that_there_is_not_is_refused_at_once(out, compression):
    with pytest.raises(ValueError, match="compression must be"):
        pack(out / "x.tar", compression=compression)
    assert os.listdir(out) == []


# --- what cannot be packed -------------------------------------------------------------------------------------


def kept(folder: Path) -> Path:
    """The one folder that a failed pack has left, with what was to be packed."""
    settled()
    (found,) = [name for name in os.listdir(folder) if name.endswith(".kept")]
    return folder / found / "files"


def make_odd(path: Path, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        os.chdir(path.parent)
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    elif kind == "link to an absolute path":
        path.symlink_to("/etc/passwd")
    elif kind == "link out":
        path.symlink_to("../outside")
    elif kind == "link that may lead out":
        path.symlink_to("link/../b")


@pytest.mark.parametrize(
    "kind", ["pipe", "socket", "link to an absolute path", "link out", "link that may lead out"]
)
def test_what_no_archive_can_give_back_is_refused_by_name_and_the_folder_kept(out, kind, monkeypatch):
    monkeypatch.chdir(out)
    (out / "x.tar").write_bytes(b"of before")
    with pack(out / "x.tar") as folder:
        (folder / "a").write_text("b")
        make_odd(folder / "odd", kind)
    with pytest.raises(UnsupportedStateError, match="odd is ") as caught:
        folder.handle.result()
    assert caught.value.path.endswith("/odd")
    assert (kept(out) / "a").read_text() == "b"
    assert any(str(kept(out)) in note for note in caught.value.__notes__)
    assert (out / "x.tar").read_bytes() == b"of before"
    assert len(names(out)) == 2


def changed_after_the_scan(monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]) -> None:
    """The folder changes in the moment between its scan and the reading of its files."""

    def scanned(folder: Path) -> Any:
        found = scan(folder)
        change(folder)
        return found

    monkeypatch.setattr(sys.modules["async_ckpt.around.pack"], "scan", scanned)


def write_at(path: Path, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


def same_size(path: Path) -> None:
    before = path.stat()
    path.write_bytes(bytes(before.st_size))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


CHANGES: dict[str, Callable[[Path], Any]] = {
    "a file that grows": lambda folder: write_at(folder / "a", MIB, b"more"),
    "a file that shrinks": lambda folder: os.truncate(folder / "a", 10),
    "a file that is emptied": lambda folder: os.truncate(folder / "a", 0),
    "a file that is written over": lambda folder: same_size(folder / "a"),
    "a file that is gone": lambda folder: (folder / "a").unlink(),
    "a file that is a folder": lambda folder: ((folder / "a").unlink(), (folder / "a").mkdir()),
    "an empty file that is written": lambda folder: (folder / "empty").write_bytes(b"x"),
    "a file of holes that is written": lambda folder: write_at(folder / "holes", MIB, b"x"),
    "a file that is new": lambda folder: (folder / "sub/new").write_bytes(b"x"),
    "a folder that is gone": lambda folder: (folder / "sub").rmdir(),
    "a link that leads elsewhere": lambda folder: (
        (folder / "link").unlink(),
        (folder / "link").symlink_to("b"),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["x.tar", "x.tar.zst"])
def test_a_folder_that_changes_while_it_is_packed_is_not_packed(out, monkeypatch, change, name):
    (out / name).write_bytes(b"of before")

    changed_after_the_scan(monkeypatch, CHANGES[change])
    with pack(out / name) as folder:
        (folder / "a").write_bytes(random.Random(0).randbytes(MIB))
        (folder / "empty").touch()
        (folder / "sub").mkdir()
        (folder / "link").symlink_to("a")
        with open(folder / "holes", "wb") as file:
            file.truncate(16 * MIB)
    error = folder.handle.exception()
    assert isinstance(error, TornSnapshotError)
    assert len(error.names) == 1
    assert "write it first, then pack" in str(error)
    assert kept(out).exists()
    assert (out / name).read_bytes() == b"of before"
    assert len(names(out)) == 2


def test_a_file_that_changes_while_it_is_read_is_not_packed(tmp_path):
    (tmp_path / "a").write_bytes(random.Random(0).randbytes(5 * BLOCK))
    with filling(tmp_path, num_readers=1) as fill:
        fill.before_put = lambda number: same_size(tmp_path / "a") if number == 1 else None
        fill.begin()
        with pytest.raises(TornSnapshotError):
            fill.completion.result(PATIENCE)
    assert fill.num_put == 2


@needs_mount
def test_a_destination_that_may_only_be_read_fails_the_pack_at_once(tmp_path):
    with mounted(tmp_path / "frozen", "size=8m") as frozen:
        subprocess.run(["mount", "-o", "remount,ro", str(frozen)], check=True)
        with pytest.raises(StorageUnavailableError), pack(frozen / "x.tar"):
            pytest.fail("it was entered")
        with pack(frozen / "x.tar", scratch=tmp_path) as folder:
            (folder / "a").write_text("b")
        assert isinstance(folder.handle.exception(), StorageUnavailableError)
        assert (kept(tmp_path) / "a").read_text() == "b"


@needs_mount
@pytest.mark.parametrize("name", ["x.tar", "x.tar.zst"])
def test_a_disk_that_is_too_small_leaves_the_folder_and_what_was_there(tmp_path, name):
    data = random.Random(0).randbytes(20 * MIB)
    with mounted(tmp_path / "small", "size=16m") as small:
        (small / name).write_bytes(b"of before")
        with pack(small / name, scratch=tmp_path) as folder:
            (folder / "a").write_bytes(data)
        error = folder.handle.exception()
        assert isinstance(error, StorageFullError)
        assert names(small) == [name]
        assert (small / name).read_bytes() == b"of before"
        assert (kept(tmp_path) / "a").read_bytes() == data
        with pack(small / name, scratch=tmp_path) as folder:  # the next one is not harmed by it
            (folder / "a").write_text("b")
        assert folder.handle.result().status == "committed"


@needs_mount
def test_a_disk_that_is_full_before_the_block_is_entered_is_said_to_be(tmp_path):
    with mounted(tmp_path / "small", "size=1m,nr_inodes=2") as small:
        (small / "other").touch()
        with pytest.raises(StorageFullError), pack(small / "x.tar"):
            pytest.fail("it was entered")
        assert os.listdir(small) == ["other"]


def test_an_unseen_failure_is_warned_of_at_the_next_pack(out):
    with pack(out / "x.tar") as folder:
        os.mkfifo(folder / "pipe")
    until(folder.handle.done)
    with (
        pytest.warns(RuntimeWarning, match="x.tar was not saved: UnsupportedStateError"),
        pack(out / "y.tar") as other,
    ):
        (other / "a").write_text("b")
    other.handle.result()
    assert folder.handle.exception() is not None


# --- the fill --------------------------------------------------------------------------------------------------


class Filling(FileFill):
    """A fill of a real folder into a real pool, whose put does what a test says."""

    def __init__(self, folder: Path, pool: SegmentPool, crew: Crew) -> None:
        entries, sources = scan(folder)
        image = Tarball(entries)
        segments: list[SegmentPlan] = image.segments(pool.segment_bytes)
        self.num_segments, self.num_put = len(segments), 0
        self.kept: list[Lease] = []
        self.keeps = False
        self.error: BaseException | None = None
        self.before_put: Callable[[int], Any] = lambda _: None
        super().__init__(
            sources,
            image.runs,
            segments,
            order=1,
            pool=pool,
            crew=crew,
            clock=monotonic,
            put=self._take_segment,
            check=self._raise,
        )

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error

    def _take_segment(self, number: int, lease: Lease) -> None:
        self.before_put(number)
        self.num_put += 1
        if self.keeps:
            self.kept.append(lease)
        else:
            lease.release()


@contextlib.contextmanager
def filling(folder: Path, *, num_segments: int = 4, num_readers: int = 8) -> Iterator[Filling]:
    pool = SegmentPool(BLOCK, max_bytes=num_segments * BLOCK)
    crew = Crew("test-read", num_readers)
    fill = Filling(folder, pool, crew)
    try:
        yield fill
    finally:
        for lease in fill.kept:
            lease.release()
        until(lambda: ", 0 of " in repr(pool))
        assert "0 waiting" in repr(pool)
        crew.stop()
        pool.close()


@pytest.fixture
def big(tmp_path: Path) -> Path:
    """Twelve segments, three times what the pool holds."""
    (tmp_path / "big").mkdir()
    for number in range(12):
        (tmp_path / f"big/{number:02}").write_bytes(random.Random(number).randbytes(BLOCK))
    return tmp_path / "big"


def test_a_fill_hands_on_every_segment_once(big):
    with filling(big) as fill:
        fill.begin()
        fill.completion.result(PATIENCE)
        assert fill.num_put == fill.num_segments == 13


def test_when_the_drain_fails_readers_end_and_do_not_read_the_rest(big):
    with filling(big) as fill:

        def fail(number: int) -> None:
            fill.error = Thrown("the upload failed")

        fill.before_put = fail
        fill.begin()
        with pytest.raises(Thrown):
            fill.completion.result(PATIENCE)
        assert fill.num_put <= 9  # those that were being filled already


def test_when_the_drain_fails_while_all_memory_is_lent_no_reader_waits_for_ever(big):
    with filling(big) as fill:
        fill.keeps = True
        fill.begin()
        until(lambda: len(fill.kept) == 4)
        fill.error = Thrown("the upload failed")
        with pytest.raises(Thrown):
            fill.completion.result(PATIENCE)


def test_a_file_that_is_torn_ends_readers_that_wait_for_memory_which_a_sink_keeps_until_that_segment_comes(
    big,
):
    """A sink that sends in order keeps all that comes before its turn; the one whose turn it is never comes."""
    with filling(big) as fill:
        fill.keeps = True
        os.truncate(big / "00", 5)
        fill.begin()
        with pytest.raises(TornSnapshotError):
            fill.completion.result(PATIENCE)


def test_a_file_that_may_not_be_read_is_said_so(big, monkeypatch):
    def refuse(path: Any, *_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", path)

    with filling(big) as fill:
        monkeypatch.setattr("async_ckpt.staging.files.open", refuse, raising=False)
        fill.begin()
        with pytest.raises(StorageUnavailableError, match="Permission denied; make sure that it can be read"):
            fill.completion.result(PATIENCE)


def test_a_file_system_that_does_not_know_its_holes_is_read_whole(tmp_path, monkeypatch):
    (tmp_path / "tree").mkdir()
    with_holes(tmp_path / "tree/holes", 20)

    def refuse(*_: Any) -> int:
        raise OSError(22, "Invalid argument")

    with monkeypatch.context() as patch:
        patch.setattr(os, "lseek", refuse)
        entries, sources = scan(tmp_path / "tree")
    assert entries[1].runs == ((0, 20 * MIB + 123),)
    assert sources[1] == Source(
        str(tmp_path / "tree/holes"), 20 * MIB + 123, (tmp_path / "tree/holes").stat().st_mtime_ns
    )


# --- stores ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["obstore", "s3fs"])
@pytest.mark.parametrize("name", ["x.tar", "x.tar.zst"])
def test_a_folder_goes_to_a_bucket_and_comes_back(bucket, tmp_path, tree, engine, name):  # noqa: F811
    options = {"storage_options": bucket.server.options, "engine": engine}
    (tree / "weights").write_bytes(random.Random(0).randbytes(70 * MIB))
    with pack(bucket.url(f"runs/{name}"), scratch=tmp_path / "scratch", **options) as folder:
        shutil.copytree(tree, folder, symlinks=True, dirs_exist_ok=True)
        expected = look(folder)
    report = folder.handle.result()

    assert report.path == bucket.url(f"runs/{name}")
    assert bucket.keys() == [f"runs/{name}"]
    assert bucket.uploads() == []
    assert report.destinations[0].num_bytes == len(bucket.read(f"runs/{name}"))
    assert names(tmp_path / "scratch") == []
    with unpack(report.path, **options) as unpacked:
        assert look(unpacked) == expected


@pytest.mark.parametrize("engine", ["obstore", "s3fs"])
@pytest.mark.parametrize("name", ["x.tar", "x.tar.zst"])
def test_an_upload_that_fails_leaves_the_folder_and_no_object(bucket, proxy, tmp_path, engine, name):  # noqa: F811
    options = {"storage_options": through(proxy, bucket), "engine": engine}
    bucket.write([f"runs/{name}"], b"of before")
    proxy.answer("AccessDenied", kind="upload_part", target=r"partNumber=2\b")
    data = random.Random(0).randbytes(40 * MIB)
    with pack(bucket.url(f"runs/{name}"), scratch=tmp_path, **options) as folder:
        (folder / "a").write_bytes(data)
    error = folder.handle.exception()

    assert isinstance(error, StorageUnavailableError)
    assert (kept(tmp_path) / "a").read_bytes() == data
    assert bucket.read(f"runs/{name}") == b"of before"
    assert bucket.uploads() == []


def test_an_upload_that_breaks_off_is_made_again(bucket, proxy, tmp_path):  # noqa: F811
    options = {
        "storage_options": through(proxy, bucket, retry_config={"max_retries": 0}),
        "engine": "obstore",
    }
    proxy.cut_request(MIB, times=1, kind="upload_part", target=r"partNumber=2\b")
    data = random.Random(0).randbytes(70 * MIB)
    with pack(bucket.url("x.tar"), scratch=tmp_path, **options) as folder:
        (folder / "a").write_bytes(data)

    assert folder.handle.result().retries == 1
    with unpack(bucket.url("x.tar"), **options) as unpacked:
        assert (unpacked / "a").read_bytes() == data
    assert bucket.uploads() == []


# --- processes -------------------------------------------------------------------------------------------------

HEAD = """
import os, signal, sys, threading
from pathlib import Path
from async_ckpt import pack, pack_folder, unpack, ClosedError
out = Path(sys.argv[1])
"""
needs_fork = pytest.mark.skipif(sys.platform != "linux", reason="forks and signals as Linux has them")


@needs_fork
@pytest.mark.parametrize("end", ["", "sys.exit(0)", "del folder"])
def test_a_process_that_ends_right_after_the_block_loses_nothing(out, nursery, end):
    code = (
        HEAD
        + f"""
with pack(out / "x.tar") as folder:
    (folder / "a").write_bytes(b"b" * (30 << 20))
{end}
"""
    )
    ended = nursery.run(code, out)

    assert (ended.status, ended.err) == (0, "")
    assert names(out) == ["x.tar"]
    with unpack(out / "x.tar") as folder:
        assert (folder / "a").read_bytes() == b"b" * (30 * MIB)


@needs_fork
def test_a_failure_at_the_end_of_the_process_says_where_the_folder_is(out, nursery):
    ended = nursery.run(HEAD + 'with pack(out / "x.tar") as folder:\n    os.mkfifo(folder / "pipe")\n', out)

    assert ended.status == 75
    assert "x.tar was not saved: UnsupportedStateError" in ended.err
    assert str(kept(out)) in ended.err


@needs_fork
def test_a_pack_in_an_exit_hook_is_refused_and_its_folder_kept(out, nursery):
    code = (
        HEAD
        + """
import atexit
def late():
    try:
        with pack(out / "late.tar") as folder:
            (folder / "a").write_text("b")
    except ClosedError as error:
        print("refused", *error.__notes__, flush=True)
with pack(out / "x.tar") as folder:
    (folder / "a").write_text("b")
atexit.register(late)
"""
    )
    ended = nursery.run(code, out)

    assert ended.out.startswith("refused async_ckpt: what was to be packed is kept in")
    assert (kept(out) / "a").read_text() == "b"
    assert "x.tar" in names(out)


@needs_fork
@pytest.mark.parametrize("when", ["in the block", "while it is streamed"])
def test_what_a_killed_process_left_is_swept_by_the_next_pack_of_that_name(out, nursery, when):
    code = (
        HEAD
        + """
from children import hold_writes
from racing import until
hold_writes()
with pack(out / "x.tar") as folder:
    (folder / "a").write_bytes(bytes(10 << 20))
    if sys.argv[2] == "in the block":
        os.kill(os.getpid(), signal.SIGKILL)
until(lambda: len(os.listdir(out)) == 4)  # the temp file of the archive is there
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    (out / "x.tar").write_bytes(b"of before")
    assert nursery.run(code, out, when).status == -9
    left = names(out)
    assert len(left) == (3 if when == "in the block" else 4)
    assert (out / "x.tar").read_bytes() == b"of before"
    with pack(out / "y.tar") as folder:
        (folder / "a").write_text("of another name")
    folder.handle.result()
    assert set(left) < set(names(out))
    with pack(out / "x.tar") as folder:
        (folder / "a").write_text("b")
    folder.handle.result()
    assert names(out) == ["x.tar", "y.tar"]


@needs_fork
def test_the_folder_of_a_living_process_is_not_swept(out, nursery):
    os.mkfifo(out.parent / "stdin")
    code = (
        HEAD
        + """
with pack(out / "x.tar") as folder:
    (folder / "a").write_text("theirs")
    print("inside", flush=True)
    sys.stdin.readline()
print(folder.handle.result().status)
"""
    )
    child = nursery.start(code, out, stdin=str(out.parent / "stdin"))
    with open(out.parent / "stdin", "w") as stdin:
        child.wait_for_line("inside\n")
        with pack(out / "x.tar") as folder:
            (folder / "a").write_text("ours")
        folder.handle.result()
        stdin.write("\n")
    assert child.ended().out == "inside\ncommitted\n"
    assert names(out) == ["x.tar"]
    with unpack(out / "x.tar") as unpacked:
        assert (unpacked / "a").read_text() == "theirs"


@needs_fork
def test_a_forked_child_neither_streams_nor_removes_its_parents_folder(out, nursery):
    code = (
        HEAD
        + """
def in_child(what):
    child = os.fork()
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        return
    try:
        what()
    except BaseException as error:
        print(type(error).__name__, flush=True)
        os._exit(1)
    os._exit(0)

def leave():
    try:
        packing.__exit__(None, None, None)
    except ClosedError:
        return
    raise AssertionError

def pack_another():
    with pack(out / "child.tar") as other:
        (other / "a").write_text("child")
    other.handle.result()
    import async_ckpt.saving.worker
    async_ckpt.saving.worker._drain_at_exit()

packing = pack(out / "x.tar")
with packing as folder:
    (folder / "a").write_text("b")
    in_child(lambda: packing.__exit__(ValueError, ValueError(), None))
    in_child(leave)
    in_child(pack_another)
    assert (folder / "a").read_text() == "b"
folder.handle.result()
in_child(pack_another)
"""
    )
    ended = nursery.run(code, out)

    assert (ended.status, ended.out, ended.err) == (0, "", "")
    assert names(out) == ["child.tar", "x.tar"]


@needs_fork
def test_ctrl_c_in_the_block_publishes_nothing(out, nursery):
    code = (
        HEAD
        + """
with pack(out / "x.tar") as folder:
    (folder / "a").write_text("b")
    print("inside", flush=True)
    signal.pause()
"""
    )
    child = nursery.start(code, out)
    child.wait_for_line("inside\n")
    child.send(2)
    ended = child.ended()

    assert "KeyboardInterrupt" in ended.err
    assert names(out) == []


@needs_fork
def test_ctrl_c_at_the_end_gives_the_pack_up_and_keeps_the_folder(out, nursery):
    code = (
        HEAD
        + """
from children import hold_writes
import async_ckpt.saving.worker
go = hold_writes()
abandon, wait = async_ckpt.saving.worker.abandon, async_ckpt.saving.worker.wait_for
def let_go(pending, why):
    for save in pending:
        save.give_up(async_ckpt.SaveAbandonedError(why))
    go.set()
    return abandon(pending, why)
def waits(*arguments):
    print("waiting", flush=True)
    return wait(*arguments)
async_ckpt.saving.worker.abandon, async_ckpt.saving.worker.wait_for = let_go, waits
import async_ckpt
(out / "x.tar").write_bytes(b"of before")
with pack(out / "x.tar") as folder:
    (folder / "a").write_bytes(b"b" * (10 << 20))
with pack(out / "y.tar") as folder:
    (folder / "a").write_text("b")
"""
    )
    child = nursery.start(code, out)
    child.wait_for_line("waiting\n")
    child.send(2)
    ended = child.ended()

    assert ended.status in (1, 130, -2), ended.err
    assert "x.tar was not saved: SaveAbandonedError" in ended.err
    assert "y.tar was not saved: SaveAbandonedError" in ended.err
    assert (out / "x.tar").read_bytes() == b"of before"
    left = [name for name in names(out) if name != "x.tar"]
    assert len(left) == 2
    assert all(name.endswith(".kept") for name in left)


# --- nothing is left behind ------------------------------------------------------------------------------------


def test_many_packs_leave_no_thread_descriptor_or_memory_behind(out, tree):
    def some() -> None:
        for number in range(15):
            with pack(out / f"x.tar{'.zst' if number % 2 else ''}") as folder:
                (folder / "a").write_bytes(bytes(9 * MIB))
            folder.handle.result()
            with pack(out / "bad.tar") as folder:
                os.mkfifo(folder / "pipe")
            assert isinstance(folder.handle.exception(), CheckpointError)
            shutil.rmtree(kept(out).parent)
        settled()
        gc.collect()

    def counts() -> Sequence[int]:
        until(lambda: not any("append" in thread.name for thread in threading.enumerate()))
        fds = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
        return threading.active_count(), fds, files_saver().pool.num_bytes

    some()
    before = counts()
    some()
    assert counts()[1:] <= before[1:]
    assert counts()[0] <= before[0] + 2  # crews grow up to their sizes
    assert files_saver().pool.num_bytes == 0
    assert files_saver().metrics()["saves_in_flight"] == 0
