"""`pack` and `pack_folder`: when the archive of a folder is made and where, and that it is there whole or not at all."""

import asyncio
import gc
import os
import random
import shutil
import stat
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest
from packing import kept, names, settled
from racing import PATIENCE, Thrown, until
from states import MIB
from tarballs import look

from async_ckpt import CheckpointError, NothingWrittenError, StorageUnavailableError, pack, unpack
from async_ckpt.core.storage.local import LocalSink
from async_ckpt.face.around.pack import files_saver
from async_ckpt.files import extract, pack_folder

ZSTD_MAGIC = bytes.fromhex("28b52ffd")

pytestmark = pytest.mark.skipif(os.name != "posix", reason="links, modes and tar as POSIX has them")


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
    with pytest.raises(RuntimeError, match="no handle until the"):
        packing.handle  # noqa: B018
    with packing as folder:
        (folder / "a").write_text("b")
        for either in (packing, folder):
            with pytest.raises(RuntimeError, match="no handle until the"):
                either.handle  # noqa: B018
        assert "x.tar" in repr(packing)
    assert packing.handle is folder.handle
    assert folder.result() is packing.handle.result()
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
        with pytest.raises(ValueError, match="would contain itself"):
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
    with pytest.raises(NotADirectoryError, match="is not a folder"):
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


MISLEADING = ["x.tar.gz", "x.TGZ", "x.tar.bz2", "x.tar.xz", "x.txz", "x.tar.lz4", "x.zip", "X.TAR.GZ", "x.tzst"]


@pytest.mark.parametrize("name", MISLEADING)
def test_a_name_that_promises_another_compression_is_refused_before_anything_is_written(out, tree, name):
    for destination in (out / name, f"memory://{out}/{name}", f"memory://{out}/{name}?version=1"):
        with pytest.raises(ValueError, match=r"only zstd can be written; use the suffix \.tar\.zst"):
            pack(destination)
        with pytest.raises(ValueError, match="only zstd"):
            pack_folder(tree, destination, compression="zstd")
    assert os.listdir(out) == []


@pytest.mark.parametrize("name", ["x.tar.zst", "X.TAR.ZST", "x.zst"])
def test_a_name_that_promises_zstd_is_kept_to(out, tree, name):
    pack_folder(tree, out / name).result()

    assert (out / name).read_bytes()[:4] == ZSTD_MAGIC


def test_a_name_with_a_query_promises_what_stands_before_it(out, tree):
    pack_folder(tree, f"memory://{out}/x.tar.zst?version=1").result()

    assert fsspec.filesystem("memory").cat(f"{out}/x.tar.zst?version=1")[:4] == ZSTD_MAGIC


# --- stores ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["obstore", "s3fs"])
@pytest.mark.parametrize("name", ["x.tar", "x.tar.zst"])
def test_a_folder_goes_to_a_bucket_and_comes_back(bucket, tmp_path, tree, engine, name):
    place = bucket.place(f"runs/{name}", engine)
    (tree / "weights").write_bytes(random.Random(0).randbytes(18 * MIB))
    with pack(place, scratch=tmp_path / "scratch") as folder:
        shutil.copytree(tree, folder, symlinks=True, dirs_exist_ok=True)
        expected = look(folder)
    report = folder.handle.result()

    assert report.path == bucket.url(f"runs/{name}")
    assert bucket.keys() == [f"runs/{name}"]
    assert bucket.uploads() == []
    assert report.destinations[0].num_bytes == len(bucket.read(f"runs/{name}"))
    assert names(tmp_path / "scratch") == []
    with unpack(place) as unpacked:
        assert look(unpacked) == expected


@pytest.mark.parametrize("engine", ["obstore", "s3fs"])
@pytest.mark.parametrize("name", ["x.tar", "x.tar.zst"])
def test_an_upload_that_fails_leaves_the_folder_and_no_object(bucket, proxy, tmp_path, engine, name):
    bucket.write([f"runs/{name}"], b"of before")
    proxy.answer("AccessDenied", kind="upload_part", target=r"partNumber=2\b")
    data = random.Random(0).randbytes(40 * MIB)
    with pack(bucket.place(f"runs/{name}", engine, endpoint=proxy.endpoint), scratch=tmp_path) as folder:
        (folder / "a").write_bytes(data)
    error = folder.handle.exception()

    assert isinstance(error, StorageUnavailableError)
    assert (kept(tmp_path) / "a").read_bytes() == data
    assert bucket.read(f"runs/{name}") == b"of before"
    assert bucket.uploads() == []


def test_an_upload_that_breaks_off_is_made_again(bucket, proxy, tmp_path):
    place = bucket.place("x.tar", endpoint=proxy.endpoint, retry_config={"max_retries": 0})
    proxy.cut_request(MIB, times=1, kind="upload_part", target=r"partNumber=2\b")
    data = random.Random(0).randbytes(70 * MIB)
    with pack(place, scratch=tmp_path) as folder:
        (folder / "a").write_bytes(data)

    assert folder.handle.result().retries == 1
    with unpack(place) as unpacked:
        assert (unpacked / "a").read_bytes() == data
    assert bucket.uploads() == []


# --- processes -------------------------------------------------------------------------------------------------

HEAD = """
import os, signal, sys, threading
from pathlib import Path
from async_ckpt import files, pack, unpack, ClosedError
pack_folder = files.pack_folder
out = Path(sys.argv[1])
"""


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
    nursery.out_of(code, out)
    assert names(out) == ["x.tar"]
    with unpack(out / "x.tar") as folder:
        assert (folder / "a").read_bytes() == b"b" * (30 * MIB)


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


def test_a_forked_child_neither_streams_nor_removes_its_parents_folder(out, nursery):
    code = (
        HEAD
        + """
import children
children.forks_on_purpose()

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
    import async_ckpt.core.saving.exit
    async_ckpt.core.saving.exit.drain_at_exit()

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
    assert nursery.out_of(code, out) == ""
    assert names(out) == ["child.tar", "x.tar"]


def test_ctrl_c_in_the_block_publishes_nothing(out, nursery):
    code = (
        HEAD
        + """
with pack(out / "x.tar") as folder:
    (folder / "a").write_text("b")
    print("inside", flush=True)
    while True:  # signal.pause() would sleep on behind a signal that comes just ahead of it
        threading.Event().wait(0.01)
"""
    )
    child = nursery.start(code, out)
    child.wait_for_line("inside\n")
    child.send(2)
    ended = child.ended()

    assert "KeyboardInterrupt" in ended.err
    assert names(out) == []


def test_ctrl_c_at_the_end_gives_the_pack_up_and_keeps_the_folder(out, nursery):
    code = (
        HEAD
        + """
from children import hold_writes
import async_ckpt.core.saving.exit
go = hold_writes()
abandon, wait = async_ckpt.core.saving.exit.abandon, async_ckpt.core.saving.exit.wait_for
def let_go(pending, why):
    for save in pending:
        save.give_up(async_ckpt.SaveAbandonedError(why))
    go.set()
    return abandon(pending, why)
def waits(*arguments):
    print("waiting", flush=True)
    return wait(*arguments)
async_ckpt.core.saving.exit.abandon, async_ckpt.core.saving.exit.wait_for = let_go, waits
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
