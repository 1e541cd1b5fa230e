"""What a pull touches in a folder: the files that versions have put there, and of these none that somebody else has, too."""

import errno
import fcntl
import json
import logging
import mmap
import os
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import mounted, needs_mount
from exported import assert_loads, weights_in
from published import Line, files_below, flip, weights_below
from safetensors.torch import load_file, save_file

os.environ["HF_HUB_OFFLINE"] = "1"  # read when it is imported

import transformers

from async_ckpt import Publisher, StorageFullError, StorageUnavailableError, Subscriber
from async_ckpt.weights.confined_files import ConfinedFolder
from async_ckpt.weights.publishing import folder_replica as folders
from async_ckpt.weights.publishing.folder_notes import Notes

WEIGHTS = "model.safetensors"


@pytest.fixture
def line(tmp_path: Path) -> Line:
    """Versions 1 to 3 of a model: an anchor, and two deltas."""
    with Line(tmp_path / "weights") as made:
        made.publish(1, 2, 3)
        made.publisher._wait()
    return made


@pytest.fixture
def local(tmp_path: Path, line: Line) -> Path:
    """A folder that has version 2."""
    line.subscriber().pull(tmp_path / "local", 2)
    return tmp_path / "local"


def with_templates(tmp_path: Path) -> Path:
    """Files to publish beside weights, one of them in a folder."""
    config = tmp_path / "config"
    (config / "additional_chat_templates").mkdir(parents=True)
    for name in ("additional_chat_templates/tool.jinja", "config.json"):
        (config / name).write_text("{}")
    return config


# --- what lies beside ---------------------------------------------------------------------------------------------


def test_a_copy_beside_the_weights_stays_as_it_is_and_the_weights_become_the_version(line, local, caplog):
    for name in ("zz_backup.safetensors", "a_backup.safetensors"):
        shutil.copyfile(local / WEIGHTS, local / name)
    before = (local / WEIGHTS).read_bytes()
    with caplog.at_level(logging.WARNING, "async_ckpt"):
        assert line.subscriber().pull(local, 3).base == 2

    found = load_file(local / WEIGHTS)
    assert all(torch.equal(found[name], line.were[3][name]) for name in found)
    assert (local / "zz_backup.safetensors").read_bytes() == before
    assert (local / "a_backup.safetensors").read_bytes() == before
    assert "has weights that belong to no version, such as a_backup.safetensors" in caplog.text
    line.subscriber().pull(local, 1)
    assert (local / "zz_backup.safetensors").read_bytes() == before


def test_what_a_link_beside_the_weights_leads_to_stays_as_it_is(line, local, tmp_path):
    shutil.copyfile(local / WEIGHTS, tmp_path / "outside.safetensors")
    (local / "zz.safetensors").symlink_to(tmp_path / "outside.safetensors")
    before = (tmp_path / "outside.safetensors").read_bytes()
    for version in (3, 1, 3):
        assert line.subscriber().pull(local, version).version == version
        found = load_file(local / WEIGHTS)
        assert all(torch.equal(found[name], line.were[version][name]) for name in found)

    assert (tmp_path / "outside.safetensors").read_bytes() == before
    assert (local / "zz.safetensors").is_symlink()


def test_a_hard_linked_backup_stays_as_it_is_and_no_anchor_is_read_for_it(line, local, tmp_path):
    before = (local / WEIGHTS).read_bytes()
    (local / WEIGHTS).chmod(0o640)
    os.link(local / WEIGHTS, tmp_path / "backup.safetensors")
    assert line.subscriber().pull(local, 3).base == 2

    line.assert_is(3, local)
    assert (tmp_path / "backup.safetensors").read_bytes() == before
    assert stat.S_IMODE((local / WEIGHTS).stat().st_mode) == 0o640
    assert (local / WEIGHTS).stat().st_nlink == 1
    assert sorted(os.listdir(local / ".weight_sync")) == ["files.json", "lock", "state.json"]


def test_a_copy_of_the_folder_by_hard_links_stays_as_it_is_and_is_gone_on_from(line, local, tmp_path):
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-al", local, copy], check=True)
    before = files_below(copy)
    line.subscriber().pull(local, 3)
    assert files_below(copy) == before
    line.subscriber().pull(local, 1)
    assert files_below(copy) == before

    assert line.subscriber().pull(copy, 3).base == 2
    line.assert_is(3, copy)
    line.assert_is(1, local)


@needs_mount
def test_a_disk_without_room_for_a_copy_of_a_hard_linked_file_leaves_the_version_before(tmp_path):
    state = {"weight": torch.randn(2**20)}
    with Publisher(tmp_path / "weights") as publisher:
        publisher.publish(state, 1).result()
        state["weight"][:9] = 0
        publisher.publish(state, 2).result()
    with mounted(tmp_path / "small", "size=10m") as folder:
        Subscriber(tmp_path / "weights").pull(folder / "local", 1)
        os.link(folder / "local" / WEIGHTS, folder / "backup")
        (folder / "rest").write_bytes(bytes(4 << 20))
        before = files_below(folder)
        with pytest.raises(StorageFullError):
            Subscriber(tmp_path / "weights").pull(folder / "local")
        assert files_below(folder) == before
        assert Subscriber(tmp_path / "weights").pull(folder / "local", 1).num_versions == 0


@pytest.mark.parametrize("version", [1, 2])
def test_harm_to_a_tensor_that_no_delta_changes_is_found_by_the_next_pull(tmp_path, version):
    weights = {"changes": torch.zeros(3000), "stays": torch.zeros(3000)}
    with Publisher(tmp_path / "weights") as publisher:
        publisher.publish(weights, 1).result()
        subscriber = Subscriber(tmp_path / "weights")
        subscriber.pull(tmp_path / "local")
        flip(tmp_path / "local" / "model.safetensors", -1)  # the last tensor is the one that stays
        weights["changes"][3] = 1.0
        publisher.publish(weights, 2).result()
    assert subscriber.pull(tmp_path / "local", version).base is None
    found = weights_in(tmp_path / "local")
    assert not found["stays"].any()
    assert bool(found["changes"].any()) is (version == 2)
    assert subscriber.pull(tmp_path / "local", version).num_versions == 0


def test_a_link_in_place_of_the_weights_is_replaced_and_what_it_leads_to_stays(line, local, tmp_path):
    """Somebody has moved them to a larger disk. What is there is not believed, and not changed."""
    shutil.move(local / WEIGHTS, tmp_path / "moved.safetensors")
    (local / WEIGHTS).symlink_to(tmp_path / "moved.safetensors")
    before = (tmp_path / "moved.safetensors").read_bytes()
    assert line.subscriber().pull(local, 3).base is None

    line.assert_is(3, local)
    assert not (local / WEIGHTS).is_symlink()
    assert (tmp_path / "moved.safetensors").read_bytes() == before


def test_a_link_in_place_of_a_folder_is_refused_by_name_and_nothing_is_written_behind_it(tmp_path):
    config, root, local = with_templates(tmp_path), tmp_path / "weights", tmp_path / "local"
    state = {"weight": torch.randn(100)}
    with Publisher(root, encoding=None) as publisher:
        for version in (1, 2):
            publisher.publish(state, version, config).result()
            state["weight"].neg_()
    Subscriber(root).pull(local, 1)
    shutil.rmtree(local / "additional_chat_templates")
    (tmp_path / "mine").mkdir()
    (local / "additional_chat_templates").symlink_to(tmp_path / "mine")
    before = files_below(local)
    with pytest.raises(StorageUnavailableError, match=r"local/additional_chat_templates is a link"):
        Subscriber(root).pull(local, 2)
    assert os.listdir(tmp_path / "mine") == []
    assert weights_below(local) == {name: data for name, data in before.items() if name[0] != "."}
    (local / "additional_chat_templates").unlink()
    Subscriber(root).pull(local, 2)
    assert (local / "additional_chat_templates" / "tool.jinja").read_text() == "{}"


def linked_sync(local: Path, outside: Path) -> None:
    shutil.move(local / ".weight_sync", outside / "sync")
    (local / ".weight_sync").symlink_to(outside / "sync")


def linked_lock(local: Path, outside: Path) -> None:
    (local / ".weight_sync" / "lock").unlink()
    (local / ".weight_sync" / "lock").symlink_to(outside / "lock")


@pytest.mark.parametrize("harm", [linked_sync, linked_lock], ids=lambda f: f.__name__)
def test_a_link_in_place_of_what_pulls_note_is_refused_by_name(harm, line, local, tmp_path):
    (tmp_path / "outside").mkdir()
    harm(local, tmp_path / "outside")
    before = files_below(tmp_path / "outside")
    with pytest.raises(StorageUnavailableError, match=r"\.weight_sync(/lock)? is a link"):
        line.subscriber().pull(local, 3)
    assert files_below(tmp_path / "outside") == before


def test_a_link_in_place_of_a_note_is_replaced_and_what_it_leads_to_stays(line, local, tmp_path):
    for name in ("state.json", "files.json", "state.json.tmp", "files.json.tmp"):
        (tmp_path / name).write_text("mine")
        (local / ".weight_sync" / name).unlink(missing_ok=True)
        (local / ".weight_sync" / name).symlink_to(tmp_path / name)
    for inner in ("new", "old"):
        (tmp_path / inner).mkdir()
        (tmp_path / inner / "mine").write_text("mine")
        (local / ".weight_sync" / inner).symlink_to(tmp_path / inner)
    line.subscriber().pull(local, 3)

    line.assert_is(3, local)
    for name in ("state.json", "files.json", "state.json.tmp", "files.json.tmp", "new/mine", "old/mine"):
        assert (tmp_path / name).read_text() == "mine"


def test_a_folder_with_weights_of_the_users_that_would_be_loaded_instead_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr("async_ckpt.face.around.shards.MAX_SHARD_BYTES", 200)
    state = {name: torch.randn(30) for name in "abc"}
    with Publisher(tmp_path / "weights") as publisher:
        publisher.publish(state, 1).result()
    local = tmp_path / "local"
    (local / ".weight_sync").mkdir(parents=True)
    Subscriber(tmp_path / "weights").pull(local)
    assert len(weights_in(local)) == 3
    save_file({"a": torch.zeros(30)}, local / WEIGHTS)
    with Publisher(tmp_path / "weights") as publisher:
        publisher.publish(state, 2).result()
    with pytest.raises(StorageUnavailableError, match=r"model.safetensors does not belong to a version"):
        Subscriber(tmp_path / "weights").pull(local)
    (local / WEIGHTS).unlink()
    Subscriber(tmp_path / "weights").pull(local)


def test_a_version_of_one_file_with_another_name_is_found_by_those_who_load_it(line, local, tmp_path):
    """As others publish it: the index says where the weights are."""
    folder = tmp_path / "theirs" / "weight_v000001"
    shutil.copytree(line.folder(1), folder)
    name = "model-00001-of-00001.safetensors"
    os.rename(folder / WEIGHTS, folder / name)
    (folder / "pytorch_model.bin").write_bytes(b"the same weights once more")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(load_file(folder / name), name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    Subscriber(tmp_path / "theirs").pull(tmp_path / "other")

    assert_loads(tmp_path / "other", line.were[1], transformers.GPT2LMHeadModel)
    assert not (tmp_path / "other" / "pytorch_model.bin").exists()


# --- what is left, and what fails ---------------------------------------------------------------------------------


def test_what_a_cleanup_that_failed_has_left_is_swept_by_the_next_pull(line, local):
    """The weights have another name there, so a delta would take them for somebody else's, too."""
    for inner in ("new", "old"):
        (local / ".weight_sync" / inner / "deep").mkdir(parents=True)
        (local / ".weight_sync" / inner / "deep" / "x").write_text("left")
    os.link(local / WEIGHTS, local / ".weight_sync" / "old" / WEIGHTS)
    inode = (local / WEIGHTS).stat().st_ino
    assert line.subscriber().pull(local, 3).base == 2

    assert sorted(os.listdir(local / ".weight_sync")) == ["files.json", "lock", "state.json"]
    assert (local / WEIGHTS).stat().st_ino == inode


def failing(number: int) -> Any:
    def call(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize(
    ("owner", "name", "number"),
    [(mmap, "mmap", errno.ENODEV), (folders.FolderReplica, "_header", errno.EIO), (fcntl, "flock", errno.ENOLCK)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_what_the_system_refuses_is_told_of_a_pulled_folder_and_nothing_changes(
    owner, name, number, line, local, monkeypatch
):
    before = files_below(local)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, failing(number))
        with pytest.raises(StorageUnavailableError, match=os.strerror(number)) as caught:
            line.subscriber().pull(local, 3)
    assert str(local) in str(caught.value)
    assert files_below(local) == before
    assert line.subscriber().pull(local, 3).base == 2


def test_a_lock_that_cannot_be_given_back_is_no_failure_of_the_pull(line, local, monkeypatch):
    real, calls = os.close, []

    def close(fd: int) -> None:
        is_lock = os.readlink(f"/proc/self/fd/{fd}").endswith("/lock")
        real(fd)
        if is_lock:
            calls.append(fd)
            raise OSError(errno.EIO, "no luck")

    monkeypatch.setattr(os, "close", close)
    line.subscriber().pull(local, 3)
    assert calls
    line.assert_is(3, local)


def test_a_file_that_cannot_be_opened_is_told_of(line, local, monkeypatch):
    real = os.open

    def open_(name: Any, flags: int, *more: Any, **how: Any) -> int:
        if str(name) == WEIGHTS and how:
            raise PermissionError(errno.EACCES, "no luck")
        return real(name, flags, *more, **how)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", open_)
        with pytest.raises(StorageUnavailableError, match="no luck"):
            line.subscriber().pull(local, 3)
    assert line.subscriber().pull(local, 3).base == 2


def test_a_pipe_in_place_of_the_weights_blocks_nobody(line, local):
    (local / WEIGHTS).unlink()
    os.mkfifo(local / WEIGHTS)
    assert line.subscriber().pull(local, 3).base is None
    line.assert_is(3, local)


# --- the way below a folder ---------------------------------------------------------------------------------------


def test_nothing_is_reached_by_a_link_below_a_folder_and_the_folder_may_be_one(tmp_path):
    (tmp_path / "real" / "sub").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x").write_text("mine")
    (tmp_path / "folder").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "way").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "real" / "file").symlink_to(tmp_path / "elsewhere" / "x")
    files = ConfinedFolder(tmp_path / "folder")
    files.put("sub/deep/x", [b"a", b"b"])
    assert (files.read("sub/deep/x"), files.size("sub/deep/x")) == (b"ab", 2)
    files.delete("sub/deep/x")
    assert not (tmp_path / "real" / "sub").exists()
    for name in ("way/x", "file"):
        for call in (
            lambda name=name: files.read(name),
            lambda name=name: files.open(name, os.O_RDWR),
            lambda name=name: files.part(name, by="y"),
        ):
            with pytest.raises(StorageUnavailableError, match="is a link"):
                call()
        assert files.size(name) is None
    with pytest.raises(StorageUnavailableError, match="is a link"):
        files.put("way/y", [b""])
    with pytest.raises(FileNotFoundError):
        files.read("nothing")
    files.delete("way/x")
    files.delete_all("way")
    files.delete("file")
    assert files_below(tmp_path / "elsewhere") == {"x": b"mine"}
    assert os.listdir(tmp_path / "real") == []


@pytest.mark.parametrize("name", ["m" * 300, f"x/{'ö' * 200}", "\ud800"])
def test_an_index_with_names_that_no_file_has_names_none(tmp_path, name):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert Notes(ConfinedFolder(tmp_path)).foreign_files().weights == ()
