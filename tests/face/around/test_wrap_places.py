"""Where a wrapped function writes to: files and folders of this disk, and stores. All of it appears there, or nothing."""

import json
import os
import stat
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from disks import mounted, needs_mount
from racing import Thrown
from states import MIB
from wrapped import _nothing_is_left, names, records, save_folder, save_text  # noqa: F401

import async_ckpt
from async_ckpt import DestinationBusyError, Place, StorageFullError, StorageUnavailableError, wrap

STATE = {"w": torch.arange(1000)}


def save_tree(tree: dict[str, str], folder: str) -> None:
    for name, text in tree.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def tree_of(folder: Path) -> dict[str, str]:
    return {name: Path(folder, name).read_text() for name in names(folder)}


# --- this disk ---------------------------------------------------------------------------------------------------


def test_a_relative_path_is_meant_from_where_the_call_was_made(tmp_path, monkeypatch, gate):
    def save(path: str) -> None:
        gate.passed()
        save_text("x", path)

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    handle = wrap(save)("out/x")
    monkeypatch.chdir(tmp_path / "elsewhere")
    gate.open()

    assert handle.result().path == str(tmp_path / "out" / "x")
    assert names(tmp_path) == ["out/x"]


@pytest.mark.parametrize("name", ["ä ö/ü🙂", "x" * 255, "ü" * 127, "a/b/c/d", ".hidden", "with space ", "-rf", "x/"])
def test_unusual_names_are_names(tmp_path, name):
    wrap(save_text)("x", str(tmp_path / name) + ("/" if name.endswith("/") else "")).result()
    wrap(torch.save)(STATE, str(tmp_path / "s" / name[:250])).result()

    assert (tmp_path / name).read_text() == "x"


@pytest.mark.parametrize("name", ["/", "..", "../..", "."])
def test_a_folder_that_could_not_be_replaced_is_refused(tmp_path, monkeypatch, name):
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")

    with pytest.raises(ValueError, match=r"could be replaced|would be replaced"):
        wrap(save_tree)({"x": "x"}, name)
    with pytest.raises(ValueError, match="would be replaced"):
        wrap(save_tree)({"x": "x"}, tmp_path / "a")
    assert names(tmp_path) == []


def test_a_file_takes_the_place_of_a_file(tmp_path):
    (tmp_path / "x").write_text("old")
    wrap(save_text)("new", str(tmp_path / "x")).result()

    assert tree_of(tmp_path) == {"x": "new"}


@pytest.mark.parametrize("before", [None, {}, {"old": "1", "sub/old": "2", "a": "3", "sub/a": "4"}])
def test_a_folder_appears_whole_and_keeps_what_was_not_written_again(tmp_path, before):
    if before is not None:
        (tmp_path / "x").mkdir()
        save_tree(before, str(tmp_path / "x"))
    new = {"a": "A", "sub/a": "SA", "sub/deep/b": "B"}
    wrap(save_tree)(new, str(tmp_path / "x")).result()

    assert tree_of(tmp_path / "x") == (before or {}) | new


def test_a_folder_in_a_folder_takes_the_place_of_a_file_there(tmp_path):
    save_tree({"x/a": "file", "x/b": "kept"}, str(tmp_path))
    wrap(save_tree)({"a/inner": "new"}, str(tmp_path / "x")).result()

    assert tree_of(tmp_path / "x") == {"a/inner": "new", "b": "kept"}


def test_a_whole_folder_replaces_what_is_there_with_all_its_files(tmp_path):
    save_tree({"x/a": "old", "x/b": "old", "x/inner/c": "old"}, str(tmp_path))
    wrap(save_tree, whole_folder=True)({"a": "new"}, str(tmp_path / "x")).result()
    assert tree_of(tmp_path) == {"x/a": "new"}


def test_the_folder_that_a_function_finds_is_there_when_there_was_one(tmp_path):
    def save(folder: str) -> None:
        Path(folder, "x").write_text("x")  # makes none

    (tmp_path / "a").mkdir()
    wrap(save)(str(tmp_path / "a")).result()
    assert isinstance(wrap(save)(str(tmp_path / "b")).exception(), FileNotFoundError)

    assert names(tmp_path) == ["a/x"]


def test_a_file_and_a_folder_do_not_take_each_others_place(tmp_path):
    save_tree({"file": "old", "folder/a": "old"}, str(tmp_path))

    with pytest.raises(FileExistsError, match="is a file, but a folder was written; give another name") as caught:
        wrap(save_tree)({"x": "new"}, str(tmp_path / "file")).result()
    assert "is kept in" in caught.value.__notes__[0]
    with pytest.raises(IsADirectoryError, match="is a folder, but a file was written; give another name"):
        wrap(lambda path: (os.rmdir(path), save_text("new", path)))(str(tmp_path / "folder")).result()
    with pytest.raises(IsADirectoryError, match="is a folder; give the path of a file"):
        wrap(torch.save)(STATE, tmp_path / "folder")
    kept = {name: text for name, text in tree_of(tmp_path).items() if ".kept" not in name}
    assert kept == {"file": "old", "folder/a": "old"}


def test_of_several_files_none_is_visible_when_one_does_not_fit(tmp_path):
    def save(path: str) -> None:
        for name in (path, path + ".index"):
            Path(name).write_text("new")

    save_tree({"x": "old", "x.index/inner": "old"}, str(tmp_path))
    assert isinstance(wrap(save)(str(tmp_path / "x")).exception(), IsADirectoryError)

    assert (tmp_path / "x").read_text() == "old"


def test_links_to_what_the_function_has_written_lead_there_after_it_was_moved(tmp_path):
    def save(folder: str) -> None:
        save_tree({"steps/a": "1"}, folder)
        for name, target in {"latest": f"{folder}/steps/a", "steps/up": folder, "out": os.path.dirname(folder)}.items():
            os.symlink(target, f"{folder}/{name}")
        os.symlink("/etc", f"{folder}/far")

    (tmp_path / "alias").symlink_to(".")
    wrap(save)(str(tmp_path / "alias" / "x")).result()

    links = {"latest": "steps/a", "steps/up": "..", "out": "..", "far": "/etc"}
    assert {name: os.readlink(tmp_path / "x" / name) for name in links} == links
    assert (tmp_path / "x" / "latest").read_text() == "1"


def test_links_are_followed_as_the_function_would_have_followed_them(tmp_path):
    save_tree({"far/folder/old": "1", "far/file": "1"}, str(tmp_path))
    links = {"folder": "far/folder", "file": "far/file", "new": "far/new"}
    for name, target in links.items():
        (tmp_path / name).symlink_to(target)
    (tmp_path / "parent").symlink_to("far")

    wrap(save_tree)({"a": "2"}, str(tmp_path / "folder")).result()
    wrap(save_text)("2", str(tmp_path / "file")).result()
    wrap(torch.save)(STATE, tmp_path / "new").result()
    wrap(save_text)("2", str(tmp_path / "parent" / "below")).result()

    assert all((tmp_path / name).is_symlink() for name in links)
    assert sorted(names(tmp_path / "far")) == ["below", "file", "folder/a", "folder/old", "new"]
    assert (tmp_path / "far" / "file").read_text() == "2"


def test_what_is_written_has_the_mode_that_the_function_gives(tmp_path):
    def save(folder: str) -> None:
        os.mkdir(folder, 0o750)
        Path(folder, "run.sh").touch(0o700)

    wrap(save)(str(tmp_path / "x")).result()

    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "x" / "run.sh").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o2775, 0o700])
@pytest.mark.parametrize("old", [(), ("a",)])
@pytest.mark.parametrize("save", [wrap(save_folder), async_ckpt.export_hf])
def test_a_folder_keeps_its_permissions_when_it_is_replaced(tmp_path, save, old, mode):
    folder = tmp_path / "x"
    folder.mkdir()
    folder.chmod(mode)
    for name in old:
        (folder / name).touch()

    save(STATE, str(folder)).result()

    assert len(names(folder)) > len(old)
    assert stat.S_IMODE(folder.stat().st_mode) == mode


@needs_mount
@pytest.mark.parametrize("save", [torch.save, save_folder])
def test_a_folder_that_cannot_be_written_to_is_said(tmp_path, save):
    with mounted(tmp_path / "frozen", "size=8m") as frozen:
        subprocess.run(["mount", "-o", "remount,ro", str(frozen)], check=True)
        with pytest.raises(StorageUnavailableError, match="for writing"):
            wrap(save)(STATE, str(frozen / "x")).result()


@needs_mount
def test_a_full_disk_leaves_what_was_there(tmp_path):
    with mounted(tmp_path / "small", "size=4m") as small:
        (small / "x").write_text("old")
        large = np.zeros(8 * MIB, "u1")
        streamed = wrap(torch.save)(torch.from_numpy(large), small / "x")
        with pytest.raises(StorageFullError) as caught:
            streamed.result()
        assert 4 * MIB < caught.value.needed_bytes <= 9 * MIB
        written = wrap(lambda a, path: a.tofile(path))(large, str(small / "x"))
        with pytest.raises(OSError, match=r"[Nn]o space|requested and"):
            written.result()

        assert tree_of(small) == {"x": "old"}
        wrap(torch.save)(STATE, small / "x").result()


@pytest.mark.parametrize("save", [torch.save, save_folder])
def test_one_call_at_a_time_writes_to_one_destination(tmp_path, gate, save):
    def first(path: str) -> None:
        gate.passed()
        save_text("x", path)

    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    blocking = wrap(first)(str(tmp_path / "first"))
    handle = wrap(save)(STATE, str(tmp_path / "real" / "x"))
    for spelling in ("real/x", "real/../real/x", "link/x", "./real//x"):
        with pytest.raises(DestinationBusyError, match="still being written by an earlier save") as caught:
            wrap(torch.save)(STATE, f"{tmp_path}/{spelling}")
    assert caught.value.path.endswith("x")
    other = wrap(save)(STATE, str(tmp_path / "real" / "y"))
    gate.open()
    blocking.result()
    handle.result()
    other.result()

    wrap(save)(STATE, str(tmp_path / "real" / "x")).result()


# --- stores ------------------------------------------------------------------------------------------------------


@pytest.fixture
def scratch(tmp_path) -> Path:
    return tmp_path / "scratch"


@pytest.fixture(params=["obstore", "s3fs"])
def there(request, bucket) -> Callable[..., Place]:
    """A path in the bucket, by each engine."""
    return partial(bucket.place, engine=request.param)


def test_a_file_a_folder_and_a_stream_arrive_at_a_store(tmp_path, bucket, there, scratch):
    big = torch.randint(0, 256, (12 * MIB,), dtype=torch.uint8)
    torch.save(big, tmp_path / "plain.pt")

    def save(state: torch.Tensor, folder: str) -> None:
        os.makedirs(folder)
        np.save(os.path.join(folder, "big.npy"), state.numpy())
        save_tree({"config.json": "{}", "sub/ü": "x", "empty": ""}, folder)

    stream = wrap(torch.save)(big, there("runs/x.pt"))
    folder = wrap(save, scratch=scratch)(big, there("runs/folder"))
    file = wrap(lambda state, path: np.save(path, state.numpy()), scratch=scratch)(big, there("y.npy"))
    text = wrap(save_text, scratch=scratch)("x", there("a/b/x.txt"))

    assert stream.result().path == bucket.url("runs/x.pt")
    assert folder.result().num_bytes == file.result().num_bytes + 3
    assert text.result().num_tensors == 0
    assert bucket.keys() == [
        "a/b/x.txt",
        *(f"runs/folder/{name}" for name in ("big.npy", "config.json", "empty", "sub/ü")),
        "runs/x.pt",
        "y.npy",
    ]
    assert bucket.uploads() == []
    (tmp_path / "y.npy").write_bytes(bucket.read("y.npy"))
    (tmp_path / "x.pt").write_bytes(bucket.read("runs/x.pt"))
    assert np.load(tmp_path / "y.npy").tobytes() == bytes(big.numpy())
    assert records(tmp_path / "x.pt") == records(tmp_path / "plain.pt")
    assert names(scratch) == []


def test_a_bucket_may_be_given_as_a_path_and_the_function_gets_one(bucket, scratch):
    seen = []

    def save(path: Path) -> None:
        seen.append(path)
        path.write_text("x")

    save = wrap(save, scratch=scratch)
    save(replace(bucket.place(), url=Path(bucket.url("a/x.txt")))).result()

    assert isinstance(seen[0], Path)
    assert seen[0].name == "x.txt"
    assert bucket.keys() == ["a/x.txt"]


def test_what_says_that_a_model_is_there_comes_last(bucket, proxy, scratch):
    save = wrap(save_tree, scratch=scratch)
    tree = {"a.json": "{}", "b.bin": "x", "sub/c.json": "{}", "z.bin": "x"}
    save(tree, bucket.place("m", endpoint=proxy.endpoint)).result()

    assert [request.target.rpartition("/m/")[2] for request in proxy.requests] == [
        "b.bin",
        "z.bin",
        "a.json",
        "sub/c.json",
    ]


def test_links_in_a_folder_are_followed_on_the_way_to_a_store(tmp_path, bucket, there, scratch):
    def save(folder: str) -> None:
        save_tree({"real/a": "A", "real/b": "B"}, folder)
        os.symlink("real", os.path.join(folder, "link"))
        os.symlink("real/a", os.path.join(folder, "a"))

    wrap(save, scratch=scratch)(there("m")).result()

    assert bucket.keys() == ["m/a", "m/link/a", "m/link/b", "m/real/a", "m/real/b"]


def test_one_call_at_a_time_writes_to_one_url(bucket, there, scratch, gate):
    def first(path: str) -> None:
        gate.passed()
        save_text("x", path)

    handle = wrap(first, scratch=scratch)(there("x"))
    with pytest.raises(DestinationBusyError):
        wrap(torch.save)(STATE, there("x"))
    gate.open()
    handle.result()
    wrap(torch.save)(STATE, there("x")).result()


def test_a_function_that_fails_leaves_nothing_at_a_store_nor_in_its_scratch(bucket, there, scratch):
    def save(state: Any, folder: str) -> None:
        save_folder(state, folder)
        raise Thrown("x")

    def stream(state: Any, file: Any) -> None:
        file.write(bytes(20 * MIB))
        raise Thrown("x")

    assert isinstance(wrap(save, scratch=scratch)(STATE, there("x")).exception(), Thrown)
    assert isinstance(wrap(stream, file_object=True)(STATE, there("y")).exception(), Thrown)

    assert bucket.keys() == []
    assert bucket.uploads() == []
    assert names(scratch) == []


@pytest.mark.parametrize("size", [10, 12 * MIB])
def test_what_cannot_be_uploaded_is_kept_and_the_error_says_where(bucket, proxy, scratch, size):
    place = bucket.place("runs/x.bin", endpoint=proxy.endpoint, deadline_seconds=1.0)
    proxy.answer("AccessDenied", method="PUT")
    proxy.answer("AccessDenied", method="POST")
    save = wrap(lambda path: Path(path).write_bytes(b"x" * size), scratch=scratch)
    error = save(place).exception()

    assert isinstance(error, StorageUnavailableError)
    (note,) = error.__notes__
    kept = Path(note.rpartition("kept in ")[2])
    assert (kept / "x.bin").read_bytes() == b"x" * size
    assert kept.parents[1] == scratch
    assert bucket.keys() == []

    proxy.clear()
    save(place).result()
    assert bucket.keys() == ["runs/x.bin"]
    assert names(scratch) == [f"{kept.parent.name}/files/x.bin"]  # nobody sweeps it


def test_an_upload_that_is_cut_is_tried_again(bucket, proxy, scratch):
    fault = proxy.cut_request(100_000, kind="upload_part", times=2)
    far = partial(bucket.place, endpoint=proxy.endpoint)
    data = os.urandom(20 * MIB)
    report = wrap(lambda path: Path(path).write_bytes(data), scratch=scratch)(far("x")).result()
    streamed = wrap(lambda f: f.write(data), file_object=True)(far("y"))

    assert streamed.result().num_bytes == report.num_bytes == len(data)
    assert fault.hits == 2
    assert bucket.read("x") == bucket.read("y") == data


def test_a_stream_that_the_store_refuses_fails_without_a_trace(bucket, proxy):
    place = bucket.place("x.pt", endpoint=proxy.endpoint, deadline_seconds=1.0)
    proxy.answer("AccessDenied", method="PUT")
    proxy.answer("AccessDenied", method="POST")
    handle = wrap(torch.save)(torch.ones(5 * MIB), place)

    assert isinstance(handle.exception(), StorageUnavailableError)
    assert bucket.keys() == bucket.uploads() == []


def test_any_filesystem_of_fsspec_will_do(scratch, tmp_path):
    url = f"memory://{uuid.uuid4().hex}"
    wrap(torch.save)(STATE, f"{url}/a/x.pt").result()
    wrap(save_folder, scratch=scratch)(STATE, f"{url}/m").result()
    fs = fsspec.filesystem("memory")
    wrap(save_text, scratch=scratch)("x", Place(url.removeprefix("memory:/") + "/t", fs=fs)).result()

    found = sorted(name.removeprefix(url.removeprefix("memory:/")) for name in fs.find(url))
    assert found == ["/a/x.pt", "/m/config.json", "/m/state.pt", "/t"]
    with fs.open(f"{url}/m/config.json") as file:
        assert json.load(file) == {}


def test_a_url_without_a_name_is_an_error_of_the_call(scratch):
    for url in ("s3://bucket", "s3://bucket/", "s3://bucket/a/", "memory://x/.."):
        with pytest.raises(ValueError, match="names no"):
            wrap(save_text, scratch=scratch)("x", url)


@pytest.mark.skipif(sys.platform != "linux", reason="the system's temp folder as Linux has it")
def test_scratch_for_a_store_is_in_the_systems_temp_folder(bucket, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    seen = []

    def save(path: str) -> None:
        seen.append(path)
        save_text("x", path)

    wrap(save)(bucket.place("x")).result()

    assert Path(seen[0]).parents[2] == tmp_path
