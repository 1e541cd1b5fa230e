"""Versions that a publisher lends in memory to the processes of its host: what they get, and what nobody loses by it."""

import ctypes
import errno
import gc
import itertools
import logging
import mmap
import os
import resource
import signal
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from exported import assert_same, state_of, weights_in
from lent import Copy, memory_of_others, weights
from published import files_below
from racing import PATIENCE, Call, until
from slices import ALL, some

from async_ckpt import (
    ClosedError,
    NotCommittedError,
    Place,
    Publisher,
    StateMismatchError,
    StepExistsError,
    StorageUnavailableError,
    Subscriber,
    snapshot,
)
from async_ckpt.core.host import shared_memory
from async_ckpt.core.host.shared_memory import CAN_SHARE
from async_ckpt.core.storage.local import LocalStorage
from async_ckpt.weights.lent import dump_lent, parse_lent
from async_ckpt.weights.publishing.in_memory import fd_passing
from async_ckpt.weights.publishing.publication import Publication
from async_ckpt.weights.publishing.versions import token_of_owner

pytestmark = pytest.mark.skipif(not CAN_SHARE, reason="no memory here can be handed to other processes")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "weights"


@pytest.fixture
def publisher(root):
    with Publisher(root, local=True, on_rollback="retire") as made:
        yield made


@pytest.fixture
def subscriber(root):
    with Subscriber(root) as made:
        yield made


def publish(publisher: Publisher, *versions: int) -> None:
    for version in versions:
        publisher.publish(weights(version), version).result()


def pulled(subscriber: Subscriber, version: int | None = None, *, from_memory: bool) -> int:
    """Pull into a new module, which has every bit of the version that the report names. Returns that."""
    copy = Copy()
    report = subscriber.pull(copy, version)
    assert copy.is_version(report.version)
    assert report.from_memory is from_memory
    return report.version


@pytest.fixture
def hold(monkeypatch):
    """Called, it holds versions back from becoming durable, until the event that it returns is set."""
    goes_on = threading.Event()
    goes_on.set()
    commit = Publication._commit

    def late(self: Publication) -> None:
        assert goes_on.wait(PATIENCE)
        commit(self)

    def begin() -> threading.Event:
        goes_on.clear()
        return goes_on

    monkeypatch.setattr(Publication, "_commit", late)
    yield begin
    goes_on.set()


# --- what a reader gets -------------------------------------------------------------------------------------------


def test_a_module_gets_a_version_from_memory_before_it_is_durable(publisher, subscriber, hold):
    goes_on = hold()
    handle = publisher.publish(weights(1), 1)
    publisher.wait_readable(1, timeout=PATIENCE)
    copy = Copy()
    report = subscriber.pull(copy)

    assert not handle.done()
    assert (report.version, report.base, report.num_versions, report.from_memory) == (1, None, 1, True)
    assert report.num_bytes == sum(tensor.nbytes for tensor in weights(1).values())
    assert "version 1 from memory: " in str(report)
    assert report.as_dict()["from_memory"] == 1.0
    assert copy.is_version(1)
    assert (subscriber.versions(), subscriber.latest(), publisher.versions()) == ([1], 1, [])
    goes_on.set()
    assert handle.result().status == "committed"
    publisher.close()
    assert pulled(subscriber, from_memory=False) == 1


def test_an_earlier_version_comes_from_the_root(publisher, subscriber):
    publish(publisher, 1, 2)

    assert pulled(subscriber, 1, from_memory=False) == 1
    assert pulled(subscriber, 2, from_memory=True) == 2
    with pytest.raises(NotCommittedError, match="version 3 does not exist; there are 1 to 2"):
        subscriber.pull(Copy(), 3)


def test_a_snapshot_is_lent_where_it_lies_and_a_part_of_one_is_copied(publisher, subscriber, monkeypatch):
    copied = []
    real = type(publisher._offer)._copied
    monkeypatch.setattr(type(publisher._offer), "_copied", lambda *a: (copied.append(sorted(a[1])), real(*a))[1])
    for version, more in enumerate([{}, {"optimizer": {"exp_avg": torch.ones(10**5)}}], start=1):
        with snapshot({"model": weights(version), **more}) as snap:
            publisher.publish(snap["model"], version).result()
        assert pulled(subscriber, from_memory=True) == version

    assert copied == [sorted(weights(2))]


def test_what_is_not_dense_or_has_no_bytes_is_lent_too(root):
    odd = {
        "turned": torch.arange(12.0).view(3, 4).T,
        "none": torch.zeros(0, 3),
        "one": torch.tensor(7, dtype=torch.int64),
        "tied": torch.ones(4),
    }
    odd["tied.too"] = odd["tied"]
    with Publisher(root, local=True) as publisher, Subscriber(root) as subscriber:
        publisher.publish(odd, 1).result()
        report = subscriber.pull(root.parent / "local")
    assert report.from_memory
    found = weights_in(root.parent / "local")
    assert_same(found, {name: odd[name].contiguous() for name in found})


def test_a_folder_gets_a_version_from_memory_and_deltas_from_the_root_follow(tmp_path, root, subscriber):
    config, local, whole = tmp_path / "config", tmp_path / "local", tmp_path / "whole"
    config.mkdir()
    (config / "config.json").write_text("{}")
    (config / "tokenizer.json").write_bytes(b"words" * 1000)
    with Publisher(root, local=True) as publisher:
        publisher.publish(weights(1), 1, config).result()
        report = subscriber.pull(local)
        assert (report.num_versions, report.from_memory) == (1, True)
        assert_same(weights_in(local), weights(1))
        assert subscriber.pull(local).num_versions == 0
        publisher.publish(weights(2), 2).result()
    report = subscriber.pull(local)
    assert (report.base, report.num_versions, report.from_memory) == (1, 1, False)
    assert_same(weights_in(local), weights(2))
    subscriber.pull(whole)
    assert files_below(local).keys() == files_below(whole).keys()
    assert (local / "tokenizer.json").read_bytes() == b"words" * 1000


def test_tied_weights_stay_tied(root):
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

    model, copy = Tied(), Tied()
    with Publisher(root, local=True) as publisher:
        publisher.publish(model, 1).result()
        assert Subscriber(root).pull(copy).from_memory
        assert_same(state_of(copy), state_of(model))
        apart = {"embed.weight": torch.zeros(5, 4), "head.weight": torch.ones(5, 4)}
        with Publisher(root.parent / "other", local=True) as other:
            other.publish(apart, 1).result()
            with pytest.raises(StateMismatchError, match=r"embed\.weight and head\.weight are one tensor"):
                Subscriber(root.parent / "other").pull(copy)
    assert_same(state_of(copy), state_of(model))


@pytest.mark.parametrize("change", ["gone", "more", "shape", "dtype"])
def test_a_module_that_does_not_fit_is_refused_and_stays_as_it_is(change, publisher, subscriber):
    publish(publisher, 1)
    copy = Copy()
    if change == "gone":
        del copy.up
    elif change == "more":
        copy.register_buffer("more", torch.zeros(1))
    elif change == "shape":
        copy.head = torch.zeros(8, 5, 3, dtype=torch.bfloat16)
    else:
        copy.head = torch.zeros(8, 3, 5)
    were = state_of(copy)
    with pytest.raises(StateMismatchError, match="does not fit the module"):
        subscriber.pull(copy)

    assert_same(state_of(copy), were)


def test_several_subscribers_take_a_version_at_once(publisher, root):
    publish(publisher, 1)
    calls = [Call(lambda: pulled(Subscriber(root), from_memory=True)) for _ in range(8)]

    assert [call.outcome() for call in calls] == [1] * 8


def test_watch_yields_a_version_that_is_only_in_memory_once(publisher, subscriber, hold):
    seen = subscriber.watch(poll_seconds=0.01)
    goes_on = hold()
    publisher.publish(weights(1), 1)
    assert next(seen) == 1
    goes_on.set()
    publisher._wait()
    waiting = Call(lambda: next(seen))
    publish(publisher, 2)
    assert waiting.outcome() == 2


def test_a_version_in_a_bucket_is_lent_as_well(s3, bucket):
    place = Place(f"s3://{bucket}/weights", options=s3.options)
    with Publisher(place, local=True) as publisher, Subscriber(place) as subscriber:
        publish(publisher, 1)
        assert pulled(subscriber, from_memory=True) == 1


# --- which version is the truth -----------------------------------------------------------------------------------


def test_readers_follow_the_publisher_that_owns_the_root(publisher, subscriber, root):
    publish(publisher, 1)
    with Publisher(root, local=True) as newer:
        assert pulled(subscriber, from_memory=True) == 1
        publish(newer, 2)
        assert pulled(subscriber, from_memory=True) == 2
        with pytest.raises(ClosedError, match="another Publisher has begun"):
            publish(publisher, 3)
        assert publisher._offer._giver._present is None
        assert pulled(subscriber, from_memory=True) == 2
    with Publisher(root) as newest:
        publish(newest, 3)
        assert pulled(subscriber, from_memory=False) == 3


def test_a_version_that_is_set_back_is_lent_before_those_above_it_are_gone(publisher, subscriber, hold):
    publish(publisher, 10, 20)
    seen = subscriber.watch(poll_seconds=0.01)
    assert next(seen) == 20
    goes_on = hold()
    handle = publisher.publish(weights(5), 5)
    publisher.wait_readable(5)

    assert next(seen) == 5
    assert publisher.versions() == [10, 20]
    assert (subscriber.versions(), subscriber.latest()) == ([5], 5)
    assert pulled(subscriber, from_memory=True) == 5
    goes_on.set()
    handle.result()
    assert subscriber.versions() == publisher.versions() == [5]


def test_a_version_that_fails_is_lent_no_more(publisher, subscriber, monkeypatch):
    publish(publisher, 1)

    def full(*_: object) -> None:
        raise StorageUnavailableError("the disk is gone", path="")

    with monkeypatch.context() as patch:
        patch.setattr(Publication, "_commit", full)
        handle = publisher.publish(weights(2), 2)
        assert isinstance(handle.exception(), StorageUnavailableError)
    assert pulled(subscriber, from_memory=False) == 1
    with pytest.raises(StorageUnavailableError, match="the disk is gone"):
        publisher.wait_readable(2)
    publish(publisher, 3)
    assert pulled(subscriber, from_memory=True) == 3


def test_a_version_that_may_not_be_published_is_not_lent(root, subscriber):
    with Publisher(root, local=True) as publisher:
        publish(publisher, 1, 2)
        with pytest.raises(StepExistsError):
            publisher.publish(weights(9), 2).result()
        assert pulled(subscriber, from_memory=True) == 2
        with pytest.raises(NotCommittedError, match="there is no version 7"):
            publisher.wait_readable(7)


def test_a_wait_for_a_version_ends_at_its_deadline(publisher, monkeypatch):
    held = threading.Event()
    monkeypatch.setattr(type(publisher._offer), "offer", lambda *_, **__: (held.wait(PATIENCE), None)[1])
    handle = publisher.publish(weights(1), 1)
    with pytest.raises(TimeoutError, match="version 1 cannot be read yet"):
        publisher.wait_readable(1, timeout=0.01)
    held.set()
    publisher.wait_readable(1)
    assert publisher.versions() == [1]
    handle.result()


def test_deltas_of_versions_that_were_lent_have_their_bytes(publisher, subscriber, tmp_path):
    publish(publisher, 1, 2, 3)
    publisher.close()
    for version in (1, 2, 3):
        assert subscriber.pull(tmp_path / "local", version).num_versions == 1
        assert_same(weights_in(tmp_path / "local"), weights(version))


# --- what is refused ----------------------------------------------------------------------------------------------


def test_bytes_that_are_not_those_of_their_checksums_are_taken_from_the_root(publisher, subscriber, caplog):
    publish(publisher, 1)
    tensors = publisher._offer._giver._present.keeps[1]
    tensors[0].view(torch.int16).view(-1)[5] ^= 1  # as only a defect would

    assert pulled(subscriber, from_memory=False) == 1
    assert "the bytes of 'embed' are not those that were published; the root is used instead" in caplog.text
    publish(publisher, 2)
    assert pulled(subscriber, from_memory=True) == 2


def test_a_table_that_is_damaged_is_refused(publisher, subscriber, caplog):
    publish(publisher, 1)
    table, _ = publisher._offer._giver._present.keeps
    whole = bytes(table.view)
    for at in some(range(len(whole)), 41):
        table.view[at] ^= 1 << at % 8
        assert pulled(subscriber, from_memory=False) == 1
        table.view[at] ^= 1 << at % 8
    assert pulled(subscriber, from_memory=True) == 1
    assert "its table is not the one that was published" in caplog.text


def test_what_a_table_says_is_checked():
    row = '"a": ["float32", [2], 0, 0, "' + "0" * 32 + '"]'
    ours = '"version": 1, "identity": "", "structure": "", "adapter": {}, "start": "%s", "slices": {%s}'
    head = f'{{{ours}, "tensors": {{%s}}, "files": {{%s}}}}'

    def parsed(tensors: str, files: str = "", slices: str | None = None) -> object:
        data = (head % ("" if slices is None else "begun", slices or "", tensors, files)).encode()
        return parse_lent(memoryview(len(data).to_bytes(8, "little") + bytes(8) + data), [8])

    assert dump_lent(parsed(row))
    for wrong in (
        row.replace("[2]", "[3]"),
        row.replace("[2]", "[-2]"),
        row.replace("[2]", '["2"]'),
        row.replace("float32", "float33"),
        row.replace("0, 0", "1, 0"),
        row.replace("0, 0", "-1, 0"),
        row.replace("0, 0", "0, 2"),
        row.replace("0, 0", "0, -4"),
        row.replace("0" * 32, "0" * 31),
        row.replace("[2], ", ""),
    ):
        with pytest.raises(ValueError, match="table of a lent version"):
            parsed(wrong)
    for wrong in ('"../x": 0', '"x": 1', '"x": -1', '"x": "0"'):
        with pytest.raises(ValueError, match="table of a lent version"):
            parsed(row, wrong)
    assert dump_lent(parsed(row, slices='"a": ["w", "float32", [4], [1], [2]]'))
    for wrong in (
        "",
        '"b": ["w", "float32", [4], [1], [2]]',
        '"a": ["w", "int32", [4], [1], [2]]',
        '"a": ["w", "float32", [4], [1], [3]]',
        '"a": ["w", "float32", [4], [3], [2]]',
        '"a": ["w", "float32", [4], [1]]',
    ):
        with pytest.raises(ValueError, match="table of a lent version"):
            parsed(row, slices=wrong)
    for data in (b"", b"\0" * 7, b"\xff" * 8, b"\2" + bytes(15) + b"{}"):
        with pytest.raises(ValueError, match="table of a lent version"):
            parse_lent(memoryview(data), [])


def test_memory_whose_size_could_change_is_not_mapped():
    fd = os.memfd_create("unsealed")
    try:
        os.ftruncate(fd, 4096)
        with pytest.raises(ValueError, match="not sealed"):
            shared_memory.map_shared(fd)
    finally:
        os.close(fd)


def test_nobody_but_the_maker_writes_to_the_memory_or_changes_its_size():
    array, fd = shared_memory.make_shared(10)
    array[3] = 7
    for harm in (lambda: os.ftruncate(fd, 0), lambda: mmap.mmap(fd, 4096), lambda: os.pwrite(fd, b"x", 0)):
        with pytest.raises(OSError, match="not permitted"):
            harm()
    assert shared_memory.map_shared(fd)[3] == 7


READS = """
import os, sys
import torch
import lent
from async_ckpt import Subscriber
for user in (os.getuid(), 65534):
    os.setuid(user)
    copy = lent.Copy()
    report = Subscriber(sys.argv[1]).pull(copy)
    assert copy.is_version(report.version)
    print(report.version, report.from_memory)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_gets_versions_from_the_root_alone(publisher, root, nursery):
    publish(publisher, 1)
    for folder in (root, *root.parents):
        if folder.stat().st_uid == 0 and folder != Path("/"):
            folder.chmod(0o755)
    ended = nursery.run(READS, root)

    assert (ended.out, ended.err) == ("1 True\n1 False\n", "")


@pytest.mark.parametrize("call", ["memfd_create", "ftruncate"])
def test_where_there_is_no_such_memory_versions_go_by_the_root_and_it_is_said(
    call, publisher, subscriber, monkeypatch, caplog
):
    with monkeypatch.context() as patch:

        def refused(*_: object) -> None:
            raise OSError(errno.ENOMEM, "no memory")

        patch.setattr(os, call, refused)
        publish(publisher, 1, 2)
        assert pulled(subscriber, from_memory=False) == 2
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sum("cannot be read from memory" in line for line in said) == 1
    assert "readers on this host take it from the root" in caplog.text
    publish(publisher, 3)
    assert pulled(subscriber, from_memory=True) == 3


def test_memory_beyond_a_limit_of_the_system_is_a_warning_and_the_version_goes_to_the_root(s3, bucket, caplog):
    root = Place(f"s3://{bucket}/weights", options=s3.options)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    gc.collect()  # memory of earlier publishers would serve this one
    with Publisher(root, local=True) as publisher, Subscriber(root) as subscriber:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # memory that is shared counts as a file
        try:
            publish(publisher, 1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert pulled(subscriber, from_memory=False) == 1
        assert "version 1 cannot be read from memory" in caplog.text
        publish(publisher, 2)
        assert pulled(subscriber, from_memory=True) == 2


def test_pages_that_the_kernel_does_not_give_are_an_error_and_not_the_end(monkeypatch):
    """A touch of such a page would be SIGBUS."""
    fd = os.memfd_create("short")
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        array = shared_memory._mapped(fd, 2 * mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError, match="Cannot allocate memory"):  # beyond the end there are none
            shared_memory.provide(fd, ctypes.addressof(array), 2 * mmap.PAGESIZE)
        monkeypatch.setattr(shared_memory, "_POPULATE_WRITE", 9999)  # as on Linux before 5.14
        shared_memory.provide(fd, ctypes.addressof(array), 2 * mmap.PAGESIZE)
        array[2 * mmap.PAGESIZE - 1] = 1
    finally:
        os.close(fd)


def test_a_system_without_such_memory_is_refused_at_once(root, monkeypatch):
    monkeypatch.setattr("async_ckpt.core.host.shared_memory.CAN_SHARE", False)
    with pytest.raises(ValueError, match="local=True needs Linux; leave it out"):
        Publisher(root, local=True)
    with pytest.raises(TypeError, match="local must be True or False"):
        Publisher(root, local="yes")


def test_a_publisher_that_does_not_answer_is_waited_for_no_longer_than_the_deadline(publisher, subscriber, monkeypatch):
    publish(publisher, 1)
    with monkeypatch.context() as patch, publisher._offer._giver._lock:  # as one that is stopped
        patch.setattr(fd_passing, "ANSWER_SECONDS", 0.05)
        assert pulled(subscriber, from_memory=False) == 1
    assert pulled(subscriber, from_memory=True) == 1


# --- what a reader costs ------------------------------------------------------------------------------------------


def test_a_reader_that_does_not_go_on_costs_memory_and_no_more_than_two_versions(publisher, subscriber, caplog):
    publish(publisher, 1)
    token = publisher._series.ownership.token
    with fd_passing.received(token) as first:
        publish(publisher, 2)
        with fd_passing.received(token) as second:
            publish(publisher, 3, 4)
            assert pulled(subscriber, from_memory=False) == 4
            assert caplog.text.count("2 earlier versions are still being read") == 1
            for version, (message, fds) in ((1, first), (2, second)):
                assert message.startswith(b"%d " % version)
                memory = shared_memory.map_shared(fds[1])
                at = publisher_bytes(version)
                assert bytes(memory[: len(at)].tolist()) == at
        versions = itertools.count(5)

        def lends_again() -> bool:  # once a slow thread has noticed that the readers are gone
            publish(publisher, next(versions))
            return subscriber.pull(Copy()).from_memory

        until(lends_again)


def publisher_bytes(version: int) -> bytes:
    """The first tensor of a version."""
    return bytes(weights(version)["embed"].view(torch.uint8).flatten().tolist())


def test_a_snapshot_for_which_memory_is_short_takes_that_of_the_version_that_is_lent(root, subscriber):
    gc.collect()  # what other tests held
    host_bytes = 3 * sum(tensor.nbytes for tensor in weights(1).values()) // 2
    with Publisher(root, encoding=None, local=True) as publisher:
        with snapshot(weights(1), host_bytes=host_bytes) as snap:
            publisher.publish(snap, 1).result()
        assert pulled(subscriber, from_memory=True) == 1
        publisher._wait()
        taken = []

        def fits() -> bool:  # once a slow thread holds nothing of the first snapshot any more
            with suppress(MemoryError):
                taken.append(snapshot(weights(2), host_bytes=host_bytes))
            return bool(taken)

        until(fits)
        with taken[0] as snap:
            assert pulled(subscriber, from_memory=False) == 1
            publisher.publish(snap, 2).result()
        assert pulled(subscriber, from_memory=True) == 2


STOPS = """
import sys
import lent
from async_ckpt import Subscriber
lent.stop_before_bytes_are_compared()
copy = lent.Copy()
report = Subscriber(sys.argv[1]).pull(copy)
print(report.version, report.from_memory, copy.is_version(report.version))
"""


def test_a_reader_that_is_stopped_has_its_version_when_it_goes_on(publisher, subscriber, root, nursery):
    publish(publisher, 1)
    child = nursery.start(STOPS, root)
    child.wait_for_line("stopped")
    publish(publisher, 2, 3, 4)
    assert pulled(subscriber, from_memory=True) == 4
    child.send(signal.SIGCONT)

    assert child.ended().out == "stopped\n1 True True\n"


def test_memory_and_descriptors_stay_the_same_over_many_versions(publisher, subscriber):
    copy, seen = Copy(), []
    for version in range(1, 501 if ALL else 51):
        publisher.publish(weights(version), version)
        publisher.wait_readable(version)
        assert subscriber.pull(copy).from_memory
        assert copy.is_version(version)
        if version % 10 == 0:
            publisher._wait()
            seen.append(memory_of_others())
    assert max(found["bytes"] for found in seen[1:]) <= seen[0]["bytes"] * 2
    assert seen[-1]["fds"] <= seen[0]["fds"] + 4
    publisher.close()
    subscriber.close()
    assert memory_of_others()["bytes"] == 0


# --- ends of processes --------------------------------------------------------------------------------------------

PUBLISHES = """
import itertools, signal, sys
import lent
from async_ckpt import Publisher
signal.setitimer(signal.ITIMER_REAL, float(sys.argv[2]))  # which kills
with Publisher(sys.argv[1], local=True, keep=2, anchor_every=3) as publisher:
    for version in itertools.count(max([*publisher.versions(), 0]) + 1):
        publisher.publish(lent.weights(version), version)
        publisher.wait_readable(version)
        print(version, flush=True)
"""
FOLLOWS = """
import signal, sys
import lent
from async_ckpt import CheckpointError, Subscriber
signal.setitimer(signal.ITIMER_REAL, float(sys.argv[2]))
copy = lent.Copy()
with Subscriber(sys.argv[1]) as subscriber:
    for version in subscriber.watch(poll_seconds=0.001):
        try:
            report = subscriber.pull(copy)
        except CheckpointError:
            continue
        if not copy.is_version(report.version):
            print("torn", report, flush=True)
        print(report.version, report.from_memory, flush=True)
"""


def test_whoever_is_killed_at_any_moment_the_others_have_whole_versions(root, nursery):
    """A publisher and two readers, killed at random moments."""
    moments = torch.rand(50, 3, generator=torch.Generator().manual_seed(0)).tolist()
    for moment in some(moments, 25):
        publisher = nursery.start(PUBLISHES, root, 0.3 + moment[0] / 2)
        readers = [nursery.start(FOLLOWS, root, 0.3 + at) for at in moment[1:]]
        assert publisher.ended().status == -signal.SIGALRM
        for reader in readers:
            ended = reader.ended()
            assert ended.status == -signal.SIGALRM, ended.err
            assert "torn" not in ended.out
        with Subscriber(root) as subscriber, Publisher(root, local=True) as next_one:
            durable = subscriber.latest()
            if durable is not None:
                assert pulled(subscriber, from_memory=False) == durable
            publish(next_one, (durable or 0) + 1)
            assert pulled(subscriber, from_memory=True) == (durable or 0) + 1
    assert not [name for name in os.listdir("/dev/shm") if "async_ckpt" in name]


DIES = """
import os, signal, sys, threading
import lent
from async_ckpt import Publisher
from async_ckpt.weights.publishing.publication import Publication
from async_ckpt.core.storage.local import LocalStorage
publisher = Publisher(sys.argv[1], local=True)
publisher.publish(lent.weights(1), 1).result()
Publication._commit = lambda self: threading.Event().wait()
publisher.publish(lent.weights(2), 2)
publisher.wait_readable(2)
if sys.argv[2] == "fork" and os.fork() == 0:
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # that of the listing itself
            pass
    print("forked", sum("memfd" in link for link in links), flush=True)
    signal.pause()
print("lent", os.getpid(), flush=True)
signal.pause()
"""


def test_a_reader_that_is_ahead_of_a_publisher_that_died_goes_back_to_the_root(root, subscriber, nursery):
    child = nursery.start(DIES, root, "")
    child.wait_for_line("lent")
    copy = Copy()
    seen = subscriber.watch(poll_seconds=0.01)
    assert next(seen) == 2
    assert (subscriber.pull(copy).version, copy.is_version(2)) == (2, True)
    assert memory_of_others()["bytes"] > 0
    child.send(signal.SIGKILL)
    child.ended()

    assert copy.is_version(2)
    assert next(seen) == 1
    assert memory_of_others()["bytes"] == 0
    report = subscriber.pull(copy)
    assert (report.version, report.from_memory, copy.is_version(1)) == (1, False, True)
    with Publisher(root, local=True) as publisher:
        publisher.publish(weights(7), 2).result()
        assert next(seen) == 2
        assert subscriber.pull(copy).from_memory
        assert copy.is_version(7)


def test_a_forked_child_keeps_neither_the_memory_nor_the_socket_of_its_parent(root, subscriber, nursery):
    child = nursery.start(DIES, root, "fork")
    child.wait_for_line("lent")
    child.wait_for_line("forked")
    assert pulled(subscriber, from_memory=True) == 2
    child.send(signal.SIGKILL)
    said = child.ended().out.split()
    assert said[said.index("forked") + 1] == "0"

    assert pulled(subscriber, from_memory=False) == 1
    token = token_of_owner(LocalStorage(root))
    assert token
    with open("/proc/net/unix") as sockets:  # of all processes of the machine
        assert token not in sockets.read()


@pytest.mark.parametrize("is_published", [True, False])
def test_a_publisher_that_is_dropped_without_close_leaves_no_thread(root, is_published):
    before = {*threading.enumerate()}
    publisher = Publisher(root, local=True)
    handle = publisher.publish(weights(1), 1)
    if is_published:
        handle.result()
    del publisher
    handle.result()
    del handle
    gc.collect()

    until(lambda: not any(thread.name.endswith("giver") for thread in {*threading.enumerate()} - before))
