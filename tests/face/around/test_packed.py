"""What a packed folder becomes: one tar that every reader knows, or an error that names what cannot be packed."""

import contextlib
import os
import random
import shutil
import socket
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from disks import mounted, needs_mount
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packing import kept, names
from racing import PATIENCE, Thrown, until
from slices import examples
from states import MIB
from tarballs import gnu_tar, in_names, look, tar, with_holes

from async_ckpt import StorageFullError, StorageUnavailableError, TornSnapshotError, UnsupportedStateError, pack, unpack
from async_ckpt.core.format.tar_of_files import Tarball, TarEntry, stays_inside
from async_ckpt.core.host.pool import Lease, SegmentPool
from async_ckpt.core.host.threads import Crew
from async_ckpt.core.staging.file_segments import FilesImage, FileSource, SourceFiles, scan
from async_ckpt.core.staging.filler import StagingHost
from async_ckpt.core.staging.snapshot import Snapshot
from async_ckpt.core.timing import monotonic
from async_ckpt.files import extract, pack_folder

pytestmark = pytest.mark.skipif(os.name != "posix", reason="links, modes and tar as POSIX has them")
GIB = 1 << 30
BLOCK = 4 * MIB


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


@pytest.mark.parametrize("ending", ["tar", "tar.zst", "TAR.ZST"])
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
    entries = [TarEntry("./a", tarfile.REGTYPE, 0o644, when, 3, runs=((0, 3),))]
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


def test_many_small_files_come_back(quick_path):
    count = 6_000
    with pack(quick_path / "x.tar") as folder:
        for number in range(count):
            if number % 1000 == 0:
                (folder / f"{number // 1000:03}").mkdir()
            (folder / f"{number // 1000:03}/{number:06}").write_bytes(b"%d" % number)
    folder.handle.result()
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
    monkeypatch.setattr("async_ckpt.core.staging.file_segments._MAX_RUNS", 8)
    (tmp_path / "few").mkdir()
    with_holes(tmp_path / "few/holes", 8)
    with_holes(tmp_path / "few/more holes", 9)
    sizes = {
        path: sum(length for _, length in e.runs) for path, e in zip("-fm", scan(tmp_path / "few")[0], strict=True)
    }

    assert sizes["f"] < MIB
    assert sizes["m"] == 9 * MIB + 123


@gnu_tar
@pytest.mark.parametrize("size", [8 * GIB - 1, 8 * GIB, 9 * GIB + 5, 70 * GIB])
def test_members_of_8_gib_and_more_are_known_to_every_reader(tmp_path, size):
    """The image is written as a file with holes: only headers, and the end of the data, are real."""
    entries = [
        TarEntry("./before", tarfile.REGTYPE, 0o644, 7, 3, runs=((0, 3),)),
        TarEntry("./large", tarfile.REGTYPE, 0o644, 7, size, runs=((0, size),)),
        TarEntry("./with holes", tarfile.REGTYPE, 0o644, 7, 2 * size, runs=((size, 512), (2 * size - 512, 512))),
        TarEntry("./after", tarfile.REGTYPE, 0o644, 7, 3, runs=((0, 3),)),
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


def image_of(image: Tarball, files: dict[int, bytes], segment_bytes: int) -> bytes:
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
def entries_and_files(draw: Any) -> tuple[list[TarEntry], dict[int, bytes]]:
    entries, files = [], {}
    for number, name in enumerate(draw(st.lists(member_names, max_size=6, unique=True))):
        kind = draw(st.sampled_from([tarfile.REGTYPE, tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE]))
        mode, mtime = draw(st.integers(0, 0o7777)), draw(st.integers(-(10**9), 10**11))
        if kind != tarfile.REGTYPE:
            linkname = draw(member_names) if kind == tarfile.SYMTYPE else ""
            entries.append(TarEntry(name, kind, mode, mtime, link=linkname))
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
        entries.append(TarEntry(name, kind, mode, mtime, len(data), runs=tuple(runs)))
    return entries, files


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
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


small_trees = st.recursive(
    st.binary(max_size=200),
    lambda inside: st.dictionaries(
        st.text(st.characters(exclude_characters="/\0", exclude_categories=("Cs",)), min_size=1, max_size=30).filter(
            lambda name: name not in (".", "..")
        ),
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


@settings(max_examples=examples(30), deadline=None)
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


# --- what cannot be packed -------------------------------------------------------------------------------------


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


def test_absolute_links_within_a_folder_that_was_filled_to_be_packed_are_kept_as_relative_ones(out):
    with pack(out / "x.tar") as folder:
        (folder / "steps").mkdir()
        (folder / "steps" / "a").write_text("b")
        (folder / "latest").symlink_to(folder / "steps" / "a")
    folder.handle.result()

    with unpack(out / "x.tar", scratch=out) as unpacked:
        assert os.readlink(unpacked / "latest") == "steps/a"
        assert (unpacked / "latest").read_text() == "b"


@pytest.mark.parametrize("kind", ["pipe", "socket", "link to an absolute path", "link out", "link that may lead out"])
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

    monkeypatch.setattr(sys.modules["async_ckpt.face.around.pack"], "scan", scanned)


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


class Filling:
    """A snapshot of a real folder in a real pool, and its receiver, whose put does what a test says."""

    num_tail = 0

    def __init__(self, folder: Path, pool: SegmentPool, crew: Crew) -> None:
        entries, sources = scan(folder)
        image = Tarball(entries)
        segments = image.segments(pool.segment_bytes)
        self.num_segments, self.num_put = len(segments), 0
        self.kept: list[Lease] = []
        self.keeps = False
        self.error: BaseException | None = None
        self.before_put: Callable[[int], Any] = lambda _: None
        source = SourceFiles(FilesImage(image, sources), len(segments), self.check)
        self.snapshot = Snapshot(source, segments, self, StagingHost(pool, crew.submit, monotonic), order=1)
        self.begin, self.completion = self.snapshot.begin, self.snapshot.completion

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def put(self, number: int, lease: Lease) -> None:
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
        monkeypatch.setattr("async_ckpt.core.staging.file_segments.open", refuse, raising=False)
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
    assert sources[1] == FileSource(
        str(tmp_path / "tree/holes"), 20 * MIB + 123, (tmp_path / "tree/holes").stat().st_mtime_ns
    )
