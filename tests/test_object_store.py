"""Object stores: the memory of a segment is given back when it has been sent and not before, and what fails is sent again."""

from __future__ import annotations

import gc
import logging
import os
import random
import threading
import uuid

import pytest
from ceph import as_ceph, matches
from racing import PATIENCE, Call, until
from states import MIB, open_run, state_at

from async_ckpt import StorageUnavailableError
from async_ckpt.storage import stores
from async_ckpt.storage.s3 import aws
from async_ckpt.storage.s3.store import ObjectStorage

SEGMENT = 5 * MIB  # the smallest that is a part by itself


@pytest.fixture
def store(s3, bucket):
    return ObjectStorage(f"s3://{bucket}/run", s3.options)


@pytest.fixture
def far(s3, bucket, proxy):
    """The same bucket, by way of the proxy; obstore itself makes a request once again, and no more."""
    return behind(proxy, s3, bucket)


def behind(proxy, s3, bucket, **options) -> ObjectStorage:
    options = {"retry_config": {"max_retries": 1}, "deadline_seconds": 30.0} | options
    return ObjectStorage(f"s3://{bucket}/run", {**s3.options, "endpoint": proxy.endpoint, **options})


class Loan:
    """A segment on loan that knows whether it may be read."""

    def __init__(self, data: bytes) -> None:
        self.view = memoryview(bytearray(data))
        self.count = 1
        self._lock = threading.Lock()

    def retain(self) -> None:
        with self._lock:
            assert self.count > 0, "retained after it was given back"
            self.count += 1

    def release(self) -> None:
        with self._lock:
            self.count -= 1
            assert self.count >= 0, "released twice"
            back = self.count == 0
        if back:
            self.view[:] = bytes(len(self.view))  # whoever reads it now reads nothing of worth


class Archive:
    """An object in segments, each in memory that is wiped when it is given back."""

    def __init__(self, num_bytes: int, segment_bytes: int = SEGMENT) -> None:
        self.data = random.Random(num_bytes).randbytes(num_bytes)
        self.segment_bytes = segment_bytes
        starts = range(0, num_bytes, segment_bytes)
        self.loans = [Loan(self.data[at : at + segment_bytes]) for at in starts]

    def sink(self, storage, path="x.tar", **options):
        return storage.create(path, num_bytes=len(self.data), segment_bytes=self.segment_bytes, **options)

    def write(self, sink, number: int) -> None:
        """Lend a segment to the sink, and keep no part in it."""
        loan = self.loans[number]
        try:
            sink.write(number * self.segment_bytes, loan.view, loan)
        finally:
            loan.release()

    def write_all(self, sink) -> None:
        for number in range(len(self.loans)):
            self.write(sink, number)

    @property
    def lent(self) -> list[int]:
        return [number for number, loan in enumerate(self.loans) if loan.count]


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def uploads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "async_ckpt-upload"]


# --- archives --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_bytes", "segment_bytes"),
    [(1, SEGMENT), (SEGMENT, SEGMENT), (SEGMENT + 1, SEGMENT), (3 * SEGMENT - 7, SEGMENT), (7 * MIB, MIB)],
)
def test_an_object_of_any_size_arrives_as_it_was_written(store, s3, bucket, num_bytes, segment_bytes):
    archive = Archive(num_bytes, segment_bytes)
    sink = archive.sink(store)
    archive.write_all(sink)
    sink.finish()
    sink.close()

    assert store.read("x.tar")[0] == archive.data
    assert archive.lent == []
    assert s3.uploads(bucket) == []


def test_segments_written_by_many_threads_in_any_order_are_all_there(store):
    archive = Archive(16 * SEGMENT - 5)
    sink = archive.sink(store)
    order = random.Random(1).sample(range(16), 16)
    for call in [Call(lambda n=n: archive.write(sink, n)) for n in order]:
        call.outcome()
    sink.finish()

    assert store.read("x.tar")[0] == archive.data
    assert archive.lent == []


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
    until(lambda: sink._next == 3)  # two on their way, and one that waits for them
    until(lambda: proxy.count(kind="upload_part") == 2)
    asked_for = sink._next
    held.clear()
    sink.finish()

    assert asked_for == 3


def test_memory_that_is_needed_elsewhere_is_given_up_oldest_first(far, proxy):
    archive = Archive(4 * SEGMENT)
    sink = archive.sink(far)
    archive.write(sink, 0)
    archive.write(sink, 1)
    until(lambda: sink._next == 2 and proxy.count(kind="upload_part", where=lambda r: r.status == 200) == 2)
    until(lambda: not any(piece.num_views for piece in sink._pieces.values()))
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


def test_an_object_is_not_there_before_it_is_finished(store):
    archive = Archive(2 * SEGMENT)
    sink = archive.sink(store)
    archive.write_all(sink)
    until(lambda: sink._next == 2)
    early = store.names("")
    sink.finish()

    assert early == []
    assert store.names("") == ["x.tar"]


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
    with pytest.raises(StorageUnavailableError, match="given up"):
        sink.write(0, archive.loans[0].view, Loan(b"x"))


def test_an_abort_ends_an_upload_that_waits_for_a_segment(store, s3, bucket):
    archive = Archive(3 * SEGMENT)
    sink = archive.sink(store)
    archive.write(sink, 0)
    archive.write(sink, 2)
    until(lambda: sink._next == 1)
    sink.abort()

    assert archive.lent == [1]
    assert s3.uploads(bucket) == []
    assert uploads() == []


def test_an_abort_after_the_end_leaves_the_object(store):
    archive = Archive(100)
    sink = archive.sink(store)
    archive.write_all(sink)
    sink.finish()
    sink.abort()

    assert store.read("x.tar")[0] == archive.data


def test_an_object_that_lacks_segments_cannot_be_finished(store, s3, bucket):
    archive = Archive(3 * SEGMENT)
    sink = archive.sink(store)
    archive.write(sink, 0)
    archive.write(sink, 2)
    with pytest.raises(StorageUnavailableError, match="2 segments arrived of 3"):
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


def test_a_part_that_is_cut_five_times_is_sent_again_by_itself(s3, bucket, proxy):
    far = behind(proxy, s3, bucket, retry_config={"max_retries": 10})
    fault = proxy.cut_request(MIB, times=5, target=r"partNumber=3&")
    archive = Archive(4 * SEGMENT)
    sink = archive.sink(far)
    archive.write_all(sink)
    sink.finish()

    assert fault.hits == 5
    assert sink.num_retries == 0
    assert proxy.count(kind="create_multipart_upload") == 1
    assert far.read("x.tar")[0] == archive.data


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


def write_and_finish(archive: Archive, sink) -> None:
    """Every loan ends, however far the sink takes them."""
    try:
        archive.write_all(sink)
        sink.finish()
    finally:
        for loan in archive.loans:
            if loan.count and sink._over and not sink._pieces:
                loan.release()


def test_a_store_that_is_away_for_the_whole_deadline_is_an_error(s3, bucket, proxy):
    far = behind(proxy, s3, bucket, deadline_seconds=1.0)
    fault = proxy.refuse()
    archive = Archive(2 * SEGMENT)
    sink = archive.sink(far)
    with pytest.raises(StorageUnavailableError, match=r"no answer.*see that the store is up"):
        write_and_finish(archive, sink)
    sink.abort()
    fault.clear()

    assert archive.lent == []
    assert s3.keys(bucket) == []
    assert far.names("") == []  # and it is back


def test_a_store_that_never_answers_is_an_error_in_time(s3, bucket, proxy):
    far = behind(proxy, s3, bucket, deadline_seconds=1.0)
    proxy.black_hole(kind="upload_part")
    archive = Archive(2 * SEGMENT)
    sink = archive.sink(far)
    with pytest.raises(StorageUnavailableError, match="no answer"):
        write_and_finish(archive, sink)
    proxy.clear()
    sink.abort()

    assert archive.lent == []
    assert s3.uploads(bucket) == []


def test_an_upload_whose_memory_was_needed_elsewhere_is_not_sent_again(far, proxy, s3, bucket):
    archive = Archive(3 * SEGMENT)
    sink = archive.sink(far)
    archive.write(sink, 0)
    archive.write(sink, 1)
    until(lambda: sink.relieve() or not sink.retryable)  # at once, or as soon as one has been sent
    fault = proxy.answer("SlowDown", kind="complete_multipart_upload")
    archive.write(sink, 2)
    with pytest.raises(StorageUnavailableError, match=r"503 SlowDown.*memory was needed elsewhere"):
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
    with sink._changed:
        until(lambda: sink._next > 0 or not sink.relieve())  # between two attempts, or in one
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


@pytest.mark.parametrize("num_segments", [1, 2])
def test_an_object_that_is_acknowledged_and_lost_is_sent_again(far, proxy, num_segments):
    kind = "put_object" if num_segments == 1 else "complete_multipart_upload"
    fault = proxy.lose(kind=kind, times=1)
    archive = Archive(num_segments * SEGMENT)
    sink = archive.sink(far)
    archive.write_all(sink)
    sink.finish()

    assert fault.hits == 1
    assert sink.num_retries == 1
    assert far.read("x.tar")[0] == archive.data


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


def test_a_store_that_loses_everything_it_acknowledges_is_an_error(s3, bucket, proxy):
    far = behind(proxy, s3, bucket, deadline_seconds=1.0)
    proxy.lose(kind="put_object")
    archive = Archive(100)
    sink = archive.sink(far)
    with pytest.raises(StorageUnavailableError, match="acknowledged 100 bytes and lost them"):
        write_and_finish(archive, sink)
    sink.abort()

    assert archive.lent == []


# --- small objects ---------------------------------------------------------------------------------------------


def test_of_many_writers_of_one_new_object_one_wins(s3, bucket, store):
    stores = [store] + [ObjectStorage(f"s3://{bucket}/run", s3.options) for _ in range(3)]
    start = threading.Barrier(8)
    won = []

    def put(number: int) -> None:
        start.wait(PATIENCE)
        try:
            stores[number % 4].put_new("manifest.json", b"%d" % number)
        except FileExistsError:
            return
        won.append(number)

    for call in [Call(lambda n=n: put(n)) for n in range(8)]:
        call.outcome()

    assert len(won) == 1
    assert store.read("manifest.json")[0] == b"%d" % won[0]
    assert store.names("") == ["manifest.json"]  # and of the probes nothing is left


def test_a_commit_whose_answer_was_lost_is_our_own(far, proxy):
    far.put_new("first", b"the store is known to have conditions")
    fault = proxy.lose_response(times=1, kind="put_object")
    far.put_new("manifest.json", b"ours")

    assert fault.hits == 1
    assert far.read("manifest.json")[0] == b"ours"


def test_a_commit_that_another_writer_made_meanwhile_is_theirs(far, store, proxy):
    far.put_new("first", b"the store is known to have conditions")
    proxy.answer("SlowDown", times=1, kind="put_object")
    store.put_new("manifest.json", b"theirs")
    with pytest.raises(FileExistsError):
        far.put_new("manifest.json", b"ours")

    assert store.read("manifest.json")[0] == b"theirs"


def test_only_what_was_read_is_replaced(store):
    store.put_new("manifest.json", b"1")
    _, version = store.read("manifest.json")
    store.replace("manifest.json", b"2", version=version)
    with pytest.raises(FileExistsError):
        store.replace("manifest.json", b"3", version=version)
    store.delete("manifest.json")
    with pytest.raises(FileExistsError):
        store.replace("manifest.json", b"3", version=version)

    assert not store.exists("manifest.json")


@pytest.mark.parametrize("refuses", [True, False])
def test_a_store_without_conditions_is_found_out_and_said_once(s3, bucket, proxy, caplog, refuses):
    def conditional(request):
        return {"if-none-match", "if-match"} & set(request.headers)

    far = behind(proxy, s3, bucket)
    if refuses:
        proxy.answer("NotImplemented", status=501, kind="put_object", where=conditional)
    else:
        proxy.lose(kind="put_object", where=conditional)
    with caplog.at_level(logging.WARNING, "async_ckpt"):
        far.put_new("a", b"1")
        _, version = far.read("a")
        far.replace("a", b"2", version=version)
        with pytest.raises(FileExistsError):
            far.put_new("a", b"3")
        with pytest.raises(FileExistsError):
            far.replace("a", b"3", version=version)

    assert [record.message for record in caplog.records if "no conditional puts" in record.message] == [
        caplog.records[0].message
    ]
    assert far.read("a")[0] == b"2"
    assert far.names("") == ["a"]


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
        assert matches(proxy.requests[-1]) == version  # obstore sends what it is given


def test_a_writer_who_was_really_faster_teaches_nothing_about_the_store(far, store, proxy):
    as_ceph(proxy)
    far.put_new("latest", b"1")
    _, version = far.read("latest")
    store.replace("latest", b"theirs")
    with pytest.raises(FileExistsError):
        far.replace("latest", b"2", version=version)
    far.replace("latest", b"3", version=far.read("latest")[1])

    assert far.read("latest")[0] == b"3"


def test_a_store_that_refuses_every_put_over_a_version_is_found_out_and_said_once(far, proxy, caplog):
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
    (said,) = [record.message for record in caplog.records if record.name == "async_ckpt"]
    assert "refuses every put" in said


def test_the_tracker_moves_at_a_store_that_takes_e_tags_without_quotes_alone(s3, bucket, proxy):
    as_ceph(proxy)
    with open_run(f"s3://{bucket}/run", storage_options={**s3.options, "endpoint": proxy.endpoint}) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(state_at(step), step=step).result()
            assert s3.client.get_object(Bucket=bucket, Key="run/latest")["Body"].read() == (
                b"step_%08d\n" % step
            )
        ckpt.wait()
        assert ckpt.metrics()["cleanup_failures"] == 0


def test_a_listing_is_of_one_level_however_much_lies_below_and_beside(s3, bucket, store):
    for name in ("x", "step_1/a", "step_1/b", "step_2/deep/er", "step_10/a"):
        store.replace(name, b"1")
    for number in range(30):
        ObjectStorage(f"s3://{bucket}", s3.options).replace(f"run2/{number}", b"1")

    assert store.names("") == ["step_1", "step_10", "step_2", "x"]
    assert store.names("step_1") == ["a", "b"]
    assert store.names("step_2") == ["deep"]
    assert store.names("missing") == []
    assert ObjectStorage(f"s3://{bucket}", s3.options).names("") == ["run", "run2"]


def test_a_listing_of_many_pages_is_whole(s3, bucket, store):
    names = [f"{number:05}" for number in range(1050)]  # a page holds 1,000

    def put(some: list[str]) -> None:
        for name in some:
            store.replace(f"many/{name}", b"")

    for call in [Call(lambda n=n: put(names[n::8])) for n in range(8)]:
        call.outcome()

    assert store.names("many") == names


def test_existing_keeps_the_order_it_is_asked_in(store):
    for number in range(0, 40, 3):
        store.replace(f"{number}", b"1")
    asked = [str(number) for number in range(40)]
    random.Random(1).shuffle(asked)

    assert store.existing(asked) == [name for name in asked if int(name) % 3 == 0]
    assert store.existing([]) == []


def test_a_request_that_fails_is_made_again(far, proxy):
    far.replace("a", b"1")
    for kind in ("get_object", "head_object", "list_objects", "put_object", "delete_object"):
        proxy.answer("SlowDown", times=1, kind=kind)
    far.replace("b", b"2")
    results = far.read("a")[0], far.exists("a"), far.names("")
    far.delete("a")

    assert results == (b"1", True, ["a", "b"])
    assert far.names("") == ["b"]


# --- reading ---------------------------------------------------------------------------------------------------


def test_ranges_come_straight_into_place(store):
    data = os.urandom(3 * MIB)
    store.replace("x", data)
    with store.open("x") as reader:
        for begin, end in [(0, 1), (5, 5), (1000, 2 * MIB + 7), (0, 3 * MIB), (3 * MIB - 1, 3 * MIB)]:
            target = bytearray(end - begin)
            reader.read_into(begin, memoryview(target))
            assert target == data[begin:end]
        with pytest.raises(EOFError):
            reader.read_into(3 * MIB - 1, memoryview(bytearray(2)))

    assert reader.num_bytes == 3 * MIB


def test_an_object_that_was_replaced_is_not_read_on(store):
    store.replace("x", b"1" * 100)
    reader = store.open("x")
    store.replace("x", b"2" * 100)
    with pytest.raises(StorageUnavailableError, match="was replaced while it was being read; load it again"):
        reader.read_into(0, memoryview(bytearray(100)))


def test_a_read_that_is_cut_is_made_again(far, proxy):
    data = os.urandom(MIB)
    far.replace("x", data)
    reader = far.open("x")
    fault = proxy.cut_response(1000, times=2, kind="get_object")
    target = bytearray(MIB)
    reader.read_into(0, memoryview(target))

    assert fault.hits == 2
    assert target == data


def test_a_missing_object_cannot_be_opened(store):
    for call in (store.open, store.read):
        with pytest.raises(FileNotFoundError):
            call("missing")


# --- what dead writers left ------------------------------------------------------------------------------------


def test_only_what_is_old_by_the_stores_clock_is_swept(store, monkeypatch):
    store.replace("folder/a", b"1")
    young = store.sweep("folder", ["a"], delete=True, decided=True)
    monkeypatch.setattr(stores, "ORPHAN_SECONDS", -10.0)  # all is older than ten seconds from now
    undecided = store.sweep("folder", ["a"], delete=True, decided=False)
    left = store.sweep("folder", ["a", "gone"], decided=True)
    kept = store.exists("folder/a")
    deleted = store.sweep("folder", ["a"], delete=True, decided=True)

    assert (young, undecided, left, kept, deleted) == ([], [], ["a"], True, ["a"])
    assert store.names("") == []


# --- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    ["s3://", "s3:///prefix", "s3", "", "s3://u:topsecret@/x", "s3://b/a//b", "s3://b/../x", "ftp://b/x"],
)
def test_a_url_that_names_no_place_is_refused_when_it_is_given(url):
    with pytest.raises(ValueError, match=r"names no bucket|no object store|a key has no") as caught:
        ObjectStorage(url)
    assert "topsecret" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"nonsense": "1"}, "nonsense"),
        ({"client_options": {"nonsense": "1"}}, "nonsense"),
        ({"client_kwargs": {"nonsense": "1"}}, "nonsense"),
        ({"endpoint": "localhost:9000"}, "https://host:port"),
        ({"session_token": "t"}, "give both"),
    ],
)
def test_an_option_that_nobody_knows_is_named(options, named):
    with pytest.raises(ValueError, match=named):
        ObjectStorage("s3://bucket", options)


@pytest.mark.parametrize("scheme", ["gs", "az", "abfs"])
def test_other_clouds_are_reached_by_their_own_options(scheme):
    options = {"gs": {"skip_signature": True}}.get(scheme, {"account_name": "a", "skip_signature": True})
    storage = ObjectStorage(f"{scheme}://bucket/run", options)

    assert storage.locate("x") == f"{scheme}://bucket/run/x"


def test_making_a_storage_sends_no_request(s3, bucket, proxy):
    behind(proxy, s3, bucket).create("x", num_bytes=1, segment_bytes=SEGMENT)

    assert proxy.requests == []


def test_a_bucket_that_does_not_exist_is_an_error_everywhere(s3):
    options = {**s3.options, "deadline_seconds": 5.0}

    def fresh() -> ObjectStorage:
        return ObjectStorage("s3://no-such-bucket/run", options)

    def upload() -> None:
        archive = Archive(2 * SEGMENT)
        write_and_finish(archive, archive.sink(fresh()))

    calls = [
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
    ]
    for call in calls:
        with pytest.raises(StorageUnavailableError, match="the bucket does not exist; create it"):
            call()


@pytest.mark.parametrize(
    ("code", "status", "advice"),
    [
        ("AccessDenied", 403, "let these credentials"),
        ("RequestTimeTooSkewed", 403, "clock"),
        ("PermanentRedirect", 301, "another region"),
        ("AuthorizationHeaderMalformed", 400, "another region"),
        ("SignatureDoesNotMatch", 403, "check the access key"),
        ("ExpiredToken", 400, "log in again"),
    ],
)
def test_an_error_says_what_to_do(far, proxy, code, status, advice):
    proxy.answer(code, status=status)
    for call in (lambda: far.exists("x"), lambda: far.names(""), lambda: far.put_new("x", b"1")):
        with pytest.raises(StorageUnavailableError, match=advice):
            call()
    assert len(proxy.requests) <= 8  # it is not asked again what will not change


def test_a_key_that_is_too_long_is_refused_before_anything_is_sent(s3, bucket, proxy):
    far = behind(proxy, s3, bucket)
    with pytest.raises(StorageUnavailableError, match="stores take 1,024; shorten it"):
        far.create("ü" * 600, num_bytes=1, segment_bytes=SEGMENT)
    with pytest.raises(StorageUnavailableError, match="shorten it"):
        far.put_new("x" * 1025, b"1")

    assert proxy.requests == []


# --- credentials -----------------------------------------------------------------------------------------------


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """An environment that says nothing of stores."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return tmp_path


def keys_sent(proxy) -> list[str]:
    return [
        request.headers["authorization"].split("Credential=")[1].split("/")[0] for request in proxy.requests
    ]


@pytest.mark.parametrize("botocore", [True, False])
def test_keys_and_places_come_from_options_then_environment_then_files(
    bare, monkeypatch, proxy, bucket, botocore
):
    if not botocore:
        monkeypatch.setattr(aws, "_botocore_session", lambda: None)
    (bare / "config").write_text(f"[profile lab]\nregion = eu-north-1\nendpoint_url = {proxy.endpoint}\n")
    (bare / "credentials").write_text("[lab]\naws_access_key_id = of-file\naws_secret_access_key = s1\n")
    monkeypatch.setenv("AWS_PROFILE", "lab")
    ObjectStorage(f"s3://{bucket}").exists("x")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s2")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "t2")
    ObjectStorage(f"s3://{bucket}").exists("x")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    options = {"key": "of-options", "secret": "s3", "client_kwargs": {"endpoint_url": proxy.endpoint}}
    ObjectStorage(f"s3://{bucket}", options).exists("x")

    sent = [
        (key, "eu-north-1" in r.headers["authorization"])
        for key, r in zip(keys_sent(proxy), proxy.requests, strict=True)
    ]
    assert list(dict.fromkeys(sent)) == [("of-file", True), ("of-environment", True), ("of-options", True)]
    assert {r.headers.get("x-amz-security-token") for r in proxy.requests} == {None, "t2"}
    assert "x-amz-security-token" not in proxy.requests[-1].headers


def test_keys_that_ended_are_looked_up_again(bare, monkeypatch, proxy, s3, bucket):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "old-key-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "old")
    options = {"endpoint": proxy.endpoint, "retry_config": {"max_retries": 0}, "deadline_seconds": 30.0}
    far = ObjectStorage(f"s3://{bucket}/run", options)
    ended = proxy.answer(
        "ExpiredToken",
        status=400,
        where=lambda r: "old-key-id" in r.headers["authorization"],
        kind="upload_part",
    )
    archive = Archive(3 * SEGMENT)
    sink = archive.sink(far)
    archive.write_all(sink)
    ended.wait()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "new-key-id")
    sink.finish()

    assert sink.num_retries >= 1
    assert keys_sent(proxy)[-1] == "new-key-id"
    assert far.read("x.tar")[0] == archive.data


def test_without_keys_the_error_says_where_to_put_them(bare, proxy, bucket):
    far = ObjectStorage(f"s3://{bucket}", {"endpoint": proxy.endpoint, "deadline_seconds": 5.0})
    with pytest.raises(
        StorageUnavailableError, match="no credentials were found; give keys in storage_options"
    ):
        far.names("")

    assert proxy.requests == []


def test_no_secret_is_in_what_people_read(s3, bucket, proxy, caplog):
    secrets = ["the-access-key", "the-secret-key", "the-session-token"]
    options = dict(zip(("access_key_id", "secret_access_key", "session_token"), secrets, strict=True))
    far = ObjectStorage(
        f"s3://{bucket}/run", {"endpoint": proxy.endpoint, "deadline_seconds": 1.0, **options}
    )
    told = [
        repr(far),
        far.locate("x"),
        str(far.url),
        repr(far.create("x", num_bytes=1, segment_bytes=SEGMENT)),
    ]
    for code in ("SignatureDoesNotMatch", "AccessDenied", "SlowDown"):
        proxy.clear()
        proxy.answer(code)
        for call in (lambda: far.names(""), lambda: far.put_new("x", b"1")):
            with pytest.raises(StorageUnavailableError) as caught:
                call()
            error: BaseException | None = caught.value
            while error is not None:
                told += [str(error), repr(error), repr(vars(error))]
                error = error.__cause__ or error.__context__
    told.append(caplog.text)

    assert not [text for text in told for secret in secrets if secret in text]


def test_over_plain_http_to_another_host_the_payload_is_signed(bare):
    def unsigned(endpoint: str) -> bool:
        return ObjectStorage("s3://bucket", {"endpoint": endpoint})._client._aws.config[
            "aws_unsigned_payload"
        ]

    assert unsigned("https://store.example") is True
    assert unsigned("http://127.0.0.1:9000") is True
    assert unsigned("http://store.example") is False
