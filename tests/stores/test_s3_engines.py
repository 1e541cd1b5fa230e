"""What both clients of S3 do alike: obstore, and s3fs by fsspec."""

import pytest
from buckets import ENGINES
from fsspec_places import SEGMENT, cut, write
from loans import behind
from states import open_run, state_at

from async_ckpt import Place, StorageUnavailableError
from async_ckpt.stores.fsspec.store import FsspecStorage
from async_ckpt.stores.s3.store import ObjectStorage


@pytest.fixture(params=ENGINES)
def engine(request):
    return request.param


@pytest.fixture
def far(engine, s3, bucket, proxy):
    """A storage behind the proxy."""
    if engine == "obstore":
        return behind(proxy, s3, bucket)
    return FsspecStorage(f"s3://{bucket}/run", {**s3.options, "endpoint": proxy.endpoint})


def matches(request) -> str:
    """What the condition of a put names, as it was sent."""
    return request.headers.get("if-match", "")


def as_ceph(proxy):
    """Ceph's gateway compares the e-tag with the header as it is, and so takes it without quotes alone."""
    return proxy.answer("PreconditionFailed", kind="put_object", where=lambda request: matches(request).startswith('"'))


def told(caplog) -> str:
    """The one message of the library."""
    (said,) = [record.message for record in caplog.records if record.name == "async_ckpt"]
    return said


# --- requests -------------------------------------------------------------------------------------------------


def test_many_objects_are_deleted_by_one_request_where_the_store_knows_such(far, proxy):
    names = [f"folder/{number}" for number in range(20)]
    for is_refused in (False, True, True):
        if is_refused:
            proxy.answer("NotImplemented", status=501, kind="delete_objects")
        for name in names:
            far.replace(name, b"1")
        before = proxy.count(kind="delete_object")
        far.delete_many(names)
        assert far.names("") == []
        assert proxy.count(kind="delete_object") - before == (20 if is_refused else 0)

    assert proxy.count(kind="delete_objects") == 2  # a store that has refused it is not asked again


def test_a_new_object_whose_answer_is_lost_is_our_own(far, proxy):
    far.put_new("first", b"the store is known to have conditions")
    fault = proxy.lose_response(times=1, kind="put_object")
    far.put_new("manifest.json", b"ours")

    assert fault.hits == 1
    assert far.read("manifest.json")[0] == b"ours"
    with pytest.raises(FileExistsError):
        far.put_new("manifest.json", b"ours")


def test_an_object_whose_body_breaks_off_is_read_again(far, proxy):
    data = bytes(range(256)) * 4096
    far.replace("x", data)
    fault = proxy.cut_response(100_000, times=2, kind="get_object")
    target = bytearray(len(data))
    with far.open("x") as reader:
        reader.read_into(0, memoryview(target))

    assert fault.hits == 2
    assert target == data


# --- conditions -----------------------------------------------------------------------------------------------


def test_a_store_that_takes_e_tags_without_quotes_alone_replaces_what_was_read_and_nothing_else(far, proxy):
    fault = as_ceph(proxy)
    far.put_new("latest", b"1")
    _, version = far.read("latest")
    far.replace("latest", b"2", version=version)
    assert far.read("latest")[0] == b"2"
    with pytest.raises(FileExistsError):
        far.replace("latest", b"3", version=version)
    assert far.read("latest")[0] == b"2"

    # What was found out is remembered: from now on one request is enough.
    hits, num_requests = fault.hits, len(proxy.requests)
    for number in range(3, 6):
        far.replace("latest", b"%d" % number, version=far.read("latest")[1])
    assert far.read("latest")[0] == b"5"
    assert fault.hits == hits
    assert len(proxy.requests) == num_requests + 2 * 3 + 1
    assert far.names("") == ["latest"]


def test_a_store_that_takes_e_tags_as_it_gives_them_is_asked_nothing_more(far, proxy):
    far.put_new("latest", b"1")
    for number in range(2, 5):
        _, version = far.read("latest")
        num_requests = len(proxy.requests)
        far.replace("latest", b"%d" % number, version=version)
        assert len(proxy.requests) == num_requests + 1
        assert matches(proxy.requests[-1]) == version


def test_a_store_that_refuses_every_put_over_a_version_is_found_out_and_told_once(far, proxy, caplog):
    """The object is replaced all the same."""
    proxy.answer("PreconditionFailed", kind="put_object", where=matches)
    far.put_new("latest", b"1")
    with pytest.raises(FileExistsError):  # this condition it obeys
        far.put_new("latest", b"2")
    for number in range(2, 5):
        far.replace("latest", b"%d" % number, version=(version := far.read("latest")[1]))
    with pytest.raises(FileExistsError):
        far.replace("latest", b"5", version=version)

    assert far.read("latest")[0] == b"4"
    assert far.names("") == ["latest"]
    assert "refuses every put" in told(caplog) or "puts that replace one version only" in told(caplog)


def test_a_writer_who_was_really_faster_teaches_nothing_about_the_store(far, s3, bucket, proxy):
    as_ceph(proxy)
    far.put_new("latest", b"1")
    _, version = far.read("latest")
    ObjectStorage(f"s3://{bucket}/run", s3.options).replace("latest", b"theirs")
    with pytest.raises(FileExistsError):
        far.replace("latest", b"2", version=version)
    far.replace("latest", b"3", version=far.read("latest")[1])

    assert far.read("latest")[0] == b"3"


def test_the_tracker_moves_at_a_store_that_takes_e_tags_without_quotes_alone(engine, s3, bucket, proxy):
    as_ceph(proxy)
    options = {**s3.options, "endpoint": proxy.endpoint}
    with open_run(Place(f"s3://{bucket}/run", options=options, engine=engine)) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(state_at(step), step=step).result()
            assert s3.client.get_object(Bucket=bucket, Key="run/latest")["Body"].read() == (b"step_%08d\n" % step)
        ckpt.wait()
        assert ckpt.metrics()["cleanup_failures"] == 0


# --- errors ---------------------------------------------------------------------------------------------------


def test_a_bucket_that_does_not_exist_is_an_error_everywhere(engine, s3):
    options = {**s3.options, "deadline_seconds": 5.0}

    def fresh():
        return {"obstore": ObjectStorage, "s3fs": FsspecStorage}[engine]("s3://no-such-bucket/run", options)

    def upload():
        sink = fresh().create("x", num_bytes=2 * SEGMENT, segment_bytes=SEGMENT)
        for offset, lease in cut(bytes(2 * SEGMENT)):
            write(sink, offset, lease)
        sink.finish()

    for call in (
        lambda: fresh().names(""),
        lambda: fresh().exists("x"),
        lambda: fresh().existing(["x", "y"]),
        lambda: fresh().read("x"),
        lambda: fresh().open("x"),
        lambda: fresh().put_new("x", b"1"),
        lambda: fresh().replace("x", b"1"),
        lambda: fresh().replace("x", b"1", version='"e"'),
        lambda: fresh().delete("x"),
        lambda: fresh().move("x", "y"),
        upload,
    ):
        with pytest.raises(StorageUnavailableError, match=r"bucket.* does not exist; create it"):
            call()
    assert fresh().sweep("", ["x"], decided=True) == []


def test_a_key_that_is_too_long_is_refused_before_anything_is_sent(far, proxy):
    for key in ("ü" * 600, "x" * 1025):
        with pytest.raises(StorageUnavailableError, match=r"1,024.*; shorten it"):
            far.put_new(key, b"1")
    with pytest.raises(StorageUnavailableError, match=r"1,024.*; shorten it"):
        far.create("ü" * 600, num_bytes=1, segment_bytes=SEGMENT)

    assert proxy.requests == []
