"""What the local disk cannot do is an error that says why, found before a byte is written: no file, no room, no right."""

import contextlib
import errno
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from disks import mounted, needs_mount, write_whole
from racing import Call
from states import MIB, assert_is_state, footprint, leftovers, open_run, save_into, state_at

import async_ckpt
from async_ckpt import StorageFullError, StorageUnavailableError
from async_ckpt.core.host.memory import HostBuffer
from async_ckpt.core.storage.local import LocalStorage
from async_ckpt.integrations.common.folders import FolderHold


@pytest.fixture
def disk(tmp_path):
    return LocalStorage(tmp_path / "root")


# --- what is no file ---------------------------------------------------------------------------------------------


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with (
        socket.socket(socket.AF_UNIX) as made,
        contextlib.chdir(path.parent),
    ):  # whose names may be short only
        made.bind(path.name)


def _device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(5, 0))  # the terminal, for a process that has one
    except PermissionError:
        pytest.skip("making a device needs root")


def _folder(path: Path) -> None:
    path.mkdir()


def _link_to_pipe(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


def _link_to_nothing(path: Path) -> None:
    path.symlink_to("nowhere")


def _circle(path: Path) -> None:
    path.symlink_to(path.name)


no_file = pytest.mark.parametrize(
    ("make", "is_what"),
    [
        (_pipe, "a named pipe, but should be a file"),
        (_socket, "a socket, but should be a file"),
        (_device, "a device, but should be a file"),
        (_folder, "a folder, but should be a file"),
        (_link_to_pipe, "a named pipe, but should be a file"),
        (_link_to_nothing, "a link to .*nowhere, which does not exist"),
        (_circle, "levels of symbolic links"),
    ],
)
needs_pipes = pytest.mark.skipif(sys.platform == "win32", reason="pipes and sockets have no names here")


@needs_pipes
@no_file
def test_what_is_no_file_is_refused_by_every_reader_and_not_waited_for(disk, make, is_what):
    disk.root.mkdir()
    make(disk.root / "x")
    before = footprint(disk.root)
    calls = {
        "read": lambda: disk.read("x"),
        "open": lambda: disk.open("x"),
        "replace": lambda: disk.replace("x", b"new", version="1-1-1"),
    }
    for name, call in calls.items():
        refused = IsADirectoryError if (make, name) == (_folder, "open") else StorageUnavailableError
        with pytest.raises(refused, match=None if refused is IsADirectoryError else is_what):
            Call(call).outcome()
    assert Call(lambda: disk.sweep("", ["x"], delete=True)).outcome() == []
    assert footprint(disk.root)["x"] == before["x"]
    assert footprint(disk.root).keys() == before.keys()


@needs_pipes
@no_file
def test_what_is_no_file_is_not_replaced_by_one(disk, make, is_what):
    disk.root.mkdir()
    make(disk.root / "x")
    if "link" in is_what:  # of which the name is replaced, not what it leads to
        disk.replace("x", b"new")
        assert disk.read("x")[0] == b"new"
        return
    if make is _link_to_pipe:
        write_whole(disk, "x", b"new")
        assert (disk.root / "pipe").is_fifo()
        return
    for call in (lambda: disk.create("x", num_bytes=4096), lambda: disk.replace("x", b"new")):
        with pytest.raises(StorageUnavailableError, match=is_what):
            call()
    with pytest.raises(FileExistsError):
        disk.put_new("x", b"new")
    assert os.listdir(disk.root) == ["x"]


@needs_pipes
@pytest.mark.parametrize("name", ["latest", "checkpoints.jsonl", "step_00000001/manifest.json"])
def test_a_run_with_a_pipe_for_a_file_says_so_and_waits_for_nobody(tmp_path, name):
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_at(1), step=1).result()
        ckpt.wait()
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with open_run(tmp_path) as ckpt:
        report = Call(lambda: ckpt.save(state_at(2), step=2).result()).outcome()
        assert report.status == "committed"
        Call(ckpt.wait).outcome()
        assert_is_state(Call(lambda: ckpt.load(2)).outcome(), 2)
        if "manifest" in name:
            with pytest.raises(StorageUnavailableError, match="a named pipe"):
                Call(lambda: ckpt.load(1)).outcome()


@needs_pipes
def test_the_history_of_a_run_is_not_added_to_what_a_link_in_its_place_leads_to(tmp_path, caplog):
    history, elsewhere = tmp_path / "run" / "history.jsonl", tmp_path / "elsewhere"
    with open_run(tmp_path / "run") as ckpt:
        ckpt.save(state_at(1), step=1).result()
        ckpt.wait()
        history.rename(elsewhere)
        history.symlink_to(elsewhere)
        before = elsewhere.read_bytes()
        assert ckpt.save(state_at(2), step=2).result().status == "committed"
        ckpt.wait()
    assert elsewhere.read_bytes() == before
    assert "is a link, and files are never written through links" in caplog.text


@needs_pipes
@pytest.mark.parametrize("make", [_link_to_nothing, _link_to_pipe, _pipe, lambda path: path.symlink_to("file")])
def test_a_lock_is_not_written_to_what_a_link_in_its_place_leads_to(tmp_path, make):
    (tmp_path / "file").write_bytes(b"of somebody else")
    make(tmp_path / ".async_ckpt.lock")
    with pytest.raises(StorageUnavailableError, match=r"link|named pipe"):
        Call(FolderHold(tmp_path).__enter__).outcome()
    assert (tmp_path / "file").read_bytes() == b"of somebody else"
    assert not (tmp_path / "nowhere").exists()


@needs_pipes
def test_a_manifest_that_is_a_link_to_nothing_keeps_no_other_step_from_being_saved(tmp_path):
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_at(1), step=1).result()
        ckpt.wait()
    manifest = tmp_path / "step_00000001" / "manifest.json"
    manifest.rename(tmp_path / "kept")
    manifest.symlink_to("../gone")
    with open_run(tmp_path) as ckpt:
        assert ckpt.save(state_at(2), step=2).result().status == "committed"
        ckpt.wait()
        assert ckpt.steps() == [2]
    manifest.unlink()
    (tmp_path / "kept").rename(manifest)
    with open_run(tmp_path) as ckpt:  # what it names was let be, for nobody could know
        assert_is_state(ckpt.load(1), 1)


@needs_pipes
def test_a_link_that_leads_to_itself_is_unavailable_whoever_asks(disk):
    disk.root.mkdir()
    (disk.root / "x").symlink_to("x")
    calls = [
        lambda: disk.read("x"),
        lambda: disk.open("x"),
        lambda: disk.exists("x"),
        lambda: disk.existing(["x"]),
        lambda: disk.names("x"),
        lambda: disk.sizes(""),
        lambda: disk.create("x/y", num_bytes=1),
        lambda: disk.put_new("x/y", b"1"),
        lambda: disk.replace("x/y", b"1"),
    ]
    for call in calls:
        with pytest.raises(StorageUnavailableError):
            Call(call).outcome()
    assert disk.names("") == ["x"]


@pytest.mark.skipif(sys.platform != "linux", reason="leases are of Linux")
def test_a_file_on_which_somebody_has_a_lease_is_waited_for(disk):
    """As a server of files has it for a client; who opens it waits until it is given back."""
    import fcntl
    import signal

    disk.replace("x", b"data")
    with open(disk.root / "x", "rb+") as file:
        broken = []

        def give_back(*_: object) -> None:
            broken.append(True)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)

        before = signal.signal(signal.SIGIO, give_back)
        try:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            assert disk.read("x")[0] == b"data"
        finally:
            signal.signal(signal.SIGIO, before)
    assert broken


# --- refusals --------------------------------------------------------------------------------------------------


def test_more_than_the_disk_has_is_refused_with_numbers_before_a_byte_is_written(disk):
    with pytest.raises(StorageFullError, match="needed") as caught:
        disk.create("a/x.tar", num_bytes=1 << 60)

    assert caught.value.needed_bytes == 1 << 60
    assert 0 < caught.value.free_bytes < 1 << 60
    assert caught.value.path.endswith("a/x.tar")
    assert not disk.root.exists()


@needs_mount
def test_a_save_that_does_not_fit_is_refused_and_the_earlier_one_stays(tmp_path):
    with mounted(tmp_path / "small", "size=64m") as small, open_run(small / "run") as ckpt:
        ckpt.save(state_at(1, 24), step=1).result()
        error = ckpt.save(state_at(2, 48), step=2).exception()

        assert isinstance(error, StorageFullError)
        assert error.needed_bytes > 48 * MIB > error.free_bytes
        assert leftovers(small / "run") == []
        assert_is_state(ckpt.load(), 1, 24)
        assert ckpt.save(state_at(2, 24), step=2).result().status == "committed"


@needs_mount
def test_a_disk_that_others_fill_meanwhile_is_full_and_nothing_is_left(tmp_path):
    with mounted(tmp_path / "small", "size=64m") as small, open_run(small / "run") as ckpt:
        ckpt.save(state_at(1, 8), step=1).result()
        with open(small / "other", "wb") as other, contextlib.suppress(OSError):
            for _ in range(64):
                other.write(bytes(MIB))
                other.flush()
        error = ckpt.save(state_at(2, 8), step=2).exception()
        assert isinstance(error, StorageFullError)
        assert leftovers(small / "run") == []
        (small / "other").unlink()
        assert ckpt.save(state_at(2, 8), step=2).result().status == "committed"
        assert_is_state(ckpt.load(), 2, 8)


@needs_mount
def test_a_place_that_may_only_be_read_is_unavailable(tmp_path):
    with mounted(tmp_path / "frozen", "size=8m") as frozen:
        subprocess.run(["mount", "-o", "remount,ro", str(frozen)], check=True)
        error = async_ckpt.save(state_at(1), frozen / "new/x.tar").exception()
        assert isinstance(error, StorageUnavailableError)
        assert not isinstance(error, StorageFullError)
        with open_run(frozen / "run") as ckpt:
            assert isinstance(ckpt.save(state_at(1), step=1).exception(), StorageUnavailableError)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc here")
def test_a_place_where_nothing_can_be_made_is_unavailable():
    error = async_ckpt.save(state_at(1), "/proc/new/x.tar").exception()

    assert isinstance(error, StorageUnavailableError)
    assert error.path == "/proc/new/x.tar" or error.path.startswith("/proc")
    assert error.__cause__ is not None


def test_a_file_where_a_folder_should_be_is_said_to_be_one(tmp_path):
    (tmp_path / "file").write_text("x")
    error = async_ckpt.save(state_at(1), tmp_path / "file" / "x.tar").exception()

    assert isinstance(error, StorageUnavailableError)
    assert "is a file, but should be a folder" in str(error) or "Not a directory" in str(error)


def test_a_step_folder_that_is_a_file_fails_the_save(tmp_path):
    (tmp_path / "step_00000001").write_text("x")
    with open_run(tmp_path) as ckpt:
        assert isinstance(ckpt.save(state_at(1), step=1).exception(), StorageUnavailableError)
        assert ckpt.steps() == []
        assert ckpt.save(state_at(2), step=2).result().status == "committed"


def test_a_folder_where_the_file_should_be_is_refused(tmp_path):
    (tmp_path / "x.tar").mkdir()
    with pytest.raises(IsADirectoryError):
        async_ckpt.save(state_at(1), tmp_path / "x.tar")


def test_a_folder_that_takes_the_place_of_the_file_meanwhile_fails_the_save_and_leaves_nothing(disk):
    sink = disk.create("x.tar", num_bytes=4096)
    sink.write(0, memoryview(b"a" * 4096))
    (disk.root / "x.tar").mkdir()
    with pytest.raises(StorageUnavailableError):
        sink.finish()
    sink.abort()

    assert os.listdir(disk.root) == ["x.tar"]


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_system_that_takes_direct_writes_only_at_open_is_written_buffered(disk, monkeypatch, direct):
    import fcntl

    pwrite = os.pwrite

    def refusing(fd: int, data: memoryview, offset: int) -> int:
        if direct and fcntl.fcntl(fd, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, "direct writing is refused")
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", refusing)
    segment = HostBuffer(4 * MIB)
    segment.tensor.copy_(torch.arange(4 * MIB, dtype=torch.int64).to(torch.uint8))
    sink = disk.create("x", num_bytes=8 * MIB)
    for number in (1, 0):
        sink.write(number * 4 * MIB, segment.view)
    sink.finish()
    sink.close()

    assert disk.read("x")[0] == bytes(segment.view) * 2


# --- links to nothing, and the classes of errors ----------------------------------------------------------------------


def _run_of(root):
    save_into(root, 1)


def _restored(root):
    with open_run(root) as ckpt:
        ckpt.restore(state_at(0))


def _published(root):
    with async_ckpt.Publisher(root) as publisher:
        publisher.publish({"w": torch.ones(2)}, 1).result()


CALLS = {
    "run": _run_of,
    "restore": _restored,
    "publish": _published,
    "subscribe": lambda root: async_ckpt.Subscriber(root).latest(),
    "save": lambda root: async_ckpt.save({"a": 1}, root / "x.tar").result(),
    "load": lambda root: async_ckpt.load(root / "x.tar"),
    "verify": lambda root: async_ckpt.verify(root),
    "pack_folder": lambda root: async_ckpt.files.pack_folder(root, root.parent / "p.tar").result(),
    "list_dir": async_ckpt.files.list_dir,
    "open_file": lambda root: async_ckpt.files.open_file(root / "x.tar"),
}


@pytest.mark.parametrize("below", ["", "a", "a/b"])
@pytest.mark.parametrize("call", CALLS)
def test_a_link_to_nothing_is_named_with_what_it_leads_to(tmp_path, call, below):
    (tmp_path / "link").symlink_to(tmp_path / "scratch" / "purged")
    with pytest.raises(StorageUnavailableError) as refused:
        CALLS[call](tmp_path / "link" / below)
    assert f"{tmp_path / 'link'} is a link to {tmp_path / 'scratch' / 'purged'}" in str(refused.value)
    assert (tmp_path / "link").is_symlink()
    assert not (tmp_path / "scratch").exists()


@pytest.mark.parametrize("kind", ["file", "folder", "loop", "below file", "n" * 300, "nothing"])
@pytest.mark.parametrize("call", CALLS)
def test_every_error_about_a_path_is_one_of_the_library(tmp_path, call, kind):
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "x.tar").mkdir(parents=True)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    path = tmp_path / "file" / "x" if kind == "below file" else tmp_path / kind
    try:
        CALLS[call](path)
    except (async_ckpt.CheckpointError, ValueError):
        pass


def test_a_file_that_is_too_large_says_what_limits_it(tmp_path):
    code = """if True:
        import resource, signal, sys, torch, async_ckpt
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            async_ckpt.save({"w": torch.zeros(1 << 20)}, sys.argv[1]).result()
        except async_ckpt.StorageUnavailableError as error:
            print(error)
        """
    ended = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "x.tar"], capture_output=True, text=True, timeout=60, check=False
    )
    assert "ulimit -f" in ended.stdout, ended.stderr


@pytest.mark.parametrize("secret", ["e", "disk", "a-long-secret"])
def test_a_short_secret_is_starred_where_it_stands_alone(secret):
    from async_ckpt.core.storage.url import starred

    text = f"the server refuses {secret!r}: no disk here, a-long-secretive one"
    told = starred(text, [secret])
    assert "refuses '***'" in told
    assert ("server refuses" in told, "here" in told) == (True, True)
