"""Any tar comes back as a folder, where it is wanted and from wherever it lies."""

import contextlib
import gc
import gzip
import os
import random
import shutil
import stat
import struct
import sys
import tarfile
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from racing import Call, until
from states import MIB
from tarballs import gnu_tar, in_names, look, make_tree, member, plain_tar, tar, with_holes

from async_ckpt import CorruptCheckpointError, StorageUnavailableError, unpack
from async_ckpt.core.storage.local import LocalStorage
from async_ckpt.face.foreign.read_ahead import ReadAhead
from async_ckpt.files import extract

zstandard = pytest.importorskip("zstandard")

posix = pytest.mark.skipif(os.name != "posix", reason="links, modes and tar as POSIX has them")
pytestmark = posix


# --- every tar comes back --------------------------------------------------------------------------------------


@gnu_tar
@pytest.mark.parametrize("form", ["gnu", "oldgnu", "pax", "ustar", "v7"])
@pytest.mark.parametrize("packed", [(), ("-z",), ("--zstd",)])
def test_what_gnu_tar_has_packed_in_any_of_its_formats_comes_back(tmp_path, form, packed):
    tree = make_tree(tmp_path / "tree")
    if form in ("gnu", "oldgnu", "pax"):
        in_names(tree)
    if "--zstd" in packed and shutil.which("zstd") is None:
        pytest.skip("zstd is not installed")
    tar("-cf", tmp_path / "x.tar", f"--format={form}", *packed, "-C", tree, ".")

    assert extract(tmp_path / "x.tar", tmp_path / "out") == tmp_path / "out"
    assert look(tmp_path / "out") == look(tree)


@gnu_tar
@pytest.mark.parametrize(
    "how",
    [
        ("--format=oldgnu",),
        ("--format=gnu",),
        ("--format=pax", "--sparse-version=0.0"),
        ("--format=pax", "--sparse-version=0.1"),
        ("--format=pax", "--sparse-version=1.0"),
    ],
)
def test_a_file_with_holes_that_gnu_tar_has_packed_comes_back_with_its_holes(tmp_path, how):
    tree = make_tree(tmp_path / "tree")
    with_holes(tree / "sparse", 40)
    with_holes(tree / "sparse too", 2)
    with open(tree / "nothing but a hole", "wb") as file:
        file.truncate(16 * MIB)
    tar("-cSf", tmp_path / "x.tar", *how, "-C", tree, ".")
    extract(tmp_path / "x.tar", tmp_path / "out")

    assert look(tmp_path / "out") == look(tree)
    assert (tmp_path / "out/sparse").stat().st_blocks * 512 < MIB
    assert (tmp_path / "out/nothing but a hole").stat().st_size == 16 * MIB


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("mode", ["w", "w:gz"])
@pytest.mark.parametrize("top", [".", "", "checkpoint"])
def test_what_tarfile_has_packed_in_any_of_its_formats_comes_back(tmp_path, form, mode, top):
    tree = make_tree(tmp_path / "tree")
    if form != tarfile.USTAR_FORMAT:
        in_names(tree)
    with tarfile.open(tmp_path / "x.tar", mode, format=form) as archive:
        archive.add(tree, arcname=top)
    extract(tmp_path / "x.tar", tmp_path / "out")

    assert look(tmp_path / "out" / (top or ".")) == look(tree)


def test_a_name_says_nothing_about_what_is_in_a_file(tmp_path):
    data = plain_tar([member("a", b"b")])
    packed = {"x.tar.zst": data, "x.gz": zstandard.compress(data), "x": gzip.compress(data), "x.tgz": data}
    for name, content in packed.items():
        (tmp_path / name).write_bytes(content)
        with unpack(tmp_path / name) as folder:
            assert (folder / "a").read_bytes() == b"b"


def test_zstd_and_gzip_in_several_pieces_come_back(tmp_path):
    data = plain_tar([member("a", os.urandom(3 * MIB))])
    thirds = [data[at : at + MIB] for at in range(0, len(data), MIB)]
    unsized = zstandard.ZstdCompressor(write_content_size=False, write_checksum=True)
    skipped = struct.pack("<II", 0x184D2A53, 3) + b"abc"
    for number, packed in enumerate(
        (
            b"".join(map(gzip.compress, thirds)),
            b"".join(map(zstandard.compress, thirds)),
            skipped + b"".join(map(unsized.compress, thirds)) + skipped,
        )
    ):
        (tmp_path / "x.tar").write_bytes(packed)
        extract(tmp_path / "x.tar", tmp_path / str(number))
        assert look(tmp_path / str(number))[b"a"][1] == data[512 : 512 + 3 * MIB]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.text(st.characters(exclude_characters="/\0", exclude_categories=("Cs",)), min_size=1, max_size=40)
        .filter(lambda name: name not in (".", "..") and len(name.encode()) < 200)
        .map(lambda name: f"d/{name}"),
        st.binary(max_size=3000),
        max_size=8,
    ),
    st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    st.sampled_from([bytes, gzip.compress, zstandard.compress]),
)
def test_any_files_in_an_archive_come_back(tmp_path_factory, files, form, packed):
    folder = tmp_path_factory.mktemp("any")
    data = plain_tar(
        [member("d", kind=tarfile.DIRTYPE), *(member(name, data) for name, data in files.items())],
        format=form,
    )
    (folder / "x").write_bytes(packed(data))
    extract(folder / "x", folder / "out")

    assert {f"d/{p.name}": p.read_bytes() for p in (folder / "out/d").iterdir()} == files


def test_what_an_archive_says_of_owners_and_rights_is_not_believed(tmp_path):
    members = [
        member("setuid", b"x", mode=0o6777, uid=0, gid=0),
        member("unreadable", b"x", mode=0),
        member("folder", kind=tarfile.DIRTYPE, mode=0),
        member("folder/inside", b"x", mode=0o111),
    ]
    (tmp_path / "x.tar").write_bytes(plain_tar(members))
    out = extract(tmp_path / "x.tar", tmp_path / "out")

    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in out.rglob("*")}
    assert modes["setuid"] == 0o755
    assert modes["unreadable"] == 0o600
    assert modes["folder"] & 0o700 == 0o700
    assert {path.stat().st_uid for path in out.rglob("*")} == {os.geteuid()}


def test_folders_that_no_member_tells_of_are_made(tmp_path):
    (tmp_path / "x.tar").write_bytes(plain_tar([member("a/b/c", b"d")]))

    assert (extract(tmp_path / "x.tar", tmp_path / "new/out") / "a/b/c").read_bytes() == b"d"


def test_a_folder_is_told_of_as_often_as_one_likes(tmp_path):
    folder = member("a", kind=tarfile.DIRTYPE)
    (tmp_path / "x.tar").write_bytes(plain_tar([folder, member("a/b", b"c"), folder, member(".", kind=b"5")]))

    assert (extract(tmp_path / "x.tar", tmp_path / "out") / "a/b").read_bytes() == b"c"


# --- where it goes ---------------------------------------------------------------------------------------------


@pytest.fixture
def good(tmp_path: Path) -> Path:
    (tmp_path / "x.tar").write_bytes(plain_tar([member("a", b"b"), member("c/d", b"e" * MIB)]))
    return tmp_path / "x.tar"


def test_an_empty_folder_is_taken_with_the_rights_that_it_has(good, tmp_path):
    (tmp_path / "out").mkdir(0o700)
    extract(good, tmp_path / "out")

    assert (tmp_path / "out/a").read_bytes() == b"b"
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o700
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        assert (extract(good, folder) / "a").read_bytes() == b"b"
    assert sorted(os.listdir(tmp_path)) == ["out", "x.tar"]


def test_the_current_folder_is_not_exchanged_under_the_process(good, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ValueError, match="is the current folder"):
        extract(good, ".")
    extract(good, "inside")

    assert os.listdir(tmp_path / "here") == ["inside"]


def test_a_link_to_an_empty_folder_is_that_folder(good, tmp_path):
    (tmp_path / "disk/real").mkdir(parents=True)
    (tmp_path / "out").symlink_to("disk/real")

    assert extract(good, tmp_path / "out") == tmp_path / "out"
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "disk/real/a").read_bytes() == b"b"
    assert os.listdir(tmp_path / "disk") == ["real"]


@pytest.mark.parametrize("what", ["full folder", "file", "broken link"])
def test_what_is_there_already_is_not_touched(good, tmp_path, what):
    target = tmp_path / "out"
    if what == "full folder":
        target.mkdir()
        (target / "mine").write_text("mine")
    elif what == "file":
        target.write_text("mine")
    else:
        target.symlink_to("nowhere")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(FileExistsError, match="give a new one"):
        extract(good, target)

    assert sorted(os.listdir(tmp_path)) == before


def test_a_folder_that_is_filled_meanwhile_is_not_touched(good, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    replace = os.replace

    def filled_first(source: Any, target: Any) -> None:
        (tmp_path / "out/mine").write_text("mine")
        replace(source, target)

    monkeypatch.setattr(os, "replace", filled_first)
    with pytest.raises(StorageUnavailableError):
        extract(good, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["out", "x.tar"]
    assert os.listdir(tmp_path / "out") == ["mine"]


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("bztar", "bzip2; decompress it first, by bunzip2"),
        ("xztar", "xz; decompress it first, by unxz"),
        ("zip", "a zip file; extract it"),
        (None, "a text file"),
    ],
)
def test_a_file_that_is_no_tar_is_told_by_its_kind(tmp_path, kind, told):
    (tmp_path / "in").mkdir()
    file = tmp_path / "in" / "text"
    file.write_text("text\n" * 200)
    if kind is not None:
        file = Path(shutil.make_archive(str(tmp_path / "packed"), kind, tmp_path / "in"))

    with pytest.raises(CorruptCheckpointError, match=f"it cannot be extracted, since this is {told}"):
        extract(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("source", ["missing.tar", ".", "missing/x.tar"])
def test_where_there_is_no_archive_nothing_is_made(tmp_path, source):
    with pytest.raises(FileNotFoundError, match="no such archive"):
        extract(tmp_path / source, tmp_path / "out")
    with pytest.raises(FileNotFoundError), unpack(tmp_path / source, scratch=tmp_path):
        pytest.fail("it was entered")
    assert os.listdir(tmp_path) == []


def test_an_unpacked_folder_is_gone_however_its_block_ends(good, tmp_path):
    with unpack(good, scratch=tmp_path / "scratch") as folder:
        assert folder.is_relative_to(tmp_path / "scratch")
        assert (folder / "c/d").read_bytes() == b"e" * MIB
        (folder / "new").write_text("of the user's")
    assert os.listdir(tmp_path / "scratch") == []

    class MyError(Exception):
        pass

    with pytest.raises(MyError), unpack(good, scratch=tmp_path / "scratch") as folder:
        raise MyError
    with pytest.raises(KeyboardInterrupt), unpack(good, scratch=tmp_path / "scratch") as folder:
        raise KeyboardInterrupt
    assert os.listdir(tmp_path / "scratch") == []


def test_an_unpacked_folder_may_be_moved_away(good, tmp_path):
    with unpack(good, scratch=tmp_path / "scratch") as folder:
        shutil.move(folder, tmp_path / "mine")

    assert (tmp_path / "mine/a").read_bytes() == b"b"
    assert os.listdir(tmp_path / "scratch") == []


def test_other_users_cannot_look_into_what_is_unpacked(good, tmp_path):
    with unpack(good, scratch=tmp_path) as folder:
        assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700


def test_without_more_said_it_lies_in_the_temp_folder_of_the_system(good):
    before = set(os.listdir(tempfile.gettempdir()))
    with unpack(good) as folder:
        assert folder.is_relative_to(tempfile.gettempdir())
    left = set(os.listdir(tempfile.gettempdir())) - before

    assert not [name for name in left if "unpacked" in name]


DYING = """
import os, signal, sys
from async_ckpt import unpack
with unpack(sys.argv[1], scratch=sys.argv[2]) as folder:
    print("inside", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
FORKING = """
import os, sys
import children
from async_ckpt import unpack
children.forks_on_purpose()
with unpack(sys.argv[1], scratch=sys.argv[2]) as folder:
    child = os.fork()
    if child == 0:
        raise SystemExit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert (folder / "a").read_bytes() == b"b"
print(os.listdir(sys.argv[2]))
"""


def test_what_a_killed_process_left_is_swept_by_the_next(good, tmp_path, nursery):
    assert nursery.run(DYING, good, tmp_path / "scratch").status == -9
    assert os.listdir(tmp_path / "scratch") != []
    with unpack(good, scratch=tmp_path / "scratch") as folder:
        assert os.listdir(tmp_path / "scratch") != []
        with unpack(good, scratch=tmp_path / "scratch"):
            assert (folder / "a").exists()
    assert os.listdir(tmp_path / "scratch") == []


def test_a_forked_child_leaves_its_parents_folder_alone(good, tmp_path, nursery):
    assert nursery.out_of(FORKING, good, tmp_path / "scratch") == "[]\n"


# --- stores ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["obstore", "s3fs"])
def test_an_archive_in_a_bucket_comes_back(bucket, tmp_path, engine):
    data = plain_tar([member("a", os.urandom(20 * MIB)), member("b", b"c")])
    bucket.server.client.put_object(Bucket=bucket, Key="runs/x.tar.gz", Body=data)

    with unpack(bucket.place("runs/x.tar.gz", engine)) as folder:
        assert (folder / "a").read_bytes() == data[512 : 512 + 20 * MIB]
    extract(bucket.place("runs/x.tar.gz", engine), tmp_path / "out")
    assert (tmp_path / "out/b").read_bytes() == b"c"
    with pytest.raises(FileNotFoundError, match="no such archive"):
        extract(bucket.place("runs/missing.tar", engine), tmp_path / "missing")
    bucket.server.client.put_object(Bucket=bucket, Key="runs/cut.tar", Body=data[: 12 * MIB])
    with pytest.raises(CorruptCheckpointError, match=r"runs/cut\.tar"):
        extract(bucket.place("runs/cut.tar", engine), tmp_path / "cut")
    assert os.listdir(tmp_path) == ["out"]


def test_an_object_that_is_replaced_while_it_is_unpacked_is_said_to_be(bucket, proxy, tmp_path):
    old, new = (plain_tar([member("a", bytes([i]) * (20 * MIB))]) for i in (1, 2))
    bucket.server.client.put_object(Bucket=bucket, Key="x.tar", Body=old)
    held = proxy.delay(
        None, kind="get_object", times=1, where=lambda r: r.headers["range"].startswith("bytes=16777216-")
    )
    call = Call(lambda: extract(bucket.place("x.tar", endpoint=proxy.endpoint), tmp_path / "out"))
    held.wait()
    bucket.server.client.put_object(Bucket=bucket, Key="x.tar", Body=new)
    held.clear()

    with pytest.raises(StorageUnavailableError, match="replaced"):
        call.outcome()
    assert os.listdir(tmp_path) == []


def test_an_answer_that_breaks_off_is_asked_for_again(bucket, proxy, tmp_path):
    data = plain_tar([member("a", os.urandom(12 * MIB))])
    bucket.server.client.put_object(Bucket=bucket, Key="x.tar", Body=data)
    proxy.cut_response(100_000, kind="get_object", times=2)
    extract(bucket.place("x.tar", endpoint=proxy.endpoint), tmp_path / "out")

    assert (tmp_path / "out/a").read_bytes() == data[512 : 512 + 12 * MIB]


# --- reading ahead ---------------------------------------------------------------------------------------------


class Recorder:
    """A real reader that notes what is asked of it, and fails or waits where it is told to."""

    def __init__(self, reader: Any) -> None:
        self._reader, self.num_bytes = reader, reader.num_bytes
        self.asked: list[tuple[int, int]] = []
        self.fails_at: int | None = None
        self.waits_at: int | None = None
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.inside = 0
        self.closed_inside = False
        self.closed = 0
        self._lock = threading.Lock()

    def read_into(self, offset: int, target: memoryview) -> None:
        with self._lock:
            self.asked.append((offset, len(target)))
            self.inside += 1
        try:
            if offset == self.waits_at:
                self.reached.set()
                self.go_on.wait(60)
            if self.fails_at is not None and offset >= self.fails_at:
                raise StorageUnavailableError("away", path="x")
            self._reader.read_into(offset, target)
        finally:
            with self._lock:
                self.inside -= 1

    def close(self) -> None:
        self.closed += 1
        self.closed_inside |= bool(self.inside)
        self._reader.close()


@pytest.fixture
def recorded(tmp_path: Path) -> Recorder:
    (tmp_path / "data").write_bytes(random.Random(3).randbytes(60 * MIB + 77))
    return Recorder(LocalStorage(tmp_path).open("data"))


def fetchers() -> int:
    return sum("async_ckpt-fetch" in thread.name for thread in threading.enumerate())


@pytest.mark.parametrize("size", [1000, MIB, 8 * MIB, 100 * MIB])
def test_what_is_fetched_ahead_comes_in_order_and_once(recorded, tmp_path, size):
    whole = (tmp_path / "data").read_bytes()
    with ReadAhead(recorded) as file:
        if size == 1000:
            assert b"".join(file.read(size) for _ in range(10)) == whole[:10_000]
        pieces = []
        while piece := file.read(max(size, MIB)):
            pieces.append(piece)
        assert file.tell() == len(whole)
        assert b"".join(pieces) == whole[10_000 if size == 1000 else 0 :]
    assert sum(length for _, length in recorded.asked) == len(whole)
    assert recorded.closed == 1
    until(lambda: fetchers() == 0)


def test_no_more_is_fetched_ahead_than_told(recorded):
    with ReadAhead(recorded) as file:
        file.read(1)
        until(lambda: recorded.inside == 0)
        assert sum(length for _, length in recorded.asked) <= 40 * MIB


def test_closing_early_waits_for_what_reads_and_lets_all_threads_end(recorded):
    recorded.waits_at = 8 * MIB
    file = ReadAhead(recorded)
    file.read(10)
    recorded.reached.wait(60)
    closing = Call(file.close)
    closing.wait_until_inside("exception")
    assert recorded.closed == 0
    recorded.go_on.set()
    closing.outcome()

    assert (recorded.closed, recorded.closed_inside) == (1, False)
    until(lambda: fetchers() == 0)


def test_an_interrupted_read_leaves_nobody_reading_from_what_is_closed(recorded, monkeypatch):
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    recorded.waits_at = 0
    file = ReadAhead(recorded)
    with monkeypatch.context() as patch:
        patch.setattr(Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            file.read(10)
    recorded.reached.wait(60)
    until(lambda: recorded.inside == 1)  # the one that nobody waits for any more
    closing = Call(file.close)
    closing.wait_until_inside("exception")
    assert recorded.closed == 0
    recorded.go_on.set()
    closing.outcome()
    assert (recorded.closed, recorded.closed_inside) == (1, False)


def test_what_a_read_has_met_is_raised_in_its_place_and_again(recorded):
    recorded.fails_at = 16 * MIB
    with ReadAhead(recorded) as file:
        assert sum(len(file.read(MIB)) for _ in range(16)) == 16 * MIB
        for _ in range(2):
            with pytest.raises(StorageUnavailableError):
                file.read(1)
    assert recorded.closed == 1


def test_many_archives_leave_no_thread_descriptor_or_memory_behind(place):
    (place / "x.tar").write_bytes(zstandard.compress(plain_tar([member("a", bytes(MIB))])))
    broken = place / "broken.tar"
    broken.write_bytes((place / "x.tar").read_bytes()[:-3])

    def some() -> None:
        for _ in range(10):
            with unpack(place / "x.tar", scratch=place):
                pass
            with contextlib.suppress(CorruptCheckpointError), unpack(broken, scratch=place):
                pass
        gc.collect()
        until(lambda: fetchers() == 0)

    some()
    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    some()
    assert (len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0) <= before
