"""Models that are spread over ranks, lent in memory: each rank lends what it holds, and a reader puts it together."""

import os
import signal
from pathlib import Path

import pytest
import torch
from exported import weights_in
from lent import memory_of_others
from lent_ranks import is_version, with_steps
from racing import Call
from rank_states import network
from rank_worlds import World, Worlds
from slices import ALL, some

from async_ckpt import NotCommittedError, Place, Publisher, Subscriber, follow
from async_ckpt.core.host.shared_memory import CAN_SHARE
from async_ckpt.weights.publishing.in_memory import borrow

pytestmark = pytest.mark.skipif(not CAN_SHARE, reason="no memory here can be handed to other processes")

BEGIN = """
from lent_ranks import Training
training = Training(here, {make}["model"], {root}, {options})
"""
LENDS = """
for version in {versions}:
    training.lend(version).result()
    here.say(f"durable{{version}}-{{here.rank}}")
    here.hear(f"read{{version}}")
training.close()
"""


@pytest.fixture
def root(worlds: Worlds) -> Path:
    return worlds.root


def start(
    worlds: Worlds,
    size: int,
    *scripts: str,
    make: str = "fsdp()",
    root: object = None,
    options: str = "",
    **more: object,
) -> World:
    where = repr(str(worlds.root)) if root is None else root
    return worlds.start(size, "".join(scripts).format(make=make, root=where, options=options, **more))


def wait_until_lent(world: World, version: int) -> None:
    for rank in range(len(world.children)):
        world.wait_for(f"lent{version}-{rank}")


def over(world: World) -> None:
    world.say("over")
    world.ended()


def pulled(subscriber: Subscriber, version: int | None = None, *, from_memory: bool, width: int = 37) -> int:
    """Pull into a new module, which has every bit of the version that the report names. Returns that."""
    model = with_steps(network(width))
    report = subscriber.pull(model, version)
    assert is_version(model.state_dict(), report.version)
    assert report.from_memory is from_memory
    return report.version


# --- what a reader gets -------------------------------------------------------------------------------------------

MADE = [(2, "fsdp()", 37), (4, "hsdp(2)", 37), (4, "fsdp_tp(2)", 14), (1, "fsdp()", 37), (3, "fsdp()", 5)]


@pytest.mark.parametrize(("size", "make", "width"), some(MADE, 2))
def test_a_module_and_a_folder_get_every_version_from_the_memory_of_all_ranks(worlds, tmp_path, size, make, width):
    given = make if width in (37, 14) else make.replace("()", f"(width={width})")
    world = start(worlds, size, BEGIN, LENDS, make=given, versions=[1, 2, 3, 4])
    model = with_steps(network(width))
    with Subscriber(worlds.root) as subscriber:
        for version in (1, 2, 3, 4):
            wait_until_lent(world, version)
            reports = [subscriber.pull(into) for into in (model, tmp_path / "local")]
            assert [(report.version, report.base, report.from_memory) for report in reports] == [
                (version, None, True)
            ] * 2
            assert reports[0].num_bytes == sum(tensor.nbytes for tensor in model.state_dict().values())
            assert is_version(model.state_dict(), version)
            held = weights_in(tmp_path / "local")
            assert held.keys() == model.state_dict().keys()
            assert is_version(held, version)
            again = subscriber.pull(tmp_path / "local")
            assert (again.num_versions, again.from_memory) == (0, True)
            world.say(f"read{version}")
        over(world)
        assert pulled(subscriber, from_memory=False, width=width) == 4
        assert subscriber.pull(tmp_path / "local").num_versions == 0  # what was lent is what is at the root


HOLDS = """
training.hold_commits({held})
handles = [training.lend(version) for version in {versions}]
training.close()
"""


def test_a_version_is_there_before_it_is_durable_and_counts_once(worlds, root):
    world = start(worlds, 2, BEGIN, HOLDS, held=1, versions=[1])
    with Subscriber(root) as subscriber, Publisher(root) as other:
        wait_until_lent(world, 1)
        newest = subscriber.newest()
        seen = subscriber.watch(poll_seconds=0.01)
        assert (next(seen), subscriber.versions(), subscriber.latest(), other.versions()) == (1, [1], 1, [])
        assert pulled(subscriber, from_memory=True) == 1
        world.say("durable1")
        over(world)
        assert other.versions() == [1]
        assert pulled(subscriber, from_memory=False) == 1
        assert subscriber.newest() == newest


CONFIG = """
from pathlib import Path
folder = Path(here.root + f"-config-{{here.rank}}")
folder.mkdir()
(folder / "config.json").write_text(f'{{{{"rank": {{here.rank}}}}}}')
training.publisher.publish(training.model, 1, folder).result()
here.say(f"lent1-{{here.rank}}")
training.close()
"""


def test_a_folder_has_the_config_of_rank_0_and_the_root_may_be_a_bucket(worlds, s3, bucket, tmp_path):
    place = Place(f"s3://{bucket}/weights", options=s3.options)
    worlds.root.parent.mkdir(exist_ok=True, parents=True)
    world = start(
        worlds, 2, "from async_ckpt import Place", BEGIN, CONFIG, root=f"Place({place.url!r}, options={s3.options})"
    )
    wait_until_lent(world, 1)
    assert Subscriber(place).pull(tmp_path / "local").from_memory
    assert (tmp_path / "local" / "config.json").read_text() == '{"rank": 0}'
    over(world)


def test_the_sidecar_takes_a_version_before_it_is_durable_and_tells_it_once(worlds, root, tmp_path):
    world = start(worlds, 2, BEGIN, HOLDS, held=1, versions=[1])
    wait_until_lent(world, 1)
    told = []

    def load(folder: Path, version: int) -> None:
        told.append((version, is_version(weights_in(folder), version)))

    follow(root, tmp_path / "local", load, once=True)
    assert told == [(1, True)]
    world.say("durable1")
    over(world)
    follow(root, tmp_path / "local", load, once=True)
    assert told == [(1, True)]


# --- ranks that are apart -----------------------------------------------------------------------------------------

BEHIND = """
from async_ckpt.weights.publishing.in_memory.offer import MemoryOffer
offer = MemoryOffer.offer
def late(self, name, version, *rest, **options):
    if here.rank == 1 and version.version == 2:
        here.hear("go on")
    return offer(self, name, version, *rest, **options)
MemoryOffer.offer = late
if here.rank == 1:
    training.hold_commits(1)
training.lend(1)
here.hear("read1")
training.publish(2)
if here.rank == 0:
    from racing import until
    until(lambda: training.publisher._offer._giver._present.message.startswith(b"2 "))
    here.say("behind-1")
training.publisher.wait_readable(2)
here.say(f"lent2-{{here.rank}}")
training.close()
"""


def test_while_one_rank_is_behind_readers_neither_go_back_nor_mix_and_a_pull_waits_for_it(worlds, root, monkeypatch):
    world = start(worlds, 2, BEGIN, BEHIND)
    with Subscriber(root) as subscriber, Subscriber(root) as late:
        seen = subscriber.watch(poll_seconds=0.01)
        wait_until_lent(world, 1)
        assert next(seen) == 1
        assert pulled(subscriber, from_memory=True) == 1
        newest = subscriber.newest()
        world.say("read1")
        world.wait_for("behind-1")  # rank 0 lends version 2; rank 1 lends version 1, which is not durable there
        assert (subscriber.newest(), subscriber.versions()) == (newest, [1])
        assert (late.newest(), late.versions()) == (None, [])
        monkeypatch.setattr(borrow, "AGREEMENT_SECONDS", 0.05)
        with pytest.raises(NotCommittedError):
            subscriber.pull(with_steps(network()))
        monkeypatch.setattr(borrow, "AGREEMENT_SECONDS", 3600.0)
        waiting = Call(lambda: pulled(late, from_memory=True))
        waiting.wait_until_inside_all("borrowed", "sleep")
        world.say("durable1")
        world.say("go on")
        assert waiting.outcome() == 2
        wait_until_lent(world, 2)
        assert next(seen) == 2
        assert pulled(subscriber, from_memory=True) == 2
        over(world)


UNUSABLE = {
    "it lends nothing": "",
    "it has no memory": """
def refused(*_):
    raise OSError(errno.ENOMEM, "no memory")
os.memfd_create = refused
""",
    "its slices are of another start": """
offer = MemoryOffer.offer
MemoryOffer.offer = lambda self, name, version, *rest, **options: offer(
    self, name, dataclasses.replace(version, slices=dataclasses.replace(version.slices, start="another")), *rest, **options
)
""",
    "it lacks a slice": """
offer = MemoryOffer.offer
def without_one(self, name, version, tensors, check, **options):
    slices = dict(version.slices.of_tensors)
    lost = next(name for name in slices if name.startswith("0.weight"))
    del slices[lost]
    version = dataclasses.replace(version, slices=dataclasses.replace(version.slices, of_tensors=slices))
    others = {{name: tensor for name, tensor in tensors.items() if name != lost}}
    return {{lost: checksum_of(tensors[lost]), **offer(self, name, version, others, check, **options)}}
MemoryOffer.offer = without_one
""",
}


@pytest.mark.parametrize("why", UNUSABLE)
def test_if_one_rank_lends_nothing_of_use_the_version_comes_from_the_root(worlds, root, tmp_path, monkeypatch, why):
    monkeypatch.setattr(borrow, "AGREEMENT_SECONDS", 0.05)
    imports = """
import dataclasses, errno, os
from async_ckpt.weights.publishing.difference import checksum_of
from async_ckpt.weights.publishing.in_memory.offer import MemoryOffer
"""
    spoils = f"if here.rank == 1:{UNUSABLE[why]}".replace("\n", "\n    ") if UNUSABLE[why] else ""
    options = "" if spoils else "local=here.rank == 0"
    world = start(worlds, 2, imports, spoils + "\n", BEGIN, LENDS, versions=[1, 2], options=options)
    with Subscriber(root) as subscriber:
        for version in (1, 2):
            wait_until_lent(world, version)
            world.wait_for(f"durable{version}-0")
            world.wait_for(f"durable{version}-1")
            assert pulled(subscriber, from_memory=False) == version
            assert not subscriber.pull(tmp_path / "local").from_memory
            assert is_version(weights_in(tmp_path / "local"), version)
            world.say(f"read{version}")
    over(world)


DAMAGES = """
training.lend(1).result()
if here.rank == 1:
    kept = training.publisher._offer._giver._present.keeps
    tensor = next(tensor for tensor in kept[1] if tensor.numel() > 5)
    tensor.view(torch.int32).view(-1)[3] ^= 1  # as only a defect would
here.say(f"damaged-{{here.rank}}")
here.hear("read damaged")
if here.rank == 1:
    tensor.view(torch.int32).view(-1)[3] ^= 1
    kept[0].view[20] ^= 1
here.say(f"mended-{{here.rank}}")
training.close()
"""


def test_a_slice_and_a_table_that_are_damaged_are_taken_from_the_root(worlds, root, caplog):
    world = start(worlds, 2, BEGIN, DAMAGES)
    with Subscriber(root) as subscriber:
        for word in ("damaged-0", "damaged-1"):
            world.wait_for(word)
        assert pulled(subscriber, from_memory=False) == 1
        assert "are not those that were published; the root is used instead" in caplog.text
        world.say("read damaged")
        for word in ("mended-0", "mended-1"):
            world.wait_for(word)
        assert pulled(subscriber, from_memory=False) == 1
        assert "its table is not the one that was published" in caplog.text
    over(world)


AGAIN = """
training.lend(1).result()
here.meet("both have version 1")
if here.rank == 1:
    here.hear("go on")
handle = training.publish(1, holds=7)
if here.rank == 0:
    handle.result()
    try:
        training.publisher.wait_readable(1, timeout=0.05)
    except TimeoutError as error:
        here.tell(str(error))
    here.say("ahead")
training.publisher.wait_readable(1)
here.say(f"again-{{here.rank}}")
training.close()
"""


@pytest.mark.parametrize("is_local", [True, False])
def test_ranks_that_publish_a_number_again_are_never_mixed_and_wait_for_each_other(worlds, root, monkeypatch, is_local):
    monkeypatch.setattr(borrow, "AGREEMENT_SECONDS", 0.05)
    world = start(worlds, 2, BEGIN, AGAIN, options=f"local={is_local}")
    model = with_steps(network())
    with Subscriber(root) as subscriber:
        world.wait_for("ahead")
        assert subscriber.newest() is None
        with pytest.raises(NotCommittedError):
            subscriber.pull(model)
        world.say("go on")
        world.wait_for("again-0")
        assert subscriber.pull(model).from_memory is is_local
        assert is_version(model.state_dict(), 7)
    world.say("over")
    (told,) = world.ended()[0].told
    assert told == "version 1 cannot be read yet: not all ranks have published it"


FAILS = """
import async_ckpt
from async_ckpt.weights.publishing.publication import Publication
def full(publication):
    here.hear("waiting")
    raise async_ckpt.StorageUnavailableError("the disk is gone", path="")
if here.rank == 0:
    Publication._commit = full
    training.publish(1)
    here.say("waiting")
    try:
        training.publisher.wait_readable(1)
    except async_ckpt.StorageUnavailableError as error:
        here.tell(str(error))
here.meet("over")
training.publisher.close()
"""


def test_a_wait_for_other_ranks_ends_when_the_own_one_fails(worlds):
    assert start(worlds, 2, BEGIN, FAILS).ended()[0].told == ["the disk is gone"]


FAILS_ELSEWHERE = """
import async_ckpt
from async_ckpt.weights.publishing.publication import Publication
def full(publication):
    raise async_ckpt.StorageUnavailableError("the disk is gone", path="")
if here.rank == 1:
    Publication._commit = full
handle = training.publish(1)
try:
    training.publisher.wait_readable(1)
except async_ckpt.CheckpointError as error:
    here.tell([getattr(error, "rank", None), str(error)])
handle.exception()
here.meet("over")
training.publisher.close()
"""


def test_a_rank_that_fails_to_publish_is_named_to_those_that_wait(worlds):
    (rank_0,), (rank_1,) = (one.told for one in start(worlds, 2, BEGIN, FAILS_ELSEWHERE, options="local=False").ended())
    assert rank_0[0] == 1
    assert "rank 1: StorageUnavailableError: the disk is gone" in rank_0[1]
    assert rank_1 == [None, "the disk is gone"]


WRONG = """
import async_ckpt
def lend(number, *arguments):
    try:
        handle = training.publisher.publish(*arguments)
        error = handle.exception()
        training.publisher.wait_readable(arguments[1], 60.0)
        here.tell("done")
    except Exception as error:
        here.tell([type(error).__name__, str(error)])
    here.meet(f"tried {{number}}")

wrong, model = here.rank == {rank}, training.model
lend(0, None if wrong else model, 1)
lend(1, model, "two" if wrong else 2)
lend(2, model, 3, here.root + "-absent" if wrong else None)
if here.rank == 0:
    training.publisher.publish(model, 4)
lend(3, model, 5)
if here.rank == 0:
    try:
        training.publisher.wait_readable(4)
    except async_ckpt.PeerFailedError as error:
        here.tell(str(error))
training.publisher.close()
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_whatever_is_wrong_in_one_call_the_others_are_told_and_the_next_version_is_that_of_all(worlds, rank):
    """No model, no number, a config that is not there; and a version that rank 1 has not published."""
    ended = start(worlds, 2, BEGIN, WRONG, rank=rank)

    told = [one.told for one in ended.ended()]
    for number, name in enumerate(["UnsupportedStateError", "ValueError", "NotAFolderError"]):
        assert told[rank][number][0] == name
        other, text = told[1 - rank][number]
        assert other == "PeerFailedError"
        assert f"rank {rank}: {name}" in text
    assert [one[3] for one in told] == ["done"] * 2
    assert "rank 1: it has made no call for step 4" in told[0][4]


# --- which version is the truth -----------------------------------------------------------------------------------

TWICE = """
training.lend(1).result()
second = Training(here, training.model, {root})
second.lend(2).result()
try:
    training.publish(3).result()
except Exception as error:
    here.tell(type(error).__name__)
here.say(f"refused-{{here.rank}}")
second.close()
"""


def test_readers_follow_the_publisher_that_owns_the_root(worlds, root):
    world = start(worlds, 2, BEGIN, TWICE)
    with Subscriber(root) as subscriber:
        for rank in range(2):
            world.wait_for(f"refused-{rank}")
        assert pulled(subscriber, from_memory=True) == 2
    world.say("over")
    assert [one.told for one in world.ended()] == [["ClosedError"]] * 2


SET_BACK = """
training.hold_commits(5)
for version in (10, 20):
    training.lend(version).result()
    here.hear(f"read{{version}}")
training.lend(5)
training.close()
"""


def test_a_root_that_is_set_back_shows_the_lower_version_at_once(worlds, root):
    world = start(worlds, 2, BEGIN, SET_BACK)
    with Subscriber(root) as subscriber, Publisher(root) as other:
        seen = subscriber.watch(poll_seconds=0.01)
        for version in (10, 20):
            wait_until_lent(world, version)
            assert next(seen) == version
            world.say(f"read{version}")
        wait_until_lent(world, 5)
        assert next(seen) == 5
        assert (subscriber.versions(), other.versions()) == ([5], [10, 20])
        assert pulled(subscriber, from_memory=True) == 5
        world.say("durable5")
        over(world)
        assert subscriber.versions() == other.versions() == [5]
        assert pulled(subscriber, from_memory=False) == 5


DIES = """
training.hold_commits(2)
training.lend(1).result()
training.lend(2)
training.close()
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_leaves_whole_weights_and_another_number_of_ranks_goes_on(worlds, root, rank):
    world = start(worlds, 2, BEGIN, DIES)
    model = with_steps(network())
    with Subscriber(root) as subscriber:
        seen = subscriber.watch(poll_seconds=0.01)
        wait_until_lent(world, 2)
        while next(seen) != 2:
            pass
        assert subscriber.pull(model).from_memory
        world.kill(rank)
        world.children[rank].ended()
        assert is_version(model.state_dict(), 2)
        assert next(seen) == 1
        assert pulled(subscriber, from_memory=False) == 1
        world.kill(1 - rank)
        again = start(worlds, 3, BEGIN, LENDS.replace("lend(version)", "lend(version, holds=7)"), versions=[2])
        wait_until_lent(again, 2)
        assert next(seen) == 2
        assert subscriber.pull(model).from_memory
        assert is_version(model.state_dict(), 7)
        again.say("read2")
        over(again)
    assert memory_of_others()["bytes"] == 0


# --- what a reader costs ------------------------------------------------------------------------------------------

STOPS = """
import sys
from lent import stop_before_bytes_are_compared
from lent_ranks import is_version, with_steps
from rank_states import network
from async_ckpt import Subscriber
stop_before_bytes_are_compared()
model = with_steps(network())
report = Subscriber(sys.argv[1]).pull(model)
print(report.version, report.from_memory, is_version(model.state_dict(), report.version))
"""


def test_readers_that_are_stopped_or_killed_hold_up_no_rank(worlds, root, nursery):
    world = start(worlds, 2, BEGIN, LENDS, versions=[1, 2, 3, 4, 5])
    wait_until_lent(world, 1)
    stopped = nursery.start(STOPS, root)
    stopped.wait_for_line("stopped")
    world.say("read1")
    wait_until_lent(world, 2)
    killed = nursery.start(STOPS, root)
    killed.wait_for_line("stopped")
    with Subscriber(root) as subscriber:
        for version in (2, 3):
            world.say(f"read{version}")
        wait_until_lent(world, 4)  # two readers have two earlier versions, so this one is not lent
        assert pulled(subscriber, from_memory=False) == 4
        killed.send(signal.SIGKILL)
        assert killed.ended().status == -signal.SIGKILL
        world.say("read4")
        wait_until_lent(world, 5)
        assert pulled(subscriber, from_memory=True) == 5
    stopped.send(signal.SIGCONT)
    assert stopped.ended().out == "stopped\n1 True True\n"
    world.say("read5")
    over(world)


COUNTS = """
from lent import memory_of_others
for version in range(1, {num} + 1):
    training.lend(version).result()
    here.hear(f"read{{version}}")
    if version % 10 == 0:
        training.publisher._wait()
        here.tell(memory_of_others())
training.close()
here.tell(memory_of_others())
"""


def test_memory_and_descriptors_of_ranks_and_readers_stay_the_same_over_many_versions(worlds, root):
    num = 300 if ALL else 40
    world = start(worlds, 2, BEGIN, COUNTS, num=num, options="keep=2, anchor_every=3")
    model, seen = with_steps(network()), []
    with Subscriber(root) as subscriber:
        for version in range(1, num + 1):
            wait_until_lent(world, version)
            assert subscriber.pull(model).from_memory
            assert is_version(model.state_dict(), version)
            world.say(f"read{version}")
            if version % 10 == 0:
                seen.append(memory_of_others())
    world.say("over")
    for told in [seen, *(one.told[:-1] for one in world.ended())]:
        assert max(found["bytes"] for found in told[1:]) <= 2 * told[0]["bytes"]
        assert told[-1]["fds"] <= told[0]["fds"] + 4
    assert memory_of_others()["bytes"] == 0


# --- ends of processes --------------------------------------------------------------------------------------------

KILLED = """
import itertools, signal
first = max([*training.publisher.versions(), 0]) + 1
here.meet("begun")
if here.rank == {rank}:
    signal.setitimer(signal.ITIMER_REAL, {moment})  # which kills
for version in itertools.count(first):
    training.publish(version).result()
    here.say(f"lent{{version}}-{{here.rank}}")
"""
FOLLOWS = """
import signal, sys
from lent_ranks import is_version, with_steps
from rank_states import network
from async_ckpt import CheckpointError, Subscriber
signal.setitimer(signal.ITIMER_REAL, float(sys.argv[2]))
model = with_steps(network())
with Subscriber(sys.argv[1]) as subscriber:
    for version in subscriber.watch(poll_seconds=0.001):
        try:
            report = subscriber.pull(model)
        except CheckpointError:
            continue
        print("whole" if is_version(model.state_dict(), report.version) else "torn", report, flush=True)
"""


def test_whoever_is_killed_at_any_moment_the_others_have_whole_versions(worlds, root, nursery):
    """One of two ranks, and two readers, killed at random moments."""
    moments = torch.rand(50, 3, generator=torch.Generator().manual_seed(0)).tolist()
    for number, moment in enumerate(some(moments, 25)):
        rank = number % 2
        world = start(worlds, 2, BEGIN, KILLED, rank=rank, moment=0.2 + moment[0] / 2, options="keep=2, anchor_every=3")
        readers = [nursery.start(FOLLOWS, root, 0.5 + at) for at in moment[1:]]
        assert world.children[rank].ended().status == -signal.SIGALRM
        for reader in readers:
            ended = reader.ended()
            assert ended.status == -signal.SIGALRM, ended.err
            assert "torn" not in ended.out
        world.kill(1 - rank)
        world.children[1 - rank].ended()
        with Subscriber(root) as subscriber:
            durable = subscriber.latest()
            if durable is not None:
                assert pulled(subscriber, from_memory=False) == durable
    assert not [name for name in os.listdir("/dev/shm") if "async_ckpt" in name]


def test_a_warning_is_logged_by_the_rank_that_lends_nothing(worlds, root):
    script = """
import logging, os, errno
lines = []
logging.getLogger("async_ckpt").addHandler(type("Lines", (logging.Handler,), {{"emit": lambda self, r: lines.append(r.getMessage())}})())
if here.rank == 1:
    def refused(*_):
        raise OSError(errno.ENOMEM, "no memory")
    os.memfd_create = refused
training.publish(1).result()
here.tell([line for line in lines if "cannot be read from memory" in line])
here.meet("told")
training.publisher.close()
"""
    first, second = start(worlds, 2, BEGIN, script).ended()
    assert first.told == [[]]
    assert len(second.told[0]) == 1
