"""The local disk: whole files or none, under any name, and only the dead swept."""

import errno
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from disks import write_whole
from racing import Call
from states import MIB, assert_is_state, leftovers, names_below, open_run, records, save_into, state_at

import async_ckpt
from async_ckpt import StorageUnavailableError
from async_ckpt.core.host.memory import HostBuffer
from async_ckpt.core.storage import local, locks
from async_ckpt.core.storage.disk import close_quietly, read_regular
from async_ckpt.core.storage.local import LocalStorage
from async_ckpt.core.storage.locks import TEMP_SUFFIX

needs_fcntl = pytest.mark.skipif(sys.platform == "win32", reason="no record locks here")


@pytest.fixture
def disk(tmp_path):
    return LocalStorage(tmp_path / "root")


# --- one object ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [1, 511, 4095, 4097, 3 * 4096 + 17])
def test_sizes_and_addresses_that_no_direct_write_takes_are_written_all_the_same(disk, num_bytes):
    data = bytes(range(256)) * (num_bytes // 256 + 1)
    write_whole(disk, "odd", data[:num_bytes])

    assert disk.read("odd")[0] == data[:num_bytes]


def test_a_folder_that_two_make_and_a_third_removes_is_made_again(disk, monkeypatch):
    mkdir, removed = os.mkdir, []

    def contended(path, *mode):
        mkdir(path, *mode)
        if Path(path).name == "folder" and not removed:
            removed.append(path)
            os.rmdir(path)
            raise FileExistsError(path)

    monkeypatch.setattr(os, "mkdir", contended)
    disk.put_new("folder/manifest", b"1")

    assert len(removed) == 1
    assert disk.read("folder/manifest")[0] == b"1"


def test_a_write_that_takes_less_than_it_is_given_is_continued(disk, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:4096], offset))
    data = os.urandom(10 * 4096)
    write_whole(disk, "x", data)

    assert disk.read("x")[0] == data


def test_an_object_that_lacks_bytes_cannot_be_finished(disk, monkeypatch):
    sink = disk.create("x", num_bytes=8192)
    sink.write(0, memoryview(b"a" * 4096))
    os.truncate(next(disk.root.iterdir()), 4096)
    with pytest.raises(StorageUnavailableError):
        sink.finish()
    sink.abort()

    assert names_below(disk.root) == []


def test_every_descriptor_is_closed_again(disk):
    write_whole(disk, "warm", b"a")
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else None
    for number in range(8):
        write_whole(disk, f"x{number}", b"a" * 4096)
        disk.create("y", num_bytes=4096).abort()
        disk.put_new(f"z{number}", b"a")
        disk.replace("w", b"a")
        disk.read("w")
        disk.sweep("", disk.names(""))
        with disk.open("w") as reader:
            assert reader.num_bytes == 1
        with pytest.raises(FileExistsError):
            disk.put_new("w", b"a")

    if before is not None:
        assert len(os.listdir("/proc/self/fd")) == before


# --- reading ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("offset", "length"), [(0, 4096), (4096, 8192), (1, 5), (4095, 2), (0, 0), (12287, 1)])
def test_a_range_is_read_exactly_whatever_its_alignment(disk, offset, length):
    data = os.urandom(12288)
    write_whole(disk, "x", data)
    for target in (bytearray(length), HostBuffer(16384).view[:length]):
        with disk.open("x") as reader:
            reader.read_into(offset, memoryview(target))
        assert bytes(target) == data[offset : offset + length]


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="this system does not tell what its page cache has")
@pytest.mark.parametrize("num_cached", [0, 4096, MIB, 4 * MIB, 8 * MIB])
def test_what_the_page_cache_has_is_read_from_there_and_the_rest_from_the_disk(disk, num_cached):
    data = os.urandom(8 * MIB)
    write_whole(disk, "x", data)
    fd = os.open(disk.root / "x", os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no more than what is asked for
    os.pread(fd, num_cached, 0)
    target = HostBuffer(8 * MIB).view
    with disk.open("x") as reader:
        before = bytes_from_disks()
        reader.read_into(0, target)
        fetched = bytes_from_disks() - before
    os.close(fd)
    assert target == data
    if num_cached == len(data):
        assert fetched == 0
    if num_cached == 0 and not fetched:
        pytest.skip("a file system without a disk")


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system has no such advice")
def test_what_several_processes_read_comes_from_the_disk_once_if_they_share_it(disk):
    data = os.urandom(8 * MIB)
    write_whole(disk, "x", data)
    forget_cached(disk.root / "x")
    fetched = []
    for _ in range(2):
        target = HostBuffer(8 * MIB).view
        with disk.open("x") as reader:
            reader.share()
            before = bytes_from_disks()
            reader.read_into(0, target)
            fetched.append(bytes_from_disks() - before)
        assert target == data
    if not fetched[0]:
        pytest.skip("a file system without a disk")
    assert fetched == [len(data), 0]


def forget_cached(path):
    """Have the page cache hold nothing of a file."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bytes_from_disks():
    """Read by this process."""
    told = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(told["read_bytes"])


def test_reading_past_the_end_says_where_it_ends(disk):
    write_whole(disk, "x", b"a" * 5000)
    with disk.open("x") as reader:
        for target in (memoryview(bytearray(8192)), HostBuffer(8192).view):
            with pytest.raises(EOFError, match="5000"):
                reader.read_into(0, target)


# --- small objects ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="the exclusive rename is of Linux")
@pytest.mark.parametrize("code", ["EPERM", "EOPNOTSUPP", "ENOSYS", "EMLINK"])
def test_without_hard_links_a_new_object_is_still_created_only_once(disk, monkeypatch, code):
    def link(*_):
        raise OSError(getattr(errno, code), code)

    monkeypatch.setattr(os, "link", link)
    disk.put_new("manifest", b"first")
    with pytest.raises(FileExistsError):
        disk.put_new("manifest", b"second")

    assert disk.read("manifest")[0] == b"first"
    assert disk.names("") == ["manifest"]


def test_the_version_changes_whenever_an_object_is_replaced(disk):
    versions = set()
    for _ in range(20):
        disk.replace("x", b"same")
        versions.add(disk.read("x")[1])

    assert len(versions) == 20
    assert disk.read("x") == disk.read("x")


def test_a_folder_that_a_deletion_leaves_empty_goes_too_but_never_the_root(disk):
    disk.replace("a/x", b"1")
    disk.replace("a/y", b"2")
    disk.replace("z", b"3")
    disk.delete("a/x")
    assert disk.exists("a")
    disk.delete("a/y")
    assert not disk.exists("a")
    disk.delete("z")
    assert disk.root.is_dir()


def test_an_empty_folder_is_removed_and_nothing_else(disk):
    (disk.root / "empty").mkdir(parents=True)
    disk.replace("full/x", b"1")
    (disk.root / "link").symlink_to("empty")

    assert disk.names("") == ["empty", "full", "link"]
    assert [disk.remove_if_empty(name) for name in ("link", "full", "full/x", "missing", "", "empty")] == [
        False, False, False, False, False, True,
    ]  # fmt: skip
    assert disk.names("") == ["full", "link"]


@pytest.mark.parametrize("write", ["create", "put_new"])
def test_a_folder_that_is_removed_before_anything_is_in_it_is_made_again(disk, monkeypatch, write):
    make_folder, removed = local.make_folder, []

    def made_and_removed(folder: Path) -> None:
        make_folder(folder)
        if folder.name == "step" and not removed:  # another process comes by in this moment
            removed.append(disk.remove_if_empty("step"))

    monkeypatch.setattr(local, "make_folder", made_and_removed)
    if write == "create":
        write_whole(disk, "step/x", b"data")
    else:
        disk.put_new("step/x", b"data")

    assert removed == [True]
    assert disk.read("step/x")[0] == b"data"


# --- names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["a" * 255, "ü" * 127, "Пример.tar", "检查点.tar", "x y\t.tar", "-rf", "new\nline", "{}", "%s", "#?&"],
    ids=lambda name: ascii(name)[:20],
)
def test_any_name_that_the_file_system_takes_is_taken(tmp_path, name):
    async_ckpt.save(state_at(1), tmp_path / name).result()

    assert_is_state(async_ckpt.load(tmp_path / name), 1)
    assert os.listdir(tmp_path) == [name]


def test_a_name_that_is_too_long_is_said_to_be(tmp_path):
    with pytest.raises(StorageUnavailableError, match="too long"):
        async_ckpt.save(state_at(1), tmp_path / ("a" * 256)).result()

    assert names_below(tmp_path) == []


def test_a_symbolic_link_to_a_folder_is_a_folder(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    save_into(tmp_path / "link", 1)

    assert_is_state(async_ckpt.load(tmp_path / "real"), 1)


# --- sweeping --------------------------------------------------------------------------------------------------

WRITER = """
import sys, time
from async_ckpt.core.storage.local import LocalStorage
sink = LocalStorage(sys.argv[1]).create("x.tar", num_bytes=4096)
print("writing", flush=True)
sys.stdin.readline()
"""


@needs_fcntl
def test_the_temp_file_of_a_living_writer_in_this_process_is_not_dead(disk):
    sink = disk.create("x.tar", num_bytes=4096)
    (temp,) = disk.names("")
    assert temp.endswith(TEMP_SUFFIX)
    assert disk.sweep("", [temp]) == []
    sink.write(0, memoryview(b"a" * 4096))
    sink.finish()
    assert disk.sweep("", ["x.tar"]) == []  # finished, but its fate is not decided yet
    sink.close()
    assert disk.sweep("", ["x.tar"]) == ["x.tar"]


@needs_fcntl
def test_the_temp_file_of_a_living_writer_elsewhere_is_not_dead_and_that_of_a_killed_one_is(tmp_path, nursery):
    disk = LocalStorage(tmp_path / "root")
    os.mkfifo(tmp_path / "stdin")
    child = nursery.start(WRITER, disk.root, stdin=str(tmp_path / "stdin"))
    with open(tmp_path / "stdin", "w"):
        child.wait_for_line("writing\n")
        (temp,) = disk.names("")
        assert disk.sweep("", [temp]) == []
        child.send(9)
        assert child.ended().status == -9
    assert disk.sweep("", [temp]) == [temp]


@needs_fcntl
def test_a_sweep_deletes_nothing_by_itself_and_follows_no_links(disk, tmp_path):
    disk.root.mkdir()
    (disk.root / "dead").write_bytes(b"x")
    (tmp_path / "elsewhere").write_bytes(b"x")
    (disk.root / "link").symlink_to(tmp_path / "elsewhere")
    (disk.root / "folder").mkdir()

    assert disk.sweep("", ["dead", "link", "folder", "missing"]) == ["dead"]
    assert disk.exists("dead")


@needs_fcntl
def test_a_temp_file_that_could_not_be_looked_at_any_more_has_no_living_writer(disk, monkeypatch):
    """As on a network whose server no longer knows the file."""

    def stale(*_: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    sink = disk.create("x.tar", num_bytes=4096)
    (temp,) = disk.names("")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", stale)
        patch.setattr(os, "unlink", stale)
        sink.abort()

    assert disk.sweep("", [temp], delete=True) == [temp]


def test_a_one_off_save_sweeps_the_leftovers_of_its_own_file_and_no_other(tmp_path):
    for name in (".x.tar.01234567", ".y.tar.01234567"):
        (tmp_path / (name + TEMP_SUFFIX)).write_bytes(b"half")
    async_ckpt.save(state_at(1), tmp_path / "x.tar").result()

    assert sorted(os.listdir(tmp_path)) == [".y.tar.01234567" + TEMP_SUFFIX, "x.tar"]


TWO = """
import os, sys
from states import open_run, state_at
import async_ckpt
first, root = int(sys.argv[2]), sys.argv[1]
with open_run(root) as ckpt:
    for step in range(first, 12, 2):
        try:
            ckpt.save(state_at(step, 5), step=step).result()
            print(step, flush=True)
        except (async_ckpt.StepBehindError, async_ckpt.RunTakenError):
            pass
os._exit(0)  # how an interpreter ends is for other tests
"""


def test_of_two_processes_that_save_into_one_root_nothing_is_lost_that_either_was_told_is_committed(tmp_path, nursery):
    root = tmp_path / "run"
    children = [nursery.start(TWO, root, first) for first in (0, 1)]
    ended = [child.ended() for child in children]
    assert [(e.status, e.err) for e in ended] == [(0, ""), (0, "")]
    told = {int(line) for e in ended for line in e.out.split()}

    with open_run(root) as ckpt:
        steps = ckpt.steps()
        for step in steps:
            assert_is_state(ckpt.load(step), step, 5)
    assert told <= {*steps}
    assert [record["step"] for record in records(root)] == steps
    assert (root / "latest").read_text() == f"step_{steps[-1]:08d}\n"
    # Where both take the run at the same moment, the one that loses it has put its first manifest already, and its
    # save fails. That step counts if it is the lowest; otherwise it is retired, as by a rollback.
    assert len({*steps} - told) <= 1
    for name in leftovers(root):
        folder = (root / name).parent
        (retired,) = folder.glob("manifest.retired-*.json")
        (archive,) = json.loads(retired.read_text())["archives"]
        assert {path.name for path in folder.iterdir()} == {retired.name, archive["name"]}
        assert int(folder.name.removeprefix("step_")) not in told


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc here")
def test_a_folder_in_which_no_file_can_be_made_is_an_error_and_not_waited_for():
    """There opening a new file says that its folder is missing, however often it is made."""
    with pytest.raises(StorageUnavailableError, match="/proc"):
        async_ckpt.save({"x": 1}, "/proc/x.tar").result(60)


@pytest.fixture
def of_others(disk) -> list[str]:
    """Two files that other ranks have written, one of them more than a day ago."""
    for name, seconds in (("new", 86_400 - 600), ("old", 86_400 + 600)):
        disk.put_new(f"step/{name}", b"from another rank")
        written = os.stat(disk.root / "step" / name).st_mtime - seconds
        os.utime(disk.root / "step" / name, (written, written))
    return ["new", "old"]


@needs_fcntl
def test_of_the_files_that_other_ranks_have_written_only_those_older_than_a_day_are_swept(disk, of_others):
    assert disk.sweep("step", of_others, delete=True, decided=True, of_ranks=True) == ["old"]
    assert disk.names("step") == ["new"]


def test_no_file_of_another_rank_is_swept_before_the_attempt_is_decided(disk, of_others):
    assert disk.sweep("step", of_others, delete=True, of_ranks=True) == []
    assert sorted(disk.names("step")) == of_others


@needs_fcntl
def test_a_file_that_this_process_holds_is_read_and_stays_held(tmp_path, nursery):
    paths = [tmp_path / name for name in ("a", "b")]
    for path in paths:
        path.write_text(f"about {path.name}")
    held = [locks.hold(path) for path in paths]

    assert [locks.read_held(path) for path in paths] == [b"about a", b"about b"]
    ended = nursery.run(
        """
        import sys
        from pathlib import Path
        from async_ckpt.core.storage import locks
        print(*(locks.is_held(Path(path)) for path in sys.argv[1:]))
        """,
        *paths,
    )
    assert ended.out == "True True\n"
    for fd in held:
        assert fd is not None
        locks.forget(fd)


def test_garbage_that_holds_a_lock_may_be_collected_while_a_file_is_made(tmp_path, monkeypatch):
    """A finalizer runs at any allocation, also on the thread that makes a file."""
    (tmp_path / "held").touch()
    held, real = locks.hold(tmp_path / "held"), os.fstat
    assert held is not None

    def collected(fd: int) -> os.stat_result:
        monkeypatch.undo()
        locks.forget(held)
        return real(fd)

    monkeypatch.setattr(os, "fstat", collected)
    temp, fd = Call(lambda: locks.create_locked(tmp_path / "new")).outcome()
    assert temp.exists()
    locks.forget(fd)


def test_what_close_answers_of_a_file_that_was_only_read_fails_no_call(tmp_path, monkeypatch):
    """As an NFS client may: the file is closed all the same. The shim of `tests.matrices.calls` has whole saves meet it."""
    (tmp_path / "x").write_bytes(b"x")
    fds, close = [], os.close

    def failing(fd: int) -> None:
        close(fd)
        fds.append(fd)
        raise OSError(errno.EIO, "an error of a write long ago")

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", failing)
        assert read_regular(tmp_path / "x")[0] == b"x"
    assert fds
    with pytest.raises(OSError, match="Bad file descriptor"):  # what is closed twice may be another file by then
        close_quietly(2**30)


@needs_fcntl
def test_a_writer_that_is_stopped_while_it_replaces_a_file_holds_up_others_only_for_a_while(
    tmp_path, nursery, monkeypatch
):
    storage = LocalStorage(tmp_path)
    version = storage.replace("latest", b"1")
    holder = nursery.start(
        """
        import fcntl, signal, sys
        file = open(sys.argv[1], "r+b")
        fcntl.lockf(file, fcntl.LOCK_EX)
        print("held", flush=True)
        signal.pause()
        """,
        tmp_path / "latest",
    )
    holder.wait_for_line("held")
    monkeypatch.setattr(locks, "REQUEST_SECONDS", 0.0)
    with pytest.raises(StorageUnavailableError, match="another process has been replacing it"):
        storage.replace("latest", b"2", version=version)
    holder.send(signal.SIGKILL)
    holder.ended()

    storage.replace("latest", b"2", version=version)
    assert storage.read("latest")[0] == b"2"
