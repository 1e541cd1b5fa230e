"""A store that answers as Ceph's gateway does."""

from __future__ import annotations

from typing import Any

import pytest


def matches(request: Any) -> str:
    """What the condition of a put names, as it was sent."""
    return request.headers.get("if-match", "")


def as_ceph(proxy: Any) -> Any:
    """Ceph's gateway compares the e-tag with the header as it is, and so takes it without quotes alone."""
    return proxy.answer("PreconditionFailed", kind="put_object", where=lambda request: matches(request).startswith('"'))


def assert_replaces_what_was_read_and_nothing_else(storage: Any, proxy: Any) -> None:
    """A storage behind a proxy that stands before such a store."""
    fault = as_ceph(proxy)
    storage.put_new("latest", b"1")
    _, version = storage.read("latest")
    storage.replace("latest", b"2", version=version)
    assert storage.read("latest")[0] == b"2"
    with pytest.raises(FileExistsError):
        storage.replace("latest", b"3", version=version)
    assert storage.read("latest")[0] == b"2"

    # What was found out is remembered: from now on one request is enough.
    hits, num_requests = fault.hits, len(proxy.requests)
    for number in range(3, 6):
        storage.replace("latest", b"%d" % number, version=storage.read("latest")[1])
    assert storage.read("latest")[0] == b"5"
    assert fault.hits == hits
    assert len(proxy.requests) == num_requests + 2 * 3 + 1
    assert storage.names("") == ["latest"]


def assert_is_asked_nothing_more(storage: Any, proxy: Any) -> None:
    """A storage behind a proxy that stands before a store that takes e-tags as it gives them."""
    storage.put_new("latest", b"1")
    for number in range(2, 5):
        _, version = storage.read("latest")
        num_requests = len(proxy.requests)
        storage.replace("latest", b"%d" % number, version=version)
        assert len(proxy.requests) == num_requests + 1
        assert matches(proxy.requests[-1]) == version


def told_where_no_put_over_a_version_is_taken(storage, proxy, caplog):
    """What is said, once, of a store that refuses each of them: the object is replaced all the same."""
    proxy.answer("PreconditionFailed", kind="put_object", where=matches)
    storage.put_new("latest", b"1")
    with pytest.raises(FileExistsError):  # this condition it obeys
        storage.put_new("latest", b"2")
    for number in range(2, 5):
        storage.replace("latest", b"%d" % number, version=(version := storage.read("latest")[1]))
    with pytest.raises(FileExistsError):
        storage.replace("latest", b"5", version=version)

    assert storage.read("latest")[0] == b"4"
    assert storage.names("") == ["latest"]
    (said,) = [record.message for record in caplog.records if record.name == "async_ckpt"]
    return said
