"""Local paths and open files of what lies anywhere: on a disk, in a bucket and in fsspec's memory."""

import io
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import TREE, InBucket, InMemory, below, random_bytes, read, write
from states import MIB

import async_ckpt
from async_ckpt import Place, StorageUnavailableError
from async_ckpt.testing import FaultyProxy


@pytest.fixture
def bucket(s3):
    return InBucket(s3, "obstore")


@pytest.fixture(params=["obstore", "s3fs", "memory"])
def cloud(request):
    if request.param == "memory":
        return InMemory()
    return InBucket(request.getfixturevalue("s3"), request.param)


def leave_by(error: BaseException, opened: Any, use: Callable[[Any], object]) -> None:
    with opened as it:
        use(it)
        raise error


# --- local_read_dir -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slash", ["", "/"])
def test_the_folder_of_a_url_is_fetched_without_nesting_and_removed_at_the_end(cloud, scratch, slash):
    cloud.write(below("ckpt", TREE) | below("ckpt2", {"other": b"3"}))
    with async_ckpt.files.local_read_dir(cloud.at(slash)) as folder:
        assert Path(folder).parent == scratch
        assert read(folder) == TREE
    assert cloud.tree() == below("ckpt", TREE) | below("ckpt2", {"other": b"3"})


def test_what_was_fetched_is_removed_after_an_exception_too(bucket, scratch):
    bucket.write(below("ckpt", TREE))
    fetched = []
    with pytest.raises(KeyboardInterrupt):
        leave_by(
            KeyboardInterrupt(),
            async_ckpt.files.local_read_dir(bucket.place),
            lambda folder: fetched.append(read(folder)),
        )
    assert fetched == [TREE]


def test_a_url_may_be_a_path(bucket, scratch):
    bucket.write(below("ckpt", TREE))
    with async_ckpt.files.local_read_dir(replace(bucket.place, url=Path(bucket.url))) as folder:
        assert read(folder) == TREE


def test_a_whole_bucket_may_be_fetched(bucket, scratch):
    bucket.write({"x": b"1"})
    with async_ckpt.files.local_read_dir(bucket.whole()) as folder:
        assert read(folder) == {"base/x": b"1"}


def test_a_path_on_a_filesystem_that_is_handed_over_is_fetched_from_it(tmp_path, scratch):
    from fsspec.implementations.local import LocalFileSystem

    write(tmp_path / "there", TREE)
    with async_ckpt.files.local_read_dir(Place(tmp_path / "there", fs=LocalFileSystem())) as folder:
        assert Path(folder).parent == scratch
        assert read(folder) == TREE


def test_large_files_are_fetched_whole_in_several_ranges(bucket, scratch):
    tree = {"large": random_bytes(37 * MIB + 5), "exact": random_bytes(16 * MIB), "small": b"1"}
    bucket.write(below("ckpt", tree))
    with FaultyProxy(bucket.server.endpoint) as proxy:
        with async_ckpt.files.local_read_dir(bucket.through(proxy)) as folder:
            assert read(folder) == tree
        assert proxy.count(kind="get_object") == 5 + 2 + 1


def test_many_small_files_are_fetched_in_few_requests(bucket, scratch):
    tree = {f"{number:03}": str(number).encode() for number in range(150)}
    bucket.write(below("ckpt", tree))
    with FaultyProxy(bucket.server.endpoint) as proxy:
        with async_ckpt.files.local_read_dir(bucket.through(proxy)) as folder:
            assert read(folder) == tree
        assert proxy.count(kind="list_objects") <= 3


def test_a_local_folder_is_passed_through_as_it_was_given(tmp_path, monkeypatch, scratch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "runs" / "a", TREE)
    for path in (str(tmp_path / "runs/a"), "runs/a", "./runs/a/", "runs", ".", Path("runs/a")):
        with async_ckpt.files.local_read_dir(path) as folder:
            assert folder == os.fspath(path)
    for path in ("~/runs/a", (tmp_path / "runs/a").as_uri()):
        with async_ckpt.files.local_read_dir(path) as folder:
            assert folder == str(tmp_path / "runs/a")
    assert read(tmp_path / "runs/a") == TREE


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen2.5-1.5B-Instruct",
        "openai-community/gpt2",
        "0-hero/OIG-small-chip2",
        "a/b",
        "_x/y_",
        "a" * 96 + "/b",
    ],
)
def test_an_id_of_the_hub_is_passed_through_untouched(name, tmp_path, monkeypatch, scratch):
    monkeypatch.chdir(tmp_path)
    for path in (name, Path(name)):
        with async_ckpt.files.local_read_dir(path) as folder:
            assert folder == name


@pytest.mark.parametrize(
    "path",
    [
        "/non/existent/path/12345", "./x/y", "a/b/c", "../x", "~/x", "gpt2", "a/", "/a", "x/..", "x/.y", ".x/y",
        "x/y.", "x/-y", "x-/y", "x/y--z", "x/y..z", "x/y.git", "x/y z", "x/ü", "x/y\n", "x//y", "a" * 97 + "/b",
        "s3:x/y", "x\\y", "C:/x",
    ],
)  # fmt: skip
def test_anything_else_is_a_file_not_found(path, tmp_path, monkeypatch, scratch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="hub"), async_ckpt.files.local_read_dir(path):
        pass


def test_a_local_file_of_the_form_of_a_hub_id_is_not_taken_for_one(tmp_path, monkeypatch, scratch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {"org/name": b"1"})
    with pytest.raises(FileNotFoundError, match="org/name"), async_ckpt.files.local_read_dir("org/name"):
        pass


def test_a_url_with_nothing_below_it_is_a_file_not_found(cloud, scratch):
    cloud.write({"ckpt2/x": b"1"})
    with (
        pytest.raises(FileNotFoundError, match="ckpt"),
        async_ckpt.files.local_read_dir(cloud.place),
    ):
        pass


def test_an_object_is_no_folder(cloud, scratch):
    cloud.write({"ckpt": b"1"})
    with pytest.raises(NotADirectoryError, match="open_file"):
        async_ckpt.files.local_read_dir(cloud.place).__enter__()


# --- local_read_files -----------------------------------------------------------------------------------------


def test_only_the_files_that_are_named_are_fetched(cloud, scratch):
    cloud.write(below("ckpt", TREE))
    names = ["config.json", "model/deep/er/x y%ü", "empty", "empty"]
    with async_ckpt.files.local_read_files(cloud.place, names) as folder:
        assert read(folder) == {name: TREE[name] for name in sorted(names)}


@pytest.mark.parametrize("is_local", [False, True])
def test_files_may_be_missing_as_those_that_skyrl_reads_unless_that_is_to_be_an_error(
    bucket, tmp_path, scratch, is_local
):
    """Its FSDP loader names the file of the optimizer, too, and looks whether it came."""
    bucket.write(below("ckpt", TREE))
    path = str(write(tmp_path / "ckpt", TREE))
    place = path if is_local else bucket.place
    names = ["config.json", "nothing", "model"]
    with async_ckpt.files.local_read_files(place, names) as folder:
        assert read(folder) == (TREE if is_local else {"config.json": b"{}"})
        assert (folder == path) == is_local
    with async_ckpt.files.local_read_files(place, ["nothing"], missing="skip") as folder:
        assert os.path.isdir(folder)
    with pytest.raises(FileNotFoundError, match="nothing, model"):
        async_ckpt.files.local_read_files(place, names, missing="error").__enter__()


@pytest.mark.parametrize("missing", ["error", "skip"])
def test_a_missing_folder_is_an_error_whatever_may_be_missing_in_it(bucket, tmp_path, scratch, missing):
    for place in (bucket.place, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match="does not exist"):
            async_ckpt.files.local_read_files(place, ["x"], missing=missing).__enter__()


@pytest.mark.parametrize("name", ["../x", "/x", "", "a//b", "./a", "a/.."])
def test_a_name_that_leads_out_of_the_folder_is_refused(bucket, tmp_path, scratch, name):
    for place in (bucket.place, tmp_path):
        with pytest.raises(ValueError, match="name of a file"):
            async_ckpt.files.local_read_files(place, [name]).__enter__()


def test_wrong_arguments_are_told_from_missing_files(tmp_path):
    with pytest.raises(TypeError, match=r"\['config.json'\]"):
        async_ckpt.files.local_read_files(tmp_path, "config.json").__enter__()
    with pytest.raises(ValueError, match="missing"):
        async_ckpt.files.local_read_files(tmp_path, [], missing="ignore").__enter__()


# --- local_work_dir -------------------------------------------------------------------------------------------


def test_what_is_written_is_uploaded_at_the_end_of_the_block_and_not_before(cloud, scratch):
    with async_ckpt.files.local_work_dir(cloud.place) as folder:
        write(Path(folder), TREE)
        assert cloud.tree() == {}
    assert cloud.tree() == below("ckpt", TREE)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_is_uploaded_after_an_exception(cloud, scratch, error):
    with pytest.raises(error):
        leave_by(
            error(),
            async_ckpt.files.local_work_dir(cloud.place),
            lambda folder: write(Path(folder), TREE),
        )
    assert cloud.tree() == {}


def test_a_block_that_writes_nothing_uploads_nothing(cloud, scratch):
    with async_ckpt.files.local_work_dir(cloud.place):
        pass
    assert cloud.tree() == {}


def test_a_local_work_folder_is_itself_and_made_if_need_be(tmp_path, monkeypatch, scratch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        with async_ckpt.files.local_work_dir("runs/a") as folder:
            assert folder == "runs/a"
            write(Path(folder), TREE)
    assert read(tmp_path / "runs/a") == TREE


# --- open_file ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_block", [True, False])
def test_what_is_written_can_be_read_back(cloud, tmp_path, scratch, with_block):
    for place in (cloud.at("/x"), tmp_path / "x"):
        for mode, content in (("b", b"\x00\r\n\xff"), ("", "größe\n検\r\n"), ("t", "")):
            if with_block:
                with async_ckpt.files.open_file(place, f"w{mode}") as file:
                    file.write(content)
            else:
                file = async_ckpt.files.open_file(place, f"w{mode}")
                file.write(content)
                file.close()
                file.close()
            with async_ckpt.files.open_file(place, f"r{mode}") as file:
                assert file.read() == (content.replace("\r\n", "\n") if isinstance(content, str) else content)
            assert file.closed


def test_an_object_appears_when_its_file_is_closed_and_not_before(cloud, scratch):
    file = async_ckpt.files.open_file(cloud.place, "wb")
    file.write(b"1" * MIB)
    file.flush()
    assert cloud.tree() == {}
    file.close()
    assert cloud.tree() == {"ckpt": b"1" * MIB}


@pytest.mark.parametrize("mode", ["wb", "w"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_is_uploaded_when_the_block_ends_by_an_exception(cloud, scratch, mode, error):
    cloud.write({"ckpt": b"old"})
    file = async_ckpt.files.open_file(cloud.place, mode)
    with pytest.raises(error):
        leave_by(error(), file, lambda file: file.write(b"new" if mode == "wb" else "new"))
    file.close()
    assert cloud.tree() == {"ckpt": b"old"}


@pytest.mark.parametrize("mode", ["wb", "w"])
def test_a_file_that_is_never_closed_is_not_uploaded(bucket, scratch, mode):
    files = [async_ckpt.files.open_file(bucket.place, mode)]
    files[0].write(b"new" if mode == "wb" else "new")
    with pytest.warns(ResourceWarning):
        files.clear()
    assert bucket.tree() == {}


def test_an_upload_that_fails_is_an_error_of_close_and_leaves_nothing(bucket, scratch):
    file = async_ckpt.files.open_file(bucket.whole("-2/x"), "wb")
    file.write(b"1")
    with pytest.raises(StorageUnavailableError, match="create it"):
        file.close()
    file.close()
    assert file.closed


def test_an_object_is_sought_in_like_a_file(cloud):
    data = random_bytes(9 * MIB + 7)
    cloud.write({"ckpt": data})
    like = io.BytesIO(data)
    with async_ckpt.files.open_file(cloud.place) as file:
        assert (file.readable(), file.seekable(), file.writable()) == (True, True, False)
        for offset, whence, length in (
            (0, 0, 10), (5 * MIB, 0, 3), (-3, 1, 5 * MIB), (-9, 2, 4), (0, 0, 0), (1, 0, -1), (9 * MIB, 0, 100),
            (20 * MIB, 0, 5),
        ):  # fmt: skip
            assert file.seek(offset, whence) == like.seek(offset, whence)
            assert file.read(length) == like.read(length)
            assert file.tell() == like.tell()
        with pytest.raises(ValueError, match="before the beginning"):
            file.seek(-1 - len(data), 2)


def test_a_large_object_is_read_in_few_requests(bucket):
    data = random_bytes(40 * MIB)
    bucket.write({"ckpt": data})
    with FaultyProxy(bucket.server.endpoint) as proxy:
        with async_ckpt.files.open_file(bucket.through(proxy)) as file:
            assert file.read() == data
        assert proxy.count(kind="get_object") <= 4


def test_torch_and_json_use_an_object_as_a_file(cloud, scratch):
    state = {"weight": torch.randn(300, 300), "step": 3}
    with async_ckpt.files.open_file(cloud.at("/x.pt"), "wb") as file:
        torch.save(state, file)
    with async_ckpt.files.open_file(cloud.at("/x.pt")) as file:
        assert torch.equal(torch.load(file, weights_only=True)["weight"], state["weight"])
    with async_ckpt.files.open_file(cloud.at("/x.json"), "w") as file:
        json.dump({"step": 3}, file)
    with async_ckpt.files.open_file(cloud.at("/x.json"), "r") as file:
        assert [json.loads(line) for line in file] == [{"step": 3}]


def test_a_local_file_is_an_ordinary_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with async_ckpt.files.open_file("x", "w") as file:
        assert file.name == "x"
        file.write("a")
    with async_ckpt.files.open_file((tmp_path / "x").as_uri(), "a") as file:
        file.write("ü")
    with async_ckpt.files.open_file(Path("x")) as file:
        assert file.read() == "aü".encode()


@pytest.mark.parametrize("mode", ["w", "wb", "a", "ab", "x", "xb", "w+", "wb+"])
def test_writing_a_local_file_makes_the_folders_above_it(tmp_path, monkeypatch, mode):
    """As it does with SkyRL's open_file, and as an object of a store needs none."""
    monkeypatch.chdir(tmp_path)
    for path in ("a/b/x", tmp_path / "c/d/x", (tmp_path / "e/f/x").as_uri()):
        with async_ckpt.files.open_file(path, mode) as file:
            file.write(b"1" if "b" in mode else "1")
    assert read(tmp_path) == {"a/b/x": b"1", "c/d/x": b"1", "e/f/x": b"1"}


@pytest.mark.parametrize("mode", ["r", "rb", "r+", "rw", "q", ""])
def test_a_local_file_that_is_not_written_anew_needs_its_folder(tmp_path, mode):
    with pytest.raises((FileNotFoundError, ValueError)):
        async_ckpt.files.open_file(tmp_path / "a" / "x", mode)
    assert os.listdir(tmp_path) == []


def test_a_file_where_a_folder_should_be_is_told_when_a_local_file_is_written(tmp_path):
    write(tmp_path, {"a": b"1"})
    with pytest.raises(NotADirectoryError):
        async_ckpt.files.open_file(tmp_path / "a" / "b" / "x", "w")


def test_what_cannot_be_opened_says_why(cloud, tmp_path):
    for place in (cloud.place, tmp_path / "x"):
        with pytest.raises(FileNotFoundError):
            async_ckpt.files.open_file(place)
    for mode in ("a", "r+b", "x", "rw", "wbt", ""):
        with pytest.raises(ValueError, match="is opened with mode"):
            async_ckpt.files.open_file(cloud.place, mode)
    for mode in ("r", "wb"):
        with pytest.raises(ValueError, match="names no object"):
            async_ckpt.files.open_file(cloud.at("/"), mode)
