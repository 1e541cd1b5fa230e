"""Any URL through fsspec: objects appear whole, appended or in parts, and are read as they were."""

import os
import threading

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec_places import KINDS, NUMBERS, SEGMENT, Loan, cut, keeps_folders, s3fs_of, save, storage_for, write
from racing import Call
from states import MIB, names_below

from async_ckpt import StorageUnavailableError
from async_ckpt.core.storage.locks import TEMP_SUFFIX
from async_ckpt.stores.fsspec import file_tree
from async_ckpt.stores.fsspec.sinks import AppendingSink
from async_ckpt.stores.fsspec.store import FsspecStorage
from async_ckpt.stores.proven.client_facts import ClientFacts


@pytest.fixture
def bucket(s3, bucket):
    yield bucket
    assert s3.uploads(bucket) == []


@pytest.fixture(params=KINDS)
def storage(request, tmp_path):
    """One of each kind; every test must do for all of them."""
    return storage_for(request, tmp_path)


def read_back(storage, path: str) -> bytes:
    with storage.open(path) as reader:
        target = bytearray(reader.num_bytes)
        reader.read_into(0, memoryview(target))
    return bytes(target)


# --- one object -----------------------------------------------------------------------------------------------


def test_an_aborted_object_leaves_no_trace_and_holds_no_memory(storage):
    data = os.urandom(3 * SEGMENT)
    pieces = cut(data)
    sink = storage.create("new/x.tar", num_bytes=len(data), segment_bytes=SEGMENT)
    for offset, lease in (pieces[0], pieces[2]):
        write(sink, offset, lease)
    sink.abort()
    sink.abort()
    sink.close()

    assert storage.names("new") == []
    assert storage.names("") == (["new"] if keeps_folders(storage) else [])
    assert [lease.count for _, lease in pieces] == [0, 1, 0]
    with pytest.raises(StorageUnavailableError):
        sink.write(0, pieces[1][1].view, pieces[1][1])
    assert pieces[1][1].count == 1


def test_a_sink_that_was_never_written_to_has_asked_for_nothing(storage):
    sink = storage.create("new/x.tar", num_bytes=SEGMENT, segment_bytes=SEGMENT)
    sink.abort()

    assert storage.names("") == []


def test_an_object_that_lacks_a_segment_cannot_be_finished(storage):
    data = os.urandom(3 * SEGMENT)
    pieces = cut(data)
    sink = storage.create("x", num_bytes=len(data), segment_bytes=SEGMENT)
    for offset, lease in (pieces[0], pieces[2]):
        write(sink, offset, lease)
    with pytest.raises(StorageUnavailableError):
        sink.finish()
    sink.abort()

    assert storage.names("") == []
    assert [lease.count for _, lease in pieces] == [0, 1, 0]


# --- the appending sink ---------------------------------------------------------------------------------------


def test_a_segment_that_comes_early_is_held_and_nobody_waits_for_the_one_before():
    storage = FsspecStorage(f"memory://root-{next(NUMBERS)}")
    pieces = cut(bytes(range(4)), 1)
    sink = storage.create("x", num_bytes=4, segment_bytes=1)
    for offset, lease in reversed(pieces[1:]):
        write(sink, offset, lease)
    assert [lease.count for _, lease in pieces] == [1, 1, 1, 1]
    write(sink, *pieces[0])
    assert [lease.count for _, lease in pieces] == [0, 0, 0, 0]
    sink.finish()

    assert storage.in_order
    assert storage.read("x")[0] == bytes(range(4))


def test_a_write_that_fails_gives_everything_back_and_refuses_the_rest(monkeypatch):
    storage = FsspecStorage(f"memory://root-{next(NUMBERS)}")
    pieces = cut(bytes(range(4)), 1)
    sink = storage.create("x", num_bytes=4, segment_bytes=1)
    write(sink, *pieces[2])

    def fail(fs, name):
        raise ConnectionResetError("gone")

    monkeypatch.setattr(file_tree, "_open_uncommitted", fail)
    with pytest.raises(StorageUnavailableError, match="the store is up"):
        write(sink, *pieces[0])
    with pytest.raises(StorageUnavailableError):
        write(sink, *pieces[1])

    assert [lease.count for _, lease in pieces] == [0, 0, 0, 1]


def test_a_file_is_written_under_a_temp_name_that_the_local_disk_knows_too(tmp_path):
    storage = FsspecStorage(str(tmp_path), fs=LocalFileSystem())
    sink = storage.create("step/x.tar", num_bytes=2, segment_bytes=1)
    write(sink, 0, Loan(b"a"))
    [temp] = storage.names("step")
    sink.abort()

    assert temp.startswith(".x.tar.")
    assert temp.endswith(TEMP_SUFFIX)
    assert names_below(tmp_path) == []


@pytest.mark.parametrize("ends_well", [True, False])
def test_a_store_whose_file_objects_upload_shows_nothing_before_the_commit(s3, bucket, ends_well):
    """As for gcsfs and its like, by the file object of s3fs, which follows the same protocol."""
    fs = s3fs_of(s3)
    fs.default_block_size = SEGMENT
    tree = file_tree.FileTree(lambda: fs, f"{bucket}/run", "gcs", "gcs://run", ClientFacts(""))
    data = os.urandom(12 * MIB)
    translate = FsspecStorage("memory://unused")._translate_errors
    sink = AppendingSink(tree, f"{bucket}/run/x", len(data), "x", lambda: translate("x"))
    for offset, lease in cut(data):
        write(sink, offset, lease)
    assert s3.keys(bucket) == []
    if ends_well:
        sink.finish()
        assert tree.read(f"{bucket}/run/x")[0] == data
    sink.abort()
    del sink

    assert s3.keys(bucket) == (["run/x"] if ends_well else [])
    assert not tree._filesystem().transaction.files


# --- the multipart sink ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_bytes", "segment_bytes", "segments"),
    [
        (100 * SEGMENT, SEGMENT, 1),
        (100 * MIB, MIB, 5),
        (100 * MIB, 2 * MIB, 3),
        (3 * MIB, MIB, 3),
        (1, SEGMENT, 1),
        (20_001 * SEGMENT, SEGMENT, 3),
        (10_000 * SEGMENT, SEGMENT, 1),
    ],
)
def test_parts_are_what_s3_takes(num_bytes, segment_bytes, segments):
    storage = FsspecStorage("s3://bucket/run")

    assert storage.part_segments(num_bytes, segment_bytes) == segments
    assert not storage.in_order


@pytest.fixture
def through(s3, bucket, proxy):
    """A bucket behind the proxy."""
    return FsspecStorage(f"s3://{bucket}/run", {**s3.options, "endpoint": proxy.endpoint})


def test_small_objects_go_by_one_put_and_large_ones_by_parts_of_whole_segments(through, proxy):
    save(through, "small", os.urandom(3 * MIB), MIB)
    assert proxy.count(kind="put_object") == 1
    assert proxy.count(kind="create_multipart_upload") == 0

    save(through, "large", os.urandom(12 * MIB), MIB)
    assert proxy.count(kind="upload_part") == 3
    assert proxy.count(kind="complete_multipart_upload") == 1


def test_parts_go_at_the_same_time(through, proxy):
    fault = proxy.delay(None, kind="upload_part")
    pieces = cut(os.urandom(3 * SEGMENT))
    sink = through.create("x", num_bytes=3 * SEGMENT, segment_bytes=SEGMENT)
    calls = [Call(lambda piece=piece: write(sink, *piece)) for piece in pieces]
    deadline = threading.Event()
    while fault.hits < 3:
        assert not deadline.wait(0.002)
        assert all(call.is_alive() for call in calls)
    assert [lease.count for _, lease in pieces] == [2, 2, 2]  # not before the store has them
    fault.clear()
    for call in calls:
        call.outcome()
    sink.finish()

    assert [lease.count for _, lease in pieces] == [0, 0, 0]


def test_a_part_that_is_cut_on_its_way_is_sent_again(through, proxy):
    fault = proxy.cut_request(MIB, times=1, kind="upload_part")
    data = os.urandom(2 * SEGMENT + 5)
    save(through, "x", data)

    assert fault.hits == 1
    assert read_back(through, "x") == data


def test_a_refused_part_ends_the_upload_and_leaves_none_open(through, proxy, s3, bucket):
    proxy.answer("AccessDenied", target=r"partNumber=2\b")
    pieces = cut(os.urandom(3 * SEGMENT))
    sink = through.create("x", num_bytes=3 * SEGMENT, segment_bytes=SEGMENT)
    write(sink, *pieces[0])
    assert s3.uploads(bucket) == ["run/x"]
    with pytest.raises(StorageUnavailableError, match="get, put, delete and list"):
        write(sink, *pieces[1])
    with pytest.raises(StorageUnavailableError):
        write(sink, *pieces[2])
    sink.abort()

    assert [lease.count for _, lease in pieces] == [0, 0, 0]
    assert s3.uploads(bucket) == []
    assert s3.keys(bucket) == []


@pytest.mark.parametrize(("num_bytes", "kind"), [(MIB, "put_object"), (2 * SEGMENT, "complete_multipart_upload")])
def test_an_object_that_was_acknowledged_and_lost_is_found_missing(through, proxy, num_bytes, kind):
    proxy.lose(kind=kind)
    sink = through.create("x", num_bytes=num_bytes, segment_bytes=SEGMENT)
    for offset, lease in cut(os.urandom(num_bytes)):
        write(sink, offset, lease)
    with pytest.raises(StorageUnavailableError, match="bytes but has"):
        sink.finish()
    sink.abort()

    assert not through.exists("x")


def test_a_completion_whose_answer_is_lost_is_known_by_its_e_tag(through, proxy):
    fault = proxy.lose_response(times=1, kind="complete_multipart_upload")
    data = os.urandom(2 * SEGMENT)
    save(through, "x", data)

    assert fault.hits == 1
    assert read_back(through, "x") == data


def test_a_store_that_never_answers_ends_at_the_deadline(s3, bucket, proxy):
    storage = FsspecStorage(f"s3://{bucket}/run", {**s3.options, "endpoint": proxy.endpoint, "deadline_seconds": 4})
    proxy.black_hole(kind="upload_part")
    piece, *_ = cut(os.urandom(2 * SEGMENT))
    sink = storage.create("x", num_bytes=2 * SEGMENT, segment_bytes=SEGMENT)
    with pytest.raises(StorageUnavailableError, match="reachable from this host"):
        write(sink, *piece)
    sink.abort()

    assert piece[1].count == 0


# --- reading --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["replaced", "deleted"])
def test_an_object_that_changes_while_it_is_read_is_refused(storage, what):
    storage.put_new("x", b"old!")
    with storage.open("x") as reader:
        if what == "replaced":
            storage.replace("x", b"new!!")
        else:
            storage.delete("x")
        with pytest.raises(StorageUnavailableError, match="load it again"):
            reader.read_into(0, memoryview(bytearray(4)))
