"""Which storage a path or URL belongs to, and how it is shown."""

import enum
from pathlib import Path

import pytest

from async_ckpt.core.storage.local import LocalStorage
from async_ckpt.core.storage.place import Place, storage_at
from async_ckpt.core.storage.url import local_path, parent_and_name, place_and_name, shown, split_bucket
from async_ckpt.stores.fsspec.store import FsspecStorage
from async_ckpt.stores.s3.store import ObjectStorage


@pytest.mark.parametrize(
    ("root", "kind"),
    [
        ("runs/a", LocalStorage),
        (Path("runs/a"), LocalStorage),
        ("file:///runs/a", LocalStorage),
        ("s3://bucket/run", ObjectStorage),
        ("S3://bucket/run", ObjectStorage),
        ("s3a://bucket", ObjectStorage),
        (Place("s3://bucket/run", engine="s3fs"), FsspecStorage),
        (Place("s3://bucket/run", engine="fsspec"), FsspecStorage),
        ("memory://run", FsspecStorage),
    ],
)
def test_the_scheme_and_the_engine_choose_the_storage(root, kind):
    assert type(storage_at(root)) is kind


@pytest.mark.parametrize(
    ("root", "options", "message"),
    [
        ("s3:///run", {}, "bucket"),
        ("s3://", {}, "bucket"),
        ("s3://bucket/run?versionId=1", {}, "options="),
        ("nowhere://x", {}, "nowhere"),
        ("s3://bucket", {"options": {"endpint": "http://x"}}, "endpint"),
    ],
)
def test_what_is_no_place_is_refused_with_what_is_wrong(root, options, message):
    with pytest.raises(ValueError, match=message):
        storage_at(Place(root, **options))


def test_the_url_of_a_bucket_may_be_a_path_which_makes_one_slash_of_two():
    assert storage_at(Path("s3://bucket/run")).locate("x.tar") == "s3://bucket/run/x.tar"
    assert parent_and_name(Path("gs://bucket/run/x.tar")) == ("gs://bucket/run", "x.tar")


@pytest.mark.parametrize("url", ["memory://run", "sftp://host/run"])
def test_any_other_path_that_was_a_url_is_told_from_a_folder(url):
    with pytest.raises(ValueError, match="pass it as a string"):
        storage_at(Path(url))


def test_what_stands_for_an_object_in_a_store_is_its_url_and_not_its_copy_in_a_cache(tmp_path):
    """As a path of cloudpathlib does; a Path has a URL too, which is no better than the path."""

    class CloudPath:
        def as_uri(self) -> str:
            return "s3://bucket/run/x.tar"

        def __fspath__(self) -> str:
            return str(tmp_path / "x.tar")

    assert parent_and_name(CloudPath()) == ("s3://bucket/run", "x.tar")
    assert parent_and_name(Path("run/x y.tar")) == (str(Path("run").absolute()), "x y.tar")


def test_a_member_of_an_enum_with_string_values_is_the_path_that_its_value_is():
    class Folder(str, enum.Enum):  # noqa: UP042 - as written before Python 3.11
        RUN = "runs/a"

    assert Place(Folder.RUN).storage().root == Path("runs/a").absolute()


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/", "s3://bucket/p/", "memory://"])
def test_an_object_needs_a_name(url):
    with pytest.raises(ValueError, match="names no object"):
        parent_and_name(url)


def test_the_example_of_a_name_is_a_url():
    with pytest.raises(ValueError, match=r"such as s3://bucket/x\.tar"):
        parent_and_name("s3://")
    with pytest.raises(ValueError, match=r"such as s3://bucket/p/x\.tar"):
        parent_and_name("s3://bucket/p/")


def test_a_url_is_divided_into_place_and_name():
    assert parent_and_name("s3://bucket/p/q/x.tar") == ("s3://bucket/p/q", "x.tar")
    assert parent_and_name("s3://bucket/x.tar") == ("s3://bucket", "x.tar")
    assert parent_and_name("/runs/x.tar") == ("/runs", "x.tar")


@pytest.mark.parametrize("url", ["s3:///run/x.tar", "gs:///x.tar"])
def test_a_url_without_a_bucket_says_so(url):
    with pytest.raises(ValueError, match=r"names no bucket; write (s3|gs)://bucket/"):
        parent_and_name(url)


@pytest.mark.parametrize("name", ["..", ".", "a\nb", "a\0b", "a\x7f", "\ud800"])
def test_a_key_that_no_client_reads_again_is_refused_before_it_is_written(name):
    with pytest.raises(ValueError, match=r"a key must not have|a null character"):
        parent_and_name(f"s3://bucket/{name}")
    with pytest.raises(ValueError, match=r"a key must not have|a null character"):
        split_bucket(f"s3://bucket/{name}/run")


def test_a_path_on_a_filesystem_that_is_handed_over_is_divided_as_one_there():
    filesystem = object()
    assert parent_and_name("bucket/p/x.tar", fs=filesystem) == ("bucket/p", "x.tar")
    assert parent_and_name("/p/x.tar", fs=filesystem) == ("/p", "x.tar")
    assert parent_and_name("/x.tar", fs=filesystem) == ("/", "x.tar")
    with pytest.raises(ValueError, match="names no object"):
        parent_and_name("bucket", fs=filesystem)


@pytest.mark.parametrize(
    ("path", "place", "name"),
    [
        ("s3://bucket/p/q", "s3://bucket/p", "q"),
        ("s3://bucket/p/q//", "s3://bucket/p", "q"),
        ("s3://bucket/p/", "s3://bucket", "p"),
        ("s3://bucket", "s3://bucket", ""),
        ("s3://bucket/", "s3://bucket/", ""),
        ("/runs/a/", "/runs", "a"),
        ("/", "/", ""),
    ],
)
def test_a_folder_is_divided_too_whether_or_not_a_slash_ends_it(path, place, name):
    assert place_and_name(path) == (place, name)


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        ("sftp://user:pass/word@host/run", "sftp://host/run"),
        ("sftp://user:password@host/run", "sftp://host/run"),
        ("az://account/run?sig=secret", "az://account/run"),
        ("s3://bucket/x@y.tar", "s3://bucket/x@y.tar"),
        ("s3://bucket/x#secret", "s3://bucket/x"),
        ("s3://key:secret/run", "s3://key"),
        ("sftp://host:22/run", "sftp://host:22/run"),
        ("sftp:/user:password@host/run", "sftp:/host/run"),
        ("runs/x@y?z", "runs/x@y?z"),
    ],
)
def test_a_url_is_shown_without_what_must_not_be_seen(url, seen):
    assert shown(url) == seen


def test_the_home_of_a_user_whom_nobody_knows_is_refused_by_name():
    with pytest.raises(ValueError, match=r"~nobody-of-this-name/x: .*write the path in full"):
        local_path("~nobody-of-this-name/x")
