"""Which storage a path or URL belongs to, and how it is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_ckpt.storage.fsspec_store import FsspecStorage
from async_ckpt.storage.local import LocalStorage
from async_ckpt.storage.object_store import ObjectStorage
from async_ckpt.storage.url import parent_and_name, shown, storage_at


@pytest.mark.parametrize(
    ("root", "options", "kind"),
    [
        ("runs/a", {}, LocalStorage),
        (Path("runs/a"), {}, LocalStorage),
        ("file:///runs/a", {}, LocalStorage),
        ("s3://bucket/run", {}, ObjectStorage),
        ("S3://bucket/run", {}, ObjectStorage),
        ("s3a://bucket", {}, ObjectStorage),
        ("s3://bucket/run", {"engine": "s3fs"}, FsspecStorage),
        ("s3://bucket/run", {"engine": "fsspec"}, FsspecStorage),
        ("memory://run", {}, FsspecStorage),
    ],
)
def test_the_scheme_and_the_engine_choose_the_storage(root, options, kind):
    assert type(storage_at(root, **options)) is kind


@pytest.mark.parametrize(
    ("root", "options", "message"),
    [
        ("s3:///run", {}, "bucket"),
        ("s3://", {}, "bucket"),
        ("s3://bucket/run?versionId=1", {}, "storage_options"),
        ("nowhere://x", {}, "nowhere"),
        ("memory://x", {"engine": "s3fs"}, "s3fs"),
        ("s3://bucket", {"engine": "boto"}, "engine"),
        ("s3://bucket", {"storage_options": {"endpint": "http://x"}}, "endpint"),
        ("", {}, "empty"),
    ],
)
def test_what_is_no_place_is_refused_with_what_is_wrong(root, options, message):
    with pytest.raises(ValueError, match=message):
        storage_at(root, **options)


def test_a_path_that_was_a_url_is_told_from_a_folder():
    with pytest.raises(ValueError, match="pass it as a string"):
        storage_at(Path("s3://bucket/run"))


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/", "s3://bucket/p/", "memory://"])
def test_an_object_needs_a_name(url):
    with pytest.raises(ValueError, match="names no object"):
        parent_and_name(url)


def test_a_url_is_divided_into_place_and_name():
    assert parent_and_name("s3://bucket/p/q/x.tar") == ("s3://bucket/p/q", "x.tar")
    assert parent_and_name("s3://bucket/x.tar") == ("s3://bucket", "x.tar")
    assert parent_and_name("/runs/x.tar") == ("/runs", "x.tar")


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        ("sftp://user:pass/word@host/run", "sftp://host/run"),
        ("sftp://user:password@host/run", "sftp://host/run"),
        ("az://account/run?sig=secret", "az://account/run"),
        ("s3://bucket/x@y.tar", "s3://bucket/x@y.tar"),
        ("runs/x@y?z", "runs/x@y?z"),
    ],
)
def test_a_url_is_shown_without_what_must_not_be_seen(url, seen):
    assert shown(url) == seen
