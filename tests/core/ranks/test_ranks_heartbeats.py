"""Heartbeats of life: a rank that has ended is named at once, one that is silent when it has been so for long, and no other."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from racing import until
from rank_worlds import AGENT_STORE
from states import open_run

from async_ckpt.core.host import process as processes
from async_ckpt.core.ranks import heartbeats
from async_ckpt.core.ranks.heartbeats import Heartbeats
from async_ckpt.core.ranks.store import Connection

# No deadline of a wait for another rank passes here: without heartbeats, these would take half an hour.
_OFTEN = """
from async_ckpt.core.ranks import heartbeats
heartbeats._INTERVAL_SECONDS = 0.05
"""
_DYING = """
with open_run(here.root) as ckpt:
    here.save(ckpt, small(1), 1)
    if here.rank == {who}:
        here.at({point!r}, here.die, step=2)
    here.save(ckpt, small(2), 2)
"""


@pytest.mark.parametrize("point", ["write", "receipt"])
def test_a_rank_that_has_ended_fails_the_save_on_all_others_by_name(worlds, point):
    first, _, third = worlds.run(3, _OFTEN + _DYING.format(who=1, point=point), killed={1})

    for one in (first, third):
        told = one.saves[1]
        assert (told["error"], told["rank"], told["undecided"]) == ("PeerFailedError", 1, False)
        assert "rank 1: its process, " in told["text"]
    assert open_run(worlds.root).steps() == [1]


@pytest.mark.parametrize("point", ["write", "manifest"])
def test_the_others_do_not_wait_for_the_decision_of_a_rank_0_that_has_ended(worlds, point):
    dying = _DYING.replace("here.die,", "here.die_last,")  # a rank that has said nothing yet knows that it failed
    _, *others = worlds.run(3, _OFTEN + dying.format(who=0, point=point), killed={0})

    for one in others:
        told = one.saves[1]
        assert (told["error"], told["rank"], told["undecided"]) == ("PeerFailedError", 0, True)
        assert "rank 0 is lost: its process, " in told["text"]
        assert "has ended, and has not said whether it is committed" in told["text"]


def test_a_rank_that_ends_before_its_first_save_is_named(worlds):
    """All have met at the restore; at the first save, rank 0 waits for what each of them says of its state."""
    script = """
state = small(1)  # by collectives
with open_run(here.root) as ckpt:
    ckpt.restore(state)
    if here.rank == 1:
        here.hear("begins")
        here.die()
    if here.rank == 0:
        here.say("begins")
    here.save(ckpt, state, 1)
"""
    first, *_ = worlds.run(3, _OFTEN + script, killed={1})

    assert (first.saves[0]["error"], first.saves[0]["rank"]) == ("PeerFailedError", 1)
    assert "waited for the first save of the other ranks, but rank 1 is lost: its process, " in first.saves[0]["text"]


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("kind", ["TCPStore", "FileStore"])
def test_a_process_that_ends_before_its_first_heartbeat_is_named(worlds, tmp_path, kind, who):
    """Ranks of one machine know its processes since they met, by a store of any kind."""
    made = {
        "TCPStore": AGENT_STORE,
        "FileStore": f"dist.FileStore({str(tmp_path / 'store')!r}, here.size)",
    }
    script = f"""
    from racing import until
    from async_ckpt.core.ranks.heartbeats import Heartbeats
    if here.rank == {who}:
        Heartbeats.begin = lambda *_: None
    with open_run(here.root, ranks=(here.rank, here.size), store={made[kind]}) as ckpt:
        start = ckpt._ranks.meeting.start
        until(start.token.done)
        here.meet("started")
        if here.rank == {who}:
            until(lambda: len(start.nonces) == here.size - 1 or here.rank)
            here.die()
        here.save(ckpt, {{"whole": numbered(3)}}, 1)
    """
    ended = worlds.run(3, script, has_group=False, killed={who})

    for rank, one in enumerate(ended):
        if rank != who:
            assert (one.saves[0]["error"], one.saves[0]["undecided"]) == ("PeerFailedError", False)
            assert "on the same machine, has ended" in one.saves[0]["text"]
    told = ended[1 - who].saves[0]
    assert (told["rank"], f"rank {who} is lost: its process" in told["text"]) == (who, True)
    assert open_run(worlds.root).steps() == []


def test_a_rank_that_is_silent_for_too_long_fails_that_save_and_is_a_rank_again(worlds):
    """It is stopped, as by a debugger; on the same machine its process is seen to live."""
    script = """
import os, signal
from racing import until
from async_ckpt.core.ranks import heartbeats
heartbeats._INTERVAL_SECONDS, heartbeats.SILENCE_SECONDS = 0.5, 2.0
states = [small(step) for step in range(4)]  # by collectives
with open_run(here.root) as ckpt:
    here.save(ckpt, states[1], 1)
    if here.rank == 1:
        here.at("write", lambda: os.kill(os.getpid(), signal.SIGSTOP), step=2)
    here.save(ckpt, states[2], 2)
    if here.rank == 0:
        beats = ckpt._ranks.meeting.start.heartbeats
        before = beats._received[1].text
        here.say("failed")
        until(lambda: not beats.lost([1]) and beats._received[1].text != before)
    here.save(ckpt, states[3], 3)
"""
    world = worlds.start(3, script)
    world.wait_for("failed")
    world.children[1].send(signal.SIGCONT)
    ended = world.ended()

    assert [one.saves[1]["error"] for one in ended] == ["PeerFailedError"] * 3
    assert "rank 1: nothing was heard of it for " in ended[0].saves[1]["text"]
    assert [one.saves[2].get("status") for one in ended] == ["committed"] * 3


def test_rank_0_logs_which_rank_has_made_no_call_and_not_which_one_still_writes(worlds):
    script = """
    import logging
    from racing import until
    from async_ckpt.core.ranks import heartbeats, rendezvous
    heartbeats._INTERVAL_SECONDS = rendezvous._LOOK_AROUND_SECONDS = 0.1
    rendezvous._LOGGED_SECONDS, warned = 1.0, []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger("async_ckpt").addHandler(handler)
    if here.rank == 1:
        here.at("receipt", lambda: here.hear("warned"), step=2)
    with open_run(here.root) as ckpt:
        here.save(ckpt, {"whole": numbered(3)}, 1)
        if here.rank == 2:
            here.hear("warned")
        handle = ckpt.save({"whole": numbered(3)}, 2)
        if here.rank == 0:
            until(lambda: any("no call" in one for one in warned))
            here.say("warned")
        handle.result()
        here.tell([one.partition(" after")[0] for one in warned if "no call" in one])
    """
    ended = worlds.run(3, script)

    assert [one.told[-1] for one in ended] == [["step 2: rank 2 had made no call for it"], [], []]


# --- what is heard, and when ----------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(heartbeats, "monotonic", made)
    return made


class Answering:
    """A connection to a store that has answered last when the test says so."""

    has_server, answered_at = True, 0.0


def hears(clock: Clock, one: Heartbeats, heard: dict[int, str]) -> None:
    """The store answers with these heartbeats."""
    one._connection.answered_at = clock.now
    one._receive(heard, was_deaf=False)


def heard(clock: Clock, rank: int, seconds: float, *, every: float = 5.0, answers: bool = True) -> Heartbeats:
    """What a process has heard of a rank that gave one heartbeat, and then none, while it read for so long."""
    one = Heartbeats(Answering(), 0, 8, list)
    hears(clock, one, {rank: "0 "})
    end = clock.now + seconds
    while clock.now < end:
        clock.now += every
        if answers:
            hears(clock, one, {rank: "0 "})
    return one


def test_silence_is_told_after_half_a_minute_and_counts_after_two(clock, caplog):
    assert heard(clock, 3, 25).lost([3]) == {}
    assert not caplog.records
    one = heard(clock, 3, 100)
    assert (one.lost([3]), one.lost([3])) == ({}, {})
    assert [record.getMessage() for record in caplog.records] == [
        "rank 3 has been silent for 100 s; still waiting for it"
    ]
    assert heard(clock, 3, 125).lost([3, 4]) == {3: "nothing was heard of it for 125 s"}


def test_a_store_that_is_silent_blames_nobody(clock):
    assert heard(clock, 3, 500, answers=False).lost([3]) == {}


def test_a_process_that_was_stopped_itself_hears_anew_before_it_blames_anybody(clock):
    one = heard(clock, 3, 100)
    clock.now += 500  # it was stopped, or its machine was
    assert one.lost([3]) == {}
    one._connection.answered_at = clock.now
    one._receive({3: "0 "}, was_deaf=True)
    assert one.lost([3]) == {}
    clock.now += 5
    hears(clock, one, {3: "0 "})
    assert one.lost([3]) == {}


def test_the_next_heartbeat_makes_it_a_rank_again(clock):
    one = heard(clock, 3, 200)
    assert one.lost([3])
    hears(clock, one, {3: "1 "})
    assert one.lost([3]) == {}


@contextmanager
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield child
        child.kill()


def test_a_process_of_this_machine_is_known_by_when_it_began(clock):
    with process() as child:
        one = Heartbeats(Answering(), 0, 4, list)
        one.note(1, f"{processes.machine()} {child.pid} {processes.began(child.pid)}")
        one.note(2, f"{processes.machine()} {child.pid} 1")
        one.note(3, f"another/1 {child.pid} 1")
        assert one.lost([1, 2, 3]) == {}  # what it has said last may still come
        clock.now += 2
        # The number of 2 is another's by now, and 3 is of another machine, or of another container.
        assert one.lost([1, 2, 3]) == {2: f"its process, {child.pid} on the same machine, has ended"}
        child.kill()
        until(lambda: processes.began(child.pid) is None)  # nobody has waited for it yet
        assert one.lost([1]) == {}
        clock.now += 2
        assert [*one.lost([1])] == [1]


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "_INTERVAL_SECONDS", 0.02)


def beating(store: dist.Store, rank: int, size: int = 2) -> Heartbeats:
    """Heartbeats of a rank, until nobody has its store."""
    one = Heartbeats(Connection(store), rank, size, list)
    one.begin("token")
    return one


@pytest.mark.usefixtures("often")
def test_heartbeats_are_given_by_a_connection_of_their_own_also_below_prefixes():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = [dist.PrefixStore("a", dist.PrefixStore("b", server)) for _ in range(2)]
    ranks = [beating(store, rank) for rank, store in enumerate(given)]
    until(lambda: ranks[0].lost([1]) == {} and 1 in ranks[0]._received)

    assert ranks[0]._received[1].text.isdecimal()  # it has no open calls
    before = ranks[0]._received[1].text
    until(lambda: ranks[0].lost([1]) == {} and ranks[0]._received[1].text != before)
    assert given[0].check(["token/heartbeat/1"])


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("kind", ["HashStore", "FileStore"])
def test_without_a_server_there_are_no_heartbeats_and_a_rank_is_lost_with_its_process_alone(tmp_path, clock, kind):
    file = tmp_path / "store"
    store = dist.HashStore() if kind == "HashStore" else dist.FileStore(str(file), 2)
    with process() as child:
        one = beating(store, 0)
        one.note(1, f"{processes.machine()} {child.pid} {processes.began(child.pid)}")
        clock.now += 1000
        assert one.lost([1]) == {}
        child.kill()
        until(lambda: processes.began(child.pid) is None)
        one.lost([1])
        clock.now += 2
        assert [*one.lost([1])] == [1]
    assert not store.check(["token/heartbeat/0"])


@pytest.mark.usefixtures("often")
def test_a_rank_whose_store_nobody_has_any_more_gives_no_more_heartbeats():
    """As when its process group was destroyed."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = [dist.PrefixStore("", server) for _ in range(2)]
    ranks = [beating(given[rank], rank) for rank in range(2)]
    until(lambda: ranks[0].lost([1]) == {} and 1 in ranks[0]._received)
    given.pop()

    until(lambda: ranks[0].lost([1]) == {} and ranks[0]._received[1].reads > 20)


# In a process of its own: torch prints of other tests' servers, which go while heartbeats are being sent.
_GONE = """
import torch.distributed as dist
from racing import until
from async_ckpt.core.ranks import heartbeats, store

tried, connect = [], store._connected
store._connected = lambda *what: (tried.append(what), connect(*what))[1]
heartbeats._INTERVAL_SECONDS = 0.02
server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
del server
one = heartbeats.Heartbeats(store.Connection(client), 0, 2, list)
one.begin("token")
until(lambda: len(tried) > 3)
print(one.lost([1]))
"""


def test_a_server_that_is_gone_is_tried_again_without_a_word(nursery):
    assert nursery.out_of(_GONE) == "{}\n"
