"""Folders uploaded, downloaded, listed and removed: the same calls on a disk, in a bucket and in fsspec's memory."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from folders import TREE, Far, InBucket, InMemory, below, random_bytes, read, write
from states import MIB

import async_ckpt
from async_ckpt import CorruptCheckpointError, StorageUnavailableError
from async_ckpt.testing import FaultyProxy


@pytest.fixture
def bucket(s3):
    return InBucket(s3, "obstore")


@pytest.fixture(params=["obstore", "s3fs", "memory"])
def cloud(request):
    if request.param == "memory":
        return InMemory()
    return InBucket(request.getfixturevalue("s3"), request.param)


# --- upload_directory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_folder_is_uploaded_without_nesting_however_often(cloud, tmp_path, slash):
    source = write(tmp_path / "source", TREE)
    cloud.write({"ckpt/stays": b"s", "ckpt/config.json": b"old"})
    for local in (source, f"{source}/", str(source)):
        async_ckpt.files.upload_directory(local, cloud.at(slash))
        assert cloud.tree() == below("ckpt", TREE | {"stays": b"s"})


def test_large_files_are_uploaded_whole(cloud, tmp_path):
    tree = {
        "large": random_bytes(21 * MIB + 5),
        "exact": random_bytes(16 * MIB),
        "one": random_bytes(8 * MIB),
    }
    async_ckpt.files.upload_directory(write(tmp_path, tree), cloud.place)
    assert cloud.tree() == below("ckpt", tree)


def test_a_file_larger_than_the_memory_that_copies_it_is_uploaded_whole(bucket, tmp_path):
    tree = {"large": random_bytes(140 * MIB + 5), "small": b"1"}
    async_ckpt.files.upload_directory(write(tmp_path, tree), bucket.place)
    assert bucket.tree() == below("ckpt", tree)


def test_a_whole_bucket_may_be_uploaded_to(bucket, tmp_path):
    async_ckpt.files.upload_directory(write(tmp_path, TREE), bucket.whole("/"))
    assert bucket.tree() == TREE


def test_links_are_followed_and_files_on_their_way_left_out(bucket, tmp_path):
    write(tmp_path / "blobs", {"abc": b"1", "folder/x": b"2"})
    source = write(tmp_path / "snapshot", {"y": b"3", ".z.1234.async_ckpt-tmp": b"4"})
    (source / "model").symlink_to("../blobs/abc")
    (source / "more").symlink_to("../blobs/folder")
    async_ckpt.files.upload_directory(source, bucket.place)
    assert bucket.tree() == below("ckpt", {"model": b"1", "more/x": b"2", "y": b"3"})


def _dangling(folder: Path) -> None:
    (folder / "odd").symlink_to("nowhere")


def _circle(folder: Path) -> None:
    (folder / "odd").symlink_to(".")


def _pipe(folder: Path) -> None:
    os.mkfifo(folder / "odd")


@pytest.mark.parametrize("make", [_dangling, _circle, _pipe])
def test_what_cannot_be_uploaded_is_named_and_nothing_uploaded(bucket, tmp_path, make):
    make(write(tmp_path, TREE))
    with pytest.raises(StorageUnavailableError, match="odd"):
        async_ckpt.files.upload_directory(tmp_path, bucket.place)
    assert bucket.tree() == {}


def test_a_source_that_is_no_folder_of_files_is_refused(bucket, tmp_path):
    write(tmp_path, {"file": b"1"})
    (tmp_path / "empty" / "deep").mkdir(parents=True)
    for source, error, told in (
        (tmp_path / "missing", FileNotFoundError, "does not exist"),
        (tmp_path / "empty", FileNotFoundError, "no files"),
        (tmp_path / "file", NotADirectoryError, "is a file"),
        (bucket.url, ValueError, "is not a local path"),
    ):
        with pytest.raises(error, match=told):
            async_ckpt.files.upload_directory(source, bucket.place)
    with pytest.raises(ValueError, match="is not a URL"):
        async_ckpt.files.upload_directory(tmp_path, tmp_path / "there")
    assert bucket.tree() == {}


def test_a_missing_bucket_is_told_of_and_never_made(bucket, tmp_path):
    write(tmp_path, TREE)
    with pytest.raises(StorageUnavailableError, match="create it"):
        async_ckpt.files.upload_directory(tmp_path, bucket.whole("-2/x"))
    assert not [b for b in bucket.server.client.list_buckets()["Buckets"] if b["Name"].endswith("-2")]


@pytest.mark.parametrize("code", ["SlowDown", "InternalError"])
def test_a_store_that_is_overloaded_is_asked_again(bucket, tmp_path, code):
    tree = TREE | {"large": random_bytes(20 * MIB)}
    with FaultyProxy(bucket.server.endpoint) as proxy:
        far = bucket.through(proxy)
        faults = [
            proxy.answer(code, kind=kind, times=1)
            for kind in ("create_multipart_upload", "upload_part", "put_object", "get_object", "list_objects")
        ]
        async_ckpt.files.upload_directory(write(tmp_path / "a", tree), far)
        async_ckpt.files.download_directory(far, tmp_path / "b")
        for fault in faults:
            fault.wait()
    assert bucket.tree() == below("ckpt", tree)
    assert read(tmp_path / "b") == tree


def test_a_part_that_is_refused_ends_the_upload_without_a_trace_of_the_file(bucket, tmp_path):
    tree = {"large": random_bytes(140 * MIB)}
    with FaultyProxy(bucket.server.endpoint) as proxy:
        far = bucket.through(proxy)
        proxy.answer("AccessDenied", kind="upload_part", target=r"partNumber=3\b")
        with pytest.raises(StorageUnavailableError, match="AccessDenied"):
            async_ckpt.files.upload_directory(write(tmp_path, tree), far)
    assert bucket.tree() == {}


# --- download_directory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_folder_is_downloaded_without_nesting_however_often(cloud, tmp_path, slash):
    cloud.write(below("ckpt", TREE))
    target = tmp_path / "new" / "target"
    for _ in range(2):
        async_ckpt.files.download_directory(cloud.at(slash), f"{target}{slash}")
        assert read(tmp_path) == below("new/target", TREE)


def test_files_that_are_there_stay_unless_they_are_downloaded(bucket, tmp_path):
    bucket.write(below("ckpt", TREE))
    write(tmp_path / "target", {"stays": b"s", "config.json": b"old", "model/stays": b"t"})
    async_ckpt.files.download_directory(bucket.place, tmp_path / "target")
    assert read(tmp_path) == below("target", TREE | {"stays": b"s", "model/stays": b"t"})


def test_a_download_follows_the_link_that_it_is_sent_to(bucket, tmp_path):
    bucket.write(below("ckpt", TREE))
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    async_ckpt.files.download_directory(bucket.place, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert read(tmp_path / "there") == TREE


def test_processes_that_download_the_same_do_not_disturb_each_other(bucket, tmp_path):
    bucket.write(below("ckpt", TREE))
    together = threading.Barrier(4)

    def download(_: int) -> None:
        together.wait(60)
        async_ckpt.files.download_directory(bucket.place, tmp_path / "target")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(download, range(4)))
    assert read(tmp_path) == below("target", TREE)


def test_nothing_is_seen_of_a_download_that_fails(bucket, tmp_path):
    bucket.write(below("ckpt", TREE | {"large": random_bytes(30 * MIB), "z": b"1"}))
    with FaultyProxy(bucket.server.endpoint) as proxy:
        far = bucket.through(proxy)
        proxy.answer("AccessDenied", kind="get_object", target="/large")
        for target in ("new", "old"):
            (tmp_path / "old").mkdir(exist_ok=True)
            with pytest.raises(StorageUnavailableError, match="AccessDenied"):
                async_ckpt.files.download_directory(far, tmp_path / target)
    assert os.listdir(tmp_path) == ["old"]
    assert os.listdir(tmp_path / "old") == []


@pytest.mark.parametrize("engine", ["obstore", "s3fs"])
@pytest.mark.parametrize(
    "keys",
    [["../x"], ["a/../../x"], ["/etc/x"], ["a//x"], ["./x"], [".."], ["a", "a/b"], ["d/a/b/c", "d/a"]],
    ids=lambda keys: "+".join(keys),
)
def test_objects_that_cannot_be_files_of_one_folder_are_told_of_and_nothing_written(
    s3, tmp_path, scratch, engine, keys
):
    far = InBucket(s3, engine)
    far.write({"ckpt/fine": b"1"} | {f"ckpt/{key}": b"1" for key in keys})
    target = tmp_path / "deep" / "target"
    with pytest.raises(CorruptCheckpointError, match="rename or delete"):
        async_ckpt.files.download_directory(far.place, target)
    with pytest.raises(CorruptCheckpointError, match="rename or delete"):
        async_ckpt.files.local_read_dir(far.place).__enter__()
    assert read(tmp_path) == {}


@pytest.mark.parametrize("engine", ["obstore", "s3fs"])
def test_empty_objects_that_consoles_make_for_folders_are_no_files(s3, tmp_path, engine):
    far = InBucket(s3, engine)
    far.write({"ckpt/": b"", "ckpt/model/": b"", "ckpt/none/": b""} | below("ckpt", TREE))
    async_ckpt.files.download_directory(far.place, tmp_path / "target")
    assert read(tmp_path / "target") == TREE


@pytest.mark.parametrize(
    ("there", "error"), [({"target": b"1"}, NotADirectoryError), ({"target/model": b"1"}, NotADirectoryError),
                         ({"target/empty/x": b"1"}, IsADirectoryError)],
)  # fmt: skip
def test_what_stands_in_the_way_is_named_before_anything_is_fetched(bucket, tmp_path, there, error):
    bucket.write(below("ckpt", TREE))
    write(tmp_path, there)
    with pytest.raises(error, match="should be"):
        async_ckpt.files.download_directory(bucket.place, tmp_path / "target")
    assert read(tmp_path) == there


def test_a_download_needs_a_url_with_something_below_it_and_a_local_folder(bucket, tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        async_ckpt.files.download_directory(bucket.place, tmp_path / "x")
    with pytest.raises(ValueError, match="is not a URL"):
        async_ckpt.files.download_directory(tmp_path, tmp_path / "x")
    with pytest.raises(ValueError, match="is not a local path"):
        async_ckpt.files.download_directory(bucket.place, bucket.place)
    assert os.listdir(tmp_path) == []


# --- names ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["local", "obstore", "s3fs", "memory"])
def anywhere(request, tmp_path):
    """A folder that holds TREE."""
    if request.param == "local":
        return Far(async_ckpt.Place(str(write(tmp_path / "ckpt", TREE))))
    far = InMemory() if request.param == "memory" else InBucket(request.getfixturevalue("s3"), request.param)
    far.write(below("ckpt", TREE))
    return far


def test_files_and_folders_exist_with_and_without_a_slash(anywhere):
    found = {
        path: (async_ckpt.files.exists(anywhere.at(path)), async_ckpt.files.isdir(anywhere.at(path)))
        for path in (
            "",
            "/",
            "/model",
            "/model/",
            "/model/deep",
            "/config.json",
            "/empty",
            "/mod",
            "/no/where",
            "2",
        )
    }
    folder, file, nothing = (True, True), (True, False), (False, False)
    assert list(found.values()) == [folder] * 5 + [file] * 2 + [nothing] * 3


def test_a_folder_is_listed_by_full_names_that_can_be_used_again(anywhere):
    url = anywhere.url
    for slash in ("", "/"):
        assert async_ckpt.files.list_dir(anywhere.at(slash)) == [
            f"{url}/{name}" for name in ("config.json", "empty", "model")
        ]
    listed = [replace(anywhere.place, url=path) for path in async_ckpt.files.list_dir(anywhere.place)]
    (model,) = [place for place in listed if async_ckpt.files.isdir(place)]
    assert async_ckpt.files.list_dir(model) == [f"{url}/model/00001.bin", f"{url}/model/deep"]
    with pytest.raises(FileNotFoundError, match="nowhere"):
        async_ckpt.files.list_dir(anywhere.at("/nowhere"))
    with pytest.raises(NotADirectoryError, match=r"config\.json"):
        async_ckpt.files.list_dir(anywhere.at("/config.json"))


def test_a_folder_is_removed_with_all_that_is_in_it_and_a_file_alone(anywhere):
    place, url = anywhere.place, anywhere.url
    async_ckpt.files.remove(anywhere.at("/model"))
    assert async_ckpt.files.list_dir(place) == [f"{url}/config.json", f"{url}/empty"]
    async_ckpt.files.remove(anywhere.at("/empty"))
    assert async_ckpt.files.list_dir(place) == [f"{url}/config.json"]
    async_ckpt.files.remove(anywhere.at("/"))
    assert not async_ckpt.files.exists(place)
    with pytest.raises(FileNotFoundError):
        async_ckpt.files.remove(place)


def test_a_filesystem_of_real_folders_keeps_none_that_was_removed(tmp_path):
    from fsspec.implementations.local import LocalFileSystem

    write(tmp_path / "there", {f"{a}/{b}/{c}": b"1" for a in range(3) for b in range(3) for c in range(3)})
    async_ckpt.files.remove(async_ckpt.Place(tmp_path / "there", fs=LocalFileSystem()))
    assert os.listdir(tmp_path) == []


def test_a_bucket_is_there_and_is_never_removed(bucket):
    bucket.write(TREE)
    root = bucket.whole()
    assert async_ckpt.files.exists(root)
    assert async_ckpt.files.isdir(root)
    assert async_ckpt.files.list_dir(bucket.whole("/")) == [f"{root.text}/base"]
    for place in (root, bucket.whole("/")):
        with pytest.raises(ValueError, match="name a file or a folder"):
            async_ckpt.files.remove(place)
    assert bucket.tree() == TREE


@pytest.mark.parametrize("path", ["/", "/..", "//", "/usr/..", "file:///"])
def test_a_disk_is_never_removed(path, monkeypatch):
    def rmtree(path: str, **_: Any) -> None:  # or a failure of this test would be the last one
        raise AssertionError(f"{path} would have been deleted")

    monkeypatch.setattr("shutil.rmtree", rmtree)
    with pytest.raises(ValueError, match="name a file or a folder"):
        async_ckpt.files.remove(path)


@pytest.mark.parametrize("path", [".", "..", "../here/"])
def test_the_current_folder_is_never_removed_but_a_link_to_it_is(tmp_path, monkeypatch, path):
    here = tmp_path / "here"
    here.mkdir()
    (tmp_path / "link").symlink_to(here)
    monkeypatch.chdir(here)

    with pytest.raises(ValueError, match="is the current folder, or a parent of it, and would be deleted"):
        async_ckpt.files.remove(path)
    async_ckpt.files.remove("../link")

    assert os.listdir(tmp_path) == ["here"]


def test_a_link_is_removed_and_not_what_it_leads_to(tmp_path):
    write(tmp_path / "there", TREE)
    (tmp_path / "link").symlink_to("there")
    async_ckpt.files.remove(tmp_path / "link")
    assert os.listdir(tmp_path) == ["there"]
    assert read(tmp_path / "there") == TREE


def test_what_cannot_be_asked_is_no_answer(bucket):
    for call in (
        async_ckpt.files.exists,
        async_ckpt.files.isdir,
        async_ckpt.files.list_dir,
        async_ckpt.files.remove,
    ):
        with pytest.raises(StorageUnavailableError, match="create it"):
            call(bucket.whole("-2/x"))
