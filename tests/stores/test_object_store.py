"""Object stores: the memory of a segment is given back when it has been sent and not before, and what fails is sent again."""

import gc
import os
import threading
import uuid

import pytest
from loans import SEGMENT, Archive, Loan, behind, write_and_finish
from racing import Call, until
from states import MIB

from async_ckpt import StorageUnavailableError
from async_ckpt.stores.s3.store import ObjectStorage


@pytest.fixture
def store(s3, bucket):
    return ObjectStorage(f"s3://{bucket}/run", s3.options)


@pytest.fixture
def far(s3, bucket, proxy):
    """The same bucket, by way of the proxy; obstore itself makes a request once again, and no more."""
    return behind(proxy, s3, bucket)


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def uploads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "async_ckpt-upload"]


# --- archives --------------------------------------------------------------------------------------------------


def test_a_part_is_as_many_whole_segments_as_the_store_asks_for(s3, bucket, proxy):
    far = behind(proxy, s3, bucket)
    archive = Archive(15 * MIB, 2 * MIB)
    sink = archive.sink(far)
    archive.write_all(sink)
    sink.finish()
    sizes = sorted(request.num_bytes for request in proxy.requests if request.kind == "upload_part")

    assert far.part_segments(len(archive.data), 2 * MIB) == 3
    assert sizes == [3 * MIB, 6 * MIB, 6 * MIB]
    assert far.read("x.tar")[0] == archive.data


@pytest.mark.parametrize(
    ("num_bytes", "segment_bytes", "num_segments"),
    [
        (1, 32 * MIB, 1),
        (10_000 * 32 * MIB, 32 * MIB, 1),
        (10_000 * 32 * MIB + 1, 32 * MIB, 2),
        (100 * MIB, 4 * MIB, 2),
        (4 * MIB, 4 * MIB, 1),
    ],
)
def test_ten_thousand_parts_are_enough_for_any_object(store, num_bytes, segment_bytes, num_segments):
    assert store.part_segments(num_bytes, segment_bytes) == num_segments


def test_an_object_of_one_part_goes_by_one_put(far, proxy):
    archive = Archive(1000)
    sink = archive.sink(far)
    archive.write_all(sink)
    sink.finish()

    assert proxy.count(kind="put_object") == 1
    assert proxy.count(kind="create_multipart_upload") == 0


def test_memory_is_not_given_back_while_its_part_is_being_sent(far, proxy):
    held = proxy.delay(None, target=r"partNumber=1&")
    archive = Archive(3 * SEGMENT)
    sink = archive.sink(far, max_segments=3)
    archive.write_all(sink)
    held.wait()
    relieved = [sink.relieve() for _ in range(3)]
    lent = archive.lent
    held.clear()
    sink.finish()

    assert 0 in lent
    assert relieved.count(True) == 3 - len(lent)
    assert far.read("x.tar")[0] == archive.data  # memory that is given back is wiped
    assert archive.lent == []


def test_no_more_parts_are_on_their_way_than_the_memory_is_for(far, proxy):
    held = proxy.delay(None, kind="upload_part")
    archive = Archive(6 * SEGMENT)
    sink = archive.sink(far, max_segments=3)
    archive.write_all(sink)
    held.wait()
    until(lambda: sink._segments.next == 3)  # two on their way, and one that waits for them
    until(lambda: proxy.count(kind="upload_part") == 2)
    asked_for = sink._segments.next
    held.clear()
    sink.finish()

    assert asked_for == 3


def test_memory_that_is_needed_elsewhere_is_given_up_oldest_first(far, proxy):
    archive = Archive(4 * SEGMENT)
    sink = archive.sink(far)
    archive.write(sink, 0)
    archive.write(sink, 1)
    until(lambda: sink._segments.next == 2 and proxy.count(kind="upload_part", where=lambda r: r.status == 200) == 2)
    until(lambda: not any(piece.num_views for piece in sink._segments.lent.values()))
    kept = sink.retryable, archive.lent
    first = sink.relieve(), archive.lent, sink.retryable
    rest = sink.relieve(), sink.relieve(), archive.lent
    archive.write(sink, 2)
    archive.write(sink, 3)
    sink.finish()

    assert kept == (True, [0, 1, 2, 3])
    assert first == (True, [1, 2, 3], False)
    assert rest == (True, False, [2, 3])
    assert far.read("x.tar")[0] == archive.data


@pytest.mark.parametrize("num_written", [0, 1, 2, 3])
def test_an_aborted_object_leaves_no_trace(store, s3, bucket, num_written):
    archive = Archive(3 * SEGMENT)
    sink = archive.sink(store)
    for number in range(num_written):
        archive.write(sink, number)
    sink.abort()
    sink.abort()
    sink.close()

    assert s3.keys(bucket) == []
    assert s3.uploads(bucket) == []
    assert archive.lent == list(range(num_written, 3))
    with pytest.raises(StorageUnavailableError, match="abandoned"):
        sink.write(0, archive.loans[0].view, Loan(b"x"))


def test_an_abort_ends_an_upload_that_waits_for_a_segment(store, s3, bucket):
    archive = Archive(3 * SEGMENT)
    sink = archive.sink(store)
    archive.write(sink, 0)
    archive.write(sink, 2)
    until(lambda: sink._segments.next == 1)
    sink.abort()

    assert archive.lent == [1]
    assert s3.uploads(bucket) == []
    assert uploads() == []


def test_an_object_that_lacks_segments_cannot_be_finished(store, s3, bucket):
    archive = Archive(3 * SEGMENT)
    sink = archive.sink(store)
    archive.write(sink, 0)
    archive.write(sink, 2)
    with pytest.raises(StorageUnavailableError, match="only 2 of 3 segments were written"):
        sink.finish()

    assert archive.lent == [1]
    assert (s3.keys(bucket), s3.uploads(bucket)) == ([], [])


def test_threads_and_descriptors_do_not_pile_up(store):
    for path in ("warm", "up"):
        sink = (archive := Archive(2 * SEGMENT)).sink(store, path)
        archive.write_all(sink)
        sink.finish()
    gc.collect()
    before = num_open(), len(os.listdir("/proc/self/task"))
    for number in range(50):
        sink = (archive := Archive(1 + SEGMENT * (number % 2))).sink(store, f"x{number}")
        archive.write_all(sink)
        (sink.finish if number % 3 else sink.abort)()
    gc.collect()
    after = num_open(), len(os.listdir("/proc/self/task"))

    assert uploads() == []
    assert after[0] <= before[0] + 2  # connections in the pool
    assert after[1] <= before[1] + 2


# --- when the store is away ------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["SlowDown", "InternalError"])
def test_an_upload_that_failed_is_sent_again_as_a_whole(far, proxy, s3, bucket, code):
    fault = proxy.answer(code, times=4, target=r"partNumber=2&")
    archive = Archive(4 * SEGMENT)
    sink = archive.sink(far)
    archive.write_all(sink)
    sink.finish()

    assert fault.hits == 4
    assert sink.num_retries == 2
    assert sink.retryable
    assert far.read("x.tar")[0] == archive.data
    assert s3.uploads(bucket) == []
    assert archive.lent == []


def test_an_answer_that_is_lost_is_asked_for_again(far, proxy, s3, bucket):
    fault = proxy.lose_response(times=2, kind="complete_multipart_upload")
    archive = Archive(2 * SEGMENT)
    sink = archive.sink(far)
    archive.write_all(sink)
    sink.finish()

    assert fault.hits == 2
    assert far.read("x.tar")[0] == archive.data
    assert s3.uploads(bucket) == []


@pytest.mark.parametrize("kind", ["create_multipart_upload", "upload_part", "complete_multipart_upload"])
def test_a_refusal_that_will_not_change_ends_the_upload_at_once(far, proxy, s3, bucket, kind):
    fault = proxy.answer("AccessDenied", kind=kind)
    archive = Archive(3 * SEGMENT)
    sink = archive.sink(far)
    with pytest.raises(StorageUnavailableError, match=r"403 AccessDenied.*let these credentials"):
        write_and_finish(archive, sink)
    lent = archive.lent
    sink.abort()

    assert fault.hits <= 3  # parts that were on their way together
    assert sink.num_retries == 0
    assert lent == []
    assert (s3.keys(bucket), s3.uploads(bucket)) == ([], [])


def test_a_store_in_trouble_is_given_time_between_two_tries(s3, bucket, proxy):
    far = behind(proxy, s3, bucket, retry_config={"max_retries": 0})
    fault = proxy.answer("SlowDown", kind="put_object", times=3)
    archive = Archive(SEGMENT)
    write_and_finish(archive, archive.sink(far))

    assert fault.hits == 3
    assert far._client.timer.skipped > 0.0


def test_an_upload_whose_memory_was_needed_elsewhere_is_not_sent_again(far, proxy, s3, bucket):
    archive = Archive(3 * SEGMENT)
    sink = archive.sink(far)
    archive.write(sink, 0)
    archive.write(sink, 1)
    until(lambda: sink.relieve() or not sink.retryable)  # at once, or as soon as one has been sent
    fault = proxy.answer("SlowDown", kind="complete_multipart_upload")
    archive.write(sink, 2)
    with pytest.raises(StorageUnavailableError, match=r"503 SlowDown.*another save needed the memory"):
        sink.finish()
    sink.abort()

    assert fault.hits == 2  # obstore makes a request once again by itself
    assert not sink.retryable
    assert archive.lent == []
    assert (s3.keys(bucket), s3.uploads(bucket)) == ([], [])


def test_memory_is_not_given_up_while_an_upload_waits_to_be_sent_again(far, proxy):
    fault = proxy.answer("SlowDown", kind="upload_part")
    archive = Archive(2 * SEGMENT)
    sink = archive.sink(far)
    archive.write_all(sink)
    call = Call(sink.finish)
    until(lambda: sink.num_retries > 0)
    with sink._segments.changed:
        until(lambda: sink._segments.next > 0 or not sink.relieve())  # between two attempts, or in one
        kept = sink.retryable
    fault.clear()
    call.outcome()

    assert kept
    assert far.read("x.tar")[0] == archive.data


def test_an_abort_ends_the_wait_for_the_next_attempt(s3, bucket, proxy):
    far = behind(proxy, s3, bucket, deadline_seconds=10_000.0)
    proxy.answer("SlowDown", kind="create_multipart_upload")
    archive = Archive(2 * SEGMENT)
    sink = archive.sink(far)
    archive.write_all(sink)
    until(lambda: sink.num_retries > 1)
    sink.abort()

    assert uploads() == []
    assert archive.lent == []


def test_an_older_object_is_not_taken_for_what_was_lost(far, store, proxy):
    older = Archive(2 * SEGMENT)
    older.data = bytes(2 * SEGMENT)
    write_and_finish(older, older.sink(store))
    fault = proxy.lose(kind="complete_multipart_upload", times=1)
    archive = Archive(2 * SEGMENT)
    sink = archive.sink(far)
    write_and_finish(archive, sink)

    assert fault.hits == 1
    assert sink.num_retries == 1
    assert far.read("x.tar")[0] == archive.data


@pytest.mark.parametrize("num_bytes", [100, 3 * SEGMENT - 7])
def test_a_server_that_changes_its_e_tags_is_written_to_as_well(rclone, num_bytes):
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    rclone.make_bucket(bucket)
    archive = Archive(num_bytes)
    sink = archive.sink(ObjectStorage(f"s3://{bucket}/run", rclone.options))
    write_and_finish(archive, sink)

    assert sink.num_retries == 0
    assert ObjectStorage(f"s3://{bucket}/run", rclone.options).read("x.tar")[0] == archive.data
