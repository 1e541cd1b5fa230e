"""Folders uploaded, downloaded, listed and removed: the same calls on a disk, in a bucket and in fsspec's memory."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from folders import TREE, InBucket, InMemory, below, random_bytes, read, write

import async_ckpt
from async_ckpt import CorruptCheckpointError, StorageUnavailableError
from async_ckpt.spec import MIB
from async_ckpt.storage.locks import TEMP_SUFFIX
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
        async_ckpt.files.upload_directory(local, cloud.url + slash, **cloud.options)
        assert cloud.tree() == below("ckpt", TREE | {"stays": b"s"})


def test_large_files_are_uploaded_whole(cloud, tmp_path):
    tree = {
        "large": random_bytes(21 * MIB + 5),
        "exact": random_bytes(16 * MIB),
        "one": random_bytes(8 * MIB),
    }
    async_ckpt.files.upload_directory(write(tmp_path, tree), cloud.url, **cloud.options)
    assert cloud.tree() == below("ckpt", tree)


def test_a_file_larger_than_the_memory_that_copies_it_is_uploaded_whole(bucket, tmp_path):
    tree = {"large": random_bytes(140 * MIB + 5), "small": b"1"}
    async_ckpt.files.upload_directory(write(tmp_path, tree), bucket.url, **bucket.options)
    assert bucket.tree() == below("ckpt", tree)


def test_a_whole_bucket_may_be_uploaded_to(bucket, tmp_path):
    async_ckpt.files.upload_directory(write(tmp_path, TREE), f"s3://{bucket.bucket}/", **bucket.options)
    assert bucket.tree() == TREE


def test_links_are_followed_and_files_on_their_way_left_out(bucket, tmp_path):
    write(tmp_path / "blobs", {"abc": b"1", "folder/x": b"2"})
    source = write(tmp_path / "snapshot", {"y": b"3", f".z.1234{TEMP_SUFFIX}": b"4"})
    (source / "model").symlink_to("../blobs/abc")
    (source / "more").symlink_to("../blobs/folder")
    async_ckpt.files.upload_directory(source, bucket.url, **bucket.options)
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
        async_ckpt.files.upload_directory(tmp_path, bucket.url, **bucket.options)
    assert bucket.tree() == {}


def test_a_source_that_is_no_folder_of_files_is_refused(bucket, tmp_path):
    write(tmp_path, {"file": b"1"})
    (tmp_path / "empty" / "deep").mkdir(parents=True)
    for source, error, told in (
        (tmp_path / "missing", FileNotFoundError, "is not there"),
        (tmp_path / "empty", FileNotFoundError, "no files"),
        (tmp_path / "file", NotADirectoryError, "is a file"),
        (bucket.url, ValueError, "no local folder"),
    ):
        with pytest.raises(error, match=told):
            async_ckpt.files.upload_directory(source, bucket.url, **bucket.options)
    with pytest.raises(ValueError, match="no URL"):
        async_ckpt.files.upload_directory(tmp_path, tmp_path / "there")
    assert bucket.tree() == {}


def test_a_missing_bucket_is_told_of_and_never_made(bucket, tmp_path):
    write(tmp_path, TREE)
    with pytest.raises(StorageUnavailableError, match="create it"):
        async_ckpt.files.upload_directory(tmp_path, f"s3://{bucket.bucket}-2/x", **bucket.options)
    assert not [b for b in bucket.server.client.list_buckets()["Buckets"] if b["Name"].endswith("-2")]


@pytest.mark.parametrize("code", ["SlowDown", "InternalError"])
def test_a_store_that_is_overloaded_is_asked_again(bucket, tmp_path, code):
    tree = TREE | {"large": random_bytes(20 * MIB)}
    with FaultyProxy(bucket.server.endpoint) as proxy:
        options = {"storage_options": {**bucket.server.options, "endpoint": proxy.endpoint}}
        faults = [
            proxy.answer(code, kind=kind, times=1)
            for kind in ("create_multipart_upload", "upload_part", "put_object", "get_object", "list_objects")
        ]
        async_ckpt.files.upload_directory(write(tmp_path / "a", tree), bucket.url, **options)
        async_ckpt.files.download_directory(bucket.url, tmp_path / "b", **options)
        for fault in faults:
            fault.wait()
    assert bucket.tree() == below("ckpt", tree)
    assert read(tmp_path / "b") == tree


def test_a_part_that_is_refused_ends_the_upload_without_a_trace_of_the_file(bucket, tmp_path):
    tree = {"large": random_bytes(140 * MIB)}
    with FaultyProxy(bucket.server.endpoint) as proxy:
        options = {"storage_options": {**bucket.server.options, "endpoint": proxy.endpoint}}
        proxy.answer("AccessDenied", kind="upload_part", target=r"partNumber=3\b")
        with pytest.raises(StorageUnavailableError, match="AccessDenied"):
            async_ckpt.files.upload_directory(write(tmp_path, tree), bucket.url, **options)
    assert bucket.tree() == {}


# --- download_directory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_folder_is_downloaded_without_nesting_however_often(cloud, tmp_path, slash):
    cloud.write(below("ckpt", TREE))
    target = tmp_path / "new" / "target"
    for _ in range(2):
        async_ckpt.files.download_directory(cloud.url + slash, f"{target}{slash}", **cloud.options)
        assert read(tmp_path) == below("new/target", TREE)


def test_files_that_are_there_stay_unless_they_are_downloaded(bucket, tmp_path):
    bucket.write(below("ckpt", TREE))
    write(tmp_path / "target", {"stays": b"s", "config.json": b"old", "model/stays": b"t"})
    async_ckpt.files.download_directory(bucket.url, tmp_path / "target", **bucket.options)
    assert read(tmp_path) == below("target", TREE | {"stays": b"s", "model/stays": b"t"})


def test_a_download_follows_the_link_that_it_is_sent_to(bucket, tmp_path):
    bucket.write(below("ckpt", TREE))
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    async_ckpt.files.download_directory(bucket.url, tmp_path / "link", **bucket.options)
    assert (tmp_path / "link").is_symlink()
    assert read(tmp_path / "there") == TREE


def test_processes_that_download_the_same_do_not_disturb_each_other(bucket, tmp_path):
    bucket.write(below("ckpt", TREE))
    together = threading.Barrier(4)

    def download(_: int) -> None:
        together.wait(60)
        async_ckpt.files.download_directory(bucket.url, tmp_path / "target", **bucket.options)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(download, range(4)))
    assert read(tmp_path) == below("target", TREE)


def test_nothing_is_seen_of_a_download_that_fails(bucket, tmp_path):
    bucket.write(below("ckpt", TREE | {"large": random_bytes(30 * MIB), "z": b"1"}))
    with FaultyProxy(bucket.server.endpoint) as proxy:
        options = {"storage_options": {**bucket.server.options, "endpoint": proxy.endpoint}}
        proxy.answer("AccessDenied", kind="get_object", target="/large")
        for target in ("new", "old"):
            (tmp_path / "old").mkdir(exist_ok=True)
            with pytest.raises(StorageUnavailableError, match="AccessDenied"):
                async_ckpt.files.download_directory(bucket.url, tmp_path / target, **options)
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
    place = InBucket(s3, engine)
    place.write({"ckpt/fine": b"1"} | {f"ckpt/{key}": b"1" for key in keys})
    target = tmp_path / "deep" / "target"
    with pytest.raises(CorruptCheckpointError, match="rename or delete"):
        async_ckpt.files.download_directory(place.url, target, **place.options)
    with pytest.raises(CorruptCheckpointError, match="rename or delete"):
        async_ckpt.files.local_read_dir(place.url, **place.options).__enter__()
    assert read(tmp_path) == {}


@pytest.mark.parametrize("engine", ["obstore", "s3fs"])
def test_empty_objects_that_consoles_make_for_folders_are_no_files(s3, tmp_path, engine):
    place = InBucket(s3, engine)
    place.write({"ckpt/": b"", "ckpt/model/": b"", "ckpt/none/": b""} | below("ckpt", TREE))
    async_ckpt.files.download_directory(place.url, tmp_path / "target", **place.options)
    assert read(tmp_path / "target") == TREE


@pytest.mark.parametrize(
    ("there", "error"), [({"target": b"1"}, NotADirectoryError), ({"target/model": b"1"}, NotADirectoryError),
                         ({"target/empty/x": b"1"}, IsADirectoryError)],
)  # fmt: skip
def test_what_stands_in_the_way_is_named_before_anything_is_fetched(bucket, tmp_path, there, error):
    bucket.write(below("ckpt", TREE))
    write(tmp_path, there)
    with pytest.raises(error, match="should be"):
        async_ckpt.files.download_directory(bucket.url, tmp_path / "target", **bucket.options)
    assert read(tmp_path) == there


def test_a_download_needs_a_url_with_something_below_it_and_a_local_folder(bucket, tmp_path):
    with pytest.raises(FileNotFoundError, match="is not there"):
        async_ckpt.files.download_directory(bucket.url, tmp_path / "x", **bucket.options)
    with pytest.raises(ValueError, match="no URL"):
        async_ckpt.files.download_directory(tmp_path, tmp_path / "x")
    with pytest.raises(ValueError, match="no local folder"):
        async_ckpt.files.download_directory(bucket.url, bucket.url, **bucket.options)
    assert os.listdir(tmp_path) == []


# --- names ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["local", "obstore", "s3fs", "memory"])
def anywhere(request, tmp_path):
    """The URL or path of a folder that holds TREE, and what opens it."""
    if request.param == "local":
        return str(write(tmp_path / "ckpt", TREE)), {}
    place = (
        InMemory() if request.param == "memory" else InBucket(request.getfixturevalue("s3"), request.param)
    )
    place.write(below("ckpt", TREE))
    return place.url, place.options


def test_files_and_folders_exist_with_and_without_a_slash(anywhere):
    url, options = anywhere
    found = {
        path: (
            async_ckpt.files.exists(f"{url}{path}", **options),
            async_ckpt.files.isdir(f"{url}{path}", **options),
        )
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
    url, options = anywhere
    for path in (url, f"{url}/"):
        assert async_ckpt.files.list_dir(path, **options) == [
            f"{url}/{name}" for name in ("config.json", "empty", "model")
        ]
    (model,) = [
        path for path in async_ckpt.files.list_dir(url, **options) if async_ckpt.files.isdir(path, **options)
    ]
    assert async_ckpt.files.list_dir(model, **options) == [f"{url}/model/00001.bin", f"{url}/model/deep"]
    with pytest.raises(FileNotFoundError, match="nowhere"):
        async_ckpt.files.list_dir(f"{url}/nowhere", **options)
    with pytest.raises(NotADirectoryError, match=r"config\.json"):
        async_ckpt.files.list_dir(f"{url}/config.json", **options)


def test_a_folder_is_removed_with_all_that_is_in_it_and_a_file_alone(anywhere):
    url, options = anywhere
    async_ckpt.files.remove(f"{url}/model", **options)
    assert [path.rpartition("/")[2] for path in async_ckpt.files.list_dir(url, **options)] == [
        "config.json",
        "empty",
    ]
    async_ckpt.files.remove(f"{url}/empty", **options)
    assert async_ckpt.files.list_dir(url, **options) == [f"{url}/config.json"]
    async_ckpt.files.remove(f"{url}/", **options)
    assert not async_ckpt.files.exists(url, **options)
    with pytest.raises(FileNotFoundError):
        async_ckpt.files.remove(url, **options)


def test_a_filesystem_of_real_folders_keeps_none_that_was_removed(tmp_path):
    from fsspec.implementations.local import LocalFileSystem

    write(tmp_path / "there", {f"{a}/{b}/{c}": b"1" for a in range(3) for b in range(3) for c in range(3)})
    async_ckpt.files.remove(tmp_path / "there", fs=LocalFileSystem())
    assert os.listdir(tmp_path) == []


def test_a_bucket_is_there_and_is_never_removed(bucket):
    bucket.write(TREE)
    root = f"s3://{bucket.bucket}"
    assert async_ckpt.files.exists(root, **bucket.options)
    assert async_ckpt.files.isdir(root, **bucket.options)
    assert async_ckpt.files.list_dir(f"{root}/", **bucket.options) == [f"{root}/base"]
    for url in (root, f"{root}/"):
        with pytest.raises(ValueError, match="name a file or a folder"):
            async_ckpt.files.remove(url, **bucket.options)
    assert bucket.tree() == TREE


@pytest.mark.parametrize("path", ["/", "/..", "//", "/usr/..", "file:///"])
def test_a_disk_is_never_removed(path, monkeypatch):
    def rmtree(path: str, **_: Any) -> None:  # or a failure of this test would be the last one
        raise AssertionError(f"{path} would have been deleted")

    monkeypatch.setattr("shutil.rmtree", rmtree)
    with pytest.raises(ValueError, match="name a file or a folder"):
        async_ckpt.files.remove(path)


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
            call(f"s3://{bucket.bucket}-2/x", **bucket.options)
