"""Ranks that are started again hear nothing of the start before, and write nothing that was written then."""

import weakref
from concurrent.futures import wait

import pytest
import torch
import torch.distributed as dist
from racing import until
from rank_oracle import run_of, saved
from rank_worlds import AGENT_STORE
from states import open_run

from async_ckpt.core.ranks.meeting import Meeting
from async_ckpt.core.ranks.start import WorldStart
from async_ckpt.core.ranks.world import World

# When it is started again, rank 1 comes first, and looks for what rank 0 has said.
START = """
from racing import until
from async_ckpt.core.ranks import meeting

real = meeting.Wait.goes_on
meeting.Wait.goes_on = lambda self, what: (here.say("waits"), real(self, what))
with open_run(here.root) as ckpt:
    state = {{"whole": torch.zeros(300, 1000), "step": 0}}
    if here.rank == 0 and {is_again}:
        until(lambda: here.is_said("waits") or here.is_said("restored"))
    here.tell(ckpt.restore(state))
    here.say("restored")
    for step in {steps}:
        here.save(ckpt, {{"whole": torch.full((300, 1000), float(step)), "step": step}}, step)
"""


def test_ranks_that_an_agent_starts_again_hear_nothing_of_the_start_before(worlds):
    first = worlds.start(2, START.format(is_again=False, steps=[1, 2]))
    first.ended()
    again = worlds.start(2, START.format(is_again=True, steps=[3]), after=first).ended()

    assert [one.told[0] for one in again] == [2, 2]
    assert [save.get("status") for one in again for save in one.saves] == ["committed"] * 2
    for step in (1, 2, 3):
        assert torch.equal(saved(worlds.root, step).tensors["whole"], torch.full((300, 1000), float(step)))


class Started:
    """One rank, as a new process starts it; until `end`, which is that of its process."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store: dist.Store | None = dist.PrefixStore("", store)
        self._is_there = weakref.ref(self._store)
        self.token = WorldStart(World(rank, size, self._store)).token

    def end(self) -> None:
        self._store = None
        until(lambda: self._is_there() is None)


def test_each_start_of_a_world_has_a_token_of_its_own():
    store = dist.HashStore()
    seen = set()
    # It grows and shrinks, and one process has several groups.
    for size in (2, 2, 3, 2, 3):
        ranks = [Started(store, rank, size) for rank in reversed(range(size))]
        (token,) = {one.token.result(60) for one in ranks}
        assert token not in seen
        seen.add(token)
        for one in ranks:
            one.end()
    # Both were started, and rank 1 has failed before it could say anything.
    alone = Started(store, 0, 2)
    seen.add(alone.token.result(60))
    alone.end()
    # Again, and rank 1 comes first: what the dead have said is not for it, but what rank 0 says when it is there.
    early = Started(store, 1, 2)
    assert wait([early.token], timeout=0.5).not_done
    late = Started(store, 0, 2)
    assert early.token.result(60) == late.token.result(60)
    assert late.token.result() not in seen


def test_what_one_start_opens_is_numbered_anew():
    store, other = dist.HashStore(), dist.HashStore()
    assert [Meeting((0, 2), store=store).topic for _ in range(2)] == ["1", "2"]
    assert Meeting((0, 2), store=other).topic == "1"


def test_a_rank_that_is_started_again_alone_is_refused_by_name_while_rank_0_lives(worlds):
    script = f"""
    with open_run(here.root, ranks=(here.rank, here.size), store={AGENT_STORE}) as ckpt:
        here.save(ckpt, {{"whole": numbered(3)}}, 1)
        here.say("saved") if here.rank == 0 else None
        here.hear("go")
        here.save(ckpt, {{"whole": numbered(3)}}, 2)
    """
    again = f"""
    with open_run(here.root, ranks=(1, 2), store={AGENT_STORE}) as ckpt:
        here.save(ckpt, {{"whole": numbered(3)}}, 2)
    """
    world = worlds.start(2, script, has_group=False)
    world.wait_for("saved")
    (alone,) = worlds.run(1, again, has_group=False, after=world)
    world.say("go")

    assert (alone.saves[0]["error"], alone.saves[0]["undecided"]) == ("PeerFailedError", False)
    assert "rank 0 knows another process as rank 1: this one was started again alone" in alone.saves[0]["text"]
    assert "start all ranks again, together" in alone.saves[0]["text"]
    assert [save.get("status") for one in world.ended() for save in one.saves] == ["committed"] * 4


def test_one_process_may_have_one_process_group_after_another(worlds):
    script = f"""
    for step in (1, 2, 3):
        with open_run(here.root) as ckpt:
            state = small(0)
            here.tell(ckpt.restore(state))
            here.save(ckpt, small(step), step)
        here.meet(f"saved {{step}}")
        dist.destroy_process_group()
        store = dist.PrefixStore(f"group {{step}}", {AGENT_STORE})
        dist.init_process_group("gloo", store=store, rank=here.rank, world_size=here.size)
    """
    for one in worlds.run(2, script):
        assert one.told[::2] == [None, 1, 2]
        assert [save.get("status") for save in one.saves] == ["committed"] * 3


# Each rank has values of its own, by which it is seen who has written them.
AGAIN = """
with open_run(here.root{options}) as ckpt:
    state = {{"whole": torch.full((300, 1000), {value}), "own": torch.full((300, 1000), {value} + here.rank)}}
    here.save(ckpt, state, 1, per_rank=["own"], overwrite=True)
"""


@pytest.mark.parametrize("has_group", [True, False])
def test_what_an_earlier_start_has_committed_is_not_written_again_under_the_same_names(worlds, has_group):
    options = "" if has_group else f", ranks=(here.rank, here.size), store={AGENT_STORE}"
    before, names = None, []
    for value in (1.0, 7.0):
        world = worlds.start(2, AGAIN.format(options=options, value=value), has_group=has_group, after=before)
        assert [one.saves[0].get("status") for one in world.ended()] == ["committed"] * 2
        before, state = world, open_run(worlds.root).load(1)
        assert torch.equal(state["whole"], torch.full((300, 1000), value))
        for rank in (0, 1):
            assert torch.equal(state["own"][rank], torch.full((300, 1000), value + rank))
        names.append({*run_of(worlds.root).manifest(1).own_names})
    assert names[0].isdisjoint(names[1])


# One rank counts another number of them.
SIZES = """
with open_run(here.root, ranks=(here.rank, {sizes}[here.rank]), store={store}) as ckpt:
    if here.rank == 1:
        here.save(ckpt, {{"whole": numbered(3)}}, 1)
        here.say("told")
    else:
        ckpt._ranks.meeting.token()  # it has come
        here.hear("told")
        here.tell(ckpt.steps())
"""


@pytest.mark.parametrize("sizes", [[2, 3], [3, 2]])
def test_ranks_that_count_each_other_differently_commit_nothing(worlds, sizes):
    first, second = worlds.run(2, SIZES.format(sizes=sizes, store=AGENT_STORE), has_group=False)

    assert second.saves[0]["error"] == "PeerFailedError"
    assert (
        f"rank 0 counts {sizes[0]} ranks, but rank 1 counts {sizes[1]}; start all ranks again"
        in second.saves[0]["text"]
    )
    assert first.told == [[]]


# A disk without locks, or a store: nothing tells the new world that the old one lives.
STALLED = """
from pathlib import Path
from racing import until
from async_ckpt.core.storage.local import LocalStorage
LocalStorage.hold = lambda *_: lambda: None
with open_run(here.root) as ckpt:
    for step in (1, 2):
        here.save(ckpt, small(step), step)
    if here.rank == 0:
        here.at("{point}", lambda: (here.say("stalled"), until(Path("{go}").exists)), step=10)
    here.save(ckpt, small(10), 10)
    here.save(ckpt, small(11), 11)
"""
NEW_WORLD = """
from async_ckpt.core.storage.local import LocalStorage
LocalStorage.hold = lambda *_: lambda: None
with open_run(here.root) as ckpt:
    state = small(0)
    here.tell(ckpt.restore(state))
    for step in (3, 4):
        here.save(ckpt, state, step)
    {then}
    for step in (5, 6):
        here.save(ckpt, state, step)
"""


# Rank 0 sleeps between its manifest and its look for later starts.
SLEEPS_AFTER_ITS_MANIFEST = """
from pathlib import Path
from racing import until
from async_ckpt.core.storage.local import LocalStorage
from async_ckpt.core.runs.run import Run
LocalStorage.hold = lambda *_: lambda: None
look = Run.look_again
def sleepy(self, manifest):
    if manifest.step == 10:
        here.say(f"asleep{{here.rank}}")
        until(Path({go!r}).exists)
    look(self, manifest)
Run.look_again = sleepy
with open_run(here.root) as ckpt:
    for step in (1, 2):
        here.save(ckpt, small(step), step)
    here.save(ckpt, small(10), 10)
"""
SEES_OR_NOT = """
from async_ckpt.core.storage.local import LocalStorage
LocalStorage.hold = lambda *_: lambda: None
with open_run(here.root, on_rollback="retire") as ckpt:
    ckpt.restore(small(0), step={base})
    here.save(ckpt, small(3), {base} + 1, **({{"overwrite": True}} if {base} == 1 else {{}}))
"""


@pytest.mark.parametrize("base", [1, 2, 10])
def test_no_two_ranks_contradict_each_other_where_a_new_world_comes_after_the_manifest(worlds, tmp_path, base):
    go = tmp_path / "go"
    old = worlds.start(2, SLEEPS_AFTER_ITS_MANIFEST.format(go=str(go)))
    old.wait_for("asleep0")
    new = worlds.run(2, SEES_OR_NOT.format(base=base))
    go.touch()
    ended = old.ended()

    assert [save.get("status") for one in new for save in one.saves] == ["committed"] * 2
    assert [one.saves[2].get("status") for one in ended] == ["committed"] * 2  # the new world has seen the step


@pytest.mark.parametrize("point", ["receipt", "manifest"])
def test_a_world_that_wakes_after_another_has_gone_on_commits_nothing_that_counts(worlds, tmp_path, point):
    go, woken = tmp_path / "go", tmp_path / "woken"
    old = worlds.start(2, STALLED.format(point=point, go=go))
    old.wait_for("stalled")
    waits = "from pathlib import Path; from racing import until; here.meet('half'); here.say('half'); "
    new = worlds.start(2, NEW_WORLD.format(then=waits + f"until(Path({str(woken)!r}).exists)"))
    new.wait_for("half")
    go.touch()
    ended = old.ended()
    woken.touch()

    assert [save.get("status") for one in new.ended() for save in one.saves] == ["committed"] * 8
    assert ended[0].saves[2]["error"] == "RunTakenError"
    assert f"process {new.children[0].pid} on" in ended[0].saves[2]["text"]
    assert ended[0].saves[3]["error"] == "RunTakenError"
    if point == "receipt":  # else the other rank may have seen the manifest
        assert ended[1].saves[2]["error"] == "PeerFailedError"
        assert "rank 0: RunTakenError" in ended[1].saves[2]["text"]
    with open_run(worlds.root) as ckpt:
        assert ckpt.steps() == [1, 2, 3, 4, 5, 6]
